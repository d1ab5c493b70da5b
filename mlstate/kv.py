"""KV-cache transitions: expand, compact, grow in place, mask.

Everything that ``anemll.utils.state_transition`` offers under the same names, so that a
script moves over by changing one import line, and more.
"""

from ._kv_state import KVState
from ._manager import StateTransitionManager
from ._mask import create_attention_size_mask, create_causal_mask, create_decode_mask
from ._transition import (
    compact_kv_state,
    get_transition_info,
    transition_kv_state,
    validate_state_shapes,
)
from .coreml import compact_coreml_state, transition_coreml_state

__all__ = [
    "KVState",
    "StateTransitionManager",
    "compact_coreml_state",
    "compact_kv_state",
    "create_attention_size_mask",
    "create_causal_mask",
    "create_decode_mask",
    "get_transition_info",
    "transition_coreml_state",
    "transition_kv_state",
    "validate_state_shapes",
]
