"""States in the metadata.json of a compiled model (``.mlmodelc``)."""

from __future__ import annotations

import os
import re
from math import prod
from typing import TYPE_CHECKING, Any

from .._common.text import shorten
from ..kv._model_states import format_error, quoted, read_metadata

if TYPE_CHECKING:
    from ._package import Functions, State

_FILE = "metadata.json"
_MOST_TEXT = 1024
_SHAPE = re.compile(r"\[\s*\d{1,18}(\s*,\s*\d{1,18}){0,15}\s*\]", re.ASCII)
_DTYPES = {
    "Float16": "float16",
    "Float32": "float32",
    "Float64": "float64",
    "Double": "float64",
    "Int8": "int8",
    "Int16": "int16",
    "Int32": "int32",
}


def metadata_path(source: Any) -> str | None:
    """Return the path of the metadata file of a compiled model; None if `source` is not one.

    `source`: any path. A folder with a Manifest.json is a package, not a compiled model.
    """
    file = os.path.join(source, _FILE)
    is_package = os.path.exists(os.path.join(source, "Manifest.json"))
    return file if os.path.isfile(file) and not is_package else None


def read_compiled(file: str) -> tuple[Functions, str | None]:
    """Return the states of each function by name, and the default function or None.

    `file`: the metadata.json of a compiled model. The compiler lists each function with its states,
    and repeats the states of the default function outside the list. Older compilers write no list
    for a single function. Raises FormatError if the file is not valid, or lacks the states of a
    function.
    """
    document = read_metadata(file)
    if not isinstance(document, list) or len(document) != 1 or not isinstance(document[0], dict):
        raise format_error(file, "expected a list of one object")
    (model,) = document
    listing = _listed(file, model, "functions")
    if not listing:
        return {"main": _states(file, model)}, "main"
    functions: Functions = {}
    for function in listing:
        name = _text(file, function, "name")
        if name in functions:
            raise format_error(file, f"several functions have the name {name!r}")
        if "stateSchema" not in function and (len(listing) > 1 or "stateSchema" not in model):
            raise format_error(
                file,
                f"function {name!r} has no 'stateSchema': read the states from the .mlpackage that "
                "the model was compiled from",
            )
        functions[name] = _states(file, function if "stateSchema" in function else model)
    default = next(iter(functions)) if len(functions) == 1 else None
    if "defaultFunctionName" in model:
        default = _text(file, model, "defaultFunctionName")
        if default not in functions:
            raise format_error(file, f"the default function {default!r} is not listed")
    return functions, default


def _states(file: str, owner: dict[str, Any]) -> list[State]:
    """Return the states in the JSON of a function or model; FormatError if two have one name."""
    states = [_state(file, entry) for entry in _listed(file, owner, "stateSchema")]
    names = [name for name, _, _ in states]
    if len(set(names)) < len(names):
        raise format_error(file, f"several states have the same name: {quoted(names)}")
    return states


def _state(file: str, entry: dict[str, Any]) -> State:
    """Return name, dtype and shape of a state from its JSON `entry` in `file`.

    Raises FormatError for an unknown dtype, or a shape that is empty or too large.
    """
    name = _text(file, entry, "name")
    dtype = _DTYPES.get(_text(file, entry, "dataType"))
    if dtype is None:
        raise format_error(
            file, f"state {name!r}: unknown dataType {shorten(repr(entry['dataType']), 80)}"
        )
    text = _text(file, entry, "shape")
    if not _SHAPE.fullmatch(text):
        raise format_error(
            file,
            f"state {name!r}: expected a shape such as '[2, 1, 256, 32]', got "
            f"{shorten(repr(text), 80)}",
        )
    shape = tuple(map(int, text[1:-1].split(",")))
    if not 0 < prod(shape) < 1 << 60:
        raise format_error(file, f"state {name!r}: the shape {text} is empty or too large")
    return name, dtype, shape


def _listed(file: str, owner: dict[str, object], key: str) -> list[dict[str, Any]]:
    """Return the list of objects that `owner` has for `key`; an empty list if it lacks the key."""
    entries = owner.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise format_error(file, f"{key!r} is not a list of objects")
    return entries


def _text(file: str, entry: dict[str, object], key: str) -> str:
    """Return the text that `entry` has for `key`; FormatError if it is missing or too long."""
    text = entry.get(key)
    if not isinstance(text, str):
        raise format_error(file, f"expected text for {key!r}, got {type(text).__name__}")
    if len(text) > _MOST_TEXT:
        raise format_error(file, f"{key!r} has {len(text)} characters; at most {_MOST_TEXT}")
    return text
