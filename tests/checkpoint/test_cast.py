"""A dtype as the cast= of a load."""

import numpy as np
import pytest
from traced_memory import traced
from weight_folder import write_folder

import mlstate
from mlstate import OptimizerStateDict
from mlstate.checkpoint import CheckpointManager, Shard
from mlstate.errors import CompatibilityError

ml_dtypes = pytest.importorskip("ml_dtypes")
FLOATS = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}


@pytest.fixture
def state():
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=(6, 3)).astype(dtype) for name, dtype in FLOATS.items()}
    values["float8"] = rng.normal(size=(6, 3)).astype(ml_dtypes.float8_e4m3fn)
    values["empty"] = np.zeros((0, 3), np.float32)
    values["scalar"] = np.array(1.5, np.float32)
    others = {
        "int64": np.arange(6),
        "bool": np.ones(6, bool),
        "uint8": np.arange(6, dtype=np.uint8),
        "complex64": np.ones(6, np.complex64),
    }
    return values, others


@pytest.mark.parametrize("name", FLOATS)
def test_floats_of_the_model_have_the_dtype(tmp_path, state, name):
    values, others = state
    mlstate.save(tmp_path / "c", {**values, **others})
    dtype = FLOATS[name]
    for cast in (dtype, np.dtype(dtype), name):
        model = mlstate.load(tmp_path / "c", cast=cast).model
        assert list(model) == list(mlstate.load(tmp_path / "c").model)
        for key, array in values.items():
            assert model[key].dtype == dtype
            np.testing.assert_array_equal(model[key], array.astype(np.float64).astype(dtype))
        for key, array in others.items():
            assert model[key].dtype == array.dtype
            np.testing.assert_array_equal(model[key], array)


def test_optimizers_keep_their_dtypes(tmp_path):
    moments = OptimizerStateDict({"w.m": np.full(3, 1e-20, np.float32), "w.step": np.float32(257)})
    states = {"ema": {"w": np.ones(3, np.float32)}, "second": moments, "tree": [np.ones(2)]}
    mlstate.save(tmp_path / "c", {"w": np.ones(3, np.float32)}, moments, states=states)
    loaded = mlstate.load(tmp_path / "c", cast="bfloat16")
    assert loaded.model["w"].dtype == loaded.states["ema"]["w"].dtype == ml_dtypes.bfloat16
    for optimizer in (loaded.optimizer, loaded.states["second"]):
        assert optimizer["w.step"] == 257
        assert optimizer["w.m"].dtype == np.float32
    assert loaded.states["tree"][0].dtype == np.float64


def test_parts_names_and_renamed_tensors_are_cast(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(6, 2)
    mlstate.save(tmp_path / "c", {"a.w": array, "a.b": array + 1}, layout="rows", sparse=True)
    options = {"rank": 1, "world_size": 3, "layout": "rows", "cast": "float16"}
    model = mlstate.load(tmp_path / "c", names="x.w", rename={"a": "x"}, **options).model
    assert list(model) == ["x.w"]
    assert model["x.w"].dtype == np.float16
    np.testing.assert_array_equal(model["x.w"], array[2:4])


def test_steps_and_weights_of_other_programs_are_cast(tmp_path):
    manager = CheckpointManager(tmp_path / "run")
    manager.save(1, {"w": np.ones(3)})
    assert manager.restore(1, cast="float32").model["w"].dtype == np.float32
    assert manager.restore_latest(cast="float32").model["w"].dtype == np.float32
    write_folder(tmp_path / "hf", {"w": np.ones(3, np.float32)})
    assert mlstate.load(tmp_path / "hf", cast="float64").model["w"].dtype == np.float64


def test_a_cast_needs_memory_for_one_tensor(tmp_path):
    state = {f"w{i}": np.full(1 << 20, i, np.float32) for i in range(40)}  # 4 MiB each
    state["big"] = np.ones(20 << 20, np.float32)
    mlstate.save(tmp_path / "c", state)
    result = sum(array.nbytes for array in state.values()) // 2
    del state
    with traced() as trace:
        model = mlstate.load(tmp_path / "c", cast="float16").model
    assert model["w7"][5] == 7
    assert trace.peak < result + (100 << 20)


@pytest.mark.torch
def test_tensors_on_a_device_are_cast(tmp_path):
    torch = pytest.importorskip("torch")
    mlstate.save(tmp_path / "c", torch.nn.Linear(3, 2))
    model = mlstate.load(tmp_path / "c", cast=torch.bfloat16, device="cpu").model
    assert {tensor.dtype for tensor in model.values()} == {torch.bfloat16}


def test_a_dtype_is_refused_if_it_cannot_be_applied(tmp_path):
    mlstate.save(tmp_path / "c", {"w": np.ones(3)})
    target = {"model": {"w": np.zeros(3, np.float32)}}
    for options, error, text in (
        ({"cast": "float32", "into": target}, ValueError, "pass cast=True"),
        ({"cast": "float32", "mmap": True}, ValueError, "mmap=True returns views"),
        ({"cast": True}, ValueError, "into=, which is not given"),
        *(({"cast": cast}, TypeError, "cast must be")
          for cast in (None, 1, 0, "yes", "", "int8", np.int32, "float8_e4m3fn", "complex64",
                       object(), "f4,f4", [("a", "f4")])),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            mlstate.load(tmp_path / "c", **options)
    assert not target["model"]["w"].any()
    assert mlstate.load(tmp_path / "c", cast=np.False_).model["w"].dtype == np.float64
    mlstate.load(tmp_path / "c", into=target, cast=np.True_)
    assert target["model"]["w"].all()


def test_shards_are_cast(tmp_path):
    mlstate.save(tmp_path / "c", {"w": Shard(np.ones((2, 2), np.float32))}, compress="zlib")
    assert mlstate.load(tmp_path / "c", cast="float16").model["w"].dtype == np.float16


@pytest.mark.parametrize(
    ("short", "name"),
    [("bf16", "bfloat16"), ("BF16", "bfloat16"), ("fp16", "float16"), ("F32", "float32")],
)
def test_short_names_of_floats_are_dtypes(tmp_path, short, name):
    mlstate.save(tmp_path / "c", {"w": np.ones(3)})
    loaded = mlstate.load(tmp_path / "c", cast=short).model
    assert str(loaded["w"].dtype) == name
    assert mlstate.load(tmp_path / "c").model.astype(short).nbytes == loaded.nbytes


@pytest.mark.parametrize(("dtype", "has_hint"), [("float16", True), ("int32", False)])
def test_a_target_of_another_float_dtype_is_shown_the_cast(tmp_path, dtype, has_hint):
    mlstate.save(tmp_path / "c", {"w": np.ones(3, "float32")})
    target = {"w": np.zeros(3, dtype)}
    with pytest.raises(CompatibilityError, match="the target is") as caught:
        mlstate.load(tmp_path / "c", into={"model": target})
    assert str(caught.value).endswith(": cast=True converts floats") == has_hint
    if has_hint:
        assert mlstate.load(tmp_path / "c", into={"model": target}, cast=True)
        assert target["w"].tolist() == [1, 1, 1]


def _repeated(array):
    return np.lib.stride_tricks.as_strided(array[:1], array.shape, (0,))


def _frozen(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (lambda a, x: (a, _frozen(x[3:])), "read-only"),
        (lambda a, x: (a, _repeated(x[3:])), "share memory with one another"),
        (lambda a, x: (x[:3], x[1:4]), r"model\['a'\] and model\['b'\] share memory"),
    ],
)
def test_arrays_that_cannot_be_converted_into_leave_all_unchanged(tmp_path, targets, text):
    mlstate.save(tmp_path / "c", {"a": np.ones(3, np.float32), "b": np.full(3, 2, np.float32)})
    same, other = np.zeros(3, np.float32), np.zeros(6)
    into = dict(zip("ab", targets(same, other), strict=True))
    with pytest.raises(ValueError, match=text):
        mlstate.load(tmp_path / "c", into={"model": into}, cast=True)
    assert not same.any() and not other.any()


def test_tied_arrays_are_converted_once(tmp_path):
    mlstate.save(tmp_path / "c", {"a": np.full(3, 2, np.float16), "b": np.full(3, 2, np.float32)})
    tied = np.zeros(3)
    mlstate.load(tmp_path / "c", into={"model": {"a": tied, "b": tied}}, cast=True)
    assert tied.tolist() == [2, 2, 2]
