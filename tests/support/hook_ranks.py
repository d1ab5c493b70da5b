"""Gradients over a group of processes: each rank calls these functions with its group.

NumPy computes the expected results. MPI jobs (mpi_ranks.py) and jobs on two hosts
(tests/hosts/host_ranks.py) run them.
"""

import numpy as np
from gradient_model import check_parts, gradients_of, reduced, units_of
from group_model import raises

from mlstate import CollectiveError
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit, sharding_units

# Empty, fewer elements than ranks, uneven rows, more than one message.
SHAPES = {"empty": (0, 4), "scale": (), "bias": (2,), "rows": (7, 5), "large": (700, 301)}
DTYPES = ("float32", "bfloat16", "float16", "float64")


# ---- success ----


def scattered_gradients_are_sums_in_the_order_of_ranks(group):
    ways = [{}, {"op": "mean"}, {"reduce_dtype": "float32"}, {"bucket_bytes": 0},
            {"bucket_bytes": 4000, "op": "max"}]  # fmt: skip
    for dtype in DTYPES:
        for layout in ("flat", "rows"):
            for way in ways:
                units = units_of(group.rank, SHAPES, dtype, layout)
                gradients = gradients_of(group.rank, SHAPES, dtype)
                FSDPBackwardHook(FSDP(group, **way)).scatter_multiple(units, gradients)
                model = {name: how for name, how in way.items() if name != "bucket_bytes"}
                check_parts(units, group.world_size, SHAPES, dtype, layout, **model)


def model_of(dtype):
    """A small model, the same on every rank."""
    import torch
    from torch import nn

    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(9, 31), nn.LayerNorm(31), nn.Tanh(), nn.Linear(31, 5))
    return model.to(dtype)


def backward(model, rank):
    """A backward pass over the rows of a rank."""
    import torch

    rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(rank))
    model(rows.to(next(model.parameters()).dtype)).square().sum().backward()


def numpy_of(tensor):
    """A tensor as a NumPy array, also for bfloat16."""
    import torch

    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    from ml_dtypes import bfloat16

    return tensor.contiguous().view(torch.int16).numpy().view(bfloat16)


def hooks_of_a_model_scatter_sums_in_the_order_of_ranks(group):
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        each = []
        for rank in range(group.world_size):
            model = model_of(dtype)
            backward(model, rank)
            each.append({name: numpy_of(p.grad) for name, p in model.named_parameters()})
        sums = {
            name: reduced([rank_gradients[name] for rank_gradients in each]) for name in each[0]
        }
        for bucket_bytes in (0, 300, 25 << 20):
            model = model_of(dtype)
            units = sharding_units(model, group, layout="flat")
            with FSDPBackwardHook(FSDP(group, bucket_bytes=bucket_bytes)) as hook:
                hook.register_hooks(model, units)
                for _ in range(2):  # the memory is reused
                    backward(model, group.rank)
                    for name, unit in units.items():
                        expected = unit.layout.take(sums[name], group.rank)
                        assert unit.local_gradient.dtype == dtype, name
                        assert numpy_of(unit.local_gradient).tobytes() == expected.tobytes(), name
            assert all(p.grad is None for p in model.parameters())


# ---- errors of one rank, raised on all ----


def give_another_unit(units, gradients, rank):
    units["rows"] = FSDPShardingUnit("rows", (8, 5), "float32", rank)
    gradients["rows"] = np.ones((8, 5), np.float32)


# Changes of one rank's units and gradients, and the error; the first ones are known to the rank
# itself, so that every rank refuses the call.
MISMATCHES = {
    "none": (lambda u, g, _: g.update(rows=None), "rank {bad}: no gradient"),
    "not passed": (lambda u, g, _: g.pop("rows"), "rank {bad}: no gradient was passed"),
    "dtype": (
        lambda u, g, _: g.update(rows=g["rows"].astype(np.float64)),
        "rank {bad}: the gradient has dtype float64, expected float32",
    ),
    "shape": (
        lambda u, g, _: g.update(rows=g["rows"][:-1]),
        "rank {bad}: the gradient has shape (6, 5), expected (7, 5)",
    ),
}
FAULTS = {
    **MISMATCHES,
    "unknown": (lambda u, g, _: (u.pop("rows"), g.pop("rows")), "missing on rank {bad}"),
    "unit": (give_another_unit, "rank {bad}: 'rows' float32 (8, 5) flat"),
    "nan": (lambda u, g, _: g["rows"].put(17, np.nan), "NaN or infinite elements (rank {bad}: 1)"),
}


def scatter_with(group, fault, bad, **settings):
    """Scatter with a fault on one rank; all ranks must raise.

    If the call was refused, no rank has a part; else all ranks have all other parts.
    """
    change, text = FAULTS[fault]
    units = units_of(group.rank, SHAPES)
    gradients = gradients_of(group.rank, SHAPES)
    hook = FSDPBackwardHook(FSDP(group, **settings))
    hook.scatter_multiple(units, gradients)  # the step before
    if group.rank == bad:
        change(units, gradients, group.rank)
    error = raises(CollectiveError, text.format(bad=bad), hook.scatter_multiple, units, gradients)
    assert "'rows'" in str(error), str(error)
    is_refused = fault in MISMATCHES
    assert isinstance(error, ValueError) == (is_refused and group.rank == bad), repr(error)
    result = "refused, nothing was stored" if is_refused else "not reduced, all others were"
    assert f"a gradient was {result}" in str(error), str(error)
    # with two ranks that differ, neither is the exception
    undecided = fault == "unit" and group.world_size == 2
    who = None if undecided else bad
    assert (error.name, error.rank) == ("rows", who), (error.name, error.rank)
    if is_refused:
        assert all(unit.local_gradient is None for unit in units.values())
        return
    assert "rows" not in units or units["rows"].local_gradient is None
    units.pop("rows", None)
    check_parts(units, group.world_size, SHAPES)


def a_wrong_gradient_is_named_on_every_rank(group):
    for fault in FAULTS:
        for bad in (0, group.world_size - 1):
            for bucket_bytes in (0, 25 << 20):
                scatter_with(group, fault, bad, bucket_bytes=bucket_bytes)
    units = units_of(group.rank, SHAPES)  # the group stays usable
    FSDPBackwardHook(FSDP(group)).scatter_multiple(units, gradients_of(group.rank, SHAPES))
    check_parts(units, group.world_size, SHAPES)


def missing_backward_pass_of_one_rank_is_reported(group, wait):
    """The others learn which rank they waited for; `wait` synchronizes ranks outside the group."""
    last = group.world_size - 1
    model = model_of(None)
    units = sharding_units(model, group, layout="flat")
    with FSDPBackwardHook(FSDP(group, timeout=1.0)) as hook:
        hook.register_hooks(model, units)
        if group.rank != last:
            error = raises(CollectiveError, "", backward, model, group.rank)
            text = str(error)
            assert f"nothing more came from rank {last}" in text or "gave up in" in text, text
            assert all(unit.local_gradient is None for unit in units.values())
            raises(CollectiveError, "broken by", group.barrier)
        wait(group)
