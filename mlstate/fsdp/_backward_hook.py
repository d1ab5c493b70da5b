"""`FSDPBackwardHook`: hooks, `no_sync`, `finish`, `scatter_gradient`; parameters without gradient.

To scatter a gradient is to reduce it over the ranks, and to store this rank's part in its sharding
unit. A unit describes a parameter; the part is its local gradient.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._common.arguments import check_flags, check_int, check_number
from .._common.arrays import is_torch, refuse_masked
from .._common.backend import backend_named
from ..collectives._arguments import dtype_name
from ..collectives._engine import OperationQueue
from ..errors import CompatibilityError
from ._backend import GradientBackend
from ._config import FSDP
from ._gradient_ops import LocalSums, add, clear, copy_gradient, detached
from ._hook_registry import ModelHooks, check_gradients
from ._leaf_exchange import LeafStep
from ._pass import BackwardPass, BucketPlan
from ._report import BackwardReport
from ._sharding_unit import FSDPShardingUnit, bind_unit, bind_units, check_units
from ._verify import GradientReport, compare, compare_sums

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .._types import Array
    from ._backend import ModuleHooks

_ALWAYS_ACCUMULATES = (
    "order='tree' adds up all micro-batches until finish_step: do not pass accumulate and "
    "keep_full_gradient"
)


class FSDPBackwardHook:
    """Scatter the gradients of a model during its backward pass.

    Parameters
    ----------
    fsdp : FSDP
        The ranks and the reduction settings.

    Raises
    ------
    TypeError
        If `fsdp` is not an `FSDP`.

    Notes
    -----
    ``FSDPBackwardHook`` of the specification (FSDP backward hook). A separate thread reduces
    gradients in buckets of `FSDP.bucket_bytes`, in the reverse order of the parameters, while the
    backward pass continues. Full gradients are kept until the ranks agree on the next buckets:
    at most four buckets. A last bucket smaller than 1 MiB is reduced at the end of the pass,
    without the thread. If a gradient fails, all others are still scattered. Then every rank
    raises the same `CollectiveError`, which names the rank and the parameter. Calls outside of a
    pass (`scatter_gradient`, `scatter_multiple`) with a gradient that does not fit its unit are
    refused on every rank before anything is stored.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.collectives import SingleGroup
    >>> from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
    >>> fsdp = FSDP(SingleGroup())
    >>> units = {"w": FSDPShardingUnit("w", (2, 2), "float64", 0)}
    >>> with FSDPBackwardHook(fsdp) as hook:
    ...     hook.scatter_multiple(units, {"w": np.eye(2)})
    >>> units["w"].local_gradient
    array([1., 0., 0., 1.])
    """

    def __init__(self, fsdp: FSDP) -> None:
        """Create a hook without parameters; `register_hooks` connects it to a model."""
        if not isinstance(fsdp, FSDP):
            raise TypeError(
                f"fsdp must be an FSDP, got {type(fsdp).__name__}; make one of your group: "
                "FSDP(group)"
            )
        self._fsdp = fsdp
        self._reducer = fsdp._reducer
        self._plan = BucketPlan({}, self._reducer, accumulate=False)
        self._pass: BackwardPass | None = None
        self._module_hooks: ModuleHooks | None = None  # of a torch module
        self._model_hooks: ModelHooks | None = None  # of another model
        self._is_synced = True  # False inside `no_sync`
        self._step = LeafStep(fsdp) if fsdp.order == "tree" else None
        self._sums = LocalSums()  # from `no_sync`, except those in parameter.grad
        self._lock = threading.Lock()  # protects `_pass`
        # runs `scatter_multiple_async` calls one after the other
        self._calls = OperationQueue("mlstate-fsdp-calls", fsdp.rank)
        self._report: BackwardReport | None = None

    def __enter__(self) -> FSDPBackwardHook:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"FSDPBackwardHook({self._fsdp!r}, {len(self._plan.units)} tensors)"

    # ---- hooks ----

    def register_hooks(
        self,
        model: Any,
        sharding_units: Mapping[str, FSDPShardingUnit],
        *,
        gradients: str = "shard",
        keep_full_gradient: bool = False,
        accumulate: bool = False,
    ) -> None:
        """Scatter the gradients of these parameters in each following backward pass.

        Parameters
        ----------
        model : torch.nn.Module, or object with ``register_backward_hook(name, function)``
            Hooks of the latter receive the gradient and return the local part; they scatter one
            gradient at a time. For a module, all gradients are scattered when ``backward``
            returns.
        sharding_units : dict of str to FSDPShardingUnit
            Units by parameter name. An empty dict or None registers nothing.
        gradients : {"shard", "full"}, default "shard"
            ``"full"`` leaves the reduced full gradient in ``parameter.grad``, so that an
            optimizer of the module's parameters works as after DDP. ``"shard"`` leaves
            this rank's part in ``unit.local_gradient``, and None in ``parameter.grad``. An
            optimizer step over such a parameter then warns with `RuntimeWarning`.
        keep_full_gradient : bool, default False
            Keep this rank's own full gradients, unreduced, in ``parameter.grad``.
            Default: they are freed when the ranks agree on the next buckets.
        accumulate : bool, default False
            Add the parts to the existing local gradients. Default: replace them.

        Raises
        ------
        ValueError
            If `model` is None; if a unit belongs to another rank; if a parameter is unknown,
            frozen, on the meta device, a DTensor, or differs from its unit in shape or dtype; if
            another object has hooks on one of the parameters; or if ``gradients="full"`` is
            combined with an object that is not a module, `accumulate` or `keep_full_gradient`.
        TypeError
            If `model` is neither a module nor has ``register_backward_hook``.

        Notes
        -----
        ``backward`` raises the errors of `finish`. If another error ends a pass early, the pass
        is dropped: its local gradients are None once the next pass starts.

        ``gradients="full"`` gathers the parts at the end of the pass. Reduced gradients
        accumulate in ``parameter.grad`` until ``zero_grad``; after an error it is None on every
        rank.

        If a parameter is replaced (``load_state_dict(assign=True)``), added or unfrozen
        afterwards, the next pass raises `CollectiveError` on every rank; if no parameter has its
        hook any more, the optimizer's step raises it. Register the hooks again.

        Use activation checkpointing with ``use_reentrant=False``. With ``use_reentrant=True``,
        each checkpoint runs a nested backward pass. If the first gradient comes from a nested
        pass, `CollectiveError` is raised and nothing is reduced.

        For a module returned by ``torch.compile``, use its parameter names (with the prefix
        ``_orig_mod.``), or pass the original module: both share their parameters.

        Examples
        --------
        >>> import torch
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> unit = FSDPShardingUnit("weight", (1, 2), "float32", 0)
        >>> with FSDPBackwardHook(FSDP(SingleGroup())) as hook:
        ...     hook.register_hooks(model, {"weight": unit})
        ...     model(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> unit.local_gradient, model.weight.grad
        (tensor([1., 2.]), None)
        >>> with FSDPBackwardHook(FSDP(SingleGroup())) as hook:
        ...     hook.register_hooks(model, {"weight": unit}, gradients="full")
        ...     model(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> model.weight.grad
        tensor([[1., 2.]])
        """
        if model is None:
            raise ValueError("model must not be None")
        check_flags(keep_full_gradient=keep_full_gradient, accumulate=accumulate)
        is_module = getattr(model, "named_parameters", None) is not None
        check_gradients(gradients, is_module, keep_full_gradient or accumulate)
        if self._step is not None and (keep_full_gradient or accumulate):
            raise ValueError(_ALWAYS_ACCUMULATES)
        if sharding_units is None or not len(sharding_units):
            return
        self._bind_units(sharding_units)
        units = dict(sharding_units)
        if is_module:
            is_full = gradients == "full"
            self._module_hooks = backend_named("torch", GradientBackend).hook_module(
                model,
                units,
                self._receive_gradient,
                is_full=is_full,
                keep=keep_full_gradient,
                accumulate=accumulate,
            )
            units = {name: units[name] for name in self._module_hooks.parameters}
        elif hasattr(model, "register_backward_hook"):
            self._refuse_tree("register_hooks of an object that is not a torch module")
            self._model_hooks = ModelHooks(model, units, self._scatter_in_hook)
        else:
            raise TypeError(
                "model must be a torch module, or have register_backward_hook(name, function); "
                f"got {type(model).__name__}. For your own loop: use_units and add_gradient"
            )
        self._plan = BucketPlan(units, self._reducer, accumulate=accumulate)

    def _bind_units(self, units: Mapping[str, FSDPShardingUnit]) -> None:
        """Bind units to the group; raise ValueError if this object already has units."""
        bind_units(units, self._reducer.rank, self._reducer.world_size)
        if self._plan.units:
            raise ValueError("this object already has hooks; close it, or create another one")

    def _receive_gradient(self, name: str, _: object) -> None:
        """Add the gradient of the parameter `name`, just computed by torch, to the current pass.

        The first gradient starts the pass. Inside `no_sync`, it stays in the parameter. The second
        argument, the parameter itself, is unused.
        """
        hooks = self._module_hooks
        assert hooks is not None
        if not self._is_synced:
            if self._step is None:
                hooks.keep_unsent(name)
            else:
                self._step.hold(name, hooks.parameters[name].grad)
                hooks.take(name, None)
            return
        with self._lock:
            self._abandon_aborted()
            token = None if self._pass is None else self._pass.token
            if token is None:
                token = hooks.begin_pass(self.finish, self._reducer.rank)
            gradient, on_failure = hooks.take(name, token)
            problem = ""
            if self._pass is None:
                _, problem = hooks.outdated()  # becomes an error on all ranks, which wait for it
            current = self._current_pass()
            current.token = token
            current.add(name, gradient, on_failure, problem)

    def _current_pass(self, *, is_leaf: bool = True) -> BackwardPass:
        """Return the current pass, a new one if there is none; the caller holds the lock.

        `is_leaf`: with order="tree", whether a new pass computes a leaf.
        """
        if self._pass is None:
            with _core.deferred_interrupts():
                self._pass = BackwardPass(self._plan, self._reducer, self._step)
            if self._step is not None:
                self._drop_last_step()
                self._step.begin(is_leaf=is_leaf)
        return self._pass

    def _drop_last_step(self) -> None:
        """Drop the local gradients of the last step if a new one begins."""
        assert self._step is not None
        if self._step.is_new:
            for unit in self._plan.units.values():
                unit.local_gradient = None
        self._step.is_new = False

    def _abandon_aborted(self) -> None:
        """Abandon a torch pass that an error ended before all gradients had arrived.

        Such a pass never calls `finish`; its token, a weak reference, is dead. The caller holds the
        lock.
        """
        current = self._pass
        if current is not None and current.token is not None and current.token() is None:
            self._abandon(current)

    def _abandon(self, current: BackwardPass) -> None:
        """Abandon the pass `current`, after its thread; the caller holds the lock."""
        with _core.deferred_interrupts() as section:
            try:
                with section.allowed():
                    current.wait()
            finally:
                self._pass = None
                current.abandon()
                if self._step is not None:
                    self._step.reset()

    def _abandon_if_idle(self) -> None:
        """Abandon an aborted pass, unless a thread holds the lock: then a pass is alive."""
        if not self._lock.locked():
            with self._lock:  # an interrupt can separate `acquire` and `release`
                self._abandon_aborted()

    def _scatter_in_hook(self, name: str, gradient: Any) -> Any:
        """Scatter the gradient of parameter `name` of a model that is not a torch module.

        `gradient`: the full gradient of this rank. Returns this rank's part of the sum; `gradient`
        itself inside `no_sync`, or after `close`.
        """
        if not self._is_synced:
            self._sums.add(name, gradient)
            return gradient
        unit = self._plan.units.get(name)
        if unit is None:  # this object is closed, and the model cannot remove hooks
            return gradient
        gradient, problem = self._sums.take(name, gradient)
        accumulate = self._plan.accumulate
        return self._reducer.scatter_one(unit, gradient, problem, accumulate=accumulate)

    def use_units(
        self, sharding_units: Mapping[str, FSDPShardingUnit], *, accumulate: bool = False
    ) -> None:
        """Prepare for a custom backward pass, which calls `add_gradient` and `finish`.

        Parameters
        ----------
        sharding_units : dict of str to FSDPShardingUnit
            Units by parameter name, in the order of the forward pass, equal on all ranks.
        accumulate : bool, default False
            See `register_hooks`.

        Raises
        ------
        ValueError
            If a unit belongs to another rank, or this object already has units.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
        >>> units = {n: FSDPShardingUnit(n, (2,), "float64", 0) for n in ("a", "b")}
        >>> hook = FSDPBackwardHook(FSDP(SingleGroup()))
        >>> hook.use_units(units)
        >>> hook.add_gradient("b", np.ones(2))
        >>> hook.add_gradient("a", np.zeros(2))
        >>> hook.finish()
        >>> units["b"].local_gradient
        array([1., 1.])
        """
        check_flags(accumulate=accumulate)
        if accumulate and self._step is not None:
            raise ValueError(_ALWAYS_ACCUMULATES)
        self._bind_units(sharding_units)
        self._plan = BucketPlan(sharding_units, self._reducer, accumulate=accumulate)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank inside this context, without reducing them.

        The first backward pass after the context reduces the sums. Until then, each rank holds
        full gradients; a module's gradients stay in ``parameter.grad``.

        With ``order="tree"``, run each backward pass inside `leaf`. The rank adds up its leaves in
        the tree and sends at most 2 log2 sums, with the first pass after the context or in
        `finish_step`. It holds as many full gradients, if its indices are consecutive; other
        indices need up to ``max_pending``.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
        >>> unit = FSDPShardingUnit("w", (2,), "float64", 0)
        >>> hook = FSDPBackwardHook(FSDP(SingleGroup()))
        >>> hook.use_units({"w": unit})
        >>> with hook.no_sync():
        ...     hook.add_gradient("w", np.ones(2))
        >>> hook.add_gradient("w", np.ones(2))
        >>> hook.finish()
        >>> unit.local_gradient
        array([2., 2.])
        """
        was_synced, self._is_synced = self._is_synced, False  # contexts may be nested
        try:
            yield
        finally:
            self._is_synced = was_synced

    # ---- one backward pass ----

    def add_gradient(self, name: str, gradient: object) -> None:
        """Add a gradient to the current pass; it is reduced when its bucket is full.

        Parameters
        ----------
        name : str
            A parameter that was passed to `use_units` or `register_hooks`.
        gradient : array or torch.Tensor
            The full gradient, used without a copy: do not modify it until `finish` returns.

        Raises
        ------
        ValueError
            If the parameter is unknown, or already has a gradient.

        Examples
        --------
        See `use_units`.
        """
        if name not in self._plan.units:
            raise ValueError(f"{name!r} has no sharding unit here")
        if not self._is_synced:
            if self._step is None:
                self._sums.add(name, gradient)
            else:
                self._step.hold(name, detached(gradient))
            return
        problem = ""
        if self._sums:
            gradient, problem = self._sums.take(name, gradient)
        with self._lock:
            self._abandon_aborted()
            self._current_pass().add(name, gradient, None, problem)

    def finish(self) -> None:
        """End a backward pass: wait until all gradients are scattered.

        Hooks of a torch module call this when ``backward`` ends. Inside `no_sync`, without a
        started pass, it does nothing. Parameters without a gradient take part too, with their sums
        from `no_sync` if they have one, also if this rank has computed no gradient at all. With
        ``gradients="full"``, the full gradients are gathered afterwards.

        Raises
        ------
        CollectiveError
            On every rank, if gradients could not be reduced; it names their parameters and
            ranks. All other gradients are stored. After a timeout or the end of a rank's process,
            the group cannot be used any more.

        Examples
        --------
        See `use_units`.
        """
        with self._lock:
            self._abandon_aborted()
            if self._pass is not None or self._is_synced:
                self._finish_pass()

    def _finish_pass(self, *, is_leaf: bool = True) -> None:
        """Implement `finish`; the caller holds the lock. `is_leaf`: as for `_current_pass`."""
        hooks, step = self._module_hooks, self._step
        with _core.deferred_interrupts() as section:
            current, ended = self._current_pass(is_leaf=is_leaf), perf_counter()
            try:
                with section.allowed():
                    self._add_missing(current)
                    current.finish()
                    if step is not None:
                        step.drop_held_leaves()
                    elif hooks is not None and hooks.is_full:
                        self._gather_full(hooks)
            except BaseException:
                current.fail_others()
                self._drop_sums()
                raise
            finally:
                self._pass = None
                current.session.close()
                if hooks is not None and not hooks.is_full:
                    hooks.add_earlier()
                if current.session.events is not None:
                    self._report = BackwardReport(current.times, ended, current.session.events)

    def _gather_full(self, hooks: ModuleHooks) -> None:
        """Store the reduced full gradients in the parameters."""
        hooks.gather_full(self._plan.buckets, self._fsdp.process_group, self._fsdp.timeout)

    def _drop_sums(self) -> None:
        """Drop the leaves of a step, and full gradients, after an error."""
        if self._step is not None:
            self._step.reset()
        if self._module_hooks is not None and self._module_hooks.is_full:
            self._module_hooks.drop_full()

    # ---- order="tree" ----

    @contextmanager
    def leaf(self, index: int) -> Iterator[None]:
        """Give the micro-batch of the backward pass in this context its index in the step.

        Parameters
        ----------
        index : int
            From 0 to the number of micro-batches of all ranks. Default without this context: the
            micro-batches are dealt out to the ranks in turn, so rank r has r, r + ranks, and so on.

        Raises
        ------
        ValueError
            If the order of the `FSDP` is not ``"tree"``, or `index` is negative.

        Notes
        -----
        An index that comes twice, one that is missing at the end of the step, and one that needs
        more than ``max_pending`` sums raise `CollectiveError` on every rank. All leaves of the step
        are then dropped. Leaf by leaf, in any order of the ranks, the owner of a part holds
        log2 of the leaves as sums of its part, and one for each rank.

        Examples
        --------
        See `finish_step`.
        """
        step = self._tree_step("leaf")
        step.given = check_int("index", index, 0)
        if not self._is_synced:
            self._drop_last_step()
            step.hold_leaf(step.given)
        try:
            yield
        finally:
            step.given = None

    def finish_step(self) -> int:
        """End a step with ``order="tree"``: store the sums of all leaves, and return their number.

        All ranks must call it before the optimizer steps, also those that had fewer micro-batches
        than others, or none: they take part in the passes of the others until all have called it.

        Returns
        -------
        int
            Number of micro-batches of all ranks.

        Raises
        ------
        CollectiveError
            On every rank, if the passes of `finish` raise it, an index is missing, or a sum is not
            finite. The leaves are then dropped.
        ValueError
            If the order of the `FSDP` is not ``"tree"``.

        Notes
        -----
        Sums of 16- and 8-bit floats are float32 until they are divided and rounded once. A
        micro-batch in which a parameter has no gradient adds nothing to it; a parameter without
        a gradient in all of them has none.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
        >>> from mlstate.testing import run_ranks
        >>> def step(group):
        ...     unit = FSDPShardingUnit("w", (1,), "float32", group.rank)
        ...     hook = FSDPBackwardHook(FSDP(group, op="mean", order="tree"))
        ...     hook.use_units({"w": unit})
        ...     for index in range(group.rank, 5, group.world_size):
        ...         with hook.leaf(index):
        ...             hook.add_gradient("w", np.array([10.0**index], np.float32))
        ...             hook.finish()
        ...     return hook.finish_step(), unit.local_gradient
        >>> run_ranks(1, step)[0], run_ranks(3, step)[0]
        ((5, array([2222.2], dtype=float32)), (5, array([2222.2], dtype=float32)))
        """
        step, hooks = self._tree_step("finish_step"), self._module_hooks
        with self._lock:
            self._abandon_aborted()
            try:
                while self._plan.units and not step.has_ended:
                    self._finish_pass(is_leaf=False)
                count = step.store_totals(self._plan.units, self._reducer, self._fsdp.op == "mean")
                if hooks is not None and hooks.is_full:
                    self._gather_full(hooks)
            except BaseException:
                for unit in self._plan.units.values():
                    unit.local_gradient = None
                self._drop_sums()
                raise
        return count

    def _tree_step(self, operation: str) -> LeafStep:
        """Return the current step; raise ValueError if the order is of ranks."""
        if self._step is None:
            raise ValueError(f"{operation} needs FSDP(group, order='tree')")
        return self._step

    def _refuse_tree(self, operation: str) -> None:
        """Raise ValueError if the order is a tree: the operation reduces gradients at once."""
        if self._step is not None:
            raise ValueError(
                f"{operation} reduces at once, but order='tree' adds up all micro-batches of a "
                "step: call use_units, then add_gradient and finish for each micro-batch, and "
                "finish_step"
            )

    def _add_missing(self, current: BackwardPass) -> None:
        """Complete the pass `current` with the parameters for which it computed no gradient.

        Each one's gradient is its sum from `no_sync`, or None.
        """
        hooks = self._module_hooks
        for name in [name for name in self._plan.units if name not in current.arrived]:
            gradient, on_failure = None, None
            if hooks is not None:
                gradient, on_failure = hooks.take_missing(name, current.token)
            gradient, problem = self._sums.take(name, gradient)
            current.add_missing(name, gradient, on_failure, problem)
        if hooks is not None:
            hooks.unsent.clear()

    def report(self) -> BackwardReport:
        """Return when the gradients of the last backward pass arrived and were reduced.

        Returns
        -------
        BackwardReport
            Printed as a table, in notebooks too.

        Raises
        ------
        ValueError
            If nothing was recorded: pass ``record=True`` to `FSDP`, and run a backward pass.

        Examples
        --------
        See `BackwardReport`.
        """
        if self._report is None:
            raise ValueError(
                "no backward pass was recorded: make the group's FSDP with record=True, and run one"
            )
        return self._report

    # ---- without a backward pass ----

    def scatter_gradient(self, unit: FSDPShardingUnit, full_gradient: Any) -> Any:
        """Reduce one gradient, store this rank's part in its unit, and return it.

        Parameters
        ----------
        unit : FSDPShardingUnit
            The unit of the parameter.
        full_gradient : array, torch.Tensor or None
            The full gradient, with the parameter's shape and dtype; None if this rank has none.
            Every rank must call.

        Returns
        -------
        array or torch.Tensor
            ``unit.local_gradient``; None if no rank has a gradient, and `FSDP` allows that.

        Raises
        ------
        CollectiveError
            On every rank, if a rank has no gradient, or one that does not fit the unit, differs
            between ranks, or is not finite. ``unit.local_gradient`` is then None.
        GradientMismatchError
            On the rank whose gradient is missing or does not fit. A subclass of `CollectiveError`
            and `ValueError`.
        TypeError, ValueError
            If `unit` is not a sharding unit of this rank. Nothing is sent.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
        >>> hook = FSDPBackwardHook(FSDP(SingleGroup()))
        >>> hook.scatter_gradient(FSDPShardingUnit("w", (2,), "float64", 0), np.ones(2))
        array([1., 1.])
        """
        self._refuse_tree("scatter_gradient")
        self._abandon_if_idle()
        bind_unit(unit, self._reducer.rank, self._reducer.world_size)
        return self._reducer.scatter_one(unit, full_gradient)

    def scatter_multiple(
        self,
        sharding_units: Mapping[str, FSDPShardingUnit],
        full_gradients: Mapping[str, Any],
    ) -> None:
        """Reduce several gradients together, and store this rank's parts in their units.

        Parameters
        ----------
        sharding_units : dict of str to FSDPShardingUnit
            Units by parameter name.
        full_gradients : dict of str to array or torch.Tensor
            Gradients by parameter name, in any order. If either dict is empty or None, the call
            does nothing.

        Raises
        ------
        CollectiveError
            On every rank. If a gradient is not finite, or its unit differs between ranks, all
            other gradients are stored. If a gradient is missing, has no unit, or differs from its
            unit in kind, shape or dtype, no rank stores anything, and ``local_gradient`` is None
            in all units of the call.
        GradientMismatchError
            On the rank whose gradient is missing, has no unit, or does not fit its unit. A
            subclass of `CollectiveError` and `ValueError`.
        GradientNamesError
            The same, if the names of the two dicts differ on this rank. A subclass of
            `GradientMismatchError`.
        TypeError, ValueError
            If an argument is not a dict, or a unit is not of this rank. Nothing is sent.

        Examples
        --------
        See `FSDPBackwardHook`.
        """
        if not sharding_units or _is_empty("full_gradients", full_gradients):
            return
        self._refuse_tree("scatter_multiple")
        self._abandon_if_idle()
        bind_units(sharding_units, self._reducer.rank, self._reducer.world_size)
        self._reducer.scatter(sharding_units, full_gradients)

    async def scatter_multiple_async(
        self,
        sharding_units: Mapping[str, FSDPShardingUnit],
        full_gradients: Mapping[str, object],
    ) -> None:
        """Run `scatter_multiple` in a thread without blocking the event loop.

        Parameters
        ----------
        sharding_units, full_gradients
            As for `scatter_multiple`.

        Raises
        ------
        CollectiveError, GradientMismatchError, GradientNamesError
            As `scatter_multiple`.

        Notes
        -----
        Concurrent calls run one after the other, in the order of their first await. That order
        must be equal on all ranks. A cancelled call still runs, because the other ranks wait for
        it.

        Examples
        --------
        >>> import asyncio, numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
        >>> hook = FSDPBackwardHook(FSDP(SingleGroup()))
        >>> unit = FSDPShardingUnit("w", (2,), "float64", 0)
        >>> asyncio.run(hook.scatter_multiple_async({"w": unit}, {"w": np.ones(2)}))
        >>> unit.local_gradient
        array([1., 1.])
        """
        import asyncio

        work = self._calls.run(
            "scatter_multiple",
            lambda: self.scatter_multiple(sharding_units, full_gradients),
            async_op=True,
        )
        await asyncio.get_running_loop().run_in_executor(None, work.wait)

    # ---- local gradients ----

    def accumulate_gradients(
        self,
        sharding_units: Mapping[str, FSDPShardingUnit],
        new_gradients: Mapping[str, Any],
    ) -> None:
        """Add gradients to the local gradients; a unit without one gets a copy.

        Parameters
        ----------
        sharding_units : dict of str to FSDPShardingUnit
            Units by parameter name.
        new_gradients : dict of str to array or torch.Tensor
            Parts with the shape and dtype of the local gradients. Units without an entry are
            unchanged.

        Raises
        ------
        CompatibilityError
            If a shape or dtype differs from the local gradient's. No gradient is changed.
        TypeError, ValueError
            If an argument is not a dict, a gradient is not an array or tensor, or a unit is not of
            this rank.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
        >>> units = {"w": FSDPShardingUnit("w", (2,), "float64", 0)}
        >>> hook = FSDPBackwardHook(FSDP(SingleGroup()))
        >>> hook.accumulate_gradients(units, {"w": np.ones(2)})
        >>> hook.accumulate_gradients(units, {"w": np.ones(2)})
        >>> units["w"].local_gradient
        array([2., 2.])
        """
        if not sharding_units or _is_empty("new_gradients", new_gradients):
            return
        check_units(sharding_units)
        names = [name for name in sharding_units if new_gradients.get(name) is not None]
        for name in names:
            bind_unit(sharding_units[name], self._reducer.rank, self._reducer.world_size)
            _check_local(sharding_units[name], new_gradients[name])
        targets = {name: sharding_units[name].local_gradient for name in names}
        add({name: array for name, array in targets.items() if array is not None}, new_gradients)
        for name in names:
            if targets[name] is None:
                sharding_units[name].local_gradient = copy_gradient(new_gradients[name])

    def clear_gradients(self, sharding_units: Mapping[str, FSDPShardingUnit]) -> None:
        """Fill the existing local gradients with zeros, to begin a step.

        After an error in a step that accumulates, all ranks must call this.

        Parameters
        ----------
        sharding_units : dict of str to FSDPShardingUnit
            Units by parameter name.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
        >>> unit = FSDPShardingUnit("w", (2,), "float64", 0)
        >>> unit.local_gradient = np.ones(2)
        >>> FSDPBackwardHook(FSDP(SingleGroup())).clear_gradients({"w": unit})
        >>> unit.local_gradient
        array([0., 0.])
        """
        if not sharding_units:
            return
        check_units(sharding_units)
        for unit in sharding_units.values():
            unit._is_lost = False
        arrays = {name: unit.local_gradient for name, unit in sharding_units.items()}
        clear({name: array for name, array in arrays.items() if array is not None})

    def verify_gradients(
        self,
        sharding_units: Mapping[str, FSDPShardingUnit],
        full_gradients: Mapping[str, Any] | None = None,
        *,
        unreduced: Mapping[str, Any] | None = None,
        atol: float = 1e-5,
    ) -> GradientReport:
        """Compare the local gradients with their expected values.

        Parameters
        ----------
        sharding_units : dict of str to FSDPShardingUnit
            Units by parameter name.
        full_gradients : dict of str to array or torch.Tensor, optional
            The reduced full gradients of the parameters to compare. Needs no communication. Either
            units without a gradient are left out, or gradients without a unit; both together, as
            after a misspelt name, raise ValueError.
        unreduced : dict of str to array or torch.Tensor, optional
            This rank's own full gradients before the reduction, instead of `full_gradients`.
            All ranks must make this call; no rank needs a reduced full gradient. Each rank
            compares a signed sum of its local part with the same sum over all ranks' gradients;
            the sign of an element is a hash of its index. For sums and means only.
        atol : float, default 1e-5
            Largest difference of an element.

        Returns
        -------
        GradientReport
            True if all gradients match, or if there is nothing to compare. NaN never matches.

        Raises
        ------
        ValueError
            If both dicts of gradients are passed, if `atol` is negative or NaN, if a unit is not
            of this rank, if `unreduced` is passed for minima or maxima, or if `full_gradients` has
            a name without a unit while a unit has no gradient.
        TypeError
            If an argument is not a dict, or a unit is not a sharding unit.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
        >>> unit = FSDPShardingUnit("w", (2,), "float64", 0)
        >>> unit.local_gradient = np.ones(2)
        >>> hook = FSDPBackwardHook(FSDP(SingleGroup()))
        >>> bool(hook.verify_gradients({"w": unit}, {"w": np.ones(2)}))
        True
        >>> print(hook.verify_gradients({"w": unit}, {"w": np.array([1.0, 2.0])}))
        1 of 1 gradients differs by more than 1e-05
        parameter  rank  element  expected  actual
        w          0     1        2.0       1.0
        """
        atol = check_number("atol", atol)
        if not atol >= 0:
            raise ValueError(f"atol must be 0 or more, got {atol}")
        if unreduced is not None and full_gradients is not None:
            raise ValueError("pass full_gradients or unreduced, not both")
        if unreduced is not None:
            self._refuse_tree("verify_gradients with unreduced=")
        if sharding_units:
            bind_units(sharding_units, self._reducer.rank, self._reducer.world_size)
        if unreduced is None:
            if _is_empty("full_gradients", full_gradients):
                full_gradients = {}
            return compare(sharding_units or {}, full_gradients or {}, atol)
        _is_empty("unreduced", unreduced)  # for its TypeError: all ranks compare, also without any
        return compare_sums(self._fsdp, sharding_units or {}, unreduced, atol)

    def close(self) -> None:
        """Remove the hooks from the model; later calls do nothing.

        A backward pass that has not ended is abandoned and leaves no local gradients. Other ranks
        that continue it raise an error when this rank reduces something else.

        Examples
        --------
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.fsdp import FSDP, FSDPBackwardHook
        >>> FSDPBackwardHook(FSDP(SingleGroup())).close()
        """
        for hooks in (self._module_hooks, self._model_hooks):
            if hooks is not None:
                hooks.remove()
        with self._lock:
            if self._pass is not None:
                self._abandon(self._pass)
        self._module_hooks = self._model_hooks = None
        self._plan = BucketPlan({}, self._reducer, accumulate=False)
        self._sums.clear()
        self._step = None if self._step is None else LeafStep(self._fsdp)


def _is_empty(name: str, gradients: object) -> bool:
    """Return whether `gradients` is None or empty; raise TypeError if it is not a dict.

    `name`: of the argument, for the error.
    """
    if gradients is None:
        return True
    if not hasattr(gradients, "items"):
        raise TypeError(f"{name} must be a dict of gradients, got {type(gradients).__name__}")
    return not gradients


def _check_local(unit: FSDPShardingUnit, gradient: Array) -> None:
    """Raise unless the user's `gradient` can be added to the local gradient of `unit`.

    TypeError if it is not an array or tensor; CompatibilityError if its shape or dtype differs. A
    unit without a local gradient accepts any dtype.
    """
    local = unit.local_gradient
    if not is_torch(gradient) and not isinstance(gradient, np.ndarray | np.generic):
        raise TypeError(
            f"{unit.parameter_name}: the new gradient is a {type(gradient).__name__}, not an "
            "array or tensor"
        )
    refuse_masked(unit.parameter_name, gradient)
    shape = unit.local_shape if local is None else tuple(local.shape)
    dtype = dtype_name(gradient) if local is None else dtype_name(local)
    for label, got, expected in (
        ("shape", str(tuple(gradient.shape)), str(shape)),
        ("dtype", dtype_name(gradient), dtype),
    ):
        if got != expected:
            raise _mismatch_error(unit.parameter_name, label, got, expected)


def _mismatch_error(name: str, label: str, got: str, expected: str) -> CompatibilityError:
    """Return the error for a gradient of parameter `name` whose `label`, such as shape, differs."""
    text = f"{name}: the new gradient has {label} {got}, expected {expected}"
    return CompatibilityError(text, name=name, got=got, expected=expected)
