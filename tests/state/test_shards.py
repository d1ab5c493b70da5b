"""States with parts of tensors: parts at different places are never equal or exchanged."""

import numpy as np
import pytest

from mlstate import CompatibilityError, StateDict
from mlstate.checkpoint import Layout, Shard
from mlstate.state import check_compatibility, diff, load_into, shapes_match

WHOLE = np.arange(32.0).reshape(8, 4)
ROWS = [Layout.rows(2).shard(np.zeros((8, 4)), index) for index in range(2)]


class Labelled(Shard):
    """A user's subclass."""


@pytest.mark.parametrize(
    ("part", "other"),
    [
        (ROWS[0], ROWS[1]),
        (ROWS[0], Shard(np.zeros((4, 4)), Layout.rows(3), 0, shape=(10, 4))),
        (ROWS[0], np.zeros((4, 4))),
        (ROWS[0], Layout.axis(1, 2).shard(np.zeros((8, 4)), 0)),
        (ROWS[0], Layout.flat(2).shard(np.zeros((8, 4)), 0)),
        (Labelled(np.zeros(3), Layout.rows(2), 0, shape=(6,)), Layout.rows(2).shard(np.ones(6), 1)),
    ],
)
def test_other_parts_of_a_tensor_are_unequal_and_refused(part, other):
    before = np.asarray(part).copy()
    for first, second in (({"w": part}, {"w": other}), ({"w": other}, {"w": part})):
        assert StateDict(first) != second
        assert diff(first, second).shapes[0][0] == "w"
        assert not shapes_match(first, second)
        assert not check_compatibility(first, second).is_compatible
        with pytest.raises(CompatibilityError, match="size mismatch for w: ") as caught:
            load_into(first, second, cast=True)
        assert caught.value.name == "w" and str(part._mlstate_part) in str(caught.value)
    assert np.array_equal(np.asarray(part), before)


def test_digests_of_different_parts_with_equal_elements_differ():
    whole = np.zeros((8, 4))
    layouts = (Layout.rows(1), Layout.flat(2), Layout.axis(1, 2))
    parts = (*ROWS, *(layout.shard(whole, 0) for layout in layouts))
    digests = [StateDict(w=part).digest() for part in parts]
    assert len(set(digests)) == 5
    assert StateDict(w=whole).digest() == digests[2]  # one part of all elements
    assert StateDict(w=Shard(whole[:4], Layout.rows(2), 0, shape=(8, 4))).digest() == digests[0]


def test_a_part_is_never_equal_to_the_whole_tensor_or_loaded_from_it():
    part, whole = {"w": ROWS[0]}, {"w": np.zeros((8, 4))}
    for first, second in ((part, whole), (whole, part)):
        assert StateDict(first) != second
        assert shapes_match(first, second)  # a part has the shape of the tensor
        assert not check_compatibility(first, second).is_loadable()
        with pytest.raises(CompatibilityError, match="'w'"):
            load_into(first, second)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_of_one_part_are_equal_under_different_layouts(dtype):
    pytest.importorskip("ml_dtypes")
    vector = np.arange(8).astype(dtype)
    layouts = (Layout.rows(2), Layout.flat(2), Layout.rows(2) * Layout.axis(0, 1))
    parts = [layout.shard(vector, 1) for layout in layouts]
    for part in parts:
        target = Shard(np.zeros(4, dtype), Layout.rows(2), 1, shape=(8,))
        assert diff({"w": part}, {"w": target}, rtol=0.1).changes[0].changed == 4
        load_into({"w": target}, {"w": part})
        assert StateDict(w=target) == StateDict(w=part)
        assert (target.array == vector[4:]).all()
        assert diff({"w": target}, {"w": part}).identical
    assert StateDict(w=Shard(WHOLE)) == StateDict(w=WHOLE)


def test_a_load_into_a_part_of_a_parameter_is_seen_by_autograd(torch):
    parameter = torch.nn.Parameter(torch.zeros(4))
    target = Shard(parameter.detach(), Layout.rows(2), 0, shape=(8,))
    version = parameter._version
    load_into({"w": target}, {"w": Layout.rows(2).shard(torch.ones(8), 0)})
    assert parameter._version > version and parameter.tolist() == [1] * 4


def test_a_part_that_is_negated_when_read_is_kept_and_refused_by_name(torch):
    part = Layout.rows(1).shard(torch.tensor([1 + 2j]).conj().imag, 0)
    state = StateDict({"w": part})
    assert state.astype("float64")["w"].array.tolist() == [-2.0]
    with pytest.raises(TypeError, match=r"'w' is a view that is negated .* store its resolve_neg"):
        diff(state, {"w": Layout.rows(1).shard(torch.tensor([2.0]), 0)})


def test_diff_reports_a_part_and_the_whole_as_different_shapes():
    part = Shard(np.ones((2, 2)), Layout.rows(2), 0, shape=(4, 2))
    states = {"w": part, "b": np.ones(1)}, {"w": np.ones((4, 2)), "b": np.ones(1)}
    for first, second in (states, states[::-1]):
        difference = diff(first, second)
        assert [name for name, *_ in difference.shapes] == ["w"]
        assert (difference.unchanged, difference.changes) == (1, [])
