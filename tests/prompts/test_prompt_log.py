"""The log of prompt stores: a model lists the records that it must hold."""

import fcntl
import os
import signal
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_model import BLOCK, EXTRA, FINGERPRINT, Model, match, put, wrong_records
from thread_team import run_in_threads

from mlstate._core import PromptLog, crc32c
from mlstate.errors import CapacityError, CompatibilityError, FormatError, StoreError

PROMPTS = st.lists(st.sampled_from([0, 1, 0, 1, EXTRA, 2 * EXTRA]), min_size=0, max_size=18)


@pytest.fixture
def log(tmp_path):
    return PromptLog(tmp_path / "log", True)


def pairs_of(result):
    return [(kind, end) for kind, _, end, _ in result.records]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), PROMPTS, st.integers(0, 18), st.sampled_from([b"A", b"B"])),
        st.tuples(st.just("delete"), PROMPTS, st.just(0), st.sampled_from([b"A", b"B"])),
        st.tuples(st.sampled_from(["reopen", "prune", "lose index"]), *[st.none()] * 3),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(OPERATIONS, st.lists(PROMPTS, min_size=5, max_size=5))
def test_three_handles_hold_the_records_of_the_model(tmp_path_factory, operations, questions):
    folder = tmp_path_factory.mktemp("log") / "log"
    logs = [PromptLog(folder, True) for _ in range(3)]
    model = Model()
    for number, (name, tokens, tail, fingerprint) in enumerate(operations):
        log = logs[number % 3]
        if name == "put":
            tails = [tail] if tail <= len(tokens) else []
            put(log, tokens, tails=tails, fingerprint=fingerprint)
            model.put(tokens, tails, fingerprint)
        elif name == "delete":
            result = match(log, tokens, fingerprint)
            log.mark(result, range(len(result.records)), "delete", 30.0)
            model.delete(tokens, fingerprint)
        elif name == "prune":
            log.prune(None, 30.0)
        elif name == "reopen":
            log.close()
            logs[number % 3] = PromptLog(folder, False)
        elif (folder / "index").exists():
            (folder / "index").unlink()
            logs[number % 3] = PromptLog(folder, False)
    prompts = [tokens for name, tokens, *_ in operations if tokens is not None] + questions
    for tokens in prompts:
        for fingerprint in (b"A", b"B"):
            for log in logs:
                result = match(log, tokens, fingerprint)
                assert pairs_of(result) == model.match(tokens, fingerprint)
                assert wrong_records(result, tokens, fingerprint) == (set(), [])
    assert logs[0].verify() == []
    assert logs[0].stats()["records"] == len(model.stored) == len(logs[1].records())


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(20, 60))
def test_a_budget_is_kept_and_pins_stay(tmp_path_factory, seed, kib):
    folder = tmp_path_factory.mktemp("log") / "log"
    logs = [PromptLog(folder, True) for _ in range(2)]
    random = np.random.default_rng(seed)
    pinned = np.arange(1000, 1000 + 3 * BLOCK)
    put(logs[0], pinned)
    assert logs[0].mark(match(logs[0], pinned), [2], "pin", 30.0) == 1
    for number in range(60):
        log = logs[number % 2]
        tokens = random.integers(0, 3, random.integers(1, 40))
        put(log, tokens, tails=[len(tokens)], max_bytes=kib << 10)
        assert log.stats()["disk_bytes"] <= kib << 10
        files = [path for path in folder.iterdir() if path.name != "used"]
        assert sum(path.stat().st_size for path in files) <= kib << 10
        other = random.integers(0, 3, 30)
        for reader in logs:
            result = match(reader, other)
            assert wrong_records(result, other) == (set(), [])
            result = match(reader, pinned)
            assert result.length == len(pinned) and wrong_records(result, pinned) == (set(), [])
    reopened = PromptLog(folder, False)
    assert match(reopened, pinned).length == len(pinned)
    assert reopened.stats()["pinned"] == 1


def test_least_recently_used_is_evicted_first(tmp_path):
    log, reader = PromptLog(tmp_path / "log", True), None
    big = [np.ones(30_000, np.uint8)]
    for token in range(4):
        log.put(FINGERPRINT, np.full(BLOCK, token), BLOCK, [(0, BLOCK, b"", big)], None, 1.0)
    reader = PromptLog(tmp_path / "log", False)
    assert match(reader, [0] * BLOCK).length == BLOCK  # a use in another process
    done = log.put(FINGERPRINT, np.full(BLOCK, 9), BLOCK, [(0, BLOCK, b"", big)], 130_000, 1.0)
    assert done == [1]
    stored = [token for token in (0, 1, 2, 3, 9) if match(log, [token] * BLOCK).length]
    assert 0 in stored and 9 in stored and 1 not in stored


def test_ancestors_of_a_recent_record_stay_after_a_compaction_and_a_lost_index(tmp_path):
    """The compaction moves the second block behind the third one."""
    log, budget = PromptLog(tmp_path / "log", True), 1 << 20
    chain, older, deleted = list(range(3 * BLOCK)), [77] * BLOCK, [99] * BLOCK

    def store(tokens, size, max_bytes):
        record = (0, len(tokens), b"", [np.ones(size, np.uint8)])
        return log.put(FINGERPRINT, np.array(tokens), BLOCK, [record], max_bytes, 1.0)

    for tokens, size in (
        (chain[:BLOCK], 20_000),
        (older, 32_000),
        (deleted, 35_000),
        (chain[: 2 * BLOCK], 26_000),
        (chain, 20_000),
    ):
        assert store(tokens, size, budget) == [1]
    assert log.mark(match(log, deleted), [0], "delete", 1.0) == 1
    log.close()
    for name in ("index", "used"):
        (tmp_path / "log" / name).unlink(missing_ok=True)
    log = PromptLog(tmp_path / "log", False)
    assert store([33] * BLOCK, 20_000, log.stats()["disk_bytes"] + 4000) == [1]
    assert match(log, chain).length == len(chain)
    assert match(log, older).length == 0


def test_a_record_at_the_end_of_a_block_is_evicted_before_the_block(log):
    """The block is its parent: without it, the record could not be found."""
    tokens = np.arange(BLOCK)
    block, tail, other = (np.ones(size, np.uint8) for size in (1000, 30_000, 20_000))
    records = [(0, BLOCK, b"", [block]), (1, BLOCK, b"", [tail])]
    assert log.put(FINGERPRINT, tokens, BLOCK, records, None, 1.0) == [1, 1]
    record = (0, BLOCK, b"", [other])
    assert log.put(FINGERPRINT, tokens + 9, BLOCK, [record], 35_000, 1.0) == [1]
    assert pairs_of(match(log, tokens)) == [(0, BLOCK)]
    assert log.stats()["records"] == 2


@pytest.mark.parametrize("saves_index", [False, True])
def test_a_record_that_another_process_pins_after_its_eviction_stays(tmp_path, saves_index):
    """The eviction is known to one process only, and the bytes are in the segment."""
    log = PromptLog(tmp_path / "log", True)
    other = PromptLog(tmp_path / "log", False)

    def store(token, size, max_bytes):
        record = (0, BLOCK, b"", [np.ones(size, np.uint8)])
        return log.put(FINGERPRINT, np.full(BLOCK, token), BLOCK, [record], max_bytes, 1.0)

    for token, size in enumerate((6_000, 49_000, 45_000, 10_000, 10_000)):
        assert store(token, size, 1 << 20) == [1]
    assert match(log, [1] * BLOCK).length == BLOCK
    assert other.stats()["records"] == 5
    assert store(9, 20_000, log.stats()["disk_bytes"]) == [1]
    assert match(log, [0] * BLOCK).length == 0
    if saves_index:
        log.prune(None, 1.0)
    assert other.mark(match(other, [0] * BLOCK), [0], "pin", 1.0) == 1
    for handle in (log, PromptLog(tmp_path / "log", False)):
        assert handle.stats()["pinned"] == 1
    log.prune(1000, 1.0)
    for handle in (log, other, PromptLog(tmp_path / "log", False)):
        assert match(handle, [0] * BLOCK).length == BLOCK


def test_a_writer_works_on_after_another_process_deleted_a_segment(tmp_path):
    numbers = np.random.default_rng(0)
    prompts = [numbers.integers(0, 9999, 4) for _ in range(60)]
    first = PromptLog(tmp_path / "log", True)
    for tokens in prompts[:13]:
        put_one(first, tokens, limit=900_000)
    first.prune(900_000, 5.0)  # writes the index
    second = PromptLog(tmp_path / "log", False)  # knows all segments, and has opened none
    limit = second.stats()["disk_bytes"]
    segments = set((tmp_path / "log").glob("seg*"))
    put_one(first, prompts[20], limit=limit - 1)
    assert segments - set((tmp_path / "log").glob("seg*"))
    for tokens in prompts[30:33]:
        put_one(second, tokens, limit=limit - 40_000)
        assert match(second, tokens).length == 4
    second.prune(limit // 2, 5.0)
    assert second.stats()["disk_bytes"] <= limit // 2


def test_an_unpinned_record_does_not_come_back_pinned_after_its_eviction(tmp_path):
    """The segment with the unpin is compacted, the one with the record and the pin is not."""
    log = PromptLog(tmp_path / "log", True)

    def store(token, size, max_bytes=1 << 20):
        record = (0, BLOCK, b"", [np.ones(size, np.uint8)])
        return log.put(FINGERPRINT, np.full(BLOCK, token), BLOCK, [record], max_bytes, 1.0)

    assert store(0, 10_000) == [1]
    seen = match(log, [0] * BLOCK)
    (tmp_path / "log" / "used").write_bytes(b"")  # lose this use
    assert store(1, 45_000) == [1]
    assert log.mark(seen, [0], "pin", 1.0) == 1
    assert store(2, 45_000) == [1]
    assert log.mark(seen, [0], "unpin", 1.0) == 1
    assert store(3, 10_000) == store(4, 10_000) == [1]
    assert match(log, [1] * BLOCK).length == BLOCK
    assert store(9, 20_000, log.stats()["disk_bytes"]) == [1]
    assert match(log, [0] * BLOCK).length == 0
    log.close()
    (tmp_path / "log" / "index").unlink(missing_ok=True)
    log = PromptLog(tmp_path / "log", False)
    assert match(log, [0] * BLOCK).length == BLOCK
    assert log.stats()["pinned"] == 0


def test_record_that_cannot_fit_is_not_stored(log):
    put(log, [1] * BLOCK)
    record = (0, BLOCK, b"", [np.ones(100_000, np.uint8)])
    assert log.put(FINGERPRINT, np.full(BLOCK, 2), BLOCK, [record], 50_000, 1.0) == [-1]
    assert match(log, [1] * BLOCK).length == BLOCK


def test_stored_records_are_not_written_again(log):
    tokens = list(range(3 * BLOCK))
    assert put(log, tokens) == [1, 1, 1]
    size = log.stats()["disk_bytes"]
    assert put(log, tokens) == [0, 0, 0]
    assert log.stats()["disk_bytes"] == size
    assert put(log, [*tokens[: 2 * BLOCK], 7, 7, 7, 7]) == [0, 0, 1]


def test_record_without_its_parent_is_not_stored(log):
    tokens = list(range(3 * BLOCK))
    assert put(log, tokens, ends=[3 * BLOCK]) == [-1]
    assert put(log, tokens, ends=[], tails=[BLOCK + 1]) == [-1]
    assert log.stats()["records"] == 0


def test_record_is_listed_under_one_fingerprint_only(log):
    tokens = list(range(BLOCK))
    put(log, tokens, fingerprint=b"A")
    assert match(log, tokens, b"A").length == BLOCK
    for other in (b"A\0", b"B", b"A" * 32):
        assert match(log, tokens, other).length == 0


def test_dropped_block_heals_when_it_is_stored_again(log):
    tokens = list(range(4 * BLOCK))
    put(log, tokens)
    assert log.mark(match(log, tokens), [1], "drop", 1.0) == 1
    assert match(log, tokens).length == BLOCK
    assert put(log, tokens) == [0, 1, 0, 0]
    assert match(log, tokens).length == len(tokens)


def store_sized(log, tokens, size, *, tails=(), max_bytes=None):
    """Store the blocks of a prompt, and records of kind 1, as `size` bytes each."""
    ends = [(end, 0) for end in range(BLOCK, len(tokens) + 1, BLOCK)] + [(end, 1) for end in tails]
    records = [(kind, end, b"", [np.ones(size, np.uint8)]) for end, kind in sorted(ends)]
    return log.put(FINGERPRINT, np.array(tokens), BLOCK, records, max_bytes, 1.0)


@pytest.mark.parametrize("dropped", [0, 1])
@pytest.mark.parametrize("reopens", [False, True])
def test_a_pin_does_not_protect_a_record_behind_a_dropped_block(log, dropped, reopens):
    """No match finds it, so that nothing could unpin or delete it."""
    tokens = list(range(2 * BLOCK + 1))
    assert store_sized(log, tokens, 20_000, tails=[len(tokens)]) == [1, 1, 1]
    assert log.mark(match(log, tokens), [2], "pin", 1.0) == 1
    log.mark(match(log, tokens), [dropped], "drop", 1.0)
    if reopens:
        log.prune(None, 1.0)  # writes the index
        log = PromptLog(log.path, False)
    for token in range(100, 106):
        assert store_sized(log, [token] * BLOCK, 20_000, max_bytes=70_000) == [1]
    assert log.stats()["pinned"] == 0 and log.stats()["live_bytes"] < 70_000
    assert PromptLog(log.path, False).stats()["pinned"] == 0


def test_pins_behind_a_dropped_block_stay_while_a_put_stores_it_again(log):
    shared = [1] * BLOCK
    pinned, other = shared + [2] * BLOCK, shared + [3] * BLOCK
    for tokens in (pinned, other, *([token] * BLOCK for token in range(100, 106))):
        store_sized(log, tokens, 20_000)
    assert log.mark(match(log, pinned), [1], "pin", 1.0) == 1
    log.prune(log.stats()["disk_bytes"], 1.0)
    for token in range(100, 106):
        assert match(log, [token] * BLOCK).length == BLOCK  # the pinned prompt is older
    limit = log.stats()["disk_bytes"]
    log.mark(match(log, other), [0], "drop", 1.0)
    assert store_sized(log, other + [4] * BLOCK, 20_000, max_bytes=limit - 30_000) == [1, 0, 1]
    assert log.stats()["pinned"] == 1 and match(log, pinned).length == len(pinned)


def test_a_pinned_record_behind_blocks_that_another_process_evicted_stays(tmp_path):
    """The eviction is known to one process only, and the bytes are in the segment."""
    log, limit = PromptLog(tmp_path / "log", True), 1 << 20
    other = PromptLog(tmp_path / "log", False)

    def store(handle, tokens, size, max_bytes=None):
        record = (0, len(tokens), b"", [np.ones(size, np.uint8)])
        return handle.put(FINGERPRINT, np.array(tokens), BLOCK, [record], max_bytes, 1.0)

    chain = list(range(100, 100 + 3 * BLOCK))
    store(log, chain[:BLOCK], 2_000, limit)
    store(log, chain[: 2 * BLOCK], 8_000, limit)
    for token, size in enumerate((45_000, 45_000, 10_000, 10_000)):
        store(log, [token] * BLOCK, size, limit)
    assert match(log, [0] * BLOCK).length == BLOCK
    assert other.stats()["records"] == 6
    assert store(log, [9] * BLOCK, 20_000, log.stats()["disk_bytes"]) == [1]
    assert match(log, chain).length == 0
    assert store(other, chain, 3_000) == [1]
    assert other.mark(match(other, chain), [2], "pin", 1.0) == 1
    for token in range(50, 56):
        store(log, [token] * BLOCK, 20_000, log.stats()["disk_bytes"])
    for handle in (log, other, PromptLog(tmp_path / "log", False)):
        assert match(handle, chain).length == len(chain)
        assert handle.stats()["pinned"] == 1


@pytest.mark.parametrize("saved", [False, True])
def test_all_handles_see_the_tail_behind_a_block_that_was_stored_again(log, saved):
    tokens = list(range(2 * BLOCK + 2))
    put(log, tokens, tails=[len(tokens)])
    reader = PromptLog(log.path, False)
    log.mark(match(log, tokens), [1], "drop", 1.0)
    if saved:
        log.prune(None, 1.0)  # writes the index
    assert put(log, tokens, tails=[len(tokens)]) == [0, 1, 0]
    for handle in (log, reader, PromptLog(log.path, False)):
        assert pairs_of(match(handle, tokens)) == [(0, 4), (0, 8), (1, 10)]


@pytest.mark.parametrize("threads", [1, 4])
def test_strided_arrays_are_stored_and_filled_in_c_order(log, threads):
    random = np.random.default_rng(3)
    cache = random.standard_normal((3, 40, 700)).astype(np.float16)
    parts = [
        cache[:, 4:8], cache[:, :, 5:9], cache[:, ::-1, ::2], cache.T, cache[0:0], cache[1, 2, 3],
        cache.astype(">f2"),
    ]  # fmt: skip
    log.put(FINGERPRINT, np.arange(BLOCK), BLOCK, [(0, BLOCK, b"", list(parts))], None, 1.0)
    result = match(log, range(BLOCK))
    assert result.parts(0) == tuple(part.nbytes for part in parts)
    for number, part in enumerate(parts):
        packed = np.zeros(part.shape, np.float16)
        spaced = np.zeros((*part.shape, 2), np.float16)[..., 0]
        turned = np.zeros(part.shape[::-1], np.float16).T
        wide = np.zeros((*part.shape[:-1], 900), np.float16)
        rows = wide[..., : part.shape[-1]] if part.ndim else packed
        requests = [(0, number, array) for array in (packed, spaced, turned, rows)]
        assert result.read(requests) == []
        for array in (packed, spaced, turned, rows):
            np.testing.assert_array_equal(array, part)
        assert not (part.ndim and wide[..., part.shape[-1] :].any())


def test_match_outlives_pruning_and_the_log(tmp_path):
    log = PromptLog(tmp_path / "log", True)
    tokens = list(range(3 * BLOCK))
    put(log, tokens)
    result = match(log, tokens)
    assert log.mark(result, [0, 1, 2], "delete", 1.0) == 3
    log.prune(0, 1.0)
    assert PromptLog(tmp_path / "log", False).stats()["records"] == 0
    log.close()
    assert wrong_records(result, tokens) == (set(), [])
    result.close()
    with pytest.raises(ValueError, match="closed"):
        result.meta(0)


def test_a_match_reaches_adjacent_blocks_of_one_description_and_size(log):
    lengths = [8, 8, 8, 4, 8]  # bytes; the description of each block has them after "b"
    records = [
        (0, BLOCK * n, b"b%d %d" % (size, n), [np.zeros(size, np.uint8)])
        for n, size in enumerate(lengths, 1)
    ]
    records.insert(1, (1, BLOCK + 2, b"state", [np.zeros(3, np.uint8)]))
    assert log.put(b"m", np.arange(5 * BLOCK), BLOCK, records, None, 1.0) == [1] * 6
    result = log.match(b"m", np.arange(5 * BLOCK), BLOCK)
    assert result.heads == ((0, 0, 0, BLOCK), (1, 1, BLOCK, BLOCK + 2))
    reached = [("b", 2, 3), ("b8", 2, 3), ("b8 1", 2, 1), ("b4", 2, 0), ("b", 1, 0), ("b", -2, 0)]
    for prefix, token_bytes, blocks in reached:
        assert result.reach(prefix.encode(), token_bytes) == blocks * BLOCK
    result.close()
    assert [record[3] for record in result.records] == [8, 3, 8, 8, 4, 8]
    with pytest.raises(ValueError, match="closed"):
        result.reach(b"b", 2)


def test_wrong_arguments_are_refused_and_leave_the_log_empty(log):
    good = np.arange(BLOCK)
    block = [(0, BLOCK, b"", [])]
    wrong = [
        ((b"", good, BLOCK, block), ValueError),
        ((b"x" * 33, good, BLOCK, block), ValueError),
        (("x", good, BLOCK, block), TypeError),
        ((b"x", good.astype(float), BLOCK, block), CompatibilityError),
        ((b"x", good.astype(np.int16), BLOCK, block), CompatibilityError),
        ((b"x", good.reshape(2, 2), BLOCK, block), CompatibilityError),
        ((b"x", good - 1, BLOCK, block), ValueError),
        ((b"x", good + 2**32, BLOCK, block), ValueError),
        ((b"x", good, 0, block), ValueError),
        ((b"x", good, 2**17, block), ValueError),
        ((b"x", good, BLOCK, [(0, BLOCK - 1, b"", [])]), ValueError),
        ((b"x", good, BLOCK, [(0, 2 * BLOCK, b"", [])]), ValueError),
        ((b"x", good, BLOCK, [(1, BLOCK + 1, b"", [])]), ValueError),
        ((b"x", good, BLOCK, [(256, 1, b"", [])]), ValueError),
        ((b"x", good, BLOCK, [(0, BLOCK, "text", [])]), TypeError),
        ((b"x", good, BLOCK, [(0, BLOCK, b"", [None])]), TypeError),
        ((b"x", good, BLOCK, [(0, BLOCK, b"m" * (1 << 20 | 1), [])]), ValueError),
        ((b"x", good, BLOCK, [3]), TypeError),
    ]
    for arguments, error in wrong:
        with pytest.raises(error):
            log.put(*arguments, None, 1.0)
    with pytest.raises(ValueError, match="negative"):
        log.put(b"x", good, BLOCK, block, -1, 1.0)
    assert log.stats()["records"] == 0
    put(log, good)
    result = match(log, good)
    size = result.parts(0)[0]
    for request, error in [
        ((1, 0, np.zeros(size, np.uint8)), IndexError),
        ((0, 9, np.zeros(size, np.uint8)), IndexError),
        ((0, 0, np.zeros(size + 1, np.uint8)), (CompatibilityError, CapacityError)),
        ((0, 0, b"x" * size), (TypeError, ValueError)),
    ]:
        with pytest.raises(error):
            result.read([request])
    with pytest.raises(ValueError, match="unknown operation"):
        log.mark(result, [0], "erase", 1.0)


def test_second_writer_waits_and_then_names_the_lock(tmp_path):
    log = PromptLog(tmp_path / "log", True)
    with (tmp_path / "log" / "store").open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="another process or thread") as caught:
            put(log, [1] * BLOCK, timeout=0.05)
        assert caught.value.errno == 16
        timer = threading.Timer(0.1, fcntl.flock, (other, fcntl.LOCK_UN))
        timer.start()
        assert put(log, [1] * BLOCK, timeout=30.0) == [1]
        timer.join()


class Interrupt(Exception):
    """Raised by a signal."""


@pytest.fixture
def interrupt():
    """A function that raises Interrupt in the main thread, after some seconds."""

    def handle(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handle)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_signal_ends_the_wait_for_the_lock(log, interrupt):
    with Path(log.path, "store").open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        interrupt(0.05)
        with pytest.raises(Interrupt):
            put(log, [1] * BLOCK, timeout=600.0)
    assert put(log, [1] * BLOCK) == [1]


def test_a_signal_stops_a_put_and_leaves_the_log_unchanged(log, interrupt):
    put(log, [1] * BLOCK)
    before = log.stats()
    parts = [np.ones(8 << 20, np.uint8)] * 400
    interrupt(0.02)
    with pytest.raises(Interrupt):
        log.put(FINGERPRINT, np.full(BLOCK, 2), BLOCK, [(0, BLOCK, b"", parts)], None, 1.0)
    after = log.stats()
    assert all(after[name] == before[name] for name in ("records", "blocks", "live_bytes"))
    assert sum(path.stat().st_size for path in Path(log.path).iterdir()) < 10_000
    assert put(log, [2] * BLOCK) == [1]
    assert match(log, [2] * BLOCK).length == BLOCK


def test_threads_share_one_log(log):
    def work(number):
        random = np.random.default_rng(number)
        for _ in range(40):
            tokens = random.integers(0, 2, 20)
            if random.random() < 0.3:
                put(log, tokens, tails=[18])
            elif random.random() < 0.05:
                log.prune(random.integers(20_000, 100_000), 30.0)
            result = match(log, tokens)
            assert wrong_records(result, tokens) == (set(), [])

    run_in_threads(work, 6)
    assert log.verify() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_child_of_a_fork_uses_the_log(log):
    put(log, [1] * BLOCK)
    child = os.fork()
    if child == 0:
        try:
            good = match(log, [1] * BLOCK).length == BLOCK and put(log, [2] * BLOCK) == [1]
        except BaseException:
            good = False
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert match(log, [2] * BLOCK).length == BLOCK


def test_folder_without_a_store_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FormatError, match="not empty"):
        PromptLog(tmp_path, True)
    with pytest.raises(FormatError, match="no file `store`"):
        PromptLog(tmp_path, False)
    with pytest.raises(StoreError):
        PromptLog(tmp_path / "missing", False)
    with pytest.raises(StoreError):
        PromptLog(tmp_path / "file", True)


def test_read_only_store_is_read_and_not_written(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everything")
    log = PromptLog(tmp_path / "log", True)
    put(log, [1] * BLOCK)
    for path in (*(tmp_path / "log").iterdir(), tmp_path / "log"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    reader = PromptLog(tmp_path / "log", True)
    assert match(reader, [1] * BLOCK).length == BLOCK
    with pytest.raises(PermissionError, match="only be read"):
        put(reader, [2] * BLOCK)
    (tmp_path / "log").chmod(0o755)


def test_a_key_is_not_believed_without_the_tokens(log):
    """Records with the same key but other tokens, as a collision would have."""
    put(log, [1] * BLOCK)
    path = Path(log.path, "segment-00000001")
    data = bytearray(path.read_bytes())
    length = struct.unpack_from("<I", data, 64 + 8)[0]
    struct.pack_into("<I", data, 64 + 128, 9)  # the first token of the first record
    struct.pack_into("<I", data, 64 + 4, crc32c(bytes(data[64 + 8 : 64 + length])))
    with path.open("r+b") as file:
        file.write(data)
    result = match(log, [1] * BLOCK)
    assert result.length == 0
    assert len(result.damage) == 1 and "segment-00000001, offset 64" in result.damage[0]


SEGMENT = 1 << 20  # a budget whose segments have 64 KiB


def put_one(log, tokens, kind=0, size=20_000, limit=SEGMENT):
    """Store one record of `size` bytes that ends with the tokens."""
    items = [(kind, len(tokens), b"", [np.ones(size, np.uint8)])]
    return log.put(FINGERPRINT, np.asarray(tokens), BLOCK, items, limit, 30.0)


@pytest.mark.parametrize(("kind", "more"), [(1, 2), (0, BLOCK)])
def test_record_that_was_moved_before_its_parent_stays_below_it(tmp_path, kind, more):
    log, first = PromptLog(tmp_path / "log", True), [1] * BLOCK
    longer = first + [2] * more
    put_one(log, first)
    put_one(log, [7] * BLOCK, size=40_000)  # the rest of segment 1
    put_one(log, longer, kind)
    put_one(log, [8] * BLOCK, size=40_000)  # the rest of segment 2
    put_one(log, [9] * BLOCK, size=60_000)
    assert log.mark(match(log, longer), [1], "pin", 30.0) == 1
    for token in (8, 7):  # segment 2 is compacted before segment 1
        assert log.mark(match(log, [token] * BLOCK), [0], "delete", 30.0) == 1
    (tmp_path / "log" / "index").unlink(missing_ok=True)
    log = PromptLog(tmp_path / "log", False)
    assert pairs_of(match(log, longer)) == [(0, BLOCK), (kind, len(longer))]
    log = PromptLog(tmp_path / "log", False)
    log.prune(0, 30.0)
    assert pairs_of(match(log, longer)) == [(0, BLOCK), (kind, len(longer))]
    assert log.mark(match(log, first), [0], "delete", 30.0) == 0  # a record hangs on it


def test_moved_records_keep_their_recency_if_the_index_is_old(tmp_path):
    log = PromptLog(tmp_path / "log", True)
    for token in range(6):
        put_one(log, [token] * BLOCK, size=20_000 if token == 0 else 40_000)
    match(log, [0] * BLOCK)
    log.prune(None, 30.0)  # writes the index
    assert log.mark(match(log, [1] * BLOCK), [0], "delete", 30.0) == 1  # moves record 0
    log = PromptLog(tmp_path / "log", False)
    log.prune(150_000, 30.0)
    kept = {token for token in range(6) if match(log, [token] * BLOCK).length}
    assert 0 in kept and 2 not in kept


def test_index_is_written_to_the_store_after_a_change_of_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = PromptLog("log", True)
    put(log, [1] * BLOCK)
    (tmp_path / "other" / "log").mkdir(parents=True)
    monkeypatch.chdir("other")
    log.prune(None, 30.0)
    assert not list((tmp_path / "other" / "log").iterdir())
    assert (tmp_path / "log" / "index").exists()


def test_stored_record_is_not_evicted_for_the_others_of_its_put(log):
    longer = np.arange(7 * BLOCK)
    big = [np.ones(12_000, np.uint8)]
    tail = (1, 2, b"", big)
    assert log.put(FINGERPRINT, longer, BLOCK, [tail], None, 30.0) == [1]
    items = [tail, *((0, end, b"", big) for end in range(BLOCK, 29, BLOCK))]
    results = log.put(FINGERPRINT, longer, BLOCK, items, 80_000, 30.0)
    assert results[0] == 0 and -1 in results
    assert pairs_of(match(log, longer))[0] == (1, 2)


def test_one_put_stores_ten_thousand_records(log):
    tokens = np.arange(10_000)
    items = [(0, end, b"", []) for end in range(1, 10_001)]
    assert log.put(FINGERPRINT, tokens, 1, items, None, 30.0) == [1] * 10_000
    assert log.put(FINGERPRINT, tokens, 1, items, None, 30.0) == [0] * 10_000
    assert log.match(FINGERPRINT, tokens, 1).length == 10_000
    items = [(0, end, b"", []) for end in range(2, 10_001)]
    assert log.put(b"other", tokens, 1, items, None, 30.0) == [-1] * 9_999


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_threads_of_a_forked_child_use_the_log_at_once(log):
    put(log, [1] * BLOCK)
    children = []
    for _ in range(20):
        child = os.fork()
        if child == 0:
            lengths = []
            try:
                lengths = run_in_threads(lambda _: match(log, [1] * BLOCK).length, 4, seconds=30)
            finally:
                os._exit(0 if lengths == [BLOCK] * 4 else 1)
        children.append(child)
    assert {os.waitpid(child, 0)[1] for child in children} == {0}


@pytest.mark.parametrize("operation", ["put", "prune", "repair"])
def test_the_next_writer_deletes_the_temporary_file_of_a_killed_one(log, operation):
    names = [".mlstate-0123456789abcdef.tmp", ".mlstate-notes.tmp", ".mlstate-0123456789abcdef"]
    for name in names:
        Path(log.path, name).write_bytes(b"x")
    match(log, [1] * BLOCK)
    assert Path(log.path, names[0]).exists()  # a reader deletes nothing
    if operation == "put":
        put(log, [1] * BLOCK)
    elif operation == "prune":
        log.prune(None, 1.0)
    else:
        log.repair(1.0)
    assert sorted(p.name for p in Path(log.path).glob(".*")) == sorted(names[1:])


def put_bytes(log, number, size, value=0):
    """Put one token with `size` bytes; segments have 64 KiB."""
    tokens, data = np.array([number], np.uint32), np.full(size, value, np.uint8)
    log.put(FINGERPRINT, tokens, 1, [(0, 1, b"", [data])], 1 << 20, 30.0)


def delete_token(log, number):
    result = log.match(FINGERPRINT, np.array([number], np.uint32), 1)
    log.mark(result, range(len(result.records)), "delete", 30.0)
    result.close()


def stored_length(log, number):
    result = log.match(FINGERPRINT, np.array([number], np.uint32), 1)
    result.close()
    return result.length


def test_compactions_do_not_restore_a_deleted_record(tmp_path):
    log = PromptLog(tmp_path / "log", True)
    put_bytes(log, 1, 50_000)
    put_bytes(log, 7, 1000, 11)  # the first copy, in segment 1
    put_bytes(log, 2, 40_000)
    delete_token(log, 7)  # its note is in segment 2
    put_bytes(log, 3, 40_000)
    put_bytes(log, 7, 1000, 22)  # the second copy, in segment 3
    delete_token(log, 2)  # compacts segment 2
    delete_token(log, 7)  # its note is in segment 3
    put_bytes(log, 4, 40_000)
    delete_token(log, 3)  # compacts segment 3
    assert stored_length(log, 7) == 0
    log.close()
    assert stored_length(PromptLog(tmp_path / "log", False), 7) == 0
