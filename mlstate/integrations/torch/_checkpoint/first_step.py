"""The states that an optimizer's first step will create, from a step of a small copy of it."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

from ...._common.arrays import is_torch
from .fsdp1_flat import is_flattened

if TYPE_CHECKING:
    import torch

_MOST = 64  # elements of a small parameter along each dimension


def _needs_own_step(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> bool:
    """Return whether a small copy cannot show the states that the first step creates.

    Classes of torch need no copy: their states can be stored. Sharded parameters have no small
    form. An optimizer with tensors has made a step, and they may be large.
    """
    values = [
        value
        for states in optimizer.state.values()
        for value in (states.values() if isinstance(states, dict) else [states])
    ]
    return bool(
        type(optimizer).__module__.startswith("torch.optim")
        or any(hasattr(p, "device_mesh") or is_flattened(p) for p in parameters)
        or any(map(is_torch, values))
    )


def _small_parameters(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a small parameter for each of a group; the first of each shape has a gradient."""
    import torch

    small: list[torch.Tensor] = []
    kinds = set()
    for parameter in parameters:
        shape = tuple(min(size, _MOST) for size in parameter.shape)
        values = torch.randn(shape).to(parameter)  # its dtype and device
        kind = (shape, values.dtype, values.device)
        small.append(torch.nn.Parameter(torch.zeros_like(values), parameter.requires_grad))
        if parameter.requires_grad and kind not in kinds:
            small[-1].grad = values
            kinds.add(kind)
    return small


def _copy_for(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], others: list[torch.Tensor]
) -> torch.optim.Optimizer:
    """Return a deep copy of an optimizer that has `others` in place of its `parameters`.

    The copy has the methods of the class: one that a scheduler puts in their place, such as
    ``step``, acts on the optimizer itself. Hooks are shared.
    """
    cls = type(optimizer)
    new = cls.__new__(cls)
    memo: dict[int, object] = {
        id(old): other for old, other in zip(parameters, others, strict=True)
    }
    memo[id(optimizer)] = new
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            vars(new)[name] = value
        elif not (callable(value) and hasattr(cls, name)):
            vars(new)[name] = copy.deepcopy(value, memo)
    return new


def after_first_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return a copy of an optimizer with the states that its first step will create.

    A copy with small parameters makes the step: neither the optimizer nor its parameters change,
    but random generators may. The result is None if the optimizer's own step must show the states,
    because the copy's fails or `_needs_own_step`.
    """
    import torch

    groups = [group["params"] for group in optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group]
    if _needs_own_step(optimizer, parameters):
        return None
    try:
        # nothing is compiled for one step
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            small = [each for group in groups for each in _small_parameters(group)]
            new = _copy_for(optimizer, parameters, small)
            step: Any = type(new).step
            if hasattr(step, "hooked"):  # torch's wrapper, which calls hooks of the optimizer
                step = step.__wrapped__
            step(new)
            return _copy_for(new, small, parameters)
    except Exception:  # of any class: the step is another library's
        return None
