"""Ctrl-C during a long call, and in its clean-up."""

import contextlib
import signal
import threading
import time

import pytest

from mlstate._core import deferred_interrupts


def interrupt(call, *, after, within):
    """Press Ctrl-C `after` seconds; `call` then computes for less than `within` seconds."""
    sent = []

    def press():
        sent.append(time.process_time())
        signal.raise_signal(signal.SIGINT)

    timer = threading.Timer(after, press)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
        assert time.process_time() - sent[0] < within
    finally:
        timer.cancel()
        timer.join()


def raise_once(monkeypatch, owner, name, error=KeyboardInterrupt):
    """Let the next call of `owner.name` raise an error at its begin."""
    function = getattr(owner, name)

    def raise_interrupt(*_, **__):
        monkeypatch.setattr(owner, name, function)
        raise error

    monkeypatch.setattr(owner, name, raise_interrupt)


def signal_once(monkeypatch, owner, name):
    """Press Ctrl-C at the begin of the next call of `owner.name`, which may be in a section."""
    function = getattr(owner, name)

    def press_and_call(*arguments, **keywords):
        monkeypatch.setattr(owner, name, function)
        signal.raise_signal(signal.SIGINT)
        return function(*arguments, **keywords)

    monkeypatch.setattr(owner, name, press_and_call)


@contextlib.contextmanager
def split_condition(monkeypatch):
    """Let an interrupt split the next `with condition` of the main thread: its lock is held.

    A condition in a section of deferred interrupts cannot be split.
    """
    enter = threading.Condition.__enter__
    split = []

    def enter_and_raise(condition):
        entered = enter(condition)
        is_main = threading.get_ident() == threading.main_thread().ident
        if is_main and not split and not deferred_interrupts.is_active():
            split.append(condition)
            raise KeyboardInterrupt
        return entered

    with monkeypatch.context() as context, contextlib.suppress(KeyboardInterrupt):
        context.setattr(threading.Condition, "__enter__", enter_and_raise)
        yield
