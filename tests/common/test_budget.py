"""Budgets of memory: bytes, sizes with a unit, fractions, and errors in the same unit."""

import re

import numpy as np
import pytest

import mlstate
from mlstate import CapacityError
from mlstate._common.budget import parse_budget, parse_size
from mlstate.activation import (
    Chain,
    CheckpointConfig,
    IntervalStrategy,
    Plan,
    SizeBasedStrategy,
    plan,
)

GIB = 1 << 30


def chain(size=1 << 20):
    return Chain([1] * 4, [2] * 4, [10 * size] * 5, [40 * size] * 4)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (6, 6),
        (1, 1),
        (np.int64(7), 7),
        (-1, -1),
        (0.0, 0),
        ("6GiB", 6 * GIB),
        ("6 GiB", 6 * GIB),
        (" 6gib ", 6 * GIB),
        ("6 GB", 6 * 10**9),
        ("1.5 GiB", GIB * 3 // 2),
        (".5KiB", 512),
        ("0.3B", 0),
        ("80 kB", 80_000),
        ("2TiB", 2 << 40),
        ("6000", 6000),
        (0.5, 50),
        (1.0, 100),
        (np.float64(0.29), 29),
        ("60%", 60),
        (" 12.5 % ", 12),
    ],
)
def test_budget_forms_are_parsed(value, nbytes):
    assert parse_budget("budget_bytes", value, 100, "the whole").nbytes == nbytes


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (
            "6 XB",
            ValueError,
            "budget_bytes is '6 XB': expected a number and a unit, such as",
        ),
        ("6 G", ValueError, "units: B, KiB, KB, MiB"),
        ("", ValueError, "budget_bytes is ''"),
        ("-6GiB", ValueError, "budget_bytes is '-6GiB'"),
        ("GiB", ValueError, "expected a number"),
        (float("nan"), ValueError, "budget_bytes is nan: give a finite number"),
        (float("inf"), ValueError, "budget_bytes is inf: give a finite number"),
        (0.5, ValueError, "budget_bytes is 0.5: a fraction is not allowed here"),
        ("60%", ValueError, "budget_bytes is 60%: a fraction is not allowed here"),
        (6e9, ValueError, "budget_bytes is 6e.09: a float is a fraction up to 1"),
        (np.float32(512), ValueError, "budget_bytes is 512: a float is a fraction up to 1"),
        (None, TypeError, "budget_bytes must be a number of bytes or a size .* got NoneType"),
        ([1], TypeError, "got list"),
    ],
)
def test_invalid_budgets_are_refused(value, error, match):
    with pytest.raises(error, match=match):
        parse_budget("budget_bytes", value)


def test_plans_take_every_form():
    model_chain = chain()
    peak = model_chain.plain_peak_bytes
    assert plan(model_chain, "120 MiB") == plan(model_chain, 120 << 20)
    assert plan(model_chain, 0.8) == plan(model_chain, peak * 4 // 5)
    assert plan(model_chain, 0.8, schedules="any").budget_bytes == peak * 4 // 5
    steps = plan(model_chain, 1.0).steps()
    assert Plan(model_chain, steps, budget_bytes="190MiB").budget_bytes == 190 << 20
    assert Plan.from_recomputed(model_chain, [0], budget_bytes=1.0).budget_bytes == peak
    strategy = IntervalStrategy(2)
    assert Plan.from_strategy(model_chain, strategy, budget_bytes="1 GB").budget_bytes == 10**9
    with pytest.raises(CapacityError, match=r"peak of 190 MiB \(199229440 bytes\) exceeds"):
        Plan(model_chain, steps, budget_bytes="120 MiB")


@pytest.mark.parametrize("schedules", ["persistent", "any"])
@pytest.mark.parametrize("size", [1, 1 << 20, 12_345_677])
@pytest.mark.parametrize("unit", ["KiB", "MB", "GiB", "of the peak without a plan"])
def test_error_names_the_least_budget_in_the_caller_unit(size, unit, schedules):
    model_chain = chain(size)
    small = 0.0211 if " " in unit else f"0.00400 {unit}"
    if size == 1 and unit in ("MB", "GiB"):
        small = f"0.000000001 {unit}"
    with pytest.raises(CapacityError) as caught:
        plan(model_chain, small, schedules=schedules)
    text = str(caught.value)
    assert f"schedule of {model_chain.blocks} blocks" in text
    assert f"budget of {small}" in text
    pattern = rf"([0-9.]+) {unit} \(([0-9]+) bytes\)$"
    number, nbytes = re.search(pattern, text).groups()
    assert caught.value.expected.removeprefix("at least ") == nbytes
    enough = float(number) if " " in unit else f"{number} {unit}"
    schedule = plan(model_chain, enough, schedules=schedules)
    assert int(nbytes) <= schedule.budget_bytes
    with pytest.raises(CapacityError):
        plan(model_chain, int(nbytes) - 1, schedules=schedules)


def test_a_budget_in_bytes_is_named_in_bytes():
    with pytest.raises(
        CapacityError, match="budget of 60 bytes: the smallest sufficient budget is 80 b"
    ):
        plan(chain(1), 60)


@pytest.mark.parametrize(("value", "nbytes"), [(0, 0), (np.int64(7), 7), ("5GB", 5 * 10**9)])
def test_sizes_are_integers_or_texts(value, nbytes):
    assert parse_size("max_bytes", value) == nbytes


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (1.5, TypeError, "max_bytes must be an int or a size such as '5GB', got float"),
        (True, TypeError, "got bool"),
        ("60%", ValueError, "max_bytes is '60%'"),
        ("0B", ValueError, "max_bytes must be 1 or more, got 0"),
        (0, ValueError, "max_bytes must be 1 or more, got 0"),
    ],
)
def test_wrong_sizes_are_refused(value, error, match):
    with pytest.raises(error, match=match):
        parse_size("max_bytes", value, 1)


def test_sizes_are_texts_everywhere(tmp_path):
    state = {name: np.ones(200) for name in "abc"}
    saved = mlstate.save(tmp_path / "small", state, pack_below_bytes="1 KiB")
    assert len(saved.files()) == 3
    assert len(mlstate.checkpoint.plan_save(state, pack_below_bytes="2KiB").files) == 1
    mlstate.export_huggingface(tmp_path / "hf", state, max_shard_bytes="1.6kB")
    assert len([*(tmp_path / "hf").glob("*.safetensors")]) == 3
    assert SizeBasedStrategy("2MiB").min_size_bytes == 2 << 20
    assert CheckpointConfig(min_activation_size_bytes="1KB").min_activation_size_bytes == 1000
    with mlstate.checkpoint.TieredState(
        state, {}, tmp_path / "tiers", warm_budget_bytes="50%"
    ) as tiers:
        assert sum(t.tier == "cold" for t in tiers.report().units) == 2
