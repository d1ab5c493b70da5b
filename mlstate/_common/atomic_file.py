"""Atomic replacement of files and folders of other formats: permissions, owner, undo, fsync.

A writer takes a `Target` when it begins, writes under a temporary name in the same folder
(`Target.write_path`), and ends with `Target.put`, which replaces only the content that the target
had at the beginning.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias

from .. import _core
from ..errors import StoreError
from .folders import make_parents
from .local_path import local_path
from .store_error import store_error
from .waiting import remove_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # Relative path, kind, inode, size and times of a file; the first one is the target itself.
    Entry: TypeAlias = tuple[str, int, int, int, int, int]

# Errors of a file system without hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def _entry_of(name: str, info: os.stat_result, *, is_top: bool) -> Entry:
    """Return the identity of a file, which changes if it is replaced or written.

    `name`: its path in the target. `is_top`: it is the target itself, whose ctime a rename changes;
    of a folder that is the target, size and times are left out too.
    """
    kind = stat.S_IFMT(info.st_mode)
    if is_top and stat.S_ISDIR(info.st_mode):
        return name, kind, info.st_ino, 0, 0, 0
    changed = 0 if is_top else info.st_ctime_ns
    return name, kind, info.st_ino, info.st_size, info.st_mtime_ns, changed


def _list_folder(folder: str, prefix: str) -> Iterator[Entry]:
    """Yield the entries of all files and folders below `folder`; links are not followed.

    `prefix`: its path in the target with a slash at the end, "" for the target itself.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            yield _entry_of(name, entry.stat(follow_symlinks=False), is_top=False)
            if entry.is_dir(follow_symlinks=False):
                yield from _list_folder(entry.path, f"{name}/")


def _list_path(path: str) -> tuple[Entry, ...]:
    """Return the entries of a file or folder, to detect a change; () if it does not exist.

    The first one is of `path` itself; those below a folder follow, sorted by their paths in it.
    """
    try:
        top = _entry_of("", os.lstat(path), is_top=True)
    except FileNotFoundError:
        return ()
    inner = _list_folder(path, "") if stat.S_ISDIR(top[1]) else ()
    return top, *sorted(inner)


def _remove(path: str) -> None:
    """Delete a file or folder as far as possible; errors are ignored."""
    with suppress(OSError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            remove_folder(path)
        else:
            os.unlink(path)


def _rename_new(source: str, target: str) -> None:
    """Rename `source` to a name that does not exist; raise FileExistsError if it does.

    If the file system cannot do this in one operation, a hard link is used for a file, and without
    links a check before.
    """
    try:
        _core.path_rename(source, target, False)  # no swap
        return
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
    if os.path.isdir(source):
        os.rename(source, target)  # the system refuses all targets but an empty folder
        return
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.rename(source, target)  # such a file system cannot do better
        return
    os.unlink(source)


def _keep_owner_and_mode(path: str, old: str) -> None:
    """Give the file `path` the permission bits of `old`, and its owner if the system allows it.

    Nothing happens if `old` does not exist.
    """
    with suppress(FileNotFoundError):
        info = os.stat(old)
        with suppress(OSError):
            os.chown(path, info.st_uid, info.st_gid)
        change_mode(path, stat.S_IMODE(info.st_mode))


class Target(NamedTuple):
    """A path to write, and its content when the writing began."""

    path: str  # without symbolic links
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, path: str | os.PathLike[str], *, follow_links: bool = True) -> Target:
        """Return the target at a path, as it is now; raise StoreError if it cannot be listed.

        `follow_links`: of a symbolic link, the target is the file or folder that it leads to.
        """
        resolved = os.path.realpath(local_path(path)) if follow_links else local_path(path)
        try:
            return cls(resolved, _list_path(resolved))
        except OSError as error:
            raise store_error(error, "cannot list the target", resolved) from None

    @property
    def is_vacant(self) -> bool:
        """Whether there was nothing to replace: no target, or an empty folder."""
        return not self.entries or (len(self.entries) == 1 and self.is_folder)

    @property
    def is_folder(self) -> bool:
        """Whether there was a folder."""
        return bool(self.entries) and stat.S_ISDIR(self.entries[0][1])

    @property
    def is_file(self) -> bool:
        """Whether there was a regular file."""
        return bool(self.entries) and stat.S_ISREG(self.entries[0][1])

    def write_path(self, write: Callable[[str], object]) -> None:
        """Call `write` with a temporary path; the file or folder there becomes the target.

        Missing parents are created, and stay.
        After an exception, also of `write`, the temporary is deleted and the target is as `put`
        leaves it: unchanged, except after an error of the last sync. A signal waits until the
        temporary is deleted.
        """
        folder = os.path.dirname(self.path)
        make_parents(self.path)
        temporary = os.path.join(folder, f".mlstate-{os.urandom(8).hex()}.tmp")
        with _core.deferred_interrupts() as section:
            try:
                with section.allowed():
                    write(temporary)
                self.put(temporary)
            except BaseException as error:
                if isinstance(error, OSError) and error.filename == temporary:
                    error.filename = self.path  # the name that the caller knows
                    if isinstance(error, StoreError):
                        error.path = self.path
                _remove(temporary)
                raise

    def write_file(self, write: Callable[[str], object]) -> None:
        """Call `write` with a temporary path; the file there becomes the target, as `write_path`.

        An existing file must be writable, and keeps its permission bits. Raises OSError for a
        folder (EISDIR) or a read-only file (EACCES), ValueError for a FIFO, socket or device.
        """
        if self.is_folder:
            text = "it is a folder, not a file: choose another path"
            raise IsADirectoryError(errno.EISDIR, text, self.path)
        if self.entries and not self.is_file:
            raise ValueError(
                f"{self.path}: only a regular file can be replaced, not a FIFO, socket, device or "
                "link"
            )
        if self.is_file and not os.access(self.path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.path)

        def write_and_keep_mode(temporary: str) -> None:
            write(temporary)
            if self.is_file:
                _keep_owner_and_mode(temporary, self.path)

        self.write_path(write_and_keep_mode)

    def write_content(self, write: Callable[[IO[bytes]], object]) -> None:
        """Call `write` with an open file, which becomes the target durably, as `write_file`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)

        def write_and_sync(temporary: str) -> None:
            with (
                _core.Descriptor(temporary, flags) as descriptor,
                open(descriptor.fileno(), "w+b", closefd=False) as file,
            ):
                write(file)
                file.flush()
                os.fsync(file.fileno())

        self.write_file(write_and_sync)

    def put(self, new: str) -> None:
        """Rename a complete file or folder to the target, durably.

        `new`: its temporary path. Raises StoreError (EEXIST) if the target changed since the
        writing began. The target is unchanged after this and every other error before the last
        sync. A signal waits until one content is in place and the other one is deleted.
        """
        old = f"{new}.old"
        with _core.deferred_interrupts():
            try:
                if self.is_vacant:
                    self._take_vacant(new)
                else:
                    self._exchange(new, old)
            except StoreError:
                raise
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR):
                    raise self._changed() from None
                raise store_error(error, "cannot write the target", self.path) from None
            try:
                _core.folder_sync(os.path.dirname(self.path))
            finally:  # the new content is in place
                _remove(old)

    def _take_vacant(self, new: str) -> None:
        """Rename `new` to the target, which must still be missing or an empty folder."""
        if self.entries and os.path.isdir(new):
            os.rename(new, self.path)  # the system refuses all targets but an empty folder
        else:
            _rename_new(new, self.path)

    def _exchange(self, new: str, old: str) -> None:
        """Put `new` in the target's place, and keep the old content at the path `old`.

        If that is not the content at the beginning, everything is restored, and StoreError (EEXIST)
        is raised.
        """
        if _list_path(self.path) != self.entries:  # mostly noticed here, before anyone sees a swap
            raise self._changed()
        created = os.lstat(new)
        try:
            self._swap(new, old)
            if _list_path(old) != self.entries:
                raise self._changed()
        except BaseException:
            self._restore(new, old, created)
            raise

    def _swap(self, new: str, old: str) -> None:
        """Rename `new` to the target, and the target's content to `old`.

        The system exchanges both at once if it can, and the old content is then renamed from `new`
        to `old`. If this second rename fails, the target has the new content and `new` the old
        one, which `_restore` undoes.
        """
        try:
            _core.path_rename(new, self.path, True)  # swap
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            self._swap_by_steps(new, old)
        else:
            os.rename(new, old)

    def _swap_by_steps(self, new: str, old: str) -> None:
        """Rename `new` to the target and the target's content to `old`, one after the other.

        For systems that cannot exchange two names at once. If files can have links, a file exists
        at the target at any moment, even if the process is killed.
        """
        if self._is_linked(new, old):
            os.rename(new, self.path)
        else:
            os.rename(self.path, old)
            _rename_new(new, self.path)

    def _is_linked(self, new: str, old: str) -> bool:
        """Give the target the second name `old`, if `new` and the target are files.

        Returns False without it: for folders, and if the file system has no links. Raises other
        errors of the system.
        """
        if os.path.isdir(new) or not self.is_file:
            return False
        try:
            os.link(self.path, old, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        return True

    def _restore(self, new: str, old: str, created: os.stat_result) -> None:
        """Undo the renames of `_swap` after an error; the old content is never deleted.

        `created`: the ``lstat`` of the new file or folder, to recognize it at either path. Raises
        StoreError, which names the path `old`, if the old content cannot get its place back.
        """
        with suppress(FileNotFoundError):
            if not os.path.samestat(os.lstat(new), created):
                os.rename(new, old)  # it is the old content, and callers delete `new`
        if not os.path.lexists(old):
            return
        try:
            if not os.path.lexists(self.path):
                _rename_new(old, self.path)
            elif os.path.samestat(os.lstat(self.path), created):  # the new content is in place
                self._swap(old, new)
                _remove(new)
            elif os.path.samestat(os.lstat(self.path), os.lstat(old)):  # by `_is_linked`
                os.unlink(old)
            else:
                raise FileExistsError(errno.EEXIST, "another process wrote it")
        except OSError as error:
            raise StoreError(
                error.errno,
                f"cannot restore the target: {error.strerror}; its earlier content is {old}",
                self.path,
            ) from error

    def _changed(self) -> StoreError:
        """Return the StoreError (EEXIST) for a target that another program changed."""
        state = "appeared" if self.is_vacant else "was changed"
        text = f"it {state} while its replacement was written, and is left as it is"
        return store_error(OSError(errno.EEXIST, text), "cannot write the target", self.path)


def change_mode(file: int | str, mode: int) -> None:
    """Set the permission bits of a file, by descriptor or path.

    An error is ignored if the file has them already: file systems without permissions, such as FAT
    and CIFS, refuse every change.
    """
    try:
        if isinstance(file, int):
            os.fchmod(file, mode)
        else:
            os.chmod(file, mode)
    except OSError as error:
        is_refused = error.errno in (errno.EPERM, errno.ENOTSUP)
        if not is_refused or stat.S_IMODE(os.stat(file).st_mode) != mode:
            raise


def mode_within(*paths: str) -> int:
    """Return the permissions of a new file: no more than the files and folders `paths` have.

    The owner can always read and write it. A missing path restricts nothing. Raises StoreError if
    the permissions cannot be read.
    """
    mode = 0o666
    for path in paths:
        try:
            mode &= os.stat(path).st_mode | 0o600
        except FileNotFoundError:
            continue
        except OSError as error:
            raise store_error(error, "cannot read the permissions", path) from None
    return mode
