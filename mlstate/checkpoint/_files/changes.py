"""Changes that a conversion makes to tensors: a choice by name, other names, another dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _core
from ...state import rename as rename_state
from ...state._load_into import unused_rules
from .._load import chosen_names
from .parts import Parts

if TYPE_CHECKING:
    from typing import Any, TypeVar

    from ...state._state_dict import StateDict

    State = TypeVar("State", bound=StateDict)


class Changes(NamedTuple):
    """What to change; nothing by default."""

    dtype: str | None = None  # of the model's floats
    names: list[str] | None = None  # to convert, as for `load`
    rename: dict[str, str] | None = None  # as for `load`

    def load_options(self) -> dict[str, Any]:
        """Return the options of a `load` that makes these changes."""
        return {
            "cast": self.dtype if self.dtype is not None else False,
            "names": self.names,
            "rename": self.rename,
        }

    def apply(self, parts: Parts, path: str) -> Parts:
        """Return the parts with these changes, as `load` makes them; `path` is for errors.

        With `names`, the named states are left out, and a name without a match raises
        TensorNotFoundError.
        """
        model, optimizer, metadata, states = parts
        if self.rename is not None:
            model, optimizer = _renamed(model, optimizer, self.rename)
        if self.names is not None:
            keys = [[] if state is None else list(state) for state in (model, optimizer)]
            _, (of_model, of_optimizer) = chosen_names(keys, self.names, path)
            model, optimizer = _restricted(model, of_model), _restricted(optimizer, of_optimizer)
            states = {}
        if self.dtype is not None and model is not None:
            model = model.astype(self.dtype)
        return Parts(model, optimizer, metadata, states)


def _renamed(model: Any, optimizer: Any, rules: dict[str, str]) -> tuple[Any, Any]:
    """Return model and optimizer with tensors renamed by `rules` (pattern to replacement).

    The optimizer's groups list the new names. Raises ValueError if a rule matches no name in
    either; None stays None.
    """
    names = {name: name for state in (model, optimizer) if state is not None for name in state}
    numbers = _core.state_rename(names, tuple(rules.items()))[1]
    if numbers:
        raise unused_rules(names, [list(rules)[number] for number in numbers])
    if model is not None:
        model = rename_state(model, rules, unused="ignore")
    if optimizer is not None:
        optimizer = rename_state(optimizer, rules, unused="ignore")
    return model, optimizer


def _restricted(state: State | None, names: list[str]) -> State | None:
    """Return a state with only the tensors of `names`; None for None."""
    if state is None:
        return None
    result = state.copy()
    for name in set(result) - set(names):
        del result[name]
    return result
