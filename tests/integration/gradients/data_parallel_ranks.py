"""The ranks of test_data_parallel.py: FSDP2 and DDP whose gradients mlstate reduces."""

import torch
from group_model import raises
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_processes import main, scenario

from mlstate import CollectiveError
from mlstate.collectives import SingleGroup
from mlstate.integrations.torch import all_reduce_with, reduce_scatter_with


def layers():
    """Rows that do not divide evenly, and a rank without rows."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 13), torch.nn.Tanh(), torch.nn.Linear(13, 7), torch.nn.Tanh(),
        torch.nn.Linear(7, 1),
    )  # fmt: skip


def data(rank, step=0):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def sharded(world, **keywords):
    module = layers()
    mesh = init_device_mesh("cpu", (world,))
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh, **keywords)
    return fully_shard(module, mesh=mesh, **keywords)


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
    backward(module, data(rank, step).to(dtype))
    return {name: p.grad for name, p in module.named_parameters()}


def in_rank_order(group, dtype=torch.float32, step=0, divisor=None):
    """Sums in the order of ranks, in float32, divided and rounded once."""
    ranks = [own_gradients(rank, step, dtype) for rank in range(group.world_size)]
    sums = {}
    for name in ranks[0]:
        total = ranks[0][name].float()
        for of in ranks[1:]:
            total = total + of[name].float()
        sums[name] = (total / (divisor or group.world_size)).to(ranks[0][name].dtype)
    return sums


def same(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, (name, found[name].dtype, value.dtype)
        assert torch.equal(found[name], value), (name, found[name], value)


# ---- FSDP2 ----


@scenario
def fsdp2_sums_in_the_order_of_ranks(group):
    module = sharded(group.world_size)
    reduce_scatter_with(module, group)
    for step in range(3):  # the memory is reused
        backward(module, data(group.rank, step))
        same(full(module), in_rank_order(group, step=step))


@scenario
def fsdp2_has_the_bits_of_torch(group):
    for policy in (
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.float16),
    ):
        theirs = sharded(group.world_size, mp_policy=policy)
        ours = sharded(group.world_size, mp_policy=policy)
        reduce_scatter_with(ours, group)
        for module in (theirs, ours):
            for inner in fsdp_modules(module):
                inner.set_force_sum_reduction_for_comms(policy.param_dtype == torch.float16)
            backward(module, data(group.rank))
        if group.world_size == 2:
            same(full(ours), full(theirs))
        else:  # torch adds bfloat16 in another order, and rounds each sum
            for name, gradient in full(theirs).items():
                torch.testing.assert_close(full(ours)[name], gradient, rtol=0.05, atol=0.05)


@scenario
def fsdp2_sums_small_floats_in_float32(group):
    for given, reduced in (
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ):
        policy = MixedPrecisionPolicy(param_dtype=given, reduce_dtype=reduced)
        module = sharded(group.world_size, mp_policy=policy)
        reduce_scatter_with(module, group)
        ranks = [own_gradients(rank, dtype=given) for rank in range(group.world_size)]
        for step in range(2):
            backward(module, data(group.rank))
            for name, gradient in full(module).items():
                total = ranks[0][name].float()
                for of in ranks[1:]:
                    total = total + of[name].float()
                rounded = (total / group.world_size).to(reduced or given).float()
                assert gradient.dtype == torch.float32
                assert torch.equal(gradient, rounded), (name, step)


@scenario
def fsdp2_names_who_divides_otherwise(group):
    module = sharded(group.world_size)
    reduce_scatter_with(module, group)
    module[2].set_gradient_divide_factor(4.0 if group.rank else 8.0)
    error = raises(CollectiveError, "'2': ", backward, module, data(group.rank))
    assert "rank 0: gradient_divide_factor=8.0" in str(error), str(error)
    expected = in_rank_order(group)
    for name, gradient in full(module).items():
        if name.startswith("2."):
            assert gradient.isnan().all()
        else:
            assert torch.equal(gradient, expected[name])


@scenario
def fsdp2_with_replicas_of_its_shards(group):
    import torch.distributed as dist

    from mlstate.integrations.torch import TorchGroup

    world = group.world_size
    if world % 2:
        return
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    halves = [list(range(world // 2)), list(range(world // 2, world))]
    theirs = [dist.new_group(ranks) for ranks in halves]
    with TorchGroup(theirs[group.rank >= world // 2]) as mine:
        for keywords in ({}, {"reshard_after_forward": False}):
            module = layers()
            for layer in (module[0], module[2], module):
                fully_shard(layer, mesh=mesh, **keywords)
            if world > 2:
                raises(ValueError, "is sharded among", reduce_scatter_with, module, group)
            reduce_scatter_with(module, mine)
            backward(module, data(group.rank))
            ranks = [own_gradients(rank) for rank in range(world)]
            for name, gradient in full(module).items():
                means = []
                for half in halves:
                    total = ranks[half[0]][name]
                    for rank in half[1:]:
                        total = total + ranks[rank][name]
                    means.append(total / len(half))
                assert torch.equal(gradient, (means[0] + means[1]) / 2), name


@scenario
def fsdp2_divides_as_it_is_told(group):
    module = sharded(group.world_size)
    reduce_scatter_with(module, group)
    for factor, force in ((8.0, False), (1.0, False), (group.world_size, False), (8.0, True)):
        for inner in fsdp_modules(module):
            inner.set_gradient_divide_factor(factor)
            inner.set_force_sum_reduction_for_comms(force)
        backward(module, data(group.rank))
        same(full(module), in_rank_order(group, divisor=factor))


@scenario
def fsdp2_accumulates(group):
    module = sharded(group.world_size)
    reduce_scatter_with(module, group)
    module.zero_grad()
    module(data(group.rank)).square().sum().backward()
    module(data(group.rank, 1)).square().sum().backward()
    sums = in_rank_order(group)
    more = in_rank_order(group, step=1)
    same(full(module), {name: sums[name] + more[name] for name in sums})
    module.zero_grad()
    module.set_requires_gradient_sync(False)
    module(data(group.rank)).square().sum().backward()
    module.set_requires_gradient_sync(True)
    module(data(group.rank, 1)).square().sum().backward()
    for name, gradient in full(module).items():
        torch.testing.assert_close(gradient, sums[name] + more[name])


@scenario
def fsdp2_under_activation_checkpointing(group):
    from torch.utils.checkpoint import checkpoint

    module = sharded(group.world_size)
    reduce_scatter_with(module, group)
    module.zero_grad()
    checkpoint(module, data(group.rank), use_reentrant=False).square().sum().backward()
    same(full(module), in_rank_order(group))


@scenario
def fsdp2_names_who_is_not_finite(group):
    for bad in range(group.world_size):
        here = group.rank == bad
        module = sharded(group.world_size)
        reduce_scatter_with(module, group)
        inputs = data(group.rank)
        handle = module[2].register_full_backward_hook(
            lambda m, given, made, here=here: (given[0] * torch.inf,) if here else None
        )
        error = raises(CollectiveError, "'0': NaN or infinite elements", backward, module, inputs)
        assert f"(rank {bad}: " in str(error), str(error)
        assert error.rank == bad
        handle.remove()
        expected = in_rank_order(group)
        for name, gradient in full(module).items():
            if name.startswith("0."):
                assert gradient.isnan().all()
            else:
                assert torch.equal(gradient, expected[name])
        backward(module, inputs)  # the group and FSDP2 still work
        same(full(module), expected)
        reduce_scatter_with(module, group, nonfinite="allow")
        if here:
            inputs = inputs * torch.nan
        backward(module, inputs)
        assert all(gradient.isnan().any() for gradient in full(module).values())


@scenario
def fsdp2_names_what_ranks_do_not_have_in_common(group):
    module = sharded(group.world_size)
    reduce_scatter_with(module, group)
    module[0].weight.requires_grad_(True)

    def backward_without_a_bias():
        module.zero_grad()
        if group.rank:
            module[2].bias.requires_grad_(False)
        module(data(group.rank)).square().sum().backward()

    try:
        error = raises(CollectiveError, "'2': ", backward_without_a_bias)
    finally:
        module[2].bias.requires_grad_(True)
    assert "ranks do not reduce the same" in str(error), str(error)
    expected = in_rank_order(group)
    assert torch.equal(module[0].weight.grad.full_tensor(), expected["0.weight"])
    assert torch.equal(module[4].bias.grad.full_tensor(), expected["4.bias"])


@scenario
def fsdp2_refuses_what_does_not_fit(group):
    module = sharded(group.world_size)
    raises(ValueError, "is sharded among", reduce_scatter_with, module, SingleGroup())
    raises(ValueError, "no module of FSDP2", reduce_scatter_with, layers(), group)
    raises(ValueError, "nonfinite", reduce_scatter_with, module, group, nonfinite="ignore")
    raises(TypeError, "", reduce_scatter_with, module, None)


# ---- DDP ----


def replicated(**keywords):
    return DistributedDataParallel(layers(), **keywords)


def own(module):
    return {name: p.grad for name, p in module.module.named_parameters()}


@scenario
def ddp_sums_in_the_order_of_ranks_whatever_the_buckets(group):
    for keywords in (
        {"bucket_cap_mb": 25},
        {"bucket_cap_mb": 1e-4},
        {"bucket_cap_mb": 3e-4, "gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        module = replicated(**keywords)
        all_reduce_with(module, group)
        for step in range(3):  # DDP rebuilds its buckets after the first step
            backward(module, data(group.rank, step))
            same(own(module), in_rank_order(group, step=step))


@scenario
def ddp_has_the_bits_of_torch(group):
    for dtype in (torch.float32, torch.bfloat16):
        theirs = DistributedDataParallel(layers().to(dtype))
        ours = DistributedDataParallel(layers().to(dtype))
        all_reduce_with(ours, group)
        for module in (theirs, ours):
            backward(module, data(group.rank).to(dtype))
        same(own(ours), in_rank_order(group, dtype))
        if group.world_size == 2:
            same(own(ours), own(theirs))


@scenario
def ddp_with_parameters_that_one_rank_does_not_use(group):
    last = group.world_size - 1

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.extra = layers(), torch.nn.Linear(6, 6)

        def forward(self, rows, extra):
            return self.layers(self.extra(rows) if extra else rows)

    def gradients(module, rank):
        module(data(rank), extra=rank != last).square().sum().backward()
        inner = getattr(module, "module", module)
        return {name: p.grad for name, p in inner.named_parameters()}

    torch.manual_seed(1)
    start = Branches().state_dict()

    def make():
        module = Branches()
        module.load_state_dict(start)
        return module

    module = DistributedDataParallel(make(), find_unused_parameters=True, bucket_cap_mb=1e-4)
    all_reduce_with(module, group)
    ranks = [gradients(make(), rank) for rank in range(group.world_size)]
    for _ in range(2):
        module.zero_grad()
        found = gradients(module, group.rank)
        for name, gradient in found.items():
            total = torch.zeros_like(gradient)
            for of in ranks:
                total = total + (0 if of[name] is None else of[name])
            assert torch.equal(gradient, total / group.world_size), name


@scenario
def ddp_passes_on_what_is_not_finite(group):
    bad = group.world_size - 1
    module = replicated(bucket_cap_mb=1e-4)
    all_reduce_with(module, group, nonfinite="allow")
    backward(module, data(group.rank) * (torch.inf if group.rank == bad else 1))
    assert all(gradient.isnan().any() for gradient in own(module).values())
    backward(module, data(group.rank))
    same(own(module), in_rank_order(group))


@scenario
def ddp_accumulates_without_synchronisation(group):
    module = replicated(bucket_cap_mb=1e-4)
    all_reduce_with(module, group)
    module.zero_grad()
    with module.no_sync():
        module(data(group.rank)).square().sum().backward()
    local = {name: gradient.clone() for name, gradient in own(module).items()}
    same(local, own_gradients(group.rank))
    module(data(group.rank, 1)).square().sum().backward()
    expected = {}
    for rank in range(group.world_size):
        first, second = own_gradients(rank), own_gradients(rank, 1)
        for name in first:
            both = first[name] + second[name]
            expected[name] = expected[name] + both if name in expected else both
    same(own(module), {name: total / group.world_size for name, total in expected.items()})


@scenario
def ddp_names_who_is_not_finite(group):
    bad = group.world_size - 1
    module = replicated(bucket_cap_mb=1e-4)
    all_reduce_with(module, group)
    backward(module, data(group.rank))
    backward(module, data(group.rank))
    handle = module.module[0].weight.register_hook(
        lambda gradient: gradient * torch.nan if group.rank == bad else None
    )
    error = raises(CollectiveError, "'0.weight': ", backward, module, data(group.rank))
    assert f"rank {bad}: NaN or infinite elements" in str(error), str(error)
    assert (error.name, error.rank) == ("0.weight", bad)
    expected = in_rank_order(group)
    assert torch.equal(module.module[4].weight.grad, expected["4.weight"])
    assert torch.equal(module.module[2].weight.grad, expected["2.weight"])
    handle.remove()
    backward(module, data(group.rank))
    same(own(module), expected)


@scenario
def ddp_names_what_ranks_do_not_have_in_common(group):
    dtype = torch.float64 if group.rank == 0 else torch.float32
    module = DistributedDataParallel(layers().to(dtype), init_sync=False)
    all_reduce_with(module, group)
    inputs = data(group.rank).to(dtype)
    error = raises(CollectiveError, "'0.weight': ranks do not reduce", backward, module, inputs)
    assert "float64 (13, 6)" in str(error), str(error)
    same(own(module), own_gradients(group.rank, dtype=dtype))
    module = replicated()
    all_reduce_with(module, group)
    backward(module, data(group.rank))
    same(own(module), in_rank_order(group))


@scenario
def ddp_refuses_what_does_not_fit(group):
    raises(TypeError, "DistributedDataParallel", all_reduce_with, layers(), group)
    raises(ValueError, "same ranks", all_reduce_with, replicated(), SingleGroup())
    raises(ValueError, "nonfinite", all_reduce_with, replicated(), group, nonfinite="ignore")
    raises(TypeError, "", all_reduce_with, replicated(), None)


if __name__ == "__main__":
    main()
