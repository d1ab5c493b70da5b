"""`LocalFolder`: a local folder: permissions of new files, symbolic links, deletion, fsync."""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from ... import _core
from ..._common.atomic_file import mode_within
from ..._common.folders import is_folder, make_folder, make_path
from ..._common.log import is_logged, log
from ..._common.regular_file import NOT_REGULAR, check_regular
from ..._common.store_error import format_error, store_error
from .names import FOLDERS, LOCK, MANIFEST, group_by_part, is_checkpoint_file
from .protocol import FileInfo, NewFiles, TensorParts
from .weight_names import INDEX, SINGLE, SUFFIX, TORCH_SUFFIX, weights_root
from .writer_lock import WriterLock

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from ..._common.callback import Progress

_MOST_BYTES = 512 << 20  # of a manifest or an index
_HUB_NAME = re.compile(r"(\w[\w.-]*)/(\w[\w.-]*)\Z", re.ASCII)


def hub_hint(folder: str) -> str:
    """Return how to download a model if the missing path `folder` looks like a name on the Hub.

    Such a name is OWNER/MODEL in the working folder. Returns "" for other paths.
    """
    try:
        name = os.path.relpath(folder)
    except FileNotFoundError:  # the working folder was deleted
        return ""
    match = _HUB_NAME.match(name)
    if match is None or os.path.exists(match[1]):
        return ""
    return (
        f"; mlstate reads local files only: if it is a model of the Hugging Face Hub, download it "
        f"with: hf download {name} --local-dir {match[2]}"
    )


def _refuse_link(path: str) -> None:
    """Raise StoreError (ELOOP) if a subfolder is a link: its files may be another checkpoint's."""
    if os.path.islink(path):
        reason = OSError(
            errno.ELOOP,
            "it is a symbolic link, and the files behind it may be another checkpoint's: "
            "replace it by the folder itself",
        )
        raise store_error(reason, "cannot use the folder", path)


class LocalFolder:
    """A folder of this machine's file system, by its absolute path."""

    is_local = True
    excludes_writers = True

    def __init__(self, path: str, file: str = "") -> None:
        """Create the folder of an absolute path; nothing is opened.

        `file`: name of the only file to read, if the caller's path names one; else "".
        """
        self.path = path
        self.file = file
        self.named_path = os.path.join(path, file) if file else path

    def _join(self, path: str) -> str:
        return os.path.join(self.path, path)

    def _descriptor(self, part: str) -> _core.Descriptor:
        """Open the subfolder `part`, or the folder itself for ""; only the latter may be a link.

        Raises StoreError for a link, and OSError.
        """
        path = self._join(part)
        flags = os.O_RDONLY | os.O_DIRECTORY | (os.O_NOFOLLOW if part else 0)
        try:
            return _core.Descriptor(path, flags)
        except OSError:
            if part:
                _refuse_link(path)
            raise

    # ---- reading ----

    def without_cache(self) -> LocalFolder:
        """Return the folder: it keeps nothing."""
        return self

    def read(self, path: str, *, follow_links: bool = False) -> bytes:
        """Return the content of a regular file of at most 512 MiB.

        `follow_links`: accept a symbolic link, which else is not regular. Raises FormatError if the
        file is too long or not regular, StoreError if it is missing or cannot be read.
        """
        name = os.path.join(self.path, path)
        try:
            flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
            with _core.Descriptor(name, flags) as descriptor:
                # Asking for one byte more than the size shows whether the file grew.
                facts = os.fstat(descriptor.fileno())
                size = facts.st_size
                if not stat.S_ISREG(facts.st_mode):
                    is_folder = stat.S_ISDIR(facts.st_mode)
                    raise OSError(errno.ELOOP if is_folder else errno.ENXIO, NOT_REGULAR)
                if size > _MOST_BYTES:
                    raise format_error(f"{name}: too long", name)
                data = os.read(descriptor.fileno(), size + 1)
                if len(data) != size:  # it grew, or the read was short
                    with open(descriptor.fileno(), "rb", buffering=0, closefd=False) as file:
                        data += file.read()
                return data
        except OSError as error:
            if error.errno == errno.ENXIO:  # also of a socket
                raise format_error(f"{name}: {NOT_REGULAR}", name) from None
            if error.errno == errno.ELOOP:  # also of a link
                raise format_error(f"{name}: not a regular file", name) from None
            raise store_error(error, "cannot read the file", name) from None

    def prefetch(self, paths: Iterable[str]) -> None:
        """Do nothing: the disk is fast enough."""

    def names(self, part: str) -> list[str]:
        """Return the names in the subfolder `part` ("": the folder); [] if it does not exist.

        Raises StoreError if it cannot be listed, or if the subfolder is a link.
        """
        try:
            with self._descriptor(part) as descriptor:
                return os.listdir(descriptor.fileno())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise store_error(error, "cannot list the folder", self._join(part)) from None

    def exists(self, path: str) -> bool:
        """Return whether a file exists, even as a broken link."""
        return os.path.lexists(self._join(path))

    def has_files(self, sizes: Mapping[str, int]) -> bool:
        """Return whether regular files exist with these sizes (bytes by path); none is opened.

        A link counts as missing. Raises StoreError if the system does not tell.
        """
        for path, size in sizes.items():
            name = self._join(path)
            try:
                status = os.lstat(name)
            except (FileNotFoundError, NotADirectoryError):
                return False
            except OSError as error:
                raise store_error(error, "cannot find the file", name) from None
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                return False
        return True

    def find_files(self, paths: Collection[str]) -> dict[str, FileInfo]:
        """Return size and time of files by path, without those that do not exist.

        Links are not followed. Raises StoreError if the system does not tell.
        """
        infos = self._infos(sorted(paths), os.lstat)
        return {path: info for path, info in infos.items() if info is not None}

    def note_files(self, names: Iterable[str]) -> dict[str, FileInfo | None]:
        """Return size and time of files of another program by name; None for a missing file.

        Links are followed. Raises StoreError if the system does not tell.
        """
        return self._infos(names, os.stat)

    def _infos(
        self, paths: Iterable[str], stat_of: Callable[[str], os.stat_result]
    ) -> dict[str, FileInfo | None]:
        """Return size and time of files by path, None for a missing one; `stat_of` reads them."""
        infos: dict[str, FileInfo | None] = dict.fromkeys(paths)
        for path in infos:
            name = self._join(path)
            try:
                facts = stat_of(name)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise store_error(error, "cannot find the file", name) from None
            identity = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
            infos[path] = FileInfo(facts.st_size, facts.st_mtime_ns / 1e9, identity)
        return infos

    def _hint(self) -> str:
        """Return how to load this folder, whose files have unknown names, for an error; or ""."""
        names = self.names("")
        files = sorted(name for name in names if name.endswith(SUFFIX))
        if weights_root(names, TORCH_SUFFIX, folder=self.path) is not None:
            return f"; mlstate convert reads its {TORCH_SUFFIX} files"
        if "model_index.json" in names:
            return "; it is a pipeline of diffusers: pass one of its subfolders, such as unet"
        return f"; to load one of its files, pass the path of {files[0]}" if files else ""

    def missing_reason(self) -> str:
        """Return why the folder has no manifest: the end of an error's text, with a remedy."""
        if os.path.isfile(self.path):
            return (
                "it is a file, and a checkpoint is a folder; load_file reads .safetensors, "
                "mlstate convert others too"
            )
        if os.path.isdir(self.path):
            return f"the folder has no manifest.json, and no {SINGLE} or {INDEX}{self._hint()}"
        return f"there is no such folder{hub_hint(self.path)}"

    def has_checkpoint(self) -> bool:
        """Return whether the folder exists."""
        return os.path.isdir(self.path)

    def is_empty(self) -> bool:
        """Return whether the path is free to write to: it does not exist, or is an empty folder.

        What a first save that ended early leaves counts as empty. Raises StoreError if the folder
        cannot be listed.
        """
        if not os.path.lexists(self.path):
            return True
        try:
            names = set(os.listdir(self.path)) if os.path.isdir(self.path) else {MANIFEST}
        except OSError as error:
            raise store_error(error, "cannot list the folder", self.path) from None
        if "roots" not in names or not names <= {LOCK, *FOLDERS}:
            return not names
        return not self.names("roots") and all(
            is_checkpoint_file(part, name) for part in names - {LOCK} for name in self.names(part)
        )

    def is_outage(self, error: Exception) -> bool:
        """Return False: an error of the disk is a problem of the checkpoint."""
        return False

    def load(
        self, parts: TensorParts, verify: bool, mmap: bool, progress: Progress
    ) -> dict[str, Any]:
        """Return the tensors by key; `mmap`: as views of the files. See `Folder.load`."""
        return parts.merged.load(self.path, *parts[1:], verify, mmap, progress)

    def load_into(
        self, parts: TensorParts, targets: dict[str, Any], verify: bool, progress: Progress
    ) -> None:
        """Read the tensors into `targets`, which fit them; see `Folder.load_into`."""
        parts.merged.load_into(self.path, *parts[1:], targets, verify, progress)

    def verify(self, merged: _core.MergedIndex, progress: Progress) -> tuple[int, list[Any]]:
        """Read and verify the files of an index; return the bytes read and the problems' fields."""
        return merged.verify(self.path, progress)

    def header_files(self, names: Iterable[str]) -> AbstractContextManager[str]:
        """Return a context with the folder itself."""
        return nullcontext(self.path)

    def file_to_verify(
        self, name: str, has_checksums: Callable[[str], bool]
    ) -> AbstractContextManager[str]:
        """Return a context with the file's path."""
        return nullcontext(self._join(name))

    # ---- writing ----

    def claim(self, timeout: float | None = None) -> WriterLock:
        """Return the writers' lock; `timeout` is None if the caller has no such parameter."""
        return WriterLock(self.path, timeout=timeout)

    def create(self, parts: Iterable[str]) -> None:
        """Create the folder and its subfolders `parts` durably; these get the folder's permissions.

        Raises StoreError, also if a subfolder is a link or a file has the folder's name.
        """
        action = "cannot create the checkpoint's folder"
        try:
            make_path(self.path)
            is_changed = False
            for part in parts:
                path = self._join(part)
                _refuse_link(path)
                if not is_folder(path):
                    make_folder(path, os.stat(self.path).st_mode & 0o777)
                    is_changed = True
            if is_changed:
                _core.folder_sync(self.path)
        except FileExistsError:
            text = "a file has this name, and is not replaced by a folder: delete it first"
            raise store_error(FileExistsError(errno.EEXIST, text), action, self.path) from None
        except OSError as error:
            raise store_error(error, action, self.path) from None

    def new_files(self, progress: Progress) -> AbstractContextManager[NewFiles]:
        """Return a context with the folder itself."""
        mode = mode_within(self.path, self._join(MANIFEST))
        return nullcontext(NewFiles(self.path, mode, is_temporary=False))

    def add_empty(self, path: str) -> None:
        """Create an empty file durably; do nothing if the path exists.

        Raises StoreError, also if the subfolder is a link.
        """
        part, name = os.path.dirname(path), self._join(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        _refuse_link(self._join(part))
        try:
            with _core.Descriptor(name, flags) as descriptor:
                os.fsync(descriptor.fileno())
            _core.folder_sync(self._join(part))
        except FileExistsError:
            pass
        except OSError as error:
            raise store_error(error, "cannot create the file", name) from None

    def overwrite_start(self, path: str, data: bytes) -> None:
        """Replace the first ``len(data)`` bytes of a regular file durably; the rest stays.

        Raises StoreError, also if the subfolder or the file is a link, and FormatError for a file
        that is not regular. After an error the bytes may be partly replaced.
        """
        _refuse_link(self._join(os.path.dirname(path)))
        name = self._join(path)
        try:
            with _core.Descriptor(name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW) as descriptor:
                check_regular(os.fstat(descriptor.fileno()), name)
                done = 0
                while done < len(data):
                    done += os.pwrite(descriptor.fileno(), data[done:], done)
                os.fsync(descriptor.fileno())
        except OSError as error:
            raise store_error(error, "cannot write the file", name) from None

    def remove(self, paths: Iterable[str]) -> list[str]:
        """Delete the files at `paths`; return the paths of those that existed.

        Raises StoreError if a subfolder is a link, or if a file cannot be deleted; earlier files
        are then deleted already.
        """
        removed: list[str] = []
        try:
            for part, names in group_by_part(paths).items():
                self._remove_from(part, names, removed)
        finally:
            if is_logged("DEBUG"):
                for path in removed:
                    log("DEBUG", "%s: deleted the file %s", self.path, path)
        return removed

    def _remove_from(self, part: str, names: list[str], removed: list[str]) -> None:
        """Delete the files `names` of the subfolder `part`, and add their paths to `removed`.

        Files and subfolders that do not exist are ignored. Raises StoreError at the first file that
        cannot be deleted.
        """
        path = self._join(part)
        try:
            with self._descriptor(part) as descriptor:
                for name in names:
                    path = os.path.join(self.path, part, name)
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=descriptor.fileno())
                        removed.append(os.path.join(part, name))
        except FileNotFoundError:
            return
        except OSError as error:
            raise store_error(error, "cannot delete the file", path) from None

    def sync(self, part: str) -> None:
        """Make earlier deletions in the subfolder `part` durable."""
        _core.folder_sync(self._join(part))

    def orphan_time(self, *, local_clock: bool) -> float | None:
        """Return infinity, so that any unknown file is old enough: no other writer is running."""
        return float("inf")
