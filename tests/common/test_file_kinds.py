"""Files and folders are recognised by content; other formats get a sentence with a remedy."""

import bz2
import errno
import gzip
import importlib
import io
import lzma
import os
import pickle
import re
import tarfile
import zipfile
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from command_table import COMMANDS
from hypothesis import given, settings
from hypothesis import strategies as st

import mlstate
from mlstate._common import file_kinds
from mlstate._common.file_kinds import (
    START_BYTES,
    FileKind,
    dangling_blob,
    hub_snapshot,
    kind_of_file,
    kind_of_folder,
    kind_of_start,
    kind_of_zip,
)
from mlstate.errors import FormatError

SUFFIXES = ["", ".safetensors", ".bin", ".PT", ".npz", ".ckpt", ".onnx", ".pb", ".gguf", ".tar"]


def tar_of(name):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    return file.getvalue()


def zip_of(*names):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, b"content")
    return file.getvalue()


def bytes_of(write, *values, **arrays):
    file = io.BytesIO()
    write(file, *values, **arrays)
    return file.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
S3_ERROR = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>NoSuchKey</Code><Key>m</Key></Error>'
)
DAMAGED = {
    "empty": b"",
    "zeros": b"\0" * 600,
    "git-LFS pointer": LFS,
    "git-LFS pointer, old": b"version https://hawser.github.com/spec/v1\noid sha256:4d7a\nsize 1\n",
    "Xet pointer": b"# xet version 0\nfilesize = 12345\nhash = 'd87b1d1b0b2ff2c6'\n",
    "HTML page": b"\xef\xbb\xbf\n<!DOCTYPE html>\n<html lang=en><title>Sign in</title>",
    "HTML page, XHTML": b'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml">',
    "XML error": S3_ERROR,
    "JSON error": b'{"error":"Repository not found"}',
    "text": b"Entry not found",
    "unknown": b"\x7fELF\x02\x01\x01" + b"\0" * 20,
    "cut short": b"\x10\0\0\0\0\0\0\0{}",
}
# First bytes of files that the packages of these formats wrote (onnx 1.23, coremltools 9, gguf
# 0.19, msgpack 1.2 with the options of flax, sentencepiece 0.2), or the bytes of a specification.
FOREIGN = {
    "XML": b'<?xml version="1.0"?><net name="model" version="11">',
    "JSON": b'{\n  "architectures": ["LlamaForCausalLM"]\n}',
    "JSON, a list": b'[\n  {"name": "w"}\n]',
    "mlstate manifest": b'{"checksum":"776d4b5a",\n"format": "mlstate.manifest",\n"step": 1',
    "GGUF": b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x14\0\0\0\0\0\0\0general.arch",
    "GGML": b"lmgg\x99\xca\0\0\xdc\x05\0\0",
    "GGML, mapped": b"tjgg\x03\0\0\0\0}\0\0",
    "HDF5": b"\x89HDF\r\n\x1a\n\0\0\0\0\0\x08\x08\0",
    "ONNX": b"\x08\x0e\x12\x07pytorch\x1a\x032.1:]\n\x11\n\x01x\n\x01w\x12\x01y",
    "ONNX, no producer": b'\x08\x0e:]\n\x11\n\x01x\n\x01w\x12\x01y"\x06MatMul\x12\x01g',
    "ONNX, a domain": b'\x08\x0e"\x02ai(\x032\x01x:]\n\x11\n\x01x\n\x01w',
    "Core ML": b"\x08\x01\x12 \n\x0e\n\x01x\x1a\t*\x07\n\x01\x02\x10\xc0\x80\x04R\x0e\n\x01y",
    "flax": b"\x81\xa6params\x81\xa5dense\x81\xa6kernel\xc7\x20\x01\x93\x91\x02",
    "flax, many": b"\xde\0\x14\xa6layer0\x81\xa1k\xc4\x01x\xa6layer1\x81\xa1k\xc4\x01x",
    "TensorFlow checkpoint": b"\0\0\x06\x08\x01\x1a\x02\x08\x01\0\x14\x1bsave_counter",
    "TensorFlow graph": b"\x08\x01\x12\xa0\x1f\n\x8e\x08\x12\x0f\n\x05AddV2\x12\x06\n\x01x",
    "TensorFlow Lite": b"\x1c\0\0\0TFL3\x14\0\x20\0",
    "ExecuTorch": b"\x30\0\0\0ET12\0\0\0\0",
    "SentencePiece": b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02\n\x0c\n\x03<s>\x15\0\0\0\0\x18\x03",
    "zstd": b"\x28\xb5\x2f\xfd\x04\x58",
    "lz4": b"\x04\x22\x4d\x18\x64\x40",
    "7z": b"7z\xbc\xaf\x27\x1c\0\x04",
    "RAR": b"Rar!\x1a\x07\x01\0",
    "npy": bytes_of(np.save, np.ones(3)),
    "pickle": pickle.dumps({"w": np.ones(2)}, 5),
    "pickle, protocol 2": pickle.dumps({"w": [1]}, 2),
    "pickle, protocol 1": pickle.dumps({"w": [1]}, 1),
    "pickle, protocol 0": pickle.dumps({"w": [1]}, 0),
    "gzip": gzip.compress(tar_of("./model_weights.ckpt")),
    "bzip2": bz2.compress(b"content"),
    "xz": lzma.compress(b"content"),
    "tar": tar_of("./model_weights.ckpt"),
    "torch tar": tar_of("sys_info"),
}
READ = {
    "safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "weights index": b'{"metadata": {"total_size": 8}, "weight_map": {"w": "a.safetensors"}}',
}
CONTENTS = {**DAMAGED, **FOREIGN, **READ}


@pytest.mark.parametrize("case", CONTENTS)
def test_content_decides_under_any_suffix(case):
    content, name = CONTENTS[case], case.partition(",")[0]
    for suffix in SUFFIXES if name != "unknown" else ["", ".bin", ".npz"]:
        kind = kind_of_start(content[:START_BYTES], len(content), suffix)
        assert kind.name == name
        assert bool(kind.sentence) == (case not in READ)
        assert kind.is_damaged == (case in DAMAGED)


@pytest.mark.parametrize("case", [*DAMAGED, *FOREIGN])
def test_sentence_names_a_remedy(case):
    sentence = kind_of_start(CONTENTS[case][:START_BYTES], len(CONTENTS[case])).sentence
    assert sentence.isprintable() and sentence.startswith("it ")
    assert re.search(r": .*(download|pass|load|read|run|unpack|decompress|lists|unlike)", sentence)


def test_error_messages_of_servers_are_quoted():
    for content, text in [
        (S3_ERROR, "<Code>NoSuchKey</Code>"),
        (DAMAGED["JSON error"], "Repository not found"),
        (DAMAGED["text"], "'Entry not found'"),
        (b"\x1b[31m\x07\xe2\x80\xae" * 9, r"\x1b[31m\x07\xe2"),
    ]:
        assert text in kind_of_start(content, len(content)).sentence


@pytest.mark.parametrize(
    ("suffix", "name"),
    [
        (".data-00000-of-00001", "TensorFlow checkpoint"),
        (".onnx", "ONNX"),
        (".PB", "TensorFlow graph"),
        (".mlmodel", "Core ML"),
        (".joblib", "pickle"),
        (".safetensors", "safetensors"),
        (".gguf", "unknown"),
    ],
)
def test_suffix_decides_for_formats_without_a_magic_number(suffix, name):
    assert kind_of_start(b"\xc3\x01" * 300, 600, suffix).name == name


def test_header_of_a_safetensors_file_must_be_within_the_file(tmp_path):
    path = tmp_path / "model.bin"
    mlstate.save_file({"w": np.ones(9)}, path)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for size in range(9, len(content)):
        path.write_bytes(content[:size])
        kind = kind_of_file(path)
        assert kind.name == ("safetensors" if size >= end else "cut short")
        assert size >= end or f"{end - 8} bytes, but only {size - 8} follow" in kind.sentence


ZIPS = {
    "npz": bytes_of(np.savez, w=np.ones(3), v=np.ones(2)),
    "npz, empty": bytes_of(np.savez),
    "Keras": zip_of("metadata.json", "config.json", "model.weights.h5"),
    "PyTorch export": zip_of("version", "serialized_exported_program.json"),
    "zip": zip_of("data", "policy.pth", "policy.optimizer.pth", "version"),
}


@pytest.mark.parametrize("case", ZIPS)
def test_entries_of_a_zip_decide(tmp_path, case):
    path = tmp_path / "model.pt"
    path.write_bytes(ZIPS[case])
    kind = kind_of_file(path)
    assert kind == kind_of_zip(path) == kind_of_zip(io.BytesIO(ZIPS[case]))
    assert kind.name == case.partition(",")[0] and bool(kind.sentence) == (kind.name != "npz")
    if kind.name == "zip":
        assert "data, policy.optimizer.pth, policy.pth and 1 more:" in kind.sentence


def test_zip_without_its_end_is_cut_short(tmp_path):
    path, content = tmp_path / "w.npz", ZIPS["npz"]
    for size in range(4, len(content)):
        path.write_bytes(content[:size])
        kind = kind_of_file(path)
        assert kind.name == "cut short" if size < len(content) - 18 else kind.is_damaged
    path.write_bytes(content.replace(b"PK\x01\x02", b"PK\x09\x09"))
    assert kind_of_file(path).name == "damaged zip"


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_files_are_distinguished(tmp_path, torch):
    import torch.distributed.checkpoint as dcp
    from torch.package import PackageExporter

    module = torch.nn.Linear(2, 2)
    tree = module.state_dict()
    torch.save(tree, tmp_path / "torch.tar")
    for number in (2, 3, 4, 5):
        options = {"pickle_protocol": number, "_use_new_zipfile_serialization": False}
        torch.save(tree, tmp_path / f"torch.{number}", **options)
    program = torch.export.export(module, (torch.ones(2),))
    torch.export.save(program, tmp_path / "PyTorch export.pt2")
    with PackageExporter(tmp_path / "torch.package.pt") as package:
        package.save_pickle("model", "weights.pkl", {"w": 1})
    dcp.save(tree, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / ".metadata").rename(tmp_path / "DCP metadata.bin")
    (tmp_path / "dcp" / "__0_0.distcp").rename(tmp_path / "DCP data.pt")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / "__0_0.distcp").rename(tmp_path / "DCP data.distcp")
    for path in filter(os.path.isfile, tmp_path.iterdir()):
        kind = kind_of_file(path)
        assert kind.name == path.stem and bool(kind.sentence) == (path.stem != "torch")


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_refused(tmp_path, torch):
    module = torch.nn.Linear(2, 2)
    torch.jit.script(module).save(tmp_path / "a.pt")
    kind = kind_of_file(tmp_path / "a.pt")
    assert kind.name == "TorchScript" and "torch.jit.load" in kind.sentence


@pytest.mark.torch
def test_functions_and_commands_in_sentences_exist(torch):
    importlib.import_module("torch.package")
    names, commands = set(), set()
    for sentence in [*file_kinds._FOREIGN.values(), *file_kinds._DAMAGED.values()]:
        names |= set(re.findall(r"\b(?:mlstate|torch|numpy|pickle)(?:\.\w+)+", sentence))
        commands |= set(re.findall(r"`mlstate (\w+ \w+)`", sentence))
        assert "mlstate.load" not in sentence
    assert len(names) > 8
    for name in names:
        package, _, attribute = name.partition(".")
        assert attrgetter(attribute)(importlib.import_module(package))
    assert commands == {"coreml states", "coreai states"}
    assert {"coreml", "coreai"} <= set(COMMANDS)


def test_errors_of_the_system_pass(tmp_path):
    with pytest.raises(FileNotFoundError):
        kind_of_file(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        kind_of_file(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FormatError, match="FIFO"):
        kind_of_file(tmp_path / "fifo")

    class Broken(io.BytesIO):
        def seek(self, *_args):
            raise OSError(errno.EIO, "input/output error")

    with pytest.raises(OSError, match="input/output"):
        kind_of_zip(Broken(ZIPS["npz"]))


# ---- folders ----


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("orbax", ["_CHECKPOINT_METADATA", "default"]),
        ("orbax", ["_METADATA", "_sharding", "d", "manifest.ocdbt", "ocdbt.process_0"]),
        ("orbax", ["orbax.checkpoint", "pytree"]),
        ("Zarr", ["zarr.json", "c"]),
        ("Zarr", [".zarray", ".zattrs", "0.0"]),
        ("Zarr", [".zgroup", "w"]),
        ("TensorFlow graph", ["saved_model.pb", "variables", "assets"]),
        ("TensorFlow checkpoint", ["checkpoint", "c-1.index", "c-1.data-00000-of-00001"]),
        ("Core ML", ["Data", "Manifest.json"]),
        ("Core ML", ["coremldata.bin", "model.mil", "weights"]),
        ("Core AI", ["main.mlirb", "main.hash", "metadata.json"]),
        ("diffusers", ["model_index.json", "unet", "vae"]),
        ("DCP without metadata", ["__0_0.distcp", "__1_0.distcp"]),
        ("Hub cache", ["blobs", "refs", "snapshots"]),
        ("prompt store", ["segment-00000001", "store", "used"]),
        ("Hub caches", ["models--gpt2", "models--org--name", "version.txt"]),
        ("GGUF", ["config.json", "model-Q4_K_M.gguf"]),
        ("ONNX", ["config.json", "model.onnx", "tokenizer.json"]),
        ("flax", ["config.json", "flax_model.msgpack"]),
        ("HDF5", ["config.json", "tf_model.h5"]),
        ("unknown folder", ["config.json", "model.onnx", "odd_name.safetensors"]),
        ("unknown folder", ["Manifest.json", "blobs", "notes.txt"]),
    ],
)
def test_names_in_a_folder_decide(name, names):
    kind = kind_of_folder(set(names))
    assert kind.name == name and kind.sentence.isprintable() and not kind.is_damaged
    assert re.match(
        f"its file {names[1]} is a" if name in ("GGUF", "flax") else "it", kind.sentence
    )


def test_steps_of_a_run_are_named_with_the_newest_last():
    names = ["runs", *(f"checkpoint-{step}" for step in (1000, 500, 1500))]
    kind = kind_of_folder(names)
    assert "the steps checkpoint-500, checkpoint-1000, checkpoint-1500:" in kind.sentence
    many = kind_of_folder([f"global_step_{step}" for step in range(12)])
    assert many.name == kind.name == "steps"
    assert "…, global_step_8, global_step_9, global_step_10, global_step_11:" in many.sentence
    assert kind_of_folder(["epoch_3.txt", "stepping"]).name == "unknown folder"


def test_unknown_folder_names_its_first_files():
    assert "holds a, b, c\\n and 2 more:" in kind_of_folder(["e", "d", "c\n", "b", "a"]).sentence
    assert kind_of_folder([]) is None


@pytest.fixture
def cache(tmp_path):
    """The Hub's cache of one model with two snapshots, as huggingface_hub lays it out."""
    folder = tmp_path / "models--org--name"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "c0ffee").write_bytes(READ["safetensors"])
    for revision in ("a" * 40, "b" * 40):
        (folder / "snapshots" / revision).mkdir(parents=True)
        (folder / "snapshots" / revision / "model.safetensors").symlink_to("../../blobs/c0ffee")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("b" * 40)
    return folder


def test_snapshot_of_the_branch_main_is_chosen(cache):
    hub = pytest.importorskip("huggingface_hub")
    file = hub.try_to_load_from_cache("org/name", "model.safetensors", cache_dir=cache.parent)
    assert hub_snapshot(str(cache)) == str(Path(file).parent)
    (cache / "refs" / "main").write_text("../blobs")
    assert hub_snapshot(str(cache)) is None
    (cache / "refs" / "main").unlink()
    assert hub_snapshot(str(cache)) is None
    (cache / "snapshots" / ("a" * 40)).rename(cache / "a")
    assert hub_snapshot(str(cache)) == str(cache / "snapshots" / ("b" * 40))
    assert hub_snapshot(str(cache / "snapshots")) is None


def test_link_to_a_missing_blob_names_the_download(cache, tmp_path):
    link = cache / "snapshots" / ("b" * 40) / "model.safetensors"
    assert dangling_blob(link) is None and kind_of_file(link).name == "safetensors"
    (cache / "blobs" / "c0ffee").unlink()
    sentence = dangling_blob(link)
    assert f"{cache / 'blobs' / 'c0ffee'}, which is missing" in sentence
    assert f"`hf download org/name model.safetensors --revision {'b' * 40}`" in sentence
    (tmp_path / "link").symlink_to("gone")
    assert "remove the link" in dangling_blob(tmp_path / "link")
    assert dangling_blob(tmp_path / "none") is None


# ---- any bytes ----

SEEDS = st.sampled_from([*CONTENTS.values(), *ZIPS.values()])
EDITS = st.lists(
    st.tuples(st.integers(0, 999), st.integers(0, 9), st.binary(max_size=9)), max_size=5
)


def edited(content, edits):
    for place, length, data in edits:
        start = len(content) - place if place % 2 else place  # the end of a zip counts most
        content = content[: max(0, start)] + data + content[max(0, start) + length :]
    return content


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.binary(max_size=600), st.builds(edited, SEEDS, EDITS)), st.text(max_size=9))
def test_any_bytes_have_a_kind(content, suffix):
    for kind in (
        kind_of_start(content[:START_BYTES], len(content), suffix),
        kind_of_zip(io.BytesIO(content), suffix),
    ):
        assert isinstance(kind, FileKind) and kind.name and kind.sentence.isprintable()
        assert kind.is_damaged <= bool(kind.sentence)


@settings(max_examples=200, deadline=None)
@given(st.sets(st.one_of(st.text(min_size=1), st.from_regex(file_kinds._STEP))))
def test_any_names_have_a_kind(names):
    kind = kind_of_folder(names)
    assert (kind is None) == (not names)
    assert kind is None or kind.sentence.isprintable()
