"""Tier placement compared with a plain Python model; budgets are never exceeded."""

from dataclasses import dataclass, field
from threading import Lock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import tries

from mlstate import errors
from mlstate.checkpoint._tiers.policy import USE, TierPolicy

HOT, WARM, COLD = TIERS = ("hot", "warm", "cold")


@dataclass
class Unit:
    """The fields of `PlacedUnit`, and the order of addition."""

    number: int
    nbytes: int
    tier: str
    score: int = 0
    used_at: int = 0
    held: list = field(default_factory=list)  # locks of the uses


class Model:
    """The same decisions, written as the documentation describes them."""

    def __init__(self, hot, warm):
        self.budgets = {"hot": hot, "warm": warm}
        self.units = []
        self.clock = 0

    def used(self, tier, units=None):
        return sum(u.nbytes for u in (self.units if units is None else units) if u.tier == tier)

    def left(self, tier, used):
        budget = self.budgets[tier]
        return float("inf") if budget is None else max(0, budget - used)

    def use(self, unit):
        self.clock += 1
        unit.score, unit.used_at = unit.score + USE, self.clock

    def worst_first(self, tier, besides):
        movable = [
            u for u in self.units if u.tier == tier and not u.held and u.nbytes and u is not besides
        ]
        return sorted(movable, key=lambda u: (u.score, u.used_at, -u.number))

    def victims(self, tier, besides, need):
        """The least used units that free enough, without unneeded ones; None if impossible."""
        chosen = []
        for unit in self.worst_first(tier, besides):
            if sum(u.nbytes for u in chosen) >= need:
                break
            chosen.append(unit)
        if sum(u.nbytes for u in chosen) < need:
            return None
        for unit in reversed(list(chosen)):
            if sum(u.nbytes for u in chosen) - unit.nbytes >= need:
                chosen.remove(unit)
        return chosen

    def need(self, tier, extra, leaving=0):
        used = self.used(tier) - leaving
        if self.budgets[tier] is None or used + extra <= self.budgets[tier]:
            return 0
        return used + extra - self.budgets[tier]

    def make_room(self, unit, tier):
        if self.budgets[tier] is not None and unit.nbytes > self.budgets[tier]:
            return None
        counted = unit.nbytes if unit.tier == tier else 0
        need = self.need(tier, unit.nbytes, counted) if self.left(tier, 0) != float("inf") else 0
        if unit.nbytes <= self.left(tier, self.used(tier) - counted):
            need = 0
        first = self.victims(tier, unit, need) if need else []
        if first is None:
            return None
        if tier == "warm":
            return [(u.number, "cold") for u in first]
        total = sum(u.nbytes for u in first)
        leaving = unit.nbytes if unit.tier == "warm" else 0
        more = 0
        if total > self.left("warm", self.used("warm") - leaving):
            more = self.need("warm", total, leaving)
        second = self.victims("warm", unit, more) if more else []
        if second is None:
            return [(u.number, "cold") for u in first]
        return [(u.number, "cold") for u in second] + [(u.number, "warm") for u in first]

    def rebalance(self):
        """The final tiers by unit number."""
        movable = [u for u in self.units if not u.held]
        pinned = [u for u in self.units if u.held]
        left = {tier: self.left(tier, self.used(tier, pinned)) for tier in ("hot", "warm")}

        def order(unit):
            steps = 2 - TIERS.index(unit.tier)
            weight = unit.score + unit.score // 4 * steps
            return -weight, TIERS.index(unit.tier), -unit.used_at, unit.number

        places = {}
        for unit in sorted(movable, key=order):
            nearest = 0 if unit.score else TIERS.index(unit.tier)
            good = [t for t in TIERS[nearest:2] if unit.nbytes <= left[t]]
            places[unit.number] = good[0] if good else "cold"
            if good:
                left[good[0]] -= unit.nbytes
        for unit in self.units:
            unit.score //= 2
        return places


budgets = st.one_of(st.none(), st.integers(0, 60))
steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "use", "use", "hold", "release", "room", "rebalance"]),
        st.integers(0, 9),
        st.integers(0, 20),
        st.sampled_from(TIERS),
    ),
    max_size=60,
)


def hold(policy, name):
    """Count a use that lasts until the returned lock is released."""
    user = Lock()
    user.acquire()
    policy.hold(name, user)
    return user


def follow(policy, moves):
    for name, tier in moves:
        policy.begin(name, tier)
        policy.end(name, moved=True)


def follow_both(policy, model, moves):
    follow(policy, moves)
    for name, tier in moves:
        model.units[name].tier = tier


@settings(max_examples=tries(150), deadline=None)
@given(budgets, budgets, steps)
def test_decisions_match_a_reference_model(hot, warm, steps):
    policy, model = TierPolicy(hot, warm), Model(hot, warm)
    for action, which, nbytes, tier in steps:
        if action == "add" or not model.units:
            policy.add(len(model.units), nbytes, tier)
            model.units.append(Unit(len(model.units), nbytes, tier))
            continue
        unit = model.units[which % len(model.units)]
        if action == "use":
            policy.hold(unit.number, Lock())
            model.use(unit)
        elif action == "hold":
            unit.held.append(hold(policy, unit.number))
            model.use(unit)
        elif action == "release" and unit.held:
            unit.held.pop().release()
        elif action == "room" and tier != "cold" and not unit.held:
            expected = model.make_room(unit, tier)
            if expected is None:
                with pytest.raises(errors.CapacityError):
                    policy.make_room(unit.number, tier)
                continue
            moves = policy.make_room(unit.number, tier)
            assert moves == expected
            follow_both(policy, model, moves)
            if unit.tier != tier:
                policy.check_fits(unit.number, tier)  # now it fits
        elif action == "rebalance":
            expected = model.rebalance()
            moves = policy.rebalance()
            follow_both(policy, model, moves)
            assert {u.number: u.tier for u in model.units if u.number in expected} == expected
            pinned = [u for u in model.units if u.held]
            for name in ("hot", "warm"):
                limit = model.budgets[name]
                if limit is not None:
                    assert model.used(name) <= max(limit, model.used(name, pinned))
            assert policy.rebalance() == [] or any(u.score for u in model.units)
            for u in model.units:
                u.score //= 2
        totals = [used for used, _ in policy.totals().values()]
        assert totals == [model.used(name) for name in TIERS]
        for u in model.units:
            assert policy[u.number].tier == u.tier
            assert policy[u.number].score == u.score


@settings(max_examples=tries(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(TIERS), st.integers(0, 5)), max_size=12)
)
def test_rebalancing_exceeds_budgets_only_by_swapped_units(units):
    hot, warm = 12, 20
    policy = TierPolicy(hot, warm)
    where, size = {}, {}
    for number, (nbytes, tier, uses) in enumerate(units):
        policy.add(number, nbytes, tier)
        where[number], size[number] = tier, nbytes
        for _ in range(uses):
            policy.hold(number, Lock())

    def used(tier):
        return sum(size[n] for n in where if where[n] == tier)

    most = {"hot": max(hot, used("hot")), "warm": max(warm, used("warm"))}
    for number, tier in policy.rebalance():
        where[number] = tier
        assert used("hot") <= most["hot"]
        assert used("warm") <= most["warm"] + used("hot") + hot
    assert used("hot") <= hot and used("warm") <= warm


def policy_of(hot, warm, *units):
    """Return a policy with units "a", "b", ..., each (bytes, tier, number of uses)."""
    policy = TierPolicy(hot, warm)
    for name, (nbytes, tier, uses) in zip("abcdefgh", units, strict=False):
        policy.add(name, nbytes, tier)
        for _ in range(uses):
            policy.hold(name, Lock())
    return policy


def bytes_in(policy):
    return [nbytes for nbytes, _ in policy.totals().values()]


def test_units_count_toward_their_tier():
    policy = policy_of(100, None, (10, WARM, 0), (20, COLD, 0), (30, HOT, 0))
    assert policy.totals() == {HOT: (30, 100), WARM: (10, None), COLD: (20, None)}
    policy.resize("a", 15)
    policy.remove("b")
    assert bytes_in(policy) == [30, 15, 0]


def test_a_move_counts_in_both_tiers_until_it_ends():
    policy = policy_of(100, 100, (60, WARM, 0))
    policy.begin("a", HOT)
    assert bytes_in(policy) == [60, 60, 0] and policy["a"].is_pinned
    policy.end("a", moved=False)
    assert bytes_in(policy) == [0, 60, 0] and policy["a"].tier == WARM
    policy.begin("a", HOT)
    policy.end("a", moved=True)
    assert bytes_in(policy) == [60, 0, 0] and policy["a"].tier == HOT and not policy["a"].is_pinned


def test_a_unit_that_does_not_fit_reports_the_reason():
    policy = policy_of(10, 100, (70, WARM, 0), (40, COLD, 0), (30, COLD, 0))
    policy.check_fits("c", WARM)
    policy.check_fits("b", COLD)
    with pytest.raises(errors.CapacityError, match="warm budget of 100 bytes 30 are left"):
        policy.check_fits("b", WARM)
    with pytest.raises(errors.CapacityError, match="more than the whole hot budget of 10 bytes"):
        policy.check_fits("b", HOT)


def test_eviction_takes_the_least_used_then_the_longest_unused():
    policy = policy_of(None, 100, (40, WARM, 2), (30, WARM, 1), (30, WARM, 1), (50, COLD, 0))
    assert policy.make_room("d", WARM) == [("b", COLD), ("c", COLD)]
    follow(policy, [("b", COLD), ("c", COLD)])
    assert policy.make_room("d", WARM) == []  # there is room


def test_eviction_spares_units_covered_by_a_larger_one():
    policy = policy_of(None, 100, (10, WARM, 0), (90, WARM, 1), (80, COLD, 0))
    assert policy.make_room("c", WARM) == [("b", COLD)]


def test_units_in_use_are_kept_and_reported():
    policy = policy_of(5, 100, (60, WARM, 0), (40, WARM, 0), (50, COLD, 0))
    user = hold(policy, "a")
    with pytest.raises(errors.CapacityError, match="units in use or moving occupy too much"):
        policy.make_room("c", WARM)
    with pytest.raises(errors.CapacityError, match="more than the whole hot budget"):
        policy.make_room("c", HOT)
    user.release()
    hold(policy, "b")
    assert policy.make_room("c", WARM) == [("a", COLD)]


def test_hot_units_move_to_warm_and_warm_ones_to_cold():
    policy = policy_of(50, 100, (50, HOT, 0), (50, WARM, 0), (50, WARM, 0), (50, COLD, 0))
    assert policy.make_room("b", HOT) == [("a", WARM)]  # they are exchanged
    assert policy.make_room("d", HOT) == [("c", COLD), ("a", WARM)]
    hold(policy, "b")
    hold(policy, "c")
    assert policy.make_room("d", HOT) == [("a", COLD)]  # too large for warm


def test_a_grown_unit_evicts_others_of_its_tier():
    policy = policy_of(None, 100, (50, WARM, 0), (50, WARM, 0))
    policy.resize("a", 70)
    assert policy.make_room("a", WARM) == [("b", COLD)]


def test_the_most_used_units_move_to_hot():
    units = (10, HOT, 1), (10, WARM, 5), (10, WARM, 0), (10, COLD, 9), (10, COLD, 0)
    policy = policy_of(10, 20, *units)
    moves = policy.rebalance()
    assert moves == [("c", COLD), ("a", WARM), ("d", HOT)]
    assert policy["d"].score == 9 * USE / 2 and policy["d"].uses == 9
    follow(policy, moves)
    assert bytes_in(policy) == [10, 20, 20]
    assert policy.rebalance() == []  # stable


def test_equally_used_units_do_not_swap():
    policy = policy_of(0, 10, (10, WARM, 8), (10, COLD, 10))
    assert policy.rebalance() == []  # exactly a quarter more is not enough
    policy = policy_of(0, 10, (10, WARM, 8), (10, COLD, 11))
    assert policy.rebalance() == [("a", COLD), ("b", WARM)]


def test_unused_units_move_only_out_of_a_tier_over_its_budget():
    units = (10, WARM, 0), (10, WARM, 0), (10, WARM, 0), (10, COLD, 0)
    assert policy_of(None, 25, *units).rebalance() == [("c", COLD)]


def test_negative_budgets_are_refused():
    with pytest.raises(ValueError, match="hot_budget_bytes must not be negative, got -1"):
        TierPolicy(-1, None)
    with pytest.raises(ValueError, match="warm_budget_bytes must not be negative, got -2"):
        TierPolicy(0, -2)
