"""The state of machine-learning models: fast, safe, clear.

Arrays are used where they lie, files commit atomically or not at all, and every fast path
is judged by a clear slow one.
"""

from . import checkpoint, collectives, coreml, errors, kv, state
from ._version import __version__
from .checkpoint import load, load_file, save, save_file, verify
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


def _meet_torch() -> None:
    """Let torch's files hold state dicts, where torch was imported first."""
    import sys

    if sys.modules.get("torch") is not None:
        from .integrations import torch  # noqa: F401


_meet_torch()
