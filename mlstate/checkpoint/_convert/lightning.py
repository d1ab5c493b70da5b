"""A checkpoint of Lightning as a folder of mlstate, and such a folder as a ``.ckpt`` file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.arrays import is_torch
from ..._common.backend import TensorBackend, torch_backend
from ..._common.file_checksums import require_unchanged
from ...state._state_dict import StateDict
from .._files.parts import Parts
from .._layouts.lightning import (
    STATE,
    checkpoint_from,
    checkpoint_of,
    read_ckpt,
    split_checkpoint,
    with_order,
    write_ckpt,
)
from .._load.load import load
from .._options import complete_save_options
from .._save.save_root import save_root
from .._sources.open_source import open_source
from .._sources.readers import store_errors
from .read_write import CheckpointTarget, read_parts

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from typing import Unpack

    from ..._common.atomic_file import Target
    from .._options import SaveOptions
    from .._sources.protocol import Source
    from .._store.open_path import RootPath


def save_checkpoint(
    checkpoint: Mapping[str, Any], path: str | os.PathLike[str], **options: Unpack[SaveOptions]
) -> RootPath:
    """Save a checkpoint of Lightning, a dict, as a folder of mlstate at `path`.

    `options` are keywords of `mlstate.save`. Raises as `split_checkpoint` does.
    """
    model, states = split_checkpoint(checkpoint)
    options["states"] = states
    complete = complete_save_options(save_checkpoint, options)
    return save_root(path, model, None, checkpoint.get("global_step"), complete)


def read_checkpoint(
    source: str | os.PathLike[str] | Source, device: object = "cpu"
) -> dict[str, Any]:
    """Return Lightning's checkpoint, a dict, from a folder: as `save_checkpoint` got it.

    `device`: of its tensors. Of a folder that it did not save, returns what `checkpoint_from` does.
    """
    opened = open_source(source)
    if is_saved(opened):
        return checkpoint_of(load(opened, device=device))
    parts = with_order(read_parts(opened))
    if opened.manifest.step is not None:
        parts.metadata.setdefault("step", opened.manifest.step)
    return checkpoint_from(parts, opened.path)


def is_saved(source: Source) -> bool:
    """Return whether a source has what `save_checkpoint` saves, so that it returns exactly."""
    return STATE in (source.manifest.states or {})


def convert_lightning(source: Source, target: CheckpointTarget | Target) -> dict[str, int]:
    """Convert a whole checkpoint: a folder of `save_checkpoint` to a file, or a file to a folder.

    `target`: a `CheckpointTarget` for a folder, a `Target` for a file. Returns ``tensors`` and
    ``bytes``: the number of tensors of the model, and their bytes.
    """
    if isinstance(target, CheckpointTarget):
        with store_errors(target.place):
            require_unchanged(source.path)
            checkpoint = read_ckpt(Path(source.path))
            save_checkpoint(checkpoint, target.save_folder())
    else:
        with store_errors(Path(target.path)):
            checkpoint = read_checkpoint(source)
            write_ckpt(target, checkpoint)
    tensors = [value for value in checkpoint.get("state_dict", {}).values() if is_torch(value)]
    return {"tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors)}


def read_whole_lightning(path: Path) -> Parts:
    """Return the model of a checkpoint of Lightning, and its other entries as its folder has them.

    The file is compared with its checksums, if there are any. Values that a folder cannot have are
    returned too.
    """
    with store_errors(path):
        require_unchanged(str(path))
        model, states = split_checkpoint(read_ckpt(path), exact=False)
    arrays = torch_backend("files of Lightning", TensorBackend).arrays_of(model)
    return Parts(StateDict(arrays), None, {}, states)
