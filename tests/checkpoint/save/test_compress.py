"""Compressed saves: fewer bytes, and the same arrays for every way to load."""

import json
import os
import signal
import sys
import zlib

import child
import numpy as np
import pytest
from checkpoint_model import STEPS, files_of, flipped, good, part, same, views_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_checkpoint import as_pairs, check_reads, checksums, stored_index
from thread_team import num_threads, run_in_threads
from tries import tries

import mlstate
from mlstate.checkpoint import (
    CheckpointManager,
    Layout,
    Shard,
    inspect,
    load,
    plan_load,
    reshard,
    save_async,
    verify,
)
from mlstate.checkpoint._store import codecs as _codecs
from mlstate.errors import ChecksumError, FormatError
from mlstate.testing import run_ranks

pytest.importorskip("zstandard")

ROWS, WIDTH = 4000, 128  # 2 MiB of float32
codecs = pytest.mark.parametrize("codec", ["zlib", "zstd"])


@pytest.fixture(params=[1, 4])
def threads(request):
    with num_threads(request.param):
        yield


def rounded(rows=ROWS, width=WIDTH, seed=0):
    """Rounded numbers, half of whose digits are zeros."""
    rng = np.random.default_rng(seed)
    return np.round(rng.normal(size=(rows, width)) * 8).astype(np.float32) / 8


def random(rows=ROWS, width=WIDTH, seed=0):
    """Random numbers, which do not compress."""
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def codecs_of(checkpoint):
    return {record.key: record.codec for record in checkpoint.tensors()}


# ---- stored bytes ----


@codecs
def test_compressible_tensors_are_compressed(path, codec):
    model = {"w": rounded(), "noise": random(), "small": np.zeros(3000, np.float32)}
    states = {"w.m": np.zeros((ROWS, WIDTH), np.float32), "w.n": rounded(seed=1) * 3}
    saved = mlstate.save(path, model, states, compress=codec)
    compressed = dict.fromkeys(["w", "w.m", "w.n"], codec)
    assert codecs_of(saved) == {"noise": None, "small": None, **compressed}
    files = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    assert files < saved.stored_nbytes + 5 * 8192
    assert saved.stored_nbytes == saved.written["new_bytes"]
    assert model["noise"].nbytes < saved.stored_nbytes < saved.nbytes * 0.7
    assert saved.nbytes == saved.written["data_bytes"]
    assert good(path, model, states)
    text = next((path / "index").iterdir()).read_bytes()
    assert f'"codec":[null,null,"{codec}","{codec}","{codec}"]'.encode() in text


def test_unprofitable_compression_keeps_raw_bytes(path):
    model = {"w": random()}
    saved = mlstate.save(path, model, compress="zlib")
    assert saved.shards()[0].layers is None
    assert b'"codec":' not in next((path / "index").iterdir()).read_bytes()
    assert good(path, model)


def test_inspect_reports_codec_and_sizes(path):
    state = {"w": rounded(), "plain": random()}
    mlstate.save(path, state, compress="zstd")
    checkpoint = inspect(path)
    raw, w = checkpoint.shards()
    assert (w.path, w.offset, w.crc32c, w.nbytes) == (None, None, None, state["w"].nbytes)
    [layer] = w.layers
    assert layer.codec == "zstd"
    assert layer.visible_nbytes == w.nbytes > layer.nbytes
    data = (path / layer.path).read_bytes()
    assert f"{mlstate._core.crc32c(data[layer.offset : layer.offset + layer.nbytes]):08x}" == (
        layer.crc32c
    )
    assert raw.layers is None
    assert raw.path is not None
    records = {record.key: record for record in checkpoint.tensors()}
    assert records["w"].stored_nbytes == layer.nbytes
    assert records["w"].sparse_shards == 0
    assert records["plain"].stored_nbytes == state["plain"].nbytes
    assert checkpoint.stored_nbytes == layer.nbytes + state["plain"].nbytes
    # other readers of the file see a row of bytes
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert {"dtype": "U8", "shape": [layer.nbytes]}.items() <= header["w"].items()
    described = json.loads(header["__metadata__"]["mlstate.shards"])["w"]
    assert described["codec"] == "zstd"
    assert sum(map(int, described["frames"].split(","))) == layer.nbytes


def numbers(dtype, size):
    """A few numbers of a dtype, its special values included."""
    array = np.random.default_rng(size).integers(0, 4, size).astype(np.float32).astype(dtype)
    if array.dtype.kind in "fc":
        array[:3] = [-0.0, np.nan, np.inf]
    return array.reshape(-1, 10)


@codecs
def test_every_dtype(path, codec):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    names = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8"]
    state = {name: numbers(name, 40_000) for name in names}
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        state[name] = numbers(getattr(ml_dtypes, name), 40_000)
    saved = mlstate.save(path, state, compress=codec, pack_below_bytes=0)
    assert set(codecs_of(saved).values()) == {codec}
    assert saved.stored_nbytes < saved.nbytes / 2
    assert good(path, state)
    assert same(load(path, verify=False).model, state)


@pytest.mark.parametrize("kind", ["fortran", "reversed", "every other", "swapped"])
def test_memory_of_any_kind(path, kind):
    view = views_of(rounded())[kind]
    saved = mlstate.save(path, {"w": view}, compress="zstd")
    assert codecs_of(saved) == {"w": "zstd"}
    assert good(path, {"w": view.astype("<f4")})


# ---- repeated saves ----


def test_compression_is_off_by_default(path):
    state = {"w": rounded()}
    assert codecs_of(mlstate.save(path, state)) == {"w": None}
    saved = mlstate.save(path, state, compress="zlib")  # the codec changed, but the content did not
    assert codecs_of(saved) == {"w": None}
    assert saved.written["new_bytes"] == 0


def test_unchanged_tensors_keep_their_codec(path, monkeypatch):
    state = {"w": rounded(), "v": rounded(seed=1)}
    first = mlstate.save(path, state, compress="zstd")
    state["v"].view(np.uint8)[-1, -1] ^= 1  # one bit, in the last element
    for codec in ("zlib", "zlib", None):
        saved = mlstate.save(path, state, compress=codec)
        assert codecs_of(saved) == {"w": "zstd", "v": "zlib"}
        assert good(path, state)
        monkeypatch.setattr(_codecs, "encode", None)  # nothing else changes
    assert saved.written["new_bytes"] == 0
    assert [t.version for t in saved.tensors()] == [2, 1]
    assert first.nbytes == saved.nbytes


def test_changed_rows_overlay_compressed_rows(path):
    state = {"w": rounded()}
    mlstate.save(path, state, compress="zstd", pack_below_bytes=0)
    codec_history = []
    for step, codec in enumerate(["zstd", None, "zlib", "zstd"]):
        state["w"][100 * step : 100 * step + 400] += 1
        saved = mlstate.save(path, state, incremental=True, compress=codec, pack_below_bytes=0)
        codec_history.append([layer.codec for layer in saved.shards()[0].layers])
        assert saved.written["new_bytes"] <= 400 * WIDTH * 4
        assert good(path, state)
    assert codec_history[-1] == ["zstd", "zstd", None, "zlib", "zstd"]
    state["w"][:] = random()
    assert mlstate.save(path, state, compress="zlib").shards()[0].layers is None
    assert good(path, state)


# ---- random sequences of saves ----

SHAPES = [(700, 500), (37, 130), (5, 9, 40), (30_000,), (1,), (0, 4), (6, 0), (4100, 8)]
DTYPES = [np.float32, np.float64, np.uint8, np.complex64, np.int16]


def change(rng, array):
    """Change part of an array in place."""
    if array.size == 0:
        return
    rows = rng.random(len(array)) < rng.choice([0.02, 0.2, 0.6, 1])
    kind = rng.integers(0, 5)
    if kind == 0:
        array[rows] = 0
    elif kind == 4:
        array[...] = 0
    elif kind == 1:
        array[rows] = rng.integers(0, 100, array[rows].shape)
    elif kind == 2:
        flat = array[rows]
        array[rows] = np.frombuffer(rng.bytes(flat.nbytes), array.dtype).reshape(flat.shape)
    else:
        array.reshape(-1).view(np.uint8)[rng.integers(0, array.nbytes)] ^= 1


@settings(max_examples=tries(12), deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_random_saves_load_exact_states(tmp_path_factory, seed):
    rng = np.random.default_rng(seed)
    path = tmp_path_factory.mktemp("any") / "ckpt"
    state = {
        f"t{number}": np.zeros(shape, DTYPES[rng.integers(0, len(DTYPES))])
        for number, shape in enumerate(SHAPES)
    }
    layouts = [s for s in STEPS if all(axis in ("flat", 0) for axis, _ in s)]
    steps = layouts[rng.integers(0, len(layouts))]
    for _ in range(4):
        for array in state.values():
            if rng.random() < 0.7:
                change(rng, array)
        options = {"sparse": rng.random() < 0.4, "incremental": rng.random() < 0.7}
        codec = [None, "zlib", "zstd"][rng.integers(0, 3)]
        keywords = {
            name: np.asfortranarray(array) if rng.random() < 0.3 else array
            for name, array in state.items()
        }
        mlstate.save(
            path, keywords, layout=Layout(steps), pack_below_bytes=100, compress=codec, **options
        )
        loaded = load(path, verify=bool(rng.integers(0, 2)), mmap=bool(rng.integers(0, 2)))
        assert same(loaded.model, state)
        rank, world = int(rng.integers(0, 3)), 3
        cut = load(path, rank=rank, world_size=world, layout="flat").model
        assert same(cut, {n: part(a, (("flat", world),), rank) for n, a in state.items()})
    assert verify(path)


# ---- frames of other writers ----

FRAME = 1 << 20


def frames_of(data, item, rng):
    """Bytes as frames, as docs/format_shards.md defines them; some are stored uncompressed."""
    import zstandard

    name = ["zlib", "zstd"][rng.integers(0, 2)]
    frames = []
    for at in range(0, len(data), FRAME):
        raw = data[at : at + FRAME]
        apart = np.frombuffer(raw, np.uint8).reshape(-1, item).T.tobytes()
        level = int(rng.integers(1, 9))
        coded = (
            zlib.compress(apart, level)
            if name == "zlib"
            else zstandard.ZstdCompressor(level=level).compress(apart)
        )
        frames.append(coded if len(coded) < len(raw) and rng.random() < 0.8 else raw)
    record = {"codec": name, "frames": ",".join(str(len(frame)) for frame in frames)}
    return b"".join(frames), record


@settings(max_examples=tries(15), deadline=None)
@given(st.data())
def test_any_frames_are_read(tmp_path_factory, data):
    """Compared with a model that applies each layer over the earlier ones."""
    folder = tmp_path_factory.mktemp("any")
    item = data.draw(st.sampled_from([1, 2, 4, 8]), label="item")
    width = data.draw(st.integers(1, 700), label="width")
    most = data.draw(st.sampled_from([5000, FRAME + 999, 3 * FRAME]), label="most")
    rows = max(1, most // (width * item))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    model = np.zeros((rows, width * item), np.uint8)
    stored, layers = bytearray(8), []
    for number in range(data.draw(st.integers(0, 4), label="layers")):
        full = number == 0 and rng.random() < 0.5
        stored_rows = np.ones(rows, bool) if full else rng.random(rows) < rng.random()
        if not stored_rows.any():
            continue
        noise = rng.random(rows) < rng.choice([0, 0.1, 1])
        values = rng.integers(0, 3, model.shape, np.uint8)
        values[noise] = rng.integers(0, 256, (int(noise.sum()), model.shape[1]), np.uint8)
        model[stored_rows] = values[stored_rows]
        coded, record = values[stored_rows].tobytes(), {}
        if rng.random() < 0.8:
            coded, record = frames_of(coded, item, rng)
        layer = {"file": 0, "offset": len(stored), "bytes": len(coded)}
        layers.append({**layer, **checksums(coded), **record})
        if not full:
            layers[-1].update(row=width, rows=as_pairs(stored_rows)[0])
        stored += coded
    compressed_checkpoint = stored_index(folder, stored, [rows, width], item, layers)
    dtype = {1: np.uint8, 2: np.int16, 4: np.float32, 8: np.float64}[item]
    begin = data.draw(st.integers(0, rows * width), label="begin")
    end = data.draw(st.integers(begin, rows * width), label="end")
    check_reads(folder, compressed_checkpoint, model.view(dtype), begin, end, Layout.axis(1, 3))


# ---- ways to load ----


@pytest.fixture(scope="module", params=["zlib", "zstd"])
def compressed_checkpoint(request, tmp_path_factory):
    """A checkpoint with frames of all kinds in two layers, and its content."""
    path = tmp_path_factory.mktemp("made") / "ckpt"
    state = {"a.w": rounded(rows=20_000), "b.w": random(rows=500), "c": rounded(rows=100)}
    state["a.w"][3000:5000] = random(rows=2000)  # a frame that does not compress
    mlstate.save(path, state, {"a.w.m": state["a.w"] * 2}, compress=request.param)
    state["a.w"][10_000:10_300] += 1
    mlstate.save(path, state, {"a.w.m": state["a.w"] * 2}, incremental=True, compress=request.param)
    return path, state


@pytest.mark.parametrize("verified", [True, False, "first"])
@pytest.mark.parametrize("mmap", [True, False])
def test_loads_full_tensors(compressed_checkpoint, verified, mmap):
    path, state = compressed_checkpoint
    loaded = load(path, verify=verified, mmap=mmap)
    assert same(loaded.model, state)
    assert same(loaded.optimizer, {"a.w.m": state["a.w"] * 2})


def test_names(compressed_checkpoint):
    path, state = compressed_checkpoint
    assert same(load(path, names="a.w").model, {"a.w": state["a.w"]})
    assert same(load(path, names=["a.*"]).model, {"a.w": state["a.w"]})


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("world", [2, 7])
@pytest.mark.parametrize("verified", [True, False])
def test_parts(compressed_checkpoint, layout, world, verified):
    path, state = compressed_checkpoint
    axis = 0 if layout == "rows" else "flat"
    for rank in range(0, world, 3):
        options = {"layout": layout, "world_size": world, "verify": verified}
        model = load(path, rank=rank, **options).model
        assert same(model, {n: part(a, ((axis, world),), rank) for n, a in state.items()})


@pytest.mark.parametrize("verified", [True, False])
def test_into(compressed_checkpoint, verified):
    path, state = compressed_checkpoint
    targets = {name: np.empty_like(array) for name, array in state.items()}
    targets["a.w"] = np.empty((20_000, 2 * WIDTH), np.float32)[:, ::2]
    load(path, into={"model": targets}, verify=verified)
    assert same(targets, state)


@pytest.mark.parametrize("verified", [True, False])
def test_plan_load_counts_compressed_frames(compressed_checkpoint, verified):
    """The plan counts compressed bytes in whole frames, and no more than are stored."""
    path, _ = compressed_checkpoint
    everything = sum(
        layer.nbytes if shard.layers else 0
        for shard in inspect(path).shards()
        for layer in shard.layers or ()
    ) + sum(shard.nbytes for shard in inspect(path).shards() if shard.layers is None)
    planned = plan_load(path, verify=verified).nbytes
    assert planned <= everything
    assert planned > 0.9 * everything  # a frame whose rows are all hidden is not read
    options = {"rank": 0, "world_size": 20, "layout": "rows", "verify": verified}
    assert plan_load(path, **options).nbytes < everything / 2


def test_reading_is_reported_whole(compressed_checkpoint):
    path, state = compressed_checkpoint
    seen = []
    load(path, progress=seen.append)
    assert sum(seen) == sum(a.nbytes for a in state.values()) + state["a.w"].nbytes


def test_threads_load_at_once(compressed_checkpoint):
    path, state = compressed_checkpoint

    def work(number):
        for _ in range(2):
            model = load(path, verify=number % 2 == 0).model
            assert not [n for n, a in state.items() if model[n].tobytes() != a.tobytes()]

    run_in_threads(work, 5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_forked_processes_load(compressed_checkpoint):
    """Also in a child forked after threads had been at work."""
    path, _ = compressed_checkpoint
    code = f"""
import os, mlstate
mlstate.set_num_threads(4)
before = mlstate.load({str(path)!r}).model["a.w"].tobytes()
process = os.fork()
if process == 0:
    os._exit(0 if mlstate.load({str(path)!r}).model["a.w"].tobytes() == before else 1)
print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""
    assert child.run(code).strip() == "0"


# ---- ways to save ----


def test_resharding_compresses_again(path, tmp_path):
    state = {"w": rounded(rows=20_000), "noise": random()}
    mlstate.save(path, state, compress="zstd")
    target = reshard(path, tmp_path / "three", layout="rows", world_size=3)
    assert codecs_of(target) == {"w": "zstd", "noise": None}
    assert len(target.shards()) == 6
    assert good(tmp_path / "three", state)
    uncompressed = mlstate.save(tmp_path / "plain", state)
    again = reshard(uncompressed.path, tmp_path / "four", layout="flat", world_size=3)
    assert set(codecs_of(again).values()) == {None}


@pytest.mark.parametrize("most", [None, 0, 600_000])
def test_saving_in_the_background(path, most):
    state = {"w": rounded(), "v": rounded(seed=1)[:500], "noise": random()}
    copies = {name: array.copy() for name, array in state.items()}
    handle = save_async(path, state, max_staging_bytes=most, compress="zstd")
    handle.staged()
    for array in state.values():
        array[:] = -1
    saved = handle.wait()
    total = sum(array.nbytes for array in state.values())
    assert handle.progress() == (total, total)
    assert codecs_of(saved) == {"w": "zstd", "v": None, "noise": None}
    assert good(path, copies)


def test_ranks_compress_their_shards(path):
    array = rounded()

    def save(group):
        layout = Layout.rows(2)
        rows = part(array, layout.steps, group.rank)
        state = {"w": Shard(rows, layout, group.rank, shape=array.shape)}
        return mlstate.save(path, state, group=group, compress=["zlib", "zstd"][group.rank])

    results = run_ranks(2, save)
    assert [checkpoint.stored_nbytes < array.nbytes / 2 for checkpoint in results] == [True, True]
    layers = [shard.layers[0].codec for shard in inspect(path).shards()]
    assert layers == ["zlib", "zstd"]
    assert good(path, {"w": array})


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_all_bytes_are_reported_as_done(path, codec):
    tricky = random(rows=8000)  # only the rows that the writer samples compress well
    for at in (0, 3700, 7600):
        tricky[at : at + 400] = 1
    state = {"w": rounded(rows=20_000), "noise": random(), "tricky": tricky, "s": np.ones(9)}
    state["zeros"] = np.zeros(10_000)
    total = sum(array.nbytes for array in state.values())
    for turn in range(4):
        seen = []
        options = {"incremental": turn > 1, "sparse": turn > 2}
        saved = mlstate.save(path, state, compress=codec, progress=seen.append, **options)
        assert sum(seen) == total
        state["w"][5 * turn] += 1
        state["tricky"][turn] += 1
    assert codecs_of(saved)["noise"] is None
    assert good(path, load(path).model)


# ---- interruption ----


class StopNow(Exception):
    pass


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("error", [StopNow, KeyboardInterrupt])
def test_progress_error_stops_the_save(path, error):
    def stop(count):
        raise error

    state = {"w": rounded(rows=20_000)}
    mlstate.save(path, state, compress="zlib")
    copy, files = state["w"].copy(), set(files_of(path))
    state["w"][:] += 1
    zlib = {"compress": "zlib"}
    for options in (
        {},
        {"sparse": True},
        {"incremental": True},
        zlib,
        {**zlib, "incremental": True},
    ):
        with pytest.raises(error):
            mlstate.save(path, state, progress=stop, **options)
        assert set(files_of(path)) == files
        assert good(path, {"w": copy})


class Interrupting:
    """Codecs that receive a signal in their nth call."""

    def __init__(self, monkeypatch, function, call):
        self.original = getattr(_codecs, function)
        self.left = call
        monkeypatch.setattr(_codecs, function, self)

    def __call__(self, *arguments):
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        return self.original(*arguments)


@pytest.fixture(params=[KeyboardInterrupt, StopNow])
def interrupt(request):
    """The handler raises exceptions of several classes, not only those that end a program."""

    def handler(number, frame):
        raise request.param

    before = signal.signal(signal.SIGINT, handler)
    yield request.param
    signal.signal(signal.SIGINT, before)


long = pytest.mark.long


@pytest.mark.parametrize(
    ("function", "call", "options"),
    [
        ("encode", 1, {"compress": "zlib"}),
        pytest.param("encode", 3, {"compress": "zlib"}, marks=long),
        ("encode", 4, {"compress": "zlib"}),
        pytest.param("encode", 9, {"compress": "zlib"}, marks=long),
        # while comparing: an interrupt is not mistaken for damage, which would rewrite the shard
        ("decode", 2, {"incremental": True}),
        ("decode", 2, {"incremental": False}),
    ],
)
@pytest.mark.usefixtures("threads")
def test_interrupts_stop_the_save(path, function, call, options, interrupt, monkeypatch):
    state = {"w": rounded(rows=5000), "v": rounded(rows=5000, seed=1)}
    mlstate.save(path, state, compress="zlib")
    copies, files = {name: array.copy() for name, array in state.items()}, set(files_of(path))
    state["w"][4500:] += 1
    state["v"][::2] += 1
    with monkeypatch.context() as patch:
        Interrupting(patch, function, call)
        with pytest.raises(interrupt):
            mlstate.save(path, state, **options)
    assert set(files_of(path)) == files
    assert good(path, copies)
    mlstate.save(path, state, **options)
    assert good(path, state)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("call", [1, 4])
def test_interrupts_stop_the_loading(path, call, interrupt, monkeypatch):
    mlstate.save(path, {"w": rounded(rows=20_000)}, compress="zlib")
    with monkeypatch.context() as patch:
        Interrupting(patch, "decode", call)
        with pytest.raises(interrupt):
            load(path)
    assert len(load(path).model) == 1


def test_codecs_release_their_views(path, monkeypatch):
    views = []
    original = _codecs.encode, _codecs.decode

    def keep(which):
        def call(name, data, size):
            views.append(data)
            return original[which](name, data, size)

        return call

    monkeypatch.setattr(_codecs, "encode", keep(0))
    monkeypatch.setattr(_codecs, "decode", keep(1))
    mlstate.save(path, {"w": rounded()}, compress="zlib")
    load(path)
    assert len(views) >= 4
    for view in views:
        with pytest.raises(ValueError, match="released"):
            view.tobytes()


@pytest.mark.usefixtures("threads")
def test_codec_errors_are_raised(path, monkeypatch):
    def broken(name, data, size):
        raise MemoryError

    state = {"w": rounded(), "v": rounded(seed=1)}
    monkeypatch.setattr(_codecs, "encode", broken)
    with pytest.raises(MemoryError):
        mlstate.save(path, state, compress="zlib")
    assert not path.exists() or not files_of(path / "params")
    monkeypatch.undo()
    mlstate.save(path, state, compress="zlib")
    for more in (-1, 1):
        monkeypatch.setattr(_codecs, "decode", lambda _, data, size, n=more: bytes(size + n))
        with pytest.raises(FormatError, match="zlib gave another number of bytes"):
            load(path)
    monkeypatch.setattr(_codecs, "decode", broken)
    with pytest.raises(MemoryError):
        load(path)


# ---- damage in the existing checkpoint ----


@codecs
def test_damage_is_found(path, codec):
    state = {"w": rounded(rows=10_000), "noise": random()}
    saved = mlstate.save(path, state, compress=codec)
    [layer] = next(shard for shard in saved.shards() if shard.key == "w").layers
    file = path / layer.path
    before = file.read_bytes()
    rng = np.random.default_rng(0)
    for at in [0, 1, 2, 3, layer.nbytes - 1, *rng.integers(0, layer.nbytes, 4).tolist()]:
        file.write_bytes(flipped(before, layer.offset + at, 1 << (at % 8)))
        with pytest.raises(ChecksumError) as caught:
            load(path)
        assert (caught.value.name, caught.value.path) == ("w", str(file))
        assert caught.value.offset == layer.offset + at // (1 << 20) * (1 << 20)
        [problem] = verify(path).problems
        assert (problem.kind, problem.path, problem.name) == ("altered", layer.path, "w")
        assert problem.offset <= layer.offset + at < problem.offset + problem.length
        with pytest.raises(ChecksumError):
            load(path, mmap=True, verify="first")
        try:  # without verification, damage that the codec does not notice loads as wrong numbers
            array = load(path, verify=False).model["w"]
            assert array.shape == state["w"].shape
        except FormatError as error:
            assert (error.name, error.path) == ("w", str(file))
        assert same(load(path, names="noise").model, {"noise": state["noise"]})
    for length in (0, 100, layer.offset, len(before) - 1, len(before) + 1):
        file.write_bytes(before.ljust(length, b"x")[:length])
        with pytest.raises(FormatError, match="bytes long"):
            load(path)
        assert verify(path).problems[0].kind == "length"
    saved = mlstate.save(path, state, compress=codec, incremental=True)  # the next save repairs it
    assert saved.written["new_shards"] == 1
    assert good(path, state)


# ---- codecs that are missing or unknown ----

WAYS = [
    mlstate.save,
    save_async,
    lambda path, state, compress: CheckpointManager(path).save(1, state, compress=compress),
    lambda path, state, compress: CheckpointManager(path).save_async(1, state, compress=compress),
]


def test_missing_zstandard_fails_before_writing(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    state = {"w": rounded()}
    for save in WAYS:
        with pytest.raises(ImportError, match=r"pip install mlstate\[zstd\]"):
            save(path, state, compress="zstd")
    assert not path.exists() or not files_of(path)
    assert codecs_of(mlstate.save(path, state, compress="zlib")) == {"w": "zlib"}
    assert good(path, state)


def test_missing_zstandard_fails_to_load_its_frames(path, tmp_path, monkeypatch):
    state = {"w": rounded(), "noise": random()}
    saved = mlstate.save(path, state, compress="zstd")
    [layer] = next(shard for shard in saved.shards() if shard.key == "w").layers
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for options in ({}, {"verify": False}, {"mmap": True}, {"into": {"model": dict(state)}}):
        with pytest.raises((ImportError, ValueError)) as caught:
            load(path, **options)
        for words in ("tensor 'w'", layer.path, "pip install mlstate[zstd]"):
            assert words in str(caught.value)
    assert same(load(path, names="noise").model, {"noise": state["noise"]})
    assert verify(path)  # needs no codec
    assert inspect(path).tensors()[1].codec == "zstd"
    with pytest.raises((ImportError, ValueError), match="pip install"):
        reshard(path, tmp_path / "other", layout="rows", world_size=2)
    # saving again works: data that cannot be compared count as changed
    saved = mlstate.save(path, state, compress="zlib")
    assert saved.written["new_shards"] == 1
    assert good(path, state)


@pytest.mark.parametrize("value", ["", "gzip", "ZSTD", "zlib ", 1, True, False, b"zlib", ["zlib"]])
def test_other_names_are_refused(path, value):
    for save in WAYS:
        with pytest.raises(ValueError, match="compress must be 'zlib', 'zstd' or None, got"):
            save(path, {"w": np.ones(2)}, compress=value)
    assert not path.exists() or not files_of(path)
