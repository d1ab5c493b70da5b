"""`check` of torch blocks: runs that differ bit by bit, the operator at fault, gradients."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from ....activation._chain import Chain
from ....activation._plan import Plan
from ....activation._recompute_check import Finding, RecomputeReport
from ....errors import MLStateError
from .._tensors.memory import as_bytes
from .apply_plan import apply_plan
from .block_calls import BlockCall, SampledModel, seed_of
from .rng_and_buffers import Buffers, Surroundings, copy_objects
from .tensors import detach_all, tensors_in, version_of

if TYPE_CHECKING:
    import torch

# Operators whose integer results are indices, and operators whose results have no values yet.
_INDICES = ("topk", "argmax", "argmin", "sort", "argsort", "multinomial", "nonzero", "max", "min")
_NO_VALUES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


def _has_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits, shape and dtype.

    Tensors without comparable memory (sparse or meta) count as equal.
    """
    import torch

    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.layout != torch.strided or first.device.type == "meta":
        return True
    return torch.equal(_bits(first), _bits(second))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements in C order, as a flat tensor."""
    return as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _describe_difference(first: torch.Tensor, second: torch.Tensor) -> str:
    """Return a text for the user on the difference of two tensors with different bits.

    It has both forms if shape or dtype differ, else the number of different elements, and the
    largest difference of floats.
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        return f"{_describe(first)}, then {_describe(second)}"
    different = (_bits(first) != _bits(second)).reshape(first.numel(), -1).any(1)
    count = int(different.sum())
    text = f"{count:,} of {first.numel():,} elements differ"
    if first.dtype.is_floating_point and count:
        most = (first.detach().double() - second.detach().double()).abs().max()
        text += f", by up to {float(most):.3g}"
    return text


class _SubmoduleTracker:
    """Tracks the running module inside a block."""

    def __init__(self, block: object) -> None:
        self._stack: list[str] = []
        self._handles: list[Any] = []
        if hasattr(block, "named_modules"):
            for name, module in block.named_modules():
                if name:
                    self._watch(name, module)

    def _watch(self, name: str, module: Any) -> None:
        """Hook a submodule, so that its `name` is on top of the stack while it runs.

        A scripted module takes no hooks, and counts as a part of the module around it.
        """
        import torch

        if isinstance(module, torch.jit.ScriptModule):
            return

        def enter(*_: Any) -> None:
            self._stack.append(name)

        def leave(*_: Any) -> None:
            self._stack.pop()

        self._handles.append(module.register_forward_pre_hook(enter))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def now(self) -> str:
        return self._stack[-1] if self._stack else ""

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Run:
    """Tensors that one run of a block saved and returned."""

    def __init__(self, call: BlockCall, tracker: _SubmoduleTracker) -> None:
        """Run a block; record its outputs and saved tensors, and the submodule that saved each.

        `call`: runs the block. `tracker`: of the running submodule. The attribute `written` gets
        the numbers of saved tensors that were changed in place later in the run.
        """
        import torch

        self.saved: list[torch.Tensor] = []
        self.places: list[str] = []  # names of the submodules that saved them
        versions = []

        def pack(tensor: torch.Tensor) -> None:
            self.saved.append(tensor.detach())
            self.places.append(tracker.now())
            versions.append(version_of(tensor))

        with torch.autograd.graph.saved_tensors_hooks(pack, _refuse):
            self.out = [tensor.detach() for tensor in tensors_in(call())]
        self.written = [
            k for k, tensor in enumerate(self.saved) if version_of(tensor) != versions[k]
        ]


def _refuse(_: Any) -> Any:
    raise MLStateError("it takes gradients inside its own forward, so it cannot be recomputed")


class _Checker:
    """Runs each block twice when it is called, and records differences."""

    def __init__(self, model: SampledModel, blocks: set[int]) -> None:
        """Prepare to check the blocks with these numbers when `model` runs."""
        self.findings: list[Finding] = []
        self._model = model
        self._blocks = blocks
        self._next = 0

    def __call__(self, call: BlockCall) -> None:
        """Check the next block's call, if the block was chosen.

        An MLStateError of the check becomes a finding.
        """
        i = self._next
        self._next += 1
        if i not in self._blocks:
            return
        name, module = self._model.named_blocks[i]
        tracker = _SubmoduleTracker(module)
        try:
            self._check(name, module, call, tracker)
        except MLStateError as error:
            self.findings.append(Finding(name, "", "error", str(error)))
        finally:
            tracker.remove()

    def _check(self, name: str, module: Any, call: BlockCall, tracker: _SubmoduleTracker) -> None:
        """Run a block twice as a recomputation does, and add a finding for each difference.

        `name`, `module`: of the block. `tracker`: of the running submodule. Arguments that the
        block changes in place are restored.
        """
        entering = [tensor for tensor, _ in call.tensors()]
        before = [tensor.clone() for tensor in entering]
        outside_states = _outside_states()
        surroundings = Surroundings(module, Buffers(module), entering)
        first = _Run(call, tracker)
        surroundings.drop_unused()
        self._check_random(name, outside_states)
        changed = False  # whether the block writes to an argument
        for k, (tensor, copy) in enumerate(zip(entering, before, strict=True)):
            if not _has_same_bits(tensor, copy):
                changed = True
                text = "the block changes its input in place; let its operations make new tensors"
                self.findings.append(
                    Finding(name, f"argument {k}, {_describe(copy)}", "in place", text)
                )
                tensor.detach().copy_(copy)
        for k in first.written:
            place = _place(first.places[k], f"saved tensor {k}, {_describe(first.saved[k])}")
            text = "written to after it was saved for the backward pass"
            self.findings.append(Finding(name, place, "in place", text))
        with surroundings.restored(name, module):
            second = _Run(call, tracker)
        if changed:
            for tensor, copy in zip(entering, before, strict=True):
                tensor.detach().copy_(copy)
        difference = _find_difference(first, second)
        if difference is None:
            return
        place, kind, text = difference
        if kind in ("values", "saved"):
            trace = self._trace_runs(name, module, call, tracker, surroundings)
            if trace.difference is not None:
                operator, reason = trace.difference
                text = f"{place}: {text}; the runs part at {operator}: {reason}"
                place = operator
            if trace.routing is not None:
                kind, place = "routing", trace.routing[0]
                text = f"{trace.routing[0]} chooses otherwise: {trace.routing[1]}; {text}"
        self.findings.append(Finding(name, place, kind, text))

    def _check_random(self, name: str, before: tuple[Any, ...]) -> None:
        """Add a finding if the block `name` drew from `random` or NumPy.

        `before`: the states of both generators before the block ran.
        """
        for source, then, now in zip(
            ("random", "numpy.random"), before, _outside_states(), strict=True
        ):
            if then != now:
                text = (
                    f"numbers from {source}, which is not restored when the block is run again: "
                    "draw them from torch, or outside of the block"
                )
                self.findings.append(Finding(name, source, "random", text))

    def _trace_runs(
        self,
        name: str,
        module: torch.nn.Module,
        call: BlockCall,
        tracker: _SubmoduleTracker,
        surroundings: Surroundings,
    ) -> _Trace:
        """Run the block `name` twice more, and return the trace of the second run.

        Its `difference` has the first operator with another result than in the first run, or None.
        `call`: runs the block, `module`. `tracker`: of the running submodule. `surroundings`: the
        state from before the first run, which is restored for both.
        """
        trace = _Trace(tracker)
        with surroundings.restored(name, module), trace:
            call()
        again = _Trace(tracker, trace.results)
        with surroundings.restored(name, module), again:
            call()
        count, other = len(trace.results), len(again.results)
        if again.difference is None and count != other:
            place, operator, _ = max(trace.results, again.results, key=len)[min(count, other)]
            again.difference = (
                _place(place, operator),
                "one of the runs has it, the other ends before",
            )
        return again


def _outside_states() -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's generators, in comparable form."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)


def _place(module: str, label: str) -> str:
    return f"{module}: {label}" if module else label


def _find_difference(first: _Run, second: _Run) -> tuple[str, str, str] | None:
    """Return (place, kind, description) of the first difference of two runs, or None.

    The kind is "saved" for another number or form of saved tensors or outputs, and "values" for
    other bits.
    """
    for k, (left, right) in enumerate(zip(first.saved, second.saved, strict=False)):
        place = _place(first.places[k], f"saved tensor {k}, {_describe(left)}")
        if left.shape != right.shape or left.dtype != right.dtype:
            return place, "saved", f"{_describe(left)} first, {_describe(right)} when run again"
        if not _has_same_bits(left, right):
            return place, "values", _describe_difference(left, right)
    if len(first.saved) != len(second.saved):
        longer = max(first, second, key=lambda run: len(run.saved))
        k = min(len(first.saved), len(second.saved))
        text = f"{len(first.saved)} saved tensors first, {len(second.saved)} when run again"
        return _place(longer.places[k], f"saved tensor {k}"), "saved", text
    if len(first.out) != len(second.out):
        return "outputs", "saved", f"{len(first.out)} first, {len(second.out)} when run again"
    for k, (left, right) in enumerate(zip(first.out, second.out, strict=True)):
        if not _has_same_bits(left, right):
            return f"output {k}, {_describe(left)}", "values", _describe_difference(left, right)
    return None


class _Trace:
    """Records the results of operators, or compares them with a record."""

    def __init__(
        self,
        tracker: _SubmoduleTracker,
        record: list[tuple[str, str, list[torch.Tensor]]] | None = None,
    ) -> None:
        """Prepare to trace one run.

        `tracker`: of the running submodule. `record`: operators of the first run to compare with,
        as (submodule, operator, results); None: record this run.
        """
        # of this run: (submodule, operator, results; [] if they are compared)
        self.results: list[tuple[str, str, list[torch.Tensor]]] = []
        self.difference: tuple[str, str] | None = None  # first operator with other results, and how
        self.routing: tuple[str, str] | None = None  # first operator with other indices
        self._has_diverged = False  # the runs called different operators
        self._tracker = tracker
        self._record = record
        self._mode: Any = None

    def __enter__(self) -> _Trace:
        """Start to call `record_result` for each operator that torch runs in this thread."""
        from torch.utils._python_dispatch import TorchDispatchMode

        trace = self

        class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                out = func(*args, **(kwargs or {}))
                trace.record_result(func, out)
                return out

        self._mode = Mode()  # type: ignore[no-untyped-call]
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    def record_result(self, func: Any, out: torch.Tensor) -> None:
        """Record the tensors of an operator's result, or compare them with the first run's.

        Operators whose results have no values yet, such as ``empty``, are skipped. After the runs
        call different operators, nothing is compared.
        """
        if self._has_diverged or func.__name__.split(".")[0] in _NO_VALUES:
            return
        k, operator = len(self.results), f"aten.{func.__name__}"
        tensors = tensors_in(out)
        if self._record is None:
            self.results.append(
                (self._tracker.now(), operator, [t.detach().clone() for t in tensors])
            )
            return
        self.results.append((self._tracker.now(), operator, []))
        if k >= len(self._record):
            return
        place, before, results = self._record[k]
        if before != operator:
            self._has_diverged = True
            text = f"{before} in the first run, {operator} in the second"
            self.difference = self.difference or (_place(place, before), text)
            return
        for recorded, tensor in zip(results, tensors, strict=False):
            if not _has_same_bits(recorded, tensor):
                self._record_difference(_place(place, operator), recorded, tensor)

    def _record_difference(self, place: str, recorded: torch.Tensor, tensor: torch.Tensor) -> None:
        """Note the first operator whose result differs, and the first one that chose other indices.

        `place`: submodule and operator. `recorded`: result of the first run.
        """
        operator = place.rpartition("aten.")[2].split(".")[0]
        text = _describe_difference(recorded, tensor)
        self.difference = self.difference or (place, text)
        if operator in _INDICES and not recorded.dtype.is_floating_point:
            self.routing = self.routing or (place, text)


def check_recompute(
    module: object, plan: Any, sample: Any, *, blocks: Any = None
) -> RecomputeReport:
    """Recompute blocks and compare; see `mlstate.activation.check`."""
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan or None, got {type(plan).__name__}")
    model = SampledModel(module, sample, blocks, None if plan is None else plan.chain.blocks)
    block_numbers = set(range(len(model.named_blocks)) if plan is None else plan.recomputed)
    checker = _Checker(model, block_numbers)
    with model.untouched():
        model.measure_blocks(checker)
    findings = checker.findings
    if plan is None and not findings:  # a plan that recomputes each block; it needs no costs
        ones = [1] * len(model.blocks)
        plan = Plan.from_recomputed(Chain(ones, ones, [*ones, 1], ones), block_numbers)
    if plan is not None:
        findings = [*findings, *_compare_gradients(model, plan)]
    return RecomputeReport(findings, [model.names[i] for i in sorted(block_numbers)])


def _gradients_of(model: SampledModel, planned: Any = None) -> dict[str, torch.Tensor]:
    """Run a model forward and backward; return gradients and outputs by name.

    `planned`: the same model with a plan, whose blocks run by it; None: without. Gradients of
    parameters are removed from them.
    """
    args, kwargs = detach_all(copy_objects((model.args, model.kwargs)))
    out = model.run(None if planned is None else planned._enter, args, kwargs)
    loss = seed_of(out)
    if loss is not None:
        loss.backward()  # type: ignore[no-untyped-call]
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.grad is not None]
    gradients = {f"input {k}": tensor.grad for k, tensor in enumerate(inputs)}
    gradients.update({f"output {k}": tensor.detach() for k, tensor in enumerate(tensors_in(out))})
    for name, parameter in _parameters(model).items():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
            parameter.grad = None
    return gradients  # type: ignore[return-value]


def _parameters(model: SampledModel) -> dict[str, Any]:
    """Return the parameters by name, of the module or, if it is only a list, of its blocks."""
    if hasattr(model.module, "named_parameters"):
        return dict(model.module.named_parameters())
    return {
        f"{name}.{key}": parameter
        for name, block in model.named_blocks
        if hasattr(block, "named_parameters")
        for key, parameter in block.named_parameters()
    }


def _compare_gradients(model: SampledModel, plan: Any) -> list[Finding]:
    """Return a finding for each gradient that differs between runs with and without the plan.

    If two runs without it differ already, the only finding is on this.
    """

    def run(planned: Any = None) -> dict[str, torch.Tensor]:
        with model.untouched():
            return _gradients_of(model, planned)

    first, second = run(), run()
    other = [name for name in first if not _has_same_bits(first[name], second[name])]
    if other:
        text = f"two plain runs differ: {_describe_difference(first[other[0]], second[other[0]])}"
        return [Finding("model", other[0], "gradients", text)]
    module = model.module if hasattr(model.module, "modules") else None
    try:
        with apply_plan(plan, module, blocks=model.blocks) as planned_model:
            planned = run(planned_model)
    except (MLStateError, ValueError, RuntimeError) as error:
        return [Finding("model", "with the plan", "error", str(error))]
    return [
        Finding("model", name, "gradients", _describe_difference(first[name], planned[name]))
        for name in first
        if not _has_same_bits(first[name], planned[name])
    ]
