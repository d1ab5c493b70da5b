"""Exports of Hugging Face folders by two and four processes over gloo."""

from pathlib import Path

import pytest
import rank_jobs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

RANKS = Path(__file__).with_name("export_ranks.py")
NAMES = rank_jobs.scenarios(RANKS)
FOUR = NAMES[NAMES.index("fsdp2_over_tensor_parallel_is_exported") :]
TWO = [name for name in NAMES if name not in FOUR]
FOUR = ["fsdp2_is_exported", "uneven_rows_of_fsdp2_are_exported", *FOUR]
FOUR += ["memory_does_not_grow_with_the_ranks", "failure_of_any_rank_leaves_no_files"]
WANTED = {2: TWO, 4: FOUR}
outcomes, test_ranks_agree = rank_jobs.agreement(RANKS, WANTED, limit_seconds=150)
