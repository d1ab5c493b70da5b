"""``mlstate verify``: whether every byte is what was written, and what to fall back to."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _folder
from .._plain_verify import read_header, verify_file
from .._text import bytes_text, shorten
from .._verify import VerifyReport, verify_checkpoint, verify_root
from ..errors import MLStateError
from .checkpoint_common import (
    Folder,
    add_command,
    count_text,
    find,
    path_text,
    print_table,
    progress_of,
)

if TYPE_CHECKING:
    import argparse

    from ..checkpoint import Problem

__all__ = ["add"]

_HEADERS = ("problem", "file", "tensor", "bytes", "what")
_WIDTH = 300  # of a file's name


class _Verified(NamedTuple):
    """What was found of one checkpoint; `root` is None for a plain file."""

    root: str | None
    report: VerifyReport


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of ``verify``."""
    help_text = "read every byte of a checkpoint, and say what is not as it was written"
    parser = add_command(commands, "verify", help_text, no="damaged")
    parser.add_argument("path", help="a checkpoint, the folder of a run, or a .safetensors file")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="of a run (default: the newest)")
    which.add_argument("--all-steps", action="store_true", help="verify every step of a run")
    which.add_argument(
        "--repair",
        action="store_true",
        help="put the newest good step in the place of a damaged newest one; good if there is one",
    )
    parser.set_defaults(run=run_verify)


# ---- looking ----


def _size(folder: str, roots: list[str]) -> int:
    """Bytes that will be read."""
    total = 0
    for root in roots:
        with suppress(MLStateError):  # of what cannot be read, nothing will be
            catalog = _folder.load_catalog(folder, _folder.read_manifest(folder, root))
            total += sum(catalog.files().values())
    return total


def _roots(folder: str) -> list[str]:
    """Every root, the oldest first; the manifest too unless it is one of them, and good."""
    roots = _folder.list_roots(folder)
    names = [root.path for root in roots]
    try:
        newest = _folder.read_manifest(folder).generation
        there = any(root.generation == newest for root in roots)
    except MLStateError:
        there = False
    return names if there else [*names, _folder.MANIFEST]


def _verify_all(folder: str) -> tuple[list[_Verified], VerifyReport]:
    """Every step, and what lies about."""
    rest = VerifyReport(folder)
    found = []
    names = _roots(folder)
    with progress_of("verify", lambda: _size(folder, names)) as progress:
        for name in names:
            report = VerifyReport(folder)
            verify_root(folder, name, report, progress)
            found.append(_Verified(name, report))
    with suppress(MLStateError):  # what is needed is not known: the problems say why
        rest.leftover = _folder.prune(folder, dry_run=True)
    rest.strange = _folder.strange_files(folder)
    return found, rest


def _verify_one(where: Folder, repair: bool) -> tuple[list[_Verified], VerifyReport]:
    with progress_of("verify", lambda: _size(where.path, [where.root])) as progress:
        report = verify_checkpoint(where.path, root=where.root, repair=repair, progress=progress)
    return [_Verified(where.root, report)], report


def _verify_plain(path: str) -> tuple[_Verified, bool]:
    def size() -> int:
        return sum(tensor.nbytes for tensor in read_header(path).tensors)

    with progress_of("verify", size) as progress:
        report, has_checksums = verify_file(path, progress)
    return _Verified(None, report), has_checksums


# ---- saying ----


def _problem_data(problem: Problem) -> dict[str, Any]:
    return problem._asdict()


def _data(
    found: list[_Verified], rest: VerifyReport, checksums: bool, good: bool
) -> dict[str, Any]:
    return {
        "path": rest.path,
        "format": "safetensors" if found[0].root is None else "checkpoint",
        "good": good,
        "checksums": checksums,
        "bytes": sum(verified.report.bytes for verified in found),
        "repaired": rest.repaired,
        "checkpoints": [
            {
                "root": root,
                "step": report.step,
                "good": bool(report),
                "bytes": report.bytes,
                "problems": [_problem_data(problem) for problem in report.problems],
            }
            for root, report in found
        ],
        "leftover": rest.leftover,
        "strange": rest.strange,
    }


def _print_one(path: str, verified: _Verified, checksums: bool) -> None:
    root, report = verified
    problems = report.problems
    parts = ["good" if not problems else count_text(len(problems), "problem")]
    if report.step is not None and not report.repaired:
        parts.append(f"step {report.step}")
    parts.append(f"{bytes_text(report.bytes)} read")
    if root is None and not problems and not checksums:
        parts[-1] = "no checksums: only its structure was looked at"
    where = path_text(path) + ("" if root in (None, _folder.MANIFEST) else f"/{root}")
    print(f"{where}: {', '.join(parts)}")
    print_table(_HEADERS, [
        [p.kind, p.path, p.name or "", f"{p.offset}-{p.offset + p.length}", p.text]
        for p in problems
    ])  # fmt: skip


def _print_files(what: str, names: list[str]) -> None:
    if names:
        print(f"{count_text(len(names), 'file')} {what}:")
        for name in names:
            print(f"  {shorten(name, _WIDTH)}")


def run_verify(arguments: argparse.Namespace) -> int:
    """Print what is wrong; 1 if anything is, and was not repaired."""
    where = find(arguments.path, arguments.step)
    checksums = True
    if where is None:
        if arguments.repair or arguments.all_steps:
            raise ValueError(f"{arguments.path} is one file: there are no steps, and no older one")
        one, checksums = _verify_plain(arguments.path)
        found, rest = [one], one.report
    elif arguments.all_steps:
        found, rest = _verify_all(where.path)
    else:
        found, rest = _verify_one(where, arguments.repair)
    good = all(verified.report for verified in found) or rest.repaired is not None
    if arguments.json:
        print(json.dumps(_data(found, rest, checksums, good), indent=2))
        return 0 if good else 1
    for verified in found:
        _print_one(arguments.path, verified, checksums)
    _print_files("left over, which mlstate prune deletes", rest.leftover)
    _print_files("of another program", rest.strange)
    if rest.repaired is not None:
        step = "" if rest.step is None else f"step {rest.step}, "
        print(f"repaired: {step}generation {rest.repaired}, is the newest good one, and in place")
    elif arguments.repair and not good:
        print("not repaired: there is no older step that is good")
    return 0 if good else 1
