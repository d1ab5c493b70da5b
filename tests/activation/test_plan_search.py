"""`schedules="any"`: the optimum over all schedules of short chains, else the persistent plan."""

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interruption import interrupt
from plan_model import (
    KINDS,
    InvalidSchedule,
    any_front,
    budgets_of,
    chains,
    fastest,
    persistent_front,
    random_chain,
    random_chains,
    simulate,
)
from thread_team import calling_in_background
from tries import tries

from mlstate import _core
from mlstate.activation import Chain, Plan, pareto, plan
from mlstate.errors import CapacityError


def chain_of(model):
    arguments, options = model.arguments()
    return Chain(*arguments, **options)


def check_against_every_schedule(model, offload=False):
    """The plan is the exhaustive optimum and is marked so; an error names the least budget."""
    chain, front = chain_of(model), any_front(model, offload)
    least = front[0][0]
    for budget in budgets_of(front):
        if budget < 0:
            continue
        if budget < least:
            with pytest.raises(CapacityError, match=f" any one fits is {least}$") as caught:
                plan(chain, budget, schedules="any", offload=offload)
            assert caught.value.expected == str(least)
            continue
        schedule = plan(chain, budget, schedules="any", offload=offload)
        run = simulate(model, schedule.steps())
        assert run.peak_bytes == schedule.predicted_peak_bytes <= budget
        assert run.total_seconds == schedule.predicted_seconds == fastest(front, budget)
        assert schedule.exact and schedule.schedules == "any"


@pytest.mark.parametrize(
    ("count", "most_blocks", "offload"),
    [
        (60, 5, False),
        (40, 3, True),
        pytest.param(200, 5, False, marks=pytest.mark.long),
        pytest.param(60, 4, True, marks=pytest.mark.long),
    ],
)
def test_no_schedule_beats_the_plan_on_random_chains(count, most_blocks, offload):
    for model in random_chains(2024, count, most_blocks=most_blocks, rates=offload):
        check_against_every_schedule(model, offload)


@pytest.mark.parametrize("offload", [False, True])
@settings(deadline=None, max_examples=tries(30))
@given(data=st.data())
def test_no_schedule_beats_the_plan_where_numbers_may_be_zero(offload, data):
    model = data.draw(chains(most_blocks=3 if offload else 4, rates=offload))
    check_against_every_schedule(model, offload)


@pytest.mark.parametrize("blocks", [6, 8, 10])
def test_ten_blocks_are_searched_through(blocks):
    rng = np.random.default_rng(blocks)
    won = 0
    for kind in KINDS:
        model = random_chain(rng, blocks, kind)
        chain, front = chain_of(model), persistent_front(model)
        for budget, seconds in front[:: max(1, len(front) // 8)]:
            schedule = plan(chain, budget, schedules="any")
            run = simulate(model, schedule.steps())
            assert schedule.exact and run.peak_bytes <= budget
            assert run.total_seconds == schedule.predicted_seconds <= seconds
            won += run.total_seconds < seconds
    assert won > 0


def test_bounded_and_unbounded_searches_agree():
    """A search bounded by the persistent plan's time and an unbounded search agree."""
    rng = np.random.default_rng(1)
    for kind in KINDS:
        model = random_chain(rng, 8, kind)
        chain = chain_of(model)
        for budget, _ in persistent_front(model)[::3]:
            steps, optimal, _ = _core.search_schedules(chain._arrays, budget, False, None, 0)
            alone = Plan(chain, steps)
            assert optimal
            assert alone.predicted_seconds == plan(chain, budget, schedules="any").predicted_seconds


@pytest.mark.parametrize("offload", [False, True])
def test_long_chains_get_the_persistent_plan(offload):
    rng = np.random.default_rng(24)
    for kind in KINDS:
        model = random_chain(rng, 20, kind, rates=offload)
        chain = chain_of(model)
        least = _core.plan_least(chain._arrays, offload)
        for share in (0, 0.05, 0.3):
            budget = int(least + share * (chain.plain_peak_bytes - least))
            persistent = plan(chain, budget, offload=offload)
            schedule = plan(chain, budget, schedules="any", offload=offload)
            run = simulate(model, schedule.steps())
            assert run.peak_bytes == schedule.predicted_peak_bytes <= budget
            assert schedule.predicted_seconds == persistent.predicted_seconds
            assert schedule.method == f"the fastest persistent schedule, {persistent.method}"
            assert schedule.schedules == "any" and not schedule.exact


def test_long_chain_beyond_the_budget_is_refused():
    chain = chain_of(random_chain(np.random.default_rng(0), 40))
    least = _core.plan_least(chain._arrays, False)
    with pytest.raises(CapacityError, match=f"a persistent one fits is {least}$"):
        plan(chain, least - 1, schedules="any")


def hardest():
    """A chain and a budget whose search takes long."""
    model = random_chain(np.random.default_rng(8), 16, rates=True)
    chain = chain_of(model)
    least = _core.plan_least(chain._arrays, True)
    return chain, least + (chain.plain_peak_bytes - least) // 8


@pytest.mark.slow
def test_control_c_stops_a_search_at_once():
    chain, budget = hardest()

    def search_without_end():
        _core.search_schedules(chain._arrays, budget, True, None, 1 << 31)

    interrupt(search_without_end, after=0.15, within=1.0)


def test_search_releases_the_gil():
    chain, budget = hardest()
    ticks = []

    def tick():
        time.sleep(0.01)
        ticks.append(time.perf_counter())

    with calling_in_background(tick):
        start = plan(chain, budget, offload=True)
        begin = time.perf_counter()
        _core.search_schedules(chain._arrays, budget, True, start._steps, 1 << 17)
        end = time.perf_counter()
    within = [t for t in ticks if begin < t < end]
    assert len(within) >= 1 + (end - begin) / 0.1


def test_exhausted_search_returns_its_start():
    model = random_chain(np.random.default_rng(4), 12)
    chain = chain_of(model)
    least = _core.plan_least(chain._arrays, False)
    budget = least + (chain.plain_peak_bytes - least) // 4
    start = plan(chain, budget)
    steps, optimal, states = _core.search_schedules(chain._arrays, budget, False, start._steps, 10)
    assert not optimal and states == 10
    assert Plan(chain, steps).predicted_seconds == start.predicted_seconds
    complete = plan(chain, budget, schedules="any")
    assert complete.exact and complete.predicted_seconds <= start.predicted_seconds


STEPS = np.array([[1, 0], [2, 0]], np.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((50, False, STEPS[:1], 0), ValueError, "1 backward passes to go"),
        ((50, False, STEPS[:, :1], 0), TypeError, "packed array of int32"),
        ((50, False, STEPS.astype(np.int64), 0), TypeError, "packed array of int32"),
        ((50, False, "steps", 0), TypeError, "packed array of int32"),
        ((49, False, STEPS, 0), ValueError, "peak of 50 bytes, above the budget of 49"),
        ((50, True, None, 0), ValueError, "no rates"),
        ((50, False, None, -1), ValueError, "states is -1"),
        ((2.5, False, None, 0), TypeError, "budget_bytes must be an integer"),
        ((1 << 64, False, None, 0), CapacityError, "budget_bytes"),
        ((50, False, None), TypeError, "takes 5 arguments, got 4"),
    ],
)
def test_invalid_arguments_are_refused(arguments, error, text):
    chain = Chain([1], [1], [10, 10], [20])
    with pytest.raises(error, match=text):
        _core.search_schedules(chain._arrays, *arguments)


def test_the_largest_budget_and_bytes_do_not_overflow():
    big = 1 << 58
    chain = Chain([1, 1], [1, 1], [big, big, big], [big, big])
    schedule = plan(chain, (1 << 63) - 1, schedules="any")
    assert schedule.predicted_peak_bytes == 5 * big
    with pytest.raises(CapacityError, match=f"fits is {5 * big}"):
        plan(chain, 0, schedules="any")
    with pytest.raises(ValueError, match="-9223372036854775808"):
        plan(chain, -(1 << 63), schedules="any")


# ---- the simulator in C against the one in Python ----


def random_steps(rng, blocks, count, offload):
    kinds = ["forward", "save", "backward", "drop", *(["offload", "load"] if offload else [])]
    return [(kinds[rng.integers(len(kinds))], int(rng.integers(blocks + 1))) for _ in range(count)]


def mutated(rng, steps, blocks):
    """A schedule with one small defect."""
    steps = list(steps)
    at, other = rng.integers(len(steps), size=2)
    change = rng.integers(4)
    if change == 0:
        del steps[at]
    elif change == 1:
        steps.insert(at, steps[other])
    elif change == 2:
        steps[at], steps[other] = steps[other], steps[at]
    else:
        steps[at] = (steps[at][0], int(rng.integers(blocks + 1)))
    return steps


def check_simulators_agree(model, chain, steps):
    """Both simulators agree on figures or refused step; return whether the schedule is valid."""
    try:
        run = simulate(model, steps)
    except InvalidSchedule as refusal:
        with pytest.raises(ValueError, match=rf"^\D*\b{refusal.number}\b"):
            Plan(chain, steps)
        return False
    simulated = Plan(chain, steps).simulate()
    assert simulated.before_bytes.tolist() == run.before
    assert simulated.peak_bytes.tolist() == run.most
    assert simulated.after_bytes.tolist() == run.after
    assert simulated.seconds.tolist() == run.seconds
    return True


@settings(deadline=None, max_examples=tries(60))
@given(st.integers(0, 1 << 30), st.booleans())
def test_simulators_agree_on_random_steps(seed, offload):
    rng = np.random.default_rng(seed)
    blocks = int(rng.integers(1, 5))
    model = random_chain(rng, blocks, rates=offload)
    chain = chain_of(model)
    for count in (0, 1, 2, 5, 12):
        check_simulators_agree(model, chain, random_steps(rng, blocks, count, offload))


def test_simulators_agree_on_schedules_that_are_nearly_valid():
    rng = np.random.default_rng(99)
    valid = invalid = 0
    for _ in range(60):
        blocks = int(rng.integers(2, 9))
        offload = bool(rng.integers(2))
        model = random_chain(rng, blocks, KINDS[rng.integers(4)], rates=offload)
        chain = chain_of(model)
        least = _core.plan_least(chain._arrays, offload)
        budget = int(rng.integers(least, chain.plain_peak_bytes + 1))
        steps = plan(chain, budget, schedules="any", offload=offload).steps()
        assert check_simulators_agree(model, chain, steps)
        for _ in range(12):
            changed = mutated(rng, steps, blocks)
            good = check_simulators_agree(model, chain, changed)
            valid, invalid = valid + good, invalid + (not good)
    assert valid > 20 and invalid > 200


@pytest.mark.parametrize("slots", [None, 7, 40])
def test_no_plan_loses_to_recomputing_every_block(slots):
    rng = random.Random(4)
    for _ in range(40):
        n = rng.randint(1, 12)
        sizes = [rng.randint(1, 99) for _ in range(n + 1)]
        chain = Chain(
            [rng.randint(1, 9) for _ in range(n)],
            [1] * n,
            sizes,
            [size + rng.randint(0, 300) for size in sizes[1:]],
            head_bytes=rng.choice([0, sizes[-1] + rng.randint(0, 500)]),
            outside_bytes=rng.randint(0, 9),
        )
        every = Plan.from_recomputed(chain, range(n))
        found = plan(chain, every.predicted_peak_bytes, slots=slots)
        assert found.predicted_seconds <= every.predicted_seconds
        peak = every.predicted_peak_bytes
        curve = pareto(chain, slots=slots)
        assert any(p[0] <= peak and p[1] <= every.predicted_seconds for p in curve)


def test_a_head_runs_once_and_is_in_no_step():
    ones = [1, 1, 1]
    chain = Chain(ones, ones, [2, 2, 2, 2], [9, 9, 9], head_bytes=50, outside_seconds=4)
    assert chain.plain_peak_bytes == 2 + 27 + 50 and chain.plain_seconds == 10
    assert chain.least_budget_bytes == 2 + 2 + 50
    tight = plan(chain, 2 + 3 * 2 + 50)
    assert tight.recomputed == [0, 1, 2] and tight.predicted_seconds == 13
    assert {index for kind, index in tight.steps() if kind != "drop"} == {0, 1, 2}
    for made in (tight, plan(chain, 70, schedules="any"), Plan.from_recomputed(chain, [1])):
        assert Plan.from_json(made.to_json()) == made
        assert Plan(chain, made.steps()).predicted_peak_bytes >= made.predicted_peak_bytes
    with pytest.raises(TypeError, match="note must be a str"):
        Chain(ones, ones, [2, 2, 2, 2], [9, 9, 9], note=3)
