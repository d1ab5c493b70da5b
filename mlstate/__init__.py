"""The state of machine-learning models: fast, safe, clear.

Arrays are used where they lie, files commit atomically or not at all, and every fast path
is judged by a clear slow one.
"""

from typing import TYPE_CHECKING, Any

from . import coreml, errors, kv, state
from ._version import __version__
from .errors import (
    CapacityError,
    ChecksumError,
    CollectiveError,
    CompatibilityError,
    FormatError,
    MLStateError,
    StoreError,
    TensorNotFoundError,
)
from .kv import compact_kv_state, transition_kv_state
from .state import ModelStateDict, OptimizerStateDict, OptimizerType, StateDict, Stateful
from .threads import get_num_threads, set_num_threads

if TYPE_CHECKING:
    from . import checkpoint, collectives
    from .checkpoint import TieredState, load, load_file, save, save_file, verify

__all__ = [
    "CapacityError",
    "ChecksumError",
    "CollectiveError",
    "CompatibilityError",
    "FormatError",
    "MLStateError",
    "ModelStateDict",
    "OptimizerStateDict",
    "OptimizerType",
    "StateDict",
    "Stateful",
    "StoreError",
    "TensorNotFoundError",
    "TieredState",
    "__version__",
    "checkpoint",
    "collectives",
    "compact_kv_state",
    "coreml",
    "errors",
    "get_num_threads",
    "kv",
    "load",
    "load_file",
    "save",
    "save_file",
    "set_num_threads",
    "state",
    "transition_kv_state",
    "verify",
]

# Loaded when they are first asked for: half of what an import would cost is theirs.
_MODULES = ("activation", "checkpoint", "collectives", "distributed", "fsdp", "plot")
_OF_CHECKPOINT = ("TieredState", "load", "load_file", "save", "save_file", "verify")


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f".{name}", __name__)  # which binds it here, too
    if name in _OF_CHECKPOINT:
        found = getattr(import_module(".checkpoint", __name__), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_OF_CHECKPOINT})


def _meet_torch() -> None:
    """Let torch's files hold state dicts, where torch was imported first."""
    import sys

    if sys.modules.get("torch") is not None:
        from .integrations import torch  # noqa: F401


_meet_torch()
