"""Plans on torch models: the same bits for any schedule, and errors for unsupported models."""

import copy
import gc
import importlib
import random
import weakref
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="its models are what is planned here")

from interruption import signal_once  # noqa: E402
from planned_models import (  # noqa: E402
    Cached,
    Language,
    TransformerBlock,
    assert_same_bits,
    chain_of,
    loss_of,
    perceptron,
    pyramid,
    random_steps,
    results,
    segments,
    transformer,
)
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from mlstate.activation import Plan  # noqa: E402
from mlstate.errors import MLStateError  # noqa: E402
from mlstate.integrations.torch import measure_peak  # noqa: E402

pytestmark = pytest.mark.torch

MODELS = {"transformer": transformer, "pyramid": pyramid, "perceptron": perceptron}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def planned(steps, *, host=False):
    blocks = sum(kind == "backward" for kind, _ in steps)
    return Plan(chain_of(blocks, host=host), steps)


def compare(make, steps, *, host=False, offload_to=None, blocks=None, call=None, passes=2):
    """Train a model with and without a plan; all bits must be equal. `call` runs the model."""

    def trained(model, *inputs):
        return results(model, inputs, partial(call, model) if call else None, passes)

    expected = trained(*make())
    model, *inputs = make()
    with planned(steps, host=host).apply(model, blocks=blocks, offload_to=offload_to):
        assert_same_bits(expected, trained(model, *inputs))


@pytest.mark.parametrize("size", [1, 2, 4, 100])
@pytest.mark.parametrize("name", MODELS)
def test_planned_run_has_the_same_bits(name, size):
    blocks = len(MODELS[name]()[0])
    compare(MODELS[name], segments(blocks, size))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(5))
def test_any_valid_schedule_runs(name, seed):
    blocks = len(MODELS[name]()[0])
    compare(MODELS[name], random_steps(blocks, random.Random(seed)))


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("seed", range(6))
def test_saved_tensors_go_to_the_host_and_come_back(seed, where, tmp_path):
    blocks = len(perceptron()[0])
    rng, steps = random.Random(seed), []
    while not any(kind == "load" for kind, _ in steps):
        steps = random_steps(blocks, rng, host=True, wander=0.5)
    folder = tmp_path if where == "file" else None
    compare(perceptron, steps, host=True, offload_to=folder)
    assert not list(tmp_path.iterdir())


def test_offloading_to_a_file_frees_memory(tmp_path):
    model, x = perceptron(4, width=64, batch=256)
    saves = [("save", i) for i in range(4)]
    away = [step for i in range(4) for step in (("save", i), ("offload", i))]
    back = [step for i in (3, 2, 1, 0) for step in (("drop", i + 1), ("load", i), ("backward", i))]
    steps = [*away, *back]
    peaks = {}
    for name, chosen in (
        ("kept", [*saves, *(("backward", i) for i in (3, 2, 1, 0))]),
        ("away", steps),
    ):
        with planned(chosen, host=True).apply(model, offload_to=tmp_path):
            loss_of(model(x)).backward()
            peaks[name] = measure_peak(lambda: loss_of(model(x)).backward()).peak_bytes
    assert peaks["away"] < 0.7 * peaks["kept"]


@pytest.mark.parametrize("size", [1, 2])
def test_autocast_is_restored_for_recomputation(size):
    def call(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    compare(transformer, segments(6, size), call=call)


def test_planned_model_finds_blocks_and_forwards_arguments():
    def make():
        torch.manual_seed(0)
        return Language(), torch.randint(0, 50, (2, 12))

    for blocks in (None, "layers.*"):
        for size in (1, 2):
            compare(make, segments(4, size), blocks=blocks)


@pytest.mark.parametrize("size", [1, 2])
def test_a_cache_is_for_each_run_as_it_was_for_the_first(size):
    def make():
        torch.manual_seed(0)
        return Cached(4), torch.randn(2, 5, 8)

    compare(make, segments(4, size))


def test_the_state_dict_and_the_class_stay():
    model, x = perceptron()
    names, kind = list(model.state_dict()), type(model)
    applied = planned(segments(5, 1)).apply(model)
    assert list(model.state_dict()) == names
    assert type(model) is kind
    clone = copy.deepcopy(model)  # a copy of the model runs without the plan
    seen = []
    applied.remove()
    applied.remove()
    with planned(segments(5, 1)).apply(model, observe=lambda *step: seen.append(step)):
        loss_of(clone(x)).backward()
        assert not seen
        loss_of(model(x)).backward()
    assert seen == segments(5, 1)
    loss_of(model(x)).backward()
    assert len(seen) == len(segments(5, 1))
    assert not model[0]._forward_pre_hooks


@pytest.mark.parametrize("steps", [["_intercept", "remove"], ["_intercept"], ["Block", "remove"]])
def test_signals_during_the_application_leave_no_plan(monkeypatch, steps):
    model, x = perceptron()
    model.eval()
    plans = importlib.import_module("mlstate.integrations.torch._activation.apply_plan")
    with monkeypatch.context() as patch:
        for step in steps:
            signal_once(patch, plans if step == "Block" else plans.Interceptor, step)
        with pytest.raises(KeyboardInterrupt):
            planned(segments(5, 1)).apply(model)
    assert not any("_compiled_call_impl" in block.__dict__ for block in model)
    assert not any(block._forward_pre_hooks for block in model)
    expected = model(x)
    with planned(segments(5, 1)).apply(model):
        assert torch.equal(model(x), expected)


def test_a_plan_that_another_thread_or_handler_applies_is_refused(monkeypatch):
    model, _ = perceptron()
    plans = importlib.import_module("mlstate.integrations.torch._activation.apply_plan")
    intercept = plans.Interceptor._intercept

    def intercept_after_another_apply(interceptor, name, *arguments):
        if name == "3":
            with monkeypatch.context() as patch, pytest.raises(ValueError, match="already has a"):
                patch.setattr(plans.Interceptor, "_intercept", intercept)
                planned(segments(5, 1)).apply(model)
        return intercept(interceptor, name, *arguments)

    monkeypatch.setattr(plans.Interceptor, "_intercept", intercept_after_another_apply)
    with planned(segments(5, 1)).apply(model):
        assert all("_compiled_call_impl" in block.__dict__ for block in model)


def test_a_plan_on_a_plan_is_refused():
    model, _ = perceptron()
    with (
        planned(segments(5, 1)).apply(model),
        pytest.raises(ValueError, match="already has a plan"),
    ):
        planned(segments(5, 2)).apply(model)


def test_a_refused_plan_leaves_the_blocks_before_the_refused_one():
    model, _ = perceptron()
    with planned(segments(1, 1)).apply(blocks=[model[4]]):
        with pytest.raises(ValueError, match="already has a plan"):
            planned(segments(5, 2)).apply(model)
        planned(segments(4, 2)).apply(blocks=list(model[:4])).remove()
    assert not any(block._forward_pre_hooks for block in model)


class Pair(nn.Module):
    """Takes and returns two tensors."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y, scale=1.0):
        return torch.tanh(self.one(x)) * scale, torch.sigmoid(self.two(y)) + x


@pytest.mark.parametrize("seed", range(4))
def test_blocks_that_take_and_return_tuples(seed):
    def run(plan):
        torch.manual_seed(1)
        blocks = [Pair() for _ in range(5)]
        x, y = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
        chosen = planned(segments(5, 100)) if plan is None else plan
        out = chosen.apply(blocks=blocks)((x, y), scale=0.5)
        loss_of(out).backward()
        return [*out, x.grad, y.grad, *(p.grad for b in blocks for p in b.parameters())]

    steps = random_steps(5, random.Random(seed))
    assert_same_bits(run(None), run(planned(steps)))


def test_blocks_may_be_functions():
    weight = torch.randn(8, 8, requires_grad=True)

    def block(x):
        return torch.tanh(x @ weight)

    x = torch.randn(4, 8)
    loss_of(block(block(block(x)))).backward()
    expected, weight.grad = weight.grad, None
    seen = []
    run = planned(segments(3, 1)).apply(
        blocks=[block] * 3, observe=lambda kind, i: seen.append((kind, i))
    )
    loss_of(run(x)).backward()
    assert torch.equal(weight.grad, expected)
    assert seen == segments(3, 1)


@pytest.mark.parametrize("size", [1, 2])
def test_a_block_that_is_called_twice_shares_its_parameters(size):
    def make():
        torch.manual_seed(0)
        shared = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        return nn.Sequential(shared, shared, nn.Linear(8, 8), shared), torch.randn(6, 8)

    compare(make, segments(4, size))


def test_two_forward_passes_before_one_backward_pass():
    compare(perceptron, segments(5, 1), call=lambda model, x: model(x) + model(2 * x))


def test_batch_norm_counts_each_pass_once():
    model, x = perceptron()
    with planned(segments(5, 1)).apply(model):
        for _ in range(3):
            loss_of(model(x)).backward()
    assert [int(block[1].num_batches_tracked) for block in model] == [3] * 5


class PowerIteration(nn.Module):
    """Its buffer changes in each run, and its result depends on the old value."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("u", torch.ones(8))

    def forward(self, x):
        with torch.no_grad():
            self.u = nn.functional.normalize(self.weight @ self.u, dim=0)
        return torch.tanh(x @ self.weight / (self.u @ self.weight).norm())


@pytest.mark.parametrize("seed", range(3))
def test_blocks_run_again_on_the_buffers_they_first_saw(seed):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(*(PowerIteration() for _ in range(4))), torch.randn(3, 8)

    compare(make, random_steps(4, random.Random(seed)), passes=3)


def test_hooks_of_parameters_fire_once_and_in_the_same_order():
    def order(plan):
        model, x = transformer(4)
        seen = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
        if plan is not None:
            plan.apply(model)
        loss_of(model(x)).backward()
        return seen

    expected = order(None)
    assert len(expected) == len(set(expected))
    assert order(planned(segments(4, 1))) == expected


def test_plan_is_inactive_without_gradients():
    model, x = perceptron()
    seen = []
    with planned(segments(5, 1)).apply(model, observe=lambda *step: seen.append(step)):
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)
        assert not seen
        model.eval()
        expected = model(x)
        assert torch.equal(model(x), expected)


def test_blocks_that_need_no_gradient_are_let_be():
    def make():
        model, x = perceptron()
        for parameter in model[:2].parameters():
            parameter.requires_grad_(False)
        return model, x

    compare(make, segments(5, 1), call=lambda model, x: model(x.detach()))


def test_gradients_of_a_part_are_enough():
    model, x = perceptron()
    x.requires_grad_()
    torch.manual_seed(3)
    (expected,) = torch.autograd.grad(loss_of(model(x)), x)
    torch.manual_seed(3)
    with planned(segments(5, 1)).apply(model):
        (got,) = torch.autograd.grad(loss_of(model(x)), x)
    assert torch.equal(got, expected)


def test_outputs_are_freed_after_the_pass():
    model, x = perceptron()
    with planned(segments(5, 2)).apply(model) as applied:
        references = []
        original = applied._run

        def spy(*args):
            out = original(*args)
            references.append(weakref.ref(out))
            return out

        applied._run = spy
        loss = loss_of(model(x))
        loss.backward()
        gc.collect()
        assert [ref for ref in references[:-1] if ref() is not None] == []


class Nested(nn.Module):
    """Already recomputes a part of itself."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.inner = TransformerBlock(16)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return torch.tanh(checkpoint(self.inner, x, use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_with_own_checkpointing(use_reentrant, seed):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(*(Nested(use_reentrant) for _ in range(4))), torch.randn(2, 4, 16)

    compare(make, random_steps(4, random.Random(seed)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_planned_model_inside_torch_checkpoint(use_reentrant):
    call = partial(checkpoint, use_reentrant=use_reentrant)
    compare(lambda: transformer(4, width=16), segments(4, 1), call=call)


def test_other_hooks_of_saved_tensors_stay_in_force():
    def call(model, x):
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    compare(perceptron, segments(5, 2), call=call)


# unsupported models


def raised(model, x, steps, match, error=MLStateError, backward=None):
    with planned(steps).apply(model), pytest.raises(error, match=match) as caught:
        (backward or (lambda loss: loss.backward()))(loss_of(model(x)))
    return caught.value


def test_a_second_backward_pass_is_refused():
    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)

    raised(*perceptron(), segments(5, 1), "second forward pass", backward=twice)


def test_a_second_derivative_is_refused():
    raised(
        *perceptron(), segments(5, 1), "create_graph",
        backward=lambda loss: loss.backward(create_graph=True),
    )  # fmt: skip


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2) + 1


def test_a_block_that_changes_its_input_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), InPlace(), nn.Tanh())
    error = raised(model, torch.randn(2, 8), segments(3, 1), "1 changes its input in place")
    assert error.name == "1"
    with planned(segments(3, 100)).apply(model):
        loss_of(model(torch.randn(2, 8))).backward()


class Between(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.change = change

    def forward(self, x):
        for layer in self.layers:
            x = self.change(layer(x))
        return x


def test_code_between_blocks_is_refused():
    x = torch.randn(2, 8)
    raised(Between(torch.tanh), x, segments(3, 1), "the code between them", ValueError)
    raised(Between(torch.clone), x, segments(3, 1), "the code between them", ValueError)
    raised(Between(lambda y: y.add_(1)), x, segments(3, 1), "changed in place before")


class Grows(nn.Module):
    """Saves one more tensor in each run."""

    runs = 0

    def forward(self, x):
        self.runs += 1
        for _ in range(self.runs):
            x = torch.tanh(x)
        return x


class Widens(nn.Module):
    def __init__(self):
        super().__init__()
        self.runs = 0
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        self.runs += 1
        rows = x[: self.runs]
        return x + (rows @ self.weight).sum()


@pytest.mark.parametrize(("block", "match"), [(Grows, "saved tensor|tensors for"), (Widens, "1, ")])
def test_other_saved_tensors_are_refused(block, match):
    model = nn.Sequential(nn.Linear(8, 8), block(), nn.Linear(8, 8))
    steps = [("forward", 0), ("forward", 1), ("save", 2), ("backward", 2), ("drop", 2),
             ("save", 1), ("backward", 1), ("drop", 1), ("save", 0), ("backward", 0)]  # fmt: skip
    if block is Grows:
        model.insert(3, nn.Linear(8, 8))
        steps = [("forward", 0), ("forward", 1), ("forward", 2), ("save", 3), ("backward", 3),
                 ("drop", 3), ("drop", 2), ("save", 1), ("save", 2), ("backward", 2),
                 ("backward", 1), ("drop", 1), ("save", 0), ("backward", 0)]  # fmt: skip
    error = raised(model, torch.randn(4, 8, requires_grad=True), steps, match)
    assert error.name == "1"


def test_a_block_out_of_turn_is_refused():
    model, x = perceptron()
    with planned(segments(5, 1)).apply(model):
        with pytest.raises(ValueError, match="1 was called, expected 0"):
            model[1](x)
        with torch.no_grad():
            model[1](x)


def test_mode_change_before_backward_is_refused():
    model, x = perceptron()
    raised(
        model,
        x,
        segments(5, 1),
        "eval mode now",
        backward=lambda loss: (model.eval(), loss.backward()),
    )


class Fails(nn.Module):
    """Fails in a given run, after it has changed a buffer and drawn random numbers."""

    def __init__(self, at):
        super().__init__()
        self.at, self.runs = at, 0
        self.inner = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))

    def forward(self, x):
        self.runs += 1
        x = self.inner(x)
        if self.runs == self.at:
            raise KeyError("in the middle")
        return torch.tanh(x)


@pytest.mark.parametrize("at", [1, 2])
def test_error_inside_a_block_restores_state(at):
    x = torch.randn(6, 8)
    model = nn.Sequential(nn.Linear(8, 8), Fails(at), nn.Linear(8, 8))
    with planned(segments(3, 1)).apply(model):
        torch.manual_seed(0)
        loss = None
        with pytest.raises(KeyError, match="in the middle"):
            loss = loss_of(model(x))
            state = torch.get_rng_state()
            loss.backward()
        counted = int(model[1].inner[0].num_batches_tracked)
        assert counted == 1
        assert isinstance(model[1].inner[0].running_mean, torch.Tensor)
        if at == 2:
            assert torch.equal(torch.get_rng_state(), state)
        model.zero_grad()
        loss_of(model(x)).backward()  # the next pass starts from scratch
        assert int(model[1].inner[0].num_batches_tracked) == counted + 1


@pytest.mark.parametrize(
    ("module", "blocks", "match"),
    [
        (perceptron()[0], None, "for 3 blocks, found 5: 0, 1"),
        (Language(), None, "which modules are the blocks"),
        (Language(3), "layer.*", "names nothing"),
        (Language(2), "layers.*", "for 3 blocks, found 2"),
        (nn.Sequential(TransformerBlock(), nn.Linear(2, 2), nn.Linear(2, 2)), "*", None),
    ],
)
def test_blocks_that_are_not_there(module, blocks, match):
    plan = planned(segments(3, 1))
    if match is None:
        plan.apply(module, blocks=blocks).remove()
        return
    with pytest.raises(ValueError, match=match):
        plan.apply(module, blocks=blocks)


def test_invalid_models_are_refused():
    plan = planned(segments(2, 1))
    with pytest.raises(TypeError, match="module or blocks"):
        plan.apply()
    with pytest.raises(TypeError, match="callable"):
        plan.apply(blocks=[1, 2])
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        plan.apply(3)
    inner = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="overlap"):
        plan.apply(blocks=[inner, inner[0]])
    with pytest.raises(TypeError, match="returned no tensor"):
        plan.apply(blocks=[lambda x: None, nn.Identity()])(torch.ones(2))


# torch.compile

compiles = pytest.mark.filterwarnings("ignore")  # torch warns about its own internals


@compiles
def test_blocks_that_are_compiled():
    model, x = transformer(3)
    expected = results(model, [x], passes=1)
    compiled = nn.Sequential(*(torch.compile(block, backend="aot_eager") for block in model))
    seen = []
    with planned(segments(3, 1)).apply(compiled, observe=lambda *step: seen.append(step)):
        got = results(compiled, [x], passes=1)
    assert seen == segments(3, 1)
    for left, right in zip(expected, got, strict=True):
        if left is not None:
            torch.testing.assert_close(left, right)
    compiled_results = results(compiled, [x], passes=1)
    assert_same_bits(compiled_results, got)


@compiles
def test_compiled_model_still_follows_its_plan():
    torch.manual_seed(0)
    model, ids = Language(3), torch.randint(0, 50, (2, 12))
    seen = []
    with planned(segments(3, 1)).apply(model, observe=lambda *step: seen.append(step)):
        compiled = torch.compile(model, backend="aot_eager")
        loss_of(compiled(ids)).backward()
        assert seen == segments(3, 1)
        torch._dynamo.reset()
        fully_compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match=r"graph.?break|Graph break"):
            fully_compiled(ids)


@needs_cuda
@pytest.mark.parametrize("name", MODELS)
def test_bits_on_a_gpu(name):
    blocks = len(MODELS[name]()[0])

    def make():
        model, x = MODELS[name]()
        return model.cuda(), x.cuda()

    for seed in range(3):
        compare(make, random_steps(blocks, random.Random(seed), host=True), host=True)
