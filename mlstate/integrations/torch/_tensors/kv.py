"""KV caches that are torch tensors: moved by the core, or by torch on devices and for autograd."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from .... import _core
from ...._common.arrays import write_into
from ...._common.dtypes import name_of
from ....kv._axis import along, sequence_axis, with_length
from ....kv._integer_conversion import convert_tokens, converts, result_dtype
from ....kv._move import KVMove
from .dtypes import torch_dtype
from .memory import (
    has_tangent,
    is_core_readable,
    is_core_writable,
    needs_graph,
    note_written,
    refuse_graph,
    refuse_shared,
)
from .quantize_kv import kv_dequantize, kv_quantization_loss, kv_quantize, kv_zeros
from .state import explain_unsupported_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["kv_dequantize", "kv_quantization_loss", "kv_quantize", "kv_zeros", "move_kv"]


def _fits(length: int, move: KVMove, position: int) -> bool:
    """Return whether the core would accept `move` for a source of `length` positions.

    `position`: number of tokens, which are in the first positions. torch.compile can trace this
    function, but not the core.
    """
    if not 0 <= position <= length:
        return False
    return position <= move.target_length and (move.compact or length <= move.target_length)


def _can_core_move(source: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether the core can do the move from `source` to `out`, an array or tensor.

    It must be able to read `source` and write `out` in main memory, neither may be part of
    forward-mode differentiation, and the dtypes must not need a conversion of integers.
    """
    return (
        _core.can_view(source, False)
        and _core.can_view(out, True)
        and not has_tangent(source)
        and not (isinstance(out, type(source)) and has_tangent(out))
        and not converts(name_of(source.dtype), result_dtype(None, out))
    )


def _move_with_torch(source: torch.Tensor, move: KVMove, out: torch.Tensor | None) -> torch.Tensor:
    """Copy the tokens and pad the rest with torch: for other devices, autograd and compilation.

    Return `out`, or a new tensor if it is None. The caller has set the position, the dtype and the
    axis, counted from 0, of `move`. Raises ValueError if `out` shares memory with itself or with
    `source`.
    """
    import torch

    position, axis = move.position, move.seq_axis
    tokens = source[along(axis, None, position)]
    if out is not None:
        refuse_shared(out, source)
    if out is None:
        padding = (0, 0) * (source.dim() - 1 - axis) + (0, move.target_length - tokens.shape[axis])
        return torch.nn.functional.pad(tokens.to(move.dtype), padding, value=move.pad_value)
    out[along(axis, None, position)].copy_(tokens)
    out[along(axis, position)].fill_(move.pad_value)
    return out


def _check_out(out: torch.Tensor, source: torch.Tensor, move: KVMove, *, is_exact: bool) -> None:
    """Raise CompatibilityError if `out` has a wrong shape or, if `is_exact`, another dtype.

    The expected ones follow from `source` and `move`.
    """
    from ....errors import CompatibilityError

    expected = with_length(source.shape, move.seq_axis, move.target_length)
    error = None
    if tuple(out.shape) != expected:
        error = CompatibilityError(f"out: the target has shape {tuple(out.shape)}, not {expected}")
        error.expected, error.got = str(expected), str(tuple(out.shape))
    elif is_exact and move.dtype != out.dtype:
        have, want = name_of(out.dtype), name_of(move.dtype)
        error = CompatibilityError(f"out is {have}, but dtype asks for {want}: pass one of them")
    if error is not None:
        raise error


def _check_values(source: torch.Tensor, dtype: torch.dtype, pad_value: float) -> None:
    """Raise the core's error for an unsupported conversion to `dtype`, or padding value.

    The core checks them on an empty array, because it cannot read `source` itself. `dtype`: of the
    result. `pad_value`: value of positions without a token.
    """
    import torch

    empty = torch.empty((0, 0, 0, 0), dtype=source.dtype)
    if is_core_readable(empty):  # false under torch.func, even for a new tensor
        _core.kv_move(empty, KVMove(0, 0, pad_value=pad_value, dtype=name_of(dtype)), None)


def _convert_tokens(tokens: torch.Tensor, target: str) -> torch.Tensor:
    """Return CPU tokens as the dtype named `target`; raise ValueError if a value does not fit."""
    import torch

    if target == "bfloat16":  # same range as float32
        return tokens.to(torch.bfloat16)
    array = (tokens.float() if tokens.dtype == torch.bfloat16 else tokens).numpy()
    return torch.from_numpy(convert_tokens(array, target))


def _check_strided(label: str, tensor: torch.Tensor) -> None:
    """Raise TypeError for a sparse, nested, quantized or uninitialized tensor.

    `label`: of the argument, for the error. Tensors of other devices and subclasses pass.
    """
    import torch

    if (
        torch.nn.parameter.is_lazy(tensor)
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.layout != torch.strided
    ):
        raise TypeError(f"{label}: the tensor is {explain_unsupported_tensor(tensor)}")


def move_kv(source: torch.Tensor, move: KVMove, out: Any) -> Any:
    """Move a torch KV cache; errors are as for `mlstate.kv.transition_kv_state`.

    Return `out` if it was passed (a tensor or an array), else a tensor, which is `source` itself if
    nothing changes. `move`: the lengths, the axis, and the dtype and padding of the result. The
    core handles CPU tensors that need no gradient. torch operations handle all other tensors, so
    that device and autograd graph are kept; a NumPy array as `out` gets a copy without gradient.
    """
    import torch

    compiling = torch.compiler.is_compiling()
    if out is not None and move.dtype is None and not compiling and _can_core_move(source, out):
        _core.kv_move(source, move, out)
        if isinstance(out, torch.Tensor):
            note_written([out])
        return out
    if not compiling:
        _check_strided("source_state", source)
        if isinstance(out, torch.Tensor):
            _check_strided("out", out)
    axis = sequence_axis(source.shape, move.seq_axis)
    length, position = source.shape[axis], move.position
    if position is None:
        position = length
    if not (compiling and _fits(length, move, position)):
        _core.kv_check(tuple(source.shape), move)
    if (
        not move.compact
        and move.dtype is None
        and out is None
        and move.target_length == position == length
    ):
        return source
    dtype = torch_dtype(move.dtype, source)
    if compiling and (out is None or isinstance(out, torch.Tensor)):
        resolved = KVMove(move.target_length, position, axis, pad_value=move.pad_value, dtype=dtype)
        return _move_with_torch(source, resolved, out)
    if out is not None:
        refuse_graph(source, out)
    uses_torch = not is_core_readable(source) or needs_graph(source)
    if isinstance(out, torch.Tensor):
        uses_torch = uses_torch or not is_core_writable(out)
    elif uses_torch and out is not None:  # copy to the CPU: the array is in main memory
        source, uses_torch = source.detach().cpu().as_subclass(torch.Tensor), False
    if uses_torch:
        _check_values(source, dtype if out is None else out.dtype, move.pad_value)
        target_length, position = index(move.target_length), index(position)
        resolved = KVMove(target_length, position, axis, pad_value=move.pad_value, dtype=dtype)
        if out is not None:
            _check_out(out, source, resolved, is_exact=move.dtype is not None)
        return _move_with_torch(source, resolved, out)
    detached = source.detach().resolve_conj().resolve_neg()
    target = result_dtype(name_of(dtype), out)
    if converts(name_of(source.dtype), target):
        detached = _convert_tokens(detached[along(axis, None, position)], target)
    if move.dtype is not None:
        move = move._replace(dtype=name_of(dtype))
    if out is None:
        return torch.from_numpy(_core.kv_move(detached, move, None)).view(dtype)
    return write_into(out, lambda target: _core.kv_move(detached, move, target))
