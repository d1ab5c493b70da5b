"""Measurements of a model's blocks: the predicted peak of a plan equals the measured peak."""

import time
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="its models are what is measured here")

import child  # noqa: E402
from planned_models import (  # noqa: E402
    Cache,
    Cached,
    Language,
    loss_of,
    perceptron,
    pyramid,
    segments,
    transformer,
)
from torch import nn  # noqa: E402

from mlstate.activation import Chain, Plan, plan  # noqa: E402
from mlstate.integrations.torch import measure_peak  # noqa: E402
from mlstate.integrations.torch._activation import block_calls  # noqa: E402
from mlstate.integrations.torch._activation.block_calls import seed_of  # noqa: E402

pytestmark = pytest.mark.torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def large_transformer():
    model, _ = transformer(12, width=64)
    return model, torch.randn(8, 64, 64)


def large_pyramid():
    model, _ = pyramid(stages=7, each=3)
    return model, torch.randn(4, 3, 96, 96)


def large_perceptron():
    return perceptron(16, width=128, batch=512)


MODELS = {
    "transformer": large_transformer,
    "pyramid": large_pyramid,
    "perceptron": large_perceptron,
}


@pytest.fixture(scope="module", params=MODELS)
def measured(request):
    model, x = MODELS[request.param]()
    return model, x, Chain.from_torch(model, x, repeats=1)


def peak_of(model, x, chain, device="cpu"):
    """The peak of a training step if the gradients of all parameters exist."""

    def step():
        seed_of(model(x)).backward()  # keeps neither the output nor its gradient alive

    step()  # allocates the gradients
    return measure_peak(step, device=device).peak_bytes + int(chain.activation_bytes[0])


def schedules(chain):
    n = chain.blocks
    for size in (1, 2, 4, n):
        yield Plan(chain, segments(n, size))
    for share in (0.6, 0.8):
        yield plan(chain, int(share * chain.plain_peak_bytes))


def test_the_predicted_peak_is_the_measured_one(measured):
    model, x, chain = measured
    for schedule in schedules(chain):
        with schedule.apply(model):
            peak = peak_of(model, x, chain)
        assert peak == pytest.approx(schedule.predicted_peak_bytes, rel=0.02), schedule


def test_the_peak_without_a_plan_is_predicted_too(measured):
    model, x, chain = measured
    assert peak_of(model, x, chain) == pytest.approx(chain.plain_peak_bytes, rel=0.02)


def test_chain_figures_match_the_model():
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Tanh(), nn.Flatten(), nn.Dropout(0.5))
    chain = Chain.from_torch(model, torch.ones(6, 8))
    assert chain.names == ("0", "1", "2", "3")
    assert chain.activation_bytes.tolist() == [192, 96, 96, 96, 96]
    assert chain.gradient_bytes.tolist() == [0, 96, 96, 96, 96]
    assert chain.saved_bytes.tolist()[:3] == [96, 96, 96]
    assert chain.saved_bytes[3] > 96  # a mask
    assert (chain.forward_seconds > 0).all() and (chain.backward_seconds[:2] > 0).all()
    with_input_gradient = Chain.from_torch(model, torch.ones(6, 8, requires_grad=True))
    assert with_input_gradient.gradient_bytes[0] == 192


def test_saved_bytes_match_saved_tensor_hooks():
    """A second way to count: the memory of all tensors that autograd's hooks see."""
    model, x = transformer(1)
    chain = Chain.from_torch(model, x.requires_grad_(), repeats=1)
    model_storages = {p.untyped_storage()._cdata for p in model.parameters()} | {
        x.untyped_storage()._cdata
    }
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in model_storages:
            storages[storage._cdata] = storage  # kept alive, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    storage = out.untyped_storage()
    storages[storage._cdata] = storage
    assert chain.saved_bytes.tolist() == [sum(s.nbytes() for s in storages.values())]


def test_the_model_is_as_it_was():
    model, x = perceptron()
    loss_of(model(x)).backward()
    gradients = [p.grad for p in model.parameters()]
    values = [p.grad.clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    Chain.from_torch(model, x, repeats=1)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(map(torch.equal, gradients, values))
    assert all(map(torch.equal, model.buffers(), buffers))
    assert torch.equal(torch.get_rng_state(), state)
    assert not model[0]._forward_pre_hooks and not model[0]._forward_hooks


def test_the_generators_of_frozen_parameters_are_restored(monkeypatch):
    """A frozen block that moves its input to its own device may draw there."""

    class OnDevice(nn.Parameter):
        device = torch.device("cuda", 1)

    restored = []
    monkeypatch.setattr(block_calls, "generator_states", lambda devices: sorted(map(str, devices)))
    monkeypatch.setattr(block_calls, "set_generator_states", restored.append)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    model[1].weight = OnDevice(torch.ones(4, 4), requires_grad=False)
    with block_calls.SampledModel(model, x, None, None).untouched():
        assert model[0].weight.grad is not None and model[1].weight.grad is None
    assert restored == [["cuda:1"]]


def test_blocks_inside_a_model_and_arguments_by_name():
    chain = Chain.from_torch(Language(), {"ids": torch.ones(2, 12, dtype=torch.int64)}, repeats=1)
    assert chain.names == ("layers.0", "layers.1", "layers.2", "layers.3")
    size = 2 * 12 * 32 * 4
    assert chain.activation_bytes.tolist() == [size + 12 * 12, *[size] * 4]  # and a mask
    assert chain.gradient_bytes[0] == 2 * 12 * 32 * 4


class Sleeps(nn.Linear):
    """A block whose run times are given."""

    def __init__(self, seconds, width=8):
        super().__init__(width, width)
        self.seconds = iter(seconds)

    def forward(self, x):
        time.sleep(next(self.seconds, 0))
        return super().forward(x)


def test_equal_blocks_are_measured_together():
    slow = [0.1] * 4  # one run is disturbed during the measurement
    model = nn.Sequential(nn.Tanh(), *(Sleeps(s) for s in ([], [], slow, [])))
    chain = Chain.from_torch(model, torch.ones(4, 8, requires_grad=True), repeats=3)
    assert len(set(chain.forward_seconds[1:].tolist())) == 1
    assert len(set(chain.backward_seconds[1:].tolist())) == 1
    assert chain.forward_seconds[1] < 0.05
    assert chain.seconds_spread.shape == (5,)
    assert chain.seconds_spread[1] == chain.seconds_spread[4] > 0
    assert "measured times vary by up to " in repr(chain)
    assert "spread of time" in str(chain) and "spread of time" in chain._repr_html_()


def test_blocks_that_differ_are_measured_apart():
    slow = [0.1] * 3
    model = nn.Sequential(Sleeps([]), Sleeps(slow), Sleeps([]).requires_grad_(False))
    model[1].eval()  # now different from the first one
    chain = Chain.from_torch(model, torch.ones(4, 8), repeats=2)
    assert chain.forward_seconds[1] > 0.05 > chain.forward_seconds[[0, 2]].max()


def test_blocks_that_share_a_cache():
    model, x = Cached(), torch.randn(2, 5, 8)
    cached = Chain.from_torch(model, x, repeats=2)
    uncached = Chain.from_torch(model, {"x": x, "use_cache": False}, repeats=1)
    assert cached.activation_bytes.tolist() == uncached.activation_bytes.tolist()
    assert (cached.saved_bytes >= uncached.saved_bytes + x.nbytes).all()
    cache = Cache()
    Chain.from_torch(model, {"x": x, "cache": cache}, repeats=1)
    assert cache.layers == [] and cache.tokens is None


def test_functions_and_in_place_blocks():
    blocks = [nn.Linear(8, 8), nn.ReLU(inplace=True), lambda x: (x * 2, x), lambda x, y: x + y]
    chain = Chain.from_torch(blocks, torch.ones(4, 8), repeats=1)
    assert chain.blocks == 4
    assert chain.activation_bytes[3] == 256
    assert chain.names == ("block 0", "block 1", "block 2", "block 3")


def test_autocast_counts_its_copies():
    model, x = transformer(2)
    with torch.autocast("cpu", torch.bfloat16):
        chain = Chain.from_torch(model, x, repeats=1)
    weights = sum(p.numel() * 2 for p in model[0].parameters() if p.dim() == 2)
    assert chain.saved_bytes[0] > weights


def test_copies_to_the_host_are_measured(tmp_path):
    model, x = perceptron(2)
    for offload in (True, tmp_path):
        chain = Chain.from_torch(model, x, repeats=1, offload=offload)
        assert chain.offload_bytes_per_second > 1e6
        assert chain.load_bytes_per_second > 1e6
    assert not list(tmp_path.iterdir())


def test_arguments():
    model, x = perceptron(2)
    with pytest.raises(ValueError, match="repeats must be 1"):
        Chain.from_torch(model, x, repeats=0)
    with pytest.raises(TypeError, match="no tensor"):
        Chain.from_torch(model, 3)

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for i in self.order:
                x = self.layers[i](x)
            return x

    skips = Skips()
    for order, match in (
        ((0, 1), "did not call layers.2"),
        ((0, 2, 1), "layers.2 was called, expected layers.1"),
        ((0, 1, 2, 2), "expected none"),
    ):
        skips.order = order
        with pytest.raises(ValueError, match=match):
            Chain.from_torch(skips, torch.ones(2, 4), repeats=1)
    skips.order = (0, 1, 2)
    assert Chain.from_torch(skips, torch.ones(2, 4), repeats=1).blocks == 3


def test_backward_may_need_fewer_bytes_than_saved():
    model, x = perceptron(3, width=64, batch=256)
    chain = Chain.from_torch(model, x, repeats=1)
    assert (chain.backward_temporary_bytes < 0).any()
    assert (chain.backward_temporary_bytes >= -chain.gradient_bytes[:-1]).all()
    assert Chain.from_json(chain.to_json()) == chain


def test_but_not_less_than_without_its_gradient():
    sizes = ([1.0], [1.0], [4, 4], [8])
    chain = Chain(*sizes, gradient_bytes=[3, 4], backward_temporary_bytes=[-3])
    assert chain.plain_peak_bytes == 4 + 8 + 4
    with pytest.raises(
        ValueError, match=r"backward_temporary_bytes\[0\] is -4: expected -3 or more"
    ):
        Chain(*sizes, gradient_bytes=[3, 4], backward_temporary_bytes=[-4])
    with pytest.raises(ValueError, match=r"\[0\] is -1: expected 0 or more"):
        Chain(*sizes, saving_temporary_bytes=[-1])


# measure_peak itself


def test_measure_peak_counts_live_memory():
    tensors = []

    def work():
        tensors.append(torch.ones(1000))
        torch.ones(3000)
        return torch.ones(500)

    use = measure_peak(work)
    assert use.peak_bytes == 16000
    assert use.left_bytes == 6000
    assert [live_bytes for _, live_bytes in use.curve] == [4000, 16000, 4000, 6000]
    assert all(earlier[0] <= later[0] for earlier, later in pairwise(use.curve))
    assert measure_peak(lambda: None).peak_bytes == 0


def test_existing_memory_is_not_counted():
    tensors = [torch.ones(1000)]
    assert measure_peak(tensors.clear)[:2] == (0, 0)
    # also if torch remembers the address from another measurement
    measure_peak(lambda: tensors.append(torch.ones(1000)))
    address = tensors[0].data_ptr()
    for _ in range(100):
        tensors.clear()
        tensors.append(torch.ones(1000))
        if tensors[0].data_ptr() == address:
            break
    assert measure_peak(tensors.clear)[:2] == (0, 0)


@pytest.mark.parametrize("level", [None, "0"])
def test_profiler_output_and_environment_are_restored(level):
    code = (
        "import os, torch; from mlstate.activation import Chain\n"
        "before = dict(os.environ)\n"
        "Chain.from_torch([torch.nn.Tanh()], torch.ones(4), repeats=1)\n"
        "assert dict(os.environ) == before\n"
    )
    done = child.attempt(code, **({} if level is None else {"KINETO_LOG_LEVEL": level}))
    assert done.returncode == 0, done.stderr
    assert (done.stderr == "") == (level is None), done.stderr


def test_measure_peak_refuses_unsupported_devices_and_profilers():
    with pytest.raises(ValueError, match="on cpu and cuda, not on meta"):
        measure_peak(lambda: None, device="meta")
    with torch.autograd.profiler.profile(), pytest.raises(RuntimeError, match="is already running"):
        measure_peak(lambda: None)


@needs_cuda
@pytest.mark.parametrize("name", MODELS)
def test_peaks_on_a_gpu(name):
    model, x = MODELS[name]()
    model, x = model.cuda(), x.cuda()
    chain = Chain.from_torch(model, x, repeats=2)
    for schedule in schedules(chain):
        with schedule.apply(model):
            peak = peak_of(model, x, chain, "cuda")
        assert peak == pytest.approx(schedule.predicted_peak_bytes, rel=0.02), schedule
