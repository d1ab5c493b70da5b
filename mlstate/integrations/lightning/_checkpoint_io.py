"""`MLStateCheckpointIO`: a plugin that saves, loads, removes checkpoints of Lightning's Trainer."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..._common.atomic_file import Target
from ..._common.caller import find_caller
from ..._common.local_path import local_folder
from ..._common.set_module import set_module
from ..._common.store_error import store_error
from ...checkpoint._convert.lightning import read_checkpoint, save_checkpoint
from ...checkpoint._folder.names import FOLDERS, MANIFEST, TEMPORARY
from ...checkpoint._layouts.lightning import read_ckpt
from ...checkpoint._save.target import SaveFolder
from ...errors import StoreError
from ._errors import is_checkpoint, name_conversion_in_errors


def _register(cls: type) -> None:
    """Let Lightning accept a class as one of its CheckpointIO plugins.

    Lightning has two package names, ``lightning`` and ``pytorch_lightning``, with a base class
    each. Also makes Lightning's errors about folders of the plugin name `mlstate convert`. Raises
    ImportError if neither is installed.
    """
    from importlib import import_module

    is_registered = False
    for name in ("lightning.fabric", "lightning_fabric"):
        try:
            base = import_module(f"{name}.plugins.io.checkpoint_io").CheckpointIO
        except ImportError:
            continue
        base.register(cls)
        is_registered = True
    name_conversion_in_errors()
    if not is_registered:
        raise ImportError(
            "MLStateCheckpointIO needs lightning: pip install 'mlstate[lightning]'",
            name="lightning",
        )


def _is_relative_link(path: str) -> bool:
    """Return whether a path is a relative symbolic link, as Lightning creates them for "last"."""
    return os.path.islink(path) and not os.path.isabs(os.readlink(path))


def _is_torch_file(path: str) -> bool:
    """Return whether a path is a file in torch's zip format, by its first bytes; links are not."""
    if os.path.islink(path) or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _is_of_strategy(path: str) -> bool:
    """Return whether a path is a folder that a strategy of Lightning wrote itself, in parts."""
    return not os.path.islink(path) and all(
        os.path.isfile(os.path.join(path, name)) for name in ("meta.pt", ".metadata")
    )


def _delete_remains(folder: str) -> None:
    """Delete what a killed process left of a checkpoint at a path, if it exists.

    Raises StoreError for a file, a link, or a folder with other files.
    """
    if not os.path.lexists(folder):
        return
    is_folder = os.path.isdir(folder) and not os.path.islink(folder)
    if not is_folder or not all(map(_is_name_of_checkpoint, os.listdir(folder))):
        raise store_error(
            FileExistsError(errno.EEXIST, "it is not the rest of a checkpoint: move it"),
            "cannot use the temporary name",
            folder,
        )
    shutil.rmtree(folder)


def _is_name_of_checkpoint(name: str) -> bool:
    """Return whether the folder of a checkpoint may have an entry of this name."""
    return name in (MANIFEST, "lock", *FOLDERS) or TEMPORARY.match(name) is not None


@set_module("mlstate.integrations.lightning")
class MLStateCheckpointIO:
    """Stores the checkpoints of Lightning's Trainer as checkpoints of `mlstate.save`.

    Pass it as ``Trainer(plugins=[MLStateCheckpointIO()])``. Each checkpoint is a folder with the
    path that Lightning chose. It is committed atomically, has checksums, and contains no pickle.

    Parameters
    ----------
    **options
        Keywords of `mlstate.save`, such as ``compress="zstd"``.

    Raises
    ------
    ImportError
        Lightning is not installed.

    Notes
    -----
    Lightning passes the whole checkpoint on rank 0, so strategies that store shards of each rank
    themselves, such as FSDP and ModelParallelStrategy, do not use the plugin, and warn.
    Hyperparameters and states of callbacks must be values that the states of `mlstate.save` can
    hold, such as numbers, tensors, paths, members of enums, and lists, tuples and dicts of these;
    the error names a value that is not. Random generators are not part of Lightning's checkpoints.

    ``LightningModule.load_from_checkpoint``, and a Trainer without the plugin, raise
    `IsADirectoryError` for a folder: they open the path as a file, and use no plugin. In a process
    that has created the plugin, the text of the error names the remedy: the command
    ``mlstate convert FOLDER OUT.ckpt --to lightning`` writes the file that they read, and
    ``mlstate convert FILE.ckpt FOLDER`` the opposite. The plugin also resumes from Lightning's own
    file, with a warning.

    Examples
    --------
    >>> from mlstate.integrations.lightning import MLStateCheckpointIO
    >>> plugin = MLStateCheckpointIO()  # doctest: +SKIP
    >>> trainer = lightning.Trainer(plugins=[plugin])  # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        _register(type(self))
        self._options = options
        self._saves = 0  # a strategy that passes over the plugin leaves it

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: object = None,
    ) -> None:
        """Save a checkpoint of the Trainer.

        Parameters
        ----------
        checkpoint : dict
            Lightning's checkpoint. ``state_dict`` becomes the model, the rest a named state.
        path : str or os.PathLike
            Folder to write. A checkpoint, a file or a link at this path is replaced.
        storage_options : None
            Not supported.

        Raises
        ------
        TypeError
            `storage_options` is given, or a value of the checkpoint cannot be stored.

        Notes
        -----
        A file or link at the path is renamed, to ``.mlstate-new-<digest>.old`` in its folder, when
        the checkpoint takes its place: a process that is killed then may leave it there.
        """
        if storage_options is not None:
            raise TypeError("MLStateCheckpointIO takes no storage_options")
        self._saves += 1
        folder = local_folder(path)
        if is_checkpoint(folder) and not os.path.islink(folder):
            # Lightning names it .ckpt; `save` replaces a checkpoint atomically
            named = SaveFolder(folder, any_suffix=True)
            save_checkpoint(checkpoint, named, **self._options)
            return
        target = Target.of(folder, follow_links=False)  # a link is replaced
        if target.is_folder and not target.is_vacant:
            raise store_error(
                OSError(errno.ENOTEMPTY, "the folder is not empty"),
                "cannot replace the path by a checkpoint",
                folder,
            )
        parent, name = os.path.split(folder)
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
        temporary = os.path.join(parent, f".mlstate-new-{digest}")
        _delete_remains(temporary)  # of a process that was killed
        save_checkpoint(checkpoint, temporary, **self._options)
        try:
            target.put(temporary)  # the name appears with the whole checkpoint
        except BaseException:
            _delete_remains(temporary)
            raise

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: object = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint, verify it, and return it in Lightning's form.

        Parameters
        ----------
        path : str or os.PathLike
            A folder that `save_checkpoint` or `mlstate.save` wrote, or a ``.ckpt`` file of
            Lightning. No code from the file is run, so it must hold only tensors, plain values,
            paths, NumPy scalars, and members of enums that are imported.
        map_location : str or torch.device, optional
            Device of the tensors. Default, and for other values: main memory.
        weights_only : bool, optional
            Ignored: a checkpoint contains no code.

        Returns
        -------
        dict
            The checkpoint, with new tensors.

        Raises
        ------
        StoreError
            The path does not exist, or is not a checkpoint; also a `FileNotFoundError`.
        FormatError
            The checkpoint is damaged, or the file holds other objects.
        CompatibilityError
            The folder holds no model.

        Warns
        -----
        CheckpointWarning
            The path is a file: Lightning wrote it without this plugin.
        """
        if os.path.isfile(path):
            find_caller().warn(
                f"{os.fspath(path)} is a file of Lightning, not a folder of mlstate: it has no "
                "checksums. mlstate convert FILE.ckpt FOLDER converts it"
            )
            return read_ckpt(Path(path))
        is_device = isinstance(map_location, str) or hasattr(map_location, "index")
        return read_checkpoint(path, map_location if is_device else "cpu")

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint; a path that does not exist is ignored.

        The folder is first renamed to its path with the suffix ``.mlstate-removed``, so a killed
        process leaves no part of a checkpoint under its name. Deleting the path again deletes the
        rest. Of a link that Lightning made (``save_last="link"``), only the link is deleted.

        Parameters
        ----------
        path : str or os.PathLike
            A folder that `save_checkpoint` wrote, a relative link, or a file or folder that
            Lightning wrote without the plugin.

        Raises
        ------
        StoreError
            The path is not a checkpoint, or is another symbolic link; or other files are at the
            path with the suffix. Nothing is deleted.
        """
        folder = local_folder(path)
        removed = f"{folder}.mlstate-removed"
        if _is_relative_link(folder) or _is_torch_file(folder):
            os.unlink(folder)
            return
        if _is_of_strategy(folder):
            shutil.rmtree(folder)
            return
        if not os.path.lexists(folder):
            with suppress(StoreError):  # other files are not of a killed process
                _delete_remains(removed)
            return
        is_link = os.path.islink(folder)
        if is_link or not is_checkpoint(folder):
            kind = "a symbolic link" if is_link else "not a checkpoint of mlstate"
            raise store_error(
                OSError(errno.EINVAL, f"the path is {kind}"),
                "cannot delete the checkpoint",
                folder,
            )
        _delete_remains(removed)
        os.rename(folder, removed)
        shutil.rmtree(removed)

    def teardown(self) -> None:
        """Do nothing: nothing runs in the background."""
