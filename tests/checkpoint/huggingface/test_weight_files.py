"""Folders of Hugging Face models are read as checkpoints, and a wrong index is refused."""

import json
import pickle
import shutil
from contextlib import suppress

import numpy as np
import pytest
from any_format import read_any, write_any
from checkpoint_model import flip_shard, same
from child import bytes_read, counts_reads
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_folder import write_folder, write_index, write_weight_file

import mlstate
from mlstate.checkpoint import Layout, plan_load, reshard
from mlstate.checkpoint import inspect as inspect_checkpoint
from mlstate.checkpoint._folder.weight_names import is_set, set_files, weights_root

INDEX = "model.safetensors.index.json"


def arrays_of(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "layers.0.weight": rng.random((6, 4), np.float32),
        "odd": rng.integers(0, 255, 3, np.uint8),  # so that those after it are not aligned
        "layers.0.bias": rng.random(5).astype(np.float16),
        "step": np.array(7, np.int64),
        "layers.1.weight": rng.random((3, 2, 8), np.float32),
        "none": np.zeros((0, 4), np.float32),
        "mask": rng.random(9) > 0.5,
    }


@pytest.fixture(params=[1, 3])
def folder(request, tmp_path):
    return write_folder(tmp_path / "model", arrays_of(), request.param)


# ---- every way of reading ----


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("verify", [False, True, "first"])
def test_load_returns_all_tensors(folder, mmap, verify):
    loaded = mlstate.load(folder, mmap=mmap, verify=verify)
    assert same(loaded.model, arrays_of())
    assert loaded.optimizer is None
    assert loaded.metadata == {"format": "pt"}
    assert all(array.flags.writeable != mmap for name, array in loaded.model.items() if array.size)


def test_names_and_globs_select_tensors(folder):
    assert set(mlstate.load(folder, names="layers.*.weight").model) == {
        "layers.0.weight",
        "layers.1.weight",
    }
    assert set(mlstate.load(folder, names=["layers.0", "step"]).model) == {
        "layers.0.weight",
        "layers.0.bias",
        "step",
    }
    with pytest.raises(mlstate.errors.TensorNotFoundError, match=r"layers\.0\.wieght"):
        mlstate.load(folder, names="layers.0.wieght")


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("layout", ["rows", "flat", Layout([(1, 2), (0, 2)])])
def test_each_rank_loads_its_part(folder, layout, mmap):
    world = 4 if isinstance(layout, Layout) else 3
    mlstate.save(folder.parent / "own", arrays_of())
    for rank in range(world):
        how = {"rank": rank, "world_size": world, "layout": layout, "mmap": mmap}
        assert same(
            mlstate.load(folder, **how).model, mlstate.load(folder.parent / "own", **how).model
        )


def test_existing_arrays_are_filled(folder):
    targets = {name: np.zeros_like(array) for name, array in arrays_of().items()}
    targets["layers.0.weight"] = np.zeros((4, 6), np.float32).T
    originals = dict(targets)
    assert mlstate.load(folder, into={"model": targets}).model is targets
    assert same(targets, arrays_of())
    assert all(targets[name] is originals[name] for name in originals)


def test_one_stored_name_fills_tied_arrays(tmp_path):
    weight = np.arange(6, dtype=np.float32)
    folder = write_folder(tmp_path / "m", {"embed": weight})
    target = np.zeros(6, np.float32)
    mlstate.load(folder, into={"model": {"embed": target, "head": target}})
    np.testing.assert_array_equal(target, weight)
    other = np.zeros(6, np.float32)
    with pytest.raises(mlstate.errors.CompatibilityError, match=r'Missing key.*"head"'):
        mlstate.load(folder, into={"model": {"embed": target, "head": other}})
    assert not other.any()


def test_inspect_lists_tensors_and_files(folder):
    listing = inspect_checkpoint(folder)
    for listed in (listing, pickle.loads(pickle.dumps(listing))):
        assert {t.key: (t.shape, t.dtype) for t in listed.tensors()} == {
            name: (array.shape, array.dtype.name) for name, array in arrays_of().items()
        }
        assert listed.nbytes == listed.stored_nbytes == sum(a.nbytes for a in arrays_of().values())
        assert set(listed.files()) == {p.name for p in folder.glob("*.safetensors")}
    assert repr(listing).startswith("Hugging Face folder: 7 tensors, ")
    assert all(shard.crc32c is None for shard in listing.shards())
    for shard in listing.shards():
        raw = (folder / shard.path).read_bytes()[shard.offset : shard.offset + shard.nbytes]
        assert raw == arrays_of()[shard.key].tobytes()


def test_reshard_and_convert_read_it(folder, tmp_path):
    resharded = reshard(folder, tmp_path / "two", layout="rows", world_size=2)
    assert resharded.world_size == 2
    assert same(resharded.load().model, arrays_of())
    model, optimizer, metadata, *_ = read_any(folder)
    assert same(model, arrays_of())
    assert (optimizer, metadata) == (None, {"format": "pt"})
    write_any(tmp_path / "a.npz", model, None, metadata)
    assert same(read_any(tmp_path / "a.npz")[0], arrays_of())


def test_a_save_into_the_folder_is_refused(folder):
    for overwrite in (None, True):
        with pytest.raises(mlstate.StoreError, match="is not a checkpoint, and holds"):
            mlstate.save(folder, {"own": np.ones(2)}, overwrite=overwrite)
    assert same(mlstate.load(folder).model, arrays_of())


def test_links_as_in_a_cache_are_followed(folder, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    for mmap in (False, True):
        assert same(mlstate.load(snapshot, mmap=mmap).model, arrays_of())
    assert mlstate.verify(snapshot)


def test_a_single_file_wins_over_an_index(tmp_path):
    folder = write_folder(tmp_path / "m", arrays_of(), 2)
    write_weight_file(folder / "model.safetensors", {"only": np.ones(3, np.float32)})
    assert set(mlstate.load(folder).model) == {"only"}
    assert len(mlstate.verify(folder).strange) == 2


# ---- amounts read ----


@counts_reads
def test_a_rank_reads_little_more_than_its_rows(tmp_path):
    big = np.random.default_rng(0).random((4096, 1024), np.float32)
    folder = write_folder(tmp_path / "m", {"a": big, "b": big[:2048], "c": big[1]}, 2)
    before = bytes_read()
    loaded = mlstate.load(folder, rank=3, world_size=8, layout="rows")
    count = bytes_read() - before
    rank_bytes = sum(array.nbytes for array in loaded.model.values())
    assert rank_bytes <= count <= 1.1 * rank_bytes
    np.testing.assert_array_equal(loaded.model["a"], big[1536:2048])
    planned = plan_load(folder, rank=3, world_size=8, layout="rows")
    assert planned.nbytes == rank_bytes


# ---- verification ----


def test_verify_checks_structure_and_own_checksums(folder):
    report = mlstate.verify(folder)
    assert report
    listed = [path.stat().st_size for path in folder.glob(INDEX)]
    assert (report.bytes, report.strange) == (sum(listed), [])
    for path in folder.glob("*.safetensors"):
        state = mlstate.load_file(path)
        mlstate.save_file(state, path, {"format": "pt"}, overwrite=True)
    data = sum(a.nbytes for a in arrays_of().values())
    assert mlstate.verify(folder).bytes == data + sum(listed)
    shard = next(s for s in inspect_checkpoint(folder).shards() if s.key == "layers.1.weight")
    flip_shard(folder, shard, 5)
    [problem] = mlstate.verify(folder).problems
    assert (problem.kind, problem.path, problem.name) == ("altered", shard.path, shard.key)
    for verify in (True, "first"):
        with pytest.raises(mlstate.errors.ChecksumError, match=r"layers\.1\.weight"):
            mlstate.load(folder, verify=verify)
    with pytest.raises(ValueError, match="no older step"):
        mlstate.verify(folder, repair=True)


def test_verify_reports_a_truncated_file(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    [problem] = mlstate.verify(folder).problems
    assert (problem.kind, problem.path) == ("header", path.name)
    with pytest.raises(mlstate.errors.FormatError, match=path.name):
        mlstate.load(folder)


# ---- a wrong index ----


def three_files(tmp_path):
    folder = write_folder(tmp_path / "m", arrays_of(), 3)
    return folder, json.loads((folder / INDEX).read_text())


def first_name(index):
    return next(iter(index["weight_map"]))


NAMES = ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", 3, None,
         "a\\b.safetensors", "x\0.safetensors", "é" * 120 + ".safetensors"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leaves_the_folder_is_refused(tmp_path, name):
    folder, index = three_files(tmp_path)
    index["weight_map"]["layers.0.bias"] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(mlstate.errors.FormatError, match=r"layers\.0\.bias") as caught:
        mlstate.load(folder)
    assert caught.value.path == str(folder / INDEX)
    assert [p.kind for p in mlstate.verify(folder).problems] == ["manifest"]


@pytest.mark.parametrize("text", [
    "", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "[" * 1000, "\xff",
    '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
])  # fmt: skip
def test_a_malformed_index_is_refused(tmp_path, text):
    folder, _ = three_files(tmp_path)
    (folder / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(mlstate.errors.FormatError, match=INDEX):
        mlstate.load(folder)


def test_a_missing_file_is_named(tmp_path):
    folder, _ = three_files(tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    for call in (mlstate.load, lambda path: inspect_checkpoint(path).tensors(), plan_load):
        with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):
            call(folder)
    [problem] = mlstate.verify(folder).problems
    assert (problem.kind, problem.path) == ("missing", "model-00002-of-00003.safetensors")


def test_names_load_from_a_partial_download(tmp_path):
    folder, index = three_files(tmp_path)
    missing = "model-00002-of-00003.safetensors"
    (folder / missing).unlink()
    lost = {name for name, file in index["weight_map"].items() if file == missing}
    kept = {name: array for name, array in arrays_of().items() if name not in lost}
    assert lost
    assert same(mlstate.load(folder, names=list(kept)).model, kept)
    assert plan_load(folder, names=list(kept), verify=False).nbytes > 0
    for names in (
        sorted(lost)[0],
        [*kept, sorted(lost)[0]],
        "*",
        sorted(lost)[0].partition(".")[0],
    ):
        with pytest.raises(FileNotFoundError, match="in missing files: 1 of the 3 files"):
            mlstate.load(folder, names=names)
    with pytest.raises(mlstate.errors.TensorNotFoundError, match="'x' not found"):
        mlstate.load(folder, names="x")


def test_file_missing_in_the_index_is_named(tmp_path):
    folder, index = three_files(tmp_path)
    left_out = "model-00002-of-00003.safetensors"
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != left_out}
    write_index(folder, index["weight_map"], 0)
    with pytest.raises(mlstate.errors.FormatError, match=f"leaves out '{left_out}'"):
        mlstate.load(folder)


def test_other_safetensors_files_are_reported_by_verify_only(tmp_path):
    folder, _ = three_files(tmp_path)
    write_weight_file(folder / "consolidated.safetensors", {"x": np.ones(1, np.float32)})
    assert same(mlstate.load(folder).model, arrays_of())
    report = mlstate.verify(folder)
    assert report
    assert report.strange == ["consolidated.safetensors"]


@pytest.mark.parametrize(
    ("tensor", "file", "text"),
    [
        ("odd", "model-00001-of-00003.safetensors", r"'odd' is not in 'model-00001.*00002"),
        ("ghost", "model-00001-of-00003.safetensors", "'ghost' is not in"),
        ("odd", None, "does not list 'odd'"),
    ],
)
def test_headers_win_over_a_misplaced_tensor_with_a_warning(tmp_path, tensor, file, text):
    folder, index = three_files(tmp_path)
    index["weight_map"][tensor] = file
    if file is None:
        del index["weight_map"][tensor]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.warns(UserWarning, match=text) as caught:
        loaded = mlstate.load(folder)
    assert same(loaded.model, arrays_of())
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match=text):
        assert mlstate.verify(folder)


@pytest.mark.filterwarnings("ignore:.*'ghost.a' is not in")
@pytest.mark.parametrize("name", ["ghost.a", "ghost", "gh*"])
def test_a_tensor_without_a_file_is_an_error_if_named(tmp_path, name):
    folder, index = three_files(tmp_path)
    index["weight_map"]["ghost.a"] = "model-00001-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    for call in (mlstate.load, plan_load):
        with pytest.raises(
            mlstate.errors.TensorNotFoundError, match=r"'ghost\.a' is not in 'model"
        ):
            call(folder, names=name)
    target = {name: np.zeros_like(array) for name, array in arrays_of().items()}
    with pytest.raises(mlstate.errors.CompatibilityError, match=r"ghost\.a"):
        mlstate.load(folder, into={"model": {**target, "ghost.a": np.zeros(1)}})


@pytest.mark.filterwarnings("ignore:.*headers are used")
def test_a_tensor_in_two_files_must_have_equal_bytes(tmp_path):
    folder, index = three_files(tmp_path)
    first, _, third = sorted(path.name for path in folder.glob("*.safetensors"))
    copies = {
        name: arrays_of()[name] for name, file in index["weight_map"].items() if file == first
    }
    own = {name: arrays_of()[name] for name, file in index["weight_map"].items() if file == third}
    write_weight_file(folder / third, own | copies)
    assert same(mlstate.load(folder).model, arrays_of())
    assert mlstate.verify(folder)
    name = "layers.0.weight"
    assert name in copies
    for changed in (copies[name] + 1, copies[name].astype(np.float16), copies[name][:2]):
        write_weight_file(folder / third, own | {name: changed})
        with pytest.raises(mlstate.errors.FormatError, match=first) as caught:
            mlstate.load(folder)
        assert caught.value.name == name
        assert caught.value.path == str(folder / third)


@pytest.mark.parametrize("total", [0, 12, "318", "x", [], True, -1, 10**400])
def test_a_wrong_total_is_a_warning(tmp_path, total):
    folder, index = three_files(tmp_path)
    write_index(folder, index["weight_map"], total)
    with pytest.warns(UserWarning, match="total_size is .*, but the tensors have 318 bytes"):
        assert same(mlstate.load(folder).model, arrays_of())
    with pytest.warns(UserWarning, match="total_size"):
        assert mlstate.verify(folder)
    assert same(mlstate.load(folder, verify=False).model, arrays_of())


@pytest.mark.filterwarnings("ignore:.*total_size", "ignore:.*no index", "ignore:.*headers are used")
@pytest.mark.parametrize("change", ["total", "ghost", "no index"])
def test_checksums_are_compared_despite_warnings(tmp_path, change):
    folder, index = three_files(tmp_path)
    for path in folder.glob("*.safetensors"):
        mlstate.save_file(mlstate.load_file(path), path, {"format": "pt"}, overwrite=True)
    index["weight_map"] |= (
        {"ghost": "model-00001-of-00003.safetensors"} if change == "ghost" else {}
    )
    write_index(folder, index["weight_map"], 0)
    if change == "no index":
        (folder / INDEX).unlink()
    assert same(mlstate.load(folder).model, arrays_of())
    shard = next(s for s in inspect_checkpoint(folder).shards() if s.key == "layers.1.weight")
    flip_shard(folder, shard, 5)
    with pytest.raises(mlstate.errors.ChecksumError, match=r"layers\.1\.weight"):
        mlstate.load(folder)
    assert [problem.kind for problem in mlstate.verify(folder).problems] == ["altered"]


# ---- names of files ----


@pytest.mark.parametrize(
    "stem",
    [
        "model",
        "adapter_model",
        "diffusion_pytorch_model",
        "pytorch_lora_weights",
        "consolidated",
        "model.fp16",
    ],
)
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("has_index", [True, False])
def test_folders_of_other_programs_are_found(tmp_path, stem, files, has_index):
    folder = write_folder(tmp_path / "m", arrays_of(), files)
    for path in folder.glob("model*"):
        path.rename(folder / path.name.replace("model", stem, 1))
    name, _, variant = stem.partition(".")
    index = folder / f"{stem}.safetensors.index.json"
    if files > 1:
        index = index.rename(folder / f"{name}.safetensors.index{variant and '.'}{variant}.json")
        index.write_text(index.read_text().replace("model-", f"{stem}-"))
        if not has_index:
            index.unlink()
    if files > 1 and not has_index:
        with pytest.warns(UserWarning, match="no index of its 3 files"):
            loaded = mlstate.load(folder)
        with pytest.warns(UserWarning, match="no index"):
            assert mlstate.verify(folder)
    else:
        loaded = mlstate.load(folder)
        assert mlstate.verify(folder)
        assert repr(inspect_checkpoint(folder)).startswith("Hugging Face folder: 7 tensors")
        path = index if files > 1 else folder / f"{stem}.safetensors"
        assert same(mlstate.load(path).model, arrays_of())
    assert same(loaded.model, arrays_of())


@pytest.mark.filterwarnings("ignore:.*no index of its")
def test_numbered_files_without_an_index_must_be_complete(tmp_path):
    folder, _ = three_files(tmp_path)
    (folder / INDEX).unlink()
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):
        mlstate.load(folder)
    assert set(mlstate.load(folder, names="layers.0.weight").model) == {"layers.0.weight"}
    shutil.copy(
        folder / "model-00001-of-00003.safetensors", folder / "model-00004-of-00003.safetensors"
    )
    with pytest.raises(mlstate.errors.FormatError, match="numbered 1 to 4"):
        mlstate.load(folder)


@pytest.mark.parametrize("names", [
    ["model.fp16", "model.bf16"], ["model-00001-of-00001", "model-00001-of-00002"],
    ["model.fp16", "model.bf16-00001-of-00001"],
])  # fmt: skip
def test_several_models_in_a_folder_are_refused(tmp_path, names):
    for name in names:
        write_weight_file(tmp_path / f"{name}.safetensors", arrays_of())
    for call in (mlstate.load, mlstate.verify, inspect_checkpoint, read_any):
        with pytest.raises(mlstate.errors.FormatError, match="folder holds several"):
            call(tmp_path)
    assert same(mlstate.load(tmp_path / f"{names[0]}.safetensors").model, arrays_of())


PARTS = st.sampled_from([
    "model", "consolidated", ".", "-", "0", "00001", "-00002-of-00003", "fp16", "*", "٣",
    ".safetensors", ".bin", ".index", ".json", "9" * 40, "\udc80", "a/",
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(PARTS, max_size=5).map("".join), max_size=6))
def test_any_names_give_a_root_or_a_format_error(names):
    for suffix in (".safetensors", ".bin"):
        with suppress(mlstate.FormatError):
            root = weights_root(names, suffix)
            if root is not None and is_set(root):
                files, missing = set_files(names, root)
                assert set(files) <= set(names)
                assert len(missing) <= 100_000
            else:
                assert root is None or root in names


def test_a_folder_without_a_known_name_lists_the_remedy(tmp_path):
    write_weight_file(tmp_path / "other.safetensors", arrays_of())
    with pytest.raises(FileNotFoundError, match=r"holds other\.safetensors: pass one"):
        mlstate.load(tmp_path)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(mlstate.FormatError, match="pipeline of diffusers"):
        mlstate.load(tmp_path)


def test_a_missing_folder_names_the_download_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (mlstate.load, mlstate.verify, inspect_checkpoint):
        with pytest.raises(
            FileNotFoundError, match="hf download org/small-model --local-dir small-model"
        ):
            call("org/small-model")
    (tmp_path / "runs").mkdir()
    with pytest.raises(FileNotFoundError) as caught:
        mlstate.load("runs/a")
    assert "hf download" not in str(caught.value)


def test_star_in_a_file_name_matches_itself_only(tmp_path):
    for name, value in {"a*.safetensors": 1, "a0.safetensors": 2}.items():
        write_weight_file(tmp_path / name, {"w": np.full(2, value, np.uint8)})
    assert mlstate.load(tmp_path / "a*.safetensors").model["w"].tolist() == [1, 1]


def test_missing_files_without_an_index_are_listed(tmp_path):
    path = tmp_path / "model-00001-of-00002.safetensors"
    write_weight_file(path, {"w": np.ones(2, np.uint8)})
    with pytest.warns(UserWarning, match="missing.*'model-00002-of-00002.safetensors'"):
        assert set(mlstate.load(tmp_path, names="*").model) == {"w"}
    path.unlink()
    path.symlink_to("nowhere")
    with (
        pytest.warns(UserWarning, match="no index of its 2 files"),
        pytest.raises(mlstate.errors.StoreNotFoundError, match="2 of the 2 files"),
    ):
        mlstate.load(tmp_path)
