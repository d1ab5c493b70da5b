"""Saving while the state changes; public through `mlstate.checkpoint`.

    save_async -> Save.prepare           here: what is to be saved, and whether it can be
               -> _Job.work, in a thread
                    -> Save.gather       which shards are this rank's (ranks exchange names)
                    -> shards_stage      copies, within the budget: small shards first
                    -> Save.run          lock, write, commit

Whatever was not copied is written first, from where it lies. When none of it is read any more
the job is *staged*: the state is the caller's again, and references to it are dropped. The
thread is none of Python's daemons: the interpreter waits for it when it ends.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from . import _core, _folder
from ._layout import Shard
from ._save import Save, is_on_device
from ._save_times import SaveTimes, add_wait
from ._staging import OwnStaging, Staging
from .errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._checkpoint import Checkpoint
    from .collectives import ProcessGroup

_groups: set[int] = set()  # ids of the groups that saves under way use


class _Job:
    """A save under way: what its thread and its handle share."""

    def __init__(
        self,
        save: Save,
        staging: Staging,
        most: int | None,
        progress: Callable[[int], object] | None,
        began: float,
    ) -> None:
        import threading

        self.began = began
        self.staged_at: float | None = None
        self.ended_at: float | None = None
        self.waits: list[tuple[float, float]] = []  # see SaveTimes
        self.save = save
        self.path = save.path
        self.staging = staging
        self.most = most
        self.callback = progress
        self.pid = os.getpid()
        self.thread: Any = None
        self.watch: Any = None  # calls `abandon` when nobody has the handle any more
        self.ready: list[Any] = []  # events of devices: then their tensors are what was meant
        # round all below, and told of every change; may be taken again by the same thread,
        # since a handle can be collected at any moment
        self.changed = threading.Condition()
        self.begun = self.staged = self.ended = False
        self.cancelled = self.asked = self.abandoned = False
        self.bytes_done = 0
        self.bytes_total = save.nbytes
        self.result: Checkpoint | None = None
        self.error: BaseException | None = None

    # -- in the thread

    def start(self) -> None:
        """Begin in a thread; where the system gives none, here and now."""
        import threading

        name = f"mlstate save {os.path.basename(self.path)}"
        self.thread = threading.Thread(target=self.run, name=name, daemon=False)
        try:
            self.thread.start()
        except (RuntimeError, MemoryError):
            self.run()

    def run(self) -> None:
        """All of it, once."""
        with self.changed:
            if self.begun:
                return
            self.begun = True
        result: Checkpoint | None = None
        failed: BaseException | None = None
        try:
            result = self.work()
        except BaseException as error:
            failed = error
            failed.__traceback__ = None  # its frames hold arrays, and lead back here
        finally:
            self.end(result, failed)

    def end(self, result: Checkpoint | None, error: BaseException | None) -> None:
        """Let go of everything, and tell whoever waits."""
        _groups.discard(id(self.save.group))
        self.save.gathered = None  # it has the staging memory
        self.staging._end()
        with self.changed:
            self.result, self.error = result, error
            self.bytes_done = self.bytes_total if error is None else self.bytes_done
            self.ended_at = time.perf_counter()
            self.staged_at = self.staged_at or self.ended_at
            self.staged = self.ended = True
            report = error is not None and self.abandoned and not self.asked
            self.changed.notify_all()
        if report:
            self.report()

    def work(self) -> Checkpoint:
        """Stage, write, commit."""
        save = self.save
        freed: Callable[[], object] | None = None
        try:
            self.check()
            copies = _Copies(self)
            if save.gathered is None:
                save.gather(copies.take)
                self.bytes_total = save.nbytes
            if save.gathered is not None:  # else it failed, as other ranks are told below
                if self.stage(copies):
                    freed = self.set_staged
                else:
                    self.set_staged()
        except CollectiveError:
            raise
        except BaseException as error:
            save.fail(error)
        return save.run(self.advance, freed)

    def memory(self, wanted: int, besides: int = 0) -> Any:
        """Memory of so many bytes, or of what the budget allows, and what is needed `besides`."""
        if self.most is not None:
            # a budget that is too small for the writer is not spent on it alone
            wanted = min(wanted, max(self.most - besides, self.most // 4))
        return self.staging._take(wanted)

    def stage(self, copies: _Copies) -> bool:
        """Copy what fits, behind the copies that are there; whether anything did not fit."""
        memory = copies.memory
        if memory is None:
            besides = _core.shards_besides(self.save.gathered, self.save.how[3] is not None)
            memory = self.memory(self.save.nbytes, besides)
        _, lent = _core.shards_stage(self.save.gathered, memory, copies.used)
        return lent > 0

    def set_staged(self) -> None:
        """The state may be changed."""
        with self.changed:
            self.staged_at = time.perf_counter()
            self.staged = True
            self.changed.notify_all()

    def check(self) -> None:
        """Raise if the save was cancelled."""
        if self.cancelled:
            raise _folder.store_error(
                OSError(errno.ECANCELED, "the save was cancelled"), "not saved", self.path
            )

    def advance(self, count: int) -> None:
        """Called by the core now and then."""
        self.bytes_done = min(self.bytes_done + count, self.bytes_total)
        self.check()
        if self.callback is not None:
            self.callback(count)
            self.check()

    # -- for who waits

    def belongs_here(self) -> None:
        """Refuse a forked child, which has none of the threads."""
        if self.pid != os.getpid():
            raise RuntimeError(
                f"the save of {self.path} belongs to process {self.pid}, which began it; this "
                "is a fork of it"
            )

    def reached(self, what: str, timeout: float | None = None) -> bool:
        """Wait, with `changed` held, and note how long; whether it is so now."""
        if getattr(self, what):
            return True
        start = time.perf_counter()
        try:
            return bool(self.changed.wait_for(lambda: getattr(self, what), timeout))
        finally:
            add_wait(self.waits, start, time.perf_counter())

    def wait_for(self, what: str, timeout: float | None) -> None:
        """Wait until the job is "staged" or "ended", and raise what went wrong."""
        self.belongs_here()
        with self.changed:
            if not self.reached(what, timeout):
                raise TimeoutError(f"the save of {self.path} is not {what} after {timeout} seconds")
            if self.error is not None:
                self.tell_nobody()
                raise self.error.with_traceback(None)
        if self.ended:
            self.join()

    def tell_nobody(self) -> None:
        """Somebody knows the error.

        Its traceback will lead to the handle, which must not be what the watch keeps alive.
        """
        self.asked = True
        self.watch.detach()

    def join(self) -> None:
        """The thread has nothing to do any more: let it be gone, too."""
        import threading

        if self.thread.ident is not None and self.thread is not threading.current_thread():
            self.thread.join()

    def abandon(self) -> None:
        """Nobody can ask any more: the handle is gone, or the interpreter ends."""
        if self.pid != os.getpid():
            return
        with self.changed:
            self.abandoned = True
            report = self.ended and self.error is not None and not self.asked
        if report:
            self.report()

    def report(self) -> None:
        """Show an error that nobody asked for."""
        import threading

        error = self.error
        assert error is not None
        error.add_note(f"The asynchronous save of {self.path} failed, and nobody waited for it.")
        threading.excepthook(threading.ExceptHookArgs((type(error), error, None, self.thread)))


class _Copies:
    """Tensors on devices, copied to the beginning of the staging memory."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self.memory: Any = None
        self.used = 0

    def take(self, tensor: Any) -> Any:
        """A copy of a tensor; what does not fit the budget is refused."""
        import torch

        if self.memory is None:
            for event in self._job.ready:
                event.synchronize()
            # an upper bound: ranks that share arrays store only some of them
            states = [state for state in self._job.save.dicts if state is not None]
            sizes = (_bytes_of(value) for state in states for value in state.values())
            self.memory = self._job.memory(sum(sizes))
        end = self.used + tensor.nbytes
        if end > self.memory.nbytes:
            raise ValueError(
                "tensors on a device are staged, all of them: they need more than the "
                f"{self.memory.nbytes} bytes that max_staging_bytes= or staging= allow"
            )
        place = self.memory[self.used : end]
        self.used = end
        # any dtype at any address is a tensor of bytes; the core takes it as it is
        flat = torch.from_numpy(place)
        flat.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        return flat.view(tensor.dtype).reshape(tensor.shape)


def _bytes_of(value: Any) -> int:
    found = getattr(value, "nbytes", None)
    return found if isinstance(found, int) else 0


class SaveHandle:
    """A save under way; `save_async` returns it.

    Notes
    -----
    An error is raised by `staged`, `wait` or the manager's next save, whichever comes first
    after it. If none of them is called, it is shown when the handle is collected or the
    interpreter ends. Any thread may call the methods. In a forked child they raise
    `RuntimeError`: the save is the parent's, which the fork does not disturb.

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

    def __init__(self, job: _Job) -> None:
        import weakref

        if not isinstance(job, _Job):
            raise TypeError("a SaveHandle is made by save_async, not by calling it")
        self._job = job
        job.watch = weakref.finalize(self, job.abandon)

    def staged(self, timeout: float | None = None) -> None:
        """Wait until the state may be changed.

        Parameters
        ----------
        timeout : float, optional
            Seconds. Default: as long as it takes.

        Raises
        ------
        TimeoutError
            Not yet; the save goes on.
        StoreError, CollectiveError, ...
            The save failed, as `save` does. The state may be changed.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import save_async
        >>> handle = save_async(tempfile.mkdtemp() + "/ckpt", {"w": np.zeros(3)})
        >>> handle.staged(timeout=60)
        """
        self._job.wait_for("staged", timeout)

    def wait(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is on the disk, and return it.

        Ctrl-C ends the waiting and not the save.

        Parameters
        ----------
        timeout : float, optional
            Seconds. Default: as long as it takes.

        Returns
        -------
        Checkpoint
            As `save` returns it; the same one for every call.

        Raises
        ------
        TimeoutError
            Not yet; the save goes on.
        StoreError, CollectiveError, ...
            The save failed, as `save` does; the old checkpoint is there. A `StoreError` with
            ``errno.ECANCELED``: it was cancelled.

        Examples
        --------
        >>> import tempfile, numpy as np
        >>> from mlstate.checkpoint import save_async
        >>> handle = save_async(tempfile.mkdtemp() + "/ckpt", {"w": np.zeros(3)}, step=7)
        >>> handle.wait().step
        7
        """
        self._job.wait_for("ended", timeout)
        assert self._job.result is not None
        return self._job.result

    def done(self) -> bool:
        """Return whether the save has ended, well or not; `wait` says which.

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
        """Return how many bytes of how many are done: written, or found unchanged.

        Bytes are those of this rank's shards, counted in steps of 50 milliseconds. The second
        number is 0 until it is known: where ranks save together, they agree on it first.

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
        """Give the save up, and wait until it has ended.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait. Default: as long as it takes, which is some 50 milliseconds and
            what the disk needs to finish a write.

        Returns
        -------
        bool
            True: it was given up, or failed; what was in the folder before is there, and
            `wait` raises. False: it was too late, the new checkpoint is there.

        Raises
        ------
        TimeoutError
            It has not ended yet, and will.

        Notes
        -----
        Where ranks save together, one that cancels makes the save fail on all of them.

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
        with job.changed:
            if not job.reached("ended", timeout):
                raise TimeoutError(f"the save of {job.path} has not ended after {timeout} seconds")
            if getattr(job.error, "errno", None) == errno.ECANCELED:
                job.tell_nobody()
        job.join()
        return job.error is not None

    def _settle(self) -> None:
        """Wait; raise what went wrong unless somebody was told already."""
        job = self._job
        if job.pid != os.getpid():
            return
        with job.changed:
            job.reached("ended")
            told = job.asked
        if not told:
            job.wait_for("ended", None)

    def times(self) -> SaveTimes:
        """Return when the save began, was staged and ended, and when the caller was held up.

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
        with self._job.changed:
            return self._times()

    def _times(self) -> SaveTimes:
        job = self._job
        return SaveTimes(job.began, job.staged_at, job.ended_at, list(job.waits))

    def _state(self) -> str:
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
        from ._checkpoint_html import save_html

        job = self._job
        done = job.bytes_done, job.bytes_total
        now = time.perf_counter()
        return save_html(job.path, self._state(), done, self._times(), now, job.error)


# ---- the beginning ----


def _check_group(group: ProcessGroup | None) -> None:
    """A group that something else uses meanwhile mixes up what ranks tell each other."""
    if group is None or group.world_size == 1:
        return
    if id(group) in _groups:
        raise ValueError("another save uses this group: wait for that one, or give this its own")
    if getattr(group, "is_default", False):
        raise ValueError(
            "this is torch's default group, which training uses while the save is under way: "
            "give the save one of its own, TorchGroup(torch.distributed.new_group("
            "backend='gloo'))"
        )


def _check_budget(most: int | None) -> None:
    if most is not None and not hasattr(most, "__index__"):
        raise TypeError(f"max_staging_bytes must be an int or None, got {type(most).__name__}")
    if most is not None and most < 0:
        raise ValueError(f"max_staging_bytes must be 0 or more, got {most}")


def _devices(save: Save) -> list[Any]:
    """Devices that tensors of the state lie on."""
    values = [v for state in save.dicts if state is not None for v in state.values()]
    arrays = (v.array if isinstance(v, Shard) else v for v in values if is_on_device(v))
    return list(dict.fromkeys(array.device for array in arrays))


def _event(device: Any) -> Any:
    """What tells when all that was asked of a device so far has been done."""
    module = getattr(sys.modules["torch"], device.type, None)
    if module is None or not hasattr(module, "current_stream"):
        return None
    return module.current_stream(device).record_event()


def begin_save(
    path: str | os.PathLike[str],
    model: Any,
    optimizer: Any,
    *,
    metadata: Mapping[str, Any] | None,
    step: int | None,
    max_staging_bytes: int | None,
    staging: Staging | None,
    progress: Callable[[int], object] | None,
    **options: Any,
) -> SaveHandle:
    """Begin to save; see `mlstate.checkpoint.save_async`. `options` are those of `Save`."""
    began = time.perf_counter()
    if staging is not None and not isinstance(staging, Staging):
        raise TypeError(f"staging must be a Staging, got {type(staging).__name__}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable, got {type(progress).__name__}")
    _check_budget(max_staging_bytes)
    memory = OwnStaging(kept=False) if staging is None else staging
    save = Save(path, **options)
    _check_group(save.group)
    save.prepare(model, optimizer, metadata, step)
    devices = _devices(save)
    if save.group.world_size == 1 and not devices:
        save.gather()  # what is wrong with an array is told at once
    memory._begin()
    if save.group.world_size > 1:
        _groups.add(id(save.group))
    job = _Job(save, memory, max_staging_bytes, progress, began)
    job.ready = [event for event in map(_event, devices) if event is not None]
    handle = SaveHandle(job)
    job.start()
    with job.changed:
        add_wait(job.waits, began, time.perf_counter())
    return handle
