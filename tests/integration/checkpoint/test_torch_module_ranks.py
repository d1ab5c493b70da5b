"""Modules that load their own entries, on two ranks over gloo."""

from pathlib import Path

import pytest
import rank_jobs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

RANKS = Path(__file__).with_name("module_ranks.py")
WANTED = {2: rank_jobs.scenarios(RANKS)}
outcomes, test_ranks_agree = rank_jobs.agreement(RANKS, WANTED, limit_seconds=150)
