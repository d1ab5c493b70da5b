"""`VerifyReport` and `Problem`: what a verification found."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .._common.report import Table
from .._common.set_module import set_module
from .._common.store_error import store_error
from .._common.text import bytes_text, count_text, steps_text
from ..errors import ChecksumError, CompatibilityError, FormatError, MLStateError, StoreError

_ROWS = 20
PROBLEM_COLUMNS = ["problem", "file", "tensor", "bytes", "what"]


@set_module("mlstate.checkpoint.records")
class Problem(NamedTuple):
    """One problem that `verify` found.

    Attributes
    ----------
    kind : str
        ``"missing"``, ``"unreadable"``, ``"length"`` (truncated, or longer than written),
        ``"foreign"`` (replaced by another file), ``"header"``, ``"altered"`` (changed bytes of
        a tensor), ``"manifest"`` or ``"index"`` (this file is damaged), ``"changed"`` (a file of
        another program differs from its checksums, or from the name of its blob in the Hub's
        cache) or ``"checksums"`` (the file of these checksums is damaged).
    path : str
        The file, relative to the checkpoint's folder.
    name : str or None
        Key of the affected tensor. None if a whole file with several tensors is affected:
        `text` names them.
    part : int or None
        Index of the part of the tensor.
    rank : int
        The rank that stored it.
    offset, length : int
        The affected byte range of the file.
    text : str
        Description.
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
        """Return the problem as an exception, whose path is in `folder`.

        A missing file is a `FileNotFoundError`, too.
        """
        where = f"bytes {self.offset} to {self.offset + self.length}"
        of = f" of {self.name!r}" if self.name is not None else ""
        text = f"{self.path}: {self.kind}: {where}{of}: {self.text}"
        path = os.path.join(folder, self.path)
        error: FormatError | StoreError
        if self.kind == "missing":
            reason = FileNotFoundError(errno.ENOENT, f"{where}{of}")
            error = store_error(reason, f"{self.path}: missing", path)
        elif self.kind in ("altered", "header"):
            error = ChecksumError(text)
        else:
            error = FormatError(text)
        error.path, error.name, error.offset = path, self.name, self.offset
        return error


def file_problem(
    kind: str, path: str, text: str, *, name: str | None = None, offset: int = 0, length: int = 0
) -> Problem:
    """Return the problem of a file or a tensor in it that belongs to no rank of a save."""
    return Problem(kind, path, name, None, 0, offset, length, text)


def problem_of(kind: str, path: str, error: MLStateError | OSError) -> Problem:
    """Return the problem of the file `path`, or of a tensor in it, that raised `error`.

    `kind`: of a malformed file; a missing one is "missing", and one that the system refuses
    "unreadable".
    """
    if isinstance(error, OSError):
        kind = "missing" if isinstance(error, FileNotFoundError) else "unreadable"
    text = str(error) if isinstance(error, MLStateError) else str(error.strerror)
    name, offset = getattr(error, "name", None), getattr(error, "offset", None) or 0
    return file_problem(kind, path, text, name=name, offset=offset)


@dataclass(slots=True, eq=False, repr=False)
class VerifyReport:
    """The result of `verify`; it is true if nothing is damaged.

    Attributes
    ----------
    path : str
        The path as it was passed to `verify`.
    problems : list of Problem
        Problems that prevent loading the state as it was saved.
    leftover : list of str
        Files of mlstate that no root needs; `prune` deletes them.
    strange : list of str
        Files that were not written by mlstate. Of a folder of another program, the files that its
        index or its checksums do not list.
    compared : list of str
        For files of another program: descriptions of the checksums that their bytes were compared
        with. Without any, only the structure was checked, or the files' own checksums.
    refusal : str
        Why `load` refuses an intact file, such as one that holds a pickled object; "" if it does
        not.
    bytes : int
        Number of bytes read.
    step : int or None
        Step of the verified checkpoint.
    checksums : bool
        Whether all bytes were compared with checksums of mlstate, or the CRC-32 values of a
        zip file, such as ``.npz``. If False, another program wrote the files without checksums, and
        only their structure was checked.
    repaired : str or None
        With ``repair=True``: generation of the checkpoint that is now current and good. It is
        unchanged if only headers were damaged; otherwise it names an older checkpoint.
    deleted : list of int or None
        With ``repair=True``: the damaged steps that were deleted; None for one whose number
        cannot be read.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> _ = mlstate.save(path, {"w": np.arange(3.0)})
    >>> bool(mlstate.verify(path))
    True
    """

    path: str
    problems: list[Problem] = field(default_factory=list)
    leftover: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    bytes: int = 0
    step: int | None = None
    repaired: str | None = None
    refusal: str = ""
    checksums: bool = True
    deleted: list[int | None] = field(default_factory=list)

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """Restore a pickled report from `state`: None, and the attributes by name."""
        VerifyReport.__init__(self, "")  # older pickles lack some
        for name, value in state[1].items():
            setattr(self, name, value)

    def __bool__(self) -> bool:
        return not self.problems

    @property
    def is_loadable(self) -> bool:
        """Whether `load` can read it: nothing is damaged, and it holds nothing that is refused.

        Examples
        --------
        >>> import tempfile, numpy as np, mlstate
        >>> path = tempfile.mkdtemp() + "/a.npz"
        >>> np.savez(path, w=np.array([{}]))  # a pickled object
        >>> report = mlstate.verify(path)
        >>> bool(report), report.is_loadable
        (True, False)
        """
        return not self.problems and not self.refusal

    @property
    def good(self) -> bool:
        """Whether it is intact and can be loaded; the same as `is_loadable`.

        Examples
        --------
        >>> import tempfile, numpy as np, mlstate
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> _ = mlstate.save(path, {"w": np.arange(3.0)})
        >>> mlstate.verify(path).good
        True
        """
        return self.is_loadable

    def _result(self) -> str:
        """Return the result in words: good, the number of problems, or that a load refuses it."""
        if self.problems:
            return count_text(len(self.problems), "problem")
        return "intact, but load refuses it" if self.refusal else "good"

    def _table(self) -> Table:
        """Return a row for each problem.

        The bytes are a range: begin and end in the file. The text names the file as `path` does.
        The title has a second line with the reason why a load refuses it, if any.
        """
        place = self.path if "://" in self.path else os.path.abspath(os.path.expanduser(self.path))
        is_file = os.path.isfile(place)
        rows = []
        for p in self.problems:
            text = p.text.replace(place if is_file else f"{place}/{p.path}", p.path)
            span = f"{p.offset}-{p.offset + p.length}" if p.length else None
            rows.append((p.kind, p.path, p.name, span, text.removeprefix(f"{p.path}: ")))
        return Table([self._title(), self.refusal], PROBLEM_COLUMNS, rows)

    def _title(self) -> str:
        """Return one line: path, result, step, bytes read, and the checksums that were compared."""
        parts = [self._result()]
        if self.step is not None and not self.repaired:
            parts.append(f"step {self.step}")
        if self.problems or self.checksums or self.compared:
            parts.append(f"{bytes_text(self.bytes)} read")
            parts += [f"compared with {' and '.join(self.compared)}"] if self.compared else []
        else:
            parts.append("no checksums: only its structure was looked at")
        return f"{self.path}: {', '.join(parts)}"

    def __repr__(self) -> str:
        files = (("left over", self.leftover), ("that mlstate did not write", self.strange))
        table = self._table()
        table.lines += [f"{count_text(len(names), 'file')} {of}" for of, names in files if names]
        table.lines += [f"repaired: generation {self.repaired}"] if self.repaired else []
        table.lines += [f"deleted: steps {steps_text(self.deleted)}"] if self.deleted else []
        return table.text(_ROWS)

    def _repr_html_(self) -> str:
        from ._pages.html import report_html

        return report_html(self)


def note_refusal(report: VerifyReport, error: MLStateError, name: str) -> None:
    """Note in `report` that a load of the file `name` raises `error`.

    It is damage if a file is missing, and else unless all bytes match the file's own checksums,
    or the error is that the content is of a kind that `load` refuses.
    """
    is_intact = report.checksums and not isinstance(error, StoreError)
    if is_intact or isinstance(error, CompatibilityError):
        report.refusal = str(error)
    else:
        report.problems.append(file_problem("unreadable", name, str(error)))
