"""`run_ranks`: call a function on ranks that are threads, processes of gloo, or an MPI job."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Literal

from ..collectives import LocalGroup
from ..collectives._arguments import check_timeout, failed
from ..collectives._local_launch import GRACE_SECONDS
from ..errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Callable


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    engine: Literal["threads", "gloo", "mpi"] = "threads",
    *,
    timeout: float = 60.0,
) -> list[Any]:
    """Call a function on several ranks, and return their results.

    Parameters
    ----------
    world_size : int
        Number of ranks; 1 to 64 threads.
    function : callable
        Called as ``function(group)`` on each rank, with the `ProcessGroup` of the rank. For
        ``"gloo"`` and ``"mpi"`` it must be importable: a function at the top of a module, or a
        `functools.partial` of one.
    engine : {"threads", "gloo", "mpi"}, default "threads"
        The kind of ranks. ``"threads"``: threads of this process, with a `LocalGroup`. ``"gloo"``:
        processes with a `TorchGroup` of a new group of torch; torch's default group is initialised
        too. ``"mpi"``: a job of ``mpiexec`` with an `MPIGroup`.
    timeout : float, default 60
        Timeout in seconds of operations of the group. Ranks that are at work 3 seconds later are
        ended. The start of processes is not counted.

    Returns
    -------
    list
        Results of the function, in rank order.

    Raises
    ------
    Exception
        The exception of the rank that failed first, with the rank and its traceback as a note.
        Other exceptions that it did not cause are notes, too.
    CollectiveError
        If a process died (the error has its signal), the timeout expired, the result or the
        exception cannot be pickled, or the group cannot start. It names the rank; of an MPI job,
        which ends as a whole, one of the ranks.
    TypeError
        If the function cannot be sent to other processes.
    ValueError
        If an argument is out of range.

    Notes
    -----
    Processes of gloo are kept for later calls with as many ranks and a function of the same
    module: the first call imports torch, and the later ones take milliseconds. They start with the
    environment variables and the working folder of the first call, compute with one thread, and
    keep what functions change in their modules. After an error they end; the next call starts new
    ones. They also end with this process. A thread cannot be ended: if it does not return after
    its group was aborted, it is left, as a daemon.

    Warnings of a rank are issued here, so that filters and ``pytest.warns`` apply to them. The
    output of processes is printed here after the call.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.testing import run_ranks
    >>> def total(group):
    ...     return group.all_reduce(np.full(2, group.rank)).tolist()
    >>> run_ranks(3, total)
    [[3, 3], [3, 3], [3, 3]]
    """
    seconds = check_timeout(timeout) or 60.0
    if not callable(function):
        raise TypeError(f"run_ranks: function must be callable, got {type(function).__name__}")
    if engine == "threads":
        return _run_threads(world_size, function, seconds)
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size must be at least 1, got {world_size}")
    if engine == "gloo":
        from ._gloo_processes import run_gloo

        return run_gloo(world_size, function, seconds)
    if engine == "mpi":
        from ._mpi_job import run_mpi

        return run_mpi(world_size, function, seconds)
    raise ValueError(f'run_ranks: engine must be "threads", "gloo" or "mpi", got {engine!r}')


def _run_threads(world_size: int, function: Callable[..., Any], seconds: float) -> list[Any]:
    """Implement `run_ranks` for threads; the first error ends the operations of all ranks."""
    groups = LocalGroup.threads(world_size, timeout=seconds)
    results: dict[int, Any] = {}
    errors: list[tuple[BaseException, str]] = []  # with a note, in the order of failures

    def work(group: LocalGroup) -> None:
        """Call the function as one rank, and keep its result or exception."""
        try:
            results[group.rank] = function(group)
        except BaseException as error:
            errors.append((error, f"in rank {group.rank}"))
            group.abort()  # so that no rank waits for this one
        group.close()

    threads = [
        threading.Thread(target=work, args=[group], name=f"rank {rank}", daemon=True)
        for rank, group in enumerate(groups)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds + GRACE_SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late and not errors:
        text = f"not done after {seconds:g} s: ranks {late} were at work still"
        errors.append((failed("run_ranks", late[0], text), ""))
    for rank in late:
        groups[rank].abort()
        threads[rank].join(GRACE_SECONDS)
    if errors:  # a CollectiveError is probably a consequence of another rank's error
        error, note = min(errors, key=lambda each: isinstance(each[0], CollectiveError))
        if len({str(each) for each, _ in errors}) == 1 and len(errors) == world_size > 1:
            note = "in all ranks"
        if note:
            error.add_note(note)
        raise error
    return [results[rank] for rank in range(world_size)]
