"""Plan the transition of states between Core ML models; public through `mlstate.coreml`."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .._common.set_module import set_module
from .._common.text import bytes_text, table_html
from ._specs import (
    AXES,
    SEQUENCE,
    StateSpec,
    StateSpecs,
    choose,
    incompatible,
    shape_text,
    too_small,
    warn_of_shapes,
)

if TYPE_CHECKING:
    from ..errors import CapacityError, CompatibilityError
    from ._specs import Source

# ---- planning ----


@set_module("mlstate.coreml")
class StateMove(NamedTuple):
    """The effect of a transition on one state.

    Attributes
    ----------
    name : str
        Name of the state.
    direction : {"expand", "compact", "same", "none"}
        "none" if the state cannot move.
    source_shape, target_shape : tuple of int or None
        None if the model has no state with this name.
    copied_bytes, zeroed_bytes : int
        Bytes of the target, in its dtype; both 0 if the state cannot move.
    problem : str or None
        Why the state cannot move, and the remedy.
    """

    name: str
    direction: Literal["expand", "compact", "same", "none"]
    source_shape: tuple[int, ...] | None
    target_shape: tuple[int, ...] | None
    copied_bytes: int
    zeroed_bytes: int
    problem: str | None


@set_module("mlstate.coreml")
class TransitionPlan(NamedTuple):
    """The effect of moving every state from one model to another; see `plan_transition`.

    It prints as a table, in notebooks as HTML.

    Attributes
    ----------
    position : int
        Number of tokens in the cache.
    moves : tuple of StateMove
        One for each state of either model: the target's states in order, then the states that
        only the source has.
    source_bytes, target_bytes : int
        Bytes of all states of each model.
    """

    position: int
    moves: tuple[StateMove, ...]
    source_bytes: int
    target_bytes: int

    @property
    def problems(self) -> tuple[str, ...]:
        """One message for each state that cannot move."""
        return tuple(move.problem for move in self.moves if move.problem is not None)

    @property
    def fits(self) -> bool:
        """Whether every state can move."""
        return not self.problems

    @property
    def copied_bytes(self) -> int:
        """Copied bytes of all states."""
        return sum(move.copied_bytes for move in self.moves)

    @property
    def zeroed_bytes(self) -> int:
        """Zero-padded bytes of all states."""
        return sum(move.zeroed_bytes for move in self.moves)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data that the json module can write."""
        return {
            "position": self.position,
            "fits": self.fits,
            "source_bytes": self.source_bytes,
            "target_bytes": self.target_bytes,
            "copied_bytes": self.copied_bytes,
            "zeroed_bytes": self.zeroed_bytes,
            "problems": list(self.problems),
            "moves": [move._asdict() for move in self.moves],
        }

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                move.name,
                move.direction,
                shape_text(move.source_shape),
                shape_text(move.target_shape),
                bytes_text(move.copied_bytes),
                bytes_text(move.zeroed_bytes),
            )
            for move in self.moves
        ]

    def _summary(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"{self.position} tokens: {verdict}; {bytes_text(self.copied_bytes)} copied, "
            f"{bytes_text(self.zeroed_bytes)} zeroed; states take "
            f"{bytes_text(self.source_bytes)} -> {bytes_text(self.target_bytes)}"
        )

    def __str__(self) -> str:
        rows = [_HEADINGS, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
        lines = []
        for row in rows:
            left = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=False)]
            right = [cell.rjust(width) for cell, width in zip(row[4:], widths[4:], strict=True)]
            lines.append("  ".join([*left, *right]).rstrip())
        lines.append(self._summary())
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape

        table = table_html(self._summary(), _HEADINGS, self._rows())
        problems = "".join(f"<li>{escape(text[:500])}</li>" for text in self.problems[:_HTML_ROWS])
        return table + (f"<ul>{problems}</ul>" if problems else "")


_HEADINGS = ("state", "move", "source", "target", "copied", "zeroed")
_HTML_ROWS = 50


class Fault:
    """Why a state cannot move: message, expected and actual value, and the kind of error."""

    __slots__ = ("capacity", "expected", "got", "message")

    def __init__(
        self, message: str, expected: object, got: object, *, capacity: bool = False
    ) -> None:
        self.message = message
        self.expected = expected
        self.got = got
        self.capacity = capacity

    def error(self, name: str) -> CapacityError | CompatibilityError:
        """Return the exception for the state called `name`."""
        if self.capacity:
            return too_small(self.message, name, self.expected, self.got)
        return incompatible(self.message, name, self.expected, self.got)


def shape_fault(name: str, source: tuple[int, ...], target: tuple[int, ...]) -> Fault | None:
    for label, shape in (("source", source), ("target", target)):
        if len(shape) != len(AXES):
            return Fault(
                f"{name}: the {label} state has the shape {shape}; a KV state has 4 dimensions "
                "(layers, heads, sequence, head dimension)",
                "4 dimensions",
                f"{len(shape)} dimensions",
            )
    for axis, label in enumerate(AXES):
        if axis != SEQUENCE and source[axis] != target[axis]:
            return Fault(
                f"{name}: {label} differ{'s' if axis == 3 else ''}: the source state is {source}, "
                f"the target state {target}; use models that were converted from the same weights",
                f"{label} {target[axis]}",
                f"{label} {source[axis]}",
            )
    return None


def position_fault(
    name: str, source_length: int | None, target_length: int, position: int
) -> Fault | None:
    if source_length is not None and position > source_length:
        return Fault(
            f"{name}: position {position} is beyond the source state's {source_length} "
            f"positions; pass the number of tokens that were processed",
            f"0..{source_length}",
            position,
            capacity=True,
        )
    if position > target_length:
        return Fault(
            f"{name}: {position} tokens do not fit the target state's {target_length} positions; "
            f"choose a model with at least {position}",
            f"0..{target_length}",
            position,
            capacity=True,
        )
    return None


def as_position(position: int) -> int:
    try:
        number = index(position)
    except TypeError:
        raise TypeError(f"position must be an integer, got {type(position).__name__}") from None
    if number < 0:
        raise too_small(
            f"position {number} is negative; pass the number of tokens in the cache",
            "position",
            "0 or more",
            number,
        )
    return number


def _plan_state(
    name: str, source: StateSpec | None, target: StateSpec | None, position: int
) -> StateMove:
    shapes = (source and source.shape, target and target.shape)
    problem = None
    if source is None or target is None:
        which = "source" if source is None else "target"
        problem = f"{name}: the {which} model has no state of this name"
    elif source.dtype.kind != target.dtype.kind:
        problem = f"{name}: {source.dtype} in the source model, {target.dtype} in the target"
    else:
        fault = shape_fault(name, source.shape, target.shape) or position_fault(
            name, source.shape[SEQUENCE], target.shape[SEQUENCE], position
        )
        problem = fault.message if fault else None
    if source is None or target is None or problem is not None:
        return StateMove(name, "none", *shapes, 0, 0, problem)
    lengths = source.shape[SEQUENCE], target.shape[SEQUENCE]
    direction: Literal["expand", "compact", "same"] = (
        "expand" if lengths[0] < lengths[1] else "compact" if lengths[0] > lengths[1] else "same"
    )
    copied = target.nbytes // lengths[1] * position
    return StateMove(name, direction, *shapes, copied, target.nbytes - copied, None)


@set_module("mlstate.coreml")
def plan_transition(
    source: Source,
    target: Source,
    position: int,
    *,
    source_function: str | None = None,
    target_function: str | None = None,
) -> TransitionPlan:
    """Plan the move of all states from one Core ML model to another.

    Nothing is moved and no model is loaded: the plan needs only the declared states.

    Parameters
    ----------
    source, target : str or path-like, MLModel, specification, or StateSpecs
        The models, in any form that `state_specs` accepts, or its result.
    position : int
        Number of tokens in the cache.
    source_function, target_function : str, optional
        Function of a multi-function model. With both, the two models may be the same.

    Returns
    -------
    TransitionPlan
        ``fits``, ``moves``, ``problems`` and byte counts; prints as a table.

    Raises
    ------
    CapacityError
        `position` is negative. A position that is too large is a problem of the plan instead.
    FormatError, StoreError, CompatibilityError, TypeError
        As for `state_specs`.

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
    number = as_position(position)
    specs = []
    for given, function in ((source, source_function), (target, target_function)):
        specs.append(choose(given, function))
        if not isinstance(given, StateSpecs):  # else state_specs has issued the warnings
            warn_of_shapes(specs[-1], stacklevel=2)
    have, want = specs
    names = [*want, *(name for name in have if name not in want)]
    return TransitionPlan(
        number,
        tuple(_plan_state(name, have.get(name), want.get(name), number) for name in names),
        sum(spec.nbytes for spec in have.values()),
        sum(spec.nbytes for spec in want.values()),
    )
