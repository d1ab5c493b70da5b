"""Selective checkpointing of a transformer: same bits, less memory, less recomputation."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from mlstate.integrations.torch import (  # noqa: E402
    measure_peak,
    operator_contexts,
    profile_operators,
)

pytestmark = pytest.mark.torch


class Block(torch.nn.Module):
    """A transformer block with explicit attention, and with dropout."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width),
            torch.nn.GELU(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(4 * width, width),
            torch.nn.Dropout(dropout),
        )
        self.heads = heads

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class Model(torch.nn.Module):
    def __init__(self, dropout=0.1, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block(64, 4, dropout) for _ in range(blocks))

    def forward(self, x, context_fn=None, keep_all=False):
        for block in self.blocks:
            if keep_all:
                x = block(x)
            elif context_fn is None:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
        return x


@pytest.fixture(scope="module")
def model():
    return Model()


@pytest.fixture(scope="module")
def sample():
    return torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.fixture(scope="module")
def profile(model, sample):
    return profile_operators(model.blocks[0], sample, repeats=3)


def step(model, sample, **options):
    """One forward and backward run; its result and all gradients."""
    model.zero_grad()
    sample.grad = None
    torch.manual_seed(7)
    out = model(sample, **options)
    out.square().sum().backward()
    return [out.detach(), sample.grad, *(p.grad for p in model.parameters())]


def peak(model, sample, **options):
    step(model, sample, **options)  # so that one-time allocations are not measured
    return measure_peak(lambda: step(model, sample, **options)).peak_bytes


@pytest.mark.parametrize("by", ["call", "operator"])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0])
def test_gradients_have_the_same_bits(model, sample, profile, by, share):
    expected = step(model, sample, keep_all=True)
    keepable_bytes = int(profile.bytes[profile.can_keep].sum())
    chosen = profile.select(int(share * keepable_bytes), by=by)
    assert chosen.bytes <= share * keepable_bytes and chosen.exact
    got = step(model, sample, context_fn=chosen.contexts)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_memory_decreases_with_the_budget(model, sample, profile):
    keepable_bytes = int(profile.bytes[profile.can_keep].sum())
    peaks = [
        peak(model, sample, context_fn=profile.select(int(share * keepable_bytes)).contexts)
        for share in (0.0, 0.2, 0.5, 1.0)
    ]
    assert peaks == sorted(peaks)
    keeping_all, keeping_none = peak(model, sample, keep_all=True), peak(model, sample)
    assert peaks[0] < 0.6 * keeping_all  # nothing is kept: the rest is the memory of one block
    assert keeping_none <= peaks[0] * 1.01
    assert peaks[1] < peaks[2] < keeping_all


def test_kept_bytes_match_the_selection(model, sample, profile):
    """Each block keeps the selected bytes, in addition to the input that is always kept."""
    chosen = profile.select(int(profile.bytes[profile.can_keep].sum()) // 3)
    none = profile.select(0)

    def left_bytes(context_fn):
        return measure_peak(lambda: model(sample, context_fn=context_fn)).left_bytes

    left_bytes(none.contexts)
    extra = left_bytes(chosen.contexts) - left_bytes(none.contexts)
    assert extra == pytest.approx(len(model.blocks) * chosen.bytes, rel=0.02)


def test_operators_that_are_kept_do_not_run_again(model, sample, profile):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls[str(func)] = self.calls.get(str(func), 0) + 1
            return func(*args, **(kwargs or {}))

    def softmaxes(context_fn):
        out = model(sample, context_fn=context_fn)
        with Count() as count:
            out.sum().backward()
        return count.calls.get("aten._softmax.default", 0)

    assert softmaxes(lambda: operator_contexts([])) == len(model.blocks)
    assert softmaxes(lambda: operator_contexts(["aten._softmax.default"])) == 0
    assert softmaxes(lambda: operator_contexts(["aten._softmax.default 0"])) == 0
    assert softmaxes(lambda: operator_contexts(["aten._softmax.default 1"])) == len(model.blocks)


def test_random_operators_and_views_are_never_kept(profile):
    can_keep = dict(zip(profile.names, profile.can_keep.tolist(), strict=True))
    operators = {name.rpartition(" ")[0] for name in can_keep}
    assert {"aten.native_dropout.default"} & operators or {"aten.bernoulli_.float"} & operators
    for name, can in can_keep.items():
        if any(part in name for part in ("dropout", "bernoulli", "view", "permute", "transpose")):
            assert not can, name
        if any(part in name for part in ("addmm", "bmm", "_softmax", "gelu", "layer_norm")):
            assert can, name
    assert np.all(profile.seconds >= 0) and profile.seconds.sum() > 0


def test_profiling_keeps_the_random_state(model, sample):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    profile_operators(model.blocks[0], sample, repeats=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_operator_bytes_count_new_memory():
    def function(x):
        y, z = x * 2, x * 3
        return y.view(-1).add_(z), torch.cat([x, x])

    profile = profile_operators(function, torch.ones(8, requires_grad=True), repeats=1)
    operators = dict(zip(profile.names, zip(profile.bytes.tolist(), profile.can_keep.tolist(),
                                        strict=True), strict=True))  # fmt: skip
    assert operators["aten.mul.Tensor 0"] == (32, False)  # changed later, through a view
    assert operators["aten.mul.Tensor 1"] == (32, True)
    assert operators["aten.view.default 0"] == (0, False)
    assert operators["aten.add_.Tensor 0"] == (0, False)
    assert operators["aten.cat.default 0"] == (64, True)


def test_a_profile_shows_itself_by_operator(profile):
    assert "aten.addmm.default" in profile.report()
    assert "calls of operators" in repr(profile)
    assert "<table>" in profile._repr_html_()


def test_invalid_arguments_are_refused(profile):
    with pytest.raises(ValueError, match="repeats is 0"):
        profile_operators(torch.nn.ReLU(), torch.ones(2), repeats=0)
    with pytest.raises(ValueError, match="by is 'layer'"):
        profile.select(10, by="layer")
    with pytest.raises(ValueError, match="a budget of -1 bytes is negative"):
        profile.select(-1)

    runs = iter([torch.relu, torch.sigmoid])

    def moody(x):
        return next(runs)(x)

    with pytest.raises(ValueError, match="different operators in different runs"):
        profile_operators(moody, torch.ones(2), repeats=1)


def test_profiles_and_contexts_warn_that_they_are_deprecated():
    with pytest.warns(DeprecationWarning, match="use Chain.from_torch with smaller blocks"):
        profile_operators(torch.nn.ReLU(), torch.ones(2), repeats=1)
    with pytest.warns(DeprecationWarning, match="use torch's create_selective_checkpoint"):
        operator_contexts([])
