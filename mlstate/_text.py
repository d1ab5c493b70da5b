"""Numbers, names and tables as text and HTML, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_HTML_ROWS = 50
_COMPARED = 10_000  # about 100 ms
_LISTED = 8


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


def names_hint(name: str, known: Iterable[str], *, listed: bool = True) -> str:
    """Name the known name that is most similar to an unknown one, else the first known ones.

    Of more than 10,000 known names, the first ones are compared. `listed`: whether to list names
    if none is similar; False for a message that lists them already.
    """
    from difflib import get_close_matches

    names = list(dict.fromkeys(known))
    near = get_close_matches(name, names[:_COMPARED], 1)
    if near:
        return f"; did you mean {near[0]!r}?"
    if not listed:
        return ""
    shown = ", ".join(repr(shorten(one, 100)) for one in names[:_LISTED]) or "none"
    hidden = len(names) - _LISTED
    return f"; there are {shown}" + (f" and {hidden:,} more" if hidden > 0 else "")


def sort_steps(steps: Iterable[int | None]) -> list[int | None]:
    """Sort steps by number; unknown ones (None) come last."""
    return sorted(steps, key=lambda step: (step is None, step or 0))


def steps_text(steps: Sequence[int | None], limit: int | None = None) -> str:
    """List steps by number, ``?`` for an unknown one; those beyond `limit` are counted."""
    texts = ["?" if step is None else str(step) for step in sort_steps(steps)[:limit]]
    hidden = len(steps) - len(texts)
    return ", ".join(texts + ([f"{hidden:,} more"] if hidden else [])) or "none"


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
