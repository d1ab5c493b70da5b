"""Ranks agree which steps of a run exist, and which one all of them can load."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from ...errors import CollectiveError, FormatError, MLStateError, StoreError
from .._load.load import load
from .._loaded_state import LoadedState
from .._rank_messages import gather_bytes
from .._store.open_path import RootPath

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ...collectives import ProcessGroup
    from .._options import LoadOptions
    from .._store.checkpoint_files import CheckpointFiles


def if_alone(group: ProcessGroup | None) -> AbstractContextManager[None]:
    """Return a context for reads of the folder that come before a save's first message.

    If this process saves alone, errors are raised. With several ranks it suppresses StoreError: the
    others would wait for a rank that raises alone, and the save itself reads the folder again.
    """
    alone = group is None or group.world_size == 1
    return nullcontext() if alone else suppress(StoreError)


def agreed_roots(files: CheckpointFiles, group: ProcessGroup | None) -> list[str]:
    """Return the paths of the steps' manifests that rank 0 lists, oldest first, on all ranks.

    Ranks that list at other times may find others. If rank 0 fails, the others raise
    CollectiveError.
    """
    names: list[str] = []
    error: MLStateError | None = None
    if group is None or group.rank == 0:
        try:
            names = [root.path for root in files.list_roots()]
        except MLStateError as caught:
            error = caught
    # an empty text: rank 0 failed; "roots" alone: there are none
    text = "" if error is not None else " ".join(["roots", *names])
    reply = gather_bytes(group, text.encode())[0]
    if error is not None:
        raise error
    if not reply:
        text = "rank 0 cannot list the checkpoints; see the error on that rank"
        raise CollectiveError(text, rank=0)
    return reply.decode().split(" ")[1:]


def try_root(
    files: CheckpointFiles, root: str, options: LoadOptions, written: set[tuple[str, str]]
) -> tuple[LoadedState | None, MLStateError | None]:
    """Load the manifest `root`, of a step, on all ranks; return (state, None) or (None, error).

    `written`: targets that earlier tries have written in part; this one adds its own.
    The error is this rank's, or CollectiveError if only another rank cannot read the step. An
    exception other than FormatError and StoreError is raised, and then every rank raises.
    """
    group = options.get("group")
    state: LoadedState | None = None
    error: MLStateError | None = None
    try:
        state = load(RootPath(files, root, written=written), **options)
    except (FormatError, StoreError) as caught:
        error = caught
    except BaseException:
        gather_bytes(group, b"stop")  # trying other roots would not help: the others must not wait
        raise
    answers = gather_bytes(group, b"good" if error is None else b"bad")
    if b"stop" in answers:
        rank = answers.index(b"stop")
        raise CollectiveError(f"rank {rank} cannot restore; see the error on that rank", rank=rank)
    if b"bad" in answers and error is None:
        rank = answers.index(b"bad")
        text = f"rank {rank} cannot read it; see the error there"
        state, error = None, CollectiveError(text, rank=rank)
    return state, error
