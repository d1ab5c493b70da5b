"""Class and attributes of a state dict (`model_type`, `step`), as text in its file.

The metadata entry ``mlstate.state`` is a JSON object: ``kind`` is ``"model"`` or
``"optimizer"``, the other members are the attributes of that class. A file without the entry
holds a plain `StateDict`.
"""

from __future__ import annotations

from typing import Any

from .. import _core
from .._common.json_values import check_json_values
from ..errors import FormatError
from ._optimizer_state import OptimizerStateDict
from ._state_dict import ModelStateDict, StateDict

KEY = "mlstate.state"

_ATTRIBUTES: dict[str, tuple[type[StateDict], tuple[str, ...]]] = {
    "model": (ModelStateDict, ("model_type", "layer_count")),
    "optimizer": (
        OptimizerStateDict,
        ("optimizer_type", "step", "learning_rate", "param_groups"),
    ),
}


def describe(state: object) -> str | None:
    """Return the JSON text of a state's kind and attributes; None if its class has none.

    Raises TypeError if a parameter group has a value that JSON cannot hold.
    """
    for kind, (cls, names) in _ATTRIBUTES.items():
        if isinstance(state, cls):
            import json

            values = {name: getattr(state, name) for name in names}
            try:
                check_json_values(values.get("param_groups", ()), "param_groups", finite=False)
                return json.dumps({"kind": kind, **values}, sort_keys=True)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"param_groups cannot be written as JSON: {error}; use only numbers, strings, "
                    "lists and dicts of these"
                ) from None
    return None


def kind_of(state: Any) -> dict[str, Any] | None:
    """Return a dict with a state's kind and the attributes of its class, as a manifest has it.

    None for None. Raises TypeError or ValueError for an attribute that a manifest cannot hold.
    """
    if state is None:
        return None
    import json

    text = describe(state)
    if text is None:
        return {"kind": "state"}
    description: dict[str, Any] = json.loads(text)
    for name, value in description.items():  # refuses inf, NaN and halves of surrogate pairs
        check_json_values(value, name)
    return description


def restore(arrays: dict[str, Any], text: str | None, path: object) -> StateDict:
    """Return the state dict that `describe` described as `text` (None: a plain one).

    `arrays`: its entries by name. `path`: for the FormatError if the text is malformed.
    """
    if text is None:
        return StateDict(arrays)
    return restore_kind(arrays, kind_of_text(text, path), path)


def kind_of_text(text: str | None, path: object) -> Any:
    """Return the description in the text of `describe`; None as `text` means a plain state.

    `path`: for the FormatError if the text is not JSON.
    """
    if text is None:
        return {"kind": "state"}
    import json

    try:
        return json.loads(text)
    except (RecursionError, ValueError) as reason:
        raise _format_error(reason, path) from None


def restore_kind(arrays: dict[str, object], description: Any, path: object) -> StateDict:
    """Return the state dict of a described kind, with these entries.

    `description`: ``{"kind": "state"}`` is a plain `StateDict`; other kinds have their attributes
    too. `path`: for the FormatError if it is malformed.
    """
    try:
        attributes = dict(description)
        kind = attributes.pop("kind")
        cls, names = (StateDict, ()) if kind == "state" else _ATTRIBUTES[kind]
        if not attributes.keys() <= set(names):
            raise KeyError(*(attributes.keys() - set(names)))
        state = cls()
        for name, value in attributes.items():
            setattr(state, name, value)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as reason:
        raise _format_error(reason, path) from None
    _core.StateDict.update(state, arrays)  # no modules, which the method of the class converts
    return state


def _format_error(reason: Exception, path: object) -> FormatError:
    """Return the FormatError, with `path`, for a description that is malformed."""
    return FormatError(f"metadata {KEY!r} does not describe a state: {reason}", path=path)
