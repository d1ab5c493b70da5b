"""StateDict.astype: the bits of NumPy, ml_dtypes and torch, on one thread and on two."""

import ml_dtypes
import numpy as np
import pytest
from thread_team import num_threads

from mlstate import ModelStateDict, OptimizerStateDict, StateDict
from mlstate.checkpoint import Layout, Shard
from mlstate.state import _state_dict

FLOATS = ["float16", "bfloat16", "float32", "float64"]
EIGHT_BITS = [
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]
MANY = 4 << 20  # elements that several threads convert

pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")


@pytest.fixture(params=[1, 2])
def _threads(request):
    with num_threads(request.param):
        yield


def numpy_type(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def bits_of(array):
    """Return the bits, with one NaN for all NaNs."""
    array = np.where(np.isnan(array), array.dtype.type("nan"), array)
    return array.view(f"u{array.dtype.itemsize}")


def numbers(dtype, count):
    rng = np.random.default_rng(3)
    kind = numpy_type(dtype)
    data = rng.integers(0, 256, count * kind.itemsize, dtype=np.uint8).view(kind)
    near = rng.normal(0, 300, count // 2).astype(kind)  # random bits are often huge
    data[: len(near)] = near
    return data


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_have_the_bits_of_numpy_and_ml_dtypes(dtype, target):
    array = numbers(dtype, MANY)
    result = StateDict(w=array).astype(target)["w"]
    assert result.dtype == numpy_type(target)
    assert np.array_equal(bits_of(result), bits_of(array.astype(numpy_type(target))))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_8_bit_floats_are_converted_by_value(dtype, target):
    codes = np.tile(np.arange(256, dtype=np.uint8), 1 << 14).reshape(2, -1)
    array = codes.view(numpy_type(dtype))
    result = StateDict(w=array, t=array.T).astype(target)
    expected = array.astype(np.float32).astype(numpy_type(target))
    assert np.array_equal(bits_of(result["w"]), bits_of(expected))
    assert np.array_equal(bits_of(result["t"]), bits_of(expected.T))


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHT_BITS])
def test_tensors_stay_tensors_with_the_bits_of_torch(torch, dtype, target):
    tensor = torch.from_numpy(numbers(dtype, 999).view(np.uint8)).view(getattr(torch, dtype))
    state = StateDict(w=tensor, parameter=torch.nn.Parameter(torch.ones(2)))
    result = state.astype(getattr(torch, target))
    assert result["w"].dtype == getattr(torch, target)
    assert torch.equal(result["w"].nan_to_num(1.5), tensor.to(result["w"].dtype).nan_to_num(1.5))
    assert str(result["parameter"].dtype) == f"torch.{target}"
    assert torch.is_tensor(state["w"])
    assert state["w"] is tensor
    arrays = StateDict.from_torch({"w": tensor}).astype(target)["w"]
    same = result["w"].view(torch.uint8).numpy().view(arrays.dtype)
    assert np.array_equal(bits_of(arrays), bits_of(same))


def test_values_without_conversion_are_not_copied():
    packed = np.zeros(4, np.dtype("u1", metadata={"mlstate.dtype": "float4_e2m1fn_x2"}))
    untouched = {
        "i": np.arange(3),
        "b": np.ones(2, bool),
        "c": np.ones(2, np.complex64),
        "packed": packed,
        "same": np.ones(2, np.float16),
    }
    result = StateDict(untouched, w=np.ones(3)).astype("float16")
    assert all(result[name] is array for name, array in untouched.items())
    assert list(result) == [*untouched, "w"]
    assert result["w"].dtype == np.float16


def test_class_attributes_ties_and_parts_are_kept():
    tied = np.ones((4, 2))
    part = Shard(np.ones((2, 2)), Layout.rows(2), 1, shape=(4, 2), version=3)
    model = ModelStateDict(a=tied, b=tied, part=part, model_type="llama", layer_count=2)
    result = model.astype(np.float32)
    assert type(result) is ModelStateDict
    assert (result.model_type, result.layer_count) == ("llama", 2)
    assert result["a"] is result["b"]
    assert model["a"] is tied
    shard = result["part"]
    assert (shard.dtype, shard.index, shard.shape, shard.version) == (np.float32, 1, (4, 2), None)
    moments = OptimizerStateDict({"w.m": np.ones(2)}, step=7).astype("bfloat16")
    assert (type(moments), moments.step) == (OptimizerStateDict, 7)


def test_any_strides_byte_order_and_shape():
    array = np.arange(24.0).reshape(4, 6)
    views = {
        "reversed": array[::-1, ::2],
        "swapped": array.astype(">f8"),
        "scalar": np.float64(2.5),
        "point": np.array(3.5),
        "empty": np.zeros((0, 3)),
    }
    for name, result in StateDict(views).astype("float32").items():
        assert result.dtype == np.float32
        assert result.shape == views[name].shape
        assert np.array_equal(result, views[name]), name


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn", "complex64", None, "none", 3])
def test_other_targets_are_refused(dtype):
    with pytest.raises(TypeError, match=r"dtype must be one of the dtypes bfloat16, float16"):
        StateDict(w=np.ones(2)).astype(dtype)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e3m4", "float6_e3m2fn", "float4_e2m1fn"])
def test_floats_that_no_file_can_hold_are_converted_by_value(name, target):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(getattr(ml_dtypes, name))
    codes = 1 << int(name[5])
    array = np.arange(codes, dtype=np.uint8).view(dtype)
    result = StateDict(w=array, point=array[1]).astype(target)
    expected = array.astype(np.float64).astype(numpy_type(target))
    assert result["w"].dtype == expected.dtype
    assert np.array_equal(result["w"].astype(float), expected.astype(float), equal_nan=True)
    assert result["point"] == expected[1]


def test_tied_weights_of_a_module_stay_tied(torch):
    first, last = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    last.weight = first.weight
    state = StateDict(torch.nn.ModuleDict({"first": first, "last": last})).astype("float16")
    assert state["first.weight"] is state["last.weight"]
    memory = np.ones((2, 3))
    state = StateDict(a=memory, b=memory[:], turned=memory.T).astype("float32")
    assert state["a"] is state["b"] and state["turned"].shape == (3, 2)


class Foreign:
    """An array of another library, whose dtypes have the library's name."""

    dtype = "library.core.float32"

    def __init__(self, array):
        self.array, self.shape = array, array.shape
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def test_arrays_of_other_libraries_are_converted_too():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    result = StateDict(w=Foreign(array)).astype("float16")["w"]
    assert result.dtype == np.float16 and (result == array).all()
    mlx = pytest.importorskip("mlx.core")
    weights = mlx.array(array).astype(mlx.bfloat16)
    result = StateDict(w=weights).astype("float32")["w"]
    assert result.dtype == np.float32 and (result == array).all()
    assert StateDict(w=weights).astype("bfloat16")["w"] is weights


def test_memory_is_compared_only_of_values_that_are_converted(monkeypatch):
    compared = []
    monkeypatch.setattr(_state_dict, "memory_key", lambda array: compared.append(array) or 0)
    state = StateDict(same=np.ones(2, np.float16), other=np.ones(2))
    assert state.astype("float16")["same"] is state["same"]
    assert len(compared) == 1 and compared[0] is state["other"]


def test_an_array_of_many_names_is_compared_and_converted_once(monkeypatch):
    compared = []
    monkeypatch.setattr(_state_dict, "memory_key", lambda array: compared.append(array) or 0)
    result = StateDict.fromkeys(["a", "b", "c"], np.ones(2)).astype("float16")
    assert len(compared) == 1
    assert result["a"] is result["b"] is result["c"] and result["c"].dtype == np.float16


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_only_labelled_integers_of_an_integer_dtype_are_converted(names):
    labelled = np.array([0x3F80], np.dtype("u2", metadata={"mlstate.dtype": "bfloat16"}))
    arrays = {"a": labelled, "b": np.array([7], np.uint16)}
    result = StateDict({name: arrays[name] for name in names}).astype("float32")
    assert result["a"].tolist() == [1.0] and result["a"].dtype == np.float32
    assert result["b"] is arrays["b"]
