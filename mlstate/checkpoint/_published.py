"""Versions that `mlstate.follow` published, as a load of a checkpoint sees them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import CompatibilityError

if TYPE_CHECKING:
    from ._store.manifest import Manifest

KEY = "mlstate.follow"  # of the facts about a version in the metadata of its root
DELTA = "delta"  # kind of a version that has only changes


def refuse_delta(manifest: Manifest, path: str) -> None:
    """Raise CompatibilityError if a root has only the changes of published weights.

    The error names the ways to the weights. `manifest`: of the root, whose metadata are untrusted.
    `path`: of the folder.
    """
    facts = manifest.metadata.get(KEY)
    if manifest.model is not None or not isinstance(facts, dict) or facts.get("kind") != DELTA:
        return
    anchors: list[int] = []
    with suppress(KeyError, TypeError, ValueError):
        anchors = [step for _, _, step, kind in facts["chain"] if kind != DELTA]
    load = f", or load the newest version with all weights, step={anchors[-1]}" if anchors else ""
    error = CompatibilityError(
        f"{path}: step {manifest.step} is a published delta, which has only the weights that "
        f"changed: read it by mlstate.follow.Follower({path!r}, into=...){load}"
    )
    error.path = path
    raise error
