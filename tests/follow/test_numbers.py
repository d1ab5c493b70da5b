"""Deltas as numbers of elements."""

import numpy as np
import pytest

from mlstate.errors import FormatError
from mlstate.follow._formats.numbers import delta_from_numbers, numbers_of


def test_numbers_round_trip_in_any_order():
    random = np.random.default_rng(1)
    for count, elements in ((0, 0), (1, 1), (50, 100), (3, 10**6), (2000, 2000)):
        numbers = random.permutation(elements)[:count]
        values = random.random(count)
        delta = delta_from_numbers("w", numbers, values, elements)
        order = np.argsort(numbers)
        assert numbers_of(delta).tolist() == numbers[order].tolist()
        assert delta.values.tolist() == values[order].tolist()


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ([0, 5], "beyond the last"),
        ([-1, 2], "beyond the last"),
        ([2, 2], "twice"),
        ([1], "values"),
        ([[0, 1]], "values"),
        ([0.0, 1.0], "values"),
    ],
)
def test_impossible_numbers_are_refused(numbers, match):
    with pytest.raises(FormatError, match=match):
        delta_from_numbers("w", np.array(numbers), np.zeros(2), 5)
