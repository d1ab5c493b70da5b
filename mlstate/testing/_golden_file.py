"""`assert_digest`: compare the digest of a state with the one in a JSON file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._common.arguments import check_flags
from .._common.atomic_file import Target
from .._common.local_path import local_path
from .._common.store_error import format_error, os_errors
from ..checkpoint._compare.digest import digest
from ..collectives._arguments import optional_group
from ..collectives._consensus import gather_values
from ..errors import FormatError, StoreNotFoundError
from ..state._digest import Digest

if TYPE_CHECKING:
    from ..collectives import ProcessGroup


def assert_digest(
    state: Any,
    path: str | os.PathLike[str],
    *,
    update: bool = False,
    group: ProcessGroup | None = None,
) -> None:
    """Raise AssertionError unless a state has the digest in a file.

    Keep the file in version control: a test then shows any change of bits, on any machine and
    number of ranks.

    Parameters
    ----------
    state : mapping, torch.nn.Module, torch.optim.Optimizer, str or os.PathLike
        A state or a path, as for `mlstate.digest`.
    path : str or os.PathLike
        A JSON file that `update` has written.
    update : bool, default False
        Write the digest to the file, which is replaced atomically, and compare nothing.
    group : ProcessGroup, optional
        The ranks that have the parts of the state; all of them call this. Rank 0 uses the file.

    Raises
    ------
    AssertionError
        The digests differ. The message has a table of the tensors.
    StoreNotFoundError
        The file does not exist.
    FormatError
        The file is not the JSON of a digest, or has another version than this mlstate computes.
    StoreError
        The file cannot be read or written.
    TypeError
        `update` is not a bool.
    CompatibilityError, ChecksumError
        As for `mlstate.digest`.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.testing import assert_digest
    >>> path = tempfile.mkdtemp() + "/golden.json"
    >>> assert_digest({"w": np.arange(3)}, path, update=True)
    >>> assert_digest({"w": np.arange(3)}, path)
    >>> assert_digest({"w": np.arange(3, dtype=np.int32)}, path)
    Traceback (most recent call last):
      ...
    AssertionError: the digest is not the one in .../golden.json; pass update=True to accept it
    1 changed
    tensor  differs  first  second
    w       dtype    int64  int32
    """
    __tracebackhide__ = True
    check_flags(update=update)
    group = optional_group(group)
    current = digest(state, group=group)

    def use_file() -> str:
        if group is not None and group.rank > 0:
            return ""
        return _write(current, path) if update else _read(path)

    text = use_file() if group is None else gather_values(group, "assert_digest", use_file)[0]
    difference = Digest.from_json(text).diff(current)
    if not difference.identical:
        raise AssertionError(
            f"the digest is not the one in {os.fspath(path)}; pass update=True to accept it\n"
            f"{difference}"
        )


def _write(current: Digest, path: str | os.PathLike[str]) -> str:
    """Write a digest to a file, sorted by name; return the text."""
    text = Digest(dict(sorted(current.items()))).to_json()
    with os_errors("cannot write the digest", path):
        Target.of(path).write_content(lambda file: file.write(text.encode()))
    return text


def _read(path: str | os.PathLike[str]) -> str:
    """Return the text of a digest in a file."""
    try:
        with os_errors("cannot read the digest", path):
            text = Path(local_path(path)).read_bytes()
        return Digest.from_json(text).to_json()
    except StoreNotFoundError as error:
        reason = "there is no digest to compare with; pass update=True to write it"
        raise StoreNotFoundError(error.errno, reason, path, path=os.fspath(path)) from None
    except FormatError as error:
        raise format_error(
            f"{os.fspath(path)}: {error}; pass update=True to write it", path
        ) from None
