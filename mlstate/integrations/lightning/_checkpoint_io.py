"""A plugin that stores the checkpoints of Lightning's Trainer; see `MLStateCheckpointIO`."""

from __future__ import annotations

import errno
import os
from typing import Any

from ..._common.local_path import local_folder
from ..._common.set_module import set_module
from ...checkpoint import load, save
from ...checkpoint._save import SaveFolder
from ...checkpoint._store import folder as _folder

_STATE = "lightning"  # name of the state with everything except the module's tensors


def _register(cls: type) -> None:
    """Let Lightning accept a class as one of its CheckpointIO plugins.

    Lightning has two package names, ``lightning`` and ``pytorch_lightning``, with a base class
    each.
    """
    from importlib import import_module

    found = False
    for name in ("lightning.fabric", "lightning_fabric"):
        try:
            base = import_module(f"{name}.plugins.io.checkpoint_io").CheckpointIO
        except ImportError:
            continue
        base.register(cls)
        found = True
    if not found:
        raise ImportError(
            "MLStateCheckpointIO needs lightning: pip install 'mlstate[lightning]'",
            name="lightning",
        )


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
    themselves, such as FSDP, do not use the plugin. Hyperparameters and states of callbacks must be
    values that `mlstate.save` can store; the error names a value that is not. Random generators
    are not part of Lightning's checkpoints. ``LightningModule.load_from_checkpoint`` does not use
    plugins: load the weights with ``mlstate.load(path, into={"model": module})``.

    Examples
    --------
    >>> from mlstate.integrations.lightning import MLStateCheckpointIO
    >>> plugin = MLStateCheckpointIO()  # doctest: +SKIP
    >>> trainer = lightning.Trainer(plugins=[plugin])  # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        _register(type(self))
        self._options = options

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint of the Trainer.

        Parameters
        ----------
        checkpoint : dict
            Lightning's checkpoint. ``state_dict`` becomes the model, the rest a named state.
        path : str or os.PathLike
            Folder to write.
        storage_options : None
            Not supported.

        Raises
        ------
        TypeError
            `storage_options` is given, or a value of the checkpoint cannot be stored.
        """
        if storage_options is not None:
            raise TypeError("MLStateCheckpointIO takes no storage_options")
        rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        step = checkpoint.get("global_step")
        model = checkpoint.get("state_dict")
        folder = SaveFolder(path, any_suffix=True)  # Lightning names it .ckpt
        save(folder, model, states={_STATE: rest}, step=step, **self._options)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint, verify it, and return it in Lightning's form.

        Parameters
        ----------
        path : str or os.PathLike
            A folder that `save_checkpoint` wrote.
        map_location : str or torch.device, optional
            Device of the tensors. Default, and for other values: main memory.
        weights_only : bool, optional
            Ignored: a checkpoint contains no code.

        Returns
        -------
        dict
            The checkpoint, with new tensors.
        """
        is_device = isinstance(map_location, str) or hasattr(map_location, "index")
        loaded = load(path, device=map_location if is_device else "cpu")
        model = {} if loaded.model is None else {"state_dict": dict(loaded.model)}
        return {**loaded.states[_STATE], **model}

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint; a path that does not exist is ignored.

        The folder is first renamed to its path with the suffix ``.mlstate-removed``, so a killed
        process leaves no part of a checkpoint under its name. Deleting the path again deletes the
        rest.

        Parameters
        ----------
        path : str or os.PathLike
            A folder that `save_checkpoint` wrote.

        Raises
        ------
        StoreError
            The path is not a checkpoint, or is a symbolic link.
        """
        import shutil

        folder = local_folder(path)
        removed = f"{folder}.mlstate-removed"
        if os.path.lexists(removed):
            shutil.rmtree(removed)  # by a process that was killed
        if not os.path.lexists(folder):
            return
        is_link = os.path.islink(folder)
        if is_link or not os.path.isfile(os.path.join(folder, _folder.MANIFEST)):
            kind = "a symbolic link" if is_link else "not a checkpoint of mlstate"
            raise _folder.store_error(
                OSError(errno.EINVAL, f"the path is {kind}"),
                "cannot delete the checkpoint",
                folder,
            )
        os.rename(folder, removed)
        shutil.rmtree(removed)

    def teardown(self) -> None:
        """Do nothing: nothing runs in the background."""
