"""``mlstate convert --dtype --names --rename``, from and to every kind of path."""

import json
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
from any_format import read_any, write_any

import mlstate
from mlstate import OptimizerStateDict
from mlstate.cli import main

MODEL = {
    "net.layers.0.w": np.linspace(-3, 3, 12).reshape(3, 4),
    "net.layers.1.w": np.linspace(0, 1, 5).astype(np.float32),
    "net.head": np.arange(3),
}
MOMENTS = {"net.layers.0.w.m": np.ones((3, 4)), "net.layers.1.w.m": np.ones(5)}
OPTIONS = ["--dtype", "float16", "--rename", "net.=", "--names", "layers.*"]
TARGETS = ["own", "a.safetensors", "a.npz", "a.pt", "a.dcp"]


def read_model(path):
    return {name: np.asarray(array) for name, array in read_any(path)[0].items()}


def assert_changed(path):
    model, optimizer, *_ = read_any(path)
    expected = {name.removeprefix("net."): a.astype("f2") for name, a in list(MODEL.items())[:2]}
    assert list(model) == list(expected)
    for name, array in expected.items():
        assert str(model[name].dtype).removeprefix("torch.") == "float16"
        assert np.array_equal(np.asarray(model[name]), array)
    return optimizer


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", TARGETS)
def test_every_source_and_target(tmp_path, source, target, capsys):
    if {source[-2:], target[-2:]} & {"pt", "cp"}:
        pytest.importorskip("torch", reason="files of torch")
    write_any(tmp_path / source, MODEL, OptimizerStateDict(MOMENTS))
    words = ["convert", str(tmp_path / source), str(tmp_path / f"new-{target}")]
    assert main([*words, *OPTIONS]) == 0, capsys.readouterr().err
    optimizer = assert_changed(tmp_path / f"new-{target}")
    assert {name: str(np.asarray(a).dtype) for name, a in optimizer.items()} == {
        "layers.0.w.m": "float64",
        "layers.1.w.m": "float64",
    }
    assert "model of 2 tensors, 34 B" in capsys.readouterr().out


def test_a_rename_may_make_names_of_two_states_equal(tmp_path, capsys):
    write_any(tmp_path / "a.npz", {"a.x": np.ones(3)}, OptimizerStateDict({"b.x": np.zeros(2)}))
    words = ["convert", str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), "--rename"]
    assert main([*words, "a=b"]) == 0, capsys.readouterr().err
    model, optimizer, *_ = read_any(tmp_path / "b.npz")
    assert model["b.x"].tolist() == [1, 1, 1] and optimizer["b.x"].tolist() == [0, 0]


@pytest.mark.parametrize("source", TARGETS)
def test_to_a_hugging_face_folder_and_back(tmp_path, source, capsys):
    if source[-2:] in ("pt", "cp"):
        pytest.importorskip("torch", reason="files of torch")
    write_any(tmp_path / source, MODEL)
    words = ["convert", str(tmp_path / source), str(tmp_path / "hf"), "--to", "huggingface"]
    assert main([*words, *OPTIONS, "--json"]) == 0, capsys.readouterr().err
    assert_changed(tmp_path / "hf")
    assert json.loads(capsys.readouterr().out)["model"] == {"tensors": 2, "bytes": 34}
    words = ["convert", str(tmp_path / "hf"), str(tmp_path / "own2"), "--dtype", "float32"]
    assert main(words) == 0
    dtypes = {str(array.dtype) for array in mlstate.load(tmp_path / "own2").model.values()}
    assert dtypes == {"float32"}


@pytest.mark.parametrize("form", ["huggingface", "mlstate", "npz"])
@pytest.mark.parametrize("skip", [[], ["--skip", "optimizer"]])
def test_quantized_folders_give_values(tmp_path, form, skip, capsys):
    source = tmp_path / "source"
    source.mkdir()
    codes = np.random.default_rng(0).normal(0, 9, (200, 300)).astype(ml_dtypes.float8_e4m3fn)
    scales = np.full((2, 3), 0.5, np.float32)
    tensors = {"l.w": codes, "l.w_scale_inv": scales, "n": np.ones(3, np.float32)}
    mlstate.save_file(tensors, source / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    text = json.dumps({"dtype": "float32", "quantization_config": config})
    (source / "config.json").write_text(text)
    words = ["convert", str(source), str(tmp_path / "new"), "--to", form, "--dtype", "bfloat16"]
    skip = [] if skip and form != "huggingface" else skip
    status = main([*words, *skip])
    if skip:  # the source has no optimizer
        assert status == 2
        return
    assert status == 0, capsys.readouterr().err
    model = read_any(tmp_path / "new", format=form)[0]
    expected = (codes.astype(np.float32) * 0.5).astype(ml_dtypes.bfloat16)
    assert list(model) == ["l.w", "n"]
    assert np.asarray(model["l.w"]).tobytes() == expected.tobytes()
    if form == "huggingface":
        assert json.loads((tmp_path / "new" / "config.json").read_text()) == {"dtype": "bfloat16"}
    single = ["convert", str(source / "model.safetensors"), str(tmp_path / "x.npz")]
    assert main([*single, "--dtype", "bfloat16"]) == 0
    assert np.asarray(read_any(tmp_path / "x.npz")[0]["l.w"]).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--dtype", "int8"], "--dtype must be one of the dtypes"),
        (["--rename", "net"], "--rename net: write OLD=NEW"),
        (["--rename", "nut.=x."], "no name matches 'nut.'"),
        (["--names", "heed"], "'heed' not found"),
    ],
)
@pytest.mark.parametrize("source", ["own", "a.npz"])
def test_wrong_options_are_refused_before_a_write(tmp_path, source, options, text, capsys):
    write_any(tmp_path / source, MODEL)
    for target in (["new"], ["hf", "--to", "huggingface"]):
        words = ["convert", str(tmp_path / source), str(tmp_path / target[0]), *target[1:]]
        assert main([*words, *options]) == 2
        assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [source]


@pytest.mark.parametrize("source", ["own", "a.safetensors", "a.npz"])
def test_names_leave_out_a_part_without_chosen_tensors(tmp_path, source, capsys):
    write_any(tmp_path / source, MODEL, OptimizerStateDict({"param_0.m": np.ones(3)}))
    for target, pattern, names in (
        ("m.safetensors", "net.layers.*", list(MODEL)[:2]),
        ("o.npz", "param_0.m", ["param_0.m"]),
    ):
        path = tmp_path / target
        assert main(["convert", str(tmp_path / source), str(path), "--names", pattern]) == 0
        assert " of 0 tensors" not in capsys.readouterr().out
        with np.load(path) if path.suffix == ".npz" else mlstate_file(path) as arrays:
            assert sorted(name for name in arrays if not name.startswith("mlstate")) == names


@contextmanager
def mlstate_file(path):
    yield mlstate.load_file(path)


def test_an_optimizer_without_tensors_stays_if_no_names_are_chosen(tmp_path):
    write_any(tmp_path / "own", MODEL, OptimizerStateDict(step=3))
    assert main(["convert", str(tmp_path / "own"), str(tmp_path / "new")]) == 0
    assert mlstate.load(tmp_path / "new").optimizer.step == 3


def test_the_description_of_parts_is_not_shown_as_metadata(tmp_path, capsys):
    write_any(tmp_path / "a.safetensors", MODEL, OptimizerStateDict(MOMENTS), {"note": "text"})
    assert main(["inspect", str(tmp_path / "a.safetensors")]) == 0
    out = capsys.readouterr().out
    assert "mlstate_parts" not in out and 'metadata: {"note": "text"}' in out


def test_convert_says_that_no_config_was_written(tmp_path, capsys):
    write_any(tmp_path / "own", MODEL)
    words = ["convert", str(tmp_path / "own"), str(tmp_path / "hf"), "--to", "huggingface"]
    assert main(words) == 0
    assert "no config.json was written: --files-from" in capsys.readouterr().out
    (tmp_path / "hf" / "config.json").write_text("{}")
    words = ["convert", str(tmp_path / "hf"), str(tmp_path / "new"), "--to", "huggingface"]
    assert main(words) == 0 and "config.json" not in capsys.readouterr().out
