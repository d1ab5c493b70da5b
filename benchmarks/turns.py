"""Turns of candidates that take long, and ratios that they are to reach."""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass

from harness import Candidate, Row, rows_of, settle

SLOW = 3.0  # seconds; what takes longer is not warmed up and has two rounds
VERY_SLOW = 6.0  # one round


@dataclass
class Aim:
    """A ratio to reach between two lines of a table."""

    name: str
    bound: float
    reference: str
    faster: bool = False  # at least `bound` times as fast, else at most `bound` times the duration

    def verdict(self, rows: list[Row]) -> str:
        """Say what was reached, if both lines are there."""
        found = {row.name: row.median for row in rows}
        sign = ">=" if self.faster else "<="
        wanted = (
            f"{self.name} {sign} {self.bound:g}x {'as fast as ' * self.faster}[{self.reference}]"
        )
        if not {self.name, self.reference} <= found.keys():
            return f"{wanted}: not measured"
        ratio = found[self.name] / found[self.reference]
        ratio = 1 / ratio if self.faster else ratio
        met = ratio >= self.bound if self.faster else ratio <= self.bound
        return f"{wanted}: {ratio:.2f}, {'met' if met else 'NOT MET'}"


def join_freed_memory() -> None:
    """Have the C library join what was freed before, which it leaves to a later caller.

    glibc joins neighbours among freed pieces when somebody next asks for more than a little, and
    sorts 10,000 of them in a call: after a result of 20,000 arrays that took 3 ms of the next one.
    """
    for _ in range(8):
        bytearray(1 << 20)


def take_turns(candidates: list[Candidate], repeats: int) -> list[Row]:
    """Time as `harness.measure` does, but slow ones less often.

    What a call gives is dropped when the time was taken: memory of a result is given back when
    its user is done with it, and most limits have no result. What that leaves to be joined by the
    C library is joined before the next call's time is taken.
    """
    samples: dict[str, list[float]] = {c.name: [] for c in candidates}
    order = random.Random(20)
    slow: dict[str, int] = {}  # name to the number of its rounds
    gc.disable()
    try:
        for turn in range(1 + repeats):
            for candidate in order.sample(candidates, len(candidates)):
                name = candidate.name
                if turn >= slow.get(name, repeats + 1):
                    continue
                candidate.before()
                gc.collect()
                join_freed_memory()
                settle()
                start = time.perf_counter_ns()
                result = candidate.call()
                elapsed = (time.perf_counter_ns() - start) * 1e-6
                del result
                if turn == 0 and elapsed > 1000 * SLOW:
                    slow[name] = 1 if elapsed > 1000 * VERY_SLOW else 2
                if turn > 0 or name in slow:
                    samples[name].append(elapsed)
            if turn == 0:
                gc.freeze()  # a collection looks no more at what packages brought along
    finally:
        gc.unfreeze()
        gc.enable()
    return rows_of(candidates, samples)
