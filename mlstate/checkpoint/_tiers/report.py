"""`TieredState.report`: tier of each unit and traffic, as text and HTML."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from ..._common.set_module import set_module
from ..._common.text import bytes_text, count_text, shorten, table_text
from ..._sharding.layout import Tier
from .._pages.html import fit_page

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROWS = 200  # of a text
_COLOURS = {Tier.HOT: "#d0576b", Tier.WARM: "#e08a2e", Tier.COLD: "#3b82c4"}
_STYLE = (
    ".mlstate-tiers{font:13px/1.5 system-ui,sans-serif}"
    ".mlstate-tiers p{margin:0 0 .3em}"
    ".mlstate-tiers table{border-collapse:collapse;font:inherit;margin:.2em 0 .6em}"
    ".mlstate-tiers :is(td,th){text-align:left!important;padding:1px 1em 1px 0;"
    "font-weight:normal;border:0}"
    ".mlstate-tiers th{opacity:.7}"
    ".mlstate-tiers .r{text-align:right!important;white-space:nowrap}"
    ".mlstate-tiers code{background:none;color:inherit;font:12px ui-monospace,monospace}"
    ".mlstate-tiers s{display:inline-block;height:.75em;text-decoration:none}"
    ".mlstate-tiers u{display:inline-block;width:160px;text-decoration:none;line-height:1;"
    "background:#8882}"
    ".mlstate-tiers summary{cursor:pointer}"
    + "".join(f".mlstate-tiers .{tier}{{background:{c}}}" for tier, c in _COLOURS.items())
)


@set_module("mlstate.checkpoint")
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


@set_module("mlstate.checkpoint")
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


@set_module("mlstate.checkpoint")
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

    def __repr__(self) -> str:
        if not self.units:
            return self.summary
        rows = [_cells(unit) for unit in self.units]
        heads = ("unit", "tier", "bytes", "arrays", "uses", "lately")
        lines = [self.summary, table_text(heads, rows, _ROWS)]
        return "\n".join(lines + [_traffic_text(traffic) for traffic in self.traffic])

    def _repr_html_(self) -> str:
        return tiers_html(self)


def _cells(unit: TierRecord) -> tuple[str, ...]:
    """Return a unit's row of texts, in the columns of the table of `repr`."""
    arrays = ", ".join(unit.arrays)
    size = bytes_text(unit.nbytes)
    return unit.name, str(unit.tier), size, arrays, f"{unit.uses:,}", f"{unit.lately:.1f}"


def _traffic_text(traffic: Traffic) -> str:
    """Return a line about the moves from one tier to another: number, bytes, seconds."""
    count = count_text(traffic.moves, "move")
    return (
        f"{traffic.source} to {traffic.target}: {count}, {bytes_text(traffic.nbytes)} in "
        f"{traffic.seconds:.3f} s"
    )


def _bar(share: float, tier: Tier) -> str:
    """Return an HTML bar of 160 pixels, filled to `share` (0 to 1) in the colour of the tier."""
    return f"<u><s class={tier} style='width:{min(share, 1) * 160:.0f}px'></s></u>"


def _totals(report: TierReport) -> str:
    """Return the HTML table of tiers: units, bytes, budget, and a bar.

    The bar is the used share of the budget, or without a budget of the bytes of the largest tier.
    """
    largest = max((nbytes for nbytes, _ in report.totals.values()), default=0) or 1
    rows = []
    for tier, (nbytes, budget) in report.totals.items():
        unit_count = sum(unit.tier == tier for unit in report.units)
        limit = "no limit" if budget is None else f"of {bytes_text(budget)}"
        share = nbytes / (budget if budget else largest)
        rows.append(
            f"<tr><td>{tier}<td>{_bar(share, tier)}<td class=r>{unit_count:,}"
            f"<td class=r>{bytes_text(nbytes)}<td>{'' if tier == Tier.COLD else limit}"
        )
    heads = "<th>tier<th><th class=r>units<th class=r>bytes<th>budget"
    return f"<table><tr>{heads}{''.join(rows)}</table>"


def _units(units: Sequence[TierRecord], most: int) -> str:
    """Return the foldable HTML table of the `most` units that were used most often lately.

    They are sorted by `lately`, a count with less weight for older uses. A line below counts the
    other units.
    """
    listed = sorted(units, key=lambda unit: -unit.lately)[:most]
    rows = "".join(
        f"<tr><td><code>{escape(shorten(name, 80))}</code>"
        f"<td><s class={tier} style='width:.75em;margin:0 .4em 0 0'></s>{tier}"
        f"<td class=r>{size}<td>{escape(shorten(arrays, 80))}<td class=r>{uses}<td class=r>{lately}"
        for name, tier, size, arrays, uses, lately in map(_cells, listed)
    )
    hidden = len(units) - len(listed)
    more = f"<p>… {hidden:,} more</p>" if hidden else ""
    heads = "<th>unit<th>tier<th class=r>bytes<th>arrays<th class=r>uses<th class=r>lately"
    return (
        f"<details{' open' if len(units) <= 20 else ''}><summary>units, the most used first"
        f"</summary><table><tr>{heads}{rows}</table>{more}</details>"
    )


def tiers_html(report: TierReport) -> str:
    """Return the HTML page of a report: tiers with bars, moves, and as many units as fit.

    The limit is `MOST_BYTES` of the page.
    """
    moved = "".join(f"<p>{_traffic_text(traffic)}</p>" for traffic in report.traffic)

    def make(most: int) -> str:
        """Return the page with at most `most` units."""
        units = _units(report.units, most) if report.units else ""
        return (
            f"<div class=mlstate-tiers><style>{_STYLE}</style><p>{escape(report.summary)}</p>"
            f"{_totals(report)}{moved}{units}</div>"
        )

    return fit_page(make, 160)
