"""Which keys of a distributed checkpoint to read, for the entries that the caller wants."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import FormatError
from .entries import DEEPEST, LISTED, RECORD, PartKeys, find_parts, is_optimizer, unwrap, wrapper_of

if TYPE_CHECKING:
    from .._files.parts import Selection


class Choice(NamedTuple):
    """The keys of a distributed checkpoint to read, and how to understand the tree of them."""

    keys: set[str]
    wrapper: Any = None  # entry that holds the others
    empty: Mapping[Any, Any] = MappingProxyType({})  # model and optimizer, for those not read

    def complete(self, tree: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return the tree that was read, with empty parts instead of those that were not."""
        return {**self.empty, **unwrap(tree, self.wrapper)}


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
) -> Choice:
    """Return the keys of a distributed checkpoint to read.

    `paths`: of each key in the tree, as tuples of keys and list indices. `axes`: numbers of axes of
    the tensors. `selection`: names of the entries that the caller wants. Without a model or
    optimizer in the tree, all keys are read, and always the entry `RECORD`. Raises FormatError for
    too many levels.
    """
    if any(len(path) > DEEPEST for path in paths.values()):
        raise FormatError(f".metadata has a value more than {DEEPEST} levels deep")
    tree = _outline([(path, axes.get(key)) for key, path in paths.items()])
    if not isinstance(tree, Mapping) or is_optimizer(tree):
        return Choice(set(paths))
    wrapper = wrapper_of(tree)
    keys = find_parts(unwrap(tree, wrapper))
    if keys == PartKeys():
        return Choice(set(paths))
    names = {**keys.part_names(), RECORD: RECORD}
    chosen = set()
    for key, path in paths.items():
        entry = path[1] if wrapper is not None and path[0] == wrapper else path[0]
        if entry == RECORD or selection.takes(names.get(entry, str(entry))):
            chosen.add(key)
    empty: dict[Any, Any] = {} if keys.model is None else {keys.model: {}}
    if keys.optimizer is not None:
        no_optimizer: Any = {"state": {}, "param_groups": []}
        empty[keys.optimizer] = [no_optimizer] if keys.optimizer == LISTED else no_optimizer
    return Choice(chosen, wrapper, empty)
