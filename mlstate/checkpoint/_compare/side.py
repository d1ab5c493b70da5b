"""`Side`: what a path that `load` takes lists; its tensors are read when somebody needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._common.arrays import copy_of
from ..._common.batches import batches_of
from ..._common.caller import find_caller
from ..._common.scales import codes_of
from ..._sharding.layout import Layout, Shard
from ...state import diff
from .._folder.names import SECTIONS
from .._load.arguments import check_request
from .._load.loader import Loader
from .._options import LOAD_DEFAULTS
from .._records import TensorRecord
from .._sections import OPTIMIZER, STATES
from .._sources.indexed import IndexedSource
from .._sources.whole import WholeSource
from .._states.restore import load_trees
from .diff import Settings, list_entries, name_entries

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..._types import NDArray
    from .._sources.protocol import Source

BATCH_TENSORS = 1024  # of a batch, at most
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
            find_caller().warn(text)
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

    def digests(self, section: int) -> dict[str, tuple[int, int]]:
        """Return the digests that the save has recorded of stored tensors, by name."""
        if not isinstance(self._source, IndexedSource):
            return {}
        recorded = self._source.merged.digests(section)
        entries = self.entries[section]
        return {
            key: recorded[key] for key in recorded if isinstance(entries.get(key), TensorRecord)
        }

    def batches(self, section: int, keys: list[str], most: int) -> Iterator[list[str]]:
        """Yield names in batches that take at most `most` bytes of memory; a larger one alone."""
        return batches_of(keys, lambda key: self.memory(section, key), most, BATCH_TENSORS)
