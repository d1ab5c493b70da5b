"""Combined strategies: same results as Python's operators, and every strategy sees every call."""

import copy
import itertools
import pickle

import numpy as np
import pytest

from mlstate.activation import (
    AllOf,
    AnyOf,
    CheckpointStrategy,
    FirstMatch,
    IntervalStrategy,
    MemoryAwareStrategy,
    Not,
    SelectiveStrategy,
    SizeBasedStrategy,
    SmartStrategy,
)

ARRAY = np.zeros(16, np.float32)


class Fixed:
    """A user-defined strategy: returns a fixed decision and records its calls."""

    def __init__(self, *answers):
        self.answers, self.calls, self.resets = answers, [], 0

    def should_checkpoint(self, layer_id, activation, layer_index):
        self.calls.append((layer_id, layer_index))
        return self.answers[(len(self.calls) - 1) % len(self.answers)]

    def reset(self):
        self.resets += 1


class Named(Fixed):
    name = "Mine"


def ask(strategy, count=1):
    return [strategy.should_checkpoint(f"l{i}", ARRAY, i) for i in range(count)]


@pytest.mark.parametrize("answers", list(itertools.product([True, False], repeat=3)))
def test_operators_follow_boolean_logic(answers):
    a, b, c = answers
    assert ask(AllOf(*map(Fixed, answers))) == [a and b and c]
    assert ask(AnyOf(*map(Fixed, answers))) == [a or b or c]
    assert ask(Not(Fixed(a))) == [not a]
    assert ask(FirstMatch(*map(Fixed, answers))) == [a]
    assert ask(IntervalStrategy(1) & Fixed(a)) == ask(Fixed(a) & IntervalStrategy(1)) == [a]
    assert ask(~SelectiveStrategy() & (Fixed(a) | SmartStrategy()) & ~Not(Fixed(b))) == [a and b]


@pytest.mark.parametrize("make", [AllOf, AnyOf, FirstMatch])
def test_every_member_sees_every_call(make):
    members = [Fixed(True), Fixed(False), Fixed(None), Fixed(True)]
    ask(make(*members), 5)
    for member in members:
        assert member.calls == [(f"l{i}", i) for i in range(5)]


def test_members_count_calls_after_a_decision():
    interval, sized = IntervalStrategy(2), SizeBasedStrategy(1)
    ask(FirstMatch(SelectiveStrategy(["l0"], ["l1"]), interval, sized), 10)
    assert (interval.checkpointed_count, sized.checkpointed_count) == (5, 10)


def test_first_match_skips_members_without_opinion():
    named = SelectiveStrategy(["l1"], ["l2"])
    assert ask(FirstMatch(named, IntervalStrategy(2)), 4) == [True, True, False, False]
    assert ask(FirstMatch(named), 4) == [False, True, False, False]
    assert ask(FirstMatch(named, default=True), 4) == [True, True, False, True]
    assert ask(FirstMatch(Fixed(None, True), Fixed(False)), 2) == [False, True]
    nested = FirstMatch(FirstMatch(named), IntervalStrategy(2))
    assert ask(nested, 4) == [True, True, False, False]


@pytest.mark.parametrize("answers", list(itertools.product([True, False, None], repeat=2)))
def test_opinions_of_composites(answers):
    """Kleene's three-valued logic: None unless the other operands decide."""
    a, b = answers
    both = False if False in answers else None if None in answers else True
    either = True if True in answers else None if None in answers else False
    assert AllOf(Fixed(a), Fixed(b)).opinion("l", ARRAY, 0) is both
    assert AnyOf(Fixed(a), Fixed(b)).opinion("l", ARRAY, 0) is either
    assert Not(Fixed(a)).opinion("l", ARRAY, 0) is (None if a is None else not a)
    assert FirstMatch(Fixed(a), Fixed(b)).opinion("l", ARRAY, 0) is (b if a is None else a)


def test_answers_are_converted_to_bool():
    for strategy in (
        AllOf(Fixed(np.True_), Fixed(1)),
        AnyOf(Fixed(0), Fixed(np.True_)),
        Not(Fixed(0)),
        FirstMatch(Fixed(1)),
    ):
        assert ask(strategy)[0] is True
    assert AllOf(Fixed(1)).opinion("l", ARRAY, 0) is True


def test_names_show_members_and_operators():
    a, b = IntervalStrategy(2), SizeBasedStrategy()
    assert (a & b).name == "(Interval(2) & SizeBased(1MB))"
    assert (a | ~b).name == "(Interval(2) | ~SizeBased(1MB))"
    assert (~(a & b)).name == "~(Interval(2) & SizeBased(1MB))"
    assert FirstMatch(Named(True), Fixed(True), a).name == "FirstMatch(Mine, Fixed, Interval(2))"
    with pytest.raises(TypeError, match="default must be True or False, got str"):
        FirstMatch(a, default="no")
    assert repr(FirstMatch(a, default=True)) == (
        "FirstMatch(IntervalStrategy(interval=2), default=True)"
    )
    assert repr(a & b) == (
        "AllOf(IntervalStrategy(interval=2), SizeBasedStrategy(min_size_bytes=1048576))"
    )


def test_composites_are_strategies_too():
    a = IntervalStrategy(2)
    for strategy in (a & a, a | a, ~a, FirstMatch(a)):
        assert isinstance(strategy, CheckpointStrategy)
        assert isinstance(strategy & Named(True), AllOf)
        assert isinstance(Named(True) | strategy, AnyOf)


def test_reset_reaches_all():
    member, interval = Fixed(True), IntervalStrategy(1)
    strategy = ~(member & interval)
    ask(strategy, 3)
    strategy.reset()
    assert (member.resets, interval.checkpointed_count) == (1, 0)


def test_non_strategies_are_refused():
    a = IntervalStrategy(2)
    for make in (AllOf, AnyOf, FirstMatch, Not):
        with pytest.raises(TypeError, match="needs a method should_checkpoint, got int"):
            make(5)
        with pytest.raises(TypeError, match="must be an object, got the class IntervalStrategy"):
            make(IntervalStrategy)
        with pytest.raises(TypeError):
            make()
    for combine in (lambda: a & 5, lambda: 5 | a, lambda: a & IntervalStrategy):
        with pytest.raises(TypeError, match="unsupported operand"):
            combine()
    with pytest.raises(TypeError):
        Not(a, a)


def test_member_errors_propagate():
    class Bad(Fixed):
        def should_checkpoint(self, layer_id, activation, layer_index):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        ask(IntervalStrategy(2) & Bad())
    with pytest.raises(ValueError, match="0 or more"):
        (IntervalStrategy(2) | SmartStrategy()).should_checkpoint("a", ARRAY, -1)


def test_copies_equality_and_pickles():
    strategy = FirstMatch(
        SelectiveStrategy(["a"]) & MemoryAwareStrategy(0.5), ~IntervalStrategy(2), default=True
    )
    ask(strategy, 7)
    for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert other == strategy and hash(other) == hash(strategy)
        assert other.members[1].members[0].checkpointed_count == 4
        assert ask(other, 5) == ask(strategy, 5)
    a, b = IntervalStrategy(2), SmartStrategy()
    assert a & b == AllOf(a, b) != a | b
    assert a & b != b & a
    assert FirstMatch(a) != FirstMatch(a, default=True)
    assert ~a != a
