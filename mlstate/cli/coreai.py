"""``mlstate coreai``: ``verify`` of a Core AI model, and which models its actions read."""

from __future__ import annotations

import argparse

from ..coreai import plan_transition, verify
from ..coreai._specs import read_functions
from ..errors import FormatError
from ._common import Commands, add_command, print_result
from ._states import ModelFormat, add_actions

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate coreai`` and its actions to `commands`.

    Parsed arguments have the function of the action as ``run``.
    """
    path_help = "an .aimodel folder"
    models = ModelFormat("coreai", "model", path_help, read_functions, plan_transition)
    axis = "the sequence; default: the dynamic or the differing dimension"
    size = {"type": int, "help": "context size of a dynamic model"}
    options = {
        "--seq-axis AXIS": {"type": int, "help": axis},
        "--source-size TOKENS": size,
        "--target-size TOKENS": size,
    }
    actions = add_actions(commands, models, "Core AI models", options)
    text = "check that a model is complete and unaltered"
    usages = {"model": path_help}
    add_command(actions, "verify", text, run_verify, usages, {1: "damaged"})


def run_verify(arguments: argparse.Namespace) -> int:
    """Verify a model and print its hash, or the problem; return 1 if it is damaged, else 0.

    Raises StoreError if it cannot be read. ``--json`` prints a JSON object instead.
    """
    digest, problem = None, None
    try:
        digest = verify(arguments.model)
    except FormatError as error:
        problem = str(error)
    status = 0 if problem is None else 1
    facts = {"path": arguments.model, "good": not status, "sha256": digest, "problem": problem}
    good = f"{arguments.model}: good, SHA-256 {digest}"
    return print_result(arguments, facts, [problem or good], status)
