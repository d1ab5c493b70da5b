"""Buckets of gradients, one after the other: agreed, reduced, checked and stored.

A run is a series of buckets that all ranks reduce in the same order. Before each, or before as
many as all ranks have ready, they tell each other in 64 bytes what they are about to reduce and
whether the sums since the last message are finite; after the last one they do that once more.
So what one rank finds wrong, all know, and what is wrong with one gradient does not keep the
others from being reduced.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from . import _core
from ._arrays import is_torch
from ._collective_args import dtype_name
from ._common.backend import backend_named, backend_of
from ._fsdp_unit import FSDPShardingUnit
from ._gradients import add, memory_of, on_host, packed, place, plain, tallies
from ._guard import (
    ENDED,
    REFUSED,
    Head,
    all_agree,
    digest_of,
    judge,
    ready_on_all,
    settings_text,
    tell,
)
from .errors import CollectiveError, GradientNamesError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ._guard import Verdict

Segment: TypeAlias = tuple[Any, tuple[int, ...], Any]  # gradient, counts of ranks, output
# the same, with dtype and shape that the output is to have
Again: TypeAlias = tuple[Any, tuple[int, ...], Any, str, tuple[int, ...]]

_SHOWN = 5  # failures that an error lists


class Entry:
    """A gradient on its way to the ranks that own its parts.

    Parameters
    ----------
    unit : FSDPShardingUnit
        Whose gradient it is.
    gradient : array or torch.Tensor or None
        The full gradient.
    why : str
        What is wrong with it, to be told to all ranks; empty for nothing.
    lost : callable, optional
        Called where the operation failed, and the part is not stored.
    """

    __slots__ = ("flat", "gradient", "lost", "out", "plain", "unit", "why")

    def __init__(
        self,
        unit: FSDPShardingUnit,
        gradient: Any,
        why: str = "",
        lost: Callable[[], None] | None = None,
    ) -> None:
        self.unit = unit
        self.lost = lost
        self.out: Any = None
        # most gradients are as the core wants them, which it sees sooner than Python
        self.plain = not why and _core.bucket_fits(gradient, unit.dtype, unit.shape, False)
        if self.plain:
            self.gradient = self.flat = gradient
            self.why = ""
        else:
            self.gradient = plain(gradient)
            self.flat = None
            self.why = why or _wrong(unit, self.gradient)

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.unit.parameter_name

    @property
    def bytes(self) -> int:
        """Size of the full gradient."""
        return 0 if self.gradient is None else int(self.gradient.nbytes)

    def end(self, stored: bool) -> None:
        """Tell who waits for it, and let the full gradient go.

        What failed leaves no local gradient: neither half of a sum, nor that of a step before.
        """
        if not stored:
            self.unit.local_gradient = None
            if self.lost is not None:
                self.lost()
        self.gradient = self.flat = self.out = self.lost = None


def _is_common(gradient: Any) -> bool:
    """Whether this is a dense tensor in main memory, and no other class of tensors."""
    torch = sys.modules["torch"]
    return type(gradient) is torch.Tensor and gradient.is_cpu and gradient.layout is torch.strided


def _wrong(unit: FSDPShardingUnit, gradient: Any) -> str:
    """Say why a gradient does not fit its unit."""
    like = unit.like  # of torch, which compares more quickly than names do
    if like is not None and type(gradient) is type(like) and _is_common(gradient):
        same = gradient.shape == like.shape and gradient.dtype is like.dtype
        if same:
            return ""
    if gradient is None:
        return "no gradient"
    if not is_torch(gradient) and not isinstance(gradient, np.ndarray):
        return f"the gradient is a {type(gradient).__name__}, not an array or tensor"
    if isinstance(gradient, np.ma.MaskedArray):
        return "the gradient is a MaskedArray, whose mask has no sum; pass gradient.filled(0)"
    shape = tuple(gradient.shape)
    if shape != unit.shape:
        return f"the gradient has shape {shape}, expected {unit.shape}"
    if dtype_name(gradient) != unit.dtype:
        return f"the gradient has dtype {dtype_name(gradient)}, expected {unit.dtype}"
    if isinstance(gradient, np.ndarray) or _is_common(gradient):
        return ""
    reason = backend_of(gradient).why_not_reduced(gradient)
    return reason and f"the gradient is {reason}"


class Terms(NamedTuple):
    """How gradients are reduced: the same on all ranks.

    Attributes
    ----------
    op : str
        "sum", "min" or "max".
    divisor : float
        What sums are divided by.
    reduce_dtype : str
        Dtype of the local gradients, empty for that of the full ones.
    nonfinite : str
        "error" or "allow".
    accumulate : bool
        Whether the result is added to the local gradient that is there.
    compression : str
        Name of what elements travel as, empty for themselves.
    """

    op: str = "sum"
    divisor: float = 1.0
    reduce_dtype: str = ""
    nonfinite: str = "error"
    accumulate: bool = False
    compression: str = ""


class Full(NamedTuple):
    """A bucket whose gradients are all there.

    Attributes
    ----------
    entries : list of Entry
        Its gradients.
    terms : Terms
        How they are reduced.
    since : float
        By `time.perf_counter`; 0 where nobody noted it.
    """

    entries: list[Entry]
    terms: Terms
    since: float = 0.0


class Event(NamedTuple):
    """One bucket, or the end of a run, as it was on this rank, by `time.perf_counter`.

    Attributes
    ----------
    names : tuple of str
        Its parameters.
    bytes : int
        Of their full gradients.
    ready, started, agreed, ended : float
        When it was full, when its turn came, when all ranks had told what they reduce, and
        when the sums were there.
    waits : tuple of float
        Seconds that each rank waited for the others with the message before; empty for a bucket
        that came without a message of its own.
    """

    names: tuple[str, ...]
    bytes: int
    ready: float
    started: float
    agreed: float
    ended: float
    waits: tuple[float, ...]


# ---- memory ----


def _output(unit: FSDPShardingUnit, gradient: Any, terms: Terms) -> Any:
    """Return where the result goes: the local gradient that is there, if it fits."""
    name = terms.reduce_dtype or unit.dtype
    there = unit.local_gradient
    fits = (
        there is not None
        and not terms.accumulate
        and is_torch(there) == is_torch(gradient)
        and tuple(there.shape) == unit.local_shape
        and dtype_name(there) == name
    )
    if is_torch(gradient):
        if fits and there.is_contiguous() and there.device == gradient.device:
            return there.detach() if there.requires_grad else there
        import torch

        return gradient.new_empty(unit.local_shape, dtype=getattr(torch, name))
    if fits and there.flags.carray and there.dtype.isnative:  # packed, aligned, writeable
        return there
    dtype = gradient.dtype.newbyteorder("=") if name == unit.dtype else np.dtype(name)
    return np.empty(unit.local_shape, dtype)


def _check_sum(entry: Entry) -> None:
    """Refuse to add to what the result does not go with, while all ranks can be told."""
    there, out = entry.unit.local_gradient, entry.out
    if there is None:
        return
    for what, got, expected in (
        ("place", place(there), place(out)),
        ("shape", str(tuple(there.shape)), str(tuple(out.shape))),
        ("dtype", dtype_name(there), dtype_name(out)),
    ):
        if got != expected:
            raise ValueError(f"the local gradient to add to has {what} {got}, expected {expected}")
    if not is_torch(there) and not there.flags.writeable:
        raise ValueError("the local gradient to add to is read-only")


def _segment(entry: Entry) -> Segment:
    """Return an entry as the core reduces it."""
    if entry.plain:
        return entry.flat, entry.unit.counts, entry.out
    return memory_of(entry.flat), entry.unit.counts, memory_of(entry.out)


class Reducer:
    """Runs of buckets over one group.

    Parameters
    ----------
    group : ProcessGroup
        The group.
    timeout : float or None
        Seconds for each operation, None for the group's own.
    settings : dict of str to object
        What all ranks must have chosen alike, in words for an error.
    """

    def __init__(self, group: Any, timeout: float | None, settings: Mapping[str, Any]) -> None:
        self._group = group
        self._timeout = timeout
        self._settings = dict(settings)
        self._send = self._receive = self._own = np.empty(0, np.uint8)
        self._packed: tuple[list[int], int] | None = None  # sizes of what `_send` has already
        self.events: list[Event] | None = None
        self._pending: list[Entry] = []
        self.begin()

    def begin(self) -> None:
        """Forget the run before, however it ended."""
        self._broken: BaseException | None = None
        self._sequence = 0
        self._waited = 0.0
        for entry in self._pending:  # nobody knows whether its sum is finite
            entry.end(stored=False)
        self._pending = []
        self._tallies: list[tuple[float, int]] = []
        self._pending_terms = Terms()
        self.failures: dict[str, tuple[int | None, str]] = {}
        self.squares: dict[str, float] = {}

    def drop_buffers(self) -> None:
        """Free the memory of messages."""
        self._send = self._receive = self._own = np.empty(0, np.uint8)
        self._packed = None

    # ---- buckets ----

    def reduce(
        self, buckets: Sequence[Full], told: Sequence[Entry], plan: bytes = b""
    ) -> tuple[int, list[Entry] | None]:
        """Reduce the first of the buckets, and those after it that all ranks have ready too.

        Returns their number, and None; what fails is kept for `finish` to raise. Where ranks do
        not agree on the first, nothing is reduced, and what they do agree on of `told` is
        returned, in one order for all, to be divided into buckets anew.

        Two ranks whose first buckets are the same, and whose `plan` is, must have the same
        buckets after it. An empty one says nothing of them.
        """
        started = perf_counter()
        try:
            if self._broken is not None:  # nobody is there, or nobody knows where ranks are
                raise self._broken
            return self._reduce(buckets, told, plan, started)
        except BaseException as error:
            self._broken = error
            given = [entry for full in buckets for entry in full.entries]
            for entry in [*self._pending, *given, *told]:
                entry.end(stored=False)
            self._pending = []
            raise

    def _reduce(
        self, buckets: Sequence[Full], told: Sequence[Entry], plan: bytes, started: float
    ) -> tuple[int, list[Entry] | None]:
        ready = self._ready(buckets)
        entries, terms, _ = buckets[0]
        settings = {
            **self._settings,
            "gradient_divide_factor": terms.divisor,
            "accumulate": terms.accumulate,
        }
        digest = digest_of((entry.unit.fact for entry in entries), settings_text(settings))
        refused = REFUSED if any(entry.why for entry in entries) else 0
        head = self._head(refused, digest)._replace(ready=len(ready), plan=plan)
        heads = self._exchange(head, None if terms.compression else ready[0])
        agreed = perf_counter()
        self._settle(heads)
        if not all_agree(heads):
            return 1, self._good(told, settings)
        count = ready_on_all(heads)
        for full, bucket in zip(buckets[:count], ready, strict=False):
            self._sequence += 1
            self._tallies += self._sums(full.entries, full.terms, bucket)
            self._packed = None  # that was the first of them
            self._pending, self._pending_terms = [*self._pending, *full.entries], full.terms
            self._note(full.entries, full.since or started, started, agreed, heads)
            started = agreed = perf_counter()
            heads = []
        return count, None

    def _ready(self, buckets: Sequence[Full]) -> list[Any]:
        """Prepare the first bucket, and those after it that need no memory to be prepared.

        Of copies there is never more than one bucket. What is wrong with one is told when it is
        the first.
        """
        ready: list[Any] = []
        for full in buckets:
            bucket = self._prepare(full.entries, full.terms)
            if ready and bucket is None:
                break
            ready.append(bucket)
            if bucket is None or not all(entry.plain for entry in full.entries):
                break
        return ready

    def _note(
        self,
        entries: Sequence[Entry],
        ready: float,
        started: float,
        agreed: float,
        heads: Sequence[Head],
    ) -> None:
        """Record a bucket that has been reduced, or the end of a run, which has no entries."""
        if self.events is not None:
            size = sum(entry.bytes for entry in entries)
            names = tuple(entry.name for entry in entries)
            waits = tuple(head.waited for head in heads)
            self.events.append(Event(names, size, ready, started, agreed, perf_counter(), waits))

    def _good(self, entries: Sequence[Entry], settings: Mapping[str, Any]) -> list[Entry]:
        """Return the entries on which all ranks agree."""
        verdict = self._ask(entries, settings, ended=False)
        for entry in entries:
            if entry.name in verdict.failures:
                entry.end(stored=False)
        by_name = {entry.name: entry for entry in entries}
        return [by_name[name] for name in verdict.good]

    def _prepare(self, entries: Sequence[Entry], terms: Terms) -> Any:
        """Find memory for all entries; return them as the core reduces them, if it can."""
        if not terms.accumulate and not terms.compression:
            bucket = self._like_before(entries, terms)
            if bucket is not None:
                return bucket
        for entry in entries:
            self._find_memory(entry, terms)
        near = [e for e in entries if not e.why and (e.plain or on_host(e.flat))]
        segments = [_segment(entry) for entry in near]
        try:
            bucket = self._capsule(segments, terms)
            return bucket if len(near) == len(entries) else None
        except Exception:  # all ranks are told which of them it was
            for entry, segment in zip(near, segments, strict=True):
                try:
                    self._capsule([segment], terms)
                except Exception as error:
                    entry.why = f"{type(error).__name__}: {error}"
            if not any(entry.why for entry in near):
                raise
        return None

    def _like_before(self, entries: Sequence[Entry], terms: Terms) -> Any:
        """Return the bucket of plain gradients whose results go where those of a step before are.

        None where one of them is not there, or not like that: all are looked at by the core
        alone, which sees them sooner than Python.
        """
        segments: list[Again] = []
        for entry in entries:
            unit = entry.unit
            if not entry.plain or unit.local_gradient is None:
                return None
            name = terms.reduce_dtype or unit.dtype
            segments.append((entry.flat, unit.counts, unit.local_gradient, name, unit.local_shape))
        try:
            bucket = self._capsule(segments, terms)
        except Exception:  # found out again, for each by itself
            return None
        for entry, segment in zip(entries, segments, strict=True):
            entry.out = segment[2]
        return bucket

    def _find_memory(self, entry: Entry, terms: Terms) -> None:
        """Find memory for an entry: to be read, and to be written."""
        if entry.why:
            return
        try:
            if not entry.plain:
                entry.flat = packed(entry.gradient)
            entry.out = _output(entry.unit, entry.gradient, terms)
            if terms.accumulate:
                _check_sum(entry)
            if terms.compression and not on_host(entry.flat):
                entry.why = f"compression of a gradient on {entry.flat.device}, not in main memory"
        except Exception as error:  # told to all ranks, which then raise it together
            entry.why = f"{type(error).__name__}: {error}"

    def _capsule(self, segments: list[Segment] | list[Again], terms: Terms) -> Any:
        group = self._group
        return _core.bucket(segments, group.world_size, group.rank, terms.op, terms.divisor)

    def _head(self, flags: int, digest: bytes) -> Head:
        """Return what this rank has to say."""
        nonfinite = 0
        if self._pending_terms.nonfinite == "error":
            nonfinite = sum(count for _, count in self._tallies)
        return Head(flags, self._sequence, digest, nonfinite, self._waited)

    def _exchange(self, head: Head, bucket: Any = None) -> list[Head]:
        """Tell the others what comes, and hear what they do.

        Where an engine sends messages by itself, the bucket is packed meanwhile: no time is
        lost with waiting for these few bytes.
        """
        self._packed = None
        began = perf_counter()
        packing = 0.0
        gather = None if bucket is None else getattr(self._group, "_gather_meanwhile", None)
        if gather is None:
            texts = self._group.gather_bytes(head.pack(), timeout=self._timeout)
        else:

            def pack() -> None:
                nonlocal packing
                start = perf_counter()
                self._packed = self._pack(bucket)
                packing = perf_counter() - start

            texts = gather(head.pack(), pack, self._timeout)
        self._waited = perf_counter() - began - packing
        heads = []
        for rank, text in enumerate(texts):
            found = Head.unpack(text)
            if found is None:
                raise _something_else(self._group.rank, rank)
            heads.append(found)
        return heads

    def _pack(self, bucket: Any) -> tuple[list[int], int]:
        """Pack what the others get of a bucket; return its sizes, and that of what they send."""
        sizes, mine = _core.bucket_sizes(bucket)
        self._send = _at_least(self._send, sum(sizes))
        _core.bucket_pack(bucket, self._send)
        return sizes, mine

    def _ask(
        self, entries: Sequence[Entry], settings: Mapping[str, Any], *, ended: bool
    ) -> Verdict:
        """Find out with all ranks where they differ."""
        listed = [(entry.name, entry.unit.fact, entry.why) for entry in entries]
        text = tell(self._sequence, settings, ended, listed)
        verdict = judge(self._group.gather_bytes(text, timeout=self._timeout))
        self._keep(verdict.failures)
        return verdict

    def _keep(self, failures: Mapping[str, tuple[int | None, str]]) -> None:
        """Note what failed: of each gradient what was wrong first, the rest follows from it."""
        for name, failure in failures.items():
            self.failures.setdefault(name, failure)

    # ---- sums ----

    def _sums(self, entries: list[Entry], terms: Terms, bucket: Any) -> list[tuple[float, int]]:
        """Reduce gradients on which all ranks agree; `bucket` has them if all are on the host."""
        if bucket is None:
            reduce_on_device = backend_named("torch").reduce_on_device
            return [
                reduce_on_device(
                    self._group,
                    e.flat,
                    e.unit.counts,
                    e.out,
                    terms.op,
                    terms.divisor,
                    self._timeout,
                )
                for e in entries
            ]
        if not terms.compression and hasattr(self._group, "_reduce_bucket"):
            text = f"{terms.op} of {len(entries)} arrays"
            found: list[tuple[float, int]] = self._group._reduce_bucket(bucket, text, self._timeout)
            return found
        if terms.compression:
            return self._compressed(bucket, entries, terms.compression)
        sizes, mine = self._packed or self._pack(bucket)
        self._exchange_parts(sizes, mine)
        return _core.bucket_reduce(bucket, self._receive)

    def _compressed(
        self, bucket: Any, entries: list[Entry], compression: str
    ) -> list[tuple[float, int]]:
        """Reduce gradients that travel in fewer bytes."""
        sizes, mine = _core.bucket_wire_sizes(bucket, compression)
        self._send = _at_least(self._send, sum(sizes))
        self._own = _at_least(self._own, mine)
        residuals = tuple(entry.unit.residual() for entry in entries)
        _core.bucket_wire_pack(bucket, compression, residuals, self._send, self._own)
        self._exchange_parts(sizes, mine)
        return _core.bucket_wire_reduce(bucket, compression, self._own, self._receive)

    def _exchange_parts(self, sizes: list[int], mine: int) -> None:
        """Send each rank what was packed for it, and receive what they packed for this one."""
        expected = [mine] * self._group.world_size
        expected[self._group.rank] = 0
        self._receive = _at_least(self._receive, sum(expected))
        if len(expected) > 1:
            self._group.all_to_all(
                self._send[: sum(sizes)],
                out=self._receive[: sum(expected)],
                counts=sizes,
                out_counts=expected,
                timeout=self._timeout,
            )

    # ---- what became of it ----

    def _settle(self, heads: Sequence[Head]) -> None:
        """Store the sums since the last message, but for those that are not finite."""
        pending, tallies, terms = self._pending, self._tallies, self._pending_terms
        self._pending, self._tallies = [], []
        spoiled: dict[str, tuple[int | None, str]] = {}
        if any(head.nonfinite for head in heads):
            spoiled = self._spoiled(pending, tallies)
            self._keep(spoiled)
        for entry, (squares, _) in zip(pending, tallies, strict=True):
            unit = entry.unit
            name = unit.parameter_name
            good = name not in spoiled
            if good and terms.accumulate and unit.local_gradient is not None:
                add({name: unit.local_gradient}, {name: entry.out})
            elif good:
                unit.local_gradient = entry.out
            self.squares[name] = squares
            entry.end(stored=good)

    def _spoiled(
        self, entries: Sequence[Entry], tallies: Sequence[tuple[float, int]]
    ) -> dict[str, tuple[int | None, str]]:
        """Find out with all ranks whose elements are not finite."""
        found = {
            entry.name: (_nonfinite(entry), count)
            for entry, (_, count) in zip(entries, tallies, strict=True)
        }
        told = self._group.gather_bytes(json.dumps(found).encode(), timeout=self._timeout)
        ranks: list[dict[str, list[int]]] = [json.loads(text) for text in told]
        spoiled: dict[str, tuple[int | None, str]] = {}
        for entry in entries:
            name = entry.name
            each = [of.get(name, (0, 0)) for of in ranks]  # not there: given up
            given = [(rank, full) for rank, (full, _) in enumerate(each) if full]
            sums = [(rank, part) for rank, (_, part) in enumerate(each) if part]
            if given and sums:  # a minimum may well be finite
                what = "; ".join(f"rank {rank}: {count:,}" for rank, count in given)
                spoiled[name] = given[0][0], f"NaN or infinite elements ({what})"
            elif sums:
                what = "; ".join(f"shard of rank {rank}: {count:,}" for rank, count in sums)
                spoiled[name] = sums[0][0], f"the sum is not finite, all gradients are ({what})"
        return spoiled

    # ---- the end of a run ----

    def finish(self, operation: str, unmatched: Sequence[str] = ()) -> dict[str, float]:
        """End a run when all ranks do, and raise what failed.

        Returns the sum of squares of the stored parts, by parameter, for what was reduced.
        `unmatched` are names that this rank's dicts of units and gradients do not share.
        """
        try:
            while True:
                started = perf_counter()
                heads = self._exchange(self._head(ENDED, b""))
                self._note((), started, started, perf_counter(), heads)
                self._settle(heads)
                if all(head.flags & ENDED for head in heads):
                    break
                self._ask((), {}, ended=True)
        except BaseException:
            self.begin()
            raise
        failures, squares = self.failures, self.squares
        self.begin()
        if failures:
            raise failed_gradients(operation, self._group.rank, failures, unmatched)
        return squares


def _something_else(rank: int, other: int) -> CollectiveError:
    error = CollectiveError(
        f"reduce_scatter on rank {rank}: rank {other} gathers bytes of its own at this place; all "
        "ranks must reduce the same gradients"
    )
    error.name, error.rank = "reduce_scatter", other
    return error


def _at_least(buffer: Any, size: int) -> Any:
    """Return a buffer of that many bytes or more."""
    return buffer if len(buffer) >= size else np.empty(size, np.uint8)


def _nonfinite(entry: Entry) -> int:
    """Count what is not finite in a full gradient."""
    return tallies({entry.name: entry.flat})[entry.name][1]


def failed_gradients(
    operation: str,
    rank: int,
    failures: Mapping[str, tuple[int | None, str]],
    unmatched: Sequence[str] = (),
    others: str = ", all others were",
) -> CollectiveError:
    """Make the error that every rank raises: a ValueError too if its own names are `unmatched`."""
    lines = [f"{name!r}: {what}" for name, (_, what) in failures.items()]
    more = f"\n  … {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    listed = "\n  ".join(lines[:_SHOWN]) if len(lines) > 1 else lines[0]
    gap = "\n  " if len(lines) > 1 else " "
    count = f"{len(lines)} gradients were" if len(lines) > 1 else "a gradient was"
    cls = GradientNamesError if any(name in failures for name in unmatched) else CollectiveError
    error = cls(f"{operation} on rank {rank}: {count} not reduced{others}:{gap}{listed}{more}")
    error.name, (error.rank, _) = next(iter(failures.items()))
    return error
