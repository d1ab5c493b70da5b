"""`Plan`: its steps, `simulate`, JSON, `from_strategy`, and its table; `plan` finds one."""

from __future__ import annotations

import json
import sys
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _core
from .._common.arguments import check_int, check_items
from .._common.backend import backend_named
from .._common.report import Shown, Table
from .._common.text import bytes_text
from ._backend import ActivationBackend
from ._chain import Chain, check_chain, parse_json
from ._combinators import check_strategy, name_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from .._common.budget import MemorySize
    from .._types import NDArray
    from ._combinators import CheckpointStrategy

_ROWS = 60
_MOST_PASSES = 1000
_FORMAT = "mlstate.plan"
KINDS = ("forward", "save", "backward", "drop", "offload", "load")  # index: the core's number
_FORWARD, _SAVE, _BACKWARD, _DROP, _OFFLOAD, _LOAD = range(len(KINDS))
_COLUMNS = ["step", "", "before [B]", "peak [B]", "after [B]", "time [s]"]


class Step(NamedTuple):
    """One step of a schedule.

    Attributes
    ----------
    kind : str
        ``"forward"`` (run block `index` and keep only its output), ``"save"`` (run it and
        keep the tensors that its backward run needs), ``"backward"``, ``"drop"`` (free
        activation `index`), ``"offload"`` and ``"load"`` (copy the saved memory of block
        `index` to the host and back).
    index : int
        Number of the block; for ``"drop"``, of the activation.

    Examples
    --------
    >>> from mlstate.activation.records import Step
    >>> Step("drop", 3)
    Step(kind='drop', index=3)
    """

    kind: str
    index: int  # type: ignore[assignment]  # hides tuple.index


class Simulation(NamedTuple):
    """Memory and time of each step of a plan; `Plan.simulate` returns it.

    Attributes
    ----------
    before_bytes, peak_bytes, after_bytes : ndarray of int64, (steps,)
        Memory held before each step, its peak during the step, and memory held after it.
    seconds : ndarray of float64, (steps,)
        Time of each step.

    Examples
    --------
    >>> from mlstate.activation import Chain, plan
    >>> chain = Chain([1, 1], [2, 2], [10, 10, 10], [30, 30])
    >>> plan(chain, 100).simulate().peak_bytes.tolist()
    [40, 70, 90, 60]
    """

    before_bytes: NDArray
    peak_bytes: NDArray
    after_bytes: NDArray
    seconds: NDArray


def _steps_array(steps: Any) -> NDArray:
    """Return steps as a read-only int32 array of shape (steps, 2).

    `steps`: an array of integers of that shape, or pairs of a kind of `KINDS` and an index. The
    core checks whether the schedule is valid; ValueError here is about an unknown kind, an index
    out of range, or a shape. Raises TypeError for other numbers than integers.
    """
    if isinstance(steps, np.ndarray):
        if steps.size and steps.dtype.kind not in "iu":
            raise TypeError(f"steps hold {steps.dtype}: expected integers")
        if steps.size and not 0 <= int(steps.min()) <= int(steps.max()) < 1 << 31:
            raise ValueError(f"steps hold {steps.min()} to {steps.max()}: no such kinds or blocks")
        is_frozen = steps.flags.owndata and not steps.flags.writeable
        # a frozen array, such as of the core, needs no copy
        array = (np.asarray if is_frozen else np.array)(steps, np.int32, order="C")
    else:
        pairs: list[tuple[int, int]] = []
        for kind, block in steps:
            if kind not in KINDS:
                raise ValueError(
                    f"step {len(pairs)}: {kind!r} is not a kind of step, expected one of {KINDS}"
                )
            number = check_int(f"step {len(pairs)}, {kind}: the block", block, -sys.maxsize)
            if not 0 <= number < 1 << 31:
                raise ValueError(f"step {len(pairs)}, {kind} {number}: no such block")
            pairs.append((KINDS.index(kind), number))
        array = np.array(pairs, np.int32).reshape(-1, 2)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"steps have shape {array.shape}: expected (steps, 2)")
    if array.flags.writeable:
        array.flags.writeable = False
    return array


def _with_head(steps: NDArray, chain: Chain) -> NDArray:
    """Return steps of a chain's blocks, and the steps of its head, if it has one.

    The head runs once, after the last block's first run and before activation n is dropped.
    """
    n = check_chain(chain).blocks
    kinds, blocks = steps.T
    runs = np.flatnonzero((kinds <= _SAVE) & (blocks == n - 1))
    if not chain._has_head or not len(runs) or ((kinds != _DROP) & (blocks == n)).any():
        return steps
    at = int(runs[0]) + 1
    while at < len(steps) and (kinds[at] == _OFFLOAD or (kinds[at] == _DROP and blocks[at] != n)):
        at += 1
    return np.insert(steps, at, [[_SAVE, n], [_BACKWARD, n]], axis=0)


def _is_head(steps: NDArray, chain: Chain) -> NDArray:
    """Return for each step whether it is of the head."""
    kinds, blocks = steps.T
    is_head: NDArray = (kinds != _DROP) & (blocks == chain.blocks)
    return is_head


class Plan(Shown):
    """A valid schedule of a chain, with its time and peak memory.

    `plan` and `Pareto.plan` return plans. A plan is immutable.

    Parameters
    ----------
    chain : Chain
        The costs of the blocks.
    steps : iterable of Step, or ndarray of int32, (steps, 2)
        The schedule: pairs of a kind and an index, or their numbers.
    budget_bytes : int, float or str, optional
        Largest peak memory allowed, see `plan`. Default: no limit.
    schedules : str, optional
        The class of schedules that was searched.
    method : str, optional
        The method of the search.
    exact : bool, optional
        Whether no schedule of the class is faster within the budget, to the byte.

    Attributes
    ----------
    predicted_seconds : float
        Total time of all steps.
    predicted_peak_bytes : int
        Largest peak memory of all steps.
    budget_bytes : int or None
        The budget in bytes.

    Raises
    ------
    ValueError
        If the schedule is not valid. The message has the step and its missing input.
    CapacityError
        If the peak memory exceeds the budget.

    Examples
    --------
    >>> from mlstate.activation import Chain, Plan
    >>> chain = Chain([1, 1], [2, 2], [10, 10, 10], [30, 30])
    >>> made = Plan(chain, [("save", 0), ("save", 1), ("backward", 1), ("backward", 0)])
    >>> made.predicted_seconds, made.predicted_peak_bytes
    (6.0, 90)
    """

    def __init__(
        self,
        chain: Chain,
        steps: Iterable[tuple[str, int]] | NDArray,
        *,
        budget_bytes: MemorySize | None = None,
        schedules: str = "any",
        method: str = "given",
        exact: bool = False,
    ) -> None:
        """Simulate the steps; raise if they are not valid or their peak exceeds the budget.

        The class describes the arguments; `schedules`, `method` and `exact` are for reports.
        """
        self.chain = chain
        budget = None if budget_bytes is None else chain._budget(budget_bytes)
        self.budget_bytes: int | None = None if budget is None else budget.nbytes
        self.schedules = schedules
        self.method = method
        self.exact = exact
        all_steps = _with_head(_steps_array(steps), chain)
        self._steps = all_steps[~_is_head(all_steps, chain)]
        self.predicted_seconds: float
        self.predicted_peak_bytes: int
        self.predicted_seconds, self.predicted_peak_bytes = _core.chain_simulate(
            chain._arrays,
            all_steps,
            False,  # not detailed
        )[:2]
        if budget is not None and self.predicted_peak_bytes > budget.nbytes:
            raise _core.CapacityError(
                f"the schedule's peak of {budget.text(self.predicted_peak_bytes)} exceeds the "
                f"budget of {budget.text(budget.nbytes)}"
            )

    @property
    def _all_steps(self) -> NDArray:
        """The steps of the blocks and of the head, as the core runs them."""
        return _with_head(self._steps, self.chain)

    def steps(self) -> list[Step]:
        """Return the steps as a list.

        Returns
        -------
        list of Step
            A new list.

        Examples
        --------
        >>> from mlstate.activation import Chain, plan
        >>> chain = Chain([1, 1], [2, 2], [10, 10, 10], [30, 30])
        >>> for kind, index in plan(chain, 80).steps():
        ...     print(kind, index)
        forward 0
        save 1
        backward 1
        drop 1
        save 0
        backward 0
        """
        return [Step(KINDS[kind], index) for kind, index in self._steps.tolist()]

    def simulate(self) -> Simulation:
        """Simulate the schedule: return memory and time of each step.

        Returns
        -------
        Simulation
            Bytes held before and after each step, its peak memory and its time. What runs after
            the last block counts in the step before it.

        Examples
        --------
        >>> from mlstate.activation import Chain, plan
        >>> chain = Chain([1, 1], [2, 2], [10, 10, 10], [30, 30])
        >>> plan(chain, 80).simulate().after_bytes.tolist()
        [20, 50, 30, 20, 50, 20]
        """
        all_steps = self._all_steps
        before, peak, after, seconds = _core.chain_simulate(self.chain._arrays, all_steps, True)[2:]
        # the head's steps count in the step before them
        starts = np.flatnonzero(~_is_head(all_steps, self.chain))
        return Simulation(
            before[starts],
            np.maximum.reduceat(peak, starts),
            after[np.append(starts[1:], len(after)) - 1],
            np.add.reduceat(seconds, starts),
        )

    @cached_property
    def _forward_runs(self) -> NDArray:
        """Number of forward runs of each block."""
        is_forward = self._steps[:, 0] <= _SAVE  # kinds forward and save
        return np.bincount(self._steps[is_forward, 1], minlength=self.chain.blocks)

    @property
    def kept(self) -> list[int]:
        """Blocks that run forward once, and whose saved memory stays on the device."""
        offloaded = set(self.offloaded)
        runs = self._forward_runs.tolist()
        return [i for i, count in enumerate(runs) if count == 1 and i not in offloaded]

    @property
    def recomputed(self) -> list[int]:
        """Blocks that run forward more than once."""
        return [i for i, count in enumerate(self._forward_runs.tolist()) if count > 1]

    @property
    def offloaded(self) -> list[int]:
        """Blocks whose saved memory is copied to the host."""
        blocks = np.unique(self._steps[self._steps[:, 0] == _OFFLOAD, 1])
        return [int(i) for i in blocks]

    @property
    def overhead(self) -> float:
        """Relative extra time compared to the plain run: 0.2 means 20 % more."""
        unplanned = self.chain.plain_seconds
        return self.predicted_seconds / unplanned - 1 if unplanned else 0.0

    def apply(
        self,
        module: Any = None,
        *,
        blocks: Any = None,
        offload_to: str | os.PathLike[str] | None = None,
        observe: Callable[[str, int], None] | None = None,
    ) -> Any:
        """Run the blocks of a torch model according to this plan.

        Parameters
        ----------
        module : torch.nn.Module or sequence of blocks, optional
            The model. Its class and names do not change, and it is called as before.
        blocks : str or sequence of callables, optional
            The modules of the blocks: a name pattern (``"layers.*"``; ``*`` matches one part of a
            name), or the blocks in order, which may be passed without `module`. Default: the
            children of a Sequential or ModuleList, or of the only one in the model with as many
            children.
        offload_to : path, optional
            A folder for offloaded memory: unnamed files with the size of the saved memory. Default:
            main memory, pinned if the model is on an accelerator.
        observe : callable, optional
            Called with kind and index before each step. A block's backward pass follows directly
            after its step.

        Returns
        -------
        PlannedModel
            A callable that runs the model. Its ``remove()``, or the end of a ``with`` block,
            removes the plan.

        Raises
        ------
        ValueError
            If the number of blocks differs from the plan's, the choice of blocks is ambiguous, or
            the blocks have a plan already. While the model runs: if a block is called out of order
            or after the backward pass, or its input is not the output of the previous block.
        ImportError
            If torch is not installed.
        TypeError
            If `module` and `blocks` are both None, or a block is not callable.
        MLStateError
            While the model runs: if a block changes its input in place, its parameters or buffers
            are changed before its backward pass, recomputed tensors differ from the first run's, or
            there is a second backward pass or ``create_graph=True``.

        Notes
        -----
        Gradients have the same bits as without the plan. Hooks of parameters run once and in the
        same order, and blocks draw the same numbers from torch's generators. Arguments other than
        the previous block's output (masks, tables, flags) are passed unchanged to each run. Each
        run gets a copy of objects that a block may change, such as a KV cache. Buffers that a block
        changes, such as BatchNorm's statistics, and tensors that are plain attributes of its
        modules, such as a router's load counter, are updated once: recomputation uses copies of
        their earlier values. A GradientWarning names tensors in lists and dicts that change, which
        are not restored. With ``torch.no_grad()``, blocks run without the plan.

        The loss may depend on the outputs of any blocks, and the model may stop before its last
        block. Steps of later blocks that the backward pass does not visit are left out.

        With or without a plan, autocast's copies of parameters exist until the end of its ``with``
        block. Recomputation ends after the operator that saved the last tensor, whose time and
        output it costs: an operator may fill a tensor after it saved it.

        With ``torch.compile``, compile the blocks before the plan is applied. In a model that is
        compiled as a whole, the blocks run by the plan but uncompiled, and ``fullgraph=True``
        fails.

        Examples
        --------
        >>> import torch
        >>> from mlstate.activation import Chain, Plan
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> steps = [("forward", 0), ("save", 1), ("backward", 1), ("drop", 1), ("save", 0)]
        >>> chain = Chain([1, 1], [2, 2], [64, 64, 64], [64, 64])
        >>> schedule = Plan(chain, [*steps, ("backward", 0)])
        >>> seen = []
        >>> def observe(kind, block):
        ...     seen.append(f"{kind} {block}")
        >>> planned = schedule.apply(model, observe=observe)
        >>> model(torch.ones(4, 4)).sum().backward()
        >>> seen
        ['forward 0', 'save 1', 'backward 1', 'drop 1', 'save 0', 'backward 0']
        """
        return backend_named("torch", ActivationBackend).apply_plan(
            self, module, blocks=blocks, offload_to=offload_to, observe=observe
        )

    def to_json(self) -> str:
        """Return plan and chain as JSON.

        Returns
        -------
        str
            A JSON object; `from_json` reads it.

        Examples
        --------
        >>> from mlstate.activation import Chain, Plan, plan
        >>> made = plan(Chain([1, 1], [2, 2], [10, 10, 10], [30, 30]), 80)
        >>> Plan.from_json(made.to_json()) == made
        True
        """
        document = {
            "format": _FORMAT,
            "version": 1,
            "chain": self.chain._as_dict(),
            "budget_bytes": self.budget_bytes,
            "schedules": self.schedules,
            "method": self.method,
            "exact": self.exact,
            "steps": [[KINDS[kind], index] for kind, index in self._all_steps.tolist()],
        }
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Create a plan from JSON written by `to_json`; the schedule is simulated again.

        Parameters
        ----------
        text : str or bytes
            A JSON object.

        Returns
        -------
        Plan
            A new plan.

        Raises
        ------
        ValueError
            If the text is not a plan, or its schedule is not valid.
        TypeError
            If `text` is not a str or bytes, or a value has a wrong type.

        Examples
        --------
        >>> from mlstate.activation import Plan
        >>> Plan.from_json("[]")
        Traceback (most recent call last):
        ValueError: a plan is a JSON object, got list
        """
        document = parse_json(text)
        if not isinstance(document, dict):
            raise ValueError(f"a plan is a JSON object, got {type(document).__name__}")
        if document.get("format") != _FORMAT or document.get("version") != 1:
            raise ValueError(
                f"this is {document.get('format')!r}, version {document.get('version')!r}: "
                f"expected {_FORMAT!r}, version 1"
            )
        members = ("budget_bytes", "schedules", "method", "exact")
        options = {name: document[name] for name in members if name in document}
        return cls(Chain._from_dict(document.get("chain")), document.get("steps", ()), **options)

    @classmethod
    def from_recomputed(
        cls,
        chain: Chain,
        blocks: Iterable[int],
        *,
        budget_bytes: MemorySize | None = None,
        method: str = "given blocks",
    ) -> Plan:
        """Return the schedule that recomputes given blocks, each from its own input.

        This is the schedule of ``torch.utils.checkpoint`` for each of these blocks: a block runs
        forward and keeps only its output, and runs once more before its backward run.

        Parameters
        ----------
        chain : Chain
            The costs of the blocks.
        blocks : iterable of int
            Numbers of the blocks, in any order.
        budget_bytes : int, float or str, optional
            Largest peak memory allowed, see `plan`. Default: no limit.
        method : str, optional
            How the blocks were chosen, for reports.

        Returns
        -------
        Plan
            The schedule, without a search: `plan` finds an equally fast or faster one with the
            same peak memory.

        Raises
        ------
        IndexError
            If a block number is out of range.
        TypeError
            If an argument has a wrong type, or `blocks` is a mask; pass ``np.flatnonzero(mask)``.
        ValueError
            If the budget is not finite, or a text that is not a size.
        CapacityError
            If the peak memory exceeds the budget.

        Examples
        --------
        >>> from mlstate.activation import Chain, Plan
        >>> chain = Chain([1, 1], [2, 2], [10, 10, 10], [30, 30])
        >>> Plan.from_recomputed(chain, [0])
        <Plan of 2 blocks: 7 s (+16.7%), peak 70 B; 1 kept, 1 recomputed, 0 offloaded>
        """
        n = check_chain(chain).blocks
        is_recomputed = np.zeros(n, bool)
        for block in check_items("blocks", blocks, "block numbers"):
            if isinstance(block, bool | np.bool_):
                raise TypeError(
                    f"{block} is not a block number: convert a mask with np.flatnonzero(mask)"
                )
            if not hasattr(block, "__index__") or getattr(block, "shape", ()) != ():
                raise TypeError(f"blocks must hold block numbers, got {block!r}")
            if not 0 <= index(block) < n:
                raise IndexError(f"block {block}: this chain has {n}, counted from 0")
            is_recomputed[block] = True
        numbers = np.arange(n, dtype=np.int32)  # of the blocks
        forward_kinds = np.where(is_recomputed, _FORWARD, _SAVE).astype(np.int32)
        forward = np.stack([forward_kinds, numbers], 1)
        # backward: for a recomputed block i, drop its output i + 1 and save i; then backward i.
        # The arrays have a row for each block and a column for each of these three steps.
        kinds = np.broadcast_to(np.array([_DROP, _SAVE, _BACKWARD], np.int32), (n, 3))
        indices = numbers[:, None] + np.array([1, 0, 0], np.int32)
        is_step = is_recomputed[:, None] | np.array([False, False, True])
        backward = np.stack([kinds, indices], 2)[::-1][is_step[::-1]]  # the last block first
        return cls(
            chain,
            np.concatenate([forward, backward]),
            budget_bytes=budget_bytes,
            schedules="given",
            method=method,
        )

    @classmethod
    def from_strategy(
        cls,
        chain: Chain,
        strategy: CheckpointStrategy,
        *,
        budget_bytes: MemorySize | None = None,
        passes: int = 2,
    ) -> Plan:
        """Return the schedule that follows from a strategy's decisions.

        Parameters
        ----------
        chain : Chain
            The costs of the blocks. The strategy receives each block's name, an array with the
            size of its input, and its number, in block order.
        strategy : CheckpointStrategy
            The strategy. It counts these decisions as usual.
        budget_bytes : int, float or str, optional
            Largest peak memory allowed, see `plan`. Default: no limit.
        passes : int, default 2
            Number of forward passes, up to 1,000. The decisions of the last pass are used, because
            `SmartStrategy` mostly collects sizes in the first.

        Returns
        -------
        Plan
            The result of `from_recomputed`.

        Raises
        ------
        TypeError
            If an argument has a wrong type.
        ValueError
            If `passes` is not from 1 to 1,000, or as for `from_recomputed`.
        CapacityError
            If the peak memory exceeds the budget.

        Examples
        --------
        >>> from mlstate.activation import Chain, IntervalStrategy, Plan
        >>> chain = Chain([1] * 4, [2] * 4, [10] * 5, [40] * 4)
        >>> Plan.from_strategy(chain, IntervalStrategy(2)).recomputed
        [0, 2]
        """
        check_chain(chain)
        check_strategy(strategy, "strategy")
        passes = check_int("passes", passes, 1, _MOST_PASSES)
        names, sizes = chain.names, chain.activation_bytes.tolist()
        blocks: list[int] = []
        for _ in range(passes):
            blocks = [
                i
                for i, name in enumerate(names)
                # an array of the activation's size, without memory for it
                if strategy.should_checkpoint(name, np.broadcast_to(np.uint8(0), (sizes[i],)), i)
            ]
        return cls.from_recomputed(
            chain, blocks, budget_bytes=budget_bytes, method=name_of(strategy)
        )

    def __eq__(self, other: object) -> bool:
        """Return whether chain, budget and steps are equal; how they were found does not count."""
        if not isinstance(other, Plan):
            return NotImplemented
        return (
            self.budget_bytes == other.budget_bytes
            and np.array_equal(self._steps, other._steps)
            and self.chain == other.chain
        )

    def __hash__(self) -> int:
        return hash((self.budget_bytes, self._steps.tobytes()))

    def _title(self) -> str:
        """Return one line: blocks, seconds, peak, and what happens to the blocks."""
        budget_text = "" if self.budget_bytes is None else f" of {bytes_text(self.budget_bytes)}"
        return (
            f"{self.chain.blocks:,} blocks: {self.predicted_seconds:.4g} s "
            f"({self.overhead:+.1%}), peak {bytes_text(self.predicted_peak_bytes)}"
            f"{budget_text}; {len(self.kept)} kept, {len(self.recomputed)} recomputed, "
            f"{len(self.offloaded)} offloaded"
        )

    def _table(self) -> Table:
        """Return a row for each step; the title also tells which blocks are not kept, and why."""
        names = self.chain.names
        unplanned = bytes_text(self.chain.plain_peak_bytes)
        lines = [
            self._title(),
            f"without a plan: {self.chain.plain_seconds:.4g} s, peak {unplanned}",
        ]
        for label in ("recomputed", "offloaded"):
            if blocks := getattr(self, label):
                listed = ", ".join(names[i] for i in blocks[:20])
                lines.append(f"{label}: {listed}{', …' if len(blocks) > 20 else ''}")
        lines += [self.chain._outside_text(), self._describe_search()]
        rows = [
            (
                f"{kind} {index}",
                names[index] if kind != "drop" and names[index] != str(index) else "",
                *numbers,
            )
            for (kind, index), *numbers in zip(self.steps(), *self.simulate(), strict=True)
        ]
        return Table(lines, _COLUMNS, rows)

    def report(self) -> str:
        """Return a readable description of the plan and its steps.

        Returns
        -------
        str
            A few lines, and a table with at most 60 steps.

        Examples
        --------
        >>> from mlstate.activation import Chain, plan
        >>> chain = Chain([1, 1], [2, 2], [10, 10, 10], [30, 30])
        >>> print(plan(chain, 80).report().partition("step")[0])
        2 blocks: 7 s (+16.7%), peak 70 B of 80 B; 1 kept, 1 recomputed, 0 offloaded
        without a plan: 6 s, peak 90 B
        recomputed: 0
        the fastest of all persistent schedules within the budget, to the byte
        <BLANKLINE>
        """
        return self._table().text(_ROWS)

    def _describe_search(self) -> str:
        """Return a line about how the schedule was found, and whether it is the fastest."""
        if self.schedules == "given":
            return f"not searched for: the choice of {self.method}"
        if self.exact:
            of = "all" if self.schedules == "any" else f"all {self.schedules}"
            return f"the fastest of {of} schedules within the budget, to the byte"
        return f"found by: {self.method}, {self.schedules} schedules"

    def __repr__(self) -> str:
        return f"<Plan of {self._title()}>"

    def _repr_html_(self) -> str:
        from ._plan_html import plan_html

        return plan_html(self._table(), self)
