"""``mlstate diff``: reads both paths in batches; its JSON and exit status."""

from __future__ import annotations

import argparse
import math
import warnings
from typing import TYPE_CHECKING, Any

from .._common.arrays import copy_of
from .._common.batches import batches_of
from .._common.report import Table
from .._common.scales import codes_of
from ..checkpoint._checkpoint.checkpoint import TensorRecord
from ..checkpoint._convert.lightning import as_folder
from ..checkpoint._diff import Settings, diff_settings, list_entries, name_entries
from ..checkpoint._folder.names import SECTIONS
from ..checkpoint._load.arguments import check_request
from ..checkpoint._load.loader import Loader
from ..checkpoint._options import LOAD_DEFAULTS
from ..checkpoint._sections import OPTIMIZER, STATES
from ..checkpoint._sources.indexed import IndexedSource
from ..checkpoint._sources.whole import WholeSource
from ..checkpoint._states.restore import load_trees
from ..errors import CheckpointWarning
from ..state import diff
from ..state._diff import StateDiff, diff_states, join_diffs
from ._common import (
    PATH_HELP,
    Commands,
    add_command,
    choice_of,
    chosen_keys,
    find,
    print_result,
    shared,
    step_usage,
)
from ._progress import progress_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .._common.callback import Progress
    from .._types import NDArray
    from ..checkpoint._sources.open_source import Choice
    from ..checkpoint._sources.protocol import Source

__all__ = ["add"]

_SIDES = ("first", "second")
_SECTIONS = ("model", "optimizer", "states")
_NUMBERS = range(len(_SECTIONS))
_BATCH_BYTES = 64 << 20  # of tensors that must be assembled in memory
_BATCH_TENSORS = 1024
_WHOLE = (None, 0, 0)  # the cutting of whole tensors


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate diff`` to `commands`.

    Parsed arguments have the function of the command as ``run``.
    """
    help_text = "compare two checkpoints or files, tensor by tensor"
    tolerance = {"type": float, "default": 0.0}
    rtol = "tolerance, times the larger element: dtypes may differ then"
    usages = {
        "first": PATH_HELP,
        "second": "the same; may be the same run, for two of its steps",
        **{f"--{side}-step N": step_usage(side) for side in _SIDES},
        **shared("--monitor", "--mode", "--names"),
        "--rtol X": {**tolerance, "help": rtol},
        "--atol X": {**tolerance, "help": "tolerance: dtypes may differ then"},
    }
    add_command(commands, "diff", help_text, run_diff, usages, {1: "they differ"})


# ---- two sides ----


def _is_comparable(array: Any) -> bool:
    """Return whether arrays like this can be compared; no sparse or quantized ones can."""
    try:
        # at most one element, also of an array without dimensions: the comparison shall be fast
        element = array[None][(slice(1),) * (array.ndim + 1)]
        diff({"": element}, {"": copy_of(element)})
        return array.nbytes >= 0  # type: ignore[no-any-return]
    except Exception:  # of any library
        return False


class _Side:
    """The names, sizes and settings of one path, whose tensors are read when they are compared.

    They are mapped if possible: sharded, sparse or compressed ones take memory. Nested values of
    named states are in memory.
    """

    def __init__(self, source: Source) -> None:
        """Read what lists the tensors. Warns of nested values that cannot be compared."""
        self.path, self._source = source.path, source
        self._mmap = isinstance(source, IndexedSource) and source.files.folder.is_local
        if isinstance(source, WholeSource):
            source.parts.refuse_unreadable()
        elif not getattr(source, "has_index", True):
            source.begin(None, None)
        manifest, kinds = source.manifest, source.manifest.states or {}
        self.step = manifest.step
        labels = {name: f"states[{name!r}]" for name in kinds}
        # nested values in memory, and those that are read now
        values = {n: source.saved[label] for n, label in labels.items() if label in source.saved}
        stored = {n for n, kind in kinds.items() if kind["kind"] == "tree" and n not in values}
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
            name = record.key.partition("/")[0] if section == STATES else None
            if name not in values and name not in stored:
                self.entries[section][record.key] = record
        if isinstance(source, IndexedSource) and stored:
            opened = IndexedSource(source.files, source.root, manifest)
            loader = Loader(check_request({**LOAD_DEFAULTS}), opened, takes_deltas=True)
            values |= load_trees(loader, [name for name in kinds if name in stored])
        nested = [*list_entries((), values)] if values else []
        arrays = name_entries(nested, lambda keys: "/".join(map(str, keys)))
        refused = {key: None for key, array in arrays.items() if not _is_comparable(array)}
        if refused:
            text = f"{self.path}: these values cannot be compared: {', '.join(refused)}"
            warnings.warn(text, CheckpointWarning, stacklevel=2)
        self.entries[STATES] |= {key: arrays[key] for key in arrays if key not in refused}
        # of the optimizers in each section, by prefix of their names
        self.settings = [
            {"": self._settings("model", manifest.model)},
            {"": self._settings("optimizer", manifest.optimizer)},
            {f"{name}/": self._settings(labels[name], kinds[name]) for name in kinds},
        ]

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


def _source(path: str, choice: Choice) -> Source:
    """Return the source of one path; a file of Lightning is read with all its states."""
    source = find(path, choice)
    return as_folder(source, exact=False) if source.format == "lightning" else source


# ---- comparing ----


def _batches(
    section: int, sides: list[_Side], names: list[str] | None = None
) -> Iterator[list[str]]:
    """Yield the names of both sides in a section, in batches whose tensors fit the memory.

    The tensors of a batch take at most `_BATCH_BYTES` of memory; a larger one is alone. `section`:
    number in `_SECTIONS`. `sides`: the two. `names`: patterns of the user; None: all names. Raises
    if a pattern matches no name of any section.
    """
    first, second = (side.entries for side in sides)
    every = [list(first[number] | second[number]) for number in _NUMBERS]
    chosen = chosen_keys(names, every)[section]

    def memory(key: str) -> int:
        return sum(side.memory(section, key) for side in sides)

    keys = filter(chosen.__contains__, every[section])
    return batches_of(keys, memory, _BATCH_BYTES, _BATCH_TENSORS)


def _compare_section(
    section: int, sides: list[_Side], progress: Progress, arguments: argparse.Namespace
) -> StateDiff:
    """Return the differences of one section of two sides, compared batch by batch.

    Without names of the user, settings of optimizers that differ are listed too.

    `section`: number in `_SECTIONS`. `progress`: called with bytes of the first side, or None.
    `arguments`: of the command, for tolerances and names.
    """
    total = StateDiff(missing=[], unexpected=[], shapes=[], dtypes=[], changes=[], unchanged=0)
    tolerance = {"rtol": arguments.rtol, "atol": arguments.atol}
    codes = {key for side in sides for key in side.codes[section]}
    for batch in _batches(section, sides, arguments.names):
        first, second = (side.arrays(section, batch) for side in sides)
        total = join_diffs(total, diff_states(first, second, **tolerance, codes=codes))
        if progress is not None:
            progress(sum(sides[0].nbytes(section, key) for key in batch))
    if arguments.names is None:
        settings = (side.settings[section] for side in sides)
        total = join_diffs(total, diff_settings(*settings, **tolerance))
    return total


# ---- output ----


def _diff_data(difference: StateDiff) -> dict[str, Any]:
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


def _lines(sides: list[_Side], differences: list[StateDiff]) -> Iterator[Table]:
    """Yield a table for each section, without those that both sides lack."""
    for section, (name, difference) in enumerate(zip(_SECTIONS, differences, strict=True)):
        if sides[0].entries[section] or sides[1].entries[section] or not difference.identical:
            table = difference._table()
            table.lines[0] = f"{name}: {table.lines[0]}"
            yield table


def run_diff(arguments: argparse.Namespace) -> int:
    """Compare the two paths and print the differences; return 1 if they differ, else 0.

    Sections that both lack are not printed. ``--json`` prints a JSON object instead.
    """
    first, second = (
        _source(getattr(arguments, side), choice_of(arguments, f"{side}_step")) for side in _SIDES
    )

    def compare() -> tuple[list[_Side], list[StateDiff]]:
        """Return both sides, and the differences of models, optimizers and named states."""
        sides = [_Side(first), _Side(second)]
        entries = [entry for entries in sides[0].entries for entry in entries.values()]
        with progress_of("compare", lambda: sum(entry.nbytes for entry in entries)) as progress:
            return sides, [_compare_section(n, sides, progress, arguments) for n in _NUMBERS]

    sides, differences = first.attempt(lambda: second.attempt(compare))
    identical = all(difference.identical for difference in differences)
    data = {
        "identical": identical,
        **{name: {"path": s.path, "step": s.step} for name, s in zip(_SIDES, sides, strict=True)},
        **dict(zip(_SECTIONS, map(_diff_data, differences), strict=True)),
    }
    return print_result(arguments, data, _lines(sides, differences), 0 if identical else 1)
