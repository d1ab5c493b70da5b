"""Manifests and indexes of a folder, read; files no manifest needs, deleted; damage marks."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _core
from ..._common.log import is_logged, log
from ..._common.overwrite import KEPT, check_overwrite, damage_warning, refusal
from ..._common.store_error import format_error, store_error
from ..._common.text import shorten
from ...errors import ChecksumError, FormatError, MLStateError, StoreError
from .._folder.names import (
    FOLDERS,
    MANIFEST,
    MOST_SEQUENCE,
    PATTERNS,
    TEMPORARY,
    Root,
    is_checkpoint_file,
    mark_path,
    orphaned_marks,
    root_of,
)
from .manifest import IndexRecord, Manifest, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import TypeAlias, TypeVar

    from ..._common.overwrite import Shapes
    from .._folder.protocol import Folder

    Indexes: TypeAlias = Mapping[str, _core.MergedIndex]  # by generation
    Roots: TypeAlias = Mapping[str, Manifest]  # by path
    Saves: TypeAlias = "list[Generation]"
    _Result = TypeVar("_Result")

_NONE: Mapping[str, Any] = {}
TRIES = 20  # attempts to read a checkpoint that writers keep replacing
_WRITER = "mlstate "  # prefix of `writer` if file names follow this scheme


# ---- facts of roots and indexes ----


class FolderContent(NamedTuple):
    """The checkpoints in a folder at one time; a writer may replace only these."""

    manifest: bytes | None
    roots: tuple[Root, ...] | None  # None: of no importance


class ManifestSummary(NamedTuple):
    """Digest of an index's pattern, and the part of each of its groups."""

    pattern: str
    parts: tuple[int, ...]


class Replaced(NamedTuple):
    """What a save replaces: see `CheckpointFiles.find_replaced`."""

    manifest: Manifest | None  # None: there is none, or it is damaged
    sequence: int  # of the new save
    has_steps: bool  # whether there are roots under ``roots/``


def shapes_of_index(merged: _core.MergedIndex) -> Shapes:
    """Return the shapes of all tensors by section and key, such as ``params/w``."""
    return {f"{section}/{key}": shape for section, key, _, _, _, shape, *_ in merged.tensors()}


class Generation(NamedTuple):
    """A save that a root names or named."""

    generation: str
    world_size: int


def root_path(manifest: Manifest) -> str:
    """Return the path of a root under ``roots/``."""
    return f"roots/{manifest.sequence:08d}.{manifest.generation}.json"


def patterns_of(merged: _core.MergedIndex) -> list[ManifestSummary | None]:
    """Return digest and parts of the pattern of each index in `merged`.

    Indexes with equal patterns list the same tensors and differ in the parts only. None for an
    index with too many groups of shards.
    """
    import hashlib

    return [
        None
        if summary is None
        else ManifestSummary(
            hashlib.sha256(summary[0], usedforsecurity=False).hexdigest(), summary[1]
        )
        for summary in merged.patterns()
    ]


def generations_to_delete(
    before: Iterable[Manifest], now: Iterable[Manifest]
) -> dict[str, list[Generation]]:
    """Return the deleted generations (saves) as "gone" and the others as "kept", for all ranks.

    `before`, `now`: the manifests before and after the deletion of roots.
    """
    earlier, remaining = (
        dict.fromkeys(Generation(m.generation, m.world_size) for m in each)
        for each in (before, now)
    )
    return {"gone": [each for each in earlier if each not in remaining], "kept": [*remaining]}


def read_current(
    find: Callable[[], Manifest],
    read: Callable[[Manifest], _Result],
    is_replaced: Callable[[str], bool],
) -> _Result:
    """Return ``read(find())``; start again if a file is missing because a writer replaced the root.

    Writers delete files only after every root that names them. `is_replaced` is called with the
    generation of the manifest, or "" if `find` misses the file. The error of the last of `TRIES`
    attempts is raised.
    """
    for tries_left in reversed(range(TRIES)):
        generation = ""
        try:
            manifest = find()
            generation = manifest.generation
            return read(manifest)
        except FileNotFoundError:
            if not tries_left or not is_replaced(generation):
                raise
    raise AssertionError  # the last attempt returns or raises


class CheckpointFiles:
    """The files of the checkpoint, or of the steps of a manager, in one folder.

    A root is ``manifest.json``, the checkpoint, or one file under ``roots/``, a step. It names
    the indexes of all ranks, and these name the shard files. A file that a root names is never
    changed. All other files with names of a save are garbage, unless a writer is running.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.path = folder.path

    def join(self, path: str) -> str:
        """Return the whole path of a file, for errors."""
        return os.path.join(self.path, path)

    # ---- roots ----

    def list_roots(self) -> list[Root]:
        """Return the roots under ``roots/``, oldest first."""
        return sorted(filter(None, map(root_of, self.folder.names("roots"))))

    def read_manifest(self, name: str = MANIFEST) -> Manifest:
        """Return the manifest in the file `name`, ``manifest.json`` or a step's under ``roots/``.

        Raises FormatError if it is malformed or does not match its file name, and StoreError, which
        describes the folder, if it is missing.
        """
        path = self.join(name)
        try:
            data = self.folder.read(name)
        except StoreError as error:
            if name != MANIFEST or error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            raise self._no_checkpoint(error) from None
        manifest = parse(data, path)
        if name != MANIFEST and name != root_path(manifest):
            raise format_error(
                f"{path}: the content does not match the file name: it is step {manifest.step}, "
                f"whose name would be {root_path(manifest)}",
                path,
            )
        return manifest

    def _no_checkpoint(self, error: StoreError) -> StoreError:
        """Return the error for a path without a checkpoint; it describes the content instead.

        `error`: of reading the manifest; returned itself if nothing more is known.
        """
        text = self.folder.missing_reason()
        if not text:
            return error
        if error.errno == errno.ENOENT and self.list_roots():
            text = (
                "manifest.json is gone, and older steps are there: verify(path, repair=True) "
                "(mlstate verify --repair on the command line) restores the newest"
            )
        # OSError picks the subclass by errno
        return store_error(OSError(error.errno, text), "cannot read the checkpoint", self.path)

    def find_manifest(self) -> Manifest | None:
        """Read the manifest of the current checkpoint; None if there is none."""
        with suppress(FileNotFoundError):
            return parse(self.folder.read(MANIFEST), self.join(MANIFEST))
        return None

    def find_replaced(self, *, refuses_steps: bool, warn: Callable[[str], object]) -> Replaced:
        """Return what a save replaces, and its sequence number.

        This is the largest number of a valid root, plus one: a step may be newer than the manifest.
        `refuses_steps`: raise StoreError (EEXIST) if the folder holds a manager's steps. `warn` is
        called with a text about a damaged manifest. Raises FormatError for an intact manifest of a
        newer format, for a file that is not regular, and after the last number.
        """
        roots = self.list_roots()
        if roots and refuses_steps:
            self.refuse_steps(roots)
        manifest = None
        with suppress(FileNotFoundError):
            data = self.folder.read(MANIFEST)
            manifest = self._parse_undamaged(data, warn)
        sequence = 0 if manifest is None else manifest.sequence
        for root in reversed(roots):
            if root.sequence <= sequence:
                break
            # the content, because the name of a stray file would determine all later numbers
            with suppress(MLStateError):
                sequence = self.read_manifest(root.path).sequence
        if sequence >= MOST_SEQUENCE:
            text = f"{self.path}: sequence {sequence} is the last that a manifest can hold"
            raise format_error(text, self.path)
        return Replaced(manifest, sequence + 1, bool(roots))

    def _parse_undamaged(self, data: bytes, warn: Callable[[str], object]) -> Manifest | None:
        """Return the manifest of the bytes `data`; None if damaged; see `find_replaced`."""
        try:
            return parse(data, self.join(MANIFEST))
        except FormatError as error:
            try:
                _core.json_checksum_check(data, self.path)
            except FormatError:
                log("WARNING", "%s: the checkpoint is damaged and replaced: %s", self.path, error)
                warn(damage_warning(error))
                return None
            raise

    def is_replaced(self, root: str, generation: str) -> bool:
        """Return whether a root no longer has `generation`: then its files may be deleted."""
        return self.read_manifest(root).generation != generation

    def read_root(self, root: str, read: Callable[[Manifest], _Result]) -> _Result:
        """Call `read` with the manifest in the file `root`; return its result.

        If a writer replaces the root meanwhile, start again; see `read_current`.
        """
        find, is_replaced = partial(self.read_manifest, root), partial(self.is_replaced, root)
        return read_current(find, read, is_replaced)

    def holds_steps(self, roots: Sequence[Root]) -> bool:
        """Return whether the folder, with these roots, holds steps of a `CheckpointManager`.

        A file with the name of a root counts only if its content is a root.
        """
        for root in reversed(roots):
            with suppress(FileNotFoundError, FormatError):
                _core.json_checksum_check(self.folder.read(root.path), root.path)
                return True
        with suppress(FileNotFoundError, FormatError):  # every root is damaged
            generation = self.read_manifest().generation
            return any(root.generation == generation for root in roots)
        return False

    def refuse_steps(self, roots: Sequence[Root]) -> None:
        """Raise StoreError (EEXIST) if the folder, with these roots, holds a manager's steps."""
        if roots and self.holds_steps(roots):
            text = (
                "the folder holds the steps of a CheckpointManager, and only its save adds one: "
                "choose another folder, or pass overwrite=True to delete the steps"
            )
            raise store_error(OSError(errno.EEXIST, text), "cannot save the checkpoint", self.path)

    def content(self, *, roots: bool = True) -> FolderContent:
        """Return the current checkpoints of the folder; an empty content if it has none.

        `roots`: include those under ``roots/``, the steps; False: only the bytes of the manifest.
        """
        # not for the manifest alone: this check would hide the reason of a folder that fails
        if roots and self.folder.is_local and not self.folder.has_checkpoint():
            return FolderContent(None, ())
        manifest = None
        with suppress(FileNotFoundError):
            manifest = self.folder.read(MANIFEST)
        return FolderContent(manifest, tuple(self.list_roots()) if roots else None)

    def refuse_foreign(self, overwrite: bool | None = None) -> None:
        """Raise StoreError (EEXIST) for a local path without checkpoint that is not free.

        It is a file, or a folder with files of other programs. With `overwrite` False, any path
        that is not free is refused, in a store too.
        """
        overwrite = check_overwrite(overwrite)
        if overwrite is False and not self.folder.is_empty():
            raise refusal(self.path, KEPT)
        if not self.folder.is_local or self.folder.exists(MANIFEST) or self.folder.is_empty():
            return
        if not os.path.isdir(self.path):
            raise refusal(self.path, "is a file, and a checkpoint is a folder", is_foreign=True)
        if not self.list_roots() and (foreign := self.foreign_files()):
            text = f"is not a checkpoint, and holds {shorten(repr(foreign[0]), 80)}"
            raise refusal(self.path, text, is_foreign=True)

    def refuse_change(self, before: FolderContent) -> None:
        """Raise StoreError (EEXIST) if the folder's checkpoints have changed since `before`.

        If it was empty, local files of other programs are refused too.
        """
        is_same = self.content(roots=before.roots is not None) == before
        if before == (None, ()) and self.folder.is_local:
            is_same = is_same and not self.foreign_files()
        if not is_same:
            text = "it was changed by another writer meanwhile, and is left as it is"
            raise store_error(OSError(errno.EEXIST, text), "cannot write the target", self.path)

    def is_committed(self, generation: str) -> bool:
        """Return whether a root (manifest) is of the save `generation`; True if one is damaged."""
        try:
            for name in [*(root.path for root in self.list_roots()), MANIFEST]:
                with suppress(FileNotFoundError):  # the folder has no such root
                    if self.read_manifest(name).generation == generation:
                        return True
        except MLStateError:
            return True
        return False

    # ---- indexes ----

    def load_index(self, record: IndexRecord) -> bytes:
        """Return the bytes of the index of `record`; raise ChecksumError if they have changed."""
        path = self.join(record.path)
        data = self.folder.read(record.path)
        crc = f"{_core.crc32c(data):08x}"
        if len(data) != record.bytes or crc != record.crc32c:
            text = (
                f"{path}: not the index that was committed: {len(data)} bytes with checksum "
                f"{crc}, expected {record.bytes} bytes with {record.crc32c}"
            )
            raise ChecksumError(text, path=path, expected=record.crc32c, got=crc)
        return data

    def load_merged_index(
        self,
        manifest: Manifest,
        ranks: Iterable[int] | None = None,
        texts: dict[int, bytes] | None = None,
    ) -> _core.MergedIndex:
        """Read the indexes of a root, of all ranks or of `ranks`, and return them as one.

        `texts`: bytes of the indexes by rank that were read before; those that are read now are
        added. Raises FormatError for an index that is damaged or of another checkpoint.
        """
        chosen = list(range(len(manifest.indexes)) if ranks is None else ranks)
        records = [manifest.indexes[rank] for rank in chosen]
        paths = tuple(self.join(record.path) for record in records)
        texts = {} if texts is None else texts
        for rank, record in zip(chosen, records, strict=True):
            if rank not in texts:
                texts[rank] = self.load_index(record)
        merged = _core.MergedIndex(tuple(map(texts.__getitem__, chosen)), paths)
        for record, head in zip(records, merged.heads(), strict=True):
            generation, rank, world_size, *sums, _ = head
            if (generation, world_size, sums) != (
                manifest.generation,
                manifest.world_size,
                [record.shards, record.data_bytes],
            ) or record.path != f"index/{generation}.{rank}.json":
                raise self._other_index(record.path)
        if manifest.patterns is not None:
            self._check_patterns(manifest, dict(zip(chosen, patterns_of(merged), strict=True)))
        return merged

    def _other_index(self, path: str) -> FormatError:
        """Return the FormatError for an index that is not of the manifest's checkpoint."""
        return format_error(f"{path}: the index of another checkpoint", self.join(path))

    def _check_patterns(
        self, manifest: Manifest, summaries: dict[int, ManifestSummary | None]
    ) -> None:
        """Raise FormatError if an index's pattern or parts differ from the manifest's.

        A pattern is the content that the indexes of several ranks share: they differ only in the
        parts of tensors that they list. `summaries`: pattern and parts of each index that was read,
        by rank. All ranks of one of the manifest's patterns must have the same.
        """
        for pattern in manifest.patterns or ():
            first = None
            for place, rank in enumerate(pattern.ranks):
                if rank not in summaries:
                    continue
                summary = summaries[rank]
                first = first or summary
                parts = tuple(each[place] for each in pattern.parts)
                if first is None or summary != ManifestSummary(first.pattern, parts):
                    path = manifest.indexes[rank].path
                    text = f"{path}: its pattern or parts differ from the manifest"
                    raise format_error(text, self.join(path))

    # ---- garbage: files that no root needs ----

    def remove(self, paths: list[str]) -> list[str]:
        """Delete files; return the paths of those that existed, or all paths in a store.

        A path that leaves the folder, that is not a name that a save gives, or that is behind a
        symbolic link raises StoreError.
        """
        for path in paths:
            if not is_checkpoint_file(*os.path.split(path)):
                reason = OSError(errno.EINVAL, "it is not a file of this checkpoint")
                raise store_error(reason, "cannot delete the file", self.join(path))
        return self.folder.remove(paths)

    def known_files(self) -> list[str]:
        """Return the paths of shard files and indexes, by their names; roots are not included."""
        return [
            f"{part}/{name}"
            for part, pattern in PATTERNS.items()
            for name in self.folder.names(part)
            if pattern.match(name)
        ]

    def discard(self, generation: str, rank: int | None = None) -> list[str]:
        """Delete the files of the uncommitted save `generation`; return their paths.

        `rank`: delete only this rank's; None: all.
        """
        shard = f".{generation}-" if rank is None else f".{generation}-{rank}.safetensors"
        index = f"index/{generation}." + ("" if rank is None else f"{rank}.json")
        paths = [path for path in self.known_files() if shard in path or path.startswith(index)]
        return self.remove(paths)

    def temporary_files(self) -> list[str]:
        """Return the paths of temporary small files; they are garbage unless a writer is running.

        Marks of steps that no longer exist are among them.
        """
        paths = []
        for part in ("", "roots"):
            names = set(self.folder.names(part))
            paths += [os.path.join(part, name) for name in names if TEMPORARY.match(name)]
        # now `names` has the files under roots/, the last folder of the loop
        return sorted(paths + orphaned_marks(names, [name for name in names if root_of(name)]))

    def foreign_files(self) -> list[str]:
        """Return the sorted paths of files that mlstate did not write, and of linked subfolders."""
        # the files of linked folders are another folder's
        linked = [p for p in FOLDERS if self.folder.is_local and os.path.islink(self.join(p))]
        foreign = [
            f"{part}/{name}"
            for part in FOLDERS
            if part not in linked
            for name in self.folder.names(part)
            if not is_checkpoint_file(part, name) or (part == "roots" and TEMPORARY.match(name))
        ]
        foreign += [
            name
            for name in self.folder.names("")
            if name not in {MANIFEST, "lock", *FOLDERS} and not TEMPORARY.match(name)
        ]
        return sorted(foreign + linked)

    def needed_files(
        self, without: Collection[Root] = (), merged_indexes: Indexes = _NONE, roots: Roots = _NONE
    ) -> set[str]:
        """Return the paths of all shard files and indexes that any root (manifest) needs.

        Roots in `without` do not count, and neither do roots that are deleted meanwhile.
        `merged_indexes` (by generation) and `roots` (by path) were read before; only a process that
        holds the lock may pass `roots`, because they can change otherwise. Raises MLStateError if
        an existing root cannot be read.
        """
        needed: set[str] = set()
        names = [root.path for root in self.list_roots() if root not in without]
        seen = set()

        def add_files(manifest: Manifest) -> None:
            """Add the files of a root, unless its generation was added before."""
            if manifest.generation not in seen:
                merged = merged_indexes.get(manifest.generation)
                merged = self.load_merged_index(manifest) if merged is None else merged
                seen.add(manifest.generation)
                needed.update(merged.files())
                needed.update(record.path for record in manifest.indexes)

        for name in (*names, MANIFEST):
            try:
                if name in roots:
                    add_files(roots[name])
                else:
                    self.read_root(name, add_files)
            except FileNotFoundError:
                if self.folder.exists(name):
                    raise
        return needed

    def prune(
        self, *, dry_run: bool = False, merged_indexes: Indexes = _NONE, roots: Roots = _NONE
    ) -> list[str]:
        """Delete the shard files and indexes that no root (manifest) needs.

        The caller holds the lock. `merged_indexes`, `roots`: as for `needed_files`. Returns the
        deleted paths, in a dry run those that would be deleted.
        """
        dead = sorted({*self.known_files()} - self.needed_files((), merged_indexes, roots))
        return dead if dry_run else self.remove(dead)

    def delete_unfinished(self, generation: str, before: Manifest | None) -> None:
        """Delete the files of the save `generation`, whose writer died, if it was not committed.

        If it was, files that no root needs are deleted. `before`: the current manifest, or None.
        """
        named = {root.generation for root in self.list_roots()}
        if before is not None:
            named.add(before.generation)
        self.remove(self.temporary_files())
        if generation in named:
            with suppress(MLStateError):  # a root is damaged: nothing is deleted
                self.prune()
        else:
            self.discard(generation)

    def delete_roots(self, roots: list[Root]) -> None:
        """Delete roots (manifests of steps) and their marks durably, before their files go."""
        if not roots:
            return
        steps = self.steps_of(roots) if is_logged("INFO") else {}
        names = self.folder.names("roots")
        deleted = {os.path.basename(root.path) for root in roots}
        marks = orphaned_marks(names, [name for name in names if name not in deleted])
        if self.remove([*(root.path for root in roots), *marks]):
            self.folder.sync("roots")
        for root, step in steps.items():
            text = "?" if step is None else step
            log("INFO", "%s: deleted step %s (%s)", self.path, text, root.path)

    def steps_of(self, roots: list[Root]) -> dict[Root, int | None]:
        """Return the step of each root; None for one that cannot be read."""
        steps: dict[Root, int | None] = dict.fromkeys(roots)
        for root in roots:
            with suppress(MLStateError):
                steps[root] = self.read_manifest(root.path).step
        return steps

    def name_of(self, root: str) -> str:
        """Return the step of the root `root`, if it can be read, and its path, as text."""
        with suppress(MLStateError):
            return f"step {self.read_manifest(root).step} ({root})"
        return root

    # ---- garbage of many ranks: each rank deletes its own files ----
    #
    # The index of a rank names only files of that rank, and only the same rank's index of a later
    # root may name the same files. So each rank finds its garbage in its own indexes.

    def read_all_roots(self) -> list[Manifest]:
        """Return the manifests of all roots, each generation once.

        Raises FormatError if another program wrote a root: the needed files are unknown then.
        """
        manifests: dict[str, Manifest] = {}
        for name in (*(root.path for root in self.list_roots()), MANIFEST):
            with suppress(FileNotFoundError):
                manifest = self.read_manifest(name)
                if not manifest.writer.startswith(_WRITER):
                    raise FormatError(f"{self.path}/{name}: written by {manifest.writer[:80]!r}")
                manifests[manifest.generation] = manifest
        return list(manifests.values())

    def _index_files(self, which: Generation, rank: int, indexes: Indexes) -> tuple[str, set[str]]:
        """Return the path of one rank's index of the save `which`, and the paths that it names.

        `indexes`: that were read before. Raises FormatError if the index is of another save.
        """
        path = f"index/{which.generation}.{rank}.json"
        merged = indexes.get(which.generation)
        if merged is None:
            where = self.join(path)
            merged = _core.MergedIndex((self.folder.read(path),), (where,))
        [(generation, number, world_size, *_)] = merged.heads()
        if (generation, number, world_size) != (which.generation, rank, which.world_size):
            raise self._other_index(path)
        return path, set(merged.files())

    def delete_generations(self, manifests: list[Manifest]) -> None:
        """Delete the files of deleted roots' `manifests` that no other root needs, of all ranks."""
        plan = generations_to_delete(manifests, self.read_all_roots())
        self.delete_own_files(0, 1, plan["gone"], plan["kept"])

    def delete_own_files(
        self,
        rank: int,
        world_size: int,
        replaced: Saves,
        remaining: Saves,
        merged_indexes: Indexes = _NONE,
    ) -> list[str]:
        """Delete a rank's files of the saves `replaced` that the saves `remaining` do not need.

        A rank of an old save that this group of `world_size` ranks lacks is handled by the rank
        with its number modulo `world_size`. `merged_indexes`: indexes of saves of one rank that
        were read before, by generation. Returns the deleted paths. Raises FormatError or StoreError
        if an index cannot be read; no file of that index's rank is deleted then.
        """
        deleted = []
        worlds = [which.world_size for which in replaced]
        for owner in range(rank, max(worlds, default=0), world_size):
            current, ended = (
                [self._index_files(s, owner, merged_indexes) for s in saves if owner < s.world_size]
                for saves in (remaining, replaced)
            )
            needed = {name for _, files in current for name in files}
            dead = [name for path, files in ended for name in (*sorted(files - needed), path)]
            suffix = f"-{owner}.safetensors"
            dead = [name for name in dict.fromkeys(dead) if name.endswith((suffix, ".json"))]
            deleted += self.remove(dead)
        # no later save looks for files that reappear after a power failure
        for part in sorted({os.path.dirname(name) for name in deleted}):
            self.folder.sync(part)
        return deleted

    # ---- marks of damaged steps ----
    #
    # A step that was found damaged does not count when old ones are deleted. The mark is an empty
    # file next to the step's root, ``roots/<sequence>.<generation>.damaged``. It is created without
    # the writers' lock, and deleted with the root, or when the step is found good.

    def is_marked(self, manifest: Manifest) -> bool:
        """Return whether a step was found damaged by this or another process."""
        return self.folder.exists(mark_path(root_path(manifest)))

    def mark(self, root: str) -> None:
        """Mark the step of the root at the path `root`; do nothing if that cannot be written."""
        try:
            self.folder.add_empty(mark_path(root))
        except StoreError as error:
            log("INFO", "%s: the damaged step %s cannot be marked: %s", self.path, root, error)

    def mark_steps(self, generation: str, damaged: Collection[str]) -> None:
        """Mark the step of a damaged generation, and steps that need one of the `damaged` files.

        Managers do not count a marked step.
        """
        for root in self.list_roots():
            is_damaged = root.generation == generation
            if not is_damaged:
                with suppress(MLStateError):  # an unreadable step does not count anyway
                    merged = self.load_merged_index(self.read_manifest(root.path))
                    is_damaged = not merged.files().keys().isdisjoint(damaged)
            if is_damaged:
                self.mark(root.path)

    def unmark(self, manifest: Manifest) -> None:
        """Remove the mark of a step that was found good."""
        if self.is_marked(manifest):
            with suppress(StoreError):
                self.remove([mark_path(root_path(manifest))])
