"""State dicts, comparisons, tiers and followers with CUDA tensors."""

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from device_training import Training, bits_of  # noqa: E402
from test_tiers_torch import assert_equal, experts_and_adam, train_step  # noqa: E402

import mlstate  # noqa: E402
from mlstate import StateDict  # noqa: E402
from mlstate.checkpoint import TieredState  # noqa: E402
from mlstate.collectives import SingleGroup  # noqa: E402
from mlstate.distributed import DistributedStateCollector  # noqa: E402
from mlstate.follow import Follower, Publisher  # noqa: E402
from mlstate.state import load_into  # noqa: E402


def states_of(device):
    training = Training(device, 1)
    training.run(0, 2)
    model = mlstate.ModelStateDict.from_torch(training.model)
    optimizer = mlstate.OptimizerStateDict.from_torch(training.optimizer, training.model)
    return training, model, optimizer


# ---- state dicts ----


def test_a_state_dict_keeps_tensors_on_the_device_and_returns_them(device):
    training, model, optimizer = states_of(device)
    for name, tensor in training.model.state_dict().items():
        assert str(model[name].device) == str(tensor.device)
    assert bits_of(model.to_torch()) == bits_of(dict(training.model.state_dict()))
    other = Training(device, 2)
    other.model.load_state_dict(model.to_torch())
    other.optimizer.load_state_dict(optimizer.to_torch(other.optimizer, other.model))
    assert bits_of(other.tensors()) == bits_of(training.tensors())


NUMBERS = torch.arange(4.0)


def saved_and_loaded(state, path):
    mlstate.save_file(state, path)
    return dict(mlstate.load_file(path))


def filled(state, path):
    load_into(state, {name: torch.arange(4.0) + 7 for name in state})
    return dict(state)


CALLS = {  # with their results
    "a comparison with itself": (lambda state, path: state == StateDict(state), True),
    "a digest": (lambda state, path: state.digest(), StateDict({"first.w": NUMBERS}).digest()),
    "a conversion": (
        lambda state, path: dict(state.astype("float16")), {"first.w": NUMBERS.half()}
    ),
    "a file": (saved_and_loaded, {"first.w": NUMBERS}),
    "a fill": (filled, {"first.w": NUMBERS + 7}),
}  # fmt: skip
NEEDS_MAIN_MEMORY = {"a digest", "a file", "a fill"}


@pytest.mark.parametrize("call", CALLS)
def test_calls_on_device_tensors_give_the_result_of_the_host_or_name_the_tensor(device, path, call):
    state = StateDict({"first.w": torch.arange(4.0, device=device)})
    function, expected = CALLS[call]
    if device.type == "cpu" or call not in NEEDS_MAIN_MEMORY:
        assert bits_of(function(state, path)) == bits_of(expected)
        return
    with pytest.raises((TypeError, ValueError, BufferError), match=r"'first\.w'"):
        function(state, path)
    assert torch.equal(state["first.w"].cpu(), NUMBERS) and not path.exists()


def test_states_of_a_device_are_compared_element_by_element(device):
    collector = DistributedStateCollector(SingleGroup())
    first, second = ({"w": torch.zeros(3, device=device, dtype=torch.bfloat16)} for _ in range(2))
    assert collector.compare_states([first, second]) == []
    second["w"][2] = 2
    (difference,) = collector.compare_states([first, second])
    assert "in 1 of 3 elements, by at most 2" in difference.text


def test_gathered_states_have_the_bits_of_the_device(device):
    training, _, _ = states_of(device)
    state = DistributedStateCollector(SingleGroup()).gather_full_state(training.model)
    expected = {name: value.cpu() for name, value in training.model.state_dict().items()}
    arrays = mlstate.StateDict(state).to_torch()
    assert bits_of({name: arrays[name] for name in expected}) == bits_of(expected)


# ---- tiers ----


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["", "fused"])
@pytest.mark.parametrize("is_on_device", [False, True])
def test_experts_in_tiers_train_as_without_them(device, tmp_path, is_on_device, options):
    reference, adam, inputs = experts_and_adam(**options)
    inputs = [(k, x.to(device)) for k, x in inputs]
    reference.to(device)
    for k, x in inputs:
        train_step(reference[k], adam, x)
    experts, other, _ = experts_and_adam(**options)
    if is_on_device:
        experts.to(device)
    with TieredState(experts, other, tmp_path, device=device.type, hot_budget_bytes=2000) as tiers:
        for k, x in inputs:
            with tiers.use(f"{k}.weight", "hot"), tiers.use(f"{k}.bias", "hot"):
                assert experts[k].weight.device == x.device
                train_step(experts[k], other, x)
            if k == 1:
                tiers.demote(f"{k}.weight", to="cold")
        for name in tiers:
            move = tiers.demote if tiers.tier(name) == "hot" else tiers.promote
            move(name, to="warm")
    assert_equal((reference.cpu(), adam_on_host(adam)), (experts, other))


def adam_on_host(adam):
    """The optimizer, with its states in main memory."""
    for states in adam.state.values():
        states.update({name: value.cpu() for name, value in states.items()})
    return adam


def test_a_thread_that_demotes_waits_for_the_stream_that_wrote(device, stream, tmp_path):
    state = {"w": torch.zeros(1 << 20, device=device)}
    with TieredState(state, None, tmp_path) as tiers, torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(device))
        with tiers.use("w") as unit:
            torch.cuda._sleep(200_000_000)
            unit.parameter.fill_(5)
        thread = threading.Thread(target=tiers.demote, args=("w",))
        thread.start(), thread.join()
        assert not state["w"].is_cuda and state["w"].eq(5).all()


def test_a_unit_of_both_libraries_moves_to_every_tier(device, tmp_path):
    state, moments = {"w": torch.ones(8, device=device)}, {"w.m": np.full(8, 2.0)}
    with TieredState(state, moments, tmp_path) as tiers:
        for tier in ("warm", "cold"):
            tiers.demote("w", to=tier)
        tiers.promote("w", to="hot")
        with tiers.use("w") as unit:
            assert unit.parameter.device == device and unit.parameter.eq(1).all()
            assert all(torch.as_tensor(value).eq(2).all() for value in unit.states.values())


# ---- followers ----


@pytest.mark.parametrize("base", ["memory", "disk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_on_the_device_follows_each_step(device, tmp_path, dtype, base):
    models = [Training(device, seed).model.to(dtype) for seed in range(2)]
    on_host = Training(torch.device("cpu"), 2).model.to(dtype)
    publisher = Publisher(tmp_path, base=base, anchor_every=3)
    followers = [Follower(tmp_path, into=model) for model in (models[1], on_host)]
    places = [p.data_ptr() for p in models[1].parameters()]
    kinds = []
    for step in range(6):
        kinds.append(str(publisher.publish(step, models[0])))
        expected = bits_of(dict(models[0].state_dict()))
        for follower, model in zip(followers, (models[1], on_host), strict=True):
            assert follower.advance() == step
            follower.verify()
            assert bits_of(dict(model.state_dict())) == expected
        with torch.no_grad():
            generator = torch.Generator().manual_seed(step)
            for p in models[0].parameters():
                chosen = torch.rand(p.shape, generator=generator) < 0.03
                p[chosen.to(device)] += 1
    assert "delta" in kinds and places == [p.data_ptr() for p in models[1].parameters()]
