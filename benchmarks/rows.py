"""Rows of benchmarks: an operation of mlstate compared with the code of others, in turns.

All ways of a row run in one process and take turns in each round, in a new random order with a
fixed seed, so that slow moments of the machine and the state of the caches affect all of them
alike. Figures are medians over the rounds; the quartiles show their spread.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

Action = Callable[[], object]
Item = TypeVar("Item")

SETTLE_SECONDS = 0.003
SLOW = 3000.0  # ms; slower ways are not warmed up and have two rounds
VERY_SLOW = 6000.0  # one round
SCALES = {"ms": 1.0, "us": 1e3}


class EndedError(Exception):
    """A way cannot continue: its line is left out."""


def no_op() -> None:
    """Prepare nothing."""


@dataclass
class Way:
    """Something to time; `before` runs untimed ahead of each call.

    A call that measures itself, such as one in another process, returns its figures: "ms" and
    others, which become columns.
    """

    call: Callable[[], Any]
    before: Action = no_op
    measures_itself: bool = False


Ways = dict[str, Any]  # by name: a `Way`, or the call of a way that needs no preparation


@dataclass
class Line:
    """One line of a table."""

    name: str
    values: list[float]
    ratio: float | None = None  # times faster than the base
    limit_ratio: float | None = None  # times the limit's duration
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Return the median."""
        return statistics.median(self.values)

    def quartiles(self) -> tuple[float, float]:
        """Return the first and third quartile."""
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high


Lines = dict[str, Line]


@dataclass
class Bar:
    """What a line must reach: a time, or a ratio to the line `reference`."""

    name: str
    bound: float
    reference: str = ""
    faster: bool = False  # at least `bound` times as fast; otherwise at most `bound` times as long

    def verdict(self, lines: Lines, unit: str) -> str:
        """Return the verdict, if the lines exist."""
        if not self.reference and self.name in lines:
            return verdict(self.name, lines[self.name].median, self.bound, f" {unit}")
        sign = ">=" if self.faster else "<="
        speed = "as fast as " if self.faster else ""
        text = f"{self.name} {sign} {self.bound:g}x {speed}[{self.reference}]"
        if not {self.name, self.reference} <= lines.keys():
            return f"{text}: not measured"
        ratio = lines[self.name].median / lines[self.reference].median
        if self.faster:
            return f"{text}: {1 / ratio:.2f}, {met(1 / ratio >= self.bound)}"
        return f"{text}: {ratio:.2f}, {met(ratio <= self.bound)}"


def verdict(label: str, figure: float, bound: float, unit: str = "") -> str:
    """Compare a figure with the most that is allowed."""
    return f"{label} <= {bound:g}{unit}: {show(figure)}{unit}, {met(figure <= bound)}"


def met(good: bool) -> str:
    """Return the last word of a verdict."""
    return "met" if good else "NOT MET"


@dataclass
class Row:
    """An operation of mlstate, the code of others, and the limit: a table with a line for each way.

    Parts of a benchmark make the arrays, and yield their rows one by one.
    """

    name: str
    ours: Ways
    peers: Ways = field(default_factory=dict)
    limit: Ways = field(default_factory=dict)  # the last one counts
    bars: Sequence[Bar] = ()
    base: str | None = None  # line to compare with; the first peer if there is one
    unit: str = "ms"
    note: str = ""
    nbytes: int = 0  # of a call, for a column with the rate
    rounds: float = 1  # multiplies the number of the benchmark
    clock: Callable[[], int] = time.perf_counter_ns
    # The result of a call is dropped within the timed part, because users pay for freeing it.
    # Otherwise it is freed, and the heap tidied, before the next call: users of a checkpoint free
    # it when they are done, and a limit has no result.
    frees: bool = True
    judge: Callable[[Lines], list[str]] = lambda lines: []  # adds columns; returns more verdicts

    def measure(self, rounds: int) -> Lines:
        """Let all ways take turns, and compare their lines with the base and the limit."""
        ways = {
            name: way if isinstance(way, Way) else Way(way)
            for name, way in (self.limit | self.peers | self.ours).items()
        }
        count = max(1, round(rounds * self.rounds))
        lines: Lines = {}
        for name, figures in take_turns(ways, count, self.clock, self.frees).items():
            line = lines[name] = Line(name, [each["ms"] * SCALES[self.unit] for each in figures])
            if self.nbytes:
                line.extra["GB/s"] = f"{self.nbytes * SCALES[self.unit] / line.median * 1e-6:.2f}"
            columns = [name for name in figures[0] if name != "ms"]
            line.extra |= {
                name: statistics.median(each[name] for each in figures) for name in columns
            }
        base = lines.get(next(iter(self.peers), "") if self.base is None else self.base)
        limit = lines.get(list(self.limit)[-1]) if self.limit else None
        for line in lines.values():
            line.ratio = base.median / line.median if base else None
            line.limit_ratio = line.median / limit.median if limit else None
        return lines


def settle() -> None:
    """Wait without sleeping, which would lose caches and clock rate.

    Threads of OpenMP (torch) spin for a while after their work, and would take a processor from the
    next way.
    """
    end = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < end:
        pass


def join_freed_memory() -> None:
    """Make the C library merge freed blocks, which it otherwise leaves to a later caller.

    glibc merges neighbouring free blocks at the next larger allocation, and sorts 10,000 of them in
    one call: after a result of 20,000 arrays that took 3 ms of the next call.
    """
    for _ in range(8):
        bytearray(1 << 20)


def shuffled_turns(items: Sequence[Item], rounds: int) -> Iterator[tuple[int, Item]]:
    """Yield each item once in every round, in a new random order, with the round's number."""
    order = random.Random(20)
    for number in range(rounds):
        for item in order.sample(items, len(items)):
            yield number, item


def time_once(way: Way, clock: Callable[[], int], frees: bool) -> dict[str, float]:
    """Call a way once, and return its figures."""
    way.before()
    if not frees:
        gc.collect()
        join_freed_memory()
    settle()
    start = clock()
    result = way.call()
    if way.measures_itself:
        figures: dict[str, float] = result
        return figures
    if frees:
        del result
    return {"ms": (clock() - start) * 1e-6}


def take_turns(
    ways: dict[str, Way], rounds: int, clock: Callable[[], int], frees: bool
) -> dict[str, list[dict[str, float]]]:
    """Time every way `rounds` times after one that does not count; slow ways less often."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    ends: dict[str, int] = {}  # number of rounds of slow ways
    gc.collect()
    gc.freeze()  # later collections skip the objects of imported packages
    gc.disable()
    try:
        for turn, name in shuffled_turns(list(ways), 1 + rounds):
            if name not in samples or turn >= ends.get(name, turn + 1):
                continue
            try:
                figures = time_once(ways[name], clock, frees)
            except EndedError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                del samples[name]
                continue
            if turn == 0 and figures["ms"] > SLOW:
                ends[name] = 1 if figures["ms"] > VERY_SLOW else 2
            if turn > 0 or name in ends:
                samples[name].append(figures)
    finally:
        gc.unfreeze()
        gc.enable()
    return samples


def show(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
