"""A cache that grows in place; public through `mlstate.kv`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._common.dtypes import label_of
from .._common.set_module import set_module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._types import DType, NDArray, NumpyDType


@set_module("mlstate.kv")
class KVState:
    """A KV cache that grows and shrinks inside reserved memory, without copying.

    Parameters
    ----------
    shape : sequence of 4 int
        Initial (layers, heads, sequence, head_dim).
    capacity : int, optional
        Positions to reserve, at least the sequence of `shape`. Default: that sequence.
    dtype : dtype
        Any dtype of NumPy or ml_dtypes that the core supports.

    Raises
    ------
    CapacityError
        `capacity` is smaller than the sequence. A ValueError.
    CompatibilityError
        `shape` does not have four dimensions, or `dtype` is unsupported. A ValueError.
    MemoryError
        The memory cannot be allocated.

    Notes
    -----
    Consecutive heads are `capacity` positions apart, so the cache of any length is a strided
    view: `resize` takes microseconds for any size and copies nothing. Reserved memory takes no
    physical memory until it is written. New positions read as zeros. The class is thread-safe.
    Arrays that it returned stay valid as long as they exist, and show the current memory: a
    write through an older array beyond the current length becomes visible when the state
    grows.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.kv import KVState
    >>> state = KVState((4, 2, 256, 32), capacity=1024, dtype=np.float16)
    >>> state.array[:, :, :200] = 1
    >>> state.resize(512)
    >>> state.array.shape, bool(state.array[:, :, 200:].any())
    ((4, 2, 512, 32), False)
    """

    __slots__ = ("_buffer",)

    def __init__(
        self,
        shape: Sequence[int],
        capacity: int | None = None,
        dtype: DType = np.float16,
    ) -> None:
        _core.kv_check_shapes(shape, shape, True)
        layers, heads, length, head_dim = shape
        self._buffer = _core.KVBuffer(
            layers, heads, length, head_dim, length if capacity is None else capacity, dtype
        )

    @classmethod
    def from_array(cls, array: NDArray, capacity: int | None = None) -> KVState:
        """Reserve memory and copy an array into it.

        Parameters
        ----------
        array : ndarray, shape (layers, heads, sequence, head_dim)
            The initial content; copied.
        capacity : int, optional
            Positions to reserve, at least the array's.

        Returns
        -------
        KVState
            A cache with the array's content, length and dtype.

        Raises
        ------
        TypeError
            `array` is not a NumPy array.
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
        state = cls(array.shape, capacity, array.dtype)
        state._buffer.fill(array)
        return state

    @property
    def array(self) -> NDArray:
        """The current cache: a writable view with shape `shape`, not a copy."""
        return self._buffer.view()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(layers, heads, sequence, head_dim)."""
        return self._buffer.extent()[:4]

    @property
    def seq_length(self) -> int:
        """Current number of positions."""
        return self._buffer.extent()[2]

    @property
    def capacity(self) -> int:
        """Number of positions for which memory is reserved."""
        return self._buffer.extent()[4]

    @property
    def dtype(self) -> NumpyDType:
        """Dtype of the elements."""
        return self._buffer.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the current positions, which is also the size of `contiguous()`."""
        layers, heads, length, head_dim = self.shape
        return layers * heads * length * head_dim * self.dtype.itemsize

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of reserved address space; only written pages take physical memory."""
        layers, heads, _, head_dim, capacity = self._buffer.extent()
        return layers * heads * capacity * head_dim * self.dtype.itemsize

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
        length = array.shape[2]
        copy: NDArray = _core.kv_move(array, length, length, 0.0, None, None, False, True)
        return copy

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        """Return `array` to NumPy functions, copied if `dtype` or `copy` requires it."""
        return np.array(self.array, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        dtype = label_of(self.dtype) or self.dtype
        return f"KVState(shape={self.shape}, capacity={self.capacity}, dtype={dtype})"

    def _repr_html_(self) -> str:
        from .._common.text import bytes_text, table_html

        layers, heads, positions, dimension = (f"{size:,}" for size in self.shape)
        row = {
            "layers": layers,
            "heads": heads,
            "positions": positions,
            "capacity": f"{self.capacity:,}",
            "head dimension": dimension,
            "dtype": str(label_of(self.dtype) or self.dtype),
            "used": bytes_text(self.nbytes),
            "reserved": bytes_text(self.reserved_nbytes),
        }
        title = f"KVState: {positions} of {self.capacity:,} positions"
        return table_html(title, list(row), [list(row.values())])
