"""A local object store: moto's S3 server behind a proxy that injects faults into requests.

The proxy counts requests and faults by kind. It forwards conditional PUTs one at a time, because
the check and the write of moto are not atomic.
"""

import collections
import http.client
import os
import random
import signal
import socketserver
import subprocess
import sys
import threading
import time

import child
import pytest
from object_server_base import BUCKET, QuietHandler

ERROR_BODY = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>injected</Message></Error>"
HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length", "server", "date"}
CLIENT_TIMEOUT = 0.4  # seconds until a client gives up on a delayed answer

# drop: the request is lost; lost: the answer is lost; late: the request arrives after the client
# has given up; 500, 503: refused; failed: done, but answered by 500; truncated: half of the
# answer's body; duplicate: the request arrives twice
KINDS = ("drop", "lost", "late", "500", "503", "failed", "truncated", "duplicate")


class Faults:
    """Decides which requests fail, and counts them.

    Attributes
    ----------
    requests : int
        Number of requests since `reset`.
    counts : Counter
        Number of injected faults by kind.
    nbytes : Counter
        Bytes of the forwarded requests' answers by method, since `reset`; without headers.
    sent : Counter
        Bytes of the requests by method, since `reset`; without headers, also of failed requests.
    """

    def __init__(self):
        self.counts = collections.Counter()
        self.lock = threading.Lock()
        self.reset()

    def reset(self, choose=lambda number, method, path: None):
        """Start to count requests; `choose` returns the kind of a request's fault, or None."""
        with self.lock:
            self.requests, self.choose = 0, choose
            self.log = []
            self.nbytes, self.sent = collections.Counter(), collections.Counter()

    def add_bytes(self, method, nbytes):
        with self.lock:
            self.nbytes[method] += nbytes

    def take(self, method, path, nbytes):
        with self.lock:
            self.log.append((method, path))
            self.sent[method] += nbytes
            number, self.requests = self.requests, self.requests + 1
        kind = self.choose(number, method, path)
        if kind is not None:
            with self.lock:
                self.counts[kind] += 1
        return kind


def key_of(url):
    return url.removeprefix(f"s3://{BUCKET}/")


def at(number, kind):
    """Inject one fault, into the request with this number."""
    return lambda got, method, path: kind if got == number else None


def since(number, kind):
    """Inject a fault into this and every later request."""
    return lambda got, method, path: kind if got >= number else None


def at_random(seed, rate, kinds=KINDS):
    """Inject faults of random kinds into a share of the requests."""
    source = random.Random(seed)
    return lambda got, method, path: source.choice(kinds) if source.random() < rate else None


class _Handler(QuietHandler):
    def forward(self, body):
        """Send the request to the store; return status, headers and body of its answer."""
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        if self.server.drops_conditions:
            for name in ("If-Match", "If-None-Match"):
                headers.pop(name.lower(), headers.pop(name, None))
        conditional = self.command == "PUT" and {"if-match", "if-none-match"}.intersection(
            name.lower() for name in headers
        )
        lock = self.server.conditional if conditional else threading.Lock()
        with lock:
            upstream = http.client.HTTPConnection(*self.server.target, timeout=60)
            try:
                upstream.request(self.command, self.path, body, headers)
                answer = upstream.getresponse()
                data = answer.read()
                self.server.faults.add_bytes(self.command, len(data))
                return answer.status, answer.getheaders(), data
            finally:
                upstream.close()

    def answer(self, status, headers, body, keep=None):
        """Send an answer; with `keep`, only so many bytes of its body."""
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in HOP_HEADERS:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body if keep is None else body[:keep])

    def refuse(self, status, code):
        self.answer(status, [("Content-Type", "application/xml")], ERROR_BODY % code)

    def handle_one(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = self.server.faults.take(self.command, self.path.partition("?")[0], len(body))
        if kind == "late":
            with self.server.late:
                time.sleep(self.server.late_seconds)
                self.forward(body)
        if kind in ("drop", "late"):
            self.close_connection = True
            return
        if kind in ("500", "503", "403"):
            codes = {"500": b"InternalError", "503": b"SlowDown", "403": b"AccessDenied"}
            self.refuse(int(kind), codes[kind])
            return
        answered = self.forward(body)
        if kind == "duplicate":
            answered = self.forward(body)
        if kind == "lost":
            self.close_connection = True
        elif kind == "failed":
            self.refuse(500, b"InternalError")
        elif kind == "truncated" and answered[2]:
            self.answer(*answered, keep=len(answered[2]) // 2)
            self.close_connection = True
        elif kind == "flipped" and answered[2]:
            status, headers, data = answered
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            self.answer(status, headers, data)
        else:
            self.answer(*answered)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one


class _Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128


class StoreServer:
    """The running store with its proxy; a context manager."""

    def __init__(self):
        server = pytest.importorskip("moto.server", reason="needs moto[server]")
        pytest.importorskip("obstore", reason="needs obstore: mlstate[remote]")
        self.moto = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self.faults = Faults()

    def __enter__(self):
        import logging

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.moto.start()
        target = self.moto.get_host_and_port()
        setup = http.client.HTTPConnection(*target, timeout=60)
        setup.request("PUT", f"/{BUCKET}")
        assert setup.getresponse().status == 200
        setup.close()
        self.proxy = _Proxy(("127.0.0.1", 0), _Handler)
        self.proxy.target, self.proxy.faults = target, self.faults
        self.proxy.conditional = threading.Lock()
        self.proxy.drops_conditions = False
        self.proxy.late, self.proxy.late_seconds = threading.Lock(), 2 * CLIENT_TIMEOUT
        threading.Thread(target=self.proxy.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.proxy.shutdown()
        self.proxy.server_close()
        self.moto.stop()

    def settle(self):
        """Wait until delayed requests have arrived."""
        with self.proxy.late:
            pass

    def requests_of(self, call):
        """Return the number of requests of a call, without a fault."""
        self.faults.reset()
        call()
        return self.faults.requests

    def kill_at(self, number, program, url):
        """Run a program that saves to a URL, and kill it when it sends the request `number`.

        Returns whether it has written a manifest before.
        """
        command = [sys.executable, "-c", program, url, repr(self.options())]
        process = subprocess.Popen(command, env=os.environ | child.PATHS)

        def kill(got, method, path):
            if got == number:
                process.send_signal(signal.SIGKILL)
                return "drop"
            return None

        self.faults.reset(kill)
        assert process.wait(60) == -signal.SIGKILL
        sent = self.faults.log[:number]
        self.faults.reset()
        return any(method == "PUT" and path.endswith("/manifest.json") for method, path in sent)

    def options(self, *, direct=False, timeout=30.0, **more):
        """Return storage_options for the proxy or, with `direct`, for the store itself."""
        host, port = self.moto.get_host_and_port() if direct else self.proxy.server_address
        return {
            "endpoint": f"http://{host}:{port}",
            "region": "us-east-1",
            "access_key_id": "key-of-tests",
            "secret_access_key": "secret-of-tests",
            "client_options": {"allow_http": True, "timeout": f"{int(CLIENT_TIMEOUT * 1000)}ms"},
            "timeout_seconds": timeout,
            **more,
        }

    def direct(self):
        """Return obstore's own view of the bucket, past the proxy."""
        from obstore.store import S3Store

        options = self.options(direct=True)
        names = ("endpoint", "region", "access_key_id", "secret_access_key")
        config = {name: options[name] for name in names}
        return S3Store(BUCKET, config=config, client_options={"allow_http": True})

    def urls(self, url):
        """Return the sizes of all objects below a URL by their URLs."""
        objects = self.direct().list(key_of(url)).collect()
        return {f"s3://{BUCKET}/{entry['path']}": entry["size"] for entry in objects}

    def put(self, url, data):
        """Write an object."""
        self.direct().put(key_of(url), data)

    def get(self, url):
        """Return the bytes of an object."""
        return bytes(self.direct().get(key_of(url)).bytes())
