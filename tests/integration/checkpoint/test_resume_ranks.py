"""Checkpoints of sharded modules and their optimizers: two and four processes over gloo."""

import copy
import re
import warnings
from functools import partial

import gloo_ranks
import pytest
import torch
from checkpoint_model import flip_shard
from group_model import raises
from sharded_models import flat, model, sharded, train, trained
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mlstate
from mlstate import CompatibilityError
from mlstate.checkpoint import CheckpointManager, inspect

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(200)]


def wrapped(kind, seed=0, dtype=torch.float32):
    module = model(dtype, seed)
    if kind == "fsdp2":
        return sharded(module)
    if kind == "ddp":
        return DistributedDataParallel(module)
    module[0] = flat(module[0], kind == "fsdp1-orig")
    return flat(module, kind == "fsdp1-orig")


def bits(tensor):
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def local_bits(module, optimizer):
    """This rank's data, bit for bit: parameters, buffers and states."""
    tensors = [bits(t) for t in [*module.parameters(), *module.buffers()]]
    for parameter in module.parameters():
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            tensors.append(bits(value) if isinstance(value, torch.Tensor) else (name, value))
    return tensors


def same(first, second):
    assert len(first) == len(second), (first, second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (a, b)


def refused(group, error, text, folder, into, **keywords):
    """A load is refused on this rank."""
    return raises(error, text, mlstate.load, folder, into=into, group=group, **keywords)


def saved(group, folder, *parts):
    """Save the parts in a new folder, and return it."""
    mlstate.save(folder, *parts, group=group)
    return folder


def loaded(group, folder, module, make=torch.optim.Adam):
    """Load into a module and a new optimizer; return the optimizer."""
    optimizer = make(module.parameters())
    mlstate.load(folder, into={"model": module, "optimizer": optimizer}, group=group)
    return optimizer


def check_resumed(group, folder, module, optimizer, fresh):
    """Save, load into another module and a new optimizer, and compare; return both."""
    saved(group, folder, module, optimizer)
    other = loaded(group, folder, fresh, type(optimizer))
    same(local_bits(fresh, other), local_bits(module, optimizer))
    return folder, other


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
KINDS = ("ddp", "fsdp2", "fsdp1", "fsdp1-orig")


@gloo_ranks.run_on(2, 4)
def test_every_kind_is_filled_in_place(group, tmp_path):
    for kind in KINDS:
        module = wrapped(kind)
        optimizer = trained(module)
        expected = local_bits(module, optimizer)
        folder = saved(group, tmp_path / f"kinds-{kind}", module, optimizer)
        assert sorted(mlstate.load(folder).model) == sorted(model().state_dict())
        fresh = wrapped(kind, seed=5)
        other = torch.optim.Adam(fresh.parameters(), lr=0.5)
        pointers = [p.data_ptr() for p in fresh.parameters()]
        with torch.no_grad():
            fresh(torch.ones(2, 3))  # invalidates the gathered copy of the old elements
        mlstate.load(folder, into={"model": fresh, "optimizer": other}, group=group)
        assert [p.data_ptr() for p in fresh.parameters()] == pointers
        assert other.param_groups[0]["lr"] == 1e-3
        same(local_bits(fresh, other), expected)
        with torch.no_grad():
            assert torch.equal(fresh(torch.ones(2, 3)), module(torch.ones(2, 3))), kind
        addresses = [s["exp_avg"].data_ptr() for s in other.state.values() if "exp_avg" in s]
        train(fresh, other, steps=1)
        mlstate.load(folder, into={"model": fresh, "optimizer": other}, group=group)
        now = [s["exp_avg"].data_ptr() for s in other.state.values() if "exp_avg" in s]
        assert addresses == now  # existing states are filled too
        same(local_bits(fresh, other), expected)


@gloo_ranks.run_on(2, 4)
def test_every_kind_is_loaded_as_every_other(group, tmp_path):
    module = wrapped("fsdp2")
    optimizer = trained(module)
    folder = saved(group, tmp_path / "others", module, optimizer)
    expected = mlstate.load(folder)
    for kind in KINDS:
        fresh = wrapped(kind, seed=5)
        other = loaded(group, folder, fresh)
        again = saved(group, tmp_path / f"others-{kind}", fresh, other)
        got = mlstate.load(again)
        assert got.model == expected.model, kind
        assert got.optimizer == expected.optimizer, kind


@gloo_ranks.run_on(2)
def test_shards_are_stored_without_copies(group, tmp_path):
    module = wrapped("fsdp2")
    optimizer = trained(module, MOMENTUM)
    folder = tmp_path / "own"
    saved = mlstate.save(folder, module, optimizer, group=group)
    shards = [s for s in saved.shards() if s.key in ("0.weight", "0.weight.momentum_buffer")]
    assert {(s.part, s.rank) for s in shards} == {(r, r) for r in range(group.world_size)}
    again = mlstate.save(folder, module, optimizer, group=group)
    assert again.written["new_bytes"] == 0  # the same bytes


def tied(kind, seed):
    torch.manual_seed(seed)
    words, out = torch.nn.Embedding(7, 3), torch.nn.Linear(3, 7, bias=False)
    out.weight = words.weight
    module = torch.nn.Sequential(words, out)
    if kind == "fsdp2":
        return fully_shard(module)
    return flat(module, kind == "fsdp1-orig")


@gloo_ranks.run_on(2)
def test_other_bytes_of_tied_weights_are_an_error_of_all_ranks(group, tmp_path):
    folder = tmp_path / "untied"
    for row in (0, 6):  # of the first and the last rank
        weight = torch.arange(21.0).reshape(7, 3)
        other = weight.clone()
        other[row] += 1
        mlstate.save(folder, {"0.weight": weight, "1.weight": other}, group=group)
        for kind in ("fsdp2", "fsdp1", "fsdp1-orig"):
            module = tied(kind, 3)
            before = [parameter.detach().clone() for parameter in module.parameters()]
            into = {"into": {"model": module}, "group": group}
            text = "'0.weight'] and model['1.weight']"
            raises(CompatibilityError, text, mlstate.load, folder, **into)
            for parameter, value in zip(module.parameters(), before, strict=True):
                assert (parameter.detach() == value).all()


@gloo_ranks.run_on(2)
def test_tied_weights_are_one_tensor_under_two_names(group, tmp_path):
    for kind in ("fsdp2", "fsdp1", "fsdp1-orig"):
        module = tied(kind, 0)
        optimizer = torch.optim.Adam(module.parameters())
        module(torch.arange(7)).square().sum().backward()
        optimizer.step()
        check_resumed(group, tmp_path / f"tied-{kind}", module, optimizer, tied(kind, 3))


class Factored(torch.optim.Optimizer):
    """Keeps squares of gradients by rows and columns, as DTensors with their own placement."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                square = p.grad * p.grad
                if p.ndim < 2:
                    state["variance"] = state.get("variance", 0) + square
                    continue
                row = square.mean(-1, keepdim=True)
                column = square.mean(-2, keepdim=True)
                if hasattr(column, "redistribute"):
                    column = column.redistribute(placements=[Replicate()])
                for name, value in (("row_var", row), ("col_var", column)):
                    state[name] = state[name] + value if name in state else value
                p.add_(p.grad, alpha=-group["lr"])


@gloo_ranks.run_on(2, 4)
def test_factors_record_their_axes(group, tmp_path):
    def wide(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4))

    module, fresh = sharded(wide(0)), sharded(wide(5))
    optimizer = trained(module, Factored)
    folder, other = check_resumed(group, tmp_path / "factors", module, optimizer, fresh)
    records = {t.key: t for t in inspect(folder).tensors()}
    assert records["0.weight.row_var"].axes == (0, None)
    assert records["0.weight.row_var"].shards == group.world_size
    assert records["0.weight.col_var"].axes == (None, 1)
    assert records["0.weight.col_var"].shards == 1
    row = other.state[fresh[0].weight]["row_var"]
    assert row.placements == fresh[0].weight.placements
    assert other.state[fresh[0].weight]["col_var"].placements == (Replicate(),)
    unsharded = wide(5)
    other = Factored(unsharded.parameters())
    mlstate.load(folder, into={"model": unsharded, "optimizer": other}, group=group)
    assert torch.equal(other.state[unsharded[0].weight]["row_var"], row.full_tensor())
    flattened = flat(wide(5))
    into = {"model": flattened, "optimizer": Factored(flattened.parameters())}
    refused(group, CompatibilityError, "FSDP1 flattens parameters", folder, into)


@gloo_ranks.run_on(2)
def test_bfloat16_resumes(group, tmp_path):
    for kind in ("fsdp2", "fsdp1-orig"):
        module = wrapped(kind, dtype=torch.bfloat16)
        optimizer = trained(module, torch.optim.AdamW, dtype=torch.bfloat16)
        fresh = wrapped(kind, seed=2, dtype=torch.bfloat16)
        folder, _ = check_resumed(group, tmp_path / f"half-{kind}", module, optimizer, fresh)
        refused(group, CompatibilityError, "bfloat16", folder, {"model": wrapped(kind, seed=2)})


@gloo_ranks.run_on(2)
def test_steps_of_a_run_are_kept_by_a_manager(group, tmp_path):
    module = wrapped("fsdp2")
    optimizer = torch.optim.Adam(module.parameters())
    with CheckpointManager(tmp_path / "run", keep=2) as manager:
        for step in range(3):
            train(module, optimizer, steps=1)
            manager.save(step, module, optimizer, group=group)
        expected = local_bits(module, optimizer)
        train(module, optimizer)
        if group.rank == 0:
            flip_shard(tmp_path / "run", manager.checkpoint(2).shards()[0])
        group.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            into = {"model": module, "optimizer": optimizer}
            # one rank reads the damaged part: all ranks fall back to the previous step
            assert manager.restore_latest(into=into, group=group).step == 1
        assert any(
            not torch.equal(a, b)
            for a, b in zip(local_bits(module, optimizer), expected, strict=True)
            if isinstance(a, torch.Tensor)
        )
    group.barrier()


# ---- errors ----


@gloo_ranks.run_on(2)
def test_a_sharded_module_without_its_group_is_refused(group, tmp_path):
    world = group.world_size
    for kind in ("fsdp2", "fsdp1", "fsdp1-orig"):
        module = wrapped(kind)
        optimizer = trained(module)
        folder = tmp_path / f"alone-{kind}-{group.rank}"
        words = f"is spread over {world} ranks, and 1 takes part: pass group="
        error = raises(ValueError, words, mlstate.save, folder, module, optimizer)
        assert re.match(r"'(0|1|3)\.(weight|bias)' ", str(error)), error
        raises(ValueError, words, mlstate.save, folder, module)
        text = words if kind == "fsdp2" else "pass the module too"
        raises((ValueError, TypeError), text, mlstate.save, folder, optimizer=optimizer)
        assert not folder.exists()


@gloo_ranks.run_on(2)
def test_other_names_and_shapes_are_refused_on_every_rank(group, tmp_path):
    module = wrapped("fsdp2")
    optimizer = trained(module)
    folder = saved(group, tmp_path / "shapes", module, optimizer)

    def stays(other, kind, text):
        other = {"fsdp2": fully_shard, "fsdp1": flat, "plain": lambda m: m}[kind](other)
        adam = torch.optim.Adam(other.parameters())
        before = local_bits(other, adam)
        refused(group, CompatibilityError, text, folder, {"model": other, "optimizer": adam})
        same(local_bits(other, adam), before)
        assert not adam.state

    for kind in ("fsdp2", "fsdp1", "plain"):
        shape = model()
        shape[0] = torch.nn.Linear(3, 6)
        shape[1], shape[3] = torch.nn.LayerNorm(6), torch.nn.Linear(6, 1)
        stays(shape, kind, "0.bias")
        turned = model()  # with the same number of elements
        turned[0].weight = torch.nn.Parameter(torch.zeros(1, 15))
        stays(turned, kind, "0.weight")
        stays(torch.nn.Sequential(model()), kind, "Missing key(s)")
    # an error that only one rank finds is raised on all, before anything is changed
    other_model = model(seed=3)
    if group.rank == 1:
        other_model[0] = torch.nn.Linear(3, 4)
    before = [bits(p) for p in other_model.parameters()]
    words = "0.bias" if group.rank == 1 else "rank 1: "
    error = refused(group, CompatibilityError, words, folder, {"model": other_model})
    assert group.rank == 1 or error.rank == 1
    same([bits(p) for p in other_model.parameters()], before)


@gloo_ranks.run_on(2)
def test_an_optimizer_of_another_module_is_refused(group, tmp_path):
    folder = tmp_path / "foreign"
    module = wrapped("fsdp2")
    optimizer = trained(module)
    mlstate.save(folder, module, optimizer, group=group)
    for kind in KINDS:
        module, other = wrapped(kind), wrapped(kind)
        optimizer = torch.optim.Adam(other.parameters())
        into = {"model": module, "optimizer": optimizer}
        words = "the optimizer has parameters that"
        refused(group, ValueError, words, folder, into)
        raises(ValueError, words, mlstate.save, folder, module, optimizer, group=group)
    early = model()
    optimizer = torch.optim.Adam(early.parameters())
    module = sharded(early)  # this replaces the module's parameters
    words = "create the optimizer after fully_shard"
    raises(ValueError, words, mlstate.save, folder, module, optimizer, group=group)
    assert mlstate.verify(folder)


@gloo_ranks.run_on(2)
def test_placements_without_a_layout_are_named(group, tmp_path):
    mesh = init_device_mesh("cpu", (group.world_size,))
    folder = tmp_path / "partial"
    module = torch.nn.Linear(2, 2)
    part = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()])
    module.weight = torch.nn.Parameter(part, requires_grad=False)
    words = "'weight' is a DTensor with placements (Partial(sum),)"
    raises(TypeError, words, mlstate.save, folder, module, group=group)
    mlstate.save(folder, torch.nn.Linear(2, 2), group=group)
    refused(group, TypeError, words, folder, {"model": module})
    module = wrapped("fsdp2")
    optimizer = trained(module, MOMENTUM)
    state = optimizer.state[module[0].weight]
    state["momentum_buffer"] = state["momentum_buffer"].to_local()
    words = "'0.weight.momentum_buffer' is a plain tensor of shape"
    raises(TypeError, words, mlstate.save, folder, module, optimizer, group=group)
    mlstate.save(folder, module, group=group, overwrite=True)
    words = "its layout is known: do not pass layout="
    refused(group, TypeError, words, folder, {"model": module}, layout="rows", names="0.weight")


@gloo_ranks.run_on(2)
def test_steps_that_differ_do_not_fit_into_one_flat_parameter(group, tmp_path):
    module = model()
    optimizer = trained(module)
    optimizer.state[module[0].bias]["step"] += 1
    folder = saved(group, tmp_path / "steps", module, optimizer)
    fresh = wrapped("fsdp1", seed=1)
    other = torch.optim.Adam(fresh.parameters())
    before = local_bits(fresh, other)
    into = {"model": fresh, "optimizer": other}
    words = "'0.bias.step' is 3.0 and '0.weight.step' is 2.0, but FSDP1"
    refused(group, CompatibilityError, words, folder, into)
    same(local_bits(fresh, other), before)
    fresh = wrapped("fsdp1-orig", seed=1)
    other = loaded(group, folder, fresh)


@gloo_ranks.run_on(2)
def test_unsaved_states_are_absent_after_a_load(group, tmp_path):
    for kind in KINDS:
        module = wrapped(kind)
        before = torch.optim.Adam(module.parameters())
        folder = saved(group, tmp_path / f"stateless-{kind}", module, before)
        optimizer = trained(module)
        into = {"model": module, "optimizer": optimizer}
        refused(group, CompatibilityError, "Missing key(s)", folder, into, missing="error")
        mlstate.load(folder, into=into, group=group, missing="zeros")
        averages = [s["exp_avg"] for s in optimizer.state.values()]
        assert not any(bits(tensor).any() for tensor in averages), kind
        mlstate.load(folder, into=into, group=group)
        assert not optimizer.state, kind


# ---- meshes of four ranks ----


@gloo_ranks.run_on(4)
def test_hybrid_sharding_stores_each_part_once(group, tmp_path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for kind in ("fsdp2", "fsdp1"):
        keywords = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}

        def wrap(seed, kind=kind, keywords=keywords):
            module = model(seed=seed)
            return sharded(module, mesh=mesh) if kind == "fsdp2" else flat(module, **keywords)

        module = wrap(0)
        folder, _ = check_resumed(
            group, tmp_path / f"hybrid-{kind}", module, trained(module), wrap(4)
        )
        assert sum(s.key == "0.weight" for s in inspect(folder).shards()) == 2


@gloo_ranks.run_on(4)
def test_tensor_parallel_modules_under_fsdp_are_filled(group, tmp_path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def wrap(seed):
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
        unsharded = copy.deepcopy(module)
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(module, mesh=mesh["dp"]), unsharded

    module, unsharded = wrap(0)
    folder = saved(group, tmp_path / "tensor-parallel", module)
    assert mlstate.load(folder).model.to_torch().keys() == unsharded.state_dict().keys()
    for name, tensor in mlstate.load(folder).model.to_torch().items():
        assert torch.equal(tensor, unsharded.state_dict()[name]), name
    fresh, _ = wrap(1)
    mlstate.load(folder, into={"model": fresh}, group=group)
    same([bits(p) for p in fresh.parameters()], [bits(p) for p in module.parameters()])


@gloo_ranks.run_on(2, 4)
def test_rank_without_elements_takes_part(group, tmp_path):
    for kind in ("fsdp1", "fsdp1-orig", "fsdp2"):

        def wrap(seed, kind=kind):
            torch.manual_seed(seed)
            module = torch.nn.Linear(2, 1, bias=False)
            return fully_shard(module) if kind == "fsdp2" else flat(module, kind == "fsdp1-orig")

        module = wrap(0)
        optimizer = torch.optim.Adam(module.parameters())
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        folder = saved(group, tmp_path / f"few-{kind}", module, optimizer)
        assert mlstate.load(folder).optimizer["weight.step"] == 1
        fresh = wrap(1)
        other = loaded(group, folder, fresh)
        same([bits(p) for p in fresh.parameters()], [bits(p) for p in module.parameters()])
        again = saved(group, tmp_path / f"few-again-{kind}", fresh, other)
        assert mlstate.load(again).optimizer == mlstate.load(folder).optimizer


@gloo_ranks.run_on(2)
def test_an_optimizer_without_states_keeps_its_groups(group, tmp_path):
    for kind in KINDS:
        module = wrapped(kind)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
        optimizer.param_groups[0]["layers"] = {1, 2}
        folder = saved(group, tmp_path / f"stateless-{kind}", module, optimizer)
        fresh = wrapped(kind, seed=3)
        other = torch.optim.SGD(fresh.parameters(), lr=7.0)
        mlstate.load(folder, into={"model": fresh, "optimizer": other}, group=group)
        assert (other.param_groups[0]["lr"], other.param_groups[0]["layers"]) == (0.25, {1, 2})
