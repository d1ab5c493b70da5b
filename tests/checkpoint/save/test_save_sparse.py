"""Saving sparse and incremental shards: fewer bytes, and the same arrays after loading."""

import numpy as np
import pytest
from checkpoint_model import flip, good, part, views_of
from word_model import WordModel

import mlstate
from mlstate.checkpoint import CheckpointManager, Layout, Shard, load, save_async
from mlstate.testing import run_ranks

ROWS, WIDTH = 400, 64
ROW_BYTES = 4 * WIDTH


def table(rows=ROWS, seed=0, density=1.0):
    """A table with numbers in some rows and zeros in the others."""
    rng = np.random.default_rng(seed)
    array = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    array[rng.random(rows) >= density] = 0
    return array


def layers_of(checkpoint):
    """The number of layers of each shard; None for a plain shard."""
    return {
        shard.key: None if shard.layers is None else len(shard.layers)
        for shard in checkpoint.shards()
    }


# ---- zeros ----


def test_rows_of_zeros_are_left_out(path):
    state = {"e": table(density=0.25)}
    written = mlstate.save(path, state, sparse=True, pack_below_bytes=0).written
    filled_rows = int(state["e"].any(axis=1).sum())
    assert written["new_bytes"] == filled_rows * ROW_BYTES
    assert written["data_bytes"] == ROWS * ROW_BYTES
    assert good(path, state)


def test_all_zero_states_write_no_bytes(path):
    model = {"w": table(), "b": np.ones(3, np.float32)}
    states = {"w.m": np.zeros((ROWS, WIDTH), np.float32), "b.m": np.zeros(3, np.float32)}
    saved = mlstate.save(path, model, states, sparse=True)
    assert not list((path / "optim_state").iterdir())
    assert layers_of(saved) == {"w": None, "b": None, "w.m": 0, "b.m": 0}
    assert good(path, model, states)
    states["b.m"][1] = 1  # now it is an ordinary shard
    saved = mlstate.save(path, model, states, sparse=True)
    assert saved.written["new_bytes"] == 12
    assert good(path, model, states)


def test_negative_zero_and_nan_rows_are_stored(path):
    state = {"w": np.zeros((ROWS, WIDTH), np.float32)}
    state["w"][7, 3] = -0.0
    state["w"][9, 3] = np.nan
    saved = mlstate.save(path, state, sparse=True, pack_below_bytes=0)
    assert saved.written["new_bytes"] == 2 * ROW_BYTES
    assert good(path, state)


@pytest.mark.parametrize("zeros", [ROWS // 4 - 1, ROWS // 4])
def test_nearly_full_tensor_is_stored_densely(path, zeros):
    state = {"w": table()}
    state["w"][:zeros] = 0
    saved = mlstate.save(path, state, sparse=True, incremental=True, pack_below_bytes=0)
    assert layers_of(saved) == {"w": 1 if zeros == ROWS // 4 else None}
    has_rows = b'"rows":' in next((path / "index").iterdir()).read_bytes()
    assert has_rows == (zeros == ROWS // 4)


def test_sparse_is_off_by_default(path):
    state = {"w": np.zeros((ROWS, WIDTH)), "e": table(density=0.1)}
    assert layers_of(mlstate.save(path, state)) == {"w": None, "e": None}
    state["e"][0] = 5
    saved = mlstate.save(path, state)
    assert layers_of(saved) == {"w": None, "e": None}
    assert saved.written["new_bytes"] == state["e"].nbytes


# ---- rows that changed ----


@pytest.mark.parametrize("changed", [1, 50, 108, 200])
def test_no_more_than_the_rows_that_changed_are_written(path, changed):
    state = {"e": table()}
    mlstate.save(path, state, pack_below_bytes=0)
    rows = np.random.default_rng(changed).choice(ROWS, changed, replace=False)
    state["e"][rows] += 1
    before = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    saved = mlstate.save(path, state, incremental=True, pack_below_bytes=0)
    after = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    assert saved.written["new_bytes"] == changed * ROW_BYTES
    assert after - before <= changed * ROW_BYTES + 8192  # the header of the file included
    assert layers_of(saved) == {"e": 2}
    assert good(path, state)


def test_more_than_half_is_written_as_a_whole(path):
    state = {"e": table()}
    mlstate.save(path, state, incremental=True, pack_below_bytes=0)
    state["e"][: ROWS // 2 + 1] += 1
    saved = mlstate.save(path, state, incremental=True, pack_below_bytes=0)
    assert saved.written["new_bytes"] == state["e"].nbytes
    assert layers_of(saved) == {"e": None}
    assert good(path, state)


def test_versions_go_up_with_changes_only(path):
    state = {"e": table(), "f": table(seed=1)}
    mlstate.save(path, state, incremental=True, pack_below_bytes=0)
    state["e"][5] = 0  # a row of zeros, stored like any other row
    first = mlstate.save(path, state, incremental=True, sparse=True, pack_below_bytes=0)
    again = mlstate.save(path, state, incremental=True, sparse=True, pack_below_bytes=0)
    assert first.written["new_bytes"] == ROW_BYTES
    assert again.written["new_bytes"] == 0
    assert [t.version for t in again.tensors()] == [2, 1]
    assert good(path, state)


def test_overlay_chain_is_finally_rewritten(path):
    state = {"e": table()}
    seen = []
    for step in range(20):
        state["e"][20 * step : 20 * step + 3] += 1
        saved = mlstate.save(path, state, incremental=True, pack_below_bytes=0)
        seen.append(layers_of(saved)["e"] or 1)
        assert good(path, state)
        assert saved.stored_nbytes <= 2 * state["e"].nbytes
    assert seen[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 1]
    assert len(list((path / "params").iterdir())) == seen[-1]  # files of other steps are deleted


def test_a_row_may_be_wide_or_narrow(path):
    rng = np.random.default_rng(0)
    state = {
        "wide": rng.normal(size=(4, 300, 500)),
        "narrow": rng.normal(size=(3000, 3)),
        "flat": rng.normal(size=5000),
        "bytes": rng.integers(1, 9, (500, 100), np.uint8),
    }
    mlstate.save(path, state, pack_below_bytes=0)
    for array in state.values():
        array.reshape(-1)[array.size // 2] += 1
    saved = mlstate.save(path, state, incremental=True, pack_below_bytes=0)
    # a row of 500, and runs of 86, 64 and 3 elements, so that each is at least 256 bytes
    assert {s.key: s.layers[1].nbytes for s in saved.shards()} == {
        "wide": 500 * 8, "narrow": 33 * 8, "flat": 64 * 8, "bytes": 300,
    }  # fmt: skip
    assert good(path, state)


# ---- ways to save ----


def test_copies_that_wait_are_looked_at_like_arrays(path):
    state = {"e": table(density=0.3), "z": np.zeros((ROWS, WIDTH), np.float32)}
    for step, most in enumerate([None, 0, 60_000]):
        state["e"][step] += 1
        copies = {name: array.copy() for name, array in state.items()}
        options = {"sparse": True, "incremental": True, "pack_below_bytes": 0}
        handle = save_async(path, state, max_staging_bytes=most, **options)
        handle.staged()
        state["e"][10 + step] = -1  # after staging, so the save must not see it
        saved = handle.wait()
        assert handle.progress() == (2 * state["e"].nbytes,) * 2
        assert layers_of(saved) == {"e": 1 + step, "z": 0}
        assert good(path, copies)


@pytest.mark.parametrize("kind", ["fortran", "reversed", "every other", "swapped", "bfloat16"])
def test_memory_of_any_kind(path, kind):
    base = table(density=0.4)
    if kind == "bfloat16":
        base = base.astype(pytest.importorskip("ml_dtypes").bfloat16)
    state = {"e": base if kind == "bfloat16" else views_of(base)[kind]}
    for step in range(3):
        state["e"][7 * step : 7 * step + 3, step] = step - 1
        options = {"sparse": True, "incremental": step > 0, "pack_below_bytes": 0}
        saved = mlstate.save(path, state, **options)
        assert layers_of(saved) == {"e": 1 + step}
        assert good(path, {"e": state["e"].astype(state["e"].dtype.newbyteorder("="))})


def test_ranks_save_their_rows(path):
    array = table(density=0.2)

    def save(group, step):
        layout = Layout.rows(2)
        rows = part(array, layout.steps, group.rank)
        state = {"e": Shard(rows, layout, group.rank, shape=array.shape)}
        options = {"sparse": True, "incremental": True, "pack_below_bytes": 0}
        return mlstate.save(path, state, group=group, step=step, **options)

    for step in range(3):
        array[step : step + 5] += 1  # the first rank holds all of them
        results = run_ranks(2, lambda group, step=step: save(group, step))
        written = [checkpoint.written["new_bytes"] for checkpoint in results]
        assert step == 0 or written == [5 * ROW_BYTES, 0]
        assert good(path, {"e": array})
    halves = [load(path, rank=r, world_size=3, layout="rows").model["e"] for r in range(3)]
    assert np.concatenate(halves).tobytes() == array.tobytes()


@pytest.mark.parametrize("codec", [None, "zlib"])
def test_steps_share_layers_and_go_one_by_one(path, codec):
    state, copies = {"e": table(density=0.4).round(1)}, {}
    manager = CheckpointManager(path, keep=3)
    options = {"sparse": True, "incremental": True, "compress": codec, "pack_below_bytes": 0}
    for step in range(12):
        state["e"][3 * step : 3 * step + 2] = step
        if step % 2:
            manager.save(step, model=state, **options)
        else:
            manager.save_async(step, model=state, **options).wait()
        copies[step] = state["e"].copy()
        for old in manager.steps():
            array = manager.restore(old).model["e"]
            assert array.tobytes() == copies[old].tobytes(), (step, old)
    assert manager.steps() == [9, 10, 11]
    assert [tensor.codec for tensor in manager.checkpoint(11).tensors()] == [codec]
    manager.delete(9)
    manager.delete(10)
    assert manager.restore_latest().model["e"].tobytes() == state["e"].tobytes()
    used = {layer.path for s in manager.checkpoint(11).shards() for layer in s.layers}
    assert used == {f"params/{file.name}" for file in (path / "params").iterdir()}


def test_resharding_leaves_zeros_out_again(path, tmp_path):
    state = {"e": table(density=0.2), "z": np.zeros((ROWS, WIDTH))}
    mlstate.save(path, state, sparse=True, incremental=True, pack_below_bytes=0)
    options = {"layout": "rows", "world_size": 3, "pack_below_bytes": 0}
    resharded = mlstate.checkpoint.reshard(path, tmp_path / "three", **options)
    assert resharded.stored_nbytes == int(state["e"].any(axis=1).sum()) * ROW_BYTES
    assert good(tmp_path / "three", state)
    mlstate.save(path, state)  # the option is off, but nothing changed, so nothing is written
    assert mlstate.checkpoint.inspect(path).stored_nbytes == resharded.stored_nbytes
    dense = mlstate.save(tmp_path / "plain", state)
    assert mlstate.checkpoint.reshard(dense.path, tmp_path / "four", **options).nbytes == (
        mlstate.checkpoint.inspect(tmp_path / "four").stored_nbytes
    )


def test_sparse_word_model_is_smaller_and_resaves_little(path):
    words = WordModel("json")
    words.train(20)
    first = mlstate.save(path, words.model, words.states, sparse=True)
    states = [t for t in first.tensors() if t.section == "optim_state"]
    assert sum(t.nbytes for t in states) >= 3.5 * sum(t.stored_nbytes for t in states)
    before = {name: a.copy() for name, a in (words.model | words.states).items()}
    words.train(10)
    changed = sum(
        a[(a != before[name]).any(axis=1)].nbytes
        for name, a in (words.model | words.states).items()
    )
    second = mlstate.save(path, words.model, words.states, incremental=True)
    assert 0 < changed <= second.written["new_bytes"] <= 1.2 * changed
    assert good(path, words.model, words.states)


# ---- damage in the existing checkpoint ----


def test_damaged_base_gets_no_overlay(path):
    state = {"e": table()}
    mlstate.save(path, state, pack_below_bytes=0)
    [file] = (path / "params").iterdir()
    flip(file, 4096 + 50 * ROW_BYTES)
    state["e"][50] += 1  # the damaged row itself changed
    saved = mlstate.save(path, state, incremental=True, pack_below_bytes=0)
    assert saved.written["new_bytes"] == state["e"].nbytes
    assert good(path, state)


def test_new_shape_starts_a_new_base(path):
    mlstate.save(path, {"e": table()}, incremental=True, pack_below_bytes=0)
    state = {"e": table(rows=ROWS + 1)}
    saved = mlstate.save(path, state, incremental=True, pack_below_bytes=0, overwrite=True)
    assert layers_of(saved) == {"e": None}
    assert [t.version for t in saved.tensors()] == [1]
    assert good(path, state)


# ---- reports and errors ----


@pytest.mark.parametrize("name", ["sparse", "incremental"])
def test_flags_are_true_or_false(path, name):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got int"):
        mlstate.save(path, {"w": np.ones(2)}, **{name: 1})
    with pytest.raises(TypeError, match=f"{name} must be True or False, got str"):
        save_async(path, {"w": np.ones(2)}, **{name: "yes"})
    assert not path.exists()


# ---- layers of several dtypes in one file ----

DTYPES = ["i1", "f2", "f4", "f8", "c8"]


def change_rows(array, rng):
    """Change a block of rows of up to 240 KB, and a few rows elsewhere."""
    row_bytes = array.strides[0]
    count = int(rng.integers(60_000, 240_000)) // row_bytes
    start = int(rng.integers(0, len(array) - count))
    array[start : start + count] += rng.integers(1, 100, (count, array.shape[1])).astype(
        array.dtype
    )
    array[rng.permutation(len(array))[:10]] += 1


def wrong_names(path, model):
    loaded = mlstate.load(path).model
    return [name for name in model if not np.array_equal(loaded[name], model[name])]


@pytest.mark.parametrize("codec", [None, "zlib"])
@pytest.mark.parametrize(("seed", "count"), [(0, 3), (1, 3), (2, 4), (3, 4), (4, 24)])
def test_layers_of_several_dtypes_in_one_file_are_exact(path, seed, count, codec):
    """Layers of less than `pack_below_bytes` share a file, which is larger than a buffer.

    Files of 24 layers are written with direct I/O, whose buffer is larger.
    """
    rng = np.random.default_rng(seed)
    model = {"odd": np.ones(3, "i1")}
    for number in range(count):
        dtype, width = np.dtype(rng.choice(DTYPES)), int(rng.integers(1, 17))
        rows = 1_500_000 // (dtype.itemsize * width)
        model[f"w{number}"] = np.zeros((rows, width), dtype)
        change_rows(model[f"w{number}"], rng)
    mlstate.save(path, model, sparse=True, compress=codec)
    assert wrong_names(path, model) == []
    model = {name: array.copy() for name, array in model.items()}
    model["odd"] += 1
    for number in range(count):
        change_rows(model[f"w{number}"], rng)
    mlstate.save(path, model, incremental=True, compress=codec)
    assert wrong_names(path, model) == []
    assert good(path, model)
