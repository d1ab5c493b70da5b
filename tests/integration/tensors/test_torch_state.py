"""torch's state dicts: memory shared both ways, ties kept, files read with weights_only."""

import io
import pickle
import sys
import warnings

import child
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_team import run_in_threads
from tries import tries

from mlstate import CompatibilityError, ModelStateDict, OptimizerStateDict, StateDict
from mlstate._common.dtypes import DTYPES, EXTENSIONS, PACKED, stored_dtype
from mlstate.integrations.torch import restore_state
from mlstate.integrations.torch._tensors.memory import note_written
from mlstate.integrations.torch._tensors.state import arrays_of, tensors_of
from mlstate.state import load_into

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="torch is the peer to agree with")

NATIVE = [info.name for info in DTYPES if info.in_numpy]
ML_DTYPES = tuple(EXTENSIONS)
ALL = [name for name in (*NATIVE, "complex128", *ML_DTYPES) if hasattr(torch, name)]
SAME_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def numpy_dtype(name):
    if name in ML_DTYPES:
        pytest.importorskip("ml_dtypes", reason="the dtype")
        return stored_dtype(name)
    return np.dtype(name)


def integers(tensor):
    """A tensor as integers, a dtype that NumPy supports."""
    return tensor.detach().view(getattr(torch, SAME_SIZE[tensor.element_size()])).numpy()


def some_tensor(name, shape=(3, 4)):
    size = int(np.prod(shape))
    if name == "bool":
        return (torch.arange(size) % 2 == 0).reshape(shape)
    return torch.arange(size).reshape(shape).to(torch.float32).to(getattr(torch, name))


def some_array(name, shape=(3, 4)):
    return np.arange(int(np.prod(shape))).reshape(shape).astype("f4").astype(numpy_dtype(name))


def assert_same(got, want):
    """The same kind, dtype, shape and bits."""
    assert type(got) is type(want)
    assert (got.dtype, tuple(got.shape)) == (want.dtype, tuple(want.shape))
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want)
    else:
        assert got.tobytes() == want.tobytes()


# ---- tensors as arrays ----


# torch has no assignments for packed dtypes: see test_packed_torch.py.
@pytest.mark.parametrize("name", [name for name in ALL if name not in PACKED])
def test_arrays_share_the_memory_of_tensors_of_every_dtype(name):
    dtype = numpy_dtype(name)
    tensor = some_tensor(name)
    array = StateDict.from_torch({"w": tensor})["w"]
    assert (array.dtype, array.shape) == (dtype, (3, 4))
    assert np.shares_memory(array.view(SAME_SIZE[dtype.itemsize]), integers(tensor))
    array[0, 0] = 1
    tensor[0, 1] = 0
    assert array.tobytes() == integers(tensor).tobytes()


def test_parameters_and_tensors_of_a_graph_are_detached():
    parameter = torch.nn.Parameter(torch.ones(3))
    state = arrays_of({"leaf": parameter, "graph": parameter[:2]})
    state["graph"][0] = 7
    assert parameter.tolist() == [7, 1, 1]
    assert parameter.requires_grad
    assert np.shares_memory(state["leaf"], state["graph"])


def test_layouts_are_kept():
    tensor = torch.arange(24.0).reshape(2, 3, 4)
    state = arrays_of(
        {
            "scalar": torch.tensor(3.0),
            "empty": torch.empty(0, 3, dtype=torch.bfloat16),
            "turned": tensor.permute(2, 0, 1),
            "stepped": tensor[:, ::2],
            "bf16 scalar": torch.tensor(3.0, dtype=torch.bfloat16),
        }
    )
    assert (state["scalar"].shape, state["empty"].shape) == ((), (0, 3))
    assert state["turned"].strides == (4, 48, 16)
    assert state["stepped"].tolist() == tensor[:, ::2].tolist()
    assert state["bf16 scalar"] == 3


def test_an_expanded_tensor_is_a_read_only_array():
    base = torch.ones(3, 1)
    array = arrays_of({"w": base.expand(3, 4)})["w"]
    assert array.strides == (4, 0)
    assert not array.flags.writeable
    assert np.shares_memory(array, base.numpy())
    assert arrays_of({"w": base.expand(3, 1)})["w"].flags.writeable


def test_tied_weights_stay_tied_and_one_tensor_is_one_array():
    weight = torch.ones(2, 2)
    state = arrays_of({"a": weight, "b": weight, "c": weight.T})
    assert state["a"] is state["b"]
    assert np.shares_memory(state["a"], state["c"])


def test_meta_tensors_stay_tensors():
    with torch.device("meta"):
        layer = torch.nn.Linear(2, 3)
    state = StateDict.from_torch(dict(layer.named_parameters()))
    assert state["weight"].device.type == "meta"
    assert not state["weight"].requires_grad


def test_arrays_among_the_tensors_pass():
    array, scalar = np.ones(2), np.float32(3)
    state = arrays_of({"a": array, "s": scalar, "t": torch.ones(1)})
    assert state["a"] is array
    assert state["s"] is scalar


class Tagged(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:.*(deprecated|prototype|beta)")  # by torch, of some kinds
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo.*to_dense"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr.*to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "qint8.*dequant"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested.*unbind"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (lambda: torch.ones(2).as_subclass(Tagged), "Tagged.*plain tensors"),
        (torch.nn.parameter.UninitializedParameter, "Uninitialized.*run the module"),
        (lambda: {"a": 1}, "dict, not a tensor"),
        (lambda: io.BytesIO(), "BytesIO, not a tensor"),
        (lambda: 3, "int, not a tensor"),
    ],
)
def test_sparse_and_quantized_tensors_are_refused_by_name(make, says):
    with pytest.raises(TypeError, match=rf"^'layer\.x' is .*{says}"):
        StateDict.from_torch({"good": torch.ones(1), "layer.x": make()})


def test_distributed_tensors_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed = pytest.importorskip("torch.distributed.tensor", reason="DTensor is public")
    group = torch.distributed
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        dtensor = distributed.DTensor.from_local(torch.ones(2), mesh, [distributed.Replicate()])
        with pytest.raises(TypeError, match=r"'w' is a .*DTensor: store its full_tensor\(\)"):
            arrays_of({"w": dtensor})
    finally:
        group.destroy_process_group()


def test_tensors_without_memory_are_refused():
    def take(tensor):
        with pytest.raises(TypeError, match=r"'w' is .*outside torch\.func"):
            arrays_of({"w": tensor})
        return tensor

    torch.vmap(take)(torch.ones(3, 2))


def test_a_dtype_that_numpy_lacks_is_refused_by_name():
    half = torch.empty(2, dtype=torch.float32).view(torch.complex32)
    with pytest.raises(CompatibilityError, match="'w' is complex32") as caught:
        arrays_of({"w": half})
    assert (caught.value.name, caught.value.got) == ("w", "complex32")


def test_from_torch_accepts_modules():
    layer = torch.nn.Linear(1, 1)
    assert StateDict.from_torch(layer) == StateDict.from_torch(layer.state_dict())
    with pytest.raises(TypeError, match=r"a torch.nn.Module or a mapping .* got int"):
        StateDict.from_torch(3)


@pytest.mark.parametrize("kind", [StateDict, ModelStateDict])
@pytest.mark.parametrize(
    "module", [torch.nn.Linear(1, 1), torch.nn.Sequential(), torch.nn.ModuleDict()]
)
def test_module_is_taken_as_its_state(kind, module):
    state = kind()
    state.update(module)
    assert kind(module) == state == kind(module.state_dict())


def test_optimizer_instead_of_a_mapping_raises():
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    with pytest.raises(TypeError, match=r"OptimizerStateDict\.from_torch\(optimizer, module\)"):
        StateDict(optimizer)


def test_bfloat16_without_ml_dtypes_is_labelled_integers(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    tensor = torch.ones(1, dtype=torch.bfloat16)
    array = arrays_of({"w": tensor})["w"]
    assert array.tolist() == [0x3F80] and array.dtype.metadata == {"mlstate.dtype": "bfloat16"}
    array[0] = 0x4000
    assert tensor.tolist() == [2]


# ---- arrays as tensors ----


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_tensors_share_the_memory_of_arrays_of_every_dtype(name, read_only):
    array = some_array(name)
    array.flags.writeable = not read_only
    tensor = StateDict(w=array).to_torch()["w"]
    assert (tensor.dtype, tensor.shape) == (getattr(torch, name), (3, 4))
    assert np.shares_memory(integers(tensor), array.view(SAME_SIZE[array.itemsize]))
    assert integers(tensor).tobytes() == array.tobytes()
    assert array.flags.writeable == (not read_only)


def test_read_only_arrays_are_shared_without_a_warning_in_any_thread():
    state = StateDict({f"w{i}": np.frombuffer(bytes(64), np.float32) for i in range(50)})
    state["expanded"] = np.broadcast_to(np.float32(2), (3, 3))
    before = list(warnings.filters)

    def work(number):  # a warning is an error here
        for _ in range(20):
            tensors = state.to_torch()
            assert tensors["expanded"].stride() == (0, 0)

    run_in_threads(work, 8)
    assert warnings.filters == before


def test_the_memory_lives_as_long_as_the_tensor():
    tensor = tensors_of({"w": np.arange(1000.0)})["w"]
    frozen = np.arange(1000.0)
    frozen.flags.writeable = False
    other = tensors_of({"w": frozen, "v": frozen[5:]})["v"]
    del frozen
    np.full(1000, -1.0)
    assert tensor.sum() == 499500
    assert other.sum() == 499490


def test_layouts_of_arrays_are_kept():
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    state = {
        "scalar": np.array(3.0),
        "empty": np.empty((0, 3), np.int8),
        "turned": array.transpose(2, 0, 1),
        "number": np.float32(4),
        "long": np.arange(3, dtype=np.longlong),
    }
    tensors = tensors_of(state)
    assert list(tensors) == list(state)
    assert tensors["scalar"].shape == ()
    assert tensors["empty"].shape == (0, 3)
    assert tensors["turned"].stride() == (1, 12, 4)
    assert tensors["turned"].data_ptr() == array.__array_interface__["data"][0]
    assert (tensors["number"].item(), tensors["number"].dtype) == (4, torch.float32)
    assert tensors["long"].dtype == torch.int64


record = np.zeros(4, [("tag", "i1"), ("x", "<f4")])
odd = np.zeros(17, np.uint8)[1:].view(np.float32)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.arange(6.0)[::-1],
        np.arange(6.0).reshape(2, 3)[:, ::-1],
        record["x"],
        odd,
    ],
    ids=["byte order", "backwards", "backwards rows", "field of a record", "odd address"],
)
def test_arrays_torch_cannot_view_are_copied(array):
    tensor = tensors_of({"w": array})["w"]
    assert not np.shares_memory(tensor.numpy(), array)
    assert np.array_equal(tensor.numpy(), array)
    assert tensor.numpy().dtype.isnative


@st.composite
def views(draw):
    """Arrays that share one memory, in any layout, some of them overlapping."""
    dtype = draw(st.sampled_from(["f4", "i2", "u1", "f8", ">f4", "c8"]))
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    base = np.arange(np.prod(shape, dtype=int) * 2).astype(dtype)[: int(np.prod(shape))]
    base = base.reshape(shape)
    state = {}
    for number in range(draw(st.integers(1, 4))):
        steps = [draw(st.sampled_from([1, 1, 2, -1])) for _ in shape]
        starts = [draw(st.integers(0, 1)) if step > 0 else None for step in steps]
        view = base[tuple(slice(a, None, step) for a, step in zip(starts, steps, strict=True))]
        view = view.transpose(draw(st.permutations(range(view.ndim))))
        if draw(st.booleans()):
            view = np.broadcast_to(view, (2, *view.shape))
        elif draw(st.booleans()):
            view = view[...]
            view.flags.writeable = False
        state[f"w{number}"] = view
    return state


@settings(max_examples=tries(150), deadline=None)
@given(views())
def test_any_strides_round_trip_to_torch(arrays):
    tensors = tensors_of(arrays)
    for name, array in arrays.items():
        assert np.array_equal(tensors[name].numpy(), array)
        shared = array.size > 0 and array.dtype.isnative and min(array.strides) >= 0
        assert np.shares_memory(tensors[name].numpy(), array) == shared
    back = arrays_of(tensors)
    through = through_torch(StateDict(arrays))
    for name, array in arrays.items():
        assert np.array_equal(back[name], array)
        assert through[name].dtype == array.dtype
        assert through[name].tobytes() == array.tobytes()


def test_overlapping_arrays_become_tensors_of_one_storage():
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    base.flags.writeable = False
    tensors = tensors_of({"a": base, "b": base[1:, ::2], "same": base, "other": np.ones(3)})
    assert tensors["a"] is tensors["same"]
    assert tensors["a"].untyped_storage()._cdata == tensors["b"].untyped_storage()._cdata
    assert tensors["a"].untyped_storage()._cdata != tensors["other"].untyped_storage()._cdata
    assert np.array_equal(tensors["b"].numpy(), base[1:, ::2])
    assert np.shares_memory(tensors["b"].numpy(), base)


def test_overlapping_arrays_of_odd_distance_share_memory_all_the_same():
    raw = np.zeros(24, np.uint8)
    tensors = tensors_of({"bytes": raw[1:20], "floats": raw[4:16].view(np.float32)})
    tensors["floats"][0] = 1
    assert raw[4:8].view(np.float32) == [1]


def test_copies_are_copies():
    shared = np.arange(4.0)
    state = StateDict(a=shared, b=shared, c=torch.ones(2), d=np.broadcast_to(np.ones(1), (3,)))
    tensors = state.to_torch(copy=True)
    for tensor in tensors.values():
        tensor.fill_(9)
    assert shared.tolist() == [0, 1, 2, 3]
    assert (state["c"] == 1).all()


@pytest.mark.parametrize("copy", [False, True])
def test_one_array_under_two_names_is_one_tensor(copy):
    array, weight, other = np.arange(4.0), torch.ones(2, 2), torch.ones(2, 2)
    swapped = array.astype(">f8")
    state = {"a": array, "b": array, "c": weight, "d": weight, "e": other, "f": swapped}
    tensors = tensors_of({**state, "g": swapped}, copy=copy)
    assert tensors["a"] is tensors["b"] and tensors["c"] is tensors["d"]
    assert tensors["f"] is tensors["g"]
    assert tensors["e"].data_ptr() != tensors["c"].data_ptr()


def test_copies_of_a_modules_tied_weights_are_tied():
    layer, tied = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    tied.weight = layer.weight
    module = torch.nn.Sequential(layer, tied)
    for state in (module.state_dict(), StateDict.from_torch(module)):
        tensors = tensors_of(state, copy=True)
        assert tensors["0.weight"] is tensors["1.weight"]
        assert tensors["0.bias"] is not tensors["1.bias"]
        assert tensors["0.weight"].data_ptr() != layer.weight.data_ptr()


def test_copies_of_different_values_in_one_memory_stay_apart():
    numbers = torch.tensor([1 + 2j, 3j])
    array = np.arange(4, dtype="<i4")
    views = {"a": array, "b": array.view(">i4"), "c": array.reshape(2, 2), "d": array[:2]}
    tensors = tensors_of({**views, "e": numbers, "f": numbers.conj()}, copy=True)
    for name, value in views.items():
        assert tensors[name].tolist() == value.tolist()
    assert tensors["f"].tolist() == [1 - 2j, -3j]
    meta = {name: torch.ones(2, device="meta") for name in "ab"}
    empty = {name: np.ones((0, 2)) for name in "cd"}
    sparse = torch.eye(2).to_sparse()
    tensors = tensors_of({**meta, **empty, "sparse": sparse}, copy=True)
    assert tensors["a"] is not tensors["b"] and tensors["c"] is not tensors["d"]


@pytest.mark.parametrize("dtype", ["U3", "M8[D]", "longdouble", "f4,i4"])
def test_a_dtype_that_torch_lacks_is_refused_by_name(dtype):
    array = np.zeros(2, dtype)
    with pytest.raises(CompatibilityError, match=r"'layer\.w' is .*torch has no dtype") as caught:
        tensors_of({"good": np.ones(1), "layer.w": array})
    assert (caught.value.name, caught.value.got) == ("layer.w", str(array.dtype))


def test_ml_dtypes_int4_is_refused():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="has them")
    with pytest.raises(CompatibilityError, match="int4"):
        tensors_of({"w": np.zeros(2, ml_dtypes.int4)})


def test_tensors_pass_detached_and_other_arrays_are_viewed():
    class Foreign:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__()

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    parameter, foreign = torch.nn.Parameter(torch.ones(2)), torch.zeros(3)
    tensors = tensors_of({"p": parameter, "f": Foreign(foreign)})
    assert not tensors["p"].requires_grad
    assert tensors["p"].data_ptr() == parameter.data_ptr()
    assert tensors["f"].data_ptr() == foreign.data_ptr()


def test_default_device_is_ignored():
    base = np.arange(4.0)
    with torch.device("meta"):
        tensors = tensors_of({"a": base, "b": base[1:]})
    assert [t.device.type for t in tensors.values()] == ["cpu", "cpu"]


# ---- modules ----


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.layers(self.embed(tokens))
        return self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_transformer_round_trips_through_a_state_dict(dtype):
    torch.manual_seed(0)
    module = Encoder().to(dtype).eval()
    state = ModelStateDict.from_torch(module.state_dict())
    assert state.nbytes == sum(t.nbytes for t in module.state_dict().values())
    fresh = Encoder().to(dtype).eval()
    report = fresh.load_state_dict(state.to_torch())
    assert not report.missing_keys
    assert not report.unexpected_keys
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(fresh(tokens), module(tokens))
    pointers = {name: t.data_ptr() for name, t in module.state_dict().items()}
    assert {name: t.data_ptr() for name, t in state.to_torch().items()} == pointers


def test_load_into_updates_a_live_module_and_its_versions():
    module, source = Encoder().eval(), Encoder()
    before = {name: p._version for name, p in module.named_parameters()}
    load_into(StateDict(module.state_dict()), StateDict.from_torch(source.state_dict()))
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name])
    assert all(p._version > before[name] for name, p in module.named_parameters())


def test_a_backward_pass_that_needs_the_old_weights_fails():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    loss = module(torch.ones(1, 2)).sum()
    source = {name: np.zeros(t.shape, np.float32) for name, t in module.state_dict().items()}
    load_into(module.state_dict(), source)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_writes_are_noted_for_every_kind_of_tensor():
    leaf = torch.ones(2, requires_grad=True)
    graph = leaf * 2
    with torch.inference_mode():
        inference = torch.ones(2)
    before = leaf._version, graph._version
    note_written([leaf, graph, inference])
    assert (leaf._version, graph._version) == (before[0] + 1, before[1] + 1)


# ---- files of torch.save ----


def through_torch(thing, **options):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def through_pickle(thing):
    return pickle.loads(pickle.dumps(thing, protocol=2))


WAYS = pytest.mark.parametrize("through", [through_torch, through_pickle])


@WAYS
@pytest.mark.parametrize("name", ALL)
def test_every_dtype_comes_back_from_a_file(name, through):
    array = some_array(name)
    state = StateDict(w=array, turned=array.T.copy().T, tensor=torch.ones(2))
    got = through(state)
    assert type(got) is StateDict
    assert list(got) == ["w", "turned", "tensor"]
    for key in got:
        assert_same(got[key], state[key])
    assert got["turned"].strides == state["turned"].strides
    assert got["w"].flags.writeable


@WAYS
@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "bcd"]),
        np.array([b"a", b"bc"]),
        np.array("2020-01-01", "M8[D]"),
        np.array([(1, 2.5), (3, 4.5)], [("n", "<i2"), ("x", ">f8")]),
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.arange(6.0).reshape(2, 3)[::-1],
        np.ones((2, 2), np.longdouble),
        np.empty((0, 3), ">i4"),
        np.array(5),
        np.float32(2.5),
        np.bool_(True),
        odd,
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_dtypes_missing_in_torch_round_trip(array, through):
    got = through(StateDict(w=array))["w"]
    assert_same(got, array)


@WAYS
def test_four_bit_integers_come_back(through):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="has them")
    array = np.arange(6).reshape(2, 3).astype(ml_dtypes.int4)
    assert_same(through(StateDict(w=array))["w"], array)


@WAYS
def test_attributes_come_back(through):
    model = through(ModelStateDict(w=np.ones(2), model_type="llama", layer_count=3))
    assert (type(model), model.model_type, model.layer_count) == (ModelStateDict, "llama", 3)
    groups = [{"params": ["w"], "lr": 0.5, "betas": [0.9, 0.99], "foreach": None}]
    state = OptimizerStateDict(
        {"w.m": np.ones(2)},
        optimizer_type="adamw",
        step=7,
        learning_rate=0.5,
        param_groups=groups,
    )
    got = through(state)
    assert type(got) is OptimizerStateDict
    assert type(got.optimizer_type) is type(state.optimizer_type)
    assert (got.optimizer_type, got.step, got.learning_rate) == ("adamw", 7, 0.5)
    assert list(got.param_groups) == groups


class Mine(ModelStateDict):
    """A class registered with torch's safe globals."""

    def __init__(self, note):
        super().__init__()
        self.note = note


@WAYS
def test_subclasses_with_attributes_come_back(through):
    state = Mine("kept")
    state["w"] = np.ones(2)
    state.model_type = "mine"
    torch.serialization.add_safe_globals([Mine])
    got = through(state)
    assert (type(got), got.note, got.model_type, list(got)) == (Mine, "kept", "mine", ["w"])


class Unknown(StateDict):
    """A class that is not registered."""


def test_unregistered_subclass_is_refused_by_torch_load():
    with pytest.raises(pickle.UnpicklingError, match="Unknown"):
        through_torch(Unknown())


def test_files_hold_each_byte_once_and_ties_come_back():
    base = np.arange(3 << 18, dtype=np.float32)
    state = StateDict(a=base, same=base, part=base[5:], sparse=np.zeros(1 << 20)[::1024])
    file = io.BytesIO()
    torch.save({"model": state}, file)
    assert len(file.getvalue()) < base.nbytes + (1 << 17)
    file.seek(0)
    got = torch.load(file, weights_only=True)["model"]
    assert got["a"] is got["same"]
    assert np.shares_memory(got["a"], got["part"])
    got["a"][5] = -1
    assert got["part"][0] == -1


def test_tied_weights_of_a_module_come_back_tied():
    got = through_torch(ModelStateDict.from_torch(Encoder().state_dict()))
    assert np.shares_memory(got["embed.weight"], got["head.weight"])


def test_saving_copies_no_array():
    array = np.zeros(1000, np.float32)
    _, (_, _, values, _) = StateDict(w=array).__reduce_ex__(2)
    assert np.shares_memory(values["w"].numpy(), array)


def test_a_file_is_read_to_another_device():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="has 8-bit floats")
    state = StateDict(
        w=np.ones((2, 3)), f8=np.ones(2, ml_dtypes.float8_e5m2), u=np.ones(2, np.uint16)
    )
    got = through_torch(state, map_location="meta")
    assert [t.device.type for t in got.values()] == ["meta"] * 3
    assert [t.dtype for t in got.values()] == [torch.float64, torch.float8_e5m2, torch.uint16]


def test_a_file_is_mapped(tmp_path):
    state = StateDict(w=np.arange(1000.0), v=np.arange(10, dtype=np.uint32))
    torch.save(state, tmp_path / "state.pt")
    got = torch.load(tmp_path / "state.pt", mmap=True, weights_only=True)
    for name in state:
        assert_same(got[name], state[name])


SAVED = """
import io, numpy as np
{imports}
state = mlstate.ModelStateDict(w=np.arange(3.0), model_type="x")
import torch
if {load}:
    print(torch.load({path!r}, weights_only=True).model_type)
else:
    torch.save(state, {path!r})
"""


def run_saved(path, imports, load):
    code = SAVED.format(imports=imports, load=load, path=str(path))
    return child.attempt(code, PYTHONWARNINGS="ignore")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "state.pt"
    assert run_saved(path, "import mlstate", False).returncode == 0
    return path


@pytest.mark.parametrize(
    "imports", ["import torch, mlstate", "import mlstate, mlstate.integrations.torch"]
)
def test_fresh_process_reads_a_saved_state(saved, imports):
    read = run_saved(saved, imports, True)
    assert read.stdout == "x\n", read.stderr
    assert b"_state_dict" not in saved.read_bytes(), "no private names"


def test_unregistered_process_gets_the_import_to_add(tmp_path):
    path = str(tmp_path / "state.pt")
    torch.save(StateDict(w=np.ones(1)), path)
    code = f"import mlstate, torch; torch.load({path!r}, weights_only=True)"
    read = child.attempt(code, PYTHONWARNINGS="ignore")
    assert read.returncode == 1
    assert "mlstate.integrations.torch.restore_state" in read.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((dict, None, {}, {}), "class <class 'dict'>"),
        (("dict", None, {}, {}), "class 'dict'"),
        ((torch.Tensor, None, {}, {}), "not an mlstate class"),
        (
            ("StateDict", None, {"w": torch.zeros(8, dtype=torch.uint8)}, {"w": ("O", (1,))}),
            "dtype 'O'",
        ),
        (
            ("StateDict", None, {"w": torch.zeros(8)}, {"w": ("ml_dtypes.finfo", None)}),
            "dtype 'ml_dtypes.finfo'",
        ),
        (("StateDict", None, {"w": 3}, {}), "int"),
    ],
)
def test_false_file_contents_are_refused(arguments, says):
    if "ml_dtypes" in says:
        pytest.importorskip("ml_dtypes", reason="what the file names")
    with pytest.raises((TypeError, ValueError), match=says):
        restore_state(*arguments)
