"""torch integration: tensors, modules, optimizers, torch's file formats, and process groups.

Importing this package registers state dicts with ``torch.load(weights_only=True)``, so that it
can read them from files of ``torch.save``. `mlstate` imports this package if torch is
already imported, or when it first receives a tensor. In other processes, import it before
``torch.load``. The modules of this package import torch inside functions.
"""

from __future__ import annotations

from ..._common.backend import register as _register_framework
from ..._exports import show_exports
from . import _backend
from ._tensors.pickle import register as _register
from ._tensors.pickle import restore_state  # noqa: F401  # torch files name it by this package

TYPE_CHECKING = False  # importing typing takes milliseconds
if TYPE_CHECKING:
    from . import records
    from ._activation.apply_plan import PlannedModel
    from ._activation.peak_memory import measure_peak
    from ._activation.step_memory import measure_plan
    from ._collectives.group import TorchGroup
    from ._gradients.ddp import all_reduce_with
    from ._gradients.fsdp2 import reduce_scatter_with

__all__ = [
    "PlannedModel",
    "TorchGroup",
    "all_reduce_with",
    "measure_peak",
    "measure_plan",
    "records",
    "reduce_scatter_with",
]

# Loaded when they are first asked for: together they import most of mlstate.
_NAMES = {
    "._activation.apply_plan": ("PlannedModel",),
    "._activation.peak_memory": ("measure_peak",),
    "._activation.step_memory": ("measure_plan",),
    "._collectives.group": ("TorchGroup",),
    "._gradients.ddp": ("all_reduce_with",),
    "._gradients.fsdp2": ("reduce_scatter_with",),
}
show_exports(globals(), _NAMES, ["records"])

_register()
_register_framework("torch", _backend)
