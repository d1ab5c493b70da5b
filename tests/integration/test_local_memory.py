"""`LocalGroup.empty`: arrays that are reduced where they lie."""

import os
import sys
import threading

import memory_ranks
import pytest

from mlstate import CollectiveError
from mlstate.collectives import LocalGroup

LINUX = sys.platform == "linux"
LIMIT = 60.0  # seconds: a hang, not a busy machine, is longer

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def run(function, *args, world=2, method="fork"):
    return LocalGroup.run(function, world, *args, start_method=method, timeout=LIMIT)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("whose", ["all", (0,), (1, 2), ()])
def test_sums_are_those_of_arrays_that_travel(world, whose):
    whose = tuple(range(world)) if whose == "all" else whose
    run(memory_ranks.sums_are_those_of_arrays_that_travel, whose, world=world)


@pytest.mark.parametrize("world", [2, 4])
def test_results_may_lie_in_their_array(world):
    run(memory_ranks.results_may_lie_in_their_array, world=world)


@pytest.mark.parametrize("world", [2, 3])
def test_an_array_may_change_as_soon_as_it_was_reduced(world):
    run(memory_ranks.an_array_may_change_as_soon_as_it_was_reduced, world=world)


@pytest.mark.parametrize("hook", [False, True])
def test_gradients_of_hooks_are_reduced(hook):
    found = run(memory_ranks.gradients_of_hooks_are_reduced, hook, world=3)
    assert len({len(parts["wte"]) for parts in found}) == 1


@pytest.mark.skipif(not LINUX, reason="looks at /proc for what is there")
def test_memory_is_given_back():
    run(memory_ranks.memory_is_given_back)


def test_arrays_outlive_the_group():
    assert [array.sum() for array in run(memory_ranks.arrays_outlive_the_group)] == [20, 20]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_shapes_and_dtypes_are_those_of_numpy(method):
    run(memory_ranks.shapes_and_dtypes_are_those_of_numpy, method=method)


@pytest.mark.skipif(not LINUX, reason="elsewhere a child has memory of its own")
def test_a_forked_child_shares_and_frees_nothing():
    run(memory_ranks.a_forked_child_shares_and_frees_nothing)


@pytest.mark.skipif(not LINUX, reason="looks at /proc for what is mapped")
@pytest.mark.skipif("MLSTATE_UNDER_SANITIZER" in os.environ, reason="it maps terabytes itself")
def test_who_cannot_map_what_others_offer_is_sent_to():
    run(memory_ranks.who_cannot_map_is_sent_to)


def test_a_rank_killed_while_others_read_its_memory_is_named(tmp_path):
    with pytest.raises(CollectiveError, match="killed by SIGKILL"):
        run(memory_ranks.be_killed, str(tmp_path), world=3)
    for rank in (0, 2):
        assert "rank 1 is gone" in (tmp_path / f"rank{rank}").read_text()


@pytest.mark.torch
def test_tensors_are_of_torch():
    pytest.importorskip("torch", reason="makes tensors")
    run(memory_ranks.tensors_are_of_torch, method="spawn")


def test_threads_have_ordinary_memory():
    groups = LocalGroup.threads(3)
    found = [None] * 3

    def work(group):
        with group:
            found[group.rank] = memory_ranks.of_threads(group)

    threads = [threading.Thread(target=work, args=(g,), daemon=True) for g in groups[1:]]
    for thread in threads:
        thread.start()
    work(groups[0])
    for thread in threads:
        thread.join(LIMIT)
    assert found == [3.0, 3.0, 3.0]
