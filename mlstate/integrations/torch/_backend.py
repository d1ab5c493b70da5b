"""The torch integration as a `Framework`, and the modules that implement Protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING

# The modules are imported on first use, because most load subsystems that a program may not need.
BACKENDS: Mapping[str, str] = {
    protocol: f"{__package__}.{module}"
    for protocol, module in {
        "ActivationBackend": "_activation",
        "CheckpointBackend": "_checkpoint.load_targets",
        "DcpBackend": "_checkpoint.dcp",
        "DeltaBackend": "_tensors.delta",
        "GradientBackend": "_gradients",
        "GroupBackend": "_collectives.wrapped_groups",
        "KVBackend": "_tensors.kv",
        "PtBackend": "_checkpoint.pt_file",
        "ShardBackend": "_checkpoint.dtensor_shards",
        "StateBackend": "_checkpoint.states",
        "TensorBackend": "_tensors",
        "TierBackend": "_checkpoint.tiers",
    }.items()
}

if TYPE_CHECKING:  # mypy compares each module with its Protocol
    from collections.abc import Mapping

    from ..._common.backend import TensorBackend
    from ..._sharding.backend import ShardBackend
    from ...activation._backend import ActivationBackend
    from ...checkpoint._backend import CheckpointBackend
    from ...checkpoint._files.backend import DcpBackend, PtBackend
    from ...checkpoint._tiers.backend import TierBackend
    from ...collectives._backend import GroupBackend
    from ...follow._delta import DeltaBackend
    from ...fsdp._backend import GradientBackend
    from ...kv._move import KVBackend
    from ...state._backend import StateBackend
    from . import _activation, _gradients, _tensors
    from ._checkpoint import dcp, dtensor_shards, load_targets, pt_file, states, tiers
    from ._collectives import wrapped_groups
    from ._tensors import delta as deltas
    from ._tensors import kv

    activation: ActivationBackend = _activation
    checkpoint: CheckpointBackend = load_targets
    delta: DeltaBackend = deltas
    directory: DcpBackend = dcp
    file: PtBackend = pt_file
    gradient: GradientBackend = _gradients
    group: GroupBackend = wrapped_groups
    cache: KVBackend = kv
    shard: ShardBackend = dtensor_shards
    state: StateBackend = states
    tensor: TensorBackend = _tensors
    tier: TierBackend = tiers


def is_module(value: object) -> bool:
    """Return whether a value is a torch module."""
    import torch

    return isinstance(value, torch.nn.Module)


def is_optimizer(value: object) -> bool:
    """Return whether a value is a torch optimizer."""
    import torch

    return isinstance(value, torch.optim.Optimizer)


def recognizes(value: object) -> bool:
    """Return whether a value is a torch tensor, module or optimizer."""
    import torch

    return isinstance(value, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer))
