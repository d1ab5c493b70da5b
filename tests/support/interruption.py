"""Ctrl-C during a long call."""

import signal
import threading
import time

import pytest


def interrupt(call, *, after, within):
    """Press Ctrl-C `after` seconds; `call` raises KeyboardInterrupt `within` seconds of it."""
    sent = []

    def press():
        sent.append(time.perf_counter())
        signal.raise_signal(signal.SIGINT)

    timer = threading.Timer(after, press)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
        assert time.perf_counter() - sent[0] < within
    finally:
        timer.cancel()
        timer.join()
