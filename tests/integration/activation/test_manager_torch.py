"""Strategies on torch modules: which modules are recomputed, and gradients with the same bits."""

import copy
import importlib
import pickle

import pytest
from interruption import signal_once

torch = pytest.importorskip("torch", reason="runs torch modules")

from torch import nn  # noqa: E402

from mlstate.activation import (  # noqa: E402
    ActivationManager,
    IntervalStrategy,
    MemoryAwareStrategy,
    SelectiveStrategy,
    SizeBasedStrategy,
    SmartStrategy,
)

pytestmark = pytest.mark.torch


class Block(nn.Module):
    """Counts its runs; takes and returns more than one tensor, and accepts keywords."""

    def __init__(self, width, drop=0.0):
        super().__init__()
        self.linear, self.drop, self.runs = nn.Linear(width, width), nn.Dropout(drop), 0

    def forward(self, x, *, preserve_rng_state=1.0):
        self.runs += 1
        return x + self.drop(torch.tanh(self.linear(x))) * preserve_rng_state


class Model(nn.Module):
    def __init__(self, blocks=6, width=16, drop=0.0):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width, drop) for _ in range(blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, preserve_rng_state=0.5)
        return self.head(x)


def step(model, seed=3):
    """Gradients and loss of one pass."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = model(torch.randn(8, 16)).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def runs(model):
    counted = [layer.runs for layer in model.layers]
    for layer in model.layers:
        layer.runs = 0
    return counted


def same_bits(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("strategy", "again"),
    [
        (IntervalStrategy(2), [1, 0, 1, 0, 1, 0]),
        (SelectiveStrategy(["layers.1"]), [0, 1, 0, 0, 0, 0]),
        (~SelectiveStrategy(["layers.1"]), [1, 0, 1, 1, 1, 1]),
        (SizeBasedStrategy(8 * 16 * 4), [1] * 6),
        (SizeBasedStrategy(8 * 16 * 4 + 1), [0] * 6),
        (MemoryAwareStrategy(clock=lambda: 0.0), [1, 0, 1, 0, 1, 0]),
        (SmartStrategy(), [0] * 6),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_blocks_run_again_as_decided(strategy, again):
    torch.manual_seed(1)
    model = Model(drop=0.3)
    expected = step(model)
    assert runs(model) == [1] * 6
    manager = ActivationManager(strategy)
    with manager.apply(model, "layers.*") as applied:
        assert applied.blocks == tuple(f"layers.{i}" for i in range(6))
        assert same_bits(step(model), expected)
    assert runs(model) == [1 + more for more in again]
    assert [layer.is_checkpointed for layer in manager.layers()] == [bool(n) for n in again]
    assert manager.layers()[0].activation_bytes == 8 * 16 * 4
    assert same_bits(step(model), expected)
    assert runs(model) == [1] * 6


def test_less_is_saved():
    """The bytes that autograd saves, as its hooks see them."""
    saved_bytes = 0

    def count(tensor):
        nonlocal saved_bytes
        saved_bytes += tensor.nbytes
        return tensor

    def saved(model):
        nonlocal saved_bytes
        saved_bytes = 0
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(torch.ones(8, 16)).sum()
        return saved_bytes

    model = Model()
    unmanaged = saved(model)
    with ActivationManager(IntervalStrategy(1)).apply(model, "layers.*"):
        assert saved(model) < unmanaged / 2


def test_no_decisions_without_gradients():
    model = Model()
    manager = ActivationManager(IntervalStrategy(1))
    with manager.apply(model, "layers.*"), torch.no_grad():
        model(torch.ones(8, 16))
    assert manager.decisions == 0


@pytest.mark.parametrize("holder", [dict, type("Batch", (dict,), {})], ids=lambda c: c.__name__)
def test_sizes_include_tensors_in_dicts(holder):
    class Inner(nn.Module):
        def forward(self, batch):
            return batch["x"] * 2

    x = torch.ones(8, 16, requires_grad=True)
    for least, expected in ((x.nbytes, 1), (x.nbytes + 1, 0)):
        model = nn.ModuleList([Inner()])
        manager = ActivationManager(SizeBasedStrategy(least))
        with manager.apply(model):
            model[0](holder(x=x))
        assert manager.checkpointed == expected


def test_children_are_blocks_by_default():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    expected = step(model)
    manager = ActivationManager(IntervalStrategy(1))
    applied = manager.apply(model)
    assert applied.blocks == ("0", "1", "2")
    assert same_bits(step(model), expected)
    applied.remove()
    applied.remove()
    assert all("forward" not in vars(block) for block in model)


def test_the_state_dict_stays_as_it_is():
    model = Model()
    names = list(model.state_dict())
    with ActivationManager(IntervalStrategy(2)).apply(model, ["embed", "layers.?"]) as applied:
        assert list(model.state_dict()) == names
        assert applied.blocks[0] == "embed"


def test_replaced_forward_is_restored():
    model = Model()
    block = model.layers[0]
    original = block.forward
    block.forward = lambda x, **kwargs: original(x, **kwargs) * 2
    replacement = block.forward
    expected = step(model)
    with ActivationManager(IntervalStrategy(1)).apply(model, "layers.*"):
        assert same_bits(step(model), expected)
    assert block.forward is replacement


@pytest.mark.parametrize("step", ["start", "remove"])
def test_signals_leave_no_strategy(monkeypatch, step):
    strategies = importlib.import_module("mlstate.integrations.torch._activation.strategies")
    owner, name = (strategies, "Buffers") if step == "start" else (strategies._Forward, "restore")
    model, x, manager = Model(), torch.ones(2, 16), ActivationManager(IntervalStrategy(2))
    expected = model(x)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        signal_once(patch, owner, name)
        manager.apply(model, "layers.*").remove()
    assert all("forward" not in vars(layer) for layer in model.layers)
    with manager.apply(model, "layers.*"):
        assert torch.equal(model(x), expected)
        assert manager.dropped_bytes > 0


def test_a_strategy_that_another_thread_or_handler_applies_is_refused(monkeypatch):
    strategies = importlib.import_module("mlstate.integrations.torch._activation.strategies")
    buffers, refused = strategies.Buffers, []
    model, manager = Model(), ActivationManager(IntervalStrategy(1))

    def apply_another(block):
        if block is model.layers[3]:
            with pytest.raises(ValueError, match="already has a manager"):
                manager.apply(model, "layers.*")
            refused.append(block)
        return buffers(block)

    monkeypatch.setattr(strategies, "Buffers", apply_another)
    with manager.apply(model, "layers.*"):
        assert refused
        assert all("forward" in vars(layer) for layer in model.layers)
    assert all("forward" not in vars(layer) for layer in model.layers)


def test_a_strategy_that_raises_stops_the_pass():
    class Bad:
        def should_checkpoint(self, layer_id, activation, layer_index):
            raise RuntimeError(f"at {layer_id}")

        def reset(self):
            pass

    model = Model()
    with (
        ActivationManager(Bad()).apply(model, "layers.*"),
        pytest.raises(RuntimeError, match=r"at layers\.0"),
    ):
        step(model)
    step(model)


def test_wrong_blocks_are_named():
    manager, model = ActivationManager(IntervalStrategy(2)), Model()
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got list"):
        manager.apply([model])
    for blocks, text in [
        ("layer.*", "no module is called 'layer.*'"),
        (["layers.0", "layers.9"], "no module is called 'layers.9'"),
        (["layers.0", "layers.0.linear"], "blocks overlap: layers.0.linear is inside layers.0"),
        ("layers", "block 'layers' is a ModuleList, which has no forward"),
        (None, "block 'layers' is a ModuleList"),
        ([], "Model has no blocks below it"),
    ]:
        with pytest.raises(ValueError, match=text.replace("*", r"\*")):
            manager.apply(model, blocks)
    with pytest.raises(TypeError, match="blocks must be names, got int"):
        manager.apply(model, [3])
    with pytest.raises(ValueError, match="Linear has no blocks below it"):
        manager.apply(nn.Linear(1, 1))
    with (
        manager.apply(model, "layers.1"),
        pytest.raises(ValueError, match=r"'layers\.1' already has a"),
    ):
        manager.apply(model, "layers.*")
    assert all("forward" not in vars(block) for block in model.modules())


def test_copies_of_a_model_with_a_strategy_are_independent():
    model, x = Model(2), torch.ones(3, 16)
    manager = ActivationManager(IntervalStrategy(1))
    with manager.apply(model, "layers.*"):
        model(x).sum().backward()
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        for parameter in copied.parameters():
            parameter.data.mul_(2)
        plain = Model(2)
        plain.load_state_dict(copied.state_dict())
        for module in (model, copied, plain):
            module.zero_grad()
        decisions = manager.decisions
        for module in (copied, plain):
            module(x).square().sum().backward()
    assert manager.decisions == decisions
    assert [layer.runs for layer in copied.layers] == [4, 4]  # recomputed, as the original
    assert all(parameter.grad is None for parameter in model.parameters())
    for left, right in zip(copied.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)
