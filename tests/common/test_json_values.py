"""Values that JSON cannot represent, or would change, in metadata and groups."""

import os
from collections import Counter

import numpy as np
import pytest

import mlstate

pytestmark = pytest.mark.skipif(os.name == "nt", reason="checkpoints need POSIX")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ckpt"


HOLDS_ITSELF: dict[str, object] = {}
HOLDS_ITSELF["a"] = [HOLDS_ITSELF]


def nested(levels):
    """Nested lists."""
    return [nested(levels - 1)] if levels > 1 else []


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (
            {"milestones": Counter({2: 1})},
            TypeError,
            r"\['milestones'\] has the key 2, but JSON keys",
        ),
        ([1, {"b": {(1,): 2}}], TypeError, r"\[1\]\['b'\] has the key \(1,\)"),
        (np.float32(1.0), TypeError, r" is a numpy\.float32: give float\(\.\.\.\)"),
        ([np.int64(1)], TypeError, r"\[0\] is a numpy\.int64: give int\(\.\.\.\)"),
        (np.ones(2), TypeError, r" is a numpy\.ndarray: give its tolist\(\)"),
        ({1, 2}, TypeError, r" is a set: give sorted\(\.\.\.\)"),
        (b"x", TypeError, " is a bytes; states= stores other values"),
        (
            {"best": float("inf")},
            ValueError,
            r"\['best'\] is inf, but JSON has only finite numbers",
        ),
        (("x", float("nan")), ValueError, r"\[1\] is nan, but JSON has only finite numbers"),
        (HOLDS_ITSELF, ValueError, "is nested more than 100 levels deep, or contains itself"),
        (nested(100), ValueError, "is nested more than 100 levels deep"),
    ],
)
def test_lossy_metadata_values_are_named(path, value, kind, text):
    where = "metadata" if "nested" in text else r"metadata\['sched'\]"
    with pytest.raises(kind, match=f"JSON values .*: {where}.*{text}"):
        mlstate.save(path, {"w": np.ones(2)}, metadata={"sched": value})
    assert not path.exists()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_are_named(path):
    torch = pytest.importorskip("torch", reason="has nested tensors")
    value = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(TypeError, match=r"metadata\['x'\] is a torch.Tensor; states="):
        mlstate.save(path, {"w": np.ones(2)}, metadata={"x": value})


def test_maximum_nesting_round_trips(path):
    mlstate.save(path, {"w": np.ones(2)}, metadata={"sched": nested(99)})
    assert mlstate.load(path).metadata == {"sched": nested(99)}


@pytest.mark.parametrize(
    ("group", "kind", "text"),
    [
        (
            {"of": {2: 1}},
            TypeError,
            r"param_groups\[0\]\['of'\] has the key 2, but JSON keys must be",
        ),
        ({"lr": np.float32(1)}, TypeError, r"param_groups\[0\]\['lr'\] is a numpy\.float32: give"),
        ({"lr": float("inf")}, ValueError, r"param_groups\[0\]\['lr'\] is inf, but JSON has"),
    ],
)
def test_lossy_param_group_values_are_named(path, group, kind, text):
    optimizer = mlstate.OptimizerStateDict({"w.m": np.ones(2)}, param_groups=[group])
    with pytest.raises(kind, match=text):
        mlstate.save(path, {"w": np.ones(2)}, optimizer)
    assert not path.exists()
