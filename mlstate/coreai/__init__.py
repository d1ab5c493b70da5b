"""Core AI: read the states that a model declares, and move states between context sizes.

`state_specs` reads the states of an ``.aimodel``, and `verify` checks that it is complete and
unaltered. `plan_transition` computes which states can move from one model, or context size, to
another. `StateManager` holds the states of a model with several context sizes, and moves them.

To read an ``.aimodel`` and to create states, the package coreai-core is needed: ``pip install
'mlstate[coreai]'``. It has wheels for Linux on x86-64 (glibc 2.34 or newer) and for macOS 26 on
Apple silicon. `verify`, and plans for given shapes, run without it.
"""

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from ._asset import verify
from ._plan import plan_transition
from ._specs import StateSpec, StateSpecs, state_specs
from ._state_manager import StateManager

__all__ = [
    "StateManager",
    "StateSpec",
    "StateSpecs",
    "plan_transition",
    "state_specs",
    "verify",
]

set_module_of_exports(globals())
show_exports(globals())
