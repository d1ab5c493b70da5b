"""Gradients of models that are sharded over ranks: scatter, accumulate, clip, verify.

`FSDPBackwardHook` reduces the gradients of a torch module, or of your own training loop, during
the backward pass. Each rank keeps its part. Sums are computed in rank order, so their bits do not
depend on the engine, the bucket size, the number of threads or the grouping of calls.

Examples
--------
>>> import torch
>>> from mlstate.collectives import SingleGroup
>>> from mlstate.fsdp import FSDP, FSDPBackwardHook, sharding_units
>>> model = torch.nn.Linear(3, 2)
>>> hook = FSDPBackwardHook(FSDP(SingleGroup(), op="mean"))
>>> units = sharding_units(model, SingleGroup())
>>> hook.register_hooks(model, units)
>>> model(torch.ones(4, 3)).sum().backward()
>>> units["bias"].local_gradient
tensor([4., 4.])
"""

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from . import records
from ._accumulator import GradientAccumulator
from ._backward_hook import FSDPBackwardHook
from ._clip_grad_norm import clip_grad_norm
from ._config import FSDP
from ._reduce_scatter import ReduceScatterOperation
from ._sharding_unit import FSDPShardingUnit, sharding_units
from ._spot_check import SpotCheck

__all__ = [
    "FSDP",
    "FSDPBackwardHook",
    "FSDPShardingUnit",
    "GradientAccumulator",
    "ReduceScatterOperation",
    "SpotCheck",
    "clip_grad_norm",
    "records",
    "sharding_units",
]

set_module_of_exports(globals())
show_exports(globals())
