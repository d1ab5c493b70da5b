"""``--names``, ``--rename``, ``--dtype`` of ``mlstate convert``: applied to tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _core
from ...state import rename as rename_state
from ...state._load_into import unused_rules
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import StateDict
from .._load import chosen_names
from .parts import Parts, is_flat

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, TypeVar

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
        # named states of tensors change as `load` changes them; others stay
        tensors = {name: value for name, value in states.items() if is_flat(value)}
        if self.rename is not None:
            named = {name: _state_dict_of(value) for name, value in tensors.items()}
            model, optimizer, *renamed = _renamed((model, optimizer, *named.values()), self.rename)
            tensors = dict(zip(named, renamed, strict=True))
        if self.names is not None:
            keys = [[] if state is None else list(state) for state in (model, optimizer)]
            _, (of_model, of_optimizer) = chosen_names(keys, self.names, path)
            model, optimizer = _restricted(model, of_model), _restricted(optimizer, of_optimizer)
            states, tensors = {}, {}
        if self.dtype is not None:
            model = None if model is None else model.astype(self.dtype)
            for name, value in tensors.items():
                if not isinstance(value, OptimizerStateDict):
                    tensors[name] = _state_dict_of(value).astype(self.dtype)
        return Parts(model, optimizer, metadata, states | tensors)


def _state_dict_of(value: Any) -> StateDict:
    return value if isinstance(value, StateDict) else StateDict(value)


def _renamed(states: Iterable[Any], rules: dict[str, str]) -> list[Any]:
    """Return states with tensors renamed by `rules` (pattern to replacement).

    The groups of an optimizer list the new names. Raises ValueError if a rule matches no name in
    any state; None stays None.
    """
    states = [*states]
    # each state alone: names may become equal to names of another state
    names_by_state = [{name: name for name in state} for state in states if state is not None]
    unused = set(range(len(rules)))  # positions of the rules
    for names in names_by_state:
        unused &= set(_core.state_rename(names, tuple(rules.items()))[1])
    if unused:
        all_names = {name: None for names in names_by_state for name in names}
        raise unused_rules(all_names, [list(rules)[number] for number in sorted(unused)])
    return [
        state if state is None else rename_state(state, rules, unused="ignore") for state in states
    ]


def _restricted(state: State | None, names: list[str]) -> State | None:
    """Return a state with only the tensors of `names`; None for None."""
    if state is None:
        return None
    result = state.copy()
    for name in set(result) - set(names):
        del result[name]
    return result
