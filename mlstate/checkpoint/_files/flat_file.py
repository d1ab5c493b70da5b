"""Model and optimizer in one safetensors or npz file: prefixes, ``mlstate_parts``, metadata.

If such a file holds both, their names have the prefixes ``model.`` and ``optimizer.``, and the
metadata entry ``mlstate_parts`` records this. A single state has no prefix. A file without that
entry is from another program and holds a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.backend import TensorBackend
from ..._common.store_error import format_error
from ..._safetensors import load_file, load_metadata, save_file
from ...state._kind import describe, restore
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import StateDict
from .parts import MODEL, Parts

if TYPE_CHECKING:
    from ..._common.atomic_file import Target
    from ..._types import NDArray
    from ...errors import FormatError

# Metadata entry that describes the parts of a flat file; it is not part of the user's metadata.
PARTS = "mlstate_parts"
_PREFIXES = {"model": "model.", "optimizer": "optimizer."}


# ---- model and optimizer ----


def _join_states(
    model: StateDict | None, optimizer: OptimizerStateDict | None
) -> tuple[StateDict, dict[str, Any]]:
    """Return one state for a flat file, and the record to split it again; {} for a single state.

    Of two states, the names get the prefixes ``model.`` and ``optimizer.``.
    """
    parts = {"model": model, "optimizer": optimizer}
    present = {name: state for name, state in parts.items() if state is not None}
    if len(present) == 1:
        return next(iter(present.values())), {}
    joined = StateDict()
    for name, state in present.items():
        joined.update({_PREFIXES[name] + key: value for key, value in dict(state).items()})
    return joined, {"parts": {name: describe(state) for name, state in present.items()}}


def _split_state(
    path: Path | str, state: Mapping[str, object], record: Mapping[str, object]
) -> tuple[Any, Any]:
    """Return model and optimizer of a file's tensors; one of them may be None.

    `state`: all tensors by name. `record`: the file's own description; with "parts", the names of
    both have prefixes. Raises FormatError if a name has neither prefix.
    """
    texts = record.get("parts")  # descriptions of model and optimizer by name
    if texts is None:
        return (None, state) if isinstance(state, OptimizerStateDict) else (state, None)
    if not (isinstance(texts, dict) and set(texts) == set(_PREFIXES)):
        raise _description_error(path, "names no parts")
    arrays: dict[str, dict[str, Any]] = {name: {} for name in _PREFIXES}
    for key, value in state.items():
        name, dot, rest = key.partition(".")
        if not dot or name not in arrays:
            raise _description_error(path, f"array {key!r} belongs to no part")
        arrays[name][rest] = value
    states = [_restore_state(path, arrays[name], texts[name]) for name in _PREFIXES]
    if not isinstance(states[1], OptimizerStateDict):
        raise _description_error(path, "the optimizer entry is not valid")
    return states[0], states[1]


def _restore_state(path: Path | str, arrays: dict[str, Any], text: object) -> StateDict:
    """Return a state of the class that `text` describes; None: the file is of another program."""
    if not (text is None or isinstance(text, str)):
        raise _description_error(path, f"{text!r} does not describe a state")
    return restore(arrays, text, str(path))


def _description_error(path: Path | str, reason: str) -> FormatError:
    """Return the FormatError for a file whose description of its content is malformed."""
    text = f"{path}: entry {PARTS!r} does not describe the file: {reason}"
    return format_error(text, str(path), PARTS)


# ---- safetensors ----


def write_safetensors_parts(target: Target, parts: Parts) -> None:
    """Write a converted state to a safetensors file; metadata other than str are stored as JSON.

    The record in the metadata, under `PARTS`, lists the keys of these. Raises ValueError if the
    metadata has this key already.
    """
    model, optimizer, metadata, *_ = parts
    state, record = _join_states(model, optimizer)
    json_values = {key: value for key, value in metadata.items() if not isinstance(value, str)}
    if json_values:
        record["json"] = sorted(json_values)
    texts = metadata | {key: json.dumps(value) for key, value in json_values.items()}
    if PARTS in texts:
        raise ValueError(f"metadata key {PARTS!r} is reserved: choose another")
    if record:
        texts[PARTS] = json.dumps(record, sort_keys=True)
    target.write_file(lambda temporary: save_file(state, temporary, texts))


def read_file(path: Path, *, checked: bool) -> Parts:
    """Return the content (`Parts`) of a safetensors file.

    `checked`: compare it with its checksums, if any.
    """
    metadata: dict[str, Any] = dict(load_metadata(path, verify=checked))
    return split_texts(path, load_file(path, verify=checked), metadata)


def split_texts(path: Path | str, state: StateDict, metadata: dict[str, Any]) -> Parts:
    """Return the content (`Parts`) of a safetensors file from its tensors and its metadata.

    `state`: the tensors by name. `metadata`: the header's texts by key; the texts of mlstate are
    removed or decoded in place. Without these, the tensors are a model. `path`: for errors. Raises
    FormatError if the texts of mlstate are malformed.
    """
    record: Any = {}
    try:
        record = json.loads(metadata.pop(PARTS, "{}"))
        for key in record.get("json", ()):
            metadata[key] = json.loads(metadata[key])
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise _description_error(path, repr(error)) from None
    return Parts(*_split_state(path, state, record), metadata, {})


# ---- npz ----


def as_arrays(state: Mapping[str, Any]) -> dict[str, NDArray]:
    """Return all values as NumPy arrays; tensors are viewed, or copied from their device.

    Raises TypeError for a value that has Python objects.
    """
    import numpy as np

    from ..._common.arrays import is_torch
    from ..._common.backend import backend_of

    arrays: dict[str, NDArray] = {}
    for name, value in dict(state).items():
        if is_torch(value):
            tensor = {name: value.detach().cpu()}
            arrays |= backend_of(value, TensorBackend).arrays_of(tensor)
        else:
            arrays[name] = np.asarray(value)
        if arrays[name].dtype.hasobject:
            raise TypeError(f"{name!r} holds Python objects, which cannot be converted")
    return arrays


def write_npz_parts(target: Target, parts: Parts) -> None:
    """Write a state to an .npz file, whose record has the kind of state and the metadata."""
    from .npz import write_npz

    model, optimizer, metadata, *_ = parts
    state, record = _join_states(model, optimizer)
    kind = describe(state)
    write_npz(target, as_arrays(state), {**record, "kind": kind, "metadata": metadata})


def read_npz_parts(path: Path) -> Parts:
    """Return the content (`Parts`) of a .npz file of `write_npz` or of NumPy.

    An array whose dtype NumPy has lost is in the model, and also unreadable. Raises FormatError for
    a damaged file.
    """
    from .npz import find_lost_dtypes, read_npz

    arrays, record, refused = read_npz(path)
    metadata = record.get("metadata", {})
    if not isinstance(metadata, dict):
        raise _description_error(path, "the metadata are not a JSON object")
    state = _restore_state(path, arrays, record.get("kind"))
    errors = {**find_lost_dtypes(path, arrays), **refused}
    unreadable = {MODEL: errors} if errors else {}
    return Parts(*_split_state(path, state, record), metadata, {}, {}, unreadable)
