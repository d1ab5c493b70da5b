"""`assert_same_bits`: which tensors of two states differ, by how much, and how they are related."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._common.arguments import check_int
from .._common.arrays import is_torch
from .._common.backend import TensorBackend, backend_of
from .._common.dtypes import INTEGERS, label_of, name_of
from .._common.text import count_text, shorten
from .._sharding.layout import Shard
from ..checkpoint._compare.digest import parts_of, read_digest, readers_of
from ..collectives._arguments import optional_group
from ..collectives._consensus import gather_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .._types import NDArray
    from ..collectives import ProcessGroup

_LISTED = 20  # tensors in an error
_NAME_CHARACTERS = 80  # of a name in it
_BLOCK = 1 << 20  # elements that are compared at a time
_SOUGHT = 1 << 24  # most elements of a tensor whose relation to another one is sought
_SLICES = 1 << 16  # most slices along an axis for this
_PLACES = 100  # most places in which a slice is sought
_MOST_PARTS = 16  # into which an axis may be divided
_ZEROS = ((0, 0), "0" * 32)  # the digests of zeros

# The bits of infinity, or of the largest value of a dtype without it: greater ones are NaN.
_LARGEST = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F800000,
    "float64": 0x7FF << 52,
    "float8_e4m3fn": 0x7E,
    "float8_e5m2": 0x7C,
}
_COMPONENTS = {"complex64": "float32", "complex128": "float64"}


def assert_same_bits(
    actual: Any, expected: Any, *, ulps: int = 0, group: ProcessGroup | None = None
) -> None:
    """Raise AssertionError unless two states have the same names, dtypes, shapes and bits.

    The states are first compared by their digests, so equal tensors are read once and not copied.

    Parameters
    ----------
    actual, expected : mapping, torch.nn.Module, torch.optim.Optimizer, str or os.PathLike
        States or paths, as for `mlstate.digest`. If one state has a `Shard` and the other one the
        whole tensor, the part is compared.
    ulps : int, default 0
        Floating-point and complex elements may differ by this many units in the last place, which
        is the number of representable values from one to the other. If it is above 0, zeros of both
        signs are equal, and so are all NaN.
    group : ProcessGroup, optional
        The ranks that have the parts of the states; all of them call this. Both states may be
        divided in their own way, or one of them whole.

    Raises
    ------
    AssertionError
        The states differ. For each tensor, the message has the number of elements that differ, the
        largest distance in units in the last place (of integers: the difference), the first index
        and both values. It also names relations: a tensor that is equal to another one, or to a
        transpose, a part or a shift of the expected one, or that has its parts in another order.
        With `group`, it is the same on every rank.
    TypeError, ValueError
        `ulps` is not an integer from 0, or a value is not a state.
    CompatibilityError
        With `group`, as for `mlstate.digest`.
    StoreError, FormatError, ChecksumError
        As for `load`.

    Notes
    -----
    Of tensors that differ, one pair at a time is in memory. Relations are sought for tensors of up
    to 16 million elements.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.testing import assert_same_bits
    >>> weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    >>> assert_same_bits({"w": weight}, {"w": weight.copy()})
    >>> assert_same_bits({"w": np.nextafter(weight, 9)}, {"w": weight}, ulps=1)
    >>> assert_same_bits({"w": np.roll(weight, 1, axis=1)}, {"w": weight})
    Traceback (most recent call last):
      ...
    AssertionError: 1 of 1 tensors differ
    w: 6 of 6 elements differ, by at most 1,073,741,824 ulps
      first at [0, 0]: 2.0 (actual), 0.0 (expected)
      it is the expected tensor, rolled by 1 along axis 1
    """
    __tracebackhide__ = True
    ulps = check_int("ulps", ulps, 0)
    group = optional_group(group)
    ranks = 1 if group is None else group.world_size
    parts: list[Mapping[str, Any]] = [
        parts_of(state, None) if ranks == 1 else read_digest(state, group)
        for state in (actual, expected)
    ]
    names = [*dict.fromkeys([*parts[0], *parts[1]])]
    differing = [name for name in names if parts[0].get(name) != parts[1].get(name)]
    if not differing:
        return

    def find() -> dict[str, list[str]]:
        readers = readers_of(actual, ranks), readers_of(expected, ranks)
        return {name: _find(name, parts, readers, ulps) for name in differing}

    by_rank = [find()] if group is None else gather_values(group, "assert_same_bits", find)
    findings = {name: _joined([each[name] for each in by_rank]) for name in differing}
    findings = {name: lines for name, lines in findings.items() if lines}
    if findings:
        raise AssertionError(_report(findings, len(names), ulps))


def _find(
    name: str,
    parts: Sequence[Mapping[str, Any]],
    readers: Sequence[Mapping[str, Callable[[], Any]]],
    ulps: int,
) -> list[str]:
    """Return lines about a tensor whose digests differ; `parts`: digests in both states."""
    for label, other in (("actual", parts[1]), ("expected", parts[0])):
        if name not in other:
            return [f"only in the {label} state", *_equal_names(name, *parts)]
    tensors = [each[name]() for each in readers if name in each]  # of this rank
    lines = ["this rank has it in one state only"] if len(tensors) == 1 else []
    if len(tensors) == 2:
        lines = _compare(tensors[0], tensors[1], ulps)
    return lines and [*lines, *_equal_names(name, *parts)]


def _joined(by_rank: Sequence[list[str]]) -> list[str]:
    """Return the lines about one tensor of all ranks; equal lines once."""
    if all(lines == by_rank[0] for lines in by_rank):
        return by_rank[0]
    return [
        f"rank {rank}: {line}" if number == 0 else line
        for rank, lines in enumerate(by_rank)
        for number, line in enumerate(lines)
    ]


def _report(findings: Mapping[str, list[str]], count: int, ulps: int) -> str:
    """Return the text of the error; `count`: tensors of both states."""
    beyond = f" by more than {count_text(ulps, 'ulp')}" if ulps else ""
    texts = [f"{len(findings):,} of {count:,} tensors differ{beyond}"]
    for name, lines in [*findings.items()][:_LISTED]:
        texts.append(f"{shorten(name, _NAME_CHARACTERS)}: " + "\n  ".join(lines))
    if len(findings) > _LISTED:
        texts.append(f"and {len(findings) - _LISTED:,} more")
    return "\n".join(texts)


def _equal_names(name: str, actual: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return a line with the other tensors that have the values of a tensor, if there are any."""
    if name not in actual or actual[name][-1] in _ZEROS:
        return []
    equal = [repr(other) for other in expected if other != name and expected[other] == actual[name]]
    return [f"it is equal to the expected {' and '.join(equal[:3])}"] if equal else []


# ---- elements ----


class _Tensor(NamedTuple):
    """The bits of a tensor: a row of unsigned integers for each element, in C order.

    A complex number has two integers. An element of a dtype that NumPy alone knows has its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: NDArray
    elements: NDArray  # the same memory

    @classmethod
    def of(cls, array: Any) -> _Tensor:
        """Return the bits of an array or a tensor on any device."""
        if is_torch(array):
            tensor = array.detach().cpu().resolve_conj().resolve_neg()
            array = backend_of(tensor, TensorBackend).arrays_of({"": tensor})[""]
        array = np.asarray(array)
        dtype, item = name_of(array.dtype), array.dtype.itemsize
        size = item // 2 if dtype in _COMPONENTS else item if item in (1, 2, 4, 8) else 1
        flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
        bits = flat.view(f"<u{size}").reshape(array.size, item // size)
        return cls(dtype, array.shape, bits, flat)

    @property
    def grid(self) -> NDArray:
        """The bits by index; the last axis has the integers of an element."""
        return self.bits.reshape(*self.shape, self.bits.shape[1])

    def text(self, element: int) -> str:
        """Return an element as text."""
        if self.dtype == "bfloat16":
            return str((self.bits[element].astype("<u4") << 16).view("<f4")[0])
        is_labelled = label_of(self.elements.dtype) != ""  # an integer has the bits
        return self.hexadecimal(element) if is_labelled else str(self.elements[element])

    def hexadecimal(self, element: int) -> str:
        """Return the bits of an element as text."""
        return f"0x{self.bits[element].tobytes()[::-1].hex()}"


def _compare(actual: Any, expected: Any, ulps: int) -> list[str]:
    """Return lines about the difference of two tensors or parts, none if they do not differ."""
    label, sources = "", [actual, expected]
    shards = [each for each in sources if isinstance(each, Shard)]
    if shards:
        [shard, *_] = shards
        places = {(each.layout, each.index, tuple(each.shape)) for each in shards}
        if len(places) > 1:
            return [f"another part: {actual!r} (actual), {expected!r} (expected)"]
        label = f"part {shard.index} of {shard.layout.parts}, "
        sources = [_part(each, shard, shard.index) for each in sources]
    first, second = map(_Tensor.of, sources)
    for field in ("dtype", "shape"):
        values = getattr(first, field), getattr(second, field)
        if values[0] != values[1]:
            lines = [f"{label}{field} {values[0]} (actual), {values[1]} (expected)"]
            return lines + (_relations(first, second) if field == "shape" else [])
    lines = _difference(first, second, ulps)
    if lines:
        lines[0] = label + lines[0]
        lines += _relations(first, second)
        tensors = [each for each in (actual, expected) if not isinstance(each, Shard)]
        if shards and tensors:
            lines += _other_parts(shards[0], tensors[0], is_actual=actual is shards[0])
    return lines


def _part(value: Any, shard: Shard, index: int) -> Any:
    """Return the array of a shard; of a whole tensor, the part that a shard with `index` has."""
    if isinstance(value, Shard):
        return value.array.reshape(value.layout.shape(value.shape, value.index))
    if tuple(value.shape) != tuple(shard.shape):
        return value  # whose shape is the difference
    return shard.layout.take(value, index)


def _other_parts(shard: Shard, tensor: Any, *, is_actual: bool) -> list[str]:
    """Return a line if a shard has the elements of another part of a whole tensor."""
    bits = _Tensor.of(shard.array).bits
    if tuple(tensor.shape) == tuple(shard.shape) and bits.any():
        for index in range(shard.layout.parts):
            if np.array_equal(_Tensor.of(_part(tensor, shard, index)).bits, bits):
                sides = ("actual", "expected") if is_actual else ("expected", "actual")
                return [f"the {sides[0]} part is part {index} of the {sides[1]} tensor"]
    return []


def _difference(first: _Tensor, second: _Tensor, ulps: int) -> list[str]:
    """Return lines about the elements that differ by more than `ulps`."""
    count, first_element, one_nan, largest = 0, -1, 0, 0
    dtype = _COMPONENTS.get(first.dtype, first.dtype)
    is_float, has_distance = dtype in _LARGEST, dtype in _LARGEST or dtype in INTEGERS
    for start in range(0, len(first.bits), _BLOCK):
        rows = [each.bits[start : start + _BLOCK] for each in (first, second)]
        different = rows[0] != rows[1]
        if has_distance:
            distances, nan = _distances(dtype, *rows)
            if ulps and is_float:
                different = (distances > ulps) | nan
            largest = max(largest, int(distances[different & ~nan].max(initial=0)))
            one_nan += int((different & nan).any(axis=1).sum())
        elements = different.any(axis=1)
        if elements.any() and first_element < 0:
            first_element = start + int(elements.argmax())
        count += int(elements.sum())
    if not count:
        return []
    line = f"{count:,} of {len(first.bits):,} elements differ"
    if has_distance and count > one_nan:
        line += f", by at most {count_text(largest, 'ulp') if is_float else f'{largest:,}'}"
    if one_nan:
        line += f"; {one_nan:,} NaN in one state only"
    texts = [each.text(first_element) for each in (first, second)]
    if texts[0] == texts[1]:  # NaN of other bits
        texts = [f"{each.hexadecimal(first_element)}" for each in (first, second)]
    index = [int(i) for i in np.unravel_index(first_element, first.shape)]
    return [line, f"first at {index}: {texts[0]} (actual), {texts[1]} (expected)"]


def _distances(dtype: str, first: NDArray, second: NDArray) -> tuple[NDArray, NDArray]:
    """Return for pairs of numbers how many values are between them, and if one of them is NaN.

    The distance of two NaN is 0, as is the distance of the two zeros.
    """
    keys, nans = [], []
    for bits in (first, second):
        sign = bits.dtype.type(1 << 8 * bits.dtype.itemsize - 1)
        magnitude = bits & ~sign
        nans.append(magnitude > _LARGEST.get(dtype, sign))
        if dtype in _LARGEST:
            keys.append(np.where(bits & sign, sign - magnitude, sign + magnitude))
        else:
            keys.append(bits ^ sign if dtype[0] == "i" else bits)
    distances = np.where(keys[0] > keys[1], keys[0] - keys[1], keys[1] - keys[0])
    distances[nans[0] & nans[1]] = 0
    return distances, nans[0] ^ nans[1]


# ---- relations ----


def _relations(actual: _Tensor, expected: _Tensor) -> list[str]:
    """Return a line about the relation of two tensors with one dtype, if one is found."""
    if max(len(actual.bits), len(expected.bits)) > _SOUGHT or not actual.bits.any():
        return []
    for find in (_find_transpose, _find_reshape, _find_part, _find_shift, _find_order):
        text = find(actual, expected)
        if text:
            return [text]
    return []


def _find_transpose(actual: _Tensor, expected: _Tensor) -> str:
    """Return a text if the tensor has two axes swapped, or ""."""
    axes = len(expected.shape)
    for second in range(1, axes):
        for first in range(second):
            swapped = expected.grid.swapaxes(first, second)
            if swapped.shape[:-1] == actual.shape and np.array_equal(swapped, actual.grid):
                change = "transposed" if axes == 2 else f"with axes {first} and {second} swapped"
                return f"it is the expected tensor, {change}"
    return ""


def _find_reshape(actual: _Tensor, expected: _Tensor) -> str:
    """Return a text if the elements are the same in another shape, or ""."""
    same = actual.shape != expected.shape and np.array_equal(actual.bits, expected.bits)
    return "its elements are the expected ones, in the same order" if same else ""


def _find_part(actual: _Tensor, expected: _Tensor) -> str:
    """Return a text if a tensor is a range of the other one along one axis, or ""."""
    if len(actual.shape) != len(expected.shape):
        return ""
    pairs = zip(actual.shape, expected.shape, strict=True)
    axes = [axis for axis, (first, second) in enumerate(pairs) if first != second]
    if len(axes) != 1 or max(actual.shape[axes[0]], expected.shape[axes[0]]) > _SLICES:
        return ""
    [axis] = axes
    names, tensors = ("actual", "expected"), (actual, expected)
    if actual.shape[axis] > expected.shape[axis]:
        names, tensors = names[::-1], tensors[::-1]
    short, long = (_slices(each, axis) for each in tensors)
    for place in _places(short[:1], long):
        if np.array_equal(long[place : place + len(short)], short):
            index = ":, " * axis + f"{place}:{place + len(short)}"
            return f"the {names[0]} tensor is {names[1]}[{index}]"
    return ""


def _find_shift(actual: _Tensor, expected: _Tensor) -> str:
    """Return a text if the elements are shifted along an axis or in C order, or ""."""
    shifted = ""
    for axis, first, second in _sequences(actual, expected):
        middle = len(first) // 2
        for place in _places(first[middle : middle + 1], second):
            by = middle - place
            inner = first[max(by, 0) : len(first) + min(by, 0)]
            outer = second[max(-by, 0) : len(first) - max(by, 0)]
            if len(inner) > 1 and (inner != inner[0]).any() and np.array_equal(inner, outer):
                along = "" if axis is None or len(actual.shape) == 1 else f" along axis {axis}"
                if np.array_equal(np.roll(second, by), first):
                    return f"it is the expected tensor, rolled by {by}{along}"
                shifted = shifted or f"it is the expected tensor, shifted by {by}{along}"
    return shifted


def _find_order(actual: _Tensor, expected: _Tensor) -> str:
    """Return a text if the parts along an axis are in another order, or ""."""
    for axis, first, second in _sequences(actual, expected):
        if axis is None or not np.array_equal(np.sort(first), np.sort(second)):
            continue
        for count in range(2, _MOST_PARTS + 1):
            blocks = [
                [part.tobytes() for part in np.split(each, count)] if len(each) % count == 0 else []
                for each in (first, second)
            ]
            if blocks[0] and sorted(blocks[0]) == sorted(blocks[1]):
                numbers = [*range(count)]  # of the expected parts that are not placed yet
                order = []
                for block in blocks[0]:
                    order.append(next(i for i in numbers if blocks[1][i] == block))
                    numbers.remove(order[-1])
                return f"it has the {count} expected parts along axis {axis} in the order {order}"
        return f"it has the expected slices along axis {axis} in another order"
    return ""


def _sequences(actual: _Tensor, expected: _Tensor) -> Iterator[tuple[int | None, NDArray, NDArray]]:
    """Yield an axis and the numbers of its slices in both tensors; None and all elements last."""
    if actual.shape != expected.shape:
        return
    for axis, length in enumerate(actual.shape):
        if length <= _SLICES:
            yield axis, _slices(actual, axis), _slices(expected, axis)
    if actual.bits.shape[1] == 1:
        yield None, actual.bits[:, 0], expected.bits[:, 0]


def _slices(tensor: _Tensor, axis: int) -> NDArray:
    """Return a number for each slice along an axis, equal for equal slices."""
    rows = np.moveaxis(tensor.grid, axis, 0)
    return np.fromiter((hash(row.tobytes()) for row in rows), np.int64, len(rows))


def _places(item: NDArray, sequence: NDArray) -> list[int]:
    """Return the first positions of an item, an array of length 1 or 0, in a sequence."""
    return np.flatnonzero(sequence == item)[:_PLACES].tolist() if len(item) else []
