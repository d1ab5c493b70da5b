"""Arrays that share memory are paired exactly."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlstate._common.arrays import pairs_sharing_elements, shares_elements


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_pairs_are_those_of_a_comparison_of_all_pairs(data):
    base = np.zeros(960, np.uint8)
    arrays = {}
    for number in range(data.draw(st.integers(2, 8))):
        item = data.draw(st.sampled_from([np.int8, np.float32]))
        shape = data.draw(st.sampled_from([(6, 8, 5), (12, 20), (240,)]))
        matrix = base[: 240 * np.dtype(item).itemsize].view(item).reshape(shape)
        axes = []
        for size in shape:
            start = data.draw(st.integers(0, size - 1))
            stop = data.draw(st.integers(start + 1, size))
            axes.append(slice(start, stop, data.draw(st.sampled_from([1, 1, 2, 3]))))
        view = matrix[tuple(axes)]
        view = view.transpose(data.draw(st.permutations(range(view.ndim))))
        arrays[str(number)] = view[::-1] if data.draw(st.booleans()) else view
    pairs = list(pairs_sharing_elements(arrays))
    assert len(set(pairs)) == len(pairs)
    # the first array of each memory is compared for all
    first = {}
    stand_in = {
        name: first.setdefault(
            (array.__array_interface__["data"], array.shape, array.strides, array.itemsize), name
        )
        for name, array in arrays.items()
    }
    expected = {
        (left, right)
        for left, right in combinations(arrays, 2)
        if stand_in[left] == left
        and stand_in[right] in (left, right)
        and shares_elements(arrays[left], arrays[right])
    }
    assert set(pairs) == expected
