"""Tensors of a tiered state: on a device, in main memory, or without memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .._tensors.state import tensors_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


def accelerator(values: Iterable[Any], device: Any) -> Any:
    """Return the device of the hot tier, or None if that is main memory.

    Parameters
    ----------
    values : iterable
        The arrays of the state. The first tensor on a device determines the device. If there are
        only CPU tensors, it is CUDA if available.
    device : str, torch.device or None
        The device that the user chose, or None.

    Returns
    -------
    torch.device or None

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.integrations.torch._checkpoint.tiers import accelerator
    >>> accelerator([np.ones(2)], None) is None
    True
    >>> accelerator([np.ones(2)], "cpu")
    device(type='cpu')
    """
    import torch

    if device is not None:
        return torch.device(device)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    return torch.device("cuda") if tensors and torch.cuda.is_available() else None


def _allocate_like(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Return new memory for a tensor's elements, with the same strides.

    In main memory, NumPy allocates: it uses huge pages, while torch has a page fault per 4 KiB.
    """
    import torch

    if torch.device(device).type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return torch.empty_like(tensor, device=device)
    flat = np.empty(tensor.numel() * tensor.element_size(), np.uint8)
    return torch.from_numpy(flat).view(tensor.dtype).view(tensor.shape)


def _copy_tensor(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Copy a tensor to new memory.

    Copies within main memory use memcpy: torch's threads would wait for each other, for
    milliseconds if processors are busy.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    made = _allocate_like(tensor, device)
    if made.device.type == tensor.device.type == "cpu" and tensor.is_contiguous():
        np.copyto(_bytes_of(made), _bytes_of(tensor))
        return made
    return made.copy_(tensor)


def _bytes_of(tensor: torch.Tensor) -> Any:
    """Return a byte view of a contiguous CPU tensor."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy()


def on_device(array: Any, device: Any) -> torch.Tensor:
    """Copy an array or a tensor to new memory on a device.

    Parameters
    ----------
    array : ndarray or torch.Tensor
        Any shape, and any dtype that torch has.
    device : str or torch.device
        The target device; ``"cpu"`` copies too.

    Returns
    -------
    torch.Tensor
        A copy with the same shape, dtype and bits; a tensor keeps its strides.

    Raises
    ------
    TypeError
        If torch lacks the dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.integrations.torch._checkpoint.tiers import on_device
    >>> array = np.arange(3.0)
    >>> tensor = on_device(array, "cpu")
    >>> array[0] = 7
    >>> tensor.tolist()
    [0.0, 1.0, 2.0]
    """
    if isinstance(array, np.ndarray):
        array = tensors_of({"": array})[""]
    return _copy_tensor(array, device)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to new main memory.

    Parameters
    ----------
    tensor : torch.Tensor
        A tensor on any device.

    Returns
    -------
    torch.Tensor
        A CPU copy with the same shape, strides, dtype and bits.

    Examples
    --------
    >>> import torch
    >>> from mlstate.integrations.torch._checkpoint.tiers import in_memory
    >>> tensor = torch.ones(2, 3).T
    >>> copy = in_memory(tensor)
    >>> copy.stride(), copy.data_ptr() == tensor.data_ptr()
    ((1, 3), False)
    """
    return _copy_tensor(tensor, "cpu")


def give_memory(tensor: torch.Tensor, source: torch.Tensor | None) -> None:
    """Replace a tensor's memory with the memory of another tensor, without a copy.

    The tensor remains the same object, so a module and an optimizer that hold it use the new
    memory.

    Parameters
    ----------
    tensor : torch.Tensor
        The tensor; may be a parameter.
    source : torch.Tensor or None
        A tensor of the same dtype. None removes all elements, for a unit that is in a file.

    Examples
    --------
    >>> import torch
    >>> from mlstate.integrations.torch._checkpoint.tiers import give_memory
    >>> weight = torch.nn.Parameter(torch.ones(2, 3))
    >>> give_memory(weight, None)
    >>> weight.numel()
    0
    >>> give_memory(weight, torch.zeros(2, 3))
    >>> weight.shape, weight.requires_grad
    (torch.Size([2, 3]), True)
    """
    if source is None:
        source = tensor.detach().new_empty(0, device="cpu")
        if not _nowhere:
            _nowhere.append(source.untyped_storage())
        source.set_(_nowhere[0], 0, (0,), (1,))
    tensor.data = source


# The storage of all tensors without elements, and of their views, such as in state_dict().
_nowhere: list[torch.UntypedStorage] = []


def has_given_away() -> bool:
    """Return whether `give_memory` removed any tensor's elements in this process."""
    return bool(_nowhere)


def is_given_away(tensor: torch.Tensor) -> bool:
    """Return whether `give_memory` removed a tensor's elements; needs a true `has_given_away`."""
    import torch

    if torch.nn.parameter.is_lazy(tensor):  # it has no shape and no memory yet
        return False
    if tensor.numel() or tensor.is_sparse or tensor.device.type != "cpu":
        return False
    return bool(tensor.untyped_storage()._cdata == _nowhere[0]._cdata)


def tensors_of_optimizer(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer's state, by ``"<parameter>.<state>"``.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        States that are not tensors are omitted.
    module : torch.nn.Module
        Provides the names of parameters; states of other parameters are omitted.

    Returns
    -------
    dict of str to torch.Tensor
        The optimizer's own tensors, not copies.

    Examples
    --------
    >>> import torch
    >>> from mlstate.integrations.torch._checkpoint.tiers import tensors_of_optimizer
    >>> module = torch.nn.Linear(2, 3, bias=False)
    >>> adam = torch.optim.Adam(module.parameters())
    >>> module(torch.ones(1, 2)).sum().backward()
    >>> adam.step()
    >>> sorted(tensors_of_optimizer(adam, module))
    ['weight.exp_avg', 'weight.exp_avg_sq', 'weight.step']
    """
    import torch

    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        f"{names[id(parameter)]}.{state}": value
        for parameter, states in optimizer.state.items()
        if id(parameter) in names
        for state, value in states.items()
        if isinstance(value, torch.Tensor)
    }
