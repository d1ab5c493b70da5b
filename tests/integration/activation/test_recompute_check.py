"""The check finds and names the operators and modules that prevent exact recomputation."""

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="its models are what is checked here")

from planned_models import (  # noqa: E402
    Cache,
    Cached,
    Language,
    chain_of,
    perceptron,
    pyramid,
    segments,
    transformer,
)
from torch import nn  # noqa: E402

from mlstate.activation import Plan, check  # noqa: E402
from mlstate.activation.records import RecomputeReport  # noqa: E402

pytestmark = pytest.mark.torch


def plan_of(blocks, size=1):
    return Plan(chain_of(blocks), segments(blocks, size))


def found_in(block, *, x=None, blocks=3):
    """Check a chain with `block` in the middle; return the findings for that block."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 8))
    report = check(model, plan_of(3), torch.randn(16, 8) if x is None else x)
    assert not report
    assert report.checked == ["0", "1"]
    assert {finding.block for finding in report.findings} <= {"1", "model"}
    text = str(report)
    for finding in report.findings:
        assert finding.kind in text
        assert finding.block in report._repr_html_()
    return [finding for finding in report.findings if finding.block == "1"]


@pytest.mark.parametrize("make", [transformer, pyramid, perceptron])
def test_models_that_can_be_recomputed(make):
    model, x = make()
    blocks = len(model)
    state = torch.get_rng_state()
    buffers = [buffer.clone() for buffer in model.buffers()]
    report = check(model, plan_of(blocks), x.requires_grad_())
    assert report, str(report)
    assert len(report.checked) == blocks - 1
    assert "all gave the same bits" in str(report)
    assert check(model, None, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, buffers, model.buffers()))
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_blocks_of_a_model_by_pattern():
    report = check(Language(), plan_of(4, 2), torch.randint(0, 50, (2, 12)), blocks="layers.*")
    assert report.checked == ["layers.0", "layers.1"]
    assert report
    assert isinstance(report, RecomputeReport)


def test_blocks_that_share_a_cache():
    x = torch.randn(2, 5, 8)
    report = check(Cached(3), plan_of(3), {"x": x, "cache": Cache()})
    assert report, str(report)
    assert check(Cached(3), None, x)


def test_plan_without_recomputation_checks_no_block():
    model, x = perceptron()
    assert check(model, plan_of(5, 100), x).checked == []


class Outside(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.inner = nn.Tanh()
        self.draw = draw

    def forward(self, x):
        return self.inner(x * self.draw())


@pytest.mark.parametrize(
    ("draw", "source"),
    [(random.random, "random"), (lambda: float(np.random.rand()), "numpy.random")],
)
def test_numbers_from_elsewhere(draw, source):
    first, *others = found_in(Outside(draw))
    assert (first.kind, first.where) == ("random", source)
    assert any(f.kind == "values" and "aten.mul" in f.where for f in others)


class Clock(nn.Module):
    """Returns another value in each run, by an operator of the inner module."""

    def __init__(self):
        super().__init__()
        self.inner = Outside(self.count)
        self.runs = 0

    def count(self):
        self.runs += 1
        return float(self.runs)

    def forward(self, x):
        return self.inner(torch.tanh(x))


def test_a_result_that_differs_is_traced_to_its_operator():
    (finding,) = found_in(Clock())
    assert finding.kind == "values"
    assert finding.where == "inner: aten.mul.Tensor"
    assert "128 of 128 elements differ" in finding.text


class Sign(Clock):
    """Returns 0 or -0 in alternating runs."""

    def count(self):
        self.runs += 1
        return 0.0 if self.runs % 2 else -0.0


def test_elements_that_differ_only_in_the_sign_of_zero_are_counted():
    (finding,) = found_in(Sign())
    assert "128 of 128 elements differ, by up to 0" in finding.text


class InPlace(nn.Module):
    def forward(self, x):
        return torch.tanh(x.mul_(2))


def test_an_input_that_is_changed():
    first, *_ = found_in(InPlace())
    assert first.kind == "in place"
    assert first.where == "argument 0, float32 (16, 8)"


class ChangesSaved(nn.Module):
    def forward(self, x):
        y = x + 1
        out = y * y
        y.add_(1)
        return out


def test_a_saved_tensor_that_is_changed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), ChangesSaved(), nn.Linear(8, 8))
    report = check(model, None, torch.randn(16, 8))
    assert [f.kind for f in report.findings] == ["in place", "in place"]
    assert report.findings[0].where == "saved tensor 0, float32 (16, 8)"


class Caches(nn.Module):
    """Saves more tensors in its first run."""

    def __init__(self):
        super().__init__()
        self.kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = (x.detach() ** 2).sum()
            return torch.sigmoid(torch.tanh(x))
        return torch.sigmoid(x)


def test_another_number_of_saved_tensors():
    first, *_ = found_in(Caches())
    assert first.kind in ("saved", "values")
    assert "saved tensor" in first.where


class Router(nn.Module):
    """A mixture of two experts with a router that differs between runs."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        scores = self.router(x)
        chosen = (scores * (-1) ** self.runs).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_routing_that_flips():
    (finding,) = found_in(Router())
    assert (finding.kind, finding.where) == ("routing", "aten.argmax.default")
    assert "chooses otherwise: 16 of 16 elements differ" in finding.text
    assert "the runs part at aten.mul.Tensor" in finding.text


class Noisy(nn.Module):
    """Routing differs for a few tokens only, because of noise that no generator restores."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Identity()
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        order = torch.arange(16, dtype=x.dtype)
        order[0] += 2 * (self.runs % 2)
        chosen = self.gate(order).topk(15).indices
        return torch.tanh(x[chosen])


def test_indices_that_differ_are_called_routing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Noisy())
    report = check(model, None, torch.randn(16, 8))
    (finding,) = report.findings
    assert (finding.block, finding.kind) == ("1", "routing")
    assert finding.where == "aten.topk.default"


class Grows(nn.Module):
    runs = 0

    def forward(self, x):
        self.runs += 1
        return x[: -self.runs].exp().sum() + x


def test_other_shapes():
    first, *_ = found_in(Grows())
    assert (first.kind, first.where) == ("saved", "aten.slice.Tensor")
    assert "saved tensor 0, float32 (15, 8): float32 (15, 8) first, float32 (14, 8)" in first.text


class Derives(nn.Module):
    def forward(self, x):
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(y).sum(), y)
        return x * slope


def test_gradients_inside_a_block():
    first, *_ = found_in(Derives())
    assert first.kind == "error"
    assert "gradients inside its own forward" in first.text


def test_nondeterministic_model_is_reported_without_a_plan():
    model = nn.Sequential(nn.Linear(8, 8), Clock(), nn.Linear(8, 8))
    report = check(model, plan_of(3), torch.randn(4, 8))
    last = report.findings[-1]
    assert (last.block, last.kind) == ("model", "gradients")
    assert "two plain runs differ" in last.text


def test_arguments():
    model, x = perceptron()
    with pytest.raises(ValueError, match="for 3 blocks, found 5"):
        check(model, plan_of(3), x)
    with pytest.raises(TypeError, match="no tensor"):
        check(model, plan_of(5), 3)
