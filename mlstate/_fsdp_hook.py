"""Gradients that are scattered as the backward pass makes them; public through `mlstate.fsdp`."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ._common.backend import backend_named
from ._fsdp import FSDP
from ._fsdp_operation import check_local, is_empty
from ._fsdp_register import (
    check_gradients,
    check_parameter,
    check_units,
    note_hooked,
    put_back,
    refuse_shared_hooks,
    refuse_shared_parameters,
)
from ._fsdp_report import BackwardReport
from ._fsdp_unit import FSDPShardingUnit
from ._fsdp_verify import GradientReport, compare, compare_sums
from ._gradients import add, clear, copied
from ._set_module import set_module
from ._turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ._fsdp_reduce import Entry

_MISSING = "the backward pass gave no gradient"
_NOT_WORTH_A_THREAD = 1 << 20  # bytes of a last bucket that `finish` reduces itself


@set_module("mlstate.fsdp")
class FSDPBackwardHook:
    """Scatters the gradients of a model while its backward pass runs.

    Parameters
    ----------
    fsdp : FSDP
        The ranks, and how they reduce.

    Raises
    ------
    TypeError
        `fsdp` is none.

    Notes
    -----
    ``FSDPBackwardHook`` of the specification (FSDP backward hook). Gradients go in buckets
    of `FSDP.bucket_bytes`, in the reverse order of the parameters, from a thread of their own:
    the backward pass goes on meanwhile. Full gradients are kept until ranks agree on the next
    buckets, those of four at most. A last bucket of less than 1 MiB is reduced when the
    pass ends, without that thread. Where one gradient fails, all others are scattered, and
    then every rank raises the same `CollectiveError`, which names rank and parameter.

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
        if not isinstance(fsdp, FSDP):
            raise TypeError(
                f"fsdp must be an FSDP, got {type(fsdp).__name__}; make one of your group: "
                "FSDP(group)"
            )
        self._fsdp = fsdp
        self._runs = fsdp._runs
        self._handles: list[Any] = []
        self._parameters: dict[str, Any] = {}  # of torch, by name
        self._units: dict[str, FSDPShardingUnit] = {}
        self._buckets: list[list[FSDPShardingUnit]] = []
        self._plan = b""  # stands for all of them
        self._bucket_of: dict[str, int] = {}  # by parameter
        self._at_once = 0  # how many of the buckets are reduced as soon as they are full
        self._accumulate = False
        self._keep = False  # full gradients stay with torch's parameters
        self._gradients = "shard"
        self._model: Any = None  # with hooks of this object, if it is no module of torch
        self._taken: set[str] = set()  # parameters whose gradients were taken off
        self._has_warned = False  # that an optimizer found none
        self._earlier: dict[str, Any] = {}  # reduced gradients that a pass adds to
        self._sync = True
        self._held: dict[str, Any] = {}
        self._unsent: set[str] = set()  # what torch's parameters hold of passes in no_sync
        self._lock = threading.Lock()
        self._calls = Turns("mlstate-fsdp-calls", fsdp.rank)
        self._report: BackwardReport | None = None
        self._forget()

    def _forget(self) -> None:
        """Be ready for another backward pass."""
        self._arrived: dict[str, Entry] = {}
        self._next = 0  # the bucket that is reduced next
        self._lacking = [len(bucket) for bucket in self._buckets]  # gradients still to come
        self._full = [0.0] * len(self._buckets)  # when the last one came, if that is recorded
        self._works: list[Any] = []
        self._times: list[tuple[str, float]] = []
        self._running = False
        self._pass: Any = None  # of torch: a weak reference that ends with the backward pass

    def __enter__(self) -> FSDPBackwardHook:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"FSDPBackwardHook({self._fsdp!r}, {len(self._units)} parameters)"

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
        """Scatter the gradients of these parameters in each backward pass from now on.

        Parameters
        ----------
        model : torch.nn.Module, or object with ``register_backward_hook(name, function)``
            Hooks of the latter get the gradient and return the local part; they scatter one
            gradient after the other. For a module, all gradients are scattered when
            ``backward`` returns.
        sharding_units : dict of str to FSDPShardingUnit
            By the parameter's name. None at all: nothing to do.
        gradients : {"shard", "full"}, default "shard"
            ``"full"`` leaves the reduced full gradient in ``parameter.grad``, so that an
            optimizer of the module's parameters works as after DDP. ``"shard"`` leaves
            this rank's part in ``unit.local_gradient``, and None in ``parameter.grad``; a
            `RuntimeWarning` says so when an optimizer steps over such a parameter.
        keep_full_gradient : bool, default False
            Leave this rank's own full gradients, not reduced, in ``parameter.grad``.
            Default: they are freed when ranks agree on the next buckets.
        accumulate : bool, default False
            Add the parts to the local gradients that are there. Default: replace them.

        Raises
        ------
        ValueError
            `model` is None, a unit does not belong to this rank, or a parameter is unknown,
            frozen, on the meta device, a DTensor, or of another shape or dtype than its unit.
            Another object has hooks on one of the parameters. ``gradients="full"`` was passed
            for an object that is not a module, or with `accumulate` or `keep_full_gradient`.

        Notes
        -----
        ``backward`` raises what `finish` does. A pass that another error cuts short is
        dropped: its local gradients are None once the next one starts.

        ``gradients="full"`` gathers the parts when the pass ends. Reduced gradients add up in
        ``parameter.grad`` until ``zero_grad``; after an error it is None on every rank.

        Activation checkpointing goes with ``use_reentrant=False``. With ``use_reentrant=True``
        each checkpoint runs a backward pass of its own; where the first gradient comes from
        one of these, it raises `CollectiveError`, and nothing is reduced.

        Of a module that ``torch.compile`` returned, name the parameters as that does
        (``_orig_mod.``), or pass the module it was made of: they share their parameters.

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
        named = getattr(model, "named_parameters", None)
        check_gradients(gradients, named is not None, keep_full_gradient or accumulate)
        if sharding_units is None or not len(sharding_units):
            return
        check_units(sharding_units)
        for unit in sharding_units.values():
            self._runs.bind(unit)
        if self._handles or self._units:
            raise ValueError("this object has hooks already; close it, or make another one")
        if named is not None:
            self._gradients = gradients
            self._register_torch(model, sharding_units, keep_full_gradient or gradients == "full")
        elif hasattr(model, "register_backward_hook"):
            refuse_shared_hooks(self, model, sharding_units)
            self._model = model
            for name, unit in sharding_units.items():
                handle = model.register_backward_hook(name, self._spec_hook(unit))
                if hasattr(handle, "remove"):
                    self._handles.append(handle)
            self._units = dict(sharding_units)
        else:
            raise TypeError(
                "model must be a torch module, or have register_backward_hook(name, function); "
                f"got {type(model).__name__}. For a loop of your own: use_units and add_gradient"
            )
        self._accumulate = accumulate
        self._divide()
        note_hooked(self)

    def _divide(self) -> None:
        """Divide the units into buckets, once for all passes."""
        self._buckets = list(self._runs.buckets(reversed(self._units.values())))
        self._plan = self._runs.plan(self._units.values())
        self._bucket_of = {
            unit.parameter_name: number
            for number, bucket in enumerate(self._buckets)
            for unit in bucket
        }
        last = self._buckets[-1] if self._buckets else []
        size = sum(unit.full_bytes for unit in last)
        self._at_once = len(self._buckets) - int(size < _NOT_WORTH_A_THREAD)
        self._forget()

    def _register_torch(
        self, model: Any, units: Mapping[str, FSDPShardingUnit], keep: bool
    ) -> None:
        backend = backend_named("torch")
        parameters = backend.parameters_of(model)
        for name, unit in units.items():
            check_parameter(unit, parameters.get(name), model, parameters)
        refuse_shared_parameters(self, {name: parameters[name] for name in units})
        if not keep:
            backend.watch_steps()
        for name, parameter in parameters.items():  # the order that all ranks have
            if name in units:
                units[name].like = parameter.detach()
                self._units[name] = units[name]
                self._parameters[name] = parameter
                hook = self._torch_hook(name, parameter)
                self._handles.append(backend.watch(parameter, hook))
                if self._gradients == "full":
                    before = partial(self._set_aside, name, parameter)
                    self._handles.append(backend.watch_before(parameter, before))
        self._keep = keep

    def _torch_hook(self, name: str, parameter: Any) -> Callable[[Any], None]:
        def ready(gradient: Any) -> None:
            if not self._sync:
                self._unsent.add(name)
                return
            with self._lock:
                if self._pass is None or self._pass() is None:
                    self._begin_torch()
                self._unsent.discard(name)
                if self._keep:
                    self._add(name, gradient)
                else:
                    self._add(name, gradient, self._take(name, parameter, gradient))

        return ready

    def _set_aside(self, name: str, parameter: Any) -> None:
        """Keep a reduced gradient apart from the one that a pass is about to add to it."""
        if parameter.grad is None:
            self._earlier.pop(name, None)
        elif name not in self._unsent:
            self._earlier[name], parameter.grad = parameter.grad, None

    def _take(self, name: str, parameter: Any, gradient: Any) -> Callable[[], None]:
        """Take a gradient off its parameter, and return what puts it back if that is to be."""
        parameter.grad = None
        self._taken.add(name)
        return partial(put_back, parameter, gradient, self._pass)

    def _begin_torch(self) -> None:
        """Have torch call `finish` when the pass ends whose first gradient is there."""
        self._drop_what_was_cut_short()
        if self._pass is None:
            self._pass = backend_named("torch").begin_pass(lambda: self.finish(), self._fsdp.rank)

    def _drop_what_was_cut_short(self) -> None:
        """Forget a backward pass that an error ended before all gradients were there."""
        if self._pass is None or self._pass() is not None:
            return
        if self._running:
            self._give_up()
        else:
            self._forget()

    def _spec_hook(self, unit: FSDPShardingUnit) -> Callable[[Any], Any]:
        def scatter(gradient: Any) -> Any:
            if not self._sync:
                self._hold(unit.parameter_name, gradient)
                return gradient
            name = unit.parameter_name
            if name not in self._units:  # closed, and the model had no way to remove this
                return gradient
            entry = self._runs.entry(unit, *self._sum(name, gradient))
            self._runs.reduce_now("scatter_gradient", [entry], accumulate=self._accumulate)
            return unit.local_gradient

        return scatter

    def use_units(
        self, sharding_units: Mapping[str, FSDPShardingUnit], *, accumulate: bool = False
    ) -> None:
        """Prepare for a backward pass of your own, which calls `add_gradient` and `finish`.

        Parameters
        ----------
        sharding_units : dict of str to FSDPShardingUnit
            In the order of the forward pass, the same on all ranks.
        accumulate : bool, default False
            As for `register_hooks`.

        Raises
        ------
        ValueError
            As `register_hooks`.

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
        check_units(sharding_units)
        for unit in sharding_units.values():
            self._runs.bind(unit)
        if self._units:
            raise ValueError("this object has hooks already; close it, or make another one")
        self._units = dict(sharding_units)
        self._accumulate = accumulate
        self._divide()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes inside add up on each rank, and reduce nothing.

        The first backward pass outside reduces the sums. Until then full gradients take their
        memory: those of a module stay in ``parameter.grad``.

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
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _hold(self, name: str, gradient: Any) -> None:
        """Keep what `no_sync` gathers; the first gradient is copied."""
        if gradient is None:  # nothing to add
            return
        if name in self._held:
            add({name: self._held[name]}, {name: gradient})
        else:
            self._held[name] = copied(gradient)

    def _with_held(self, name: str, gradient: Any) -> Any:
        held = self._held.pop(name, None)
        if held is None:
            return gradient
        if gradient is not None:
            add({name: held}, {name: gradient})
        return held

    def _sum(self, name: str, gradient: Any) -> tuple[Any, str]:
        """Return what this rank has of a gradient altogether, and what is wrong with it."""
        try:
            return self._with_held(name, gradient), ""
        except Exception as error:  # told to all ranks, which wait for this gradient
            return None, f"{type(error).__name__}: {error}"

    # ---- one backward pass ----

    def add_gradient(self, name: str, gradient: Any) -> None:
        """Say that a gradient is there; it is reduced as soon as its bucket is full.

        Parameters
        ----------
        name : str
            Of a parameter that `use_units` or `register_hooks` was told of.
        gradient : array or torch.Tensor
            The full one, used where it lies: leave it alone until `finish`.

        Raises
        ------
        ValueError
            The parameter is unknown, or has a gradient already.

        Examples
        --------
        See `use_units`.
        """
        if name not in self._units:
            raise ValueError(f"{name!r} has no sharding unit here")
        if not self._sync:
            self._hold(name, gradient)
            return
        why = ""
        if self._held:
            gradient, why = self._sum(name, gradient)
        with self._lock:
            self._add(name, gradient, None, why)

    def _add(
        self, name: str, gradient: Any, lost: Callable[[], None] | None = None, why: str = ""
    ) -> None:
        """Take a gradient of a pass, and hand over what it completes; with the lock held."""
        if not self._running:
            self._runs.begin()
            self._running = True
        if name in self._arrived:
            if lost is not None:
                lost()
            raise ValueError(f"{name!r} has a gradient already in this backward pass")
        self._arrived[name] = self._runs.entry(self._units[name], gradient, why, lost)
        number = self._bucket_of[name]
        self._lacking[number] -= 1
        if self._runs.events is not None:
            self._full[number] = perf_counter()
            self._times.append((name, self._full[number]))
        if number == self._next and self._lacking[number] == 0:
            self._send_what_is_full()

    def _send_what_is_full(self) -> None:
        """Hand over buckets whose gradients are all there, in their order.

        Not the last one, if it is small: little is left of the pass to go on meanwhile.
        """
        while self._next < self._at_once and self._lacking[self._next] == 0:
            self._works.append(self._send_next(later=True))

    def _send_next(self, *, later: bool) -> Any:
        """Have a bucket reduced here, or later by the thread; its gradients are all there."""
        number, self._next = self._next, self._next + 1
        entries = [self._arrived[unit.parameter_name] for unit in self._buckets[number]]
        return self._runs.reduce_bucket(
            entries,
            self._plan,
            accumulate=self._accumulate,
            since=self._full[number],
            later=later,
        )

    def finish(self) -> None:
        """End a backward pass: wait until all gradients are scattered.

        Hooks of a torch module do this when ``backward`` ends. Inside `no_sync` there is no
        pass to end, and nothing is done.

        Raises
        ------
        CollectiveError
            On every rank: gradients that could not be reduced, with their parameters and
            ranks; all others are stored. After a timeout, or where a rank is gone, the group
            is of no use any more.

        Examples
        --------
        See `use_units`.
        """
        with self._lock:
            self._drop_what_was_cut_short()
            if not self._running:
                if not self._sync:
                    return
                self._runs.begin()
            ended = perf_counter()
            try:
                self._finish()
                if self._gradients == "full":
                    self._gather_full()
            except BaseException:
                self._drop_full()
                raise
            finally:
                if self._runs.events is not None:
                    self._report = BackwardReport(self._times, ended, self._runs.events)
                self._runs.end()
                self._forget()

    def _finish(self) -> None:
        missing = self._units if len(self._arrived) < len(self._units) else {}
        for name, unit in missing.items():
            if name not in self._arrived:
                held, lost = self._with_held(name, None), None
                if held is None and name in self._unsent:
                    held = self._parameters[name].grad
                    lost = None if self._keep else self._take(name, self._parameters[name], held)
                elif self._gradients == "full":
                    self._set_aside(name, self._parameters[name])
                absent = held is None and not self._fsdp.allow_unused
                why = _MISSING if absent else ""
                self._arrived[name] = self._runs.entry(unit, held, why, lost)
                self._full[self._bucket_of[name]] = perf_counter()
        self._unsent.clear()
        error = self._wait(to_the_end=True)
        if error is not None:  # the group is broken: there is nobody to end a run with
            raise error
        self._runs.finish("backward pass")

    def _gather_full(self) -> None:
        """Leave each parameter its reduced full gradient."""
        gather_full = backend_named("torch").gather_full
        for bucket in self._buckets:
            self._runs.run("all_gather", partial(gather_full, self._fsdp, bucket, self._parameters))
        for name, earlier in self._earlier.items():
            self._parameters[name].grad = earlier.add_(self._parameters[name].grad)
        self._earlier = {}

    def _drop_full(self) -> None:
        """Leave no gradient that is not reduced in the place of one that is."""
        if self._gradients == "full":
            for parameter in self._parameters.values():
                parameter.grad = None
            self._earlier = {}

    def _wait(self, *, to_the_end: bool) -> BaseException | None:
        """Wait for the buckets that were handed over; return what went wrong first.

        Reduces the others after them, if they are to be: there is nothing else to do here.
        """
        error: BaseException | None = None
        for work in self._works:
            try:
                work.wait()
            except BaseException as caught:
                error = error or caught
        while to_the_end and self._next < len(self._buckets):
            try:
                self._send_next(later=False)
            except BaseException as caught:
                error = error or caught
        return error

    def _give_up(self) -> None:
        """End a backward pass without its other gradients; its local ones are lost."""
        self._wait(to_the_end=False)
        for bucket in self._buckets[self._next :]:
            for unit in bucket:
                if unit.parameter_name in self._arrived:
                    self._arrived[unit.parameter_name].end(stored=False)
        for unit in self._units.values():
            unit.local_gradient = None
        self._runs.end()
        self._forget()

    def report(self) -> BackwardReport:
        """Tell when the gradients of the last backward pass came and were reduced.

        Returns
        -------
        BackwardReport
            A table, for people and notebooks.

        Raises
        ------
        ValueError
            Nothing was recorded: pass ``record=True`` to `FSDP`, and run a backward pass.

        Examples
        --------
        See `BackwardReport`.
        """
        if self._report is None:
            raise ValueError(
                "no backward pass was recorded: make the group's FSDP with record=True, and run one"
            )
        return self._report

    # ---- by hand ----

    def scatter_gradient(self, unit: FSDPShardingUnit, full_gradient: Any) -> Any:
        """Reduce one gradient, store this rank's part in its unit, and return it.

        Parameters
        ----------
        unit : FSDPShardingUnit
            Of the parameter.
        full_gradient : array or torch.Tensor
            Of the parameter's shape and dtype.

        Returns
        -------
        array or torch.Tensor
            ``unit.local_gradient``.

        Raises
        ------
        CollectiveError
            On every rank, where one has no gradient or one that does not fit.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
        >>> hook = FSDPBackwardHook(FSDP(SingleGroup()))
        >>> hook.scatter_gradient(FSDPShardingUnit("w", (2,), "float64", 0), np.ones(2))
        array([1., 1.])
        """
        self._drop_what_was_cut_short()
        self._runs.bind(unit)
        self._runs.reduce_now("scatter_gradient", [self._runs.entry(unit, full_gradient)])
        return unit.local_gradient

    def scatter_multiple(
        self,
        sharding_units: Mapping[str, FSDPShardingUnit],
        full_gradients: Mapping[str, Any],
    ) -> None:
        """Reduce gradients together, and store this rank's parts in their units.

        Parameters
        ----------
        sharding_units : dict of str to FSDPShardingUnit
            By parameter.
        full_gradients : dict of str to array or torch.Tensor
            By parameter, in any order. Nothing is done where either dict is empty or None.

        Raises
        ------
        CollectiveError
            On every rank: a gradient is missing, has no unit, does not fit its unit, differs
            between ranks, or is not finite. All others are stored.
        GradientNamesError
            The names of the two dicts differ on this rank; a `CollectiveError` and a
            `ValueError`. A group of one rank stores nothing. With several ranks the other
            gradients are stored, since those ranks wait for them.

        Examples
        --------
        See `FSDPBackwardHook`.
        """
        if not sharding_units or is_empty("full_gradients", full_gradients):
            return
        check_units(sharding_units)
        entries, unmatched = self._runs.match(sharding_units, full_gradients)
        self._drop_what_was_cut_short()
        self._runs.reduce_now("scatter_multiple", entries, unmatched=unmatched)

    async def scatter_multiple_async(
        self,
        sharding_units: Mapping[str, FSDPShardingUnit],
        full_gradients: Mapping[str, Any],
    ) -> None:
        """Do the work of `scatter_multiple` in a thread, while the event loop goes on.

        Parameters
        ----------
        sharding_units, full_gradients
            As for `scatter_multiple`.

        Raises
        ------
        CollectiveError
            As `scatter_multiple`.

        Notes
        -----
        Calls that overlap take place one after the other, in the order in which they were
        awaited first; that must be the same on all ranks. One that is cancelled takes place all
        the same, since the other ranks wait for it.

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

    # ---- what is there ----

    def accumulate_gradients(
        self,
        sharding_units: Mapping[str, FSDPShardingUnit],
        new_gradients: Mapping[str, Any],
    ) -> None:
        """Add local gradients to those that are there; the first one is copied.

        Parameters
        ----------
        sharding_units : dict of str to FSDPShardingUnit
            By parameter.
        new_gradients : dict of str to array or torch.Tensor
            Of the shape and dtype of the local gradients; units without one are left alone.

        Raises
        ------
        CompatibilityError
            A shape or dtype differs from what is there: nothing was changed.

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
        if not sharding_units or is_empty("new_gradients", new_gradients):
            return
        check_units(sharding_units)
        names = [name for name in sharding_units if new_gradients.get(name) is not None]
        for name in names:
            self._runs.bind(sharding_units[name])
            check_local(sharding_units[name], new_gradients[name])
        there = {name: sharding_units[name].local_gradient for name in names}
        add({name: sum_ for name, sum_ in there.items() if sum_ is not None}, new_gradients)
        for name in names:
            if sharding_units[name].local_gradient is None:
                sharding_units[name].local_gradient = copied(new_gradients[name])

    def clear_gradients(self, sharding_units: Mapping[str, FSDPShardingUnit]) -> None:
        """Fill the local gradients that are there with zeros.

        Parameters
        ----------
        sharding_units : dict of str to FSDPShardingUnit
            By parameter.

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
        found = {n: u.local_gradient for n, u in sharding_units.items()}
        clear({name: array for name, array in found.items() if array is not None})

    def verify_gradients(
        self,
        sharding_units: Mapping[str, FSDPShardingUnit],
        full_gradients: Mapping[str, Any] | None = None,
        *,
        unreduced: Mapping[str, Any] | None = None,
        atol: float = 1e-5,
    ) -> GradientReport:
        """Compare the local gradients with what they should be.

        Parameters
        ----------
        sharding_units : dict of str to FSDPShardingUnit
            By parameter.
        full_gradients : dict of str to array or torch.Tensor, optional
            The reduced full gradients, as far as they are to be compared. No other rank is
            asked.
        unreduced : dict of str to array or torch.Tensor, optional
            This rank's own full gradients, before they were reduced, in the place of
            `full_gradients`: then all ranks must call this, and no rank needs a reduced one.
            Each compares the sum of its part with what the ranks had for it, every element
            with a sign that a hash of its place gives. Sums and means only.
        atol : float, default 1e-5
            How much an element may differ. Pass more where gradients are compressed.

        Returns
        -------
        GradientReport
            True where all is well. NaN never is.

        Raises
        ------
        ValueError
            Both dicts of gradients were passed, `atol` is negative or NaN, or there is nothing
            to compare minima and maxima by. Neither dict, or one that is empty, is well, as
            the specification has it.

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
        if not atol >= 0:
            raise ValueError(f"atol must be 0 or more, got {atol}")
        if unreduced is not None and full_gradients is not None:
            raise ValueError("pass full_gradients or unreduced, not both")
        if sharding_units:
            check_units(sharding_units)
            for unit in sharding_units.values():
                self._runs.bind(unit)
        if unreduced is None:
            if is_empty("full_gradients", full_gradients):
                full_gradients = {}
            return compare(sharding_units or {}, full_gradients or {}, atol)
        is_empty("unreduced", unreduced)
        return compare_sums(self._fsdp, sharding_units or {}, unreduced, atol)

    def close(self) -> None:
        """Take the hooks off the model; closing again does nothing.

        A backward pass that has not ended is given up, and leaves no local gradients. Ranks
        that go on with it hear so as soon as this one reduces something else.

        Examples
        --------
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.fsdp import FSDP, FSDPBackwardHook
        >>> FSDPBackwardHook(FSDP(SingleGroup())).close()
        """
        self._drop_what_was_cut_short()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        with self._lock:
            if self._running:
                self._give_up()
        self._units = {}
        self._parameters = {}
        self._buckets = []
        self._bucket_of = {}
        self._at_once = 0
        self._held.clear()
        self._unsent.clear()
        self._earlier.clear()
        self._taken.clear()
        self._gradients, self._model = "shard", None
