"""The time of planning, for `bench_activation.py`: mlstate and a NumPy dynamic programme.

The baseline is the recursion of Beaumont et al. ("Optimal checkpointing for heterogeneous chains",
2019) over segments of the chain, with one vector operation for all amounts of memory at a time.
Both return the schedule, not only its time, and both are simulated.
"""

from __future__ import annotations

import numpy as np
from harness import Candidate, Report, Row, measure, met, show

import mlstate
from mlstate.activation import Chain, Plan, plan

SLOTS = 500
SHARES = (0.2, 0.6)  # position between the least budget and the memory of the plain run
EXACT_BLOCKS = 50
EXACT_AIM = 60.0  # ms
AIMS = {24: 0.3, 100: 15.0, 500: 1500.0}  # ms
NUMPY_MOST = 100  # blocks; with more, NumPy takes minutes
NOTE = "budget at 0: the least that a schedule fits, at 1: the plain run's peak; steps included"


def random_chain(blocks: int, seed: int = 20) -> Chain:
    """Draw a chain whose blocks differ in every figure, with sizes to the byte."""
    random = np.random.default_rng(seed)
    activations = random.integers(1 << 20, 1 << 26, blocks + 1)
    saved = activations[1:] + random.integers(0, 1 << 27, blocks)
    forward = random.uniform(0.5e-3, 8e-3, blocks)
    temporary = random.integers(0, 1 << 23, (3, blocks))
    return Chain(
        forward,
        forward * random.uniform(1.5, 2.5, blocks),
        activations,
        saved,
        forward_temporary_bytes=temporary[0],
        saving_temporary_bytes=temporary[1],
        backward_temporary_bytes=temporary[2],
    )


class Table:
    """The best time of each segment s..t for each amount of memory, without the input of s."""

    def __init__(self, chain: Chain, budget: int, slots: int) -> None:
        n = chain.blocks
        self.chain, self.slots = chain, slots
        self.unit = budget / slots
        self.best = np.full((n, n, slots + 1), np.inf)
        self.choice = np.zeros((n, n, slots + 1), np.int32)  # 0: save s; k: restart from k
        self.forward = chain.forward_seconds.tolist()
        self.backward = chain.backward_seconds.tolist()
        self.activation = chain.activation_bytes.tolist()
        self.gradient = chain.gradient_bytes.tolist()
        self.saved = chain.saved_bytes.tolist()
        for length in range(n):
            for s in range(n - length):
                self._fill(s, s + length)

    def up(self, size: int) -> int:
        return int(np.ceil(size / self.unit))

    def _fill(self, s: int, t: int) -> None:
        chain, slots = self.chain, self.slots
        outside = self.gradient[t + 1] if t < chain.blocks - 1 else 0
        saving = self.saved[s] + int(chain.saving_temporary_bytes[s]) + outside
        back = self.saved[s] + self.gradient[s] + self.gradient[s + 1]
        back += int(chain.backward_temporary_bytes[s])
        least = self.up(max(saving, back))
        best, choice = self.best[s, t], self.choice[s, t]
        seconds = self.forward[s] + self.backward[s]
        if s == t:
            best[least:] = seconds
            return
        saved_slots = self.up(self.saved[s])
        if least <= slots:
            best[least:] = (
                seconds + self.best[s + 1, t, least - saved_slots : slots + 1 - saved_slots]
            )
        peak, ran = 0, 0.0
        for k in range(s + 1, t + 1):
            entering = self.activation[k - 1] if k - 1 > s else 0
            run = entering + self.activation[k] + int(chain.forward_temporary_bytes[k - 1])
            peak, ran = max(peak, run), ran + self.forward[k - 1]
            activation_slots = self.up(self.activation[k])
            low = max(self.up(peak + outside), activation_slots)
            if low > slots:
                break
            candidates = (
                self.best[k, t, low - activation_slots : slots + 1 - activation_slots]
                + self.best[s, k - 1, low:]
            )
            candidates += ran
            np.copyto(choice[low:], k, where=candidates < best[low:])
            np.minimum(best[low:], candidates, out=best[low:])

    def steps(self) -> list[tuple[str, int]]:
        """Follow the choices from the whole chain, with all memory except its input's."""
        steps: list[tuple[str, int]] = []
        memory = self.slots - self.up(self.activation[0])
        todo: list[tuple[str, int, int, int]] = [("solve", 0, self.chain.blocks - 1, memory)]
        while todo:
            kind, s, t, m = todo.pop()
            if kind != "solve":
                steps.append((kind, s))
                continue
            if not np.isfinite(self.best[s, t, m]):
                raise ValueError("no schedule fits")
            k = int(self.choice[s, t, m])
            if k:
                for i in range(s, k):
                    steps += [("forward", i)] + [("drop", i)] * (i > s)
                todo.append(("solve", s, k - 1, m))
                todo.append(("drop", k, 0, 0))
                todo.append(("solve", k, t, m - self.up(self.activation[k])))
            else:
                steps.append(("save", s))
                todo.append(("backward", s, 0, 0))
                if t > s:
                    todo.append(("solve", s + 1, t, m - self.up(self.saved[s])))
        return steps


def by_numpy(chain: Chain, budget: int) -> Plan:
    """Plan by slots with NumPy."""
    return Plan(chain, Table(chain, budget, SLOTS).steps(), budget_bytes=budget)


def budgets(chain: Chain) -> list[int]:
    least, most = chain.least_budget_bytes, chain.plain_peak_bytes
    return [int(least + share * (most - least)) for share in SHARES]


def planning(report: Report, quick: bool, repeats: int) -> list[str]:
    """Time the planner; return whether it reaches the aims."""
    verdicts: list[str] = []
    threads = mlstate.get_num_threads()
    try:
        for blocks, aim in AIMS.items():
            if not quick or blocks <= NUMPY_MOST:
                rounds = repeats if blocks >= NUMPY_MOST else 5 * repeats
                verdicts += by_slots(report, blocks, aim, rounds, threads)
        verdicts += to_the_byte(report, repeats, threads)
    finally:
        mlstate.set_num_threads(threads)
    return verdicts


def named(who: str, share: float) -> str:
    return f"{who}, budget at {share:g}"


def with_threads(count: int) -> str:
    return f"mlstate, {count} thread{'s' if count > 1 else ''}"


def mlstate_candidate(chain: Chain, budget: int, slots: int | None, threads: int) -> Candidate:
    """Make a candidate that plans with this many threads."""
    return Candidate(
        with_threads(threads),
        lambda: plan(chain, budget, slots=slots),
        before=lambda: mlstate.set_num_threads(threads),
    )


def compare(
    chain: Chain, slots: int | None, peer: bool, repeats: int, threads: int, aim: float
) -> list[Row]:
    """Time the planners at both budgets, and compare their plans."""
    rows: list[Row] = []
    for share, budget in zip(SHARES, budgets(chain), strict=True):
        candidates = [
            mlstate_candidate(chain, budget, slots, n) for n in dict.fromkeys((1, threads))
        ]
        candidates[-1].at_most = aim
        if peer:
            numpy = Candidate("NumPy", lambda b=budget: by_numpy(chain, b), baseline=True)
            candidates.insert(0, numpy)
        plans = {c.name: c.call() for c in candidates}
        for row in measure(candidates, repeats, warm_up=1):
            planned = plans[row.name]
            if not isinstance(planned, Plan) or planned.predicted_peak_bytes > budget:
                raise RuntimeError(f"{row.name} exceeds the budget of {budget}: {planned!r}")
            row.name = named(row.name, share)
            row.extra["overhead"] = f"{100 * planned.overhead:.2f} %"
            row.extra["of budget"] = f"{100 * planned.predicted_peak_bytes / budget:.1f} %"
            row.extra["steps"] = len(planned.steps())
            if slots is None:
                row.extra["exact"] = "yes" if planned.exact else "NO"
            rows.append(row)
    return rows


def by_slots(report: Report, blocks: int, aim: float, repeats: int, threads: int) -> list[str]:
    rows = compare(random_chain(blocks), SLOTS, blocks <= NUMPY_MOST, repeats, threads, aim)
    title = f"planning, {blocks} blocks, {SLOTS} slots"
    report.table(title, rows, note=NOTE)
    return aims_of(rows, title, aim, threads)


def to_the_byte(report: Report, repeats: int, threads: int) -> list[str]:
    rows = compare(random_chain(EXACT_BLOCKS), None, False, repeats, threads, EXACT_AIM)
    title = f"planning to the byte, {EXACT_BLOCKS} blocks"
    report.table(title, rows, note=NOTE)
    return aims_of(rows, title, EXACT_AIM, threads)


def aims_of(rows: list[Row], title: str, aim: float, threads: int) -> list[str]:
    """Judge the slower of both budgets."""
    slowest = max(row.median for row in rows if row.name.startswith(with_threads(threads)))
    return [f"{title} <= {aim:g} ms: {show(slowest)} ms, {met(slowest <= aim)}"]
