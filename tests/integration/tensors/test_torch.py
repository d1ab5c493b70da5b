"""torch tensors as KV caches: dtype, device and autograd are preserved as torch does it."""

import gc
import multiprocessing

import numpy as np
import pytest
from kv_model import assert_same_bits
from thread_team import num_threads

import mlstate
from mlstate import CapacityError, CompatibilityError
from mlstate._common.dtypes import DTYPES
from mlstate.kv import (
    StateTransitionManager,
    compact_kv_state,
    create_attention_size_mask,
    create_decode_mask,
    transition_kv_state,
)

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="torch is the peer to agree with")

FLOATS = ("float16", "bfloat16", "float32", "float64")
ALL = [getattr(torch, info.name) for info in DTYPES if hasattr(torch, info.name)]
UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# torch.jit, which torch's forward mode still uses, warns about itself.
forward_mode = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit._script")


def bits(tensor):
    """A tensor's elements as integers, so that NaNs and 8-bit types can be compared."""
    return tensor.detach().contiguous().view(UNSIGNED[tensor.element_size()])


def assert_same(got, expected):
    assert type(got) is torch.Tensor
    assert (got.dtype, got.device, got.shape) == (expected.dtype, expected.device, expected.shape)
    assert torch.equal(bits(got), bits(expected))


def cache(length=8, dtype=torch.float32, **options):
    return torch.arange(2 * 3 * length * 5).reshape(2, 3, length, 5).to(dtype=dtype, **options)


def random_cache(shape, dtype, seed=0):
    """A cache of random bit patterns."""
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * dtype.itemsize)
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=UNSIGNED[dtype.itemsize])
    return flat.view(dtype).reshape(shape)


def expand(source, length, position=None, pad=0.0, dtype=None):
    """The definition, by torch's indexing."""
    position = source.shape[2] if position is None else position
    shape = (*source.shape[:2], length, source.shape[3])
    target = torch.zeros(shape, dtype=UNSIGNED[(dtype or source.dtype).itemsize])
    target = target.view(dtype or source.dtype)
    if position:
        target[:, :, :position] = source[:, :, :position].detach().to(target.dtype)
    if pad:
        target[:, :, position:] = pad
    return target


@pytest.fixture
def kernels(monkeypatch):
    """Count the moves made by the core."""
    from mlstate import _core

    calls = []
    move = _core.kv_move

    class Counting:
        def __getattr__(self, name):
            return getattr(_core, name)

        def kv_move(self, *arguments):
            calls.append(arguments)
            return move(*arguments)

    monkeypatch.setattr("mlstate.integrations.torch._tensors.kv._core", Counting())
    return calls


# ---- dtypes ----


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_keeps_every_dtype_bit_for_bit(dtype, kernels):
    source = random_cache((2, 3, 6, 5), dtype)
    assert_same(transition_kv_state(source, 9, 4), expand(source, 9, 4))
    assert_same(compact_kv_state(source, 4, 3), expand(source, 4, 3))
    assert len(kernels) == 2, "the core's kernels did the work"


@pytest.mark.parametrize("to", [getattr(torch, name) for name in FLOATS], ids=str)
@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in FLOATS], ids=str)
def test_converts_as_torch_does(dtype, to):
    """Every 16-bit value, and random other values; payloads of NaNs may differ."""
    if dtype.itemsize == 2:
        source = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    else:
        source = random_cache((1 << 17,), dtype)
        ordinary = random_cache((1 << 16,), torch.float16).to(dtype)
        source = torch.cat([source, ordinary, ordinary * 1.0003])
    source = source.reshape(1, 1, -1, 16)
    got = transition_kv_state(source, source.shape[2] + 1, dtype=to)[:, :, :-1]
    expected = source.to(to)
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(bits(got)[~nan], bits(expected)[~nan])


@pytest.mark.parametrize(
    "dtype", [torch.float16, "float16", "half", "f2", np.float16, np.dtype("f2")], ids=repr
)
def test_dtype_is_torchs_or_numpys(dtype):
    assert_same(transition_kv_state(cache(), 12, 5, 0.0, dtype), expand(
        cache(), 12, 5, dtype=torch.float16))  # fmt: skip
    assert compact_kv_state(cache(), 6, 5, dtype).dtype == torch.float16


def test_bfloat16_by_every_name():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has no bfloat16 of its own")
    for dtype in (torch.bfloat16, "bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        assert transition_kv_state(cache(), 12, dtype=dtype).dtype == torch.bfloat16


def test_padding_and_positions():
    for position in (None, 0, 5, 8):
        for pad in (0.0, 2.5, -1.0, float("inf")):
            expected = expand(cache(), 12, position, pad)
            assert_same(transition_kv_state(cache(), 12, position, pad), expected)
    assert transition_kv_state(cache(), 12, 8, -0.0)[:, :, 8:].signbit().all()
    assert transition_kv_state(cache(), np.uint8(200), np.int8(5)).shape == (2, 3, 200, 5)


@pytest.mark.parametrize("shape", [(0, 3, 8, 5), (2, 0, 8, 5), (2, 3, 0, 5), (2, 3, 8, 0)])
def test_empty_tensors(shape):
    source = torch.ones(shape)
    for position in (None, 0):
        assert_same(transition_kv_state(source, 12, position, 2), expand(source, 12, position, 2))
    out = torch.ones((*shape[:2], 12, shape[3]))
    assert_same(transition_kv_state(source, 12, out=out), expand(source, 12))
    assert compact_kv_state(source, 0, 0).shape == (*shape[:2], 0, shape[3])


# ---- memory ----


def test_unchanged_size_returns_the_source():
    source = cache()
    assert transition_kv_state(source, 8) is source
    assert transition_kv_state(source, 8, 8) is source
    needs = cache(dtype=torch.float32).requires_grad_()
    assert transition_kv_state(needs, 8) is needs


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_result_shares_no_memory_with_the_source(needs_grad):
    source = cache().requires_grad_(needs_grad)
    for moved in (
        transition_kv_state(source, 8, 7),
        transition_kv_state(source, 8, dtype=torch.float32),
        transition_kv_state(source, 9),
        compact_kv_state(source, 8, 8),
        compact_kv_state(source, 4, 4),
    ):
        assert moved.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
        assert moved.is_contiguous() and moved.requires_grad is needs_grad


def test_a_result_outlives_its_source():
    source = torch.full((4, 8, 512, 64), 3.0)
    moved = transition_kv_state(source, 1024)
    del source
    gc.collect()
    other = [torch.zeros(4, 8, 512, 64) for _ in range(3)]
    assert moved[:, :, :512].min() == 3 and not any(each.any() for each in other)
    moved += 1
    assert moved.min() == 1


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(1, 3),
        lambda t: t[:, :, ::2],
        lambda t: t[1:, :, 3:, 1:4],
        lambda t: t[:1].expand(4, -1, -1, -1),
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.permute(3, 2, 1, 0),
        lambda t: torch.as_strided(t, (2, 2, 3, 4), (1, 0, 5, 7), 3),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
def test_views_of_any_strides(view, dtype):
    source = view(cache(12, torch.int8).to(dtype))
    length, position = source.shape[2] + 3, source.shape[2] - 1
    assert_same(transition_kv_state(source, length, position), expand(source, length, position))
    out = torch.ones(source.shape[3], length, *source.shape[:2], dtype=dtype).permute(2, 3, 1, 0)
    assert transition_kv_state(source, length, position, out=out) is out
    assert torch.equal(out.contiguous(), expand(source, length, position))


def test_conjugated_and_negated_views():
    """Tensors whose bits are to be read with another sign."""
    complexes = torch.complex(cache(), cache() + 1)
    for source in (complexes.conj(), complexes.conj().imag, torch._neg_view(cache())):
        assert source.is_conj() or source.is_neg()
        expected = expand(source.resolve_conj().resolve_neg(), 12, 5)
        assert_same(transition_kv_state(source, 12, 5), expected)
    out = torch.zeros(2, 3, 12, 5, dtype=torch.complex64).conj().imag
    assert out.is_neg() and transition_kv_state(cache(), 12, 5, 2.0, out=out) is out
    assert torch.equal(out.resolve_neg(), expand(cache(), 12, 5, 2.0))
    with pytest.raises(ValueError, match="negated or conjugated"):
        transition_kv_state(cache().numpy(), 12, out=out)


# ---- out ----


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_out_of_torch_from_torch(to, kernels):
    out = torch.ones(2, 3, 12, 5, dtype=to)
    assert transition_kv_state(cache(), 12, 5, out=out) is out
    assert_same(out, expand(cache(), 12, 5, dtype=to))
    assert compact_kv_state(cache(20), 12, 7, out=out) is out
    assert_same(out, expand(cache(20), 12, 7, dtype=to))
    assert len(kernels) == 2


def test_out_of_either_kind():
    array, tensor = np.ones((2, 3, 12, 5), np.float16), torch.ones(2, 3, 12, 5)
    assert transition_kv_state(cache(), 12, 5, out=array) is array
    assert_same_bits(array, expand(cache(), 12, 5, dtype=torch.float16).numpy())
    assert transition_kv_state(cache(dtype=torch.float16).numpy(), 12, 5, out=tensor) is tensor
    assert_same(tensor, expand(cache(), 12, 5))
    swapped = np.ones((2, 3, 12, 5), ">f4")
    transition_kv_state(cache(), 12, 5, out=swapped)
    np.testing.assert_array_equal(swapped, expand(cache(), 12, 5).numpy())


def test_out_in_bfloat16_from_numpy():
    out = torch.ones(2, 3, 12, 5, dtype=torch.bfloat16)
    transition_kv_state(cache().numpy(), 12, 5, 0.1, out=out)
    assert_same(out, expand(cache(), 12, 5, 0.1, torch.bfloat16))


def test_masks_into_tensors():
    out = torch.ones(1, 1, 6, 6, dtype=torch.bfloat16)
    version = out._version
    assert create_attention_size_mask(6, 2, 0, out=out) is out
    assert out._version > version
    expected = create_attention_size_mask(6, 2, 0, dtype=np.float32)
    assert torch.equal(out.float(), torch.from_numpy(expected))
    row = torch.ones(1, 1, 1, 6)
    assert create_decode_mask(6, 2, 4, out=row) is row
    assert torch.equal(row, torch.from_numpy(expected[:, :, 4:5]))
    with pytest.raises(ValueError, match="autograd"):
        create_decode_mask(6, 2, 4, out=torch.ones(1, 1, 1, 6, requires_grad=True))
    with pytest.raises(ValueError, match="not plain main memory"):
        create_decode_mask(6, 2, 4, out=torch.ones(1, 1, 1, 6, device="meta"))


@pytest.mark.parametrize("of_numpy", [False, True])
def test_writing_to_out_counts_a_version(of_numpy):
    """A backward pass that saved the old content raises instead of using wrong values."""
    source = cache(dtype=torch.float32)
    out = torch.ones(2, 3, 12, 5)
    weight = torch.ones(2, 3, 12, 5, requires_grad=True)
    loss = (weight * out).sum()
    version = out._version
    transition_kv_state(source.numpy() if of_numpy else source, 12, out=out)
    assert out._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float64", "int16", "uint8"])
def test_integers_and_floats_convert(name):
    dtype = getattr(torch, name)
    source = torch.arange(30).reshape(1, 1, 6, 5).int()
    got = transition_kv_state(source, 9, 4, dtype=dtype)
    assert got.dtype == dtype and torch.equal(got[:, :, :4].int(), source[:, :, :4])
    back = transition_kv_state(got, 9, 4, out=torch.ones(1, 1, 9, 5, dtype=torch.int32))
    assert torch.equal(back[:, :, :4], source[:, :, :4]) and not back[:, :, 4:].any()
    with pytest.raises(ValueError, match="out of the range of int8"):
        transition_kv_state(source.to(dtype) * 8, 9, dtype=torch.int8)


class Subclass(torch.Tensor):
    """Only torch's own operations move it, because they may have another meaning."""


@pytest.mark.filterwarnings("ignore:(?s).*Dynamo")
@pytest.mark.parametrize("kind", ["plain", "subclass", "meta", "bfloat16", "compiled", "from int"])
def test_elements_that_share_memory_are_refused_on_every_path(kind):
    move = transition_kv_state
    source, room = torch.ones(2, 3, 8, 5), torch.full((2, 3, 24, 5), 7.0)
    if kind == "subclass":
        source, room = source.as_subclass(Subclass), room.as_subclass(Subclass)
    elif kind == "meta":
        source, room = source.to("meta"), room.to("meta")
    elif kind == "bfloat16":
        room = room.bfloat16()
    elif kind == "from int":
        source = source.int()
    elif kind == "compiled":
        move = torch.compile(transition_kv_state, backend="eager")
    windows = (
        room[:1, :, :12].expand(2, 3, 12, 5),
        room[:, :1, :12].expand(2, 3, 12, 5),
        room.as_strided((2, 3, 12, 5), (60, 60, 5, 1)),
        room.as_strided((2, 3, 12, 5), (180, 60, 3, 1)),
    )
    for out in windows:
        with pytest.raises((ValueError, RuntimeError), match="share memory"):
            move(source, 12, 4, out=out)
    assert kind == "meta" or (room == 7).all()
    move(source, 12, 4, out=room[:, :, 1::2])
    if kind != "meta":
        assert (room[:, :, 1:9:2] == 1).all() and not room[:, :, 9::2].any()
        assert (room[:, :, ::2] == 7).all()


@pytest.mark.parametrize("cls", [torch.Tensor, Subclass])
def test_a_source_that_overlaps_or_interleaves_with_out(cls):
    room = torch.arange(2 * 3 * 16 * 5.0).reshape(2, 3, 16, 5).as_subclass(cls)
    before = room.clone()
    with pytest.raises(ValueError, match="shares memory"):
        compact_kv_state(room[:, :, :8], 8, 6, out=room[:, :, 1:9])
    assert (room == before).all()
    compact_kv_state(room[:, :, ::2], 8, 8, out=room[:, :, 1::2])
    assert (room[:, :, 1::2] == before[:, :, ::2]).all()


def test_a_refused_out_keeps_content_and_version():
    room = torch.arange(2 * 3 * 12 * 5.0).reshape(2, 3, 12, 5)
    good = torch.full((2, 3, 12, 5), 7.0)
    for error, text, source, out, options in (
        (CompatibilityError, "out: ", cache(), torch.full((2, 3, 11, 5), 7.0), {}),
        (CompatibilityError, "does not convert", cache(), good.bool(), {}),
        (CompatibilityError, "asks for float16", cache(), good, {"dtype": torch.float16}),
        (CompatibilityError, "asks for bfloat16", cache(), good, {"dtype": torch.bfloat16}),
        (CompatibilityError, "asks for bfloat16", cache(), good.numpy(), {"dtype": "bfloat16"}),
        (CompatibilityError, "asks for float16", cache(), good.numpy(), {"dtype": torch.half}),
        (ValueError, "shares memory", room[:, :, :8], room, {}),
        (ValueError, "beyond the range", cache(), good.half(), {"pad_value": 1e6}),
        (CapacityError, "outside", cache(), good, {"current_position": 9}),
    ):
        before, version = out.copy() if isinstance(out, np.ndarray) else out.clone(), None
        if isinstance(out, torch.Tensor):
            version = out._version
        with pytest.raises(error, match=text):
            transition_kv_state(source, 12, out=out, **options)
        assert (out == before).all()
        assert version is None or out._version == version


# ---- autograd ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_gradients_match_slicing(dtype):
    moved_source, sliced_source = (cache(dtype=torch.float64).requires_grad_() for _ in range(2))
    weight = torch.rand(2, 3, 12, 5, dtype=torch.float64).to(dtype)
    result = transition_kv_state(moved_source, 12, 5, dtype=dtype)
    assert result.requires_grad and result.dtype == dtype
    assert torch.equal(result.detach(), expand(moved_source, 12, 5, dtype=dtype))
    (result * weight).sum().backward()
    (sliced_source[:, :, :5].to(dtype) * weight[:, :, :5]).sum().backward()
    assert torch.equal(moved_source.grad, sliced_source.grad)
    assert not moved_source.grad[:, :, 5:].any()


@forward_mode
def test_gradients_numerically():
    source = torch.rand(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: transition_kv_state(x, 5, 2, 1.5), (source,))
    assert torch.autograd.gradcheck(lambda x: compact_kv_state(x, 2, 1), (source,))
    assert torch.autograd.gradcheck(
        lambda x: transition_kv_state(x, 5, 2), (source,), check_forward_ad=True
    )


def test_without_gradients_the_kernels_work(kernels):
    source = cache(dtype=torch.float32).requires_grad_()
    with torch.no_grad():
        moved = transition_kv_state(source, 12, 5)
    assert not moved.requires_grad and len(kernels) == 1
    with torch.inference_mode():
        moved = transition_kv_state(source, 12, 5)
        out = torch.ones(2, 3, 12, 5)
        assert out.is_inference() and transition_kv_state(source, 12, 5, out=out) is out
    assert len(kernels) == 3
    assert_same(out.clone(), expand(source, 12, 5))
    assert_same(moved.clone(), expand(source, 12, 5))
    moved = transition_kv_state(torch.nn.Parameter(cache(), requires_grad=False), 12, 5)
    assert type(moved) is torch.Tensor and len(kernels) == 4


def test_out_cannot_be_part_of_a_graph():
    out = torch.ones(2, 3, 12, 5)
    with pytest.raises(ValueError, match="autograd graph: detach"):
        transition_kv_state(cache().requires_grad_(), 12, out=out)
    with pytest.raises(ValueError, match="autograd graph"):
        transition_kv_state(cache().requires_grad_(), 12, out=out.numpy())
    for recorded in (torch.nn.Parameter(out.clone()), out.clone().requires_grad_() * 1):
        for source in (cache(), cache().numpy()):
            with pytest.raises(ValueError, match="autograd graph"):
                transition_kv_state(source, 12, out=recorded)
        assert (recorded == 1).all()
    parameter = torch.nn.Parameter(out.clone())
    with torch.no_grad():
        assert transition_kv_state(cache(), 12, 5, out=parameter) is parameter
    assert_same(parameter.detach(), expand(cache(), 12, 5))
    assert (out == 1).all()


@forward_mode
def test_forward_mode_keeps_tangents():
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(cache(), 2 * cache())
        tangent = forward_ad.unpack_dual(transition_kv_state(dual, 12, 5)).tangent
        assert torch.equal(tangent, 2 * expand(cache(), 12, 5))
        with pytest.raises(ValueError, match="autograd"):
            transition_kv_state(dual, 12, out=torch.ones(2, 3, 12, 5))


@forward_mode
def test_function_transforms():
    def move(source):
        return transition_kv_state(source, 12, 5, 1.0)

    batch = torch.stack([cache(), cache() + 1, cache() * 2])
    expected = torch.stack([expand(cache_item, 12, 5, 1.0) for cache_item in batch])
    assert torch.equal(torch.vmap(move)(batch), expected)
    gradient = torch.func.grad(lambda source: move(source).square().sum())(cache())
    assert torch.equal(gradient, 2 * expand(cache(), 8, 5))
    value, tangent = torch.func.jvp(move, (cache(),), (cache(),))
    assert torch.equal(value, expand(cache(), 12, 5, 1.0))
    assert torch.equal(tangent, expand(cache(), 12, 5))


# ---- other devices and tensors ----


def test_a_meta_tensor_stays_one():
    moved = transition_kv_state(cache(dtype=torch.bfloat16, device="meta"), 12, 5)
    assert moved.device.type == "meta" and moved.dtype == torch.bfloat16
    assert moved.shape == (2, 3, 12, 5)
    moved = compact_kv_state(cache(device="meta"), 4, 3, torch.float16)
    assert moved.shape == (2, 3, 4, 5) and moved.dtype == torch.float16
    out = torch.ones(2, 3, 12, 5, device="meta")
    assert transition_kv_state(cache(device="meta"), 12, 5, out=out) is out
    source = cache(device="meta")
    assert transition_kv_state(source, 8) is source


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu():
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        source = cache(dtype=dtype, device="cuda")
        moved = transition_kv_state(source, 12, 5)
        assert moved.device == source.device
        assert_same(moved.cpu(), expand(source.cpu(), 12, 5))
    out = np.ones((2, 3, 12, 5), np.float32)
    transition_kv_state(cache(device="cuda"), 12, 5, out=out)
    assert_same_bits(out, expand(cache(), 12, 5).numpy())
    with pytest.raises(ValueError, match="not plain main memory"):
        transition_kv_state(cache().numpy(), 12, out=torch.ones(2, 3, 12, 5, device="cuda"))


def test_tensor_subclass_uses_torch_operations(kernels):
    source = cache().as_subclass(Subclass)
    moved = transition_kv_state(source, 12, 5)
    assert type(moved) is Subclass and torch.equal(moved.as_subclass(torch.Tensor), expand(
        cache(), 12, 5))  # fmt: skip
    out = torch.ones(2, 3, 12, 5).as_subclass(Subclass)
    assert transition_kv_state(cache(), 12, 5, out=out) is out
    assert torch.equal(out.as_subclass(torch.Tensor), expand(cache(), 12, 5))
    assert all(not call[0].numel() for call in kernels), "the core only checked"
    array = np.ones((2, 3, 12, 5), np.float32)
    assert transition_kv_state(source, 12, 5, out=array) is array
    assert_same_bits(array, expand(cache(), 12, 5).numpy())


# Sources that the core handles, and sources that torch handles.
WAYS = {
    "kernels": lambda t: t,
    "graph": lambda t: t.requires_grad_(),
    "meta": lambda t: t.to("meta"),
    "subclass": lambda t: t.as_subclass(Subclass),
}


@pytest.mark.parametrize("way", WAYS)
def test_errors_match_the_numpy_path(way):
    source = WAYS[way](cache())
    array = cache().numpy()
    for arguments in (
        (7,), (-1,), (12, -1), (12, 9), (2**64,), (12, 2**64), (12.0,), (12, "5"), (None,),
        (12, 5, "0"), (12, 5, 1e300), (12, 5, 10**400), (12, 5, 0, "no dtype"), (12, 5, 0, 17),
        (12, 5, 0, "bool"), (12, 5, 0, "complex64"), (12, 5, 0, "complex128"), (12, 5, 0, "S3"),
    ):  # fmt: skip
        with pytest.raises(Exception) as of_numpy:
            transition_kv_state(array, *arguments)
        with pytest.raises(Exception) as of_torch:
            transition_kv_state(source, *arguments)
        assert type(of_torch.value) is type(of_numpy.value), arguments
    for arguments in ((4, 5), (4, -1), (12, 9), (-4, 2), (4, 2, "bool")):
        with pytest.raises(Exception) as of_numpy:
            compact_kv_state(array, *arguments)
        with pytest.raises(Exception) as of_torch:
            compact_kv_state(source, *arguments)
        assert type(of_torch.value) is type(of_numpy.value), arguments
    with pytest.raises(CompatibilityError, match="2 to 8 dimensions"):
        transition_kv_state(source[0, 0, 0], 12)


@pytest.mark.parametrize("way", ["meta", "subclass"])
def test_out_errors_match_the_numpy_path(way):
    source = WAYS[way](cache())
    for dtype, shape, options in (
        (torch.float32, (2, 3, 11, 5), {}),
        (torch.int32, (2, 3, 12, 5), {}),
        (torch.float32, (2, 3, 12, 5), {"dtype": torch.float16}),
        (torch.float32, (3, 12, 5), {}),
    ):
        out = WAYS[way](torch.ones(shape, dtype=dtype))
        with pytest.raises(CompatibilityError):
            transition_kv_state(source, 12, out=out, **options)


def test_other_tensors_are_refused():
    with pytest.raises(CompatibilityError):
        transition_kv_state(torch.ones(1, 1, 2, 3, dtype=torch.complex128), 4)
    with pytest.raises(TypeError, match="source_state must be"):
        transition_kv_state(torch, 4)


@pytest.mark.parametrize(
    ("convert", "text"),
    [
        (lambda tensor: tensor.to_sparse(), "sparse_coo"),
        (lambda tensor: tensor.to_sparse_csr(), "sparse_csr"),
        (lambda tensor: tensor.to_mkldnn(), "_mkldnn"),
        (lambda tensor: torch.nested.nested_tensor([tensor]), "a nested tensor"),
        (lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8), "quantized"),
        (lambda _: torch.nn.UninitializedParameter(), "without a shape yet"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of torch, about prototypes
def test_tensors_without_strides_are_refused(convert, text):
    tensor = convert(torch.ones(4, 4))
    for move in (
        lambda: transition_kv_state(tensor, 8),
        lambda: transition_kv_state(tensor, 4, 2, dtype=torch.float16),
        lambda: compact_kv_state(tensor, 2, 1),
        lambda: transition_kv_state(torch.ones(2, 4), 4, out=tensor),
    ):
        with pytest.raises(TypeError, match=f"(source_state|out): the tensor is .*{text}"):
            move()


# ---- with the rest of torch ----


@pytest.mark.timeout(280)
@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiles(fullgraph):
    """Without a graph break, for all callers; `aot_eager` traces but needs no compiler."""

    def step(source):
        larger = transition_kv_state(source * 2, 12, 5, 1.0)
        return compact_kv_state(larger, 6, 5, torch.float16) + 1

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=fullgraph)
    assert torch.equal(compiled(cache()), step(cache()))
    source = cache().requires_grad_()
    compiled(source).sum().backward()
    reference = cache().requires_grad_()
    step(reference).sum().backward()
    assert torch.equal(source.grad, reference.grad)
    torch.compiler.reset()


@pytest.mark.parametrize("way", ["kernels", "graph", "subclass"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 1, 2, 8, 5), -2), ((3, 1, 10, 1, 8), -1), ((8, 3), 0)]
)
def test_any_sequence_axis(way, shape, axis):
    source = WAYS[way](random_cache(shape, torch.int16).to(torch.float32))
    expected = transition_kv_state(source.detach().numpy(), 12, 5, 2.0, seq_axis=axis)
    got = transition_kv_state(source, 12, 5, 2.0, seq_axis=axis)
    assert np.array_equal(got.detach().numpy(), expected)
    out = torch.zeros(expected.shape)
    assert transition_kv_state(source.detach(), 12, 5, 2.0, out=out, seq_axis=axis) is out
    assert np.array_equal(out.numpy(), expected)
    expected = compact_kv_state(source.detach().numpy(), 6, 5, np.float16, seq_axis=axis)
    got = compact_kv_state(source, 6, 5, torch.float16, seq_axis=axis)
    assert np.array_equal(got.detach().numpy(), expected)
    if way == "kernels":  # other tensors do not convert to integers
        compacted = compact_kv_state(source, 6, 5, torch.int32, seq_axis=axis)
        expected = compact_kv_state(source.numpy(), 6, 5, "int32", seq_axis=axis)
        assert np.array_equal(compacted.numpy(), expected)
    for wrong, error in ((len(shape), CompatibilityError), (True, TypeError), (1.0, TypeError)):
        with pytest.raises(error, match="seq_axis"):
            transition_kv_state(source, 12, 5, seq_axis=wrong)


def test_the_manager_takes_tensors():
    manager = StateTransitionManager()
    manager.register_model("small", 8, num_layers=2)
    manager.register_model("large", 12)
    moved = manager.transition(cache(dtype=torch.bfloat16), "small", "large", 5)
    assert_same(moved, expand(cache(dtype=torch.bfloat16), 12, 5))


class Moving(torch.utils.data.Dataset):
    """A dataset whose items are large transitions, which use threads."""

    def __init__(self):
        self.source = torch.ones(8, 2, 2000, 64)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        mlstate.set_num_threads(2)
        return transition_kv_state(self.source, 3000 + i).sum()


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork"
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.timeout(120)
def test_workers_of_a_data_loader():
    """They are forked from a parent that has used its threads."""
    dataset = Moving()
    with num_threads(2):
        expected = [dataset[i].item() for i in range(4)]
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    assert [item.item() for item in loader] == expected
