"""The gradients of one backward pass, reduced in buckets as they arrive."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from ._fsdp_reduce import Entry, FullBucket
from ._fsdp_runs import plan_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._fsdp_runs import Reductions
    from ._fsdp_unit import FSDPShardingUnit
    from ._work import Work

# Full gradients are kept until the next header says whether all sums are finite, so one header
# stands for this many buckets at most.
_BUCKETS_PER_HEADER = 4
_THREAD_BYTES = 1 << 20  # a smaller last bucket is reduced at the end, without the thread


class BucketPlan:
    """The buckets of some units, for all backward passes.

    Attributes
    ----------
    buckets : list of list of FSDPShardingUnit
        In the reverse order of the units.
    terms : list of Terms
        By bucket.
    digest : bytes
        Digest of all buckets.
    bucket_of : dict of str to int
        Number of the bucket, by parameter.
    early : int
        Number of buckets that are reduced before the pass ends.
    """

    def __init__(
        self, units: Mapping[str, FSDPShardingUnit], reductions: Reductions, *, accumulate: bool
    ) -> None:
        self.units = dict(units)
        self.accumulate = accumulate
        self.buckets = list(reductions.divide(reversed(self.units.values())))
        self.digest = plan_digest(self.units.values()) if self.units else b""
        self.terms = [reductions.terms(b[0], accumulate=accumulate) for b in self.buckets]
        self.bucket_of = {
            unit.parameter_name: number
            for number, bucket in enumerate(self.buckets)
            for unit in bucket
        }
        last = self.buckets[-1] if self.buckets else []
        is_small = sum(unit.full_bytes for unit in last) < _THREAD_BYTES
        self.early = len(self.buckets) - int(is_small)


class BackwardPass:
    """One backward pass, from its first gradient until `abandon`, or `finish` and then `close`.

    The caller holds a lock for each call. A thread reduces full buckets meanwhile.

    Attributes
    ----------
    arrived : dict of str to Entry
        By parameter.
    token : weakref or None
        Dead once the pass of torch that makes the gradients has ended.
    times : list of (str, float)
        Arrivals of gradients by `time.perf_counter`, if they are recorded.
    """

    def __init__(self, plan: BucketPlan, reductions: Reductions) -> None:
        self.session = reductions.open()
        self.arrived: dict[str, Entry] = {}
        self.token: Callable[[], Any] | None = None
        self.times: list[tuple[str, float]] = []
        self._plan = plan
        self._reductions = reductions
        self._lacking = [len(bucket) for bucket in plan.buckets]
        self._full_at = [0.0] * len(plan.buckets)
        self._submitted = 0  # buckets
        self._reduced = 0  # of these
        self._works: list[Work] = []

    def add(
        self,
        name: str,
        gradient: Any,
        on_failure: Callable[[], None] | None = None,
        problem: str = "",
    ) -> None:
        """Add a gradient, and submit the buckets that are now full, in their order."""
        if name in self.arrived:
            if on_failure is not None:
                on_failure()
            raise ValueError(f"{name!r} has a gradient already in this backward pass")
        plan = self._plan
        unit = plan.units[name]
        if gradient is None and not problem:
            gradient = self._reductions.unused_gradient(unit)
        self.arrived[name] = Entry(unit, gradient, problem, on_failure)
        number = plan.bucket_of[name]
        self._lacking[number] -= 1
        if self.session.events is not None:
            self._full_at[number] = perf_counter()
            self.times.append((name, self._full_at[number]))
        while self._submitted < plan.early and self._lacking[self._submitted] == 0:
            self._submitted += 1
            queue = self._reductions.queue
            self._works.append(queue.run("reduce_scatter", self._reduce_submitted, async_op=True))

    def add_missing(
        self, name: str, gradient: Any, on_failure: Callable[[], None] | None, problem: str
    ) -> None:
        """Add what this rank has of a gradient that the pass did not make; None is an error."""
        unit = self._plan.units[name]
        if gradient is None and not problem:
            gradient = self._reductions.unused_gradient(unit)
            problem = "the backward pass gave no gradient" if gradient is None else ""
        self.arrived[name] = Entry(unit, gradient, problem, on_failure)
        self._full_at[self._plan.bucket_of[name]] = perf_counter()

    def finish(self) -> None:
        """Reduce the other buckets after the submitted ones, end the session, and raise what failed."""
        error = self._wait()
        while self._submitted < len(self._plan.buckets):
            self._submitted += 1
            try:
                self._reductions.queue.run("reduce_scatter", self._reduce_submitted)
            except BaseException as caught:
                error = error or caught
        if error is not None:  # the other ranks do not wait for the end any more
            raise error
        self.session.finish("backward pass")

    def abandon(self) -> None:
        """End without the other gradients; all local gradients are lost."""
        self._wait()
        for bucket in self._plan.buckets[self._submitted :]:
            for unit in bucket:
                if unit.parameter_name in self.arrived:
                    self.arrived[unit.parameter_name].fail()
        for unit in self._plan.units.values():
            unit.local_gradient = None
        self.session.close()

    def _wait(self) -> BaseException | None:
        """Wait until the thread has reduced all submitted buckets; return the first error."""
        error: BaseException | None = None
        for work in self._works:
            try:
                work.wait()
            except BaseException as caught:
                error = error or caught
        return error

    def _reduce_submitted(self) -> None:
        """Reduce submitted buckets, if earlier calls have not: there is a call for each bucket."""
        first, end = self._reduced, min(self._submitted, self._reduced + _BUCKETS_PER_HEADER)
        if first == end:
            return
        buckets = [self._full_bucket(number) for number in range(first, end)]
        self._reduced = end  # if an error ends this
        count, agreed = self.session.reduce(buckets, buckets[0].entries, self._plan.digest)
        self._reduced = first + count
        if agreed:
            accumulate = self._plan.accumulate
            self._reductions.reduce_entries(self.session, agreed, accumulate=accumulate)

    def _full_bucket(self, number: int) -> FullBucket:
        entries = [self.arrived[unit.parameter_name] for unit in self._plan.buckets[number]]
        return FullBucket(entries, self._plan.terms[number], self._full_at[number])
