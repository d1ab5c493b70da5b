"""``mlstate verify``: which steps and files it verifies, output, exit status, ``--repair``."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.local_path import local_folder, local_path
from .._common.text import bytes_text, count_text, printable, shorten
from ..checkpoint._checkpoint.checkpoint import inspect
from ..checkpoint._files.checksum import verify_foreign
from ..checkpoint._files.safetensors_verify import read_header, verify_file
from ..checkpoint._folder.names import MANIFEST
from ..checkpoint._load_whole import WholePath
from ..checkpoint._report import VerifyReport
from ..checkpoint._store.checkpoint_files import CheckpointFiles
from ..checkpoint._store.open_path import RootPath, is_url
from ..checkpoint._verify import verify, verify_root
from ..errors import MLStateError
from ._common import (
    PATH_HELP,
    Commands,
    add_command,
    add_monitor,
    add_names,
    add_step,
    check_is_safetensors,
    find_any,
    kind_of,
    number_of_step,
    print_table,
)
from ._progress import progress_of

if TYPE_CHECKING:
    from ..checkpoint import Problem

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
    has_checksums: bool  # whether the format has checksums


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate verify`` to `commands`.

    Parsed arguments have the function of the command as ``run``.
    """
    help_text = "read every byte of a checkpoint, and report damage"
    parser = add_command(commands, "verify", help_text, run_verify, status_1="damaged")
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


def _verify_one(location: RootPath, repair: bool) -> tuple[list[_Verified], VerifyReport]:
    """Verify one root, and repair it if `repair`.

    Return its report twice: as the report on the only checkpoint, and on the whole folder.
    """
    with progress_of("verify", lambda: _bytes_to_read(location.files, [location.root])) as progress:
        report = verify(location, repair=repair, progress=progress)
    return [_Verified(location.root, report)], report


def _has_checksums(location: RootPath) -> bool:
    """Return whether all weights of a Hugging Face folder have checksums of mlstate."""
    with suppress(MLStateError):  # verification reports the reason
        shards = inspect(location).shards()
        return all(shard.crc32c is not None for shard in shards)
    return False


def _verify_file(path: str) -> tuple[_Verified, bool]:
    """Verify one safetensors file; return its report, and whether it has checksums."""

    def size() -> int:
        return sum(tensor.nbytes for tensor in read_header(local_path(path)).tensors)

    with progress_of("verify", size) as progress:
        report, has_checksums = verify_file(path, progress)
    return _Verified(None, report), has_checksums


def _verify_foreign(path: str) -> VerifyReport | None:
    """Return the report on files with checksums next to them, or in the Hub's cache.

    None without such checksums, for a URL, and for a path that does not exist.
    """
    place = None if is_url(path) else Path(local_folder(path))
    if place is None or not place.exists():
        return None

    def size() -> int:
        files = [place, *place.rglob("*")]
        return sum(file.stat().st_size for file in files if file.is_file())

    with progress_of("verify", size) as progress:
        return verify_foreign(str(place), progress)


# ---- output ----


def _json_data(outcome: _Outcome, good: bool) -> dict[str, Any]:
    """Return the reports as JSON values; `good`: the result of the command."""
    items, folder_report, kind, has_checksums = outcome
    return {
        "path": folder_report.path,
        "format": kind,
        "good": good,
        "checksums": has_checksums,
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
    return count_text(len(report.problems), "problem") if report.problems else "good"


def _step_text(report: VerifyReport) -> str:
    return "?" if report.step is None else str(report.step)


def _problem_row(problem: Problem, folder: str) -> list[str]:
    """Return a row of the table of problems; folder and file are removed from the text.

    `folder`: of the checkpoint. The bytes are a range: begin and end in the file.
    """
    place = f"{folder}/{problem.path}"
    text = problem.text.replace(place, problem.path).removeprefix(f"{problem.path}: ")
    span = f"{problem.offset}-{problem.offset + problem.length}" if problem.length else ""
    return [problem.kind, problem.path, problem.name or "", span, text]


def _print_one(path: str, verified: _Verified, has_checksums: bool) -> None:
    """Print a line about one checkpoint and a table of its problems.

    `path`: as the user gave it. `has_checksums`: whether the format has checksums.
    """
    report = verified.report
    problems = report.problems
    parts = [_result_text(report)]
    if report.step is not None and not report.repaired:
        parts.append(f"step {report.step}")
    parts.append(f"{bytes_text(report.bytes)} read")
    if report.compared:
        parts.append(f"compared with {' and '.join(report.compared)}")
    elif not problems and not has_checksums:
        parts[-1] = "no checksums: only its structure was looked at"
    print(f"{printable(path)}: {', '.join(parts)}")
    print_table(_HEADERS, [_problem_row(problem, report.path) for problem in problems])


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
        [_step_text(report), *_problem_row(problem, report.path)]
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


def _verify_chosen(arguments: argparse.Namespace) -> _Outcome:
    """Verify the tensors that ``--names`` chooses.

    Raises ValueError for options that concern whole steps.
    """
    if arguments.repair or arguments.all_steps:
        raise ValueError("--names cannot be used with --repair or --all-steps")
    number = number_of_step(arguments.path, arguments.step, arguments)
    location = find_any(arguments.path, number)
    root = location.root if isinstance(location, RootPath) else None
    report = verify(
        location if isinstance(location, RootPath) else arguments.path, names=arguments.names
    )
    kind = "safetensors" if root is None else kind_of(root)
    return _Outcome([_Verified(root, report)], report, kind, report.checksums)


def _verify_any(arguments: argparse.Namespace) -> _Outcome:
    """Verify the user's path, and repair it if the options ask for that.

    Raises ValueError for options that need steps if the path has none.
    """
    number = number_of_step(arguments.path, arguments.step, arguments)
    is_plain = arguments.step is None and not (arguments.repair or arguments.all_steps)
    foreign = _verify_foreign(arguments.path) if is_plain else None
    if foreign is not None:
        return _Outcome([_Verified(None, foreign)], foreign, "files", has_checksums=True)
    location = find_any(arguments.path, number)
    has_checksums = True
    if location is None or isinstance(location, WholePath):
        kind = "safetensors" if location is None else location.format
        if arguments.repair or arguments.all_steps:
            raise ValueError(f"{arguments.path} is one file: it has no steps")
    else:
        kind = kind_of(location.root)
    if isinstance(location, WholePath):
        folder_report = verify(location.path)
        items, has_checksums = [_Verified(None, folder_report)], folder_report.checksums
    elif location is None:
        check_is_safetensors(arguments.path)
        item, has_checksums = _verify_file(arguments.path)
        items, folder_report = [item], item.report
    elif kind != "checkpoint":
        if arguments.all_steps:
            format_name = "a Hugging Face folder" if kind == "huggingface" else "one file"
            raise ValueError(f"{arguments.path} is {format_name}: it has no steps")
        has_checksums = _has_checksums(location)
        items, folder_report = _verify_one(location, arguments.repair)
    elif arguments.all_steps:
        items, folder_report = _verify_all(location.files)
    else:
        items, folder_report = _verify_one(location, arguments.repair)
    return _Outcome(items, folder_report, kind, has_checksums)


def run_verify(arguments: argparse.Namespace) -> int:
    """Verify the user's path and print its problems.

    Return 1 if it has any and they were not repaired, else 0.
    """
    outcome = _verify_chosen(arguments) if arguments.names else _verify_any(arguments)
    items, folder_report, kind, has_checksums = outcome
    good = all(verified.report for verified in items) or folder_report.repaired is not None
    if arguments.json:
        print(json.dumps(_json_data(outcome, good), indent=2))
        return 0 if good else 1
    if arguments.all_steps:
        _print_all(arguments.path, items)
    else:
        _print_one(arguments.path, items[0], has_checksums)
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
    return 0 if good else 1
