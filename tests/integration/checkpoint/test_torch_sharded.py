"""States of torch modules on several ranks: two and four processes over gloo."""

import pickle
import tracemalloc

import gloo_ranks
import numpy as np
import pytest
import torch
from group_model import raises
from rank_threads import Messages
from sharded_models import flat, model, sharded, train, trained
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mlstate
from mlstate import CollectiveError, CompatibilityError
from mlstate.checkpoint import Layout
from mlstate.distributed import DistributedStateCollector

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]


def same(actual, expected):
    assert set(actual) == set(expected), (set(actual), set(expected))
    for name, value in expected.items():
        tensor = torch.as_tensor(np.asarray(actual[name]) if name not in actual else actual[name])
        assert tensor.dtype == value.dtype, (name, tensor.dtype, value.dtype)
        assert torch.equal(tensor, value.detach()), (name, tensor, value)


def check_states(states, module, optimizer):
    """Compare gathered states with the states of a plain module's optimizer."""
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state[parameter].items():
            torch.testing.assert_close(torch.as_tensor(states[f"{name}.{key}"]), value)


def gathered(group, source, **keywords):
    """The full state on rank 0, gathered in messages of a few bytes; None on other ranks."""
    messages = Messages(group)
    full = DistributedStateCollector(messages).gather_full_state(source, max_bytes=64, **keywords)
    assert max(messages.sizes["all_to_all"], default=0) <= 64
    if group.rank:
        assert full is None
        return None
    return full


def check_gathered(group, source, expected):
    """Gather the full state and compare it; return it on rank 0, None on other ranks."""
    full = gathered(group, source)
    if full is not None:
        same(full, expected)
    return full


def merged(group, source):
    """The full state on every rank, merged from states that were sent whole."""
    collector = DistributedStateCollector(group)
    state = dict(collector.collect_local_state(source))
    states = [pickle.loads(data) for data in group.gather_bytes(pickle.dumps(state))]
    return collector.merge_states(states)


def fill(module):
    """Set other elements, so that a broadcast changes them."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.fill_(-1)


def sent_back(group, module, full):
    """Rank 0 distributes a full state into a module that first got other elements."""
    if full is not None:  # replicas are the module's own arrays
        full = {name: value.clone() for name, value in full.items()}
    fill(module)
    messages = Messages(group)
    DistributedStateCollector(messages).broadcast_state(module, source=full, max_bytes=64)
    assert max(messages.sizes["broadcast"], default=0) <= 64


def local_state(group, source, **keywords):
    return DistributedStateCollector(group).collect_local_state(source, **keywords)


def refused(group, error, text, source):
    """No rank gathers the full state; return the error."""
    return raises(error, text, DistributedStateCollector(group).gather_full_state, source)


# ---- replicas ----


@gloo_ranks.run_on(2)
def test_modules_and_their_wrappers_have_the_same_names(group):
    expected = list(model().state_dict())
    for wrapped in (
        model(),
        DistributedDataParallel(model()),
        torch.nn.DataParallel(model()),
        torch.compile(model()),
        torch.compile(DistributedDataParallel(model())),
        DistributedDataParallel(torch.compile(model())),
    ):
        state = local_state(group, wrapped)
        assert list(state) == expected, list(state)
        inner = dict(wrapped.named_parameters())
        pointers = {tensor.data_ptr() for tensor in inner.values()}
        assert pointers <= {tensor.data_ptr() for tensor in state.values()}
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        for parameter in wrapped.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        states = local_state(group, optimizer, model=wrapped)
        assert {name.rpartition(".")[0] for name in states} == set(expected) - {"scale"}
        assert states.optimizer_type == "sgd"
    nested = torch.nn.ModuleDict({"module": torch.nn.Linear(1, 1)})
    assert list(local_state(group, nested)) == ["module.weight", "module.bias"]
    both = local_state(group, DistributedDataParallel(nested))
    assert list(both) == ["module.weight", "module.bias"]


@gloo_ranks.run_on(2)
def test_replicas_of_ddp_are_compared(group):
    module = DistributedDataParallel(model())
    optimizer = trained(module)
    full = gathered(group, module)
    if group.rank == 0:
        same(full, module.module.state_dict())
        assert full["0.weight"].data_ptr() == module.module[0].weight.data_ptr()
        model().load_state_dict(full)
    full = gathered(group, optimizer, model=module)
    if group.rank == 0:
        assert full.step == 2
        other = torch.optim.Adam((fresh := model()).parameters())
        other.load_state_dict(full.to_torch(other, fresh))
    changed = group.world_size - 1
    if group.rank == changed:
        with torch.no_grad():
            module.module[3].weight[0, 2] += 1
    words = f"3.weight: the elements on rank {changed} differ from those on rank"
    error = refused(group, CompatibilityError, words, module)
    assert [(d.kind, d.name, d.ranks) for d in error.differences] == [
        ("elements", "3.weight", (changed,))
    ]
    DistributedStateCollector(group).broadcast_state(module)
    assert gathered(group, module, names="3") is None or group.rank == 0


@gloo_ranks.run_on(2)
def test_broadcast_synchronizes_replicas_and_bumps_versions(group):
    torch.manual_seed(group.rank)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2).to(torch.bfloat16))
    weight = module[0].weight
    squared = (weight * weight).sum()
    DistributedStateCollector(group).broadcast_state(module, root=1)
    raises(RuntimeError, "modified by an inplace operation", squared.backward)
    torch.manual_seed(1)
    expected = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2).to(torch.bfloat16))
    same(module.state_dict(), expected.state_dict())


@gloo_ranks.run_on(2)
def test_numbers_of_optimizers_are_filled_too(group):
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(module.parameters())
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    optimizer.state[module.weight]["count"] = group.rank + 5
    DistributedStateCollector(group).broadcast_state(optimizer, model=module, root=1)
    assert optimizer.state[module.weight]["count"] == 6


# ---- FSDP2 ----


@gloo_ranks.run_on(2, 4)
def test_fsdp2_is_assembled(group):
    for dtype in (torch.float32, torch.bfloat16):
        module = sharded(model(dtype))
        state = local_state(group, module)
        shard = state["0.weight"]
        assert (shard.layout, shard.index) == (Layout.rows(group.world_size), group.rank)
        local = module[0].weight.to_local()
        assert shard.array.shape == local.shape
        assert not local.numel() or shard.array.data_ptr() == local.data_ptr()
        full = check_gathered(group, module, model(dtype).state_dict())
        if dtype == torch.float32:
            same(merged(group, module), model().state_dict())
        sent_back(group, module, full)
        for name, tensor in module.state_dict().items():
            full_tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(full_tensor, model(dtype).state_dict()[name]), name


@gloo_ranks.run_on(2)
def test_optimizers_of_fsdp2_are_assembled(group):
    module, unsharded = sharded(model()), model()
    rank_optimizer, optimizer = trained(module), trained(unsharded)
    full = gathered(group, rank_optimizer, model=module)
    state = local_state(group, rank_optimizer, model=module)
    assert state.step == 2
    assert state["0.bias.exp_avg"].layout == Layout.rows(group.world_size)
    if full is not None:
        assert full.parameters() == [name for name, _ in unsharded.named_parameters()]
        check_states(full, unsharded, optimizer)
        other = torch.optim.Adam((fresh := model()).parameters())
        other.load_state_dict(full.to_torch(other, fresh))
    copies = full if full is None else {name: value.clone() for name, value in full.items()}
    for by_state in rank_optimizer.state.values():
        by_state["exp_avg"].zero_()
    DistributedStateCollector(group).broadcast_state(rank_optimizer, model=module, source=copies)
    again = gathered(group, rank_optimizer, model=module)
    if again is not None:
        same(again, copies)


@gloo_ranks.run_on(2)
def test_module_between_forward_and_backward_saves_its_shards(group):
    module = sharded(model())
    optimizer = trained(module, steps=1)
    loss = module(torch.ones(4, 3)).sum()
    full = gathered(group, module)
    states = gathered(group, optimizer, model=module)
    loss.backward()
    if full is not None:
        assert full["0.weight"].shape == states["0.weight.exp_avg"].shape == (5, 3)


@gloo_ranks.run_on(2)
def test_memory_is_bounded(group):
    rows, columns = 4096, 1024
    layout = Layout.axis(1, group.world_size)  # no parameter is contiguous at the root
    shape = (rows, columns)
    part = np.full(layout.shape(shape, group.rank), group.rank, np.float32)
    state = {"w": mlstate.checkpoint.Shard(part, layout, group.rank, shape=shape)}
    collector = DistributedStateCollector(group)
    collector.gather_full_state({"w": np.zeros(3)})
    largest = 1 << 20
    tracemalloc.start()
    full = collector.gather_full_state(state, max_bytes=largest)
    peak = tracemalloc.get_traced_memory()[1]
    result = 0 if full is None else full["w"].nbytes
    assert peak < result + largest + (1 << 18), (peak, result)
    if full is not None:
        assert (full["w"] == np.repeat(np.arange(group.world_size), columns // 2)).all()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    part[:] = -1
    collector.broadcast_state(state, source=full, max_bytes=largest)
    assert tracemalloc.get_traced_memory()[1] - before < largest + (1 << 18)
    tracemalloc.stop()
    assert (part == group.rank).all()


@gloo_ranks.run_on(2)
def test_a_missing_shard_is_an_error_everywhere(group):
    state = local_state(group, sharded(model()))
    if group.rank == 1:
        shard = state["0.weight"]
        state["0.weight"] = mlstate.checkpoint.Shard(
            torch.zeros(shard.layout.shape((5, 3), 0)), shard.layout, 0, shape=(5, 3)
        )
    refused(group, CompatibilityError, "0.weight: no rank has part 1 of", state)
    bad = object() if group.rank == 1 else state
    error = TypeError if group.rank == 1 else CollectiveError
    refused(group, error, "expected a mapping", bad)


# ---- FSDP1 ----


@gloo_ranks.run_on(2, 4)
def test_fsdp1_is_assembled(group):
    for original in (False, True):
        unsharded = model()
        module = model()
        module[0] = flat(module[0], original)
        module = flat(module, original)
        state = local_state(group, module)
        assert state["0.weight"].layout == Layout.rows(group.world_size)
        full = check_gathered(group, module, unsharded.state_dict())
        same(merged(group, module), unsharded.state_dict())
        optimizer = torch.optim.Adam(module.parameters())
        assert not local_state(group, optimizer, model=module)
        train(module, optimizer)
        expected = trained(unsharded)
        gathered_state = gathered(group, optimizer, model=module)
        if gathered_state is not None:
            assert gathered_state.step == 2
            assert set(gathered_state.parameters()) == {
                name for name, _ in unsharded.named_parameters()
            }
            check_states(gathered_state, unsharded, expected)
        sent_back(group, module, full)
        same(merged(group, module), model().state_dict())
        other = model() if group.rank else module
        words = "the state is of a module of FSDP1 on rank 0 and of any kind on rank 1"
        refused(group, CollectiveError, words, other)
        raises(
            TypeError,
            "cannot be filled in place",
            DistributedStateCollector(group).broadcast_state,
            optimizer,
            model=module,
        )


# ---- meshes ----


@gloo_ranks.run_on(2)
def test_dtensors_are_shards(group):
    mesh = init_device_mesh("cpu", (group.world_size,))
    tensor = torch.arange(35.0).reshape(5, 7)
    for placement in (Shard(0), Shard(1), Replicate()):
        state = {"w": distribute_tensor(tensor, mesh, [placement]), "p": torch.ones(2)}
        collected = local_state(group, state)["w"]
        assert isinstance(collected, torch.Tensor) == isinstance(placement, Replicate)
        check_gathered(group, state, {"w": tensor, "p": torch.ones(2)})
    partial = DTensor.from_local(tensor, mesh, [Partial()])
    for state in ({"part.w": partial}, distribute_module(torch.nn.Linear(1, 1), mesh)):
        if isinstance(state, dict):
            words = "'part.w' is a DTensor with placements (Partial(sum),)"
            error = raises(TypeError, words, local_state, group, state)
            assert "redistribute() it first" in str(error)
        else:
            gathered(group, state, verify_replicas=False)


@gloo_ranks.run_on(4)
def test_meshes_of_two_dimensions_are_layouts(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    tensor = torch.arange(35.0).reshape(5, 7)
    for placements, layout in (
        ((Shard(0), Shard(1)), Layout([(0, 2), (1, 2)])),
        ((Shard(1), Shard(0)), Layout([(1, 2), (0, 2)])),
        ((Shard(0), Shard(0)), Layout([(0, 2), (0, 2)])),
        ((Replicate(), Shard(1)), Layout.axis(1, 2)),
        ((Shard(0), Replicate()), Layout.rows(2)),
    ):
        state = {"w": distribute_tensor(tensor, mesh, placements)}
        shard = local_state(group, state)["w"]
        assert shard.layout == layout
        check_gathered(group, state, {"w": tensor})


@gloo_ranks.run_on(4)
def test_hybrid_sharding_has_replicas(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = sharded(model(), mesh=mesh)
    shard = local_state(group, module)["0.weight"]
    assert (shard.layout, shard.index, shard.replica) == (
        Layout.rows(2), group.rank % 2, group.rank // 2,
    )  # fmt: skip
    full = check_gathered(group, module, model().state_dict())
    if group.rank == 3:
        with torch.no_grad():
            module[0].weight.to_local()[0, 0] += 1
    words = "0.weight: the elements of part 1 on rank 3 differ from those on rank 1"
    refused(group, CompatibilityError, words, module)
    sent_back(group, module, full)
    same(merged(group, module), model().state_dict())


@gloo_ranks.run_on(4)
def test_hybrid_sharding_of_fsdp1_has_replicas(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for original in (False, True):
        strategy = ShardingStrategy.HYBRID_SHARD
        module = flat(model(), original, device_mesh=mesh, sharding_strategy=strategy)
        shard = local_state(group, module)["0.weight"]
        assert (shard.layout, shard.index) == (Layout.rows(2), group.rank % 2)
        assert shard.replica == group.rank // 2
        full = check_gathered(group, module, model().state_dict())
        sent_back(group, module, full)


@gloo_ranks.run_on(4)
def test_tensor_parallel_modules_under_fsdp_are_assembled(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unsharded = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
    unsharded.load_state_dict(
        {
            k: torch.arange(float(v.numel())).reshape(v.shape)
            for k, v in unsharded.state_dict().items()
        }
    )
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
    module.load_state_dict(unsharded.state_dict())
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    shard = local_state(group, module)["0.weight"]
    assert shard.layout == Layout([(0, 2), (0, 2)])
    assert shard.index == (group.rank % 2) * 2 + group.rank // 2  # tensor parallelism divides first
    full = check_gathered(group, module, unsharded.state_dict())
    sent_back(group, module, full)
    same(merged(group, module), unsharded.state_dict())
