"""Saving and loading sharded checkpoints in one process."""

import contextlib
import errno
import json
import os
import re
from pathlib import Path

import child
import numpy as np
import pytest
from checkpoint_model import STEPS, part, parts_of, same
from hypothesis import given, settings
from hypothesis import strategies as st
from json_checksums import renew_checksum
from thread_team import calling_in_background
from tries import tries

import mlstate
from mlstate import ModelStateDict, OptimizerStateDict, StateDict, _core
from mlstate._common.caller import find_caller
from mlstate.checkpoint import CheckpointManager, Layout, Shard, inspect, reshard
from mlstate.errors import CheckpointWarning

DTYPES = [
    np.float32, np.float64, np.float16, np.int8, np.uint16, np.int64, np.bool_, np.complex64,
]  # fmt: skip
with contextlib.suppress(ImportError):  # ml_dtypes does not support every version of Python
    import ml_dtypes

    DTYPES += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def random(shape, dtype=np.float32, seed=0):
    data = np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    if dtype is np.bool_:
        return (np.frombuffer(data, np.uint8) & 1).astype(bool).reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape).copy()


def every_kind():
    """A state with every awkward kind of array and name."""
    state = {f"dtype.{np.dtype(d).name}": random((3, 5), d, i) for i, d in enumerate(DTYPES)}
    big = random((700, 600))
    return state | {
        "big": big,
        "strided": big[::2, ::3],
        "reversed": big[::-1],
        "fortran": np.asfortranarray(big),
        "swapped": random((9, 4)).astype(">f4"),
        "broadcast": np.broadcast_to(np.float32(3), (5, 7)),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 4), np.float16),
        "a/b\\..": random(3),
        "Ä∞\n\x00": random(3),
        "../../x": random(3),
        "CON": random(3),
        "con": random(3),
        "": random(2),
        "x" * 400: random(4),
        "x" * 399 + "y": random(4),
    }


def native(state):
    return {k: v.astype(v.dtype.newbyteorder("=")) for k, v in state.items()}


def files_of(path):
    return {
        str(file.relative_to(path)): file.stat().st_mtime_ns for file in path.rglob("*.safetensors")
    }


# ---- round trips ----


@pytest.mark.parametrize("pack", [0, 1, 2000, 1 << 18, 1 << 40])
def test_every_dtype_round_trips_bitwise(path, pack):
    state = every_kind()
    mlstate.save(path, state, {f"{k}.m": v for k, v in state.items()}, pack_below_bytes=pack)
    for options in ({}, {"mmap": True}, {"verify": False}, {"verify": "first"}):
        loaded = mlstate.load(path, **options)
        assert same(native(state), loaded.model)
        assert same({f"{k}.m": v for k, v in native(state).items()}, loaded.optimizer)
    assert mlstate.verify(path)


def test_classes_attributes_and_metadata_come_back(path):
    model = ModelStateDict({"w": np.ones(2)}, model_type="gpt", layer_count=3)
    adam = OptimizerStateDict({"w.m": np.ones(2)}, optimizer_type="adam", step=7, learning_rate=0.5)
    metadata = {"run": "ä", "list": [1, 2.5, None, True], "nested": {"a": "b"}}
    checkpoint = mlstate.save(path, model, adam, metadata=metadata)
    loaded = mlstate.load(path)
    assert type(loaded.model) is ModelStateDict
    assert (loaded.model.model_type, loaded.model.layer_count) == ("gpt", 3)
    assert type(loaded.optimizer) is OptimizerStateDict
    assert (loaded.optimizer.step, loaded.optimizer.learning_rate) == (7, 0.5)
    assert loaded.metadata == checkpoint.metadata == metadata
    assert loaded.step == checkpoint.step == 7
    metadata = {"pair": (1, (2,))}  # as JSON returns it
    again = mlstate.save(path, model, metadata=metadata, overwrite=True)
    assert mlstate.load(path).metadata == again.metadata == {"pair": [1, [2]]}


def test_a_model_or_an_optimizer_alone(path):
    mlstate.save(path, {"w": np.ones(2)})
    assert mlstate.load(path).optimizer is None
    mlstate.save(path, optimizer={"w.m": np.ones(2)}, step=0, overwrite=True)
    loaded = mlstate.load(path)
    assert (loaded.model, loaded.step) == (None, 0)
    assert type(loaded.optimizer) is StateDict


def test_an_empty_state_is_a_state(path):
    mlstate.save(path, {}, {})
    loaded = mlstate.load(path)
    assert (loaded.model, loaded.optimizer) == ({}, {})
    assert mlstate.verify(path)


# ---- files ----


def test_safetensors_package_reads_shard_files(path):
    safetensors = pytest.importorskip("safetensors", reason="it is the reader to agree with")
    state = {"layer.w": random((300, 400)), "layer.b": random(7, DTYPES[-1])}
    shards = mlstate.save(path, state, pack_below_bytes=0).shards()
    for shard in shards:
        assert shard.path.startswith(f"params/{shard.key}.0-1.")
        assert shard.offset == 4096
        with safetensors.safe_open(path / shard.path, "np") as file:
            assert list(file.keys()) == [shard.key]
            about = json.loads(file.metadata()["mlstate.shards"])[shard.key]
        assert about["name"] == shard.key
        assert (about["part"], about["version"], about["layout"]) == (0, 1, [])
        assert same({shard.key: state[shard.key]}, mlstate.load_file(path / shard.path))
    assert {s.path.partition("/")[0] for s in shards} == {"params"}


def test_small_shards_share_files_and_large_ones_do_not(path):
    state = {f"s{i}": random(100) for i in range(50)} | {"large": random((300, 300))}
    checkpoint = mlstate.save(path, state, {"large.m": random((300, 300))})
    assert len(checkpoint.files()) == 3
    assert len(mlstate.save(path / "x", state, pack_below_bytes=0).files()) == 51


def test_every_file_in_the_folder_is_known(path):
    checkpoint = mlstate.save(path, every_kind(), pack_below_bytes=0)
    paths = {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()}
    index = f"index/{checkpoint.generation}.0.json"
    assert paths == {*checkpoint.files(), index, "manifest.json", "lock"}
    assert all(len(name.rpartition("/")[2].encode()) <= 255 for name in paths)


def test_new_files_have_the_permissions_that_the_umask_leaves(path):
    old = os.umask(0o027)
    try:
        mlstate.save(path, {"w": np.ones(2)})
    finally:
        os.umask(old)
    assert {f.stat().st_mode & 0o777 for f in path.rglob("*.safetensors")} == {0o640}


# ---- unchanged shards ----


def test_unchanged_tensors_are_not_rewritten(path):
    state = {"a": random((300, 300)), "b": random((300, 300), seed=1), "small": random(5)}
    first = mlstate.save(path, state)
    before = files_of(path)
    again = mlstate.save(path, state)
    assert again.written["new_bytes"] == again.written["new_files"] == 0
    assert files_of(path) == before
    assert again.generation != first.generation
    assert [t.version for t in again.tensors()] == [1, 1, 1]
    state["b"][299, 299] += 1
    third = mlstate.save(path, state)
    assert third.written["new_shards"] == 1
    assert {t.key: t.version for t in third.tensors()} == {"a": 1, "b": 2, "small": 1}
    assert same(state, mlstate.load(path).model)
    assert mlstate.verify(path)
    assert not mlstate.verify(path).leftover


def test_equal_checksum_with_different_bytes_is_rewritten(path):
    """CRC32C is linear: a multiple of its polynomial changes no checksum."""
    state = {"w": np.zeros(64, np.uint8)}
    crc = mlstate.save(path, state).shards()[0].crc32c
    # x**32 + the Castagnoli polynomial, in the bit order of memory
    state["w"][10:15] ^= np.frombuffer((0x82F63B78 << 1 | 1).to_bytes(5, "little"), np.uint8)
    changed = mlstate.save(path, state)
    assert changed.written["new_shards"] == 1
    assert changed.tensors()[0].version == 2
    assert changed.shards()[0].crc32c == crc
    assert same(state, mlstate.load(path).model)


def test_versions_of_the_caller_decide_without_a_look(path):
    array = np.zeros(9)
    mlstate.save(path, {"w": Shard(array, version=5)})
    array[:] = 1
    checkpoint = mlstate.save(path, {"w": Shard(array, version=5)})
    assert checkpoint.written["new_shards"] == 0
    assert not mlstate.load(path).model["w"].any()
    newer = mlstate.save(path, {"w": Shard(array, version=9)})
    assert newer.tensors()[0].version == 9
    assert mlstate.load(path).model["w"].all()
    with pytest.raises(ValueError, match="'w': version 8 is not allowed: the stored version"):
        mlstate.save(path, {"w": Shard(array, version=8)})
    assert mlstate.verify(path)


def test_a_segment_that_is_mostly_dead_is_given_up(path):
    state = {f"s{i:02}": random(1000, np.int64, seed=i) for i in range(20)}
    mlstate.save(path, state)
    for i in range(15):
        state[f"s{i:02}"] += 1
    again = mlstate.save(path, state)
    assert again.written["new_shards"] == 20
    assert len(again.files()) == 1
    assert sorted(t.version for t in again.tensors()) == [1] * 5 + [2] * 15
    assert same(state, mlstate.load(path).model)


def test_damaged_shard_is_rewritten(path):
    state = {"w": random((300, 300))}
    old = mlstate.save(path, state).shards()[0]
    (path / old.path).write_bytes(b"no shard")
    assert mlstate.save(path, state).written["new_shards"] == 1
    assert mlstate.verify(path)


def test_a_damaged_checkpoint_can_be_saved_over(path):
    checkpoint = mlstate.save(path, {"w": random(10)})
    (path / "index" / f"{checkpoint.generation}.0.json").write_bytes(b"{}")
    with pytest.warns(UserWarning, match="damaged and will be replaced"):
        mlstate.save(path, {"w": random(11)})
    assert mlstate.verify(path)


def test_damaged_manifest_is_replaced_and_newer_is_refused(path):
    mlstate.save(path, {"w": random(10)})
    manifest = path / "manifest.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content.replace(b'"world_size": 1', b'"world_size": 2'))
    start = re.escape(f"{manifest}: the text has changed since it was written")
    with pytest.raises(mlstate.ChecksumError, match=f"^{start}"):
        mlstate.load(path)
    with pytest.warns(UserWarning, match="damaged and will be replaced"):
        mlstate.save(path, {"w": random(11)})
    assert same({"w": random(11)}, mlstate.load(path).model)
    newer = manifest.read_bytes().replace(b'"format_version": 2', b'"format_version": 4')
    newer = renew_checksum(newer)
    manifest.write_bytes(newer)
    with pytest.raises(mlstate.FormatError, match="format version is 4"):
        mlstate.save(path, {"w": random(12)})
    assert manifest.read_bytes() == newer


@pytest.mark.parametrize(
    "call",
    [
        "atexit.register(mlstate.save, path, state)",
        "exec('save(path, state)', {'save': mlstate.save, 'path': path, 'state': state})",
    ],
)
def test_warning_without_a_calling_module_does_not_stop_a_save(path, call):
    mlstate.save(path, {"w": random(10)})
    manifest = path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"world_size": 1', b'"world_size": 2'))
    script = (
        "import atexit, sys, mlstate, numpy as np\npath, state = sys.argv[1], {'w': np.ones(3)}\n"
    )
    done = child.attempt(script + call, path)
    assert done.returncode == 0
    assert "damaged and will be replaced" in done.stderr
    assert "Traceback" not in done.stderr
    assert same({"w": np.ones(3)}, mlstate.load(path).model)


def test_save_without_warning_keeps_caller_globals(path):
    names = {"save": mlstate.save, "path": path, "state": {"w": random(10)}, "__builtins__": {}}
    exec("save(path, state)", names)
    assert set(names) == {"save", "path", "state", "__builtins__"}


def test_the_caller_is_found_or_memory_is_short():
    hooks = pytest.importorskip("_testcapi", reason="CPython's own hooks are not installed")
    names = {"__name__": "mlstate.test", "find": find_caller}
    exec("def inner(): return find()\ndef outer(): return inner()", names)
    callers = []
    for n in range(20):
        try:
            hooks.set_nomemory(n, n + 1)
            callers.append(names["outer"]())
        except MemoryError:
            pass
        finally:
            hooks.remove_mem_hooks()
    assert callers and all(caller.names is globals() for caller in callers)


def test_tensors_come_and_go_and_change_their_shape(path):
    mlstate.save(path, {"a": random(10), "b": random((4, 4)), "c": random(3)})
    state = {"b": random((2, 8)), "c": random(3).astype(np.float64), "d": random(5)}
    mlstate.save(path, state, overwrite=True)
    assert same(state, mlstate.load(path).model)
    assert not mlstate.verify(path).leftover


# ---- parts ----


@pytest.mark.parametrize("stored", STEPS, ids=str)
def test_any_layout_into_any_layout_and_back(path, stored):
    arrays = {"w": random((7, 5)), "v": random((7, 5, 3), np.float16), "e": random((0, 5))}
    shards = [
        {name: Layout(stored).shard(array, i) for name, array in arrays.items()}
        for i in range(parts_of(stored))
    ]
    merged = {f"{name}": array for name, array in arrays.items()}
    mlstate.save(path, merged, layout=Layout(stored), pack_below_bytes=64)
    assert same(arrays, mlstate.load(path).model)
    for target_steps in STEPS:
        for index in range(parts_of(target_steps)):
            expected = {n: part(a, target_steps, index) for n, a in arrays.items()}
            for options in ({}, {"mmap": True}, {"verify": False}):
                loaded = mlstate.load(path, layout=Layout(target_steps), rank=index, **options)
                assert same(expected, loaded.model), (target_steps, index)
    for i, state in enumerate(shards):
        assert same(
            {n: part(a, stored, i) for n, a in arrays.items()},
            {n: s.array for n, s in state.items()},
        )


@settings(max_examples=tries(60), deadline=None)
@given(data=st.data())
def test_any_shape_cut_twice_is_itself(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(0, 6), max_size=4), label="shape")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")

    def layout():
        steps = []
        if shape:
            axes = st.integers(0, len(shape) - 1)
            steps = data.draw(
                st.lists(st.tuples(axes, st.integers(1, 4)), max_size=3), label="steps"
            )
        if data.draw(st.booleans(), label="flat"):
            steps.append(("flat", data.draw(st.integers(1, 4))))
        return Layout(steps)

    array = random(shape, dtype)
    first, second = layout(), layout()
    folder = tmp_path_factory.mktemp("cut")
    mlstate.save(folder / "a", {"w": array}, layout=first, pack_below_bytes=32)
    assert same({"w": array}, mlstate.load(folder / "a").model)
    if shape or all(axis == "flat" for axis, _ in second.steps):
        reshard(folder / "a", folder / "b", layout=second)
        assert same({"w": array}, mlstate.load(folder / "b").model)
        assert mlstate.verify(folder / "b")
        for index in range(second.parts):
            got = mlstate.load(folder / "a", layout=second, rank=index).model["w"]
            if shape:
                assert same({"w": part(array, second.steps, index)}, {"w": got})


def test_states_are_cut_along_the_axes_of_their_parameter(path):
    weight = random((6, 4))
    model = {"w": weight, "square": random((4, 4)), "b": random(6)}
    adafactor = {
        "w.rows": random(6), "w.cols": random(4), "w.m": random((6, 4)), "w.step": np.array(3),
        "square.row": random(4), "square.col": random(4),
        "w.row_var": random((6, 1)), "w.col_var": random((1, 4)),
        "b.m": random(6),
    }  # fmt: skip
    mlstate.save(path, model, adafactor)
    records = {t.key: t for t in inspect(path).tensors()}
    assert records["w.rows"].axes == (0,)
    assert records["w.cols"].axes == (1,)
    assert records["square.col"].axes == (1,)
    assert records["w.col_var"].axes == (None, 1)
    assert records["w.m"].axes is None
    second = mlstate.load(path, layout=Layout.rows(2), rank=1).optimizer
    assert same(second, {
        "w.rows": adafactor["w.rows"][3:], "w.cols": adafactor["w.cols"],
        "w.m": adafactor["w.m"][3:], "w.step": adafactor["w.step"],
        "square.row": adafactor["square.row"][2:], "square.col": adafactor["square.col"],
        "w.row_var": adafactor["w.row_var"][3:], "w.col_var": adafactor["w.col_var"],
        "b.m": adafactor["b.m"][3:],
    })  # fmt: skip
    columns = mlstate.load(path, layout=Layout.axis(1, 2), rank=0).optimizer
    assert same({"x": columns["w.cols"]}, {"x": adafactor["w.cols"][:2]})
    assert same({"x": columns["w.rows"]}, {"x": adafactor["w.rows"]})
    # ... and the moments are saved with them
    mlstate.save(path, model, adafactor, layout="rows")
    cut = mlstate.save(path / "cut", model, adafactor, layout=Layout.rows(2))
    layouts = {t.key: t.layout for t in cut.tensors()}
    assert layouts["w.cols"] == Layout.whole() and layouts["w.rows"] == Layout.rows(2)


def test_whole_tensors_are_not_resharded_for_several_ranks(path):
    mlstate.save(path, {"w": random((4, 2))})
    for layout in ("whole", Layout.whole()):
        with pytest.raises(ValueError, match="has 1 part for world_size=3: pass world_size=1"):
            reshard(path, path / "new", layout=layout, world_size=3)
    assert reshard(path, path.parent / "new", layout="whole", world_size=1).world_size == 1


def test_without_a_layout_parts_are_cut_as_they_were_saved(path):
    flat, rows = random((5, 4)), random((5, 4))
    state = {
        "flat": flat,
        "whole": random(3),
    }
    mlstate.save(path, state, layout=Layout.flat(4))
    got = mlstate.load(path, rank=1, world_size=3).model["flat"]
    assert same({"x": got}, {"x": part(flat, [("flat", 3)], 1)})
    mlstate.save(path, {"w": rows}, overwrite=True)
    with pytest.warns(CheckpointWarning, match="rank 2 of 3 gets all of each tensor.* layout="):
        assert same({"w": rows}, mlstate.load(path, rank=2, world_size=3).model)
    assert same({"w": rows}, mlstate.load(path, rank=2, world_size=3, layout="whole").model)
    mlstate.save(path, {"w": rows}, layout=Layout.axis(1, 2) * Layout.rows(2))
    with pytest.raises(ValueError, match="'w': "):
        mlstate.load(path, rank=0, world_size=2)


def test_missing_part_fails_only_if_requested(path):
    array = random((8, 3))
    mlstate.save(path, {"w": Layout.rows(4).shard(array, 2)})
    assert same({"w": array[4:6]}, mlstate.load(path, layout=Layout.rows(4), rank=2).model)
    with pytest.raises(mlstate.FormatError, match="'w': "):
        mlstate.load(path)


@child.counts_reads
@pytest.mark.parametrize("verify", [False, True])
def test_load_reads_only_requested_bytes(path, verify):
    state = {f"w{i}": random((4096, 1024), seed=i) for i in range(2)}
    mlstate.save(path, state)
    before = child.bytes_read()
    part_of = mlstate.load(path, names="w1", layout=Layout.rows(16), rank=3, verify=verify).model[
        "w1"
    ]
    read = child.bytes_read() - before
    assert same({"w": part_of}, {"w": state["w1"][768:1024]})
    blocks = 2 << 20 if verify else 0  # blocks of 1 MiB, one at either end
    assert read <= part_of.nbytes + blocks + 64 * 1024


# ---- selections ----


@pytest.fixture
def layers(path):
    model = {f"layers.{i}.{n}": random(4, seed=i) for i in range(12) for n in ("w", "b")}
    model["head[0]"] = random(2)
    mlstate.save(path, model, {f"{k}.{s}": v for k, v in model.items() for s in "mv"})
    return path


@pytest.mark.parametrize(
    ("names", "model", "optimizer"),
    [
        ("layers.1", 2, 4),
        ("layers.1.w", 1, 2),
        ("layers.1.w.m", 0, 1),
        ("layers.*.w", 12, 24),
        ("layers.1?.b", 2, 4),
        ("layers.[0-2].w", 3, 6),
        ("*.m", 0, 25),
        ("*", 25, 50),
        (["layers.0", "layers.1.w"], 3, 6),
        ("head[0]", 1, 2),
        ([], 0, 0),
    ],
)
def test_names_select_tensors_layers_and_globs(layers, names, model, optimizer):
    loaded = mlstate.load(layers, names=names)
    assert (len(loaded.model), len(loaded.optimizer)) == (model, optimizer)


def test_existing_name_is_not_a_glob(path):
    model = {"w[0]": random(2), "w0": random(2), "l[1].w": random(2), "l1.w": random(2)}
    mlstate.save(path, model, {"w0.m": random(2), "l[1].w.m": random(2), "l1.w.m": random(2)})
    loaded = mlstate.load(path, names="w[0]")
    assert (list(loaded.model), list(loaded.optimizer)) == (["w[0]"], [])
    loaded = mlstate.load(path, names="l[1]")
    assert (list(loaded.model), list(loaded.optimizer)) == (["l[1].w"], ["l[1].w.m"])
    loaded = mlstate.load(path, names="w[01]")
    assert (list(loaded.model), list(loaded.optimizer)) == (["w0"], ["w0.m"])


def test_name_without_match_raises(layers):
    with pytest.raises(
        mlstate.TensorNotFoundError, match=r"'layers\.12' not found .*; did you m"
    ) as caught:
        mlstate.load(layers, names=["layers.0", "layers.12"])
    assert caught.value.name == "layers.12"
    with pytest.raises(mlstate.TensorNotFoundError, match=r"; did you mean 'layers\.11\.w'\?"):
        mlstate.load(layers, names="layer.11.w")
    with pytest.raises(TypeError, match="names must be str"):
        mlstate.load(layers, names=[3])


# ---- into ----


def test_arrays_that_exist_are_filled(path):
    state = every_kind()
    mlstate.save(path, state)
    targets = {k: np.zeros(v.shape, v.dtype.newbyteorder("=")) for k, v in state.items()}
    targets["big"] = np.zeros((600, 700), np.float32).T  # too large to share a file
    before = dict(targets)
    loaded = mlstate.load(path, into={"model": targets})
    assert loaded.model is targets
    assert all(targets[k] is before[k] for k in targets)
    assert same(native(state), targets)


def test_into_is_checked_before_writing(path):
    mlstate.save(path, {"a": random(4), "z": random((2, 2))}, {"a.m": random(4)})

    def refused(error, match, **target):
        full = {"a": np.zeros(4, np.float32), "z": np.zeros((2, 2), np.float32)} | target
        full = {k: v for k, v in full.items() if v is not None}
        with pytest.raises(error, match=match):
            mlstate.load(path, into={"model": full})
        assert not any(np.any(array) for array in full.values())

    refused(
        mlstate.CompatibilityError,
        r"'z': the checkpoint has float32 of \(2, 2\)",
        z=np.zeros((2, 3), np.float32),
    )
    refused(mlstate.CompatibilityError, "target is float64", z=np.zeros((2, 2)))
    refused(mlstate.CompatibilityError, 'Unexpected key.*"z"', z=None)
    refused(mlstate.CompatibilityError, 'Missing key.*"extra"', extra=np.zeros(3))
    frozen = np.zeros((2, 2), np.float32)
    frozen.flags.writeable = False
    refused(ValueError, "read-only", z=frozen)
    with pytest.raises(TypeError, match="'weights'"):
        mlstate.load(path, into={"weights": {}})
    with pytest.raises(TypeError, match="into= takes"):
        mlstate.load(path, into=3)
    with pytest.raises(ValueError, match="views of the files"):
        mlstate.load(path, into={"model": {}}, mmap=True)


def test_part_of_a_state_is_filled_by_name(path):
    mlstate.save(path, {"a.w": random(4), "b.w": random(4, seed=1)})
    target = {"a.w": np.zeros(4, np.float32), "b.w": np.zeros(4, np.float32)}
    mlstate.load(path, names="b", into={"model": target})
    assert not target["a.w"].any()
    assert same({"x": target["b.w"]}, {"x": random(4, seed=1)})


def test_one_loaded_state_is_filled_from_another_checkpoint(path):
    state = {"w": random(4)}
    mlstate.save(path / "a", state, {"w.m": random(4)})
    loaded = mlstate.load(path / "a")
    mlstate.save(path / "b", {"w": random(4, seed=9)}, {"w.m": random(4, seed=8)})
    mlstate.load(path / "b", into=loaded)
    assert same({"w": random(4, seed=9)}, loaded.model)


def test_missing_optimizer_states_are_skipped_zeroed_or_refused(path):
    model = {"w": random((3, 2)), "b": random(3)}
    mlstate.save(path, model, {"w.m": random((3, 2)), "w.v": random((3, 2)), "b.m": random(3)})
    assert sorted(mlstate.load(path).optimizer) == ["b.m", "w.m", "w.v"]
    states = mlstate.load(path, missing="zeros").optimizer
    assert sorted(states) == ["b.m", "b.v", "w.m", "w.v"]
    assert states["b.v"].shape == (3,) and not states["b.v"].any()
    half = mlstate.load(path, missing="zeros", layout=Layout.rows(3), rank=1).optimizer
    assert half["b.v"].shape == (1,)

    def target():
        names = {"w.m": (3, 2), "w.v": (3, 2), "b.m": (3,), "b.v": (3,)}
        return {name: np.full(shape, 7, np.float32) for name, shape in names.items()}

    skipped, zeroed = target(), target()
    mlstate.load(path, into={"optimizer": skipped})
    assert (skipped["b.v"] == 7).all() and not (skipped["w.v"] == 7).all()
    mlstate.load(path, into={"optimizer": zeroed}, missing="zeros")
    assert not zeroed["b.v"].any()
    with pytest.raises(mlstate.CompatibilityError, match=r'Missing key.*"b\.v"'):
        mlstate.load(path, into={"optimizer": target()}, missing="error")
    with pytest.raises(mlstate.CompatibilityError, match=r'Missing key.*"b\.v"\.') as info:
        mlstate.load(path, missing="error")
    assert info.value.name == "b.v"
    assert list(mlstate.load(path, names="b", missing="error").optimizer) == ["b.m"]
    with pytest.raises(ValueError, match="missing must be one of skip, zeros, error"):
        mlstate.load(path, missing="ignore")


# ---- mappings ----


def test_mapped_arrays_are_views_that_outlive_the_checkpoint(path):
    state = {"w": random((300, 300)), "s": random(5)}
    mlstate.save(path, state)
    mapped = mlstate.load(path, mmap=True).model
    assert not mapped["w"].flags.writeable and not mapped["w"].flags.owndata
    mlstate.save(path, {"other": random(2)}, overwrite=True)  # deletes the files
    assert same(state, mapped)


# ---- arguments ----


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"model": [1]}, TypeError, "model must be a mapping"),
        ({}, ValueError, "nothing to save"),
        ({"model": {"w": 3.0}}, TypeError, "params 'w' .* got float; .* metadata="),
        ({"model": {"w": None}}, TypeError, "params 'w' .* got NoneType"),
        ({"model": {"w": [1.0]}}, TypeError, "params 'w' .* got list; make an array"),
        ({"model": {"w": {"v": np.ones(2)}}}, TypeError, "params 'w' .* got dict; states are flat"),
        (
            {"optimizer": {"state": {}, "param_groups": []}},
            TypeError,
            "optim_state 'state' .* pass the optimizer itself",
        ),
        ({"model": {"w": np.ones(2)}, "group": object()}, TypeError, "group .*TorchGroup"),
        ({"model": {"w": np.ones(2)}, "metadata": "text"}, TypeError, "metadata .* got str"),
        ({"model": {3: np.ones(2)}}, TypeError, "str"),
        ({"model": {"w": np.array(["x"])}}, mlstate.CompatibilityError, "params 'w'"),
        ({"model": {"\ud800": np.ones(2)}}, ValueError, "surrogate|UTF-8"),
        ({"model": {"w": np.ones((1,) * 17)}}, mlstate.CompatibilityError, "17 dimensions"),
        ({"model": {"w": np.ones(2)}, "metadata": {3: 1}}, TypeError, "metadata has the key 3"),
        ({"model": {"w": np.ones(2)}, "step": 1.0}, TypeError, "step must be an int .* got float"),
        ({"model": {"w": np.ones(2)}, "metadata": {"a": "\ud800"}}, ValueError, "JSON|surrog"),
        ({"model": {"w": np.ones(2)}, "step": -1}, ValueError, "step"),
        ({"model": {"w": np.ones(2)}, "step": 1.5}, TypeError, "float"),
        ({"model": {"w": np.ones(2)}, "layout": "cols"}, ValueError, "layout must be"),
        (
            {"model": {"w": np.ones(2)}, "layout": "columns"},
            ValueError,
            r"pass Layout.axis\(1, 1\) for columns",
        ),
        ({"model": {"w": np.ones(2)}, "pack_below_bytes": -1}, ValueError, "pack_below"),
        ({"model": {"w": np.ones(2)}, "progress": 3}, TypeError, "callable"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_invalid_arguments_keep_the_checkpoint(path, arguments, error, match):
    mlstate.save(path, {"old": np.ones(3)})
    before = files_of(path)
    with pytest.raises(error, match=match):
        mlstate.save(path, **arguments)
    assert files_of(path) == before
    assert list(mlstate.load(path).model) == ["old"]
    assert not mlstate.verify(path).leftover
    assert not mlstate.verify(path).strange


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"rank": 0}, TypeError, "together, or neither"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank 2 of 2 does not exist"),
        ({"layout": "rows"}, TypeError, "which part"),
        ({"names": 3}, TypeError, "names must be a str or a sequence of str, got int"),
        ({"group": object()}, TypeError, "group must have the methods .* got builtins.object"),
        ({"rank": 0, "world_size": 3, "layout": Layout.rows(2)}, ValueError, "2 parts for 3"),
        ({"verify": "maybe"}, ValueError, "verify must be"),
        ({"group": mlstate.collectives.SingleGroup(), "rank": 0}, TypeError, "not both"),
    ],
)
def test_bad_arguments_of_load_are_refused(path, arguments, error, match):
    mlstate.save(path, {"w": np.ones(3)})
    with pytest.raises(error, match=match):
        mlstate.load(path, **arguments)


def test_a_state_in_the_place_of_the_path_is_refused():
    with pytest.raises(TypeError, match=r"got dict; it comes first: save\(path, model"):
        mlstate.save({"w": np.ones(3)}, "path")


def test_folder_created_concurrently_is_used(path, monkeypatch):
    make = os.mkdir

    def late(name, *arguments):
        make(name, *arguments)  # the other process was quicker
        make(name, *arguments)

    monkeypatch.setattr(os, "mkdir", late)
    mlstate.save(path, {"w": np.ones(3)})
    monkeypatch.undo()
    assert mlstate.verify(path)


def test_load_error_describes_other_paths(tmp_path):
    file = tmp_path / "w.txt"
    file.write_bytes(b"x")
    for call in (mlstate.load, mlstate.checkpoint.inspect):
        with pytest.raises(mlstate.FormatError, match=r"w\.txt: it is the text 'x'.*download"):
            call(file)
    assert "it is the text 'x'" in mlstate.verify(file).problems[0].text
    for call in (mlstate.load, mlstate.checkpoint.inspect, mlstate.verify):
        with pytest.raises(FileNotFoundError, match=r"no such folder.*none") as caught:
            call(tmp_path / "none")
        assert isinstance(caught.value, mlstate.StoreError)
    with pytest.raises(FileNotFoundError, match=r"holds w\.txt: pass one of its files, or the fol"):
        mlstate.load(tmp_path)
    run = tmp_path / "run"
    CheckpointManager(run).save(1, {"w": np.ones(3)})
    (run / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match="is gone, and older steps"):
        mlstate.load(run)


def test_loaded_state_repr_counts_tensors(path):
    mlstate.save(path, {"w": np.ones(3)})
    assert "model=<StateDict: 1 tensor>, optimizer=None" in repr(mlstate.load(path))


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(mlstate.StoreError) as caught:
        mlstate.save(tmp_path / "file", {"w": np.ones(2)})
    assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)
    assert (tmp_path / "file").read_text() == "x"


# ---- progress and interruption ----


def test_progress_counts_every_byte(path):
    state = {"w": random((3000, 1000)), "s": random(10)}
    counts = []
    mlstate.save(path, state, progress=counts.append)
    assert sum(counts) == sum(a.nbytes for a in state.values())
    counts.clear()
    mlstate.load(path, progress=counts.append)
    assert sum(counts) == sum(a.nbytes for a in state.values())
    counts.clear()
    mlstate.verify(path, progress=counts.append)
    assert sum(counts) > sum(a.nbytes for a in state.values())


# ---- concurrent writers and readers ----


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_lock_of_dead_owner_with_live_child_is_taken_over(path):
    mlstate.save(path, {"w": np.ones(2)})
    reader, writer = os.pipe()
    owner = os.fork()
    if owner == 0:  # takes the lock, forks a child that keeps the descriptor, and exits
        from mlstate.checkpoint._folder.local import LocalFolder

        lock = LocalFolder(str(path)).claim()
        lock.acquire()
        lock.note("0123456789abcdef")
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)
        os._exit(0)
    os.waitpid(owner, 0)
    try:
        mlstate.save(path, {"w": np.zeros(2)})
        assert not mlstate.load(path).model["w"].any()
    finally:
        os.close(writer)
        os.close(reader)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_lock_alone(path):
    from mlstate.checkpoint._folder.local import LocalFolder

    mlstate.save(path, {"w": np.ones(2)})
    with LocalFolder(str(path)).claim() as lock:
        child = os.fork()
        if child == 0:
            lock.release()
            try:
                mlstate.save(path, {"w": np.ones(2)})
            except mlstate.StoreError:
                os._exit(3)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_next_save_removes_files_of_a_dead_writer(path):
    from mlstate.checkpoint._folder.local import LocalFolder

    mlstate.save(path, {"w": np.ones(2)})
    lock = LocalFolder(str(path)).claim()
    lock.acquire()
    lock.note("0123456789abcdef")
    lock.holder.close()  # as when the process dies
    litter = [
        "params/w.0-1.0123456789abcdef-0.safetensors",
        "params/segment-0.0123456789abcdef-3.safetensors.tmp",
        "index/0123456789abcdef.0.json",
        ".mlstate-0123456789abcdef.tmp",
    ]
    for name in litter:
        (path / name).write_bytes(b"x")
    foreign_file = path / "params" / "notes.txt"
    foreign_file.write_text("mine")
    assert sorted(mlstate.verify(path).leftover) == sorted(litter[:3])
    mlstate.save(path, {"w": np.zeros(2)})
    assert not any((path / name).exists() for name in litter)
    assert mlstate.verify(path).strange == ["params/notes.txt"]


def test_readers_see_one_checkpoint_or_the_other_while_it_is_replaced(path):
    def state(i):
        return {f"w{j}": np.full((40, 40), i, np.float32) for j in range(8)}

    mlstate.save(path, state(0), pack_below_bytes=0)
    seen = set()

    def read():
        model = mlstate.load(path).model
        values = {float(v) for array in model.values() for v in (array.min(), array.max())}
        assert len(values) == 1, values
        seen.update(values)
        report = mlstate.verify(path)
        assert report, report
        mlstate.load(path, verify="first")

    with calling_in_background(read, 2):
        for i in range(1, 40):
            mlstate.save(path, state(i), pack_below_bytes=0)
    assert seen


@pytest.mark.parametrize("rank", [-1, 17])
def test_projecting_a_layout_names_an_impossible_number_of_dimensions(rank):
    with pytest.raises(ValueError, match=f"rank must be from 0 to 16, not {rank}"):
        _core.layout_project(((0, 2),), 1, rank, None)


def test_layout_parts_match_numpy_slices():
    array = np.arange(7 * 5).reshape(7, 5)
    for steps in STEPS:
        layout = Layout(steps)
        for index in range(layout.parts):
            expected = part(array, steps, index)
            assert same({"x": expected}, {"x": layout.take(array, index)})
            assert layout.shape((7, 5), index) == expected.shape
    for axis in (-1, -2):  # negative axes, as in NumPy, are not valid in a layout
        with pytest.raises(ValueError, match=f"counts axes from 0, got axis {axis}"):
            Layout.axis(axis, 2)


def test_a_state_of_shards_is_a_state_dict(path):
    array = random((4, 4))
    state = StateDict(w=Layout.rows(2).shard(array, 0))
    assert state["w"].array.base is not None
    mlstate.save(path, state)
    assert inspect(path).tensors()[0].shape == (4, 4)


def test_replica_of_a_single_process_is_refused(path):
    mlstate.save(path, {"w": random(3)})
    with pytest.raises(ValueError, match="with replica=1, but this process saves alone"):
        mlstate.save(path, {"v": Shard(random(3), replica=1)})
    assert same({"w": random(3)}, mlstate.load(path).model)


def test_paths_may_be_relative_and_folders_may_be_moved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mlstate.save("ckpt", {"w": random(3)})
    Path("ckpt").rename("moved")
    assert same({"w": random(3)}, mlstate.load("moved").model)
    assert isinstance(CheckpointManager("moved").directory, str)


def test_loads_hold_no_text_of_indexes(path, monkeypatch):
    """The indexes of twenty thousand tensors are megabytes of text, which is not needed again."""
    from mlstate.checkpoint._store.checkpoint_files import CheckpointFiles

    released, seen = [], []

    class Text(bytes):
        def __del__(self):
            released.append(len(self))

    read = CheckpointFiles.load_index
    monkeypatch.setattr(CheckpointFiles, "load_index", lambda *args: Text(read(*args)))
    mlstate.save(path, {"w": random(3)})
    loaded = mlstate.load(path, progress=lambda count: seen.append(list(released)))
    assert same({"w": random(3)}, loaded.model)
    assert seen
    assert all(seen)  # the text was freed before the first byte was read
