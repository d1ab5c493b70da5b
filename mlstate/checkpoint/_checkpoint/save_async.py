"""`save_async` and `SaveHandle`: see `SaveJob`, which saves in a thread; its times."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from ... import _core
from ..._common.budget import MemorySize, parse_budget
from ..._common.set_module import set_module
from .._options import SAVE_DEFAULTS, SaveOptions, complete_save_options, show_options
from .._save.content import take_content
from .._save.job import SaveJob, add_wait, devices_of, refuse_default_group
from .._save.staging import Staging, staging_of
from .._save.target import check_target
from .checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Unpack


@set_module("mlstate.checkpoint.records")
class SaveTimes(NamedTuple):
    """Times of an asynchronous save; see `SaveHandle.times`.

    Times are in seconds, from `time.perf_counter`.

    Attributes
    ----------
    began : float
        When `save_async` was called.
    staged : float or None
        When the save was staged; None if it is not yet.
    ended : float or None
        When the checkpoint was on disk, or the save failed; None if it has not ended.
    waits : list of (float, float)
        Begin and end of each interval that blocked the caller, in order: by `save_async`
        itself, by `staged`, `wait` or `cancel`, or by the manager's next save. Intervals less
        than a millisecond apart are merged.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import save_async
    >>> handle = save_async(tempfile.mkdtemp() + "/ckpt", {"w": np.zeros(3)})
    >>> _ = handle.wait()
    >>> times = handle.times()
    >>> times.began <= times.staged <= times.ended
    True
    >>> 0 < times.blocked_seconds
    True
    """

    began: float
    staged: float | None
    ended: float | None
    waits: list[tuple[float, float]]

    @property
    def blocked_seconds(self) -> float:
        """Total time that the caller was blocked."""
        return sum(end - start for start, end in self.waits)


@set_module("mlstate.checkpoint")
class SaveHandle:
    """A running save, returned by `save_async` or `export_huggingface_async`.

    Notes
    -----
    The first call after a failure raises its error: `staged`, `wait` or the manager's next
    save. If none of them is called, the error is printed when the handle is garbage-collected
    or the interpreter exits. Any thread may call the methods. In a forked child they raise
    `RuntimeError`; the save belongs to the parent and is not disturbed by the fork.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import save_async
    >>> state = {"w": np.zeros(3)}
    >>> handle = save_async(tempfile.mkdtemp() + "/ckpt", state)
    >>> handle.staged()
    >>> state["w"] += 1  # the save holds the zeros
    >>> handle.wait().load().model["w"]
    array([0., 0., 0.])
    >>> handle.done(), handle.progress()
    (True, (24, 24))
    """

    def __init__(self, job: object) -> None:
        """Wrap a running save; its unseen error is printed when the handle is collected."""
        import weakref

        if not isinstance(job, SaveJob):
            raise TypeError("a SaveHandle cannot be constructed: call save_async")
        self._job = job
        self._saved: Checkpoint | None = None
        job.watch = weakref.finalize(self, job.abandon)

    def staged(self, timeout: float | None = None) -> None:
        """Wait until the state may change.

        Parameters
        ----------
        timeout : float, optional
            Seconds. Default: no limit.

        Raises
        ------
        TimeoutError
            The save is not staged yet; it continues.
        StoreError, CollectiveError, ...
            The save failed, with an error of `save`. The state may change.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import save_async
        >>> handle = save_async(tempfile.mkdtemp() + "/ckpt", {"w": np.zeros(3)})
        >>> handle.staged(timeout=60)
        """
        self._job.wait_for("staged", timeout)

    def wait(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is on disk, and return it.

        Ctrl-C interrupts the wait, not the save.

        Parameters
        ----------
        timeout : float, optional
            Seconds. Default: no limit.

        Returns
        -------
        Checkpoint
            The checkpoint, as `save` returns it, or the exported folder, as `inspect` returns
            it; the same object for every call.

        Raises
        ------
        TimeoutError
            The save has not ended yet; it continues.
        StoreError, CollectiveError, ...
            The save failed, with an error of `save`; the old checkpoint is unchanged. A
            `StoreError` with ``errno.ECANCELED`` means that the save was cancelled.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import save_async
        >>> handle = save_async(tempfile.mkdtemp() + "/ckpt", {"w": np.zeros(3)}, step=7)
        >>> handle.wait().step
        7
        """
        self._job.wait_for("ended", timeout)
        with self._job.guard:
            if self._saved is None:
                assert self._job.result is not None
                self._saved = Checkpoint(self._job.result)
            return self._saved

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not; `wait` returns or raises.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import save_async
        >>> handle = save_async(tempfile.mkdtemp() + "/ckpt", {"w": np.zeros(3)})
        >>> _ = handle.wait()
        >>> handle.done()
        True
        """
        self._job.belongs_here()
        return self._job.ended

    def progress(self) -> tuple[int, int]:
        """Return the bytes done, written or found unchanged, and the total number of bytes.

        The bytes are those in this rank's shards, updated every 50 milliseconds. The total is 0
        until it is known: ranks that save together first agree on who stores what.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import save_async
        >>> handle = save_async(tempfile.mkdtemp() + "/ckpt", {"w": np.zeros(3)})
        >>> _ = handle.wait()
        >>> handle.progress()
        (24, 24)
        """
        self._job.belongs_here()
        return self._job.bytes_done, self._job.bytes_total

    def cancel(self, timeout: float | None = None) -> bool:
        """Cancel the save, and wait until it has ended.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait. Default: no limit; cancelling takes about 50 milliseconds plus the
            time of a disk write.

        Returns
        -------
        bool
            True: the save was cancelled or failed; the old content of the folder is unchanged,
            and `wait` raises. False: the new checkpoint had already been committed.

        Raises
        ------
        TimeoutError
            The save has not ended yet; it will end.

        Notes
        -----
        If one of several ranks cancels, the save fails on all of them.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import save_async
        >>> handle = save_async(tempfile.mkdtemp() + "/ckpt", {"w": np.zeros(3)})
        >>> _ = handle.wait()
        >>> handle.cancel()
        False
        """
        job = self._job
        job.belongs_here()
        job.cancelled = True
        if not job.reached("ended", timeout):
            raise TimeoutError(f"the save of {job.path} has not ended after {timeout} seconds")
        with job.guard:
            if getattr(job.error, "errno", None) == errno.ECANCELED:
                job.suppress_report()
        job.join()
        return job.error is not None

    def _settle(self) -> None:
        """Wait until the save has ended; raise its error unless the user has seen it.

        Do nothing in a forked child, which has no such save.
        """
        job = self._job
        if job.pid != os.getpid():
            return
        job.reached("ended")
        if not job.asked:
            job.wait_for("ended", None)

    def times(self) -> SaveTimes:
        """Return when the save began, was staged and ended, and when it blocked the caller.

        Returns
        -------
        SaveTimes
            `mlstate.plot.plot_saves` draws it.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import save_async
        >>> handle = save_async(tempfile.mkdtemp() + "/ckpt", {"w": np.zeros(3)})
        >>> _ = handle.wait()
        >>> len(handle.times().waits) >= 1
        True
        """
        self._job.belongs_here()
        with self._job.guard:
            return self._times()

    def _times(self) -> SaveTimes:
        job = self._job
        return SaveTimes(job.began, job.staged_at, job.ended_at, list(job.waits))

    def _state(self) -> str:
        """Return the phase of the save as a word, for the text and the HTML page."""
        job = self._job
        if job.ended:
            return "saved" if job.error is None else "failed"
        return "writing" if job.staged else "staging"

    def __repr__(self) -> str:
        job, state = self._job, self._state()
        if not job.ended:
            state += f", {job.bytes_done:,} of {job.bytes_total:,} bytes"
        elif job.error is not None:
            state += f": {job.error}"
        return f"<SaveHandle of {job.path!r}: {state}>"

    def _repr_html_(self) -> str:
        from .._pages.html import save_html

        job = self._job
        done = job.bytes_done, job.bytes_total
        now = time.perf_counter()
        return save_html(job.path, self._state(), done, self._times(), now, job.error)


def start_job(job: SaveJob, devices: list[object], *, until_staged: bool = False) -> SaveHandle:
    """Start a job, and return its handle; with `until_staged`, after the state may change.

    `devices`: that hold tensors of the state. Raises ValueError if another save uses the group or
    the staging memory; without group and devices, also errors about the arrays. After an error the
    job does not run, or it is waited for (`give_up`).
    """
    if job.target.group is None and not devices:
        job.gather()  # raises errors about the arrays here instead of in the thread
    with _core.deferred_interrupts() as section:
        try:
            job.reserve(devices)
            handle = SaveHandle(job)
            if job.target.request.started is not None:
                job.target.request.started(handle)
            if not job.start():
                with section.allowed():
                    job.run()
            if until_staged:
                with section.allowed():
                    job.reached("staged")
            now = time.perf_counter()
            with job.guard:
                add_wait(job.waits, job.began, now)
            return handle
        except BaseException:
            job.give_up()
            if job.thread is not None and job.target.group is None:  # no other rank is needed
                with section.allowed():
                    job.reached("ended")
                    job.join()
            raise


@set_module("mlstate.checkpoint")
@show_options(SAVE_DEFAULTS)
def save_async(
    path: str | os.PathLike[str],
    model: object = None,
    optimizer: object = None,
    *,
    max_staging_bytes: MemorySize | None = None,
    staging: Staging | None = None,
    step: int | None = None,
    overwrite: bool | None = None,
    storage_options: Mapping[str, object] | None = None,
    **options: Unpack[SaveOptions],
) -> SaveHandle:
    """
    Start a save, and return while the checkpoint is written.

    The state must not change before the handle's `staged` returns. By then every array was
    copied or written; the copies are written while training continues. When the handle's
    `wait` returns, the new checkpoint is on disk. Until then the old one stays in place.

    Parameters
    ----------
    path, model, optimizer, metadata, step, layout, overwrite
        As for `save`. Tensors on a device are always copied.
    pack_below_bytes, sparse, incremental, compress, digest
        As for `save`.
    states : mapping of str to object, optional
        As for `save`. ``state_dict()`` is called, and values other than arrays are copied, before
        `save_async` returns.
    max_staging_bytes : int or str, optional
        Limit for the save's memory, in bytes or as a size such as ``"6GiB"``. It includes 2 MiB
        for each writer thread and about 500 bytes per shard; 0: no copies. Shards that do not
        fit are written from the caller's memory before `staged` returns. Default: copies of the
        whole state, plus the writer's memory.
    staging : Staging, optional
        Preallocated memory for the copies. Default: allocated by this call and freed at the
        end.
    group : ProcessGroup, optional
        As for `save`. Use the group for nothing else until the save has ended, because a thread
        sends messages through it. `staged` waits until the slowest rank has started.
    progress, lock_timeout, storage_options
        As for `save`; `progress` is called in the save's thread.

    Returns
    -------
    SaveHandle
        Use `SaveHandle.staged` and `SaveHandle.wait`.

    Raises
    ------
    TypeError, ValueError, CompatibilityError, BufferError
        As for `save`, about the arguments; the handle raises later errors. Also ValueError if
        another save uses `group` or `staging`, if `group` is torch's default group, or if
        tensors on a device do not fit `max_staging_bytes`.
    StoreError
        The folder is of another program, or holds the steps of a `CheckpointManager` (EEXIST). The
        handle raises it for a checkpoint of other tensors.

    Notes
    -----
    Extra memory: `max_staging_bytes`; by default the size of the state, plus at most 16 MiB for
    the writer and about 400 bytes per shard. If `max_staging_bytes` barely covers the writer
    (below about 7 MiB), a quarter of it is still used for copies. References to arrays are
    dropped when the save is staged, so memory of arrays that training replaces is freed.
    `get_num_threads` threads make the copies without the GIL; the writer has up to four
    more threads.

    The interpreter waits for the save's thread at exit. If the save fails and neither `staged`
    nor `wait` is called, the exception is printed. A forked child cannot use the handle, and
    does not disturb the save. Staging in memory and writing during training follows CheckFreq
    (Mohan et al., FAST 2021).

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import Staging, save_async
    >>> state = {"w": np.zeros((1000, 8), np.float32)}  # 32,000 bytes
    >>> memory = Staging(32_000)
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> for step in range(3):
    ...     handle = save_async(path, state, step=step, staging=memory)
    ...     handle.staged()
    ...     state["w"] += 1  # while it is written
    ...     checkpoint = handle.wait()
    >>> checkpoint.step, checkpoint.load().model["w"][0, 0].item()
    (2, 2.0)
    """
    began = time.perf_counter()
    memory = staging_of(staging)
    options = complete_save_options(save_async, options)
    progress = options["progress"]
    budget = None
    if max_staging_bytes is not None:
        budget = parse_budget("max_staging_bytes", max_staging_bytes)
        if budget.nbytes < 0:
            raise ValueError(f"max_staging_bytes must be 0 or more, got {max_staging_bytes}")
    target = check_target(path, options, storage_options, overwrite)
    refuse_default_group(target.group)
    content = take_content(target, model, optimizer, step, options, in_thread=True)
    job = SaveJob(target, content, memory, budget, progress, began)
    return start_job(job, devices_of(content))
