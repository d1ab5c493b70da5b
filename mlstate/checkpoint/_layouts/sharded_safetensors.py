"""Folders of torch's ``HuggingFaceStorageWriter(save_distributed=True)``: parts in safetensors.

Each rank writes ``shard-0000R-model-00001-of-0000N.safetensors``. The header's text `INFO` has the
position of each part in its tensor. No file has the shape of a whole tensor, so the files of the
last ranks must not be missing.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._safetensors import load_file, load_metadata
from ...state._state_dict import StateDict
from .._files.parts import Parts, Selection
from .entries import malformed, refusal

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ..._types import NDArray
    from .._folder.protocol import Folder

INFO = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_FILE = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors\Z", re.ASCII)


def is_layout(names: Collection[str]) -> bool:
    """Return whether a folder with these names has such files."""
    return any(map(_FILE.match, names))


def _offsets_of(path: Path, texts: Mapping[str, str]) -> dict[str, list[int]]:
    """Return the position of each part in a file, by the tensor's name, from the header's texts."""
    try:
        offsets = {
            name: [int(offset) for offset in entry[_OFFSETS]]
            for name, entry in json.loads(texts[INFO]).items()
        }
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise malformed(path, f"the text {INFO!r} of its header is not one of torch") from None
    if any(offset < 0 for each in offsets.values() for offset in each):
        raise malformed(path, f"the text {INFO!r} of its header has a negative position")
    return offsets


def refuse_part(path: Path, texts: Mapping[str, str]) -> None:
    """Raise CompatibilityError for a file that holds parts of tensors only.

    `texts`: of its header.
    """
    if INFO in texts and (
        _FILE.match(path.name) or any(any(each) for each in _offsets_of(path, texts).values())
    ):
        raise refusal(
            path,
            "holds one rank's parts of tensors, which torch's HuggingFaceStorageWriter wrote: pass "
            "the folder, with the files of all ranks",
        )


def read(folder: Folder, _selection: Selection) -> tuple[Parts, list[str]]:
    """Read the files of all ranks, and join the parts of each tensor.

    Raises FormatError if parts overlap, or if one is missing.
    """
    path = Path(folder.path)
    parts: dict[str, list[tuple[list[int], NDArray]]] = {}
    for name in sorted(filter(_FILE.match, folder.names(""))):
        file = path / name
        # the caller has compared the files with the checksums of `checksum`
        offsets = _offsets_of(file, load_metadata(file, verify=False))
        for tensor, array in load_file(file, mmap=True, verify=False).items():
            start = offsets.get(tensor)
            if start is None or len(start) != array.ndim:
                raise malformed(file, f"its header has no position of {tensor!r}")
            parts.setdefault(tensor, []).append((start, array))
    model = StateDict({name: _joined(path, name, each) for name, each in parts.items()})
    return Parts(model, None, {}, {}), []


def _joined(path: Path, name: str, parts: list[tuple[list[int], Any]]) -> NDArray:
    """Return the whole tensor `name` of parts, each with its position; `path`: for errors."""
    first = parts[0][1]
    if len({(array.dtype, array.ndim) for _, array in parts}) > 1:
        raise malformed(path, f"the parts of {name!r} have different dtypes or numbers of axes")
    ends = [[s + n for s, n in zip(start, array.shape, strict=True)] for start, array in parts]
    shape = tuple(map(max, zip(*ends, strict=True)))
    if math.prod(shape) == sum(array.size for _, array in parts):
        joined, covered = np.empty(shape, first.dtype), np.zeros(shape, bool)
        for (start, array), end in zip(parts, ends, strict=True):
            box = tuple(map(slice, start, end))
            joined[box], covered[box] = array, True
        if covered.all():
            return joined
    text = f"the parts of {name!r} overlap, or do not cover its shape {shape}"
    raise malformed(path, f"{text}: the folder needs the files of all ranks of one save", name)
