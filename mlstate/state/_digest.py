"""`Digest`: a number for each tensor that does not depend on how the tensor is divided.

The numbers of the parts of a tensor add up to its number (csrc/core/state/digest.h has the
definition), so ranks exchange the digests and places of their parts, and no elements.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from .. import _core
from .._common.arrays import is_on_device, is_torch
from .._common.backend import TensorBackend, backend_of
from .._common.dtypes import NAMES, name_of
from .._common.report import Shown, Table
from .._common.text import shorten
from .._sharding.layout import Shard
from ..errors import CompatibilityError, FormatError
from ._compatibility import join
from ._diff import title_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

VERSION = 1  # of the definition, and of the JSON text
_LANE = 1 << 64
_DIGITS = 32  # of a value
_NAME_CHARACTERS = 80  # of a name in an error

Lanes = tuple[int, int]
Box = tuple[tuple[int, ...], tuple[int, ...]]  # first index and length on each axis


class TensorDigest(NamedTuple):
    """The digest of one tensor.

    Attributes
    ----------
    dtype : str
        Name of the dtype, such as ``"bfloat16"``.
    shape : tuple of int
        Shape of the whole tensor.
    value : str
        The digest: 32 hexadecimal digits.
    """

    dtype: str
    shape: tuple[int, ...]
    value: str


class DigestDiff(Shown):
    """The differences of two digests.

    Attributes
    ----------
    missing, unexpected : list of str
        Names that only the first digest, or only the second one has.
    changed : list of tuple
        ``(name, in the first, in the second)`` for each tensor whose dtype, shape or value
        differs; both are `TensorDigest`.
    unchanged : int
        Number of tensors that are equal.
    """

    __slots__ = ("changed", "missing", "unchanged", "unexpected")

    def __init__(self, first: Digest, second: Digest) -> None:
        """Compare two digests."""
        self.missing: list[str] = [name for name in first if name not in second]
        self.unexpected: list[str] = [name for name in second if name not in first]
        common = [name for name in first if name in second]
        self.changed: list[tuple[str, TensorDigest, TensorDigest]] = [
            (n, first[n], second[n]) for n in common if first[n] != second[n]
        ]
        self.unchanged: int = len(common) - len(self.changed)

    @property
    def identical(self) -> bool:
        """Whether both digests are equal."""
        return not (self.missing or self.unexpected or self.changed)

    def _title(self) -> str:
        """Return one line with the number of tensors of each kind of difference."""
        counts = [
            (len(self.changed), "changed"),
            (len(self.missing), "only in the first"),
            (len(self.unexpected), "only in the second"),
        ]
        return title_of(counts, self.unchanged)

    def _table(self) -> Table:
        """Return a row for each tensor that differs."""
        rows = []
        for name, first, second in self.changed:
            field = next(i for i in range(3) if first[i] != second[i])
            rows.append(
                (name, TensorDigest._fields[field], *map(str, (first[field], second[field])))
            )
        for label, names in (("first", self.missing), ("second", self.unexpected)):
            rows += [(name, f"only in the {label}", "", "") for name in names]
        return Table(self._title(), ["tensor", "differs", "first", "second"], rows)


class Digest(Mapping[str, TensorDigest]):
    """The digests of a state's tensors, by name.

    Two states with the same names, dtypes, shapes and bits have equal digests, however their
    tensors are divided among ranks or files. `mlstate.digest` computes them.

    Parameters
    ----------
    entries : mapping of str to TensorDigest
        The digests.

    Notes
    -----
    ``str(digest)`` is ``"1:"``, the version of the definition, and a SHA-256 over the sorted names
    with their dtypes, shapes and values. A digest finds accidents, not attacks: it is not
    cryptographic.

    Examples
    --------
    >>> import numpy as np, mlstate
    >>> before = mlstate.digest({"w": np.arange(6.0).reshape(2, 3)})
    >>> after = mlstate.digest({"w": np.arange(6.0).reshape(2, 3).T})
    >>> before == after, print(before.diff(after))
    1 changed
    tensor  differs  first   second
    w       shape    (2, 3)  (3, 2)
    (False, None)
    """

    def __init__(self, entries: Mapping[str, TensorDigest]) -> None:
        """Copy the entries."""
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> TensorDigest:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digest) and self._entries == other._entries

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        import hashlib

        rows = [[name, *self._entries[name]] for name in sorted(self._entries)]
        text = json.dumps([VERSION, rows]).encode()
        return f"{VERSION}:{hashlib.sha256(text, usedforsecurity=False).hexdigest()}"

    def __repr__(self) -> str:
        return f"<Digest: {len(self):,} tensor{'' if len(self) == 1 else 's'}, {str(self)[:14]}…>"

    def _table(self) -> Table:
        """Return a row for each tensor."""
        rows = [(name, *map(str, entry)) for name, entry in self._entries.items()]
        return Table(str(self), ["tensor", "dtype", "shape", "digest"], rows)

    def _repr_html_(self) -> str:
        return self._table().html()

    def diff(self, other: Digest) -> DigestDiff:
        """Return the names that differ between this digest and another one.

        Parameters
        ----------
        other : Digest
            The second digest.

        Returns
        -------
        DigestDiff
            The differences; printed as a table.
        """
        return DigestDiff(self, other)

    def to_json(self) -> str:
        """Return the digest as JSON text, with a line for each tensor; `from_json` reads it.

        Returns
        -------
        str
            An object with ``"version"`` and, by name, lists of dtype, shape and value.
        """
        lines = [f"  {json.dumps(n)}: {json.dumps(e)}" for n, e in self._entries.items()]
        return f'{{"version": {VERSION}, "tensors": {{\n' + ",\n".join(lines) + "\n}}\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Digest:
        """Return the digest that `to_json` has written.

        Parameters
        ----------
        text : str or bytes
            The text.

        Raises
        ------
        FormatError
            The text has another form, or the digest another version.
        """
        try:
            data = json.loads(text)
            version = data["version"]
            if version == VERSION:
                return cls({name: _entry_of(*entry) for name, entry in data["tensors"].items()})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FormatError(f"the text is not the JSON of a digest: {error!r}") from None
        raise FormatError(
            f"the digest has version {version!r}, and this mlstate computes version {VERSION}: "
            "make it anew"
        )


def _entry_of(dtype: str, shape: list[int], value: str) -> TensorDigest:
    """Return an entry of JSON; raise ValueError if it cannot be one."""
    lengths = tuple(shape)
    is_shape = all(type(length) is int and length >= 0 for length in lengths)
    if not (isinstance(dtype, str) and is_shape and len(value) == _DIGITS):
        raise ValueError(f"no tensor is described by {[dtype, shape, value]!r}")
    int(value, 16)
    return TensorDigest(dtype, lengths, value)


# ---- parts ----


class Part(NamedTuple):
    """The digest of a part of a tensor, and the boxes of the whole tensor that it covers."""

    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    boxes: tuple[Box, ...]
    lanes: Lanes


def add_lanes(lanes: Iterable[Lanes]) -> Lanes:
    """Return the digest of parts together."""
    first, second = 0, 0
    for each in lanes:
        first, second = first + each[0], second + each[1]
    return first % _LANE, second % _LANE


def value_of(lanes: Lanes) -> str:
    """Return a digest as text."""
    return f"{lanes[0]:016x}{lanes[1]:016x}"


def boxes_of(lengths: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Yield boxes, in C order, of the elements `begin` to `end` of a box with these lengths."""
    if begin >= end:
        return
    if not lengths:
        yield (), ()
        return
    inner = prod(lengths[1:])
    first, last = begin // inner, (end - 1) // inner  # rows
    if first == last:
        yield from _in_row(lengths, first, begin - first * inner, end - first * inner)
        return
    if begin % inner:
        yield from _in_row(lengths, first, begin % inner, inner)
        first += 1
    rows = end // inner - first
    if rows:
        yield (first, *[0] * (len(lengths) - 1)), (rows, *lengths[1:])
    if end % inner:
        yield from _in_row(lengths, last, 0, end % inner)


def _in_row(lengths: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Box]:
    """Yield the boxes of the elements `begin` to `end` of one row."""
    for starts, sizes in boxes_of(lengths[1:], begin, end):
        yield (row, *starts), (1, *sizes)


def part_of(value: Any) -> Part:
    """Return the digest of an array, a tensor or a `Shard`.

    Raises CompatibilityError if its bytes cannot be read.
    """
    array, shape = value, None
    if isinstance(value, Shard):
        array, shape = value.array, value.shape
    array = array if is_torch(array) else np.asarray(array)
    if shape is None:
        shape = tuple(array.shape)
        boxes: tuple[Box, ...] = (((0,) * len(shape), shape),)
    else:
        steps, index = value.layout.steps, value.index
        starts, lengths, begin, end, _ = _core.layout_part(steps, shape, index)
        boxes = tuple(
            (tuple(a + b for a, b in zip(starts, inner, strict=True)), sizes)
            for inner, sizes in boxes_of(lengths, begin, end)
        )
    dtype = name_of(array.dtype)
    if len(boxes) == 1:
        lanes = _lanes(array.reshape(boxes[0][1]), dtype, shape, boxes[0][0])
    else:
        flat, at, sums = array.reshape(-1), 0, []
        for starts, sizes in boxes:
            count = prod(sizes)
            sums.append(_lanes(flat[at : at + count].reshape(sizes), dtype, shape, starts))
            at += count
        lanes = add_lanes(sums)
    return Part(dtype, shape, boxes, lanes)


def _lanes(array: Any, dtype: str, shape: tuple[int, ...], starts: tuple[int, ...]) -> Lanes:
    """Return the digest of a box of a tensor with the dtype's name `dtype`."""
    if is_torch(array):
        array = array.detach()
        if is_on_device(array):
            return backend_of(array, TensorBackend).digest_part(array, shape, starts)
    elif dtype not in NAMES:  # only NumPy knows the items: as bytes, on another axis
        if array.dtype.hasobject:
            raise CompatibilityError(f"an array of {array.dtype} has no bytes of its own")
        item, lengths = array.dtype.itemsize, array.shape
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))  # with an axis at least
        array = array.reshape(-1).view(np.uint8).reshape(*lengths, item)
        shape, starts = (*shape, item), (*starts, 0)
    return _core.digest_part(array, shape, starts)


# ---- ranks ----


def parts_from_json(values: Mapping[str, Any]) -> dict[str, Part]:
    """Return the parts of one rank that were JSON."""
    parts = {}
    for name, (dtype, shape, boxes, lanes) in values.items():
        areas = tuple((tuple(starts), tuple(sizes)) for starts, sizes in boxes)
        parts[name] = Part(dtype, tuple(shape), areas, tuple(lanes))
    return parts


def join_parts(ranks: Sequence[Mapping[str, Part]]) -> Digest:
    """Return the digest of tensors whose parts several ranks have.

    Parts that ranks have in common count once. Raises CompatibilityError, with the tensor's name,
    if they differ, or if the parts of a tensor do not cover it exactly.
    """
    by_name: dict[str, dict[int, Part]] = {}  # parts by rank
    for rank, parts in enumerate(ranks):
        for name, part in parts.items():
            by_name.setdefault(name, {})[rank] = part
    return Digest({name: _join(name, parts) for name, parts in by_name.items()})


def _join(name: str, parts: dict[int, Part]) -> TensorDigest:
    """Return the digest of one tensor, whose parts are by rank."""
    for field in ("dtype", "shape"):
        values = {rank: getattr(part, field) for rank, part in parts.items()}
        if len(set(values.values())) > 1:
            raise _error(name, f"ranks have another {field}: {_listed(values)}{_PARTS}")
    _, shape, *_ = first = next(iter(parts.values()))
    copies: dict[tuple[Box, ...], dict[int, Lanes]] = {}
    for rank, part in parts.items():
        copies.setdefault(part.boxes, {})[rank] = part.lanes
    for lanes in copies.values():
        if len(set(lanes.values())) > 1:
            raise _error(name, _odd_ranks(lanes))
    boxes = [box for each in copies for box in each]
    covered, needed = sum(prod(sizes) for _, sizes in boxes), prod(shape)
    if covered > needed or _overlaps(boxes):
        raise _error(name, "parts of it overlap, without being equal parts")
    if covered < needed:
        raise _error(
            name,
            f"its parts have {covered:,} of the {needed:,} elements of shape {shape}; pass the "
            "group= of all ranks that have parts",
        )
    total = add_lanes(next(iter(lanes.values())) for lanes in copies.values())
    return TensorDigest(first.dtype, shape, value_of(total))


_PARTS = "; wrap the part of a tensor: Shard(part, layout, rank, shape=whole_shape)"


def _error(name: str, reason: str) -> CompatibilityError:
    """Return the error for a tensor."""
    return CompatibilityError(f"digest of {shorten(name, _NAME_CHARACTERS)!r}: {reason}", name=name)


def _listed(values: Mapping[int, object]) -> str:
    """Return values by rank as text; equal values together."""
    texts: dict[object, list[str]] = {}
    for rank, value in values.items():
        texts.setdefault(value, []).append(str(rank))
    return "; ".join(f"{value} on {', '.join(ranks)}" for value, ranks in texts.items())


def _odd_ranks(lanes: Mapping[int, Lanes]) -> str:
    """Return which ranks have other bits than most, for an error."""
    (usual, most), (_, second), *_ = [*Counter(lanes.values()).most_common(), (None, 0)]
    if most == second:
        return f"the copies of ranks {join([*map(str, lanes)])} differ{_PARTS}"
    odd = [str(rank) for rank, value in lanes.items() if value != usual]
    names = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {join(odd)}"
    return f"the copy of {names} differs from that of the other {most} ranks"


def _overlaps(boxes: Sequence[Box]) -> bool:
    """Return whether two boxes with elements have an element in common."""
    filled = [box for box in boxes if prod(box[1])]
    if len(filled) < 2 or not filled[0][0]:
        return len(filled) > 1
    starts, sizes = (np.array(each, np.int64) for each in zip(*filled, strict=True))
    ends = starts + sizes
    for number in range(1, len(filled)):  # with all boxes before it
        meets = (starts[:number] < ends[number]) & (starts[number] < ends[:number])
        if cast("bool", meets.all(axis=1).any()):
            return True
    return False
