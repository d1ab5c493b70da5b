"""`into=`, `strict=`: targets of a load, names or shapes that differ, tied weights.

A *filling* is the memory of one target, by name: an `_ArrayTarget`, or for torch the result of
`fill_module` or `fill_optimizer` of the backend.

Prepared          the user's targets
Prepared.prepare  checks all of them
apply_all         restores the objects; see _states/restore.py
Prepared.fill     reads the tensors into their targets
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ... import _core
from ..._common.arrays import is_on_device, is_torch, memory_key, memory_range, refuse_masked
from ..._common.backend import TensorBackend, backend_of, is_module, is_optimizer
from ..._common.caller import find_caller
from ..._common.converted import converted, is_converted
from ..._common.dtypes import FLOAT8S, FLOATS, name_of, numpy_dtype
from ..._common.staged_targets import StagedTargets, refuse_overlaps_on_devices
from ..._sharding.layout import Cuts, Layout, Shard
from ...errors import CompatibilityError
from ...state._compatibility import LISTED, join, rename_hint
from ...state._load_into import check_load, load_into
from ...state._optimizer_state import OptimizerStateDict
from .._backend import CheckpointBackend, OptimizerRecord, OptimizerRequest
from .._loaded_state import LoadedState
from .._quantized.pairs import WHOLE
from .._records import part_of_record
from .._sections import OPTIMIZER, OPTIMIZER_STATE
from .._states.collect import modules_of, owner_of
from .._states.excluded import Excluded
from .._states.modules import prepare_units, stored_entries, text_of_section
from .._states.restore import Sources, prepare_object, prepare_tree, read_trees, refuse_overlaps
from .._store.name_globs import ALL_NAMES
from .._ties import TiedName, refuse_other_bytes
from .decoded import computed_parts, decode_names, refuse_other_part

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from .._quantized.pairs import Pair
    from .._records import TensorRecord
    from .._sections import Section
    from .._sources.protocol import How
    from .._states.modules import StoredEntries
    from .._states.restore import Action
    from .._store.name_globs import Names
    from .arguments import Targets
    from .decoded import Decoded, ScaleBlocks
    from .loader import Loader

_NUMBERED = re.compile(r"param_\d+\.", re.ASCII)  # of an optimizer saved without its module


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
    missing: list[str], unexpected: list[str], unfilled: list[str], path: str, remedy: str = ""
) -> CompatibilityError:
    """Return an error, in torch's words, that lists mismatched names and suggests a rename.

    `missing`: names without a stored value. `unexpected`: stored names without a target.
    `unfilled`: all names of the target without a value, for the suggestion. `path`: of the
    checkpoint. `remedy`: a line if there is no suggestion.
    """
    lines = [f"Error(s) in loading {path}:"]
    for words, names in (("Missing", missing), ("Unexpected", unexpected)):
        if names:
            quoted = join([f'"{name}"' for name in names[:LISTED]])
            more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
            lines.append(f"{words} key(s) in checkpoint: {quoted}{more}.")
    sides = dict.fromkeys(unexpected), dict.fromkeys(unfilled)
    rules, hint = rename_hint(*sides, unexpected, unfilled)
    remedy = f"{hint.partition(' after ')[0]} with rename={rules!r}." if hint else remedy
    lines += [remedy] if remedy else []
    return CompatibilityError("\n    ".join(lines), name=(missing or unexpected)[0], path=path)


# ---- one target ----


class _Target:
    """The target of a section's tensors: names to read, and how their tensors are cut.

    `filling`: the target's memory, with `arrays` by name. `cuts`: one for all `names`, or a list.
    """

    filling: Any

    def __init__(
        self, loader: Loader, section: Section, choice: Names, elsewhere: Collection[str]
    ) -> None:
        """Create the target of `section`; `choice`: the names that the user chose.

        `elsewhere`: names that only targets of other ranks load; these are left out.
        """
        self.loader, self.request = loader, loader.request
        self.section = section.without(elsewhere) if elsewhere else section
        self.choice, self.elsewhere = choice, elsewhere
        self.names: list[str] = []
        self.cuts: Cuts = self.request.cutting
        self.casts: dict[str, Any] = {}  # targets of another dtype, by name
        self.computed: dict[str, Decoded | ScaleBlocks] = {}  # not read as they are stored

    def prepare(self, selected: list[str], target: Any, module: Any, prepared: Prepared) -> None:
        """Find the memory and the names to read; shapes are checked later.

        `selected`: stored names. `module`: may have the parameters of an optimizer. Adds the
        actions that load the submodules that must load their own entries to `prepared`. Raises
        CompatibilityError if names do not match.
        """
        loader, section = self.loader, self.section
        text = partial(text_of_section, loader, section)
        has_memory = not is_optimizer(target)
        prepared.sources.add(target, section.label, text, has_memory=has_memory)
        stored, entries = self.choose_entries(target)
        chosen = [*selected, *entries]
        if is_module(target) and not section.is_optimizer:
            self.filling = filling = prepared.fill_module(section.label, target)
            prepared.actions += prepare_units(
                loader, section, filling, chosen, stored, self.choice, prepared.sources
            )
            selected = [name for name in chosen if not filling.loads_itself(name)]
            clash = [name for name in entries if name in filling.arrays]
            if clash:
                raise names_error([], clash, [], loader.folder)
        elif is_optimizer(target):
            self.filling = self._fill_optimizer(selected, target, module)
        else:
            self.filling = _ArrayTarget(target)
        pairs: dict[str, Pair] = {}
        if section.label in loader.pairs:  # with cast=True
            self.section, selected, pairs = decode_names(loader, section, selected, self.filling)
            chosen = [*selected, *entries] if pairs else chosen
        if not loader.options["strict"]:
            self._refuse_unrelated(chosen)
        names = self._fit_names(selected)
        if pairs or self.request.cutting[2]:
            self.computed = computed_parts(loader, self.section, self.filling, pairs, names)
        self.names = [name for name in names if name not in self.computed]
        self._find_cuts()
        if self.request.cast:
            self._stage_casts()

    # ---- names ----

    def choose_entries(self, target: Any) -> tuple[StoredEntries, list[str]]:
        """Return a module's stored entries that are not tensors, and the chosen names of these.

        Raises CompatibilityError if `target` is not a module, and the load is strict or a chosen
        name is one of its arrays.
        """
        stored = stored_entries(self.loader, self.section, target)
        if not stored.entries:
            return stored, []
        entries = {n: each for n, each in stored.entries.items() if n not in self.elsewhere}
        chosen = self.choice.select(list(entries), self.section.number)[0]
        clash = [name for name in chosen if not is_module(target) and name in target]
        if clash or (chosen and not is_module(target) and self.loader.options["strict"]):
            raise names_error([], clash or chosen, [], self.loader.folder)
        return stored._replace(entries=entries), chosen

    def _refuse_unrelated(self, selected: list[str]) -> None:
        """Raise CompatibilityError if the target has names, and none of them is in `selected`.

        `selected`: stored names. A choice of names may have only names of other targets, and a
        stored optimizer may have no states.
        """
        names, is_optimizer_filling = _known(self.filling), hasattr(self.filling, "optimizer")
        if not set(names).isdisjoint(selected) or not (names or is_optimizer_filling):
            return
        if selected or not (self.choice.listed is not None or is_optimizer_filling):
            error = names_error(names, selected, names, self.loader.folder)
            error.args = (
                f"{self.section.label}: the target and the checkpoint have no name in common, and "
                f"strict=False does not excuse a whole part: {error}",
            )
            raise error

    def _fit_names(self, selected: list[str]) -> list[str]:
        """Return the names to read; raise if the target's names and the stored ones differ.

        `selected`: stored names. Each name of the user's choice must exist in both. With
        ``strict=False``, only shared names are returned. With ``missing="zeros"``, states that the
        checkpoint lacks are noted in `filling`, which zeroes them. Raises CompatibilityError.
        """
        filling, options, have = self.filling, self.loader.options, set(selected)
        unfilled = [n for n in filling.known if n not in have and n not in filling.optional]
        missing = self._without_tied(unfilled, selected)
        # a choice of names has two sections only, and all names of a named state are chosen
        number = min(self.section.number, OPTIMIZER)
        lacking = self.choice.select(missing, number)[0] if missing else []
        unexpected = [name for name in selected if name not in filling.known]
        # States that an optimizer lacks are created, zeroed or left out, as `missing` requests.
        lenient = self.section.is_optimizer and options["missing"] != "error"
        if options["strict"] and (unexpected or (lacking and not lenient)):
            lacking = [] if lenient else lacking
            remedy = "With strict=False, the other tensors are loaded."
            raise names_error(lacking, unexpected, unfilled, self.loader.folder, remedy)
        if options["missing"] == "zeros" and self.section.is_optimizer:
            for name in lacking:
                filling.zero(name)
        return [name for name in selected if name in filling.arrays]

    def _without_tied(self, unfilled: list[str], selected: list[str]) -> list[str]:
        """Return the names of `unfilled` whose memory receives no value under another name.

        `selected`: stored names. Hugging Face folders store tied weights, several names of one
        memory, under one name only.
        """
        if not unfilled or self.loader.manifest.weights is None:
            return unfilled
        arrays = self.filling.arrays
        order = [name for name in (*unfilled, *selected) if name in arrays]
        [tied] = _core.targets_tied([(self.section.label, order, arrays)], 1)
        left_out = set(tied) - set(selected)
        return [name for name in unfilled if name not in left_out]

    # ---- parts and dtypes ----

    def _find_cuts(self) -> None:
        """Set how the tensors are cut: a target may know its own part of each.

        Raises TypeError or CompatibilityError if it is of other parts than the load requests.
        """
        if isinstance(self.filling, _ArrayTarget):
            self._check_shards()
        elif self.request.by_target:
            self.cuts = self.filling.cuts(self.names)
        else:
            self.filling.whole()  # raises TypeError if the target is a part itself

    def _check_shards(self) -> None:
        """Raise CompatibilityError for a `Shard` of another part than the one that is read."""
        targets = self.filling.targets
        shards = {name: targets[name] for name in self.names if isinstance(targets[name], Shard)}
        for name, row in self.loader.rows_of(self.section, shards).items() if shards else ():
            part = part_of_record(row, self.request.cutting)
            refuse_other_part(self.section.label, name, shards[name], row.shape, part)

    def _stage_casts(self) -> None:
        """Replace targets that have another float dtype by arrays of the stored one.

        They receive the converted values after the read.
        """
        for name, row in self.loader.rows_of(self.section, self.names).items():
            target = self.filling.arrays[name]
            dtype = name_of(target.dtype)
            if is_converted(row.dtype, dtype) and dtype in FLOATS:
                self.casts[name] = target
                self.filling.arrays[name] = np.empty(tuple(target.shape), numpy_dtype(row.dtype))

    def _by_key(self) -> tuple[list[str], dict[str, Any]]:
        """Return the keys of the tensors to read, and the arrays that receive them, by key."""
        arrays = self.section.by_key(self.filling.arrays, self.names)
        return self.section.keys(self.names), arrays

    def check(self) -> None:
        """Raise CompatibilityError if a stored tensor does not fit in shape or dtype.

        Raises ValueError for an array that cannot be written. No tensor is read.
        """
        loader, filling = self.loader, self.filling
        keys, arrays = self._by_key()
        loader.source.fits(self.section.number, keys, self.cuts, arrays)
        for name, target in self.casts.items():  # from any float
            like = np.empty(filling.arrays[name].shape, np.float32)
            check_load({name: target}, {name: like}, strict=True, cast=True)
        for name, part in self.computed.items():
            part.check(loader, name, filling.arrays[name])

    def fill(self) -> None:
        """Read the section's tensors into the target; shapes and dtypes were checked.

        Converted tensors are read in the stored dtype first.
        """
        loader, filling = self.loader, self.filling
        keys, arrays = self._by_key()
        how: How = {**loader.how, "into": arrays}
        loader.source.read(self.section.number, keys, self.cuts, **how)
        for name, target in self.casts.items():
            array, filling.arrays[name] = filling.arrays[name], target
            if name_of(array.dtype) in FLOAT8S:
                array = converted(array, name_of(target.dtype))
            load_into({name: target}, {name: array}, cast=True)
        for name, part in self.computed.items():
            target = filling.arrays[name]
            target = target.array if isinstance(target, Shard) else target
            values = part.load(loader, self.section, name_of(target.dtype))
            load_into({name: target}, {name: values}, cast=self.request.cast)
        filling.finish([*self.names, *self.computed])

    def filled(self) -> set[tuple[str, str]]:
        """Return state and name of the targets that the load fills, if it may leave out some."""
        if hasattr(self.filling, "optimizer"):  # it loses the states that are left out
            return set()
        names = (*self.names, *self.computed, *self.filling.zeros)
        return {(self.section.label, name) for name in names}

    # ---- tied weights ----

    def memory(self) -> dict[str, Any]:
        """Return the arrays that the load writes, by name: after conversion, or before a copy."""
        return {**self.filling.arrays, **self.casts}

    def tied_name(self, name: str) -> TiedName:
        """Return a name to load, with the memory and the part that it receives."""
        [row] = self.loader.rows_of(self.section, [name]).values()
        array = self.casts.get(name, self.filling.arrays[name])
        array = array.array if isinstance(array, Shard) else array
        if isinstance(self.cuts, list):
            place = self.cuts[self.names.index(name)]
        else:
            place = row.shape, *part_of_record(row, self.cuts)
        where = f"{self.section.label}[{name!r}]"
        return TiedName(where, self.section.number, row, array, place)

    def leave_out(self, names: set[str]) -> None:
        """Do not read the tensors `names`: the memory of each receives another one."""
        positions = [i for i, name in enumerate(self.names) if name not in names]
        if isinstance(self.cuts, list):
            self.cuts = [self.cuts[i] for i in positions]
        self.names = [self.names[i] for i in positions]
        for name in self.casts.keys() & names:
            self.filling.arrays[name] = self.casts.pop(name)

    # ---- optimizers ----

    def _fill_optimizer(self, selected: list[str], optimizer: Any, module: Any) -> Any:
        """Return memory for the states of a torch optimizer; states that it lacks are created.

        `selected`: stored names. `module`: the model, of which a module has the parameters. The
        saved param_groups, the dtype and shape of each selected state, and the shapes of the
        model's parameters go to the backend, which fits them to `optimizer`. Raises
        CompatibilityError if the stored states cannot be matched to parameters.
        """
        loader, section, request = self.loader, self.section, self.request
        module = module if is_module(module) else None
        model = loader.sections[0]
        parameters = model.names if section.number == OPTIMIZER else []
        shapes = {n: self._shape_of(row) for n, row in loader.rows_of(model, parameters).items()}
        records = {}
        for name, row in loader.rows_of(section, selected).items():
            parameter, _, state = name.rpartition(".") if "." in name else (name, "", "")
            shape = self._shape_of(row)
            records[name] = OptimizerRecord(parameter, state, shape, row.dtype, row.axes)

        saved = section.restore({}, loader.folder)
        if not hasattr(saved, "param_groups"):  # the optimizer was saved as a plain dict
            saved = OptimizerStateDict()
        excluded = Excluded(loader.manifest.exclude)

        def meant(others: list[str]) -> list[str]:
            """Return those names of `others` that the user chose, and that the save included."""
            included = [name for name in others if not excluded.matches(name)]
            return self.choice.select(included, OPTIMIZER)[0]

        optimizer_request = OptimizerRequest(
            module=module,
            records=records,
            saved=saved,
            read=partial(loader.load_tensors, section, cutting=WHOLE),
            names=_parameters_source(loader, section, optimizer, module),
            meant=meant,
            elsewhere=frozenset(self.elsewhere),
            shapes=shapes,
            strict=loader.options["strict"],
            complete=request.names is None,
            cast=request.cast,
        )
        return backend_of(optimizer, CheckpointBackend).fill_optimizer(optimizer, optimizer_request)

    def _shape_of(self, row: TensorRecord) -> tuple[int, ...]:
        """Return the shape of the part to load into a target that does not know its own part."""
        if self.request.by_target:
            return row.shape
        steps, index = part_of_record(row, self.request.cutting)
        return Layout(steps).shape(row.shape, index)


def _parameters_source(loader: Loader, section: Section, optimizer: Any, module: Any) -> Any:
    """Return the source of the names of an optimizer's parameters: a module, None, or the names.

    `module`: has the parameters; None: the user passed none. States that are stored as
    ``param_0.<state>`` are matched by the order of parameters if `module` or the optimizer gives
    other names; without either, the optimizer's parameters are numbered anyway. Raises
    CompatibilityError if the states are stored under names that neither of them gives.
    """
    groups = (section.kind or {}).get("param_groups", ())
    names = section.names or [f"{name}." for g in groups for name in g.get("params", ())]
    has_names = ["param_names" in group for group in optimizer.param_groups]
    if names and all(map(_NUMBERED.match, names)):
        # the module's parameter order is then also torch's order, over all groups
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        is_named = module is not None or any(has_names)
        return [f"param_{i}" for i in range(count)] if is_named else None
    if names and module is None and not all(has_names):
        raise CompatibilityError(
            f"{loader.folder} stores optimizer states under names of parameters, such as "
            f"{names[0]!r}: pass the module too, "
            "into={'model': module, 'optimizer': optimizer}"
        )
    return module


def _known(filling: Any) -> list[str]:
    """Return the names of a target, also of entries that are not tensors or are not its memory."""
    contract = getattr(filling, "contract", None)
    return list(dict.fromkeys([*filling.known, *(contract.entries if contract else ())]))


# ---- all targets ----


class Prepared:
    """The targets of a load; `actions` restore the objects among the named states."""

    def __init__(self, loader: Loader) -> None:
        """Take the caller's targets; raise CompatibilityError if one was not saved.

        Named states that were not saved are left out, with a warning. An optimizer that is stored
        as a named state is a target of the named states.
        """
        self.loader = loader
        into = cast("Targets", loader.options["into"])
        if not hasattr(into.states, "keys"):
            kind = type(into.states).__name__
            raise TypeError(f"into['states'] must be a mapping of names to objects, got {kind}")
        self.model, self.optimizer, self.states = into.model, into.optimizer, dict(into.states)
        is_state = OPTIMIZER_STATE in loader.states and loader.sections[OPTIMIZER].kind is None
        if is_state and self.optimizer is not None:
            self.states[OPTIMIZER_STATE], self.optimizer = self.optimizer, None
        self.actions: list[Action] = []
        self.ready: list[_Target] = []
        self.elsewhere: Mapping[str, set[str]] = {}  # names that other ranks load, by section
        self._modules: dict[str, Any] = {}
        folder = loader.folder
        for section, _ in self._parts():
            if section.kind is None:
                raise CompatibilityError(f"{folder} holds no {section.label}", path=folder)
        absent = [name for name in self.states if name not in loader.states]
        for name in absent:
            del self.states[name]
        if absent:
            have = ", ".join(repr(name) for name in loader.states if name[0] != ".") or "none"
            text = ", ".join(map(repr, absent))
            find_caller().warn(f"{folder} holds no state {text} (named states: {have}): not loaded")

    def _parts(self) -> list[tuple[Section, Any]]:
        """Return the sections of model and optimizer that have a target, with it."""
        pairs = zip(self.loader.sections, (self.model, self.optimizer), strict=False)
        return [(section, target) for section, target in pairs if target is not None]

    def fill_module(self, label: str, module: Any) -> Any:
        """Return the filling of a module, the target of the section `label`."""
        if label not in self._modules:
            self._modules[label] = backend_of(module, CheckpointBackend).fill_module(module)
        return self._modules[label]

    def names(self) -> dict[str, Collection[str] | None]:
        """Return the names of each target, by label of its section; None: it takes any name.

        For a torch optimizer, these are the names of its parameters.
        """
        loader, modules = self.loader, modules_of(self.model, self.states)
        named = [(each, self.states[n]) for n, each in loader.named.items() if n in self.states]
        names: dict[str, Collection[str] | None] = {}
        for section, target in [*self._parts(), *named]:
            if is_optimizer(target):
                module = self.model if section.number == OPTIMIZER else owner_of(target, modules)
                module = module if is_module(module) else None
                source = _parameters_source(loader, section, target, module)
                backend = backend_of(target, CheckpointBackend)
                names[section.label] = set(backend.parameter_names(target, module, source))
            elif is_module(target) and not section.is_optimizer:
                names[section.label] = set(_known(self.fill_module(section.label, target)))
            else:
                names[section.label] = set(target) if hasattr(target, "keys") else None
        return names

    # ---- checks ----

    def prepare(self) -> None:
        """Check all targets; raise if one does not match. No target is changed yet.

        Nested values, and states of optimizers with their own load methods, are read to new memory.
        """
        loader, self.sources = self.loader, Sources()
        names, chosen = loader.chosen()
        for section, target in self._parts():
            self._add(section, chosen[section.number], target, self.model, names)
        if self.states:
            self._add_states()
        if self.sources.tensors:
            refuse_overlaps(self.sources.tensors)
        if self.optimizer is not None:
            loader.refuse_lacking(chosen)
        loader.need((each.section, each.names, each.cuts) for each in self.ready)
        for each in self.ready:
            each.check()
        self._read_for_loaders()
        self._refuse_mixture()
        # actions without undo run last, when no other target can refuse any more
        self.actions.sort(key=lambda action: action.undo is None)
        self._join_tied_names()

    def _add(
        self, section: Section, selected: list[str], target: Any, module: Any, choice: Names
    ) -> None:
        """Add the target of a section; see `_Target.prepare`."""
        elsewhere = self.elsewhere.get(section.label, set())
        new = _Target(self.loader, section, choice, elsewhere)
        if elsewhere:
            selected = [name for name in selected if name not in elsewhere]
        new.prepare(selected, target, module, self)
        self.ready.append(new)

    def _add_states(self) -> None:
        """Add the targets of named states, and the actions that restore nested values."""
        loader, modules = self.loader, modules_of(self.model, self.states)
        trees = dict(read_trees(loader, [n for n in self.states if n not in loader.named]))
        for name, target in self.states.items():
            if name in trees:
                [stored] = trees.pop(name)
                self.actions += prepare_tree(loader, name, stored, target, self.sources)
            else:
                self._add_state(loader.named[name], target, modules)

    def _add_state(self, section: Section, target: Any, modules: list[object]) -> None:
        """Check the tensors of a named state against their target, and add how to fill it.

        `modules`: all torch modules of the load, which may have the parameters of an optimizer.
        Raises CompatibilityError, TypeError or ValueError, with the name of the state, if it does
        not fit.
        """
        loader, label = self.loader, section.label
        if is_module(target) or is_optimizer(target) or hasattr(target, "keys"):
            module = owner_of(target, modules) if is_optimizer(target) else None
            try:
                self._add(section, section.names, target, module, ALL_NAMES)
            except (CompatibilityError, TypeError, ValueError) as error:
                error.args = (f"{label}: {error}",)
                raise
            return
        if not callable(getattr(target, "load_state_dict", None)):
            raise TypeError(
                f"into={{'states': ...}}: {label} has tensors, and cannot be restored into a "
                f"{type(target).__name__}: pass a module, an optimizer, a mapping of arrays, or an "
                "object with load_state_dict()"
            )
        _Target(loader, section, ALL_NAMES, ()).choose_entries({})
        self.sources.add(target, label, partial(text_of_section, loader, section))
        loader.need([(section, section.names, loader.request.cutting)])
        state = loader.load_state(section, section.names, {})
        self.actions.append(prepare_object(label, target, state))

    def _read_for_loaders(self) -> None:
        """Read the states of optimizers with their own load methods; add actions that load them.

        The states are read to new memory, so nothing is changed yet. These targets leave `ready`,
        because the actions fill them.
        """
        loaders = [each for each in self.ready if getattr(each.filling, "own_loader", False)]
        for each in loaders:
            each.fill()
            target, state = each.filling.optimizer, each.filling.state_dict()
            self.actions.append(prepare_object(each.section.label, target, state))
        self.ready = [each for each in self.ready if each not in loaders]

    def _refuse_mixture(self) -> None:
        """Raise CompatibilityError if a target has content of a failed load, and is not filled."""
        loader, now_filled = self.loader, {name for each in self.ready for name in each.filled()}
        # state and name of a target, such as ("model", "w")
        unfilled = min((loader.request.written or set()) - now_filled, default=None)
        if unfilled is not None:
            raise CompatibilityError(
                f"{loader.folder} has no {unfilled[1]!r} of {unfilled[0]} for a target that a "
                "failed load of another checkpoint has written to, so the target would mix two: "
                "pass a new one",
                name=unfilled[1],
                path=loader.folder,
            )

    # ---- tied weights ----

    def _has_ties(self) -> bool:
        """Return whether several names of the targets share one memory, as tied weights do.

        Raises ValueError if targets, or caches among them, share memory in any other way.
        """
        memories = [(t.section.label, [*t.names, *t.computed], t.memory()) for t in self.ready]
        targets = [
            (label, names, each.filling.targets)
            for (label, names, _), each in zip(memories, self.ready, strict=True)
        ]
        count, has_devices = len(targets), any(each.filling.is_staged for each in self.ready)
        for label, cache in self.sources.cache_arrays.items():
            # those of NumPy and torch have known addresses
            arrays = {n: a for n, a in cache.items() if isinstance(a, np.ndarray) or is_torch(a)}
            targets.append((label, list(arrays), arrays))
            memories.append((label, [n for n in arrays if not is_on_device(arrays[n])], arrays))
            has_devices = True
        is_tied = has_devices and refuse_overlaps_on_devices(targets, count)
        return any(_core.targets_tied(memories, count)) or is_tied

    def _join_tied_names(self) -> None:
        """Leave out names whose memory a later name shares: one read fills both.

        Raises CompatibilityError if stored tensors for one memory have different bytes or are
        computed, ValueError if targets share memory in any other way.
        """
        if not self._has_ties():
            return
        names_of: dict[Any, list[tuple[_Target, str]]] = {}
        for each in self.ready:
            arrays = each.memory()
            for name in (*each.names, *each.computed):
                key = _memory_id(each.filling.targets[name], arrays[name])
                if key is not None:
                    names_of.setdefault(key, []).append((each, name))
        groups = [group for group in names_of.values() if len(group) > 1]
        for group in groups:
            if any(name in each.computed for each, name in group):
                (_, other), (_, name), *_ = group
                raise CompatibilityError(
                    f"{name!r} and {other!r} are one memory, and values or blocks of scales of "
                    "quantized weights fill a tensor of their own: pass a tensor for each, or load "
                    "one by names=",
                    name=name,
                    path=self.loader.folder,
                )
        refuse_other_bytes(self.loader, [[t.tied_name(name) for t, name in g] for g in groups])
        joined: dict[_Target, set[str]] = {}
        for group in groups:  # several sections with one memory are read one after the other
            last = dict(group)
            for each, name in group:
                if last[each] != name:
                    joined.setdefault(each, set()).add(name)
        for each, left_out in joined.items():
            each.leave_out(left_out)

    def fill(self) -> LoadedState:
        """Read all tensors into their targets, and return these.

        After an error or interrupt, their content is undefined, and a note in the error tells it.
        """
        loader = self.loader
        if loader.request.written is not None:
            loader.request.written.update(*(each.filled() for each in self.ready))
        try:
            for each in self.ready:
                each.fill()
        except BaseException as error:
            error.add_note(
                "the arrays and tensors in into= are partly written: load into them again before "
                'you use them; verify="first" finds damage before anything is written'
            )
            raise
        manifest, into = loader.manifest, cast("Targets", loader.options["into"])
        return LoadedState(
            into.model, into.optimizer, manifest.metadata, manifest.step, self.states
        )


def _memory_id(target: Any, array: Any) -> object:
    """Return a key that is equal for targets of one memory; None if it has no known address.

    `array`: what a read fills instead of a `target` on a device. Overlaps were refused before.
    """
    if is_on_device(target):
        return memory_key(target)
    return memory_range(array.array if isinstance(array, Shard) else array)
