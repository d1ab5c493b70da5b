"""`CheckpointManager`: `save`, `restore_latest`, `best_step`, `delete`; its warnings, waits."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..._common.arguments import check_flags, check_int
from ..._common.caller import find_caller
from ..._common.log import log
from ..._common.set_module import set_module
from ..._common.store_error import store_error
from ..._common.text import steps_text
from ...collectives._arguments import optional_group
from ...errors import ChecksumError, FormatError, MLStateError, StoreNotFoundError
from .._checkpoint.checkpoint import Checkpoint
from .._checkpoint.save import save
from .._checkpoint.save_async import SaveHandle, save_async
from .._folder.names import Root
from .._folder.protocol import exclusion_of
from .._load.load import load
from .._loaded_state import LoadedState
from .._options import LOAD_DEFAULTS, SAVE_DEFAULTS, check_timeout, complete_options, show_options
from .._rank_messages import gather_bytes
from .._save.staging import OwnStaging, Staging
from .._save.target import SaveFolder
from .._steps.retention import NO_RULES, Retention, check_retention, count_old
from .._steps.save_timing import SaveTimer
from .._steps.signal_watch import SignalWatch
from .._steps.step_choice import (
    OTHER,
    best_of,
    holds_other_checkpoint,
    no_metric,
    read_roots,
    read_step,
)
from .._store.open_path import RootPath, open_files
from .step_roots import agreed_roots, if_alone, try_root

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from datetime import timedelta
    from typing import Unpack

    from ..._common.budget import MemorySize
    from ...collectives import ProcessGroup
    from .._options import LoadOptions, SaveOptions
    from .._steps.retention import Roots
    from .._store.manifest import Manifest

_SHOWN = 20  # steps in a warning


@set_module("mlstate.checkpoint")
class CheckpointManager:
    """Checkpoints of a run, by step, in one folder.

    Steps share the files of unchanged shards. `mlstate.save` refuses a folder that holds steps.

    Parameters
    ----------
    directory : str or os.PathLike
        The folder, or a URL in an object store; the first save creates it.
    keep : int or None, default None
        Number of newest steps to keep; `save` and `save_async` delete older ones. None keeps
        every step, or with other `keep_` rules the newest one. A damaged step does not count:
        files are missing or have another length, `restore` or `restore_latest` of this manager
        found damage, or `verify` did, in any process. It stays until `keep` newer steps load.
    keep_best : int, optional
        Keep also this number of steps with the best metric. Steps without a metric, or with NaN,
        are not among the best.
    monitor : str, optional
        Key of the metric in ``metadata=``, such as ``"loss"``.
    mode : {"min", "max"}, optional
        Whether a lower or a higher metric is better. Default: a lower one.
    keep_period : int, optional
        Keep also the steps that are multiples of this number.
    keep_time_interval : float or timedelta, optional
        Keep also one step for each interval of this many seconds: the first step, and then each
        step that was saved at least this long after the last one kept by this rule.
    save_interval_steps : int, optional
        `should_save` returns true for multiples of this number.
    save_time_interval : float or timedelta, optional
        `should_save` returns true if the last save began at least this many seconds ago.
    warn_unchanged : bool, default True
        Warn once if two successive steps store a model with the same bytes.
    storage_options : mapping, optional
        As for `mlstate.save`.

    Warns
    -----
    CheckpointWarning
        `keep` will delete steps that this manager did not save, and that are newer than the step
        that it restored, or of another run. The warning is issued once,
        before the first such deletion, and names the steps; every rank of a group warns. Or the
        first step that this manager saves lacks the metric of `keep_best`. Or the model did not
        change between two steps: then another object may be trained than the one
        that is saved.

    Raises
    ------
    TypeError, ValueError
        A number is less than 1, a time is not positive, `mode` is unknown, or `keep_best`
        or `mode` is given without `monitor`.

    Notes
    -----
    Threads may share a manager: `save`, `save_async`, `delete` and `close` exclude each other.
    With a group of several ranks, save from one thread of each rank.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import CheckpointManager
    >>> with CheckpointManager(tempfile.mkdtemp() + "/run", keep=2) as manager:
    ...     for step in (10, 20, 30):
    ...         _ = manager.save(step, model={"w": np.full(3, step)})
    ...     manager.steps(), manager.restore_latest().model["w"]
    ([20, 30], array([30, 30, 30]))
    """

    # set by a trainer, whose own rule decides which other steps stay
    _is_kept_elsewhere: Callable[[int | None], bool] | None = None

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = None,
        *,
        keep_best: int | None = None,
        monitor: str | None = None,
        mode: str | None = None,
        keep_period: int | None = None,
        keep_time_interval: float | timedelta | None = None,
        save_interval_steps: int | None = None,
        save_time_interval: float | timedelta | None = None,
        warn_unchanged: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the arguments, which the class describes, and open the folder; write nothing."""
        check_flags(warn_unchanged=warn_unchanged)
        if keep is not None:
            keep = check_int("keep", keep, 1, also=", or None for all")
        self._rules = check_retention(keep_best, monitor, mode, keep_period, keep_time_interval)
        self._timer = SaveTimer(save_interval_steps, save_time_interval)
        self._signals: SignalWatch | None = None
        self._warns_unchanged = warn_unchanged
        self._last_model: int | None = None  # step of the last save with a model
        self._last_restored: int | None = None  # the run continues from this step
        self._warns_metric = self._rules.best is not None  # until the first save
        self._checkpoints = open_files(directory, storage_options)
        self.keep: int | None = 1 if keep is None and not self._rules.is_empty() else keep
        self._own: set[int | None] = set()  # steps that this manager saved
        self._damaged: set[str] = set()  # generations that this manager could not restore
        self._files: dict[str, dict[str, int]] = {}  # of generations: sizes by path
        self._has_warned = False  # of other managers' steps that `keep` deletes
        self._staging: Staging | None = None  # of `save_async`, kept until `close`
        self._under_way: SaveHandle | None = None  # the running save
        self._lock, self._pid = threading.RLock(), os.getpid()

    @property
    def directory(self) -> str:
        """Path or URL of the folder."""
        return self._checkpoints.path

    @directory.setter
    def directory(self, path: str | os.PathLike[str]) -> None:
        self._checkpoints = open_files(path)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle keeps: folder, rules, own steps; no lock, signal or running save."""
        # `_turn` creates a new lock; signals and a running save, with its memory, belong to a
        # process; no private class is named
        state = {**self.__dict__, "_lock": None, "_pid": None, "_signals": None}
        state |= {"_under_way": None, "_staging": None}
        state["directory"] = state.pop("_checkpoints").path
        timer = (self._timer.steps, self._timer.interval)
        return {**state, "_rules": tuple(self._rules), "_timer": timer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled manager, also of an older version, which lacks newer attributes."""
        # attributes that pickles of older versions lack
        added: dict[str, Any] = {"_rules": NO_RULES, "_timer": (None, None)}
        added |= {"_signals": None, "_warns_unchanged": True, "_last_model": None}
        added["_last_restored"] = None
        added["_warns_metric"] = Retention(*state.get("_rules", NO_RULES)).best is not None
        self.__dict__.update({**added, **state})
        self._rules = Retention(*self._rules)
        self._timer = SaveTimer(*self.__dict__["_timer"])
        self.directory = self.__dict__.pop("directory")

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, raised: BaseException | None, trace: object) -> None:
        """Wait for a running save; its error becomes a note of the block's exception, if any."""
        try:
            self.close()
        except Exception as error:
            if raised is None:
                raise
            text = f"{type(error).__name__}: {error}"  # the exception of the block continues
            raised.add_note(f"a save that was under way has failed, too: {text}")

    def close(self) -> None:
        """Wait for a running save, free the memory for copies, and stop watching signals.

        Raises
        ------
        StoreError, CollectiveError, ...
            The running save failed, and no call has raised its error yet.

        Examples
        --------
        >>> from mlstate.checkpoint import CheckpointManager
        >>> CheckpointManager("run").close()
        """
        if self._signals is not None:
            self._signals.close()
        with self._turn(None):
            self._staging = None
            self._settle()

    def _turn(self, group: ProcessGroup | None) -> AbstractContextManager[object]:
        """Return the lock that lets one thread at a time save.

        Ranks that are threads may share a manager and must save at the same time, so with a `group`
        of several ranks the lock does nothing. Raises RuntimeError if called from the thread of
        the running save.
        """
        under_way = self._under_way
        if under_way is not None:
            under_way._job.refuse_own_thread()
        if self._pid != os.getpid():  # a thread of the parent may have held the lock
            self._lock, self._pid = threading.RLock(), os.getpid()
        return self._lock if getattr(group, "world_size", 1) == 1 else nullcontext()

    def _settle(self) -> None:
        """Wait for the running save; raise its error unless a call has raised it before.

        After a success, warn if its model has no new bytes.
        """
        under_way = self._under_way
        if under_way is not None:
            under_way._settle()
            self._under_way = None
            saved = under_way._job.result
            if isinstance(saved, RootPath) and saved.manifest is not None:
                self._warn_if_unchanged(saved.manifest, under_way._job.target.rank)

    def __repr__(self) -> str:
        return f"CheckpointManager({self.directory!r}, keep={self.keep}): steps {self.steps()}"

    def _repr_html_(self) -> str:
        from .._pages.html import manager_html

        manifests = [manifest for _, manifest in self._roots()]
        return manager_html(f"CheckpointManager({self.directory!r}, keep={self.keep})", manifests)

    # -- existing steps

    def _roots(self, newest: Manifest | None = None) -> Roots:
        """Return the steps' roots with their manifests, oldest first, as `read_roots` does."""
        return read_roots(self._checkpoints, newest)

    def steps(self) -> list[int]:
        """Return the existing steps, in the order of their saves.

        Examples
        --------
        >>> from mlstate.checkpoint import CheckpointManager
        >>> CheckpointManager("no such folder").steps()
        []
        """
        return [m.step for _, m in self._roots() if m.step is not None]

    def latest_step(self) -> int | None:
        """Return the step that was saved last, or None if there are no steps.

        Examples
        --------
        >>> from mlstate.checkpoint import CheckpointManager
        >>> CheckpointManager("no such folder").latest_step() is None
        True
        """
        steps = self.steps()
        return steps[-1] if steps else None

    def best_step(self) -> int | None:
        """Return the step with the best metric, or None if no step has one.

        Raises
        ------
        ValueError
            The manager has no `monitor`, the key of the metric.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import CheckpointManager
        >>> manager = CheckpointManager(tempfile.mkdtemp(), keep_best=1, monitor="loss")
        >>> for step, loss in enumerate([0.5, 0.2, 0.4, 0.3]):
        ...     _ = manager.save(step, model={"w": np.full(2, step)}, metadata={"loss": loss})
        >>> manager.best_step(), manager.steps()
        (1, [1, 3])
        """
        if self._rules.monitor is None:
            raise ValueError(
                "best_step() needs the metric: pass monitor='loss' or another key of the metadata "
                "to CheckpointManager, and mode='max' if the largest is best"
            )
        best = best_of(self._roots(), self._rules)
        return None if best is None else best[1].step

    def checkpoint(self, step: int | str) -> Checkpoint:
        """Return the checkpoint of a step.

        Parameters
        ----------
        step : int or {"latest", "best"}
            One of `steps`, the step that was saved last, or that with the best metric.

        Raises
        ------
        ValueError
            `step` is ``"best"``, and the manager has no `monitor` or no step has the metric.
        StoreError
            The step does not exist; also a `FileNotFoundError`.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import CheckpointManager
        >>> manager = CheckpointManager(tempfile.mkdtemp())
        >>> _ = manager.save(5, model={"w": np.ones(2)})
        >>> manager.checkpoint(5).step
        5
        """
        root, manifest = self._find(step)
        return Checkpoint(RootPath(self._checkpoints, root.path, manifest))

    def _find(self, step: int | str) -> tuple[Root, Manifest]:
        """Return root and manifest of `step`; raises as `checkpoint`.

        A writer may delete the latest or the best step for another one before it is read.
        """
        while True:
            number = self._number_of(step)
            try:
                return read_step(self._checkpoints, number)
            except StoreNotFoundError:
                if not isinstance(step, str) or self._number_of(step) == number:
                    raise

    def _number_of(self, step: Any) -> int:
        """Return the number of `step`, also for "latest" and "best"; an int is not looked up.

        Raises StoreError without steps, ValueError without a best one, TypeError for other types.
        """
        if isinstance(step, str) and step in ("latest", "best"):
            number = self.best_step() if step == "best" else self.latest_step()
            if number is not None:
                return number
            if step == "best":
                raise no_metric(self.directory, self._rules.monitor)
            raise self._no_step()
        try:
            return check_int("step", step, -(1 << 63))
        except TypeError:
            text = f"step must be an int, 'latest' or 'best', got {type(step).__name__}: {step!r}"
            raise TypeError(text) from None

    def _no_step(self) -> Exception:
        """Return the error for a folder without steps, which tells if it has another checkpoint."""
        reason = "no checkpoint there; before the first save, latest_step() is None"
        if holds_other_checkpoint(self._checkpoints):
            reason = f"{OTHER}: mlstate.load loads it"
        return store_error(FileNotFoundError(2, reason), "cannot restore", self.directory)

    # -- saving

    def _prepare(self, step: int, metadata: Any, group: ProcessGroup | None) -> None:
        """Wait for the running save; refuse another's folder, and warn, before `step` is saved."""
        if not hasattr(step, "__index__"):
            raise TypeError(
                f"step must be an int, got {type(step).__name__}; it comes first: "
                "manager.save(step, model, optimizer)"
            )
        self._settle()
        self._timer.note()
        self._refuse_other(group)
        self._warn_of_deletions(step, group)
        self._warn_without_metric(step, metadata, group)

    @show_options(SAVE_DEFAULTS)
    def save(
        self,
        step: int,
        model: Any = None,
        optimizer: Any = None,
        **options: Unpack[SaveOptions],
    ) -> Checkpoint:
        """Save a step, and delete the oldest steps beyond `keep`.

        Parameters
        ----------
        step : int
            The step. Saving a step again replaces it when the new one is committed.
        model, optimizer, states, metadata, group, layout, pack_below_bytes
            As for `mlstate.save`.
        digest, progress, lock_timeout
            As for `mlstate.save`.
        sparse, incremental, compress
            As for `mlstate.save`. Steps share layers in the same way as files: files that a
            newer step needs stay when the oldest steps are deleted.

        Returns
        -------
        Checkpoint
            The step.

        Raises
        ------
        StoreError, CollectiveError, ...
            As for `mlstate.save`. A running `save_async` is waited for first, and its error is
            raised if no call has raised it yet. Also StoreError (``errno.EEXIST``) if the folder
            holds a checkpoint of `mlstate.save` and no steps.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import CheckpointManager
        >>> manager = CheckpointManager(tempfile.mkdtemp())
        >>> manager.save(1, model={"w": np.ones(2)}).step
        1
        """
        options = complete_options(CheckpointManager.save, options, SAVE_DEFAULTS)
        group = options["group"] = optional_group(options["group"])
        with self._turn(group):
            self._prepare(step, options["metadata"], group)
            folder = SaveFolder(self.directory, self._retain)
            saved = save(folder, model, optimizer, step=step, **options)
            self._own.add(saved.step)
            self._warn_if_unchanged(saved._manifest, 0 if group is None else group.rank)
        return saved

    @show_options(SAVE_DEFAULTS)
    def save_async(
        self,
        step: int,
        model: Any = None,
        optimizer: Any = None,
        *,
        max_staging_bytes: MemorySize | None = None,
        **options: Unpack[SaveOptions],
    ) -> SaveHandle:
        """Start to save a step, and return while it is written.

        Only one save runs at a time: the previous one is waited for first. The memory for
        copies is kept for the next save, until `close`.

        Parameters
        ----------
        step, model, optimizer, metadata, layout
            As for `save`.
        pack_below_bytes, sparse, incremental, compress, digest
            As for `save`.
        states : mapping of str to object, optional
            As for `mlstate.checkpoint.save_async`.
        max_staging_bytes, group, progress, lock_timeout
            As for `mlstate.checkpoint.save_async`.

        Returns
        -------
        SaveHandle
            Its `staged` returns when the state may change.

        Raises
        ------
        StoreError, CollectiveError, ...
            As for `mlstate.checkpoint.save_async`, and as for `save` about the folder. If the
            previous save failed and no call has raised its error yet, the error is raised here
            and no save is started.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import CheckpointManager
        >>> weights = {"w": np.zeros(2)}
        >>> with CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     for step in (1, 2, 3):
        ...         weights["w"] += 1  # training
        ...         manager.save_async(step, model=weights).staged()
        >>> [manager.restore(step).model["w"][0].item() for step in manager.steps()]
        [1.0, 2.0, 3.0]
        """
        options = complete_options(CheckpointManager.save_async, options, SAVE_DEFAULTS)
        group = options["group"] = optional_group(options["group"])
        with self._turn(group):
            self._prepare(step, options["metadata"], group)
            if self._staging is None:
                self._staging = OwnStaging(keeps_memory=True)

            def started(handle: SaveHandle) -> None:
                # before the save starts, so that an interrupt cannot lose a running save
                self._under_way = handle
                self._own.add(handle._job.content.header.get("step"))

            return save_async(
                SaveFolder(self.directory, self._retain, started=started),
                model,
                optimizer,
                step=step,
                max_staging_bytes=max_staging_bytes,
                staging=self._staging,
                **options,
            )

    # -- when to save

    def should_save(self, step: int, *, group: ProcessGroup | None = None) -> bool:
        """Return whether to save a step: it is due, or a watched signal has arrived.

        Parameters
        ----------
        step : int
            The step.
        group : ProcessGroup, optional
            The ranks that save together. All of them call this and get the same answer: true if
            it is true for any rank. They exchange one byte.

        Returns
        -------
        bool
            Without `save_interval_steps` and `save_time_interval`, true for every step.

        Examples
        --------
        >>> from mlstate.checkpoint import CheckpointManager
        >>> manager = CheckpointManager("run", save_interval_steps=10)
        >>> [step for step in range(1, 31) if manager.should_save(step)]
        [10, 20, 30]
        """
        due = self._timer.is_due(step) or self._has_signal()
        answers = gather_bytes(optional_group(group), b"1" if due else b"0")
        return any(answer == b"1" for answer in answers)

    def watch_signals(self, *signals: int) -> None:
        """Watch for signals that announce the end of the job, until `close`.

        The signal only sets a flag: `should_save` then returns true, and `reached_preemption`
        too. A second signal of the same number has its old effect.

        Parameters
        ----------
        *signals : int
            Signals, such as ``signal.SIGUSR1``. Default: ``signal.SIGTERM``.

        Raises
        ------
        ValueError, OSError
            This is not the main thread, or no such signal exists; it cannot be caught (SIGKILL).

        Examples
        --------
        >>> import os, signal, tempfile
        >>> import numpy as np
        >>> from mlstate.checkpoint import CheckpointManager
        >>> with CheckpointManager(tempfile.mkdtemp() + "/run", save_interval_steps=100) as manager:
        ...     manager.watch_signals()
        ...     for step in range(1, 1000):
        ...         if step == 3:
        ...             os.kill(os.getpid(), signal.SIGTERM)
        ...         if manager.should_save(step):
        ...             _ = manager.save(step, model={"w": np.full(2, step)})
        ...         if manager.reached_preemption():
        ...             break
        ...     manager.steps()
        [3]
        """
        import signal

        if self._signals is not None:
            self._signals.close()
        self._signals = SignalWatch(signals or (signal.SIGTERM,))

    def _has_signal(self) -> bool:
        return self._signals is not None and self._signals.received is not None

    def reached_preemption(self, *, group: ProcessGroup | None = None) -> bool:
        """Return whether a watched signal has arrived.

        Parameters
        ----------
        group : ProcessGroup, optional
            As for `should_save`.

        Examples
        --------
        >>> from mlstate.checkpoint import CheckpointManager
        >>> CheckpointManager("run").reached_preemption()
        False
        """
        answers = gather_bytes(optional_group(group), b"1" if self._has_signal() else b"0")
        return any(answer == b"1" for answer in answers)

    def _warn_if_unchanged(self, saved: Manifest, rank: int) -> None:
        """Warn once, on rank 0, if `saved` has no new file of the model: another may be trained.

        `rank`: of this process. Compares only local folders and two successive saves with a model.
        """
        before, self._last_model = self._last_model, saved.step if saved.model else None
        if not self._warns_unchanged or rank > 0 or None in (before, self._last_model):
            return
        if not self._checkpoints.folder.is_local:  # every save writes all objects
            return
        # Names of new files contain the generation of their save.
        mark = f".{saved.generation}-"
        if before == saved.step or any(
            mark in name for name in self._checkpoints.folder.names("params")
        ):
            return
        self._warns_unchanged = False
        find_caller().warn(
            f"the model of step {saved.step} has the same bytes as that of step {before}: is this "
            "the model that is trained, and does it wait for save_async(...).staged()? "
            "warn_unchanged=False allows it"
        )

    # -- deleting

    def _refuse_other(self, group: ProcessGroup | None) -> None:
        """Raise StoreError (EEXIST) on all ranks if the folder's checkpoint is not a step."""
        is_other = False
        with if_alone(group):
            is_other = holds_other_checkpoint(self._checkpoints)
        if is_other:
            text = f"{OTHER}: save steps into another folder"
            raise store_error(OSError(errno.EEXIST, text), "cannot save the step", self.directory)

    def _warn_of_deletions(self, step: int, group: ProcessGroup | None) -> None:
        """Warn once, before `step` is saved, if `keep` deletes steps of another manager."""
        if self.keep is None or self._has_warned or self._is_kept_elsewhere is not None:
            return
        steps_deleted: list[int | None] = []
        later: list[int | None] = []
        # with several ranks, only rank 0 checks files, when it deletes: reads must not multiply
        checks_files = group is None or group.world_size == 1
        with if_alone(group):
            roots = [root for root in self._roots() if root[1].step != step]
            can_load = self._can_load if checks_files else self._is_undamaged
            count = count_old(roots, self.keep - 1, can_load)  # the new step is one of `keep`
            rules = self._rules.without_one()  # the new step may become one of the best
            generations = rules.kept(roots, can_load)
            steps_deleted = [m.step for _, m in roots[:count] if m.generation not in generations]
            later = [m.step for _, m in roots[count:] if not self._is_own(m.step)]
        foreign = [old_step for old_step in steps_deleted if not self._is_own(old_step)]
        if not foreign:
            return
        more = f", and {steps_text(later, _SHOWN)} with later saves" if later else ""
        find_caller().warn(
            f"keep={self.keep} deletes steps that this manager did not save: "
            f"{steps_text(foreign, _SHOWN)}{more}; keep=None keeps every step"
        )
        self._has_warned = True  # not set if the warning was raised: then nothing is deleted

    def _is_own(self, step: int | None) -> bool:
        """Return whether this manager saved `step`, or restored it or a later one."""
        if step in self._own:
            return True
        last = self._last_restored
        return step is not None and last is not None and step <= last

    def _warn_without_metric(self, step: int, metadata: Any, group: ProcessGroup | None) -> None:
        """Warn on rank 0 if the metadata of the first saved step lack `keep_best`'s metric.

        Later steps are not looked at, and neither are metadata that are not a mapping.
        """
        if not self._warns_metric or not isinstance(metadata or {}, Mapping):
            return
        self._warns_metric = False
        if group is not None and group.rank > 0:
            return
        if self._rules.metric_in(metadata or {}) is not None:
            return
        keys = ", ".join(map(repr, metadata or {})) or "none"
        find_caller().warn(
            f"step {step} has no number {self._rules.monitor!r} in metadata= (keys: {keys}), so "
            f"keep_best={self._rules.best} does not keep it"
        )

    def _retain(self, newest: Manifest) -> dict[str, Manifest]:
        """Delete roots: replaced ones of a step saved again, and those beyond `keep`.

        `newest`: of the save just committed. Returns the manifests of the other roots by path.
        """
        # a root that cannot be read now because of an I/O error may be good, so it stays
        old, retained = self._divide_roots(newest.generation, self._roots(newest))
        self._checkpoints.delete_roots(old)
        return retained

    def _divide_roots(
        self, newest: str, roots: Roots, *, is_new: bool = True
    ) -> tuple[list[Root], dict[str, Manifest]]:
        """Return the roots to delete, except generation `newest`; and manifests of others by path.

        `roots`: the readable ones, oldest first. If `is_new`, `newest` was written just now, and
        its files are not checked.
        """
        unchecked = newest if is_new else ""
        retained = self._rules.choose(
            roots,
            self.keep,
            lambda manifest: manifest.generation == unchecked or self._can_load(manifest),
            self._is_kept_elsewhere,
        )
        old = [root for root in self._checkpoints.list_roots() if root.path not in retained]
        old = [root for root in old if root.generation != newest]
        for root in old:
            self._files.pop(root.generation, None)
        return old, retained

    def _is_undamaged(self, manifest: Manifest) -> bool:
        """Return whether this manager knows of no damage; no file is read."""
        return manifest.generation not in self._damaged

    def _can_load(self, manifest: Manifest) -> bool:
        """Return whether a step has no known damage and all files in full; read its index once."""
        if not self._is_undamaged(manifest) or self._checkpoints.is_marked(manifest):
            return False
        sizes = self._files.get(manifest.generation)
        if sizes is None:
            try:
                merged = self._checkpoints.load_merged_index(manifest)
            except (FormatError, FileNotFoundError):
                return False
            sizes = {record.path: record.bytes for record in manifest.indexes}
            self._files[manifest.generation] = sizes = sizes | merged.files()
        return self._checkpoints.folder.has_files(sizes)

    def _note_damage(self, generation: str, root: str, error: MLStateError | None) -> None:
        """Do not count a step any more; also in other processes if its bytes are damaged.

        `generation`, `root`: of the step, and the path of its manifest. `error`: the reason; only a
        ChecksumError marks the step for other processes.
        """
        self._damaged.add(generation)
        if isinstance(error, ChecksumError):
            self._checkpoints.mark(root)

    def delete(self, step: int, *, lock_timeout: float = 0) -> None:
        """Delete a step, and the files that no other step needs.

        Parameters
        ----------
        step : int
            One of `steps`, except the step that was saved last.
        lock_timeout : float, default 0
            Seconds to wait for another process that is writing in the folder.

        Raises
        ------
        ValueError
            `step` is the step that was saved last.
        StoreError
            The step does not exist, or another process is writing. Also the error of a failed
            `save_async` that no call has raised yet.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import CheckpointManager
        >>> manager = CheckpointManager(tempfile.mkdtemp())
        >>> for step in (1, 2):
        ...     _ = manager.save(step, model={"w": np.full(2, step)})
        >>> manager.delete(1)
        >>> manager.steps()
        [2]
        """
        with self._turn(None):
            self._settle()
            timeout = check_timeout(lock_timeout)
            files, checkpoint = self._checkpoints, self.checkpoint(step)
            exclusion = exclusion_of(files.folder, timeout)
            with exclusion.holder:
                exclusion.acquire()
                if files.read_manifest().generation == checkpoint.generation:
                    raise ValueError(
                        f"step {step} is the newest checkpoint: save another one first"
                    )
                roots = [
                    root for root in files.list_roots() if root.generation == checkpoint.generation
                ]
                files.delete_roots(roots)
                if files.folder.excludes_writers:
                    files.prune()
                else:  # new files of a running writer stay
                    files.delete_generations([checkpoint._manifest])

    # -- restoring

    @show_options(LOAD_DEFAULTS)
    def restore(self, step: int | str, **options: Unpack[LoadOptions]) -> LoadedState:
        """Load a step.

        Parameters
        ----------
        step : int or {"latest", "best"}
            As for `checkpoint`. `restore_latest` also skips damaged steps.
        **options
            Keywords of `mlstate.load`.

        Returns
        -------
        LoadedState
            The state.

        Raises
        ------
        StoreError, FormatError, ...
            As for `checkpoint` and `mlstate.load`.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import CheckpointManager
        >>> manager = CheckpointManager(tempfile.mkdtemp())
        >>> _ = manager.save(1, model={"w": np.ones(2)})
        >>> manager.restore(1).model["w"]
        array([1., 1.])
        """
        root, manifest = self._find(step)

        def choose() -> str:
            """Find the best step again, because a writer deleted it for a better one."""
            nonlocal root, manifest
            root, manifest = self._find(step)
            return root.path

        chosen = RootPath(self._checkpoints, root.path, manifest)
        if step == "best":
            chosen = chosen._replace(choose=choose)
        try:
            state = load(chosen, **options)
            self._last_restored = state.step
            return state
        except FormatError as error:
            self._note_damage(manifest.generation, root.path, error)
            raise

    @show_options(LOAD_DEFAULTS)
    def restore_latest(self, **options: Unpack[LoadOptions]) -> LoadedState:
        """Load the newest step that is not damaged.

        A damaged step is skipped with a warning. Damage is detected by checksums, unless
        ``verify=False``.

        Parameters
        ----------
        **options
            Keywords of `mlstate.load`. With a group every rank loads the same step.

        Returns
        -------
        LoadedState
            The state; its ``step`` is the loaded step.

        Raises
        ------
        StoreError
            There are no steps; also a `FileNotFoundError`.
        FormatError, ChecksumError, CollectiveError
            Every step is damaged; the error describes the newest one, or names the rank that could
            not read it.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import CheckpointManager
        >>> manager = CheckpointManager(tempfile.mkdtemp())
        >>> _ = manager.save(7, model={"w": np.ones(2)})
        >>> manager.restore_latest().step
        7
        """
        options["group"] = group = optional_group(options.get("group"))
        names = options.get("names")
        if isinstance(names, Iterator):  # a second try would get nothing from it
            options["names"] = list(names)
        newest_error: MLStateError | None = None
        tried, written = None, set[tuple[str, str]]()  # roots; targets that failed tries changed
        # a writer may have deleted all of these roots and committed newer ones
        while (roots := agreed_roots(self._checkpoints, group)) != tried:
            tried, newest_error = roots, None
            for root in reversed(roots):
                state, error = try_root(self._checkpoints, root, options, written)
                if state is not None:
                    self._last_restored = state.step
                    return state
                self._note_damage(root.split(".")[-2], root, error)  # roots/STEP.GENERATION.json
                if self._checkpoints.folder.exists(root):  # else a writer has deleted it
                    text = f"{self._checkpoints.name_of(root)} cannot be restored: {error}"
                    log("WARNING", "%s: %s", self.directory, text)
                    find_caller().warn(f"{text}; the step before it is tried next")
                newest_error = newest_error or error
        if newest_error is not None:
            raise newest_error
        raise self._no_step()
