"""Plans on models that are sharded by FSDP2 or replicated by DDP: two processes over gloo."""

import warnings
from pathlib import Path

import pytest
from torch_processes import check, run_ranks, scenarios

pytestmark = [pytest.mark.torch, pytest.mark.timeout(250)]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own internals
    torch = pytest.importorskip("torch", reason="its models are what is planned here")

RANKS = Path(__file__).with_name("activation_ranks.py")
NAMES = scenarios(RANKS)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this torch was built without gloo")
    store = tmp_path_factory.mktemp("store") / "ranks"
    return run_ranks(RANKS, 2, NAMES, store, limit_seconds=220)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks(outcomes, name):
    check(outcomes, name)
