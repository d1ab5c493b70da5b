"""Nested values come back with their class and order in every place, or are refused at save."""

import dataclasses
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import NamedTuple

import numpy as np
import pytest

import mlstate
from mlstate import CompatibilityError
from mlstate.checkpoint._states.containers import equal_values, walk
from mlstate.testing import run_ranks

NAN = float("nan")


class Span(NamedTuple):
    begin: int
    values: object = None


@dataclasses.dataclass(frozen=True)
class Window:
    size: int
    values: object = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass
class Slotted:
    __slots__ = ("size",)
    size: int


class Holder:
    """An object whose state is one value."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def same(first, second):
    """Whether values are equal in types and order too."""
    if isinstance(first, dict):
        pairs = zip(first, second, strict=False)
        if len(first) != len(second) or not all(same(*pair) for pair in pairs):
            return False
    return equal_values(first, second)


def version_of(path):
    text = (path / "manifest.json").read_bytes()
    return int(text.partition(b'"format_version": ')[2][:1])


LEAVES = (
    *(None, True, 1, -(2**70), 0.5, -0.0, NAN, float("inf"), 1j, "a", "", b"b", bytearray(b"c")),
    *(np.float32(2), np.arange(3), np.zeros((0, 2)), frozenset({1, b"x"}), {"s", 2.5}),
)
KEYS = ("a", "1", 1, None, 0.9, -2.5, float("inf"), b"k", b"", ("t", 1, (0.5, b"x")), "~v0~.9", "$")


def random_value(numbers, depth=0, leaves=LEAVES):
    """A value of any accepted class; containers become rare with the depth."""
    if numbers.random() < 0.25 + 0.25 * depth:
        return numbers.choice(leaves)
    values = [random_value(numbers, depth + 1, leaves) for _ in range(numbers.randrange(4))]
    keys = numbers.sample(KEYS, len(values))
    make = numbers.choice(
        [
            lambda: values,
            lambda: tuple(values),
            lambda: deque(values, maxlen=numbers.choice([None, 5])),
            lambda: Span(len(values), values),
            lambda: Window(len(values), tuple(values)),
            lambda: dict(zip(keys, values, strict=True)),
            lambda: OrderedDict(zip(keys, values, strict=True)),
            lambda: defaultdict(list, zip(keys, values, strict=True)),
            lambda: Counter({key: i for i, key in enumerate(keys)}),
        ]
    )
    return make()


AMOUNTS = pytest.mark.parametrize("amount", [300, pytest.param(2000, marks=pytest.mark.long)])


@AMOUNTS
def test_random_values_come_back_in_targets(tmp_path, amount):
    numbers = random.Random(52)
    values = {f"v{i}": random_value(numbers) for i in range(amount)}
    example = [Span(0), Window(0)]  # the target's classes
    saved = {"dict": [*values.values(), example], "object": Holder([values, example])}
    mlstate.save(tmp_path, states=saved)
    targets = {"dict": [example], "object": Holder(example)}
    mlstate.load(tmp_path, into={"states": targets})
    for value, loaded in zip(values.values(), targets["dict"], strict=False):
        assert same(value, loaded), value
    for name, value in values.items():
        assert same(value, targets["object"].value[0][name]), value


def tensors_of(torch):
    """Tensors of several orders of dimensions, of the parameter's dtype: torch converts others."""
    floats = torch.arange(24.0).reshape(2, 3, 4)
    channels_last = floats[None].to(memory_format=torch.channels_last)
    orders = floats, floats.permute(2, 0, 1), floats.mT, channels_last
    return *orders, torch.tensor(1.5), torch.zeros(0), torch.float16, torch.Size([1, 2])


@pytest.mark.torch
@AMOUNTS
def test_random_values_come_back_in_optimizers(tmp_path, amount):
    torch = pytest.importorskip("torch", reason="has optimizers")
    numbers, leaves = random.Random(53), (*LEAVES, *tensors_of(torch))
    values = {f"v{i}": [random_value(numbers, leaves=leaves)] for i in range(amount)}
    weight = torch.nn.Parameter(torch.ones(2))
    source, target = (torch.optim.SGD([weight], lr=0.1) for _ in range(2))
    example = [Span(0), Window(0)]  # the target's classes
    source.state[weight].update(values)
    source.param_groups[0].update(values)
    target.state[weight]["v0"] = example
    target.param_groups[0].update(dict.fromkeys(values, example))
    mlstate.save(tmp_path, optimizer=source)
    mlstate.load(tmp_path, into={"optimizer": target})
    for place in (target.state[weight], target.param_groups[0]):
        for name, value in values.items():
            assert same(value, place[name]), value
            pairs = zip(tensors_in(value, torch), tensors_in(place[name], torch), strict=True)
            assert all(first.stride() == other.stride() for first, other in pairs), value


def tensors_in(value, torch):
    return [each for each in walk(value) if isinstance(each, torch.Tensor) and each.numel()]


@pytest.mark.parametrize(
    ("value", "fields"),
    [(Span(1, [2]), (1, [2])), (Window(3), {"size": 3, "values": None}), (Slotted(4), {"size": 4})],
)
def test_records_need_a_target_of_their_class(tmp_path, value, fields):
    mlstate.save(tmp_path, states={"x": {"value": value}})
    loaded = mlstate.load(tmp_path).states["x"]["value"]
    assert type(loaded) is type(fields) and loaded == fields
    target = {"value": type(value)(*[0] * len(fields))}
    mlstate.load(tmp_path, into={"states": {"x": target}})
    assert type(target["value"]) is type(value) and target["value"] == value
    with pytest.raises(CompatibilityError, match=r"states\['x'\]: .* has no value of this class"):
        mlstate.load(tmp_path, into={"states": {"x": {"value": None}}})


def test_a_class_with_other_fields_is_refused(tmp_path):
    mlstate.save(tmp_path, states={"x": {"value": Span(1)}})
    other = namedtuple("Span", ["begin", "end"])
    other.__module__ = Span.__module__
    with pytest.raises(CompatibilityError, match="has other fields"):
        mlstate.load(tmp_path, into={"states": {"x": {"value": other(1, 2)}}})


def test_attributes_without_a_field_are_refused(tmp_path):
    value = Window(1)
    object.__setattr__(value, "note", "lost")
    with pytest.raises(TypeError, match=r"states\['x'\]\[0\] .* other attributes .*note"):
        mlstate.save(tmp_path, states={"x": [value]})


OBJECTS = {
    "generator": lambda: np.random.default_rng(1),
    "python": lambda: random.Random(1),
    "object": lambda: Holder(1),
    "in a list": lambda: [{"a": (np.random.PCG64(1),)}],
    "in a record": lambda: Span(0, Holder(1)),
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_objects_inside_a_state_dict_are_refused(tmp_path, make):
    with pytest.raises(TypeError, match=r"states\['x'\]\['value'\].* a state of its own"):
        mlstate.save(tmp_path / "c", states={"x": Holder(make())})
    assert not (tmp_path / "c").exists()


def test_the_remedy_for_an_object_inside_stores_it(tmp_path):
    source, target = np.random.default_rng(1), np.random.default_rng(2)
    mlstate.save(tmp_path, states={"x": Holder(3), "generator": source})
    mlstate.load(tmp_path, into={"states": {"generator": target}})
    assert target.random() == source.random()


class Nested(Holder):
    """Keeps an object after itself, as a warm-up keeps its scheduler."""


def test_excluded_values_of_nested_states_keep_the_targets(tmp_path):
    source = {"x": Nested({"inner": Holder(1), "count": 2}), "list": [{"a": 1}, 3]}
    target = {"x": Nested({"inner": Holder(5), "count": 0}), "list": [{"a": 7}, 0]}
    inner = target["x"].value["inner"]
    states = {**source, "inner": source["x"].value["inner"]}
    mlstate.save(tmp_path, states=states, exclude=["x.*.inner", "list.0.a"])
    mlstate.load(tmp_path, into={"states": {**target, "inner": inner}})
    assert target["x"].value == {"inner": inner, "count": 2} and inner.value == 1
    assert target["list"] == [{"a": 7}, 3]
    loaded = mlstate.load(tmp_path).states
    assert loaded["x"] == {"value": {"count": 2}} and loaded["list"] == [{}, 3]


def test_a_pattern_matches_no_part_of_a_generator(tmp_path):
    source, target = (np.random.default_rng(seed) for seed in range(2))
    states = {"x": {"generator": source, "state": 1}}
    mlstate.save(tmp_path, states=states, exclude="*.state")
    mlstate.load(tmp_path, into={"states": {"x": {"generator": target, "state": 2}}})
    assert target.random() == source.random()


def test_a_pattern_must_match_on_any_rank(tmp_path):
    states = [{"x": {"a": 1, "b": 2}}, {"x": {"a": 1}}, {"x": {"c": 3}}]
    excludes = [["x.b", "x.c"], ["x.c", "x.b", "x.b"], ("x.b", "x.c")]

    def save(group):
        exclude = excludes[group.rank]
        mlstate.save(tmp_path / "c", states=states[group.rank], exclude=exclude, group=group)

    run_ranks(3, save)
    assert mlstate.load(tmp_path / "c").states["x"] == [{"a": 1}, {"a": 1}, {}]


@pytest.mark.parametrize(
    ("excludes", "text"),
    [
        ([["x.a", "x.d"]] * 2, r"^exclude= has 'x\.d', which matches no state"),
        ([["x.a"], ["x.a", "x.b"]], r"exclude= has 'x\.b' on rank 1, and not on rank 0"),
        (["x.a", None], r"exclude= has 'x\.a' on rank 0, and not on rank 1"),
    ],
)
@pytest.mark.parametrize("save", [mlstate.save, mlstate.checkpoint.save_async])
def test_all_ranks_refuse_unused_or_different_patterns(tmp_path, excludes, text, save):
    def refused(group):
        with pytest.raises(ValueError, match=text) as caught:
            options = {"states": {"x": {"a": 1, "b": 2}}, "exclude": excludes[group.rank]}
            handle = save(tmp_path / "c", **options, group=group)
            if save is not mlstate.save:
                handle.wait()
        return str(caught.value)

    assert len(set(run_ranks(2, refused))) == 1
    assert not (tmp_path / "c" / "manifest.json").exists()


OLDER = [1, {"a": (2, {3: None}), "b": deque([np.ones(2)])}, {4.5}]


@pytest.mark.parametrize("value", [{0.5: 1}, {b"a": 1}, {(1,): 1}, Span(1), Window(1)], ids=repr)
def test_newer_forms_alone_raise_the_version(tmp_path, value):
    mlstate.save(tmp_path / "old", states={"x": OLDER})
    mlstate.save(tmp_path / "new", states={"x": [OLDER, value]})
    assert version_of(tmp_path / "old") == 2 and version_of(tmp_path / "new") == 3
    mlstate.checkpoint.reshard(tmp_path / "new", tmp_path / "again", layout="rows", world_size=1)
    assert version_of(tmp_path / "again") == 3


def test_a_newer_form_on_one_rank_raises_the_version(tmp_path):
    def save(group):
        value = {0.5: 1} if group.rank else {"a": 1}
        mlstate.save(tmp_path / "c", states={"x": value}, group=group)

    run_ranks(2, save)
    assert version_of(tmp_path / "c") == 3
    assert mlstate.load(tmp_path / "c").states["x"] == [{"a": 1}, {0.5: 1}]


def test_a_diff_lists_the_items_of_every_container(tmp_path):
    for name, value in {"a": 1, "b": 2}.items():
        mlstate.save(tmp_path / name, states={"x": [deque([0, value]), {0.5: value}]})
    difference = mlstate.diff(tmp_path / "a", tmp_path / "b")
    assert [each.name for each in difference.changes] == ["states.x.0.1", "states.x.1.0.5"]


def groups_in(order):
    groups = [{"params": ["a", "b"], "lr": 0.1}, {"params": ["c"], "lr": 0.2}]
    arrays = {f"{name}.m": np.ones(2) for name in "abc"}
    return mlstate.OptimizerStateDict(arrays, param_groups=[groups[i] for i in order])


def test_a_diff_matches_groups_in_any_order(tmp_path):
    first, second = groups_in([0, 1]), groups_in([1, 0])
    second.param_groups = [{**g, "params": g["params"][::-1]} for g in second.param_groups]
    mlstate.save(tmp_path / "a", optimizer=first)
    mlstate.save(tmp_path / "b", optimizer=second)
    assert mlstate.diff(tmp_path / "a", tmp_path / "b").identical
    second.param_groups = [{**second.param_groups[0], "lr": 0.3}, second.param_groups[1]]
    mlstate.save(tmp_path / "b", optimizer=second)
    difference = mlstate.diff(tmp_path / "a", tmp_path / "b")
    assert [each.name for each in difference.changes] == ["optimizer.param_groups[1]['lr']"]


def test_split_and_joined_groups_match_if_their_values_are_equal(tmp_path):
    joined, split = groups_in([0, 1]), groups_in([0, 1])
    joined.param_groups = [{"params": ["a", "b", "c"], "lr": 0.1, "betas": (0.9, 0.99)}]
    halves = [{"params": names, "lr": 0.1, "betas": (0.9, 0.99)} for names in (["c", "a"], ["b"])]
    split.param_groups = halves
    mlstate.save(tmp_path / "joined", optimizer=joined)
    mlstate.save(tmp_path / "split", optimizer=split)
    for pair in (("joined", "split"), ("split", "joined")):
        assert mlstate.diff(*(tmp_path / name for name in pair)).identical
    assert not mlstate.state.check_compatibility(joined, split).warnings
    assert not mlstate.state.check_compatibility(split, joined).warnings
    split.param_groups = [halves[0], {**halves[1], "lr": 0.3}]
    mlstate.save(tmp_path / "split", optimizer=split)
    difference = mlstate.diff(tmp_path / "joined", tmp_path / "split")
    assert "optimizer.param_groups[1]['lr']" in difference.unexpected
    [warning] = mlstate.state.check_compatibility(split, joined).warnings
    assert "in other groups" in warning
    names = ["param_0", "param_1", "param_2"]
    joined.param_groups = [{"params": names, "lr": 0.1}]
    split.param_groups = [{"params": each, "lr": 0.1} for each in (names[:2], names[2:])]
    [warning] = mlstate.state.check_compatibility(joined, split).warnings  # by position
    assert "in other groups" in warning
