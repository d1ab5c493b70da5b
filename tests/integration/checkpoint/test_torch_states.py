"""Named states of torch: models, optimizers, schedulers, generators; strict, cast, device."""

import numpy as np
import pytest
from averaged_model import Ema

torch = pytest.importorskip("torch")

import mlstate  # noqa: E402
from mlstate import CompatibilityError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]


class Run:
    """Actor, critic, two optimizers, a scheduler, an average and three generators."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.actor, self.critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.actor_opt = torch.optim.AdamW(self.actor.parameters(), lr=0.1)
        self.critic_opt = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.actor_opt, [2, 4])
        self.swa = torch.optim.swa_utils.AveragedModel(self.actor)
        self.ema = Ema(self.actor)
        self.numpy = np.random.default_rng(seed)
        self.own = torch.Generator().manual_seed(seed)
        self.losses = []

    def states(self):
        return {
            "critic": self.critic,
            "critic_opt": self.critic_opt,
            "schedule": self.schedule,
            "swa": self.swa,
            "ema": self.ema,
            "rng": {"numpy": self.numpy, "own": self.own, "torch": torch.random},
            "losses": self.losses,
        }

    def step(self):
        x = torch.randn(8, 4) + torch.randn(8, 4, generator=self.own)
        x += torch.from_numpy(self.numpy.normal(size=(8, 4)).astype(np.float32))
        loss = self.critic(torch.tanh(self.actor(x))).square().mean()
        loss.backward()
        for optimizer in (self.actor_opt, self.critic_opt):
            optimizer.step()
            optimizer.zero_grad()
        self.schedule.step()
        self.swa.update_parameters(self.actor)
        self.ema.update(self.actor)
        self.losses.append(loss.item())


class Tensors:
    """An object of mlstate's own protocol that holds tensors."""

    def __init__(self, value):
        self.state = {"w": torch.full((2,), value, dtype=torch.bfloat16), "n": np.ones(1)}

    def get_state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)


def test_objects_of_own_protocol_get_tensors_for_tensors(tmp_path):
    mlstate.save(tmp_path, states={"a": Tensors(3.0)})
    target = Tensors(0.0)
    mlstate.load(tmp_path, into={"states": {"a": target}})
    assert torch.equal(target.state["w"], torch.full((2,), 3.0, dtype=torch.bfloat16))
    assert isinstance(target.state["n"], np.ndarray)
    target.state["w"] = torch.ones(2, requires_grad=True).bfloat16()  # autograd recorded it
    mlstate.load(tmp_path, into={"states": {"a": target}})
    assert target.state["w"].eq(3).all()


def test_a_whole_run_resumes_with_the_same_bits(tmp_path):
    run = Run(0)
    for _ in range(3):
        run.step()
    mlstate.save(tmp_path / "c", run.actor, run.actor_opt, states=run.states())
    for _ in range(3):
        run.step()
    other = Run(1)
    other.step()
    mlstate.load(
        tmp_path / "c",
        into={"model": other.actor, "optimizer": other.actor_opt, "states": other.states()},
    )
    for _ in range(3):
        other.step()
    assert other.losses == run.losses
    assert other.ema.count == run.ema.count
    for a, b in ((run.actor, other.actor), (run.critic, other.critic), (run.swa, other.swa)):
        assert all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))
    assert all(map(torch.equal, run.ema.shadow.values(), other.ema.shadow.values()))
    assert run.actor_opt.param_groups[0]["lr"] == other.actor_opt.param_groups[0]["lr"]


def test_optimizer_uses_names_of_its_module(tmp_path):
    run = Run(0)
    run.step()
    both = torch.optim.AdamW([*run.actor.parameters(), *run.critic.parameters()])
    mlstate.save(tmp_path / "c", run.actor, states={**run.states(), "both": both})
    states = mlstate.load(tmp_path / "c").states
    assert set(states["critic_opt"]) == {"bias.momentum_buffer", "weight.momentum_buffer"}
    assert set(states["both"].param_groups[0]["params"]) == {f"param_{i}" for i in range(4)}


def test_missing_name_keeps_all_targets(tmp_path):
    run, other = Run(0), Run(1)
    run.step()
    mlstate.save(tmp_path / "c", run.actor, states=run.states())
    before = {name: value.clone() for name, value in other.actor.state_dict().items()}
    states = {**other.states(), "critic": torch.nn.Linear(3, 1)}
    del states["critic_opt"]
    generator = other.own.get_state().clone()
    with pytest.raises(CompatibilityError, match="critic/weight"):
        mlstate.load(tmp_path / "c", into={"model": other.actor, "states": states})
    assert all(torch.equal(before[name], value) for name, value in other.actor.state_dict().items())
    assert torch.equal(generator, other.own.get_state()) and other.losses == []


def test_device_returns_tensors(tmp_path):
    values = {"w": torch.arange(4, dtype=torch.bfloat16), "n": torch.tensor(3)}
    mlstate.save(
        tmp_path / "c", values, {"w.m": torch.ones(4)}, states={"ema": values, "x": [values]}
    )
    loaded = mlstate.load(tmp_path / "c", device="cpu")
    for state in (loaded.model, loaded.states["ema"], loaded.states["x"][0]):
        assert torch.equal(state["w"], values["w"]) and state["w"].dtype == torch.bfloat16
    assert isinstance(loaded.optimizer, mlstate.StateDict)
    assert torch.equal(loaded.optimizer["w.m"], torch.ones(4))
    assert not isinstance(mlstate.load(tmp_path / "c").states["x"][0]["w"], torch.Tensor)
    with pytest.raises(ValueError, match="is not a device of torch"):
        mlstate.load(tmp_path / "c", device="nowhere")


def test_modules_are_filled_with_rename_cast_and_without_strict(tmp_path):
    source = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).double()
    optimizer = torch.optim.AdamW(source.parameters(), lr=0.5)
    source(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    mlstate.save(tmp_path / "c", source, optimizer)
    target = torch.nn.ModuleDict({"first": torch.nn.Linear(3, 2), "new": torch.nn.Linear(2, 2)})
    other_optimizer = torch.optim.AdamW(target.parameters(), lr=0.1)
    before = target["new"].weight.detach().clone()
    into = {"model": target, "optimizer": other_optimizer}
    with pytest.raises(CompatibilityError):
        mlstate.load(tmp_path / "c", into=into, rename={"0": "first"}, cast=True)
    with pytest.warns(UserWarning, match=r"group 0 keeps its own values: .* 'new.weight'"):
        mlstate.load(tmp_path / "c", into=into, rename={"0": "first"}, cast=True, strict=False)
    assert other_optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(target["first"].weight, source[0].weight.float())
    assert torch.equal(target["new"].weight, before)
    loaded_state, saved = (
        other_optimizer.state[target["first"].weight],
        optimizer.state[source[0].weight],
    )
    assert torch.equal(loaded_state["exp_avg"], saved["exp_avg"].float())  # as torch converts it
    assert target["new"].weight not in other_optimizer.state
    with pytest.raises(CompatibilityError, match="float64"):
        mlstate.load(tmp_path / "c", into={"model": target}, rename={"0": "first"}, strict=False)


def test_sparse_tensor_is_named(tmp_path):
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(TypeError, match=r"states\['x'\]\[0\]\['s'\] is torch.sparse_coo"):
        mlstate.save(tmp_path / "c", states={"x": [{"s": sparse}]})


def test_generators_of_torch_do_not_mix(tmp_path):
    mlstate.save(tmp_path / "c", states={"rng": torch.Generator()})
    with pytest.raises(CompatibilityError, match="saved torch, expected numpy"):
        mlstate.load(tmp_path / "c", into={"states": {"rng": np.random.default_rng(0)}})
    state = mlstate.load(tmp_path / "c", device="cpu").states["rng"]
    torch.Generator().set_state(state)


def test_containers_receive_tensors_for_saved_tensors(tmp_path):
    value = {"w": torch.ones(2, dtype=torch.bfloat16), "deep": [{"v": torch.ones(1)}, 1], "n": 1}
    mlstate.save(tmp_path / "c", states={"x": value, "y": [torch.ones(2), 1]})
    target, items = {"w": None, "deep": [{"v": torch.zeros(1)}, 0], "n": 0}, []
    mlstate.load(tmp_path / "c", into={"states": {"x": target, "y": items}})
    assert torch.equal(target["w"], value["w"]) and target["w"].dtype == torch.bfloat16
    assert torch.equal(target["deep"][0]["v"], torch.ones(1)) and target["n"] == 1
    assert torch.equal(items[0], torch.ones(2)) and items[1] == 1


def test_a_target_without_elements_receives_the_saved_ones(tmp_path):
    mlstate.save(tmp_path / "c", states={"x": {"w": torch.ones(2), "n": 1}})
    target = {"w": torch.zeros(2, device="meta"), "n": 0}
    mlstate.load(tmp_path / "c", into={"states": {"x": target}})
    assert torch.equal(target["w"], torch.ones(2))


def test_parameters_in_containers_are_filled_in_place(tmp_path):
    alpha = torch.full((1,), 3.0, requires_grad=True)
    mlstate.save(tmp_path / "c", states={"sac": {"alpha": alpha, "step": 5}})
    target = {"alpha": torch.zeros(1, requires_grad=True), "step": 0}
    own = target["alpha"]
    mlstate.load(tmp_path / "c", into={"states": {"sac": target}})
    assert target["alpha"] is own and own.requires_grad and own.item() == 3 and target["step"] == 5
    for other in (torch.zeros(2, requires_grad=True), torch.zeros(1).double().requires_grad_()):
        target = {"alpha": other, "step": 0}
        with pytest.raises(CompatibilityError, match=r"\['alpha'\]: the target is float"):
            mlstate.load(tmp_path / "c", into={"states": {"sac": target}})
        assert not other.any() and target["step"] == 0


@pytest.mark.parametrize("container", [tuple, list, lambda items: dict(enumerate(items))])
def test_objects_of_torch_in_containers_are_restored_in_place(tmp_path, container):
    def objects(seed):
        module = torch.nn.Linear(2, 2)
        return [
            module,
            torch.optim.SGD(module.parameters(), lr=seed),
            torch.Generator().manual_seed(seed),
        ]

    source, own = objects(2), objects(3)
    mlstate.save(tmp_path / "c", states={"x": {"v": container(source)}})
    target = {"v": container(own)}
    mlstate.load(tmp_path / "c", into={"states": {"x": target}})
    restored = target["v"].values() if isinstance(target["v"], dict) else target["v"]
    assert list(map(id, restored)) == list(map(id, own))
    assert torch.equal(own[0].weight, source[0].weight) and own[1].param_groups[0]["lr"] == 2
    assert torch.equal(own[2].get_state(), source[2].get_state())


def test_nested_modules_get_their_versions(tmp_path):
    class Layer(torch.nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            self.loaded = metadata.get("version")
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    mlstate.save(tmp_path / "c", states={"x": [Layer(1, 1)]})
    target = [Layer(1, 1)]
    mlstate.load(tmp_path / "c", into={"states": {"x": target}})
    assert target[0].loaded == 3


@pytest.mark.parametrize("place", ["state", "dict", "list"])
@pytest.mark.parametrize("dtype", ["float32", ">f4", "bfloat16"])
def test_an_array_of_numpy_fills_a_parameter_in_place(tmp_path, place, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    wrap = {"state": lambda w: w, "dict": lambda w: {"w": w, "n": 1}, "list": lambda w: [w, 1]}
    array = np.arange(3).astype(dtype)
    mlstate.save(tmp_path / "c", states={"s": wrap[place](array)})
    is_short = array.dtype.itemsize == 2
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=[torch.float32, torch.bfloat16][is_short]))
    mlstate.load(tmp_path / "c", into={"states": {"s": wrap[place](parameter)}})
    assert parameter.tolist() == [0, 1, 2]


def test_an_array_of_numpy_fills_a_buffer_in_place(tmp_path):
    mlstate.save(tmp_path / "c", states={"s": np.arange(3)})
    module = torch.nn.Module()
    module.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    mlstate.load(tmp_path / "c", into={"states": {"s": module.steps}})
    assert module.steps.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("saved", "got"),
    [
        (np.ones(3), "float64 of shape"),
        (np.ones((3, 1), "f4"), r"shape \(3, 1\)"),
        ([1.0, 2.0, 3.0], "a list, not a tensor"),
    ],
    ids=["dtype", "shape", "list"],
)
def test_another_array_of_numpy_is_refused_for_a_parameter(tmp_path, saved, got):
    mlstate.save(tmp_path / "c", states={"first": np.ones(3, "f4"), "s": saved})
    first, parameter = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    with pytest.raises(CompatibilityError, match=f"the target is float32.*{got}"):
        mlstate.load(tmp_path / "c", into={"states": {"first": first, "s": parameter}})
    assert not first.any() and not parameter.any()


def test_an_array_of_numpy_is_refused_for_a_meta_tensor(tmp_path):
    mlstate.save(tmp_path / "c", states={"s": np.ones(3, "f4")})
    with pytest.raises(CompatibilityError, match="the target is a meta tensor, which"):
        mlstate.load(tmp_path / "c", into={"states": {"s": torch.zeros(3, device="meta")}})


@pytest.mark.parametrize("saved", [np.ones((2, 2), "f4"), torch.ones(2, 2)], ids=["numpy", "torch"])
def test_a_tensor_whose_elements_share_memory_is_refused_in_a_list(tmp_path, saved):
    mlstate.save(tmp_path / "c", states={"s": [torch.ones(3), saved]})
    first, memory = torch.nn.Parameter(torch.zeros(3)), torch.zeros(3)
    target = [first, memory.as_strided((2, 2), (1, 1)).requires_grad_()]
    with pytest.raises(ValueError, match=r"states\['s'\]\[1\] has elements that share memory"):
        mlstate.load(tmp_path / "c", into={"states": {"s": target}})
    assert not first.any() and not memory.any()


def test_overlapping_parameters_in_a_list_are_refused(tmp_path):
    mlstate.save(tmp_path, states={"x": [torch.zeros(4), torch.ones(2)]})
    memory = torch.full((6,), 7.0)
    parameters = [torch.nn.Parameter(memory[:4]), torch.nn.Parameter(memory[2:4])]
    with pytest.raises(ValueError, match=r"states\['x'\]\[0\] and states\['x'\]\[1\] share memory"):
        mlstate.load(tmp_path, into={"states": {"x": parameters}})
    assert (memory == 7).all()
    parameters[1] = torch.nn.Parameter(memory[4:])
    mlstate.load(tmp_path, into={"states": {"x": parameters}})
    assert memory.tolist() == [0, 0, 0, 0, 1, 1]
