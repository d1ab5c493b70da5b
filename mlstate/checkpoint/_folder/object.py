"""`ObjectFolder`: a folder in a store: its names, kept texts of roots, uploads of a save.

A load reads the answers of the store from memory (range_load.py). Verifications and saves need
local files: temporary copies, or new files that are then uploaded.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ... import _core
from ..._common.batches import batches_of
from ..._common.log import is_logged, log
from ..._common.store_error import format_error, store_error
from ..._common.waiting import remove_folder
from ...errors import FormatError, MLStateError, StoreError
from ._remote.interrupted_uploads import INDEX_FOLDER, find_uploaded
from ._remote.parallel_tasks import run_tasks
from .names import MANIFEST, SECTIONS, root_of
from .protocol import FileInfo, NewFiles, TensorParts
from .range_load import Answer, LoadCall, Range, Unit, load_units

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ..._common.callback import Progress
    from ._remote.object_store import ObjectInfo, ObjectStore, Tag
    from ._remote.options import StoreOptions
    from ._remote.root_claim import RootClaim

_MOST_BYTES = 512 << 20  # of a manifest or an index
_BATCH = 128 << 20  # bytes of a verification that are copied together
_HEADER = 64 << 10  # bytes of a safetensors file that are read first


class StoreURL(str):
    """URL of a folder, or of its only file: opens the same folder again, with its options.

    Pickles have no options, because these may hold credentials.
    """

    folder: ObjectFolder

    @classmethod
    def of(cls, text: str, folder: ObjectFolder) -> StoreURL:
        """Return the URL `text` that opens `folder`."""
        url = cls(text)
        url.folder = folder
        return url

    def __reduce__(self) -> Any:
        return str, (str(self.folder.named_path),)

    def __copy__(self) -> StoreURL:
        return self

    def __deepcopy__(self, memo: object) -> StoreURL:
        return self


class ObjectFolder:
    """A checkpoint in an object store, by its checked URL; `file` is the only file to read."""

    is_local = False
    excludes_writers = False  # stores have no locks

    def __init__(self, url: str, options: StoreOptions, file: str = "") -> None:
        """Create the folder of a checked URL; sends no request.

        `file`: name of the only object that may be read, as the caller's path names it; else "".
        """
        self.file = file
        self._url = url
        self._options = options
        self._store: ObjectStore | None = None
        self._roots: dict[str, bytes] = {}  # texts of roots under ``roots/``, which never change
        self._tags: dict[str, Tag] = {}  # of files that other programs may replace

    @property
    def path(self) -> StoreURL:
        """The URL as a new object: one kept here would refer back to this folder, a cycle."""
        return StoreURL.of(self._url, self)

    @property
    def named_path(self) -> StoreURL:
        """The URL of `file`, or without one of the folder."""
        return StoreURL.of(f"{self._url}/{self.file}" if self.file else self._url, self)

    def __reduce__(self) -> Any:  # without options, which hold credentials
        from ._remote.options import take_options

        return ObjectFolder, (self._url, take_options(None), self.file)

    def __copy__(self) -> ObjectFolder:
        return self

    def __deepcopy__(self, memo: object) -> ObjectFolder:
        return self

    @property
    def store(self) -> ObjectStore:
        """The store's connection, opened at the first use; raises for wrong options."""
        if self._store is None:
            from ._remote.object_store import ObjectStore

            self._store = ObjectStore(str(self.path), self._options)
        return self._store

    # ---- objects ----

    def without_cache(self) -> ObjectFolder:
        """Return this folder, after forgetting the roots that it keeps in memory."""
        self._roots.clear()
        return self

    def read(self, path: str, *, follow_links: bool = False) -> bytes:
        """Return the bytes of a manifest or an index; `follow_links` has no effect in a store.

        Roots of steps never change, so those with a right checksum are kept in memory. Raises
        StoreError, and FormatError for more than 512 MiB.
        """
        data = self._roots.get(path)
        if data is not None:
            return data
        store = self.store  # outside of the block: a ValueError is about the options
        try:
            data = store.get(path, _MOST_BYTES)[0]
        except ValueError as error:
            name = os.path.join(self.path, path)
            raise format_error(f"{name}: {error}", name) from None
        if path.startswith("roots/"):
            with suppress(FormatError):
                _core.json_checksum_check(data, path)
                self._roots[path] = data
        return data

    def prefetch(self, paths: Iterable[str]) -> None:
        """Read the roots at `paths` in parallel and keep them; a later `read` raises the errors."""

        def read(path: str) -> None:
            with suppress(MLStateError):
                self.read(path)

        missing = [path for path in paths if path not in self._roots]
        run_tasks([partial(read, path) for path in missing], self._options.max_concurrency)

    def find_files(self, paths: Collection[str]) -> dict[str, FileInfo]:
        """Return size and time of the objects at `paths` that exist, by path.

        Each folder in `paths` takes a list request. Raises StoreError if it fails.
        """
        store = self.store
        listed = {part: store.list_folder(part) for part in {*map(os.path.dirname, paths)}}
        infos = {}
        for path in paths:
            part, name = os.path.split(path)
            if name in listed[part]:
                infos[path] = _file_info(listed[part][name])
        return infos

    def note_files(self, names: Iterable[str]) -> dict[str, FileInfo | None]:
        """Return size and time of files of another program by name; None for a missing one.

        Later reads of these names require the same content, by its tag; reads of other names,
        also those of an earlier call, do not.
        """
        infos: dict[str, ObjectInfo | None] = {}

        def note(name: str) -> None:
            infos[name] = self.store.info(name)

        run_tasks([partial(note, name) for name in names], self._options.max_concurrency)
        self._tags = {name: info.tag for name, info in infos.items() if info is not None}
        return {name: info and _file_info(info) for name, info in infos.items()}

    def missing_reason(self) -> str:
        """Return "": the store's own error names the missing object or bucket."""
        return ""

    def has_checkpoint(self) -> bool:
        """Return whether there is a manifest."""
        return self.exists(MANIFEST)

    def is_empty(self) -> bool:
        """Return whether there is neither a manifest nor a step; other objects stay."""
        return not self.exists(MANIFEST) and not any(map(root_of, self.names("roots")))

    def is_outage(self, error: Exception) -> bool:
        """Return whether an error means that the store failed: the checkpoint may be intact."""
        return isinstance(error, StoreError) and not isinstance(error, FileNotFoundError)

    def names(self, part: str) -> list[str]:
        """Return the names of the objects in the subfolder `part`; "": in the folder itself.

        The list is empty if there are none. A list of the roots also drops the kept texts of those
        that were deleted.
        """
        names = list(self.store.list_folder(part))
        if part == "roots":
            existing = {f"roots/{name}" for name in names}
            entries = self._roots.copy().items()  # other threads may add some
            self._roots = {path: text for path, text in entries if path in existing}
        return names

    def exists(self, path: str) -> bool:
        """Return whether an object exists."""
        return self.store.info(path) is not None

    def has_files(self, sizes: Mapping[str, int]) -> bool:
        """Return whether all objects exist with these sizes (bytes by path)."""
        infos = self.find_files(sizes)
        return sizes == {path: infos[path].nbytes for path in infos}

    # ---- writing objects ----

    def claim(self, timeout: float | None = None) -> RootClaim:
        """Return a writer's claim; `timeout` is unused, because a store has no locks."""
        from ._remote.root_claim import RootClaim

        return RootClaim(self.store, MANIFEST)

    def create(self, parts: Iterable[str]) -> None:
        """Do nothing: the names of objects need no folders."""

    def add_empty(self, path: str) -> None:
        """Write an empty object."""
        self.store.put(path, b"")

    def remove(self, paths: Iterable[str]) -> list[str]:
        """Delete objects; return all paths, whether they existed or not."""
        names = [*paths]
        self.store.delete(names)
        for name in names if is_logged("DEBUG") else ():
            log("DEBUG", "%s: deleted the object %s", self.path, name)
        return names

    def sync(self, part: str) -> None:
        """Do nothing: deletions of objects are durable."""

    def orphan_time(self, *, local_clock: bool) -> float | None:
        """Return the time before which unknown objects may be deleted, in seconds since 1970.

        None: never. `local_clock`: by this machine's clock. Otherwise by the store's, which is read
        by writing a temporary object.
        """
        import time

        age = self._options.orphan_seconds
        if age is None:
            return None
        if local_clock:  # the store's clock is read by a write
            return time.time() - age
        with self.store.temporary_object() as name:
            info = self.store.info(name)
        return (time.time() if info is None else info.changed) - age

    # ---- local copies ----

    @contextmanager
    def _scratch(self, folders: Iterable[str] = ()) -> Iterator[str]:
        """Yield the path of a temporary local folder with subfolders `folders`; deleted at the end.

        Errors in the block name the URL instead of the path, because the user does not know the
        latter. Raises StoreError if the folder cannot be created.
        """
        import tempfile

        try:
            local = tempfile.mkdtemp(prefix="mlstate-", dir=self._options.scratch_folder)
        except OSError as error:
            action = "cannot create a temporary local folder"
            raise store_error(error, action, self._options.scratch_folder or self.path) from None
        try:
            for name in folders:
                os.mkdir(os.path.join(local, name))
            yield local
        except MLStateError as error:
            if isinstance(error, StoreError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                folder = os.path.dirname(local)
                error.add_note(
                    f"Temporary files are in {folder}: for another folder, set TMPDIR or pass "
                    "storage_options={'scratch_folder': ...}"
                )
            _name_url(error, local, self.path)
            raise
        finally:
            remove_folder(local)

    def _copy_range(self, local: str, path: str, begin: int, end: int) -> None:
        """Copy bytes `begin` to `end` of the object `path` to the same file and offset in `local`.

        The local file gets the object's size; bytes that are never copied are holes. Raises
        StoreError.
        """
        data, nbytes = self.store.get_range(path, begin, end, self._tags.get(path))
        name = os.path.join(local, path)
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
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
        """Copy the header of the safetensors object `name` to a sparse file in `local`.

        The file gets the object's size.
        """
        self._copy_range(local, name, 0, _HEADER)
        with open(os.path.join(local, name), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            nbytes = os.fstat(file.fileno()).st_size
        end = min(8 + length, nbytes, _MOST_BYTES)
        if end > _HEADER:
            self._copy_range(local, name, _HEADER, end)

    @contextmanager
    def header_files(self, names: Iterable[str]) -> Iterator[str]:
        """Yield a local folder with sparse copies of safetensors objects, which have only headers.

        `names`: of the objects.
        """
        with self._scratch() as local:
            tasks = [partial(self._copy_header, local, name) for name in names]
            run_tasks(tasks, self._options.max_concurrency)
            yield local

    @contextmanager
    def file_to_verify(self, name: str, has_checksums: Callable[[str], bool]) -> Iterator[str]:
        """Yield the path of a temporary local copy of the object `name`.

        `has_checksums`: called with the path of a copy of the header; if it returns False, only the
        header can be verified, and nothing else is copied.
        """
        with self._scratch() as local:
            path = os.path.join(local, name)
            self._copy_header(local, name)
            if has_checksums(path):
                self._copy_ranges(local, [(name, 0, os.path.getsize(path))], self._copy_range)
            yield path

    def _copy_ranges(
        self, local: str, ranges: Sequence[Range], copy: Callable[[str, str, int, int], None]
    ) -> None:
        """Create files in the folder `local` with these ranges of objects, in parallel requests.

        `copy`: called with folder, path, begin and end of each piece.
        """
        step = self._options.part_bytes
        for folder in {"", *(os.path.dirname(path) for path, *_ in ranges)}:
            os.makedirs(os.path.join(local, folder), exist_ok=True)
        tasks = [
            partial(copy, local, path, at, min(at + step, end))
            for path, begin, end in ranges
            for at in range(begin, end, step)
        ]
        run_tasks(tasks, self._options.max_concurrency)

    def _copy_existing(self, local: str, path: str, begin: int, end: int) -> None:
        """Copy a range as `_copy_range`; do nothing if the object does not exist."""
        with suppress(FileNotFoundError):
            self._copy_range(local, path, begin, end)

    def load(
        self, parts: TensorParts, verify: bool, mmap: bool, progress: Progress
    ) -> dict[str, Any]:
        """Return the tensors as new arrays, as `Folder.load`; `mmap` is ignored."""
        # The core creates the arrays, zeroed, and reads nothing: it gets no answers yet.
        source = self.path, (), True
        arrays = parts.merged.load(source, *parts[1:], verify, False, progress)
        self._fill(LoadCall(self.path, *parts, arrays, verify, is_zeroed=True), progress)
        return arrays

    def load_into(
        self, parts: TensorParts, targets: dict[str, Any], verify: bool, progress: Progress
    ) -> None:
        """Read the tensors into `targets`, as `Folder.load_into`."""
        self._fill(LoadCall(self.path, *parts, targets, verify, is_zeroed=False), progress)

    def _fill(self, call: LoadCall, progress: Progress) -> None:
        """Read the tensors of a call into its targets; `progress` gets numbers of bytes."""
        options = self._options
        parts = options.part_bytes, options.max_concurrency
        load_units(call, self._fetch, self._read_unit, *parts, progress)

    def _fetch(self, path: str, begin: int, end: int) -> list[Answer]:
        """Return bytes `begin` to `end` of an object, for a load, in one or more answers.

        An answer has the path, begin, end, the bytes of the whole object, and the data, which ends
        earlier if the object does.
        """
        data, nbytes = self.store.get_range(path, begin, end, self._tags.get(path))
        return [(path, begin, end, nbytes, data)]

    def _read_unit(self, call: LoadCall, unit: Unit) -> int:
        """Copy the answers of a unit into its arrays; return the number of bytes."""
        return call.read(unit.answers, unit.at)

    def verify(self, merged: _core.MergedIndex, progress: Progress) -> tuple[int, list[Any]]:
        """Copy all files of an index, some at a time, to local files, and verify these.

        Returns bytes and problems as `Folder.verify`. A missing object is one of the problems.
        """
        total, problems = 0, []
        for batch in batches_of(sorted(merged.files().items()), itemgetter(1), _BATCH):
            files = dict(batch)
            with self._scratch() as local:
                ranges = [(path, 0, nbytes) for path, nbytes in files.items()]
                self._copy_ranges(local, ranges, self._copy_existing)
                count, broken = merged.verify(local, progress)
            total += count
            for problem in broken:
                kind, path, *middle, text = problem
                # The copies lack the files of other batches, which the core reports as missing.
                if path in files:
                    problems.append((kind, path, *middle, text.replace(local, self.path)))
        return total, problems

    @contextmanager
    def new_files(self, progress: Progress) -> Iterator[NewFiles]:
        """Yield a local folder for new files, and upload these when the block ends.

        Objects that the same save uploaded before an interruption, since the last change of the
        manifest, are copied in the store instead. `progress` is called with 0 during the uploads,
        and may raise to stop. Raises StoreError (EIO) if an uploaded object has another size.
        """
        folders = (*SECTIONS, INDEX_FOLDER)
        with self._scratch(folders) as local:
            yield NewFiles(local, 0o600, is_temporary=True)
            sizes = {
                f"{folder}/{name}": os.path.getsize(os.path.join(local, folder, name))
                for folder in folders
                for name in sorted(os.listdir(os.path.join(local, folder)))
            }
            store = self.store
            uploaded = find_uploaded(store, MANIFEST, local, sizes)
            threads = self._options.max_concurrency
            parts = max(1, threads // max(1, len(sizes)))  # requests at a time for each file
            # the index first: it describes the objects of an interrupted save
            indexes = [path for path in sizes if os.path.dirname(path) == INDEX_FOLDER]
            shards = [path for path in sizes if os.path.dirname(path) != INDEX_FOLDER]
            for paths in (indexes, shards):
                puts = ((path, f"{local}/{path}", parts, uploaded.get(path)) for path in paths)
                run_tasks([partial(store.put_file, *put) for put in puts], threads, progress)
            if not self.has_files(sizes):
                text = "an uploaded object is missing or has another size"
                raise store_error(OSError(errno.EIO, text), "cannot save", self.path)


def _file_info(info: ObjectInfo) -> FileInfo:
    return FileInfo(info.nbytes, info.changed, (*info.tag, info.nbytes))


def _name_url(error: MLStateError, local: str, url: str) -> None:
    """Replace the local path `local` by `url` in an error: the user passed the URL."""
    error.args = tuple(
        value.replace(local, url) if isinstance(value, str) else value for value in error.args
    )
    for name in ("path", "filename", "strerror"):  # the last two of a StoreError only
        value = getattr(error, name, None)
        if isinstance(value, str):
            setattr(error, name, value.replace(local, url))
