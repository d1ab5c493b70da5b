"""Previews of name trees: every name is shown or counted, within the rows of a page."""

import pytest

from mlstate.state._preview import Leaf, Node, preview

LAYERED = [f"layers.{i // 9}.part{i % 9}" for i in range(10_000)]
FLAT = [f"t{i}" for i in range(10_000)]
FEW = [f"{letter}.{i}" for letter in "abcd" for i in range(2)]


def root_of(names):
    return Node("", -1, [Leaf(name, "int8", (1,), 1) for name in names])


def labels(rows):
    return [(row.nodes[0].segment, len(row.nodes), bool(row.below)) for row in rows]


@pytest.mark.parametrize("max_rows", [1, 2, 3, 12, 40, 120, 10**9])
@pytest.mark.parametrize("names", [LAYERED, FLAT, FEW], ids=["layered", "flat", "few"])
def test_every_name_is_shown_or_counted(names, max_rows):
    rows = preview(root_of(names), max_rows, 12)
    assert 0 < len(rows) <= max_rows
    assert sum(1 if row.nodes[0].own else 0 for row in rows if row.below) + sum(
        len(row.leaves) for row in rows if not row.below
    ) == len(names)


def test_rows_are_in_pre_order_with_the_last_sibling():
    rows = preview(root_of(FEW), 7, 3)
    assert labels(rows) == [
        ("a", 1, True), ("0", 1, False), ("1", 1, False),
        ("b", 2, False),
        ("d", 1, True), ("0", 1, False), ("1", 1, False),
    ]  # fmt: skip
    assert [row.depth for row in rows] == [1, 2, 2, 1, 1, 2, 2]


def test_a_single_name_needs_one_row():
    rows = preview(root_of(["a.x.y", "b.x.y", "c.x.y"]), 50, 12)
    assert labels(rows) == [("a", 1, False), ("b", 1, False), ("c", 1, False)]


def test_no_rows_or_no_names_give_an_empty_preview():
    assert preview(root_of(FEW), 0, 12) == []
    assert preview(root_of([]), 50, 12) == []


def test_empty_segments_are_segments():
    root = root_of(["", ".", "a", "a..b", "a."])
    assert [node.segment for node in root.children] == ["", "a"]
    empty, a = root.children
    assert empty.own.name == "" and [node.own.name for node in empty.children] == ["."]
    assert a.own.name == "a" and a.children[0].own.name == "a."
    assert [leaf.name for leaf in a.children[0].children[0].leaves] == ["a..b"]


def test_deep_names_cost_no_stack_and_no_hidden_nodes():
    deep = ".".join(["x"] * 100_000)
    rows = preview(root_of([deep, f"{deep}.y"]), 3_000, 3)
    assert [row.depth for row in rows] == list(range(1, 3_001))
