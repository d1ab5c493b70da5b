"""One backward pass: when a bucket is full and reduced, its thread, and passes that end early.

A sharding unit describes a parameter, and has this rank's part of its reduced gradient: the local
gradient. A bucket has the gradients of several units, which are reduced together. Before that, the
ranks exchange headers, which show whether they have the same buckets. A session is the buckets of
one pass, until the ranks have exchanged the last header.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from ._bucket import Entry, FullBucket
from ._reducer import Session, plan_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..collectives._work import Work
    from ._leaf_exchange import LeafStep
    from ._reducer import Reducer
    from ._sharding_unit import FSDPShardingUnit

# Most buckets that one header announces. Full gradients are kept until the next header confirms
# that all sums are finite, so this limit bounds their memory.
_BUCKETS_PER_HEADER = 4
_THREAD_BYTES = 1 << 20  # a smaller last bucket is reduced at the end, without the thread


class BucketPlan:
    """The division of units into buckets, in their reverse order, for all backward passes."""

    def __init__(
        self, units: Mapping[str, FSDPShardingUnit], reducer: Reducer, *, accumulate: bool
    ) -> None:
        """Divide the units into buckets.

        `units`: by parameter name, in order of the forward pass. `accumulate`: sums are added to
        the local gradients.
        """
        self.units = dict(units)
        self.accumulate = accumulate
        self.buckets = list(reducer.divide(reversed(self.units.values())))
        # of all units, for the ranks to compare
        self.digest = plan_digest(self.units.values()) if self.units else b""
        # by bucket; the units of a bucket have equal terms
        self.terms = [reducer.terms(bucket[0], accumulate=accumulate) for bucket in self.buckets]
        # index in `buckets`, by parameter name
        self.bucket_of = {
            unit.parameter_name: number
            for number, bucket in enumerate(self.buckets)
            for unit in bucket
        }
        last = self.buckets[-1] if self.buckets else []
        is_small = sum(unit.full_bytes for unit in last) < _THREAD_BYTES
        # the first buckets, which the thread reduces before the pass ends
        self.thread_count = len(self.buckets) - int(is_small)


class BackwardPass:
    """One backward pass, from its first gradient until `abandon`, or `finish` and session close.

    The caller holds a lock during each call. A thread reduces full buckets meanwhile.
    """

    def __init__(self, plan: BucketPlan, reducer: Reducer, step: LeafStep | None = None) -> None:
        """Start a pass without gradients; it locks the reductions of `reducer` until it ends.

        `step`: with order="tree", the step of which the pass sends leaves. Raises CollectiveError
        if that reducer runs another pass.
        """
        self.arrived: dict[str, Entry] = {}
        self.token: Callable[[], object] | None = (
            None  # weakref: dead once the torch pass has ended
        )
        self.times: list[tuple[str, float]] = []  # when gradients arrived, if recorded
        self._plan = plan
        self._reducer = reducer
        self._step = step
        self._missing_counts = [len(bucket) for bucket in plan.buckets]  # gradients yet to arrive
        self._full_at = [0.0] * len(plan.buckets)  # `perf_counter` at the last gradient; 0: none
        self._submitted = 0  # number of buckets passed to the thread, or reduced by `finish`
        self._reduced = 0  # number of submitted buckets that are reduced
        self._works: list[Work] = []  # calls of `_reduce_submitted` in the thread
        self.session = Session(reducer, step)

    def add(
        self,
        name: str,
        gradient: object,
        on_failure: Callable[[], None] | None = None,
        problem: str = "",
    ) -> None:
        """Add the gradient of parameter `name`, and submit the buckets that are now full, in order.

        `gradient`: full gradient, or None. `on_failure`: called if this rank's part is not stored.
        `problem`: why the gradient cannot be reduced, or "". Raises ValueError for a second
        gradient of a parameter.
        """
        if name in self.arrived:
            if on_failure is not None:
                on_failure()
            raise ValueError(f"{name!r} already has a gradient in this backward pass")
        plan = self._plan
        self.arrived[name] = self._new_entry(name, gradient, on_failure, problem)
        number = plan.bucket_of[name]
        self._missing_counts[number] -= 1
        if self.session.events is not None:
            self._full_at[number] = perf_counter()
            self.times.append((name, self._full_at[number]))
        # in order on all ranks: a full bucket waits for those before it
        while self._submitted < plan.thread_count and self._missing_counts[self._submitted] == 0:
            self._submitted += 1
            queue = self._reducer.queue
            self._works.append(queue.run("reduce_scatter", self._reduce_submitted, async_op=True))

    def add_missing(
        self, name: str, gradient: object, on_failure: Callable[[], None] | None, problem: str
    ) -> None:
        """Add the gradient of a parameter for which the pass computed none.

        `gradient`: the sum of earlier `no_sync` passes; None is a problem unless unused parameters
        are allowed. The other arguments are as for `add`.
        """
        absence = "the backward pass gave no gradient"
        self.arrived[name] = self._new_entry(name, gradient, on_failure, problem, absence)
        self._full_at[self._plan.bucket_of[name]] = perf_counter()

    def _new_entry(
        self,
        name: str,
        gradient: object,
        on_failure: Callable[[], None] | None,
        problem: str,
        absence: str = "",
    ) -> Entry:
        """Return the entry of a gradient; the arguments are as for `add` and `Entry`.

        With order="tree" it has the nodes to send. A parameter without a gradient in the leaf of
        the pass then needs one in a leaf that this rank holds.
        """
        step, allow_unused = self._step, self._reducer.allow_unused
        unit = self._plan.units[name]
        lacks_gradient = gradient is None and not problem
        if step is not None and lacks_gradient:
            gradient = step.zeros(unit)
        entry = Entry(
            unit, gradient, problem, on_failure, allow_unused=allow_unused, absence=absence
        )
        if step is not None:
            own_gradient = None if lacks_gradient or entry.problem else entry.gradient
            entry.nodes, entry.problem = step.take(name, own_gradient, entry.problem)
            if not (entry.nodes or entry.problem or allow_unused or step.is_idle):
                entry.problem = absence or "no gradient"
        return entry

    def finish(self) -> None:
        """Reduce the remaining buckets, end the session with all ranks, and raise the failures.

        All parameters must have an entry by now. The caller closes the session, and calls
        `fail_others` after an exception.
        """
        error = self.wait()
        if error is not None:
            self._reducer.queue.join()  # the thread continues if the wait was interrupted
            raise error
        while self._submitted < len(self._plan.buckets):
            self._submitted += 1
            self._reduce_submitted()
        self.session.finish("backward pass")

    def abandon(self) -> None:
        """End the pass without the remaining gradients; all local gradients become None."""
        self.fail_others()
        for unit in self._plan.units.values():
            unit.local_gradient, unit._is_lost = None, True
        self.session.close()

    def fail_others(self) -> None:
        """Fail the gradients of buckets that have not been submitted."""
        for bucket in self._plan.buckets[self._submitted :]:
            for unit in bucket:
                if unit.parameter_name in self.arrived:
                    self.arrived[unit.parameter_name].fail()

    def wait(self) -> BaseException | None:
        """Wait until the thread has reduced all submitted buckets; return its first error, or None.

        An interruption of the wait, such as KeyboardInterrupt, counts as an error too.
        """
        error: BaseException | None = None
        for work in self._works:
            try:
                work.wait()
            except BaseException as caught:
                error = error or caught
        return error

    def _reduce_submitted(self) -> None:
        """Reduce the next submitted buckets, as many as all ranks have ready.

        At most `_BUCKETS_PER_HEADER`, at least one if there is any. It is called once for each
        submitted bucket; a call may reduce several, and later calls then find none left. If the
        ranks disagree on the first bucket, its gradients that are equal on all ranks are reduced in
        its place, and the others fail.
        """
        first, end = self._reduced, min(self._submitted, self._reduced + _BUCKETS_PER_HEADER)
        if first == end:
            return
        buckets = [self._full_bucket(number) for number in range(first, end)]
        self._reduced = end  # counts them as done if `reduce` raises
        count, agreed = self.session.reduce(buckets, buckets[0].entries, self._plan.digest)
        self._reduced = first + count
        if agreed:  # ranks disagree on the first bucket: reduce its gradients that they agree on
            accumulate = self._plan.accumulate
            self._reducer.reduce_entries(self.session, agreed, accumulate=accumulate)

    def _full_bucket(self, number: int) -> FullBucket:
        """Return bucket `number` of the plan; all of its gradients must have arrived."""
        entries = [self.arrived[unit.parameter_name] for unit in self._plan.buckets[number]]
        return FullBucket(entries, self._plan.terms[number], self._full_at[number])
