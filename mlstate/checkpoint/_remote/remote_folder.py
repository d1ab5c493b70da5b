"""The folder of a checkpoint in an object store.

The core reads and writes files. So the byte ranges that a load needs are copied to sparse local
files first, at the same offsets, and new files are written locally and then uploaded. The local
copies are temporary, and a load copies at most two batches at a time. Loads, but no verifications,
read through the cache of `cache_folder`.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ... import _core
from ..._common.local_path import local_folder
from ..._common.store_error import store_error
from ...errors import ChecksumError, FormatError, MLStateError, StoreError
from .options import check_url, split_url, take_options
from .resumption import INDEX_FOLDER, find_uploaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from .object_store import ObjectInfo, ObjectStore, Tag
    from .options import StoreOptions
    from .parallel_tasks import ParallelTasks
    from .read_cache import ReadCache
    from .root_claim import RootClaim

_MOST_BYTES = 512 << 20  # of a manifest or an index
_BATCH = 128 << 20  # bytes of a load or a verification that are copied together
_HEADER = 64 << 10  # bytes of a safetensors file that are read first
_GAP = 4096  # unneeded bytes between two ranges that one request reads

_Range = tuple[str, int, int]  # path, begin, end


class RemoteFolder(str):
    """URL of a checkpoint in an object store, with its options.

    As a text it is the URL, so that errors name it. Pickles have no options, because these may
    hold credentials.
    """

    has_conditions = False  # whether the endpoint is known to honour conditions of writes
    file: str  # name of a file that the caller's URL names, to be read only; else empty
    _options: StoreOptions
    _store: ObjectStore | None
    _cache: ReadCache | None
    _roots: dict[str, bytes]  # texts of roots under ``roots/``, which never change
    _tags: dict[str, Tag]  # of files that other programs may replace

    def __new__(
        cls,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        is_file: bool = False,
    ) -> RemoteFolder:
        """Check the URL and the options; no request is sent."""
        checked, file = check_url(url), ""
        if is_file:
            checked, _, file = checked.rpartition("/")
        made = super().__new__(cls, checked)
        made.file = file
        made._options = take_options(storage_options)
        made._store = None
        made._roots = {}
        made._cache = None
        made._tags = {}
        return made

    def __reduce__(self) -> Any:
        if self.file:
            return partial(RemoteFolder, is_file=True), (f"{self}/{self.file}",)
        return RemoteFolder, (str(self),)

    def __copy__(self) -> RemoteFolder:
        return self

    def __deepcopy__(self, memo: object) -> RemoteFolder:
        return self

    @property
    def store(self) -> ObjectStore:
        """The open store; opened on first use."""
        if self._store is None:
            from .object_store import ObjectStore

            self._store = ObjectStore(str(self), self._options)
        return self._store

    @property
    def cache(self) -> ReadCache | None:
        """The local cache of objects; None without `cache_folder`."""
        folder = self._options.cache_folder
        if self._cache is None and folder is not None:
            from .read_cache import ReadCache

            self._cache = ReadCache(folder, self._options.cache_bytes, str(self))
        return self._cache

    def without_cache(self) -> RemoteFolder:
        """Return the same folder, with nothing in memory and without the local cache."""
        self._roots.clear()
        if self._options.cache_folder is None:
            return self
        made = RemoteFolder(self)
        made.file = self.file
        made._options = self._options._replace(cache_folder=None)
        made._store = self._store
        return made

    @property
    def orphan_seconds(self) -> float | None:
        """Least age of unneeded objects that `prune` deletes; None: it deletes none."""
        return self._options.orphan_seconds

    def claim(self, root: str) -> RootClaim:
        """Return a writer's claim to a root."""
        from .root_claim import RootClaim

        return RootClaim(self, root)

    # ---- objects ----

    def read(self, path: str) -> bytes:
        """Return a manifest or an index; roots of steps are kept in memory, indexes in the cache.

        Raises ValueError if the object is too long.
        """
        found = self._roots.get(path)
        if found is not None:
            return found
        cache = self.cache
        if cache is not None and not cache.accepts(path):
            cache = None
        if cache is not None and (kept := cache.get_whole(path)) is not None:
            return kept
        found = self.store.get(path, _MOST_BYTES)[0]
        is_root = path.startswith("roots/")
        if is_root or cache is not None:
            with suppress(FormatError):
                _core.json_checksum_check(found, path)
                if is_root:
                    self._roots[path] = found
                elif cache is not None:
                    cache.put(path, 0, found, len(found))
        return found

    def prefetch(self, paths: Iterable[str]) -> None:
        """Read roots at the same time; errors are left to the later `read` of each."""

        def read(path: str) -> None:
            with suppress(MLStateError, ValueError):
                self.read(path)

        missing = [path for path in paths if path not in self._roots]
        with self._start_tasks(partial(read, path) for path in missing) as tasks:
            tasks.wait()

    def note_files(self, names: Iterable[str]) -> dict[str, ObjectInfo | None]:
        """Return the facts of files of another program; later reads require the same content."""
        found: dict[str, ObjectInfo | None] = {}

        def note(name: str) -> None:
            found[name] = self.store.info(name)

        with self._start_tasks(partial(note, name) for name in names) as tasks:
            tasks.wait()
        self._tags = {name: info.tag for name, info in found.items() if info is not None}
        return found

    def list_names(self, part: str) -> list[str]:
        """Return the names of the objects in a subfolder."""
        names = list(self.store.list_folder(part))
        if part == "roots":  # drop deleted ones
            existing = {f"roots/{name}" for name in names}
            known = self._roots.copy().items()  # other threads may add some
            self._roots = {path: text for path, text in known if path in existing}
        return names

    def exists(self, path: str) -> bool:
        """Return whether an object exists."""
        return self.store.info(path) is not None

    def has_files(self, sizes: Mapping[str, int]) -> bool:
        """Return whether objects exist with these sizes."""
        folders = {os.path.dirname(path) for path in sizes}
        found = {folder: self.store.list_folder(folder) for folder in folders}
        for path, nbytes in sizes.items():
            folder, name = os.path.split(path)
            if name not in found[folder] or found[folder][name].nbytes != nbytes:
                return False
        return True

    def current_time(self, *, local: bool) -> float:
        """Return the store's time in seconds since 1970, or this machine's, without a write."""
        import time

        if local:
            return time.time()
        with self.store.temporary_object() as name:
            info = self.store.info(name)
        return time.time() if info is None else info.changed

    # ---- local copies ----

    @contextmanager
    def _scratch(self, folders: Iterable[str] = ()) -> Iterator[str]:
        """Yield a temporary local folder with subfolders; errors name the URL instead of it."""
        import shutil
        import tempfile

        try:
            local = tempfile.mkdtemp(prefix="mlstate-", dir=self._options.scratch_folder)
        except OSError as error:
            what = "cannot create a temporary local folder"
            raise store_error(error, what, self._options.scratch_folder or self) from None
        try:
            for name in folders:
                os.mkdir(os.path.join(local, name))
            yield local
        except MLStateError as error:
            if isinstance(error, StoreError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                folder = os.path.dirname(local)
                error.add_note(
                    f"Temporary files are in {folder}: storage_options={{'scratch_folder': ...}} "
                    "selects another folder."
                )
            _name_url(error, local, str(self))
            raise
        finally:
            shutil.rmtree(local, ignore_errors=True)

    def _copy_range(self, local: str, path: str, begin: int, end: int) -> None:
        """Copy a range of an object to the same place of a local file of the object's size."""
        data, nbytes = self.store.get_range(path, begin, end, self._tags.get(path))
        self._write_range(local, path, begin, data, nbytes)

    def _copy_cached(self, cache: ReadCache, local: str, path: str, begin: int, end: int) -> None:
        """Copy a range from the cache or, if a byte is missing there, from the store."""
        if path in self._tags or not cache.accepts(path):
            self._copy_range(local, path, begin, end)
            return
        found = cache.get(path, begin, end)
        if found is not None:
            parts, nbytes = found
            for at, view in parts:
                self._write_range(local, path, at, view, nbytes)
            return
        data, of_object = self.store.get_range(path, begin, end)
        self._write_range(local, path, begin, data, of_object)
        if of_object is not None and len(data) == end - begin:
            cache.put(path, begin, data, of_object)

    def _write_range(
        self, local: str, path: str, begin: int, data: Any, nbytes: int | None
    ) -> None:
        """Write bytes of an object of `nbytes` bytes to its local file."""
        name = os.path.join(local, path)
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                if nbytes is not None:
                    os.ftruncate(descriptor, nbytes)
                view, at = memoryview(data), begin
                while len(view):
                    written = os.pwrite(descriptor, view, at)
                    view, at = view[written:], at + written
            finally:
                os.close(descriptor)
        except OSError as error:
            raise store_error(error, "cannot write the temporary local file", name) from None

    def _copy_header(self, local: str, name: str) -> None:
        """Copy the header of a safetensors file to a sparse local file of the object's size."""
        self._copy_range(local, name, 0, _HEADER)
        with open(os.path.join(local, name), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            nbytes = os.fstat(file.fileno()).st_size
        end = min(8 + length, nbytes, _MOST_BYTES)
        if end > _HEADER:
            self._copy_range(local, name, _HEADER, end)

    @contextmanager
    def header_copies(self, names: Iterable[str]) -> Iterator[str]:
        """Yield a local folder with sparse copies of safetensors files, which have only headers."""
        with self._scratch() as local:
            tasks = (partial(self._copy_header, local, name) for name in names)
            with self._start_tasks(tasks) as copies:
                copies.wait()
            yield local

    @contextmanager
    def file_copy(self, name: str, nbytes: int) -> Iterator[str]:
        """Yield a temporary local folder with a copy of a whole file."""
        with self._scratch() as local:
            with self._start_copies(local, [(name, 0, nbytes)]) as copies:
                copies.wait()
            yield local

    def _start_tasks(self, tasks: Iterable[Callable[[], object]]) -> ParallelTasks:
        from .parallel_tasks import ParallelTasks

        return ParallelTasks(tasks, self._options.max_concurrency)

    def _start_copies(
        self,
        local: str,
        ranges: Sequence[_Range],
        copy: Callable[[str, str, int, int], None] | None = None,
    ) -> ParallelTasks:
        """Start to copy ranges to a new local folder in parallel parts, by `copy`."""
        copy = copy or self._copy_range
        step = self._options.part_bytes
        for folder in {"", *(os.path.dirname(path) for path, *_ in ranges)}:
            os.makedirs(os.path.join(local, folder), exist_ok=True)
        return self._start_tasks(
            partial(copy, local, path, at, min(at + step, end))
            for path, begin, end in ranges
            for at in range(begin, end, step)
        )

    def _copy_existing(self, local: str, path: str, begin: int, end: int) -> None:
        """Copy a range unless the object does not exist."""
        with suppress(FileNotFoundError):
            self._copy_range(local, path, begin, end)

    def read_batches(
        self,
        merged: Any,
        section: int,
        keys: list[str],
        cuts: Any,
        verify: bool,
        read: Callable[[str, list[str], Any], object],
    ) -> None:
        """Call `read` with local folders that hold the bytes of some keys, until all are read.

        Its arguments are the folder, the keys and their cuts. The bytes of the next batch are
        copied meanwhile.
        """
        import shutil

        batches = list(_plan_batches(merged, str(self), section, keys, cuts, verify))
        cache = self.cache
        copy = None if cache is None else partial(self._copy_cached, cache)
        with self._scratch() as base, ExitStack() as started:
            if cache is not None:
                started.callback(_finish, cache)
            places = [os.path.join(base, str(number)) for number in range(len(batches))]

            def start(number: int) -> ParallelTasks:
                ranges = batches[number][2]
                return started.enter_context(self._start_copies(places[number], ranges, copy))

            copies = start(0)
            for number, (some, some_cuts, ranges) in enumerate(batches):
                copies.wait()
                if number + 1 < len(batches):
                    copies = start(number + 1)
                try:
                    if cache is None:
                        read(places[number], some, some_cuts)
                    else:
                        call = partial(read, places[number], some, some_cuts)
                        self._read_cached(cache, places[number], ranges, call)
                except MLStateError as error:
                    _name_url(error, places[number], str(self))
                    raise
                shutil.rmtree(places[number], ignore_errors=True)

    def _read_cached(
        self, cache: ReadCache, local: str, ranges: list[_Range], read: Callable[[], object]
    ) -> None:
        """Call `read` with local copies; if they are damaged, copy them from the store again.

        The cache then forgets the objects, because it may have kept a damaged answer.
        """
        import shutil

        with suppress(ChecksumError, FormatError):
            read()
            return
        for path in {path for path, *_ in ranges}:
            cache.discard(path)
        shutil.rmtree(local, ignore_errors=True)
        with self._start_copies(local, ranges) as copies:
            copies.wait()
        read()

    def verify(
        self, merged: Any, progress: Callable[[int], object] | None
    ) -> tuple[int, list[Any]]:
        """Read and verify all files of an index, some at a time; as `MergedIndex.verify`.

        A missing object is a problem in the result.
        """
        total, problems = 0, []
        for files in _file_batches(merged.files()):
            with self._scratch() as local:
                ranges = [(path, 0, nbytes) for path, nbytes in files.items()]
                with self._start_copies(local, ranges, self._copy_existing) as copies:
                    copies.wait()
                count, found = merged.verify(local, progress)
            total += count
            for problem in found:
                kind, path, *middle, text = problem
                if path in files:
                    problems.append((kind, path, *middle, text.replace(local, str(self))))
        return total, problems

    @contextmanager
    def new_files(
        self, folders: Sequence[str], root: str, progress: Callable[[int], object] | None
    ) -> Iterator[str]:
        """Yield a local folder for new files, and upload these when the block ends.

        Objects that the same save has uploaded before an interruption, since the last change of
        `root`, are copied in the store.
        `progress` is called with 0 during the uploads, and may raise to stop.
        """
        with self._scratch(folders) as local:
            yield local
            sizes = {
                f"{folder}/{name}": os.path.getsize(os.path.join(local, folder, name))
                for folder in folders
                for name in sorted(os.listdir(os.path.join(local, folder)))
            }
            uploaded = find_uploaded(self.store, root, local, sizes)
            parts = max(1, self._options.max_concurrency // max(1, len(sizes)))

            def put(path: str) -> None:
                source = uploaded.get(path)
                if source is None or not self.store.copy(source, path, sizes[path]):
                    self.store.put_file(path, os.path.join(local, path), parts)

            # the index first: it describes the objects of an interrupted save
            indexes = [path for path in sizes if os.path.dirname(path) == INDEX_FOLDER]
            shards = [path for path in sizes if os.path.dirname(path) != INDEX_FOLDER]
            for paths in (indexes, shards):
                with self._start_tasks(partial(put, path) for path in paths) as uploads:
                    uploads.wait(progress)
            if not self.has_files(sizes):
                text = "an uploaded object is missing or has another size"
                raise store_error(OSError(errno.EIO, text), "cannot save", self)


def _finish(cache: ReadCache) -> None:
    """End the use of a cache by a load; warn once if it cannot be written."""
    import warnings

    cache.finish()
    problem = cache.problem()
    if problem is not None:
        warnings.warn(problem, stacklevel=2)


def _name_url(error: MLStateError, local: str, url: str) -> None:
    """Replace a local folder by the URL in the texts and paths of an error."""
    error.args = tuple(
        value.replace(local, url) if isinstance(value, str) else value for value in error.args
    )
    for name in ("path", "filename", "strerror"):  # the last two of a StoreError only
        value = getattr(error, name, None)
        if isinstance(value, str):
            setattr(error, name, value.replace(local, url))


# ---- planning ----


def _file_batches(files: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield the sizes of files by path in batches; a large file has its own batch."""
    batch: dict[str, int] = {}
    total = 0
    for path, nbytes in sorted(files.items()):
        if batch and total + nbytes > _BATCH:
            yield batch
            batch, total = {}, 0
        batch[path] = nbytes
        total += nbytes
    if batch:
        yield batch


def _joined(ranges: list[_Range]) -> list[_Range]:
    """Sort ranges, and join ranges of one file that touch or have a small gap."""
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

_FILES = (".safetensors", "/model.safetensors.index.json")
_ONLY_READ = (
    "this URL names one file, which load, plan_load, inspect, verify, diff, reshard and convert "
    "read; a checkpoint in a store needs a URL without that suffix"
)


def checkpoint_folder(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    *,
    reads: bool = False,
) -> str:
    """Return the folder of a checkpoint: an absolute path, or a `RemoteFolder` for a URL.

    With `reads`, a URL may name a safetensors file, or the index of a Hugging Face folder; its
    folder has the attribute `file` then.
    """
    if isinstance(path, RemoteFolder) and storage_options is None:
        if path.file and not reads:
            raise ValueError(f"{path}/{path.file}: {_ONLY_READ}")
        return path
    if isinstance(path, RemoteFolder) and path.file:
        path = f"{path}/{path.file}"
    if isinstance(path, str) and split_url(path) is not None:
        is_file = path.rstrip("/").endswith(_FILES)
        if is_file and not reads:
            check_url(path)
            raise ValueError(f"{path}: {_ONLY_READ}")
        return RemoteFolder(path, storage_options, is_file=is_file)
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
