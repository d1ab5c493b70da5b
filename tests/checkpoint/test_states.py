"""Named states of a checkpoint, and the options of `load` for names, dtypes and devices."""

import json
import random
import threading
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
from checkpoint_model import flip
from rank_threads import outcomes

import mlstate
from mlstate import CompatibilityError, FormatError, OptimizerStateDict, StateDict
from mlstate.checkpoint import CheckpointManager, Layout, Shard, inspect, plan_load, save_async
from mlstate.checkpoint._states import tree
from mlstate.errors import CheckpointWarning
from mlstate.testing import run_ranks


class Loader:
    """An object with a state, such as a data loader; it can refuse one after a part of it."""

    def __init__(self, position=0, refuses=None):
        self.position, self.refuses = position, refuses
        self.order = np.arange(5)

    def state_dict(self):
        return {"position": self.position, "order": self.order}

    def load_state_dict(self, state):
        self.position = state["position"]
        if self.position == self.refuses:
            raise RuntimeError("another dataset")
        self.order = state["order"]


class Model:
    """A model of mlstate's own protocol."""

    def __init__(self, value):
        self.value = value

    def get_state_dict(self):
        return StateDict({"w": np.full(3, self.value)})

    def load_state_dict(self, state):
        self.value = state["w"][0]


def same(a, b):
    """Whether two nested values are equal, with the same types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


VALUES = {
    "none": None,
    "flag": True,
    "count": -3,
    "large": 1 << 200,
    "pi": 3.141592653589793,
    "tiny": 5e-324,
    "nan": float("nan"),
    "inf": float("-inf"),
    "text": 'ünï "code"\n\0',
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"ab"),
    "complex": complex(1, float("inf")),
    "list": [1, [2.5, (3, None)], {}],
    "tuple": (1, (2,), ()),
    "set": {3, 1, "a"},
    "frozenset": frozenset({(1, 2)}),
    "deque": deque([1, 2], maxlen=4),
    "counter": Counter(a=2),
    "ordered": OrderedDict(b=1, a=2),
    "keys": {2: "two", "2": "text", None: 0},
    "dollar": {"$": "array", "key": "x"},
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.float32(2.5),
    "zero_d": np.array(7),
    "same.path": {"a": {"b": np.ones(1)}, "a.b": np.zeros(2)},
}


def test_json_values_keep_their_types(tmp_path):
    mlstate.save(
        tmp_path / "c", states={"all": VALUES, **{f"one {k}": v for k, v in VALUES.items()}}
    )
    states = mlstate.load(tmp_path / "c").states
    assert same(states.pop("all"), VALUES)
    for name, value in VALUES.items():
        assert same(states[f"one {name}"], value), name


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), r"states\['x'\] is a builtins.object"),
        ({"a": [lambda: 0]}, r"states\['x'\]\['a'\]\[0\] is a builtins.function"),
        ({"a": {1j: 0}}, r"states\['x'\]\['a'\] has the key 1j of type complex"),
        ({"a": {("b", float("nan")): 0}}, r"states\['x'\]\['a'\] has the key nan"),
        ({"a": np.array([object()])}, r"states 'x/a': dtype numpy.object_ is not supported"),
        ([np.array([object()])], r"states\['x'\]\[0\] is an array of object"),
        ([np.array(["text"])], r"states\['x'\]\[0\] is an array of <U4"),
        ([np.zeros(1, "i4,f4")], r"states\['x'\]\[0\] is an array of \[\('f0'"),
        (["\ud800"], r"states\['x'\]\[0\]: .*surrogates"),
        (type("N", (tuple,), {"_fields": ()})(), r"states\['x'\] is a "),
    ],
)
def test_unserializable_value_is_named_before_writing(tmp_path, value, where):
    with pytest.raises((TypeError, ValueError), match=where):
        mlstate.save(tmp_path / "c", {"w": np.ones(1)}, states={"good": 1, "x": value})
    assert not (tmp_path / "c").exists()


def test_a_value_that_contains_itself_is_refused(tmp_path):
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match=r"states\['x'\].*contains itself"):
        mlstate.save(tmp_path / "c", states={"x": loop})


@pytest.mark.parametrize("name", ["", "a/b", ".hidden"])
def test_names_are_checked(tmp_path, name):
    with pytest.raises(ValueError, match="names must not be empty"):
        mlstate.save(tmp_path / "c", states={name: 1})
    with pytest.raises(TypeError, match="must be str"):
        mlstate.save(tmp_path / "c", states={1: 1})
    with pytest.raises(TypeError, match="mapping of names"):
        mlstate.save(tmp_path / "c", states=[1])
    with pytest.raises(ValueError, match="nothing to save"):
        mlstate.save(tmp_path / "c")


def generators():
    return {
        "python": random.Random(1),
        "pcg": np.random.default_rng(2),
        "mt": np.random.Generator(np.random.MT19937(3)),
        "philox": np.random.Philox(4),
        "sfc": np.random.Generator(np.random.SFC64(5)),
        "legacy": np.random.RandomState(6),
    }


def draw(rngs):
    draws = []
    for rng in rngs.values():
        if isinstance(rng, np.random.BitGenerator):
            rng = np.random.Generator(rng)
        normal = rng.gauss if isinstance(rng, random.Random) else rng.normal
        draws.append([normal(0, 1) for _ in range(3)])  # an odd number, so that one is kept
    return draws


@pytest.mark.parametrize("nested", [False, True])
def test_generators_continue_with_the_same_numbers(tmp_path, nested):
    rngs = generators()
    draw(rngs)
    mlstate.save(tmp_path / "c", states={"rng": rngs} if nested else rngs)
    expected = draw(rngs)
    other = generators()
    mlstate.load(tmp_path / "c", into={"states": {"rng": other} if nested else other})
    assert draw(other) == expected


def test_generators_spawn_the_same_children_after_a_load(tmp_path):
    rng = np.random.default_rng([5, 1 << 100])
    rng.spawn(3)
    mlstate.save(tmp_path / "c", states={"rng": rng, "bits": rng.bit_generator})
    expected = [child.random() for child in rng.spawn(2)]
    own, bits = np.random.default_rng(9), np.random.PCG64(9)
    mlstate.load(tmp_path / "c", into={"states": {"rng": own, "bits": bits}})
    assert [child.random() for child in own.spawn(2)] == expected
    assert [np.random.Generator(child).random() for child in bits.spawn(2)] == expected
    assert mlstate.load(tmp_path / "c").states["bits"].keys() == bits.state.keys()
    bits.seed_seq.spawn(1)
    before = bits.state
    target = {"rng": random.Random(1), "bits": bits}
    with pytest.raises(CompatibilityError):
        mlstate.load(tmp_path / "c", into={"states": target})
    assert bits.state == before and bits.seed_seq.n_children_spawned == 6


def test_the_shared_generators_are_named_by_their_modules(tmp_path):
    before = random.getstate(), np.random.get_state()
    try:
        mlstate.save(tmp_path / "c", states={"a": random, "b": np.random})
        expected = random.random(), np.random.rand()
        mlstate.load(tmp_path / "c", into={"states": {"a": random, "b": np.random}})
        assert (random.random(), np.random.rand()) == expected
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def test_without_a_target_a_generator_is_its_state(tmp_path):
    rng = random.Random(1)
    mlstate.save(tmp_path / "c", states={"rng": rng})
    other = random.Random()
    other.setstate(mlstate.load(tmp_path / "c").states["rng"])
    assert other.random() == rng.random()


def test_the_state_of_another_generator_is_refused(tmp_path):
    mlstate.save(
        tmp_path / "c", {"w": np.ones(2)}, states={"rng": np.random.default_rng(1), "n": 1}
    )
    target = {"w": np.zeros(2)}
    for other, text in (
        (random.Random(1), "saved numpy, expected python"),
        (np.random.Generator(np.random.MT19937(1)), "saved PCG64, expected MT19937"),
    ):
        with pytest.raises(CompatibilityError, match=rf"states\['rng'\].*{text}"):
            mlstate.load(tmp_path / "c", into={"model": target, "states": {"rng": other}})
    with pytest.raises(
        CompatibilityError, match=r"states\['n'\]: the target is the state of a gen"
    ):
        mlstate.load(tmp_path / "c", into={"states": {"n": random.Random(1)}})
    assert not target["w"].any()


def test_models_and_optimizers_are_states_of_tensors(tmp_path):
    critic = mlstate.ModelStateDict({"h.0.w": np.ones((4, 2))}, layer_count=1)
    optimizer = OptimizerStateDict({"h.0.w.m": np.full((4, 2), 2.0)}, step=7)
    states = {"critic": critic, "critic_opt": optimizer, "ema": {"w": np.zeros(3)}, "own": Model(4)}
    saved = mlstate.save(tmp_path / "c", states=states)
    assert {name: kind["kind"] for name, kind in saved.states.items()} == {
        "critic": "model", "critic_opt": "optimizer", "ema": "state", "own": "state",
    }  # fmt: skip
    named_states = mlstate.load(tmp_path / "c").states
    assert named_states["critic"].layer_count == 1 and named_states["critic_opt"].step == 7
    assert (
        named_states["critic_opt"].get_state("h.0.w")["m"].tolist() == np.full((4, 2), 2.0).tolist()
    )
    model, target = Model(0), {"h.0.w": np.zeros((4, 2))}
    loaded = mlstate.load(tmp_path / "c", into={"states": {"critic": target, "own": model}})
    assert loaded.states == {"critic": target, "own": model}
    assert target["h.0.w"].all() and model.value == 4


def test_a_part_of_a_named_model_is_loaded_as_of_the_model(tmp_path):
    weights = {"w": np.arange(8.0).reshape(4, 2)}
    mlstate.save(tmp_path / "c", weights, states={"ema": weights, "n": [1]})
    loaded = mlstate.load(tmp_path / "c", rank=1, world_size=2, layout="rows")
    assert np.array_equal(loaded.states["ema"]["w"], weights["w"][2:])
    assert loaded.states["n"] == [1]
    assert mlstate.load(tmp_path / "c", names="w").states == {}
    mapped = mlstate.load(tmp_path / "c", mmap=True).states
    assert not mapped["ema"]["w"].flags.writeable and mapped["n"] == [1]


def test_objects_and_arrays_are_restored_together_or_not_at_all(tmp_path):
    rng, first, second = random.Random(1), Loader(5), Loader(6)
    states = {"first": first, "rng": rng, "second": second}
    mlstate.save(tmp_path / "c", {"w": np.ones(2)}, states=states)
    target, other = {"w": np.zeros(2)}, random.Random(2)
    before = other.getstate()
    a, b = Loader(1), Loader(2, refuses=6)
    into = {"model": target, "states": {"first": a, "rng": other, "second": b}}
    with pytest.raises(CompatibilityError, match=r"states\['second'\].*another dataset") as caught:
        mlstate.load(tmp_path / "c", into=into)
    assert caught.value.name == "states['second']"
    assert (a.position, b.position, target["w"].tolist()) == (1, 2, [0, 0])
    assert other.getstate() == before
    b.refuses = None
    mlstate.load(tmp_path / "c", into=into)
    assert (a.position, b.position, target["w"].tolist()) == (5, 6, [1, 1])


def test_a_damaged_tensor_leaves_the_objects_unchanged(tmp_path):
    mlstate.save(
        tmp_path / "c", {"w": np.ones(2000)}, states={"loader": Loader(5)}, pack_below_bytes=0
    )
    [file] = (tmp_path / "c" / "params").iterdir()
    flip(file, -1)
    loader, target = Loader(1), {"w": np.zeros(2000)}
    for verify in (True, "first"):
        with pytest.raises(mlstate.ChecksumError):
            mlstate.load(
                tmp_path / "c",
                into={"model": target, "states": {"loader": loader}},
                verify=verify,
            )
        assert loader.position == 1


def test_damage_in_a_nested_value_is_found(tmp_path):
    mlstate.save(tmp_path / "c", {"w": np.ones(2)}, states={"n": "x" * 5000}, pack_below_bytes=0)
    [file] = (tmp_path / "c" / "states").iterdir()
    flip(file, -1)
    target = {"w": np.zeros(2)}
    with pytest.raises(mlstate.ChecksumError):
        mlstate.load(tmp_path / "c", into={"model": target, "states": {"n": []}})
    assert not target["w"].any() and not mlstate.verify(tmp_path / "c")


def test_dicts_and_lists_receive_the_values_and_keep_their_objects(tmp_path):
    rng, loader = random.Random(1), Loader(3)
    state = {"rng": rng, "loader": loader, "losses": [1.5], "deep": {"n": 1}}
    mlstate.save(tmp_path / "c", states={"trainer": state, "log": [1, 2]})
    expected = rng.random()
    target = {"rng": random.Random(9), "loader": Loader(0), "losses": [], "deep": {}}
    objects = target["rng"], target["loader"]
    log = [0]
    mlstate.load(tmp_path / "c", into={"states": {"trainer": target, "log": log}})
    assert (target["rng"], target["loader"]) == objects and target["rng"].random() == expected
    assert (
        target["loader"].position == 3 and target["losses"] == [1.5] and target["deep"] == {"n": 1}
    )
    assert log == [1, 2]


@pytest.mark.parametrize(
    "wrap", [tuple, lambda pair: [tuple(pair)], lambda pair: {"k": tuple(pair)}]
)
def test_objects_in_tuples_are_restored_and_stay(tmp_path, wrap):
    saved = {"x": wrap([1, np.random.default_rng(5), Loader(3)])}
    mlstate.save(tmp_path / "c", states={"a": saved})
    loader, rng = Loader(0), np.random.default_rng(0)
    target = {"x": wrap([0, rng, loader])}
    mlstate.load(tmp_path / "c", into={"states": {"a": target}})
    assert target == {"x": wrap([1, rng, loader])}
    assert loader.position == 3 and rng.random() == np.random.default_rng(5).random()
    with pytest.raises(CompatibilityError, match=r"a tuple of 2 values, .* a tuple of 3 v"):
        mlstate.load(tmp_path / "c", into={"states": {"a": {"x": wrap([0, loader])}}})


def test_targets_that_do_not_fit_are_named(tmp_path):
    mlstate.save(tmp_path / "c", {"w": np.ones(2)}, states={"a": {"x": 1}, "t": {"w": np.ones(2)}})
    for states, error, text in (
        ({"a": {"y": 1}}, CompatibilityError, r"states\['a'\]\['.'\]"),
        ({"a": []}, CompatibilityError, r"states\['a'\]: the target is a list"),
        ({"a": 5}, TypeError, r"states\['a'\] is a int, which cannot be restored in place"),
        ({"t": 5}, TypeError, r"states\['t'\] has tensors, and cannot be restored into a int"),
        ({"t": {"v": np.ones(2)}}, CompatibilityError, r"states\['t'\]: .*\n.*Missing.*\"v\""),
        ({"t": {"w": np.ones(3)}}, CompatibilityError, r"t/w"),
        ([], TypeError, "mapping of names"),
    ):
        model = {"w": np.zeros(2)}
        with pytest.raises(error, match=text):
            mlstate.load(tmp_path / "c", into={"model": model, "states": states})
        assert not model["w"].any()


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_that_was_not_saved_is_left_out_with_a_warning(tmp_path, strict):
    mlstate.save(tmp_path / "c", {"w": np.ones(2)}, states={"a": {"x": 1}})
    model, kept, ema = {"w": np.zeros(2)}, {"x": 0}, {"w": np.full(2, 7.0)}
    into = {"model": model, "states": {"a": kept, "ema": ema, "lr": {"x": 3}}}
    text = r"holds no state 'ema', 'lr' \(named states: 'a'\): not loaded"
    with pytest.warns(CheckpointWarning, match=text) as caught:
        loaded = mlstate.load(tmp_path / "c", into=into, strict=strict)
    assert caught[0].filename == __file__
    assert loaded.states == {"a": {"x": 1}} and kept == {"x": 1} and model["w"].all()
    assert (ema["w"] == 7).all() and into["states"].keys() == {"a", "ema", "lr"}


def test_one_target_of_two_states_needs_equal_values(tmp_path):
    state, target = {"w": np.arange(3.0)}, {"w": np.zeros(3)}
    into = {"states": {"first": target, "second": target}}
    mlstate.save(tmp_path / "b", states={"first": state, "second": {"w": np.arange(1.0, 4)}})
    text = r"states\['first'\]\['w'\] and states\['second'\]\['w'\] share memory, as tied"
    with pytest.raises(CompatibilityError, match=text):
        mlstate.load(tmp_path / "b", into=into)
    assert not target["w"].any()
    mlstate.save(tmp_path / "a", states={"first": state, "second": state})
    mlstate.load(tmp_path / "a", into=into)
    assert target["w"].tolist() == [0, 1, 2]


def test_states_are_saved_in_the_background_and_by_steps(tmp_path):
    loader, rng = Loader(1), np.random.default_rng(0)
    handle = save_async(tmp_path / "c", {"w": np.ones(4)}, states={"loader": loader, "rng": rng})
    handle.staged()
    loader.position = 9
    expected = rng.bit_generator.state
    handle.wait()
    assert mlstate.load(tmp_path / "c").states["loader"]["position"] == 1
    assert mlstate.load(tmp_path / "c").states["rng"] == expected
    with CheckpointManager(tmp_path / "run", keep=2) as manager:
        for step in range(4):
            loader.position = step
            save = manager.save if step % 2 else manager.save_async
            save(step, {"w": np.full(4, step)}, states={"loader": loader})
    assert [manager.restore(step).states["loader"]["position"] for step in (2, 3)] == [2, 3]
    other = Loader()
    manager.restore_latest(into={"states": {"loader": other}})
    assert other.position == 3
    saved = {p.name for p in (tmp_path / "run" / "states").iterdir()}
    assert len(saved) <= 4  # files of deleted steps are gone


def test_a_state_that_did_not_change_is_not_written_again(tmp_path):
    states = {"ema": {"w": np.ones(100_000)}, "n": list(range(1000))}
    mlstate.save(tmp_path / "c", states=states)
    assert mlstate.save(tmp_path / "c", states=states).written["new_shards"] == 0
    states["n"][0] = 5
    assert mlstate.save(tmp_path / "c", states=states).written["new_shards"] == 1


def test_checkpoint_without_states_has_no_states_folder(tmp_path):
    mlstate.save(tmp_path / "c", {"w": np.ones(1)})
    assert not (tmp_path / "c" / "states").exists()
    assert "states" not in json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert mlstate.load(tmp_path / "c").states == {}
    assert inspect(tmp_path / "c").states == {}


def test_resharding_keeps_a_parameter_named_like_an_array_of_a_state(tmp_path):
    model, moments = {"n/a": np.arange(4.0), "w": np.ones(4)}, {"n/a": np.zeros(2)}
    mlstate.save(tmp_path / "a", model, moments, states={"n": {"a": np.ones(3), "b": [1, 2]}})
    mlstate.checkpoint.reshard(tmp_path / "a", tmp_path / "b", layout="rows", world_size=2)
    loaded = mlstate.load(tmp_path / "b")
    assert mlstate.diff(loaded, mlstate.load(tmp_path / "a")).identical
    assert list(loaded.model) == ["n/a", "w"] and list(loaded.optimizer) == ["n/a"]


def test_resharding_keeps_the_states(tmp_path):
    ema = {"w": np.arange(12.0).reshape(4, 3)}
    mlstate.save(tmp_path / "a", ema, states={"ema": ema, "n": VALUES})
    mlstate.checkpoint.reshard(tmp_path / "a", tmp_path / "b", layout="rows", world_size=2)
    states = mlstate.load(tmp_path / "b").states
    assert np.array_equal(states["ema"]["w"], ema["w"]) and same(states["n"], VALUES)
    assert mlstate.verify(tmp_path / "b")
    assert {shard.part for shard in inspect(tmp_path / "b").shards()} == {0, 1}


def test_a_plan_counts_the_states(tmp_path):
    mlstate.save(tmp_path / "c", {"w": np.ones(8)}, states={"ema": {"w": np.ones(8)}})
    assert sum(read.nbytes for read in plan_load(tmp_path / "c", verify=False).reads) >= 128


# ---- several ranks ----


def test_ranks_share_equal_states_and_keep_different_ones(tmp_path):
    def save(group):
        rng = random.Random(group.rank)
        states = {"rng": rng, "step": {"n": 5, "a": np.ones(3)}, "ema": {"w": np.arange(4.0)}}
        saved = mlstate.save(tmp_path / "c", {"w": np.ones(4)}, states=states, group=group)
        return saved.states, [rng.random() for _ in range(3)]

    results = run_ranks(3, save)
    kinds = results[0][0]
    assert kinds["rng"] == {"kind": "tree", "ranks": 3} and kinds["step"] == {"kind": "tree"}

    def load(group):
        rng, step = random.Random(), {}
        into = {"states": {"rng": rng, "step": step}}
        mlstate.load(tmp_path / "c", into=into, group=group, strict=False)
        return [rng.random() for _ in range(3)]

    assert run_ranks(3, load) == [draws for _, draws in results]
    alone = mlstate.load(tmp_path / "c").states
    assert len(alone["rng"]) == 3 and same(alone["step"], {"n": 5, "a": np.ones(3)})
    generator = random.Random()
    generator.setstate(
        mlstate.load(tmp_path / "c", rank=1, world_size=3, layout="whole").states["rng"]
    )
    assert generator.random() == results[1][1][0]
    for error in outcomes(2, load):
        assert isinstance(error, CompatibilityError) and "3 ranks that saved it" in str(error)
    with pytest.raises(CompatibilityError, match=r"states\['rng'\] differs between the 3 ranks"):
        mlstate.load(tmp_path / "c", into={"states": {"rng": random.Random()}})


def test_values_of_different_lengths_are_kept(tmp_path):
    def save(group):
        value = {"items": ["x"] * group.rank, "a": np.arange(group.rank * 100)}
        mlstate.save(tmp_path / "c", states={"v": value}, group=group, layout="rows")

    run_ranks(4, save)
    loaded = mlstate.load(tmp_path / "c").states["v"]
    assert [len(rank_value["items"]) for rank_value in loaded] == [0, 1, 2, 3]
    assert all(
        same(rank_value["a"], np.arange(rank * 100)) for rank, rank_value in enumerate(loaded)
    )
    assert len(inspect(tmp_path / "c").tensors()) == 1


def test_shards_in_a_state_are_assembled(tmp_path):
    array = np.arange(12.0).reshape(4, 3)

    def save(group):
        part = Layout.rows(2).shard(array, group.rank)
        states = {"ema": {"w": part}, "object": {"shadow": [part], "rank": group.rank}}
        return mlstate.save(tmp_path / "c", states=states, group=group)

    run_ranks(2, save)
    loaded = mlstate.load(tmp_path / "c").states
    assert np.array_equal(loaded["ema"]["w"], array)
    assert [rank_state["rank"] for rank_state in loaded["object"]] == [0, 1]
    assert all(np.array_equal(rank_state["shadow"][0], array) for rank_state in loaded["object"])


def test_ranks_with_other_states_are_refused_on_all_ranks(tmp_path):
    def save(group):
        name = "a" if group.rank else "b"
        mlstate.save(tmp_path / "c", {"w": np.ones(1)}, states={name: 1}, group=group)

    for error in outcomes(2, save):
        assert isinstance(error, ValueError) and "states= has 'a' (tree) on rank 1" in str(error)

    def fail(group):
        value = object() if group.rank else 1
        mlstate.save(tmp_path / "c", {"w": np.ones(1)}, states={"a": value}, group=group)

    first, second = outcomes(2, fail)
    assert isinstance(first, mlstate.CollectiveError) and "states['a']" in str(first)
    assert isinstance(second, TypeError)


def test_refusal_of_one_rank_rolls_back_all_ranks(tmp_path):
    def save(group):
        mlstate.save(tmp_path / "c", states={"l": Loader(5), "w": {"w": np.ones(2)}}, group=group)

    run_ranks(2, save)
    loaders, arrays = [Loader(1), Loader(1)], [{"w": np.zeros(2)} for _ in range(2)]

    def load(group):
        loader = loaders[group.rank]
        loader.refuses = 5 if group.rank else None
        into = {"states": {"l": loader, "w": arrays[group.rank]}}
        mlstate.load(tmp_path / "c", into=into, group=group)

    errors = outcomes(2, load)
    assert all("states['l']" in str(error) for error in errors)
    assert [element.position for element in loaders] == [1, 1] and not any(
        element["w"].any() for element in arrays
    )


# ---- strict, cast, rename, device ----


def test_rename_gives_the_stored_tensors_new_names(tmp_path):
    model = {"module.h.w": np.ones(2), "module.h.b": np.zeros(2)}
    groups = [{"params": ["module.h.w"], "lr": 0.5}]
    optimizer = OptimizerStateDict({"module.h.w.m": np.full(2, 3.0)}, param_groups=groups)
    mlstate.save(tmp_path / "c", model, optimizer, states={"ema": model, "n": 1})
    loaded = mlstate.load(tmp_path / "c", rename={"module.": ""})
    assert list(loaded.model) == ["h.b", "h.w"] and list(loaded.optimizer) == ["h.w.m"]
    assert loaded.optimizer.param_groups[0]["params"] == ["h.w"]
    assert list(loaded.states["ema"]) == ["h.b", "h.w"]
    loaded = mlstate.load(tmp_path / "c", rename={"module.": ""}, names="h.w")
    assert list(loaded.model) == ["h.w"] and list(loaded.optimizer) == ["h.w.m"]
    target = {"h.w": np.zeros(2), "h.b": np.ones(2)}
    with pytest.raises(CompatibilityError, match="Missing key"):
        mlstate.load(tmp_path / "c", into={"model": target})
    mlstate.load(tmp_path / "c", into={"model": target}, rename={"module.": ""})
    assert target["h.w"].all() and not target["h.b"].any()
    part = mlstate.load(tmp_path / "c", rename={"*h.": "k."}, rank=1, world_size=2, layout="rows")
    assert part.model["module.k.w"].shape == (1,)


def test_rules_of_rename_are_checked(tmp_path):
    mlstate.save(tmp_path / "c", {"a.w": np.ones(2), "b.w": np.zeros(2)})
    with pytest.raises(ValueError, match="no name matches 'x'"):
        mlstate.load(tmp_path / "c", rename={"x": "y"})
    with pytest.raises(CompatibilityError, match="model: "):
        mlstate.load(tmp_path / "c", rename={"a": "b"})
    with pytest.raises(TypeError, match="rules must be a mapping"):
        mlstate.load(tmp_path / "c", rename="a")


def test_without_strict_the_shared_names_are_filled(tmp_path):
    mlstate.save(
        tmp_path / "c",
        {"a": np.ones(2), "b": np.ones(2)},
        {"a.m": np.ones(2), "b.m": np.ones(2)},
        states={"ema": {"a": np.ones(2), "b": np.ones(2)}},
    )

    def targets():
        return {"a": np.zeros(2), "c": np.zeros(2)}

    model, ema, optimizer = targets(), targets(), {"a.m": np.zeros(2), "c.m": np.zeros(2)}
    into = {"model": model, "optimizer": optimizer, "states": {"ema": ema}}
    with pytest.raises(CompatibilityError, match="Unexpected key"):
        mlstate.load(tmp_path / "c", into=into)
    assert not any(model["a"])
    mlstate.load(tmp_path / "c", into=into, strict=False)
    assert model["a"].all() and ema["a"].all() and optimizer["a.m"].all()
    assert not (model["c"].any() or ema["c"].any() or optimizer["c.m"].any())
    with pytest.raises(CompatibilityError, match=r"\(2,\), the target is float64 of \(3,\)"):
        mlstate.load(tmp_path / "c", into={"model": {"a": np.zeros(3)}}, strict=False)


def test_without_strict_keys_of_a_state_that_the_checkpoint_lacks_stay(tmp_path):
    generator = np.random.default_rng(1)
    saved = {"x": 1, "inner": {"y": 2, "generator": generator}, "gone": 4}
    mlstate.save(tmp_path / "c", states={"a": saved, "rate": {"lr": 0.1}})
    inner = {"y": 0, "generator": np.random.default_rng(2), "z": [9]}
    target = {"x": 0, "inner": inner, "kept": "k"}
    rate = {"lr": 1.0, "decay": 0.5}
    into = {"states": {"a": target, "rate": rate}}
    with pytest.raises(CompatibilityError, match=r"has this key, the .* does not"):
        mlstate.load(tmp_path / "c", into=into)
    assert target["x"] == 0 and rate == {"lr": 1.0, "decay": 0.5}
    mlstate.load(tmp_path / "c", into=into, strict=False)
    assert target["x"] == 1 and target["kept"] == "k" and "gone" not in target
    assert target["inner"] is inner and inner["y"] == 2 and inner["z"] == [9]
    assert inner["generator"].bit_generator.state == generator.bit_generator.state
    assert rate == {"lr": 0.1, "decay": 0.5}


def test_cast_converts_floats_only(tmp_path):
    values = np.array([1.1, -2.7, 1e30], np.float64)
    mlstate.save(tmp_path / "c", {"w": values, "n": np.arange(3)}, states={"ema": {"w": values}})
    target = {"w": np.zeros(3, np.float16), "n": np.zeros(3, np.int64)}
    ema = {"w": np.zeros(3, np.float32)}
    into = {"model": target, "states": {"ema": ema}}
    with pytest.raises(CompatibilityError, match="float64"):
        mlstate.load(tmp_path / "c", into=into)
    with np.errstate(over="ignore"):
        mlstate.load(tmp_path / "c", into=into, cast=True)
        assert np.array_equal(target["w"], values.astype(np.float16))
    assert np.array_equal(ema["w"], values.astype(np.float32))
    assert target["n"].tolist() == [0, 1, 2]
    wrong = {"w": np.zeros(3), "n": np.zeros(3)}
    with pytest.raises(CompatibilityError, match="int64"):
        mlstate.load(tmp_path / "c", into={"model": wrong}, cast=True)
    assert not wrong["w"].any()


def test_cast_fills_tied_arrays_and_parts(tmp_path):
    mlstate.save(tmp_path / "c", {"a": np.arange(4.0), "b": np.array([1.0, 2, 2, 3])})
    shared = np.zeros(2, np.float32)
    into = {"model": {"a": shared, "b": shared}}
    part = {"cast": True, "world_size": 2, "layout": "rows"}
    mlstate.load(tmp_path / "c", into=into, rank=1, **part)
    assert shared.tolist() == [2, 3]
    with pytest.raises(CompatibilityError, match=r"'a'\] and .*'b'\] share memory, as tied"):
        mlstate.load(tmp_path / "c", into=into, rank=0, **part)
    assert shared.tolist() == [2, 3]


def test_device_needs_torch_and_no_mapping(tmp_path):
    mlstate.save(tmp_path / "c", {"w": np.ones(2)})
    with pytest.raises(ValueError, match="either mmap=True or device="):
        mlstate.load(tmp_path / "c", device="cpu", mmap=True)


# ---- malformed texts ----


@pytest.mark.parametrize(
    "node",
    [
        {"$": "unknown"},
        {"$": "array"},
        {"$": "array", "key": "absent", "form": "numpy"},
        {"$": "dict", "class": "object", "items": []},
        {"$": "dict", "class": "dict", "items": [[[], 1]]},
        {"$": "set", "items": [[1]]},
        {"$": "float", "value": []},
        {"$": "int", "value": "zz"},
        {"$": "complex", "parts": [1, 2, 3]},
        {"$": ["array"]},
        {"$": "generator", "library": "python", "state": {}},
    ],
)
def test_a_text_that_describes_no_value_is_a_format_error(tmp_path, node, monkeypatch):
    monkeypatch.setattr(tree._Encoder, "node", lambda *_: node)
    mlstate.save(tmp_path / "c", states={"x": 1})
    with pytest.raises(FormatError, match=r"states\['x'\]: the stored text does not describe"):
        mlstate.load(tmp_path / "c")


@pytest.mark.parametrize("cut", [0, 4, 8, 20, 60])
def test_a_packed_value_that_is_cut_is_a_format_error(cut):
    encoded = tree.encode({"a": np.arange(3), "b": "text"}, "x")
    header = tree.pack_header(encoded, tree.whole_arrays(encoded))
    packed = tree.pack(encoded, len(header) + 24)
    node, arrays = tree.unpack(packed, "x")
    assert same(tree.Decoder(arrays).value(node), {"a": np.arange(3), "b": "text"})
    with pytest.raises(FormatError):
        tree.unpack(packed[:cut], "x")


def test_text_that_is_not_json_is_a_format_error():
    with pytest.raises(FormatError):
        tree.parse(b"{", "x")
    with pytest.raises(FormatError):
        tree.parse(b"[" * 100_000, "x")


def test_a_shard_may_be_part_of_a_nested_value_of_one_process(tmp_path):
    mlstate.save(tmp_path / "c", states={"x": [Shard(np.arange(3)), 1]})
    assert same(mlstate.load(tmp_path / "c").states["x"], [np.arange(3), 1])


def test_uncopyable_object_state_is_refused_by_name(tmp_path):
    mlstate.save(tmp_path, states={"counter": Loader(1)})
    target = Loader(lock := threading.Lock())
    with pytest.raises(CompatibilityError, match=r"states\['counter'\].*cannot be copied"):
        mlstate.load(tmp_path, into={"states": {"counter": target}})
    assert target.position is lock


class Refusing(Model):
    """A model that refuses the values that it saved."""

    def load_state_dict(self, state):
        if state["w"][0] == 2:
            raise RuntimeError("another shape")
        super().load_state_dict(state)


def test_models_of_own_protocol_get_their_states_back_after_a_refusal(tmp_path):
    mlstate.save(tmp_path, states={"a": Model(1.0), "b": Model(2.0)})
    first, second = Model(8.0), Refusing(9.0)
    with pytest.raises(CompatibilityError, match="nothing was restored"):
        mlstate.load(tmp_path, into={"states": {"a": first, "b": second}})
    assert (first.value, second.value) == (8, 9)


class WriteOnly:
    """An object whose state cannot be read."""

    value = 0

    def load_state_dict(self, state):
        self.value = state["position"]


def test_objects_without_a_way_back_are_restored_last_and_named(tmp_path):
    mlstate.save(tmp_path, {"w": np.ones(9)}, states={"a": Loader(1), "b": Loader(2)})
    first, second = WriteOnly(), Loader(7, refuses=2)
    with pytest.raises(CompatibilityError, match=r"states\['b'\].*nothing was restored"):
        mlstate.load(tmp_path, into={"states": {"a": first, "b": second}})
    assert (first.value, second.position) == (0, 7)
    second = Loader(7)
    first.load_state_dict = None.__getattribute__  # refuses every state
    with pytest.raises(CompatibilityError, match=r"states\['a'\] may stay changed"):
        mlstate.load(tmp_path, into={"states": {"a": first, "b": second}})
    assert second.position == 7


# ---- one target under two names ----


def shared_model():
    model = Model(5.0)
    return {"a": Model(1.0), "b": Model(2.0)}, {"a": model, "b": model}, lambda: model.value


def shared_shards():
    states = {
        name: {"x": Layout.rows(1).shard(np.full(2, value), 0), "n": 1}
        for name, value in (("a", 1.0), ("b", 2.0))
    }
    target = {"x": 0, "n": 0}
    return states, {"a": target, "b": target}, lambda: repr(target)


def shared_numbers(first, second):
    """Return states, targets and a function that shows the numbers to come."""
    states = {"a": np.random.default_rng(1), "b": np.random.default_rng(2)}
    return states, {"a": first, "b": second}, lambda: repr(first.bit_generator.state)


def shared_bit_generator():
    source = np.random.PCG64(0)
    return shared_numbers(np.random.Generator(source), np.random.Generator(source))


def generator_and_its_source():
    source = np.random.PCG64(0)
    return shared_numbers(np.random.Generator(source), source)


def global_generator():
    states = {"a": random.Random(1), "b": random.Random(2)}
    return states, {"a": random, "b": random._inst}, random.getstate


@pytest.mark.parametrize(
    "make",
    [shared_model, shared_shards, shared_bit_generator, generator_and_its_source, global_generator],
)
@pytest.mark.parametrize("equal", [False, True])
def test_two_names_of_one_target_are_refused_if_values_differ(tmp_path, make, equal):
    states, targets, value = make()
    if equal:
        states["b"] = states["a"]
    mlstate.save(tmp_path, states=states)
    before = value()
    if equal:
        mlstate.load(tmp_path, into={"states": targets})
        assert value() != before
        return
    with pytest.raises(CompatibilityError, match=r"states\['b'\]: .* that of states\['a'\]"):
        mlstate.load(tmp_path, into={"states": targets})
    assert value() == before


def test_generators_over_one_source_keep_their_own_gauss(tmp_path):
    source = np.random.MT19937(3)
    both = [np.random.RandomState(source) for _ in range(2)]
    both[0].normal()
    mlstate.save(tmp_path, states={"a": both[0], "b": both[1]})
    expected = [each.get_state(legacy=False) for each in both]
    for each in both:
        each.normal(size=3)
    mlstate.load(tmp_path, into={"states": {"a": both[0], "b": both[1]}})
    got = [each.get_state(legacy=False) for each in both]
    assert repr(got) == repr(expected)


ORDERS = {
    "str keys": ({"a": 1, "b": [2]}, {"b": [2], "a": 1}),
    "int keys": ({1: "x", 2: "y"}, {2: "y", 1: "x"}),
    "nested": ({"x": {"a": np.ones(2), "b": "k"}}, {"x": {"b": "k", "a": np.ones(2)}}),
    "counter": ({"n": Counter("aab")}, {"n": Counter("baa")}),
}


@pytest.mark.parametrize("pair", ORDERS.values(), ids=ORDERS)
def test_dicts_whose_keys_have_another_order_are_equal_values(tmp_path, pair):
    mlstate.save(tmp_path, {}, states=dict(zip("ab", pair, strict=True)))
    target = {}
    mlstate.load(tmp_path, into={"states": {"a": target, "b": target}}, strict=False)


@pytest.mark.parametrize(
    "pair",
    [
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": 1, "b": 2}, {"b": 1, "a": 2}),
        ({1: "x", 2: "y"}, {2: "x", 1: "y"}),
    ],
)
def test_values_that_differ_are_refused_for_one_target(tmp_path, pair):
    mlstate.save(tmp_path, {}, states={"a": {"v": pair[0]}, "b": {"v": pair[1]}})
    target = {"v": 0}
    with pytest.raises(CompatibilityError, match="an object for each"):
        mlstate.load(tmp_path, into={"states": {"a": target, "b": target}})
    assert target == {"v": 0}


def test_values_that_differ_between_ranks_keep_their_numbers_in_any_byte_order(tmp_path):
    def save(group):
        value = {"seen": np.array([1.0, 2.0, group.rank], ">f8"), "n": 1}
        mlstate.save(tmp_path / "c", states={"x": value}, group=group)

    run_ranks(2, save)
    loaded = mlstate.load(tmp_path / "c").states["x"]
    assert [value["seen"].tolist() for value in loaded] == [[1, 2, 0], [1, 2, 1]]


def test_masked_arrays_in_nested_values_are_refused(tmp_path):
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    for value in (masked, Shard(masked)):
        with pytest.raises(TypeError, match="masked array"):
            mlstate.save(tmp_path / "c", states={"x": [value, 1]})
    mlstate.save(tmp_path / "c", {"w": np.ones(2)})
    with pytest.raises(TypeError, match="'w' is a masked array"):
        mlstate.load(tmp_path / "c", into={"model": {"w": masked}})
    assert masked.data.tolist() == [1, 2]


def test_a_generator_with_a_state_of_another_form_is_refused(tmp_path):
    own = type("Own", (random.Random,), {"getstate": lambda self: ("own", 1)})
    with pytest.raises(TypeError, match=r"states\['x'\]\[0\]: Own.state raised ValueError"):
        mlstate.save(tmp_path / "c", states={"x": [own(1)]})
