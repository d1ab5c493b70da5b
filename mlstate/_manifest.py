"""The root of a checkpoint: ``manifest.json``, written sealed and read with suspicion."""

from __future__ import annotations

import re
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core
from ._state_kind import describe
from .errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMAT = "mlstate.manifest"
VERSION = 1
_START = b'{"checksum":"00000000"'
_MOST_BYTES = 256 << 20
_MOST_RANKS = 1 << 24
_INT64 = (1 << 63) - 1
_GENERATION = re.compile(r"[0-9a-f]{16}\Z", re.ASCII)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
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
    indexes: tuple[IndexRecord, ...]
    patterns: tuple[Pattern, ...] | None = None


def kind_of(state: Any) -> dict[str, Any] | None:
    """Which class a state is of, and the attributes of that class."""
    if state is None:
        return None
    import json

    text = describe(state)
    return {"kind": "state"} if text is None else json.loads(text)


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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _WrongError(f'"{name[:80]}" appears twice in one object')
            seen.add(name)
    return made


def _no_constant(text: str) -> Any:
    raise _WrongError(f"{text} is no JSON")


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


def _parts(value: dict[str, Any], patterns: int) -> tuple[int, tuple[int, ...]]:
    parts = _member(value, "parts", list)
    if len(parts) > _MOST_GROUPS:
        raise _WrongError(f'"parts" has {len(parts)} of them, and {_MOST_GROUPS} are the most')
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part <= _INT64:
            raise _WrongError('"parts" holds what is no number of a part')
    return _number(value, "pattern", 0, patterns - 1), tuple(parts)


def _index(value: Any, generation: str, rank: int, patterns: int | None) -> IndexRecord:
    if not isinstance(value, dict):
        raise _WrongError('"indexes" holds what is no object')
    path = _member(value, "path", str)
    if path != f"index/{generation}.{rank}.json":
        raise _WrongError(f"the index of rank {rank} has the path {path[:80]!r}")
    return IndexRecord(
        path,
        _number(value, "bytes", 1),
        _matching(value, "crc32c", _CRC),
        _number(value, "shards", 0),
        _number(value, "data_bytes", 0),
        *(() if patterns is None else _parts(value, patterns)),
    )


def _all(kind: type, values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= {kind}


def _in_order(
    values: list[Any], generation: str, patterns: int | None
) -> tuple[IndexRecord, ...] | None:
    """Make the records of all ranks, if nothing is wrong with any; `_index` says what is.

    Column by column: there may be many thousands, and a rank of a large world reads them all.
    """
    names = IndexRecord._fields if patterns is not None else IndexRecord._fields[:5]
    try:
        rows = list(map(itemgetter(*names), values))
    except (KeyError, TypeError):
        return None
    paths, sizes, crcs, shards, held, *more = (list(column) for column in zip(*rows, strict=True))
    good = (
        paths == [f"index/{generation}.{rank}.json" for rank in range(len(rows))]
        and _all(int, chain(sizes, shards, held))
        and min(sizes) >= 1
        and min(chain(shards, held)) >= 0
        and max(chain(sizes, shards, held)) <= _INT64
        and _all(str, crcs)
        and all(map(_CRC.match, crcs))
    )
    if good and patterns is not None:
        numbers, parts = more
        good = _all(int, numbers) and min(numbers) >= 0 and max(numbers) < patterns
        good = good and _all(list, parts) and max(map(len, parts)) <= _MOST_GROUPS
        listed = list(chain.from_iterable(parts)) if good else []
        good = good and _all(int, listed) and min(listed, default=0) >= 0
        good = good and max(listed, default=0) <= _INT64
        more = [numbers, list(map(tuple, parts)) if good else []]
    return tuple(map(IndexRecord, paths, sizes, crcs, shards, held, *more)) if good else None


def _read(found: Any) -> Manifest:
    if not isinstance(found, dict):
        raise _WrongError("the text is no object")
    if _member(found, "format", str) != FORMAT:
        raise _WrongError(f'"format" is not "{FORMAT}"')
    version = _number(found, "format_version", 1)
    if version != VERSION:
        raise _WrongError(f"its format version is {version}, and this mlstate reads {VERSION}")
    generation = _matching(found, "generation", _GENERATION)
    world_size = _number(found, "world_size", 1, _MOST_RANKS)
    indexes = _member(found, "indexes", list)
    if len(indexes) != world_size:
        raise _WrongError(f"there are {len(indexes)} indexes for {world_size} ranks")
    step = _member(found, "step", (int, type(None)))
    patterns = _patterns(found)
    known = None if patterns is None else len(patterns)
    records = _in_order(indexes, generation, known) or tuple(
        _index(value, generation, rank, known) for rank, value in enumerate(indexes)
    )
    groups: dict[int | None, int] = {}
    for rank, record in enumerate(records):
        if groups.setdefault(record.pattern, len(record.parts)) != len(record.parts):
            raise _WrongError(f"rank {rank} has other parts than those of its pattern")
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
    """Read a manifest; FormatError or ChecksumError, naming `path`, for what is none."""
    import json

    try:
        if len(data) > _MOST_BYTES:
            raise _WrongError(f"it is {len(data)} bytes long, and {_MOST_BYTES} are the most")
        _core.seal_check(data, path)
        found = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
        if _SURROGATE.search(data):
            json.dumps(found, ensure_ascii=False).encode()  # half of a pair is no UTF-8
        return _read(found)
    except FormatError:
        raise
    except (_WrongError, ValueError, RecursionError) as reason:
        error = FormatError(f"{path}: no manifest of a checkpoint: {reason}")
        error.path = path
        raise error from None
