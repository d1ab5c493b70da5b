"""`stops` and `snapshots=`: positions at which a prefill stops for a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from .._common.arguments import check_int

if TYPE_CHECKING:
    from collections.abc import Iterable

Snapshots: TypeAlias = "str | int | Iterable[int]"


def checked_policy(policy: Snapshots) -> str | int | tuple[int, ...]:
    """Return `policy`, the argument ``snapshots=``, with positions as a sorted tuple.

    Raises ValueError or TypeError for an unknown name, a number below 1, or another type.
    """
    if isinstance(policy, str):
        if policy not in ("end", "powers"):
            raise ValueError(f'snapshots must be "end", "powers", an int or positions: {policy!r}')
        return policy
    if hasattr(policy, "__iter__"):
        return tuple(sorted({check_int("snapshots", each, 1) for each in policy}))
    return check_int("snapshots", policy, 1, also=', "end", "powers" or positions')


def positions(
    policy: str | int | tuple[int, ...], length: int, start: int, least: int
) -> list[int]:
    """Return the positions after `start` at which a prefill of `length` tokens stops, increasing.

    `policy`: from `checked_policy`. The one before the last token, ``length - 1``, is always among
    them, unless it is not after `start`. `least`: the powers of two begin at it or above.
    """
    last = length - 1
    chosen: Iterable[int] = ()
    if isinstance(policy, tuple):
        chosen = policy
    elif isinstance(policy, int):
        chosen = range(policy * (start // policy + 1), last, policy)
    elif policy == "powers":
        chosen = [1 << k for k in range((least - 1).bit_length(), max(last, 1).bit_length())]
    return sorted({each for each in (*chosen, last) if start < each <= last})
