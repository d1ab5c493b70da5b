"""`Engine`, base of groups: order of operations, `async_op`, `close`, fork, memory of arguments.

A group derives from `Engine` and creates a `Link` for each operation, which moves the bytes. The
method of the link has the name of the operation. User-defined groups need not derive from it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .. import _core
from .._common.arguments import check_flags
from .._common.arrays import is_torch
from .._common.streams import on_current_stream
from .._common.waiting import Waiters, join_thread, start_thread
from ._arguments import (
    ReduceOp,
    check_array,
    check_bytes,
    check_counts,
    check_op,
    check_own_rows,
    check_root,
    check_rows,
    check_supported_tensor,
    check_timeout,
    check_writable,
    counts_of,
    failed,
    result_of,
    rows_text,
)
from ._memory import copy_back, flat_of, inference_mode_of, target_for
from ._process_group import ProcessGroup
from ._work import Work

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence
    from typing import Self

    from .._types import Array
    from ._link import Link

    Task: TypeAlias = Callable[[], Any]


_IDLE_SECONDS = 0.02  # a thread waits so long for more work: a new one takes 50 us to start


class OperationQueue:
    """Runs the operations of a group in call order.

    A thread called `name` runs operations with ``async_op=True``. It starts when there is work and
    ends when the queue was empty for `_IDLE_SECONDS`. The interpreter waits for it at exit.
    """

    def __init__(self, name: str, rank: int) -> None:
        """Create an empty queue; `name` is of its thread, `rank` this rank, for errors."""
        import threading  # keeps threading out of `import mlstate`

        self._name = name
        self._rank = rank
        self._running = threading.Lock()  # held while an operation runs
        self._lock = threading.Lock()  # protects the following; held briefly
        self._queue: deque[tuple[Work, Task]] = deque()
        self._worker: threading.Thread | None = None
        self._is_joining = False  # the thread ends as soon as the queue is empty
        self._changed = Waiters()  # wakes the thread

    def run(self, operation: str, task: Task, *, async_op: bool = False) -> Any:
        """Run a task after all earlier ones, and return its result.

        With `async_op`, return a `Work` at once; the thread runs the task. Otherwise the caller's
        thread runs it if nothing is queued, and errors of the task are raised here. `operation`:
        its name, for errors.
        """
        if async_op:
            return self._enqueue(operation, task)
        with self._running:
            with self._lock:
                has_queued = bool(self._queue)
            if not has_queued:
                return task()
        return self._enqueue(operation, task).wait()

    def run_at_once(self, operation: str, task: Task) -> Work:
        """Run a task to its end, after all earlier ones; return a finished `Work` with its result.

        Errors of the task are raised here.
        """
        work = Work(operation, self._rank)
        work.set_result(self.run(operation, task))
        return work

    def _enqueue(self, operation: str, task: Task) -> Work:
        """Queue a task for the queue's thread, which is started if necessary; return its `Work`.

        The task runs on the CUDA stream of the caller. `operation`: its name, for errors. Raises
        RuntimeError if the system has no thread left.
        """
        work, task = Work(operation, self._rank), on_current_stream(task)
        with _core.deferred_interrupts():
            with self._lock:
                self._queue.append((work, task))
                try:
                    self._start_worker()
                except RuntimeError:
                    self._queue.pop()
                    raise
            self._changed.wake()  # after the lock, for which the thread would wait
        return work

    def _start_worker(self) -> None:
        """Start the thread, unless it runs; the caller is in a section, and holds the lock."""
        import threading

        if self._worker is None or not self._worker.is_alive():  # also in a forked child
            self._is_joining = False
            self._worker = threading.Thread(target=self._drain, name=self._name)
            start_thread(self._worker)

    def _drain(self) -> None:
        """Run queued operations until none is left, then end; the main function of the thread.

        An operation's error is kept in its `Work`, and the next operation runs.
        """
        while True:
            is_idle = not self._changed.wait_for(self._has_work_or_ends, _IDLE_SECONDS)
            with self._running:
                with self._lock:
                    if not self._queue:
                        if not (is_idle or self._is_joining):
                            continue
                        self._worker = None
                        return
                    work, task = self._queue.popleft()
                try:
                    result = task()
                except BaseException as error:
                    work.set_error(error)
                else:
                    del task  # release its arrays before `wait` can return
                    work.set_result(result)
                    del result
                del work

    def _has_work_or_ends(self) -> bool:
        return bool(self._queue) or self._is_joining

    def join(self) -> None:
        """Wait until all queued operations have ended."""
        with _core.deferred_interrupts():
            with self._lock:
                worker = self._worker
                self._is_joining = True
            self._changed.wake()
        if worker is not None:
            join_thread(worker)


class Call(NamedTuple):
    """One call of an operation on this rank."""

    name: str  # of the operation and of the link's method
    seconds: float | None  # timeout; None for the group's own
    async_op: bool
    text: str = ""  # must be equal on every rank
    device: Any = None  # of a tensor
    rows: Sequence[list[int]] = ()  # sent to and expected from each rank, if these may differ


class Engine(ProcessGroup, ABC):
    """The operations of a process group; base class of engines.

    Sources and targets are memory for the elements of an array: flat arrays in main memory,
    unless the group chooses otherwise.

    Arguments of the operations: `out` is an array for the result, None for a new one. `counts` has
    the number of rows (indices of the first axis) of each rank. `timeout` is in seconds, None for
    the group's own. With `async_op`, the operation returns a `Work` at once. Wrong arguments raise
    TypeError, ValueError or CompatibilityError before anything is sent; a timeout, another rank's
    failure or a group that has ended raises CollectiveError.
    """

    __slots__ = ()

    _rank: int
    _world_size: int
    _ended: str  # how the group ended, or empty
    _process = 0  # the only process that can use the group; 0: its forked children can, too
    _operations: OperationQueue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        ended = f", {self._ended}" if self._ended else ""
        return f"{type(self).__name__}(rank {self._rank} of {self._world_size}{ended})"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    # ---- operations ----

    def reduce_scatter(
        self,
        array: Array,
        *,
        op: ReduceOp | str = ReduceOp.SUM,
        out: Array | None = None,
        counts: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce over ranks and return this rank's rows (see `ProcessGroup`)."""
        name = "reduce_scatter"
        seconds, source = check_timeout(timeout), check_array(name, array)
        op_name = check_op(name, op, source)
        rows = check_counts(name, "counts", counts, check_rows(name, source), self.world_size)
        call = Call(name, seconds, async_op, f"{op_name} of {rows_text(source)} in rows {rows}")
        return self._fill(call, source, out, rows[self.rank], rows, op_name, reduced=True)

    def all_gather(
        self,
        array: Array,
        *,
        out: Array | None = None,
        counts: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the rows of all ranks, in rank order (see `ProcessGroup`)."""
        name = "all_gather"
        seconds, source = check_timeout(timeout), check_array(name, array)
        rows = [check_rows(name, source)] * self.world_size
        if counts is not None:
            rows = counts_of(name, "counts", counts, self.world_size)
            check_own_rows(name, source, rows, self.rank)
        call = Call(name, seconds, async_op, f"{rows_text(source)} in rows {rows}")
        return self._fill(call, source, out, sum(rows), rows)

    def all_reduce(
        self,
        array: Array,
        *,
        op: ReduceOp | str = ReduceOp.SUM,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the reduction over all ranks (see `ProcessGroup`)."""
        name = "all_reduce"
        seconds, source = check_timeout(timeout), check_array(name, array)
        op_name = check_op(name, op, source)
        text = f"{op_name} of {tuple(source.shape)} {rows_text(source)}"
        call = Call(name, seconds, async_op, text)
        # None: the result has the shape of the source
        return self._fill(call, source, out, None, op_name, reduced=True)

    def all_to_all(
        self,
        array: Array,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        out_counts: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send ``counts[r]`` rows to each rank r; return those received, ``out_counts[r]`` from r.

        See `ProcessGroup`. Raises ValueError if only one of `counts` and `out_counts` is given.
        """
        name = "all_to_all"
        seconds, source = check_timeout(timeout), check_array(name, array)
        rows = check_rows(name, source)
        if (counts is None) != (out_counts is None):
            raise ValueError(f"{name}: give both counts and out_counts, or neither")
        sent = expected = check_counts(name, "counts", counts, rows, self.world_size)
        if out_counts is not None:
            expected = counts_of(name, "out_counts", out_counts, self.world_size)
        call = Call(name, seconds, async_op, rows_text(source), rows=(sent, expected))
        return self._fill(call, source, out, sum(expected), sent, expected)

    def broadcast(
        self,
        array: Any,
        *,
        root: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Copy the root's array into the array of each other rank (see `ProcessGroup`)."""
        name = "broadcast"
        seconds, checked = check_timeout(timeout), check_array(name, array)
        root_rank = check_root(name, root, self.world_size)
        is_root = root_rank == self.rank
        if not is_root:
            check_writable(name, array, self.rank)
        memory = (self._source if is_root else self._target)(name, checked, reduced=False)

        def perform(link: Link) -> Any:
            """Broadcast in the group's memory, and put the result into the caller's array.

            Returns the caller's array, not the detached one.
            """
            with inference_mode_of(checked):
                link.broadcast(memory, root_rank)
                if not is_root:
                    self._put(memory, checked)
            return array

        text = f"{tuple(checked.shape)} {rows_text(checked)} from {root_rank}"
        return self._submit(Call(name, seconds, async_op, text, _device_of(checked)), perform)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        call = Call("barrier", check_timeout(timeout), async_op)
        return self._submit(call, methodcaller("barrier"))

    def gather_bytes(
        self,
        data: bytes,
        *,
        root: int | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the bytes of all ranks in rank order; with `root`, the other ranks get None."""
        name = "gather_bytes"
        seconds = None if timeout is None else check_timeout(timeout)
        sent = data if type(data) is bytes else check_bytes(name, data)
        receiver = None if root is None else check_root(name, root, self.world_size)
        call = Call(name, seconds, async_op, f"to {receiver}")
        return self._submit(call, methodcaller("gather_bytes", sent, receiver))

    # ---- call order ----

    def _fill(
        self,
        call: Call,
        source: Any,
        out: Any,
        rows: int | None,
        *arguments: object,
        reduced: bool = False,
    ) -> Any:
        """Submit an operation that fills `out`, or a new array with `rows` rows if it is None.

        Returns that array, or a `Work` if the call is asynchronous. The result has the shape of
        `source`, the operation's input, if `rows` is None. `arguments` follow source and target in
        the call of the link. `reduced`: the operation computes with elements.
        """
        shape = source.shape if rows is None else (rows, *source.shape[1:])
        result = result_of(call.name, out, tuple(shape), source)
        if out is not None:  # before the other ranks wait for this one
            self._check_out(call.name, result)
        memory = self._source(call.name, source, reduced=reduced)

        def perform(link: Link) -> Any:
            """Run the operation in the group's memory, and return the result for the caller."""
            with inference_mode_of(result):
                target = self._target(call.name, result, reduced=reduced)
                getattr(link, call.name)(memory, target, *arguments)
                self._put(target, result)
            return result if out is None else out  # `result` is detached from autograd

        return self._submit(call._replace(device=_device_of(source)), perform)

    def _submit(self, call: Call, perform: Callable[[Any], Any]) -> Any:
        """Run an operation after all earlier ones; return its result, or its `Work` if async.

        `perform`: called with the link to the other ranks; returns the result. Raises
        CollectiveError if the group has ended.
        """
        if type(call.async_op) is not bool:
            check_flags(async_op=call.async_op)
        self._check_open(call.name)

        def task() -> Any:
            # again: the group may have ended while the operation was queued
            self._check_open(call.name)
            return self._perform(call, perform)

        return self._run(call, task)

    def _check_open(self, operation: str) -> None:
        """Raise CollectiveError if the group has ended, or this process was forked from its owner.

        `operation`: its name, for the error.
        """
        if self._process and self._process != os.getpid():
            raise failed(
                operation,
                self._rank,
                "this process was forked from the one that joined the group; join a group of "
                "its own",
            )
        if self._ended:
            raise failed(operation, self._rank, f"this group was {self._ended}; make a new one")

    def _run(self, call: Call, task: Callable[[], Any]) -> Any:
        """Run a task after all earlier ones; return its result, or a `Work` if async."""
        if call.async_op and self._runs_at_once(call):
            return self._operations.run_at_once(call.name, task)
        return self._operations.run(call.name, task, async_op=call.async_op)

    def _runs_at_once(self, call: Call) -> bool:
        """Return whether an asynchronous operation runs in the thread of the caller."""
        return False

    @abstractmethod
    def _perform(self, call: Call, perform: Callable[[object], object]) -> Any:
        """Create a link for `call`, and return the result of `perform(link)`.

        No other operation of the group runs meanwhile.
        """

    # ---- memory ----

    def _check_out(self, operation: str, out: Array) -> None:
        """Raise TypeError, which names `operation`, if `out` is a tensor that cannot be written."""
        check_supported_tensor(f"{operation}: out", out)

    def _source(self, operation: str, array: Array, *, reduced: bool) -> Any:
        """Return memory with the elements of an input, which may be the array's own memory.

        `operation`: its name, for errors. `reduced`: the operation computes with the elements;
        raises if the group cannot compute with the dtype.
        """
        return flat_of(operation, array, native=reduced)

    def _target(self, operation: str, place: Array, *, reduced: bool) -> Any:
        """Return memory for the elements of `place`, the result: its own memory, or new.

        The arguments are as for `_source`.
        """
        return target_for(operation, place, native=reduced)

    def _put(self, target: Any, place: Any) -> None:
        """Copy `target`, filled memory of `_target`, to its `place`, unless they share memory."""
        copy_back(target, place)


def _device_of(array: Any) -> Any:
    """Return the device of a tensor; None for a NumPy array."""
    return array.device if is_torch(array) else None
