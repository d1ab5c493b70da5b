"""The roots of a manager's steps: which root a step has, and what several ranks see."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from .._common.arguments import check_int
from ..errors import CollectiveError, FormatError, MLStateError, StoreError
from ._folder.names import MANIFEST
from ._load import LoadedState, load
from ._rank_messages import gather_bytes
from ._store.open_path import RootPath

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ..collectives import ProcessGroup
    from ._options import LoadOptions
    from ._store.checkpoint_files import CheckpointFiles

OTHER = "the folder holds a checkpoint of mlstate.save, which is not a step"


def find_root(files: CheckpointFiles, step: int | str) -> str:
    """Return the root of a step; in a folder without steps, its only root."""
    if step == "best":
        raise ValueError(
            "step='best' needs the metric: pass step=CheckpointManager(path, monitor='loss')"
            ".best_step(), with mode='max' if the largest is best"
        )
    if isinstance(step, str) and step != "latest":
        raise ValueError(f"step must be an int or 'latest', got {step!r}")
    if files.folder.is_local and os.path.isfile(files.path):
        raise ValueError(f"{files.path} is one file: it has no steps; leave the step out")
    root = files.current_root()
    if root != MANIFEST:
        raise ValueError(f"{files.path} holds weights of another program: it has no steps")
    if step == "latest":
        return root
    step = check_int("step", step, -1 << 63)
    if not files.list_roots() and files.read_manifest().step == step:
        return MANIFEST
    from ._manager import CheckpointManager

    return CheckpointManager(files.path).checkpoint(step)._root


def if_alone(group: ProcessGroup | None) -> AbstractContextManager[None]:
    """Suppress the folder's errors if there are several ranks: these must first communicate."""
    alone = group is None or group.world_size == 1
    return nullcontext() if alone else suppress(StoreError)


def holds_other_checkpoint(files: CheckpointFiles) -> bool:
    """Return whether a folder has a checkpoint, but no steps of a manager."""
    return files.folder.exists(MANIFEST) and not files.list_roots()


def agreed_roots(files: CheckpointFiles, group: ProcessGroup | None) -> list[str]:
    """Return the roots that rank 0 lists; ranks that list at other times may differ."""
    names: list[str] = []
    error: MLStateError | None = None
    if group is None or group.rank == 0:
        try:
            names = [root.path for root in files.list_roots()]
        except MLStateError as caught:
            error = caught
    text = "" if error is not None else " ".join(["roots", *names])
    reply = gather_bytes(group, text.encode())[0]
    if error is not None:
        raise error
    if not reply:
        failed = CollectiveError("rank 0 cannot list the checkpoints; see the error on that rank")
        failed.rank = 0
        raise failed
    return reply.decode().split(" ")[1:]


def try_root(
    files: CheckpointFiles, root: str, options: LoadOptions
) -> tuple[LoadedState | None, MLStateError | None]:
    """Load a root on all ranks; if one rank cannot read it, every rank skips it."""
    group = options.get("group")
    state: LoadedState | None = None
    error: MLStateError | None = None
    try:
        state = load(RootPath(files, root), **options)
    except (FormatError, StoreError) as caught:
        error = caught
    except BaseException:
        gather_bytes(group, b"stop")  # trying other roots would not help: the others must not wait
        raise
    answers = gather_bytes(group, b"good" if error is None else b"bad")
    if b"stop" in answers:
        rank = answers.index(b"stop")
        failed = CollectiveError(f"rank {rank} cannot restore; see the error on that rank")
        failed.rank = rank
        raise failed
    return (None if b"bad" in answers else state), error
