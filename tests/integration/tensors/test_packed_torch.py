"""Packed floats with torch and the safetensors library: both sides read the same bytes."""

import io
import json

import numpy as np
import pytest
from any_format import read_any, write_any
from weight_folder import write_header

import mlstate
from mlstate import StateDict, _core
from mlstate._common.dtypes import name_of, stored_dtype
from mlstate.checkpoint import export_huggingface
from mlstate.errors import CompatibilityError, FormatError
from mlstate.integrations.torch._tensors.state import arrays_of, tensors_of

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="it has float4_e2m1fn_x2")
safetensors = pytest.importorskip("safetensors", reason="the peer that defines the format")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="the peer")

if not hasattr(torch, "float4_e2m1fn_x2"):
    pytest.skip("torch is too old for float4_e2m1fn_x2", allow_module_level=True)

F4 = torch.float4_e2m1fn_x2


def packed(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8).view(F4)


def codes(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


def header_of(path):
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: (e["dtype"], e["shape"]) for name, e in header.items() if name != "__metadata__"}


def model_of():
    return {"w": packed(2, 16), "empty": packed(0, 4), "vector": packed(3), "bias": torch.ones(2)}


def assert_same(actual, expected):
    assert sorted(actual) == sorted(expected)
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape)
        assert codes(actual[name]) == codes(tensor)


# ---- files of either library ----


def test_files_of_the_peer_become_torch_tensors(tmp_path):
    safetensors_torch.save_file(model_of_peer := model_of(), tmp_path / "a.safetensors")
    assert header_of(tmp_path / "a.safetensors")["w"] == ("F4", [2, 32])
    state = mlstate.load_file(tmp_path / "a.safetensors")
    assert state["w"].shape == (2, 16)
    assert_same(state.to_torch(), model_of_peer)


def test_the_peer_reads_files_of_mlstate(tmp_path):
    model = model_of()
    mlstate.save_file(model, tmp_path / "a.safetensors")
    safetensors_torch.save_file(model, tmp_path / "b.safetensors")
    assert header_of(tmp_path / "a.safetensors") == header_of(tmp_path / "b.safetensors")
    assert_same(safetensors_torch.load_file(tmp_path / "a.safetensors"), model)
    export_huggingface(tmp_path / "hf", model)
    assert_same(safetensors_torch.load_file(tmp_path / "hf" / "model.safetensors"), model)


@pytest.mark.parametrize(
    "entry",
    [
        ("F4", (2, 8), 8), ("F4", (2, 3), 3), ("F4", (3, 3), 5), ("F4", (3, 3), 4), ("F4", (), 1),
        ("F4", (0,), 0), ("F4", (0, 3), 0), ("F6_E2M3", (2, 8), 12), ("F6_E3M2", (4, 2), 6),
        ("F6_E3M2", (4, 1), 3), ("F6_E2M3", (3,), 3), ("F8_E8M0", (), 1), ("F8_E4M3FNUZ", (3,), 3),
        ("F8_E5M2FNUZ", (3,), 3), ("C64", (1,), 8), ("BOOL", (2,), 2),
    ],
)  # fmt: skip
def test_both_libraries_accept_the_same_headers(tmp_path, entry):
    path, (dtype, _, nbytes) = tmp_path / "a.safetensors", entry
    write_header(path, {"w": entry}, bytes(nbytes))
    try:
        [(_, tensor)] = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError:
        with pytest.raises(FormatError, match=r"whole bytes|its shape takes"):
            mlstate.load_file(path)
        return
    try:
        array = mlstate.load_file(path)["w"]
    except FormatError as error:  # bytes that no array can hold
        assert "its last axis" in str(error) or "the last axis" in str(error)
        assert (error.name, error.got) == ("w", dtype)
        with pytest.raises(Exception, match=r"divisible by 2|not understood"):
            safetensors_torch.load_file(path)
        return
    assert array.tobytes() == bytes(tensor["data"])
    mlstate.save_file({"w": array}, path, overwrite=True)
    [(_, again)] = safetensors.deserialize(path.read_bytes())
    assert (again["dtype"], again["shape"]) == (tensor["dtype"], tensor["shape"])
    assert again["data"] == tensor["data"]


# ---- tensors ----


def test_arrays_and_tensors_share_memory():
    tensor = packed(2, 16)
    state = StateDict.from_torch({"w": tensor, "t": tensor.t()})
    assert name_of(state["w"].dtype) == "float4_e2m1fn_x2"
    state["w"].view(np.uint8)[0, 0] = 0x5A
    assert codes(tensor)[0][0] == codes(tensors_of(state)["t"])[0][0] == 0x5A
    assert tensors_of(state)["w"].dtype == F4
    other = arrays_of({"w": torch.nn.Parameter(tensor, False)})
    assert np.shares_memory(other["w"], state["w"])


def test_checkpoints_of_tensors_restore_them(tmp_path):
    model = model_of()
    mlstate.save(tmp_path / "ckpt", model)
    assert_same(mlstate.load(tmp_path / "ckpt").model.to_torch(), model)
    assert_same(mlstate.load(tmp_path / "ckpt", device="cpu").model, model)
    target = {name: torch.empty_like(tensor) for name, tensor in model.items()}
    mlstate.load(tmp_path / "ckpt", into={"model": target})
    assert_same(target, model)


def test_pickles_and_files_of_torch_keep_the_dtype(tmp_path):
    model = model_of()
    state = StateDict(arrays_of(model))
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    assert_same(torch.load(stream).to_torch(), model)
    torch.save(model, tmp_path / "a.pt")
    assert_same(read_any(tmp_path / "a.pt")[0].to_torch(), model)
    write_any(tmp_path / "b.pt", state)
    assert_same(torch.load(tmp_path / "b.pt"), model)


def test_dtypes_that_torch_lacks_are_named():
    state = StateDict(
        bytes=np.zeros(3, np.uint8), w=np.zeros((2, 6), stored_dtype("float6_e2m3fn_x4"))
    )
    with pytest.raises(CompatibilityError, match="'w' is float6_e2m3fn_x4, for which torch has"):
        state.to_torch()
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    again = torch.load(stream)
    assert name_of(again["w"].dtype) == "float6_e2m3fn_x4" and again["w"].shape == (2, 6)


def test_norms_refuse_packed_floats():
    with pytest.raises(CompatibilityError, match="'w': float4_e2m1fn_x2 has no norm"):
        _core.norm_partials(["v", "w"], [np.ones(2, np.float32), packed(4)])
