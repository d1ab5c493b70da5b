"""Gradients of FSDP2 and DDP that mlstate reduces: two to four processes over gloo."""

import contextlib
import random
import re

import gloo_ranks
import pytest
import torch
from group_model import raises
from summed_gradients import in_rank_order, layers, rows_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mlstate import CollectiveError
from mlstate.collectives import SingleGroup
from mlstate.fsdp import FSDP, FSDPBackwardHook, sharding_units
from mlstate.integrations.torch import all_reduce_with, reduce_scatter_with

pytestmark = [pytest.mark.torch, pytest.mark.timeout(250)]


def sharded(world, **keywords):
    module = layers()
    mesh = init_device_mesh("cpu", (world,))
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh, **keywords)
    return fully_shard(module, mesh=mesh, **keywords)


def scattering(group, **keywords):
    """A module of FSDP2 whose gradients mlstate reduces."""
    module = sharded(group.world_size, **keywords)
    reduce_scatter_with(module, group)
    return module


def fsdp_modules(module):
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def backward(module, inputs):
    module.zero_grad()
    module(inputs).square().sum().backward()


def full(module):
    """The full gradients of an FSDP2 module."""
    return {name: p.grad.full_tensor() for name, p in module.named_parameters()}


def own_gradients(rank, step=0, dtype=torch.float32):
    """Gradients of one rank, before any reduction."""
    module = layers().to(dtype)
    backward(module, rows_of(rank, step).to(dtype))
    return {name: p.grad for name, p in module.named_parameters()}


def means(group, dtype=torch.float32, step=0, divisor=None):
    """Sums in the order of ranks, in float32, divided and rounded once."""
    world = group.world_size
    return in_rank_order(
        range(world), lambda rank: own_gradients(rank, step, dtype), divisor or world
    )


def same(actual, expected):
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, (name, actual[name].dtype, value.dtype)
        assert torch.equal(actual[name], value), (name, actual[name], value)


def same_but(layer, gradients, expected):
    """Compare gradients; in one layer, all must be NaN."""
    for name, gradient in gradients.items():
        if name.startswith(f"{layer}."):
            assert gradient.isnan().all()
        else:
            assert torch.equal(gradient, expected[name])


def train_with_scaler(module, scaler, rank, overflows):
    """Weights after a step of SGD; `overflows`: one row of this rank's gradient is infinite."""
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    first = next(m for m in module.modules() if isinstance(m, torch.nn.Linear))

    def overflow(gradient):
        is_bad = overflows & (torch.arange(gradient.shape[1]) == 0)
        return gradient.masked_fill(is_bad, torch.inf)

    handle = first.register_forward_hook(lambda *args: args[2].register_hook(overflow) and None)
    module.zero_grad()
    try:
        scaler.scale(module(rows_of(rank)).square().sum()).backward()
    finally:
        handle.remove()
    scaler.step(sgd)
    scaler.update()
    weights = [p.detach() for p in module.parameters()]
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for p in weights]


def check_remedy_for_overflow(group, reduced_module):
    """A scaler skips a step that overflows on one rank if the remedy of the error is applied."""
    is_bad_rank = group.rank == group.world_size - 1
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    arguments = (scaler, group.rank)
    error = raises(
        CollectiveError, "GradScaler", train_with_scaler, reduced_module(), *arguments, is_bad_rank
    )
    remedy = dict([re.search(r"pass (\w+)='(\w+)'", str(error)).groups()])
    module = reduced_module(**remedy)
    before = train_with_scaler(module, *arguments, False)
    after = train_with_scaler(module, *arguments, is_bad_rank)
    assert all(map(torch.equal, before, after)) and scaler.get_scale() == 4.0
    moved = train_with_scaler(module, *arguments, False)
    assert all(each.isfinite().all() for each in moved) and scaler.get_scale() == 4.0
    assert not any(map(torch.equal, before, moved))


# ---- FSDP2 ----


@gloo_ranks.run_on(2, 3)
def test_fsdp2_skips_an_overflow_by_the_remedy_of_its_error(group):
    def reduced_module(**options):
        module = sharded(group.world_size)
        reduce_scatter_with(module, group, **options)
        return module

    check_remedy_for_overflow(group, reduced_module)


@gloo_ranks.run_on(2, 3, 4)
def test_fsdp2_sums_in_the_order_of_ranks(group):
    module = scattering(group)
    for step in range(3):  # the memory is reused
        backward(module, rows_of(group.rank, step))
        same(full(module), means(group, step=step))


@gloo_ranks.run_on(2, 3, 4)
def test_fsdp2_has_the_bits_of_torch(group):
    for policy in (
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.float16),
    ):
        torch_model = sharded(group.world_size, mp_policy=policy)
        model = scattering(group, mp_policy=policy)
        for module in (torch_model, model):
            for inner in fsdp_modules(module):
                inner.set_force_sum_reduction_for_comms(policy.param_dtype == torch.float16)
            backward(module, rows_of(group.rank))
        if group.world_size == 2:
            same(full(model), full(torch_model))
        else:  # torch adds bfloat16 in another order, and rounds each sum
            for name, gradient in full(torch_model).items():
                torch.testing.assert_close(full(model)[name], gradient, rtol=0.05, atol=0.05)


@gloo_ranks.run_on(2, 3, 4)
def test_fsdp2_sums_small_floats_in_float32(group):
    for dtype, reduced in (
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced)
        module = scattering(group, mp_policy=policy)

        def wide(rank, dtype=dtype):
            return {name: g.float() for name, g in own_gradients(rank, dtype=dtype).items()}

        exact = in_rank_order(range(group.world_size), wide, group.world_size)
        rounded = {name: mean.to(reduced or dtype).float() for name, mean in exact.items()}
        for _ in range(2):
            backward(module, rows_of(group.rank))
            same(full(module), rounded)


@gloo_ranks.run_on(2, 3)
def test_fsdp2_names_the_rank_with_another_divisor(group):
    module = scattering(group)
    module[2].set_gradient_divide_factor(4.0 if group.rank else 8.0)
    error = raises(CollectiveError, "'2': ", backward, module, rows_of(group.rank))
    assert "rank 0: gradient_divide_factor=8.0" in str(error), str(error)
    same_but("2", full(module), means(group))


@gloo_ranks.run_on(2, 3, 4)
def test_fsdp2_with_replicas_of_its_shards(group):
    import torch.distributed as dist

    from mlstate.integrations.torch import TorchGroup

    world = group.world_size
    if world % 2:
        return
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    halves = [list(range(world // 2)), list(range(world // 2, world))]
    process_groups = [dist.new_group(ranks) for ranks in halves]
    with TorchGroup(process_groups[group.rank >= world // 2]) as shard_group:
        for keywords in ({}, {"reshard_after_forward": False}):
            module = layers()
            for layer in (module[0], module[2], module):
                fully_shard(layer, mesh=mesh, **keywords)
            if world > 2:
                raises(ValueError, "is sharded among", reduce_scatter_with, module, group)
            reduce_scatter_with(module, shard_group)
            backward(module, rows_of(group.rank))
            first, second = (in_rank_order(half, own_gradients, len(half)) for half in halves)
            same(full(module), {name: (first[name] + second[name]) / 2 for name in first})


@gloo_ranks.run_on(2, 3)
def test_fsdp2_applies_the_divide_factor(group):
    module = scattering(group)
    for factor, force in ((8.0, False), (1.0, False), (group.world_size, False), (8.0, True)):
        for inner in fsdp_modules(module):
            inner.set_gradient_divide_factor(factor)
            inner.set_force_sum_reduction_for_comms(force)
        backward(module, rows_of(group.rank))
        same(full(module), means(group, divisor=factor))


@gloo_ranks.run_on(2, 3)
def test_fsdp2_accumulates(group):
    module = scattering(group)
    module.zero_grad()
    module(rows_of(group.rank)).square().sum().backward()
    module(rows_of(group.rank, 1)).square().sum().backward()
    sums = means(group)
    more = means(group, step=1)
    same(full(module), {name: sums[name] + more[name] for name in sums})
    module.zero_grad()
    module.set_requires_gradient_sync(False)
    module(rows_of(group.rank)).square().sum().backward()
    module.set_requires_gradient_sync(True)
    module(rows_of(group.rank, 1)).square().sum().backward()
    for name, gradient in full(module).items():
        torch.testing.assert_close(gradient, sums[name] + more[name])


@gloo_ranks.run_on(2, 3)
def test_fsdp2_under_activation_checkpointing(group):
    from torch.utils.checkpoint import checkpoint

    module = scattering(group)
    module.zero_grad()
    checkpoint(module, rows_of(group.rank), use_reentrant=False).square().sum().backward()
    same(full(module), means(group))


@gloo_ranks.run_on(2, 3)
def test_fsdp2_names_the_nonfinite_rank(group):
    for bad in range(group.world_size):
        is_bad_rank = group.rank == bad
        module = scattering(group)
        inputs = rows_of(group.rank)
        handle = module[2].register_full_backward_hook(
            lambda m, grad_outputs, grad_inputs, is_bad_rank=is_bad_rank: (
                (grad_outputs[0] * torch.inf,) if is_bad_rank else None
            )
        )
        error = raises(CollectiveError, "'0': NaN or infinite elements", backward, module, inputs)
        assert f"(rank {bad}: " in str(error), str(error)
        assert error.rank == bad
        handle.remove()
        expected = means(group)
        same_but("0", full(module), expected)
        backward(module, inputs)  # the group and FSDP2 still work
        same(full(module), expected)
        reduce_scatter_with(module, group, nonfinite="allow")
        if is_bad_rank:
            inputs = inputs * torch.nan
        backward(module, inputs)
        assert all(gradient.isnan().any() for gradient in full(module).values())


@gloo_ranks.run_on(2, 3)
def test_fsdp2_names_rank_differences(group):
    module = scattering(group)
    module[0].weight.requires_grad_(True)

    def backward_without_a_bias():
        module.zero_grad()
        if group.rank:
            module[2].bias.requires_grad_(False)
        module(rows_of(group.rank)).square().sum().backward()

    try:
        error = raises(CollectiveError, "'2': ", backward_without_a_bias)
    finally:
        module[2].bias.requires_grad_(True)
    assert "ranks do not reduce the same" in str(error), str(error)
    expected = means(group)
    assert torch.equal(module[0].weight.grad.full_tensor(), expected["0.weight"])
    assert torch.equal(module[4].bias.grad.full_tensor(), expected["4.bias"])


@gloo_ranks.run_on(2, 3)
def test_fsdp2_ends_the_pass_if_a_rank_does_not_use_a_module(group):
    class Optional(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.extra, self.last = layers()[0], torch.nn.Linear(13, 13), layers()[2]

        def forward(self, x, uses_extra):
            x = self.first(x)
            return self.last(self.extra(x) if uses_extra else x)

    module, mesh = Optional(), init_device_mesh("cpu", (group.world_size,))
    for each in (module.first, module.extra, module.last, module):
        fully_shard(each, mesh=mesh, reshard_after_forward=False)
    reduce_scatter_with(module, group)
    inputs = rows_of(group.rank)
    for each in (module.first, module.extra, module.last):
        each.unshard()
    loss = module(inputs, group.rank != 1).square().sum()
    error = raises(CollectiveError, "the ranks reduce different modules", loss.backward)
    assert error.name == "extra" and "missing on rank 1 (rank 1 reduces 'first')" in str(error)
    assert "every rank must use the same modules" in str(error)


@gloo_ranks.run_on(2, 3)
def test_fsdp2_refuses_invalid_arguments(group):
    module = sharded(group.world_size)
    raises(ValueError, "is sharded among", reduce_scatter_with, module, SingleGroup())
    raises(ValueError, "no module of FSDP2", reduce_scatter_with, layers(), group)
    raises(ValueError, "nonfinite", reduce_scatter_with, module, group, nonfinite="ignore")
    raises(TypeError, "", reduce_scatter_with, module, None)


# ---- DDP ----


@gloo_ranks.run_on(2, 3)
def test_ddp_skips_an_overflow_by_the_remedy_of_its_error(group):
    def reduced_module(**options):
        module = replicated()
        all_reduce_with(module, group, **options)
        return module

    check_remedy_for_overflow(group, reduced_module)


def replicated(dtype=torch.float32, **keywords):
    return DistributedDataParallel(layers().to(dtype), **keywords)


def reducing(group, dtype=torch.float32, **keywords):
    """A module of DDP whose gradients mlstate reduces."""
    module = replicated(dtype, **keywords)
    all_reduce_with(module, group)
    return module


def own(module):
    return {name: p.grad for name, p in module.module.named_parameters()}


def check_means(group, module):
    """DDP works as before: a backward pass gives the means of the ranks."""
    backward(module, rows_of(group.rank))
    same(own(module), means(group))


@gloo_ranks.run_on(2, 3, 4)
def test_ddp_sums_in_rank_order_for_any_buckets(group):
    for keywords in (
        {"bucket_cap_mb": 25},
        {"bucket_cap_mb": 1e-4},
        {"bucket_cap_mb": 3e-4, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        module = reducing(group, **keywords)
        for step in range(3):  # DDP rebuilds its buckets after the first step
            backward(module, rows_of(group.rank, step))
            same(own(module), means(group, step=step))


@gloo_ranks.run_on(2, 3, 4)
def test_ddp_has_the_bits_of_torch(group):
    for dtype in (torch.float32, torch.bfloat16):
        torch_model, model = replicated(dtype), reducing(group, dtype)
        for module in (torch_model, model):
            backward(module, rows_of(group.rank).to(dtype))
        same(own(model), means(group, dtype))
        if group.world_size == 2:
            same(own(model), own(torch_model))


@gloo_ranks.run_on(2, 3)
def test_ddp_with_parameters_that_one_rank_does_not_use(group):
    last = group.world_size - 1

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.extra = layers(), torch.nn.Linear(6, 6)

        def forward(self, rows, extra):
            return self.layers(self.extra(rows) if extra else rows)

    def gradients(module, rank):
        module(rows_of(rank), extra=rank != last).square().sum().backward()
        inner = getattr(module, "module", module)
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in inner.named_parameters()
        }

    torch.manual_seed(1)
    start = Branches().state_dict()

    def make():
        module = Branches()
        module.load_state_dict(start)
        return module

    module = DistributedDataParallel(make(), find_unused_parameters=True, bucket_cap_mb=1e-4)
    all_reduce_with(module, group)
    world = group.world_size
    expected = in_rank_order(range(world), lambda rank: gradients(make(), rank), world)
    for _ in range(2):
        module.zero_grad()
        same(gradients(module, group.rank), expected)


class Heads(torch.nn.Module):
    """Several layers, of which a call uses some."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(6, 3) for _ in range(5))

    def forward(self, rows, used):
        return sum(head(rows).square().sum() for head, u in zip(self.heads, used, strict=True) if u)


def heads_by_ddp():
    model = DistributedDataParallel(Heads(), find_unused_parameters=True)
    return model.module, model, model


def heads_by_hook(group):
    model = Heads()
    hook = FSDPBackwardHook(FSDP(group, op="mean", allow_unused=True, bucket_bytes=100))
    hook.register_hooks(model, sharding_units(model, group), gradients="full")
    return model, model, hook


@gloo_ranks.run_on(2, 3)
def test_hooks_treat_unused_parameters_as_ddp_does(group):
    for seed in range(4):
        each = [heads_by_ddp(), heads_by_hook(group)]
        adam = [torch.optim.AdamW(model.parameters(), weight_decay=0.1) for model, *_ in each]
        common, rank_random = random.Random(seed), random.Random(10 * seed + group.rank)
        for step in range(8):
            zeros, syncs = common.random() < 0.6, common.random() < 0.7
            absent = {common.randrange(5) for _ in range(3)}
            used = [rank_random.random() < 0.6 and k not in absent for k in range(5)]
            used[min({*range(5)} - absent)] = True  # a pass without parameters has no end
            rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            for _, call, sync in each:
                with contextlib.nullcontext() if syncs else sync.no_sync():
                    call(rows + group.rank, used).backward()
            if syncs:
                ddp_gradients, gradients = (
                    [p.grad for p in model.parameters()] for model, *_ in each
                )
                assert [g is None for g in ddp_gradients] == [g is None for g in gradients], (
                    seed,
                    step,
                )
                for expected, other in zip(ddp_gradients, gradients, strict=True):
                    if expected is not None:
                        torch.testing.assert_close(expected, other)
                for optimizer in adam:
                    optimizer.step()
                    if zeros:
                        optimizer.zero_grad()
        each[1][2].close()


def train_unevenly(model, rank, counts, arguments):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(**arguments):
        for step in range(counts[rank % len(counts)]):
            backward(model, rows_of(rank, step))
            sgd.step()
    return {name: p.detach() for name, p in model.module.named_parameters()}


@gloo_ranks.run_on(2, 3)
def test_ddp_joins_ranks_with_fewer_inputs(group):
    for counts in ([2, 4, 3], [3, 0, 1], [0, 2, 0]):
        for keywords in ({}, {"bucket_cap_mb": 1e-4}, {"find_unused_parameters": True}):
            for arguments in ({}, {"divide_by_initial_world_size": False}):
                torch_model, mlstate_model = (replicated(**keywords) for _ in range(2))
                all_reduce_with(mlstate_model, group)
                models = (torch_model, mlstate_model)
                each = (train_unevenly(m, group.rank, counts, arguments) for m in models)
                torch.testing.assert_close(*each)


@gloo_ranks.run_on(2, 3)
def test_ddp_divides_small_floats_by_the_ranks_with_inputs(group):
    module = reducing(group, torch.bfloat16)
    with module.join(divide_by_initial_world_size=False):
        if group.rank == 0:
            backward(module, rows_of(0).to(torch.bfloat16))
            same(own(module), own_gradients(0, dtype=torch.bfloat16))


@gloo_ranks.run_on(2, 3)
def test_ddp_names_the_nonfinite_rank_to_ranks_without_inputs(group):
    module = reducing(group)

    def work():
        with module.join():
            for step in range(1 + group.rank):
                backward(module, rows_of(group.rank) * (torch.nan if step else 1))

    error = raises(CollectiveError, "NaN or infinite elements", work)
    assert error.rank == 1
    module = reducing(group)
    with module.join(enable=False):
        check_means(group, module)


@gloo_ranks.run_on(2, 3)
def test_ddp_names_the_rank_joining_with_another_divisor(group):
    module = reducing(group)

    def work():
        with module.join(divide_by_initial_world_size=group.rank == 0):
            backward(module, rows_of(group.rank))

    raises(CollectiveError, "divide_by_initial_world_size", work)


@gloo_ranks.run_on(2, 3)
def test_ddp_allows_non_finite_gradients(group):
    bad = group.world_size - 1
    module = replicated(bucket_cap_mb=1e-4)
    all_reduce_with(module, group, nonfinite="allow")
    backward(module, rows_of(group.rank) * (torch.inf if group.rank == bad else 1))
    assert all(gradient.isnan().any() for gradient in own(module).values())
    check_means(group, module)


@gloo_ranks.run_on(2, 3)
def test_ddp_accumulates_without_synchronisation(group):
    module = reducing(group, bucket_cap_mb=1e-4)
    module.zero_grad()
    with module.no_sync():
        module(rows_of(group.rank)).square().sum().backward()
    local = {name: gradient.clone() for name, gradient in own(module).items()}
    same(local, own_gradients(group.rank))
    module(rows_of(group.rank, 1)).square().sum().backward()

    def both(rank):
        second = own_gradients(rank, 1)
        return {name: first + second[name] for name, first in own_gradients(rank).items()}

    same(own(module), in_rank_order(range(group.world_size), both, group.world_size))


@gloo_ranks.run_on(2, 3)
def test_ddp_names_the_nonfinite_rank(group):
    bad = group.world_size - 1
    module = reducing(group, bucket_cap_mb=1e-4)
    backward(module, rows_of(group.rank))
    backward(module, rows_of(group.rank))
    handle = module.module[0].weight.register_hook(
        lambda gradient: gradient * torch.nan if group.rank == bad else None
    )
    error = raises(CollectiveError, "'0.weight': ", backward, module, rows_of(group.rank))
    assert f"rank {bad}: NaN or infinite elements" in str(error), str(error)
    assert (error.name, error.rank) == ("0.weight", bad)
    expected = means(group)
    assert torch.equal(module.module[4].weight.grad, expected["4.weight"])
    assert torch.equal(module.module[2].weight.grad, expected["2.weight"])
    handle.remove()
    check_means(group, module)


@gloo_ranks.run_on(2, 3)
def test_ddp_names_rank_differences(group):
    dtype = torch.float64 if group.rank == 0 else torch.float32
    module = reducing(group, dtype, init_sync=False)
    inputs = rows_of(group.rank).to(dtype)
    error = raises(CollectiveError, "'0.weight': ranks do not reduce", backward, module, inputs)
    assert "float64 (13, 6)" in str(error), str(error)
    same(own(module), own_gradients(group.rank, dtype=dtype))
    module = reducing(group)
    check_means(group, module)


@gloo_ranks.run_on(2, 3)
def test_ddp_refuses_invalid_arguments(group):
    raises(TypeError, "DistributedDataParallel", all_reduce_with, layers(), group)
    raises(ValueError, "same ranks", all_reduce_with, replicated(), SingleGroup())
    raises(ValueError, "nonfinite", all_reduce_with, replicated(), group, nonfinite="ignore")
    raises(TypeError, "", all_reduce_with, replicated(), None)
