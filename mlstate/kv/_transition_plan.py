"""`TransitionPlan`: which states of a model move, the bytes, and the problems; its table.

Shared by `mlstate.coreml`, which exports the classes, and `mlstate.coreai`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .._common.report import Table
from .._common.set_module import set_module
from .._common.text import bytes_text, printable, shorten
from ..errors import CapacityError, CompatibilityError
from ._arguments import as_integer, capacity_error
from ._model_states import shape_text
from ._moved_positions import common_contexts, moved_positions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@set_module("mlstate.coreml.records")
class StateMove(NamedTuple):
    """The effect of a transition on one state.

    Attributes
    ----------
    name : str
        Name of the state.
    direction : {"expand", "compact", "same", "none"}
        "same": the shapes are equal and the state is copied whole. "none": it cannot move.
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


@set_module("mlstate.coreml.records")
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

    def _table(self, title: str = "") -> Table:
        """Return a row for each state."""
        rows = [
            (name, direction, shape_text(source), shape_text(target), *nbytes)
            for name, direction, source, target, *nbytes, _ in self.moves
        ]
        return Table(title, _COLUMNS, rows)

    def _summary(self) -> str:
        """Return one line: whether the states can move, and the bytes of all of them."""
        verdict = "fits" if self.fits else "does not fit"
        if self.moves and all(move.direction == "same" for move in self.moves):
            verdict = "every state has the same shape in both models, so length is not checked"
        return (
            f"{self.position} tokens: {verdict}; {bytes_text(self.copied_bytes)} copied, "
            f"{bytes_text(self.zeroed_bytes)} zeroed; states take "
            f"{bytes_text(self.source_bytes)} -> {bytes_text(self.target_bytes)}"
        )

    def __str__(self) -> str:
        """Return the states as a table of text, a summary, and the problems."""
        table = self._table().text(len(self.moves), _WIDTH, right_numbers=True)
        lines = [self._summary(), *(f"problem: {problem}" for problem in self.problems)]
        return "\n".join([table, *map(printable, lines)])

    def _repr_html_(self) -> str:
        from html import escape

        table = self._table(self._summary()).html()
        problems = "".join(
            f"<li>{escape(shorten(text, 500))}</li>" for text in self.problems[:_HTML_ROWS]
        )
        return table + (f"<ul>{problems}</ul>" if problems else "")


_COLUMNS = ["state", "move", "source", "target", "copied [B]", "zeroed [B]"]
_WIDTH = 200  # characters of a cell
_HTML_ROWS = 50


def as_position(position: int) -> int:
    """Return `position`, a number of tokens, as an int; raise CapacityError if it is negative.

    It may be too large for a model: that is a problem of the plan, not an error.
    """
    number = as_integer("position", position)
    if number < 0:
        text = f"position {number} is negative; pass the number of tokens in the cache"
        raise capacity_error(text, "0 or more", number, "position")
    return number


def _plan_state(
    name: str,
    source: Any | None,
    target: Any | None,
    position: int,
    seq_axis: int | None,
    contexts: tuple[int, int] | None,
) -> StateMove:
    """Return the move of the state `name`.

    `source`, `target`: its specs; None: the model lacks it. `position`: number of tokens.
    `seq_axis`: the sequence axis; None: it has none. `contexts`: context sizes of source and
    target; None: unknown.
    """
    shapes = (source and source.shape, target and target.shape)  # None for a missing state
    # called with the problem; no bytes are copied or zeroed
    refused = partial(StateMove, name, "none", *shapes, 0, 0)
    if source is None or target is None:
        which = "source" if source is None else "target"
        return refused(f"{name}: the {which} model has no state of this name")
    if source.dtype.kind != target.dtype.kind:
        return refused(f"{name}: {source.dtype} in the source model, {target.dtype} in the target")
    both = tuple(source.shape), tuple(target.shape)
    try:
        positions = moved_positions(name, *both, position, seq_axis, contexts=contexts)
    except (CapacityError, CompatibilityError) as error:
        return refused(str(error))
    if positions is None or seq_axis is None:
        return StateMove(
            name, "same", *shapes, copied_bytes=target.nbytes, zeroed_bytes=0, problem=None
        )
    have, want = source.shape[seq_axis], target.shape[seq_axis]  # in positions
    direction: Literal["expand", "compact"] = "expand" if have < want else "compact"
    copied = target.nbytes // want * positions if positions else 0  # `want` may be 0
    zeroed = target.nbytes - copied
    return StateMove(name, direction, *shapes, copied, zeroed, problem=None)


def plan_states(
    have: Mapping[str, Any],
    want: Mapping[str, Any],
    position: int,
    axis_of: Callable[[str], int | None],
) -> TransitionPlan:
    """Plan the move of the source's states, `have`, to the target's, `want`: specs by name.

    `position`: number of tokens. `axis_of` returns the sequence axis of the state with a name; None
    for a state that has the same shape in both models.
    """
    names = [*want, *(name for name in have if name not in want)]
    contexts = common_contexts(
        (tuple(have[name].shape), tuple(want[name].shape), axis_of(name))
        for name in want
        if name in have
    )
    return TransitionPlan(
        position,
        tuple(
            _plan_state(name, have.get(name), want.get(name), position, axis_of(name), contexts)
            for name in names
        ),
        sum(spec.nbytes for spec in have.values()),
        sum(spec.nbytes for spec in want.values()),
    )
