"""Prefixes that wrappers add to a module's names (``module.``, ``_orig_mod.``): removed."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ....errors import CompatibilityError

if TYPE_CHECKING:
    import torch

# Wrappers: the torch module and name of the class, and the attribute of the wrapped module.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


def wrapped_attribute(module: torch.nn.Module) -> str:
    """Return the attribute with a wrapper's module; "" for another module."""
    cls: object = type(module)
    return _attribute_of(cls)


@lru_cache(256)
def _attribute_of(cls: type) -> str:
    """Return the attribute that has the wrapped module in a wrapper of class `cls`, or ""."""
    for path, kind, name in _WRAPPERS:
        loaded = sys.modules.get(path)  # a program with such a wrapper has imported it
        if loaded is not None and issubclass(cls, getattr(loaded, kind)):
            return name
    return ""


def unwrapped_name(module: torch.nn.Module, name: str) -> str:
    """Return the name of a parameter, buffer or submodule without the parts that wrappers add.

    A wrapper may have removed its part from the name already. A user's submodule called
    ``module`` keeps its name.
    """
    current: Any = module
    parts_kept = []
    for part in name.split("."):
        while current is not None and (inner := wrapped_attribute(current)):
            current = current._modules[inner]
            if part == inner:
                break
        else:
            parts_kept.append(part)
            is_child = (
                current is not None and part in current._modules
            )  # scripted modules have no get()
            current = current._modules[part] if is_child else None
    return ".".join(parts_kept)


def by_name(module: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` by names without the parts that wrappers of modules add.

    Raises CompatibilityError if two names become equal.
    """
    named = {unwrapped_name(module, name): value for name, value in state.items()}
    if len(named) != len(state):
        raise CompatibilityError(
            f"two names of {type(module).__name__} become one without the prefixes of wrappers"
        )
    return named
