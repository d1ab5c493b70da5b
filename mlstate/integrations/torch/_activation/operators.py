"""`profile_operators` (deprecated): cost of each operator; contexts that keep operators' outputs.

Deprecated: the public functions warn, and will be removed with this file.
"""

from __future__ import annotations

import warnings
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...._common.set_module import set_module
from ...._common.text import bytes_text, table_html, table_text
from ....activation._operator_selection import OperatorSelection, choose_operators
from .rng_and_buffers import generator_states
from .tensors import storage_bytes, tensors_in, time_after_work

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from ...._common.budget import MemorySize
    from ...._types import NDArray

_ROWS = 40
_HEADERS = ["operator", "calls", "seconds", "bytes", "can be kept"]


class _Call(NamedTuple):
    """One call of an operator: name with call number, time, and new memory."""

    name: str
    seconds: float
    bytes: int
    can_keep: bool


def _storages(values: object) -> dict[int, int]:
    """Return the bytes of each storage of the strided tensors in nested values, by identity."""
    import torch

    return storage_bytes(t for t in tensors_in(values) if t.layout is torch.strided)


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[object]:
    """Return the arguments that an operator modifies in place, from its schema."""
    places = enumerate(func._schema.arguments)
    return [
        args[i] if i < len(args) else kwargs.get(place.name)
        for i, place in places
        if place.alias_info is not None and place.alias_info.is_write
    ]


def _make_recorder(device: torch.device, examine: bool) -> Any:
    """Return a mode of torch that records each operator in `calls`; `device`: to wait for.

    `examine`: also record new bytes, and which outputs can be kept; without, only times.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import SAC_IGNORED_OPS

    devices = [device] if device.type == "cuda" else []

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.calls: list[_Call] = []
            self._numbers: Counter[str] = Counter()
            self._makers: dict[int, int] = {}  # number of the call that allocated a storage

        def _examine(
            self, func: Any, args: Any, kwargs: Any, out: torch.Tensor
        ) -> tuple[int, bool]:
            """Return the bytes of new memory in `out`, the result of `func`; and if it can be kept.

            It can be kept if it is new memory; a later in-place operator on it revokes this.
            """
            inputs = _storages((args, kwargs))
            fresh = {k: n for k, n in _storages(out).items() if k not in inputs}
            for changed in _storages(_written_arguments(func, args, kwargs)):
                maker = self._makers.get(changed)
                if maker is not None:  # modified later, so it must not be kept
                    self.calls[maker] = self.calls[maker]._replace(can_keep=False)
            self._makers.update(dict.fromkeys(fresh, len(self.calls)))
            return sum(fresh.values()), bool(fresh) and not func._schema.is_mutable

        def __torch_dispatch__(
            self, func: Any, types: object, args: Any = (), kwargs: Any = None
        ) -> Any:
            """Run an operator and record name, seconds, new bytes, and whether it can be kept."""
            kwargs = kwargs or {}
            if func in SAC_IGNORED_OPS:
                return func(*args, **kwargs)
            before = generator_states(devices) if examine else {}
            began = time_after_work(device)
            out = func(*args, **kwargs)
            seconds = time_after_work(device) - began
            new_bytes, can_keep = 0, False
            if examine:
                new_bytes, can_keep = self._examine(func, args, kwargs, out)
                after = generator_states(devices)  # random numbers must be drawn again
                can_keep &= all(torch.equal(before[source], after[source]) for source in after)
            name = str(func)
            self.calls.append(_Call(f"{name} {self._numbers[name]}", seconds, new_bytes, can_keep))
            self._numbers[name] += 1
            return out

    return Recorder()


@set_module("mlstate.integrations.torch")
class OperatorProfile:
    """Time and memory of every operator call in a module's forward run.

    Deprecated, like `profile_operators`, which returns it.

    Parameters
    ----------
    names : sequence of str, (calls,)
        Overload of the operator and number of the call: ``"aten.addmm.default 0"``.
    seconds : sequence of float, (calls,)
        Time of each call.
    bytes : sequence of int, (calls,)
        Memory that each call allocated for its output.
    can_keep : sequence of bool, (calls,)
        Whether the output can be kept: it is new memory that is not modified in place, and the
        call draws no random numbers, which recomputation has to draw again.

    Examples
    --------
    >>> import torch
    >>> from mlstate.integrations.torch import profile_operators
    >>> profile = profile_operators(torch.nn.Linear(4, 8), torch.ones(2, 4))
    >>> profile.names[-1], profile.bytes[-1].item()
    ('aten.addmm.default 0', 64)
    """

    def __init__(self, names: Any, seconds: Any, bytes: Any, can_keep: Any) -> None:
        self.names: tuple[Any, ...] = tuple(names)
        self.seconds: NDArray = np.array(seconds, np.float64)
        self.bytes: NDArray = np.array(bytes, np.int64)
        self.can_keep: NDArray = np.array(can_keep, np.bool_)

    def select(self, budget_bytes: MemorySize, *, by: str = "call") -> OperatorSelection:
        """Choose the outputs to keep within a budget.

        Parameters
        ----------
        budget_bytes : int, float or str
            Limit for all outputs kept by one run of the module, see `select_operators`. A
            fraction refers to the sum of all outputs that can be kept.
        by : {"call", "operator"}
            Choose single calls, or all calls of an operator together. The latter is coarser, but
            also valid for another number of calls. It considers an operator only if every call of
            it can be kept.

        Returns
        -------
        OperatorSelection
            A selection of the outputs that can be kept; pass its `contexts` to
            ``torch.utils.checkpoint``.

        Raises
        ------
        ValueError
            If the budget is negative, or `by` is invalid.

        Examples
        --------
        >>> import torch
        >>> from mlstate.integrations.torch import profile_operators
        >>> profile = profile_operators(torch.nn.Linear(4, 8), torch.ones(2, 4))
        >>> profile.select(64).saved
        ('aten.addmm.default 0',)
        """
        if by not in ("call", "operator"):
            raise ValueError(f"by is {by!r}: choose call or operator")
        numbers = np.flatnonzero(self.can_keep).tolist()
        names = [self.names[i] for i in numbers]
        seconds, sizes = self.seconds[numbers], self.bytes[numbers]
        if by == "call":
            return choose_operators(seconds, sizes, budget_bytes, names)
        operators = [name.rpartition(" ")[0] for name in names]
        fixed = {n.rpartition(" ")[0] for n, can in zip(self.names, self.can_keep, strict=True)
                 if not can}  # fmt: skip
        chosen = [name for name in dict.fromkeys(operators) if name not in fixed]
        which = {name: [i for i, n in enumerate(operators) if n == name] for name in chosen}
        return choose_operators(
            [float(seconds[which[name]].sum()) for name in chosen],
            np.array([sizes[which[name]].sum() for name in chosen], np.int64),
            budget_bytes,
            chosen,
        )

    def _rows(self) -> list[list[str]]:
        """Return texts for each operator: name, calls, seconds, bytes, keepable; slowest first."""
        operators = [name.rpartition(" ")[0] for name in self.names]
        rows = []
        for name in dict.fromkeys(operators):
            which = [i for i, n in enumerate(operators) if n == name]
            keepable = int(self.can_keep[which].sum())
            seconds, size = self.seconds[which].sum(), int(self.bytes[which].sum())
            share = "yes" if keepable == len(which) else f"{keepable} of them" if keepable else "no"
            cells = [name, str(len(which)), f"{seconds:.4g}", bytes_text(size), share]
            rows.append((seconds, cells))
        return [cells for _, cells in sorted(rows, key=lambda row: -row[0])]

    def _title(self) -> str:
        return (
            f"{len(self.names):,} calls of operators: {self.seconds.sum():.4g} s, "
            f"{bytes_text(int(self.bytes.sum()))} of outputs"
        )

    def report(self) -> str:
        """Return a readable description of the operators.

        Returns
        -------
        str
            One line, and a table by operator, slowest first.

        Examples
        --------
        >>> import torch
        >>> from mlstate.integrations.torch import profile_operators
        >>> profile = profile_operators(torch.nn.Linear(4, 8), torch.ones(2, 4))
        >>> "aten.addmm.default" in profile.report()
        True
        """
        return f"{self._title()}\n{table_text(_HEADERS, self._rows(), _ROWS)}"

    def __repr__(self) -> str:
        return f"<OperatorProfile: {self._title()}>"

    def _repr_html_(self) -> str:
        return table_html(self._title(), _HEADERS, self._rows())


@set_module("mlstate.integrations.torch")
def profile_operators(module: Any, sample: Any, *, repeats: int = 5) -> OperatorProfile:
    """Measure every operator of a module's forward run.

    .. deprecated:: 0.1
       Use `Chain.from_torch` with smaller blocks (``blocks=``) to measure and plan parts of a
       module, or ``torch.profiler`` for the times and bytes of operators.

    Parameters
    ----------
    module : torch.nn.Module or callable
        The module to be checkpointed as a whole.
    sample : torch.Tensor or tuple
        Its input; a tuple has several arguments.
    repeats : int
        Number of measured runs, whose medians are used, after a run that examines each call.

    Returns
    -------
    OperatorProfile
        One entry per call, in order, without operators that torch's selective checkpointing
        ignores.

    Raises
    ------
    ValueError
        If `repeats` is not positive, or the module's operators differ between runs.
    ImportError
        If torch has no selective checkpointing (before 2.4).

    Notes
    -----
    The module runs ``repeats + 1`` times and may change its buffers. Random generators are
    restored. Times are wall-clock times, synchronised with the accelerator. Operations on the
    module's result are not recorded: if the result is modified in place, torch refuses to
    recompute the module with its last operator kept.

    Examples
    --------
    >>> import torch
    >>> from mlstate.integrations.torch import profile_operators
    >>> profile = profile_operators(torch.nn.GELU(), torch.ones(8, requires_grad=True))
    >>> profile.names, profile.bytes.tolist(), profile.can_keep.tolist()
    (('aten.gelu.default 0',), [32], [True])
    """
    import torch

    warnings.warn(
        "profile_operators is deprecated: use Chain.from_torch with smaller blocks, or "
        "torch.profiler for the times of operators",
        DeprecationWarning,
        stacklevel=2,
    )
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}: choose at least 1")
    arguments = sample if isinstance(sample, tuple) else (sample,)
    tensors = tensors_in(arguments)
    device = tensors[0].device if tensors else torch.device("cpu")
    runs = []
    devices = [device] if device.type == "cuda" else []
    for number in range(repeats + 1):
        with torch.random.fork_rng(devices), torch.enable_grad():
            recorder = _make_recorder(device, examine=number == 0)
            with recorder:
                module(*arguments)
        runs.append(recorder.calls)
    first = runs[0]
    for calls in runs[1:]:
        if [call.name for call in calls] != [call.name for call in first]:
            raise ValueError("the module calls different operators in different runs")
    seconds = [median(run[i].seconds for run in runs[1:]) for i in range(len(first))]
    return OperatorProfile(
        [call.name for call in first],
        seconds,
        [call.bytes for call in first],
        [call.can_keep for call in first],
    )


def _split_names(names: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return names of operators, whose calls are all saved, and names of single calls.

    A single call has its number after a space: "aten.mm.default 3" is the fourth call of this
    operator.
    """
    kinds, single = set(), set()
    for name in names:
        operator, space, number = name.rpartition(" ")
        if space and number.isdecimal() and operator:
            single.add(name)
        else:
            kinds.add(name)
    return kinds, single


@set_module("mlstate.integrations.torch")
def operator_contexts(saved: Iterable[str]) -> tuple[Any, Any]:
    """Return contexts for a checkpointed call that keeps the outputs of some operators.

    .. deprecated:: 0.1
       Use torch's ``create_selective_checkpoint_contexts`` with a list of operators.

    Parameters
    ----------
    saved : iterable of str
        Overloads of operators, to keep the outputs of all calls, or single calls:
        ``"aten.mm.default"``, ``"aten.mm.default 3"``. The number counts the calls of this
        operator from 0. Names of operators that are not called have no effect.

    Returns
    -------
    tuple of context managers
        The return value of a ``context_fn`` of ``torch.utils.checkpoint.checkpoint``.

    Raises
    ------
    ImportError
        If torch has no selective checkpointing (before 2.4).

    Examples
    --------
    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> from mlstate.integrations.torch import operator_contexts
    >>> layer, x = torch.nn.Linear(4, 4), torch.ones(4, 4, requires_grad=True)
    >>> def contexts():
    ...     return operator_contexts(["aten.addmm.default"])
    >>> checkpoint(layer, x, use_reentrant=False, context_fn=contexts).shape
    torch.Size([4, 4])
    """
    warnings.warn(
        "operator_contexts is deprecated: use torch's create_selective_checkpoint_contexts with a "
        "list of operators",
        DeprecationWarning,
        stacklevel=2,
    )
    return selective_contexts(saved)


def selective_contexts(saved: Iterable[str]) -> tuple[object, object]:
    """Return torch's two contexts that save the results of the operators in `saved`.

    One is for the first run, the other for the recomputation; each counts the calls.
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    kinds, single = _split_names(saved)
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())

    def policy(context: Any, func: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        """Return torch's policy for one operator call: keep its result, or recompute it."""
        name = str(func)
        # Some torch versions call this again in the backward pass.
        count = counts[bool(context.is_recompute)]
        number = count[name]
        count[name] += 1
        is_kept = name in kinds or f"{name} {number}" in single
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[object, object] = create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
        policy
    )
    return contexts
