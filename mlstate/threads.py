"""How many threads the C core may use."""

from . import _core

__all__ = ["get_num_threads", "set_num_threads"]


def set_num_threads(threads: int) -> None:
    """Set how many threads one call of the core may use.

    Parameters
    ----------
    threads : int
        1 to 64, the calling thread included. The default is the number of processors that
        the process may use, at most 4: the core's work is bound by memory, which a few
        threads keep busy.

    Raises
    ------
    ValueError
        If `threads` is outside 1..64.

    Notes
    -----
    Threads start with the first call that can use them (a result of 2 MiB or more), and
    sleep between calls. A forked child starts its own.

    Examples
    --------
    >>> import mlstate
    >>> before = mlstate.get_num_threads()
    >>> mlstate.set_num_threads(2)
    >>> mlstate.get_num_threads()
    2
    >>> mlstate.set_num_threads(before)
    """
    _core.set_num_threads(threads)


def get_num_threads() -> int:
    """Return how many threads one call of the core may use.

    Returns
    -------
    int
        At least 1; see `set_num_threads`.
    """
    return _core.get_num_threads()
