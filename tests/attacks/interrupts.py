"""Interrupt an operation at lines, by signals and by storms; test_interrupts.py runs it.

    python interrupts.py OPERATION LINES SIGNALS STORM

Each operation runs in its own process, whose descriptors and threads are counted, and whose exit is
part of the test. The arguments are the numbers of lines (0: all), of single signals, and of signals
in storms. The output is one line of JSON.
"""

import _thread
import contextlib
import copy
import faulthandler
import gc
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import operations
from amounts import SEED, spread
from injected_errors import Injected

from mlstate._core import deferred_interrupts

SECONDS = 20  # limit for threads to end
MOST = 6  # signals of one call in a storm


def descriptors():
    """The open descriptors, without the engine's connections to a store."""
    names = []
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            names.append(str(entry.readlink()))
        except FileNotFoundError:
            continue
    return sorted(name for name in names if not name.startswith("socket:"))


def threads_end():
    """Wait until only this thread runs."""
    end = time.monotonic() + SECONDS
    time.sleep(0.005)  # a thread that begins to run is not counted yet
    while _thread._count() > 0 and time.monotonic() < end:
        time.sleep(0.001)
    assert len(threading.enumerate()) == 1, threading.enumerate()


class Bench:
    """The folders of one operation, each prepared and tried once."""

    def __init__(self, operation):
        self.operation, self.tried, self.complaints = operation, 0, []
        self.root = Path(tempfile.mkdtemp(prefix="interrupts-"))
        operation.make_states()
        operation.renew()
        (self.root / "old").mkdir()
        (self.root / "nothing").mkdir()
        operation.prepare(self.root / "old")
        self.open = None
        self.try_once("warm up", lambda operation, folder: operation.call(folder))
        assert not self.complaints, self.complaints

    def try_once(self, label, call, start="old"):
        """Interrupt a call, and judge the outcome; return the result of `call`."""
        folder, result = self.root / "work", None
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.root / start, folder)
        operation = copy.copy(self.operation)
        operation.renew()
        faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
        try:
            result = call(operation, folder)
            threads_end()
            outcome_of(operation, folder, {start, "new"})
            expected = operation.call_again(folder)
            threads_end()
            outcome_of(operation, folder, {expected})
            left = operation.left(folder, False)
            assert not left, f"left {left}"
            vars(operation).clear()  # drops objects that hold locks
            gc.collect()
            open_now = descriptors()
            open_before, self.open = self.open or open_now, open_now
            new = Counter(open_now) - Counter(open_before)
            assert not new, f"open: {new}"
            threads_end()
        except Exception as error:
            self.complaints.append(f"{label}: {type(error).__name__}: {error}"[:400])
        faulthandler.cancel_dump_traceback_later()
        return result


def outcome_of(operation, folder, allowed):
    """Raise AssertionError unless the outcome is an allowed one."""
    try:
        outcome = operation.outcome(folder)
    except FileNotFoundError:
        outcome = "nothing"
    assert outcome in allowed, f"has the {outcome} content, not {' or '.join(sorted(allowed))}"


# ---- lines ----


def interrupt_at(at, operation, folder):
    """Make the call with an interrupt at a line (0: none); return the tracer."""
    injected = Injected(at, KeyboardInterrupt, others=operation.interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        injected(lambda: operation.call(folder))
    return injected


def try_lines(bench, most):
    """Try lines of the call."""
    for start in bench.operation.starts:
        count = bench.try_once("no interrupt", partial(interrupt_at, 0), start).count
        for at in spread(count, most or None):
            before = len(bench.complaints)
            injected = bench.try_once(f"line {at}", partial(interrupt_at, at), start)
            bench.tried += injected is not None and injected.place is not None
            if len(bench.complaints) > before and injected is not None:
                bench.complaints[-1] += f" ({injected.place})"


# ---- signals ----


def interrupt_after(delay, later, operation, folder):
    """Make the call with a signal after `delay` seconds; return the number of handled signals.

    `later` has the seconds until further signals, each after the one before: during the clean-up.
    The exceptions are kept until the end, with the frames of their tracebacks.
    """
    pending, handled = list(later), []

    def interrupt(number, frame):
        handled.append(number)
        if pending:
            signal.setitimer(signal.ITIMER_REAL, pending.pop())
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    error = None
    with deferred_interrupts() as section:
        try:
            with section.allowed():
                signal.setitimer(signal.ITIMER_REAL, delay)
                operation.call(folder)
        except KeyboardInterrupt as interrupted:
            operation.kept = interrupted
        except Exception as other:
            error = other
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    if error is not None:
        raise error
    return len(handled)


def time_call(operation, folder):
    """Make the call; return the seconds it took."""
    start = time.perf_counter()
    operation.call(folder)
    return time.perf_counter() - start


def try_signals(bench, tries, seconds):
    """Interrupt the call at random moments."""
    chance = random.Random(SEED)
    for _ in range(tries):
        delay = chance.uniform(1e-6, seconds)
        bench.try_once(f"{delay * 1e3:.3f} ms", partial(interrupt_after, delay, ()))
        bench.tried += 1


def try_storms(bench, count, seconds):
    """Interrupt calls until `count` signals were handled, 1 to `MOST` for each call."""
    chance = random.Random(SEED)

    def run(operation, folder):
        handled = 0
        for number in range(operation.rounds):
            if number:
                outcome_of(operation, folder, {"old", "new"})
                operation.renew()
            later = [10 ** chance.uniform(-5, -3) for _ in range(chance.randrange(MOST))]
            handled += interrupt_after(chance.uniform(1e-6, seconds), later, operation, folder)
        return handled

    signals = 0
    while signals < count and len(bench.complaints) < 20:
        signals += bench.try_once(f"storm, {signals} signals", run) or 0
    bench.tried += signals


def main(name, lines, signals, storm):
    """Print the result as JSON."""
    bench = Bench(operations.find(name))
    try_lines(bench, int(lines))
    seconds = min(bench.try_once("no signal", time_call) for _ in range(5))
    try_signals(bench, int(signals), seconds)
    try_storms(bench, int(storm), seconds)
    shutil.rmtree(bench.root)
    print(json.dumps([bench.tried, bench.complaints]))


if __name__ == "__main__":
    main(*sys.argv[1:])
