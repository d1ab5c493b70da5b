"""Leak cases of plans on torch models: measured, checked, run."""

import pytest
from leak_cases import case, each, raises

from mlstate import activation

STEPS = [("forward", 0), ("save", 1), ("backward", 1), ("drop", 1), ("save", 0), ("backward", 0)]


def model_and_sample():
    torch = pytest.importorskip("torch", reason="plans models of torch")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    return model, torch.ones(3, 4)


@case("Plan.apply", calls=60)
def planned(_):
    model, x = model_and_sample()
    schedule = activation.Plan(activation.Chain([1, 1], [1, 1], [1, 1, 1], [2, 2]), STEPS)

    def use():
        with schedule.apply(model) as run:
            run(x).sum().backward()
            loss = run(x).sum()
            loss.backward(retain_graph=True)
            raises(activation_error(), loss.backward)()
            run(x)  # the backward pass is omitted
        model.zero_grad()

    return use, [model, x, schedule]


def activation_error():
    from mlstate.errors import MLStateError

    return MLStateError


@case("Chain.from_torch", calls=12)
def measured(_):
    model, x = model_and_sample()
    return each(
        lambda: activation.Chain.from_torch(model, x, repeats=1),
        raises(TypeError, activation.Chain.from_torch, model, "no tensor"),
    ), [model, x]


@case("check", "Finding", "RecomputeReport", calls=40)
def checked(_):
    model, x = model_and_sample()
    finding = activation.records.Finding("0", "weight", "values", "differs")

    def use():
        assert activation.check(model, None, x)
        report = activation.records.RecomputeReport([finding], ["0"])
        assert not report
        return str(report), repr(report), report._repr_html_()

    return use, [model, x, finding]
