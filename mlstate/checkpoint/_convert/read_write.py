"""Read any source as `Parts`; write parts in any format, or refuse values that it cannot hold."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._common.arrays import refuse_unstorable
from ..._common.atomic_file import Target
from ..._common.backend import torch_backend
from ..._common.caller import find_caller
from ..._common.json_values import check_json_values
from ..._common.overwrite import Existing, file_at, require_free
from ..._sharding.layout import Shard
from ...errors import CompatibilityError, MLStateError
from ...state._optimizer_state import OptimizerStateDict
from .._files.backend import DcpBackend, PtBackend
from .._files.flat_file import split_texts, write_npz_parts, write_safetensors_parts
from .._files.parts import Parts, Selection
from .._load.arguments import check_request
from .._load.loader import Loader, load_new_state
from .._options import LOAD_DEFAULTS, LoadOptions, SaveOptions, complete_options
from .._save.save_root import save_root
from .._save.target import SaveFolder
from .._sources.open_source import open_source
from .._sources.readers import store_errors
from .._sources.training_step import StepSource
from .._sources.weights import SafetensorsSource
from .._sources.whole import WholeSource
from .._states.modules import all_entries, is_entries, split_entries
from .._store.open_path import open_files, refuse_file_name
from .lightning_file import checkpoint_from, with_order

if TYPE_CHECKING:
    from ..._common.overwrite import Shapes
    from ...state._state_dict import StateDict
    from .._loaded_state import LoadedState
    from .._sources.protocol import Source


# ---- reading ----


def read_parts(
    source: Source, selection: Selection | None = None, options: LoadOptions | None = None
) -> Parts:
    """Return the content of a source, of the entries in `selection` (None: all).

    `options`: of a load that changes the tensors. The step is in the optimizer, or without one in
    the metadata. Arrays of torch files may be views of mapped files.
    """
    chosen = selection or Selection()
    load_options: LoadOptions = {} if options is None else options
    request = check_request(complete_options(read_parts, load_options, LOAD_DEFAULTS))
    if isinstance(source, WholeSource | StepSource):
        source.select(chosen)
    source.check(request.options)
    is_changed = request.names or request.dtype or request.options["rename"]
    if isinstance(source, WholeSource) and not (is_changed or request.options["device"]):
        return source.parts.refuse_unreadable()
    if isinstance(source, SafetensorsSource):
        source.takes_both = True  # `split_texts` divides them
    loaded = source.attempt(partial(load_new_state, request, source))
    parts = _parts_of(loaded, source)
    # Entries of torch modules that are not tensors: `load` hides those that have only metadata.
    states, _ = split_entries(parts.states)
    if request.names is None:
        states |= all_entries(Loader(request, source))
    parts = parts._replace(states=states)
    return parts if isinstance(source, WholeSource) else chosen.apply(parts, source.path)


def _parts_of(loaded: LoadedState, source: Source) -> Parts:
    """Return the content of a loaded state."""
    optimizer, metadata = loaded.optimizer, dict(loaded.metadata or {})
    if not (optimizer is None or isinstance(optimizer, OptimizerStateDict)):
        optimizer = OptimizerStateDict(optimizer, step=loaded.step or 0)
    parts = Parts(loaded.model, optimizer, metadata, dict(loaded.states))
    if optimizer is None and loaded.step not in (None, parts.step):
        metadata.setdefault("step", loaded.step)
    if isinstance(source, SafetensorsSource) and parts.model is not None:
        parts = split_texts(source.path, parts.model, metadata)
    return parts


# ---- writing ----

_DCP_FILES = (".distcp", "meta.pt")  # beside .metadata


class OtherTarget(NamedTuple):
    """The target of a format of other programs, as it was when the writing began."""

    target: Target
    existing: Existing | None
    overwrite: bool | None


def begin_write(
    path: str | os.PathLike[str], name: str, overwrite: bool | None, *, any_suffix: bool = False
) -> SaveFolder | OtherTarget:
    """Return the target at `path` of the format `name` as it is now, for a later `write_parts`.

    Raises StoreError (EEXIST) if no tensors may replace it; see `require_free`.
    `write_parts` replaces only the content that this function has seen. `any_suffix`: the path of a
    folder may have the suffix of a file.
    """
    files = open_files(path)
    if name in ("mlstate", "dcp", "huggingface") and not any_suffix:
        refuse_file_name(files.folder)
    if name == "mlstate":
        content = files.content()
        files.refuse_foreign(overwrite)  # after the listing, so that nothing appears in between
        return SaveFolder(files.path, overwrite=overwrite, content=content, any_suffix=any_suffix)
    target = Target.of(path)
    # an export knows which files of a folder it would lose
    existing = None if name == "huggingface" else _existing(target, name)
    require_free(target.path, existing, overwrite, name)
    return OtherTarget(target, existing, overwrite)


def _existing(target: Target, name: str) -> Existing | None:
    """Return what exists at a target of the format `name`."""
    path = target.path
    if target.is_vacant and (name == "dcp" or not target.is_folder):
        return None
    existing = _dcp_at(target) if name == "dcp" else file_at(path)
    if existing is None or existing.foreign or existing.damage:
        return existing
    if existing.kind == "safetensors" and existing.shapes is None:  # of another program
        return existing
    try:
        source = open_source(path)
        return Existing(source.format, lambda: _shapes_of(read_parts(source)))
    except MLStateError as error:
        return Existing(existing.kind, damage=str(error))


def _dcp_at(target: Target) -> Existing:
    """Return what exists at the target of a folder of torch.distributed.checkpoint."""
    foreign = "is a file, and the target is a folder"
    if target.is_folder:
        names = sorted(os.listdir(target.path))
        others = [name for name in names if name != ".metadata" and not name.endswith(_DCP_FILES)]
        foreign = "" if ".metadata" in names else "is not a torch checkpoint"
        foreign = f"holds {others[0]!r}" if others else foreign
    return Existing("dcp", foreign=foreign)


def _shapes_of(parts: Parts) -> Shapes:
    """Return the shapes of the tensors of model and optimizer."""
    return {
        f"{label}{name}": tuple(value.shape)
        for label, state in (("", parts.model), ("optimizer.", parts.optimizer))
        for name, value in (state or {}).items()
    }


# Formats that can hold named states.
_WITH_STATES = ("mlstate", "torch", "dcp", "lightning")


def write_parts(
    path: str, name: str, target: SaveFolder | OtherTarget, parts: Parts, step: int | None = None
) -> Parts:
    """Write a state in the format `name` to the `target` at `path`; return the parts that it has.

    The write is atomic. A target that changed since `begin_write` is left unchanged. `step`: of a
    checkpoint; None: of the metadata or the optimizer. A warning tells if the metadata of another
    format have another step. Raises ValueError without a state, and CompatibilityError for values
    that the format cannot hold.
    """
    model, optimizer, metadata, states, *_ = parts
    if model is None and optimizer is None and not (states and name in _WITH_STATES):
        raise ValueError(f"{path}: there is neither a model nor an optimizer to write")
    for state in filter(None, (model, optimizer)):
        refuse_unstorable(state, every=True)
        if name != "mlstate":
            _refuse_parts(state)
    with store_errors(path):
        parts = Parts(model, optimizer, dict(metadata), dict(states))
        if name not in _WITH_STATES:
            _move_json_states(parts.states, parts.metadata, path, name)
        parts = with_order(parts) if name == "lightning" else parts
        if isinstance(target, SaveFolder):
            _write_mlstate(target, parts, parts.step if step is None else step)
        else:
            _note_step(parts, step)
            other, existing, overwrite = target
            require_free(other.path, existing, overwrite, name, lambda: _shapes_of(parts))
            _WRITERS[name](other, parts)
    return parts


def _note_step(parts: Parts, step: int | None) -> None:
    """Add the step to the metadata of `parts`, or warn if these have another one."""
    is_new = step not in (None, parts.step or 0)
    if is_new and (other := parts.metadata.setdefault("step", step)) != step:
        find_caller().warn(f"step {step} is not converted: the metadata have the step {other}")


def _move_json_states(
    states: dict[str, Any], metadata: dict[str, Any], place: str, name: str
) -> None:
    """Move the values that JSON can hold from `states` to `metadata`, and remove the others.

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
        states.clear()
    if both := sorted(metadata.keys() & json_states.keys()):
        raise ValueError(
            f"{place}: {both[0]!r} is metadata and a named state, and {name} has one place "
            "for both: rename one of them"
        )
    metadata |= json_states


def _refuse_parts(state: StateDict) -> None:
    """Raise CompatibilityError for shards: other formats cannot record that they are parts."""
    for name, value in dict(state).items():
        if isinstance(value, Shard) and value.layout.parts > 1:
            raise CompatibilityError(
                f"{name!r} is part {value.index} of {value.layout.parts} of an array of shape "
                f"{value.shape}: only checkpoints of mlstate.save can hold parts; save it with "
                "mlstate.save, then convert the checkpoint",
                name=name,
            )


# ---- writers ----


def _write_mlstate(target: SaveFolder, parts: Parts, step: int | None) -> None:
    """Save the parts as a checkpoint of mlstate, with this step."""
    states, entries = split_entries(parts.states)
    options: SaveOptions = {"metadata": parts.metadata, "states": states or None}
    folder = target._replace(entries=entries)
    save_root(folder, parts.model, parts.optimizer, step, options)


def _write_lightning(target: Target, parts: Parts) -> None:
    checkpoint = checkpoint_from(parts, target.path)
    backend = torch_backend("files of Lightning", PtBackend)
    target.write_content(partial(backend.write_tree, checkpoint))


_WRITERS: dict[str, Callable[[Target, Parts], None]] = {
    "safetensors": write_safetensors_parts,
    "npz": write_npz_parts,
    "torch": lambda *write: torch_backend("files of torch", PtBackend).write_pt(*write),
    "dcp": lambda *write: torch_backend("files of torch", DcpBackend).write_dcp(*write),
    "lightning": _write_lightning,
}
