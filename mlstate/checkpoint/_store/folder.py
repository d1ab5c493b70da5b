"""The folder of a checkpoint: its roots, its files by name, and the files that no root needs."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _core
from ..._common.log import is_logged, log
from ..._common.regular_file import check_regular, open_descriptor
from ..._common.store_error import format_error
from ..._common.store_error import store_error as store_error
from ...errors import FormatError, MLStateError, StoreError
from .._remote.remote_folder import RemoteFolder, checkpoint_folder
from .manifest import MOST_SEQUENCE, IndexRecord, Manifest, parse
from .weight_files import (
    INDEX,
    ROOTS,
    hub_hint,
    is_weights_root,
    read_merged_index,
    read_weights,
    weights_root,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from typing import TypeVar

    _Result = TypeVar("_Result")

MANIFEST = "manifest.json"
_NONE: Mapping[str, Any] = {}
_MOST_BYTES = 512 << 20  # of a manifest or an index
SECTIONS = ("params", "optim_state", "states")
FOLDERS = (*SECTIONS, "index", "roots")
TRIES = 20  # attempts to read a checkpoint that writers keep replacing
_ROOT = re.compile(r"(\d{8}|[1-9]\d{8,18})\.([0-9a-f]{16})\.json\Z", re.ASCII)
_MARK = ".damaged"  # suffix of a mark, see damage_marks.py
_SHARDS = re.compile(r".+\.[0-9a-f]{16}-\d+\.safetensors(\.tmp)?\Z", re.ASCII)
_INDEX = re.compile(r"[0-9a-f]{16}\.\d+\.json(\.tmp)?\Z", re.ASCII)
_PATTERNS = {**dict.fromkeys(SECTIONS, _SHARDS), "index": _INDEX}
_TEMPORARY = re.compile(r"\.mlstate-[0-9a-f]{16}\.tmp(\.old)?\Z", re.ASCII)


class Root(NamedTuple):
    """A root under ``roots/``."""

    sequence: int
    generation: str
    path: str  # relative to the folder


class RootPath(NamedTuple):
    """A root in a folder; also the path that internal callers pass to `load` and `verify`."""

    folder: str
    root: str = MANIFEST
    manifest: Manifest | None = None  # of the root, if already read

    def __fspath__(self) -> str:
        return self.folder


def open_path(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> RootPath:
    """Return the folder and the root to read for the argument `path`."""
    given = path if isinstance(path, RootPath) else RootPath(path)  # type: ignore[arg-type]
    folder = checkpoint_folder(given.folder, storage_options, reads=True)
    return given._replace(folder=folder)


def _read_descriptor(descriptor: int, path: str) -> bytes:
    """Read all of an open file; raise FormatError if it is too long."""
    found = os.fstat(descriptor)
    if found.st_size > _MOST_BYTES:
        raise format_error(f"{path}: too long", path)
    data = os.read(descriptor, found.st_size + 1)
    if len(data) == found.st_size:
        return data
    with open(descriptor, "rb", buffering=0, closefd=False) as file:  # it grew, or read was short
        return data + file.read()


def read_bytes(folder: str, name: str, *, follow_links: bool = False) -> bytes:
    """Read a small regular file of the folder."""
    path = os.path.join(folder, name)
    if isinstance(folder, RemoteFolder):
        try:
            return folder.read(name)
        except ValueError as error:
            raise format_error(f"{path}: {error}", path) from None
    try:
        with open_descriptor(path, 0 if follow_links else os.O_NOFOLLOW) as descriptor:
            return _read_descriptor(descriptor.fileno(), path)
    except OSError as error:
        if error.errno == errno.ELOOP or isinstance(error, IsADirectoryError):
            raise format_error(f"{path}: not a regular file", path) from None
        raise store_error(error, "cannot read the file", path) from None


def current_root(folder: str, root: str = MANIFEST) -> str:
    """Return `root`, or the root of a Hugging Face folder if it has no manifest.

    Of a URL that names one file, it is this file.
    """
    if isinstance(folder, RemoteFolder):
        return folder.file if folder.file and root == MANIFEST else root
    if root != MANIFEST or exists(folder, MANIFEST):
        return root
    return weights_root(folder) or root


def weights_in_store(folder: RemoteFolder) -> str | None:
    """Return the root of a Hugging Face folder in a store; None if there is none."""
    names = folder.list_names("")
    return next((name for name in ROOTS if name in names), None)


def open_root(folder: str, root: str = MANIFEST) -> tuple[str, Manifest | None]:
    """Return what `current_root` does, and the manifest if that took reading it, in a store."""
    if not isinstance(folder, RemoteFolder) or folder.file or root != MANIFEST:
        return current_root(folder, root), None
    try:
        return root, read_manifest(folder, root)
    except FileNotFoundError:
        with suppress(StoreError):
            weights = weights_in_store(folder)
            if weights is not None:
                return weights, None
        raise


def read_manifest(folder: str, name: str = MANIFEST) -> Manifest:
    """Read a root; raise FormatError if a file under ``roots/`` does not match its own name."""
    if is_weights_root(name):
        try:
            # the index in a download cache is a link
            data = read_bytes(folder, name, follow_links=True) if name == INDEX else None
            return read_weights(folder, name, data)
        except OSError as error:
            raise store_error(error, "cannot read the folder", folder) from None
    try:
        data = read_bytes(folder, name)
    except StoreError as error:
        if name != MANIFEST or error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        if isinstance(folder, RemoteFolder):  # object or bucket: the store knows
            raise
        raise _no_checkpoint(folder, error.errno) from None
    manifest = parse(data, os.path.join(folder, name))
    if name not in (MANIFEST, root_path(manifest)):
        path = os.path.join(folder, name)
        raise format_error(
            f"{path}: the content does not match the file name: it is step {manifest.step}, whose "
            f"name would be {root_path(manifest)}",
            path,
        )
    return manifest


def is_replaced(folder: str, root: str, generation: str) -> bool:
    """Return whether a writer replaced a root since it was read; its files may be deleted."""
    return read_manifest(folder, root).generation != generation


def read_root(
    folder: str,
    root: str,
    read: Callable[[Manifest], _Result],
    manifest: Manifest | None = None,
) -> _Result:
    """Call `read` with a root, and return its result.

    If `read` misses a file and a writer has replaced the root meanwhile, start again: files are
    deleted only after every root that names them. `manifest` is the root if already read.
    """
    for _ in range(TRIES - 1):
        found = read_manifest(folder, root) if manifest is None else manifest
        manifest = None
        try:
            return read(found)
        except FileNotFoundError:
            if not is_replaced(folder, root, found.generation):
                raise
    return read(read_manifest(folder, root))


def _no_checkpoint(folder: str, number: int) -> StoreError:
    """Return the error for a missing checkpoint; it describes the actual content of the path."""
    # OSError picks the subclass by errno
    reason = OSError(number, f"there is no such folder{hub_hint(folder)}")
    if os.path.isfile(folder):
        reason.strerror = (
            "it is a file, and a checkpoint is a folder; load_file reads .safetensors, "
            "mlstate convert others too"
        )
    elif list_roots(folder):
        reason.strerror = "manifest.json is gone; older steps are there for verify(repair=True)"
    elif os.path.isdir(folder):
        reason.strerror = f"the folder has no manifest.json, and no {' or '.join(ROOTS)}"
    return store_error(reason, "cannot read the checkpoint", folder)


def _opened(folder: str, part: str) -> _core.Descriptor:
    """Open a subfolder, or the folder itself if `part` is ""; only the latter may be a link."""
    path = os.path.join(folder, part)
    try:
        return _core.Descriptor(path, os.O_RDONLY | os.O_DIRECTORY | (os.O_NOFOLLOW if part else 0))
    except OSError:
        if part:
            refuse_link(path)
        raise


def refuse_link(path: str) -> None:
    """Raise StoreError if a path is a symbolic link."""
    if os.path.islink(path):
        reason = OSError(
            errno.ELOOP,
            "it is a symbolic link, and the files behind it may be another checkpoint's: "
            "replace it by the folder itself",
        )
        raise store_error(reason, "cannot use the folder", path)


def list_names(folder: str, part: str) -> list[str]:
    """Return the names in a subfolder; an empty list if it does not exist."""
    if isinstance(folder, RemoteFolder):
        return folder.list_names(part)
    try:
        with _opened(folder, part) as descriptor:
            return os.listdir(descriptor.fileno())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise store_error(error, "cannot list the folder", os.path.join(folder, part)) from None


def _root_of(name: str) -> Root | None:
    """Return the root for a file name under ``roots/``; None if no save writes such a name."""
    match = _ROOT.match(name)
    if match is None or not 1 <= int(match[1]) <= MOST_SEQUENCE:
        return None
    return Root(int(match[1]), match[2], f"roots/{name}")


def list_roots(folder: str) -> list[Root]:
    """Return the roots under ``roots/``, oldest first."""
    return sorted(filter(None, map(_root_of, list_names(folder, "roots"))))


def prefetch(folder: str, roots: list[Root]) -> None:
    """Read roots in an object store at the same time; otherwise do nothing."""
    if isinstance(folder, RemoteFolder):
        folder.prefetch(root.path for root in roots)


def next_sequence(folder: str, newest: Manifest | None) -> int:
    """Return the sequence number of the next save: the newest valid root's, plus one.

    A file name alone is not trusted: a stray file would determine all later numbers.
    """
    found = 0 if newest is None else newest.sequence
    for root in reversed(list_roots(folder)):
        if root.sequence <= found:
            break
        with suppress(MLStateError):
            found = read_manifest(folder, root.path).sequence
    if found >= MOST_SEQUENCE:
        text = f"{folder}: sequence {found} is the last that a manifest can hold"
        raise format_error(text, folder)
    return found + 1


def holds_steps(folder: str) -> bool:
    """Return whether the folder holds steps of a `CheckpointManager`.

    A file with the name of a root counts only if its content is a root.
    """
    roots = list_roots(folder)
    for root in reversed(roots):
        with suppress(FileNotFoundError, FormatError):
            _core.json_checksum_check(read_bytes(folder, root.path), root.path)
            return True
    with suppress(FileNotFoundError, FormatError):  # every root is damaged
        generation = read_manifest(folder).generation if roots else ""
        return any(root.generation == generation for root in roots)
    return False


# Suffixes of files that other programs, or `save_file`, read and write.
_FILE_SUFFIXES = frozenset(
    [
        ".safetensors",
        ".npz",
        ".npy",
        ".pt",
        ".pth",
        ".bin",
        ".ckpt",
        ".pkl",
        ".pickle",
        ".h5",
        ".hdf5",
        ".msgpack",
        ".onnx",
        ".gguf",
        ".json",
    ]
)


def refuse_file_name(folder: str | os.PathLike[str]) -> None:
    """Raise ValueError for a new folder whose name has the suffix of another format's files."""
    suffix = os.path.splitext(folder)[1].lower()
    if suffix not in _FILE_SUFFIXES:
        return
    if isinstance(folder, RemoteFolder):
        is_checkpoint = exists(folder, MANIFEST)
    else:
        is_checkpoint = os.path.isdir(folder)
    if is_checkpoint:
        return
    remedy = "mlstate convert writes files of other formats"
    if suffix == ".safetensors":
        remedy = "save_file(state, path) writes one file"
    elif suffix in (".npz", ".pt", ".pth", ".bin"):
        remedy = f"save_file writes a .safetensors file, and mlstate convert a {suffix} file of it"
    raise ValueError(
        f"{os.fspath(folder)}: a checkpoint is a folder, and {suffix} is the suffix of a file: "
        f"{remedy}; for a folder, pass a path without this suffix"
    )


def refuse_existing(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Raise StoreError (EEXIST) if a path exists, except an empty folder or with `overwrite`."""
    if overwrite:
        return
    if isinstance(path, RemoteFolder):
        is_empty = not exists(path, MANIFEST) and not list_roots(path)
    elif not os.path.lexists(path):
        return
    else:
        try:
            is_empty = os.path.isdir(path) and not os.listdir(path)
        except OSError as error:
            raise store_error(error, "cannot list the folder", os.fspath(path)) from None
    if not is_empty:
        raise store_error(
            FileExistsError(
                errno.EEXIST,
                "it exists already; overwrite=True (--force on the command line) replaces all of "
                "it, the steps of a CheckpointManager included",
            ),
            "cannot write the target",
            os.fspath(path),
        )


def mark_path(root: str) -> str:
    """Return the path of the mark for a damaged step, next to its root."""
    return root.removesuffix(".json") + _MARK


class FolderContent(NamedTuple):
    """The checkpoints in a folder at one time; a writer may replace only these."""

    manifest: bytes | None
    roots: tuple[Root, ...]

    @classmethod
    def of(cls, folder: str) -> FolderContent:
        """Return the current content; empty if the folder does not exist."""
        if not isinstance(folder, RemoteFolder) and not os.path.isdir(folder):
            return cls(None, ())
        manifest = None
        with suppress(FileNotFoundError):
            manifest = read_bytes(folder, MANIFEST)
        return cls(manifest, tuple(list_roots(folder)))

    def refuse_change(self, folder: str) -> None:
        """Raise StoreError (EEXIST) if the folder has other checkpoints now.

        If it was empty, files of other programs are refused too.
        """
        is_same = FolderContent.of(folder) == self
        if self == (None, ()) and not isinstance(folder, RemoteFolder):
            is_same = is_same and not foreign_files(folder)
        if not is_same:
            text = "it was changed by another writer meanwhile, and is left as it is"
            exists = FileExistsError(errno.EEXIST, text)
            raise store_error(exists, "cannot write the target", folder)


def root_path(manifest: Manifest) -> str:
    """Return the path of a root under ``roots/``."""
    return f"roots/{manifest.sequence:08d}.{manifest.generation}.json"


def _is_folder(path: str) -> bool:
    """Return whether a path is a folder; unlike os.path.isdir, raise errors other than ENOENT."""
    import stat

    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _make(path: str, mode: int = 0o777) -> None:
    """Create one folder; do nothing if another process created it first."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not _is_folder(path):
            raise


def make_path(folder: str) -> None:
    """Create a folder and its missing parents durably; raise the system's OSError."""
    missing = []
    path = os.path.abspath(folder)
    while not _is_folder(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        _make(path)
        _core.folder_sync(os.path.dirname(path))


def new_file_mode(folder: str) -> int:
    """Return the mode of new files: no more access than the folder and its manifest allow."""
    mode = 0o666
    if isinstance(folder, RemoteFolder):  # objects have no mode
        return mode
    for path in (folder, os.path.join(folder, MANIFEST)):
        try:
            mode &= os.stat(path).st_mode | 0o600
        except FileNotFoundError:
            continue
        except OSError as error:
            raise store_error(error, "cannot read the permissions", path) from None
    return mode


def create(folder: str, *, states: bool = False) -> None:
    """Create the folder and its subfolders durably; subfolders have the folder's mode.

    The subfolder of named states is created only if `states` is true.
    """
    if isinstance(folder, RemoteFolder):  # the names of objects need no folders
        return
    try:
        make_path(folder)
        made = False
        for part in FOLDERS if states else (one for one in FOLDERS if one != "states"):
            path = os.path.join(folder, part)
            refuse_link(path)
            if not _is_folder(path):
                _make(path, os.stat(folder).st_mode & 0o777)
                made = True
        if made:
            _core.folder_sync(folder)
    except FileExistsError:
        text = "a file has this name, and is not replaced by a folder: delete it first"
        error = FileExistsError(errno.EEXIST, text)
        raise store_error(error, "cannot create the checkpoint's folder", folder) from None
    except OSError as error:
        raise store_error(error, "cannot create the checkpoint's folder", folder) from None


def _belongs(part: str, name: str) -> bool:
    """Return whether a file of a subfolder has a name that a save can give."""
    if part == "":  # manifests, temporary files, units of tiers
        return name not in {"", ".", "..", "lock"}
    if part == "roots":
        name = name.removesuffix(_MARK) + ".json" if name.endswith(_MARK) else name
        return _root_of(name) is not None or _TEMPORARY.match(name) is not None
    return part in _PATTERNS and _PATTERNS[part].match(name) is not None


def remove_files(folder: str, names: list[str]) -> list[str]:
    """Delete files by their paths in the folder; return the paths of those that existed.

    Of objects in a store, all paths are returned. A path that leaves the folder, that is not a
    name that a save gives, or that is behind a symbolic link raises StoreError.
    """
    removed = []
    by_part: dict[str, list[str]] = {}
    for path in names:
        part, name = os.path.split(path)
        if not _belongs(part, name):
            reason = OSError(errno.EINVAL, "it is not a file of this checkpoint")
            raise store_error(reason, "cannot delete the file", os.path.join(folder, path))
        by_part.setdefault(part, []).append(name)
    if isinstance(folder, RemoteFolder):
        folder.store.delete(names)
        for name in names if is_logged("DEBUG") else ():
            log("DEBUG", "%s: deleted the object %s", folder, name)
        return names
    for part, inside in by_part.items():
        removed += _remove_from(folder, part, inside)
    return removed


def sync(folder: str, part: str) -> None:
    """Make deletions in a subfolder durable; deletions of objects are durable already."""
    if not isinstance(folder, RemoteFolder):
        _core.folder_sync(os.path.join(folder, part))


def exists(folder: str, path: str) -> bool:
    """Return whether a file of the folder exists, even as a broken link."""
    if isinstance(folder, RemoteFolder):
        return folder.exists(path)
    return os.path.lexists(os.path.join(folder, path))


def read_batches(
    folder: str,
    merged: Any,
    section: int,
    keys: list[str],
    cuts: Any,
    verify: bool,
    read: Callable[[str, list[str], Any], None],
) -> None:
    """Call `read` with a local folder, keys and cuts; for a store, batch by batch."""
    if isinstance(folder, RemoteFolder):
        folder.read_batches(merged, section, keys, cuts, verify, read)
    else:
        read(folder, keys, cuts)


def verify_shard_files(
    folder: str, merged: Any, progress: Callable[[int], object] | None
) -> tuple[int, list[Any]]:
    """Read and verify the files of a merged index; return bytes read and fields of problems."""
    if isinstance(folder, RemoteFolder):
        return folder.verify(merged, progress)
    return merged.verify(folder, progress)  # type: ignore[no-any-return]


def _remove_from(folder: str, part: str, names: list[str]) -> list[str]:
    """Delete files of a subfolder; do nothing if the subfolder does not exist."""
    removed: list[str] = []
    path = os.path.join(folder, part)
    try:
        with _opened(folder, part) as descriptor:
            for name in names:
                path = os.path.join(folder, part, name)
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=descriptor.fileno())
                    removed.append(os.path.join(part, name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise store_error(error, "cannot delete the file", path) from None
    finally:
        if is_logged("DEBUG"):
            for name in removed:
                log("DEBUG", "%s: deleted the file %s", folder, name)
    return removed


def overwrite_start(folder: str, path: str, data: bytes) -> None:
    """Rewrite the first bytes of a file durably; the rest stays."""
    refuse_link(os.path.join(folder, os.path.dirname(path)))
    name = os.path.join(folder, path)
    try:
        with _core.Descriptor(name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW) as descriptor:
            check_regular(os.fstat(descriptor.fileno()), name)
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor.fileno(), data[done:], done)
            os.fsync(descriptor.fileno())
    except OSError as error:
        raise store_error(error, "cannot write the file", name) from None


def discard(folder: str, generation: str, rank: int | None = None) -> list[str]:
    """Delete the files of an uncommitted save, of one rank or of all ranks."""
    shards = f".{generation}-" if rank is None else f".{generation}-{rank}.safetensors"
    index = f"{generation}." if rank is None else f"{generation}.{rank}.json"
    names = [
        f"{part}/{name}"
        for part in SECTIONS
        for name in list_names(folder, part)
        if shards in name and _SHARDS.match(name)
    ]
    names += [
        f"index/{name}"
        for name in list_names(folder, "index")
        if name.startswith(index) and _INDEX.match(name)
    ]
    return remove_files(folder, names)


def temporary_files(folder: str) -> list[str]:
    """Return the paths of temporary small files; they are garbage unless a writer is running.

    Marks of steps that no longer exist are among them.
    """
    found = []
    for part in ("", "roots"):
        names = set(list_names(folder, part))
        found += [os.path.join(part, name) for name in names if _TEMPORARY.match(name)]
    return sorted(found + _marks(names, [name for name in names if _root_of(name)]))


def _marks(names: Collection[str], roots: Collection[str]) -> list[str]:
    """Return the paths of marks among the names in ``roots/``, except of these roots."""
    return [
        f"roots/{name}"
        for name in names
        if name.endswith(_MARK)
        and _belongs("roots", name)
        and name.removesuffix(_MARK) + ".json" not in roots
    ]


def discard_temporaries(folder: str) -> list[str]:
    """Delete the temporary small files of a killed writer; no other writer may be running."""
    return remove_files(folder, temporary_files(folder))


def known_files(folder: str) -> set[str]:
    """Return the paths of shard files and indexes, by their names; roots are not included."""
    found = {
        f"{part}/{name}"
        for part in SECTIONS
        for name in filter(_SHARDS.match, list_names(folder, part))
    }
    return found | {f"index/{name}" for name in filter(_INDEX.match, list_names(folder, "index"))}


def foreign_files(folder: str) -> list[str]:
    """Return the paths of files that mlstate did not write, and of linked subfolders."""
    linked = []
    if not isinstance(folder, RemoteFolder):
        linked = [part for part in FOLDERS if os.path.islink(os.path.join(folder, part))]
    foreign = [
        f"{part}/{name}"
        for part in FOLDERS
        if part not in linked
        for name in list_names(folder, part)
        if not _belongs(part, name) or (part == "roots" and _TEMPORARY.match(name))
    ]
    foreign += [
        name
        for name in list_names(folder, "")
        if name not in {MANIFEST, "lock", *FOLDERS} and not _TEMPORARY.match(name)
    ]
    return sorted(foreign + linked)


class ManifestSummary(NamedTuple):
    """Digest of an index's pattern, and the part of each of its groups."""

    pattern: str
    parts: tuple[int, ...]


def patterns_of(merged: Any) -> list[ManifestSummary | None]:
    """Return the pattern of each index of a merged index; None if it has too many groups."""
    import hashlib

    return [
        None
        if found is None
        else ManifestSummary(hashlib.sha256(found[0], usedforsecurity=False).hexdigest(), found[1])
        for found in merged.patterns()
    ]


def load_index(folder: str, record: IndexRecord) -> bytes:
    """Read one rank's index; raise ChecksumError if it is not the committed one."""
    data = read_bytes(folder, record.path)
    crc = f"{_core.crc32c(data):08x}"
    if len(data) != record.bytes or crc != record.crc32c:
        path = os.path.join(folder, record.path)
        error = _core.ChecksumError(
            f"{path}: not the index that was committed: {len(data)} bytes with checksum "
            f"{crc}, expected {record.bytes} bytes with {record.crc32c}"
        )
        error.path = path
        error.expected, error.got = record.crc32c, crc
        raise error
    return data


def _check_patterns(
    folder: str, manifest: Manifest, summaries: dict[int, ManifestSummary | None]
) -> None:
    """Raise FormatError if an index's pattern or parts differ from the manifest's."""
    for pattern in manifest.patterns or ():
        first = None
        for place, rank in enumerate(pattern.ranks):
            if rank not in summaries:
                continue
            found = summaries[rank]
            first = first or found
            parts = tuple(each[place] for each in pattern.parts)
            if first is None or found != ManifestSummary(first.pattern, parts):
                path = manifest.indexes[rank].path
                text = f"{path}: its pattern or parts differ from the manifest"
                raise format_error(text, os.path.join(folder, path))


def load_merged_index(
    folder: str,
    manifest: Manifest,
    ranks: Iterable[int] | None = None,
    texts: dict[int, bytes] | None = None,
) -> Any:
    """Read and merge the indexes of a root, of all ranks or some; a FormatError names a bad one.

    `texts` caches the texts of indexes by rank. It is replaced by the texts of this call.
    """
    if manifest.weights is not None:
        return read_merged_index(folder, manifest)
    chosen = list(range(len(manifest.indexes)) if ranks is None else ranks)
    records = [manifest.indexes[rank] for rank in chosen]
    before = {} if texts is None else dict(texts)
    data = tuple(
        before[rank] if rank in before else load_index(folder, record)
        for rank, record in zip(chosen, records, strict=True)
    )
    if texts is not None:
        texts.clear()
        texts.update(zip(chosen, data, strict=True))
    paths = tuple(os.path.join(folder, record.path) for record in records)
    merged = _core.MergedIndex(data, paths)
    for record, head in zip(records, merged.heads(), strict=True):
        generation, rank, world_size, *held, _ = head
        if (generation, world_size, held) != (
            manifest.generation,
            manifest.world_size,
            [record.shards, record.data_bytes],
        ) or record.path != f"index/{generation}.{rank}.json":
            text = f"{record.path}: the index of another checkpoint"
            raise format_error(text, os.path.join(folder, record.path))
    if manifest.patterns is not None:
        _check_patterns(folder, manifest, dict(zip(chosen, patterns_of(merged), strict=True)))
    return merged


def has_files(folder: str, sizes: Mapping[str, int]) -> bool:
    """Return whether files of the folder exist with these sizes; the files are not opened."""
    import stat

    if isinstance(folder, RemoteFolder):
        return folder.has_files(sizes)
    for path, size in sizes.items():
        try:
            found = os.lstat(os.path.join(folder, path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise store_error(error, "cannot find the file", os.path.join(folder, path)) from None
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            return False
    return True


def needed_files(
    folder: str,
    without: Collection[Root] = (),
    merged_indexes: Mapping[str, Any] = _NONE,
    roots: Mapping[str, Manifest] = _NONE,
) -> set[str]:
    """Return the paths of all shard files and indexes that any root needs; raise if unknown.

    Roots in `without` do not count. `merged_indexes` by generation and `roots` by path are already
    read; only a process that holds the lock may pass `roots`, because they can change otherwise.
    """
    needed: set[str] = set()
    names = [root.path for root in list_roots(folder) if root not in without]
    seen = set()

    def add_files(manifest: Manifest) -> None:
        if manifest.generation not in seen:
            merged = merged_indexes.get(manifest.generation)
            merged = load_merged_index(folder, manifest) if merged is None else merged
            seen.add(manifest.generation)
            needed.update(merged.files())
            needed.update(record.path for record in manifest.indexes)

    for name in (*names, MANIFEST):
        try:
            if name in roots:
                add_files(roots[name])
            else:
                read_root(folder, name, add_files)
        except FileNotFoundError:
            if exists(folder, name):
                raise
    return needed


def prune(
    folder: str,
    *,
    dry_run: bool = False,
    merged_indexes: Mapping[str, Any] = _NONE,
    roots: Mapping[str, Manifest] = _NONE,
) -> list[str]:
    """Delete the shard files and indexes that no root needs; the caller holds the lock.

    `merged_indexes` and `roots` as for `needed_files`. Returns the paths, also in a dry run.
    """
    dead = sorted(known_files(folder) - needed_files(folder, (), merged_indexes, roots))
    return dead if dry_run else remove_files(folder, dead)


def delete_roots(folder: str, roots: list[Root]) -> None:
    """Delete roots and their marks durably; only then may `prune` delete the files they needed."""
    if not roots:
        return
    steps = _steps_of_roots(folder, roots) if is_logged("INFO") else []
    names = list_names(folder, "roots")
    gone = {os.path.basename(root.path) for root in roots}
    marks = _marks(names, [name for name in names if name not in gone])
    if remove_files(folder, [*(root.path for root in roots), *marks]):
        sync(folder, "roots")
    for step, root in zip(steps, roots, strict=False):
        log("INFO", "%s: deleted step %s (%s)", folder, step, root.path)


def _steps_of_roots(folder: str, roots: list[Root]) -> list[str]:
    """Return the steps of roots as texts, ``?`` for a damaged root."""
    steps = ["?"] * len(roots)
    for number, root in enumerate(roots):
        with suppress(FormatError, StoreError):
            steps[number] = str(read_manifest(folder, root.path).step)
    return steps
