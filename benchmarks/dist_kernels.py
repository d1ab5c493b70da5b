"""Additions in place and the accumulation of micro-batches, for `bench_dist.py`: one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from dist_model import Tensors, gradients_of, shapes_of
from harness import Candidate, Report, measure

import mlstate
from mlstate import _core
from mlstate.fsdp import GradientAccumulator

MICRO_BATCHES = 4
LINE = 64  # bytes of the cache


def add(target: Any, source: Any, scale: float = 1.0, wants_norms: bool = False) -> None:
    """mlstate's kernel behind `GradientAccumulator` and `accumulate_gradients`."""
    if wants_norms:
        _core.accumulate(["x"], [target], [source], scale, True)
    else:
        _core.accumulate(["x"], [target], [source], scale, False)


def torch_fused(target: torch.Tensor, source: torch.Tensor) -> None:
    """Add, compute the norm, and count non-finite elements, by torch's operations."""
    target.add_(source)
    torch.linalg.vector_norm(target)
    torch.isfinite(target).all()


def kernels(report: Report, quick: bool, repeats: int) -> None:
    """Compare additions of many elements, with one thread."""
    count = 1 << 21 if quick else 64_000_000
    torch.set_num_threads(1)
    threads = mlstate.get_num_threads()
    mlstate.set_num_threads(1)
    wide = [copy(torch.randn(count) * 1e-3) for _ in range(2)]
    half = {t: [copy(w.to(t)) for w in wide] for t in (torch.bfloat16, torch.float16)}
    try:
        for title, candidates in (
            ("float32 += float32", of_equal(wide)),
            ("bfloat16 += bfloat16", of_equal(half[torch.bfloat16], 1.5)),
            ("float16 += float16", of_equal(half[torch.float16])),
            ("float32 += 0.5 * bfloat16", scaled(wide[0], half[torch.bfloat16][1])),
            ("float32 += float32, with norm and a look for NaN and infinity", fused(wide)),
        ):
            rows = measure(candidates, repeats, unit=1e-6, warm_up=1)
            note = "one thread each; limit: NumPy's float32 addition in place of as many bytes"
            report.table(f"{title}, {count / 1e6:.0f} M elements", rows, note=note)
    finally:
        mlstate.set_num_threads(threads)


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """Clone into NumPy memory aligned to a cache line, so that all ways use the same memory.

    NumPy requests huge pages for its arrays, and torch does not.
    """
    memory = np.empty(tensor.nbytes + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    lines = torch.from_numpy(memory[start : start + tensor.nbytes])
    return lines.view(tensor.dtype).copy_(tensor)


def limit_of(target: torch.Tensor, source: torch.Tensor) -> Candidate:
    """Read both and write one, as float32: the machine's time for these bytes."""
    arrays = [copy(t).view(torch.float32).numpy() for t in (target, source)]
    arrays[0][:] = 0
    arrays[1][:] = 1e-3
    return Candidate("limit: NumPy, float32", partial(np.add, *arrays, out=arrays[0]), limit=True)


def of_equal(pair: list[torch.Tensor], at_least: float | None = None) -> list[Candidate]:
    return [
        Candidate("torch: add_", partial(copy(pair[0]).add_, pair[1]), baseline=True),
        Candidate("mlstate", partial(add, copy(pair[0]), pair[1]), at_least=at_least),
        limit_of(*pair),
    ]


def scaled(wide: torch.Tensor, narrow: torch.Tensor) -> list[Candidate]:
    def two_steps(target: torch.Tensor) -> None:
        target.add_(narrow.float(), alpha=0.5)

    by_torch = partial(copy(wide).add_, narrow, alpha=0.5)
    # this many additions move the same number of bytes
    copied_bytes = (2 * wide.nbytes + narrow.nbytes) // 12
    return [
        Candidate("torch: add_(alpha=)", by_torch, baseline=True),
        Candidate("torch: float(), then add_(alpha=)", partial(two_steps, copy(wide))),
        Candidate("mlstate", partial(add, copy(wide), narrow, 0.5), at_least=8),
        limit_of(wide[:copied_bytes], wide[:copied_bytes]),
    ]


def fused(pair: list[torch.Tensor]) -> list[Candidate]:
    return [
        Candidate(
            "torch: add_, vector_norm, isfinite.all",
            partial(torch_fused, copy(pair[0]), pair[1]),
            baseline=True,
        ),
        Candidate("mlstate", partial(add, copy(pair[0]), pair[1], 1.0, True), at_least=10),
        limit_of(*pair),
    ]


# ---- micro-batches ----


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
