"""Moving a KV cache to another sequence length; public through `mlstate.kv`."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._common.arrays import is_torch, write_into
from .._common.backend import backend_of
from .._common.set_module import set_module
from .._common.text import names_hint
from ..errors import CapacityError, CompatibilityError
from ._integer_conversion import in_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._types import Array, ArrayT, DType


def _move(
    source: Any,
    target_seq_length: int,
    position: int | None,
    pad_value: float,
    dtype: Any,
    out: Any,
    low_memory: bool,
    compact: bool,
) -> Any:
    """Hand a transition to the core, or to torch where the core must not touch the data."""
    low_memory = bool(low_memory)  # the core takes nothing but True and False
    if isinstance(source, np.ndarray) and (dtype is not None or out is not None):
        source, position = in_range(source, target_seq_length, position, dtype, out, compact)
    if is_torch(source):
        return backend_of(source).move_kv(
            source, target_seq_length, position, pad_value, dtype, out, low_memory, compact
        )
    if not isinstance(source, np.ndarray):
        raise TypeError(
            f"source_state must be a NumPy array or a torch tensor, got {type(source).__name__}"
        )

    def run(target: Any) -> Any:
        return _core.kv_move(
            source, target_seq_length, position, pad_value, dtype, target, low_memory, compact
        )

    return run(None) if out is None else write_into(out, run)


@set_module("mlstate.kv")
def transition_kv_state(
    source_state: ArrayT,
    target_seq_length: int,
    current_position: int | None = None,
    pad_value: float = 0.0,
    dtype: DType | None = None,
    *,
    out: Array | None = None,
    low_memory: bool = False,
) -> ArrayT:
    """Move a KV cache to a longer sequence: copy the tokens, pad the rest.

    Parameters
    ----------
    source_state : ndarray or torch.Tensor, shape (layers, heads, source_seq, head_dim)
        The cache. Any strides, read-only or in the other byte order; NumPy and ml_dtypes
        dtypes, torch tensors on any device.
    target_seq_length : int
        Positions of the result, at least `source_seq`.
    current_position : int, optional
        Tokens in the cache; what lies beyond them is dropped. Default: all of `source_seq`.
    pad_value : float
        What positions without a token hold.
    dtype : dtype, optional
        Of the result; default that of `source_state`. float16, bfloat16, float32 and
        float64 convert into one another, fused with the copy, rounded to nearest even
        (float16 as NumPy does, bfloat16 as torch does). Integers convert into floats and
        other integers; floats convert into integers, truncated toward zero.
    out : ndarray or torch.Tensor, optional
        Preallocated result of shape (layers, heads, target_seq_length, head_dim), of either
        kind and any convertible dtype. Must not share memory with `source_state`.
    low_memory : bool
        Decline huge pages for a fresh NumPy result of 32 MiB and more, so that padding with
        zeros occupies no memory until it is written; see Notes for the price.

    Returns
    -------
    ndarray or torch.Tensor
        `out` if given, else a new array of the kind of `source_state`, on its device and in
        its autograd graph. `source_state` itself if there is nothing to do: same length,
        every position in use, no `dtype`, no `out`.

    Raises
    ------
    CapacityError
        If `target_seq_length` is smaller than the source or asks for more than an address
        space, or `current_position` lies outside the source. A ValueError.
    CompatibilityError
        If `source_state` has not four dimensions, `out` has another shape, or a dtype is
        unsupported. A ValueError.
    ValueError
        If `out` is read-only, shares memory with `source_state` or is part of an autograd
        graph, or `pad_value` does not fit the dtype. If a token is NaN or out of range in a
        conversion from or to integers; nothing is written then.
    TypeError
        If `source_state` is neither a NumPy array nor a torch tensor, or a length is no
        integer.
    MemoryError
        If the system refuses the memory of the result.

    Notes
    -----
    One pass over the result, which is also the peak of extra memory (nothing with `out`).
    Conversions from and to integers check the tokens first, and need their memory twice more.
    The GIL is released for results of 64 KiB and more. A fresh zero-padded result of
    32 MiB and more is made of pages that the system zeroes on first use: with huge pages
    (the default, as NumPy asks for them) a page mostly holds some tokens, so nearly all of
    the result is resident at once; with ``low_memory=True`` only the tokens are. That is
    faster where most of the result is padding, and up to twice as slow where it is nearly
    full of tokens.

    References
    ----------
    The names and semantics are those of ``anemll.utils.state_transition``, except that a
    negative position is an error and that `dtype` is honoured for equal lengths too.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.kv import transition_kv_state
    >>> small = np.ones((36, 1, 256, 64), np.float16)
    >>> large = transition_kv_state(small, 512, current_position=200)
    >>> large.shape, bool(large[:, :, :200].all()), bool(large[:, :, 200:].any())
    ((36, 1, 512, 64), True, False)
    """
    result: ArrayT = _move(
        source_state,
        target_seq_length,
        current_position,
        pad_value,
        dtype,
        out,
        low_memory,
        False,
    )
    return result


@set_module("mlstate.kv")
def compact_kv_state(
    source_state: ArrayT,
    target_seq_length: int,
    current_position: int,
    dtype: DType | None = None,
    *,
    out: Array | None = None,
    low_memory: bool = False,
) -> ArrayT:
    """Move a KV cache to a shorter sequence that its tokens fit into.

    Parameters
    ----------
    source_state : ndarray or torch.Tensor, shape (layers, heads, source_seq, head_dim)
        As for `transition_kv_state`.
    target_seq_length : int
        Positions of the result, at least `current_position`.
    current_position : int
        Tokens in the cache.
    dtype, out, low_memory
        As for `transition_kv_state`.

    Returns
    -------
    ndarray or torch.Tensor
        `out` if given, else always a new array; positions without a token hold zeros.

    Raises
    ------
    CapacityError
        If the tokens do not fit, or `current_position` lies outside the source. A
        ValueError.
    CompatibilityError, ValueError, TypeError, MemoryError
        As for `transition_kv_state`.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.kv import compact_kv_state
    >>> large = np.ones((36, 1, 512, 64), np.float16)
    >>> compact_kv_state(large, 256, current_position=200).shape
    (36, 1, 256, 64)
    >>> compact_kv_state(large, 256, current_position=300)
    Traceback (most recent call last):
    mlstate.errors.CapacityError: 300 tokens do not fit into 256 positions: pass a \
target_seq_length of at least 300
    """
    result: ArrayT = _move(
        source_state, target_seq_length, current_position, 0.0, dtype, out, low_memory, True
    )
    return result


@set_module("mlstate.kv")
def validate_state_shapes(
    source_state_shape: Sequence[int] | Mapping[str, Sequence[int]],
    target_state_shape: Sequence[int] | Mapping[str, Sequence[int]],
) -> bool:
    """Check that a cache of one shape can expand into another.

    Parameters
    ----------
    source_state_shape, target_state_shape : sequence of int, or mapping
        (layers, heads, sequence, head_dim). Or both by name: each of the source's states is
        compared with the target's of the same name.

    Returns
    -------
    bool
        Always True.

    Raises
    ------
    CompatibilityError
        If either has not four dimensions, or layers, heads or head_dim differ, or the target
        has no state of a name. A ValueError.
    TypeError
        If only one of the two is a mapping.
    CapacityError
        If the target's sequence is shorter. A ValueError.

    Examples
    --------
    >>> from mlstate.kv import validate_state_shapes
    >>> validate_state_shapes((36, 1, 256, 256), (36, 1, 512, 256))
    True
    """
    if not isinstance(source_state_shape, Mapping) and not isinstance(target_state_shape, Mapping):
        _core.kv_check_shapes(source_state_shape, target_state_shape, False)
        return True
    if not isinstance(source_state_shape, Mapping) or not isinstance(target_state_shape, Mapping):
        raise TypeError(
            "give two shapes, or two mappings of names to shapes, not one of each: got "
            f"{type(source_state_shape).__name__} and {type(target_state_shape).__name__}"
        )
    for name, shape in source_state_shape.items():
        _check_named(name, shape, target_state_shape)
    return True


def _check_named(name: str, source: Any, targets: Mapping[str, Any]) -> None:
    if name not in targets:
        hint = names_hint(name, targets)
        error = CompatibilityError(f"{name}: the target has no such state{hint}")
        error.name = name
        raise error
    target = targets[name]
    try:
        _core.kv_check_shapes(
            getattr(source, "shape", source), getattr(target, "shape", target), False
        )
    except (CompatibilityError, CapacityError) as error:
        error.args = (f"{name}: {error}",)
        error.name = name
        raise


@set_module("mlstate.kv")
def get_transition_info(
    source_seq_length: int, target_seq_length: int, current_position: int
) -> dict[str, int | float]:
    """Describe a transition in numbers.

    Parameters
    ----------
    source_seq_length, target_seq_length : int
        Positions of the two caches.
    current_position : int
        Tokens in the source.

    Returns
    -------
    dict
        source_seq_length, target_seq_length, current_position, valid_tokens,
        padded_positions_source, padded_positions_target, expansion_factor,
        additional_capacity, in this order. Negative entries mean that the tokens do not fit.

    Raises
    ------
    ValueError
        If `source_seq_length` is 0: there is nothing to expand by a factor.
    TypeError
        If an argument is no integer.

    Examples
    --------
    >>> from mlstate.kv import get_transition_info
    >>> get_transition_info(256, 512, 200)["padded_positions_target"]
    312
    """
    # Python's own integers: those of NumPy wrap, and json does not take them.
    source_seq_length, target_seq_length = index(source_seq_length), index(target_seq_length)
    current_position = index(current_position)
    if source_seq_length == 0:
        raise ValueError("source_seq_length is 0: there is nothing to expand by a factor")
    return {
        "source_seq_length": source_seq_length,
        "target_seq_length": target_seq_length,
        "current_position": current_position,
        "valid_tokens": current_position,
        "padded_positions_source": source_seq_length - current_position,
        "padded_positions_target": target_seq_length - current_position,
        "expansion_factor": target_seq_length / source_seq_length,
        "additional_capacity": target_seq_length - source_seq_length,
    }
