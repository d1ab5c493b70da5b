"""Random optimizers are restored as torch restores them, or refused and left unchanged.

MLSTATE_OPTIMIZERS sets the number of optimizers.
"""

import copy
import math
import os
import random

import numpy as np
import pytest
from tries import tries

import mlstate
from mlstate import MLStateError

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="torch is the peer to agree with")

optim = torch.optim
AMOUNT = int(os.environ.get("MLSTATE_OPTIMIZERS", tries(100)))
NOT_VALUES = ("params", "param_names")
SHAPES = [(2, 3), (4,), (3,), (1, 1), (2, 1, 2), (5, 2), ()]


class Odd(optim.Optimizer):
    """Keeps states of many shapes, types and depths."""

    def __init__(self, params, lr=0.1, odd=(), codes=torch.float32):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": None})
        self.odd = dict(odd)
        self.codes = codes

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["step"] = torch.tensor(2.0) if parameter.dim() == 2 else 1
                    state["left"] = torch.eye(3, dtype=parameter.dtype) * state["count"]
                    state["codes"] = torch.arange(16).to(self.codes)
                    state.update(copy.deepcopy(self.odd))


class Passing(optim.Optimizer):
    """Passes everything on to another optimizer."""

    def __init__(self, base):
        self.base = base

    state = property(lambda self: self.base.state)
    param_groups = property(lambda self: self.base.param_groups)
    defaults = property(lambda self: self.base.defaults)

    def step(self, closure=None):
        self.base.step()

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state_dict):
        self.base.load_state_dict(state_dict)


class Lookahead(Passing):
    """An optimizer with slow weights beside the wrapped optimizer's states."""

    def __init__(self, base):
        super().__init__(base)
        self.slow = [p.detach().clone() for g in base.param_groups for p in g["params"]]

    def step(self, closure=None):
        super().step()
        self.slow = [value + 1 for value in self.slow]

    def state_dict(self):
        return {**self.base.state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict):
        state_dict = dict(state_dict)
        self.slow = state_dict.pop("slow")
        self.base.load_state_dict(state_dict)


VALUES = [
    lambda r: math.inf,
    lambda r: math.nan,
    lambda r: None,
    lambda r: r.random(),
    lambda r: -0.0,
    lambda r: r.randrange(-(1 << 70), 1 << 70),
    lambda r: r.random() < 0.5,
    lambda r: "text \u00e9",
    lambda r: bytes([r.randrange(256) for _ in range(3)]),
    lambda r: (r.random(), (r.random(), None)),
    lambda r: [r.random(), (1, 2), [3]],
    lambda r: {"warmup": r.randrange(9), "$": (1,), 3: {None: [True]}},
    lambda r: {1, "a", None},
    lambda r: frozenset({(1, 2)}),
    lambda r: torch.float16,
    lambda r: torch.tensor(r.random(), dtype=torch.float64),
    lambda r: torch.arange(r.randrange(4)),
    lambda r: np.float32(r.random()),
    lambda r: np.arange(r.randrange(4), dtype=np.int16),
    lambda r: complex(r.random(), -0.0),
]
NESTED = [
    lambda r: None,
    lambda r: [torch.ones(2), torch.zeros(1, 3)],
    lambda r: {"ortho": torch.eye(2), "rank": 2},
    lambda r: (1, None, 2.5),
    lambda r: True,
    lambda r: 1 << 80,
]


def same(a, b):
    """Return whether nested values have equal types and values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and same(a.tolist(), b.tolist())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and same(a.tolist(), b.tolist())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def view(optimizer):
    """Return a copy of the state dict, without names and empty states."""
    state = copy.deepcopy(optimizer.state_dict())
    state["state"] = {key: value for key, value in state["state"].items() if value}
    for group in state["param_groups"]:
        group.pop("param_names", None)
    return state


def model(shapes, dtype):
    module = torch.nn.Module()
    for number, shape in enumerate(shapes):
        module.register_parameter(f"p{number}", torch.nn.Parameter(torch.rand(shape).to(dtype)))
    return module


def class_of(r):
    kinds = [
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: optim.Adam(p, amsgrad=True),
        lambda p: optim.Adam(p, lr=torch.tensor(0.25)),
        lambda p: optim.AdamW(p, foreach=False, maximize=True),
        lambda p: optim.RMSprop(p, centered=True, momentum=0.5),
        *(getattr(optim, n) for n in ("Adagrad", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop")),
        optim.Adadelta,
    ]
    if r.random() < 0.4:
        odd = {f"odd{i}": r.choice(NESTED)(r) for i in range(r.randrange(3))}
        codes = r.choice([torch.float32, torch.uint8, torch.float16, torch.int64, torch.bool])
        return lambda p: Odd(p, odd=odd, codes=codes)
    return r.choice(kinds)


def groups_of(module, parts, *, named):
    listed = [[(name, getattr(module, name)) for name in part] for part in parts]
    return [{"params": part if named else [value for _, value in part]} for part in listed]


def partition(r, names):
    names = r.sample(names, len(names))
    cuts = sorted(r.sample(range(1, len(names)), r.randrange(len(names))))
    return [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]


def changed(r, parts):
    """Return groups in another order, split, merged or new."""
    parts = [r.sample(part, len(part)) for part in r.sample(parts, len(parts))]
    kind = r.choice(["order", "split", "merge", "new"])
    if kind == "split":
        largest = max(parts, key=len)
        parts.remove(largest)
        parts += [part for part in (largest[:1], largest[1:]) if part]
    elif kind == "merge" and len(parts) > 1:
        parts = [parts[0] + parts[1], *parts[2:]]
    elif kind == "new":
        parts = partition(r, [name for part in parts for name in part])
    return parts


def train(r, module, optimizer, frozen):
    for _ in range(r.randrange(3)):
        optimizer.zero_grad()
        for name, parameter in module.named_parameters():
            if name not in frozen:
                parameter.grad = torch.rand_like(parameter)
        optimizer.step()


def add_hooks(r, source, target):
    """Add hooks that copy, or none."""
    if r.random() < 0.15:
        target.register_load_state_dict_pre_hook(lambda _, state: dict(state))
    if r.random() < 0.15:
        source.register_state_dict_post_hook(lambda _, state: copy.deepcopy(state))


def expected(source, parts, target, target_parts):
    """Return torch's result: the source's state dict in the target's order; None if unknown."""
    saved = copy.deepcopy(source.state_dict())
    numbers = {name: n for n, name in enumerate(name for part in parts for name in part)}
    home = {name: i for i, part in enumerate(parts) for name in part}
    groups, states, at = [], {}, 0
    for part in target_parts:
        values = [
            {k: v for k, v in saved["param_groups"][home[name]].items() if k not in NOT_VALUES}
            for name in part
        ]
        if not all(same(values[0], other) for other in values[1:]):
            return None
        groups.append({**values[0], "params": list(range(at, at + len(part)))})
        for name in part:
            if saved["state"].get(numbers[name]):
                states[at] = saved["state"][numbers[name]]
            at += 1
    target.load_state_dict({"state": states, "param_groups": groups})
    return view(target)


def build(make, shapes, dtype, parts, *, named, wrapper):
    module = model(shapes, dtype)
    return module, wrapper(make(groups_of(module, parts, named=named)))


@pytest.mark.parametrize("seed", range(AMOUNT))
def test_random_optimizers_are_restored_as_by_torch_or_refused(seed, tmp_path):
    r = random.Random(seed)
    torch.manual_seed(seed)
    dtype = r.choice([torch.float32] * 4 + [torch.float64, torch.bfloat16])
    shapes = r.choices(SHAPES, k=r.randrange(2, 6))
    names = [f"p{i}" for i in range(len(shapes))]
    parts, make = partition(r, names), class_of(r)
    wrapper = r.choice([lambda o: o] * 5 + [Passing, Passing, Lookahead])
    options = {"named": r.random() < 0.3, "wrapper": wrapper}
    module, source = build(make, shapes, dtype, parts, **options)
    frozen = {name for name in names if r.random() < 0.2}
    train(r, module, source, frozen)
    shared = {f"value{i}": r.choice(VALUES)(r) for i in range(r.randrange(4))}
    for group in source.param_groups:
        group.update(copy.deepcopy(shared))
        if r.random() < 0.5:
            group["lr"] = r.choice([0.5, 0.25, None, torch.tensor(0.5)])
        if r.random() < 0.1:
            group["own"] = r.choice(VALUES)(r)
    other_parts = parts if wrapper is Lookahead else changed(r, parts)
    options["named"] = r.random() < 0.3
    fresh, target = build(make, shapes, dtype, other_parts, **options)
    train(r, fresh, target, set())
    twin = build(make, shapes, dtype, other_parts, **options)[1]
    for group in [*target.param_groups, *twin.param_groups]:
        group["initial_lr"] = 0.125
    if wrapper not in (Passing, Lookahead):
        add_hooks(r, source, target)
    before, weights = view(target), copy.deepcopy(fresh.state_dict())
    if wrapper is Lookahead:
        twin.load_state_dict(copy.deepcopy(source.state_dict()))
        want = view(twin)
    else:
        want = expected(source, parts, twin, other_parts)
    if (seed % 2 == 0) if wrapper is Lookahead else r.random() < 0.2:
        mlstate.save(tmp_path / "c", module, states={"o": source})
        into = {"model": fresh, "states": {"o": target}}
    else:
        mlstate.save(tmp_path / "c", module, source)
        into = {"model": fresh, "optimizer": target}
    try:
        mlstate.load(tmp_path / "c", into=into)
    except MLStateError as error:
        assert want is None or "float" in str(error), error
        assert same(view(target), before)
        assert same(dict(fresh.state_dict()), dict(weights))
        return
    assert want is not None, "groups without known values were loaded"
    got = view(target)
    for key in want:
        assert same(got[key], want[key]), f"{got[key]}\n{want[key]}"
