"""The accumulation of micro-batches, for `bench_dist.py`: one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from dist_model import Tensors, gradients_of, shapes_of
from harness import Candidate, Report, measure

from mlstate.fsdp import GradientAccumulator

MICRO_BATCHES = 4


def cloning(batches: list[Any], clone: Callable[[Any], Any]) -> Any:
    """The specification's way: a clone for each micro-batch, and a sum of clones at the end."""
    batches_by_name: dict[str, list[Any]] = {}
    for batch in batches:
        for name, gradient in batch.items():
            batches_by_name.setdefault(name, []).append(clone(gradient))
    sums = {}
    for name, gradients in batches_by_name.items():
        total = clone(gradients[0])
        for gradient in gradients[1:]:
            total += gradient
        sums[name] = total
    return sums


def running(accumulator: GradientAccumulator, batches: list[Tensors]) -> Any:
    for batch in batches:
        accumulator.add_gradients(batch)
    return accumulator.get_and_clear_gradients()


def summing(batches: list[Tensors]) -> Any:
    """Clone the first gradients and add to them, as torch's autograd does."""
    sums = {name: gradient.clone() for name, gradient in batches[0].items()}
    for batch in batches[1:]:
        for name, gradient in batch.items():
            sums[name].add_(gradient)
    return sums


def accumulator(report: Report, quick: bool, repeats: int) -> None:
    """Compare ways to add up four micro-batches of the whole model; must run first.

    The time of clones depends on malloc: in a new process their pages are new, which takes twice as
    long as with a heap that has grown.
    """
    torch.set_num_threads(1)
    shapes = shapes_of(quick)
    batches = [gradients_of(n, shapes, torch.float32) for n in range(2)] * (MICRO_BATCHES // 2)
    arrays = [{name: t.numpy() for name, t in batch.items()} for batch in batches]
    in_place, over_arrays = GradientAccumulator(MICRO_BATCHES), GradientAccumulator(MICRO_BATCHES)
    same_bits(running(in_place, batches), cloning(batches, torch.clone))
    candidates = [
        Candidate(
            "clone per micro-batch (torch)",
            partial(cloning, batches, torch.clone),
            baseline=True,
        ),
        Candidate("clone per micro-batch (NumPy)", partial(cloning, arrays, np.copy)),
        Candidate("running sum, torch: clone, add_", partial(summing, batches)),
        Candidate(
            "mlstate.fsdp.GradientAccumulator", partial(running, in_place, batches), at_least=8
        ),
        Candidate("mlstate, NumPy arrays", partial(running, over_arrays, arrays)),
    ]
    count = sum(t.numel() for t in batches[0].values())
    report.table(
        f"{MICRO_BATCHES} micro-batches of float32 gradients, {count / 1e6:.0f} M elements each",
        measure(candidates, repeats, unit=1e-6, warm_up=1),
        note="memory by the C library as it is set up, in a process that did nothing else before; "
        "mlstate's with norm and finite report",
    )


def same_bits(actual: Tensors, expected: Tensors) -> None:
    """Raise unless a running sum equals the specification's."""
    for name, value in expected.items():
        if not torch.equal(actual[name], value):
            raise RuntimeError(f"{name}: sums differ")
