"""A torch optimizer as `OptimizerStateDict` and back: names, states, hyperparameters, rate."""

from __future__ import annotations

import math
import re
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ...._common.arrays import dimension_order, with_order
from ....checkpoint._folder.names import NEWER
from ....checkpoint._states.containers import is_wrapper
from ....checkpoint._states.exact_values import ZERO_REMEDY
from ....checkpoint._states.excluded import NONE_EXCLUDED
from ....checkpoint._states.tree import encode, packed, unpacked
from ....errors import CompatibilityError
from ....state._compatibility import join, rename_hint
from ....state._group_merge import packed_states as packed_states
from .._tensors.state import (
    arrays_of,
    clusters,
    explain_unsupported_tensor,
    sharable,
    tensors_of,
)
from .optimizer_contract import check_contract, is_state_name
from .optimizer_groups import match_groups
from .optimizer_values import (
    EXACT,
    NOT_VALUES,
    NUMBERS,
    ORDERS,
    PACKED,
    decode_value,
    encode_value,
    tensor_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from ...._types import Array, NDArray
    from ....checkpoint._states.excluded import Excluded
    from ....state._optimizer_state import OptimizerStateDict

# States that are smaller than the parameter by design, such as Adafactor's.
_FACTOR = re.compile(r"row|col")


# ---- names ----


def _names_of_module(module: torch.nn.Module, parameters: list[torch.Tensor]) -> list[str]:
    """Return the names of an optimizer's `parameters`, which are found in the module by identity.

    Raises ValueError if the module lacks one.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    lost = [
        f"number {i} of shape {tuple(p.shape)}"
        for i, p in enumerate(parameters)
        if id(p) not in names
    ]
    if lost:
        remedy = (
            "pass a module that has all of them, such as a ModuleDict of several modules, or save "
            "the optimizer by states=; create the optimizer after fully_shard"
        )
        # DeepSpeed adds this to parameters whose flat copies its optimizer updates
        if any(hasattr(p, "get_full_hp_param") for p in module.parameters()):
            remedy = f"these are copies in DeepSpeed's ZeRO: {ZERO_REMEDY}"
        raise ValueError(
            f"the optimizer has parameters that {type(module).__name__} lacks: {join(lost)}; "
            f"{remedy}"
        )
    return [names[id(p)] for p in parameters]


def _names_of_groups(groups: list[dict[str, Any]], count: int) -> list[str]:
    """Return the names stored in the optimizer's groups, or else ``param_0`` and so on.

    `count`: number of its parameters.
    """
    if all("param_names" in group for group in groups):
        return list(chain.from_iterable(group["param_names"] for group in groups))
    return [f"param_{i}" for i in range(count)]


def _name_parameters(
    optimizer: torch.optim.Optimizer, names: torch.nn.Module | Iterable[str] | None
) -> dict[str, torch.Tensor]:
    """Return the optimizer's parameters by name, in the order of its groups.

    `names`: the module, or a name for each; None: the names in its groups, or numbers. Raises
    TypeError for another object or invalid names, ValueError if names do not match the parameters.
    """
    import torch

    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    groups = optimizer.param_groups
    parameters = list(chain.from_iterable(group["params"] for group in groups))
    if names is None:
        listed = _names_of_groups(groups, len(parameters))
    elif isinstance(names, torch.nn.Module):
        listed = _names_of_module(names, parameters)
    else:
        listed = [names] if isinstance(names, str) else list(names)
    for name in listed:
        if not isinstance(name, str) or not name:
            raise TypeError(f"names of parameters must be str, and not empty: got {name!r}")
    if len(listed) != len(parameters):
        raise ValueError(
            f"{len(listed)} names for the optimizer's {len(parameters)} parameters: give one for "
            "each, in the order of its groups"
        )
    named = dict(zip(listed, parameters, strict=True))
    if len(named) != len(listed):
        twice = sorted({name for name in listed if listed.count(name) > 1})
        raise ValueError(f"several parameters have the same name: {join(twice)}")
    return named


# ---- from torch ----


def is_number(value: object) -> bool:
    """Return whether a value is a Python number that an array can hold: an int must fit 64 bits."""
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return type(value) in (bool, float)


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor or a ShardedTensor; wrappers are nested values."""
    import torch

    is_known = isinstance(value, torch.Tensor) or hasattr(value, "local_shards")
    return is_known and not is_wrapper(value)


def as_array(number: float) -> NDArray:
    """Return a number as a 0-d array of int64, float64 or bool."""
    return np.asarray(number, np.int64 if type(number) is int else None)


def check_state_name(name: str, state: object) -> None:
    """Raise ValueError if `state` cannot be the name of a state of the parameter `name`.

    Keys join both by a dot, so a state's name must not have one.
    """
    if not is_state_name(state):
        raise ValueError(
            f"{name!r} has a state named {state!r}, which cannot be distinguished from a part of "
            "the parameter's name"
        )


def _collect_states(
    named: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return the values of all states by ``"<parameter>.<state>"``; `named`: parameters by name.

    Raises TypeError or ValueError for an optimizer with state that this form cannot hold.
    """
    check_contract(optimizer)
    parameter_ids = {id(parameter) for parameter in named.values()}
    if any(id(key) not in parameter_ids for key in optimizer.state):
        raise ValueError(
            "the optimizer has state that belongs to none of its parameters, which names cannot "
            "say: mlstate.save(path, model, optimizer) stores it with the rest"
        )
    states: dict[str, object] = {}
    for name, parameter in named.items():
        parameter_states = optimizer.state.get(parameter, {})
        if not isinstance(parameter_states, dict):
            raise TypeError(
                f"the state of {name!r} is a {type(parameter_states).__name__}, not a dict by name"
            )
        for state, value in parameter_states.items():
            check_state_name(name, state)
            states[f"{name}.{state}"] = value
    return states


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer type of the first known class in the MRO; "other" without one."""
    from ....state._optimizer_state import OptimizerType

    kinds = set(OptimizerType)
    names = (c.__name__.lower() for c in type(optimizer).__mro__)
    return next((name for name in names if name in kinds), OptimizerType.OTHER)


def _state_forms(values: list[Mapping[str, object]]) -> dict[str, Any]:
    """Return the entries of a group that list numbers and nested values among its states.

    `NUMBERS` has the names of states that are numbers, `PACKED` for each state with nested values
    the positions of their parameters in the group, and `ORDERS` for each state the orders of
    dimensions other than C order; an empty one is left out. `values`: states by
    name, of each parameter of the group. Values other than tensors and numbers are stored as nested
    values, and so are numbers if another parameter has a tensor as this state.
    """
    others: dict[str, list[int]] = {}  # positions of values that are not tensors, by state
    tensors: set[str] = set()
    numbers: set[str] = set()
    orders: dict[str, list[Any]] = {}
    for position, states in enumerate(values):
        for state, value in states.items():
            if is_tensor(value):
                tensors.add(state)
                if (order := order_of_state(value)) is not None:
                    orders.setdefault(state, []).append([position, order])
            else:
                others.setdefault(state, []).append(position)
                if is_number(value):
                    numbers.add(state)
    packed_positions = {}
    for state, positions in others.items():
        nested = [i for i in positions if state in tensors or not is_number(values[i][state])]
        if nested:
            packed_positions[state] = nested
    forms: dict[str, Any] = {}
    if numbers - tensors:
        forms[NUMBERS] = sorted(numbers - tensors)
    if packed_positions:
        forms[PACKED] = packed_positions
    if orders:
        forms |= {ORDERS: orders, NEWER: True}
    return forms


def order_of_state(tensor: Any) -> list[int] | None:
    """Return `dimension_order` of a tensor that is plain memory; None for other tensors."""
    is_whole = not hasattr(tensor, "device_mesh") and not hasattr(tensor, "local_shards")
    return dimension_order(tensor) if is_whole and not explain_unsupported_tensor(tensor) else None


def _group_values(group: Mapping[str, object], number: int, excluded: Excluded) -> dict[str, Any]:
    """Return the hyperparameters of the group `number` in JSON form, without those `excluded`.

    Raises TypeError or ValueError for a value that cannot be stored.
    """
    forms: dict[str, Any] = {}
    where = f"param_groups[{number}]"
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        if type(key) is not str or key in NOT_VALUES:
            raise TypeError(f"{where} has the key {key!r}, which cannot be stored")
        name = f"param_groups.{number}.{key}"
        forms[key] = encode_value(value, f"{where}[{key!r}]", name, excluded)
    return forms


def stored_states(
    param_groups: Iterable[Mapping[str, Any]],
    named: Iterable[str],
    states: Mapping[str, Any],
    excluded: Excluded = NONE_EXCLUDED,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return groups in their JSON form, and states as tensors or arrays.

    Numbers become 0-d arrays, and nested values arrays of bytes; the groups list both. `named`:
    names of the parameters in the order of the groups. `states`: by ``"<parameter>.<state>"``.
    `excluded`: values of groups to leave out.
    Raises TypeError or ValueError for a value that cannot be stored or would not be restored equal.
    """
    by_parameter: dict[str, dict[str, Any]] = {}
    for key, value in states.items():
        name, _, state = key.rpartition(".")
        by_parameter.setdefault(name, {})[state] = value
    names = iter(named)
    groups = []
    for number, group in enumerate(param_groups):
        members = [next(names) for _ in group["params"]]
        values = _group_values(group, number, excluded)
        # a number in a capturable group would look like a tensor that an old version stored
        if values.get("capturable") and any(map(is_number, group.values())):
            values[EXACT] = True
        forms = _state_forms([by_parameter.get(name, {}) for name in members])
        groups.append({"params": members, **values, **forms})
    arrays = {key: as_array(each) if is_number(each) else each for key, each in states.items()}
    for group in groups:
        for key in packed_states([group]):
            tree = encode(states[key], repr(key), exact=True, name=key)
            arrays[key] = packed(tree, repr(key))
            if tree.is_newer:
                group[NEWER] = True
    return groups, arrays


def _rate_of(groups: Iterable[Mapping[str, Any]]) -> float:
    """Return the learning rate of the first group; 0.0 if it has none, or groups is empty."""
    for group in groups:
        rate = decode_value(group.get("lr"), "lr")
        rate = rate.item() if getattr(rate, "shape", None) == () else rate
        return float(rate) if isinstance(rate, int | float) and math.isfinite(rate) else 0.0
    return 0.0


def keywords_from(
    optimizer_type: str, groups: list[dict[str, Any]], states: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keywords of an `OptimizerStateDict`: type, step, learning rate, groups.

    The step is the largest among states named ``step``, 0 without them. `groups`: in JSON form.
    """
    packed_keys = packed_states(groups)
    values = [v for k, v in states.items() if k.endswith(".step") and k not in packed_keys]
    steps = [float(v) for v in values if math.prod(getattr(v, "shape", ())) == 1]
    return {
        "optimizer_type": optimizer_type,
        "step": max((int(step) for step in steps if 0 <= step < 1 << 62), default=0),
        "learning_rate": _rate_of(groups),
        "param_groups": groups,
    }


def number_states(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the keys of states that were Python numbers, as a checkpoint's groups record."""
    return {
        f"{name}.{state}"
        for group in groups
        for state in group.get(NUMBERS, ())
        for name in group.get("params", ())
    } - packed_states(groups)


def dimension_orders(groups: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the orders of dimensions that groups record, by the keys of the states."""
    return {
        f"{group['params'][position]}.{state}": order
        for group in groups
        for state, pairs in group.get(ORDERS, {}).items()
        for position, order in pairs
    }


def unpack_state(key: str, array: Array, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Return the value of a state that was stored as bytes.

    `optimizer`: the target, whose records have the classes for those in the value, or None.
    """
    target = None if optimizer is None else lambda: [*optimizer.state.values()]
    return unpacked(np.asarray(array), repr(key), tensor_of, target)


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: torch.nn.Module | Iterable[str] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an optimizer's arrays by name, and the other arguments of `OptimizerStateDict`.

    See `OptimizerStateDict.from_torch`. The groups list the states that were numbers or nested
    values.
    """
    named = _name_parameters(optimizer, names)
    groups, arrays = stored_states(optimizer.param_groups, named, _collect_states(named, optimizer))
    return arrays_of(arrays), keywords_from(_kind_of(optimizer), groups, arrays)


# ---- to torch ----


def _is_valid_shape(
    state: str, have: tuple[int, ...], want: tuple[int, ...], present: Mapping[str, object]
) -> bool:
    """Return whether a state may have the shape `have`: the parameter's, a scalar's, or a factor's.

    `state`: its name. `want`: shape of the parameter. `present`: existing states of the parameter
    by name. A factor, such as Adafactor's row or column, has some of the parameter's axes.
    """
    if have == want or have in ((), (1,)):
        return True
    current = present.get(state)
    if current is not None and have == tuple(getattr(current, "shape", ())):
        return True
    if not _FACTOR.search(state):
        return False
    if len(have) == len(want):
        return all(a in (1, b) for a, b in zip(have, want, strict=True))
    # whether `have` is a subsequence of `want`: each search continues after the last match
    axes_left = iter(want)
    return all(any(a == b for b in axes_left) for a in have)


def _misfits(
    states: Mapping[str, tuple[int, ...]],
    named: Mapping[str, tuple[tuple[int, ...], Mapping[str, object]]],
    saved: Mapping[str, tuple[int, ...]],
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return key, shape and parameter's shape of each state that does not fit its parameter.

    See `refuse_unfit` for the arguments. States of one element always fit. If a parameter has
    its saved shape, a new state of it may have any shape. If the saved shape is unknown, a state
    must have the parameter's shape (or one that `_is_valid_shape` allows) if the same state of
    another parameter has that parameter's shape.
    """
    keys = [
        (key, name, state)
        for key, (name, _, state) in ((key, key.rpartition(".")) for key in states)
        if name in named
    ]
    # names of states that have their parameter's shape for at least one parameter
    full = {state for key, name, state in keys if named[name][0] and states[key] == named[name][0]}
    misfits = []
    for key, name, state in keys:
        have, (want, present) = states[key], named[name]
        if name in saved:
            current_shape = tuple(getattr(present.get(state), "shape", ()))
            fits = have in (want, (), (1,)) or (saved[name] == want and current_shape in ((), have))
        else:
            fits = state not in full or _is_valid_shape(state, have, want, present)
        if not fits:
            misfits.append((key, have, want))
    return misfits


def refuse_unfit(
    states: Mapping[str, tuple[int, ...]],
    named: Mapping[str, tuple[tuple[int, ...], Mapping[str, object]]],
    saved: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> None:
    """Raise one CompatibilityError for all states that do not fit the optimizer's parameters.

    `states` has shapes by ``"<parameter>.<state name>"``, `named` the shape and the existing states
    of each parameter, `saved` the shapes of saved parameters.
    """
    names = {key: key.rpartition(".")[0] for key in states}
    unknown = dict.fromkeys(name or key for key, name in names.items() if name not in named)
    shapes = _misfits(states, named, saved)
    if not unknown and not shapes:
        return
    lines = ["Error(s) in loading the state of an optimizer:"]
    if unknown:
        lines.append(f"Unexpected parameter(s): {join([repr(name) for name in unknown])}.")
        have_state = dict.fromkeys(names.values())
        free = [name for name in named if name not in have_state]
        _, hint = rename_hint(have_state, dict.fromkeys(named), list(unknown), free)
        lines += [f"{hint}."] if hint else []
    lines += [
        f"size mismatch for {key}: shape {have} in the state, the parameter has shape {want}."
        for key, have, want in shapes
    ]
    error = CompatibilityError("\n    ".join(lines))
    error.name = next(iter(unknown), None)
    if shapes and not unknown:
        error.name, error.got, error.expected = shapes[0][0], str(shapes[0][1]), str(shapes[0][2])
    raise error


def _copy_unwritable(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return `arrays` with copies of those that an optimizer cannot change in place.

    These are read-only, or share memory with an earlier one.
    """
    writable = {
        name: array.copy() if isinstance(array, np.ndarray) and not array.flags.writeable else array
        for name, array in arrays.items()
    }
    sharable_arrays = {
        n: a for n, a in writable.items() if isinstance(a, np.ndarray) and sharable(a)
    }
    for _, _, names in clusters(sharable_arrays):  # names of arrays that overlap in memory
        for name in names[1:]:
            writable[name] = writable[name].copy()
    return writable


def _torch_groups(
    osd: OptimizerStateDict, optimizer: torch.optim.Optimizer, named: dict[str, torch.Tensor]
) -> list[dict[str, Any]]:
    """Return the groups of `osd` for torch's state dict, with numbers in place of names.

    `named`: the optimizer's parameters by name, in its order. Raises CompatibilityError if the
    groups do not match.
    """
    names = iter(named)
    members = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    groups = match_groups(osd.param_groups, osd.learning_rate, optimizer, members)
    start = 0
    for group, group_names in zip(groups, members, strict=True):
        group["params"] = list(range(start, start + len(group_names)))
        start += len(group_names)
    return groups


def optimizer_dict(
    osd: OptimizerStateDict,
    optimizer: torch.optim.Optimizer,
    names: torch.nn.Module | Iterable[str] | None,
    *,
    copy: bool = False,
) -> dict[str, Any]:
    """Return a dict for ``optimizer.load_state_dict``; see `OptimizerStateDict.to_torch`."""
    named = _name_parameters(optimizer, names)
    packed_keys = packed_states(osd.param_groups) & osd.keys()
    entries = {key: value for key, value in osd.items() if key not in packed_keys}
    shapes = {key: tuple(np.shape(value)) for key, value in entries.items()}
    shapes |= dict.fromkeys(packed_keys, ())
    have = {name: (tuple(p.shape), optimizer.state.get(p, {})) for name, p in named.items()}
    refuse_unfit(shapes, have)
    numbers = number_states(osd.param_groups)
    tensors = tensors_of(entries if copy else _copy_unwritable(entries), copy=copy)
    for key, order_of_key in dimension_orders(osd.param_groups).items():
        if key in tensors and dimension_order(tensors[key]) != order_of_key:
            tensors[key] = with_order(tensors[key], order_of_key)
    order = {name: i for i, name in enumerate(named)}
    states: dict[int, dict[str, object]] = {}
    for key, tensor in tensors.items():
        name, _, state = key.rpartition(".")
        current = optimizer.state.get(named[name], {}).get(state)
        number = key in numbers if current is None else is_number(current)
        value = tensor.item() if number and tensor.numel() == 1 else tensor
        states.setdefault(order[name], {})[state] = value
    for key in packed_keys:
        name, _, state = key.rpartition(".")
        states.setdefault(order[name], {})[state] = unpack_state(key, osd[key], optimizer)
    return {"state": states, "param_groups": _torch_groups(osd, optimizer, named)}
