"""Checkpoints in stores other than S3, by local servers that follow their references."""

import errno

import numpy as np
import pytest
from azure_server import AzureServer
from gcs_server import GcsServer
from thread_team import thread_outcomes

import mlstate
from mlstate import checkpoint
from mlstate.checkpoint import CheckpointManager
from mlstate.checkpoint._folder._remote.object_store import engine_reason
from mlstate.checkpoint._store.open_path import open_folder
from mlstate.errors import StoreError, StoreNotFoundError, StorePermissionError

pytest.importorskip("obstore", reason="needs obstore: mlstate[remote]")

SERVERS = {"gcs": GcsServer, "azure": AzureServer}


@pytest.fixture(scope="module", params=SERVERS)
def running(request):
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def server(running):
    """Return a server without objects."""
    running.objects.clear()
    running.log.clear()
    yield running
    running.before_answer = lambda handler: None


@pytest.fixture
def url(server):
    return f"{server.scheme}://bucket/run"


def test_a_state_survives_the_store_and_is_replaced(server, url):
    options = server.options(part_bytes=5 << 20)
    state = {"w": np.random.default_rng(0).normal(size=(1500, 512)), "b": np.ones(3)}
    for step in (1, 2):
        state["b"] = np.full(3, step)
        mlstate.save(url, state, step=step, storage_options=options)
    loaded = mlstate.load(url, storage_options=options)
    assert loaded.step == 2 and loaded.model["b"].tolist() == [2, 2, 2]
    np.testing.assert_array_equal(loaded.model["w"], state["w"])
    part = {"rank": 2, "world_size": 3, "layout": "rows", "storage_options": options}
    np.testing.assert_array_equal(
        mlstate.load(url, names="w", **part).model["w"], state["w"][1000:]
    )
    report = mlstate.verify(url, storage_options=options)
    assert report and not report.leftover and not report.strange
    assert len(server.objects) == 4 and not server.uploads
    listing = checkpoint.inspect(url, storage_options=options)
    assert (listing.step, [record.key for record in listing.tensors()]) == (2, ["b", "w"])


def test_a_manager_keeps_and_prunes_steps(server, url):
    options = server.options(orphan_seconds=1800.0)
    with CheckpointManager(url, storage_options=options) as manager:
        for step in (1, 2, 3):
            manager.save_async(step, {"w": np.full(3, step)}).wait()
        assert manager.steps() == [1, 2, 3]
        orphan = "params/w.0-1.0123456789abcdef-0.safetensors"
        root = server.objects["run/manifest.json"]
        server.objects[f"run/{orphan}"] = root._replace(changed=root.changed - 3600)
        report = checkpoint.prune(url, keep=2, storage_options=options)
        assert orphan in report.files
        assert manager.steps() == [2, 3]
        assert manager.restore_latest().model["w"].tolist() == [3, 3, 3]
    assert len(server.objects) == 2 * 3 + 1


def test_of_two_racing_writers_one_wins(server, url):
    folders = [open_folder(url, server.options()) for _ in range(2)]
    for race in range(3):  # the first one creates the manifest
        claims = [folder.claim() for folder in folders]
        for claim in claims:
            claim.acquire()

        def write(rank, claims=claims):
            claims[rank].commit(b'{"sequence": "%d"}' % rank)

        results = thread_outcomes(write, 2, seconds=30)
        [winner] = [rank for rank in range(2) if results[rank] is None]
        assert results[1 - winner].errno == errno.EBUSY, race
        assert server.objects["run/manifest.json"].data == b'{"sequence": "%d"}' % winner


def test_a_save_that_another_one_overtakes_raises(server, url):
    options = server.options()
    mlstate.save(url, {"w": np.zeros(3)}, storage_options=options)

    def overtake(handler):
        if handler.command == "PUT" and handler.key.endswith(".safetensors"):
            server.before_answer = lambda handler: None
            mlstate.save(url, {"w": np.ones(3)}, storage_options=options)

    server.before_answer = overtake
    with pytest.raises(StoreError, match="another writer has replaced") as caught:
        mlstate.save(url, {"w": np.full(3, 2)}, storage_options=options)
    assert caught.value.errno == errno.EBUSY
    assert mlstate.load(url, storage_options=options).model["w"].tolist() == [1, 1, 1]
    assert not mlstate.verify(url, storage_options=options).leftover


def test_a_lost_answer_to_the_commit_is_settled_by_reading(server, url):
    def lose(handler):
        if handler.command == "PUT" and handler.key == "run/manifest.json":
            server.before_answer = lambda handler: None
            raise ConnectionError

    for step in (1, 2):
        server.before_answer = lose
        mlstate.save(url, {"w": np.full(3, step)}, step=step, storage_options=server.options())
        assert server.before_answer is not lose
    assert checkpoint.inspect(url, storage_options=server.options()).step == 2


def test_an_endpoint_that_ignores_conditions_is_refused(server, url, monkeypatch):
    monkeypatch.setattr(server.handler, "check_conditions", lambda self: None)
    with pytest.raises(StoreError, match="ignores conditions") as caught:
        mlstate.save(url, {"w": np.zeros(3)}, storage_options=server.options())
    assert caught.value.errno == errno.ENOTSUP and not server.objects


def test_missing_objects_may_be_deleted(server, url):
    store = open_folder(url, server.options()).store
    for name in ("a", "c"):
        store.put(name, b"x")
    store.delete(["a", "b", "c"])
    store.delete(["a"])
    assert not server.objects


def test_refused_deletions_raise_at_once(server, url, monkeypatch):
    monkeypatch.setattr(server, "refuses_deletions", True)
    store = open_folder(url, server.options()).store
    for name in ("a", "b"):
        store.put(name, b"x")
    for names in (["a"], ["a", "b"]):
        with pytest.raises(StorePermissionError, match=r"cannot delete .*access denied"):
            store.delete(names)


def test_refused_credentials_raise_without_secrets(server, url):
    name, secret = server.refused
    options = server.options(**{name: secret})
    mlstate.save(url, {"w": np.zeros(3)}, storage_options=server.options())
    for call in (
        lambda: mlstate.load(url, storage_options=options),
        lambda: mlstate.save(url, {"w": np.ones(3)}, storage_options=options),
        lambda: open_folder(url, options).store.delete(["manifest.json", "index"]),
    ):
        with pytest.raises(StorePermissionError, match=r"access denied.*HTTP 403") as caught:
            call()
        assert secret not in f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"
    assert not mlstate.load(url, storage_options=server.options()).model["w"].any()


@pytest.mark.parametrize(("store", "key"), [("GCS", "GOOGLE_"), ("MicrosoftAzure", "AZURE_")])
def test_missing_credentials_name_the_variables_of_the_store(store, key):
    text = f"Generic {store} error: Error performing token request: ... 169.254.169.254"
    reason = engine_reason(OSError(text))
    assert reason.errno == errno.EACCES and key in reason.strerror and "AWS" not in str(reason)


def test_credentials_that_cannot_be_read_are_refused_without_them(server, url):
    name, value = server.unreadable
    with pytest.raises(ValueError, match="a credential cannot be read") as caught:
        mlstate.load(url, storage_options=server.options(**{name: value}))
    assert "hidden" not in str(caught.value)


def test_missing_buckets_and_checkpoints_are_named(server, url):
    options = server.options()
    with pytest.raises(StoreNotFoundError, match=r"object does not exist.*manifest\.json"):
        mlstate.load(url, storage_options=options)
    with pytest.raises(StoreNotFoundError, match="bucket does not exist"):
        mlstate.load(url.replace("bucket", "other"), storage_options=options)
    store = open_folder(url, options).store
    store.put("a", b"xyz")
    assert store.get_range("a", 3, 5) == (b"", 3)
    assert bytes(store.get_range("a", 1, 5)[0]) == b"yz"
