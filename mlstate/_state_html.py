"""What a person sees of a state dict: a few lines of text, or a tree that unfolds."""

from __future__ import annotations

from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from . import _core
from ._dtypes import label_of
from ._text import bytes_text, shorten

if TYPE_CHECKING:
    from ._state_dict import StateDict

Row: TypeAlias = tuple[int, str, int, int, str, tuple[int, ...] | None, int, bool]

FIRST, LAST = 15, 3  # lines of a long text
ROWS = 360  # of a large tree
CHILDREN = (12, 60)  # of one node; more where few rows are needed for all
MOST_BYTES = 30_000
# What arrays raise when asked for what they lack: sparse, nested and lazy tensors of torch, and
# whatever went round the checks.  They are shown all the same.
UNREADABLE = (AttributeError, BufferError, RuntimeError, TypeError, ValueError)

# Colours are those around: dark and light themes need no rules of their own.
_STYLE = """
.mlstate{font:13px/1.5 system-ui,sans-serif}
.mlstate div,.mlstate summary{white-space:nowrap}
.mlstate details>*{margin-left:1.2em}
.mlstate details>summary{margin-left:0;cursor:pointer}
.mlstate p,.mlstate div{margin:0 0 0 1em}
.mlstate details>div{margin-left:2.2em}
.mlstate b{font:12px ui-monospace,monospace}
.mlstate i{font-style:normal;opacity:.65;margin-left:1em}
"""


def _count(count: int) -> str:
    return f"{count:,} tensor{'' if count == 1 else 's'}"


def _title(state: StateDict) -> str:
    try:
        size = bytes_text(state.nbytes)
    except UNREADABLE:
        size = "unknown size"
    return ", ".join([f"{type(state).__name__}: {_count(len(state))}", size, *state._about()])


def _facts(array: Any) -> tuple[str, str]:
    """Dtype and shape as an array says them."""
    said = getattr(array, "dtype", type(array).__name__)
    dtype = label_of(said) or str(said).removeprefix("torch.")
    try:
        return dtype, str(tuple(array.shape))
    except UNREADABLE:
        return dtype, ""


def state_repr(state: StateDict) -> str:
    """Write the first tensors, the last ones, and how many there are between."""
    items = dict.copy(state).items()  # in one step: other threads may change the state
    if len(items) <= FIRST + LAST + 1:
        first, last = list(items), []
    else:
        first = list(islice(items, FIRST))
        last = list(islice(reversed(items), LAST))[::-1]
    rows = [(shorten(str(name), 60), *_facts(array)) for name, array in first + last]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"  {n:{widths[0]}}  {d:{widths[1]}}  {s}".rstrip() for n, d, s in rows]
    if last:
        lines.insert(FIRST, f"  … {len(items) - FIRST - LAST:,} more")
    return "\n".join([_title(state), *lines])


def _line(row: Row) -> str:
    """Name and facts of a row."""
    _, name, count, nbytes, dtype, shape, hidden, _ = row
    if hidden:
        return f"… {hidden:,} more<i>{_count(count)}, {bytes_text(nbytes)}</i>"
    label = f"<b>{escape(shorten(name, 64)) or '&nbsp;'}</b>"
    if count == 1:
        return f"{label}<i>{escape(dtype)} {shape}</i>"
    itself = "" if shape is None else f"; itself {shape}"  # a tensor that others lie under
    return f"{label}<i>{_count(count)}, {bytes_text(nbytes)}, {escape(dtype)}{itself}</i>"


def _outline(state: StateDict, most: int) -> list[Row]:
    """Choose the rows: deep trees before broad ones."""
    few, many = CHILDREN
    rows = _core.state_outline(state, most, few)
    return rows if len(rows) > most // 3 else _core.state_outline(state, most, many)


def _tree(rows: list[Row]) -> str:
    """Nest the rows, which come in pre-order."""
    parts: list[str] = []
    depth = 1  # of the rows to come; one <details> is open for each level above
    top = sum(row[0] == 1 for row in rows)
    for row in rows:
        parts.append("</details>" * (depth - row[0]))
        depth = row[0]
        if row[-1]:
            unfolded = " open" if depth == 1 and top <= 3 else ""
            parts.append(f"<details{unfolded}><summary>{_line(row)}</summary>")
            depth += 1
        else:
            parts.append(f"<div>{_line(row)}</div>")
    return "".join(parts) + "</details>" * (depth - 1)


def state_html(state: StateDict) -> str:
    """Write the tree of names, cut down to a page whatever the size of the state."""
    title = f"<div class=mlstate><style>{_STYLE}</style><p>{escape(_title(state))}</p>"
    rows = ROWS
    while True:
        try:
            page = f"{title}{_tree(_outline(state, rows))}</div>"
        except UNREADABLE:
            return f"<pre>{escape(state_repr(state))}</pre>"
        if rows <= 1 or len(page.encode()) < MOST_BYTES:
            return page
        rows //= 2  # names that are escaped character by character
