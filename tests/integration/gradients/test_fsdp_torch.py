"""Gradients of torch models by hooks: ranks as threads, and as processes over gloo."""

import warnings

import gloo_ranks
import numpy as np
import pytest
from fsdp_torch_ranks import SCENARIOS

from mlstate import CollectiveError, _core
from mlstate.collectives import LocalGroup, SingleGroup
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit, sharding_units
from mlstate.testing import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(250)]

torch = pytest.importorskip("torch", reason="its models are what has gradients here")

PROCESSES = [
    pytest.param(world, name, marks=[pytest.mark.long] * (world > 2))
    for world in (2, 3)
    for name in SCENARIOS
    if world == 2 or "compiled" not in name
]


@pytest.mark.parametrize(("world", "name"), PROCESSES)
def test_ranks_that_are_processes(world, name):
    gloo_ranks.run(world, SCENARIOS[name])


@pytest.mark.parametrize("name", [name for name in SCENARIOS if not name.startswith("only")])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_are_threads(world, name):
    run_ranks(world, SCENARIOS[name], timeout=60)


# ---- tensors that the core reads directly ----


class Special(torch.Tensor):
    """A subclass, which may have properties that mlstate does not know."""


def _negative():
    """A view whose elements are the negated elements in memory."""
    return torch.complex(torch.zeros(3), torch.ones(3)).conj().imag


PLAIN = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")  # since torch 2.10
TENSORS = {
    "plain": (torch.ones(3), PLAIN),
    "one of many": (torch.ones(2, 3)[1], PLAIN),
    "a view with steps": (torch.ones(3, 2)[:, 0], False),
    "another dtype": (torch.ones(3).half(), False),
    "another shape": (torch.ones(4), False),
    "with a gradient": (torch.ones(3, requires_grad=True), False),
    "a parameter": (torch.nn.Parameter(torch.ones(3)), False),
    "a class of its own": (torch.ones(3).as_subclass(Special), False),
    "sparse": (torch.ones(3).to_sparse(), False),
    "no memory": (torch.ones(3, device="meta"), False),
    "zeros of no memory": (torch._efficientzerotensor(3), False),
    "negative": (_negative(), False),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_core_reads_only_strided_cpu_tensors(kind):
    tensor, seen = TENSORS[kind]
    assert _core.bucket_fits(tensor, "float32", (3,), True) is seen


@pytest.mark.parametrize("kind", ["a tensor", *TENSORS])
def test_an_output_is_of_the_kind_of_its_gradient(kind):
    """A NumPy gradient is never stored into the memory of a tensor."""
    out, seen = TENSORS.get(kind, (torch.ones(3), PLAIN))
    for gradient, good in ((torch.ones(3), seen), (np.ones(3, np.float32), False)):
        segments = [(gradient, (3,), out, "float32", (3,))]
        if good:
            _core.bucket(segments, 1, 0, "sum", 1.0)
        else:
            with pytest.raises(ValueError):
                _core.bucket(segments, 1, 0, "sum", 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_the_core_sees_tensors_of_every_dtype(dtype):
    name = str(dtype).removeprefix("torch.")
    assert _core.bucket_fits(torch.ones(2, 3, dtype=dtype), name, (2, 3), True) is PLAIN


def test_lazily_negated_tensor_is_reduced_correctly():
    (group,) = LocalGroup.threads(1)
    tensor = _negative()
    assert tensor.is_neg()
    unit = FSDPShardingUnit("w", (3,), torch.float32, 0)
    hook = FSDPBackwardHook(FSDP(group))
    for _ in range(2):  # the second time into the memory of the first
        assert hook.scatter_gradient(unit, tensor).tolist() == [-1.0] * 3
    total = torch.ones(3)
    hook.accumulate_gradients({"w": unit}, {"w": total})
    assert unit.local_gradient.tolist() == [0.0] * 3
    group.close()


# ---- parameters that change after their registration ----


def _assign(module):
    module.load_state_dict(module.state_dict(), assign=True)


def _assign_one(module):
    module[0].load_state_dict(module[0].state_dict(), assign=True)


def _swap(module):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.load_state_dict(module.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _set(module):
    module[1].weight = torch.nn.Parameter(torch.ones(1, 3))


def _unfreeze(module):
    module[2].requires_grad_(True)


def _add(module):
    module.append(torch.nn.Linear(1, 1))


def _parametrize(module):
    torch.nn.utils.parametrizations.weight_norm(module[0])


CHANGES = [_assign, _assign_one, _swap, _set, _unfreeze, _add, _parametrize]


@pytest.mark.parametrize("gradients", ["full", "shard"])
@pytest.mark.parametrize("change", CHANGES)
def test_replaced_parameter_is_reported_before_the_optimizer_step(change, gradients):
    layers = [torch.nn.Linear(2, 3), torch.nn.Linear(3, 1), torch.nn.Linear(1, 1)]
    module = torch.nn.Sequential(*layers)
    layers[2].requires_grad_(False)
    units = {
        name: FSDPShardingUnit(name, tuple(p.shape), "float32", 0)
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step():
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with FSDPBackwardHook(FSDP(SingleGroup())) as hook, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the optimizer has no gradients
        hook.register_hooks(module, units, gradients=gradients)
        step()
        change(module)
        before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        with pytest.raises(CollectiveError, match="after register_hooks: close"):
            step()
        after = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        assert all(map(torch.equal, before, after))
    step()  # without hooks


def test_error_of_a_step_has_the_name_of_the_replaced_parameter():
    module = torch.nn.Module()
    module.register_parameter("it's", torch.nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.SGD(module.parameters())
    with FSDPBackwardHook(FSDP(SingleGroup())) as hook:
        hook.register_hooks(module, {"it's": FSDPShardingUnit("it's", (2,), "float32", 0)})
        module.load_state_dict(module.state_dict(), assign=True)
        with pytest.raises(CollectiveError, match="was replaced after register_hooks") as caught:
            optimizer.step()
    assert caught.value.name == "it's"


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
def test_parameters_of_scripted_modules_are_reduced():
    module = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(2, 1)))
    unit = FSDPShardingUnit("0.weight", (1, 2), "float32", 0)
    with FSDPBackwardHook(FSDP(SingleGroup())) as hook:
        hook.register_hooks(module, {"0.weight": unit}, gradients="full")
        module.requires_grad_(False)
        module[0].weight.requires_grad_(True)
        module(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(module.parameters()).step()
    assert module[0].weight.grad.tolist() == [[1, 1]]


def test_an_optimizer_of_another_module_may_step():
    module, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    unit = FSDPShardingUnit("weight", (1, 2), "float32", 0)
    with FSDPBackwardHook(FSDP(SingleGroup())) as hook:
        hook.register_hooks(module, {"weight": unit})
        module.load_state_dict(module.state_dict(), assign=True)
        torch.optim.SGD(other.parameters()).step()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("a failed backward pass")


@pytest.mark.parametrize("set_to_none", [None, True, False])
def test_gradients_of_an_aborted_pass_are_dropped(set_to_none):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    x = torch.ones(1, 2)
    units = sharding_units(module, SingleGroup())
    with FSDPBackwardHook(FSDP(SingleGroup())) as hook:
        hook.register_hooks(module, units, gradients="full")
        module(x).sum().backward()
        expected = [p.grad.clone() for p in module.parameters()]
        with pytest.raises(RuntimeError, match="a failed backward pass"):
            (9 * module[1](Failing.apply(module[0](x)))).sum().backward()
        if set_to_none is not None:
            module.zero_grad(set_to_none=set_to_none)
        module(x).sum().backward()
    passes = 2 if set_to_none is None else 1
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, passes * gradient)
