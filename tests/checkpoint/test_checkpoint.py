"""Single files: round trips, compatibility with safetensors, atomicity under faults."""

import errno
import gc
import itertools
import os
import pathlib
import random
import resource
import shutil
import stat
import struct
import subprocess
import sys

import numpy as np
import pytest
from checkpoint_model import flip, flip_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from thread_team import calling_in_background, run_in_threads
from tries import tries

import mlstate
from mlstate._common.dtypes import DTYPES, EXTENSIONS, PACKED
from mlstate.checkpoint import load_file, load_metadata, save_file

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 and 8-bit floats come from it")

NATIVE = [np.dtype(info.name).type for info in DTYPES if info.in_numpy]
EXTRA = [name for name in EXTENSIONS if name not in PACKED]  # see files/test_packed_dtypes.py
ALL = NATIVE + [getattr(ml_dtypes, name) for name in EXTRA]


def same(a, b):
    return (
        a.dtype == b.dtype.newbyteorder("=")
        and a.shape == b.shape
        and a.tobytes() == b.astype(b.dtype.newbyteorder("=")).tobytes()
    )


def sample(dtype, shape=(3, 4)):
    count = int(np.prod(shape))
    raw = random.Random(7).randbytes(count * np.dtype(dtype).itemsize)
    if dtype is np.bool_:
        raw = bytes(b & 1 for b in raw)
    return np.frombuffer(raw, dtype).reshape(shape)


# ---- round trips ----


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", ALL)
def test_every_dtype_comes_back(dtype, mmap, tmp_path):
    state = {
        "matrix": sample(dtype), "none": sample(dtype, (0, 3)), "scalar": sample(dtype, ()),
        "long": sample(dtype, (100_003,)), "transposed": sample(dtype, (5, 7)).T,
        "backwards": sample(dtype, (9,))[::-1], "stepped": sample(dtype, (9, 9))[::2, 1::3],
    }  # fmt: skip
    save_file(state, tmp_path / "f")
    loaded = load_file(tmp_path / "f", mmap=mmap)
    assert loaded.keys() == state.keys()
    for name, array in state.items():
        assert same(loaded[name], array), name
        assert loaded[name].flags.aligned
        assert loaded[name].flags.writeable is not mmap


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
    lambda name: name != "__metadata__"
)
ARRAYS = st.one_of(
    npst.arrays(
        st.sampled_from(NATIVE).map(np.dtype).flatmap(
            lambda d: st.sampled_from([d, d.newbyteorder()])
        ),
        npst.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=6),
    ),
)  # fmt: skip


@st.composite
def strided(draw):
    array = draw(ARRAYS)
    for axis in range(array.ndim):
        step = draw(st.sampled_from([1, 1, -1, 2]))
        array = array[(slice(None),) * axis + (slice(None, None, step),)]
    if draw(st.booleans()):
        array = array.transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.booleans()):
        array.flags.writeable = False
    return array


@settings(max_examples=tries(150), deadline=None)
@given(
    st.dictionaries(NAMES, strided(), max_size=6),
    st.dictionaries(NAMES.filter(lambda k: not k.startswith("mlstate.")), NAMES, max_size=4),
)
def test_round_trip(tmp_path_factory, state, metadata):
    path = tmp_path_factory.getbasetemp() / "round-trip.safetensors"
    save_file(state, path, metadata, overwrite=True)
    loaded = load_file(path)
    assert loaded.keys() == state.keys()
    assert all(same(loaded[name], array) for name, array in state.items())
    assert load_metadata(path) == metadata
    again = path.with_suffix(".again")
    shuffled = dict(sorted(state.items(), key=lambda item: hash(item[0])))
    save_file(shuffled, again, dict(reversed(metadata.items())), overwrite=True)
    assert again.read_bytes() == path.read_bytes()


def test_large_strided_arrays_are_packed_piece_by_piece(tmp_path):
    big = np.arange(3 * 500 * 700, dtype=np.int32).reshape(3, 500, 700)
    state = {
        "all": big.transpose(2, 0, 1), "rows": big[:, ::2], "swapped": big.astype(">i4"),
        "column": big[:, :, 5], "broadcast": np.broadcast_to(np.float64(2.5), (300, 1000)),
        "odd": np.ndarray((1000, 3), np.float64, bytes(24_010), 1),
    }  # fmt: skip
    save_file(state, tmp_path / "f")
    loaded = load_file(tmp_path / "f")
    assert all(same(loaded[name], array) for name, array in state.items())


@pytest.mark.parametrize("dtype", ALL)
def test_every_scalar_keeps_its_dtype(dtype, tmp_path):
    scalar = sample(dtype, (1,))[0]
    assert isinstance(scalar, np.generic)
    save_file({"s": scalar}, tmp_path / "f")
    assert same(load_file(tmp_path / "f")["s"], np.asarray(scalar))


@pytest.mark.parametrize("scalar", [np.str_("text"), np.complex128(1), np.datetime64(1, "s")])
def test_scalars_of_other_dtypes_are_refused(scalar, tmp_path):
    with pytest.raises(mlstate.CompatibilityError, match=r"'s'.*not supported"):
        save_file({"s": scalar}, tmp_path / "f")


# ---- other exporters of memory ----


class Interface:
    """An object with nothing but the array interface."""

    def __init__(self, value):
        self.__array_interface__ = value


def test_objects_with_only_the_array_interface_are_arrays(tmp_path):
    array = np.arange(24, dtype=">i4").reshape(4, 6)[::-2, 1::2]
    count = sys.getrefcount(array)
    save_file({"a": Interface(array.__array_interface__)}, tmp_path / "f")
    gc.collect()
    assert same(load_file(tmp_path / "f")["a"], array)
    assert sys.getrefcount(array) == count


class Raising:
    @property
    def __array_interface__(self):
        raise RuntimeError("no memory to show")


BROKEN = {
    "no dict": (Interface([1]), (TypeError, ValueError), "__array_interface__"),
    "empty": (Interface({}), ValueError, "__array_interface__"),
    "bad type": (
        Interface({"shape": (2,), "typestr": "!!", "data": (0, True), "version": 3}),
        TypeError, "not understood",
    ),
    "objects": (
        Interface({**np.array([None]).__array_interface__, "version": 3}),
        (ValueError, mlstate.CompatibilityError), "object",
    ),
    "raises": (Raising(), RuntimeError, "no memory to show"),
    "class": (np.float32, TypeError, "must be a NumPy array or a torch tensor, got type"),
    "nothing": (object(), TypeError, "must be a NumPy array or a torch tensor, got object"),
    "set": ({1}, TypeError, "must be a NumPy array or a torch tensor, got set"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_values_without_array_interface_write_no_file(name, tmp_path):
    value, error, message = BROKEN[name]
    with pytest.raises(error, match=message):
        save_file({"good": np.zeros(2), "bad": value}, tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


def test_refusing_takes_no_references(tmp_path):
    values = [object(), [], np.float32, Interface({})]
    counts = [sys.getrefcount(value) for value in (NotImplemented, *values)]
    for _ in range(50):
        for value in values:
            with pytest.raises((TypeError, ValueError)):
                save_file({"bad": value}, tmp_path / "f")
    del value
    gc.collect()
    assert [sys.getrefcount(value) for value in (NotImplemented, *values)] == counts


class Exporter:
    """An exporter of DLPack that requires gradients."""

    def __init__(self, array, requires_grad):
        self.array, self.requires_grad, self.detached = array, requires_grad, 0

    def detach(self):
        self.detached += 1
        return self.array

    def __dlpack__(self, **options):
        assert self.requires_grad is not True
        return self.array.__dlpack__(**options)


class Truthless:
    def __bool__(self):
        raise RuntimeError("neither")


@pytest.mark.parametrize(("needs", "times"), [(True, 1), (False, 0), (None, 0)])
def test_tensors_requiring_gradients_are_detached(needs, times, tmp_path):
    tensor = Exporter(np.arange(6.0), needs)
    save_file({"t": tensor}, tmp_path / "f")
    assert tensor.detached == times
    assert same(load_file(tmp_path / "f")["t"], tensor.array)


def test_a_failing_question_about_gradients_is_passed_on(tmp_path):
    with pytest.raises(RuntimeError, match="neither"):
        save_file({"t": Exporter(np.arange(6.0), Truthless())}, tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


def test_empty_state_and_str_path(tmp_path):
    save_file({}, str(tmp_path / "f"))
    assert load_file(os.fsencode(tmp_path / "f")) == {}
    assert load_metadata(tmp_path / "f") == {}


def test_payload_is_aligned_and_header_follows_the_format(tmp_path):
    save_file(
        {"a": np.zeros(3, np.int8), "b": np.zeros(3), "c": np.zeros(3, np.int16)}, tmp_path / "f"
    )
    data = (tmp_path / "f").read_bytes()
    header = struct.unpack("<Q", data[:8])[0]
    assert (8 + header) % 64 == 0
    assert data[8:9] == b"{"
    assert list(load_file(tmp_path / "f")) == ["b", "c", "a"]


# ---- classes of states ----


class Mine(mlstate.ModelStateDict):
    """A user-defined class; a file records only its mlstate base class."""


@pytest.mark.parametrize("mmap", [False, True])
def test_files_keep_the_class_and_its_attributes(mmap, tmp_path):
    arrays = {"self": sample(np.float32), "step": sample(np.int8), "model_type": sample(np.bool_)}
    groups = [{"lr": 1e-3, "betas": [0.9, 0.999], "params": ["a", "é"], "maximize": False}]
    states = [
        (mlstate.StateDict(arrays), mlstate.StateDict, {}),
        (arrays, mlstate.StateDict, {}),
        (mlstate.ModelStateDict(arrays), mlstate.ModelStateDict, {"model_type": ""}),
        (
            Mine(arrays, model_type='é"\\\0', layer_count=2**40),
            mlstate.ModelStateDict,
            {"model_type": 'é"\\\0', "layer_count": 2**40},
        ),
        (
            mlstate.OptimizerStateDict(
                arrays, optimizer_type="adamw", step=7, learning_rate=1 / 3, param_groups=groups
            ),
            mlstate.OptimizerStateDict,
            {"step": 7, "learning_rate": 1 / 3, "param_groups": tuple(groups)},
        ),
    ]
    for state, kind, attributes in states:
        save_file(state, tmp_path / "f", {"run": "a"})
        loaded = load_file(tmp_path / "f", mmap=mmap)
        assert type(loaded) is kind and loaded == state
        assert {name: getattr(loaded, name) for name in attributes} == attributes
        assert load_metadata(tmp_path / "f") == {"run": "a"}
    assert loaded.optimizer_type is mlstate.OptimizerType.ADAMW


def test_unserializable_attributes_are_refused_before_writing(tmp_path):
    state = mlstate.OptimizerStateDict(param_groups=[{"lr": sample(np.float32)}])
    with pytest.raises(TypeError, match="param_groups cannot be written as JSON"):
        save_file(state, tmp_path / "f")
    with pytest.raises(ValueError, match=r'"mlstate\.state" is reserved'):
        save_file({}, tmp_path / "f", {"mlstate.state": "{}"})
    assert list(tmp_path.iterdir()) == []


HOSTILE_KINDS = [
    "", "null", "7", "[]", '"model"', "{}", "{", "\0", '{"kind": null}', '{"kind": []}',
    '{"kind": "Model"}', '{"kind": "model", "x": 1}', '{"kind": "model", "self": 1}',
    '{"kind": "model", "step": 1}', '{"kind": "model", "model_type": 1}',
    '{"kind": "model", "layer_count": -1}', '{"kind": "model", "layer_count": 1.5}',
    '{"kind": "optimizer", "step": "1"}',
    '{"kind": "optimizer", "step": -1}', '{"kind": "optimizer", "optimizer_type": "x"}',
    '{"kind": "optimizer", "optimizer_type": []}', '{"kind": "optimizer", "learning_rate": "x"}',
    '{"kind": "optimizer", "learning_rate": null}', '{"kind": "optimizer", "param_groups": 3}',
    '{"kind": "optimizer", "learning_rate": 1' + "0" * 400 + "}",
    '{"kind": "optimizer", "step": 1' + "0" * 5000 + "}",
    '{"kind": "optimizer", "param_groups": [3]}', '{"kind": "optimizer", "param_groups": ["abc"]}',
    '{"kind": "optimizer", "param_groups": ' + "[" * 100_000 + "]" * 100_000 + "}",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE_KINDS, ids=lambda text: text[:50])
def test_invalid_state_metadata_raises_format_error(text, tmp_path):
    peer = pytest.importorskip("safetensors.numpy", reason="writes what save_file would not")
    path = tmp_path / "f"
    peer.save_file({"w": np.ones(2)}, path, metadata={"mlstate.state": text, "run": "a"})
    with pytest.raises(mlstate.FormatError, match=r"'mlstate\.state' does not describe") as caught:
        load_file(path)
    assert caught.value.path == str(path) and len(str(caught.value)) < 1000
    assert load_metadata(path) == {"run": "a"}


# ---- arguments ----


def test_bad_arguments(tmp_path):
    path = tmp_path / "f"
    good = {"a": np.zeros(2)}
    cases = [
        (TypeError, {1: np.zeros(2)}, None, "tensor name"),
        (TypeError, {"a": [1, 2]}, None, "'a' is a list"),
        (TypeError, {"a": 1.5}, None, "'a' is a float"),
        (TypeError, {"a": object()}, None, "tensor 'a'"),
        (mlstate.CompatibilityError, {"a": np.zeros(2, np.complex128)}, None, "tensor 'a'"),
        (mlstate.CompatibilityError, {"a": np.array(["x"])}, None, "tensor 'a'"),
        (mlstate.CompatibilityError, {"a": np.array([None])}, None, "tensor 'a'"),
        (ValueError, {"__metadata__": np.zeros(2)}, None, "reserved"),
        (ValueError, {"\ud800": np.zeros(2)}, None, "surrogate"),
        (TypeError, good, {"k": 1}, "metadata value"),
        (TypeError, good, {1: "k"}, "metadata key"),
        (ValueError, good, {"mlstate.x": ""}, "reserved"),
        (ValueError, good, {"k": "\udfff"}, "surrogate"),
    ]
    for kind, state, metadata, text in cases:
        with pytest.raises(kind, match=text):
            save_file(state, path, metadata)
    with pytest.raises(mlstate.CapacityError, match="100000000"):
        save_file({}, path, {"k": "x" * 100_000_000})
    assert list(tmp_path.iterdir()) == []


def test_save_file_refuses_shards(tmp_path):
    array = np.arange(6.0).reshape(3, 2)
    shard = mlstate.checkpoint.Layout.rows(2).shard(array, 1)
    for state in ({"w": shard}, mlstate.StateDict(w=shard)):
        with pytest.raises(TypeError, match=r"'w' is a Shard, part 1 of 2: .* mlstate\.save"):
            save_file(state, tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


def test_non_mapping_states_are_named(tmp_path):
    for state in ("f", b"f", tmp_path):
        with pytest.raises(TypeError, match="the state comes first, and then the path"):
            save_file(state, {"w": np.ones(1)})
    for state in (3, None, [np.ones(1)]):
        kind = type(state).__name__
        with pytest.raises(TypeError, match=f"mapping of str to arrays, got {kind}$"):
            save_file(state, tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


def test_arrays_keep_their_references(tmp_path):
    array = np.zeros(1000)
    before = sys.getrefcount(array)
    for _ in range(20):
        save_file({"a": array}, tmp_path / "f")
        with pytest.raises(TypeError):
            save_file({"a": array, "b": object()}, tmp_path / "f", overwrite=True)
    assert sys.getrefcount(array) == before


def test_metadata_kept_by_another_writer_is_explained(tmp_path):
    peer = pytest.importorskip("safetensors.numpy", reason="the real peer")
    from safetensors import safe_open

    save_file({"w": np.zeros(3)}, tmp_path / "f")
    with safe_open(tmp_path / "f", "np") as file:
        metadata = file.metadata()
    peer.save_file({"other": np.ones(2)}, tmp_path / "g", metadata=metadata)
    with pytest.raises(mlstate.ChecksumError, match="another program kept"):
        load_file(tmp_path / "g")
    assert load_file(tmp_path / "g", verify=False)["other"].tolist() == [1, 1]


# ---- mapping ----

DESCRIPTORS = pathlib.Path("/proc/self/fd")


def test_headers_of_every_length_are_read(tmp_path):
    """The first read gets whole headers of up to a page; the rest of longer ones follows."""
    path = tmp_path / "a.safetensors"
    array = np.arange(5000, dtype=np.uint8)
    lengths = set()
    for length in (*range(3800, 4200, 8), 4096 * 2, 4096 * 5):
        metadata = {"text": "x" * length}
        mlstate.save_file({"w": array}, path, metadata)
        lengths.add(8 + int.from_bytes(path.read_bytes()[:8], "little"))
        assert same(mlstate.load_file(path)["w"], array)
        assert load_metadata(path) == metadata
    assert {4096 - 64, 4096, 4096 + 64} <= lengths


def test_mapped_arrays_share_the_file_and_outlive_the_dict(tmp_path):
    path = tmp_path / "f"
    save_file({"a": np.arange(1000.0), "b": np.arange(5, dtype=np.int8)}, path)
    loaded = load_file(path, mmap=True)
    a = loaded["a"]
    assert not a.flags.owndata and a.base is not None and a.base is loaded["b"].base
    with pytest.raises(ValueError, match=r"writ|WRIT"):
        a.flags.writeable = True
    # replaces the file; the bytes mapped by `a` do not change
    save_file({"a": np.zeros(2)}, path, overwrite=True)
    del loaded
    gc.collect()
    assert a.sum() == 499_500


def test_mapping_a_file_of_odd_alignment(tmp_path):
    header = b'{"a":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}'
    data = np.array([1.5, 2.5]).tobytes()
    for pad in range(8):
        text = header + b" " * pad
        (tmp_path / "f").write_bytes(struct.pack("<Q", len(text)) + text + data)
        array = load_file(tmp_path / "f", mmap=True)["a"]
        assert array.flags.aligned == (array.ctypes.data % 8 == 0)
        assert (array + 1).tolist() == [2.5, 3.5]


def test_no_descriptor_or_mapping_is_left(tmp_path):
    if not DESCRIPTORS.is_dir():
        pytest.skip("counts descriptors in /proc")
    path = tmp_path / "f"
    save_file({"a": np.arange(10.0)}, path)
    bad = tmp_path / "bad"
    bad.write_bytes(path.read_bytes()[:-1])
    before = sorted(DESCRIPTORS.iterdir())
    for _ in range(10):
        load_file(path), load_file(path, mmap=True), load_metadata(path)
        with pytest.raises(mlstate.FormatError):
            load_file(bad)
        with pytest.raises(OSError, match="folder"):
            save_file({}, path / "f")
    assert sorted(DESCRIPTORS.iterdir()) == before
    assert str(path) not in DESCRIPTORS.with_name("maps").read_text()


# ---- other implementations ----


def test_safetensors_package_reads_our_files(tmp_path):
    peer = pytest.importorskip("safetensors.numpy", reason="the real peer")
    state = {np.dtype(d).name: sample(d) for d in NATIVE}
    state |= {"": sample(np.float32, ()), 'é/日本\n"\\\0': sample(np.int8, (0, 2))}
    state |= {"t": sample(np.float32).T, "swapped": sample(np.float32).astype(">f4")}
    save_file(state, tmp_path / "f", {"who": "me", "ключ": "\x01\t"})
    loaded = peer.load_file(tmp_path / "f")
    assert loaded.keys() == state.keys()
    assert all(same(loaded[name], array) for name, array in state.items())
    from safetensors import safe_open

    with safe_open(tmp_path / "f", "np") as file:
        metadata = file.metadata()
    own_keys = {"mlstate.header.crc32c", "mlstate.blocks.crc32c"}
    assert {k: v for k, v in metadata.items() if k not in own_keys} == {
        "who": "me",
        "ключ": "\x01\t",
    }


def test_reads_files_of_the_safetensors_package(tmp_path):
    peer = pytest.importorskip("safetensors.numpy", reason="the real peer")
    state = {np.dtype(d).name: sample(d) for d in NATIVE}
    state |= {"": sample(np.float32, ()), "é/日本": sample(np.int8, (0, 2))}
    peer.save_file(state, tmp_path / "f", metadata={"ключ": "значение"})
    for mmap in (False, True):
        loaded = load_file(tmp_path / "f", mmap=mmap)
        assert loaded.keys() == state.keys()
        assert all(same(loaded[name], array) for name, array in state.items())
    assert load_metadata(tmp_path / "f") == {"ключ": "значение"}


TORCH_NAMES = [info.name for info in DTYPES if info.name not in PACKED]


@pytest.mark.torch
@pytest.mark.parametrize("name", TORCH_NAMES)
def test_torch_both_ways(name, tmp_path):
    torch = pytest.importorskip("torch", reason="the real peer")
    peer = pytest.importorskip("safetensors.torch", reason="the real peer")
    if not hasattr(torch, name):
        pytest.skip(f"torch has no {name}")
    dtype = getattr(torch, name)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.frombuffer(bytearray(random.Random(1).randbytes(12 * size)), dtype=torch.uint8)
    raw = raw % 2 if name == "bool" else raw
    tensor = raw.view(dtype).reshape(3, 4)
    scalar = tensor[0, 0].clone()

    def bits(t):
        return t.contiguous().reshape(-1).view(torch.uint8).tolist()

    peer.save_file({"t": tensor, "s": scalar}, tmp_path / "theirs")
    loaded = load_file(tmp_path / "theirs")
    assert list(loaded["t"].tobytes()) == bits(tensor)
    assert loaded["s"].shape == ()
    save_file(loaded, tmp_path / "ours")
    back = peer.load_file(tmp_path / "ours")
    assert back["t"].dtype == dtype and bits(back["t"]) == bits(tensor)
    save_file({"t": tensor, "strided": tensor.T, "s": scalar}, tmp_path / "direct")
    back = peer.load_file(tmp_path / "direct")
    assert bits(back["t"]) == bits(tensor) and bits(back["strided"]) == bits(tensor.T)
    assert back["s"].shape == ()


@pytest.mark.torch
def test_parameters_are_saved_as_they_are(tmp_path):
    torch = pytest.importorskip("torch", reason="the real peer")
    layer = torch.nn.Linear(3, 2)
    save_file(dict(layer.named_parameters()), tmp_path / "f")
    loaded = load_file(tmp_path / "f")
    assert loaded["weight"].tolist() == layer.weight.tolist() and layer.weight.requires_grad
    half = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).to(torch.bfloat16).T)
    grown = half * 2  # part of the graph, and not a leaf
    save_file({"half": half, "grown": grown}, tmp_path / "f", overwrite=True)
    loaded = load_file(tmp_path / "f")
    assert loaded["half"].dtype == ml_dtypes.bfloat16
    assert loaded["half"].tolist() == half.tolist() and loaded["grown"].tolist() == grown.tolist()
    with pytest.raises(BufferError, match="meta"):
        save_file({"m": torch.empty(2, device="meta")}, tmp_path / "g")


# ---- replacing files ----


def test_permissions_and_links(tmp_path):
    path, link = tmp_path / "f", tmp_path / "link"
    mask = os.umask(0o027)
    try:
        save_file({}, path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    link.symlink_to("f")
    save_file({"a": np.zeros(1)}, link, overwrite=True)
    assert link.is_symlink() and list(load_file(path)) == ["a"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    with pytest.raises(OSError, match="is a folder, not a file") as caught:
        save_file({}, tmp_path)
    assert caught.value.errno == errno.EEXIST and caught.value.filename == str(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="regular file"):
        save_file({}, tmp_path / "fifo")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "fifo", "link"]


def test_the_mapping_may_change_while_it_is_saved(tmp_path):
    state = {f"t{i}": np.full(50_000, i) for i in range(20)}
    numbers = itertools.cycle(range(20))

    def change():
        i = next(numbers)
        state.pop(f"t{i}", None)
        state[f"t{i}"] = np.full(50_000, i)

    with calling_in_background(change):
        for _ in range(10):
            save_file(dict(state), tmp_path / "f", overwrite=True)
            for name, array in load_file(tmp_path / "f").items():
                assert (array == int(name[1:])).all()


def test_threads_save_to_one_path(tmp_path):
    def work(number):
        for _ in range(10):
            save_file({"a": np.full(20_000, number)}, tmp_path / "f")
            assert len(set(load_file(tmp_path / "f")["a"])) == 1

    run_in_threads(work, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


# ---- faults: the old file stays and no other file remains ----

CHILD = """
import sys, numpy as np
from mlstate.checkpoint import save_file
state = {f"t{i}": np.full(100_000, i, np.float32) for i in range(10)}
print("ready", flush=True)
try:
    save_file(state, sys.argv[1], overwrite=True)
except OSError as error:
    print("errno", error.errno)
else:
    print("done")
"""


def old_file(tmp_path):
    path = tmp_path / "state"
    save_file({"old": np.arange(10)}, path)
    return path


def is_old(path):
    return load_file(path).get("old", np.zeros(0)).tolist() == list(range(10))


def is_new(path):
    loaded = load_file(path)
    return len(loaded) == 10 and all((a == int(n[1:])).all() for n, a in loaded.items())


@pytest.mark.skipif(sys.platform != "linux", reason="the limit's effects differ")
def test_a_limit_on_file_size_writes_short_and_then_fails(tmp_path):
    path = old_file(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, timeout=60,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_001, 300_001)),
    )  # fmt: skip
    assert done.stdout.split()[1:] == ["errno", str(errno.EFBIG)]
    assert is_old(path) and list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def inject():
    """Run the child with strace's fault injection."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    probe = subprocess.run([strace, "-qq", "true"], capture_output=True)
    if probe.returncode != 0:
        pytest.skip("strace may not trace here")

    def run(fault, path):
        calls = fault.split(":")[0]
        return subprocess.run(
            [strace, "-f", "-qq", "-o", os.devnull, "-e", f"trace={calls}", "-e", f"inject={fault}",
             sys.executable, "-c", CHILD, str(path)],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    return run


RENAME = "/^renameat2?$"


@pytest.mark.parametrize(
    ("fault", "number", "expected"),
    [
        ("pwrite64:error=ENOSPC:when=1", errno.ENOSPC, is_old),
        ("pwrite64:error=ENOSPC:when=7", errno.ENOSPC, is_old),
        ("pwrite64:error=EIO:when=3", errno.EIO, is_old),
        ("pwrite64:error=EDQUOT:when=2+", errno.EDQUOT, is_old),
        ("fsync:error=EIO:when=1", errno.EIO, is_old),
        ("fsync:error=ENOSPC:when=1", errno.ENOSPC, is_old),
        (f"{RENAME}:error=EIO:when=1", errno.EIO, is_old),
        (f"{RENAME}:error=EACCES:when=1", errno.EACCES, is_old),
        # interruptions, and a file system that cannot sync folders
        ("pwrite64:error=EINTR:when=1+2", None, is_new),
        ("fsync:error=EINTR:when=1", None, is_new),
        ("fsync:error=EINVAL:when=2", None, is_new),
        # the folder cannot be synced: the error is reported with the file in place
        ("fsync:error=EIO:when=2", errno.EIO, is_new),
    ],
)
def test_a_failing_call_leaves_the_old_file_or_the_new_one(
    inject, fault, number, expected, tmp_path
):
    path = old_file(tmp_path)
    done = inject(fault, path)
    expected_output = ["done"] if number is None else ["errno", str(number)]
    assert done.stdout.split()[1:] == expected_output, done.stderr
    assert expected(path) and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("at", [0, 2**20 - 1, 2**20, 5 * 2**19 + 7, 3 * 2**20 + 11])
def test_damage_is_located_by_the_mebibyte(at, tmp_path):
    path = tmp_path / "state.safetensors"
    data = np.random.default_rng(0).integers(0, 256, 3 * 2**20 + 12, np.uint8)
    mlstate.save_file({"a": np.ones(5), "w": data, "z": data[:0]}, path)
    start = path.stat().st_size - data.size
    flip(path, start + at)
    with pytest.raises(mlstate.ChecksumError) as caught:
        mlstate.load_file(path)
    assert caught.value.name == "w"
    assert caught.value.offset == start + at // 2**20 * 2**20
    damaged = mlstate.load_file(path, verify=False)["w"]
    assert np.flatnonzero(damaged != data).tolist() == [at]


def test_strided_blocks_have_the_checksums_of_packed_ones(tmp_path):
    data = np.random.default_rng(0).standard_normal((1000, 700)).astype(np.float32)
    packed, strided = tmp_path / "packed", tmp_path / "strided"
    mlstate.save_file({"w": data.T.copy()}, packed)
    mlstate.save_file({"w": data.T}, strided)
    assert packed.read_bytes() == strided.read_bytes()
    assert np.array_equal(mlstate.load_file(strided)["w"], data.T)


def test_message_names_tensor_file_and_reason_once(tmp_path):
    name = "transformer.h.11.attention.projection.weight"
    checkpoint = mlstate.save(tmp_path / "c", {name: np.ones(100_000)})
    [shard] = checkpoint.shards()
    flip_shard(tmp_path / "c", shard, 9)
    with pytest.raises(mlstate.ChecksumError) as caught:
        mlstate.load(tmp_path / "c")
    text = str(caught.value)
    assert text.count(name) == 2  # once as the tensor's name, and once in the file name
    assert shard.path in text and text.endswith("damaged")


# ---- arrays that change during a save ----


@pytest.mark.parametrize("count", [50_000, 300_000, 9_000_000])
def test_files_of_arrays_changed_while_saving_load(tmp_path, count):
    state = {
        "flat": np.zeros(count, np.uint8),
        "strided": np.zeros((2, count), np.uint8).T,
        "last": np.zeros(count, np.uint8),
    }

    def change():
        for array in state.values():
            np.add(array, 1, out=array)

    with calling_in_background(change):
        for number in range(4 if count < 1_000_000 else 2):
            path = tmp_path / f"{number}.safetensors"
            save_file(state, path)
            assert load_file(path)["flat"].shape == (count,)
            for options in ({}, {"compress": "zlib"}):
                mlstate.save(tmp_path / "ckpt", state, **options)
                assert not mlstate.verify(tmp_path / "ckpt").problems
                mlstate.load(tmp_path / "ckpt")
