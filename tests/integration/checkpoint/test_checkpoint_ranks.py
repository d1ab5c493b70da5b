"""Checkpoints of two and three processes over gloo, loaded by worlds of other sizes."""

from pathlib import Path

import pytest
import rank_jobs

pytestmark = pytest.mark.torch

RANKS = Path(__file__).with_name("checkpoint_ranks.py")
KILLED = "a_killed_rank_leaves_the_old_checkpoint"
NAMES = [name for name in rank_jobs.scenarios(RANKS) if name != KILLED]
outcomes = rank_jobs.jobs(RANKS, {2: NAMES, 3: NAMES})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks(outcomes, world, name):
    rank_jobs.check(outcomes(world), name)


@pytest.mark.parametrize("world", [2, 3])
def test_a_killed_rank_leaves_the_old_checkpoint(world, tmp_path):
    rank_jobs.skip_without_gloo()
    *survivors, (_, log) = rank_jobs.run_ranks(RANKS, world, [KILLED], tmp_path / "store")
    assert log.startswith("exit -9"), log
    rank_jobs.check(survivors, KILLED)
