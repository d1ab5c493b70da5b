"""torch tensors as KV caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import _core

if TYPE_CHECKING:
    import torch

__all__ = ["move"]


def _torch_dtype(dtype: Any, source: torch.Tensor) -> torch.dtype:
    """Return the torch dtype that `dtype` means: a torch dtype, a name, a NumPy dtype."""
    import torch

    if dtype is None:
        return source.dtype
    if isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str):
        name = dtype
    else:
        import numpy as np

        name = np.dtype(dtype).name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no dtype '{name}'")
    return found


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie in main memory for the core to read or write."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not torch.compiler.is_compiling()
    )


def _needs_graph(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.requires_grad and torch.is_grad_enabled()


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


def _check_out(out: torch.Tensor, source: torch.Tensor, target_seq_length: int) -> None:
    from ..errors import CompatibilityError

    layers, heads, _, head_dim = source.shape
    wanted = (layers, heads, target_seq_length, head_dim)
    if tuple(out.shape) != wanted:
        raise CompatibilityError(f"out: the target has shape {tuple(out.shape)}, not {wanted}")


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
    """Move a torch KV cache: what `mlstate.kv` does with a tensor.

    The core's kernels serve tensors in main memory that need no gradient; torch's own
    operations serve all others, so that device and autograd graph are kept.

    Parameters
    ----------
    source : torch.Tensor, shape (layers, heads, source_seq, head_dim)
    target_seq_length : int
    position : int or None
        None: all of `source_seq`.
    pad_value : float
    dtype : torch.dtype, str, NumPy dtype or None
    out : torch.Tensor, ndarray or None
    low_memory : bool
    compact : bool
        Whether the target may be shorter than the source. The others are as for
        `mlstate.kv.transition_kv_state`.

    Returns
    -------
    torch.Tensor or ndarray
        `out` if given, else a tensor on the device of `source`; `source` itself if there
        is nothing to do and `compact` is false.

    Raises
    ------
    CapacityError, CompatibilityError, ValueError, TypeError
        As `mlstate.kv.transition_kv_state` and `mlstate.kv.compact_kv_state`; a ValueError
        also for `out` with a source that needs a gradient.

    Examples
    --------
    Called through `mlstate.kv`:

    >>> import torch
    >>> from mlstate.kv import transition_kv_state
    >>> cache = torch.ones(4, 2, 256, 32, dtype=torch.bfloat16)
    >>> moved = transition_kv_state(cache, 512, current_position=200)
    >>> tuple(moved.shape), moved.dtype
    ((4, 2, 512, 32), torch.bfloat16)
    """
    import torch

    if position is None:
        position = source.shape[2] if source.dim() == 4 else 0
    _core.kv_check(tuple(source.shape), target_seq_length, position, compact)
    if (
        not compact
        and dtype is None
        and out is None
        and target_seq_length == position == source.shape[2]
    ):
        return source
    wanted = _torch_dtype(dtype, source)
    if _needs_graph(source) and out is not None:
        raise ValueError(
            "out= cannot be part of the autograd graph: detach source_state, or leave out= away"
        )
    if isinstance(out, torch.Tensor):
        _check_out(out, source, target_seq_length)
        if dtype is not None and wanted != out.dtype:
            from ..errors import CompatibilityError

            raise CompatibilityError(
                f"out is {_name_of(out.dtype)}, but dtype asks for {_name_of(wanted)}: pass "
                "one of them"
            )
    target_ok = not isinstance(out, torch.Tensor) or _plain_memory(out)
    if not (_plain_memory(source) and target_ok) or _needs_graph(source):
        return _by_torch(source, target_seq_length, position, pad_value, wanted, out)
    plain = source.detach().resolve_conj().resolve_neg()
    if out is None:
        bits = _core.kv_move(
            plain,
            target_seq_length,
            position,
            pad_value,
            _name_of(wanted),
            None,
            low_memory,
            compact,
        )
        return torch.from_numpy(bits).view(wanted)
    target = out.detach() if isinstance(out, torch.Tensor) else out
    _core.kv_move(plain, target_seq_length, position, pad_value, None, target, False, compact)
    if isinstance(out, torch.Tensor) and not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out
