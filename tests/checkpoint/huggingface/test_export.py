"""Exported Hugging Face folders: their files, failures and kills; ranks are threads."""

import json
import signal
import sys

import child
import numpy as np
import pytest
from checkpoint_model import flip, flip_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from interruption import signal_once
from rank_threads import outcomes
from weight_folder import write_folder

import mlstate
from mlstate import _core
from mlstate._common.atomic_file import Target
from mlstate.checkpoint import Layout, Shard, export_huggingface, export_huggingface_async
from mlstate.checkpoint import inspect as inspect_checkpoint
from mlstate.checkpoint._huggingface import export as export_module
from mlstate.cli import main
from mlstate.testing import run_ranks

INDEX = "model.safetensors.index.json"


def state_of():
    rng = np.random.default_rng(1)
    return {
        "embed": rng.random((50, 8)),
        "layers.0.w": rng.random((6, 10), np.float32).T,
        "layers.0.b": rng.random(7).astype(np.float16)[::-1],
        "big": rng.random(300_000).astype(">f8"),
        "none": np.zeros((0, 3)),
        "position": np.int64(9),
    }


def assert_holds(folder, state):
    model = mlstate.load(folder).model
    assert set(model) == set(state)
    for name, array in state.items():
        np.testing.assert_array_equal(model[name], array)
    assert mlstate.verify(folder)


# ---- files ----


def test_a_small_model_is_one_file_that_safetensors_reads(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy", reason="the format's own reader")
    export_huggingface(tmp_path / "m", state_of())
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["model.safetensors"]
    assert_holds(tmp_path / "m", state_of())
    arrays = safetensors.load_file(tmp_path / "m" / "model.safetensors")
    for name, array in state_of().items():
        np.testing.assert_array_equal(arrays[name], array)
    assert mlstate.load(tmp_path / "m").metadata == {"format": "pt"}


def test_files_are_filled_in_order_up_to_the_limit(tmp_path):
    state = {name: np.zeros(size, np.uint8) for name, size in
             [("a", 60), ("b", 40), ("c", 1), ("huge", 300), ("d", 99), ("e", 1)]}  # fmt: skip
    export_huggingface(tmp_path / "m", state, max_shard_bytes=100)
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 501}
    files = [["a", "b"], ["c"], ["huge"], ["d", "e"]]
    assert index["weight_map"] == {
        name: f"model-{number:05d}-of-00004.safetensors"
        for number, names in enumerate(files, 1)
        for name in names
    }
    assert_holds(tmp_path / "m", state)


def test_export_writes_the_bytes_of_save_file(tmp_path):
    export_huggingface(tmp_path / "m", state_of())
    mlstate.save_file(state_of(), tmp_path / "f", {"format": "pt"})
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == (tmp_path / "f").read_bytes()


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7), st.integers(0, 3)), min_size=1,
             max_size=4),
    st.integers(1, 500),
)  # fmt: skip
def test_parts_of_any_layout_give_the_files_of_one_process(tmp_path_factory, world, shapes, most):
    folder = tmp_path_factory.mktemp("export")
    arrays = {
        f"t{i}": np.random.default_rng(i).random((rows, columns, 2), np.float32)
        for i, (rows, columns, _) in enumerate(shapes)
    }
    kinds = [Layout.rows(world), Layout.axis(1, world), Layout.flat(world), None]

    def save(group):
        state = {}
        for (name, array), (_, _, kind) in zip(arrays.items(), shapes, strict=True):
            layout = kinds[kind]
            state[name] = array if layout is None else layout.shard(array, group.rank)
        export_huggingface(folder / "many", state, group=group, max_shard_bytes=most)

    run_ranks(world, save)
    export_huggingface(folder / "one", arrays, max_shard_bytes=most)
    single, many = ({path.name: path.read_bytes() for path in (folder / name).iterdir()}
                 for name in ("one", "many"))  # fmt: skip
    assert single == many
    assert_holds(folder / "many", arrays)


def test_blocks_of_several_ranks_have_right_checksums(tmp_path):
    array = np.random.default_rng(0).random((700, 1100))  # 6 MiB, whose blocks all ranks share
    layout = Layout([(1, 2), (0, 2)])

    def save(group):
        export_huggingface(tmp_path / "m", {"w": layout.shard(array, group.rank)}, group=group)

    run_ranks(4, save)
    assert_holds(tmp_path / "m", {"w": array})
    flip(tmp_path / "m" / "model.safetensors", -5)
    assert [p.kind for p in mlstate.verify(tmp_path / "m").problems] == ["altered"]


@pytest.mark.parametrize("holders", [[0, 0, 2], [0, 1, 1], [0, 1, None], [2, 2, 2]])
def test_a_part_that_no_rank_holds_is_an_error(tmp_path, holders):
    array = np.ones((6, 2))  # all parts have the same size

    def save(group):
        part = holders[group.rank]
        state = {"both": np.ones(1)}
        if part is not None:
            state["w"] = Layout.rows(3).shard(array, part)
        export_huggingface(tmp_path / "m", state, group=group)

    errors = outcomes(3, save)
    assert all("'w' is incomplete: the ranks hold" in str(error) for error in errors), errors
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_several_ranks_hold_is_written_once(tmp_path):
    arrays = {f"w{i}": np.random.default_rng(i).random((4, 3)) for i in range(5)}

    def save(group):
        state = {name: Layout.rows(2).shard(array, group.rank % 2)
                 for name, array in arrays.items()}  # fmt: skip
        export_huggingface(tmp_path / "m", state, group=group)

    run_ranks(4, save)
    assert_holds(tmp_path / "m", arrays)


def test_tied_arrays_are_stored_under_the_first_name(tmp_path):
    weight = np.arange(6.0)
    numbers = {f"n{i}": np.int64(i) for i in range(20)}
    state = {"b": weight, "a": weight, "c": weight.copy(), "part": weight[:3], **numbers}
    export_huggingface(tmp_path / "m", state)
    del state["a"]
    assert_holds(tmp_path / "m", state)


def test_shards_of_different_parts_that_share_memory_are_stored(tmp_path):
    weight = np.arange(4.0).reshape(2, 2)
    state = {"a": Shard(weight), "b": Shard(weight, shape=(4,)), "c": weight}
    export_huggingface(tmp_path / "m", state)
    assert_holds(tmp_path / "m", {"a": weight, "b": weight.reshape(4)})


def test_names_are_replaced(tmp_path):
    export_huggingface(tmp_path / "m", {"net.w": np.ones(2), "v": np.ones(2)},
                       rename={"net.": "model."})  # fmt: skip
    assert set(mlstate.load(tmp_path / "m").model) == {"model.w", "v"}


def test_other_files_are_copied_but_no_weights(tmp_path):
    source = write_folder(tmp_path / "source", {"x": np.ones(2, np.float32)}, 1)
    (source / "tokenizer.model").write_bytes(b"t")
    for name in ("pytorch_model.bin", ".hidden", "model.safetensors.index.json"):
        (source / name).write_text("{}")
    (source / "onnx").mkdir()
    export_huggingface(tmp_path / "m", {"w": np.ones(3)}, files_from=source)
    assert {path.name for path in (tmp_path / "m").iterdir()} == {
        "config.json",
        "tokenizer.model",
        "model.safetensors",
    }
    assert (tmp_path / "m" / "config.json").read_text() == "{}"


def test_a_file_that_cannot_be_copied_is_named(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").symlink_to(tmp_path / "gone")
    with pytest.raises(mlstate.StoreError, match="cannot copy") as caught:
        export_huggingface(tmp_path / "m", {"w": np.ones(3)}, files_from=source)
    assert caught.value.filename == str(source / "tokenizer.json")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# ---- errors ----


def test_invalid_arguments_write_no_files(tmp_path):
    good = {"w": np.ones(3)}
    for error, text, model, keywords in (
        (TypeError, "'w' must be", {"w": [1]}, {}),
        (mlstate.CompatibilityError, "complex128", {"w": np.ones(2, complex)}, {}),
        (ValueError, "nothing to save", None, {}),
        (ValueError, "max_shard_bytes must be 1", good, {"max_shard_bytes": 0}),
        (ValueError, "no name matches", good, {"rename": {"x.": "y."}}),
        (FileNotFoundError, "files_from", good, {"files_from": tmp_path / "no"}),
        (ValueError, "incomplete", {"w": Layout.rows(2).shard(np.ones((4, 2)), 1)}, {}),
    ):
        for export in (export_huggingface, export_huggingface_async):
            with pytest.raises(error, match=text):
                export(tmp_path / "m", model, **keywords).wait()
        assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept(tmp_path):
    folder = write_folder(tmp_path / "m", {"x": np.ones(2, np.float32)})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(mlstate.StoreError, match="exists already"):
        export_huggingface(folder, {"w": np.ones(3)})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]
    (tmp_path / "empty").mkdir()
    export_huggingface(tmp_path / "empty", {"w": np.ones(3)})
    assert_holds(tmp_path / "empty", {"w": np.ones(3)})


STEPS = [
    (export_module, "_write_parts"),
    (export_module, "_checksums"),
    (export_module.LocalFolder, "overwrite_start"),
    (export_module, "_copy_file"),
    (_core, "path_rename"),
]


KILLED = """
import os, signal, sys
import numpy as np
from mlstate import _core
from mlstate._common.atomic_file import Target
from mlstate.checkpoint._huggingface import export as module

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

steps = [(module, "_write_parts"), (module, "_checksums"), (module.LocalFolder, "overwrite_start"),
         (module, "_copy_file"), (_core, "path_rename")]
setattr(*steps[{step}], die)
taken = module.take_export({target!r}, {{"w": np.ones(9)}}, overwrite={overwrite})
module.export(taken, {source!r}, Target.of({target!r}) if {overwrite} else None)
"""


@pytest.mark.parametrize("step", range(len(STEPS)))
@pytest.mark.parametrize("overwrite", [False, pytest.param(True, marks=pytest.mark.long)])
def test_interrupted_export_keeps_the_target(tmp_path, monkeypatch, step, overwrite):
    source = write_folder(tmp_path / "source", {"x": np.ones(2, np.float32)})
    target = tmp_path / "runs" / "m"
    if overwrite:
        write_folder(target, {"old": np.ones(2, np.float32)})
    owner, name = STEPS[step]

    def export():
        start = Target.of(target) if overwrite else None
        request = export_module.take_export(target, state_of(), overwrite=overwrite)
        export_module.export(request, source, start)

    def is_unchanged():
        if not overwrite:
            return not target.exists()
        return set(mlstate.load(target).model) == {"old"}

    def fails(*args):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(OSError, match="Input/output"):
            export()
    assert is_unchanged()
    assert [path.name for path in target.parent.iterdir()] == (["m"] if overwrite else [])

    done = child.attempt(KILLED.format(step=step, target=str(target), source=str(source),
                                       overwrite=overwrite))  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert is_unchanged()
    export()  # a leftover of the killed one is not in the way
    assert_holds(target, state_of())
    assert (target / "config.json").exists()


def test_a_signal_waits_until_a_failed_export_has_deleted_its_folder(tmp_path, monkeypatch):
    def refuse_bytes(count):
        raise RuntimeError("enough")

    signal_once(monkeypatch, export_module, "remove_folder")
    with pytest.raises(KeyboardInterrupt):
        export_huggingface(tmp_path / "m", state_of(), progress=refuse_bytes)
    assert not list(tmp_path.iterdir())


# ---- from a checkpoint ----


def test_convert_exports_the_model_of_a_checkpoint(tmp_path, capsys):
    weights, moments = {"net.w": np.arange(12.0), "v": np.ones(3)}, {"v.m": np.ones(3)}
    manager = mlstate.checkpoint.CheckpointManager(tmp_path / "run")
    for step in (1, 2):
        manager.save(step, model={**weights, "v": np.full(3, step)}, optimizer=moments)
    source = write_folder(tmp_path / "source", {"x": np.ones(2, np.float32)})
    out = str(tmp_path / "out")
    command = ["convert", str(tmp_path / "run"), out, "--to", "huggingface", "--step", "1"]
    options = ["--files-from", str(source), "--max-shard-bytes", "50"]
    assert main([*command, *options]) == 0
    assert "(huggingface): model of 2 tensors" in capsys.readouterr().out
    assert_holds(out, {**weights, "v": np.full(3, 1)})
    assert len(inspect_checkpoint(out).files()) == 2
    assert (tmp_path / "out" / "config.json").exists()
    assert main(command) == 2
    assert "would lose 'config.json'" in capsys.readouterr().err
    assert main([*command, *options[:2], "--overwrite"]) == 0
    assert len(inspect_checkpoint(out).files()) == 1
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "a.npz"), *options]) == 2
    assert "--files-from requires --to huggingface" in capsys.readouterr().err
    flip_shard(tmp_path / "run", manager.checkpoint(1).shards()[0])
    assert main([*command, *options[:2], "--overwrite"]) == 2  # a damaged source is not exported
    assert mlstate.verify(out)


def test_overwrite_replaces_only_hugging_face_folders(tmp_path, capsys):
    mlstate.save(tmp_path / "own", {"w": np.ones(3)})
    mlstate.save_file({"w": np.ones(3)}, tmp_path / "a.safetensors")
    command = ["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "own")]
    assert main([*command, "--to", "huggingface", "--overwrite"]) == 2
    assert "is not a Hugging Face folder" in capsys.readouterr().err
    assert mlstate.verify(tmp_path / "own")


# ---- the core's functions ----


def test_the_core_refuses_places_outside_the_files(tmp_path):
    state = ({"w": np.ones(4)}, None, None)
    items, _ = _core.shards_collect((0, 1), state, mlstate.checkpoint.Shard, None, ())
    (tmp_path / "f").touch()
    crcs, written = np.zeros(1, np.uint32), np.zeros(1, np.uint64)
    rest = crcs, written, True, None
    for place in ((1, 0, 0, 0), (0, -1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, -1, 0)):
        with pytest.raises(ValueError, match="outside the files"):
            _core.parts_write(items, str(tmp_path), ("f",), {"w": (*place, "float64")}, *rest)
    with pytest.raises(KeyError):
        _core.parts_write(items, str(tmp_path), ("f",), {}, crcs, written, True, None)
    with pytest.raises(FileNotFoundError):
        _core.parts_write(
            items, str(tmp_path), ("g",), {"w": (0, 0, 0, 0, "float64")}, crcs, written, True, None
        )
    for dtype, error in (("int64", mlstate.CompatibilityError), ("none", ValueError)):
        with pytest.raises(error, match=dtype):
            _core.parts_write(items, str(tmp_path), ("f",), {"w": (0, 0, 0, 0, dtype)}, *rest)
    with pytest.raises(ValueError, match="4 bytes of checksums for 0 blocks"):
        _core.safetensors_layout((), "pt", crcs)
    with pytest.raises(mlstate.CompatibilityError, match="complex128"):
        _core.safetensors_layout((("w", "complex128", (3,)),), "pt", None)
    assert sys.getrefcount(items) == 2


def test_progress_counts_the_written_bytes(tmp_path):
    model = {f"w{number}": np.ones((300, 1000), np.float32) for number in range(4)}
    reports = []
    export_huggingface(tmp_path / "m", model, max_shard_bytes="2MB", progress=reports.append)
    assert sum(reports) == sum(array.nbytes for array in model.values())

    def stop(_):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        export_huggingface(tmp_path / "n", model, progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    with pytest.raises(TypeError, match="progress must be callable"):
        export_huggingface(tmp_path / "n", model, progress=True)
