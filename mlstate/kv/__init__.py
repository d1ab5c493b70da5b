"""KV-cache transitions: expand, compact, grow in place, roll, mask, decide.

The functions of ``anemll.utils.state_transition`` are available under the same names, so a script
can switch by changing one import line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from ._combined_strategy import CombinedStrategy
from ._context_ladder import ContextLadder
from ._kv_state import KVState
from ._mask import create_attention_size_mask, create_causal_mask, create_decode_mask
from ._rolling import RollingKVState
from ._rotate_keys import rotate_keys
from ._transition import (
    compact_kv_state,
    get_transition_info,
    transition_kv_state,
    validate_state_shapes,
)
from ._transition_manager import StateTransitionManager

if TYPE_CHECKING:
    from ..coreml import compact_coreml_state, transition_coreml_state
    from . import records
    from ._cache_spec import CacheEntry, CacheSpec
    from ._cache_state import CacheState

__all__ = [
    "CacheEntry",
    "CacheSpec",
    "CacheState",
    "CombinedStrategy",
    "ContextLadder",
    "KVState",
    "RollingKVState",
    "StateTransitionManager",
    "compact_coreml_state",
    "compact_kv_state",
    "create_attention_size_mask",
    "create_causal_mask",
    "create_decode_mask",
    "get_transition_info",
    "records",
    "rotate_keys",
    "transition_coreml_state",
    "transition_kv_state",
    "validate_state_shapes",
]

set_module_of_exports(globals())
show_exports(
    globals(),
    {
        # dataclasses takes a few milliseconds to import
        "._cache_state": (
            "CacheEntry",
            "CacheSpec",
            "CacheState",
        ),
        # coreml imports this package
        "..coreml": ("compact_coreml_state", "transition_coreml_state"),
    },
    ["records"],
)
