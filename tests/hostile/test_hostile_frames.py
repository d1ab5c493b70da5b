"""Compressed shards with invalid frames under correct checksums.

Each case must raise an exception that names the tensor and its file, take no more memory than the
frames allow, and never crash.
"""

import gzip
import json
import time
import zlib

import numpy as np
import pytest
from checkpoint_victim import Victim
from sparse_checkpoint import checksums, store
from traced_memory import traced

import mlstate
from mlstate.checkpoint import inspect, reshard
from mlstate.errors import FormatError

zstandard = pytest.importorskip("zstandard")

MIB = 1 << 20
SHAPE = (700, 500)  # of float32: a whole frame, and a short one
FRAMES = [MIB, 700 * 500 * 4 - MIB]
PATH = "params/lie.safetensors"


@pytest.fixture
def victim(tmp_path):
    state = {"w": np.arange(700 * 500, dtype=np.float32).reshape(SHAPE), "b": np.ones(3)}
    mlstate.save(tmp_path / "ckpt", state)
    return Victim(tmp_path / "ckpt")


def apart(data, item=4):
    """All first bytes of the elements, then all second bytes, and so on."""
    return np.frombuffer(data, np.uint8).reshape(-1, item).T.tobytes()


def encode(codec, data):
    return zlib.compress(data, 1) if codec == "zlib" else zstandard.ZstdCompressor().compress(data)


def frames_of(codec, state):
    data = state.tobytes()
    return [encode(codec, apart(data[at : at + MIB])) for at in (0, MIB)]


def put_overlay(victim, frames, codec):
    """Give w one layer of these frames, with correct checksums."""
    index = victim.index()
    data = b"".join(frames)
    offset = store(victim.folder / PATH, data, "U8", index["files"], PATH)
    layer = {"file": len(index["files"]) - 1, "offset": offset, "bytes": len(data)}
    layer.update(checksums(data), codec=codec, frames=",".join(str(len(f)) for f in frames))
    [shard] = [shard for shard in index["shards"] if shard["name"] == "w"]
    for member in ("file", "offset", "bytes", "crc32c", "blocks"):
        shard.pop(member, None)
    shard["layers"] = [layer]
    return index, offset


def put(victim, index):
    """Store an index and a manifest that describes it, so that the index is trusted."""
    victim.patterns = False
    sizes = {"w": 700 * 500 * 4, "b": 24}
    victim.put_index(index)
    manifest = json.loads((victim.folder / "manifest.json").read_bytes())
    manifest["indexes"]["data_bytes"] = [sum(sizes[s["name"]] for s in index["shards"])]
    victim.put_manifest(manifest)


def reading_calls(victim):
    folder = str(victim)
    arrays = {"w": np.zeros(SHAPE, np.float32), "b": np.zeros(3)}
    yield lambda: mlstate.load(folder)
    yield lambda: mlstate.load(folder, verify=False)
    yield lambda: mlstate.load(folder, mmap=True)
    yield lambda: mlstate.load(folder, verify="first")
    yield lambda: mlstate.load(folder, names="w")
    yield lambda: mlstate.load(folder, into={"model": arrays})
    yield lambda: reshard(folder, f"{folder}-other", layout="rows", world_size=2, overwrite=True)


@pytest.mark.parametrize("codec", ["zlib", "zstd"])
def test_frames_of_other_writers_are_read(codec, victim):
    """The cases damaged below are valid to begin with."""
    state = np.arange(700 * 500, dtype=np.float32).reshape(SHAPE)
    frames = frames_of(codec, state)
    for second in (frames[1], state.tobytes()[MIB:]):  # also a frame that is stored uncompressed
        put(victim, put_overlay(victim, [frames[0], second], codec)[0])
        for read in reading_calls(victim):
            result_read = read()
            if (
                isinstance(result_read, mlstate.checkpoint.LoadedState)
                and result_read.model is not None
            ):
                assert np.asarray(result_read.model["w"]).tobytes() == state.tobytes()
        assert mlstate.verify(str(victim))
        assert {t.key: t.codec for t in inspect(str(victim)).tensors()} == {"b": None, "w": codec}


# ---- invalid frames ----


def nonsense(data, codec):
    return np.random.default_rng(5).bytes(5000)


def with_dictionary(data, codec):
    if codec == "zstd":
        dictionary = zstandard.ZstdCompressionDict(
            data[:1000], dict_type=zstandard.DICT_TYPE_RAWCONTENT
        )
        return zstandard.ZstdCompressor(dict_data=dictionary).compress(data[1000:2000] * 5)
    coder = zlib.compressobj(zdict=data[:1000])
    return coder.compress(data) + coder.flush()


def lying_length(data, codec):
    """A frame whose content is sixty-four times as long as it claims."""
    if codec == "zlib":
        return zlib.compress(data * 64)
    coded = zstandard.ZstdCompressor().compress(bytes(64 * MIB))
    return coded.replace((64 * MIB).to_bytes(4, "little"), len(data).to_bytes(4, "little"), 1)


LIES = {
    "fewer": lambda data, codec: encode(codec, data[:-1]),
    "fewer elements": lambda data, codec: encode(codec, data[:-4]),
    "none": lambda data, codec: encode(codec, b""),
    "more": lambda data, codec: encode(codec, data + b"\0"),
    "twice as many": lambda data, codec: encode(codec, data * 2),
    "bomb": lambda data, codec: encode(codec, bytes(64 * MIB)),
    "lying length": lying_length,
    "nonsense": nonsense,
    "zeros": lambda data, codec: bytes(5000),
    "one byte": lambda data, codec: b"\x78",
    "cut off": lambda data, codec: encode(codec, data)[:-1],
    "half": lambda data, codec: encode(codec, data)[: len(encode(codec, data)) // 2],
    "garbage behind": lambda data, codec: encode(codec, data) + b"\0",
    "more behind": lambda data, codec: encode(codec, data) + encode(codec, b"more"),
    "in two": lambda data, codec: encode(codec, data[:100]) + encode(codec, data[100:]),
    "other codec": lambda data, codec: encode("zstd" if codec == "zlib" else "zlib", data),
    "gzip": lambda data, codec: gzip.compress(data, 1),
    "raw deflate": lambda data, codec: zlib.compress(data)[2:-4],
    "dictionary": with_dictionary,
    "skipped": lambda data, codec: b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + encode(codec, data),
    "unknown length": lambda data, codec: zstandard.ZstdCompressor(
        write_content_size=False
    ).compress(data),
    "stored, but shorter": lambda data, codec: data[:-4],
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("codec", ["zlib", "zstd"])
@pytest.mark.parametrize("lie", LIES)
def test_damaged_frames_are_refused(lie, codec, which, victim):
    state = np.arange(700 * 500, dtype=np.float32)
    frames = frames_of(codec, state)
    data = apart(state.tobytes()[MIB * which :][:MIB])
    frames[which] = LIES[lie](data, codec)
    assert 0 < len(frames[which]) < FRAMES[which]  # otherwise it is stored uncompressed
    index, offset = put_overlay(victim, frames, codec)
    put(victim, index)
    start = time.monotonic()
    for read in reading_calls(victim):
        with traced() as trace, pytest.raises(FormatError) as caught:
            read()
        assert trace.peak < 20 * MIB  # the arrays themselves, and a few frames
        assert caught.value.name == "w"
        assert caught.value.path == str(victim.folder / PATH)
        assert caught.value.offset == offset + which * len(frames[0])
        assert "tensor 'w', file 'params/lie.safetensors'" in str(caught.value)
        assert codec in str(caught.value)
    assert time.monotonic() - start < 20
    assert mlstate.verify(str(victim))  # the checksums match the invalid frames
    assert mlstate.load(str(victim), names="b").model["b"].tolist() == [1, 1, 1]
