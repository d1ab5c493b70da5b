"""The training example: its losses have the same bits with every method and engine."""

import functools
import sys
from pathlib import Path

import child
import gloo_ranks
import mpi_jobs
import pytest
import train_ranks

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_sharded.py"
STEPS = {2: 24, 4: 16}

if not EXAMPLE.exists():
    pytest.skip("no examples beside these tests: they are not installed", allow_module_level=True)


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
            job = functools.partial(train_ranks.every_method, steps=STEPS[world], folder=folder)
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
