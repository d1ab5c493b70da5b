"""`verify`: find damage in a checkpoint, `repair=`, marks of damaged steps."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.arguments import check_callback, check_flags
from .._common.callback import ProgressErrors
from .._common.log import log
from .._common.store_error import store_error
from ..errors import ChecksumError, FormatError, MLStateError, StoreError, StoreNotFoundError
from ._folder.names import MANIFEST, SECTIONS, Root
from ._folder.protocol import TensorParts
from ._folder.weight_names import is_index, is_weights_root
from ._report import Problem, VerifyReport
from ._sections import STATES
from ._steps.step_choice import choose_root
from ._store.checkpoint_files import TRIES, CheckpointFiles
from ._store.name_globs import listed_names
from ._store.open_path import RootPath, open_root_path
from ._store.weight_checksums import find_checksums
from ._store.weight_files import unlisted_files, warn_of_total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .. import _core
    from ._load_whole import WholePath
    from ._store.manifest import Manifest

_CRC32C, _LAYERS = -3, -1  # indices of these fields in a row of `MergedIndex.shards`


def _root_problem(kind: str, path: str, rank: int, error: MLStateError) -> Problem:
    """Return the problem of a manifest or an index at `path` that cannot be read.

    `kind`: of a malformed file; a missing one is "missing", and one that the system refuses
    "unreadable". `rank`: of the index, 0 for a manifest.
    """
    if isinstance(error, FileNotFoundError):
        kind = "missing"
    elif isinstance(error, StoreError):
        kind = "unreadable"
    return Problem(kind, path, None, None, rank, error.offset or 0, 0, str(error))


def _verify_weight_files(
    files: CheckpointFiles, manifest: Manifest, progress: Callable[[int], object] | None
) -> tuple[int, list[Problem]]:
    """Verify the files of a Hugging Face folder, or one file; return bytes read and problems.

    Of files without checksums of mlstate, only the structure is checked. A missing file is a
    problem. `progress`: called with the bytes read since the last call; None: no calls.
    """
    from ._files.safetensors_verify import read_header, verify_file

    def has_checksums(path: str) -> bool:
        with suppress(FormatError):
            return read_header(path).has_checksums
        return False

    assert manifest.weights is not None
    count, problems = 0, list[Problem]()
    for name in manifest.weights.files:
        try:
            with files.folder.file_to_verify(name, has_checksums) as path:
                report = verify_file(path, progress)[0]
        except StoreNotFoundError as error:
            problems.append(_root_problem("unreadable", name, 0, error))
            continue
        count += report.bytes
        local_folder = os.path.dirname(path)  # of a store's object, a temporary one
        problems += [
            problem._replace(text=problem.text.replace(local_folder, files.path))
            for problem in report.problems
        ]
    return count, problems


def verify_files(
    files: CheckpointFiles,
    manifest: Manifest,
    merged: _core.MergedIndex,
    progress: Callable[[int], object] | None,
) -> tuple[int, list[Problem]]:
    """Read and verify all files of a root; return the number of bytes, and the problems.

    `merged`: index of all ranks. `progress`: called with the bytes read since the last call; None:
    no calls.
    """
    if manifest.weights is None:
        count, problems = files.folder.verify(merged, progress)
        return count, [Problem(*problem) for problem in problems]
    count, file_problems = _verify_weight_files(files, manifest, progress)
    if files.checked:
        from ._files.checksum import compare_weights

        recorded, problems = compare_weights(files.folder, manifest.weights.files, progress)
        count, file_problems = count + recorded, file_problems + problems
    warn_of_total(files.folder, manifest, merged)
    return count, file_problems


def _index_problems(files: CheckpointFiles, manifest: Manifest) -> list[Problem]:
    """Return a problem for each rank's damaged index; each index is read separately.

    Weights of another program have no such indexes: returns the problems of their files.
    """
    if manifest.weights is not None:
        return _verify_weight_files(files, manifest, None)[1]
    problems = []
    for rank, record in enumerate(manifest.indexes):
        try:
            files.load_merged_index(manifest, [rank])
        except MLStateError as error:
            problems.append(_root_problem("index", record.path, rank, error))
    return problems


_NAMED = 3  # tensors of one file that a problem names


def _with_tensors(problems: list[Problem], merged: _core.MergedIndex) -> list[Problem]:
    """Return the problems, with the names of the affected tensors in problems of whole files.

    `merged`: index of all ranks. A file with several tensors names the first ones in the text.
    """
    damaged_files = {problem.path for problem in problems if problem.name is None}
    if not damaged_files:
        return problems
    tensors_by_file: dict[str, list[tuple[str, int]]] = {}
    for _, key, part, _, _, path, *_, layers in merged.shards():
        for file in [path] if layers is None else {layer[0] for layer in layers}:
            if file in damaged_files:
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
    files: CheckpointFiles,
    name: str,
    report: VerifyReport,
    progress: Callable[[int], object] | None,
    indexes: dict[str, _core.MergedIndex],
) -> Manifest | None:
    """Verify the manifest `name` and its files; return it, or None if it cannot be read.

    Problems, step and bytes are added to `report`, and the merged index to `indexes` by its
    generation. `progress`: as for `verify_files`. Raises the error of a store that does not answer.
    """
    try:
        manifest = files.read_manifest(name)
    except MLStateError as error:
        if files.folder.is_outage(error):
            raise
        report.problems.append(_root_problem("manifest", name, 0, error))
        return None
    report.step = manifest.step
    try:
        merged = files.load_merged_index(manifest)
    except MLStateError as error:
        if files.folder.is_outage(error):
            raise
        index_problems = _index_problems(files, manifest)
        report.problems += index_problems or [_root_problem("index", name, 0, error)]
        return manifest
    indexes[manifest.generation] = merged
    count, problems = verify_files(files, manifest, merged, progress)
    report.bytes += count + sum(record.bytes for record in manifest.indexes)
    report.problems += _with_tensors(problems, merged)
    return manifest


def _is_replaced(files: CheckpointFiles, name: str, generation: str) -> bool:
    """Return whether a root was replaced or deleted since it had `generation`.

    Then its files may be deleted, too. True if the root cannot be read.
    """
    try:
        return files.is_replaced(name, generation)
    except MLStateError:
        return True


def verify_root(
    files: CheckpointFiles,
    name: str,
    report: VerifyReport,
    progress: Callable[[int], object] | None,
    indexes: dict[str, _core.MergedIndex],
) -> None:
    """Add the problems of the manifest `name` and its files to `report`.

    Step and bytes are noted there too. Its merged index is added to `indexes`, by generation.
    `progress`: as for `verify_files`. Steps with damaged files are marked in the folder, and the
    mark of a good one is removed. If files are missing and a writer has replaced the manifest
    meanwhile, start again. Raises StoreError (EBUSY) after `TRIES` such attempts.
    """
    for _ in range(TRIES):
        fresh_report, read = VerifyReport(files.path), dict[str, Any]()
        manifest = _verify_once(files, name, fresh_report, progress, read)
        is_missing = any(problem.kind == "missing" for problem in fresh_report.problems)
        if manifest is None or not is_missing:
            break
        if not _is_replaced(files, name, manifest.generation):
            break
    else:
        text = f"it was replaced at each of {TRIES} attempts to verify it"
        reason = OSError(errno.EBUSY, text)
        raise store_error(reason, "cannot verify the checkpoint", files.path)
    indexes.update(read)
    report.step = fresh_report.step
    report.bytes += fresh_report.bytes
    report.problems += fresh_report.problems
    for problem in fresh_report.problems:
        where = f"{files.path}/{name}"
        log("WARNING", "%s: step %s: %s", where, fresh_report.step, problem.as_error(files.path))
    if manifest is not None and manifest.weights is None:
        merged = read.get(manifest.generation)
        _note_result(
            files, manifest, fresh_report.problems, {} if merged is None else merged.files()
        )


def _note_result(
    files: CheckpointFiles, manifest: Manifest, problems: list[Problem], sizes: dict[str, int]
) -> None:
    """Mark steps with damaged files, so that no process counts them; unmark a step that loads.

    `problems`: of the root of `manifest`. `sizes`: bytes of its shard files, by path. Missing and
    unreadable files may come back, and every process notices them, so they mark no step.
    """
    others = [problem for problem in problems if not _is_of_header(problem, sizes)]
    damaged = {other.path for other in others if other.kind not in ("missing", "unreadable")}
    if damaged:
        files.mark_steps(manifest.generation, damaged)
    elif not others:
        files.unmark(manifest)


def _verify_names(
    files: CheckpointFiles,
    root: str,
    names: list[str],
    report: VerifyReport,
    progress: Callable[[int], object] | None,
) -> None:
    """Read the tensors `names`, one after the other, and add their problems to `report`.

    `files`: compare tensors of another program with checksums of `checksum`, if any. `root`: path
    of the root. `progress`: called with the bytes read since the last call. No step is marked. A
    damaged index is a problem. Raises TensorNotFoundError for a name that selects nothing.
    """
    from ._files.checksum import checksums_problem
    from ._load import chosen_names
    from ._load_arguments import ranks_of

    def verify_tensors(manifest: Manifest) -> None:
        """Read the named tensors through their checksums, and put problems and bytes into `report`.

        It starts `report` anew, because it is called again if a writer replaces the checkpoint.
        """
        report.step, report.bytes, report.problems = manifest.step, 0, []
        report.checksums, report.compared = True, []
        try:
            checksums = find_checksums(files.folder) if is_weights_root(root) else None
        except (FormatError, StoreError) as error:
            if files.folder.is_outage(error):
                raise
            report.problems.append(checksums_problem(error))
            report.checksums = False
            return
        try:
            if checksums is not None:
                report.compared.append(f"the checksums in {os.path.basename(checksums.path)}")
            merged = files.load_merged_index(manifest)
        except (ChecksumError, FormatError) as error:
            problems = _index_problems(files, manifest) if manifest.weights is None else []
            report.problems += problems or [_problem_of(error, None, files.path)]
            return
        sections = [merged.keys(number) for number in range(STATES)]
        # a sparse or compressed shard has layers instead, and each layer has a checksum
        unchecked = {
            shard[:2]  # section and key
            for shard in merged.shards()
            if shard[_CRC32C] is None and shard[_LAYERS] is None
        }
        whole_tensors = ranks_of(rank=None, world_size=None, layout=None, group=None)
        for number, keys in enumerate(
            chosen_names(sections, names, files.path, manifest.weights)[1]
        ):
            for key in keys:
                report.checksums &= (SECTIONS[number], key) not in unchecked
                try:
                    parts = TensorParts(merged, number, [key], whole_tensors)
                    read = files.folder.load(parts, True, False, progress)
                except (ChecksumError, FormatError, StoreError) as error:
                    if files.folder.is_outage(error) or isinstance(error, StoreNotFoundError):
                        raise  # `read_root` starts again if a writer has replaced the checkpoint
                    report.problems.append(_problem_of(error, key, files.path))
                else:
                    report.bytes += sum(array.nbytes for array in read.values())

    try:
        files.read_root(root, verify_tensors)
    except StoreNotFoundError as error:
        if not files.folder.exists(root):
            raise
        report.problems.append(_problem_of(error, None, files.path))


def _problem_of(error: MLStateError, key: str | None, folder: str) -> Problem:
    """Return the problem for the error that a load of the tensor `key` raised.

    `key`: None if a whole file is affected; the error's own name counts first. The problem's path
    is relative to `folder`, of the checkpoint.
    """
    path = os.path.relpath(error.path, folder) if error.path else ""
    kind = "altered" if isinstance(error, ChecksumError) else "unreadable"
    return _root_problem(kind, path, 0, error)._replace(name=error.name or key)


# ---- repair ----


class _Trial(NamedTuple):
    """State of a root after its headers were repaired as far as possible."""

    report: VerifyReport
    generation: str
    loads: bool  # every tensor has its saved bytes
    is_mended: bool  # headers were rewritten


def _is_of_header(problem: Problem, sizes: dict[str, int]) -> bool:
    """Return whether a problem affects only a file's header, which loading does not read.

    `sizes`: bytes of each file. A problem of the whole file has the file's length.
    """
    return problem.kind in ("header", "foreign") and problem.length < sizes[problem.path]


def _mend_headers(files: CheckpointFiles, paths: set[str]) -> bool:
    """Rewrite the headers of the shard files `paths`; return whether any was rewritten.

    A header needs an index that lists all tensors of the file. If several steps share a file, the
    index of the step that wrote it does.
    """
    left = set(paths)
    roots = [root.path for root in files.list_roots()]
    for name in (MANIFEST, *reversed(roots)):
        if not left:
            break
        try:
            merged = files.load_merged_index(files.read_manifest(name))
        except MLStateError:  # another root may have the header too
            continue
        for path in sorted(left):
            header = merged.header(path)
            if header is not None:
                files.folder.overwrite_start(path, header)
                log("WARNING", "%s: repaired: the header of %s", files.path, path)
                left.remove(path)
    return left != paths


def _try_root(files: CheckpointFiles, name: str) -> _Trial:
    """Verify the manifest `name` for a repair; rewrite damaged headers of files.

    Only headers of files with good tensors are rewritten; then all is verified again.
    """
    is_mended = False
    while True:
        report = VerifyReport(files.path)
        indexes: dict[str, _core.MergedIndex] = {}
        verify_root(files, name, report, None, indexes)
        if not indexes:
            return _Trial(report, "", False, is_mended)
        [(generation, merged)] = indexes.items()
        sizes = merged.files()
        headers = {p.path for p in report.problems if _is_of_header(p, sizes)}
        others = {p.path for p in report.problems if not _is_of_header(p, sizes)}
        if is_mended or not _mend_headers(files, headers - others):
            return _Trial(report, generation, not others, is_mended)
        is_mended = True


def _repair(files: CheckpointFiles, report: VerifyReport) -> None:
    """Rewrite damaged headers; if that is not enough, make the newest loadable step current.

    `report`: of the current root; its result is updated. Newer steps that cannot be loaded are
    deleted; the next save or `prune` deletes their files. Steps that cannot be read now because of
    an I/O error may be good, so they stay. Without a loadable step only headers change.
    """
    claim = files.folder.claim()
    with claim.holder:
        claim.acquire()
        current = _try_root(files, MANIFEST)
        if current.loads:
            if current.is_mended and current.report:
                report.repaired = current.generation
            elif current.report:  # a writer has replaced the verified checkpoint by a good one
                report.problems, report.step = [], current.report.step
            return
        damaged: list[Root] = []
        for root in reversed(files.list_roots()):
            trial = _try_root(files, root.path)
            if trial.loads:
                data = files.folder.read(root.path)
                # before the manifest: while that is damaged, repair can be repeated
                files.delete_roots(damaged)
                claim.commit(data)
                report.repaired = root.generation
                report.step = trial.report.step
                text = "%s: repaired: step %s, generation %s, replaces a damaged checkpoint"
                log("WARNING", text, files.path, report.step, root.generation)
                return
            if all(problem.kind != "unreadable" for problem in trial.report.problems):
                damaged.append(root)


def verify(
    path: str | os.PathLike[str],
    *,
    repair: bool = False,
    progress: Callable[[int], object] | None = None,
    step: int | str | None = None,
    monitor: str | None = None,
    mode: str | None = None,
    names: str | Iterable[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """
    Read every byte of a checkpoint, and report all damage.

    Parameters
    ----------
    path : str or os.PathLike
        Anything that `load` reads. Of files that another program wrote without checksums, only the
        structure is checked. Also any local file or folder that `mlstate.checkpoint.checksum` was
        called for: every file is compared with its checksums. In the cache of the Hugging Face Hub,
        files are compared with the SHA-256, or git's SHA-1, in the names of their blobs.
    repair : bool, default False
        Rewrite damaged headers of shard files. If tensors are damaged, replace the checkpoint by
        the newest older one whose tensors are all good (`CheckpointManager` keeps older ones).
        Newer steps with damaged tensors are deleted. To rescue data from these, load them
        before with ``verify=False``.
    progress : callable, optional
        Called with the number of bytes read since the last call.
    step : int, "latest" or "best", optional
        The step of a run. Default: the newest.
    monitor, mode
        As for `load`: which step is the best.
    names : str or iterable of str, optional
        Tensors, layers or globs, as for `load`. Only these tensors are read, one after the other
        into memory. Headers and other files are not looked at, and no step is marked as damaged.
    storage_options : mapping, optional
        As for `save`.

    Returns
    -------
    VerifyReport
        True if the checkpoint is good. Problems give the file, the byte range and the tensor.

    Raises
    ------
    ValueError
        `repair` is true for files of another program, which have no older step, or together with
        `names`; or `names` are given for a file that is read as a whole (``.npz``, ``.pt``).
    TensorNotFoundError
        The checkpoint does not hold one of the `names`.
    StoreError
        The folder does not exist or, with `repair`, cannot be written. Also if other processes
        replaced the checkpoint during each of 20 attempts to verify it.

    Notes
    -----
    If another process replaces the checkpoint during verification, verification starts again.

    A step of a `CheckpointManager` with damaged bytes is marked by an empty file next to its root,
    so that ``keep=`` does not count it; the mark of an undamaged step is removed.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> checkpoint = mlstate.save(path, {"w": np.arange(8.0)})
    >>> with open(path + "/" + checkpoint.shards()[0].path, "r+b") as file:
    ...     _ = file.seek(4100)
    ...     _ = file.write(b"!")
    >>> [(p.kind, p.name, p.offset) for p in mlstate.verify(path).problems]
    [('altered', 'w', 4096)]
    """
    check_flags(repair=repair)
    check_callback("progress", progress)
    listed = listed_names(names)
    if repair and listed is not None:
        raise ValueError("a repair verifies all tensors: leave out names")
    choice = step, monitor, mode
    with ProgressErrors(progress) as guarded:
        return _verify_path(path, storage_options, choice, listed, repair=repair, progress=guarded)


def _verify_path(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    choice: tuple[int | str | None, str | None, str | None],
    listed: list[str] | None,
    *,
    repair: bool,
    progress: Callable[[int], object] | None,
) -> VerifyReport:
    """Verify a path as `verify` does; `choice`: step, monitor and mode, `listed`: checked names."""
    files, root, *_ = open_root_path(path, storage_options)
    is_plain = root == MANIFEST and choice == (None, None, None) and not repair
    if is_plain and listed is None and files.folder.is_local and not is_index(files.folder.file):
        from ._files.checksum import verify_foreign

        file = files.folder.file
        full_path = os.path.join(files.path, file) if file else files.path
        foreign_report = verify_foreign(full_path, progress)
        if foreign_report is not None:
            return foreign_report
    if repair:
        remedy = "copy the checkpoint to a local folder to repair it"
        files.folder.require_local("repair=True", remedy)
    # of all tensors, the checksums of files of another program are compared below
    files = CheckpointFiles(files.folder.without_cache(), checked=listed is not None)
    report = VerifyReport(files.path)
    root = choose_root(files, root, *choice)
    foreign = None if isinstance(path, RootPath) else _find_whole(files)
    if foreign is not None:
        if repair:
            raise ValueError(f"{foreign.path} is of another program: it has no step to return to")
        if listed is not None:
            raise ValueError(f"{foreign.path} is verified as a whole: leave out names")
        from ._load_whole import verify_whole

        report.path = foreign.path
        verify_whole(foreign, report, progress)
        return report
    root = _root_to_verify(files, root)
    if listed is not None:
        _verify_names(files, root, listed, report, progress)
        return report
    indexes: dict[str, _core.MergedIndex] = {}
    if is_weights_root(root) and repair:
        raise ValueError(
            f"{files.path} is a Hugging Face folder: it has no older step to return to; download "
            "or export the damaged files again"
        )
    verify_root(files, root, report, progress, indexes)
    if is_weights_root(root):
        with suppress(MLStateError):  # the problems give the reason
            weights = files.read_manifest(root).weights
            report.strange = [] if weights is None else unlisted_files(files.folder, weights)
        report.checksums = False
        with suppress(MLStateError):
            shards = files.load_merged_index(files.read_manifest(root)).shards()
            report.checksums = all(shard[_CRC32C] is not None for shard in shards)
        from ._files.checksum import verify_weights_folder

        verify_weights_folder(files.folder, report, progress)
        report.strange = sorted(set(report.strange))
        return report
    with suppress(MLStateError):  # needed files are unknown; the problems give the reason
        report.leftover = files.prune(dry_run=True, merged_indexes=indexes)
    try:
        report.strange = files.foreign_files()
    except StoreError:  # one of its folders is not a folder; the problems report it
        if not report.problems:
            raise
    if repair and report.problems:
        _repair(files, report)
    return report


def _find_whole(files: CheckpointFiles) -> WholePath | None:
    """Return path and format of another program's file or folder that must be read whole.

    Returns None for all others: a folder with a checkpoint or steps, a store, and one file of a
    folder (`folder.file`), which `verify_root` reads.
    """
    folder = files.folder
    if not folder.is_local or folder.file:
        return None
    if os.path.isdir(files.path) and (folder.exists(MANIFEST) or files.list_roots()):
        return None
    from ._load_whole import whole_path

    return whole_path(folder)


def _root_to_verify(files: CheckpointFiles, root: str) -> str:
    """Return the path of the root to verify; raise StoreError if the folder has no checkpoint.

    `root`: of the chosen step, or `MANIFEST` for the current checkpoint. A missing manifest is a
    problem, not an error, if there are steps.
    """
    folder = files.folder
    folder.require_folder()
    root = files.current_root(root)
    is_there = folder.has_checkpoint() if root == MANIFEST else folder.exists(root)
    if not is_there and (is_weights_root(root) or not files.list_roots()):
        files.read_manifest(root)  # raises the error of a missing checkpoint
    return root
