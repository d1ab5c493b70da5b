"""`prune`: files and old steps of a folder that it deletes, and a dry run of it."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from ..._common.arguments import check_flags, check_int
from ..._common.set_module import set_module
from .._folder.protocol import NoExclusion, exclusion_of
from .._options import check_timeout
from .._records import PruneReport
from .._store.open_path import open_files
from .manager import CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .._folder.names import Root
    from .._store.checkpoint_files import CheckpointFiles


def _old_roots(files: CheckpointFiles, keep: int | None) -> list[Root]:
    """Return the roots (manifests of steps) except the newest `keep`; none if `keep` is None.

    Damaged steps do not count as kept; those that cannot be read are returned too.
    """
    if keep is None:
        return []
    manager = CheckpointManager(files.path, keep=keep)
    newest = files.read_manifest().generation
    old, _ = manager._divide_roots(newest, manager._roots(), is_new=False)
    return old


def _is_dead(name: str, changed: float, generations: set[str], abandoned_before: float) -> bool:
    """Return whether the unneeded file `name` can be deleted.

    It can be if its name has one of the deleted `generations`, or if it was last changed, at
    `changed`, not after `abandoned_before` (both seconds since 1970): no running writer needs it.
    """
    parts = os.path.basename(name).split(".")
    return changed <= abandoned_before or any(
        part.partition("-")[0] in generations for part in parts
    )


@set_module("mlstate.checkpoint")
def prune(
    path: str | os.PathLike[str],
    *,
    keep: int | None = None,
    dry_run: bool = False,
    lock_timeout: float = 0,
    storage_options: Mapping[str, object] | None = None,
) -> PruneReport:
    """
    Delete the files of a checkpoint's folder that no checkpoint needs.

    Every save deletes the files that it replaced. Use this after a writer was killed, or to
    keep fewer steps than before.

    Parameters
    ----------
    path : str or os.PathLike
        Folder of the checkpoint, or of a `CheckpointManager`, or its URL in an object store.
    keep : int, optional
        Number of newest steps to keep. Older steps are deleted, and so are damaged ones whose
        step number cannot be read. Steps with missing files or files of another length, and
        steps that `verify` found damaged, do not count. Default: all steps are kept.
    dry_run : bool, default False
        Delete nothing, and return what would be deleted.
    lock_timeout : float, default 0
        Seconds to wait for another process that is writing in the folder.
    storage_options : mapping, optional
        As for `save`. In a store, unneeded objects are deleted only if they belong to a deleted
        step or are older than ``orphan_seconds``, which must exceed the time of the longest save.

    Returns
    -------
    PruneReport
        The deleted steps and files.

    Raises
    ------
    ValueError
        `keep` is less than 1. Or the path is a URL without `keep` and ``orphan_seconds``.
    StoreError
        There is no checkpoint, another process is writing (EBUSY), or the operating system
        refused.
    FormatError, ChecksumError
        A manifest or an index that stays is damaged, so the needed files are unknown. Nothing
        is deleted.

    Notes
    -----
    Files of other programs stay; `verify` lists them. The writers' lock is held, except in a
    dry run: a dry run during a save counts the files of that save as unneeded.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import CheckpointManager, prune
    >>> manager = CheckpointManager(tempfile.mkdtemp() + "/run", keep=None)
    >>> for step in (1, 2, 3):
    ...     _ = manager.save(step, model={"w": np.full(3, step)})
    >>> report = prune(manager.directory, keep=1)
    >>> report.steps, report.kept, manager.steps()
    ([1, 2], [3], [3])
    """
    check_flags(dry_run=dry_run)
    if keep is not None:
        keep = check_int("keep", keep, 1, also=" or None")
    files = open_files(path, storage_options)
    timeout = check_timeout(lock_timeout)
    files.read_manifest()  # raises without a checkpoint: no file would be needed
    if keep is None and files.folder.orphan_time(local_clock=dry_run) is None:
        raise ValueError(
            f"{files.path}: objects of a killed writer look like those of a running one: pass "
            "storage_options={'orphan_seconds': N} to delete those older than the longest save, "
            "or keep= to delete old steps"
        )
    return delete_roots(files, partial(_old_roots, files, keep), dry_run, timeout)


def delete_roots(
    files: CheckpointFiles, choose: Callable[[], list[Root]], dry_run: bool, timeout: float
) -> PruneReport:
    """Delete the roots (manifests of steps) that `choose` returns, and files that no root needs.

    Unneeded files that a running writer may still need stay (`_is_dead`). `choose` is called under
    the writers' lock. `dry_run`: delete nothing, and take no lock. `timeout`: seconds to wait for
    the lock; then raises StoreError (EBUSY). Returns a report of the deletions.
    """
    folder = files.folder
    abandoned_before = folder.orphan_time(local_clock=dry_run)
    if abandoned_before is None:  # a writer may be running: no file is old enough
        abandoned_before = float("-inf")
    exclusion = NoExclusion() if dry_run else exclusion_of(folder, timeout)
    with exclusion.holder:
        exclusion.acquire()
        old, steps = choose(), files.steps_of(files.list_roots())
        temporary = files.temporary_files()
        unneeded = {*files.known_files()} - files.needed_files(old)
        infos = folder.find_files({*unneeded, *temporary, *(root.path for root in old)})
        generations = {root.generation for root in old}
        dead = [
            name
            for name in [*temporary, *sorted(unneeded)]
            if name in infos and _is_dead(name, infos[name].changed, generations, abandoned_before)
        ]
        if not dry_run:
            files.delete_roots(old)
            files.remove(dead)
        exclusion.note(None)  # a killed writer, which the lock may name, has no files now
    sizes = {
        name: infos[name].nbytes
        for name in sorted({*dead, *(root.path for root in old)})
        if name in infos
    }
    deleted = [steps.get(root) for root in old]
    kept_steps = [step for root, step in steps.items() if root not in old]
    return PruneReport(files.path, dry_run, deleted, kept_steps, sizes)
