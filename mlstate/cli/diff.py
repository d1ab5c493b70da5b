"""``mlstate diff``: reads both paths in batches; its JSON and exit status."""

from __future__ import annotations

import argparse
import json
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.arrays import copy_of
from .._common.text import printable
from ..checkpoint._checkpoint.checkpoint import TensorRecord
from ..checkpoint._convert.lightning import read_whole_lightning
from ..checkpoint._convert.read_write import read_parts
from ..checkpoint._diff import Settings, diff_settings, list_entries
from ..checkpoint._folder.names import SECTIONS
from ..checkpoint._sources.indexed import IndexedSource
from ..checkpoint._states.collect import take_states
from ..checkpoint._states.tree import encode
from ..checkpoint._store.checkpoint_files import TRIES
from ..errors import CheckpointWarning
from ..state import diff
from ..state._diff import StateDiff, join_diffs, table_of
from ._common import (
    PATH_HELP,
    Commands,
    add_command,
    add_monitor,
    add_names,
    add_step,
    chosen_keys,
    find,
    number_of_step,
    print_table,
)
from ._progress import progress_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .._types import NDArray
    from ..checkpoint._files.parts import Parts

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
        add_step(parser, f"{name}-step", name)
    add_monitor(parser)
    add_names(parser)
    for option, of in (("--rtol", "the larger element"), ("--atol", "")):
        text = f"tolerance{of and f', times {of}'}: dtypes may differ then"
        parser.add_argument(option, type=float, default=0.0, metavar="X", help=text)


# ---- two sides ----


class _TensorSize(NamedTuple):
    """The bytes of a tensor, and the memory in bytes that it takes: 0 if it is mapped."""

    nbytes: int
    memory: int


def _settings_of(kind: Mapping[str, Any] | None) -> Settings | None:
    """Return the settings of a state that a manifest describes; None unless of an optimizer."""
    if kind is None or kind["kind"] != "optimizer":
        return None
    return Settings(kind.get("param_groups") or (), kind.get("learning_rate", 0.0))


class _Side:
    """The names, sizes and settings of one path; a subclass reads the tensors."""

    step: int | None = None

    def __init__(self, path: str) -> None:
        self.path = path
        # by name: of the model, the optimizer, and the states
        self.sizes: list[dict[str, _TensorSize]] = [{}, {}, {}]
        # of the optimizers in each section, by prefix of their names
        self.settings: list[dict[str, Settings | None]] = [{}, {}, {}]

    def is_replaced(self) -> bool:
        """Return whether a writer has replaced the content since it was opened."""
        return False

    def size(self, section: int, key: str) -> _TensorSize:
        """Return the size of a tensor; zeros if it does not exist."""
        return self.sizes[section].get(key, _TensorSize(0, 0))


class _CheckpointSide(_Side):
    """A checkpoint with mapped tensors; sharded, sparse or compressed ones take memory."""

    def __init__(self, source: IndexedSource) -> None:
        """Read the index of a checkpoint to compare; no tensor is read."""
        super().__init__(source.path)
        self._source = source
        index = source.attempt(lambda: source.index)
        manifest = source.manifest
        self.step, self._generation = manifest.step, manifest.generation
        self._mmap = source.files.folder.is_local
        for record in map(TensorRecord._make, index.tensors()):
            in_memory = record.shards > 1 or record.sparse_shards or record.codec or not self._mmap
            size = _TensorSize(record.nbytes, record.nbytes if in_memory else 0)
            self.sizes[SECTIONS.index(record.section)][record.key] = size
        named = {f"{name}/": _settings_of(kind) for name, kind in (manifest.states or {}).items()}
        self.settings = [{}, {"": _settings_of(manifest.optimizer)}, named]

    def is_replaced(self) -> bool:
        """Return whether a writer has replaced the checkpoint since it was opened."""
        return self._source.reopen(self._generation)

    def arrays(self, section: int, keys: list[str]) -> dict[str, NDArray]:
        """Return the existing tensors among `keys`, by name: mapped if possible."""
        have = [key for key in keys if key in self.sizes[section]]
        # elements that differ because of damage are reported as different
        return self._source.read(section, have, _WHOLE, verify=not self._mmap, mmap=self._mmap)


def _is_comparable(array: Any) -> bool:
    """Return whether arrays like this can be compared; no sparse or quantized ones can."""
    try:
        # at most one element, also of an array without dimensions: the comparison shall be fast
        element = array[None][(slice(1),) * (array.ndim + 1)]
        diff({"": element}, {"": copy_of(element)})
        return array.nbytes >= 0  # type: ignore[no-any-return]
    except Exception:  # of any library
        return False


def _storable_states(states: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    """Return named states without the values that no checkpoint can store.

    The paths of these values are added to `refused`. None replaces those in lists.
    """
    storable = {}
    for name, value in states.items():
        storable[name] = value
        try:
            take_states({name: value}, model=None, ranks=1)
        except Exception:  # of any library
            storable[name] = _storable_value(value, f"states[{name!r}]", refused)
    return storable


def _storable_value(value: Any, path: str, refused: list[str]) -> Any:
    """Return a value without what cannot be stored in it, or None; as `_storable_states`."""
    try:
        encode(value, path)
    except Exception:  # of any library
        if isinstance(value, dict):
            items = {}
            for key, inner in value.items():
                if key is None or type(key) in (str, int, bool):
                    items[key] = _storable_value(inner, f"{path}[{key!r}]", refused)
                else:
                    refused.append(f"{path}[{key!r}]")
            return items
        if isinstance(value, list | tuple):
            return [
                _storable_value(inner, f"{path}[{i}]", refused) for i, inner in enumerate(value)
            ]
        refused.append(path)
        return None
    return value


class _FileSide(_Side):
    """The parts of a format without an index, in memory."""

    def __init__(self, path: str, parts: Parts) -> None:
        """Keep the `parts` that were read from `path`."""
        super().__init__(path)
        self._states = parts.states
        named = {f"{name}/": Settings.of(state) for name, state in parts.states.items()}
        states = parts.model, parts.optimizer
        self.settings = [*({"": Settings.of(state)} for state in states), named]
        self._parts: list[dict[str, Any]] = [*(dict(state or {}) for state in states), {}]

    def name_states(self, *, as_stored: bool) -> None:
        """Name the arrays of the named states, and warn of values that cannot be compared.

        `as_stored`: take the arrays that a checkpoint stores, to compare with one. Otherwise values
        of other kinds are parts of names.
        """
        refused: list[str] = []
        if as_stored:
            states = _storable_states(self._states, refused)
            named = take_states(states, model=None, ranks=1)
            named.add_trees(group=None, digests=())
            shards = (named.arrays or {}).items()
            arrays = {key: getattr(shard, "array", shard) for key, shard in shards}
        else:
            entries = list_entries((), self._states) if self._states else ()
            # suffix: the text of a value that is neither an array nor a number
            arrays = {"/".join(map(str, keys)) + suffix: array for keys, array, suffix in entries}
        self._parts[2] = {key: each for key, each in arrays.items() if _is_comparable(each)}
        # these take no more memory: they were read already
        self.sizes = [
            {key: _TensorSize(array.nbytes, 0) for key, array in part.items()}
            for part in self._parts
        ]
        refused += [key for key in arrays if key not in self._parts[2]]
        if refused:
            warnings.warn(
                f"{self.path}: these values cannot be compared: {', '.join(refused)}",
                CheckpointWarning,
                stacklevel=2,
            )

    def arrays(self, section: int, keys: list[str]) -> dict[str, NDArray]:
        """Return the existing tensors among `keys`."""
        part = self._parts[section]
        return {key: part[key] for key in keys if key in part}


def _side(path: str, step: int | None) -> _CheckpointSide | _FileSide:
    """Return the object that reads the tensors of one path.

    `step`: of a manager's folder; None: the newest. Raises MLStateError or ValueError for other
    paths.
    """
    source = find(path, step)
    if isinstance(source, IndexedSource) and source.has_index:
        return _CheckpointSide(source)
    if source.format == "lightning":
        return _FileSide(source.path, read_whole_lightning(Path(source.path)).refuse_unreadable())
    return _FileSide(source.path, read_parts(source))


def _sides(first: tuple[str, int | None], second: tuple[str, int | None]) -> list[Any]:
    """Return the objects that read the tensors of two paths; each has a step, or None."""
    sides: list[Any] = [_side(*first), _side(*second)]
    files = [side for side in sides if isinstance(side, _FileSide)]
    for side in files:
        side.name_states(as_stored=len(files) == 1)
    return sides


# ---- comparing ----


def _batches(section: int, sides: list[Any], names: list[str] | None = None) -> Iterator[list[str]]:
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
    section: int,
    sides: list[Any],
    progress: Callable[[int], object] | None,
    arguments: argparse.Namespace,
) -> StateDiff:
    """Return the differences of one section of two sides, compared batch by batch.

    Without names of the user, settings of optimizers that differ are listed too.

    `section`: number in `_SECTIONS`. `progress`: called with bytes of the first side, or None.
    `arguments`: of the command, for tolerances and names.
    """
    total = StateDiff(missing=[], unexpected=[], shapes=[], dtypes=[], changes=[], unchanged=0)
    tolerance = {"rtol": arguments.rtol, "atol": arguments.atol}
    for batch in _batches(section, sides, arguments.names):
        part = diff(sides[0].arrays(section, batch), sides[1].arrays(section, batch), **tolerance)
        total = join_diffs(total, part)
        if progress is not None:
            progress(sum(sides[0].size(section, key).nbytes for key in batch))
    if arguments.names is None:
        first, second = (side.settings[section] for side in sides)
        part = diff_settings(first, second, **tolerance)
        total = join_diffs(total, part)
    return total


# ---- output ----


def _json_number(value: float) -> float | None:
    """Return a number as a JSON value; None for infinity and NaN."""
    return value if math.isfinite(value) else None


def _diff_data(difference: StateDiff) -> dict[str, Any]:
    """Return the differences of one section as JSON values.

    An infinite or NaN number becomes None, which JSON can express.
    """

    def pairs(differing: list[Any]) -> list[dict[str, Any]]:
        return [{"name": name, "first": a, "second": b} for name, a, b in differing]

    changes = [
        {**c._asdict(), "max_abs": _json_number(c.max_abs), "max_rel": _json_number(c.max_rel)}
        for c in difference.changes
    ]
    return {
        "identical": difference.identical,
        "missing": difference.missing,
        "unexpected": difference.unexpected,
        "shapes": pairs(difference.shapes),
        "dtypes": pairs(difference.dtypes),
        "changes": changes,
        "unchanged": difference.unchanged,
    }


def _compare_all(sides: list[Any], arguments: argparse.Namespace) -> list[StateDiff]:
    """Return the differences of models, optimizers and named states, in this order.

    `sides`: the two. Shows the progress on the terminal.
    """

    def size() -> int:
        return sum(size.nbytes for sizes in sides[0].sizes for size in sizes.values())

    with progress_of("compare", size) as progress:
        return [_compare_section(section, sides, progress, arguments) for section in _NUMBERS]


def _diff_paths(arguments: argparse.Namespace) -> tuple[list[Any], list[StateDiff]]:
    """Open and compare both paths; return the sides and their differences by section.

    Starts again, a few times, if a writer replaces one of them meanwhile.
    """
    paths = arguments.first, arguments.second
    steps = arguments.first_step, arguments.second_step
    first, second = (
        (path, number_of_step(path, step, arguments))
        for path, step in zip(paths, steps, strict=True)
    )
    for _ in range(TRIES - 1):
        sides = _sides(first, second)
        try:
            return sides, _compare_all(sides, arguments)
        except FileNotFoundError:
            if not any(side.is_replaced() for side in sides):
                raise
    sides = _sides(first, second)
    return sides, _compare_all(sides, arguments)


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
        print(json.dumps(data, indent=2))
        return 0 if identical else 1
    for section, (section_name, difference) in enumerate(zip(_SECTIONS, differences, strict=True)):
        if sides[0].sizes[section] or sides[1].sizes[section] or not difference.identical:
            title, headers, rows = table_of(difference)
            print(f"{section_name}: {printable(title)}")
            print_table(headers, rows)
    return 0 if identical else 1
