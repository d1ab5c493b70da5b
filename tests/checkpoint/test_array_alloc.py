"""Memory of loaded arrays: small ones share blocks, the others have their own."""

import gc
import weakref

import numpy as np
import pytest

import mlstate

MIB = 1 << 20


def by_files(tmp_path, arrays):
    mlstate.save_file(arrays, tmp_path / "f", overwrite=True)
    return mlstate.load_file(tmp_path / "f")


def by_checkpoints(tmp_path, arrays):
    mlstate.save(tmp_path / "c", model=arrays, overwrite=True)
    return mlstate.load(tmp_path / "c").model


WAYS = pytest.mark.parametrize("load", [by_files, by_checkpoints])


def many(count=700, floats=8001):
    return {f"{i:04}": np.arange(floats, dtype=np.float32) + i for i in range(count)}


def blocks(loaded):
    bases = {id(a.base): a.base for a in loaded.values() if a.base is not None}
    return list(bases.values())


@WAYS
def test_small_arrays_share_blocks_and_behave_independently(tmp_path, load):
    arrays = many()
    loaded = load(tmp_path, arrays)
    shared_blocks = blocks(loaded)
    assert 1 < len(shared_blocks) < 4
    total = sum(a.nbytes for a in arrays.values())
    assert (
        total
        <= sum(b.nbytes for b in shared_blocks)
        < total + 64 * (len(arrays) + 2 * len(shared_blocks))
    )
    for name, array in loaded.items():
        assert array.flags.writeable and array.flags.c_contiguous and array.ctypes.data % 64 == 0
        np.testing.assert_array_equal(array, arrays[name])
    for array in loaded.values():  # arrays do not overlap
        array += 1
    for name, array in loaded.items():
        np.testing.assert_array_equal(array, arrays[name] + 1)


@WAYS
def test_array_of_a_block_can_be_frozen_and_thawed(tmp_path, load):
    array = load(tmp_path, many())["0007"]
    array.flags.writeable = False
    array.flags.writeable = True
    array[0] = 5
    assert array[0] == 5


@WAYS
def test_a_block_lives_as_long_as_one_of_its_arrays(tmp_path, load):
    loaded = load(tmp_path, many())
    dead = [weakref.ref(b) for b in blocks(loaded)]
    survivor = loaded["0000"]
    shares_block = [ref() is survivor.base for ref in dead]
    del loaded
    gc.collect()
    assert [ref() is not None for ref in dead] == shares_block and sum(shares_block) == 1
    assert survivor[10] == 10
    del survivor
    assert all(ref() is None for ref in dead)


@WAYS
def test_few_or_large_arrays_own_their_memory(tmp_path, load):
    few = load(tmp_path, many(count=100))
    assert all(a.flags.owndata for a in few.values())
    mixed = many() | {"0300 large": np.ones(MIB + 1, np.float32), "0301 empty": np.ones(0)}
    loaded = load(tmp_path, dict(sorted(mixed.items())))
    assert loaded.keys() == mixed.keys()
    assert {n for n, a in loaded.items() if a.flags.owndata} == {"0300 large", "0301 empty"}
    for name, array in loaded.items():
        np.testing.assert_array_equal(array, mixed[name])


@WAYS
def test_all_dtypes_are_packed_in_blocks(tmp_path, load):
    rng = np.random.default_rng(5)
    shapes = [(), (1,), (3, 5), (7, 1, 2), (1001, 301)]
    arrays = {}
    for i in range(60):
        for dtype in ("bool", "int8", "uint16", "float16", "bfloat16", "float64"):
            if dtype == "bfloat16":
                dtype = pytest.importorskip("ml_dtypes").bfloat16
            shape = shapes[i % len(shapes)]
            arrays[f"{i}.{np.dtype(dtype)}"] = (rng.random(shape) * 9).astype(dtype)
    loaded = load(tmp_path, arrays)
    assert blocks(loaded)
    for name, array in loaded.items():
        assert array.dtype == arrays[name].dtype and array.shape == arrays[name].shape
        assert array.tobytes() == arrays[name].tobytes()


def test_arrays_of_a_block_are_filled_and_saved_as_others_are(tmp_path):
    arrays = many()
    loaded = by_checkpoints(tmp_path, arrays)
    changed = {name: array[::-1].copy() for name, array in arrays.items()}
    mlstate.save(tmp_path / "d", model=changed)
    mlstate.load(tmp_path / "d", into={"model": loaded})
    assert len(blocks(loaded)) > 1
    again = by_checkpoints(tmp_path, loaded)
    for name, array in again.items():
        np.testing.assert_array_equal(array, changed[name])


def test_rank_parts_share_blocks(tmp_path):
    rows = {f"{i}": np.full((64, 1024), i, np.float32) for i in range(60)}
    mlstate.save(tmp_path / "c", model=rows)
    part = mlstate.load(tmp_path / "c", rank=1, world_size=2, layout="rows").model
    assert blocks(part)
    for name, array in part.items():
        assert array.shape == (32, 1024) and (array == rows[name][32:]).all()
