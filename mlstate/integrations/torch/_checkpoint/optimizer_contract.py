"""Optimizers with own ``state_dict()`` or ``load_state_dict``: recognised, refused.

`check_contract` refuses optimizers whose ``state_dict()`` has more than `state` and `param_groups`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...._common.arrays import is_torch
from ....checkpoint._states.containers import (
    divided_like,
    equal_values,
    is_wrapper,
    local_wrapper,
)
from ....errors import CompatibilityError
from .optimizer_values import NOT_VALUES, is_small, quoted

if TYPE_CHECKING:
    import torch

_NOT_STORED = ("params", "param_names")  # keys of a group that names of parameters replace


def _is_overridden(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Return whether the optimizer's method `name` is not one of torch's."""
    method = getattr(type(optimizer), name)
    module = str(getattr(method, "__module__", None))
    return name in vars(optimizer) or not module.startswith("torch.optim.")


def _has_hooks(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Return whether an optimizer has hooks before or after `name`, such as "state_dict"."""
    hooks = vars(optimizer)
    return any(bool(hooks.get(f"_optimizer_{name}_{when}_hooks")) for when in ("pre", "post"))


def has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``state_dict()`` may have more than `state` and `param_groups`.

    This is so with a method or hooks that are not torch's, or a `state` that is a property.
    """
    has_property = isinstance(vars(type(optimizer)).get("state"), property)
    return (
        has_property
        or _is_overridden(optimizer, "state_dict")
        or _has_hooks(optimizer, "state_dict")
    )


def has_own_loader(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's ``load_state_dict`` does more than torch's own.

    This is so with methods or hooks that are not torch's, also for saving.
    """
    names = ("load_state_dict", "__setstate__", "_process_value_according_to_param_policy")
    return (
        any(_is_overridden(optimizer, name) for name in names)
        or _has_hooks(optimizer, "load_state_dict")
        or has_own_state_dict(optimizer)
    )


def torch_form(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the dict that torch's own ``state_dict()`` would return, without hooks.

    Values are not copied.
    """
    numbers: dict[int, int] = {}
    groups = []
    for group in optimizer.param_groups:
        members = [numbers.setdefault(id(p), len(numbers)) for p in group["params"]]
        values = {key: value for key, value in group.items() if key != "params"}
        groups.append({**values, "params": members})
    states = {numbers.get(id(key), key): value for key, value in optimizer.state.items()}
    return {"state": states, "param_groups": groups}


def _own_state_dict(optimizer: torch.optim.Optimizer) -> Any:
    """Return the result of ``state_dict()``; raise TypeError with a remedy if it fails."""
    try:
        return optimizer.state_dict()
    except Exception as error:
        raise TypeError(
            f"{type(optimizer).__name__}.state_dict() raised {type(error).__name__}: {error}; "
            "pass states={'optimizer': optimizer.state_dict()} on ranks that can make this call, "
            "and states={'optimizer': None} on the others"
        ) from error


def is_state_name(state: object) -> bool:
    """Return whether a state of a parameter can have this name: a dot joins both in keys."""
    return isinstance(state, str) and state != "" and "." not in state


def has_parts(value: Any) -> bool:
    """Return whether a value is a DTensor whose local tensors a layout does not describe."""
    return local_wrapper(value) is not None


def fits_table(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a table of tensors by parameter can hold all of an optimizer's state.

    Any other optimizer is stored as the result of its ``state_dict()``. Raises TypeError if this
    fails.
    """
    groups = optimizer.param_groups
    parameters = {id(parameter) for group in groups for parameter in group["params"]}
    if not all(
        id(parameter) in parameters
        and isinstance(states, dict)
        and all(map(is_state_name, states))
        and not (hasattr(parameter, "device_mesh") and any(map(has_parts, states.values())))
        for parameter, states in optimizer.state.items()
    ):
        return False
    values = [pair for group in groups for pair in group.items() if pair[0] not in _NOT_STORED]
    if not all(
        type(key) is str and key not in NOT_VALUES and is_small(each) for key, each in values
    ):
        return False
    is_own = has_own_state_dict(optimizer)
    return not is_own or equal_values(_own_state_dict(optimizer), torch_form(optimizer))


def divided_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], where: str
) -> dict[str, Any]:
    """Return a state for ``load_state_dict`` whose tensors are divided as the parameters.

    `state`: with whole tensors, and this rank's parts of tensors of subclasses. `where`: its name
    in the CompatibilityError for a part of another division.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_number = state.get("state")
    is_divided = any(hasattr(parameter, "device_mesh") for parameter in parameters)
    if not is_divided or not isinstance(by_number, dict):
        return state
    from torch.distributed.tensor import distribute_tensor

    def divided(number: Any, name: str, value: Any) -> Any:
        is_known = isinstance(number, int) and number < len(parameters) and is_torch(value)
        parameter: Any = parameters[number] if is_known else None
        if not hasattr(parameter, "device_mesh") or hasattr(value, "device_mesh"):
            return value
        local = tuple(parameter.to_local().shape)
        if is_wrapper(value) and tuple(value.shape) != local:
            raise CompatibilityError(
                f"{where}['state'][{number}][{name!r}] is a part of shape {tuple(value.shape)}, "
                f"and this rank's part of the parameter has shape {local}: load it with the mesh "
                "that saved it"
            )
        if is_wrapper(value):
            return divided_like(parameter, value)
        if value.ndim == 0 or value.shape != parameter.shape:
            return value
        layout = parameter.device_mesh, parameter.placements
        return distribute_tensor(value, *layout, src_data_rank=None)

    new = {
        number: {name: divided(number, name, value) for name, value in states.items()}
        if isinstance(states, dict)
        else states
        for number, states in by_number.items()
    }
    return {**state, "state": new}


def check_contract(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError if ``state_dict()`` has more than `state` and `param_groups`.

    A checkpoint stores only these two, so the rest would be lost.
    """
    if not has_own_state_dict(optimizer):
        return
    own_dict, torch_dict = _own_state_dict(optimizer), torch_form(optimizer)
    if equal_values(own_dict, torch_dict):
        return
    keys = own_dict.keys() - torch_dict.keys() if isinstance(own_dict, dict) else ()
    detail = f"has {quoted(sorted(map(str, keys)))} too" if keys else "has other values"
    raise TypeError(
        f"{type(optimizer).__name__} does not keep all of its state in `state` and `param_groups`, "
        f"because its state_dict() {detail}, so a table by parameter would lose a part: "
        "mlstate.save(path, model, optimizer) stores the result of state_dict(), and mlstate.load "
        "restores it; of another optimizer's table, load the values without into="
    )
