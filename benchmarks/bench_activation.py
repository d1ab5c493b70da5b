"""Activation checkpointing: planning, and whole models of torch under a memory budget.

``python benchmarks/bench_activation.py [--quick] [--json] [--only PART] [--repeats N]``; mlstate
must be installed, torch and transformers take part if they are.  Memory is measured by torch's
allocator, not predicted by a plan.  See docs/activation_compared.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import numpy as np
from harness import Run, count_threads, main
from rows import Bar, Lines, Row, Way, Ways

import mlstate
from mlstate.activation import Chain, Plan, plan

# ---- planning ----

SLOTS = 500
SHARES = (0.2, 0.6)  # position between the least budget and the memory of the plain run
EXACT_BLOCKS = 50
EXACT_BOUND = 60.0  # ms
BOUNDS = {24: 0.3, 100: 15.0, 500: 1500.0}  # ms
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


def planning(run: Run) -> Iterator[Row]:
    """Compare the planners: by slots, then to the byte."""
    for blocks, bound in BOUNDS.items():
        if not run.quick or blocks <= NUMPY_MOST:
            title = f"planning, {blocks} blocks, {SLOTS} slots"
            yield from rows_of(title, random_chain(blocks), SLOTS, bound)
    title = f"planning to the byte, {EXACT_BLOCKS} blocks"
    yield from rows_of(title, random_chain(EXACT_BLOCKS), None, EXACT_BOUND)


def rows_of(title: str, chain: Chain, slots: int | None, bound: float) -> Iterator[Row]:
    """Compare the planners, and their plans, at both budgets."""
    threads = mlstate.threads.get_num_threads()
    least, most = chain.least_budget_bytes, chain.plain_peak_bytes
    for share in SHARES:
        budget = int(least + share * (most - least))
        ways = {
            f"mlstate, {count_threads(count)}, budget at {share:g}": Way(
                partial(plan, chain, budget, slots=slots),
                partial(mlstate.threads.set_num_threads, count),
            )
            for count in dict.fromkeys((1, threads))
        }
        peers: Ways = {}
        if slots and chain.blocks <= NUMPY_MOST:
            peers[f"NumPy, budget at {share:g}"] = Way(partial(by_numpy, chain, budget))
        plans = {name: way.call() for name, way in (peers | ways).items()}
        yield Row(
            f"{title}, budget at {share:g}",
            ways,
            peers,
            bars=[Bar(list(ways)[-1], bound)],
            note=NOTE,
            rounds=1 if chain.blocks >= NUMPY_MOST else 5,
            judge=partial(describe_plans, plans, budget),
        )
    mlstate.threads.set_num_threads(threads)


def describe_plans(plans: dict[str, Plan], budget: int, lines: Lines) -> list[str]:
    """Add columns with the properties of the plans."""
    for name, line in lines.items():
        schedule = plans[name]
        if schedule.predicted_peak_bytes > budget:
            raise RuntimeError(f"{name} exceeds the budget of {budget}: {schedule!r}")
        line.extra["overhead"] = f"{100 * schedule.overhead:.2f} %"
        line.extra["of budget"] = f"{100 * schedule.predicted_peak_bytes / budget:.1f} %"
        line.extra["steps"] = len(schedule.steps())
        line.extra["exact"] = "yes" if schedule.exact else "NO"
    return []


def shapes(run: Run) -> Iterator[Row]:
    """Compare memory budgets of whole models: ours, torch's, and recomputing every layer."""
    if find_spec("transformers") is None or find_spec("torch") is None:
        run.log("\nshapes is left out: torch and transformers are not installed")
        return
    from activation_shapes import whole_models

    yield from whole_models(run)


if __name__ == "__main__":
    main(
        __doc__,
        "activation",
        "mlstate: activation checkpointing",
        {"planning": planning, "shapes": shapes},
        quick="small models, few rounds",
        rounds=(5, 3),
    )
