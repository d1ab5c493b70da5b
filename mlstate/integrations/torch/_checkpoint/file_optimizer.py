"""The optimizer in a torch file, in one of the forms of torch, as a state of mlstate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ....checkpoint._layouts.entries import FLAT, is_flat_optimizer, malformed, refusal
from ....state._optimizer_state import OptimizerStateDict, OptimizerType
from .._tensors.state import arrays_of
from .optimizer import keywords_from, stored_states

if TYPE_CHECKING:
    from pathlib import Path


def _names_of(groups: list[Any], path: Path) -> dict[Any, str]:
    """Return the parameter names of an optimizer, by the keys of its states, from its `groups`.

    Without names, parameters are ``param_0`` and so on. Raises FormatError for malformed groups,
    and CompatibilityError for equal names; `path`: of the file, for it.
    """
    names: dict[Any, str] = {}
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise malformed(path, "a group of the optimizer has no list of 'params'")
        members = group["params"]
        param_names = group.get("param_names")
        if not (isinstance(param_names, list | tuple) and len(param_names) == len(members)):
            param_names = None
        for number, member in enumerate(members):
            if not isinstance(member, int | str) or member in names:
                text = f"the optimizer's parameter {member!r} is not a number, or appears twice"
                raise malformed(path, text)
            default = member if isinstance(member, str) else f"param_{len(names)}"
            # of members that are names, `param_names` may have another order: flattened optimizers
            # have one entry for each member
            is_name = isinstance(member, str) and not member.isdecimal()
            names[member] = str(param_names[number]) if param_names and not is_name else default
    if len(set(names.values())) != len(names):
        raise refusal(path, "two parameters of the optimizer have one name")
    return names


def optimizer_of(tree: Mapping[str, Any], path: Path) -> OptimizerStateDict:
    """Return the optimizer of a file: arrays by ``<parameter>.<state>``, groups, learning rate.

    `tree`: a result of ``optimizer.state_dict()``, with the entry ``param_groups``, or as torch
    flattens it. `path`: for errors. Raises FormatError if the groups or states are malformed, and
    CompatibilityError for values that mlstate cannot hold.
    """
    if is_flat_optimizer(tree):
        tree = _unflatten(tree, path)
    groups = tree["param_groups"]
    saved_states = tree.get("state", {})
    if not isinstance(groups, list) or not isinstance(saved_states, Mapping):
        raise malformed(path, "the optimizer has no list of groups, or no dict of states")
    names = _names_of(groups, path)
    states: dict[str, Any] = {}
    for key, entries in saved_states.items():
        # torch's checkpoints store numbers as strings
        member = int(key) if key not in names and str(key).isdecimal() else key
        if member not in names or not isinstance(entries, Mapping):
            text = f"the optimizer has a state for {key!r}, which is in none of its groups"
            raise malformed(path, text)
        for state, value in entries.items():
            name = f"{names[member]}.{state}"
            if not isinstance(state, str) or not state or "." in state:
                text = f"the optimizer's {names[member]!r} has a state named {state!r}"
                raise refusal(path, text)
            if name in states:
                raise refusal(path, f"the optimizer has {name!r} twice")
            states[name] = value
    try:
        stored_groups, states = stored_states(groups, names.values(), states)
        arrays = arrays_of(states)
    except (TypeError, ValueError) as error:
        raise refusal(path, f"the optimizer's {error}") from None
    keywords = keywords_from(OptimizerType.OTHER, stored_groups, states)
    return OptimizerStateDict(arrays, **keywords)


def _unflatten(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a flattened optimizer in the form of ``optimizer.state_dict()``.

    Parameters whose options are equal become one group. Raises FormatError, about the file `path`,
    for a state of a parameter without options, or a state below one that is a value.
    """
    options: dict[str, dict[str, Any]] = {}
    states: dict[str, Any] = {}
    for key, value in tree.items():
        if key.startswith(FLAT[1]):
            name, _, option = key.removeprefix(FLAT[1]).rpartition(".")
            options.setdefault(name, {})[option] = value
    for key, value in tree.items():
        if not key.startswith(FLAT[0]):
            continue
        # names of parameters have dots: take the longest one that has options
        words = key.removeprefix(FLAT[0]).split(".")
        ends = range(len(words) - 1, 0, -1)
        end = next((end for end in ends if ".".join(words[:end]) in options), None)
        if end is None:
            raise malformed(path, f"the optimizer has a state {key!r} of none of its groups")
        inner = states.setdefault(".".join(words[:end]), {})
        for word in words[end:-1]:
            inner = inner.setdefault(word, {})
            if not isinstance(inner, dict):
                raise malformed(path, f"the optimizer's {key!r} is below a value")
        inner[words[-1]] = value
    groups: dict[str, dict[str, Any]] = {}  # by a text of the options, which cannot be hashed
    for name, values in options.items():
        text = str([(k, v.tolist() if hasattr(v, "tolist") else v) for k, v in values.items()])
        groups.setdefault(text, {**values, "params": []})["params"].append(name)
    return {"state": states, "param_groups": [*groups.values()]}
