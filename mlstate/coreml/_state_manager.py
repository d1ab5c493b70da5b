"""`StateManager` of Core ML: create, read, write its states; version of coremltools."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kv._arguments import incompatible
from ..kv._state_manager import StateManagerBase
from ._specs import StateSpec, StateSpecs, choose, choose_states, read_functions, states_of_contexts
from ._transfer import Move, read_moved, written_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .._types import NDArray
    from ..kv._state_manager import Context


def _too_old(missing: str) -> Exception:
    """Return the error for a coremltools below 9, whose states cannot be read and written.

    `missing`: text on the method that is missing.
    """
    version = getattr(sys.modules.get("coremltools"), "__version__", "an unknown version")
    text = (
        f"{missing}: coremltools 9.0 or newer is needed to move states, found {version}; run "
        "pip install -U coremltools"
    )
    return incompatible(text, "coremltools", "9.0 or newer", version)


class StateManager(StateManagerBase):
    """Holds the state of Core ML models with several context sizes, and moves it between them.

    Parameters
    ----------
    models : mapping of int to MLModel, sequence of MLModel, or callable
        The models of each context size, smallest size first. A size has one model, or a list or
        tuple of chunk models. A callable without arguments returns either; it is called when
        the model is first needed, and again after `release`.
    specs : mapping of int, or str or path-like, optional
        The states of the models of some sizes, in any form that `state_specs` accepts, such as
        the path of the ``.mlpackage`` or a list of chunks. Or the folder of an ANEMLL model whose
        ``meta.yaml`` lists contexts: it has the states of all sizes.
    shared_state : bool
        Whether the chunk models of a size share one state object, which the first chunk model
        with states creates, or have one each. With one each, `state` is a tuple, with None for
        a chunk model without states.
    seq_axis : int
        The axis of the sequence in the states; a negative number counts from the last axis.
    overflow, batch_size, reserve_batches, prompt_tokens
        As for `ContextLadder`.

    Raises
    ------
    ValueError
        The sizes are empty or do not rise, or an argument of `ContextLadder` is wrong.
    CompatibilityError
        `specs` has another number of chunks, or lacks a context. The states of two models differ
        in name, kind of dtype, or in a dimension other than the sequence; chunk models that share
        a state declare other states; or no state of a model has the positions of its context. A
        ValueError.
    TypeError
        `models` is not a mapping, or a value is neither a model nor a callable.

    See Also
    --------
    ContextLadder : decides when the state grows, and what to keep at the largest size.
    transition_coreml_state : moves one state between two objects.

    Notes
    -----
    Names and shapes come from the descriptions of the models, as for `state_specs`; no state is
    read to find them. A model passed as an object is checked at once, a callable's model when
    it is loaded, before anything changes. A state with the same shape in two models, such as the
    state of a convolution or a full window, is copied whole. The others have the positions of
    their model, or, as windows, the smaller of the window and these.

    A move reads each state once and writes it once. The manager keeps the former states until
    all are written: after an error it is unchanged, and the message names the size whose new
    states were dropped. At position 0, only states with the same shape in both models are copied,
    and the others are new and empty; call `reset` before a new sequence.

    Memory of a move: the states of both sizes inside Core ML, and, for one state at a time, the
    array that was read and the array to write. Each is float32 for a float16 state. The former
    states are freed after the move unless the caller holds them. The models of both sizes are
    loaded during a move; `release` lets go of the former one.

    ``mlstate.save(path, states={"kv": manager, "position": position})`` saves the manager, and
    ``manager.load_state_dict(mlstate.load(path).states["kv"])`` restores it, with its size.

    Not thread-safe: use one manager for each conversation. Without coremltools 9 or newer,
    states cannot be moved: the error names the installed version.

    Examples
    --------
    `FakeMLState` and a class with ``get_spec`` and ``make_state`` replace Core ML's models:

    >>> from mlstate.coreml import FakeMLState, StateManager
    >>> class Model:
    ...     def __init__(self, length):
    ...         self.shapes = {"kv_cache": (2, 1, length, 32)}
    ...     def get_spec(self):
    ...         return self.shapes
    ...     def make_state(self):
    ...         return FakeMLState(self.shapes)
    >>> manager = StateManager({256: lambda: Model(256), 512: lambda: Model(512)})
    >>> state = manager.state  # predict(inputs, state=state) writes 256 tokens
    >>> manager.grow_if_needed(255).action, manager.grow_if_needed(256).action
    ('stay', 'grow')
    >>> manager.state
    FakeMLState({'kv_cache': float16(2, 1, 512, 32)})
    >>> state.reads, manager.state.writes
    (1, 1)
    >>> manager.loaded, manager.release(), manager.loaded
    ((256, 512), (256,), (512,))
    """

    def _is_loader(self, model: object) -> bool:
        return callable(model) and not hasattr(model, "make_state")

    def _as_specs(self, specs: Any) -> dict[int, Any]:
        """Return the argument `specs` by context size; a path is of a folder with a meta.yaml.

        Raises CompatibilityError if the path does not list context sizes.
        """
        if not isinstance(specs, str | os.PathLike):
            return super()._as_specs(specs)
        states = states_of_contexts(specs, self._ladder.sizes, shared_state=self._shared_state)
        if states is None:
            read_functions(specs)  # raises a better error unless it is a model
            text = (
                f"specs: {os.fsdecode(specs)} does not list contexts as ANEMLL's meta.yaml does; "
                "pass a mapping of context sizes"
            )
            raise incompatible(text, None, "state_transition_infer_contexts", None)
        return dict(states)

    def _read_context(self, size: int, model: Any) -> Context:
        """As in the base; first reads the specs that the caller passed for `size`, if any.

        `_given_specs` then has the states of this size as a tuple: one for all chunks, or one for
        each. Raises CompatibilityError for another number of chunks.
        """
        if size in self._given_specs:
            source = self._given_specs[size]
            listed = states_of_contexts(source, (size,), shared_state=self._shared_state)
            parts = (
                choose_states(source, function=None, shared_state=self._shared_state)
                if listed is None
                else listed[size]
            )
            count = len(model) if isinstance(model, list | tuple) else 1
            if len(parts) not in (1, count):
                text = (
                    f"specs of {size} positions have {len(parts)} chunks, and there are {count} "
                    "models"
                )
                raise incompatible(text, None, count, len(parts))
            self._given_specs[size] = parts
        return super()._read_context(size, model)

    def _read_specs(self, size: int, model: object, chunk: int) -> Mapping[str, StateSpec]:
        """Return the states of a model from the specs of its size, else from its description.

        `chunk`: its number among the models of this size, from 0. Raises TypeError, or
        CompatibilityError for an old coremltools, if it cannot create states.
        """
        if not callable(getattr(model, "make_state", None)):
            if type(model).__module__.partition(".")[0] == "coremltools":
                raise _too_old("the model has no make_state")
            raise TypeError(
                f"the model of {size} positions has no make_state: pass a coremltools MLModel, a "
                "sequence of them, or a callable that returns either, got "
                f"{type(model).__name__}"
            )
        parts = self._given_specs.get(size)
        if parts is None:
            return choose(model, function=None)
        states: StateSpecs = parts[chunk if len(parts) > 1 else 0]
        return states

    def _make_state(self, model: Any, specs: Mapping[str, StateSpec]) -> Any:
        """Return a new state of Core ML; raise CompatibilityError for an old coremltools."""
        state = model.make_state()
        for method in ("read_state", "write_state"):
            if not hasattr(state, method):
                raise _too_old(f"the state has no {method}")
        return state

    def _read_array(self, state: Any, name: str) -> NDArray:
        return np.asarray(state.read_state(name=name))

    def _write_array(self, target: Any, name: str, array: NDArray) -> None:
        value = np.require(array, written_dtype(name, array.dtype), ["C", "W"])
        target.write_state(name=name, value=value)

    def _move_state(
        self,
        source: Any,
        target: Any,
        name: str,
        specs: tuple[Any, Any],
        positions: int | None,
        compact: bool,
    ) -> None:
        """Copy the state `name` from `source` to `target`, both states of Core ML.

        `specs`: of the state in source and target. `positions`: number of tokens; None: both shapes
        are equal. `compact`: whether the target's context is smaller.
        """
        have, want = specs
        move = Move(positions or 0, compact, self._seq_axis)  # equal shapes are copied whole
        value, _ = read_moved(source, target, name, {name: want}, move, have.shape)
        target.write_state(name=name, value=value)
