"""Plans of transitions, and the moves in them."""

from __future__ import annotations

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from ..kv._transition_plan import StateMove, TransitionPlan

__all__ = [
    "StateMove",
    "TransitionPlan",
]

set_module_of_exports(globals())
show_exports(globals())
