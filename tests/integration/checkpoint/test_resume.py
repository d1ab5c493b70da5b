"""Killed training resumes: with the same bits on as many ranks, with the same state on others.

Each case trains a small transformer on several processes, saves, kills them by signal 9, and
resumes on new ones. The states that torch gathers before and after are compared bit for bit.
"""

import gloo_ranks  # noqa: F401 - skips the file without gloo
import pytest
import resume_jobs

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

FEW = [("plain", "adafactor"), ("fsdp1", "adam"), ("fsdp2", "adamw")]
KINDS = ["plain", "fsdp1", "fsdp1-orig", "fsdp2"]
# torch's Adafactor does not run on DTensors, and does not know the rows of flat parameters
ALL = [(kind, name) for kind in KINDS for name in ("adamw", "momentum")]
ALL += [("plain", "adafactor"), ("fsdp1", "adafactor")]


def check_resumed(folder, cases, saved, world, *, same_bits):
    check_each_resumed([folder], cases, saved, world, same_bits=same_bits)


def check_each_resumed(folders, cases, saved, world, *, same_bits):
    """One group of processes resumes from all folders."""
    resumed = [(kind, name, saved, other) for kind, name, other in cases]
    resume_jobs.resume(world, resumed, *folders)
    for folder in folders:
        compare(folder, cases, saved, world, same_bits)


def compare(folder, cases, saved, world, same_bits):
    for kind, name, other in cases:
        label = f"{kind} with {name} as {other}, {saved} -> {world}"
        difference = resume_jobs.state_difference(folder, kind, name, saved, other, world)
        assert not difference, f"{label}: {difference}"
        resumed_losses, uninterrupted_losses = resume_jobs.curves(
            folder, kind, name, saved, other, world
        )
        if same_bits:
            assert resumed_losses == uninterrupted_losses, label
        elif (other, name) != ("fsdp1", "adafactor"):
            # FSDP1's Adafactor measures each rank's piece, so its bits depend on the world; mean
            # losses of the others cover the same sequences in every world
            assert resume_jobs.means(resumed_losses) == pytest.approx(
                resume_jobs.means(uninterrupted_losses), rel=2e-4
            ), label


def test_two_ranks_go_on_with_the_same_bits(tmp_path):
    """From saves that the training waits for, and from one that is written during training."""
    waited, written = tmp_path / "waited", tmp_path / "written"
    resume_jobs.train_and_kill(2, FEW, waited, (written, 20_000))
    cases = [(k, n, k) for k, n in FEW]
    check_each_resumed([waited, written], cases, 2, 2, same_bits=True)


@pytest.mark.long
@pytest.mark.parametrize(("world", "staging"), [(2, None), (2, 0)])
def test_background_saves_during_training(tmp_path, world, staging):
    resume_jobs.train_and_kill(world, FEW, (tmp_path, staging))
    check_resumed(tmp_path, [(k, n, k) for k, n in FEW], world, world, same_bits=True)


@pytest.mark.long
def test_every_kind_resumes_on_fewer_ranks(tmp_path):
    resume_jobs.train_and_kill(4, ALL, tmp_path)
    cases = [(kind, name, kind) for kind, name in ALL]
    for world in (4, 2):
        check_resumed(tmp_path, cases, 4, world, same_bits=world == 4)


@pytest.mark.long
def test_every_kind_resumes_as_every_other_kind(tmp_path):
    resume_jobs.train_and_kill(2, [(kind, "adam") for kind in KINDS], tmp_path)
    cases = [(kind, "adam", other) for kind in KINDS for other in KINDS if other != kind]
    for world in (1, 4):
        check_resumed(tmp_path, cases, 2, world, same_bits=False)
