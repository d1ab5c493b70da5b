"""``mlstate coreml``: list the states of Core ML packages, and plan moves between them."""

from __future__ import annotations

from typing import Any

from ..coreml import StateSpecs, plan_transition
from ..coreml._specs import read_functions, warn_of_shapes
from ._common import Commands
from ._states import ModelFormat, add_actions

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``coreml`` and its sub-commands."""
    path_help = "a .mlpackage or .mlmodelc folder, or a .mlmodel file"
    packages = ModelFormat("coreml", "package", path_help, _read, plan_transition)
    add_actions(commands, packages, "Core ML packages", seq_axis=-2, default="default: -2")


def _read(package: str) -> Any:
    functions, default = read_functions(package)
    for name in functions:
        warn_of_shapes(StateSpecs(functions, name), stacklevel=1)
    return functions, default
