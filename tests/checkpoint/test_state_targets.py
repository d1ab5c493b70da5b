"""Targets of nested values: objects in containers, and containers that are filled."""

import random
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest

import mlstate
from mlstate import CompatibilityError


class Position:
    """An object with a state."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


CONTAINERS = {
    "tuple": lambda *items: items,
    "list": lambda *items: list(items),
    "deque": lambda *items: deque(items, maxlen=3),
    "OrderedDict": lambda *items: OrderedDict(zip("ab", items, strict=True)),
    "defaultdict": lambda *items: defaultdict(list, zip("ab", items, strict=True)),
    "nested tuples": lambda first, second: ((first,), [(second, {"c": (1, 2)})]),
}


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_objects_in_containers_are_restored_in_place(tmp_path, container):
    rng, position = random.Random(1), Position(5)
    mlstate.save(tmp_path / "c", states={"x": {"v": container(rng, position), "n": 1}})
    expected = rng.random()
    own_rng, own_position = random.Random(2), Position()
    target = {"v": container(own_rng, own_position), "n": 0}
    before = target["v"]
    mlstate.load(tmp_path / "c", into={"states": {"x": target}})
    assert own_rng.random() == expected and own_position.value == 5 and target["n"] == 1
    assert type(target["v"]) is type(before)
    assert str(target["v"]) == str(container(own_rng, own_position))
    assert getattr(target["v"], "default_factory", list) is list


def holds_itself(container):
    container.append(container)
    return container


@pytest.mark.parametrize(
    "target", [holds_itself([0]), holds_itself(deque([0])), holds_itself([[0], {"a": (1,)}])]
)
def test_a_target_that_contains_itself_takes_the_saved_values(tmp_path, target):
    mlstate.save(tmp_path / "c", states={"x": type(target)([1, [2, 3]])})
    mlstate.load(tmp_path / "c", into={"states": {"x": target}})
    assert list(target) == [1, [2, 3]]


def test_a_deep_dict_that_contains_itself_takes_the_saved_values(tmp_path):
    mlstate.save(tmp_path / "c", states={"x": {"a": {"b": 1}}})
    inner = {"b": 0}
    inner["b"] = inner
    target = {"a": [inner]}
    mlstate.load(tmp_path / "c", into={"states": {"x": target}})
    assert target == {"a": {"b": 1}}


def test_a_target_with_objects_that_contains_itself_is_refused(tmp_path):
    mlstate.save(tmp_path / "c", states={"x": [Position(1), 2]})
    target = holds_itself([Position(5)])
    with pytest.raises(CompatibilityError, match=r"\['x'\]\[1\]: the target is also that of"):
        mlstate.load(tmp_path / "c", into={"states": {"x": target}})
    assert target[0].value == 5 and target[1] is target


@pytest.mark.parametrize(
    ("saved", "target", "text"),
    [
        ((Position(1), 2), (Position(), 2, 3), "a tuple of 3 values, the .* a tuple of 2 values"),
        ([Position(1)], (Position(),), "the target is a tuple, the checkpoint has list"),
        ((Position(1),), deque([Position()]), "the target is a deque, the checkpoint has tuple"),
        ([1], OrderedDict(a=Position()), "the target is a dict, the checkpoint has another value"),
    ],
)
def test_containers_of_objects_that_do_not_fit_are_refused(tmp_path, saved, target, text):
    mlstate.save(tmp_path / "c", states={"x": {"v": saved, "other": Position(7)}})
    targets = {"v": target, "other": Position()}
    with pytest.raises((CompatibilityError, TypeError), match=rf"states\['x'\]\['v'\].*{text}"):
        mlstate.load(tmp_path / "c", into={"states": {"x": targets}})
    assert targets["other"].value == 0


class Saved:
    """An object that can only be saved."""

    def state_dict(self):
        return {"value": 1}


@pytest.mark.parametrize("value", [Saved(), (Saved(),), {Position()}], ids=["own", "tuple", "set"])
def test_values_that_cannot_be_restored_in_place_are_refused(tmp_path, value):
    mlstate.save(tmp_path / "c", states={"x": {"v": 1}})
    target = {"v": value}
    with pytest.raises((CompatibilityError, TypeError), match=r"states\['x'\]\['v'\]"):
        mlstate.load(tmp_path / "c", into={"states": {"x": target}})
    assert target == {"v": value}


FILLED = {
    "deque": (deque([1, 2]), deque([0], maxlen=2)),
    "OrderedDict": (OrderedDict(b=1, a=2), OrderedDict(a=0, b=0)),
    "Counter": (Counter("aab"), Counter("ab")),
    "defaultdict": (defaultdict(int, a=1), defaultdict(int, a=0)),
}


@pytest.mark.parametrize("pair", FILLED.values(), ids=FILLED)
def test_containers_are_filled_in_place(tmp_path, pair):
    saved, target = pair
    mlstate.save(tmp_path / "c", states={"x": saved})
    mlstate.load(tmp_path / "c", into={"states": {"x": target}})
    assert target == saved and list(target) == list(saved)


def test_attributes_of_a_dict_are_restored_with_it(tmp_path):
    saved, target = OrderedDict(a=Position(1)), OrderedDict(a=Position())
    saved.versions, target.versions, target.own = {"a": 2}, {"a": 1}, 5
    mlstate.save(tmp_path / "c", states={"x": saved})
    mlstate.load(tmp_path / "c", into={"states": {"x": target}})
    assert vars(target) == {"versions": {"a": 2}, "own": 5} and target["a"].value == 1


def test_a_deque_that_would_drop_values_is_refused(tmp_path):
    mlstate.save(tmp_path / "c", states={"x": deque([1, 2, 3])})
    target = deque([0], maxlen=2)
    with pytest.raises(CompatibilityError, match="a deque of at most 2, the checkpoint has 3"):
        mlstate.load(tmp_path / "c", into={"states": {"x": target}})
    assert list(target) == [0]


def test_dicts_that_show_items_as_attributes_are_not_objects(tmp_path):
    class Items(dict):
        def __getattr__(self, name):
            return self[name]

    mlstate.save(tmp_path / "c", states={"x": {"v": {"a": 1}}})
    target = {"v": Items(a=np.ones(1))}
    mlstate.load(tmp_path / "c", into={"states": {"x": target}})
    assert target == {"v": {"a": 1}}


def parameter(value):
    torch = pytest.importorskip("torch")
    return torch.nn.Parameter(torch.full((2,), float(value)))


def optimizer_state(value, step):
    return mlstate.OptimizerStateDict({"p": parameter(value)}, step=step)


@pytest.mark.parametrize("saved", [dict, mlstate.StateDict, mlstate.ModelStateDict])
@pytest.mark.parametrize("target_class", [dict, mlstate.StateDict])
def test_parameters_in_nested_state_dicts_are_restored_in_place(tmp_path, saved, target_class):
    if saved is mlstate.ModelStateDict:
        target_class = saved
    mlstate.save(tmp_path, states={"s": {"e": saved({"p": parameter(1)}), "n": 1}})
    tensor = parameter(0)
    target = {"e": target_class({"p": tensor}), "n": 0}
    mlstate.load(tmp_path, into={"states": {"s": target}})
    assert (
        tensor.tolist() == [1, 1]
        and target["e"]["p"] is tensor
        and type(target["e"]) is target_class
    )


def test_nested_state_dicts_get_the_saved_attributes_or_are_refused(tmp_path):
    mlstate.save(tmp_path, states={"s": {"e": optimizer_state(1, 5), "n": 1}})
    target = {"e": optimizer_state(0, 2)}
    with pytest.raises(CompatibilityError, match=r"\['n'\]"):
        mlstate.load(tmp_path, into={"states": {"s": target}})
    assert target["e"].step == 2
    target["n"] = 0
    mlstate.load(tmp_path, into={"states": {"s": target}})
    assert target["e"].step == 5
    target["e"] = mlstate.StateDict({"p": parameter(0)})
    with pytest.raises(
        CompatibilityError, match=r"of the kind 'state', .* of the kind 'optimizer'"
    ):
        mlstate.load(tmp_path, into={"states": {"s": target}})


def test_lists_of_tensors_with_gradients_take_the_saved_length(tmp_path):
    saved = {"h": [parameter(3) * 1, parameter(4)], "t": (parameter(5),), "best": None, "n": [1]}
    mlstate.save(tmp_path, states={"s": saved})
    first = parameter(0)
    target = {"h": [first * 1], "t": (first, first), "best": first, "n": []}
    mlstate.load(tmp_path, into={"states": {"s": target}})
    assert [each.tolist() for each in target["h"]] == [[3, 3], [4, 4]]
    assert target["t"][0].tolist() == [5, 5] and target["best"] is None and target["n"] == [1]
    assert first.tolist() == [0, 0]
    target = {"h": [first, first], "t": (first * 1,), "best": [], "n": []}
    with pytest.raises(CompatibilityError, match=r"already|also that of"):
        mlstate.load(tmp_path, into={"states": {"s": target}})


def test_results_of_operations_deep_in_a_state_are_copied_for_an_undo(tmp_path):
    class Losses(Position):
        def state_dict(self):
            return {"inner": {"values": [self.value, (self.value,)]}}

        def load_state_dict(self, state):
            self.value = state["inner"]["values"][0]

    mlstate.save(tmp_path, states={"s": Losses(parameter(3) * 1)})
    target = Losses(parameter(0) * 1)
    mlstate.load(tmp_path, into={"states": {"s": target}})
    assert target.value.tolist() == [3, 3]
