"""Arrays that share memory are paired exactly."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlstate._common.arrays
from mlstate._common.arrays import memory_key, pairs_sharing_elements, shares_elements


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


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_arrays_apart_are_only_sorted(library, monkeypatch):
    ones = pytest.importorskip(library).ones
    arrays = {i: ones((i % 3, 4)) for i in range(60)}
    monkeypatch.setattr(mlstate._common.arrays, "_memory_of", None)
    assert not list(pairs_sharing_elements(arrays))
    monkeypatch.undo()
    assert list(pairs_sharing_elements({**arrays, "view": arrays[1][:, ::2]})) == [(1, "view")]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-2],
        np.broadcast_to(np.float32(1), (3,)),
        np.zeros(2, "U0"),
        np.array(1.0),
        np.zeros(2, [("a", "f4"), ("b", "i8")])["b"],
    ],
    ids=["negative strides", "broadcast", "items without bytes", "scalar", "field"],
)
def test_a_memory_key_has_the_address_shape_and_strides(array):
    address = array.__array_interface__["data"][0]
    expected = (address, max(array.itemsize, 1), array.shape, array.strides)
    assert memory_key(array)[:4] == expected
    assert memory_key(array[...]) == memory_key(array)


def test_memory_keys_differ_by_dtype():
    words = np.zeros(4, np.uint16)
    labelled = np.dtype("u2", metadata={"mlstate.dtype": "bfloat16"})
    views = [words.view(dtype) for dtype in ("u2", ">u2", "i2", labelled, [("x", "u2")], "V2")]
    assert len({memory_key(view) for view in views}) == len(views)
