"""`measure_plan`: peak memory of each step of a plan in torch, predicted and measured."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ...._common.report import Shown, Table
from ...._common.set_module import set_module
from ...._common.text import bytes_text
from .block_calls import BlockCall, SampledModel, loss_of, seed_of
from .peak_memory import Allocations
from .recompute_end import RecomputeEnd, StopRecompute
from .rng_and_buffers import copy_objects
from .schedule import Program
from .tensors import storage_bytes, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ....activation._plan import Plan

_ROWS = 60
_COLUMNS = ["step", "predicted [B]", "as run [B]", "measured [B]", "why it differs"]
# Reasons why a step's memory in torch differs from the plan's count.
_EARLY = "ends after the operator that saved its last tensor"
_HELD = "more: the model still holds what was dropped before its next block ran"
_SEED = "more: the gradient of the result already exists"


@set_module("mlstate.integrations.torch.records")
class StepUse(NamedTuple):
    """Peak memory of one step, part of a `PlanUse`.

    Attributes
    ----------
    kind, block : str, int
        The step.
    predicted_bytes : int
        Peak in the plan's simulation.
    expected_bytes : int
        Expected peak in torch, which frees an activation after its last use and ends a
        recomputation early.
    measured_bytes : int
        Peak measured with torch's allocator.
    why : str
        Why the run differs from the plan's count.

    Examples
    --------
    >>> from mlstate.integrations.torch.records import StepUse
    >>> StepUse("save", 0, 96, 96, 96, "").measured_bytes
    96
    """

    kind: str
    block: int
    predicted_bytes: int
    expected_bytes: int
    measured_bytes: int
    why: str


@set_module("mlstate.integrations.torch.records")
class PlanUse(Shown):
    """Peak memory of a plan, predicted and measured; `measure_plan` returns it.

    Attributes
    ----------
    steps : list of StepUse
        The steps, in order.
    predicted_bytes, expected_bytes, measured_bytes : int
        Maximum over all steps.

    Examples
    --------
    >>> from mlstate.integrations.torch.records import PlanUse, StepUse
    >>> PlanUse([StepUse("save", 0, 96, 96, 95, ""), StepUse("backward", 0, 128, 96, 90, "")])
    <PlanUse: 128 B predicted, 96 B as run, 95 B measured>
    """

    def __init__(self, steps: list[StepUse]) -> None:
        self.steps = steps
        self.predicted_bytes: int = max(step.predicted_bytes for step in steps)
        self.expected_bytes: int = max(step.expected_bytes for step in steps)
        self.measured_bytes: int = max(step.measured_bytes for step in steps)

    def _title(self) -> str:
        return (
            f"{bytes_text(self.predicted_bytes)} predicted, {bytes_text(self.expected_bytes)} "
            f"as run, {bytes_text(self.measured_bytes)} measured"
        )

    def report(self) -> str:
        """Return a description of the peaks and the causes of differences.

        Returns
        -------
        str
            A few lines, and a table with at most 60 steps.

        Examples
        --------
        >>> from mlstate.integrations.torch.records import PlanUse, StepUse
        >>> why = "free already: activation 3"
        >>> print(PlanUse([StepUse("save", 1, 128, 96, 96, why)]).report().partition("step ")[0])
        128 B predicted, 96 B as run, 96 B measured
        the largest predicted one: save 1, free already: activation 3
        the largest measured one: save 1
        <BLANKLINE>
        """
        return self._table().text(_ROWS)

    def _table(self) -> Table:
        """Return a row for each step; the title has lines about the steps with the peaks."""
        by_plan = max(self.steps, key=lambda step: step.predicted_bytes)
        by_torch = max(self.steps, key=lambda step: step.measured_bytes)
        lines = [
            self._title(),
            f"the largest predicted one: {by_plan.kind} {by_plan.block}"
            + (f", {by_plan.why}" if by_plan.why else ""),
            f"the largest measured one: {by_torch.kind} {by_torch.block}",
        ]
        rows = [(f"{step.kind} {step.block}", *step[2:5], step.why) for step in self.steps]
        return Table(lines, _COLUMNS, rows)


class _Recompute(NamedTuple):
    """Memory of a recomputation, which ends after the operator of its last saved tensor."""

    left: int  # bytes that the recomputation leaves
    peak: int  # bytes, relative to its start
    keeps_input: bool  # autograd saves at least a part of it
    keeps_output: bool


class _Recomputation:
    """Measures recomputations of blocks; `of_blocks` returns the results afterwards."""

    def __init__(self, model: SampledModel, watched: Allocations) -> None:
        self._watched = watched
        self._existing = model.existing()
        self.existing_bytes = 0  # of the first block's input: existed before the run
        self._keeps: list[tuple[bool, bool]] = []

    def __call__(self, call: BlockCall) -> None:
        """Run a block as its recomputation does, to its last saved tensor, between two marks.

        A first run counts the saved tensors, and records whether they include the block's input and
        its output.
        """
        import torch

        sizes = storage_bytes(tensor for tensor, _ in call.tensors())
        if not self._keeps:
            self.existing_bytes = sum(n for key, n in sizes.items() if key in self._existing)
        hooks: Any = torch.autograd.graph.saved_tensors_hooks
        saved: list[torch.Tensor] = []
        with hooks(lambda tensor: saved.append(tensor.detach()), lambda _: None):
            out = call()
        count, storages = len(saved), storage_bytes(saved).keys()
        keeps_input = not storages.isdisjoint(sizes)
        self._keeps.append((keeps_input, not storages.isdisjoint(storage_bytes(tensors_in(out)))))
        del out
        saved.clear()

        def pack(tensor: torch.Tensor) -> None:
            saved.append(tensor.detach())
            if len(saved) == count:
                end.request()

        self._watched.mark()
        with suppress(StopRecompute), hooks(pack, lambda _: None), RecomputeEnd() as end:
            call()
        self._watched.mark()

    def of_blocks(self) -> list[_Recompute]:
        """Return the measurement of each block, in order, after the recording."""
        runs = self._watched.spans()[::2]  # the others are between two blocks
        return [
            _Recompute(run.after - run.before, run.peak - run.before, *keeps)
            for run, keeps in zip(runs, self._keeps, strict=True)
        ]


class _StepSimulation:
    """A plan's steps as torch runs them: memory held, and differences from the plan's count.

    An activation is in memory if it is kept (`_live_activations`), if it is the argument of the
    next first run (`_next_input`), or if a neighbouring block saved it for its backward run. A
    block's saved memory is counted without its input and output.
    """

    def __init__(self, plan: Plan, recomputes: list[_Recompute]) -> None:
        """Start before the first step of `plan`.

        `recomputes`: measurements of each block's recomputation.
        """
        self._chain = plan.chain
        self._recomputes = recomputes
        self._program = Program(plan.steps())
        self._activations: list[int] = plan.chain.activation_bytes.tolist()
        self._live_activations = {0} if self._program.keeps_input else set()
        self._next_input = 0  # number of the activation that the next first run takes
        # bytes of a recomputed activation that was dropped, and that the model still holds
        self._held_bytes = 0
        self._saved_bytes: dict[int, int] = {}  # saved bytes by block
        self._gradient = 0  # bytes of the gradient that the backward pass holds
        self._seeded = False  # the result's gradient exists before the last block's backward step
        self._counted_apart: set[int] = set()  # activations that the plan counts separately

    def _is_live(self, k: int) -> bool:
        """Return whether activation `k`, the input of block `k`, is in memory.

        The input of the first block always is: the caller has it.
        """
        if k in self._live_activations or k == self._next_input or k == 0:
            return True
        if k - 1 in self._saved_bytes and self._recomputes[k - 1].keeps_output:
            return True
        keeps_input = k in self._saved_bytes and self._recomputes[k].keeps_input
        return keeps_input and not self._program.drops_input[k]

    def _total(self) -> int:
        """Return the bytes in memory now: activations, saved memory, gradient, and duplicates."""
        activation_sizes = [size for k, size in enumerate(self._activations) if self._is_live(k)]
        others = (self._gradient, self._held_bytes, self._chain.outside_bytes)
        return sum([*activation_sizes, *self._saved_bytes.values(), *others])

    def find_freed(self) -> list[int]:
        """Return the numbers of activations that the plan counts and that are free already."""
        counted = self._counted_apart | {i + 1 for i in self._saved_bytes}
        return sorted(k for k in counted if not self._is_live(k))

    def step(self, at: int) -> tuple[int, str]:
        """Simulate step number `at`; return its peak of bytes and why it differs from the plan.

        The reason is "" if it does not. Call it for all steps in order.
        """
        kind, i = self._program.steps[at]
        why = self._seed(at) if kind in ("forward", "save", "load") else []
        why += [_HELD] if self._held_bytes else []
        own_output = i + 1 if kind == "backward" else -1  # the backward figures exclude it
        freed = [str(k) for k in self.find_freed() if k != own_output]
        if freed:
            why.append(f"free already: activation {', '.join(freed)}")
        before, chain = self._total(), self._chain
        peak = before
        if kind in ("forward", "save"):
            added, temporary, ends_early = self._run(at, kind == "save", i)
            peak += added + temporary
            why += [_EARLY] if ends_early else []
        elif kind == "backward":
            peak = self._backward(i)
        elif kind == "offload":
            del self._saved_bytes[i]
            self._counted_apart.add(i + 1)
            if self._program.keeps[at]:
                self._live_activations.discard(i + 1)
        elif kind == "load":
            self._saved_bytes[i] = int(chain.saved_bytes[i]) - self._activations[i + 1]
            peak = before + int(chain.saved_bytes[i])
        elif kind == "drop":
            self._counted_apart.discard(i)
        if self._program.keeps[at] and kind in ("forward", "save", "load"):
            self._live_activations.add(i + 1)
            if self._next_input == i + 1 and at != self._program.first[i]:
                self._held_bytes = self._activations[i + 1]
        if kind in ("forward", "save") and at == self._program.first[i]:
            self._next_input = i + 1 if i + 1 < chain.blocks else -1
            self._held_bytes = 0
            if i + 1 == chain.blocks and chain._has_head:  # which runs next, within this step
                peak = max(peak, self._total() + self._head_input() + chain.head_bytes)
                self._seeded, self._gradient = True, int(chain.gradient_bytes[-1])
        self._live_activations -= set(self._program.free_after[at])
        return peak, "; ".join(why)

    def _head_input(self) -> int:
        """Return the bytes of the last block's output, which the head reads, if none has it."""
        n = self._chain.blocks
        return 0 if self._is_live(n) else self._activations[n]

    def _run(self, at: int, save: bool, i: int) -> tuple[int, int, bool]:
        """Simulate a run of block `i`, in step number `at`.

        Return bytes that it adds, temporary bytes, and whether it ends at its last saved tensor.
        `save`: it keeps its saved tensors.
        """
        chain, size = self._chain, self._activations[i + 1]
        first, keep = at == self._program.first[i], self._program.keeps[at]
        if not save:
            self._counted_apart.add(i + 1)
            return size, int(chain.forward_temporary_bytes[i]), False
        saved = int(chain.saved_bytes[i])
        if first or keep:
            self._saved_bytes[i] = saved - size
            return saved, int(chain.saving_temporary_bytes[i]), False
        recompute = self._recomputes[i]
        self._saved_bytes[i] = recompute.left - (size if recompute.keeps_output else 0)
        ends_early = recompute.peak < saved + int(self._chain.saving_temporary_bytes[i])
        return recompute.peak, 0, ends_early

    def _backward(self, i: int) -> int:
        """Simulate the backward pass of block `i`; return the peak of bytes.

        The block's saved memory is freed, and the gradient of its input remains.
        """
        chain = self._chain
        entering = self._is_live(i)  # also true if only the block's saved memory holds it
        del self._saved_bytes[i]
        before = self._total()
        # the backward run still reads an input that only the saved memory held
        if entering and not self._is_live(i):
            before += self._activations[i]
        gradient = int(chain.gradient_bytes[i])
        created = gradient
        # the result's gradient, unless it exists already
        if i + 1 == chain.blocks and not self._seeded:
            created += int(chain.gradient_bytes[i + 1])
        self._gradient = gradient
        saved = int(chain.saved_bytes[i]) + int(chain.backward_temporary_bytes[i])
        return before + created + saved

    def _seed(self, at: int) -> list[str]:
        """Count the gradient of the result once it exists; return reasons for a difference.

        It exists from the first step after the forward pass, and the plan counts it in the last
        block's backward step.
        """
        n = self._chain.blocks
        if self._seeded or not self._program.first[n - 1] < at < self._program.backward_at[n - 1]:
            return []
        self._seeded = True
        self._gradient = int(self._chain.gradient_bytes[n])
        return [_SEED]


@set_module("mlstate.integrations.torch")
def measure_plan(
    plan: Plan,
    module: torch.nn.Module,
    sample: Any,
    *,
    blocks: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> PlanUse:
    """Run one training step of a model by a plan, and measure the memory of each step.

    Parameters
    ----------
    plan : Plan
        A plan for this number of blocks, of a chain measured on this model.
    module : torch.nn.Module or sequence of blocks
        The model, without an applied plan.
    sample : torch.Tensor, tuple or dict
        See `Chain.from_torch`.
    blocks : str or sequence of callables, optional
        See `Plan.apply`.
    loss : callable, optional
        As for `Chain.from_torch`.

    Returns
    -------
    PlanUse
        Predicted and measured memory of each step.

    Raises
    ------
    ValueError
        If the number of blocks differs from the plan's, or a plan is applied to them.
    RuntimeError
        If a torch profiler is already running.

    Notes
    -----
    The chain's input is counted; parameters and their gradients are not. In this step, the
    model's output is not kept. What runs after the last block counts in the step before it. A run
    can need less memory than its plan for two reasons. An activation is freed after its last use,
    even if its drop is a later step. A block that is recomputed for its own backward run ends after
    the operator that saved its last tensor, mostly without its output. Plans found by `plan` drop
    activations when they are no longer needed, so the second effect is small for them.
    ``expected_bytes`` includes both effects.

    Random generators, buffers and gradients are restored. The model runs three times.

    Examples
    --------
    >>> import torch
    >>> from mlstate.activation import Chain, Plan
    >>> from mlstate.integrations.torch import measure_plan
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    >>> sample = torch.ones(1000, 8)
    >>> made = Plan.from_recomputed(Chain.from_torch(model, sample, repeats=1), [0])
    >>> use = measure_plan(made, model, sample)
    >>> abs(use.measured_bytes / use.expected_bytes - 1) < 0.02
    True
    """
    model = SampledModel(module, sample, blocks, plan.chain.blocks)
    recordings: list[Allocations] = []  # the one that is running, if any

    def observe(*_: object) -> None:
        for recording in recordings:
            recording.mark()

    def step() -> None:
        positional, named = copy_objects((model.args, model.kwargs))
        out = planned(*positional, **named)
        end = loss_of(out, loss)[0] if plan.chain.head_bytes else seed_of(out)
        del out, positional, named
        if end is not None:
            end.backward()

    with model.untouched():
        with Allocations(model.device) as watched:
            recomputation = _Recomputation(model, watched)
            model.measure_blocks(recomputation)
        with plan.apply(module, blocks=blocks, observe=observe) as planned:
            step()  # warm-up: the first run of a plan copies all buffers
            with Allocations(model.device) as watched:
                recordings.append(watched)
                watched.mark()
                step()
                watched.mark()
    spans = watched.spans()[1:]  # the first one, before the first step, copies the sample
    base = recomputation.existing_bytes  # the first block's input, unless the run made it
    predicted = plan.simulate().peak_bytes.tolist()
    simulation = _StepSimulation(plan, recomputation.of_blocks())
    steps_measured = []
    for at, (kind, block) in enumerate(plan.steps()):
        expected, why = simulation.step(at)
        steps_measured.append(
            StepUse(
                kind=kind,
                block=block,
                predicted_bytes=predicted[at],
                expected_bytes=expected,
                measured_bytes=spans[at].peak + base,
                why=why,
            )
        )
    return PlanUse(steps_measured)
