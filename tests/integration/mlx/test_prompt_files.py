"""Prompt cache files of two generations of mlx-lm: read, written and converted."""

import contextlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from golden.make_prompt_caches import METADATA, histories
from mlx_caches import assert_equal_caches, decode, layers_of, numbers_of
from needs import needs

from mlstate import load_file, save_file
from mlstate.checkpoint import load_metadata
from mlstate.cli import main
from mlstate.errors import ChecksumError, CompatibilityError, FormatError, StoreError

pytestmark = needs("mlx", "mlx_lm")
mx = pytest.importorskip("mlx.core", reason="its arrays are the subject")
pytest.importorskip("mlx_lm", reason="its files are the subject")

from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models import cache as models  # noqa: E402

from mlstate.integrations.mlx import load_prompt_cache, save_prompt_cache  # noqa: E402

GOLDEN = Path(__file__).parents[2] / "golden" / "prompt_caches"
NAMES = list(histories(models))


def old_file(name):
    """A file of mlx-lm 0.31.3."""
    return GOLDEN / f"{name.replace(' ', '_')}-0.31.3.safetensors"


def assert_same_state(got, expected):
    """Every value of `state` has the same type, dtype and bits."""
    assert [type(layer) for layer in got] == [type(layer) for layer in expected]
    left = tree_flatten([layer.state for layer in got])
    right = tree_flatten([layer.state for layer in expected])
    for (name, first), (_, second) in zip(left, right, strict=True):
        assert type(first) is type(second), name
        if isinstance(first, mx.array):
            assert first.dtype == second.dtype and first.shape == second.shape, name
            assert bool(mx.array_equal(first, second)), name
        else:
            assert first == second, name


# ---- 0.32 ----


@pytest.mark.parametrize("name", NAMES)
def test_mlx_lm_reads_our_files_and_we_read_its_files(name, tmp_path):
    cache = histories(models)[name]
    our_file, mlx_file = tmp_path / "our_file.safetensors", tmp_path / "mlx_file.safetensors"
    save_prompt_cache(our_file, cache, METADATA)
    models.save_prompt_cache(str(mlx_file), cache, METADATA)
    for path in (our_file, mlx_file):
        assert_same_state(models.load_prompt_cache(str(path)), cache)
        loaded, metadata = load_prompt_cache(path, True)
        assert_same_state(loaded, cache)
        assert metadata == METADATA
    assert sorted(load_file(our_file)) == sorted(load_file(mlx_file))
    texts = load_metadata(mlx_file)
    assert load_metadata(our_file) == texts


def test_the_installed_mlx_lm_selects_the_format(tmp_path, monkeypatch):
    path = tmp_path / "prompt.safetensors"
    monkeypatch.setattr(models.KVCache, "meta_state", "", raising=False)  # as in 0.31
    save_prompt_cache(path, histories(models)["full"], METADATA)
    assert load_metadata(path) == load_metadata(old_file("full"))
    with pytest.raises(CompatibilityError, match="does not store a layer without tokens"):
        save_prompt_cache(path, [models.KVCache()])


def test_mlx_lm_sees_the_checksums_as_metadata(tmp_path):
    path = tmp_path / "prompt.safetensors"
    save_prompt_cache(path, histories(models)["full"], METADATA)
    _, metadata = models.load_prompt_cache(str(path), return_metadata=True)
    checksums = metadata.pop("mlstate")
    assert metadata == METADATA
    assert len(checksums["header"]["crc32c"]) == 8 and set(checksums) == {"header", "blocks"}


def test_a_file_with_the_checksums_of_another_is_read_without_them(tmp_path, capsys):
    """mlx-lm writes our checksums into its next file, as metadata of the user."""
    path, stale, target = (tmp_path / f"{name}.safetensors" for name in ("first", "stale", "new"))
    save_prompt_cache(path, histories(models)["full"], METADATA)
    cache, metadata = models.load_prompt_cache(str(path), return_metadata=True)
    decode(cache, 1)
    models.save_prompt_cache(str(stale), cache, metadata)
    with pytest.raises(ChecksumError, match="pass verify=False"):
        load_prompt_cache(stale)
    loaded, metadata = load_prompt_cache(stale, True, verify=False)
    assert_same_state(loaded, cache)
    assert metadata == METADATA
    commands = ["cache", "show", str(stale)], ["cache", "convert", str(stale), str(target)]
    for command in commands:
        assert main(command) == 2
        assert ", pass --no-verify. " in capsys.readouterr().err
    assert not target.exists()
    texts = []
    for command in commands:
        assert main([*command, "--no-verify"]) == 0
        texts.append(capsys.readouterr().out)
    assert "with checksums, not compared" in texts[0]
    assert_same_state(load_prompt_cache(target), cache)


def test_layers_without_tokens_and_states_come_back(tmp_path):
    cache = [
        models.KVCache(),
        models.QuantizedKVCache(32, 4),
        models.RotatingKVCache(8, 2),
        models.ArraysCache(3, left_padding=[1, 0]),
        models.CacheList(models.KVCache(), models.ArraysCache(1)),
        models.BatchKVCache([1, 0]),
        models.BatchRotatingKVCache(8, [1, 0]),
        models.ChunkedKVCache(8),
    ]
    path = tmp_path / "empty.safetensors"
    save_prompt_cache(path, cache)
    assert_same_state(load_prompt_cache(path), cache)
    assert_same_state(models.load_prompt_cache(str(path)), cache)
    layer = load_prompt_cache(path)[5]
    layer.prepare(right_padding=[1, 0])
    assert layer._right_padding.tolist() == [1, 0]


def test_metadata_comes_back_as_it_was_passed(tmp_path):
    path = tmp_path / "prompt.safetensors"
    cache = histories(models)["full"]
    for metadata in ({}, {"a.b": "1", "a.c": "2"}, {"0": "x", "1": "y"}, {"ä": '"\\\n'}):
        save_prompt_cache(path, cache, metadata)
        assert load_prompt_cache(path, return_metadata=True)[1] == metadata
        assert_same_state(models.load_prompt_cache(str(path)), cache)
    for key in ("mlstate", "mlstate.header.crc32c", "mlstate.x"):
        with pytest.raises(ValueError, match="is reserved"):
            save_prompt_cache(path, cache, {key: "x"})
    with pytest.raises(TypeError, match="metadata must map str to str, got 'n': int"):
        save_prompt_cache(path, cache, {"n": 5})
    assert load_prompt_cache(path, True)[1] == metadata


@pytest.mark.parametrize("name", NAMES)
def test_any_safetensors_copy_of_a_prompt_file_stays_one(name, tmp_path):
    """`save_file` puts its checksums where mlx-lm accepts them."""
    cache = histories(models)[name]
    path, other = tmp_path / "prompt.safetensors", tmp_path / "copy.safetensors"
    models.save_prompt_cache(str(path), cache, METADATA)
    save_file(load_file(path), other, load_metadata(path))
    loaded, metadata = models.load_prompt_cache(str(other), return_metadata=True)
    assert_same_state(loaded, cache)
    assert {key: metadata[key] for key in METADATA} == METADATA
    assert load_metadata(other) == load_metadata(path)
    data = bytearray(other.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    with pytest.raises(ChecksumError):
        load_file(other)


# ---- 0.31 ----


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_mlx_lm_0_31_continues_like_the_live_cache(name):
    loaded, metadata = load_prompt_cache(old_file(name), return_metadata=True)
    assert metadata == METADATA
    expected = histories(models)[name]
    assert_equal_caches(loaded, expected)
    numbers = [[numbers_of(layer) for layer in layers_of(cache)] for cache in (loaded, expected)]
    assert numbers[0] == numbers[1]
    for counts in ((1,), (4,), (1,) * 9):
        assert_equal_caches(decode(loaded, 40, counts), decode(expected, 40, counts))


@pytest.mark.parametrize("name", ["full", "wrapped", "states", "window and full"])
def test_mlx_lm_0_32_cannot_read_the_old_files(name):
    with pytest.raises(Exception):  # noqa: B017 - of several types
        models.load_prompt_cache(str(old_file(name)))


def test_a_window_that_was_not_rotated_stays_so():
    """mlx-lm 0.31 wrote "False" and read it as true."""
    assert load_prompt_cache(old_file("batch window"))[0].rotated is False
    assert load_prompt_cache(old_file("batch wrapped"))[0].rotated is True


def test_files_before_0_30_have_one_number_more(tmp_path):
    path = tmp_path / "old.safetensors"
    for name, at, old in (("wrapped", 2, 4), ("quantized", 0, 3)):
        texts = load_metadata(old_file(name))
        numbers = [texts.pop(f"0.0.{i}") for i in range(old)]
        numbers.insert(at, "256")
        texts |= {f"0.0.{i}": number for i, number in enumerate(numbers)}
        save_file(load_file(old_file(name)), path, texts, overwrite=True)
        assert_equal_caches(load_prompt_cache(path), histories(models)[name])
    texts = load_metadata(old_file("states"))
    save_file(load_file(old_file("states")), path, {**texts, "2.0": "MambaCache"}, overwrite=True)
    assert_equal_caches(load_prompt_cache(path), histories(models)["states"])


def test_a_file_of_a_longer_cache_needs_overwrite(tmp_path):
    path = tmp_path / "new.safetensors"
    layer = models.KVCache()
    layer.update_and_fetch(mx.ones((1, 2, 10, 64)), mx.ones((1, 2, 10, 64)))
    for _ in range(2):
        save_prompt_cache(path, [layer])
    layer.update_and_fetch(mx.ones((1, 2, 300, 64)), mx.ones((1, 2, 300, 64)))
    with pytest.raises(StoreError, match="overwrite=True"):
        save_prompt_cache(path, [layer])
    assert load_prompt_cache(path)[0].offset == 10
    save_prompt_cache(path, [layer], overwrite=True)
    assert load_prompt_cache(path)[0].offset == 310
    path.write_text("dear")
    with pytest.raises(StoreError, match="does not replace it"):
        save_prompt_cache(path, [layer], overwrite=True)
    assert path.read_text() == "dear"


@pytest.mark.parametrize("name", NAMES)
def test_mlx_lm_0_32_reads_converted_files(name, tmp_path):
    path, again = tmp_path / "new.safetensors", tmp_path / "again.safetensors"
    assert main(["cache", "convert", str(old_file(name)), str(path)]) == 0
    assert main(["convert", str(path), str(again)]) == 0  # a plain copy of arrays and metadata
    for file in (path, again):
        loaded, metadata = models.load_prompt_cache(str(file), return_metadata=True)
        assert {key: metadata[key] for key in METADATA} == METADATA
        expected = histories(models)[name]
        assert_equal_caches(loaded, expected)
        if name in ("batch window", "batch wrapped"):  # mlx-lm 0.32.2 does not set `_lengths`
            loaded = load_prompt_cache(file)
        assert_equal_caches(decode(loaded, 40), decode(expected, 40))


# ---- hostile files ----


def write(path, arrays, texts):
    """A file of another writer, without checksums."""
    header, data = {"__metadata__": texts}, b""
    names = {"float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64", "bool": "BOOL"}
    names["uint32"] = "U32"
    for name, array in arrays.items():
        body = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(body)]
        dtype = names[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        data += body
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def parts_of(path):
    return dict(load_file(path)), load_metadata(path)


def ring(tmp_path):
    path = tmp_path / "ring.safetensors"
    models.save_prompt_cache(str(path), histories(models)["wrapped"], METADATA)
    return parts_of(path)


def listed(tmp_path):
    path = tmp_path / "list.safetensors"
    models.save_prompt_cache(str(path), histories(models)["list"], METADATA)
    return parts_of(path)


def old(name):
    return lambda tmp_path: parts_of(old_file(name))


I32 = np.int32
# A layer with other arrays, or with other texts.
HOSTILE = {
    "no tree": (ring, lambda t: {"format": "pt"}, "does not have the class names"),
    "other key": (ring, lambda t: {**t, "format": "pt"}, "'format', which is in no branch"),
    "class": (ring, lambda t: {**t, "1.0": "dict"}, "layer 0 is a 'dict'; the known"),
    "code": (ring, lambda t: {**t, "1.0": "__import__"}, "layer 0 is a '__import__'"),
    "huge class": (ring, lambda t: {**t, "1.0": "x" * 100_000}, "the known classes are"),
    "more classes": (ring, lambda t: {**t, "1.1": "KVCache"}, "tensor '1.0' is missing"),
    "gap of classes": (ring, lambda t: {**t, "1.999999999": "KVCache"}, "list of classes"),
    "no classes": (
        ring,
        lambda t: {k: v for k, v in t.items() if k[0] != "1"},
        "does not belong to a layer",
    ),
    "missing": (ring, {"0.1": None}, "tensor '0.1' is missing"),
    "missing scalar": (ring, {"0.4": None}, "tensor '0.4' is missing"),
    "extra": (ring, {"7.7": np.zeros(3, I32)}, "tensor '7.7' does not belong to a layer"),
    "negative": (ring, {"0.2": np.array(-5, I32)}, "RotatingKVCache.offset is -5"),
    "huge": (ring, {"0.2": np.array(2**62, np.int64)}, "offset is 4611686018427387904"),
    "slot": (ring, {"0.5": np.array(99, I32)}, "_idx counts 99 tokens in 8 positions"),
    "float": (ring, {"0.2": np.array(5.5, np.float32)}, "'0.2' is not a value of kind"),
    "not a scalar": (ring, {"0.2": np.zeros(3, I32)}, "'0.2' is not a value of kind"),
    "bool": (ring, {"0.2": np.array(True)}, "offset is of type bool"),
    "kind": (ring, lambda t: {**t, "2.1.1": "pickle"}, "not a value of kind 'pickle'"),
    "kind of keys": (ring, lambda t: {**t, "2.1.0": "0.0"}, "'0.0' is not a value of kind"),
    "gap of scalars": (ring, lambda t: {**t, "2.999.0": "0.0"}, "list of scalars"),
    "scalar twice": (ring, lambda t: {**t, "2.1.0": "0.3"}, "list of scalars"),
    "rank": (ring, {"0.0": np.zeros((2, 8), np.float16)}, "not an array with 4 axes"),
    "values": (ring, {"0.1": np.zeros((1, 2, 7, 4), np.float16)}, "values has shape"),
    "name of a part": (
        listed,
        {"0.0.1": np.zeros(1000, I32)},
        "'0.0.1' is not a value of kind 'string'",
    ),
    "negative letter": (
        listed,
        {"0.0.1": np.full(7, -1, I32)},
        "'0.0.1' is not a value of kind 'string'",
    ),
    "list in a list": (
        listed,
        {"0.0.1": np.array([ord(c) for c in "CacheList"], I32)},
        "does not belong to a layer",
    ),
    "old: numbers": (
        old("wrapped"),
        lambda t: {k: v for k, v in t.items() if k != "0.0.3"},
        "layer 0, a RotatingKVCache, has 3 numbers, not 4",
    ),
    "old: bits": (
        old("quantized"),
        lambda t: {**t, "0.0.2": "8"},
        "QuantizedKVCache.bits is 8, and the codes have 4 words",
    ),
    "old: text": (old("wrapped"), lambda t: {**t, "0.0.1": "8x"}, "max_size is '8x'"),
    "old: digits": (old("wrapped"), lambda t: {**t, "0.0.1": "9" * 5000}, "max_size is '999"),
    "old: negative": (old("wrapped"), lambda t: {**t, "0.0.1": "-8"}, "max_size is -8"),
    "old: class": (old("full"), lambda t: {**t, "2.0": "KVCache\n"}, "layer 0 is a"),
    "old: missing": (old("full"), {"0.0": None}, "tensor '0.0' is missing"),
    "old: dropped": (
        old("chunked"),
        lambda t: {**t, "0.0.1": "4"},
        "0.31 does not store the number of tokens",
    ),
    "old: flag": (old("batch window"), lambda t: {**t, "0.0.3": "1"}, "rotated is '1'"),
    "old: list": (old("list"), lambda t: {**t, "0.0.0.2": "dict"}, "layer 0.2 is a 'dict'"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_raises_one_clear_error(name, tmp_path):
    create, change, text = HOSTILE[name]
    arrays, texts = create(tmp_path)
    if callable(change):
        texts = change(texts)
    else:
        arrays |= change
    path = tmp_path / "hostile.safetensors"
    write(path, {k: v for k, v in arrays.items() if v is not None}, texts)
    with pytest.raises(FormatError, match="(?s)" + text) as caught:
        load_prompt_cache(path)
    assert caught.value.path == str(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["wrapped", "list", "quantized"])
def test_a_truncated_or_mutated_file_never_gives_another_cache(name, tmp_path):
    cache = histories(models)[name]
    path = tmp_path / "prompt.safetensors"
    save_prompt_cache(path, cache, METADATA)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in [0, 1, 7, 8, 9, *rng.integers(0, len(data), 40).tolist()]:
        path.write_bytes(data[:at])
        with pytest.raises(FormatError):
            load_prompt_cache(path)
        mutated = bytearray(data)
        mutated[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(mutated)
        with pytest.raises(FormatError):
            load_prompt_cache(path)


@pytest.mark.parametrize("name", ["wrapped", "list", "quantized", "states"])
@pytest.mark.parametrize("generation", ["0.31", "0.32"])
def test_a_mutated_header_without_checksums_raises_only_our_errors(name, generation, tmp_path):
    path = tmp_path / "prompt.safetensors"
    if generation == "0.31":
        data = old_file(name).read_bytes()
    else:
        models.save_prompt_cache(str(path), histories(models)[name], METADATA)
        data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    rng = np.random.default_rng(1)
    for _ in range(100):
        mutated = bytearray(data)
        for at in rng.integers(0, length, rng.integers(1, 4)):
            mutated[at] = int(rng.integers(32, 127))
        path.write_bytes(mutated)
        with contextlib.suppress(FormatError, CompatibilityError):
            load_prompt_cache(path)


def test_paths_that_are_not_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "fifo"):
        with pytest.raises((StoreError, ValueError)):
            load_prompt_cache(path)


def test_a_refused_save_leaves_the_file(tmp_path):
    path = tmp_path / "prompt.safetensors"
    save_prompt_cache(path, histories(models)["full"])
    before = path.read_bytes()
    with pytest.raises(CompatibilityError, match="unknown class"):
        save_prompt_cache(path, [*histories(models)["full"], object()])
    with pytest.raises(TypeError, match="cache must be a list of layers"):
        save_prompt_cache(path, "cache")
    with pytest.raises(TypeError, match="verify"):
        load_prompt_cache(path, verify=1)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_missing_mlx_lm_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx_lm.models", None)
    for call in (lambda: load_prompt_cache(old_file("full")), lambda: save_prompt_cache("f", [])):
        with pytest.raises(ImportError, match=r"pip install 'mlstate\[mlx\]'"):
            call()


def test_the_package_needs_mlx_only_when_it_is_used():
    code = "import sys, mlstate.integrations.mlx; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
