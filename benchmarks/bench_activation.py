"""Activation checkpointing: decisions of strategies, planning, and plans on models of torch.

``python benchmarks/bench_activation.py [--quick] [--json] [--only PART] [--repeats N]``; mlstate
must be installed, torch takes part if it is.  Ways to run a model take turns in one process, in a
new random order each round. Memory is measured by torch's allocator, not predicted by a plan.  See
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from activation_any import any_chains
from activation_decisions import Selective, asking, decisions, names_of
from activation_planning import planning
from harness import Candidate, Report, Row, measure, option_parser, show

from mlstate.activation import (
    IntervalStrategy,
    MemoryAwareStrategy,
    SelectiveStrategy,
    SizeBasedStrategy,
    SmartStrategy,
)

FEW, MANY = 10, 100_000  # layers
BLOCK = 50  # consecutive decisions in `asking`
SAME_TIME = 1.2  # the most by which few and many layers may differ

MAKERS: tuple[tuple[str, Callable[[list[str]], Any], float], ...] = (
    ("Interval", lambda names: IntervalStrategy(2), 60),
    ("Selective", lambda names: SelectiveStrategy(names[::2], names[1::2]), 60),
    ("SizeBased", lambda names: SizeBasedStrategy(4096), 60),
    ("MemoryAware", lambda names: MemoryAwareStrategy(), 80),
    ("Smart", lambda names: SmartStrategy(), 80),
)


@dataclass
class Run:
    """Shared by all parts."""

    report: Report
    quick: bool
    repeats: int | None

    def rounds(self, many: int, few: int) -> int:
        """Return the number of rounds of a part."""
        return self.repeats or (few if self.quick else many)

    def judge(self, lines: list[str]) -> None:
        """Print verdicts under the last table."""
        for line in lines:
            self.report.log(f"  {line}")
        self.report.tables[-1].setdefault("aims", []).extend(lines)


def met(good: bool) -> str:
    return "met" if good else "NOT MET"


# ---- decisions ----

EMPTY_NS = 39  # the time of an empty call on the machine for which these aims were set


def deciding(run: Run) -> None:
    """Compare decisions with plain Python, and few layers with many."""
    before = len(run.report.tables)
    decisions(run.report, run.quick, run.rounds(15, 7))
    new_tables: list[Any] = run.report.tables[before:]
    slower = [
        f"{table['title']}, {row['name']} ({row['times_baseline']:.2f}x)"
        for table in new_tables
        for row in table["rows"]
        if row["name"].startswith("mlstate") and row["times_baseline"] < 1
    ]
    verdict_text = "met" if not slower else f"NOT MET: {'; '.join(slower)}"
    lines = [f"no decision is slower than plain Python's: {verdict_text}"]
    for table in new_tables:  # the aims are for a machine with this time of an empty call
        for row in table["rows"]:
            if row["to_reach"] is not None:
                scaled, aim = row["times_limit"] * EMPTY_NS, float(row["to_reach"].split()[1][:-1])
                lines.append(
                    f"{table['title']}, if an empty call took {EMPTY_NS} ns: "
                    f"{scaled:.0f} <= {aim:g}: {met(scaled <= aim)}"
                )
    run.judge(lines)
    layers(run)
    in_turn(run)


def layers(run: Run) -> None:
    """Ask about one layer of few, and of many that the strategy has already met."""
    loops = 20 if run.quick else 200
    activation = np.zeros((4, 64), np.float32)
    candidates = []
    for title, make, at_most in MAKERS:
        for count in (FEW, MANY):
            names = names_of(count)
            strategy = met_before(make(names), names, activation)
            call = asking(strategy, names[5], activation, 5, loops)
            name = f"{title}, {count:,} layers"
            candidates.append(Candidate(name, call, at_most=at_most))
    rows = measure(candidates, run.rounds(15, 7), unit=1 / (loops * BLOCK))
    run.report.table(f"one decision, of {FEW} layers and of {MANY:,}", rows, unit="ns")
    medians = {row.name: row.median for row in rows}
    ratios = {
        t: medians[f"{t}, {MANY:,} layers"] / medians[f"{t}, {FEW} layers"] for t, _, _ in MAKERS
    }
    worst = max(ratios, key=lambda title: ratios[title])
    run.judge(
        [
            f"{MANY:,} layers <= {SAME_TIME:g}x the time of {FEW}: at most {ratios[worst]:.2f}x "
            f"({worst}), {met(ratios[worst] <= SAME_TIME)}"
        ]
    )


def met_before(strategy: Any, names: list[str], activation: Any) -> Any:
    """Let a strategy meet all layers."""
    for i, name in enumerate(names):
        strategy.should_checkpoint(name, activation, i)
    return strategy


def in_turn(run: Run) -> None:
    """Ask about all layers in turn, as a model does: names and tables drop out of the cache."""
    activation = np.zeros((4, 64), np.float32)
    candidates = []
    count = MANY // 10 if run.quick else MANY
    for layers_of in (FEW, count):
        names = names_of(layers_of)
        halves = names[::2], names[1::2]
        for title, strategy in (
            ("plain Python's Selective", Selective(*halves)),
            ("mlstate Selective", SelectiveStrategy(*halves)),
            ("mlstate Smart", met_before(SmartStrategy(), names, activation)),
        ):
            pairs = [(name, i) for i, name in enumerate(names)] * (count // layers_of)
            call = passing(strategy, pairs, activation)
            candidates.append(Candidate(f"{title}, {layers_of:,} layers", call))
    rows = measure(candidates, run.rounds(9, 3), unit=1 / count)
    run.report.table("a decision of a loop over all layers", rows, unit="ns")


def passing(strategy: Any, pairs: list[tuple[str, int]], activation: Any) -> Callable[[], None]:
    def call() -> None:
        for name, i in pairs:
            strategy.should_checkpoint(name, activation, i)

    return call


# ---- planning ----


def planned(run: Run) -> None:
    run.judge(planning(run.report, run.quick, run.rounds(5, 3)))


def chains(run: Run) -> None:
    run.judge(any_chains(run.report, run.quick))


# ---- models ----


def on_model(run: Run, name: str) -> None:
    """Compare ways to run a model in less memory."""
    if find_spec("torch") is None:
        run.report.log(f"\n{name} is left out: torch is not installed")
        return
    import activation_models
    from activation_ways import Ways

    run.report.log("")
    ways = Ways(getattr(activation_models, name)(run.quick), run.report.log)
    ways.torch_ways()
    ways.compiled_ways()
    ways.plans()
    ways.measure(run.rounds(7, 3))
    rows: dict[str, Row] = ways.rows()
    note = (
        "peak: what torch allocated during a step, its input included; run again: runs of blocks, "
        "or of layers, after their first, and their time, each one's median over all ways"
    )
    run.report.table(ways.model.name, list(rows.values()), note=note)
    run.judge(verdicts_of(ways, aim=0.5 if name == "pyramid" else None))


def verdicts_of(ways: Any, aim: float | None) -> list[str]:
    """Compare plans with other ways that have the same peak."""
    from activation_ways import LAYERS_SECOND, MINE, SECOND

    lines = []
    for mlstate_name in (name for name in MINE if name in ways.ways):
        other = SECOND if "Interval(2)" in mlstate_name else ways.sequential
        share = ways.again(mlstate_name) / ways.again(other)
        peak = ways.ways[mlstate_name].peak_bytes / ways.ways[other].peak_bytes
        longer = [f"{1e3 * ways.extra(name):.1f} ms" for name in (mlstate_name, other)]
        line = (
            f"{mlstate_name}: {100 * share:.0f} % of its recomputation at {100 * peak:.1f} % of "
            f"its peak; the step takes {longer[0]} longer than without checkpointing, "
            f"{longer[1]} there"
        )
        if aim is not None and mlstate_name == LAYERS_SECOND:
            line += f"; <= {100 * aim:.0f} % at no higher peak: {met(share <= aim and peak <= 1)}"
        lines.append(line)
    mlstate_ways = [w for w in ways.ways.values() if w.name in MINE]
    wrong = [way.name for way in mlstate_ways if way.gradients != "same"]
    line = f"plans: gradients have the bits of the plain run: {met(not wrong)}"
    others = [w.name for w in ways.ways.values() if w.gradients != "same" and w not in mlstate_ways]
    lines.append(line + (f"; others have: {', '.join(others)}" if others else ""))
    errors = [abs(w.predicted.predicted_peak_bytes / w.peak_bytes - 1) for w in mlstate_ways]
    worst = 100 * max(errors)
    label = f"plans: predicted peak within 2 % of the measured one: {worst:.2f} %"
    lines.append(f"{label}, {met(worst <= 2)}")
    return lines


def pyramid(run: Run) -> None:
    on_model(run, "pyramid")


def transformer(run: Run) -> None:
    on_model(run, "transformer")


PARTS: dict[str, Callable[[Run], None]] = {
    "decisions": deciding,
    "planning": planned,
    "any": chains,
    "pyramid": pyramid,
    "transformer": transformer,
}


def options() -> argparse.Namespace:
    parser = option_parser(__doc__, "small models, few rounds", PARTS)
    parser.add_argument("--repeats", type=int, help="rounds, if not each part's own number")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    report = Report(
        "mlstate: activation checkpointing",
        arguments.json,
        "activation" if arguments.store else None,
    )
    report.log("medians; 'x base': times as fast as the base; '/limit': times the limit's duration")
    run = Run(report, arguments.quick, arguments.repeats)
    began = time.perf_counter()
    for part in [arguments.only] if arguments.only else list(PARTS):
        started = time.perf_counter()
        PARTS[part](run)
        report.log(f"  ({part}: {show(time.perf_counter() - started)} s)")
    report.log(f"\n{show(time.perf_counter() - began)} s in all")
    report.close()


if __name__ == "__main__":
    main()
