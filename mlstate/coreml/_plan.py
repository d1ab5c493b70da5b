"""`plan_transition` of Core ML: sources, functions and chunks that it compares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._common.arguments import check_flags
from ..kv._axis import valid_axis
from ..kv._transition_plan import TransitionPlan, as_position, plan_states
from ._specs import StateSpecs, choose_states, warn_of_shapes

if TYPE_CHECKING:
    from ._specs import Source, StateSpec


def plan_transition(
    source: Source,
    target: Source,
    position: int,
    *,
    source_function: str | None = None,
    target_function: str | None = None,
    seq_axis: int = -2,
    shared_state: bool = True,
) -> TransitionPlan:
    """Plan the move of all states from one Core ML model to another.

    Nothing is moved and no model is loaded: the plan needs only the declared states.

    Parameters
    ----------
    source, target : str or path-like, MLModel, specification, StateSpecs, or sequence of them
        The models, in any form that `state_specs` accepts, or its result. One plan covers all
        chunks of a model.
    position : int
        Number of tokens in the cache.
    source_function, target_function : str, optional
        Function of a multi-function model. With both, the two models may be the same.
    seq_axis : int
        As for `transition_coreml_state`; the same for all states.
    shared_state : bool
        Whether the chunks of a model share one state object, as in models of ANEMLL. With False,
        each chunk has its own, and names begin with the chunk, such as ``"chunk 1: kv_cache"``.

    Returns
    -------
    TransitionPlan
        ``fits``, ``moves``, ``problems`` and byte counts; prints as a table. A state that has
        the same shape in both models, such as a convolution's or a full window, is copied whole.

    Raises
    ------
    CapacityError
        `position` is negative. A position that is too large is a problem of the plan instead.
    FormatError, StoreError, CompatibilityError, TypeError
        As for `state_specs`. Also if `seq_axis` is not an integer from -8 to 7; an axis that a
        state does not have is a problem of the plan instead.

    Warns
    -----
    StateShapeWarning
        As for `state_specs`.

    Notes
    -----
    Byte counts are those of the target inside Core ML. On a Mac, states are read and written
    as float32, which takes twice the bytes of a float16 state during the move.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.coreml import StateSpec, StateSpecs, plan_transition
    >>> def model(length):
    ...     spec = StateSpec("kv_cache", (36, 1, length, 256), np.dtype(np.float16))
    ...     return StateSpecs({"main": {spec.name: spec}}, "main")
    >>> plan = plan_transition(model(256), model(512), 200)
    >>> print(plan)
    state     move    source        target          copied    zeroed
    kv_cache  expand  36x1x256x256  36x1x512x256  3.52 MiB  5.48 MiB
    200 tokens: fits; 3.52 MiB copied, 5.48 MiB zeroed; states take 4.50 MiB -> 9.00 MiB
    >>> plan_transition(model(512), model(256), 300).problems[0]
    "kv_cache: 300 tokens do not fit the target state's 256 positions; choose a model with \
at least 300"
    """
    number, seq_axis = as_position(position), valid_axis(seq_axis)
    check_flags(shared_state=shared_state)
    specs = []
    for model, function in ((source, source_function), (target, target_function)):
        parts = choose_states(model, function, shared_state=bool(shared_state))
        if not isinstance(model, StateSpecs):  # else state_specs has issued the warnings
            for part in parts:
                warn_of_shapes(part)
        specs.append(parts[0] if shared_state else _named_by_chunk(parts))
    return plan_states(specs[0], specs[1], number, lambda name: seq_axis)


def _named_by_chunk(parts: tuple[StateSpecs, ...]) -> dict[str, StateSpec]:
    """Return the states of all chunks in one mapping, by names such as ``"chunk 1: kv_cache"``."""
    return {
        f"chunk {number}: {name}": spec
        for number, part in enumerate(parts, 1)
        for name, spec in part.items()
    }
