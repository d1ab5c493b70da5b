"""``mlstate verify``: which steps and files it verifies, output, exit status, ``--repair``."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .._common.report import Table
from .._common.text import bytes_text, count_text, shorten, steps_text
from ..checkpoint._folder.names import MANIFEST
from ..checkpoint._report import PROBLEM_COLUMNS, VerifyReport
from ..checkpoint._sources.indexed import IndexedSource
from ..checkpoint._sources.verify_root import list_others, verify_root
from ..checkpoint._store.checkpoint_files import CheckpointFiles
from ..checkpoint._verify import verify
from ..errors import FormatError, MLStateError
from ._common import (
    PATH_HELP,
    Commands,
    add_arguments,
    add_command,
    bytes_of_files,
    find,
    kind_of,
    print_result,
    shared,
    step_of,
)
from ._progress import progress_of

if TYPE_CHECKING:
    from ..checkpoint._sources.protocol import Source

__all__ = ["add"]

_WIDTH = 300  # characters of a file's name


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate verify`` to `commands`.

    Parsed arguments have the function of the command as ``run``.
    """
    text = "read every byte of a checkpoint, and report damage"
    paths = {"nargs": "+", "help": f"{PATH_HELP}; several are verified in turn"}
    usages = {"path": paths, **shared("--monitor", "--mode", "--names")}
    statuses = {1: "damaged, or not a checkpoint", 3: "load refuses it"}
    parser = add_command(commands, "verify", text, run_verify, usages, statuses)
    which = {
        **shared("--step"),
        "--all-steps": "verify every step of a run",
        "--repair": "put the newest good step in the place of a damaged newest one, which is "
        "deleted; good if there is one",
    }
    add_arguments(parser.add_mutually_exclusive_group(), which)


# ---- verification ----


def _roots(files: CheckpointFiles) -> list[str]:
    """Return the paths of all roots, the files that each describe one saved step, oldest first.

    The manifest, which describes the newest step, is added at the end if it is damaged, or if no
    other root describes its step.
    """
    roots = files.list_roots()
    names = [root.path for root in roots]
    newest = None
    with suppress(MLStateError):
        newest = files.read_manifest().generation
    is_listed = any(root.generation == newest for root in roots)
    return names if is_listed else [*names, MANIFEST]


def _verify_all(files: CheckpointFiles) -> tuple[dict[str | None, VerifyReport], VerifyReport]:
    """Return a report on each step by its root, and one on unneeded and foreign files.

    Steps that a writer deletes meanwhile are left out.
    """
    reports: dict[str | None, VerifyReport] = {}
    names = _roots(files)
    sources = [IndexedSource(files, name) for name in names]
    with progress_of("verify", lambda: sum(map(_bytes_of, sources))) as progress:
        while names:
            name = names.pop(0)
            report = VerifyReport(files.path)
            verify_root(files, name, report, progress)
            if name == MANIFEST or files.folder.exists(name):
                reports[name] = report
            elif not names and not reports:  # a writer has deleted all steps for newer ones
                names = [MANIFEST]
    steps = sorted(reports.items(), key=lambda item: (item[1].step is None, item[1].step or 0))
    of_folder = VerifyReport(files.path)
    list_others(files, of_folder, {})
    return dict(steps), of_folder


def _bytes_of(source: Source | str) -> int:
    """Return the bytes that a verification of a source or path reads, for the progress.

    0 if they are unknown.
    """
    with suppress(MLStateError, OSError):
        if isinstance(source, IndexedSource):
            index = source.fresh().index
            is_own = source.format == "mlstate"
            return sum(index.files().values()) if is_own else int(index.heads()[0][-2])
        return bytes_of_files(os.fspath(source))
    return 0


# ---- output ----


def _json_data(
    reports: dict[str | None, VerifyReport], of_folder: VerifyReport, kind: str, good: bool
) -> dict[str, Any]:
    """Return the reports as JSON values; `good`: the result of the command."""
    return {
        "path": of_folder.path,
        "format": kind,
        "good": good,
        "loadable": all(report.is_loadable for report in reports.values()),
        "refusal": of_folder.refusal,
        "checksums": all(report.checksums for report in reports.values()),
        "compared": of_folder.compared,
        "bytes": sum(report.bytes for report in reports.values()),
        "repaired": of_folder.repaired,
        "deleted": of_folder.deleted,
        "checkpoints": [
            {
                "root": root,
                "step": report.step,
                "good": bool(report),
                "bytes": report.bytes,
                "problems": [problem._asdict() for problem in report.problems],
            }
            for root, report in reports.items()
        ],
        "leftover": of_folder.leftover,
        "strange": of_folder.strange,
    }


def _tables_of_steps(path: str, reports: dict[str | None, VerifyReport]) -> list[Table]:
    """Return a row for each step, under a title about all of them, then a row for each problem.

    `path`: as the user gave it. `reports`: on each step, by its root.
    """
    damaged = sum(not report for report in reports.values())
    total = count_text(len(reports), "checkpoint")
    result = f"{damaged:,} of {total} damaged" if damaged else f"{total} good"
    read = bytes_text(sum(report.bytes for report in reports.values()))
    steps: list[list[Any]] = []
    problems: list[list[Any]] = []
    for root, report in reports.items():
        step = "?" if report.step is None else report.step
        steps.append([step, report._result(), report.bytes, root])
        problems += [[step, *row] for row in report._table().rows]
    headers = ["step", "result", "read [B]", "manifest"]
    listed = Table(f"{path}: {result}, {read} read", headers, steps)
    return [listed, Table("", ["step", *PROBLEM_COLUMNS], problems)]


def _lines_of_files(label: str, names: list[str]) -> list[str]:
    """Return the number of files, with `label`, and their names; nothing for none."""
    title = [f"{count_text(len(names), 'file')} {label}:"] if names else []
    return [*title, *(f"  {shorten(name, _WIDTH)}" for name in names)]


def _lines_of_repair(report: VerifyReport) -> list[str]:
    """Return which checkpoint a repair has put in place, or why there is none."""
    if report.repaired is not None:
        step = "" if report.step is None else f"step {report.step}, "
        text = f"{step}generation {report.repaired}, is the newest good one, and in place"
        steps = steps_text(report.deleted)
        left = f"deleted: {steps}, damaged; the next save or mlstate prune deletes its files"
        lost = [left] if report.deleted else []
        return [f"repaired: {text}", *lost]
    if {problem.kind for problem in report.problems} == {"header"}:
        text = "every tensor loads, and the next save writes files with damaged headers again"
        return [f"not repaired: {text}"]
    return ["not repaired: there is no older step that is good"] if report.problems else []


def run_verify(arguments: argparse.Namespace) -> int:
    """Verify the user's path, one checkpoint or all steps of a run, and print its problems.

    Return 1 if it has any and they were not repaired, 3 if a load refuses it, else 0. Raises
    ValueError for options that do not fit each other or the path.
    """
    path = arguments.path
    if arguments.names and (arguments.repair or arguments.all_steps):
        raise ValueError("--names cannot be used with --repair or --all-steps")
    step = step_of(arguments, path)
    source: Any = None
    with suppress(FormatError):  # unrecognized content may have checksums, and be verified
        source = find(path, step)
    kind = "files" if source is None else kind_of(source)
    reports: dict[str | None, VerifyReport]
    if arguments.all_steps:
        if kind != "checkpoint":
            raise ValueError(f"{path} is not a run of mlstate: it has no steps")
        reports, of_folder = _verify_all(source.files)
    else:
        with progress_of("verify", lambda: _bytes_of(source or path)) as progress:
            of_folder = verify(
                path if step is None or source is None else source,
                repair=arguments.repair,
                progress=progress,
                names=arguments.names,
            )
        reports = {source.root if kind == "checkpoint" else None: of_folder}
    good = all(reports.values()) or of_folder.repaired is not None
    status = 1 if not good else 3 if of_folder.refusal else 0
    data = _json_data(reports, of_folder, kind, status == 0)
    of_folder.path = path
    lines: list[str | Table] = [of_folder._table()]
    if arguments.all_steps:
        lines = [*_tables_of_steps(path, reports)]
    lines += _lines_of_files("left over, which mlstate prune deletes", of_folder.leftover)
    text = {"checkpoint": "of another program", "files": "that the checksums do not list"}.get(
        kind, "that the index or the checksums do not name"
    )
    lines += _lines_of_files(text, of_folder.strange)
    if arguments.repair:
        lines += _lines_of_repair(of_folder)
    elif status == 1:
        text = "copy or download the files again"
        if kind == "checkpoint":
            text += ", or use --repair, which goes back to the newest good step if it must"
        lines += [f"to recover: {text}"]
    return print_result(arguments, data, lines, status)
