"""Steps of a run in one folder; public through `mlstate.checkpoint`."""

from __future__ import annotations

import errno
import os
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from . import _folder
from ._checkpoint import Checkpoint
from ._load import LoadedState
from ._lock import WriterLock
from ._save import PACK_BELOW, write_checkpoint
from .errors import CollectiveError, FormatError, MLStateError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._layout import Layout
    from ._manifest import Manifest
    from ._save_async import SaveHandle
    from ._staging import Staging
    from .collectives import ProcessGroup

    _Roots: TypeAlias = list[tuple[_folder.Root, Manifest]]


class CheckpointManager:
    """Checkpoints of a run, by step, in one folder.

    Steps share the files of what did not change between them. What `mlstate.save` writes into
    the folder is no step: it is what `mlstate.load` gives, until the next step is saved.

    Parameters
    ----------
    directory : str or os.PathLike
        The folder; made with the first save.
    keep : int or None, default 3
        How many of the newest saves are kept; None: all.

    Raises
    ------
    ValueError
        `keep` is below 1.

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

    def __init__(self, directory: str | os.PathLike[str], keep: int | None = 3) -> None:
        if keep is not None and not hasattr(keep, "__index__"):
            raise TypeError(f"keep must be an int, or None for all, got {type(keep).__name__}")
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be 1 or more, or None for all, got {keep}")
        self.directory = os.path.abspath(os.fspath(directory))
        self.keep = keep
        self._staging: Staging | None = None
        self._under_way: SaveHandle | None = None

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
        self._staging = None
        self._settle()

    def _settle(self) -> None:
        """Wait for the save that is under way; raise its error if nobody was told yet."""
        if self._under_way is not None:
            self._under_way._settle()
            self._under_way = None

    def __repr__(self) -> str:
        return f"CheckpointManager({self.directory!r}, keep={self.keep}): steps {self.steps()}"

    # -- what there is

    def _roots(self, unread: type[MLStateError] = MLStateError) -> _Roots:
        """Roots that can be read, the oldest first; of one step, the newest.

        Reading may fail with `unread`; other errors are raised.
        """
        found: dict[int | None, tuple[_folder.Root, Manifest]] = {}
        for root in _folder.list_roots(self.directory):
            try:
                manifest = _folder.read_manifest(self.directory, root.path)
            except unread:
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
                return Checkpoint(self.directory, _root=root.path)
        have = ", ".join(map(str, self.steps())) or "none"
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
    ) -> Checkpoint:
        """Save a step, and give up the oldest ones beyond `keep`.

        Parameters
        ----------
        step : int
            Which; saving a step again replaces it once the new one is committed.
        model, optimizer, metadata, group, layout, pack_below_bytes, progress
            As for `mlstate.save`.
        sparse, incremental, compress
            As for `mlstate.save`. Steps share layers as they share files: giving up the oldest
            ones never takes away what newer ones are made of.

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
        self._settle()
        self._refuse_other()
        return write_checkpoint(
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
        )

    def save_async(
        self,
        step: int,
        model: Any = None,
        optimizer: Any = None,
        *,
        max_staging_bytes: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        group: ProcessGroup | None = None,
        layout: Layout | str | None = None,
        pack_below_bytes: int = PACK_BELOW,
        sparse: bool = False,
        incremental: bool = False,
        compress: str | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> SaveHandle:
        """Begin to save a step, and return while it is written.

        One save is under way at a time: the one before is waited for first. The memory for
        copies is kept for the next save, until `close`.

        Parameters
        ----------
        step, model, optimizer, metadata, group, layout, pack_below_bytes, progress
            As for `save`.
        sparse, incremental, compress
            As for `save`.
        max_staging_bytes : int, optional
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

        self._settle()
        self._refuse_other()
        if self._staging is None:
            self._staging = OwnStaging(kept=True)
        self._under_way = begin_save(
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
        )
        return self._under_way

    def _refuse_other(self) -> None:
        """Leave a checkpoint alone that is no step; each rank finds the same here."""
        if _holds_no_steps(self.directory):
            raise _folder.store_error(
                FileExistsError(errno.EEXIST, f"{_OTHER}: save steps into another folder"),
                "cannot save the step",
                self.directory,
            )

    def _retain(self, folder: str, newest: Manifest) -> None:
        """Give up roots: of a step that was saved again, and those beyond `keep`."""
        _folder.delete_roots(folder, self._superseded(newest.generation))

    def _superseded(self, newest: str) -> list[_folder.Root]:
        """Roots to give up; never that of the newest generation."""
        # a root that the system does not let us read now may be good: nothing is given up
        kept = {root.path for root, _ in self._roots(FormatError)[-(self.keep or 0) :]}
        old = [root for root in _folder.list_roots(self.directory) if root.path not in kept]
        return [root for root in old if root.generation != newest]

    def delete(self, step: int) -> None:
        """Delete a step, and the files that no other needs.

        Parameters
        ----------
        step : int
            One of `steps`, but not the last one that was saved.

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
        self._settle()
        generation = self.checkpoint(step).generation
        with WriterLock(self.directory):
            if _folder.read_manifest(self.directory).generation == generation:
                raise ValueError(f"step {step} is the newest checkpoint: save another one first")
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
        return self.checkpoint(step).load(**keywords)

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
                if error is not None:
                    warnings.warn(f"{root} cannot be restored: {error}", stacklevel=2)
                first = first or error
        if first is not None:
            raise first
        what = "no checkpoint there"
        if _holds_no_steps(self.directory):
            what = f"{_OTHER}: mlstate.load loads it"
        raise _folder.store_error(FileNotFoundError(2, what), "cannot restore", self.directory)


_OTHER = "the folder holds a checkpoint of mlstate.save, which is no step"


def _holds_no_steps(folder: str) -> bool:
    """Whether there is a checkpoint, but none that a manager saved."""
    with suppress(StoreError):  # whoever goes on is told
        there = os.path.lexists(os.path.join(folder, _folder.MANIFEST))
        return there and not _folder.list_roots(folder)
    return False


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
        state = Checkpoint(folder, _root=root).load(**keywords)
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
