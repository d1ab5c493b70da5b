"""The commands for checkpoints: output and exit status."""

import contextlib
import io
import os
import shutil
import sys
from pathlib import Path

import child
import numpy as np
import pytest
from checkpoint_model import flip
from command_table import CHECKPOINT_COMMANDS, call_of
from needs import needs

import mlstate
from mlstate.checkpoint import CheckpointManager, _diff_sources
from mlstate.checkpoint._folder.local import LocalFolder
from mlstate.checkpoint._sources.open_source import open_source
from mlstate.cli import main

ROOT = Path(__file__).resolve().parents[2]


def shard_file(folder, key, step=None):
    manager = CheckpointManager(folder)
    checkpoint = mlstate.checkpoint.inspect(folder) if step is None else manager.checkpoint(step)
    [shard] = [shard for shard in checkpoint.shards() if shard.key == key]
    return Path(folder, shard.path), shard


def alter(folder, key, step=None):
    """Change a byte of a shard; return the shard."""
    path, shard = shard_file(folder, key, step)
    flip(path, shard.offset)
    return shard


def words(lines):
    return [line.split() for line in lines]


# ---- inspect ----


def test_inspect_shows_short_lists_whole(place, run):
    names = [f"layers.{i}.w" for i in range(20)]
    groups = [{"betas": (0.9, 0.999), "eps": 1e-8, "lr": rate, "params": names} for rate in (1, 2)]
    state = mlstate.OptimizerStateDict({"w.m": np.ones(2)}, param_groups=groups)
    mlstate.save("o", {"w": np.ones(2)}, state, metadata={"ids": [*range(9)], "text": "x" * 300})
    optimizer, metadata = run("inspect", "o", "--summary")[1][2:]
    assert optimizer.count('"betas": [0.9, 0.999], "eps": 1e-08, "lr": ') == 2
    assert optimizer.count('"layers.7.w", "… 12 more"]') == 2
    assert '"ids": [0, 1, 2, 3, 4, 5, 6, 7, "… 1 more"]' in metadata
    assert len(metadata) < 200


def test_inspect_lists_tensors_under_a_title(place, run):
    status, out, err = run("inspect", "ckpt")
    assert (status, err) == (0, [])
    assert out[0] == "ckpt: step 7, 3 tensors, 15 parameters, 120 B in 3 files, 1 rank"
    assert out[1].startswith("saved 2")
    assert out[2] == 'metadata: {"run": "a"}'
    assert words(out[3:]) == [
        ["tensor", "state", "dtype", "shape", "shards", "bytes", "version"],
        ["layer.b", "float64", "(3,)", "1", "24", "B", "1"],
        ["layer.w", "float32", "(4,", "3)", "1", "48", "B", "1"],
        ["layer.w", "m", "float32", "(4,", "3)", "1", "48", "B", "1"],
    ]


def test_inspect_json_matches_manifest_and_indexes(place, run_json):
    status, data = run_json("inspect", "ckpt", "--shards")
    checkpoint = mlstate.checkpoint.inspect("ckpt")
    assert status == 0
    assert data["format"] == "checkpoint"
    assert (data["step"], data["steps"], data["world_size"]) == (7, [], 1)
    assert data["generation"] == checkpoint.generation
    assert data["metadata"] == {"run": "a"}
    assert data["files"] == checkpoint.files()
    assert data["bytes"] == data["stored_bytes"] == 120
    assert [t["key"] for t in data["tensors"]] == ["layer.b", "layer.w", "layer.w.m"]
    assert data["tensors"][2] == {
        "section": "optim_state",
        "key": "layer.w.m",
        "parameter": "layer.w",
        "state": "m",
        "dtype": "float32",
        "shape": [4, 3],
        "layout": [],
        "axes": None,
        "shards": 1,
        "bytes": 48,
        "version": 1,
        "tier": None,
        "stored_bytes": 48,
        "sparse_shards": 0,
        "codec": None,
    }
    assert {s["key"]: s["path"] for s in data["shards"]} == {
        s.key: s.path for s in checkpoint.shards()
    }


def test_inspect_a_run_lists_its_steps_and_shows_any(place, run, run_json):
    _, out, _ = run("inspect", "run")
    assert out[0].startswith("run: step 30, ")
    assert "steps: 10, 20, 30" in out
    status, data = run_json("inspect", "run", "--step", 20)
    assert status == 0
    assert (data["step"], data["steps"]) == (20, [10, 20, 30])
    assert run_json("inspect", "ckpt", "--step", 7)[1]["step"] == 7


def test_inspect_lists_shards_where_asked(place, run):
    mlstate.checkpoint.reshard("ckpt", "cut", layout="rows", world_size=2)
    _, out, _ = run("inspect", "cut", "--shards")
    parts = [line[:2] for line in words(out) if line[0] == "layer.w" and line[1] in ("[0]", "[1]")]
    assert parts == [["layer.w", "[0]"], ["layer.w", "[1]"]]
    assert not any("[0]" in line for line in run("inspect", "cut")[1])


@pytest.fixture
def layered(place):
    """Two saves of a sparse table; the second changes 3 of 100 rows."""
    table = np.zeros((100, 64), np.float32)
    table[10:30] = 1
    state = {"t": table, "zero": np.zeros((50, 4))}
    how = {"sparse": True, "incremental": True, "pack_below_bytes": 0}
    mlstate.save("sparse", state, **how)
    shutil.copytree("sparse", "first")
    table[12:15] += 1
    mlstate.save("sparse", state, **how)
    return mlstate.checkpoint.inspect("sparse").shards()[0]


def test_inspect_reports_stored_bytes_of_sparse_tensors(layered, run, run_json):
    _, out, _ = run("inspect", "sparse", "--shards")
    size = "6,600 parameters, 26.56 KiB, 5.75 KiB stored"
    assert out[0] == f"sparse: checkpoint, 2 tensors, {size} in 2 files, 1 rank"
    lines = ["  ".join(line) for line in words(out)]
    assert any("25.00  KiB,  5.75  KiB  stored" in line for line in lines)
    assert any("1.56  KiB,  0  B  stored" in line for line in lines)
    assert any(line.startswith("t  [0]") and line.endswith("2  layers") for line in lines)
    first, second = layered.layers
    assert any("5.00  KiB,  768  B  hidden" in line and first.path in line for line in lines)
    assert any(line.endswith(f"{second.path}  {second.offset}") for line in lines)
    _, data = run_json("inspect", "sparse", "--shards")
    assert (data["bytes"], data["stored_bytes"]) == (27200, 23 * 256)
    shard, zero = data["shards"]
    assert shard["path"] is None and zero["layers"] == []
    assert [layer["visible_bytes"] for layer in shard["layers"]] == [17 * 256, 3 * 256]
    assert [layer["bytes"] for layer in shard["layers"]] == [20 * 256, 3 * 256]


def test_diff_of_sparse_tensors(layered, run):
    status, out, _ = run("diff", "first", "sparse")
    assert status == 1 and any("t" in line.split() for line in out)
    assert run("diff", "sparse", "sparse")[0] == 0
    status, out, _ = run("verify", "sparse")
    assert status == 0


def test_inspect_safetensors_file(place, run, run_json):
    status, out, _ = run("inspect", "w.safetensors")
    assert status == 0
    assert out[0] == "w.safetensors: file, 2 tensors, 300,002 parameters, 2.29 MiB, with checksums"
    assert out[1] == 'metadata: {"a": "1"}'
    assert words(out[3:]) == [
        ["b", "float64", "(2,)", "1", "16", "B", "1"],
        ["w", "float64", "(300000,)", "1", "2.29", "MiB", "1"],
    ]
    _, data = run_json("inspect", "w.safetensors")
    assert data["checksums"] is True
    assert data["metadata"] == {"a": "1"}
    assert data["tensors"][1]["shape"] == [300_000]
    assert data["tensors"][1]["bytes"] == 2_400_000


def test_a_name_that_cannot_be_printed_takes_one_line(place, run, run_json):
    mlstate.save("odd", {"a\nb": np.ones(1), "x" * 300: np.ones(1)})
    _, out, _ = run("inspect", "odd")
    assert len(out) == 5
    assert out[3].startswith("a\\nb ")
    assert max(map(len, out)) < 200
    _, data = run_json("inspect", "odd")
    assert [t["key"] for t in data["tensors"]] == ["a\nb", "x" * 300]


# ---- verify ----


def test_verify_good(place, run, run_json):
    status, out, err = run("verify", "ckpt")
    assert (status, len(out), err) == (0, 1, [])
    assert out[0].startswith("ckpt: good, step 7, ")
    status, data = run_json("verify", "ckpt")
    assert (status, data["good"], data["repaired"]) == (0, True, None)
    assert (data["leftover"], data["strange"]) == ([], [])
    [report] = data["checkpoints"]
    assert (report["root"], report["step"], report["problems"]) == ("manifest.json", 7, [])
    assert data["bytes"] == report["bytes"] > 120


@pytest.mark.parametrize(
    ("paths", "status"),
    [
        (["ckpt", "run", "w.safetensors"], 0),
        (["ckpt", "missing"], 2),
        (["missing", "damaged", "ckpt"], 1),
    ],
)
def test_verify_of_several_paths_has_the_first_status_of_any(place, run, paths, status):
    shutil.copytree("ckpt", "damaged")
    path = next(Path("damaged/params").iterdir())
    flip(path, path.stat().st_size - 4)
    got, out, err = run("verify", *paths)
    assert got == status
    assert [line.partition(":")[0] for line in out if ": " in line and " read" in line] == [
        path for path in paths if path != "missing"
    ]
    assert err == ["mlstate: missing: No such file or directory"] * paths.count("missing")
    assert run("verify", "--quiet", *paths) == (status, [], err)
    _, out, _ = run("verify", "--json", *paths)
    assert "".join(out).count('"good": true') >= len(set(paths) - {"missing", "damaged"})


def test_verify_names_altered_file_tensor_and_bytes(place, run, run_json):
    path, shard = shard_file("ckpt", "layer.w")
    flip(path, shard.offset + 5)
    status, out, err = run("verify", "ckpt")
    assert (status, err) == (1, [])
    assert out[0].startswith("ckpt: 1 problem, step 7, ")
    assert words(out[2:3])[0][:4] == ["altered", shard.path, "layer.w", "4096-4144"]
    assert out[-1].startswith("to recover: copy or download the files again, or use --repair")
    status, data = run_json("verify", "ckpt")
    assert (status, data["good"]) == (1, False)
    [problem] = data["checkpoints"][0]["problems"]
    assert (problem["kind"], problem["path"], problem["name"]) == ("altered", shard.path, "layer.w")
    assert (problem["offset"], problem["length"]) == (4096, 48)


@pytest.mark.parametrize("kind", ["missing", "length", "manifest", "no manifest", "index"])
def test_verify_classifies_damage(place, run_json, kind):
    path, shard = shard_file("ckpt", "layer.w")
    if kind == "missing":
        path.unlink()
    elif kind == "length":
        os.truncate(path, shard.offset + 3)
    elif kind == "manifest":
        flip("ckpt/manifest.json", 40)
    elif kind == "no manifest":
        Path("ckpt/manifest.json").unlink()
        kind = "missing"
    else:
        [index] = Path("ckpt/index").iterdir()
        flip(index, 40)
    status, data = run_json("verify", "ckpt")
    assert (status, data["good"]) == (1, False)
    assert [p["kind"] for p in data["checkpoints"][0]["problems"]] == [kind]


def test_verify_lists_files_left_over_and_files_of_others_and_is_content(place, run, run_json):
    dead = "params/x.0-1.0123456789abcdef-0.safetensors"
    Path("ckpt", dead).write_bytes(b"abc")
    Path("ckpt/notes.txt").write_text("mine")
    status, out, _ = run("verify", "ckpt")
    assert status == 0
    assert out[1:] == [
        "1 file left over, which mlstate prune deletes:",
        f"  {dead}",
        "1 file of another program:",
        "  notes.txt",
    ]
    _, data = run_json("verify", "ckpt")
    assert (data["leftover"], data["strange"]) == ([dead], ["notes.txt"])


def test_verify_one_step_or_all(place, run, run_json):
    shard = alter("run", "w", 20)
    assert run("verify", "run")[0] == 0
    assert run("verify", "run", "--step", 20)[0] == 1
    assert run("verify", "run", "--step", 10)[0] == 0
    status, data = run_json("verify", "run", "--all-steps")
    assert (status, data["good"]) == (1, False)
    assert [(c["step"], c["good"]) for c in data["checkpoints"]] == [
        (10, True),
        (20, False),
        (30, True),
    ]
    status, out, _ = run("verify", "run", "--all-steps")
    assert status == 1
    assert out[0].startswith("run: 1 of 3 checkpoints damaged, ")
    assert words(out[1:2]) == [["step", "result", "read", "manifest"]]
    assert [line[:2] for line in words(out[2:5])] == [["10", "good"], ["20", "1"], ["30", "good"]]
    assert words(out[6:])[0][:4] == ["20", "altered", shard.path, "w"]


def test_steps_are_sorted_by_number_and_paths_shown_once(place, run, run_json):
    manager = CheckpointManager("mixed", keep=None)
    for step in (5, 100, 20, 1000):
        manager.save(step, {"w": np.full(5, step)})
    assert "steps: 5, 20, 100, 1000" in run("inspect", "mixed")[1]
    assert run_json("inspect", "mixed")[1]["steps"] == [5, 20, 100, 1000]
    assert "(steps: 5, 20, 100, 1000)" in run("inspect", "mixed", "--step", 7)[2][0]
    _, out, _ = run("verify", "mixed", "--all-steps")
    assert out[0].startswith("mixed: 4 checkpoints good, ")
    assert [line[0] for line in words(out[2:])] == ["5", "20", "100", "1000"]
    assert not any("mixed" in line for line in out[1:])
    _, data = run_json("verify", "mixed", "--all-steps")
    assert [c["step"] for c in data["checkpoints"]] == [5, 20, 100, 1000]
    _, out, _ = run("prune", "mixed", "--keep", 1, "--dry-run")
    assert out[1:3] == ["3 steps would go: 5, 20, 100", "kept: 1000"]
    assert run_json("prune", "mixed", "--keep", 2, "--dry-run")[1]["kept"] == [20, 1000]


def test_verify_names_a_damaged_file_once(place, run):
    _, out, _ = run("verify", "run", "--step", 20)
    assert out[0].startswith("run: good, step 20, ")
    flip("run/manifest.json", 40)
    for options in ([], ["--all-steps"]):
        _, out, _ = run("verify", "run", *options)
        assert out[-2].count("manifest.json") == 1
        assert "manifest.json  " in out[-2] and "(checksum " in out[-2]
        assert str(place) not in out[-2] and " 0-0 " not in out[-2] and "…" not in out[-2]
    Path("w.safetensors").write_bytes(b"junk")
    assert run("verify", "w.safetensors")[1][-2].count("w.safetensors") == 1


def test_verify_all_steps_looks_at_a_manifest_that_is_none_of_them(place, run_json):
    flip("run/manifest.json", 40)
    status, data = run_json("verify", "run", "--all-steps")
    assert status == 1
    assert [c["good"] for c in data["checkpoints"]] == [True, True, True, False]
    assert data["checkpoints"][3]["root"] == "manifest.json"
    status, data = run_json("verify", "ckpt", "--all-steps")  # a checkpoint without steps
    assert (status, len(data["checkpoints"])) == (0, 1)


def test_repair_puts_the_newest_good_step_in_place(place, run, run_json):
    for step in (20, 30):
        alter("run", "w", step)
    status, data = run_json("verify", "run", "--repair")
    assert (status, data["good"]) == (0, True)
    assert data["repaired"] == CheckpointManager("run").checkpoint(10).generation
    assert data["deleted"] == [20, 30]
    assert mlstate.load("run").step == 10
    assert run("verify", "run")[0] == 0


def test_repair_reports_its_outcome(place, run):
    alter("run", "w", 30)
    status, out, _ = run("verify", "run", "--repair")
    assert status == 0
    assert "1 problem" in out[0]
    assert out[-2].startswith("repaired: step 20, generation ")
    assert out[-1].startswith("deleted: 30, damaged; ")
    alter("run", "frozen")  # a shard that all steps need
    status, out, _ = run("verify", "run", "--repair")
    assert status == 1
    assert out[-1] == "not repaired: there is no older step that is good"


def test_repair_restores_a_missing_manifest(place, run):
    Path("run/manifest.json").unlink()
    assert run("inspect", "run")[0] == 2
    assert run("verify", "run", "--repair")[0] == 0
    assert mlstate.load("run").step == 30


def test_verify_safetensors_file(place, run, run_json):
    status, data = run_json("verify", "w.safetensors")
    assert (status, data["good"], data["checksums"]) == (0, True, True)
    assert data["checkpoints"][0]["root"] is None
    size = Path("w.safetensors").stat().st_size
    flip("w.safetensors", size - 8)
    status, data = run_json("verify", "w.safetensors")
    [problem] = data["checkpoints"][0]["problems"]
    assert (status, problem["kind"], problem["name"]) == (1, "altered", "w")
    assert problem["offset"] <= size - 8 < problem["offset"] + problem["length"]
    assert run("verify", "w.safetensors")[0] == 1


OTHER_KINDS = {
    "x.mlmodel": (b"\x08\x07" * 20, "it is a Core ML model"),
    "x.h5": (b"\x89HDF\r\n\x1a\n" * 9, "it is an HDF5 file"),
    "notes.safetensors": (b"GGUF" * 9, "it is a GGUF file"),
}


@pytest.mark.parametrize("command", [["verify"], ["inspect"], ["diff", "ckpt"]], ids=" ".join)
@pytest.mark.parametrize("name", OTHER_KINDS)
def test_a_good_file_of_another_kind_is_not_damaged(place, refused, name, command):
    (place / name).write_bytes(OTHER_KINDS[name][0])
    assert refused(*command, name).startswith(f"mlstate: {place / name}: {OTHER_KINDS[name][1]}")


@pytest.mark.parametrize("command", [["inspect"], ["diff", "ckpt"]], ids=" ".join)
def test_an_empty_file_is_damaged(place, run, refused, command):
    (place / "notes").write_bytes(b"")
    assert "it is empty" in refused(*command, "notes")
    status, out, _ = run("verify", "notes")
    assert (status, out[0]) == (1, "notes: 1 problem, 0 B read")
    assert out[-1] == "to recover: copy or download the files again"


def test_an_option_of_another_command_is_answered(place, run):
    status, _, err = run("diff", "ckpt", "ckpt", "--step", "7")
    assert status == 2 and "did you mean '--first-step'?" in err[0]


def test_verify_names_the_reader_of_a_folder_of_another_kind(place, refused):
    (place / "x.mlpackage" / "Data").mkdir(parents=True)
    (place / "x.mlpackage" / "Manifest.json").write_text("{}")
    assert "mlstate coreml states" in refused("verify", "x.mlpackage")


def test_verify_knows_safetensors_files_by_suffix_or_header(place, run):
    (place / "w.safetensors").rename(place / "w.bin")
    assert run("verify", "w.bin")[0] == 0
    (place / "cut.safetensors").write_bytes(b"PK")
    assert run("verify", "cut.safetensors")[0] == 1


def test_verify_reports_missing_checksums(place, run, run_json):
    numpy_files = pytest.importorskip("safetensors.numpy", reason="another writer of the format")
    numpy_files.save_file({"w": np.ones(3)}, "other.safetensors")
    status, out, _ = run("verify", "other.safetensors")
    assert status == 0
    assert out[0].endswith("good, no checksums: only its structure was looked at")
    assert run_json("verify", "other.safetensors")[1]["checksums"] is False
    assert run("inspect", "other.safetensors")[1][0].endswith("no checksums")


@pytest.mark.parametrize("damage", ["cut off", "header", "empty", "text"])
def test_verify_refuses_damaged_safetensors_files(place, run, damage):
    path = Path("w.safetensors")
    raw = path.read_bytes()
    path.write_bytes(
        {
            "cut off": raw[:-1],
            "header": raw[:20] + bytes([raw[20] ^ 1]) + raw[21:],
            "empty": b"",
            "text": b"text" * 20,
        }[damage]
    )
    status, out, err = run("verify", path)
    assert (status, err) == (1, [])
    assert "1 problem" in out[0]
    assert out[2].startswith(("header", "unreadable"))
    assert run("inspect", path)[::2][0] == 2
    assert run("diff", path, path)[0] == 2


# ---- diff ----


def test_diff_of_the_same(place, run, run_json):
    status, out, _ = run("diff", "ckpt", "ckpt")
    assert status == 0
    assert out == ["model: identical: 2 tensors", "optimizer: identical: 1 tensor"]
    status, data = run_json("diff", "ckpt", "ckpt")
    assert (status, data["identical"]) == (0, True)
    assert (data["model"]["unchanged"], data["optimizer"]["unchanged"]) == (2, 1)
    assert data["first"] == data["second"] == {"path": str(place / "ckpt"), "step": 7}


def test_diff_of_two_steps(place, run, run_json):
    status, out, _ = run("diff", "run", "run", "--first-step", 10)
    assert status == 1
    assert words(out) == [
        ["model:", "1", "changed,", "1", "unchanged"],
        ["tensor", "changed", "max", "abs", "max", "rel"],
        ["w", "500", "of", "500", "20", "0.667"],
    ]
    _, data = run_json("diff", "run", "run", "--first-step", 10, "--second-step", 20)
    assert (data["first"]["step"], data["second"]["step"]) == (10, 20)
    [change] = data["model"]["changes"]
    assert change == {
        "name": "w", "changed": 500, "size": 500, "nan": 0, "max_abs": 10.0, "max_rel": 0.5,
    }  # fmt: skip


def test_diff_reports_names_shapes_dtypes_and_infinities(place, run, run_json):
    first = {"only": np.ones(1), "shape": np.ones(2), "dtype": np.ones(2), "far": np.zeros(1)}
    second = {"new": np.ones(1), "shape": np.ones(3), "dtype": np.ones(2, "f4"), "far": [np.inf]}
    mlstate.save("one", first)
    mlstate.save("two", {k: np.asarray(v) for k, v in second.items()}, {"new.m": np.ones(1)})
    status, data = run_json("diff", "one", "two")
    model = data["model"]
    assert (status, data["identical"]) == (1, False)
    assert (model["missing"], model["unexpected"]) == (["only"], ["new"])
    assert model["shapes"] == [{"name": "shape", "first": [2], "second": [3]}]
    assert model["dtypes"] == [{"name": "dtype", "first": "float64", "second": "float32"}]
    assert model["changes"][0]["max_abs"] is None  # JSON has no infinity
    assert data["optimizer"]["unexpected"] == ["new.m"]
    status, out, _ = run("diff", "one", "two")
    assert status == 1
    assert any("(2,) -> (3,)" in line for line in out)
    assert any("float64 -> float32" in line for line in out)


def test_diff_between_kinds_and_layouts(place, run, monkeypatch):
    assert run("convert", "ckpt", "both.safetensors")[0] == 0
    assert run("reshard", "ckpt", "cut", "--layout", "axis:1=2,flat=3")[0] == 0
    assert run("diff", "ckpt", "both.safetensors")[0] == 0
    assert run("diff", "both.safetensors", "cut")[0] == 0
    monkeypatch.setattr(_diff_sources, "_BATCH_BYTES", 1)
    assert run("diff", "cut", "ckpt")[1] == [
        "model: identical: 2 tensors",
        "optimizer: identical: 1 tensor",
    ]
    monkeypatch.setattr(_diff_sources, "BATCH_TENSORS", 1)
    assert run("diff", "ckpt", "run")[0] == 1


def test_diff_puts_few_tensors_together_at_a_time(place, monkeypatch):
    state = {f"t{i}": np.ones((64, 64), np.float32) for i in range(8)}
    mlstate.save("whole", state)
    mlstate.checkpoint.reshard("whole", "cut", layout="rows", world_size=2)
    monkeypatch.setattr(_diff_sources, "_BATCH_BYTES", 3 * 64 * 64 * 4)
    sides = [_diff_sources.Side(open_source(name)) for name in ("whole", "cut")]
    names = list(state)
    assert [len(batch) for batch in _diff_sources._batches(0, sides, names)] == [3, 3, 2]
    assert [len(b) for b in _diff_sources._batches(0, [sides[0], sides[0]], names)] == [8]


def test_diff_with_a_file_that_is_gone(place, refused):
    shard_file("ckpt", "layer.b")[0].unlink()
    assert "layer.b" in refused("diff", "ckpt", "run")


# ---- reshard ----


@pytest.mark.parametrize(
    ("layout", "world", "ranks"),
    [("rows", 3, 3), ("flat", 2, 2), ("whole", None, 1), ("axis:1", 2, 2), ("rows=2", None, 2),
     ("axis:1=3,rows=2", None, 6)],
)  # fmt: skip
def test_reshard_keeps_every_bit(place, run, layout, world, ranks):
    extra = [] if world is None else ["--world-size", world]
    status, out, err = run("reshard", "ckpt", "cut", "--layout", layout, *extra)
    assert (status, err) == (0, [])
    assert out[0].startswith("cut: 120 B in ")
    assert out[0].endswith(f"for {ranks} rank{'' if ranks == 1 else 's'}")
    loaded, source = mlstate.load("cut"), mlstate.load("ckpt")
    assert loaded.model["layer.w"].size == 12
    assert mlstate.diff(loaded.model, source.model).identical
    assert mlstate.diff(loaded.optimizer, source.optimizer).identical
    assert loaded.metadata == {"run": "a"}


def test_reshard_a_step(place, run_json):
    options = ["--layout", "rows", "--world-size", 2]
    status, data = run_json("reshard", "run", "cut", "--step", 20, *options)
    assert status == 0
    assert (data["step"], data["world_size"], data["layout"]) == (20, 2, [[0, 2]])
    assert data["target"] == str(place / "cut")
    assert mlstate.load("cut").model["w"][0] == 20


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--layout", "rows"], "--world-size N"),
        (["--layout", "rows=2,axis:1"], "axis:1=N"),
        (["--layout", "diagonal", "--world-size", "2"], "'diagonal' is not one of"),
        (["--layout", "rows=2", "--world-size", "3"], "2 parts for 3 ranks"),
        (["--layout", "flat=2,rows=2"], "flat"),
        (["--layout", "rows", "--world-size", "0"], "must be 1 or more"),
        (["--layout", "rows=2", "--step", "5"], "step 5 does not exist"),
    ],
)
def test_reshard_refuses(place, refused, arguments, text):
    assert text in refused("reshard", "ckpt", "cut", *arguments)
    assert not Path("cut").exists()


def test_reshard_refuses_a_damaged_source_and_the_source_itself(place, refused):
    options = ["--layout", "rows=2"]
    assert "another folder" in refused("reshard", "ckpt", "ckpt", *options)
    np.savez("w.npz", w=np.ones(3))
    assert "mlstate convert" in refused("reshard", "w.npz", "cut", *options)
    alter("ckpt", "layer.w")
    assert "altered" in refused("reshard", "ckpt", "cut", *options)
    assert not Path("cut").exists()


# ---- convert ----


def test_convert_there_and_back(place, run, run_json):
    status, out, err = run("convert", "ckpt", "state.npz")
    assert (status, err) == (0, [])
    assert out == [
        "state.npz (npz): model of 2 tensors, 72 B; optimizer of 1 tensor, 48 B; step 7",
        "names begin with model. and optimizer.; --only model writes the model's own names",
    ]
    status, data = run_json("convert", "state.npz", "back")
    assert status == 0
    assert (data["source_format"], data["target_format"]) == ("npz", "mlstate")
    assert data["model"] == {"tensors": 2, "bytes": 72}
    assert data["optimizer"] == {"tensors": 1, "bytes": 48}
    assert data["target"] == str(place / "back")
    assert run("diff", "ckpt", "back")[0] == 0


def test_convert_lists_the_states_that_the_target_has(place, run_json, run):
    state = {"values": np.ones(3)}
    model, moments = {"w": np.ones(3)}, {"w.m": np.zeros(3)}
    mlstate.save("named", model, moments, states={"seen": 5, "rng": state}, step=2)
    with pytest.warns(UserWarning, match="named states are not converted: rng"):
        mlstate.convert("named", "all.safetensors")
    assert run_json("convert", "named", "whole.safetensors", "--skip", "rng")[1]["states"] == [
        "seen"
    ]
    assert run_json("convert", "named", "copy")[1]["states"] == ["rng", "seen"]
    _, data = run_json("inspect", "all.safetensors")
    assert data["checksums"] is None
    assert "checksums" not in run("inspect", "all.safetensors")[1][0]


def test_a_file_of_a_model_is_a_file(place, run):
    mlstate.save_file({"w": np.ones(3)}, "model.safetensors")
    assert run("inspect", "model.safetensors")[1][0].startswith("model.safetensors: file, 1 tensor")


def test_convert_a_step_and_by_named_formats(place, run, run_json):
    assert run("convert", "run", "ten.bin", "--step", 10, "--to", "safetensors")[0] == 0
    assert mlstate.load_file("ten.bin")["w"][0] == 10
    _, data = run_json("convert", "ten.bin", "ten", "--from", "safetensors")
    assert (data["source_format"], data["optimizer"]) == ("safetensors", None)


def test_convert_to_torch_and_back(place, run):
    pytest.importorskip("torch", reason="writes torch's files")
    assert run("convert", "ckpt", "state.pt")[0] == 0
    assert run("convert", "state.pt", "back")[0] == 0
    assert run("diff", "ckpt", "back")[0] == 0


def test_convert_without_torch_names_the_extra(place, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    error = refused("convert", "ckpt", "state.pt")
    assert error == "mlstate: files of torch need torch: pip install 'mlstate[torch]'"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ckpt", "state.zip"], "suffix '.zip'"),
        (["ckpt", "ckpt"], "another path"),
        (["nothing", "state.npz"], "nothing: No such file"),
        (["w.safetensors", "state.npz", "--step", "3"], "no steps"),
        (["run", "state.npz", "--step", "3"], "step 3 does not exist (steps: 10, 20, 30)"),
        (["ckpt", "state.npz", "--to", "onnx"], "onnx"),
    ],
)
def test_convert_refuses(place, refused, arguments, text):
    assert text in refused("convert", *arguments)


@pytest.mark.parametrize(
    "command",
    [
        ["reshard", "run", "target", "--layout", "rows=2"],
        ["convert", "run", "target"],
        ["convert", "run", "target", "--to", "npz"],
        ["convert", "run", "target", "--to", "safetensors"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("target_kind", ["file", "folder"])
def test_a_target_that_exists_is_refused_alike(place, refused, command, target_kind):
    target = Path("target")
    if target_kind == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "notes").write_text("mine")
    error = refused(*command)
    assert "target: cannot write the target: it exists already" in error
    assert "--overwrite does not replace it" in error


def test_overwrite_names_targets_it_cannot_replace(place, refused):
    Path("file").write_text("mine")
    Path("folder.npz").mkdir()
    for command in (["convert", "run", "file", "--to", "mlstate"],
                    ["reshard", "run", "file", "--layout", "whole"]):  # fmt: skip
        error = refused(*command, "--overwrite")
        assert "file: " in error and "choose another path" in error
    assert Path("file").read_text() == "mine"
    text = "exists already, and is a folder, not a file; --overwrite does not replace it"
    assert text in refused("convert", "run", "folder.npz")


# ---- prune ----


def test_prune_lists_deleted_files(place, run, run_json):
    dead = Path("ckpt/optim_state/x.0-1.0123456789abcdef-0.safetensors.tmp")
    dead.write_bytes(b"abc")
    name = str(dead.relative_to("ckpt"))
    status, out, _ = run("prune", "ckpt", "--dry-run")
    assert status == 0
    assert out[0] == "ckpt: would delete 1 file, 3 B"
    assert words(out[1:]) == [["file", "bytes"], [name, "3", "B"]]
    assert dead.exists()
    status, data = run_json("prune", "ckpt")
    assert (status, data["files"], data["bytes"]) == (0, {name: 3}, 3)
    assert (data["dry_run"], data["steps"], data["kept"]) == (False, [], [])
    assert not dead.exists()
    assert run("prune", "ckpt")[1] == ["ckpt: deleted nothing"]
    assert run("verify", "ckpt")[0] == 0


def test_prune_gives_up_steps(place, run, run_json):
    status, data = run_json("prune", "run", "--keep", 1, "--dry-run")
    assert (status, data["steps"], data["kept"]) == (0, [10, 20], [30])
    assert CheckpointManager("run").steps() == [10, 20, 30]
    _, out, _ = run("prune", "run", "--keep", 1)
    assert out[1:3] == ["2 steps gone: 10, 20", "kept: 30"]
    assert CheckpointManager("run").steps() == [30]
    assert run("verify", "run", "--all-steps")[0] == 0


@needs("obstore")
def test_prune_of_a_url_names_its_options(place, refused):
    assert "pass --orphan-seconds N to delete" in refused("prune", "s3://bucket/run", "--dry-run")


def test_an_abbreviated_choice_names_the_choice(place, refused):
    for word, choice in (("hf", "huggingface"), ("st", "safetensors"), ("tensor", "safetensors")):
        assert f"did you mean {choice!r}?" in refused("convert", "ckpt", "new", "--to", word)
    assert "did you mean" not in refused("convert", "ckpt", "new", "--to", "xyz")


def test_prune_refuses(place, run, refused):
    assert refused("prune", "run", "--keep", 0) == "mlstate: --keep must be 1 or more, got 0"
    assert "nothing to prune" in refused("prune", "w.safetensors")
    with LocalFolder("ckpt").claim():
        assert "is writing it" in refused("prune", "ckpt")
        assert run("prune", "ckpt", "--dry-run")[0] == 0
    flip("ckpt/manifest.json", 40)
    assert run("prune", "ckpt")[0] == 2


# ---- all commands ----


def test_a_path_that_cannot_be_printed_takes_one_line(place, run):
    odd = os.fsdecode(b"a\xff\nb")
    Path("ckpt").rename(odd)
    for command in (["inspect"], ["verify"], ["prune"]):
        status, out, err = run(*command, odd)
        assert (status, err) == (0, [])
        assert out[0].startswith("a\\udcff\\nb: ")
    assert run("reshard", odd, f"{odd}2", "--layout", "rows=2")[1][0].startswith("a\\udcff\\nb2: ")
    status, out, _ = run("convert", odd, "x.npz", "--step", 7)
    assert status == 0


@pytest.mark.parametrize("command", CHECKPOINT_COMMANDS)
@pytest.mark.parametrize("place_kind", ["missing", "empty folder"])
def test_missing_checkpoint_is_one_line_and_status_2(place, refused, command, place_kind):
    path = "nothing"
    if place_kind == "empty folder":
        Path(path).mkdir()
    error = refused(*call_of(command, source=path, other="ckpt", target="cut"))
    assert error.replace(f"{place}/", "").startswith("mlstate: nothing: ")


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_a_file_has_no_steps_and_a_run_not_any(place, refused, command):
    extra = ["x.npz"] if command == "convert" else []
    for path, text in (("w.safetensors", "no steps"), ("run", "step 11 does not exist")):
        assert text in refused(command, path, *extra, "--step", 11)


@pytest.mark.parametrize("command", CHECKPOINT_COMMANDS)
def test_help_lists_exit_statuses(run, command):
    status, out, _ = run(command, "--help")
    assert status == 0
    assert "exit status: 0 good," in " ".join(out)


def test_safetensors_file_cannot_be_repaired(place, run):
    for option in ("--repair", "--all-steps"):
        assert run("verify", "w.safetensors", option)[0] == 2


def test_an_interrupt_ends_it_without_a_traceback(place, run, monkeypatch):
    def interrupt(*unused, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr("mlstate.cli.prune.prune", interrupt)
    assert run("prune", "ckpt") == (130, [], [])


def test_closed_pipe_is_ignored(place):
    mlstate.save("many", {f"tensor.{i}": np.zeros(1) for i in range(3000)})
    many = f'"{place / "many"}"'
    for command in (f"inspect {many}", f"inspect {many} --json", f"diff {many} '{place}/ckpt'"):
        line = f'"{sys.executable}" -m mlstate {command} | head -1'
        done = child.finished(["sh", "-c", line], folder=ROOT)
        assert len(done.stdout.splitlines()) == 1
        assert done.stderr == ""


# ---- progress ----


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def commands(place):
    return [
        ["verify", "ckpt"],
        ["verify", "run", "--all-steps"],
        ["verify", "w.safetensors"],
        ["diff", "ckpt", "run"],
        ["reshard", "ckpt", "cut", "--layout", "rows=2"],
    ]


def test_progress_is_a_line_on_a_terminal(commands, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for command in commands:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        main(command)
        output = terminal.getvalue()
        assert "100 %" in output, command
        assert output.endswith("\r")
        assert "\n" not in output
    assert "%" not in capsys.readouterr().out


def test_progress_uses_tqdm_if_installed(commands, monkeypatch):
    pytest.importorskip("tqdm", reason="draws the bar")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(commands[0]) == 0
    assert "verify" in terminal.getvalue()
    assert "\n" not in terminal.getvalue()


def test_no_progress_without_a_terminal(commands, run):
    for command in commands:
        assert run(*command)[2] == []


def test_commands_work_without_standard_error(place, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["verify", "ckpt"]) == 0


def test_inspect_reports_codecs(place, run, run_json):
    counts = np.arange(200_000) % 7
    mlstate.save("coded", {"counts": counts}, compress="zlib")
    _, out, _ = run("inspect", "coded", "--shards")
    assert any(" zlib" in line and "params/counts" in line for line in out)
    assert not any("hidden" in line for line in out)
    _, data = run_json("inspect", "coded", "--shards")
    [tensor], [shard] = data["tensors"], data["shards"]
    assert (tensor["codec"], tensor["bytes"]) == ("zlib", counts.nbytes)
    [layer] = shard["layers"]
    assert layer["bytes"] == tensor["stored_bytes"] < layer["held_bytes"] == counts.nbytes
    assert layer["visible_bytes"] == counts.nbytes
    status, out, _ = run("diff", "coded", "coded")
    assert status == 0


def test_the_progress_of_an_export_counts_the_model_of_all_ranks(place, monkeypatch, run):
    from mlstate.cli import convert

    moments = {"layer.w.m": np.zeros((400, 3), np.float32)}
    model = {"layer.w": np.ones((400, 3), np.float32)}
    mlstate.save("big", model, moments)
    mlstate.checkpoint.reshard("big", "cut", layout="rows", world_size=4)
    totals = []

    def progress_of(label, count):
        totals.append(count())
        return contextlib.nullcontext()

    monkeypatch.setattr(convert, "progress_of", progress_of)
    command = ("convert", "cut", "hf", "--to", "huggingface", "--dtype", "float32")
    assert run(*command)[0] == 0
    assert totals == [model["layer.w"].nbytes]
