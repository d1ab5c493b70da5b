"""``mlstate coreml`` and ``coreai``: actions ``states`` and ``plan``, tables, JSON, exit status."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..kv._model_states import state_table
from ._common import Commands, Usages, add_actions_of, add_command, print_result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..kv._transition_plan import TransitionPlan


class ModelFormat(NamedTuple):
    """A command for the models of one format."""

    command: str
    model: str  # the word for a model, which names the argument of ``states``
    path_help: str
    # path of a model -> its states by function and name, and the name of the default function
    read: Callable[[str], tuple[Mapping[str, Mapping[str, object]], str | None]]
    plan: Callable[..., TransitionPlan]  # (source, target, tokens in the cache, options by name)


def add_actions(commands: Commands, which: ModelFormat, models: str, options: Usages) -> Commands:
    """Add a command with the actions ``states`` and ``plan`` for the models of one format.

    `models`: word for several. `options`: further arguments of ``plan``, for the format's plan.
    Return the object that adds actions.
    """
    text = f"read the states of {models}, and plan moves between them"
    actions = add_actions_of(commands, which.command, text)
    text = f"list the states that a {which.model} declares, by function"
    states = {which.model: which.path_help}
    add_command(actions, "states", text, partial(_run_states, which), states)
    text = f"show the effect of moving all states from one {which.model} to another"
    usages = {
        "source": f"the {which.model} that holds the states: {which.path_help}",
        "target": f"the {which.model} that is to take them; may be the same",
        "--at TOKENS": {"type": int, "required": True, "help": "tokens in the cache"},
        "--source-function NAME": f"of a multi-function {which.model}",
        "--target-function NAME": f"of a multi-function {which.model}",
        **options,
    }
    statuses = {1: "some states do not fit"}
    add_command(actions, "plan", text, partial(_run_plan, which), usages, statuses)
    return actions


def _state_data(spec: Any) -> dict[str, Any]:
    """Return the description `spec` of a state, of either format, as JSON values."""
    facts = {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype.name}
    axis = {"seq_axis": spec.seq_axis} if hasattr(spec, "seq_axis") else {}
    return {**facts, "bytes": spec.nbytes, **axis}


def _run_states(which: ModelFormat, arguments: argparse.Namespace) -> int:
    """Print the states of each function of the user's model; return 0."""
    functions, default = which.read(getattr(arguments, which.model))
    listed = {
        name: [_state_data(spec) for spec in states.values()] for name, states in functions.items()
    }
    lines = []
    for name, states in functions.items():
        lines.append(f"{name} (default)" if name == default and len(functions) > 1 else name)
        rows = state_table("", states.values()).texts()
        width = max((len(row[0]) for row in rows), default=0)
        for state, shape, dtype, nbytes in rows:
            lines.append(f"  {state:{width}}  {dtype}  {shape}  {nbytes}")
        lines += [] if states else ["  no states"]
    return print_result(arguments, {"default_function": default, "functions": listed}, lines)


def _run_plan(which: ModelFormat, arguments: argparse.Namespace) -> int:
    """Print the plan of a move between two models; return 1 if some states do not fit, else 0."""
    options = {
        action.dest: getattr(arguments, action.dest)
        for action in arguments.parser._actions
        if action.option_strings and action.dest not in ("help", "json", "quiet", "at")
    }
    plan = which.plan(arguments.source, arguments.target, arguments.at, **options)
    return print_result(arguments, plan.to_dict(), str(plan).splitlines(), 0 if plan.fits else 1)
