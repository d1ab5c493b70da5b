"""States of torch modules on several ranks: two and four processes over gloo."""

from pathlib import Path

import pytest
import rank_jobs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

RANKS = Path(__file__).with_name("sharded_ranks.py")
NAMES = rank_jobs.scenarios(RANKS)
FOUR = NAMES[NAMES.index("meshes_of_two_dimensions_are_layouts") :]
TWO = [name for name in NAMES if name not in FOUR]
FOUR = ["fsdp2_is_assembled", "fsdp1_is_assembled", *FOUR]  # a rank without rows
WANTED = {2: TWO, 4: FOUR}
outcomes, test_ranks_agree = rank_jobs.agreement(RANKS, WANTED, limit_seconds=150)
