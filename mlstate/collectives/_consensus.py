"""Ranks that go on together, or not at all: each tells the others how it fared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import errors
from ..errors import CollectiveError, MLStateError

if TYPE_CHECKING:
    from . import ProcessGroup


def _kind(error: BaseException) -> str:
    """The class of an error that other ranks raise too, by name."""
    for cls in type(error).__mro__:
        if issubclass(cls, MLStateError) and cls.__name__ in errors.__all__:
            return cls.__name__
    return "CollectiveError"


def _of_peer(rank: int, said: dict[str, Any]) -> MLStateError:
    """The error of another rank, of the same class, so that callers need not ask where."""
    cls = getattr(errors, said["kind"], CollectiveError)
    error: MLStateError = cls(f"rank {rank}: {said['error']}")
    error.rank = rank
    return error


def agree(
    group: ProcessGroup, about: str, error: BaseException | None, *, again: bool = False
) -> bool:
    """Hear of all ranks whether they can go on; every rank calls this.

    Parameters
    ----------
    group : ProcessGroup
        The ranks.
    about : str
        What all ranks must say alike.
    error : BaseException, optional
        Why this rank cannot go on.
    again : bool, default False
        Whether it could if all tried once more.

    Returns
    -------
    bool
        True: all can go on. False: all are to try once more.

    Raises
    ------
    BaseException
        `error`, or one like the first of another rank that cannot go on.
    """
    import json

    said: dict[str, Any] = {"about": about, "error": None, "again": again}
    if error is not None:
        text = f"{type(error).__name__}: {error}" if _kind(error) == "CollectiveError" else error
        said |= {"error": str(text), "kind": _kind(error)}
    everyone = [json.loads(text) for text in group.gather_bytes(json.dumps(said).encode()) or ()]
    failed = [(r, one) for r, one in enumerate(everyone) if one["error"] and not one["again"]]
    if failed:
        if error is not None and not again:
            raise error
        raise _of_peer(*failed[0]) from error
    return not any(one["error"] for one in everyone) and len({o["about"] for o in everyone}) == 1
