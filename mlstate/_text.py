"""Numbers, names and tables as text and HTML, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_HTML_ROWS = 50


def bytes_text(count: int) -> str:
    """Write a number of bytes in a unit that keeps it short."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024 or unit == "GiB":
            break
    return f"{size:.2f} {unit}"


def shorten(name: str, limit: int) -> str:
    """Cut a name in the middle, and write what cannot be printed as an escape."""
    if len(name) > limit:
        name = f"{name[: limit // 2]}…{name[len(name) - limit // 2 + 1 :]}"
    return name if name.isprintable() else repr(name)[1:-1]


def table_text(
    headers: Sequence[str], rows: Sequence[Sequence[str]], limit: int, width: int = 60
) -> str:
    """Align rows under their headers; those beyond `limit` are counted in the last line.

    Cells longer than `width` are cut in the middle.
    """
    shown = [[shorten(cell, width) for cell in row] for row in [headers, *rows[:limit]]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    hidden = len(rows) - limit
    return "\n".join(lines + ([f"… {hidden:,} more"] if hidden > 0 else []))


def table_html(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table; rows beyond the 50th are counted below it."""
    from html import escape  # its tables of entities are slow to load

    def line(tag: str, cells: Sequence[str]) -> str:
        made = (f"<{tag}>{escape(shorten(cell, 600))}</{tag}>" for cell in cells)
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line("td", row) for row in rows[:_HTML_ROWS])
    hidden = len(rows) - _HTML_ROWS
    more = f"<p>… {hidden:,} more</p>" if hidden > 0 else ""
    table = f"<table><thead>{line('th', headers)}</thead><tbody>{body}</tbody></table>"
    style = "<style>.mlstate-table :is(td,th){text-align:left;vertical-align:top}</style>"
    content = f"{style}{table}" if rows else ""
    return f"<div class=mlstate-table><p>{escape(title)}</p>{content}{more}</div>"
