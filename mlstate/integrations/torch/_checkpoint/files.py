"""Files of torch: ``torch.save`` files, and directories of torch.distributed.checkpoint.

Both contain a tree of dicts: a plain state dict, or a dict with a model, an optimizer in the form
of ``optimizer.state_dict()``, and plain values. This module writes only tensors and plain values,
so that torch can read the files without mlstate.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from .... import _core
from ...._common.atomic_file import Target, new_path, replacing
from ...._common.regular_file import open_regular
from ....errors import CompatibilityError, FormatError
from ....state._compatibility import join
from ....state._kind import describe, restore
from ....state._optimizer_state import OptimizerStateDict
from ....state._state_dict import StateDict
from .._tensors.state import arrays_of, tensors_of
from .optimizer import (
    as_array,
    is_number,
    keywords_from,
    number_states,
    packed_states,
    stored_states,
    unpack_state,
)
from .optimizer_contract import NOT_VALUES, decode_value

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch

    Parts: TypeAlias = tuple[StateDict | None, OptimizerStateDict | None, dict[str, Any]]

# Keys of model and optimizer that programs commonly use.
_MODEL_KEYS = ("model", "state_dict", "model_state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
# Key of the entry with the classes of the state dicts, which `tree_of` adds.
_RECORD = "mlstate"
# Deeper trees are not state dicts, but dicts that contain themselves.
_DEEPEST = 64


def _format_error(path: Path, reason: str) -> FormatError:
    error = FormatError(f"{path}: {reason}")
    error.path = str(path)
    return error


# ---- trees to states ----


def _leaves(tree: Any, prefix: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree, with keys joined by dots, as in torch's checkpoints."""
    if depth > _DEEPEST:
        raise ValueError(f"{prefix[:60]!r} is nested more than {_DEEPEST} levels deep")
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for key, value in items:
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping | list | tuple):
            yield from _leaves(value, name, depth + 1)
        else:
            yield name, value


def _state_from(tree: Mapping[Any, Any], path: Path) -> tuple[StateDict, dict[str, Any]]:
    """Return the tensors and numbers of a tree as arrays, and None and str, under flat names."""
    import torch

    tensors: dict[str, Any] = {}
    other_values: dict[str, Any] = {}
    strange: list[str] = []
    try:
        for name, value in _leaves(tree, ""):
            if name in tensors or name in other_values:
                raise _format_error(
                    path, f"two entries have the name {name!r} once levels are joined"
                )
            if value is None or isinstance(value, str):
                other_values[name] = value
                continue
            tensors[name] = as_array(value) if is_number(value) else value
            if not isinstance(tensors[name], torch.Tensor | np.ndarray | np.generic):
                strange.append(f"{name!r} (a {type(value).__name__})")
    except ValueError as error:
        raise error if isinstance(error, FormatError) else _format_error(path, str(error)) from None
    if strange:
        raise _format_error(
            path,
            f"a state cannot hold {join(strange)}: remove everything from the file that is neither "
            "a tensor nor a number, str or None",
        )
    return StateDict(arrays_of(tensors)), other_values


def _names_of(groups: list[Any], path: Path) -> dict[Any, str]:
    """Map the keys of an optimizer's state to parameter names, from its groups."""
    names: dict[Any, str] = {}
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise _format_error(path, "a group of the optimizer has no list of 'params'")
        members = group["params"]
        param_names = group.get("param_names")
        if not (isinstance(param_names, list | tuple) and len(param_names) == len(members)):
            param_names = None
        for number, member in enumerate(members):
            if not isinstance(member, int | str) or member in names:
                raise _format_error(
                    path, f"the optimizer's parameter {member!r} is not a number, or appears twice"
                )
            default = member if isinstance(member, str) else f"param_{len(names)}"
            names[member] = str(param_names[number]) if param_names else default
    if len(set(names.values())) != len(names):
        raise _format_error(path, "two parameters of the optimizer have one name")
    return names


def _optimizer_from(tree: Mapping[str, Any], path: Path) -> OptimizerStateDict:
    """Return the contents of ``optimizer.state_dict()``, with parameter names."""
    groups = tree["param_groups"]
    saved_states = tree.get("state", {})
    if not isinstance(groups, list) or not isinstance(saved_states, Mapping):
        raise _format_error(path, "the optimizer has no list of groups, or no dict of states")
    names = _names_of(groups, path)
    states: dict[str, Any] = {}
    for key, entries in saved_states.items():
        # torch's checkpoints store numbers as strings
        member = int(key) if key not in names and str(key).isdecimal() else key
        if member not in names or not isinstance(entries, Mapping):
            raise _format_error(
                path, f"the optimizer has a state for {key!r}, which is in none of its groups"
            )
        for state, value in entries.items():
            name = f"{names[member]}.{state}"
            if not isinstance(state, str) or not state or "." in state:
                raise _format_error(
                    path, f"the optimizer's {names[member]!r} has a state named {state!r}"
                )
            states[name] = value
    try:
        forms, stored = stored_states(groups, names.values(), states)
    except (TypeError, ValueError) as error:
        raise _format_error(path, f"the optimizer's {error}") from None
    return OptimizerStateDict(arrays_of(stored), **keywords_from("other", forms, stored))


def _json_values(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON can store it, or NotImplemented."""
    import torch

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
        return value.item()
    if depth > _DEEPEST:
        return NotImplemented
    if isinstance(value, list | tuple):
        items = [_json_values(item, depth + 1) for item in value]
        return NotImplemented if any(item is NotImplemented for item in items) else items
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        pairs = {str(key): _json_values(item, depth + 1) for key, item in value.items()}
        return NotImplemented if any(v is NotImplemented for v in pairs.values()) else pairs
    return NotImplemented


def _metadata_from(rest: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the other entries of a tree as metadata; raise FormatError if one is not plain."""
    metadata = {str(key): _json_values(value) for key, value in rest.items()}
    strange = [
        f"{key!r} (a {type(rest[key]).__name__})"
        for key, v in metadata.items()
        if v is NotImplemented
    ]
    if strange:
        raise _format_error(
            path,
            f"besides model and optimizer, the file has {join(strange)}, which is not a plain "
            "value: remove it from the file",
        )
    return metadata


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, OptimizerStateDict) or (
        isinstance(value, Mapping) and isinstance(value.get("param_groups"), list)
    )


def _restore_model(
    value: Any, texts: Mapping[str, Any], path: Path
) -> tuple[StateDict, dict[str, Any]]:
    """Return a model as a state of the class recorded in the file, and its plain values."""
    if isinstance(value, StateDict):
        return value, {}
    state, other_values = _state_from(value, path)
    return restore(state, texts.get("model"), str(path)), other_values


def _restore_optimizer(value: Any, texts: Mapping[str, Any], path: Path) -> OptimizerStateDict:
    """Return an optimizer as a state, with the attributes recorded in the file."""
    if isinstance(value, OptimizerStateDict):
        return value
    optimizer = _optimizer_from(value, path)
    if "optimizer" in texts:
        empty_state = restore({}, texts["optimizer"], str(path))
        if isinstance(empty_state, OptimizerStateDict):
            optimizer.optimizer_type, optimizer.step = empty_state.optimizer_type, empty_state.step
            optimizer.learning_rate = empty_state.learning_rate
            optimizer.param_groups = empty_state.param_groups
    return optimizer


def _find_parts(tree: Mapping[Any, Any]) -> tuple[list[str], list[str]]:
    """Return the keys of models and of optimizers in a tree."""
    return (
        [key for key in _MODEL_KEYS if isinstance(tree.get(key), Mapping)],
        [key for key in _OPTIMIZER_KEYS if _is_optimizer(tree.get(key))],
    )


def _unwrap(tree: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a tree whose model and optimizer are at the top.

    torch's tutorials wrap both in one entry, as in ``{"app": AppState(…)}``.
    """
    if any(_find_parts(tree)):
        return tree
    candidates = [
        key
        for key, value in tree.items()
        if isinstance(value, Mapping) and not _is_optimizer(value) and any(_find_parts(value))
    ]
    if len(candidates) != 1 or tree.keys() & tree[candidates[0]].keys():
        return tree
    return {**{key: v for key, v in tree.items() if key != candidates[0]}, **tree[candidates[0]]}


def parts_of(tree: Any, path: Path) -> Parts:
    """Split a tree into model, optimizer, and plain values; FormatError names any other entry."""
    if isinstance(tree, OptimizerStateDict):
        return None, tree, {}
    if isinstance(tree, StateDict):
        return tree, None, {}
    if not isinstance(tree, Mapping):
        raise _format_error(path, f"holds a {type(tree).__name__}, not a dict of tensors")
    if _is_optimizer(tree):
        return None, _restore_optimizer(tree, {}, path), {}
    tree = _unwrap(tree)
    models, optimizers = _find_parts(tree)
    if not models and not optimizers:
        state, other_values = _state_from(tree, path)
        return state, None, other_values
    used = {*models[:1], *optimizers[:1]}
    rest = {key: value for key, value in tree.items() if key not in used}
    texts = rest.pop(_RECORD, {})
    if not isinstance(texts, Mapping) or not all(isinstance(v, str) for v in texts.values()):
        raise _format_error(path, f"entry {_RECORD!r} does not describe the file")
    if "metadata" in rest and texts:
        rest = dict(rest["metadata"])
    model, other_values = _restore_model(tree[models[0]], texts, path) if models else (None, {})
    optimizer = _restore_optimizer(tree[optimizers[0]], texts, path) if optimizers else None
    named = {f"{models[0]}.{name}": value for name, value in other_values.items()}
    return model, optimizer, {**_metadata_from(rest, path), **named}


# ---- states to trees ----


def _compact_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors that use only a part of their storage: a file would contain all of it.

    Tied tensors that together use their whole storage stay tied.
    """
    filled: Counter[int] = Counter()
    for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
        filled[tensor.untyped_storage().data_ptr()] += tensor.nbytes
    copies: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        wasted = storage.nbytes() > filled[storage.data_ptr()]
        copies.setdefault(id(tensor), tensor.clone() if wasted else tensor)
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def _cpu_tensors(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return all values as plain CPU tensors."""
    tensors = tensors_of(state)
    return _compact_tensors({name: tensor.cpu() for name, tensor in tensors.items()})


def _optimizer_tree(state: OptimizerStateDict) -> dict[str, Any]:
    """Return the form of ``optimizer.state_dict()``.

    Parameters are numbers if all names are numbered (``param_0`` and so on), else names.
    """
    saved = state.param_groups or ({"lr": state.learning_rate, "params": list(state.parameters())},)
    listed = [str(name) for group in saved for name in group.get("params", ())]
    unknown = sorted(set(state.parameters()) - set(listed))
    if unknown:
        error = CompatibilityError(
            f"the optimizer has states of parameters that none of its groups lists: {join(unknown)}"
        )
        error.name = unknown[0]
        raise error
    numbered = listed == [f"param_{i}" for i in range(len(listed))]
    order: dict[str, Any] = {name: i if numbered else name for i, name in enumerate(listed)}
    numbers = number_states(saved)
    states: dict[Any, dict[str, Any]] = {}
    nested = packed_states(saved) & state.keys()
    tensors = _cpu_tensors({key: v for key, v in state.items() if key not in nested})
    for key, value in {**tensors, **{key: unpack_state(key, state[key]) for key in nested}}.items():
        name, _, kind = key.rpartition(".")
        is_number = key in numbers and value.numel() == 1
        states.setdefault(order[name], {})[kind] = value.item() if is_number else value
    groups = [
        {
            **{k: decode_value(v, k) for k, v in group.items() if k not in NOT_VALUES},
            "params": [order[str(name)] for name in group.get("params", ())],
        }
        for group in saved
    ]
    return {"state": states, "param_groups": groups}


def tree_of(
    model: StateDict | None, optimizer: OptimizerStateDict | None, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a tree that torch can store, of a model, an optimizer and plain values.

    For a model alone: its tensors by name, for ``module.load_state_dict``. Otherwise the entries
    ``model``, ``optimizer``, ``metadata``, and ``mlstate``, which records the classes of the
    states.
    """
    kinds = {"model": describe(model), "optimizer": describe(optimizer)}
    texts = {kind: text for kind, text in kinds.items() if text is not None}
    if model is not None and optimizer is None and not metadata and not texts:
        return dict(_cpu_tensors(model))
    tree: dict[str, Any] = {}
    if model is not None:
        tree["model"] = _cpu_tensors(model)
    if optimizer is not None:
        tree["optimizer"] = _optimizer_tree(optimizer)
    return {**tree, "metadata": dict(metadata), _RECORD: {"version": "1", **texts}}


# ---- .pt, .pth, .bin ----


def read_pt(path: Path) -> Parts:
    """Read a ``torch.save`` file without running code from it.

    If its format allows, it is memory-mapped and the arrays share its memory.
    """
    return parts_of(_load_pickle(path, []), path)


def read_tree(path: Path) -> Any:
    """Read any value from a ``torch.save`` file without running code from it.

    Beyond tensors and plain values, it may hold paths, NumPy scalars, and members of enums that
    the program has imported.
    """
    return _load_pickle(path, _harmless_globals(path))


def write_tree(tree: Any, file: IO[bytes]) -> None:
    """Write any value with ``torch.save``."""
    import torch

    try:
        torch.save(tree, file)
    except RuntimeError as error:
        cause = error.__context__  # torch's archive is incomplete after an error of the file
        if not isinstance(cause, OSError):
            raise
        raise cause from None


def _harmless_globals(path: Path) -> list[Any]:
    """Return what `read_tree` accepts, in the form of ``torch.serialization.safe_globals``."""
    import pathlib
    import sys
    from enum import Enum
    from operator import attrgetter

    import torch

    scalar = np._core.multiarray.scalar  # type: ignore[attr-defined]
    dtypes = {type(np.dtype(code)) for code in np.typecodes["AllInteger"] + "?efdFD"}
    allowed: list[Any] = [np.dtype, *dtypes]
    allowed += [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
        cls = getattr(pathlib, name)
        allowed += [(cls, f"pathlib.{name}"), (cls, f"pathlib._local.{name}")]
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (OSError, RuntimeError, ValueError):  # not in the zip format, or damaged
        return allowed
    for name in names:
        module, _, attribute = name.rpartition(".")
        with suppress(AttributeError):
            cls = attrgetter(attribute)(sys.modules.get(module))
            if isinstance(cls, type) and issubclass(cls, Enum):
                allowed.append(cls)
    return allowed


def _load_pickle(path: Path, allowed: list[Any]) -> Any:
    from pickle import UnpicklingError

    import torch

    with open_regular(path) as file:
        zipped = file.read(4) == b"PK\x03\x04"
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            warnings.simplefilter("ignore")  # torch's warnings about its storage classes
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except UnpicklingError as error:
        raise _format_error(path, _describe_refusal(str(error))) from None
    except OSError as error:
        if error.errno != errno.EINVAL:  # torch's error for a truncated archive
            raise
        raise _format_error(path, "torch cannot read it: it ends too early") from None
    except (RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError) as error:
        raise _format_error(path, f"torch cannot read it: {_first_line(error)}") from None


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _describe_refusal(text: str) -> str:
    """Return an error text for an object that torch's reader refused."""
    import re

    match = re.search(r"GLOBAL ([\w.]+)", text)
    if match is None:
        return f"torch cannot read it: {_first_line(text)}"
    return (
        f"holds a {match[1]}, which is neither a tensor nor a plain value: save the tensors alone, "
        "or, if you trust who made the file, load it with weights_only=False and save its "
        "state_dict()"
    )


def write_pt(
    target: Target,
    model: StateDict | None,
    optimizer: OptimizerStateDict | None,
    metadata: Mapping[str, Any],
) -> None:
    """Atomically write a file that ``torch.load`` reads with ``weights_only``."""
    tree = tree_of(model, optimizer, metadata)
    with replacing(target.path, target) as file:
        write_tree(tree, file)


# ---- directories of torch.distributed.checkpoint ----


def read_dcp(path: Path) -> Parts:
    """Read a checkpoint of torch.distributed.checkpoint, written by any number of ranks.

    No code from the files is run.
    """
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from .dcp import Reader, planner

    tree: dict[str, Any] = {}
    reader = Reader(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there is only one process
            _load_state_dict(tree, storage_reader=reader, planner=planner(), no_dist=True)
    except FormatError as error:
        error.path = str(path)
        raise
    except OSError:
        raise
    except BaseException as error:
        # torch collects errors in a class that does not derive from Exception
        if not (isinstance(error, Exception) or hasattr(error, "failures")):
            raise
        reason = next(iter(getattr(error, "failures", {}).values()), (error,))
        cause = reason[0] if isinstance(reason, tuple) else reason
        if isinstance(cause, OSError):
            raise cause from None
        if isinstance(cause, FormatError):
            cause.path = str(path)
            raise cause from None
        raise _format_error(path, f"torch cannot read it: {_first_line(cause)}") from None
    return parts_of(tree, path)


def write_dcp(
    target: Target,
    model: StateDict | None,
    optimizer: OptimizerStateDict | None,
    metadata: Mapping[str, Any],
) -> None:
    """Write a checkpoint that torch.distributed.checkpoint reads, in place of an old one."""
    import torch.distributed.checkpoint as dcp

    tree = tree_of(model, optimizer, metadata)
    if not (target.is_vacant or os.path.isfile(os.path.join(target.path, ".metadata"))):
        raise ValueError(
            f"{target.path}: exists already and is not a torch checkpoint; delete it first: a "
            "torch checkpoint needs a new directory"
        )
    with new_path(target) as temporary:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there is only one process
            dcp.save(tree, checkpoint_id=temporary, no_dist=True)  # type: ignore[attr-defined]
        _core.folder_sync(temporary)
