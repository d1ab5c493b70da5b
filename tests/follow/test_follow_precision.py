"""Trainers and followers of different float dtypes: narrowed, widened without loss, checked."""

import ml_dtypes
import numpy as np
import pytest

from mlstate.checkpoint import Layout, Shard
from mlstate.errors import CheckpointWarning, ChecksumError, CompatibilityError
from mlstate.follow import Follower, Publisher

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def model_of(seed=0):
    random = np.random.default_rng(seed)
    model = {name: random.standard_normal((16, 8)).astype("f4") for name in "ab"}
    return model | {"ids": np.arange(5), "half": np.ones(3, np.float16), "wide": np.ones(2)}


def train(model, seed):
    for array in (model["a"], model["b"], model["wide"]):
        array.flat[np.random.default_rng(seed).integers(0, array.size, 3)] = seed + 0.3


def narrow(model, name):
    dtype = DTYPES[name]
    return {
        key: array.astype(dtype) if key in ("a", "b", "wide") else array.copy()
        for key, array in model.items()
    }


def zeros_like(model):
    return {name: np.zeros_like(array) for name, array in model.items()}


def same(left, right):
    return all(left[name].tobytes() == right[name].tobytes() for name in right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", ["all", "sample", "none"])
def test_a_follower_in_the_published_dtype_has_the_rounded_values(tmp_path, dtype, check):
    model = model_of()
    publisher = Publisher(tmp_path / "w", dtype=dtype, anchor_every=3)
    into = zeros_like(narrow(model, dtype))
    follower = Follower(publisher.path, into=into, check=check)
    kinds = set()
    for step in range(8):
        train(model, step)
        before = {name: array.copy() for name, array in model.items()}
        kinds.add(publisher.publish(step, model))
        assert same(model, before)
        assert follower.advance() == step and same(into, narrow(model, dtype))
        follower.verify()
    assert kinds == {"anchor", "delta", "both"}


@pytest.mark.parametrize("target", ["float32", "float64"])
@pytest.mark.parametrize("double_buffer", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wider_follower_has_the_same_values(tmp_path, dtype, target, double_buffer):
    model = model_of()
    publisher = Publisher(tmp_path / "w", dtype=dtype)
    into = zeros_like(narrow(model, dtype))
    into |= {name: np.zeros(model[name].shape, target) for name in ("a", "b", "wide")}
    with pytest.raises(CompatibilityError, match=f"the published dtype is {dtype}, not {target}"):
        publisher.publish(0, model)
        Follower(publisher.path, into=into).advance()
    follower = Follower(publisher.path, into=into, cast=True, double_buffer=double_buffer)
    for step in range(1, 6):
        train(model, step)
        publisher.publish(step, model)
        assert follower.advance() == step
        expected = {n: a.astype(into[n].dtype) for n, a in narrow(model, dtype).items()}
        assert same(follower.state, expected)
        follower.verify()


@pytest.mark.parametrize("target", ["bfloat16", "float16", "int32"])
def test_a_cast_with_a_loss_is_refused(tmp_path, target):
    Publisher(tmp_path / "w").publish(0, {"w": np.ones(4, "f4")})
    dtype = DTYPES.get(target, target)
    follower = Follower(tmp_path / "w", into={"w": np.zeros(4, dtype)}, cast=True)
    with pytest.raises(CompatibilityError, match="the published dtype is float32"):
        follower.advance()


def test_a_changed_element_of_a_wider_follower_is_noticed(tmp_path):
    model = model_of()
    publisher = Publisher(tmp_path / "w", dtype="bf16")
    publisher.publish(0, model)
    into = zeros_like(model)
    follower = Follower(publisher.path, into=into, cast=True)
    follower.advance()
    into["a"][3, 3] = np.nextafter(into["a"][3, 3], np.float32(9))  # rounding would hide it
    train(model, 1)
    publisher.publish(1, model)
    with pytest.warns(CheckpointWarning, match="'a' has CRC32C"):
        assert follower.advance() == 1
    assert same(into, {n: a.astype(into[n].dtype) for n, a in narrow(model, "bfloat16").items()})
    into["b"][0, 0] += 1
    with pytest.raises(ChecksumError, match="'b'"):
        follower.verify()


def test_parts_are_narrowed_and_widened(tmp_path):
    model = {"w": np.arange(64, dtype="f4").reshape(8, 8) + 0.1}
    publisher = Publisher(tmp_path / "w", dtype="bfloat16")
    halves = [np.zeros((4, 8), "f4") for _ in range(2)]
    followers = [
        Follower(
            publisher.path,
            into={"w": Shard(half, layout=Layout.axis(0, 2), index=i, shape=(8, 8))},
            cast=True,
        )
        for i, half in enumerate(halves)
    ]
    for step in range(3):
        model["w"][step, 2] = -step
        publisher.publish(step, model)
        assert [follower.advance() for follower in followers] == [step] * 2
        whole = model["w"].astype(ml_dtypes.bfloat16).astype("f4")
        assert np.array_equal(np.vstack(halves), whole)


def test_published_shards_are_narrowed(tmp_path):
    whole = np.arange(8, dtype="f4") + 0.1
    publisher = Publisher(tmp_path / "w", dtype="bfloat16")
    for step in range(2):
        whole[3] += 5
        publisher.publish(step, {"w": Shard(whole, layout=Layout(), index=0, shape=(8,))})
        into = {"w": np.zeros(8, ml_dtypes.bfloat16)}
        assert Follower(publisher.path, into=into).advance() == step
        assert np.array_equal(into["w"], whole.astype(ml_dtypes.bfloat16))


def test_values_that_the_dtype_does_not_have_are_refused(tmp_path):
    publisher = Publisher(tmp_path / "w", dtype="float16")
    with pytest.raises(CompatibilityError, match="'w': a value is too large for float16"):
        publisher.publish(0, {"w": np.array([1.0, 1e6])})
    values = np.array([np.inf, 2.0, np.nan], "f4")
    publisher.publish(0, {"w": values, "empty": np.zeros((0, 3))})
    into = {"w": np.zeros(3, "f2"), "empty": np.zeros((0, 3), "f2")}
    Follower(publisher.path, into=into).advance()
    assert into["w"].tobytes() == values.astype("f2").tobytes()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "wide", 3])
def test_other_dtypes_are_refused(tmp_path, dtype):
    with pytest.raises(TypeError, match="dtype must be one of"):
        Publisher(tmp_path / "w", dtype=dtype)


@pytest.mark.torch
def test_modules_are_narrowed_and_widened(tmp_path):
    torch = pytest.importorskip("torch", reason="the modules are torch's")
    trainer, rollout, wide = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    rollout.to(torch.bfloat16)
    publisher = Publisher(tmp_path / "w", dtype=torch.bfloat16)
    followers = [Follower(publisher.path, into=rollout)]
    followers.append(Follower(publisher.path, into=wide, cast=True))
    for step in range(3):
        with torch.no_grad():
            trainer.weight[0, step] += 1
        publisher.publish(step, trainer)
        assert trainer.weight.dtype == torch.float32
        for follower in followers:
            assert follower.advance() == step
            follower.verify()
        assert torch.equal(rollout.weight, trainer.weight.bfloat16())
        assert torch.equal(wide.weight, trainer.weight.bfloat16().float())


@pytest.mark.parametrize("codes", [ml_dtypes.float8_e4m3fn, np.int8])
def test_scales_of_quantized_weights_are_not_narrowed(tmp_path, codes):
    model = {"l.weight": np.ones((4, 4), codes), "l.weight_scale": np.full(4, 0.1, np.float32)}
    with pytest.raises(CompatibilityError, match=r"'l.weight' is quantized .* leave dtype= out"):
        Publisher(tmp_path / "w", dtype="bfloat16").publish(0, model)
    publisher = Publisher(tmp_path / "w")
    publisher.publish(0, model)
    into = zeros_like(model)
    Follower(publisher.path, into=into, cast=True).advance()
    assert same(into, model)


@pytest.mark.parametrize("world_size", [2, 4])
def test_parts_of_codes_have_the_scales_of_their_blocks(tmp_path, world_size):
    scales = np.arange(1, 5, dtype=np.float32).reshape(2, 2)
    model = {"w": np.ones((256, 256), ml_dtypes.float8_e4m3fn), "w_scale_inv": scales}
    path = Publisher(tmp_path / "w").path
    Publisher(path).publish(1, model)
    for rank in range(world_size):
        part = {"layout": "rows", "rank": rank, "world_size": world_size}
        rows = scales[rank : rank + 1]  # cut as every tensor; 4 ranks share 2 blocks
        into = {"w": np.zeros((256 // world_size, 256), model["w"].dtype)}
        into["w_scale_inv"] = np.zeros_like(rows)
        if rank < 1 or world_size == 2:
            Follower(path, into=into, **part).advance()
            assert np.array_equal(into["w_scale_inv"], rows)
            continue
        with pytest.raises(CompatibilityError, match="part of 'w' needs other scales"):
            Follower(path, into=into, **part).advance()
        assert not into["w"].any()
        needed = scales[rank // 2 :][:1]
        shard = Shard(np.zeros_like(needed), Layout.rows(2), rank // 2, shape=(2, 2))
        Follower(path, into=into | {"w_scale_inv": shard}, **part).advance()
        assert np.array_equal(shard.array, needed)
