"""Gradients of real torch models by hooks: ranks as threads, and as processes over gloo."""

import importlib
import threading
import warnings
from pathlib import Path

import pytest
from torch_processes import check, run_ranks, scenarios

from mlstate.collectives import LocalGroup

pytestmark = [pytest.mark.torch, pytest.mark.timeout(250)]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own internals
    torch = pytest.importorskip("torch", reason="its models are what has gradients here")

RANKS = Path(__file__).with_name("fsdp_torch_ranks.py")
NAMES = scenarios(RANKS)
WANTED = {2: NAMES, 3: [name for name in NAMES if "compiled" not in name]}
CASES = [
    pytest.param(world, name, marks=[pytest.mark.long] if world == 3 else [])
    for world, names in WANTED.items()
    for name in names
]
SECONDS = 60


def in_threads(function, world):
    """Run a scenario in threads that are the ranks of a LocalGroup, and raise what one raises."""
    groups = LocalGroup.threads(world, timeout=SECONDS)
    errors = [None] * world

    def work(rank):
        try:
            function(groups[rank])
        except BaseException as error:
            errors[rank] = error
            groups[rank].abort()  # the others need not wait

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        group.close()
    found = [error for error in errors if error is not None]
    for error in found:
        raise next((e for e in found if isinstance(e, AssertionError)), error)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("only")])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_are_threads(world, name):
    in_threads(getattr(importlib.import_module(RANKS.stem), name), world)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this torch was built without gloo")
    done = {}

    def of(world):
        if world not in done:
            store = tmp_path_factory.mktemp("store") / "ranks"
            done[world] = run_ranks(RANKS, world, WANTED[world], store, limit_seconds=220)
        return done[world]

    return of


@pytest.mark.parametrize(("world", "name"), CASES)
def test_ranks_that_are_processes(outcomes, world, name):
    check(outcomes(world), name)
