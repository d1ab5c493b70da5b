"""`StateManager`: base for Core ML and Core AI: load models, grow, shrink, refill, `state_dict`.

`mlstate.coreml.StateManager` and `mlstate.coreai.StateManager` derive from `StateManagerBase` and
override its methods for models and states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from .._common.arguments import check_flags
from .._common.changes import UndoLog, exchange
from .._common.report import Table
from .._common.text import names_hint
from ..errors import CompatibilityError, MLStateError
from ._arguments import as_count, capacity_error, incompatible
from ._axis import valid_axis
from ._context_ladder import ContextLadder, as_size
from ._model_states import quoted
from ._moved_positions import differ_in_sequence, moved_positions

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from .._types import NDArray, NumpyDType
    from ._context_ladder import LadderStep, Overflow

    # States by name; each has `shape`, of the model's context, and a NumPy `dtype`.
    Specs: TypeAlias = Mapping[str, Any]


class Context(NamedTuple):
    """The models of one context size, and the states that they declare."""

    model: Any  # or the sequence of chunk models, as the caller passed or created it
    owners: tuple[object, ...]  # the models that create states: one for each state object
    specs: tuple[Specs, ...]  # the states that each state object holds


def _states_text(specs: Specs) -> str:
    """Return states as text, such as "kv (2, 1, 256, 32)"."""
    return ", ".join(f"{name} {tuple(spec.shape)}" for name, spec in specs.items()) or "none"


def _declared(specs: Specs) -> dict[str, tuple[tuple[int, ...], NumpyDType]]:
    """Return shape and dtype of each state by name, to compare the states of chunk models."""
    return {name: (tuple(spec.shape), spec.dtype) for name, spec in specs.items()}


def _select_tokens(tokens: Any, parts: tuple[range, ...]) -> Any:
    """Return the tokens with the indices `parts`: an array if `tokens` is one, else a list."""
    slices = [tokens[part.start : part.stop] for part in parts]
    if isinstance(tokens, np.ndarray):
        return np.concatenate(slices)
    return [token for part in slices for token in part]


def _saved_content(state: Any) -> tuple[Any, list[Any] | None]:
    """Return the size and the list of arrays in `state`, a result of `state_dict`.

    The list has a mapping of arrays by name, or None, for each state object; it is None for an
    empty state. Raises TypeError for other values.
    """
    if isinstance(state, Mapping) and state.keys() == {"size", "states"}:
        arrays = state["states"]
        if arrays is None or (
            isinstance(arrays, list)
            and all(each is None or isinstance(each, Mapping) for each in arrays)
        ):
            return state["size"], arrays
    content = f" with {quoted(state)}" if isinstance(state, Mapping) else ""
    raise TypeError(
        "state must be a result of state_dict(), a dict of 'size' and 'states', got "
        f"{type(state).__name__}{content}"
    )


def _check_saved(declared: Specs, saved: Mapping[str, Any] | None) -> None:
    """Raise CompatibilityError unless the saved arrays are those that a model declares.

    `declared`: specs of the states by name. `saved`: arrays by name, or None for none. Names,
    shapes and dtypes must be equal.
    """
    saved = saved or {}
    expected = {name: (tuple(spec.shape), np.dtype(spec.dtype)) for name, spec in declared.items()}
    for name in (*declared, *saved):
        got = None
        if name in saved:
            array = saved[name]
            got = tuple(getattr(array, "shape", ())), getattr(array, "dtype", None)
        if got != expected.get(name):
            have, want = (
                "no such state" if each is None else f"{each[1]} {each[0]}"
                for each in (got, expected.get(name))
            )
            raise incompatible(
                f"state {name!r}: the saved state has {have}, the model has {want}",
                name,
                want,
                have,
            )


class StateManagerBase:
    """Holds the state of the current context size, and moves it to other sizes.

    A subclass overrides `_is_loader`, `_read_specs`, `_make_state`, `_read_array`, `_write_array`
    and `_move_state`, and documents its models. No state is created before `state` is read or a
    move needs one. At position 0, only states of constant shape are read and written. `specs`
    replace descriptions of models that cannot be read.
    """

    def __init__(
        self,
        models: Mapping[int, Any],
        *,
        specs: Mapping[int, Any] | None = None,
        shared_state: bool = True,
        seq_axis: int = -2,
        overflow: Overflow = "stop",
        batch_size: int | None = None,
        reserve_batches: int = 2,
        prompt_tokens: int = 0,
    ) -> None:
        """Check the arguments, and the states of all models that are passed as objects.

        `models`: by context size, the smallest first; each is a model, a sequence of chunk models,
        or a callable that returns either. `specs`: by context size, descriptions of states that
        replace those of the model. The others are as for the subclasses and `ContextLadder`.
        """
        if not isinstance(models, Mapping):
            raise TypeError(
                "models must be a mapping of context sizes to models, such as "
                f"{{512: model, 1024: load_model}}, got {type(models).__name__}"
            )
        self._ladder = ContextLadder(
            tuple(models),
            overflow=overflow,
            batch_size=batch_size,
            reserve_batches=reserve_batches,
            prompt_tokens=prompt_tokens,
        )
        # by size, as passed: a model, a sequence of chunk models, or a callable that returns either
        self._given = dict(zip(self._ladder.sizes, models.values(), strict=True))
        check_flags(shared_state=shared_state)
        self._shared_state = bool(shared_state)
        self._given_specs = self._as_specs(specs)
        self._seq_axis = valid_axis(seq_axis)
        self._contexts: dict[int, Context] = {}  # of loaded models, by size
        self._specs: dict[int, tuple[Specs, ...]] = {}  # also of models that were released
        self._size = self._ladder.sizes[0]
        self._states: tuple[Any, ...] | None = None  # None: empty, not created yet
        for size, model in self._given.items():
            if not self._is_loader(model):
                self._context(size)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, because it owns the state of "
            "models: create another one for the same models"
        )

    def _as_specs(self, specs: Mapping[int, object] | None) -> dict[int, Any]:
        """Return the argument `specs` by context size; {} for None.

        Raises TypeError if it is not a mapping, and ValueError for a size without a model.
        """
        if specs is None:
            return {}
        if not isinstance(specs, Mapping):
            raise TypeError(
                "specs must be a mapping of context sizes to the states of their models, got "
                f"{type(specs).__name__}"
            )
        return {as_size(self._ladder.sizes, size): spec for size, spec in specs.items()}

    # ---- overridden for a framework ----

    def _is_loader(self, model: object) -> bool:
        """Return whether a value of `models` is a callable that returns the model."""
        return callable(model)

    def _read_specs(self, size: int, model: object, chunk: int) -> Specs:
        """Return the states of a model by name, from `_given_specs` or as the model declares them.

        `size`: its context size. `chunk`: its number among the models of this size, from 0. The
        values have a `shape`, for this size, and a NumPy `dtype`. Raises TypeError if `model` is of
        another type.
        """
        raise NotImplementedError

    def _make_state(self, model: object, specs: Specs) -> Any:
        """Return a new, empty state object for one model, which declares the states `specs`."""
        raise NotImplementedError

    def _make_target(self, model: object, specs: Specs) -> Any:
        """Return a new state object that a move will write every state of `specs` into.

        A subclass may leave it without arrays, because all of them are written.
        """
        return self._make_state(model, specs)

    def _read_array(self, state: Any, name: str) -> NDArray:
        """Return a new array with the content of the state `name` of a state object."""
        raise NotImplementedError

    def _write_array(self, target: Any, name: str, array: NDArray) -> None:
        """Write `array` as the state `name` of `target`, a state object of `_make_target`.

        It has the shape and dtype that the model declares for the state.
        """
        raise NotImplementedError

    def _axis_of(self, spec: Any) -> int:
        """Return the sequence axis of a state; it may not have this axis."""
        return self._seq_axis

    def _move_state(
        self,
        source: Any,
        target: Any,
        name: str,
        specs: tuple[Any, Any],
        positions: int | None,
        compact: bool,
    ) -> None:
        """Write the first `positions` positions of the state `name` of `source` into `target`.

        `source`, `target`: state objects. `specs`: specs of the state in source and target.
        `positions` is None for a state that has the same shape in both: it is copied whole.
        `compact`: whether the target's context is smaller.
        """
        raise NotImplementedError

    # ---- models ----

    def _context(self, size: int) -> Context:
        """Return the models of `size` positions with their states.

        At the first use, and after `release`, they are loaded, and checked against the states of
        all sizes that were loaded before. After an error nothing is changed.
        """
        context = self._contexts.get(size)
        if context is None:
            model = self._given[size]
            context = self._read_context(size, model() if self._is_loader(model) else model)
            self._check_growing(size, context.specs)
            for other, specs in self._specs.items():
                self._check_pair(other, specs, size, context.specs)
            self._contexts[size], self._specs[size] = context, context.specs
        return context

    def _read_context(self, size: int, model: Any) -> Context:
        """Return the chunks of `model`, the model of `size` positions, with their states.

        If the chunks share a state, only the first chunk that declares states is an owner;
        CompatibilityError if another one declares different states.
        """
        is_chunked = isinstance(model, list | tuple)
        chunks = tuple(model) if is_chunked else (model,)
        if not chunks:
            raise TypeError(f"the model of {size} positions is an empty sequence of chunk models")
        specs = tuple(self._read_specs(size, chunk, i) for i, chunk in enumerate(chunks))
        if not self._shared_state:
            return Context(model, chunks, specs)
        owner = next((i for i, declared in enumerate(specs) if declared), 0)
        expected = _declared(specs[owner])
        for i, declared in enumerate(specs):
            if declared and _declared(declared) != expected:
                texts = _states_text(specs[owner]), _states_text(declared)
                raise incompatible(
                    f"chunk models {owner} and {i} of {size} positions declare other states, so "
                    f"they cannot share one: {texts[0]} and {texts[1]}; pass shared_state=False if "
                    "each has its own",
                    "models",
                    *texts,
                )
        return Context(model, (chunks[owner],), (specs[owner],))

    def _has_positions(self, size: int, spec: Any) -> bool:
        """Return whether the sequence axis of a state has `size` positions, as the context has."""
        shape, axis = spec.shape, self._axis_of(spec)
        return -len(shape) <= axis < len(shape) and shape[axis] == size

    def _check_growing(self, size: int, specs: tuple[Specs, ...]) -> None:
        """Raise CompatibilityError if no state of a model has `size` positions.

        `specs`: the states of each of its state objects. `size`: the key of the model in `models`.
        """
        declared = [spec for group in specs for spec in group.values()]
        if any(self._has_positions(size, spec) for spec in declared):
            return
        axis = self._axis_of(declared[0]) if declared else self._seq_axis
        states = "; ".join(map(_states_text, specs))
        raise incompatible(
            f"the model of {size} positions has no state of {size} positions at axis {axis}; "
            f"its states: {states}. Pass the size of its states, or seq_axis=",
            "models",
            size,
            states,
        )

    def _check_pair(
        self, size: int, specs: tuple[Specs, ...], new_size: int, new_specs: tuple[Specs, ...]
    ) -> None:
        """Raise CompatibilityError unless the states of two models match.

        `size`, `specs`: context size and states, for each state object, of a model that was loaded
        before; `new_size`, `new_specs`: the same of the new one. The sizes are equal for a model
        that was released and loaded again.
        """
        models = f"the models of {size} and {new_size} positions do not match: "
        if new_size == size:
            models = f"the model of {size} positions was loaded again with other states: "
        if len(specs) != len(new_specs):
            raise incompatible(
                f"{models}{len(specs)} and {len(new_specs)} chunk models",
                "models",
                f"{len(specs)} chunk models",
                f"{len(new_specs)} chunk models",
            )
        for declared, new in zip(specs, new_specs, strict=True):
            for names, others, owner in ((declared, new, new_size), (new, declared, size)):
                for name in names:
                    if name not in others:
                        raise incompatible(
                            f"{models}the model of {owner} has no state {name!r}"
                            f"{names_hint(name, others)}",
                            name,
                            name,
                            ", ".join(others) or "none",
                        )
            for name, spec in declared.items():
                self._check_state(models, name, (size, spec), (new_size, new[name]))

    def _check_state(
        self, models: str, name: str, former: tuple[int, Any], new: tuple[int, Any]
    ) -> None:
        """Raise CompatibilityError if the state `name` cannot move between two models.

        `former`, `new`: context size of a model, and its spec of the state. `models`: text that
        names both models and begins the message.
        """
        (size, spec), (new_size, new_spec) = former, new
        shapes = tuple(spec.shape), tuple(new_spec.shape)
        expected, got = f"{spec.dtype} {shapes[0]}", f"{new_spec.dtype} {shapes[1]}"
        axis, fault = self._axis_of(spec), None
        if spec.dtype.kind != new_spec.dtype.kind:
            fault = "; convert them with the same dtype"
        else:
            try:
                # Position 0: only the shapes count.
                moved_positions(name, *shapes, 0, axis, contexts=(size, new_size))
            except CompatibilityError:
                fault = (
                    f": pass the lengths of axis {axis} as the sizes of the models"
                    if differ_in_sequence(*shapes, axis)
                    else f": only the sequence, axis {axis}, may differ; convert them from the "
                    "same weights"
                )
        if fault is not None:
            raise incompatible(
                f"{models}state {name!r} is {expected} and {got}{fault}", name, expected, got
            )

    @property
    def ladder(self) -> ContextLadder:
        """The `ContextLadder` of the sizes, which decides every step."""
        return self._ladder

    @property
    def size(self) -> int:
        """Number of positions of the current state."""
        return self._size

    @property
    def loaded(self) -> tuple[int, ...]:
        """The sizes whose models are loaded, in increasing order."""
        return tuple(sorted(self._contexts))

    @property
    def model(self) -> Any:
        """The model, or the sequence of chunk models, of the current size; loaded if needed."""
        return self._context(self._size).model

    def release(self, size: int | None = None) -> tuple[int, ...]:
        """Let go of models that a callable can load again.

        Parameters
        ----------
        size : int, optional
            The model to release. Default: the models of all sizes except the current one.

        Returns
        -------
        tuple of int
            The sizes of the released models. Models that were passed as objects stay.

        Raises
        ------
        ValueError
            `size` is the current size, is unknown, or its model was not passed as a callable.
        TypeError
            `size` is not an integer.
        """
        sizes = self.loaded
        if size is not None:
            size = as_size(self._ladder.sizes, size)
            if size == self._size:
                raise ValueError(
                    f"the model of {size} positions is in use: grow, shrink or reset first"
                )
            if not self._is_loader(self._given[size]):
                raise ValueError(
                    f"the model of {size} positions cannot be loaded again: pass a callable that "
                    "returns it"
                )
            sizes = (size,) if size in self._contexts else ()
        released = tuple(
            loaded_size
            for loaded_size in sizes
            if loaded_size != self._size and self._is_loader(self._given[loaded_size])
        )
        for loaded_size in released:
            del self._contexts[loaded_size]
        return released

    # ---- states ----

    def _make_states(
        self, size: int, make: Callable[[object, Specs], object] | None = None
    ) -> tuple[object, ...]:
        """Return new state objects for `size`, one for each owner, a model that creates states.

        It is None for a model that declares no states. `make`: called with a model and its specs to
        create one. Default: `_make_state`.
        """
        context = self._context(size)
        make = make or self._make_state
        return tuple(
            make(owner, specs) if specs else None
            for owner, specs in zip(context.owners, context.specs, strict=True)
        )

    @property
    def state(self) -> Any:
        """The current state object; a tuple of them if every chunk model has its own.

        An empty state is created if there is none. Read it again after every call that can move
        the state.
        """
        if self._states is None:
            self._states = self._make_states(self._size)
        return self._states[0] if len(self._states) == 1 else self._states

    def _set_current(self, size: int, states: tuple[object, ...] | None) -> None:
        """Make `size` and its state objects the current ones; None: an empty state."""
        exchange([partial(vars(self).update, _size=size, _states=states)])

    def _move_to_size(self, size: int, position: int) -> None:
        """Move the state, with `position` tokens, to the models of `size`, which becomes current.

        After an error the manager is unchanged. An empty state does not move: the next one is
        created with the new size.
        """
        if self._states is None and position > 0:
            call = f"grow_if_needed(0, new_tokens={position + 1})"
            if size < self._size:
                call = f"shrink(0, size={size})"
            raise capacity_error(
                f"position is {position}, but the state is empty: write tokens into `state` first, "
                f"restore a saved state by load_state_dict, or move the empty state by {call}",
                0,
                position,
            )
        self._context(size)
        if self._states is None:
            self._size = size
            return
        moves = [
            self._planned_moves(size, position, *specs)
            for specs in zip(self._specs[self._size], self._specs[size], strict=True)
        ]
        # Without tokens, and without a state that is copied whole, the state is as good as empty.
        if position == 0 and all(count == 0 for group in moves for count, _ in group.values()):
            self._set_current(size, None)
            return
        targets = self._make_states(size, self._make_target if position else self._make_state)
        for source, target, planned in zip(self._states, targets, moves, strict=True):
            for name, (positions, specs) in planned.items():
                if positions == 0:  # the target is empty already
                    continue
                try:
                    compact = size < self._size
                    self._move_state(source, target, name, specs, positions, compact)
                except MLStateError:
                    raise
                except Exception as error:
                    failure = MLStateError(
                        f"state {name!r} was not moved from {self._size} to {size} positions: "
                        f"{error}. The new state of {size} positions is unusable and was dropped; "
                        f"the state of {self._size} positions is unchanged"
                    )
                    failure.name = name
                    raise failure from error
        self._set_current(size, targets)

    def _planned_moves(
        self, size: int, position: int, have: Specs, want: Specs
    ) -> dict[str, tuple[int | None, tuple[object, object]]]:
        """Return what moves to the models of `size`, for one state object: by name of the state.

        Each value is the number of positions, or None, as `moved_positions` returns it, and the
        specs of the state in source and target. `have`, `want`: specs of the states by name, in
        source and target. `position`: number of tokens.
        """
        contexts = self._size, size
        return {
            name: (
                moved_positions(
                    name,
                    tuple(have[name].shape),
                    tuple(spec.shape),
                    position,
                    self._axis_of(spec),
                    contexts=contexts,
                ),
                (have[name], spec),
            )
            for name, spec in want.items()
        }

    def grow_if_needed(self, position: int, new_tokens: int = 1) -> LadderStep:
        """Move the state to a larger size if the next tokens do not fit.

        Parameters
        ----------
        position : int
            Number of tokens in the state.
        new_tokens : int
            Number of tokens to write next.

        Returns
        -------
        LadderStep
            "stay" or "grow" if the tokens now fit. Otherwise "stop", "refill" or "roll", as
            `overflow` chooses, and nothing was changed: call `refill` for "refill". Only a "roll"
            that begins below the largest size moves the state to the largest size.

        Raises
        ------
        CapacityError
            `position` is negative or beyond the state, or `new_tokens` is less than 1.
        CompatibilityError
            The states of the larger model do not match.
        MLStateError
            A state could not be read or written. The manager is unchanged.
        TypeError
            A number is not an integer, or a callable did not return a model.
        """
        step = self._ladder.next_step(position, self._size, new_tokens)
        if step.action in ("grow", "roll") and step.size != self._size:
            self._move_to_size(step.size, as_count("position", position))
        return step

    def shrink(self, position: int, size: int | None = None) -> LadderStep:
        """Move the state to a smaller size.

        Parameters
        ----------
        position : int
            Number of tokens in the state.
        size : int, optional
            The new size. Default: the smallest size that holds the tokens.

        Returns
        -------
        LadderStep
            "shrink", or "stay" if the state already has this size.

        Raises
        ------
        CapacityError
            `position` is negative, beyond the state, or does not fit into `size`.
        ValueError
            `size` is unknown, or larger than the current size.
        CompatibilityError, MLStateError, TypeError
            As for `grow_if_needed`.
        """
        position = as_count("position", position)
        if position > self._size:
            raise capacity_error(
                f"position {position} is beyond the {self._size} positions of the state: pass the "
                "number of tokens in the state",
                f"0..{self._size}",
                position,
            )
        step = self._ladder.shrink(position, size)
        if step.size > self._size:
            raise ValueError(
                f"size {step.size} is larger than the {self._size} positions of the state: "
                "use grow_if_needed"
            )
        if step.size == self._size:
            return step._replace(action="stay")
        self._move_to_size(step.size, position)
        return step

    def refill(
        self,
        tokens: Sequence[int],
        prefill: Callable[[Any, int, Any], object],
        size: int | None = None,
    ) -> LadderStep:
        """Choose the tokens to keep, and prefill them into a new, empty state.

        Parameters
        ----------
        tokens : sequence of int, or one-dimensional array
            All tokens, including those that did not fit.
        prefill : callable
            Called as ``prefill(tokens, position, state)`` for each batch: its tokens (an array
            if `tokens` is one, else a list), the position of the first, and the new `state`.
            The last batch can be shorter than `batch_size`.
        size : int, optional
            Size of the new state. Default: the largest size.

        Returns
        -------
        LadderStep
            "refill"; its ``kept_tokens`` is the next position. "stop" if no token would be
            dropped; then nothing was changed.

        Raises
        ------
        ValueError
            No `batch_size` was passed, or `size` is unknown.
        CapacityError
            The prompt leaves no room for the newest tokens. It names `prompt_tokens`.
        CompatibilityError
            The states of the model do not match.
        TypeError
            `tokens` or `prefill` has another type, or a callable did not return a model.

        Notes
        -----
        During the calls, `model`, `size` and `state` belong to the new state. If `prefill`
        raises, the former state is the current one again, unchanged.
        """
        step, batches = self._plan_refill(tokens, prefill, size)

        def refill() -> None:
            state = self._empty_state(step.size)
            for batch, start in batches:
                prefill(batch, start, state)

        if batches:
            undo = UndoLog()
            undo.note("state", partial(self._set_current, self._size, self._states))
            undo.run(refill)
        return step

    def _plan_refill(
        self, tokens: Sequence[int], prefill: object, size: int | None
    ) -> tuple[LadderStep, list[tuple[Any, int]]]:
        """Check the arguments of `refill`; return the step, and each batch with its first position.

        The list of batches is empty if the step is "stop".
        """
        if not callable(prefill):
            raise TypeError(
                f"prefill must be a callable (tokens, position, state), got "
                f"{type(prefill).__name__}"
            )
        if not hasattr(tokens, "__getitem__") or getattr(tokens, "ndim", 1) != 1:
            shape = f" of shape {tokens.shape}" if hasattr(tokens, "shape") else ""
            raise TypeError(
                f"tokens must be a sequence or one-dimensional array of token numbers, got "
                f"{type(tokens).__name__}{shape}"
            )
        step = self._ladder.refill(len(tokens), size)
        if step.action != "refill":
            return step, []
        tokens_kept = _select_tokens(tokens, step.kept)
        return step, [(tokens_kept[start:stop], start) for start, stop in step.batches]

    def _empty_state(self, size: int) -> Any:
        """Make an empty state of `size` the current one, and return it."""
        self._context(size)
        self._set_current(size, None)
        return self.state

    def reset(self) -> None:
        """Drop the state: the next one is empty and has the smallest size."""
        self._set_current(self._ladder.sizes[0], None)

    # ---- save and restore ----

    def state_dict(self) -> dict[str, Any]:
        """Return the current size and its states, as ``mlstate.save(states=)`` stores them.

        Returns
        -------
        dict
            ``size``, and ``states``: a list with an entry for each state object, a dict of new
            arrays by name in the dtypes that the models declare, or None for a chunk model
            without states. ``states`` is None if the state is empty. The position is not
            included: save it next to the manager.

        Raises
        ------
        CompatibilityError
            A state does not have the shape that its model declares.
        """
        if self._states is None:
            return {"size": self._size, "states": None}
        groups = zip(self._states, self._specs[self._size], strict=True)
        states = [
            {name: self._read_declared(state, name, spec) for name, spec in specs.items()} or None
            for state, specs in groups
        ]
        return {"size": self._size, "states": states}

    def _read_declared(self, state: object, name: str, spec: Any) -> NDArray:
        """Return a new array with the state `name` of a state object, in the dtype of `spec`.

        Raises CompatibilityError if it has another shape than `spec`.
        """
        array = self._read_array(state, name)
        if array.shape != tuple(spec.shape):
            raise incompatible(
                f"{name}: the state has the shape {array.shape}, and its model declares "
                f"{tuple(spec.shape)}",
                name,
                tuple(spec.shape),
                array.shape,
            )
        return array.astype(spec.dtype, copy=False)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`: its size becomes the current one.

        The states are written into new state objects, so read `state` again. After an error the
        manager is unchanged.

        Parameters
        ----------
        state : mapping
            A result of `state_dict`, also of a manager with other sizes that include its size.

        Raises
        ------
        CompatibilityError
            The manager does not have the saved size, or the model of this size declares states
            of other names, shapes or dtypes. A ValueError.
        MLStateError
            A state could not be written.
        TypeError
            `state` is not a result of `state_dict`.
        """
        size, arrays = _saved_content(state)
        if size not in self._ladder.sizes:
            sizes = ", ".join(map(str, self._ladder.sizes))
            raise incompatible(
                f"the saved state has {size} positions, and the manager has models of {sizes}: "
                f"add the model of {size} positions, restore, and then grow or shrink",
                "size",
                sizes,
                size,
            )
        size = self._ladder.sizes[self._ladder.sizes.index(size)]  # an int, also for 256.0
        specs = self._context(size).specs
        if arrays is None:
            self._set_current(size, None)
            return
        if len(arrays) != len(specs):
            raise incompatible(
                f"the saved state has {len(arrays)} state objects, and the models of {size} "
                f"positions have {len(specs)}: chunk models share one or have one each, as "
                "shared_state= tells",
                None,
                len(specs),
                len(arrays),
            )
        for declared, saved in zip(specs, arrays, strict=True):
            _check_saved(declared, saved)
        targets = self._make_states(size, self._make_target)
        for target, saved in zip(targets, arrays, strict=True):
            for name, array in (saved or {}).items():
                try:
                    self._write_array(target, name, array)
                except MLStateError:
                    raise
                except Exception as error:
                    failure = MLStateError(
                        f"state {name!r} of {size} positions was not restored: {error}. The "
                        "manager is unchanged"
                    )
                    failure.name = name
                    raise failure from error
        self._set_current(size, targets)

    def __repr__(self) -> str:
        """Return class, sizes, loaded models, and the size of the current state."""
        sizes = ", ".join(map(str, self._ladder.sizes))
        loaded = ", ".join(map(str, self.loaded)) or "none"
        kind = "empty" if self._states is None else "in use"
        return (
            f"{type(self).__name__}(sizes {sizes}; loaded {loaded}; "
            f"state of {self._size} positions, {kind})"
        )

    def _repr_html_(self) -> str:
        """Return the models as an HTML table for notebooks."""
        rows = []
        for size in self._ladder.sizes:
            specs = self._specs.get(size)
            states = "?" if specs is None else "; ".join(map(_states_text, specs))
            stored = [state for group in specs or () for state in group.values()]
            nbytes = sum(prod(state.shape) * state.dtype.itemsize for state in stored)
            marks = ["loaded"] if size in self._contexts else []
            marks += ["current"] if size == self._size else []
            rows.append((size, states, "?" if specs is None else nbytes, ", ".join(marks)))
        columns = ["size [n]", "states", "bytes [B]", "model"]
        return Table(repr(self), columns, rows).html()
