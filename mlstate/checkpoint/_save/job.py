"""`SaveJob`, a save in a thread: copies within a budget, waits, cancelling, errors, times.

    SaveJob.work, in the thread
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
from typing import TYPE_CHECKING, Any

from ... import _core
from ..._common.store_error import store_error
from ..._common.waiting import Waiters, join_thread, start_thread
from ..._sharding.layout import Shard
from ...errors import StoreError
from .commit import write_and_commit
from .shards import GatheredShards, gather_shards, is_on_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..._common.budget import Budget
    from ..._common.callback import Progress
    from ...collectives import ProcessGroup
    from .content import SaveContent
    from .staging import Staging
    from .target import SaveTarget

_APART = 1e-3  # seconds: waits with a smaller gap are merged
_groups: dict[int, SaveJob] = {}  # running saves of several ranks, by the id of their group


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
        progress: Progress,
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
        # guards the fields below; reentrant, because a handle can be collected at any moment
        self.guard = threading.RLock()
        self.waiters = Waiters()
        self.runner = 0  # identifier of the thread that runs it
        self.begun = self.staged = self.ended = False
        # `asked`: an error needs no report, as a call raised it; `abandoned`: the handle is gone
        self.cancelled = self.asked = self.abandoned = False
        self.bytes_done = 0
        self.bytes_total = 0
        self.result: os.PathLike[str] | None = None
        self.error: BaseException | None = None

    # -- start

    def start(self) -> bool:
        """Start the save in a thread; return False if the system has no thread left."""
        import threading

        name = f"mlstate save {os.path.basename(self.path)}"
        self.thread = threading.Thread(target=self.run, name=name, daemon=False)
        try:
            start_thread(self.thread)
        except RuntimeError:
            return False
        return True

    def reserve(self, devices: list[object]) -> None:
        """Reserve group and staging memory, and note what the `devices` of the state compute now.

        Raises ValueError if another save uses the group or the memory.
        """
        _reserve_group(self)
        self.staging._begin(self)
        self.ready = [event for event in map(_event, devices) if event is not None]

    def give_up(self) -> None:
        """Cancel a save whose handle does not reach the caller; end it if it has not begun."""
        self.cancelled = self.asked = True
        with self.guard:
            if not self.begun:
                self.end(None, self.cancellation())

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
        import threading

        with _core.deferred_interrupts() as section:
            with self.guard:
                if self.begun:
                    return
                self.begun, self.runner = True, threading.get_ident()
            result: os.PathLike[str] | None = None
            failed: BaseException | None = None
            try:
                with section.allowed():
                    result = self.work()
            except BaseException as error:
                failed = error
                failed.__traceback__ = None  # its frames refer to arrays, and to this job
            self.end(result, failed)

    def end(self, result: os.PathLike[str] | None, error: BaseException | None) -> None:
        """Record result or error, release all references and memory, and wake waiting threads.

        Called where the save ran, or by `give_up` if it never began. An error is printed here if
        the handle is gone and no call has raised it.
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

    def work(self) -> os.PathLike[str]:
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

    def commit(
        self, gathered: GatheredShards, freed: Callable[[], object] | None
    ) -> os.PathLike[str]:
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

        if threading.get_ident() == self.runner and not self.ended:
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
            join_thread(self.thread)

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


# ---- start of a save ----


def _reserve_group(job: SaveJob) -> None:
    """Reserve the group for this save: messages of two saves would mix."""
    group = job.target.group
    if group is None:
        return
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
