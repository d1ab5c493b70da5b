"""Tensors of `TieredState` on a device, in main memory, or without memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ....state._optimizer_state import OptimizerType
from .._tensors.memory import as_bytes
from .._tensors.state import device_of, tensors_of
from .optimizer import keywords_from, stored_states

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from ...._types import Array


def accelerator(values: Iterable[object], device: torch.device) -> Any:
    """Return the device of the hot tier, or None if that is main memory.

    `values`: of the state. `device`: the user's choice, or None for the device of the first tensor
    that is on one. If there are only CPU tensors, it is CUDA if available.
    """
    import torch

    if device is not None:
        return device_of(device)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    return torch.device("cuda") if tensors and torch.cuda.is_available() else None


def _allocate_like(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return new memory for a tensor's elements, with the same strides.

    In main memory, NumPy allocates: it uses huge pages, while torch has a page fault per 4 KiB.
    """
    import torch

    if torch.device(device).type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return torch.empty_like(tensor, device=device)
    flat = np.empty(tensor.numel() * tensor.element_size(), np.uint8)
    return torch.from_numpy(flat).view(tensor.dtype).view(tensor.shape)


def _copy_tensor(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor to new memory on `device`, detached, with the same strides.

    Copies within main memory use memcpy: torch's threads would wait for each other, for
    milliseconds if processors are busy.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    copy = _allocate_like(tensor, device)
    if copy.device.type == tensor.device.type == "cpu" and tensor.is_contiguous():
        np.copyto(_bytes_of(copy), _bytes_of(tensor))
        return copy
    return copy.copy_(tensor)


def _bytes_of(tensor: torch.Tensor) -> Any:
    """Return a byte view of a contiguous CPU tensor."""
    return as_bytes(tensor).numpy()


def on_device(array: Array, device: torch.device) -> torch.Tensor:
    """Return a copy of an array or tensor in new memory on a device; a tensor keeps its strides."""
    tensor: Any = tensors_of({"": array})[""] if isinstance(array, np.ndarray) else array
    return _copy_tensor(tensor, device)


def in_memory(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the tensors of a unit to new main memory, with the same strides.

    Before, it waits for all streams of their CUDA devices: another thread may have used a tensor on
    its own stream, and the memory on the device is freed after the copy.
    """
    import torch

    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)
    return [_copy_tensor(tensor, "cpu") for tensor in tensors]


def tensors_of_optimizer(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module
) -> dict[str, Any]:
    """Return the values of an optimizer's states by ``"<parameter>.<state>"``, not copied.

    States of parameters that the module lacks are omitted.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        f"{names[id(parameter)]}.{state}": value
        for parameter, states in optimizer.state.items()
        if id(parameter) in names
        for state, value in states.items()
    }


def optimizer_groups(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Any]:
    """Return the keywords ``param_groups`` and ``learning_rate`` of an `OptimizerStateDict`.

    `names`: of the parameters, in the order of the groups.
    """
    groups, _ = stored_states(optimizer.param_groups, names, {})
    keywords = keywords_from(OptimizerType.OTHER, groups, {})
    return {key: keywords[key] for key in ("param_groups", "learning_rate")}
