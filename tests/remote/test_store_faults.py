"""Faulty networks and racing writers: the old checkpoint or the new one, never a mixture.

The ordinary run injects a share of the faults; `make faults-store` injects all of them.
"""

import itertools
import os
import warnings
from datetime import timedelta

import numpy as np
import pytest
from interruption import signal_once
from s3_fault_proxy import KINDS, at, at_random, since
from thread_team import calling_in_background, thread_outcomes

import mlstate
from mlstate.checkpoint import CheckpointManager, prune, reshard
from mlstate.checkpoint._store.checkpoint_files import CheckpointFiles
from mlstate.checkpoint._store.open_path import open_folder
from mlstate.errors import FormatError, StoreError

pytestmark = pytest.mark.filterwarnings("ignore:keep=2 deletes steps")

FULL = os.environ.get("MLSTATE_FAULTS") == "all"
STRIDE = 1 if FULL else 17  # of the requests that a test disturbs
RANDOM_FAULTS = 1200 if FULL else 12
RACES = 1000 if FULL else 2
WRITERS = 8


def state_of(number):
    """Return tensors whose elements all are `number`: parts of two states are a mixture."""
    return {"a": np.full(50, number), "b": np.full((300, 9), float(number))}


def number_of(state):
    """Return the number of a state; raise if it is a mixture."""
    numbers = {value for array in state.values() for value in np.unique(array).tolist()}
    assert len(numbers) == 1, f"a mixture of {numbers}"
    return int(numbers.pop())


class Case:
    """One checkpoint, an operation on it, and the number of its requests without a fault."""

    def __init__(self, url, store, run):
        self.url, self.store, self.run = url, store, run
        self.number = self.step = 0
        self.save(store.options(direct=True))

    def save(self, options):
        mlstate.save(self.url, state_of(self.number), storage_options=options)

    def current(self):
        """Return the number of the stored state, read past the proxy."""
        self.store.settle()
        options = self.store.options(direct=True)
        return number_of(mlstate.load(self.url, storage_options=options).model)

    def check_good(self):
        """Check that the checkpoint is complete, and that no orphan is left."""
        report = mlstate.verify(self.url, storage_options=self.store.options(direct=True))
        assert report and not report.leftover and not report.strange, report

    def count(self):
        """Return the number of requests of an undisturbed run."""
        return self.store.requests_of(lambda: self.run(self, self.store.options()))


def save_again(case, options):
    case.number += 1
    case.save(options)


def save_step(case, options):
    case.step += 1
    with CheckpointManager(f"{case.url}/steps", keep=2, storage_options=options) as manager:
        manager.save_async(case.step, state_of(case.step)).wait()
        assert number_of(manager.restore_latest().model) == case.step
        assert manager.steps() == [case.step - 1, case.step][-case.step :]


def load_all(case, options):
    assert number_of(mlstate.load(case.url, storage_options=options).model) == case.number


def load_rows(case, options):
    part = {"names": "b", "layout": "rows", "rank": 1, "world_size": 3}
    loaded = mlstate.load(case.url, storage_options=options, **part).model
    assert loaded["b"].shape == (100, 9)
    assert number_of(loaded) == case.number


def verify_all(case, options):
    assert mlstate.verify(case.url, storage_options=options)


def save_large(case, options):
    """Save a state whose file is uploaded in two parts."""
    large = {"w": np.full(800_000, float(case.number))}
    mlstate.save(f"{case.url}/large", large, storage_options={**options, "part_bytes": 5 << 20})
    loaded = mlstate.load(f"{case.url}/large", storage_options=options)
    assert number_of(loaded.model) == case.number


def reshard_again(case, options):
    """Replace a checkpoint by one that is cut for two ranks."""
    target = f"{case.url}/cut"
    resharded = reshard(case.url, target, layout="rows", world_size=2, overwrite=True,
                   storage_options=options)  # fmt: skip
    assert number_of(resharded.load().model) == case.number
    report = mlstate.verify(target, storage_options=case.store.options(direct=True))
    assert report and not report.leftover, report


OPERATIONS = (save_again, save_step, load_all, load_rows, verify_all, save_large, reshard_again)
CASES = [(run, kind) for run in OPERATIONS for kind in KINDS]
if not FULL:  # every kind for saves, and one kind for each other operation
    CASES = CASES[: len(KINDS)] + CASES[len(KINDS) :: len(KINDS) + 1]


@pytest.mark.parametrize(("run", "kind"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_one_fault_at_any_request_does_no_harm(url, store, run, kind):
    case = Case(url, store, run)
    turn = OPERATIONS.index(run) + 5 * KINDS.index(kind)
    for number in range(turn % STRIDE, case.count(), STRIDE):
        store.faults.reset(at(number, kind))
        run(case, store.options())
        store.faults.reset()
        assert case.current() == case.number
    case.check_good()


@pytest.mark.parametrize("kind", ["drop", "500"])
def test_an_outage_leaves_the_old_or_the_new_checkpoint(url, store, kind):
    case = Case(url, store, save_again)
    for number in range(0, case.count(), STRIDE):
        before = case.number
        store.faults.reset(since(number, kind))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # old objects were not deleted
                save_again(case, store.options(timeout=0.1))
            expected = {before + 1}
        except StoreError:
            expected = {before, before + 1}  # the answer to the commit may be lost
        store.faults.reset()
        assert case.current() in expected
        save_again(case, store.options())
        assert case.current() == case.number
    prune(case.url, storage_options={**store.options(), "orphan_seconds": 0})
    case.check_good()


def test_many_random_faults_do_no_harm(url, store):
    case = Case(url, store, save_again)
    before, seed = sum(store.faults.counts.values()), 0
    while sum(store.faults.counts.values()) - before < RANDOM_FAULTS:
        store.faults.reset(at_random(seed, 0.15))
        for run in (save_again, load_all, save_step, verify_all):
            run(case, store.options(timeout=60.0))
        store.faults.reset()
        assert case.current() == case.number
        seed += 1
    case.check_good()


def test_no_flipped_bit_is_returned(url, store):
    case = Case(url, store, load_all)
    for number in range(case.count()):
        store.faults.reset(at(number, "flipped"))
        with pytest.raises(FormatError):
            load_all(case, store.options())
    store.faults.reset()
    load_all(case, store.options())


PATIENT = {"allow_http": True}  # waits for a busy server instead of sending the bytes again
PART = 5 << 20
SMALL = 1 << 16  # more than all other requests of a save send


def save_in_parts(url, store, choose):
    """Save a file of three parts, one request at a time; return the sent bytes without it."""
    quick = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5)}
    options = store.options(
        part_bytes=PART, max_concurrency=1, client_options=PATIENT,
        retry_config={"backoff": quick},
    )  # fmt: skip
    state = {"w": np.arange(3 * PART // 8 - 1000, dtype=np.float64)}
    store.faults.reset(choose)
    mlstate.save(url, state, storage_options=options)
    sent = sum(store.faults.sent.values()) - state["w"].nbytes
    store.faults.reset()
    loaded = mlstate.load(url, storage_options=store.options(direct=True)).model
    np.testing.assert_array_equal(loaded["w"], state["w"])
    return sent


def of_upload(method, numbers, kind):
    """Inject a fault into some requests with this method for a file of shards."""
    count = itertools.count()

    def choose(number, got, path):
        is_upload = got == method and path.endswith(".safetensors")
        return kind if is_upload and next(count) in numbers else None

    return choose


@pytest.mark.parametrize(("kind", "failures"), [("500", 6), ("drop", 1)])
def test_a_failed_part_is_sent_again_alone(url, store, kind, failures):
    # 6 is more than the engine's repetitions of other requests
    sent = save_in_parts(url, store, of_upload("PUT", range(1, 1 + failures), kind))
    assert failures * PART <= sent <= failures * PART + SMALL


@pytest.mark.parametrize("kind", ["lost", "truncated"])
def test_a_completed_object_is_not_sent_again(url, store, kind):
    # the first POST begins the upload, the second one completes it
    assert save_in_parts(url, store, of_upload("POST", (1,), kind)) <= SMALL


def test_an_interrupted_save_is_continued_by_the_next_one(url, store):
    """Two writers of different states are cut off after one of three objects."""
    state = {name: np.full(1 << 17, float(at)) for at, name in enumerate("abc")}
    nbytes = state["a"].nbytes
    options = store.options(max_concurrency=1, client_options=PATIENT)

    def interrupt(state):
        is_cut = False

        def choose(number, method, path):
            nonlocal is_cut
            is_cut = is_cut or (method == "PUT" and "/params/b." in path)
            return "403" if is_cut else None  # which no writer repeats

        store.faults.reset(choose)
        with pytest.raises(StoreError):
            mlstate.save(url, state, storage_options=options)

    def save_and_count():
        store.faults.reset()
        mlstate.save(url, state, storage_options=options)
        return sum(store.faults.sent.values())

    interrupt(state)
    interrupt({**state, "a": state["a"] + 1})
    assert sum("/params/a." in object_url for object_url in store.urls(url)) == 2
    assert 2 * nbytes <= save_and_count() <= 2 * nbytes + SMALL
    direct = store.options(direct=True, orphan_seconds=0)
    prune(url, storage_options=direct)  # the new checkpoint needs no older object
    loaded = mlstate.load(url, storage_options=direct).model
    assert all((loaded[name] == state[name]).all() for name in state)
    report = mlstate.verify(url, storage_options=direct)
    assert report and not report.leftover
    # after a commit nothing is interrupted
    assert save_and_count() >= 3 * nbytes


def test_a_signal_ends_the_deletion_of_objects_after_an_error(url, store, monkeypatch):
    def refuse_bytes(count):
        raise RuntimeError("enough")

    deleted = []
    monkeypatch.setattr(CheckpointFiles, "discard", lambda *_: deleted.append(True))
    signal_once(monkeypatch, CheckpointFiles, "discard")
    with pytest.raises(KeyboardInterrupt):  # at once: the store may not answer
        mlstate.save(url, state_of(1), progress=refuse_bytes, storage_options=store.options())
    assert not deleted


def test_an_object_that_cannot_be_copied_is_uploaded(url, store):
    folder = open_folder(url, store.options())
    assert not folder.store.copy("params/missing", "params/new", 5)
    store.put(f"{url}/params/old", b"12345")
    assert not folder.store.copy("params/old", "params/new", 6)
    assert folder.store.copy("params/old", "params/new", 5)


CHILD = """
import sys, numpy as np, mlstate
mlstate.save(sys.argv[1], {"a": np.full(50, 9), "b": np.full((300, 9), 9.0)},
             storage_options=eval(sys.argv[2]))
"""


def test_a_killed_writer_leaves_the_old_checkpoint(url, store):
    case = Case(url, store, save_again)
    count = case.count()
    for number in range(count - 1 if FULL else count // 2, 0, -1 if FULL else -count):
        committed = store.kill_at(number, CHILD, url)
        assert case.current() == (9 if committed else case.number)
        save_again(case, store.options())
        assert case.current() == case.number
    prune(case.url, storage_options={**store.options(), "orphan_seconds": 0})
    case.check_good()


def test_readers_never_see_a_mixture(url, store):
    case = Case(url, store, save_again)
    options = store.options(direct=True)
    seen = []

    def read():
        seen.append(number_of(mlstate.load(url, storage_options=options).model))

    with calling_in_background(read, 2):
        for _ in range(100 if FULL else 5):
            save_again(case, options)
    assert len(set(seen)) > 1 or not FULL


def test_of_racing_writers_none_overwrites_another(url, store):
    """Each save that returns follows another: the sequence counts the successful saves."""
    folders = [open_folder(url, store.options(timeout=60.0)).path for _ in range(WRITERS)]
    mlstate.save(folders[0], state_of(0))
    won = 1
    conflicts = 0
    for race in range(RACES):
        if race % 2:  # answers to some conditional writes are lost, or these arrive twice
            store.faults.reset(at_random(race, 0.02, ("lost", "duplicate", "failed")))

        def write(rank, race=race):
            return mlstate.save(folders[rank], state_of(race * WRITERS + rank))

        results = thread_outcomes(write, WRITERS, seconds=120)
        store.faults.reset()
        saved = {r.sequence: i for i, r in enumerate(results) if not isinstance(r, StoreError)}
        lost = [r for r in results if isinstance(r, StoreError)]
        assert all("another writer has replaced" in str(error) for error in lost), lost
        # a writer that another one followed before it read the outcome cannot know that it won
        unsure = sum("after this save had succeeded" in str(error) for error in lost)
        newest = mlstate.checkpoint.inspect(folders[0])
        assert won + len(saved) <= newest.sequence <= won + len(saved) + unsure
        assert len(saved) + len(lost) == WRITERS  # no two saves have the same sequence
        current = number_of(mlstate.load(folders[0]).model)
        if newest.sequence in saved:
            assert current == race * WRITERS + saved[newest.sequence]
        won, conflicts = newest.sequence, conflicts + len(lost)
    assert conflicts
    assert mlstate.verify(folders[0])
