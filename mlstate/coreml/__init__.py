"""Core ML: what states a model declares, and moving them between models.

`state_specs` reads the states of a ``.mlpackage`` by itself: no coremltools, no Mac.
`plan_transition` says from two packages alone which states move and whether they fit.
`transition_coreml_state` and `compact_coreml_state` carry one state between two state
objects; `FakeMLState` stands in for such an object where there is no Mac.
"""

from ._plan import StateMove, TransitionPlan, plan_transition
from ._specs import StateShapeWarning, StateSpec, StateSpecs, state_specs
from ._transfer import FakeMLState, compact_coreml_state, transition_coreml_state

__all__ = [
    "FakeMLState",
    "StateMove",
    "StateShapeWarning",
    "StateSpec",
    "StateSpecs",
    "TransitionPlan",
    "compact_coreml_state",
    "plan_transition",
    "state_specs",
    "transition_coreml_state",
]
