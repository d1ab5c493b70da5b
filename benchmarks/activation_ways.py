"""Ways to run a training step in less memory, for `bench_activation.py`.

Each way runs the same blocks, so that parameters, gradients and buffers are the same tensors. Its
step is measured three times: memory by torch's allocator, the bits of all gradients compared with
the plain run, and time, in turns with the other ways.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from types import FunctionType
from typing import Any

import torch
from activation_models import Clock, Model, Timed, step_of
from harness import Candidate, Row, rows_of, settle, shuffled_turns
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from mlstate.activation import Chain, IntervalStrategy, Plan, plan
from mlstate.errors import CapacityError
from mlstate.integrations.torch import measure_peak

PLAIN = "no checkpointing"
EVERY = "torch.utils.checkpoint, every block"
SECOND = "torch.utils.checkpoint, Interval(2)"
SEQUENTIAL = "checkpoint_sequential, {} segments"
BACKEND = "aot_eager_decomp_partition"  # the compiler's partition, run by eager kernels
COMPILED = "torch.compile, partitioned"
BUDGET = "torch.compile, activation_memory_budget 0.5"
AT_SECOND = "mlstate plan, at Interval(2)'s peak"
AT_SEQUENTIAL = "mlstate plan, at sequential's peak"
LAYERS_SECOND = "plan of single layers, Interval(2)'s peak"
LAYERS_SEQUENTIAL = "plan of single layers, sequential's peak"
MINE = (AT_SECOND, LAYERS_SECOND, AT_SEQUENTIAL, LAYERS_SEQUENTIAL)

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Way:
    """One way to run the step, and its measurements."""

    name: str
    step: Callable[[], None]
    clock: Clock | None = None  # None: its blocks cannot be timed separately
    predicted: Plan | None = None
    peak_bytes: int = 0
    gradients: str = ""
    buffers: str = ""
    seconds: list[float] = field(default_factory=list)
    again: list[int] = field(default_factory=list)  # indexes of the blocks that were recomputed


def schedule(segments: list[tuple[int, int, bool]]) -> list[tuple[str, int]]:
    """List the steps that torch makes: segments of blocks, each kept or recomputed as a whole."""
    steps: list[tuple[str, int]] = []
    for begin, end, again in segments:
        for i in range(begin, end):
            steps.append(("forward" if again else "save", i))
            if again and i > begin:
                steps.append(("drop", i))
    for begin, end, again in reversed(segments):
        if again:
            steps.append(("drop", end))
            steps += [("save", i) for i in range(begin, end)]
        steps += [("backward", i) for i in reversed(range(begin, end))]
    return steps


class Ways:
    """Makes the ways of one model and measures them."""

    def __init__(self, model: Model, log: Callable[[str], None]) -> None:
        self.model = model
        self.log = log
        self.blocks = len(model.blocks)
        self.segments = round(math.sqrt(self.blocks))
        self.sequential = SEQUENTIAL.format(self.segments)
        self.ways: dict[str, Way] = {}
        sequential = nn.Sequential(*model.blocks)
        self.parameters = list(sequential.parameters())
        self.buffers = list(sequential.buffers())
        self.begin = [buffer.clone() for buffer in self.buffers]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.chain = Chain.from_torch(sequential, model.sample, repeats=15)
        sequential.eval()  # so that the buffers do not change
        with torch.no_grad():
            self.gradient = torch.randn_like(sequential(model.sample))
        sequential.train()
        self.expected: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
        # Blocks that are sequences of layers can also be planned layer by layer.
        sequences = [block for block in model.blocks if isinstance(block, nn.Sequential)]
        self.layers = [layer for block in sequences for layer in block]
        self.modules = [*model.blocks, *self.layers]
        # Ways recompute different sets of the same modules. One time for each module, measured over
        # all ways, makes these sets comparable.
        self.module_seconds: list[list[float]] = [[] for _ in self.modules]

    # ---- the ways ----

    def timed(self, *, layers: bool = False) -> tuple[nn.Sequential, Clock]:
        """Wrap the blocks, or the layers, in timers."""
        clock = Clock()
        timed = [Timed(module, i, clock) for i, module in enumerate(self.modules)]
        return nn.Sequential(*timed[self.blocks :] if layers else timed[: self.blocks]), clock

    def add(
        self,
        name: str,
        forward: Forward,
        clock: Clock | None,
        predicted: Plan | None = None,
    ) -> None:
        """Make a way, and take the measurements that are needed once."""
        way = Way(name, step_of(forward, self.model.sample, self.gradient), clock, predicted)
        self._check(way)
        gc.collect()
        way.peak_bytes = measure_peak(way.step).peak_bytes
        self.ways[name] = way

    def as_torch_does(self, segments: list[tuple[int, int, bool]]) -> Plan:
        """Return the chain's prediction for segments that are kept or recomputed."""
        return Plan(self.chain, schedule(segments))

    def torch_ways(self) -> None:
        """Add the plain run and torch's checkpoints."""
        module, clock = self.timed()
        every = range(self.blocks)
        self.add(PLAIN, module, clock, self.as_torch_does([(i, i + 1, False) for i in every]))
        for name, interval in ((EVERY, 1), (SECOND, 2)):
            module, clock = self.timed()
            segments = [(i, i + 1, i % interval == 0) for i in every]
            self.add(name, decided(module, interval), clock, self.as_torch_does(segments))
        module, clock = self.timed()
        forward = in_segments(module, self.segments)
        size = self.blocks // self.segments
        starts = [i * size for i in range(self.segments)]
        ends = [*starts[1:], self.blocks]
        segments = [(a, b, b < self.blocks) for a, b in zip(starts, ends, strict=True)]
        self.add(self.sequential, forward, clock, self.as_torch_does(segments))

    def compiled_ways(self) -> None:
        """Add torch's compiled model, if a compiler is installed."""
        import torch._functorch.config as functorch

        for name, budget in ((COMPILED, 1.0), (BUDGET, 0.5)):
            forward = torch.compile(separate(nn.Sequential(*self.model.blocks)), backend=BACKEND)
            try:
                with functorch.patch(activation_memory_budget=budget):
                    self.add(name, forward, None)
            except Exception as error:
                reason = str(error).strip().partition("\n")[0]
                self.log(f"{name} is left out: {type(error).__name__}: {reason:.200}")
                return

    def plans(self) -> None:
        """Add the planner's schedules, at the measured peaks."""
        for other, name, layers in (
            (SECOND, AT_SECOND, LAYERS_SECOND),
            (self.sequential, AT_SEQUENTIAL, LAYERS_SEQUENTIAL),
        ):
            budget = self.ways[other].peak_bytes
            self.add_plan(name, self.chain, budget)
            if self.layers:
                chain = Chain.from_torch(nn.Sequential(*self.layers), self.model.sample, repeats=15)
                self.add_plan(layers, chain, budget)

    def add_plan(self, name: str, chain: Chain, budget: int) -> None:
        """Add a plan for a chain of the blocks, or of the layers."""
        began = time.perf_counter()
        try:
            schedule = plan(chain, budget)
        except CapacityError as error:
            self.log(f"{name} is left out: {error}")
            return
        self.log(f"{name}: {1e3 * (time.perf_counter() - began):.3g} ms to plan, {schedule.method}")
        module, clock = self.timed(layers=chain is not self.chain)
        self.add(name, schedule.apply(module), clock, schedule)

    # ---- measuring ----

    def _check(self, way: Way) -> None:
        """Run a step and compare its bits with the bits of the plain run."""
        with torch.no_grad():
            for buffer, value in zip(self.buffers, self.begin, strict=True):
                buffer.copy_(value)
        for parameter in self.parameters:
            parameter.grad.zero_()
        way.step()
        gradients = [parameter.grad.clone() for parameter in self.parameters]
        buffers = [buffer.clone() for buffer in self.buffers]
        if self.expected is None:
            self.expected = gradients, buffers
        way.gradients = compared(gradients, self.expected[0])
        way.buffers = compared(buffers, self.expected[1])

    def measure(self, repeats: int) -> None:
        """Let the ways take turns; the first round warms up."""
        ways = list(self.ways.values())
        gc.collect()
        gc.disable()
        try:
            for number, way in shuffled_turns(ways, 1 + repeats):
                if way.clock is not None:
                    way.clock.reset()
                settle()
                began = time.perf_counter()
                way.step()
                seconds = time.perf_counter() - began
                if number:
                    way.seconds.append(seconds)
                    if way.clock is not None:
                        way.again = [place for place, _ in way.clock.again]
                        for place, took in way.clock.again:
                            self.module_seconds[place].append(took)
        finally:
            gc.enable()

    def rows(self) -> dict[str, Row]:
        """Turn the measurements into rows of a table."""
        candidates = [Candidate(name, settle, baseline=name == PLAIN) for name in self.ways]
        samples = {name: [1e3 * s for s in way.seconds] for name, way in self.ways.items()}
        rows = rows_of(candidates, samples)
        most = self.ways[PLAIN].peak_bytes
        for row in rows:
            way = self.ways[row.name]
            row.extra["peak MB"] = f"{way.peak_bytes / 1e6:.2f}"
            row.extra["of plain"] = f"{100 * way.peak_bytes / most:.1f} %"
            if way.predicted is not None:
                predicted = way.predicted.predicted_peak_bytes
                row.extra["predicted MB"] = f"{predicted / 1e6:.2f}"
                error = round(100 * (predicted / way.peak_bytes - 1), 2)
                row.extra["error"] = f"{error + 0.0:+.2f} %"
            if way.clock is not None:
                row.extra["run again"] = len(way.again)
                row.extra["their ms"] = f"{1e3 * self.again(row.name):.1f}"
            row.extra["gradients"] = way.gradients
            if self.buffers:
                row.extra["buffers"] = way.buffers
        return {row.name: row for row in rows}

    def again(self, name: str) -> float:
        """Seconds of the recomputed modules, with the median over all ways for each module."""
        return sum(median(self.module_seconds[place]) for place in self.ways[name].again)

    def extra(self, name: str) -> float:
        """Median of the extra time over the plain step of the same round, in seconds."""
        pairs = zip(self.ways[name].seconds, self.ways[PLAIN].seconds, strict=True)
        return median([a - b for a, b in pairs])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def compared(gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """Compare bits."""
    pairs = zip(gradients, expected, strict=True)
    same = all(torch.equal(bits(a), bits(b)) for a, b in pairs)
    return "same" if same else "OTHER"


def decided(module: nn.Sequential, interval: int) -> Forward:
    """Run blocks one by one; recompute those that a strategy selects."""
    strategy = IntervalStrategy(interval)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for i, (name, block) in enumerate(module.named_children()):
            if strategy.should_checkpoint(name, x, i):
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x

    return forward


def in_segments(module: nn.Sequential, segments: int) -> Forward:
    """Recompute all segments except the last."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(module, segments, x, use_reentrant=False)

    return forward


def separate(module: nn.Module) -> Any:
    """Return a function with its own code object: torch stores compiled code there."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return module(x)

    code = forward.__code__.replace(co_name="separate")
    return FunctionType(code, forward.__globals__, "separate", None, forward.__closure__)
