"""Names of a checkpoint's tensors in model, optimizer, states; `rename=` of a load.

The names are the stored keys, except after a rename, and without the prefix of a named state.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import CompatibilityError
from ..state._kind import restore_kind
from ..state._load_into import check_rules, unused_rules

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from ._sources.protocol import Index
    from ._store.manifest import Manifest

OPTIMIZER = 1  # number of the optimizer's section
OPTIMIZER_STATE = "optimizer"  # named state of one that a table of tensors cannot hold
STATES = 2  # number of the section of named states


class Section:
    """The tensors of the model, the optimizer, or one named state."""

    __slots__ = (
        "_prefix", "_stored", "is_optimizer", "kind", "label", "names", "number", "saved", "state"
    )  # fmt: skip

    def __init__(
        self,
        label: str,
        number: int,
        kind: dict[str, Any] | None,
        keys: Iterable[str],
        prefix: str = "",
    ) -> None:
        """Create the section of the index keys `keys`.

        `label`: its name in errors. `number`: of the index's section. `kind`: description in the
        manifest, None if it was not saved. `prefix`: "<state>/", which the names of tensors lack.
        """
        self.label = label  # name in errors: model, optimizer or states['...']
        self.number = number  # of the index's section
        self.kind = kind  # description in the manifest; None if it was not saved
        # whether the tensors are states of an optimizer
        self.is_optimizer = number == OPTIMIZER or (kind or {}).get("kind") == "optimizer"
        self.names = [key[len(prefix) :] for key in keys]
        self.state = prefix[:-1] or None  # name of the named state
        self.saved: Any = None  # the whole state, of a source that is in memory
        self._prefix = prefix
        self._stored: dict[str, str] = {}  # stored names by names, if they differ

    def keys(self, names: Iterable[str]) -> list[str]:
        """Return the index keys of the tensors `names`."""
        if not self._stored and not self._prefix:
            return list(names)
        if not self._stored:
            return [self._prefix + name for name in names]
        return [self._prefix + self._stored.get(name, name) for name in names]

    def key_of(self, stored: str) -> str:
        """Return the index key of a tensor by its stored name, without renaming."""
        return self._prefix + stored

    def by_key(self, arrays: dict[str, object], names: Iterable[str]) -> dict[str, Any]:
        """Return the arrays of the tensors `names` by their index keys.

        If names and keys are equal, this is `arrays` itself, which may have other tensors too.
        """
        if not self._stored and not self._prefix:
            return arrays
        names = list(names)
        return dict(zip(self.keys(names), (arrays[name] for name in names), strict=True))

    def names_by_key(self) -> dict[str, str]:
        """Return the names by their keys in the index."""
        return dict(zip(self.keys(self.names), self.names, strict=True))

    def with_values(self, names: dict[str, str | None]) -> Section:
        """Return a copy with other names of some tensors, by stored name; None: it has none.

        So codes get the names of their values, and scales have none.
        """
        section = copy(self)
        stored = [(name, self._stored.get(name, name)) for name in self.names]
        named = [(names.get(old, name), old) for name, old in stored]
        section.replace({name: old for name, old in named if name is not None})
        return section

    def without(self, names: Container[str]) -> Section:
        """Return a copy of the section that lacks the tensors `names`."""
        section = copy(self)
        section.names = [name for name in self.names if name not in names]
        return section

    def restore(self, arrays: dict[str, Any], folder: str) -> Any:
        """Return a state of the saved class with these arrays; None if it was not saved.

        `folder`: for errors.
        """
        if self.saved is None:
            return None if self.kind is None else restore_kind(arrays, self.kind, folder)
        state = copy(self.saved)
        state.clear()
        state.update(arrays)
        if self._stored and self.kind is not None and "param_groups" in self.kind:
            state.param_groups = self.kind["param_groups"]  # with the new names
        return state

    def old_names(self) -> dict[str, str]:
        """Return the stored name of each tensor, by its name."""
        return {name: self._stored.get(name, name) for name in self.names}

    def replace(self, keys: Mapping[str, str]) -> None:
        """Replace all tensors; `keys` has the index key of each new name."""
        self.names = list(keys)
        self._stored = {name: key for name, key in keys.items() if name != key}

    def renamed_layers(self, values: Mapping[str, object]) -> dict[str, Any]:
        """Return `values`, by names of layers, with their names after the renaming added.

        A layer has a new name if the renaming changed only this part of a tensor's name.
        """
        renamed = dict(values)
        for name, old in self._stored.items():
            for layer in values:
                rest = old[len(layer) :]
                if layer and rest.startswith(".") and old.startswith(layer) and name.endswith(rest):
                    renamed[name[: -len(rest)]] = values[layer]
        return renamed

    def rename(self, rules: Mapping[str, str]) -> set[int]:
        """Rename the tensors, and those that the optimizer's groups list.

        `rules`: pattern to replacement. Returns the positions of the rules that match no name.
        Raises CompatibilityError if two names become the same.
        """
        try:
            renamed, unused = _core.state_rename({n: n for n in self.names}, tuple(rules.items()))
        except CompatibilityError as error:
            error.args = (f"{self.label}: {error}",)
            raise
        stored = {name: self._stored.get(str(old), str(old)) for name, old in renamed.items()}
        self._stored = {name: old for name, old in stored.items() if name != old}
        self.names = list(renamed)
        if self.kind is not None and "param_groups" in self.kind:
            groups = [dict(group) for group in self.kind["param_groups"]]
            for group in groups:
                if "params" not in group:  # it has no names
                    continue
                listed = {str(name): str(name) for name in group["params"]}
                group["params"] = list(_core.state_rename(listed, tuple(rules.items()))[0])
            self.kind = {**self.kind, "param_groups": groups}
        return set(unused)


def sections_of(merged: Index, manifest: Manifest) -> list[Section]:
    """Return the sections of model and optimizer, and of each named state that has tensors.

    Nested values have no section.
    """
    sections = [
        Section("model", 0, manifest.model, merged.keys(0)),
        Section("optimizer", OPTIMIZER, manifest.optimizer, merged.keys(OPTIMIZER)),
    ]
    kinds = {name: kind for name, kind in (manifest.states or {}).items() if kind["kind"] != "tree"}
    keys: dict[str, list[str]] = {name: [] for name in kinds}
    for key in merged.keys(STATES) if kinds else ():
        if (name := state_name(key)) in keys:
            keys[name].append(key)
    return sections + [
        Section(f"states[{name!r}]", STATES, kind, keys[name], f"{name}/")
        for name, kind in kinds.items()
    ]


def state_name(key: str) -> str:
    """Return the named state that has an index key; its name has no slash."""
    return key.partition("/")[0]


def rename_sections(sections: list[Section], rules: Mapping[str, str]) -> None:
    """Rename the tensors of all sections by `rules` (pattern to replacement).

    Raises ValueError if a rule matches no name of any section, CompatibilityError if two names
    become the same.
    """
    check_rules(rules)
    before = {name: None for section in sections for name in section.names}
    unused = set(range(len(rules)))
    for section in sections:
        unused &= section.rename(rules)
    if unused:
        raise unused_rules(before, [list(rules)[number] for number in sorted(unused)])
