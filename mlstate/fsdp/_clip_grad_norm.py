"""`clip_grad_norm`: norm of all ranks' gradients, scaling to `max_norm`; ranks that disagree."""

from __future__ import annotations

from array import array
from math import isfinite, isnan, nan, sqrt
from typing import TYPE_CHECKING, Any

from .. import _core
from .._common.arguments import check_number
from ..collectives._arguments import check_group
from ..errors import CollectiveError, CompatibilityError
from ._gradient_ops import (
    detached,
    distinct_memory,
    location_of,
    norm_partials,
    on_host,
    packed,
    scale,
    squares_in_order,
)
from ._leaf_order import check_order, squares_root, subtrees
from ._reducer import digest_of
from ._sharding_unit import bind_units, check_unit_types

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..collectives import ProcessGroup
    from ._sharding_unit import FSDPShardingUnit


def clip_grad_norm(
    sharding_units: Mapping[str, FSDPShardingUnit],
    max_norm: float,
    group: ProcessGroup,
    *,
    order: str = "rank",
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
    order : {"rank", "tree"}, default "rank"
        ``"tree"``: the bits of the norm are the same for any number of ranks, with units of flat
        parts or of rows. Each parameter's squares are added in float64 in one binary tree over
        the indices of its elements, then the parameters in name order.
    timeout : float, optional
        Timeout in seconds. Default: the group's timeout.

    Returns
    -------
    float
        The global norm before scaling, bit-identical on every rank: squares are added in
        float64, with ``order="rank"`` by parameter in name order, then by rank.

    Raises
    ------
    ValueError
        If `max_norm` is negative or NaN, a gradient is read-only, or two gradients share
        memory, but not as one array. With ``order="tree"``, also if a unit belongs to another rank.
    TypeError
        If an argument has a wrong type.
    CompatibilityError
        If a gradient of this rank has a dtype that cannot be scaled.
    CollectiveError
        On every rank, if the norm is not finite, a rank passed another `max_norm` or `order`, or
        another rank's gradient cannot be read or scaled; with ``order="tree"``, also if a rank has
        other units. The gradients are unchanged.

    Notes
    -----
    Gradients are multiplied by ``max_norm / (norm + 1e-6)``, as by
    ``torch.nn.utils.clip_grad_norm_``. If several units have one array as gradient, each counts in
    the norm, and the array is multiplied once.

    With ``order="tree"``, a rank sends at most 2 log2(n) numbers for a parameter of which it has n
    elements: the sums of the largest parts of the tree that it has completely. Parts of columns
    would need a number for each row, and have no unit. Gradients must be in main memory.

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
    sums_sent = b""
    if check_order(order, "rank") == "tree":
        bind_units(sharding_units, group.rank, group.world_size)
        sums_sent, partials, problem = _find_subtrees(sharding_units, gradients, partials, problem)
    own_squares = squares_in_order(partials.values())
    why = "" if problem is None else f"{type(problem).__name__}: {problem}"
    text = f"clip:{order} {limit!r} {own_squares!r} {sums_sent.hex() or '-'} {why}"
    texts = group.gather_bytes(text.encode(), timeout=timeout)
    if problem is not None and isnan(own_squares):
        raise problem
    rank_squares, problems, rank_subtrees = _collect_squares(group.rank, order, limit, texts)
    if order == "tree":
        total = _add_subtrees(group.rank, sharding_units, rank_subtrees)
    else:
        total = squares_in_order((squares, 0) for squares in rank_squares)  # 0: count is unused
    norm = sqrt(total)
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


def _facts_digest(units: Mapping[str, FSDPShardingUnit]) -> bytes:
    """Return 16 bytes that are equal on ranks with the same parameters and layouts."""
    return digest_of((units[name].fact for name in sorted(units)), {})


def _find_subtrees(
    units: Mapping[str, FSDPShardingUnit],
    gradients: Mapping[str, Any],
    partials: dict[str, tuple[float, int]],
    problem: Exception | None,
) -> tuple[bytes, dict[str, tuple[float, int]], Exception | None]:
    """Return this rank's sums of subtrees as bytes, and `_find_partials` with an error of this one.

    The bytes are a digest of the units and, in name order, the sums of each unit's part. A missing
    gradient has sums of 0. `partials`, `problem`: of the gradients.
    """
    sums: list[float] = []
    try:
        for name in sorted(units):
            unit = units[name]
            start, count = sum(unit.counts[: unit.shard_index]), unit.counts[unit.shard_index]
            if name not in gradients:
                sums += [0.0] * len(list(subtrees(start, start + count)))
                continue
            gradient = packed(detached(gradients[name]))
            if tuple(gradient.shape) != unit.local_shape or not on_host(gradient):
                raise CompatibilityError(
                    f"'{name}': order='tree' needs a gradient of shape {unit.local_shape} in main "
                    f"memory, got {tuple(gradient.shape)}, {location_of(gradient)}",
                    name=name,
                )
            sums += _core.tree_squares(gradient, start)
    except Exception as error:  # all ranks raise it: they wait for this one
        return b"", dict.fromkeys(gradients, (nan, 0)), problem or error
    return _facts_digest(units) + array("d", sums).tobytes(), partials, problem


def _add_subtrees(
    rank: int, units: Mapping[str, FSDPShardingUnit], messages: Sequence[bytes]
) -> float:
    """Return the sum of squares of all parameters.

    `rank`: this rank, for the error. `messages`: by rank, as of `_find_subtrees`. Raises
    CollectiveError if a rank has other units.
    """
    for other, message in enumerate(messages):
        if message[:16] != _facts_digest(units):
            reason = f"rank {other} has other parameters, shapes or layouts than rank {rank}"
            raise _clip_error(rank, other, reason)
    rest = [iter(array("d", message[16:])) for message in messages]
    total = 0.0
    for name in sorted(units):
        parts, start = [], 0
        for other, count in enumerate(units[name].counts):
            sums = [next(rest[other]) for _ in subtrees(start, start + count)]
            parts.append((count, sums))
            start += count
        total += squares_root(parts)
    return total


def _collect_squares(
    rank: int, order: str, limit: float, texts: Sequence[bytes]
) -> tuple[list[float], dict[int, str], list[bytes]]:
    """Return in rank order the sums of squares, by rank the problems, and in rank order subtrees.

    `rank`: this rank, for the error. `order`, `limit`: this rank's arguments. `texts`: by rank, a
    message ``clip:<order> <max_norm> <sum of squares> <subtrees in hex, or -> <problem>``. Raises
    CollectiveError if a message is from another call, has another order or limit, or has a problem
    and no sum.
    """
    squares_of_ranks, problems, subtrees_of_ranks = [], {}, []
    for other, text in enumerate(texts):
        command, _, rest = text.partition(b" ")
        other_limit, _, rest = rest.partition(b" ")
        kind, _, other_order = command.partition(b":")
        if command == f"clip:{order}".encode() and float(other_limit) == limit:
            squares, _, rest = rest.partition(b" ")
            subtrees_text, _, problem = rest.partition(b" ")
            subtrees_of_ranks.append(bytes.fromhex(subtrees_text.decode().strip("-")))
            squares_of_ranks.append(float(squares))
            if problem:
                problems[other] = problem.decode()
            if problem and isnan(squares_of_ranks[-1]):
                reason = f"gradients of rank {other} cannot be clipped: {problems[other]}"
                raise _clip_error(rank, other, reason)
            continue
        difference = "does something else here"
        if kind == b"clip":
            difference = f"has max_norm={other_limit.decode()}"
            if other_order.decode() != order:
                difference = f"has order={other_order.decode()!r}, not {order!r}"
        raise _clip_error(rank, other, f"max_norm is {limit!r}, and rank {other} {difference}")
    return squares_of_ranks, problems, subtrees_of_ranks


def _clip_error(rank: int, bad: int | None, reason: str) -> CollectiveError:
    """Return the error of `clip_grad_norm` on `rank`; `bad`: the rank at fault, None if unknown."""
    text = f"clip_grad_norm on rank {rank}: {reason}; nothing was changed"
    return CollectiveError(text, name="clip_grad_norm", rank=bad)
