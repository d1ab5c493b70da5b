"""Byte ranges that a load requests from a store, in which threads, merged or divided.

plan_units     what can be read independently: a group of small tensors, or a part of a large one
-> load_units  fetches the ranges of each unit in threads; the last answer fills the unit's arrays

At most the answers to the simultaneous requests are in memory besides the arrays. There are two
exceptions, which need all their bytes at once: compressed shards, and targets that are not packed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..._common.store_error import format_error
from ._remote.parallel_tasks import run_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from ... import _core
    from ..._common.callback import Progress
    from ..._sharding.layout import Cuts

_SPAN = 4 << 20  # MLS_READ_SPAN of read_plan.h: where the core divides a stored shard
_GAP = 4096  # unneeded bytes between two ranges that one request reads

Range = tuple[str, int, int]  # path, begin, end
Answer = tuple[str, int, int, int, Any]  # path, begin, end, bytes of the object, buffer


@dataclass(frozen=True)
class LoadCall:
    """The URL for errors, a `TensorParts`, and the other arguments of `MergedIndex.load_into`.

    `is_zeroed` tells that `MergedIndex.load` created the targets: they have the zeros that are not
    stored, and these use no memory.
    """

    url: str
    merged: _core.MergedIndex
    section: int
    keys: list[str]
    cuts: Cuts
    targets: dict[str, Any]
    verify: bool
    is_zeroed: bool

    def read(self, answers: Collection[Answer], at: Collection[int] | None = None) -> int:
        """Copy the bytes in `answers` into the arrays; return how many bytes the arrays received.

        `at`: positions in `keys` of the tensors that the answers belong to; None: all.
        """
        keys, cuts = self.keys, self.cuts
        if at is not None:
            keys = [keys[position] for position in at]
            cuts = [cuts[position] for position in at] if isinstance(cuts, list) else cuts
        source = self.url, tuple(answers), self.is_zeroed
        return self.merged.load_into(
            source, self.section, keys, cuts, self.targets, self.verify, None
        )


@dataclass
class Unit:
    """Tensors that are read together, and the byte ranges that hold them.

    `at`: positions of the tensors in the call's `keys`. `ranges` hold all of their bytes, or a
    piece of one large tensor that can be read independently of its other pieces.
    """

    at: list[int]
    ranges: list[Range]
    missing: int = 0  # requests that were not answered yet
    answers: list[Answer] = field(default_factory=list)


def load_units(
    call: LoadCall,
    fetch: Callable[[str, int, int], list[Answer]],
    read: Callable[[LoadCall, Unit], int],
    part_bytes: int,
    threads: int,
    progress: Progress,
) -> None:
    """Fill the targets of `call` from an object store.

    `fetch(path, begin, end)` requests a range of at most `part_bytes` bytes. `read(call, unit)`
    copies the answers of a complete unit to the arrays and returns their bytes. `threads`: number
    of simultaneous requests. `progress`: called with the bytes read since its last call. Raises
    FormatError if fewer bytes arrive than the tensors have.
    """
    # the number of bytes to load, and the keys whose targets are not packed
    expected, staged_keys = call.merged.fits(
        call.url, call.section, call.keys, call.cuts, call.targets
    )
    staged = set(staged_keys)
    lock = threading.Lock()
    total = call.read(())  # zeros that are not stored
    reported = 0

    def load_part(unit: Unit, path: str, begin: int, end: int) -> None:
        """Fetch bytes `begin` to `end` of the object `path` for a unit.

        The thread that fetches the unit's last range passes the unit to `read`.
        """
        nonlocal total
        answers = fetch(path, begin, end)
        with lock:
            unit.answers += answers
            unit.missing -= 1
            is_complete = unit.missing == 0
        # Only the unit keeps the bytes, so that they are freed when it has been read.
        del answers
        if is_complete:
            nbytes = read(call, unit)
            unit.answers.clear()
            with lock:
                total += nbytes

    def report(_: int) -> None:
        """Pass the bytes read since the last call to the caller's `progress`."""
        nonlocal reported
        nbytes, reported = total - reported, total
        if progress is not None and nbytes:
            progress(nbytes)

    tasks = []
    for unit in plan_units(call, staged, part_bytes):
        parts = [part for each in unit.ranges for part in _divide(each, each[1], part_bytes)]
        unit.missing = len(parts)
        tasks += [partial(load_part, unit, *part) for part in parts]
    run_tasks(tasks, threads, None if progress is None else report)
    report(0)
    if total != expected:
        text = f"{total} of {expected} bytes were read"
        raise format_error(f"{call.url}: {text}", call.url)


def plan_units(call: LoadCall, staged: Collection[str], part_bytes: int) -> Iterator[Unit]:
    """Yield units of about `part_bytes` bytes: small tensors first, in the order of their files.

    `call`: has the tensors. `staged`: keys of tensors that must be read at once, also if they are
    large. A range of a large tensor is cut at multiples of `_SPAN` from its origin, the offset of
    the stored shard in the file, because the core divides the shard there too.
    """
    step = max(_SPAN, part_bytes - part_bytes % _SPAN)
    small: list[tuple[list[Range], int]] = []
    large: list[Unit] = []
    for at, key in enumerate(call.keys):
        cut = call.cuts[at : at + 1] if isinstance(call.cuts, list) else call.cuts
        reads = call.merged.reads(call.url, call.section, [key], cut, call.verify)
        ranges = [(path, begin, end) for path, begin, end, nbytes, _ in reads if nbytes]
        if sum(end - begin for _, begin, end in ranges) <= part_bytes or key in staged:
            small.append((ranges, at))
        else:
            for path, begin, end, nbytes, origin in reads:
                byte_range = path, begin, end
                # An origin of -1: the range cannot be divided, as of a compressed shard.
                parts = _divide(byte_range, origin, step) if origin >= 0 else [byte_range]
                large += [Unit([at], [part]) for part in parts if nbytes]
    yield from _group_small(sorted(small), part_bytes)
    yield from large


def _group_small(small: list[tuple[list[Range], int]], most: int) -> Iterator[Unit]:
    """Yield units of several small keys each, of up to `most` bytes.

    `small`: for each key the ranges that hold it, and the key's position in the call.
    """
    unit, nbytes = Unit([], []), 0
    for ranges, at in small:
        more = sum(end - begin for _, begin, end in ranges)
        if unit.at and nbytes + more > most:
            yield Unit(unit.at, _join_near(unit.ranges))
            unit, nbytes = Unit([], []), 0
        unit.at.append(at)
        unit.ranges += ranges
        nbytes += more
    if unit.ranges:
        yield Unit(unit.at, _join_near(unit.ranges))


def _divide(byte_range: Range, origin: int, step: int) -> list[Range]:
    """Cut a byte range at multiples of `step` from `origin`, which is at most the range's begin."""
    path, begin, end = byte_range
    first = begin - (begin - origin) % step
    return [(path, max(begin, at), min(at + step, end)) for at in range(first, end, step)]


def _join_near(ranges: list[Range]) -> list[Range]:
    """Return the ranges sorted; ranges of one file that touch or have a small gap become one.

    A small gap has at most 4096 bytes, or 1/20 of the range before it: reading it costs less than
    another request.
    """
    joined: list[Range] = []
    for path, begin, end in sorted(ranges):
        if joined:
            last, first, until = joined[-1]
            gap = begin - until  # negative if the ranges overlap
            if last == path and gap <= max(_GAP, (until - first) // 20):
                joined[-1] = (path, first, max(until, end))
                continue
        joined.append((path, begin, end))
    return joined
