"""`rotate_keys`: arguments of keys with RoPE at other positions: `scaling`, `interleaved`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._common.arguments import check_flags
from .._common.arrays import refuse_masked, write_into

if TYPE_CHECKING:
    from .._types import Array, NDArray


def rotate_keys(
    keys: Array,
    shift: int | Array,
    *,
    base: float = 10000.0,
    scaling: float = 1.0,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    seq_axis: int = -2,
    out: Array | None = None,
) -> Any:
    """Move keys with rotary position embeddings (RoPE) to other positions.

    A key that was rotated for position ``p`` is rotated for ``p + shift`` afterwards, without the
    key before RoPE. Pair ``i`` turns by ``shift * base ** (-2 * i / rotary_dim) / scaling``.

    Parameters
    ----------
    keys : ndarray or torch.Tensor
        2 to 8 dimensions, float16, bfloat16, float32 or float64. The last axis is the head
        dimension; only keys rotate, values do not.
    shift : int or array of int, shape (sequence,)
        Difference of positions, new minus old; one for all positions or one for each.
    base : float
        Base of the angles (``rope_theta``).
    scaling : float
        Linear position interpolation: angles are divided by it.
    interleaved : bool
        If true, pair ``i`` is elements ``2 * i`` and ``2 * i + 1`` (GPT-J); if false, ``i`` and
        ``i + rotary_dim / 2`` (GPT-NeoX, Llama in transformers).
    rotary_dim : int, optional
        Even number of elements that rotate, from the first on; at most 4096. The others are copied.
        Default: the head dimension.
    seq_axis : int
        The sequence axis, not the last one.
    out : ndarray or torch.Tensor, optional
        Result to write into, of the same shape and dtype. `keys` itself rotates in place.

    Returns
    -------
    ndarray or torch.Tensor
        `out` if given, else a new ndarray.

    Raises
    ------
    CompatibilityError
        The rank, `seq_axis`, the dtype, the number of shifts, or shape or dtype of `out` do not
        fit. A ValueError.
    ValueError
        `base` or `scaling` is not finite and positive, `rotary_dim` is odd or too large, `out` is
        read-only, or it shares memory with `keys` without being the same view.
    TypeError
        `shift` does not consist of integers, or `keys` is not a NumPy array and `out` is missing.

    Notes
    -----
    Angles, sines and cosines are computed in double, products and sums in float32 (float64 for
    float64), and the result is rounded once. Sines come from the C library, so results of different
    systems may differ in the last bit.

    The maximum absolute error against keys that are rotated for the new position from the start, in
    the same dtype with angles in double, relative to the length ``r = sqrt(x**2 + y**2)`` of the
    pair, for positions up to 131,072:

    ========  ===============
    float16   1.5e-3 r + 1e-7
    bfloat16  1.2e-2 r
    float32   6e-7 r
    float64   4e-11 r
    ========  ===============

    Every further call adds about a third of it, so shift from the original keys if they exist. A
    model that computes angles in float32 adds its own error.

    The function is correct only for angles that are proportional to one position. Other schemes
    cannot be expressed by its parameters and must not use it: multi-dimensional positions (M-RoPE),
    frequencies scaled individually (YaRN, Llama 3, dynamic NTK) and compressed keys (MLA).
    Recurrent states have no positions to shift.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.kv import RollingKVState, rotate_keys
    >>> state = RollingKVState((1, 1, 8, 4), dtype=np.float32, sinks=2)
    >>> state.append(np.ones((1, 1, 11, 4), np.float32))
    >>> held = np.sort(state.positions())
    >>> held
    array([ 0,  1,  5,  6,  7,  8,  9, 10])
    >>> keys = rotate_keys(state.ordered(), np.arange(8) - held)  # now at 0 .. 7
    >>> keys[0, 0, 2].round(2)
    array([-0.85,  1.03, -1.13,  0.97], dtype=float32)
    """
    check_flags(interleaved=interleaved)
    refuse_masked("keys", keys)
    refuse_masked("shift", shift)
    shifts = _int64_array(shift)
    if out is None:
        if not isinstance(keys, np.ndarray):
            raise TypeError(
                f"keys is not a NumPy array but {type(keys).__name__}: pass out=, which may be "
                "keys itself"
            )
        out = np.empty_like(keys, subok=False)

    def run(target: Any) -> Any:  # target: an array that the core can write, of `out`
        return _core.rotate_keys(
            keys, shifts, base, scaling, bool(interleaved), rotary_dim, seq_axis, target
        )

    return write_into(out, run)


def _int64_array(shift: object) -> NDArray:
    """Return `shift`, of `rotate_keys`, as a contiguous vector of int64; a number has one element.

    Raises TypeError unless it is an integer, or a one-dimensional array of integers, that fits.
    """
    shifts = np.asarray(shift)
    fits = shifts.dtype.kind in "iu" and (
        shifts.dtype != np.uint64 or not shifts.size or int(shifts.max()) < 2**63
    )
    if not fits or shifts.ndim > 1:
        raise TypeError(
            "shift must be an integer of at most 64 bits or a one-dimensional array of them, got "
            f"{shifts.dtype} with {shifts.ndim} dimensions"
        )
    return np.ascontiguousarray(shifts, np.int64).reshape(-1)
