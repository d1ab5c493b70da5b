"""Which names of a state its notebook view shows, and which it only counts.

Rows are assigned from the top down: first the children of the root, then the children of each
shown node, level by level, so that the top levels are complete before any deeper one begins. Of
many siblings the first ones and the last one are shown, and one row counts the others.
"""

from __future__ import annotations

from typing import NamedTuple


class Leaf(NamedTuple):
    """Facts about one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Node:
    """A part of a name, with the tensors whose names end here or below.

    Children are created on demand: a page needs a few hundred nodes, a model has many more.
    """

    __slots__ = ("_children", "end", "leaves", "segment")

    def __init__(self, segment: str, end: int, leaves: list[Leaf]) -> None:
        """Create a node for `segment`, the piece of a name between two dots.

        `end`: index of the segment's end in the names of the leaves; -1 for the root.
        """
        self.segment = segment
        self.end = end  # of the segment in the names of the leaves; -1 for the root
        self.leaves = leaves
        self._children: list[Node] | None = None

    @property
    def own(self) -> Leaf | None:
        """The tensor whose name ends here; None if all names are longer."""
        return next((leaf for leaf in self.leaves if len(leaf.name) == self.end), None)

    @property
    def children(self) -> list[Node]:
        """The nodes directly below, in the order of their first names."""
        if self._children is None:
            start = self.end + 1
            groups: dict[str, list[Leaf]] = {}
            for leaf in self.leaves:
                if len(leaf.name) > self.end:
                    end = leaf.name.find(".", start)
                    segment = leaf.name[start:] if end < 0 else leaf.name[start:end]
                    groups.setdefault(segment, []).append(leaf)
            self._children = [Node(s, start + len(s), leaves) for s, leaves in groups.items()]
        return self._children


class Row:
    """A row of a page: a node, or several siblings that are only counted.

    `depth`: levels below the root, which has 0.
    """

    __slots__ = ("below", "depth", "nodes")

    def __init__(self, nodes: list[Node], depth: int) -> None:
        self.nodes = nodes
        self.depth = depth
        self.below: list[Row] = []  # the rows of the children if these are shown

    @property
    def leaves(self) -> list[Leaf]:
        """The tensors of the row."""
        return [leaf for node in self.nodes for leaf in node.leaves]


def preview(root: Node, max_rows: int, max_children: int) -> list[Row]:
    """Return the rows of a page, in pre-order and without one for the root.

    Parameters
    ----------
    root : Node
        The node of all names.
    max_rows : int
        Number of rows of the page.
    max_children : int
        Number of rows for the children of one node, at least 3, including the row that counts.

    Returns
    -------
    list of Row
        A node is not opened if not all of its children's rows fit, or if it has a single tensor.
    """
    top = Row([root], 0)
    rows_left = max_rows
    queue = [top]  # rows of single nodes to open, level by level; the loop appends to it
    for row in queue:
        [node] = row.nodes
        if len(node.leaves) == 1 and row is not top:
            continue
        limit = min(max_children, max_rows) if row is top else max_children
        rows = [Row(nodes, row.depth + 1) for nodes in _groups(node.children, limit)]
        if len(rows) <= rows_left:
            row.below = rows
            rows_left -= len(rows)
            queue += [below for below in rows if len(below.nodes) == 1]
    ordered = []
    stack = top.below[::-1]
    while stack:
        row = stack.pop()
        ordered.append(row)
        stack += reversed(row.below)
    return ordered


def _groups(nodes: list[Node], limit: int) -> list[list[Node]]:
    """Return siblings in at most `limit` groups: single ones, and in one group those to count.

    The counted group comes before the last sibling, which is shown if `limit` is 3 or more.
    """
    if len(nodes) <= limit:
        return [[node] for node in nodes]
    last = 1 if limit >= 3 else 0
    first, end = limit - 1 - last, len(nodes) - last
    return [*([node] for node in nodes[:first]), nodes[first:end], *([n] for n in nodes[end:])]
