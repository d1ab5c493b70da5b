"""Verification of one root of a folder: its files, marks of damaged steps, unneeded files."""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING

from ..._common.log import log
from ..._common.store_error import store_error
from ...errors import MLStateError, StoreError
from .._report import Problem, VerifyReport, problem_of
from .._store.checkpoint_files import TRIES, CheckpointFiles

if TYPE_CHECKING:
    from ... import _core
    from ..._common.callback import Progress
    from .._store.manifest import Manifest

_NAMED = 3  # tensors of one file that a problem names


def index_problems(files: CheckpointFiles, manifest: Manifest) -> list[Problem]:
    """Return a problem for each rank's damaged index; each index is read separately."""
    problems = []
    for rank, record in enumerate(manifest.indexes):
        try:
            files.load_merged_index(manifest, [rank])
        except MLStateError as error:
            problems.append(problem_of("index", record.path, error)._replace(rank=rank))
    return problems


def _with_tensors(problems: list[Problem], merged: _core.MergedIndex) -> list[Problem]:
    """Return the problems, with the names of the affected tensors in problems of whole files.

    `merged`: index of all ranks. A file with several tensors names the first ones in the text.
    """
    tensors_by_file: dict[str, list[tuple[str, int]]] = {}
    is_needed = any(problem.name is None for problem in problems)
    for _, key, part, _, _, path, *_, layers in merged.shards() if is_needed else ():
        for file in [path] if layers is None else {layer[0] for layer in layers}:
            tensors_by_file.setdefault(file, []).append((key, part))
    completed = []
    for problem in problems:
        inside = tensors_by_file.get(problem.path, []) if problem.name is None else []
        if len(inside) == 1:
            problem = problem._replace(name=inside[0][0], part=inside[0][1])
        elif inside:
            names = ", ".join(repr(key) for key, _ in inside[:_NAMED])
            more = f" and {len(inside) - _NAMED:,} more" if len(inside) > _NAMED else ""
            problem = problem._replace(text=f"{problem.text}; it holds {names}{more}")
        completed.append(problem)
    return completed


def _verify_once(
    files: CheckpointFiles, name: str, report: VerifyReport, progress: Progress
) -> tuple[Manifest | None, _core.MergedIndex | None]:
    """Verify the manifest `name` and its files; return it and the index, None if unreadable.

    Problems, step and bytes are noted in `report`. `progress`: as for `verify_root`. Raises the
    error of a store that does not answer.
    """
    report.step, report.bytes, report.problems = None, 0, []
    manifest = None
    try:
        manifest = files.read_manifest(name)
        report.step = manifest.step
        merged = files.load_merged_index(manifest)
    except MLStateError as error:
        if files.folder.is_outage(error):
            raise
        problems = index_problems(files, manifest) if manifest else []
        kind = "index" if manifest else "manifest"
        report.problems += problems or [problem_of(kind, name, error)]
        return manifest, None
    count, rows = files.folder.verify(merged, progress)
    report.bytes += count + sum(record.bytes for record in manifest.indexes)
    report.problems += _with_tensors([Problem(*problem) for problem in rows], merged)
    return manifest, merged


def _is_replaced(files: CheckpointFiles, name: str, generation: str) -> bool:
    """Return whether a root was replaced or deleted since it had `generation`.

    Then its files may be deleted, too. True if the root cannot be read.
    """
    try:
        return files.is_replaced(name, generation)
    except MLStateError:
        return True


def verify_root(
    files: CheckpointFiles, name: str, report: VerifyReport, progress: Progress
) -> dict[str, _core.MergedIndex]:
    """Note the problems of the manifest `name` and its files in `report`, with step and bytes.

    Return its merged index by its generation; {} if it cannot be read.
    `progress`: called with the bytes read since the last call. Steps with damaged files are marked
    in the folder, and the mark of a good one is removed. If files are missing and a writer has
    replaced the manifest meanwhile, start again. Raises StoreError (EBUSY) after `TRIES` such
    attempts.
    """
    for _ in range(TRIES):
        manifest, merged = _verify_once(files, name, report, progress)
        is_missing = any(problem.kind == "missing" for problem in report.problems)
        if not (manifest and is_missing and _is_replaced(files, name, manifest.generation)):
            break
    else:
        reason = OSError(errno.EBUSY, f"it was replaced at each of {TRIES} attempts to verify it")
        raise store_error(reason, "cannot verify the checkpoint", files.path)
    for problem in report.problems:
        text = problem.as_error(files.path)
        log("WARNING", "%s/%s: step %s: %s", files.path, name, report.step, text)
    if manifest is not None:
        _note_result(files, manifest, report.problems, {} if merged is None else merged.files())
    return {manifest.generation: merged} if manifest and merged is not None else {}


def is_of_header(problem: Problem, sizes: dict[str, int]) -> bool:
    """Return whether a problem affects only a file's header, which loading does not read.

    `sizes`: bytes of each file. A problem of the whole file has the file's length.
    """
    return problem.kind in ("header", "foreign") and problem.length < sizes[problem.path]


def _note_result(
    files: CheckpointFiles, manifest: Manifest, problems: list[Problem], sizes: dict[str, int]
) -> None:
    """Mark steps with damaged files, so that no process counts them; unmark a step that loads.

    `problems`: of the root of `manifest`. `sizes`: bytes of its shard files, by path. Missing and
    unreadable files may come back, and every process notices them, so they mark no step.
    """
    others = [problem for problem in problems if not is_of_header(problem, sizes)]
    damaged = {other.path for other in others if other.kind not in ("missing", "unreadable")}
    if damaged:
        files.mark_steps(manifest.generation, damaged)
    elif not others:
        files.unmark(manifest)


def list_others(
    files: CheckpointFiles, report: VerifyReport, indexes: dict[str, _core.MergedIndex]
) -> None:
    """List the files that no root needs, and files of other programs, in `report`.

    `indexes`: that were read, by generation. Nothing is listed if the problems give the reason.
    """
    with suppress(MLStateError):  # needed files are unknown
        report.leftover = files.prune(dry_run=True, merged_indexes=indexes)
    try:
        report.strange = files.foreign_files()
    except StoreError:  # one of its folders is not a folder
        if not report.problems:
            raise
