"""The torch backend: this module's names implement `mlstate._common.backend.Backend`.

Each operation is imported on first use, because most of them load subsystems that a program may
not need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# ruff: noqa: F401
# mypy: implicit-reexport
if TYPE_CHECKING:  # so that mypy compares these names with the protocol
    from ._activation.apply_plan import apply_plan
    from ._activation.operators import operator_contexts
    from ._activation.profile_chain import profile_chain
    from ._activation.recompute_check import check_recompute
    from ._activation.strategies import apply_strategy, cuda_memory
    from ._checkpoint.dtensor_shards import (
        module_state,
        needs_all_ranks,
        optimizer_parts,
        part_of,
        tied_names,
    )
    from ._checkpoint.files import (
        read_dcp,
        read_pt,
        read_tree,
        write_dcp,
        write_pt,
        write_tree,
    )
    from ._checkpoint.load_targets import (
        fill_module,
        fill_optimizer,
        own_load,
        saved_module,
        saved_optimizer,
    )
    from ._checkpoint.optimizer import optimizer_dict, optimizer_state
    from ._checkpoint.optimizer_contract import is_plain_optimizer
    from ._checkpoint.tiers import (
        accelerator,
        give_memory,
        has_given_away,
        in_memory,
        is_given_away,
        on_device,
        optimizer_groups,
        tensors_of_optimizer,
    )
    from ._collectives.wrapped_groups import wrapped_group
    from ._gradients.accumulate import (
        add_gradient,
        copy_of,
        item_bytes,
        norm_partial,
        readable,
        tensor_in,
    )
    from ._gradients.backward import (
        hook_module,
        parameters_of,
        reduce_on_device,
        why_not_reduced,
    )
    from ._tensors.dtypes import dtype_of
    from ._tensors.kv import move_kv
    from ._tensors.memory import note_written, write_into_tensor
    from ._tensors.pickle import reduce_state
    from ._tensors.state import (
        arrays_of,
        device_of,
        refuse_unstorable,
        tensors_of,
        why_not_plain,
    )

# fmt: off
_NAMES = {
    "_collectives.wrapped_groups": ("wrapped_group",),
    "_activation.strategies": ("apply_strategy", "cuda_memory"),
    "_activation.apply_plan": ("apply_plan",),
    "_gradients.backward": (
        "hook_module", "parameters_of", "reduce_on_device", "why_not_reduced",
    ),
    "_activation.profile_chain": ("profile_chain",),
    "_checkpoint.files": (
        "read_dcp", "read_pt", "read_tree", "write_dcp", "write_pt", "write_tree",
    ),
    "_tensors.dtypes": ("dtype_of",),
    "_tensors.kv": ("move_kv",),
    "_tensors.memory": ("note_written", "write_into_tensor"),
    "_activation.operators": ("operator_contexts",),
    "_checkpoint.optimizer": ("optimizer_dict", "optimizer_state"),
    "_checkpoint.optimizer_contract": ("is_plain_optimizer",),
    "_tensors.pickle": ("reduce_state",),
    "_activation.recompute_check": ("check_recompute",),
    "_gradients.accumulate": (
        "add_gradient", "copy_of", "item_bytes", "norm_partial", "readable", "tensor_in",
    ),
    "_checkpoint.dtensor_shards": (
        "module_state", "needs_all_ranks", "optimizer_parts", "part_of", "tied_names",
    ),
    "_tensors.state": (
        "arrays_of", "device_of", "refuse_unstorable", "tensors_of", "why_not_plain",
    ),
    "_checkpoint.tiers": (
        "accelerator", "give_memory", "has_given_away", "in_memory", "is_given_away",
        "on_device", "optimizer_groups", "tensors_of_optimizer",
    ),
    "_checkpoint.load_targets": (
        "fill_module", "fill_optimizer", "own_load", "saved_module", "saved_optimizer",
    ),
}
# fmt: on
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f".{_HOMES[name]}", __package__), name)
    globals()[name] = found
    return found


def is_module(value: object) -> bool:
    """Return whether a value is a torch module."""
    import torch

    return isinstance(value, torch.nn.Module)


def is_optimizer(value: object) -> bool:
    """Return whether a value is a torch optimizer."""
    import torch

    return isinstance(value, torch.optim.Optimizer)


def is_mine(value: object) -> bool:
    """Return whether a value is a torch tensor, module or optimizer."""
    import torch

    return isinstance(value, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer))
