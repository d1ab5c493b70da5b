"""Metadata of versions: lineage, chain, kinds; which old ones stay; published parts and names.

A version is a checkpoint. Its metadata have the member ``"mlstate.follow"``:

    lineage     random identifier of one publisher's uninterrupted sequence of versions
    kind        "anchor": the model, "delta": changes since the version before, or "both"
    chain       the kept versions of the lineage before this one, oldest first, each as a list of
                sequence, generation, step and kind

The state ``follow`` is a nested value, one for each rank that published: a table with a row for
each part, stored by columns, and the two streams of all deltas, each concatenated.
csrc/core/follow/change_table.h has the columns. Versions of the earlier form have, by the names of
the tensors, a dict with the members that `_decode_change` reads.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial
from itertools import repeat
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _core
from .._common.arrays import is_torch, refuse_unstorable
from .._common.dtypes import NAMES, name_of, numpy_dtype
from .._common.store_error import format_error
from .._sharding.layout import Layout, Shard
from ..checkpoint._folder.names import MANIFEST
from ..checkpoint._load.arguments import LoadRequest
from ..checkpoint._load.loader import DELTA, KEY, Loader
from ..checkpoint._options import LOAD_DEFAULTS
from ..checkpoint._save.content import states_of
from ..checkpoint._sources.indexed import IndexedSource
from ..checkpoint._states.restore import load_trees
from ..errors import CompatibilityError, FormatError
from ._delta import Delta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .._sharding.layout import Steps
    from .._types import NDArray
    from ..checkpoint._store.checkpoint_files import CheckpointFiles
    from ..checkpoint._store.manifest import Manifest

STATE = "follow"  # name of the state
_GENERATION = re.compile(r"[0-9a-f]{16}\Z", re.ASCII)
KINDS = ("anchor", DELTA, "both")


class Version(NamedTuple):
    """A published version."""

    sequence: int  # of the root in its folder; 1 more than the version before it has
    generation: str  # of the root: 16 hexadecimal digits
    step: int
    kind: str  # of KINDS

    @property
    def has_model(self) -> bool:
        """Whether the version can be loaded without another one."""
        return self.kind != DELTA

    @property
    def has_delta(self) -> bool:
        """Whether the version can be reached from the version before."""
        return self.kind != "anchor"

    @property
    def root(self) -> str:
        """Path of the root in the folder."""
        return f"roots/{self.sequence:08d}.{self.generation}.json"


class Lineage(NamedTuple):
    """The versions of one lineage that the newest of them names, itself last."""

    name: str
    versions: tuple[Version, ...]


def trim_chain(versions: Sequence[Version], keep: int | None) -> tuple[Version, ...]:
    """Return the newest `keep` of `versions`, and older ones back to an anchor.

    None keeps the two newest anchors and all versions from the older of these on.
    """
    anchors = [number for number, version in enumerate(versions) if version.has_model]
    if keep is None:
        first = anchors[-2] if len(anchors) > 1 else 0
    else:
        first = max((number for number in anchors if number <= len(versions) - keep), default=0)
    return tuple(versions[first:])


def lineage_of(manifest: Manifest, path: str) -> Lineage:
    """Return the lineage that ends with the version of a root.

    `manifest`: the root, whose metadata are untrusted. `path`: of the folder, for errors. Raises
    FormatError if it is not a version.
    """
    facts = manifest.metadata.get(KEY)
    try:
        if not isinstance(facts, dict):
            raise TypeError("it is a checkpoint that no Publisher wrote")
        newest = (manifest.sequence, manifest.generation, manifest.step, facts["kind"])
        rows = [*facts["chain"], newest]
        versions = tuple(Version(*row) for row in rows)
        for version in versions:
            types = [type(value) for value in version]
            is_valid = types == [int, str, int, str] and _GENERATION.match(version.generation)
            if not is_valid or version.kind not in KINDS:
                raise TypeError(f"it names a version {version!r}")
        sequences = [version.sequence for version in versions]
        if not isinstance(facts["lineage"], str) or sequences != sorted(set(sequences)):
            raise ValueError("its chain is not in order")
        return Lineage(facts["lineage"], versions)
    except (KeyError, TypeError, ValueError) as error:
        raise format_error(f"{path}: not a published version: {error}", path) from None


def metadata_of(lineage: str, kind: str, chain: Iterable[Version]) -> dict[str, Any]:
    """Return the metadata of a new version; `chain`: the kept versions before it, oldest first."""
    return {KEY: {"lineage": lineage, "kind": kind, "chain": [list(each) for each in chain]}}


# ---- parts of tensors ----


_ARRAYS = (np.ndarray, np.generic)


@lru_cache(maxsize=256)
def layout_of(steps: Steps) -> Layout:
    """Return the layout with these steps, the same object each time: it is compared quickly."""
    return Layout(steps)


WHOLE = layout_of(())


class Part(NamedTuple):
    """A part of a tensor; `array` has its elements, or is None if they are not here."""

    array: Any
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    layout: Layout
    number: int  # of the part in the layout

    @property
    def elements(self) -> int:
        """Elements of the part."""
        return prod(self.layout.shape(self.shape, self.number))

    def has_place_of(self, other: Part) -> bool:
        """Return whether both are the same part of a tensor; layouts of one part are equal."""
        same_layout = self.layout.parts == other.layout.parts == 1 or self.layout == other.layout
        return same_layout and self.number == other.number


class Change(NamedTuple):
    """A published part and its change; no delta if the version has only the model."""

    part: Part
    crc32c: int
    delta: Delta | None

    @property
    def required_delta(self) -> Delta:
        """The delta; raises FormatError if there is none."""
        if self.delta is None:
            raise FormatError("a version lacks the delta of a tensor")
        return self.delta


# From a tuple of all fields, without a call of Python code.
_new: Any = tuple.__new__
new_part: Callable[[tuple[Any, ...]], Part] = partial(_new, Part)
new_delta: Callable[[tuple[Any, ...]], Delta] = partial(_new, Delta)
new_change: Callable[[tuple[Any, ...]], Change] = partial(_new, Change)


def part_of(name: str, value: Any) -> Part:
    """Return the part of the tensor `name` that `value` has: a `Shard`, or an array with all of it.

    Its array is over the same memory. Raises CompatibilityError for a dtype that is not supported,
    and a byte-swapped array.
    """
    shard = value if isinstance(value, Shard) else None
    array = value if shard is None else shard.array
    if type(array) is not np.ndarray and is_torch(array):
        array = array.detach()
    dtype = name_of(array.dtype)
    reason = ""
    if dtype not in NAMES:
        reason = f"dtype {dtype} is not supported"
    elif isinstance(array, _ARRAYS) and not array.dtype.isnative:
        reason = f"an array of {array.dtype} is byte-swapped: convert it"
    if reason:
        raise named_error(name, reason)
    if shard is None:
        return new_part((array, dtype, tuple(array.shape), WHOLE, 0))
    return Part(array, dtype, shard.shape, shard.layout, shard.index)


def named_error(name: str, reason: str) -> CompatibilityError:
    """Return the CompatibilityError for the tensor `name`, with the reason after the name."""
    return CompatibilityError(f"{name!r}: {reason}", name=name)


def values_of(model: Any, ranks: int) -> dict[str, Any]:
    """Return the arrays, tensors and shards of a model by name, over its memory.

    `ranks`: number of ranks that publish the model. Raises TypeError for a model with other values,
    and an error for a value that cannot be stored.
    """
    state, _, (not_tensors, _) = states_of(model, None, ranks)
    if not_tensors:
        name = next(iter(not_tensors))
        raise TypeError(f"{name!r} is not a tensor, and a version has tensors only")
    if state is None:
        raise TypeError("the model is None")
    values = dict(state)
    for name, value in values.items():
        array = value.array if isinstance(value, Shard) else value
        if not isinstance(array, _ARRAYS) and not is_torch(array):
            text = f"must be a NumPy array, a torch tensor or a Shard, got {type(array).__name__}"
            raise TypeError(f"{name!r} {text}")
    refuse_unstorable(values, every=True)
    return values


# ---- the nested value of a rank ----


def encode_changes(changes: Mapping[str, Change], rank: int) -> dict[str, Any]:
    """Return the state ``follow`` of a rank: the table of its `changes`, by tensor name."""
    parts = [change.part for change in changes.values()]
    deltas = [change.delta for change in changes.values()]
    names = [name.encode() for name in changes]
    dtypes = {dtype: number for number, dtype in enumerate(dict.fromkeys([p.dtype for p in parts]))}
    steps_of_parts = [part.layout.steps for part in parts]
    layouts = {steps: number for number, steps in enumerate(dict.fromkeys(steps_of_parts))}
    gaps = [_NO_BYTES if delta is None else delta.gaps.view(np.uint8) for delta in deltas]
    values = [_NO_BYTES if delta is None else delta.values.view(np.uint8) for delta in deltas]
    columns = [
        [len(name) for name in names],
        [dtypes[part.dtype] for part in parts],
        [len(part.shape) for part in parts],
        [layouts[steps] for steps in steps_of_parts],
        [part.number for part in parts],
        [change.crc32c for change in changes.values()],
        [0 if delta is None else delta.gaps.itemsize for delta in deltas],
        [stream.size for stream in gaps],
        [stream.size for stream in values],
    ]
    shapes = [size for part in parts for size in part.shape]
    text = b"".join(names)
    words = np.frombuffer(text + bytes(-len(text) % 8), np.uint64)
    table = np.concatenate([*np.array(columns, np.uint64), np.array(shapes, np.uint64), words])
    return {
        "rank": rank,
        "dtypes": list(dtypes),
        "layouts": [[list(step) for step in steps] for steps in layouts],
        "rows": len(parts),
        "lengths": len(shapes),
        "name_bytes": len(text),
        # makes the text of each version another one: a save does not write an unchanged array, and
        # the version would need the file of an earlier one; so the table is one array, too
        "crc32c": _core.array_crc32c(table, 0),
        "table": table,
        "gaps": np.concatenate([_NO_BYTES, *gaps]),
        "values": np.concatenate([_NO_BYTES, *values]),
    }


_NO_BYTES = np.zeros(0, np.uint8)
_COLUMNS = 9  # of a table


def _decode_table(table: Any) -> Iterable[tuple[str, Change]]:
    """Return names and changes of the rows of a table of `encode_changes`; it is untrusted.

    Raises FormatError, KeyError, TypeError or ValueError if it is malformed.
    """
    dtypes = tuple(table["dtypes"])
    for dtype in dtypes:
        if dtype not in NAMES:
            raise ValueError(f"dtype {dtype} is not supported")
    layouts = [layout_of(tuple((axis, parts) for axis, parts in each)) for each in table["layouts"]]
    rows, lengths, name_bytes = table["rows"], table["lengths"], table["name_bytes"]
    words = _vector(table, "table")
    size = _COLUMNS * rows + lengths - (-name_bytes // 8)
    if min(rows, lengths, name_bytes) < 0 or words.size != size:
        raise ValueError(f"the table has {words.size} numbers instead of {size}")
    if _core.array_crc32c(words, 0) != table["crc32c"]:
        raise ValueError("the table has another CRC32C than its description")
    columns, axes, text = np.split(words, [_COLUMNS * rows, _COLUMNS * rows + lengths])
    columns, text = columns.reshape(_COLUMNS, rows), text.view(np.uint8)[:name_bytes]
    steps = tuple(layout.steps for layout in layouts)
    names, shapes, elements, gaps, values = _core.change_table(
        dtypes, steps, columns, text, axes, table["gaps"], table["values"]
    )
    _, dtype, _, layout, numbers, crc32c, *_ = columns.tolist()
    facts = (map(dtypes.__getitem__, dtype), shapes, map(layouts.__getitem__, layout), numbers)
    streams = zip(elements, gaps, values, crc32c, strict=True)
    deltas = [None if row[1] is None else new_delta(row) for row in streams]
    parts = map(new_part, zip(repeat(None), *facts, strict=False))
    changes = map(new_change, zip(parts, crc32c, deltas, strict=True))
    return zip(names, changes, strict=True)


def _decode_change(facts: Any) -> Change:
    """Return the change of a tensor in a version of the earlier form; it is untrusted.

    Raises KeyError, TypeError or ValueError if it is malformed.
    """
    layout = layout_of(tuple((axis, parts) for axis, parts in facts["layout"]))
    shape = tuple(int(size) for size in facts["shape"])
    part = Part(None, facts["dtype"], shape, layout, int(facts["part"]))
    if part.dtype not in NAMES:
        raise ValueError(f"dtype {part.dtype} is not supported")
    elements = part.elements  # raises for a missing part
    delta = None
    if facts["gaps"] is not None:
        gaps, values = (_vector(facts, name) for name in ("gaps", "values"))
        if values.dtype != np.uint8 or gaps.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"gaps are {gaps.dtype} and values {values.dtype}")
        values = values.view(numpy_dtype(part.dtype))
        delta = Delta(elements, gaps, values, int(facts["crc32c"]))
    return Change(part, int(facts["crc32c"]), delta)


def _vector(facts: Any, name: str) -> NDArray:
    """Return the one-dimensional array `name` of `facts`; raise TypeError for another value."""
    array: NDArray = facts[name]
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        raise TypeError(f"{name} are not a vector")
    return array


def open_version(files: CheckpointFiles, root: str, manifest: Manifest) -> Loader:
    """Return a loader of the whole checkpoint at `root`, whose manifest was read already."""
    request = LoadRequest(
        names=None,
        rank=None,
        world_size=None,
        cutting=(None, 0, 0),  # whole tensors
        by_target=False,
        cast=False,
        dtype="",
        options=LOAD_DEFAULTS,
    )
    return Loader(request, IndexedSource(files, root, manifest), takes_deltas=True)


def read_version(files: CheckpointFiles, version: Version, newest: Manifest) -> Loader:
    """Return a loader of a version of the lineage that `newest`, the newest root, names.

    Raises FileNotFoundError if the version was deleted meanwhile.
    """
    is_newest = version.generation == newest.generation
    root = MANIFEST if is_newest else version.root
    return open_version(files, root, newest if is_newest else files.read_manifest(root))


def read_changes(loader: Loader) -> dict[str, list[Change]]:
    """Return the changes of all published parts, by the names of their tensors.

    The parts of a tensor are sorted by number, and all of them are there. Raises FormatError if
    they are damaged or contradict each other.
    """
    path = loader.folder
    kind = loader.states.get(STATE)
    if kind is None or kind["kind"] != "tree":
        raise format_error(f"{path}: step {loader.manifest.step} is not a version", path)
    value = load_trees(loader, [STATE])[STATE]
    changes: dict[str, list[Change]] = {}
    name = STATE
    try:
        for each in value if isinstance(value, list) else [value]:
            if "table" in each:
                for name, change in _decode_table(each):
                    changes.setdefault(name, []).append(change)
                continue
            for name, facts in each["tensors"].items():
                changes.setdefault(name, []).append(_decode_change(facts))
        for name in changes:
            parts = changes[name]
            if len(parts) != 1 or parts[0].part.layout is not WHOLE:
                _sort_parts(parts)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, FormatError):
            name = error.name or name
        text = f"{path}: step {loader.manifest.step}: {name!r}: {error}"
        raise format_error(text, path) from None
    return changes


def _sort_parts(changes: list[Change]) -> None:
    """Sort the changes of a tensor by the number of the part.

    Raises ValueError unless they are all parts of one tensor, each of them once.
    """
    changes.sort(key=lambda change: change.part.number)
    numbers = [change.part.number for change in changes]
    kinds_of_part = {(c.part.dtype, c.part.shape, c.part.layout.steps) for c in changes}
    is_whole = changes[0].part.layout.parts == len(numbers)
    if len(kinds_of_part) != 1 or not is_whole or numbers != list(range(len(numbers))):
        raise ValueError("the parts are not one tensor")


def empty_model(files: CheckpointFiles) -> dict[str, Any]:
    """Return arrays of zeros by name, with the shapes and dtypes of the newest version."""

    def read(manifest: Manifest) -> dict[str, Any]:  # again if the root is replaced meanwhile
        changes = read_changes(open_version(files, MANIFEST, manifest))
        parts = {name: each[0].part for name, each in changes.items()}
        return {name: np.zeros(part.shape, numpy_dtype(part.dtype)) for name, part in parts.items()}

    return files.read_root(MANIFEST, read)


def refuse_other_names(names: Iterable[str], published: Iterable[str], path: str) -> None:
    """Raise CompatibilityError unless `names`, of a follower, are the published names.

    `path`: of the folder, for the error.
    """
    followed, stored = set(names), set(published)
    lacking, extra = stored - followed, followed - stored
    for label, differing in (("lacks", lacking), ("has an unpublished", extra)):
        if differing:
            name = min(differing)
            text = f"{path}: the follower {label} tensor {name!r}"
            raise CompatibilityError(text, name=name, path=path)
