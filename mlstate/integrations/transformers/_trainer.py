"""A callback that saves and restores the state of a transformers.Trainer; see `MLStateCallback`."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._common.local_path import local_path
from ..._common.set_module import set_module
from ...checkpoint import CheckpointManager
from ...checkpoint._states.generators import library_of, restored, set_state, state_of
from ...errors import MLStateError

if TYPE_CHECKING:
    from collections.abc import Callable

_FOLDER = "mlstate"  # in the output folder of the Trainer


def _generators() -> dict[str, Any]:
    """Return the generators that a training draws from."""
    import torch

    found: dict[str, Any] = {"python": random, "numpy": np.random, "torch": torch.random}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda
    return found


@set_module("mlstate.integrations.transformers")
class MLStateCallback:
    """Saves the state of a `transformers.Trainer` with mlstate, and restores it.

    Pass it as ``Trainer(callbacks=[MLStateCallback()])``. After each checkpoint of the Trainer it
    saves a step of a `CheckpointManager`: model, optimizer, scheduler and random generators of
    every rank. When the Trainer resumes, the callback restores the step. Set ``save_only_model``
    of the Trainer's arguments, so that it does not pickle the optimizer's states too.

    Parameters
    ----------
    directory : str or os.PathLike, optional
        Folder of the steps. Default: ``mlstate`` in the Trainer's output folder.
    keep : int, optional
        Number of steps to keep. Default: ``save_total_limit`` of the Trainer's arguments.
    **options
        Further keywords of `CheckpointManager`.

    Raises
    ------
    ImportError
        transformers is not installed.

    Notes
    -----
    The Trainer still writes ``checkpoint-<step>`` with the model and the position in the data. It
    writes this folder without a commit, so after a crash the newest one may be incomplete. Pass
    the result of `last_checkpoint` to ``train(resume_from_checkpoint=…)``: the callback's step is
    saved only after the folder is complete.

    Examples
    --------
    >>> from mlstate.integrations.transformers import MLStateCallback
    >>> trainer = transformers.Trainer(  # doctest: +SKIP
    ...     model,
    ...     TrainingArguments("out", save_only_model=True),
    ...     train_dataset=data,
    ...     callbacks=[MLStateCallback()],
    ... )
    >>> trainer.train(resume_from_checkpoint=MLStateCallback.last_checkpoint("out"))
    ... # doctest: +SKIP
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        keep: int | None = None,
        **options: Any,
    ) -> None:
        try:
            import transformers  # noqa: F401
        except ImportError:
            raise ImportError(
                "MLStateCallback needs transformers: pip install 'mlstate[transformers]'",
                name="transformers",
            ) from None
        self._directory = directory
        self._keep = keep
        self._options = options
        self._manager: CheckpointManager | None = None
        self._group: Any = None
        self._generators: list[tuple[Any, str, Any]] = []  # to set before the first step

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):  # the Trainer's other events
            return lambda *arguments, **keywords: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @staticmethod
    def last_checkpoint(
        output_dir: str | os.PathLike[str], directory: str | os.PathLike[str] | None = None
    ) -> str | None:
        """Return the newest checkpoint of the Trainer whose state is complete, or None.

        Parameters
        ----------
        output_dir : str or os.PathLike
            The Trainer's output folder.
        directory : str or os.PathLike, optional
            As for the callback.
        """
        output = Path(local_path(output_dir))
        manager = CheckpointManager(output / _FOLDER if directory is None else directory)
        for step in reversed(manager.steps()):
            found = output / f"checkpoint-{step}"
            if not (found / "trainer_state.json").is_file():
                continue
            try:
                if manager.checkpoint(step).verify():
                    return str(found)
            except MLStateError:
                continue
        return None

    def _open(self, args: Any) -> CheckpointManager:
        """Return the manager, and connect the ranks on the first call."""
        if self._manager is None:
            directory = self._directory
            if directory is None:
                directory = Path(args.output_dir) / _FOLDER
            keep = args.save_total_limit if self._keep is None else self._keep
            self._manager = CheckpointManager(directory, keep, **self._options)
            if args.world_size > 1:
                import torch.distributed as dist

                from ..torch import TorchGroup

                self._group = TorchGroup(dist.new_group(backend="gloo"))
        return self._manager

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **others: Any,
    ) -> None:
        """Restore the state if the Trainer resumes.

        Raises
        ------
        StoreError
            The step that the Trainer resumes was not saved by this callback.
        FormatError, CompatibilityError
            The step is damaged, or belongs to another model or number of ranks. Nothing was
            changed, as for `mlstate.load`.
        """
        manager = self._open(args)
        if state.global_step == 0:
            return
        generators = _generators()
        manager.restore(
            state.global_step,
            into={
                "model": model,
                "optimizer": getattr(optimizer, "optimizer", optimizer),  # accelerate wraps it
                "states": {"scheduler": lr_scheduler, "generators": generators},
            },
            group=self._group,
        )
        if float(state.epoch).is_integer():
            return  # the order of the next epoch is drawn from the restored generators
        # the Trainer draws the order of the running epoch and skips batches before the first step
        self._generators = [
            (each, library, restored(state_of(each, library), library))
            for each, library in ((each, library_of(each)) for each in generators.values())
            if library is not None
        ]

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Set the generators before the first step after a restore."""
        for each, library, saved in self._generators:
            set_state(each, library, saved)
        self._generators = []

    def on_save(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **others: Any,
    ) -> None:
        """Save the state of a step, after the Trainer has written its checkpoint."""
        manager = self._open(args)
        manager.save(
            state.global_step,
            model,
            getattr(optimizer, "optimizer", optimizer),
            states={"scheduler": lr_scheduler, "generators": _generators()},
            metadata={"epoch": state.epoch},
            group=self._group,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Close the manager and the group."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None
        if self._group is not None:
            self._group.close()
            self._group = None
