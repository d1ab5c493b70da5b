"""``mlstate verify``: which steps and files it verifies, output, exit status, ``--repair``."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._common.local_path import local_folder
from .._common.text import bytes_text, count_text, printable, shorten
from ..checkpoint._folder.names import MANIFEST
from ..checkpoint._report import PROBLEM_HEADERS, VerifyReport
from ..checkpoint._sources.indexed import IndexedSource
from ..checkpoint._sources.verify_root import list_others, verify_root
from ..checkpoint._store.checkpoint_files import CheckpointFiles
from ..checkpoint._verify import verify
from ..errors import FormatError, MLStateError
from ._common import (
    PATH_HELP,
    Commands,
    add_command,
    add_options,
    find,
    kind_of,
    number_of_step,
    print_json,
    print_table,
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
    add_options(which, "--step")
    which.add_argument("--all-steps", action="store_true", help="verify every step of a run")
    which.add_argument(
        "--repair",
        action="store_true",
        help="put the newest good step in the place of a damaged newest one; good if there is one",
    )
    add_options(parser, "--monitor", "--mode", "--names")


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


def _verify_all(files: CheckpointFiles) -> tuple[dict[str | None, VerifyReport], VerifyReport]:
    """Return a report on each step by its root, and one on unneeded and foreign files.

    Steps that a writer deletes meanwhile are left out.
    """
    reports: dict[str | None, VerifyReport] = {}
    names = _roots(files)
    with progress_of("verify", lambda: _bytes_to_read(files, names)) as progress:
        while names:
            name = names.pop(0)
            report = VerifyReport(files.path)
            verify_root(files, name, report, progress, {})
            if name == MANIFEST or files.folder.exists(name):
                reports[name] = report
            elif not names and not reports:  # a writer has deleted all steps for newer ones
                names = [MANIFEST]
    steps = sorted(reports.items(), key=lambda item: (item[1].step is None, item[1].step or 0))
    of_folder = VerifyReport(files.path)
    list_others(files, of_folder, {})
    return dict(steps), of_folder


def _bytes_of(path: str, source: Source | None) -> int:
    """Return the number of bytes that a verification reads, for the progress; 0 if unknown."""
    with suppress(MLStateError, OSError):
        if isinstance(source, IndexedSource):
            index = source.fresh().index
            is_own = source.format == "mlstate"
            return sum(index.files().values()) if is_own else int(index.heads()[0][-2])
        place = Path(local_folder(path))
        files = [place, *place.rglob("*")]
        return sum(file.stat().st_size for file in files if file.is_file())
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


def _print_all(path: str, reports: dict[str | None, VerifyReport]) -> None:
    """Print a line about all steps of a run, a row for each step, then a row for each problem.

    `path`: as the user gave it. `reports`: on each step, by its root.
    """
    damaged = sum(not report for report in reports.values())
    total = count_text(len(reports), "checkpoint")
    result = f"{damaged:,} of {total} damaged" if damaged else f"{total} good"
    read = bytes_text(sum(report.bytes for report in reports.values()))
    print(f"{printable(path)}: {result}, {read} read")
    steps, problems = [], []
    for root, report in reports.items():
        step = "?" if report.step is None else str(report.step)
        steps.append([step, report._result(), bytes_text(report.bytes), root or ""])
        problems += [[step, *row] for row in report._rows()]
    print_table(("step", "result", "read", "manifest"), steps)
    print_table(("step", *PROBLEM_HEADERS), problems)


def _print_files(label: str, names: list[str]) -> None:
    """Print the number of files and their names, after a title with `label`; nothing for none."""
    if names:
        print(f"{count_text(len(names), 'file')} {label}:")
        print("\n".join(f"  {shorten(name, _WIDTH)}" for name in names))


def _print_repair(report: VerifyReport) -> None:
    """Print which checkpoint a repair has put in place, or why there is none."""
    if report.repaired is not None:
        step = "" if report.step is None else f"step {report.step}, "
        print(f"repaired: {step}generation {report.repaired}, is the newest good one, and in place")
    elif {problem.kind for problem in report.problems} == {"header"}:
        text = "every tensor loads, and the next save writes files with damaged headers again"
        print(f"not repaired: {text}")
    elif report.problems:
        print("not repaired: there is no older step that is good")


def run_verify(arguments: argparse.Namespace) -> int:
    """Verify the user's path, one checkpoint or all steps of a run, and print its problems.

    Return 1 if it has any and they were not repaired, 3 if a load refuses it, else 0. Raises
    ValueError for options that do not fit each other or the path.
    """
    path = arguments.path
    if arguments.names and (arguments.repair or arguments.all_steps):
        raise ValueError("--names cannot be used with --repair or --all-steps")
    number = number_of_step(path, arguments.step, arguments)
    source: Any = None
    with suppress(FormatError):  # unrecognized content may have checksums, and be verified
        source = find(path, number)
    kind = "files" if source is None else kind_of(source)
    reports: dict[str | None, VerifyReport]
    if arguments.all_steps:
        if kind != "checkpoint":
            raise ValueError(f"{path} is not a run of mlstate: it has no steps")
        reports, of_folder = _verify_all(source.files)
    else:
        with progress_of("verify", lambda: _bytes_of(path, source)) as progress:
            of_folder = verify(
                path if number is None or source is None else source,
                repair=arguments.repair,
                progress=progress,
                names=arguments.names,
            )
        reports = {source.root if kind == "checkpoint" else None: of_folder}
    good = all(reports.values()) or of_folder.repaired is not None
    status = 1 if not good else 3 if of_folder.refusal else 0
    if arguments.json:
        return print_json(_json_data(reports, of_folder, kind, status == 0), status)
    if arguments.all_steps:
        _print_all(path, reports)
    else:
        of_folder.path = path
        print("\n".join(of_folder._lines()))
        print_table(PROBLEM_HEADERS, of_folder._rows())
    _print_files("left over, which mlstate prune deletes", of_folder.leftover)
    text = {"checkpoint": "of another program", "files": "that the checksums do not list"}.get(
        kind, "that the index or the checksums do not name"
    )
    _print_files(text, of_folder.strange)
    if arguments.repair:
        _print_repair(of_folder)
    return status
