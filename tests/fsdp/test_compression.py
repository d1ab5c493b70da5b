"""Gradient compression: the reduced values, and error feedback over many steps."""

import numpy as np
import pytest
from gradient_model import (
    ENGINES,
    assert_same,
    bfloat16,
    check_parts,
    gradient_of,
    gradients_of,
    part_of,
    run,
    units_of,
)

from mlstate import CollectiveError
from mlstate.collectives import SingleGroup
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit

pytestmark = pytest.mark.timeout(60)

WIRES = ["float16", "int8", *(["bfloat16"] if bfloat16 else [])]
BLOCK = 256


def round_trip(part, compression):
    """One rank's part after compression and decompression, in NumPy."""
    if compression == "int8":
        decoded = np.empty_like(part)
        for start in range(0, len(part), BLOCK):
            block = part[start : start + BLOCK]
            largest = np.abs(block).max()
            if largest < 1e-36:
                decoded[start : start + BLOCK] = 0
                continue
            codes = np.rint(block * (np.float32(127) / largest)).astype(np.int8)
            decoded[start : start + BLOCK] = codes.astype(np.float32) * (largest / np.float32(127))
        return decoded
    with np.errstate(over="ignore"):
        if compression == "float16":
            return np.clip(part, -65504, 65504).astype(np.float16).astype(np.float32)
        limit = np.float32(3.3895313892515355e38)
        return np.clip(part, -limit, limit).astype(bfloat16).astype(np.float32)


class Compressed:
    """A model of the ranks: each adds the residual of the previous step to each element."""

    def __init__(self, world, length, compression):
        self.lost = np.zeros((world, length), np.float32)
        self.wire = compression

    def step(self, gradients, divisor=1.0):
        world = len(gradients)
        total = None
        for rank, gradient in enumerate(gradients):
            meant = gradient.reshape(-1) + self.lost[rank]
            parts = [part_of(meant, "flat", r, world) for r in range(world)]
            arrives = np.concatenate([round_trip(part, self.wire) for part in parts])
            self.lost[rank] = meant - arrives
            total = arrives if total is None else total + arrives
        return total if divisor == 1 else total / np.float32(divisor)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("length", [1, 255, 1030])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("compression", WIRES)
def test_sums_and_residuals_have_the_bits_of_the_model(group, compression, world, length, engine):
    """Over several steps, with op="mean"."""
    model = Compressed(world, length, compression)
    unit = FSDPShardingUnit("w", (length,), "float32", group.rank)
    hook = FSDPBackwardHook(FSDP(group, op="mean", compression=compression))
    for step in range(4):
        each = [gradient_of([step, rank], (length,), "float32") for rank in range(world)]
        hook.scatter_gradient(unit, each[group.rank])
        total = model.step(each, world)
        assert_same(unit.local_gradient, part_of(total, "flat", group.rank, world), str(step))
        assert_same(unit.residual(), model.lost[group.rank], str(step))


@pytest.mark.parametrize("bucket_bytes", [0, 25 << 20])
@pytest.mark.parametrize("compression", WIRES)
def test_error_feedback_bounds_the_accumulated_error(compression, bucket_bytes):
    """After any number of steps the error of the sums is at most that of one step."""
    world, steps, length = 2, 60, 600

    def work(group):
        rng = np.random.default_rng(group.rank)
        small = (rng.standard_normal(length) * 1e-4 + 3e-4).astype(np.float32)
        small[::256] = 1.0  # so large that the other elements vanish in 8 bits
        # and the low digits of these in 16 bits
        small[1::256] = 1 + 0.4 * {"float16": 2.0**-10}.get(compression, 2.0**-7)
        off = {}
        for feedback in (True, False):
            unit = FSDPShardingUnit("w", (length,), "float32", group.rank, world_size=world)
            hook = FSDPBackwardHook(FSDP(group, compression=compression, bucket_bytes=bucket_bytes))
            total = np.zeros(unit.counts[group.rank])
            errors = []
            for step in range(1, steps + 1):
                hook.scatter_gradient(unit, small)
                if not feedback:
                    unit.residual().fill(0)
                total += unit.local_gradient
                exact_sum = np.sum(
                    group.all_gather(small.astype(np.float64).reshape(1, -1)), axis=0
                )
                expected = step * part_of(exact_sum, "flat", group.rank, world)
                errors.append(np.abs(total - expected).max())
            off[feedback] = errors
        return off

    # the most that one step can lose of an element of about 1, on each rank
    one_step = world * {"float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 1 / 127}[compression]
    for off in run(work, world):
        assert max(off[True]) <= one_step
        assert off[True][-1] <= one_step
        assert off[False][-1] > 5 * max(off[True])
        assert off[False][-1] == pytest.approx(steps * off[False][0], rel=1e-2), "it all adds up"


@pytest.mark.parametrize(
    ("codec", "share"), [("float16", 0.51), ("bfloat16", 0.51), ("int8", 0.27)]
)
def test_fewer_bytes_travel(group, codec, share):
    sent = []
    all_to_all = group.all_to_all

    def counted(array, **keywords):
        sent.append(array.nbytes)
        return all_to_all(array, **keywords)

    group.all_to_all = counted
    for compression in (None, codec):
        unit = FSDPShardingUnit("w", (100_000,), "float32", group.rank)
        hook = FSDPBackwardHook(FSDP(group, compression=compression))
        hook.scatter_gradient(unit, np.ones(100_000, np.float32))
        assert unit.local_gradient.tolist() == [2.0] * 50_000
    uncompressed, less = sent
    assert uncompressed >= 200_000
    assert less < share * uncompressed


def test_only_float32_gradients_are_compressed(group):
    shapes = {"a": (30,), "b": (9, 2), "c": (5,), "d": (300,)}
    dtypes = {"a": "float64", "b": "float16", "c": "int32", "d": "float32"}
    units = units_of(group.rank, shapes, dtypes)
    gradients = gradients_of(group.rank, shapes, dtypes)
    FSDPBackwardHook(FSDP(group, compression="int8")).scatter_multiple(units, gradients)
    others = {name: unit for name, unit in units.items() if name != "d"}
    check_parts(others, 2, shapes, dtypes)
    assert not any(unit.residual().any() for unit in others.values())
    assert units["d"].residual().any()


@pytest.mark.parametrize("op", ["min", "max"])
def test_minima_and_maxima_are_refused(op):
    with pytest.raises(ValueError, match=f"compression needs op='sum' or 'mean', got op='{op}'"):
        FSDP(SingleGroup(), op=op, compression="int8")


@pytest.mark.parametrize("wrong", ["float32", "int4", 8, True, ""])
def test_unknown_compressions_are_refused(wrong):
    with pytest.raises(ValueError, match=r"compression must be 'float16', .* or None, got"):
        FSDP(SingleGroup(), compression=wrong)


@pytest.mark.parametrize("compression", WIRES)
@pytest.mark.parametrize("spoiled", [np.nan, np.inf])
def test_non_finite_gradients_are_named_and_not_stored(group, compression, spoiled):
    units = units_of(group.rank, {"v": (300,), "w": (300,)})
    gradients = gradients_of(group.rank, {"v": (300,), "w": (300,)})
    bad = {name: gradient.copy() for name, gradient in gradients.items()}
    if group.rank == 1:
        bad["w"][7] = spoiled
    hook = FSDPBackwardHook(FSDP(group, compression=compression))
    with pytest.raises(CollectiveError, match=r"'w': NaN or infinite elements \(rank 1: 1\)"):
        hook.scatter_multiple(units, bad)
    assert units["w"].local_gradient is None
    assert np.isfinite(units["v"].local_gradient).all()
    for unit in units.values():
        assert np.isfinite(unit.residual()).all()
    hook.scatter_multiple(units, gradients)
    assert all(np.isfinite(unit.local_gradient).all() for unit in units.values())


def test_gradient_beyond_16_bits_arrives_in_later_steps(group):
    unit = FSDPShardingUnit("w", (4,), "float32", group.rank)
    hook = FSDPBackwardHook(FSDP(group, compression="float16"))
    sums = []
    for value in (150_000, 0, 0, 0):
        hook.scatter_gradient(unit, np.full(4, value, np.float32))
        sums.append(float(unit.local_gradient[0]))
    assert sums == [2 * 65504, 2 * 65504, 2 * (150_000 - 2 * 65504), 0.0]


def test_residuals_that_were_saved_resume_to_the_same_bits(group):
    hook = FSDPBackwardHook(FSDP(group, compression="int8"))
    unit = FSDPShardingUnit("w", (700,), "float32", group.rank)
    for step in range(3):
        hook.scatter_gradient(unit, gradient_of([step, group.rank], (700,), "float32"))
    resumed = FSDPShardingUnit("w", (700,), "float32", group.rank)
    resumed.residual()[:] = unit.residual()
    last = gradient_of([9, group.rank], (700,), "float32")
    assert_same(hook.scatter_gradient(resumed, last), hook.scatter_gradient(unit, last))
    fresh = FSDPShardingUnit("w", (700,), "float32", group.rank)
    hook.scatter_gradient(fresh, last)
    assert fresh.local_gradient.tobytes() != unit.local_gradient.tobytes()
