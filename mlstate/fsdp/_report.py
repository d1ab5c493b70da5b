"""`BackwardReport`: when gradients arrived and were reduced, overlap, the slowest rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._common.report import Shown, Table
from .._common.text import bytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence


_COLUMNS = ["bucket", "parameters", "bytes [B]", "full [ms]", "agreed after [ms]"]
_COLUMNS += ["reduced in [ms]", "GB/s [.2f]"]


class Bucket(NamedTuple):
    """Timing of one bucket; times are seconds since the first gradient of the pass.

    Attributes
    ----------
    names : tuple of str
        Its parameters.
    bytes : int
        Size of their full gradients.
    ready : float
        When its last gradient arrived.
    started : float
        When its reduction started.
    agreed : float
        When all ranks had announced the bucket. From `started` to `agreed`, this rank waits for
        the others; with torch.distributed it packs its messages meanwhile.
    ended : float
        When the sums were complete.
    waits : tuple of float
        Seconds that each rank waited before this bucket; 0 if the ranks agreed on it together
        with an earlier bucket.
    """

    names: tuple[str, ...]
    bytes: int
    ready: float
    started: float
    agreed: float
    ended: float
    waits: tuple[float, ...]


class BackwardReport(Shown):
    """Timing of the gradients and buckets of one backward pass.

    `FSDPBackwardHook.report` returns it. ``print`` and notebooks show it as a table, and
    `mlstate.plot.plot_backward` draws it.

    Parameters
    ----------
    gradients : sequence of (str, float)
        Parameter names and arrival times, by `time.perf_counter`.
    ended : float
        When the backward pass had computed its last gradient, by the same clock.
    events : sequence of Bucket
        The buckets, and the end of the pass (without names; missing after an error), by the same
        clock. The `waits` of each event belong to the event before it. They are empty if the
        ranks agreed on both together.

    Attributes
    ----------
    gradients : list of (str, float)
        Parameter names, and seconds since the first gradient.
    buckets : list of Bucket
        The buckets in the order of their reduction.
    backward : float
        Seconds from the first gradient to the end of the backward pass.
    total : float
        Seconds from the first gradient to the last sum.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.collectives import SingleGroup
    >>> from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
    >>> hook = FSDPBackwardHook(FSDP(SingleGroup(), record=True))
    >>> hook.use_units({"w": FSDPShardingUnit("w", (4,), "float64", 0)})
    >>> hook.add_gradient("w", np.ones(4))
    >>> hook.finish()
    >>> report = hook.report()
    >>> [bucket.names for bucket in report.buckets], report.overlap
    ([('w',)], 0.0)
    """

    def __init__(
        self, gradients: Sequence[tuple[str, float]], ended: float, events: Sequence[Bucket]
    ) -> None:
        """Make all times relative to the first gradient's arrival; see the class."""
        began = gradients[0][1] if gradients else ended
        self.gradients: list[tuple[str, float]] = [(name, at - began) for name, at in gradients]
        self.backward: float = ended - began
        # A header has the time that its rank waited at the header before, so each event takes the
        # waits of the next event that has some.
        waits = iter([event.waits for event in events if event.waits][1:])
        no_waits = (0.0,) * len(events[0].waits if events else ())
        self.buckets: list[Bucket] = [
            event._replace(
                ready=event.ready - began,
                started=event.started - began,
                agreed=event.agreed - began,
                ended=event.ended - began,
                waits=next(waits, no_waits) if event.waits else no_waits,
            )
            for event in events
            if event.names
        ]
        self.total: float = max([self.backward, *(bucket.ended for bucket in self.buckets)])

    @property
    def overlap(self) -> float:
        """Fraction of the reduction time that falls into the backward pass, from 0 to 1."""
        spent = sum(bucket.ended - bucket.started for bucket in self.buckets)
        inside = sum(
            max(0.0, min(bucket.ended, self.backward) - bucket.started) for bucket in self.buckets
        )
        return inside / spent if spent else 0.0

    @property
    def waited(self) -> list[float]:
        """Seconds that each rank waited for the others, indexed by rank."""
        waits = [bucket.waits for bucket in self.buckets]
        return [sum(column) for column in zip(*waits, strict=True)]

    @property
    def straggler(self) -> tuple[int, float] | None:
        """The slowest rank, and the mean extra time in seconds that the others waited for it.

        None if that is not more than a tenth of the total time.
        """
        waited = self.waited
        if len(waited) < 2:
            return None
        # the slowest rank waits least, as the others are ready before it
        last = min(range(len(waited)), key=waited.__getitem__)
        others = [seconds for rank, seconds in enumerate(waited) if rank != last]
        lost = sum(others) / len(others) - waited[last]
        return (last, lost) if lost > 0.1 * self.total else None

    def _title(self) -> str:
        """Return one line: bytes, buckets, times, overlap, and the rank that others waited for."""
        size = bytes_text(sum(bucket.bytes for bucket in self.buckets))
        text = (
            f"{size} of gradients in {len(self.buckets)} buckets: backward pass "
            f"{self.backward * 1e3:.1f} ms, all reduced after {self.total * 1e3:.1f} ms, "
            f"{self.overlap:.0%} of the reducing inside the backward pass"
        )
        if self.straggler is not None:
            rank, seconds = self.straggler
            text += f"; each of the others waited {seconds * 1e3:.1f} ms for rank {rank}"
        return text

    def _table(self) -> Table:
        """Return one row for each bucket.

        A bucket's parameters are their number, and the first and the last name. The times are: when
        its last gradient arrived, how much later all ranks agreed on it, and how long its reduction
        took from then on, which also gives the speed.
        """
        rows = []
        for number, bucket in enumerate(self.buckets):
            names, seconds = bucket.names, bucket.ended - bucket.agreed
            last = f" … {names[-1]}" if len(names) > 1 else ""
            times = bucket.ready, bucket.agreed - bucket.ready, seconds
            speed = bucket.bytes / max(seconds, 1e-9) / 1e9
            rows.append((number, f"{len(names)}: {names[0]}{last}", bucket.bytes, *times, speed))
        return Table(self._title(), _COLUMNS, rows)
