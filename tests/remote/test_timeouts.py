"""`timeout_seconds` limits the silence of a server; slow links may take longer."""

import errno
import socket
import threading
import time
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import numpy as np
import pytest
from gcs_server import GcsServer
from slow_link import SlowLink
from thread_team import thread_outcomes

import mlstate
from mlstate.checkpoint import CheckpointManager, inspect, prune
from mlstate.checkpoint._folder._remote.object_store import upload_class, upload_seconds
from mlstate.checkpoint._folder._remote.options import take_options
from mlstate.errors import StoreError

pytest.importorskip("obstore", reason="needs obstore: mlstate[remote]")

URL = "s3://bucket/run"
SECONDS = 2.0
START = b"HTTP/1.1 200 OK\r\n"
HEADERS = START + (
    b'Content-Length: 1000000\r\nETag: "a"\r\nLast-Modified: Fri, 01 May 2026 07:00:00 GMT\r\n\r\n'
)


class Silent:
    """A server that accepts connections, sends the same bytes for each request, and stalls."""

    def __init__(self, answer):
        self.answer = answer
        self.connections = []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        try:
            while True:
                self.connections.append(self.listener.accept()[0])
                threading.Thread(
                    target=self.respond, args=(self.connections[-1],), daemon=True
                ).start()
        except OSError:
            pass

    def respond(self, connection):
        received = b""
        try:
            while b"\r\n\r\n" not in received:
                received += connection.recv(1 << 16)
            connection.sendall(self.answer)
        except OSError:
            pass

    def close(self):
        for each in (self.listener, *self.connections):
            each.close()


class Unreachable:
    """A server whose queue of connections is full, so that connecting takes for ever."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.waiting = [socket.socket() for _ in range(4)]
        for each in self.waiting:
            each.setblocking(False)
            each.connect_ex(self.listener.getsockname())

    def close(self):
        for each in (self.listener, *self.waiting):
            each.close()


class Refusing:
    """A port at which nothing listens."""

    def __init__(self):
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))

    def close(self):
        self.listener.close()


SERVERS = {
    "silent": lambda: Silent(b""),
    "stalled headers": lambda: Silent(START),
    "stalled body": lambda: Silent(HEADERS + b"x" * 1000),
    "unreachable": Unreachable,
    "refusing": Refusing,
}
CALLS = {
    "load": lambda options: mlstate.load(URL, storage_options=options),
    "save": lambda options: mlstate.save(URL, {"w": np.ones(100_000)}, storage_options=options),
    "verify": lambda options: mlstate.verify(URL, storage_options=options),
    "inspect": lambda options: inspect(URL, storage_options=options),
    "prune": lambda options: prune(URL, keep=1, storage_options=options),
    "manager": lambda options: CheckpointManager(URL, storage_options=options).restore_latest(),
    "file": lambda options: mlstate.load(f"{URL}/m.safetensors", storage_options=options),
}


def access(address, **more):
    """The options for a server at an address."""
    return {
        "endpoint": "http://{}:{}".format(*address),
        "region": "us-east-1",
        "access_key_id": "key",
        "secret_access_key": "secret",
        **more,
    }


@pytest.fixture(params=SERVERS)
def dead(request):
    """The address of a server that never completes an answer."""
    with closing(SERVERS[request.param]()) as server:
        yield server.listener.getsockname()


@pytest.mark.parametrize("call", ["load", "save"])
def test_a_dead_server_is_an_error_in_time(call):
    def fail(number):
        with closing(list(SERVERS.values())[number]()) as server:
            fail_in_time(server.listener.getsockname(), call)

    outcomes = thread_outcomes(fail, len(SERVERS))  # at once, because each waits for seconds
    assert dict(zip(SERVERS, outcomes, strict=True)) == dict.fromkeys(SERVERS)


@pytest.mark.long
@pytest.mark.parametrize("call", CALLS)
def test_every_call_gives_up_a_dead_server_in_time(dead, call):
    fail_in_time(dead, call)


@contextmanager
def failure_in_time():
    """The block must raise a StoreError in twice the time limit."""
    begin = time.perf_counter()
    with pytest.raises(StoreError) as caught:
        yield caught
    assert time.perf_counter() - begin < 2 * SECONDS


def fail_in_time(address, call, **more):
    """Make a call, which must fail in twice the time limit."""
    more = more or {"client_options": {"allow_http": True}}
    with failure_in_time() as caught:
        CALLS[call](access(address, timeout_seconds=SECONDS, **more))
    assert caught.value.errno in (errno.ETIMEDOUT, errno.ECONNREFUSED, errno.EIO)


def test_the_limit_holds_with_options_of_the_environment(monkeypatch):
    with closing(Silent(b"")) as server:
        fail_in_time(server.listener.getsockname(), "load", allow_http="true")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        options = access(server.listener.getsockname(), timeout_seconds=SECONDS)
        with failure_in_time():
            mlstate.load(URL, storage_options=options)


def test_options_of_the_client_take_precedence():
    with closing(Silent(b"")) as server:
        options = access(
            server.listener.getsockname(), timeout_seconds=SECONDS, read_timeout="200ms",
            client_options={"allow_http": True}, retry_config={"max_retries": 0},
        )  # fmt: skip
        with failure_in_time():
            mlstate.load(URL, storage_options=options)
        assert len(server.connections) > 2


@pytest.fixture
def store():
    """A server of Google's API; see SlowLink for its link."""
    with GcsServer() as server:
        yield server


def linked(server, **limits):
    """A link to the server."""
    place = urlsplit(server.endpoint)
    return SlowLink((place.hostname, place.port), **limits)


def options_of(server, link, **more):
    """The server's options through a link."""
    options = server.options(**more)
    return {
        name: value.replace(server.endpoint, link.endpoint) if isinstance(value, str) else value
        for name, value in options.items()
    }


def test_slow_link_does_not_time_out(store):
    state = {"w": np.random.default_rng(0).normal(size=1 << 18)}  # 2 MiB, twice the limit each way
    with linked(store, up=1 << 20, down=1 << 20) as link:
        options = options_of(store, link, timeout_seconds=1.0)
        mlstate.save("gs://bucket/run", state, storage_options=options)
        loaded = mlstate.load("gs://bucket/run", storage_options=options)
    np.testing.assert_array_equal(loaded.model["w"], state["w"])


def test_silent_server_fails_the_load_within_the_timeout(store):
    state = {"w": np.random.default_rng(0).normal(size=1 << 18)}
    mlstate.save("gs://bucket/run", state, storage_options=store.options())
    with linked(store) as link:
        options = options_of(store, link, timeout_seconds=SECONDS)
        mlstate.load("gs://bucket/run", storage_options=options)
        answer_bytes = link.answered
        for part in (0.2, 0.5, 0.9):
            link.silent_after = link.answered + int(part * answer_bytes)
            with failure_in_time():
                mlstate.load("gs://bucket/run", storage_options=options)
            link.silent_after = None


@pytest.mark.long
@pytest.mark.timeout(300)
def test_64_mb_at_8_mbit_per_second_are_saved_with_the_defaults(store):
    state = {"w": np.random.default_rng(0).normal(size=8_000_000)}
    with linked(store, up=1e6) as link:
        options = options_of(store, link)
        del options["timeout_seconds"]
        mlstate.save("gs://bucket/run", state, storage_options=options)
    loaded = mlstate.load("gs://bucket/run", storage_options=store.options())
    np.testing.assert_array_equal(loaded.model["w"], state["w"])


@pytest.mark.parametrize("part_bytes", [5 << 20, 8 << 20, 64 << 20])
def test_the_time_for_an_upload_grows_with_its_bytes(part_bytes):
    options = take_options({"part_bytes": part_bytes})
    together = part_bytes * options.max_concurrency
    assert upload_seconds(options, part_bytes) > 120 + together / 1e6
    assert upload_class(part_bytes) >= part_bytes
    assert upload_seconds(options, 0) == options.timeout_seconds
