"""`LocalGroup.run`: start processes, collect their results, choose the error, end the others."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from ..errors import CollectiveError
from ._arguments import check_timeout, failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from ._local_group import LocalGroup

    # kind ("result", "error", "interrupted"), value (the result or the exception), traceback
    Message = tuple[str, object, str]

GRACE_SECONDS = 3.0  # for the other ranks to end after one has failed
MEET_SECONDS = 120.0  # for spawned processes to import their modules


# ---- in a rank ----


def end_with_parent() -> None:
    """Make the system end this process, a rank, when its parent, which called `run`, ends."""
    import signal
    import sys

    if sys.platform == "linux":  # without a thread: a rank may fork
        import ctypes

        # PR_SET_PDEATHSIG: the kernel sends SIGTERM to this process when its parent ends
        death_signal = 1
        ctypes.CDLL(None).prctl(death_signal, int(signal.SIGTERM), 0, 0, 0)
        return

    import threading
    from multiprocessing import parent_process
    from multiprocessing.connection import wait

    def watch(sentinel: int) -> None:
        """Wait until the parent has ended, then end this process."""
        wait([sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    parent = parent_process()
    assert parent is not None  # ranks are started by `run`
    threading.Thread(target=watch, args=[parent.sentinel], daemon=True).start()


def _run_rank(
    join: Callable[..., LocalGroup],
    name: str,
    rank: int,
    world_size: int,
    pipe: Connection,
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    """Join the group as `rank`, call the user's function, and send its result to the parent.

    Runs in the rank's process. `join`: `LocalGroup.join`. `name`: of the group. `pipe`: to the
    parent. `function` is called with the group and `args`. An exception is sent too, after the
    group is aborted.
    """
    group = None
    end_with_parent()

    def work() -> object:
        """Join, and call the user's function."""
        nonlocal group
        group = join(name, rank, world_size, timeout=MEET_SECONDS)
        return function(group, *args)

    message = message_of(work)
    if group is not None:
        if message[0] != "result":
            group.abort()  # so that no rank waits for this one
        group.close()
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        pipe.send_bytes(encode_message(message))
    pipe.close()


def message_of(work: Callable[[], object]) -> Message:
    """Call `work`, and return the message about its result or its exception."""
    try:
        return ("result", work(), "")
    except KeyboardInterrupt:
        return ("interrupted", None, "")
    except BaseException as error:
        import traceback

        return ("error", error, "".join(traceback.format_exception(error)))


def encode_message(message: Message) -> bytes:
    """Return a rank's message as bytes; its value is pickled by itself.

    If the value cannot be pickled, the kind becomes "text", with a text in place of the traceback.
    """
    import pickle

    kind, value, text = message
    try:
        data = pickle.dumps(value)
        if kind == "error":
            pickle.loads(data)  # some exceptions can be pickled and not unpickled
    except Exception as error:
        if kind == "result":
            text = f"the result, of type {type(value).__qualname__}, cannot be sent: {error!r}"
        kind, data = "text", pickle.dumps(None)
    return pickle.dumps((kind, data, text))


def decode_message(data: bytes) -> Message:
    """Return the message of a rank; the text of the error if its value cannot be read here."""
    import pickle

    kind, value, text = pickle.loads(data)
    try:
        return (kind, pickle.loads(value), text)
    except Exception as error:
        return ("text", None, text or f"what it sent cannot be read here: {error!r}")


# ---- in the parent ----


class RankProcess:
    """A rank as the parent sees it: its process, the pipe from it, and its message."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection) -> None:
        """Keep the rank's process, which need not be started, and the pipe's end for receiving."""
        self.rank = rank
        self.process = process
        self.pipe = pipe
        # None: not received yet, or the process ended without one
        self.message: Message | None = None
        self.order = 0  # position among the received messages, from 1
        self.done = False  # nothing more comes from the rank

    def receive_message(self, order: int) -> None:
        """Receive the rank's message; if its pipe has closed, wait until the process has ended.

        `order`: position among all received messages, to find the rank that failed first.
        """
        try:
            self.message = decode_message(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(GRACE_SECONDS)
        self.order = order
        self.done = True

    def has_result(self) -> bool:
        """Return whether the rank's function has returned, and its result was received."""
        return self.message is not None and self.message[0] == "result"

    def failure_order(self) -> tuple[int, int]:
        """Return a sort key: the rank with the smallest key most likely failed first.

        A process that died comes first, then other errors. A CollectiveError or an interruption is
        last, as it is probably a consequence of another rank's failure.
        """
        if self.message is None:
            return 0, self.order
        consequence = isinstance(self.message[1], CollectiveError)
        return 2 if consequence or self.message[0] == "interrupted" else 1, self.order

    def error(self, operation: str) -> BaseException:
        """Return the exception for the caller of `operation` about this failed rank.

        It is the rank's own exception with its traceback as a note, if it could be sent; otherwise
        a CollectiveError, or KeyboardInterrupt after an interruption.
        """
        if self.message is None:
            return failed(operation, self.rank, _describe_exit(self.process))
        kind, value, text = self.message
        if kind == "interrupted":
            return KeyboardInterrupt()
        if kind == "error" and isinstance(value, Exception):
            value.add_note(f"in rank {self.rank}:\n{text}")
            return value
        return failed(operation, self.rank, text)


def _describe_exit(process: BaseProcess) -> str:
    """Return a text for the error about a rank without a message: how its process ended."""
    import signal

    code = process.exitcode
    if code is None:
        return f"its process {process.pid} neither answers nor ends"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"its process was killed by {signal.Signals(-code).name} (signal {-code})"
        return f"its process was killed by signal {-code}"
    return f"its process ended with exit status {code} before the function returned"


def collect_messages(
    ranks: list[RankProcess], deadline: float | None, grace_seconds: float = GRACE_SECONDS
) -> None:
    """Receive the messages of all ranks, until all have arrived or the time is over.

    `deadline`: on `time.monotonic`; None: no limit. After a failure, the other ranks have
    `grace_seconds` left.
    """
    from multiprocessing.connection import wait

    order = 0
    while waiting := {rank.pipe: rank for rank in ranks if not rank.done}:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return
        for pipe in wait(list(waiting), left):
            order += 1
            waiting[pipe].receive_message(order)  # type: ignore[index]
            if not waiting[pipe].has_result():  # type: ignore[index]
                end = time.monotonic() + grace_seconds
                deadline = end if deadline is None else min(deadline, end)


def end_processes(processes: Iterable[BaseProcess]) -> None:
    """Wait for the ranks' processes to end, and close them; terminate, then kill those that do not.

    Processes that were not started are skipped.
    """
    alive = [process for process in processes if process.pid is not None]
    end = time.monotonic() + GRACE_SECONDS
    for method in ("", "terminate", "kill"):  # first only wait
        for process in alive:
            if method and process.exitcode is None:
                getattr(process, method)()
        for process in alive:
            process.join(max(end - time.monotonic(), 0.1) if method != "kill" else None)
        end = time.monotonic() + 1.0
    for process in alive:
        process.close()


def run(
    join: Callable[..., LocalGroup],
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    start_method: str | None,
    timeout: float | None,
) -> list[Any]:
    """Implement `LocalGroup.run`: start a process for each rank, and return their results by rank.

    Each process calls `function` with its group and `args`. `join`: `LocalGroup.join`.
    `start_method`: None for Python's default. `timeout`: seconds, None for no limit. All processes
    have ended afterwards. Raises the error that `find_error` chooses if a rank has no result.
    """
    import multiprocessing
    import secrets

    limit = check_timeout(timeout)
    deadline = None if limit is None else time.monotonic() + limit
    context: Any = multiprocessing.get_context(start_method)
    name = f"run-{os.getpid()}-{secrets.token_hex(8)}"
    ranks: list[RankProcess] = []
    has_results = False
    try:
        for rank in range(world_size):
            parent_pipe, child_pipe = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank,
                args=(join, name, rank, world_size, child_pipe, function, args),
                name=f"mlstate-rank-{rank}",
            )
            ranks.append(RankProcess(rank, process, parent_pipe))
            process.start()
            child_pipe.close()  # so that the pipe breaks when the process ends
        collect_messages(ranks, deadline)
        has_results = all(rank.has_result() for rank in ranks)
        if not has_results:
            raise find_error("LocalGroup.run", ranks, timeout)
        return [rank.message[1] for rank in ranks if rank.message is not None]
    finally:
        if not has_results:
            for rank_process in ranks:
                if rank_process.process.pid is not None and rank_process.process.exitcode is None:
                    rank_process.process.terminate()
        end_processes(rank.process for rank in ranks)
        for rank_process in ranks:
            rank_process.pipe.close()


def find_error(operation: str, ranks: list[RankProcess], timeout: float | None) -> BaseException:
    """Return the error for the caller of `operation`, if a rank has no result.

    It is the error of the rank that failed first, with notes about other ranks that failed for
    another reason or were at work still; if none failed, it is about the ranks that were not
    done after `timeout` seconds.
    """
    late = [rank.rank for rank in ranks if not rank.done]
    ended = [rank for rank in ranks if rank.done and not rank.has_result()]
    if not ended:  # without a failure, only a timeout ends the wait
        return failed(
            operation, late[0], f"not done after {timeout:g} s: ranks {late} were at work still"
        )
    first, *others = sorted(ended, key=RankProcess.failure_order)
    error = first.error(operation)
    for other in others:
        if other.failure_order()[0] < 2:  # otherwise the first one caused it
            text = other.message[2] if other.message else _describe_exit(other.process)
            error.add_note(f"in rank {other.rank}:\n{text}")
    if late:
        error.add_note(f"ranks {late} were at work still, and were ended")
    return error
