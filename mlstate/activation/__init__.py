"""Activation checkpointing: which layers to compute again instead of keeping their activations.

A strategy decides layer by layer, from the layer's name, its index and the size of its
activation. `ActivationManager` ties one to a model and keeps account.

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
from ._manager import ActivationManager, LayerDecisions
from ._memory_tracker import MemoryStats, MemoryTracker
from ._operator_selection import OperatorSelection, select_operators
from ._plan import Plan, Simulation, Step
from ._planner import Pareto, pareto, plan
from ._recompute_check import Finding, RecomputeReport, check
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
    "Finding",
    "FirstMatch",
    "IntervalStrategy",
    "LayerDecisions",
    "MemoryAwareStrategy",
    "MemoryStats",
    "MemoryTracker",
    "Not",
    "OperatorSelection",
    "Pareto",
    "Plan",
    "RecomputeReport",
    "SelectiveStrategy",
    "Simulation",
    "SizeBasedStrategy",
    "SmartStrategy",
    "Step",
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
    "register_strategy",
    "select_operators",
]
