"""Header and verification of one plain safetensors file: altered ranges, without loading it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _core
from ..._common.file_checksums import BLOCK, Change, compare_blocks
from ..._common.local_path import local_folder
from ..._common.regular_file import open_regular
from ..._common.store_error import format_error, os_errors
from ...errors import FormatError
from .._report import Problem, VerifyReport, problem_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..._common.callback import Progress

# By the branch of the metadata that it is in: see csrc/core/safetensors/safetensors.h.
CHECKSUMS = tuple(f"{branch}mlstate.blocks.crc32c" for branch in ("", "0.", "1."))
_DIGITS = 8  # hex digits of one checksum


class FileTensor(NamedTuple):
    """The bytes of one tensor in a file; `offset` counts from the start of the file."""

    key: str
    offset: int
    nbytes: int


class FileHeader(NamedTuple):
    """A file's header: its tensors in file order, and their checksums.

    `digits`: CRC32C of each MiB of each tensor, 8 hex digits each; None without checksums.
    """

    tensors: list[FileTensor]
    digits: str | None

    @property
    def has_checksums(self) -> bool:
        """Whether the file has checksums, that is, `save_file` wrote it."""
        return self.digits is not None


def read_header(path: str, *, verify: bool = True) -> FileHeader:
    """Read the header of a file after the core has validated it; raises as `mlstate.load_file`.

    `verify`: compare the header with its checksum.
    """
    import json

    _core.file_metadata(path, verify)
    try:
        with os_errors("cannot read the file", path), open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            entries: dict[str, Any] = json.loads(file.read(length))
    except ValueError:  # the file was replaced since the core read it
        raise format_error(f"{path}: replaced while it was read; try again", path) from None
    texts = entries.pop("__metadata__", None) or {}
    tensors = []
    for key, entry in entries.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors.append(FileTensor(key, start, end - start))
    digits = next((texts[key] for key in CHECKSUMS if key in texts), None)
    return FileHeader(tensors, digits)


def _blocks_of(header: FileHeader) -> Iterator[tuple[int, int, int, int]]:
    """Yield the blocks of the tensors, as `compare_blocks` takes them."""
    digits = header.digits or ""
    crcs = (int(digits[place : place + _DIGITS], 16) for place in range(0, len(digits), _DIGITS))
    for tensor in header.tensors:
        end = tensor.offset + tensor.nbytes
        for offset in range(tensor.offset, end, BLOCK):
            yield tensor.offset, offset, min(BLOCK, end - offset), next(crcs)


def change_problems(
    kind: str, path: str, changes: list[Change], header: FileHeader | None, text: str
) -> list[Problem]:
    """Return a problem for each change of a file, with the tensor in which it is.

    `header`: of a safetensors file. `text`: for changed bytes.
    """
    keys = {each.offset: each.key for each in header.tensors if each.nbytes} if header else {}
    return [
        Problem(kind, path, keys.get(part), None, 0, offset, length, size or text)
        for part, offset, length, size in changes
    ]


def verify_file(path: str | os.PathLike[str], progress: Progress = None) -> VerifyReport:
    """Read every byte of a plain file, and report bytes that changed since `save_file`.

    Each damaged range of a tensor, or a damaged header, is a problem. `checksums` of the report is
    whether the file has checksums: without them, only its structure was checked. `progress` is
    called with the bytes read since the last call. Raises StoreError if the file cannot be read.
    """
    full_path = local_folder(path)
    report = VerifyReport(full_path, checksums=False)
    name = os.path.basename(full_path)
    try:
        header = read_header(full_path)
        report.checksums = header.has_checksums
        if header.has_checksums:
            with os_errors("cannot read the file", full_path), open_regular(full_path) as file:
                changes = compare_blocks(file, _blocks_of(header), progress)
            text = "the bytes have changed since they were written"
            report.problems = change_problems("altered", name, changes, header, text)
            report.bytes = sum(tensor.nbytes for tensor in header.tensors)
    except FormatError as error:
        report.problems.append(problem_of("header", name, error))
    return report
