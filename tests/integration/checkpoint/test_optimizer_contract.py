"""What a checkpoint keeps of an optimizer's contract: values, nested states, own load methods."""

import collections
import copy
import json
import math
import typing

import numpy as np
import pytest
from any_format import read_any, write_any

import mlstate
from mlstate import CompatibilityError, OptimizerStateDict
from mlstate.checkpoint import inspect
from mlstate.checkpoint._states.containers import equal_values

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="torch is the peer to agree with")

optim = torch.optim


def trained(make, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    module = torch.nn.Linear(3, 2).to(dtype)
    optimizer = make(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    if seed == 0:
        optimizer.step()
    return module, optimizer


def sgd(parameters):
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def save_and_load(path, source, target, **keywords):
    mlstate.save(path, *source)
    mlstate.load(path, into={"model": target[0], "optimizer": target[1]}, **keywords)


class CodeBooks(optim.Adam):
    """Keeps bytes, which its loader protects from torch's conversion."""

    fails = False

    def step(self, closure=None):
        super().step()
        for state in self.state.values():
            state["codes"] = torch.arange(256).to(torch.uint8)

    def load_state_dict(self, state_dict):
        codes = {number: values["codes"] for number, values in state_dict["state"].items()}
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, value in codes.items():
            self.state[parameters[number]]["codes"] = value
        if self.fails:
            self.fails = False
            raise RuntimeError("bad codes")


def test_own_load_methods_receive_the_saved_dtypes(tmp_path):
    source, target = trained(CodeBooks), trained(CodeBooks, 1)
    save_and_load(tmp_path / "c", source, target)
    state = target[1].state[target[0].weight]
    assert state["codes"].dtype == torch.uint8
    assert torch.equal(state["codes"], source[1].state[source[0].weight]["codes"])


def test_failing_load_method_keeps_the_targets(tmp_path):
    source, target = trained(CodeBooks), trained(CodeBooks)
    with torch.no_grad():
        target[0].weight.fill_(7.0)
        target[1].state[target[0].weight]["exp_avg"].fill_(5.0)
    target[1].param_groups[0]["lr"] = 0.5
    target[1].fails = True
    with pytest.raises(CompatibilityError, match=r"optimizer: .* nothing was .* bad codes"):
        save_and_load(tmp_path / "c", source, target)
    assert (target[0].weight == 7.0).all()
    assert (target[1].state[target[0].weight]["exp_avg"] == 5.0).all()
    assert target[1].param_groups[0]["lr"] == 0.5


def test_load_hooks_run_once(tmp_path):
    source, target = trained(sgd), trained(sgd, 1)
    calls = []
    target[1].register_load_state_dict_pre_hook(lambda _, state: calls.append(len(state["state"])))
    target[1].register_load_state_dict_post_hook(lambda _: calls.append("after"))
    save_and_load(tmp_path / "c", source, target)
    assert calls == [2, "after"]


class Warm(optim.SGD):
    """Has a value beside the groups and the states."""

    warmup = 3

    def state_dict(self):
        return {**super().state_dict(), "warmup": self.warmup}

    def load_state_dict(self, state):
        state = dict(state)
        self.warmup = state.pop("warmup")
        super().load_state_dict(state)


def warm(parameters):
    return Warm(parameters, lr=0.1, momentum=0.9)


def with_state(key, value):
    def change(module, optimizer):
        optimizer.state[module.weight if key != "shared" else key][key] = value

    return change


BEYOND_TABLES = {
    "own values": (warm, lambda _, optimizer: setattr(optimizer, "warmup", 7)),
    "state of no parameter": (sgd, with_state("shared", {"count": torch.ones(2)})),
    "name with a dot": (sgd, with_state("a.b", torch.ones(2))),
    "name of a number": (sgd, with_state(3, [torch.ones(2)])),
    "large group": (sgd, lambda _, o: o.param_groups[0].update(x=torch.ones(20000))),
}


@pytest.mark.parametrize(("make", "change"), BEYOND_TABLES.values(), ids=BEYOND_TABLES)
def test_optimizers_beyond_tables_are_stored_by_their_methods(tmp_path, make, change):
    source, target = trained(make), trained(make, 1)
    change(*source)
    save_and_load(tmp_path / "c", source, target)
    assert equal_values(source[1].state_dict(), target[1].state_dict())
    assert mlstate.load(tmp_path / "c").states.keys() == {"optimizer"}
    manager = mlstate.CheckpointManager(tmp_path / "steps")
    manager.save(1, *source)
    again = trained(make, 1)
    manager.restore(1, into={"model": again[0], "optimizer": again[1]})
    assert equal_values(source[1].state_dict(), again[1].state_dict())
    with pytest.raises(ValueError, match=r"states\['optimizer'\], and another state has"):
        mlstate.save(tmp_path / "d", *source, states={"optimizer": 1})


def test_an_optimizer_without_a_saved_value_is_refused(tmp_path):
    source, target = trained(warm), trained(sgd, 1)
    with pytest.raises(CompatibilityError, match=r"state_dict\(\) lacks 'warmup'"):
        save_and_load(tmp_path / "c", source, target)
    with pytest.raises(TypeError, match=r"has 'warmup' too, so .* mlstate.save\(path, model"):
        OptimizerStateDict.from_torch(source[1], source[0])


class CopiedSparse(optim.SGD):
    """Keeps a sparse state, which its state_dict copies."""

    def state_dict(self):
        return copy.deepcopy(super().state_dict())


def test_copies_of_sparse_states_are_refused_by_type(tmp_path):
    module, optimizer = trained(CopiedSparse)
    optimizer.state[module.weight]["seen"] = torch.eye(2, 3).to_sparse()
    with pytest.raises(TypeError, match=r"'seen'\] is torch.sparse_coo: store its to_dense"):
        mlstate.save(tmp_path / "c", module, optimizer)


def test_lbfgs_resumes_bit_for_bit(tmp_path):
    def run(module, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (module(torch.arange(6.0).reshape(2, 3)) - 3).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    def make(parameters):
        return optim.LBFGS(parameters, max_iter=3)

    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    optimizer = make(module.parameters())
    run(module, optimizer)
    fresh = trained(make, 1)
    save_and_load(tmp_path / "c", (module, optimizer), fresh)
    run(module, optimizer)
    run(*fresh)
    assert torch.equal(module.weight, fresh[0].weight)
    text = OptimizerStateDict.from_torch(optimizer, module)
    assert json.loads(json.dumps(text.param_groups)) == list(text.param_groups)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (len, r"param_groups\[0\]\['x'\] is a builtins.builtin_function"),
        ([1, {"a": len}], r"param_groups\[0\]\['x'\]\[1\]\['a'\] is a builtins"),
        (collections.defaultdict(len), r"\['x'\] is a defaultdict whose default_factory"),
        (
            torch.nn.Linear(1, 1),
            r"is a torch.nn.modules.linear.Linear: it is an object inside a value",
        ),
        (torch.ones(1, requires_grad=True), "a torch.Tensor: it requires gradients"),
        (torch.Generator(), "is a torch._C.Generator: it is an object"),
    ],
)
def test_values_that_cannot_be_restored_are_refused_by_path(tmp_path, value, text):
    source = trained(sgd)
    source[1].param_groups[0]["x"] = value
    with pytest.raises((TypeError, ValueError), match=text):
        mlstate.save(tmp_path / "c", *source)


@pytest.mark.parametrize("value", [torch.Size([1, 2]), collections.defaultdict(list, a=[1])])
def test_values_of_groups_keep_their_class(tmp_path, value):
    source, target = trained(sgd), trained(sgd, 1)
    source[1].param_groups[0]["x"] = value
    source[1].state[source[0].weight]["y"] = [value]
    save_and_load(tmp_path / "c", source, target)
    for loaded in (target[1].param_groups[0]["x"], target[1].state[target[0].weight]["y"][0]):
        assert type(loaded) is type(value) and loaded == value


def test_json_values_keep_the_manifest_format(tmp_path):
    module, optimizer = trained(optim.AdamW)
    mlstate.save(tmp_path / "c", module, optimizer)
    (group,) = inspect(tmp_path / "c").optimizer["param_groups"]
    assert group["betas"] == [0.9, 0.999] and group["params"] == ["weight", "bias"]
    assert all(not isinstance(value, dict) for value in group.values())


def test_old_groups_without_names_match_by_position_with_a_warning(tmp_path):
    module, optimizer = trained(lambda p: optim.SGD([{"params": [q]} for q in p], lr=0.1))
    optimizer.param_groups[1]["lr"] = 0.5
    mlstate.save(tmp_path / "c", None, optimizer)
    other = optim.SGD([{"params": [module.weight]}, {"params": [module.bias]}], lr=9.0)
    with pytest.warns(UserWarning, match="are matched by position"):
        mlstate.load(tmp_path / "c", into={"optimizer": other})
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.5]
    merged = optim.SGD(module.parameters(), lr=9.0)
    with pytest.raises(CompatibilityError, match=r"by position, but have \[1, 1\] parameters"):
        mlstate.load(tmp_path / "c", into={"optimizer": merged})
    assert merged.param_groups[0]["lr"] == 9.0


def test_values_of_old_checkpoints_keep_the_optimizers_types():
    module, optimizer = trained(lambda p: optim.Adam(p, lr=torch.tensor(0.1), capturable=False))
    state = OptimizerStateDict.from_torch(optimizer, module)
    state.param_groups = [
        {**state.param_groups[0], "lr": 0.5, "layers": [1, 2], "capturable": True}
    ]
    optimizer.param_groups[0].update(layers=[3], rule=len)
    with pytest.warns(UserWarning, match="the checkpoint lacks 'rule'"):
        (group,) = state.to_torch(optimizer, module)["param_groups"]
    assert torch.equal(group["lr"], torch.tensor(0.5)) and group["layers"] == [1, 2]


@pytest.mark.parametrize(
    "make", [optim.Adam, optim.NAdam, optim.RMSprop, optim.Rprop], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("saved_rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_capturable_optimizer_restores_the_type_of_the_rate(tmp_path, make, saved_rate):
    source = trained(lambda p: make(p, lr=0.5))
    source[1].param_groups[0].update(capturable=True, lr=saved_rate, layers=(1, 2))
    mlstate.save(tmp_path / "c", *source)
    module, optimizer = trained(lambda p: make(p, lr=0.1), 1)
    optimizer.param_groups[0].update(lr=torch.tensor(9.0), layers=torch.tensor([3, 4]))
    mlstate.load(tmp_path / "c", into={"model": module, "optimizer": optimizer})
    (group,) = optimizer.param_groups
    rate = group["lr"]
    assert type(rate) is type(saved_rate) and rate == 0.5 and group["layers"] == (1, 2)


def test_states_of_another_optimizer_are_refused(tmp_path):
    source, target = trained(sgd), trained(optim.Adam, 1)
    refused = pytest.raises(CompatibilityError, match=r"Adam cannot take .* KeyError: 'step'")
    with refused, pytest.warns(UserWarning, match="lacks 'betas', 'eps'"):
        save_and_load(tmp_path / "c", source, target)
    assert not target[1].state and target[1].param_groups[0]["lr"] == 1e-3


def test_states_that_torch_would_round_need_cast(tmp_path):
    source = trained(optim.NAdam, dtype=torch.bfloat16)
    target = trained(optim.NAdam, 1, dtype=torch.bfloat16)
    with pytest.raises(CompatibilityError, match=r"'bias.mu_product' is .*float32"):
        save_and_load(tmp_path / "c", source, target)
    save_and_load(tmp_path / "c", source, target, cast=True)
    assert target[1].state[target[0].weight]["mu_product"].dtype == torch.bfloat16


def test_optimizer_of_several_modules_is_saved_with_their_parent(tmp_path):
    modules = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 1)})
    optimizer = sgd(modules.parameters())
    with pytest.raises(ValueError, match=r"Linear lacks: .* such as a ModuleDict"):
        mlstate.save(tmp_path / "c", modules["a"], optimizer)
    save_and_load(tmp_path / "c", (modules, optimizer), (modules, optimizer))
    groups = mlstate.load(tmp_path / "c").optimizer.param_groups
    assert groups[0]["params"] == ["a.weight", "a.bias", "b.weight", "b.bias"]


@pytest.mark.parametrize("suffix", ["pt", "npz", "dcp"])
def test_odd_values_and_nested_states_are_converted(tmp_path, suffix):
    module, optimizer = trained(sgd)
    values = {"rate": math.inf, "layers": {1, 2}, "plan": {"a": (1, [2])}, "lr": None}
    optimizer.param_groups[0].update(values)
    optimizer.state[module.weight]["nested"] = [torch.ones(2), None]
    mlstate.save(tmp_path / "c", module, optimizer)
    form = "dcp" if suffix == "dcp" else None
    write_any(tmp_path / f"a.{suffix}", *read_any(tmp_path / "c")[:4], format=form)
    write_any(tmp_path / "back", *read_any(tmp_path / f"a.{suffix}", format=form)[:4])
    fresh = trained(sgd, 1)
    mlstate.load(tmp_path / "back", into={"model": fresh[0], "optimizer": fresh[1]})
    (group,) = fresh[1].param_groups
    assert {key: group[key] for key in values} == values
    nested = fresh[1].state[fresh[0].weight]["nested"]
    assert np.array_equal(nested[0], np.ones(2)) and nested[1] is None


def test_optimizer_of_some_parameters_loads_without_strict(tmp_path):
    source = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    saved = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
    source(torch.ones(1, 2)).sum().backward()
    saved.step()
    mlstate.save(tmp_path, source, saved)
    module = torch.nn.Sequential(torch.nn.Linear(2, 3).requires_grad_(False), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(module[1].parameters(), lr=0.5, momentum=0.9)
    into = {"model": module, "optimizer": optimizer}
    with pytest.raises(CompatibilityError, match=r"0\.weight"):
        mlstate.load(tmp_path, into=into)
    mlstate.load(tmp_path, into=into, strict=False)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for parameter, other in zip(module[1].parameters(), source[1].parameters(), strict=True):
        assert optimizer.state[parameter]["momentum_buffer"].equal(
            saved.state[other]["momentum_buffer"]
        )


def test_diff_compares_learning_rates_that_are_tensors_by_value(tmp_path):
    for name, rate in {"a": 0.1, "b": 0.100001, "c": 0.2}.items():
        source = trained(sgd)
        source[1].param_groups[0]["lr"] = torch.tensor(rate)
        mlstate.save(tmp_path / name, *source)
    assert mlstate.diff(tmp_path / "a", tmp_path / "b", rtol=1e-3).identical
    (change,) = mlstate.diff(tmp_path / "a", tmp_path / "c").changes
    assert change.name == "optimizer.param_groups[0]['lr']" and abs(change.max_abs - 0.1) < 1e-6


class Projector:
    """A helper object among the states of an optimizer."""


def with_projectors(seed):
    module, optimizer = trained(sgd, seed)
    optimizer.state[module.weight]["projector"] = Projector()
    return module, optimizer


@pytest.mark.parametrize("by_group", [False, True])
def test_the_remedy_for_helper_objects_excludes_them(tmp_path, by_group):
    source, target = with_projectors(0), with_projectors(1)
    if by_group:  # the optimizer is stored by its state_dict()
        source[1].param_groups[0]["x"] = torch.ones(20000)
    with pytest.raises(TypeError, match="projector") as refused:
        mlstate.save(tmp_path / "c", *source)
    pattern = str(refused.value).partition("exclude=['")[2].partition("']")[0]
    mlstate.save(tmp_path / "c", *source, exclude=pattern)
    projector = target[1].state[target[0].weight]["projector"]
    mlstate.load(tmp_path / "c", into={"model": target[0], "optimizer": target[1]})
    state, expected = (each[1].state[each[0].weight] for each in (target, source))
    assert state["projector"] is projector
    assert torch.equal(state["momentum_buffer"], expected["momentum_buffer"])
    fresh = trained(sgd, 1)
    mlstate.load(tmp_path / "c", into={"model": fresh[0], "optimizer": fresh[1]})
    assert fresh[1].state[fresh[0].weight].keys() == {"momentum_buffer"}
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_bytes())
    assert manifest["exclude"] == [pattern] and manifest["format_version"] == 3


def test_a_pattern_without_a_match_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"exclude= has '\*.projectors', which matches no"):
        mlstate.save(tmp_path / "c", *with_projectors(0), exclude=["*.projector", "*.projectors"])
    assert not (tmp_path / "c").exists()


class Pair(typing.NamedTuple):
    left: object
    right: object


NESTED = {
    "deque": lambda: collections.deque([torch.ones(2)], maxlen=3),
    "float keys": lambda: {0.0: torch.ones(2), 0.9: [torch.zeros(2)]},
    "counter": lambda: collections.Counter({"b": 2, "a": 0}),
    "order of keys": lambda: {"b": 1, "a": {"d": (1j,), "c": 2}},
    "named tuple": lambda: Pair(torch.ones(2), {b"k": 1}),
}


@pytest.mark.parametrize("make", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("place", ["state", "group"])
def test_nested_values_of_optimizers_keep_class_and_order(tmp_path, make, place):
    source, target = trained(sgd), trained(sgd)
    for module, optimizer in (source, target):
        holder = optimizer.param_groups[0] if place == "group" else optimizer.state[module.weight]
        holder["x"] = make()
    save_and_load(tmp_path / "c", source, target)
    holders = [
        optimizer.param_groups[0] if place == "group" else optimizer.state[module.weight]
        for module, optimizer in (source, target)
    ]
    assert equal_values(*(holder["x"] for holder in holders))
    assert repr(holders[0]["x"]) == repr(holders[1]["x"])  # shows the order of keys
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_bytes())
    is_newer = isinstance(make(), Pair) or "0.9" in repr(make())
    assert manifest["format_version"] == (3 if is_newer else 2)


def test_a_record_in_a_fresh_optimizer_needs_one_step(tmp_path):
    source, fresh = trained(sgd), trained(sgd, 1)
    source[1].state[source[0].weight]["x"] = Pair(1, 2)
    with pytest.raises(CompatibilityError, match="such as an optimizer after one step"):
        save_and_load(tmp_path / "c", source, fresh)
    fresh[1].state[fresh[0].weight]["x"] = Pair(0, 0)
    save_and_load(tmp_path / "c", source, fresh)
    assert fresh[1].state[fresh[0].weight]["x"] == Pair(1, 2)
