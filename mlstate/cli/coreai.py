"""``mlstate coreai``: verify Core AI models, list their states, and plan moves between them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..coreai import plan_transition, verify
from ..coreai._specs import read_functions
from ..errors import FormatError
from ._common import add_command, path_text
from ._states import add_actions, add_plan, add_states, print_plan, print_states

if TYPE_CHECKING:
    import argparse

__all__ = ["add"]


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of ``coreai`` and its sub-commands."""
    actions = add_actions(commands, "coreai", "Core AI models")
    add_states(actions, "model", "an .aimodel folder", run_states)
    plan = add_plan(
        actions, "model", None, "default: the dynamic or the differing dimension", run_plan
    )
    for which in ("source", "target"):
        plan.add_argument(
            f"--{which}-size", type=int, metavar="TOKENS", help="context size of a dynamic model"
        )
    text = "check that a model is complete and unaltered"
    checked = add_command(actions, "verify", text, "damaged")
    checked.add_argument("model", help="an .aimodel folder")
    checked.set_defaults(run=run_verify)


def run_states(arguments: argparse.Namespace) -> int:
    """Print the states of every function."""
    functions, default = read_functions(arguments.model)
    return print_states(functions, default, arguments.json)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan; return 1 if the states do not fit."""
    plan = plan_transition(
        arguments.source,
        arguments.target,
        arguments.at,
        source_size=arguments.source_size,
        target_size=arguments.target_size,
        source_function=arguments.source_function,
        target_function=arguments.target_function,
        seq_axis=arguments.seq_axis,
    )
    return print_plan(plan, arguments.json)


def run_verify(arguments: argparse.Namespace) -> int:
    """Print the hash of the model; return 1 if the model is damaged."""
    digest, problem = None, None
    try:
        digest = verify(arguments.model)
    except FormatError as error:
        problem = str(error)
    if arguments.json:
        facts = {
            "path": arguments.model,
            "good": problem is None,
            "sha256": digest,
            "problem": problem,
        }
        print(json.dumps(facts, indent=2))
    elif problem is None:
        print(f"{path_text(arguments.model)}: good, SHA-256 {digest}")
    else:
        print(problem)
    return 0 if problem is None else 1
