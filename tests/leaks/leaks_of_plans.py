"""Leak cases of plans: chains, plans, curves and errors."""

import pickle

import numpy as np
from leak_cases import case, each, raises, with_members

from mlstate import _core, activation, errors


def chain_of(blocks, **options):
    """A chain of different blocks, with names."""
    rng = np.random.default_rng(3)
    activation_bytes = rng.integers(100, 1000, blocks + 1)
    return activation.Chain(
        rng.random(blocks),
        rng.random(blocks),
        activation_bytes,
        activation_bytes[1:] + rng.integers(0, 3000, blocks),
        names=[f"block {i}" for i in range(blocks)],
        **options,
    )


@case("Chain", "Chain.to_json", "Chain.from_json", "Chain.least_budget_bytes")
def chains(_):
    chain = chain_of(9)
    seconds = np.ones(9)

    def use():
        parsed = activation.Chain.from_json(chain.to_json())
        assert parsed == pickle.loads(pickle.dumps(chain)) and hash(parsed) == hash(chain)
        assert parsed.plain_peak_bytes >= parsed.least_budget_bytes > 0
        repr(parsed), str(parsed), parsed._repr_html_()
        activation.Chain(seconds, seconds, np.ones(10, np.int64), np.ones(9, np.int64))

    return use, [chain, seconds, *chain._arrays[:8]]


@case(
    "plan",
    *with_members("Plan", "steps simulate report to_json from_json"),
    "Simulation",
    "Step",
    calls=60,
)
def plans(_):
    chain = chain_of(9, offload_bytes_per_second=1e5, load_bytes_per_second=1e5)
    budget = (chain.least_budget_bytes + chain.plain_peak_bytes) // 2

    def use():
        for options in ({}, {"slots": 40}, {"offload": True}, {"slots": 1}):
            plan = activation.plan(chain, budget, **options)
            assert activation.Plan.from_json(plan.to_json()) == plan
            (
                plan.simulate(),
                plan.report(),
                repr(plan),
                plan._repr_html_(),
                hash(plan),
            )
            assert len(plan.kept) + len(plan.recomputed) <= len(plan.steps())
        activation.plan(chain, chain.plain_peak_bytes)
        activation.records.Simulation(*plan.simulate())
        activation.records.Step("save", 1)

    return use, [chain, *chain._arrays[:8]]


@case("Plan.from_recomputed", "Plan.from_strategy", calls=60)
def given_plans(_):
    chain, strategy = chain_of(9), activation.IntervalStrategy(3)
    blocks = [0, 3, 6]

    def use():
        plan = activation.Plan.from_strategy(chain, strategy)
        assert plan == activation.Plan.from_recomputed(chain, blocks)
        repr(plan), plan.report()
        raises(IndexError, activation.Plan.from_recomputed, chain, [0, 9])()
        raises(ValueError, activation.Plan.from_strategy, chain, strategy, passes=0)()
        raises(errors.CapacityError, activation.Plan.from_recomputed, chain, [], budget_bytes=5)()

    return use, [chain, strategy, blocks, *chain._arrays[:8]]


@case("pareto", "Pareto", "Pareto.plan", calls=60)
def curves(_):
    chain = chain_of(7)

    def use():
        for slots in (None, 30):
            curve = activation.pareto(chain, slots=slots)
            assert len(list(curve)) == len(curve)
            curve.plan(0), repr(curve), str(curve), curve._repr_html_()
        activation.records.Pareto(chain)

    return use, [chain, *chain._arrays[:8]]


@case()
def refused_plans(_):
    chain = chain_of(6)
    arrays = chain._arrays
    bad = np.zeros((3, 2), np.float32)
    steps = np.full((1, 2), 9, np.int32)
    return each(
        raises(errors.CapacityError, activation.plan, chain, 5),
        raises(errors.CapacityError, activation.plan, chain, 5, slots=9),
        raises(errors.CapacityError, activation.plan, chain, 1 << 70),
        raises(ValueError, activation.plan, chain, -5),
        raises(ValueError, activation.plan, chain, "1 X"),
        raises(ValueError, activation.plan, chain, 5, offload=True),
        raises(ValueError, activation.Plan, chain, [("save", 1)]),
        raises(ValueError, activation.Chain, [1], [-1], [1, 1], [1]),
        raises(ValueError, activation.Chain.from_json, "{}"),
        raises(TypeError, _core.chain_check, arrays[:5]),
        raises(TypeError, _core.chain_check, (*arrays[:4], bad, *arrays[5:])),
        raises(TypeError, _core.chain_check, (*arrays[:9], "fast")),
        raises(TypeError, _core.chain_simulate, arrays, bad, True),
        raises(ValueError, _core.chain_simulate, arrays, steps, True),
        raises(TypeError, _core.plan_make, arrays, 5, "many", False),
        raises(TypeError, _core.plan_pareto, None, 5, False),
        raises(TypeError, _core.plan_least, arrays),
    ), [chain, bad, steps, *arrays[:8]]
