"""Tests of the Python model of plans: hand-made cases, and three ways to the same figures."""

import numpy as np
import pytest
from hypothesis import given, settings
from plan_model import (
    ChainModel,
    InvalidSchedule,
    any_front,
    any_front_slowly,
    chains,
    fastest,
    front_of,
    is_front,
    persistent_front,
    persistent_schedules,
    random_chain,
    random_chains,
    simulate,
)
from tries import tries

TWO = ChainModel(
    forward=(1, 2),
    backward=(3, 4),
    activation=(10, 20, 5),
    saved=(50, 25),
    gradient=(10, 20, 5),
    forward_temporary=(1, 0),
    saving_temporary=(2, 3),
    backward_temporary=(7, 8),
)


def test_two_blocks_saved_by_hand():
    sim = simulate(TWO, [("save", 0), ("save", 1), ("backward", 1), ("backward", 0)])
    assert sim.before == [10, 60, 85, 80]
    assert sim.most == [62, 88, 85 + 5 + 20 + 8, 80 + 10 + 7]
    assert sim.after == [60, 85, 80, 20]
    assert (sim.peak_bytes, sim.total_seconds) == (118, 10)


def test_two_blocks_recomputed_by_hand():
    steps = [("forward", 0), ("save", 1), ("backward", 1), ("drop", 1), ("save", 0)]
    sim = simulate(TWO, [*steps, ("backward", 0)])
    assert sim.before == [10, 30, 55, 50, 30, 80]
    assert sim.most == [31, 58, 55 + 5 + 20 + 8, 50, 82, 97]
    assert (sim.peak_bytes, sim.total_seconds) == (97, 11)


def test_two_blocks_offloaded_by_hand():
    chain = ChainModel(*TWO.arguments()[0], offload_rate=25.0, load_rate=50.0)
    steps = [("save", 0), ("offload", 0), ("save", 1), ("backward", 1)]
    steps += [("drop", 1), ("load", 0), ("backward", 0)]
    sim = simulate(chain, steps)
    assert sim.before == [10, 60, 30, 55, 50, 30, 80]
    assert sim.most == [60, 60, 55, 80, 50, 80, 90]
    assert sim.seconds == [1, 2, 2, 4, 0, 1, 3]


def test_fronts_of_two_blocks_by_hand():
    assert persistent_front(TWO) == [(97, 11), (118, 10)]
    assert any_front(TWO) == [(97, 11), (118, 10)]
    assert fastest(any_front(TWO), 117) == 11
    assert fastest(any_front(TWO), 96) is None


@pytest.mark.parametrize(
    ("steps", "number", "text"),
    [
        ([], 0, "backward 1 is missing"),
        ([("save", 0), ("save", 1), ("backward", 0)], 2, "backward 1 comes next"),
        ([("save", 1)], 0, "activation 1 does not exist"),
        ([("save", 0), ("save", 0)], 1, "saved 0 already exists"),
        ([("forward", 0), ("forward", 0)], 1, "activation 1 already exists"),
        ([("forward", 0), ("save", 0)], 1, "activation 1 already exists"),
        ([("save", 0), ("forward", 0)], 1, "activation 1 already exists"),
        ([("drop", 0)], 0, "activation 0 stays"),
        ([("save", 0), ("drop", 1)], 1, "is not a separate tensor"),
        ([("forward", 0), ("save", 1), ("drop", 1), ("backward", 1)], 3, "activation 1 does not"),
        ([("save", 0), ("backward", 1)], 1, "saved 1 does not exist"),
        ([("save", 2)], 0, "no such number"),
        ([("jump", 0)], 0, "not a kind of step"),
        ([("save", 0), ("offload", 0)], 1, "no rate"),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_number(steps, number, text):
    with pytest.raises(InvalidSchedule, match=text) as caught:
        simulate(TWO, steps)
    assert caught.value.number == number


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_the_recursion_is_what_its_schedules_are_when_simulated(blocks, offload):
    rng = np.random.default_rng(blocks)
    for kind in ("mixed", "uniform", "pyramid", "tokens"):
        chain = random_chain(rng, blocks, kind, rates=offload)
        runs = [simulate(chain, steps) for steps in persistent_schedules(chain, offload)]
        assert persistent_front(chain, offload) == front_of(
            (sim.peak_bytes, sim.total_seconds) for sim in runs
        )


@settings(deadline=None, max_examples=tries(25))
@given(chains(most_blocks=4))
def test_no_persistent_schedule_beats_all_schedules(chain):
    every, persistent = any_front(chain), persistent_front(chain)
    assert is_front(every) and is_front(persistent)
    for peak, seconds in persistent:
        assert fastest(every, peak) <= seconds
    # with memory for all, each block runs once either way
    assert every[-1][1] == persistent[-1][1] == sum(chain.forward) + sum(chain.backward)


def test_a_budget_cuts_the_front_and_changes_nothing_else():
    for chain in random_chains(3, 6, most_blocks=4):
        whole = any_front(chain)
        for budget, _ in whole:
            assert any_front(chain, budget=budget) == [p for p in whole if p[0] <= budget]


@pytest.mark.parametrize("offload", [False, True])
def test_states_as_bits_are_the_states(offload):
    for chain in random_chains(5, 12, most_blocks=2 if offload else 3, rates=offload):
        assert any_front(chain, offload) == any_front_slowly(chain, offload)


def test_there_are_chains_where_the_persistent_class_loses():
    chains_ = [c for c in random_chains(7, 40) if c.blocks >= 3]
    lost = [
        chain
        for chain, front in zip(chains_, map(any_front, chains_), strict=True)
        if any(fastest(front, p) < s for p, s in persistent_front(chain))
    ]
    assert lost
