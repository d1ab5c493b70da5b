"""Errors on one rank are raised on all ranks, naming rank and gradient.

A call with a gradient that its own rank knows to be wrong stores nothing on any rank. Other
failures prevent only the reduction of the bad gradient.
"""

import re
import threading

import numpy as np
import pytest
from gradient_model import backward, hook_of, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tries import tries

from mlstate import CollectiveError
from mlstate.errors import GradientMismatchError, GradientNamesError
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
from mlstate.fsdp._disagreement import describe_difference

pytestmark = pytest.mark.timeout(120)

SHAPES = {"a": (5, 3), "b": (7,), "c": (1,), "d": (20, 2)}
SIZES = [0, 30, 100, 1 << 20]  # bucket sizes: one gradient each, some together, all together


def units_of(group, shapes=SHAPES, dtype="float32"):
    return {name: FSDPShardingUnit(name, s, dtype, group.rank) for name, s in shapes.items()}


def gradients_of(group, units):
    return {name: np.full(u.shape, group.rank + 1, u.dtype) for name, u in units.items()}


def whole(world):
    return float(sum(range(1, world + 1)))


def parts(units):
    return {
        name: None if u.local_gradient is None else u.local_gradient.tolist()
        for name, u in units.items()
    }


def expected_parts(units, world, failed):
    return {
        name: None if name in failed else [whole(world)] * u.counts[u.shard_index]
        for name, u in units.items()
    }


def text_of(error):
    """The text of an error without the rank that raised it."""
    return re.sub(r"on rank \d+:", "on rank *:", str(error), count=1)


def scatter_with(fault, world=2, **keywords):
    """Errors, parts and later results of each rank; `fault` changes one rank's dicts."""

    def work(group):
        fsdp = FSDP(group, **keywords)
        hook = FSDPBackwardHook(fsdp)
        units = units_of(group)
        gradients = gradients_of(group, units)
        hook.scatter_multiple(units, gradients)  # the step before
        if group.rank == world - 1:
            fault(units, gradients, group.rank)
        error = None
        try:
            hook.scatter_multiple(units, gradients)
        except CollectiveError as caught:
            error = caught
        outcome = units, error
        again = units_of(group)  # the same object works again
        hook.scatter_multiple(again, gradients_of(group, again))
        assert parts(again) == expected_parts(again, world, ())
        return outcome

    return run(work, world)


def another_unit(shape, dtype="float32", **keywords):
    """Replace unit b of one rank, and its gradient."""

    def change(units, gradients, rank):
        units["b"] = FSDPShardingUnit("b", shape, dtype, rank, **keywords)
        gradients["b"] = np.ones(shape, dtype)

    return change


def without_b(units, gradients, rank):
    del units["b"], gradients["b"]


# Changes of one rank's units and gradients, the parameter at fault and the error.
# known to the rank itself: every rank refuses the call
MISMATCHES = {
    "none": (lambda u, g, _: g.update(b=None), "b", "rank {bad}: no gradient"),
    "not passed": (lambda u, g, _: g.pop("b"), "b", "rank {bad}: no gradient was passed"),
    "no unit": (
        lambda u, g, _: g.update(extra=np.ones(3, np.float32)),
        "extra",
        "rank {bad}: there is no sharding unit for this gradient",
    ),
    "dtype": (
        lambda u, g, _: g.update(b=g["b"].astype(np.float64)),
        "b",
        "rank {bad}: the gradient has dtype float64, expected float32",
    ),
    "shape": (
        lambda u, g, _: g.update(b=np.ones(8, np.float32)),
        "b",
        "rank {bad}: the gradient has shape (8,), expected (7,)",
    ),
    "list": (
        lambda u, g, _: g.update(b=[1.0] * 7),
        "b",
        "rank {bad}: the gradient is a list, not an array or tensor",
    ),
}
# found when the ranks compare
FAULTS = {
    "unknown": (without_b, "b", "missing on rank {bad} (rank {bad} reduces "),
    "dtype": (another_unit((7,), "float64"), "b", "rank {bad}: 'b' float64 (7,) flat"),
    "shape": (another_unit((8,)), "b", "rank {bad}: 'b' float32 (8,) flat"),
    "layout": (another_unit((7,), layout="rows"), "b", "rank {bad}: 'b' float32 (7,) rows"),
    "nan": (
        lambda u, g, _: g["b"].put(2, np.nan),
        "b",
        "NaN or infinite elements (rank {bad}: 1)",
    ),
    "infinity": (
        lambda u, g, _: g["b"].put(6, -np.inf),
        "b",
        "NaN or infinite elements (rank {bad}: 1)",
    ),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("bucket_bytes", SIZES)
@pytest.mark.parametrize("which", FAULTS)
def test_one_bad_gradient_is_named_everywhere_and_spoils_no_other(which, bucket_bytes, world):
    fault, name, text = FAULTS[which]
    results = scatter_with(fault, world, bucket_bytes=bucket_bytes)
    bad = world - 1
    assert len({text_of(error) for _, error in results}) == 1, results
    for rank, (units, error) in enumerate(results):
        assert str(error).startswith(f"scatter_multiple on rank {rank}: a gradient was not")
        assert f"'{name}': " in str(error)
        assert text.format(bad=bad) in str(error)
        assert error.name == name
        if world > 2 or "ranks do not reduce the same" not in str(error):
            assert error.rank == bad
        assert parts(units) == expected_parts(units, world, {name})


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", SIZES)
@pytest.mark.parametrize("which", MISMATCHES)
def test_mismatch_on_one_rank_is_refused_on_all(which, bucket_bytes, world):
    fault, name, text = MISMATCHES[which]
    results = scatter_with(fault, world, bucket_bytes=bucket_bytes)
    bad = world - 1
    assert len({text_of(error) for _, error in results}) == 1, results
    for rank, (units, error) in enumerate(results):
        assert str(error) == (
            f"scatter_multiple on rank {rank}: a gradient was refused, nothing was stored on any "
            f"rank: '{name}': {text.format(bad=bad)}"
        )
        assert (error.name, error.rank) == (name, bad)
        assert set(parts(units).values()) == {None}, "a stale gradient was left"
    *others, own_error = [type(error) for _, error in results]
    assert set(others) <= {CollectiveError}
    has_other_names = which in ("not passed", "no unit")
    assert own_error is (GradientNamesError if has_other_names else GradientMismatchError)
    assert issubclass(own_error, ValueError)


def test_one_gradient_alone_is_refused_in_the_same_way(group):
    hook = FSDPBackwardHook(FSDP(group))
    unit = units_of(group)["b"]
    hook.scatter_gradient(unit, np.ones(7, np.float32))
    with pytest.raises(CollectiveError, match=r"scatter_gradient .* nothing was .*'b'") as caught:
        hook.scatter_gradient(unit, np.ones(7 + group.rank, np.float32))
    assert unit.local_gradient is None
    assert type(caught.value) is [CollectiveError, GradientMismatchError][group.rank]


@pytest.mark.parametrize("bucket_bytes", SIZES)
@pytest.mark.parametrize("sent", [None, 0, 1, 4])
def test_refused_call_fails_the_pass_of_other_ranks(group, sent, bucket_bytes):
    """All ranks leave at the same header, so the next call works; without units (None), too."""
    units = units_of(group)
    gradients = gradients_of(group, units)
    hook = FSDPBackwardHook(FSDP(group, bucket_bytes=bucket_bytes))
    hook.scatter_multiple(units, gradients)  # the step before
    if sent is not None:
        hook.use_units(units)
    with pytest.raises(CollectiveError, match=r"(?s)nothing was .*'b': .*rank 1: no "):
        if group.rank == 1:
            hook.scatter_multiple(units, gradients | {"b": None})
        else:
            for name in list(reversed(gradients))[: sent or 0]:
                hook.add_gradient(name, gradients[name])
            hook.finish()
    if group.rank == 1 or sent is not None:
        assert set(parts(units).values()) == {None}
    hook.scatter_multiple(units, gradients)
    assert parts(units) == expected_parts(units, 2, ())


def test_a_mismatch_is_reported_even_if_settings_differ(group):
    units = units_of(group)
    gradients = gradients_of(group, units)
    if group.rank == 1:
        gradients["b"] = None
    hook = FSDPBackwardHook(FSDP(group, op="max" if group.rank else "sum"))
    with pytest.raises(CollectiveError, match=r"'b': rank 1: no gradient") as caught:
        hook.scatter_multiple(units, gradients)
    assert type(caught.value) is [CollectiveError, GradientMismatchError][group.rank]


def test_consistent_ranks_raise_no_error():
    assert all(error is None for _, error in scatter_with(lambda *_: None, 3))


@pytest.mark.parametrize("bucket_bytes", SIZES)
def test_gradients_under_each_others_names_are_found_by_their_shapes(bucket_bytes):
    def swap(units, gradients, rank):
        gradients["b"], gradients["c"] = gradients["c"], gradients["b"]

    for units, error in scatter_with(swap, bucket_bytes=bucket_bytes):
        assert str(error).count("the gradient has shape") == 2
        assert set(parts(units).values()) == {None}


@pytest.mark.parametrize("bucket_bytes", SIZES)
@pytest.mark.parametrize("names", ["a", "d", "ad", "bc", "abcd"])
@pytest.mark.parametrize("kind", ["none", "nan", "both"])
def test_several_bad_gradients_are_all_named(names, bucket_bytes, kind):
    """NaN is not looked for if the call is refused."""
    refused = [name for i, name in enumerate(names) if kind == "none" or (kind == "both" and i % 2)]

    def spoil(units, gradients, rank):
        for name in names:
            if name in refused:
                gradients[name] = None
            else:
                gradients[name].flat[0] = np.nan

    results = scatter_with(spoil, 2, bucket_bytes=bucket_bytes)
    assert len({text_of(error) for _, error in results}) == 1
    for units, error in results:
        assert all(f"'{name}': " in str(error) for name in refused or names)
        assert parts(units) == expected_parts(units, 2, set(SHAPES if refused else names))


def test_a_long_list_of_failures_is_cut(group):
    shapes = {f"w{i}": (2,) for i in range(9)}

    units = units_of(group, shapes)
    with pytest.raises(CollectiveError, match="9 gradients were refused") as caught:
        FSDPBackwardHook(FSDP(group)).scatter_multiple(units, dict.fromkeys(units, None))
    assert "'w4': " in str(caught.value)
    assert "'w5': " not in str(caught.value)
    assert "… 4 more" in str(caught.value)


def test_overflowed_sum_differs_from_infinite_gradients(group):
    unit = FSDPShardingUnit("b", (4,), "float16", group.rank)
    gradient = np.array([1, 2, 60000, 3], np.float16)
    text = r"'b': the sum is not finite, all gradients are \(shard of rank 1: 1\)"
    with pytest.raises(CollectiveError, match=text) as caught:
        FSDPBackwardHook(FSDP(group)).scatter_gradient(unit, gradient)
    assert (caught.value.name, caught.value.rank, unit.local_gradient) == ("b", 1, None)


@pytest.mark.parametrize("bucket_bytes", SIZES)
def test_infinity_outside_the_minimum_is_accepted(group, bucket_bytes):
    """Whether a gradient fails must not depend on the other gradients in its bucket."""
    units = units_of(group)
    gradients = gradients_of(group, units)
    if group.rank == 1:
        gradients["a"][0, 0] = np.inf  # 1 on the other rank
        gradients["b"][0] = np.nan
    hook = FSDPBackwardHook(FSDP(group, op="min", bucket_bytes=bucket_bytes))
    with pytest.raises(CollectiveError, match=r"a gradient was not .* 'b': NaN"):
        hook.scatter_multiple(units, gradients)
    assert parts(units)["b"] is None
    assert set(parts(units)["a"]) == {1.0}


def test_nonfinite_allow_accepts_nan_and_infinity():
    def work(group):
        units = units_of(group)
        gradients = gradients_of(group, units)
        gradients["b"][0] = np.nan if group.rank else 1
        gradients["a"][0, 1] = np.inf
        FSDPBackwardHook(FSDP(group, nonfinite="allow")).scatter_multiple(units, gradients)
        return parts(units)

    first, second = run(work)
    assert np.isnan(first["b"][0])
    assert first["b"][1:] == [3.0] * 3
    assert first["a"][1] == np.inf
    assert second == {"a": [3.0] * 7, "b": [3.0] * 3, "c": [], "d": [3.0] * 20}


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("kind", ["none", "nan", "shape", "unit"])
def test_one_bad_gradient_among_buckets_that_go_together_spoils_no_other(kind, at):
    """Its position among the gradients that all ranks have ready makes no difference."""
    shapes = {f"p{i}": (4,) for i in range(6)}
    name = f"p{at}"
    texts = {
        "none": "rank 1: no gradient",
        "nan": "NaN or infinite elements (rank 1: 1)",
        "shape": "rank 1: the gradient has shape (5,), expected (4,)",
        "unit": "ranks do not reduce the same",
    }

    def work(group):
        units = units_of(group, shapes)
        if kind == "unit" and group.rank == 1:
            units[name] = FSDPShardingUnit(name, (4,), "float64", 1)
        gradients = gradients_of(group, units)
        if group.rank == 1 and kind != "unit":
            bad = {"none": None, "nan": np.array([1, np.nan, 1, 1], np.float32)}
            gradients[name] = bad.get(kind, np.ones(5, np.float32))
        fsdp = FSDP(group, bucket_bytes=0)
        hook = FSDPBackwardHook(fsdp)
        hook.use_units(units)
        with fsdp._reducer.queue._running:  # no bucket is reduced before all are full
            for parameter in reversed(units):
                hook.add_gradient(parameter, gradients[parameter])
        with pytest.raises(CollectiveError) as caught:
            hook.finish()
        assert parts(units) == expected_parts(units, 2, {name})
        return text_of(caught.value)

    first, second = run(work)
    assert first == second
    assert f"'{name}': " in first
    assert texts[kind] in first


# ---- settings ----


def reduce_by(mode, hook, units, gradients):
    """Reduce by one call, or by a backward pass of hooks."""
    if mode == "together":
        hook.scatter_multiple(units, gradients)
    else:
        hook.use_units(units)
        backward(hook, gradients)


modes = pytest.mark.parametrize("mode", ["together", "hooks"])
SETTINGS = {
    "op": ({"op": "sum"}, {"op": "max"}),
    "divisor": ({"gradient_divide_factor": 2}, {"gradient_divide_factor": 3}),
    "mean": ({"op": "sum"}, {"op": "mean"}),
    "reduce_dtype": ({}, {"reduce_dtype": "float32"}),
    "nonfinite": ({}, {"nonfinite": "allow"}),
    "allow_unused": ({}, {"allow_unused": True}),
    "bucket_bytes": ({"bucket_bytes": 30}, {"bucket_bytes": 100}),
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@modes
@pytest.mark.parametrize("setting", SETTINGS)
def test_another_setting_on_one_rank_is_an_error_on_all(setting, mode, dtype):
    def work(group):
        fsdp = FSDP(group, **SETTINGS[setting][group.rank])
        hook = FSDPBackwardHook(fsdp)
        units = units_of(group, dtype=dtype)
        with pytest.raises(CollectiveError) as caught:
            reduce_by(mode, hook, units, gradients_of(group, units))
        assert set(parts(units).values()) == {None}
        return caught.value

    first, second = run(work)
    assert text_of(first) == text_of(second)
    name = {"divisor": "gradient_divide_factor", "mean": "gradient_divide_factor"}
    assert re.search(
        rf"settings of FSDP differ between ranks \(rank 0: .*{name.get(setting, setting)}=",
        str(first),
    ), first


def test_every_rank_is_named_if_many_differ():
    facts = {rank: f"float{32 << rank % 2}" for rank in range(20)}
    _, text = describe_difference(facts, "dtypes differ")
    assert [int(number) for number in re.findall(r"\b(\d+)(?=[,:])", text)] == [
        *range(0, 20, 2),
        *range(1, 20, 2),
    ]


def test_dtypes_that_differ_do_not_make_other_gradients_fail(group):
    """A dtype decides whether reduce_dtype applies; it does not affect other gradients."""
    units = units_of(group)
    if group.rank:
        units["a"] = FSDPShardingUnit("a", (5, 3), "float16", group.rank)
    hook = FSDPBackwardHook(FSDP(group, reduce_dtype="float32"))
    with pytest.raises(CollectiveError, match=r"a gradient was not reduced.*'a' float16"):
        hook.scatter_multiple(units, gradients_of(group, units))
    assert parts(units) == expected_parts(units, 2, {"a"})


# ---- one rank makes another call ----


@modes
@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_missing_rank_ends_the_wait_of_the_others(mode, bucket_bytes):
    """At once, also if there are many buckets."""
    ended = threading.Event()

    def work(group):
        if group.rank == 1:
            assert ended.wait(20)
            return None
        units = units_of(group)
        hook = FSDPBackwardHook(FSDP(group, timeout=0.2, bucket_bytes=bucket_bytes))
        units["a"].local_gradient = np.ones(8, np.float32)  # from the previous step
        with pytest.raises(CollectiveError):
            reduce_by(mode, hook, units, gradients_of(group, units))
        assert set(parts(units).values()) == {None}
        ended.set()
        return len(group.sizes["gather_bytes"])

    # 1: the buckets after the one that failed were not sent
    assert run(work) == [1, None]


def test_rank_in_gather_bytes_is_named(group):
    units = units_of(group)
    hook = FSDPBackwardHook(FSDP(group))
    if group.rank == 1:
        assert len(group.gather_bytes(b"something else")) == 2
    else:
        with pytest.raises(CollectiveError, match="rank 1 calls gather_bytes") as caught:
            hook.scatter_multiple(units, gradients_of(group, units))
        assert caught.value.rank == 1
    hook.scatter_multiple(units, gradients_of(group, units))
    assert parts(units) == expected_parts(units, 2, ())


def test_aborted_pass_leaves_no_failure_for_the_next():
    """Failures, sequence numbers and norm partials belong to one pass."""

    def work(group):
        units = units_of(group)
        gradients = gradients_of(group, units)
        spoiled = dict(units)
        if group.rank == 1:
            spoiled["b"] = FSDPShardingUnit("b", (7,), "float32", 1, layout="rows")
        fsdp = FSDP(group, bucket_bytes=0)
        hook = FSDPBackwardHook(fsdp)
        send = group.all_to_all

        def fail_after_two(*args, **keywords):
            if len(group.sizes["all_to_all"]) == 2:
                raise CollectiveError("the cable was pulled")
            return send(*args, **keywords)

        group.all_to_all = fail_after_two
        with pytest.raises(CollectiveError, match="the cable was pulled"):
            hook.scatter_multiple(spoiled, gradients)
        group.all_to_all = send
        hook.scatter_multiple(units, gradients)
        return parts(units) == expected_parts(units, 2, ())

    assert run(work) == [True, True]


@pytest.mark.parametrize("bucket_bytes", SIZES)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_rank_that_ends_early_is_named(bucket_bytes, count):
    """It reduces fewer gradients, with hooks that name only those."""

    def work(group):
        units = units_of(group)
        if group.rank == 1:
            units = dict(list(units.items())[len(units) - count :])
        hook = FSDPBackwardHook(FSDP(group, bucket_bytes=bucket_bytes))
        if units:
            hook.use_units(units)
        for name, gradient in gradients_of(group, units).items():
            hook.add_gradient(name, gradient)
        try:
            hook.finish()
        except CollectiveError as error:
            stored_parts = parts(units)
            return error, {name for name in stored_parts if stored_parts[name] is not None}

    (first, stored), (second, second_stored) = run(work)
    assert text_of(first) == text_of(second)
    missing = list(SHAPES)[: 4 - count]
    for name in missing:
        assert f"'{name}': missing on rank 1" in str(first)
    assert stored == second_stored
    assert not stored & set(missing)
    if bucket_bytes == 0:
        assert stored == set(SHAPES) - set(missing)


@pytest.mark.parametrize("bucket_bytes", SIZES)
def test_units_in_another_order_are_an_error_or_go_in_one_order(bucket_bytes):
    def work(group):
        units = units_of(group)
        if group.rank == 1:
            units = dict(reversed(units.items()))
        hook = hook_of(group, units, bucket_bytes=bucket_bytes)
        for name, gradient in gradients_of(group, units).items():
            hook.add_gradient(name, gradient)
        try:
            hook.finish()
        except CollectiveError as error:
            return text_of(error), {n for n, u in units.items() if u.local_gradient is not None}
        assert parts(units) == expected_parts(units, 2, ())
        return "", set(units)

    first, second = run(work)
    assert first == second
    if first[0]:
        assert "missing on rank" in first[0]


# ---- unused parameters ----


def test_allow_unused_counts_missing_gradients_as_zero(group):
    units = units_of(group)
    gradients = gradients_of(group, units)
    if group.rank == 1:
        gradients["a"] = None
        del gradients["b"]
    FSDPBackwardHook(FSDP(group, allow_unused=True)).scatter_multiple(units, gradients)
    assert set(units["d"].local_gradient.flat) == {3.0}
    assert [float(x) for name in "ab" for x in set(units[name].local_gradient.flat)] == [1.0, 1.0]


@pytest.mark.parametrize("path", ["together", "one by one", "a pass", "a pass with None"])
def test_a_parameter_that_no_rank_used_has_no_gradient(group, path):
    units = units_of(group)
    hook = FSDPBackwardHook(FSDP(group, allow_unused=True))
    first = gradients_of(group, units)
    hook.scatter_multiple(units, first)
    gradients = {**first, "a": None, "b": None if group.rank else first["b"]}
    if path == "together":
        hook.scatter_multiple(units, gradients)
    elif path == "one by one":
        parts = [hook.scatter_gradient(unit, gradients[n]) for n, unit in units.items()]
        assert parts[list(units).index("a")] is None
    else:
        hook.use_units(units)
        for name in reversed(units):
            if path == "a pass with None" or gradients[name] is not None:
                hook.add_gradient(name, gradients[name])
        hook.finish()
    assert {n for n, unit in units.items() if unit.local_gradient is None} == {"a"}


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
def test_accumulated_gradient_of_unused_parameter_stays(group, op):
    units = units_of(group)
    hook = hook_of(group, units, accumulate=True, allow_unused=True, op=op)
    hook.finish()
    assert not any(unit.local_gradient is not None for unit in units.values())
    for name, gradient in gradients_of(group, units).items():
        hook.add_gradient(name, gradient)
    hook.finish()
    before = parts(units)
    hook.finish()
    assert parts(units) == before
    assert all(unit.local_gradient is not None for unit in units.values())


def test_failed_gradient_leaves_unused_gradients_absent(group):
    units = units_of(group)
    gradients = {**gradients_of(group, units), "a": None}
    if group.rank:
        gradients["b"] = gradients["b"] * np.nan
    with pytest.raises(CollectiveError, match="'b': NaN"):
        FSDPBackwardHook(FSDP(group, allow_unused=True)).scatter_multiple(units, gradients)
    assert {n for n, unit in units.items() if unit.local_gradient is None} == {"a", "b"}


# ---- random faults ----

names = st.sampled_from(sorted(SHAPES))
faults = st.sampled_from(["good", "good", "none", "nan", "shape", "dtype", "list", "absent"])
scripts = st.fixed_dictionaries(
    {
        "order": st.permutations(sorted(SHAPES)),
        "faults": st.fixed_dictionaries(dict.fromkeys(SHAPES, faults)),
        "bucket_bytes": st.sampled_from(SIZES),
        "end_after": st.integers(0, 4),
    }
)


def play(script, group, *, hooks, calls):
    """Run a script on one rank; return the error, or None."""
    order = script["order"] if hooks else sorted(SHAPES)
    units = {
        name: FSDPShardingUnit(name, SHAPES[name], "float32", group.rank)
        for name in order
        if script["faults"][name] != "absent"
    }
    gradients = gradients_of(group, units)
    for name, fault in script["faults"].items():
        if name not in units:
            continue
        if fault == "none":
            gradients[name] = None
        elif fault == "nan":
            gradients[name].flat[0] = np.nan
        elif fault == "shape":
            gradients[name] = np.ones(99, np.float32)
        elif fault == "dtype":
            gradients[name] = gradients[name].astype(np.int32)
        elif fault == "list":
            gradients[name] = [1.0]
    hook = FSDPBackwardHook(FSDP(group, bucket_bytes=script["bucket_bytes"]))
    for _ in range(calls):
        error = None
        try:
            if hooks:
                if not hook._plan.units:
                    hook.use_units(units)
                for name in list(gradients)[: script["end_after"]]:
                    hook.add_gradient(name, gradients[name])
                hook.finish()
            elif units:
                hook.scatter_multiple(units, gradients)
            else:  # `finish` takes part without gradients; a call with empty dicts does not
                hook.finish()
        except CollectiveError as caught:
            error = caught
    stored = {n: parts(units)[n] for n in units if parts(units)[n] is not None}
    for name, part in stored.items():
        assert part == [whole(group.world_size)] * units[name].counts[group.rank]
    # the object works again once all ranks pass the same units
    again = units_of(group)
    FSDPBackwardHook(FSDP(group)).scatter_multiple(again, gradients_of(group, again))
    assert parts(again) == expected_parts(again, group.world_size, ())
    # a rank without units calls only `finish`, which is another operation
    return None if error is None else text_of(error).partition(": ")[2], set(stored)


@settings(max_examples=tries(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(scripts, min_size=2, max_size=3), st.booleans())
def test_all_ranks_get_the_same_outcome(each, hooks):
    results = run(lambda group: play(each[group.rank], group, hooks=hooks, calls=2), len(each))
    assert len({error is None for error, _ in results}) == 1, results
    texts = {error for error, _ in results}
    assert len(texts) == 1, results
    common = set.intersection(*(set(s["faults"]) - {"absent"} for s in each))
    stored_names = [stored & common for _, stored in results]
    assert all(k == stored_names[0] for k in stored_names), results
    is_refused = any(set(s["faults"].values()) & {"none", "shape", "dtype", "list"} for s in each)
    assert hooks or not is_refused or not any(stored for _, stored in results), results
