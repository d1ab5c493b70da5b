"""Helpers of the commands ``coreml`` and ``coreai``: lists of states, and plans."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..kv._model_states import state_row

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from ..kv._transition_plan import TransitionPlan

__all__ = ["add_actions", "add_plan", "add_states", "print_plan", "print_states"]


def add_actions(
    commands: argparse._SubParsersAction[Any], name: str, models: str
) -> argparse._SubParsersAction[Any]:
    """Add a command for models of one format; return the object that adds its actions."""
    help_text = f"read the states of {models}, and plan moves between them"
    parser = commands.add_parser(name, help=help_text, description=help_text)
    return parser.add_subparsers(  # type: ignore[no-any-return]
        title="actions", metavar="ACTION", required=True
    )


def add_states(
    actions: argparse._SubParsersAction[Any],
    model: str,
    help_text: str,
    run: Callable[[argparse.Namespace], int],
) -> None:
    """Add the parser of ``states``; `model` names its argument."""
    text = f"list the states that a {model} declares, by function"
    states = actions.add_parser("states", help=text, description=text)
    states.add_argument(model, help=help_text)
    states.add_argument("--json", action="store_true", help="print JSON")
    states.set_defaults(run=run)


def add_plan(
    actions: argparse._SubParsersAction[Any],
    model: str,
    seq_axis: int | None,
    default: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Add the parser of ``plan`` and return it, for options of one format only."""
    text = f"show the effect of moving all states from one {model} to another"
    plan = actions.add_parser(
        "plan",
        help=text,
        description=text,
        epilog="exit status: 0 all states fit, 1 some do not, 2 wrong usage or unreadable input",
    )
    plan.add_argument("source", help=f"the {model} that holds the states")
    plan.add_argument("target", help=f"the {model} that is to take them; may be the same")
    plan.add_argument("--at", type=int, required=True, metavar="TOKENS", help="tokens in the cache")
    for option in ("--source-function", "--target-function"):
        plan.add_argument(option, metavar="NAME", help=f"of a multi-function {model}")
    plan.add_argument(
        "--seq-axis", type=int, default=seq_axis, metavar="AXIS", help=f"the sequence; {default}"
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(run=run)
    return plan  # type: ignore[no-any-return]


def _state_data(spec: Any) -> dict[str, Any]:
    data = {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype.name,
        "bytes": spec.nbytes,
    }
    if hasattr(spec, "seq_axis"):
        data["seq_axis"] = spec.seq_axis
    return data


def print_states(
    functions: Mapping[str, Mapping[str, Any]],
    default: str | None,
    as_json: bool,
) -> int:
    """Print the states of every function, and return 0."""
    if as_json:
        listed = {
            name: [_state_data(spec) for spec in states.values()]
            for name, states in functions.items()
        }
        print(json.dumps({"default_function": default, "functions": listed}, indent=2))
        return 0
    for name, states in functions.items():
        print(f"{name} (default)" if name == default and len(functions) > 1 else name)
        width = max(map(len, states), default=0)
        for spec in states.values():
            state, shape, dtype, nbytes = state_row(spec)
            print(f"  {state:{width}}  {dtype}  {shape}  {nbytes}")
        if not states:
            print("  no states")
    return 0


def print_plan(plan: TransitionPlan, as_json: bool) -> int:
    """Print the plan; return 1 if the states do not fit."""
    print(json.dumps(plan.to_dict(), indent=2) if as_json else plan)
    return 0 if plan.fits else 1
