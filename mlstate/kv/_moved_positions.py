"""Whether a model's state is moved, copied whole or refused: shapes, windows, capacity, errors.

`moved_positions` decides for plans, for the functions and managers of Core ML and Core AI, and for
`CacheState`. The shapes in the source and in the target tell the kinds of states apart:

- Equal shapes, of any rank: copied whole. These are recurrent and convolution states, counters,
  windows that are full in both models, and caches whose number of positions does not change.
- Shapes that differ in the sequence axis only: the first `position` positions move, if both shapes
  have as many. These are caches, and windows of ``min(window, context)`` positions that have not
  wrapped. A window that has wrapped is refused, because the order of its positions is not known.
- Any other shapes: refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._arguments import capacity_error, incompatible
from ._axis import with_length

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..errors import CapacityError

AXES = ("layers", "heads", "sequence", "head dimension")
SEQUENCE = 2


def moved_positions(
    name: str,
    source: tuple[int, ...],
    target: tuple[int, ...],
    position: int,
    seq_axis: int | None,
    *,
    contexts: tuple[int, int] | None = None,
    kind: str | None = None,
) -> int | None:
    """Return how many of a state's first positions move; None: the state is copied whole.

    Parameters
    ----------
    name : str
        Name of the state, for errors.
    source, target : tuple of int
        Its shape in the source and in the target.
    position : int
        Number of tokens that were processed.
    seq_axis : int or None
        The sequence axis; None for a state without one.
    contexts : (int, int), optional
        Context sizes of the source and of the target, if they are known. A state whose length
        differs must have ``min(window, context)`` positions in both.
    kind : str, optional
        Kind of the entry of a `CacheSpec`; None for the state of a model, whose kind is unknown.

    Returns
    -------
    int or None
        `position`, or None for equal shapes.

    Raises
    ------
    CompatibilityError
        The shapes differ in another axis than the sequence, or the lengths do not follow from the
        contexts, or the layout is unknown.
    CapacityError
        The tokens do not fit into the target, or exceed the source's positions.
    """
    if kind == "opaque":
        text = f"{name}: an opaque entry cannot be resized: its layout is unknown"
        raise incompatible(text, name, "a known layout", kind)
    if source == target:
        return None
    if seq_axis is None:
        text = f"{name}: a state without a sequence has the shape {source}, in the target {target}"
        raise incompatible(text, name, target, source)
    _check_layout(name, "target", target, seq_axis)
    if position > target[seq_axis]:
        raise _target_error(name, target, position, seq_axis, kind)
    _check_layout(name, "source", source, seq_axis)
    _check_shapes(name, source, target, seq_axis)
    if position > source[seq_axis]:
        raise _source_error(name, source, target, position, seq_axis)
    if contexts is not None:
        _check_window(name, (source[seq_axis], target[seq_axis]), contexts)
    return position


def differ_in_sequence(
    source: tuple[int, ...], target: tuple[int, ...], seq_axis: int | None
) -> bool:
    """Return whether the shapes `source` and `target` differ in the sequence axis only.

    `seq_axis` may be negative. False if it is None or not an axis of a cache of 2 to 8 dimensions,
    for shapes of different rank, and for equal shapes.
    """
    rank = len(source)
    if (
        seq_axis is None
        or len(target) != rank
        or not 2 <= rank <= 8
        or not -rank <= seq_axis < rank
    ):
        return False
    return source != target == with_length(source, seq_axis % rank, target[seq_axis])


def common_contexts(
    states: Iterable[tuple[tuple[int, ...], tuple[int, ...], int | None]],
) -> tuple[int, int] | None:
    """Return the context sizes of two models: the greatest lengths among states that differ.

    `states` has the shape in the source, the shape in the target, and the sequence axis of each
    state. None if no state differs in its sequence.
    """
    lengths = [
        (source[axis], target[axis])
        for source, target, axis in states
        if axis is not None and differ_in_sequence(source, target, axis)
    ]
    if not lengths:
        return None
    return max(source for source, _ in lengths), max(target for _, target in lengths)


def _check_window(name: str, lengths: tuple[int, int], contexts: tuple[int, int]) -> None:
    """Raise CompatibilityError unless both lengths are ``min(window, context)`` for one window.

    `name`: the state. `lengths`, `contexts`: positions of the state, and context sizes of the
    models, in source and target.
    """
    window = max(lengths)  # the lengths differ, so the greater one is the window or the context
    if lengths == (min(window, contexts[0]), min(window, contexts[1])):
        return
    raise incompatible(
        f"{name}: {lengths[0]} positions for a context of {contexts[0]}, and {lengths[1]} for "
        f"{contexts[1]}: how they relate to tokens is unknown, because they are not the smaller of "
        "a window and the context; use models that were converted with the same window",
        name,
        f"min(window, {contexts[0]}) and min(window, {contexts[1]})",
        lengths,
    )


def _target_error(
    name: str, target: tuple[int, ...], position: int, seq_axis: int, kind: str | None
) -> CapacityError:
    """Return the error for a target with fewer positions than `position`, the number of tokens.

    `name`: the state. `target`: its shape, with the sequence at `seq_axis`. `kind`: kind of a
    cache's entry; None: a state of a model, for which the remedy is another model.
    """
    length, text = target[seq_axis], f"{name}: {position} tokens do not fit"
    if kind is not None:
        text = f"{text} into {length} positions: use a capacity of at least {position}"
        return capacity_error(text, f"{position} or more", length, name)
    note = _axis_note(target, seq_axis)
    text = (
        f"{text} the target state's {length} positions{note}; choose a model with at least "
        f"{position}"
    )
    return capacity_error(text, f"0..{length}", position, name)


def _source_error(
    name: str, source: tuple[int, ...], target: tuple[int, ...], position: int, seq_axis: int
) -> CapacityError:
    """Return the error for more tokens, `position`, than the source has positions.

    `source`, `target`: shapes of the state `name`, with the sequence at `seq_axis`.
    """
    length = source[seq_axis]
    text = (
        f"{name}: position {position} is beyond the source state's {length} positions"
        f"{_axis_note(source, seq_axis)}; pass the number of tokens that were processed. A window "
        f"that has wrapped cannot move to {target[seq_axis]} positions, because their order is "
        "unknown"
    )
    return capacity_error(text, f"0..{length}", position, name)


def _check_layout(name: str, label: str, shape: tuple[int, ...], seq_axis: int) -> None:
    """Raise CompatibilityError unless `shape` has 2 to 8 dimensions and the axis `seq_axis`.

    `name`: the state; `label`: "source" or "target", for the message.
    """
    rank = len(shape)
    if not 2 <= rank <= 8:
        text = (
            f"{name}: the {label} state has the shape {shape}; a KV state has 2 to 8 dimensions, "
            "such as (layers, heads, sequence, head dimension)"
        )
        raise incompatible(text, name, "2 to 8 dimensions", f"{rank} dimensions")
    if not -rank <= seq_axis < rank:
        text = (
            f"{name}: seq_axis {seq_axis} is outside {-rank}..{rank - 1}: the {label} state has "
            f"the shape {shape}"
        )
        raise incompatible(text, name, f"{-rank}..{rank - 1}", seq_axis)


def _is_named(rank: int, seq_axis: int) -> bool:
    """Return whether `AXES` names the axes: there are four, and the sequence is the third."""
    return rank == len(AXES) and seq_axis % rank == SEQUENCE


def _check_shapes(
    name: str, source: tuple[int, ...], target: tuple[int, ...], seq_axis: int
) -> None:
    """Raise CompatibilityError unless two shapes of a state differ only in the sequence axis.

    `source`, `target`: the shapes of the state `name` in the two models. `seq_axis` may be
    negative; `_check_layout` has accepted it for both.
    """
    states = (
        f"the source state is {source}, the target state {target}; use models that were converted "
        "from the same weights"
    )
    rank = len(source)
    if rank != len(target):
        text = f"{name}: numbers of dimensions differ: {states}"
        raise incompatible(text, name, f"{len(target)} dimensions", f"{rank} dimensions")
    for axis in range(rank):
        if axis != seq_axis % rank and source[axis] != target[axis]:
            is_named = _is_named(rank, seq_axis)
            label = AXES[axis] if is_named else f"lengths of axis {axis}"
            text = f"{name}: {label} differ{'s' if is_named and axis == 3 else ''}: {states}"
            raise incompatible(text, name, f"{label} {target[axis]}", f"{label} {source[axis]}")


def _axis_note(shape: tuple[int, ...], seq_axis: int) -> str:
    """Return a text that names the sequence axis, for messages; "" for the layout of `AXES`."""
    rank = len(shape)
    return "" if _is_named(rank, seq_axis) else f" (sequence axis {seq_axis % rank} of {shape})"
