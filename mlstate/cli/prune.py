"""``mlstate prune``: delete the files in a folder that no checkpoint needs."""

from __future__ import annotations

import argparse

from .._common.report import Table
from .._common.text import count_text, sort_steps, steps_text
from ..checkpoint import prune
from ..checkpoint._store.open_path import is_url
from ._common import Commands, add_command, find, print_result, shared

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate prune`` to `commands`.

    Parsed arguments have the function of the command as ``run``.
    """
    help_text = "delete old steps, and files that killed writers left behind"
    text = "in an object store: delete unneeded objects of this age (longer than any save)"
    usages = {
        "path": "a checkpoint, or the folder of a run",
        "--keep N": {"type": int, "help": "newest steps to keep (default: all)"},
        "--dry-run": "only list the files that would be deleted",
        "--orphan-seconds N": {"type": float, "help": text},
        **shared("--lock-timeout"),
    }
    add_command(commands, "prune", help_text, run_prune, usages)


def run_prune(arguments: argparse.Namespace) -> int:
    """Delete the files that no kept step needs, and print a summary; return 0.

    Raises ValueError for a file, and for a URL without an option that makes deletion safe.
    """
    if arguments.keep is not None and arguments.keep < 1:
        raise ValueError(f"--keep must be 1 or more, got {arguments.keep}")
    if is_url(arguments.path) and arguments.keep is None and arguments.orphan_seconds is None:
        raise ValueError(
            f"{arguments.path}: objects of a killed writer look like those of a running one: pass "
            "--orphan-seconds N to delete those older than the longest save, or --keep N to delete "
            "old steps"
        )
    source = find(arguments.path)
    if source.format != "mlstate":
        raise ValueError(
            f"{arguments.path} has the format {source.format}: there is nothing to prune"
        )
    age = arguments.orphan_seconds
    report = prune(
        arguments.path,
        keep=arguments.keep,
        dry_run=arguments.dry_run,
        lock_timeout=arguments.lock_timeout,
        storage_options=None if age is None else {"orphan_seconds": age},
    )
    data = {
        **report._asdict(),
        "steps": sort_steps(report.steps),
        "kept": sort_steps(report.kept),
        "bytes": report.nbytes,
    }
    lines = [f"{arguments.path}: {report._title()}"]
    if report.steps:
        verb = "would go" if report.dry_run else "gone"
        lines.append(f"{count_text(len(report.steps), 'step')} {verb}: {steps_text(report.steps)}")
        lines.append(f"kept: {steps_text(report.kept)}")
    files = Table(lines, ["file", "bytes [B]"], [*report.files.items()])
    return print_result(arguments, data, [files])
