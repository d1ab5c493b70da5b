"""A checkpoint of Lightning as a folder of mlstate, and a folder as a ``.ckpt`` file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.arrays import is_torch
from ..._common.backend import TensorBackend, torch_backend
from ..._common.caller import find_caller
from ..._common.file_checksums import require_unchanged
from ...state._state_dict import StateDict
from .._files.parts import Parts
from .._layouts.lightning import STATE, checkpoint_of, read_ckpt, split_checkpoint, write_ckpt
from .._options import complete_save_options
from .._save.save_root import save_root
from .._sources.readers import store_errors
from .._states.modules import split_entries
from .read_write import CheckpointTarget

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from typing import Unpack

    from ..._common.atomic_file import Target
    from .._loaded_state import LoadedState
    from .._options import SaveOptions
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


def convert_lightning(
    source: LoadedState | Path, target: CheckpointTarget | Target
) -> dict[str, int]:
    """Convert a whole checkpoint: a loaded folder to a file, or a file (a path) to a folder.

    `target`: a `CheckpointTarget` for a folder, a `Target` for a file. Returns ``tensors`` and
    ``bytes``: the number of tensors of the model, and their bytes.
    """
    if isinstance(target, CheckpointTarget):
        with store_errors(target.place):
            assert isinstance(source, Path)
            require_unchanged(str(source))
            checkpoint = read_ckpt(source)
            save_checkpoint(checkpoint, target.save_folder())
    else:
        with store_errors(Path(target.path)):
            assert not isinstance(source, Path)
            checkpoint = checkpoint_of(source, "the source")
            _warn_of_rest(source)
            write_ckpt(target, checkpoint)
    tensors = [value for value in checkpoint.get("state_dict", {}).values() if is_torch(value)]
    return {"tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors)}


def _warn_of_rest(source: LoadedState) -> None:
    """Warn of what a folder that Lightning did not save holds beside the weights."""
    names = [*(["optimizer"] if source.optimizer else []), *sorted(split_entries(source.states)[0])]
    if names and STATE not in source.states:
        find_caller().warn(
            f"not converted: {', '.join(names)}; only the weights of a folder that Lightning did "
            "not save become a checkpoint of Lightning"
        )


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
