"""Plans made without a search: the user or a strategy chooses the blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlstate import CapacityError
from mlstate.activation import (
    Chain,
    IntervalStrategy,
    Plan,
    SelectiveStrategy,
    SizeBasedStrategy,
    SmartStrategy,
    plan,
)

CHAIN = Chain([1, 2, 4], [2, 4, 8], [10, 20, 30, 5], [50, 60, 40], names=["a", "b", "c"])


def one_by_one(blocks, n):
    """The expected steps, from a simple loop."""
    steps = [("forward" if i in blocks else "save", i) for i in range(n)]
    for i in reversed(range(n)):
        if i in blocks:
            steps += [("drop", i + 1), ("save", i)]
        steps.append(("backward", i))
    return steps


def random_chain(numbers, n):
    activations = numbers.integers(0, 50, n + 1)
    saved = activations[1:] + numbers.integers(0, 90, n)
    return Chain(numbers.integers(0, 9, n), numbers.integers(0, 9, n), activations, saved)


@given(seed=st.integers(0, 2**32), n=st.integers(1, 9))
def test_blocks_recompute_from_their_input(seed, n):
    numbers = np.random.default_rng(seed)
    chain = random_chain(numbers, n)
    blocks = np.flatnonzero(numbers.random(n) < 0.5).tolist()
    schedule = Plan.from_recomputed(chain, numbers.permutation(blocks).astype(int))
    assert [tuple(step) for step in schedule.steps()] == one_by_one(set(blocks), n)
    assert schedule.recomputed == blocks
    assert schedule.predicted_seconds == chain.plain_seconds + chain.forward_seconds[blocks].sum()
    best = plan(chain, schedule.predicted_peak_bytes)
    assert best.predicted_seconds <= schedule.predicted_seconds


def test_empty_selection_recomputes_no_block():
    schedule = Plan.from_recomputed(CHAIN, [])
    assert schedule.predicted_peak_bytes == CHAIN.plain_peak_bytes
    assert schedule.predicted_seconds == CHAIN.plain_seconds


@pytest.mark.parametrize(
    ("strategy", "blocks", "name"),
    [
        (IntervalStrategy(2), [0, 2], "Interval(2)"),
        (SelectiveStrategy(["b"]), [1], "Selective"),
        (SizeBasedStrategy(20), [1, 2], "SizeBased(20B)"),
        (~SizeBasedStrategy(20), [0], "~SizeBased(20B)"),
        (SmartStrategy(), [], "Smart"),
    ],
)
def test_a_strategy_decides_by_name_size_and_number(strategy, blocks, name):
    schedule = Plan.from_strategy(CHAIN, strategy)
    assert schedule.recomputed == blocks
    assert schedule.method == name
    assert f"not searched for: the choice of {name}" in schedule.report()
    assert not schedule.exact


def test_smart_decides_in_the_second_pass():
    chain = Chain([1] * 14, [2] * 14, [10] * 15, [40] * 14)
    assert Plan.from_strategy(chain, SmartStrategy(), passes=1).recomputed == [12, 13]
    assert Plan.from_strategy(chain, SmartStrategy()).recomputed == [10, 11, 12, 13]


def test_a_strategy_is_asked_in_every_pass():
    strategy = IntervalStrategy(1)
    Plan.from_strategy(CHAIN, strategy, passes=3)
    assert strategy.checkpointed_count == 9


def test_strategy_sees_sizes_without_allocation():
    chain = Chain([1], [1], [1 << 44, 1], [1])
    assert Plan.from_strategy(chain, SizeBasedStrategy(1 << 44)).recomputed == [0]


def test_invalid_blocks_are_refused():
    with pytest.raises(IndexError, match="block 3: this chain has 3"):
        Plan.from_recomputed(CHAIN, [0, 3])
    with pytest.raises(IndexError, match="block -1"):
        Plan.from_recomputed(CHAIN, [-1])
    for mask in ([True, False, True], np.array([True, False, True])):
        with pytest.raises(
            TypeError, match=r"True is not a block number: convert a mask with np.flatnonzero"
        ):
            Plan.from_recomputed(CHAIN, mask)
    with pytest.raises(ValueError, match="passes must be from 1 to 1000, got 0"):
        Plan.from_strategy(CHAIN, IntervalStrategy(), passes=0)
    with pytest.raises(CapacityError, match="exceeds the budget of 60"):
        Plan.from_recomputed(CHAIN, [0], budget_bytes=60)


def test_it_comes_back_from_json():
    schedule = Plan.from_strategy(CHAIN, IntervalStrategy(2), budget_bytes=1000)
    again = Plan.from_json(schedule.to_json())
    assert again == schedule
    assert again._repr_html_() == schedule._repr_html_()
