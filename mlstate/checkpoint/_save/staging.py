"""`Staging`: memory for copies of `save_async`, kept from one save to the next.

The core makes the copies. This module keeps the memory from one save to the next;
`SaveJob.memory` decides how much of it a save may use.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import _core
from ..._common.arguments import check_int
from ..._common.set_module import set_module

if TYPE_CHECKING:
    from .job import SaveJob

_NO_MEMORY = np.empty(0, np.uint8)  # created here, because freeing memory must not allocate


@set_module("mlstate.checkpoint")
class Staging:
    """Memory for the copies of `save_async`, kept for the next save.

    The first write to new memory costs more than the copy itself. With memory allocated and
    touched beforehand, a save blocks for about as long as a memcpy takes.

    Parameters
    ----------
    nbytes : int
        Bytes; as many as the state has, to hold all of it.

    Raises
    ------
    ValueError
        `nbytes` is negative.
    MemoryError
        Not enough memory.

    Notes
    -----
    Only one save at a time can use it: `save_async` raises `ValueError` if another save does;
    only a `CheckpointManager` waits. The memory is freed when nothing refers to it any more.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import Staging, save_async
    >>> state = {"w": np.ones((256, 4), np.float32)}  # 4 KiB
    >>> staging = Staging(4096)
    >>> handle = save_async(tempfile.mkdtemp() + "/ckpt", state, staging=staging)
    >>> handle.staged()
    >>> handle.wait().nbytes, staging.nbytes
    (4096, 4096)
    """

    def __init__(self, nbytes: int) -> None:
        """Allocate `nbytes` of staging memory and touch its pages, so that no save has to."""
        nbytes = check_int("nbytes", nbytes, 0, sys.maxsize)
        self._users: dict[str, SaveJob] = {}  # "save": the one that uses the memory, if any
        self._memory = np.empty(nbytes, np.uint8)
        _core.memory_touch(self._memory)

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return self._memory.nbytes

    def __repr__(self) -> str:
        return f"Staging({self.nbytes})"

    def _begin(self, user: SaveJob) -> None:
        """Reserve the memory for the save `user` until `_end`; raise ValueError if it is in use."""
        if self._users.setdefault("save", user) is not user:  # atomic: one thread gets it
            raise ValueError("this Staging is in use by another save: wait for that one first")

    def _end(self, user: SaveJob) -> None:
        """End the use by a save; do nothing if another save uses the memory."""
        if self._users.get("save") is user:
            self._free()
            self._users.clear()

    def _free(self) -> None:
        """Free memory that is not kept for the next save."""

    def _take(self, nbytes: int) -> Any:
        """Return memory of `nbytes` bytes, or all of it if it is smaller; `_begin` came before."""
        return self._memory[:nbytes]


class OwnStaging(Staging):
    """Memory of the size that a save needs, which is allocated by the save.

    `keeps_memory`: keep it for the next save instead of freeing it.
    """

    def __init__(self, *, keeps_memory: bool) -> None:
        super().__init__(0)
        self._keeps_memory = keeps_memory

    def _free(self) -> None:
        if not self._keeps_memory:
            self._memory = _NO_MEMORY

    def _take(self, nbytes: int) -> Any:
        """Return new memory of `nbytes` bytes, or the kept memory if it has this size."""
        if self.nbytes != nbytes:  # kept memory must also respect the budget
            self._memory = _NO_MEMORY  # free first, so that both never exist together
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory


def staging_of(staging: object) -> Staging:
    """Return the argument `staging`; if it is None, memory for one save."""
    if staging is None:
        return OwnStaging(keeps_memory=False)
    if not isinstance(staging, Staging):
        raise TypeError(f"staging must be a Staging, got {type(staging).__name__}")
    return staging
