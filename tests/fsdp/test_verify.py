"""Verification of scattered gradients: which errors it finds, and how the report names them."""

import numpy as np
import pytest
from gradient_model import (
    FLOATS,
    INTEGERS,
    gradient_of,
    gradients_of,
    part_of,
    reduced,
    run,
    units_of,
)

from mlstate.collectives import SingleGroup
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
from mlstate.fsdp.records import GradientReport, Mismatch

pytestmark = pytest.mark.timeout(120)

SHAPES = {"a": (5, 3), "b": (7,), "c": (), "d": (20, 2), "e": (0, 4)}


def hook_of_one():
    return FSDPBackwardHook(FSDP(SingleGroup()))


def verified(actual, expected, **keywords):
    """The report on one parameter of one rank."""
    unit = FSDPShardingUnit("w", np.shape(expected), np.asarray(expected).dtype, 0)
    unit.local_gradient = actual
    return hook_of_one().verify_gradients({"w": unit}, {"w": np.asarray(expected)}, **keywords)


# ---- with full gradients ----


@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_verify_passes_and_reports_a_changed_element(group, world, dtype, layout):
    units = units_of(group.rank, SHAPES, dtype, layout)
    gradients = [gradients_of(rank, SHAPES, dtype) for rank in range(world)]
    full = {name: reduced([g[name] for g in gradients]) for name in SHAPES}
    hook = FSDPBackwardHook(FSDP(group, nonfinite="allow"))  # of float16
    hook.scatter_multiple(units, gradients[group.rank])
    full = {name: np.nan_to_num(gradient) for name, gradient in full.items()}
    for unit in units.values():
        np.nan_to_num(unit.local_gradient, copy=False)
    report = hook.verify_gradients(units, full)
    assert report, report
    assert (report.compared, report.mismatches) == (5, [])
    local = units["d"].local_gradient.reshape(-1)
    local[-1] = local[-1] / 2 + 3
    (mismatch,) = hook.verify_gradients(units, full).mismatches
    part = part_of(full["d"], layout, group.rank, world).reshape(-1)
    assert mismatch[:3] == ("d", group.rank, len(local) - 1)
    assert (mismatch.expected, mismatch.actual) == (part[-1], local[-1])


@pytest.mark.parametrize(
    ("actual", "expected", "element"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 2.0 + 0.9e-5], [1.0, 2.0], None),
        ([1.0, 2.0 + 1.1e-5], [1.0, 2.0], 1),
        ([1.0, 2.0 - 1.1e-5], [1.0, 2.0], 1),
        ([np.inf, -np.inf], [np.inf, -np.inf], None),
        ([1.0, np.inf], [1.0, -np.inf], 1),
        ([1.0, 1e308], [1.0, np.inf], 1),
        ([np.nan, 1.0], [np.nan, 1.0], 0),
        ([np.nan, 1.0], [1.0, 1.0], 0),
        ([1.0, 1.0], [1.0, np.nan], 1),
    ],
)
def test_elements_are_compared_to_1e_5_and_nan_never_passes(actual, expected, element):
    report = verified(np.array(actual), np.array(expected))
    assert bool(report) == (element is None)
    assert [m.element for m in report.mismatches] == ([] if element is None else [element])


def test_the_tolerance_is_the_callers():
    assert verified(np.array([1.5]), np.array([1.0]), atol=0.5)
    assert not verified(np.array([1.5]), np.array([1.0]), atol=0.49)
    assert verified(np.array([1.0]), np.array([1.0]), atol=0)
    assert not verified(np.array([np.nextafter(1, 2)]), np.array([1.0]), atol=0)
    assert verified(np.array([1.0]), np.array([9.0]), atol=float("inf"))
    assert not verified(np.array([1.0]), np.array([np.nan]), atol=float("inf"))
    for wrong in (-1e-9, float("nan")):
        with pytest.raises(ValueError, match="atol must be 0 or more"):
            verified(np.array([1.0]), np.array([1.0]), atol=wrong)


def test_integers_beyond_double_precision_are_compared():
    assert not verified(np.array([2**53 + 1]), np.array([2**53]))
    assert verified(np.array([2**53 + 1]), np.array([2**53]), atol=1)
    assert not verified(np.array([0], np.uint8), np.array([255], np.uint8), atol=1)


def test_imaginary_parts_are_compared_too():
    report = verified(np.array([1 + 2j, 1], np.complex64), np.array([1 + 3j, 1], np.complex64))
    assert report.mismatches == [Mismatch("w", 0, 0, 1 + 3j, 1 + 2j)]


def test_missing_or_misshapen_part_fails_verification():
    assert verified(None, np.ones(3)).mismatches == [Mismatch("w", 0, None, "a gradient", "none")]
    assert verified(np.ones(2), np.ones(3)).mismatches == [Mismatch("w", 0, None, "(3,)", "(2,)")]
    unit = FSDPShardingUnit("w", (3,), "float64", 0)
    unit.local_gradient = np.ones(3)
    report = hook_of_one().verify_gradients({"w": unit}, {"w": np.ones(4)})
    assert report.mismatches == [Mismatch("w", 0, None, "(3,)", "full gradient of (4,)")]


def test_mismatch_beyond_a_million_elements_is_located():
    expected = np.zeros(1_500_000, np.float32)
    actual = expected.copy()
    actual[1_234_567] = 1
    (mismatch,) = verified(actual, expected).mismatches
    assert mismatch == Mismatch("w", 0, 1_234_567, 0.0, 1.0)


@pytest.mark.parametrize("empty", [None, {}])
def test_empty_comparison_passes(empty):
    unit = FSDPShardingUnit("w", (3,), "float64", 0)
    hook = hook_of_one()
    assert hook.verify_gradients(empty, {"w": np.ones(3)})
    assert hook.verify_gradients({"w": unit}, empty)
    report = hook.verify_gradients({"w": unit}, {"v": np.ones(3), "w": None})
    assert report
    assert report.compared == 0


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (["wieght"], "'weight' no gradient; did you mean 'weight'?"),
        (["bias", "module.weight"], "'weight' no gradient; did you mean 'weight'?"),
        (["bias", 1], "the unit 'weight' no gradient"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest_one(names, hint):
    units = {name: FSDPShardingUnit(name, (2,), "float64", 0) for name in ("weight", "bias")}
    for unit in units.values():
        unit.local_gradient = np.ones(2)
    with pytest.raises(ValueError) as caught:
        hook_of_one().verify_gradients(units, {name: np.ones(2) for name in names})
    assert f"full_gradients[{names[-1]!r}] has no sharding unit" in str(caught.value)
    assert str(caught.value).endswith(hint)


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_gradients_of_fewer_or_more_parameters_are_compared(names):
    units = {name: FSDPShardingUnit(name, (2,), "float64", 0) for name in ("a", "b")}
    for unit in units.values():
        unit.local_gradient = np.ones(2)
    report = hook_of_one().verify_gradients(units, {name: np.ones(2) for name in names})
    assert report and report.compared == min(len(names), 2)


def test_incomparable_gradients_are_refused():
    unit = FSDPShardingUnit("w", (3,), "float64", 0)
    hook = hook_of_one()
    with pytest.raises(ValueError, match="full_gradients or unreduced, not both"):
        hook.verify_gradients({"w": unit}, {"w": np.ones(3)}, unreduced={"w": np.ones(3)})
    with pytest.raises(TypeError, match=r"full_gradients must be a dict .* got list"):
        hook.verify_gradients({"w": unit}, [np.ones(3)])
    with pytest.raises(TypeError, match=r"unreduced must be a dict .* got list"):
        hook.verify_gradients({"w": unit}, unreduced=[np.ones(3)])
    unit.local_gradient = np.ones(3)
    with pytest.raises(TypeError, match="w: the full gradient is a list, not an array"):
        hook.verify_gradients({"w": unit}, {"w": [1.0]})
    unit.local_gradient = [1.0]
    with pytest.raises(TypeError, match="w: the local gradient is a list, not an array"):
        hook.verify_gradients({"w": unit}, {"w": np.ones(3)})
    with pytest.raises(ValueError, match="needs op='sum' or 'mean', got op='max'"):
        FSDPBackwardHook(FSDP(SingleGroup(), op="max")).verify_gradients(
            {"w": unit}, unreduced={"w": np.ones(3)}
        )


# ---- without full gradients ----

LARGE = {"v": (300, 70), "w": (300, 70), "x": (9,), "y": ()}


def small_gradients(rank, shapes, dtype):
    """Small gradients, as in training, of similar size."""
    rng = np.random.default_rng([rank, 5])
    sample = gradient_of(0, (1,), dtype)
    return {n: (rng.standard_normal(s) * 1e-3).astype(sample.dtype) for n, s in shapes.items()}


def after(work_on, *, world=2, dtype="float32", **keywords):
    """The reports of all ranks after `work_on(units, gradients, rank)` changed gradients."""

    def work(group):
        units = units_of(group.rank, LARGE, dtype)
        gradients = small_gradients(group.rank, LARGE, dtype)
        hook = FSDPBackwardHook(FSDP(group, **keywords))
        hook.scatter_multiple(units, gradients)
        work_on(units, gradients, group.rank)
        return hook.verify_gradients(units, unreduced=gradients)

    reports = run(work, world)
    assert len({repr(report) for report in reports}) == 1, "all ranks come to the same conclusion"
    return reports[0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "keywords", [{}, {"op": "mean"}, {"gradient_divide_factor": -3.0}, {"reduce_dtype": "float32"}]
)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_scattered_gradients_verify_by_their_sketch(world, keywords, dtype):
    report = after(lambda *_: None, world=world, dtype=dtype, **keywords)
    assert report, report
    assert report.compared == 4


def test_sums_of_integers_are_compared_as_well(group):
    unit = FSDPShardingUnit("w", (1000,), "int64", group.rank)
    gradient = np.arange(1000) * (group.rank + 1) ** 9
    hook = FSDPBackwardHook(FSDP(group))
    hook.scatter_gradient(unit, gradient)
    assert hook.verify_gradients({"w": unit}, unreduced={"w": gradient})
    unit.local_gradient[7] += 1 - group.rank
    report = hook.verify_gradients({"w": unit}, unreduced={"w": gradient})
    assert [m.rank for m in report.mismatches] == [0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_swapped_pair_of_parameters_is_found(dtype):
    def swap(units, gradients, rank):
        if rank == 1:
            v, w = units["v"], units["w"]
            v.local_gradient, w.local_gradient = w.local_gradient, v.local_gradient

    report = after(swap, dtype=dtype)
    assert [(m.parameter, m.rank, m.element) for m in report.mismatches] == [
        ("v", 1, None),
        ("w", 1, None),
    ]
    assert "sum " in str(report.mismatches[0].expected)


@pytest.mark.parametrize("fault", ["halves", "sign", "zero", "doubled", "shifted", "nan"])
def test_parts_that_were_changed_are_found(fault):
    def change(units, gradients, rank):
        local = units["w"].local_gradient
        if rank == 0 and fault == "halves":
            local[:] = np.roll(local, len(local) // 2)
        elif rank == 0:
            local[:] = {
                "sign": -local,
                "zero": 0 * local,
                "doubled": 2 * local,
                "shifted": np.roll(local, 1),
                "nan": np.where(np.arange(len(local)) == 5, np.nan, local),
            }[fault]

    (mismatch,) = after(change).mismatches
    assert mismatch[:3] == ("w", 0, None)


def test_single_large_change_is_reported():
    def change(units, gradients, rank):
        if rank == 1:
            units["w"].local_gradient[123] += 0.05  # the others are about 0.001

    (mismatch,) = after(change).mismatches
    assert mismatch[:2] == ("w", 1)


def set_local(array):
    return lambda units, _: setattr(units["x"], "local_gradient", array)


INCOMPARABLE = "gradients that can be compared"


@pytest.mark.parametrize(
    ("fault", "expected", "actual"),
    [
        (lambda u, g: u.pop("x"), "a sharding unit", "none"),
        (set_local(None), INCOMPARABLE, "no local gradient"),
        (lambda u, g: g.pop("x"), INCOMPARABLE, "no full gradient"),
        (set_local(np.ones(3, np.float32)), INCOMPARABLE, "a local gradient of (3,)"),
        (lambda u, g: g.update(x=np.ones(8, "f4")), INCOMPARABLE, "a full gradient of (8,)"),
        (
            lambda u, g: u.update(x=FSDPShardingUnit("x", (9,), "float32", 1, layout="rows")),
            "'x' float32 (9,) flat",
            "'x' float32 (9,) rows",
        ),
        (set_local([1.0]), INCOMPARABLE, "AttributeError"),
        (set_local(np.ones(4, bool)), INCOMPARABLE, "CompatibilityError"),
    ],
)
def test_incomparable_parameter_is_reported_and_others_compared(fault, expected, actual):
    (mismatch,) = after(lambda u, g, rank: fault(u, g) if rank else None).mismatches
    assert mismatch[:4] == ("x", 1, None, expected)
    assert mismatch.actual.startswith(actual)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
def test_tensors_are_verified_as_arrays_are(torch, dtype):
    def work(group):
        unit = FSDPShardingUnit("w", (31, 3), dtype, group.rank, layout="rows")
        gradients = [(torch.arange(93).reshape(3, 31).T - 40) * (rank + 2) for rank in range(2)]
        gradients = [gradient.to(getattr(torch, dtype)) for gradient in gradients]
        hook = FSDPBackwardHook(FSDP(group))
        hook.scatter_gradient(unit, gradients[group.rank])
        reports = []
        for _ in range(2):
            reports.append(hook.verify_gradients({"w": unit}, {"w": gradients[0] + gradients[1]}))
            reports.append(
                hook.verify_gradients({"w": unit}, unreduced={"w": gradients[group.rank]})
            )
            unit.local_gradient[3, 1] += 1000 * (group.rank == 0)
        return [[m[:3] for m in report.mismatches] for report in reports]

    first, second = run(work)
    assert first == [[], [], [("w", 0, 10)], [("w", 0, None)]]
    assert second == [[], [], [], [("w", 0, None)]]


@pytest.mark.torch
def test_conjugated_tensors_are_verified_by_their_values(torch):
    unit, hook = FSDPShardingUnit("w", (2,), "complex64", 0), FSDPBackwardHook(FSDP(SingleGroup()))
    unit.local_gradient = torch.tensor([1 + 2j, 3j]).conj()
    assert hook.verify_gradients({"w": unit}, {"w": torch.tensor([1 - 2j, -3j])})
    assert not hook.verify_gradients({"w": unit}, {"w": torch.tensor([1 + 2j, 3j])})


# ---- reports ----


def test_report_is_a_table_of_mismatches():
    wrong = [Mismatch("w", 0, 12345, 2.0, float("nan")), Mismatch("v", 3, None, "x", "none")]
    assert str(GradientReport(wrong, 9, 0.5)).split("\n") == [
        "2 of 9 gradients differ by more than 0.5",
        "parameter  rank  element  expected  actual",
        "w          0     12,345   2.0       nan",
        "v          3              x         none",
    ]


def test_a_report_without_mismatches_is_true_and_one_line():
    assert not GradientReport([Mismatch("w", 0, 0, 1.0, 2.0)], 500, 1e-5)
    well = GradientReport([], 3, 1e-5)
    assert well
    assert repr(well) == "3 gradients are well, to 1e-05"
    assert repr(well) in well._repr_html_() and "<table" not in well._repr_html_()
