"""Formatting of numbers and names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlstate._common.text import (
    bytes_text,
    listed,
    names_hint,
    shorten,
    sort_steps,
    steps_text,
)


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


@given(st.lists(st.text("abc", min_size=1, max_size=30)), st.integers(20, 80))
def test_lists_are_cut_between_entries_and_count_the_others(entries, limit):
    *first, last = listed(entries, limit, 2).split(", ")
    count = len(first)
    assert last == f"… {len(entries) - count + 2} more"
    assert first == [shorten(entry, limit) for entry in entries[:count]]
    assert len(", ".join(first)) <= max(limit, 30)
    if count < len(entries):
        assert len(", ".join(entries[: count + 1])) + 2 > limit


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
