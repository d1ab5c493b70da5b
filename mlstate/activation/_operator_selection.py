"""`select_operators` (deprecated): which operators' outputs to keep within a budget, a knapsack.

Deprecated: the public functions warn, and will be removed with this file.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._common.backend import backend_named
from .._common.budget import parse_budget
from .._common.text import bytes_text, table_html, table_text
from ..errors import CapacityError
from ._backend import ActivationBackend
from ._chain import check_names, freeze_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._common.budget import MemorySize
    from .._types import NDArray

_ROWS = 40
_HEADERS = ["operator", "seconds", "bytes", ""]
_STATES = 1 << 21  # default limit of search states, which bounds time and memory


class OperatorSelection:
    """Operators whose outputs are kept, and operators that are recomputed in the backward pass.

    Deprecated, like `select_operators`, which returns it. It is immutable.

    Parameters
    ----------
    operator_seconds, operator_bytes : ndarray of float64 and of int64, (operators,)
        Time to run each operator, and size of its output.
    budget_bytes : int
        Largest total size of the kept outputs.
    names : sequence of str, (operators,), optional
        Names of the operators. Default: their numbers.
    states : int, optional
        Limit of search states; beyond it, the result is the best choice so far with a bound.

    Attributes
    ----------
    saved, recomputed : tuple
        Names of the operators, or numbers if there are no names, in the given order.
    is_saved : ndarray of bool, (operators,)
        Mask of the saved operators. Read-only.
    seconds : float
        Total time of the recomputed operators.
    bytes : int
        Total size of the saved outputs.
    least_seconds : float
        Lower bound of `seconds` for all choices within the budget. Equal to `seconds` if
        `exact`.
    exact : bool
        Whether no choice is better, up to rounding: one part in 10^12 of all seconds.

    Examples
    --------
    >>> from mlstate.activation import select_operators
    >>> chosen = select_operators([5, 1, 4], [60, 10, 50], 60, names=["mm", "gelu", "norm"])
    >>> chosen.saved, chosen.recomputed
    (('mm',), ('gelu', 'norm'))
    >>> chosen
    <OperatorSelection: 1 of 3 saved, 60 B of 60 B; 5 s recomputed, the least possible>
    """

    def __init__(
        self,
        operator_seconds: NDArray,
        operator_bytes: NDArray,
        budget_bytes: int,
        names: tuple[str, ...] | None = None,
        states: int = 0,
    ) -> None:
        """Select the operators to save, by seconds per byte, within `budget_bytes`.

        `states`: limit on the partial selections that the search keeps; 0: the default. Raises
        ValueError or CapacityError if a cost or the budget is out of range.
        """
        _check_costs(operator_seconds, operator_bytes, budget_bytes)
        search = _KnapsackSearch(operator_seconds, operator_bytes, budget_bytes)
        most_seconds = search.add_items(states or _STATES)  # upper bound of the seconds saved
        # the search leaves out operators of 0 bytes
        self.is_saved: NDArray = search.chosen_items() | (operator_bytes == 0)
        self.is_saved.flags.writeable = False
        self.bytes: int = int(operator_bytes[self.is_saved].sum())
        self.seconds: float = float(operator_seconds[~self.is_saved].sum())
        exact = not most_seconds > search.best.seconds + search.slack
        # seconds of all operators that may be recomputed, minus the most that a choice saves
        least = float(operator_seconds[operator_bytes > 0].sum()) - most_seconds
        self.least_seconds: float = self.seconds if exact else min(max(least, 0.0), self.seconds)
        self.exact: bool = exact
        self.budget_bytes = budget_bytes
        self.operator_seconds = operator_seconds
        self.operator_bytes = operator_bytes
        self._names = names

    def _select_names(self, selection: NDArray) -> tuple[Any, ...]:
        """Return the names of the operators in the mask `selection`, or their numbers."""
        numbers = np.flatnonzero(selection).tolist()
        return tuple(numbers if self._names is None else (self._names[i] for i in numbers))

    @property
    def saved(self) -> tuple[Any, ...]:
        """Operators whose outputs are kept."""
        return self._select_names(self.is_saved)

    @property
    def recomputed(self) -> tuple[Any, ...]:
        """Operators that are recomputed in the backward pass."""
        return self._select_names(~self.is_saved)

    def contexts(self) -> tuple[Any, Any]:
        """Return the two contexts of one checkpointed call in torch.

        Pass the method itself: ``torch.utils.checkpoint.checkpoint(block, x,
        use_reentrant=False, context_fn=selection.contexts)``. Operator names are names of
        overloads, as `profile_operators` returns them. ``"aten.addmm.default"`` means every
        call, ``"aten.addmm.default 2"`` the third call in the checkpointed function.

        Returns
        -------
        tuple of context managers
            Contexts for the forward run and the recomputation; new ones for each call.

        Raises
        ------
        ImportError
            If torch is not installed.
        ValueError
            If the operators have no names.

        Examples
        --------
        >>> import pytest
        >>> torch = pytest.importorskip("torch")
        >>> from torch.utils.checkpoint import checkpoint
        >>> from mlstate.activation import select_operators
        >>> chosen = select_operators([2.0], [64], 64, names=["aten.addmm.default"])
        >>> layer, x = torch.nn.Linear(4, 4), torch.ones(4, 4, requires_grad=True)
        >>> out = checkpoint(layer, x, use_reentrant=False, context_fn=chosen.contexts)
        >>> out.sum().backward()
        """
        if self._names is None:
            raise ValueError("operators without names cannot be distinguished: pass names")
        return backend_named("torch", ActivationBackend).operator_contexts(self.saved)

    def _title(self) -> str:
        """Return one line: saved operators, bytes of the budget, and seconds to recompute."""
        method = (
            "the least possible"
            if self.exact
            else f"of which at least {self.least_seconds:.4g} s are unavoidable"
        )
        return (
            f"{int(self.is_saved.sum()):,} of {len(self.is_saved):,} saved, "
            f"{bytes_text(self.bytes)} of {bytes_text(self.budget_bytes)}; "
            f"{self.seconds:.4g} s recomputed, {method}"
        )

    def _rows(self) -> list[list[str]]:
        """Return one row of texts for each operator, slowest first."""
        order = np.argsort(-self.operator_seconds, kind="stable").tolist()
        return [
            [
                str(i) if self._names is None else self._names[i],
                f"{self.operator_seconds[i]:.4g}",
                bytes_text(int(self.operator_bytes[i])),
                "saved" if self.is_saved[i] else "recomputed",
            ]
            for i in order
        ]

    def report(self) -> str:
        """Return a readable description of the choice.

        Returns
        -------
        str
            One line, and a table of the 40 slowest operators.

        Examples
        --------
        >>> from mlstate.activation import select_operators
        >>> print(select_operators([5, 1], [60, 10], 60, names=["mm", "gelu"]).report())
        1 of 2 saved, 60 B of 60 B; 1 s recomputed, the least possible
        operator  seconds  bytes
        mm        5        60 B   saved
        gelu      1        10 B   recomputed
        """
        return f"{self._title()}\n{table_text(_HEADERS, self._rows(), _ROWS)}"

    def __repr__(self) -> str:
        return f"<OperatorSelection: {self._title()}>"

    def _repr_html_(self) -> str:
        return table_html(self._title(), _HEADERS, self._rows())


def select_operators(
    seconds: Sequence[float] | NDArray,
    bytes: Sequence[int] | NDArray,
    budget_bytes: MemorySize,
    names: Sequence[str] | None = None,
) -> OperatorSelection:
    """Choose the operator outputs to keep so that recomputing the others takes the least time.

    .. deprecated:: 0.1
       Use `plan` on a chain of smaller blocks (``blocks=`` of `Chain.from_torch`), which respects
       a budget for the whole model, or pass a list of operators to torch's
       ``create_selective_checkpoint_contexts``.

    This is the 0/1 knapsack problem. It is solved exactly, with lists of (bytes, seconds) pruned
    by Dantzig's bound. If that needs more than 2,097,152 states, the result is the best choice
    so far, with a bound on a possible improvement.

    Parameters
    ----------
    seconds : sequence of float, (operators,)
        Time to recompute each operator.
    bytes : sequence of int, (operators,)
        Size of each operator's output. Outputs of 0 bytes are always kept.
    budget_bytes : int, float or str
        Largest total size of the kept outputs: bytes, a size such as ``"6GiB"``, or a float up
        to 1: a fraction of the sum of `bytes`.
    names : sequence of str, (operators,), optional
        Names for reports and for torch, see `OperatorSelection.contexts`.

    Returns
    -------
    OperatorSelection
        The choice.

    Raises
    ------
    ValueError
        If the lengths of the arguments differ, seconds are negative or not finite, or bytes or
        the budget are negative.
    CapacityError
        If the sum of all bytes exceeds 62 bits, or the sum of seconds the range of a float.
    TypeError
        If bytes are not integers.

    Notes
    -----
    The search uses at most about 300 MiB of memory. Ctrl-C ends a long search.

    References
    ----------
    G. Nemhauser, Z. Ullmann: "Discrete dynamic programming and capital allocation", 1969.
    G. Dantzig: "Discrete-variable extremum problems", 1957.

    Examples
    --------
    >>> from mlstate.activation import select_operators
    >>> chosen = select_operators([5, 4, 3], [60, 50, 40], 100)
    >>> chosen.saved, chosen.bytes, chosen.seconds, chosen.exact
    ((0, 2), 100, 4.0, True)
    """
    warnings.warn(
        "select_operators is deprecated: use plan on a chain of smaller blocks, or torch's "
        "create_selective_checkpoint_contexts with a list of operators",
        DeprecationWarning,
        stacklevel=2,
    )
    return choose_operators(seconds, bytes, budget_bytes, names)


def choose_operators(
    seconds: Sequence[float] | NDArray,
    bytes: Sequence[int] | NDArray,
    budget_bytes: MemorySize,
    names: Sequence[str] | None,
) -> OperatorSelection:
    """Return the selection of `select_operators`, without its deprecation warning.

    The parameters and errors are the same.
    """
    times = freeze_numbers("seconds", seconds, "float64", each="operator")
    sizes = freeze_numbers("bytes", bytes, "int64", each="operator")
    if len(times) != len(sizes):
        raise ValueError(f"{len(times)} operators have seconds, {len(sizes)} have bytes")
    listed = check_names(names, len(times), "operators")
    budget = parse_budget("budget_bytes", budget_bytes, int(sizes.sum()), "all outputs")
    return OperatorSelection(times, sizes, budget.nbytes, listed)


def _check_costs(seconds: NDArray, sizes: NDArray, budget: int) -> None:
    """Raise unless all costs are finite and not negative, and their sums fit their dtypes.

    `seconds` and `sizes`: of each operator, in seconds and bytes. `budget`: bytes. ValueError for a
    wrong value, CapacityError for one that is too large.
    """
    if budget < 0:
        raise ValueError(f"a budget of {budget} bytes is negative")
    if budget >> 63:
        raise CapacityError("budget_bytes does not fit into 64 bits")
    for i in np.flatnonzero(~(np.isfinite(seconds) & (seconds >= 0)))[:1].tolist():
        raise ValueError(f"seconds[{i}] is {seconds[i]:g}: choose a finite number, at least 0")
    for i in np.flatnonzero(sizes < 0)[:1].tolist():
        raise ValueError(f"bytes[{i}] is {sizes[i]}: expected 0 or more")
    if sum(sizes.tolist()) >> 62:
        raise CapacityError("all bytes together exceed 62 bits")
    if not math.isfinite(sum(seconds.tolist())):
        raise CapacityError("all seconds together exceed the range of a double")


class _Choice(NamedTuple):
    """A choice of items: all of a state (-1: none), and the items from ``start`` to ``end``.

    Items count in the order of the search; ``end`` is excluded.
    """

    seconds: float  # saved by all of them
    state: int
    start: int
    end: int


class _KnapsackSearch:
    """Dynamic programming over lists of states, pruned by Dantzig's bound.

    The items are operators. They are added in order of seconds per byte. A state is a choice among
    the items so far, with the bytes that it needs and the seconds that it saves; no
    state of the list has both more bytes and fewer seconds than another. A state is pruned if it
    cannot beat the best choice, even with a fraction of the first item that does not fit.
    """

    def __init__(self, seconds: NDArray, sizes: NDArray, budget: int) -> None:
        """Sort the operators that fit the budget by seconds per byte, the largest rate first.

        `seconds` and `sizes`: time and bytes of each operator. `budget`: bytes. Operators that need
        no bytes or save no seconds are left out.
        """
        self._count = len(seconds)  # of operators
        self._room = min(budget, int(sizes.sum()))  # bytes
        items = np.flatnonzero((sizes > 0) & (sizes <= self._room) & (seconds > 0))
        order = np.lexsort((items, -sizes[items], -seconds[items] / sizes[items]))
        self._items = items[order]
        # One more item at the end, of 1 byte that saves nothing: `_bounds` needs no special case.
        self._sizes = np.append(sizes[self._items], 1)
        self._seconds = np.append(seconds[self._items], 0.0)
        # sums over the items before each
        self._bytes_before = np.append(0, np.cumsum(self._sizes[:-1]))
        self._seconds_before = np.append(0.0, np.cumsum(self._seconds[:-1]))
        # For each item, and each new state that has it: the number of the state without the item.
        self._parents: list[NDArray] = []
        self.slack = 1e-12 * float(seconds.sum())  # smaller differences are rounding
        self.best = _Choice(-1.0, -1, 0, 0)

    def _bounds(self, sizes: NDArray, seconds: NDArray, start: int) -> tuple[NDArray, ...]:
        """Return how far each state can be filled with the items from `start` on, in their order.

        `sizes`, `seconds`: of each state. The three results are, for each state, the end of the
        items that fit as a whole, the seconds saved with these, and Dantzig's bound: the seconds
        with a fraction of the next item too, in all room that is left.
        """
        reach = self._bytes_before[start] + (self._room - sizes)
        # the last end for which the sum of bytes fits
        end = np.searchsorted(self._bytes_before, reach, "right") - 1
        full_seconds = seconds + (self._seconds_before[end] - self._seconds_before[start])
        fraction = (reach - self._bytes_before[end]) / self._sizes[end]
        return end, full_seconds, full_seconds + fraction * self._seconds[end]

    def add_items(self, limit: int) -> float:
        """Add all items, or as many as `limit` states allow, and set `best`.

        Returns an upper bound of the seconds that any choice can save; `best` reaches it if all
        items were added.
        """
        # the states of the list: their numbers, bytes and seconds
        states, sizes, seconds = np.array([-1]), np.array([0]), np.array([0.0])
        ends, full_seconds, bounds = self._bounds(sizes, seconds, 0)
        self.best = _Choice(float(full_seconds[0]), -1, 0, int(ends[0]))
        state_count = 0
        for item in range(len(self._items)):  # its position in the order of the search
            if not len(states) or state_count + len(states) > limit:
                break
            # rows of the states that have room for the item; each gets a new state with it
            parents = np.flatnonzero(sizes + self._sizes[item] <= self._room)
            sizes = np.append(sizes, sizes[parents] + self._sizes[item])
            seconds = np.append(seconds, seconds[parents] + self._seconds[item])
            ends, full_seconds, bounds = self._bounds(sizes, seconds, item + 1)
            full_seconds = full_seconds[len(states) :]  # of the new states
            if len(full_seconds) and full_seconds.max() > self.best.seconds:
                i = int(full_seconds.argmax())
                parent, end = int(states[parents[i]]), int(ends[len(states) + i])
                self.best = _Choice(float(full_seconds[i]), parent, item, end)
            # Prune by the bound, then states that need more bytes for no more seconds than another.
            # `rows`: the remaining states, as positions among the old states and the new ones.
            rows = np.flatnonzero(bounds > self.best.seconds + self.slack)
            rows = rows[np.lexsort((-seconds[rows], sizes[rows]))]
            most_before = np.maximum.accumulate(np.append(-1.0, seconds[rows]))[:-1]
            rows = rows[seconds[rows] > most_before]
            added = rows[rows >= len(states)] - len(states)  # new states, as indices of `parents`
            self._parents.append(states[parents[added]])
            numbers = np.append(states, np.zeros(len(parents), np.int64))
            numbers[added + len(states)] = np.arange(state_count, state_count + len(added))
            state_count += len(added)
            states, sizes, seconds, bounds = (a[rows] for a in (numbers, sizes, seconds, bounds))
        return float(max([self.best.seconds, *bounds.tolist()]))

    def chosen_items(self) -> NDArray:
        """Return a mask of the operators that the best choice saves.

        States are numbered through all items in order; item ``i`` has those from ``first[i]``,
        and ``_parents[i]`` has their predecessors, or -1 for the empty choice.
        """
        chosen = np.zeros(self._count, np.bool_)
        chosen[self._items[self.best.start : self.best.end]] = True
        first = np.append(0, np.cumsum([len(parents) for parents in self._parents]))
        state = self.best.state
        while state >= 0:
            item = int(np.searchsorted(first, state, "right")) - 1  # that the state added
            chosen[self._items[item]] = True
            state = int(self._parents[item][state - first[item]])
        return chosen
