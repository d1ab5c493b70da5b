"""Modules publish and follow on one rank."""

import numpy as np
import pytest
import torch
from traced_memory import traced

from mlstate.errors import CheckpointWarning, CompatibilityError
from mlstate.follow import Follower, Publisher

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]


def network(seed, dtype):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.LayerNorm(9)).to(dtype)


@pytest.mark.parametrize("double_buffer", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_follows_a_module(tmp_path, dtype, double_buffer):
    module, copy = network(1, dtype), network(2, dtype)
    publisher = Publisher(tmp_path / "w", base="disk")
    follower = Follower(tmp_path / "w", into=copy, double_buffer=double_buffer)
    for step in range(3):
        publisher.publish(step, module)
        follower.advance()
        follower.verify()
        for name, value in module.state_dict().items():
            assert torch.equal(follower.state[name], value)
            assert double_buffer or torch.equal(copy.state_dict()[name], value)
        with torch.no_grad():
            module[0].weight[step, 0] += 1
    if not double_buffer:
        assert copy(torch.ones(1, 7, dtype=dtype)).requires_grad


def test_the_frame_evaluator_of_torch_keeps_no_anchor_alive(tmp_path):
    Publisher(tmp_path / "w").publish(0, {"w": np.ones(1 << 20, np.float32)})
    follower = Follower(tmp_path / "w", into={"w": np.zeros(1 << 20, np.float32)})
    advance = torch._dynamo.run(follower.advance)  # calls it under torch's frame evaluator
    with traced() as trace:
        advance()
    assert trace.peak < 1.3 * (4 << 20)  # the model, then the overwritten elements


def test_a_module_that_was_converted_or_got_new_parameters_follows(tmp_path):
    model, into = torch.nn.Linear(30, 3), torch.nn.Linear(30, 3)
    publisher = Publisher(tmp_path / "w")
    follower = Follower(tmp_path / "w", into=into)

    def replace():
        into.weight = torch.nn.Parameter(into.weight.detach().clone())

    changes = (lambda: None, lambda: into.double().float(), replace)
    for step, change in enumerate(changes):
        publisher.publish(2 * step, model)
        follower.advance()
        change()
        with torch.no_grad():
            model.weight[0, step] = step + 7
        publisher.publish(2 * step + 1, model)
        follower.advance()
        assert torch.equal(into.weight, model.weight)
        follower.verify()
    into.half()
    publisher.publish(90, model)
    replaced = pytest.warns(CheckpointWarning, match="was replaced")
    refused = pytest.raises(CompatibilityError, match="dtype is float32, not float16")
    with replaced, refused:
        follower.advance()


def test_a_module_with_copies_in_its_state_dict_is_refused(tmp_path):
    module = torch.nn.Linear(3, 3)
    module._register_state_dict_hook(
        lambda module, state, *_: {name: value.clone() for name, value in state.items()}
    )
    with pytest.raises(CompatibilityError, match="gives a copy of"):
        Follower(tmp_path / "w", into=module)


def test_autograd_notices_a_change_of_saved_tensors(tmp_path):
    module, copy = network(1, torch.float32), network(2, torch.float32)
    Publisher(tmp_path / "w").publish(0, module)
    loss = copy(torch.ones(3, 7)).square().sum()
    Follower(tmp_path / "w", into=copy).advance()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_extra_states_are_refused(tmp_path):
    class WithState(torch.nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    with pytest.raises(TypeError, match="_extra_state"):
        Publisher(tmp_path / "w").publish(0, WithState(2, 2))
