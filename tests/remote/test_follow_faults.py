"""Publishers and followers over a faulty store: one version, the newest, or an exception.

The ordinary run injects a share of the faults; `make faults-store` injects all of them.
"""

import os
import warnings

import pytest
from published_weights import check_version, model_of, zeros
from s3_fault_proxy import KINDS, at, at_random, since

import mlstate
from mlstate.errors import FormatError, StoreError
from mlstate.follow import Follower, Publisher

FULL = os.environ.get("MLSTATE_FAULTS") == "all"
STRIDE = 1 if FULL else 13  # of the requests that a test disturbs
RANDOM_FAULTS = 800 if FULL else 8
READING = [*KINDS, "flipped"][:: 1 if FULL else 3]
WRITING = KINDS[:: 1 if FULL else 3]
pytestmark = pytest.mark.filterwarnings("ignore:old files of the checkpoint were not deleted")


class Case:
    """A publisher and followers of one URL."""

    def __init__(self, url, store):
        self.url, self.store, self.step = url, store, 0
        self.publisher = self.new_publisher()
        self.into = zeros()
        self.follower = Follower(url, into=self.into, storage_options=self.options())
        self.publish()
        self.advance()

    def options(self, **more):
        return self.store.options(**more)

    def new_publisher(self, **more):
        return Publisher(self.url, anchor_every=3, storage_options=self.options(**more))

    def publish(self):
        """Publish the next step, which may raise."""
        self.step += 1
        return self.publisher.publish(self.step, model_of(self.step))

    def advance(self):
        """Advance without faults; the followers, also a new one, have the same newest version."""
        self.store.faults.reset()
        self.store.settle()
        into = zeros()
        new = Follower(self.url, into=into, storage_options=self.store.options(direct=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert self.follower.advance() == new.advance()
        check_version(new, into)
        return check_version(self.follower, self.into)


@pytest.mark.parametrize("kind", READING)
def test_a_fault_of_any_request_of_a_follower_leaves_a_version(url, store, kind):
    case = Case(url, store)
    case.publish()
    count = store.requests_of(lambda: (case.follower.poll(), case.follower.advance()))
    turn = READING.index(kind)
    for number in range(turn % min(STRIDE, count), count, STRIDE):
        case.publish()
        before = case.follower.version
        store.faults.reset(at(number, kind))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                polled = case.follower.poll()
                assert (polled, case.follower.advance()) == (case.step, case.step)
        except (StoreError, FormatError):
            assert case.follower.version == before
        check_version(case.follower, case.into)
        assert case.advance() == case.step


@pytest.mark.parametrize(
    ("disturb", "kind"), [(at, kind) for kind in WRITING] + [(since, "drop"), (since, "500")]
)
def test_a_fault_or_an_outage_from_any_request_of_a_publisher_leaves_a_version(
    url, store, disturb, kind
):
    case = Case(url, store)
    count = max(store.requests_of(case.publish) for _ in range(3))
    turn = 0 if disturb is since else 5 * WRITING.index(kind)
    for number in range(turn % min(STRIDE, count), count, STRIDE):
        if disturb is since:
            case.publisher = case.new_publisher(timeout=0.1)
        before = case.step
        store.faults.reset(disturb(number, kind))
        try:
            case.publish()
            expected = {case.step}
        except StoreError:
            expected = {before, case.step}  # the answer to the commit may be lost
        assert case.advance() in expected
        case.publish()
        assert case.advance() == case.step
    assert mlstate.verify(url, storage_options=store.options(direct=True))


def test_many_random_faults_leave_versions(url, store):
    case = Case(url, store)
    before, seed = sum(store.faults.counts.values()), 0
    while sum(store.faults.counts.values()) - before < RANDOM_FAULTS:
        store.faults.reset(at_random(seed, 0.15))
        try:
            case.publish()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case.follower.advance()
        except (StoreError, FormatError):
            pass
        check_version(case.follower, case.into)
        case.advance()
        seed += 1
    case.publish()
    assert case.advance() == case.step


def test_a_publisher_that_another_one_overtakes_in_a_call_raises(url, store):
    case = Case(url, store)
    other = Publisher(url, storage_options=store.options(direct=True))
    calls = []

    def overtake(number, method, path):
        if method == "PUT" and path.endswith("/manifest.json") and not calls:
            calls.append(other.publish(90, model_of(90)))

    store.faults.reset(overtake)
    with pytest.raises(StoreError, match="another writer"):
        case.publish()
    assert calls == ["anchor"]
    assert case.advance() == 90
    with pytest.raises(StoreError, match="another publisher"):
        case.publish()


CHILD = """
import sys
from mlstate.follow import Publisher
from published_weights import model_of
Publisher(sys.argv[1], storage_options=eval(sys.argv[2])).publish(70, model_of(70))
"""


def test_a_killed_publisher_leaves_a_version(url, store):
    case = Case(url, store)
    count = store.requests_of(case.publish)
    for number in range(count - 1 if FULL else count // 2, 0, -1 if FULL else -count):
        before = case.step
        committed = store.kill_at(number, CHILD, url)
        assert case.advance() == (70 if committed else before)
        case.publisher, case.step = case.new_publisher(), before
        case.publish()
        assert case.advance() == case.step
