"""Checks before a model gets hooks, and which objects have hooks on a model."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from ._common.backend import backend_named, backend_of
from ._fsdp_unit import FSDPShardingUnit
from ._text import names_hint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ._fsdp_hook import FSDPBackwardHook

_lock = threading.Lock()
_hooked: weakref.WeakSet[FSDPBackwardHook] = weakref.WeakSet()


def note_hooked(hook: FSDPBackwardHook) -> None:
    """Remember that an object has hooks on a model; `close` takes its parameters away."""
    with _lock:
        _hooked.add(hook)


def hooked() -> list[FSDPBackwardHook]:
    """Return the objects that had hooks on a model and still exist."""
    with _lock:
        return list(_hooked)


def _second_hook(name: str) -> ValueError:
    return ValueError(
        f"{name}: another FSDPBackwardHook has a hook on this parameter, so its gradient would "
        "be reduced twice; close() that object first"
    )


def refuse_shared_parameters(hook: FSDPBackwardHook, parameters: Mapping[str, Any]) -> None:
    """Raise ValueError if another object has a hook on one of these parameters of torch."""
    for other in hooked():
        theirs = {id(parameter) for parameter in other._parameters.values()}
        for name, parameter in parameters.items():
            if other is not hook and id(parameter) in theirs:
                raise _second_hook(name)


def refuse_shared_hooks(hook: FSDPBackwardHook, model: Any, names: Iterable[str]) -> None:
    """Raise ValueError if another object has a hook on one of these names of a model."""
    for other in hooked():
        for name in names:
            if other is not hook and other._model is model and name in other._units:
                raise _second_hook(name)


def check_units(units: Any) -> None:
    """Raise TypeError or ValueError unless this is a dict of units by their names."""
    if not hasattr(units, "items"):
        raise TypeError(
            f"sharding_units must be a dict of FSDPShardingUnit, got {type(units).__name__}"
        )
    for name, unit in units.items():
        if not isinstance(unit, FSDPShardingUnit):
            raise TypeError(f"sharding_units[{name!r}] is a {type(unit).__name__}")
        if unit.parameter_name != name:
            raise ValueError(
                f"sharding_units[{name!r}] is the unit of {unit.parameter_name!r}: gradients are "
                "paired by name"
            )


def check_gradients(gradients: str, is_module: bool, keeps_others: bool) -> None:
    """Raise ValueError if `gradients` is unknown, or does not go with the other arguments."""
    if gradients not in ("shard", "full"):
        raise ValueError(f"gradients must be 'shard' or 'full', got {gradients!r}")
    if gradients == "shard":
        return
    if not is_module:
        raise ValueError("gradients='full' needs a torch module, whose parameters have .grad")
    if keeps_others:
        raise ValueError(
            "gradients='full' leaves reduced gradients in parameter.grad, where they add up: "
            "leave out keep_full_gradient and accumulate"
        )


def put_back(parameter: Any, gradient: Any, of: Any) -> None:
    """Give a gradient that was not reduced back to its parameter, while its pass goes on."""
    if of is not None and of() is not None:
        parameter.grad = gradient


def check_parameter(
    unit: FSDPShardingUnit, parameter: Any, model: Any, known: Mapping[str, Any]
) -> None:
    """Refuse a unit that does not go with the model."""
    from ._collective_args import dtype_name

    name = unit.parameter_name
    if parameter is None:
        shared = backend_named("torch").tied_to(model, name)
        if shared is not None:
            raise ValueError(
                f"{name!r} is the same parameter as {shared!r}, which is the name to use"
            )
        raise ValueError(f"the model has no parameter {name!r}{names_hint(name, known)}")
    reason = backend_of(parameter).why_not_reduced(parameter)
    if reason:
        raise ValueError(f"{name}: the parameter is {reason}")
    if not parameter.requires_grad:
        raise ValueError(f"{name}: the parameter is frozen (requires_grad is False)")
    if tuple(parameter.shape) != unit.shape or dtype_name(parameter) != unit.dtype:
        raise ValueError(
            f"{name}: the parameter is {dtype_name(parameter)} {tuple(parameter.shape)}, its unit "
            f"{unit.dtype} {unit.shape}"
        )
