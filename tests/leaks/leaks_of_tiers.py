"""Leak cases of tiered states."""

import itertools

import numpy as np
from leak_cases import case, each, raises, with_members

from mlstate import _core, checkpoint, errors


@case(
    "StateDicts",
    "Tier",
    "Traffic",
    "TierRecord",
    "TierReport",
    *with_members(
        "TieredState", "add close demote open promote rebalance remove report state_dicts tier use"
    ),
    "TieredUnit",
    calls=20,
)
def tiers(tmp_path):
    arrays = [np.ones(9, np.float32) for _ in range(3)]
    folder = tmp_path / "tiers"

    def use():
        model = {"a": arrays[0], "b": arrays[1]}
        tiered = checkpoint.TieredState(model, {"a.m": arrays[2]}, folder, discard=True)
        with tiered:
            tiered.demote("a"), tiered.demote("b", checkpoint.Tier.COLD)
            with tiered.use("a") as unit:
                unit.parameter = unit.parameter + 1
                repr(unit)
            assert tiered.rebalance() == {"a": "hot"}
            tiered.state_dicts(), repr(tiered.report()), tiered._repr_html_()
            tiered.remove("a")
            tiered.add({"a": arrays[0]})
            raises(BufferError, demote_in_use, tiered)()
            raises(errors.TensorNotFoundError, tiered.promote, "c")()
            raises(ValueError, tiered.promote, "a", "lukewarm")()
        raises(errors.StoreError, checkpoint.TieredState, model, {}, folder)()
        with checkpoint.TieredState.open(folder) as opened:
            assert opened.promote("b") == opened.tier("b")

    return use, arrays


def demote_in_use(tiers):
    with tiers.use("a"):
        tiers.demote("a")


@case()
def tier_tables(_):
    names = itertools.cycle(("layer.0", "A/b" * 100))

    def use():
        table = _core.Tiers(100, None)
        units = [table.add(30, tier) for tier in ("hot", "warm", "cold") * 8]
        table.hold(units[1]), table.release(units[1])
        table.remove(units[2]), table.resize(units[3], 7)
        assert table.rebalance() and table.totals() and table.unit(0)
        table.make_room(units[4], "hot"), table.fits(units[5], "warm")
        table.begin(units[5], "warm"), table.end(units[5], "warm", True)
        assert _core.file_name(next(names), 3)

    return use, []


@case()
def refused_tier_tables(_):
    table = _core.Tiers(5, 5)
    unit = table.add(9, "cold")
    return each(
        raises(errors.CapacityError, table.fits, unit, "hot"),
        raises(errors.CapacityError, table.make_room, unit, "warm"),
        raises(ValueError, table.add, 1, "lukewarm"),
        raises(ValueError, table.unit, 7),
        raises(TypeError, table.begin, unit, None),
        raises(ValueError, _core.Tiers, -1, 0),
        raises(TypeError, _core.Tiers, 1),
        raises(TypeError, _core.file_name, "a"),
    ), [table]
