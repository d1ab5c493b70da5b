"""Requests to S3, Google Cloud Storage, Azure: retries, timeouts, credentials, errors.

Only this file knows obstore, "the engine": how a store is opened, its requests, and its errors.

Keys are relative to the checkpoint's URL. Requests that change nothing, or that may be repeated,
are repeated until the total timeout. A silent server ends a request; an upload has the more time
the more bytes it sends. Conditional writes are not repeated here: the caller settles
their outcome (root_claim.py).
"""

from __future__ import annotations

import errno
import os
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ...._common.store_error import store_error
from ....errors import StoreError
from .options import CLIENT_KEYS, StoreOptions

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Collection, Iterator
    from typing import TypeVar

    _Result = TypeVar("_Result")

# of errors after which a later attempt may succeed
RETRIED = {errno.EIO, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.EAGAIN}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0  # seconds between attempts
_ONCE = 0.0  # seconds: a request is not repeated
_BROKEN = "the answer was not complete"
# The engine repeats failed parts of large objects until the timeout; this package repeats
# everything else.
_ENGINE_RETRIES = 0
_PART_RETRIES = 1 << 20
_LEAST_SILENCE = 1.0  # seconds without a byte of an answer, after which a request is repeated
_MOST_CONNECT = 5.0  # seconds to connect
_NO_LIMIT = 86400.0  # seconds of a request that is limited by its silence
_SMALL = 16 << 10  # bytes of a request that fit into the buffers of a connection
_LEAST_RATE = 512 << 10  # bytes per second of all simultaneous uploads together


class Tag(NamedTuple):
    """The identity of an object's content: its ETag, its version, or both."""

    e_tag: str | None
    version: str | None


_NO_TAG = Tag('"0x1"', "1")  # in the form of Azure and of Google; no object has it


class ObjectInfo(NamedTuple):
    """Size in bytes, time of the last change (seconds since 1970) and tag of an object."""

    nbytes: int
    changed: float
    tag: Tag


def _info_of(answer: Any) -> ObjectInfo:
    tag = Tag(answer["e_tag"], answer["version"])
    return ObjectInfo(answer["size"], answer["last_modified"].timestamp(), tag)


def upload_class(nbytes: int) -> int:
    """Return the largest size of the uploads that share the time limit of `nbytes` bytes."""
    size = _SMALL
    while size < nbytes:
        size *= 8  # few sizes, because each needs a client of its own
    return size


def upload_seconds(options: StoreOptions, nbytes: int) -> float:
    """Return the time limit of a request that sends `nbytes` bytes, without repetitions.

    The engine does not count sent bytes as progress. So the limit grows with the bytes of all
    requests that share the connection to the store.
    """
    return options.timeout_seconds + nbytes * options.max_concurrency / _LEAST_RATE


class Attempts:
    """The repetitions of one request, for `seconds` in all; pauses grow, with jitter."""

    def __init__(self, seconds: float, retried: Collection[int] = RETRIED) -> None:
        self._end = time.monotonic() + seconds
        self._retried = retried
        self._longest = _FIRST_PAUSE

    def wait(self, number: int | None) -> bool:
        """Pause before the next attempt, and return True; return False at once to give up.

        `number`: errno of the last error. Gives up if it is not in `retried`, or the time is over.
        """
        import random

        pause = self._longest * random.uniform(0.5, 1.0)
        if number not in self._retried or time.monotonic() + pause > self._end:
            return False
        time.sleep(pause)
        self._longest = min(2 * self._longest, _LONGEST_PAUSE)
        return True


class ObjectStore:
    """The objects below one URL, such as ``s3://bucket/run``; keys are relative to it.

    A request that fails raises StoreError, which is a FileNotFoundError too for a missing object.
    """

    def __init__(self, url: str, options: StoreOptions) -> None:
        """Create the client of a store for the folder at `url`; sends no request."""
        self.url = url
        self.timeout = options.timeout_seconds
        self._options = options
        self._engine, self._store = _open_engine(url, options)
        # stores of the engine for uploads, by `upload_class` and whether failed parts are repeated
        self._uploads: dict[tuple[int, bool], Any] = {(upload_class(0), False): self._store}
        self._has_conditions = False  # whether the endpoint is known to honour them
        self._pid = os.getpid()

    # ---- requests ----

    def _send(
        self, action: str, key: str, request: Callable[[], _Result], seconds: float | None = None
    ) -> _Result:
        """Call `request` until it succeeds, and return its result.

        `key`: the object, for errors. It is repeated for `seconds` (None: the timeout) after errors
        in `RETRIED`. `action`: text of the StoreError that is raised instead of the engine's error,
        which may hold credentials. Raises StoreError (EINVAL) in a forked process.
        """
        path = f"{self.url}/{key}" if key else self.url
        if self._pid != os.getpid():
            text = "this process is a fork, where the engine does not work: start it by spawn"
            raise store_error(OSError(errno.EINVAL, text), action, path)
        attempts = Attempts(self.timeout if seconds is None else seconds)
        while True:
            try:
                return request()
            except Exception as error:
                if not _is_engine_error(error):
                    raise
                failed = store_error(engine_reason(error), action, path)
            if not attempts.wait(failed.errno):
                raise failed  # outside the handler, so that the engine's text is not its context

    # ---- reading ----

    def get(self, key: str, most: int) -> tuple[bytes, Tag]:
        """Return the bytes of an object, and the tag of exactly this content.

        Raises ValueError, and reads nothing, if it has more than `most` bytes.
        """

        def request() -> tuple[bytes, Tag] | None:
            """Return bytes and tag; None if the object has more than `most` bytes."""
            answer = self._engine.get(self._store, key)
            nbytes = answer.meta["size"]
            if nbytes > most:
                return None
            data = bytes(answer.bytes())
            if len(data) != nbytes:
                raise OSError(errno.EIO, _BROKEN)
            return data, Tag(answer.meta["e_tag"], answer.meta["version"])

        content = self._send("cannot read the object", key, request)
        if content is None:
            raise ValueError("too long")
        return content

    def get_range(self, key: str, begin: int, end: int, tag: Tag | None = None) -> tuple[Any, int]:
        """Return bytes `begin` to `end` of an object as a buffer, and the size of the whole object.

        The buffer is shorter if the object ends earlier, and empty if it ends at `begin` or before.
        Raises StoreNotFoundError if the object no longer has the ETag of `tag`.
        """

        def request() -> tuple[object, int, str | None]:
            """Return bytes, size of the object, and its ETag; raise for an incomplete answer."""
            answer = self._engine.get(self._store, key, options={"range": (begin, end)})
            data, nbytes = answer.bytes(), answer.meta["size"]
            if len(data) != min(end, nbytes) - begin:
                raise OSError(errno.EIO, _BROKEN)
            return data, nbytes, answer.meta["e_tag"]

        try:
            data, nbytes, e_tag = self._send("cannot read the object", key, request)
        except OSError as error:
            if error.errno != errno.ERANGE:
                raise
            info = self._head(key)  # it may be shorter because it was replaced
            data, nbytes, e_tag = b"", info.nbytes, info.tag.e_tag
        if tag is not None and e_tag != tag.e_tag:
            reason = FileNotFoundError(errno.ENOENT, "it was replaced while it was read")
            raise store_error(reason, "cannot read the object", f"{self.url}/{key}")
        return data, nbytes

    def info(self, key: str) -> ObjectInfo | None:
        """Return size and tag of an object; None if it does not exist."""
        try:
            return self._head(key)
        except FileNotFoundError:
            return None

    def _head(self, key: str) -> ObjectInfo:
        """Return size and tag of an object."""
        return self._send(
            "cannot find the object", key, lambda: _info_of(self._engine.head(self._store, key))
        )

    def list_folder(self, folder: str) -> dict[str, ObjectInfo]:
        """Return the objects directly in a folder (``""``: the URL itself) by name."""

        def request() -> Any:
            return self._engine.list_with_delimiter(self._store, folder or None)["objects"]

        listing = self._send("cannot list the objects", folder, request)
        return {entry["path"].rpartition("/")[2]: _info_of(entry) for entry in listing}

    # ---- writing ----

    def put(self, key: str, data: bytes | pathlib.Path) -> None:
        """Write an object; `data`: its bytes, or the path of a file.

        Its name is used for this content only, so the write may be repeated.
        """
        nbytes = len(data) if isinstance(data, bytes) else os.path.getsize(data)
        store = self._upload_store(nbytes)
        self._send(
            "cannot write the object",
            key,
            lambda: self._engine.put(store, key, data, use_multipart=False),
            upload_seconds(self._options, nbytes),
        )

    def put_file(self, key: str, path: str, concurrency: int, source: str | None = None) -> None:
        """Write the local file `path` as an object; of a large one, `concurrency` parts at a time.

        A failed part is repeated alone. If an object `source` has the same bytes, the store copies
        it instead, if it can.
        """
        import pathlib

        nbytes = os.path.getsize(path)
        if source is not None and self.copy(source, key, nbytes):
            return
        if nbytes > self._options.part_bytes:
            self._put_parts(key, pathlib.Path(path), nbytes, concurrency)
        else:
            self.put(key, pathlib.Path(path))

    def copy(self, source: str, key: str, nbytes: int) -> bool:
        """Copy the object `source` inside the store to `key`; return whether that succeeded.

        `nbytes`: its size, which the copy must have. After a failure the caller uploads the object:
        the source may be deleted, or larger than the store copies in one request.
        """
        try:
            self._send(
                "cannot copy the object",
                source,
                lambda: self._engine.copy(self._store, source, key),
                _ONCE,
            )
        except OSError:
            return False
        return self._has_size(key, nbytes)

    def _put_parts(self, key: str, path: pathlib.Path, nbytes: int, concurrency: int) -> None:
        """Write the file `path` of `nbytes` bytes in parts, `concurrency` at a time.

        If the answer to the completion was lost, the object is looked for. It exists only after the
        completion, and only this call writes to its name, so an object of this size is the whole
        file.
        """

        def request() -> None:
            """Upload the file in parts; after an error, an object of the right size is success."""
            try:
                self._engine.put(
                    self._upload_store(self._options.part_bytes, for_parts=True),
                    key,
                    path,
                    use_multipart=True,
                    chunk_size=self._options.part_bytes,
                    max_concurrency=concurrency,
                )
            except Exception as error:
                if not _is_engine_error(error) or not self._has_size(key, nbytes):
                    raise

        self._send("cannot write the object", key, request)

    def _has_size(self, key: str, nbytes: int) -> bool:
        """Return whether the object `key` has `nbytes` bytes; False if the store fails."""
        try:
            return bool(self._engine.head(self._store, key)["size"] == nbytes)
        except Exception as error:
            if not _is_engine_error(error):
                raise
            return False

    def _upload_store(self, nbytes: int, *, for_parts: bool = False) -> Any:
        """Return the engine's store with the time limit for `nbytes`; opened at the first use.

        `for_parts`: one that repeats failed parts.
        """
        size = upload_class(nbytes)
        store = self._uploads.get((size, for_parts))
        if store is None:
            store = _open_engine(self.url, self._options, size, for_parts=for_parts)[1]
            self._uploads[size, for_parts] = store
        return store

    def put_if(self, key: str, data: bytes, tag: Tag | None, *, repeats: bool = False) -> None:
        """Write an object if it still has `tag`, or, for None, if it does not exist.

        One attempt, unless `repeats`. Raises StoreError: EEXIST if the condition is not met. After
        any other error the outcome may be unknown.
        """
        mode: Any = "create"
        if tag is not None:
            mode = {name: value for name, value in tag._asdict().items() if value is not None}
        store = self._upload_store(len(data))
        self._send(
            "cannot write the object",
            key,
            lambda: self._engine.put(store, key, data, mode=mode, use_multipart=False),
            None if repeats else _ONCE,
        )

    def require_conditions(self) -> None:
        """Raise StoreError (ENOTSUP) if the endpoint ignores the conditions of writes.

        This is tried once, with a temporary object.
        """
        if self._has_conditions:
            return
        with self.temporary_object() as name:
            for tag in (None, _NO_TAG):  # neither condition holds
                try:
                    self.put_if(name, b"{}", tag, repeats=True)
                except StoreError as error:
                    if error.errno == errno.EEXIST:
                        continue
                    raise
                header = "If-None-Match" if tag is None else "If-Match"
                reason = OSError(
                    errno.ENOTSUP,
                    f"the endpoint ignores conditions of writes ({header}), so writers could "
                    "overwrite each other's checkpoints: use a store that supports them",
                )
                raise store_error(reason, "cannot save", self.url)
        self._has_conditions = True

    @contextmanager
    def temporary_object(self) -> Iterator[str]:
        """Yield the name of a small new object, and delete it at the end.

        It stays if the store did not answer, because the deletion would wait for it again.
        """
        name, is_gone = f".mlstate-{os.urandom(8).hex()}.tmp", False
        self.put(name, b"{}")
        try:
            yield name
        except StoreError as error:
            is_gone = error.errno in RETRIED
            raise
        finally:
            if not is_gone:
                self.delete([name])

    def delete(self, keys: list[str]) -> None:
        """Delete the objects `keys`; missing ones are ignored."""
        if not keys:
            return
        action, named = "cannot delete objects", keys[0] if len(keys) == 1 else ""
        try:
            self._send(action, named, lambda: self._engine.delete(self._store, keys))
        except FileNotFoundError:
            # Only S3 answers a deletion of a missing object by a success. Of the others, some may
            # not have been deleted.
            for key in keys if len(keys) > 1 else ():
                self.delete([key])


# ---- opening the engine ----

_ENVIRONMENT = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}


def _client_environment(url: str) -> dict[str, str]:
    """Return the client's options in the environment, such as AWS_ALLOW_HTTP.

    The engine ignores them if it is given `client_options`.
    """
    prefix = _ENVIRONMENT[url.partition("://")[0]]
    settings = {name: os.environ.get(f"{prefix}{name.upper()}") for name in CLIENT_KEYS}
    return {name: value for name, value in settings.items() if value is not None}


def _refusal_text(error: Exception) -> str:
    """Return why the engine refuses a configuration, without any of its values.

    The values may be credentials, so only known forms of the engine's text are used.
    """
    key = re.search(r"Configuration key: '([A-Za-z_0-9]{1,60})' is not valid", str(error))
    if key is not None:
        return f"storage_options has an unknown key: {key[1]!r}"
    if "MissingAccount" in str(error):
        return (
            "the account is missing: set AZURE_STORAGE_ACCOUNT_NAME or pass "
            "storage_options={'account_name': ...}"
        )
    if "MissingRegion" in str(error):
        return "the region is missing: set AWS_REGION or pass storage_options={'region': ...}"
    if re.search(r"GCP credential error: |Azure error: Invalid Access Key", str(error)):
        return (
            "a credential cannot be read: check the key, token or file of the store in the "
            "environment or storage_options"
        )
    return (
        f"the store's engine refuses the URL or storage_options ({type(error).__name__}: "
        f"{engine_reason(error).strerror if not isinstance(error, TypeError) else 'wrong type'})"
    )


def _time_limits(options: StoreOptions, nbytes: int) -> dict[str, str]:
    """Return the time limits of an engine whose requests send at most `nbytes` bytes.

    The result has texts such as "500ms" by the names of the engine's options. Requests of at most
    `_SMALL` bytes are limited only by a silent server: after two silent attempts, or one attempt
    and its stalled answer, `timeout_seconds` are over.
    """
    silence = max(options.timeout_seconds / 2, _LEAST_SILENCE)
    limits = {"connect_timeout": min(silence, _MOST_CONNECT)}
    if nbytes <= _SMALL:
        limits |= {"read_timeout": silence, "timeout": _NO_LIMIT}
    else:
        limits |= {"timeout": upload_seconds(options, nbytes)}
    return {name: f"{round(1000 * seconds)}ms" for name, seconds in limits.items()}


def _open_engine(
    url: str, options: StoreOptions, upload_bytes: int = 0, *, for_parts: bool = False
) -> tuple[Any, Any]:
    """Import the engine; return it and a store for a URL.

    `upload_bytes`: most bytes that a request sends. `for_parts`: the store repeats failed requests
    until `timeout_seconds`. Raises ImportError without the engine, and ValueError for wrong
    options; its text has no values of the configuration.
    """
    try:
        import obstore
        from obstore.store import from_url
    except ImportError:
        raise ImportError(
            f"{url}: object stores need the package obstore: pip install 'mlstate[remote]'"
        ) from None
    from datetime import timedelta

    keywords = dict(options.passed)
    limits = _time_limits(options, upload_bytes)
    client = keywords.get("client_options", _client_environment(url))
    if hasattr(client, "keys"):  # otherwise the engine refuses it
        keywords["client_options"] = {**limits, **client}
    keywords["retry_config"] = {
        "max_retries": _PART_RETRIES if for_parts else _ENGINE_RETRIES,
        "retry_timeout": timedelta(seconds=options.timeout_seconds),
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(seconds=5),
        },
        **keywords.get("retry_config", {}),
    }
    failed = None
    try:
        open_store: Any = from_url
        return obstore, open_store(url, config=options.config, **keywords)
    except Exception as error:
        if not _is_engine_error(error) and not isinstance(error, TypeError):
            raise
        failed = ValueError(f"{url}: {_refusal_text(error)}")
    raise failed


# ---- errors of the engine ----
#
# The texts of the engine contain answers of the server and URLs, which may repeat key ids and
# signatures. Only the status and the error code of the answer are used, never the text.

# of an answer, or of one deletion in a batch
_STATUS = re.compile(r"non-2xx status code: (\d{3})|request failed for key .*\(code: (\d{3})\)")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>|\"code\": ?\"([A-Za-z]{1,60})\"")
_THROTTLED = ("SlowDown", "ServerBusy", "TooManyRequests", "Throttling")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")
_CONFLICTS = ("AlreadyExistsError", "PreconditionError")
_UNSUPPORTED = ("NotSupportedError", "NotImplementedError")
# Without credentials, the engine asks the metadata service of a virtual machine for a token.
_ASKS_FOR_TOKEN = ("169.254.169.254", "/latest/api/token", "token request")
_VARIABLES = {
    "Generic GCS error": "GOOGLE_SERVICE_ACCOUNT",
    "Generic MicrosoftAzure error": "AZURE_STORAGE_ACCOUNT_KEY",
}
_IN_PROGRESS = ("ConditionalRequestConflict", "OperationAborted")


def _answer_text(text: str) -> tuple[str, str]:
    """Return the error code of the server's answer, and a short text with status and code.

    `text`: the engine's error. Both are "" if it has none.
    """
    status, code_match = _STATUS.search(text), _CODE.search(text)
    code = "" if code_match is None else code_match[1] or code_match[2]
    parts = ["HTTP", status[1] or status[2] if status else "", code]
    return code, " ".join(filter(None, parts)) if status or code else ""


def _failure_of(text: str, answer: str, code: str) -> tuple[int, str]:
    """Return errno and text for an error of the engine whose class tells nothing.

    `text`: the engine's. `answer`: the HTTP status and error code in it, as text. `code`: the error
    code.
    """
    lowered = text.partition("Debug source")[0].lower()
    if code in _THROTTLED or answer.startswith(("HTTP 429", "HTTP 503")):
        return errno.EAGAIN, f"the store limits the rate of requests or is overloaded ({answer})"
    if code in _IN_PROGRESS:
        return errno.EAGAIN, f"another request for this object is in progress ({answer})"
    if code == "InvalidRange" or answer.startswith("HTTP 416"):
        return errno.ERANGE, f"the object ends before the requested range ({answer})"
    if answer.startswith(("HTTP 5", "HTTP 408")) or code == "RequestTimeout":
        return errno.EIO, f"the store failed ({answer})"
    if answer:
        return errno.EINVAL, f"the store refused the request ({answer})"
    if "kind: Connect" in text:
        return errno.ECONNREFUSED, "cannot connect to the store's endpoint"
    if "timed out" in text or "TimedOut" in text or "kind: Timeout" in text:
        return errno.ETIMEDOUT, "the store did not answer in time"
    if "builder error" in lowered or "URL scheme is not allowed" in text:
        return errno.EINVAL, (
            "the endpoint cannot be used; an http:// endpoint needs "
            "AWS_ALLOW_HTTP=true or storage_options={'client_options': {'allow_http': True}}"
        )
    return errno.EIO, "the connection broke, or the answer was not complete"


def _is_engine_error(error: Exception) -> bool:
    """Return whether the engine raises such an exception; others are mistakes of the caller."""
    is_obstore = type(error).__module__.partition(".")[0] == "obstore"
    return is_obstore or isinstance(error, OSError | ValueError | NotImplementedError)


def engine_reason(error: Exception) -> OSError:
    """Return an engine's exception as an OSError, of the class for its errno, with a safe text.

    No text of the engine is repeated, because it may hold key ids and signatures.
    """
    kind, text = type(error).__name__, str(error)
    code, answer = _answer_text(text)
    note = f" ({answer})" if answer else ""
    if code == "NoSuchUpload":  # its completion was repeated after a lost answer
        return OSError(errno.EIO, f"the outcome of the upload is unknown{note}")
    if code in _NO_BUCKET:
        return FileNotFoundError(errno.ENOENT, f"the bucket does not exist{note}")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, f"the object does not exist{note}")
    if any(part in text.partition("Debug source")[0] for part in _ASKS_FOR_TOKEN):
        names = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        for start, variable in _VARIABLES.items():
            names = variable if text.startswith(start) else names
        return PermissionError(
            errno.EACCES,
            f"no credentials found: set the store's environment variables, such as {names}, or "
            "pass them in storage_options",
        )
    if kind in _DENIED or answer.startswith(("HTTP 401", "HTTP 403")):
        return PermissionError(errno.EACCES, f"access denied{note}: check the credentials")
    if kind in _CONFLICTS and code not in _IN_PROGRESS:
        return FileExistsError(errno.EEXIST, f"the object was changed by another writer{note}")
    if kind == "InvalidPathError" or isinstance(error, ValueError):
        return OSError(errno.EINVAL, "the store does not accept this name")
    if "required for conditional update" in text:
        return OSError(
            errno.EINVAL,
            "the endpoint gives no version (ETag or generation) of an object, which conditional "
            "writes need",
        )
    if kind in _UNSUPPORTED:
        return OSError(errno.EINVAL, f"the endpoint does not support the request{note}")
    number, reason = _failure_of(text, answer, code)
    return OSError(number, reason)
