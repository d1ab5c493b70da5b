"""Where a plan's memory goes when torch runs it: each step, predicted and measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ...._common.set_module import set_module
from ...._common.text import bytes_text, table_text
from .apply_plan import find_blocks
from .block_calls import BlockCall, Pass, arguments, seed_of, tensors_in, untouched
from .peak_memory import Allocations
from .rng_and_buffers import copy_objects
from .schedule import Program

if TYPE_CHECKING:
    import torch

    from ....activation._plan import Plan

_ROWS = 60
_HEADERS = ["step", "predicted", "as run", "measured", "why it differs"]
_EARLY = "ends with its last saved tensor"
_TWICE = "more: the model still holds what was dropped before its next block ran"
_SEED = "more: the gradient of the result is there already"


@set_module("mlstate.integrations.torch")
class StepUse(NamedTuple):
    """Peak memory of one step; `PlanUse` has these.

    Attributes
    ----------
    kind, block : str, int
        The step.
    predicted_bytes : int
        By the plan: its simulation.
    expected_bytes : int
        As torch runs it, which frees an activation after its last use and ends a
        recomputation early.
    measured_bytes : int
        By torch's allocator.
    why : str
        What makes the run differ from what the plan counts.

    Examples
    --------
    >>> from mlstate.integrations.torch import StepUse
    >>> StepUse("save", 0, 96, 96, 96, "").measured_bytes
    96
    """

    kind: str
    block: int
    predicted_bytes: int
    expected_bytes: int
    measured_bytes: int
    why: str


@set_module("mlstate.integrations.torch")
class PlanUse:
    """Peak memory of a plan, predicted and measured; `measure_plan` makes these.

    Attributes
    ----------
    steps : list of StepUse
        In their order.
    predicted_bytes, expected_bytes, measured_bytes : int
        The largest of all steps.

    Examples
    --------
    >>> from mlstate.integrations.torch import PlanUse, StepUse
    >>> PlanUse([StepUse("save", 0, 96, 96, 95, ""), StepUse("backward", 0, 128, 96, 90, "")])
    <PlanUse: 128 B predicted, 96 B as run, 95 B measured>
    """

    def __init__(self, steps: list[StepUse]) -> None:
        self.steps = steps
        self.predicted_bytes = max(step.predicted_bytes for step in steps)
        self.expected_bytes = max(step.expected_bytes for step in steps)
        self.measured_bytes = max(step.measured_bytes for step in steps)

    def _title(self) -> str:
        return (
            f"{bytes_text(self.predicted_bytes)} predicted, {bytes_text(self.expected_bytes)} "
            f"as run, {bytes_text(self.measured_bytes)} measured"
        )

    def report(self) -> str:
        """Say where the peaks are, and what makes them differ.

        Returns
        -------
        str
            A few lines, then a table with at most 60 steps.

        Examples
        --------
        >>> from mlstate.integrations.torch import PlanUse, StepUse
        >>> why = "free already: activation 3"
        >>> print(PlanUse([StepUse("save", 1, 128, 96, 96, why)]).report().partition("step ")[0])
        128 B predicted, 96 B as run, 96 B measured
        the largest predicted one: save 1, free already: activation 3
        the largest measured one: save 1
        <BLANKLINE>
        """
        by_plan = max(self.steps, key=lambda step: step.predicted_bytes)
        by_torch = max(self.steps, key=lambda step: step.measured_bytes)
        lines = [
            self._title(),
            f"the largest predicted one: {by_plan.kind} {by_plan.block}"
            + (f", {by_plan.why}" if by_plan.why else ""),
            f"the largest measured one: {by_torch.kind} {by_torch.block}",
        ]
        rows = [
            [f"{step.kind} {step.block}", *map(bytes_text, step[2:5]), step.why]
            for step in self.steps
        ]
        return "\n".join([*lines, table_text(_HEADERS, rows, _ROWS)])

    def __repr__(self) -> str:
        return f"<PlanUse: {self._title()}>"


class _Again(NamedTuple):
    """What a block leaves, and takes at most, when it is recomputed as far as it has to be."""

    left: int
    peak: int
    keeps_input: bool  # autograd keeps it, or part of it
    keeps_output: bool


class _Enough(Exception):  # noqa: N818 (no error: it ends a run whose rest nobody needs)
    """The last tensor was saved."""


class _Recomputation:
    """Measures blocks as a plan recomputes them; what it measured is read afterwards."""

    def __init__(self, watched: Allocations) -> None:
        self._watched = watched
        self._keeps: list[tuple[bool, bool]] = []

    def __call__(self, call: BlockCall) -> None:
        import torch

        hooks: Any = torch.autograd.graph.saved_tensors_hooks
        saved: list[torch.Tensor] = []
        with hooks(lambda tensor: saved.append(tensor.detach()), lambda _: None):
            out = call()
        count, lies = len(saved), {t.untyped_storage()._cdata for t in saved}
        self._keeps.append(
            (
                any(t.untyped_storage()._cdata in lies for t, _ in call.tensors()),
                any(t.untyped_storage()._cdata in lies for t in tensors_in(out)),
            )
        )
        del out
        saved.clear()

        def pack(tensor: torch.Tensor) -> None:
            saved.append(tensor.detach())
            if len(saved) == count:
                raise _Enough

        self._watched.mark()
        try:
            with hooks(pack, lambda _: None):
                call()
        except _Enough:
            pass
        self._watched.mark()

    def of_blocks(self) -> list[_Again]:
        """Return what was measured of each block."""
        runs = self._watched.spans()[::2]
        return [
            _Again(run.after - run.before, run.peak - run.before, *keeps)
            for run, keeps in zip(runs, self._keeps, strict=True)
        ]


class _Walk:
    """A plan's steps as torch runs them: what is held, beside what the plan counts.

    An activation is there by itself (`held`), as the argument of the block that runs next for
    the first time (`passing`), or because the blocks beside it keep it for their backward
    runs. What a block saved is counted without its input and its output.
    """

    def __init__(self, plan: Plan, again: list[_Again]) -> None:
        self._chain = plan.chain
        self._again = again
        self._program = Program(plan.steps())
        self._activations: list[int] = plan.chain.activation_bytes.tolist()
        self._held = {0} if self._program.keeps_input else set()
        self._passing = 0
        self._twice = 0  # what passes was dropped and made again: the model has it still
        self._own: dict[int, int] = {}  # what blocks saved, by block
        self._gradient = 0
        self._seeded = False  # the gradient of the result is there before its block's turn
        self._alone: set[int] = set()  # as the plan counts: what lies by itself

    def _is_there(self, k: int) -> bool:
        if k in self._held or k == self._passing or k == 0:
            return True
        if k - 1 in self._own and self._again[k - 1].keeps_output:
            return True
        kept = k in self._own and self._again[k].keeps_input
        return kept and not self._program.input_leaves[k]

    def _total(self) -> int:
        there = [size for k, size in enumerate(self._activations) if self._is_there(k)]
        return sum([*there, *self._own.values(), self._gradient, self._twice])

    def free(self) -> list[int]:
        """Return the activations that the plan counts and that are free."""
        counted = self._alone | {i + 1 for i in self._own}
        return sorted(k for k in counted if not self._is_there(k))

    def step(self, at: int) -> tuple[int, str]:
        """Take a step; return its peak, and why the plan says otherwise."""
        kind, i = self._program.steps[at]
        why = self._seed(at) if kind in ("forward", "save", "load") else []
        why += [_TWICE] if self._twice else []
        inside = i + 1 if kind == "backward" else -1  # its figures are without the output
        free = [str(k) for k in self.free() if k != inside]
        if free:
            why.append(f"free already: activation {', '.join(free)}")
        before, chain = self._total(), self._chain
        peak = before
        if kind in ("forward", "save"):
            makes, temporary, ends = self._run(at, kind == "save", i)
            peak += makes + temporary
            why += [_EARLY] if ends else []
        elif kind == "backward":
            peak = self._backward(i)
        elif kind == "offload":
            del self._own[i]
            self._alone.add(i + 1)
            if self._program.keeps[at]:
                self._held.discard(i + 1)
        elif kind == "load":
            self._own[i] = int(chain.saved_bytes[i]) - self._activations[i + 1]
            peak = before + int(chain.saved_bytes[i])
        elif kind == "drop":
            self._alone.discard(i)
        if self._program.keeps[at] and kind in ("forward", "save", "load"):
            self._held.add(i + 1)
            if self._passing == i + 1 and at != self._program.first[i]:
                self._twice = self._activations[i + 1]
        if kind in ("forward", "save") and at == self._program.first[i]:
            self._passing = i + 1 if i + 1 < chain.blocks else -1
            self._twice = 0
        self._held -= set(self._program.free_after[at])
        return peak, "; ".join(why)

    def _run(self, at: int, save: bool, i: int) -> tuple[int, int, bool]:
        """Run a block: what it makes, what it takes for a while, whether it ends early."""
        chain, size = self._chain, self._activations[i + 1]
        first, keep = at == self._program.first[i], self._program.keeps[at]
        if not save:
            self._alone.add(i + 1)
            return size, int(chain.forward_temporary_bytes[i]), False
        saved = int(chain.saved_bytes[i])
        if first or keep:
            self._own[i] = saved - size
            return saved, int(chain.saving_temporary_bytes[i]), False
        again = self._again[i]
        self._own[i] = again.left - (size if again.keeps_output else 0)
        return again.peak, 0, True

    def _backward(self, i: int) -> int:
        """Run a block's backward pass: what is held at its worst moment."""
        chain = self._chain
        entering = self._is_there(i)  # also where it goes with what the block saved
        del self._own[i]
        before = self._total()
        if entering and not self._is_there(i):
            before += self._activations[i]
        gradient = int(chain.gradient_bytes[i])
        made = gradient
        if i + 1 == chain.blocks and not self._seeded:
            made += int(chain.gradient_bytes[i + 1])
        self._gradient = gradient
        taken = int(chain.saved_bytes[i]) + int(chain.backward_temporary_bytes[i])
        return before + made + taken

    def _seed(self, at: int) -> list[str]:
        """Count the gradient of the result, which is there before a block is run again."""
        n = self._chain.blocks
        if self._seeded or not self._program.first[n - 1] < at < self._program.backward_at[n - 1]:
            return []
        self._seeded = True
        self._gradient = int(self._chain.gradient_bytes[n])
        return [_SEED]


@set_module("mlstate.integrations.torch")
def measure_plan(plan: Plan, module: Any, sample: Any, *, blocks: Any = None) -> PlanUse:
    """Run one training step of a model by a plan, and measure the memory of each step.

    Parameters
    ----------
    plan : Plan
        For as many blocks as there are, of a chain that was measured of this model.
    module : torch.nn.Module or sequence of blocks
        The model, to which no plan is applied.
    sample : torch.Tensor, tuple or dict
        As for `profile_chain`.
    blocks : str or sequence of callables, optional
        As for `Plan.apply`.

    Returns
    -------
    PlanUse
        What each step was predicted to take, and what it took.

    Raises
    ------
    ValueError
        The number of blocks is another one, or a plan is applied to them.
    RuntimeError
        A profiler of torch runs already.

    Notes
    -----
    The chain's input counts, parameters and their gradients do not. Nobody holds the model's
    output in this step. Two things make a run take less than its plan: an activation is freed
    after its last use, be its drop a later step; and a block that is recomputed for its own
    backward run ends with its last saved tensor, without its output. Plans that `plan` finds
    drop what they no longer need, and lose little by the second. ``expected_bytes`` has both.

    Generators, buffers and gradients are as before afterwards. The model runs three times.

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
    args, kwargs = arguments(sample)
    device = tensors_in((args, kwargs))[0].device
    found = find_blocks(module, blocks, plan.chain.blocks)
    modules = [block for _, block in found]
    marks: list[Allocations] = []

    def observe(*_: Any) -> None:
        for watched in marks:
            watched.mark()

    def step() -> None:
        positional, named = copy_objects((args, kwargs))
        loss = seed_of(planned(*positional, **named))
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]

    with untouched([module, *modules], args, kwargs):
        with Allocations(device) as watched:
            again = _Recomputation(watched)
            Pass([name for name, _ in found], again).run(module, modules, found, args, kwargs)
        with plan.apply(module, blocks=blocks, observe=observe) as planned:
            step()  # the first run of a plan copies all buffers
            with Allocations(device) as watched:
                marks.append(watched)
                watched.mark()
                step()
                watched.mark()
    spans = watched.spans()[1:]
    base = int(plan.chain.activation_bytes[0])
    predicted = plan.simulate().peak_bytes.tolist()
    walk = _Walk(plan, again.of_blocks())
    made = []
    for at, (kind, block) in enumerate(plan.steps()):
        expected, why = walk.step(at)
        made.append(StepUse(kind, block, predicted[at], expected, spans[at].peak + base, why))
    return PlanUse(made)
