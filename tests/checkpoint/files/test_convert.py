"""States to and from safetensors and npz files, and the format that a path selects."""

import json
import stat
import zipfile

import numpy as np
import pytest
from any_format import read_any, write_any
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import tries

import mlstate
from mlstate import (
    CompatibilityError,
    FormatError,
    ModelStateDict,
    OptimizerStateDict,
    StateDict,
    StoreError,
    checkpoint,
    load_file,
    save_file,
)
from mlstate._common.atomic_file import Target
from mlstate.checkpoint._convert.formats import NAMES as FORMATS
from mlstate.checkpoint._convert.formats import format_of
from mlstate.checkpoint._files.flat_file import PARTS
from mlstate.checkpoint._files.npz import read_npz, write_npz

FLAT = [".safetensors", ".npz"]
# "" is a directory: an mlstate checkpoint
ANY = [*FLAT, "", *(pytest.param(suffix, marks=pytest.mark.torch) for suffix in (".pt", ".dcp"))]
# fmt: off
AWKWARD = [
    "a", "a/b", "/a", "../a", "a\\b", "a.npy", "a.npy.npy", "file", "mlstate.json", "A", "ä",
    "a\u0308",
    "", " ", "a\n", "con", "x" * 300, "array_0", "array_1", "C:x", "a//b", "a/", ".", "model.a",
]
# fmt: on


def model():
    arrays = {"fc.w": np.arange(6.0).reshape(2, 3), "fc.b": np.zeros(2, np.float16)}
    arrays |= {"point": np.float32(4), "none": np.zeros((0, 3), np.int8)}
    return ModelStateDict(arrays, model_type="tiny", layer_count=1)


def optimizer():
    return OptimizerStateDict(
        {"fc.w.m": np.ones((2, 3), np.float32), "fc.w.step": np.int64(3)},
        optimizer_type="adam",
        step=3,
        learning_rate=0.5,
        param_groups=[
            {"params": ["fc.w"], "lr": 0.5, "betas": [0.9, 0.99], "foreach": None}
            | {"python_numbers": ["step"]}
        ],
    )


def attributes(state):
    names = ("model_type", "layer_count", "optimizer_type", "step", "learning_rate", "param_groups")
    return {name: getattr(state, name) for name in names if hasattr(state, name)}


def assert_same(actual, expected):
    assert type(actual) is type(expected)
    if expected is not None:
        assert actual == expected
        assert list(actual) == list(expected) or set(actual) == set(expected)
        assert attributes(actual) == attributes(expected)


METADATA = {"epoch": 3, "note": "ä text", "nested": {"list": [1, 2.5, None, True]}}


@pytest.mark.parametrize("suffix", ANY)
@pytest.mark.parametrize(
    ("weights", "moments"),
    [(model(), None), (None, optimizer()), (model(), optimizer()), (StateDict(), optimizer()),
     (model(), OptimizerStateDict()), (StateDict(w=np.ones(2)), None)],
    ids=["model", "optimizer", "both", "empty model", "empty optimizer", "plain"],
)  # fmt: skip
@pytest.mark.parametrize("metadata", [{}, METADATA], ids=["", "metadata"])
def test_written_parts_read_back(tmp_path, suffix, weights, moments, metadata):
    path = tmp_path / f"state{suffix}"
    write_any(path, weights, moments, metadata)
    parts = read_any(path)
    assert_same(parts[0], weights)
    assert_same(parts[1], moments)
    assert parts[2] == metadata
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", ANY)
def test_writes_builtin_dicts(tmp_path, suffix):
    path = tmp_path / f"state{suffix}"
    write_any(path, {"w": np.ones(2)}, {"w.m": np.zeros(2)})
    parts = read_any(path)
    assert_same(parts[0], StateDict(w=np.ones(2)))
    assert_same(parts[1], OptimizerStateDict({"w.m": np.zeros(2)}))


@pytest.mark.parametrize("suffix", FLAT)
def test_names_are_prefixed_only_with_both_parts(tmp_path, suffix):
    def names(path):
        if suffix == ".npz":
            with np.load(path) as parts:
                return set(parts.files) - {"mlstate.json"}
        return set(load_file(path))

    path = tmp_path / f"state{suffix}"
    write_any(path, {"model.w": np.ones(2)})
    assert names(path) == {"model.w"}
    assert list(read_any(path)[0]) == ["model.w"]
    write_any(path, None, {"w.m": np.ones(2)}, overwrite=True)
    assert names(path) == {"w.m"}
    write_any(path, {"optimizer.w": np.ones(2)}, {"w.m": np.ones(2)}, overwrite=True)
    assert names(path) == {"model.optimizer.w", "optimizer.w.m"}
    parts = read_any(path)
    assert (list(parts[0]), list(parts[1])) == (["optimizer.w"], ["w.m"])


def test_a_step_without_an_optimizer_is_kept(tmp_path):
    checkpoint.save(tmp_path / "a", {"w": np.ones(2)}, step=5)
    assert read_any(tmp_path / "a")[2] == {"step": 5}
    checkpoint.save(tmp_path / "b", None, StateDict({"w.m": np.ones(2)}), step=5)
    parts = read_any(tmp_path / "b")
    assert (type(parts[1]), parts[1].step, parts[2]) == (OptimizerStateDict, 5, {})


def test_files_of_other_writers_hold_a_model(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, **{"model.w": np.arange(1000), "optimizer.w.m": np.ones(2)})
    assert_same(read_any(path)[0], StateDict(dict(np.load(path))))
    path = tmp_path / "x.safetensors"
    save_file({"model.w": np.ones(2)}, path, {"format": "pt"})
    parts = read_any(path)
    assert (list(parts.model), parts[1:4]) == (["model.w"], (None, {"format": "pt"}, {}))


# ---- safetensors ----


def test_string_metadata_are_stored_unchanged(tmp_path):
    path = tmp_path / "x.safetensors"
    write_any(path, {"w": np.ones(2)}, None, {"a": "1", "b": 1})
    from mlstate.checkpoint import load_metadata

    assert load_metadata(path) == {"a": "1", "b": "1", PARTS: '{"json": ["b"]}'}
    assert read_any(path)[2] == {"a": "1", "b": 1}
    write_any(path, {"w": np.ones(2)}, None, {"a": "1"}, overwrite=True)
    assert load_metadata(path) == {"a": "1"}


@pytest.mark.parametrize(
    "entry",
    ["", "[]", "{", '{"json": ["none"]}', '{"json": 3}', '{"parts": {}}', '{"parts": 5}',
     '{"parts": {"model": null, "optimizer": null}}',
     '{"parts": {"model": "x", "optimizer": null}}', "[" * 100_000],
)  # fmt: skip
def test_an_entry_that_describes_no_parts_is_refused(tmp_path, entry):
    path = tmp_path / "x.safetensors"
    save_file({"model.w": np.ones(2)}, path, {PARTS: entry})
    with pytest.raises(FormatError, match="describe"):
        read_any(path)


def test_an_array_of_no_part_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    texts = {"model": None, "optimizer": json.dumps({"kind": "optimizer"})}
    for name in ("w", "other.w", "model"):
        save_file({name: np.ones(2)}, path, {PARTS: json.dumps({"parts": texts})}, overwrite=True)
        with pytest.raises(FormatError, match=f"array '{name}' belongs to no part") as caught:
            read_any(path)
        assert (caught.value.path, caught.value.name) == (str(path), PARTS)


def test_the_entry_cannot_be_taken_for_metadata(tmp_path):
    with pytest.raises(ValueError, match=f"'{PARTS}'.*reserved"):
        write_any(tmp_path / "x.safetensors", {"w": np.ones(2)}, None, {PARTS: "x"})


# ---- npz ----


def test_awkward_names_survive(tmp_path):
    path = tmp_path / "x.npz"
    state = StateDict({name: np.full(2, i) for i, name in enumerate(AWKWARD)})
    write_any(path, state)
    assert_same(read_any(path)[0], state)
    with np.load(path) as file:  # every array is found under its name
        assert len(file.files) == len(AWKWARD) + 1
        assert file["a/b"].tolist() == [1, 1]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert not [n for n in archive.namelist() if ".." in n.split("/") or n.startswith("/")]


@settings(max_examples=tries(60), deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=8), unique=True, max_size=6))
def test_any_names_survive(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("npz") / "x.npz"
    arrays = {name: np.full(1, i) for i, name in enumerate(names)}
    write_npz(Target.of(path), arrays, {})
    loaded, record, _ = read_npz(path)
    assert {name: int(array[0]) for name, array in loaded.items()} == {
        name: int(array[0]) for name, array in arrays.items()
    }
    assert record == {}


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint64", "float16", ">f8", "complex64", "S3", "M8[s]"]
)
def test_numpys_dtypes_survive(tmp_path, dtype):
    array = np.arange(12).astype("i8").astype(dtype).reshape(4, 3)
    for view in (array, array[::-2, 1:], array.T, array[:0], array[0, 0, ...]):
        write_any(tmp_path / "x.npz", {"a": view}, overwrite=True)
        loaded = read_any(tmp_path / "x.npz")[0]["a"]
        assert (loaded.dtype, loaded.shape) == (view.dtype, view.shape)
        np.testing.assert_array_equal(loaded, view)


def test_dtypes_of_ml_dtypes_survive(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="has bfloat16")
    names = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
    state = StateDict(
        {
            n: np.arange(4, dtype="u1" if n != "bfloat16" else "u2").view(getattr(ml_dtypes, n))
            for n in names
        }
    )
    state["strided"] = np.arange(8).astype(ml_dtypes.bfloat16)[::2]
    state["scalar"] = np.ones((), ml_dtypes.bfloat16)
    path = tmp_path / "x.npz"
    write_any(path, state)
    assert_same(read_any(path)[0], state)
    with np.load(path) as file:  # as NumPy reads it
        assert file["bfloat16"].dtype == np.uint16
        record = json.loads(str(file["mlstate.json"]))
    assert record["dtypes"]["bfloat16"] == "bfloat16"


def test_the_same_state_gives_the_same_bytes(tmp_path):
    for name in ("a.npz", "b.npz"):
        write_any(tmp_path / name, model(), optimizer(), METADATA)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def damaged_npz(path, kind):
    """Write a file with one defect, and return the text that the error must contain."""
    write_any(path, {"w": np.arange(100.0)})
    data = path.read_bytes()
    if kind == "cut":
        path.write_bytes(data[:-30])
        return "zip"
    if kind == "no zip":
        path.write_bytes(b"nothing" * 9)
        return "the text 'nothing"
    if kind == "flipped":
        at = data.index(np.float64(50).tobytes())
        path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
        return "array 'w': Bad CRC-32"
    if kind == "objects":
        np.savez(path, w=np.array([{}]))
        return "array 'w': holds Python objects"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        if kind == "foreign entry":
            archive.writestr("readme.txt", "x")
            return "a zip archive of other files, readme.txt"
        if kind == "no array":
            archive.writestr("w.npy", "x" * 99)
            return "array 'w': "
        header = {"shape": "(1000000000000,)", "old": "(3,)", "long": "(1,)"}[kind]
        text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {header}, }}".encode()
        version = b"\x03\x00" if kind == "old" else b"\x01\x00"
        head = b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text
        archive.writestr("w.npy", head + bytes(24))
    return {
        "shape": "does not fit", "old": "version", "long": "bytes after its elements",
    }[kind]  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    ["cut", "no zip", "flipped", "objects", "foreign entry", "no array", "shape", "old", "long"],
)
def test_a_damaged_npz_is_refused(tmp_path, kind):
    path = tmp_path / "x.npz"
    text = damaged_npz(path, kind)
    with pytest.raises(FormatError, match=text) as caught:
        read_any(path)
    assert caught.value.path == str(path)


def test_a_bomb_is_refused_unread(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, w=np.zeros(1 << 20))
    assert read_any(path)[0]["w"].shape == (1 << 20,)
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02")  # the central directory repeats the size
    data[entry + 24 : entry + 28] = (1 << 31).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(FormatError):
        read_any(path)


@pytest.mark.parametrize(
    "record",
    [b"[]", b"{", b"3", b'{"names": 3}', b'{"names": {"w": 3}}', b'{"names": {"w": "b"}}',
     b'{"dtypes": {"w": "none"}}', b'{"dtypes": {"w": 3}}', b'{"dtypes": {"w": "bfloat16"}}',
     b'{"dtypes": []}', b'{"kind": 5}', b'{"kind": "{}"}', b'{"metadata": 3}', b'{"parts": 3}'],
)  # fmt: skip
def test_bad_npz_record_is_refused(tmp_path, record):
    pytest.importorskip("ml_dtypes", reason="one of them names bfloat16")
    path = tmp_path / "x.npz"
    np.savez(path, **{"w": np.ones(3, "u1"), "b": np.ones(3), "mlstate.json": record.decode()})
    with pytest.raises(FormatError):
        read_any(path)


def test_object_arrays_are_refused_in_npz(tmp_path):
    path = tmp_path / "x.npz"
    with pytest.raises(TypeError, match="'w' is an array of Python objects"):
        write_any(path, {"w": np.array([{}])})
    assert not path.exists()


@pytest.mark.parametrize("suffix", [*FLAT, ".pt", ".dcp"])
def test_shards_are_refused(tmp_path, suffix):
    array = np.arange(10.0)
    half = checkpoint.Layout.rows(2).shard(array, 1)
    for parts in (({"w": half}, None), (None, {"w.m": half})):
        with pytest.raises(CompatibilityError, match="is part 1 of 2 of an array of shape"):
            write_any(tmp_path / f"x{suffix}", *parts)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_of_an_npz_entry_is_raised_itself(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(zipfile._ZipWriteFile, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_any(tmp_path / "x.npz", {"w": np.ones(3)})
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


# ---- paths ----


@pytest.mark.parametrize(
    ("path", "name"),
    [("a.safetensors", "safetensors"), ("a.NPZ", "npz"), ("a.pt", "torch"), ("a.pth", "torch"),
     ("pytorch_model.bin", "torch"), ("a.dcp", "dcp"), ("runs/a", "mlstate")],
)  # fmt: skip
def test_suffixes_name_formats(path, name):
    assert format_of(path) == name


def test_folder_format_follows_its_files(tmp_path):
    assert format_of(tmp_path) == "mlstate"
    (tmp_path / "step-1.5").mkdir()
    assert format_of(tmp_path / "step-1.5") == "mlstate"
    (tmp_path / "manifest.json").touch()
    assert format_of(tmp_path) == "mlstate"
    (tmp_path / "step-1.5" / ".metadata").touch()
    assert format_of(tmp_path / "step-1.5") == "dcp"


def test_a_folder_of_two_formats_converts_as_it_loads(tmp_path):
    save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / ".metadata").touch()
    assert format_of(tmp_path) == "huggingface"
    assert dict(read_any(tmp_path).model).keys() == dict(checkpoint.load(tmp_path).model).keys()
    checkpoint.save(tmp_path / "own", {"w": np.ones(3)})
    (tmp_path / "own" / ".metadata").touch()
    assert format_of(tmp_path / "own") == "mlstate"


def test_unknown_suffix_lists_known_suffixes(tmp_path):
    path = tmp_path / "model.onnx"
    message = r"known are .safetensors .npz .pt .pth .bin .ckpt .dcp, and folders"
    with pytest.raises(ValueError, match=message):
        write_any(path, {"w": np.ones(2)})


def test_a_format_can_be_named(tmp_path):
    path = tmp_path / "weights.dat"
    write_any(path, {"w": np.ones(2)}, format="npz")
    assert read_any(path, format="npz")[0]["w"].tolist() == [1, 1]
    with pytest.raises(ValueError, match=f"format must be one of {', '.join(FORMATS)}, got 'x'"):
        read_any(path, format="x")


@pytest.mark.parametrize("name", ["a.safetensors", "a.npz", "a.pt", "a.dcp", "a"])
def test_missing_path_raises_file_not_found(tmp_path, name):
    with pytest.raises(FileNotFoundError) as caught:
        read_any(tmp_path / name)
    assert isinstance(caught.value, StoreError)


def test_write_without_states_is_refused(tmp_path):
    with pytest.raises(ValueError, match="neither a model nor an optimizer"):
        write_any(tmp_path / "x.npz")


# ---- atomic replacement of files ----


def test_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def write_and_fail(file):
        file.write(b"new")
        raise KeyError

    with pytest.raises(KeyError):
        Target.of(path).write_content(write_and_fail)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_links_and_modes_stay(tmp_path):
    path, link = tmp_path / "x", tmp_path / "link"
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to("x")
    Target.of(link).write_content(lambda file: file.write(b"new"))
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_masked_arrays_are_refused(tmp_path):
    state = {"m": np.ma.array([1.0, 2.0], mask=[False, True])}
    for save in (
        lambda: save_file(state, tmp_path / "m.safetensors"),
        lambda: checkpoint.save(tmp_path / "m", state),
        lambda: checkpoint.save(tmp_path / "m", states={"s": state}),
        lambda: write_any(tmp_path / "m.npz", state),
    ):
        with pytest.raises(TypeError, match="'m' is a masked array"):
            save()
    assert list(tmp_path.iterdir()) == []


def test_a_model_alone_has_no_entry_but_its_arrays(tmp_path):
    state = {"w": np.ones(3), "b": np.zeros(2, np.float32)}
    with mlstate.CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, state, {"w.m": np.zeros(3)}, metadata={"loss": 0.5})
    for options, names in (
        ({"only": "model"}, {"w", "b"}),
        ({"skip": ["optimizer", "step", "loss"]}, {"w", "b"}),
        ({"only": ["model", "step"]}, {"w", "b", "mlstate.json"}),
    ):
        target = tmp_path / f"{len(names)}{options.keys()}.npz"
        converted = mlstate.convert(tmp_path / "run", target, **options)
        assert set(np.load(target).files) == names
        loaded = mlstate.load(target)
        assert converted["step"] == 7 and loaded.metadata.get("loss") is None
        assert loaded.step == (7 if "mlstate.json" in names else None)
    mlstate.convert(tmp_path / "run", tmp_path / "copy", only="model")
    assert mlstate.load(tmp_path / "copy").step == 7  # a checkpoint keeps the step
    with pytest.raises(ValueError, match="'lr'"):
        mlstate.convert(tmp_path / "run", tmp_path / "x.npz", skip="lr")


def test_a_model_alone_is_a_state_dict_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    mlstate.save(tmp_path / "ckpt", torch.nn.Linear(3, 2), step=7)
    mlstate.convert(tmp_path / "ckpt", tmp_path / "model.pt", only="model")
    torch.nn.Linear(3, 2).load_state_dict(torch.load(tmp_path / "model.pt"))
