"""Checkpoints of sharded modules and their optimizers: two and four processes over gloo."""

from pathlib import Path

import pytest
import rank_jobs

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(200)]

RANKS = Path(__file__).with_name("training_ranks.py")
NAMES = rank_jobs.scenarios(RANKS)
MESHES = [
    "hybrid_sharding_stores_each_part_once",
    "tensor_parallel_modules_under_fsdp_are_filled",
]
TWO = [name for name in NAMES if name not in MESHES]
FOUR = [
    "every_kind_is_filled_in_place",
    "every_kind_is_loaded_as_every_other",
    "factors_record_their_axes",
    "rank_without_elements_takes_part",
    *MESHES,
]
WANTED = {2: TWO, 4: FOUR}
outcomes, test_ranks_save_and_load = rank_jobs.agreement(RANKS, WANTED, limit_seconds=170)
