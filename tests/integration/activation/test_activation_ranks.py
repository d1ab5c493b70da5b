"""Plans on models sharded by FSDP2 or replicated by DDP: two processes over gloo."""

from pathlib import Path

import pytest
import rank_jobs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(250)]

RANKS = Path(__file__).with_name("activation_ranks.py")
WANTED = {2: rank_jobs.scenarios(RANKS)}
outcomes, test_ranks_agree = rank_jobs.agreement(RANKS, WANTED, limit_seconds=220)
