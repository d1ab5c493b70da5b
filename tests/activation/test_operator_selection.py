"""Operator selection within a budget: compared with exhaustive search, and invalid arguments."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import tries

from mlstate.activation import OperatorSelection, select_operators
from mlstate.errors import CapacityError


def fewest(seconds, sizes, budget):
    """The optimum by exhaustive search."""
    best = None
    for selection in itertools.product((False, True), repeat=len(seconds)):
        if sum(itertools.compress(sizes, selection)) <= budget:
            rest = sum(s for s, k in zip(seconds, selection, strict=True) if not k)
            best = rest if best is None else min(best, rest)
    return best


items = st.lists(
    st.tuples(st.integers(0, 640).map(lambda t: t / 64), st.integers(0, 60)), max_size=10
)


@settings(deadline=None, max_examples=tries(150))
@given(items, st.integers(0, 300))
def test_no_choice_of_a_few_operators_is_better(pairs, budget):
    seconds, sizes = [s for s, _ in pairs], [b for _, b in pairs]
    chosen = select_operators(seconds, sizes, budget)
    assert chosen.exact and chosen.seconds == chosen.least_seconds == fewest(seconds, sizes, budget)
    assert chosen.bytes == sum(sizes[i] for i in chosen.saved) <= budget
    assert chosen.seconds == sum(seconds[i] for i in chosen.recomputed)
    assert sorted(chosen.saved + chosen.recomputed) == list(range(len(pairs)))


def dynamic_programme(seconds, sizes, budget):
    """The most seconds that can be kept, by number of bytes: an oracle for longer lists."""
    best = np.zeros(budget + 1)
    for time_, size in zip(seconds, sizes, strict=True):
        if size <= budget:
            shifted = best[: budget + 1 - size] + time_
            best[size:] = np.maximum(best[size:], shifted)
    return best[-1]


@pytest.mark.parametrize("kind", ["free", "related", "equal"])
def test_hundreds_of_operators_have_the_optimum_of_a_dynamic_programme(kind):
    rng = np.random.default_rng(3)
    for _ in range(5):
        sizes = rng.integers(1, 200, 300)
        seconds = {
            "free": rng.integers(0, 1000, 300),
            "related": sizes + rng.integers(0, 10, 300),
            "equal": sizes,
        }[kind] / 64.0
        budget = int(sizes.sum()) // 3
        chosen = select_operators(seconds, sizes, budget)
        assert chosen.exact
        assert seconds.sum() - chosen.seconds == dynamic_programme(seconds, sizes, budget)


def test_limited_search_of_thousands_of_operators_returns_a_valid_bound():
    rng = np.random.default_rng(4)
    seconds, sizes = rng.random(20_000), rng.integers(1, 1 << 30, 20_000)
    budget = int(sizes.sum()) // 2
    chosen = select_operators(seconds, sizes, budget)
    assert chosen.bytes <= budget
    assert chosen.least_seconds <= chosen.seconds <= chosen.least_seconds * (1 + 1e-6)
    few = OperatorSelection(seconds, sizes, budget, states=10)
    assert not few.exact
    assert few.least_seconds <= chosen.seconds <= few.seconds <= few.least_seconds * 1.001
    assert "at least" in repr(few) and "unavoidable" in few.report()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([np.nan], [1], 5), ValueError, r"seconds\[0\] is nan"),
        (([1, np.inf], [1, 1], 5), ValueError, r"seconds\[1\] is inf"),
        (([-2.5], [1], 5), ValueError, r"seconds\[0\] is -2.5"),
        (([1, 1], [1, -3], 5), ValueError, r"bytes\[1\] is -3"),
        (([1], [1], -1), ValueError, "a budget of -1 bytes is negative"),
        (([1], [1, 2], 5), ValueError, "1 operators have seconds, 2 have bytes"),
        (([1], [1], 5, ["a", "b"]), ValueError, "2 names for 1 operators"),
        (([1], [1], 5, [7]), TypeError, "names of operators are str"),
        (([[1]], [1], 5), ValueError, r"seconds has shape \(1, 1\)"),
        (([1], [1.5], 5), TypeError, "bytes holds float64: expected integers"),
        ((["x"], [1], 5), TypeError, "seconds holds"),
        (([1], [1], []), TypeError, "budget_bytes must be a number of bytes"),
        (([1], np.array([1 << 63], np.uint64), 5), ValueError, "expected bytes below 2\\*\\*63"),
        (([1, 1], [1 << 62, 1 << 62], 5), CapacityError, r"exceed 62 bits"),
        (([1e308, 1e308], [1, 1], 5), CapacityError, "range of a double"),
        (([1], [1], 1 << 63), CapacityError, "budget_bytes does not fit into 64 bits"),
    ],
)
def test_invalid_costs_and_budgets_raise(arguments, error, text):
    with pytest.raises(error, match=text):
        select_operators(*arguments)


def test_empty_list_and_budget_of_zero():
    none = select_operators([], [], 0)
    assert none.saved == none.recomputed == () and none.exact
    zero_budget = select_operators([1, 2], [3, 0], 0)
    assert zero_budget.saved == (1,) and zero_budget.seconds == 1


def test_selection_is_immutable_and_has_a_report():
    given_seconds = np.array([3.0, 2.0])
    chosen = select_operators(given_seconds, [10, 20], 10, names=["a<b", "c"])
    given_seconds[:] = 0
    assert chosen.operator_seconds.tolist() == [3, 2]
    with pytest.raises(ValueError, match="read-only"):
        chosen.is_saved[0] = False
    assert "a&lt;b" in chosen._repr_html_() and "recomputed" in chosen._repr_html_()
    assert chosen.report().splitlines()[2].split() == ["a<b", "3", "10", "B", "saved"]
    with pytest.raises(ValueError, match="pass names"):
        select_operators([1], [1], 1).contexts()


def test_selecting_operators_warns_that_it_is_deprecated():
    with pytest.warns(DeprecationWarning, match="use plan on a chain of smaller blocks"):
        select_operators([1], [1], 1)
