"""torch tensors as KV caches."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from .... import _core
from ...._common.arrays import write_into
from ...._common.dtypes import name_of
from ....kv._axis import along, sequence_axis, with_length
from ....kv._integer_conversion import convert_tokens, converts, result_dtype
from .dtypes import torch_dtype
from .memory import (
    has_tangent,
    needs_graph,
    note_written,
    plain_memory,
    refuse_graph,
    refuse_shared,
    writable_memory,
)

if TYPE_CHECKING:
    import torch


def _fits(length: int, target_seq_length: int, position: int, compact: bool) -> bool:
    """Return whether the core's check would pass; torch.compile can trace this function."""
    if not 0 <= position <= length:
        return False
    return position <= target_seq_length and (compact or length <= target_seq_length)


def _are_plain(source: torch.Tensor, out: Any) -> bool:
    """Return whether the core can read and write both, and autograd records neither."""
    return (
        _core.is_plain(source, False)
        and _core.is_plain(out, True)
        and not has_tangent(source)
        and not (isinstance(out, type(source)) and has_tangent(out))
        and not converts(name_of(source.dtype), result_dtype(None, out))
    )


def _move_with_torch(
    source: torch.Tensor,
    target_seq_length: int,
    position: int,
    pad_value: float,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    axis: int,
) -> torch.Tensor:
    """Move with torch operations: for other devices, autograd and compilation."""
    import torch

    tokens = source[along(axis, None, position)]
    if out is not None:
        refuse_shared(out, source)
    if out is None:
        padding = (0, 0) * (source.dim() - 1 - axis) + (0, target_seq_length - position)
        return torch.nn.functional.pad(tokens.to(dtype), padding, value=pad_value)
    out[along(axis, None, position)].copy_(tokens)
    out[along(axis, position)].fill_(pad_value)
    return out


def _check_out(
    out: torch.Tensor,
    source: torch.Tensor,
    target_seq_length: int,
    dtype: torch.dtype | None,
    axis: int,
) -> None:
    """Raise CompatibilityError if `out` has the wrong shape, or a dtype other than `dtype`."""
    from ....errors import CompatibilityError

    wanted = with_length(source.shape, axis, target_seq_length)
    error = None
    if tuple(out.shape) != wanted:
        error = CompatibilityError(f"out: the target has shape {tuple(out.shape)}, not {wanted}")
        error.expected, error.got = str(wanted), str(tuple(out.shape))
    elif dtype is not None and dtype != out.dtype:
        have, want = name_of(out.dtype), name_of(dtype)
        error = CompatibilityError(f"out is {have}, but dtype asks for {want}: pass one of them")
    if error is not None:
        raise error


def _check_values(source: torch.Tensor, dtype: torch.dtype, pad_value: float) -> None:
    """Raise the core's error for an unsupported conversion or padding value."""
    import torch

    nothing = torch.empty((0, 0, 0, 0), dtype=source.dtype)
    if plain_memory(nothing):  # false under torch.func, even for a new tensor
        _core.kv_move(nothing, 0, 0, pad_value, name_of(dtype), None, False, True, -2)


def _convert_tokens(tokens: torch.Tensor, target: str) -> torch.Tensor:
    """Convert tokens from or to integers; raise ValueError if a value does not fit."""
    import torch

    if target == "bfloat16":  # same range as float32
        return tokens.to(torch.bfloat16)
    array = (tokens.float() if tokens.dtype == torch.bfloat16 else tokens).numpy()
    return torch.from_numpy(convert_tokens(array, target))


def move_kv(
    source: torch.Tensor,
    target_seq_length: int,
    position: int | None,
    pad_value: float,
    dtype: Any,
    out: Any,
    low_memory: bool,
    compact: bool,
    seq_axis: int,
) -> Any:
    """Move a torch KV cache; see `mlstate.kv.transition_kv_state`.

    `compact`: the target may be shorter. The core handles CPU tensors that need no gradient. torch
    operations handle all other tensors, so that device and autograd graph are kept.
    """
    import torch

    compiling = torch.compiler.is_compiling()
    if out is not None and dtype is None and not compiling and _are_plain(source, out):
        _core.kv_move(
            source, target_seq_length, position, pad_value, None, out, False, compact, seq_axis
        )
        if isinstance(out, torch.Tensor):
            note_written([out])
        return out
    axis = sequence_axis(source.shape, seq_axis)
    if position is None:
        position = source.shape[axis]
    if not (compiling and _fits(source.shape[axis], target_seq_length, position, compact)):
        _core.kv_check(tuple(source.shape), target_seq_length, position, compact, axis)
    if (
        not compact
        and dtype is None
        and out is None
        and target_seq_length == position == source.shape[axis]
    ):
        return source
    wanted = torch_dtype(dtype, source)
    if compiling and (out is None or isinstance(out, torch.Tensor)):
        return _move_with_torch(source, target_seq_length, position, pad_value, wanted, out, axis)
    length, position = index(target_seq_length), index(position)
    if out is not None:
        refuse_graph(source, out)
    by_torch = not plain_memory(source) or needs_graph(source)
    if isinstance(out, torch.Tensor):
        by_torch = by_torch or not writable_memory(out)
    elif by_torch and out is not None:  # copy to the CPU: the array is in main memory
        source, by_torch = source.detach().cpu().as_subclass(torch.Tensor), False
    if by_torch:
        _check_values(source, wanted if out is None else out.dtype, pad_value)
        if out is not None:
            _check_out(out, source, length, None if dtype is None else wanted, axis)
        return _move_with_torch(source, length, position, pad_value, wanted, out, axis)
    plain = source.detach().resolve_conj().resolve_neg()
    target = result_dtype(name_of(wanted), out)
    if converts(name_of(source.dtype), target):
        plain = _convert_tokens(plain[along(axis, None, position)], target)
    if out is None:
        name = name_of(wanted)
        bits = _core.kv_move(
            plain, length, position, pad_value, name, None, low_memory, compact, axis
        )
        return torch.from_numpy(bits).view(wanted)
    asked = None if dtype is None else name_of(wanted)
    return write_into(
        out,
        lambda target: _core.kv_move(
            plain, length, position, pad_value, asked, target, False, compact, axis
        ),
    )
