"""`Loader`: one source, its sections of tensors, and reads of them, with `cast=`, `missing=`."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from ..._common.arrays import is_torch
from ..._common.backend import TensorBackend, backend_of, torch_backend
from ..._common.caller import find_caller
from ..._common.converted import converted, is_converted
from ..._common.dtypes import numpy_dtype
from ..._common.scales import value_name
from ...errors import CompatibilityError
from ...state._state_dict import StateDict
from .._folder.names import SECTIONS
from .._loaded_state import LoadedState
from .._quantized.pairs import WHOLE, box_of
from .._quantized.parts import pairs_of_sections, scale_parts
from .._records import TensorRecord, part_of_record, tensor_records
from .._sections import OPTIMIZER, STATES, rename_sections, sections_of, state_name
from .._sources.indexed import IndexedSource
from .._states.containers import mapped
from .._states.modules import shown_states
from .._states.restore import load_trees
from .._store.chosen_names import chosen_names
from .._store.name_globs import ALL_NAMES
from .decoded import ScaleBlocks
from .targets import names_error

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ..._sharding.layout import Cuts, Cutting
    from .._quantized.pairs import Pair
    from .._sections import Section
    from .._sources.protocol import How, Source
    from .._store.name_globs import Names
    from .arguments import LoadRequest

KEY = "mlstate.follow"  # of the facts about a published version in the metadata of its root
DELTA = "delta"  # kind of a version that has only changes
_CAST_BYTES = 64 << 20  # of the tensors that are converted at the same time


class Loader:
    """Loads one source.

    `sections` are model, optimizer, and the named states with tensors.
    """

    def __init__(self, request: LoadRequest, source: Source, *, takes_deltas: bool = False) -> None:
        """Read what lists the tensors that `request` needs, and choose the names to load.

        With `verify="first"`, all files are verified here; otherwise only sources that have no
        index have read tensors. Raises CompatibilityError for a published version that has only
        changes, unless `takes_deltas`.
        """
        options = request.options
        self.request = request
        self.options = options
        self.source = source
        self.folder = source.path  # for errors
        self._grouped: tuple[Any, dict[Any, dict[str, TensorRecord]]] = (None, {})  # see `rows`
        self.how: How = {"verify": bool(options["verify"]), "progress": options["progress"]}
        names = request.names if options["rename"] is None else None
        source.begin(names, request.rank, options["into"])
        index = source.index  # first: a source may complete its manifest then
        self.manifest, saved = source.manifest, source.saved
        self.sections = sections_of(index, self.manifest)
        self.states = self.manifest.states or {}  # descriptions of the named states
        # the named states with tensors, by name; nested values have no section
        self.named = {each.state: each for each in self.sections if each.state is not None}
        if not takes_deltas:
            self._refuse_delta()
        if saved:
            for section in self.sections:
                section.saved = saved.get(section.label)
        # the quantized weights that `cast` decodes, with their scales, by label of the section
        self.pairs = pairs_of_sections(self) if request.dtype or request.cast else {}
        self.by_value: set[str] = set()  # codes that the caller chose by the names of their values
        for section in self.sections if request.dtype else ():
            if section.label in self.pairs:  # codes get the names of their values; scales have none
                section.replace(self.pairs[section.label].renamed(section.names))
        if options["rename"] is not None:
            rename_sections(self.sections, options["rename"])
        if options["verify"] == "first":
            assert isinstance(source, IndexedSource)  # others refuse the option
            source.require_good()
            self.how["verify"] = False

    def _refuse_delta(self) -> None:
        """Raise CompatibilityError if the source has only the changes of published weights.

        The error names the ways to the weights. The metadata are untrusted.
        """
        manifest, path = self.manifest, self.folder
        facts = manifest.metadata.get(KEY)
        if manifest.model is not None or not isinstance(facts, dict) or facts.get("kind") != DELTA:
            return
        anchors: list[int] = []
        with suppress(KeyError, TypeError, ValueError):
            anchors = [step for _, _, step, kind in facts["chain"] if kind != DELTA]
        text = "or load the newest version with all weights"
        load = f", {text}, step={anchors[-1]}" if anchors else ""
        raise CompatibilityError(
            f"{path}: step {manifest.step} is a published delta, which has only the weights that "
            "changed: read it by mlstate.follow.Follower(path, into=...) (mlstate follow on the "
            f"command line){load}",
            path=path,
        )

    def chosen(self) -> tuple[Names, list[list[str]]]:
        """Return the name matcher, and the selected names of the model and of the optimizer."""
        names = [section.names for section in self.sections[:STATES]]
        if self.request.names is None:
            return ALL_NAMES, names
        weights, is_renamed = self.manifest.weights, bool(self.options["rename"])
        values = self._names_of_values() if self.request.cast else {}
        every = [[*names[0], *values], *names[1:]]
        choice, chosen = chosen_names(every, self.request.names, self.folder, weights, is_renamed)
        named = set(chosen[0])
        self.by_value = {values[name] for name in named & values.keys()} - named
        chosen[0] = list(dict.fromkeys(values.get(name, name) for name in chosen[0]))
        return choice, chosen

    def _names_of_values(self) -> dict[str, str]:
        """Return the names of the model's codes by those of their values, if these are others."""
        pairs = self.pairs.get(self.sections[0].label)
        return {
            value_name(name): name
            for name, stored in self.sections[0].old_names().items()
            if pairs is not None and stored in pairs.by_codes and value_name(name) != name
        }

    # ---- reading ----

    def need(self, requests: Iterable[tuple[Section, list[str], Cuts]]) -> None:
        """Read the indexes that list the requested parts, given as section, names and cutting."""
        if self.manifest.world_size > 1:  # the index of one rank was read
            self.source.need((each.number, each.keys(names), cut) for each, names, cut in requests)

    def load_keys(
        self, section: int, keys: list[str], cutting: Cutting, *, mmap: bool = False
    ) -> dict[str, Any]:
        """Return the tensors `keys` as new arrays, by key; first read the indexes that list them.

        `mmap`: as views of the files.
        """
        self.source.need([(section, keys, cutting)])
        how: How = {**self.how, "mmap": mmap}
        return self.source.read(section, keys, cutting, **how)

    def load_tensors(self, section: Section, names: list[str], cutting: Cutting) -> dict[str, Any]:
        """Return the tensors `names` of a section as new arrays, by name."""
        keys = section.keys(names)
        arrays = self.load_keys(section.number, keys, cutting)
        return {name: arrays[key] for name, key in zip(names, keys, strict=True)}

    def rows(self, section: Section) -> dict[str, TensorRecord]:
        """Return the record of each tensor of a section, by key.

        The tensors of all sections are grouped once for an index, so that many named states take
        linear time.
        """
        index = self.source.index
        if self._grouped[0] is not index:
            groups: dict[Any, dict[str, TensorRecord]] = {}
            for row in tensor_records(index.tensors()):
                name = state_name(row.key) if row.section == SECTIONS[STATES] else None
                groups.setdefault((row.section, name), {})[row.key] = row
            self._grouped = index, groups
        return self._grouped[1].get((SECTIONS[section.number], section.state), {})

    def rows_of(self, section: Section, names: Collection[str]) -> dict[str, TensorRecord]:
        """Return the records of the tensors `names` that the index lists, by name."""
        rows, keys = self.rows(section), section.keys(names)
        return {name: rows[key] for name, key in zip(names, keys, strict=True) if key in rows}

    def dtypes_and_shapes(
        self, section: Section, names: list[str]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of the tensors `names` of a section, by name, after conversion.

        Raises FormatError if the scales of a quantized weight are missing or do not fit.
        """
        dtype = self.request.dtype
        pairs = self._chosen_pairs(section, names) if dtype else {}
        converted_tensors = {}
        for name, row in self.rows_of(section, names).items():
            is_cast = dtype and not section.is_optimizer and is_converted(row.dtype, dtype)
            converted_tensors[name] = dtype if is_cast else row.dtype, row.shape
            if name in pairs:
                pairs[name].check()
                converted_tensors[name] = dtype, pairs[name].shape
        return converted_tensors

    def load_state(self, section: Section, names: list[str], extra: dict[str, object]) -> Any:
        """Return a new state of the class that was saved, of the tensors `names`.

        `extra`: further arrays to add to it.
        """
        arrays = self._load_arrays(section, names) | extra
        if (device := self.options["device"]) is not None:
            tensors = torch_backend("tensors on a device=", TensorBackend).tensors_of(arrays)
            arrays = {name: each.to(device) for name, each in tensors.items()}
        return section.restore(arrays, self.folder)

    def _load_arrays(self, section: Section, names: list[str]) -> dict[str, Any]:
        """Return the tensors `names` by name, cut and converted as requested."""
        keys, request, mmap = section.keys(names), self.request, self.options["mmap"]
        arrays = self._computed(section, names)
        others = [key for key in keys if key not in arrays] if arrays else keys
        for batch, dtype in self._batches(section, others):
            loaded = self.load_keys(section.number, batch, request.cutting, mmap=mmap)
            while loaded:  # frees each array before the next one is converted
                key, array = loaded.popitem()
                arrays[key] = converted(array, dtype) if dtype else array
        return {name: arrays[key] for name, key in zip(names, keys, strict=True)}

    def _chosen_pairs(self, section: Section, names: list[str]) -> dict[str, Pair]:
        """Return those tensors `names` of a section that are quantized, by name."""
        pairs = self.pairs.get(section.label)
        if pairs is None:
            return {}
        old_names = section.old_names()
        chosen = ((name, pairs.by_codes.get(old_names[name])) for name in names)
        return {name: pair for name, pair in chosen if pair is not None}

    def _computed(self, section: Section, names: list[str]) -> dict[str, Any]:
        """Return those tensors `names` that are not read as they are stored, by key.

        These are the values of quantized weights, by the keys of their codes, or without a dtype,
        the scales of parts. Raises FormatError if scales are missing or do not fit.
        """
        if not (dtype := self.request.dtype):
            parts, mmap = self.scale_parts(section, names).values(), self.options["mmap"]
            return {part.row.key: part.read(self, section, mmap=mmap) for part in parts}
        pairs = self._chosen_pairs(section, names).values()
        cuttings = [(pair, self.cutting_of(section, pair)) for pair in pairs]
        return {section.key_of(p.codes): self.decode(section, p, cut, dtype) for p, cut in cuttings}

    def decode(self, section: Section, pair: Pair, cutting: Cutting, dtype: str) -> Any:
        """Return the values of a part of a quantized weight."""

        def read(stored: str, part: Cutting) -> Any:
            key = section.key_of(stored)
            return self.load_keys(section.number, [key], part)[key]

        return pair.load(read, cutting, dtype)

    def cutting_of(self, section: Section, pair: Pair) -> Cutting:
        """Return the part to load of a weight's values; one that was saved has the saved layout."""
        steps, _, world = self.request.cutting
        if steps is not None or not world:
            return self.request.cutting
        codes = self.rows(section)[section.key_of(pair.codes)]
        cut, index = part_of_record(codes, self.request.cutting)
        return (pair.value_steps(cut), index, world) if cut else WHOLE

    def scale_parts(self, section: Section, names: Iterable[str]) -> dict[str, ScaleBlocks]:
        """Return the parts of those scales among `names` that are not cut by themselves, by name.

        A rank receives the scales of all blocks that its codes touch, and whole those tensors that
        describe all codes or, without a layout, were saved whole. {} for a load of whole tensors,
        or with a dtype.
        """
        cutting = self.request.cutting
        if self.request.dtype or not cutting[2] or section.is_optimizer:
            return {}
        parts, rows, old_names = scale_parts(self, section), self.rows(section), section.old_names()
        result = {}
        for name in names:
            if (part := parts.get(old_names[name])) is None:
                continue
            row, codes = (rows[section.key_of(each)] for each in (old_names[name], part.codes))
            slices = part.slices(
                row.shape, box_of((*part_of_record(codes, cutting), 1), codes.shape)
            )
            box = box_of((*part_of_record(row, cutting), 1), row.shape)
            is_saved_whole = cutting[0] is None and not row.layout.steps
            if not is_saved_whole and (box.elements is not None or box.slices() != slices):
                result[name] = ScaleBlocks(row, slices, part.codes)
        return result

    def _batches(self, section: Section, keys: list[str]) -> list[tuple[list[str], str]]:
        """Return batches of keys to load at the same time, each with a dtype to convert to, or "".

        A batch to convert has one tensor, or tensors of few bytes. Optimizers keep their dtypes:
        their states are more precise than the weights, and count steps.
        """
        dtype = self.request.dtype
        if not dtype or section.is_optimizer:
            return [(keys, "")]
        sizes = {
            key: prod(row.shape) * numpy_dtype(row.dtype).itemsize
            for key, row in self.rows(section).items()
            if is_converted(row.dtype, dtype)
        }
        batches: list[tuple[list[str], str]] = [([key for key in keys if key not in sizes], "")]
        room = 0
        for key in filter(sizes.__contains__, keys):
            if len(batches) == 1 or sizes[key] > room:
                batches.append(([], dtype))
                room = _CAST_BYTES
            batches[-1][0].append(key)
            room -= sizes[key]
        return batches

    # ---- named states ----

    def load_named(self) -> dict[str, Any]:
        """Return the named states: of the saved classes, with the changes of the load."""
        values, saved = dict.fromkeys(self.states), self.source.saved
        device, trees, sections = self.options["device"], [], {}
        for name in values:
            section = self.named.get(name)
            if saved and (label := f"states[{name!r}]") in saved:
                value = saved[label] if section is None else self._changed_state(section)
                value = deepcopy(value) if self.source.is_mapped else value
                values[name] = value if device is None else _moved_to(device, value)
            elif section is not None:
                sections[name] = section
            else:
                trees.append(name)
        return (
            values | load_trees(self, trees) | (self._load_sections(sections) if sections else {})
        )

    def _load_sections(self, sections: dict[str, Section]) -> dict[str, Any]:
        """Return the named states `sections`, which have tensors: whole ones are read together."""
        request = self.request
        if request.dtype or request.cutting[2] or self.options["device"] is not None:
            return {name: self.load_state(each, each.names, {}) for name, each in sections.items()}
        keys = {name: each.keys(each.names) for name, each in sections.items()}
        loaded = self.load_keys(STATES, [*chain(*keys.values())], WHOLE, mmap=self.options["mmap"])
        values = {}
        for name, section in sections.items():
            arrays = zip(section.names, map(loaded.__getitem__, keys[name]), strict=True)
            values[name] = section.restore(dict(arrays), self.folder)
        return values

    def _changed_state(self, section: Section) -> Any:
        """Return a state of tensors that is in memory, renamed, cut and converted as requested.

        A state that nothing changes is the saved one, and its tensors keep their kind.
        """
        names, request = section.old_names(), self.request
        if not (request.cutting[0] or request.dtype):
            is_renamed = any(name != old for name, old in names.items())
            arrays = {name: section.saved[old] for name, old in names.items()}
            return section.restore(arrays, self.folder) if is_renamed else section.saved
        arrays = self._load_arrays(section, section.names)
        for name, old in names.items():
            if is_torch(like := section.saved[old]):
                arrays |= backend_of(like, TensorBackend).tensors_of({name: arrays[name]})
        return section.restore(arrays, self.folder)

    # ---- states that an optimizer lacks ----

    def lacking(self, names: list[list[str]]) -> dict[str, tuple[str, str]]:
        """Return the optimizer states that the checkpoint lacks: {key: (parameter, existing key)}.

        A parameter lacks a state if another parameter has it, with that parameter's shape. The
        existing key is of such a state. `names`: the loaded names of model and optimizer. If the
        saved optimizer lists the parameters that it trains, only these are considered.
        """
        model, optimizer = self.sections[:STATES]
        shapes = {name: row.shape for name, row in self.rows_of(model, model.names).items()}
        chosen = set(names[OPTIMIZER])
        states: dict[str, str] = {}
        for name, row in self.rows_of(optimizer, names[OPTIMIZER]).items():
            is_full = row.axes is None and shapes.get(name.rpartition(".")[0]) == row.shape
            if row.state and is_full:
                states.setdefault(row.state, name)
        parameters = [name for name in names[0] if shapes[name]]
        saved = optimizer.restore({}, self.folder)
        groups = getattr(saved, "param_groups", ())
        trained = {str(name) for group in groups for name in group.get("params", ())}
        # all of them, if the saved optimizer lists none of these
        parameters = [name for name in parameters if name in trained] or parameters
        return {
            f"{name}.{state}": (name, like)
            for name in parameters
            for state, like in states.items()
            if f"{name}.{state}" not in chosen
        }

    def refuse_lacking(self, names: list[list[str]]) -> None:
        """With ``missing="error"``, raise if the checkpoint lacks optimizer states.

        Raises ValueError for any ``missing=`` if it has no model, whose parameters tell this.
        """
        missing = self.options["missing"]
        if missing != "skip" and self.manifest.model is None:
            raise ValueError(
                f"{self.folder}: missing={missing!r} concerns an optimizer's states of the model's "
                "parameters, and no model is stored: leave it out"
            )
        lacking = list(self.lacking(names)) if missing == "error" else []
        if lacking:
            raise names_error(lacking, [], [], self.folder)

    def zeros(self, names: list[list[str]], parameters: Any) -> dict[str, Any]:
        """Return zeros for the optimizer states that parameters lack, by key.

        `names`: the loaded ones of model and optimizer. `parameters`: the loaded model, for shapes.
        """
        import numpy as np

        rows = self.rows_of(self.sections[OPTIMIZER], names[OPTIMIZER])
        return {
            key: np.zeros(tuple(parameters[name].shape), numpy_dtype(rows[like].dtype))
            for key, (name, like) in self.lacking(names).items()
        }


def _warn_of_whole_tensors(loader: Loader) -> None:
    """Warn a caller who asks for one rank's part as it was saved, if all tensors are whole."""
    options = loader.options
    others = (options["layout"], options["into"], options["group"])
    if options["rank"] is None or options["world_size"] == 1 or others != (None, None, None):
        return
    if _is_whole(loader):
        find_caller().warn(
            f"{loader.folder}: no tensor was saved in parts, so rank {options['rank']} of "
            f"{options['world_size']} gets all of each tensor: pass layout='rows' or another "
            "layout for a part of each, or layout='whole' for all without this warning"
        )


def _is_whole(loader: Loader) -> bool:
    """Return whether a checkpoint has tensors, and each rank saved all of them and equal states."""
    if any("ranks" in kind for kind in loader.states.values()):
        return False
    rows = [row for section in loader.sections[:STATES] for row in loader.rows(section).values()]
    return bool(rows) and not any(row.layout.steps for row in rows)


def load_new_state(request: LoadRequest, source: Source) -> LoadedState:
    """Load the requested tensors into new arrays or, with ``mmap``, as views of the files.

    Named states are loaded unless the request has names. Warns a caller who asks for one rank's
    part if all tensors were saved whole.
    """
    loader = Loader(request, source)
    _warn_of_whole_tensors(loader)
    _, chosen = loader.chosen()
    loader.refuse_lacking(chosen)
    has_states = request.names is None
    selections = [*zip(loader.sections, chosen, strict=False)]
    named = [(section, section.names) for section in loader.named.values() if has_states]
    loader.need((each, names, request.cutting) for each, names in selections + named)
    results: list[Any] = []  # model and optimizer
    for section, names in selections:
        has_zeros = section.number == OPTIMIZER and loader.options["missing"] == "zeros"
        extra = loader.zeros(chosen, results[0]) if has_zeros and results[0] is not None else {}
        results.append(
            loader.load_state(section, names, extra) if section.kind is not None else None
        )
    manifest = loader.manifest
    states = shown_states(loader.load_named()) if has_states and loader.states else {}
    return LoadedState(results[0], results[1], manifest.metadata, manifest.step, states)


def _moved_to(device: Any, value: Any) -> Any:
    """Return a nested value with its tensors on `device`; arrays of a state become tensors."""
    if is_torch(value):
        return backend_of(value, TensorBackend).move_tensor(value, device)
    if isinstance(value, StateDict):
        backend = torch_backend("tensors on a device=", TensorBackend)
        value.update(backend.tensors_of(value))
    return mapped(value, lambda _, inner: _moved_to(device, inner))
