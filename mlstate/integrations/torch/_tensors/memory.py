"""Whether the core may read or write a tensor: autograd, overlap, version; memory that moves."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ...._common.arrays import overlaps_itself, shares_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch


_OVERLAPS = "out: its elements share memory with one another, as in a broadcast view: pass a copy"


def is_core_readable(tensor: torch.Tensor) -> bool:
    """Return whether the core can access the tensor's elements in main memory.

    This is false for subclasses, other layouts, and while torch compiles.
    """
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
    except RuntimeError:  # a tensor under torch.vmap or torch.func has no memory
        return False
    return True


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat byte view of a contiguous tensor; of an empty one, new memory.

    Empty tensors, for example over NumPy arrays, may have strides of 0, which torch cannot view.
    """
    import torch

    flat = tensor.reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def needs_graph(tensor: torch.Tensor) -> bool:
    """Return whether torch must record operations on the tensor, for gradients or tangents."""
    import torch

    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    return has_tangent(tensor)


def has_tangent(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is part of forward-mode differentiation."""
    import torch

    dual = torch.autograd.forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return dual.tangent is not None


def refuse_graph(*tensors: object) -> None:
    """Raise ValueError if autograd would have to record a write to one of the tensors."""
    import torch

    if any(isinstance(tensor, torch.Tensor) and needs_graph(tensor) for tensor in tensors):
        raise ValueError(
            "out= cannot be part of the autograd graph: detach source_state and out, or do not "
            "pass out="
        )


def refuse_shared(out: torch.Tensor, source: torch.Tensor) -> None:
    """Raise ValueError if elements of `out` share memory with one another or with `source`.

    While torch compiles, only the strides of `out` can be checked. On different devices, and for
    layouts that are not strided, nothing is checked.
    """
    import torch

    if torch.compiler.is_compiling():  # tensors have no address
        steps = sorted(zip(out.stride(), out.shape, strict=True))
        reach = 1  # elements that the axes with smaller steps span: a step must not fall into them
        for step, size in steps:
            if size > 1 and step < reach:
                raise ValueError(_OVERLAPS)
            reach += step * (size - 1)
        return
    if out.device != source.device or out.layout != torch.strided:
        return
    if overlaps_itself(out):
        raise ValueError(_OVERLAPS)
    if source.layout == torch.strided and shares_elements(out, source):
        raise ValueError("out shares memory with source_state: pass another buffer")


def is_core_writable(tensor: torch.Tensor) -> bool:
    """Return whether the core may write the tensor's elements directly."""
    return is_core_readable(tensor) and not tensor.is_neg() and not tensor.is_conj()


def write_into_tensor(out: torch.Tensor, write: Callable[[object], object]) -> torch.Tensor:
    """Call `write` with a detached tensor over `out`, and return `out`.

    Raises ValueError if autograd records the tensor, or it is not plain main memory. Increments the
    tensor's version, so that a backward pass that needs the old content raises instead of using the
    new content.
    """
    refuse_graph(out)
    if not is_core_writable(out):
        raise ValueError(
            "out is not plain main memory (another device, a subclass, or a view that is "
            "negated or conjugated): pass a plain CPU tensor and copy from it"
        )
    write(out.detach())
    note_written([out])
    return out


def note_written(tensors: Iterable[torch.Tensor]) -> None:
    """Increment the version of tensors that were written to.

    A backward pass that needs the old content then raises instead of using the new content.
    Inference tensors have no version and are skipped.
    """
    import torch

    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    try:
        torch.autograd.graph.increment_version(counted)
    except (RuntimeError, TypeError):  # older torch accepts only one tensor
        for tensor in counted:
            torch.autograd.graph.increment_version(tensor)


def memory_change(tensor: torch.Tensor, source: torch.Tensor | None) -> partial[Any]:
    """Return the change that gives a tensor the memory of `source`, without a copy.

    The tensor remains the same object, so a module and an optimizer that hold it use the new
    memory. None as `source` removes all elements, as a `TieredState` does while they are in a file;
    the tensor is then empty and on the CPU.
    """
    if source is None:
        source = tensor.detach().new_empty(0, device="cpu")
        if not _nowhere:
            _nowhere.append(source.untyped_storage())
        source.set_(_nowhere[0], 0, (0,), (1,))
    return partial(setattr, tensor, "data", source)


# The storage of all tensors without elements, and of their views, such as in state_dict().
_nowhere: list[torch.UntypedStorage] = []


def has_given_away() -> bool:
    """Return whether `memory_change` removed any tensor's elements in this process."""
    return bool(_nowhere)


def is_given_away(tensor: torch.Tensor) -> bool:
    """Return whether `memory_change` removed a tensor's elements, also for a view of such a tensor.

    Call it only if `has_given_away` returns true: before that, there is nothing to compare with.
    """
    import torch

    if torch.nn.parameter.is_lazy(tensor):  # it has no shape and no memory yet
        return False
    if tensor.numel() or tensor.is_sparse or tensor.device.type != "cpu":
        return False
    return bool(tensor.untyped_storage()._cdata == _nowhere[0]._cdata)
