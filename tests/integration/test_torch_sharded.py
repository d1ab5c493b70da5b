"""States of torch modules on several ranks: two and four real processes over gloo."""

import warnings
from pathlib import Path

import pytest
from torch_processes import check, run_ranks, scenarios

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own internals
    torch = pytest.importorskip("torch", reason="its modules are what is collected")

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch was built without gloo", allow_module_level=True)

RANKS = Path(__file__).with_name("sharded_ranks.py")
LIMIT_SECONDS = 150
NAMES = scenarios(RANKS)
FOUR = NAMES[NAMES.index("meshes_of_two_dimensions_are_layouts") :]
TWO = [name for name in NAMES if name not in FOUR]
FOUR = ["fsdp2_is_assembled", "fsdp1_is_assembled", *FOUR]  # a rank without rows
CASES = [
    *((2, name) for name in TWO),
    *(pytest.param(4, name, marks=pytest.mark.long) for name in FOUR),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    done = {}

    def of(world):
        if world not in done:
            store = tmp_path_factory.mktemp("store") / "ranks"
            done[world] = run_ranks(RANKS, world, TWO if world == 2 else FOUR, store, LIMIT_SECONDS)
        return done[world]

    return of


@pytest.mark.parametrize(("world", "name"), CASES)
def test_ranks_agree(outcomes, world, name):
    check(outcomes(world), name)
