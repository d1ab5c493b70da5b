"""The rule for a target that exists: replaced, replaced with a warning, or refused.

Every writer asks here, before it writes. A target is free if it does not exist, or is an empty
folder for a folder, or an empty file for a file. Otherwise, by `overwrite`:

None    A target that the same function wrote, with the same tensor names and shapes, is replaced; a
        damaged one too, with a warning. Anything else is refused.
True    A target of a kind that mlstate reads is replaced, but no files of other programs.
False   Refused.

No writer replaces a folder by a file, or a file by a folder. docs/files.md has the table of
writers.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .. import _core
from ..errors import FormatError
from .arguments import FLAG
from .caller import find_caller
from .file_kinds import START_BYTES, FileKind, kind_of_file
from .regular_file import open_regular
from .store_error import os_errors, store_error
from .text import shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..errors import StoreError

Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"

_OWN_MARK = re.compile(rb'"(?:[01]\.)?mlstate\.header\.crc32c"')
KEPT = "overwrite=False keeps it"
_MARK_BYTES = 1 << 16  # of a damaged file in which the mark is looked for


class Existing(NamedTuple):
    """What exists at a target."""

    kind: str  # such as "safetensors"
    shapes: Callable[[], Shapes] | None = None  # of its tensors; None: another program wrote it
    damage: str = ""  # why it cannot be read
    foreign: str = ""  # why no writer may replace it, to follow "it exists already, and "


def check_overwrite(overwrite: object) -> bool | None:
    """Return ``overwrite=``; raise TypeError unless it is True, False or None."""
    if overwrite is None:
        return None
    if not isinstance(overwrite, FLAG):
        text = f"overwrite must be True, False or None, got {type(overwrite).__name__}"
        raise TypeError(text)
    return bool(overwrite)


def refusal(path: str, reason: str, *, is_foreign: bool = False) -> StoreError:
    """Return the StoreError (EEXIST) for a target; `reason` follows "it exists already, and ".

    `is_foreign`: no writer replaces it.
    """
    effect = "does not replace it: choose another path" if is_foreign else "replaces it"
    text = f"it exists already, and {reason}; overwrite=True {effect}"
    return store_error(OSError(errno.EEXIST, text), "cannot write the target", path)


def shapes_of(state: Mapping[str, Any]) -> Shapes:
    """Return the shapes of the arrays of a state by name; () of an object without a shape."""
    return {name: tuple(getattr(value, "shape", ())) for name, value in state.items()}


def difference_of(old: Shapes, new: Shapes) -> str:
    """Return the first difference of the tensors of a target and of its replacement; "" if none."""
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            return f"has {shorten(repr(name), 80)}, which the new state lacks"
        if name not in old:
            return f"lacks {shorten(repr(name), 80)}, which the new state has"
        if tuple(old[name]) != tuple(new[name]):
            shapes = f"{tuple(old[name])}, not {tuple(new[name])}"
            return f"its {shorten(repr(name), 80)} has the shape {shapes}"
    return ""


def require_free(
    path: str,
    existing: Existing | None,
    overwrite: bool | None,
    kind: str,
    shapes: Callable[[], Shapes] | None = None,
) -> None:
    """Raise StoreError (EEXIST) unless a writer may replace what exists; warn of a damaged target.

    `kind`: of the new target. `shapes`: of its tensors; None: these are not known yet, and not
    compared.
    """
    overwrite = check_overwrite(overwrite)
    if existing is None:
        return
    if existing.foreign:
        raise refusal(path, existing.foreign, is_foreign=True)
    if overwrite is False:
        raise refusal(path, KEPT)
    if overwrite:
        return
    if existing.damage and existing.shapes is None:
        raise refusal(path, f"is damaged: {existing.damage}")
    if existing.kind != kind:
        raise refusal(path, f"is of the kind {existing.kind}, not {kind}")
    if existing.shapes is None:
        raise refusal(path, "is of another program")
    if shapes is None:
        return
    if existing.damage:
        find_caller().warn(damage_warning(existing.damage))
        return
    try:
        text = difference_of(existing.shapes(), shapes())
    except FormatError as error:  # of a format that is read as a whole
        text = f"is damaged: {error}"
    if text:
        raise refusal(path, text)


def damage_warning(damage: object) -> str:
    """Return the text of the warning that a damaged target is replaced."""
    return f"the existing checkpoint is damaged and will be replaced: {damage}"


# ---- files ----


def file_at(path: str | bytes) -> Existing | None:
    """Return what exists at the path of a file to write; None if it is free.

    Also None for devices, which every writer of files refuses. Tensors of other kinds than
    safetensors are not known here. Raises StoreError.
    """
    path = os.fsdecode(path)
    try:
        info = os.stat(path)
    except OSError:  # no file, or the writer raises it
        return None
    if stat.S_ISDIR(info.st_mode):
        return Existing("folder", foreign="is a folder, not a file")
    if not stat.S_ISREG(info.st_mode) or not info.st_size:
        return None
    with os_errors("cannot read the target", path):
        kind = kind_of_file(path)
        if kind.name in ("safetensors", "cut short"):
            return _safetensors_at(path, kind)
    if kind.sentence and kind.name != "damaged zip":
        return Existing(kind.name, foreign="is not a file of tensors that mlstate reads")
    return Existing(kind.name)


def _safetensors_at(path: str, kind: FileKind) -> Existing:
    """Return what a file that begins as a safetensors file, or that ends too early, is."""
    with open_regular(path) as file:
        start = file.read(START_BYTES)
        if start[8:9] != b"{":
            return Existing(kind.name, damage=kind.sentence)
        length = int.from_bytes(start[:8], "little")
        is_own = _OWN_MARK.search(start + file.read(max(length, _MARK_BYTES))) is not None
    shapes: dict[str, tuple[int, ...]] = {}
    damage = ""
    try:
        index = _core.MergedIndex.of_files(
            os.path.dirname(os.path.abspath(path)), (os.path.basename(path),)
        )
        shapes = {key: shape for _, key, _, _, _, shape, *_ in index.tensors()}
    except FormatError as error:
        damage = str(error)
    return Existing("safetensors", (lambda: shapes) if is_own else None, damage)
