"""`diff_sources`: compares two checkpoints or files by section and batch, for ``mlstate diff``."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.arrays import copy_of
from .._common.batches import batches_of
from .._common.scales import codes_of
from .._sharding.layout import Layout, Shard
from ..errors import CheckpointWarning
from ..state import diff
from ..state._diff import StateDiff, diff_states, join_diffs
from ._checkpoint.checkpoint import TensorRecord
from ._convert.lightning import as_folder
from ._diff import Settings, diff_settings, list_entries, name_entries
from ._folder.names import SECTIONS
from ._load.arguments import check_request
from ._load.loader import Loader
from ._options import LOAD_DEFAULTS
from ._sections import OPTIMIZER, STATES
from ._sources.indexed import IndexedSource
from ._sources.whole import WholeSource
from ._states.restore import load_trees
from ._store.chosen_names import chosen_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .._common.callback import CountedProgress, Progress
    from .._common.report import Table
    from .._types import NDArray
    from ._sources.protocol import Source

_SECTIONS = ("model", "optimizer", "states")
_BATCH_BYTES = 64 << 20  # of tensors that must be assembled in memory
_BATCH_TENSORS = 1024
_WHOLE = (None, 0, 0)  # the cutting of whole tensors


def _is_comparable(array: Any) -> bool:
    """Return whether arrays like this can be compared; no sparse or quantized ones can."""
    try:
        # at most one element, also of an array without dimensions: the comparison shall be fast
        element = array[None][(slice(1),) * (array.ndim + 1)]
        diff({"": element}, {"": copy_of(element)})
        return array.nbytes >= 0  # type: ignore[no-any-return]
    except Exception:  # of any library
        return False


class Side:
    """The names, sizes and settings of one path, whose tensors are read when they are compared.

    They are mapped if possible: sharded, sparse or compressed ones take memory. Nested values of
    named states are in memory.
    """

    def __init__(self, source: Source, *, verify: bool = False) -> None:
        """Read what lists the tensors. Warns of nested values that cannot be compared.

        `verify`: compare all bytes with checksums; tensors are not mapped then.
        """
        self.path, self._source = source.path, source
        is_folder = isinstance(source, IndexedSource) and source.files.folder.is_local
        self._mmap = is_folder and not verify
        if isinstance(source, WholeSource):
            source.parts.refuse_unreadable()
        elif source.format != "mlstate":
            source.begin(None, None)
        manifest, kinds = source.manifest, source.manifest.states or {}
        self.step = manifest.step
        labels = {name: f"states[{name!r}]" for name in kinds}
        self.nested = nested = self._nested_values(labels)  # named states that are nested values
        records = [*map(TensorRecord._make, source.index.tensors())]
        # dtypes and shapes by name, of the model, the optimizer, and the states
        facts: list[dict[str, Any]] = [
            {each.key: (each.dtype, each.shape) for each in records if each.section == section}
            for section in SECTIONS
        ]
        # quantized weights with scales, by section; optimizers have none
        self.codes = [codes_of(each) if n != OPTIMIZER else {} for n, each in enumerate(facts)]
        # records of tensors that are read later, and arrays and numbers in nested values
        self.entries: list[dict[str, Any]] = [{}, {}, {}]
        for record in records:
            section = SECTIONS.index(record.section)
            if section != STATES or record.key.partition("/")[0] not in nested:
                self.entries[section][record.key] = record
        self.entries[STATES] |= self._comparable(nested)
        # of the optimizers in each section, by prefix of their names
        self.settings = [
            {"": self._settings("model", manifest.model)},
            {"": self._settings("optimizer", manifest.optimizer)},
            {f"{name}/": self._settings(labels[name], kinds[name]) for name in kinds},
        ]

    def _nested_values(self, labels: Mapping[str, str]) -> dict[str, Any]:
        """Return the named states that are nested values, in memory; `labels`: of all, by name."""
        source, kinds = self._source, self._source.manifest.states or {}
        values = {n: source.saved[label] for n, label in labels.items() if label in source.saved}
        stored = [n for n, kind in kinds.items() if kind["kind"] == "tree" and n not in values]
        if isinstance(source, IndexedSource) and stored:
            opened = IndexedSource(source.files, source.root, source.manifest)
            loader = Loader(check_request({**LOAD_DEFAULTS}), opened, takes_deltas=True)
            values |= load_trees(loader, stored)
        return values

    def _comparable(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return arrays and numbers in nested values by name; warn of values of other kinds."""
        nested = [*list_entries((), values)] if values else []
        arrays = name_entries(nested, lambda keys: "/".join(map(str, keys)))
        refused = [key for key, array in arrays.items() if not _is_comparable(array)]
        if refused:
            text = f"{self.path}: these values cannot be compared: {', '.join(refused)}"
            warnings.warn(text, CheckpointWarning, stacklevel=2)
        return {key: array for key, array in arrays.items() if key not in refused}

    def _settings(self, label: str, kind: Mapping[str, Any] | None) -> Settings | None:
        """Return the settings of a state, in memory or as the manifest describes it."""
        if label in self._source.saved:
            return Settings.of(self._source.saved[label])
        if kind is None or kind["kind"] != "optimizer":
            return None
        return Settings(kind.get("param_groups") or (), kind.get("learning_rate", 0.0))

    def nbytes(self, section: int, key: str) -> int:
        """Return the bytes of a tensor; 0 if it does not exist."""
        return int(getattr(self.entries[section].get(key), "nbytes", 0))

    def total_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(entry.nbytes for entries in self.entries for entry in entries.values())

    def memory(self, section: int, key: str) -> int:
        """Return the bytes of memory that a tensor takes; 0 if it is mapped, or in memory."""
        entry = self.entries[section].get(key)
        if not isinstance(entry, TensorRecord):
            return 0
        is_mapped = self._mmap and entry.shards == 1 and not (entry.sparse_shards or entry.codec)
        return 0 if is_mapped else entry.nbytes

    def arrays(self, section: int, keys: list[str]) -> dict[str, NDArray]:
        """Return the existing tensors among `keys`, by name: mapped if possible."""
        entries = {key: self.entries[section][key] for key in keys if key in self.entries[section]}
        stored = [key for key, entry in entries.items() if isinstance(entry, TensorRecord)]
        # elements that differ because of damage are reported as different
        read = self._source.read(section, stored, _WHOLE, verify=not self._mmap, mmap=self._mmap)
        return {**entries, **read}

    def cut(self, section: int, key: str, parts: int, index: int) -> Shard:
        """Return one of `parts` flat parts of a stored tensor, which is verified."""
        layout, shape = Layout.flat(parts), self.entries[section][key].shape
        cuts = (layout.steps, index, parts)
        array = self._source.read(section, [key], cuts, verify=True)[key]
        return Shard(array, layout, index, shape=shape)

    def is_stored(self, section: int, key: str) -> bool:
        """Return whether an entry is a tensor that is read later, and no nested value."""
        return isinstance(self.entries[section][key], TensorRecord)

    def batches(self, section: int, keys: list[str], most: int) -> Iterator[list[str]]:
        """Yield names in batches that take at most `most` bytes of memory; a larger one alone."""
        return batches_of(keys, lambda key: self.memory(section, key), most, _BATCH_TENSORS)


class SourceDiff(NamedTuple):
    """The differences of two sources, by section."""

    sides: tuple[Side, Side]
    sections: dict[str, StateDiff]

    @property
    def identical(self) -> bool:
        """Whether no section differs."""
        return all(difference.identical for difference in self.sections.values())

    def tables(self) -> Iterator[Table]:
        """Yield a table for each section, without those that both sides lack."""
        for number, (name, difference) in enumerate(self.sections.items()):
            if any(side.entries[number] for side in self.sides) or not difference.identical:
                table = difference._table()
                table.lines = [f"{name}: {line}" for line in table.lines]
                yield table

    def data(self) -> dict[str, Any]:
        """Return the differences as JSON values."""
        sides = zip(("first", "second"), self.sides, strict=True)
        return {
            "identical": self.identical,
            **{name: {"path": side.path, "step": side.step} for name, side in sides},
            **{name: _data_of(difference) for name, difference in self.sections.items()},
        }


def _data_of(difference: StateDiff) -> dict[str, Any]:
    """Return the differences of one section as JSON values.

    An infinite or NaN number becomes None, which JSON can express.
    """

    def finite(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    data = {"identical": difference.identical, **difference._asdict()}
    for kind in ("shapes", "dtypes"):
        data[kind] = [{"name": name, "first": a, "second": b} for name, a, b in data[kind]]
    data["changes"] = [
        {name: finite(value) for name, value in change._asdict().items()}
        for change in difference.changes
    ]
    return data


def _batches(section: int, sides: Sequence[Side], keys: list[str]) -> Iterator[list[str]]:
    """Yield names of both sides in a section, in batches whose tensors fit the memory.

    The tensors of a batch take at most `_BATCH_BYTES` of memory; a larger one is alone.
    """

    def memory(key: str) -> int:
        return sum(side.memory(section, key) for side in sides)

    return batches_of(keys, memory, _BATCH_BYTES, _BATCH_TENSORS)


def _compare_section(
    section: int, sides: Sequence[Side], keys: list[str], progress: Progress, **tolerance: float
) -> StateDiff:
    """Return the differences of the tensors `keys` of one section, compared batch by batch.

    `progress`: called with bytes of the first side, or None.
    """
    total = StateDiff([], [], [], [], [], unchanged=0)
    codes = {key for side in sides for key in side.codes[section]}
    for batch in _batches(section, sides, keys):
        first, second = (side.arrays(section, batch) for side in sides)
        total = join_diffs(total, diff_states(first, second, codes=codes, **tolerance))
        if progress is not None:
            progress(sum(sides[0].nbytes(section, key) for key in batch))
    return total


def diff_sources(
    first: Source,
    second: Source,
    names: list[str] | None,
    progress: CountedProgress,
    **tolerance: float,
) -> SourceDiff:
    """Compare two sources; a file of Lightning is read with all its states.

    `names`: patterns of tensors; None: all, and settings of optimizers that differ are listed too.
    `tolerance`: `rtol` and `atol`. Raises if a pattern matches no name of any section.
    """
    first, second = (
        as_folder(source, exact=False) if source.format == "lightning" else source
        for source in (first, second)
    )

    def compare() -> SourceDiff:
        sides = Side(first), Side(second)
        listed = [[*left | right] for left, right in zip(*(s.entries for s in sides), strict=True)]
        _, chosen = chosen_names(listed, names, "")
        with progress(sides[0].total_bytes) as report:
            sections = [
                _compare_section(n, sides, keys, report, **tolerance)
                for n, keys in enumerate(chosen)
            ]
        if names is None:
            settings = zip(*(side.settings for side in sides), strict=True)
            changed = [diff_settings(left, right, **tolerance) for left, right in settings]
            sections = [*map(join_diffs, sections, changed)]
        return SourceDiff(sides, dict(zip(_SECTIONS, sections, strict=True)))

    return first.attempt(lambda: second.attempt(compare))
