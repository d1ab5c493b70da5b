"""Wrong arguments of checkpoint functions are refused by name, before anything is written."""

import errno

import numpy as np
import pytest

import mlstate
from mlstate.checkpoint import (
    CheckpointManager,
    Staging,
    TieredState,
    checksum,
    export_huggingface,
    inspect,
    plan_load,
    plan_save,
    prune,
    reshard,
    save_file,
    verify,
)

STATE = {"w": np.ones(3)}


@pytest.fixture
def saved(tmp_path):
    """Return the path of a checkpoint."""
    mlstate.save(tmp_path / "saved", STATE)
    return tmp_path / "saved"


@pytest.mark.parametrize(
    "call",
    [
        lambda saved, new: mlstate.save(new, STATE, progress=5),
        lambda saved, new: CheckpointManager(new).save(1, STATE, progress=5),
        lambda saved, new: export_huggingface(new, STATE, progress=5),
        lambda saved, new: reshard(saved, new, layout="rows", world_size=2, progress=5),
        lambda saved, new: mlstate.load(saved, progress=5),
        lambda saved, new: verify(saved, progress=5),
        lambda saved, new: checksum(saved, progress=5),
    ],
)
def test_a_progress_that_cannot_be_called_creates_no_folder(saved, tmp_path, call):
    with pytest.raises(TypeError, match="progress must be callable, got int"):
        call(saved, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_limit_beyond_64_bits_is_refused_before_a_folder_exists(tmp_path):
    for call in (
        plan_save,
        lambda *state, **limit: mlstate.save(tmp_path / "new", *state, **limit),
    ):
        with pytest.raises(
            ValueError, match="pack_below_bytes must be from 0 to 9223372036854775807"
        ):
            call(STATE, pack_below_bytes=10**30)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("call", [mlstate.load, inspect, verify, plan_load, prune, checksum])
def test_a_path_of_bytes_is_refused_by_name(call):
    with pytest.raises(TypeError, match="of str, got bytes: b"):
        call(b"x")


def test_a_manager_takes_a_step_from_an_array_without_axes(tmp_path):
    manager = CheckpointManager(tmp_path / "steps", keep=1)
    assert manager.save(np.array(3), STATE).step == 3
    manager.save_async(np.array(4), STATE).wait()
    assert manager.steps() == [4]


def test_a_manager_refuses_to_save_without_a_step(tmp_path):
    manager = CheckpointManager(tmp_path / "steps")
    for save in (manager.save, manager.save_async):
        with pytest.raises(TypeError, match="step must be an int, got NoneType"):
            save(None, STATE)
    assert not (tmp_path / "steps").exists()


def test_wrong_values_are_refused_by_the_name_of_their_parameter(saved, tmp_path):
    with pytest.raises(TypeError, match="nbytes must be an int, got bool"):
        Staging(True)
    with pytest.raises(ValueError, match="nbytes must be from 0"):
        Staging(10**30)
    with pytest.raises(TypeError, match="root must be a str, got int"):
        plan_load(saved, root=5)
    with pytest.raises(ValueError, match="world_size must be from 1 to 2147483647"):
        plan_save(STATE, world_size=1 << 40)
    for metadata in ("", [], ()):
        with pytest.raises(TypeError, match="metadata must be a mapping"):
            save_file(STATE, tmp_path / "x.safetensors", metadata)
    assert not (tmp_path / "x.safetensors").exists()


def test_the_name_of_a_file_in_an_error_is_cut_between_characters(tmp_path):
    path = tmp_path / ("a" + "é" * 80 + ".safetensors")
    path.write_bytes(bytes(range(128, 148)))
    with pytest.raises(mlstate.FormatError) as caught:
        mlstate.load_file(path)
    assert str(caught.value).startswith("a" + "é" * 49 + ": ")


def test_a_link_to_itself_is_not_a_missing_file(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(mlstate.StoreError) as caught:
        mlstate.load(tmp_path)
    assert caught.value.errno == errno.ELOOP


def test_a_device_that_torch_does_not_know_is_refused_by_name(tmp_path):
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="device='abacus' is not a device of torch"):
        TieredState({"w": torch.ones(3)}, None, tmp_path / "tiers", device="abacus")
    assert not (tmp_path / "tiers").exists()
