"""A Trainer's callback refuses optimizers that it cannot store before the first save."""

from types import SimpleNamespace

import pytest

from mlstate import CompatibilityError

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="the callback needs torch")
pytest.importorskip("transformers", reason="the callback needs transformers")

from mlstate.integrations.transformers import MLStateCallback  # noqa: E402

ARGUMENTS = SimpleNamespace(optim="x", world_size=1, enable_jit_checkpoint=False)


def trained():
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    return module, optimizer


def end_step(callback, module, optimizer):
    callback.on_step_end(ARGUMENTS, None, None, model=module, optimizer=optimizer)


def test_objects_among_states_are_refused_after_the_first_step():
    module, optimizer = trained()
    optimizer.state[module.weight]["projector"] = object()
    wrapper = SimpleNamespace(optimizer=optimizer)  # as accelerate's
    text = r"cannot store SGD \(optim=x\): 'weight.projector' is .* MLStateCallback\(exclude=\)"
    with pytest.raises(CompatibilityError, match=text):
        end_step(MLStateCallback(), module, wrapper)
    end_step(MLStateCallback(exclude="*.projector"), module, wrapper)


def test_parameters_of_another_module_are_refused():
    optimizer = torch.optim.SGD([torch.zeros(1, 1)], lr=0.1)
    with pytest.raises(CompatibilityError, match=r"parameters that Linear lacks.*another optim"):
        end_step(MLStateCallback(), torch.nn.Linear(2, 2), optimizer)


def test_states_are_checked_once():
    module, optimizer = trained()
    callback = MLStateCallback()
    end_step(callback, module, optimizer)
    optimizer.state[module.weight]["projector"] = object()
    end_step(callback, module, optimizer)
