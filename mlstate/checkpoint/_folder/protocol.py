"""`Folder`, the protocol of a place for a checkpoint's files: a new kind of store is one class.

Paths are relative to the folder, with one subfolder at most. Errors are a `StoreError`; a missing
file is a `FileNotFoundError` too.

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
    from ..._sharding.layout import Cuts, Cutting


class FileInfo(NamedTuple):
    """Size, time of the last change (seconds since 1970), and the identity of the content."""

    nbytes: int
    changed: float
    identity: tuple[Any, ...]


class NewFiles(NamedTuple):
    """A local folder for new files."""

    path: str
    mode: int  # permissions of the files
    is_temporary: bool  # the files are copied elsewhere: they need not be durable


class Exclusion(Protocol):
    """The exclusion of other writers by one that deletes or writes files, where it is possible.

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
        """Record the generation before its first file is written; None if nothing is written."""


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
        """Replace the manifest durably; write the second copy `root`, a path, before it."""


class Folder(Protocol):
    """The folder of one checkpoint, or of one `CheckpointManager`."""

    is_local: bool  # its files can be mapped, compared and looked at without a request
    excludes_writers: bool  # a claim keeps other writers out: no unknown file is in use

    @property
    def path(self) -> str:
        """Absolute path, or the URL; it opens the same folder again."""

    @property
    def file(self) -> str:
        """Name of the only file that the caller's path names, to be read only; else empty."""

    def require_local(self, action: str, remedy: str) -> None:
        """Raise ValueError if `action` is not possible here."""

    def is_same(self, other: Folder) -> bool:
        """Return whether both are one folder."""

    # ---- reading ----

    def without_cache(self) -> Folder:
        """Return the same folder, which keeps nothing that was read before."""

    def read(self, path: str, *, follow_links: bool = False) -> bytes:
        """Return the content of a manifest or an index."""

    def prefetch(self, paths: Iterable[str]) -> None:
        """Read roots at the same time, if this makes their later `read` faster."""

    def names(self, part: str) -> list[str]:
        """Return the names in a subfolder, or in the folder itself for ``""``."""

    def list_links(self, parts: Iterable[str]) -> list[str]:
        """Return the subfolders that are links, whose files may be another checkpoint's."""

    def exists(self, path: str) -> bool:
        """Return whether a file exists, even as a broken link."""

    def has_files(self, sizes: Mapping[str, int]) -> bool:
        """Return whether files exist with these sizes; the files are not opened."""

    def find_files(self, paths: Collection[str]) -> dict[str, FileInfo]:
        """Return size and time of files, without those that do not exist."""

    def note_files(self, names: Iterable[str]) -> dict[str, FileInfo | None]:
        """Return size and time of files of another program; later reads require this content."""

    def find_weights(self) -> str | None:
        """Return the root of the weights of a Hugging Face folder; see weight_names.py."""

    def missing_reason(self) -> str:
        """Return why the folder has no manifest; "" if the error of `read` tells more."""

    def has_checkpoint(self) -> bool:
        """Return whether the folder exists, or, where folders do not exist, has a checkpoint."""

    def is_empty(self) -> bool:
        """Return whether a new checkpoint would hide or replace nothing."""

    def require_folder(self) -> None:
        """Raise StoreError if there is no such folder, where folders exist."""

    def is_outage(self, error: Exception) -> bool:
        """Return whether an error tells nothing about the checkpoint: the store failed."""

    def load(
        self,
        merged: _core.MergedIndex,
        section: int,
        keys: list[str],
        cuts: Cutting,
        verify: bool,
        mmap: bool,
        progress: Callable[[int], object] | None,
    ) -> dict[str, Any]:
        """Return the tensors of `keys` in a section as new arrays; `mmap`: views if possible.

        `cuts`: the part of each tensor. `progress`: called with the bytes that were read.
        """

    def load_into(
        self,
        merged: _core.MergedIndex,
        section: int,
        keys: list[str],
        cuts: Cuts,
        targets: dict[str, Any],
        verify: bool,
        progress: Callable[[int], object] | None,
    ) -> None:
        """Read parts of tensors into existing arrays, or torch tensors.

        `merged` is the index of all ranks, `section` the number of its section (model, optimizer
        or states). `keys` are the names in it, `cuts` the part of each that is read, and `targets`
        the array for each. `progress` is called with numbers of bytes as they arrive.
        """

    def verify(
        self, merged: _core.MergedIndex, progress: Callable[[int], object] | None
    ) -> tuple[int, list[Any]]:
        """Read and verify the files of an index; return bytes read and fields of problems."""

    def header_files(self, names: Iterable[str]) -> AbstractContextManager[str]:
        """Return a context with a local folder that has at least the headers of files."""

    def file_to_verify(
        self, name: str, has_checksums: Callable[[str], bool]
    ) -> AbstractContextManager[str]:
        """Return a context with the local path of a safetensors file.

        Unless `has_checksums` is true of a path with its header, the content may be missing.
        """

    # ---- writing ----

    def claim(self, timeout: float | None = None) -> Claim:
        """Return a writer's claim, not yet acquired; raise if options of the folder are wrong."""

    def exclusive(self, timeout: float) -> Exclusion:
        """Return an exclusion of other writers, not yet acquired, for calls that only delete."""

    def create(self, parts: Iterable[str]) -> None:
        """Create the folder and subfolders durably."""

    def new_files(
        self, progress: Callable[[int], object] | None
    ) -> AbstractContextManager[NewFiles]:
        """Return the context for new files; they are complete in the folder at its end."""

    def add_empty(self, path: str) -> None:
        """Create an empty file durably, unless it exists; nothing is opened or changed."""

    def overwrite_start(self, path: str, data: bytes) -> None:
        """Rewrite the first bytes of a file durably, if `require_local` raises nothing."""

    def remove(self, paths: Iterable[str]) -> list[str]:
        """Delete files; return the paths of those that may have existed."""

    def sync(self, part: str) -> None:
        """Make deletions in a subfolder durable."""

    def orphan_time(self, *, local_clock: bool) -> float | None:
        """Return the time since which unknown files may be a running writer's; None: unknown."""
