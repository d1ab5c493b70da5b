"""Tier placement compared with a plain Python model; budgets are never exceeded."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import tries

from mlstate import _core, errors

TIERS = ("hot", "warm", "cold")


@dataclass
class Unit:
    """The fields of csrc/core/checkpoint/tiers/tier_policy.h; one use counts 2**20."""

    number: int
    nbytes: int
    tier: str
    score: int = 0
    used_at: int = 0
    held: int = 0


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
        unit.score, unit.used_at = unit.score + 2**20, self.clock

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


def follow(table, model, moves):
    for number, tier in moves:
        table.begin(number, tier)
        table.end(number, tier, True)
        model.units[number].tier = tier


@settings(max_examples=tries(150), deadline=None)
@given(budgets, budgets, steps)
def test_decisions_match_a_reference_model(hot, warm, steps):
    table, model = _core.Tiers(hot, warm), Model(hot, warm)
    for action, which, nbytes, tier in steps:
        if action == "add" or not model.units:
            number = table.add(nbytes, tier)
            model.units.append(Unit(number, nbytes, tier))
            continue
        unit = model.units[which % len(model.units)]
        if action == "use":
            table.hold(unit.number)
            table.release(unit.number)
            model.use(unit)
        elif action == "hold":
            table.hold(unit.number)
            model.use(unit)
            unit.held += 1
        elif action == "release" and unit.held:
            table.release(unit.number)
            unit.held -= 1
        elif action == "room" and tier != "cold" and not unit.held:
            expected = model.make_room(unit, tier)
            if expected is None:
                with pytest.raises(errors.CapacityError):
                    table.make_room(unit.number, tier)
                continue
            moves = table.make_room(unit.number, tier)
            assert moves == expected
            follow(table, model, moves)
            if unit.tier != tier:
                table.fits(unit.number, tier)  # now it fits
        elif action == "rebalance":
            expected = model.rebalance()
            moves = table.rebalance()
            follow(table, model, moves)
            assert {u.number: u.tier for u in model.units if u.number in expected} == expected
            pinned = [u for u in model.units if u.held]
            for name in ("hot", "warm"):
                limit = model.budgets[name]
                if limit is not None:
                    assert model.used(name) <= max(limit, model.used(name, pinned))
            assert table.rebalance() == [] or any(u.score for u in model.units)
            for u in model.units:
                u.score //= 2
        totals = [used for used, _ in table.totals()]
        assert totals == [model.used(name) for name in TIERS]
        for u in model.units:
            assert table.unit(u.number)[1] == u.tier
            assert table.unit(u.number)[3] == u.score / 2**20


@settings(max_examples=tries(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(TIERS), st.integers(0, 5)), max_size=12)
)
def test_rebalancing_exceeds_budgets_only_by_swapped_units(units):
    hot, warm = 12, 20
    table = _core.Tiers(hot, warm)
    where, size = {}, {}
    for nbytes, tier, uses in units:
        number = table.add(nbytes, tier)
        where[number], size[number] = tier, nbytes
        for _ in range(uses):
            table.hold(number)
            table.release(number)

    def used(tier):
        return sum(size[n] for n in where if where[n] == tier)

    most = {"hot": max(hot, used("hot")), "warm": max(warm, used("warm"))}
    for number, tier in table.rebalance():
        where[number] = tier
        assert used("hot") <= most["hot"]
        assert used("warm") <= most["warm"] + used("hot") + hot
    assert used("hot") <= hot and used("warm") <= warm


@pytest.mark.parametrize(
    ("call", "arguments", "error"),
    [
        ("add", (1, "lukewarm"), ValueError),
        ("add", (-1, "hot"), ValueError),
        ("add", (1.5, "hot"), TypeError),
        ("add", (1,), TypeError),
        ("unit", (5,), ValueError),
        ("unit", ("a",), TypeError),
        ("remove", (5,), ValueError),
        ("resize", (5, 1), ValueError),
        ("hold", (5,), ValueError),
        ("release", (5,), ValueError),
        ("release", (0,), ValueError),
        ("end", (0, "hot", True), ValueError),
        ("begin", (0, 3), TypeError),
        ("fits", (0, "cold", 1), TypeError),
        ("make_room", (9, "hot"), ValueError),
    ],
)
def test_wrong_arguments_are_refused(call, arguments, error):
    table = _core.Tiers(None, 10)
    assert table.add(3, "warm") == 0
    with pytest.raises(error):
        getattr(table, call)(*arguments)
    assert table.unit(0) == (3, "warm", 0, 0.0, 0)
    assert table.totals() == ((0, None), (3, 10), (0, None))


@pytest.mark.parametrize("budget", [-1, 1.5, "many"])
def test_wrong_budgets_are_refused(budget):
    with pytest.raises((TypeError, ValueError)):
        _core.Tiers(budget, None)
    with pytest.raises((TypeError, ValueError)):
        _core.Tiers(None, budget)
