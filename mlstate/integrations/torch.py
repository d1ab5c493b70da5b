"""torch tensors as KV caches."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from .. import _core
from .._arrays import write_into

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["move", "write_into_tensor"]


def _torch_dtype(dtype: Any, source: torch.Tensor) -> torch.dtype:
    """Return the torch dtype that `dtype` means: a torch dtype, a name, a NumPy dtype."""
    import torch

    if dtype is None:
        return source.dtype
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        import numpy as np

        dtype = np.dtype(dtype)  # TypeError where this is no dtype of NumPy's either
        found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        from ..errors import CompatibilityError

        raise CompatibilityError(f"torch has no dtype '{dtype.name}'")
    return found


def _name_of(dtype: torch.dtype) -> str:
    """Return the name that NumPy, ml_dtypes and the core know a dtype by."""
    return str(dtype).removeprefix("torch.")


def _plain_memory(tensor: torch.Tensor) -> bool:
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


def _needs_graph(tensor: torch.Tensor) -> bool:
    """Whether torch must see what happens to the tensor: for gradients or for tangents."""
    import torch

    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    dual = torch.autograd.forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return dual.tangent is not None


def _refuse_graph(*tensors: Any) -> None:
    import torch

    if any(isinstance(tensor, torch.Tensor) and _needs_graph(tensor) for tensor in tensors):
        raise ValueError(
            "out= cannot be part of the autograd graph: detach source_state and out, or "
            "leave out= away"
        )


def _writable_memory(tensor: torch.Tensor) -> bool:
    """Whether the core may write the tensor's elements as they lie in memory."""
    return _plain_memory(tensor) and not tensor.is_neg() and not tensor.is_conj()


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
    import torch

    _refuse_graph(out)
    if not _writable_memory(out):
        raise ValueError(
            "out is not plain main memory (another device, a subclass, or a view that is "
            "negated or conjugated): pass a plain CPU tensor and copy from it"
        )
    write(out.detach())
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out


def _fits(source: torch.Tensor, target_seq_length: int, position: int, compact: bool) -> bool:
    """Whether the core's check would pass, in terms that torch.compile can trace."""
    if source.dim() != 4 or not 0 <= position <= source.shape[2]:
        return False
    return position <= target_seq_length and (compact or source.shape[2] <= target_seq_length)


def _by_torch(
    source: torch.Tensor,
    target_seq_length: int,
    position: int,
    pad_value: float,
    dtype: torch.dtype,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Move by torch's own operations: other devices, autograd, compilation."""
    import torch

    tokens = source[:, :, :position]
    if out is None:
        padding = (0, 0, 0, target_seq_length - position)
        return torch.nn.functional.pad(tokens.to(dtype), padding, value=pad_value)
    out[:, :, :position].copy_(tokens)
    out[:, :, position:].fill_(pad_value)
    return out


def _check_out(
    out: torch.Tensor,
    source: torch.Tensor,
    target_seq_length: int,
    dtype: torch.dtype | None,
) -> None:
    """Refuse an `out` of another shape, or of another dtype than the one asked for."""
    from ..errors import CompatibilityError

    layers, heads, _, head_dim = source.shape
    wanted = (layers, heads, target_seq_length, head_dim)
    error = None
    if tuple(out.shape) != wanted:
        error = CompatibilityError(f"out: the target has shape {tuple(out.shape)}, not {wanted}")
        error.expected, error.got = str(wanted), str(tuple(out.shape))
    elif dtype is not None and dtype != out.dtype:
        have, want = _name_of(out.dtype), _name_of(dtype)
        error = CompatibilityError(f"out is {have}, but dtype asks for {want}: pass one of them")
    if error is not None:
        raise error


def _check_values(source: torch.Tensor, dtype: torch.dtype, pad_value: float) -> None:
    """Refuse a conversion or padding that the core would refuse, in its words."""
    import torch

    nothing = torch.empty((0, 0, 0, 0), dtype=source.dtype)
    if _plain_memory(nothing):  # under torch.func not even a new tensor is
        _core.kv_move(nothing, 0, 0, pad_value, _name_of(dtype), None, False, True)


def move(
    source: torch.Tensor,
    target_seq_length: int,
    position: int | None,
    pad_value: float,
    dtype: Any,
    out: Any,
    low_memory: bool,
    compact: bool,
) -> Any:
    """Move a torch KV cache; see `mlstate.kv.transition_kv_state`.

    The core's kernels serve tensors in main memory that need no gradient; torch's own
    operations serve all others, so that device and autograd graph are kept.

    Parameters
    ----------
    source : torch.Tensor, shape (layers, heads, source_seq, head_dim)
        The cache.
    target_seq_length, position, pad_value, dtype, out, low_memory
        As `mlstate.kv.transition_kv_state` has them.
    compact : bool
        Whether the target may be shorter, as in `mlstate.kv.compact_kv_state`.

    Returns
    -------
    torch.Tensor or ndarray
        `out` if given, else a tensor.
    """
    import torch

    if position is None:
        position = source.shape[2] if source.dim() == 4 else 0
    compiling = torch.compiler.is_compiling()
    if not (compiling and _fits(source, target_seq_length, position, compact)):
        _core.kv_check(tuple(source.shape), target_seq_length, position, compact)
    if (
        not compact
        and dtype is None
        and out is None
        and target_seq_length == position == source.shape[2]
    ):
        return source
    wanted = _torch_dtype(dtype, source)
    if compiling and (out is None or isinstance(out, torch.Tensor)):
        return _by_torch(source, target_seq_length, position, pad_value, wanted, out)
    length, position = index(target_seq_length), index(position)
    if out is not None:
        _refuse_graph(source, out)
    by_torch = not _plain_memory(source) or _needs_graph(source)
    if isinstance(out, torch.Tensor):
        by_torch = by_torch or not _writable_memory(out)
    elif by_torch and out is not None:  # an array cannot follow the tensor to where it is
        source, by_torch = source.detach().cpu().as_subclass(torch.Tensor), False
    if by_torch:
        _check_values(source, wanted if out is None else out.dtype, pad_value)
        if out is not None:
            _check_out(out, source, length, None if dtype is None else wanted)
        return _by_torch(source, length, position, pad_value, wanted, out)
    plain = source.detach().resolve_conj().resolve_neg()
    if out is None:
        name = _name_of(wanted)
        bits = _core.kv_move(plain, length, position, pad_value, name, None, low_memory, compact)
        return torch.from_numpy(bits).view(wanted)
    asked = None if dtype is None else _name_of(wanted)
    return write_into(
        out,
        lambda target: _core.kv_move(
            plain, length, position, pad_value, asked, target, False, compact
        ),
    )
