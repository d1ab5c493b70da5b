"""Attention masks, for decoding, prefill, windows and sinks: arguments, fill value and dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._common.arrays import write_into
from ._arguments import as_integer, capacity_error

if TYPE_CHECKING:
    from .._types import Array, DType, NDArray

_MINUS_INFINITY = float("-inf")


def _mask(
    seq_length: int,
    attention_size: int,
    position: int,
    sinks: int,
    rows: tuple[int, int] | bool | None,
    dtype: DType,
    fill: float,
    out: Any,
) -> Any:
    """Return an attention mask made by the core, written into `out` unless it is None.

    `rows`: the first row and the row after the last; None: all; True: only the row of `position`.
    `fill`: value of masked elements. The others are as for `create_attention_size_mask`.
    """

    def run(target: Any) -> Any:  # target: a NumPy array to write into, or None
        return _core.kv_mask(seq_length, attention_size, position, sinks, rows, dtype, fill, target)

    return run(None) if out is None else write_into(out, run)


def create_attention_size_mask(
    seq_length: int,
    attention_size: int,
    current_position: int,
    *,
    sinks: int = 0,
    rows: tuple[int, int] | None = None,
    dtype: DType = np.float16,
    fill: float = _MINUS_INFINITY,
    out: Array | None = None,
) -> Any:
    """Create the mask that limits attention to a number of earlier tokens.

    Row ``i`` is 0 at columns ``max(0, i - attention_size) .. i`` and at the columns below `sinks`
    up to ``i``. It is `fill` elsewhere.

    Parameters
    ----------
    seq_length : int
        Columns, and rows unless `rows` is given.
    attention_size : int
        Number of earlier tokens that each token attends to, in addition to itself. So a full
        row has ``attention_size + 1`` zeros, as in the formula of the reference. For a sliding
        window of ``w`` tokens that includes the token itself, pass ``w - 1``.
    current_position : int
        Must be in ``0..seq_length``; the mask does not depend on it. `create_decode_mask`
        returns the row of one position.
    sinks : int
        Number of first tokens that every later token attends to, in addition to its window
        (attention sinks).
    rows : (int, int), optional
        First row and the row after the last one: the positions of the tokens of a prefill
        batch, such as an item of `LadderStep.batches`. Default: all rows.
    dtype : dtype
        float16, bfloat16, float32 or float64.
    fill : float
        Minus infinity, or a finite minimum such as ``-65504.0`` for hardware that converts
        infinities to NaN.
    out : ndarray or torch.Tensor, optional
        Result to write into; its dtype is used.

    Returns
    -------
    ndarray or torch.Tensor, shape (1, 1, seq_length, seq_length)
        `out` if given, else a new array. With `rows`, the shape is
        ``(1, 1, stop - start, seq_length)``, and only these rows take memory and time.

    Raises
    ------
    CapacityError
        A number is negative, the position is outside ``0..seq_length``, or `rows` are outside
        of it or stop before they start.
    CompatibilityError
        `out` has another shape, or the dtype is not a float.
    TypeError
        `rows` is not a pair, or a number is not an integer.
    ValueError
        `fill` is finite but outside the dtype's range, or `out` is read-only.

    See Also
    --------
    create_causal_mask : a mask without sinks as a view that takes O(seq_length) memory.

    References
    ----------
    ANEMLL's "State Transition Experiments", implementation approach of experiment 2. Xiao et al.,
    "Efficient Streaming Language Models with Attention Sinks", ICLR 2024.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.kv import create_attention_size_mask
    >>> create_attention_size_mask(4, 1, 0, dtype=np.float32)[0, 0]
    array([[  0., -inf, -inf, -inf],
           [  0.,   0., -inf, -inf],
           [-inf,   0.,   0., -inf],
           [-inf, -inf,   0.,   0.]], dtype=float32)

    The rows of a batch of two tokens, with one sink:

    >>> create_attention_size_mask(6, 1, 0, sinks=1, rows=(3, 5), dtype=np.float32)[0, 0]
    array([[  0., -inf,   0.,   0., -inf, -inf],
           [  0., -inf, -inf,   0.,   0., -inf]], dtype=float32)
    """
    pair = None if rows is None else _as_pair(rows)
    return _mask(seq_length, attention_size, current_position, sinks, pair, dtype, fill, out)


def _as_pair(rows: object) -> tuple[int, int]:
    """Return `rows` as a tuple; raise TypeError unless it is a pair. The core checks its items."""
    if not isinstance(rows, tuple | list) or len(rows) != 2:
        raise TypeError(f"rows must be a pair (start, stop), got {rows!r}")
    return rows[0], rows[1]


def create_decode_mask(
    seq_length: int,
    attention_size: int,
    current_position: int,
    *,
    sinks: int = 0,
    dtype: DType = np.float16,
    fill: float = _MINUS_INFINITY,
    out: Array | None = None,
) -> Any:
    """Create the mask row of one token, for token-by-token generation.

    Parameters
    ----------
    seq_length, attention_size, sinks, dtype, fill
        As for `create_attention_size_mask`.
    current_position : int
        Position of the token and index of the row, in ``0..seq_length - 1``.
    out : ndarray or torch.Tensor, optional
        Result to write into, of shape (1, 1, 1, seq_length).

    Returns
    -------
    ndarray or torch.Tensor, shape (1, 1, 1, seq_length)
        `out` if given, else a new array.

    Raises
    ------
    CapacityError
        A number is negative, or the position is outside ``0..seq_length - 1``.
    CompatibilityError, TypeError, ValueError
        As for `create_attention_size_mask`.

    Examples
    --------
    >>> from mlstate.kv import create_decode_mask
    >>> create_decode_mask(6, 2, 4, dtype="float32").tolist()
    [[[[-inf, -inf, 0.0, 0.0, 0.0, -inf]]]]
    >>> create_decode_mask(6, 2, 4, sinks=1, dtype="float32").tolist()
    [[[[0.0, -inf, 0.0, 0.0, 0.0, -inf]]]]
    """
    seq_length = as_integer("seq_length", seq_length)
    current_position = as_integer("current_position", current_position)
    if current_position == seq_length:
        text = (
            f"current_position {current_position} has no row: a mask of seq_length {seq_length} "
            f"has the rows of the positions below {seq_length}"
        )
        raise capacity_error(text, f"below {seq_length}", current_position)
    return _mask(
        seq_length,
        attention_size,
        current_position,
        sinks,
        rows=True,
        dtype=dtype,
        fill=fill,
        out=out,
    )


def create_causal_mask(
    seq_length: int,
    attention_size: int | None = None,
    *,
    dtype: DType = np.float16,
    fill: float = _MINUS_INFINITY,
) -> NDArray:
    """Create a causal mask as a strided view over the memory of one row.

    Every row is the previous row shifted by one column, so the rows can overlap in memory:
    ``2 * seq_length - 1`` elements represent ``seq_length ** 2``.

    Parameters
    ----------
    seq_length : int
        Rows and columns.
    attention_size : int, optional
        As for `create_attention_size_mask`. Default: each token attends to all earlier ones.
        Sinks have no such view, because their columns do not shift with the rows.
    dtype, fill
        As for `create_attention_size_mask`.

    Returns
    -------
    ndarray, shape (1, 1, seq_length, seq_length)
        A read-only view with overlapping rows. Use ``np.ascontiguousarray`` for consumers that
        need the full matrix.

    Raises
    ------
    CapacityError, CompatibilityError, TypeError, ValueError
        As for `create_attention_size_mask`.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.kv import create_attention_size_mask, create_causal_mask
    >>> mask = create_causal_mask(4096)
    >>> low, high = np.lib.array_utils.byte_bounds(mask)
    >>> mask.nbytes, high - low
    (33554432, 16382)
    >>> np.array_equal(create_causal_mask(9, 3), create_attention_size_mask(9, 3, 0))
    True
    """
    # NumPy's small integers would overflow below
    seq_length = as_integer("seq_length", seq_length)
    reach = seq_length if attention_size is None else attention_size
    # Row `seq_length - 1` of a mask of width `2 * seq_length - 1`: it contains the last row of
    # this mask, and the shifted columns that the other rows show.
    last = max(seq_length - 1, 0)
    width = seq_length + last if seq_length != 0 else 1
    row = _mask(width, reach, last, sinks=0, rows=True, dtype=dtype, fill=fill, out=None)
    item = row.itemsize  # each row starts one element earlier than the one above it
    return np.lib.stride_tricks.as_strided(
        row[0, 0, 0, last:], (1, 1, seq_length, seq_length), (0, 0, -item, item), writeable=False
    )
