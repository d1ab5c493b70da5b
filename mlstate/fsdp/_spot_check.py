"""`SpotCheck`: another rank computes the gradients of a rank again, and their digests are compared.

Each rank takes its turn, so a rank that computes wrong values is found and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._common.arguments import check_int, check_type
from .._common.arrays import refuse_unstorable
from .._common.text import ranks_text, shorten
from ..collectives._arguments import check_group
from ..collectives._consensus import gather_values
from ..errors import CollectiveError
from ..state._digest import part_of, value_of
from ._disagreement import describe_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .._types import Array
    from ..collectives import ProcessGroup

_NAME_CHARACTERS = 80  # of a parameter in an error

Parts = dict[str, Any]  # digests of gradients by parameter, as JSON values


class SpotCheck:
    """Find a rank that computes wrong gradients, without a second training run.

    A leaf is a micro-batch with an index that is the same on all ranks. In some steps, one rank
    computes a leaf of another rank again, and the digests of both gradients are compared: every
    bit must be the same.

    Parameters
    ----------
    group : ProcessGroup
        The ranks. A group of one rank checks nothing.
    recompute : callable
        Called as ``recompute(leaf)`` on one rank; returns the gradients of that leaf by parameter,
        before any reduction. Weights, buffers and generators must be as when the leaf was computed,
        and unchanged afterwards. It must not call operations of a group, as the other ranks wait.
    every : int, default 10
        Check each step whose number is a multiple of this. The same on all ranks.

    Raises
    ------
    TypeError
        If `recompute` is not callable, or another argument has a wrong type.
    ValueError
        If `every` is below 1.

    Notes
    -----
    The ranks are checked in a fixed rotation of ``every * group.world_size`` steps: in each, every
    rank is checked once, by another rank than in the rotation before.

    - A persistent fault, which changes every leaf of a rank, is found within the steps of a
      rotation. One that changes one of `n` leaves of a step is found within `n` rotations, if
      `choose_leaf` chooses the leaf.
    - A transient fault, which changes one leaf, is found if this leaf is checked: with the
      probability ``1 / (every * leaves)``, if all ranks together compute `leaves` leaves in a step.
    - With three or more ranks, a third rank decides which of two ranks is wrong. With two, the
      error has no rank.

    A check takes the time of one leaf, in which the other ranks wait, and one pass over the
    gradients. Digests travel, gradients do not. The bits are the same only on the same kind of
    machine, with the same libraries and number of threads, and with deterministic operations.

    Examples
    --------
    >>> import numpy as np, mlstate
    >>> from mlstate.fsdp import SpotCheck
    >>> from mlstate.testing import run_ranks
    >>> def gradients_of(leaf):
    ...     return {"w": np.sin(np.arange(4.0) + leaf)}
    >>> def train(group, faulty):
    ...     check = SpotCheck(group, gradients_of, every=5)
    ...     for step in range(20):
    ...         leaf = step * group.world_size + group.rank
    ...         gradients = gradients_of(leaf)
    ...         if group.rank == faulty:
    ...             gradients["w"][3] *= 1 + 1e-15
    ...         check.compare(step, leaf, gradients)
    >>> run_ranks(3, lambda group: train(group, faulty=None))
    [None, None, None]
    >>> try:
    ...     run_ranks(3, lambda group: train(group, faulty=2))
    ... except mlstate.errors.CollectiveError as error:
    ...     print(error.rank, error.name, str(error)[:54])
    2 w SpotCheck at step 10: rank 2 computes wrong values: ra
    """

    __slots__ = ("__weakref__", "_every", "_group", "_recompute")

    def __init__(
        self,
        group: ProcessGroup,
        recompute: Callable[[int], Mapping[str, Array | None]],
        *,
        every: int = 10,
    ) -> None:
        """Check the arguments, which the class describes; sends nothing to other ranks."""
        self._group = check_group(group)
        if not callable(recompute):
            raise TypeError(f"recompute must be callable, got {type(recompute).__name__}")
        self._recompute = recompute
        self._every = check_int("every", every, 1)

    def choose_leaf(self, step: int, leaves: Sequence[int]) -> int:
        """Return which of this rank's leaves of a step to pass to `compare`: each in turn.

        Parameters
        ----------
        step : int
            Number of the step.
        leaves : sequence of int
            Indices of the leaves that this rank computes in this step.

        Returns
        -------
        int
            One of them, another one in the next rotation.
        """
        rotation: int = check_int("step", step, 0) // (self._every * self._group.world_size)
        return leaves[rotation % len(leaves)]

    def compare(self, step: int, leaf: int, gradients: Mapping[str, Array | None]) -> bool:
        """Check one rank if it is time; all ranks call this in each step, before the optimizer.

        Parameters
        ----------
        step : int
            Number of the step, from 0; the same on all ranks.
        leaf : int
            Index of a leaf that this rank has computed in this step.
        gradients : mapping of str to array
            Its gradients by parameter, before any reduction. None and a missing parameter are
            equal. They are read if this rank is checked, and never changed.

        Returns
        -------
        bool
            Whether a rank was checked in this step.

        Raises
        ------
        CollectiveError
            The gradients differ; on every rank. The message has the step, the leaf, the ranks and
            the parameter, which is also the attribute `name`; the attribute `rank` is the rank that
            computed wrong values, or None if it is unknown. Also if the ranks are at different
            steps, or if a rank failed with an error that is not of mlstate, such as one of
            `recompute`; that rank raises its own error.
        TypeError, ValueError
            `step` is not a number of a step, on any rank; or on this rank, another argument is
            wrong.
        """
        number, ranks = check_int("step", step, 0), self._group.world_size
        turn, rest = divmod(number, self._every)
        if rest or ranks == 1:
            return False
        checked = turn % ranks
        # the rank that computes the leaf again, and, if there are three, the one that decides
        distances = [(turn // ranks + i) % (ranks - 1) + 1 for i in range(min(ranks - 1, 2))]

        def describe() -> list[Any]:
            index = check_int("leaf", leaf, 0)
            check_type("gradients", gradients, Mapping, "a mapping of parameter names to arrays")
            parts = _parts_of(gradients) if self._group.rank == checked else None
            return [f"step {number}, every={self._every}", index, parts]

        described = gather_values(self._group, "spot check", describe)
        facts = {rank: text for rank, (text, _, _) in enumerate(described)}
        if len(set(facts.values())) > 1:
            odd, text = describe_difference(facts, "ranks are at different steps")
            raise CollectiveError(f"SpotCheck: {text}", rank=odd)
        _, leaf, parts = described[checked]
        by_rank: dict[int, Parts] = {checked: parts}
        for distance in distances:
            rank = (checked + distance) % ranks
            by_rank[rank] = self._recomputed(rank, leaf)
            if by_rank[rank] == parts and len(by_rank) == 2:
                return True
        raise _mismatch(number, leaf, checked, by_rank)

    def _recomputed(self, rank: int, leaf: int) -> Parts:
        """Return the digests of a leaf's gradients, which one rank computes, on every rank."""

        def recompute() -> Parts:
            if rank != self._group.rank:
                return {}
            gradients = self._recompute(leaf)
            check_type("the result of recompute", gradients, Mapping, "a mapping of str to arrays")
            return _parts_of(gradients)

        parts: Parts = gather_values(self._group, "spot check", recompute)[rank]
        return parts


def _parts_of(gradients: Mapping[str, Array | None]) -> Parts:
    """Return the digests of gradients; those that are None are left out."""
    existing = {name: array for name, array in gradients.items() if array is not None}
    refuse_unstorable(existing)
    return {name: part_of(array) for name, array in existing.items()}


def _fact_of(part: Any) -> str:
    """Return the digest of a gradient as text; None: the gradient is missing."""
    if part is None:
        return "no gradient"
    dtype, shape, _, lanes = part
    return f"{dtype} {tuple(shape)} {value_of(lanes)}"


def _mismatch(step: int, leaf: int, checked: int, by_rank: Mapping[int, Parts]) -> CollectiveError:
    """Return the error for gradients that ranks computed differently.

    `checked`: the rank that computed the leaf first. `by_rank`: the digests of each rank.
    """
    names = [*dict.fromkeys(name for parts in by_rank.values() for name in parts)]
    differing: dict[str, tuple[int | None, str]] = {}  # the rank that is wrong, or None; and a text
    for name in names:
        facts = {rank: _fact_of(by_rank[rank].get(name)) for rank in sorted(by_rank)}
        if len(set(facts.values())) > 1:
            differing[name] = describe_difference(facts, shorten(repr(name), _NAME_CHARACTERS))
    first, (_, text) = next(iter(differing.items()))
    [odd, *others] = {rank for rank, _ in differing.values()}
    ranks = ranks_text(sorted(by_rank))
    if odd is not None and not others:
        verdict = f"rank {odd} computes wrong values: {ranks} computed"
    elif len(by_rank) == 2:
        verdict, odd = f"{ranks} differ, and a third one that could decide is missing: both", None
    else:
        verdict, odd = f"{ranks} all differ (is `recompute` deterministic?): they computed", None
    return CollectiveError(
        f"SpotCheck at step {step}: {verdict} leaf {leaf} of rank {checked}, and "
        f"{len(differing)} of {len(names)} gradients differ, first {text}",
        name=first,
        rank=odd,
    )
