"""Formatting of numbers, names and tables."""

import pytest
from html_page import Page
from hypothesis import given
from hypothesis import strategies as st

from mlstate._common.text import (
    bytes_text,
    names_hint,
    shorten,
    sort_steps,
    steps_text,
    table_html,
    table_text,
)


class Table(Page):
    """The cells of a table, and the texts outside of it."""

    def __init__(self, text):
        self.cells = []
        super().__init__(text)

    def handle_starttag(self, tag, attrs):
        assert tag in {"div", "style", "p", "table", "thead", "tbody", "tr", "th", "td", "caption"}
        assert attrs in ([], [("class", "mlstate-table")], [("class", "r")])
        super().handle_starttag(tag, attrs)
        if tag in ("th", "td"):
            self.cells.append("")

    def handle_data(self, data):
        if self.open[-1] in ("th", "td"):
            self.cells[-1] += data
        else:
            super().handle_data(data)


@given(st.text(st.characters(exclude_categories=["Cc", "Cs", "Cf", "Zl", "Zp"])))
def test_cut_names_keep_both_ends(name):
    short = shorten(name, 20)
    if name.isprintable():
        assert len(short) <= 20
        assert short == name or (short[:10] == name[:10] and short[11:] == name[-9:])


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (5 << 30, "5.00 GiB"),
        (7 << 40, "7168.00 GiB"),
    ],
)
def test_bytes_have_a_unit(count, text):
    assert bytes_text(count) == text


def test_text_tables_align_columns_and_count_omitted_rows():
    rows = [(f"t{i}", "1" * (i % 3)) for i in range(30)]
    lines = table_text(("name", "n"), rows, 4).splitlines()
    assert lines == ["name  n", "t0", "t1    1", "t2    11", "t3", "… 26 more"]
    assert table_text(("name", "n"), rows, 30).splitlines()[-1] == "t29   11"
    assert "more" not in table_text(("name", "n"), rows, 30)


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</td></table><style>*{display:none}</style>",
        "&lt;b&gt;&amp;",
        "%s %(a)s {0}",
        "<!-- ",
    ],
)
def test_tables_show_hostile_texts_as_they_are(text):
    table = Table(table_html(text, (text, ""), [(text, text)] * 2))
    assert table.cells == [text, ""] + [text] * 4 and table.texts == [text]


@pytest.mark.parametrize("title", ["k" * 100_000, "<b>\u202eevil\x1b[31m\n" * 9, "x" * 700])
def test_titles_are_short_and_escaped(title):
    for rows in ([], [["a"]]):
        page = table_html(title, ["name"], rows, style=False)
        assert len(page) < 1200 and "<b>" not in page
        assert not any(mark in page for mark in "\u202e\x1b\n")


def test_long_tables_are_truncated_with_a_note():
    rows = [("<" * 5000, "&" * 5000)] * 10_000
    html = table_html("10,000 rows", ("a", "b"), rows)
    table = Table(html)
    assert len(table.cells) == 2 + 2 * 50 and table.texts[-1] == "… 9,950 more"
    assert all(len(cell) <= 600 for cell in table.cells) and len(html) < 300_000
    assert Table(table_html("none", ("a",), [])).texts == ["none"]


def test_numbers_with_their_units_are_aligned_to_the_right():
    rows = [("1", "1.50 MiB", "-", "a"), ("2", "3 B", "0.25 s", "2"), ("3", "", "1e-05 s", "3%")]
    html = table_html("units", ("name", "bytes", "time", "mixed"), rows)
    assert "<caption>units</caption>" in html
    assert "<th>name</th><th class=r>bytes</th><th class=r>time</th><th>mixed</th>" in html
    assert "<td>2</td><td class=r>3 B</td><td class=r>0.25 s</td><td>2</td>" in html
    assert "<thead>" not in table_html("no headers", ("", ""), [("a", "b")])


def test_equal_neighbours_can_be_one_row():
    rows = [("first", "1")] + [(f"b{i}", "2") for i in range(100)] + [("x", "3"), ("y", "3")]
    table = Table(table_html("t", ("name", "n"), rows, collapse=True))
    assert table.cells[2:] == ["first", "1", "b0 … b99 (100 alike)", "2", "x", "3", "y", "3"]
    assert "more" not in table.texts[-1]
    assert len(Table(table_html("t", ("name", "n"), rows)).cells) == 2 + 2 * 50


def test_steps_are_sorted_by_number_and_unknown_ones_come_last():
    assert sort_steps([100, None, 20, 5]) == [5, 20, 100, None]
    assert steps_text([100, None, 20, 5]) == "5, 20, 100, ?"
    assert steps_text([100, 20, 5], 2) == "5, 20, 1 more"
    assert steps_text([]) == "none"


def test_an_unknown_name_is_answered_with_known_ones():
    assert names_hint("fc.weihgt", ["fc.weight", "fc.bias"]) == "; did you mean 'fc.weight'?"
    assert names_hint("x", ["fc.weight", "fc.bias"]) == "; there are 'fc.weight', 'fc.bias'"
    assert names_hint("x", []) == "; there are none"
    assert names_hint("l.1", ["module.l.0.w", "module.l.1.w"]) == "; did you mean 'module.l.1.w'?"
    assert names_hint("l", ["module.l.1.w"]) == "; there are 'module.l.1.w'"
    assert names_hint("x", [f"fc.{i}" for i in range(12)]).endswith("'fc.7' and 4 more")
    assert names_hint("x", ["w", "b", "w"]) == "; there are 'w', 'b'"


def test_names_that_a_message_lists_are_not_listed_again():
    assert names_hint("rwos", ["whole", "rows"], listed=False) == "; did you mean 'rows'?"
    assert (
        names_hint("x", ["whole", "rows"], listed=False) == names_hint("x", [], listed=False) == ""
    )
