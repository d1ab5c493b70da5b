"""The state of torch optimizers, by parameter name."""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ...._common.set_module import set_module
from ....errors import CompatibilityError
from ....state._compatibility import join, rename_hint
from .._tensors.state import arrays_of, clusters, sharable, tensors_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from ...._types import NDArray
    from ....state._optimizer_state import OptimizerStateDict

# Keys of a group that are not hyperparameters.
_NAMES = frozenset({"params", "param_names"})
# Key in a group: names of states that were Python numbers; files store them as arrays.
NUMBERS = "python_numbers"
# States that are smaller than the parameter by design, such as Adafactor's.
_FACTOR = re.compile(r"row|col")


# ---- names ----


def _names_of_module(module: torch.nn.Module, parameters: list[torch.Tensor]) -> list[str]:
    """Return the name of each parameter in the module, found by identity."""
    names = {id(p): name for name, p in module.named_parameters()}
    lost = [
        f"number {i} of shape {tuple(p.shape)}"
        for i, p in enumerate(parameters)
        if id(p) not in names
    ]
    if lost:
        raise ValueError(
            f"the optimizer has parameters that {type(module).__name__} lacks: {join(lost)}; "
            "pass the module that all of them are of, or their names in order; create the "
            "optimizer after fully_shard"
        )
    return [names[id(p)] for p in parameters]


def _names_of_groups(groups: list[dict[str, Any]], count: int) -> list[str]:
    """Return the names stored in the optimizer's groups, or numbered names."""
    if all("param_names" in group for group in groups):
        return list(chain.from_iterable(group["param_names"] for group in groups))
    return [f"param_{i}" for i in range(count)]


def _name_parameters(
    optimizer: torch.optim.Optimizer, names: torch.nn.Module | Iterable[str] | None
) -> dict[str, torch.Tensor]:
    """Return the optimizer's parameters by name, in its order."""
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


def _plain_value(value: Any) -> Any:
    """Return a hyperparameter as plain values, or NotImplemented if it is not plain."""
    import torch

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        items = [_plain_value(item) for item in value]
        return NotImplemented if any(item is NotImplemented for item in items) else items
    return NotImplemented


def is_number(value: object) -> bool:
    return isinstance(value, bool | int | float | complex)


def as_array(number: complex) -> NDArray:
    """Return a number as a 0-d array of int64, float64, bool or complex128."""
    return np.asarray(number, np.int64 if type(number) is int else None)


def _collect_states(
    named: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return all states, tensors or numbers, by ``"<parameter>.<state name>"``."""
    import torch

    known = {id(parameter) for parameter in named.values()}
    if any(id(key) not in known for key in optimizer.state):
        raise ValueError(
            "the optimizer has state that belongs to none of its parameters, which names cannot say"
        )
    states: dict[str, Any] = {}
    for name, parameter in named.items():
        for state, value in optimizer.state.get(parameter, {}).items():
            if value is None:  # SGD without momentum
                continue
            if not isinstance(state, str) or not state or "." in state:
                raise ValueError(
                    f"{name!r} has a state named {state!r}, which cannot be distinguished from a "
                    "part of the parameter's name"
                )
            if not is_number(value) and not isinstance(value, torch.Tensor):
                raise TypeError(
                    f"{name + '.' + state!r} is a {type(value).__name__}: the state of "
                    f"{type(optimizer).__name__} is more than tensors and numbers by parameter"
                )
            states[f"{name}.{state}"] = value
    return states


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer type of the first known class in the optimizer's MRO."""
    from ....state._optimizer_state import OptimizerType

    known = set(OptimizerType)
    names = (c.__name__.lower() for c in type(optimizer).__mro__)
    return next((name for name in names if name in known), "other")


def groups_from(
    param_groups: list[dict[str, Any]], named: Iterable[str], states: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the groups as plain values, with parameter names."""
    names = iter(named)
    groups = []
    for group in param_groups:
        plain: dict[str, Any] = {"params": [next(names) for _ in group["params"]]}
        for key, value in group.items():
            if key not in _NAMES and (taken := _plain_value(value)) is not NotImplemented:
                plain[key] = taken
        members = set(plain["params"])
        numbers = {
            state
            for parameter, _, state in (
                key.rpartition(".") for key, value in states.items() if is_number(value)
            )
            if parameter in members
        }
        if numbers:
            plain[NUMBERS] = sorted(numbers)
        groups.append(plain)
    return groups


def keywords_from(
    optimizer_type: str, groups: list[dict[str, Any]], states: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `mlstate.OptimizerStateDict` other than the arrays."""
    steps = [int(value) for key, value in states.items() if key.endswith(".step")]
    return {
        "optimizer_type": optimizer_type,
        "step": max(steps, default=0),
        "learning_rate": float(groups[0].get("lr", 0.0)) if groups else 0.0,
        "param_groups": groups,
    }


def number_states(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the keys of states that were Python numbers, from groups of a checkpoint."""
    return {
        f"{name}.{state}"
        for group in groups
        for state in group.get(NUMBERS, ())
        for name in group.get("params", ())
    }


@set_module("mlstate.integrations.torch")
def optimizer_state(
    optimizer: torch.optim.Optimizer, names: torch.nn.Module | Iterable[str] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an optimizer's state as arrays; see `mlstate.OptimizerStateDict.from_torch`.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        An optimizer whose state is tensors and numbers by parameter.
    names : torch.nn.Module, iterable of str or None
        The source of names.

    Returns
    -------
    arrays : dict of str to array
        Arrays over the tensors' memory; numbers are 0-d arrays.
    keywords : dict
        The other arguments of `mlstate.OptimizerStateDict`: ``optimizer_type``, ``step`` (the
        largest), ``learning_rate`` (of the first group), ``param_groups``. The groups omit values
        that are not plain, and list the states that were numbers.
    """
    named = _name_parameters(optimizer, names)
    states = _collect_states(named, optimizer)
    groups = groups_from(optimizer.param_groups, named, states)
    arrays = {key: as_array(v) if is_number(v) else v for key, v in states.items()}
    return arrays_of(arrays), keywords_from(_kind_of(optimizer), groups, states)


# ---- to torch ----


def _is_valid_shape(
    state: str, have: tuple[int, ...], want: tuple[int, ...], present: Mapping[str, Any]
) -> bool:
    """Return whether a state may have shape `have`: the parameter's, a scalar's, or a factor's."""
    if have == want or have in ((), (1,)):
        return True
    held = present.get(state)
    if held is not None and have == tuple(getattr(held, "shape", ())):
        return True
    if not _FACTOR.search(state):
        return False
    if len(have) == len(want):
        return all(a in (1, b) for a, b in zip(have, want, strict=True))
    rest = iter(want)
    return all(any(a == b for b in rest) for a in have)


def refuse_unfit(
    states: Mapping[str, tuple[int, ...]],
    named: Mapping[str, tuple[tuple[int, ...], Mapping[str, Any]]],
) -> None:
    """Raise one error for all states that do not fit the optimizer's parameters.

    `states` has shapes by ``"<parameter>.<state name>"``, `named` the shape and the existing states
    of each parameter.
    """
    unknown: dict[str, None] = {}
    shapes = []
    for key, have in states.items():
        name, _, state = key.rpartition(".")
        if name not in named:
            unknown[name or key] = None
        elif not _is_valid_shape(state, have, *named[name]):
            shapes.append((key, have, named[name][0]))
    if not unknown and not shapes:
        return
    lines = ["Error(s) in loading the state of an optimizer:"]
    if unknown:
        lines.append(f"Unexpected parameter(s): {join([repr(name) for name in unknown])}.")
        have_state = {key.rpartition(".")[0] for key in states}
        free = [name for name in named if name not in have_state]
        names = dict.fromkeys(have_state), dict.fromkeys(named)
        _, hint = rename_hint(*names, list(unknown), free)
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
    """Copy arrays that an optimizer cannot change in place: read-only or overlapping ones."""
    mine = {
        name: array.copy() if isinstance(array, np.ndarray) and not array.flags.writeable else array
        for name, array in arrays.items()
    }
    plain = {n: a for n, a in mine.items() if isinstance(a, np.ndarray) and sharable(a)}
    for _, _, names in clusters(plain):
        for name in names[1:]:
            mine[name] = mine[name].copy()
    return mine


def _cast_like(own: Any, value: Any) -> Any:
    """Return a hyperparameter in the optimizer's type, such as a tensor or a tuple."""
    import torch

    if isinstance(own, torch.Tensor) and value is not None:
        return torch.as_tensor(value, dtype=own.dtype, device=own.device)
    if isinstance(value, list) and not isinstance(own, list):
        return tuple(_cast_like(None, item) for item in value)
    return value


def group_values(
    osd: OptimizerStateDict, optimizer: torch.optim.Optimizer, members: list[list[str]]
) -> list[dict[str, Any]]:
    """Return the hyperparameters of each group: the saved ones if they fit, else its own."""
    saved = osd.param_groups
    fits = len(saved) == len(members) and all(
        set(group.get("params", ())) == set(own) for group, own in zip(saved, members, strict=True)
    )
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        values = {key: value for key, value in group.items() if key not in _NAMES}
        if fits:
            for key, value in saved[number].items():
                if key not in _NAMES and key != NUMBERS:
                    values[key] = _cast_like(group.get(key), value)
        elif osd.learning_rate and group.get("lr") == optimizer.param_groups[0].get("lr"):
            values["lr"] = _cast_like(group.get("lr"), osd.learning_rate)
        groups.append(values)
    return groups


def _torch_groups(
    osd: OptimizerStateDict, optimizer: torch.optim.Optimizer, named: dict[str, torch.Tensor]
) -> list[dict[str, Any]]:
    """Return the groups in the form of torch's state dict, with parameter numbers."""
    names = iter(named)
    members = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    groups = group_values(osd, optimizer, members)
    start = 0
    for group, own in zip(groups, members, strict=True):
        group["params"] = list(range(start, start + len(own)))
        start += len(own)
    return groups


@set_module("mlstate.integrations.torch")
def optimizer_dict(
    osd: OptimizerStateDict,
    optimizer: torch.optim.Optimizer,
    names: torch.nn.Module | Iterable[str] | None,
    *,
    copy: bool = False,
) -> dict[str, Any]:
    """Return a dict for ``optimizer.load_state_dict``; see `mlstate.OptimizerStateDict.to_torch`.

    Parameters
    ----------
    osd : OptimizerStateDict
        The state.
    optimizer : torch.optim.Optimizer
        The optimizer that will load it; it is not changed.
    names : torch.nn.Module, iterable of str or None
        The source of names.
    copy : bool, default False
        Copy every array. Arrays that an optimizer cannot change in place, because they are
        read-only or share memory, are always copied.

    Returns
    -------
    dict
        ``{"state": {number: {state name: tensor or number}}, "param_groups": [...]}``.

    Raises
    ------
    CompatibilityError
        If parameters are unknown, or shapes do not fit. The message lists all of them.
    """
    named = _name_parameters(optimizer, names)
    taken = dict(osd)
    shapes = {key: tuple(np.shape(value)) for key, value in taken.items()}
    have = {name: (tuple(p.shape), optimizer.state.get(p, {})) for name, p in named.items()}
    refuse_unfit(shapes, have)
    numbers = number_states(osd.param_groups)
    tensors = tensors_of(taken if copy else _copy_unwritable(taken), copy=copy)
    order = {name: i for i, name in enumerate(named)}
    states: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        name, _, state = key.rpartition(".")
        held = optimizer.state.get(named[name], {}).get(state)
        number = key in numbers if held is None else is_number(held)
        value = tensor.item() if number and tensor.numel() == 1 else tensor
        states.setdefault(order[name], {})[state] = value
    return {"state": states, "param_groups": _torch_groups(osd, optimizer, named)}
