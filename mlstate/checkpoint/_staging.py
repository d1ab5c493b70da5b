"""Memory for copies of a state that is saved while it changes; public through `mlstate.checkpoint`.

The copies are made by the core. Here is who has the memory, for how long, and how much of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _core
from .._common.set_module import set_module

_NOTHING = np.empty(0, np.uint8)  # made now: giving memory back must not need any


@set_module("mlstate.checkpoint")
class Staging:
    """Memory that `save_async` copies arrays to, kept for the next save.

    Memory that the system has not given yet costs more to touch for the first time than to
    copy to: allocated beforehand, a save blocks for about as long as a memcpy takes.

    Parameters
    ----------
    nbytes : int
        Bytes; those of the state hold all of it.

    Raises
    ------
    ValueError
        `nbytes` is negative.
    MemoryError
        There is not so much.

    Notes
    -----
    One save at a time uses it: `save_async` raises `ValueError` if another save does. Only a
    `CheckpointManager` waits. The memory is given back when nothing refers to it any more.

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
        if not hasattr(nbytes, "__index__"):
            raise TypeError(f"nbytes must be an int, got {type(nbytes).__name__}")
        if nbytes < 0:
            raise ValueError(f"nbytes must be 0 or more, got {nbytes}")
        self._users: dict[str, object] = {}  # the save that uses the memory
        self._memory = np.empty(nbytes, np.uint8)
        _core.memory_touch(self._memory)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self._memory.nbytes

    def __repr__(self) -> str:
        return f"Staging({self.nbytes})"

    def _begin(self, user: object) -> None:
        """Reserve the memory for a save, until `_end`."""
        if self._users.setdefault("save", user) is not user:  # atomic: one thread gets it
            raise ValueError("this Staging is in use by another save: wait for that one first")

    def _end(self, user: object) -> None:
        """End the use by a save; do nothing if another one has the memory."""
        if self._users.get("save") is user:
            self._free()
            self._users.clear()

    def _free(self) -> None:
        """Give memory back that is not kept."""

    def _take(self, wanted: int) -> Any:
        """Memory of `wanted` bytes, or of as many as there are."""
        return self._memory[:wanted]


class OwnStaging(Staging):
    """Memory of as many bytes as a save needs; `kept` for the next, or given back."""

    def __init__(self, *, kept: bool) -> None:
        super().__init__(0)
        self._kept = kept

    def _free(self) -> None:
        if not self._kept:
            self._memory = _NOTHING

    def _take(self, wanted: int) -> Any:
        if self.nbytes != wanted:  # what is kept is within the budget, too
            self._memory = _NOTHING  # first: never both at once
            self._memory = np.empty(wanted, np.uint8)
        return self._memory
