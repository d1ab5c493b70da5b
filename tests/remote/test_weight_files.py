"""Safetensors files and Hugging Face folders in an object store: read by ranges, never written."""

import json
import pickle

import numpy as np
import pytest
from any_format import read_any, write_any
from checkpoint_model import same
from s3_fault_proxy import key_of
from weight_folder import write_folder, write_header

import mlstate
from mlstate import checkpoint
from mlstate._common.dtypes import PACKED, name_of, stored_dtype
from mlstate.checkpoint import CheckpointManager, export_huggingface
from mlstate.cli import main
from mlstate.errors import (
    CheckpointWarning,
    ChecksumError,
    CompatibilityError,
    FormatError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
)

MODEL = {
    "embed": np.random.default_rng(0).normal(size=(4096, 32)),
    "head": np.arange(7, dtype=np.float32),
    "empty": np.zeros((0, 3)),
}


@pytest.fixture
def file(url, store, tmp_path):
    """Return the URL of a safetensors file with checksums, and a function that writes another."""

    def write(state, metadata=None, to=f"{url}/model-a.safetensors"):
        mlstate.save_file(state, tmp_path / "file", metadata, overwrite=True)
        store.put(to, (tmp_path / "file").read_bytes())
        return to

    return write(MODEL, {"epoch": "3"}), write


@pytest.fixture
def folder(url, store, tmp_path):
    """Return the URL of a Hugging Face folder of several files."""
    export_huggingface(tmp_path / "hf", MODEL, max_shard_bytes=1 << 19)
    for path in (tmp_path / "hf").iterdir():
        store.put(f"{url}/hf/{path.name}", path.read_bytes())
    return f"{url}/hf"


# ---- one file ----


@pytest.mark.parametrize("model", [MODEL, None], ids=["both", "optimizer"])
def test_a_load_refuses_a_file_that_also_holds_an_optimizer(url, store, options, tmp_path, model):
    write_any(tmp_path / "a.safetensors", model, {"head.m": np.ones(7, np.float32)})
    target = f"{url}/a.safetensors"
    store.put(target, (tmp_path / "a.safetensors").read_bytes())
    with pytest.raises(CompatibilityError, match="mlstate convert"):
        mlstate.load(target, storage_options=options)
    assert list(read_any(target, storage_options=options)[1]) == ["head.m"]


def test_training_entries_of_a_step_are_named(folder, store, options):
    store.put(f"{folder}/optimizer.pt", b"any")
    with pytest.warns(CheckpointWarning, match=r"'optimizer\.pt'; load a local copy"):
        assert same(mlstate.load(folder, storage_options=options).model, MODEL)


def test_a_file_is_loaded_whole_by_name_and_by_rows(file, store, options):
    url, _ = file
    loaded = mlstate.load(url, storage_options=options)
    assert same(loaded.model, MODEL)
    assert loaded.metadata["epoch"] == "3"
    assert list(mlstate.load(url, names="head", storage_options=options).model) == ["head"]
    store.faults.reset()
    part = {"rank": 1, "world_size": 4, "layout": "rows", "verify": False}
    rows = mlstate.load(url, names="embed", storage_options=options, **part).model["embed"]
    np.testing.assert_array_equal(rows, MODEL["embed"][1024:2048])
    assert sum(store.faults.nbytes.values()) < 1.1 * rows.nbytes + 3 * (64 << 10)
    target = {"model": {name: np.zeros_like(array) for name, array in MODEL.items()}}
    mlstate.load(url, into=target, storage_options=options)
    assert same(target["model"], MODEL)


def test_a_file_is_inspected_planned_and_verified(file, options):
    url, _ = file
    listing = checkpoint.inspect(url, storage_options=options)
    assert {record.key: record.shape for record in listing.tensors()} == {
        name: array.shape for name, array in MODEL.items()
    }
    assert "model-a.safetensors: 3 tensors" in repr(listing)
    assert same(listing.load().model, MODEL)
    assert same(mlstate.load(listing.path, storage_options=options).model, MODEL)
    text = pickle.dumps(listing)
    assert b"of-tests" not in text and pickle.loads(text).path.folder.file == "model-a.safetensors"
    report = mlstate.verify(url, storage_options=options)
    assert report and not report.strange and report.bytes == listing.nbytes
    plan = checkpoint.plan_load(url, names="head", storage_options=options)
    assert {read.path for read in plan.reads} == {"model-a.safetensors"}


def test_a_file_at_the_top_of_a_bucket_is_read(file, options):
    _, write = file
    url = write({"w": np.ones(3)}, None, "s3://bucket/top.safetensors")
    assert same(mlstate.load(url, storage_options=options).model, {"w": np.ones(3)})
    assert mlstate.verify(url, storage_options=options)


def test_a_damaged_file_is_found_and_named(file, store, options):
    url, _ = file
    data = bytearray(store.get(url))
    data[-1] ^= 1
    store.put(url, bytes(data))
    [problem] = mlstate.verify(url, storage_options=options).problems
    assert (problem.kind, problem.path) == ("altered", "model-a.safetensors")
    with pytest.raises(ChecksumError, match=r"model-a\.safetensors") as caught:
        mlstate.load(url, storage_options=options)
    assert caught.value.path == url
    for length in (5, len(data) - 1):
        store.put(url, bytes(data[:length]))
        with pytest.raises(FormatError, match=r"model-a\.safetensors"):
            mlstate.load(url, storage_options=options)
        [problem] = mlstate.verify(url, storage_options=options).problems
        assert "/mlstate-" not in problem.text


@pytest.mark.parametrize("number", range(1, 4))
@pytest.mark.parametrize(("names", "verify"), [(list(MODEL), False), (["head"], True)])
def test_file_replaced_during_a_read_is_never_mixed(file, store, options, number, names, verify):
    url, write = file
    data, other = store.get(url), {name: MODEL[name] + 1 for name in names}
    write(other)  # without metadata, so that the tensors have other offsets
    new = store.get(url)
    store.put(url, data)
    assert len(new) != len(data)

    def replace(count, method, path):
        if count == number:
            store.put(url, new)

    store.faults.reset(replace)
    got = mlstate.load(url, verify=verify, storage_options=options).model
    assert same(got, MODEL if np.array_equal(got["head"], MODEL["head"]) else other)


def test_an_empty_file_is_malformed(url, store, options):
    store.put(f"{url}/model-a.safetensors", b"")
    with pytest.raises(FormatError, match="it is empty"):
        mlstate.load(f"{url}/model-a.safetensors", storage_options=options)


def test_replaced_file_named_like_a_shard_is_not_cached(url, store, file, tmp_path):
    cached = store.options(cache_folder=tmp_path / "cache")
    other = {name: array + 1 for name, array in MODEL.items()}
    for state in (MODEL, other):  # files of equal size
        path = file[1](state, {"epoch": "3"}, f"{url}/0123456789abcdef-0.safetensors")
        assert same(mlstate.load(path, verify=False, storage_options=cached).model, state)
        assert mlstate.verify(path, storage_options=cached)
    assert not list(tmp_path.glob("cache/*/*"))


def test_a_missing_file_is_one_error_with_its_url(url, store, options):
    missing_url = f"{url}/no.safetensors"
    for call in (mlstate.load, mlstate.verify, checkpoint.inspect, checkpoint.plan_load):
        with pytest.raises(StoreNotFoundError, match="no such file") as caught:
            call(missing_url, storage_options=options)
        assert missing_url in str(caught.value)
    store.faults.reset(lambda number, method, path: "403")
    with pytest.raises(StorePermissionError, match="access denied"):
        mlstate.load(missing_url, storage_options=options)


def test_a_file_is_never_written_as_a_checkpoint(file, store, options):
    url, _ = file
    listing = checkpoint.inspect(url, storage_options=options)
    before = store.urls(url.rpartition("/")[0])
    for call in (
        lambda: mlstate.save(url, MODEL, storage_options=options),
        lambda: mlstate.save(f"{url}/", MODEL, storage_options=options),
        lambda: mlstate.save(listing.path, MODEL),
        lambda: CheckpointManager(url, storage_options=options),
        lambda: checkpoint.prune(url, storage_options=options),
        lambda: write_any(url, MODEL, storage_options=options),
    ):
        with pytest.raises(ValueError, match="this URL names one file"):
            call()
    with pytest.raises(ValueError, match="not possible in an object store"):
        mlstate.load(url, mmap=True, storage_options=options)
    assert store.urls(url.rpartition("/")[0]) == before


# ---- a Hugging Face folder ----


def test_a_folder_is_read_as_a_checkpoint(folder, options, tmp_path):
    url = f"{folder}/model.safetensors.index.json"  # as well as the folder
    assert same(mlstate.load(folder, storage_options=options).model, MODEL)
    assert same(mlstate.load(url, storage_options=options).model, MODEL)
    listing = checkpoint.inspect(url, storage_options=options)
    assert repr(listing).startswith("Hugging Face folder: 3 tensors") and len(listing.files()) > 1
    report = mlstate.verify(folder, storage_options=options)
    assert report and not report.strange and report.bytes > listing.nbytes
    resharded = checkpoint.reshard(
        folder, tmp_path / "cut", layout="rows", world_size=2, storage_options=options
    )
    assert same(resharded.load().model, MODEL)


def test_a_folder_of_one_file_is_found(url, store, options, file):
    _, write = file
    write({"w": np.ones(3)}, {"format": "pt"}, f"{url}/one/model.safetensors")
    assert same(mlstate.load(f"{url}/one", storage_options=options).model, {"w": np.ones(3)})
    assert mlstate.verify(f"{url}/one", storage_options=options)


def test_a_folder_with_a_missing_file_names_it(folder, store, options):
    name = min(
        object_url for object_url in store.urls(folder) if object_url.endswith(".safetensors")
    )
    store.direct().delete(key_of(name))
    with pytest.raises(StoreNotFoundError, match=name.rpartition("/")[2]):
        mlstate.load(folder, storage_options=options)
    assert not mlstate.verify(folder, storage_options=options)


# ---- commands ----


def test_the_commands_read_files_and_folders(file, folder, environment, tmp_path, capsys):
    url, _ = file
    assert main(["inspect", url]) == 0
    assert "file, 3 tensors" in capsys.readouterr().out
    for path, kind in ((url, "safetensors"), (folder, "huggingface")):
        for command in ("inspect", "verify"):
            assert main([command, path, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["format"] == kind
        assert main(["inspect", path, "--step", "1"]) == 2
        assert main(["convert", path, str(tmp_path / kind)]) == 0
        assert same(mlstate.load(tmp_path / kind).model, MODEL)
        capsys.readouterr()
    assert main(["diff", url, folder]) == 0
    assert main(["diff", url, str(tmp_path / "huggingface")]) == 0
    assert main(["convert", url, f"{folder}/copy"]) == 0
    assert same(mlstate.load(f"{folder}/copy").model, MODEL)
    assert main(["convert", folder, url]) == 2
    assert "this URL names one file" in capsys.readouterr().err


def test_both_states_in_a_file_are_split_as_they_were_joined(url, store, options, tmp_path):
    moments = {"head.m": np.ones(7)}
    write_any(tmp_path / "both.safetensors", MODEL, moments, {"run": [1]})
    file_url = f"{url}/both.safetensors"
    store.put(file_url, (tmp_path / "both.safetensors").read_bytes())
    model, optimizer, metadata, *_ = read_any(file_url, storage_options=options)
    assert same(model, MODEL)
    assert same(optimizer, moments)
    local = read_any(tmp_path / "both.safetensors")
    assert metadata == local[2] == {"run": [1]}
    assert (type(model), type(optimizer)) == (type(local[0]), type(local[1]))


def test_other_files_at_a_url_are_refused_with_the_remedy(url, options):
    for suffix in ("npz", "pt"):
        with pytest.raises(ValueError, match="copy it from or to a local path"):
            read_any(f"{url}/model.{suffix}", storage_options=options)
    with pytest.raises(StoreError):
        read_any(f"{url}/model", storage_options=options)
    with pytest.raises(ValueError, match=r"mlstate\.load and mlstate convert read such a file"):
        mlstate.load_file(f"{url}/model.safetensors")


@pytest.mark.filterwarnings("ignore:.*headers are used", "ignore:.*total_size")
def test_copies_of_a_tensor_in_two_objects_are_compared(folder, store, options, tmp_path):
    listed = json.loads(store.get(f"{folder}/model.safetensors.index.json"))["weight_map"]
    target, other = sorted(set(listed.values()))[:2]
    name = next(name for name, file in listed.items() if file == other)
    arrays = {key: MODEL[key] for key, file in listed.items() if file == target}
    for value, is_equal in ((MODEL[name], True), (MODEL[name] + 1, False)):
        mlstate.save_file({**arrays, name: value}, tmp_path / "file")
        store.put(f"{folder}/{target}", (tmp_path / "file").read_bytes())
        if is_equal:
            assert same(mlstate.load(folder, storage_options=options).model, MODEL)
            continue
        with pytest.raises(FormatError, match="has other bytes than in"):
            mlstate.load(folder, storage_options=options)


def test_names_load_from_a_partial_upload(folder, store, options):
    listed = json.loads(store.get(f"{folder}/model.safetensors.index.json"))["weight_map"]
    store.direct().delete(key_of(f"{folder}/{listed['head']}"))
    lost = [name for name, file in listed.items() if file == listed["head"]]
    names = [name for name in MODEL if name not in lost]
    loaded = mlstate.load(folder, names=names, storage_options=options)
    assert same(loaded.model, {name: MODEL[name] for name in names})
    with pytest.raises(StoreNotFoundError, match="'head'"):
        mlstate.load(folder, names="head", storage_options=options)
    assert [p.kind for p in mlstate.verify(folder, storage_options=options).problems] == ["missing"]


def test_convert_keeps_config_and_tokenizer(folder, store, environment, tmp_path):
    for name, text in {"config.json": '{"dtype": "float16"}', "t.json": "t", "x.bin": ""}.items():
        store.put(f"{folder}/{name}", text.encode())
    out = tmp_path / "out"
    assert main(["convert", folder, str(out), "--to", "huggingface"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "t.json",
    ]
    assert json.loads((out / "config.json").read_text()) == {"dtype": "float64"}


def test_numbered_objects_without_an_index_are_read(folder, store, options):
    store.direct().delete(key_of(f"{folder}/model.safetensors.index.json"))
    with pytest.warns(UserWarning, match="no index of its"):
        assert same(mlstate.load(folder, storage_options=options).model, MODEL)


# ---- packed dtypes ----


def test_packed_floats_pass_through_a_store(url, store, options, tmp_path):
    rng = np.random.default_rng(0)
    model = {
        name: rng.integers(0, 256, (64, 18), np.uint8).view(stored_dtype(name)) for name in PACKED
    }
    checkpoint.save(f"{url}/ckpt", model, storage_options=options)
    loaded = mlstate.load(f"{url}/ckpt", storage_options=options).model
    export_huggingface(tmp_path / "hf", loaded)
    store.put(f"{url}/hf/model.safetensors", (tmp_path / "hf" / "model.safetensors").read_bytes())
    again = mlstate.load(f"{url}/hf", storage_options=options).model
    for state in (loaded, again):
        assert {name: (name_of(array.dtype), array.shape) for name, array in state.items()} == {
            name: (name, (64, 18)) for name in PACKED
        }
        assert all(state[name].tobytes() == array.tobytes() for name, array in model.items())


def test_a_later_dtype_refuses_only_its_tensor_in_a_store(url, store, options, tmp_path):
    path = tmp_path / "model.safetensors"
    write_header(path, {"w": ("F3_X", (8,), 3), "codes": ("F4", (2, 4), 4)}, b"abcdefg")
    store.put(f"{url}/hf/model.safetensors", path.read_bytes())
    model = mlstate.load(f"{url}/hf", names="codes", storage_options=options).model
    assert model["codes"].shape == (2, 2) and model["codes"].tobytes() == b"defg"
    with pytest.raises(FormatError, match="dtype 'F3_X'") as caught:
        mlstate.load(f"{url}/hf", storage_options=options)
    assert caught.value.name == "w"
    assert checkpoint.verify(f"{url}/hf", storage_options=options)


# ---- checksums that `checksum` wrote before the upload ----


def test_uploaded_checksums_are_compared(url, store, options, tmp_path):
    folder = write_folder(tmp_path / "plain", {"head": MODEL["head"]})
    checkpoint.checksum(folder)
    for path in folder.iterdir():
        store.put(f"{url}/plain/{path.name}", path.read_bytes())
    place = f"{url}/plain"
    assert same(mlstate.load(place, storage_options=options).model, {"head": MODEL["head"]})
    counts = []
    report = mlstate.verify(place, storage_options=options, progress=counts.append)
    assert report and "mlstate.checksums.json" in report.compared[0]
    assert sum(counts) == sum(
        path.stat().st_size for path in folder.iterdir() if path.name != "mlstate.checksums.json"
    )
    for name in ("model.safetensors", "config.json"):
        data = (folder / name).read_bytes()
        store.put(f"{place}/{name}", data[:-1] + b"!")
        problems = mlstate.verify(place, storage_options=options).problems
        assert [(each.kind, each.path) for each in problems] == [("changed", name)]
        if name == "model.safetensors":
            with pytest.raises(ChecksumError):
                mlstate.load(place, storage_options=options)
        store.put(f"{place}/{name}", data)
    store.put(f"{place}/mlstate.checksums.json", b"{}")
    with pytest.raises(FormatError, match="the file of checksums is damaged"):
        mlstate.load(place, storage_options=options)
    mlstate.load(place, storage_options=options, verify=False)
    [problem] = mlstate.verify(place, storage_options=options).problems
    assert problem.kind == "checksums"
