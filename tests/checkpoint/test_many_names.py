"""Loads and pages of checkpoints with many names: work grows with the names, not their square."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import mlstate
from mlstate._common.text import first_by_number, number_order


def calls_of(operation: Callable[[], object]) -> Counter[str]:
    """Return the numbers of calls of an operation by name, of functions of Python and of C."""
    counts: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            counts[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            counts[function.__qualname__] += 1

    sys.setprofile(profile)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return counts


def values_of(kind: str, count: int) -> dict[str, Any]:
    """Return states of tensors alone or of nested values, or an optimizer's states."""
    arrays = (np.full(2, i, np.float32) for i in range(count))
    if kind == "tensors":
        return {f"s{i}": {"w": array} for i, array in enumerate(arrays)}
    return {f"s{i}": {"w": array, "epoch": i} for i, array in enumerate(arrays)}


@pytest.mark.parametrize("kind", ["tensors", "nested"])
@pytest.mark.parametrize("keyword", ["new", "into", "cast", "into_cast"])
def test_a_load_of_many_named_states_takes_linear_time(
    tmp_path: Path, kind: str, keyword: str
) -> None:
    counts = []
    for count in (100, 400):
        states, path = values_of(kind, count), tmp_path / str(count)
        mlstate.save(path, states=states)
        targets = values_of(kind, count)
        keywords: dict[str, dict[str, Any]] = {
            "new": {},
            "into": {"into": {"states": targets}},
            "cast": {"cast": "float64"},
            "into_cast": {"into": {"states": targets}, "cast": True},
        }
        mlstate.load(path, **keywords[keyword])
        counts.append(calls_of(partial(mlstate.load, path, **keywords[keyword])))
        for i in range(count):
            assert targets[f"s{i}"]["w"][0] == i
    few, many = counts
    assert many.total() < 4.4 * few.total()
    # these list all names, so their number must not grow with the states
    for name in ("MergedIndex.keys", "MergedIndex.tensors"):
        assert many[name] == few[name]


def test_states_with_a_common_prefix_keep_their_tensors(tmp_path: Path) -> None:
    ones, twos = np.ones(2), np.full(3, 2.0)
    mlstate.save(tmp_path / "c", states={"a": {"b/c": ones}, "a.b": {"c": twos}, "ab": {"c": ones}})
    states = mlstate.load(tmp_path / "c").states
    assert [*states["a"]] == ["b/c"] and [*states["a.b"]] == ["c"]
    np.testing.assert_array_equal(states["a.b"]["c"], twos)


@pytest.mark.parametrize(
    ("page", "calls"), [(repr, 10), (mlstate.checkpoint.Checkpoint._repr_html_, 20)]
)
def test_a_page_makes_only_the_rows_that_it_shows(tmp_path: Path, page: Any, calls: int) -> None:
    counts = []
    for count in (1000, 4000):
        array = np.zeros(1, np.float32)
        names = [f"layers.{i // 20}.w{i % 20}" for i in range(count)]
        checkpoint = mlstate.save(tmp_path / str(count), dict.fromkeys(names, array))
        counts.append(calls_of(partial(page, checkpoint)).total())
        assert f"… {count - 20:,} more" in repr(checkpoint)
        assert "layers.0.w19 " in repr(checkpoint) and "layers.1.w0 " not in repr(checkpoint)
    # a shown row takes more calls; names and sizes of the others are only counted
    assert counts[1] - counts[0] < calls * 3000


def test_the_first_names_equal_the_start_of_the_sorted_list() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        texts = ["", "a", "b", "a.", "0", "00", "1", "01", "10", "9", "٣"]
        names = ["".join(generator.choice(texts, 4)) for _ in range(generator.integers(40))]
        most = int(generator.integers(45))
        ordered = [number_order(name) for name in sorted(names, key=number_order)[:most]]
        assert [*map(number_order, first_by_number(names, str, most))] == ordered
