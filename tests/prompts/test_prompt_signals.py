"""Signals stop each long call of a prompt log, whose handlers may use the log; sparse segments."""

import contextlib
import os
import signal
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from prompt_model import BLOCK, FINGERPRINT, match, put, wrong_records

from mlstate._core import PromptLog, deferred_interrupts

pytestmark = pytest.mark.timeout(120)
KEPT, LOST, NEW = [1] * BLOCK, [2] * BLOCK, [3] * BLOCK
META = 1 << 20  # bytes of metadata that each false header claims


class Interrupted(Exception):
    """Raised by a signal handler."""


@contextlib.contextmanager
def alarms(handler, first=0.02, interval=0.0):
    """Call a handler in the main thread: after `first` seconds, and then at intervals."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, first, interval)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refuse():
    raise Interrupted


@pytest.fixture(scope="module")
def false_headers():
    """Bytes that a scan needs a long time for: each place may be the start of a long header."""
    header = struct.pack("<4sII100xI12x", b"mspR", 1, 128 + META, META)
    return header * ((160 << 20) // len(header))


def segment(log, number=1):
    return Path(log.path, f"segment-{number:08}")


@pytest.fixture
def damaged(tmp_path, false_headers):
    """A log that has read two records; other bytes have replaced the second one since."""
    log = PromptLog(tmp_path / "log", True)
    put(log, KEPT)
    end = segment(log).stat().st_size
    put(log, LOST)
    os.truncate(segment(log), end)
    with segment(log).open("ab") as file:
        file.write(false_headers)
    yield log
    for path in Path(log.path).iterdir():
        path.unlink()  # pytest keeps folders


CALLS = {
    "open": lambda log: PromptLog(log.path, False),
    "match": lambda log: match(log, KEPT),
    "stats": lambda log: log.stats(),
    "records": lambda log: log.records(),
    "verify": lambda log: log.verify(),
    "put": lambda log: put(log, NEW),
    "prune": lambda log: log.prune(None, 5.0),
    "repair": lambda log: log.repair(5.0),
}


def check_usable(log):
    result = match(log, KEPT)
    assert (result.length, wrong_records(result, KEPT)) == (BLOCK, (set(), []))
    assert match(log, LOST).length == 0
    assert put(log, NEW) in ([0], [1]) and match(log, NEW).length == BLOCK
    assert log.verify() == []


@pytest.mark.parametrize("name", CALLS)
def test_a_signal_stops_the_scan_and_the_log_stays_usable(damaged, name):
    raised = []

    def handler():
        raised.append(time.process_time())
        refuse()

    began = time.process_time()
    with alarms(handler), pytest.raises(Interrupted):
        CALLS[name](damaged)
    stopped, began_again = time.process_time(), time.process_time()
    PromptLog(damaged.path, False)
    duration = time.process_time() - began_again
    assert raised[0] - began < duration / 2 and stopped - raised[0] < duration / 2
    check_usable(damaged)


@pytest.mark.parametrize("name", ["open", "match", "put"])
def test_handlers_that_return_do_not_prevent_the_scan(damaged, name):
    calls = []
    with alarms(lambda: calls.append(1), 0.004, 0.004):
        CALLS[name](damaged)
    assert calls
    check_usable(damaged)


def test_a_handler_uses_the_log_that_is_being_read(damaged):
    lengths = []
    with alarms(lambda: lengths.append(match(damaged, KEPT).length)):
        assert damaged.stats()["records"] == 1
    assert lengths == [BLOCK]
    check_usable(damaged)


def test_the_signals_of_an_outer_section_do_not_stop_a_scan(damaged):
    with alarms(refuse), pytest.raises(Interrupted), deferred_interrupts():
        length = match(damaged, KEPT).length
        records = damaged.records()
    assert length == BLOCK and len(records) == 1


def put_many(log, token, count, max_bytes=None):
    """Store a prompt of `count` blocks without parts; return it."""
    tokens = np.full(count * BLOCK, token)
    records = [(0, (number + 1) * BLOCK, b"", []) for number in range(count)]
    log.put(FINGERPRINT, tokens, BLOCK, records, max_bytes, 5.0)
    return tokens


@pytest.mark.parametrize("name", ["prune", "put"])
def test_a_signal_stops_a_compaction_and_no_record_is_lost(tmp_path, name):
    log, count = PromptLog(tmp_path / "log", True), 25_000
    lost, live = put_many(log, 1, count + 1), put_many(log, 2, count)
    log.mark(match(log, lost), range(count + 1), "delete", 5.0)  # more than half of the segment
    before = segment(log).stat().st_size
    with alarms(refuse), pytest.raises(Interrupted):
        if name == "prune":
            log.prune(None, 5.0)
        else:
            put_many(log, 3, count, log.stats()["disk_bytes"])
    assert segment(log).stat().st_size == before
    for opened in (log, PromptLog(log.path, False)):
        assert match(opened, live).length == len(live) and match(opened, lost).length == 0
    assert log.prune(None, 5.0) > before / 3 and log.verify() == []
    assert match(log, live).length == len(live)


def write_sparse(path, data, at=0):
    """Write bytes to a place of a file, without the blocks that are zeros; skip without holes."""
    with path.open("r+b" if path.exists() else "wb") as file:
        for start in range(0, len(data), 4096):
            block = data[start : start + 4096]
            if block.strip(b"\0"):
                file.seek(at + start)
                file.write(block)
        file.truncate(max(at + len(data), os.fstat(file.fileno()).st_size))
        if os.fstat(file.fileno()).st_blocks * 512 > len(data) + at // 2:
            pytest.skip("the file system has no holes")


def test_a_sparse_tail_of_a_tebibyte_is_skipped(tmp_path):
    log = PromptLog(tmp_path / "log", True)
    put(log, KEPT)
    os.truncate(segment(log), 1 << 40)
    began = time.process_time()
    check_usable(PromptLog(log.path, False))
    check_usable(log)
    assert time.process_time() - began < 10 and segment(log).stat().st_size < 1 << 20


def test_a_record_behind_a_hole_of_100_gib_is_found(tmp_path):
    log = PromptLog(tmp_path / "log", True)
    put(log, KEPT)
    end = segment(log).stat().st_size
    put(log, NEW)
    data = segment(log).read_bytes()
    os.truncate(segment(log), end)
    write_sparse(segment(log), data[end:], (100 << 30) + 64 * 5)
    reader = PromptLog(log.path, False)
    assert match(reader, NEW).length == BLOCK
    assert [offset for _, offset, _ in reader.verify()] == [end]


def test_a_payload_with_holes_is_read_as_zeros(tmp_path):
    """The scan skips holes only while it searches for a record, not in the record's payload."""
    log = PromptLog(tmp_path / "log", True)
    part = np.zeros(3 << 20, np.uint8)
    part[:: 1 << 20] = 9
    for tokens in (LOST, KEPT):
        log.put(FINGERPRINT, np.array(tokens), BLOCK, [(0, BLOCK, b"", [part])], None, 5.0)
    data = bytearray(segment(log).read_bytes())
    data[64 + 30] ^= 1  # in the header of the first record
    segment(log).unlink()
    write_sparse(segment(log), bytes(data))
    assert segment(log).stat().st_blocks * 512 < len(data) // 4
    reader, into = PromptLog(log.path, False), np.ones_like(part)
    result = match(reader, KEPT)
    assert result.length == BLOCK and not result.read([(0, 0, into)]) and (into == part).all()
    assert match(reader, LOST).length == 0
    assert [offset for _, offset, _ in reader.verify()] == [64]
