"""Errors about optimizers and nested states: each case fails, then applies the remedy."""

import enum
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
import pytest

import mlstate
from mlstate import OptimizerStateDict
from mlstate.checkpoint._states.containers import equal_values
from mlstate.testing import run_ranks

torch = pytest.importorskip("torch", reason="has optimizers")

from block_codes import Codes, codes  # noqa: E402

pytestmark = pytest.mark.torch

CASES = {}
SGD = torch.optim.SGD


def case(function):
    """Mark a generator: it yields a call that fails and the text of its error, then continues."""
    CASES[function.__name__] = function
    return function


@pytest.mark.parametrize("name", CASES)
def test_the_remedy_of_an_error_works(tmp_path, name):
    steps = CASES[name](tmp_path / "c")
    for call, text in steps:
        with pytest.raises(Exception, match=text):
            call()


def trained(module=None, **state):
    module = torch.nn.Linear(2, 2) if module is None else module
    optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
    sum(p.sum() for p in module.parameters()).backward()
    optimizer.step()
    optimizer.state[next(module.parameters())].update(state)
    return module, optimizer


def resumes(folder, module, source, target, **options):
    """Load what `folder` holds into an optimizer, and compare all states."""
    mlstate.load(folder, into={"model": module, "optimizer": target}, **options)
    assert equal_values(target.state_dict()["state"], source.state_dict()["state"])


# ---- optimizers ----


@case
def parameters_of_two_modules(folder):
    pair = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    _, optimizer = trained(pair)
    text = "pass a module that has all of them, such as a ModuleDict .* or save .* by states="
    yield lambda: mlstate.save(folder, pair["a"], optimizer), text
    mlstate.save(folder, pair, optimizer)
    resumes(folder, pair, optimizer, SGD(pair.parameters(), lr=0.2))
    mlstate.save(folder, pair["a"], states={"optimizer": optimizer}, overwrite=True)
    target = SGD(pair.parameters(), lr=0.2)
    mlstate.load(folder, into={"states": {"optimizer": target}})
    assert equal_values(target.state_dict()["state"], optimizer.state_dict()["state"])


class Own(SGD):
    extra = 0

    def state_dict(self):
        return {**super().state_dict(), "extra": self.extra}

    def load_state_dict(self, state):
        self.extra = state.pop("extra")
        super().load_state_dict(state)


@case
def own_state_of_an_optimizer(folder):
    module = torch.nn.Linear(2, 2)
    source, target = (Own(module.parameters(), lr=0.1) for _ in range(2))
    source.extra = 3
    text = r"mlstate\.save\(path, model, optimizer\) stores the result of state_dict\(\)"
    yield lambda: OptimizerStateDict.from_torch(source, module), text
    mlstate.save(folder, module, source)
    resumes(folder, module, source, target)
    assert target.extra == 3
    mlstate.save(folder, module, SGD(module.parameters(), lr=0.3), overwrite=True)
    call = lambda: mlstate.load(folder, into={"model": module, "optimizer": source})  # noqa: E731
    yield call, "of another optimizer's table, load the values without into="
    assert mlstate.load(folder).optimizer.param_groups[0]["lr"] == 0.3


@case
def state_of_no_parameter(folder):
    module, source = trained()
    source.state["shared"] = {"count": 3}
    text = r"mlstate\.save\(path, model, optimizer\) stores it"
    yield lambda: OptimizerStateDict.from_torch(source, module), text
    mlstate.save(folder, module, source)
    resumes(folder, module, source, SGD(module.parameters(), lr=0.1))


@case
def large_values_of_a_group(folder):
    module, source = trained()
    source.param_groups[0]["table"] = torch.ones(20_000)
    text = r"keep them in optimizer\.state, or save them by states="
    yield lambda: OptimizerStateDict.from_torch(source, module), text
    mlstate.save(folder, states={"optimizer": source})
    target = SGD(module.parameters(), lr=0.2)
    mlstate.load(folder, into={"states": {"optimizer": target}})
    assert torch.equal(target.param_groups[0]["table"], torch.ones(20_000))
    source.state[module.weight]["table"] = source.param_groups[0].pop("table")
    state = OptimizerStateDict.from_torch(source, module)
    assert state["weight.table"].shape == (20_000,)


@case
def other_groups(folder):
    module, source = trained()
    source.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})
    module.more = source.param_groups[1]["params"][0]
    mlstate.save(folder, module, source)
    target = SGD([{"params": [*module.parameters()][:2]}], lr=0.1)
    into = {"model": module, "optimizer": target}
    yield lambda: mlstate.load(folder, into=into), "create the optimizer with the saved groups"
    first, second = ({"params": group["params"]} for group in source.param_groups)
    resumes(folder, module, source, SGD([first, second], lr=0.1))


@case
def one_rate_for_two_groups(folder):
    module = torch.nn.Linear(2, 2)
    mlstate.save(folder, module, OptimizerStateDict(learning_rate=0.5))
    groups = [{"params": [parameter]} for parameter in module.parameters()]
    into = {"model": module, "optimizer": SGD(groups, lr=0.1)}
    yield lambda: mlstate.load(folder, into=into), "create the optimizer with the saved groups"
    target = SGD(module.parameters(), lr=0.1)
    mlstate.load(folder, into={"model": module, "optimizer": target})
    assert target.param_groups[0]["lr"] == 0.5


@case
def groups_without_names(folder):
    module, _ = trained()
    groups = [{"params": [parameter]} for parameter in module.parameters()]
    mlstate.save(folder, optimizer=SGD(groups, lr=0.1))
    into = {"optimizer": SGD(groups, lr=0.2)}
    text = "save the model with the optimizer to store the names"
    yield lambda: mlstate.load(folder, into=into), text  # a warning
    mlstate.save(folder, module, SGD(groups, lr=0.1))
    mlstate.load(folder, into={"model": module, "optimizer": SGD(groups, lr=0.2)})


@case
def states_that_torch_rounds(folder):
    module, source = trained(scalar=torch.tensor(0.1, dtype=torch.float64))
    mlstate.save(folder, module, source)
    target = SGD(module.parameters(), lr=0.1)
    into = {"model": module, "optimizer": target}
    yield lambda: mlstate.load(folder, into=into), "pass cast=True to allow this"
    mlstate.load(folder, into=into, cast=True)
    assert target.state[module.weight]["scalar"].dtype == torch.float32
    module, source = trained(full=torch.ones(2, 2, dtype=torch.float64))
    mlstate.save(folder, module, source)
    target = SGD(module.parameters(), lr=0.1)
    into = {"model": module, "optimizer": target}
    yield lambda: mlstate.load(folder, into=into), r"float64 .* cast=True"
    mlstate.load(folder, into=into, cast=True)
    assert target.state[module.weight]["full"].dtype == torch.float32


@case
def another_block_size(folder):
    module, source = trained(codes=codes(1))
    mlstate.save(folder, module, source)
    into = {"model": module, "optimizer": trained(module, codes=codes(2, block=8))[1]}
    text = "create the target with the saved class and block size"
    yield lambda: mlstate.load(folder, into=into), text
    mlstate.save(folder, module, source)
    resumes(folder, module, source, trained(module, codes=codes(2))[1])


@case
def a_class_that_no_target_has(folder):
    module, source = trained(codes=codes(1))
    mlstate.save(folder, module, source)
    target = SGD(module.parameters(), lr=0.1)
    into = {"model": module, "optimizer": target}
    yield (
        lambda: mlstate.load(folder, into=into),
        r"torch.serialization.add_safe_globals\(\[class\]",
    )
    with torch.serialization.safe_globals([Codes]):
        resumes(folder, module, source, target)


class Span(NamedTuple):
    begin: int
    values: object = None


@case
def a_record_that_no_target_has(folder):
    module, source = trained(span=Span(1))
    mlstate.save(folder, module, source)
    into = {"model": module, "optimizer": SGD(module.parameters(), lr=0.1)}
    yield (
        lambda: mlstate.load(folder, into=into),
        "an optimizer after one step, or load without into=",
    )
    resumes(folder, module, source, trained(module, span=Span(5))[1])
    mlstate.save(folder, states={"x": [Span(1)]}, overwrite=True)
    assert mlstate.load(folder).states["x"] == [(1, None)]


@case
def a_state_with_the_name_of_the_optimizer(folder):
    module = torch.nn.Linear(2, 2)
    optimizer = Own(module.parameters(), lr=0.1)
    call = lambda: mlstate.save(folder, module, optimizer, states={"optimizer": 1})  # noqa: E731
    yield call, "another state has this name: rename that one"
    mlstate.save(folder, module, optimizer, states={"other": 1})


@case
def a_state_dict_instead_of_the_optimizer(folder):
    module, source = trained()
    call = lambda: mlstate.save(folder, module, source.state_dict())  # noqa: E731
    yield call, r"this is a torch optimizer's state_dict\(\): pass the optimizer itself"
    mlstate.save(folder, module, source)


# ---- nested states ----


def values_of(*pairs):
    """Add a case for each name, value that is refused, text, and value that the text advises."""
    for name, value, text, other in pairs:

        def steps(folder, value=value, text=text, other=other):
            yield lambda: mlstate.save(folder, states={"x": [value]}), text
            mlstate.save(folder, states={"x": [other(value)]})
            target = [other(value)]
            mlstate.load(folder, into={"states": {"x": target}})
            assert equal_values(target, [other(value)])

        CASES[name] = steps


class Rates(dict):
    pass


class Values(list):
    pass


class Pair(tuple):
    pass


class Rows(np.ndarray):
    pass


def local_enum():
    class Local(enum.Enum):
        A = 1

    return Local.A


def with_text_keys(value):
    return {str(key): each for key, each in value.items()}


noted = Counter(a=1)
conjugated = torch.ones(2, dtype=torch.complex64).conj()
values_of(
    ("keys", {1j: 1}, "keys of nested dicts must be str, bytes, int, float, None", with_text_keys),
    ("nan", {float("nan"): 1}, "use None instead", lambda value: {None: 1}),
    ("factories", defaultdict(lambda: 0, a=1), "use one of bool, .*, or store a dict", dict),
    ("other factories", defaultdict(lambda: 0), "use one of bool, int", lambda v: defaultdict(int)),
    ("sets", {(Span(1),)}, r"would be loaded as|use a list", lambda value: [(1, None)]),
    ("dicts", Rates(a=1), r"pass dict\(\) of it", dict),
    ("lists", Values([1]), r"pass list\(\) of it", list),
    ("tuples", Pair((1,)), r"pass tuple\(\) of it", tuple),
    ("subclasses", np.eye(2).view(Rows), r"pass numpy.asarray\(\) of it", np.asarray),
    ("enums", local_enum(), "or store the member's name", lambda value: value.name),
    ("texts", np.array(["a"]), "or lists of other values", lambda value: value.tolist()),
    ("records", np.zeros(1, "i4,f4"), "lists of other values", lambda value: value.tolist()),
    ("long doubles", np.longdouble(1), "numbers of at most 64 bits", np.float64),
    ("functions", len, "give numbers, str", lambda value: value.__name__),
    ("sparse", torch.eye(2).to_sparse(), r"to_dense\(\)", lambda value: value.to_dense()),
    ("conjugated", conjugated, r"resolve_conj\(\)", lambda value: value.resolve_conj()),
    ("negated", torch._neg_view(torch.ones(2)), r"resolve_neg\(\)", torch.Tensor.resolve_neg),
)


@case
def metadata_of_objects(folder):
    generator = np.random.default_rng(1)
    call = lambda: mlstate.save(folder, {"w": np.ones(1)}, metadata={"g": generator})  # noqa: E731
    yield call, "states= stores other values, and objects as their state"
    mlstate.save(folder, {"w": np.ones(1)}, states={"g": generator})
    other = np.random.default_rng(2)
    mlstate.load(folder, into={"states": {"g": other}})
    assert other.random() == generator.random()


@case
def gradients_in_a_group(folder):
    module, source = trained()
    source.param_groups[0]["scale"] = torch.ones(1, requires_grad=True)
    yield lambda: mlstate.save(folder, module, source), "requires gradients.* detached tensors"
    source.param_groups[0]["scale"] = source.param_groups[0]["scale"].detach()
    mlstate.save(folder, module, source)


@case
def targets_that_share_memory(folder):
    mlstate.save(folder, states={"x": [torch.zeros(2), torch.ones(2)]})
    memory = torch.ones(3).requires_grad_()
    target = [memory.detach()[:2].requires_grad_(), memory.detach()[1:].requires_grad_()]
    into = {"states": {"x": target}}
    yield lambda: mlstate.load(folder, into=into), "load into one of them, or into a clone"
    target[1] = target[1].detach().clone().requires_grad_()
    mlstate.load(folder, into=into)
    assert target[1].tolist() == [1, 1]


@case
def one_target_for_two_states(folder):
    mlstate.save(folder, states={"a": np.random.default_rng(1), "b": np.random.default_rng(2)})
    target, other = (np.random.default_rng(0) for _ in range(2))
    into = {"states": {"a": target, "b": target}}
    yield lambda: mlstate.load(folder, into=into), "pass an object for each"
    mlstate.load(folder, into={"states": {"a": target, "b": other}})


@case
def values_of_other_ranks(folder):
    def save(group):
        mlstate.save(folder, states={"x": {"rank": group.rank}}, group=group)

    run_ranks(2, save)
    into = {"states": {"x": {"rank": 7}}}
    text = r"pass group=, or rank= and world_size=2 .*, or leave this state out of into="
    yield lambda: mlstate.load(folder, into=into), text
    mlstate.load(folder, into=into, rank=1, world_size=2)
    assert into["states"]["x"] == {"rank": 1}
    assert mlstate.load(folder).states["x"] == [{"rank": 0}, {"rank": 1}]


@case
def targets_that_cannot_change(folder):
    mlstate.save(folder, states={"x": 3})
    text = r"take the value from LoadedState\.states of load\(path\) without into="
    yield lambda: mlstate.load(folder, into={"states": {"x": 0}}), text
    assert mlstate.load(folder).states["x"] == 3
