"""StateDict and its subclasses: every way to add arrays checks them, and keeps them as they are."""

import collections
import copy
import gc
import hashlib
import pickle
import struct
import sys
import time
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlstate
from mlstate import (
    ModelStateDict,
    OptimizerStateDict,
    OptimizerType,
    StateDict,
    Stateful,
    TensorNotFoundError,
)
from mlstate.checkpoint import Shard
from mlstate.state import diff, keys_match, load_into

KINDS = [StateDict, ModelStateDict, OptimizerStateDict]
GIL = getattr(sys, "_is_gil_enabled", lambda: True)()


class Mine(ModelStateDict):
    """A user's subclass with a slot, attributes and other arguments."""

    def __init__(self, note, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.note = note


def arrays(*names):
    return {name: np.full(3, i, np.float32) for i, name in enumerate(names)}


# ---- arrays stay the same objects ----


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_are_kept_as_they_are(kind):
    w, b = np.zeros((2, 3)), np.ones(2)[::-1]
    b.flags.writeable = False
    state = kind({"w": w}, b=b)
    assert state["w"] is w and state["b"] is b
    assert next(iter(state.values())) is w and state.get("b") is b
    assert state.get_tensor("w") is w and state.get_tensor_or_none("b") is b
    assert np.shares_memory(state["w"], w)
    assert isinstance(state, dict) and list(dict(state).values()) == list(state.values())


def test_every_array_interface_is_accepted():
    class Interface:
        def __init__(self):
            self.memory = np.arange(4)

        @property
        def __array_interface__(self):
            return self.memory.__array_interface__

    class Exporter:
        def __init__(self):
            self.memory = np.arange(4)

        def __dlpack__(self, **options):
            return self.memory.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.memory.__dlpack_device__()

    values = [
        Interface(),
        Exporter(),
        np.float32(3),
        np.zeros((), "M8[s]"),
        np.zeros(2, complex),
        np.zeros(2, "S3"),
        np.zeros(2, [("a", "f4")]),
        np.ma.masked_array([1.0, 2.0]),
        np.zeros((2, 0)),
        np.zeros(3, ">f4"),
    ]
    state = StateDict((f"v{i}", value) for i, value in enumerate(values))
    assert all(state[f"v{i}"] is value for i, value in enumerate(values))
    assert state == state.copy()
    assert StateDict(a=values[0]) == StateDict(a=np.arange(4)) == StateDict(a=values[1])
    assert StateDict(a=values[0], b=values[1]).nbytes == 64


def test_missing_tensors_have_one_text_that_is_a_key_error():
    state = StateDict(arrays("w"))
    for miss in (
        lambda: state["fc.w'%s"],
        lambda: state.get_tensor("fc.w'%s"),
        lambda: state.__delitem__("fc.w'%s"),
    ):
        with pytest.raises(KeyError) as caught:
            miss()
        assert type(caught.value) is TensorNotFoundError
        assert str(caught.value) == "Tensor 'fc.w'%s' not found in state dict"
        assert caught.value.name == "fc.w'%s"
    assert state.get_tensor_or_none("x") is None and not state.has_tensor("x")
    state.remove_tensor("x")
    state.remove_tensor("w")
    assert not state
    with pytest.raises(TypeError, match="unhashable"):
        state[[]]


# ---- invalid values, by every method ----

BAD = {
    "name": ({3: np.ones(1)}, TypeError, "tensor name must be a str, got int: 3"),
    "surrogate": ({"a\ud800": np.ones(1)}, ValueError, "surrogate"),
    "list": ({"x": [1.0]}, TypeError, "'x' is a list: .* numpy.asarray"),
    "none": ({"x": None}, TypeError, "NoneType"),
    "text": ({"x": "w"}, TypeError, "'x' is a str"),
    "class": ({"x": np.float32}, TypeError, "'x' is a type"),
    "nested": ({"x": {"y": np.ones(1)}}, TypeError, "flat; join the names with dots"),
    "objects": ({"x": np.array([None])}, TypeError, "array of Python objects"),
    "records of objects": ({"x": np.zeros(1, [("o", "O")])}, TypeError, "Python objects"),
}
WAYS = {
    "constructor": lambda s, bad: type(s)(bad),
    "pairs": lambda s, bad: type(s)(list(bad.items())),
    "item": lambda s, bad: [s.__setitem__(k, v) for k, v in bad.items()],
    "update": lambda s, bad: s.update({"good": np.ones(1)} | bad),
    "update with pairs": lambda s, bad: s.update([("good", np.ones(1)), *bad.items()]),
    "update with an OrderedDict": lambda s, bad: s.update(collections.OrderedDict(bad)),
    "setdefault": lambda s, bad: [s.setdefault(k, v) for k, v in bad.items()],
    "or": lambda s, bad: s | bad,
    "reflected or": lambda s, bad: bad | s,
    "in-place or": lambda s, bad: s.__ior__({"good": np.ones(1)} | bad),
    "in-place or with pairs": lambda s, bad: s.__ior__(list(bad.items())),
    "fromkeys": lambda s, bad: [type(s).fromkeys([k], v) for k, v in bad.items()],
    "pickle state": lambda s, bad: pickle.loads(smuggled(s, bad)),
}


def smuggled(state, bad):
    """Pickle a state dict whose values bypassed all checks."""
    hostile = state.copy()
    for key, value in bad.items():
        dict.__setitem__(hostile, key, value)
    return pickle.dumps(hostile, 4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_invalid_entries_are_refused_by_every_method(kind, case, way):
    bad, error, text = BAD[case]
    state = kind(arrays("a", "b"))
    before = list(state.items())
    with pytest.raises(error, match=text):
        WAYS[way](state, bad)
    assert list(state.items()) == before or [id(v) for _, v in state.items()] == [
        id(v) for _, v in before
    ]
    assert list(state) == ["a", "b"]


def test_setdefault_returns_existing_or_needs_an_array():
    state = StateDict(arrays("w"))
    assert state.setdefault("w") is state["w"]
    new = np.ones(1)
    assert state.setdefault("x", new) is new and state["x"] is new
    with pytest.raises(TypeError):
        state.setdefault("y")
    with pytest.raises(TypeError, match="name and an array"):
        state.setdefault()


def test_failed_update_keeps_the_state():
    def pairs():
        yield "new", np.ones(1)
        raise RuntimeError("half way")

    class Mapping:
        def keys(self):
            return ["new", "other"]

        def __getitem__(self, key):
            if key == "other":
                raise RuntimeError("half way")
            return np.ones(1)

    for source in (pairs(), Mapping()):
        state = StateDict(arrays("w"))
        with pytest.raises(RuntimeError, match="half way"):
            state.update(source)
        assert list(state) == ["w"]
    with pytest.raises(TypeError, match="at most 1 argument"):
        state.update({}, {})


def test_change_during_iteration_raises():
    state = StateDict(arrays("a", "b"))
    with pytest.raises(RuntimeError, match="changed size"):
        for name in state:
            state[name + "x"] = np.ones(1)


def test_names_may_be_any_unicode_string():
    names = ['"', "%s%n", "é", "層.0", "a\0b", "x" * 5000, "", ".", "a..b", "\N{PILE OF POO}"]
    state = ModelStateDict((name, np.full(1, i)) for i, name in enumerate(names))
    assert list(state) == names and [int(v[0]) for v in state.values()] == list(range(len(names)))
    assert keys_match(state, dict.fromkeys(names))
    repr(state), state._repr_html_(), state.digest(), state.layer_names()
    assert pickle.loads(pickle.dumps(state)) == state


def test_str_subclass_names_become_str():
    name = np.str_("w")
    state = StateDict({name: np.ones(1)})
    state[np.str_("x")] = np.ones(1)
    assert [type(key) for key in state] == [str, str] and state["w"] is state[name]


# ---- copies ----


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", KINDS)
def test_pickle_keeps_class_attributes_and_arrays(kind, protocol):
    state = kind(arrays("a.w", "b.w"))
    if kind is ModelStateDict:
        state.model_type, state.layer_count = "llama", 2
    if kind is OptimizerStateDict:
        state.optimizer_type, state.step, state.learning_rate = "adam", 7, 0.5
        state.param_groups = [{"params": ["a", "b"], "betas": (0.9, 0.99)}]
    back = pickle.loads(pickle.dumps(state, protocol))
    assert type(back) is kind and back == state and list(back) == list(state)
    assert back.__getstate__() == state.__getstate__()
    for duplicate in (copy.copy(state), state.copy(), copy.deepcopy(state), state | {}, {} | state):
        assert type(duplicate) is kind and duplicate == state
        assert duplicate.__getstate__() == state.__getstate__()
        assert duplicate is not state
    assert copy.copy(state)["a.w"] is state["a.w"]
    assert copy.deepcopy(state)["a.w"] is not state["a.w"]


def test_python_subclasses_keep_their_attributes():
    state = Mine("note", arrays("a.w"), model_type="x")
    for duplicate in (
        state.copy(),
        copy.copy(state),
        state | {"b": np.ones(1)},
        {"b": np.ones(1)} | state,
    ):
        assert type(duplicate) is Mine and duplicate.note == "note" and duplicate.model_type == "x"
    back = pickle.loads(pickle.dumps(state))
    assert type(back) is Mine and back.note == "note" and back == state
    assert type(state.get_layer_state("a")) is StateDict

    class Default(StateDict):
        def __missing__(self, key):
            return key

    assert Default()["x"] == "x" and Default().get("x") is None
    dead = weakref.ref(Mine("n"))
    gc.collect()
    assert dead() is None


def test_a_cycle_through_a_subclass_is_collected():
    state = Mine("n", arrays("w"))
    state.me = state
    dead = weakref.ref(state)
    del state
    gc.collect()
    assert dead() is None


def test_or_has_the_order_and_the_last_word_of_dict():
    a, b = StateDict(arrays("x", "y")), arrays("y", "z")
    assert list(a | b) == ["x", "y", "z"] and (a | b)["y"] is b["y"]
    assert list(b | a) == ["y", "z", "x"] and (b | a)["y"] is a["y"]
    assert type(b | a) is StateDict and type(collections.OrderedDict(b) | a) is not dict
    a |= b
    assert type(a) is StateDict and a["z"] is b["z"]
    with pytest.raises(TypeError):
        a | [("x", np.ones(1))]
    same = a
    a |= [("q", np.ones(1))]
    assert same is a and "q" in a


def test_fromkeys_puts_one_array_under_many_names():
    w = np.ones(2)
    state = ModelStateDict.fromkeys(["a", "b"], w)
    assert type(state) is ModelStateDict and state["a"] is w and state["b"] is w
    assert StateDict.fromkeys([]) == {}


def test_reference_counts_are_restored():
    w, name = np.ones(2), "".join(["na", "me"])
    before = sys.getrefcount(w), sys.getrefcount(name)
    state = StateDict({name: w})
    state |= {name: w}
    state.update(state)
    other = state.copy() | {"x": w}
    assert other == other.copy() and other.nbytes == 32 and other.digest()
    state.pop(name)
    other.clear()
    del state, other
    assert (sys.getrefcount(w), sys.getrefcount(name)) == before


# ---- equality, bytes, digest ----


def test_equality_is_of_names_dtypes_shapes_and_bits():
    nan = np.array([np.nan, 1.0], np.float32)
    state = StateDict(a=nan, b=np.zeros((2, 3)))
    assert state == StateDict(b=np.zeros((2, 3)), a=nan.copy())
    assert state == {"a": nan, "b": np.zeros((2, 3))} == state
    assert state == StateDict(a=nan.astype(">f4"), b=np.zeros((3, 2)).T)
    other_nan = np.frombuffer(struct.pack("<If", 0x7FC00001, 1.0), np.float32)
    assert state == StateDict(a=other_nan, b=np.zeros((2, 3)))
    for different in (
        {"a": nan},
        {"a": nan, "b": np.zeros((3, 2))},
        {"a": nan, "b": np.zeros((2, 3), np.float32)},
        {"a": nan, "c": np.zeros((2, 3))},
        {"a": nan, "b": -np.zeros((2, 3))},
        {"a": np.array([np.nan, 2.0], np.float32), "b": np.zeros((2, 3))},
    ):
        assert state != different and different != state and (state == different) is False
    assert state != 3 and (state == [("a", nan)]) is False
    with pytest.raises(TypeError, match="unhashable"):
        hash(state)
    with pytest.raises(TypeError):
        assert state < state


def test_arrays_that_only_numpy_knows_are_compared_as_bytes():
    dates = np.array(["2026-01-01", "NaT"], "M8[D]")
    assert StateDict(d=dates) == StateDict(d=dates.copy())
    assert StateDict(d=dates) != StateDict(d=dates[::-1])
    assert StateDict(d=dates).digest() == StateDict(d=dates.copy()).digest()


def documented_digest(state):
    """The stream that the docstring of `digest` describes."""
    hashed = hashlib.sha256()
    for name in sorted(state, key=lambda name: name.encode()):
        array = np.asarray(state[name])
        text, kind = name.encode(), array.dtype.name.encode()
        numbers = [len(text), len(kind), array.ndim, *array.shape]
        hashed.update(struct.pack(f"<{len(numbers)}Q", *numbers) + text + kind)
        hashed.update(array.astype(array.dtype.newbyteorder("<")).tobytes("C"))
    return hashed.hexdigest()


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=6),
        st.tuples(
            st.sampled_from(["f2", "f4", ">f8", "i1", ">u4", "?", "c8"]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=5,
    )
)
def test_digest_follows_its_documentation(described):
    state = StateDict()
    for i, (name, (dtype, shape)) in enumerate(described.items()):
        count = int(np.prod(shape, dtype=int))
        state[name] = np.arange(i, i + 2 * count)[::2].astype(dtype)[::-1].reshape(shape)
    assert state.digest() == documented_digest(state)
    shuffled = StateDict(reversed(state.items()))
    assert shuffled.digest() == state.digest() and shuffled == state
    assert state.nbytes == sum(array.nbytes for array in state.values())


# ---- models ----


def test_layers_follow_every_change_of_names():
    state = ModelStateDict(arrays("a.w", "a.b", "c"))
    assert list(state.get_layer_state("a")) == ["w", "b"]
    new = np.ones(1)
    changes = [
        (lambda: state.pop("a.b"), ["w"]),
        (lambda: state.__setitem__("a.x", new), ["w", "x"]),
        (lambda: state.update({"a.y": new}), ["w", "x", "y"]),
        (lambda: state.__delitem__("a.w"), ["x", "y"]),
        (lambda: state.setdefault("a.w", new), ["x", "y", "w"]),
        (lambda: (state.pop("a.x"), state.__setitem__("a.z", new)), ["y", "w", "z"]),
        (lambda: (state.pop("a.y"), dict.__setitem__(state, "a.q", new)), ["w", "z", "q"]),
        (lambda: state.clear(), []),
        (lambda: state.__ior__({"a.e": new}), ["e"]),
    ]
    for change, names in changes:
        change()
        assert list(state.get_layer_state("a")) == names
    state["a.e"] = fresh = np.zeros(1)
    assert state.get_layer_state("a")["e"] is fresh


def test_setting_a_layer_leaves_the_rest_untouched():
    state = ModelStateDict(arrays("a.w", "a.b", "ab.w", "a"))
    before = dict(state)
    w = np.ones(5)
    state.set_layer_state("a", {"w": w, "deep.x": w})
    assert state["a.w"] is w and state["a.deep.x"] is w
    assert all(state[name] is before[name] for name in ("a.b", "ab.w", "a"))
    with pytest.raises(TypeError):
        state.set_layer_state("a", {"w": before["a.w"], "x": 3})
    assert state["a.w"] is w
    state.set_layer_state("n", collections.ChainMap({"w": w}))
    assert state["n.w"] is w


@pytest.mark.skipif(not GIL, reason="without the GIL every update makes the index anew")
def test_new_arrays_under_old_names_leave_the_index_as_it_is():
    w = np.zeros(1)
    model = ModelStateDict({f"layers.{i}.{j}": w for i in range(500) for j in range(9)})

    def seconds(call, repeats):
        start = time.thread_time()
        for i in range(repeats):
            call(f"layers.{i}")
        return (time.thread_time() - start) / repeats

    def replace(name):
        model.set_layer_state(name, model.get_layer_state(name))

    def add(name):
        model.set_layer_state(name, {"new": w})
        model.get_layer_state(name)

    # building the index takes 100 times as long as adding a layer
    assert min(seconds(replace, 100) for _ in range(3)) < seconds(add, 20) / 5


@pytest.mark.parametrize("call", ["get_layer_state", "set_layer_state"])
@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("", ValueError, "empty"),
        ("a.", ValueError, "ends with a dot"),
        (3, TypeError, "must be a str"),
    ],
)
def test_invalid_layer_names_are_refused(call, name, error, text):
    state = ModelStateDict(arrays("a.w"))
    arguments = (name,) if call == "get_layer_state" else (name, arrays("w"))
    with pytest.raises(error, match=text):
        getattr(state, call)(*arguments)
    assert list(state) == ["a.w"]


def test_every_state_dict_has_layers():
    for kind in (StateDict, OptimizerStateDict):
        state = kind(arrays("a.w", "a.b", "b.w"))
        layer = state.get_layer_state("a")
        assert type(layer) is StateDict and layer["w"] is state["a.w"]
        assert layer.get_layer_state("none") == {} and state.layer_names() == ["a", "b"]
        state.set_layer_state("b", layer)
        assert state["b.b"] is state["a.b"]


def test_bad_attributes_are_refused():
    with pytest.raises(ValueError, match="negative"):
        ModelStateDict(layer_count=-1)
    with pytest.raises(TypeError, match="model_type must be a str"):
        ModelStateDict(model_type=3)
    with pytest.raises(ValueError, match="not one of sgd, adam"):
        OptimizerStateDict(optimizer_type="adamant")
    with pytest.raises(ValueError, match="step -1 is negative"):
        OptimizerStateDict(step=-1)
    with pytest.raises(TypeError, match="step must be an int, got float"):
        OptimizerStateDict(step=1.5)
    with pytest.raises(TypeError, match="step must be an int, got bool"):
        OptimizerStateDict(step=True)
    with pytest.raises(TypeError, match="layer_count must be an int, got str"):
        ModelStateDict(layer_count="3")
    for text in ("fast", "0.5"):
        with pytest.raises(TypeError, match=f"learning_rate must be a number, got '{text}'"):
            OptimizerStateDict(learning_rate=text)


@pytest.mark.parametrize(
    ("group", "rate"), [({"lr": 0.5}, 0.5), ({"lr": "cosine"}, 0), ({"lr": 10**400}, 0), ({}, 0)]
)
def test_the_learning_rate_comes_from_the_first_group(group, rate):
    groups = [group, {"lr": 2.0}]
    assert OptimizerStateDict(param_groups=groups).learning_rate == rate
    assert OptimizerStateDict(param_groups=groups, learning_rate=0.25).learning_rate == 0.25
    with pytest.raises(ValueError, match="depth"):
        ModelStateDict().layer_names(0)


# ---- optimizers ----


def test_optimizer_states_are_found_by_parameter():
    state = OptimizerStateDict.create("adam")
    assert state.optimizer_type is OptimizerType.ADAM and state.optimizer_type == "adam"
    m, v = np.ones(2), np.zeros(2)
    state.set_state("layer.0.weight", "m", m)
    state.set_state("layer.0.weight", "v", v)
    state["layer.0.m"] = m
    assert state["layer.0.weight.m"] is m
    assert state.parameters() == ["layer.0.weight", "layer.0"]
    assert state.state_names("layer.0.weight") == ["m", "v"]
    assert state.get_state("layer.0") == {"m": m}
    assert state.get_state("none") == {} and state.state_names("none") == []
    for name, error in (("", ValueError), ("a.b", ValueError), (3, TypeError)):
        with pytest.raises(error):
            state.set_state("w", name, m)
    with pytest.raises(ValueError, match="ends with a dot"):
        state.set_state("w.", "m", m)
    assert len(state) == 3


def test_stateful_protocol_needs_two_methods():
    class Half:
        def get_state_dict(self):
            return StateDict()

    class Both(Half):
        def load_state_dict(self, state):
            pass

    assert isinstance(Both(), Stateful) and not isinstance(Half(), Stateful)


# ---- repr ----


def test_repr_shows_first_and_last_and_counts_the_rest():
    state = ModelStateDict((f"t{i}", np.zeros((i, 2), np.float16)) for i in range(1000))
    lines = repr(state).splitlines()
    assert lines[0] == f"ModelStateDict: 1,000 tensors, {state.nbytes / 2**20:.2f} MiB"
    assert lines[1] == "  t0    float16  (0, 2)" and lines[-1] == "  t999  float16  (999, 2)"
    assert lines[16] == "  … 982 more" and len(lines) == 20
    assert repr(StateDict(w=np.zeros(2))) == "StateDict: 1 tensor, 16 B\n  w  float64  (2,)"
    assert repr(StateDict()) == "StateDict: 0 tensors, 0 B"
    assert len(repr(StateDict({"x" * 5000: np.zeros(2)}))) < 200
    assert state._ipython_key_completions_() == list(state)


def test_state_classes_are_not_lazy_copies():
    assert mlstate.StateDict is mlstate.state.StateDict
    assert StateDict.__module__.startswith("mlstate")


@pytest.mark.parametrize("groups", [{"params": ["w"]}, "ab", None, [3]])
def test_groups_must_be_a_sequence_of_mappings(groups):
    state = OptimizerStateDict(param_groups=[{"lr": 1}])
    with pytest.raises(TypeError, match="param_groups must be a sequence of mappings"):
        state.param_groups = groups
    assert state.param_groups == ({"lr": 1},)


def test_records_are_compared_and_hashed_by_their_values_in_any_byte_order():
    values = np.array([(1, 2.0), (3, 4.0)], [("x", ">i4"), ("y", "<f8")])
    swapped = values.astype([("x", "<i4"), ("y", ">f8")])
    others = np.frombuffer(values.tobytes(), [("x", "<i4"), ("y", "<f8")])
    state = StateDict(w=values)
    assert state == StateDict(w=swapped) and state.digest() == StateDict(w=swapped).digest()
    assert state != StateDict(w=others) and state.digest() != StateDict(w=others).digest()
    nested = np.zeros(2, [("inner", [("z", ">u2", (2,))])])
    nested["inner"]["z"][1] = [5, 6]
    turned = nested.astype([("inner", [("z", "<u2", (2,))])])
    assert StateDict(w=nested[::-1]) == StateDict(w=turned[::-1]) != StateDict(w=turned)
    assert StateDict(w=np.array([b"ab"], "V2")) == StateDict(w=np.array([b"ab"], "V2"))


@pytest.mark.parametrize(
    "dtype",
    [
        "longdouble",
        "clongdouble",
        np.dtype([("a", "i1"), ("b", "f8")], align=True),
        np.dtype([("a", "i1"), ("b", ">f8")], align=True),
        [("inner", np.dtype([("a", "i1"), ("b", "f8")], align=True), (2,)), ("x", "longdouble")],
        {"names": ["a"], "formats": ["i2"], "offsets": [3], "itemsize": 8},
    ],
)
def test_padding_of_elements_does_not_affect_equality_or_digests(dtype):
    dtype = np.dtype(dtype)
    arrays = [np.frombuffer(bytearray([byte]) * (3 * dtype.itemsize), dtype) for byte in (0, 255)]
    for array in arrays:
        for i in range(3):
            array[i] = _nested(dtype, i)
    states = [StateDict(w=array) for array in arrays]
    assert states[0] == states[1] and states[0].digest() == states[1].digest()
    arrays[1][2] = _nested(dtype, 1)
    assert states[0] != states[1] and states[0].digest() != states[1].digest()


def _nested(dtype, number):
    """Return `number` as a value of a dtype: a tuple for each record in it."""
    if dtype.subdtype is not None:
        base, (count,) = dtype.subdtype
        return [_nested(base, number)] * count
    if dtype.names is None:
        return number
    return tuple(_nested(dtype.fields[name][0], number) for name in dtype.names)


def test_masked_arrays_are_refused_because_their_mask_would_be_lost(torch):
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    state, other = StateDict(w=masked), StateDict(w=masked.data)
    texts = StateDict(w=np.ma.array(["a", "b"], mask=[True, False]))
    shards = StateDict(w=Shard(masked))
    for refused in (
        lambda: state == other,
        lambda: other == state,
        lambda: texts == StateDict(w=np.array(["a", "b"])),
        lambda: diff(state, other),
        lambda: load_into(state, other),
        lambda: load_into(other, state),
        state.digest,
        texts.digest,
        state.to_torch,
        lambda: StateDict(a=masked.data, w=masked).to_torch(copy=True),
        lambda: state.astype("float32"),
        lambda: shards.astype("float32"),
    ):
        with pytest.raises(TypeError, match="'w' is a masked array"):
            refused()
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        loaded = pickle.loads(pickle.dumps(state, protocol))["w"]
        assert loaded.mask.tolist() == [False, True]
    fields = np.rec.array([(1, 2.0)], dtype=[("mask", "i4"), ("x", "f8")])
    assert StateDict(w=fields) == StateDict(w=fields.copy())


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (OptimizerStateDict(learning_rate=float("nan")), "learning_rate"),
        (OptimizerStateDict(learning_rate=float("-inf")), "learning_rate"),
        (ModelStateDict(model_type="\ud800"), "model_type"),
    ],
)
def test_a_save_names_the_attribute_that_a_manifest_cannot_hold(tmp_path, state, name):
    model, optimizer = (None, state) if name == "learning_rate" else (state, None)
    with pytest.raises(ValueError, match=name):
        mlstate.save(tmp_path / "c", model, optimizer, step=1)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("dtype", ["longdouble", np.dtype([("a", "i1"), ("b", "f8")], align=True)])
def test_a_scalar_with_padding_equals_its_array(dtype):
    array = np.frombuffer(bytearray(b"\xff" * np.dtype(dtype).itemsize), dtype).reshape(())
    array = array if array.dtype.names else np.array(1.5, dtype)
    scalar, whole = StateDict(w=array[()]), StateDict(w=array)
    assert scalar == whole
    assert scalar.digest() == whole.digest()
