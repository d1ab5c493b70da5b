"""One interface to the objects of a store: S3, Google Cloud Storage, Azure; through obstore.

Keys are relative to the checkpoint's URL. Requests that change nothing, or that may be repeated,
are repeated until the total timeout. A silent server ends a request; an upload has the more time
the more bytes it sends. Conditional writes are not repeated here: the caller settles
their outcome (root_claim.py).
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._common.store_error import store_error
from ...errors import StoreError
from .engine_errors import RETRIED, engine_reason, is_engine_error
from .options import SMALL

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Collection, Iterator
    from typing import TypeVar

    from .options import StoreOptions

    _Result = TypeVar("_Result")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0  # seconds between attempts
_BROKEN = "the answer was not complete"


class Tag(NamedTuple):
    """The identity of an object's content: its ETag, its version, or both."""

    e_tag: str | None
    version: str | None


class ObjectInfo(NamedTuple):
    """Size in bytes, time of the last change (seconds since 1970) and tag of an object."""

    nbytes: int
    changed: float
    tag: Tag


def _info_of(answer: Any) -> ObjectInfo:
    tag = Tag(answer["e_tag"], answer["version"])
    return ObjectInfo(answer["size"], answer["last_modified"].timestamp(), tag)


def upload_class(nbytes: int) -> int:
    """Return the largest size of the uploads that have the same time limit as `nbytes`."""
    size = SMALL
    while size < nbytes:
        size *= 8
    return size


def repeat(
    attempt: Callable[[], _Result], seconds: float, retried: Collection[int] = RETRIED
) -> _Result:
    """Call `attempt` until it succeeds, or fails by an errno that is not in `retried`.

    The pauses between the attempts grow, with jitter. After `seconds` the last error is raised.
    """
    import random

    end, longest = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        pause = longest * random.uniform(0.5, 1.0)
        try:
            return attempt()
        except OSError as error:
            if error.errno not in retried or time.monotonic() + pause > end:
                raise
        time.sleep(pause)
        longest = min(2 * longest, _LONGEST_PAUSE)


class ObjectStore:
    """The objects below one URL, such as ``s3://bucket/run``; keys are relative to it."""

    has_conditions = False  # whether the endpoint is known to honour conditions of writes

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.url = url
        self.timeout = options.timeout_seconds
        self._options = options
        self._engine, self._store = options.open_engine(url)
        self._uploads: dict[tuple[int, bool], object] = {(upload_class(0), False): self._store}
        self._pid = os.getpid()

    # ---- requests ----

    def _call(self, action: str, key: str, request: Callable[[], _Result]) -> _Result:
        """Send one request; raise the engine's error as a StoreError without credentials."""
        path = f"{self.url}/{key}" if key else self.url
        if self._pid != os.getpid():
            text = "this process is a fork, where the engine does not work: start it by spawn"
            raise store_error(OSError(errno.EINVAL, text), action, path)
        failed = None
        try:
            return request()
        except Exception as error:
            if not is_engine_error(error):
                raise
            failed = store_error(engine_reason(error), action, path)
        raise failed  # outside the handler, so that the engine's text is not its context

    def _repeat(
        self, action: str, key: str, request: Callable[[], _Result], seconds: float | None = None
    ) -> _Result:
        """Send a request that may be repeated, until it succeeds or the timeout is over."""
        limit = self.timeout if seconds is None else seconds
        return repeat(partial(self._call, action, key, request), limit)

    # ---- reading ----

    def get(self, key: str, most: int) -> tuple[bytes, Tag]:
        """Return a whole object and the tag of exactly this content.

        Raises ValueError, and reads nothing, if it has more than `most` bytes.
        """

        def request() -> tuple[bytes, Tag] | None:
            answer = self._engine.get(self._store, key)
            info = _info_of(answer.meta)
            if info.nbytes > most:
                return None
            data = bytes(answer.bytes())
            if len(data) != info.nbytes:
                raise OSError(errno.EIO, _BROKEN)
            return data, info.tag

        got = self._repeat("cannot read the object", key, request)
        if got is None:
            raise ValueError("too long")
        return got

    def get_range(
        self, key: str, begin: int, end: int, tag: Tag | None = None
    ) -> tuple[Any, int | None]:
        """Return bytes `begin` .. `end` as a buffer, and the size of the whole object.

        The buffer is shorter if the object ends earlier, and empty, without a size, if it ends
        at `begin` or before. Raises StoreNotFoundError if the object no longer has the ETag of
        `tag`.
        """

        def request() -> tuple[object, int, str | None]:
            answer = self._engine.get(self._store, key, options={"range": (begin, end)})
            data, nbytes = answer.bytes(), answer.meta["size"]
            if len(data) != min(end, nbytes) - begin:
                raise OSError(errno.EIO, _BROKEN)
            return data, nbytes, answer.meta["e_tag"]

        try:
            data, nbytes, e_tag = self._repeat("cannot read the object", key, request)
        except OSError as error:
            if error.errno != errno.ERANGE:
                raise
            return b"", None
        if tag is not None and e_tag != tag.e_tag:
            reason = FileNotFoundError(errno.ENOENT, "it was replaced while it was read")
            raise store_error(reason, "cannot read the object", f"{self.url}/{key}")
        return data, nbytes

    def info(self, key: str) -> ObjectInfo | None:
        """Return size and tag of an object; None if it does not exist."""
        try:
            return self._repeat(
                "cannot find the object",
                key,
                lambda: _info_of(self._engine.head(self._store, key)),
            )
        except FileNotFoundError:
            return None

    def list_folder(self, folder: str) -> dict[str, ObjectInfo]:
        """Return the objects directly in a folder (``""``: the URL itself) by name."""

        def request() -> Any:
            return self._engine.list_with_delimiter(self._store, folder or None)["objects"]

        listing = self._repeat("cannot list the objects", folder, request)
        return {entry["path"].rpartition("/")[2]: _info_of(entry) for entry in listing}

    # ---- writing ----

    def put(self, key: str, data: bytes | pathlib.Path) -> None:
        """Write an object whose name no other content ever has, so that it may be repeated."""
        nbytes = len(data) if isinstance(data, bytes) else os.path.getsize(data)
        store = self._upload_store(nbytes)
        self._repeat(
            "cannot write the object",
            key,
            lambda: self._engine.put(store, key, data, use_multipart=False),
            self._options.upload_seconds(nbytes),
        )

    def put_file(self, key: str, path: str, concurrency: int) -> None:
        """The same for a local file; of a large one, `concurrency` parts at a time.

        A failed part is repeated alone.
        """
        import pathlib

        nbytes = os.path.getsize(path)
        if nbytes > self._options.part_bytes:
            self._put_parts(key, pathlib.Path(path), nbytes, concurrency)
        else:
            self.put(key, pathlib.Path(path))

    def copy(self, source: str, key: str, nbytes: int) -> bool:
        """Copy an object inside the store to a new name; return whether that succeeded.

        After a failure the caller uploads the object: the source may be deleted, or larger than
        the store copies in one request.
        """
        try:
            self._call(
                "cannot copy the object",
                source,
                lambda: self._engine.copy(self._store, source, key),
            )
        except OSError:
            return False
        return self._has_size(key, nbytes)

    def _put_parts(self, key: str, path: pathlib.Path, nbytes: int, concurrency: int) -> None:
        """Write a large file in parts. If the answer to the completion was lost, look for it.

        The object exists only after the completion, and only this call writes to its name. So
        an object of this size is the whole file.
        """

        def request() -> None:
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
                if not is_engine_error(error) or not self._has_size(key, nbytes):
                    raise

        self._repeat("cannot write the object", key, request)

    def _has_size(self, key: str, nbytes: int) -> bool:
        """Return whether an object is known to exist with this size."""
        try:
            return bool(self._engine.head(self._store, key)["size"] == nbytes)
        except Exception as error:
            if not is_engine_error(error):
                raise
            return False

    def _upload_store(self, nbytes: int, *, for_parts: bool = False) -> Any:
        """Return the engine's store with the time limit for `nbytes`; opened on first use.

        With `for_parts`, it repeats failed parts.
        """
        size = upload_class(nbytes)
        store = self._uploads.get((size, for_parts))
        if store is None:
            store = self._options.open_engine(self.url, upload_bytes=size, for_parts=for_parts)[1]
            self._uploads[size, for_parts] = store
        return store

    def put_if(self, key: str, data: bytes, tag: Tag | None, *, repeats: bool = False) -> None:
        """Write an object if it still has `tag`, or, with None, if it does not exist.

        One attempt, unless `repeats`. Raises StoreError: EEXIST if the condition does not hold.
        After any other error the outcome may be unknown.
        """
        mode: Any = "create"
        if tag is not None:
            mode = {name: value for name, value in tag._asdict().items() if value is not None}
        store = self._upload_store(len(data))
        send = self._repeat if repeats else self._call
        send(
            "cannot write the object",
            key,
            lambda: self._engine.put(store, key, data, mode=mode, use_multipart=False),
        )

    @contextmanager
    def temporary_object(self) -> Iterator[str]:
        """Write a small object and yield its name; delete it, unless the store is gone."""
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
        """Delete objects; a missing object is not an error."""
        if not keys:
            return
        action, named = "cannot delete objects", keys[0] if len(keys) == 1 else ""
        try:
            self._repeat(action, named, lambda: self._engine.delete(self._store, keys))
        except FileNotFoundError:
            # Only S3 answers a deletion of a missing object by a success. Of the others, some may
            # not have been deleted.
            for key in keys if len(keys) > 1 else ():
                self.delete([key])
