"""`into=`, `strict=`: targets of a load, names or shapes that differ, tied weights.

A *filling* is the memory of one target, by name: an `_ArrayTarget`, or for torch the result of
`fill_module` or `fill_optimizer` of the backend.

find_targets   -> Prepared, with the user's targets
prepare        checks all targets
apply_all      restores the objects; see _states/restore.py
Prepared.fill  reads the tensors into their targets
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ... import _core
from ..._common.arrays import (
    is_on_device,
    is_torch,
    memory_key,
    memory_range,
    refuse_masked,
)
from ..._common.backend import TensorBackend, backend_of, is_module, is_optimizer
from ..._common.caller import find_caller
from ..._common.converted import converted, is_converted
from ..._common.dtypes import FLOAT8S, FLOATS, name_of, numpy_dtype
from ..._common.staged_targets import StagedTargets, refuse_overlaps_on_devices
from ..._sharding.layout import Cuts, Layout, Shard, part_of_cutting
from ...errors import CompatibilityError
from ...state._compatibility import LISTED, join, rename_hint
from ...state._load_into import check_load, load_into
from ...state._optimizer_state import OptimizerStateDict
from .._backend import CheckpointBackend, OptimizerRecord, OptimizerRequest
from .._loaded_state import LoadedState
from .._sections import OPTIMIZER, OPTIMIZER_STATE
from .._states.collect import modules_of, owner_of
from .._states.excluded import Excluded
from .._states.modules import prepare_units, stored_entries, text_of_section
from .._states.restore import (
    Sources,
    prepare_object,
    prepare_tree,
    read_trees,
    refuse_overlaps,
)
from .._store.name_globs import ALL_NAMES
from .._ties import TiedName, refuse_other_bytes
from .decoded import check_decoded, decode_names, decoded_parts, without_whole_steps

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from .._quantized.pairs import Pair
    from .._sections import Section, TensorRow
    from .._sources.protocol import How
    from .._states.modules import StoredEntries
    from .._states.restore import Action
    from .._store.name_globs import Names
    from .decoded import Decoded
    from .loader import Loader

_NUMBERED = re.compile(r"param_\d+\.", re.ASCII)  # of an optimizer saved without its module


class _Ready(NamedTuple):
    """A target of tensors, checked: names to read, and how their tensors are cut.

    `filling`: the target's memory, with `arrays` by name. `cuts`: one for all `names`, or a list.
    """

    section: Section
    filling: Any
    names: list[str]
    cuts: Cuts
    casts: dict[str, Any]  # targets of another dtype, by name
    decoded: dict[str, Decoded]  # quantized weights whose targets receive values, by name

    def memory(self) -> dict[str, Any]:
        """Return the arrays that the load writes, by name: after conversion, or before a copy."""
        return {**self.filling.arrays, **self.casts}

    def tied_name(self, loader: Loader, position: int) -> TiedName:
        """Return the name at a position, with the memory and the part that it receives."""
        name, section = self.names[position], self.section
        [row] = loader.rows_of(section, [name]).values()
        target = self.casts.get(name, self.filling.arrays[name])
        array = target.array if isinstance(target, Shard) else target
        if isinstance(self.cuts, list):
            place = self.cuts[position]
        else:
            place = row.shape, *part_of_cutting(self.cuts, len(row.shape), row.layout, row.axes)
        return TiedName(f"{section.label}[{name!r}]", section.number, row, array, place)

    def of(self, positions: list[int]) -> _Ready:
        """Return the target with the names at these positions alone."""
        cuts = [self.cuts[i] for i in positions] if isinstance(self.cuts, list) else self.cuts
        return self._replace(names=[self.names[i] for i in positions], cuts=cuts)

    def filled(self) -> set[tuple[str, str]]:
        """Return state and name of the targets that the load fills, if it may leave out some."""
        if hasattr(self.filling, "optimizer"):  # it loses the states that are left out
            return set()
        names = (*self.names, *self.decoded, *self.filling.zeros)
        return {(self.section.label, name) for name in names}


class Prepared:
    """The checked targets of a load; `actions` restore the objects among the named states."""

    def __init__(self, model: Any, optimizer: Any, states: dict[str, Any], as_state: Any) -> None:
        """Keep the user's targets, which `prepare` checks; they are also the result of the load.

        `as_state`: the target of ``into["optimizer"]`` if this is stored as a named state.
        """
        self.as_state = as_state
        self.model = model
        self.optimizer = optimizer
        self.states = states
        self.actions: list[Action] = []
        self.sources = Sources()
        self.ready: list[_Ready] = []
        self.elsewhere: Mapping[str, set[str]] = {}  # names that other ranks load, by section
        self._modules: dict[str, Any] = {}

    def fill_module(self, label: str, module: Any) -> Any:
        """Return the filling of a module, the target of the section `label`."""
        if label not in self._modules:
            self._modules[label] = backend_of(module, CheckpointBackend).fill_module(module)
        return self._modules[label]

    def fill(self, loader: Loader) -> LoadedState:
        """Read all tensors into their targets, and return these.

        After an error or interrupt, their content is undefined, and a note in the error tells it.
        """
        if loader.request.written is not None:
            loader.request.written.update(*(each.filled() for each in self.ready))
        try:
            for ready_target in self.ready:
                _fill(loader, ready_target)
        except BaseException as error:
            error.add_note(
                "the arrays and tensors in into= are partly written: load into them again before "
                'you use them; verify="first" finds damage before anything is written'
            )
            raise
        manifest = loader.manifest
        optimizer = self.optimizer if self.as_state is None else self.as_state
        return LoadedState(self.model, optimizer, manifest.metadata, manifest.step, self.states)


class _ArrayTarget(StagedTargets):
    """Arrays of the caller that receive one section."""

    optional: frozenset[str] = frozenset()  # names that the checkpoint may lack

    def __init__(self, target: Any) -> None:
        """Wrap the arrays to fill, by name.

        Torch tensors in main memory are filled as arrays that share their memory.
        """
        arrays, tensors = dict(target), {}
        for name, value in arrays.items():
            refuse_masked(name, value)
            if is_torch(value):
                tensors[name] = value
        if tensors:
            backend = backend_of(next(iter(tensors.values())), TensorBackend)
            arrays = backend.arrays_of(arrays)
        super().__init__(arrays, tensors)
        self.known = arrays.keys()  # names to compare with the stored ones


def names_error(
    missing: list[str], unexpected: list[str], unfilled: list[str], path: str
) -> CompatibilityError:
    """Return an error, in torch's words, that lists mismatched names and suggests a rename.

    `missing`: names without a stored value. `unexpected`: stored names without a target.
    `unfilled`: all names of the target without a value, for the suggestion. `path`: of the
    checkpoint.
    """
    lines = [f"Error(s) in loading {path}:"]
    for words, names in (("Missing", missing), ("Unexpected", unexpected)):
        if names:
            quoted = join([f'"{name}"' for name in names[:LISTED]])
            more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
            lines.append(f"{words} key(s) in checkpoint: {quoted}{more}.")
    hint = rename_hint(dict.fromkeys(unexpected), dict.fromkeys(unfilled), unexpected, unfilled)[1]
    lines += [f"{hint}."] if hint else []
    return CompatibilityError("\n    ".join(lines), name=(missing or unexpected)[0], path=path)


# ---- names, parts and dtypes ----


def _fit_names(
    loader: Loader, section: Section, selected: list[str], filling: Any, names: Names
) -> list[str]:
    """Return the names to read into a target; raise if its names and the stored ones differ.

    `selected`: stored names. `filling`: the target's memory. `names`: the user's choice; each of
    these must exist in both. With ``strict=False``, only shared names are returned. With
    ``missing="zeros"``, states that the checkpoint lacks are noted in `filling`, which zeroes them.
    Raises CompatibilityError.
    """
    request = loader.request
    have = set(selected)
    target_names = filling.known
    unfilled = [name for name in target_names if name not in have and name not in filling.optional]
    missing = _without_tied(loader, section, unfilled, selected, filling)
    # a choice of names has two sections only, and all names of a named state are chosen
    number = min(section.number, OPTIMIZER)
    lacking = names.select(missing, number)[0] if missing else []
    unexpected = [name for name in selected if name not in target_names]
    # States that an optimizer lacks are created, zeroed or left out, as `missing` requests.
    lenient = section.is_optimizer and request.options["missing"] != "error"
    if request.options["strict"] and (unexpected or (lacking and not lenient)):
        raise names_error([] if lenient else lacking, unexpected, unfilled, loader.folder)
    if request.options["missing"] == "zeros" and section.is_optimizer:
        for name in lacking:
            filling.zero(name)
    return [name for name in selected if name in filling.arrays]


def _without_tied(
    loader: Loader, section: Section, unfilled: list[str], selected: list[str], filling: Any
) -> list[str]:
    """Return the names of `unfilled` whose memory receives no value under another name.

    `selected`: stored names. `filling`: the target's memory. Hugging Face folders store tied
    weights, several names of one memory, under one name only.
    """
    if not unfilled or loader.manifest.weights is None:
        return unfilled
    arrays = filling.arrays
    order = [name for name in (*unfilled, *selected) if name in arrays]
    [tied] = _core.targets_tied([(section.label, order, arrays)], 1)
    left_out = set(tied) - set(selected)
    return [name for name in unfilled if name not in left_out]


def _shape_of(loader: Loader, row: TensorRow) -> tuple[int, ...]:
    """Return the shape of the part to load into a target that does not know its own part."""
    if loader.request.by_target:
        return row.shape
    steps, index = part_of_cutting(loader.request.cutting, len(row.shape), row.layout, row.axes)
    return Layout(steps).shape(row.shape, index)


def _check_shards(
    loader: Loader, section: Section, filling: _ArrayTarget, names: list[str]
) -> None:
    """Raise CompatibilityError for a target that is a `Shard` of another part than the one read.

    `names`: of the tensors to read into `filling`.
    """
    shards = {n: filling.targets[n] for n in names if isinstance(filling.targets[n], Shard)}
    if not shards:
        return
    steps, index, world = loader.request.cutting
    for name, row in loader.rows_of(section, shards).items():
        cut = (row.layout, index) if steps is None and world else ((), 0)
        if steps is not None:
            cut = _core.layout_project(steps, index, len(row.shape), row.axes)
        shard = shards[name]
        part_read = (row.shape, *without_whole_steps(*cut))
        part_of_target = (shard.shape, *without_whole_steps(shard._steps, shard.index))
        if part_read != part_of_target:
            got, expected = (
                f"part {number} of shape {whole_shape}, cut by {list(cuts)}"
                for whole_shape, cuts, number in (part_read, part_of_target)
            )
            raise CompatibilityError(
                f"{section.label}[{name!r}] is a Shard, {expected}, and the load reads {got}: pass "
                "the layout= and rank= of this part",
                name=name,
                expected=expected,
                got=got,
            )


def _cuts(loader: Loader, section: Section, filling: Any, names: list[str]) -> Cuts:
    """Return how the tensors `names` are cut for a target: one cut for all, or a list.

    `filling`: the target's memory, which may know its own part of each tensor.
    """
    if isinstance(filling, _ArrayTarget):
        _check_shards(loader, section, filling, names)
        loader.refuse_scales_of_other_codes(section, names)
        return loader.request.cutting
    if loader.request.by_target:
        return filling.cuts(names)  # type: ignore[no-any-return]
    filling.whole()  # raises TypeError if the target is a part itself
    loader.refuse_scales_of_other_codes(section, names)
    return loader.request.cutting


def _casts(loader: Loader, section: Section, filling: Any, names: list[str]) -> dict[str, Any]:
    """Replace targets in `filling` that have another float dtype by arrays of the stored one.

    `names`: of the tensors to read. Returns the replaced targets by name; they receive the
    converted values after the read. Without ``cast=True`` nothing is replaced: {}.
    """
    casts: dict[str, Any] = {}
    if not loader.request.cast:
        return casts
    for name, row in loader.rows_of(section, names).items():
        target = filling.arrays[name]
        dtype = name_of(target.dtype)
        if is_converted(row.dtype, dtype) and dtype in FLOATS:
            casts[name] = target
            filling.arrays[name] = np.empty(tuple(target.shape), numpy_dtype(row.dtype))
    return casts


def _check(loader: Loader, ready_target: _Ready) -> None:
    """Raise CompatibilityError if a stored tensor does not fit `ready_target` in shape or dtype.

    Raises ValueError for an array that cannot be written. No tensor is read.
    """
    section = ready_target.section
    keys, arrays = (
        section.keys(ready_target.names),
        section.by_key(ready_target.filling.arrays, ready_target.names),
    )
    loader.source.index.fits(loader.folder, section.number, keys, ready_target.cuts, arrays)
    if ready_target.casts:
        stored = {name: ready_target.filling.arrays[name] for name in ready_target.casts}
        # any float may be converted: only shapes are compared
        like = {name: np.empty(array.shape, np.float32) for name, array in stored.items()}
        check_load(ready_target.casts, like, strict=True, cast=True)
    for name, decoded in ready_target.decoded.items():
        check_decoded(name, decoded, ready_target.filling.arrays[name])


def _fill(loader: Loader, ready_target: _Ready) -> None:
    """Read a section's tensors into the target `ready_target`; shapes and dtypes were checked.

    Converted tensors are read in the stored dtype first.
    """
    section, filling = ready_target.section, ready_target.filling
    keys, arrays = (
        section.keys(ready_target.names),
        section.by_key(filling.arrays, ready_target.names),
    )
    how: How = {**loader.how, "into": arrays}
    loader.source.read(section.number, keys, ready_target.cuts, **how)
    if ready_target.casts:
        was_read = set(ready_target.names)
        casts = {name: each for name, each in ready_target.casts.items() if name in was_read}
        stored = {name: filling.arrays[name] for name in casts}
        filling.arrays.update(ready_target.casts)
        for name, array in stored.items():
            if name_of(array.dtype) in FLOAT8S:
                stored[name] = converted(array, name_of(casts[name].dtype))
        load_into(casts, stored, cast=True)
    for name, (pair, cutting, elements) in ready_target.decoded.items():
        target = filling.arrays[name]
        target = target.array if isinstance(target, Shard) else target
        values = loader.decode(section, pair, cutting, name_of(target.dtype))
        load_into(
            {name: target}, {name: values if elements is None else values.reshape(-1)[elements]}
        )
    filling.finish([*ready_target.names, *ready_target.decoded])


# ---- optimizers ----


def _is_numbered(section: Section, folder: str, optimizer: Any, module: Any) -> bool:
    """Return whether to match stored states by the order of parameters instead of by names.

    True if they are stored as ``param_0.<state>``, and `module` or the optimizer gives other names;
    without either, the optimizer's parameters are numbered anyway. `module`: of the parameters;
    None: the user passed none. `folder`: for the error. Raises CompatibilityError if the states are
    stored under names that neither `module` nor the optimizer gives.
    """
    groups = (section.kind or {}).get("param_groups", ())
    names = section.names or [f"{name}." for g in groups for name in g.get("params", ())]
    if names and all(map(_NUMBERED.match, names)):
        # the module's parameter order is then also torch's order
        return module is not None or any("param_names" in g for g in optimizer.param_groups)
    has_names = all("param_names" in g for g in optimizer.param_groups)
    if names and module is None and not has_names:
        raise CompatibilityError(
            f"{folder} stores optimizer states under names of parameters, such as "
            f"{names[0]!r}: pass the module too, "
            "into={'model': module, 'optimizer': optimizer}"
        )
    return False


def _parameters_source(loader: Loader, section: Section, optimizer: Any, module: Any) -> Any:
    """Return the source of the names of an optimizer's parameters: a module, None, or the names.

    `module`: has the parameters, or None.
    """
    if not _is_numbered(section, loader.folder, optimizer, module):
        return module
    # torch numbers the parameters of all groups in their order.
    return [f"param_{i}" for i in range(sum(len(g["params"]) for g in optimizer.param_groups))]


def _optimizer_target(
    loader: Loader,
    section: Section,
    selected: list[str],
    optimizer: Any,
    module: Any,
    chosen_names: Names,
    elsewhere: Collection[str],
) -> Any:
    """Return memory for the states of a torch optimizer; states that it lacks are created.

    `selected`: stored names. `module`: the model, of which a module has the parameters.
    `chosen_names`: the user's choice. `elsewhere`: parameters that only other ranks have. The saved
    param_groups, the dtype and shape of each selected state, and the shapes of the model's
    parameters go to the backend, which fits them to `optimizer`. Raises CompatibilityError if the
    stored states cannot be matched to parameters.
    """
    module = module if is_module(module) else None
    model = loader.sections[0]
    parameters = model.names if section.number == OPTIMIZER else []
    shapes = {n: _shape_of(loader, row) for n, row in loader.rows_of(model, parameters).items()}
    records = {}
    for name, row in loader.rows_of(section, selected).items():
        parameter, _, state = name.rpartition(".") if "." in name else (name, "", "")
        shape = _shape_of(loader, row)
        records[name] = OptimizerRecord(parameter, state, shape, row.dtype, row.axes)

    def read(names_read: list[str]) -> dict[str, Any]:
        """Return whole tensors as new arrays, by name."""
        arrays = loader.load_keys(section.number, section.keys(names_read), (None, 0, 0))
        return dict(zip(names_read, (arrays[key] for key in section.keys(names_read)), strict=True))

    saved = section.restore({}, loader.folder)
    if not hasattr(saved, "param_groups"):  # the optimizer was saved as a plain dict
        saved = OptimizerStateDict()

    excluded = Excluded(loader.manifest.exclude)

    def meant(others: list[str]) -> list[str]:
        """Return those names of `others` that the user chose, and that the save included."""
        included = [name for name in others if not excluded.matches(name)]
        return chosen_names.select(included, OPTIMIZER)[0]

    request = loader.request
    optimizer_request = OptimizerRequest(
        module=module,
        records=records,
        saved=saved,
        read=read,
        names=_parameters_source(loader, section, optimizer, module),
        meant=meant,
        elsewhere=frozenset(elsewhere),
        shapes=shapes,
        strict=request.options["strict"],
        complete=request.names is None,
        cast=request.cast,
    )
    return backend_of(optimizer, CheckpointBackend).fill_optimizer(optimizer, optimizer_request)


# ---- all targets ----


def names_of_targets(loader: Loader, prepared: Prepared) -> dict[str, Collection[str] | None]:
    """Return the names of each target, by label of its section; None: the target takes any name.

    For a torch optimizer, these are the names of its parameters.
    """
    modules = modules_of(prepared.model, prepared.states)
    named = [(each, prepared.states[n]) for n, each in loader.named.items() if n in prepared.states]
    targets = zip(loader.sections, (prepared.model, prepared.optimizer), strict=False)
    names: dict[str, Collection[str] | None] = {}
    for section, target in [*targets, *named]:
        if target is None:
            continue
        if is_optimizer(target):
            module = prepared.model if section.number == OPTIMIZER else owner_of(target, modules)
            module = module if is_module(module) else None
            source = _parameters_source(loader, section, target, module)
            backend = backend_of(target, CheckpointBackend)
            names[section.label] = set(backend.parameter_names(target, module, source))
        elif is_module(target) and not section.is_optimizer:
            names[section.label] = set(_known(prepared.fill_module(section.label, target)))
        else:
            names[section.label] = set(target) if hasattr(target, "keys") else None
    return names


def _known(filling: Any) -> list[str]:
    """Return the names of a target, also of entries that are not tensors or are not its memory."""
    contract = getattr(filling, "contract", None)
    return list(dict.fromkeys([*filling.known, *(contract.entries if contract else ())]))


def _refuse_unrelated(
    loader: Loader, section: Section, filling: Any, selected: list[str], *, is_choice: bool
) -> None:
    """Raise CompatibilityError if a target has names, and none of them is one of `selected`.

    `selected`: stored names. `is_choice`: the user chose names, which may all be of other targets.
    A stored optimizer may have no states.
    """
    target_names = _known(filling)
    have = set(target_names)
    if not have.isdisjoint(selected):
        return
    is_optimizer_filling = hasattr(filling, "optimizer")
    if not target_names and not is_optimizer_filling:
        return
    if selected or not (is_choice or is_optimizer_filling):
        error = names_error(target_names, selected, target_names, loader.folder)
        error.args = (
            f"{section.label}: the target and the checkpoint have no name in common, and "
            f"strict=False does not excuse a whole part: {error}",
        )
        raise error


def _choose_entries(
    loader: Loader, section: Section, target: Any, names: Names, elsewhere: Collection[str] = ()
) -> tuple[StoredEntries, list[str]]:
    """Return a module's stored entries that are not tensors, and the chosen names of these.

    `elsewhere`: names that only targets of other ranks have; these are left out. Raises
    CompatibilityError if `target` is not a module, and the load is strict or a chosen name is one
    of its arrays.
    """
    stored = stored_entries(loader, section, target)
    if elsewhere:
        entries = {name: each for name, each in stored.entries.items() if name not in elsewhere}
        stored = stored._replace(entries=entries)
    if not stored.entries:
        return stored, []
    chosen = names.select(list(stored.entries), section.number)[0]
    clash = [name for name in chosen if not is_module(target) and name in target]
    if clash or (chosen and not is_module(target) and loader.options["strict"]):
        raise names_error([], clash or chosen, [], loader.folder)
    return stored, chosen


def _prepare_tensors(
    loader: Loader,
    section: Section,
    selected: list[str],
    target: Any,
    module: Any,
    names: Names,
    prepared: Prepared,
) -> None:
    """Add the checked target of a section's tensors to `prepared`; shapes are checked later.

    `selected`: stored names. `module`: may have the parameters of an optimizer. `names`: the
    user's choice. Also adds the actions that load the submodules that must load their own entries.
    Raises CompatibilityError if names do not match.
    """
    filling: Any
    takes_module, takes_optimizer = is_module(target), is_optimizer(target)
    elsewhere = prepared.elsewhere.get(section.label, set())
    if elsewhere:
        section = section.without(elsewhere)
        selected = [name for name in selected if name not in elsewhere]
    prepared.sources.add(
        target,
        section.label,
        partial(text_of_section, loader, section),
        has_memory=not takes_optimizer,
    )
    stored, entries = _choose_entries(loader, section, target, names, elsewhere)
    chosen = [*selected, *entries]
    if takes_module and not section.is_optimizer:
        filling = prepared.fill_module(section.label, target)
        prepared.actions += prepare_units(
            loader, section, target, filling, chosen, stored, names, prepared.sources
        )
        selected = [name for name in chosen if not filling.loads_itself(name)]
        clash = [name for name in entries if name in filling.arrays]
        if clash:
            raise names_error([], clash, [], loader.folder)
    elif takes_optimizer:
        filling = _optimizer_target(loader, section, selected, target, module, names, elsewhere)
    else:
        filling = _ArrayTarget(target)
    pairs: dict[str, Pair] = {}
    decoded: dict[str, Decoded] = {}
    if section.label in loader.pairs:  # with cast=True
        section, selected, pairs = decode_names(loader, section, selected, filling)
        chosen = [*selected, *entries] if pairs else chosen
    if not loader.options["strict"]:
        is_choice = names.listed is not None
        _refuse_unrelated(loader, section, filling, chosen, is_choice=is_choice)
    names_to_read = _fit_names(loader, section, selected, filling, names)
    if pairs:
        decoded = decoded_parts(loader, section, filling, pairs, names_to_read)
        names_to_read = [name for name in names_to_read if name not in decoded]
    cuts = _cuts(loader, section, filling, names_to_read)
    casts = _casts(loader, section, filling, names_to_read)
    prepared.ready.append(_Ready(section, filling, names_to_read, cuts, casts, decoded))


def _has_known_memory(array: Any) -> bool:
    """Return whether a cache's array is of NumPy or torch, so that its addresses are known."""
    return isinstance(array, np.ndarray) or is_torch(array)


def _has_ties(ready: list[_Ready], cache_arrays: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether several names of the targets `ready` share one memory, as tied weights do.

    `cache_arrays`: of caches among the targets, by their names. Raises ValueError if targets share
    memory in any other way.
    """
    caches = [
        (label, {name: array for name, array in arrays.items() if _has_known_memory(array)})
        for label, arrays in cache_arrays.items()
    ]
    has_devices = bool(caches) or any(each.filling.is_staged for each in ready)
    is_tied = has_devices and refuse_overlaps_on_devices(
        [(each.section.label, each.names, each.filling.targets) for each in ready]
        + [(label, list(arrays), arrays) for label, arrays in caches],
        len(ready),
    )
    tied = _core.targets_tied(
        [(each.section.label, each.names, each.memory()) for each in ready]
        + [(label, [n for n in a if not is_on_device(a[n])], a) for label, a in caches],
        len(ready),
    )
    return is_tied or any(tied)


def _join_tied_names(
    loader: Loader, ready: list[_Ready], cache_arrays: Mapping[str, Mapping[str, Any]]
) -> list[_Ready]:
    """Return the targets without names whose memory a later name shares: one read fills both.

    `ready`: the targets in the order of the reads. `cache_arrays`: as for `_has_ties`. Raises
    CompatibilityError if stored tensors for one memory have different bytes, ValueError if targets
    share memory in any other way.
    """
    _refuse_decoded_ties(loader, ready)
    if not _has_ties(ready, cache_arrays):
        return ready
    names_of: dict[Any, list[tuple[int, int]]] = {}  # number of the target and of the name
    for number, ready_target in enumerate(ready):
        arrays = ready_target.memory()
        for position, name in enumerate(ready_target.names):
            key = _memory_id(ready_target.filling.targets[name], arrays[name])
            names_of.setdefault(key, []).append((number, position))
    groups = [group for key, group in names_of.items() if key is not None and len(group) > 1]
    refuse_other_bytes(
        loader, [[ready[number].tied_name(loader, at) for number, at in g] for g in groups]
    )
    joined = set()
    for group in groups:  # several sections with one memory are read one after the other
        last = dict(group)
        joined |= {(number, position) for number, position in group if last[number] != position}
    return [
        each.of([i for i in range(len(each.names)) if (number, i) not in joined])
        for number, each in enumerate(ready)
    ]


def _refuse_decoded_ties(loader: Loader, ready: list[_Ready]) -> None:
    """Raise CompatibilityError if a weight is decoded into memory that another name has too."""
    seen: dict[Any, str] = {}
    for each in ready if any(each.decoded for each in ready) else ():
        arrays = each.memory()
        for name in (*each.names, *each.decoded):
            key = _memory_id(each.filling.targets[name], arrays[name])
            other = seen.setdefault(key, name) if key is not None else name
            if other != name:
                error = CompatibilityError(
                    f"{name!r} and {other!r} are one memory, and quantized weights are decoded "
                    "into a tensor of their own: pass a tensor for each, or load one by names="
                )
                error.name, error.path = name, loader.folder
                raise error


def _memory_id(target: Any, array: Any) -> object:
    """Return a key that is equal for targets of one memory; None if it has no known address.

    `array`: what a read fills instead of a `target` on a device. Overlaps were refused before.
    """
    if is_on_device(target):
        return memory_key(target)
    return memory_range(array.array if isinstance(array, Shard) else array)


def _optimizer_as_state(loader: Loader, optimizer: Any) -> Any:
    """Return the target of ``into["optimizer"]`` if it is stored as a named state, else None."""
    is_state = OPTIMIZER_STATE in loader.states and loader.sections[OPTIMIZER].kind is None
    return optimizer if is_state else None


def find_targets(loader: Loader) -> Prepared:
    """Return the caller's targets of `into`; raise CompatibilityError if one was not saved.

    Named states that were not saved are left out, with a warning.
    """
    into: Any = loader.options["into"]
    (model, optimizer, states), folder = into, loader.folder
    states = dict(states)
    as_state = _optimizer_as_state(loader, optimizer)
    if as_state is not None:
        states[OPTIMIZER_STATE], optimizer = as_state, None
    lacking = [
        section.label
        for section, target in zip(loader.sections, (model, optimizer), strict=False)
        if target is not None and section.kind is None
    ]
    if lacking:
        raise CompatibilityError(f"{folder} holds no {lacking[0]}", path=folder)
    absent = [name for name in states if name not in loader.states]
    for name in absent:
        del states[name]
    if absent:
        have = ", ".join(repr(name) for name in loader.states if name[0] != ".") or "none"
        text = ", ".join(map(repr, absent))
        find_caller().warn(f"{folder} holds no state {text} (named states: {have}): not loaded")
    return Prepared(model, optimizer, states, as_state)


def _prepare_tensors_of_state(
    loader: Loader, prepared: Prepared, name: str, target: Any, modules: list[object]
) -> None:
    """Check the tensors of a named state against their target, and add how to fill it.

    `modules`: all torch modules of the load, which may have the parameters of an optimizer. Raises
    CompatibilityError, TypeError or ValueError, with the name of the state, if it does not fit.
    """
    section = loader.named[name]
    tensors = is_module(target) or is_optimizer(target) or hasattr(target, "keys")
    if not tensors and not callable(getattr(target, "load_state_dict", None)):
        raise TypeError(
            f"into={{'states': ...}}: {section.label} has tensors, and cannot be restored into a "
            f"{type(target).__name__}: pass a module, an optimizer, a mapping of arrays, or an "
            "object with load_state_dict()"
        )
    if tensors:
        module = owner_of(target, modules) if is_optimizer(target) else None
        try:
            _prepare_tensors(loader, section, section.names, target, module, ALL_NAMES, prepared)
        except (CompatibilityError, TypeError, ValueError) as error:
            error.args = (f"{section.label}: {error}",)
            raise
    else:
        _choose_entries(loader, section, {}, ALL_NAMES)
        prepared.sources.add(target, section.label, partial(text_of_section, loader, section))
        loader.need([(section, section.names, loader.request.cutting)])
        state = loader.load_state(section, section.names, {})
        prepared.actions.append(prepare_object(section.label, target, state))


def prepare(loader: Loader, prepared: Prepared) -> None:
    """Check all targets of ``into``; raise if one does not match. No target is changed yet.

    Nested values, and states of optimizers with their own load methods, are read to new memory.
    """
    names, chosen = loader.chosen()
    for section, target in zip(loader.sections, (prepared.model, prepared.optimizer), strict=False):
        if target is not None:
            selected = chosen[section.number]
            _prepare_tensors(loader, section, selected, target, prepared.model, names, prepared)
    modules: list[object] = []
    trees = {}
    if prepared.states:
        modules = modules_of(prepared.model, prepared.states)
        trees = read_trees(loader, [name for name in prepared.states if name not in loader.named])
    for name, target in prepared.states.items():
        if name in trees:
            [stored] = trees.pop(name)
            prepared.actions += prepare_tree(loader, name, stored, target, prepared.sources)
        else:
            _prepare_tensors_of_state(loader, prepared, name, target, modules)
    if prepared.sources.tensors:
        refuse_overlaps(prepared.sources.tensors)
    if prepared.optimizer is not None:
        loader.refuse_lacking(chosen)
    loader.need(
        (ready_target.section, ready_target.names, ready_target.cuts)
        for ready_target in prepared.ready
    )
    for ready_target in prepared.ready:
        _check(loader, ready_target)
    _read_for_loaders(loader, prepared)
    _refuse_mixture(loader, prepared.ready)
    # actions without undo run last, when no other target can refuse any more
    prepared.actions.sort(key=lambda action: action.undo is None)
    caches = prepared.sources.cache_arrays
    prepared.ready = _join_tied_names(loader, prepared.ready, caches)


def _refuse_mixture(loader: Loader, ready: list[_Ready]) -> None:
    """Raise CompatibilityError if a target has content of a failed load, and is not filled now."""
    now_filled = {each for ready_target in ready for each in ready_target.filled()}
    # state and name of a target, such as ("model", "w")
    unfilled = min((loader.request.written or set()) - now_filled, default=None)
    if unfilled is not None:
        error = CompatibilityError(
            f"{loader.folder} has no {unfilled[1]!r} of {unfilled[0]} for a target that a failed "
            "load of another checkpoint has written to, so the target would mix two: pass a new one"
        )
        error.name, error.path = unfilled[1], loader.folder
        raise error


def _read_for_loaders(loader: Loader, prepared: Prepared) -> None:
    """Read the states of optimizers with their own load methods, and add actions that load them.

    The states are read to new memory, so nothing is changed yet. These targets leave
    `prepared.ready`, because the actions fill them.
    """
    own_loaders = [
        ready_target
        for ready_target in prepared.ready
        if getattr(ready_target.filling, "own_loader", False)
    ]
    for ready_target in own_loaders:
        _fill(loader, ready_target)
        target, state = ready_target.filling.optimizer, ready_target.filling.state_dict()
        prepared.actions.append(prepare_object(ready_target.section.label, target, state))
    prepared.ready = [
        ready_target for ready_target in prepared.ready if ready_target not in own_loaders
    ]
