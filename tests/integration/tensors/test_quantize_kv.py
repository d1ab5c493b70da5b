"""Quantization in torch operations: the bits of the core, on any device."""

import numpy as np
import pytest
from kv_model import assert_same_bits, dtype_of

from mlstate import CapacityError, _core
from mlstate.kv import CacheEntry, CacheSpec, CacheState

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from mlstate.integrations.torch._tensors import quantize_kv  # noqa: E402

DTYPES = ["float16", "bfloat16", "float32"]
BITS = [2, 3, 4, 5, 6, 8]
SHAPE = (3, 40, 192)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=needs_cuda)]


def contents(dtype, seed=0):
    """Values of many sizes: constant groups, zeros of both signs, ties and subnormal numbers."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(SHAPE) * 10.0 ** rng.integers(-8, 4, (*SHAPE[:2], 1))
    values[:, ::7] = rng.integers(-9, 10, values[:, ::7].shape) / 2
    values[:, 3] = np.copysign(0.0, rng.standard_normal(SHAPE[2]))
    values[:, 5] = 1.5
    values[0, 6] *= 1e-4
    return values.astype(dtype_of(dtype))


def to_torch(array, device):
    """A tensor with the same bits."""
    names = {"bfloat16": torch.bfloat16, "uint32": torch.uint32}
    dtype = names.get(array.dtype.name, getattr(torch, array.dtype.name))
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(dtype).to(device)


def to_numpy(tensor):
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    array = tensor.cpu().view(integers).numpy()
    return array.view(dtype_of(str(tensor.dtype).removeprefix("torch.")))


def by_core(values, bits, group):
    """The arrays that the core writes."""
    words, groups = _core.kv_quantized_lengths(values.shape[-1], bits, group)
    codes = np.zeros((*values.shape[:-1], words), np.uint32)
    scales, biases = (np.zeros((*values.shape[:-1], groups), values.dtype) for _ in range(2))
    _core.kv_quantize(values, codes, scales, biases, bits, group)
    return codes, scales, biases


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_operations_give_the_bits_of_the_core(dtype, bits, device):
    for group in (32, 64, 96) if bits % 4 else (8, 64, 96):
        values = contents(dtype, group)
        parts = by_core(values, bits, group)
        tensors = [quantize_kv.kv_zeros(a.shape, a.dtype.name, to_torch(a, device)) for a in parts]
        tensor = to_torch(values, device)
        quantize_kv.kv_quantize(tensor, *tensors, bits, group)
        for got, expected in zip(tensors, parts, strict=True):
            assert got.device.type == device
            assert_same_bits(to_numpy(got), expected)
        back, expected = torch.zeros_like(tensor), np.zeros_like(values)
        quantize_kv.kv_dequantize(back, *tensors, bits, group)
        _core.kv_dequantize(expected, *parts, bits, group)
        assert_same_bits(to_numpy(back), expected)
        loss = quantize_kv.kv_quantization_loss(tensor, *tensors, bits, group)
        assert loss == pytest.approx(
            _core.kv_quantization_loss(values, *parts, bits, group), rel=1e-11
        )


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """A device whose tensors torch handles: CUDA, and the CPU if the core did not read it."""
    if request.param == "cpu":
        from mlstate.kv import _quantization

        monkeypatch.setattr(
            _quantization, "_is_core_readable", lambda array: not isinstance(array, torch.Tensor)
        )
    return request.param


def state_of(arrays, length):
    spec = CacheSpec(CacheEntry(n, "full", tuple(a.shape), a.dtype) for n, a in arrays.items())
    return CacheState(spec, arrays, length)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_another_device_stay_there(device, dtype, bits):
    values = contents(dtype)
    tensor = to_torch(values, device).requires_grad_()
    state, expected = state_of({"k": tensor}, 30), state_of({"k": values}, 30)
    expected_loss = expected.quantize(bits, 32, capacity=64, report=True)["k"]
    loss = state.quantize(bits, 32, capacity=64, report=True)["k"]
    assert tuple(loss) == pytest.approx(tuple(expected_loss), rel=1e-11)
    for name, array in expected.arrays.items():
        assert state.arrays[name].device.type == device and not state.arrays[name].requires_grad
        assert_same_bits(to_numpy(state.arrays[name]), array)
    state.dequantize(capacity=32)
    expected.dequantize(capacity=32)
    assert_same_bits(to_numpy(state.arrays["k"]), expected.arrays["k"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused(device, bad):
    values = contents("float16")
    values[2, 17, 33] = bad
    state = state_of({"k": to_torch(values, device)}, 40)
    before = state.arrays["k"]
    with pytest.raises(ValueError, match="k: a value is NaN or infinite"):
        state.quantize()
    with pytest.raises(CapacityError):
        state.quantize(capacity=30)
    assert state.arrays["k"] is before
    state.crop(17)
    state.quantize()


def test_an_empty_cache_is_quantized(device):
    state = state_of({"k": to_torch(contents("float32"), device)}, 0)
    assert state.quantize(3, report=True)["k"][:3] == (0.0, 0.0, 0.0)
    assert not to_numpy(state.arrays["k"]).any()
    state.dequantize()
    assert not to_numpy(state.arrays["k"]).any()


def test_a_meta_tensor_is_refused():
    state = state_of({"k": torch.zeros(SHAPE, device="meta")}, 5)
    with pytest.raises(TypeError, match="a tensor on the meta device has no values"):
        state.quantize()


def test_arrays_of_several_devices_are_refused(device):
    state = state_of({"k": to_torch(contents("float32"), device)}, 40)
    state.quantize()
    arrays = {**state.arrays, "k.scales": state.arrays["k.scales"].to("meta")}
    with pytest.raises(TypeError, match=rf"k\.scales is on device meta, but k is on {device}"):
        CacheState(state.spec, arrays, 40).dequantize()
