"""Arguments of a wrong type or range raise a documented error that names the argument."""

import builtins
import inspect
import re

import numpy as np
import pytest

import mlstate.errors
from mlstate import activation, fsdp, kv
from mlstate.activation import Chain, CheckpointConfig, IntervalStrategy, Plan
from mlstate.collectives import SingleGroup
from mlstate.fsdp import FSDPShardingUnit
from mlstate.kv import KVState, RollingKVState, StateTransitionManager

WRONG = {
    "None": None,
    "True": True,
    "empty text": "",
    "text": "x",
    "negative": -1,
    "fraction": 1.5,
    "NaN": float("nan"),
    "list": [None],
    "dict": {},
    "object": object(),
    "class": int,
    "bytes": b"x",
    "array": np.zeros((2, 2)),
    "large": 2**70,
}
CHAIN = Chain([1] * 4, [2] * 4, [10] * 5, [40] * 4)
FLOATS = {"dtype": "float16", "fill": 0.0}
CALLS = {
    "plan": (activation.plan, {"chain": CHAIN, "budget_bytes": 120, "slots": 5, "offload": False}),
    "pareto": (activation.pareto, {"chain": CHAIN, "slots": 5, "offload": False}),
    "Pareto.plan": (activation.pareto(CHAIN).plan, {"i": 0}),
    "Plan.from_recomputed": (Plan.from_recomputed, {"chain": CHAIN, "blocks": [1]}),
    "Plan.from_strategy": (
        Plan.from_strategy, {"chain": CHAIN, "strategy": IntervalStrategy(2), "passes": 2},
    ),
    "Plan.from_json": (Plan.from_json, {"text": activation.plan(CHAIN, 120).to_json()}),
    "Chain.from_json": (Chain.from_json, {"text": CHAIN.to_json()}),
    "CheckpointConfig": (
        CheckpointConfig,
        {"interval": 2, "checkpoint_layers": (), "exclude_layers": (),
         "max_memory_percentage": 0.5},
    ),
    "create_interval": (activation.create_interval, {"interval": 2}),
    "create_selective": (
        activation.create_selective, {"checkpoint_layers": None, "exclude_layers": None},
    ),
    "FSDPShardingUnit": (
        FSDPShardingUnit,
        {"parameter_name": "w", "shape": (2,), "dtype": "float32", "shard_index": 0,
         "world_size": 1, "layout": "flat"},
    ),
    "clip_grad_norm": (
        fsdp.clip_grad_norm,
        {"sharding_units": {"w": FSDPShardingUnit("w", (2,), "float32", 0)}, "max_norm": 1.0,
         "group": SingleGroup(), "timeout": None},
    ),
    "KVState": (
        KVState, {"shape": (2, 2, 8, 4), "capacity": 16, "dtype": "float16", "seq_axis": -2},
    ),
    "RollingKVState": (
        RollingKVState,
        {"shape": (2, 2, 8, 4), "capacity": 16, "dtype": "float16", "sinks": 1, "seq_axis": -2},
    ),
    "KVState.reserve": (lambda: KVState((2, 2, 8, 4)).reserve, {"capacity": 16}),
    "register_model": (
        StateTransitionManager().register_model,
        {"model_name": "a", "state_seq_length": 4, "num_layers": 2, "num_kv_heads": 2,
         "head_dim": 2},
    ),
    "get_transition_info": (
        kv.get_transition_info,
        {"source_seq_length": 4, "target_seq_length": 8, "current_position": 3},
    ),
    "create_attention_size_mask": (
        kv.create_attention_size_mask,
        {"seq_length": 8, "attention_size": 2, "current_position": 3, "sinks": 0, **FLOATS},
    ),
    "create_decode_mask": (
        kv.create_decode_mask,
        {"seq_length": 8, "attention_size": 2, "current_position": 3, "sinks": 0, **FLOATS},
    ),
    "create_causal_mask": (
        kv.create_causal_mask, {"seq_length": 8, "attention_size": 2, **FLOATS},
    ),
}  # fmt: skip
# Arguments whose errors name another thing: the value, or a number of it.
UNNAMED = {"blocks", "i", "fill", "text", "budget_bytes", "group"}


def documented_errors(function):
    """Return the classes of the section Raises of a docstring."""
    section = re.search(
        r"\nRaises\n-+\n(.*?)(\n\n\w[\w ]+\n---|\Z)", inspect.getdoc(function), re.S
    )
    names = re.findall(r"^([A-Z]\w+(?:, [A-Z]\w+)*)$", section[1], re.M)
    return tuple(
        getattr(builtins, name, None) or getattr(mlstate.errors, name)
        for line in names
        for name in line.split(", ")
    )


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize(
    ("call", "argument"), [(call, name) for call, (_, named) in CALLS.items() for name in named]
)
def test_a_wrong_argument_raises_a_documented_error(call, argument, value):
    function, arguments = CALLS[call]
    if inspect.isfunction(function) and function.__name__ == "<lambda>":
        function = function()
    try:
        function(**{**arguments, argument: value})
    except Exception as error:
        assert isinstance(error, documented_errors(function)), error
        assert argument in UNNAMED or argument in str(error), error


def test_numbers_of_json_that_is_nested_too_deeply_are_refused():
    for cls in (Chain, Plan):
        with pytest.raises(ValueError, match="nested too deeply"):
            cls.from_json("[" * 200_000)
