"""Collective operations across the processes of one job.

`ProcessGroup` is the interface that mlstate requires of a group: any object with these methods
works. `SingleGroup` is a group of one process. `LocalGroup` connects processes or threads of one
host. `mlstate.integrations.torch.TorchGroup` adapts torch.distributed.

All ranks of a group call the same operations in the same order. Arrays are NumPy arrays or
torch tensors; autograd does not record the operations. The input is never modified, unless it is
also passed as ``out``.

Examples
--------
>>> import numpy as np
>>> from mlstate.collectives import ReduceOp, SingleGroup
>>> group = SingleGroup()
>>> group.all_reduce(np.arange(3.0), op=ReduceOp.MEAN)
array([0., 1., 2.])
>>> group.gather_bytes(b"ready")
[b'ready']
"""

from __future__ import annotations

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from ._arguments import ReduceOp
from ._local_group import LocalGroup
from ._process_group import ProcessGroup
from ._single_group import SingleGroup
from ._work import Work

__all__ = ["LocalGroup", "ProcessGroup", "ReduceOp", "SingleGroup", "Work"]

set_module_of_exports(globals())
show_exports(globals())
