"""Agreement of ranks: all continue, all retry, or all raise the error of the rank that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import errors
from ..errors import CollectiveError, MLStateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from . import ProcessGroup


def _error_class_name(error: BaseException) -> str:
    """Return the name of the class that other ranks raise for this rank's `error`.

    It is the nearest public class of `mlstate.errors`, or CollectiveError for other exceptions.
    """
    for cls in type(error).__mro__:
        if issubclass(cls, MLStateError) and cls.__name__ in errors.__all__:
            return cls.__name__
    return "CollectiveError"


def _peer_error(rank: int, reply: dict[str, Any]) -> MLStateError:
    """Return the error for the failure of `rank`; it has the same class on every rank.

    `reply`: the rank's message of `agree`.
    """
    cls = getattr(errors, reply["kind"], CollectiveError)
    error: MLStateError = cls(f"rank {rank}: {reply['error']}")
    error.rank = rank
    return error


def agree(
    group: ProcessGroup, about: str, error: BaseException | None, *, again: bool = False
) -> bool:
    """Return whether all ranks can continue; False if all must retry. Every rank must call this.

    `about`: a text that describes this rank's view of the matter. `error`: this rank's failure, or
    None. `again`: a retry by all ranks can resolve it.

    All must retry if `about` differs between ranks, or if a rank has an `error` with `again`. Other
    errors are final: a rank with one raises it, and the others raise the error of the first such
    rank.
    """
    import json

    message: dict[str, Any] = {"about": about, "error": None, "again": again}
    if error is not None:
        kind = _error_class_name(error)
        # other classes are not kept: the text names them
        text = f"{type(error).__name__}: {error}" if kind == "CollectiveError" else str(error)
        message |= {"error": text, "kind": kind}
    # by rank
    replies = [json.loads(data) for data in group.gather_bytes(json.dumps(message).encode()) or ()]
    has_error = [reply["error"] is not None for reply in replies]
    # (rank, message) of each rank with an error that is final
    failed = [(r, reply) for r, reply in enumerate(replies) if has_error[r] and not reply["again"]]
    if failed:
        if error is not None and not again:
            raise error
        raise _peer_error(*failed[0]) from error
    return not any(has_error) and len({reply["about"] for reply in replies}) == 1


def gather_values(group: ProcessGroup, operation: str, describe: Callable[[], Any]) -> list[Any]:
    """Return the JSON value that `describe` returns on each rank, in rank order.

    If it raises on a rank, all raise, as in `agree`. Every rank must call this.
    """
    import json

    message, error = b"", None
    try:
        message = json.dumps(describe()).encode()
    except Exception as raised:
        error = raised
    messages = group.gather_bytes(message) or ()
    if not all(messages):
        agree(group, operation, error)
    return [json.loads(each) for each in messages]
