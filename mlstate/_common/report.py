"""`Table`: titled rows of values as text, as HTML and as JSON; `Shown`: classes shown as one."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any

from .text import bytes_text, printable, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# How a number becomes text, by the unit of its column; any other unit is a format, such as ".2f".
_UNITS: dict[str, Callable[[Any], str]] = {
    "": str,
    "B": bytes_text,
    "n": "{:,}".format,  # a count
    "s": "{:.4g} s".format,
    "ms": lambda seconds: f"{seconds * 1e3:.2f} ms",
    "%": "{:.1%}".format,
}

_TEXT_ROWS, _HTML_ROWS, _OPEN_ROWS = 40, 100, 20
_TITLE, _HEADER, _CELL, _FOLDED_CELL = 600, 20, 600, 120  # characters in HTML
# Colours are inherited, for dark and light themes. Jupyter's own alignment is more specific.
TABLE_STYLE = (
    ".mlstate-table table{margin:.2em 0 .6em;border-collapse:collapse}"
    ".mlstate-table caption{caption-side:top;text-align:left;min-width:36em;padding:0 0 .4em;"
    "color:inherit}"
    ".mlstate-table>details>table{min-width:36em}"
    ".mlstate-table :is(td,th){text-align:left!important;vertical-align:top;"
    "padding:2px 1.2em 2px 0}"
    ".mlstate-table .r{text-align:right!important;white-space:nowrap;"
    "font-variant-numeric:tabular-nums}"
)


class Table:
    """A title, and rows of values in columns; it becomes text, HTML or JSON.

    A column is a header, with the unit of its numbers in brackets, such as ``"size [B]"``. A str
    stays as it is, and None is an empty text.
    """

    __slots__ = ("_units", "collapse", "headers", "lines", "rows", "total")

    def __init__(
        self,
        title: str | Sequence[str],
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        *,
        collapse: bool = False,
        total: int | None = None,
    ) -> None:
        """Set the title, the columns and the rows.

        `title`: its line, or lines. `collapse`: HTML merges rows that differ only in their first
        cell. `total`: number of all rows, if `rows` lacks the last.
        """
        self.lines = [title] if isinstance(title, str) else [*title]
        self.headers, self._units = zip(*map(_header_and_unit, columns), strict=True)
        self.rows, self.collapse = rows, collapse
        self.total = len(rows) if total is None else total

    def texts(self, limit: int | None = None) -> list[list[str]]:
        """Return the texts of the first `limit` rows; None: of all."""
        return [[*map(_cell, row, self._units)] for row in self.rows[:limit]]

    def _numeric(self) -> list[bool]:
        """Return which columns have only numbers and marks for a missing one.

        The first column has names.
        """
        columns = (
            [value for value in column if value not in (None, "", "-", "?")]
            for column in zip(*self.rows, strict=True)
        )
        return [
            place > 0 and len(values) > 0 and all(isinstance(value, Real) for value in values)
            for place, values in enumerate(columns)
        ]

    def text(self, limit: int = _TEXT_ROWS, width: int = 60, *, right_numbers: bool = False) -> str:
        """Return the title, and at most `limit` rows aligned under their headers.

        The last line counts the other rows. Cells longer than `width` are shortened in the middle.
        `right_numbers`: columns of numbers are right-aligned.
        """
        lines = [printable(line) for line in self.lines if line]
        if self.total:
            texts = [[*self.headers], *self.texts(limit)]
            cells = [[shorten(text, width) for text in row] for row in texts]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            aligns = [">" if n and right_numbers else "<" for n in self._numeric()]
            forms = [f"{{:{align}{width}}}" for align, width in zip(aligns, widths, strict=True)]
            lines += ["  ".join(forms).format(*row).rstrip() for row in cells]
        if self.total > limit:
            lines.append(f"… {self.total - limit:,} more")
        return "\n".join(lines)

    def data(self, **names: str) -> list[dict[str, Any]]:
        """Return the rows as JSON values by header; `names`: other names of columns, by header."""
        keys = [names.get(header, header) for header in self.headers]
        return [dict(zip(keys, row, strict=True)) for row in self.rows]

    def html(self, *, style: bool = True, limit: int = _HTML_ROWS) -> str:
        """Return the title and at most `limit` rows as HTML; the other rows are only counted.

        Long titles and cells are shortened, and unprintable characters in them escaped. Columns of
        numbers are right-aligned, except the first, which has names. Rows after the first 20 are
        folded. With `style` false, no row is, and the page must already have the rules.
        """
        from html import escape  # slow to import because of its entity tables

        texts, hidden = self.texts(None if self.collapse else limit), self.total - limit
        if self.collapse:
            texts = _collapse(texts)
            texts, hidden = texts[:limit], len(texts) - limit
        is_numeric = self._numeric()

        def line(tag: str, cells: Sequence[str]) -> str:
            """Return a row of HTML cells; `tag`: td or th."""
            html_cells = (
                f"<{tag}{' class=r' * right}>{escape(shorten(cell, _CELL))}</{tag}>"
                for cell, right in zip(cells, is_numeric, strict=True)
            )
            return f"<tr>{''.join(html_cells)}</tr>"

        title = escape(shorten("; ".join(filter(None, self.lines)), _TITLE))
        rules = f"<style>{TABLE_STYLE}</style>" if style else ""
        more = f"<p>… {hidden:,} more</p>" if hidden > 0 else ""
        if not texts:
            return f"<div class=mlstate-table>{rules}<p>{title}</p>{more}</div>"
        headers = [shorten(header, _HEADER) for header in self.headers]
        head = f"<thead>{line('th', headers)}</thead>" if any(headers) else ""
        if style and len(texts) > _OPEN_ROWS:
            folded = "".join(
                line("td", [shorten(cell, _FOLDED_CELL) for cell in row])
                for row in texts[_OPEN_ROWS:]
            )
            summary = f"<summary>{len(texts) - _OPEN_ROWS} more</summary>"
            more = f"<details>{summary}<table>{head}<tbody>{folded}</tbody></table></details>{more}"
            texts = texts[:_OPEN_ROWS]
        body = "".join(line("td", row) for row in texts)
        caption = f"<caption>{title}</caption>" if title else ""
        table = f"<table>{caption}{head}<tbody>{body}</tbody></table>"
        return f"<div class=mlstate-table>{rules}{table}{more}</div>"


def _header_and_unit(column: str) -> tuple[str, str]:
    header, bracket, unit = column.rpartition(" [")
    return (header, unit.removesuffix("]")) if bracket else (column, "")


def _cell(value: Any, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return _UNITS[unit](value) if unit in _UNITS else format(value, unit)


def _collapse(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return rows, with one row for three or more neighbours that differ only in the first cell.

    The first cell of that row has the first and the last of their first cells, and their number.
    """
    from itertools import groupby

    merged: list[list[str]] = []
    for cells, group in groupby(rows, lambda row: row[1:]):
        names = [row[0] for row in group]
        if len(names) > 2:
            names = [f"{shorten(names[0], 290)} … {shorten(names[-1], 290)} ({len(names):,} alike)"]
        merged += [[name, *cells] for name in names]
    return merged


class Shown:
    """A class that `repr` shows as its `_title`, and `str` and notebooks as its `_table`."""

    __slots__ = ()
    if TYPE_CHECKING:

        def _title(self) -> str:
            """Return one line, without the name of the class."""

        def _table(self) -> Table:
            """Return the title and all rows."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._title()}>"

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()
