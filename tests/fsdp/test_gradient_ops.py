"""Gradients on other devices, which torch adds: the checks and sums of those in main memory."""

import numpy as np
import pytest

from mlstate import CompatibilityError
from mlstate.fsdp import _gradient_ops
from mlstate.fsdp._gradient_ops import LocalSums, add, norm_partials

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 2, 1)])
def test_device_gradient_of_another_shape_is_refused_before_it_is_added(shape):
    host, device = torch.zeros(2), torch.zeros(2, 2, device="meta")
    gradients = {"host": torch.ones(2), "device": torch.zeros(shape, device="meta")}
    with pytest.raises(CompatibilityError, match="'device': a gradient of shape"):
        add({"host": host, "device": device}, gradients)
    assert not host.any()
    sums = LocalSums()
    sums.add("device", device)
    with pytest.raises(CompatibilityError, match="cannot be added to one of"):
        sums.add("device", gradients["device"])
    with pytest.raises(CompatibilityError, match="of kind NumPy cannot be added to one of torch"):
        sums.add("device", np.zeros((2, 2), np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_squares_of_a_device_include_imaginary_parts(dtype, monkeypatch):
    tensor = torch.tensor([3.0, 4.0, float("inf")]).to(getattr(torch, dtype))
    if tensor.is_complex():
        tensor = (tensor[:2] * (1 + 1j)).conj()
    expected = norm_partials({"w": tensor.resolve_conj()})
    monkeypatch.setattr(_gradient_ops, "on_host", lambda _: False)
    assert norm_partials({"w": tensor}) == expected
