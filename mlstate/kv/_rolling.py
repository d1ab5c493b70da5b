"""`RollingKVState`: one cache array that evicts its oldest tokens and keeps sinks."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from .. import _core
from .._common.arrays import refuse_masked
from .._common.dtypes import label_of
from ._copies import CopiedByValue, attributes_of, set_attributes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._types import Array, DType, NDArray, NumpyDType


class RollingKVState(CopiedByValue):
    """A KV cache of fixed size that evicts its oldest tokens (sliding window with sinks).

    Parameters
    ----------
    shape : sequence of 2 to 8 int
        Shape of the cache, such as (layers, heads, sequence, head_dim).
    capacity : int, optional
        Positions that the cache holds, sinks included. Default: the sequence length of `shape`,
        which is not used otherwise.
    dtype : dtype
        Any dtype of NumPy or ml_dtypes that the core supports.
    sinks : int
        Number of first positions that are never evicted (attention sinks), below the capacity.
    seq_axis : int
        The sequence axis of `shape`; negative values count from the end.

    Raises
    ------
    TypeError
        `shape` is not a sequence of integers, another number is not an integer, or `dtype` is not a
        dtype.
    CapacityError
        `capacity` is below 1, or `sinks` is negative or not below the capacity. A ValueError.
    CompatibilityError
        `shape` does not have 2 to 8 dimensions, `seq_axis` is not one of its axes, or `dtype` is
        unsupported. A ValueError.
    MemoryError
        The memory cannot be allocated.

    Notes
    -----
    The cache starts empty. The token at position ``p`` is stored in slot ``p`` while ``p`` is below
    `sinks`, and otherwise in slot ``sinks + (p - sinks) % (capacity - sinks)``. A slot without a
    token is zero. Appending a token copies its rows and moves nothing else, at any capacity.
    Slots that were never written take no physical memory. The class is thread-safe: calls from
    several threads run one after another. Arrays from `array` stay valid as long as they exist, and
    show the current memory. `copy.copy`, `copy.deepcopy` and pickle copy slots and positions.

    References
    ----------
    Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.kv import RollingKVState
    >>> state = RollingKVState((1, 1, 4, 1), dtype=np.float32, sinks=1)
    >>> state.append(np.arange(6, dtype=np.float32).reshape(1, 1, 6, 1))
    >>> state.array.ravel(), state.positions()
    (array([0., 4., 5., 3.], dtype=float32), array([0, 4, 5, 3]))
    >>> state.ordered().ravel(), state.evicted
    (array([0., 3., 4., 5.], dtype=float32), 2)
    """

    __slots__ = ("_buffer",)

    def __init__(
        self,
        shape: Sequence[int],
        capacity: int | None = None,
        dtype: DType = np.float16,
        *,
        sinks: int = 0,
        seq_axis: int = -2,
    ) -> None:
        """Allocate an empty ring of `capacity` positions (see the class)."""
        self._buffer = _core.RollingBuffer(shape, capacity, dtype, seq_axis, sinks)

    @property
    def array(self) -> NDArray:
        """All slots in storage order: a writable, contiguous view with shape `shape`."""
        return self._buffer.view()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `array`: the sequence axis has `capacity` slots."""
        shape: tuple[int, ...] = self.array.shape
        return shape

    @property
    def capacity(self) -> int:
        """Number of slots, sinks included."""
        return self._buffer.extent()[0]

    @property
    def sinks(self) -> int:
        """Number of first positions that are never evicted."""
        return self._buffer.extent()[1]

    @property
    def seq_axis(self) -> int:
        """The sequence axis, counted from the first axis."""
        return self._buffer.extent()[2]

    @property
    def dtype(self) -> NumpyDType:
        """Dtype of the elements."""
        return self._buffer.dtype

    @property
    def length(self) -> int:
        """Number of tokens held, at most `capacity`."""
        return self._buffer.counts()[0]

    @property
    def evicted(self) -> int:
        """Number of tokens evicted so far. Tokens that `trim` drops do not count."""
        return self._buffer.counts()[1]

    @property
    def next_position(self) -> int:
        """Position of the next token appended."""
        return self._buffer.counts()[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots; only written pages take physical memory."""
        size: int = self.array.nbytes
        return size

    def append(self, tokens: Array) -> None:
        """Append tokens, evicting the oldest ones if the cache is full.

        Parameters
        ----------
        tokens : ndarray or torch.Tensor
            The shape of the cache, except that the sequence axis has any length: one token or many,
            also more than the capacity. The dtype of the cache, in either byte order. Copied.

        Raises
        ------
        CompatibilityError
            `tokens` has another rank, shape or dtype. A ValueError. Nothing is changed then.
        ValueError
            `tokens` shares memory with the cache.
        TypeError
            `tokens` is not an array, or is masked.

        Notes
        -----
        The result is the same as appending one token at a time, but each slot is written at most
        once. The cost does not depend on the capacity.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.kv import RollingKVState
        >>> state = RollingKVState((2, 4, 512, 64), sinks=4)
        >>> state.append(np.ones((2, 4, 1, 64), np.float16))
        >>> state.length
        1
        """
        refuse_masked("tokens", tokens)
        self._buffer.append(tokens)

    def ordered(self) -> NDArray:
        """Return the tokens in order: the sinks, then the others from oldest to newest.

        Returns
        -------
        ndarray
            A new C-contiguous array with `length` positions on the sequence axis.
        """
        return self._buffer.ordered()

    def positions(self) -> NDArray:
        """Return the absolute position of the token in each slot.

        Returns
        -------
        ndarray of int64, shape (capacity,)
            A new array in storage order, so that ``positions()[i]`` belongs to slot ``i`` of
            `array`. An empty slot has -1. ``np.sort(p[p >= 0])`` are the positions of `ordered()`.
        """
        return self._buffer.positions()

    def trim(self, n: int) -> None:
        """Drop the last tokens, for example rejected tokens of speculative decoding.

        Parameters
        ----------
        n : int
            Number of tokens to drop, at most `length`.

        Raises
        ------
        TypeError
            `n` is not an integer.
        CapacityError
            `n` is negative or more than `length`. Nothing is changed then.

        Notes
        -----
        The slots become empty and zero. Evicted tokens do not come back, so a cache that has
        wrapped is shorter afterwards. Positions continue at the first one dropped. If tokens were
        evicted and `n` is so large that a sink is dropped too, the tokens before the evicted ones
        are the whole sequence again, and positions continue after the last sink that is left.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.kv import RollingKVState
        >>> state = RollingKVState((1, 1, 4, 1), dtype=np.float32, sinks=1)
        >>> state.append(np.arange(6, dtype=np.float32).reshape(1, 1, 6, 1))
        >>> state.trim(2)
        >>> state.ordered().ravel(), state.positions(), state.next_position
        (array([0., 3.], dtype=float32), array([ 0, -1, -1,  3]), 4)
        """
        self._buffer.trim(n)

    def copy(self) -> Self:
        """Return an independent cache with the same slots, positions and number of evicted tokens.

        Returns
        -------
        RollingKVState
            A cache of the same class, with the same attributes.

        Raises
        ------
        MemoryError
            The memory cannot be allocated.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.kv import RollingKVState
        >>> state = RollingKVState((1, 1, 4, 1), dtype=np.float32)
        >>> state.append(np.arange(6, dtype=np.float32).reshape(1, 1, 6, 1))
        >>> other = state.copy()
        >>> other.trim(1)
        >>> state.next_position, other.next_position
        (6, 5)
        """
        return copy.copy(self)

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other._buffer = self._buffer.copy()
        set_attributes(other, attributes_of(self))
        return other

    def _content(self) -> tuple[object, ...]:
        buffer = self._buffer.copy()  # slots and counters of one moment
        _, evicted, next_position, oldest = buffer.counts()
        _, sinks, seq_axis = buffer.extent()
        return buffer.view(), self.dtype, sinks, seq_axis, oldest, next_position, evicted

    def _restore(self, *content: Any) -> None:
        slots, dtype, sinks, seq_axis, *counts = content  # as of `_content`
        # the capacity is that of `slots`
        RollingKVState.__init__(self, slots.shape, None, dtype, sinks=sinks, seq_axis=seq_axis)
        self._buffer.fill(slots, *counts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        """Return `array` to NumPy functions, copied if `dtype` or `copy` requires it."""
        return np.array(self.array, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        dtype = label_of(self.dtype) or self.dtype
        return (
            f"RollingKVState(shape={self.shape}, length={self.length}, dtype={dtype}, "
            f"sinks={self.sinks}, seq_axis={self.seq_axis})"
        )

    def _repr_html_(self) -> str:
        """Return shape, tokens and capacity as an HTML table for notebooks."""
        from .._common.report import Table

        length, evicted, next_position, _ = self._buffer.counts()
        dtype = label_of(self.dtype) or self.dtype
        columns = [
            "shape",
            "sequence axis",
            "tokens [n]",
            "capacity [n]",
            "sinks [n]",
            "evicted [n]",
        ]
        columns += ["next position [n]", "dtype", "reserved [B]"]
        row = self.shape, self.seq_axis, length, self.capacity, self.sinks, evicted, next_position
        title = f"RollingKVState: {length:,} of {self.capacity:,} positions"
        return Table(title, columns, [(*row, dtype, self.nbytes)]).html()
