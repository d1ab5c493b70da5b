"""The training example: its losses have the same bits with every method and engine."""

import contextlib
import functools
import io
import sys
from argparse import Namespace
from pathlib import Path

import child
import gloo_ranks
import mpi_jobs
import pytest
import torch
from killed_jobs import module_of

from mlstate.collectives import LocalGroup
from mlstate.integrations.torch import reduce_scatter_with

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_sharded.py"
STEPS = {2: 24, 4: 16}
RUNS = [  # method, engine, layout
    ("fsdp2", "gloo", "rows"),
    ("fsdp2+mlstate", "gloo", "rows"),
    ("fsdp2+mlstate", "local", "rows"),
    ("mlstate", "gloo", "rows"),
    ("mlstate", "local", "rows"),
    ("mlstate", "local", "flat"),
]

if not EXAMPLE.exists():
    pytest.skip("no examples beside these tests: they are not installed", allow_module_level=True)


# ---- on a rank ----


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


# ---- tests ----


def run(program, *arguments):
    """Run a program with the package under test; return its output."""
    done = child.finished([sys.executable, program, *arguments], timeout=290, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The results of a job, by number of ranks."""
    curves = {}

    def of(world):
        if world not in curves:
            folder = tmp_path_factory.mktemp("trained")
            job = functools.partial(every_method, steps=STEPS[world], folder=folder)
            curves[world] = gloo_ranks.run(world, job, timeout=280)[0]
        return curves[world]

    return of


def losses(text):
    return [float(line.split()[1]) for line in text.splitlines()]


def test_two_ranks_have_the_bits_of_fsdp2(trained):
    printed = trained(2)["printed"]
    fsdp2_losses = printed.pop("fsdp2, gloo, rows")
    assert [line.split()[0] for line in fsdp2_losses.splitlines()] == [
        str(i) for i in range(STEPS[2])
    ]
    assert losses(fsdp2_losses)[-1] < 0.7 * losses(fsdp2_losses)[0]  # the loss decreases
    resumed = printed.pop("resumed")
    assert printed == dict.fromkeys(printed, fsdp2_losses)
    assert len(printed) == 5
    assert resumed.splitlines() == fsdp2_losses.splitlines()[: STEPS[2] // 2]


@pytest.mark.long
def test_four_ranks_have_one_curve_and_gloo_sums_in_another_order(trained):
    printed = trained(4)["printed"]
    fsdp2_losses = printed.pop("fsdp2, gloo, rows")
    mlstate_losses = printed["mlstate, local, rows"]
    resumed = printed.pop("resumed")
    assert printed == dict.fromkeys(printed, mlstate_losses)
    assert len(printed) == 5
    assert resumed.splitlines() == mlstate_losses.splitlines()[: STEPS[4] // 2]
    assert losses(fsdp2_losses) == pytest.approx(losses(mlstate_losses), rel=1e-4)
    assert (
        losses(fsdp2_losses)[0] == losses(mlstate_losses)[0]
    )  # the first loss precedes any reduction


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_gradients_are_sums_in_the_order_of_ranks(trained, world):
    counts = trained(world)["differing"]
    elements, other, none = counts["ours"]
    assert elements > 100_000 and other == none == 0
    # gloo adds the same numbers, in an order that depends on the position
    assert counts["gloo"][0] == elements
    assert counts["gloo"][2] == 0
    if world == 2:
        assert counts["gloo"][1] == 0


@pytest.mark.long
def test_the_example_runs_from_the_command_line(trained, tmp_path):
    expected = trained(2)["printed"]["mlstate, local, rows"].splitlines()
    arguments = ("--ranks", "2", "--checkpoint", tmp_path / "checkpoint")
    first = run(EXAMPLE, *arguments, "--steps", "2").splitlines()
    assert first == expected[:2]
    rest = run(EXAMPLE, *arguments, "--steps", "3", "--engine", "gloo").splitlines()
    assert rest == expected[2:3]


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "world", "method"), [("mpich", 2, "fsdp2+mlstate"), ("openmpi", 2, "mlstate")]
)
def test_mpi_has_the_same_curve(trained, engine, world, method):
    mpi_jobs.skip_if_missing(engine)
    expected = trained(world)["printed"]["mlstate, local, rows"].splitlines()
    arguments = ("--engine", "mpi", "--method", method, "--steps", "12")
    status, out, err = mpi_jobs.run(engine, world, str(EXAMPLE), *arguments, limit_seconds=200)
    assert status == 0, out[-1000:] + err[-3000:]
    assert out.splitlines() == expected[:12]
