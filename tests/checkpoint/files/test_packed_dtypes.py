"""F4 and F6 of safetensors: packed bytes keep their dtype, and opaque tensors refuse alone."""

import json

import numpy as np
import pytest
from any_format import read_any, write_any
from weight_folder import PACKED, write_folder, write_header, write_index

import mlstate
from mlstate import _core
from mlstate._common.dtypes import name_of, stored_dtype
from mlstate.checkpoint import Layout, Shard, export_huggingface, reshard
from mlstate.checkpoint._files.safetensors_verify import verify_file
from mlstate.cli import main
from mlstate.errors import ChecksumError, CompatibilityError, FormatError
from mlstate.state import StateDict, diff
from mlstate.testing import run_ranks

F4, F6, F6_WIDE = PACKED


def packed(dtype, *shape):
    """Return random bytes with the label of a packed dtype."""
    rng = np.random.default_rng(len(shape))
    return rng.integers(0, 256, shape, np.uint8).view(stored_dtype(dtype))


def arrays_of():
    return {
        "f4": packed(F4, 6, 16),
        "f6": packed(F6, 5, 18),
        "f6.wide": packed(F6_WIDE, 2, 3, 6),
        "f4.empty": packed(F4, 0, 8),
        "f6.empty": packed(F6, 4, 0),
        "vector": packed(F4, 7),
        "plain": np.arange(6, dtype=np.float32).reshape(2, 3),
    }


def assert_same(actual, expected):
    """Compare names, true dtypes, shapes and bits."""
    assert sorted(actual) == sorted(expected)
    for name, array in expected.items():
        other = actual[name]
        assert (name_of(other.dtype), other.shape) == (name_of(array.dtype), array.shape), name
        assert other.tobytes() == array.tobytes(), name


def header_of(path):
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


# ---- files ----


@pytest.mark.parametrize("mmap", [False, True])
def test_state_files_count_elements_and_return_bytes(tmp_path, mmap):
    path = tmp_path / "a.safetensors"
    mlstate.save_file(arrays_of(), path)
    header = header_of(path)
    assert (header["f4"]["dtype"], header["f4"]["shape"]) == ("F4", [6, 32])
    assert (header["f6"]["dtype"], header["f6"]["shape"]) == ("F6_E2M3", [5, 24])
    assert header["f6.wide"] | {"data_offsets": 0} == {
        "dtype": "F6_E3M2",
        "shape": [2, 3, 8],
        "data_offsets": 0,
    }
    assert header["f4.empty"]["shape"] == [0, 16] and header["f6.empty"]["shape"] == [4, 0]
    assert_same(mlstate.load_file(path, mmap=mmap), arrays_of())


def test_strided_packed_arrays_are_stored_in_order(tmp_path):
    path = tmp_path / "a.safetensors"
    array = packed(F4, 6, 16)
    mlstate.save_file({"w": array.T[::2]}, path)
    assert_same(mlstate.load_file(path), {"w": np.ascontiguousarray(array.T[::2])})


def test_a_changed_byte_is_found(tmp_path):
    path = tmp_path / "a.safetensors"
    mlstate.save_file({"w": packed(F6, 5, 18)}, path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError) as caught:
        mlstate.load_file(path)
    assert caught.value.name == "w"
    assert not verify_file(path)


@pytest.mark.parametrize("shape", [(2, 4), (5,), ()])
def test_partial_elements_are_not_written(tmp_path, shape):
    writers = {
        "a.safetensors": mlstate.save_file,
        "hf": lambda state, to: export_huggingface(to, state),
    }
    for name, write in writers.items():
        with pytest.raises(CompatibilityError, match="not a whole number of elements") as caught:
            write({"a": np.zeros(2), "w": packed(F6, *shape)}, tmp_path / name)
        assert caught.value.name == "w"
        assert not list(tmp_path.rglob("*.safetensors"))


def test_npz_keeps_the_dtype(tmp_path):
    write_any(tmp_path / "a.npz", StateDict(arrays_of()))
    assert_same(read_any(tmp_path / "a.npz")[0], arrays_of())


def test_labels_of_packed_dtypes_survive_copies_and_slices():
    array = packed(F4, 6, 16)
    for view in (array[1:], array.T, array.copy(), np.empty_like(array), StateDict(w=array)["w"]):
        assert name_of(view.dtype) == F4
    assert "float4_e2m1fn_x2" in repr(StateDict(w=array))
    changed = array.copy()
    changed[2, 3] ^= 1
    report = diff({"w": array}, {"w": changed})
    assert [(c.name, c.changed, c.size) for c in report.changes] == [("w", 1, 96)]
    assert diff({"w": array}, {"w": array.copy()})


# ---- checkpoints ----


@pytest.mark.parametrize("compress", [None, "zlib"])
def test_checkpoints_keep_packed_tensors(tmp_path, compress):
    path = tmp_path / "ckpt"
    mlstate.save(path, arrays_of(), compress=compress)
    assert_same(mlstate.load(path).model, arrays_of())
    assert mlstate.verify(path)
    records = {t.key: (t.dtype, t.shape) for t in mlstate.checkpoint.inspect(path).tensors()}
    assert records["f6"] == (F6, (5, 18))


LAYOUTS = {
    "rows": "rows",
    "columns": Layout.axis(1, 4),
    "flat": "flat",
    "boxes": Layout.rows(2) * Layout.axis(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_shards_are_cut_between_bytes(tmp_path, layout):
    model = {name: array for name, array in arrays_of().items() if array.ndim == 2}
    mlstate.save(tmp_path / "one", model)
    reshard(tmp_path / "one", tmp_path / "four", layout=layout, world_size=4)
    assert mlstate.verify(tmp_path / "four")
    assert_same(mlstate.load(tmp_path / "four").model, model)
    reshard(tmp_path / "four", tmp_path / "again", layout="whole", world_size=1)
    assert_same(mlstate.load(tmp_path / "again").model, model)
    parts = [mlstate.load(tmp_path / "one", rank=r, world_size=3, layout="rows") for r in range(3)]
    rows = b"".join(part.model["f6"].tobytes() for part in parts)
    assert rows == model["f6"].tobytes()


def test_headers_of_shards_list_elements_or_bytes(tmp_path):
    mlstate.save(tmp_path / "one", {"f6": packed(F6, 4, 18), "f4": packed(F4, 4, 10)})
    reshard(tmp_path / "one", tmp_path / "four", layout=Layout.axis(1, 4), world_size=4)
    listed = {"f4": [], "f6": []}
    for path in (tmp_path / "four" / "params").glob("*.safetensors"):
        header = header_of(path)
        for name, entries in listed.items():
            entries.append((header[name]["dtype"], header[name]["shape"]))
    assert sorted(listed["f6"]) == [("F6_E2M3", [4, 4]), *[("U8", [4, 5])] * 3]
    assert sorted(listed["f4"]) == [("F4", [4, 2]), *[("F4", [4, 6])] * 3]


def test_unchanged_and_sparse_saves_keep_packed_rows(tmp_path):
    array = packed(F4, 64, 32)
    mlstate.save(tmp_path / "ckpt", {"w": array})
    array[5] = array[6]
    mlstate.save(tmp_path / "ckpt", {"w": array}, incremental=True)
    assert_same(mlstate.load(tmp_path / "ckpt").model, {"w": array})
    assert mlstate.verify(tmp_path / "ckpt")


def test_targets_are_filled_and_other_dtypes_refused(tmp_path):
    model = {"w": packed(F4, 4, 8)}
    mlstate.save(tmp_path / "ckpt", model)
    target = {"w": np.zeros((4, 8), stored_dtype(F4))}
    mlstate.load(tmp_path / "ckpt", into={"model": target})
    assert_same(target, model)
    for dtype in (np.uint8, stored_dtype(F6), np.float32):
        with pytest.raises(CompatibilityError):
            into = {"model": {"w": np.zeros((4, 8), dtype)}}
            mlstate.load(tmp_path / "ckpt", into=into, cast=True)
    assert_same(mlstate.load(tmp_path / "ckpt", cast=np.float32).model, model)


def test_a_shard_of_a_packed_tensor_is_saved(tmp_path):
    array = packed(F6, 4, 18)
    layout = Layout.rows(1)
    mlstate.save(tmp_path / "ckpt", {"w": Shard(array, layout, 0, shape=(4, 18))})
    assert_same(mlstate.load(tmp_path / "ckpt").model, {"w": array})


# ---- Hugging Face folders ----


@pytest.mark.parametrize("files", [1, 3])
def test_weight_folders_are_read_and_exported(tmp_path, files):
    folder = write_folder(tmp_path / "hf", arrays_of(), files)
    assert_same(mlstate.load(folder).model, arrays_of())
    assert_same(
        mlstate.load(folder, names="f6.*").model,
        {name: array for name, array in arrays_of().items() if name.startswith("f6.")},
    )
    export_huggingface(tmp_path / "out", mlstate.load(folder).model, max_shard_bytes=128)
    assert_same(mlstate.load(tmp_path / "out").model, arrays_of())
    half = mlstate.load(folder, rank=1, world_size=2, layout="rows").model["f4"]
    assert half.tobytes() == arrays_of()["f4"][3:].tobytes()


@pytest.mark.parametrize("layout", [Layout.rows(3), Layout.axis(1, 3), Layout.flat(3)])
def test_ranks_save_and_export_parts_of_packed_tensors(tmp_path, layout):
    model = {"f4": packed(F4, 5, 8), "f6": packed(F6, 7, 12)}

    def write(group):
        state = {name: layout.shard(array, group.rank) for name, array in model.items()}
        mlstate.save(tmp_path / "ckpt", state, group=group)
        export_huggingface(tmp_path / "hf", state, group=group)

    run_ranks(3, write)
    for path in (tmp_path / "ckpt", tmp_path / "hf"):
        assert_same(mlstate.load(path).model, model)
        assert mlstate.verify(path)
    assert header_of(tmp_path / "hf" / "model.safetensors")["f6"]["shape"] == [7, 16]


# ---- tensors that no array can hold ----

OPAQUE = {
    "future": ("F3_X", (8, 2), 6),
    "odd": ("F4", (2, 3), 3),
    "partial": ("F6_E3M2", (4, 2), 6),
    "none": ("F4", (0, 3), 0),
    "deep": ("I4", (1,) * 40, 1),
}
GOOD = {"scale": ("F8_E8M0", (), 1), "empty": ("F4", (0,), 0), "codes": ("F4", (2, 4), 4)}


def write_opaque(path):
    entries = OPAQUE | GOOD
    write_header(path, entries, bytes(range(sum(nbytes for *_, nbytes in entries.values()))))


@pytest.fixture
def folder(tmp_path):
    """Return a Hugging Face folder with tensors of a later version of the format."""
    (tmp_path / "hf").mkdir()
    write_opaque(tmp_path / "hf" / "model.safetensors")
    return tmp_path / "hf"


@pytest.mark.parametrize("listed", [False, True])
def test_opaque_tensors_refuse_alone_and_by_name(folder, listed):
    if listed:
        names = dict.fromkeys(OPAQUE | GOOD, "model.safetensors")
        write_index(folder, names, sum(nbytes for *_, nbytes in (OPAQUE | GOOD).values()))
    model = mlstate.load(folder, names=list(GOOD)).model
    assert {name: array.shape for name, array in model.items()} == {
        "scale": (),
        "empty": (0,),
        "codes": (2, 2),
    }
    assert name_of(model["scale"].dtype) == "float8_e8m0fnu"
    assert model["codes"].tobytes() == bytes(range(17, 21))
    for name, (dtype, *_) in OPAQUE.items():
        with pytest.raises(FormatError, match=f"tensor '{name}': dtype '{dtype}'") as caught:
            mlstate.load(folder, names=[*GOOD, name])
        assert (caught.value.name, caught.value.got) == (name, dtype)
    with pytest.raises(FormatError, match="dtype"):
        mlstate.load(folder)


def test_opaque_tensors_are_shown_and_verified(folder, capsys):
    path = folder / "model.safetensors"
    for target in (folder, path):
        assert main(["inspect", str(target), "--json"]) == 0
        records = json.loads(capsys.readouterr().out)["tensors"]
        facts = {t["key"]: (t["dtype"], tuple(t["shape"]), t["bytes"]) for t in records}
        assert {name: facts[name] for name in OPAQUE} == OPAQUE
        assert facts["codes"] == (F4, (2, 2), 4)
        assert main(["verify", str(target)]) == 0
        capsys.readouterr()
    assert mlstate.verify(folder) and verify_file(path)
    with pytest.raises(FormatError, match="future") as caught:
        mlstate.load_file(path)
    assert caught.value.name == "future"


def test_checksums_cover_opaque_tensors(tmp_path):
    """A later mlstate wrote the file: its checksums are compared, also of unknown dtypes."""
    path = tmp_path / "model.safetensors"
    codes = np.arange(48, dtype=np.uint8)
    mlstate.save_file({"future": codes.view(stored_dtype(F4)), "plain": codes}, path)
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    head = data[:length].replace(b'"F4"', b'"G4"')
    at = head.index(b"header.crc32c") + len(b'header.crc32c":"')
    head = head[:at] + b"00000000" + head[at + 8 :]
    head = head[:at] + f"{_core.crc32c(head):08x}".encode() + head[at + 8 :]
    path.write_bytes(head + data[length:])
    report = verify_file(path)
    assert report and report.checksums
    assert mlstate.verify(tmp_path)
    assert mlstate.load(tmp_path, names="plain").model["plain"].tobytes() == codes.tobytes()
    with pytest.raises(FormatError, match="'G4' is not supported by this version"):
        mlstate.load_file(path)
    path.write_bytes(head + data[length:-1] + b"?")
    assert [p.name for p in verify_file(path).problems] == ["plain"]
    path.write_bytes(head + b"?" + data[length + 1 :])
    assert [p.name for p in mlstate.verify(tmp_path).problems] == ["future"]


def test_reshard_refuses_opaque_tensors_before_it_writes(folder, tmp_path):
    with pytest.raises(FormatError, match="dtype"):
        reshard(folder, tmp_path / "out", layout="rows", world_size=2)
    assert not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(FormatError, match="dtype"):
        read_any(folder / "model.safetensors")


@pytest.mark.parametrize(
    "dtype, shape, nbytes",
    [
        ("F4", (), 1),
        ("F4", (3, 3), 5),
        ("F4", (3, 3), 4),
        ("F4", (2, 32), 64),
        ("F6_E2M3", (4,), 4),
        ("F6_E2M3", (2,), 2),
        ("F4", (1 << 62,), 1),
        ("F6_E3M2", (1 << 62, 0), 0),
        ("F3_X", (1 << 63, 4), 1),
        ("", (1,), 1),
        ("F8_E8M0", (), 0),
    ],
)
def test_sizes_that_do_not_match_are_refused(tmp_path, dtype, shape, nbytes):
    path = tmp_path / "model.safetensors"
    write_header(path, {"w": (dtype, shape, nbytes)}, bytes(nbytes))
    for read in (mlstate.load_file, mlstate.load):
        with pytest.raises(FormatError) as caught:
            read(path if read is mlstate.load_file else tmp_path)
        assert caught.value.name == "w"
    assert not verify_file(path)


def test_mutated_headers_of_packed_files_raise_only_format_errors(tmp_path):
    path = tmp_path / "model.safetensors"
    write_opaque(path)
    raw = path.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    rng = np.random.default_rng(0)
    for _ in range(500):
        data = bytearray(raw)
        for at in rng.integers(0, length, rng.integers(1, 4)):
            data[at] = rng.choice(bytearray(b'0123456789"[],:FU_\x00') + bytearray([data[at] ^ 1]))
        path.write_bytes(data)
        for read in (mlstate.load_file, lambda p: mlstate.load(p.parent, names="codes")):
            try:
                read(path)
            except (FormatError, mlstate.TensorNotFoundError):
                continue


@pytest.mark.filterwarnings("ignore:.*no index of its")
def test_copies_of_opaque_tensors_refuse_alone(tmp_path):
    def write(number, dtype):
        name = f"model-{number:05d}-of-00002.safetensors"
        entries = {"q": (dtype, (4,), 4), f"plain.{number}": ("U8", (2,), 2)}
        write_header(tmp_path / name, entries, bytes([number]) * 6)

    write(1, "F8_X")
    write(2, "F8_X")
    assert mlstate.load(tmp_path, names="plain").model["plain.2"].tolist() == [2, 2]
    with pytest.raises(FormatError, match="'F8_X' is not supported"):
        mlstate.load(tmp_path, names="q")
    for dtype in ("U8", "F8_Y"):
        write(2, dtype)
        with pytest.raises(FormatError) as caught:
            mlstate.load(tmp_path, names="plain")
        assert caught.value.name == "q"
