"""Runs of reductions: what hooks and operations are made of.

A run is a backward pass, or a call with several gradients: buckets, one after the other, and an
end at which all ranks hear what failed.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from ._collective_args import failed
from ._fsdp_reduce import Entry, Event, Full, Reducer, Terms, failed_gradients
from ._fsdp_unit import FSDPShardingUnit
from ._guard import digest_of
from ._turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

# Full buckets of a backward pass that ranks agree on together, at most: their gradients are kept
# until the next message says whether all sums are finite.
_TOGETHER = 4


class Runs:
    """The runs of one `FSDP`, one at a time.

    Parameters
    ----------
    group : ProcessGroup
        The ranks.
    terms : Terms
        How gradients are reduced, as far as their dtypes go with it.
    settings : dict of str to object
        What all ranks must have chosen alike; ``bucket_bytes`` and ``allow_unused`` are used.
    timeout : float or None
        Seconds for each operation, None for the group's own.
    record : bool
        Note when buckets came and went.
    """

    def __init__(
        self,
        group: Any,
        terms: Terms,
        settings: Mapping[str, Any],
        *,
        timeout: float | None,
        record: bool,
    ) -> None:
        self._rank, self._world_size = int(group.rank), int(group.world_size)
        self._terms = terms
        self._known_terms: dict[tuple[str, bool], Terms] = {}  # by dtype, and accumulate
        self._bucket_bytes: int = settings["bucket_bytes"]
        self._allow_unused: bool = settings["allow_unused"]
        self._reducer = Reducer(group, timeout, settings)
        self._turns = Turns("mlstate-fsdp", group.rank)
        self._full: deque[Full] = deque()  # of a backward pass, and not reduced yet
        self._run = threading.Lock()  # held from the first bucket of a run to its end
        if record:
            self._reducer.events = []

    def terms(self, unit: FSDPShardingUnit, *, accumulate: bool = False) -> Terms:
        """How the gradient of a unit is reduced."""
        known = self._known_terms.get((unit.dtype, accumulate))
        if known is None:
            known = self._known_terms[unit.dtype, accumulate] = self._terms._replace(
                accumulate=accumulate,
                reduce_dtype=self._terms.reduce_dtype if _is_narrow(unit.dtype) else "",
                compression=self._terms.compression if unit.dtype == "float32" else "",
            )
        return known

    def bind(self, unit: FSDPShardingUnit) -> None:
        """Check that a unit belongs to this rank of this group."""
        if not isinstance(unit, FSDPShardingUnit):
            raise TypeError(f"a unit must be an FSDPShardingUnit, got {type(unit).__name__}")
        unit.bind(self._world_size)
        if unit.shard_index != self._rank:
            raise ValueError(
                f"{unit.parameter_name}: rank {self._rank} keeps shard {self._rank} of this group, "
                f"and the unit says {unit.shard_index}"
            )

    def buckets(self, units: Iterable[FSDPShardingUnit]) -> Iterator[list[FSDPShardingUnit]]:
        """Divide units, in their order, into what is reduced together."""
        bucket: list[FSDPShardingUnit] = []
        size = 0
        for unit in units:
            if bucket and (size >= self._bucket_bytes or self._differ(unit, bucket[0])):
                yield bucket
                bucket, size = [], 0
            bucket.append(unit)
            size += unit.full_bytes
        if bucket:
            yield bucket

    def _differ(self, one: FSDPShardingUnit, other: FSDPShardingUnit) -> bool:
        """Whether two gradients are reduced in other ways."""
        return one.dtype != other.dtype and self.terms(one) != self.terms(other)

    def entry(
        self,
        unit: FSDPShardingUnit,
        gradient: Any,
        why: str = "",
        lost: Callable[[], None] | None = None,
    ) -> Entry:
        """Make the entry of a gradient; one that is missing is zero where that is allowed."""
        if gradient is None and self._allow_unused and not why:
            gradient = unit.zeros()
        return Entry(unit, gradient, why, lost)

    def match(
        self, units: Mapping[str, FSDPShardingUnit], gradients: Mapping[str, Any]
    ) -> tuple[list[Entry], list[str]]:
        """Return an entry for each name, and the names that only one of the dicts has.

        Raises
        ------
        GradientNamesError
            There are such names, and no other rank waits for the other gradients.
        """
        entries, unmatched = [], []
        for name, unit in units.items():
            self.bind(unit)
            why = "" if name in gradients or self._allow_unused else "no gradient was passed"
            entries.append(self.entry(unit, gradients.get(name), why))
            if why:
                unmatched.append(name)
        for name in gradients:
            if name not in units:
                unknown = FSDPShardingUnit(name, (), "float32", self._rank)
                self.bind(unknown)
                entries.append(Entry(unknown, None, "there is no sharding unit for this gradient"))
                unmatched.append(name)
        if unmatched and self._world_size == 1:
            reasons = {e.name: (0, f"rank 0: {e.why}") for e in entries if e.name in unmatched}
            raise failed_gradients(
                "scatter_multiple", 0, reasons, unmatched, ", nothing was stored"
            )
        return entries, unmatched

    def begin(self) -> None:
        """Start a run of buckets; another one must not be under way."""
        if not self._run.acquire(blocking=False):
            raise failed(
                "reduce_scatter",
                self._rank,
                "another reduction of this FSDP is under way; wait for it, or let its backward "
                "pass end",
            )
        if self._reducer.events is not None:
            self._reducer.events = []

    def plan(self, units: Iterable[FSDPShardingUnit]) -> bytes:
        """Return what stands for the buckets of units, where ranks know of the first and how."""
        return digest_of((unit.fact for unit in units), "plan")

    def reduce(self, entries: list[Entry], *, accumulate: bool = False) -> None:
        """Reduce the gradients of a run in buckets, one after the other."""
        rest = entries
        while rest:
            buckets = list(self._divided(rest, accumulate))
            plan = self.plan(entry.unit for entry in rest) if len(buckets) > 1 else b""
            count, agreed = self._reducer.reduce(buckets, rest, plan)
            done = sum(len(full.entries) for full in buckets[:count])
            rest = rest[done:] if agreed is None else agreed

    def _divided(self, entries: list[Entry], accumulate: bool) -> Iterator[Full]:
        """Divide entries, in their order, into buckets."""
        start = 0
        for units in self.buckets(entry.unit for entry in entries):
            terms = self.terms(units[0], accumulate=accumulate)
            yield Full(entries[start : start + len(units)], terms)
            start += len(units)

    def reduce_now(
        self,
        operation: str,
        entries: list[Entry],
        *,
        accumulate: bool = False,
        unmatched: Sequence[str] = (),
    ) -> None:
        """Reduce gradients in the order of their names, and raise what fails: a whole run."""
        self.begin()
        try:
            self.reduce(sorted(entries, key=lambda entry: entry.name), accumulate=accumulate)
            self.finish(operation, unmatched)
        finally:
            self.end()

    def reduce_bucket(
        self, entries: list[Entry], plan: bytes, *, accumulate: bool, since: float, later: bool
    ) -> Any:
        """Reduce one bucket of a run, or let the thread of this object do it; return its `Work`.

        `plan` is that of the whole run.
        """
        terms = self.terms(entries[0].unit, accumulate=accumulate)
        self._full.append(Full(entries, terms, since))
        return self._turns.run("reduce_scatter", lambda: self._reduce_full(plan), async_op=later)

    def _reduce_full(self, plan: bytes) -> None:
        """Reduce the first of the buckets that are full, and others; none if all are reduced.

        Each bucket has a turn: when the last one ends, no bucket is left.
        """
        if not self._full:
            return
        buckets = [self._full[i] for i in range(min(len(self._full), _TOGETHER))]
        count, agreed = self._reducer.reduce(buckets, buckets[0].entries, plan)
        for _ in range(count):
            self._full.popleft()
        if agreed:
            self.reduce(agreed, accumulate=buckets[0].terms.accumulate)

    def finish(self, operation: str, unmatched: Sequence[str] = ()) -> dict[str, float]:
        """End the run, and raise what failed in it."""
        squares: dict[str, float] = self._turns.run(
            operation, lambda: self._reducer.finish(operation, unmatched)
        )
        return squares

    def drop_buffers(self) -> None:
        """Free the memory that reductions use again; the next one takes new memory."""
        self._turns.run("drop_buffers", self._reducer.drop_buffers)

    def run(self, operation: str, task: Callable[[], Any]) -> Any:
        """Run an operation of the group after the reductions that came before it."""
        return self._turns.run(operation, task)

    @property
    def events(self) -> list[Event] | None:
        """The buckets of the run that is under way, or was the last; None if not recorded."""
        return self._reducer.events

    def end(self) -> None:
        """Let another run begin; every `begin` wants one, whatever happened."""
        self._reducer.begin()
        self._full.clear()
        self._run.release()


def _is_narrow(dtype: str) -> bool:
    return dtype in ("float16", "bfloat16") or dtype.startswith("float8")
