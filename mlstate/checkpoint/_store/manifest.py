"""``manifest.json``: its members, checksum and limits; what a damaged one raises."""

from __future__ import annotations

import json
import os
import re
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _core
from ..._common.store_error import format_error
from ...errors import FormatError
from .._folder.names import MANIFEST, NEWER

if TYPE_CHECKING:
    from .weight_files import WeightFiles

FORMAT = "mlstate.manifest"
VERSION = 2
NEWER_VERSION = 3  # of a manifest with values that readers of version 2 do not know
_START = b'{"checksum":"00000000"'
_MOST_BYTES = 256 << 20  # of a manifest
_MOST_RANKS = 1 << 24
_INT64 = (1 << 63) - 1
_GENERATION = re.compile(r"[0-9a-f]{16}\Z", re.ASCII)
_CRCS = re.compile(r"(?:[0-9a-f]{8})*\Z", re.ASCII)
_MOST_DEPTH = 128  # of nested arrays and objects, so that recursive readers are safe
_STATE_KINDS = ("state", "model", "optimizer", "tree")
_MOST_GROUPS = 32  # MLS_PATTERN_GROUPS


class IndexRecord(NamedTuple):
    """The manifest's record of one rank's index."""

    path: str
    bytes: int
    crc32c: str
    shards: int
    data_bytes: int


class Pattern(NamedTuple):
    """Ranks whose indexes list the same tensors in the same groups."""

    ranks: list[int]
    parts: list[list[int]]  # for each group, the part that each of the ranks stores


class Manifest(NamedTuple):
    """A root: the description of the state, and the records of the ranks' indexes."""

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
    states: dict[str, dict[str, Any]] | None = None  # kinds of the named states
    quantization_config: dict[str, Any] | None = None  # how codes of the model are meant
    exclude: list[str] | None = None  # patterns of values that the save left out
    weights: WeightFiles | None = None  # of a Hugging Face folder, which has no manifest file


def time_text(seconds: float) -> str:
    """Return a time, in seconds since 1970, in the manifest's form."""
    import datetime

    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def foreign_manifest(generation: str, changed: float, **content: Any) -> Manifest:
    """Return a manifest that describes files of another program, without a step.

    `changed`: time of their last change. `content`: the other members.
    """
    members = {"step": None, "sequence": 1, "world_size": 1, "created": time_text(changed)}
    return Manifest(generation, **{**members, **content})


def build(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest: JSON with its checksum.

    Raises ValueError for a number that JSON cannot hold.
    """
    indexes = manifest.indexes
    version = NEWER_VERSION if _has_newer_values(manifest) else VERSION
    content = {"format": FORMAT, "format_version": version, **manifest._asdict()}
    del content["weights"]
    content["indexes"] = {
        "bytes": [record.bytes for record in indexes],
        "crc32c": "".join(record.crc32c for record in indexes),
        "shards": [record.shards for record in indexes],
        "data_bytes": [record.data_bytes for record in indexes],
    }
    for name in ("states", "quantization_config", "exclude"):
        if content[name] is None:
            del content[name]
    if manifest.patterns is None:
        del content["patterns"]
    else:
        content["patterns"] = [pattern._asdict() for pattern in manifest.patterns]
    members = (
        f'"{name}": {json.dumps(value, allow_nan=False, ensure_ascii=False)}'
        for name, value in content.items()
    )
    return _core.json_checksum_set(_START + b",\n" + ",\n".join(members).encode() + b"\n}\n")


def _has_newer_values(manifest: Manifest) -> bool:
    """Return whether a nested value or an optimizer's group has a form that version 2 lacks."""
    kinds = [manifest.optimizer or {}, *(manifest.states or {}).values()]
    groups = [group for kind in kinds for group in kind.get("param_groups", ())]
    forms = [form for group in groups for form in group.values() if isinstance(form, dict)]
    return manifest.exclude is not None or any(NEWER in each for each in (*kinds, *groups, *forms))


class _WrongError(Exception):
    """A problem with a manifest, as text."""


def _member(
    members: dict[str, Any],
    name: str,
    kind: type | tuple[type, ...],
    least: int | None = None,
    most: int = _INT64,
    pattern: re.Pattern[str] | None = None,
) -> Any:
    """Return the member `name` of a JSON object; raise `_WrongError` if it is missing or wrong.

    `kind`: its type; bool is not an int here. `least`, `most`: range of an int; None has no range.
    `pattern`: of a str.
    """
    if name not in members:
        raise _WrongError(f'"{name}" is missing')
    value = members[name]
    is_kind = isinstance(value, kind) and not isinstance(value, bool)
    if not is_kind:
        raise _WrongError(f'"{name}" is of the wrong type')
    if least is not None and value is not None and not least <= value <= most:
        raise _WrongError(f'"{name}" is {value}, not from {least} to {most}')
    if pattern is not None and not pattern.match(value):
        raise _WrongError(f'"{name}" is {value[:80]!r}')
    return value


def _kind(members: dict[str, Any], name: str, kinds: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the member `name`, the description of a state; None if the state was not saved.

    `kinds`: the values that its own member "kind" may have; another one raises `_WrongError`.
    """
    value = _member(members, name, (dict, type(None)))
    if value is not None and _member(value, "kind", str) not in kinds:
        raise _WrongError(f'"{name}" has an unknown kind: {value["kind"]!r}')
    return value  # type: ignore[no-any-return]


def _states(members: dict[str, Any]) -> dict[str, dict[str, Any]] | None:
    """Return the descriptions of the named states by name; None if the manifest has none.

    `members`: the manifest's JSON object. Raises `_WrongError` if one is invalid.
    """
    if "states" not in members:
        return None
    listed = _member(members, "states", dict)
    for name, kind in listed.items():
        is_kind = isinstance(kind, dict) and kind.get("kind") in _STATE_KINDS
        if not (is_kind or _kind(listed, name, _STATE_KINDS)) or not name or "/" in name:
            raise _WrongError(f'"states" has an invalid entry {name[:80]!r}')
        if "ranks" in kind:
            _member(kind, "ranks", int, 1, _MOST_RANKS)
    return dict(listed)


def _numbers(values: Any, name: str, count: int, least: int = 0) -> list[int]:
    """Return `values` if they are a list of `count` ints from `least` on, else raise `_WrongError`.

    `name`: of the member, for the error.
    """
    if not isinstance(values, list) or len(values) != count:
        raise _WrongError(f'"{name}" must be a list of {count} numbers')
    if not {int}.issuperset(map(type, values)):
        raise _WrongError(f'"{name}" must have integers only')
    if values and not least <= min(values) <= max(values) <= _INT64:
        raise _WrongError(f'"{name}" must be from {least} to {_INT64}')
    return values


def _indexes(members: dict[str, Any], generation: str, world_size: int) -> tuple[IndexRecord, ...]:
    """Return each rank's record of its index file: path, size, checksum, counts.

    `members`: the manifest's JSON object, for `world_size` ranks. `generation` is in the paths.
    Raises `_WrongError` if a list is invalid or has not one item for each rank.
    """
    listed = _member(members, "indexes", dict)
    crcs: str = _member(listed, "crc32c", str, pattern=_CRCS)
    if len(crcs) != 8 * world_size:
        raise _WrongError(f'"crc32c" has {len(crcs)} digits for {world_size} ranks')
    return tuple(
        map(
            IndexRecord,
            [f"index/{generation}.{rank}.json" for rank in range(world_size)],
            _numbers(_member(listed, "bytes", list), "bytes", world_size, 1),
            [crcs[at : at + 8] for at in range(0, len(crcs), 8)],
            _numbers(_member(listed, "shards", list), "shards", world_size),
            _numbers(_member(listed, "data_bytes", list), "data_bytes", world_size),
        )
    )


def _patterns(members: dict[str, Any], world_size: int) -> tuple[Pattern, ...] | None:
    """Return the groups of ranks whose indexes are alike; None if the manifest has no groups.

    `members`: the manifest's JSON object. Each of the `world_size` ranks is in one group. Raises
    `_WrongError` if the groups are invalid.
    """
    if "patterns" not in members:
        return None
    patterns = []
    for value in _member(members, "patterns", list):
        if not isinstance(value, dict):
            raise _WrongError('"patterns" must have objects only')
        ranks, parts = _member(value, "ranks", list), _member(value, "parts", list)
        if len(parts) > _MOST_GROUPS:
            raise _WrongError(f'"parts" has {len(parts)} groups, more than {_MOST_GROUPS}')
        ranks = _numbers(ranks, "ranks", len(ranks))
        patterns.append(Pattern(ranks, [_numbers(each, "parts", len(ranks)) for each in parts]))
    ranks = sorted(chain.from_iterable(pattern.ranks for pattern in patterns))
    if ranks != list(range(world_size)):
        raise _WrongError(f'"patterns" must have each of {world_size} ranks once')
    return tuple(patterns)


def _patterns_of_names(members: dict[str, Any]) -> list[str] | None:
    """Return the patterns of values that the save left out; None without the member."""
    patterns = _member(members, "exclude", list) if "exclude" in members else None
    if patterns is not None and not {str}.issuperset(map(type, patterns)):
        raise _WrongError('"exclude" must have strings only')
    return patterns


def _read(document: Any) -> Manifest:
    """Return the manifest in the parsed JSON `document`; raise `_WrongError` if invalid.

    The error names the first invalid member.
    """
    if not isinstance(document, dict):
        raise _WrongError("the text is not a JSON object")
    if _member(document, "format", str) != FORMAT:
        raise _WrongError(f'"format" is not "{FORMAT}"')
    version = _member(document, "format_version", int, 1)
    if version not in (VERSION, NEWER_VERSION):
        raise _WrongError(
            f"its format version is {version}, but this mlstate reads only {VERSION} and "
            f"{NEWER_VERSION}"
        )
    generation = _member(document, "generation", str, pattern=_GENERATION)
    world_size = _member(document, "world_size", int, 1, _MOST_RANKS)
    return Manifest(
        generation=generation,
        sequence=_member(document, "sequence", int, 1),
        created=_member(document, "created", str),
        writer=_member(document, "writer", str),
        step=_member(document, "step", (int, type(None)), 0),
        world_size=world_size,
        model=_kind(document, "model", ("state", "model")),
        optimizer=_kind(document, "optimizer", ("state", "optimizer")),
        metadata=_member(document, "metadata", dict),
        indexes=_indexes(document, generation, world_size),
        patterns=_patterns(document, world_size),
        states=_states(document),
        quantization_config=(
            _member(document, "quantization_config", dict)
            if "quantization_config" in document
            else None
        ),
        exclude=_patterns_of_names(document),
    )


def parse(data: bytes, path: str = MANIFEST) -> Manifest:
    """Return the manifest in the bytes `data`; raise FormatError or ChecksumError if invalid.

    `path`: for errors. A RecursionError means that the caller's stack is nearly full, not that the
    manifest is bad.
    """
    try:
        if len(data) > _MOST_BYTES:
            raise _WrongError(f"it is {len(data)} bytes long, more than {_MOST_BYTES}")
        _core.json_checksum_check(data, path)
        _core.json_check(data, _MOST_DEPTH, path)
        return _read(json.loads(data))
    except FormatError as broken:  # raised by the core, which does not know the path
        place = "" if broken.offset is None else f"byte {broken.offset}: "
        broken.args = (f"{path}: {place}{broken}",)
        raise
    except (_WrongError, ValueError) as reason:
        raise format_error(f"{path}: not a valid manifest: {reason}", path) from None


def build_checked(manifest: Manifest, folder: str) -> tuple[bytes, Manifest]:
    """Return the bytes of a manifest, and the manifest as readers will parse it.

    `folder`: path for the error if they would not.
    """
    data = build(manifest)
    return data, parse(data, os.path.join(folder, MANIFEST))
