"""Groups of torch.distributed over NCCL, with one rank: operations, hooks, FSDP2, saves."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from device_training import bits_of  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import mlstate  # noqa: E402
from mlstate.checkpoint import CheckpointManager, save_async  # noqa: E402
from mlstate.collectives import SingleGroup  # noqa: E402
from mlstate.distributed import DistributedStateCollector  # noqa: E402
from mlstate.fsdp import FSDP, FSDPBackwardHook, sharding_units  # noqa: E402
from mlstate.integrations.torch import (  # noqa: E402
    TorchGroup,
    all_reduce_with,
    reduce_scatter_with,
)


@pytest.fixture(scope="module", params=["nccl", "cpu:gloo,cuda:nccl"])
def group(request, device, tmp_path_factory):
    """A group of one rank."""
    options = {"device_id": device} if request.param == "nccl" and device.type == "cuda" else {}
    backend = request.param if device.type == "cuda" else "gloo"
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, **options)
    try:
        with TorchGroup(check=True) as wrapped:
            yield wrapped
    finally:
        dist.destroy_process_group()


def model_on(device, seed=1):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
    return torch.nn.Sequential(*layers).to(device)


def gradients(model):
    """The gradients of a pass over a fixed batch, by name."""
    model.zero_grad()
    device = next(model.parameters()).device
    model(torch.ones(8, 16, device=device)).square().sum().backward()
    return {n: p.grad for n, p in model.named_parameters()}


# ---- operations ----


@pytest.mark.parametrize("is_array", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_operations_of_a_single_rank_return_its_values(device, group, is_array, asynchronous):
    value = (
        np.arange(6.0).reshape(3, 2) if is_array else torch.arange(6.0, device=device).view(3, 2)
    )
    for dtype in ("float32", "bfloat16", "uint8") if not is_array else ("float32",):
        each = value.astype(dtype) if is_array else value.to(getattr(torch, dtype))
        calls = (
            lambda e=each, **o: group.all_gather(e, **o),
            lambda e=each, **o: group.all_reduce(e, **o),
            lambda e=each, **o: group.reduce_scatter(e, **o),
            lambda e=each, **o: group.broadcast(e, root=0, **o),
        )
        for call in calls:
            result = call(async_op=True).wait() if asynchronous else call()
            assert type(result) is type(each) and bits_of(result) == bits_of(each)
            assert is_array or result.device == device
    group.barrier(timeout=20)
    assert group.gather_bytes(b"ready", timeout=20) == [b"ready"]


def test_operations_follow_the_current_stream(device, stream, group):
    tensor = torch.zeros(1 << 20, device=device)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(device))
        torch.cuda._sleep(100_000_000)
        tensor.fill_(2)
        work = group.all_reduce(tensor, async_op=True)
        assert work.wait().eq(2).all() and group.all_gather(tensor).eq(2).all()


# ---- gradients ----


@pytest.mark.parametrize("kind", ["full", "shard"])
@pytest.mark.parametrize("is_single", [False, True])
def test_hooks_keep_gradients_of_one_rank(device, group, kind, is_single):
    expected = bits_of(gradients(model_on(device)))
    used, model = SingleGroup() if is_single else group, model_on(device)
    hook = FSDPBackwardHook(FSDP(used, op="mean"))
    units = sharding_units(model, used)
    hook.register_hooks(model, units, gradients=kind)
    for _ in range(2):
        result = gradients(model)
        if kind == "shard":
            assert not any(value is not None for value in result.values())
            result = {n: units[n].local_gradient.view(units[n].shape) for n in units}
        assert all(each.device == device for each in result.values())
        assert bits_of({n: result[n] for n in expected}) == expected
    hook.close()


def test_hooks_wait_for_the_stream_of_the_backward_pass(device, stream):
    model = torch.nn.Linear(1024, 1024, bias=False, device=device)  # reduced during the pass
    x = torch.full((4, 1024), 2.0, device=device)
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    units = sharding_units(model, SingleGroup())
    hook.register_hooks(model, units)

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            torch.cuda._sleep(100_000_000)
            return gradient * 3

    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(device))
        Late.apply(model(x)).sum().backward()
        assert units["weight"].local_gradient.eq(24).all()
    hook.close()


@pytest.mark.parametrize("fails", [False, True])
def test_ddp_and_fsdp2_keep_gradients_of_one_rank(device, group, fails):
    expected = gradients(model_on(device))
    index = [device.index] if device.type == "cuda" else None
    parallel = DistributedDataParallel(model_on(device), device_ids=index)
    all_reduce_with(parallel, group)
    sharded = fully_shard(model_on(device), mesh=init_device_mesh(device.type, (1,)))
    reduce_scatter_with(sharded, group)
    for model in (parallel, sharded):
        if fails and model is parallel:
            with torch.no_grad():
                model.module[2].bias[0] = float("nan")
            with pytest.raises(mlstate.CollectiveError, match=r"NaN"):
                gradients(model)
            continue
        result = gradients(model)
        for name, value in expected.items():
            got = result[name if model is sharded else f"module.{name}"]
            assert bits_of(got.full_tensor() if model is sharded else got) == bits_of(value)


# ---- states of FSDP2 ----


def trained(device, seed, steps):
    model = fully_shard(model_on(device, seed), mesh=init_device_mesh(device.type, (1,)))
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        train(model, adamw, step)
    return model, adamw


def train(model, adamw, step):
    device = next(model.parameters()).device
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device)
    adamw.zero_grad()
    model(x).square().sum().backward()
    adamw.step()


def local(model, adamw):
    """The bits of the local parts of parameters and states."""
    states = [adamw.state[p] for p in model.parameters()]
    parts = [*model.parameters(), *(each[key] for each in states for key in sorted(each))]
    return bits_of([p.to_local() if hasattr(p, "to_local") else p for p in parts])


@pytest.mark.parametrize("how", ["save", "save_async", "manager"])
def test_a_model_of_fsdp2_continues_as_without_a_load(device, group, path, how):
    model, adamw = trained(device, 1, 3)
    if how == "save":
        mlstate.save(path, model, adamw, group=group)
    else:
        other = TorchGroup(dist.new_group(backend="gloo"))
        with CheckpointManager(f"{path}-steps") as manager:
            handle = (
                save_async(path, model, adamw, group=other)
                if how == "save_async"
                else manager.save_async(3, model, adamw, group=other)
            )
            handle.staged(60)
            train(model, adamw, 0)  # not stored
            handle.wait(60)
        model, adamw = trained(device, 1, 3)
    for step in range(3, 5):
        train(model, adamw, step)
    source = f"{path}-steps" if how == "manager" else path
    into, optimizer = trained(device, 2, 1)
    places = [p.to_local().data_ptr() for p in into.parameters()]
    mlstate.load(source, into={"model": into, "optimizer": optimizer}, group=group)
    assert places == [p.to_local().data_ptr() for p in into.parameters()]
    for step in range(3, 5):
        train(into, optimizer, step)
    assert local(into, optimizer) == local(model, adamw)
    unsharded = model_on(device, 3)
    mlstate.load(source, into={"model": unsharded})
    arrays = DistributedStateCollector(group).gather_full_state(into)
    assert set(arrays) == set(unsharded.state_dict())
