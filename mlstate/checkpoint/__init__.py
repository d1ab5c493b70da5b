"""Checkpoints: saving, loading and verifying state on disk.

`save` writes the state of a model and its optimizer to a folder and commits it atomically. Each
shard of a tensor has a checksum, a version and its own file; small shards share files. `load`
reads all or any part of a checkpoint, in any layout. `verify` finds every changed byte.
`CheckpointManager` manages the steps of a run. `save_file` and `load_file` write and read a
single safetensors file.

Examples
--------
>>> import tempfile, numpy as np, mlstate
>>> folder = tempfile.mkdtemp()
>>> weights = {"layer.weight": np.ones((4, 2), np.float32)}
>>> checkpoint = mlstate.save(folder + "/ckpt", model=weights, metadata={"run": "a"})
>>> mlstate.load(folder + "/ckpt").model["layer.weight"].shape
(4, 2)
>>> mlstate.save_file(weights, folder + "/weights.safetensors")
>>> sorted(mlstate.load_file(folder + "/weights.safetensors"))
['layer.weight']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from .._safetensors import load_file, load_metadata, save_file
from .._sharding.layout import Layout, Shard, Tier
from ._checkpoint.checkpoint import Checkpoint, inspect
from ._load.load import load
from ._loaded_state import LoadedState
from ._report import VerifyReport
from ._verify import verify

if TYPE_CHECKING:
    from . import records
    from ._checkpoint.export_async import export_huggingface_async
    from ._checkpoint.save import save
    from ._checkpoint.save_async import SaveHandle, save_async
    from ._checksum import checksum
    from ._convert.reshard import reshard
    from ._huggingface.export import export_huggingface
    from ._load.plan_load import plan_load
    from ._manager.manager import CheckpointManager
    from ._manager.prune import prune
    from ._save.plan_save import plan_save
    from ._save.staging import Staging
    from ._tiers.tiered_state import TieredState
    from ._tiers.unit_handle import TieredUnit

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "Layout",
    "LoadedState",
    "SaveHandle",
    "Shard",
    "Staging",
    "Tier",
    "TieredState",
    "TieredUnit",
    "VerifyReport",
    "checksum",
    "export_huggingface",
    "export_huggingface_async",
    "inspect",
    "load",
    "load_file",
    "load_metadata",
    "plan_load",
    "plan_save",
    "prune",
    "records",
    "reshard",
    "save",
    "save_async",
    "save_file",
    "verify",
]

set_module_of_exports(globals())
show_exports(
    globals(),
    {
        # a load needs none of them
        "._checkpoint.export_async": ("export_huggingface_async",),
        "._checkpoint.save": ("save",),
        "._checkpoint.save_async": ("SaveHandle", "save_async"),
        "._checksum": ("checksum",),
        "._convert.reshard": ("reshard",),
        "._huggingface.export": ("export_huggingface",),
        "._load.plan_load": ("plan_load",),
        "._manager.manager": ("CheckpointManager",),
        "._manager.prune": ("prune",),
        "._save.plan_save": ("plan_save",),
        "._save.staging": ("Staging",),
        "._tiers.tiered_state": ("TieredState",),
        "._tiers.unit_handle": ("TieredUnit",),
    },
    ["records"],
)
