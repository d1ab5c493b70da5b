"""Read any source as `Parts`; write parts in any format, or refuse values that it cannot hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ... import _core
from ..._common.arrays import refuse_unstorable
from ..._common.atomic_file import Target
from ..._common.backend import torch_backend
from ..._common.caller import find_caller
from ..._common.json_values import check_json_values
from ...errors import CompatibilityError
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import StateDict
from .._files.backend import DcpBackend, PtBackend
from .._files.flat_file import split_texts, write_npz_parts, write_safetensors_parts
from .._files.parts import Parts, Selection
from .._huggingface.export import export, take_export
from .._layouts.folders import LAYOUTS
from .._layouts.lightning import checkpoint_from, with_order, write_ckpt
from .._load.arguments import check_request
from .._load.loader import Loader, load_new_state
from .._options import LOAD_DEFAULTS, complete_options
from .._save.save_root import save_root
from .._save.target import SaveFolder
from .._sources.open_source import open_source
from .._sources.readers import store_errors
from .._sources.weights import SafetensorsSource
from .._sources.whole import WholeSource
from .._states.modules import all_entries, entries_name, is_entries, split_entries
from .._store.checkpoint_files import CheckpointFiles, FolderContent
from .._store.open_path import refuse_existing, refuse_file_name
from .formats import NAMES, find_format, folder_of, place_of

if TYPE_CHECKING:
    from typing import TypeVar

    from .._loaded_state import LoadedState
    from .._options import LoadOptions
    from .._sources.protocol import Source
    from .formats import Place

    _State = TypeVar("_State", bound=StateDict)


# ---- targets ----


class CheckpointTarget(NamedTuple):
    """A checkpoint of mlstate to write, and its content when the writing began."""

    place: Place
    content: FolderContent
    overwrite: bool
    any_suffix: bool = False  # the path of the folder may have the suffix of a file
    step: int | None = None  # of the new checkpoint; None: of the parts
    entries: Mapping[str | None, tuple[Any, Any]] = MappingProxyType({})  # as of `SaveFolder`

    def save_folder(self) -> SaveFolder:
        """Return the path to pass to `save`, with the content that it may replace."""
        return SaveFolder(
            self.place,
            replace_steps=self.overwrite,
            content=self.content,
            any_suffix=self.any_suffix,
            entries=self.entries,
        )


# ---- reading ----


def parts_of(loaded: LoadedState) -> Parts:
    """Return the content (`Parts`) of a loaded checkpoint.

    The step is in the optimizer, or without one in the metadata.
    """
    metadata = dict(loaded.metadata or {})
    optimizer = loaded.optimizer
    if optimizer is None and loaded.step is not None:
        metadata.setdefault("step", loaded.step)
    if not (optimizer is None or isinstance(optimizer, OptimizerStateDict)):
        optimizer = OptimizerStateDict(optimizer, step=loaded.step or 0)
    return Parts(loaded.model, optimizer, metadata, dict(loaded.states))


def read_parts(
    source: Source, selection: Selection | None = None, options: LoadOptions | None = None
) -> Parts:
    """Return the content of a source, of the entries in `selection` (None: all).

    `options`: of a load that changes the tensors. Arrays of torch files may be views of mapped
    files.
    """
    changes = {name: value for name, value in (options or {}).items() if value not in (None, False)}
    changes |= {"verify": (options or {}).get("verify", True)}
    chosen = selection or Selection()
    request = check_request(
        complete_options(read_parts, cast("LoadOptions", changes), LOAD_DEFAULTS)
    )
    source.check(request.options)
    if isinstance(source, WholeSource):
        source.select(chosen)
        if not changes.keys() - {"verify"}:
            return source.parts.refuse_unreadable()
    if isinstance(source, SafetensorsSource):
        source.takes_both = True  # `split_texts` divides them
    loaded = source.attempt(partial(load_new_state, request, source))
    if isinstance(source, WholeSource):
        states: dict[str, Any] = {}
        if request.names is None:
            loaded_states, _ = split_entries(loaded.states)
            states = {**_renamed_entries(source.parts.states, changes), **loaded_states}
        return Parts(loaded.model, loaded.optimizer, loaded.metadata, states)
    parts = parts_of(loaded)
    if isinstance(source, SafetensorsSource) and parts.model is not None:
        parts = split_texts(source.path, parts.model, parts.metadata)
    # Entries of torch modules that are not tensors: `load` hides those that have only metadata.
    states, _ = split_entries(parts.states)
    if request.names is None:
        states |= all_entries(Loader(request, source))
    return chosen.apply(parts._replace(states=states), source.path)


def _renamed_entries(states: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return named states; `changes` may rename the entries of modules that are not tensors."""
    rules = tuple((changes.get("rename") or {}).items())

    def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
        return _core.state_rename(dict(values), rules)[0]

    others, entries = split_entries(states)
    for state, (values, metadata) in entries.items():
        layers = renamed({f"{name}.": value for name, value in metadata.items()})
        others[entries_name(state)] = {
            "entries": renamed(values),
            "metadata": {name[:-1]: value for name, value in layers.items()},
        }
    return others


def read_any(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    selection: Selection | None = None,
    checked: bool = True,
) -> Parts:
    """Return the content of a path of any format, or of a checkpoint at a URL.

    `format`: its name; None: by the content. `checked`: compare elements with their checksums, or
    files with the checksums of `checksum`.
    """
    if format is not None and format not in NAMES:
        raise ValueError(f"format must be one of {', '.join(NAMES)}, got {format!r}")
    source = open_source(path, storage_options, format=format)
    return read_parts(source, selection, {} if checked else {"verify": False})


# ---- writing ----


def begin_write(
    place: Place, name: str, overwrite: bool, *, any_suffix: bool = False
) -> CheckpointTarget | Target:
    """Return the target at `place` of the format `name` as it is now, for a later `write_any`.

    Raises StoreError (EEXIST) if it exists, unless `overwrite`. `write_any` replaces only the
    content that this function has seen. `any_suffix`: the path of a folder may have the suffix of a
    file.
    """
    target: CheckpointTarget | Target
    files = CheckpointFiles(folder_of(place))
    if name == "mlstate":
        target = CheckpointTarget(place, files.content(), overwrite, any_suffix)
    else:
        target = Target.of(place)
    if name in ("mlstate", "dcp", "huggingface") and not any_suffix:
        refuse_file_name(files.folder)
    # after the listing, so that nothing appears in between
    refuse_existing(files.folder, overwrite)
    if isinstance(target, CheckpointTarget):
        files.refuse_others(target.content)
    return target


def write_any(
    path: str | os.PathLike[str],
    model: Mapping[str, object] | None = None,
    optimizer: Mapping[str, object] | None = None,
    metadata: Mapping[str, object] | None = None,
    states: Mapping[str, object] | None = None,
    *,
    format: str | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
    target: CheckpointTarget | Target | None = None,
    step: int | None = None,
) -> Parts:
    """Write a state to a file or directory of any known format, or to a checkpoint at a URL.

    Returns the parts. The write is atomic. `overwrite` replaces an existing file, checkpoint
    or torch directory of the same format, including all steps of a `CheckpointManager`. A caller
    that began earlier passes the `target` of `begin_write` instead. A target that changed since
    then is left unchanged.
    `step`: of a checkpoint; None: of the metadata or the optimizer. A warning tells if the metadata
    of another format have another step.
    Raises ValueError without a state, StoreError (EEXIST) for a target that must stay, and
    CompatibilityError for values that the format cannot hold.
    """
    place = place_of(path, storage_options)
    name = find_format(format, place)
    if model is None and optimizer is None and not (states and name in _WITH_STATES):
        raise ValueError(f"{path}: there is neither a model nor an optimizer to write")
    weights, moments = _as_state(StateDict, model), _as_state(OptimizerStateDict, optimizer)
    target = target or begin_write(place, name, overwrite)
    if name != "mlstate":
        _refuse_parts(weights, moments)
    with store_errors(place):
        values, named = dict(metadata or {}), dict(states or {})
        if name not in _WITH_STATES:
            _move_json_states(named, values, place, name)
        parts = Parts(weights, moments, _checked_metadata(values), named)
        parts = with_order(parts) if name == "lightning" else parts
        if isinstance(target, CheckpointTarget):
            target = target._replace(step=step)
        else:
            _note_step(parts, step)
        _WRITERS[name](target, parts)
    return parts


# Formats that can hold named states.
_WITH_STATES = ("mlstate", "torch", "dcp", "lightning")


def _as_state(cls: type[_State], state: Mapping[str, object] | None) -> _State | None:
    """Return a state as one of the class `cls`, None for None; refuse what cannot be stored."""
    converted = state if state is None or isinstance(state, cls) else cls(state)
    refuse_unstorable(converted or {}, every=True)
    return converted


def _note_step(parts: Parts, step: int | None) -> None:
    """Add the step to the metadata of `parts`, or warn if these have another one."""
    if step not in (None, parts.step or 0):
        other = parts.metadata.setdefault("step", step)
        if other != step:
            find_caller().warn(f"step {step} is not converted: the metadata have the step {other}")


def _move_json_states(
    states: dict[str, Any], metadata: dict[str, Any], place: Place, name: str
) -> None:
    """Move the values that JSON can hold from `states` to `metadata`.

    A warning names the others, which the format `name` cannot hold. Values that have only torch's
    metadata of a module are removed without one. Raises ValueError for a name in both.
    """
    json_states: dict[str, Any] = {}
    for key, value in [*states.items()]:
        if is_entries(key, value):
            if not value["entries"]:
                del states[key]  # only torch's metadata of a module
            continue
        with suppress(TypeError, ValueError):
            check_json_values(value, key, finite=False)
            json_states[key] = states.pop(key)
    if states:
        find_caller().warn(
            f"named states are not converted: {', '.join(sorted(states))}; checkpoints of mlstate "
            "and files of torch can hold them, and --skip leaves them out without this warning"
        )
    if both := sorted(metadata.keys() & json_states.keys()):
        raise ValueError(
            f"{place}: {both[0]!r} is metadata and a named state, and {name} has one place "
            "for both: rename one of them"
        )
    metadata |= json_states


def _refuse_parts(*states: StateDict | None) -> None:
    """Raise CompatibilityError for shards: other formats cannot record that they are parts."""
    from ..._sharding.layout import Shard

    for state in states:
        for name, value in () if state is None else dict(state).items():
            if isinstance(value, Shard) and value.layout.parts > 1:
                error = CompatibilityError(
                    f"{name!r} is part {value.index} of {value.layout.parts} of an array of shape "
                    f"{value.shape}: only checkpoints of mlstate.save can hold parts; save it with "
                    "mlstate.save, then convert the checkpoint"
                )
                error.name = name
                raise error


def _checked_metadata(metadata: Mapping[str, object] | None) -> dict[str, Any]:
    """Return a copy of the caller's metadata ({} for None); raise TypeError if it is not JSON."""
    copied = {} if metadata is None else dict(metadata)
    for key, value in copied.items():
        if not isinstance(key, str):
            raise TypeError(f"metadata keys must be str, got {key!r}")
        try:
            check_json_values(value, f"metadata[{key!r}]", finite=False)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"metadata {key!r} is not a plain value: {error}; use only numbers, strings, lists "
                "and dicts of these"
            ) from None
    return copied


# ---- writers ----


def _write_mlstate(target: CheckpointTarget, parts: Parts) -> None:
    """Save the parts as a checkpoint of mlstate, with the step of the target or else of theirs."""
    model, optimizer, metadata, named, *_ = parts
    states, entries = split_entries(named)
    folder = target._replace(entries=entries).save_folder()
    step = parts.step if target.step is None else target.step
    save_root(folder, model, optimizer, step, {"metadata": metadata, "states": states or None})


def _write_huggingface(target: Target, parts: Parts) -> None:
    """Write the model as a Hugging Face folder, which has no place for metadata.

    Raises CompatibilityError for an optimizer, and without a model.
    """
    model, optimizer, *_ = parts
    if optimizer is not None or model is None:
        raise CompatibilityError(
            f"{target.path}: a Hugging Face folder holds the weights of a model only: pass model=, "
            "without optimizer="
        )
    export(take_export(target.path, model), start=target)


def _write_torch(target: Target, parts: Parts) -> None:
    torch_backend("files of torch", PtBackend).write_pt(target, parts)


def _write_dcp(target: Target, parts: Parts) -> None:
    torch_backend("files of torch", DcpBackend).write_dcp(target, parts)


def _refuse_write(target: Target, _parts: Parts) -> None:
    """Raise CompatibilityError: folders of other programs are only read."""
    raise CompatibilityError(
        f"{target.path}: folders of this format are only read; choose another, such as .pt"
    )


def _write_lightning(target: Target, parts: Parts) -> None:
    write_ckpt(target, checkpoint_from(parts, target.path))


_WRITERS: dict[str, Callable[[Any, Parts], None]] = {  # of a `CheckpointTarget` or a `Target`
    "mlstate": _write_mlstate,
    "safetensors": write_safetensors_parts,
    "npz": write_npz_parts,
    "torch": _write_torch,
    "dcp": _write_dcp,
    "huggingface": _write_huggingface,
    "lightning": _write_lightning,
    **dict.fromkeys((layout.name for layout in LAYOUTS), _refuse_write),
}
