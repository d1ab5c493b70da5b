"""A local S3 server (moto) in another process, which counts requests and bytes.

Bytes are counted in the bodies of requests and answers, without headers.
"""

from __future__ import annotations

import collections
import logging
import threading
import urllib.request
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from processes import Processes, answer

BUCKET = "bucket"


def storage_options(endpoint: str) -> dict[str, Any]:
    """Return the options for a client of the server at `endpoint`."""
    return {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": "key",
        "secret_access_key": "secret",
        "client_options": {"allow_http": True},
    }


class CountingApplication:
    """A WSGI application that counts another one's requests and bytes."""

    def __init__(self, application: Callable[..., Any]) -> None:
        self.application = application
        self.lock = threading.Lock()
        self.counts: collections.Counter[str] = collections.Counter()

    def add(self, **more: int) -> None:
        with self.lock:
            self.counts.update(more)

    def take(self) -> dict[str, int]:
        """Return the counts since the last call."""
        with self.lock:
            counts, self.counts = self.counts, collections.Counter()
        return dict(counts)

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterator[bytes]:
        self.add(**{environ["REQUEST_METHOD"]: 1})
        self.add(sent=int(environ.get("CONTENT_LENGTH") or 0))
        for data in self.application(environ, start):
            self.add(received=len(data))
            yield data


def serve(pipe: Connection) -> None:
    """Serve until the pipe is closed."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = CountingApplication(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    answer(pipe, {"port": lambda: server.server_port, "take": application.take})


class RemoteServer(Processes):
    """The running server, with an empty bucket."""

    def __init__(self) -> None:
        super().__init__(serve, [()])
        self.endpoint = f"http://127.0.0.1:{self.ask('port')[0]}"
        self.reset()

    def reset(self) -> None:
        """Remove all objects, and make the bucket."""
        for method, path in (("POST", "moto-api/reset"), ("PUT", BUCKET)):
            request = urllib.request.Request(f"{self.endpoint}/{path}", method=method)
            urllib.request.urlopen(request).close()

    def take(self) -> dict[str, int]:
        """Return the requests by method, and the bytes that clients sent and received.

        The counts begin at the last call.
        """
        counts: dict[str, int] = self.ask("take")[0]
        return counts
