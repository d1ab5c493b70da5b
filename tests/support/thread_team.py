"""Call a function in several threads that start together; set the number of mlstate's threads."""

import contextlib
import threading

from mlstate.threads import get_num_threads, set_num_threads

SECONDS = 60


@contextlib.contextmanager
def num_threads(count):
    """Let mlstate use `count` threads within the block."""
    before = get_num_threads()
    set_num_threads(count)
    try:
        yield
    finally:
        set_num_threads(before)


@contextlib.contextmanager
def calling_in_background(function, count=1):
    """Call a function again and again in other threads until the block ends; raise its error."""
    stop, errors = threading.Event(), []

    def run():
        try:
            while not stop.is_set():
                function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    without_errors(errors)


def thread_outcomes(work, count, *, seconds=SECONDS):
    """The result or error of ``work(number)`` in each of `count` threads."""
    start = threading.Barrier(count)
    outcomes = [None] * count

    def run(number):
        try:
            start.wait(seconds)
            outcomes[number] = work(number)
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return outcomes


def run_in_threads(work, count, *, seconds=SECONDS):
    """The result of ``work(number)`` in each of `count` threads; raises the first error."""
    return without_errors(thread_outcomes(work, count, seconds=seconds))


def without_errors(outcomes):
    """The results; raises the first one that is an error."""
    for error in outcomes:
        if isinstance(error, BaseException):
            raise error
    return outcomes
