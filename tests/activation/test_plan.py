"""Plans of the core compared with the Python model; budgets, curves and invalid input."""

import json
import pickle

import numpy as np
import plan_model
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interruption import interrupt
from thread_team import num_threads, run_in_threads
from tries import tries

from mlstate import _core
from mlstate.activation import Chain, Plan, pareto, plan
from mlstate.activation.records import Step
from mlstate.errors import CapacityError


def chain_of(model):
    positional, named = model.arguments()
    return Chain(*positional, **named)


def random_chain(blocks, seed=0, **options):
    """A chain with realistic sizes."""
    rng = np.random.default_rng(seed)
    activation = rng.integers(1_000_000, 10_000_000, blocks + 1)
    temporary = {
        f"{name}_temporary_bytes": rng.integers(0, 3_000_000, blocks)
        for name in ("forward", "saving", "backward")
    }
    return Chain(
        rng.random(blocks) + 0.1,
        rng.random(blocks) + 0.2,
        activation,
        activation[1:] + rng.integers(0, 30_000_000, blocks),
        **temporary,
        **options,
    )


def uniform(blocks):
    return Chain([1] * blocks, [2] * blocks, [10] * (blocks + 1), [40] * blocks)


# ---- figures by hand, and comparison with the model ----

TWO = plan_model.ChainModel(
    forward=(1, 2),
    backward=(3, 4),
    activation=(10, 20, 5),
    saved=(50, 25),
    gradient=(10, 20, 5),
    forward_temporary=(1, 0),
    saving_temporary=(2, 3),
    backward_temporary=(7, 8),
    offload_rate=25.0,
    load_rate=50.0,
)


@pytest.mark.parametrize(
    ("steps", "before", "peak", "seconds"),
    [
        (
            "save 0, save 1, backward 1, backward 0",
            [10, 60, 85, 80],
            [62, 88, 85 + 5 + 20 + 8, 80 + 10 + 7],
            [1, 2, 4, 3],
        ),
        (
            "forward 0, save 1, backward 1, drop 1, save 0, backward 0",
            [10, 30, 55, 50, 30, 80],
            [31, 58, 55 + 5 + 20 + 8, 50, 82, 97],
            [1, 2, 4, 0, 1, 3],
        ),
        (
            "save 0, offload 0, save 1, backward 1, drop 1, load 0, backward 0",
            [10, 60, 30, 55, 50, 30, 80],
            [62, 60, 58, 88, 50, 80, 97],
            [1, 2, 2, 4, 0, 1, 3],
        ),
    ],
)
def test_step_figures_match_hand_computed_values(steps, before, peak, seconds):
    pairs = [(kind, int(index)) for kind, index in map(str.split, steps.split(", "))]
    run = Plan(chain_of(TWO), pairs).simulate()
    assert run.before_bytes.tolist() == before
    assert run.peak_bytes.tolist() == peak
    assert run.seconds.tolist() == seconds
    assert run.after_bytes.tolist() == [*before[1:], 20]


def check(model, budget, best, **options):
    """A plan is valid in the model too, within the budget, and as fast as possible."""
    chain = chain_of(model)
    if best is None:
        with pytest.raises(CapacityError, match="fits a budget"):
            plan(chain, budget, **options)
        return
    schedule = plan(chain, budget, **options)
    seen = plan_model.simulate(model, schedule.steps())
    assert seen.peak_bytes == schedule.predicted_peak_bytes <= budget
    assert seen.total_seconds == pytest.approx(schedule.predicted_seconds)
    simulated = schedule.simulate()
    assert simulated.before_bytes.tolist() == seen.before
    assert simulated.peak_bytes.tolist() == seen.most
    assert simulated.after_bytes.tolist() == seen.after
    np.testing.assert_allclose(simulated.seconds, seen.seconds)
    if options.get("slots") is None:
        assert schedule.exact
        assert schedule.predicted_seconds == pytest.approx(best, rel=1e-12)
    else:
        assert schedule.predicted_seconds >= best - 1e-9


@settings(max_examples=tries(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan_model.chains(most_blocks=6, rates=True), st.booleans(), st.integers(1, 60), st.data())
def test_plans_and_curves_are_optimal(model, offload, slots, data):
    front = plan_model.persistent_front(model, offload)
    near = st.sampled_from([budget for budget in plan_model.budgets_of(front) if budget >= 0])
    budget = data.draw(near | st.integers(0, 900))
    best = plan_model.fastest(front, budget)
    check(model, budget, best, offload=offload)
    check(model, budget, best, offload=offload, slots=slots)
    free_bytes = budget - model.activation[0]
    if best is not None and free_bytes > 0:  # slots of one byte lose nothing
        by_slots = plan(chain_of(model), budget, offload=offload, slots=free_bytes)
        assert by_slots.predicted_seconds == pytest.approx(best, rel=1e-5)
    curve = pareto(chain_of(model), offload=offload)
    assert curve.exact and _core.plan_least(chain_of(model)._arrays, offload) == front[0][0]
    assert curve.budget_bytes.tolist() == [peak for peak, _ in front]
    np.testing.assert_allclose(curve.seconds, [seconds for _, seconds in front], rtol=1e-12)


# ---- budgets ----


@pytest.mark.parametrize("slots", [None, 1, 7, 500])
def test_the_least_budget_is_named_and_is_enough(slots):
    for seed in range(5):
        chain = random_chain(12, seed)
        with pytest.raises(CapacityError) as caught:
            plan(chain, 1_000_000, slots=slots)
        least = int(caught.value.expected)
        assert least == chain.least_budget_bytes == pareto(chain)[0][0]
        assert caught.value.got == "1000000"
        assert plan(chain, least, slots=slots).predicted_peak_bytes == least
        with pytest.raises(CapacityError, match=str(least)):
            plan(chain, least - 1, slots=slots)


@pytest.mark.parametrize("slots", [None, 3, 500])
def test_large_budget_needs_no_recomputation(slots):
    chain = random_chain(40)
    for budget in (chain.plain_peak_bytes, 2**63 - 1):
        schedule = plan(chain, budget, slots=slots)
        assert schedule.predicted_peak_bytes == chain.plain_peak_bytes
        assert schedule.predicted_seconds == pytest.approx(chain.plain_seconds)
        assert schedule.overhead == pytest.approx(0) and schedule.exact
        assert schedule.kept == list(range(40)) and schedule.recomputed == []


def test_budget_below_unplanned_peak_forces_recomputation():
    chain = random_chain(10)
    schedule = plan(chain, chain.plain_peak_bytes - 1)
    assert schedule.recomputed and schedule.predicted_seconds > chain.plain_seconds


@pytest.mark.parametrize(
    ("budget", "options", "error", "text"),
    [
        (-1, {}, ValueError, "negative"),
        (-(2**63), {}, ValueError, "negative"),
        (float("nan"), {}, ValueError, "budget_bytes"),
        ("1 X", {}, ValueError, "budget_bytes"),
        (None, {}, TypeError, "budget_bytes"),
        (0, {}, CapacityError, "smallest sufficient budget is"),
        (2**63, {}, CapacityError, "64 bits"),
        (100, {"slots": 0}, ValueError, "slots must be 1 or more or None, got 0"),
        (100, {"slots": 1 << 40}, ValueError, "choose 1 to"),
        (100, {"slots": 1.5}, TypeError, "float"),
        (1000, {"schedules": "best"}, ValueError, "persistent, any"),
        (1000, {"offload": True}, ValueError, "has no rates"),
    ],
)
def test_invalid_arguments_are_refused(budget, options, error, text):
    with pytest.raises(error, match=text):
        plan(uniform(3), budget, **options)
    if "offload" in options:
        with pytest.raises(error, match=text):
            pareto(uniform(3), **options)


def test_blocks_without_bytes_fit_a_zero_budget():
    chain = Chain([1, 2, 3], [1, 1, 1], [0] * 4, [0] * 3)
    assert plan(chain, 0).predicted_seconds == 9
    assert list(pareto(chain)) == [(0, 9.0)]


def test_one_block():
    chain = Chain([1.5], [2], [8, 4], [20])
    assert plan(chain, 40).steps() == [Step("save", 0), Step("backward", 0)]
    assert list(pareto(chain)) == [(40, 3.5)]
    with pytest.raises(CapacityError, match="40 bytes"):
        plan(chain, 39)


def test_sizes_near_the_largest_number():
    huge = 2**59 + 1
    chain = Chain([1, 1], [1, 1], [0, 5, 0], [huge, huge], gradient_bytes=[0, 0, 0])
    for slots in (None, 1000):
        assert plan(chain, 2 * huge, slots=slots).overhead == 0
        tight = plan(chain, 2 * huge - 1, slots=slots)
        assert tight.recomputed == [0] and tight.predicted_peak_bytes == huge + 5
        with pytest.raises(CapacityError, match=str(huge + 5)):
            plan(chain, huge + 4, slots=slots)
    with pytest.raises(CapacityError, match="62 bits"):
        Chain([1, 1], [1, 1], [0, 2**61, 0], [2**61, 2**61])


# ---- slots ----


def test_more_slots_never_worsen_the_plan():
    chain = random_chain(60)
    budget = chain.plain_peak_bytes * 2 // 5
    exact = plan(chain, budget)
    fine, coarse = (plan(chain, budget, slots=n) for n in (2000, 50))
    assert exact.exact and not fine.exact and "2000 slots" in fine.method
    assert exact.predicted_seconds <= fine.predicted_seconds <= coarse.predicted_seconds
    assert fine.predicted_seconds < 1.02 * exact.predicted_seconds
    assert max(p.predicted_peak_bytes for p in (exact, fine, coarse)) <= budget


@pytest.mark.parametrize("schedules", ["persistent", "any"])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_budget_too_tight_for_slots_names_their_number(schedules, slots):
    chain = uniform(40)
    with pytest.raises(CapacityError) as caught:
        plan(chain, 1)
    least = int(caught.value.expected)
    method = plan(chain, least, slots=slots, schedules=schedules).method
    assert method.endswith(f"that fits: too tight a budget for {slots} slots")


@pytest.mark.slow
def test_long_chains_are_planned_by_slots():
    chain = random_chain(520)
    schedule = plan(chain, chain.plain_peak_bytes // 8, slots=40)
    assert schedule.predicted_peak_bytes <= chain.plain_peak_bytes // 8
    assert "slots" in schedule.method


@pytest.mark.parametrize(
    ("blocks", "slots", "error", "text"),
    [
        (3000, 100_000, CapacityError, "MiB: choose at most"),
        (8193, None, ValueError, "at most 8192"),
    ],
)
def test_chains_too_long_for_the_table_or_for_any_plan_are_refused(blocks, slots, error, text):
    with pytest.raises(error, match=text):
        plan(uniform(blocks), 10_000, slots=slots)


# ---- offloading ----


def test_offloading_pays_where_the_host_is_near():
    rates = {"offload_bytes_per_second": 1e12, "load_bytes_per_second": 1e12}
    chain = random_chain(10, **rates)
    budget = chain.plain_peak_bytes // 2
    resident, moved = plan(chain, budget), plan(chain, budget, offload=True)
    assert moved.offloaded and not resident.offloaded
    assert moved.predicted_seconds < resident.predicted_seconds
    assert moved.predicted_seconds == pytest.approx(chain.plain_seconds, rel=1e-3)
    assert set(moved.kept).isdisjoint(moved.offloaded)
    curve = pareto(chain, offload=True)
    assert len(curve) > 1 and curve.plan(0).predicted_peak_bytes == curve[0][0]


def test_slow_host_link_disables_offloading():
    rates = {"offload_bytes_per_second": 1.0, "load_bytes_per_second": 1.0}
    chain = random_chain(10, **rates)
    budget = chain.plain_peak_bytes // 2
    schedule = plan(chain, budget, offload=True)
    assert schedule.offloaded == []
    assert schedule.predicted_seconds == pytest.approx(plan(chain, budget).predicted_seconds)


# ---- curves ----


def test_each_point_of_the_curve_is_a_plan():
    chain = random_chain(14)
    curve = pareto(chain)
    assert curve[-1] == (chain.plain_peak_bytes, pytest.approx(chain.plain_seconds))
    for i in range(len(curve)):
        schedule = curve.plan(i)
        assert schedule.predicted_peak_bytes == curve[i][0]
        assert schedule.predicted_seconds == pytest.approx(curve[i][1])
    with pytest.raises(IndexError):
        curve.plan(len(curve))
    assert not curve.seconds.flags.writeable


def test_slot_curve_bounds_the_exact_curve():
    chain = random_chain(14)
    exact, rough = pareto(chain), pareto(chain, slots=100)
    assert not rough.exact and len(rough) > 10
    assert rough[-1] == (chain.plain_peak_bytes, pytest.approx(chain.plain_seconds))
    for budget, seconds in rough:
        best = exact.seconds[exact.budget_bytes <= budget].min()
        assert best <= seconds * (1 + 1e-6)
    assert rough.plan(3).predicted_peak_bytes <= rough[3][0]


def test_curves_are_shown():
    curve = pareto(random_chain(14))
    text, page = str(curve), curve._repr_html_()
    assert text.startswith("14 blocks: ") and "of plain peak" in text
    assert text.count("\n") <= 42 and len(page) < 30_000
    assert "found to the byte" in repr(curve)


# ---- chains and plans as objects ----


def test_chains_are_frozen_copies():
    seconds = np.ones(3)
    chain = Chain(seconds, [2] * 3, [10] * 4, [40] * 3, names=["a", "b<i>", "c"])
    seconds[:] = 5
    assert chain.plain_seconds == 9
    with pytest.raises(ValueError, match="read-only"):
        chain.saved_bytes[0] = 1
    assert chain.names == ("a", "b<i>", "c") and uniform(2).names == ("0", "1")
    assert "<i>" not in chain._repr_html_() and "b<i>" in str(chain)
    spread = Chain([1], [1], [1, 1], [1], seconds_spread=[0.25])
    assert Chain.from_json(spread.to_json()).seconds_spread.tolist() == [0.25]
    assert repr(spread).endswith("; measured times vary by up to 25%>")
    with pytest.raises(ValueError, match="seconds_spread holds"):
        Chain([1], [1], [1, 1], [1], seconds_spread=[-1])
    for copy in (pickle.loads(pickle.dumps(chain)), Chain.from_json(chain.to_json())):
        assert copy == chain and hash(copy) == hash(chain)
    assert chain != uniform(3) and chain != 3


def bad_chain(**changes):
    good = {
        "forward_seconds": [1, 1],
        "backward_seconds": [1, 1],
        "activation_bytes": [10, 10, 10],
        "saved_bytes": [20, 20],
    }
    return Chain(**good | changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"forward_seconds": [1, float("nan")]}, r"forward_seconds\[1\] is nan"),
        ({"backward_seconds": [-1, 1]}, r"backward_seconds\[0\] is -1"),
        ({"saved_bytes": [20, -1]}, r"saved_bytes\[1\] is -1"),
        ({"saved_bytes": [20, 9]}, "contains its output"),
        ({"saved_bytes": [20]}, "saved_bytes has 1 entries"),
        ({"activation_bytes": [10, 10]}, "activation_bytes has 2 entries"),
        ({"gradient_bytes": [10, 10, -3]}, r"gradient_bytes\[2\] is -3"),
        ({"forward_temporary_bytes": [0, -5]}, r"forward_temporary_bytes\[1\] is -5"),
        ({"backward_temporary_bytes": [0, -11]}, r"backward_temporary_bytes\[1\] is -11"),
        (
            {
                "backward_temporary_bytes": [-9, 0],
                "gradient_bytes": [10, 0, 0],
                "saved_bytes": [8, 10],
                "activation_bytes": [10, 8, 10],
            },
            r"backward_temporary_bytes\[0\] is -9: the step frees 8 bytes",
        ),
        ({"saved_bytes": [[20, 20]]}, r"shape \(1, 2\)"),
        ({"names": ["a"]}, "1 names for 2 blocks"),
        ({"forward_seconds": [1e308, 1e308]}, "exceed the range of a double"),
        ({"offload_bytes_per_second": 5.0}, "give both"),
        ({"load_bytes_per_second": float("nan")}, "above 0"),
    ],
)
def test_invalid_chains_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        bad_chain(**changes)


def test_no_step_holds_more_behind_it_than_at_its_peak():
    with pytest.raises(ValueError, match="peak would be below the memory held after it"):
        Chain([1], [1], [10, 0], [0], backward_temporary_bytes=[-10])
    chain = Chain([1], [1], [10, 0], [4], backward_temporary_bytes=[-4])
    schedule = plan(chain, chain.least_budget_bytes)
    run = schedule.simulate()
    assert run.after_bytes.max() <= run.peak_bytes.max() <= chain.least_budget_bytes


def test_chains_of_wrong_types_and_none_at_all():
    with pytest.raises(TypeError, match="saved_bytes holds float64"):
        bad_chain(saved_bytes=[20.0, 20.0])
    with pytest.raises(TypeError, match="names of blocks are str"):
        bad_chain(names=[1, 2])
    with pytest.raises(ValueError, match=r"below 2\*\*63"):
        bad_chain(saved_bytes=np.array([2**63, 1], np.uint64))
    with pytest.raises(ValueError, match="a chain of 0 blocks"):
        Chain([], [], [1], [])


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"format": "other"}', '{"forward_seconds": [1], "x": 2}', "nonsense"]
)
def test_other_json_is_refused(text):
    for read in (Chain.from_json, Plan.from_json):
        with pytest.raises(ValueError):
            read(text)


def test_plans_come_back_from_json():
    chain = random_chain(12)
    schedule = plan(chain, chain.plain_peak_bytes // 2)
    back = Plan.from_json(schedule.to_json())
    assert back == schedule and hash(back) == hash(schedule) and back.exact
    assert back.steps() == schedule.steps() and back.report() == schedule.report()
    document = json.loads(schedule.to_json())
    document["steps"][3][0] = "leap"
    with pytest.raises(ValueError, match="'leap' is not a kind of step"):
        Plan.from_json(json.dumps(document))
    document["steps"] = document["steps"][:2]
    with pytest.raises(ValueError, match="12 backward passes to go"):
        Plan.from_json(json.dumps(document))


def test_plans_by_hand_are_checked():
    steps = [("save", 0), ("save", 1), ("backward", 1), ("backward", 0)]
    assert Plan(uniform(2), steps) == Plan(uniform(2), Plan(uniform(2), steps)._steps)
    with pytest.raises(ValueError, match="step 1, backward 1: saved 1 does not exist"):
        Plan(uniform(2), [steps[0], steps[2]])
    with pytest.raises(CapacityError, match="exceeds the budget of 50"):
        Plan(uniform(2), steps, budget_bytes=50)
    with pytest.raises(ValueError, match="no such block"):
        Plan(uniform(2), [("save", 1 << 40)])
    with pytest.raises(ValueError, match="expected"):
        Plan(uniform(2), np.zeros((2, 3), np.int32))


def test_a_plan_refuses_numbers_that_are_not_blocks_instead_of_rounding_or_wrapping_them():
    steps = np.array([(1, 0), (1, 1), (2, 1), (2, 0)])
    assert Plan(uniform(2), steps).predicted_seconds == uniform(2).plain_seconds
    for block in (1 << 32, -(1 << 32)):  # both are 0 as int32
        with pytest.raises(ValueError, match="no such kinds or blocks"):
            Plan(uniform(2), np.where(steps == (1, 0), (1, block), steps))
    with pytest.raises(TypeError, match="steps hold float64: expected integers"):
        Plan(uniform(2), steps + 0.5)
    with pytest.raises(TypeError, match="step 1, save: the block must be an int, got float"):
        Plan(uniform(2), [("save", 0), ("save", 1.5)])


def test_plans_are_shown():
    chain = Chain([1] * 4, [2] * 4, [10] * 5, [40] * 4, names=["a", "b", "<c>", "d"])
    schedule = plan(chain, 120)
    assert "without a plan: 12 s, peak 190 B" in schedule.report()
    page = schedule._repr_html_()
    assert "<c>" not in page and "&lt;c&gt;" in page
    assert repr(schedule).startswith("<Plan of 4 blocks: 14 s (+16.7%)")


# ---- long searches ----


@pytest.mark.slow
def test_control_c_stops_a_plan_at_once():
    """The signal arrives during the search; the test measures how long the search continues."""
    chain = random_chain(1500)
    with num_threads(1):
        # about 0.1 s; the whole search takes minutes
        budget = chain.plain_peak_bytes // 4
        interrupt(lambda: plan(chain, budget, slots=400), after=0.5, within=5.0)


def test_threads_plan_side_by_side():
    chain = random_chain(40)
    budget = chain.plain_peak_bytes // 2
    want = plan(chain, budget)
    assert run_in_threads(lambda _: plan(chain, budget), 4) == [want] * 4
