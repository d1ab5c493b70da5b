"""Read and write states in the formats of other programs; implements ``mlstate convert``.

The suffix of a path determines the format. For a directory, its content does.

The format ``torch_checkpointing`` is a directory of that package; it is only read.

==============  ==========================  ====================================================
format          path                        holds
==============  ==========================  ====================================================
``mlstate``     a directory                 a checkpoint of `mlstate.save`
``safetensors`` ``.safetensors``            arrays and texts
``npz``         ``.npz``                    arrays of `numpy.savez`
``torch``       ``.pt .pth .bin``           what ``torch.load`` reads with ``weights_only``
``dcp``         a directory, or ``.dcp``    a checkpoint of torch.distributed.checkpoint
``huggingface`` a directory                 weights of a Hugging Face model
``lightning``   ``.ckpt``                   a checkpoint of Lightning
==============  ==========================  ====================================================

A URL of an object store is a checkpoint of mlstate. As a source, it may also be a ``.safetensors``
file, or the index file of a Hugging Face folder.

Safetensors and npz files have one flat level of names. If such a file holds a model and an
optimizer, their names have the prefixes ``model.`` and ``optimizer.``, and the metadata entry
``mlstate_parts`` records this. A single state has no prefix. A file without that entry is from
another program and holds a model.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._common.arrays import refuse_unstorable
from ..._common.atomic_file import Target, new_file
from ..._common.backend import TensorBackend, torch_backend
from ..._common.caller import find_caller
from ..._common.file_checksums import require_unchanged
from ..._common.json_values import check_json_values
from ..._common.local_path import local_path
from ..._common.text import names_hint
from ...errors import (
    CompatibilityError,
    FormatError,
    MLStateError,
    StoreError,
    StoreNotFoundError,
)
from ...state._kind import describe, restore
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import StateDict
from .._folder.local import LocalFolder
from .._folder.object import StoreURL
from .._folder.weight_names import is_index
from .._states.modules import is_entries, split_entries
from .._store.checkpoint_files import CheckpointFiles, FolderContent
from .._store.open_path import is_url, open_folder, refuse_existing, refuse_file_name
from .backend import DcpBackend, PtBackend
from .lightning import (
    SUFFIX,
    checkpoint_of,
    read_ckpt,
    save_checkpoint,
    split_checkpoint,
    warn_of_other_entries,
    write_ckpt,
)
from .parts import Parts, Selection
from .torch_weights import (
    entry_files,
    read_entries,
    read_torch_weights,
    torch_weights_root,
)

if TYPE_CHECKING:
    from typing import TypeAlias

    from ..._types import NDArray
    from .._folder.protocol import Folder
    from .._load import LoadedState
    from .._save import SaveFolder

    Place: TypeAlias = Path | StoreURL

# Metadata entry that describes the parts of a flat file; it is not part of the user's metadata.
PARTS = "mlstate_parts"
FLAT = ("safetensors", "npz")  # formats with one level of names
_PREFIXES = {"model": "model.", "optimizer": "optimizer."}


# ---- formats ----


class CheckpointTarget(NamedTuple):
    """A checkpoint of mlstate to write, and its content when the writing began."""

    place: Place
    content: FolderContent
    overwrite: bool
    any_suffix: bool = False  # the path of the folder may have the suffix of a file
    step: int | None = None  # of the new checkpoint; None: of the parts
    entries: Mapping[str | None, tuple[Any, Any]] = MappingProxyType({})  # as of `SaveFolder`

    def save_folder(self) -> SaveFolder:
        """Return the path to pass to `save`, with what it may replace."""
        from .._save import SaveFolder

        return SaveFolder(
            self.place,
            replace_steps=self.overwrite,
            content=self.content,
            any_suffix=self.any_suffix,
            entries=self.entries,
        )


class Format(NamedTuple):
    """Reader, writer and path suffixes of one file format."""

    read: Callable[..., Parts]  # of a place; with `checked` too in formats of `_COMPARED_BY_LOAD`
    write: Callable[[Any, Parts], None]  # to a `CheckpointTarget` or a `Target`
    suffixes: tuple[str, ...]


def place_of(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, object] | None = None,
    *,
    reads: bool = False,
) -> Place:
    """Return a local path, or the URL of a folder in an object store.

    `storage_options`: of the store; None: the defaults. ValueError for options of a local path.
    `reads`: the path may name one file of weights, as for `open_folder`.
    """
    if is_url(path) or storage_options is not None:
        url = open_folder(path, storage_options, reads=reads).path
        assert isinstance(url, StoreURL)  # options of a local path are refused
        return url
    return Path(local_path(path))


def _folder_of(place: Place) -> Folder:
    return LocalFolder(str(place)) if isinstance(place, Path) else place.folder


def format_of(path: str | os.PathLike[str]) -> str:
    """Return the name of a path's format, from an existing directory's content or the suffix.

    A path without suffix is an mlstate checkpoint, and so is a URL without a suffix of another
    format. The index file of a Hugging Face folder at a URL is the folder. Raises ValueError for an
    unknown suffix.
    """
    place = place_of(path, reads=True)
    if not isinstance(place, Path):
        if place.folder.file:
            return "huggingface" if is_index(place.folder.file) else "safetensors"
        return SUFFIXES.get(os.path.splitext(place)[1].lower(), "mlstate")
    if place.is_dir():
        if (place / ".metadata").exists():
            return "dcp"
        if (place / "manifest.json").exists():
            return "mlstate"
        folder = _folder_of(place)
        if folder.find_weights() is not None or torch_weights_root(folder) is not None:
            return "huggingface"
        if entry_files(folder):
            return "torch_checkpointing"
    elif is_index(place.name):
        return "huggingface"
    suffix = place.suffix.lower()
    if suffix == SUFFIX and not place.is_dir():  # a folder of MLStateCheckpointIO has it too
        return "lightning"
    if suffix and suffix not in SUFFIXES and not place.is_dir():
        raise ValueError(
            f"{place}: the suffix {place.suffix!r} belongs to no known format; known are "
            f"{' '.join(SUFFIXES)}, and folders of mlstate and torch. Otherwise pass format= "
            f"(--from or --to on the command line){names_hint(suffix, SUFFIXES, listed=False)}"
        )
    return SUFFIXES.get(suffix, "mlstate")


def _find_format(format: str | None, path: Place) -> str:
    """Return the format's name, `format_of(path)` for None; raise ValueError if unknown.

    Also raises for a URL whose format cannot be in a store.
    """
    name = format_of(path) if format is None else format
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    check_format(path, name)
    return name


def check_format(path: Place, name: str) -> None:
    """Raise ValueError if `path` is a URL and the format `name` cannot be in a store."""
    folder = _folder_of(path)
    if name != "mlstate" and not folder.file:
        remedy = "copy it from or to a local path by the store's own tool, and convert there"
        folder.require_local(f"the format {name}", remedy)


# ---- reading and writing ----


@contextmanager
def _store_errors(path: Place) -> Iterator[None]:
    """Raise an OSError of the block as StoreError, which all of mlstate raises.

    `path`: named in the error if the OSError names none. ENOENT becomes StoreNotFoundError.
    """
    try:
        yield
    except MLStateError:
        raise
    except OSError as error:
        kind = StoreNotFoundError if error.errno == errno.ENOENT else StoreError
        # filename2 is the target of a failed rename of a temporary file
        named_path = error.filename2 or error.filename or path
        raise kind(error.errno, error.strerror, str(named_path)) from error


def read_any(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    selection: Selection | None = None,
    checked: bool = True,
) -> Parts:
    """Read a state from a file or directory of any known format, or a checkpoint at a URL.

    `format`: its name; None: by `format_of`. Arrays of torch files may be views of the
    memory-mapped file. If a file numbers the parameters of an optimizer, as
    ``optimizer.state_dict()`` does, the names are the ``param_names`` of its groups, else
    ``param_0``, ``param_1``, ... Metadata are the other plain values in the file, and states are
    all other entries; of Lightning only the model is read without `selection`, with a warning. Only
    the entries of `selection` are returned, and of a distributed checkpoint only these are read.
    `checked`: compare elements with their checksums, or files with the checksums of `checksum`.
    """
    chosen = selection or Selection()
    place = place_of(path, storage_options, reads=True)
    name = _find_format(format, place)
    with _store_errors(place):
        if isinstance(place, Path):
            place.stat()  # a missing path raises FileNotFoundError for every format
            if checked and (name not in _COMPARED_BY_LOAD or _is_torch_folder(name, place)):
                require_unchanged(str(place))
        if name == "dcp":
            assert isinstance(place, Path)
            parts = torch_backend("files of torch", DcpBackend).read_dcp(place, chosen)
        elif name == "torch_checkpointing":
            parts = read_entries(_folder_of(place), chosen)
        else:
            # the reader for torch returns all entries of Lightning
            is_part = selection is not None and name == "lightning"
            options = (checked,) if name in _COMPARED_BY_LOAD else ()
            parts = FORMATS["torch" if is_part else name].read(place, *options)
        return chosen.apply(parts, place)


def _is_torch_folder(name: str, place: Path) -> bool:
    """Return whether a Hugging Face folder has files of torch only."""
    return name == "huggingface" and LocalFolder(str(place)).find_weights() is None


def begin_write(
    place: Place, name: str, overwrite: bool, *, any_suffix: bool = False
) -> CheckpointTarget | Target:
    """Return the target at `place` of the format `name` as it is now, for a later `write_any`.

    Raises StoreError (EEXIST) if it exists, unless `overwrite`. `write_any` replaces only the
    content that this function has seen. `any_suffix`: the path of a folder may have the suffix of a
    file.
    """
    target: CheckpointTarget | Target
    files = CheckpointFiles(_folder_of(place))
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
) -> None:
    """Write a state to a file or directory of any known format, or to a checkpoint at a URL.

    The write is atomic. `overwrite` replaces an existing file, checkpoint or torch directory of the
    same format, including all steps of a `CheckpointManager`. A caller that began earlier passes
    the `target` of `begin_write` instead. A target that changed since then is left unchanged.
    `step`: of a checkpoint; None: of the metadata or the optimizer. A warning tells if the metadata
    of another format have another step.
    Raises ValueError without a state, StoreError (EEXIST) for a target that must stay, and
    CompatibilityError for values that the format cannot hold.
    """
    place = place_of(path, storage_options)
    name = _find_format(format, place)
    if model is None and optimizer is None and not (states and name in _WITH_STATES):
        raise ValueError(f"{path}: there is neither a model nor an optimizer to write")
    weights = model if model is None or isinstance(model, StateDict) else StateDict(model)
    moments = optimizer
    if moments is not None and not isinstance(moments, OptimizerStateDict):
        moments = OptimizerStateDict(moments)
    for state in (weights, moments):
        refuse_unstorable(state or {}, every=True)
    target = target or begin_write(place, name, overwrite)
    if name != "mlstate":
        _refuse_parts(weights, moments)
    with _store_errors(place):
        values, named = dict(metadata or {}), dict(states or {})
        if name not in _WITH_STATES:
            texts = _take_json_states(named)
            if both := sorted(values.keys() & texts.keys()):
                raise ValueError(
                    f"{place}: {both[0]!r} is metadata and a named state, and {name} has one place "
                    "for both: rename one of them"
                )
            values |= texts
        parts = Parts(weights, moments, _checked_metadata(values), named)
        if isinstance(target, CheckpointTarget):
            target = target._replace(step=step)
        elif step not in (None, parts.step or 0):
            other = parts.metadata.setdefault("step", step)
            if other != step:
                find_caller().warn(
                    f"step {step} is not converted: the metadata have the step {other}"
                )
        FORMATS[name].write(target, parts)


# Formats that can hold named states.
_WITH_STATES = ("mlstate", "torch", "dcp")


def _take_json_states(states: dict[str, Any]) -> dict[str, Any]:
    """Remove the values that JSON can hold from `states`, and return them by name.

    A warning names the others, which the format cannot hold. Values that have only torch's metadata
    of a module are removed without one.
    """
    json_states: dict[str, Any] = {}
    for name, value in [*states.items()]:
        if is_entries(name, value):
            if not value["entries"]:
                del states[name]  # only torch's metadata of a module
            continue
        with suppress(TypeError, ValueError):
            check_json_values(value, name, finite=False)
            json_states[name] = states.pop(name)
    if states:
        find_caller().warn(
            f"named states are not converted: {', '.join(sorted(states))}; checkpoints of mlstate "
            "and files of torch can hold them, and --skip leaves them out without this warning"
        )
    return json_states


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


# ---- model and optimizer in one flat file ----


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


def has_prefixes(texts: Mapping[str, str]) -> bool:
    """Return whether a file's names begin with "model." or "optimizer.".

    `texts`: the file's metadata.
    """
    try:
        record = json.loads(texts.get(PARTS, "{}"))
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and "parts" in record


def _split_state(
    path: Path, state: Mapping[str, object], record: Mapping[str, object]
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


def _restore_state(path: Path, arrays: dict[str, Any], text: object) -> StateDict:
    """Return a state of the class that `text` describes; None: the file is of another program."""
    if not (text is None or isinstance(text, str)):
        raise _description_error(path, f"{text!r} does not describe a state")
    return restore(arrays, text, str(path))


def _description_error(path: Path, reason: str) -> FormatError:
    """Return the FormatError for a file whose description of its content is malformed."""
    error = FormatError(f"{path}: entry {PARTS!r} does not describe the file: {reason}")
    error.path, error.name = str(path), PARTS
    return error


# ---- safetensors ----


def _write_safetensors(target: Target, parts: Parts) -> None:
    """Write a converted state to a safetensors file; metadata other than str are stored as JSON.

    The record in the metadata, under `PARTS`, lists the keys of these. Raises ValueError if the
    metadata has this key already.
    """
    from .. import save_file

    model, optimizer, metadata, _ = parts
    state, record = _join_states(model, optimizer)
    json_values = {key: value for key, value in metadata.items() if not isinstance(value, str)}
    if json_values:
        record["json"] = sorted(json_values)
    texts = metadata | {key: json.dumps(value) for key, value in json_values.items()}
    if PARTS in texts:
        raise ValueError(f"metadata key {PARTS!r} is reserved: choose another")
    if record:
        texts[PARTS] = json.dumps(record, sort_keys=True)
    with new_file(target) as temporary:
        save_file(state, temporary, texts)


def _read_safetensors(path: Place, checked: bool) -> Parts:
    """Return the content (`Parts`) of a safetensors file, on this machine or in a store.

    `checked`: compare it with its checksums, if there are any.
    """
    if isinstance(path, Path):
        return read_file(path, mmap=False, checked=checked)
    from ... import checkpoint

    loaded = checkpoint.load(path, verify=checked)
    texts = dict(loaded.metadata or {})
    assert loaded.model is not None
    return _parts_of_texts(Path(path.folder.file), loaded.model, texts)


def read_file(path: Path, *, mmap: bool, checked: bool = True) -> Parts:
    """Return the content (`Parts`) of a safetensors file.

    `mmap`: with views of the mapped file. `checked`: compare it with its checksums, if any.
    """
    from .. import load_file, load_metadata

    metadata: dict[str, Any] = dict(load_metadata(path))
    return _parts_of_texts(path, load_file(path, mmap=mmap, verify=checked), metadata)


def _parts_of_texts(path: Path, state: StateDict, metadata: dict[str, Any]) -> Parts:
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

    Raises TypeError for a value that is not in memory, or has Python objects.
    """
    import numpy as np

    from ..._common.arrays import is_torch
    from ..._common.backend import backend_of

    arrays: dict[str, NDArray] = {}
    for name, value in dict(state).items():
        if is_torch(value):
            arrays[name] = backend_of(value, TensorBackend).arrays_of({name: value.detach().cpu()})[
                name
            ]
        elif isinstance(value, np.ndarray | np.generic):
            arrays[name] = np.asarray(value)
        elif hasattr(value, "__dlpack__"):
            arrays[name] = np.from_dlpack(value)
        elif hasattr(value, "__array_interface__"):
            arrays[name] = np.asarray(value)
        else:
            raise TypeError(f"{name!r} is a {type(value).__name__}, not a whole array in memory")
        if arrays[name].dtype.hasobject:
            raise TypeError(f"{name!r} holds Python objects, which cannot be converted")
    return arrays


def _write_npz(target: Target, parts: Parts) -> None:
    """Write a state to an .npz file, whose record has the kind of state and the metadata."""
    from .npz import write_npz

    model, optimizer, metadata, _ = parts
    state, record = _join_states(model, optimizer)
    kind = describe(state)
    write_npz(target, as_arrays(state), {**record, "kind": kind, "metadata": metadata})


def _read_npz(path: Path) -> Parts:
    """Return the content (`Parts`) of a .npz file of `write_npz` or of NumPy.

    Raises FormatError for a damaged file.
    """
    from .npz import read_npz

    arrays, record = read_npz(path)
    metadata = record.get("metadata", {})
    if not isinstance(metadata, dict):
        raise _description_error(path, "the metadata are not a JSON object")
    state = _restore_state(path, arrays, record.get("kind"))
    return Parts(*_split_state(path, state, record), metadata, {})


# ---- mlstate checkpoints and torch files ----


def _read_mlstate(path: Place, checked: bool) -> Parts:
    from ... import checkpoint

    return parts_of(checkpoint.load(path, verify=checked))


def parts_of(loaded: LoadedState) -> Parts:
    """Return the content (`Parts`) of a loaded checkpoint, in the form of `read_any`.

    The step is in the optimizer, or without one in the metadata.
    """
    metadata = dict(loaded.metadata or {})
    optimizer = loaded.optimizer
    if optimizer is None and loaded.step is not None:
        metadata.setdefault("step", loaded.step)
    if not (optimizer is None or isinstance(optimizer, OptimizerStateDict)):
        optimizer = OptimizerStateDict(optimizer, step=loaded.step or 0)
    return Parts(loaded.model, optimizer, metadata, dict(loaded.states))


def _write_mlstate(target: CheckpointTarget, parts: Parts) -> None:
    """Save the parts as a checkpoint of mlstate, with the step of the target or else of theirs."""
    from .._save import save

    model, optimizer, metadata, named = parts
    states, entries = split_entries(named)
    folder = target._replace(entries=entries).save_folder()
    step = parts.step if target.step is None else target.step
    save(folder, model, optimizer, step=step, metadata=metadata, states=states or None)


def _read_huggingface(path: Place, checked: bool) -> Parts:
    """Read the weights of a Hugging Face folder, in safetensors or in files of torch.

    `checked`: compare files of safetensors with their checksums, if there are any.
    """
    folder = _folder_of(path)
    root = torch_weights_root(folder)
    if root is None:
        return _read_mlstate(path, checked)
    return Parts(read_torch_weights(folder, root), None, {}, {})


def _write_huggingface(target: Target, parts: Parts) -> None:
    """Write the model as a Hugging Face folder, which has no place for metadata.

    Raises CompatibilityError for an optimizer, and without a model.
    """
    from .._huggingface.export import export, take_export

    model, optimizer, *_ = parts
    if optimizer is not None or model is None:
        raise CompatibilityError(
            f"{target.path}: a Hugging Face folder holds the weights of a model only: pass model=, "
            "without optimizer="
        )
    export(take_export(target.path, model), start=target)


def _read_torch(path: Path) -> Parts:
    return torch_backend("files of torch", PtBackend).read_pt(path)


def _write_torch(target: Target, parts: Parts) -> None:
    torch_backend("files of torch", PtBackend).write_pt(target, parts)


def _read_dcp(path: Path) -> Parts:
    return torch_backend("files of torch", DcpBackend).read_dcp(path, Selection())


def _write_dcp(target: Target, parts: Parts) -> None:
    torch_backend("files of torch", DcpBackend).write_dcp(target, parts)


def _read_entries(path: Path) -> Parts:
    return read_entries(_folder_of(path), Selection())


def _write_entries(target: Target, _parts: Parts) -> None:
    """Raise CompatibilityError: the format torch_checkpointing is only read."""
    raise CompatibilityError(
        f"{target.path}: folders of torch_checkpointing are only read; choose another format, such "
        "as .pt"
    )


def _read_lightning(path: Path) -> Parts:
    """Return the model of a checkpoint of Lightning; `convert_lightning` converts all of it.

    A warning lists the entries that are left out.
    """
    from ..._common.arrays import is_torch

    checkpoint = read_ckpt(path)
    warn_of_other_entries(checkpoint)
    model = {key: value for key, value in checkpoint["state_dict"].items() if is_torch(value)}
    arrays = torch_backend("files of Lightning", TensorBackend).arrays_of(model)
    return Parts(StateDict(arrays), None, {}, {})


def read_whole_lightning(path: Path) -> Parts:
    """Return the model of a checkpoint of Lightning, and its other entries as its folder has them.

    The file is compared with its checksums, if there are any. Values that a folder cannot have are
    returned too.
    """
    with _store_errors(path):
        require_unchanged(str(path))
        model, states = split_checkpoint(read_ckpt(path), exact=False)
    arrays = torch_backend("files of Lightning", TensorBackend).arrays_of(model)
    return Parts(StateDict(arrays), None, {}, states)


def convert_lightning(
    source: LoadedState | Path, target: CheckpointTarget | Target
) -> dict[str, int]:
    """Convert a whole checkpoint: a loaded folder to a file, or a file (a path) to a folder.

    `target`: a `CheckpointTarget` for a folder, a `Target` for a file. Returns ``tensors`` and
    ``bytes``: the number of tensors of the model, and their bytes.
    """
    from ..._common.arrays import is_torch

    if isinstance(target, CheckpointTarget):
        with _store_errors(target.place):
            assert isinstance(source, Path)
            require_unchanged(str(source))
            checkpoint = read_ckpt(source)
            save_checkpoint(checkpoint, target.save_folder())
    else:
        with _store_errors(Path(target.path)):
            assert not isinstance(source, Path)
            checkpoint = checkpoint_of(source, "the source")
            write_ckpt(target, checkpoint)
    tensors = [value for value in checkpoint.get("state_dict", {}).values() if is_torch(value)]
    return {"tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors)}


def _write_lightning(target: Target, _parts: Parts) -> None:
    """Raise CompatibilityError: `convert_lightning` writes these files, from a folder only."""
    raise CompatibilityError(
        f"{target.path}: only a folder of MLStateCheckpointIO can become a checkpoint of "
        "Lightning, whose Trainer needs its own entries; choose another format, such as .pt"
    )


_COMPARED_BY_LOAD = ("mlstate", "safetensors", "huggingface")  # with checksums, while they are read
FORMATS = {
    "mlstate": Format(_read_mlstate, _write_mlstate, ()),
    "safetensors": Format(_read_safetensors, _write_safetensors, (".safetensors",)),
    "npz": Format(_read_npz, _write_npz, (".npz",)),
    "torch": Format(_read_torch, _write_torch, (".pt", ".pth", ".bin")),
    "dcp": Format(_read_dcp, _write_dcp, (".dcp",)),
    "huggingface": Format(_read_huggingface, _write_huggingface, ()),
    "torch_checkpointing": Format(_read_entries, _write_entries, ()),
    "lightning": Format(_read_lightning, _write_lightning, ()),  # `format_of` knows its suffix
}
SUFFIXES = {
    suffix: name for name, file_format in FORMATS.items() for suffix in file_format.suffixes
}
