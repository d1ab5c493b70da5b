"""Old checkpoints load with exact values, and saving again writes the same bytes."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from golden import make_checkpoints as golden
from json_checksums import renew_checksum

import mlstate
from mlstate import _core
from mlstate.checkpoint import Layout, inspect, load, verify

FOLDER = Path(__file__).parents[1] / "golden" / "checkpoints"


def same(actual, expected):
    """Whether dicts have the same names, dtypes, shapes and bytes."""
    assert list(actual) == sorted(expected)
    for name, array in actual.items():
        reference = np.asarray(expected[name])
        assert (array.dtype, array.shape) == (reference.dtype, reference.shape), name
        assert array.tobytes() == reference.tobytes(), name


def copied(tmp_path, name):
    """A writable copy."""
    return shutil.copytree(FOLDER / name, tmp_path / name)


@pytest.mark.parametrize("mmap", [False, True])
def test_dense(mmap):
    loaded = load(FOLDER / "dense-3", mmap=mmap)
    same(loaded.model, golden.model())
    same(loaded.optimizer, golden.optimizer())
    assert (loaded.model.model_type, loaded.model.layer_count) == ("golden", 1)
    assert loaded.optimizer.optimizer_type == "adafactor"
    assert (loaded.step, loaded.metadata) == (3, {"run": ["golden", 1.5, None]})


def test_two_ranks():
    loaded = load(FOLDER / "ranks-3")
    same(loaded.model, golden.small(golden.model()))
    same(loaded.optimizer, golden.optimizer())
    part = load(FOLDER / "ranks-3", rank=1, world_size=2, layout="rows").model
    assert np.array_equal(part["layer.0.weight"], golden.model()["layer.0.weight"][3:])
    assert inspect(FOLDER / "ranks-3").world_size == 2


def test_layers():
    model = load(FOLDER / "layers-3").model
    same(model, {"zeros": np.zeros((50, 32), np.float32), **golden.small(golden.model(1))})
    layers = {shard.key: shard.layers for shard in inspect(FOLDER / "layers-3").shards()}
    assert layers["zeros"] == () and len(layers["embed.weight"]) == 2
    assert layers["layer.0.weight"] is None


def test_compressed():
    model = load(FOLDER / "compressed-3").model
    sparse = np.zeros((4096, 16), np.int32)
    sparse[1024:1536] = np.random.default_rng(5).integers(0, 1 << 20, (512, 16))
    counts = np.arange(8192, dtype=np.int64).reshape(512, 16) % 9
    same(model, {"counts": counts, "sparse": sparse, "plain": np.arange(5, dtype=np.int8)})
    shards = {shard.key: shard for shard in inspect(FOLDER / "compressed-3").shards()}
    [rows], [full] = shards["sparse"].layers, shards["counts"].layers
    assert (rows.codec, full.codec) == ("zlib", "zlib")
    assert shards["sparse"].stored_nbytes < 512 * 64 and shards["plain"].layers is None


def test_other_layouts_load_one_part():
    checkpoint = inspect(FOLDER / "shard-3")
    [tensor], [shard] = checkpoint.tensors(), checkpoint.shards()
    layout = Layout.axis(1, 2) * Layout.flat(3)
    assert (tensor.tier, tensor.layout) == ("cold", layout)
    assert (shard.part, shard.version) == (4, 9)
    part = load(FOLDER / "shard-3", rank=4, world_size=6, layout=layout).model["w"]
    array = np.arange(35, dtype=np.float32).reshape(5, 7)
    assert np.array_equal(np.asarray(part), layout.take(array, 4))


@pytest.mark.parametrize("name", golden.SAVES)
def test_all_bytes_are_good(name, tmp_path):
    report = verify(copied(tmp_path, f"{name}-3"))
    assert report, report.problems


def contents_of(folder):
    """All indexes and shard files, with generations renumbered in the order of their files."""
    manifest = (folder / "manifest.json").read_text()
    newest = re.search(r'"generation": ?"([0-9a-f]{16})"', manifest)[1]
    contents = {}
    for path in sorted(folder.rglob("*")):
        if path.parent.name in ("index", "params", "optim_state"):
            name = path.relative_to(folder).as_posix()
            data = path.read_bytes()
            if path.parent.name == "index":
                data = data[:13] + b"0" * 8 + data[21:]
            contents[name] = data
    generations = sorted({re.search(r"[0-9a-f]{16}", name)[0] for name in contents} - {newest})
    for number, generation in enumerate([newest, *generations]):
        neutral_name = f"generation-{number:05}"
        contents = {
            name.replace(generation, neutral_name): data.replace(
                generation.encode(), neutral_name.encode()
            )
            for name, data in contents.items()
        }
    return contents


# Not "compressed": its bytes depend on the version of zlib.
@pytest.mark.parametrize("name", ["dense", "ranks", "layers", "shard"])
def test_the_same_input_is_written_in_the_same_bytes(name, tmp_path):
    golden.SAVES[name](tmp_path / "again")
    assert contents_of(tmp_path / "again") == contents_of(FOLDER / f"{name}-3")


@pytest.mark.parametrize("version", [1, 2, 4])
def test_other_versions_are_refused(version, tmp_path):
    [path] = (FOLDER / "shard-3" / "index").iterdir()
    text = path.read_bytes().replace(b'"format_version":3', b'"format_version":%d' % version)
    with pytest.raises(mlstate.FormatError, match='"format_version"') as caught:
        _core.MergedIndex((renew_checksum(text),), ("index/x.json",))
    assert (caught.value.expected, caught.value.got) == ("3", str(version))
