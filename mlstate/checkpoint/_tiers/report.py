"""`TieredState.report`: tier of each unit and traffic, and their text."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..._common.report import Table
from ..._common.set_module import set_module
from ..._common.text import bytes_text, count_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..._sharding.layout import Tier

_ROWS = 200  # of a text
_COLUMNS = ["unit", "tier", "bytes [B]", "arrays", "uses [n]", "lately [.1f]"]


@set_module("mlstate.checkpoint.records")
class TierRecord(NamedTuple):
    """One unit of a `TierReport`.

    Attributes
    ----------
    name : str
        The parameter's name.
    tier : Tier
        Its current tier.
    nbytes : int
        Bytes of all its arrays.
    arrays : list of str
        ``"parameter"`` and the names of its states.
    uses : int
        Number of uses.
    lately : float
        Number of uses with decay: each rebalance halves it.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import TieredState
    >>> with TieredState({"w": np.ones(2)}, {}, tempfile.mkdtemp() + "/tiers") as tiers:
    ...     tiers.report().units[0].nbytes
    16
    """

    name: str
    tier: Tier
    nbytes: int
    arrays: list[str]
    uses: int
    lately: float


@set_module("mlstate.checkpoint.records")
class Traffic(NamedTuple):
    """Totals of all moves from one tier to another.

    Attributes
    ----------
    source, target : Tier
        The two tiers.
    moves : int
        Number of moves.
    nbytes : int
        Bytes of all moves.
    seconds : float
        Duration of all moves.
    """

    source: Tier
    target: Tier
    moves: int
    nbytes: int
    seconds: float


@set_module("mlstate.checkpoint.records")
class TierReport:
    """Tiers, uses and moves of all units; see `TieredState.report`.

    Attributes
    ----------
    units : list of TierRecord
        One record for each unit, in the order of their addition.
    totals : dict of Tier to (int, int or None)
        Bytes and budget of each tier.
    traffic : list of Traffic
        Totals of the moves so far, one for each pair of tiers.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import TieredState
    >>> folder = tempfile.mkdtemp() + "/tiers"
    >>> with TieredState({"w": np.ones(2)}, {}, folder, warm_budget_bytes=64) as tiers:
    ...     report = tiers.report()
    >>> report.totals["warm"], report.traffic
    ((16, 64), [])
    """

    __slots__ = ("totals", "traffic", "units")

    def __init__(
        self,
        units: list[TierRecord],
        totals: dict[Tier, tuple[int, int | None]],
        traffic: list[Traffic],
    ) -> None:
        """Keep the figures that the class describes: units, totals by tier, and traffic."""
        self.units: list[TierRecord] = units
        self.totals: dict[Tier, tuple[int, int | None]] = totals
        self.traffic: list[Traffic] = traffic

    @property
    def summary(self) -> str:
        """One line with the number of units and bytes in each tier."""
        count = len(self.units)
        size = sum(unit.nbytes for unit in self.units)
        head = f"TieredState: {count_text(count, 'unit')}, {bytes_text(size)}"
        tiers = []
        for tier, (nbytes, budget) in self.totals.items():
            unit_count = sum(unit.tier == tier for unit in self.units)
            limit = "" if budget is None else f" of {bytes_text(budget)}"
            if unit_count:
                tiers.append(f"{unit_count:,} {tier} ({bytes_text(nbytes)}{limit})")
        return f"{head}: {', '.join(tiers)}" if tiers else head

    def _moves(self) -> list[str]:
        """Return a line for each entry of `traffic`: number of moves, bytes, seconds."""
        return [
            f"{each.source} to {each.target}: {count_text(each.moves, 'move')}, "
            f"{bytes_text(each.nbytes)} in {each.seconds:.3f} s"
            for each in self.traffic
        ]

    def _table(self, units: Sequence[TierRecord]) -> Table:
        """Return a row for each of `units`."""
        rows = [
            (name, str(tier), nbytes, ", ".join(arrays), uses, lately)
            for name, tier, nbytes, arrays, uses, lately in units
        ]
        return Table("", _COLUMNS, rows)

    def __repr__(self) -> str:
        units = [self._table(self.units).text(_ROWS)] if self.units else []
        return "\n".join([self.summary, *units, *self._moves()])

    def _repr_html_(self) -> str:
        from .._pages.html import tiers_html

        return tiers_html(self)
