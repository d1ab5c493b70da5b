"""Delta of one array: compare, apply, undo, compose, cut to a part; on CPU or a device."""

from __future__ import annotations

from itertools import repeat
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from .. import _core
from .._common.arrays import is_torch
from .._common.backend import TensorBackend, backend_of
from ..errors import ChecksumError, CompatibilityError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TypeAlias

    from .._sharding.layout import Layout
    from .._types import Array, NDArray

    # (target, gaps, overwritten elements) of each application, in order
    ElementLog: TypeAlias = list[tuple[Any, NDArray, NDArray]]

BATCH_BYTES = 1 << 20  # of arrays that are handled without a look at Python's signals


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


class Delta(NamedTuple):
    """The elements of an array that differ from a base; docs/follow_format.md specifies the bytes.

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
        raise base_error(delta.crc32c, crc)


def base_error(expected: int | None, got: int) -> ChecksumError:
    """Return the error for elements with the CRC32C `got` after a delta, not the delta's."""
    text = (
        f"after the change the elements have CRC32C {got:08x} instead of {expected:08x}: "
        "the delta belongs to another base, or it is damaged"
    )
    return ChecksumError(text, expected=f"{expected:08x}", got=f"{got:08x}")


def batches_of(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield slices of successive arrays that together have about `BATCH_BYTES`, or of one array.

    `sizes`: bytes of the arrays.
    """
    first = total = 0
    for number, size in enumerate(sizes):
        if total and total + size > BATCH_BYTES:
            yield slice(first, number)
            first, total = number, 0
        total += size
    if first < len(sizes):
        yield slice(first, len(sizes))


def compare_many(bases: Sequence[Array], news: Sequence[Array]) -> list[Delta]:
    """Return `compare_arrays` of each pair; a batch in main memory is compared in one call."""
    if not _are_in_memory([*bases, *news]):
        return [compare_arrays(base, new) for base, new in zip(bases, news, strict=True)]
    encoded = map(_core.delta_encode, bases, news, repeat(True))
    return [
        tuple.__new__(Delta, (prod(new.shape), *streams))
        for new, streams in zip(news, encoded, strict=True)
    ]


def apply_many(
    targets: Sequence[Array],
    deltas: Sequence[Delta | None],
    log: ElementLog | None,
    checks: Sequence[bool],
) -> tuple[int, int] | None:
    """Apply deltas one after another, as `apply_delta`; in main memory a batch in one call.

    `checks`: whether to compare the CRC32C after each. `log`: None to keep no overwritten elements.
    Returns the number of the first delta after which the CRC32C is another one, and that CRC32C, or
    None. After a FormatError or CompatibilityError the log has an entry for each delta before the
    wrong one, and raises FormatError before the first one if a delta is None.
    """
    present = [delta for delta in deltas if delta is not None]
    if len(present) < len(deltas):
        raise FormatError("a version lacks the delta of a tensor")
    if not _are_in_memory(targets):
        for number, (target, delta, check) in enumerate(zip(targets, present, checks, strict=True)):
            crc = _write_values(target, delta, log, checksum=check)
            if crc is not None and crc != delta.crc32c:
                return number, crc
        return None
    if not deltas:
        return None
    elements, gaps, values, expected = zip(*present, strict=True)
    try:
        crcs = list(map(_core.delta_apply, targets, gaps, values, elements, repeat(log), checks))
    finally:
        tensors = [target for target in targets if is_torch(target)]
        if tensors:  # autograd must see the write
            backend_of(tensors[0], TensorBackend).note_written(tensors)
    if crcs == list(expected):
        return None
    for number, (crc, right) in enumerate(zip(crcs, expected, strict=True)):
        if crc is not None and crc != right:
            return number, crc
    return None


def roll_back(log: ElementLog) -> None:
    """Restore all elements that a log has, the last change first, and clear the log.

    After an interrupt, call it again: restoring an element twice does no harm.
    """
    for target, gaps, old in reversed(log):
        former = Delta(_elements_of(target), gaps, old)
        _write_values(target, former, log=None, checksum=False)
    log.clear()


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


def _are_in_memory(arrays: Sequence[Any]) -> bool:
    """Return whether all arrays are NumPy's, or tensors on the CPU without a graph."""
    others = [array for array in arrays if type(array) is not np.ndarray]
    return not any(_is_on_device(array) or _has_graph(array) for array in others)


def _has_graph(array: Any) -> bool:
    return is_torch(array) and array.requires_grad


def _detached(array: Any) -> Any:
    """Return a tensor without its graph, over the same memory."""
    return array.detach() if is_torch(array) else array


def _is_on_device(array: Any) -> bool:
    return is_torch(array) and array.device.type != "cpu"


def _elements_of(array: Any) -> int:
    return int(array.numel() if is_torch(array) else array.size)
