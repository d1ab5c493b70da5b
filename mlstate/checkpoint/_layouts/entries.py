"""Which entries of another program's tree are the model, the optimizer, named states, metadata.

==========================================================  ==================================
entry                                                       is
==========================================================  ==================================
`_MODEL_KEYS`: a dict; ``module`` with DeepSpeed's marks    the model
`_OPTIMIZER_KEYS`, one ``optimizer_N`` or list of one       the optimizer
tensors next to optimizers without a model                  the model
without a model and optimizers: all tensors, at any level   the model
a dict that alone holds model and optimizer                 as if its entries were at the top
numbers, bool, str and None, among tensors or at the top    metadata
``_extra_state`` of a module that is not a tensor           an entry of the model's module
all others                                                  named states
==========================================================  ==================================

Values that mlstate cannot hold are left out with an error each, which the caller raises if they
are asked for.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._common.arrays import is_torch
from ..._common.backend import TensorBackend, backend_of, torch_backend
from ..._common.store_error import format_error
from ...errors import CompatibilityError, FormatError, MLStateError
from ...state._kind import restore
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import StateDict
from .._files.backend import PtBackend
from .._files.parts import MODEL, OPTIMIZER, STATES, Parts, Selection, Unreadable
from .._states.modules import entries_name, metadata_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


_MODEL_KEYS = ("model", "state_dict", "model_state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_DEEPSPEED_MODEL, _DEEPSPEED = "module", ("buffer_names", "param_shapes", "ds_version")
_NUMBERED = re.compile(r"optimizer_\d+\Z")
LISTED = "optimizer_states"  # key of Lightning: a list, with an item for each optimizer
FLAT = ("state.", "param_groups.")  # prefixes of keys in an optimizer that torch has flattened
_EXTRA = "_extra_state"  # last part of the name of a module's own state
# Key of the entry with the classes of the state dicts, which mlstate adds to its torch files.
RECORD = "mlstate"
# Deeper trees are not state dicts, but dicts that contain themselves.
DEEPEST = 64
_MOST_VALUES = 10_000_000


class PartKeys(NamedTuple):
    """The keys of a tree's model and optimizer; None without one."""

    model: Any = None
    optimizer: Any = None
    at_top: frozenset[Any] = frozenset()  # keys that are entries of the model themselves

    def part_names(self) -> dict[Any, str]:
        """Return the name of the part by key."""
        names = dict.fromkeys(self.at_top, MODEL)
        if self.model is not None:
            names[self.model] = MODEL
        if self.optimizer is not None:
            names[self.optimizer] = OPTIMIZER
        return names


# ---- errors ----


def malformed(path: object, reason: str, name: str | None = None) -> FormatError:
    """Return the error for a file with damaged or malformed content, or such a part, `name`."""
    return format_error(f"{path}: {reason}", str(path), name)


def refusal(path: object, reason: str, name: str | None = None) -> CompatibilityError:
    """Return the error for an intact file with a value that mlstate cannot hold, of this `name`."""
    return CompatibilityError(f"{path}: {reason}", path=str(path), name=name)


# ---- the rules ----


def is_tensor(value: object) -> bool:
    """Return whether a value of a tree is a tensor or array."""
    return is_torch(value) or isinstance(value, np.ndarray)


def _is_extra(name: object) -> bool:
    return str(name).rpartition(".")[2] == _EXTRA


def is_flat_optimizer(value: Any) -> bool:
    """Return whether a value is an optimizer of torch's ``flatten_optimizer_state_dict``."""
    return (
        isinstance(value, Mapping)
        and all(isinstance(key, str) and key.startswith(FLAT) for key in value)
        and any(key.startswith(FLAT[1]) for key in value)
    )


def is_optimizer(value: Any) -> bool:
    """Return whether a value is an optimizer, in a form of torch or of mlstate."""
    return (
        isinstance(value, OptimizerStateDict)
        or is_flat_optimizer(value)
        or (isinstance(value, Mapping) and isinstance(value.get("param_groups"), list))
    )


def is_recorded(tree: Mapping[Any, Any]) -> bool:
    """Return whether mlstate wrote a tree, so that its entries have the names of the parts."""
    record = tree.get(RECORD)
    return isinstance(record, Mapping) and "version" in record


def _optimizers_in(value: Any) -> list[Any]:
    """Return the optimizers in a nested value."""
    if is_optimizer(value):
        return [value]
    return [optimizer for each in _items(value) for optimizer in _optimizers_in(each)]


def _parameter_count(optimizer: Any) -> int:
    """Return the number of parameters of an optimizer, of those with states if only these count."""
    if is_flat_optimizer(optimizer):
        return len({key.rpartition(".")[0] for key in optimizer if key.startswith(FLAT[1])})
    groups = getattr(optimizer, "param_groups", None) or optimizer.get("param_groups", ())
    listed = sum(len(group.get("params") or ()) for group in groups if isinstance(group, Mapping))
    return max(listed, len(optimizer.get("state") or ()))


def _keys_at_top(tree: Mapping[Any, Any]) -> frozenset[Any]:
    """Return the keys of a tree that are entries of the model of its optimizers.

    Tensors are a model only if there are as many as the optimizers have parameters: otherwise they
    are other values of the program, such as the state of a generator.
    """
    tensors = {key for key, value in tree.items() if is_tensor(value)}
    has_axes = any(tree[key].ndim for key in tensors)
    optimizers = _optimizers_in(tree) if has_axes else []
    if not optimizers or len(tensors) < sum(map(_parameter_count, optimizers)):
        return frozenset()
    return frozenset(tensors | {key for key in tree if _is_extra(key)})


def _item_of(value: Any) -> Any:
    """Return the item of a list of one, and any other value itself."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def find_parts(tree: Mapping[Any, Any], *, is_divided: bool = False) -> PartKeys:
    """Return the keys of a tree's model and optimizer; only those that programs commonly use.

    `is_divided`: each entry has its own file, so that a tensor at the top is a state.
    """
    if is_recorded(tree):
        model, optimizer = (key if key in tree else None for key in (MODEL, OPTIMIZER))
        return PartKeys(model, optimizer)
    names = _MODEL_KEYS if tree.keys().isdisjoint(_DEEPSPEED) else (*_MODEL_KEYS, _DEEPSPEED_MODEL)
    model = next((name for name in names if isinstance(tree.get(name), Mapping)), None)
    numbered = [key for key in tree if isinstance(key, str) and _NUMBERED.match(key)]
    names = (*_OPTIMIZER_KEYS, *(numbered if len(numbered) == 1 else ()), LISTED)
    optimizer = next((name for name in names if is_optimizer(_item_of(tree.get(name)))), None)
    has_model = model is not None or is_divided
    return PartKeys(model, optimizer, frozenset() if has_model else _keys_at_top(tree))


def wrapper_of(tree: Mapping[Any, Any]) -> Any:
    """Return the key of the entry that holds model and optimizer, or None.

    torch's tutorials wrap both in one entry, as in ``{"app": AppState(…)}``. With several such
    entries, or equal keys inside and outside, no entry is chosen.
    """
    if is_recorded(tree) or any(find_parts(tree).part_names()):
        return None
    wrappers = [
        key
        for key, value in tree.items()
        if isinstance(value, Mapping) and not is_optimizer(value) and find_parts(value).part_names()
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


# ---- values ----


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
        if depth > DEEPEST or left < 0:
            limit = f"{DEEPEST} levels deep" if left >= 0 else f"{_MOST_VALUES:,} values"
            raise malformed(path, f"{name[:60]!r} is nested more than {limit}")
        stack += [(each, name, depth + 1) for each in _items(value)]


def _items(value: Any) -> Any:
    """Return the values inside a container; () for other values."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the leaves of a tree; names are keys joined by dots.

    An extra state is a leaf. `prefix`: name of the tree itself, or "".
    """
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for key, value in items:
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping | list | tuple) and not _is_extra(name):
            yield from _leaves(value, name)
        else:
            yield name, value


def find_unreadable(value: Any) -> str:
    """Return why a nested value cannot be read: the class of an object in it; "" if it can."""
    if isinstance(value, Unreadable):
        return value.reason
    return next((reason for each in _items(value) if (reason := find_unreadable(each))), "")


def _number_or_text(value: Any) -> Any:
    """Return a number, bool, str or None, also for a tensor without axes, or NotImplemented."""
    if is_torch(value) and not isinstance(value, Unreadable):
        is_number = value.dim() == 0 and not value.is_complex() and not value.is_meta
        return value.item() if is_number else NotImplemented
    return value if value is None or isinstance(value, bool | int | float | str) else NotImplemented


def _item(value: Any) -> Any:
    """Return the number that a tensor without axes is, for JSON; raise TypeError for others."""
    if (number := _number_or_text(value)) is NotImplemented:
        raise TypeError
    return number


def _state_value(value: Any) -> Any:
    """Return a value for a named state, with namespaces as dicts."""
    if isinstance(value, Namespace):
        value = vars(value)
    if type(value) is dict:
        return {key: _state_value(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_state_value(each) for each in value)
    return value


# ---- sorting ----


class _Sorter:
    """The parts of one file, while its entries are sorted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}
        self.unreadable: dict[str, dict[str, MLStateError]] = {MODEL: {}, OPTIMIZER: {}, STATES: {}}

    def parts(self, model: StateDict | None, optimizer: OptimizerStateDict | None) -> Parts:
        """Return all that was sorted."""
        errors = {name: each for name, each in self.unreadable.items() if each}
        return Parts(model, optimizer, self.metadata, self.states, self.numbers, errors)

    def _note_unreadable(self, part: str, name: str, reason: str) -> None:
        """Note that an entry cannot be read, and why."""
        remedy = "names=, or --skip of mlstate convert, read the others without it"
        text = f"{name!r} is {reason}; {remedy}"
        self.unreadable[part][name] = refusal(self.path, text, name)

    def twice(self, name: str) -> CompatibilityError:
        """Return the error for two entries of one name."""
        return refusal(self.path, f"two entries have the name {name!r}", name)

    def model_of(self, tree: Mapping[Any, Any], text: Any) -> tuple[StateDict, dict[str, Any]]:
        """Return a model, and its plain values, which are not weights.

        `tree`: its tensors, at any level. `text`: mlstate's description of its class, or None.
        """
        if isinstance(tree, StateDict):
            return tree, {}
        tensors: dict[str, Any] = {}
        others: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for name, value in _leaves(tree, ""):
            if name in tensors or name in others or name in extra:
                raise self.twice(name)
            if reason := find_unreadable(value) or _reason_of(name, value):
                self._note_unreadable(MODEL, name, reason)
            elif is_tensor(value):
                tensors[name] = value
            elif _is_extra(name):
                extra[name] = _state_value(value)
            else:
                others[name] = value
        self.numbers = {n: v for n, v in others.items() if _number_or_text(v) is not NotImplemented}
        if extra:
            metadata = metadata_of(getattr(tree, "_metadata", None))
            self.states[entries_name(None)] = {"entries": extra, "metadata": metadata}
        if any(map(is_torch, tensors.values())):
            tensors = torch_backend("files of torch", TensorBackend).arrays_of(tensors)
        return restore(tensors, text, str(self.path)), others

    def optimizer_of(
        self, value: Any, text: Any, part: str, name: str
    ) -> OptimizerStateDict | None:
        """Return an optimizer as a state; None if mlstate cannot hold it.

        `text`: mlstate's description of its type and step, or None. `part`, `name`: where the error
        of an optimizer that cannot be read is noted.
        """
        if isinstance(value, OptimizerStateDict):
            return value
        try:
            optimizer = torch_backend("files of torch", PtBackend).optimizer_of(value, self.path)
        except CompatibilityError as error:
            self.unreadable[part][name] = error
            return None
        described = restore(dict(optimizer), text, str(self.path))
        return described if isinstance(described, OptimizerStateDict) else optimizer

    def add_rest(self, rest: Mapping[Any, Any]) -> None:
        """Add the entries that are neither model nor optimizer: metadata, and named states.

        Optimizers become `OptimizerStateDict`; a list of several gets names with numbers.
        """
        for key, value in rest.items():
            name, scalar = str(key), _number_or_text(value)
            is_plain = scalar is not NotImplemented and not isinstance(value, np.generic)
            if is_plain and name not in self.metadata:
                self.metadata[name] = scalar
                continue
            numbered = {name: value}
            if key == LISTED and value and all(map(is_optimizer, value)):
                by_number = {f"optimizer_{number}": each for number, each in enumerate(value)}
                numbered = numbered if rest.keys() & by_number else by_number
            for numbered_name, each in numbered.items():
                self._add_state(numbered_name, each)

    def _add_state(self, name: str, value: Any) -> None:
        if name in self.states:
            raise self.twice(name)
        if "/" in name:
            self._note_unreadable(STATES, name, "a name with '/', which mlstate cannot store")
        elif reason := find_unreadable(value):
            self._note_unreadable(STATES, name, reason)
        elif is_optimizer(value):
            optimizer = self.optimizer_of(value, None, STATES, name)
            if optimizer is not None:
                self.states[name] = optimizer
        else:
            self.states[name] = _state_value(value)


def _reason_of(name: str, value: Any) -> str:
    """Return why a leaf of a model cannot be read; "" if it can: a tensor, or a plain value."""
    if is_torch(value):
        try:
            backend_of(value, TensorBackend).refuse_unstorable(name, value)
        except CompatibilityError as error:
            return str(error).removeprefix(f"{name!r} is ")
        return ""
    classes = str | bytes | bytearray | BytesIO | bool | int | float | complex | np.generic
    if value is None or isinstance(value, classes) or is_tensor(value) or _is_extra(name):
        return ""
    return f"a {type(value).__name__}, which is neither a tensor nor a plain value"


def sort_entries(tree: Any, path: Path, *, is_divided: bool = False) -> Parts:
    """Divide a file's content into model, optimizer, metadata and named states.

    Model and optimizer are None if the file has none, or several models with optimizers. `path`: of
    the file, for errors. `is_divided`: each entry has its own file, and only an entry named as a
    model is one. Raises CompatibilityError if the content is not a dict of tensors, and
    FormatError if it is malformed.
    """
    sorter = _Sorter(path)
    if isinstance(tree, StateDict):  # of torch.save
        is_moments = isinstance(tree, OptimizerStateDict)
        return sorter.parts(*((None, tree) if is_moments else (tree, None)))
    if not isinstance(tree, Mapping):
        kind = getattr(tree, "reason", f"a {type(tree).__name__}, not a dict of tensors")
        raise refusal(path, f"holds {kind}")
    _check_size(tree, path)
    if is_optimizer(tree):
        return sorter.parts(None, sorter.optimizer_of(tree, None, OPTIMIZER, ""))
    tree = tree if is_divided else unwrap(tree, wrapper_of(tree))
    keys = find_parts(tree, is_divided=is_divided)
    if keys.part_names() or is_recorded(tree):
        return _sort_parts(sorter, tree, keys)
    if is_divided or _optimizers_in(tree):
        # of several models with their optimizers, none is the model
        sorter.add_rest(tree)
        return sorter.parts(None, None)
    model, others = sorter.model_of(tree, None)
    sorter.add_rest(others)
    return sorter.parts(model, None)


def _sort_parts(sorter: _Sorter, tree: Mapping[Any, Any], keys: PartKeys) -> Parts:
    """Divide a tree with a model or optimizer, whose keys are `keys`."""
    names = keys.part_names()
    rest = {key: value for key, value in tree.items() if key not in names}
    texts = rest.pop(RECORD, {})
    if not isinstance(texts, Mapping) or not all(isinstance(v, str) for v in texts.values()):
        raise malformed(sorter.path, f"entry {RECORD!r} does not describe the file")
    if texts and "metadata" in rest:
        try:
            sorter.metadata = dict(json.loads(json.dumps(rest.pop("metadata"), default=_item)))
        except (TypeError, ValueError):
            raise malformed(sorter.path, "entry 'metadata' does not hold plain values") from None
    model = optimizer = None
    if MODEL in names.values():
        top = {key: value for key, value in tree.items() if key in keys.at_top}
        inner = top if keys.model is None else tree[keys.model]
        model, others = sorter.model_of(inner, texts.get(MODEL))
        for name, value in others.items():  # plain values below the model's key
            key = name if keys.model is None else f"{keys.model}.{name}"
            if key in rest:
                raise sorter.twice(key)
            rest[key] = value
    if keys.optimizer is not None:
        value = _item_of(tree[keys.optimizer])
        optimizer = sorter.optimizer_of(value, texts.get(OPTIMIZER), OPTIMIZER, "")
    sorter.add_rest(rest)
    return sorter.parts(model, optimizer)


# ---- distributed checkpoints ----


def _outline(paths: list[tuple[tuple[Any, ...], int | None]]) -> Any:
    """Return a nested tree whose leaves have the given paths; a leaf is an empty array or None.

    A path is a tuple of keys and list indices, with the number of axes of a tensor, or None; a
    level with indices only becomes a list.
    """
    if len(paths) == 1 and not paths[0][0]:
        axes = paths[0][1]
        return None if axes is None else np.empty((0,) * min(axes, 1))
    inner: dict[Any, list[tuple[tuple[Any, ...], int | None]]] = {}
    for path, axes in paths:
        if path:
            inner.setdefault(path[0], []).append((path[1:], axes))
    if all(type(key) is int for key in inner):
        return [_outline(below) for below in inner.values()]
    return {key: _outline(below) for key, below in inner.items()}


def choose_keys(
    paths: Mapping[str, tuple[Any, ...]], axes: Mapping[str, int], selection: Selection
) -> tuple[set[str], Callable[[Mapping[Any, Any]], Mapping[Any, Any]]]:
    """Return the keys of a distributed checkpoint to read, and a function for the tree of them.

    The function returns the tree with empty parts instead of those that were not read. `paths`: of
    each key in the tree, as tuples of keys and list indices. `axes`: numbers of axes of the
    tensors. `selection`: names of the entries that the caller wants. Without a model or optimizer
    in the tree, all keys are read, and always the entry `RECORD`. Raises FormatError for too many
    levels.
    """
    if any(len(path) > DEEPEST for path in paths.values()):
        raise FormatError(f".metadata has a value more than {DEEPEST} levels deep")
    tree = _outline([(path, axes.get(key)) for key, path in paths.items()])
    if not isinstance(tree, Mapping) or is_optimizer(tree):
        return set(paths), dict
    wrapper = wrapper_of(tree)
    inner = unwrap(tree, wrapper)
    keys = find_parts(inner)
    if keys == PartKeys():
        return set(paths), dict
    names = {**keys.part_names(), RECORD: RECORD}
    chosen = set()
    for key, path in paths.items():
        entry = path[1] if wrapper is not None and path[0] == wrapper else path[0]
        if entry == RECORD or selection.takes(names.get(entry, str(entry))):
            chosen.add(key)
    empty: dict[Any, Any] = {} if keys.model is None else {keys.model: {}}
    if keys.optimizer is not None:
        no_optimizer: Any = {"state": {}, "param_groups": []}
        is_listed = isinstance(inner[keys.optimizer], list)
        empty[keys.optimizer] = [no_optimizer] if is_listed else no_optimizer
    return chosen, lambda read: {**empty, **unwrap(read, wrapper)}
