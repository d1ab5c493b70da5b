"""``mlstate prune``: delete the files in a folder that no checkpoint needs."""

from __future__ import annotations

import argparse

from .._common.text import bytes_text, count_text, printable, sort_steps, steps_text
from ..checkpoint import prune
from ..checkpoint._store.open_path import is_url
from ._common import Commands, add_command, add_options, find, print_json, print_table

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate prune`` to `commands`.

    Parsed arguments have the function of the command as ``run``.
    """
    help_text = "delete old steps, and files that killed writers left behind"
    parser = add_command(commands, "prune", help_text, run_prune)
    parser.add_argument("path", help="a checkpoint, or the folder of a run")
    parser.add_argument("--keep", type=int, metavar="N", help="newest steps to keep (default: all)")
    parser.add_argument(
        "--dry-run", action="store_true", help="only list the files that would be deleted"
    )
    parser.add_argument(
        "--orphan-seconds",
        type=float,
        metavar="N",
        help="in an object store: delete unneeded objects of this age (longer than any save)",
    )
    add_options(parser, "--lock-timeout")


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
    source = find(arguments.path, None)
    if source.format != "mlstate":
        raise ValueError(
            f"{arguments.path} has the format {source.format}: there is nothing to prune"
        )
    options = None
    if arguments.orphan_seconds is not None:
        options = {"orphan_seconds": arguments.orphan_seconds}
    report = prune(
        arguments.path,
        keep=arguments.keep,
        dry_run=arguments.dry_run,
        lock_timeout=arguments.lock_timeout,
        storage_options=options,
    )
    if arguments.json:
        data = {
            "path": report.path,
            "dry_run": report.dry_run,
            "steps": sort_steps(report.steps),
            "kept": sort_steps(report.kept),
            "files": report.files,
            "bytes": report.nbytes,
        }
        return print_json(data)
    print(f"{printable(arguments.path)}: {report._title()}")
    if report.steps:
        verb = "would go" if report.dry_run else "gone"
        kept_steps = steps_text(report.kept)
        print(f"{count_text(len(report.steps), 'step')} {verb}: {steps_text(report.steps)}")
        print(f"kept: {kept_steps}")
    rows = [[name, bytes_text(size)] for name, size in report.files.items()]
    print_table(("file", "bytes"), rows)
    return 0
