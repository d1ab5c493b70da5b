"""Load, inspect and verify files and folders of every format."""

import json
import os
import pickle
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from any_format import write_any

import mlstate
from mlstate.cli import main

WEIGHTS = {"layers.0.w": np.arange(8, dtype=np.float32).reshape(4, 2), "b": np.ones(3)}
MOMENTS = {"layers.0.w.m": np.arange(8, 16, dtype=np.float32).reshape(4, 2)}
FORMATS = [
    "a.safetensors",
    "a.npz",
    pytest.param("a.pt", marks=pytest.mark.torch),
    pytest.param("a.dcp", marks=pytest.mark.torch),
]


@pytest.fixture(params=FORMATS)
def path(request, tmp_path):
    if not request.param.endswith(("npz", "safetensors")):
        pytest.importorskip("torch")
    optimizer = mlstate.OptimizerStateDict(MOMENTS, step=5)
    write_any(tmp_path / request.param, WEIGHTS, optimizer, {"run": "a"})
    return tmp_path / request.param


def test_every_tensor_is_loaded(path):
    loaded = mlstate.load(path)
    assert mlstate.diff(loaded.model, WEIGHTS).identical
    assert mlstate.diff(loaded.optimizer, MOMENTS).identical
    assert (loaded.step, loaded.metadata, loaded.optimizer.step) == (5, {"run": "a"}, 5)


def test_inspect_counts_the_parameters_of_the_model(path, capsys):
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 11


@pytest.mark.parametrize("key", ["step", "global_step"])
def test_the_step_is_the_one_that_the_maker_stored(tmp_path, key):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**content, key: 7}, tmp_path / "a.pt")
    torch.save(content, tmp_path / "b.pt")
    assert mlstate.load(tmp_path / "a.pt").step == 7
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "own")]) == 0
    assert mlstate.load(tmp_path / "own").step == 7
    assert mlstate.load(tmp_path / "b.pt").step == 1


def test_an_error_for_names_tells_of_a_rename(tmp_path):
    model = {"model.layers.1.w": np.ones(2), "model.head": np.ones(2)}
    mlstate.save(tmp_path / "own", model)
    mlstate.export_huggingface(tmp_path / "hf", model)
    for folder in ("own", "hf"):
        options = {"rename": {"model.": ""}}
        with pytest.raises(mlstate.TensorNotFoundError, match="names= takes the names after"):
            mlstate.load(tmp_path / folder, names="model.layers.1", **options)
        assert list(mlstate.load(tmp_path / folder, names="layers.1", **options).model)


def test_a_rank_gets_its_part(path):
    part = mlstate.load(path, rank=3, world_size=4, layout="rows")
    assert part.model["layers.0.w"].tolist() == [[6.0, 7.0]]
    assert part.optimizer["layers.0.w.m"].tolist() == [[14.0, 15.0]]
    assert part.model["b"].shape == (0,)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt", ".dcp"])
@pytest.mark.parametrize("is_named", [False, True])
def test_states_of_unknown_parameters_are_cut_only_if_their_shapes_agree(
    tmp_path, suffix, is_named
):
    if suffix in (".pt", ".dcp"):
        pytest.importorskip("torch")
    elif is_named:
        pytest.skip("the format has no named states")
    part = {"rank": 1, "world_size": 2, "layout": "rows"}

    def load_part(states):
        optimizer = mlstate.OptimizerStateDict(states)
        path = tmp_path / f"{len(states)}{suffix}"
        named = {"model": {"v": np.ones(2)}, "states": {"optimizer_d": optimizer}}
        write_any(path, **(named if is_named else {"optimizer": optimizer}))
        loaded = mlstate.load(path, **part)
        return loaded.states["optimizer_d"] if is_named else loaded.optimizer

    adam = {"w.step": np.ones(1), "w.m": np.eye(4), "w.v": np.eye(4), "b.m": np.ones(6)}
    shapes = {name: array.shape for name, array in load_part(adam).items()}
    assert shapes == {"w.step": (1,), "w.m": (2, 4), "w.v": (2, 4), "b.m": (3,)}
    factors = {"w.step": np.ones(1), "w.row_var": np.ones((4, 1)), "w.col_var": np.ones((1, 3))}
    text = r"'w\.\w+' has shape .* and 'w\.\w+' \(.*does not tell how to cut it"
    with pytest.raises(mlstate.CompatibilityError, match=text):
        load_part(factors)


def test_names_and_rename_choose_tensors(path):
    assert list(mlstate.load(path, names="layers.*").model) == ["layers.0.w"]
    assert list(mlstate.load(path, names="layers").optimizer) == ["layers.0.w.m"]
    renamed = mlstate.load(path, rename={"layers.": "blocks."})
    assert "blocks.0.w" in renamed.model and "blocks.0.w.m" in renamed.optimizer
    with pytest.raises(mlstate.TensorNotFoundError, match="missing"):
        mlstate.load(path, names="missing")
    with pytest.raises(ValueError, match="no name matches"):
        mlstate.load(path, rename={"missing.": ""})


def test_targets_are_filled_or_unchanged(path):
    target = {name: np.zeros_like(array) for name, array in WEIGHTS.items()}
    moments = {name: np.zeros_like(array) for name, array in MOMENTS.items()}
    wrong = {"layers.0.w.m": np.zeros(3, np.float32)}
    with pytest.raises(mlstate.CompatibilityError):
        mlstate.load(path, into={"model": target, "optimizer": wrong})
    assert not target["b"].any()
    frozen = np.zeros((4, 2), np.float32)
    frozen.flags.writeable = False
    repeated = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (4, 2), (0, 0))
    for array, text in ((frozen, "read-only"), (repeated, "share memory")):
        with pytest.raises(ValueError, match=text):
            mlstate.load(path, into={"model": target, "optimizer": {"layers.0.w.m": array}})
    shared = target["layers.0.w"]
    text = r"model\['layers.0.w'\] and optimizer.* share memory.* different bytes"
    with pytest.raises(mlstate.CompatibilityError, match=text):
        mlstate.load(path, into={"model": target, "optimizer": {"layers.0.w.m": shared}})
    assert not target["b"].any() and not shared.any()
    mlstate.load(path, into={"model": target, "optimizer": moments})
    assert mlstate.diff(target, WEIGHTS).identical and mlstate.diff(moments, MOMENTS).identical
    some = {"b": np.zeros(3), "other": np.zeros(1)}
    mlstate.load(path, into={"model": some}, names="b")
    assert some["b"].all() and not some["other"].any()


def test_floats_are_converted(path):
    loaded = mlstate.load(path, cast="float16")
    assert {array.dtype for array in loaded.model.values()} == {np.dtype("float16")}
    assert loaded.optimizer["layers.0.w.m"].dtype == np.float32


@pytest.mark.parametrize("keywords", [{"mmap": True}, {"verify": "first"}, {"missing": "zeros"}])
def test_meaningless_keywords_are_named(path, keywords):
    [(name, value)] = keywords.items()
    with pytest.raises(ValueError, match=f"{name}={value!r} is not possible for the format"):
        mlstate.load(path, **keywords)


def test_inspect_lists_the_tensors(path):
    checkpoint = mlstate.inspect(path)
    assert [t.key for t in checkpoint.tensors()] == ["b", "layers.0.w", "layers.0.w.m"]
    assert (checkpoint.step, checkpoint.metadata, checkpoint.nbytes) == (5, {"run": "a"}, 88)
    assert path.name in repr(checkpoint)
    again = pickle.loads(pickle.dumps(checkpoint))
    assert mlstate.diff(again.load().model, WEIGHTS).identical
    assert again.verify() and again.files() and repr(again) == repr(checkpoint)


def test_verify_reports_its_checks(path):
    report = mlstate.verify(path)
    assert report and report.checksums == (path.suffix != ".dcp")
    assert ("no checksums" in repr(report)) == (path.suffix == ".dcp")
    with pytest.raises(ValueError, match=r"older step|no step"):
        mlstate.verify(path, repair=True)


@pytest.mark.parametrize("suffix", [".pt", ".dcp"])
@pytest.mark.parametrize(
    "keywords",
    [
        {"cast": "float32"},
        {"device": "cpu"},
        {"rename": {"a": "b"}},
        {"rank": 1, "world_size": 2, "layout": "rows"},
    ],
)
def test_named_states_of_tensors_change_as_in_a_checkpoint(tmp_path, suffix, keywords):
    pytest.importorskip("torch")
    model, moments = {"a.x": np.arange(4.0)}, {"a.x.m": np.arange(4.0), "a.x.step": np.array(2.0)}
    states = {
        "first": {"k": [1, np.ones(2)]},
        "ema": {"a.x": np.arange(4.0), "a.n": np.arange(3)},
        "optimizer_d": mlstate.OptimizerStateDict(moments),
        "last": {"z": [np.zeros(1)]},
    }
    mlstate.save(tmp_path / "ckpt", model, moments, states=states)
    write_any(tmp_path / f"a{suffix}", model, moments, states=states)
    expected = mlstate.load(tmp_path / "ckpt", **keywords).states
    loaded = mlstate.load(tmp_path / f"a{suffix}", **keywords).states
    assert set(loaded) == set(expected)
    stored = mlstate.load(tmp_path / f"a{suffix}").states
    for name in ("ema", "optimizer_d"):
        assert loaded[name].keys() == expected[name].keys()
        assert type(loaded[name]) is type(stored[name])
        for key, array in expected[name].items():
            if name == "optimizer_d":
                assert type(loaded[name][key]) is type(array)
            assert str(array.dtype) in str(loaded[name][key].dtype)
            assert loaded[name][key].tolist() == array.tolist()
    assert not mlstate.load(tmp_path / f"a{suffix}", names="*", **keywords).states


@pytest.mark.parametrize(
    "keywords",
    [
        {"cast": "float16"},
        {"rename": {"module.": ""}},
        {"layout": "rows", "rank": 0, "world_size": 1},
    ],
)
def test_a_converted_named_state_fills_its_module(tmp_path, keywords):
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(2, 2)
    state = module.state_dict()
    state["module.weight"] = state.pop("weight") if "rename" in keywords else state["weight"]
    torch.save({"model": state, "ema": state}, tmp_path / "a.pt")
    loaded = mlstate.load(tmp_path / "a.pt", **keywords).states["ema"]
    loaded.pop("module.weight", None)
    assert type(loaded) is type(state) and loaded._metadata == state._metadata
    module.load_state_dict(loaded)


def test_arrays_in_a_dict_of_torch_stay_arrays(tmp_path):
    torch = pytest.importorskip("torch")
    content = {"model": {"w": torch.ones(2)}, "n": {"a": np.ones(3), "t": torch.ones(3)}}
    torch.save(content, tmp_path / "a.pt")
    for keywords in ({}, {"cast": "float16"}, {"device": "meta"}, {"rename": {"w": "v"}}):
        state = mlstate.load(tmp_path / "a.pt", **{"device": "cpu", **keywords}).states["n"]
        assert type(state["a"]) is np.ndarray and type(state["t"]) is torch.Tensor


@pytest.mark.parametrize("kind", ["sparse", "conjugated", "meta"])
def test_a_sparse_named_state_is_refused_only_if_it_is_converted(tmp_path, kind):
    torch = pytest.importorskip("torch")
    values = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "conjugated": lambda: torch.ones(2, dtype=torch.cfloat).conj(),
        "meta": lambda: torch.ones(2, device="meta"),
    }
    path, key = tmp_path / "a.pt", "e"
    torch.save({"model": {"w": torch.ones(2)}, "graph": {key: values[kind]()}}, path)
    stored = mlstate.load(path).states["graph"][key]
    target = {"v": np.zeros(2, "f4")}
    mlstate.load(path, rename={"w": "v"}, into={"model": target})
    assert target["v"].all()
    for keywords in ({"rename": {"w": "v"}, "names": "v"}, {"cast": "float16", "names": "w"}):
        assert not mlstate.load(path, **keywords).states
    unchanged = mlstate.load(path, device="cpu").states["graph"][key]
    assert (unchanged.layout, unchanged.dtype) == (stored.layout, stored.dtype)
    assert unchanged.device == stored.device
    renamed = mlstate.load(path, rename={"w": "v", "e": "f"}).states["graph"]["f"]
    assert (renamed.layout, renamed.dtype) == (stored.layout, stored.dtype)
    with pytest.raises(ValueError, match=r"a\.pt: states\['graph'\]: "):
        mlstate.load(path, cast="float16")


@pytest.mark.parametrize("suffix", [".pt", ".dcp", ""])
def test_tensors_in_nested_states_are_loaded_to_the_device(tmp_path, suffix):
    torch = pytest.importorskip("torch")
    values = [Counter("aab"), torch.ones(2), {"t": (torch.zeros(1), np.ones(1))}]
    write_any(tmp_path / f"a{suffix}", {"w": np.ones(2)}, states={"n": {"k": values}})
    counts, first, inner = mlstate.load(tmp_path / f"a{suffix}", device="meta").states["n"]["k"]
    assert counts == {"a": 2, "b": 1}
    assert first.device.type == inner["t"][0].device.type == "meta"


def test_moved_tensors_of_nested_states_stay_leaves_that_require_gradients(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True), torch.ones(2)]
    tensors.append(torch.nn.Parameter(torch.ones(2), requires_grad=False))
    torch.save({"model": {"w": torch.ones(2)}, "n": {"k": tensors}}, tmp_path / "a.pt")
    for device in ("cpu", "meta"):
        loaded = mlstate.load(tmp_path / "a.pt", device=device).states["n"]["k"]
        for tensor, expected in zip(loaded, tensors, strict=True):
            assert type(tensor) is type(expected) and tensor.device.type == device
            assert tensor.is_leaf and tensor.requires_grad == expected.requires_grad


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "pt"])
def test_a_flipped_bit_is_found(tmp_path, suffix):
    if suffix == "pt":
        pytest.importorskip("torch")
    path = tmp_path / f"a.{suffix}"
    write_any(path, WEIGHTS)
    data = bytearray(path.read_bytes())
    data[data.find(WEIGHTS["b"].tobytes()) + 7] ^= 1
    path.write_bytes(data)
    [problem] = mlstate.verify(path).problems
    assert problem.kind == "altered" and problem.path == path.name


@pytest.mark.parametrize("error", [ValueError("x"), zipfile.BadZipFile("x"), OSError("x")])
def test_an_error_of_progress_during_verify_is_not_damage(tmp_path, error):
    def fail(nbytes):
        raise error

    write_any(tmp_path / "a.npz", WEIGHTS)
    with pytest.raises(type(error)) as raised:
        mlstate.verify(tmp_path / "a.npz", progress=fail)
    assert raised.value is error


@pytest.mark.parametrize("names", [None, "b"])
def test_an_unverified_load_reads_changed_elements(tmp_path, names):
    path = tmp_path / "a.safetensors"
    write_any(path, WEIGHTS, mlstate.OptimizerStateDict(MOMENTS))
    data = bytearray(path.read_bytes())
    data[data.index(WEIGHTS["b"].tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(mlstate.ChecksumError):
        mlstate.load(path, names=names)
    loaded = mlstate.load(path, names=names, verify=False)
    assert loaded.model["b"].tobytes() != WEIGHTS["b"].tobytes()
    assert ("layers.0.w" in loaded.model) == (names is None)


def test_a_truncated_folder_of_torch_is_unreadable(tmp_path):
    pytest.importorskip("torch")
    write_any(tmp_path / "a.dcp", WEIGHTS)
    [file] = (tmp_path / "a.dcp").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:10])
    [problem] = mlstate.verify(tmp_path / "a.dcp").problems
    assert problem.kind == "unreadable"


def test_one_safetensors_file_keeps_its_kind_and_maps(tmp_path):
    path = tmp_path / "a.safetensors"
    mlstate.save_file(mlstate.ModelStateDict(WEIGHTS, model_type="x"), path, {"k": "v"})
    loaded = mlstate.load(path, mmap=True)
    assert loaded.model.model_type == "x" and loaded.metadata == {"k": "v"}
    assert not loaded.model["b"].flags.writeable
    mlstate.save_file(mlstate.OptimizerStateDict(MOMENTS, step=3), path, overwrite=True)
    assert mlstate.load(path).optimizer.step == mlstate.load(path).step == 3


def test_steps_are_chosen(tmp_path):
    with mlstate.CheckpointManager(tmp_path, keep=None) as manager:
        for step in (1, 2):
            manager.save(step, model={"w": np.full(2, step)})
    assert mlstate.load(tmp_path, step=1).step == 1
    assert mlstate.load(tmp_path, step="latest").step == mlstate.load(tmp_path).step == 2
    assert mlstate.inspect(tmp_path, step=1).step == mlstate.verify(tmp_path, step=1).step == 1
    with pytest.raises(FileNotFoundError):
        mlstate.load(tmp_path, step=7)
    for wrong, text in (("best", "CheckpointManager"), ("last", "latest")):
        with pytest.raises(ValueError, match=text):
            mlstate.load(tmp_path, step=wrong)
    np.savez(tmp_path / "a.npz", w=np.ones(1))
    with pytest.raises(ValueError, match="one file: it has no steps"):
        mlstate.load(tmp_path / "a.npz", step=1)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for call in (mlstate.load, mlstate.inspect):
        with pytest.raises(mlstate.FormatError, match="it is the text 'text'"):
            call(tmp_path / "a.txt")
    assert not mlstate.verify(tmp_path / "a.txt")


def test_an_item_of_a_loaded_state_names_its_parts(tmp_path):
    mlstate.save(tmp_path / "c", WEIGHTS)
    with pytest.raises(TypeError, match=r'use \.model\["b"\]'):
        mlstate.load(tmp_path / "c")["b"]


def damage_of(path):
    [problem] = mlstate.verify(path).problems
    return problem.kind, problem.text


def test_verify_names_a_damaged_list_of_entries(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, w=np.ones(3))
    data = path.read_bytes()
    end = data.rindex(b"PK\5\6")
    start = int.from_bytes(data[end + 16 : end + 20], "little")
    path.write_bytes(data[:start] + b"X" + data[start + 1 :])
    kind, text = damage_of(path)
    assert kind == "unreadable" and "list of entries is damaged" in text
    # many entries of the same bytes
    listed, count = data[start:end] * 1000, (1000).to_bytes(2, "little")
    sizes = len(listed).to_bytes(4, "little") + data[end + 16 :]
    path.write_bytes(data[:start] + listed + data[end : end + 8] + 2 * count + sizes)
    assert "entries overlap" in damage_of(path)[1]


@pytest.mark.parametrize("codec", ["DEFLATED", "LZMA", "BZIP2", "encrypted"])
def test_a_damaged_entry_of_any_codec_is_reported(tmp_path, codec):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, w=np.arange(1000) % 7)
    if codec != "encrypted":
        with zipfile.ZipFile(path) as archive:
            entry = archive.read("w.npy")
        with zipfile.ZipFile(path, "w", getattr(zipfile, f"ZIP_{codec}")) as archive:
            archive.writestr("w.npy", entry)
    data = bytearray(path.read_bytes())
    if codec == "encrypted":
        data[6] |= 1
        data[data.rindex(b"PK\1\2") + 8] |= 1
    else:
        data[50:60] = bytes(10)  # of the compressed bytes
    path.write_bytes(data)
    kind, text = damage_of(path)
    assert kind == "altered" and "w.npy" in text
    with pytest.raises(mlstate.FormatError, match="array 'w'"):
        mlstate.load(path)


@pytest.mark.torch
@pytest.mark.parametrize("suffix", [".npz", ".pt", ".ckpt"])
def test_verify_refuses_special_files(tmp_path, suffix):
    pytest.importorskip("torch", reason="it reads two of these")
    os.mkfifo(tmp_path / f"a{suffix}")
    kind, text = damage_of(tmp_path / f"a{suffix}")
    assert kind == "unreadable" and "not a regular file" in text


def test_a_loaded_state_is_compared_as_its_path(path, tmp_path):
    loaded = mlstate.load(path)
    mlstate.save(tmp_path / "other", {**WEIGHTS, "b": np.zeros(3)}, MOMENTS)
    for second in (tmp_path / "other", mlstate.load(tmp_path / "other")):
        assert [change.name for change in mlstate.diff(loaded, second).changes] == ["b"]
    assert mlstate.diff(loaded, WEIGHTS).identical and mlstate.diff(WEIGHTS, path).identical


def test_errors_name_the_state_of_a_loaded_one(tmp_path):
    mlstate.save(tmp_path / "ckpt", WEIGHTS)
    loaded = mlstate.load(tmp_path / "ckpt")
    target = {name: np.zeros_like(array) for name, array in WEIGHTS.items()}
    calls = [
        lambda: mlstate.load_into(target, loaded),
        lambda: mlstate.rename(loaded, {"layers.": ""}),
        lambda: mlstate.save_file(loaded, tmp_path / "w.safetensors"),
        lambda: mlstate.save(tmp_path / "new", loaded),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"LoadedState.*pass its \.model"):
            call()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.random.default_rng(1), np.random.default_rng(2)),
        ({"rows": [1, 2]}, {"rows": [1, 3]}),
        ({"note": "first"}, {"note": "second"}),
        ({"a": None}, {"a": True}),
        ({"a": np.zeros(2)}, {"b": np.zeros(2)}),
        ({"a.b": 1, "a": {"b": 2}}, {"a.b": 3, "a": {"b": 2}}),
        ({1: np.zeros(2), "1": np.ones(2)}, {1: np.ones(2), "1": np.ones(2)}),
        ({"rows": [], "n": 1}, {"rows": {}, "n": 1}),
    ],
)
def test_diff_of_paths_compares_every_item_of_named_states(tmp_path, first, second):
    for name, state in {"a": first, "b": second, "c": first}.items():
        mlstate.save(tmp_path / name, {"w": np.ones(2)}, states={"s": state})
    assert mlstate.diff(tmp_path / "a", tmp_path / "c").identical
    assert not mlstate.diff(tmp_path / "a", tmp_path / "b").identical


def test_diff_keeps_names_of_the_model_and_the_optimizer_apart(tmp_path):
    for name, number in {"a": 1, "b": 2}.items():
        mlstate.save(tmp_path / name, {"optimizer.w": np.full(2, number)}, {"w": np.ones(2)})
    difference = mlstate.diff(tmp_path / "a", tmp_path / "b")
    assert [each.name for each in difference.changes] == ["model['optimizer.w']"]


@pytest.mark.parametrize("suffix", ["pt", "npz", "safetensors"])
def test_loaded_arrays_stay_when_the_file_is_overwritten(tmp_path, suffix):
    path = tmp_path / f"w.{suffix}"
    array = np.ones(100_000, np.float32)
    if suffix == "pt":
        torch = pytest.importorskip("torch")
        torch.save({"w": torch.from_numpy(array), "ema": {"w": torch.from_numpy(array)}}, path)
    elif suffix == "npz":
        np.savez(path, w=array)
    else:
        mlstate.save_file({"w": array}, path)
    loaded = mlstate.load(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))
    assert np.array_equal(loaded.model["w"], array)
    for state in loaded.states.values():
        assert np.array_equal(state["w"], array)


# ---- remedies of damage ----


def _flip(path):
    """Flip a bit near the end of the first file of a path, or of the file itself."""
    path = Path(path)
    file = min(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else path
    raw = bytearray(file.read_bytes())
    raw[-len(raw) // 8] ^= 1
    file.write_bytes(raw)


DAMAGED = {
    "run": lambda: _flip("run/params"),
    "run index": lambda: _flip("run/index"),
    "run manifest": lambda: _flip("run/manifest.json"),
    "a.npz": lambda: _flip("a.npz"),
    "a.safetensors": lambda: _flip("a.safetensors"),
    "cut.npz": lambda: Path("cut.npz").write_bytes(Path("a.npz").read_bytes()[:100]),
    "cut.safetensors": lambda: Path("cut.safetensors").write_bytes(
        Path("a.safetensors").read_bytes()[:-9]
    ),
    "hf": lambda: _flip("hf/model.safetensors"),
}


@pytest.mark.parametrize("damaged", DAMAGED)
def test_damage_names_its_remedy(damaged, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    state = {"w": np.arange(300.0)}
    mlstate.CheckpointManager("run").save(1, state)
    mlstate.save_file(state, "a.safetensors")
    np.savez("a.npz", **state)
    mlstate.checkpoint.export_huggingface("hf", state)
    DAMAGED[damaged]()
    path = damaged.partition(" ")[0]
    with pytest.raises(mlstate.errors.FormatError) as caught:
        mlstate.load(path)
    notes = caught.value.__notes__
    assert "copy" in " ".join([str(caught.value), *notes])
    assert notes == [] or "step=N" in notes[0]
    assert main(["convert", path, "target"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "copy" in line
    assert notes == [] or "older step by --step N; `mlstate verify PATH` lists" in line
    assert main(["verify", path]) == 1
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.__notes__) == (str(caught.value), notes)


def test_a_file_of_another_program_is_not_called_damaged(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"GGUF" * 9)
    for load in (mlstate.load, mlstate.load_file):
        with pytest.raises(mlstate.errors.FormatError, match="load it with") as caught:
            load(tmp_path / "x.safetensors")
        assert caught.value.__notes__ == []
