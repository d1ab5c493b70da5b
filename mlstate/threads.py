"""`set_num_threads`, `get_num_threads`: number of threads of the C core."""

from . import _core
from ._common.arguments import FLAG
from ._exports import show_exports

__all__ = ["get_num_threads", "set_num_threads"]


def set_num_threads(threads: int) -> None:
    """Set the number of threads that one call of the core may use.

    Parameters
    ----------
    threads : int
        1 to 64, including the calling thread. The default is the number of processors
        available to the process, at most 4, because the core's work is bound by memory
        bandwidth.

    Raises
    ------
    ValueError
        If `threads` is outside 1..64.
    TypeError
        If `threads` is a bool, or not an integer.

    Notes
    -----
    Threads start with the first call that can use them (a result of at least 2 MiB), and
    sleep between calls. A forked child starts new ones.

    Examples
    --------
    >>> import mlstate
    >>> before = mlstate.threads.get_num_threads()
    >>> mlstate.threads.set_num_threads(2)
    >>> mlstate.threads.get_num_threads()
    2
    >>> mlstate.threads.set_num_threads(before)
    """
    if isinstance(threads, FLAG):
        raise TypeError(f"threads must be an int, got {threads!r}")
    _core.set_num_threads(threads)


def get_num_threads() -> int:
    """Return the number of threads that one call of the core may use.

    Returns
    -------
    int
        At least 1; see `set_num_threads`.
    """
    return _core.get_num_threads()


show_exports(globals())
