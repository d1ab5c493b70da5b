"""Commands on paths of every format, and options for steps, tensors and tolerances."""

import re
import shutil
import warnings
from collections import deque
from pathlib import Path

import numpy as np
import pytest

import mlstate
from mlstate.follow import Publisher


@pytest.mark.parametrize("name", ["x.pt", "x.npz", "x.dcp"])
def test_files_of_others_are_read_as_they_are(place, run, run_json, refused, name):
    if name != "x.npz":
        pytest.importorskip("torch", reason="its files are read")
    assert run("convert", "ckpt", name)[0] == 0
    status, data = run_json("inspect", name, "--names", "layer")
    assert (status, data["step"], data["parameters"] > 0) == (0, 7, True)
    assert {tensor["parameter"] for tensor in data["tensors"]} <= {"layer.w", "layer.b"}
    status, data = run_json("verify", name)
    assert (status, data["good"], data["checksums"]) == (0, True, name != "x.dcp")
    assert run("diff", "ckpt", name)[0] == 0
    damaged = next(Path(name).glob("*.distcp")) if name == "x.dcp" else Path(name)
    damaged.write_bytes(damaged.read_bytes()[:40])
    assert run("verify", name)[0] == 1
    refused("inspect", name)


def test_a_summary_lists_no_tensors(place, run, run_json):
    for name in ("ckpt", "w.safetensors"):
        assert not any("float" in line for line in run("inspect", name, "--summary")[1])
        assert run_json("inspect", name, "--summary")[1]["tensors"] == []


def test_layers_are_sorted_by_number(place, run):
    mlstate.save("deep", {f"layers.{i}.w": np.ones(1) for i in range(11)})
    rows = [line.split()[0] for line in run("inspect", "deep")[1] if line.startswith("layers.")]
    assert rows == [f"layers.{i}.w" for i in range(11)]
    assert repr(mlstate.inspect("deep")).index("layers.2.") < repr(mlstate.inspect("deep")).index(
        "layers.10."
    )


def test_tolerances_of_a_diff(place, run):
    mlstate.save("a", {"w": np.array([1.0, 2.0]), "b": np.ones(2)})
    mlstate.save("b", {"w": np.array([1.0, 2.001], np.float32), "b": np.ones(2)})
    assert run("diff", "a", "b")[0] == 1
    assert run("diff", "a", "b", "--rtol", "0.01")[0] == 0
    assert run("diff", "a", "b", "--atol", "0.0001")[0] == 1
    assert run("diff", "a", "b", "--names", "b")[0] == 0
    assert run("diff", "a", "b", "--rtol", "-1")[0] == 2
    assert "rtol" in run("diff", "a", "b", "--rtol", "-1")[2][0]


def test_the_latest_and_the_best_step(place, run_json, run):
    with mlstate.CheckpointManager("best", keep=None) as manager:
        for step, loss in enumerate((0.5, 0.1, 0.3)):
            manager.save(step, model={"w": np.full(2, step)}, metadata={"loss": loss})
    assert run_json("inspect", "best", "--step", "latest")[1]["step"] == 2
    best = ("--step", "best", "--monitor", "loss")
    assert run_json("inspect", "best", *best)[1]["step"] == 1
    assert run_json("inspect", "best", *best, "--mode", "max")[1]["step"] == 0
    assert run_json("verify", "best", *best)[1]["checkpoints"][0]["step"] == 1
    assert "pass --monitor loss" in run("inspect", "best", "--step", "best")[2][0]
    assert "no step has a number 'x'" in run("inspect", "best", *best[:3], "x")[2][0]


@pytest.mark.parametrize("option", [("--monitor", "loss"), ("--mode", "min")])
def test_options_of_the_best_step_need_it(place, run, option):
    commands = (
        ["inspect", "run"], ["verify", "run"], ["verify", "run", "--all-steps"],
        ["verify", "run", "--names", "w"], ["verify", "w.safetensors"], ["diff", "run", "run"],
        ["convert", "run", "out.npz"], ["reshard", "run", "out", "--layout", "rows=2"],
    )  # fmt: skip
    for command in commands:
        for step in ([], ["--step", "latest"]):
            if step and (command[0] == "diff" or "--all-steps" in command):
                continue
            status, _, errors = run(*command, *step, *option)
            assert status == 2 and f"{' '.join(option)} tells which step is the best" in errors[0]
    status, _, errors = run("diff", "best", "best", "--first-step", "best", "--monitor", "loss")
    assert "tells which step" not in errors[0]


def test_errors_name_options(place, refused):
    assert "--lock-timeout must be 0 or more" in refused("prune", "run", "--lock-timeout", "-1")
    error = refused("convert", "ckpt", "w.safetensors")
    assert "--overwrite" in error and "overwrite=" not in error
    error = refused("convert", "ckpt", "hf", "--to", "huggingface", "--max-shard-bytes", "1 X")
    assert "--max-shard-bytes is '1 X'" in error


PYTHON = re.compile(r"\w=|\w\(|on the command line|storage_options|CheckpointManager\(")


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        (["convert", "ckpt", "run"], "choose another folder, or pass --overwrite to delete the"),
        (["reshard", "ckpt", "run", "--layout", "rows=2"], "pass --overwrite to delete the steps"),
        (["reshard", "ckpt", "a.safetensors", "--layout", "rows=2"], "mlstate convert writes one"),
        (["inspect", "lost"], "mlstate verify --repair restores the newest"),
        (["convert", "follow", "a.npz"], "by mlstate follow, or load the newest version with all "
         "weights, --step 0"),
        (["convert", "ckpt", "a.xyz"], "Otherwise pass --to"),
        (["convert", "ckpt", "a.npz", "--files-from", "x"], "requires --to huggingface"),
        (["convert", "run", "w.safetensors"], "--overwrite replaces it"),
        (["inspect", "s3://u@b/c"], "in the environment or the engine's configuration"),
    ],
)  # fmt: skip
def test_remedies_are_in_the_words_of_commands(place, run, command, remedy):
    publisher = Publisher("follow")
    for step in (0, 1):
        publisher.publish(step, {"w": np.eye(100)[step]})
    shutil.copytree("run", "lost")
    Path("lost/manifest.json").unlink()
    status, _, errors = run(*command)
    assert status == 2 and remedy in errors[0]
    assert PYTHON.search(errors[0]) is None


def test_diff_compares_the_other_tensors_of_files(place, run):
    torch = pytest.importorskip("torch", reason="its files are compared")
    for name, value in (("a.pt", 1), ("b.pt", 2)):
        states = {"ema": {"w": torch.full((2,), value)}, "config": {"name": "x", "rate": 0.1}}
        torch.save({"model": {"w": torch.ones(2)}, **states}, name)
    assert run("convert", "a.pt", "folder")[0] == 0
    assert [run("diff", "a.pt", name)[0] for name in ("a.pt", "folder", "b.pt")] == [0, 0, 1]


@pytest.mark.parametrize("changed", ["optimizer_states", "hyper_parameters", "epoch"])
def test_diff_compares_all_of_a_checkpoint_of_lightning(place, run, changed):
    torch = pytest.importorskip("torch", reason="its files are compared")
    checkpoint = {
        "state_dict": {"w": torch.ones(2)},
        "optimizer_states": [{"state": {0: {"m": torch.ones(2)}}, "param_groups": []}],
        "hyper_parameters": {"rate": 1},
        "epoch": 1,
    }
    torch.save(checkpoint, "a.ckpt")
    torch.save(checkpoint | {changed: [2.0]}, "b.ckpt")
    assert run("convert", "a.ckpt", "folder")[0] == 0
    for first, second, differ in (
        ("a.ckpt", "a.ckpt", False),
        ("a.ckpt", "folder", False),
        ("a.ckpt", "b.ckpt", True),
        ("folder", "b.ckpt", True),
    ):
        status, _, errors = run("diff", first, second)
        assert (status, errors) == (differ, [])


def test_diff_warns_of_values_of_files_that_it_cannot_compare(place, run):
    torch = pytest.importorskip("torch", reason="its files are compared")
    with warnings.catch_warnings(action="ignore"):  # torch deprecates these
        quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    values = {
        "size": torch.Size([2]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "number": 1j,
        "sparse": torch.eye(2).to_sparse(),
        "quantized": quantized,
    }
    for name, number in (("a.ckpt", 1j), ("b.ckpt", 1j), ("c.ckpt", 2j)):
        parameters = values | {"number": number}
        torch.save({"state_dict": {"w": torch.ones(2)}, "hyper_parameters": parameters}, name)
    for second, differ in (("b.ckpt", 0), ("c.ckpt", 1)):
        status, _, errors = run("diff", "a.ckpt", second)
        assert (status, len(errors)) == (differ, 2), errors
        names = [f"lightning/hyper_parameters/{key}" for key in ("sparse", "quantized")]
        assert "a.ckpt: these values cannot be compared: " + ", ".join(names) in errors[0]


@pytest.mark.parametrize("key", [1.5, (1, 2)])
def test_diff_of_a_file_and_a_checkpoint_lists_keys_that_none_can_store(place, run, key):
    torch = pytest.importorskip("torch", reason="its files are compared")
    torch.save({"model": {"w": torch.ones(2)}, "x": {"y": {key: 1, "n": torch.ones(2)}}}, "a.pt")
    mlstate.save("folder", {"w": np.ones(2, "f")}, states={"x": {"y": {"n": np.ones(2, "f")}}})
    status, lines, errors = run("diff", "a.pt", "folder")
    assert (status, errors) == (1, [])
    assert any(f"x/y/{key}" in line for line in lines)


def test_diff_of_checkpoints_names_nested_values_that_differ(place, run, run_json):
    states = {"run": {"note": "a", "seen": {1, 2}, "queue": deque([np.ones(2000)])}}
    states["ties"] = {"a/b": 1, "a": {"b": 2}}
    mlstate.save("one", {"w": np.ones(2)}, states=states)
    queue = np.ones(2000)
    queue[1000] = 2
    states["run"] |= {"note": "b", "queue": deque([queue])}
    states["ties"] = {"a/b": 3, "a": {"b": 2}}
    mlstate.save("two", {"w": np.ones(2)}, states=states)
    status, data = run_json("diff", "one", "two")
    assert (status, data["model"]["identical"]) == (1, True)
    difference = data["states"]
    assert difference["missing"] == ["run/note = 'a'"]
    assert difference["unexpected"] == ["run/note = 'b'"]
    names = [change["name"] for change in difference["changes"]]
    assert names == ["run/queue/0", "ties['a/b']"]
    assert run("diff", "one", "one")[0] == 0


@pytest.mark.parametrize(
    ("optimizer_step", "metadata"),
    [(None, {"step": 7}), (100, {"global_step": 200}), (5, None), (None, None)],
)
def test_convert_keeps_the_step_of_a_checkpoint(place, run, optimizer_step, metadata):
    moments = None
    if optimizer_step is not None:
        moments = mlstate.OptimizerStateDict({"w.m": np.ones(2)}, step=optimizer_step)
    mlstate.save("a", {"w": np.ones(2)}, moments, step=100, metadata=metadata)
    for target, options in {"b": [], "c": ["--dtype", "float32"], "d": ["--only", "model"]}.items():
        assert run("convert", "a", target, *options)[0] == 0
        assert mlstate.load(target).step == 100
    warns = bool(metadata) and "step" in metadata
    status, _, errors = run("convert", "a", "a.npz")
    assert (status, ["step 100 is not converted" in error for error in errors]) == (
        0,
        [True] * warns,
    )
    assert mlstate.load("a.npz").step == (7 if warns else 100)


def test_convert_refuses_a_named_state_in_the_place_of_metadata(place, refused):
    mlstate.save("a", {"w": np.ones(2)}, metadata={"epoch": 3}, states={"epoch": 4})
    for suffix in ("safetensors", "npz"):
        assert "'epoch' is metadata and a named state" in refused("convert", "a", f"a.{suffix}")
        assert not Path(f"a.{suffix}").exists()


def test_names_of_parts_do_not_choose_metadata(place, run, refused):
    state = {"w": np.ones(2)}
    mlstate.save("a", state, {"w.m": np.ones(2)}, step=1, metadata={"model": "gpt", "epoch": 1})
    for number, (options, metadata) in enumerate(
        [(["--skip", "model"], {"model": "gpt", "epoch": 1}), (["--only", "model"], {"step": 1})]
    ):
        assert run("convert", "a", f"b{number}", *options)[0] == 0
        assert {**mlstate.load(f"b{number}").metadata, "step": 1} == {**metadata, "step": 1}
    mlstate.save("a", state, states={"model": state}, overwrite=True)
    assert "named state" in refused("convert", "a", "c", "--skip", "model")


def test_a_hugging_face_target_warns_of_other_parts(place, run):
    state = {"w": np.ones(2)}
    mlstate.save("a", state, {"w.m": np.ones(2)}, states={"ema": state})
    for number, options in enumerate([[], ["--dtype", "float32"], ["--skip", "ema"]]):
        status, _, [error] = run("convert", "a", f"h{number}", "--to", "huggingface", *options)
        assert status == 0
        assert f"not converted: optimizer{', ema' if number < 2 else ''};" in error
    assert run("convert", "a", "h", "--to", "huggingface", "--only", "model")[2] == []


def test_convert_warns_of_an_optimizer_without_tensors_among_the_states(place, run):
    state = {"w": np.ones(2)}
    optimizer = mlstate.OptimizerStateDict(learning_rate=0.5)
    mlstate.save("a", state, states={"second": optimizer, "seen": [5]})
    status, _, [error] = run("convert", "a", "a.npz")
    assert (status, "not converted: second;" in error) == (0, True)
    assert mlstate.load("a.npz").metadata == {"seen": [5]}
    with pytest.raises(TypeError, match="OptimizerStateDict"):
        mlstate.save("b", state, metadata={"optimizer": optimizer})


@pytest.mark.parametrize("name", ["b.pt", "b.npz", "b.safetensors", "b.dcp", "b"])
def test_convert_refuses_tensors_without_elements(place, refused, name):
    torch = pytest.importorskip("torch", reason="its tensors are refused")
    torch.save({"w": torch.ones(2, device="meta")}, "a.pt")
    assert "'w' is a tensor on torch's meta device" in refused("convert", "a.pt", name)


@pytest.mark.parametrize("source", ["a", "a.pt", "a.dcp"])
def test_convert_changes_named_states_of_tensors(place, run, source):
    pytest.importorskip("torch", reason="its files are read")
    state = {"layer.w": np.ones(2)}
    groups = [{"params": ["layer.w"], "lr": 0.1}]
    moments = mlstate.OptimizerStateDict({"layer.w.m": np.ones(2)}, param_groups=groups)
    states = {"ema": state, "second": moments, "nested": {"ema": state, "seen": 1}}
    mlstate.save("a", state, states=states)
    if source != "a":
        assert run("convert", "a", source)[0] == 0
    assert run("convert", source, "b", "--rename", "layer=top", "--dtype", "float16")[0] == 0
    loaded = mlstate.load("b")
    assert (list(loaded.model), loaded.model["top.w"].dtype) == (["top.w"], np.float16)
    assert (list(loaded.states["ema"]), loaded.states["ema"]["top.w"].dtype) == (["top.w"], "f2")
    second = loaded.states["second"]
    assert (list(second), second["top.w.m"].dtype) == (["top.w.m"], np.float64)
    assert second.param_groups[0]["params"] == ["top.w"]
    assert list(loaded.states["nested"]["ema"]) == ["layer.w"]


@pytest.mark.parametrize(
    "command",
    [
        ("convert", "ckpt", "other"),
        ("reshard", "ckpt", "other", "--layout", "rows", "--world-size", "2"),
    ],
)
def test_a_folder_of_other_files_is_not_replaced(place, refused, command):
    Path("other").mkdir()
    Path("other/notes.txt").write_text("kept")
    assert "'notes.txt'" in refused(*command, "--overwrite")
    assert [path.name for path in Path("other").iterdir()] == ["notes.txt"]


def test_a_lightning_file_is_converted_with_a_warning_of_lost_entries(place, run):
    torch = pytest.importorskip("torch", reason="its files are read")
    model = {"w": torch.ones(2), "metric._extra_state": {"n": 1}}
    torch.save({"state_dict": model, "loops": {}}, "a.ckpt")
    status, _, errors = run("convert", "a.ckpt", "a.npz")
    assert status == 0 and len(errors) == 1
    assert "not converted: .model" in errors[0]
    assert run("convert", "a.ckpt", "own", "--only", "model")[0] == 0
    assert mlstate.load("own").states[".model"]["entries"] == {"metric._extra_state": {"n": 1}}


@pytest.mark.parametrize("options", [[], ["--only", "model"], ["--rename", "inner=core"]])
def test_convert_keeps_entries_of_modules_that_are_not_tensors(place, run, options):
    torch = pytest.importorskip("torch", reason="its modules are saved")

    class Module(torch.nn.Linear):
        _version = 2

        def get_extra_state(self):
            return {"seen": (1, 2)}

        def set_extra_state(self, state):
            self.state = state

        def _load_from_state_dict(self, state, prefix, metadata, *others):
            self.loaded_version = metadata.get("version")
            super()._load_from_state_dict(state, prefix, metadata, *others)

    mlstate.save("a", torch.nn.ModuleDict({"inner": Module(2, 2)}), states={"b": Module(2, 2)})
    name = "core" if "--rename" in options else "inner"
    target = torch.nn.ModuleDict({name: Module(2, 2)})
    for path in ("c", "c.pt"):
        status, _, errors = run("convert", "a", path, *options)
        assert (status, errors) == (0, [])
    mlstate.load("c", into=target)
    assert (target[name].state, target[name].loaded_version) == ({"seen": (1, 2)}, 2)
    del target[name].state
    saved = torch.load("c.pt")
    target.load_state_dict(saved.get("model", saved))
    assert (target[name].state, target[name].loaded_version) == ({"seen": (1, 2)}, 2)
    if "--only" not in options:
        other = Module(2, 2)
        mlstate.load("c", into={"states": {"b": other}})
        assert (other.state, other.loaded_version) == ({"seen": (1, 2)}, 2)
        other.load_state_dict(saved["b"])
    assert run("convert", "a", "d.npz", "--only", "b")[0] == 0
    status, _, errors = run("convert", "a", "e.npz", "--skip", "b,.model")
    assert (status, errors) == (0, [])


def test_convert_refuses_two_new_names_for_one(place, refused):
    rules = ["--rename", "layer=b", "--rename", "layer=c"]
    assert "given twice" in refused("convert", "ckpt", "b", *rules)


def save_optimizer(path, group, *, step=0, loss=0.0, section="optimizer"):
    optimizer = mlstate.OptimizerStateDict({"w.m": np.ones(2)}, step=step, param_groups=[group])
    target = {"states": {"o": optimizer}} if section == "states" else {"optimizer": optimizer}
    mlstate.save(path, step=step, metadata={"loss": loss}, **target)


@pytest.mark.parametrize("section", ["optimizer", "states"])
def test_diff_lists_values_of_parameter_groups_that_differ(
    tmp_path, monkeypatch, run, run_json, section
):
    monkeypatch.chdir(tmp_path)
    save_optimizer("one", {"lr": 0.1, "betas": [0.9, 0.99], "mode": "a"}, section=section)
    save_optimizer("two", {"lr": 0.2, "betas": [0.9, 0.99], "mode": "b"}, section=section)
    status, data = run_json("diff", "one", "two")
    assert (status, data["identical"]) == (1, False)
    prefix = "" if section == "optimizer" else "o/"
    assert data[section] == {
        "identical": False,
        "missing": [f"{prefix}param_groups[0]['mode'] = 'a'"],
        "unexpected": [f"{prefix}param_groups[0]['mode'] = 'b'"],
        "shapes": [],
        "dtypes": [],
        "changes": [
            {
                "name": f"{prefix}param_groups[0]['lr']",
                "changed": 1,
                "size": 1,
                "nan": 0,
                "max_abs": 0.1,
                "max_rel": 0.5,
            }
        ],
        "unchanged": 1,
    }
    assert any("param_groups[0]['lr']" in line for line in run("diff", "one", "two")[1])
    assert run("diff", "one", "two", "--names", "*")[0] == 0
    prefix = "optimizer." if section == "optimizer" else "states.o."
    difference = mlstate.diff("one", "two")
    assert [change.name for change in difference.changes] == [f"{prefix}param_groups[0]['lr']"]


def test_diff_of_optimizers_without_tensors_lists_their_values(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    for path, rate in (("one", 0.1), ("two", 0.2)):
        optimizer = mlstate.OptimizerStateDict(learning_rate=rate)
        mlstate.save(path, {"w": np.ones(2)}, optimizer)
    status, out, _ = run("diff", "one", "two")
    assert status == 1 and any("learning_rate" in line for line in out)
    assert mlstate.diff("one", "two", rtol=0.6).identical


def test_diff_ignores_steps_and_metadata_and_groups_of_one_side(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    save_optimizer("one", {"lr": 0.1}, step=1, loss=2.0)
    save_optimizer("two", {"lr": 0.1}, step=2, loss=1.0)
    mlstate.save("three", optimizer={"w.m": np.ones(2)})
    assert run("diff", "one", "two")[0] == run("diff", "one", "three")[0] == 0
    assert mlstate.diff("one", "two").identical and mlstate.diff("one", "three").identical
