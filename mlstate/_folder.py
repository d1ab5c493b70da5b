"""The folder of a checkpoint: its roots, its files by name, and what nobody needs any more."""

from __future__ import annotations

import errno
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core
from ._manifest import IndexRecord, Manifest, parse
from .errors import FormatError, StoreError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

MANIFEST = "manifest.json"
_NONE: Mapping[str, Any] = {}
_MOST_BYTES = 512 << 20  # of a manifest or an index
SECTIONS = ("params", "optim_state")
FOLDERS = (*SECTIONS, "index", "roots")
_ROOT = re.compile(r"(\d{8,19})\.([0-9a-f]{16})\.json\Z", re.ASCII)
_SHARDS = re.compile(r".+\.[0-9a-f]{16}-\d+\.safetensors(\.tmp)?\Z", re.ASCII)
_INDEX = re.compile(r"[0-9a-f]{16}\.\d+\.json(\.tmp)?\Z", re.ASCII)
_PATTERNS = {**dict.fromkeys(SECTIONS, _SHARDS), "index": _INDEX, "roots": _ROOT}
_TEMPORARY = re.compile(r"\.mlstate-[0-9a-f]{16}\.tmp\Z", re.ASCII)


class Root(NamedTuple):
    """A root that is kept under ``roots/``."""

    sequence: int
    generation: str
    path: str  # in the folder


def store_error(error: OSError, what: str, path: Any) -> StoreError:
    """Return the error of the system as one of ours, of the class that goes with its number."""
    cls: Any = StoreError
    if isinstance(error, FileNotFoundError):
        cls = _core.StoreNotFoundError
    elif isinstance(error, PermissionError):
        cls = _core.StorePermissionError
    made = cls(error.errno, f"{what}: {error.strerror}", path)
    made.path = path
    return made  # type: ignore[no-any-return]


def read_bytes(folder: str, name: str) -> bytes:
    """Read a small file of the folder, which must be a regular one."""
    path = os.path.join(folder, name)
    import stat

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
                what = "too long" if stat.S_ISREG(found.st_mode) else "not a regular file"
                error = FormatError(f"{path}: {what}")
                error.path = path
                raise error
            return file.read()
    except OSError as error:
        if error.errno == errno.ELOOP or isinstance(error, IsADirectoryError):
            wrong = FormatError(f"{path}: not a regular file")
            wrong.path = path
            raise wrong from None
        raise store_error(error, "cannot read the file", path) from None


def read_manifest(folder: str, name: str = MANIFEST) -> Manifest:
    """Read a root."""
    try:
        data = read_bytes(folder, name)
    except StoreError as error:
        if name != MANIFEST or error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        raise _no_checkpoint(folder, error.errno) from None
    return parse(data, os.path.join(folder, name))


def _no_checkpoint(folder: str, number: int) -> StoreError:
    """Say what is there in the place of a checkpoint."""
    reason = OSError(number, "there is no such folder")  # of the class that its number has
    if os.path.isfile(folder):
        reason.strerror = (
            "it is a file, and a checkpoint is a folder; load_file reads .safetensors, "
            "mlstate convert others too"
        )
    elif list_roots(folder):
        reason.strerror = "manifest.json is gone; older steps are there for verify(repair=True)"
    elif os.path.isdir(folder):
        reason.strerror = "the folder holds none: there is no manifest.json"
    return store_error(reason, "cannot read the checkpoint", folder)


def list_names(folder: str, part: str) -> list[str]:
    """Names in one of the folder's folders; none where there is none."""
    try:
        return os.listdir(os.path.join(folder, part))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise store_error(error, "cannot list the folder", os.path.join(folder, part)) from None


def list_roots(folder: str) -> list[Root]:
    """Return the roots under ``roots/``, the oldest first."""
    matches = filter(None, map(_ROOT.match, list_names(folder, "roots")))
    return sorted(Root(int(m[1]), m[2], f"roots/{m[0]}") for m in matches)


def root_path(manifest: Manifest) -> str:
    """Where a root is kept."""
    return f"roots/{manifest.sequence:08d}.{manifest.generation}.json"


def _is_folder(path: str) -> bool:
    """Whether a folder is there; unlike os.path.isdir this does not take errors for no."""
    import stat

    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _make(path: str) -> None:
    """Make one folder; another process that begins to save may be quicker."""
    try:
        os.mkdir(path)
    except FileExistsError:
        if not _is_folder(path):
            raise


def make_path(folder: str) -> None:
    """Make a folder, and those above it, durably; errors are the system's own."""
    missing = []
    path = os.path.abspath(folder)
    while not _is_folder(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        _make(path)
        _core.folder_sync(os.path.dirname(path))


def create(folder: str) -> None:
    """Make the folder and what belongs in it, durably."""
    try:
        make_path(folder)
        made = False
        for part in FOLDERS:
            path = os.path.join(folder, part)
            if not _is_folder(path):
                _make(path)
                made = True
        if made:
            _core.folder_sync(folder)
    except StoreError:
        raise
    except OSError as error:
        raise store_error(error, "cannot create the checkpoint's folder", folder) from None


def remove_files(folder: str, names: list[str]) -> list[str]:
    """Delete files by their paths in the folder; those that are gone are gone."""
    removed = []
    for name in names:
        try:
            os.unlink(os.path.join(folder, name))
        except FileNotFoundError:
            continue
        except OSError as error:
            path = os.path.join(folder, name)
            raise store_error(error, "cannot delete the file", path) from None
        removed.append(name)
    return removed


def discard(folder: str, generation: str, rank: int | None = None) -> list[str]:
    """Delete what a save left behind that was not committed, of one rank or of all."""
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
    """Paths of what a killed writer left of small files, unless one is at work."""
    return [
        os.path.join(part, name)
        for part in ("", "roots")
        for name in list_names(folder, part)
        if _TEMPORARY.match(name)
    ]


def discard_temporaries(folder: str) -> list[str]:
    """Delete what a killed writer left of small files; no other writer may be at work."""
    return remove_files(folder, temporary_files(folder))


def known_files(folder: str) -> set[str]:
    """Paths of all files that look like files of ours, roots and the like excepted."""
    found = {
        f"{part}/{name}"
        for part in SECTIONS
        for name in filter(_SHARDS.match, list_names(folder, part))
    }
    return found | {f"index/{name}" for name in filter(_INDEX.match, list_names(folder, "index"))}


def strange_files(folder: str) -> list[str]:
    """Paths of files in the folder that no writer of ours made."""
    strange = [
        f"{part}/{name}"
        for part, pattern in _PATTERNS.items()
        for name in list_names(folder, part)
        if not pattern.match(name)
    ]
    strange += [
        name
        for name in list_names(folder, "")
        if name not in {MANIFEST, "lock", *FOLDERS} and not _TEMPORARY.match(name)
    ]
    return sorted(strange)


class Told(NamedTuple):
    """What one index lists: a digest of its pattern, and which parts."""

    pattern: str
    parts: tuple[int, ...]


def patterns_of(catalog: Any) -> list[Told | None]:
    """What each index of a catalog lists; None where it has no pattern."""
    import hashlib

    return [
        None
        if found is None
        else Told(hashlib.sha256(found[0], usedforsecurity=False).hexdigest(), found[1])
        for found in catalog.patterns()
    ]


def load_index(folder: str, record: IndexRecord) -> bytes:
    """Read one rank's index; a ChecksumError where it is not what was written."""
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


def load_catalog(
    folder: str,
    manifest: Manifest,
    ranks: Iterable[int] | None = None,
    texts: dict[int, bytes] | None = None,
) -> Any:
    """Read the indexes of a root, of all ranks or some; a FormatError names a wrong one.

    `texts` are those that were read before, and become those that are read now.
    """
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
    catalog = _core.Catalog(data, paths)
    for record, head in zip(records, catalog.heads(), strict=True):
        generation, rank, world_size, *held, _ = head
        if (generation, world_size, held) != (
            manifest.generation,
            manifest.world_size,
            [record.shards, record.data_bytes],
        ) or record.path != f"index/{generation}.{rank}.json":
            other = FormatError(f"{record.path}: the index of another checkpoint")
            other.path = os.path.join(folder, record.path)
            raise other
    if manifest.patterns is not None:
        for record, told in zip(records, patterns_of(catalog), strict=True):
            assert record.pattern is not None
            expected = Told(manifest.patterns[record.pattern].sha256, record.parts)
            if told != expected:
                other = FormatError(f"{record.path}: the manifest says that it lists other parts")
                other.path = os.path.join(folder, record.path)
                raise other
    return catalog


def needed_files(
    folder: str, without: Collection[Root] = (), known: Mapping[str, Any] = _NONE
) -> set[str]:
    """Paths of all shard files and indexes that any root needs, but for those `without`.

    `known` are catalogs that were read already, by generation.

    Raises
    ------
    FormatError, StoreError
        A root or an index cannot be read: then nobody knows what is needed.
    """
    needed: set[str] = set()
    names = [root.path for root in list_roots(folder) if root not in without]
    seen = set()
    for name in (*names, MANIFEST):
        try:
            manifest = read_manifest(folder, name)
        except FileNotFoundError:
            continue
        if manifest.generation not in seen:
            seen.add(manifest.generation)
            catalog = known.get(manifest.generation)
            catalog = load_catalog(folder, manifest) if catalog is None else catalog
            needed.update(catalog.files())
            needed.update(record.path for record in manifest.indexes)
    return needed


def prune(folder: str, *, dry_run: bool = False, known: Mapping[str, Any] = _NONE) -> list[str]:
    """Delete the shard files and indexes that no root needs; the caller holds the lock."""
    dead = sorted(known_files(folder) - needed_files(folder, known=known))
    return dead if dry_run else remove_files(folder, dead)


def delete_roots(folder: str, roots: list[Root]) -> None:
    """Give up kept roots, durably; only then may a `prune` delete what they needed."""
    if remove_files(folder, [root.path for root in roots]):
        _core.folder_sync(os.path.join(folder, "roots"))
