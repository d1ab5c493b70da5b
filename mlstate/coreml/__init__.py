"""Core ML: read the states that a model declares, and move states between models.

`state_specs` reads the states of a ``.mlpackage`` without coremltools and without a Mac.
`plan_transition` computes from two packages which states can move. `transition_coreml_state` and
`compact_coreml_state` move one state between two state objects. `StateManager` holds the state of
a family of models with several context sizes, and moves it between them. `FakeMLState` replaces a
state object on machines without Core ML.
"""

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from . import records
from ._plan import plan_transition
from ._specs import StateShapeWarning, StateSpec, StateSpecs, state_specs
from ._state_manager import StateManager
from ._transfer import FakeMLState, compact_coreml_state, transition_coreml_state

__all__ = [
    "FakeMLState",
    "StateManager",
    "StateShapeWarning",
    "StateSpec",
    "StateSpecs",
    "compact_coreml_state",
    "plan_transition",
    "records",
    "state_specs",
    "transition_coreml_state",
]

set_module_of_exports(globals())
show_exports(globals())
