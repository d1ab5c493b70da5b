"""Text and notebook view of a state dict: a few lines, or a tree that unfolds."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, TypeAlias

from .. import _core
from .._common.dtypes import label_of
from .._common.text import bytes_text, count_text, number_order, shorten
from ._preview import Leaf, Node, Row, preview

if TYPE_CHECKING:
    from .._types import Array
    from ._state_dict import StateDict

Kind: TypeAlias = tuple[str, tuple[tuple[str, "Kind"], ...]]  # dtype and shape; children

FIRST, LAST = 15, 3  # lines of a long text
ROWS = 360  # of a large tree
CHILDREN = (12, 60)  # of one node; the second if few rows suffice for the whole tree
MOST_BYTES = 30_000
MOST_TENSORS, MOST_PARTS = 20_000, 40  # limits of a state whose hidden rows can be opened
# Errors of arrays that lack a queried attribute: sparse, nested and lazy tensors of torch, and
# values that bypassed the type check. Such arrays are shown without that attribute.
UNREADABLE = (AttributeError, BufferError, RuntimeError, TypeError, ValueError)

# Colours are inherited, so dark and light themes need no extra rules.
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


def _title(state: StateDict) -> str:
    """Return one line: class, number of tensors, bytes, and attributes of the class."""
    try:
        size = bytes_text(state.nbytes)
    except UNREADABLE:
        size = "unknown size"
    return ", ".join(
        [f"{type(state).__name__}: {count_text(len(state), 'tensor')}", size, *state._about()]
    )


def _dtype_and_shape(array: Array) -> tuple[str, str]:
    """Return the texts of an array's dtype and shape; "" for an unreadable shape."""
    dtype_value = getattr(array, "dtype", type(array).__name__)
    dtype = label_of(dtype_value) or str(dtype_value).removeprefix("torch.")
    try:
        return dtype, str(tuple(array.shape))
    except UNREADABLE:
        return dtype, ""


def state_repr(state: StateDict) -> str:
    """Return the text of a state: its first and last tensors, and the number between them.

    Names are sorted by the numbers in them.
    """
    copied = dict.copy(state)  # in one step: other threads may change the state
    items = sorted(copied.items(), key=lambda item: number_order(str(item[0])))
    is_long = len(items) > FIRST + LAST + 1  # a line that counts one tensor would save nothing
    first, last = (items[:FIRST], items[-LAST:]) if is_long else (items, [])
    rows = [(shorten(str(name), 60), *_dtype_and_shape(array)) for name, array in first + last]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"  {name:{widths[0]}}  {dtype:{widths[1]}}  {shape}".rstrip()
        for name, dtype, shape in rows
    ]
    if last:
        lines.insert(FIRST, f"  … {len(items) - FIRST - LAST:,} more")
    return "\n".join([_title(state), *lines])


def _line(row: Row) -> str:
    """Return the HTML of a row of the tree: name, dtype and shape, or the totals of a layer.

    A row of several nodes has their number and totals.
    """
    leaves = row.leaves
    sums = f"{count_text(len(leaves), 'tensor')}, {bytes_text(sum(leaf.nbytes for leaf in leaves))}"
    if len(row.nodes) > 1:
        return f"… {len(row.nodes):,} more<i>{sums}</i>"
    [node] = row.nodes
    # a single tensor is shown with the rest of its name
    name = leaves[0].name[node.end - len(node.segment) :] if len(leaves) == 1 else node.segment
    label = f"<b>{escape(shorten(name, 64)) or '&nbsp;'}</b>"
    dtypes = {leaf.dtype for leaf in leaves}
    dtype = escape(dtypes.pop() if len(dtypes) == 1 else "mixed")
    if len(leaves) == 1:
        return f"{label}<i>{dtype} {leaves[0].shape}</i>"
    # a tensor whose name is also a prefix
    itself = f"; itself {tensor.shape}" if (tensor := node.own) else ""
    return f"{label}<i>{sums}, {dtype}{itself}</i>"


def _rows(root: Node, most: int) -> list[Row]:
    """Return the rows of the tree, at most `most`.

    Few children of each node are shown if these make more than a third of `most` rows, else many.
    """
    few, many = CHILDREN
    rows = preview(root, most, few)
    return rows if len(rows) > most // 3 else preview(root, most, many)


def _kind(node: Node) -> Kind:
    """Return dtypes and shapes at and below a node, and the names below it.

    Layers that differ only in their own names have equal kinds.
    """
    tensor = node.own
    facts = f"{escape(tensor.dtype)} {tensor.shape}" if tensor else ""
    return facts, tuple((child.segment, _kind(child)) for child in node.children)


def _count_tensors(kind: Kind) -> int:
    """Return the number of tensors at and below a node of this kind."""
    return bool(kind[0]) + sum(_count_tensors(child) for _, child in kind[1])


class _Opener:
    """Writes the rows that a page hides, up to a size; equal neighbours share one row."""

    def __init__(self, room: int) -> None:
        self.room = room  # bytes left

    def rows(self, children: tuple[tuple[str, Kind], ...]) -> str:
        """Return the HTML rows of a node's children that still fit.

        `children`: name and kind of each. Equal neighbours share a row; the last row counts the
        rest.
        """
        groups: list[tuple[list[str], Kind]] = []  # names of equal neighbours, and their kind
        for name, kind in children:
            if groups and groups[-1][1] == kind:
                groups[-1][0].append(name)
            else:
                groups.append(([name], kind))
        parts: list[str] = []
        left = len(children)
        for names, kind in groups:
            row = self._group_row(names, kind)
            if not row:
                parts.append(f"<div>… {left:,} more</div>")
                break
            parts.append(row)
            left -= len(names)
        return "".join(parts)

    def _group_row(self, names: list[str], kind: Kind) -> str:
        """Return the HTML row of neighbours of one kind, and the rows below; "" if it does not fit.

        `names`: of the neighbours. Its bytes are taken from `room`, also if it does not fit.
        """
        ends = [names[0]] if len(names) == 1 else [names[0], names[-1]]
        # A layer of one tensor is shown as this tensor, with the rest of its name.
        while not kind[0] and len(kind[1]) == 1 and _count_tensors(kind) == 1:
            [(name, kind)] = kind[1]
            ends = [f"{end}.{name}" for end in ends]
        facts, children = kind
        label = " … ".join(escape(shorten(end, 64)) or "&nbsp;" for end in ends)
        about = facts or count_text(_count_tensors(kind), "tensor")
        if len(names) > 1:
            about = f"{len(names):,} alike, {about} each"
        row = f"<b>{label}</b><i>{about}</i>"
        self.room -= len(row.encode()) + 60  # the tags around it
        if self.room < 0:
            return ""
        if not children:
            return f"<div>{row}</div>"
        return f"<details><summary>{row}</summary>{self.rows(children)}</details>"


def _tree(rows: list[Row], opener: _Opener | None) -> str:
    """Return the nested HTML of `rows`, which are in pre-order.

    `opener`: writes the rows that the page hides; None: these cannot be opened.
    """
    parts: list[str] = []
    depth = 1  # of the next row; one <details> is open for each level above
    top = sum(row.depth == 1 for row in rows)
    for row in rows:
        parts.append("</details>" * (depth - row.depth))
        depth = row.depth
        if row.below:
            unfolded = " open" if depth == 1 and top <= 3 else ""
            parts.append(f"<details{unfolded}><summary>{_line(row)}</summary>")
            depth += 1
        elif opener and len(row.leaves) > 1:
            nodes = row.nodes if len(row.nodes) > 1 else row.nodes[0].children
            inner = opener.rows(tuple((node.segment, _kind(node)) for node in nodes))
            parts.append(f"<details class=more><summary>{_line(row)}</summary>{inner}</details>")
        else:
            parts.append(f"<div>{_line(row)}</div>")
    return "".join(parts) + "</details>" * (depth - 1)


def state_html(state: StateDict) -> str:
    """Return the tree of names as HTML, of at most `MOST_BYTES`, for a state of any size.

    Hidden rows can be unfolded as far as space is left, except of states with very many tensors or
    very long names. If the metadata of an array cannot be read, return the text of `state_repr`.
    """
    title = f"<div class=mlstate><style>{_STYLE}</style><p>{escape(_title(state))}</p>"
    try:
        leaves = [Leaf(*metadata) for metadata in _core.state_metadata(state)]
        leaves.sort(key=lambda leaf: number_order(leaf.name))
    except UNREADABLE:
        return f"<pre>{escape(state_repr(state))}</pre>"
    root = Node("", -1, leaves)
    most = ROWS
    while True:
        rows = _rows(root, most)
        page = f"{title}{_tree(rows, None)}</div>"
        size = len(page.encode())
        if most <= 1 or size < MOST_BYTES:
            break
        most //= 2  # the page is too long, e.g. names whose characters are all escaped
    closed = [row for row in rows if not row.below and len(row.leaves) > 1]
    # 60 bytes: the tags that make a hidden row foldable.
    room = MOST_BYTES - size - 60 * len(closed)
    can_unfold = len(leaves) <= MOST_TENSORS and all(
        leaf.name.count(".") < MOST_PARTS for leaf in leaves
    )
    if closed and room > 0 and can_unfold:
        page = f"{title}{_tree(rows, _Opener(room))}</div>"
    return page
