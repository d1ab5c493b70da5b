"""Activation checkpointing: planning, and whole models of torch under a memory budget.

``python benchmarks/bench_activation.py [--quick] [--json] [--only PART] [--repeats N]``; mlstate
must be installed, torch and transformers take part if they are.  Memory is measured by torch's
allocator, not predicted by a plan.  See docs/activation.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from activation_planning import planning
from harness import Run, main
from rows import Row


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
