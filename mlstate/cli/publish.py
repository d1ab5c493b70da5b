"""``mlstate publish``: list, verify and delete published versions."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .._common.report import Table
from .._common.text import count_text, steps_text
from ..checkpoint import verify
from ..checkpoint._folder.names import MANIFEST, Root
from ..checkpoint._manager.prune import delete_roots
from ..checkpoint._options import check_timeout
from ..checkpoint._store.open_path import RootPath, open_files
from ..errors import MLStateError
from ..follow._version import Lineage, lineage_of, trim_chain
from ._common import Commands, add_actions_of, add_command, print_result, shared

if TYPE_CHECKING:
    from ..checkpoint._store.checkpoint_files import CheckpointFiles

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate publish`` and its actions to `commands`.

    Parsed arguments have the function of the action as ``run``.
    """
    text = "list, verify and delete the versions that a Publisher wrote"
    actions = add_actions_of(commands, "publish", text)
    path = {"path": "the folder of the versions, or its URL"}
    add_command(actions, "ls", "list the versions that followers can reach", run_list, path)
    text = "read every byte of the versions that followers can reach"
    add_command(actions, "verify", text, run_verify, path, statuses={1: "damaged"})
    text = "delete old versions, and files that killed publishers left behind"
    keep = "newest versions to keep; older ones back to an anchor stay too"
    settings = {"type": int, "required": True, "help": keep}
    pruned = {**path, "--keep N": settings, **shared("--lock-timeout")}
    add_command(actions, "prune", text, run_prune, pruned)


def _read_lineage(path: str) -> tuple[CheckpointFiles, Lineage]:
    """Return the files of a folder of versions, and its lineage of versions."""
    files = open_files(path, reads=True)
    return files, lineage_of(files.read_manifest(), path)


def run_list(arguments: argparse.Namespace) -> int:
    """Print one row for each version that followers can reach; return 0."""
    files, lineage = _read_lineage(arguments.path)
    rows = []
    is_reachable = False  # by versions from an anchor on
    for version in lineage.versions:
        try:
            manifest = files.read_manifest(version.root)
        except FileNotFoundError:  # deleted since the newest was published
            is_reachable = False
            continue
        is_reachable = is_reachable or version.has_model
        if not is_reachable:
            continue
        nbytes = sum(record.data_bytes for record in manifest.indexes)
        row = version.step, version.kind, nbytes, manifest.world_size, manifest.created
        rows.append(row)
    title = f"{arguments.path}: {count_text(len(rows), 'version')}, lineage {lineage.name}"
    columns = ["step", "kind", "bytes [B]", "ranks", "created"]
    table = Table(title, columns, rows)
    data = {"path": files.path, "lineage": lineage.name, "versions": table.data()}
    return print_result(arguments, data, [table])


def run_verify(arguments: argparse.Namespace) -> int:
    """Read every byte of the versions, and print a row for each; return 1 if one is damaged."""
    files, lineage = _read_lineage(arguments.path)
    newest = lineage.versions[-1]
    rows: list[dict[str, Any]] = []
    for version in lineage.versions:
        problems, nbytes = [], 0
        if not files.folder.exists(version.root):
            # only the oldest versions are deleted, by a publisher or since this command began
            is_oldest = not rows and version is not newest
            if is_oldest or files.is_replaced(MANIFEST, newest.generation):
                continue
            problems = [f"{version.root}: it is missing"]
        elif not rows and not version.has_model:
            problems = ["the versions before it, which it changes, are missing"]
        try:
            report = verify(RootPath(files, version.root))
            problems += [f"{each.path}: {each.text}" for each in report.problems]
            nbytes = report.bytes
        except MLStateError as error:
            problems = problems or [str(error)]
        facts = {"step": version.step, "kind": version.kind, "good": not problems, "bytes": nbytes}
        rows.append({**facts, "problems": problems})
    is_good = all(row["good"] for row in rows)
    data = {"path": files.path, "good": is_good, "versions": rows}
    columns = ["step", "kind", "read [B]", "result"]
    cells = [
        (row["step"], row["kind"], row["bytes"], "; ".join(row["problems"]) or "good")
        for row in rows
    ]
    table = Table(f"{arguments.path}: {'good' if is_good else 'damaged'}", columns, cells)
    return print_result(arguments, data, [table], 0 if is_good else 1)


def run_prune(arguments: argparse.Namespace) -> int:
    """Delete old versions but the newest ``--keep`` and the ones that they need; return 0.

    Prints a summary. Raises ValueError if ``--keep`` is below 1.
    """
    if arguments.keep < 1:
        raise ValueError(f"--keep must be 1 or more, got {arguments.keep}")
    files = open_files(arguments.path)
    lineage_of(files.read_manifest(), files.path)  # raises without versions, before the lock

    def choose() -> list[Root]:
        """Return the roots to delete, as they are under the lock."""
        stored, newest = files.list_roots(), files.read_manifest()
        versions = trim_chain(lineage_of(newest, files.path).versions, arguments.keep)
        kept = {version.root for version in versions}
        # a later root belongs to a version that is being published
        return [r for r in stored if r.path not in kept and r.sequence < newest.sequence]

    timeout = check_timeout(arguments.lock_timeout)
    report = delete_roots(files, choose, dry_run=False, timeout=timeout)
    data = {**report._asdict(), "bytes": report.nbytes}
    del data["dry_run"]
    title = f"{arguments.path}: {report._title()}"
    return print_result(arguments, data, [title, f"kept: {steps_text(report.kept)}"])
