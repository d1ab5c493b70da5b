"""Torch modules and optimizers as load targets: this rank's memory; new or converted states.

A `Place` is a tensor of this rank and the part of a checkpoint's tensor that it receives: all of
it, a part of a layout (DTensors), or a run of elements (FSDP1's flat parameters). The core reads
each part directly into its memory; ranks exchange no data.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ...._common.arrays import overlaps_itself, with_order
from ...._common.staged_targets import StagedTargets
from ...._sharding.layout import Shard
from ....checkpoint._states.containers import mapped, parts_error, refuse_other_parts
from ....errors import CompatibilityError
from .._tensors.dtypes import torch_has
from .._tensors.state import state_dict_of
from .dtensor_shards import _reshard, included_parts, module_state, part_of
from .dtensor_shards import tied_names as tied_names
from .fsdp1_flat import flat_runs, flat_wrappers, is_flattened, reshard_flat
from .module_contract import EXTRA, ModuleContract, OwnLoad, refuse_units
from .module_names import unwrapped_name
from .optimizer import (
    dimension_orders,
    is_number,
    is_tensor,
    number_states,
    order_of_state,
    packed_states,
    refuse_unfit,
    unpack_state,
)
from .optimizer_contract import check_contract, has_own_loader, torch_form
from .optimizer_contract import divided_state as divided_state
from .optimizer_contract import fits_table as fits_table
from .optimizer_groups import Scope, match_groups, set_state
from .optimizer_slots import ParameterSlot, parameter_slots
from .optimizer_values import NOT_VALUES, tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import torch

    from ...._sharding.layout import Steps
    from ....checkpoint._backend import OptimizerRecord, OptimizerRequest
    from ....checkpoint._states.excluded import Excluded


class Place(NamedTuple):
    """Memory of this rank for a tensor of a checkpoint, and the part that it receives."""

    tensor: torch.Tensor
    shape: tuple[int, ...]  # shape of the whole tensor
    cut: Steps | int  # steps of a layout (): the whole tensor; or begin of a run of elements
    last: int  # index of the part in the layout, or end of the run


def _place(name: str, value: Any) -> Place:
    """Return this rank's memory for a value of a state dict; `name`: for errors.

    Raises CompatibilityError if its elements share memory.
    """
    part = part_of(name, value)
    tensor = part.array if isinstance(part, Shard) else part
    if overlaps_itself(tensor):  # so after expand(); torch refuses such writes too
        raise CompatibilityError(
            f"{name!r} has elements that share memory (strides {tensor.stride()}): load into a "
            "clone() of it",
            name=name,
        )
    if isinstance(part, Shard):
        return Place(tensor, part.shape, part._steps, part.index)
    return Place(tensor, tuple(tensor.shape), (), 0)


# ---- saving ----


def _ranks_of(wrapper: Any) -> int:
    """Return the number of ranks over which FSDP1 spreads a module, including replicas."""
    between = getattr(wrapper, "_inter_node_pg", None)
    return int(wrapper.process_group.size() * (1 if between is None else between.size()))


def _check_ranks(module: torch.nn.Module, ranks: int) -> None:
    """Raise ValueError if a module is spread over more ranks than take part in a save.

    `ranks`: number of those.
    """
    for wrapper in flat_wrappers(module):
        if _ranks_of(wrapper) > ranks:
            name = next(iter(flat_runs(module, [wrapper])), type(module).__name__)
            raise parts_error(repr(name), _ranks_of(wrapper), ranks)
    for name, parameter in module.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.size() > ranks:
            raise parts_error(repr(unwrapped_name(module, name)), mesh.size(), ranks)


def _check_optimizer(optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """Raise for an optimizer of FSDP1 (TypeError), or one that more than `ranks` ranks share.

    This is for optimizers without their module.
    """
    for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        if is_flattened(parameter):
            raise TypeError(
                "the optimizer's parameters are FSDP1's, which are flat and have no names: pass "
                "the module too"
            )
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.size() > ranks:
            raise parts_error(repr(f"param_{number}"), mesh.size(), ranks)


def saved_module(
    module: torch.nn.Module, ranks: int
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a module's tensors as `module_state` does, its other entries, and torch's metadata.

    All three are by name; the metadata are of submodules that load their own entries, as
    `ModuleContract.own_metadata` has them. `ranks`: number of processes that save together. Raises
    ValueError if the module is spread over more ranks.
    """
    _check_ranks(module, ranks)
    if flat_wrappers(module):
        return module_state(module)[0], {}, {}
    contract = ModuleContract(module, state_dict_of(module))
    tensors, others = {}, {}
    for name, value in contract.entries.items():
        # an extra state returns with its type and order of dimensions, which tables lack
        is_extra = name.rpartition(".")[2] == EXTRA and is_tensor(value)
        if is_extra and (getattr(value, "requires_grad", False) or order_of_state(value)):
            others[name] = value
        elif is_tensor(value):
            tensors[name] = part_of(name, value)
        else:
            others[name] = value
    return tensors, others, contract.own_metadata()


def saved_optimizer(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module | None, ranks: int, excluded: Excluded
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states and keywords of `included_parts`, to save by `ranks` processes.

    `module`: has the parameters; None: unknown. `excluded`: states to leave out. Raises ValueError
    if the parameters are spread over more ranks.
    """
    if module is None:
        _check_optimizer(optimizer, ranks)
    else:
        _check_ranks(module, ranks)
    states, keywords, _ = included_parts(optimizer, module, excluded)
    return states, keywords


# ---- loading into modules ----


class Filling(StagedTargets):
    """Memory of this rank for one section of a checkpoint.

    A checkpoint may lack the names in `optional`, which are further names of the same memory.
    `contract` lists submodules of a module that load their entries themselves.
    """

    def __init__(
        self,
        places: dict[str, Place],
        optional: Iterable[str] = (),
        contract: ModuleContract | None = None,
    ) -> None:
        """Prepare to fill `places`, by name; allocates CPU memory for tensors on a device.

        `optional`, `contract`: see the class.
        """
        super().__init__({name: place.tensor for name, place in places.items()})
        self.places = places
        self.contract = contract
        self.optional = frozenset(optional)
        self.known: Collection[str] = places.keys()  # names to compare with the stored ones

    def loads_itself(self, name: str) -> bool:
        """Return whether an entry belongs to a submodule that loads its entries itself."""
        return self.contract is not None and self.contract.unit_of(name) is not None

    def own_load(self, entries: Any, metadata: Any, units: list[Any], *, strict: bool) -> OwnLoad:
        """Return the load of `units` of the module by their own methods; nothing is loaded yet.

        `entries`: their values by name. `metadata`: of modules, as `saved_module` returned it; None
        if the checkpoint is not of mlstate. `strict`: as torch's.
        """
        assert self.contract is not None
        default = {} if metadata is None else {"version": 1}
        by_prefix = self.contract.metadata_by_prefix(metadata or {}, default)
        return OwnLoad(self.contract, units, entries, by_prefix, strict=strict)

    def cuts(self, keys: Sequence[str]) -> list[tuple[tuple[int, ...], Any, int]]:
        """Return for each key the part that it receives: shape of the whole, cut, and last."""
        return [self.places[key][1:] for key in keys]

    def whole(self) -> None:
        """Raise TypeError if this rank has only a part of some tensor.

        The load's layout arguments would contradict the one that the tensor records.
        """
        for name, place in self.places.items():
            if place.cut != ():
                raise TypeError(
                    f"{name!r} is a part of a tensor, and its layout is known: do not pass "
                    "layout=, rank= and world_size="
                )


def fill_module(module: torch.nn.Module) -> Filling:
    """Return this rank's memory for a module's state, by the names of `saved_module`.

    Gathered parameters of FSDP are freed first: a load into them would be lost. Raises
    CompatibilityError for submodules of FSDP1 that load themselves, and for a tensor whose elements
    share memory.
    """
    wrappers = flat_wrappers(module)
    if not wrappers:
        _reshard(module)  # FSDP2: gathered parameters would be outdated
        contract = ModuleContract(module, state_dict_of(module))
        entries = contract.entries.items()
        places = {n: _place(n, value) for n, value in entries if contract.unit_of(n) is None}
        return Filling(places, (), contract)
    refuse_units(module, "FSDP1")
    reshard_flat(wrappers)
    runs = flat_runs(module, wrappers)
    places = {name: Place(*run.place(run.flat)) for name, run in runs.items()}
    for name, tensor in _unflattened_tensors(module):
        places[unwrapped_name(module, name)] = _place(name, tensor)
    tied = [name for name, run in runs.items() if run.tied]
    return Filling(places, tied)


def _unflattened_tensors(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield name and tensor of parameters that FSDP1 ignores, and of persistent buffers."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        start = prefix + "." if prefix else ""
        for name, parameter in child._parameters.items():
            if parameter is not None and not is_flattened(parameter):
                yield start + name, parameter.detach()
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield start + name, buffer


# ---- loading into optimizers ----


def _convert_like_torch(
    key: str, slot: ParameterSlot, group: dict[str, Any], value: torch.Tensor
) -> torch.Tensor:
    """Return the state `value` in the dtype and on the device that ``load_state_dict`` gives it.

    `key`: of the state; torch decides by its name, by the parameter of `slot`, and by `group`, the
    values of its group.
    """
    import torch

    # instead of the parameter: torch reads only its dtype and device
    owner = torch.empty(0, dtype=slot.owner.dtype, device=slot.owner.device)
    convert = torch.optim.Optimizer._process_value_according_to_param_policy
    # 0: the number of the parameter, by which torch finds its group
    return convert(owner, value, 0, [{**group, "params": [0]}], key.rpartition(".")[2])


def _convert_nested(key: str, slot: ParameterSlot, group: dict[str, Any], value: Any) -> Any:
    """Return a nested state as torch's ``load_state_dict`` converts it.

    As in torch, a tensor in a dict is converted by its key, such as "step", and one in a list as a
    state without a name. The arguments are as for `_convert_like_torch`, but `value` may be nested.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return _convert_like_torch(key, slot, group, value)
    prefix = "." if isinstance(value, dict) else ""

    def convert(name: object, inner: Any) -> Any:
        return _convert_nested(f"{prefix}{name if prefix else ''}", slot, group, inner)

    return mapped(value, convert)


def _is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether torch converts a dtype to another without rounding floats."""
    import torch

    try:
        return source == target or torch.promote_types(source, target) == target
    except RuntimeError:  # torch has no rule for some of them, such as float8
        if not (source.is_floating_point and target.is_floating_point):
            return False
        narrow, wide = torch.finfo(source), torch.finfo(target)
        return narrow.max <= wide.max and narrow.eps >= wide.eps and narrow.tiny >= wide.tiny


class OptimizerFilling(Filling):
    """Memory of this rank for the states of an optimizer.

    Missing states are created; `finish` adds them to the optimizer. States that the load does not
    include do not change.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, request: OptimizerRequest) -> None:
        """Check that the checkpoint's states fit the optimizer, and prepare memory for them.

        `request`: the stored states, and the options of the load. Raises CompatibilityError if they
        do not fit, and TypeError for an optimizer of FSDP1 without its module, or with its own load
        methods; nothing is changed then.
        """
        records, saved = request.records, request.saved
        if request.module is None:
            _check_optimizer(optimizer, 1 << 62)  # any number of ranks: each loads its own part
        check_contract(optimizer)
        self.optimizer = optimizer
        self.cast = request.cast
        self.slots, members = parameter_slots(optimizer, request.module, request.names)
        if not request.strict:  # only the states that both have
            records = {key: each for key, each in records.items() if each.parameter in self.slots}
        self.records = records
        self.own_loader = has_own_loader(optimizer)
        is_flat = any(slot.run for slot in self.slots.values())
        if self.own_loader and is_flat:
            raise TypeError(
                f"{type(optimizer).__name__} has its own load_state_dict or hooks, which cannot "
                "load states of FSDP1's flat parameters: use fully_shard (FSDP2)"
            )
        # keys of states that are stored as nested values
        self.packed = packed_states(saved.param_groups) & records.keys()
        self.orders = dimension_orders(saved.param_groups)  # other than C order, by key
        self._check_shapes(request.shapes)
        parameters = frozenset(record.parameter for record in records.values())
        scope = Scope(request.strict, request.complete, parameters, request.elsewhere)
        rate = saved.learning_rate
        self.groups = match_groups(saved.param_groups, rate, optimizer, members, scope)
        # values of the group of each parameter, by the parameter's name
        self.group_of = {
            name: group
            for group, names_of in zip(self.groups, members, strict=True)
            for name in names_of
        }
        self.likes: dict[Any, torch.Tensor] = {}  # results of `_like`, by dtypes, device and group
        # states by parameter that `finish` adds: created ones to fill, and converted values
        self.new: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        places, is_number_of = self._sort_states(saved)
        self._convert_stored(request.read, is_number_of)
        super().__init__(places)
        self._stage_exact_conversions()
        # states by key that the checkpoint lacks: the parameter's slot, name and value
        self.unsaved = {
            f"{name}.{state}": (slot, state, value)
            for name, slot in self.slots.items()
            for state, value in optimizer.state.get(slot.owner, {}).items()
            if f"{name}.{state}" not in records
        }
        # the unsaved states that the user chose: `zero` or `finish` resets them
        self.rest = {key: self.unsaved[key] for key in request.meant(list(self.unsaved))}
        self.known = {**records, **self.rest}.keys()
        if not self.own_loader and not is_flat:
            self._set_state(is_whole=request.strict and request.complete)

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CompatibilityError for states that do not fit; `shapes`: of stored parameters."""
        states = self.optimizer.state
        shapes_needed = {
            name: (slot.shape, {} if slot.run else states.get(slot.owner, {}))
            for name, slot in self.slots.items()
        }
        have = {key: () if key in self.packed else r.shape for key, r in self.records.items()}
        refuse_unfit(have, shapes_needed, shapes)

    def _slot_of(self, key: str) -> tuple[ParameterSlot, OptimizerRecord, Any]:
        """Return the parameter of the stored state `key`, its record, and the optimizer's value."""
        record = self.records[key]
        slot = self.slots[record.parameter]
        return slot, record, self.optimizer.state.get(slot.owner, {}).get(record.state)

    def _find_state(self, key: str, like: torch.Tensor) -> Any:
        """Return the tensor of the state to fill in place; None if torch would replace it.

        `like`: a tensor with the dtype and device that torch would give the state.
        """
        slot, record, value = self._slot_of(key)
        if record.state in self.new.get(slot.owner, {}):  # of another parameter in a flat one
            return self.new[slot.owner][record.state]
        if self.own_loader or not is_tensor(value):
            return None
        has_form = value.dtype == like.dtype and value.device == like.device
        fits = has_form and value.shape == record.shape
        if not hasattr(slot.owner, "device_mesh"):
            fits = fits and order_of_state(value) == self.orders.get(key)
        return value if slot.run or fits else None

    def _sort_states(self, saved: Any) -> tuple[dict[str, Place], dict[str, bool]]:
        """Return the places of states to read in place, and the keys of those that `finish` sets.

        The second maps each key to True if its value is a Python number, and to False for tensors
        of one element and nested values. `saved`: groups and learning rate of the checkpoint. A
        state to read in place that the optimizer lacks is created.
        """
        numbers = number_states(saved.param_groups)
        places: dict[str, Place] = {}
        is_number_of: dict[str, bool] = {}
        for key in self.records:
            if key in self.packed:
                is_number_of[key] = False
                continue
            slot, record, value = self._slot_of(key)
            like = self._like(key)
            current = self._find_state(key, like)
            # without saved groups, the optimizer decides
            number = key in numbers if saved.param_groups else is_number(value)
            is_scalar = record.shape != slot.shape and record.shape in ((), (1,))
            # the parameters in a flat one share a scalar: it is not a part of a run
            if number or (is_scalar and (slot.run or current is None)):
                is_number_of[key] = number
            else:
                places[key] = self._place_of(key, current, like)
        return places, is_number_of

    def _like(self, key: str) -> torch.Tensor:
        """Return an empty tensor with the dtype and device that torch would give the state `key`.

        Raises CompatibilityError if torch lacks the stored dtype.
        """
        import torch

        slot, record, _ = self._slot_of(key)
        if not torch_has(record.dtype):
            text = f"{key!r} is {record.dtype}, a dtype that torch lacks"
            raise CompatibilityError(text, name=key, got=record.dtype)
        owner, group = slot.owner, self.group_of[record.parameter]
        # torch chooses by these values alone, so states that agree in them share one answer
        inputs = (record.dtype, record.state, owner.dtype, owner.device, id(group))
        if inputs not in self.likes:
            empty = torch.empty(0, dtype=getattr(torch, record.dtype), device="cpu")
            self.likes[inputs] = self._convert(key, empty)
        return self.likes[inputs]

    def _convert(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """Return the value of the state `key` as torch would load it.

        An optimizer with its own load methods converts it itself: then only the device changes.
        """
        slot, record, _ = self._slot_of(key)
        converted = _convert_like_torch(key, slot, self.group_of[record.parameter], value)
        return value.to(converted.device) if self.own_loader else converted

    def _place_of(self, key: str, current: Any, like: torch.Tensor) -> Place:
        """Return the memory for the state `key`.

        `current`: the optimizer's own tensor; None: create one like `like`, and add it. A flat
        parameter without elements on this rank gets empty memory. Raises CompatibilityError for a
        state of FSDP1 that has another shape than its parameter, and BufferError for a new state of
        a parameter on the meta device.
        """
        slot, record, _ = self._slot_of(key)
        run = slot.run
        if run is not None and record.shape != slot.shape:
            raise CompatibilityError(
                f"{key!r} has shape {record.shape}, its parameter {slot.shape}: FSDP1 flattens "
                "parameters and their states; load into FSDP2 or a plain module",
                name=key,
            )
        if run is not None and slot.owner.numel() == 0:  # torch never creates a state for it
            import torch

            return Place(*run.place(torch.empty(0, dtype=getattr(torch, record.dtype))))
        if current is None:
            self.new[slot.owner][record.state] = current = self._new_state(key, like)
        return _place(key, current) if run is None else Place(*run.place(current.detach()))

    def _new_state(self, key: str, like: torch.Tensor) -> torch.Tensor:
        """Return a new tensor of zeros for the state `key`, sharded like its parameter.

        If the stored state has another shape than the parameter, `axes` of its record tells which
        axes of the parameter it has, and so how it is sharded. `like`: a tensor with the dtype.
        Raises BufferError for parameters on the meta device.
        """
        import torch

        slot, record, _ = self._slot_of(key)
        owner, dtype = slot.owner.detach(), like.dtype
        if owner.device.type == "meta":
            raise BufferError(
                f"{key!r} is of a parameter on torch's meta device: call to_empty(device=) on the "
                "module first, tie its weights again, and create the optimizer after that"
            )
        mesh = getattr(owner, "device_mesh", None)
        if slot.run is None and mesh is None:
            zeros = torch.zeros(record.shape, dtype=dtype, device=owner.device)
            return with_order(zeros, self.orders[key]) if key in self.orders else zeros
        if slot.run is not None or record.shape == slot.shape:
            return torch.zeros_like(owner, dtype=dtype)
        from torch.distributed import tensor as distributed

        axes = record.axes or ()
        placements = [
            distributed.Shard(axes.index(placement.dim))
            if placement.is_shard() and placement.dim in axes
            else distributed.Replicate()
            for placement in owner.placements  # type: ignore[attr-defined]
        ]
        shape = record.shape
        return distributed.zeros(*shape, dtype=dtype, device_mesh=mesh, placements=placements)

    def _stage_exact_conversions(self) -> None:
        """Let states that torch converts without rounding be read in their stored dtype.

        Their entries in `arrays` become new CPU tensors of that dtype, which the load fills.
        `finish` copies them to the optimizer's tensors, which converts them.
        """
        import torch

        for key, array in self.arrays.items():
            dtype = getattr(torch, self.records[key].dtype)
            if array.dtype != dtype and _is_exact(dtype, array.dtype):
                self.arrays[key] = torch.empty(array.shape, dtype=dtype, device="cpu")

    def _value_of(self, key: str, array: Any, *, number: bool) -> Any:
        """Return the value that torch would load for the stored scalar or nested state `key`.

        `array`: the stored bytes or number. `number`: return a Python number. Raises
        CompatibilityError for a conversion that rounds, without `cast`.
        """
        slot, record, current = self._slot_of(key)
        if key in self.packed:
            value = unpack_state(key, array, self.optimizer)
            refuse_other_parts(value, current, key)
            group = self.group_of[record.parameter]
            return value if self.own_loader else _convert_nested(key, slot, group, value)
        if number:
            return array.item()
        tensor = tensor_of(array)
        value = self._convert(key, tensor)
        if not self.cast and not _is_exact(tensor.dtype, value.dtype):
            text = (
                f"{key!r} is {tensor.dtype} in the checkpoint, and torch would convert it to "
                f"{value.dtype}, the dtype of its parameter: pass cast=True to allow this"
            )
            got, expected = str(tensor.dtype), str(value.dtype)
            raise CompatibilityError(text, name=key, got=got, expected=expected)
        return value

    def _convert_stored(self, read: Callable[..., Any], is_number_of: dict[str, bool]) -> None:
        """Add the values to `new` that `finish` sets.

        `read`: returns stored values by key. `is_number_of`: of `_sort_states`. Raises
        CompatibilityError if parameters in one flat parameter have different values.
        """
        arrays = read(sorted(is_number_of)) if is_number_of else {}
        first: dict[tuple[int, str], str] = {}  # first key of each state of a flat parameter
        for key, array in arrays.items():
            slot, record, _ = self._slot_of(key)
            if slot.run is not None and slot.owner.numel() == 0:
                continue
            other = first.setdefault((id(slot.owner), record.state), key)
            if arrays[other].tobytes() != array.tobytes():
                raise CompatibilityError(
                    f"{other!r} is {arrays[other]} and {key!r} is {array}, but FSDP1 "
                    "stores them in one flat parameter: wrap them separately, or with "
                    "use_orig_params=True",
                    name=key,
                )
            value = self._value_of(key, array, number=is_number_of[key])
            self.new[slot.owner][record.state] = value

    def _loaded_states(self) -> dict[Any, dict[str, Any]]:
        """Return the states after the load by parameter, without those that are filled in place."""
        states: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for key, (slot, state, value) in self.unsaved.items():
            if key not in self.rest:
                states[slot.owner][state] = value
        for owner, values in self.new.items():
            states[owner].update(values)
        return states

    def _set_state(self, *, is_whole: bool) -> None:
        """Convert values in `new` as the optimizer's ``__setstate__`` does at the end of a load.

        The optimizer itself is unchanged. `is_whole`: the load includes all of its states. Raises
        CompatibilityError if that fails; if the load is not whole, states that the optimizer
        requires may be missing, and the values stay as read.
        """
        states = self._loaded_states()
        for key in self.places:
            slot, record, value = self._slot_of(key)
            states[slot.owner].setdefault(record.state, value)
        pairs = zip(self.groups, self.optimizer.param_groups, strict=True)
        groups = [{**values, "params": group["params"]} for values, group in pairs]
        try:
            set_state(self.optimizer, states, groups)
        except Exception as error:
            if not is_whole:
                return
            raise CompatibilityError(
                f"{type(self.optimizer).__name__} cannot take the saved states, which are of "
                f"another optimizer: its __setstate__ raised {type(error).__name__}: {error}"
            ) from error
        for key in self.records.keys() - self.places.keys():
            slot, record, _ = self._slot_of(key)
            self.new[slot.owner][record.state] = states[slot.owner][record.state]

    def zero(self, name: str) -> None:
        """Register a state that the checkpoint lacks, to become zeros in `finish`.

        Other values than tensors and numbers stay in `rest`, and `finish` removes them.
        """
        import torch

        slot, state, value = self.rest[name]
        if is_tensor(value) or is_number(value):
            del self.rest[name]
        if self.own_loader and isinstance(value, torch.Tensor):
            self.new[slot.owner][state] = torch.zeros_like(value)
        elif isinstance(value, torch.Tensor):
            detached = value.detach()
            flat = slot.run is not None and detached.numel() == slot.owner.numel()
            self.zeros[name] = slot.run.view(detached) if slot.run and flat else detached
        elif is_number(value):
            self.new[slot.owner][state] = type(value)(0)

    def finish(self, names: Collection[str]) -> None:
        """Complete the load: add created and read states, and set the groups' values.

        States in `rest` are removed. An optimizer with its own load methods is unchanged: they
        receive `state_dict`. `names`: of the states that were read.
        """
        super().finish(names)
        if self.own_loader:
            return
        for slot, state, value in self.rest.values():
            self._drop_state(slot, state, value)
        for owner, states in self.new.items():
            self.optimizer.state[owner].update(states)
        for group, values in zip(self.optimizer.param_groups, self.groups, strict=True):
            for key in group.keys() - values.keys() - NOT_VALUES:
                del group[key]
            group.update(values)

    def state_dict(self) -> dict[str, Any]:
        """Return the argument of the optimizer's ``load_state_dict``: loaded states and groups.

        States that were not saved stay, except those that `rest` lists. This is for optimizers with
        their own load methods.
        """
        form = torch_form(self.optimizer)
        parameters = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        states = {numbers[owner]: each for owner, each in self._loaded_states().items()}
        groups = [
            {**values, **{key: group[key] for key in NOT_VALUES & group.keys()}}
            for values, group in zip(self.groups, form["param_groups"], strict=True)
        ]
        return {"state": states, "param_groups": groups}

    def _drop_state(self, slot: ParameterSlot, state: str, value: Any) -> None:
        """Remove the state named `state` of the parameter of `slot`, which was not saved.

        The optimizer creates it again if needed. `value`: its present value. In a flat parameter
        whose other parameters keep the state, its run becomes zeros instead; a state that is not of
        the flat parameter's size, such as a step, stays.
        """
        if slot.run is not None and self._is_shared(slot, state):
            if hasattr(value, "numel") and value.numel() == slot.owner.numel():
                slot.run.view(value.detach()).zero_()
            return
        states = self.optimizer.state.get(slot.owner, {})
        states.pop(state, None)
        if not states:
            self.optimizer.state.pop(slot.owner, None)

    def _is_shared(self, slot: ParameterSlot, state: str) -> bool:
        """Return whether another parameter in the same flat one keeps the state named `state`."""
        return any(
            other.owner is slot.owner and f"{name}.{state}" not in self.rest
            for name, other in self.slots.items()
        )


def parameter_names(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module | None, names: Any
) -> list[str]:
    """Return the names of an optimizer's parameters; see `parameter_slots` for the arguments."""
    return list(parameter_slots(optimizer, module, names)[0])


fill_optimizer = OptimizerFilling
