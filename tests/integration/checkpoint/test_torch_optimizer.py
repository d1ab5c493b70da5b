"""State of torch optimizers: by name, without copies; training resumes bit for bit."""

import json

import numpy as np
import pytest

import mlstate
from mlstate import CompatibilityError, OptimizerStateDict, StateDict

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="torch is the peer to agree with")

optim = torch.optim


def model(seed=0, dtype=torch.float32):
    """A small model with a frozen parameter."""
    torch.manual_seed(seed)
    layers = (torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    module = torch.nn.Sequential(*layers).to(dtype)
    module[2].bias.requires_grad_(False)
    return module


def train(module, optimizer, first, last):
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(5, 4, generator=generator).to(module[0].weight.dtype)
        optimizer.zero_grad()
        module(inputs).square().sum().backward()
        optimizer.step()


def trained(make=optim.Adam, steps=2, dtype=torch.float32):
    module = model(dtype=dtype)
    optimizer = make(module.parameters())
    train(module, optimizer, 0, steps)
    return module, optimizer, OptimizerStateDict.from_torch(optimizer, module)


class Counting(optim.Optimizer):
    """Keeps a Python int, a Python float and a tensor."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    state["decay"] = state.get("decay", 1.0) * 0.9
                    assert type(state["step"]) is int
                    assert type(state["decay"]) is float
                    scale = group["lr"] * state["decay"] / state["step"]
                    parameter.sub_(parameter.grad * scale)


OPTIMIZERS = {
    "Adam": lambda p: optim.Adam(p, lr=1e-2),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True),
    "Adam lr in a tensor": lambda p: optim.Adam(p, lr=torch.tensor(1e-2)),
    "Adam foreach": lambda p: optim.Adam(p, lr=1e-2, foreach=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9)),
    "AdamW fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: optim.SGD(p, lr=1e-2),
    "SGD momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
    "Adadelta": optim.Adadelta,
    "Adamax": optim.Adamax,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "ASGD": optim.ASGD,
    "Rprop": optim.Rprop,
    "Python numbers": Counting,
}
if hasattr(optim, "Adafactor"):  # since torch 2.5
    OPTIMIZERS["Adafactor"] = lambda p: optim.Adafactor(p, lr=1e-2)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_resumes_bitwise(make):
    """Three steps, the state as text and arrays into new objects, three more steps."""
    uninterrupted = model()
    optimizer = make(uninterrupted.parameters())
    train(uninterrupted, optimizer, 0, 6)

    first = model()
    old = make(first.parameters())
    train(first, old, 0, 3)
    weights = StateDict.from_torch(first.state_dict())
    state = OptimizerStateDict.from_torch(old, first)
    state.param_groups = json.loads(json.dumps(state.param_groups))

    second = model(seed=1)
    new = make(second.parameters())
    second.load_state_dict(weights.to_torch())
    new.load_state_dict(state.to_torch(new, second))
    train(second, new, 3, 6)

    for got, want in zip(second.parameters(), uninterrupted.parameters(), strict=True):
        assert torch.equal(got, want)
    for got, want in zip(new.param_groups, optimizer.param_groups, strict=True):
        assert got.keys() == want.keys()
        assert all(type(got[key]) is type(want[key]) for key in want)
        assert all(got[key] == want[key] for key in want if key != "params")
    for name, parameter in second.named_parameters():
        for key, value in new.state[parameter].items():
            if isinstance(value, torch.Tensor):
                assert np.shares_memory(state[f"{name}.{key}"], value.numpy()), "not copied"


def test_names_step_rate_and_kind():
    module, optimizer, state = trained(lambda p: optim.AdamW(p, lr=0.25), 3)
    assert (state.optimizer_type, state.step, state.learning_rate) == ("adamw", 3, 0.25)
    assert state.parameters() == ["0.weight", "0.bias", "2.weight"]
    assert state.state_names("0.weight") == ["step", "exp_avg", "exp_avg_sq"]
    (group,) = state.param_groups
    assert group["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert (group["lr"], group["betas"]) == (0.25, [0.9, 0.999])
    exp_avg = optimizer.state[module[0].weight]["exp_avg"]
    assert state["0.weight.exp_avg"].__array_interface__["data"][0] == exp_avg.data_ptr()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (optim.SGD, "sgd"),
        (optim.Adam, "adam"),
        (optim.Rprop, "other"),
        (type("MyAdamW", (optim.AdamW,), {}), "adamw"),
        (type("Fancy", (Counting,), {}), "other"),
    ],
)
def test_kind_follows_the_nearest_known_class(kind, name):
    assert OptimizerStateDict.from_torch(kind(model().parameters())).optimizer_type == name


def test_the_largest_step_counts():
    module, optimizer, _ = trained()
    optimizer.state[module[0].bias]["step"] += 5
    assert OptimizerStateDict.from_torch(optimizer).step == 7


def test_momentum_that_is_none_stays_none():
    module, optimizer, _ = trained(lambda p: optim.SGD(p, lr=0.1), 1)
    optimizer.state[module[0].weight]["momentum_buffer"] = None
    state = OptimizerStateDict.from_torch(optimizer, module)
    assert state.step == 0
    assert state.to_torch(optimizer, module)["state"] == {0: {"momentum_buffer": None}}


@pytest.mark.skipif(not hasattr(optim, "Adafactor"), reason="torch 2.5 has Adafactor")
def test_factors_of_adafactor_have_their_shapes():
    module, _optimizer, state = trained(optim.Adafactor, 1)
    assert state.state_names("0.weight") == ["step", "row_var", "col_var"]
    assert state["0.weight.row_var"].shape == (8, 1)
    assert state["0.weight.col_var"].shape == (1, 4)
    assert state.state_names("0.bias") == ["step", "variance"]
    state.to_torch(optim.Adafactor(module.parameters()), module)


# ---- names ----


def test_names_from_a_list_from_the_optimizer_and_numbered():
    module, optimizer, _ = trained(steps=1)
    assert OptimizerStateDict.from_torch(optimizer).parameters() == [
        "param_0",
        "param_1",
        "param_2",
    ]
    listed = OptimizerStateDict.from_torch(optimizer, iter(["a", "b", "c", "d"]))
    assert listed.parameters() == ["a", "b", "c"]
    if "param_names" in optim.Adam(module.named_parameters()).param_groups[0]:  # since torch 2.6
        named = optim.Adam(module.named_parameters())
        named.load_state_dict(listed.to_torch(named, list("abcd")))
        assert named.param_groups[0]["param_names"] == [n for n, _ in module.named_parameters()]
        state = OptimizerStateDict.from_torch(named)
        assert state.parameters() == ["0.weight", "0.bias", "2.weight"]
        assert "param_names" not in state.param_groups[0]


def test_a_tied_parameter_has_its_first_name():
    module = torch.nn.Module()
    module.embed = torch.nn.Embedding(3, 2)
    module.head = torch.nn.Linear(2, 3, bias=False)
    module.head.weight = module.embed.weight
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module.head(module.embed(torch.tensor([1]))).sum().backward()
    optimizer.step()
    state = OptimizerStateDict.from_torch(optimizer, module)
    assert list(state) == ["embed.weight.momentum_buffer"]


@pytest.mark.parametrize(
    ("names", "error", "says"),
    [
        (torch.nn.Linear(4, 8), ValueError, r"Linear lacks: number 0 of shape \(8, 4\), number 1"),
        (["a", "b"], ValueError, "2 names for the optimizer's 4 parameters"),
        (["a", "b", "a", "c"], ValueError, "have the same name: a"),
        (["a", "b", "", "c"], TypeError, "not empty: got ''"),
        (["a", "b", 3, "c"], TypeError, "must be str.* got 3"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, error, says):
    _, optimizer, _ = trained(steps=0)
    with pytest.raises(error, match=says):
        OptimizerStateDict.from_torch(optimizer, names)
    with pytest.raises(error, match=says):
        OptimizerStateDict().to_torch(optimizer, names)


def test_only_optimizers_have_such_state():
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, got Sequential"):
        OptimizerStateDict.from_torch(model())


# ---- unsupported state ----


def test_objects_in_states_and_groups_are_refused_by_path():
    module, optimizer, _ = trained(steps=1)
    optimizer.state[module[0].weight]["projector"] = {"by": [object()]}
    with pytest.raises(TypeError, match=r"'param_0\.projector'\['by'\]\[0\] is a builtins.object"):
        OptimizerStateDict.from_torch(optimizer)
    del optimizer.state[module[0].weight]["projector"]
    optimizer.param_groups[0]["rule"] = len
    with pytest.raises(TypeError, match=r"param_groups\[0\]\['rule'\] is a builtins.builtin"):
        OptimizerStateDict.from_torch(optimizer)


def test_state_of_no_parameter_and_names_with_dots_are_refused():
    module, optimizer, _ = trained(steps=0)
    optimizer.state["global"] = {"step": 1}
    with pytest.raises(ValueError, match="none of its parameters"):
        OptimizerStateDict.from_torch(optimizer)
    del optimizer.state["global"]
    optimizer.state[module[0].weight]["a.b"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"'param_0' has a state named 'a\.b'"):
        OptimizerStateDict.from_torch(optimizer)


def test_python_numbers_are_arrays_and_come_back_as_numbers():
    module, _optimizer, state = trained(Counting)
    assert (state["0.weight.step"].dtype, state["0.weight.step"].shape) == (np.int64, ())
    assert state["0.weight.decay"].dtype == np.float64
    assert state.param_groups[0]["python_numbers"] == ["decay", "step"]
    state_dict = state.to_torch(Counting(module.parameters()), module)
    assert state_dict["state"][0] == {"step": 2, "decay": 0.9 * 0.9}
    assert "python_numbers" not in state_dict["param_groups"][0]


def test_number_or_tensor_follows_the_optimizer():
    module, optimizer, state = trained()
    for values in optimizer.state.values():
        values["step"] = int(values["step"])
    assert state.to_torch(optimizer, module)["state"][0]["step"] == 2
    assert type(state.to_torch(optimizer, module)["state"][0]["step"]) is float


# ---- groups ----


def grouped(module, **options):
    rates = ({"params": [module[2].weight]}, {"params": [*module[0].parameters()], "lr": 0.5})
    return optim.AdamW(rates, lr=0.1, **options)


def test_matching_groups_are_restored():
    module = model()
    optimizer = grouped(module, betas=(0.5, 0.6))
    train(module, optimizer, 0, 2)
    optimizer.param_groups[1]["initial_lr"] = 0.75
    state = OptimizerStateDict.from_torch(optimizer, module)
    assert [group["params"] for group in state.param_groups] == [
        ["2.weight"],
        ["0.weight", "0.bias"],
    ]
    fresh = grouped(module)
    loaded = state.to_torch(fresh, module)
    assert [group["lr"] for group in loaded["param_groups"]] == [0.1, 0.5]
    assert [group["betas"] for group in loaded["param_groups"]] == [(0.5, 0.6)] * 2
    assert loaded["param_groups"][1]["initial_lr"] == 0.75
    assert [group["params"] for group in loaded["param_groups"]] == [[0], [1, 2]]
    fresh.load_state_dict(loaded)
    assert torch.equal(
        fresh.state[module[0].bias]["exp_avg"], optimizer.state[module[0].bias]["exp_avg"]
    )


def test_parameters_match_by_name_in_any_order():
    module, optimizer, state = trained()
    turned = optim.Adam(reversed(list(module.parameters())), lr=7.0)
    turned.load_state_dict(state.to_torch(turned, module))
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            assert torch.equal(turned.state[parameter][name], value)
    assert turned.param_groups[0]["lr"] == 1e-3


def test_groups_are_split_and_merged_only_with_known_values():
    module, _optimizer, state = trained(lambda p: optim.AdamW(p, lr=0.3, betas=(0.1, 0.2)), 1)
    with pytest.raises(CompatibilityError, match=r"the optimizer lacks '2\.bias'"):
        state.to_torch(grouped(module), module)
    split = [{"params": [p], "lr": 7.0} for p in reversed(list(module.parameters()))]
    loaded = state.to_torch(optim.AdamW(split), module)
    assert [(g["lr"], g["betas"]) for g in loaded["param_groups"]] == [(0.3, (0.1, 0.2))] * 4
    fresh = optim.AdamW(split)
    fresh.load_state_dict(loaded)
    merged = optim.AdamW(module.parameters(), lr=1.0)
    again = OptimizerStateDict.from_torch(fresh, module)
    assert again.to_torch(merged, module)["param_groups"][0]["lr"] == 0.3
    fresh.param_groups[1]["lr"] = 0.4
    again = OptimizerStateDict.from_torch(fresh, module)
    with pytest.raises(CompatibilityError, match=r"groups 0 and 1, which differ in 'lr': 0\.3 and"):
        again.to_torch(merged, module)


def test_state_without_rate_keeps_the_optimizer_rate():
    module = model()
    loaded = OptimizerStateDict.create("adam").to_torch(optim.Adam(module.parameters(), lr=0.7))
    assert loaded["param_groups"][0]["lr"] == 0.7


# ---- checks before anything is loaded ----


def test_unknown_parameters_are_refused_with_the_rename():
    module, optimizer, state = trained()
    wrapped = OptimizerStateDict({f"module.{name}": array for name, array in state.items()})
    fresh = optim.Adam(module.parameters())
    with pytest.raises(CompatibilityError) as caught:
        wrapped.to_torch(fresh, module)
    text = str(caught.value)
    assert "Unexpected parameter(s): 'module.0.weight', 'module.0.bias', 'module.2.weight'" in text
    assert "{'module.': ''}" in text
    assert caught.value.name == "module.0.weight"
    with pytest.raises(CompatibilityError, match="'nodot'"):
        OptimizerStateDict(nodot=np.ones(1)).to_torch(optimizer, module)


def test_shapes_that_do_not_fit_are_refused_all_at_once():
    module, _, state = trained()
    state["0.weight.exp_avg"] = np.zeros((4, 8), np.float32)
    state["0.bias.exp_avg_sq"] = np.zeros(7, np.float32)
    with pytest.raises(CompatibilityError) as caught:
        state.to_torch(optim.Adam(module.parameters()), module)
    text = str(caught.value)
    assert "0.weight.exp_avg: shape (4, 8) in the state, the parameter has shape (8, 4)" in text
    assert "0.bias.exp_avg_sq: shape (7,) in the state, the parameter has shape (8,)" in text
    error = caught.value
    assert (error.name, error.got, error.expected) == ("0.weight.exp_avg", "(4, 8)", "(8, 4)")


@pytest.mark.parametrize(
    ("name", "shape", "good"),
    [
        ("exp_avg", (8, 4), True),
        ("exp_avg", (8, 1), True),
        ("codes", (256,), True),
        ("step", (), True),
        ("step", (1,), True),
        ("row_var", (8, 1), True),
        ("col_var", (1, 4), True),
        ("exp_avg_sq_row", (8,), True),
        ("exp_avg_sq_col", (4,), True),
        ("exp_avg_sq_row", (5,), True),
        ("full", (8, 1), False),
        ("full", (8,), False),
        ("full", (4, 8), False),
        ("full", (), True),
    ],
)
def test_which_shapes_a_state_may_have(name, shape, good):
    module, optimizer, _ = trained(steps=0)
    state = OptimizerStateDict({f"0.weight.{name}": np.zeros(shape, np.float32)})
    state["2.weight.full"] = np.zeros((3, 8), np.float32)  # of its parameter's shape
    if good:
        assert state.to_torch(optimizer, module)["state"][0][name].shape == shape
    else:
        with pytest.raises(CompatibilityError, match=rf"0\.weight\.{name}"):
            state.to_torch(optimizer, module)


def test_a_shape_that_the_optimizer_holds_already_fits():
    module, optimizer, _ = trained(steps=0)
    optimizer.state[module[0].weight]["preconditioner"] = torch.eye(8)
    state = OptimizerStateDict.from_torch(optimizer, module)
    assert state.to_torch(optimizer, module)["state"][0]["preconditioner"].shape == (8, 8)


# ---- memory ----


def test_read_only_and_shared_arrays_are_copied():
    module, _, state = trained()
    frozen = state["0.weight.exp_avg"] = np.ones((8, 4), np.float32)
    frozen.flags.writeable = False
    steps = OptimizerStateDict.fromkeys(["0.weight.step", "2.weight.step"], np.float32(2))
    state.update(steps)
    step = np.array(2, np.float32)
    state["0.bias.step"] = state["0.weight.step"] = step
    fresh = optim.Adam(module.parameters())
    fresh.load_state_dict(state.to_torch(fresh, module))
    train(module, fresh, 2, 3)
    assert (frozen == 1).all()
    assert all(values["step"] == 3 for values in fresh.state.values())


def test_copies_are_asked_for():
    module, optimizer, state = trained()
    before = {name: array.copy() for name, array in state.items()}
    fresh = optim.Adam(module.parameters())
    fresh.load_state_dict(state.to_torch(fresh, module, copy=True))
    train(module, fresh, 2, 4)
    assert all(np.array_equal(state[name], before[name]) for name in before)
    assert optimizer.state[module[0].weight]["step"] == 2


def test_torch_casts_states_to_the_parameters_dtype():
    """torch's own load_state_dict does the same."""
    module = model(dtype=torch.bfloat16)
    optimizer = optim.Adam(module.parameters())
    state = OptimizerStateDict(
        {"0.weight.exp_avg": np.ones((8, 4), np.float32), "0.weight.step": np.float32(2)}
    )
    optimizer.load_state_dict(state.to_torch(optimizer, module))
    values = optimizer.state[module[0].weight]
    assert (values["exp_avg"].dtype, values["step"].dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "uint8"])
def test_states_that_torch_widens_are_loaded_as_by_torch(tmp_path, dtype):
    module = model()
    optimizer, fresh, peer = (optim.SGD(module.parameters(), lr=0.1) for _ in range(3))
    codes = torch.tensor([[0.5, 2.0]]).to(getattr(torch, dtype))
    optimizer.state[module[0].weight]["codes"] = codes
    mlstate.save(tmp_path / "c", module, optimizer)
    mlstate.load(tmp_path / "c", into={"model": module, "optimizer": fresh})
    peer.load_state_dict(optimizer.state_dict())
    loaded, expected = (each.state[module[0].weight]["codes"] for each in (fresh, peer))
    assert loaded.dtype == expected.dtype and torch.equal(loaded, expected)


@pytest.mark.parametrize("value", [np.zeros(1, "i4,f4"), np.longdouble(1)], ids=["record", "long"])
@pytest.mark.parametrize("place", ["state", "group", "nested"])
def test_arrays_that_no_load_reads_are_refused(tmp_path, value, place):
    module = model()
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    if place == "group":
        optimizer.param_groups[0]["odd"] = value
    else:
        optimizer.state[module[0].weight]["odd"] = value if place == "state" else [value]
    with pytest.raises(TypeError, match=r"odd.* is an array of .*, which no checkpoint stores"):
        mlstate.save(tmp_path / "c", module, optimizer)
    assert not (tmp_path / "c").exists()


def test_excluded_values_of_groups_keep_the_targets(tmp_path):
    module = model()
    source, target = (optim.SGD(module.parameters(), lr=rate) for rate in (0.1, 0.2))
    helpers = {parameter: object() for parameter in module.parameters()}
    source.param_groups[0] |= {"helpers": helpers, "mixed": {"a": object(), "b": 1}, "own": 5}
    values = {"a": 7, "b": 2}
    target.param_groups[0] |= {"helpers": 3, "mixed": values}
    text = (
        r"\['helpers'\] has the key .* of type Parameter.*exclude=\['param_groups\.\*\.helpers'\]"
    )
    with pytest.raises(TypeError, match=text) as caught:
        mlstate.save(tmp_path / "c", module, source)
    assert len(str(caught.value)) < 400
    exclude = ["param_groups.*.helpers", "param_groups.*.mixed.a", "*.own", "*.lr"]
    mlstate.save(tmp_path / "c", module, source, exclude=exclude)
    mlstate.load(tmp_path / "c", into={"model": module, "optimizer": target})
    group = target.param_groups[0]
    assert (group["helpers"], group["mixed"], group["lr"]) == (3, {"a": 7, "b": 1}, 0.2)
    assert "own" not in group
    fresh = optim.SGD(module.parameters(), lr=0.3)
    state = mlstate.load(tmp_path / "c").optimizer
    fresh.load_state_dict(state.to_torch(fresh, module))
    assert fresh.param_groups[0]["mixed"] == {"b": 1} and fresh.param_groups[0]["lr"] == 0.3


def test_bfloat16_states_are_shared():
    pytest.importorskip("ml_dtypes", reason="has bfloat16")
    module, optimizer, state = trained(dtype=torch.bfloat16)
    assert state["0.weight.exp_avg"].dtype.name == "bfloat16"
    tensors = state.to_torch(optimizer, module)["state"][0]
    assert tensors["exp_avg"].data_ptr() == optimizer.state[module[0].weight]["exp_avg"].data_ptr()


def test_to_torch_without_optimizer_keeps_names():
    state = OptimizerStateDict({"w.m": np.ones(3, np.float32)}, optimizer_type="adam")
    tensors = state.to_torch()
    assert list(tensors) == ["w.m"] and np.shares_memory(tensors["w.m"].numpy(), state["w.m"])


class Tied(torch.nn.Module):
    """Has one weight under two names."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.embedding.weight


def test_the_remedies_for_meta_modules_and_broken_ties_load(tmp_path):
    def make(module):
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    source = Tied()
    optimizer = make(source)
    source.head(source.embedding(torch.tensor([1]))).sum().backward()
    optimizer.step()
    mlstate.save(tmp_path, source, optimizer)
    with torch.device("meta"):
        target = Tied()
    with pytest.raises(
        BufferError, match=r"meta device: .* call to_empty\(device=\) on the module"
    ):
        mlstate.load(tmp_path, into={"model": target, "optimizer": make(target)})
    target.to_empty(device="cpu")
    with pytest.raises(CompatibilityError, match=r"has 'head.weight'.*tie it again before"):
        mlstate.load(tmp_path, into={"model": target, "optimizer": make(target)})
    target.tie()
    fresh = make(target)
    mlstate.load(tmp_path, into={"model": target, "optimizer": fresh})
    assert torch.equal(target.head.weight, source.head.weight)
    state = fresh.state[target.head.weight]["momentum_buffer"]
    assert torch.equal(state, optimizer.state[source.head.weight]["momentum_buffer"])
