"""`verify`: finds damage of any source, names, `repair=`; three answers of `VerifyReport`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .._common.arguments import check_callback, check_flags
from .._common.callback import Progress, ProgressErrors
from .._common.file_kinds import is_damage
from .._common.log import log
from .._common.text import sort_steps, steps_text
from ..errors import (
    ChecksumError,
    CompatibilityError,
    FormatError,
    MLStateError,
    StoreError,
    StoreNotFoundError,
)
from ._files.checksums_verify import compare_recorded, find_or_note, local_place
from ._folder.local import LocalFolder
from ._folder.names import MANIFEST, SECTIONS, Root
from ._report import Problem, VerifyReport, problem_of
from ._sections import STATES
from ._sources.indexed import IndexedSource
from ._sources.open_source import open_source
from ._sources.verify_root import index_problems, is_of_header, verify_root
from ._store.checkpoint_files import CheckpointFiles
from ._store.chosen_names import chosen_names
from ._store.name_globs import listed_names
from ._store.open_path import RootPath, is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ._sources.protocol import Source

_CRC32C, _LAYERS = -3, -1  # indices of these fields in a row of `MergedIndex.shards`
_WHOLE = (None, 0, 0)  # the cutting of whole tensors


# ---- names ----


def _can_read_tensors(source: IndexedSource, report: VerifyReport) -> bool:
    """Read the index and recorded checksums; return False if damage prevents it.

    The damage is added to `report`.
    """
    is_weights = source.format != "mlstate"
    if is_weights:
        find_or_note(source.files.folder, report)
    try:
        _ = source.index if not report.problems else None
    except (ChecksumError, FormatError) as error:
        problems = [] if is_weights else index_problems(source.files, source.manifest)
        report.problems += problems or [_problem_in(source, error)]
    return not report.problems


def _verify_names(
    source: IndexedSource, names: list[str], report: VerifyReport, progress: Progress
) -> None:
    """Read the tensors `names`, one after the other, and add their problems to `report`.

    Tensors of another program are compared with checksums of `checksum`, if any. `progress`: called
    with the bytes read since the last call. No step is marked. A damaged index is a problem. Raises
    TensorNotFoundError for a name that selects nothing.
    """

    def verify_tensors() -> None:
        """Read the named tensors through their checksums, and put problems and bytes into `report`.

        It starts `report` anew, because it is called again if a writer replaces the checkpoint.
        """
        report.step, report.bytes, report.problems = source.manifest.step, 0, []
        report.checksums, report.compared = True, []
        if not _can_read_tensors(source, report):
            return
        sections = [source.index.keys(number) for number in range(STATES)]
        weights = source.manifest.weights
        # a sparse or compressed shard has layers instead, and each layer has a checksum
        unchecked = {
            shard[:2]  # section and key
            for shard in source.index.shards()
            if shard[_CRC32C] is None and shard[_LAYERS] is None
        }
        _, chosen = chosen_names(sections, names, source.path, weights)
        for number, keys in enumerate(chosen):
            for key in keys:
                report.checksums &= (SECTIONS[number], key) not in unchecked
                _verify_tensor(source, number, key, report, progress)

    try:
        source.attempt(verify_tensors)
    except StoreNotFoundError as error:
        if not source.files.folder.exists(source.root):
            raise
        report.problems.append(_problem_in(source, error))


def _verify_tensor(
    source: IndexedSource, section: int, key: str, report: VerifyReport, progress: Progress
) -> None:
    """Read one tensor through its checksums, and add bytes or a problem to `report`."""
    try:
        read = source.read(section, [key], _WHOLE, verify=True, progress=progress)
    except (ChecksumError, FormatError, StoreError) as error:
        if source.files.folder.is_outage(error) or isinstance(error, StoreNotFoundError):
            raise  # `attempt` starts again if a writer has replaced the checkpoint
        report.problems.append(_problem_in(source, error, key))
    else:
        report.bytes += sum(array.nbytes for array in read.values())


def _problem_in(source: IndexedSource, error: MLStateError, key: str | None = None) -> Problem:
    """Return the problem for the error that a load of the tensor `key` raised.

    `key`: None if a whole file is affected; the error's own name counts first. The problem's path
    is relative to the folder of the checkpoint.
    """
    path = os.path.relpath(error.path, source.files.path) if error.path else ""
    kind = "altered" if isinstance(error, ChecksumError) else "unreadable"
    return problem_of(kind, path, error)._replace(name=error.name or key)


# ---- repair ----


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
                LocalFolder(files.path).overwrite_start(path, header)
                log("WARNING", "%s: repaired: the header of %s", files.path, path)
                left.remove(path)
    return left != paths


def _try_root(files: CheckpointFiles, name: str) -> tuple[VerifyReport, bool]:
    """Verify the manifest `name` for a repair; rewrite damaged headers of files.

    Only headers of files with good tensors are rewritten; then all is verified again, and
    `repaired` of the report is its generation. Also return whether no tensor is damaged.
    """
    mended = None
    while True:
        report = VerifyReport(files.path, repaired=mended)
        indexes = verify_root(files, name, report, None)
        if not indexes:
            return report, False
        [(generation, merged)] = indexes.items()
        sizes = merged.files()
        headers = {p.path for p in report.problems if is_of_header(p, sizes)}
        others = {p.path for p in report.problems if not is_of_header(p, sizes)}
        if mended or not _mend_headers(files, headers - others):
            return report, not others
        mended = generation


def _repair(files: CheckpointFiles, report: VerifyReport) -> None:
    """Rewrite damaged headers; if that is not enough, make the newest loadable step current.

    `report`: of the current root; its result is updated. Newer steps that cannot be loaded are
    deleted; the next save or `prune` deletes their files. Steps that cannot be read now because of
    an I/O error may be good, so they stay. Without a loadable step only headers change.
    """
    claim = files.folder.claim()
    with claim.holder:
        claim.acquire()
        current, loads = _try_root(files, MANIFEST)
        if loads:
            if current and current.repaired:
                report.repaired = current.repaired
            elif current:  # a writer has replaced the verified checkpoint by a good one
                report.problems, report.step = [], current.step
            return
        damaged: list[Root] = []
        for root in reversed(files.list_roots()):
            older, loads = _try_root(files, root.path)
            if loads:
                data = files.folder.read(root.path)
                # before the manifest: while that is damaged, repair can be repeated
                report.deleted = sort_steps(files.steps_of(damaged).values())
                files.delete_roots(damaged)
                claim.commit(data)
                report.repaired, report.step = root.generation, older.step
                text = "%s: repaired: step %s, generation %s, is current; deleted: %s"
                steps = steps_text(report.deleted)
                log("WARNING", text, files.path, report.step, root.generation, steps)
                return
            if all(problem.kind != "unreadable" for problem in older.problems):
                damaged.append(root)


def verify(
    path: str | os.PathLike[str],
    *,
    repair: bool = False,
    progress: Callable[[int], object] | None = None,
    step: int | str | None = None,
    names: str | Iterable[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """
    Read every byte of a checkpoint, and report all damage.

    Parameters
    ----------
    path : str or os.PathLike
        Anything that `load` reads. A file that is not a checkpoint, such as an error page, or one
        cut short, is damaged. Of files that another program wrote without checksums, only the
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
    step : int or "latest", optional
        The step of a run. Default: the newest.
    names : str or iterable of str, optional
        Tensors, layers or globs, as for `load`. Only these tensors are read, one after the other
        into memory. Headers and other files are not looked at, and no step is marked as damaged.
    storage_options : mapping, optional
        As for `save`.

    Returns
    -------
    VerifyReport
        True if nothing is damaged; `good` if `load` also reads it, else `refusal` is the reason.
        Problems give the file, the byte range and the tensor.

    Raises
    ------
    ValueError
        `repair` is true for files of another program, which have no older step, or together with
        `names` or `step`; or `names` are given for a file that is read as a whole (``.npz``,
        ``.pt``).
    FormatError
        The file or folder is in a format that mlstate does not read.
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
    only_local = ("repair=True", "copy the checkpoint to a local folder to repair it")
    with ProgressErrors(progress) as guarded:
        try:
            source = open_source(
                path, storage_options, step, only_local=only_local if repair else None
            )
        except (CompatibilityError, FormatError, StoreNotFoundError) as error:
            if repair or listed is not None or is_url(path):
                raise
            report = _verify_refused(local_place(path), error, guarded)
        else:
            report = _verify_opened(source, path, listed, repair, guarded)
    if isinstance(path, str | os.PathLike) and not isinstance(path, RootPath):
        report.path = os.fspath(path)
    return report


def _verify_opened(
    source: Any, path: Any, listed: list[str] | None, repair: bool, progress: Progress
) -> VerifyReport:
    """Verify a source as `verify` does; `listed`: the checked names."""
    if repair:
        _refuse_repair(source)
    report = VerifyReport(source.path)
    if isinstance(source, IndexedSource):
        source.uncached()
    elif listed is not None:
        raise ValueError(f"{source.path} is verified as a whole: leave out names")
    if listed is not None:
        _verify_names(source, listed, report, progress)
    else:
        _verify_source(source, path, report, progress)
    if repair and report.problems:
        _repair(source.files, report)
    return report


def _verify_source(source: Source, path: Any, report: VerifyReport, progress: Progress) -> None:
    """Verify a source by recorded checksums, or by its own; `path`: that the caller passed."""
    if not is_url(source.path):
        place = local_place(path)
        # weights compare the files in their folder; the cache of a model has others
        is_own = isinstance(source, IndexedSource) and source.files.path == place.path
        if not is_own and compare_recorded(place, report, progress):
            try:
                if not report.problems:
                    source.require_loadable()
            except (CompatibilityError, FormatError, StoreNotFoundError) as error:
                report.refusal = str(error)
            return
    source.verify(report, progress)


def _refuse_repair(source: Source) -> None:
    """Raise ValueError for a source of another program, and for a chosen step."""
    if not isinstance(source, IndexedSource) or source.format != "mlstate":
        raise ValueError(
            f"{source.path} is of another program: it has no older step to return to; download or "
            "write the damaged files again"
        )
    if source.root != MANIFEST:
        raise ValueError(
            f"{source.path}: a repair is of the newest checkpoint, and a step was chosen: call "
            "mlstate.verify with repair=True and the folder, without step="
        )


def _verify_refused(folder: LocalFolder, error: MLStateError, progress: Progress) -> VerifyReport:
    """Return the report on a local path that `open_source` refuses with `error`.

    Any file or folder may have checksums. Without them, a file without content of any format, such
    as a pointer of git-LFS, is damaged, and for all others `error` is raised.
    """
    report = VerifyReport(folder.named_path, checksums=False)
    if compare_recorded(folder, report, progress):
        if not report.problems and not isinstance(error, StoreNotFoundError):
            report.refusal = str(error)
    elif is_damage(error):
        report.problems.append(problem_of("unreadable", folder.file, error))
    else:
        raise error
    return report
