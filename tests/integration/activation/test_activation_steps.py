"""Plans step by step: torch's memory is as predicted, and the report names differences."""

import random

import pytest

torch = pytest.importorskip("torch", reason="its models are what is measured here")

from planned_models import Cache, Cached, perceptron, pyramid, random_steps, segments, transformer  # noqa: E402
from torch import nn  # noqa: E402

from mlstate.activation import Chain, Plan, plan  # noqa: E402
from mlstate.integrations.torch import measure_plan  # noqa: E402
from mlstate.integrations.torch.records import PlanUse, StepUse  # noqa: E402

pytestmark = pytest.mark.torch


def attention():
    model, _ = transformer(6, width=64)
    return model, torch.randn(4, 32, 64)


def convolutions():
    model, _ = pyramid(stages=3, each=2)
    return model, torch.randn(4, 3, 48, 48)


MODELS = {
    "attention": attention,
    "convolutions": convolutions,
    "small perceptron": lambda: perceptron(6, width=64, batch=128),
    "perceptron": lambda: perceptron(8, width=128, batch=512),
}


@pytest.fixture(scope="module", params=MODELS)
def measured(request):
    model, x = MODELS[request.param]()
    return model, x, Chain.from_torch(model, x, repeats=1)


def judge(use):
    """Check each step and both peaks; if the plan itself is off, the report names the reason."""
    for step in use.steps:
        if step.kind in ("forward", "save", "backward"):
            close = pytest.approx(step.expected_bytes, rel=0.05)
            assert step.measured_bytes == close, f"{step}\n{use.report()}"
    assert use.measured_bytes == pytest.approx(use.expected_bytes, rel=0.02), use.report()
    if use.measured_bytes != pytest.approx(use.predicted_bytes, rel=0.02):
        peak = max(use.steps, key=lambda step: step.predicted_bytes)
        assert peak.why and peak.why in use.report()


def test_odd_plans(measured):
    model, x, chain = measured
    rng = random.Random(3)
    for _ in range(5):
        judge(measure_plan(Plan(chain, random_steps(chain.blocks, rng)), model, x))


def test_plans_that_were_searched_for(measured):
    model, x, chain = measured
    for share in (0.1, 0.6):
        least, most = chain.least_budget_bytes, chain.plain_peak_bytes
        for schedules in ("persistent", "any"):
            schedule = plan(chain, int(least + share * (most - least)), schedules=schedules)
            use = measure_plan(schedule, model, x)
            judge(use)
            assert use.measured_bytes <= 1.01 * schedule.budget_bytes
    judge(measure_plan(Plan(chain, segments(chain.blocks, 2)), model, x))


def test_recomputed_blocks_hold_the_input_that_was_dropped_once():
    """An input dropped while its block is saved, and recomputed before its backward."""
    model, x = perceptron(3, width=64, batch=128)
    steps = [("forward", 0), ("forward", 1), ("save", 2), ("backward", 2), ("drop", 2)]
    steps += [("save", 1), ("drop", 1), ("forward", 0), ("backward", 1), ("drop", 1)]
    steps += [("save", 0), ("backward", 0)]
    chain = Chain.from_torch(model, x, repeats=1)
    use = measure_plan(Plan(chain, steps), model, x)
    again = next(step for step in use.steps[6:] if step.kind == "forward")
    assert again.measured_bytes <= 1.01 * again.predicted_bytes, use.report()


class Shift(nn.Module):
    def forward(self, x):
        return x + 1


def test_reasons():
    model = nn.Sequential(*(nn.Sequential(nn.Tanh(), Shift()) for _ in range(3)))
    x = torch.randn(64, 32, requires_grad=True)
    chain = Chain.from_torch(model, x, repeats=1)
    steps = [("forward", 0), ("forward", 1), ("save", 2), ("backward", 2), ("drop", 2)]
    steps += [("save", 1), ("backward", 1)]
    steps += [("drop", 1), ("save", 0), ("backward", 0)]
    use = measure_plan(Plan(chain, steps), model, x)
    assert [(step.kind, step.block) for step in use.steps] == steps
    assert use.steps[5].why == "ends after the operator that saved its last tensor", use.report()
    assert use.steps[5].measured_bytes < use.steps[5].predicted_bytes
    assert "the largest measured one: " in use.report()
    assert repr(use).startswith("<PlanUse: ")


def test_measure_plan_keeps_state_and_accepts_block_lists():
    model, x = perceptron(3)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    before = [buffer.clone() for buffer in model.buffers()]
    schedule = Plan(Chain.from_torch(model, x, repeats=1), segments(3, 1))
    use = measure_plan(schedule, list(model), x)
    assert use.predicted_bytes == schedule.predicted_peak_bytes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.buffers(), before))
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ValueError, match="the plan is for 3 blocks"):
        measure_plan(schedule, list(model)[:2], x)


def test_blocks_that_share_a_cache():
    model, x = Cached(3), torch.randn(2, 5, 8)
    sample = {"x": x, "cache": Cache()}
    schedule = Plan(Chain.from_torch(model, sample, repeats=1), segments(3, 1))
    assert measure_plan(schedule, model, sample).measured_bytes > 0
    assert sample["cache"].layers == []


def test_a_report_of_given_steps():
    use = PlanUse([StepUse("forward", 0, 9, 9, 8, ""), StepUse("save", 1, 7, 7, 12, "more")])
    assert (use.predicted_bytes, use.expected_bytes, use.measured_bytes) == (9, 9, 12)
    lines = use.report().splitlines()
    assert lines[1:3] == [
        "the largest predicted one: forward 0",
        "the largest measured one: save 1",
    ]
    assert lines[-1].split() == ["save", "1", "7", "B", "7", "B", "12", "B", "more"]
