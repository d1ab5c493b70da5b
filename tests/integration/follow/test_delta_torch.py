"""Deltas of torch tensors: through the core in main memory, by torch's operations elsewhere.

torch's operations give the bits of the core. They run on the CPU here, and on CUDA if there is one.
"""

import numpy as np
import pytest

from mlstate import _core
from mlstate.errors import ChecksumError, CompatibilityError, FormatError
from mlstate.follow._delta import apply_delta, compare_arrays, compose_deltas, roll_back

torch = pytest.importorskip("torch", reason="compares torch tensors")
pytestmark = pytest.mark.torch

DTYPES = ["bfloat16", "float16", "float32", "float64", "int8", "uint8", "bool", "float8_e4m3fn"]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def bits(tensor):
    return tensor.detach().cpu().contiguous().view(torch.uint8)


def random_pair(dtype, shape=(60, 71), density=0.02, device="cpu"):
    """A random tensor, and one with other elements."""
    generator = torch.Generator().manual_seed(5)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, size), generator=generator)
    changed = torch.rand(shape, generator=generator) < density
    pair = [raw.to(torch.uint8), (raw ^ changed[..., None]).to(torch.uint8)]
    return [array.reshape(-1).view(dtype).reshape(shape).to(device) for array in pair]


def assert_applied_and_undone(base, new):
    """Change a tensor by the delta to another one, and back; return the delta."""
    delta, log, before = compare_arrays(base, new), [], base.clone()
    apply_delta(base, delta, log)
    assert torch.equal(bits(base), bits(new))
    roll_back(log)
    assert torch.equal(bits(base), bits(before))
    return delta


@pytest.fixture
def operations():
    from mlstate.integrations.torch._tensors import delta

    return delta


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_in_main_memory_are_compared_and_changed_in_place(name):
    base, new = random_pair(getattr(torch, name))
    version = base._version
    assert_applied_and_undone(base, new)
    assert base._version > version + 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("density", [0.0, 0.0001, 0.01, 1.0])
@pytest.mark.parametrize("name", DTYPES)
def test_operations_of_torch_give_the_streams_of_the_core(operations, name, density, device):
    base, new = random_pair(getattr(torch, name), density=density)
    gaps, values, crc = _core.delta_encode(base, new, True)
    base, new = base.to(device), new.to(device)
    got_gaps, got_values = operations.encode_delta(base, new)
    assert got_gaps.dtype == gaps.dtype
    assert got_gaps.tobytes() == gaps.tobytes()
    assert got_values.tobytes() == values.tobytes()
    assert operations.tensor_crc32c(new) == crc
    log, before = [], base.clone()
    operations.apply_delta(base, gaps, values, log)
    assert torch.equal(bits(base), bits(new))
    [(target, _, old)] = log
    operations.apply_delta(target, gaps, old, None)
    assert torch.equal(bits(base), bits(before))


@pytest.mark.parametrize("device", DEVICES)
def test_strided_tensors_are_numbered_in_c_order(operations, device):
    base, new = (a.to(device).t()[::2, 3:] for a in random_pair(torch.bfloat16))
    gaps, values, crc = _core.delta_encode(base.cpu(), new.cpu(), True)
    got_gaps, got_values = operations.encode_delta(base, new)
    assert (got_gaps.tobytes(), got_values.tobytes()) == (gaps.tobytes(), values.tobytes())
    operations.apply_delta(base, gaps, values, [])
    assert torch.equal(bits(base), bits(new))
    assert operations.tensor_crc32c(base) == crc
    scalar = torch.zeros((), dtype=torch.int32, device=device)
    operations.apply_delta(scalar, np.zeros(1, np.uint8), np.array([7], np.int32), [])
    assert int(scalar) == 7


@pytest.mark.parametrize("device", DEVICES)
def test_operations_of_torch_refuse_damaged_deltas(operations, device):
    base, new = random_pair(torch.float32, device=device)
    gaps, values = operations.encode_delta(base, new)
    before, log = base.clone(), []
    long = np.append(gaps, np.zeros(base.numel(), np.uint8))
    for wrong_gaps, wrong_values, error, match in (
        (gaps[:-1], values, FormatError, "gaps for"),
        (np.append(gaps, np.uint8(255)), values, FormatError, "within a gap"),
        (long, np.resize(values, len(long)), FormatError, "pass the end"),
        (gaps, values.view(np.int32), CompatibilityError, "does not belong"),
    ):
        with pytest.raises(error, match=match):
            operations.apply_delta(base, wrong_gaps, wrong_values, log)
    for other, match in ((new.reshape(-1), "shapes"), (new.view(torch.int32), "dtypes")):
        with pytest.raises(CompatibilityError, match=match):
            operations.encode_delta(base, other)
    assert torch.equal(bits(base), bits(before))
    assert log == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_deltas_on_cuda_go_through_the_public_functions():
    base, new = random_pair(torch.bfloat16, (1024, 512), device="cuda")
    log, before = [], base.clone()
    delta = assert_applied_and_undone(base, new)
    assert delta.crc32c == compare_arrays(base.cpu(), new.cpu()).crc32c
    words = base.view(torch.int16)
    row, column = (words == new.view(torch.int16)).nonzero()[0]  # the delta does not replace it
    words[row, column] ^= 1
    with pytest.raises(ChecksumError):
        apply_delta(base, delta, log)
    roll_back(log)
    apply_delta(before, compose_deltas(delta, delta), log)


def test_parameters_with_gradients_are_changed_without_autograd():
    weight = torch.nn.Parameter(torch.zeros(4, 5))
    new = weight.detach().clone()
    new[2, 3] = 1
    delta = compare_arrays(weight, new)
    apply_delta(weight, delta, [])
    assert torch.equal(weight.detach(), new)
    assert weight.grad_fn is None


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="needs packed floats")
def test_packed_floats_are_compared_by_their_bytes():
    assert_applied_and_undone(
        *(array.view(torch.float4_e2m1fn_x2) for array in random_pair(torch.uint8))
    )
