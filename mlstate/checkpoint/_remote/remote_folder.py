"""The folder of a checkpoint in an object store.

The core reads and writes files. So the byte ranges that a load needs are copied to sparse local
files first, at the same offsets, and new files are written locally and then uploaded. The local
copies are temporary, and a load copies at most two batches at a time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..._common.local_path import local_folder
from ...errors import MLStateError, StoreError
from .object_store import ObjectStore
from .options import check_url, split_url, take_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_BATCH = 128 << 20  # bytes of a load that are copied together
_GAP = 4096  # unneeded bytes between two ranges that one request reads

_Range = tuple[str, int, int]  # path, begin, end


class RemoteFolder(str):
    """URL of a checkpoint in an object store, with its options.

    As a text it is the URL, so that errors name it. Copies and pickles have no options, because
    these may hold credentials.

    Attributes
    ----------
    has_conditions : bool
        Whether the endpoint is known to honour conditions of writes.
    """

    has_conditions = False

    def __new__(cls, url: str, storage_options: Mapping[str, Any] | None = None) -> RemoteFolder:
        """Check the URL and the options; no request is sent."""
        made = super().__new__(cls, check_url(url))
        made._options = take_options(storage_options)
        made._store = None
        return made

    _options: Any
    _store: ObjectStore | None

    def __reduce__(self) -> Any:
        return RemoteFolder, (str(self),)

    def __copy__(self) -> RemoteFolder:
        return self

    def __deepcopy__(self, memo: object) -> RemoteFolder:
        return self

    @property
    def store(self) -> ObjectStore:
        """The open store; opened on first use."""
        if self._store is None:
            self._store = ObjectStore(str(self), self._options)
        return self._store

    @property
    def orphan_seconds(self) -> float:
        """Age from which unneeded objects are deleted."""
        return float(self._options.orphan_seconds)

    # ---- local copies ----

    @contextmanager
    def _scratch(self, folders: Sequence[str]) -> Iterator[str]:
        """Yield a temporary local folder with subfolders; errors name the URL instead of it."""
        local = tempfile.mkdtemp(prefix="mlstate-", dir=self._options.scratch_folder)
        try:
            for name in folders:
                os.mkdir(os.path.join(local, name))
            yield local
        except MLStateError as error:
            _name_url(error, local, str(self))
            raise
        finally:
            shutil.rmtree(local, ignore_errors=True)

    def _parts(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        step = self._options.part_bytes
        for at in range(begin, end, step):
            yield at, min(at + step, end)

    def _copy_range(self, local: str, path: str, begin: int, end: int) -> None:
        """Copy a range of an object to the same place of a local file of the object's size."""
        data, nbytes = self.store.get_range(path, begin, end)
        descriptor = os.open(os.path.join(local, path), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, nbytes)
            view, at = memoryview(data), begin
            while len(view):
                written = os.pwrite(descriptor, view, at)
                view, at = view[written:], at + written
        finally:
            os.close(descriptor)

    @contextmanager
    def _threads(self) -> Iterator[Any]:
        """Yield an executor; after an error, requests that have not started are dropped."""
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor(self._options.max_concurrency, "mlstate-store")
        try:
            yield pool
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def batches(
        self, merged: Any, section: int, keys: list[str], cuts: Any, verify: bool
    ) -> Iterator[tuple[str, list[str], Any]]:
        """Yield local folders that hold the bytes of some keys, with these keys and their cuts.

        Each local folder is deleted when the next one is requested. The bytes of the next batch
        are copied meanwhile.

        Raises
        ------
        StoreError
            An object cannot be read; `StoreNotFoundError` if it does not exist.
        """
        planned = list(_plan_batches(merged, str(self), section, keys, cuts, verify))
        with self._scratch(()) as base, self._threads() as pool:
            started: deque[tuple[str, list[Any]]] = deque()
            for number, (some, some_cuts, _) in enumerate(planned):
                for ahead in range(number + len(started), min(number + 2, len(planned))):
                    local = os.path.join(base, str(ahead))
                    started.append((local, self._start_copies(pool, local, planned[ahead][2])))
                local, copies = started.popleft()
                for one in copies:
                    one.result()
                try:
                    yield local, some, some_cuts
                except MLStateError as error:
                    _name_url(error, local, str(self))
                    raise
                shutil.rmtree(local, ignore_errors=True)

    def _start_copies(self, pool: Any, local: str, ranges: list[_Range]) -> list[Any]:
        for path, *_ in ranges:
            os.makedirs(os.path.join(local, os.path.dirname(path)), exist_ok=True)
        os.makedirs(local, exist_ok=True)
        return [
            pool.submit(self._copy_range, local, path, first, last)
            for path, begin, end in ranges
            for first, last in self._parts(begin, end)
        ]

    @contextmanager
    def whole_files(self, files: Mapping[str, int], folders: Sequence[str]) -> Iterator[str]:
        """Yield a local folder with copies of files; those that do not exist are left out.

        `files` has the recorded sizes. An object of another size is copied as far as it is.
        """
        with self._scratch(folders) as local:
            with self._threads() as pool:
                ranges = [(path, 0, nbytes) for path, nbytes in files.items()]
                for one in self._start_copies(pool, local, ranges):
                    try:
                        one.result()
                    except FileNotFoundError:
                        continue
            yield local

    @contextmanager
    def new_files(self, before: Any, folders: Sequence[str]) -> Iterator[str]:
        """Yield a local folder for new files, and upload these when the block ends.

        `before` is the merged index of the old checkpoint, or None. Its files seem to exist,
        with their headers, so that unchanged shards with a version are not written again.
        """
        with self._scratch(folders) as local:
            old = self._make_stand_ins(local, before, folders)
            yield local
            new = [
                f"{folder}/{name}"
                for folder in folders
                for name in sorted(os.listdir(os.path.join(local, folder)))
            ]
            with self._threads() as pool:
                uploads = [
                    pool.submit(self.store.put_file, path, os.path.join(local, path))
                    for path in new
                    if path not in old
                ]
                for one in uploads:
                    one.result()

    def _make_stand_ins(self, local: str, before: Any, folders: Sequence[str]) -> set[str]:
        """Make sparse local files with the sizes and headers of existing objects."""
        made: set[str] = set()
        if before is None:
            return made
        files = before.files()
        there: dict[str, int] = {}
        for folder in {path.partition("/")[0] for path in files}.intersection(folders):
            found = self.store.list_folder(folder)
            there.update((f"{folder}/{name}", info.nbytes) for name, info in found.items())
        for path, nbytes in files.items():
            header = before.header(path)
            if header is not None and there.get(path) == nbytes:
                with open(os.path.join(local, path), "wb") as file:
                    file.write(header)
                    file.truncate(nbytes)
                made.add(path)
        return made


def _name_url(error: MLStateError, local: str, url: str) -> None:
    """Replace a local folder by the URL in the texts and paths of an error."""
    error.args = tuple(
        value.replace(local, url) if isinstance(value, str) else value for value in error.args
    )
    if isinstance(error.path, str):
        error.path = error.path.replace(local, url)
    if isinstance(error, StoreError):
        if isinstance(error.filename, str):
            error.filename = error.filename.replace(local, url)
        if isinstance(error.strerror, str):
            error.strerror = error.strerror.replace(local, url)


# ---- planning ----


def _joined(ranges: list[_Range]) -> list[_Range]:
    """Sort ranges, and join those of one file that touch or have a small gap."""
    joined: list[_Range] = []
    for path, begin, end in sorted(ranges):
        if joined:
            last, first, until = joined[-1]
            gap = begin - until
            if last == path and gap <= max(_GAP, (until - first) // 20):
                joined[-1] = (path, first, max(until, end))
                continue
        joined.append((path, begin, end))
    return joined


def _plan_batches(
    merged: Any, folder: str, section: int, keys: list[str], cuts: Any, verify: bool
) -> Iterator[tuple[list[str], Any, list[_Range]]]:
    """Yield keys, cuts and byte ranges of batches; a large tensor has its own batch."""
    first, nbytes = 0, 0
    ranges: list[_Range] = []
    for at, key in enumerate(keys):
        own = cuts[at : at + 1] if isinstance(cuts, list) else cuts
        reads = merged.reads(folder, section, [key], own, verify)
        needed = [(path, begin, end) for path, begin, end, count in reads if count]
        more = sum(end - begin for _, begin, end in needed)
        if at > first and nbytes + more > _BATCH:
            some = cuts[first:at] if isinstance(cuts, list) else cuts
            yield keys[first:at], some, _joined(ranges)
            first, nbytes, ranges = at, 0, []
        nbytes += more
        ranges += needed
    some = cuts[first:] if isinstance(cuts, list) else cuts
    yield keys[first:], some, _joined(ranges)


# ---- the path of a caller ----


def checkpoint_folder(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> str:
    """Return the folder of a checkpoint: an absolute path, or a `RemoteFolder` for a URL.

    Raises
    ------
    TypeError, ValueError
        The URL or an option is wrong, or a local path has `storage_options`.
    """
    if isinstance(path, RemoteFolder) and storage_options is None:
        return path
    if isinstance(path, str) and split_url(path) is not None:
        return RemoteFolder(path, storage_options)
    folder = local_folder(path)
    if storage_options is not None:
        raise ValueError(
            f"{folder}: storage_options are for URLs such as s3://bucket/run, and this is a "
            "local folder"
        )
    return folder


def refuse_remote(folder: str, what: str, remedy: str) -> None:
    """Raise ValueError if a folder is in an object store and `what` needs local files."""
    if isinstance(folder, RemoteFolder):
        raise ValueError(f"{folder}: {what} is not possible in an object store: {remedy}")
