"""FSDP2 and DDP whose gradients mlstate reduces: two and three real processes over gloo."""

import warnings
from pathlib import Path

import pytest
from torch_processes import check, run_ranks, scenarios

pytestmark = [pytest.mark.torch, pytest.mark.timeout(250)]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own internals
    torch = pytest.importorskip("torch", reason="its wrappers are what is plugged into")

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch was built without gloo", allow_module_level=True)

RANKS = Path(__file__).with_name("data_parallel_ranks.py")
NAMES = scenarios(RANKS)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    done = {}

    def of(world):
        if world not in done:
            store = tmp_path_factory.mktemp("store") / "ranks"
            done[world] = run_ranks(RANKS, world, NAMES, store)
        return done[world]

    return of


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree(outcomes, world, name):
    check(outcomes(world), name)
