"""Write the shards of a save, and commit them.

    write_and_commit -> _begin            rank 0 locks the folder and chooses the generation
                     -> _try_write        every rank writes its own files
                     -> _conclude         rank 0 replaces the manifest if every rank succeeded
                     -> delete_replaced   files that no root needs any more are deleted

Each step takes the result of the step before. A file that a root names never changes: a save
writes new files under a new generation. They become the checkpoint when ``manifest.json`` is
replaced.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import nullcontext, suppress
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .. import _core
from .._common.log import log
from ..errors import CollectiveError, FormatError, MLStateError, StoreError
from ._remote.remote_folder import RemoteFolder
from ._replica_assignment import check_copies
from ._store import folder as _folder
from ._store.garbage import Generation, delete_own_files, generations_to_delete, read_all_roots
from ._store.index_patterns import pattern_of, with_patterns
from ._store.manifest import IndexRecord, Manifest, build, parse
from ._store.writer_lock import WriterLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from ..collectives import ProcessGroup
    from ._checkpoint import Checkpoint
    from ._remote.root_claim import RootClaim
    from ._save import GatheredShards, SaveTarget

    _Lock: TypeAlias = WriterLock | RootClaim

_MESSAGE_BYTES = 1024  # largest fixed-size message between ranks


class Start(NamedTuple):
    """A started save; only rank 0 knows more than the generation."""

    generation: str  # identifier of the save; part of its files' names
    sequence: int = 0
    before: Manifest | None = None  # checkpoint to replace; None if none, or if it is damaged


class Committed(NamedTuple):
    """A committed manifest, as read back; with a single rank also its index, by generation."""

    manifest: Manifest
    merged_indexes: dict[str, Any]


class Caller(NamedTuple):
    """The line that called this package; warnings of a save name it, also those of its thread."""

    path: str
    line: int
    names: dict[str, Any]  # the global names of its module

    def warn(self, text: str) -> None:
        """Issue a warning."""
        import warnings

        shown = self.names.setdefault("__warningregistry__", {})  # as `warnings.warn` does
        module = self.names.get("__name__", "<string>")
        warnings.warn_explicit(text, UserWarning, self.path, self.line, module, shown)


def find_caller() -> Caller:
    """Return the line that called this package.

    Without such a line, as in a function that ``atexit`` calls, return the first line of the
    stack.
    """
    frame = sys._getframe(1)
    with suppress(ValueError):  # the stack ends
        for depth in count(2):  # not by `f_back`, which is None if memory is short
            if not str(frame.f_globals.get("__name__")).startswith("mlstate."):
                break
            frame = sys._getframe(depth)
    return Caller(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


# ---- messages between ranks; a process that saves alone sends none ----


def gather_bytes(group: ProcessGroup | None, data: bytes, root: int | None = None) -> list[bytes]:
    """Gather data from every rank, on all ranks or on one."""
    if group is None or group.world_size == 1:
        return [data]
    return list(group.gather_bytes(data, root=root) or [])


def _broadcast(group: ProcessGroup | None, text: bytes) -> bytes:
    """Return the text of rank 0 on every rank."""
    if group is None:
        return text
    import numpy as np

    array = np.zeros(_MESSAGE_BYTES, np.uint8)
    if group.rank == 0:
        array[: len(text)] = np.frombuffer(text, np.uint8)
    return bytes(group.broadcast(array, root=0)).rstrip(b"\0")


def _pack(content: dict[str, Any]) -> bytes:
    """Return a short JSON text; the text of an error is truncated to fit."""
    import json

    text = json.dumps(content).encode()
    while len(text) > _MESSAGE_BYTES:
        content["error"] = content["error"][: len(content["error"]) // 2] + "…"
        text = json.dumps(content).encode()
    return text


def _unpack(text: bytes) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads(text)
    return found


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# ---- start: rank 0 locks the folder and chooses the generation ----


def refuse_manager_folder(target: SaveTarget) -> None:
    """Raise StoreError (EEXIST) if the folder holds a manager's steps, unless that is wanted."""
    if not (target.keep_root or target.replace_steps) and _folder.holds_steps(target.folder):
        raise _folder.store_error(
            FileExistsError(
                errno.EEXIST,
                "the folder holds the steps of a CheckpointManager: save with "
                "CheckpointManager(path).save(step, ...), or into another folder",
            ),
            "cannot save the checkpoint",
            target.folder,
        )


def _read_replaced(target: SaveTarget) -> Manifest | None:
    """Return the checkpoint that a save replaces; None if there is none or it is damaged.

    A damaged checkpoint causes a warning. An intact manifest of a newer format raises
    FormatError.
    """
    folder = target.folder
    try:
        return _folder.read_manifest(folder)
    except FileNotFoundError:
        return None
    except FormatError as error:
        data = _folder.read_bytes(folder, _folder.MANIFEST)
        try:
            _core.json_checksum_check(data, folder)
        except FormatError:
            log("WARNING", "%s: the checkpoint is damaged and replaced: %s", folder, error)
            text = f"the existing checkpoint is damaged and will be replaced: {error}"
            target.caller.warn(text)
            return None
        raise


def _delete_unfinished(folder: str, generation: str, before: Manifest | None) -> None:
    """Delete the files of a writer that died before its commit."""
    kept = {root.generation for root in _folder.list_roots(folder)}
    if before is not None:
        kept.add(before.generation)
    _folder.discard_temporaries(folder)
    if generation in kept:
        with suppress(MLStateError):  # a root is damaged: nothing is deleted
            _folder.prune(folder)
    else:
        _folder.discard(folder, generation)


def lock_of(target: SaveTarget) -> _Lock:
    """Return the lock of a folder, or the claim to the root of a checkpoint in a store."""
    if isinstance(target.folder, RemoteFolder):
        return target.folder.claim(_folder.MANIFEST)
    return WriterLock(target.folder, timeout=target.lock_timeout)


def open_folder(target: SaveTarget, lock: _Lock, *, states: bool = False) -> Start:
    """Take the lock and choose a generation; record the generation in the lock's file.

    `states` tells whether the save has named states, which need their own subfolder. The caller
    releases the lock, also after an error.
    """
    folder = target.folder
    _folder.create(folder, states=states)
    lock.acquire()
    if target.content is not None:
        target.content.refuse_change(folder)
    refuse_manager_folder(target)
    before = _read_replaced(target)
    # roots/ may hold a newer root that did not become the manifest
    sequence = _folder.next_sequence(folder, before)
    if lock.unfinished is not None:
        _delete_unfinished(folder, lock.unfinished, before)
    start = Start(os.urandom(8).hex(), sequence, before)
    lock.note(start.generation)
    return start


def close_folder(lock: _Lock | None, *, is_clean: bool) -> None:
    """Release the lock; if not `is_clean`, its file keeps naming the unfinished generation."""
    if lock is None:
        return
    try:
        if is_clean:
            lock.note(None)
    finally:
        lock.release()


def _begin(target: SaveTarget, lock: _Lock | None, *, states: bool) -> Start:
    """Agree on a generation: return it on every rank, or raise on every rank."""
    start: Start | None = None
    error: BaseException | None = None
    message = b""
    try:
        if lock is not None:  # on rank 0
            try:
                start = open_folder(target, lock, states=states)
                message = _pack({"generation": start.generation})
            except BaseException as caught:
                error = caught
                message = _pack({"error": _error_text(caught)})
        found = _unpack(_broadcast(target.group, message))
        if error is not None:
            raise error
        if "error" in found:
            refused = StoreError(f"rank 0 cannot begin to save: {found['error']}")
            refused.rank = 0
            raise refused
        return start or Start(found["generation"])
    finally:
        del error  # its traceback refers to this frame


# ---- writing: every rank writes its own files ----


def record_of(written: dict[str, Any]) -> IndexRecord:
    """Return the manifest's record of a written index."""
    return IndexRecord(*(written[name] for name in IndexRecord._fields))


def _previous_index(target: SaveTarget, start: Start) -> Any:
    """Return this rank's committed index, whose unchanged shards are kept; None if unreadable.

    In an object store nothing is kept: comparing bytes would mean to read all of them.
    """
    if isinstance(target.folder, RemoteFolder):
        return None
    try:
        before = start.before
        if target.rank > 0:
            before = _folder.read_manifest(target.folder)
        if before is None or target.rank >= before.world_size:
            return None
        record = before.indexes[target.rank]
        data = _folder.read_bytes(target.folder, record.path)
        return _core.MergedIndex((data,), (record.path,))
    except MLStateError:
        return None  # damaged or missing: every shard is written


class WriteResult(NamedTuple):
    """The result of one rank's writing, or the reason why the rank cannot save."""

    written: dict[str, Any] | None  # result of `_core.shards_write`
    pattern: dict[str, Any]  # of the rank's index, if several ranks save
    error: BaseException | None

    def message(self) -> bytes:
        """Return the message that reports the result to rank 0."""
        if self.error is not None:
            return _pack({"error": _error_text(self.error)})
        return _pack({"written": {**(self.written or {}), **self.pattern}})


def new_files(folder: str, progress: Callable[[int], object] | None) -> AbstractContextManager[str]:
    """Return the context in whose folder new files are written; its end makes them visible."""
    if isinstance(folder, RemoteFolder):
        return folder.new_files((*_folder.SECTIONS, "index"), _folder.MANIFEST, progress)
    return nullcontext(folder)


def write_rank(
    target: SaveTarget,
    generation: str,
    gathered: GatheredShards,
    before: Any = None,
    progress: Callable[[int], object] | None = None,
    freed: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """Write one rank's shards, to local disk durably; call `freed` when arrays may change.

    Shards that are unchanged since the index `before` are kept.
    """
    shards, gathered.shards = gathered.shards, None
    with new_files(target.folder, progress) as folder:
        written: dict[str, Any] = _core.shards_write(
            folder,
            generation,
            shards,
            before,
            target.how,
            progress,
            freed,
            _folder.new_file_mode(folder),
            isinstance(target.folder, RemoteFolder),
        )
    return written


def read_pattern(folder: str, written: dict[str, Any]) -> dict[str, Any]:
    """Read back a rank's written index, and return its pattern."""
    return pattern_of(_folder.load_index(folder, record_of(written)))


def _try_write(
    target: SaveTarget,
    start: Start,
    gathered: GatheredShards,
    progress: Callable[[int], object] | None,
    freed: Callable[[], object] | None,
) -> WriteResult:
    """Write this rank's shards; other ranks wait, so only their errors are raised."""
    if gathered.error is not None:
        return WriteResult(None, {}, gathered.error)
    try:
        before = _previous_index(target, start)
        written = write_rank(target, start.generation, gathered, before, progress, freed)
        pattern = {} if target.group is None else read_pattern(target.folder, written)
    except CollectiveError:
        raise
    except BaseException as error:
        return WriteResult(None, {}, error)
    return WriteResult(written, pattern, None)


# ---- the commit: rank 0 replaces the manifest if every rank succeeded ----


def creation_time() -> str:
    """Return the current time in the manifest's form."""
    import datetime

    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="microseconds").replace("+00:00", "Z")


def commit_ranks(
    target: SaveTarget,
    start: Start,
    header: dict[str, Any],
    written: list[dict[str, Any]],
    copies: Iterable[bytes],
    lock: _Lock,
) -> Committed:
    """Check that the ranks' files make one complete checkpoint, and replace the manifest.

    Its text and, with a single rank, its index are read back before; each of several ranks has
    read back its own. The caller holds `lock`. After an error the old checkpoint is unchanged.
    """
    manifest = Manifest(
        generation=start.generation,
        sequence=start.sequence,
        created=creation_time(),
        indexes=tuple(map(record_of, written)),
        **header,
    )
    folder = target.folder
    if len(written) > 1:
        manifest, merged = with_patterns(folder, manifest, written)
        check_copies(merged, copies)
    data = build(manifest)
    parsed = parse(data, os.path.join(folder, _folder.MANIFEST))
    merged_indexes = {}
    if len(written) == 1:
        merged_indexes[start.generation] = _folder.load_merged_index(folder, parsed)
    mode = _folder.new_file_mode(folder)
    lock.commit(data, mode, _folder.root_path(manifest) if target.keep_root else None)
    return Committed(parsed, merged_indexes)


def is_committed(folder: str, generation: str) -> bool:
    """Return whether a root names the generation, or a root cannot be read."""
    try:
        for name in [*(root.path for root in _folder.list_roots(folder)), _folder.MANIFEST]:
            with suppress(FileNotFoundError):  # the folder has no such root
                if _folder.read_manifest(folder, name).generation == generation:
                    return True
    except MLStateError:
        return True
    return False


def _refusal(reports: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the outcome if a rank failed, with its error; None if every rank succeeded."""
    for rank, report in enumerate(reports):
        if "error" in report:
            text = f"rank {rank}: {report['error']}"
            return {"committed": False, "unsure": False, "error": text, "rank": rank}
    return None


def _take_back(target: SaveTarget, start: Start, *, is_unsure: bool) -> bool:
    """Delete this rank's files of a failed save; return whether all of them are deleted."""
    if is_unsure:
        return False
    try:
        _folder.discard(target.folder, start.generation, target.rank)
    except MLStateError:  # the next save tries again; the first error is raised instead
        return False
    return True


class Outcome(NamedTuple):
    """The result of a save: the commit, which rank 0 knows, or the reason why there is none."""

    committed: Committed | None
    error: BaseException | None = None  # of this rank, or one that names another rank
    is_clean: bool = False  # after an error: whether this rank left no files


def _conclude(
    target: SaveTarget,
    start: Start,
    gathered: GatheredShards,
    result: WriteResult,
    lock: _Lock | None,
) -> Outcome:
    """Commit if every rank wrote its shards; otherwise delete this rank's files."""
    committed: Committed | None = None
    error = result.error
    decided: dict[str, Any] | None = None
    messages = gather_bytes(target.group, result.message() + b"\n" + gathered.copies, root=0)
    if lock is not None:  # on rank 0
        parted = [message.partition(b"\n") for message in messages]
        reports = [_unpack(report) for report, _, _ in parted]
        decided = _refusal(reports)
        try:
            if decided is None:
                written = [report["written"] for report in reports]
                copies = (names for _, _, names in parted)
                committed = commit_ranks(target, start, gathered.header, written, copies, lock)
        except BaseException as caught:
            error = caught
            unsure = lock.is_unsure or is_committed(target.folder, start.generation)
            text = _error_text(caught)
            decided = {"committed": False, "unsure": unsure, "error": text, "rank": 0}
    decided = _unpack(_broadcast(target.group, _pack(decided or {"committed": True})))
    if decided["committed"]:
        return Outcome(committed)
    is_clean = _take_back(target, start, is_unsure=decided["unsure"])
    if error is None:
        error = CollectiveError(f"not saved: {decided['error']}")
        error.rank = decided["rank"]
    return Outcome(None, error, is_clean)


# ---- after the commit: files that no root needs ----


def delete_replaced(
    target: SaveTarget, committed: Committed, before: Manifest | None
) -> str | None:
    """After a commit, delete the files that no root needs; return the text of a warning.

    A failure here costs only disk space. Warnings may be configured to raise, so the caller
    issues the warning last. In an object store, other writers' new objects are not known, so only
    objects of replaced checkpoints are deleted.
    """
    if isinstance(target.folder, RemoteFolder):
        return _delete_own_replaced(target, _plan_deletions(target, committed, before)) or None
    try:
        roots: Mapping[str, Manifest] = {_folder.MANIFEST: committed.manifest}
        if target.retain is not None:
            roots = {**target.retain(committed.manifest), **roots}
        if before is not None or target.replace_steps:
            _folder.prune(target.folder, merged_indexes=committed.merged_indexes, roots=roots)
    except (MLStateError, MemoryError) as error:
        return f"old files of the checkpoint were not deleted: {error}"
    return None


def _plan_deletions(
    target: SaveTarget, committed: Committed, before: Manifest | None
) -> dict[str, list[Generation]]:
    """Delete old roots; return deleted and kept generations, or {} if they are unknown."""
    if before is None and target.retain is None:
        return {}
    with suppress(MLStateError, MemoryError):
        old = read_all_roots(target.folder)
        old += [] if before is None else [before]
        if target.retain is not None:
            target.retain(committed.manifest)
        return generations_to_delete(old, read_all_roots(target.folder))
    return {}


def _delete_own_replaced(target: SaveTarget, plan: dict[str, Any]) -> str:
    """Delete this rank's files of deleted generations; return the text of an error."""
    if not plan:
        return ""
    gone, kept = ([Generation(*one) for one in plan[name]] for name in ("gone", "kept"))
    try:
        delete_own_files(target.folder, target.rank, target.world_size, gone, kept)
    except (MLStateError, MemoryError) as error:
        return f"rank {target.rank}: {error}"
    return ""


def _delete_replaced_together(
    target: SaveTarget, committed: Committed | None, before: Manifest | None
) -> str | None:
    """Delete the files that no root needs, each rank its own; return the text of a warning.

    If a rank fails, rank 0 tries again for all ranks.
    """
    import json

    own_plan = {} if committed is None else _plan_deletions(target, committed, before)
    [text, *_] = gather_bytes(target.group, json.dumps(own_plan).encode())
    plan = json.loads(text)
    trouble = _delete_own_replaced(target, plan)
    troubles = [trouble, *map(bytes.decode, gather_bytes(target.group, trouble.encode(), root=0))]
    first = next(filter(None, troubles), None)
    warning = None
    if committed is not None and (first or not plan):
        warning = delete_replaced(target, committed, before)
    if warning is None and first:
        warning = f"deleting old files of the checkpoint met an error: {first}"
    return warning


# ---- all steps ----


def write_and_commit(
    target: SaveTarget,
    gathered: GatheredShards,
    progress: Callable[[int], object] | None,
    freed: Callable[[], object] | None = None,
) -> Checkpoint:
    """Write the gathered shards and commit them; every rank calls it, even after a failure.

    `freed` is called when the arrays may change. After an error the old checkpoint is unchanged.
    """
    from ._checkpoint import Checkpoint

    lock = lock_of(target) if target.rank == 0 else None
    is_clean = False
    warning: str | None = None
    result: WriteResult | None = None
    outcome: Outcome | None = None
    with nullcontext() if lock is None else lock.holder:
        try:
            start = _begin(target, lock, states=bool(gathered.header.get("states")))
            result = _try_write(target, start, gathered, progress, freed)
            outcome = _conclude(target, start, gathered, result, lock)
            if outcome.error is not None:
                # another rank may have left files, so the next save must look for them
                is_clean = outcome.is_clean and target.group is None
                raise outcome.error
            committed, written = outcome.committed, result.written
            if target.group is not None:
                warning = _delete_replaced_together(target, committed, start.before)
            elif committed is not None:
                warning = delete_replaced(target, committed, start.before)
            is_clean = warning is None  # otherwise the next save looks for remaining files
        finally:
            result = outcome = gathered.error = None  # tracebacks of errors refer to this frame
            close_folder(lock, is_clean=is_clean)
    if target.group is not None:
        target.group.barrier()
    if warning is not None:
        target.caller.warn(warning)
    manifest = committed and committed.manifest
    checkpoint = Checkpoint(_folder.RootPath(target.folder, manifest=manifest))
    checkpoint.written = written
    return checkpoint
