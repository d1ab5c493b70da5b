"""`group=` that is a torch.distributed group or a device mesh: its one `TorchGroup`."""

from __future__ import annotations

import atexit
import sys
from threading import Lock

from .group import TorchGroup

# The wrapper of each group, until the group is destroyed: a wrapper knows whether an operation
# failed, after which the group is unusable.
_wrapped: dict[object, TorchGroup] = {}
_lock = Lock()
atexit.register(_wrapped.clear)


def wrapped_group(value: object) -> TorchGroup | None:
    """Return the one `TorchGroup` of a torch group or a mesh of one dimension; None for others.

    Repeated calls return the same object, which knows of failures. The group is borrowed: it is
    neither closed nor destroyed. Raises ValueError for a mesh of several dimensions, and for a
    group that was destroyed or that this process is not in.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return None
    meshes = sys.modules.get("torch.distributed.device_mesh")
    if meshes is not None and isinstance(value, meshes.DeviceMesh):
        if value.ndim != 1:
            names = value.mesh_dim_names or tuple(range(value.ndim))
            raise ValueError(
                f"group is a device mesh of {value.ndim} dimensions, {names}: pass the group of "
                "one of them, mesh.get_group(name)"
            )
        value = value.get_group()
    if not isinstance(value, dist.ProcessGroup):
        return None
    alive = dist.distributed_c10d._world.pg_map
    if value not in alive:
        raise ValueError(
            "group is a group of torch.distributed that was destroyed, or was not made by "
            "torch.distributed.new_group: pass one that exists"
        )
    with _lock:
        for group in [group for group in _wrapped if group not in alive]:
            del _wrapped[group]
        if value not in _wrapped:
            _wrapped[value] = TorchGroup(value)
        return _wrapped[value]
