"""Tables as text, as HTML and as JSON."""

import pytest
from html_page import Page

from mlstate._common.report import Table


class Cells(Page):
    """The cells of a table, and the texts outside of it."""

    def __init__(self, text):
        self.cells = []
        super().__init__(text)

    def handle_starttag(self, tag, attrs):
        assert tag in {
            *("div", "style", "p", "details", "summary"),
            *("table", "thead", "tbody", "tr", "th", "td", "caption"),
        }
        assert attrs in ([], [("class", "mlstate-table")], [("class", "r")])
        super().handle_starttag(tag, attrs)
        if tag in ("th", "td"):
            self.cells.append("")

    def handle_data(self, data):
        if self.open[-1] in ("th", "td"):
            self.cells[-1] += data
        else:
            super().handle_data(data)


def test_text_tables_align_columns_and_count_omitted_rows():
    table = Table("", ["name", "n"], [(f"t{i}", "1" * (i % 3)) for i in range(30)])
    lines = table.text(4).splitlines()
    assert lines == ["name  n", "t0", "t1    1", "t2    11", "t3", "… 26 more"]
    assert table.text(30).splitlines()[-1] == "t29   11"
    assert "more" not in table.text(30)


def test_a_number_has_the_unit_of_its_column():
    columns = ["name", "size [B]", "count [n]", "time [s]", "wait [ms]", "share [%]", "x [+.1f]"]
    rows = [("a [B]", 2048, 1500, 0.5, 0.5, 0.25, 2), ("b", *[None] * 6), ("c", *["?"] * 6)]
    table = Table(["first", "", "second\n"], columns, rows)
    assert table.texts() == [
        ["a [B]", "2.00 KiB", "1,500", "0.5 s", "500.00 ms", "25.0%", "+2.0"],
        ["b", *[""] * 6],
        ["c", *["?"] * 6],
    ]
    first, second, headers, row, *_ = table.text(right_numbers=True).splitlines()
    assert (first, second) == ("first", r"second\n")
    assert headers == "name       size  count   time       wait  share     x"
    assert row == "a [B]  2.00 KiB  1,500  0.5 s  500.00 ms  25.0%  +2.0"
    sizes = Table("", ["name", "size [B]"], [("a", 2048)]).data(size="nbytes")
    assert sizes == [{"name": "a", "nbytes": 2048}]
    assert "<caption>first; second\\n</caption>" in table.html()


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
    table = Cells(Table(text, [text[:20], ""], [(text, text)] * 2).html())
    assert table.cells == [text[:20], ""] + [text] * 4 and table.texts == [text]


@pytest.mark.parametrize("title", ["k" * 100_000, "<b>\u202eevil\x1b[31m\n" * 9, "x" * 700])
def test_titles_are_short_and_escaped(title):
    for rows in ([], [["a"]]):
        page = Table(title, ["name"], rows).html(style=False)
        assert len(page) < 1200 and "<b>" not in page
        assert not any(mark in page for mark in "\u202e\x1b\n")


def test_long_tables_are_truncated_with_a_note():
    rows = [("<" * 5000, "&" * 5000)] * 10_000
    html = Table("10,000 rows", ["a", "b"], rows).html()
    table = Cells(html)
    assert len(table.cells) == 2 + 2 * 20 + 2 + 2 * 80
    assert table.texts[-2:] == ["80 more", "… 9,900 more"] and html.count("<details>") == 1
    assert all(len(cell) <= 600 for cell in table.cells) and len(html) < 300_000
    inner = Cells(Table("10,000 rows", ["a", "b"], rows).html(style=False))
    assert len(inner.cells) == 2 + 2 * 100 and inner.texts[-1] == "… 9,900 more"
    assert Cells(Table("none", ["a"], []).html()).texts == ["none"]


def test_numbers_with_their_units_are_aligned_to_the_right():
    rows = [("1", 3 << 19, "-", "a"), ("2", 3, 0.25, 2), ("3", None, 1e-05, 3)]
    html = Table("units", ["name", "bytes [B]", "time [s]", "mixed"], rows).html()
    assert "<caption>units</caption>" in html
    assert "<th>name</th><th class=r>bytes</th><th class=r>time</th><th>mixed</th>" in html
    assert "<td>2</td><td class=r>3 B</td><td class=r>0.25 s</td><td>2</td>" in html
    assert "<thead>" not in Table("no headers", ["", ""], [("a", "b")]).html()


def test_equal_neighbours_can_be_one_row():
    rows = [("first", "1")] + [(f"b{i}", "2") for i in range(100)] + [("x", "3"), ("y", "3")]
    table = Cells(Table("t", ["name", "n"], rows, collapse=True).html())
    assert table.cells[2:] == ["first", "1", "b0 … b99 (100 alike)", "2", "x", "3", "y", "3"]
    assert "more" not in table.texts[-1]
    assert len(Cells(Table("t", ["name", "n"], rows).html(limit=50)).cells) == 2 * 2 + 2 * 50
