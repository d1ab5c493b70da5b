"""KV-cache transitions: expand, compact, grow in place, roll, mask, decide.

The functions of ``anemll.utils.state_transition`` are available under the same names, so a script
can switch by changing one import line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._common.set_module import set_module_of_exports
from ._combined_strategy import CombinedStrategy
from ._context_ladder import ContextLadder, LadderStep
from ._kv_state import KVState
from ._manager import StateTransitionManager
from ._mask import create_attention_size_mask, create_causal_mask, create_decode_mask
from ._rolling import RollingKVState
from ._rotate_keys import rotate_keys
from ._transition import (
    compact_kv_state,
    get_transition_info,
    transition_kv_state,
    validate_state_shapes,
)

if TYPE_CHECKING:
    from ..coreml import compact_coreml_state, transition_coreml_state
    from ._cache_spec import CacheEntry, CacheSpec
    from ._cache_state import CacheState
    from ._snapshot import Snapshot

__all__ = [
    "CacheEntry",
    "CacheSpec",
    "CacheState",
    "CombinedStrategy",
    "ContextLadder",
    "KVState",
    "LadderStep",
    "RollingKVState",
    "Snapshot",
    "StateTransitionManager",
    "compact_coreml_state",
    "compact_kv_state",
    "create_attention_size_mask",
    "create_causal_mask",
    "create_decode_mask",
    "get_transition_info",
    "rotate_keys",
    "transition_coreml_state",
    "transition_kv_state",
    "validate_state_shapes",
]

set_module_of_exports(globals())

_OF_CACHES = ("CacheEntry", "CacheSpec", "CacheState", "Snapshot")
_OF_COREML = ("compact_coreml_state", "transition_coreml_state")


def __getattr__(name: str) -> Any:
    home: Any
    if name in _OF_CACHES:  # dataclasses takes a few milliseconds to import
        from . import _cache_state as home
    elif name in _OF_COREML:  # coreml imports this package
        from .. import coreml as home
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(home, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_CACHES, *_OF_COREML})
