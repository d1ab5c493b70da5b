"""Leaves of ``order="tree"`` on several ranks: what a pass sends, and the sums of a step.

`_leaf_order` defines leaves and nodes. In each pass a rank sends the full gradients of one leaf, or
the largest nodes of the leaves that it has held in `no_sync`. The owner of a part adds the parts of
all ranks to its tree.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from .. import _core
from .._common.arrays import is_torch
from ..collectives._arguments import failed
from ._gradient_ops import on_host
from ._leaf_order import LeafSums, Node, leaves_of, sum_dtype, widened
from ._sharding_unit import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ._bucket import Entry
    from ._config import FSDP
    from ._reducer import Reducer
    from ._sharding_unit import FSDPShardingUnit

_SCRATCH = 16  # intermediate sums (MLS_SUM_SCRATCH)


class SentLeaves(NamedTuple):
    """What a rank sends of a bucket: nodes, and the parameters that lack a gradient in each."""

    nodes: list[Node]
    absent: list[list[int]]  # by node: positions in the bucket
    are_gradients: bool  # as they were computed, instead of sums of leaves

    @classmethod
    def unpack(cls, data: bytes) -> SentLeaves:
        """Return the leaves that `LeafStep.describe` wrote to `data`."""
        nodes, absent, are_gradients = json.loads(data)
        return cls([(level, position) for level, position in nodes], absent, are_gradients)


class LeafStep:
    """The leaves of one optimizer step of an `FSDPBackwardHook` with ``order="tree"``.

    Sums of this rank's parts are in `sums_of`, by bucket. Leaves that this rank has computed inside
    `no_sync` are held as sums of full gradients, until the next pass sends them.
    """

    def __init__(self, fsdp: FSDP) -> None:
        """Create a step without leaves."""
        self._rank, self._world_size = fsdp.rank, fsdp.world_size
        self._most_pending = fsdp.max_pending
        self._shards: dict[tuple[str, ...], LeafSums] = {}
        self._tensors: dict[str, Any] = {}  # an empty tensor, by parameter whose gradient is one
        self._zeros: dict[str, Any] = {}  # by dtype
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
        self.drop_held_leaves()
        self.is_new, self.has_ended = True, False

    def drop_held_leaves(self) -> None:
        """Drop the leaves that this rank holds: they are sent, or the step failed."""
        self._held: dict[str, LeafSums] = {}  # by parameter
        self._held_leaves: list[int] = []
        self._problems: dict[str, str] = {}  # by parameter: why a held leaf cannot be sent

    def hold_leaf(self, index: int) -> None:
        """Begin a leaf inside `no_sync`."""
        self._held_leaves.append(index)
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
        if self.given not in self._held_leaves:  # `leaf` was called before `no_sync`
            self.hold_leaf(self.given)
        sums = self._held.setdefault(name, LeafSums(self._most_pending))
        try:
            sums.add((0, self.given), {name: gradient})
        except Exception as error:  # other ranks wait for this one
            self._problems.setdefault(name, f"{type(error).__name__}: {error}")

    def begin(self, *, is_leaf: bool) -> None:
        """Begin a pass; `is_leaf`: it computes a leaf, in addition to those held before."""
        self.index = None
        leaves = list(self._held_leaves)
        if is_leaf:
            next_in_turn = self._count * self._world_size + self._rank
            self.index = next_in_turn if self.given is None else self.given
            leaves.append(self.index)
            self._count += 1
        covered = LeafSums(max(len(leaves), 1))
        for leaf in dict.fromkeys(leaves):
            covered.add((0, leaf), {})
        twice = [(0, leaf) for i, leaf in enumerate(leaves) if leaf in leaves[:i]]
        # all ranks see the nodes of all, and raise an error for one that comes twice
        self.nodes = [*sorted(covered.nodes, key=leaves_of), *twice]

    @property
    def is_idle(self) -> bool:
        """Whether the pass sends nothing: this rank has no more leaves in this step."""
        return not self.nodes

    @property
    def are_gradients(self) -> bool:
        """Whether the pass sends a gradient as it was computed, or nothing."""
        return not self._held_leaves

    def take(self, name: str, gradient: Any, problem: str) -> tuple[dict[Node, Any], str]:
        """Return the arrays of parameter `name` by node, and a problem or "".

        `gradient`: of the pass; None: it has none. `problem`: of this gradient, or "".
        """
        problem = problem or self._problems.get(name, "")
        if gradient is not None and not on_host(gradient):
            problem = f"order='tree' adds gradients in main memory, not on {gradient.device}"
        if problem or self.are_gradients:
            nodes = {} if gradient is None or self.index is None else {(0, self.index): gradient}
            return nodes, problem
        sums = self._held.pop(name, None) or LeafSums(self._most_pending)
        try:
            for leaf in {*self._held_leaves, self.index}:
                if leaf is not None and (0, leaf) not in sums:
                    is_own = leaf == self.index and gradient is not None
                    sums.add((0, leaf), {name: gradient} if is_own else {})
        except Exception as error:  # other ranks wait for this one
            return {}, f"{type(error).__name__}: {error}"
        return {node: arrays[name] for node, arrays in sums.nodes.items() if arrays}, ""

    def zeros(self, unit: FSDPShardingUnit) -> Any:
        """Return zeros in place of a gradient, which are sent but not added; they are shared."""
        count = sum(unit.counts)
        memory = self._zeros.get(unit.dtype)
        if memory is None or len(memory) < count:
            memory = self._zeros[unit.dtype] = np.zeros(count, numpy_dtype(unit.dtype))
        return memory[:count].reshape(unit.shape)

    def describe(self, entries: Sequence[Entry]) -> bytes:
        """Return `SentLeaves` of a bucket as bytes, for the header before it."""
        absent = [
            [i for i, entry in enumerate(entries) if node not in (entry.nodes or {})]
            for node in self.nodes
        ]
        return json.dumps(SentLeaves(self.nodes, absent, self.are_gradients)).encode()

    def sums_of(self, entries: Iterable[Entry]) -> LeafSums:
        """Return the sums of the bucket with these entries."""
        for entry in entries:
            if is_torch(entry.source):
                self._tensors[entry.unit.parameter_name] = entry.source.new_empty(0)
        names = tuple([entry.unit.parameter_name for entry in entries])
        return self._shards.setdefault(names, LeafSums(self._most_pending))

    def store_totals(
        self, units: Mapping[str, FSDPShardingUnit], reducer: Reducer, is_mean: bool
    ) -> int:
        """Store the sums of all leaves in `units`, end the step, and return the number of leaves.

        `is_mean`: divide by that number, instead of the divisor of `reducer`. Raises
        CollectiveError, on all ranks alike, if a leaf is missing or a sum is not finite.
        """
        shards = [sums for sums in self._shards.values() if sums.nodes]
        count = shards[0].end if shards else 0
        missing = shards[0].missing() if shards else ""
        if missing:
            raise failed("finish_step", self._rank, f"{missing}, and leaf {count - 1} was added")
        bad: dict[str, int] = {}
        for sums in shards:
            totals, nonfinite = sums.take_total()
            bad |= {name: number for name, number in nonfinite.items() if number}
            for name, total in totals.items():
                terms = reducer.terms(units[name])
                divisor = float(count) if is_mean else terms.divisor
                dtype = terms.reduce_dtype or units[name].dtype
                units[name].local_gradient = self._finished(units[name], total, divisor, dtype)
        self.reset()
        if not reducer.refuses_nonfinite:
            return count
        texts = reducer.group.gather_bytes(json.dumps(bad).encode(), timeout=reducer.timeout)
        for rank, text in enumerate(texts):
            for name, number in json.loads(text).items():
                where = f"shard of rank {rank}: {number:,}"
                reason = f"{name!r}: the sum is not finite, all gradients are ({where})"
                raise failed("finish_step", self._rank, reason)
        return count

    def _finished(self, unit: FSDPShardingUnit, total: Any, divisor: float, dtype: str) -> Any:
        """Return the flat sum `total` of a unit's part, divided and rounded to `dtype`.

        It is a tensor if a gradient was one.
        """
        tensor, result = self._tensors.get(unit.parameter_name, unit.like), total
        is_rounded = total.dtype != numpy_dtype(dtype)
        if tensor is not None:
            result = tensor.new_empty(len(total), dtype=getattr(sys.modules["torch"], dtype))
        elif is_rounded:
            result = np.empty(len(total), numpy_dtype(dtype))
        if divisor != 1 or result is not total:
            _core.reduce([total], total if is_rounded else result, "sum", divisor)
        if is_rounded:
            _core.state_load({"": result}, {"": total}, True, True, False)
        return result.reshape(unit.local_shape)


def add_leaves(
    reducer: Reducer, entries: Sequence[Entry], sent: Sequence[SentLeaves], sums: LeafSums
) -> None:
    """Exchange the nodes of a bucket, one of each rank at a time, and add them to `sums`.

    `sent`: the leaves of each rank. Sets `nonfinite` of each entry. Raises CollectiveError, on all
    ranks alike, for a leaf that was added before, or beyond `max_pending`.
    """
    for number in range(max(len(each.nodes) for each in sent)):
        _add_round(reducer, entries, sent, sums, number)


def _add_round(
    reducer: Reducer,
    entries: Sequence[Entry],
    sent: Sequence[SentLeaves],
    sums: LeafSums,
    number: int,
) -> None:
    """Exchange node `number` of each rank that has so many, and add them; as `add_leaves`."""
    senders = [rank for rank, each in enumerate(sent) if number < len(each.nodes)]
    joined = _join(sums, [(sent[rank].nodes[number], rank) for rank in senders], reducer.rank)
    are_gradients = all(each.are_gradients for each in sent)
    own_nodes = sent[reducer.rank].nodes[number : number + 1]
    # by ranks and nodes that lack a parameter, and whether its gradients are as wide as sums
    orders: dict[tuple[frozenset[Any], bool], SumOrder] = {}
    new: dict[Node, dict[str, Any]] = {
        node: sums.nodes[node] if node == operand else {} for node, operand in joined.items()
    }
    segments, unused = [], []
    for i, entry in enumerate(entries):
        unit, name = entry.unit, entry.unit.parameter_name
        absent = frozenset(
            [rank for rank in senders if i in sent[rank].absent[number]]
            + [node for node, arrays in sums.nodes.items() if name not in arrays]
        )
        is_wide = not are_gradients or numpy_dtype(unit.dtype) == sum_dtype(unit.dtype)
        order = orders.get((absent, is_wide))
        if order is None:
            order = SumOrder(joined, absent, reducer.world_size, is_wide=is_wide)
            orders[absent, is_wide] = order
        size = (unit.counts[reducer.rank],)
        memories = tuple(
            [
                sums.nodes[node][name]
                if node is not None
                else sums.take_memory(name, size, sum_dtype(unit.dtype))
                for node in order.memories
            ]
        )
        source = entry.segment()[0] if are_gradients else _sum_to_send(entry, own_nodes)
        segments.append((source, unit.counts, memories, order.codes))
        for node, index in order.results.items():
            new[node][name] = memories[index]
        unused += [(name, m) for j, m in enumerate(memories) if j not in order.results.values()]
    handle = reducer.new_handle(segments, is_packed=are_gradients)
    partials = reducer.reduce_on_host(handle, f"leaves of {len(entries)} arrays")
    sums.nodes = new
    for name, memory in unused:
        sums.keep_memory(name, memory)
    for entry, (_, nonfinite) in zip(entries, partials, strict=True):
        # a later leaf may begin a sum without them
        entry.nonfinite = max(entry.nonfinite, nonfinite)


def _join(sums: LeafSums, sent: Iterable[tuple[Node, int]], own_rank: int) -> dict[Node, Operand]:
    """Return the nodes that `sums` has after it adds nodes, and how they are computed.

    `sent`: nodes, and the ranks that send them. An unchanged node is its own operand. Raises
    CollectiveError for a node that cannot be added; `sums` is unchanged.
    """
    joined = LeafSums(sums.most_pending)
    nodes: dict[Node, Any] = joined.nodes
    nodes.update({node: node for node in sums.nodes})
    for (level, position), rank in sorted(sent):
        try:
            joined.check((level, position))
        except ValueError as error:
            raise failed("backward pass", own_rank, f"rank {rank}: {error}") from None
        operand: Operand = rank
        while (neighbour := nodes.pop((level, position ^ 1), None)) is not None:
            operand, level, position = Pair(operand, neighbour), level + 1, position >> 1
        nodes[level, position] = operand
    return nodes


@dataclass(frozen=True, eq=False)  # a tuple may be equal to a node
class Pair:
    """The sum of two operands."""

    left: Operand
    right: Operand


Operand: TypeAlias = "int | Node | Pair"  # what a rank sends, a held node, or a sum


class SumOrder:
    """The order in which the core computes the sums of one parameter (`mls_sums`).

    A node of the tree has two operands, whose order does not change the bits. So the core adds all
    operands of one branch in one pass; only a second branch needs an intermediate sum.
    """

    def __init__(
        self,
        joined: Mapping[Node, Operand],
        absent: frozenset[Any],
        world_size: int,
        *,
        is_wide: bool,
    ) -> None:
        """Find the order for the nodes of `_join`.

        `absent`: ranks and nodes without the parameter. `is_wide`: gradients and sums have the same
        dtype; otherwise gradients are first added to one another.
        """
        self.memories: list[Node | None] = []  # arrays of held nodes; None: new ones
        self.results: dict[Node, int] = {}  # by node: index in `memories`
        self._codes: list[int] = []
        self._world_size, self._absent, self._is_wide = world_size, absent, is_wide
        for node, operand in joined.items():
            index = len(self.memories)
            numbered = None if operand == node else self._numbered(operand)
            if numbered is not None:
                self.results[node] = index
                self.memories += [None] if index == len(self.memories) else []
                if numbered != world_size + _SCRATCH + index:
                    self._add(numbered, world_size + _SCRATCH + index, world_size)
        self.memories = self.memories or [None]  # the core needs one
        self.codes = np.array(self._codes, np.uint64)

    def _numbered(self, operand: Operand) -> Any:
        """Return an operand with numbers of the core for ranks and nodes; None: all are absent."""
        if operand in self._absent:
            return None
        if isinstance(operand, Pair):
            left, right = self._numbered(operand.left), self._numbered(operand.right)
            return right if left is None else left if right is None else Pair(left, right)
        if isinstance(operand, int):
            return operand
        self.memories.append(operand)
        return self._world_size + _SCRATCH + len(self.memories) - 1

    def _add(self, operand: Any, target: int, free: int) -> None:
        """Append the code of `operand`; intermediate sums from number `free` on are unused."""
        addends = self._narrow_gradients(operand) or self._addends(operand, free)
        self._codes += [target, len(addends), *addends]

    def _addends(self, operand: Any, free: int) -> list[int]:
        """Return the numbers whose sum in this order is `operand`."""
        if self._is_addend(operand):
            return [operand]
        assert free < self._world_size + _SCRATCH, "more than 65,536 ranks"
        if not isinstance(operand, Pair) or self._narrow_gradients(operand):
            self._add(operand, free, free + 1)
            return [free]
        first: Any = operand.left
        last: Any = operand.right
        if self._is_addend(first):
            first, last = last, first
        if self._is_addend(last):
            return [*self._addends(first, free), last]
        self._add(last, free, free + 1)
        return [*self._addends(first, free + 1), free]

    def _is_addend(self, operand: Any) -> bool:
        return isinstance(operand, int) and (self._is_wide or operand >= self._world_size)

    def _narrow_gradients(self, operand: Any) -> list[int]:
        """Return the numbers of an operand of one or two gradients narrower than sums, or []."""
        operands = [operand.left, operand.right] if isinstance(operand, Pair) else [operand]
        ranks = [each for each in operands if isinstance(each, int) and each < self._world_size]
        return [] if self._is_wide or len(ranks) < len(operands) else ranks


def _sum_to_send(entry: Entry, nodes: Sequence[Node]) -> Any:
    """Return the array of an entry's only node in `nodes`, wide and flat; zeros if it has none."""
    unit = entry.unit
    array = None if not nodes else (entry.nodes or {}).get(nodes[0])
    if array is None:
        return np.zeros(sum(unit.counts), sum_dtype(unit.dtype))
    if not isinstance(array, np.ndarray) or array.dtype != sum_dtype(unit.dtype):
        array, _ = widened(array)
    return array.reshape(-1)
