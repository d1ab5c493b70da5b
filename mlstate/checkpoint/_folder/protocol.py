"""`Files`, `Probe`, `Writers`: what is needed of a local folder or a store; `Folder` is all three.

A function asks for the narrowest of them; a new kind of store implements `Folder`. Paths are
relative to the folder, with one subfolder at most. Errors are a `StoreError`; a missing file is a
`FileNotFoundError` too.

    LocalFolder     descriptors, permissions, links, ``flock``
    ObjectFolder    objects below a URL, through obstore
    CachedFolder    an `ObjectFolder` whose loads read through a local cache

`open_folder` (open_path.py) chooses the class for a path.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from contextlib import AbstractContextManager

    from ... import _core
    from ..._common.callback import Progress


class FileInfo(NamedTuple):
    """Facts about a file that need no read of it.

    `changed`: time of the last change, seconds since 1970. `identity`: differs if the content was
    replaced; compared only with other identities of the same path.
    """

    nbytes: int
    changed: float
    identity: tuple[Any, ...]


class NewFiles(NamedTuple):
    """A local folder into which a save writes its new files; see `Folder.new_files`."""

    path: str
    mode: int  # permissions of the files
    is_temporary: bool  # the files are copied elsewhere: they need not be durable


class TensorParts(NamedTuple):
    """Parts of the tensors `keys` of one section that are read together."""

    merged: _core.MergedIndex  # of all ranks
    section: int  # 0 for the model, 1 for the optimizer, 2 for named states
    keys: list[str]
    cuts: Any  # the part of each tensor: a `Cutting`; to read into targets, any `Cuts`


class Exclusion(Protocol):
    """The exclusion of other writers by one that deletes or writes files, if it is possible.

    `holder` ends it at the end of its `with` statement. No interrupt can prevent this, not even a
    second one during the clean-up after the first::

        with exclusion.holder:
            exclusion.acquire()
    """

    @property
    def holder(self) -> AbstractContextManager[object]:
        """The context that ends the exclusion."""

    def acquire(self) -> None:
        """Begin; raise StoreError (EBUSY) if another writer excludes this one."""

    def note(self, generation: str | None) -> None:
        """Record the generation (16 hex digits) before its first file is written.

        None: nothing is being written.
        """


class NoExclusion:
    """Does nothing: a store has no locks, and a dry run needs none."""

    holder: AbstractContextManager[object] = nullcontext()

    def acquire(self) -> None:
        """Do nothing."""

    def note(self, generation: str | None) -> None:
        """Do nothing."""


class Claim(Exclusion, Protocol):
    """The right of one writer to replace the manifest."""

    unfinished: str | None  # generation of a writer that died, if the claim can tell
    is_unsure: bool  # after a failed `commit`: it may have, or may still, replace the manifest

    def commit(self, data: bytes, root: str | None = None) -> None:
        """Replace the manifest by `data` durably.

        `root`: path of a second copy, which is written before it; None: no copy.
        """


class Place(Protocol):
    """Where the folder is."""

    is_local: bool  # its files can be mapped, compared and looked at without a request

    @property
    def path(self) -> str:
        """Absolute path, or the URL; it opens the same folder again."""

    @property
    def file(self) -> str:
        """Name of the only file that the caller's path names, to be read only; else empty."""

    @property
    def named_path(self) -> str:
        """Path or URL of `file`, or without one of the folder; it opens the same again."""


class Files(Place, Protocol):
    """The files of a folder, to be read."""

    def names(self, part: str) -> list[str]:
        """Return the names in the subfolder `part`, or in the folder itself for ``""``.

        Nothing is returned for a subfolder that does not exist.
        """

    def read(self, path: str, *, follow_links: bool = False) -> bytes:
        """Return the content of a manifest or an index, at most 512 MiB.

        `follow_links`: accept a symbolic link, as files of other programs may be. Raises
        FormatError for a longer file, or one that is not regular.
        """

    def prefetch(self, paths: Iterable[str]) -> None:
        """Read the roots at `paths` at the same time, if this makes their later `read` faster.

        Never raises for a root that cannot be read: its `read` does.
        """

    def without_cache(self) -> Folder:
        """Return the same folder, which keeps nothing that was read before."""

    def note_files(self, names: Iterable[str]) -> dict[str, FileInfo | None]:
        """Return size and time of each file of another program by name; None for a missing file.

        In a store, later reads of these names fail if the content was replaced since.
        """

    def header_files(self, names: Iterable[str]) -> AbstractContextManager[str]:
        """Return a context with the path of a local folder that has at least the headers of files.

        `names`: safetensors files in this folder, without a subfolder.
        """

    def file_to_verify(
        self, name: str, has_checksums: Callable[[str], bool]
    ) -> AbstractContextManager[str]:
        """Return a context with the local path of the safetensors file `name`.

        `has_checksums` is called with a local path that has at least the header. If it returns
        False, the tensors' bytes at the path may be zeros instead of the content.
        """

    def load(
        self, parts: TensorParts, verify: bool, mmap: bool, progress: Progress
    ) -> dict[str, Any]:
        """Return the tensors `parts` as new arrays, by key; all have the same cut.

        `verify`: compare the bytes with their checksums. `mmap`: return read-only views of the
        files if possible. `progress`: called with numbers of bytes that were read.
        """

    def load_into(
        self, parts: TensorParts, targets: dict[str, Any], verify: bool, progress: Progress
    ) -> None:
        """Read the tensors `parts` into existing arrays or torch tensors, `targets` by key.

        `progress` is called with numbers of bytes as they arrive. After an error, the content of
        the targets is undefined.
        """

    def verify(self, merged: _core.MergedIndex, progress: Progress) -> tuple[int, list[Any]]:
        """Read and verify the files that `merged` lists.

        Returns the number of bytes read, and for each problem a tuple of the fields of a `Problem`.
        `progress` is called with numbers of bytes.
        """


class Probe(Place, Protocol):
    """What is in a folder, without reading files."""

    def exists(self, path: str) -> bool:
        """Return whether a file exists, even as a broken link."""

    def has_files(self, sizes: Mapping[str, int]) -> bool:
        """Return whether all files exist with these sizes (bytes by path); none is opened."""

    def find_files(self, paths: Collection[str]) -> dict[str, FileInfo]:
        """Return size and time of each file by path, without those that do not exist."""

    def has_checkpoint(self) -> bool:
        """Return whether there may be a checkpoint.

        A local folder must exist; in a store, which has no folders, the manifest must.
        """

    def missing_reason(self) -> str:
        """Return why the folder has no manifest; "" if the error of `read` tells more."""

    def is_empty(self) -> bool:
        """Return whether a new checkpoint would hide or replace nothing."""

    def is_outage(self, error: Exception) -> bool:
        """Return whether an error tells nothing about the checkpoint: the store failed."""


class Writers(Place, Protocol):
    """Changes of a folder, and the exclusion of other writers."""

    excludes_writers: bool  # a claim keeps other writers out: no unknown file is in use

    def claim(self, timeout: float | None = None) -> Claim:
        """Return a writer's claim, not yet acquired; raise if options of the folder are wrong.

        `timeout`: seconds that `acquire` waits for another writer; None: the caller has no such
        parameter, and `acquire` does not wait.
        """

    def create(self, parts: Iterable[str]) -> None:
        """Create the folder and its subfolders `parts` durably; existing ones stay."""

    def new_files(self, progress: Progress) -> AbstractContextManager[NewFiles]:
        """Return the context for a save's new files; see `NewFiles`.

        When it ends without an error, they are complete in the folder. `progress` is called with 0
        during uploads, and may raise to stop.
        """

    def add_empty(self, path: str) -> None:
        """Create an empty file durably, unless it exists; nothing is opened or changed."""

    def remove(self, paths: Iterable[str]) -> list[str]:
        """Delete the files at `paths`; return the paths of those that may have existed.

        Missing files are ignored.
        """

    def sync(self, part: str) -> None:
        """Make earlier deletions in the subfolder `part` durable."""

    def orphan_time(self, *, local_clock: bool) -> float | None:
        """Return a time: an unknown file that is older than it was left by a dead writer.

        In seconds since 1970; infinity if no writer can be running; None if this is unknown, so
        that no unknown file may be deleted. `local_clock`: use this machine's clock, because
        reading a store's clock takes a write.
        """


class Folder(Files, Probe, Writers, Protocol):
    """The folder of one checkpoint, or of one `CheckpointManager`."""


def require_local(folder: Place, action: str, remedy: str) -> None:
    """Raise ValueError with the text `remedy` if `action` needs local files, unlike these."""
    if not folder.is_local:
        raise ValueError(f"{folder.path}: {action} is not possible in an object store: {remedy}")


def exclusion_of(folder: Writers, timeout: float) -> Exclusion:
    """Return an exclusion of other writers, not yet acquired, for calls that only delete files.

    `timeout`: seconds that `acquire` waits for another writer.
    """
    return folder.claim(timeout) if folder.excludes_writers else NoExclusion()
