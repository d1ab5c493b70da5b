"""Read, write any format, for `load` and ``mlstate convert``; refuses what a format cannot hold."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._common.arrays import refuse_unstorable
from ..._common.atomic_file import Target
from ..._common.backend import TensorBackend, torch_backend
from ..._common.caller import find_caller
from ..._common.file_checksums import require_unchanged
from ..._common.json_values import check_json_values
from ...errors import (
    CompatibilityError,
    MLStateError,
    StoreError,
    StoreNotFoundError,
)
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import StateDict
from .._folder.local import LocalFolder
from .._states.modules import is_entries, split_entries
from .._store.checkpoint_files import CheckpointFiles, FolderContent
from .._store.open_path import refuse_existing, refuse_file_name
from .backend import DcpBackend, PtBackend
from .flat_file import (
    read_npz_parts,
    read_safetensors_parts,
    write_npz_parts,
    write_safetensors_parts,
)
from .formats import find_format, folder_of, place_of
from .lightning import (
    checkpoint_of,
    read_ckpt,
    save_checkpoint,
    split_checkpoint,
    warn_of_other_entries,
    write_ckpt,
)
from .parts import Parts, Selection
from .torch_weights import (
    read_entries,
    read_torch_weights,
    torch_weights_root,
)

if TYPE_CHECKING:
    from .._loaded_state import LoadedState
    from .._save.target import SaveFolder
    from .formats import Place


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
        from .._save.target import SaveFolder

        return SaveFolder(
            self.place,
            replace_steps=self.overwrite,
            content=self.content,
            any_suffix=self.any_suffix,
            entries=self.entries,
        )


class Format(NamedTuple):
    """Reader and writer of one format."""

    read: Callable[..., Parts]  # of a place; with `checked` too in formats of `_COMPARED_BY_LOAD`
    write: Callable[[Any, Parts], None]  # to a `CheckpointTarget` or a `Target`


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
    name = find_format(format, place)
    with _store_errors(place):
        if isinstance(place, Path):
            place.stat()  # a missing path raises FileNotFoundError for every format
            if checked and (name not in _COMPARED_BY_LOAD or _is_torch_folder(name, place)):
                require_unchanged(str(place))
        if name == "dcp":
            assert isinstance(place, Path)
            parts = torch_backend("files of torch", DcpBackend).read_dcp(place, chosen)
        elif name == "torch_checkpointing":
            parts = read_entries(folder_of(place), chosen)
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
    name = find_format(format, place)
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
    from .._save.save_root import save_root

    model, optimizer, metadata, named = parts
    states, entries = split_entries(named)
    folder = target._replace(entries=entries).save_folder()
    step = parts.step if target.step is None else target.step
    save_root(folder, model, optimizer, step, {"metadata": metadata, "states": states or None})


def _read_huggingface(path: Place, checked: bool) -> Parts:
    """Read the weights of a Hugging Face folder, in safetensors or in files of torch.

    `checked`: compare files of safetensors with their checksums, if there are any.
    """
    folder = folder_of(path)
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
    return read_entries(folder_of(path), Selection())


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
    "mlstate": Format(_read_mlstate, _write_mlstate),
    "safetensors": Format(read_safetensors_parts, write_safetensors_parts),
    "npz": Format(read_npz_parts, write_npz_parts),
    "torch": Format(_read_torch, _write_torch),
    "dcp": Format(_read_dcp, _write_dcp),
    "huggingface": Format(_read_huggingface, _write_huggingface),
    "torch_checkpointing": Format(_read_entries, _write_entries),
    "lightning": Format(_read_lightning, _write_lightning),
}
