"""``mlstate coreai``: ``verify`` of a Core AI model, and which models its actions read."""

from __future__ import annotations

import argparse

from .._common.text import printable
from ..coreai import plan_transition, verify
from ..coreai._specs import read_functions
from ..errors import FormatError
from ._common import Commands, add_command, print_json
from ._states import ModelFormat, add_actions

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate coreai`` and its actions to `commands`.

    Parsed arguments have the function of the action as ``run``.
    """
    path_help = "an .aimodel folder"
    models = ModelFormat("coreai", "model", path_help, read_functions, plan_transition)
    axis_help = "default: the dynamic or the differing dimension"
    actions, plan = add_actions(
        commands, models, "Core AI models", seq_axis=None, default=axis_help
    )
    for which in ("source", "target"):
        plan.add_argument(
            f"--{which}-size", type=int, metavar="TOKENS", help="context size of a dynamic model"
        )
    text = "check that a model is complete and unaltered"
    checked = add_command(actions, "verify", text, run_verify, statuses={1: "damaged"})
    checked.add_argument("model", help=path_help)


def run_verify(arguments: argparse.Namespace) -> int:
    """Verify a model and print its hash, or the problem; return 1 if it is damaged, else 0.

    Raises StoreError if it cannot be read. ``--json`` prints a JSON object instead.
    """
    digest, problem = None, None
    try:
        digest = verify(arguments.model)
    except FormatError as error:
        problem = str(error)
    if arguments.json:
        facts = {"path": arguments.model, "good": problem is None, "sha256": digest}
        return print_json({**facts, "problem": problem}, 0 if problem is None else 1)
    if problem is None:
        print(f"{printable(arguments.model)}: good, SHA-256 {digest}")
    else:
        print(printable(problem))
    return 0 if problem is None else 1
