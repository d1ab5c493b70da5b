"""Turns of slow candidates, and the ratios that they must reach."""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass

from harness import Candidate, Row, met, rows_of, settle

SLOW = 3.0  # seconds; slower candidates are not warmed up and have two rounds
VERY_SLOW = 6.0  # one round


@dataclass
class Aim:
    """A ratio that two lines of a table must reach."""

    name: str
    bound: float
    reference: str
    # at least `bound` times as fast; otherwise at most `bound` times the duration
    faster: bool = False

    def verdict(self, rows: list[Row]) -> str:
        """Return the verdict, if both lines exist."""
        medians = {row.name: row.median for row in rows}
        sign = ">=" if self.faster else "<="
        aim_text = (
            f"{self.name} {sign} {self.bound:g}x {'as fast as ' * self.faster}[{self.reference}]"
        )
        if not {self.name, self.reference} <= medians.keys():
            return f"{aim_text}: not measured"
        ratio = medians[self.name] / medians[self.reference]
        ratio = 1 / ratio if self.faster else ratio
        is_reached = ratio >= self.bound if self.faster else ratio <= self.bound
        return f"{aim_text}: {ratio:.2f}, {met(is_reached)}"


def join_freed_memory() -> None:
    """Make the C library merge freed blocks, which it otherwise leaves to a later caller.

    glibc merges neighbouring free blocks at the next larger allocation, and sorts 10,000 of them in
    one call: after a result of 20,000 arrays that took 3 ms of the next call.
    """
    for _ in range(8):
        bytearray(1 << 20)


def take_turns(candidates: list[Candidate], repeats: int) -> list[Row]:
    """Time as `harness.measure` does, but slow candidates less often.

    The result of a call is dropped after its time was taken: users free a result when they are done
    with it, and most limits have no result. The C library merges the freed blocks before the next
    call is timed.
    """
    samples: dict[str, list[float]] = {c.name: [] for c in candidates}
    order = random.Random(20)
    slow: dict[str, int] = {}  # number of rounds by name
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
                gc.freeze()  # later collections skip the objects of imported packages
    finally:
        gc.unfreeze()
        gc.enable()
    return rows_of(candidates, samples)
