"""``mlstate coreml``: which packages and chunks its actions read."""

from __future__ import annotations

import os
from typing import Any

from ..coreml import StateSpecs, plan_transition
from ..coreml._specs import read_functions, warn_of_shapes
from ..coreml.records import TransitionPlan
from ._common import Commands
from ._states import ModelFormat, add_actions

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate coreml`` and its actions to `commands`.

    Parsed arguments have the function of the action as ``run``.
    """
    path_help = (
        "a .mlpackage or .mlmodelc folder, or a .mlmodel file; for a model in chunks: a quoted "
        "pattern such as 'model_chunk_*.mlmodelc', paths with commas between them, or a folder "
        "with ANEMLL's meta.yaml"
    )
    packages = ModelFormat("coreml", "package", path_help, _read_model, _plan_move)
    options = {
        "--seq-axis AXIS": {"type": int, "default": -2, "help": "the sequence; default: -2"},
        "--no-shared-state": {
            "dest": "shared_state",
            "action": "store_false",
            "help": "each chunk has a state of its own",
        },
    }
    add_actions(commands, packages, "Core ML packages", options)


def _as_source(text: str) -> str | list[str]:
    """Return a path or pattern, or the list of paths that commas separate."""
    return text.split(",") if "," in text and not os.path.lexists(text) else text


def _read_model(package: str) -> Any:
    functions, default = read_functions(_as_source(package))
    for name in functions:
        warn_of_shapes(StateSpecs(functions, name))
    return functions, default


def _plan_move(source: str, target: str, position: int, **options: Any) -> TransitionPlan:
    return plan_transition(_as_source(source), _as_source(target), position, **options)
