"""Results of plans, strategies and checks."""

from __future__ import annotations

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from ._manager import LayerDecisions
from ._memory_tracker import MemoryStats
from ._plan import Simulation, Step
from ._planner import Pareto
from ._recompute_check import Finding, RecomputeReport

__all__ = [
    "Finding",
    "LayerDecisions",
    "MemoryStats",
    "Pareto",
    "RecomputeReport",
    "Simulation",
    "Step",
]

set_module_of_exports(globals())
show_exports(globals())
