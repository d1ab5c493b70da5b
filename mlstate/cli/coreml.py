"""``mlstate coreml``: list the states of Core ML packages, and plan moves between them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .._common.text import bytes_text
from ..coreml import StateSpecs, plan_transition
from ..coreml._specs import read_functions, warn_of_shapes
from ..kv._model_states import shape_text

if TYPE_CHECKING:
    import argparse

    from ..coreml import StateSpec

__all__ = ["add"]


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of ``coreml`` and its sub-commands."""
    help_text = "read the states of Core ML packages, and plan moves between them"
    parser = commands.add_parser("coreml", help=help_text, description=help_text)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    help_text = "list the states that a package declares, by function"
    states = actions.add_parser("states", help=help_text, description=help_text)
    states.add_argument("package", help="a .mlpackage or .mlmodelc folder, or a .mlmodel file")
    states.add_argument("--json", action="store_true", help="print JSON")
    states.set_defaults(run=run_states)

    help_text = "show the effect of moving all states from one package to another"
    plan = actions.add_parser(
        "plan",
        help=help_text,
        description=help_text,
        epilog="exit status: 0 all states fit, 1 some do not, 2 wrong usage or unreadable input",
    )
    plan.add_argument("source", help="the package that holds the states")
    plan.add_argument("target", help="the package that is to take them; may be the same")
    plan.add_argument("--at", type=int, required=True, metavar="TOKENS", help="tokens in the cache")
    plan.add_argument("--source-function", metavar="NAME", help="of a multi-function package")
    plan.add_argument("--target-function", metavar="NAME", help="of a multi-function package")
    plan.add_argument(
        "--seq-axis", type=int, default=-2, metavar="AXIS", help="the sequence; default: -2"
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(run=run_plan)


def _state_data(spec: StateSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype.name,
        "bytes": spec.nbytes,
    }


def run_states(arguments: argparse.Namespace) -> int:
    """Print the states of every function."""
    functions, default = read_functions(arguments.package)
    for name in functions:
        warn_of_shapes(StateSpecs(functions, name), stacklevel=1)
    if arguments.json:
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
            shape = shape_text(spec.shape)
            print(f"  {spec.name:{width}}  {spec.dtype}  {shape}  {bytes_text(spec.nbytes)}")
        if not states:
            print("  no states")
    return 0


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
    print(json.dumps(plan.to_dict(), indent=2) if arguments.json else plan)
    return 0 if plan.fits else 1
