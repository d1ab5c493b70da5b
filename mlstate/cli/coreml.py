"""``mlstate coreml``: list the states of Core ML packages, and plan moves between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..coreml import StateSpecs, plan_transition
from ..coreml._specs import read_functions, warn_of_shapes
from ._states import add_actions, add_plan, add_states, print_plan, print_states

if TYPE_CHECKING:
    import argparse

__all__ = ["add"]


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of ``coreml`` and its sub-commands."""
    actions = add_actions(commands, "coreml", "Core ML packages")
    path_help = "a .mlpackage or .mlmodelc folder, or a .mlmodel file"
    add_states(actions, "package", path_help, run_states)
    add_plan(actions, "package", -2, "default: -2", run_plan)


def run_states(arguments: argparse.Namespace) -> int:
    """Print the states of every function."""
    functions, default = read_functions(arguments.package)
    for name in functions:
        warn_of_shapes(StateSpecs(functions, name), stacklevel=1)
    return print_states(functions, default, arguments.json)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan; return 1 if the states do not fit."""
    plan = plan_transition(
        arguments.source,
        arguments.target,
        arguments.at,
        source_function=arguments.source_function,
        target_function=arguments.target_function,
        seq_axis=arguments.seq_axis,
    )
    return print_plan(plan, arguments.json)
