"""What the local servers of object stores share: objects by key, ranges, pages of a list.

Each subclass of `ObjectHandler` answers as one store documents it. The servers implement only the
requests that mlstate sends, keep all objects in memory, and check conditions under one lock.
"""

import collections
import contextlib
import itertools
import re
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

PAGE = 3  # entries in one answer to a list request, so that most lists have several pages
BUCKET = "bucket"

Stored = collections.namedtuple("Stored", "data number e_tag changed")


class RefusalError(Exception):
    """An answer with a status and the store's error code."""

    def __init__(self, status, code):
        super().__init__(code)
        self.status, self.code = status, code


def xml(name, text):
    """Return an element without escapes: names of checkpoints need none."""
    return f"<{name}>{text}</{name}>".encode()


class QuietHandler(BaseHTTPRequestHandler):
    """Logs nothing, and ends without an error when the client leaves."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def handle(self):
        with contextlib.suppress(ConnectionError, TimeoutError, ValueError):
            super().handle()


class ObjectHandler(QuietHandler):
    """Reads a request, calls `answer_request`, and answers errors as XML."""

    def handle_one(self):
        url = urlsplit(self.path)
        bucket, _, self.key = unquote(url.path)[1:].partition("/")
        self.query = dict(parse_qsl(url.query, keep_blank_values=True))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.log.append((self.command, self.key))
        try:
            self.check_credentials()
            if bucket != BUCKET:
                raise RefusalError(404, self.no_bucket)
            with self.server.lock:
                status, headers, body = self.answer_request()
        except RefusalError as error:
            # a real answer names the caller's credentials in some of its texts
            secret = self.headers.get("Authorization", "")
            text = f"<Code>{error.code}</Code><Message>{secret}</Message>"
            status, headers, body = error.status, {}, xml("Error", text)
        self.server.before_answer(self)
        self.send_response_only(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

    def found(self):
        """Return the object of the request."""
        if self.key not in self.server.objects:
            raise RefusalError(404, self.no_object)
        return self.server.objects[self.key]

    def read(self):
        """Answer a GET or HEAD, with the bytes of a range if one is given."""
        stored = self.found()
        headers, data, total = self.headers_of(stored), stored.data, len(stored.data)
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not byte_range:
            return 200, {**headers, "Content-Length": total}, data
        begin, end = int(byte_range[1]), min(int(byte_range[2]) + 1, total)
        if begin >= total:
            raise RefusalError(416, "InvalidRange")
        return (
            206,
            {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{total}"},
            data[begin:end],
        )

    def write(self, data):
        """Store an object; return it."""
        number = next(self.server.numbers)
        stored = Stored(data, number, self.e_tag_of(data, number), time.time())
        self.server.objects[self.key] = stored
        return stored

    def page(self, token):
        """Return keys and common prefixes below the query's prefix, and the next page's token."""
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        listed = set()
        for key in self.server.objects:
            if key.startswith(prefix):
                head, cut, _ = key[len(prefix) :].partition(delimiter or "\0")
                listed.add(prefix + head + cut if delimiter else key)
        names, at = sorted(listed), int(self.query.get(token, 0))
        keys = [name for name in names[at : at + PAGE] if name in self.server.objects]
        folders = [name for name in names[at : at + PAGE] if name not in self.server.objects]
        return keys, folders, str(at + PAGE) if at + PAGE < len(names) else ""

    def headers_of(self, stored):
        return {"ETag": stored.e_tag, "Last-Modified": formatdate(stored.changed, usegmt=True)}


class ObjectServer(ThreadingHTTPServer):
    """A running server with one bucket; a context manager.

    Attributes
    ----------
    objects : dict
        The stored objects by key.
    log : list
        Method and key of each request.
    refuses_deletions : bool
        Whether deletions, also within a batch, are refused by 403.
    """

    daemon_threads = True
    request_queue_size = 128
    handler: type
    refuses_deletions = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.handler)
        self.objects, self.uploads, self.log = {}, {}, []
        self.lock, self.numbers = threading.Lock(), itertools.count(1_700_000_000_000_000)
        self.before_answer = lambda handler: None  # a test may act here
        self.endpoint = "http://{}:{}".format(*self.server_address)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def options(self, **more):
        """Return storage_options for this server."""
        client = {"client_options": {"allow_http": True}, "timeout_seconds": 10.0}
        return {**self.access(), **client, **more}
