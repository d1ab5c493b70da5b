"""``order="tree"``: sums of gradients whose bits depend on no number of ranks, calls or buckets.

A leaf is one micro-batch with a global index. A node is a pair (level, position): the sum of the
leaves from ``position << level`` to before ``(position + 1) << level``, which is the sum of the two
nodes below it, or the one that exists. So the root depends only on the leaves. Any set of leaves
consists of largest nodes; consecutive leaves of at most 2 log2 of them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from .. import _core
from .._common.dtypes import NARROW_FLOATS
from ..collectives._arguments import dtype_name
from ._gradient_ops import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

Node: TypeAlias = tuple[int, int]
T = TypeVar("T")

MOST_PENDING = 32  # default limit of sums that are held at once: 65,536 leaves in order


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


def squares_root(parts: Iterable[tuple[int, Sequence[float]]]) -> float:
    """Return the sum of squares of a parameter, in one tree over its elements.

    `parts`: of each rank, the number of elements and the sums of their subtrees, in rank order.
    """
    nodes: dict[Node, float] = {}
    start = 0
    for count, sums in parts:
        nodes.update(zip(subtrees(start, start + count), sums, strict=True))
        start += count
    return fold(nodes, float.__add__) if nodes else 0.0


def sum_dtype(name: str) -> Any:
    """Return NumPy's dtype of sums of gradients of the dtype `name`: float32 for narrow floats."""
    return np.dtype("float32" if name in NARROW_FLOATS else name)


def widened(array: Any, memory: Any = None) -> tuple[Any, int]:
    """Return a NumPy copy of a gradient in the dtype of its sums, and its non-finite elements.

    `memory`: array for the copy; None: new memory.
    """
    copy = memory
    if copy is None:
        copy = np.empty(tuple(array.shape), sum_dtype(dtype_name(array)))
    return copy, _core.reduce([packed(array)], copy, "sum", 1.0)[1]


class LeafSums:
    """The sums of some leaves: the largest nodes of them, each with arrays by parameter name.

    A parameter that a node lacks had no gradient in its leaves. The arrays are NumPy arrays that
    only this object refers to; those of added nodes are kept for later ones.
    """

    def __init__(self, most_pending: int = MOST_PENDING) -> None:
        """Create an empty set of leaves, of which at most `most_pending` nodes are held at once."""
        self.nodes: dict[Node, dict[str, Any]] = {}
        self._most_pending = most_pending
        self._spare: dict[str, list[Any]] = {}

    def check(self, node: Node) -> None:
        """Raise ValueError if leaves of `node` were added before, or it would be one too many."""
        start, end = _leaves_of(node)
        for other in self.nodes:
            other_start, other_end = _leaves_of(other)
            if start < other_end and other_start < end:
                raise ValueError(
                    f"leaf {max(start, other_start)} was added before; every micro-batch of a step "
                    "has another index"
                )
        level, position = node
        if (level, position ^ 1) not in self.nodes and len(self.nodes) >= self._most_pending:
            raise ValueError(
                f"leaf {start} comes while {len(self.nodes)} sums wait for their neighbours, as "
                "many as max_pending allows; add leaves in order of their indices, or pass a "
                "larger max_pending"
            )

    def add(self, node: Node, arrays: Mapping[str, Any]) -> dict[str, int]:
        """Add a node that this set lacks; return the number of non-finite elements of new sums.

        `arrays`: packed or not, by parameter name; they are only read. Raises as `check`, and
        CompatibilityError if an array does not fit the sums; nothing is added then.
        """
        self.check(node)
        level, position = node
        sums = self.nodes.get((level, position ^ 1), {})
        counts = self._add_to(sums, arrays, owned=False)
        while self.nodes.pop((level, position ^ 1), None) is not None:
            level, position = level + 1, position >> 1
            neighbour = self.nodes.get((level, position ^ 1))
            if neighbour is not None:
                counts |= self._add_to(neighbour, sums, owned=True)
                sums = neighbour
        self.nodes[level, position] = sums
        return counts

    def _add_to(
        self, sums: dict[str, Any], arrays: Mapping[str, Any], *, owned: bool
    ) -> dict[str, int]:
        """Add `arrays` to `sums` in place, and return non-finite elements of new sums by name.

        `owned`: the arrays are of a node, and not used after this call. Otherwise they are copied
        where `sums` has no array of the name.
        """
        counts, first = {}, {name: array for name, array in arrays.items() if name not in sums}
        for name, array in () if owned else first.items():
            spare = self._spare.get(name)
            first[name], counts[name] = widened(array, spare.pop() if spare else None)
        names = [name for name in arrays if name in sums]
        targets, sources = [sums[name] for name in names], [arrays[name] for name in names]
        partials = _core.accumulate(names, targets, sources, 1.0, True)
        for name, source, (_, count) in zip(names, sources, partials, strict=True):
            counts[name] = count
            if owned:
                self._spare.setdefault(name, []).append(source)
        sums.update(first)
        return counts

    def missing(self, start: int = 0) -> str:
        """Return a text about the first missing leaves from `start` on, or "" if none is."""
        for first, end in sorted(map(_leaves_of, self.nodes)):
            if first > start:
                return f"leaf {start} is missing" + (
                    f", and all to {first - 1}" if first - start > 1 else ""
                )
            start = end
        return ""

    @property
    def first(self) -> int:
        """The lowest index of a leaf; 0 if there is none."""
        return min((_leaves_of(node)[0] for node in self.nodes), default=0)

    @property
    def end(self) -> int:
        """The highest index of a leaf, plus 1."""
        return max((_leaves_of(node)[1] for node in self.nodes), default=0)

    def take_total(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Return the root by parameter name, and the non-finite elements of new sums; empties this.

        The caller owns the arrays.
        """
        counts: dict[str, int] = {}

        def add(sums: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
            counts.update(self._add_to(sums, others, owned=True))
            return sums

        return (fold(self.nodes, add) if self.nodes else {}), counts

    def total(self) -> dict[str, Any]:
        """Return the root by parameter name; the sums stay, and the caller only reads the root.

        Copies all sums if there are several.
        """
        if len(self.nodes) == 1:
            return next(iter(self.nodes.values()))
        copies = LeafSums(self._most_pending)
        copies.nodes = {
            node: {name: array.copy() for name, array in sums.items()}
            for node, sums in self.nodes.items()
        }
        return copies.take_total()[0]

    def clear(self) -> None:
        """Remove all leaves; their memory is kept for later ones."""
        for sums in self.nodes.values():
            for name, array in sums.items():
                self._spare.setdefault(name, []).append(array)
        self.nodes.clear()


def _leaves_of(node: Node) -> tuple[int, int]:
    """Return the first leaf of a node, and the one after its last."""
    level, position = node
    return position << level, (position + 1) << level


class Leaves:
    """What one rank sends in a pass: its nodes, and the parameters that each of them lacks."""

    __slots__ = ("absent", "are_gradients", "nodes")

    def __init__(
        self, nodes: Collection[Node], absent: Sequence[Collection[int]], are_gradients: bool
    ) -> None:
        """`absent`: by node, positions of parameters in the bucket.

        `are_gradients`: the nodes are gradients as they were computed, not sums.
        """
        self.nodes = [(int(level), int(position)) for level, position in nodes]
        self.absent = [set(each) for each in absent]
        self.are_gradients = are_gradients


class LeafStep:
    """The leaves of one optimizer step of an `FSDPBackwardHook` with ``order="tree"``.

    Sums of this rank's parts are in `sums_of`, by bucket. Leaves that this rank has computed inside
    `no_sync` are held as sums of full gradients, until the next pass sends them.
    """

    def __init__(self, rank: int, world_size: int, most_pending: int) -> None:
        """Create a step without leaves; at most `most_pending` sums are held at once."""
        self._rank, self._world_size = rank, world_size
        self._most_pending = most_pending
        self._shards: dict[tuple[str, ...], LeafSums] = {}
        self.given: int | None = None  # index of the next leaf
        self.index: int | None = None  # leaf of the running pass; None: it only sends held leaves
        self.nodes: list[Node] = []  # that the running pass sends
        self.is_new = True  # no leaf was computed yet
        self.has_ended = False  # all ranks have sent all of their leaves
        self.reset()

    def reset(self) -> None:
        """Drop all leaves: the next one starts a new step."""
        for sums in self._shards.values():
            sums.clear()
        self._count = 0  # leaves that this rank has begun
        self._drop_held()
        self.is_new, self.has_ended = True, False

    def _drop_held(self) -> None:
        self._held: dict[str, LeafSums] = {}  # by parameter
        self._held_of: dict[str, set[int]] = {}  # leaves in which the parameter had a gradient
        self._held_leaves: list[int] = []
        self._problems: dict[str, str] = {}  # by parameter: why a held leaf cannot be sent

    def hold_leaf(self) -> None:
        """Begin a leaf inside `no_sync`, with the given index."""
        assert self.given is not None
        self._held_leaves.append(self.given)
        self._count += 1

    def hold(self, name: str, gradient: Any) -> None:
        """Add a gradient that was computed inside `no_sync` to the sums that this rank holds.

        Raises ValueError if the leaf has no index. Errors of the gradient are raised by the pass
        that sends it, on all ranks.
        """
        if self.given is None:
            raise ValueError(
                "inside no_sync, order='tree' needs the index of each micro-batch: run its "
                "backward pass in `with hook.leaf(index):`"
            )
        leaves = self._held_of.setdefault(name, set())
        sums = self._held.setdefault(name, LeafSums(self._most_pending))
        try:
            sums.add((0, self.given), {name: gradient})
            leaves.add(self.given)
        except Exception as error:  # other ranks wait for this one
            self._problems.setdefault(name, f"{type(error).__name__}: {error}")

    def begin(self, *, is_leaf: bool) -> None:
        """Begin a pass; `is_leaf`: it computes a leaf, in addition to those held before."""
        self.index = None
        leaves = list(self._held_leaves)
        if is_leaf:
            own = self._count * self._world_size + self._rank
            self.index = own if self.given is None else self.given
            leaves.append(self.index)
            self._count += 1
        covered = LeafSums(max(len(leaves), 1))
        twice = []
        for leaf in leaves:
            try:
                covered.add((0, leaf), {})
            except ValueError:  # all ranks raise it when they see the node
                twice.append((0, leaf))
        self.nodes = [*sorted(covered.nodes, key=_leaves_of), *twice]

    @property
    def is_idle(self) -> bool:
        """Whether the pass sends nothing: this rank has no more leaves in this step."""
        return not self.nodes

    @property
    def are_gradients(self) -> bool:
        """Whether the pass sends a gradient as it was computed, or nothing."""
        return not self._held_leaves

    def take(self, name: str, gradient: Any) -> tuple[dict[Node, Any], str]:
        """Return the arrays of parameter `name` by node, and a problem or "".

        `gradient`: of the pass; None: it has none.
        """
        problem = self._problems.get(name, "")
        if problem or self.are_gradients:
            nodes = {} if gradient is None or self.index is None else {(0, self.index): gradient}
            return nodes, problem
        sums = self._held.pop(name, None) or LeafSums(self._most_pending)
        try:
            for leaf in dict.fromkeys(self._held_leaves):
                if leaf not in self._held_of.get(name, ()):
                    sums.add((0, leaf), {})
            if self.index is not None and self.index not in self._held_leaves:
                sums.add((0, self.index), {} if gradient is None else {name: gradient})
        except Exception as error:  # other ranks wait for this one
            return {}, f"{type(error).__name__}: {error}"
        return {node: arrays[name] for node, arrays in sums.nodes.items() if arrays}, ""

    def end_pass(self) -> None:
        """End a pass that has sent its leaves."""
        self._drop_held()

    def sums_of(self, names: Iterable[str]) -> LeafSums:
        """Return the sums of the bucket with these parameters."""
        return self._shards.setdefault(tuple(names), LeafSums(self._most_pending))

    def check_complete(self) -> int:
        """Return the number of leaves; raise ValueError, on all ranks alike, if one is missing."""
        sums = next(iter(self._shards.values()), LeafSums())
        missing = sums.missing()
        if missing:
            raise ValueError(f"{missing}, and leaf {sums.end - 1} was added")
        return sums.end

    def take_totals(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Return the sums of all leaves by parameter, and their non-finite elements; end the step.

        Parameters without a gradient in any leaf are left out.
        """
        totals: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for sums in self._shards.values():
            roots, nonfinite = sums.take_total()
            totals |= roots
            counts |= nonfinite
        self.reset()
        return totals, counts


def own_part(array: Any, counts: Sequence[int], rank: int) -> Any:
    """Return the part of `rank` of a packed array, flat."""
    start = sum(counts[:rank])
    return array.reshape(-1)[start : start + counts[rank]]


def zeros_like_sums(unit_dtype: str, shape: tuple[int, ...]) -> Any:
    """Return zeros in the dtype of sums of `unit_dtype`, in place of a node without a gradient."""
    return np.zeros(prod(shape), sum_dtype(unit_dtype))
