"""Reduction sessions: buckets that all ranks reduce in the same order, and a common end.

Before each bucket, or before several buckets that all ranks have ready, the ranks exchange
headers (see `_consistency_check`). They exchange headers once more after the last bucket. So all
ranks learn of a failure on one rank, and a bad gradient does not prevent the reduction of the
others. If a rank passes a wrong gradient to a call, its first header has the flag CALL_REFUSED,
and all ranks refuse the call.
"""

from __future__ import annotations

import json
from time import perf_counter
from typing import TYPE_CHECKING, Any

from .._common.dtypes import NARROW_FLOATS
from ..collectives._arguments import failed
from ..collectives._engine import OperationQueue
from ..errors import CollectiveError, GradientMismatchError, GradientNamesError
from ._bucket import Entry, FullBucket, Reducer, Terms
from ._consistency_check import CALL_REFUSED, UNUSED, ConsistencyCheck, digest_of
from ._gradient_ops import norm_partials
from ._report import Bucket
from ._sharding_unit import FSDPShardingUnit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ..collectives._work import Work
    from ._consistency_check import Header

_SHOWN = 5  # failures that an error lists
# Full gradients are kept until the next header confirms that all sums are finite. This limit on
# buckets per header bounds their memory.
_BUCKETS_PER_HEADER = 4
_THREAD_BYTES = 1 << 20  # a smaller last bucket is reduced at the end, without the thread


class ReductionSession:
    """The buckets of one backward pass, or of one call with several gradients.

    A reducer has at most one open session: opening another raises CollectiveError. The caller
    must call `close`, also after errors. `settings` must be equal on all ranks; their keys appear
    in errors. With `record`, `events` has the times of buckets.

    If the first bucket's header is to refuse the whole call on all ranks, set `refusal` to the
    class of this rank's error before; an entry must then have a problem.
    """

    def __init__(
        self, reducer: Reducer, settings: Mapping[str, Any], *, record: bool = False
    ) -> None:
        if not reducer.lock.acquire(blocking=False):
            raise failed(
                "reduce_scatter",
                reducer.group.rank,
                "another reduction of this FSDP is under way; wait for it, or let its backward "
                "pass end",
            )
        self._reducer = reducer
        self._check = ConsistencyCheck(reducer.group, reducer.timeout, settings)
        self._unused: list[Entry] | None = [] if settings.get("allow_unused") else None
        self._pending: list[Entry] = []  # sums not yet confirmed as finite on all ranks
        self._pending_terms = Terms()
        self._failures: dict[str, tuple[int | None, str]] = {}
        self.refusal: type[GradientMismatchError] | None = None
        self._is_refused = False  # by any rank: the session has ended
        self._error: BaseException | None = None  # after it, ranks may be out of step
        self.events: list[Bucket] | None = [] if record else None

    def close(self) -> None:
        """Release the reducer; sums that no header has confirmed fail."""
        for entry in self._pending:
            entry.fail()
        self._pending = []
        self._reducer.lock.release()

    # ---- buckets ----

    def reduce(
        self, buckets: Sequence[FullBucket], entries: Sequence[Entry], plan: bytes = b""
    ) -> tuple[int, list[Entry] | None]:
        """Reduce the first bucket, and the following ones that all ranks have ready too.

        Returns the number of reduced buckets, and None; `finish` raises their failures. If the
        ranks disagree on the first bucket, nothing is reduced. Then the second value is the list
        of `entries` on which all ranks agree, in the same order on all ranks; the caller divides
        them into buckets again. If a rank refuses the call, all entries fail.

        Ranks with equal first buckets and equal non-empty plans must have equal later buckets.
        """
        started = perf_counter()
        try:
            if self._error is not None:
                raise self._error
            if self._is_refused:
                for entry in [entry for bucket in buckets for entry in bucket.entries]:
                    entry.fail()
                return len(buckets), None
            return self._reduce(buckets, entries, plan, started)
        except BaseException as error:
            self._error = error
            given = [entry for bucket in buckets for entry in bucket.entries]
            for entry in [*self._pending, *given, *entries]:
                entry.fail()
            self._pending = []
            raise

    def _reduce(
        self, buckets: Sequence[FullBucket], entries: Sequence[Entry], plan: bytes, started: float
    ) -> tuple[int, list[Entry] | None]:
        first, terms, _ = buckets[0]
        handles = self._reducer.prepare(buckets)
        can_pack = handles[0] is not None and not terms.compression
        settings = {"gradient_divide_factor": terms.divisor, "accumulate": terms.accumulate}
        headers, count = self._check.exchange_buckets(
            [entry.unit.fact for entry in first],
            settings,
            self._count_nonfinite(),
            is_refused=any(entry.problem for entry in first),
            is_call_refused=self.refusal is not None,
            ready=len(handles),
            plan=plan,
            pack=(lambda: self._reducer.pack(handles[0])) if can_pack else None,
        )
        agreed = perf_counter()
        self._store_pending(headers)
        if not count:
            return 1, self._agreed_entries(entries, settings, headers)
        for bucket, handle in zip(buckets[:count], handles, strict=False):
            self._check.sequence += 1
            self._reducer.sum_bucket(bucket, handle)
            self._pending = [*self._pending, *bucket.entries]
            self._pending_terms = bucket.terms
            if self._unused is not None:
                self._unused += [entry for entry in bucket.entries if entry.is_unused]
            self._record_event(bucket.entries, bucket.since or started, started, agreed, headers)
            started = agreed = perf_counter()
            headers = []
        return count, None

    def _agreed_entries(
        self, entries: Sequence[Entry], settings: dict[str, Any], headers: Sequence[Header]
    ) -> list[Entry]:
        """Return the entries that are equal on all ranks, none if refused; fail the others."""
        listed = [(e.unit.parameter_name, e.unit.fact, e.problem) for e in entries]
        found = self._check.find_failures(listed, settings, has_ended=False)
        self._add_failures(found.failures)
        self._is_refused = _is_call_refused(headers)
        by_name = {entry.unit.parameter_name: entry for entry in entries}
        for name, entry in by_name.items():
            if self._is_refused or name in found.failures:
                entry.fail()
        return [] if self._is_refused else [by_name[name] for name in found.good]

    def _count_nonfinite(self) -> int:
        if self._pending_terms.nonfinite != "error":
            return 0
        return sum([entry.nonfinite for entry in self._pending])

    def _add_failures(self, failures: Mapping[str, tuple[int | None, str]]) -> None:
        """Record failures; the first one of each gradient wins, as later ones follow from it."""
        for name, failure in failures.items():
            self._failures.setdefault(name, failure)

    def _record_event(
        self,
        entries: Sequence[Entry],
        ready: float,
        started: float,
        agreed: float,
        headers: Sequence[Header],
    ) -> None:
        """Record a reduced bucket, or the end of the session (no entries)."""
        if self.events is not None:
            size = sum(entry.bytes for entry in entries)
            names = tuple(entry.unit.parameter_name for entry in entries)
            waits = tuple(header.waited for header in headers)
            self.events.append(Bucket(names, size, ready, started, agreed, perf_counter(), waits))

    # ---- results ----

    def _store_pending(self, headers: Sequence[Header]) -> None:
        """Store the sums since the last header; fail those that are not finite."""
        pending, self._pending = self._pending, []
        bad: dict[str, tuple[int | None, str]] = {}
        if any(header.nonfinite for header in headers):
            bad = self._find_nonfinite(pending)
            self._add_failures(bad)
        for entry in pending:
            if bad and entry.unit.parameter_name in bad:
                entry.fail()
            else:
                entry.store(accumulate=self._pending_terms.accumulate)

    def _find_nonfinite(self, entries: Sequence[Entry]) -> dict[str, tuple[int | None, str]]:
        """Return the gradients and sums of all ranks with non-finite elements, with reasons."""
        mine = {}
        for entry in entries:
            name = entry.unit.parameter_name
            mine[name] = norm_partials({name: entry.source})[name][1], entry.nonfinite
        texts = self._reducer.group.gather_bytes(
            json.dumps(mine).encode(), timeout=self._reducer.timeout
        )
        ranks: list[dict[str, list[int]]] = [json.loads(text) for text in texts]
        bad: dict[str, tuple[int | None, str]] = {}
        for name in mine:
            each = [counts.get(name, (0, 0)) for counts in ranks]  # absent after an abandoned pass
            given = [(rank, full) for rank, (full, _) in enumerate(each) if full]
            sums = [(rank, part) for rank, (_, part) in enumerate(each) if part]
            if given and sums:  # a minimum of such elements can be finite
                what = "; ".join(f"rank {rank}: {count:,}" for rank, count in given)
                bad[name] = given[0][0], f"NaN or infinite elements ({what})"
            elif sums:
                what = "; ".join(f"shard of rank {rank}: {count:,}" for rank, count in sums)
                bad[name] = sums[0][0], f"the sum is not finite, all gradients are ({what})"
        return bad

    def _undo_unused(self) -> None:
        """Restore the gradients of the parameters that no rank used."""
        entries = {entry.unit.parameter_name: entry for entry in self._unused or ()}
        texts = self._reducer.group.gather_bytes(
            json.dumps(list(entries)).encode(), timeout=self._reducer.timeout
        )
        for name in set(entries).intersection(*map(json.loads, texts)):
            entries[name].undo_unused()

    def finish(self, operation: str) -> None:
        """Wait until all ranks end their session, and raise the failures."""
        has_ended = self._is_refused
        while not has_ended:
            started = perf_counter()
            headers, has_ended = self._check.exchange_end(
                self._count_nonfinite(), has_unused=bool(self._unused)
            )
            self._record_event((), started, started, perf_counter(), headers)
            self._store_pending(headers)
            if not has_ended:
                self._add_failures(self._check.find_failures((), {}, has_ended=True).failures)
                self._is_refused = has_ended = _is_call_refused(headers)
            elif all(header.flags & UNUSED for header in headers):
                self._undo_unused()
        if self._failures:
            result = "not reduced, all others were"
            if self._is_refused:
                any_more = " more" if self._check.sequence else ""
                result = f"refused, nothing{any_more} was stored on any rank"
            rank = self._reducer.group.rank
            cls = self.refusal or CollectiveError
            raise _failed_gradients(cls, operation, rank, result, self._failures)


class Reductions:
    """The reduction of gradients for one `FSDP`: buckets, settings, and memory of its sessions.

    `terms` apply to gradients of any dtype. `settings` must be equal on all ranks; this class
    itself uses ``bucket_bytes`` and ``allow_unused``.
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
        self.rank, self.world_size = int(group.rank), int(group.world_size)
        self.reducer = Reducer(group, timeout)
        self.queue = OperationQueue("mlstate-fsdp", group.rank)  # its thread reduces during a pass
        self._settings = dict(settings)
        self._record = record
        self._terms = terms
        self._terms_of: dict[tuple[str, bool], Terms] = {}  # by dtype and accumulate

    def open(self) -> ReductionSession:
        """Open a session."""
        return ReductionSession(self.reducer, self._settings, record=self._record)

    def terms(self, unit: FSDPShardingUnit, *, accumulate: bool = False) -> Terms:
        """Return the reduction terms of a unit's gradient."""
        known = self._terms_of.get((unit.dtype, accumulate))
        if known is None:
            known = self._terms_of[unit.dtype, accumulate] = self._terms._replace(
                accumulate=accumulate,
                reduce_dtype=self._terms.reduce_dtype if unit.dtype in NARROW_FLOATS else "",
                compression=self._terms.compression if unit.dtype == "float32" else "",
            )
        return known

    def divide(self, units: Iterable[FSDPShardingUnit]) -> Iterator[list[FSDPShardingUnit]]:
        """Yield buckets of consecutive units."""
        bucket: list[FSDPShardingUnit] = []
        size = 0
        for unit in units:
            if bucket:
                size += bucket[-1].full_bytes
                has_other_terms = unit.dtype != bucket[0].dtype and self.terms(unit) != self.terms(
                    bucket[0]
                )
                if size >= self._settings["bucket_bytes"] or has_other_terms:
                    yield bucket
                    bucket, size = [], 0
            bucket.append(unit)
        if bucket:
            yield bucket

    def entry(
        self,
        unit: FSDPShardingUnit,
        gradient: Any,
        problem: str = "",
        on_failure: Callable[[], None] | None = None,
        *,
        absence: str = "",
    ) -> Entry:
        """Return a gradient's entry; its problem is `absence` if it is missing and must not be."""
        is_unused = gradient is None and not problem and self._settings["allow_unused"]
        if is_unused:
            gradient = unit.zeros()
        elif gradient is None:
            problem = problem or absence
        return Entry(unit, gradient, problem, on_failure, is_unused=is_unused)

    def scatter(self, units: Mapping[str, FSDPShardingUnit], gradients: Mapping[str, Any]) -> None:
        """Reduce the gradients of bound units.

        If a name is in only one dict, all ranks refuse the call; this one by GradientNamesError.
        """
        entries, has_same_names = [], True
        for name, unit in units.items():
            absence = "" if name in gradients else "no gradient was passed"
            entry = self.entry(unit, gradients.get(name), absence=absence)
            has_same_names = has_same_names and not (absence and entry.problem)
            entries.append(entry)
        for name in gradients:
            if name not in units:
                unit = FSDPShardingUnit(name, (), "float32", self.rank, world_size=self.world_size)
                entries.append(Entry(unit, None, "there is no sharding unit for this gradient"))
                has_same_names = False
        self.reduce_now("scatter_multiple", entries, has_same_names=has_same_names)

    def scatter_one(
        self, unit: FSDPShardingUnit, gradient: Any, problem: str = "", *, accumulate: bool = False
    ) -> Any:
        """Reduce one gradient, or report its problem to all ranks; return this rank's part."""
        entry = self.entry(unit, gradient, problem)
        self.reduce_now("scatter_gradient", [entry], accumulate=accumulate)
        return unit.local_gradient

    def reduce_now(
        self,
        operation: str,
        entries: list[Entry],
        *,
        accumulate: bool = False,
        has_same_names: bool = True,
    ) -> None:
        """Reduce gradients in name order in one session, and raise the failures.

        If an entry has a problem already, all ranks refuse the call and store nothing.
        """
        session = self.open()
        try:
            if any(entry.problem for entry in entries):
                session.refusal = GradientMismatchError if has_same_names else GradientNamesError
            entries = sorted(entries, key=lambda entry: entry.unit.parameter_name)
            self.reduce_entries(session, entries, accumulate=accumulate)
            session.finish(operation)
        finally:
            session.close()

    def reduce_entries(
        self, session: ReductionSession, entries: list[Entry], *, accumulate: bool
    ) -> None:
        """Divide entries into buckets and reduce them; divide again if ranks disagree."""
        while entries:
            buckets, start = [], 0
            for units in self.divide([entry.unit for entry in entries]):
                terms = self.terms(units[0], accumulate=accumulate)
                buckets.append(FullBucket(entries[start : start + len(units)], terms))
                start += len(units)
            plan = _plan_digest(entry.unit for entry in entries) if len(buckets) > 1 else b""
            count, agreed = session.reduce(buckets, entries, plan)
            done = sum([len(bucket.entries) for bucket in buckets[:count]])
            entries = entries[done:] if agreed is None else agreed


class BucketPlan:
    """The division of units into buckets, in their reverse order, for all backward passes."""

    def __init__(
        self, units: Mapping[str, FSDPShardingUnit], reductions: Reductions, *, accumulate: bool
    ) -> None:
        self.units = dict(units)
        self.accumulate = accumulate
        self.buckets = list(reductions.divide(reversed(self.units.values())))
        self.digest = _plan_digest(self.units.values()) if self.units else b""
        self.terms = [reductions.terms(b[0], accumulate=accumulate) for b in self.buckets]
        self.bucket_of = {
            unit.parameter_name: number
            for number, bucket in enumerate(self.buckets)
            for unit in bucket
        }
        last = self.buckets[-1] if self.buckets else []
        is_small = sum(unit.full_bytes for unit in last) < _THREAD_BYTES
        # number of buckets that are reduced before the pass ends
        self.early = len(self.buckets) - int(is_small)


class BackwardPass:
    """One backward pass, from its first gradient until `abandon`, or `finish` and session close.

    The caller holds a lock during each call. A thread reduces full buckets meanwhile.
    """

    def __init__(self, plan: BucketPlan, reductions: Reductions) -> None:
        self.session = reductions.open()
        self.arrived: dict[str, Entry] = {}
        self.token: Callable[[], Any] | None = None  # weakref: dead once the torch pass has ended
        self.times: list[tuple[str, float]] = []  # when gradients arrived, if recorded
        self._plan = plan
        self._reductions = reductions
        self._lacking = [len(bucket) for bucket in plan.buckets]
        self._full_at = [0.0] * len(plan.buckets)
        self._submitted = 0  # number of buckets
        self._reduced = 0  # number of submitted buckets that are reduced
        self._works: list[Work] = []

    def add(
        self,
        name: str,
        gradient: Any,
        on_failure: Callable[[], None] | None = None,
        problem: str = "",
    ) -> None:
        """Add a gradient, and submit the buckets that are now full, in order."""
        if name in self.arrived:
            if on_failure is not None:
                on_failure()
            raise ValueError(f"{name!r} already has a gradient in this backward pass")
        plan = self._plan
        entry = self._reductions.entry(plan.units[name], gradient, problem, on_failure)
        self.arrived[name] = entry
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
        """Add this rank's value of a gradient that the pass did not compute; None is an error."""
        absence = "the backward pass gave no gradient"
        entry = self._reductions.entry(
            self._plan.units[name], gradient, problem, on_failure, absence=absence
        )
        self.arrived[name] = entry
        self._full_at[self._plan.bucket_of[name]] = perf_counter()

    def finish(self) -> None:
        """Reduce the remaining buckets, end the session, and raise the failures."""
        try:
            error = self._wait()
            if error is not None:
                self._reductions.queue.join()  # the thread continues if the wait was interrupted
                raise error
            while self._submitted < len(self._plan.buckets):
                self._submitted += 1
                self._reduce_submitted()
            self.session.finish("backward pass")
        except BaseException:
            self._fail_others()
            raise

    def abandon(self) -> None:
        """End the pass without the remaining gradients; all local gradients are lost."""
        self._wait()
        self._fail_others()
        for unit in self._plan.units.values():
            unit.local_gradient = None
        self.session.close()

    def _fail_others(self) -> None:
        """Fail the gradients of buckets that have not been submitted."""
        for bucket in self._plan.buckets[self._submitted :]:
            for unit in bucket:
                if unit.parameter_name in self.arrived:
                    self.arrived[unit.parameter_name].fail()

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
        """Reduce submitted buckets that earlier calls have not; called once for each bucket."""
        first, end = self._reduced, min(self._submitted, self._reduced + _BUCKETS_PER_HEADER)
        if first == end:
            return
        buckets = [self._full_bucket(number) for number in range(first, end)]
        self._reduced = end  # counts them as done if `reduce` raises
        count, agreed = self.session.reduce(buckets, buckets[0].entries, self._plan.digest)
        self._reduced = first + count
        if agreed:
            accumulate = self._plan.accumulate
            self._reductions.reduce_entries(self.session, agreed, accumulate=accumulate)

    def _full_bucket(self, number: int) -> FullBucket:
        entries = [self.arrived[unit.parameter_name] for unit in self._plan.buckets[number]]
        return FullBucket(entries, self._plan.terms[number], self._full_at[number])


# ---- helpers ----


def _plan_digest(units: Iterable[FSDPShardingUnit]) -> bytes:
    """Return a digest of all buckets, compared by ranks that agree on the first one."""
    return digest_of((unit.fact for unit in units), "plan")


def _is_call_refused(headers: Sequence[Header]) -> bool:
    return any(header.flags & CALL_REFUSED for header in headers)


def _failed_gradients(
    cls: type[CollectiveError],
    operation: str,
    rank: int,
    result: str,
    failures: Mapping[str, tuple[int | None, str]],
) -> CollectiveError:
    """Return the error of all ranks; only its class and the rank in its text differ."""
    lines = [f"{name!r}: {what}" for name, (_, what) in failures.items()]
    more = f"\n  … {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    listed = "\n  ".join(lines[:_SHOWN]) if len(lines) > 1 else lines[0]
    gap = "\n  " if len(lines) > 1 else " "
    count = f"{len(lines)} gradients were" if len(lines) > 1 else "a gradient was"
    error = cls(f"{operation} on rank {rank}: {count} {result}:{gap}{listed}{more}")
    error.name, (error.rank, _) = next(iter(failures.items()))
    return error
