"""Activation checkpointing: planning, and plans on models of torch.

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
from functools import partial
from importlib.util import find_spec
from typing import Any

from activation_planning import planning
from harness import Report, Row, met, option_parser, show


@dataclass
class Run:
    """Shared by all parts."""

    report: Report
    quick: bool
    repeats: int | None

    def rounds(self, many: int, few: int) -> int:
        """Return the number of rounds of a part."""
        return self.repeats or (few if self.quick else many)


# ---- planning ----


def planned(run: Run) -> None:
    run.report.judge(planning(run.report, run.quick, run.rounds(5, 3)))


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
    run.report.judge(verdicts_of(ways, aim=0.5 if name == "pyramid" else None))


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


# ---- whole models ----


def on_shapes(run: Run) -> None:
    """Compare memory budgets of whole models: ours, torch's, and recomputing every layer."""
    if find_spec("transformers") is None or find_spec("torch") is None:
        run.report.log("\nshapes is left out: torch and transformers are not installed")
        return
    from activation_shapes import whole_models

    run.report.judge(whole_models(run.report, run.quick, run.rounds(7, 3)))


PARTS: dict[str, Callable[[Run], None]] = {
    "planning": planned,
    "pyramid": partial(on_model, name="pyramid"),
    "transformer": partial(on_model, name="transformer"),
    "shapes": on_shapes,
}


def options() -> argparse.Namespace:
    parser = option_parser(__doc__, "small models, few rounds", PARTS)
    parser.add_argument("--repeats", type=int, help="rounds, if not each part's own number")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    report = Report.open("mlstate: activation checkpointing", "activation", arguments)
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
