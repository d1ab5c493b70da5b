"""Hooks on any torch module: `parameter.grad`, optimizer steps, errors, gradients on a device."""

from __future__ import annotations

import sys
import warnings
import weakref
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from .... import _core
from ...._common.text import names_hint
from ....collectives._arguments import check_group, check_timeout, dtype_name
from ....errors import CollectiveError, GradientWarning
from ....fsdp._hook_registry import Hooks, live_hooks
from .bindings import Bindings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import FrameType

    import torch

    from ...._types import Array
    from ....collectives import ProcessGroup
    from ....fsdp._bucket import Entry, Terms
    from ....fsdp._sharding_unit import FSDPShardingUnit


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a module by name; a shared parameter has only its first name."""
    return dict(module.named_parameters())


def _tied_to(module: torch.nn.Module, name: str) -> str | None:
    """Return the name in `parameters_of` of the parameter that is also called `name`, or None."""
    parameter = dict(module.named_parameters(remove_duplicate=False)).get(name)
    return next((n for n, p in module.named_parameters() if p is parameter), None)


class ModuleHooks(Hooks):
    """The hooks of one `FSDPBackwardHook` on the parameters of a torch module.

    Calls `receive` with a name and its parameter each time torch has computed the gradient.
    `is_full`: reduced full gradients are stored in ``parameter.grad``. `keep`: unreduced full
    gradients stay there. `accumulate`: local gradients are sums over passes.
    """

    def __init__(
        self,
        module: Any,
        units: Mapping[str, FSDPShardingUnit],
        receive: Callable[[str, torch.nn.Parameter], None],
        *,
        is_full: bool,
        keep: bool,
        accumulate: bool,
    ) -> None:
        """Check the parameters that have units, and hook each of them.

        Also sets each unit's `like` to its parameter, and lets torch check the parameters before
        every optimizer step. `units`: by name of the parameter. The other arguments: see the class.
        Raises ValueError if a unit does not fit its parameter.
        """
        parameters = parameters_of(module)
        for name, unit in units.items():
            _check_parameter(unit, parameters.get(name), module, parameters)
        super().__init__({id(parameters[name]): name for name in units})
        # in the module's order, which is equal on all ranks
        self.parameters: dict[str, torch.nn.Parameter] = {
            name: parameter for name, parameter in parameters.items() if name in units
        }
        self.is_full = is_full
        self.taken: set[str] = set()  # parameters whose gradients were removed
        self.has_warned = False  # about an optimizer without gradients
        # parameters whose grad has gradients of `no_sync` passes, and its version after the last
        self.unsent: dict[str, int] = {}
        self._keep = keep or is_full
        # whether a pass reduces only its own gradients, without earlier ones
        self._reduces_alone = is_full or (keep and accumulate)
        self._earlier: dict[str, torch.Tensor] = {}  # gradients of earlier passes
        self._own: dict[str, Any] = {}  # gradients of the running pass
        self.bindings = Bindings(module, units)
        _watch_steps()
        with _core.deferred_interrupts() as section:
            try:
                for name, parameter in self.parameters.items():
                    units[name].like = parameter.detach()
                    register: Any = parameter.register_post_accumulate_grad_hook
                    self._handles.append(register(partial(receive, name)))
                    if self._reduces_alone:
                        from torch.autograd.graph import get_gradient_edge

                        node = get_gradient_edge(parameter).node
                        # before torch adds this pass's gradient to parameter.grad
                        self._handles.append(_NodeHook(node, partial(self._set_aside, name)))
                self._make_live()
                with section.allowed():
                    pass  # a signal of the section undoes it
            except BaseException:
                self.remove()
                raise

    def begin_pass(self, on_end: Callable[[], None], rank: int) -> weakref.ref[object]:
        """Call `on_end` at the end of the running backward pass, unless an error aborts the pass.

        Returns a weak reference that is dead after the pass. Raises CollectiveError, with `rank`,
        in a pass that was started inside another one.
        """
        if _is_inside_another():
            error = CollectiveError(
                f"backward pass on rank {rank}: its first gradient came from a pass inside "
                "another one, which ends before all gradients are computed; for activation "
                "checkpointing pass use_reentrant=False"
            )
            error.name, error.rank = "backward pass", rank
            raise error
        callback = partial(on_end)  # only torch refers to it
        call_at_end(callback)
        return weakref.ref(callback)

    def outdated(self) -> tuple[str, str]:
        """Return a parameter whose gradient would stay unreduced, and why; ("", "") if none."""
        name, change = self.bindings.change()
        return name, change and f"{change} after register_hooks: close() and register them again"

    def keep_unsent(self, name: str) -> None:
        """Note that a `no_sync` pass has added to a parameter's gradient, which stays unreduced."""
        gradient: Any = self.parameters[name].grad
        self.unsent[name] = gradient._version

    def take(
        self, name: str, token: Callable[[], Any] | None
    ) -> tuple[object, Callable[[], None] | None]:
        """Return a parameter's gradient, and remove it unless it is to be kept.

        The second value is a function that restores the gradient if the backward pass of `token` (a
        weak reference of `begin_pass`) is still running; None if the gradient was kept.
        """
        parameter = self.parameters[name]
        gradient = parameter.grad
        self.unsent.pop(name, None)
        if self._keep:
            self._own[name] = gradient
            return gradient, None
        parameter.grad = None
        self.taken.add(name)
        return gradient, partial(_put_back, parameter, gradient, token)

    def take_missing(
        self, name: str, token: Callable[[], object] | None
    ) -> tuple[object, Callable[[], None] | None]:
        """Return, as `take`, a parameter's gradient of `no_sync` passes, if this pass had none.

        Without such a gradient, both values are None.
        """
        if name in self.unsent:
            self._drop_zeroed(name)
            return self.take(name, token)
        if self._reduces_alone:  # `add_earlier` restores it after other ranks' parts were added
            self._set_aside(name)
        return None, None

    def _set_aside(self, name: str, _: object = None) -> None:
        """Move a gradient of earlier passes away before torch adds the one of this pass.

        `add_earlier` adds it again. A gradient of `no_sync` passes stays: it is not reduced. One of
        a pass that an error ended is dropped. The second argument, which torch passes to hooks, is
        ignored.
        """
        parameter = self.parameters[name]
        self._drop_zeroed(name)
        aborted = self._own.pop(name, None)
        if aborted is not None and aborted is parameter.grad:
            parameter.grad = None
        elif parameter.grad is not None and name not in self.unsent:
            self._earlier[name], parameter.grad = parameter.grad, None

    def _drop_zeroed(self, name: str) -> None:
        """Forget a parameter's reduced gradient that was set aside if zero_grad was called since.

        With ``set_to_none=False``, zero_grad fills the gradient of the later passes with zeros,
        which its version and its content show.
        """
        gradient: Any = self.parameters[name].grad
        if gradient is None or (
            name in self._earlier
            and gradient._version != self.unsent.get(name)
            and not gradient.any()
        ):
            self._earlier.pop(name, None)

    def gather_full(
        self,
        buckets: Iterable[Sequence[FSDPShardingUnit]],
        group: ProcessGroup,
        timeout: float | None,
    ) -> None:
        """Gather the reduced gradients of all ranks, and add them to each parameter's gradient.

        `buckets`: units that are gathered together; parameters of one dtype and device are sent in
        one message. `timeout`: seconds, or None. A parameter that no rank used has no part; it
        keeps its gradient. After an error some gradients are reduced and others not: the caller
        calls `drop_full`.
        """
        for units in buckets:
            messages: dict[object, list[tuple[FSDPShardingUnit, torch.nn.Parameter]]] = {}
            for unit in units:
                if unit.local_gradient is not None:
                    used = self.parameters[unit.parameter_name]
                    messages.setdefault((used.dtype, used.device), []).append((unit, used))
            for pairs in messages.values():
                _gather_pairs(group, pairs, timeout)
        self.add_earlier()

    def add_earlier(self) -> None:
        """Add the gradients of earlier passes that were set aside, at the end of a pass."""
        for name, earlier in self._earlier.items():
            parameter: torch.Tensor = self.parameters[name]
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier, self._own = {}, {}

    def drop_full(self) -> None:
        """Remove the gradients of all parameters, because not all of them are reduced."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._earlier, self._own = {}, {}


def _put_back(
    parameter: torch.nn.Parameter, gradient: Any, token: Callable[[], object] | None
) -> None:
    """Restore a parameter's gradient if the backward pass of `token` is still running."""
    if token is not None and token() is not None:
        parameter.grad = gradient


class _NodeHook:
    """A hook on an autograd node; torch frees it with its last reference."""

    def __init__(self, node: Any, function: Callable[[Any], None]) -> None:
        self._node = node
        self._handle = node.register_prehook(function)

    def remove(self) -> None:
        self._handle.remove()
        self._node = None


def _check_parameter(
    unit: FSDPShardingUnit, parameter: Any, model: torch.nn.Module, parameters: Mapping[str, Array]
) -> None:
    """Raise ValueError if a unit does not fit `parameter`, its parameter of the model or None.

    `parameters`: all of the model by name, for the hint in the error.
    """
    name = unit.parameter_name
    if parameter is None:
        shared = _tied_to(model, name)
        if shared is not None:
            raise ValueError(f"{name!r} is the same parameter as {shared!r}, use that name")
        raise ValueError(f"the model has no parameter {name!r}{names_hint(name, parameters)}")
    reason = why_not_reduced(parameter)
    if reason:
        raise ValueError(f"{name}: the parameter is {reason}")
    if not parameter.requires_grad:
        raise ValueError(f"{name}: the parameter is frozen (requires_grad is False)")
    if tuple(parameter.shape) != unit.shape or dtype_name(parameter) != unit.dtype:
        raise ValueError(
            f"{name}: the parameter is {dtype_name(parameter)} {tuple(parameter.shape)}, its unit "
            f"{unit.dtype} {unit.shape}"
        )


# ---- optimizers ----


@cache
def _watch_steps() -> None:
    """Check the parameters of every optimizer before each step, from the first call on."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_refuse_outdated_hooks)
    register_optimizer_step_pre_hook(_warn_of_taken_gradients)


def _refuse_outdated_hooks(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise CollectiveError if a parameter of the optimizer lost its hook, or now needs one.

    torch calls it before each step of any optimizer.
    """
    for hooks in live_hooks():
        name, problem = hooks.outdated() if isinstance(hooks, ModuleHooks) else ("", "")
        if problem and hooks.bindings.concerns(optimizer):  # type: ignore[attr-defined]
            raise CollectiveError(
                f"{type(optimizer).__name__}.step: its gradient is not reduced: {problem}",
                name=name,
            )


def _warn_of_taken_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Warn once if a step skips parameters because their gradients were taken from them.

    torch calls it before each step of any optimizer.
    """
    for hooks in live_hooks():
        if not isinstance(hooks, ModuleHooks) or not hooks.taken or hooks.has_warned:
            continue
        names = {id(hooks.parameters[name]): name for name in hooks.taken}
        empty = [
            names[id(parameter)]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is None and id(parameter) in names
        ]
        if empty:
            hooks.has_warned = True
            warnings.warn(
                f"{type(optimizer).__name__}.step changes nothing in {len(empty)} parameters "
                f"({', '.join(empty[:3])}{', ...' if len(empty) > 3 else ''}): their gradients "
                "are in unit.local_gradient, and parameter.grad is None. Pass gradients='full' "
                "to register_hooks, or give the optimizer this rank's parts",
                GradientWarning,
                stacklevel=3,
            )


# ---- the backward pass ----


def check_reduction(
    group: ProcessGroup, nonfinite: str, timeout: float | None
) -> tuple[Any, float | None]:
    """Check the arguments of a reduction; return the process group, and the timeout in seconds.

    `nonfinite` must be "error" or "allow". Raises TypeError or ValueError for a wrong argument.
    """
    group = check_group(group)
    if nonfinite not in ("error", "allow"):
        raise ValueError(f"nonfinite must be 'error' or 'allow', got {nonfinite!r}")
    return group, check_timeout(timeout)


def call_at_end(function: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass."""
    import torch

    torch.autograd.Variable._execution_engine.queue_callback(function)


class PassErrors:
    """Errors of one backward pass, raised together at its end.

    Torch frees the object with the pass, also if the pass fails.
    """

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        call_at_end(self._end)

    def _end(self) -> None:
        call_at_end(self.raise_first)  # after the callbacks of DDP and FSDP2

    def raise_first(self) -> None:
        """Raise the first error, with the texts of the others as notes, if there are errors."""
        if self.errors:
            first, *others = self.errors
            for error in others:
                first.add_note(str(error))
            raise first


def _is_inside_another() -> bool:
    """Return whether the running backward pass was started within another one.

    This is so for reentrant checkpoints: a frame of a Python autograd function is on the stack.
    """
    from torch.autograd.function import BackwardCFunction

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False


def why_not_reduced(tensor: torch.Tensor) -> str:
    """Return why a parameter or gradient cannot be reduced, or an empty string."""
    import torch

    if hasattr(tensor, "placements"):
        return (
            "a DTensor, which torch shards itself; for FSDP2 there is "
            "mlstate.integrations.torch.reduce_scatter_with"
        )
    if tensor.layout != torch.strided:
        return f"{tensor.layout}, not dense"
    if tensor.device.type == "meta":
        return "on the meta device, without elements"
    return ""


def reduce_on_device(
    group: Any, entry: Entry, terms: Terms, timeout: float | None
) -> tuple[float, int]:
    """Reduce a gradient on a device over the ranks of `group` to `entry.out`, this rank's part.

    Return the part's sum of squares and number of non-finite elements. `entry`: the gradient and
    its memory. `terms`: operation and divisor. `timeout`: seconds, or None for the group's.
    """
    import torch

    wide, flat = entry.source, entry.out.view(-1)
    if terms.divisor != 1 or flat.dtype != wide.dtype:
        wide = wide.to(torch.promote_types(wide.dtype, torch.float32))
    counts = list(entry.unit.counts)
    total = group.reduce_scatter(wide.reshape(-1), op=terms.op, counts=counts, timeout=timeout)
    flat.copy_(total if terms.divisor == 1 else total / terms.divisor)
    squares = float(flat.double().square().sum())
    return squares, int((~flat.isfinite()).sum()) if flat.dtype.is_floating_point else 0


def _gather_pairs(
    group: Any, pairs: Sequence[tuple[FSDPShardingUnit, torch.nn.Parameter]], timeout: float | None
) -> None:
    """Gather the gradients of units into the grad of their parameters, in one message.

    `pairs`: units and parameters, all of one dtype and device.
    """
    import torch

    own_parts = torch.cat([u.local_gradient.detach().reshape(-1).to(p.dtype) for u, p in pairs])
    counts = [sum(unit.counts[rank] for unit, _ in pairs) for rank in range(group.world_size)]
    gathered = group.all_gather(own_parts, counts=counts, timeout=timeout)
    parts_by_rank = [
        message.split([unit.counts[rank] for unit, _ in pairs])
        for rank, message in enumerate(gathered.split(counts))
    ]
    for number, (_, parameter) in enumerate(pairs):
        full = torch.cat([parts[number] for parts in parts_by_rank]).view(parameter.shape)
        if parameter.grad is None:  # not used in this pass
            parameter.grad = full
        else:
            parameter.grad.detach().copy_(full)


hook_module = ModuleHooks
