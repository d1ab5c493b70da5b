"""``mlstate coreml`` and ``coreai``: actions ``states`` and ``plan``, tables, JSON, exit status."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.text import printable
from ..kv._model_states import state_row
from ._common import Commands, add_actions_of, add_command, print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..kv._transition_plan import TransitionPlan

# keywords of the formats' plans: `shared_state` of Core ML, the sizes of dynamic models only
_PLAN_OPTIONS = (
    "source_function",
    "target_function",
    "seq_axis",
    "shared_state",
    "source_size",
    "target_size",
)


class ModelFormat(NamedTuple):
    """A command for the models of one format."""

    command: str
    model: str  # the word for a model, which names the argument of ``states``
    path_help: str
    # path of a model -> its states by function and name, and the name of the default function
    read: Callable[[str], tuple[Mapping[str, Mapping[str, object]], str | None]]
    plan: Callable[..., TransitionPlan]  # (source, target, tokens in the cache, options by name)


def add_actions(
    commands: Commands,
    which: ModelFormat,
    models: str,
    *,
    seq_axis: int | None,
    default: str,
) -> tuple[Commands, argparse.ArgumentParser]:
    """Add a command with the actions ``states`` and ``plan`` for the models of one format.

    `models`: word for several. `seq_axis`: default of ``--seq-axis``, and `default` its help text.
    Return the object that adds further actions, and the parser of ``plan`` for further options;
    those in `_PLAN_OPTIONS` become arguments of the format's plan.
    """
    text = f"read the states of {models}, and plan moves between them"
    actions = add_actions_of(commands, which.command, text)
    _add_states(actions, which)
    return actions, _add_plan(actions, which, seq_axis, default)


def _add_states(actions: Commands, which: ModelFormat) -> None:
    """Add the action ``states`` for the models of one format."""
    text = f"list the states that a {which.model} declares, by function"
    states = add_command(actions, "states", text, partial(_run_states, which))
    states.add_argument(which.model, help=which.path_help)


def _add_plan(
    actions: Commands,
    which: ModelFormat,
    seq_axis: int | None,
    default: str,
) -> argparse.ArgumentParser:
    """Add the action ``plan`` for the models of one format, and return its parser.

    `seq_axis`: default of ``--seq-axis``; `default`: help text about it.
    """
    text = f"show the effect of moving all states from one {which.model} to another"
    run = partial(_run_plan, which)
    plan = add_command(actions, "plan", text, run, statuses={1: "some states do not fit"})
    source_help = f"the {which.model} that holds the states: {which.path_help}"
    plan.add_argument("source", help=source_help)
    plan.add_argument("target", help=f"the {which.model} that is to take them; may be the same")
    plan.add_argument("--at", type=int, required=True, metavar="TOKENS", help="tokens in the cache")
    for option in ("--source-function", "--target-function"):
        plan.add_argument(option, metavar="NAME", help=f"of a multi-function {which.model}")
    plan.add_argument(
        "--seq-axis", type=int, default=seq_axis, metavar="AXIS", help=f"the sequence; {default}"
    )
    return plan


def _state_data(spec: Any) -> dict[str, Any]:
    """Return the description `spec` of a state, of either format, as JSON values."""
    facts = {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype.name}
    axis = {"seq_axis": spec.seq_axis} if hasattr(spec, "seq_axis") else {}
    return {**facts, "bytes": spec.nbytes, **axis}


def _run_states(which: ModelFormat, arguments: argparse.Namespace) -> int:
    """Print the states of each function of the user's model; return 0."""
    functions, default = which.read(getattr(arguments, which.model))
    if arguments.json:
        listed = {
            name: [_state_data(spec) for spec in states.values()]
            for name, states in functions.items()
        }
        return print_json({"default_function": default, "functions": listed})
    for name, states in functions.items():
        label = printable(name)
        print(f"{label} (default)" if name == default and len(functions) > 1 else label)
        rows = [tuple(map(printable, state_row(spec))) for spec in states.values()]
        width = max((len(row[0]) for row in rows), default=0)
        for state, shape, dtype, nbytes in rows:
            print(f"  {state:{width}}  {dtype}  {shape}  {nbytes}")
        if not states:
            print("  no states")
    return 0


def _run_plan(which: ModelFormat, arguments: argparse.Namespace) -> int:
    """Print the plan of a move between two models; return 1 if some states do not fit, else 0."""
    values = vars(arguments)
    options = {name: values[name] for name in _PLAN_OPTIONS if name in values}
    plan = which.plan(arguments.source, arguments.target, arguments.at, **options)
    status = 0 if plan.fits else 1
    if arguments.json:
        return print_json(plan.to_dict(), status)
    print(plan)
    return status
