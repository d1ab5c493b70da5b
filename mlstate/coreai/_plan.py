"""`plan_transition` of Core AI: two models, or two sizes of one with a dynamic axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kv._arguments import as_count, incompatible
from ..kv._model_states import shape_text
from ..kv._transition_plan import TransitionPlan, as_position, plan_states
from ._specs import StateSpecs, choose, find_axis

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._specs import Source, StateSpec


def _with_size(
    specs: StateSpecs, which: str, size: int | None, axes: Mapping[str, int | None]
) -> dict[str, StateSpec]:
    """Return the states of a model by name, with fixed shapes for a context of `size` positions.

    `which`: "source" or "target", for errors. `size`: None if the caller passed none. `axes`:
    sequence axes of the states by name. Raises CompatibilityError if a dynamic state has no size,
    or if `size` is not the length of a state of a model with fixed shapes.
    """
    dynamic = next((spec for spec in specs.values() if None in spec.shape), None)
    if size is None:
        if dynamic is not None:
            text = (
                f"{dynamic.name}: the {which} model is dynamic ({shape_text(dynamic.shape)}): "
                f"pass {which}_size="
            )
            raise incompatible(text, f"{which}_size", "a number of positions", None)
        return dict(specs)
    size = as_count("size", size, 1)
    if dynamic is None:
        lengths = _fixed_lengths(specs, axes)
        if lengths and size not in lengths:
            text = (
                f"{which}_size is {size}, but the states of the {which} model have "
                f"{', '.join(map(str, lengths))} positions: pass a dynamic model, or the model of "
                "this size"
            )
            raise incompatible(text, f"{which}_size", lengths, size)
    return {name: spec.with_size(size) for name, spec in specs.items()}


def _fixed_lengths(specs: StateSpecs, axes: Mapping[str, int | None]) -> list[int | None]:
    """Return the different sequence lengths of the states; None is a dynamic one.

    `axes`: their sequence axes by name; states without one are left out.
    """
    lengths = dict[int | None, None]()  # a set in the order of the states
    for name, spec in specs.items():
        axis = axes.get(name)
        if axis is not None and axis < len(spec.shape):
            lengths[spec.shape[axis]] = None
    return list(lengths)


def plan_transition(
    source: Source,
    target: Source,
    position: int,
    *,
    source_size: int | None = None,
    target_size: int | None = None,
    source_function: str | None = None,
    target_function: str | None = None,
    seq_axis: int | None = None,
) -> TransitionPlan:
    """Plan the move of all states from one Core AI model, or context size, to another.

    Nothing is moved and no model is loaded: the plan needs only the declared states.

    Parameters
    ----------
    source, target : str or path-like, AIModelAsset, AIModel, InferenceFunction, or StateSpecs
        The models, in any form that `state_specs` accepts, or its result. May be the same.
    position : int
        Number of tokens in the cache.
    source_size, target_size : int, optional
        Context sizes; needed for a model whose sequence is dynamic.
    source_function, target_function : str, optional
        Function of a model with several.
    seq_axis : int, optional
        The sequence axis of states with fixed shapes. Default: as `state_specs` finds it from
        both models.

    Returns
    -------
    mlstate.coreml.records.TransitionPlan
        ``fits``, ``moves``, ``problems`` and byte counts; prints as a table. A state that has
        the same shape in both models, such as a convolution's or a full window, is copied whole.

    Raises
    ------
    CapacityError
        `position` is negative. A position that is too large is a problem of the plan instead.
    CompatibilityError
        A model is dynamic and its size is missing, a size differs from the size of a model with
        fixed shapes, or the sequence axis cannot be found. A ValueError.
    ChecksumError, FormatError, StoreError, ImportError, TypeError
        As for `state_specs`.

    Examples
    --------
    >>> from mlstate.coreai import plan_transition
    >>> model = {"k_cache": (2, 1, 2, None, 8), "v_cache": (2, 1, 2, None, 8)}
    >>> print(plan_transition(model, model, 50, source_size=64, target_size=128))
    state    move    source       target          copied    zeroed
    k_cache  expand  2x1x2x64x8   2x1x2x128x8   3.12 KiB  4.88 KiB
    v_cache  expand  2x1x2x64x8   2x1x2x128x8   3.12 KiB  4.88 KiB
    50 tokens: fits; 6.25 KiB copied, 9.75 KiB zeroed; states take 8.00 KiB -> 16.00 KiB
    """
    number = as_position(position)
    have = choose(source, source_function, seq_axis)
    want = choose(target, target_function, seq_axis)
    axes = {name: find_axis(spec, want[name]) for name, spec in have.items() if name in want}
    source_states = _with_size(have, "source", source_size, axes)
    target_states = _with_size(want, "target", target_size, axes)
    return plan_states(source_states, target_states, number, axes.get)
