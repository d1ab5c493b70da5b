"""Tensors of a tiered state: on a device, in main memory, or without memory of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ._state import tensors_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


def accelerator(values: Iterable[Any], device: Any) -> Any:
    """Return the device of the hot tier, or None for main memory.

    Parameters
    ----------
    values : iterable
        The state's arrays: where one is a tensor on a device, that is the hot one, and where
        one is any tensor, CUDA is, if there is some.
    device : str, torch.device or None
        What the user asked for.

    Returns
    -------
    torch.device or None
    """
    import torch

    if device is not None:
        return torch.device(device)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    return torch.device("cuda") if tensors and torch.cuda.is_available() else None


def _new(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Return new memory for a tensor's elements, its strides kept.

    Main memory is NumPy's, which asks for huge pages: torch's costs a fault for every 4 KiB.
    """
    import torch

    if torch.device(device).type != "cpu" or not tensor.is_contiguous():
        return torch.empty_like(tensor, device=device)
    flat = np.empty(tensor.numel() * tensor.element_size(), np.uint8)
    return torch.from_numpy(flat).view(tensor.dtype).view(tensor.shape)


def on_device(array: Any, device: Any) -> torch.Tensor:
    """Copy an array or a tensor to new memory of a device."""
    if isinstance(array, np.ndarray):
        array = tensors_of({"": array})[""]
    return _new(array, device).copy_(array)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to new main memory."""
    return _new(tensor, "cpu").copy_(tensor)


def give_memory(tensor: torch.Tensor, source: torch.Tensor | None) -> None:
    """Let a tensor have the memory of another one; None: no elements at all."""
    if source is None:
        source = tensor.detach().new_empty(0, device="cpu")
    tensor.data = source


def tensors_of_optimizer(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """Return the tensors themselves of an optimizer's state, by ``"<parameter>.<state>"``."""
    import torch

    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        f"{names[id(parameter)]}.{state}": value
        for parameter, states in optimizer.state.items()
        if id(parameter) in names
        for state, value in states.items()
        if isinstance(value, torch.Tensor)
    }
