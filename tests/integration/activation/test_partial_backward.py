"""Losses that depend on some blocks only: the gradients are those without a plan, or an error."""

import random

import pytest

torch = pytest.importorskip("torch", reason="its models have the blocks here")

from planned_models import assert_same_bits, chain_of, random_steps, segments  # noqa: E402
from torch import nn  # noqa: E402

from mlstate import MLStateError  # noqa: E402
from mlstate.activation import Plan  # noqa: E402

pytestmark = pytest.mark.torch

BLOCKS = 5


class Block(nn.Module):
    """Linear, dropout and BatchNorm, with one of several kinds of result."""

    def __init__(self, kind="plain", width=6):
        super().__init__()
        self.kind = kind
        self.inner = nn.Sequential(
            nn.Linear(width, width), nn.Dropout(0.2), nn.BatchNorm1d(width), nn.Tanh()
        )

    def forward(self, x, *_):
        if self.kind == "returns its input" or (self.kind == "drops" and torch.rand(()) < 0.5):
            return x
        out = self.inner(x.detach() if self.kind == "detaches" else x)
        if self.kind == "stores an auxiliary loss":
            self.loss = out.square().mean()
        if self.kind == "returns an auxiliary loss":
            return out, out.abs().sum(), None, {"width": 6}
        return out


class Net(nn.Module):
    """A chain that returns the result of every block, up to the block `stop`."""

    def __init__(self, *kinds):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(map(Block, (*kinds, *["plain"] * BLOCKS)[:BLOCKS]))

    def forward(self, x, stop=BLOCKS):
        outs = []
        for layer in self.layers[:stop]:
            x = layer(*x) if isinstance(x, tuple) else layer(x)
            outs.append(x)
        return outs


def schedules(turn, blocks=BLOCKS):
    """Schedules that recompute, offload and drop in many ways: in four turns, 12 random ones."""
    yield from (segments(blocks, size) for size in range(1, blocks))
    for seed in range(turn % 4, 12, 4):
        yield random_steps(blocks, random.Random(seed), host=seed % 3 == 2)


def train(net, step):
    """Run a step twice; return gradients, buffers and the next random number."""
    torch.manual_seed(3)
    grads = []
    for _ in range(2):
        x = torch.ones(4, 6).add_(torch.randn(4, 6)).requires_grad_()
        step(net, x)
        grads.append(x.grad)
    return [*grads, *(p.grad for p in net.parameters()), *net.buffers(), torch.rand(2)]


def plan_of(steps):
    return Plan(chain_of(BLOCKS, host=any(kind == "offload" for kind, _ in steps)), steps)


def loss_of(outs, *blocks):
    firsts = [out[0] if isinstance(out, tuple) else out for out in outs]
    return sum((firsts[i] * (i + 1)).square().mean() for i in blocks)


def auxiliary(net, x):
    outs = net(x)
    aux = [out[1] for out in outs if isinstance(out, tuple)]
    (sum(aux) + sum(layer.loss for layer in net.layers if hasattr(layer, "loss"))).backward()


def two_forwards(net, x):
    first, second = net(x), net(2 * x)
    (loss_of(first, 1) + loss_of(second, 2, 0)).backward()


def validation_between(net, x):
    loss = loss_of(net(x), 2)
    with torch.no_grad():
        net(x)
    with torch.inference_mode():
        net(x)
    net(x)  # never used
    loss.backward()


def some_gradients(net, x):
    outs = net(x)
    x.grad, *others = torch.autograd.grad(loss_of(outs, 1, 3), [x, *net.layers[1].parameters()])
    for parameter, gradient in zip(net.layers[1].parameters(), others, strict=True):
        parameter.grad = gradient


def after_an_error(net, x):
    with pytest.raises(RuntimeError):
        loss_of([*net(x), net.layers[0](x[:, :2])], 1).backward()
    loss_of(net(x), 3).backward()


STEPS = {
    "the first block": lambda net, x: loss_of(net(x), 0).backward(),
    "a middle block": lambda net, x: loss_of(net(x), 2).backward(),
    "two middle blocks": lambda net, x: loss_of(net(x), 1, 3).backward(),
    "a middle block and the last": lambda net, x: loss_of(net(x), 1, 1, BLOCKS - 1).backward(),
    "all blocks": lambda net, x: loss_of(net(x), *range(BLOCKS)).backward(),
    "a forward pass that stops early": lambda net, x: loss_of(net(x, 3), 2, 0).backward(),
    "one that stops after its first block": lambda net, x: loss_of(net(x, 1), 0).backward(),
    "two forward passes": two_forwards,
    "a validation between": validation_between,
    "some gradients": some_gradients,
    "a pass after one that failed": after_an_error,
}
KINDS = {
    "plain": (),
    "auxiliary results": ("plain", "returns an auxiliary loss", "returns an auxiliary loss"),
    "a block that detaches": ("plain", "plain", "plain", "detaches"),
    "blocks that are left out": ("drops", "plain", "returns its input", "drops", "drops"),
}


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("step", STEPS)
def test_partial_loss_has_the_same_bits(step, kinds):
    expected = train(Net(*KINDS[kinds]), STEPS[step])
    turn = list(KINDS).index(kinds) + list(STEPS).index(step)  # each of both meets all schedules
    for steps in schedules(turn):
        net = Net(*KINDS[kinds])
        with plan_of(steps).apply(net, blocks="layers.*"):
            assert_same_bits(expected, train(net, STEPS[step]))


@pytest.mark.parametrize("kind", ["stores an auxiliary loss", "returns an auxiliary loss"])
def test_auxiliary_losses_have_the_same_bits(kind):
    expected = train(Net("plain", kind, "plain", kind), auxiliary)
    for size in range(1, BLOCKS):
        net = Net("plain", kind, "plain", kind)
        with plan_of(segments(BLOCKS, size)).apply(net, blocks="layers.*"):
            assert_same_bits(expected, train(net, auxiliary))


def test_steps_of_blocks_that_the_loss_does_not_depend_on_are_left_out():
    net, seen = Net(), []
    with plan_of(segments(BLOCKS, 1)).apply(
        net, blocks="layers.*", observe=lambda *step: seen.append(step)
    ):
        outs = net(torch.ones(4, 6))
        del seen[:]
        loss_of(outs, 1).backward()
    assert ("save", 1) in seen
    assert seen[-2:] == [("save", 0), ("backward", 0)]
    assert max(block for _, block in seen) == 1


def twice(net, x):
    outs = net(x)
    loss_of(outs, 1).backward(retain_graph=True)
    loss_of(outs, 3).backward()


def on_after_a_backward_pass(net, x):
    for layer in net.layers:
        x = layer(x)
        x.sum().backward(retain_graph=True)


def detached(net, x):
    for layer in net.layers:
        x = layer(x.detach())
    x.sum().backward()


def left_out_by_the_model(net, x):
    for i in (0, 1, 3, 4):
        x = net.layers[i](x)
    x.sum().backward()


def changed_in_place(net, x):
    outs = net(x)
    loss = loss_of(outs, 2)
    outs[0].detach().mul_(2)
    loss.backward()


@pytest.mark.parametrize(
    ("step", "error", "match"),
    [
        (twice, MLStateError, "second forward pass"),
        (on_after_a_backward_pass, ValueError, "layers.1 was called after a backward pass"),
        (detached, ValueError, "the input of layers.1 is not the output of layers.0"),
        (left_out_by_the_model, ValueError, "layers.3 was called, expected layers.2"),
        (changed_in_place, MLStateError, "changed in place"),
    ],
)
def test_a_use_that_the_plan_cannot_follow_names_the_block(step, error, match):
    net = Net()
    with (
        plan_of(segments(BLOCKS, 1)).apply(net, blocks="layers.*"),
        pytest.raises(error, match=match),
    ):
        step(net, torch.ones(4, 6))
    loss_of(net(torch.ones(4, 6)), 2).backward()
