"""`transition_kv_state`, `compact_kv_state`: copy one cache array to another length."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .. import _core
from .._common.arguments import check_flags
from .._common.arrays import is_torch, refuse_masked, write_into
from .._common.backend import backend_of
from .._common.text import names_hint
from ..errors import CompatibilityError, MLStateError
from ._arguments import as_integer
from ._integer_conversion import convert_source
from ._move import KVBackend, KVMove

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .._types import Array, DType, NDArray, TensorT


def _run_move(source: Array, move: KVMove, out: Any) -> Any:
    """Return `source` moved according to `move`, by the core, or by torch for a torch tensor.

    `out`: array or tensor for the result, which is returned then; None: a new one.
    """
    if not isinstance(move.low_memory, int):  # 0 and 1 are accepted too
        check_flags(low_memory=move.low_memory)
    refuse_masked("source_state", source)
    refuse_masked("out", out)
    if not isinstance(source, np.ndarray):
        if is_torch(source):
            return backend_of(source, KVBackend).move_kv(source, move, out)
        raise TypeError(
            f"source_state must be a NumPy array or a torch tensor, got {type(source).__name__}"
        )
    if move.dtype is not None or out is not None:
        source = convert_source(source, move, out)
    if out is None or isinstance(out, np.ndarray):
        return _core.kv_move(source, move, out)
    return write_into(out, lambda target: _core.kv_move(source, move, target))


@overload
def transition_kv_state(
    source_state: NDArray,
    target_seq_length: int,
    current_position: int | None = ...,
    pad_value: float = ...,
    dtype: DType | None = ...,
    *,
    out: Array | None = ...,
    low_memory: bool = ...,
    seq_axis: int = ...,
) -> NDArray: ...


@overload
def transition_kv_state(
    source_state: TensorT,
    target_seq_length: int,
    current_position: int | None = ...,
    pad_value: float = ...,
    dtype: DType | None = ...,
    *,
    out: Array | None = ...,
    low_memory: bool = ...,
    seq_axis: int = ...,
) -> TensorT: ...


def transition_kv_state(
    source_state: Array,
    target_seq_length: int,
    current_position: int | None = None,
    pad_value: float = 0.0,
    dtype: DType | None = None,
    *,
    out: Array | None = None,
    low_memory: bool = False,
    seq_axis: int = -2,
) -> Any:
    """Move a KV cache to a longer sequence: copy the tokens, pad the other positions.

    Parameters
    ----------
    source_state : ndarray or torch.Tensor, shape (layers, heads, source_seq, head_dim)
        The cache, with any strides and byte order, read-only or not; dtypes of NumPy and
        ml_dtypes, or torch tensors on any device. With `seq_axis`, any other layout of 2 to 8
        dimensions.
    target_seq_length : int
        Positions of the result, at least `source_seq`.
    current_position : int, optional
        Number of tokens in the cache; later positions are dropped. Default: `source_seq`.
    pad_value : float
        Value of positions without a token.
    dtype : dtype, optional
        Dtype of the result. Default: that of `source_state`. float16, bfloat16, float32 and
        float64 convert into one another during the copy, rounded to nearest even (float16 as
        in NumPy, bfloat16 as in torch). Integers convert to floats and other integers; floats
        convert to integers, truncated toward zero.
    out : ndarray or torch.Tensor, optional
        Preallocated result, a NumPy array or torch tensor of any convertible dtype. It has
        the shape of `source_state` with `target_seq_length` positions. It must not share
        memory with `source_state`.
    low_memory : bool
        Disable huge pages for a new NumPy result of at least 32 MiB, so that zero padding
        takes no memory until it is written. See Notes for the cost.
    seq_axis : int
        The axis of the sequence; a negative number counts from the last axis. Default: the axis
        before the last one.

    Returns
    -------
    ndarray or torch.Tensor
        `out` if given, else a new array of the same library as `source_state`, on its device
        and in its autograd graph. `source_state` itself if nothing changes: same length, every
        position in use, no `dtype`, no `out`.

    Raises
    ------
    CapacityError
        `target_seq_length` is smaller than the source or exceeds the address space, or
        `current_position` is outside the source. A ValueError.
    CompatibilityError
        `source_state` does not have 2 to 8 dimensions, has no axis `seq_axis`, `out` has another
        shape, or a dtype is unsupported. A ValueError.
    ValueError
        `out` is read-only, shares memory with `source_state`, has elements that share memory
        with one another, or belongs to an autograd graph, or `pad_value` does not fit the dtype.
        Also if a token is NaN or out of range in a conversion from or to integers; nothing is
        written then.
    TypeError
        `source_state` is neither a NumPy array nor a torch tensor, an array is masked, a tensor is
        sparse, nested or quantized, or a length or `seq_axis` is not an integer.
    MemoryError
        The memory of the result cannot be allocated.

    Notes
    -----
    The result is written in one pass. Extra memory: the size of the result (none with `out`).
    Conversions from and to integers first check the tokens, and need twice the tokens' memory
    in addition. The GIL is released for results of at least 64 KiB.

    A new zero-padded result of at least 32 MiB consists of pages that the system zeroes on
    first use. With huge pages (the default, as NumPy requests them) most pages contain some
    tokens, so nearly all of the result is resident at once. With ``low_memory=True`` only the
    tokens are. This is faster if most of the result is padding, and up to twice as slow if the
    result is nearly full of tokens.

    References
    ----------
    Names and semantics are those of ``anemll.utils.state_transition``, except that a negative
    position raises and that `dtype` is also honoured for equal lengths.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.kv import transition_kv_state
    >>> small = np.ones((36, 1, 256, 64), np.float16)
    >>> large = transition_kv_state(small, 512, current_position=200)
    >>> large.shape, bool(large[:, :, :200].all()), bool(large[:, :, 200:].any())
    ((36, 1, 512, 64), True, False)

    A layout with the sequence innermost, (layers, batch, heads * head_dim, 1, sequence):

    >>> small = np.ones((4, 1, 64, 1, 256), np.float16)
    >>> transition_kv_state(small, 512, current_position=200, seq_axis=-1).shape
    (4, 1, 64, 1, 512)
    """
    move = KVMove(
        target_seq_length,
        current_position,
        seq_axis,
        compact=False,
        pad_value=pad_value,
        dtype=dtype,
        low_memory=low_memory,
    )
    return _run_move(source_state, move, out)


@overload
def compact_kv_state(
    source_state: NDArray,
    target_seq_length: int,
    current_position: int,
    dtype: DType | None = ...,
    *,
    out: Array | None = ...,
    low_memory: bool = ...,
    seq_axis: int = ...,
) -> NDArray: ...


@overload
def compact_kv_state(
    source_state: TensorT,
    target_seq_length: int,
    current_position: int,
    dtype: DType | None = ...,
    *,
    out: Array | None = ...,
    low_memory: bool = ...,
    seq_axis: int = ...,
) -> TensorT: ...


def compact_kv_state(
    source_state: Array,
    target_seq_length: int,
    current_position: int,
    dtype: DType | None = None,
    *,
    out: Array | None = None,
    low_memory: bool = False,
    seq_axis: int = -2,
) -> Any:
    """Move a KV cache to a shorter sequence that can hold its tokens.

    Parameters
    ----------
    source_state : ndarray or torch.Tensor, shape (layers, heads, source_seq, head_dim)
        As for `transition_kv_state`.
    target_seq_length : int
        Positions of the result, at least `current_position`.
    current_position : int
        Number of tokens in the cache.
    dtype, out, low_memory, seq_axis
        As for `transition_kv_state`.

    Returns
    -------
    ndarray or torch.Tensor
        `out` if given, else always a new array; positions without a token are zero.

    Raises
    ------
    CapacityError
        The tokens do not fit, or `current_position` is outside the source. A ValueError.
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
    >>> innermost = np.ones((4, 1, 64, 1, 512), np.float16)
    >>> compact_kv_state(innermost, 256, current_position=200, seq_axis=-1).shape
    (4, 1, 64, 1, 256)
    """
    move = KVMove(
        target_seq_length,
        current_position,
        seq_axis,
        compact=True,
        dtype=dtype,
        low_memory=low_memory,
    )
    return _run_move(source_state, move, out)


def validate_state_shapes(
    source_state_shape: Sequence[int] | Mapping[str, Sequence[int]],
    target_state_shape: Sequence[int] | Mapping[str, Sequence[int]],
    *,
    seq_axis: int = -2,
) -> bool:
    """Check that a cache of one shape can be expanded to another.

    Parameters
    ----------
    source_state_shape, target_state_shape : sequence of int, or mapping
        (layers, heads, sequence, head_dim), or 2 to 8 dimensions with the sequence at
        `seq_axis`. Or two mappings of names to shapes: each state of the source is compared
        with the target's state of the same name.
    seq_axis : int
        As for `transition_kv_state`.

    Returns
    -------
    bool
        Always True.

    Raises
    ------
    CompatibilityError
        A shape does not have 2 to 8 dimensions, or has no axis `seq_axis`; the shapes differ in
        rank or in another axis than the sequence; or the target lacks a state of the source. A
        ValueError.
    TypeError
        Only one of the two is a mapping, or `seq_axis` is not an integer.
    CapacityError
        The target's sequence is shorter. A ValueError.

    Examples
    --------
    >>> from mlstate.kv import validate_state_shapes
    >>> validate_state_shapes((36, 1, 256, 256), (36, 1, 512, 256))
    True
    >>> validate_state_shapes((36, 1, 64, 1, 256), (36, 1, 64, 1, 512), seq_axis=-1)
    True
    """
    if not isinstance(source_state_shape, Mapping) and not isinstance(target_state_shape, Mapping):
        _core.kv_check_shapes(source_state_shape, target_state_shape, seq_axis)
        return True
    if not isinstance(source_state_shape, Mapping) or not isinstance(target_state_shape, Mapping):
        raise TypeError(
            "give two shapes, or two mappings of names to shapes, not one of each: got "
            f"{type(source_state_shape).__name__} and {type(target_state_shape).__name__}"
        )
    for name, shape in source_state_shape.items():
        if name not in target_state_shape:
            hint = names_hint(name, target_state_shape)
            raise CompatibilityError(f"{name}: the target has no such state{hint}", name=name)
        target = target_state_shape[name]
        with name_errors(name):
            _core.kv_check_shapes(
                getattr(shape, "shape", shape), getattr(target, "shape", target), seq_axis
            )
    return True


@contextmanager
def name_errors(name: str) -> Iterator[None]:
    """Put the name of a state before the text of a ValueError that the block raises.

    An `MLStateError` also gets it as its attribute `name`.
    """
    try:
        yield
    except ValueError as error:
        error.args = (f"{name}: {error}",)
        if isinstance(error, MLStateError):
            error.name = name
        raise


def get_transition_info(
    source_seq_length: int, target_seq_length: int, current_position: int
) -> dict[str, int | float]:
    """Return the sizes of a transition.

    Parameters
    ----------
    source_seq_length, target_seq_length : int
        Positions of the two caches.
    current_position : int
        Number of tokens in the source.

    Returns
    -------
    dict
        source_seq_length, target_seq_length, current_position, valid_tokens,
        padded_positions_source, padded_positions_target, expansion_factor,
        additional_capacity, in this order. Negative entries mean that the tokens do not fit.

    Raises
    ------
    ValueError
        `source_seq_length` is 0, so the expansion factor is undefined.
    TypeError
        An argument is not an integer.

    Examples
    --------
    >>> from mlstate.kv import get_transition_info
    >>> get_transition_info(256, 512, 200)["padded_positions_target"]
    312
    """
    # Convert to Python integers: NumPy's overflow, and json does not support them.
    source_seq_length = as_integer("source_seq_length", source_seq_length)
    target_seq_length = as_integer("target_seq_length", target_seq_length)
    current_position = as_integer("current_position", current_position)
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
