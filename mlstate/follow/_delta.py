"""Delta of one array: compare, apply, undo, compose, cut to a part; on CPU or a device."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from .. import _core
from .._common.arrays import is_torch
from .._common.backend import TensorBackend, backend_of
from ..errors import ChecksumError, CompatibilityError

if TYPE_CHECKING:
    from typing import TypeAlias

    from .._sharding.layout import Layout
    from .._types import Array, NDArray

    # (target, gaps, overwritten elements) of each application, in order
    ElementLog: TypeAlias = list[tuple[Any, NDArray, NDArray]]


class DeltaBackend(Protocol):
    """Deltas of a framework's tensors that are not in main memory."""

    def encode_delta(self, base: Any, new: Any) -> tuple[NDArray, NDArray]:
        """Return gaps and values of the elements of `new` with other bytes than in `base`.

        They are as from `_core.delta_encode`, in main memory.
        """

    def apply_delta(
        self, target: Any, gaps: NDArray, values: NDArray, log: ElementLog | None
    ) -> None:
        """Write `values` into `target`, as `_core.delta_apply` does.

        `log`: gets the overwritten elements before the first write; None: they are not kept.
        """

    def tensor_crc32c(self, tensor: Any) -> int:
        """Return the CRC32C of the elements of `tensor` in C order."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The elements of an array that differ from a base; docs/follow.md specifies the bytes.

    Parameters
    ----------
    elements : int
        Elements of the array.
    gaps : ndarray of uint8 or uint16, one-dimensional
        Number of unchanged elements before each changed one. If it is as large as the largest
        value of the dtype, it begins with escapes: items of that value, which are added up.
    values : ndarray, shape (changed,)
        The changed elements, in the dtype of the array.
    crc32c : int, optional
        CRC32C of all elements of the array after the change, in C order.
    """

    elements: int
    gaps: NDArray
    values: NDArray
    crc32c: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of both streams."""
        return int(self.gaps.nbytes + self.values.nbytes)


def compare_arrays(base: Array, new: Array, *, checksum: bool = True) -> Delta:
    """Return the elements of `new` with other bytes than in `base`.

    Parameters
    ----------
    base, new : ndarray or torch.Tensor
        Two arrays of the same shape and dtype, with any strides; tensors on one device.
    checksum : bool
        Whether to compute the CRC32C of `new`, in the same pass.

    Returns
    -------
    Delta
        Its arrays are in main memory.

    Raises
    ------
    CompatibilityError
        Shapes or dtypes differ, or an array is byte-swapped.
    """
    base, new = _detached(base), _detached(new)
    if not _is_on_device(new):
        gaps, values, crc = _core.delta_encode(base, new, checksum)
        return Delta(_elements_of(new), gaps, values, crc)
    backend = backend_of(new, DeltaBackend)
    gaps, values = backend.encode_delta(base, new)
    return Delta(_elements_of(new), gaps, values, backend.tensor_crc32c(new) if checksum else None)


def apply_delta(target: Array, delta: Delta, log: ElementLog, *, check: bool = True) -> None:
    """Write the changed elements into `target`, and note the overwritten ones in `log`.

    The entry of the log exists before the first element is written. After an exception of any
    kind, `roll_back` of the log restores the target, whether or not the delta was applied.

    Parameters
    ----------
    target : ndarray or torch.Tensor
        The base of the delta, with any strides.
    delta : Delta
        All numbers are checked before anything is written.
    log : list
        Receives the overwritten elements, which need as much memory as ``delta.values``.
    check : bool
        Whether to compare the CRC32C of the changed target with ``delta.crc32c``.

    Raises
    ------
    FormatError
        The streams are truncated or contradict each other. Nothing was written.
    CompatibilityError
        The target has another length or dtype. Nothing was written.
    ChecksumError
        The target was not the base of the delta, or a value is damaged. Call `roll_back`.
    """
    crc = _write_values(target, delta, log, checksum=check and delta.crc32c is not None)
    if crc is not None and crc != delta.crc32c:
        error = ChecksumError(
            f"after the change the elements have CRC32C {crc:08x} instead of {delta.crc32c:08x}: "
            "the delta belongs to another base, or it is damaged"
        )
        error.expected, error.got = f"{delta.crc32c:08x}", f"{crc:08x}"
        raise error


def roll_back(log: ElementLog) -> None:
    """Restore all elements that a log has, the last change first, and clear the log.

    After an interrupt, call it again: restoring an element twice does no harm.
    """
    for target, gaps, old in reversed(log):
        former = Delta(_elements_of(target), gaps, old)
        _write_values(target, former, log=None, checksum=False)
    log.clear()


def write_delta(target: Array, delta: Delta) -> None:
    """Write the changed elements into `target`; after an interrupt, some may be written."""
    _write_values(target, delta, log=None, checksum=False)


def checksum_of(array: Array) -> int:
    """Return the CRC32C of the elements in C order."""
    array = _detached(array)
    if _is_on_device(array):
        return backend_of(array, DeltaBackend).tensor_crc32c(array)
    return _core.array_crc32c(array, 0)


def compose_deltas(first: Delta, second: Delta) -> Delta:
    """Return the delta that has the effect of `first`, then `second`, without their arrays.

    Raises
    ------
    CompatibilityError
        They belong to arrays of different lengths or dtypes.
    FormatError
        The streams of one are damaged.
    """
    if first.elements != second.elements:
        raise CompatibilityError(
            f"deltas of {first.elements} and of {second.elements} elements do not compose"
        )
    gaps, values = _core.delta_compose(
        first.elements, first.gaps, first.values, second.gaps, second.values
    )
    return Delta(first.elements, gaps, values, second.crc32c)


def filter_delta(
    delta: Delta,
    shape: tuple[int, ...],
    source: tuple[Layout, int],
    target: tuple[Layout, int],
) -> Delta:
    """Return the changes of one part of a tensor that another part has too.

    A rank with the target part applies the filtered deltas of all source parts to its own
    elements, without the tensor.

    Parameters
    ----------
    delta : Delta
        A delta of the source part.
    shape : tuple of int
        Shape of the whole tensor.
    source, target : (Layout, int)
        The parts: a layout and the number of the part.

    Returns
    -------
    Delta
        A delta of the target part, without a checksum.

    Raises
    ------
    CompatibilityError
        The source part does not have the elements of the delta's array.
    ValueError
        A part does not exist.
    FormatError
        The streams are damaged.
    """
    streams = delta.elements, delta.gaps, delta.values
    source_part, target_part = ((layout.steps, index) for layout, index in (source, target))
    gaps, values = _core.delta_filter(*streams, shape, *source_part, *target_part)
    layout, index = target
    return Delta(prod(layout.shape(shape, index)), gaps, values)


def _write_values(
    target: Any, delta: Delta, log: ElementLog | None, *, checksum: bool
) -> int | None:
    """Write the values of a delta into `target`, on its device.

    `log`: gets the overwritten elements; None: they are not kept. Returns the CRC32C of all
    elements of the target after the change if `checksum` is true, else None.
    """
    array = _detached(target)
    if not _is_on_device(array):
        streams = delta.gaps, delta.values, delta.elements
        crc = _core.delta_apply(array, *streams, log, checksum)
        if is_torch(array):  # autograd must see the write
            backend_of(array, TensorBackend).note_written([target])
        return crc
    backend = backend_of(array, DeltaBackend)
    backend.apply_delta(array, delta.gaps, delta.values, log)
    return backend.tensor_crc32c(array) if checksum else None


def _detached(array: Any) -> Any:
    """Return a tensor without its graph, over the same memory."""
    return array.detach() if is_torch(array) else array


def _is_on_device(array: Any) -> bool:
    return is_torch(array) and array.device.type != "cpu"


def _elements_of(array: Any) -> int:
    return int(array.numel() if is_torch(array) else array.size)
