"""Sharded modules and their optimizers in checkpoints: two and four real processes over gloo."""

import warnings
from pathlib import Path

import pytest
from torch_processes import check, run_ranks, scenarios

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own internals
    torch = pytest.importorskip("torch", reason="its modules are what is saved")

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch was built without gloo", allow_module_level=True)

RANKS = Path(__file__).with_name("training_ranks.py")
LIMIT_SECONDS = 170
NAMES = scenarios(RANKS)
MESHES = [
    "hybrid_sharding_stores_each_part_once",
    "tensor_parallel_modules_under_fsdp_are_filled",
]
TWO = [name for name in NAMES if name not in MESHES]
FOUR = [
    "every_kind_is_filled_where_it_lies",
    "every_kind_is_loaded_as_every_other",
    "factors_lie_along_their_own_axes",
    "a_rank_without_elements_is_a_rank_all_the_same",
    *MESHES,
]
CASES = [
    *((2, name) for name in TWO),
    *(pytest.param(4, name, marks=pytest.mark.long) for name in FOUR),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    done = {}

    def of(world):
        if world not in done:
            store = tmp_path_factory.mktemp("ranks") / "store"
            names = TWO if world == 2 else FOUR
            done[world] = run_ranks(RANKS, world, names, store, LIMIT_SECONDS)
        return done[world]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), CASES)
def test_ranks_save_and_load(outcomes, world, name):
    check(outcomes(world), name)
