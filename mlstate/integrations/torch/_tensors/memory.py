"""What of a torch tensor the core may read and write, and what torch must hear of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch


def plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie in main memory for the core to read or write."""
    import torch

    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.device.type != "cpu"
        or tensor.layout != torch.strided
        or torch.compiler.is_compiling()
    ):
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:  # under torch.vmap and torch.func a tensor has no memory of its own
        return False
    return True


def needs_graph(tensor: torch.Tensor) -> bool:
    """Whether torch must see what happens to the tensor: for gradients or for tangents."""
    import torch

    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    return has_tangent(tensor)


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode differentiation follows the tensor."""
    import torch

    dual = torch.autograd.forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return dual.tangent is not None


def refuse_graph(*tensors: Any) -> None:
    """Refuse an `out` that autograd would have to record."""
    import torch

    if any(isinstance(tensor, torch.Tensor) and needs_graph(tensor) for tensor in tensors):
        raise ValueError(
            "out= cannot be part of the autograd graph: detach source_state and out, or "
            "leave out= away"
        )


def writable_memory(tensor: torch.Tensor) -> bool:
    """Whether the core may write the tensor's elements as they lie in memory."""
    return plain_memory(tensor) and not tensor.is_neg() and not tensor.is_conj()


def write_into_tensor(out: torch.Tensor, write: Callable[[Any], Any]) -> torch.Tensor:
    """Let `write` fill a tensor, as an in-place operation of torch's own would.

    Refuses a tensor that autograd records, and counts a new version of it, so that a
    backward pass which needs the old content fails instead of going wrong.

    Parameters
    ----------
    out : torch.Tensor
        A plain CPU tensor.
    write : callable
        Gets `out` detached.

    Returns
    -------
    torch.Tensor
        `out`.

    Raises
    ------
    ValueError
        If `out` is part of an autograd graph, or not plain main memory.
    """
    refuse_graph(out)
    if not writable_memory(out):
        raise ValueError(
            "out is not plain main memory (another device, a subclass, or a view that is "
            "negated or conjugated): pass a plain CPU tensor and copy from it"
        )
    write(out.detach())
    note_written([out])
    return out


def note_written(tensors: Iterable[torch.Tensor]) -> None:
    """Count a new version of tensors that were written to.

    A backward pass that needs the old content fails then, instead of going wrong. Tensors
    made in inference mode have no versions.

    Parameters
    ----------
    tensors : iterable of torch.Tensor
        Leaves that need gradients are taken too.
    """
    import torch

    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    try:
        torch.autograd.graph.increment_version(counted)
    except (RuntimeError, TypeError):  # of a torch that takes one tensor only
        for tensor in counted:
            torch.autograd.graph.increment_version(tensor)
