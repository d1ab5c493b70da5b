"""Checkpoints of torch modules and optimizers in one process."""

import copy

import numpy as np
import pytest

import mlstate
from mlstate.checkpoint import CheckpointManager, Layout, inspect

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="its modules are what is saved")

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    )
    return layers.to(dtype)


def pair(make=torch.optim.Adam, dtype=torch.float32):
    """A module and its optimizer."""
    module = model(dtype)
    return module, make(module.parameters())


def train(module, optimizer, steps, start=0):
    losses = []
    dtype = next(module.parameters()).dtype
    for step in range(start, start + steps):
        torch.manual_seed(1000 + step)
        optimizer.zero_grad()
        loss = module(torch.randn(32, 8, dtype=dtype)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_resumes_bitwise(tmp_path, kind, dtype):
    module, optimizer = pair(OPTIMIZERS[kind], dtype)
    train(module, optimizer, 3)
    saved = mlstate.save(tmp_path / "a", module, optimizer, layout="rows")
    assert saved.step == (0 if kind in ("sgd", "momentum") else 3)
    expected = train(module, optimizer, 4, start=3)

    # in place, into a new module and a new optimizer
    fresh, other = pair(OPTIMIZERS[kind], dtype)
    pointers = [p.data_ptr() for p in fresh.parameters()]
    mlstate.load(tmp_path / "a", into={"model": fresh, "optimizer": other})
    assert [p.data_ptr() for p in fresh.parameters()] == pointers
    assert train(fresh, other, 4, start=3) == expected

    # by state dicts, as torch does it
    fresh, other = pair(OPTIMIZERS[kind], dtype)
    loaded = mlstate.load(tmp_path / "a")
    fresh.load_state_dict(loaded.model.to_torch())
    other.load_state_dict(loaded.optimizer.to_torch(other, fresh))
    assert train(fresh, other, 4, start=3) == expected


def test_adafactor_factors_record_their_axes(tmp_path):
    module = torch.nn.Linear(6, 4)
    optimizer = torch.optim.Adafactor(module.parameters())
    module(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    mlstate.save(tmp_path / "a", module, optimizer)
    records = {t.key: t for t in inspect(tmp_path / "a").tensors()}
    assert records["weight.row_var"].axes == (0, None)
    assert records["weight.col_var"].axes == (None, 1)
    half = mlstate.load(tmp_path / "a", layout=Layout.rows(2), rank=1).optimizer
    assert half["weight.row_var"].shape == (2, 1)
    assert half["weight.col_var"].shape == (1, 6)
    assert np.array_equal(
        half["weight.row_var"], mlstate.load(tmp_path / "a").optimizer["weight.row_var"][2:]
    )


def test_memory_filled_in_place_is_noticed_by_autograd(tmp_path):
    module = model()
    mlstate.save(tmp_path / "a", module)
    weight = module[0].weight
    squared = (weight * weight).sum()
    mlstate.load(tmp_path / "a", into={"model": module})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_module_of_other_shapes_is_refused_unchanged(tmp_path):
    mlstate.save(tmp_path / "a", model())
    other = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 5)
    )
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(mlstate.CompatibilityError, match=r"'3\.bias'|'3\.weight'"):
        mlstate.load(tmp_path / "a", into={"model": other})
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())
    with pytest.raises(mlstate.CompatibilityError, match="Missing key"):
        mlstate.load(tmp_path / "a", into={"model": torch.nn.Linear(2, 2)})


def test_steps_of_a_module_are_kept(tmp_path):
    module, optimizer = pair()
    with CheckpointManager(tmp_path / "run", keep=2) as manager:
        for step in range(4):
            train(module, optimizer, 1, start=step)
            manager.save(step, module, optimizer)
        expected = train(module, optimizer, 2, start=4)
        fresh = model()
        other = torch.optim.Adam(fresh.parameters())
        assert manager.restore_latest(into={"model": fresh, "optimizer": other}).step == 3
    assert train(fresh, other, 2, start=4) == expected


def test_tensors_in_dicts_and_shards_of_tensors(tmp_path):
    weight = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)
    rows = Layout.rows(2)
    state = {"w": rows.shard(weight, 0), "t": weight.T, "p": torch.nn.Parameter(torch.ones(2))}
    mlstate.save(tmp_path / "a", state | {"w2": weight})
    loaded = mlstate.load(tmp_path / "a", names=["t", "p", "w2"]).model.to_torch()
    assert torch.equal(loaded["t"], weight.T) and torch.equal(loaded["w2"], weight)
    part = mlstate.load(tmp_path / "a", names="w", layout=rows, rank=0).model.to_torch()["w"]
    assert torch.equal(part, weight[:2])
    target = {"w2": torch.zeros_like(weight)}
    mlstate.load(tmp_path / "a", names="w2", into={"model": target})
    assert torch.equal(target["w2"], weight)


def test_tied_weights_are_loaded_as_they_were_saved(tmp_path):
    def tied(seed):
        torch.manual_seed(seed)
        module = torch.nn.ModuleDict(
            {"embed": torch.nn.Embedding(3000, 512), "head": torch.nn.Linear(512, 3000)}
        )
        module["head"].weight = module["embed"].weight
        return module, torch.optim.Adam(module.parameters())

    module, adam = tied(0)
    module["head"](module["embed"](torch.tensor([1]))).sum().backward()
    adam.step()
    mlstate.save(tmp_path / "a", module, adam)
    fresh, other = tied(1)
    mlstate.load(tmp_path / "a", into={"model": fresh, "optimizer": other})
    assert fresh["head"].weight is fresh["embed"].weight
    assert torch.equal(fresh["head"].weight, module["head"].weight)
    states = adam.state[module["head"].weight]
    assert torch.equal(other.state[fresh["head"].weight]["exp_avg"], states["exp_avg"])


def test_a_tensor_without_memory_is_refused_by_name(tmp_path):
    with pytest.raises(BufferError, match="'w' is a tensor on torch's meta device"):
        mlstate.save(tmp_path / "a", {"w": torch.empty(2, device="meta")})
    assert not (tmp_path / "a").exists()


def negated():
    return torch.tensor([1 + 2j]).conj().imag


def test_negated_views_are_refused_by_every_operation(tmp_path):
    """Its memory has the opposite sign, and __dlpack__ exports the memory."""
    path, view, array = tmp_path / "c", negated(), np.zeros(1, np.float32)
    layout = Layout.rows(1)
    calls = [
        lambda: mlstate.save(path, {"w": view}),
        lambda: mlstate.save(path, {"w": layout.shard(view, 0)}),
        lambda: mlstate.save(path, {"w": np.ones(1)}, {"w.w": view}),
        lambda: mlstate.checkpoint.save_async(path, {"w": view}).wait(),
        lambda: mlstate.save_file({"w": view}, path),
        lambda: mlstate.state.load_into({"w": array}, {"w": view}),
        lambda: mlstate.state.load_into({"w": view}, {"w": array}),
        lambda: mlstate.state.diff({"w": array}, {"w": view}),
        lambda: mlstate.StateDict(w=view).digest(),
        lambda: mlstate.StateDict(w=view) == mlstate.StateDict(w=array),
    ]
    for call in calls:
        with pytest.raises(
            TypeError, match=r"'w(\.w)?' is a view that is negated when read: store its resolve_neg"
        ):
            call()
    assert array[0] == 0 and view.item() == -2
    assert list(tmp_path.iterdir()) == []
    mlstate.save(path, {"w": view.resolve_neg()})
    assert mlstate.load(path).model["w"].tolist() == [-2.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        lambda: torch.ones(2, device="meta"),
    ],
)
def test_unexportable_tensors_are_named(tmp_path, make):
    state = {"a": np.ones(1), "w": make()}
    with pytest.raises(BufferError, match=r"^params 'w'|^'w'"):
        mlstate.save(tmp_path / "c", state)
    with pytest.raises(BufferError, match=r"^'w' is "):
        mlstate.save_file(state, tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


def test_refused_optimizer_keeps_the_module(tmp_path):
    module = model()
    mlstate.save(tmp_path / "bare", module)
    optimizer = torch.optim.Adam(module.parameters())
    train(module, optimizer, 1)
    mlstate.save(tmp_path / "both", module, optimizer)
    other = model()
    with torch.no_grad():
        other[0].weight.zero_()
    partly = torch.optim.Adam(other[0].parameters())
    for path, match in (("bare", "holds no optimizer"), ("both", "Unexpected parameter")):
        with pytest.raises(mlstate.CompatibilityError, match=match):
            mlstate.load(tmp_path / path, into={"model": other, "optimizer": partly})
        assert not other[0].weight.any()


def test_states_that_were_saved_without_names_go_by_the_order_of_parameters(tmp_path):
    module, optimizer = pair()
    train(module, optimizer, 2)
    mlstate.save(tmp_path / "a", module.state_dict(), optimizer)
    assert mlstate.load(tmp_path / "a", names="param_0").optimizer
    expected = train(module, optimizer, 2, start=2)
    fresh, other = pair()
    mlstate.load(tmp_path / "a", into={"model": fresh, "optimizer": other})
    assert train(fresh, other, 2, start=2) == expected


def test_optimizer_without_module_raises_with_the_remedy(tmp_path):
    module, optimizer = pair()
    train(module, optimizer, 1)
    mlstate.save(tmp_path / "a", module, optimizer)
    with pytest.raises(mlstate.CompatibilityError, match="pass the module too"):
        mlstate.load(tmp_path / "a", into={"optimizer": optimizer})


def test_a_prefix_of_a_wrapper_is_recognised(tmp_path):
    mlstate.save(tmp_path / "a", torch.nn.ModuleDict({"module": model()}))
    with pytest.raises(mlstate.CompatibilityError, match="names match with rename="):
        mlstate.load(tmp_path / "a", into={"model": model()})
