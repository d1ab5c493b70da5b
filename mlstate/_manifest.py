"""The root of a checkpoint: ``manifest.json``, written sealed and read with suspicion."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from . import _core
from .errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = "mlstate.manifest"
VERSION = 1
_START = b'{"checksum":"00000000"'
_MOST_BYTES = 256 << 20
_MOST_RANKS = 1 << 24
_INT64 = (1 << 63) - 1
MOST_SEQUENCE = _INT64  # of a save
_GENERATION = re.compile(r"[0-9a-f]{16}\Z", re.ASCII)
_CRC = re.compile(r"[0-9a-f]{8}\Z", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)
_NAMES = re.compile(r"(?:[0-9a-f]{8})*\Z", re.ASCII)
_MOST_GROUPS = 32  # MLS_PATTERN_GROUPS


class IndexRecord(NamedTuple):
    """What the manifest says of one rank's index."""

    path: str
    bytes: int
    crc32c: str
    shards: int
    data_bytes: int
    pattern: int | None = None  # what the index lists, apart from which parts
    parts: tuple[int, ...] = ()  # which parts, by the pattern's groups


class Pattern(NamedTuple):
    """What the indexes of some ranks have in common."""

    sha256: str  # of all that they say of their shards but which parts these are
    names: str  # checksums of the tensors' names, and of what is above them


class Ranks:
    """The records of a manifest that was read: columns, since there may be many thousands."""

    def __init__(self, generation: str, columns: tuple[Any, ...]) -> None:
        self._generation = generation
        self._numbers, self._patterns = columns[:4], columns[4]
        self._ends, self._parts = columns[5:]

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[IndexRecord]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, rank: int) -> IndexRecord:
        nbytes, crc, shards, data_bytes = (int(column[rank]) for column in self._numbers)
        record = IndexRecord(
            f"index/{self._generation}.{rank}.json", nbytes, f"{crc:08x}", shards, data_bytes
        )
        if self._patterns is None:
            return record
        begin = int(self._ends[rank - 1]) if rank else 0
        parts = tuple(self._parts[begin : int(self._ends[rank])].tolist())
        return record._replace(pattern=int(self._patterns[rank]), parts=parts)

    def of_pattern(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ranks of a pattern, rising, and a row with the parts of each."""
        ranks = np.flatnonzero(self._patterns == number)
        ends = self._ends[ranks].astype(np.int64)
        groups = len(self[int(ranks[0])].parts) if len(ranks) else 0
        return ranks.astype(np.uint64), self._parts[ends[:, None] - groups + np.arange(groups)]


class Manifest(NamedTuple):
    """A root: what there is besides the indexes, and which they are."""

    generation: str
    sequence: int
    created: str
    writer: str
    step: int | None
    world_size: int
    model: dict[str, Any] | None
    optimizer: dict[str, Any] | None
    metadata: dict[str, Any]
    indexes: tuple[IndexRecord, ...] | Ranks
    patterns: tuple[Pattern, ...] | None = None


def described(record: IndexRecord) -> dict[str, Any]:
    """Return what the manifest says of a rank's index."""
    members = record._asdict()
    if record.pattern is None:
        del members["pattern"], members["parts"]
    return members


def build(manifest: Manifest) -> bytes:
    """Write a manifest as sealed text; TypeError or ValueError for what JSON cannot say."""
    import json

    content = {
        "format": FORMAT,
        "format_version": VERSION,
        **manifest._asdict(),
        "indexes": [described(record) for record in manifest.indexes],
    }
    if manifest.patterns is None:
        del content["patterns"]
    else:
        content["patterns"] = [pattern._asdict() for pattern in manifest.patterns]
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    return _core.seal(_START + b",\n" + text[1:].lstrip().encode() + b"\n")


class _WrongError(Exception):
    """What is wrong, in words."""


def _member(found: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    if name not in found:
        raise _WrongError(f'"{name}" is missing')
    value = found[name]
    if isinstance(value, bool) or not isinstance(value, kind):
        raise _WrongError(f'"{name}" is of the wrong type')
    return value


def _number(found: dict[str, Any], name: str, least: int, most: int = _INT64) -> int:
    value = _member(found, name, int)
    if not least <= value <= most:
        raise _WrongError(f'"{name}" is {value}, not from {least} to {most}')
    return int(value)


def _matching(found: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = _member(found, name, str)
    if not pattern.match(value):
        raise _WrongError(f'"{name}" is {value[:80]!r}')
    return str(value)


def _kind(found: dict[str, Any], name: str, kinds: tuple[str, ...]) -> dict[str, Any] | None:
    value = _member(found, name, (dict, type(None)))
    if value is not None and _member(value, "kind", str) not in kinds:
        raise _WrongError(f'"{name}" is of a kind that is not known: {value["kind"]!r}')
    return value  # type: ignore[no-any-return]


def _patterns(found: dict[str, Any]) -> tuple[Pattern, ...] | None:
    if "patterns" not in found:
        return None
    patterns = []
    for value in _member(found, "patterns", list):
        if not isinstance(value, dict):
            raise _WrongError('"patterns" holds what is no object')
        digest = _matching(value, "sha256", _SHA256)
        patterns.append(Pattern(digest, _matching(value, "names", _NAMES)))
    return tuple(patterns)


def _check_parts(value: dict[str, Any], patterns: int, groups: dict[int, int]) -> None:
    """`groups`: how many parts ranks of a pattern have, as far as they were seen."""
    parts = _member(value, "parts", list)
    if len(parts) > _MOST_GROUPS:
        raise _WrongError(f'"parts" has {len(parts)} of them, and {_MOST_GROUPS} are the most')
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part <= _INT64:
            raise _WrongError('"parts" holds what is no number of a part')
    pattern = _number(value, "pattern", 0, patterns - 1)
    if groups.setdefault(pattern, len(parts)) != len(parts):
        raise _WrongError('"parts" are other ones than those of the pattern')


def _check_index(
    value: Any, generation: str, rank: int, patterns: int | None, groups: dict[int, int]
) -> None:
    if not isinstance(value, dict):
        raise _WrongError('"indexes" holds what is no object')
    path = _member(value, "path", str)
    if path != f"index/{generation}.{rank}.json":
        raise _WrongError(f"the index of rank {rank} has the path {path[:80]!r}")
    _number(value, "bytes", 1)
    _matching(value, "crc32c", _CRC)
    _number(value, "shards", 0)
    _number(value, "data_bytes", 0)
    if patterns is not None:
        _check_parts(value, patterns, groups)


def _refuse_indexes(listed: list[Any], generation: str, patterns: int | None) -> NoReturn:
    """Say what the core found to be wrong: slowly, one rank after the other."""
    groups: dict[int, int] = {}
    for rank, value in enumerate(listed):
        _check_index(value, generation, rank, patterns, groups)
    raise _WrongError('"indexes" is not as it should be')


def _read(found: Any, columns: tuple[Any, ...] | None) -> Manifest:
    """Understand the text's object, whose "indexes" were read before: `columns`."""
    if not isinstance(found, dict):
        raise _WrongError("the text is no object")
    if _member(found, "format", str) != FORMAT:
        raise _WrongError(f'"format" is not "{FORMAT}"')
    version = _number(found, "format_version", 1)
    if version != VERSION:
        raise _WrongError(f"its format version is {version}, and this mlstate reads {VERSION}")
    generation = _matching(found, "generation", _GENERATION)
    world_size = _number(found, "world_size", 1, _MOST_RANKS)
    listed = _member(found, "indexes", list)
    count = len(listed if columns is None else columns[0])
    if count != world_size:
        raise _WrongError(f"there are {count} indexes for {world_size} ranks")
    step = _member(found, "step", (int, type(None)))
    patterns = _patterns(found)
    if columns is None:
        _refuse_indexes(listed, generation, None if patterns is None else len(patterns))
    records = Ranks(generation, columns)
    return Manifest(
        generation=generation,
        sequence=_number(found, "sequence", 1),
        created=_member(found, "created", str),
        writer=_member(found, "writer", str),
        step=None if step is None else _number(found, "step", 0),
        world_size=world_size,
        model=_kind(found, "model", ("state", "model")),
        optimizer=_kind(found, "optimizer", ("state", "optimizer")),
        metadata=_member(found, "metadata", dict),
        indexes=records,
        patterns=patterns,
    )


def parse(data: bytes, path: Any = "manifest.json") -> Manifest:
    """Read a manifest; FormatError or ChecksumError, naming `path`, for what is none.

    RecursionError says nothing of the manifest, but that the caller's stack is nearly full.
    """
    import json

    try:
        if len(data) > _MOST_BYTES:
            raise _WrongError(f"it is {len(data)} bytes long, and {_MOST_BYTES} are the most")
        _core.seal_check(data, path)
        listed = _core.manifest_indexes(data, path)  # and all of it is JSON as docs/format.md says
        columns = None
        if listed is not None:  # the rest is small
            (begin, end), columns = listed[:2], listed[2:]
            data = data[:begin] + b"[]" + data[end:]
        return _read(json.loads(data), columns)
    except FormatError as broken:  # of the core, which knows no files
        place = "" if broken.offset is None else f"byte {broken.offset}: "
        broken.args = (f"{path}: {place}{broken}",)
        raise
    except (_WrongError, ValueError) as reason:
        error = FormatError(f"{path}: no manifest of a checkpoint: {reason}")
        error.path = path
        raise error from None
