"""The peak of a plan covers a whole step: embedding, blocks, head and loss."""

import pytest

torch = pytest.importorskip("torch", reason="its models are what is measured here")

from planned_models import Cached, Language, perceptron, transformer  # noqa: E402
from torch import nn  # noqa: E402

from mlstate.activation import Chain, Plan, plan  # noqa: E402
from mlstate.errors import CapacityError  # noqa: E402
from mlstate.integrations.torch import measure_peak, measure_plan  # noqa: E402

pytestmark = pytest.mark.torch

IDS = torch.arange(256).reshape(4, 64) % 50


def cross_entropy(logits):
    return nn.functional.cross_entropy(logits.flatten(0, -2), IDS.flatten())


class Untied(Language):
    """Its head does not share the weights of the embedding."""

    def __init__(self, tokens):
        super().__init__(2, 32, tokens)
        self.head = nn.Linear(32, tokens)


class WithLoss(Language):
    def forward(self, ids):
        return {"loss": cross_entropy(super().forward(ids)), "layers": len(self.layers)}


def peak_of(step):
    step()  # allocates the gradients
    return measure_peak(step).peak_bytes


def plans_of(chain):
    return [
        Plan.from_recomputed(chain, []),
        Plan.from_recomputed(chain, range(chain.blocks)),
        plan(chain, 0.6),
        plan(chain, chain.least_budget_bytes),
    ]


@pytest.mark.parametrize("tokens", [50, 1000])
@pytest.mark.parametrize("kind", [Untied, lambda tokens: Language(2, 32, tokens)])
def test_the_promise_covers_embedding_head_and_loss(kind, tokens):
    """With tied weights, one part of their gradient waits for the other."""
    model = kind(tokens)
    chain = Chain.from_torch(model, IDS, loss=cross_entropy, repeats=1)
    assert chain.blocks == 2 and chain.head_bytes > 2 * 256 * tokens * 4 and not chain.note
    assert chain.plain_seconds > sum(chain.forward_seconds) + sum(chain.backward_seconds)
    for schedule in plans_of(chain):
        with schedule.apply(model):
            peak = peak_of(lambda: cross_entropy(model(IDS)).backward())
        close = pytest.approx(schedule.predicted_peak_bytes, rel=0.03)
        assert peak == close or schedule.predicted_peak_bytes - peak < 32 * tokens * 4, schedule


def test_steps_of_a_plan_have_the_head_in_the_last_forward_step():
    model = Untied(1000)
    chain = Chain.from_torch(model, IDS, loss=cross_entropy, repeats=1)
    schedule = Plan.from_recomputed(chain, [0])
    assert {block for _, block in schedule.steps()} == {0, 1}
    simulated = schedule.simulate()
    assert len(simulated.peak_bytes) == len(schedule.steps())
    assert simulated.peak_bytes.max() == simulated.peak_bytes[1] == schedule.predicted_peak_bytes
    assert simulated.seconds.sum() == pytest.approx(schedule.predicted_seconds)
    use = measure_plan(schedule, model, IDS, loss=cross_entropy)
    assert use.measured_bytes == pytest.approx(use.expected_bytes, rel=0.03)
    assert use.expected_bytes == pytest.approx(use.predicted_bytes, rel=0.03)


def test_losses_are_returned_passed_or_assumed():
    """The memory of a cross-entropy is assumed for a model that returns no loss."""
    returned = Chain.from_torch(WithLoss(2), IDS, repeats=1)
    model = Language(2)
    passed = Chain.from_torch(model, IDS, loss=cross_entropy, repeats=1)
    assumed = Chain.from_torch(model, IDS, repeats=1)
    assert returned.head_bytes == passed.head_bytes
    assert assumed.head_bytes == pytest.approx(passed.head_bytes, rel=0.05)
    assert (returned.note, passed.note) == ("", "")
    assert "returned no loss" in assumed.note and "loss=" in assumed.note
    assert assumed.note in plan(assumed, 1.0).report() and assumed.note in str(assumed)


def test_frozen_blocks_and_wrong_losses():
    model = Language(2).requires_grad_(False)
    assert Chain.from_torch(model, IDS, repeats=1).blocks == 2  # nothing to train
    model.head = nn.Linear(32, 50)  # alone requires gradients
    assert Chain.from_torch(model, IDS, loss=cross_entropy, repeats=1).head_bytes > 0
    with pytest.raises(TypeError, match="loss must return a scalar tensor"):
        Chain.from_torch(model, IDS, loss=lambda logits: logits, repeats=1)


def test_models_that_are_only_their_blocks_end_with_them():
    model, x = perceptron(2)
    chain = Chain.from_torch(model, x, repeats=1)
    assert (chain.outside_bytes, chain.head_bytes, chain.outside_seconds) == (0, 0, 0)
    assert "the loss is not covered" in chain.note
    with_loss = Chain.from_torch(model, x, loss=lambda y: y.square().mean(), repeats=1)
    assert with_loss.head_bytes > 0 and not with_loss.note


def test_autocast_and_caches_are_outside_of_the_blocks():
    model, x = transformer(2)
    with torch.autocast("cpu", torch.bfloat16):
        chain = Chain.from_torch(model, x, repeats=1, loss=lambda y: y.float().square().mean())
    assert chain.outside_bytes >= sum(p.numel() * 2 for p in model.parameters() if p.dim() == 2)
    cached = Chain.from_torch(Cached(3), torch.randn(2, 5, 8), repeats=1)
    assert cached.outside_bytes >= 3 * 2 * 5 * 8 * 4  # the keys of every block


def test_budgets_below_the_head_are_refused_with_its_size():
    chain = Chain.from_torch(Untied(1000), IDS, loss=cross_entropy, repeats=1)
    with pytest.raises(CapacityError, match=r"of 2 blocks fits .* outside of the blocks .* chunks"):
        plan(chain, chain.head_bytes)
    with pytest.raises(CapacityError, match=r"0\.001 of the blocks' memory without a plan"):
        plan(chain, 0.001)
    half = plan(chain, "50%")
    fixed = chain.outside_bytes + chain.head_bytes
    assert half.budget_bytes == fixed + (chain.plain_peak_bytes - fixed) // 2
    assert Plan.from_json(half.to_json()) == half
    assert Chain.from_json(chain.to_json()) == chain
