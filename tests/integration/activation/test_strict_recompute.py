"""Recomputation is stricter than torch's: the last operator ends, and attributes are restored."""

import pytest

torch = pytest.importorskip("torch", reason="its models are what is recomputed here")

from planned_models import assert_same_bits, chain_of, results  # noqa: E402
from torch import nn  # noqa: E402

from mlstate.activation import ActivationManager, Chain, IntervalStrategy, Plan, check  # noqa: E402
from mlstate.errors import GradientWarning  # noqa: E402
from mlstate.integrations.torch import measure_plan  # noqa: E402

pytestmark = pytest.mark.torch


class SavesItsResult(torch.autograd.Function):
    """Saves a tensor that it fills afterwards, as RReLU does in C++."""

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        (output,) = ctx.saved_tensors
        return gradient * output


class Function(nn.Module):
    def forward(self, x):
        return SavesItsResult.apply(x)


class OnDefaultDevice(nn.Sequential):
    """Its operators run under a mode of functions."""

    def forward(self, x):
        with torch.device("cpu"):
            return super().forward(x)


LAST = {
    "rrelu": lambda: nn.Sequential(nn.Linear(4, 4), nn.RReLU()),
    "rrelu and more": lambda: nn.Sequential(nn.Linear(4, 4), nn.RReLU(), nn.Flatten()),
    "own function": lambda: nn.Sequential(nn.Linear(4, 4), Function()),
    "under a mode": lambda: OnDefaultDevice(nn.Linear(4, 4), nn.RReLU(), nn.Flatten()),
    "linear": lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 4)),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
}


def model_of(make, blocks=2):
    torch.manual_seed(0)
    return nn.Sequential(*(make() for _ in range(blocks)))


@pytest.mark.parametrize("name", LAST)
def test_gradients_keep_their_bits_for_any_last_operator(name):
    model, x = model_of(LAST[name]), torch.randn(3, 4)
    without = results(model, [x])
    plan = Plan.from_recomputed(chain_of(2), [0, 1])
    with plan.apply(model):
        assert_same_bits(results(model, [x]), without)
        with torch.device("cpu"):  # a mode of functions around the backward pass
            assert_same_bits(results(model, [x]), without)
    assert not torch.overrides._len_torch_function_stack()
    with ActivationManager(IntervalStrategy(1)).apply(model):
        assert_same_bits(results(model, [x]), without)
    assert check(model, plan, x) and check(model, None, x)


def test_check_of_every_block_runs_a_plan():
    class OnlyFirst(nn.Module):
        """The third run of a step differs: a plan makes it, comparing runs of a block does not."""

        runs = 0

        def forward(self, x):
            self.runs += 1
            return torch.tanh(x) * (1 if self.runs < 6 else 2)

    report = check(nn.Sequential(nn.Linear(4, 4), OnlyFirst()), None, torch.randn(3, 4))
    assert {finding.kind for finding in report.findings} == {"gradients"}


def test_the_last_operator_is_not_followed_by_others():
    after = []

    class Counts(nn.Module):
        def forward(self, x):
            y = torch.tanh(x)
            z = y + 1  # saves nothing
            after.append(1)
            return z

    model, x = nn.Sequential(Counts(), Counts()), torch.randn(64, 32)
    chain = Chain.from_torch(model, x.requires_grad_(), repeats=1)
    use = measure_plan(Plan.from_recomputed(chain, [0, 1]), model, x)
    assert all(s.measured_bytes <= s.predicted_bytes for s in use.steps if s.kind == "save")
    with Plan.from_recomputed(chain, [0, 1]).apply(model):
        after.clear()
        model(x).sum().backward()
    assert len(after) == 2


class Router(nn.Module):
    """Counts its load in a plain attribute that the next choice depends on."""

    def __init__(self, *, in_place):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.load = torch.zeros(4)
        self.in_place = in_place

    def forward(self, x):
        y = self.linear(x) - self.load
        seen = y.detach().abs().sum(0)
        if self.in_place:
            self.load += seen
        else:
            self.load = self.load + seen
        return torch.tanh(y)


@pytest.mark.parametrize("in_place", [False, True])
def test_tensor_attributes_are_buffers(in_place):
    def run(apply):
        model = model_of(lambda: Router(in_place=in_place))
        with apply(model):
            return [*results(model, [torch.ones(3, 4)]), *(block.load for block in model)]

    plan = Plan.from_recomputed(chain_of(2), [0, 1])
    without = run(lambda _: torch.enable_grad())
    assert_same_bits(run(plan.apply), without)
    assert_same_bits(run(ActivationManager(IntervalStrategy(1)).apply), without)
    model = model_of(lambda: Router(in_place=in_place))
    Chain.from_torch(model, torch.ones(3, 4), repeats=1)
    assert check(model, None, torch.ones(3, 4))
    assert all(not block.load.any() for block in model)


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_tensors_in_other_attributes_that_change_warn(kind):
    class Loads(nn.Module):
        def __init__(self):
            super().__init__()
            zeros = torch.zeros(4)
            self.loads = [zeros] if kind == "list" else {"a": zeros}
            self.constants = (torch.ones(4),)

        def forward(self, x):
            key = 0 if kind == "list" else "a"
            y = torch.tanh(x + self.loads[key])
            self.loads[key] = self.loads[key] + y.detach().sum(0)
            return y

    model = nn.Sequential(nn.Linear(4, 4), Loads())
    with Plan.from_recomputed(chain_of(2), [0, 1]).apply(model):
        with pytest.warns(GradientWarning, match=r"Loads changes loads\[.*buffer"):
            model(torch.ones(3, 4))
        model(torch.ones(3, 4))  # once
