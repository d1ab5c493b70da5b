"""Division of items into batches of few bytes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_Item = TypeVar("_Item")


def batches_of(
    items: Iterable[_Item],
    size_of: Callable[[_Item], int],
    most_bytes: int,
    most: int = sys.maxsize,
) -> Iterator[list[_Item]]:
    """Yield successive items in batches of at most `most_bytes`; a larger item is alone.

    `size_of`: returns the bytes of an item. `most`: number of items in a batch.
    """
    batch: list[_Item] = []
    left = most_bytes
    for item in items:
        size = size_of(item)
        if batch and (size > left or len(batch) == most):
            yield batch
            batch, left = [], most_bytes
        batch.append(item)
        left -= size
    if batch:
        yield batch
