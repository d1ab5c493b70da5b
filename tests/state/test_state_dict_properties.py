"""Random sequences of calls on a state dict and a plain dict, which must stay equal."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tries import tries

from mlstate import ModelStateDict, OptimizerStateDict, StateDict, TensorNotFoundError
from mlstate.state import diff, get_missing_keys, keys_match, load_into

KINDS = (StateDict, ModelStateDict, OptimizerStateDict)

# Few names, so that calls collide: nested layers, empty parts, any text.
NAMES = st.sampled_from(["a", "a.w", "a.b", "a.b.w", "a..w", "ab.w", ".a", "é%s'.w", "b.", ""])
LAYERS = ["a", "a.b", "b", "é%s'", "nothing"]
ARRAYS = st.integers(0, 7).map(lambda n: np.full(n % 3, n, (np.float32, np.int8)[n % 2]))
ENTRIES = st.dictionaries(NAMES, ARRAYS, max_size=4)
BAD = st.sampled_from([("x", None), ("x", [1.0]), (3, np.ones(1)), ("\udc80", np.ones(1))])


def layer_of(model, name):
    """The specification's algorithm."""
    prefix = f"{name}."
    return {key[len(prefix) :]: model[key] for key in model if key.startswith(prefix)}


def layers_of(model):
    """Layers by their first tensor, without names that no layer can have."""
    parts = dict.fromkeys(key.rpartition(".")[0] for key in model if "." in key)
    return [part for part in parts if part and not part.endswith(".")]


def assert_same(state, model):
    """Names in the same order, and identical arrays."""
    assert list(state) == list(model)
    assert all(a is b for a, b in zip(state.values(), model.values(), strict=True))


class BesideDict(RuleBasedStateMachine):
    """Every call is made on both; an error changes neither."""

    @initialize(kind=st.sampled_from(KINDS), entries=ENTRIES)
    def begin(self, kind, entries):
        self.kind, self.model = kind, dict(entries)
        self.state = kind(entries)

    # ---- one entry ----

    @rule(name=NAMES, array=ARRAYS)
    def put(self, name, array):
        self.state[name] = self.model[name] = array

    @rule(name=NAMES)
    def delete(self, name):
        if name in self.model:
            del self.state[name], self.model[name]
            return
        with pytest.raises(TensorNotFoundError):
            del self.state[name]

    @rule(name=NAMES)
    def pop(self, name):
        assert self.state.pop(name, None) is self.model.pop(name, None)

    @precondition(lambda self: self.model)
    @rule()
    def pop_the_last(self):
        name, array = self.state.popitem()
        expected_name, expected = self.model.popitem()
        assert name == expected_name and array is expected

    @rule(name=NAMES, array=ARRAYS)
    def set_default(self, name, array):
        assert self.state.setdefault(name, array) is self.model.setdefault(name, array)

    @rule(name=NAMES)
    def remove(self, name):
        self.state.remove_tensor(name)
        self.model.pop(name, None)

    @rule(name=NAMES)
    def look_up(self, name):
        expected = self.model.get(name)
        assert self.state.get_tensor_or_none(name) is expected
        assert self.state.has_tensor(name) is (name in self.model)
        if expected is not None:
            assert self.state.get_tensor(name) is expected

    # ---- many entries ----

    @rule(entries=ENTRIES, way=st.sampled_from(["dict", "pairs", "state", "keywords"]))
    def update(self, entries, way):
        self.model.update(entries)
        if way == "keywords":
            self.state.update(**entries)
        else:
            container = {"dict": dict, "pairs": lambda e: iter(e.items()), "state": StateDict}[way]
            self.state.update(container(entries))

    @rule(entries=ENTRIES, reflected=st.booleans())
    def join(self, entries, reflected):
        joined = entries | self.state if reflected else self.state | entries
        assert_same(self.state, self.model)
        self.model = entries | self.model if reflected else self.model | entries
        self.state = joined

    @rule(entries=ENTRIES)
    def join_in_place(self, entries):
        before = self.state
        self.state |= entries
        self.model |= entries
        assert self.state is before

    @rule(entries=ENTRIES, bad=BAD, way=st.sampled_from(["update", "ior", "or"]))
    def bad_entries(self, entries, bad, way):
        call = {"update": self.state.update, "ior": self.state.__ior__, "or": self.state.__or__}
        with pytest.raises((TypeError, ValueError)):
            call[way]({**entries, bad[0]: bad[1]})

    @rule()
    def clear(self):
        self.state.clear()
        self.model.clear()

    # ---- copies ----

    @rule(copied=st.sampled_from([StateDict.copy, copy.copy]))
    def go_on_with_a_copy(self, copied):
        old, self.state = self.state, copied(self.state)
        old.clear()

    @rule(protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
    def go_on_with_a_pickle(self, protocol):
        old, self.state = self.state, pickle.loads(pickle.dumps(self.state, protocol))
        assert self.state == old and self.state.digest() == old.digest()
        assert list(self.state) == list(old)
        self.model = dict(self.state)  # copies of the arrays

    @rule()
    def compare_with_a_deep_copy(self):
        deep = copy.deepcopy(self.state)
        assert deep == self.state and keys_match(deep, self.model)
        assert diff(self.state, deep).identical
        for array in deep.values():
            array += 1
        load_into(deep, self.model)
        assert deep == self.state

    @precondition(lambda self: self.kind is ModelStateDict)
    @rule(name=st.sampled_from(LAYERS), entries=ENTRIES)
    def set_layer(self, name, entries):
        self.state.set_layer_state(name, entries)
        self.model.update({f"{name}.{key}": array for key, array in entries.items()})

    # ---- invariants ----

    @invariant()
    def is_the_dict(self):
        if not hasattr(self, "state"):
            return
        assert type(self.state) is self.kind and len(self.state) == len(self.model)
        assert_same(self.state, self.model)
        assert self.state == self.model and self.state == self.model
        assert not get_missing_keys(self.state, self.model)
        assert self.state.nbytes == sum(array.nbytes for array in self.model.values())
        if self.kind is ModelStateDict:  # its index must follow every change of names
            assert self.state.layer_names() == layers_of(self.model)
            tops = dict.fromkeys(key.partition(".")[0] for key in self.model if "." in key)
            assert self.state.layer_names(1) == [top for top in tops if top]
            for name in LAYERS:
                assert_same(self.state.get_layer_state(name), layer_of(self.model, name))


TestBesideDict = BesideDict.TestCase
TestBesideDict.settings = settings(deadline=None, max_examples=tries(80), stateful_step_count=30)
