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
    from ._c_library import get_include, get_library_dir
    from ._info import info
    from .checkpoint import (
        CheckpointManager,
        TieredState,
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
    from .state import (
        ModelStateDict,
        OptimizerStateDict,
        OptimizerType,
        StateDict,
        Stateful,
        load_into,
        rename,
    )
    from .threads import get_num_threads, set_num_threads

__all__ = [
    "CapacityError",
    "CheckpointManager",
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
    "activation",
    "checkpoint",
    "collectives",
    "compact_kv_state",
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
    "get_num_threads",
    "info",
    "inspect",
    "kv",
    "load",
    "load_file",
    "load_into",
    "plot",
    "prompts",
    "rename",
    "reshard",
    "save",
    "save_async",
    "save_file",
    "set_num_threads",
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
    ".checkpoint": (
        "CheckpointManager",
        "TieredState",
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
    ".kv": ("compact_kv_state", "transition_kv_state"),
    ".state": (
        "ModelStateDict",
        "OptimizerStateDict",
        "OptimizerType",
        "StateDict",
        "Stateful",
        "load_into",
        "rename",
    ),
    ".threads": ("get_num_threads", "set_num_threads"),
}
show_exports(globals(), _NAMES, _MODULES)


def _register_with_torch() -> None:
    """Register state dicts with torch's file format if torch was imported before mlstate."""
    import sys

    if sys.modules.get("torch") is not None:
        from ._common.backend import TensorBackend, backend_named

        backend_named("torch", TensorBackend)


_register_with_torch()
