"""Activation checkpointing: recompute activations in the backward pass instead of keeping them.

A strategy decides for each layer, from its name, its index and the size of its activation.
`ActivationManager` applies a strategy to a model and records the decisions. `plan` finds the
fastest schedule within a memory budget, from the measured costs of a `Chain` of blocks.

Examples
--------
>>> import numpy as np
>>> from mlstate.activation import FirstMatch, IntervalStrategy, SelectiveStrategy
>>> strategy = FirstMatch(SelectiveStrategy(exclude_layers=["head"]), IntervalStrategy(2))
>>> activation = np.zeros((8, 64), np.float32)
>>> names = ["embedding", "layers.0", "layers.1", "layers.2", "head"]
>>> [strategy.should_checkpoint(name, activation, i) for i, name in enumerate(names)]
[True, False, True, False, False]
"""

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from . import records
from ._chain import Chain
from ._combinators import AllOf, AnyOf, CheckpointStrategy, FirstMatch, Not
from ._config import (
    CheckpointConfig,
    StrategyKind,
    create_interval,
    create_memory_aware,
    create_selective,
    create_size_based,
    create_smart,
    create_strategy,
    register_strategy,
)
from ._manager import ActivationManager
from ._memory_tracker import MemoryTracker
from ._plan import Plan
from ._planner import pareto, plan
from ._recompute_check import check
from ._strategies import (
    IntervalStrategy,
    MemoryAwareStrategy,
    SelectiveStrategy,
    SizeBasedStrategy,
    SmartStrategy,
)

__all__ = [
    "ActivationManager",
    "AllOf",
    "AnyOf",
    "Chain",
    "CheckpointConfig",
    "CheckpointStrategy",
    "FirstMatch",
    "IntervalStrategy",
    "MemoryAwareStrategy",
    "MemoryTracker",
    "Not",
    "Plan",
    "SelectiveStrategy",
    "SizeBasedStrategy",
    "SmartStrategy",
    "StrategyKind",
    "check",
    "create_interval",
    "create_memory_aware",
    "create_selective",
    "create_size_based",
    "create_smart",
    "create_strategy",
    "pareto",
    "plan",
    "records",
    "register_strategy",
]

set_module_of_exports(globals())
show_exports(globals())
