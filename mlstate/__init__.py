"""Store, compare and move the state of machine-learning models.

Arrays are used in place, without copies. Files are committed atomically. Every fast path is tested
against a simple reference implementation.
"""

from __future__ import annotations

from importlib.machinery import PathFinder

from ._exports import show_exports
from ._version import __version__

if PathFinder.find_spec(f"{__name__}._core", __path__) is None:
    raise ImportError(
        f"{__path__[0]} has no compiled module for this Python: you are importing mlstate from "
        "its source folder. Leave the folder to import the mlstate that is installed, or compile "
        "the module here with `pip install -e .` (`make dev` does so in .venv)",
        name="mlstate._core",
    )

TYPE_CHECKING = False  # importing typing takes milliseconds
if TYPE_CHECKING:
    from . import (
        activation,
        checkpoint,
        collectives,
        coreai,
        coreml,
        distributed,
        errors,
        follow,
        fsdp,
        kv,
        plot,
        prompts,
        state,
        threads,
    )
    from . import testing as testing
    from ._c_library import get_include, get_library_dir
    from ._info import info
    from .activation import Chain, plan
    from .checkpoint import (
        CheckpointManager,
        export_huggingface,
        inspect,
        load,
        load_file,
        reshard,
        save,
        save_async,
        save_file,
        verify,
    )
    from .checkpoint._compare.diff import diff
    from .checkpoint._compare.digest import digest
    from .checkpoint._convert.convert import convert
    from .errors import CapacityError as CapacityError
    from .errors import ChecksumError as ChecksumError
    from .errors import CollectiveError as CollectiveError
    from .errors import CompatibilityError as CompatibilityError
    from .errors import FormatError as FormatError
    from .errors import MLStateError
    from .errors import StoreError as StoreError
    from .errors import TensorNotFoundError as TensorNotFoundError
    from .follow import Follower, Publisher
    from .kv import KVState, compact_kv_state, transition_kv_state
    from .prompts import PromptStore
    from .state import ModelStateDict as ModelStateDict
    from .state import OptimizerStateDict as OptimizerStateDict
    from .state import OptimizerType as OptimizerType
    from .state import StateDict, load_into, rename
    from .state import Stateful as Stateful
    from .threads import set_num_threads as set_num_threads

# Other names that can be imported from here are not listed: their packages document them.
__all__ = [
    "Chain",
    "CheckpointManager",
    "Follower",
    "KVState",
    "MLStateError",
    "PromptStore",
    "Publisher",
    "StateDict",
    "__version__",
    "activation",
    "checkpoint",
    "collectives",
    "compact_kv_state",
    "convert",
    "coreai",
    "coreml",
    "diff",
    "digest",
    "distributed",
    "errors",
    "export_huggingface",
    "follow",
    "fsdp",
    "get_include",
    "get_library_dir",
    "info",
    "inspect",
    "kv",
    "load",
    "load_file",
    "load_into",
    "plan",
    "plot",
    "prompts",
    "rename",
    "reshard",
    "save",
    "save_async",
    "save_file",
    "state",
    "threads",
    "transition_kv_state",
    "verify",
]

# Imported on first use: `import mlstate` imports neither NumPy nor the C extension.
_MODULES = (
    "activation",
    "checkpoint",
    "collectives",
    "coreai",
    "coreml",
    "distributed",
    "errors",
    "follow",
    "fsdp",
    "kv",
    "plot",
    "prompts",
    "state",
    "threads",
)
_NAMES = {
    "._c_library": ("get_include", "get_library_dir"),
    "._info": ("info",),
    "._safetensors": ("load_file", "save_file"),  # 2 ms with torch; all of checkpoint 65
    ".activation": ("Chain", "plan"),
    ".checkpoint": (
        "CheckpointManager",
        "export_huggingface",
        "inspect",
        "load",
        "reshard",
        "save",
        "save_async",
        "verify",
    ),
    ".checkpoint._compare.diff": ("diff",),
    ".checkpoint._compare.digest": ("digest",),
    ".checkpoint._convert.convert": ("convert",),
    ".errors": (
        "CapacityError",
        "ChecksumError",
        "CollectiveError",
        "CompatibilityError",
        "FormatError",
        "MLStateError",
        "StoreError",
        "TensorNotFoundError",
    ),
    ".follow": ("Follower", "Publisher"),
    ".kv": ("KVState", "compact_kv_state", "transition_kv_state"),
    ".prompts": ("PromptStore",),
    ".state": (
        "ModelStateDict",
        "OptimizerStateDict",
        "OptimizerType",
        "StateDict",
        "Stateful",
        "load_into",
        "rename",
    ),
    ".threads": ("set_num_threads",),
}
show_exports(globals(), _NAMES, (*_MODULES, "testing"))


def _register_with_torch() -> None:
    """Register state dicts with torch's file format if torch was imported before mlstate."""
    import sys

    if sys.modules.get("torch") is not None:
        from ._common.backend import TensorBackend, backend_named

        backend_named("torch", TensorBackend)


_register_with_torch()
