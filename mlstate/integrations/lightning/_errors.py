"""Errors and warnings where Lightning passes over `MLStateCheckpointIO`; they name the way out.

Lightning calls `add_no_callbacks` when it makes a Trainer or a Fabric, in any process: the entry
points of the package name it. So this module imports nothing heavy.
"""

from __future__ import annotations

import os
import sys
from functools import wraps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Lightning's modules that open a checkpoint as a file; there are two names of its packages.
_STRATEGIES = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")
_READERS = (
    "lightning.pytorch.core.saving",
    "lightning.fabric.plugins.io.torch_io",
    "pytorch_lightning.core.saving",
    "lightning_fabric.plugins.io.torch_io",
)


def add_no_callbacks() -> list[object]:
    """Name `mlstate convert` in Lightning's errors; return an empty list of callbacks.

    Lightning expects the callbacks to add from this entry point.
    """
    name_conversion_in_errors()
    return []


def name_conversion_in_errors() -> None:
    """Name `mlstate convert` in errors of readers without the plugin, in this process.

    Lightning offers no hook there: its reader opens the path as a file. Only the text of the error
    changes, and only for folders of the plugin. Readers that are not imported yet are left out.
    Strategies that store checkpoints themselves, such as ModelParallelStrategy, warn.
    """
    for name in _STRATEGIES:
        for cls in vars(sys.modules.get(name) or object).values():
            save = vars(cls).get("save_checkpoint") if isinstance(cls, type) else None
            if hasattr(cls, "load_checkpoint") and save and not hasattr(save, "warns"):
                cls.save_checkpoint = _with_warning(save)
    for name in _READERS:
        module = sys.modules.get(name)
        load = getattr(module, "pl_load", None)
        if load is not None and not hasattr(load, "names_conversion"):
            module.pl_load = _with_conversion(load)  # type: ignore[union-attr]


def is_checkpoint(folder: str) -> bool:
    """Return whether a folder has the manifest of a checkpoint."""
    from ...checkpoint._folder.names import MANIFEST

    return os.path.isfile(os.path.join(folder, MANIFEST))


def _with_warning(save: Callable[..., None]) -> Callable[..., None]:
    """Return a strategy's method `save` with a warning if it passes over the plugin.

    Such a strategy replaces the methods of Lightning's base class.
    """

    @wraps(save)
    def save_checkpoint(self: Any, *args: Any, **keywords: Any) -> None:
        """Save as Lightning does; warn if the plugin does not read or did not write the result."""
        plugin: Any = getattr(self, "_checkpoint_io", None)
        before = getattr(plugin, "_saves", None)
        save(self, *args, **keywords)
        reads_itself = "load_checkpoint" in vars(type(self))
        if plugin is None or before is None or not (reads_itself and self.is_global_zero):
            return
        from ..._common.caller import find_caller

        name = type(self).__name__
        find_caller().warn(
            f"{name} stores the parts of each rank itself, and not through MLStateCheckpointIO: "
            "leave the plugin out, or save with mlstate.save(path, module, optimizer, group=)"
            if plugin._saves == before
            else f"{name} does not read through MLStateCheckpointIO: to resume, write the file "
            "that it reads by mlstate convert FOLDER OUT.ckpt --to lightning"
        )

    save_checkpoint.warns = True  # type: ignore[attr-defined]
    return save_checkpoint


def _with_conversion(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return Lightning's reader `load`, with a remedy in its error for a folder of the plugin."""

    @wraps(load)
    def load_file(path: Any, *args: Any, **keywords: Any) -> Any:
        """Load a file as Lightning does; name the remedy if `path` is a folder of the plugin."""
        try:
            return load(path, *args, **keywords)
        except IsADirectoryError as error:
            if not is_checkpoint(os.fsdecode(path)):
                raise
            text = (
                "it is a folder of MLStateCheckpointIO, which only a Trainer with this plugin "
                "reads; mlstate convert FOLDER OUT.ckpt --to lightning writes the file"
            )
            raise IsADirectoryError(error.errno, text, os.fspath(path)) from error

    load_file.names_conversion = True  # type: ignore[attr-defined]
    return load_file
