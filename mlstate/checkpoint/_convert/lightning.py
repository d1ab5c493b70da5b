"""A checkpoint of Lightning as a folder of mlstate, and such a folder as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.backend import TensorBackend, torch_backend
from ..._common.file_checksums import require_unchanged
from ...state._state_dict import StateDict
from .._files.parts import Parts, Selection
from .._layouts.lightning import STATE, checkpoint_of, read_ckpt, split_checkpoint
from .._load.load import load
from .._options import SaveOptions, complete_save_options
from .._save.save_root import save_root
from .._sources.open_source import open_source
from .._sources.readers import store_errors
from .._sources.whole import WholeSource
from .lightning_file import checkpoint_from, with_order
from .read_write import read_parts

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from typing import Unpack

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


def read_checkpoint(path: str | os.PathLike[str], device: object = "cpu") -> dict[str, Any]:
    """Return Lightning's checkpoint, a dict, from a folder: as `save_checkpoint` got it.

    `device`: of its tensors. Of a folder that it did not save, returns what `checkpoint_from` does.
    """
    source = open_source(path)
    if is_saved(source):
        return checkpoint_of(load(source, device=device))
    parts = with_order(read_parts(source))
    if source.manifest.step is not None:
        parts.metadata.setdefault("step", source.manifest.step)
    return checkpoint_from(parts, source.path)


def is_saved(source: Source) -> bool:
    """Return whether a source has what `save_checkpoint` saves, so that it returns exactly."""
    return STATE in (source.manifest.states or {})


def as_folder(source: Source, *, exact: bool) -> WholeSource:
    """Return the source of a ``.ckpt`` file that has the states which its folder has.

    `exact`: raise TypeError for a value that would be loaded as another class.
    """

    def read(checked: bool, _selection: Selection | None) -> Parts:
        with store_errors(source.path):
            if checked:
                require_unchanged(source.path)
            checkpoint = read_ckpt(Path(source.path), is_whole=exact)
        model, states = split_checkpoint(checkpoint, exact=exact)
        arrays = torch_backend("files of Lightning", TensorBackend).arrays_of(model)
        return Parts(StateDict(arrays), None, {}, states)

    return WholeSource(source.path, source.format, read)
