"""Nested values of named states: their classes, and the keys of their arrays."""

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum
from io import BytesIO

import numpy as np
import pytest
from rank_threads import outcomes

import mlstate
from mlstate import ModelStateDict, OptimizerStateDict, StateDict
from mlstate.checkpoint import Layout, Shard
from mlstate.checkpoint._states import tree
from mlstate.checkpoint._states.named_values import enum_of
from mlstate.testing import run_ranks

FIRST, SECOND = np.arange(4.0), np.arange(100.0, 104.0)


def same(a, b):
    """Whether two nested values are equal, with the same types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b


class Loader:
    """An object with a state."""

    def state_dict(self):
        return {"position": 1}


# ---- classes ----


def with_attributes(value, **attributes):
    vars(value).update(attributes)
    return value


def subclass(base):
    """An object of an own class; the items of a dict are its attributes."""
    methods = {"__getattr__": lambda self, name: self[name]} if issubclass(base, dict) else {}
    return type("Own", (base,), methods)()


CLASSES = {
    "default": defaultdict(list, a=[1]),
    "without a default": defaultdict(None, {1: np.ones(2)}),
    "default of a default": defaultdict(Counter, a=Counter("ab")),
    "versions": with_attributes(OrderedDict(w=1), _metadata={"": {"version": 2}, "a": SECOND}),
    "attributes": with_attributes(Counter("aab"), note="x"),
    "optimizer": OptimizerStateDict({"w.m": FIRST}, optimizer_type="adam", step=7),
    "model": ModelStateDict({"w": FIRST}, model_type="llama", layer_count=3),
    "state": StateDict({"w": FIRST}),
}


@pytest.mark.parametrize("value", CLASSES.values(), ids=CLASSES)
def test_nested_dicts_keep_their_class_and_attributes(tmp_path, value):
    mlstate.save(tmp_path / "c", states={"x": [value, 1]})
    loaded = mlstate.load(tmp_path / "c").states["x"][0]
    assert same(loaded, value)
    for name in ("default_factory", "step", "optimizer_type", "model_type", "layer_count"):
        assert getattr(loaded, name, None) == getattr(value, name, None)
    assert same(getattr(loaded, "__dict__", {}), getattr(value, "__dict__", {}))


@pytest.mark.parametrize(
    "value",
    [
        *map(subclass, (dict, OrderedDict, list, tuple, set, deque, bytes, BytesIO)),
        *(defaultdict(lambda: 1), np.bytes_(b"x"), np.ones((1, 1)).view(np.matrix)),
    ],
    ids=lambda value: type(value).__base__.__name__,
)
def test_classes_that_no_load_could_restore_are_refused(tmp_path, value):
    with pytest.raises(TypeError, match=r"states\['x'\]\[0\] is a"):
        mlstate.save(tmp_path / "c", states={"x": [value]})
    assert not (tmp_path / "c").exists()


class Table(dict):
    """A dict with more state than its items."""

    hits = 0

    def state_dict(self):
        return {"items": dict(self), "hits": self.hits}

    def load_state_dict(self, state):
        self.hits = state["hits"]
        self.update(state["items"])


@pytest.mark.parametrize("nested", [False, True])
def test_dicts_with_a_state_dict_are_stored_by_it(tmp_path, nested):
    table, other = Table(a=FIRST), Table()
    table.hits = 5
    mlstate.save(tmp_path / "c", states={"x": [table] if nested else table})
    mlstate.load(tmp_path / "c", into={"states": {"x": [other] if nested else other}})
    assert other.hits == 5 and same(dict(other), dict(table))


# ---- keys of arrays ----
CLASHES = {
    "number and text": lambda a, b: [(1, a), ("1", b)],
    "None and text": lambda a, b: [(None, a), ("None", b)],
    "dot and nesting": lambda a, b: [("a.b", a), ("a", {"b": b})],
    "tilde": lambda a, b: [("a~.b", a), ("a.b", b)],
    "empty": lambda a, b: [("", a), ("value", b)],
    "text of the tree": lambda a, b: [("", {"tree": a, "ranks": b}), (".ranks", a), (".tree", b)],
}


@pytest.mark.parametrize("items", CLASHES.values(), ids=CLASHES)
def test_order_of_keys_on_a_rank_does_not_mix_parts_of_tensors(tmp_path, items):
    rows = Layout.rows(2)

    def save(group):
        pairs = items(rows.shard(FIRST, group.rank), rows.shard(SECOND, group.rank))
        value = dict(pairs[:: 1 if group.rank else -1]) | {"rank": group.rank}
        mlstate.save(tmp_path / "c", states={"x": value}, group=group)

    run_ranks(2, save)
    for value in mlstate.load(tmp_path / "c").states["x"]:
        assert value.pop("rank") in (0, 1) and value.keys() == dict(items(0, 0)).keys()
        assert all(same(value[key], whole) for key, whole in items(FIRST, SECOND))


def test_parts_at_different_paths_are_not_joined(tmp_path):
    def save(group):
        part = Layout.rows(2).shard(FIRST, group.rank)
        value = {"a.b": part} if group.rank else {"a": {"b": part}}
        mlstate.save(tmp_path / "c", states={"x": [value]}, group=group)

    assert "x/0.a.b" in str(outcomes(2, save)[0])
    assert not (tmp_path / "c" / "manifest.json").exists()


@pytest.mark.parametrize("item", [Shard(FIRST), (1, Shard(FIRST)), Loader(), np.random.PCG64(1)])
def test_items_of_sets_that_no_load_could_restore_are_refused(tmp_path, item):
    with pytest.raises(TypeError, match=r"states\['x'\]\['s'\] is a set with a "):
        mlstate.save(tmp_path / "c", states={"x": {"s": {item}}})


def test_equal_sets_of_bytes_have_one_form():
    forms = []
    for size in (8, 64):  # the order of a set depends on the size of its table
        value = {bytes([i]) for i in range(size)}
        for i in range(4, size):
            value.discard(bytes([i]))
        encoded = tree.encode(value, "x")
        forms.append((encoded.text, [bytes(array) for array in encoded.arrays.values()]))
    assert forms[0] == forms[1]


def test_keys_of_older_files_are_read(tmp_path, monkeypatch):
    def store(self, array, path):
        key = name = ".".join(map(str, path))
        while key in self.arrays:
            key = f"{name}~2"
        self.arrays[key] = array
        return key

    value = {1: FIRST, "1": SECOND, "a.b": {"c": Shard(FIRST)}}
    with monkeypatch.context() as older:
        older.setattr(tree._Encoder, "store", store)
        mlstate.save(tmp_path / "c", states={"x": value})
    assert same(
        mlstate.load(tmp_path / "c").states["x"], {1: FIRST, "1": SECOND, "a.b": {"c": FIRST}}
    )


class Phase(Enum):
    WARM = 1
    HOT = 2

    @classmethod
    def _missing_(cls, value):
        raise AssertionError("a file must not call code of the program")


def test_a_member_that_an_enum_lacks_is_named(tmp_path, monkeypatch):
    mlstate.save(tmp_path, states={"phase": Phase.HOT})
    assert mlstate.load(tmp_path).states["phase"] is Phase.HOT
    monkeypatch.setattr(sys.modules[__name__], "Phase", Enum("Phase", {"WARM": 1}))
    with pytest.raises(ImportError, match="holds the member 'HOT'"):
        mlstate.load(tmp_path)


def test_a_file_calls_no_code_of_an_enum():
    node = {"module": __name__, "class": "Phase", "value": {"x": 1}}
    with pytest.raises(TypeError, match="not a combination of flags"):
        enum_of(node)


def test_equal_sets_of_scalars_and_bytes_have_equal_keys_of_arrays():
    items = [np.float32(1), np.int32(2), b"\x01", (b"", np.float16(3)), np.float64(4)]
    first, second = (tree.encode(set(order), "s") for order in (items, items[::-1]))
    assert first.text == second.text and first.arrays.keys() == second.arrays.keys()
    assert all((first.arrays[key] == second.arrays[key]).all() for key in first.arrays)


def optimizer_with_nested_state(rows=8):
    """States of one parameter: an array `m`, and `n`, a nested value stored as bytes."""
    groups = [{"params": ["w"], "packed_states": {"n": [0]}}]
    arrays = {"w.m": np.arange(2.0 * rows).reshape(rows, 2), "w.n": np.arange(rows, dtype="u1")}
    return mlstate.OptimizerStateDict(arrays, param_groups=groups)


@pytest.mark.parametrize("section", ["optimizer", "model too", "states"])
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_a_layout_cuts_no_nested_optimizer_state(tmp_path, section, layout):
    path, state = tmp_path / "c", optimizer_with_nested_state()
    model = {"w": np.zeros((8, 2))} if section == "model too" else None
    if section == "states":
        mlstate.save(path, states={"o": state})
    else:
        mlstate.save(path, model, state, pack_below_bytes=0)
    for rank in range(2):
        loaded = mlstate.load(path, layout=layout, rank=rank, world_size=2)
        part = loaded.states["o"] if section == "states" else loaded.optimizer
        assert part["w.m"].size == 8 and np.array_equal(part["w.n"], state["w.n"])
    plan = mlstate.checkpoint.plan_load(path, layout=layout, rank=1, world_size=2, verify=False)
    assert sorted(read.end - read.begin for read in plan.reads)[0] == 8


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_reshard_stores_a_nested_optimizer_state_once(tmp_path, layout):
    mlstate.save(tmp_path / "c", optimizer=optimizer_with_nested_state())
    checkpoint = mlstate.checkpoint.reshard(
        tmp_path / "c", tmp_path / "cut", layout=layout, world_size=2
    )
    assert [shard.key for shard in checkpoint.shards()] == ["w.m", "w.n", "w.m"]
    assert mlstate.diff(tmp_path / "c", tmp_path / "cut").identical


def test_a_nested_optimizer_state_that_was_stored_in_parts_is_loaded_whole(tmp_path):
    state = optimizer_with_nested_state()
    path = tmp_path / "c"
    run_ranks(2, lambda group: mlstate.save(path, optimizer=state, layout="rows", group=group))
    into = {"w.m": np.zeros((4, 2)), "w.n": np.zeros(8, "u1")}
    mlstate.load(tmp_path / "c", into={"optimizer": into}, layout="rows", rank=1, world_size=2)
    assert np.array_equal(into["w.n"], state["w.n"])
    assert np.array_equal(into["w.m"], state["w.m"][4:])


@pytest.mark.parametrize("forms", [5, [1], {"n": 5}, {"n": [7]}, {"n": ["x"]}], ids=repr)
def test_groups_with_other_packed_states_are_loaded(tmp_path, forms):
    state = optimizer_with_nested_state()
    state.param_groups = [{"params": ["w"], "packed_states": forms}]
    mlstate.save(tmp_path / "c", optimizer=state)
    loaded = mlstate.load(tmp_path / "c", layout="rows", rank=0, world_size=2)
    assert loaded.optimizer["w.n"].shape == (4,)
