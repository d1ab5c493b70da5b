"""`MLStateCallback`: when a transformers.Trainer saves and restores; its random generators."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._common.backend import is_optimizer
from ..._common.caller import find_caller
from ..._common.local_path import local_path
from ..._common.set_module import set_module
from ..._common.text import steps_text
from ...checkpoint import CheckpointManager
from ...checkpoint._rank_messages import gather_bytes
from ...checkpoint._save.content import check_optimizer
from ...checkpoint._states.generators import library_of, restored, set_state, state_of
from ...checkpoint._store.open_path import is_url
from ...errors import CompatibilityError, FormatError, StoreNotFoundError
from ._trainer_folders import (
    folder_of,
    is_complete,
    is_same_position,
    last_checkpoint,
    position_text,
    read_position,
    read_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_FOLDER = "mlstate"  # in the output folder of the Trainer


def _generators() -> dict[str, Any]:
    """Return the random generators that a training uses, by name.

    Each is a module or object that `library_of` knows; ``torch.cuda`` means all devices.
    """
    import torch

    generators: dict[str, Any] = {"python": random, "numpy": np.random, "torch": torch.random}
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda
    return generators


def _states_of(generators: dict[str, object]) -> list[tuple[Any, str, Any]]:
    """Return for each generator: the generator, its library's name, and a copy of its state.

    `generators`: by name. A generator of an unknown library is left out.
    """
    libraries = ((each, library_of(each)) for each in generators.values())
    return [
        (each, library, restored(state_of(each, library), library))
        for each, library in libraries
        if library is not None
    ]


def _set_states(states: list[tuple[object, str, object]]) -> None:
    """Set generators to the states that `_states_of` returned."""
    for each, library, state in states:
        set_state(each, library, state)


def _after_first_step(optimizer: Any) -> Any:
    """Return a copy of an optimizer with the states of its first step; None if it is unknown.

    The random generators keep their states.
    """
    if not is_optimizer(optimizer):
        return None
    from ..torch._checkpoint.first_step import after_first_step

    before = _states_of(_generators())
    try:
        return after_first_step(optimizer)
    finally:
        _set_states(before)


def _is_inside(directory: Any, output: str) -> bool:
    """Return whether the steps' `directory` is in the Trainer's folder `output`; follow links.

    None is the default directory, which is inside.
    """
    if directory is None:
        return True
    if is_url(directory):
        return False
    folder = Path(os.path.realpath(local_path(directory)))
    return folder.is_relative_to(os.path.realpath(output))


def _check_arguments(args: Any, state: Any, directory: Any) -> None:
    """Raise CompatibilityError for options of the Trainer under which the callback cannot work.

    `args`, `state`: as the Trainer passes them to callbacks. `directory`: of the callback, or None.
    """
    problems = {
        "deepspeed": "DeepSpeed keeps the optimizer's states itself, and saves them itself: leave "
        "the callback out",
        "hyperparameter_search": "its trials save the same steps into one folder: leave the "
        "callback out of the search",
        "push_to_hub": "the Trainer uploads its output folder, with all steps in it: pass "
        "MLStateCallback(directory=) with a folder elsewhere",
        "save_on_each_node": "the output folder may differ between the nodes, and all ranks save "
        "into one folder: pass MLStateCallback(directory=) with a folder that all nodes share",
        "enable_jit_checkpoint": "a signal may reach the ranks at different steps: set it only "
        "for one process",
    }
    is_inside = _is_inside(directory, args.output_dir)
    has_ranks = args.world_size > 1
    conditions = {
        "deepspeed": True,
        "push_to_hub": is_inside,
        "save_on_each_node": has_ranks and directory is None,
        "enable_jit_checkpoint": has_ranks,
    }
    options = [name for name, applies in conditions.items() if applies and getattr(args, name, 0)]
    if state.is_hyper_param_search:
        options.append("hyperparameter_search")
    for name in options:
        text = f"MLStateCallback does not support {name}: {problems[name]}"
        raise CompatibilityError(text, name=name)


def _skips_batches(args: Any, state: Any, loader: Any) -> bool:
    """Return whether the Trainer resumes within an epoch, and so skips its first batches.

    `args`, `state`: of the Trainer. `loader`: of the training data; an epoch has its length divided
    by the accumulated batches, rounded up.
    """
    if args.ignore_data_skip:
        return False
    try:
        steps = -(-len(loader) // args.gradient_accumulation_steps)
    except TypeError:  # a loader without a length, whose epoch never ends
        steps = state.max_steps
    return bool(state.global_step % max(steps, 1))


@set_module("mlstate.integrations.transformers")
class MLStateCallback:
    """Saves the state of a `transformers.Trainer` with mlstate, and restores it.

    Pass it as ``Trainer(callbacks=[MLStateCallback()])``. After each checkpoint of the Trainer it
    saves a step of a `CheckpointManager`: model, optimizer, scheduler, gradient scaler, the
    Trainer's position, and random generators of every rank. When the Trainer resumes, the
    callback restores the step. Set ``save_only_model`` of the Trainer's arguments, so that it
    does not pickle the optimizer's states too.

    The Trainer decides when to save and what to delete: a step stays while the Trainer's folder
    ``checkpoint-<step>`` exists. The newest step always stays.

    Parameters
    ----------
    directory : str or os.PathLike, optional
        Folder of the steps. Default: ``mlstate`` in the Trainer's output folder.
    keep : int, optional
        Number of newest steps that stay even if the Trainer has deleted their folders. Default: 1.
    exclude : str or iterable of str, optional
        As for `mlstate.save`, for optimizers with objects among their states, such as the
        projectors of GaLore: ``exclude="*.projector"``.
    **options
        Further keywords of `CheckpointManager`.

    Raises
    ------
    ImportError
        transformers is not installed.

    Notes
    -----
    The Trainer writes ``checkpoint-<step>`` without a commit, and deletes older folders before
    the callback saves. After a crash the newest folder may be incomplete, and the older
    ones deleted. Pass the result of `last_checkpoint` to ``train(resume_from_checkpoint=…)``: it
    returns a complete folder, and restores one from the newest step if no other exists.

    A checkpoint of the Trainer with optimizer and scheduler, but without a step of mlstate, is
    resumed with a warning. If the number of ranks has changed, generators are not restored, as
    in the Trainer itself. ``save_total_limit``, ``save_strategy="best"``,
    ``load_best_model_at_end`` and, in one process, ``enable_jit_checkpoint`` work as without the
    callback. A training that starts anew keeps the steps that it finds in `directory`, and warns.
    `CompatibilityError` is raised when training begins for ``deepspeed``,
    ``hyperparameter_search``, ``push_to_hub`` with steps in the output folder, and, with several
    ranks, ``enable_jit_checkpoint`` or ``save_on_each_node`` without `directory`.

    An optimizer that cannot be stored raises `CompatibilityError` when training begins. To find
    states that only its first step creates, a copy of it makes a step with small parameters. If
    this is not possible, for example with sharded parameters, they are found after the first step.

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
        exclude: str | Iterable[str] | None = None,
        **options: Any,
    ) -> None:
        """Check the arguments (see the class); `options` are those of `CheckpointManager`."""
        try:
            import transformers  # noqa: F401
        except ImportError:
            raise ImportError(
                "MLStateCallback needs transformers: pip install 'mlstate[transformers]'",
                name="transformers",
            ) from None
        self._directory = directory
        self._keep = keep
        self._exclude = exclude
        self._is_checked = False  # whether the states of this training can be stored
        self._options = options
        self._manager: CheckpointManager | None = None
        self._group: Any = None
        self._restored: list[tuple[Any, str, Any]] = []  # states of generators, to set later
        self._skips_batches = False  # whether the training resumes in an epoch
        self._signal_step: int | None = None  # saved because of a signal

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function that does nothing for an event of the Trainer without a method."""
        if name.startswith("on_"):  # the Trainer's other events
            return lambda *arguments, **keywords: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @staticmethod
    def last_checkpoint(
        output_dir: str | os.PathLike[str],
        directory: str | os.PathLike[str] | None = None,
        *,
        storage_options: Mapping[str, object] | None = None,
    ) -> str | None:
        """Return the newest checkpoint of the Trainer that can be resumed, or None.

        Usually this is the folder of the newest step; weights and step are verified. A later
        folder of the Trainer is returned only if it holds optimizer and scheduler. If the Trainer
        was killed after it had deleted the newest step's folder, or if no folder is complete, this
        writes the newest step's folder again, with the weights and the Trainer's position.

        Parameters
        ----------
        output_dir : str or os.PathLike
            The Trainer's output folder.
        directory : str or os.PathLike, optional
            As for the callback. With a `directory`, the folder of the newest step is also written
            again if the output folder has no checkpoint, as on a new machine, with that of the best
            step, for ``load_best_model_at_end``.
        storage_options : dict, optional
            As for the callback, if `directory` is a URL.

        Warns
        -----
        CheckpointWarning
            Neither the Trainer's folders nor the steps in `directory` can be resumed, or a newer
            step is damaged.

        Raises
        ------
        StoreError
            `directory` cannot be read, or its store fails.
        """
        output = Path(local_path(output_dir))
        place = output / _FOLDER if directory is None else directory
        manager = CheckpointManager(place, storage_options=storage_options)
        return last_checkpoint(output, manager, is_default=directory is None)

    def _open(self, args: Any) -> CheckpointManager:
        """Create and return the manager of this training's steps; close an earlier one.

        `args`: of the Trainer, for its output folder and number of ranks. With several ranks, also
        create the group that connects them; every rank must call this.
        """
        self._close()
        output = Path(args.output_dir)
        directory = output / _FOLDER if self._directory is None else self._directory
        keep = 1 if self._keep is None else self._keep
        self._manager = CheckpointManager(directory, keep, **self._options)
        self._manager._is_kept_elsewhere = lambda step: folder_of(output, step).is_dir()
        if args.world_size > 1:
            import torch.distributed as dist

            from ..torch import TorchGroup

            # gloo: steps are exchanged as bytes in main memory
            self._group = TorchGroup(dist.new_group(backend="gloo"))
        return self._manager

    def _close(self) -> None:
        """Close manager and group, if they are open; a second call does nothing."""
        manager, group = self._manager, self._group
        self._manager = self._group = None
        if manager is not None:
            manager.close()
        if group is not None:
            group.close()

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: object,
        *,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        train_dataloader: object = None,
        **others: object,
    ) -> None:
        """Open the steps, and restore the state if the Trainer resumes; every rank calls it.

        `args`, `state`: arguments and position of the Trainer, which passes them to each event. The
        generators are set later, in `on_epoch_begin` or `on_step_begin`.

        Raises
        ------
        StoreError
            The step that the Trainer resumes was not saved by this callback, and the Trainer's
            own checkpoint has no optimizer.
        FormatError, CompatibilityError
            The step is damaged, or belongs to another model or run, or an option is not
            supported. Nothing was changed, as for `mlstate.load`.

        Warns
        -----
        CheckpointWarning
            The checkpoint was written by the Trainer alone, or the training starts anew and
            `directory` has steps.
        """
        _check_arguments(args, state, self._directory)
        self._check_optimizer(args, model, optimizer, tries_step=True)
        self._is_checked = False
        manager = self._open(args)
        self._restored, self._signal_step = [], None
        if state.global_step == 0:
            self._keep_earlier(args)
            return
        if self._has_step(state):
            self._skips_batches = _skips_batches(args, state, train_dataloader)
            self._restore(state.global_step, model, optimizer, lr_scheduler)
            return
        folder = folder_of(Path(args.output_dir), state.global_step)
        is_own = is_complete(folder) and is_same_position(
            read_position(folder) or "", position_text(state)
        )
        # a new scheduler has counted no steps
        if not is_own and not getattr(lr_scheduler, "last_epoch", 0) > 0:
            manager.checkpoint(state.global_step)  # raises StoreError if the step does not exist
            raise CompatibilityError(
                f"step {state.global_step} in {manager.directory} belongs to another run than the "
                "checkpoint that the Trainer resumes, which holds no optimizer: resume from "
                "MLStateCallback.last_checkpoint(output_dir)",
                name="resume_from_checkpoint",
            )
        if args.process_index == 0:
            find_caller().warn(
                f"{manager.directory} has no step {state.global_step} of this run: the training "
                "resumes with the optimizer, scheduler and generators that the Trainer itself "
                "has saved"
            )

    def _check_optimizer(
        self, args: Any, model: Any, optimizer: Any, *, tries_step: bool = False
    ) -> None:
        """Raise CompatibilityError if a save could not store the optimizer; all ranks call it.

        `args`, `model`, `optimizer`: of the Trainer. `tries_step`: check the states that the first
        step will create too.
        """
        wrapped = getattr(optimizer, "optimizer", optimizer)
        try:
            check_optimizer(model, wrapped, self._exclude, args.world_size)
            stepped = _after_first_step(wrapped) if tries_step else None
            if stepped is not None:
                check_optimizer(model, stepped, self._exclude, args.world_size)
        except (TypeError, ValueError) as cause:
            raise CompatibilityError(
                f"MLStateCallback cannot store {type(wrapped).__name__} (optim={args.optim}): "
                f"{cause}; in a Trainer, pass MLStateCallback(exclude=) for an object among its "
                "states, choose another optim=, or leave the callback out",
                name="optim",
            ) from cause

    def _keep_earlier(self, args: Any) -> None:
        """Keep the steps in an own `directory` when a training starts anew, and warn of them.

        The user may have forgotten to resume. Steps in the output folder are not kept: the Trainer
        replaces its own folders there too.
        """
        manager = self._manager
        assert manager is not None
        if self._directory is None or (self._group is not None and self._group.rank != 0):
            return
        earlier = manager.steps()
        if not earlier:
            return
        output = Path(args.output_dir)
        manager._is_kept_elsewhere = lambda step: (
            step in earlier or folder_of(output, step).is_dir()
        )
        find_caller().warn(
            f"{manager.directory} has steps of another training: {steps_text(earlier)}. This one "
            "starts at step 0: it keeps them, but replaces a step of the same number. To resume, "
            "pass MLStateCallback.last_checkpoint(output_dir, directory) to train()"
        )

    def _has_step(self, state: Any) -> bool:
        """Return whether the manager has the step that the Trainer resumes, of the same run.

        `state`: the Trainer's position. Rank 0 decides, so that all ranks agree. A damaged step
        counts as present: its restore raises.
        """
        manager, has_step = self._manager, True
        assert manager is not None
        if self._group is None or self._group.rank == 0:
            try:
                position = read_record(manager, state.global_step)["position"]
                has_step = position is None or is_same_position(position, position_text(state))
            except StoreNotFoundError:
                has_step = False
            except FormatError:
                pass  # every rank raises it when it restores
        return gather_bytes(self._group, b"1" if has_step else b"0")[0] == b"1"

    def _restore(self, step: int, model: Any, optimizer: Any, scheduler: object) -> None:
        """Restore model, optimizer and scheduler from a step.

        `optimizer`: or accelerate's wrapper of it, whose gradient scaler is restored if the step
        has one. The generators get their states from before the call again: their restored states
        are kept for `_set_restored`. They are left out if the number of ranks has changed.
        """
        assert self._manager is not None
        checkpoint = self._manager.checkpoint(step)
        generators = _generators()
        states = {"scheduler": scheduler}
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None and "scaler" in checkpoint.states:
            states["scaler"] = scaler
        ranks = 1 if self._group is None else self._group.world_size
        if checkpoint.world_size == ranks:
            states["generators"] = generators
        before = _states_of(generators)
        self._manager.restore(
            step,
            into={
                "model": model,
                "optimizer": getattr(optimizer, "optimizer", optimizer),  # accelerate wraps it
                "states": states,
            },
            group=self._group,
        )
        if "generators" in states:
            self._restored = _states_of(generators)
            _set_states(before)

    def on_epoch_begin(
        self, args: object, state: object, control: object, **others: object
    ) -> None:
        """Set the restored generators, unless the Trainer skips batches first."""
        if not self._skips_batches:
            self._set_restored()

    def on_step_begin(
        self, args: object, state: object, control: object, **objects: object
    ) -> None:
        """Set the restored generators after the Trainer has skipped batches.

        Then save the step if a signal has made the Trainer save here.
        """
        self._set_restored()
        self._save_after_signal(args, state, control, objects)

    def _set_restored(self) -> None:
        """Set the generators as late as the Trainer does; other calls have drawn from them.

        This happens once: a later call does nothing.
        """
        _set_states(self._restored)
        self._restored = []

    def on_pre_optimizer_step(
        self, args: object, state: object, control: object, **objects: object
    ) -> None:
        """Save the step if a signal has made the Trainer save here."""
        self._save_after_signal(args, state, control, objects)

    def on_step_end(self, args: object, state: object, control: object, **objects: object) -> None:
        """Save the step if a signal has made the Trainer save here.

        After the first step, raises CompatibilityError if the optimizer's states cannot be stored.
        """
        if not self._is_checked:
            self._check_optimizer(args, objects.get("model"), objects.get("optimizer"))
            self._is_checked = True
        self._save_after_signal(args, state, control, objects)

    def on_epoch_end(self, args: object, state: object, control: object, **objects: object) -> None:
        """Save the step if a signal has made the Trainer save here."""
        self._save_after_signal(args, state, control, objects)

    def _save_after_signal(self, args: Any, state: Any, control: Any, objects: Any) -> None:
        """Save the step if ``enable_jit_checkpoint`` has just saved, which sends no event.

        The Trainer has then written a folder of the current position. Each step is saved so at most
        once, and not if the Trainer will send `on_save` itself. `args`, `state`, `control`: of the
        event; `objects`: its keywords, which `on_save` gets too.
        """
        if not getattr(args, "enable_jit_checkpoint", False) or not control.should_training_stop:
            return
        folder = folder_of(Path(args.output_dir), state.global_step)
        if self._signal_step == state.global_step or control.should_save:
            return
        if read_position(folder) == position_text(state):
            self._signal_step = state.global_step
            self.on_save(args, state, control, **objects)

    def on_save(
        self,
        args: Any,
        state: Any,
        control: object,
        *,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: object = None,
        **others: object,
    ) -> None:
        """Save the state of a step, after the Trainer has written its checkpoint.

        All ranks must call it. `optimizer`: or accelerate's wrapper of it, whose gradient scaler is
        saved too. The saved position of the training is the text of ``trainer_state.json`` in the
        Trainer's folder, as rank 0 reads it, or of `state` if that file cannot be read. Step 0 is
        not saved. Raises what `CheckpointManager.save` raises.
        """
        manager = self._manager
        if manager is None:
            manager = self._open(args)
        if state.global_step == 0:
            return  # resuming it means starting anew
        folder = folder_of(Path(args.output_dir), state.global_step)
        position = b""
        if self._group is None or self._group.rank == 0:
            position = (read_position(folder) or position_text(state)).encode()
        position = gather_bytes(self._group, position)[0]
        states = {
            "scheduler": lr_scheduler,
            "generators": _generators(),
            "trainer": {"position": position.decode()},
        }
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None:
            states["scaler"] = scaler
        manager.save(
            state.global_step,
            model,
            getattr(optimizer, "optimizer", optimizer),
            states=states,
            metadata={"epoch": state.epoch},
            exclude=self._exclude,
            group=self._group,
        )

    def on_train_end(self, args: object, state: object, control: object, **others: object) -> None:
        """Close the manager and the group."""
        self._close()
