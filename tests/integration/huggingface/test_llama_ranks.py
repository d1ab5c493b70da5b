"""from_pretrained of exports from four meshes, in jobs of two and four processes over gloo."""

import importlib.util
from pathlib import Path

import pytest
import rank_jobs

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(300)]
if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers loads the exports", allow_module_level=True)

RANKS = Path(__file__).with_name("llama_ranks.py")
TWO, FOUR = rank_jobs.scenarios(RANKS)[:2], rank_jobs.scenarios(RANKS)[2:]
WANTED = {2: TWO, 4: FOUR}
MODULES = (*rank_jobs.MODULES, "transformers.models.llama.modeling_llama")
outcomes, test_ranks_agree = rank_jobs.agreement(RANKS, WANTED, limit_seconds=250, modules=MODULES)
