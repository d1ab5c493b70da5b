"""`KVState`: one cache array that grows in place in reserved memory: `resize`, `reserve`."""

from __future__ import annotations

import copy
from math import prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from .. import _core
from .._common.arrays import refuse_masked
from .._common.dtypes import label_of
from ._axis import with_length
from ._copies import CopiedByValue
from ._move import KVMove

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._types import DType, NDArray, NumpyDType


class KVState(CopiedByValue):
    """A KV cache that grows and shrinks inside reserved memory, without copying.

    Parameters
    ----------
    shape : sequence of int
        Initial (layers, heads, sequence, head_dim), or 2 to 8 dimensions with the sequence at
        `seq_axis`.
    capacity : int, optional
        Positions to reserve, at least the sequence of `shape`. Default: that sequence.
    dtype : dtype
        Any dtype of NumPy or ml_dtypes that the core supports.
    seq_axis : int
        The axis of the sequence; a negative number counts from the last axis.

    Raises
    ------
    CapacityError
        `capacity` is smaller than the sequence. A ValueError.
    CompatibilityError
        `shape` does not have 2 to 8 dimensions, has no axis `seq_axis`, or `dtype` is unsupported.
        A ValueError.
    TypeError
        A dimension, `capacity` or `seq_axis` is not an integer.
    MemoryError
        The memory cannot be allocated.

    Notes
    -----
    Consecutive rows (a row is one index of the axes before the sequence, such as one head) are
    `capacity` positions apart, so the cache of any length is a strided view: `resize` takes
    microseconds for any size and copies nothing. Reserved memory takes no physical memory until
    it is written. New positions read as zeros. The class is thread-safe. Arrays that it returned
    stay valid as long as they exist, and show the current memory: a write through an older array
    beyond the current length becomes visible when the state grows. `copy.copy`, `copy.deepcopy` and
    pickle copy content, length and capacity.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.kv import KVState
    >>> state = KVState((4, 2, 256, 32), capacity=1024, dtype=np.float16)
    >>> state.array[:, :, :200] = 1
    >>> state.resize(512)
    >>> state.array.shape, bool(state.array[:, :, 200:].any())
    ((4, 2, 512, 32), False)

    A cache with the sequence innermost:

    >>> state = KVState((4, 1, 64, 1, 256), capacity=1024, seq_axis=-1)
    >>> state.resize(512)
    >>> state.array.shape, state.seq_axis
    ((4, 1, 64, 1, 512), 4)
    """

    __slots__ = ("_buffer",)

    def __init__(
        self,
        shape: Sequence[int],
        capacity: int | None = None,
        dtype: DType = np.float16,
        *,
        seq_axis: int = -2,
    ) -> None:
        """Allocate an empty buffer with room for `capacity` positions (see the class)."""
        if hasattr(shape, "__array__") and np.ndim(shape) > 1:
            raise TypeError(
                "shape must be a sequence of integers, got an array: KVState.from_array(array, "
                "capacity) starts with the content of an array"
            )
        self._buffer = _core.KVBuffer(shape, capacity, dtype, seq_axis)

    @classmethod
    def from_array(
        cls, array: NDArray, capacity: int | None = None, *, seq_axis: int = -2
    ) -> KVState:
        """Reserve memory and copy an array into it.

        Parameters
        ----------
        array : ndarray, shape (layers, heads, sequence, head_dim)
            The initial content; copied. With `seq_axis`, any other layout of 2 to 8 dimensions.
        capacity : int, optional
            Positions to reserve, at least the array's. Default: as many as the array has.
        seq_axis : int
            As for the class.

        Returns
        -------
        KVState
            A cache with the array's content, length and dtype.

        Raises
        ------
        TypeError
            `array` is not a NumPy array, or is masked.
        CapacityError, CompatibilityError, MemoryError
            As for the class.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.kv import KVState
        >>> KVState.from_array(np.ones((1, 1, 3, 2), np.float32), capacity=8)
        KVState(shape=(1, 1, 3, 2), capacity=8, dtype=float32)
        """
        if not isinstance(array, np.ndarray):
            raise TypeError(f"array must be a NumPy array, got {type(array).__name__}")
        refuse_masked("array", array)
        state = cls(array.shape, capacity, array.dtype, seq_axis=seq_axis)
        state._buffer.fill(array)
        return state

    @property
    def array(self) -> NDArray:
        """The current cache: a writable view with shape `shape`, not a copy."""
        return self._buffer.view()

    @property
    def shape(self) -> tuple[int, ...]:
        """(layers, heads, sequence, head_dim), or the other layout that was passed."""
        return self._buffer.extent()[0]

    @property
    def seq_axis(self) -> int:
        """The axis of the sequence, counted from 0."""
        return self._buffer.seq_axis

    @property
    def seq_length(self) -> int:
        """Current number of positions."""
        return self.shape[self.seq_axis]

    @property
    def capacity(self) -> int:
        """Number of positions for which memory is reserved."""
        return self._buffer.extent()[1]

    @property
    def dtype(self) -> NumpyDType:
        """Dtype of the elements."""
        return self._buffer.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the current positions, which is also the size of `contiguous()`."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of reserved address space; only written pages take physical memory."""
        shape, capacity = self._buffer.extent()
        return prod(with_length(shape, self.seq_axis, capacity)) * self.dtype.itemsize

    def resize(self, seq_length: int, current_position: int | None = None) -> None:
        """Change the length in place, within the reserved capacity.

        Parameters
        ----------
        seq_length : int
            New length. Positions beyond it are zeroed, so that growing again shows zeros and
            never stale tokens.
        current_position : int, optional
            Number of tokens to keep, at most both lengths; all later positions are zeroed.
            Default: the smaller of the two lengths, so that shrinking drops the last ones.

        Raises
        ------
        CapacityError
            `seq_length` exceeds the capacity, or `current_position` exceeds either length.
            Nothing is changed then.

        Notes
        -----
        Nothing is copied. Growing takes constant time; zeroing takes time for dropped positions.

        Examples
        --------
        >>> from mlstate.kv import KVState
        >>> state = KVState((4, 2, 512, 32))
        >>> state.resize(256, current_position=300)
        Traceback (most recent call last):
        mlstate.errors.CapacityError: current_position 300 is beyond the sequence length 256
        """
        self._buffer.resize(seq_length, current_position)

    def reserve(self, capacity: int) -> None:
        """Increase the capacity, moving the rows inside the same buffer.

        Parameters
        ----------
        capacity : int
            Positions, at least the current capacity.

        Raises
        ------
        TypeError
            `capacity` is not an integer.
        CapacityError
            `capacity` is less than the current one.
        BufferError
            An array of this cache still exists; its memory would move.
        MemoryError
            The memory cannot be allocated; nothing is changed then.

        Notes
        -----
        The peak is the new size, not the sum of both sizes. On Linux the pages are remapped to
        a larger range without a copy, then the rows are moved apart, last row first. On other
        systems the old memory is copied first.

        Examples
        --------
        >>> from mlstate.kv import KVState
        >>> state = KVState((4, 2, 256, 32))
        >>> state.reserve(512)
        >>> state.resize(512)
        """
        self._buffer.reserve(capacity)

    def contiguous(self) -> NDArray:
        """Return a C-contiguous copy, for consumers without support for strides.

        Returns
        -------
        ndarray
            A new array of `nbytes` bytes.
        """
        array = self.array  # take the length once: another thread may resize meanwhile
        axis = self.seq_axis
        # A compaction to the same length copies; an expansion could return `array` itself.
        move = KVMove(array.shape[axis], position=None, seq_axis=axis, compact=True)
        packed: NDArray = _core.kv_move(array, move, None)
        return packed

    def copy(self) -> Self:
        """Return an independent cache with the same content, length and capacity.

        Returns
        -------
        KVState
            A cache of the same class, with the same attributes. Memory is reserved for the same
            capacity; only the current positions are copied.

        Raises
        ------
        MemoryError
            The memory cannot be allocated.

        Examples
        --------
        >>> from mlstate.kv import KVState
        >>> state = KVState((4, 2, 256, 32), capacity=512)
        >>> other = state.copy()
        >>> other.resize(512)
        >>> state.seq_length, other.seq_length
        (256, 512)
        """
        return copy.copy(self)

    def _content(self) -> tuple[object, ...]:
        array = self.array  # as long as it exists, reserve in another thread raises
        return array, self.capacity, self.dtype, self.seq_axis

    def _restore(self, *content: Any) -> None:
        array, capacity, dtype, seq_axis = content
        KVState.__init__(self, array.shape, capacity, dtype, seq_axis=seq_axis)
        self._buffer.fill(array.astype(dtype, copy=False))  # pickle changes the byte order

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        """Return `array` to NumPy functions, copied if `dtype` or `copy` requires it."""
        return np.array(self.array, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        dtype = label_of(self.dtype) or self.dtype
        shape, axis = self.shape, self.seq_axis
        where = "" if axis == len(shape) - 2 else f", seq_axis={axis - len(shape)}"
        return f"KVState(shape={shape}, capacity={self.capacity}, dtype={dtype}{where})"

    def _repr_html_(self) -> str:
        """Return shape, capacity and bytes as an HTML table for notebooks."""
        from .._common.report import Table

        shape, capacity = self._buffer.extent()
        axis = self.seq_axis
        names = [f"axis {i}" for i in range(len(shape))]
        if len(shape) == 4 and axis == 2:
            names = ["layers", "heads", "positions", "head dimension"]
        names[axis] = "positions"
        counts = [f"{name} [n]" for name in (*names, "capacity")]
        columns = [*counts, "dtype", "used [B]", "reserved [B]"]
        dtype = label_of(self.dtype) or self.dtype
        title = f"KVState: {shape[axis]:,} of {capacity:,} positions"
        row = *shape, capacity, dtype, self.nbytes, self.reserved_nbytes
        return Table(title, columns, [row]).html()
