"""Leak cases of gradients: accumulated, scattered, clipped, verified."""

import asyncio

import numpy as np
import pytest
from gradient_model import Model
from leak_cases import case, each, methods, raises, with_members

from mlstate import _core, collectives, errors, fsdp, testing


@case(*with_members("GradientAccumulator", "add_gradients get_and_clear_gradients reset"))
def accumulated(_):
    batch = {"w": np.ones((5, 7), np.float16), "b": np.full(5, 2.0)}
    bad = {"b": batch["b"], "w": np.ones(3, np.float16)}
    accumulator = fsdp.GradientAccumulator(2, dtype="float32")

    def use():
        for _ in range(3):
            accumulator.add_gradients(batch)
        raises(errors.CompatibilityError, accumulator.add_gradients, bad)()
        assert accumulator.is_complete and accumulator.norm > 0 and not accumulator.nonfinite
        accumulator.get_and_clear_gradients()
        accumulator.reset()

    return use, [batch, *batch.values(), accumulator]


@case()
def torch_gradients_accumulated(_):
    torch = pytest.importorskip("torch", reason="accumulates torch tensors")
    gradient = torch.ones(9, dtype=torch.bfloat16)
    accumulator = fsdp.GradientAccumulator()

    def use():
        accumulator.add_gradients({"w": gradient})
        accumulator.add_gradients({"w": gradient})
        return accumulator.get_and_clear_gradients(), accumulator.norm

    return use, [gradient, accumulator]


@case()
def reductions(_):
    a, b = np.ones(100, np.float32), np.ones(100, np.float32)
    codes = np.array([17, 1, 0], np.uint64)
    return each(
        lambda: _core.reduce([a, b], b, "sum", 2.0),
        lambda: _core.accumulate(["a"], [a], [b], 0.0, True),
        lambda: _core.accumulate(["a"], [a], [b], 0.0, False),
        lambda: _core.scale(["a"], [a], 1.0),
        lambda: _core.norm_partials(["a", "b"], [a, b]),
        lambda: _core.clear(["a"], [a]),
        lambda: _core.bucket_fits(a, "float32", (100,), True),
        lambda: _core.bucket_fits(a[1:], "float32", (100,), True),
        lambda: _core.bucket([(a, (100,), np.empty_like(a))], 1, 0, "sum", 1.0),
        lambda: _core.bucket([(a, (100,), b, "float32", (100,))], 1, 0, "sum", 1.0),
        lambda: _core.bucket([(a, (100,), (np.empty_like(a),), codes)], 1, 0, "sum", 1.0),
        raises(ValueError, _core.bucket, [(a, (100,), (b,), codes[1:])], 1, 0, "sum", 1.0),
        raises(ValueError, _core.bucket, [(a, (100,), b[::2])], 1, 0, "sum", 1.0),
        raises(ValueError, _core.bucket, [(a, (100,), b, "float32", (99,))], 1, 0, "sum", 1.0),
        raises(errors.CompatibilityError, _core.reduce, [a, b[1:]], b, "sum", 1.0),
        raises(errors.CompatibilityError, _core.accumulate, ["a"], [a], [b[1:]], 1.0, True),
        raises(errors.CompatibilityError, _core.scale, ["a"], [np.ones(2, int)], 1.0),
        raises(TypeError, _core.norm_partials, ["a", 3], [a, b]),
        raises(TypeError, _core.clear, ["a", "b"], [a, object()]),
    ), [a, b]


# ---- scattered ----


@case("FSDP", *methods(fsdp.FSDP), "FSDPBackwardHook", *methods(fsdp.FSDPBackwardHook), calls=60)
def scattered(_):
    gradients = {"w": np.ones((5, 3), np.float32), "b": np.ones(7, np.float32)}
    bad = {"w": gradients["w"], "b": np.full(7, np.nan, np.float32)}
    group = collectives.SingleGroup()

    def loop(hook, gradients, **keywords):
        hook.use_units(units_of(), **keywords)
        with hook.no_sync():
            hook.add_gradient("w", gradients["w"])
        for name in gradients:
            hook.add_gradient(name, gradients[name])
        raises(ValueError, hook.add_gradient, "b", gradients["b"])()
        hook.finish()
        hook.close()

    def units_of():
        return {
            name: fsdp.FSDPShardingUnit(name, gradient.shape, "float32", 0)
            for name, gradient in gradients.items()
        }

    def use():
        hook = fsdp.FSDPBackwardHook(fsdp.FSDP(group, bucket_bytes=0, record=True))
        loop(hook, gradients)
        str(hook.report()), hook.report()._repr_html_()
        raises(errors.CollectiveError, loop, hook, bad, accumulate=True)()
        hook.close()
        units, model = units_of(), Model()
        with hook:
            hook.register_hooks(model, units)
            raises(ValueError, hook.register_hooks, model, units)()
            model.backward(gradients)
        hook.scatter_gradient(units["w"], gradients["w"])
        hook.scatter_multiple(units, gradients)
        raises(errors.CollectiveError, hook.scatter_multiple, units, bad)()
        raises(errors.CollectiveError, hook.scatter_multiple, units, {"w": gradients["w"]})()
        hook.scatter_multiple(units, gradients)
        local = {name: unit.local_gradient.copy() for name, unit in units.items()}
        hook.accumulate_gradients(units, local)
        raises(errors.CompatibilityError, hook.accumulate_gradients, units, gradients)()
        str(hook.verify_gradients(units, gradients)), hook.verify_gradients(units)
        hook.verify_gradients(units, unreduced=gradients)
        hook.clear_gradients(units)
        hook.use_units(units)
        hook.add_gradient("b", gradients["b"])
        hook.close()  # an abandoned pass

    return use, [gradients, *gradients.values(), *bad.values(), group]


@case("FSDPBackwardHook.scatter_multiple_async", calls=10)
def awaited(_):
    gradient = {"w": np.ones(4)}
    hook = fsdp.FSDPBackwardHook(fsdp.FSDP(collectives.SingleGroup()))
    unit = {"w": fsdp.FSDPShardingUnit("w", (4,), "float64", 0)}

    def use():
        asyncio.run(hook.scatter_multiple_async(unit, gradient))
        broken = hook.scatter_multiple_async(unit, {"w": None})
        raises(errors.CollectiveError, asyncio.run, broken)()

    return use, []  # asyncio creates reference cycles


@case("FSDPShardingUnit", *methods(fsdp.FSDPShardingUnit), "ReduceScatterOperation",
      *methods(fsdp.ReduceScatterOperation), "clip_grad_norm")  # fmt: skip
def parts(_):
    group, gradient = collectives.SingleGroup(), np.ones((3, 2))

    def use():
        unit = fsdp.FSDPShardingUnit("w", (3, 2), "float64", 0, layout="rows")
        raises(ValueError, unit.shard)()
        unit.bind(1), unit.zeros(), repr(unit)
        unit.local_gradient = gradient
        unit.shard(), fsdp.clip_grad_norm({"w": unit}, 100.0, group)
        unit.local_gradient = np.full(3, np.nan)
        raises(errors.CollectiveError, fsdp.clip_grad_norm, {"w": unit}, 1.0, group)()
        operation = fsdp.ReduceScatterOperation(group, (3, 2), "float64", 0, "mean")
        operation.reduce_scatter(gradient)
        raises(errors.CollectiveError, operation.reduce_scatter, None)()

    return use, [gradient, group]


@case("SpotCheck", *methods(fsdp.SpotCheck))
def spot_checks(_):
    gradients, wrong = {"w": np.ones(4)}, {"w": np.zeros(4)}

    def train(group):
        check = fsdp.SpotCheck(group, lambda leaf: gradients, every=2)
        check.compare(0, check.choose_leaf(0, [group.rank]), gradients)
        raises(errors.CollectiveError, check.compare, 2, 0, wrong)()
        raises(TypeError, check.compare, 4, 0, None)()

    return lambda: testing.run_ranks(2, train), [gradients, wrong, *gradients.values()]


@case("BackwardReport", "Bucket", "GradientReport", "Mismatch")
def gradient_reports(_):
    bucket = fsdp.records.Bucket(("w",), 8, 1.0, 1.0, 2.0, 3.0, (0.0, 0.5))
    wrong = [fsdp.records.Mismatch("w", 0, None, "a gradient", "none")]

    def use():
        report = fsdp.records.BackwardReport([("w", 0.0)], 2.0, [bucket, bucket])
        str(report), report._repr_html_(), report.straggler
        mismatch_report = fsdp.records.GradientReport(wrong, 1, 1e-5)
        str(mismatch_report), mismatch_report._repr_html_(), bool(mismatch_report)

    return use, [bucket, wrong]


@case("sharding_units")
def units_of_a_module(_):
    torch = pytest.importorskip("torch", reason="the module is torch's")
    module, group = torch.nn.Linear(3, 2), collectives.SingleGroup()
    return lambda: fsdp.sharding_units(module, group), [module, group]
