"""order="tree" of torch models: one digest of weights and moments on any ranks of any engine."""

import contextlib
import functools

import gloo_ranks
import mpi_jobs
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mlstate
from mlstate.checkpoint import Shard
from mlstate.collectives import SingleGroup
from mlstate.fsdp import (
    FSDP,
    FSDPBackwardHook,
    GradientAccumulator,
    clip_grad_norm,
    sharding_units,
)
from mlstate.integrations.torch import all_reduce_with, reduce_scatter_with
from mlstate.testing import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(250)]

LEAVES, STEPS = 10, 3
LIMIT_SECONDS = 200.0


class Words(torch.nn.Module):
    """Tied embeddings, attention and an MLP."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.words = torch.nn.Embedding(11, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(8, 9), torch.nn.GELU(), torch.nn.Linear(9, 8)
        )
        self.out = torch.nn.Linear(8, 11, bias=False)
        self.out.weight = self.words.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def forward(self, tokens):
        x = self.words(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.out(x + self.mlp(x))


def loss_of(model, step, leaf):
    generator = torch.Generator().manual_seed(1000 * step + leaf)
    tokens = torch.randint(11, (4, 6), generator=generator)
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def digest_of(parameters, adam):
    """The digest of whole weights and moments, by the names of `shards_of`."""
    arrays = {name: parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        arrays[name + ".m"] = adam.state[parameter]["exp_avg"]
        arrays[name + ".v"] = adam.state[parameter]["exp_avg_sq"]
    return str(mlstate.digest(arrays))


def adam_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, foreach=False)


@functools.cache
def with_an_accumulator(steps=STEPS):
    """The digests after each step in one process without ranks."""
    digests = []
    model, accumulator = Words(), GradientAccumulator(LEAVES, order="tree")
    parameters = dict(model.named_parameters())
    adam = adam_of(parameters.values())
    for step in range(steps):
        for leaf in range(LEAVES):
            model.zero_grad()
            loss_of(model, step, leaf).backward()
            gradients = {name: p.grad for name, p in parameters.items()}
            accumulator.add_gradients(gradients, donate=step % 2 == 1)
        sums = accumulator.get_and_clear_gradients()
        units = sharding_units(model, SingleGroup())
        for name, parameter in parameters.items():
            parameter.grad = sums[name] / LEAVES
            units[name].local_gradient = parameter.grad.view(-1)
        clip_grad_norm(units, 0.5, SingleGroup(), order="tree")
        adam.step()
        digests.append(digest_of(parameters, adam))
    return digests


def shards_of(units, parts, adam, group):
    """Shards of this rank's parts of weights and moments."""
    shards = {}
    for name, unit in units.items():
        state = adam.state[parts[name]]
        for moment in ("exp_avg", "exp_avg_sq"):
            state.setdefault(moment, torch.zeros_like(parts[name]))
        arrays = {"": parts[name], ".m": state["exp_avg"], ".v": state["exp_avg_sq"]}
        for suffix, array in arrays.items():
            shards[name + suffix] = Shard(array, unit.layout, group.rank, shape=unit.shape)
    return shards


def with_shards(group, *, holds=False, steps=range(STEPS), path=None):
    """Each rank updates its part; with `holds`, consecutive leaves are added up before.

    `path`: of a checkpoint, to begin with unless the first of `steps` is 0, and to save.
    """
    model = Words()
    parameters, units = dict(model.named_parameters()), sharding_units(model, group)
    hook = FSDPBackwardHook(FSDP(group, op="mean", order="tree", bucket_bytes=600))
    hook.register_hooks(model, units)
    parts = {n: u.layout.take(parameters[n].detach(), group.rank).clone() for n, u in units.items()}
    adam = adam_of(parts.values())
    if path is not None and steps[0]:
        mlstate.load(path, into={"model": shards_of(units, parts, adam, group)}, group=group)
        for part in parts.values():
            adam.state[part]["step"] = torch.tensor(float(steps[0]))
        gather_weights(group, units, parts, parameters)
    chunk = -(-LEAVES // group.world_size)
    own_leaves = range(group.rank, LEAVES, group.world_size)
    if holds:
        own_leaves = range(LEAVES)[group.rank * chunk : (group.rank + 1) * chunk]
    for step in steps:
        for leaf in own_leaves:
            with hook.no_sync() if holds else contextlib.nullcontext(), hook.leaf(leaf):
                loss_of(model, step, leaf).backward()
        assert hook.finish_step() == LEAVES
        clip_grad_norm(units, 0.5, group, order="tree")
        for name, part in parts.items():
            part.grad = units[name].local_gradient
        adam.step()
        gather_weights(group, units, parts, parameters)
    shards = shards_of(units, parts, adam, group)
    if path is not None:
        mlstate.save(path, shards, group=group)
    hook.close()
    return str(mlstate.digest(shards, group=group))


def gather_weights(group, units, parts, parameters):
    for name, part in parts.items():
        gathered = group.all_gather(part, counts=units[name].counts)
        parameters[name].data.copy_(gathered.view_as(parameters[name]))


def with_full_gradients(group, *, wrapped=False):
    """The optimizer has all parameters; some passes are in no_sync. `wrapped`: in DDP."""
    model = Words()
    adam = adam_of(model.parameters())
    if wrapped:
        outer = DistributedDataParallel(model)
        hook = all_reduce_with(outer, group, order="tree")
    else:
        outer = model
        hook = FSDPBackwardHook(FSDP(group, op="mean", order="tree"))
        hook.register_hooks(model, sharding_units(model, group), gradients="full")
    for step in range(STEPS):
        for number, leaf in enumerate(range(group.rank, LEAVES, group.world_size)):
            unsynced = (outer if wrapped else hook).no_sync()
            with unsynced if number == 0 else contextlib.nullcontext(), hook.leaf(leaf):
                loss_of(outer, step, leaf).backward()
        assert hook.finish_step() == LEAVES
        units = sharding_units(model, SingleGroup())
        for name, parameter in model.named_parameters():
            units[name].local_gradient = parameter.grad.view(-1)
        clip_grad_norm(units, 0.5, SingleGroup(), order="tree")
        adam.step()
        adam.zero_grad()
    hook.close()
    return digest_of(dict(model.named_parameters()), adam)


def all_ways(group):
    return {
        with_shards(group),
        with_shards(group, holds=True),
        with_full_gradients(group),
        with_full_gradients(group, wrapped=True),
    }


@pytest.mark.parametrize("world", [1, 2, 3])
def test_weights_have_one_digest_over_gloo(world):
    assert gloo_ranks.run(world, all_ways) == [{with_an_accumulator()[-1]}] * world


def test_weights_have_one_digest_on_threads():
    for world in (2, 4):
        assert run_ranks(world, with_shards) == [with_an_accumulator()[-1]] * world


def check_chain(chain, count, path, monkeypatch):
    """Train `count` steps on each ranks of a chain, from the checkpoint of the ranks before.

    `chain`: engines and numbers of ranks.
    """
    expected = with_an_accumulator(count * len(chain))
    for number, (engine, world) in enumerate(chain):
        steps = range(number * count, (number + 1) * count)
        train = functools.partial(with_shards, steps=steps, path=path)
        with monkeypatch.context() as context:
            if engine in mpi_jobs.ENGINES:
                mpi_jobs.put_in_path(context, engine)
                engine = "mpi"
            results = run_ranks(world, train, engine, timeout=LIMIT_SECONDS)
        assert results == [expected[steps[-1]]] * world


@pytest.mark.parametrize(
    "chain",
    [[("threads", 2), ("gloo", 3)], [("threads", 4), ("threads", 1), ("threads", 8)]],
    ids=str,
)
def test_training_resumed_on_other_ranks_has_the_same_digest(chain, tmp_path, monkeypatch):
    check_chain(chain, 2, tmp_path / "c", monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["threads", "gloo", *mpi_jobs.ENGINES])
def test_200_steps_on_ever_more_ranks_have_the_digest_of_one_process(engine, tmp_path, monkeypatch):
    check_chain([(engine, n) for n in (1, 2, 3, 4, 8)], 40, tmp_path / "c", monkeypatch)


def refuse_fsdp2(group):
    module = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="register the module without fully_shard"):
        reduce_scatter_with(module, group, order="tree")


def test_fsdp2_which_hides_micro_batches_is_refused():
    gloo_ranks.run(1, refuse_fsdp2)


def test_gradients_that_stay_in_the_parameters_are_refused():
    model = torch.nn.Linear(2, 2)
    hook = FSDPBackwardHook(FSDP(SingleGroup(), order="tree"))
    for settings in ({"accumulate": True}, {"keep_full_gradient": True}):
        with pytest.raises(ValueError, match="order='tree' adds up all micro-batches"):
            hook.register_hooks(model, sharding_units(model, SingleGroup()), **settings)


def test_full_gradients_of_several_steps_accumulate_until_zero_grad():
    model = torch.nn.Linear(2, 1, bias=False)
    hook = FSDPBackwardHook(FSDP(SingleGroup(), order="tree"))
    hook.register_hooks(model, sharding_units(model, SingleGroup()), gradients="full")
    for step in (1, 2):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        hook.finish_step()
        assert model.weight.grad.tolist() == [[3 * step, 3 * step]]
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    hook.finish_step()
    assert model.weight.grad.tolist() == [[1, 1]]
