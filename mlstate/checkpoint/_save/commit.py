"""Commit of a save: order of writes, manifest, deletion of replaced files, undo after an error.

A folder has shard files, an index of each rank, which lists the rank's tensors and their places in
shard files, and ``manifest.json``, the root, which names the indexes. A manager also keeps a copy
of each root under ``roots/``, one for each step. Every root has a *sequence*, a number that grows
with each save and so orders them. Four rules make a save atomic:

1. A file that a root names never changes. A save writes new files, whose names contain its
   *generation*, a random number. Shards that did not change are named again, not written again.
2. All files of a save are durable before the replacement of ``manifest.json``, which is one atomic
   operation. It is the commit. A reader sees the old checkpoint before it and the new one after it.
   A manager's copy is written just before it, and may stay as a complete step if it fails.
3. Only a writer that holds the *claim* to the root commits. In a local folder the claim is a lock
   (`WriterLock`), which keeps other writers out and whose file notes the generation. In an object
   store it is the version of the manifest (`RootClaim`): the replacement fails if another writer
   has replaced the manifest since the claim.
4. Files are deleted only after every root that names them: first a manager deletes the roots of old
   steps (`retain`), then all files go that no root names. So a reader that misses a file reads the
   root again.

A `Commit` is one such save. With a group, every rank has one and all make the same calls; only
rank 0 holds the claim and replaces the manifest, and an error of one rank is raised on all::

    commit.begin()           take the claim, delete what a killed writer left, choose a generation,
                             note it in the lock; tell it to the other ranks
    commit.write(gathered)   write this rank's shard files and index, and make them durable
    commit.commit(header)    collect the ranks' reports, check that they make a complete checkpoint,
                             read back what will be committed, and replace the manifest; after an
                             error of any rank, delete all new files
    commit.delete_replaced() delete a manager's old roots, and the files that no root needs

`Commit.run` calls a function that makes them. After an exception it deletes the new files, unless
the manifest may name them. At the end it removes the note from the lock if no file is left, and
ends the claim.

A writer that is killed before the commit leaves files that no root names, and its generation in the
lock: the next `begin` deletes them. One that is killed after it leaves files of the old checkpoint:
again the next `begin` finds the note, and deletes what no root names. A store has no note,
and new objects of a running writer look the same: `prune` deletes them by age. If the answer to the
replacement of the manifest is lost, so that it may still happen, nothing is deleted (`is_unsure`).
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from ... import _core
from ..._common.overwrite import KEPT, damage_warning, difference_of, refusal
from ...errors import CollectiveError, FormatError, MLStateError, StoreError
from .._folder.names import FOLDERS, MANIFEST
from .._rank_messages import broadcast_text, error_text, gather_bytes, pack_message, unpack_message
from .._store.checkpoint_files import (
    Generation,
    Replaced,
    generations_to_delete,
    root_path,
    shapes_of_index,
)
from .._store.index_patterns import pattern_of, with_patterns
from .._store.manifest import IndexRecord, Manifest, build_checked, time_text
from .._store.open_path import RootPath
from .replica_assignment import check_copies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..._common.callback import Progress
    from ..._common.overwrite import Shapes
    from ...collectives import ProcessGroup
    from .._folder.protocol import Claim
    from .shards import GatheredShards
    from .target import SaveTarget


def creation_time() -> str:
    """Return the current time in the manifest's form."""
    return time_text(time.time())


def _record_of(written: dict[str, Any]) -> IndexRecord:
    """Return the manifest's record of an index, from the report of `shards_write`."""
    return IndexRecord(*(written[name] for name in IndexRecord._fields))


class Commit:
    """One save of one rank, from the claim to the commit; see the head of this file.

    `world_size` is given if this process alone writes the files of several ranks, one after the
    other. All their shards are written then, also those that the old checkpoint has.
    """

    def __init__(self, target: SaveTarget, world_size: int | None = None) -> None:
        """Prepare to commit to `target`, the folder to save to with rank, group and claim.

        `world_size`: the ranks of the new checkpoint if one process writes all of them (`reshard`);
        None: as many as save. Nothing is written before `begin`.
        """
        self._target = target
        self._files = target.files
        self._folder = target.files.folder
        self._group = target.group
        self._keeps_shards = world_size is None
        self._world_size = world_size or target.world_size
        self._claim: Claim | None = target.claim if target.rank == 0 else None
        self._generation = ""  # identifier of the save, part of its files' names; "" before `begin`
        self._replaced = Replaced(None, 0, has_steps=False)  # of rank 0, after `begin`
        self._error: BaseException | None = None  # of this rank, to be raised by `commit`
        # of written ranks: index record, and pattern (a digest that alike indexes share)
        self._reports: list[dict[str, Any]] = []
        self._written: dict[str, Any] | None = None  # what this rank wrote, for its caller
        self._is_replacing = False  # whether the manifest may have been replaced
        self._is_decided = False  # whether the save is committed, or is known not to be
        self._is_clean = False  # whether no file is left that a root does not need
        self._merged_indexes: dict[str, _core.MergedIndex] = {}  # by generation, as read back
        self.manifest: Manifest | None = None  # as committed and read back; on rank 0
        self.warning: str | None = None  # of `delete_replaced`

    def run(self, save: Callable[[], object]) -> RootPath:
        """Call `save`, which makes the steps from `begin` to `delete_replaced`; end the claim.

        Returns the saved root, with what this rank wrote; warns if old files remain. After an
        exception, the new files are deleted unless a root may name them. A signal waits until that
        is done, except in a store, which may not answer.
        """
        holder = nullcontext() if self._claim is None else self._claim.holder
        with holder, _core.deferred_interrupts() as section:
            try:
                with section.allowed():
                    save()
            except BaseException:
                with nullcontext() if self._folder.is_local else section.allowed():
                    self._abort()
                raise
            finally:
                self._close()
        if self._group is not None:
            # No rank returns before rank 0 has ended the claim, so that a save that follows can
            # take it.
            self._group.barrier()
        if self.warning is not None:
            self._target.caller.warn(self.warning)
        root = RootPath(self._files, manifest=self.manifest, report=self._written)
        return root.with_manifest()

    # ---- begin: rank 0 takes the claim and chooses the generation ----

    def begin(self, *, states: bool, step: int | None, shapes: Callable[[], Shapes | None]) -> None:
        """Choose a generation (random id of this save) for every rank, or raise on every rank.

        `states` tells whether the save has named states, which need their own subfolder. `step`: of
        the new checkpoint. `shapes` returns the whole shapes of this rank's tensors, None if it
        cannot save; it is called only if the target's tensors must be compared.
        """
        if self._group is None and self._claim is not None:
            if self._take(self._claim, step):
                self._refuse_others([shapes()])
            self._generation = self._choose_generation(self._claim, states=states)
            return

        def take(claim: Claim) -> dict[str, Any]:
            return {} if self._take(claim, step) else choose(claim)

        def choose(claim: Claim) -> dict[str, Any]:
            return {"generation": self._choose_generation(claim, states=states)}

        answer = self._broadcast(take)
        if not answer:
            import json

            tables = gather_bytes(self._group, json.dumps(shapes()).encode(), root=0)

            def compare(claim: Claim) -> dict[str, Any]:
                self._refuse_others([*map(json.loads, tables)])
                return choose(claim)

            answer = self._broadcast(compare)
        self._generation = answer["generation"]

    def _broadcast(self, decide: Callable[[Claim], dict[str, Any]]) -> dict[str, Any]:
        """Return on every rank what `decide` returns on rank 0, or raise its error on all."""
        error: BaseException | None = None
        message = b""
        try:
            if self._claim is not None:
                try:
                    message = pack_message(decide(self._claim))
                except BaseException as caught:
                    error = caught
                    number = getattr(caught, "errno", None)
                    message = pack_message({"error": error_text(caught), "errno": number})
            answer = unpack_message(broadcast_text(self._group, message))
            if error is not None:
                raise error
            if "error" in answer:
                text = f"rank 0 cannot begin to save: {answer['error']}"
                number = answer["errno"]
                raise StoreError(*([] if number is None else [number]), text, rank=0)
            return answer
        finally:
            del error  # its traceback refers to this frame

    def _take(self, claim: Claim, step: int | None) -> bool:
        """Take the claim; return whether the tensors of the old checkpoint must be compared.

        This is so unless the old one and the new one are steps of a run. Raises StoreError if the
        folder must not be replaced, has changed since the caller looked at it, or holds a manager's
        steps. Nothing is written but the lock.
        """
        files, request = self._files, self._target.request
        is_manager, overwrite = request.retain is not None, request.overwrite
        if not is_manager:
            files.refuse_foreign(overwrite)
        self._folder.create(())
        claim.acquire()
        if request.content is not None:
            files.refuse_change(request.content)
        self._replaced = files.find_replaced(
            refuses_steps=not is_manager and not overwrite, warn=self._target.caller.warn
        )
        before = self._replaced.manifest
        if before is None or is_manager or overwrite:
            return False
        if overwrite is False:  # it was written after `refuse_foreign`
            raise refusal(files.path, KEPT)
        return request.content is not None or None in (step, before.step)

    def _refuse_others(self, tables: list[Shapes | None]) -> None:
        """Raise StoreError (EEXIST) if the old checkpoint has other tensors; warn if damaged.

        `tables`: the shapes of each rank's tensors; None if a rank cannot save, which `commit`
        raises.
        """
        new: dict[str, Any] = {}
        for table in tables:
            if table is None:
                return
            new |= table
        manifest = self._replaced.manifest
        assert manifest is not None
        try:
            merged = self._files.load_merged_index(manifest)
        except (FormatError, FileNotFoundError) as error:
            self._target.caller.warn(damage_warning(error))
            return
        if text := difference_of(shapes_of_index(merged), new):
            raise refusal(self._files.path, text)
        if manifest.world_size == 1:
            self._merged_indexes[manifest.generation] = merged

    def _choose_generation(self, claim: Claim, *, states: bool) -> str:
        """Return the generation (the name) of this save; create the subfolders that it needs.

        The generation is recorded in the lock's file, so that a later writer can delete its files.
        `states`: create the subfolder of named states too.
        """
        self._folder.create(FOLDERS if states else [part for part in FOLDERS if part != "states"])
        if claim.unfinished is not None:
            self._files.delete_unfinished(claim.unfinished, self._replaced.manifest)
        generation = os.urandom(8).hex()
        claim.note(generation)
        return generation

    # ---- write: every rank writes its own files ----

    def write(
        self,
        gathered: GatheredShards,
        progress: Progress = None,
        freed: Callable[[], object] | None = None,
    ) -> None:
        """Write one rank's shards and index durably; call `freed` when arrays may change.

        `gathered` gives up its shards and its error. With a group, all errors but a CollectiveError
        are kept for `commit`, because the other ranks wait; without one they are raised. `progress`
        is called with numbers of bytes.
        """
        self._error, gathered.error = gathered.error, None
        if self._error is not None:
            return
        try:
            shards, gathered.shards = gathered.shards, None
            # only local shards can be compared with the new ones
            keeps_shards = self._keeps_shards and self._folder.is_local
            previous_index = self._previous_index() if keeps_shards else None
            with self._folder.new_files(progress) as new:
                report: dict[str, Any] = _core.shards_write(
                    new.path,
                    self._generation,
                    shards,
                    previous_index,
                    self._target.write_options,
                    progress,
                    freed,
                    new.mode,
                    new.is_temporary,
                )
            if self._keeps_shards:
                self._written = report
            if self._world_size > 1:
                pattern = pattern_of(self._files.load_index(_record_of(report)))
                report = {**report, **pattern}
        except CollectiveError:
            raise
        except BaseException as error:
            if self._group is None:
                raise
            self._error = error
        else:
            self._reports.append(report)

    def _previous_index(self) -> _core.MergedIndex | None:
        """Return this rank's committed index, whose unchanged shards are not written again.

        None if it is missing or unreadable, or if the old checkpoint had fewer ranks: then every
        shard is written.
        """
        rank = self._target.rank
        try:
            before = self._files.read_manifest() if rank > 0 else self._replaced.manifest
            if before is None or rank >= before.world_size:
                return None
            record = before.indexes[rank]
            if before.generation in self._merged_indexes:
                return self._merged_indexes[before.generation]
            return _core.MergedIndex((self._folder.read(record.path),), (record.path,))
        except MLStateError:
            return None  # damaged or missing: every shard is written

    # ---- commit: rank 0 replaces the manifest if every rank succeeded ----

    def commit(self, header: dict[str, Any], copies: bytes = b"") -> None:
        """Commit if every rank wrote its shards; otherwise raise.

        With a group, all ranks then delete their new files, unless the manifest may name these, and
        raise: a failed one its own error, others a CollectiveError about the first that failed.
        Without one, the caller's `abort` deletes the files. `header` describes the state in the
        manifest. `copies`: names of shards that this rank leaves to another one, joined by NUL.
        After an error the old checkpoint is unchanged, unless replacing the manifest itself failed:
        then either may be current.
        """
        if self._group is None:
            self._replace_manifest(header, self._reports, ())
            self._is_decided = True
            return
        if self._error is None:
            message = pack_message({"written": self._reports[-1]})
        else:
            message = pack_message({"error": error_text(self._error)})
        message += b"\n" + copies
        messages = [text.partition(b"\n") for text in gather_bytes(self._group, message, root=0)]
        decision: dict[str, Any] = {"committed": True}
        if self._claim is not None:
            decision = self._decide(self._claim, header, messages)
        decision = unpack_message(broadcast_text(self._group, pack_message(decision)))
        self._is_decided = True
        if not decision["committed"]:
            self._take_back(is_unsure=decision["unsure"])
            try:
                if self._error is not None:
                    raise self._error
            finally:
                self._error = None  # its traceback refers to this frame
            raise CollectiveError(f"not saved: {decision['error']}", rank=decision["rank"])

    def _decide(
        self, claim: Claim, header: dict[str, Any], messages: list[tuple[bytes, bytes, bytes]]
    ) -> dict[str, Any]:
        """Replace the manifest if every rank succeeded; return rank 0's message to all ranks.

        `header`: the description of the state. `messages`: of each rank, its report, a newline, and
        its `copies` (see `commit`). The message has `committed`; after a failure also `error`,
        `rank`, and `unsure`: the manifest may have been replaced.
        """
        reports = [unpack_message(report) for report, _, _ in messages]
        refusal: dict[str, Any] = {"committed": False, "unsure": False}
        for rank, report in enumerate(reports):
            if "error" in report:
                return {**refusal, "error": f"rank {rank}: {report['error']}", "rank": rank}
        try:
            written = [report["written"] for report in reports]
            self._replace_manifest(header, written, (names for _, _, names in messages))
        except BaseException as caught:
            self._error = caught
            return {**refusal, "unsure": self._is_unsure(), "error": error_text(caught), "rank": 0}
        return {"committed": True}

    def _replace_manifest(
        self, header: dict[str, Any], reports: list[dict[str, Any]], copies: Iterable[bytes]
    ) -> None:
        """Check that the ranks' files make one complete checkpoint, and replace the manifest.

        `reports`: what each rank wrote. `header`, `copies`: see `commit`. The manifest and, with a
        single rank, its index are read back first; each of several ranks has read back its own.
        Raises if a part of a tensor is missing.
        """
        assert self._claim is not None
        manifest = Manifest(
            generation=self._generation,
            sequence=self._replaced.sequence,
            created=creation_time(),
            indexes=tuple(map(_record_of, reports)),
            **header,
        )
        if len(reports) > 1:
            manifest, merged = with_patterns(self._files, manifest, reports)
            check_copies(merged, copies)
        data, parsed = build_checked(manifest, self._files.path)
        if len(reports) == 1:
            self._merged_indexes[manifest.generation] = self._files.load_merged_index(parsed)
        self._is_replacing = True
        self._claim.commit(data, root_path(manifest) if self._target.keep_root else None)
        self.manifest = parsed

    # ---- abort: the files of a save that is not committed ----

    def _abort(self) -> None:
        """After an error, delete the files of this save unless a root may name them.

        Does nothing if the ranks have decided about the save, or must do so together.
        """
        if self._generation and self._group is None and not self._is_decided:
            self._take_back(is_unsure=self._is_unsure())

    def _is_unsure(self) -> bool:
        """Return whether a root may name this save's files, so that they must stay."""
        assert self._claim is not None
        return self._is_replacing and (
            self._claim.is_unsure or self._files.is_committed(self._generation)
        )

    def _take_back(self, *, is_unsure: bool) -> None:
        """Delete this rank's files of a failed save, unless they may belong to a committed one.

        `is_unsure`: whether the save was committed is unknown; then the files stay.
        """
        rank = None if self._group is None else self._target.rank
        if not is_unsure:
            with suppress(MLStateError):  # the next save tries again; the first error is raised
                self._files.discard(self._generation, rank)
                # another rank may have left files, so the next save must look for them
                self._is_clean = self._group is None

    # ---- after the commit: files that no root needs ----

    def delete_replaced(self) -> None:
        """Delete the files that no root needs, each rank its own; set `warning` to the first error.

        A failure here costs only disk space. Warnings may be configured to raise, so the caller
        issues the warning last.
        """
        if self._group is not None:
            self.warning = self._delete_replaced_together(self._group)
        elif self.manifest is not None:
            self.warning = self._delete_all_replaced(self.manifest)
        self._is_clean = self.warning is None  # otherwise the next save looks for remaining files

    def _delete_all_replaced(self, manifest: Manifest) -> str | None:
        """Delete the files of all ranks that no root needs; return the text of a warning, or None.

        `manifest`: the committed one. If other writers may be running, their new files are not
        known, so only files of replaced checkpoints are deleted.
        """
        if not self._folder.excludes_writers:
            return self._delete_own_replaced(self._delete_old_roots(manifest)) or None
        target = self._target
        try:
            roots = {**target.retain(manifest), MANIFEST: manifest}
            # a killed writer may have left the root of its first step, without a manifest
            before = self._replaced
            if before.manifest is not None or before.has_steps or target.request.overwrite:
                self._files.prune(merged_indexes=self._merged_indexes, roots=roots)
        except (MLStateError, MemoryError) as error:
            return f"old files of the checkpoint were not deleted: {error}"
        return None

    def _delete_old_roots(self, manifest: Manifest) -> dict[str, list[Generation]]:
        """Delete the roots (manifests of steps) that a manager does not keep, before their files.

        `manifest`: the committed one. Returns the generations that ended ("gone") and those that
        stay ("kept"), or {} if they are unknown; see `generations_to_delete`.
        """
        before, request = self._replaced.manifest, self._target.request
        deletes_roots = request.retain is not None or request.overwrite
        if before is None and not deletes_roots:
            return {}
        with suppress(MLStateError, MemoryError):
            old = [] if before is None else [before]
            if deletes_roots:
                old += self._files.read_all_roots()
                self._target.retain(manifest)
            return generations_to_delete(old, self._files.read_all_roots())
        return {}

    def _delete_own_replaced(self, plan: dict[str, Any]) -> str:
        """Delete this rank's files of ended generations; return the text of an error, or "".

        `plan`: the result of rank 0's `_delete_old_roots`; nothing is deleted if it is empty.
        """
        if not plan:
            return ""
        dead, live = ([Generation(*fields) for fields in plan[name]] for name in ("gone", "kept"))
        rank, world_size = self._target.rank, self._target.world_size
        try:
            self._files.delete_own_files(rank, world_size, dead, live, self._merged_indexes)
        except (MLStateError, MemoryError) as error:
            return f"rank {rank}: {error}"
        return ""

    def _delete_replaced_together(self, group: ProcessGroup) -> str | None:
        """Delete the files that no root needs, each rank its own; every rank calls it.

        Only rank 0 has a manifest: it deletes old roots and sends the plan to all ranks. An empty
        plan: it could not read the roots. If it is empty or a rank fails, rank 0 tries again for
        all ranks. Returns the text of a warning, or None: on rank 0 about any rank, on other ranks
        about their own files.
        """
        import json

        own_plan = {} if self.manifest is None else self._delete_old_roots(self.manifest)
        [plan_of_root, *_] = gather_bytes(group, json.dumps(own_plan).encode())
        plan = json.loads(plan_of_root)
        own_error = self._delete_own_replaced(plan)
        errors = [own_error, *map(bytes.decode, gather_bytes(group, own_error.encode(), root=0))]
        first_error = next(filter(None, errors), None)
        warning = None
        if self.manifest is not None and (first_error or not plan):
            warning = self._delete_all_replaced(self.manifest)
        if warning is None and first_error:
            warning = f"deleting old files of the checkpoint met an error: {first_error}"
        return warning

    def _close(self) -> None:
        """Remove the note of this save from the lock, unless files are left for the next save."""
        self._error = None
        if self._claim is not None and self._is_clean:
            self._claim.note(None)


def write_and_commit(
    target: SaveTarget,
    gathered: GatheredShards,
    progress: Progress,
    freed: Callable[[], object] | None = None,
) -> RootPath:
    """Write the gathered shards and commit them; every rank calls it, even after a failure.

    `progress` is called with numbers of bytes, `freed` when the arrays may change. Returns the
    saved root. After an error in the commit or before, the old checkpoint is unchanged; if
    replacing the manifest itself failed, either may be current. After a later one (a
    CollectiveError, or a warning that is raised) the new one is current.
    """
    commit = Commit(target)

    def shapes() -> Shapes | None:
        return None if gathered.shards is None else _core.shards_shapes(gathered.shards)

    def save() -> None:
        header = gathered.header
        commit.begin(states=bool(header.get("states")), step=header.get("step"), shapes=shapes)
        commit.write(gathered, progress, freed)
        commit.commit(gathered.header, gathered.copies)
        commit.delete_replaced()

    return commit.run(save)
