"""Which entries of a torch file or DCP directory are model, optimizer, metadata, other states.

The tree is a plain state dict, or a dict with a model, an optimizer in one of the forms of torch or
Lightning, and other entries. Numbers, str and None among these are metadata; all others are named
states.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from io import BytesIO
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ....checkpoint._files.parts import MODEL, OPTIMIZER, Parts
from ....errors import CompatibilityError, FormatError
from ....state._compatibility import join
from ....state._kind import restore
from ....state._optimizer_state import OptimizerStateDict, OptimizerType
from ....state._state_dict import StateDict
from .._tensors.state import arrays_of
from .optimizer import as_array, is_number, keywords_from, stored_states

if TYPE_CHECKING:
    from pathlib import Path

    from ....checkpoint._files.parts import Selection

# Keys of model and optimizer that programs commonly use.
_MODEL_KEYS = ("model", "state_dict", "model_state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_LIGHTNING = "optimizer_states"  # key of Lightning: a list, with an item for each optimizer
_FLAT = ("state.", "param_groups.")  # prefixes of keys in an optimizer that torch has flattened
# Key of the entry with the classes of the state dicts, which `tree_of` adds.
RECORD = "mlstate"
_EMPTY = "empty"  # in that entry: paths of empty dicts, which torch's distributed checkpoints lack
# Deeper trees are not state dicts, but dicts that contain themselves.
_DEEPEST = 64
_MOST_VALUES = 10_000_000


def format_error(path: Path, reason: str) -> FormatError:
    """Return the error for a file whose content is wrong."""
    error = FormatError(f"{path}: {reason}")
    error.path = str(path)
    return error


def _check_size(tree: Mapping[Any, Any], path: Path) -> None:
    """Raise FormatError for a tree with too many levels or values.

    Values that are in it many times count each time: a small file can hold a large tree. `path`: of
    the file, for the error.
    """
    left = _MOST_VALUES
    stack = [(value, str(key), 1) for key, value in tree.items()]
    while stack:
        value, name, depth = stack.pop()
        left -= 1
        if depth > _DEEPEST or left < 0:
            limit = f"{_DEEPEST} levels deep" if left >= 0 else f"{_MOST_VALUES:,} values"
            raise format_error(path, f"{name[:60]!r} is nested more than {limit}")
        if isinstance(value, Namespace):
            value = vars(value)
        if isinstance(value, Mapping):
            value = value.values()
        elif not isinstance(value, list | tuple | set | frozenset):
            continue
        stack += [(each, name, depth + 1) for each in value]


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the leaves of a tree; names are keys joined by dots.

    `prefix`: name of the tree itself, or "".
    """
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for key, value in items:
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping | list | tuple):
            yield from _leaves(value, name)
        else:
            yield name, value


def _state_from(tree: Mapping[Any, Any], path: Path) -> tuple[StateDict, dict[str, Any]]:
    """Return the tensors and numbers of a tree as arrays, and other plain values, by flat names.

    A flat name joins keys by dots. Raises FormatError for other objects and for equal names.
    """
    import torch

    tensors: dict[str, Any] = {}
    other_values: dict[str, Any] = {}
    strange: list[str] = []
    for name, value in _leaves(tree, ""):
        if name in tensors or name in other_values:
            raise format_error(path, f"two entries have the name {name!r} once levels are joined")
        if value is None or isinstance(value, str | bytes | bytearray | BytesIO):
            other_values[name] = value
            continue
        tensors[name] = as_array(value) if is_number(value) else value
        if not isinstance(tensors[name], torch.Tensor | np.ndarray | np.generic):
            strange.append(f"{name!r} (a {type(value).__name__})")
    if strange:
        raise format_error(
            path,
            f"a state cannot hold {join(strange)}: remove everything from the file that is neither "
            "a tensor nor a number, str, bytes or None",
        )
    return StateDict(arrays_of(tensors)), other_values


def _names_of(groups: list[Any], path: Path) -> dict[Any, str]:
    """Return the parameter names of an optimizer, by the keys of its states, from its `groups`.

    Without names, parameters are ``param_0`` and so on. Raises FormatError for malformed groups;
    `path`: of the file, for it.
    """
    names: dict[Any, str] = {}
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise format_error(path, "a group of the optimizer has no list of 'params'")
        members = group["params"]
        param_names = group.get("param_names")
        if not (isinstance(param_names, list | tuple) and len(param_names) == len(members)):
            param_names = None
        for number, member in enumerate(members):
            if not isinstance(member, int | str) or member in names:
                raise format_error(
                    path, f"the optimizer's parameter {member!r} is not a number, or appears twice"
                )
            default = member if isinstance(member, str) else f"param_{len(names)}"
            # of members that are names, `param_names` may have another order: flattened optimizers
            # have one entry for each member
            is_name = isinstance(member, str) and not member.isdecimal()
            names[member] = str(param_names[number]) if param_names and not is_name else default
    if len(set(names.values())) != len(names):
        raise format_error(path, "two parameters of the optimizer have one name")
    return names


def _optimizer_from(tree: Mapping[str, Any], path: Path) -> OptimizerStateDict:
    """Return the optimizer of a file: arrays by ``<parameter>.<state>``, groups, learning rate.

    `tree`: a result of ``optimizer.state_dict()``, with the entry ``param_groups``. `path`: for
    errors. Raises FormatError if the groups or states are malformed.
    """
    groups = tree["param_groups"]
    saved_states = tree.get("state", {})
    if not isinstance(groups, list) or not isinstance(saved_states, Mapping):
        raise format_error(path, "the optimizer has no list of groups, or no dict of states")
    names = _names_of(groups, path)
    states: dict[str, Any] = {}
    for key, entries in saved_states.items():
        # torch's checkpoints store numbers as strings
        member = int(key) if key not in names and str(key).isdecimal() else key
        if member not in names or not isinstance(entries, Mapping):
            raise format_error(
                path, f"the optimizer has a state for {key!r}, which is in none of its groups"
            )
        for state, value in entries.items():
            name = f"{names[member]}.{state}"
            if not isinstance(state, str) or not state or "." in state:
                raise format_error(
                    path, f"the optimizer's {names[member]!r} has a state named {state!r}"
                )
            if name in states:
                raise format_error(path, f"the optimizer has {name!r} twice")
            states[name] = value
    try:
        stored_groups, arrays = stored_states(groups, names.values(), states)
    except (TypeError, ValueError) as error:
        raise format_error(path, f"the optimizer's {error}") from None
    keywords = keywords_from(OptimizerType.OTHER, stored_groups, arrays)
    return OptimizerStateDict(arrays_of(arrays), **keywords)


def _is_flat_optimizer(value: Any) -> bool:
    """Return whether a value is an optimizer of torch's ``flatten_optimizer_state_dict``."""
    return (
        isinstance(value, Mapping)
        and all(isinstance(key, str) and key.startswith(_FLAT) for key in value)
        and any(key.startswith(_FLAT[1]) for key in value)
    )


def _unflatten(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a flattened optimizer in the form of ``optimizer.state_dict()``.

    Parameters whose options are equal become one group. Raises FormatError, about the file `path`,
    for a state of a parameter without options, or a state below one that is a value.
    """
    options: dict[str, dict[str, Any]] = {}
    states: dict[str, Any] = {}
    for key, value in tree.items():
        if key.startswith(_FLAT[1]):
            name, _, option = key.removeprefix(_FLAT[1]).rpartition(".")
            options.setdefault(name, {})[option] = value
    for key, value in tree.items():
        if not key.startswith(_FLAT[0]):
            continue
        # names of parameters have dots: take the longest one that has options
        words = key.removeprefix(_FLAT[0]).split(".")
        ends = range(len(words) - 1, 0, -1)
        end = next((end for end in ends if ".".join(words[:end]) in options), None)
        if end is None:
            raise format_error(path, f"the optimizer has a state {key!r} of none of its groups")
        inner = states.setdefault(".".join(words[:end]), {})
        for word in words[end:-1]:
            inner = inner.setdefault(word, {})
            if not isinstance(inner, dict):
                raise format_error(path, f"the optimizer's {key!r} is below a value")
        inner[words[-1]] = value
    groups: dict[str, dict[str, Any]] = {}  # by a text of the options, which cannot be hashed
    for name, values in options.items():
        text = str([(k, v.tolist() if hasattr(v, "tolist") else v) for k, v in values.items()])
        groups.setdefault(text, {**values, "params": []})["params"].append(name)
    return {"state": states, "param_groups": [*groups.values()]}


def _json_values(value: Any) -> Any:
    """Return a value as JSON can store it, or NotImplemented.

    Tensors without axes become numbers, keys str.
    """
    import torch

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
        return value.item()
    if isinstance(value, list | tuple):
        items = [_json_values(item) for item in value]
        return NotImplemented if any(item is NotImplemented for item in items) else items
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        pairs = {str(key): _json_values(item) for key, item in value.items()}
        return NotImplemented if any(v is NotImplemented for v in pairs.values()) else pairs
    return NotImplemented


def _metadata_from(values: Any, path: Path) -> dict[str, Any]:
    """Return the metadata that `tree_of` stored; raise FormatError if they are not plain."""
    metadata = _json_values(values) if isinstance(values, Mapping) else NotImplemented
    if metadata is NotImplemented:
        raise format_error(path, "entry 'metadata' does not hold plain values")
    return dict(metadata)


def _state_value(value: Any) -> Any:
    """Return a value for a named state, with namespaces as dicts."""
    if isinstance(value, Namespace):
        value = vars(value)
    if type(value) is dict:
        return {key: _state_value(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_state_value(each) for each in value)
    return value


def _add_rest(rest: Mapping[Any, Any], metadata: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the other entries of a file as named states; plain values are added to `metadata`.

    `rest`: all entries but model and optimizer. Optimizers become `OptimizerStateDict`; a list of
    several gets names with numbers. Raises FormatError, about the file `path`, for equal names.
    """
    states: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if name in states:
            raise format_error(path, f"two entries have the name {name!r}")
        states[name] = value

    for key, value in rest.items():
        name = str(key)
        plain = _json_values(value)
        is_nested = isinstance(value, list | tuple | Mapping | np.generic)
        if plain is not NotImplemented and not is_nested and name not in metadata:
            metadata[name] = plain
        elif _is_optimizer(value):
            add(name, _restore_optimizer(value, {}, path))
        elif key == _LIGHTNING and value and all(map(_is_optimizer, value)):
            numbered = {f"optimizer_{number}": each for number, each in enumerate(value)}
            if rest.keys() & numbered:
                add(name, value)
                continue
            for own_name, each in numbered.items():
                add(own_name, _restore_optimizer(each, {}, path))
        else:
            add(name, _state_value(value))
    return states


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, OptimizerStateDict)
        or _is_flat_optimizer(value)
        or (isinstance(value, Mapping) and isinstance(value.get("param_groups"), list))
    )


def _restore_model(
    value: Any, texts: Mapping[str, Any], path: Path
) -> tuple[StateDict, dict[str, Any]]:
    """Return a file's model as a state, and its values that are not tensors.

    `value`: the model in the file. `texts`: descriptions that mlstate recorded in the file, such as
    the class of the state. `path`: of the file, for errors.
    """
    if isinstance(value, StateDict):
        return value, {}
    state, other_values = _state_from(value, path)
    return restore(state, texts.get("model"), str(path)), other_values


def _restore_optimizer(value: Any, texts: Mapping[str, Any], path: Path) -> OptimizerStateDict:
    """Return the optimizer in a file as a state.

    `texts`: descriptions that mlstate recorded in the file, such as its type and step. Raises
    FormatError if `value` is malformed.
    """
    if isinstance(value, OptimizerStateDict):
        return value
    tree = _unflatten(value, path) if _is_flat_optimizer(value) else value
    optimizer = _optimizer_from(tree, path)
    if "optimizer" in texts:
        empty_state = restore({}, texts["optimizer"], str(path))
        if isinstance(empty_state, OptimizerStateDict):
            optimizer.optimizer_type, optimizer.step = empty_state.optimizer_type, empty_state.step
            optimizer.learning_rate = empty_state.learning_rate
            optimizer.param_groups = empty_state.param_groups
    return optimizer


def _is_recorded(tree: Mapping[Any, Any]) -> bool:
    """Return whether mlstate wrote a tree, so that all its entries have the names of `tree_of`."""
    record = tree.get(RECORD)
    return isinstance(record, Mapping) and "version" in record


def _find_parts(tree: Mapping[Any, Any]) -> tuple[list[str], list[str]]:
    """Return the keys of a file's dict that hold models, and those that hold optimizers.

    Only keys that programs commonly use are recognized; several optimizers with numbers are not.
    """
    if _is_recorded(tree):
        return [*tree.keys() & {MODEL}], [*tree.keys() & {OPTIMIZER}]
    numbered = [key for key in tree if isinstance(key, str) and re.match(r"optimizer_\d+\Z", key)]
    listed = tree.get(_LIGHTNING)
    optimizers = [*_OPTIMIZER_KEYS, *(numbered if len(numbered) == 1 else [])]
    optimizers = [key for key in optimizers if _is_optimizer(tree.get(key))]
    if isinstance(listed, list) and len(listed) == 1 and _is_optimizer(listed[0]):
        optimizers.append(_LIGHTNING)
    return [key for key in _MODEL_KEYS if isinstance(tree.get(key), Mapping)], optimizers


def _wrapper_of(tree: Mapping[Any, Any]) -> Any:
    """Return the key of the entry that holds model and optimizer, or None.

    torch's tutorials wrap both in one entry, as in ``{"app": AppState(…)}``. With several such
    entries, or equal keys inside and outside, no entry is chosen.
    """
    if _is_recorded(tree) or any(_find_parts(tree)):
        return None
    wrappers = [
        key
        for key, value in tree.items()
        if isinstance(value, Mapping) and not _is_optimizer(value) and any(_find_parts(value))
    ]
    if len(wrappers) != 1 or tree.keys() & tree[wrappers[0]].keys():
        return None
    return wrappers[0]


def unwrap(tree: Mapping[Any, Any], wrapper: Any) -> Mapping[Any, Any]:
    """Return a copy of `tree` with the entries inside its entry `wrapper` instead of that entry.

    The tree itself is returned if it lacks the entry. Of a key that both have, the inner value is
    taken.
    """
    if wrapper not in tree:
        return tree
    return {**{key: value for key, value in tree.items() if key != wrapper}, **tree[wrapper]}


def parts_of(tree: Any, path: Path) -> Parts:
    """Divide a file's content into model, optimizer, metadata and named states.

    Model and optimizer are None if the file has none, or several models with optimizers. `path`: of
    the file, for the FormatError if the content is malformed.
    """
    if isinstance(tree, OptimizerStateDict):
        return Parts(None, tree, {}, {})
    if isinstance(tree, StateDict):
        return Parts(tree, None, {}, {})
    if not isinstance(tree, Mapping):
        raise format_error(path, f"holds a {type(tree).__name__}, not a dict of tensors")
    _check_size(tree, path)
    if _is_optimizer(tree):
        return Parts(None, _restore_optimizer(tree, {}, path), {}, {})
    tree = unwrap(tree, _wrapper_of(tree))
    models, optimizers = _find_parts(tree)
    metadata: dict[str, Any] = {}
    if not models and not optimizers and not _is_recorded(tree):
        if any(isinstance(value, Mapping) and _find_parts(value)[1] for value in tree.values()):
            # several models with their optimizers: none of them is the model
            return Parts(None, None, metadata, _add_rest(tree, metadata, path))
        state, others = _state_from(tree, path)
        return Parts(state, None, metadata, _add_rest(others, metadata, path))
    used = {*models[:1], *optimizers[:1]}
    rest = {key: value for key, value in tree.items() if key not in used}
    texts = rest.pop(RECORD, {})
    if not isinstance(texts, Mapping) or not all(isinstance(v, str) for v in texts.values()):
        raise format_error(path, f"entry {RECORD!r} does not describe the file")
    metadata = _metadata_from(rest.pop("metadata"), path) if "metadata" in rest and texts else {}
    model, others = _restore_model(tree[models[0]], texts, path) if models else (None, {})
    optimizer = None
    if optimizers:
        value = tree[optimizers[0]]
        value = value[0] if isinstance(value, list) else value
        optimizer = _restore_optimizer(value, texts, path)
    for name, value in others.items():  # named states below the model's key
        key = f"{models[0]}.{name}"
        if key in rest:
            raise format_error(path, f"two entries have the name {key!r}")
        rest[key] = value
    return Parts(model, optimizer, metadata, _add_rest(rest, metadata, path))


# ---- a choice of entries ----


def _outline(paths: list[tuple[Any, ...]]) -> Any:
    """Return a nested tree whose values are None, and whose leaves have the given `paths`.

    A path is a tuple of keys and list indices; a level with indices only becomes a list.
    """
    if paths == [()]:
        return None
    inner: dict[Any, list[tuple[Any, ...]]] = {}
    for path in paths:
        if path:
            inner.setdefault(path[0], []).append(path[1:])
    if all(type(key) is int for key in inner):
        return [_outline(below) for below in inner.values()]
    return {key: _outline(below) for key, below in inner.items()}


def record_empty(tree: dict[str, Any]) -> None:
    """Record the paths of the empty dicts of a tree in its entry `RECORD`, if it has both.

    torch leaves these dicts out of distributed checkpoints. Raises CompatibilityError for one in a
    list, because torch cannot read a list that lacks an item.
    """
    paths: list[list[str]] = []

    def add_paths(value: Any, path: list[str], is_listed: bool) -> None:
        if isinstance(value, list):
            for each in value:
                add_paths(each, path, True)
        elif isinstance(value, Mapping):
            for key, each in value.items():
                add_paths(each, [*path, str(key)], is_listed)
            if not value and is_listed:
                raise CompatibilityError(
                    f"{'.'.join(path)} is a list with an empty dict, which torch's distributed "
                    "checkpoints cannot hold: convert to a checkpoint of mlstate or a .pt file, or "
                    "leave it out (--skip)"
                )
            if not value:
                paths.append(path)

    add_paths(tree, [], False)
    if paths and RECORD in tree:
        tree[RECORD][_EMPTY] = json.dumps(paths)


def restore_empty(tree: dict[str, Any], path: Path) -> None:
    """Add the empty dicts that `record_empty` recorded in a tree that torch read.

    `path`: of the file, for the FormatError if the record is malformed.
    """
    text = tree[RECORD].get(_EMPTY, "[]") if _is_recorded(tree) else "[]"
    try:
        for keys in json.loads(text):
            level: Any = tree
            for key in keys:
                level = level.setdefault(key, {})
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise format_error(path, f"entry {RECORD!r} does not describe the file") from None


class Choice(NamedTuple):
    """The keys of a distributed checkpoint to read, and how to understand the tree of them."""

    keys: set[str]
    wrapper: Any = None  # entry that holds the others
    empty: Mapping[Any, Any] = MappingProxyType({})  # model and optimizer, for those not read

    def complete(self, tree: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return the tree that was read, with empty parts instead of those that were not."""
        return {**self.empty, **unwrap(tree, self.wrapper)}


def choose_keys(paths: Mapping[str, tuple[Any, ...]], selection: Selection) -> Choice:
    """Return the keys of a distributed checkpoint to read.

    `paths`: of each key in the tree, as tuples of keys and list indices. `selection`: names of the
    entries that the caller wants. Without a model or optimizer in the tree, all keys are read, and
    always the entry `RECORD`. Raises FormatError for too many levels.
    """
    if any(len(path) > _DEEPEST for path in paths.values()):
        raise FormatError(f".metadata has a value more than {_DEEPEST} levels deep")
    tree = _outline([*paths.values()])
    if not isinstance(tree, Mapping) or _is_optimizer(tree):
        return Choice(set(paths))
    wrapper = _wrapper_of(tree)
    models, optimizers = _find_parts(unwrap(tree, wrapper))
    if not models and not optimizers:
        return Choice(set(paths))
    names: dict[Any, str] = {RECORD: RECORD}
    names |= {**dict.fromkeys(models[:1], MODEL), **dict.fromkeys(optimizers[:1], OPTIMIZER)}
    chosen = set()
    for key, path in paths.items():
        entry = path[1] if wrapper is not None and path[0] == wrapper else path[0]
        if entry == RECORD or selection.takes(names.get(entry, str(entry))):
            chosen.add(key)
    no_optimizer: Any = {"state": {}, "param_groups": []}
    empty: dict[Any, Any] = {key: {} for key in models[:1]}
    for key in optimizers[:1]:
        empty[key] = [no_optimizer] if key == _LIGHTNING else no_optimizer
    return Choice(chosen, wrapper, empty)
