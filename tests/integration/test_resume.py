"""Training that was killed goes on: on as many ranks with the same bits, on others with the state.

Each case trains a small transformer on real processes, saves, kills them by signal 9, and resumes
on new ones. What torch gathers before and after is compared bit for bit.
"""

import warnings

import pytest
import resume_jobs

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own internals
    torch = pytest.importorskip("torch", reason="it trains what is saved")

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch was built without gloo", allow_module_level=True)

FEW = [("plain", "adafactor"), ("fsdp1", "adam"), ("fsdp2", "adamw")]
KINDS = ["plain", "fsdp1", "fsdp1-orig", "fsdp2"]
# torch's own Adafactor does not run on DTensors, and knows no rows of flat parameters
ALL = [(kind, name) for kind in KINDS for name in ("adam", "adamw", "momentum")]
ALL += [("plain", "adafactor"), ("fsdp1", "adafactor")]


def check_resumed(folder, cases, saved, world, *, same_bits):
    resumed = [(kind, name, saved, other) for kind, name, other in cases]
    resume_jobs.resume(world, resumed, folder)
    for kind, name, other in cases:
        what = f"{kind} with {name} as {other}, {saved} -> {world}"
        found = resume_jobs.state_difference(folder, kind, name, saved, other, world)
        assert not found, f"{what}: {found}"
        resumed_losses, whole = resume_jobs.curves(folder, kind, name, saved, other, world)
        if same_bits:
            assert resumed_losses == whole, what
        elif (other, name) != ("fsdp1", "adafactor"):
            # that one measures each rank's piece; the means of others are of the same sequences
            assert resume_jobs.means(resumed_losses) == pytest.approx(
                resume_jobs.means(whole), rel=2e-4
            ), what


def test_two_ranks_go_on_with_the_same_bits(tmp_path):
    resume_jobs.train_and_kill(2, FEW, tmp_path)
    check_resumed(tmp_path, [(k, n, k) for k, n in FEW], 2, 2, same_bits=True)


@pytest.mark.parametrize(
    ("world", "staging"),
    [(2, 20_000), pytest.param(2, None, marks=pytest.mark.long),
     pytest.param(4, 0, marks=pytest.mark.long)],
)  # fmt: skip
def test_saves_that_are_written_while_training_goes_on(tmp_path, world, staging):
    resume_jobs.train_and_kill(world, FEW, tmp_path, staging)
    check_resumed(tmp_path, [(k, n, k) for k, n in FEW], world, world, same_bits=True)


@pytest.mark.long
@pytest.mark.parametrize("saved", [2, 4])
def test_every_kind_goes_on_anywhere(tmp_path, saved):
    resume_jobs.train_and_kill(saved, ALL, tmp_path)
    cases = [(kind, name, kind) for kind, name in ALL]
    for world in (saved, *{1, 2, 4} - {saved}):
        check_resumed(tmp_path, cases, saved, world, same_bits=world == saved)


@pytest.mark.long
def test_every_kind_goes_on_as_every_other(tmp_path):
    resume_jobs.train_and_kill(2, [(kind, "adam") for kind in KINDS], tmp_path)
    cases = [(kind, "adam", other) for kind in KINDS for other in KINDS if other != kind]
    for world in (1, 4):
        check_resumed(tmp_path, cases, 2, world, same_bits=False)
