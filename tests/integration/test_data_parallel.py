"""FSDP2 and DDP whose gradients mlstate reduces: two to four real processes over gloo."""

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
BITS = [name for name in NAMES if any(word in name for word in ("bits", "sums", "replicas"))]
WANTED = {2: NAMES, 3: NAMES, 4: BITS}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    done = {}

    def of(world):
        if world not in done:
            store = tmp_path_factory.mktemp("store") / "ranks"
            done[world] = run_ranks(RANKS, world, WANTED[world], store, limit_seconds=220)
        return done[world]

    return of


CASES = [
    pytest.param(world, name, marks=[pytest.mark.long] if world > 2 else [])
    for world, names in WANTED.items()
    for name in names
]


@pytest.mark.parametrize(("world", "name"), CASES)
def test_ranks_agree(outcomes, world, name):
    check(outcomes(world), name)
