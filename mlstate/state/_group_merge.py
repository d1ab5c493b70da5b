"""Join the parameter groups of an optimizer whose parameters several ranks hold."""

from __future__ import annotations

from typing import Any, TypeAlias

_Group: TypeAlias = dict[str, Any]

# Entries of a group that describe its parameters.
_OF_PARAMETERS = frozenset({"params", "python_numbers", "packed_states"})


def _split_group(group: _Group) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the hyperparameters of a group, and the entries that describe its parameters."""
    parameter_values = {key: value for key, value in group.items() if key in _OF_PARAMETERS}
    return {
        key: value for key, value in group.items() if key not in parameter_values
    }, parameter_values


def _refuse_values(
    label: str, name: str, first: tuple[int, _Group], other: tuple[int, _Group]
) -> None:
    """Raise ValueError if the groups of a parameter have different hyperparameters on two ranks.

    `label`: the optimizer. `name`: the parameter. `first`, `other`: rank and hyperparameters of
    each.
    """
    values = first[1], other[1]
    for key in {**values[0], **values[1]}:
        got = [v.get(key, "no value") for v in values]
        if (key in values[0]) != (key in values[1]) or got[0] != got[1]:
            raise ValueError(
                f"{label}: the group of {name!r} has {key!r} = {got[0]} on rank {first[0]}, and "
                f"{got[1]} on rank {other[0]}: set the same values on every rank"
            )


def merge_groups(label: str, groups_of: dict[int, list[_Group]]) -> list[_Group]:
    """Return the groups of an optimizer whose parameters ranks hold in part.

    `label`: the optimizer, for errors. `groups_of`: the groups by rank. The groups of the first
    rank come first, then the groups of other ranks, without parameters of an earlier rank. If a
    group has no names of parameters, nothing can be joined, and the groups of the first rank are
    returned. Raises ValueError if ranks disagree about the values of a parameter's group.
    """
    if not all("params" in group for groups in groups_of.values() for group in groups):
        return next(iter(groups_of.values()))
    seen: dict[str, tuple[int, _Group]] = {}
    merged: list[_Group] = []
    for rank, groups in groups_of.items():
        for group in groups:
            values, parameter_values = _split_group(group)
            new = [i for i, name in enumerate(parameter_values["params"]) if name not in seen]
            for name in parameter_values["params"]:
                _refuse_values(label, name, seen.setdefault(name, (rank, values)), (rank, values))
            if rank and not new:  # rank 0 keeps its empty groups
                continue
            positions = {old: i for i, old in enumerate(new)}
            parameter_values["params"] = [parameter_values["params"][i] for i in new]
            # Packed states list positions in `params`, which has changed.
            if "packed_states" in parameter_values:
                parameter_values["packed_states"] = {
                    state: [positions[i] for i in those if i in positions]
                    for state, those in parameter_values["packed_states"].items()
                }
            merged.append({**values, **parameter_values})
    return merged
