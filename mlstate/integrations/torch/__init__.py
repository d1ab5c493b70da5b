"""torch tensors: as KV caches, as state dicts, in files of torch's own; groups of processes.

Importing this lets ``torch.load`` read state dicts that ``torch.save`` stored, with
``weights_only``. `mlstate` imports it by itself where torch was imported first, and whenever
it meets a tensor; a fresh process that does neither before ``torch.load`` imports it by name.
Each file here imports torch inside its functions.
"""

from ..._common.backend import register as _register_backend
from . import _backend
from ._activation_manager import apply_strategy, cuda_memory
from ._apply import PlannedModel, apply_plan
from ._chain import profile_chain
from ._ddp import all_reduce_with
from ._fsdp2 import reduce_scatter_with
from ._group import TorchGroup
from ._operators import OperatorProfile, operator_contexts, profile_operators
from ._optimizer import optimizer_dict, optimizer_state
from ._peak import MemoryUse, measure_peak
from ._pickle import register as _register
from ._pickle import restore_state  # noqa: F401  # torch files name it by this package
from ._recompute_check import check_recompute
from ._state import arrays_of, tensors_of
from ._steps import PlanUse, StepUse, measure_plan

__all__ = [
    "MemoryUse",
    "OperatorProfile",
    "PlanUse",
    "PlannedModel",
    "StepUse",
    "TorchGroup",
    "all_reduce_with",
    "apply_plan",
    "apply_strategy",
    "arrays_of",
    "check_recompute",
    "cuda_memory",
    "measure_peak",
    "measure_plan",
    "operator_contexts",
    "optimizer_dict",
    "optimizer_state",
    "profile_chain",
    "profile_operators",
    "reduce_scatter_with",
    "tensors_of",
]

_register()
_register_backend("torch", _backend)
