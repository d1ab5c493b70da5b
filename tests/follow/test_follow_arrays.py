"""What a follower changes, and which arrays it and a publisher refuse by name."""

import shutil
import warnings

import numpy as np
import pytest
from follow_tables import encode_by_tensor
from traced_memory import traced

from mlstate.errors import CheckpointWarning, CompatibilityError, FormatError, StoreError
from mlstate.follow import Follower, Publisher, _publisher


def model_of(step):
    return {"a": np.arange(900.0) + (np.arange(900) == step), "b": np.ones(3)}


def zeros():
    return {"a": np.zeros(900), "b": np.zeros(3)}


def followed(path, **options):
    """A publisher, a follower of its step 0, and the follower's arrays."""
    publisher, into = Publisher(path), zeros()
    follower = Follower(path, into=into, **options)
    publisher.publish(0, model_of(0))
    follower.advance()
    return publisher, follower, into


@pytest.mark.parametrize("check", ["all", "none"])
def test_a_replaced_array_gets_the_version_again(tmp_path, check):
    publisher, follower, into = followed(tmp_path / "w", check=check)
    into["a"] = into["a"].copy()  # moved: the same elements in other memory
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert follower.advance() == 0
    for step in (0, 1):
        into["a"] = np.zeros(900)
        publisher.publish(1, model_of(1)) if step else None
        with pytest.warns(CheckpointWarning, match="'a' was replaced"):
            assert follower.advance() == step
        assert np.array_equal(into["a"], model_of(step)["a"])
    into["c"] = np.zeros(2)
    with (
        pytest.warns(CheckpointWarning, match="'c' was replaced"),
        pytest.raises(CompatibilityError, match="unpublished tensor 'c'"),
    ):
        follower.advance()
    assert follower.version is None


def test_a_warning_that_is_an_error_leaves_the_old_version(tmp_path):
    publisher, follower, into = followed(tmp_path / "w")
    into["a"][7] = 7.5
    publisher.publish(1, model_of(1))
    before = into["a"].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointWarning, match="was loaded whole"):
            follower.advance()
    assert follower.version == 0
    assert np.array_equal(into["a"], before)


def test_arrays_that_cannot_follow_are_named_before_a_change(tmp_path):
    torch = pytest.importorskip("torch")
    publisher = Publisher(tmp_path / "w")
    publisher.publish(0, {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)})
    locked = np.zeros(4, np.float32)
    locked.flags.writeable = False
    for array, reason in (
        (locked, "read-only"),
        (torch.zeros(1).expand(4), "share memory"),
        (torch.eye(4).to_sparse(), "sparse"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "conjugated"),
        (torch.zeros(4, dtype=torch.complex128), "complex128 is not supported"),
        (np.zeros(4, object), "object is not supported"),
        (np.zeros(4, ">f4"), "byte-swapped"),
    ):
        into = {"a": np.zeros(4, np.float32), "b": array}
        with pytest.raises(CompatibilityError, match=f"'b'.*{reason}") as caught:
            Follower(tmp_path / "w", into=into)
        assert caught.value.name == "b"
        if "read" not in reason and "share" not in reason:
            with pytest.raises(CompatibilityError, match=f"'b'.*{reason}"):
                publisher.publish(1, into)
    follower = Follower(tmp_path / "w", into={"a": locked, "b": locked}, double_buffer=True)
    assert follower.advance() == 0


def test_a_restored_backup_of_the_folder_starts_a_new_lineage(tmp_path):
    publisher, into = Publisher(tmp_path / "w"), zeros()
    follower = Follower(tmp_path / "w", into=into)
    for step in range(4):
        publisher.publish(step, model_of(step))
        if step == 1:
            shutil.copytree(tmp_path / "w", tmp_path / "backup")
    follower.advance()
    shutil.rmtree(tmp_path / "w")
    shutil.move(tmp_path / "backup", tmp_path / "w")
    with pytest.warns(CheckpointWarning, match="are not kept"):
        assert follower.advance() == 1
    assert publisher.publish(4, model_of(4)) == "anchor"
    with pytest.warns(CheckpointWarning, match="new lineage"):
        assert follower.advance() == 4
    assert publisher.publish(5, model_of(5)) == "delta"
    assert follower.advance() == 5
    assert np.array_equal(into["a"], model_of(5)["a"])


def test_a_missing_temporary_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    publisher = Publisher(tmp_path / "w", base="disk")
    with pytest.raises(StoreError, match=r"is published, but not copied.*missing"):
        publisher.publish(0, model_of(0))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert publisher.publish(1, model_of(1)) == "anchor"


def test_an_anchor_of_one_tensor_is_dropped_before_its_undo_log_exists(tmp_path):
    Publisher(tmp_path / "w").publish(0, {"w": np.ones(1 << 20, np.float32)})
    follower = Follower(tmp_path / "w", into={"w": np.zeros(1 << 20, np.float32)})
    with traced() as trace:
        follower.advance()
    assert trace.peak < 1.3 * (4 << 20)  # the model, then the overwritten elements


@pytest.mark.parametrize(
    ("member", "value", "reason"),
    [
        ("gaps", np.full(9, 254, np.uint8), "pass the end"),
        ("gaps", np.array([255], np.uint8), "the delta is cut"),
        ("dtype", "V8", "dtype V8 is not supported"),
        ("shape", [-30, -30], "a dimension is negative"),
        ("shape", [1] * 5000, "5000 dimensions"),
        ("part", -1, "does not exist"),
    ],
)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_hostile_version_is_refused_with_the_name_of_the_tensor(
    tmp_path, monkeypatch, member, value, reason, steps
):
    def encode_hostile(changes, rank):
        facts = encode_by_tensor(changes, rank)
        facts["tensors"]["a"][member] = value
        return facts

    publisher, into = Publisher(tmp_path / "w"), zeros()
    follower = Follower(tmp_path / "w", into=into)
    if steps == 2:
        publisher.publish(0, model_of(0))
        follower.advance()
    before = into["a"].copy()
    monkeypatch.setattr(_publisher, "encode_changes", encode_hostile)
    publisher.publish(1, model_of(1))
    reason = reason if member != "gaps" or steps == 2 else "are not a vector"
    with pytest.raises(FormatError, match=f"'a': .*{reason}"):
        follower.advance()
    assert follower.version == (0 if steps == 2 else None)
    assert np.array_equal(into["a"], before)
