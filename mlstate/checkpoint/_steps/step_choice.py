"""Which step `step=` and "latest" mean, and which is the best; which save of a step counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._common.arguments import check_int
from ..._common.log import log
from ..._common.store_error import store_error
from ..._common.text import steps_text
from ...errors import FormatError, StoreNotFoundError
from .._folder.names import MANIFEST, Root

if TYPE_CHECKING:
    from .._store.checkpoint_files import CheckpointFiles
    from .._store.manifest import Manifest
    from .retention import Retention, Roots

OTHER = "the folder holds a checkpoint of mlstate.save, which is not a step"


def holds_other_checkpoint(files: CheckpointFiles) -> bool:
    """Return whether a folder has a checkpoint, but no steps of a manager."""
    return files.folder.exists(MANIFEST) and not files.list_roots()


def read_roots(files: CheckpointFiles, newest: Manifest | None = None) -> Roots:
    """Return the roots (files of steps) with their manifests, oldest first.

    If a step has several roots, only the newest counts. A root that is damaged, or was deleted
    meanwhile, is left out; one that the system cannot read raises StoreError. The root of `newest`
    is not read again.
    """
    roots_by_step: dict[int | None, tuple[Root, Manifest]] = {}
    roots = files.list_roots()
    files.folder.prefetch(root.path for root in roots)
    for root in roots:
        try:
            if newest is not None and root.generation == newest.generation:
                manifest = newest
            else:
                manifest = files.read_manifest(root.path)
        except StoreNotFoundError:
            continue
        except FormatError as error:
            log("WARNING", "%s: a step is damaged: %s", files.path, error)
            continue
        roots_by_step.pop(manifest.step, None)  # the new one goes to the end: the order is of age
        roots_by_step[manifest.step] = (root, manifest)
    return list(roots_by_step.values())


def read_step(files: CheckpointFiles, step: int) -> tuple[Root, Manifest]:
    """Return the root (path and generation) of a step, and its manifest.

    Raises StoreError (ENOENT), which lists the existing steps, if it is missing.
    """
    roots = read_roots(files)
    for root, manifest in roots:
        if manifest.step == step:
            return root, manifest
    have = steps_text([manifest.step for _, manifest in roots if manifest.step is not None])
    have += f"; {OTHER}" if holds_other_checkpoint(files) else ""
    reason = FileNotFoundError(2, f"step {step} does not exist (steps: {have})")
    raise store_error(reason, "cannot find the step", files.path)


def best_of(roots: Roots, rules: Retention) -> tuple[Root, Manifest] | None:
    """Return root and manifest of the step with the best metric, or None if no step has one."""
    ranking = rules.ranked([entry for entry in roots if entry[1].step is not None])
    return ranking[0] if ranking else None


def no_metric(path: str, monitor: str | None) -> ValueError:
    """Return the error of a run without the metric of ``step="best"``."""
    return ValueError(f"{path}: no step has a number {monitor!r} in its metadata")


def find_root(files: CheckpointFiles, step: int | str) -> str:
    """Return the path of the manifest of a step or of "latest".

    In a folder without steps, the only checkpoint is found by its step. Raises StoreError if the
    step is missing, ValueError for another text or a path that cannot have steps.
    """
    if step == "best":
        raise ValueError(
            "step='best' needs the metric, which belongs to the run: "
            f"CheckpointManager({files.path!r}, monitor='loss').restore('best') loads the step "
            "with the smallest loss in its metadata, and best_step() is its number"
        )
    if isinstance(step, str) and step != "latest":
        raise ValueError(f"step must be an int or 'latest', got {step!r}")
    if step == "latest":
        return MANIFEST
    step = check_int("step", step, -1 << 63)  # a negative step does not exist: a clearer error
    if not files.list_roots() and files.read_manifest().step == step:
        return MANIFEST
    return read_step(files, step)[0].path
