"""``order="tree"``: sums of gradients whose bits depend on no number of ranks, calls or buckets.

A leaf is one micro-batch with a global index. A node is a pair (level, position): the sum of the
leaves from ``position << level`` to before ``(position + 1) << level``, which is the sum of the two
nodes below it, or the one that exists. So the root depends only on the leaves. Any set of leaves
consists of largest nodes; consecutive leaves of at most 2 log2 of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from .. import _core
from .._common.dtypes import NARROW_FLOATS
from ..collectives._arguments import dtype_name
from ._gradient_ops import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Node: TypeAlias = tuple[int, int]
T = TypeVar("T")

MOST_PENDING = 32  # default limit of sums that are held at once: 65,536 leaves in order


def check_order(order: object, default: str) -> str:
    """Return the argument `order`; raise ValueError unless it is `default` or "tree"."""
    if order not in (default, "tree"):
        raise ValueError(f"order must be {default!r} or 'tree', got {order!r}")
    return str(order)


def subtrees(start: int, end: int) -> Iterator[Node]:
    """Yield the largest nodes of the leaves from `start` to before `end`, in their order."""
    while start < end:
        size = end - start
        level = size.bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        yield level, start >> level
        start += 1 << level


def fold(nodes: dict[Node, T], add: Callable[[T, T], T]) -> T:
    """Return the root of the largest `nodes` of some leaves, at least one; empties `nodes`.

    `add` returns the sum of two nodes, and may change them.
    """
    while len(nodes) > 1:
        level, position = lowest = min(nodes)
        node = nodes.pop(lowest)
        if (level, position ^ 1) in nodes:
            node = add(node, nodes.pop((level, position ^ 1)))
        nodes[level + 1, position >> 1] = node
    return nodes.popitem()[1]


def squares_root(counts: Iterable[int], sums: Sequence[Iterator[float]]) -> float:
    """Return the sum of squares of a parameter, in one tree over its elements.

    `counts`: of the elements of each rank, in rank order. `sums`: by rank, an iterator whose next
    numbers are the sums of its subtrees.
    """
    nodes: dict[Node, float] = {}
    start = 0
    for count, rank_sums in zip(counts, sums, strict=True):
        nodes.update((node, next(rank_sums)) for node in subtrees(start, start + count))
        start += count
    return fold(nodes, float.__add__) if nodes else 0.0


def sum_dtype(name: str) -> Any:
    """Return NumPy's dtype of sums of gradients of the dtype `name`: float32 for narrow floats."""
    return np.dtype("float32" if name in NARROW_FLOATS else name)


def widened(array: Any, memory: Any = None) -> tuple[Any, int]:
    """Return a copy of a gradient in the dtype of sums, and its number of non-finite elements.

    `memory`: NumPy array for the copy; None: new memory.
    """
    copy = memory
    if copy is None:
        copy = np.empty(tuple(array.shape), sum_dtype(dtype_name(array)))
    return copy, _core.reduce([packed(array)], copy, "sum", 1.0)[1]


def _can_be_sum(array: Any) -> bool:
    """Return whether other gradients can be added to this one in place."""
    return (
        isinstance(array, np.ndarray)
        and array.flags.carray  # contiguous, aligned, writeable
        and array.dtype == sum_dtype(dtype_name(array))
        and array.dtype.isnative
    )


class LeafSums:
    """The sums of some leaves: the largest nodes of them, each with arrays by parameter name.

    A parameter that a node lacks had no gradient in its leaves. The arrays are NumPy arrays that
    only this object refers to; it uses the memory of added nodes for later ones.
    """

    def __init__(self, most_pending: int = MOST_PENDING, *, counts: bool = True) -> None:
        """Create an empty set of leaves, of which at most `most_pending` nodes are held at once.

        `counts`: count the non-finite elements of all sums.
        """
        self.nodes: dict[Node, dict[str, Any]] = {}
        self.most_pending = most_pending
        self._counts = counts
        self._spare: dict[str, list[Any]] = {}

    def __contains__(self, node: Node) -> bool:
        """Return whether a leaf of `node` was added."""
        start, end = leaves_of(node)
        return any(start < last and first < end for first, last in map(leaves_of, self.nodes))

    def check(self, node: Node) -> None:
        """Raise ValueError if a leaf of `node` was added before, or it would be one too many."""
        level, position = node
        start = position << level
        if node in self:
            raise ValueError(
                f"leaf {start} was added before; every micro-batch of a step has another index"
            )
        if (level, position ^ 1) not in self.nodes and len(self.nodes) >= self.most_pending:
            raise ValueError(
                f"leaf {start} comes while {len(self.nodes)} sums wait for their neighbours, as "
                "many as max_pending allows; add leaves in order of their indices, or pass a "
                "larger max_pending"
            )

    def add(self, node: Node, arrays: Mapping[str, Any], *, donate: bool = False) -> dict[str, int]:
        """Add a node that this set lacks; return the number of non-finite elements of new sums.

        `arrays`: packed or not, by parameter name; they are only read, except if `donate`: then
        those that can be sums are. Raises as `check`, and CompatibilityError if an array does not
        fit the sums; nothing is added then.
        """
        self.check(node)
        level, position = node
        sums = self.nodes.get((level, position ^ 1), {})
        counts = self._add_arrays(sums, arrays, donate)
        if self.nodes.pop((level, position ^ 1), None) is not None:
            level, position = level + 1, position >> 1
        while (neighbour := self.nodes.pop((level, position ^ 1), None)) is not None:
            counts |= self._merge(neighbour, sums)
            sums, level, position = neighbour, level + 1, position >> 1
        self.nodes[level, position] = sums
        if donate:  # each micro-batch brings memory
            self._spare.clear()
        return counts

    def _add_arrays(
        self, sums: dict[str, Any], arrays: Mapping[str, Any], donate: bool
    ) -> dict[str, int]:
        """Add arrays to `sums`; they are only read, or become sums if `donate`.

        Returns the number of non-finite elements of the sums by name.
        """
        counts, new = {}, {}
        for name, array in arrays.items():
            if name in sums:
                continue
            if donate and _can_be_sum(array):
                new[name] = array
            else:
                memory = self.take_memory(name, tuple(array.shape), sum_dtype(dtype_name(array)))
                new[name], counts[name] = widened(array, memory)
        common = {name: array for name, array in arrays.items() if name in sums}
        counts |= self._accumulate(sums, common)
        sums.update(new)
        return counts

    def _merge(self, sums: dict[str, Any], others: dict[str, Any]) -> dict[str, int]:
        """Add the arrays of a node to `sums`, and use their memory for later nodes.

        Returns the number of non-finite elements of the sums by name.
        """
        common = {name: array for name, array in others.items() if name in sums}
        counts = self._accumulate(sums, common)
        for name, array in common.items():
            self.keep_memory(name, array)
        sums.update({name: array for name, array in others.items() if name not in common})
        return counts

    def _accumulate(self, sums: dict[str, Any], arrays: Mapping[str, Any]) -> dict[str, int]:
        """Add arrays to those of the same names, and return the latter's non-finite elements."""
        if not arrays:
            return {}
        names, targets = list(arrays), [sums[name] for name in arrays]
        if not self._counts:
            _core.accumulate(names, targets, list(arrays.values()), 1.0, False)
            return {}
        partials = _core.accumulate(names, targets, list(arrays.values()), 1.0, True)
        return dict(zip(names, [count for _, count in partials], strict=True))

    def take_memory(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array for a sum: one of an earlier sum of the parameter, or a new one."""
        spare: list[Any] = self._spare.get(name) or [None]
        array = spare.pop()
        is_usable = array is not None and (array.shape, array.dtype) == (shape, dtype)
        return array if is_usable else np.empty(shape, dtype)

    def keep_memory(self, name: str, array: Any) -> None:
        """Keep an array, which nothing else refers to, for a later sum of the parameter."""
        self._spare.setdefault(name, []).append(array)

    def missing(self, start: int = 0) -> str:
        """Return a text about the first missing leaves from `start` on, or "" if none is."""
        for first, end in sorted(map(leaves_of, self.nodes)):
            if first > start:
                return f"leaf {start} is missing" + (
                    f", and all to {first - 1}" if first - start > 1 else ""
                )
            start = end
        return ""

    @property
    def first(self) -> int:
        """The lowest index of a leaf; 0 if there is none."""
        return min((leaves_of(node)[0] for node in self.nodes), default=0)

    @property
    def end(self) -> int:
        """The highest index of a leaf, plus 1."""
        return max((leaves_of(node)[1] for node in self.nodes), default=0)

    def take_total(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Return the root by parameter name, and the non-finite elements of new sums; empties this.

        The caller owns the arrays.
        """
        counts: dict[str, int] = {}

        def add(sums: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
            counts.update(self._merge(sums, others))
            return sums

        return (fold(self.nodes, add) if self.nodes else {}), counts

    def total(self) -> dict[str, Any]:
        """Return the root by parameter name; the sums stay, and the caller only reads the root.

        Copies all sums if there are several.
        """
        if len(self.nodes) == 1:
            return next(iter(self.nodes.values()))
        copies = LeafSums(self.most_pending)
        copies.nodes = {
            node: {name: array.copy() for name, array in sums.items()}
            for node, sums in self.nodes.items()
        }
        return copies.take_total()[0]

    def clear(self) -> None:
        """Remove all leaves; their memory is kept for later ones."""
        for sums in self.nodes.values():
            for name, array in sums.items():
                self.keep_memory(name, array)
        self.nodes.clear()


def leaves_of(node: Node) -> tuple[int, int]:
    """Return the first leaf of a node, and the one after its last."""
    level, position = node
    return position << level, (position + 1) << level
