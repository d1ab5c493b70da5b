"""`save_async`, `SaveHandle`: thread, copies within a budget, waits, cancel, errors, times.

    save_async -> check_target, take_content   see content.py
               -> SaveJob.work, in a thread
                    -> gather_shards     this rank's shards (ranks exchange names)
                    -> shards_stage      copies, within the budget: small shards first
                    -> write_and_commit  see commit.py

Shards that were not copied are written first, from the caller's memory. The job is *staged* when
nothing reads the caller's memory any more: then the state may change, and references to it are
dropped. The thread is not a daemon: the interpreter waits for it at exit.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _core
from ..._common.budget import parse_budget
from ..._common.store_error import store_error
from ..._common.waiting import Waiters, start_thread
from ..._sharding.layout import Shard
from ...errors import StoreError
from .._checkpoint.checkpoint import Checkpoint
from .._options import SAVE_DEFAULTS, complete_save_options, show_options
from .commit import write_and_commit
from .content import check_target, gather_shards, is_on_device, take_content
from .staging import staging_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Unpack

    from ..._common.budget import Budget, MemorySize
    from ...collectives import ProcessGroup
    from .._options import SaveOptions
    from .._store.open_path import RootPath
    from .content import GatheredShards, SaveContent, SaveTarget
    from .staging import Staging

_APART = 1e-3  # seconds: waits with a smaller gap are merged
_groups: dict[int, SaveJob] = {}  # running saves of several ranks, by the id of their group


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


def add_wait(waits: list[tuple[float, float]], start: float, end: float) -> None:
    """Add the wait that ended last, merged with earlier ones that overlap or nearly touch it."""
    while waits and waits[-1][1] > start - _APART:
        start = min(start, waits.pop()[0])
    waits.append((start, end))


class SaveJob:
    """A running save: the state shared by its thread and its handle.

    A subclass replaces `collect` and `commit` to write another format.
    """

    def __init__(
        self,
        target: SaveTarget,
        content: SaveContent,
        staging: Staging,
        budget: Budget | None,
        progress: Callable[[int], object] | None,
        began: float,
    ) -> None:
        """Keep all that a save in the background and its handle share; the thread starts later.

        `budget`: limit of the staging memory or None. `progress`: the caller's callback, called
        with bytes. `began`: `perf_counter` at the call of `save_async`.
        """
        import threading

        self.began = began
        self.staged_at: float | None = None
        self.ended_at: float | None = None
        self.waits: list[tuple[float, float]] = []  # begins and ends of the caller's waits
        self.target = target
        self.content = content
        self.gathered: GatheredShards | None = None  # refers to the staging memory
        self.path = target.path
        self.staging = staging
        self.budget = budget
        self.callback = progress
        self.pid = os.getpid()
        self.thread: Any = None
        self.watch: Any = None  # calls `abandon` when the handle is garbage-collected
        self.ready: list[Any] = []  # device events; after them the tensors have their values
        # Guards the fields below. It is reentrant because a handle can be collected at any
        # moment in any thread. RLock is implemented in C, so an interrupt cannot split `with`;
        # it can split the methods of a Condition, which then stays locked.
        self.guard = threading.RLock()
        self.waiters = Waiters()
        self.starting = threading.Lock()  # held by the call that starts the job
        self.starter = threading.get_ident()  # the thread of that call
        self.started = self.begun = self.staged = self.ended = False
        # `asked`: an error needs no report, as a call raised it; `abandoned`: the handle is gone
        self.cancelled = self.asked = self.abandoned = False
        self.bytes_done = 0
        self.bytes_total = 0
        self.result: RootPath | None = None
        self.error: BaseException | None = None

    # -- start

    def start(self) -> None:
        """Start the save in a thread; if the system has no thread left, run it in this one."""
        import threading

        name = f"mlstate save {os.path.basename(self.path)}"
        self.thread = threading.Thread(target=self.run, name=name, daemon=False)
        try:
            start_thread(self.thread)
        except RuntimeError:
            self.run()

    def give_up(self) -> None:
        """Stop a save whose handle did not reach the caller, for example after an interrupt.

        A save that runs in its thread without a group is waited for; one with a group continues.
        """
        self.cancelled = self.asked = True
        with self.guard:
            if not self.ended and (not self.begun or self.thread.ident is None):
                self.end(None, self.cancellation())
        if self.thread is not None and self.target.group is None:  # no other rank is needed
            self.reached("ended")
            self.join()

    def end_if_lost(self) -> None:
        """End a save that will never run, as interrupts stopped its start and its `give_up`."""
        if not self.starting.locked() and not self.started and self.pid == os.getpid():
            self.give_up()

    # -- this rank's shards

    def gather(self, copy: Callable[[Any], Any] | None = None) -> GatheredShards:
        """Return this rank's shards, gathered at the first call; `copy` is as for `collect`."""
        if self.gathered is None:
            self.gathered = self.collect(copy)
            self.bytes_total = self.gathered.nbytes
        return self.gathered

    def collect(self, copy: Callable[[object], object] | None) -> GatheredShards:
        """Return this rank's shards; every rank calls it, even after a failure.

        `copy`: copies tensors on a device; None: to new memory.
        """
        return gather_shards(self.target, self.content, copy)

    def fail(self, error: BaseException) -> None:
        """Raise the error if this process saves alone; otherwise report it to the other ranks."""
        if self.target.group is None:
            raise error
        if self.gathered is None:
            self.content.error = error
        else:
            self.gathered.fail(error)

    # -- in the thread

    def run(self) -> None:
        """Run the whole save; do nothing if it has begun already."""
        with self.guard:
            if self.begun:
                return
            self.begun = True
        result: RootPath | None = None
        failed: BaseException | None = None
        try:
            result = self.work()
        except BaseException as error:
            failed = error
            failed.__traceback__ = None  # its frames refer to arrays, and to this job
        finally:
            self.end(result, failed)

    def end(self, result: RootPath | None, error: BaseException | None) -> None:
        """Record result or error, release all references and memory, and wake waiting threads.

        Called where the save ran, or by `give_up` if it never began; an interrupted call is
        repeated. An error is printed here if the handle is gone and no call has raised it.
        """
        if _groups.get(id(self.target.group)) is self:
            del _groups[id(self.target.group)]
        self.gathered = None  # before the staging memory is released to another save
        self.staging._end(self)
        with self.guard:
            self.result, self.error = result, error
            self.bytes_done = self.bytes_total if error is None else self.bytes_done
            self.ended_at = time.perf_counter()
            self.staged_at = self.staged_at or self.ended_at
            self.begun = self.staged = self.ended = True
            must_report = error is not None and self.abandoned and not self.asked
        self.waiters.wake()
        if must_report:
            self.report()

    def work(self) -> RootPath:
        """Stage, write and commit the save; return the saved root.

        It runs in the save's thread. With a group, an error of staging is kept for `commit`,
        because other ranks wait.
        """
        freed: Callable[[], object] | None = None  # set if some arrays are not copied
        copies = _Copies(self)
        try:
            self.check_cancelled()
        except StoreError as error:
            self.fail(error)
        gathered = self.gather(copies.take)
        try:
            if gathered.error is None:
                if self.stage(gathered, copies):
                    freed = self.set_staged
                else:
                    self.set_staged()
        except BaseException as error:
            self.fail(error)
        return self.commit(gathered, freed)

    def commit(self, gathered: GatheredShards, freed: Callable[[], object] | None) -> RootPath:
        """Write and commit `gathered`; every rank calls it; return the saved root.

        `freed`: called when the caller's arrays may change; None: they may already.
        """
        return write_and_commit(self.target, gathered, self.advance, freed)

    def memory(self, nbytes: int, overhead: int = 0) -> Any:
        """Return staging memory of `nbytes` bytes, or of fewer if the budget is smaller.

        `overhead`: bytes of the budget that the writer needs.
        """
        if self.budget is not None:
            most = self.budget.nbytes
            # even if the budget barely covers the writer, a quarter of it is used for copies
            nbytes = min(nbytes, max(most - overhead, most // 4))
        return self.staging._take(nbytes)

    def stage(self, gathered: GatheredShards, copies: _Copies) -> bool:
        """Copy the shards that fit the staging memory; return whether any did not fit.

        The rest is written from the caller's arrays, which must not change until then. `copies`:
        the copies of device tensors, at the beginning of the memory.
        """
        memory = copies.memory
        if memory is None:
            compresses = self.target.write_options.compress is not None
            overhead = _core.shards_overhead(gathered.shards, compresses)
            memory = self.memory(gathered.nbytes, overhead)
        _, lent = _core.shards_stage(gathered.shards, memory, copies.used)
        return lent > 0

    def set_staged(self) -> None:
        """Mark the job as staged: the state may change."""
        self.staged_at = time.perf_counter()
        self.staged = True
        self.waiters.wake()

    def cancellation(self) -> StoreError:
        """Return the error of a cancelled save."""
        reason = OSError(errno.ECANCELED, "the save was cancelled")
        return store_error(reason, "not saved", self.path)

    def check_cancelled(self) -> None:
        """Raise if the save was cancelled."""
        if self.cancelled:
            raise self.cancellation()

    def advance(self, count: int) -> None:
        """Count processed bytes and call the caller's progress; the core calls this.

        Raises if the save was cancelled, which ends it.
        """
        self.bytes_done = min(self.bytes_done + count, self.bytes_total)
        self.check_cancelled()
        if self.callback is not None:
            self.callback(count)
            self.check_cancelled()

    # -- waiting

    def belongs_here(self) -> None:
        """Raise RuntimeError in a forked child, where the save's threads do not exist."""
        if self.pid != os.getpid():
            raise RuntimeError(
                f"the save of {self.path} belongs to process {self.pid}, which started it; this "
                "process is a fork"
            )

    def refuse_own_thread(self) -> None:
        """Raise RuntimeError in the thread of this save: it would wait for itself."""
        import threading

        if threading.current_thread() is self.thread and not self.ended:
            raise RuntimeError(f"the save of {self.path} cannot wait for itself, in its progress=")

    def reached(self, event: str, timeout: float | None = None) -> bool:
        """Wait until the save is "staged" or "ended"; return False after the timeout.

        The wait is recorded for the report of times. Raises RuntimeError in the save's own thread.
        """
        if getattr(self, event):
            return True
        self.refuse_own_thread()
        start = time.perf_counter()
        try:
            return self.waiters.wait_for(lambda: getattr(self, event), timeout)
        finally:
            now = time.perf_counter()
            with self.guard:
                add_wait(self.waits, start, now)

    def wait_for(self, event: str, timeout: float | None) -> None:
        """Wait until the job is "staged" or "ended"; raise its error if it failed.

        Raises TimeoutError after `timeout` seconds (None: no limit), and RuntimeError in a fork.
        """
        self.belongs_here()
        if not self.reached(event, timeout):
            raise TimeoutError(f"the save of {self.path} is not {event} after {timeout} seconds")
        with self.guard:
            if self.error is not None:
                self.suppress_report()
                raise self.error.with_traceback(None)
        if self.ended:
            self.join()

    def suppress_report(self) -> None:
        """Mark the error as delivered, so that it is not printed.

        The error's traceback will refer to the handle, so the watch must not keep it alive.
        """
        self.asked = True
        self.watch.detach()

    def join(self) -> None:
        """Wait until the thread has finished."""
        import threading

        if self.thread.ident is not None and self.thread is not threading.current_thread():
            self.thread.join()

    def abandon(self) -> None:
        """Print an error that no call has raised, when the handle is collected or Python exits.

        If the save still runs, `end` prints it. Nothing is printed in a forked child.
        """
        if self.pid != os.getpid():
            return
        with self.guard:
            self.abandoned = True
            must_report = self.ended and self.error is not None and not self.asked
        if must_report:
            self.report()

    def report(self) -> None:
        """Print the save's error as an error of its thread, because no call raised it."""
        import threading

        error = self.error
        assert error is not None
        error.add_note(f"The asynchronous save of {self.path} failed, and wait() was not called.")
        threading.excepthook(threading.ExceptHookArgs((type(error), error, None, self.thread)))


class _Copies:
    """Copies of tensors on devices, at the beginning of the staging memory."""

    def __init__(self, job: SaveJob) -> None:
        self._job = job
        self.memory: Any = None  # bytes, a NumPy array; None before the first copy
        self.used = 0  # bytes at its beginning that have copies

    def take(self, tensor: Any) -> Any:
        """Return a copy of a device tensor in staging memory; raise ValueError if it does not fit.

        The first call waits until the device has computed all tensors.
        """
        import torch

        if self.memory is None:
            for event in self._job.ready:
                event.synchronize()
            # an upper bound: ranks that share arrays store only some of them
            states = [state for state in self._job.content.dicts if state is not None]
            sizes = (_bytes_of(value) for state in states for value in state.values())
            self.memory = self._job.memory(sum(sizes))
        end = self.used + tensor.nbytes
        if end > self.memory.nbytes:
            budget, allowed = self._job.budget, self.memory.nbytes
            text = budget.text(allowed) if budget else f"{allowed} bytes"
            raise ValueError(
                "all tensors on a device must be staged, and they need more than the "
                f"{text} that max_staging_bytes= or staging= allow"
            )
        # copy as bytes: any dtype and alignment; the core accepts the view
        flat = torch.from_numpy(self.memory[self.used : end])
        self.used = end
        flat.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        return flat.view(tensor.dtype).reshape(tensor.shape)


def _bytes_of(value: object) -> int:
    """Return the bytes of an array, tensor or `Shard`; 0 for other values."""
    nbytes = getattr(value, "nbytes", None)
    return nbytes if isinstance(nbytes, int) else 0


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

        Do nothing in a forked child, which has no such save. Raises RuntimeError in a signal
        handler, or `progress`, that the start of the save calls.
        """
        import threading

        job = self._job
        if job.pid != os.getpid():
            return
        if job.starting.locked() and job.starter == threading.get_ident() and not job.started:
            raise RuntimeError(f"the save of {job.path} cannot wait for itself, while it starts")
        job.end_if_lost()
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
        from .._html import save_html

        job = self._job
        done = job.bytes_done, job.bytes_total
        now = time.perf_counter()
        return save_html(job.path, self._state(), done, self._times(), now, job.error)


# ---- start of a save ----


def _reserve_group(job: SaveJob) -> None:
    """Reserve the group for this save: messages of two saves would mix."""
    group = job.target.group
    if group is None:
        return
    _groups.get(id(group), job).end_if_lost()
    if _groups.setdefault(id(group), job) is not job:
        raise ValueError("another save uses this group: wait for it, or pass a separate group")


def refuse_default_group(group: ProcessGroup | None) -> None:
    """Raise ValueError for torch's default group, because training uses it during the save."""
    if group is not None and getattr(group, "is_default", False):
        raise ValueError(
            "this is torch's default group, which training uses during the save: pass a separate "
            "group, TorchGroup(torch.distributed.new_group("
            "backend='gloo'))"
        )


def devices_of(content: SaveContent) -> list[Any]:
    """Return the devices of the state's tensors, except the CPU, each once."""
    values = [v for state in content.dicts if state is not None for v in state.values()]
    arrays = (v.array if isinstance(v, Shard) else v for v in values if is_on_device(v))
    return list(dict.fromkeys(array.device for array in arrays))


def _event(device: Any) -> Any:
    """Return an event that fires when the device has done all work queued so far.

    None if torch has no streams for this kind of device, so that it has no events.
    """
    module = getattr(sys.modules["torch"], device.type, None)
    if module is None or not hasattr(module, "current_stream"):
        return None
    return module.current_stream(device).record_event()


def start_job(job: SaveJob, devices: list[object], *, until_staged: bool = False) -> SaveHandle:
    """Start a job, and return its handle; with `until_staged`, after the state may change.

    `devices`: that hold tensors of the state. Raises ValueError if another save uses the group or
    the staging memory; without group and devices, also errors about the arrays. After an error the
    job does not run, or it is waited for (`give_up`).
    """
    if job.target.group is None and not devices:
        job.gather()  # raises errors about the arrays here instead of in the thread
    with job.starting:
        try:
            _reserve_group(job)
            job.staging._begin(job)
            job.ready = [event for event in map(_event, devices) if event is not None]
            handle = SaveHandle(job)
            if job.target.started is not None:
                job.target.started(handle)
            job.start()
            job.started = True
            if until_staged:
                job.reached("staged")
            now = time.perf_counter()
            with job.guard:
                add_wait(job.waits, job.began, now)
            return handle
        except BaseException:
            job.give_up()
            raise


@show_options(SAVE_DEFAULTS)
def save_async(
    path: str | os.PathLike[str],
    model: object = None,
    optimizer: object = None,
    *,
    max_staging_bytes: MemorySize | None = None,
    staging: Staging | None = None,
    step: int | None = None,
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
    path, model, optimizer, metadata, step, layout, pack_below_bytes, sparse, incremental, compress
        As for `save`. Tensors on a device are always copied.
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
        The folder holds the steps of a `CheckpointManager` (EEXIST).

    Notes
    -----
    Extra memory: `max_staging_bytes`; by default the size of the state, plus at most 16 MiB for
    the writer and about 400 bytes per shard. If `max_staging_bytes` barely covers the writer
    (below about 7 MiB), a quarter of it is still used for copies. References to arrays are
    dropped when the save is staged, so memory of arrays that training replaces is freed.
    `mlstate.get_num_threads` threads make the copies without the GIL; the writer has up to four
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
    target = check_target(path, options, storage_options)
    refuse_default_group(target.group)
    content = take_content(target, model, optimizer, step, options, in_thread=True)
    job = SaveJob(target, content, memory, budget, progress, began)
    return start_job(job, devices_of(content))
