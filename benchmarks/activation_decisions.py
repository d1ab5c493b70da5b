"""Decisions of strategies compared with plain Python, for `bench_activation.py`: ns a decision.

The plain strategies follow the specification. Each candidate is a function that asks `BLOCK` times
in a row in a loop, as a model asks its strategy: through the attribute, with positional arguments,
on an ndarray. The limit is a method of a Python class that returns False.

A turn takes some 50 us. In each round all candidates, including the limit, take `TURNS` turns in
changing order. A candidate's time is its shortest turn, because interruptions only make turns
longer. Figures are medians over the rounds.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from harness import Candidate, Report, Row, rows_of

from mlstate.activation import (
    FirstMatch,
    IntervalStrategy,
    MemoryAwareStrategy,
    SelectiveStrategy,
    SizeBasedStrategy,
    SmartStrategy,
)

BLOCK = 50
TURNS = 20  # of each candidate in a round
FEW, MANY = 24, 10_000  # layers of a model
SMALL, LARGE = np.zeros((4, 64), np.float32), np.zeros((8, 128, 256), np.float32)


# ---- the specification in plain Python ----


class Empty:
    """The cost of calling any method of a Python class."""

    def should_checkpoint(self, layer_id: str, activation: Any, layer_index: int) -> bool:
        return False


class Interval:
    def __init__(self, interval: int = 2) -> None:
        self.interval, self.checkpointed_count = interval, 0

    def should_checkpoint(self, layer_id: str, activation: Any, layer_index: int) -> bool:
        should_checkpoint = (layer_index % self.interval) == 0
        if should_checkpoint:
            self.checkpointed_count += 1
        return should_checkpoint


class Selective:
    def __init__(self, checkpoint_layers: Iterable[str], exclude_layers: Iterable[str]) -> None:
        self.checkpoint_layers, self.exclude_layers = set(checkpoint_layers), set(exclude_layers)

    def should_checkpoint(self, layer_id: str, activation: Any, layer_index: int) -> bool:
        if layer_id in self.exclude_layers:
            return False
        return layer_id in self.checkpoint_layers


class SizeBased:
    def __init__(self, min_bytes: int = 1 << 20, exclude_layers: Iterable[str] = ()) -> None:
        self.min_bytes, self.exclude_layers = min_bytes, set(exclude_layers)
        self.checkpointed_count = 0

    def should_checkpoint(self, layer_id: str, activation: Any, layer_index: int) -> bool:
        if layer_id in self.exclude_layers:
            return False
        should_checkpoint = activation.size * activation.itemsize >= self.min_bytes
        if should_checkpoint:
            self.checkpointed_count += 1
        return should_checkpoint


class Stats:
    def __init__(self, used: int) -> None:
        self.current_memory_used = used


class Tracker:
    """Returns a constant: the plain strategy does not read the memory in every call."""

    def __init__(self) -> None:
        self.stats = Stats(1 << 30)

    def get_stats(self) -> Stats:
        return self.stats


class MemoryAware:
    def __init__(self, max_memory_percentage: float = 0.8) -> None:
        self.max_memory_percentage, self.tracker = max_memory_percentage, Tracker()
        self.total_memory, self.current_interval = 16 << 30, 2
        self.last_adjustment_time, self.consecutive_high_memory_pressure = time.monotonic(), 0

    def should_checkpoint(self, layer_id: str, activation: Any, layer_index: int) -> bool:
        self.adjust_interval(self.tracker.get_stats().current_memory_used / self.total_memory)
        return (layer_index % self.current_interval) == 0

    def adjust_interval(self, memory_pressure: float) -> None:
        now = time.monotonic()
        time_since_last_adjustment = now - self.last_adjustment_time
        if time_since_last_adjustment < 10:
            return
        threshold = self.max_memory_percentage
        if memory_pressure > threshold:
            self.current_interval = max(1, self.current_interval - 1)
            self.consecutive_high_memory_pressure += 1
        elif memory_pressure < threshold * 0.8:
            if self.consecutive_high_memory_pressure == 0 or time_since_last_adjustment > 30:
                self.current_interval = min(10, self.current_interval + 1)
        else:
            self.consecutive_high_memory_pressure = 0
        self.last_adjustment_time = now


class Smart:
    def __init__(self, exclude_layers: Iterable[str] = ()) -> None:
        self.layer_info: list[int] = []
        self.layer_activation_sizes: dict[str, int] = {}
        self.layer_access_counts: dict[str, int] = {}
        self.exclude_layers, self.initialized = set(exclude_layers), False

    def should_checkpoint(self, layer_id: str, activation: Any, layer_index: int) -> bool:
        if layer_id not in self.layer_activation_sizes:
            activation_size = activation.size * activation.itemsize
            self.layer_activation_sizes[layer_id] = activation_size
            self.layer_access_counts[layer_id] = 0
            self.layer_info.append(activation_size)
        self.layer_access_counts[layer_id] += 1
        if not self.initialized:
            if layer_index > 10:
                self.initialized = True
            return False
        if layer_id in self.exclude_layers:
            return False
        return self.should_checkpoint_heuristic(layer_id, layer_index)

    def should_checkpoint_heuristic(self, layer_id: str, layer_index: int) -> bool:
        if layer_id not in self.layer_activation_sizes:
            return False
        activation_size = self.layer_activation_sizes[layer_id]
        average = sum(self.layer_info) / len(self.layer_info)
        if activation_size > average * 1.5:
            return True
        if self.layer_access_counts[layer_id] < 2:
            return True
        return layer_index > len(self.layer_info) * 0.7


class Both:
    """``a & b`` in plain Python: every member sees every call."""

    def __init__(self, *members: Any) -> None:
        self.members = members

    def should_checkpoint(self, layer_id: str, activation: Any, layer_index: int) -> bool:
        decisions = [m.should_checkpoint(layer_id, activation, layer_index) for m in self.members]
        return all(decisions)


# ---- measuring ----


def names_of(count: int) -> list[str]:
    return [f"model.layers.{i}.attention" for i in range(count)]


def same(reference: Any, strategy: Any, names: list[str], passes: int = 2) -> None:
    """Raise unless both decide alike; afterwards both have met the layers."""
    for turn in range(passes):
        for i, name in enumerate(names):
            activation = LARGE if i % 7 == 3 else SMALL
            decisions = [
                bool(s.should_checkpoint(name, activation, i)) for s in (reference, strategy)
            ]
            if decisions[0] != decisions[1]:
                raise RuntimeError(f"pass {turn}, {name}: {decisions}")


def asking(strategy: Any, name: str, activation: Any, index: int, loops: int) -> Callable[[], None]:
    """Return a function that asks ``loops * BLOCK`` times, with hardly any cost for its loop."""
    calls = "\n".join(["        strategy.should_checkpoint(name, activation, index)"] * BLOCK)
    source = f"def run():\n    for _ in range({loops}):\n{calls}\n"
    space = {"strategy": strategy, "name": name, "activation": activation, "index": index}
    # the arguments are locals, as in a user's loop
    source = "def make(strategy, name, activation, index):\n" + "\n".join(
        f"    {line}" for line in source.splitlines()
    )
    namespace: dict[str, Any] = {}
    exec(source + "\n    return run\n", namespace)
    run: Callable[[], None] = namespace["make"](**space)
    return run


def in_turns(candidates: list[Candidate], rounds: int, unit: float) -> list[Row]:
    """Time candidates in alternation; the shortest of a round's turns counts."""
    samples: dict[str, list[float]] = {c.name: [] for c in candidates}
    order = random.Random(20)
    gc.collect()
    gc.disable()
    try:
        for number in range(1 + rounds):  # the first one warms up
            shortest = dict.fromkeys(samples, float("inf"))
            for _ in range(TURNS):
                for candidate in order.sample(candidates, len(candidates)):
                    began = time.perf_counter_ns()
                    candidate.call()
                    elapsed = (time.perf_counter_ns() - began) * unit
                    shortest[candidate.name] = min(shortest[candidate.name], elapsed)
            if number:
                for name, elapsed in shortest.items():
                    samples[name].append(elapsed)
    finally:
        gc.enable()
    return rows_of(candidates, samples)


def table(
    report: Report,
    title: str,
    strategies: list[tuple[str, Any, float | None]],
    question: tuple[str, Any, int],
    repeats: int,
    loops: int,
    note: str = "",
) -> None:
    """Time strategies with one set of arguments; the first is the baseline."""
    candidates = [
        Candidate(name, asking(strategy, *question, loops), baseline=number == 0, at_most=at_most)
        for number, (name, strategy, at_most) in enumerate(strategies)
    ]
    candidates.append(Candidate("empty method", asking(Empty(), *question, loops), limit=True))
    rows = in_turns(candidates, repeats, 1 / (loops * BLOCK))
    report.table(title, rows, unit="ns", note=note)


def decisions(report: Report, quick: bool, repeats: int) -> None:
    """Compare the five strategies with plain Python, and Smart at two numbers of layers."""
    loops = 20  # 50 us: rarely interrupted, and long enough for the clock
    few = names_of(FEW)
    question = (few[5], SMALL, 5)
    excluded = few[18:]
    pairs: list[tuple[str, Any, Any, float]] = [
        ("Interval", Interval(2), IntervalStrategy(2), 60),
        (
            "Selective",
            Selective(few[:12], excluded),
            SelectiveStrategy(few[:12], excluded),
            60,
        ),
        ("SizeBased", SizeBased(4096), SizeBasedStrategy(4096), 60),
        (
            "SizeBased, 6 layers excluded",
            SizeBased(4096, excluded),
            SizeBasedStrategy(4096, excluded),
            60,
        ),
        ("MemoryAware", MemoryAware(), MemoryAwareStrategy(), 80),
        ("Smart", Smart(), SmartStrategy(), 80),
    ]
    for title, reference, strategy, at_most in pairs:
        same(reference, strategy, few)
        rows = [("plain Python", reference, None), ("mlstate", strategy, at_most)]
        note = "plain Python does not read memory" if title == "MemoryAware" else ""
        table(report, f"{title}, {FEW} layers", rows, question, repeats, loops, note)
    many_layers(report, quick, repeats, max(1, loops // 10))
    other_ways(report, repeats, loops)


def many_layers(report: Report, quick: bool, repeats: int, loops: int) -> None:
    """Smart and Selective on a model of many layers: the time must not grow with their number."""
    count = MANY // 10 if quick else MANY
    names = names_of(count)
    strategy, reference = SmartStrategy(), Smart()
    for i, name in enumerate(names):
        strategy.should_checkpoint(name, SMALL, i)
    same(reference, SmartStrategy(), names[:100])
    for i, name in enumerate(names):
        if i >= 100:  # without its average over all layers, which takes a minute in total
            reference.layer_activation_sizes[name] = SMALL.nbytes
            reference.layer_access_counts[name] = 2
            reference.layer_info.append(SMALL.nbytes)
    question = (names[5], SMALL, 5)
    rows = [("plain Python", reference, None), ("mlstate", strategy, 80.0)]
    table(report, f"Smart, {count:,} layers", rows, question, repeats, loops)
    halves = names[::2], names[1::2]
    rows = [("plain Python", Selective(*halves), None), ("mlstate", SelectiveStrategy(*halves), 60)]
    table(report, f"Selective, {count:,} layers", rows, question, repeats, 10 * loops)


def other_ways(report: Report, repeats: int, loops: int) -> None:
    """Compositions, and torch tensors if torch is installed."""
    question = ("model.layers.5.attention", SMALL, 5)
    reference = Both(Interval(2), SizeBased(4096))
    combined = IntervalStrategy(2) & SizeBasedStrategy(4096)
    same(reference, combined, names_of(FEW))
    rows = [("plain Python", reference, None), ("mlstate: a & b", combined, None)]
    rows.append(
        ("mlstate: FirstMatch(a, b)", FirstMatch(SelectiveStrategy(), IntervalStrategy(2)), None)
    )
    table(report, "Two strategies in one", rows, question, repeats, loops)
    try:
        import torch
    except ImportError:
        return

    class Bytes:
        """The time that torch needs for a tensor's bytes, in the shortest possible method."""

        def should_checkpoint(self, layer_id: str, activation: Any, layer_index: int) -> bool:
            return bool(activation.nbytes)

    class Torch(SizeBased):
        def should_checkpoint(self, layer_id: str, activation: Any, layer_index: int) -> bool:
            if layer_id in self.exclude_layers:
                return False
            chosen = bool(activation.numel() * activation.element_size() >= self.min_bytes)
            self.checkpointed_count += chosen
            return chosen

    tensor = torch.zeros(4, 64)
    for title, other, strategy in (
        ("SizeBased", Torch(4096), SizeBasedStrategy(4096)),
        ("Smart", None, SmartStrategy()),
    ):
        rows = [("plain Python", other, None)] if other else []
        rows.append(("mlstate", strategy, None))
        rows.append(("its bytes alone", Bytes(), None))
        table(report, f"{title} on a torch tensor", rows, (question[0], tensor, 5), repeats, loops)


if __name__ == "__main__":
    import sys

    of_this_run = Report("Decisions of strategies", as_json="--json" in sys.argv)
    decisions(of_this_run, "--quick" in sys.argv, 21 if "--quick" in sys.argv else 101)
    of_this_run.close()
