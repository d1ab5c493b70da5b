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
    is_tree = check_order(order, "rank") == "tree"
    if is_tree:
        bind_units(sharding_units, group.rank, group.world_size)
    partials, distinct, problem = _find_partials(gradients, sharding_units if is_tree else {})
    own_squares = squares_in_order(partials.values())
    why = "" if problem is None else f"{type(problem).__name__}: {problem}"
    text = f"clip:{order} {limit!r} {own_squares!r} {why}"
    texts = group.gather_bytes(text.encode(), timeout=timeout)
    if problem is not None and isnan(own_squares):
        raise problem
    rank_squares, problems = _collect_squares(group.rank, order, limit, texts)
    if is_tree:
        total = _squares_in_tree(sharding_units, gradients, group, timeout)
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
    gradients: Mapping[str, Any], units: Mapping[str, FSDPShardingUnit]
) -> tuple[dict[str, tuple[float, int]], Mapping[str, Any], Exception | None]:
    """Return the `norm_partials` of gradients, those to scale, and the error of either, or None.

    If they cannot be read, the partials are NaN, so that the norm fails on all ranks. `units`: with
    order="tree", whose parts the gradients must have.
    """
    partials: dict[str, tuple[float, int]] = dict.fromkeys(gradients, (nan, 0))
    distinct: Mapping[str, Any] = {}
    try:
        for name in gradients if units else ():
            _check_part(units[name])
        partials = norm_partials(gradients)
        may_share = scale(gradients, 1)  # only checks
        distinct = distinct_memory(gradients) if may_share else gradients
    except Exception as error:  # all ranks raise it: they wait for this one
        return partials, distinct, error
    return partials, distinct, None


def _check_part(unit: FSDPShardingUnit) -> None:
    """Raise CompatibilityError unless the local gradient of `unit` can be added in a tree."""
    got = f"{tuple(unit.local_gradient.shape)}, {location_of(unit.local_gradient)}"
    if tuple(unit.local_gradient.shape) != unit.local_shape or not on_host(unit.local_gradient):
        raise CompatibilityError(
            f"'{unit.parameter_name}': order='tree' needs a gradient of shape {unit.local_shape} "
            f"in main memory, got {got}",
            name=unit.parameter_name,
            got=got,
        )


def _squares_in_tree(
    units: Mapping[str, FSDPShardingUnit],
    gradients: Mapping[str, Any],
    group: Any,
    timeout: float | None,
) -> float:
    """Return the sum of squares of all parameters, each in a tree over its elements.

    All ranks must call this: they exchange the sums of the subtrees that each of them has, 0 for a
    missing gradient. Raises CollectiveError if a rank has other units.
    """
    names, sums = sorted(units), []
    for name in names:
        start, count = sum(units[name].counts[: group.rank]), units[name].counts[group.rank]
        if name in gradients:
            sums += _core.tree_squares(packed(detached(gradients[name])), start)
        else:
            sums += [0.0 for _ in subtrees(start, start + count)]
    facts = digest_of((units[name].fact for name in names), {})
    messages = group.gather_bytes(facts + array("d", sums).tobytes(), timeout=timeout)
    for other, message in enumerate(messages):
        if message[: len(facts)] != facts:
            reason = f"rank {other} has other parameters, shapes or layouts than rank {group.rank}"
            raise _clip_error(group.rank, other, reason)
    rank_sums = [iter(array("d", message[len(facts) :])) for message in messages]
    return squares_in_order((squares_root(units[name].counts, rank_sums), 0) for name in names)


def _collect_squares(
    rank: int, order: str, limit: float, texts: Sequence[bytes]
) -> tuple[list[float], dict[int, str]]:
    """Return each rank's sum of squares, in rank order, and the problems of ranks by rank.

    `rank`: this rank, for the error. `order`, `limit`: this rank's arguments. `texts`: by rank, a
    message ``clip:<order> <max_norm> <sum of squares> <problem>``. Raises CollectiveError if a
    message is from another call, has another order or limit, or has a problem and no sum.
    """
    squares_of_ranks, problems = [], {}
    for other, text in enumerate(texts):
        command, _, rest = text.partition(b" ")
        other_limit, _, rest = rest.partition(b" ")
        kind, _, other_order = command.partition(b":")
        if command == f"clip:{order}".encode() and float(other_limit) == limit:
            squares, _, problem = rest.partition(b" ")
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
    return squares_of_ranks, problems


def _clip_error(rank: int, bad: int | None, reason: str) -> CollectiveError:
    """Return the error of `clip_grad_norm` on `rank`; `bad`: the rank at fault, None if unknown."""
    text = f"clip_grad_norm on rank {rank}: {reason}; nothing was changed"
    return CollectiveError(text, name="clip_grad_norm", rank=bad)
