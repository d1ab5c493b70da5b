"""Load of a torch optimizer's groups: which saved group each gets; learning rate, hyperparameters.

Groups are matched by the names of their parameters, and without names by position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ...._common.caller import find_caller
from ....checkpoint._folder.names import NEWER
from ....checkpoint._states.excluded import EXCLUDED, fill_excluded
from ....errors import CompatibilityError
from ....state._group_merge import differing_key, homes_of, is_numbered
from .optimizer_contract import has_own_loader
from .optimizer_values import EXACT, NOT_VALUES, as_json, decode_value, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

_UNTIED = (
    ", and if it is a tied weight that to_empty() has separated, tie it again before "
    "(module.head.weight = module.embedding.weight)"
)
_NUMBERS = (list, int, float)  # forms of tensors in old checkpoints


class Scope(NamedTuple):
    """The groups and parameters that a load includes."""

    strict: bool = True  # a group without saved values is an error
    complete: bool = True  # all parameters are loaded, not only chosen names
    recorded: frozenset[str] = frozenset()  # parameters that have saved states
    elsewhere: frozenset[str] = frozenset()  # parameters that only other ranks have


ALL = Scope()


def _values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_VALUES}


def _mismatch(problem: str, name: str | None = None, remedy: str = "") -> CompatibilityError:
    """Return the error for groups that do not match; `name`: of a parameter, or None.

    `remedy`: beyond the general one.
    """
    return CompatibilityError(
        f"the optimizer's groups do not match the saved ones: {problem}; create the optimizer "
        f"with the saved groups{remedy}",
        name=name,
    )


def _merge(number: int, indexes: Sequence[int], saved: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of the saved group whose values the optimizer's group `number` gets.

    `indexes`: the saved groups that its parameters were in, whose values must be equal: else this
    raises CompatibilityError.
    """
    first = indexes[0]
    values = _values_of(saved[first])
    for index in indexes[1:]:
        others = _values_of(saved[index])
        key = differing_key(values, others)
        if key is not None:
            raise _mismatch(
                f"group {number} has parameters of the saved groups {first} and {index}, which "
                f"differ in {key!r}: {values.get(key, 'no value')} and "
                f"{others.get(key, 'no value')}"
            )
    return first


def _by_position(saved: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]]) -> list[int]:
    """Return the number of the saved group for each group of an optimizer, by position.

    This is for saved groups without names. `members`: names of the parameters of each group. Warns
    if there are several groups; raises CompatibilityError if the numbers of parameters differ.
    """
    have = [
        len(group.get("params", members_of))
        for group, members_of in zip(saved, members, strict=False)
    ]
    want = [len(members_of) for members_of in members]
    if len(saved) != len(members) or have != want:
        lengths = [len(group.get("params", ())) for group in saved]
        raise _mismatch(
            "the saved groups have no names of parameters, so they match by position, but have "
            f"{lengths} parameters, and the optimizer's have {want}"
        )
    if len(saved) > 1:
        find_caller().warn(
            f"the {len(saved)} groups of the optimizer were saved without names of parameters "
            "and are matched by position: save the model with the optimizer to store the names"
        )
    return list(range(len(saved)))


def _saved_group(
    number: int,
    group_names: Sequence[str],
    groups_of: Mapping[str, int],
    saved: Sequence[Mapping[str, Any]],
    count: int,
) -> int:
    """Return the number of the saved group whose values the optimizer's group `number` gets.

    `group_names`: its parameters. `groups_of`: number of the saved group of each parameter.
    `count`: number of the optimizer's groups. Raises CompatibilityError if no saved group fits.
    """
    unknown = [name for name in group_names if name not in groups_of]
    if unknown:
        raise _mismatch(
            f"no saved group has {quoted(unknown)} of group {number}", unknown[0], _UNTIED
        )
    if group_names:
        return _merge(number, sorted({groups_of[name] for name in group_names}), saved)
    # a group without parameters matches a saved one without, by position if possible
    empty = [i for i, group in enumerate(saved) if not group["params"]]
    if not empty:
        raise _mismatch(f"group {number} has no parameters, and no saved group is empty")
    in_place = number in empty and len(saved) == count
    return number if in_place else _merge(number, empty, saved)


def _by_name(
    saved: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]], scope: Scope
) -> list[int | None]:
    """Return the number of the saved group for each group of an optimizer, by parameter names.

    `members`: names of the parameters of each group. `scope`: the parameters that the load
    includes. Raises CompatibilityError if no saved group fits. If the load is not strict, or the
    saved groups lack parameters that have states (old checkpoints of several ranks), this warns
    instead, and the number is None.
    """
    groups_of = homes_of(saved)
    present = scope.elsewhere.union(*members)
    absent = [name for name in groups_of if name not in present]
    if absent and scope.strict and scope.complete:
        raise _mismatch(f"the optimizer lacks {quoted(absent)}", absent[0])
    matches: list[int | None] = []
    for number, group_names in enumerate(members):
        try:
            matches.append(_saved_group(number, group_names, groups_of, saved, len(members)))
        except CompatibilityError as error:
            unlisted = [name for name in group_names if name not in groups_of]
            if scope.strict and not (unlisted and scope.recorded.issuperset(unlisted)):
                raise
            find_caller().warn(f"group {number} keeps its own values: {error}")
            matches.append(None)
    return matches


def set_state(
    optimizer: torch.optim.Optimizer, states: dict[Any, Any], groups: list[dict[str, Any]]
) -> None:
    """Let the optimizer's ``__setstate__`` change `states` and `groups`, as at the end of a load.

    `states`: by parameter. The optimizer is unchanged; exceptions of its method are not caught.
    """
    probe = object.__new__(type(optimizer))
    vars(probe).update(vars(optimizer), defaults=dict(optimizer.defaults))
    probe.__setstate__({"state": states, "param_groups": groups})


def _with_defaults(
    optimizer: torch.optim.Optimizer, values: dict[str, Any], own_group: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of a saved group with those that it lacks, for example of an older torch.

    First those that torch sets in ``__setstate__``. All others keep the value that they have in
    `own_group`, the group of the optimizer, with a warning.
    """
    if not has_own_loader(optimizer):
        group = {**values, "params": []}
        set_state(optimizer, {}, [group])
        values = _values_of(group)
    unsaved = {
        key: value
        for key, value in _values_of(own_group).items()
        if key not in values and (key in optimizer.defaults or as_json(value) is NotImplemented)
    }
    if unsaved:
        find_caller().warn(
            f"the checkpoint lacks {quoted(unsaved)} of the optimizer's groups, which keep "
            "their values"
        )
    return {**values, **unsaved}


def _refuse_ambiguous_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Raise CompatibilityError if an optimizer has several groups for one saved rate."""
    if len(optimizer.param_groups) > 1:
        raise _mismatch(
            f"the state has no groups, only the learning rate {rate} of the first one, and the "
            f"optimizer has {len(optimizer.param_groups)} groups"
        )


def _restore_value(form: Any, current: Any, where: str, *, tensors: tuple[type, ...]) -> Any:
    """Return the saved value of a group's key; `form`: stored, `current`: the optimizer's value.

    A value that was excluded is `current`, which is `EXCLUDED` if the group lacks the key. `where`:
    name of the value, for the FormatError if `form` is malformed. Old checkpoints store tensors as
    numbers and lists as tuples, so `current` decides the type. `tensors`: types of forms that may
    have been tensors, which CUDA graphs need.
    """
    import torch

    if isinstance(form, list) and isinstance(current, list):
        return form
    value = decode_value(form, where, lambda: current)
    if value is EXCLUDED:
        return current
    if isinstance(form, dict) and form.get(NEWER):
        value = fill_excluded(value, current)
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(current.device)
    if isinstance(current, torch.Tensor) and isinstance(form, tensors):
        return torch.as_tensor(form, dtype=current.dtype, device=current.device)
    return value


def match_groups(
    saved: Sequence[Mapping[str, Any]],
    learning_rate: float,
    optimizer: torch.optim.Optimizer,
    members: Sequence[Sequence[str]],
    scope: Scope = ALL,
) -> list[dict[str, Any]]:
    """Return the values of each group of an optimizer after a load, without parameters.

    `saved`: groups of the checkpoint. `members`: names of the parameters of each group of the
    optimizer. `scope`: included groups. Without saved groups, a saved `learning_rate` other than 0
    is set if the optimizer has one group. Raises CompatibilityError for groups that do not match;
    warns if a group keeps own values, or groups match only by position.
    """
    groups = optimizer.param_groups
    if not saved:
        if learning_rate and scope.strict:
            _refuse_ambiguous_rate(optimizer, learning_rate)
        own_values = [_values_of(group) for group in groups]
        if learning_rate and len(groups) == 1:
            rate = _restore_value(learning_rate, own_values[0].get("lr"), "lr", tensors=_NUMBERS)
            own_values[0]["lr"] = rate
        return own_values
    numbered = is_numbered(saved)
    matches = _by_position(saved, members) if numbered else _by_name(saved, members, scope)
    matched = []
    for own_group, index in zip(groups, matches, strict=True):
        if index is None:
            matched.append(_values_of(own_group))
            continue
        group, where = saved[index], f"param_groups[{index}]"
        # old checkpoints, without EXACT, stored tensors as numbers or lists
        tensors = () if EXACT in group else _NUMBERS if group.get("capturable") else (list,)
        values = {
            key: _restore_value(
                form, own_group.get(key, EXCLUDED), f"{where}[{key!r}]", tensors=tensors
            )
            for key, form in _values_of(group).items()
        }
        values = {key: value for key, value in values.items() if value is not EXCLUDED}
        matched.append(_with_defaults(optimizer, values, own_group))
    return matched
