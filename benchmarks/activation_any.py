"""The gain of non-persistent schedules on small chains, for `bench_activation.py`.

Sizes and times are random; a budget is between the least that a persistent schedule fits and the
memory of the plain run. Both planners are exact to the byte.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from harness import Report, Row, show

from mlstate.activation import Chain, Plan, plan

SIZES = (3, 4, 5, 6, 7, 8)
CHAINS = 50  # for each number of blocks


@dataclass
class SearchResults:
    """The results for one number of blocks."""

    persistent_us: list[float] = field(default_factory=list)
    any_us: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)  # of the faster schedules


def random_chain(blocks: int, random: np.random.Generator) -> Chain:
    """Draw a chain: a block saves one to four times the size of its output."""
    activations = random.integers(1, 100, blocks + 1)
    saved = (activations[1:] * random.uniform(1, 4, blocks)).astype(np.int64)
    forward = random.integers(1, 64, blocks)
    return Chain(forward, 2 * forward, activations, saved)


def timed(chain: Chain, budget: int, schedules: str, into: list[float]) -> Plan:
    began = time.perf_counter()
    schedule = plan(chain, budget, schedules=schedules)
    into.append(1e6 * (time.perf_counter() - began))
    return schedule


def search_one_chain(chain: Chain, random: np.random.Generator, results: SearchResults) -> None:
    """Plan a chain both ways within one budget."""
    least, most = chain.least_budget_bytes, chain.plain_peak_bytes
    budget = int(random.integers(least, most)) if least < most else most
    persistent = timed(chain, budget, "persistent", results.persistent_us)
    free = timed(chain, budget, "any", results.any_us)
    for schedule in (persistent, free):
        if schedule.predicted_peak_bytes > budget:
            raise RuntimeError(f"{schedule!r} exceeds its budget")
    if free.predicted_seconds > persistent.predicted_seconds:
        raise RuntimeError(f"{free!r} is slower than {persistent!r}")
    if not free.exact:
        raise RuntimeError(f"{free!r} was not searched for")
    if free.predicted_seconds < persistent.predicted_seconds:
        results.gains.append(1 - free.predicted_seconds / persistent.predicted_seconds)


def any_chains(report: Report, quick: bool) -> list[str]:
    """Compare both classes of schedules; return the summary."""
    random = np.random.default_rng(20)
    rows, every = [], SearchResults()
    count = CHAINS // 10 if quick else CHAINS
    for blocks in SIZES:
        results = SearchResults()
        for _ in range(count):
            search_one_chain(random_chain(blocks, random), random, results)
        rows += rows_of_size(blocks, results)
        every.gains += results.gains
    report.table(
        f'schedules="any" and "persistent": {count * len(SIZES)} random chains, {count} a row',
        rows,
        unit="us",
        note="time to plan; won: the persistent one is slower",
    )
    tried = count * len(SIZES)
    line = f'schedules="any" is faster in {len(every.gains)} of {tried} chains'
    if every.gains:
        middle = 100 * float(np.median(every.gains))
        line += f", by {middle:.1f} % in the middle and {100 * max(every.gains):.1f} % at most"
    return [line]


def rows_of_size(blocks: int, results: SearchResults) -> list[Row]:
    persistent = Row(f"{blocks} blocks, persistent", results.persistent_us)
    free = Row(f"{blocks} blocks, any", results.any_us)
    free.extra["slowest us"] = show(max(results.any_us))
    free.extra["won"] = len(results.gains)
    free.extra["by up to"] = f"{100 * max(results.gains):.1f} %" if results.gains else ""
    return [persistent, free]
