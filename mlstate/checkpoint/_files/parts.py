"""`Parts`, the content of any file: model, optimizer, metadata, others; choice by ``--only``.

An entry that mlstate does not read is listed with its error, which is raised only for who asks for
the entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._common.arrays import is_torch
from ..._common.text import names_hint
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import StateDict
from .._states.modules import entries_name, split_entries

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ...errors import MLStateError

MODEL, OPTIMIZER, STATES = "model", "optimizer", "states"


class Unreadable:
    """A value in a file that cannot be created without its class, in place of this value."""

    def __init__(self, reason: str) -> None:
        """Keep the text "a <class>, which is ..." for errors."""
        self.reason = reason


class Parts(NamedTuple):
    """The content of a file: model, optimizer, plain values, and all other values by name."""

    model: StateDict | None
    optimizer: OptimizerStateDict | None
    metadata: dict[str, Any]
    states: dict[str, Any]
    # plain values among the model's tensors, by their names there; they are metadata too
    numbers: Mapping[str, Any] = MappingProxyType({})
    # errors of the entries that cannot be read, by name, for `MODEL` (its tensors), `OPTIMIZER`
    # (the name is "": an optimizer is read as a whole) and `STATES`
    unreadable: Mapping[str, Mapping[str, MLStateError]] = MappingProxyType({})

    @property
    def step(self) -> int | None:
        """The step that the file's maker stored, or else the optimizer's; None without one.

        Of several values, the first that is an int from 0 to 2**63 - 1 is used.
        """
        steps = map(self.metadata.get, ("step", "global_step", "global_steps"))
        for step in (*steps, getattr(self.optimizer, "step", 0) or None):
            if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 63:
                return step
        return None

    def without_empty(self) -> Parts:
        """Return the parts with None for a model or an optimizer that has no tensors."""
        return self._replace(model=self.model or None, optimizer=self.optimizer or None)

    def refuse_unreadable(self, kinds: Iterable[str] = (MODEL, OPTIMIZER, STATES)) -> Parts:
        """Return the parts; raise the error of the first entry of `kinds` that cannot be read."""
        for kind in kinds:
            for error in self.unreadable.get(kind, {}).values():
                raise error
        return self

    def module_entries(self, names: Collection[str]) -> dict[str, Any]:
        """Return the model's entries that are not tensors, for a module to load.

        These are extra states, and the plain values that the module has too; `names`: of the
        entries of its ``state_dict()``.
        """
        _, entries = split_entries(self.states)
        extra, _ = entries.get(None, ({}, {}))
        return {**{name: self.numbers[name] for name in names if name in self.numbers}, **extra}


class Selection:
    """The entries to convert: ``model``, ``optimizer``, and others by name.

    `only` are the entries to keep, all if empty; `skip` those to leave out.
    """

    def __init__(self, only: Iterable[str] = (), skip: Iterable[str] = ()) -> None:
        self.only, self.skip = set(only), set(skip)
        self._seen: set[str] = set()

    def takes(self, name: str) -> bool:
        """Return whether the entry `name` is converted, and note that the source has this entry."""
        self._seen.add(name)
        return name not in self.skip and (not self.only or name in self.only)

    def apply(self, parts: Parts, path: Any) -> Parts:
        """Return the entries of `parts` to convert, without the others.

        `path`: of the source, for errors. If only one other entry is chosen, and it is a dict of
        tensors, it becomes the model. A name of the model or the optimizer does not choose metadata
        of that name. Raises ValueError for a name of `only` or `skip` that the source lacks, or
        that is of such a part and of a named state.
        """
        part_names = {MODEL} if parts.model is not None else set()
        if parts.optimizer is not None or OPTIMIZER in parts.unreadable:
            part_names.add(OPTIMIZER)
        unread_states = parts.unreadable.get(STATES, {})
        self._seen |= {*part_names, *parts.metadata, *parts.states, *unread_states}
        self._seen |= {"step"} if parts.step is not None else set()
        self._check_names(part_names & parts.states.keys(), path)
        chosen = set(filter(self.takes, part_names))
        metadata = {
            name: value
            for name, value in parts.metadata.items()
            if (not self.only if name in part_names else self.takes(name))
        }
        states, _ = split_entries(parts.states)
        entries = {name: value for name, value in parts.states.items() if name not in states}
        errors = {name: each for name, each in parts.unreadable.items() if name in chosen}
        if left := self._chosen(unread_states):
            errors[STATES] = left
        selected = Parts(
            parts.model if MODEL in chosen else None,
            parts.optimizer if OPTIMIZER in chosen else None,
            metadata,
            self._chosen(states),
            parts.numbers if MODEL in chosen else {},
            errors,
        )
        return self._with_entries(selected, entries)

    def _chosen(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if self.takes(name)}

    def _check_names(self, doubled: set[str], path: Any) -> None:
        """Raise ValueError for a name to keep or to skip that the source lacks, or has twice.

        `doubled`: names of such a part and of a named state.
        """
        choice = self.only | self.skip
        if both := sorted(doubled & choice):
            raise ValueError(f"{path} has the {both[0]} and a named state of the name {both[0]!r}")
        if unknown := sorted(choice - self._seen):
            names = sorted(self._seen)
            raise ValueError(
                f"{path} has no entry {unknown[0]!r}; it has {', '.join(names)}"
                f"{names_hint(unknown[0], names, listed=False)}"
            )

    def _with_entries(self, selected: Parts, entries: Mapping[str, Any]) -> Parts:
        """Return the `selected` parts, with the `entries` of their modules.

        These are entries of modules that are not tensors, by `entries_name`. They follow their
        module, unless `skip` has their name. A dict of tensors selected alone becomes the model.
        """
        owners: dict[str | None, str | None] = {name: name for name in selected.states}
        if selected.model is not None:
            owners[None] = None
        elif self.only and selected.optimizer is None and len(owners) == 1:
            [(name, value)] = selected.states.items()
            if isinstance(value, OptimizerStateDict):
                return selected._replace(optimizer=value, states={})
            if is_flat(value):
                selected = selected._replace(model=StateDict(value), states={})
                owners = {name: None}
        followed = {
            entries_name(new): entries[old_name]
            for old, new in owners.items()
            if (old_name := entries_name(old)) in entries and old_name not in self.skip
        }
        return selected._replace(states={**selected.states, **followed})


def is_flat(value: Any) -> bool:
    """Return whether a value is a dict of arrays or tensors by name, without nested dicts.

    An empty dict is not, unless it is a `StateDict`.
    """
    return isinstance(value, StateDict) or (
        isinstance(value, Mapping)
        and bool(value)
        and all(
            isinstance(key, str) and (is_torch(each) or hasattr(each, "__array_interface__"))
            for key, each in value.items()
        )
    )
