"""Results of memory measurements."""

from __future__ import annotations

from ..._exports import show_exports
from ._activation.peak_memory import MemoryUse
from ._activation.step_memory import PlanUse, StepUse

__all__ = [
    "MemoryUse",
    "PlanUse",
    "StepUse",
]

show_exports(globals())
