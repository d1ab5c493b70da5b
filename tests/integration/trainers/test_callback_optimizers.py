"""A Trainer's callback refuses optimizers that it cannot store before the first save."""

from types import SimpleNamespace

import pytest

from mlstate import CompatibilityError

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="the callback needs torch")
pytest.importorskip("transformers", reason="the callback needs transformers")

from torch.optim.optimizer import (  # noqa: E402
    register_optimizer_step_post_hook as register_hook_of_all,
)

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


# ---- before the first step ----


class Projector:
    pass


class Projecting(torch.optim.SGD):
    """Its first step creates the result of `make` for each parameter with a gradient."""

    def __init__(self, parameters, make=Projector):
        super().__init__(parameters, lr=0.1)
        self.make = make
        self.steps = [0]

    @torch.no_grad()
    def step(self):
        self.steps[0] += 1
        torch.rand(1)
        for group in self.param_groups:
            group["rank"] = 2
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["projector"] = self.make()
                    parameter.add_(1)


def begin(folder, module, optimizer, callback=None):
    arguments = SimpleNamespace(**vars(ARGUMENTS), output_dir=str(folder))
    arguments.ignore_data_skip = True
    state = SimpleNamespace(global_step=0, is_hyper_param_search=False)
    callback = MLStateCallback() if callback is None else callback
    wrapper = SimpleNamespace(optimizer=optimizer)
    callback.on_train_begin(arguments, state, None, model=module, optimizer=wrapper)
    callback.on_train_end(arguments, state, None)


def test_objects_that_the_first_step_creates_are_refused_before_it(tmp_path):
    module = torch.nn.Linear(100, 2)
    optimizer = Projecting(module.parameters())
    text = r"cannot store Projecting \(optim=x\): '\w+.projector' is .* MLStateCallback\(exclude="
    with pytest.raises(CompatibilityError, match=text):
        begin(tmp_path, module, optimizer)
    begin(tmp_path, module, optimizer, MLStateCallback(exclude="*.projector"))


@pytest.mark.parametrize("make", [dict, lambda: torch.eye(2), lambda: {"matrix": torch.eye(2)}])
def test_values_that_the_first_step_creates_are_accepted(tmp_path, make):
    module = torch.nn.Linear(2, 2)
    begin(tmp_path, module, Projecting(module.parameters(), make))


def test_step_of_a_copy_leaves_the_training_unchanged(tmp_path):
    module = torch.nn.Linear(2, 2)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = Projecting(module.parameters(), dict)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces the method `step`
    torch.manual_seed(0)
    begin(tmp_path, module, optimizer)
    numbers = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(numbers, torch.rand(3))
    assert all(map(torch.equal, module.parameters(), before))
    assert [parameter.grad for parameter in module.parameters()] == [None, None]
    assert not optimizer.state and optimizer.steps == [0]
    assert "rank" not in optimizer.param_groups[0]
    optimizer.step()
    assert optimizer.steps == [1]


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_of_steps_are_not_called_before_the_first_step(tmp_path, of_all):
    module = torch.nn.Linear(2, 2)
    optimizer = Projecting(module.parameters())
    register = register_hook_of_all if of_all else optimizer.register_step_post_hook
    calls = []
    hook = register(lambda *arguments: calls.append(arguments))
    try:
        with pytest.raises(CompatibilityError, match="projector"):
            begin(tmp_path, module, optimizer)
        assert not calls
        optimizer.step()
        assert len(calls) == 1
    finally:
        hook.remove()


def test_a_step_that_fails_for_a_copy_is_left_to_the_training(tmp_path):
    def fail():
        raise ArithmeticError("too small")

    module = torch.nn.Linear(2, 2)
    begin(tmp_path, module, Projecting(module.parameters(), fail))
