"""`clip_grad_norm`: norm of all ranks' gradients, scaling to `max_norm`; ranks that disagree."""

from __future__ import annotations

from math import isfinite, isnan, nan, sqrt
from typing import TYPE_CHECKING, Any

from .._common.arguments import check_number
from ..collectives._arguments import check_group
from ..errors import CollectiveError
from ._gradient_ops import distinct_memory, norm_partials, scale, squares_in_order
from ._sharding_unit import check_unit_types

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..collectives import ProcessGroup
    from ._sharding_unit import FSDPShardingUnit


def clip_grad_norm(
    sharding_units: Mapping[str, FSDPShardingUnit],
    max_norm: float,
    group: ProcessGroup,
    *,
    timeout: float | None = None,
) -> float:
    """Scale the local gradients of all ranks so that their global norm is at most `max_norm`.

    Parameters
    ----------
    sharding_units : dict of str to FSDPShardingUnit
        The same parameters on all ranks. Those without a gradient count as zero.
    max_norm : float
        The largest L2 norm allowed; infinity disables scaling.
    group : ProcessGroup
        The ranks.
    timeout : float, optional
        Timeout in seconds. Default: the group's timeout.

    Returns
    -------
    float
        The global norm before scaling, bit-identical on every rank: squares are added in
        float64, by parameter in name order, then by rank.

    Raises
    ------
    ValueError
        If `max_norm` is negative or NaN, a gradient is read-only, or two gradients share
        memory, but not as one array.
    TypeError
        If an argument has a wrong type.
    CompatibilityError
        If a gradient of this rank has a dtype that cannot be scaled.
    CollectiveError
        On every rank, if the norm is not finite, a rank passed another `max_norm`, or another
        rank's gradient cannot be read or scaled. The gradients are unchanged.

    Notes
    -----
    Gradients are multiplied by ``max_norm / (norm + 1e-6)``, as by
    ``torch.nn.utils.clip_grad_norm_``. If several units have one array as gradient, each counts in
    the norm, and the array is multiplied once.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.collectives import SingleGroup
    >>> from mlstate.fsdp import FSDPShardingUnit, clip_grad_norm
    >>> unit = FSDPShardingUnit("w", (2,), "float64", 0, world_size=1)
    >>> unit.local_gradient = np.array([3.0, 4.0])
    >>> clip_grad_norm({"w": unit}, 1.0, SingleGroup())
    5.0
    >>> unit.local_gradient.round(3)
    array([0.6, 0.8])
    """
    group = check_group(group)
    check_unit_types(sharding_units)  # before the ranks wait for this one
    limit = check_number("max_norm", max_norm)
    if not limit >= 0:
        raise ValueError(f"max_norm must be 0 or more, got {max_norm}")
    gradients = {
        name: sharding_units[name].local_gradient
        for name in sorted(sharding_units)
        if sharding_units[name].local_gradient is not None
    }
    partials, distinct, problem = _find_partials(gradients)
    own_squares = squares_in_order(partials.values())
    why = "" if problem is None else f"{type(problem).__name__}: {problem}"
    text = f"clip {limit!r} {own_squares!r} {why}"
    texts = group.gather_bytes(text.encode(), timeout=timeout)
    if problem is not None and isnan(own_squares):
        raise problem
    rank_squares, problems = _collect_squares(group.rank, limit, texts)
    norm = sqrt(squares_in_order((squares, 0) for squares in rank_squares))  # 0: count is unused
    if not isfinite(norm):
        bad = [rank for rank, squares in enumerate(rank_squares) if not isfinite(squares)]
        nonfinite = [name for name, (_, count) in partials.items() if count]
        where = f"; on this rank: {', '.join(nonfinite[:5])}" if nonfinite else ""
        reason = f"gradients of rank {', '.join(map(str, bad))} are not finite{where}"
        # `bad` is empty if only the sum over ranks overflows
        raise _clip_error(group.rank, bad[0] if bad else None, reason)
    factor = limit / (norm + 1e-6)
    if factor < 1:
        if problem is not None:
            raise problem
        for rank, reason in problems.items():
            raise _clip_error(group.rank, rank, f"rank {rank} cannot scale its gradients: {reason}")
        scale(distinct, factor)
    return norm


def _find_partials(
    gradients: Mapping[str, Any],
) -> tuple[dict[str, tuple[float, int]], Mapping[str, Any], Exception | None]:
    """Return the `norm_partials` of gradients, those to scale, and the error of either, or None.

    If they cannot be read, the partials are NaN, so that the norm fails on all ranks.
    """
    partials: dict[str, tuple[float, int]] = dict.fromkeys(gradients, (nan, 0))
    distinct: Mapping[str, Any] = {}
    try:
        partials = norm_partials(gradients)
        may_share = scale(gradients, 1)  # only checks
        distinct = distinct_memory(gradients) if may_share else gradients
    except Exception as error:  # all ranks raise it: they wait for this one
        return partials, distinct, error
    return partials, distinct, None


def _collect_squares(
    rank: int, limit: float, texts: Sequence[bytes]
) -> tuple[list[float], dict[int, str]]:
    """Return each rank's sum of squares, in rank order, and the problems of ranks by rank.

    `rank`: this rank, for the error. `limit`: this rank's `max_norm`. `texts`: by rank, a message
    ``clip <max_norm> <sum of squares> <problem>``. Raises CollectiveError if a message is from
    another call, has another limit, or has a problem and no sum.
    """
    squares_of_ranks, problems = [], {}
    for other, text in enumerate(texts):
        command, _, rest = text.partition(b" ")
        other_limit, _, rest = rest.partition(b" ")
        if command == b"clip" and float(other_limit) == limit:
            squares, _, problem = rest.partition(b" ")
            squares_of_ranks.append(float(squares))
            if problem:
                problems[other] = problem.decode()
            if problem and isnan(squares_of_ranks[-1]):
                reason = f"gradients of rank {other} cannot be clipped: {problems[other]}"
                raise _clip_error(rank, other, reason)
            continue
        difference = (
            f"has max_norm={other_limit.decode()}"
            if command == b"clip"
            else "does something else here"
        )
        raise _clip_error(rank, other, f"max_norm is {limit!r}, and rank {other} {difference}")
    return squares_of_ranks, problems


def _clip_error(rank: int, bad: int | None, reason: str) -> CollectiveError:
    """Return the error of `clip_grad_norm` on `rank`; `bad`: the rank at fault, None if unknown."""
    text = f"clip_grad_norm on rank {rank}: {reason}; nothing was changed"
    return CollectiveError(text, name="clip_grad_norm", rank=bad)
