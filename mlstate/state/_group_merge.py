"""Parameter groups of optimizers: matched by names; merged, if ranks hold parameters in part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .._common.arrays import is_torch
from .._common.backend import TensorBackend, backend_of
from ..errors import CompatibilityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_Group: TypeAlias = dict[str, Any]

# Entries of a group that describe its parameters, as `OptimizerStateDict.from_torch` sets them:
# their names, the states that were Python numbers, and by state, the positions in "params" of
# parameters with packed values and with orders of dimensions; and a mark of values that older
# versions cannot read.
_OF_PARAMETERS = frozenset(
    {"params", "python_numbers", "packed_states", "dimension_orders", "newer_values"}
)


def packed_states(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the keys of states that are stored as nested values, as the groups record."""
    return {
        f"{group['params'][position]}.{state}"
        for group in groups
        for state, positions in group.get("packed_states", {}).items()
        for position in positions
    }


def match_groups(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]] | None:
    """Return for each group of `first` the group of `second` that has its values after a load.

    A load finds groups by the names of their parameters, in any order; the parameters of one group
    may come from several with equal values. Groups with the same parameters in place match, also
    without names. None for groups that do not match.
    """
    sides = [[{*map(str, group.get("params", ()))} for group in each] for each in (first, second)]
    if sides[0] == sides[1]:
        return [*second]
    homes = homes_of(second)
    is_named = not is_numbered(second) and all(names for side in sides for names in side)
    if not is_named or {*homes} != set().union(*sides[0]):
        return None
    matched = []
    for names in sides[0]:
        index, *others = sorted({homes[name] for name in names})
        values = split_group(second[index])[0]
        if any(differing_key(values, split_group(second[i])[0]) for i in others):
            return None
        matched.append(second[index])
    return matched


def homes_of(groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of the group of each parameter, by name."""
    return {str(name): i for i, group in enumerate(groups) for name in group.get("params", ())}


def is_numbered(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether groups have no names of parameters, or only ``param_0`` and so on."""
    listed = [str(name) for group in groups for name in group.get("params", ())]
    named = all("params" in group for group in groups)
    return not named or (bool(listed) and listed == [f"param_{i}" for i in range(len(listed))])


def differing_key(first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    """Return the first key whose values differ in two groups or that one lacks; None without."""
    return next(
        (
            key
            for key in {**first, **second}
            if (key in first) != (key in second) or not _is_equal(first[key], second[key])
        ),
        None,
    )


def split_group(group: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the hyperparameters of a group, and the entries that describe its parameters."""
    values = {key: value for key, value in group.items() if key not in _OF_PARAMETERS}
    parameter_values = {key: value for key, value in group.items() if key in _OF_PARAMETERS}
    return values, parameter_values


def _refuse_values(
    label: str, name: str, first: tuple[int, _Group], other: tuple[int, _Group]
) -> None:
    """Raise CompatibilityError if a parameter has different hyperparameters on two ranks.

    `label`: the optimizer. `name`: the parameter. `first`, `other`: rank and hyperparameters of
    each.
    """
    key = differing_key(first[1], other[1])
    if key is not None:
        got = [values.get(key, "no value") for _, values in (first, other)]
        raise CompatibilityError(
            f"{label}: the group of {name!r} has {key!r} = {got[0]} on rank {first[0]}, and "
            f"{got[1]} on rank {other[0]}: set the same values on every rank"
        )


def _is_equal(first: Any, second: Any) -> bool:
    """Return whether two hyperparameters are equal; NaN equals NaN, in arrays and lists too."""
    if first is second:
        return True
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_is_equal, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_is_equal(first[k], second[k]) for k in first)
    if is_torch(first) or is_torch(second):
        if not (is_torch(first) and is_torch(second)):
            return False
        first, second = (
            backend_of(each, TensorBackend).arrays_of({"": each.detach().cpu()})[""]
            for each in (first, second)
        )
    if isinstance(first, np.ndarray | np.generic) or isinstance(second, np.ndarray | np.generic):
        left, right = np.asarray(first), np.asarray(second)
        if left.shape != right.shape:
            return False
        return bool(np.all((left == right) | ((left != left) & (right != right))))
    is_same = first == second or (first != first and second != second)
    return bool(is_same) and type(first) is type(second)


def merge_groups(label: str, groups_of: dict[int, list[_Group]]) -> list[_Group]:
    """Return the groups of an optimizer whose parameters ranks hold in part.

    `label`: the optimizer, for errors. `groups_of`: the groups by rank. The groups of the first
    rank come first, then the groups of other ranks, without parameters of an earlier rank. If a
    group has no names of parameters, nothing can be joined, and the groups of the first rank are
    returned. Raises CompatibilityError if ranks disagree about the values of a parameter's group.
    """
    if not all("params" in group for groups in groups_of.values() for group in groups):
        return next(iter(groups_of.values()))
    seen: dict[str, tuple[int, _Group]] = {}  # by parameter: first rank, and its hyperparameters
    merged: list[_Group] = []
    for rank, groups in groups_of.items():
        for group in groups:
            values, parameter_values = split_group(group)
            params = parameter_values["params"]
            # in `params`; an earlier rank has the other parameters
            kept_positions = [i for i, name in enumerate(params) if name not in seen]
            for name in params:
                earlier = seen.setdefault(name, (rank, values))
                if earlier[1] is not values:
                    _refuse_values(label, name, earlier, (rank, values))
            if rank and not kept_positions:  # rank 0 keeps its empty groups
                continue
            new_position = {old: new for new, old in enumerate(kept_positions)}
            parameter_values["params"] = [params[i] for i in kept_positions]
            if "dimension_orders" in parameter_values:
                parameter_values["dimension_orders"] = {
                    state: [[new_position[i], order] for i, order in pairs if i in new_position]
                    for state, pairs in parameter_values["dimension_orders"].items()
                }
            if "packed_states" in parameter_values:
                parameter_values["packed_states"] = {
                    state: [new_position[i] for i in positions if i in new_position]
                    for state, positions in parameter_values["packed_states"].items()
                }
            merged.append({**values, **parameter_values})
    return merged
