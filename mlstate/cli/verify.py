"""``mlstate verify``: which steps and files it verifies, output, exit status, ``--repair``."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.local_path import local_folder
from .._common.text import bytes_text, count_text, printable, shorten
from ..checkpoint._checkpoint.checkpoint import inspect
from ..checkpoint._folder.names import MANIFEST
from ..checkpoint._report import VerifyReport
from ..checkpoint._sources.indexed import IndexedSource
from ..checkpoint._sources.verify_root import verify_root
from ..checkpoint._store.checkpoint_files import CheckpointFiles
from ..checkpoint._store.open_path import is_url
from ..checkpoint._verify import verify
from ..errors import FormatError, MLStateError
from ._common import (
    PATH_HELP,
    Commands,
    add_command,
    add_monitor,
    add_names,
    add_step,
    find,
    kind_of,
    number_of_step,
    print_table,
)
from ._progress import progress_of

if TYPE_CHECKING:
    from ..checkpoint import Problem
    from ..checkpoint._sources.protocol import Source

__all__ = ["add"]

_HEADERS = ("problem", "file", "tensor", "bytes", "what")
_STEP_HEADERS = ("step", "result", "read", "manifest")
_WIDTH = 300  # characters of a file's name


class _Verified(NamedTuple):
    """The report on one checkpoint; `root` is None for a plain file."""

    root: str | None
    report: VerifyReport


class _Outcome(NamedTuple):
    """The reports that the command prints."""

    items: list[_Verified]  # one for each checkpoint
    folder_report: VerifyReport  # on the whole folder; of one checkpoint, that report again
    kind: str  # name of the format


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate verify`` to `commands`.

    Parsed arguments have the function of the command as ``run``.
    """
    help_text = "read every byte of a checkpoint, and report damage"
    parser = add_command(
        commands,
        "verify",
        help_text,
        run_verify,
        status_1="damaged, or not a checkpoint",
        status_3="load refuses it",
    )
    parser.add_argument("path", help=PATH_HELP)
    which = parser.add_mutually_exclusive_group()
    add_step(which)
    which.add_argument("--all-steps", action="store_true", help="verify every step of a run")
    which.add_argument(
        "--repair",
        action="store_true",
        help="put the newest good step in the place of a damaged newest one; good if there is one",
    )
    add_monitor(parser)
    add_names(parser)


# ---- verification ----


def _bytes_to_read(files: CheckpointFiles, roots: list[str]) -> int:
    """Return the number of bytes that the verification of `roots` reads, for the progress."""
    total = 0
    for root in roots:
        with suppress(MLStateError):  # unreadable roots and indexes are not counted
            merged = files.load_merged_index(files.read_manifest(root))
            total += sum(merged.files().values())
    return total


def _roots(files: CheckpointFiles) -> list[str]:
    """Return the paths of all roots, the files that each describe one saved step, oldest first.

    The manifest, which describes the newest step, is added at the end if it is damaged, or if no
    other root describes its step.
    """
    roots = files.list_roots()
    names = [root.path for root in roots]
    try:
        newest = files.read_manifest().generation
        has_manifest_root = any(root.generation == newest for root in roots)
    except MLStateError:
        has_manifest_root = False
    return names if has_manifest_root else [*names, MANIFEST]


def _verify_all(files: CheckpointFiles) -> tuple[list[_Verified], VerifyReport]:
    """Return a report on each step, and one on unneeded and foreign files.

    Steps that a writer deletes meanwhile are left out.
    """
    folder_report = VerifyReport(files.path)
    verified = []
    names = _roots(files)
    with progress_of("verify", lambda: _bytes_to_read(files, names)) as progress:
        while names:
            name = names.pop(0)
            report = VerifyReport(files.path)
            verify_root(files, name, report, progress, {})
            if name == MANIFEST or files.folder.exists(name):
                verified.append(_Verified(name, report))
            elif not names and not verified:  # a writer has deleted all steps for newer ones
                names = [MANIFEST]
    verified.sort(key=lambda item: (item.report.step is None, item.report.step or 0))
    with suppress(MLStateError):  # needed files are unknown; the problems give the reason
        folder_report.leftover = files.prune(dry_run=True)
    folder_report.strange = files.foreign_files()
    return verified, folder_report


def _bytes_of(path: str, source: Source | None) -> int:
    """Return the number of bytes that a verification reads, for the progress; 0 if unknown."""
    with suppress(MLStateError, OSError):
        if source is not None and source.format in ("huggingface", "safetensors"):
            return inspect(source.fresh()).nbytes
        if isinstance(source, IndexedSource):
            return sum(source.fresh().index.files().values())
        place = Path(local_folder(path))
        files = [place, *place.rglob("*")]
        return sum(file.stat().st_size for file in files if file.is_file())
    return 0


# ---- output ----


def _json_data(outcome: _Outcome, good: bool) -> dict[str, Any]:
    """Return the reports as JSON values; `good`: the result of the command."""
    items, folder_report, kind = outcome
    return {
        "path": folder_report.path,
        "format": kind,
        "good": good,
        "loadable": all(verified.report.is_loadable for verified in items),
        "refusal": folder_report.refusal,
        "checksums": all(verified.report.checksums for verified in items),
        "compared": folder_report.compared,
        "bytes": sum(verified.report.bytes for verified in items),
        "repaired": folder_report.repaired,
        "checkpoints": [
            {
                "root": root,
                "step": report.step,
                "good": bool(report),
                "bytes": report.bytes,
                "problems": [problem._asdict() for problem in report.problems],
            }
            for root, report in items
        ],
        "leftover": folder_report.leftover,
        "strange": folder_report.strange,
    }


def _result_text(report: VerifyReport) -> str:
    if report.problems:
        return count_text(len(report.problems), "problem")
    return "intact, but load refuses it" if report.refusal else "good"


def _step_text(report: VerifyReport) -> str:
    return "?" if report.step is None else str(report.step)


def _problem_row(problem: Problem, path: str) -> list[str]:
    """Return a row of the table of problems; the path of the file is removed from the text.

    `path`: of the checkpoint or file. The bytes are a range: begin and end in the file.
    """
    place = path if is_url(path) else local_folder(path)
    if not Path(place).is_file():
        place = f"{place}/{problem.path}"
    text = problem.text.replace(place, problem.path).removeprefix(f"{problem.path}: ")
    span = f"{problem.offset}-{problem.offset + problem.length}" if problem.length else ""
    return [problem.kind, problem.path, problem.name or "", span, text]


def _print_one(path: str, verified: _Verified) -> None:
    """Print a line about one checkpoint, and its problems; `path`: as the user gave it."""
    report = verified.report
    problems = report.problems
    parts = [_result_text(report)]
    if report.step is not None and not report.repaired:
        parts.append(f"step {report.step}")
    parts.append(f"{bytes_text(report.bytes)} read")
    if report.compared:
        parts.append(f"compared with {' and '.join(report.compared)}")
    elif not problems and not report.checksums:
        parts[-1] = "no checksums: only its structure was looked at"
    print(f"{printable(path)}: {', '.join(parts)}")
    if report.refusal:
        print(printable(report.refusal))
    print_table(_HEADERS, [_problem_row(problem, path) for problem in problems])


def _print_all(path: str, verified: list[_Verified]) -> None:
    """Print a line about all steps of a run, a row for each step, then a row for each problem.

    `path`: as the user gave it. `verified`: a report on each step.
    """
    damaged = sum(1 for item in verified if item.report.problems)
    total = count_text(len(verified), "checkpoint")
    result = f"{damaged:,} of {total} damaged" if damaged else f"{total} good"
    read = bytes_text(sum(item.report.bytes for item in verified))
    print(f"{printable(path)}: {result}, {read} read")
    print_table(_STEP_HEADERS, [
        [_step_text(report), _result_text(report), bytes_text(report.bytes), root or ""]
        for root, report in verified
    ])  # fmt: skip
    print_table(("step", *_HEADERS), [
        [_step_text(report), *_problem_row(problem, path)]
        for _, report in verified
        for problem in report.problems
    ])  # fmt: skip


def _print_files(label: str, names: list[str]) -> None:
    """Print the number of files and their names, after a title with `label`; nothing for none."""
    if names:
        print(f"{count_text(len(names), 'file')} {label}:")
        for name in names:
            print(f"  {shorten(name, _WIDTH)}")


def _reason_not_repaired(report: VerifyReport) -> str:
    """Return the reason why nothing was repaired, as a text for the user."""
    if {problem.kind for problem in report.problems} == {"header"}:
        return "every tensor loads, and the next save writes files with damaged headers again"
    return "there is no older step that is good"


def _verify(arguments: argparse.Namespace) -> _Outcome:
    """Verify the user's path: one checkpoint, or all steps of a run.

    Raises ValueError for options that do not fit each other or the path.
    """
    path = arguments.path
    if arguments.names and (arguments.repair or arguments.all_steps):
        raise ValueError("--names cannot be used with --repair or --all-steps")
    number = number_of_step(path, arguments.step, arguments)
    source = None
    with suppress(FormatError):  # unrecognized content may have checksums, and be verified
        source = find(path, number)
    if arguments.all_steps:
        if not isinstance(source, IndexedSource) or source.format != "mlstate":
            raise ValueError(f"{path} is not a run of mlstate: it has no steps")
        items, folder_report = _verify_all(source.files)
        return _Outcome(items, folder_report, kind_of(source))
    with progress_of("verify", lambda: _bytes_of(path, source)) as progress:
        report = verify(
            path if number is None or source is None else source,
            repair=arguments.repair,
            progress=progress,
            names=arguments.names,
        )
    root = getattr(source, "root", None) if source and source.format == "mlstate" else None
    kind = "files" if source is None else kind_of(source)
    return _Outcome([_Verified(root, report)], report, kind)


def run_verify(arguments: argparse.Namespace) -> int:
    """Verify the user's path and print its problems.

    Return 1 if it has any and they were not repaired, 3 if a load refuses it, else 0.
    """
    outcome = _verify(arguments)
    items, folder_report, kind = outcome
    good = all(verified.report for verified in items) or folder_report.repaired is not None
    status = 1 if not good else 3 if folder_report.refusal else 0
    if arguments.json:
        print(json.dumps(_json_data(outcome, status == 0), indent=2))
        return status
    if arguments.all_steps:
        _print_all(arguments.path, items)
    else:
        _print_one(arguments.path, items[0])
    _print_files("left over, which mlstate prune deletes", folder_report.leftover)
    text = {
        "checkpoint": "of another program",
        "files": "that the checksums do not list",
    }.get(kind, "that the index or the checksums do not name")
    _print_files(text, folder_report.strange)
    generation = folder_report.repaired
    if generation is not None:
        step = "" if folder_report.step is None else f"step {folder_report.step}, "
        print(f"repaired: {step}generation {generation}, is the newest good one, and in place")
    elif arguments.repair and not good:
        print(f"not repaired: {_reason_not_repaired(folder_report)}")
    return status
