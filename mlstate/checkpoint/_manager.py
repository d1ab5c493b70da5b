"""Steps of a run in one folder; public through `mlstate.checkpoint`."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from .._common.local_path import local_folder
from .._common.log import log
from .._common.set_module import set_module
from .._common.text import steps_text
from ..errors import CollectiveError, FormatError, MLStateError, StoreError
from ._checkpoint import Checkpoint
from ._load import LoadedState, load_checkpoint
from ._save import PACK_BELOW, write_checkpoint
from ._store import folder as _folder
from ._store.writer_lock import WriterLock, check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from .._common.budget import MemorySize
    from .._sharding.layout import Layout
    from ..collectives import ProcessGroup
    from ._save_async import SaveHandle
    from ._staging import Staging
    from ._store.manifest import Manifest

    _Roots: TypeAlias = list[tuple[_folder.Root, Manifest]]


_SHOWN = 20  # steps in a warning


@set_module("mlstate.checkpoint")
class CheckpointManager:
    """Checkpoints of a run, by step, in one folder.

    Steps share the files of what did not change between them. `mlstate.save` refuses the folder
    once it holds steps.

    Parameters
    ----------
    directory : str or os.PathLike
        The folder; made with the first save.
    keep : int or None, default None
        How many of the newest steps `save` and `save_async` keep; they delete older ones. None:
        every step stays. A damaged step does not count: one whose files are missing or have
        another length, or that `restore` or `restore_latest` of this manager found damaged. It
        stays until it is older than `keep` steps that can be loaded.

    Warns
    -----
    UserWarning
        `keep` deletes steps that this manager did not save. The warning comes once, names the
        steps, and comes before the first such deletion; every rank of a group warns.

    Raises
    ------
    ValueError
        `keep` is below 1.

    Notes
    -----
    Threads may share a manager: `save`, `save_async`, `delete` and `close` of one thread wait for
    those of another. With a group of several ranks, save from one thread of each rank.

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

    def __init__(self, directory: str | os.PathLike[str], keep: int | None = None) -> None:
        if keep is not None and not hasattr(keep, "__index__"):
            raise TypeError(f"keep must be an int, or None for all, got {type(keep).__name__}")
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be 1 or more, or None for all, got {keep}")
        self.directory = local_folder(directory)
        self.keep = keep
        self._own: set[int] = set()  # steps that this manager saved
        self._damaged: set[str] = set()  # generations that this manager could not restore
        self._files: dict[str, dict[str, int]] = {}  # of generations: sizes by path
        self._has_warned = False
        self._staging: Staging | None = None
        self._under_way: SaveHandle | None = None
        self._lock, self._pid = threading.RLock(), os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_pid": None}  # `_turn` makes a new lock

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, raised: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as error:
            if raised is None:
                raise
            text = f"{type(error).__name__}: {error}"  # what the block raised goes on
            raised.add_note(f"a save that was under way has failed, too: {text}")

    def close(self) -> None:
        """Wait for a save that is under way, and give back the memory for copies.

        Raises
        ------
        As `save_async`'s handle, where that save failed and nobody was told yet.

        Examples
        --------
        >>> from mlstate.checkpoint import CheckpointManager
        >>> CheckpointManager("run").close()
        """
        with self._turn(None):
            self._staging = None
            self._settle()

    def _turn(self, group: ProcessGroup | None) -> AbstractContextManager[object]:
        """Return the lock that lets one thread at a time save.

        Ranks that are threads can share a manager. They save at the same time, so they get none.
        """
        under_way = self._under_way
        if under_way is not None:
            under_way._job.refuse_own_thread()
        if self._pid != os.getpid():  # in the parent another thread may have held the lock
            self._lock, self._pid = threading.RLock(), os.getpid()
        return self._lock if getattr(group, "world_size", 1) == 1 else nullcontext()

    def _settle(self) -> None:
        """Wait for the save that is under way; raise its error if nobody was told yet."""
        under_way = self._under_way
        if under_way is not None:
            under_way._settle()
            self._under_way = None

    def __repr__(self) -> str:
        return f"CheckpointManager({self.directory!r}, keep={self.keep}): steps {self.steps()}"

    def _repr_html_(self) -> str:
        from ._html import manager_html

        manifests = [manifest for _, manifest in self._roots()]
        return manager_html(f"CheckpointManager({self.directory!r}, keep={self.keep})", manifests)

    # -- what there is

    def _roots(
        self, unread: type[MLStateError] = MLStateError, newest: Manifest | None = None
    ) -> _Roots:
        """Return the roots that can be read, the oldest first; of one step, the newest.

        Reading may fail with `unread`; other errors are raised. The root of `newest` is not
        read again.
        """
        found: dict[int | None, tuple[_folder.Root, Manifest]] = {}
        for root in _folder.list_roots(self.directory):
            try:
                if newest is not None and root.generation == newest.generation:
                    manifest = newest
                else:
                    manifest = _folder.read_manifest(self.directory, root.path)
            except unread as error:
                if isinstance(error, FormatError):
                    log("WARNING", "%s: a step is damaged: %s", self.directory, error)
                continue
            found.pop(manifest.step, None)
            found[manifest.step] = (root, manifest)
        return list(found.values())

    def steps(self) -> list[int]:
        """Return the steps that are there, in the order in which they were saved.

        Examples
        --------
        >>> from mlstate.checkpoint import CheckpointManager
        >>> CheckpointManager("no such folder").steps()
        []
        """
        return [m.step for _, m in self._roots() if m.step is not None]

    def latest_step(self) -> int | None:
        """Return the step that was saved last, or None.

        Examples
        --------
        >>> from mlstate.checkpoint import CheckpointManager
        >>> CheckpointManager("no such folder").latest_step() is None
        True
        """
        steps = self.steps()
        return steps[-1] if steps else None

    def checkpoint(self, step: int) -> Checkpoint:
        """Return what was saved at a step.

        Parameters
        ----------
        step : int
            One of `steps`.

        Raises
        ------
        StoreError
            There is no such step; a `FileNotFoundError` too.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import CheckpointManager
        >>> manager = CheckpointManager(tempfile.mkdtemp())
        >>> _ = manager.save(5, model={"w": np.ones(2)})
        >>> manager.checkpoint(5).step
        5
        """
        if not hasattr(step, "__index__"):
            raise TypeError(f"step must be an int, got {type(step).__name__}: {step!r}")
        for root, manifest in self._roots():
            if manifest.step == step:
                return Checkpoint(self.directory, _root=root.path, _manifest=manifest)
        have = steps_text(self.steps())
        have += f"; {_OTHER}" if _holds_no_steps(self.directory) else ""
        raise _folder.store_error(
            FileNotFoundError(2, f"no step {step} there (steps: {have})"),
            "cannot find the step",
            self.directory,
        )

    # -- saving

    def save(
        self,
        step: int,
        model: Any = None,
        optimizer: Any = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        group: ProcessGroup | None = None,
        layout: Layout | str | None = None,
        pack_below_bytes: int = PACK_BELOW,
        sparse: bool = False,
        incremental: bool = False,
        compress: str | None = None,
        progress: Callable[[int], object] | None = None,
        lock_timeout: float = 0,
    ) -> Checkpoint:
        """Save a step, and give up the oldest ones beyond `keep`.

        Parameters
        ----------
        step : int
            Which; saving a step again replaces it once the new one is committed.
        model, optimizer, metadata, group, layout, pack_below_bytes, progress, lock_timeout
            As for `mlstate.save`.
        sparse, incremental, compress
            As for `mlstate.save`. Steps share layers as they share files: files that a newer
            step needs stay when the oldest steps are deleted.

        Returns
        -------
        Checkpoint
            The step.

        Raises
        ------
        As `mlstate.save`, and as a save of `save_async` that nobody has waited for: that one
        is waited for first. StoreError, `errno.EEXIST`, where the folder has no steps but a
        checkpoint of `mlstate.save`, which would be replaced.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import CheckpointManager
        >>> manager = CheckpointManager(tempfile.mkdtemp())
        >>> manager.save(1, model={"w": np.ones(2)}).step
        1
        """
        with self._turn(group):
            self._settle()
            self._refuse_other(group)
            self._warn_of_deletions(step, group)
            saved = write_checkpoint(
                self.directory,
                model,
                optimizer,
                metadata=metadata,
                step=step,
                group=group,
                layout=layout,
                pack_below=pack_below_bytes,
                sparse=sparse,
                incremental=incremental,
                compress=compress,
                progress=progress,
                keep_root=True,
                retain=self._retain,
                lock_timeout=lock_timeout,
            )
            self._own.add(step)
        return saved

    def save_async(
        self,
        step: int,
        model: Any = None,
        optimizer: Any = None,
        *,
        max_staging_bytes: MemorySize | None = None,
        metadata: Mapping[str, Any] | None = None,
        group: ProcessGroup | None = None,
        layout: Layout | str | None = None,
        pack_below_bytes: int = PACK_BELOW,
        sparse: bool = False,
        incremental: bool = False,
        compress: str | None = None,
        progress: Callable[[int], object] | None = None,
        lock_timeout: float = 0,
    ) -> SaveHandle:
        """Begin to save a step, and return while it is written.

        One save is under way at a time: the one before is waited for first. The memory for
        copies is kept for the next save, until `close`.

        Parameters
        ----------
        step, model, optimizer, metadata, layout, pack_below_bytes, sparse, incremental, compress
            As for `save`.
        max_staging_bytes, group, progress, lock_timeout
            As for `mlstate.checkpoint.save_async`.

        Returns
        -------
        SaveHandle
            Its `staged` returns when the state may be changed.

        Raises
        ------
        As `mlstate.checkpoint.save_async`, as `save` for the folder's sake, and as the save
        before if that one failed and nobody was told yet; then nothing new is begun.

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
        from ._save_async import begin_save
        from ._staging import OwnStaging

        with self._turn(group):
            self._settle()
            self._refuse_other(group)
            self._warn_of_deletions(step, group)
            if self._staging is None:
                self._staging = OwnStaging(kept=True)

            def keep(handle: SaveHandle) -> None:
                # before it begins: an interrupt leaves none that is unknown
                self._under_way = handle
                self._own.add(step)

            return begin_save(
                self.directory,
                model,
                optimizer,
                metadata=metadata,
                step=step,
                max_staging_bytes=max_staging_bytes,
                staging=self._staging,
                progress=progress,
                group=group,
                layout=layout,
                pack_below=pack_below_bytes,
                sparse=sparse,
                incremental=incremental,
                compress=compress,
                keep_root=True,
                retain=self._retain,
                lock_timeout=lock_timeout,
                keep=keep,
            )

    def _refuse_other(self, group: ProcessGroup | None) -> None:
        """Leave a checkpoint alone that is no step; each rank finds the same here."""
        found = False
        with _if_alone(group):
            found = _holds_no_steps(self.directory)
        if found:
            raise _folder.store_error(
                FileExistsError(errno.EEXIST, f"{_OTHER}: save steps into another folder"),
                "cannot save the step",
                self.directory,
            )

    def _warn_of_deletions(self, step: int, group: ProcessGroup | None) -> None:
        """Warn once, before a save begins, if `keep` deletes steps of another manager."""
        if self.keep is None or self._has_warned:
            return
        found: list[int | None] = []
        count = 0
        # rank 0 alone looks at files, when it deletes: not every rank at those of all
        look = group is None or group.world_size == 1
        with _if_alone(group):
            roots = [root for root in self._roots(FormatError) if root[1].step != step]
            count = self._count_old(roots, self.keep - 1, look=look)
            found = [manifest.step for _, manifest in roots]
        deleted = found[:count]
        foreign = [one for one in deleted if one not in self._own]
        if not foreign:
            return
        later = [one for one in found[len(deleted) :] if one not in self._own]
        more = f", and {steps_text(later, _SHOWN)} with later saves" if later else ""
        warnings.warn(
            f"keep={self.keep} deletes steps that this manager did not save: "
            f"{steps_text(foreign, _SHOWN)}{more}; keep=None keeps every step",
            stacklevel=3,
        )
        self._has_warned = True  # not if the warning was raised: then nothing is deleted

    def _retain(self, newest: Manifest) -> dict[str, Manifest]:
        """Give up roots: of a step that was saved again, and those beyond `keep`.

        Returns the manifests of the other roots by path.
        """
        # a root that the system does not let us read now may be good: nothing is given up
        old, kept = self._superseded(newest.generation, self._roots(FormatError, newest))
        _folder.delete_roots(self.directory, old)
        return kept

    def _superseded(
        self, newest: str, roots: _Roots
    ) -> tuple[list[_folder.Root], dict[str, Manifest]]:
        """Return the roots to give up, never that of the newest generation, and the others."""
        keep = len(roots) if self.keep is None else self.keep
        count = self._count_old(roots, keep, newest)
        kept = {root.path: manifest for root, manifest in roots[count:]}
        old = [root for root in _folder.list_roots(self.directory) if root.path not in kept]
        old = [root for root in old if root.generation != newest]
        for root in old:
            self._files.pop(root.generation, None)
        return old, kept

    def _count_old(self, roots: _Roots, keep: int, newest: str = "", look: bool = True) -> int:
        """How many of the oldest roots are older than the newest `keep` that can be loaded.

        The generation `newest` was written just now. `look`: find out which files exist; else
        only known damage counts.
        """
        if keep >= len(roots):
            return 0
        for count in range(len(roots), 0, -1):
            if keep == 0:
                return count
            manifest = roots[count - 1][1]
            if manifest.generation == newest or not look:
                keep -= manifest.generation not in self._damaged
            else:
                keep -= self._can_load(manifest)
        return 0

    def _can_load(self, manifest: Manifest) -> bool:
        """Whether no damage is known and all files have their lengths; indexes are read once."""
        if manifest.generation in self._damaged:
            return False
        sizes = self._files.get(manifest.generation)
        if sizes is None:
            try:
                catalog = _folder.load_catalog(self.directory, manifest)
            except (FormatError, FileNotFoundError):
                return False
            sizes = {record.path: record.bytes for record in manifest.indexes}
            self._files[manifest.generation] = sizes = sizes | catalog.files()
        return _folder.has_files(self.directory, sizes)

    def delete(self, step: int, *, lock_timeout: float = 0) -> None:
        """Delete a step, and the files that no other needs.

        Parameters
        ----------
        step : int
            One of `steps`, but not the last one that was saved.
        lock_timeout : float, default 0
            Seconds to wait while another process writes.

        Raises
        ------
        ValueError
            It is the last one.
        StoreError
            There is no such step, or another process is writing.
        As `save`
            A save of `save_async` failed that nobody has waited for.

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
            generation = self.checkpoint(step).generation
            lock = WriterLock(self.directory, timeout=check_timeout(lock_timeout))
            with lock.acquire():
                if _folder.read_manifest(self.directory).generation == generation:
                    raise ValueError(
                        f"step {step} is the newest checkpoint: save another one first"
                    )
                roots = _folder.list_roots(self.directory)
                roots = [root for root in roots if root.generation == generation]
                _folder.delete_roots(self.directory, roots)
                _folder.prune(self.directory)

    # -- restoring

    def restore(self, step: int, **keywords: Any) -> LoadedState:
        """Load a step.

        Parameters
        ----------
        step : int
            One of `steps`.
        **keywords
            Those of `mlstate.load`.

        Returns
        -------
        LoadedState
            The state.

        Raises
        ------
        As `checkpoint` and `mlstate.load`.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import CheckpointManager
        >>> manager = CheckpointManager(tempfile.mkdtemp())
        >>> _ = manager.save(1, model={"w": np.ones(2)})
        >>> manager.restore(1).model["w"]
        array([1., 1.])
        """
        checkpoint = self.checkpoint(step)
        try:
            return load_checkpoint(
                self.directory, root=checkpoint._root, _manifest=checkpoint._manifest, **keywords
            )
        except FormatError:
            self._damaged.add(checkpoint.generation)
            raise

    def restore_latest(self, **keywords: Any) -> LoadedState:
        """Load the newest step that is good.

        A step that is damaged is passed over with a warning, as far as that is noticed: by
        its checksums, unless ``verify=False``.

        Parameters
        ----------
        **keywords
            Those of `mlstate.load`. With a group every rank loads the same step.

        Returns
        -------
        LoadedState
            The state; ``step`` says which.

        Raises
        ------
        StoreError
            There is no step at all; a `FileNotFoundError` too.
        FormatError, ChecksumError
            No step is good: what is wrong with the newest one.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import CheckpointManager
        >>> manager = CheckpointManager(tempfile.mkdtemp())
        >>> _ = manager.save(7, model={"w": np.ones(2)})
        >>> manager.restore_latest().step
        7
        """
        group = keywords.get("group")
        first: MLStateError | None = None
        tried: list[str] | None = None
        # a writer may have given up all of them meanwhile, for newer ones
        while (roots := _agreed_roots(self.directory, group)) != tried:
            tried, first = roots, None
            for root in reversed(roots):
                state, error = _try_root(self.directory, root, keywords)
                if state is not None:
                    return state
                self._damaged.add(root.split(".")[-2])
                is_there = os.path.lexists(os.path.join(self.directory, root))
                if error is not None and is_there:  # else a writer has given it up
                    log("WARNING", "%s: %s cannot be restored: %s", self.directory, root, error)
                    warnings.warn(f"{root} cannot be restored: {error}", stacklevel=2)
                first = first or error
        if first is not None:
            raise first
        what = "no checkpoint there"
        if _holds_no_steps(self.directory):
            what = f"{_OTHER}: mlstate.load loads it"
        raise _folder.store_error(FileNotFoundError(2, what), "cannot restore", self.directory)


_OTHER = "the folder holds a checkpoint of mlstate.save, which is no step"


def _if_alone(group: ProcessGroup | None) -> AbstractContextManager[None]:
    """Raise errors of the folder in a job of one rank only: several ranks meet before they do."""
    alone = group is None or group.world_size == 1
    return nullcontext() if alone else suppress(StoreError)


def _holds_no_steps(folder: str) -> bool:
    """Whether there is a checkpoint, but none that a manager saved."""
    there = os.path.lexists(os.path.join(folder, _folder.MANIFEST))
    return there and not _folder.list_roots(folder)


def find_root(folder: str, step: int) -> str:
    """The root of a step; of a folder that keeps no steps, the one that there is."""
    if not _folder.list_roots(folder) and _folder.read_manifest(folder).step == step:
        return _folder.MANIFEST
    return CheckpointManager(folder).checkpoint(step)._root


def _tell(group: ProcessGroup | None, text: bytes) -> list[bytes]:
    """What every rank says."""
    if group is None or group.world_size == 1:
        return [text]
    return list(group.gather_bytes(text))


def _agreed_roots(folder: str, group: ProcessGroup | None) -> list[str]:
    """Roots as the first rank finds them: ranks that look at other times find others."""
    names: list[str] = []
    error: MLStateError | None = None
    if group is None or group.rank == 0:
        try:
            names = [root.path for root in _folder.list_roots(folder)]
        except MLStateError as caught:
            error = caught
    said = _tell(group, b"" if error is not None else " ".join(["roots", *names]).encode())[0]
    if error is not None:
        raise error
    if not said:
        failed = CollectiveError("rank 0 cannot list the checkpoints; its own error says why")
        failed.rank = 0
        raise failed
    return said.decode().split(" ")[1:]


def _try_root(
    folder: str, root: str, keywords: dict[str, Any]
) -> tuple[LoadedState | None, MLStateError | None]:
    """Load a root on all ranks, or on none: one that a rank cannot read is none for any."""
    group = keywords.get("group")
    state: LoadedState | None = None
    error: MLStateError | None = None
    try:
        state = load_checkpoint(folder, root=root, **keywords)
    except (FormatError, StoreError) as caught:
        error = caught
    except BaseException:
        _tell(group, b"stop")  # no other root would do: nobody is to wait for this rank
        raise
    answers = _tell(group, b"good" if error is None else b"bad")
    if b"stop" in answers:
        rank = answers.index(b"stop")
        failed = CollectiveError(f"rank {rank} cannot restore; its own error says why")
        failed.rank = rank
        raise failed
    return (None if b"bad" in answers else state), error
