"""`merge_states`, `compare_states`: shards to whole tensors; gaps, overlaps, ranks that differ."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from .._common.arrays import (
    memory_key,
    new_packed,
    pairs_sharing_elements,
    refuse_unstorable,
)
from .._common.text import ranks_text, shorten
from .._sharding.layout import Layout, Shard
from ..errors import CompatibilityError
from ..state._compatibility import LISTED, LONGEST
from ..state._diff import TensorChange
from ..state._group_merge import merge_groups
from ..state._optimizer_state import OptimizerStateDict
from ..state._state_dict import StateDict
from ._byte_ranges import Part, array_of, copy_part, digest, dtype_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .._sharding.layout import Steps
    from .._types import Array


class RankDifference(NamedTuple):
    """One difference that prevents merging the states of several ranks.

    Attributes
    ----------
    kind : str
        ``"missing"``: ranks lack the tensor. ``"kind"``: some have a whole array, some a
        `Shard`. ``"dtype"``, ``"shape"``, ``"layout"``: this property differs. ``"gap"``: no
        rank has some part. ``"elements"``: replicas differ. ``"memory"``: the tensor shares
        memory with another one, unlike on the rank that sends.
    name : str
        The tensor.
    ranks : tuple of int
        The ranks that differ from the majority; empty for a gap.
    text : str
        Description in one line.
    change : TensorChange or None
        The change of elements, if both replicas were available.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.collectives import SingleGroup
    >>> from mlstate.distributed import DistributedStateCollector
    >>> collector = DistributedStateCollector(SingleGroup())
    >>> states = [{"w": np.zeros(3)}, {"w": np.array([0.0, 0.0, 2.0])}]
    >>> collector.compare_states(states)[0].text
    'w: rank 1 differs from rank 0 in 1 of 3 elements, by at most 2'
    """

    kind: str
    name: str
    ranks: tuple[int, ...]
    text: str
    change: TensorChange | None = None


class Entry(NamedTuple):
    """A rank's description of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    steps: Steps | None  # of its layout; None: the rank has a whole array
    part: int  # index of the rank's part in the layout; 0 for a whole array
    replica: int  # number of the copy of this part, from 0
    tied: str | None  # an earlier tensor with the same memory on this rank
    overlap: str | None = None  # how it shares memory with others in any other way


class Tensor(NamedTuple):
    """A tensor of the merged state; a whole array is part 0."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    steps: Steps | None  # of its layout; None: ranks have whole arrays
    holders: dict[int, list[int]]  # for each part, the ranks that own it, replica 0 first
    tied: str | None = None  # name of an earlier tensor with the same memory on every rank

    def part(self, index: int) -> Part:
        """Return the position of part `index` in the tensor."""
        return Part(self.steps, self.shape, index)


# ---- describing ----


def describe(state: Mapping[str, object]) -> list[Entry]:
    """Return the description of each tensor of this rank's state, for other ranks.

    Reads no element. Raises TypeError for arrays of Python objects, and UnstorableError for tensors
    without plain memory, such as sparse ones.
    """
    entries = []
    # the first tensor over each memory, with its array: keys of empty ones are ids of objects
    seen: dict[Any, tuple[str, Any]] = {}
    for name, value in state.items():
        refuse_unstorable({name: value}, every=True)
        array = array_of(value)
        if getattr(array.dtype, "hasobject", False):
            raise TypeError(f"{name!r} holds references to objects of this process")
        shard = value if isinstance(value, Shard) else None
        shape = tuple(array.shape) if shard is None else shard.shape
        steps = None if shard is None else shard.layout._steps
        part = 0 if shard is None else shard.index
        first, _ = seen.setdefault((memory_key(array), shape, steps, part), (name, array))
        tied = None if first == name else first
        replica = 0 if shard is None else shard.replica
        entries.append(Entry(name, dtype_of(array), shape, steps, part, replica, tied))
    return entries


def with_overlaps(state: Mapping[str, object], entries: list[Entry]) -> list[Entry]:
    """Return the entries of a state, with `overlap` set for arrays that share some elements.

    Texts are equal for equal strides, shapes and distances. `entries`: the result of `describe`.
    """
    # ranks may order names differently
    names = sorted(entry.name for entry in entries if entry.tied is None)
    arrays = {name: array_of(state[name]) for name in names}
    overlaps: dict[str, str] = {}
    for first, second in sorted(pairs_sharing_elements(arrays)):
        # address, then item bytes, shape and strides
        left, right = memory_key(arrays[first]), memory_key(arrays[second])
        distance = right[0] - left[0]  # type: ignore[operator]
        overlaps.setdefault(second, f"{first!r} ({distance} bytes, {left[1:4]}, {right[1:4]})")
    return [entry._replace(overlap=overlaps.get(entry.name)) for entry in entries]


def entry_of(fields: Iterable[Any]) -> Entry:
    """Return the entry whose members, in order, were transferred as JSON: lists become tuples."""
    name, dtype, shape, steps, *rest = fields
    pairs = None if steps is None else tuple((axis, parts) for axis, parts in steps)
    return Entry(name, dtype, tuple(shape), pairs, *rest)


# ---- comparing descriptions ----


def groups_of(values: Mapping[int, object]) -> list[tuple[object, list[int]]]:
    """Return (value, ranks) for each group of ranks with equal values.

    `values`: by rank. The largest group is first; of equally large ones, that with the lowest rank.
    """
    groups: dict[Any, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0]))


def difference(
    kind: str, name: str, ranks: Sequence[int], text: str, change: TensorChange | None = None
) -> RankDifference:
    """Return a `RankDifference`, whose text is the tensor's name, a colon and `text`."""
    return RankDifference(kind, name, tuple(ranks), f"{shorten(name, LONGEST)}: {text}", change)


def _find_outliers(kind: str, name: str, values: Mapping[int, object]) -> list[RankDifference]:
    """Return a difference for each group of ranks whose value is not the most frequent one.

    `kind`: of the difference, such as "dtype". `name`: of the tensor. `values`: by rank, of ranks
    that have it.
    """
    (usual, most), *others = groups_of(values)
    return [
        difference(
            kind,
            name,
            ranks,
            f"{kind} {value} on {ranks_text(ranks)}, {usual} on {ranks_text(most)}",
        )
        for value, ranks in others
    ]


_KINDS = {True: "a whole array", False: "a Shard"}


def _compare_metadata(name: str, entries: Mapping[int, Entry]) -> list[RankDifference]:
    """Return the differences of one tensor between ranks: kind, dtype, shape or layout.

    `name`: of the tensor. `entries`: its description by rank. Layouts are compared only if all
    others are equal.
    """
    kinds = {rank: _KINDS[entry.steps is None] for rank, entry in entries.items()}
    differences = _find_outliers("kind", name, kinds)
    differences += _find_outliers(
        "dtype", name, {rank: entry.dtype for rank, entry in entries.items()}
    )
    differences += _find_outliers(
        "shape", name, {rank: entry.shape for rank, entry in entries.items()}
    )
    layouts = {
        rank: Layout(entry.steps) for rank, entry in entries.items() if entry.steps is not None
    }
    if not differences and layouts:
        differences += _find_outliers("layout", name, layouts)
    return differences


def _find_gaps(tensor: Tensor) -> list[RankDifference]:
    """Return a list with one difference if parts of a tensor are on no rank, else an empty list.

    Parts without elements are not required.
    """
    layout = Layout(tensor.steps or ())
    lost = [
        index
        for index in range(layout.parts)
        if index not in tensor.holders and tensor.part(index).count
    ]
    if not lost:
        return []
    indices = ", ".join(str(index) for index in lost[:8]) + (", …" if len(lost) > 8 else "")
    parts = f"part{'' if len(lost) == 1 else 's'} {indices} of {layout.parts}"
    text = f"no rank has {parts} of shape {tensor.shape}"
    return [difference("gap", tensor.name, (), text)]


def _find_tied(tensor: Tensor, entries: Mapping[str, Mapping[int, Entry]]) -> str | None:
    """Return the name of the earlier tensor with which this one is tied on all ranks, or None.

    `entries`: descriptions of all tensors, by name and rank. Ranks whose part of this one is empty
    do not count; both tensors must be on the same ranks.
    """
    own_entries = entries[tensor.name]
    names = {entry.tied for entry in own_entries.values() if tensor.part(entry.part).count}
    name = names.pop() if len(names) == 1 else None
    return name if name is not None and entries[name].keys() == own_entries.keys() else None


def match_entries(
    rank_entries: Sequence[Sequence[Entry]], *, partial: bool = False
) -> tuple[list[Tensor], list[RankDifference]]:
    """Return the tensors of the merged state, and the differences that prevent merging.

    `rank_entries`: by rank, descriptions of its tensors. If `partial` is true, a tensor may be
    missing on some ranks. A tensor with differences is described as on the first rank that has it.
    """
    entries_by_name: dict[str, dict[int, Entry]] = {}
    for rank, entries in enumerate(rank_entries):
        for entry in entries:
            entries_by_name.setdefault(entry.name, {})[rank] = entry
    tensors: list[Tensor] = []
    differences: list[RankDifference] = []
    for name, by_rank in entries_by_name.items():
        lacking = tuple(rank for rank in range(len(rank_entries)) if rank not in by_rank)
        if lacking and not partial:
            text = f"not on {ranks_text(lacking)}, but on {ranks_text(list(by_rank))}"
            differences.append(difference("missing", name, lacking, text))
        first = next(iter(by_rank.values()))
        holders: dict[int, list[int]] = {}
        # replica 0 first, then by rank: the first holder of a part sends it
        for rank, entry in sorted(by_rank.items(), key=lambda item: (item[1].replica, item[0])):
            holders.setdefault(entry.part, []).append(rank)
        tensor = Tensor(name, first.shape, first.steps, holders)
        name_differences = _compare_metadata(name, by_rank) or _find_gaps(tensor)
        differences += name_differences
        if not name_differences:
            tensor = tensor._replace(tied=_find_tied(tensor, entries_by_name))
        tensors.append(tensor)
    return tensors, differences


def differences_error(
    label: str, differences: Sequence[RankDifference], hint: str = ""
) -> CompatibilityError:
    """Return one error that lists the differences between ranks, at most `LISTED` of them.

    `label`: name of the operation. `differences`: not empty; the error's `differences` has all of
    them. `hint`: a remedy, or "".
    """
    lines = [f"{label}: the states of the ranks do not match:"]
    lines += [difference.text for difference in differences[:LISTED]]
    if len(differences) > LISTED:
        lines.append(f"... and {len(differences) - LISTED:,} more.")
    lines += [hint] if hint else []
    error = CompatibilityError("\n    ".join(lines))
    error.name = differences[0].name
    error.rank = differences[0].ranks[0] if differences[0].ranks else None
    error.differences = tuple(differences)
    return error


# ---- replicas ----


def _compare_elements(name: str, array: Array, other: Any) -> TensorChange | bool:
    """Return the change between two replicas of the tensor `name`; False if they are equal.

    True if they differ, but have a dtype whose differences cannot be measured.
    """
    try:
        *_, changes, _ = _core.state_diff({name: array}, {name: other})
    except CompatibilityError:  # str, datetime and structured dtypes
        return digest(array) != digest(other)
    return TensorChange(*changes[0]) if changes else False


def _change_text(change: TensorChange | bool) -> str:
    """Return the extent of a change between replicas, as the end of a sentence; "" if unknown."""
    if isinstance(change, bool):
        return ""
    text = f" in {change.changed:,} of {change.size:,} elements"
    if change.nan < change.changed:
        text += f", by at most {change.max_abs:.3g}"
    return text + (f", {change.nan:,} of them NaN on one side" if change.nan else "")


def _on_host(array: Any) -> Any:
    """Return a tensor in main memory, a copy if it is on a device; arrays unchanged."""
    return array.cpu() if hasattr(array, "is_cuda") else array


def compare_replicas(
    tensors: Iterable[Tensor], states: Sequence[Mapping[str, Any]]
) -> list[RankDifference]:
    """Return a difference for each replica that differs from the first one of its part.

    `states`: of all ranks. All elements are compared. `tensors` must have no other differences.
    """
    differences = []
    for tensor in tensors:
        for index, ranks in sorted(tensor.holders.items()) if tensor.tied is None else ():
            part = tensor.part(index)
            first = _on_host(array_of(states[ranks[0]][tensor.name]))
            for rank in ranks[1:]:
                other = _on_host(array_of(states[rank][tensor.name]))
                if other is first:
                    continue
                if other.shape != first.shape:  # shards may have any shape with these elements
                    first, other = first.reshape(part.count), other.reshape(part.count)
                change = _compare_elements(tensor.name, first, other)
                if change is False:
                    continue
                text = f"rank {rank} differs from rank {ranks[0]}{_change_text(change)}"
                measured_change = None if change is True else change
                differences.append(
                    difference("elements", tensor.name, [rank], text, measured_change)
                )
    return differences


def compare_digests(tensor: Tensor, index: int, digests: Mapping[int, str]) -> list[RankDifference]:
    """Return a difference for each group of ranks whose replica is not the most frequent one.

    `index`: of the part. `digests`: SHA-256 of the elements, by rank.
    """
    (_, most), *others = groups_of(digests)
    where = "" if tensor.steps is None else f" of part {index}"
    return [
        difference(
            "elements",
            tensor.name,
            ranks,
            f"the elements{where} on {ranks_text(ranks)} differ from those on {ranks_text(most)}",
        )
        for _, ranks in others
    ]


# ---- optimizers ----


def optimizer_values(state: Mapping[str, object]) -> dict[str, Any] | None:
    """Return the step and the parameter groups of an optimizer's state as JSON; None for others.

    Values that JSON cannot hold become None, which equals every other one of them.
    """
    if not isinstance(state, OptimizerStateDict):
        return None
    # a group without names is compared with those at its position, as if it had one parameter
    groups = [{"params": [f"group {i}"], **group} for i, group in enumerate(state.param_groups)]
    if not groups:
        groups = [{"params": ["any parameter"], "learning_rate": state.learning_rate}]
    try:
        text = json.dumps(groups, default=_plain_value, skipkeys=True)
    except (ValueError, RecursionError):  # a value contains itself
        text = "[]"
    return {"step": state.step, "groups": json.loads(text)}


def _plain_value(value: Any) -> Any:
    """Return the elements of an array, tensor or NumPy number; None for other objects."""
    return value.tolist() if hasattr(value, "tolist") else None


def check_optimizers(operation: str, values: Sequence[dict[str, Any] | None]) -> None:
    """Raise CompatibilityError if steps or the hyperparameters of a parameter differ.

    `values`: by rank, its `optimizer_values`. `operation`: its name, for the error.
    """
    optimizers = {rank: each for rank, each in enumerate(values) if each is not None}
    if not optimizers:
        return
    remedy = "; verify_replicas=False uses the values of the root"
    first_rank, first = next(iter(optimizers.items()))
    for rank, each in optimizers.items():
        if each["step"] != first["step"]:
            raise CompatibilityError(
                f"{operation}: the optimizer has step {first['step']} on rank {first_rank}, and "
                f"{each['step']} on rank {rank}{remedy}"
            )
    if all(each["groups"] == first["groups"] for each in optimizers.values()):
        return
    try:
        merge_groups(operation, {rank: each["groups"] for rank, each in optimizers.items()})
    except CompatibilityError as error:
        raise CompatibilityError(f"{error}{remedy}") from None


# ---- merging ----


def like(state: Mapping[str, object]) -> StateDict:
    """Return an empty state dict with a state's class and attributes."""
    if not isinstance(state, StateDict):
        return StateDict()
    empty_state = state.copy()
    empty_state.clear()
    return empty_state


def compare(states: Sequence[Mapping[str, Any]]) -> tuple[list[Tensor], list[RankDifference]]:
    """Return the tensors of all ranks' states, and all differences that prevent merging.

    A tensor may be missing in some states. Elements are compared only if all else is equal.
    """
    tensors, differences = match_entries([describe(state) for state in states], partial=True)
    differing = {difference.name for difference in differences}
    comparable = [tensor for tensor in tensors if tensor.name not in differing]
    return tensors, differences + compare_replicas(comparable, states)


def merge(states: Sequence[Mapping[str, Any]], tensors: Iterable[Tensor]) -> StateDict:
    """Return the merged state of all ranks, with the class and attributes of the first state.

    Whole arrays are not copied: they are from the first rank that has them. Shards are assembled in
    new arrays in main memory. `tensors`: as `match_entries` returns them, without gaps.
    """
    merged = like(states[0])
    for tensor in tensors:
        ranks = tensor.holders
        if tensor.steps is None:
            merged[tensor.name] = states[min(ranks[0])][tensor.name]
            continue
        if tensor.tied is not None:
            merged[tensor.name] = merged[tensor.tied]
            continue
        first = next(iter(ranks.values()))[0]
        full = new_packed(array_of(states[first][tensor.name]), tensor.shape)
        for index, holders in ranks.items():
            part = tensor.part(index)
            if part.count:
                copy_part(part, array_of(states[holders[0]][tensor.name]), full)
        merged[tensor.name] = full
    return merged
