"""Tiered states of torch tensors, modules and optimizers, and of device arrays."""

import numpy as np
import pytest
from test_tiers import bits, given_bits, states

import mlstate
from mlstate.checkpoint import TieredState
from mlstate.errors import CompatibilityError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tiers"


def test_tensors_stay_the_objects_they_are(folder):
    model = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    adam = {"w.exp_avg": torch.full((2, 3), 2.0), "w.step": torch.tensor(4.0)}
    tensors = {**model, **adam}
    expected = {name: t.clone() for name, t in tensors.items()}
    with TieredState(model, adam, folder, device="cpu") as tiers:
        for name in ("w", "b"):
            pointer = tensors[name].data_ptr()
            tiers.promote(name)
            assert tensors[name].data_ptr() != pointer  # memory that belongs to the stand-in
            tiers.demote(name, to="cold")
            assert tensors[name].numel() == 0 and tensors[name].device.type == "cpu"
            tiers.promote(name)
        assert all(torch.equal(tensors[name], t) for name, t in expected.items())
        with tiers.use("w", to="hot") as unit:
            assert unit.parameter is tensors["w"] and unit.states["step"] is tensors["w.step"]
        for name in ("w", "b"):
            tiers.demote(name, to="cold")
    with TieredState.open(folder) as tiers, tiers.use("w") as unit, tiers.use("b") as b:
        assert torch.equal(unit.parameter, expected["w"]) and b.parameter.dtype == torch.bfloat16
        assert torch.equal(unit.states["step"], expected["w.step"])


def test_numpy_arrays_become_tensors_on_a_device(folder):
    model, adam = states(1)
    (name,) = model
    expected = given_bits(model, adam)
    with TieredState(model, adam, folder, device="cpu") as tiers:
        tiers.promote(name)
        with tiers.use(name) as unit:
            assert isinstance(unit.parameter, torch.Tensor)
            assert isinstance(unit.states["step"], np.ndarray)  # counters stay in memory
            assert unit.parameter.data_ptr() != model[name].ctypes.data
        assert bits(tiers) == expected
        tiers.demote(name)
        with tiers.use(name) as unit:
            assert isinstance(unit.parameter, np.ndarray)
        tiers.promote(name), tiers.demote(name, to="cold"), tiers.promote(name, to="hot")
        assert bits(tiers) == expected


def test_copies_own_their_memory_and_bits():
    from mlstate.integrations.torch._checkpoint.tiers import in_memory

    conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
    for tensor in (
        torch.tensor(3.0), torch.zeros(0, 3), torch.rand(3, 4).t(), torch.rand(8)[::2],
        conjugated, conjugated.imag, torch.rand(3, requires_grad=True), torch.rand(2).bfloat16(),
    ):  # fmt: skip
        copied = in_memory([tensor])[0]
        assert torch.equal(copied, tensor) and copied.dtype == tensor.dtype
        assert copied.shape == tensor.shape and not copied.requires_grad
        assert not tensor.numel() or copied.data_ptr() != tensor.data_ptr()


def experts_and_adam(**options):
    """Experts used in turn, two of them never; an Adam optimizer with `options`; inputs."""
    torch.manual_seed(3)
    experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
    adam = torch.optim.Adam(experts.parameters(), lr=0.01, **({"foreach": False} | options))
    return experts, adam, [(i * i % 4, torch.randn(5, 8)) for i in range(12)]


def train_step(expert, adam, x):
    expert(x).square().sum().backward()
    adam.step()
    adam.zero_grad(set_to_none=True)


def assert_equal(first, second):
    for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(a, b)
        first_state, second_state = first[1].state.get(a, {}), second[1].state.get(b, {})
        assert first_state.keys() == second_state.keys()
        assert all(torch.equal(state, second_state[name]) for name, state in first_state.items())


@pytest.mark.parametrize("to", [None, "hot"])
def test_a_module_and_its_optimizer_train_in_tiers(tmp_path, to):
    reference, plain_adam, inputs = experts_and_adam()
    for k, x in inputs:
        train_step(reference[k], plain_adam, x)
    experts, adam, inputs = experts_and_adam()
    with TieredState(experts, adam, tmp_path / "tiers", device="cpu") as tiers:
        for k, x in inputs:
            with tiers.use(f"{k}.weight", to), tiers.use(f"{k}.bias", to):
                train_step(experts[k], adam, x)
            for name in tiers:
                tiers.demote(name, to="cold")
        assert all(p.numel() == 0 for p in experts.parameters())
        used = [unit.arrays for unit in tiers.report().units if unit.uses]
        assert used == [["parameter", "step", "exp_avg", "exp_avg_sq"]] * 4
        for name in tiers:
            tiers.promote(name)
    assert_equal((reference, plain_adam), (experts, adam))


def test_a_torch_optimizer_needs_its_module(folder):
    layer = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(layer.parameters())
    with pytest.raises(TypeError, match="needs its module"):
        TieredState(None, adam, folder)
    with TieredState(layer, None, folder) as tiers, pytest.raises(TypeError, match="constructor"):
        tiers.add(layer, adam)


def test_hot_is_the_memory_of_a_gpu(folder):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here")
    model = {"w": torch.arange(1024.0), "n": torch.ones(3)}
    adam = {"w.m": torch.ones(1024), "w.step": torch.tensor(1.0)}
    w, m = model["w"], adam["w.m"]
    with TieredState(model, adam, folder) as tiers:
        assert tiers.device.type == "cuda" and tiers.tier("w") == "warm"
        tiers.promote("w")
        assert w.is_cuda and m.is_cuda and not adam["w.step"].is_cuda and not model["n"].is_cuda
        with tiers.use("w") as unit:
            unit.parameter += 1
        tiers.demote("w", to="cold")
        assert w.numel() == 0
        tiers.promote("w", to="hot")
        assert w.is_cuda and torch.equal(w.cpu(), torch.arange(1024.0) + 1)
        tiers.demote("w")
        assert not w.is_cuda


class OnDevice(torch.Tensor):
    """A tensor in main memory whose device is the second of CUDA."""

    device = torch.device("cuda", 1)
    __torch_function__ = torch._C._disabled_torch_function_impl


def test_tensors_are_copied_from_the_device_after_a_single_wait_for_its_streams(monkeypatch):
    """Another thread may use its own stream, and the memory is freed after the copy."""
    from mlstate.integrations.torch._checkpoint import tiers as module

    calls, copy_tensor = [], module._copy_tensor
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    monkeypatch.setattr(
        module, "_copy_tensor", lambda *args: calls.append("copy") or copy_tensor(*args)
    )
    tensors = [torch.arange(3.0).as_subclass(OnDevice), torch.ones(2).as_subclass(OnDevice)]
    copies = module.in_memory([*tensors, torch.zeros(1)])
    assert [each.tolist() for each in copies] == [[0, 1, 2], [1, 1], [0]]
    assert calls == [torch.device("cuda", 1), "copy", "copy", "copy"]
    del calls[:]
    module.in_memory([torch.zeros(1)])
    assert calls == ["copy"]


def test_cold_units_are_not_saved_as_empty(tmp_path, folder):
    module = torch.nn.Linear(3, 2)
    expected = module.weight.detach().clone()
    module.register_buffer("nothing", torch.empty(0))  # intended usage
    file, checkpoint = tmp_path / "model.safetensors", tmp_path / "checkpoint"
    mlstate.save(checkpoint, module)
    tiers = TieredState(module, None, folder)
    tiers.demote("weight", to="cold")
    for save in (
        lambda: mlstate.save(checkpoint, module),
        lambda: mlstate.checkpoint.save_async(checkpoint, module).wait(),
        lambda: mlstate.save(checkpoint, module.state_dict()),
        lambda: mlstate.save_file(module.state_dict(), file),
        lambda: mlstate.StateDict.from_torch(module.state_dict()),
        lambda: TieredState(module, None, tmp_path / "others"),
    ):
        with pytest.raises(ValueError, match=r"'weight' is cold: .* promote it, or"):
            save()
    assert not file.exists()
    assert torch.equal(torch.as_tensor(mlstate.load(checkpoint).model["weight"]), expected)
    tiers.promote("weight")
    mlstate.save(checkpoint, module)
    tiers.close()


def test_a_lazy_parameter_is_not_taken_for_a_cold_one():
    from mlstate.integrations.torch._tensors import has_given_away, is_given_away, memory_change

    weight = torch.nn.Parameter(torch.ones(2))
    memory_change(weight, None)()
    assert has_given_away() and is_given_away(weight)
    assert not is_given_away(torch.nn.LazyLinear(3).weight)


def test_groups_are_current_and_states_that_are_not_tensors_are_refused(folder):
    module = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    with TieredState(module, sgd, folder, device="cpu") as tiers:
        sgd.param_groups[0].update(lr=0.25, layers={1, 2})
        saved = tiers.state_dicts().optimizer
        assert saved.learning_rate == saved.param_groups[0]["lr"] == 0.25
        assert saved.param_groups[0]["layers"]["value"] == {"$": "set", "items": [1, 2]}
        refused = pytest.raises(TypeError, match=r"'weight.count' is a int: a TieredState")
        with refused, tiers.use("weight"):
            sgd.state[module.weight]["count"] = 3
    with pytest.raises(TypeError, match=r"'weight.count' is a int"):
        TieredState(module, sgd, folder.with_name("other"), device="cpu")


class Momentum(torch.optim.Optimizer):
    """Replaces its state in each step, instead of changing it in place."""

    def __init__(self, parameters, dtype=None):
        self.dtype = dtype
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            sums = self.state[parameter].get("sum", torch.zeros_like(parameter))
            self.state[parameter]["sum"] = (sums + parameter.grad).to(self.dtype)


def test_states_that_an_optimizer_replaces_are_the_unit_s(folder):
    layer = torch.nn.Linear(2, 1, bias=False)
    optimizer = Momentum(layer.parameters())
    layer.weight.grad = torch.ones_like(layer.weight)
    with TieredState(layer, optimizer, folder) as tiers:
        for step in (1.0, 2.0, 3.0):
            with tiers.use("weight"):
                optimizer.step()
            tiers.demote("weight", to="cold")
            assert optimizer.state[layer.weight]["sum"].numel() == 0  # its memory is in the file
            with tiers.use("weight") as unit:
                assert unit.states["sum"] is optimizer.state[layer.weight]["sum"]
                assert unit.states["sum"].tolist() == [[step, step]]
        with tiers.use("weight") as unit:
            optimizer.step()
            unit.states["sum"] = torch.full((1, 2), 9.0)
        assert optimizer.state[layer.weight]["sum"].tolist() == [[9, 9]]
        optimizer.dtype = torch.float64
        with (
            pytest.raises(CompatibilityError, match=r"'weight.sum' is a tensor of float32"),
            tiers.use("weight"),
        ):
            optimizer.step()
