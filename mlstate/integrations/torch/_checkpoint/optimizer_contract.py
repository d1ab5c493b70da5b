"""The contract of torch optimizers: values of groups, groups by parameter name, own load methods.

    encode_value, decode_value    a value of a group <-> its JSON form in a checkpoint
    check_contract                refuses optimizers whose ``state_dict()`` has more than `state`
    match_groups                  the saved values for each group of an optimizer

A JSON list in a group is a tuple. Values that JSON cannot hold are objects with ``"$": "tree"``.
"""

from __future__ import annotations

import base64
import json
import warnings
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...._common.dtypes import name_of, numpy_dtype
from ...._sharding.layout import Shard
from ....checkpoint._states.tree import Decoder, encode, malformed, whole_arrays
from ....errors import CompatibilityError
from ....state._compatibility import join
from .._tensors.state import tensors_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

# Keys in a group of a checkpoint: names of states that were Python numbers, which files store as
# arrays; and of states that are nested values, with the positions of their parameters; and a mark
# of a capturable group whose numbers were numbers: old checkpoints stored tensors as numbers too.
NUMBERS = "python_numbers"
PACKED = "packed_states"
EXACT = "exact_numbers"
# Keys of a group that are not hyperparameters.
NOT_VALUES = frozenset({"params", "param_names", NUMBERS, PACKED, EXACT})
_NUMBERS = (list, int, float)  # forms of tensors in old checkpoints
_MOST_BYTES = 65536  # of arrays in a value of a group: the manifest contains them


# ---- values ----


def equal_values(a: Any, b: Any) -> bool:
    """Return whether nested values are equal and have equal types; NaN equals NaN."""
    import torch

    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        facts = [(t.dtype, t.shape, t.requires_grad) for t in (a, b)]
        if facts[0] != facts[1] or hasattr(a, "device_mesh"):
            return False
        a, b = a.detach().cpu(), b.detach().cpu()
        return bool(torch.equal(a, b) or torch.allclose(a, b, 0.0, 0.0, equal_nan=True))
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_values(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal_values, a, b))
    return bool(a == b or (a != a and b != b))


def tensor_of(array: Any) -> torch.Tensor:
    """Return a new tensor of an array."""
    tensor: torch.Tensor = tensors_of({"": np.array(array)})[""]
    return tensor


def check_restorable(value: Any, restored: Any, where: str) -> None:
    """Raise TypeError for a value that the codec would restore as another value."""
    if not equal_values(value, restored):
        cls = type(value)
        raise TypeError(
            f"{where} is or contains a {cls.__module__}.{cls.__qualname__}, which would be "
            "restored as another value: use plain numbers, str, bytes, tensors, or lists, tuples, "
            "sets and dicts of these"
        )


def _as_json(value: Any) -> Any:
    """Return a plain value in its JSON form, or NotImplemented; tuples become lists."""
    if type(value) is tuple:
        items = [_as_json(item) for item in value]
        return NotImplemented if any(item is NotImplemented for item in items) else items
    if type(value) in (int, float) and not abs(value) < 1 << 63:
        return NotImplemented
    return value if value is None or type(value) in (bool, int, float, str) else NotImplemented


def encode_value(value: Any, where: str) -> Any:
    """Return the JSON form of a group's value; raise TypeError or ValueError with its path."""
    json_value = _as_json(value)
    if json_value is not NotImplemented:
        return json_value
    tree = encode(value, where)
    if any(isinstance(array, Shard) for array in tree.arrays.values()):
        raise TypeError(f"{where} contains a DTensor: use a plain tensor")
    arrays = whole_arrays(tree)
    nbytes = sum(array.nbytes for array in arrays.values())
    if nbytes > _MOST_BYTES:
        raise ValueError(
            f"{where} has {nbytes:,} bytes of arrays, but values of a group may have only "
            f"{_MOST_BYTES:,}: keep them in optimizer.state, or save them by states="
        )
    form: dict[str, Any] = {"$": "tree", "value": json.loads(tree.text)}
    if arrays:
        form["arrays"] = {
            key: [name_of(a.dtype), list(a.shape), base64.b64encode(a.tobytes()).decode()]
            for key, a in arrays.items()
        }
    check_restorable(value, decode_value(form, where), where)
    return form


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def decode_value(form: Any, where: str) -> Any:
    """Return the value of a JSON form; raise FormatError if it is malformed."""
    if not (isinstance(form, dict) and form.get("$") == "tree"):
        return _as_tuples(form)
    try:
        arrays = {
            key: np.frombuffer(base64.b64decode(data), numpy_dtype(dtype)).reshape(shape).copy()
            for key, (dtype, shape, data) in form.get("arrays", {}).items()
        }
        return Decoder(arrays, tensor_of).value(form["value"])
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise malformed(where, error) from None


def _restore_value(form: Any, current: Any, where: str, *, tensors: tuple[type, ...]) -> Any:
    """Return a saved value. Old checkpoints store tensors as numbers and lists as tuples.

    `tensors`: types of forms that may have been tensors, which CUDA graphs need.
    """
    import torch

    if isinstance(form, list) and isinstance(current, list):
        return form
    value = decode_value(form, where)
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(current.device)
    if isinstance(current, torch.Tensor) and isinstance(form, tensors):
        return torch.as_tensor(form, dtype=current.dtype, device=current.device)
    return value


# ---- own load methods ----


def _listed(names: Iterable[object]) -> str:
    return join([repr(name) for name in names])


def _overridden(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Return whether an optimizer has a method that is not one of torch's."""
    method = getattr(type(optimizer), name)
    module = str(getattr(method, "__module__", None))
    return name in vars(optimizer) or not module.startswith("torch.optim.")


def _has_hooks(optimizer: torch.optim.Optimizer, name: str) -> bool:
    hooks = vars(optimizer)
    return any(bool(hooks.get(f"_optimizer_{name}_{when}_hooks")) for when in ("pre", "post"))


def has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``state_dict()`` may have more than `state` and `param_groups`."""
    has_property = isinstance(vars(type(optimizer)).get("state"), property)
    return (
        has_property or _overridden(optimizer, "state_dict") or _has_hooks(optimizer, "state_dict")
    )


def has_own_loader(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``load_state_dict`` does more than torch's."""
    names = ("load_state_dict", "__setstate__", "_process_value_according_to_param_policy")
    return (
        any(_overridden(optimizer, name) for name in names)
        or _has_hooks(optimizer, "load_state_dict")
        or has_own_state_dict(optimizer)
    )


def torch_form(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return ``state_dict()`` as torch's own method returns it, without hooks."""
    numbers: dict[int, int] = {}
    groups = []
    for group in optimizer.param_groups:
        members = [numbers.setdefault(id(p), len(numbers)) for p in group["params"]]
        values = {key: value for key, value in group.items() if key != "params"}
        groups.append({**values, "params": members})
    states = {numbers.get(id(key), key): value for key, value in optimizer.state.items()}
    return {"state": states, "param_groups": groups}


def _own_state_dict(optimizer: torch.optim.Optimizer) -> Any:
    """Return the result of ``state_dict()``; raise TypeError if it fails."""
    try:
        return optimizer.state_dict()
    except Exception as error:
        raise TypeError(
            f"{type(optimizer).__name__}.state_dict() raised {type(error).__name__}: {error}; "
            "pass states={'optimizer': optimizer.state_dict()} on ranks that can make this call, "
            "and states={'optimizer': None} on the others"
        ) from error


def has_standard_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `state` and `param_groups` are all that ``state_dict()`` has."""
    if not has_own_state_dict(optimizer):
        return True
    return equal_values(_own_state_dict(optimizer), torch_form(optimizer))


def check_contract(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError if ``state_dict()`` differs from `state` and `param_groups`."""
    if not has_own_state_dict(optimizer):
        return
    own_dict, torch_dict = _own_state_dict(optimizer), torch_form(optimizer)
    if equal_values(own_dict, torch_dict):
        return
    keys = own_dict.keys() - torch_dict.keys() if isinstance(own_dict, dict) else ()
    detail = f"has {_listed(sorted(map(str, keys)))} too" if keys else "has other values"
    raise TypeError(
        f"{type(optimizer).__name__} does not keep all of its state in `state` and `param_groups`, "
        f"because its state_dict() {detail}: pass states={{'optimizer': optimizer}}, which stores "
        "the result of state_dict(), or pass the optimizer that it wraps"
    )


# ---- groups ----


class Scope(NamedTuple):
    """What a load includes."""

    strict: bool = True  # a group without saved values is an error
    complete: bool = True  # all parameters are loaded, not only chosen names
    recorded: frozenset[str] = frozenset()  # parameters that have saved states


ALL = Scope()


def _values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_VALUES}


def _mismatch(problem: str, name: str | None = None) -> CompatibilityError:
    error = CompatibilityError(
        f"the optimizer's groups do not match the saved ones: {problem}; create the optimizer "
        "with the saved groups"
    )
    error.name = name
    return error


def _same(form: Any, other: Any) -> bool:
    return json.dumps(form, sort_keys=True) == json.dumps(other, sort_keys=True)


def _merge(number: int, indexes: Sequence[int], saved: Sequence[Mapping[str, Any]]) -> int:
    """Return a saved group that has the values of several; raise if they differ."""
    first = indexes[0]
    values = _values_of(saved[first])
    for index in indexes[1:]:
        others = _values_of(saved[index])
        differing = [
            key
            for key in {**values, **others}
            if (key in values) != (key in others) or not _same(values[key], others[key])
        ]
        if differing:
            key = differing[0]
            raise _mismatch(
                f"group {number} has parameters of the saved groups {first} and {index}, which "
                f"differ in {key!r}: {values.get(key, 'no value')} and "
                f"{others.get(key, 'no value')}"
            )
    return first


def _by_position(saved: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]]) -> list[int]:
    """Match groups without names of parameters; raise if their lengths differ."""
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
        warnings.warn(
            f"the {len(saved)} groups of the optimizer were saved without names of parameters "
            "and are matched by position: save the model with the optimizer to store the names",
            stacklevel=2,
        )
    return list(range(len(saved)))


def _saved_group(
    number: int,
    group_names: Sequence[str],
    groups_of: Mapping[str, int],
    saved: Sequence[Mapping[str, Any]],
    count: int,
) -> int:
    """Return the saved group that has the values of one of `count` groups; raise if none has."""
    unknown = [name for name in group_names if name not in groups_of]
    if unknown:
        raise _mismatch(f"no saved group has {_listed(unknown)} of group {number}", unknown[0])
    if group_names:
        return _merge(number, sorted({groups_of[name] for name in group_names}), saved)
    empty = [i for i, group in enumerate(saved) if not group["params"]]
    if not empty:
        raise _mismatch(f"group {number} has no parameters, and no saved group is empty")
    in_place = number in empty and len(saved) == count
    return number if in_place else _merge(number, empty, saved)


def _by_name(
    saved: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]], scope: Scope
) -> list[int | None]:
    """Return the saved group for each group of an optimizer; raise if there is none.

    If the load is not strict, or the saved groups lack parameters that have states (old
    checkpoints of several ranks), warn instead, and return None for the group.
    """
    groups_of = {str(name): i for i, group in enumerate(saved) for name in group["params"]}
    present = set(chain.from_iterable(members))
    absent = [name for name in groups_of if name not in present]
    if absent and scope.strict and scope.complete:
        raise _mismatch(f"the optimizer lacks {_listed(absent)}", absent[0])
    matches: list[int | None] = []
    for number, group_names in enumerate(members):
        try:
            matches.append(_saved_group(number, group_names, groups_of, saved, len(members)))
        except CompatibilityError as error:
            unlisted = [name for name in group_names if name not in groups_of]
            if scope.strict and not (unlisted and scope.recorded.issuperset(unlisted)):
                raise
            warnings.warn(f"group {number} keeps its own values: {error}", stacklevel=2)
            matches.append(None)
    return matches


def _is_numbered(saved: Sequence[Mapping[str, Any]]) -> bool:
    listed = [str(name) for group in saved for name in group.get("params", ())]
    named = all("params" in group for group in saved)
    return not named or (bool(listed) and listed == [f"param_{i}" for i in range(len(listed))])


def set_state(
    optimizer: torch.optim.Optimizer, states: dict[Any, Any], groups: list[dict[str, Any]]
) -> None:
    """Change states and groups as torch's ``load_state_dict`` does at its end.

    The optimizer is unchanged.
    """
    probe = object.__new__(type(optimizer))
    vars(probe).update(vars(optimizer), defaults=dict(optimizer.defaults))
    probe.__setstate__({"state": states, "param_groups": groups})


def _with_defaults(
    optimizer: torch.optim.Optimizer, values: dict[str, Any], defaults_group: Mapping[str, Any]
) -> dict[str, Any]:
    """Add the values that torch sets when a saved group lacks them; warn of further ones."""
    if not has_own_loader(optimizer):
        group = {**values, "params": []}
        set_state(optimizer, {}, [group])
        values = _values_of(group)
    unsaved = {
        key: value
        for key, value in _values_of(defaults_group).items()
        if key not in values and (key in optimizer.defaults or _as_json(value) is NotImplemented)
    }
    if unsaved:
        warnings.warn(
            f"the checkpoint lacks {_listed(unsaved)} of the optimizer's groups, which keep "
            "their values",
            stacklevel=2,
        )
    return {**values, **unsaved}


def _refuse_ambiguous_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    if len(optimizer.param_groups) > 1:
        raise _mismatch(
            f"the state has no groups, only the learning rate {rate} of the first one, and the "
            f"optimizer has {len(optimizer.param_groups)} groups"
        )


def match_groups(
    saved: Sequence[Mapping[str, Any]],
    learning_rate: float,
    optimizer: torch.optim.Optimizer,
    members: Sequence[Sequence[str]],
    scope: Scope = ALL,
) -> list[dict[str, Any]]:
    """Return the values of each group of an optimizer after a load, without parameters.

    `members` has the names of the parameters of each group. Without saved groups, a learning rate
    other than 0 is set if the optimizer has one group.
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
    numbered = _is_numbered(saved)
    matches = _by_position(saved, members) if numbered else _by_name(saved, members, scope)
    matched = []
    for own_group, index in zip(groups, matches, strict=True):
        if index is None:
            matched.append(_values_of(own_group))
            continue
        group, where = saved[index], f"param_groups[{index}]"
        tensors = () if EXACT in group else _NUMBERS if group.get("capturable") else (list,)
        values = {
            key: _restore_value(form, own_group.get(key), f"{where}[{key!r}]", tensors=tensors)
            for key, form in _values_of(group).items()
        }
        matched.append(_with_defaults(optimizer, values, own_group))
    return matched
