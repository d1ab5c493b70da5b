"""Paired timing of an operation and the simple code it replaces, and the verdict on the pair.

A case has a simple way and one call of ours for each number of threads. All of them run once in
each round, in an order that is shuffled for every round, and each round gives one paired figure:
the time of the simple way divided by ours (`ratios`), and ours minus the simple way's (`extra`).
The statistic is the median over the rounds with an interval of at least 95 % confidence.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rows import Action, no_op, settle

CONFIDENCE = 0.95
LEAST_RATIO = 0.95  # bound for the upper limit of the ratio
SMALL_BYTES = 1 << 20  # up to this size the extra time is judged, not the ratio
FIXED_BYTES = 4 << 20  # up to this size a fixed cost is allowed instead of the ratio
EXTRA_US = 5.0
EXTRA_US_PER_TENSOR = 1.0

BATCH_SECONDS = 100e-6  # short calls are repeated until a sample takes this long
CHECKPOINTS = (6, 12, 24, 48, 96)  # rounds after which a pair is judged
CLEAR_ROUNDS = 2  # a slow pair ends here if every round is clearly above the bound
CLEAR_RATIO = 1.25
SLOW_SECONDS = 0.3  # of one round

Interval = tuple[float, float]


@dataclass
class Case:
    """One operation at one size; the hooks run untimed around each call.

    A case with hooks is timed call by call. Without hooks, short calls are timed in batches.
    """

    simple: Action
    ours: Action
    tensors: int = 1
    before_simple: Action = no_op
    before_ours: Action = no_op
    after_simple: Action = no_op
    after_ours: Action = no_op
    close: Action = no_op
    rest: bool = False  # wait before each sample until the simple way's threads sleep
    use_threads: Callable[[int], None] = lambda threads: None  # sets the threads of the simple code
    simple_per_thread: bool = False  # the simple way uses as many threads as ours
    fixed_us: float = 0.0  # additional cost of a call that does not depend on its bytes

    @property
    def batches(self) -> bool:
        """Whether calls can be repeated without a hook between them."""
        hooks = (self.before_simple, self.before_ours, self.after_simple, self.after_ours)
        return all(hook is no_op for hook in hooks)


@dataclass
class Pair:
    """Samples of one operation, size and number of threads, in seconds per call."""

    threads: int
    nbytes: int
    tensors: int = 1
    fixed_us: float = 0.0
    simple: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Simple time divided by ours, round by round."""
        return [s / max(o, 1e-12) for s, o in zip(self.simple, self.ours, strict=True)]

    @property
    def extra(self) -> list[float]:
        """Microseconds of ours over the simple way, round by round."""
        return [(o - s) * 1e6 for s, o in zip(self.simple, self.ours, strict=True)]

    @property
    def allowed_us(self) -> float | None:
        """Microseconds that the call may cost over the simple way, if such a bound applies."""
        if self.nbytes > (FIXED_BYTES if self.fixed_us else SMALL_BYTES):
            return None
        return EXTRA_US + EXTRA_US_PER_TENSOR * self.tensors + self.fixed_us

    def is_slow(self) -> bool:
        """Whether the confidence bounds show that the operation is too slow."""
        if len(self.ours) < CHECKPOINTS[0]:
            return False
        allowed = self.allowed_us
        costly = allowed is not None and median_interval(self.extra)[0] > allowed
        if self.nbytes <= SMALL_BYTES:
            return costly
        return median_interval(self.ratios)[1] < LEAST_RATIO and (costly or allowed is None)

    def is_fast(self) -> bool:
        """Whether the confidence bounds show that the operation is fast enough."""
        if len(self.ours) < CHECKPOINTS[0]:
            return False
        allowed = self.allowed_us
        cheap = allowed is not None and median_interval(self.extra)[1] <= allowed
        if self.nbytes <= SMALL_BYTES:
            return cheap
        return cheap or median_interval(self.ratios)[0] >= LEAST_RATIO

    def is_decided(self, round_seconds: float) -> bool:
        """Whether more rounds would not change the verdict."""
        rounds = len(self.ours)
        if rounds == CLEAR_ROUNDS and round_seconds > SLOW_SECONDS:
            return min(self.ratios) >= CLEAR_RATIO
        return rounds in CHECKPOINTS and (self.is_slow() or self.is_fast())

    def verdict(self) -> str:
        """Return `ok`, `SLOW`, or `open` if the rounds did not decide; only `SLOW` fails."""
        if self.is_slow():
            return "SLOW"
        clear = len(self.ours) >= CLEAR_ROUNDS and min(self.ratios) >= CLEAR_RATIO
        return "ok" if clear or self.is_fast() else "open"


def median_interval(values: list[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the order-statistics interval of the median.

    The interval [x_k, x_(n+1-k)] of n sorted values holds the median with probability
    1 - 2 P(Binomial(n, 1/2) < k). The largest k that reaches `confidence` is taken; below
    6 values none does, and the interval is the range.
    """
    ordered = sorted(values)
    count = len(ordered)
    tail, rank = 0.0, 0
    while rank < count // 2:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > 1 - confidence:
            break
        rank += 1
    first = max(rank - 1, 0)
    return ordered[first], ordered[count - 1 - first]


def time_call(call: Action, times: int, clock: Callable[[], float]) -> float:
    """Return the seconds of one call, of `times` in a row. Dropping a result is included."""
    start = clock()
    for _ in range(times):
        call()
    return (clock() - start) / times


def batch_size(case: Case, clock: Callable[[], float]) -> int:
    """Return how often a short call is repeated for one sample."""
    if not case.batches:
        return 1
    longest = max(time_call(call, 1, clock) for call in (case.simple, case.ours))
    return max(1, min(1000, math.ceil(BATCH_SECONDS / max(longest, 1e-7))))


def measure_pairs(
    case: Case,
    nbytes: int,
    threads: tuple[int, ...],
    seconds: float,
    set_threads: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Pair]:
    """Time a case until every pair is decided, or `seconds` have passed.

    At least six rounds are run. A pair that is decided takes no part in further rounds.
    """
    pairs = [Pair(count, nbytes, case.tensors, case.fixed_us) for count in threads]
    order = random.Random(20)
    gc.collect()
    gc.disable()
    try:
        warm_up = [Pair(count, nbytes) for count in threads]  # this also starts the threads
        run_round(case, warm_up, 1, order, set_threads, clock)
        times = batch_size(case, clock)
        began, rounds, running = clock(), 0, list(pairs)
        while running and rounds < CHECKPOINTS[-1]:
            if rounds >= CHECKPOINTS[0] and clock() - began > seconds:
                break
            run_round(case, running, times, order, set_threads, clock)
            rounds += 1
            mean = (clock() - began) / rounds
            running = [pair for pair in running if not pair.is_decided(mean)]
    finally:
        gc.enable()
    return pairs


def run_round(
    case: Case,
    pairs: list[Pair],
    times: int,
    order: random.Random,
    set_threads: Callable[[int], None],
    clock: Callable[[], float],
) -> None:
    """Time the simple way and ours, once for each pair, in shuffled order."""
    turns: list[tuple[str, int]] = [("ours", pair.threads) for pair in pairs]
    if case.simple_per_thread:
        turns += [("simple", pair.threads) for pair in pairs]
    else:
        turns.append(("simple", 0))
    seconds_by_call: dict[tuple[str, int], float] = {}
    for kind, count in order.sample(turns, len(turns)):
        if count:
            set_threads(count)
            case.use_threads(count)
        before = case.before_ours if kind == "ours" else case.before_simple
        after = case.after_ours if kind == "ours" else case.after_simple
        call = case.ours if kind == "ours" else case.simple
        before()
        if case.rest:
            settle()
        seconds_by_call[kind, count] = time_call(call, times, clock)
        after()
    for pair in pairs:
        simple = ("simple", pair.threads if case.simple_per_thread else 0)
        pair.simple.append(seconds_by_call[simple])
        pair.ours.append(seconds_by_call["ours", pair.threads])


def as_row(name: str, pair: Pair) -> dict[str, object]:
    """Turn a pair into a stored row."""
    low, high = median_interval(pair.ratios)
    row: dict[str, object] = {
        "name": name,
        "bytes": pair.nbytes,
        "tensors": pair.tensors,
        "threads": pair.threads,
        "simple_ms": statistics.median(pair.simple) * 1e3,
        "ours_ms": statistics.median(pair.ours) * 1e3,
        "ratio": statistics.median(pair.ratios),
        "interval": [low, high],
        "rounds": len(pair.ours),
        "verdict": pair.verdict(),
    }
    if pair.allowed_us is not None:
        low, high = median_interval(pair.extra)
        row |= {
            "extra_us": statistics.median(pair.extra),
            "extra_interval": [low, high],
            "allowed_us": pair.allowed_us,
        }
    return row
