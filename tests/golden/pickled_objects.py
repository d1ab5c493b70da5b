"""One object of each public class that can be pickled, the same in every run."""

import importlib
import tempfile

import numpy as np

import mlstate
import mlstate.integrations.torch as torch_integration
from mlstate import (
    activation,
    checkpoint,
    collectives,
    coreml,
    distributed,
    errors,
    fsdp,
    kv,
    state,
)
from mlstate.checkpoint import Tier

A = np.arange(6, dtype=np.float32).reshape(2, 3)
LAYOUT = checkpoint.Layout([(0, 2), (1, 3)])
PUBLIC = (
    "mlstate.activation",
    "mlstate.activation.records",
    "mlstate.checkpoint",
    "mlstate.checkpoint.records",
    "mlstate.collectives",
    "mlstate.coreai",
    "mlstate.coreml",
    "mlstate.coreml.records",
    "mlstate.distributed",
    "mlstate.distributed.records",
    "mlstate.errors",
    "mlstate.follow",
    "mlstate.fsdp",
    "mlstate.fsdp.records",
    "mlstate.integrations.lightning",
    "mlstate.integrations.mlx",
    "mlstate.integrations.mpi",
    "mlstate.integrations.torch",
    "mlstate.integrations.torch.records",
    "mlstate.integrations.transformers",
    "mlstate.kv",
    "mlstate.kv.records",
    "mlstate.plot",
    "mlstate.prompts",
    "mlstate.state",
    "mlstate.state.records",
    "mlstate.testing",
    "mlstate.threads",
    "mlstate",
)


def public_names():
    """All classes and functions of the public modules, by module and name."""
    names = {}
    for module_name in PUBLIC:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            thing = getattr(module, name)
            if callable(thing):
                names[f"{module_name}.{name}"] = thing
    return names


# ---- states ----


def state_dict():
    return state.StateDict({"w": A, "scalar": np.float64(2.5), "half": A.astype(np.float16)})


def model_state():
    return state.ModelStateDict({"a.w": A, "a.b": A[0]}, model_type="tiny", layer_count=1)


def optimizer_state():
    return state.OptimizerStateDict(
        {"a.w.m": A, "a.w.v": A + 1},
        optimizer_type=state.OptimizerType.ADAM,
        step=7,
        learning_rate=0.5,
        param_groups=[{"lr": 0.5, "params": ["a.w"]}],
    )


def compatibility():
    return state.check_compatibility({"a": A, "b": A}, {"a": A[0], "c": A})


def digests():
    first, second = (mlstate.digest({"a": each}) for each in (A, A + 1))
    return first, first.diff(second)


def state_diff():
    return state.diff({"a": A, "b": A}, {"a": A + 1, "b": A[0]})


def state_specs():
    spec = coreml.StateSpec("kv_cache", (1, 1, 4, 8), np.dtype("float16"))
    return coreml.StateSpecs({"main": {spec.name: spec}}, "main", default_function="main")


def transition_plan():
    move = coreml.records.StateMove("kv_cache", "expand", (1, 1, 4, 8), (1, 1, 8, 8), 64, 64, None)
    return coreml.records.TransitionPlan(3, (move,), 64, 128)


def transition_manager():
    manager = kv.StateTransitionManager()
    manager.register_model("small", 256, num_layers=2)
    return manager


def context_ladder():
    ladder = kv.ContextLadder([512, 4096], overflow="shift_refill", batch_size=64, prompt_tokens=9)
    return [ladder, ladder.next_step(4096, 4096)]


def cache_state():
    spec = kv.CacheSpec(
        [
            kv.CacheEntry("0.keys", "quantized", (1, 2, 8), "float32", bits=8, group=8, layer=0),
            kv.CacheEntry("0.state", "recurrent", (3,), "float32", layer=0, role="state"),
            kv.CacheEntry("1.keys", "sliding", (1, 2, 4), "float16", window=3, sinks=1),
        ]
    )
    arrays = {
        name: np.full(shape, 3, dtype)
        for entry in spec
        for name, (shape, dtype) in entry.arrays.items()
    }
    return kv.CacheState(spec, arrays, 2)


def foreign_ring():
    entry = kv.CacheEntry("keys", "sliding", (1, 6, 1), "float32", window=5, sinks=1, next_slot=3)
    return kv.CacheState(kv.CacheSpec([entry]), {"keys": A.reshape(1, 6, 1)}, 20)


def kv_state():
    state = kv.KVState((1, 2, 3, 4), 8, np.float32)
    state.array[...] = 7
    return state


def rolling_kv_state():
    state = kv.RollingKVState((1, 4, 1), dtype=np.float32, sinks=1)
    state.append(np.arange(6, dtype=np.float32).reshape(1, 6, 1))
    state.trim(1)
    return state


def combined_strategy():
    return kv.CombinedStrategy(prefill=512, generate=(256, 128), expand_at=250)


def error_of(kind):
    """An error with all fields."""
    error = kind("text")
    error.name, error.expected, error.got, error.path = "w", "(2, 3)", "(4,)", "file"
    error.offset, error.rank = 8, 1
    return error


# ---- checkpoints ----


def saved_checkpoint():
    with tempfile.TemporaryDirectory() as folder:
        saved = checkpoint.save(folder + "/run", model={"w": A}, metadata={"run": "a"}, step=3)
    saved.path = "/checkpoints/run"
    return saved


def checkpoint_records():
    layer = checkpoint.records.LayerRecord("params/a", 0, 24, "0badcafe", 24, 24, "zlib")
    return [
        checkpoint.records.TensorRecord(
            *("params", "w", "w", None, "float32", (2, 3), LAYOUT, None, 6, 24, 1, "hot", 24, 0),
            None,
        ),
        checkpoint.records.ShardRecord(
            "params", "w", 0, (1, 1), 0, "params/a", 0, 4, None, 1, (layer,)
        ),
        checkpoint.records.SaveTimes(0.5, 1.5, None, [(0.5, 0.75)]),
        checkpoint.records.SavePlan(0, 1, 1, 24, {"params/a": 24}, 10, 20, b"text"),
        checkpoint.records.LoadPlan(
            20, {"index/a": 10}, [checkpoint.records.FileRead("params/a", 0, 24, 24)]
        ),
        checkpoint.records.StateDicts(state_dict(), None),
        checkpoint.records.PruneReport("/checkpoints", True, [1], [2], {"params/a": 24}),
    ]


def verify_report():
    report = checkpoint.VerifyReport("/checkpoints")
    report.problems = [checkpoint.records.Problem("altered", "params/a", "w", 0, 0, 8, 4, "text")]
    return report


def tier_report():
    return checkpoint.records.TierReport(
        [checkpoint.records.TierRecord("w", Tier.WARM, 24, ["w"], 2, 0.5)],
        {Tier.WARM: (24, 64), Tier.COLD: (0, None)},
        [checkpoint.records.Traffic(Tier.COLD, Tier.WARM, 1, 24, 0.5)],
    )


# ---- activations ----


def used(strategy):
    """The strategy, after it decided a few times."""
    for index in range(5):
        strategy.should_checkpoint(f"layers.{index}", A, index)
    return strategy


def combined():
    interval, selective = activation.IntervalStrategy(2), activation.SelectiveStrategy(["a"])
    return [
        used(interval & selective),
        used(interval | selective),
        used(~interval),
        used(activation.FirstMatch(selective, interval, default=True)),
    ]


def chain():
    return activation.Chain([1, 2, 3], [2, 4, 6], [10, 20, 30, 5], [30, 50, 35])


def activation_records():
    config = activation.CheckpointConfig(
        strategy="size_based", exclude_layers=["head"], options={"a": 1}
    )
    return [
        activation.records.Step("drop", 3),
        activation.records.LayerDecisions("layers.0", 0, 2, 1, True, 24, 24),
        activation.records.MemoryStats(30, 40, 120, "process", 5.0),
        config,
    ]


# ---- gradients ----


def sharding_unit():
    unit = fsdp.FSDPShardingUnit("w", (2, 3), "float32", 1, world_size=2, layout="rows")
    unit.local_gradient = A[1:]
    return unit


def rank_difference():
    change = state.records.TensorChange("w", 1, 3, 0, 2.0, float("inf"))
    return distributed.records.RankDifference("elements", "w", (1,), "text", change)


def torch_records():
    torch = torch_integration
    return [
        torch.records.MemoryUse(12, 4, [(0.5, 12)]),
        torch.records.PlanUse([torch.records.StepUse("save", 0, 96, 96, 95, "")]),
    ]


OBJECTS = {
    # mlstate.state
    "state_dict": state_dict,
    "model_state": model_state,
    "optimizer_state": optimizer_state,
    "compatibility": compatibility,
    "state_diff": state_diff,
    "digests": digests,
    # mlstate.errors
    "errors": lambda: [
        error_of(getattr(errors, name))
        for name in errors.__all__
        if name.endswith("Error")
        and name not in ("GradientMismatchError", "UnstorableError")  # added later
    ],
    "warnings": lambda: [
        getattr(errors, name)("text") for name in errors.__all__ if name.endswith("Warning")
    ],
    "unstorable_error": lambda: error_of(errors.UnstorableError),
    "gradient_mismatch_error": lambda: error_of(errors.GradientMismatchError),
    # mlstate.kv and mlstate.coreml
    "state_specs": state_specs,
    "transition_plan": transition_plan,
    "context_ladder": context_ladder,
    "combined_strategy": combined_strategy,
    "cache_state": cache_state,
    "quantization_loss": lambda: kv.records.QuantizationLoss(0.5, 0.25, 0.125, 1024, 256),
    "foreign_ring": foreign_ring,
    "kv_state": kv_state,
    "rolling_kv_state": rolling_kv_state,
    "transition_manager": transition_manager,
    "fake_state": lambda: coreml.FakeMLState({"kv_cache": (1, 1, 2, 4)}),
    "state_shape_warning": lambda: coreml.StateShapeWarning("text"),
    # mlstate.checkpoint
    "layout": lambda: [LAYOUT, checkpoint.Layout.flat(4)],
    "shard": lambda: LAYOUT.shard(A, 1),
    "loaded_state": lambda: checkpoint.LoadedState(model_state(), optimizer_state(), {"a": 1}, 3),
    "checkpoint": saved_checkpoint,
    "checkpoint_manager": lambda: checkpoint.CheckpointManager("/checkpoints", keep=2),
    "checkpoint_records": checkpoint_records,
    "verify_report": verify_report,
    "tier_report": tier_report,
    # mlstate.activation
    "interval": lambda: used(activation.IntervalStrategy(3)),
    "selective": lambda: used(activation.SelectiveStrategy(["a*"], exclude_layers=["head"])),
    "size_based": lambda: used(activation.SizeBasedStrategy(8)),
    "smart": lambda: used(activation.SmartStrategy()),
    "memory_aware": lambda: activation.MemoryAwareStrategy(
        0.5,
        total_memory=1 << 50,
        clock=float,  # constant, because a pickle stores the elapsed time
    ),
    "memory_tracker": lambda: activation.MemoryTracker("process"),
    "combined": combined,
    "chain": chain,
    "plan": lambda: activation.plan(chain(), 130),
    "simulation": lambda: activation.plan(chain(), 130).simulate(),
    "pareto": lambda: activation.pareto(chain()),
    "recompute_report": lambda: activation.records.RecomputeReport(
        [activation.records.Finding("layers.0", "output", "bits", "text")], ["layers.0"]
    ),
    "activation_records": activation_records,
    # mlstate.collectives, mlstate.distributed and mlstate.fsdp
    "enums": lambda: [
        *(collectives.ReduceOp.MEAN, Tier.HOT, state.OptimizerType.LION),
        activation.StrategyKind.SMART,
    ],
    "single_group": collectives.SingleGroup,
    "collector": lambda: distributed.DistributedStateCollector(collectives.SingleGroup()),
    "rank_difference": rank_difference,
    "sharding_unit": sharding_unit,
    "gradient_report": lambda: fsdp.records.GradientReport(
        [fsdp.records.Mismatch("w", 0, 1, 1.0, 2.0)], 3, 1e-5
    ),
    "backward_report": lambda: fsdp.records.BackwardReport([("w", 1.0)], 2.0, []),
    "bucket": lambda: fsdp.records.Bucket(("w",), 24, 0.0, 0.25, 0.5, 1.0, (0.25, 0.0)),
    # frameworks
    "torch_records": torch_records,
    # pickled by name
    "public_names": public_names,
    "bound_methods": lambda: [checkpoint.Layout.rows, model_state().get_layer_state],
}
