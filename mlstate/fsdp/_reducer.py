"""Reduction of buckets: their division, headers that ranks compare, exchange, NaN checks, errors.

Before each bucket, or before several buckets that all ranks have ready, each rank sends a header of
64 bytes: a digest of its next bucket, the number of buckets that it has ready, and the number of
non-finite elements since the last header. All ranks receive all headers, so all decide alike. The
ranks exchange headers once more after the last bucket. So all ranks learn of a failure on one
rank, and a bad gradient does not prevent the reduction of the others. If the headers differ, a
second, longer exchange finds the rank and the parameter (`_disagreement`). If a rank passes a wrong
gradient to a call, its first header has the flag CALL_REFUSED, and all ranks refuse the call.

An *entry* is one gradient with its sharding unit: the name of its parameter, and this rank's part
of the sum. The *terms* of a bucket are the operation, the divisor, dtypes and options of the sums.
"""

from __future__ import annotations

import json
import struct
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _core
from .._common.backend import backend_named
from .._common.dtypes import NARROW_FLOATS
from ..collectives._arguments import failed
from ..collectives._engine import OperationQueue
from ..errors import CollectiveError, GradientMismatchError, GradientNamesError
from ._backend import GradientBackend
from ._bucket import Entry, FullBucket, Terms
from ._disagreement import Result, compare_descriptions
from ._gradient_ops import norm_partials, on_host
from ._leaf_exchange import SentLeaves, add_leaves
from ._report import Bucket
from ._sharding_unit import FSDPShardingUnit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ._leaf_exchange import LeafStep

_LISTED = 5  # failures that an error lists
OVERFLOW = "with a GradScaler, which skips such steps, pass nonfinite='allow'"
_MAGIC = b"mlsg"
_HEADER = struct.Struct("<4sHQ16sQdH16s")  # 64 bytes
_MAX_READY = 0xFFFF  # limit of the header's 16-bit field `ready`

REFUSED = 1  # this rank cannot take part with all of its gradients
ENDED = 2  # this rank has nothing more to reduce
CALL_REFUSED = 4  # this rank passed a wrong gradient to a call, so no rank reduces any of them
UNUSED = 8  # with ENDED: this rank reduced zeros for parameters that it did not use
IDLE = 16  # this rank has no inputs left: its gradients are zeros, and do not count in a mean
STEP_ENDED = 32  # with order="tree": this rank has no more leaves in this step


class Header(NamedTuple):
    """What a rank tells all ranks before a bucket: that bucket, and results of the last ones."""

    flags: int  # REFUSED, ENDED, CALL_REFUSED, UNUSED, IDLE, STEP_ENDED
    sequence: int  # number of the bucket in the session, from 0
    digest: bytes  # of the parameters' names, shapes and dtypes, and of the settings
    nonfinite: int  # infinite or NaN elements in this rank's sums since its last header
    waited: float  # seconds that this rank waited for the others at its last header
    ready: int = 1  # number of buckets that this rank has ready
    plan: bytes = b""  # digest of all buckets of the session; empty: later ones are unknown
    leaves: bytes = b""  # with order="tree": `SentLeaves` of the bucket, after the 64 bytes

    def pack(self) -> bytes:
        """Return the header as bytes; `ready` is cut off at the limit of its field."""
        fields = (*self[:5], min(self.ready, _MAX_READY), self.plan)
        return _HEADER.pack(_MAGIC, *fields) + self.leaves

    @classmethod
    def unpack(cls, data: bytes) -> Header | None:
        """Return the header in `data`, or None if `data` is a message of another kind."""
        if len(data) < _HEADER.size or data[:4] != _MAGIC:
            return None
        _, *fields = _HEADER.unpack(data[: _HEADER.size])
        return cls._make([*fields, data[_HEADER.size :]])


def digest_of(facts: Iterable[str], settings: Mapping[str, Any]) -> bytes:
    """Return a 16-byte digest of parameters and reduction settings.

    `facts`: a text for each parameter (`FSDPShardingUnit.fact`), in order. `settings`: by name.
    """
    from hashlib import blake2b

    texts = [f"{name}={value}" for name, value in settings.items()]
    return blake2b("\n".join([*texts, *facts]).encode(), digest_size=16).digest()


class ConsistencyCheck:
    """The headers of one reduction session.

    `settings` must be equal on all ranks. Their keys appear in errors.
    """

    def __init__(self, group: Any, timeout: float | None, settings: Mapping[str, Any]) -> None:
        self._group = group
        self._timeout = timeout
        self._settings = settings
        self._waited = 0.0  # seconds that this rank waited for the others at its last header
        self.sequence = 0  # number of buckets that this rank has reduced

    def exchange_buckets(
        self,
        facts: Iterable[str],
        settings: Mapping[str, Any],
        nonfinite: int,
        flags: int,
        *,
        ready: int = 1,
        plan: bytes = b"",
        leaves: bytes = b"",
        pack: Callable[[], Any] | None = None,
    ) -> tuple[list[Header], int]:
        """Exchange headers before a bucket; `facts` describe its parameters.

        Returns the headers by rank, and how many buckets all ranks reduce now: 0 if they disagree
        on the first one or a rank refuses or has ended, more than one if all ranks have these ready
        and have equal plans. If the group can exchange bytes without this thread, `pack` runs
        meanwhile. `settings`: of this bucket. `nonfinite`, `flags`, `ready`, `plan`, `leaves`:
        members of this rank's header.
        """
        digest = digest_of(facts, {**self._settings, **settings})
        header = Header(flags, self.sequence, digest, nonfinite, self._waited, ready, plan, leaves)
        headers = self._exchange(header, pack)
        next_buckets = {(other.sequence, other.digest) for other in headers}
        # an idle rank reduces zeros like the others
        refusals = [other.flags & ~(IDLE | STEP_ENDED) for other in headers]
        if len(next_buckets) > 1 or any(refusals):
            return headers, 0
        if any(other.plan != headers[0].plan for other in headers):
            return headers, 1
        return headers, min([other.ready for other in headers])

    def exchange_end(self, nonfinite: int, *, has_unused: bool) -> tuple[list[Header], bool]:
        """Exchange headers after the last bucket; return them, and whether all ranks have ended.

        `nonfinite`: of the last sums. `has_unused`: this rank reduced zeros for unused parameters.
        """
        flags = ENDED | (UNUSED if has_unused else 0)
        header = Header(flags, self.sequence, b"", nonfinite, self._waited)
        headers = self._exchange(header, None)
        return headers, all(other.flags & ENDED for other in headers)

    def find_failures(
        self, entries: Sequence[Sequence[str]], settings: Mapping[str, Any], *, has_ended: bool
    ) -> Result:
        """Exchange descriptions with all ranks and return the parameters that differ.

        They are in `failures` of the result; `good` has the names that are equal on all ranks.
        `entries` describe this rank's next gradients: (name, fact, problem or "") of each
        parameter. `settings`: of the bucket. `has_ended`: this rank has no next gradient.
        """
        settings = {} if has_ended else {**self._settings, **settings}
        text = json.dumps([self.sequence, settings, has_ended, entries])
        return compare_descriptions(self._group.gather_bytes(text.encode(), timeout=self._timeout))

    def _exchange(self, header: Header, pack: Callable[[], Any] | None) -> list[Header]:
        """Exchange headers with all ranks; raise CollectiveError if a rank sends something else.

        `header`: of this rank. Returns the headers by rank. If the group can, `pack` runs while the
        headers travel. Otherwise it does not run, and the caller packs the bucket.
        """
        began = perf_counter()
        packing_seconds = 0.0
        gather = getattr(self._group, "_gather_overlapped", None)
        if pack is None or gather is None:
            texts = self._group.gather_bytes(header.pack(), timeout=self._timeout)
        else:

            def pack_timed() -> None:
                nonlocal packing_seconds
                start = perf_counter()
                pack()
                packing_seconds = perf_counter() - start

            texts = gather(header.pack(), pack_timed, self._timeout)
        self._waited = perf_counter() - began - packing_seconds
        headers = []
        for rank, text in enumerate(texts):
            other = Header.unpack(text)
            if other is None:
                error = failed(
                    "reduce_scatter",
                    self._group.rank,
                    f"rank {rank} calls gather_bytes at this point; all ranks must reduce "
                    "the same gradients",
                )
                error.rank = rank
                raise error
            headers.append(other)
        return headers


# ---- sessions ----


class Session:
    """The buckets of one backward pass, or of one call with several gradients.

    A reducer has at most one open session: opening another raises CollectiveError. The caller
    must call `close`, also after errors: it opens and closes it in a section of deferred
    interrupts. If the reducer records, `events` has the times of buckets.

    If the first bucket's header is to refuse the whole call on all ranks, set `refusal` to the
    class of this rank's error before; an entry must then have a problem.
    """

    def __init__(self, reducer: Reducer, step: LeafStep | None = None) -> None:
        """Open a session of `reducer`; raise CollectiveError if it has one already.

        `step`: with order="tree", the step whose leaves the session sends.
        """
        self._reducer = reducer
        self._step = step
        self._check = ConsistencyCheck(reducer.group, reducer.timeout, reducer.settings)
        self._unused: list[Entry] = []  # reduced as zeros, because this rank did not use them
        self._pending: list[Entry] = []  # sums not yet confirmed as finite on all ranks
        self._pending_terms = Terms()  # of the pending sums
        # by parameter: the rank at fault (None: several), and the reason
        self._failures: dict[str, tuple[int | None, str]] = {}
        self.refusal: type[GradientMismatchError] | None = None
        self._is_refused = False  # by any rank: the session has ended
        self._error: BaseException | None = None  # after it, ranks may be out of step
        self.events: list[Bucket] | None = [] if reducer.record else None
        if reducer.sessions.setdefault("open", self) is not self:  # atomic
            raise failed(
                "reduce_scatter",
                reducer.group.rank,
                "another reduction of this FSDP is under way; wait for it, or let its backward "
                "pass end",
            )

    def close(self) -> None:
        """Release the reducer; sums that no header has confirmed fail."""
        for entry in self._pending:
            entry.fail()
        self._pending = []
        if self._reducer.sessions.get("open") is self:
            self._reducer.sessions.clear()

    @property
    def failures(self) -> Mapping[str, tuple[int | None, str]]:
        """The rank at fault (None: several) and the reason, by parameter, on any rank."""
        return self._failures

    # ---- buckets ----

    def reduce(
        self, buckets: Sequence[FullBucket], entries: Sequence[Entry], plan: bytes = b""
    ) -> tuple[int, list[Entry] | None]:
        """Reduce the first of `buckets`, and the following ones that all ranks have ready too.

        `entries`: the gradients to agree on if ranks differ. `plan`: digest of all buckets of the
        session, or b"" if later buckets are unknown.

        Returns the number of reduced buckets, and None; `finish` raises their failures. If the
        ranks disagree on the first bucket, nothing is reduced. Then the number is 1, for this
        bucket, and the second value is the list of `entries` on which all ranks agree, in the same
        order on all ranks; the caller divides them into buckets again. If a rank refuses the call,
        all entries fail.

        Ranks with equal first buckets and equal non-empty plans must have equal later buckets.
        """
        started = perf_counter()
        try:
            if self._error is not None:
                raise self._error
            if self._step is not None and self._step.has_ended:
                return len(buckets), None
            if self._is_refused:
                for entry in [entry for bucket in buckets for entry in bucket.entries]:
                    entry.fail()
                return len(buckets), None
            return self._reduce(buckets, entries, plan, started)
        except BaseException as error:
            self._error = error
            bucket_entries = [entry for bucket in buckets for entry in bucket.entries]
            for entry in [*self._pending, *bucket_entries, *entries]:
                entry.fail()
            self._pending = []
            raise

    def _reduce(
        self, buckets: Sequence[FullBucket], entries: Sequence[Entry], plan: bytes, started: float
    ) -> tuple[int, list[Entry] | None]:
        """Exchange one header, then reduce the first buckets if all ranks agree; as `reduce`.

        If ranks disagree on the first bucket, the number returned is 1, although nothing is
        reduced: the caller reduces the returned entries in its place. `started`: time of the call,
        by `perf_counter`.
        """
        first, terms, _ = buckets[0]  # `first`: its entries
        step = self._step
        if step is not None:  # each bucket has a header, which describes its leaves
            buckets = buckets[:1]
        handles = self._reducer.prepare(buckets)
        settings = {"gradient_divide_factor": terms.divisor, "accumulate": terms.accumulate}
        headers, count = self._check.exchange_buckets(
            [entry.unit.fact for entry in first],
            settings,
            self._count_nonfinite(),
            (REFUSED if any(entry.problem for entry in first) else 0)
            | (CALL_REFUSED if self.refusal is not None else 0)
            | (STEP_ENDED if step is not None and step.is_idle else 0),
            ready=len(handles),
            plan=plan,
            leaves=b"" if step is None else step.describe(first),
            pack=(
                None
                if handles[0] is None or (step is not None and step.is_idle)
                else lambda: self._reducer.pack(handles[0])
            ),
        )
        agreed = perf_counter()
        self._store_pending(headers)
        if not count:
            return 1, self._agreed_entries(entries, settings, headers)
        if step is not None and all(header.flags & STEP_ENDED for header in headers):
            step.has_ended = True
            return 1, None
        for bucket, handle in zip(buckets[:count], handles, strict=False):
            self._check.sequence += 1
            if step is None:
                self._reducer.sum_bucket(bucket, handle)
            else:
                sent = [SentLeaves.unpack(header.leaves) for header in headers]
                add_leaves(self._reducer, first, sent, step.sums_of(first))
            self._pending = [*self._pending, *bucket.entries]
            self._pending_terms = bucket.terms
            self._unused += [entry for entry in bucket.entries if entry.is_unused]
            self._record_event(bucket.entries, bucket.since or started, started, agreed, headers)
            # the next bucket has no header
            started = agreed = perf_counter()
            headers = []
        return count, None

    def _agreed_entries(
        self, entries: Sequence[Entry], settings: dict[str, Any], headers: Sequence[Header]
    ) -> list[Entry]:
        """Return the entries that are equal on all ranks, none if refused; fail the others.

        `entries`: this rank's gradients. `settings`: of the bucket. `headers`: of all ranks, which
        show whether one refuses the call.
        """
        described = [
            (entry.unit.parameter_name, entry.unit.fact, entry.problem) for entry in entries
        ]
        result = self._check.find_failures(described, settings, has_ended=False)
        self._add_failures(result.failures)
        self._is_refused = _is_call_refused(headers)
        by_name = {entry.unit.parameter_name: entry for entry in entries}
        for name, entry in by_name.items():
            if self._is_refused or name in result.failures:
                entry.fail()
        return [] if self._is_refused else [by_name[name] for name in result.good]

    def _count_nonfinite(self) -> int:
        """Return the number of non-finite elements in pending sums; 0 if they are allowed."""
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
        """Record a reduced bucket, or the end of the session (no entries), for the report.

        Times are of `perf_counter`: bucket full (`ready`), header sent (`started`), headers
        received (`agreed`). `headers`: those received, or none. Does nothing unless recording.
        """
        if self.events is not None:
            size = sum(entry.bytes for entry in entries)
            names = tuple(entry.unit.parameter_name for entry in entries)
            waits = tuple(header.waited for header in headers)
            self.events.append(Bucket(names, size, ready, started, agreed, perf_counter(), waits))

    # ---- results ----

    def _store_pending(self, headers: Sequence[Header]) -> None:
        """Store the sums since the last header; fail those that are not finite on some rank.

        `headers`: of all ranks, with their number of non-finite elements.
        """
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
        """Return the failures of sums that are not finite: by name, rank at fault and reason.

        That is the first rank with a non-finite gradient, or if all gradients are finite, the first
        one whose part of the sum is not. All ranks must call this: they exchange, for each entry,
        the number of non-finite elements in their gradient and in their part of the sum.
        """
        own_counts = {}
        for entry in entries:
            name = entry.unit.parameter_name
            sources = [entry.source] if entry.nodes is None else list(entry.nodes.values())
            count = sum([norm_partials({name: source})[name][1] for source in sources])
            own_counts[name] = count, entry.nonfinite
        texts = self._reducer.group.gather_bytes(
            json.dumps(own_counts).encode(), timeout=self._reducer.timeout
        )
        ranks: list[dict[str, list[int]]] = [json.loads(text) for text in texts]
        bad: dict[str, tuple[int | None, str]] = {}
        for name in own_counts:
            # by rank, (in its gradient, in its part of the sum); absent after an abandoned pass
            counts = [rank_counts.get(name, (0, 0)) for rank_counts in ranks]
            gradients = [(rank, count) for rank, (count, _) in enumerate(counts) if count]
            parts = [(rank, count) for rank, (_, count) in enumerate(counts) if count]
            if gradients and parts:  # a minimum of such elements can be finite
                reason = "; ".join(f"rank {rank}: {count:,}" for rank, count in gradients)
                bad[name] = gradients[0][0], f"NaN or infinite elements ({reason}); {OVERFLOW}"
            elif parts:
                reason = "; ".join(f"shard of rank {rank}: {count:,}" for rank, count in parts)
                bad[name] = (
                    parts[0][0],
                    f"the sum is not finite, all gradients are ({reason}); {OVERFLOW}",
                )
        return bad

    def _undo_unused(self) -> None:
        """Restore the earlier gradients of those parameters that no rank used.

        All ranks must call this: they exchange the names of their unused parameters.
        """
        entries = {entry.unit.parameter_name: entry for entry in self._unused}
        texts = self._reducer.group.gather_bytes(
            json.dumps(list(entries)).encode(), timeout=self._reducer.timeout
        )
        for name in set(entries).intersection(*map(json.loads, texts)):
            entries[name].undo_unused()

    def finish(self, operation: str) -> None:
        """Wait until all ranks end their session, and raise the failures, on all ranks.

        Gradients of parameters that no rank used get their earlier values back. `operation`: its
        name, for the error. The error is a CollectiveError, or on a rank that refused the call of
        the class `refusal`.
        """
        has_ended = self._is_refused or (self._step is not None and self._step.has_ended)
        while not has_ended:
            started = perf_counter()
            headers, has_ended = self._check.exchange_end(
                self._count_nonfinite(), has_unused=bool(self._unused)
            )
            self._record_event((), started, started, perf_counter(), headers)
            self._store_pending(headers)
            if not has_ended:  # another rank has one more bucket: its gradients fail everywhere
                self._add_failures(self._check.find_failures((), {}, has_ended=True).failures)
                self._is_refused = has_ended = _is_call_refused(headers)
            elif all(header.flags & UNUSED for header in headers):
                self._undo_unused()
        if self._failures:
            result = "not reduced, all others were"
            if self._step is not None:
                result = "not reduced, and the step begins again"
            if self._is_refused:
                any_more = " more" if self._check.sequence else ""
                result = f"refused, nothing{any_more} was stored on any rank"
            rank = self._reducer.group.rank
            cls = self.refusal or CollectiveError
            raise _failed_gradients(cls, operation, rank, result, self._failures)


# ---- the reducer of one group ----


class Reducer:
    """The reduction of gradients over one group: buckets, settings, and memory of its sessions.

    `terms` apply to gradients of any dtype. `settings` must be equal on all ranks; their keys
    appear in errors. This class itself uses ``bucket_bytes`` and ``allow_unused``. A `timeout` of
    None means the group's timeout. `record`: sessions record the times of buckets.
    """

    def __init__(
        self,
        group: Any,
        terms: Terms,
        settings: Mapping[str, Any],
        *,
        timeout: float | None,
        record: bool = False,
    ) -> None:
        """Keep the arguments, which the class describes; sends nothing to other ranks."""
        self.rank, self.world_size = int(group.rank), int(group.world_size)
        self.group, self.timeout = group, timeout
        self.sessions: dict[str, Session] = {}  # "open": the open one, if any
        self.queue = OperationQueue("mlstate-fsdp", group.rank)  # its thread reduces during a pass
        self.settings = dict(settings)
        self.allow_unused = bool(settings.get("allow_unused"))
        self.refuses_nonfinite = terms.nonfinite == "error"
        self.record = record
        # what `pack` returned for the message in `_send`; None: nothing is packed
        self._packed: tuple[list[int], int] | None = None
        self.drop_buffers()
        self._terms = terms
        self._terms_of: dict[tuple[str, bool], Terms] = {}  # by dtype and accumulate

    def terms(self, unit: FSDPShardingUnit, *, accumulate: bool = False) -> Terms:
        """Return the reduction terms of a unit's gradient; they depend on its dtype.

        `reduce_dtype` applies to floats below 32 bits. `accumulate`: a member of the terms: the sum
        is added to an existing local gradient.
        """
        terms = self._terms_of.get((unit.dtype, accumulate))
        if terms is None:
            terms = self._terms_of[unit.dtype, accumulate] = self._terms._replace(
                accumulate=accumulate,
                reduce_dtype=self._terms.reduce_dtype if unit.dtype in NARROW_FLOATS else "",
            )
        return terms

    def divide(self, units: Iterable[FSDPShardingUnit]) -> Iterator[list[FSDPShardingUnit]]:
        """Yield buckets of consecutive units with equal terms.

        A bucket ends with the unit that brings it to ``bucket_bytes``, so it may be larger.
        """
        bucket: list[FSDPShardingUnit] = []
        size = 0
        for unit in units:
            if bucket:
                size += bucket[-1].full_bytes
                has_other_terms = unit.dtype != bucket[0].dtype and self.terms(unit) != self.terms(
                    bucket[0]
                )
                if size >= self.settings["bucket_bytes"] or has_other_terms:
                    yield bucket
                    bucket, size = [], 0
            bucket.append(unit)
        if bucket:
            yield bucket

    def scatter(self, units: Mapping[str, FSDPShardingUnit], gradients: Mapping[str, Any]) -> None:
        """Reduce full `gradients` and store this rank's parts in `units`; both dicts are by name.

        If a gradient does not fit, or a name is in only one dict (unless `allow_unused` permits a
        missing gradient), all ranks refuse the call and store nothing. The rank at fault raises
        GradientMismatchError or, for names, GradientNamesError; the others CollectiveError.
        """
        entries, has_same_names = [], True
        for name, unit in units.items():
            absence = "" if name in gradients else "no gradient was passed"
            entry = Entry(
                unit, gradients.get(name), allow_unused=self.allow_unused, absence=absence
            )
            has_same_names = has_same_names and not (absence and entry.problem)
            entries.append(entry)
        for name in gradients:
            if name not in units:
                # a stand-in, so that all ranks learn of the name
                unit = FSDPShardingUnit(name, (), "float32", self.rank, world_size=self.world_size)
                entries.append(Entry(unit, None, "there is no sharding unit for this gradient"))
                has_same_names = False
        self.reduce_now("scatter_multiple", entries, has_same_names=has_same_names)

    def scatter_one(
        self,
        unit: FSDPShardingUnit,
        gradient: object,
        problem: str = "",
        *,
        accumulate: bool = False,
    ) -> Any:
        """Reduce `gradient`, the full gradient of `unit`, and return this rank's part.

        `problem`: why it cannot be reduced, or ""; with one, all ranks refuse the call and raise
        it. `accumulate`: add to an existing local gradient.
        """
        entry = Entry(unit, gradient, problem, allow_unused=self.allow_unused)
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

        If an entry has a problem already, all ranks refuse the call and store nothing. `operation`:
        its name, for errors. `accumulate`: add to existing local gradients. `has_same_names`: False
        makes this rank's error a GradientNamesError.
        """
        with _core.deferred_interrupts() as section:
            session = Session(self)
            try:
                with section.allowed():
                    if any(entry.problem for entry in entries):
                        refusal = GradientMismatchError if has_same_names else GradientNamesError
                        session.refusal = refusal
                    entries = sorted(entries, key=lambda entry: entry.unit.parameter_name)
                    self.reduce_entries(session, entries, accumulate=accumulate)
                    session.finish(operation)
            finally:
                session.close()

    def reduce_entries(self, session: Session, entries: list[Entry], *, accumulate: bool) -> None:
        """Divide the gradients `entries` into buckets and reduce them in the open `session`.

        If ranks disagree, those on which they agree are divided again. The caller finishes the
        session, which raises the failures. `accumulate`: add to existing local gradients.
        """
        while entries:
            buckets, start = [], 0
            for units in self.divide([entry.unit for entry in entries]):
                terms = self.terms(units[0], accumulate=accumulate)
                buckets.append(FullBucket(entries[start : start + len(units)], terms))
                start += len(units)
            plan = plan_digest(entry.unit for entry in entries) if len(buckets) > 1 else b""
            count, agreed = session.reduce(buckets, entries, plan)
            done = sum([len(bucket.entries) for bucket in buckets[:count]])
            entries = entries[done:] if agreed is None else agreed

    # ---- sums ----

    def drop_buffers(self) -> None:
        """Free the message buffers; the next bucket allocates new ones."""
        # messages to the other ranks, and messages from them
        self._send = self._receive = np.empty(0, np.uint8)
        self._packed = None

    def prepare(self, buckets: Sequence[FullBucket]) -> list[Any]:
        """Return core handles of the first bucket and of the following ones that need no copies.

        None is for a first bucket that the core cannot reduce: an entry has a problem, or is
        not in main memory. At most one bucket is copied at a time, to bound the memory of copies.
        """
        self._packed = None
        prepared: list[Any] = []
        for bucket in buckets:
            handle = self._prepare_bucket(bucket.entries, bucket.terms)
            if prepared and handle is None:
                break
            prepared.append(handle)
            if handle is None or not all(entry.fits for entry in bucket.entries):
                break
        return prepared

    def _prepare_bucket(self, entries: Sequence[Entry], terms: Terms) -> _core.Bucket | None:
        """Find memory for all entries of one bucket; return the core's handle of the bucket.

        None if an entry has a problem, or is not in main memory. An error of the core becomes the
        problem of the entry that causes it. If none alone causes one, local gradients share memory,
        and all sums get new memory.
        """
        if not terms.accumulate:
            handle = self._reuse_outputs(entries, terms)
            if handle is not None:
                return handle
        for entry in entries:
            entry.find_memory(terms)
        # entries that the core can reduce
        usable = [e for e in entries if not e.problem and (e.fits or on_host(e.source))]
        segments = [entry.segment() for entry in usable]
        is_complete = len(usable) == len(entries)
        try:
            handle = self._handle(segments, terms)
            return handle if is_complete else None
        except Exception:  # find the entry at fault: all ranks raise its error
            for entry, segment in zip(usable, segments, strict=True):
                try:
                    self._handle([segment], terms)
                except Exception as error:
                    entry.problem = f"{type(error).__name__}: {error}"
        if any(entry.problem for entry in usable):
            return None
        for entry in usable:
            entry.unit.local_gradient = None
            entry.find_memory(terms)
        handle = self._handle([entry.segment() for entry in usable], terms)
        return handle if is_complete else None

    def _reuse_outputs(self, entries: Sequence[Entry], terms: Terms) -> _core.Bucket | None:
        """Return the handle of a bucket of plain gradients that reuses local gradients as outputs.

        Also sets each entry's `out` to its local gradient. Returns None, and sets nothing, if a
        local gradient is absent or does not fit. Only the core checks them, which is faster than
        Python.
        """
        segments = []
        for entry in entries:
            unit = entry.unit
            if not entry.fits or unit.local_gradient is None:
                return None
            dtype, out = terms.reduce_dtype or unit.dtype, unit.local_gradient
            segments.append((entry.source, unit._counts, out, dtype, unit._local_shape))
        try:
            handle = self._handle(segments, terms)
        except Exception:  # `_prepare_bucket` finds the entry at fault
            return None
        for entry, (_, _, out, _, _) in zip(entries, segments, strict=True):
            entry.out = out
        return handle

    def _handle(self, segments: list[Any], terms: Terms) -> _core.Bucket:
        """Return the core's handle of a bucket of segments; raise if one does not fit.

        A segment is a tuple: gradient, number of elements of each rank's part, and output, which is
        this rank's part. If the core is to check the output, its dtype and shape follow.
        """
        return _core.bucket(segments, self.world_size, self.rank, terms.op, terms.divisor)

    def pack(self, handle: _core.Bucket) -> tuple[list[int], int]:
        """Pack this rank's messages of a prepared bucket, which must be summed next.

        The messages are in `_send`. Returns the number of bytes for each rank, and the number that
        each other rank sends to this one.
        """
        sizes, own_bytes = _core.bucket_sizes(handle)
        self._send = _ensure_size(self._send, sum(sizes))
        _core.bucket_pack(handle, self._send)
        self._packed = sizes, own_bytes
        return self._packed

    def sum_bucket(self, bucket: FullBucket, handle: _core.Bucket | None) -> None:
        """Reduce a prepared bucket into its outputs, together with all ranks.

        Sets `nonfinite` of each entry. `handle` is None if the core cannot read the gradients. The
        messages may have been packed already, during the exchange of headers.
        """
        entries, terms, _ = bucket
        if handle is None:
            reduce_on_device = backend_named("torch", GradientBackend).reduce_on_device
            partials = [reduce_on_device(self.group, e, terms, self.timeout) for e in entries]
        else:
            partials = self.reduce_on_host(handle, f"{terms.op} of {len(entries)} arrays")
        self._packed = None
        for entry, (_, nonfinite) in zip(entries, partials, strict=True):
            entry.nonfinite = nonfinite

    def new_handle(self, segments: list[Any], *, is_packed: bool) -> _core.Bucket:
        """Return a handle with other sums than the prepared ones of a bucket; see `_handle`.

        `is_packed`: its arrays are those that may have been packed already.
        """
        if not is_packed:
            self._packed = None
        return self._handle(segments, Terms())

    def reduce_on_host(self, handle: _core.Bucket, text: str) -> list[tuple[float, int]]:
        """Reduce a bucket that the core can read, and return the norm partials of the sums.

        `text` describes it, and is equal on all ranks. The messages may have been packed already.
        """
        if hasattr(self.group, "_reduce_bucket"):
            partials: list[tuple[float, int]] = self.group._reduce_bucket(
                handle, text, self.timeout
            )
            return partials
        self._exchange_parts(*self._packed or self.pack(handle))
        self._packed = None
        return _core.bucket_reduce(handle, self._receive)

    def _exchange_parts(self, sizes: list[int], own_bytes: int) -> None:
        """Send each rank its part of the packed message, and receive this rank's part from each.

        `sizes`: number of bytes for each rank, 0 for this one. `own_bytes`: number from each other
        rank. The received bytes are in `_receive`, in rank order.
        """
        expected = [own_bytes] * self.world_size
        expected[self.rank] = 0
        self._receive = _ensure_size(self._receive, sum(expected))
        if self.world_size > 1:
            self.group.all_to_all(
                self._send[: sum(sizes)],
                out=self._receive[: sum(expected)],
                counts=sizes,
                out_counts=expected,
                timeout=self.timeout,
            )


# ---- helpers ----


def _ensure_size(buffer: Any, size: int) -> Any:
    """Return `buffer` if it has at least `size` bytes, else a new one; contents are not kept."""
    return buffer if len(buffer) >= size else np.empty(size, np.uint8)


def plan_digest(units: Iterable[FSDPShardingUnit]) -> bytes:
    """Return a digest of all buckets of a session, in order of their units.

    Ranks that agree on the first bucket reduce later ones without a header if it is equal.
    """
    return digest_of((unit.fact for unit in units), {"plan": "all"})


def _is_call_refused(headers: Sequence[Header]) -> bool:
    return any(header.flags & CALL_REFUSED for header in headers)


def _failed_gradients(
    cls: type[CollectiveError],
    operation: str,
    rank: int,
    result: str,
    failures: Mapping[str, tuple[int | None, str]],
) -> CollectiveError:
    """Return the error that lists the failed gradients, for all ranks.

    `cls`: its class. `operation`, `rank`: of this call. `result`: what happened to the gradients,
    the end of "2 gradients were ...". `failures`: by parameter, the rank at fault (None: several)
    and the reason.
    """
    lines = [f"{name!r}: {reason}" for name, (_, reason) in failures.items()]
    more = f"\n  … {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    listed = "\n  ".join(lines[:_LISTED]) if len(lines) > 1 else lines[0]
    gap = "\n  " if len(lines) > 1 else " "
    count = f"{len(lines)} gradients were" if len(lines) > 1 else "a gradient was"
    error = cls(f"{operation} on rank {rank}: {count} {result}:{gap}{listed}{more}")
    error.name, (error.rank, _) = next(iter(failures.items()))
    return error
