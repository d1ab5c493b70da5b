"""Sections of `deferred_interrupts`: no signal handler of Python runs in them, and none is lost."""

import collections
import contextlib
import functools
import operator
import os
import signal
import threading
import time

import pytest

from mlstate._core import deferred_interrupts

SIGNALS = [signal.SIGALRM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
SIGNALS.append(signal.SIGUSR2)
pytestmark = pytest.mark.timeout(60)


class Handled(Exception):
    """Raised by the handlers of these tests."""


@contextlib.contextmanager
def handler(number, function):
    """Set a signal handler in a block."""
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


def refuse(number, frame):
    raise Handled(number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_handled_after_the_outermost_section(number):
    steps = []
    with handler(number, refuse), pytest.raises(Handled):
        with deferred_interrupts() as section:
            with deferred_interrupts():
                assert not section.is_pending()
                signal.raise_signal(number)
                steps.append(1)
            steps.append(2)
            assert section.is_pending() and deferred_interrupts.is_active()
        steps.append(3)
    assert steps == [1, 2] and not deferred_interrupts.is_active()


def test_each_of_several_signals_is_handled():
    handled = []
    with contextlib.ExitStack() as stack:
        for number in SIGNALS:
            stack.enter_context(handler(number, lambda number, frame: handled.append(number)))
        with deferred_interrupts():
            for number in SIGNALS:
                signal.raise_signal(number)
            assert not handled
    assert sorted(handled) == sorted(SIGNALS)


def test_getsignal_returns_the_handler_of_the_user():
    with handler(signal.SIGALRM, refuse):
        with deferred_interrupts():
            assert signal.getsignal(signal.SIGALRM) is refuse
        assert signal.getsignal(signal.SIGALRM) is refuse
        with pytest.raises(Handled):
            signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize("action", [signal.SIG_IGN, signal.SIG_DFL])
def test_signals_without_a_function_of_python_are_left_alone(action):
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGUSR1, action)
        with deferred_interrupts():
            signal.raise_signal(signal.SIGUSR1)
        os._exit(3)
    _, status = os.waitpid(child, 0)
    if action is signal.SIG_IGN:
        assert os.waitstatus_to_exitcode(status) == 3
    else:
        assert os.waitstatus_to_exitcode(status) == -signal.SIGUSR1


def test_a_signal_before_a_section_is_handled_before_it():
    entered = []
    with handler(signal.SIGUSR1, refuse), pytest.raises(Handled):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            signal.raise_signal(signal.SIGUSR1)  # this thread gets it when it is unblocked
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        with deferred_interrupts():
            entered.append(1)
    assert not entered


def test_a_lost_section_ends():
    with handler(signal.SIGUSR1, refuse), pytest.raises(Handled):
        deferred_interrupts().__enter__()
        assert not deferred_interrupts.is_active()
        section = deferred_interrupts()
        section.__enter__()
        signal.raise_signal(signal.SIGUSR1)
        del section
        time.sleep(0)  # signals are handled at calls
    assert not deferred_interrupts.is_active()


def test_sections_of_other_threads_defer_no_signal():
    is_active, in_section, ends = [], threading.Event(), threading.Event()

    def run():
        with deferred_interrupts():
            is_active.append(deferred_interrupts.is_active())
            in_section.set()
            ends.wait(30)

    thread = threading.Thread(target=run)
    thread.start()
    in_section.wait(30)
    with handler(signal.SIGUSR1, refuse), pytest.raises(Handled):
        signal.raise_signal(signal.SIGUSR1)
    ends.set()
    thread.join()
    assert is_active == [False]


def test_a_section_is_entered_once():
    with deferred_interrupts() as section, pytest.raises(RuntimeError, match="entered before"):
        section.__enter__()


def test_a_child_that_another_thread_forks_is_in_no_section():
    status = []

    def fork():
        child = os.fork()
        if child == 0:
            handled = []
            signal.signal(signal.SIGUSR1, lambda *_: handled.append(1))
            signal.raise_signal(signal.SIGUSR1)
            os._exit(0 if handled and not deferred_interrupts.is_active() else 1)
        status.append(os.waitpid(child, 0)[1])

    with handler(signal.SIGUSR1, refuse), deferred_interrupts():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert status == [0]


def test_a_section_in_a_handler_at_the_entry_leaves_the_handlers():
    handled = []

    def enter_section(number, frame):
        with deferred_interrupts():
            handled.append(number)

    with handler(signal.SIGUSR1, enter_section):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        signal.raise_signal(signal.SIGUSR1)
        section = deferred_interrupts()
        unblock = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGUSR1])
        collections.deque(map(operator.call, (unblock, section.__enter__)), maxlen=0)
        section.__exit__()
        signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1] * 2 and not deferred_interrupts.is_active()


# ---- blocks that handle signals ----


@pytest.mark.parametrize("is_noted", [False, True], ids=["in the block", "before the block"])
def test_a_signal_is_handled_in_an_allowed_block_and_not_in_the_clean_up(is_noted):
    steps = []

    def raise_first(number, frame):
        steps.append("handled")
        if len(steps) == 1:
            raise Handled

    handled = handler(signal.SIGUSR1, raise_first)
    with handled, pytest.raises(Handled), deferred_interrupts() as section:
        if is_noted:
            signal.raise_signal(signal.SIGUSR1)
        try:
            with section.allowed():
                assert not deferred_interrupts.is_active()
                if not is_noted:
                    signal.raise_signal(signal.SIGUSR1)
                steps.append("not reached")
        finally:
            assert deferred_interrupts.is_active()
            signal.raise_signal(signal.SIGUSR1)
            steps.append("clean-up")
    assert steps == ["handled", "clean-up", "handled"]
    assert not deferred_interrupts.is_active()


def test_an_allowed_block_within_another_section_still_defers():
    steps = []
    outer, section = deferred_interrupts(), deferred_interrupts()
    handled = handler(signal.SIGUSR1, refuse)
    with handled, pytest.raises(Handled), outer, section, section.allowed():
        signal.raise_signal(signal.SIGUSR1)
        steps.append(section.is_pending())
    assert steps == [True]


def test_sections_in_an_allowed_block_are_outermost():
    with handler(signal.SIGUSR1, refuse), deferred_interrupts() as section:
        with section.allowed(), pytest.raises(Handled), deferred_interrupts():
            signal.raise_signal(signal.SIGUSR1)
        assert deferred_interrupts.is_active()


def test_no_signal_of_a_storm_splits_the_clean_up_after_an_allowed_block():
    began, counts, armed = time.monotonic(), [0, 0], []

    def raise_if_armed(number, frame):
        if armed:
            raise Handled

    handled = 0
    with handler(signal.SIGALRM, raise_if_armed):
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        try:
            while time.monotonic() - began < 20 and (counts[0] < 5000 or handled < 100):
                try:
                    armed.append(1)
                    while counts[0] < 5000 or handled < 100:
                        with deferred_interrupts() as section:
                            counts[0] += 1
                            try:
                                with section.allowed():
                                    sum(range(100))
                            finally:
                                counts[1] += 1
                except Handled:
                    handled += 1
                armed.clear()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    assert handled and counts[0] == counts[1]


def test_no_signal_of_a_storm_splits_a_section():
    began, changes, armed = time.monotonic(), [0, 0], []

    def raise_if_armed(number, frame):
        if armed:
            raise Handled

    sections = splits = handled = 0
    with handler(signal.SIGALRM, raise_if_armed):
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        try:
            while time.monotonic() - began < 20 and (sections < 5000 or not handled):
                try:
                    armed.append(1)
                    while sections < 5000 or not handled:
                        with deferred_interrupts():
                            changes[0] += 1
                            sections += 1
                            changes[1] += 1
                except Handled:
                    handled += 1
                armed.clear()
                splits += changes[0] != changes[1]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    assert handled and not splits
