"""The ranks of test_train_sharded.py: the example's training with every method, in one job."""

import contextlib
import io
from argparse import Namespace
from pathlib import Path

import torch
from killed_jobs import module_of

from mlstate.collectives import LocalGroup
from mlstate.integrations.torch import reduce_scatter_with

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_sharded.py"
RUNS = [  # method, engine, layout
    ("fsdp2", "gloo", "rows"),
    ("fsdp2+mlstate", "gloo", "rows"),
    ("fsdp2+mlstate", "local", "rows"),
    ("mlstate", "gloo", "rows"),
    ("mlstate", "local", "rows"),
    ("mlstate", "local", "flat"),
]


def first_gradients(module, group, reduced_by):
    """The full gradients of the first step, by name, as FSDP2 computes them."""
    torch.manual_seed(0)
    trained = module.WithFSDP2(module.Model(), group, uses_mlstate=False)
    if reduced_by is not None:
        reduce_scatter_with(trained.model, reduced_by)
    text, following = module.batch_of(module.read_sources(), 0, group.rank)
    logits = trained.model(text).flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, following.flatten()).backward()
    return {name: p.grad.full_tensor() for name, p in trained.model.named_parameters()}


def gradients_of_ranks(module, world):
    """The gradients of each rank before any reduction, by name."""
    ranks = []
    for rank in range(world):
        torch.manual_seed(0)
        model = module.Model()
        text, following = module.batch_of(module.read_sources(), 0, rank)
        logits = model(text).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, following.flatten()).backward()
        ranks.append({name: parameter.grad for name, parameter in model.named_parameters()})
    return ranks


def in_rank_order(values):
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def in_any_order(values):
    """The sums of a few tensors in every order: 1 of two, 3 of three, 15 of four."""
    if len(values) == 1:
        return [values[0]]
    first, *rest = values
    sums = []
    for chosen in range(2 ** len(rest) - 1):
        near = [first, *(v for i, v in enumerate(rest) if chosen >> i & 1)]
        far = [v for i, v in enumerate(rest) if not chosen >> i & 1]
        sums += [left + right for left in in_any_order(near) for right in in_any_order(far)]
    return sums


def differing(gradients, ranks):
    """Counts of elements: all, those unequal to the rank-order sum, those equal to no order."""
    other = none = 0
    for name, gradient in gradients.items():
        values = [of[name] for of in ranks]
        other += int((gradient != in_rank_order(values) / len(ranks)).sum())
        sums = torch.stack(in_any_order(values)) / len(ranks)
        none += int((gradient != sums).all(0).sum())
    return sum(gradient.numel() for gradient in gradients.values()), other, none


def every_method(group, steps, folder):
    """Return the output of each method, and the numbers of gradients with other bits."""
    module = module_of(EXAMPLE)
    local = LocalGroup.join(str(folder), group.rank, group.world_size)
    engines = {"local": local, "gloo": group}
    printed = {}

    def run(title, method, engine, layout, until, checkpoint=None):
        options = Namespace(method=method, layout=layout, steps=until, checkpoint=checkpoint)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            module.train(engines[engine], options)
        printed[title] = printed.get(title, "") + out.getvalue()

    for method, engine, layout in RUNS:
        run(f"{method}, {engine}, {layout}", method, engine, layout, steps)
    for layout, until in (("rows", steps // 3), ("flat", steps // 2)):
        run("resumed", "mlstate", "local", layout, until, f"{folder}/checkpoint")
    ranks = gradients_of_ranks(module, group.world_size)
    counts = {
        "ours": differing(first_gradients(module, local, local), ranks),
        "gloo": differing(first_gradients(module, local, None), ranks),
    }
    local.close()
    return {"printed": printed, "differing": counts}
