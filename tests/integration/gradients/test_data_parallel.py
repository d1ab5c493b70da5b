"""Run the scenarios of data_parallel_ranks.py: FSDP2 and DDP in two to four processes over gloo."""

from pathlib import Path

import pytest
import rank_jobs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(250)]

RANKS = Path(__file__).with_name("data_parallel_ranks.py")
NAMES = rank_jobs.scenarios(RANKS)
BITS = [name for name in NAMES if any(word in name for word in ("bits", "sums", "replicas"))]
WANTED = {2: NAMES, 3: NAMES, 4: BITS}
outcomes, test_ranks_agree = rank_jobs.agreement(RANKS, WANTED, limit_seconds=220)
