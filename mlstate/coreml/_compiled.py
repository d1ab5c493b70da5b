"""Read the states of a compiled Core ML model (``.mlmodelc``) from its metadata.json."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

from ..kv._model_states import format_error, read_metadata

if TYPE_CHECKING:
    from ._package import State

_FILE = "metadata.json"
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
    """Return the metadata file of a compiled model; None if the path is not one."""
    file = os.path.join(source, _FILE)
    is_package = os.path.exists(os.path.join(source, "Manifest.json"))
    return file if os.path.isfile(file) and not is_package else None


def read_compiled(file: str) -> list[State]:
    """Read the states of a compiled model with a single function."""
    document = read_metadata(file)
    if not isinstance(document, list) or len(document) != 1 or not isinstance(document[0], dict):
        raise format_error(file, "expected a list of one object")
    (model,) = document
    functions = _listed(file, model, "functions")
    if len(functions) > 1 or (functions and "stateSchema" not in model):
        raise format_error(
            file,
            f"lists {len(functions)} functions separately, which is not supported: read the states "
            "from the .mlpackage that the model was compiled from",
        )
    states = [_state(file, entry) for entry in _listed(file, model, "stateSchema")]
    names = [name for name, _, _ in states]
    if len(set(names)) < len(names):
        raise format_error(file, f"several states have the same name: {names}")
    return states


def _state(file: str, entry: dict[str, Any]) -> State:
    name = _text(file, entry, "name")
    dtype = _DTYPES.get(_text(file, entry, "dataType"))
    if dtype is None:
        raise format_error(file, f"state {name!r}: unknown dataType {entry['dataType']!r}")
    shape = _text(file, entry, "shape")
    if not _SHAPE.fullmatch(shape):
        raise format_error(
            file, f"state {name!r}: expected a shape such as '[2, 1, 256, 32]', got {shape!r}"
        )
    return name, dtype, tuple(json.loads(shape))


def _listed(file: str, owner: dict[str, object], key: str) -> list[dict[str, Any]]:
    entries = owner.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise format_error(file, f"{key!r} is not a list of objects")
    return entries


def _text(file: str, entry: dict[str, object], key: str) -> str:
    text = entry.get(key)
    if not isinstance(text, str):
        raise format_error(file, f"expected text for {key!r}, got {type(text).__name__}")
    return text
