"""Leak cases of tiered states."""

import itertools

import numpy as np
from leak_cases import case, raises, with_members

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
def file_names(_):
    names = itertools.cycle(("layer.0", "A/b" * 100))

    def use():
        assert _core.file_name(next(names), 3)
        raises(TypeError, _core.file_name, "a")()

    return use, []
