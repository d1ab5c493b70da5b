"""Which part of a parameter each rank owns: counts, shapes and invalid units."""

from math import ceil, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlstate
from mlstate import CompatibilityError
from mlstate.checkpoint import Shard
from mlstate.collectives import SingleGroup
from mlstate.fsdp import FSDPShardingUnit, sharding_units
from mlstate.testing import run_ranks

shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple).filter(lambda s: prod(s) <= 400)


@pytest.mark.parametrize("world", range(1, 10))
def test_flat_parts_are_the_chunks_of_the_specification_without_its_negative_ones(world):
    for n in range(41):
        chunk = ceil(n / world)
        expected = [max(0, min(chunk, n - rank * chunk)) for rank in range(world)]
        for rank in range(world):
            unit = FSDPShardingUnit("w", (n,), "float32", rank, world_size=world)
            assert unit.counts == tuple(expected)
            assert unit.local_shape == (expected[rank],)
        assert sum(expected) == n


@pytest.mark.parametrize("world", range(1, 10))
def test_parts_by_rows_are_whole_rows(world):
    for n in range(41):
        chunk = ceil(n / world)
        rows = [max(0, min(chunk, n - rank * chunk)) for rank in range(world)]
        for rank in range(world):
            unit = FSDPShardingUnit("w", (n, 3, 2), "f4", rank, world_size=world, layout="rows")
            assert unit.counts == tuple(6 * count for count in rows)
            assert unit.local_shape == (rows[rank], 3, 2)


@given(shapes, st.integers(1, 9), st.sampled_from(["flat", "rows"]))
def test_the_parts_of_all_ranks_make_up_the_parameter(shape, world, layout):
    if layout == "rows" and not shape:
        return
    array = np.arange(prod(shape)).reshape(shape)
    parts = []
    for rank in range(world):
        unit = FSDPShardingUnit("w", shape, "int64", rank, world_size=world, layout=layout)
        part = unit.layout.take(array, rank)
        assert part.shape == unit.local_shape
        assert part.size == unit.counts[rank]
        parts.append(part.reshape(-1))
    np.testing.assert_array_equal(np.concatenate(parts), array.reshape(-1))
    assert unit.full_bytes == array.nbytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_dtypes_that_numpy_lacks_have_names(torch, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="has the dtypes")
    size = 2 if dtype == "bfloat16" else 1
    for given_dtype in (dtype, getattr(torch, dtype), np.dtype(getattr(ml_dtypes, dtype))):
        unit = FSDPShardingUnit("w", (3,), given_dtype, 0, world_size=1)
        assert (unit.dtype, unit.full_bytes) == (dtype, 3 * size)
        assert unit.zeros().dtype == getattr(ml_dtypes, dtype)


@pytest.mark.parametrize(
    ("arguments", "keywords", "text"),
    [
        (("", (2,), "f4", 0), {}, "parameter_name must be a str that is not empty"),
        ((7, (2,), "f4", 0), {}, "parameter_name must be a str"),
        (("w", (2,), "f4", -1), {}, "shard_index must be 0 or more, got -1"),
        (("w", (2,), "f4", 2), {"world_size": 2}, "shard_index 2 is out of range: 2 ranks"),
        (("w", (2,), "f4", 0), {"world_size": 0}, "w: world_size must be from 1"),
        (("w", (2,), "f4", 0), {"world_size": -1}, "w: world_size must be from 1"),
        (("w", (-2,), "f4", 0), {}, "w: each number of shape must be 0 or more, got -2"),
        (("w", (2,), "f4", 0), {"layout": "diagonal"}, "'flat' or 'rows', got 'diagonal'"),
    ],
)
def test_invalid_units_are_refused(arguments, keywords, text):
    with pytest.raises(ValueError, match=text):
        FSDPShardingUnit(*arguments, **keywords)


@pytest.mark.parametrize(
    "arguments", [("w", (2.5,), "f4", 0), ("w", (2,), "f4", 0.5), ("w", (2,), None, 0)]
)
def test_non_integer_counts_are_refused(arguments):
    with pytest.raises(TypeError):
        FSDPShardingUnit(*arguments)


def test_rows_of_a_scalar_are_a_question_of_compatibility():
    with pytest.raises(CompatibilityError, match="w: a parameter without dimensions has no rows"):
        FSDPShardingUnit("w", (), "f4", 0, layout="rows")


def test_a_unit_is_bound_once():
    unit = FSDPShardingUnit("w", (5,), "f4", 1)
    assert unit.world_size is None
    for read in (lambda: unit.counts, lambda: unit.local_shape, lambda: unit.layout):
        with pytest.raises(ValueError, match="w: pass world_size="):
            read()
    unit.bind(2)
    unit.bind(2)
    assert unit.counts == (3, 2)
    with pytest.raises(ValueError, match="is for 2 ranks, but the group has 3"):
        unit.bind(3)


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_local_gradients_are_saved_as_shards(tmp_path, layout):
    array = np.arange(15, dtype=np.float32).reshape(5, 3)
    states = []
    for rank in range(4):
        unit = FSDPShardingUnit("w", (5, 3), "float32", rank, world_size=4, layout=layout)
        with pytest.raises(ValueError, match="w has no local gradient"):
            unit.shard()
        unit.local_gradient = unit.layout.take(array, rank).copy()
        states.append(unit.shard())
        assert isinstance(states[-1], Shard)
        assert states[-1].array is unit.local_gradient

    path = tmp_path / "ckpt"
    run_ranks(4, lambda group: mlstate.save(path, {"w": states[group.rank]}, group=group))
    np.testing.assert_array_equal(mlstate.load(path).model["w"], array)


def test_module_units_cover_trainable_parameters(torch):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    model.scale = torch.nn.Parameter(torch.tensor(2.0))
    units = sharding_units(model, SingleGroup(), layout="rows")
    assert list(units) == ["scale", "0.weight", "1.weight", "1.bias"]
    assert units["scale"].local_shape == (1,)  # flat: it has no rows
    assert units["0.weight"].local_shape == (2, 3)
    with pytest.raises(ValueError, match="layout"):
        sharding_units(model, SingleGroup(), layout="diagonal")
