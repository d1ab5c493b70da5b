"""What is wrong with a checkpoint; public through `mlstate.checkpoint`."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core, _folder
from ._lock import WriterLock
from ._text import bytes_text, table_text
from .errors import ChecksumError, FormatError, MLStateError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._manifest import Manifest

_ROWS = 20


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

    def as_error(self, folder: str) -> FormatError:
        """Return the exception that says the same."""
        cls: Any = ChecksumError if self.kind in ("altered", "header") else FormatError
        where = f"bytes {self.offset} to {self.offset + self.length}"
        of = f" of {self.name!r}" if self.name is not None else ""
        error: FormatError = cls(f"{self.path}: {self.kind}: {where}{of}: {self.text}")
        error.path = os.path.join(folder, self.path)
        error.name, error.offset = self.name, self.offset
        return error


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
        With ``repair=True``: generation of the older checkpoint that was put in the place of
        the damaged one.

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
        from ._checkpoint_html import report_html

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
            _folder.load_catalog(folder, manifest._replace(indexes=(record,)))
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


def verify_root(
    folder: str,
    name: str,
    report: VerifyReport,
    progress: Callable[[int], object] | None,
    known: dict[str, Any] | None = None,
) -> None:
    """Add to the report what is wrong with one root, and to `known` its catalog."""
    try:
        manifest = _folder.read_manifest(folder, name)
    except MLStateError as error:
        report.problems.append(_root_problem("manifest", name, 0, error))
        return
    report.step = manifest.step
    try:
        catalog = _folder.load_catalog(folder, manifest)
    except MLStateError as error:
        found = _index_problems(folder, manifest)
        report.problems += found or [_root_problem("index", name, 0, error)]
        return
    if known is not None:
        known[manifest.generation] = catalog
    count, problems = catalog.verify(folder, progress)
    report.bytes += count + sum(record.bytes for record in manifest.indexes)
    report.problems += _with_tensors([Problem(*problem) for problem in problems], catalog)


def _repair(folder: str, report: VerifyReport) -> None:
    """Put the newest root that verifies in the place of those that do not.

    The damaged steps are given up: their files go with the next save or `prune`.  What the
    system does not let us read now may be good, and stays.
    """
    damaged: list[_folder.Root] = []
    with WriterLock(folder):
        now = VerifyReport(folder)  # a writer may have replaced what was looked at
        verify_root(folder, _folder.MANIFEST, now, None)
        if now:
            report.problems, report.step = [], now.step
            return
        for root in reversed(_folder.list_roots(folder)):
            trial = VerifyReport(folder)
            verify_root(folder, root.path, trial, None)
            if trial:
                data = _folder.read_bytes(folder, root.path)
                _core.file_replace(os.path.join(folder, _folder.MANIFEST), data)
                _folder.delete_roots(folder, damaged)
                report.repaired = root.generation
                report.step = trial.step
                return
            if all(problem.kind != "unreadable" for problem in trial.problems):
                damaged.append(root)


def verify_checkpoint(
    path: str | os.PathLike[str],
    *,
    root: str = _folder.MANIFEST,
    repair: bool = False,
    progress: Callable[[int], object] | None = None,
) -> VerifyReport:
    """Read all of a checkpoint; see `mlstate.verify`."""
    folder = os.path.abspath(os.fspath(path))
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
        report.leftover = _folder.prune(folder, dry_run=True, known=known)
    try:
        report.strange = _folder.strange_files(folder)
    except StoreError:  # one of its folders is none, which the problems say
        if not report.problems:
            raise
    if repair and report.problems:
        _repair(folder, report)
    return report
