"""``mlstate diff``: reads both paths in batches; its JSON and exit status."""

from __future__ import annotations

import argparse
import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.arrays import copy_of
from .._common.scales import codes_of
from .._common.text import printable
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
from ..checkpoint._store.checkpoint_files import TRIES
from ..errors import CheckpointWarning
from ..state import diff
from ..state._diff import StateDiff, diff_states, join_diffs, table_of
from ._common import (
    OPTIONS,
    PATH_HELP,
    STEP_HELP,
    Commands,
    add_command,
    add_options,
    chosen_keys,
    find,
    number_of_step,
    print_json,
    print_table,
)
from ._progress import progress_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .._common.callback import Progress
    from .._types import NDArray
    from ..checkpoint._sources.protocol import Source

__all__ = ["add"]

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
    parser = add_command(commands, "diff", help_text, run_diff, status_1="they differ")
    parser.add_argument("first", help=PATH_HELP)
    parser.add_argument("second", help="the same; may be the same run, for two of its steps")
    for name in ("first", "second"):
        options = {**OPTIONS["--step"], "help": STEP_HELP.format(name)}
        parser.add_argument(f"--{name}-step", **options)
    add_options(parser, "--monitor", "--mode", "--names")
    for option, of in (("--rtol", "the larger element"), ("--atol", "")):
        text = f"tolerance{of and f', times {of}'}: dtypes may differ then"
        parser.add_argument(option, type=float, default=0.0, metavar="X", help=text)


# ---- two sides ----


class _TensorSize(NamedTuple):
    """The bytes of a tensor, and the memory in bytes that it takes: 0 if it is mapped."""

    nbytes: int
    memory: int


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
        self.path = source.path
        self._source = source
        self._mmap = isinstance(source, IndexedSource) and source.files.folder.is_local
        if isinstance(source, WholeSource):
            source.parts.refuse_unreadable()
        elif not getattr(source, "has_index", True):
            source.begin(None, None)
        source.attempt(self._list_tensors)
        self.step, self._generation = source.manifest.step, source.manifest.generation

    def _list_tensors(self) -> None:
        """List the tensors, the nested values, and the values of optimizers."""
        source, manifest = self._source, self._source.manifest
        # by name: of the model, the optimizer, and the states
        self.sizes: list[dict[str, _TensorSize]] = [{}, {}, {}]
        tensors: list[dict[str, Any]] = [{}, {}, {}]  # dtype and shape, by name
        self._values: dict[str, Any] = {}  # arrays and numbers in nested values
        kinds = manifest.states or {}
        labels = {name: f"states[{name!r}]" for name in kinds}
        values = {n: source.saved[label] for n, label in labels.items() if label in source.saved}
        nested = {name for name, kind in kinds.items() if kind["kind"] == "tree" or name in values}
        for record in map(TensorRecord._make, source.index.tensors()):
            section = SECTIONS.index(record.section)
            tensors[section][record.key] = record.dtype, tuple(record.shape)
            if section < STATES or record.key.partition("/")[0] not in nested:
                in_memory = record.shards > 1 or record.sparse_shards or record.codec
                memory = record.nbytes if in_memory or not self._mmap else 0
                self.sizes[section][record.key] = _TensorSize(record.nbytes, memory)
        # quantized weights with scales, by section; optimizers have none
        self.codes = [codes_of(each) if n != OPTIMIZER else {} for n, each in enumerate(tensors)]
        stored = [name for name in kinds if name in nested and name not in values]
        if isinstance(source, IndexedSource) and stored:
            opened = IndexedSource(source.files, source.root, manifest)
            loader = Loader(check_request({**LOAD_DEFAULTS}), opened, takes_deltas=True)
            values |= load_trees(loader, stored)
        refused = []
        entries = [*list_entries((), values)] if values else []
        for key, array in name_entries(entries, lambda keys: "/".join(map(str, keys))).items():
            if _is_comparable(array):
                self._values[key] = array
                self.sizes[STATES][key] = _TensorSize(array.nbytes, 0)
            else:
                refused.append(key)
        if refused:
            text = f"{self.path}: these values cannot be compared: {', '.join(refused)}"
            warnings.warn(text, CheckpointWarning, stacklevel=2)
        named = {f"{name}/": self._settings(labels[name], kinds[name]) for name in kinds}
        # of the optimizers in each section, by prefix of their names
        pairs = (("model", manifest.model), ("optimizer", manifest.optimizer))
        self.settings = [*({"": self._settings(label, kind)} for label, kind in pairs), named]

    def _settings(self, label: str, kind: Mapping[str, Any] | None) -> Settings | None:
        """Return the settings of a state, in memory or as the manifest describes it."""
        if label in self._source.saved:
            return Settings.of(self._source.saved[label])
        if kind is None or kind["kind"] != "optimizer":
            return None
        return Settings(kind.get("param_groups") or (), kind.get("learning_rate", 0.0))

    def is_replaced(self) -> bool:
        """Return whether a writer has replaced the content since it was opened."""
        return isinstance(self._source, IndexedSource) and self._source.reopen(self._generation)

    def size(self, section: int, key: str) -> _TensorSize:
        """Return the size of a tensor; zeros if it does not exist."""
        return self.sizes[section].get(key, _TensorSize(0, 0))

    def arrays(self, section: int, keys: list[str]) -> dict[str, NDArray]:
        """Return the existing tensors among `keys`, by name: mapped if possible."""
        values = self._values if section == STATES else {}
        stored = [key for key in keys if key in self.sizes[section] and key not in values]
        # elements that differ because of damage are reported as different
        read = self._source.read(section, stored, _WHOLE, verify=not self._mmap, mmap=self._mmap)
        return {**read, **{key: values[key] for key in keys if key in values}}


def _side(path: str, step: int | None) -> _Side:
    """Return the object that reads the tensors of one path.

    `step`: of a manager's folder; None: the newest. Raises MLStateError or ValueError for other
    paths.
    """
    source = find(path, step)
    return _Side(as_folder(source, exact=False) if source.format == "lightning" else source)


# ---- comparing ----


def _batches(
    section: int, sides: list[_Side], names: list[str] | None = None
) -> Iterator[list[str]]:
    """Yield the names of both sides in a section, in batches whose tensors fit the memory.

    The tensors of a batch take at most `_BATCH_BYTES` of memory; a larger one is alone. `section`:
    number in `_SECTIONS`. `sides`: the two. `names`: patterns of the user; None: all names. Raises
    if a pattern matches no name of any section.
    """
    every = [list(dict.fromkeys([*sides[0].sizes[s], *sides[1].sizes[s]])) for s in _NUMBERS]
    chosen = chosen_keys(names, every)[section]
    batch: list[str] = []
    batch_bytes = 0
    for key in filter(chosen.__contains__, every[section]):
        more = sum(side.size(section, key).memory for side in sides)
        if batch and (batch_bytes + more > _BATCH_BYTES or len(batch) == _BATCH_TENSORS):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(key)
        batch_bytes += more
    if batch:
        yield batch


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
        part = diff_states(first, second, **tolerance, codes=codes)
        total = join_diffs(total, part)
        if progress is not None:
            progress(sum(sides[0].size(section, key).nbytes for key in batch))
    if arguments.names is None:
        settings = (side.settings[section] for side in sides)
        part = diff_settings(*settings, **tolerance)
        total = join_diffs(total, part)
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


def _compare_all(sides: list[_Side], arguments: argparse.Namespace) -> list[StateDiff]:
    """Return the differences of models, optimizers and named states, in this order.

    `sides`: the two. Shows the progress on the terminal.
    """

    def size() -> int:
        return sum(size.nbytes for sizes in sides[0].sizes for size in sizes.values())

    with progress_of("compare", size) as progress:
        return [_compare_section(section, sides, progress, arguments) for section in _NUMBERS]


def _diff_paths(arguments: argparse.Namespace) -> tuple[list[_Side], list[StateDiff]]:
    """Open and compare both paths; return the sides and their differences by section.

    Starts again, a few times, if a writer replaces one of them meanwhile.
    """
    paths = arguments.first, arguments.second
    steps = arguments.first_step, arguments.second_step
    first, second = (
        (path, number_of_step(path, step, arguments))
        for path, step in zip(paths, steps, strict=True)
    )
    for tries_left in reversed(range(TRIES)):
        sides = [_side(*first), _side(*second)]
        try:
            return sides, _compare_all(sides, arguments)
        except FileNotFoundError:
            if not tries_left or not any(side.is_replaced() for side in sides):
                raise
    raise AssertionError


def run_diff(arguments: argparse.Namespace) -> int:
    """Compare the two paths and print the differences; return 1 if they differ, else 0.

    Sections that both lack are not printed. ``--json`` prints a JSON object instead.
    """
    sides, differences = _diff_paths(arguments)
    identical = all(difference.identical for difference in differences)
    if arguments.json:
        ends = ({"path": side.path, "step": side.step} for side in sides)
        data = {
            "identical": identical,
            **dict(zip(("first", "second"), ends, strict=True)),
            **dict(zip(_SECTIONS, map(_diff_data, differences), strict=True)),
        }
        return print_json(data, 0 if identical else 1)
    for section, (section_name, difference) in enumerate(zip(_SECTIONS, differences, strict=True)):
        if sides[0].sizes[section] or sides[1].sizes[section] or not difference.identical:
            title, headers, rows = table_of(difference)
            print(f"{section_name}: {printable(title)}")
            print_table(headers, rows)
    return 0 if identical else 1
