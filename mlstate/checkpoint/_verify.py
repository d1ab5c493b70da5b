"""What is wrong with a checkpoint; public through `mlstate.checkpoint`."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from .._common.local_path import local_folder
from .._common.log import log
from .._common.set_module import set_module
from .._common.text import bytes_text, table_text
from ..errors import ChecksumError, FormatError, MLStateError, StoreError
from ._store import folder as _folder
from ._store.writer_lock import WriterLock

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._store.manifest import Manifest

_ROWS = 20


@set_module("mlstate.checkpoint")
class Problem(NamedTuple):
    """One thing that is wrong.

    Attributes
    ----------
    kind : str
        ``"missing"``, ``"unreadable"``, ``"length"`` (cut off, or longer than it was),
        ``"foreign"`` (another file in its place), ``"header"``, ``"altered"`` (bytes of a
        tensor changed), ``"manifest"`` or ``"index"`` (one of these cannot be believed).
    path : str
        The file, in the checkpoint's folder.
    name : str or None
        Key of the tensor concerned. None where a file with several is lost: `text` names these.
    part : int or None
        Which part of the tensor.
    rank : int
        The rank that stored it.
    offset, length : int
        The byte range of the file that is concerned.
    text : str
        In words.
    """

    kind: str
    path: str
    name: str | None
    part: int | None
    rank: int
    offset: int
    length: int
    text: str

    def as_error(self, folder: str) -> FormatError | StoreError:
        """Return the exception that says the same; a `FileNotFoundError` for a missing file."""
        where = f"bytes {self.offset} to {self.offset + self.length}"
        of = f" of {self.name!r}" if self.name is not None else ""
        text = f"{self.path}: {self.kind}: {where}{of}: {self.text}"
        path = os.path.join(folder, self.path)
        error: FormatError | StoreError
        if self.kind == "missing":
            reason = FileNotFoundError(errno.ENOENT, f"{where}{of}")
            error = _folder.store_error(reason, f"{self.path}: missing", path)
        elif self.kind in ("altered", "header"):
            error = ChecksumError(text)
        else:
            error = FormatError(text)
        error.path, error.name, error.offset = path, self.name, self.offset
        return error


@set_module("mlstate.checkpoint")
class VerifyReport:
    """What `verify` found; its truth is whether the checkpoint is good.

    Attributes
    ----------
    problems : list of Problem
        What cannot be loaded as it was saved.
    leftover : list of str
        Files of ours that no root needs: `prune` deletes them.
    strange : list of str
        Files that no writer of ours made.
    bytes : int
        That were read.
    step : int or None
        Of what was verified.
    repaired : str or None
        With ``repair=True``: generation of the checkpoint that is in place and good now. It is
        the same one if only headers were damaged, else an older one.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> _ = mlstate.save(path, {"w": np.arange(3.0)})
    >>> bool(mlstate.verify(path))
    True
    """

    __slots__ = ("bytes", "leftover", "path", "problems", "repaired", "step", "strange")

    def __init__(self, path: str) -> None:
        self.path = path
        self.problems: list[Problem] = []
        self.leftover: list[str] = []
        self.strange: list[str] = []
        self.bytes = 0
        self.step: int | None = None
        self.repaired: str | None = None

    def __bool__(self) -> bool:
        return not self.problems

    def _rows(self) -> list[list[str]]:
        return [
            [p.kind, p.path, p.name or "", f"{p.offset}-{p.offset + p.length}", p.text]
            for p in self.problems
        ]

    def _title(self) -> str:
        count = len(self.problems)
        state = "good" if not count else f"{count} problem{'' if count == 1 else 's'}"
        extra = [f"{len(self.leftover)} files left over"] if self.leftover else []
        extra += [f"{len(self.strange)} strange files"] if self.strange else []
        extra += [f"repaired: generation {self.repaired}"] if self.repaired else []
        return ", ".join([f"{self.path}: {state}", f"{bytes_text(self.bytes)} read", *extra])

    def __repr__(self) -> str:
        if not self.problems:
            return self._title()
        return f"{self._title()}\n{table_text(_HEADERS, self._rows(), _ROWS)}"

    def _repr_html_(self) -> str:
        from ._html import report_html

        return report_html(self._title(), self)


_HEADERS = ["problem", "file", "tensor", "bytes", "what"]


def _root_problem(kind: str, path: str, rank: int, error: MLStateError) -> Problem:
    if isinstance(error, FileNotFoundError):
        kind = "missing"
    elif isinstance(error, StoreError):
        kind = "unreadable"
    return Problem(kind, path, None, None, rank, error.offset or 0, 0, str(error))


def _index_problems(folder: str, manifest: Manifest) -> list[Problem]:
    """Look at each index by itself, to name every one that is wrong."""
    problems = []
    for rank, record in enumerate(manifest.indexes):
        try:
            _folder.load_catalog(folder, manifest, [rank])
        except MLStateError as error:
            problems.append(_root_problem("index", record.path, rank, error))
    return problems


_NAMED = 3  # tensors of one file


def _with_tensors(problems: list[Problem], catalog: Any) -> list[Problem]:
    """Say of a file that is lost or strange as a whole which tensors lie in it."""
    whole = {problem.path for problem in problems if problem.name is None}
    if not whole:
        return problems
    held: dict[str, list[tuple[str, int]]] = {}
    for _, key, part, _, _, path, *_, layers in catalog.shards():
        for place in [path] if layers is None else {layer[0] for layer in layers}:
            if place in whole:
                held.setdefault(place, []).append((key, part))
    named = []
    for problem in problems:
        inside = held.get(problem.path, []) if problem.name is None else []
        if len(inside) == 1:
            problem = problem._replace(name=inside[0][0], part=inside[0][1])
        elif inside:
            names = ", ".join(repr(key) for key, _ in inside[:_NAMED])
            more = f" and {len(inside) - _NAMED:,} more" if len(inside) > _NAMED else ""
            problem = problem._replace(text=f"{problem.text}; it holds {names}{more}")
        named.append(problem)
    return named


def _verify_once(
    folder: str,
    name: str,
    report: VerifyReport,
    progress: Callable[[int], object] | None,
    known: dict[str, Any],
) -> str | None:
    """Verify a root as it is now; return its generation, or None if it cannot be read."""
    try:
        manifest = _folder.read_manifest(folder, name)
    except MLStateError as error:
        report.problems.append(_root_problem("manifest", name, 0, error))
        return None
    report.step = manifest.step
    try:
        catalog = _folder.load_catalog(folder, manifest)
    except MLStateError as error:
        found = _index_problems(folder, manifest)
        report.problems += found or [_root_problem("index", name, 0, error)]
        return manifest.generation
    known[manifest.generation] = catalog
    count, problems = catalog.verify(folder, progress)
    report.bytes += count + sum(record.bytes for record in manifest.indexes)
    report.problems += _with_tensors([Problem(*problem) for problem in problems], catalog)
    return manifest.generation


def _is_replaced(folder: str, name: str, generation: str) -> bool:
    """Whether a root is another one now, or was deleted: then its files may be gone, too."""
    try:
        return _folder.is_replaced(folder, name, generation)
    except MLStateError:
        return True


def verify_root(
    folder: str,
    name: str,
    report: VerifyReport,
    progress: Callable[[int], object] | None,
    known: dict[str, Any],
) -> None:
    """Add to the report what is wrong with one root, and to `known` its catalog.

    If files are missing and a writer has replaced the root meanwhile, begin again.

    Raises
    ------
    StoreError
        That happened at every attempt.
    """
    for _ in range(_folder.TRIES):
        found, read = VerifyReport(folder), dict[str, Any]()
        generation = _verify_once(folder, name, found, progress, read)
        is_missing = any(problem.kind == "missing" for problem in found.problems)
        if generation is None or not is_missing or not _is_replaced(folder, name, generation):
            break
    else:
        text = f"it was replaced at each of {_folder.TRIES} attempts to verify it"
        reason = OSError(errno.EBUSY, text)
        raise _folder.store_error(reason, "cannot verify the checkpoint", folder)
    known.update(read)
    report.step = found.step
    report.bytes += found.bytes
    report.problems += found.problems
    for problem in found.problems:
        where = f"{folder}/{name}"
        log("WARNING", "%s: step %s: %s", where, found.step, problem.as_error(folder))


# ---- repairing ----


class _Trial(NamedTuple):
    """What a root is good for, after its headers were written again as far as possible."""

    report: VerifyReport
    generation: str
    loads: bool  # every tensor is as it was saved
    is_mended: bool  # headers were written


def _is_of_header(problem: Problem, sizes: dict[str, int]) -> bool:
    """Whether it concerns a file's header only, which loading does not read."""
    return problem.kind in ("header", "foreign") and problem.length < sizes[problem.path]


def _mend_headers(folder: str, paths: set[str]) -> bool:
    """Write headers of shard files again; return whether any index had all that a file holds.

    Of several steps that share a file, at least the one that wrote it has.
    """
    left = set(paths)
    roots = [root.path for root in _folder.list_roots(folder)]
    for name in (_folder.MANIFEST, *reversed(roots)):
        if not left:
            break
        try:
            catalog = _folder.load_catalog(folder, _folder.read_manifest(folder, name))
        except MLStateError:
            continue
        for path in sorted(left):
            header = catalog.header(path)
            if header is not None:
                _folder.overwrite_start(folder, path, header)
                log("WARNING", "%s: repaired: the header of %s", folder, path)
                left.remove(path)
    return left != paths


def _try_root(folder: str, name: str) -> _Trial:
    """Verify a root; write damaged headers again of files whose tensors are good."""
    is_mended = False
    while True:
        report = VerifyReport(folder)
        known: dict[str, Any] = {}
        verify_root(folder, name, report, None, known)
        if not known:
            return _Trial(report, "", False, is_mended)
        [(generation, catalog)] = known.items()
        sizes = catalog.files()
        headers = {p.path for p in report.problems if _is_of_header(p, sizes)}
        others = {p.path for p in report.problems if not _is_of_header(p, sizes)}
        if is_mended or not _mend_headers(folder, headers - others):
            return _Trial(report, generation, not others, is_mended)
        is_mended = True


def _repair(folder: str, report: VerifyReport) -> None:
    """Write damaged headers again; then put the newest root that loads in place.

    Steps that do not load and are newer are given up: their files go with the next save or
    `prune`.  What the system does not let us read now may be good, and stays.
    """
    with WriterLock(folder).acquire():
        now = _try_root(folder, _folder.MANIFEST)
        if now.loads:
            if now.is_mended and now.report:
                report.repaired = now.generation
            elif now.report:  # a writer has replaced what was looked at
                report.problems, report.step = [], now.report.step
            return
        damaged: list[_folder.Root] = []
        for root in reversed(_folder.list_roots(folder)):
            trial = _try_root(folder, root.path)
            if trial.loads:
                data = _folder.read_bytes(folder, root.path)
                # before the manifest, which is damaged too: until it is good, repairing goes on
                _folder.delete_roots(folder, damaged)
                mode = _folder.new_file_mode(folder)
                _core.file_replace(os.path.join(folder, _folder.MANIFEST), data, mode)
                report.repaired = root.generation
                report.step = trial.report.step
                text = "%s: repaired: step %s, generation %s, replaces a damaged checkpoint"
                log("WARNING", text, folder, report.step, root.generation)
                return
            if all(problem.kind != "unreadable" for problem in trial.report.problems):
                damaged.append(root)


def verify_checkpoint(
    path: str | os.PathLike[str],
    *,
    root: str = _folder.MANIFEST,
    repair: bool = False,
    progress: Callable[[int], object] | None = None,
) -> VerifyReport:
    """Read all of a checkpoint; see `mlstate.verify`."""
    folder = local_folder(path)
    report = VerifyReport(folder)
    if not os.path.isdir(folder):
        reason: OSError = FileNotFoundError(errno.ENOENT, "no such folder")
        if os.path.isfile(folder):
            text = "it is a file, and a checkpoint is a folder; load_file compares what it reads, "
            reason = NotADirectoryError(errno.ENOTDIR, text + "mlstate verify reads files too")
        raise _folder.store_error(reason, "cannot verify the checkpoint", folder)
    known: dict[str, Any] = {}
    verify_root(folder, root, report, progress, known)
    with suppress(MLStateError):  # what is needed is not known: the problems say why
        report.leftover = _folder.prune(folder, dry_run=True, catalogs=known)
    try:
        report.strange = _folder.foreign_files(folder)
    except StoreError:  # one of its folders is none, which the problems say
        if not report.problems:
            raise
    if repair and report.problems:
        _repair(folder, report)
    return report


@set_module("mlstate.checkpoint")
def verify(
    path: str | os.PathLike[str],
    *,
    repair: bool = False,
    progress: Callable[[int], object] | None = None,
) -> VerifyReport:
    """
    Read every byte of a checkpoint, and say what is not as it was written.

    Parameters
    ----------
    path : str or os.PathLike
        Its folder.
    repair : bool, default False
        Write damaged headers of shard files again. If tensors are damaged, put the newest older
        checkpoint whose tensors are all good in its place (`CheckpointManager` keeps older ones).
        Newer steps with damaged tensors are given up: load with ``verify=False`` before, if
        something of them is to be saved.
    progress : callable, optional
        Called with the number of bytes read since the last call.

    Returns
    -------
    VerifyReport
        True if the checkpoint is good. Problems name the file, the byte range and the tensor.

    Raises
    ------
    StoreError
        There is no such folder, or, with `repair`, it cannot be written; or other processes
        replaced the checkpoint at each of 20 attempts to verify it.

    Notes
    -----
    If another process replaces the checkpoint meanwhile, verifying begins again.

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
    return verify_checkpoint(path, repair=repair, progress=progress)
