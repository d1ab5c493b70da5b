"""Which units are hot, warm or cold, by use counts and budgets; which one must leave.

A unit is the smallest movable group, such as a parameter and its optimizer states. This module
knows only its size, tier and use counts. The owner of the bytes moves them, reports each move,
and holds a lock during every call.

- Accessing a unit in a farther tier takes time proportional to its size, so a byte of budget is
  worth as much as its unit's use count. Units are chosen in order of use; units that do not fit
  are skipped (the greedy choice of G. Dantzig: "Discrete-variable extremum problems", 1957).
- Use counts age: each rebalance halves them (J. Robinson, M. Devarakonda: "Data cache management
  using frequency-based replacement", 1990).
- A unit keeps its tier unless another unit was used a quarter more often, so that equally used
  units do not swap repeatedly.

A moving unit exists in two tiers and counts in both. The source tier's budget is exact again when
the move ends.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, TypeAlias

from ... import _core
from ..._sharding.layout import TIERS, Tier
from ...errors import CapacityError

USE = 1 << 20  # score of one use

Moves: TypeAlias = list[tuple[str, Tier]]  # names of units and their new tiers


class PlacedUnit:
    """Size, tier and use counts of one unit."""

    __slots__ = ("moving_to", "name", "nbytes", "score", "tier", "used_at", "users", "uses")

    def __init__(self, name: str, nbytes: int, tier: Tier) -> None:
        """Create the unit `name` of `nbytes` bytes in `tier`, without uses."""
        self.name = name
        self.nbytes = nbytes
        self.tier = tier
        self.uses = 0
        self.score = 0  # uses with ageing, USE each
        self.used_at = 0  # clock value of the last use
        self.users: list[Any] = []  # a lock for each use, held by the call that uses the unit
        self.moving_to: Tier | None = None

    @property
    def is_pinned(self) -> bool:
        """Whether the unit is in use or moving, and must not move."""
        return self.moving_to is not None or any(user.locked() for user in self.users)


def _rank(unit: PlacedUnit) -> tuple[int, int, int]:
    """Return a key that sorts the most used unit first; then the nearer tier, the latest use.

    The score is a quarter higher for each tier that is nearer than cold, so that a unit must be
    used a quarter more often to displace another one from the next nearer tier.
    """
    place = TIERS.index(unit.tier)
    weight = unit.score + unit.score // 4 * (len(TIERS) - 1 - place)
    return -weight, place, -unit.used_at


class TierPolicy:
    """The units of a state by name, and the bytes in each tier.

    Decisions change nothing, so the owner may carry out a plan or drop it and ask again.
    """

    def __init__(self, hot_budget: int | None, warm_budget: int | None) -> None:
        """Create a policy without units.

        `hot_budget`, `warm_budget`: bytes, None for no limit. Raises ValueError if one is negative.
        """
        for label, budget in (("hot", hot_budget), ("warm", warm_budget)):
            if budget is not None and budget < 0:
                raise ValueError(f"{label}_budget_bytes must not be negative, got {budget}")
        self._budgets = {Tier.HOT: hot_budget, Tier.WARM: warm_budget, Tier.COLD: None}
        self._bytes = dict.fromkeys(TIERS, 0)
        self._units: dict[str, PlacedUnit] = {}
        self._clock = 0

    def __getitem__(self, name: str) -> PlacedUnit:
        return self._units[name]

    def totals(self) -> dict[Tier, tuple[int, int | None]]:
        """Return the bytes and the budget (None: no limit) of each tier.

        Moving units count in both tiers.
        """
        return {tier: (self._bytes[tier], self._budgets[tier]) for tier in TIERS}

    def add(self, name: str, nbytes: int, tier: Tier) -> None:
        """Add a unit of `nbytes` bytes that is in `tier` already, even beyond the budget."""
        self._units[name] = PlacedUnit(name, nbytes, tier)
        self._bytes[tier] += nbytes

    def remove(self, name: str) -> None:
        """Remove a unit that is not moving."""
        unit = self._units.pop(name)
        self._bytes[unit.tier] -= unit.nbytes

    def resize(self, name: str, nbytes: int) -> None:
        """Change the size of a unit that is not moving; the budget is not checked."""
        unit = self._units[name]
        self._bytes[unit.tier] += nbytes - unit.nbytes
        unit.nbytes = nbytes

    def hold(self, name: str, user: Any) -> None:
        """Count a use of the unit `name`, and pin it until the lock `user` is released."""
        unit = self._units[name]
        with _core.deferred_interrupts():
            unit.users = [*(each for each in unit.users if each.locked()), user]
            self._clock += 1
            unit.uses += 1
            unit.score += USE
            unit.used_at = self._clock

    # ---- one move ----

    def check_fits(self, name: str, tier: Tier) -> None:
        """Raise CapacityError if the unit `name` does not fit into `tier` as it is now."""
        unit, budget = self._units[name], self._budgets[tier]
        if unit.tier == tier or budget is None:
            return
        self._check_alone(unit, tier)
        left = max(0, budget - self._bytes[tier])
        if unit.nbytes > left:
            raise CapacityError(
                f"a unit of {unit.nbytes} bytes does not fit: of the {tier} budget of {budget} "
                f"bytes {left} are left"
            )

    def _check_alone(self, unit: PlacedUnit, tier: Tier) -> None:
        """Raise CapacityError if a unit is larger than the whole budget of `tier`."""
        budget = self._budgets[tier]
        if budget is not None and unit.nbytes > budget:
            raise CapacityError(
                f"a unit of {unit.nbytes} bytes is more than the whole {tier} budget of {budget} "
                "bytes"
            )

    def begin(self, name: str, to: Tier) -> None:
        """Begin a move to the tier `to`: the unit counts in both tiers, and is pinned.

        Every call must be followed by `end`, even after a failed move or call.
        """
        unit = self._units[name]
        # memory is allocated before the copy; one statement, which an error cannot split
        self._bytes[to], unit.moving_to = self._bytes[to] + unit.nbytes, to

    def end(self, name: str, *, moved: bool) -> None:
        """End a move, if one has begun; `moved` is False if the unit is still in its old tier."""
        unit = self._units[name]
        if unit.moving_to is not None:
            stays, leaves = unit.tier, unit.moving_to
            if moved:
                stays, leaves = leaves, stays
            left = self._bytes[leaves] - unit.nbytes
            self._bytes[leaves], unit.tier, unit.moving_to = left, stays, None

    # ---- making room ----

    def make_room(self, name: str, tier: Tier) -> Moves:
        """Return the moves that make space for the unit `name` in `tier`, in their order.

        The least used units move. Those from hot move to warm, which may move others from warm to
        cold; if warm cannot hold them, they move to cold. Raises CapacityError if the unit alone
        exceeds the budget, or pinned units leave too little of it.
        """
        unit = self._units[name]
        self._check_alone(unit, tier)
        counted_bytes = unit.nbytes if unit.tier == tier else 0  # it grew, and is part of the sum
        first = self._choose_victims(tier, unit, self._excess(tier, unit.nbytes, counted_bytes))
        if first is None:
            raise CapacityError(
                f"no room for a unit of {unit.nbytes} bytes: units in use or moving occupy too "
                f"much of the {tier} budget of {self._budgets[tier]} bytes"
            )
        to_cold: Moves = [(victim.name, Tier.COLD) for victim in first]
        if tier != Tier.HOT:
            return to_cold
        leaving = unit.nbytes if unit.tier == Tier.WARM else 0
        need = self._excess(Tier.WARM, sum(victim.nbytes for victim in first), leaving)
        second = self._choose_victims(Tier.WARM, unit, need)
        if second is None:
            return to_cold
        return [
            *((victim.name, Tier.COLD) for victim in second),
            *((victim.name, Tier.WARM) for victim in first),
        ]

    def _excess(self, tier: Tier, nbytes: int, leaving: int) -> int:
        """Return the bytes that must leave `tier` before `nbytes` more fit into it.

        `leaving`: bytes that leave it anyway.
        """
        budget = self._budgets[tier]
        if budget is None or not nbytes:
            return 0
        return max(0, self._bytes[tier] - leaving + nbytes - budget)

    def _choose_victims(
        self, tier: Tier, staying: PlacedUnit, need: int
    ) -> list[PlacedUnit] | None:
        """Return the least used units of `tier` with at least `need` bytes; None if impossible.

        `staying`: a unit that stays. Pinned units stay, too.
        """
        if not need:
            return []
        movable = [
            unit
            for unit in reversed(self._units.values())
            if unit.tier == tier and not unit.is_pinned and unit is not staying and unit.nbytes
        ]
        movable.sort(key=lambda unit: (unit.score, unit.used_at))
        candidates: list[PlacedUnit] = []
        freed = 0
        for unit in movable:
            if freed >= need:
                break
            candidates.append(unit)
            freed += unit.nbytes
        if freed < need:
            return None
        chosen: deque[PlacedUnit] = deque()
        for unit in reversed(candidates):  # a large unit may make smaller ones needless
            if freed - unit.nbytes >= need:
                freed -= unit.nbytes
            else:
                chosen.appendleft(unit)
        return list(chosen)

    # ---- rebalancing ----

    def rebalance(self) -> Moves:
        """Return the moves that place every unit by its use, and halve all scores.

        A unit that was never used does not move nearer, and moves only if its tier has no space.
        Pinned units stay.
        """
        ranked = sorted((unit for unit in self._units.values() if not unit.is_pinned), key=_rank)
        targets = self._choose_tiers(ranked)
        moves: Moves = [
            (unit.name, Tier.COLD) for unit, to in reversed(targets) if to == Tier.COLD != unit.tier
        ]
        moves += self._order_exchange(targets)
        moves += [
            (unit.name, Tier.WARM)
            for unit, to in targets
            if to == Tier.WARM and unit.tier == Tier.COLD  # now its space is free
        ]
        for unit in self._units.values():
            unit.score //= 2
        return moves

    def _choose_tiers(self, ranked: list[PlacedUnit]) -> list[tuple[PlacedUnit, Tier]]:
        """Return each unit of `ranked`, best first, with the nearest tier that has space for it.

        A unit without uses moves no nearer than its tier.
        """
        left = {
            tier: math.inf if budget is None else budget - used
            for tier, (used, budget) in self.totals().items()
        }
        for unit in ranked:
            left[unit.tier] += unit.nbytes
        left = {tier: max(0, nbytes) for tier, nbytes in left.items()}
        targets = []
        for unit in ranked:
            nearest = 0 if unit.score else TIERS.index(unit.tier)
            to = next(tier for tier in TIERS[nearest:] if unit.nbytes <= left[tier])
            left[to] -= unit.nbytes
            targets.append((unit, to))
        return targets

    def _order_exchange(self, targets: list[tuple[PlacedUnit, Tier]]) -> Moves:
        """Return the moves into hot and from hot to warm: a unit to hot if it fits, else one out.

        So hot never exceeds its budget, and warm exceeds it at most by the units in transit.
        `targets`: the units that may move, with their new tiers. Those to cold move before.
        """
        leaving = sum(u.nbytes for u, to in targets if u.tier == Tier.HOT and to == Tier.COLD)
        used, budget = self._bytes[Tier.HOT] - leaving, self._budgets[Tier.HOT]
        up = deque(unit for unit, to in targets if to == Tier.HOT != unit.tier)
        down = deque(unit for unit, to in targets if to == Tier.WARM and unit.tier == Tier.HOT)
        moves: Moves = []
        while up or down:
            left = math.inf if budget is None else max(0, budget - used)
            if up and (not down or up[0].nbytes <= left):
                unit = up.popleft()
                used += unit.nbytes
                moves.append((unit.name, Tier.HOT))
            else:
                unit = down.popleft()
                used -= unit.nbytes
                moves.append((unit.name, Tier.WARM))
        return moves
