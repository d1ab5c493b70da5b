"""Choice of operator outputs to keep within a budget; public through `mlstate.activation`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._common.backend import backend_named
from .._common.budget import parse_budget
from .._common.text import bytes_text, table_html, table_text
from ._chain import check_names, freeze_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._common.budget import MemorySize
    from .._types import NDArray

_ROWS = 40
_HEADERS = ["operator", "seconds", "bytes", ""]


class OperatorSelection:
    """Operators whose outputs are kept, and operators that are recomputed in the backward pass.

    `select_operators` returns it. It is immutable.

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
        self.is_saved: NDArray
        self.bytes: int
        self.seconds: float
        self.least_seconds: float
        self.exact: bool
        chosen = _core.choose_operators(operator_seconds, operator_bytes, budget_bytes, states)
        self.is_saved, self.bytes, self.seconds, self.least_seconds, self.exact, _ = chosen
        self.is_saved.flags.writeable = False
        self.budget_bytes = budget_bytes
        self.operator_seconds = operator_seconds
        self.operator_bytes = operator_bytes
        self._names = names

    def _select_names(self, wanted: NDArray) -> tuple[Any, ...]:
        numbers = np.flatnonzero(wanted).tolist()
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
        return backend_named("torch").operator_contexts(self.saved)

    def _title(self) -> str:
        found = (
            "the least possible"
            if self.exact
            else f"of which at least {self.least_seconds:.4g} s are unavoidable"
        )
        return (
            f"{int(self.is_saved.sum()):,} of {len(self.is_saved):,} saved, "
            f"{bytes_text(self.bytes)} of {bytes_text(self.budget_bytes)}; "
            f"{self.seconds:.4g} s recomputed, {found}"
        )

    def _rows(self) -> list[list[str]]:
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
    The search uses at most 100 MiB of memory. The GIL is released, and Ctrl-C ends a long search.

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
    times = freeze_numbers("seconds", seconds, "float64", each="operator")
    sizes = freeze_numbers("bytes", bytes, "int64", each="operator")
    if len(times) != len(sizes):
        raise ValueError(f"{len(times)} operators have seconds, {len(sizes)} have bytes")
    listed = check_names(names, len(times), "operators")
    budget = parse_budget("budget_bytes", budget_bytes, int(sizes.sum()), "all outputs")
    return OperatorSelection(times, sizes, budget.nbytes, listed)
