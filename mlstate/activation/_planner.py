"""`plan`, `pareto`: arguments of the search for schedules within a budget (the core's), results."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from operator import index
from typing import TYPE_CHECKING, Literal

from .. import _core
from .._common.arguments import FLAG, check_flags, check_int
from .._common.report import Shown, Table
from .._common.text import bytes_text, count_text
from ._chain import check_chain
from ._plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .._common.budget import Budget, MemorySize
    from .._types import NDArray
    from ._chain import Chain

_ROWS = 40
_COLUMNS = ["budget [B]", "of plain peak [%]", "time [s]", "over plain time [+.1%]"]
_CLASSES = ("persistent", "any")  # values of `schedules`
# for reports: how the core searched; {} is the number of slots
_METHODS = {
    "bytes": "to the byte",
    "slots": "{} slots of memory",
    "fits": "the first schedule that fits: too tight a budget for {} slots",
}


def _check_arguments(chain: Chain, slots: int | None, offload: bool) -> int:
    """Check the common arguments of `plan` and `pareto`; return the number of slots, 0 for None.

    Raises ValueError if `slots` is below 1, or `offload` is set for a chain without rates, and
    TypeError for arguments of another type.
    """
    check_chain(chain)
    check_flags(offload=offload)
    if offload and chain.offload_bytes_per_second is None:
        raise ValueError(
            "offload: the chain has no rates; give it offload_bytes_per_second and "
            "load_bytes_per_second"
        )
    if slots is None:
        return 0
    return check_int("slots", slots, 1, also=" or None")


@contextmanager
def _errors(chain: Chain, budget: Budget) -> Iterator[None]:
    """Let CapacityErrors of the core show budgets as the caller does, and the head's part."""
    try:
        with budget.errors():
            yield
    except _core.CapacityError as error:
        n, text = chain.blocks, str(error)
        text = text.replace(f"of {n + chain._has_head} blocks", f"of {n} blocks")
        if chain.head_bytes and budget.nbytes < chain._head_peak_bytes:
            text += (
                f"; {budget.text(chain._head_peak_bytes)} of that are for what runs outside of the "
                "blocks (embedding, head, logits, loss), which no plan changes: use a smaller "
                "batch or shorter sequences, or compute logits and loss in chunks"
            )
        error.args = (text,)
        raise


def plan(
    chain: Chain,
    budget_bytes: MemorySize,
    *,
    schedules: Literal["persistent", "any"] = "persistent",
    slots: int | None = None,
    offload: bool = False,
) -> Plan:
    """Find the fastest schedule whose peak memory fits a budget.

    Parameters
    ----------
    chain : Chain
        The costs of the blocks.
    budget_bytes : int, float or str
        Largest peak memory allowed. It includes all memory that the chain describes: input,
        activations, gradients, temporaries, and of a measured model all that is outside of its
        blocks. Bytes, a size such as ``"6GiB"`` or ``"6 GB"``, or a float up to 1: a fraction of
        `Chain.plain_peak_bytes`. If the chain has a head or memory outside of the blocks, it is
        a fraction of the rest, which a plan can change, and these bytes are added.
    schedules : {"persistent", "any"}
        ``"persistent"``: a block's saved memory, or its input kept as a restart point, stays
        until its backward run. ``"any"``: all valid schedules, searched exhaustively if the
        chain has at most 19 blocks and the search at most 1,048,576 states. Longer chains get
        the fastest persistent schedule, and `Plan.exact` is False.
    slots : int, optional
        Divide the budget into this number of slots and round all sizes up to slots: the search
        is faster, the plan slightly slower. Default: plan to the byte, or with 500 slots if
        that would need too much memory (see `Plan.method` and `Plan.exact`).
    offload : bool
        Whether saved memory may be copied to the host and back, at the chain's rates.

    Returns
    -------
    Plan
        The plan, with predicted time and peak memory.

    Raises
    ------
    TypeError
        If an argument has a wrong type.
    CapacityError
        If no schedule fits. `expected` is the smallest sufficient budget in bytes, as a str; the
        message also has it in the unit of `budget_bytes`. Also if the table of blocks and slots
        would exceed 2 GiB.
    ValueError
        If the budget is negative, there are more than 8,192 blocks or 1,048,576 slots, or
        `offload` is set for a chain without rates.
    KeyboardInterrupt
        Within 100 ms after Ctrl-C.

    Notes
    -----
    For n blocks and S slots, the time is O(n³S) and the memory 4n²S bytes. Planning to the byte
    depends on the number of different sums of sizes: see the benchmarks. The GIL is released.
    Long chains use the threads set with `mlstate.threads.set_num_threads`.

    References
    ----------
    O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova: "Optimal checkpointing
    for heterogeneous chains: how to train deep neural networks with limited memory", 2019.

    Examples
    --------
    >>> from mlstate.activation import Chain, plan
    >>> chain = Chain([1] * 4, [2] * 4, [10] * 5, [40] * 4)
    >>> chain.plain_seconds, chain.plain_peak_bytes
    (12.0, 190)
    >>> plan(chain, 120)
    <Plan of 4 blocks: 14 s (+16.7%), peak 120 B of 120 B; 2 kept, 2 recomputed, 0 offloaded>
    >>> plan(chain, 60)
    Traceback (most recent call last):
    mlstate.errors.CapacityError: no persistent schedule of 4 blocks fits a budget of 60 ...
    """
    slot_count = _check_arguments(chain, slots, offload)
    if schedules not in _CLASSES:
        raise ValueError(f"schedules is {schedules!r}: choose one of {', '.join(_CLASSES)}")
    parsed = chain._budget(budget_bytes)
    budget = parsed.nbytes
    with _errors(chain, parsed):
        if schedules == "any":
            return _plan_any(chain, budget, slot_count, offload)
        # `method`: of `_METHODS`. `used_slots`: of the core's search; 0 if it was to the byte
        steps, method, used_slots = _core.plan_make(chain._arrays, budget, slot_count, offload)
    return Plan(
        chain,
        steps,
        budget_bytes=budget,
        schedules=schedules,
        method=_METHODS[method].format(used_slots),
        exact=method == "bytes",
    )


def _plan_any(chain: Chain, budget: int, slots: int, offload: bool) -> Plan:
    """Return the fastest of all schedules within `budget` bytes.

    If that search is too large, it is the fastest persistent schedule. `slots`: of the search for
    persistent schedules; 0: the default. Raises CapacityError if no schedule fits.
    """
    start, method, used_slots = None, "bytes", 0
    with suppress(_core.CapacityError):  # other schedules may need less memory
        start, method, used_slots = _core.plan_make(chain._arrays, budget, slots, offload)
    limit = 0  # the core's default number of states
    steps, optimal, states = _core.search_schedules(chain._arrays, budget, offload, start, limit)
    persistent = f"the fastest persistent schedule, {_METHODS[method].format(used_slots)}"
    return Plan(
        chain,
        steps,
        budget_bytes=budget,
        schedules="any",
        method=f"a search of {states:,} states" if optimal else persistent,
        exact=bool(optimal),
    )


class Pareto(Shown):
    """Trade-off curve between memory budget and time.

    `pareto` returns it. `len`, iteration and indexing give (budget, seconds) pairs.

    Parameters
    ----------
    chain : Chain
        The costs of the blocks.
    slots : int, optional
        See `plan`.
    offload : bool
        See `plan`.

    Attributes
    ----------
    budget_bytes : ndarray of int64, (points,)
        Smallest budget for each time, in increasing order.
    seconds : ndarray of float64, (points,)
        Times, in decreasing order.
    exact : bool
        Whether the points are exact to the byte.

    Examples
    --------
    >>> from mlstate.activation import Chain, pareto
    >>> curve = pareto(Chain([1] * 3, [2] * 3, [10] * 4, [40] * 3))
    >>> list(curve)
    [(80, 12.0), (90, 11.0), (120, 10.0), (150, 9.0)]
    >>> curve.plan(2).predicted_peak_bytes
    120
    """

    def __init__(self, chain: Chain, slots: int | None = None, offload: bool = False) -> None:
        """Compute the least seconds for each budget; the class describes the arguments."""
        slot_count = _check_arguments(chain, slots, offload)
        self.chain = chain
        self.slots = slots
        self.offload = offload
        self.budget_bytes: NDArray
        self.seconds: NDArray
        self.budget_bytes, self.seconds, method, used_slots = _core.plan_pareto(
            chain._arrays, slot_count, offload
        )
        self.budget_bytes.flags.writeable = self.seconds.flags.writeable = False
        self.method: str = _METHODS[method].format(used_slots)
        self.exact: bool = method == "bytes"
        self._slots = used_slots  # of the core's search, also by default; 0 if it was to the byte

    def __len__(self) -> int:
        return len(self.budget_bytes)

    def __getitem__(self, i: int) -> tuple[int, float]:
        return int(self.budget_bytes[i]), float(self.seconds[i])

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return iter(zip(self.budget_bytes.tolist(), self.seconds.tolist(), strict=True))

    def plan(self, i: int) -> Plan:
        """Return the plan of one point.

        Parameters
        ----------
        i : int
            Index of the point; negative indices count from the end.

        Returns
        -------
        Plan
            The result of `plan` for the point's budget.

        Raises
        ------
        IndexError
            If the index is out of range.
        TypeError
            If `i` is not an integer.

        Examples
        --------
        >>> from mlstate.activation import Chain, pareto
        >>> curve = pareto(Chain([1] * 3, [2] * 3, [10] * 4, [40] * 3))
        >>> curve.plan(0)
        <Plan of 3 blocks: 12 s (+33.3%), peak 80 B of 80 B; 1 kept, 2 recomputed, 0 offloaded>
        """
        if isinstance(i, FLAG) or not hasattr(i, "__index__"):
            raise TypeError(f"i must be an int, got {type(i).__name__}")
        number = index(i)
        if not -len(self) <= number < len(self):
            raise IndexError(f"i is {number}: this curve has {count_text(len(self), 'point')}")
        budget = self[number][0]
        return plan(self.chain, budget, slots=self._slots or None, offload=self.offload)

    def _title(self) -> str:
        low, high = self[0][0], self[-1][0]
        points = count_text(len(self), "point")
        return (
            f"{self.chain.blocks:,} blocks: {points} from {bytes_text(low)} to "
            f"{bytes_text(high)}, found {self.method}"
        )

    def _table(self) -> Table:
        """Return one row for each point of the curve.

        Of more than `_ROWS` points, those rows are at about equal distances, with both ends.
        """
        count = len(self)
        rows_shown = list(range(count))
        if count > _ROWS:
            rows_shown = sorted({round(i * (count - 1) / (_ROWS - 1)) for i in range(_ROWS)})
        peak, unplanned_seconds = self.chain.plain_peak_bytes, self.chain.plain_seconds
        rows = []
        for budget, seconds in (self[i] for i in rows_shown):
            share = budget / peak if peak else None
            over = seconds / unplanned_seconds - 1 if unplanned_seconds else None
            rows.append((budget, share, seconds, over))
        return Table(self._title(), _COLUMNS, rows)

    def __repr__(self) -> str:
        return f"<Pareto of {self._title()}>"


def pareto(chain: Chain, *, slots: int | None = None, offload: bool = False) -> Pareto:
    """Compute the fastest time for every budget in one call.

    Parameters
    ----------
    chain : Chain
        The costs of the blocks.
    slots : int, optional
        See `plan`. Points are whole slots of the peak memory without recomputation.
    offload : bool
        Whether saved memory may be copied to the host and back.

    Returns
    -------
    Pareto
        Points from the smallest sufficient budget to the smallest one without recomputation.
        All schedules are persistent.

    Raises
    ------
    CapacityError
        If the table of blocks and slots would exceed 2 GiB.
    TypeError, ValueError
        See `plan`.

    Examples
    --------
    >>> from mlstate.activation import Chain, pareto
    >>> print(pareto(Chain([1] * 3, [2] * 3, [10] * 4, [40] * 3)))
    3 blocks: 4 points from 80 B to 150 B, found to the byte
    budget  of plain peak  time  over plain time
    80 B    53.3%          12 s  +33.3%
    90 B    60.0%          11 s  +22.2%
    120 B   80.0%          10 s  +11.1%
    150 B   100.0%         9 s   +0.0%
    """
    return Pareto(chain, slots, offload)
