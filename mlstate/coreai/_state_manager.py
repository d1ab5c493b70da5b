"""`StateManager` of Core AI: creates, reads, replaces NDArrays of states; one model for sizes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kv._arguments import incompatible
from ..kv._context_ladder import ContextLadder
from ..kv._state_manager import StateManagerBase
from ..kv._transition import compact_kv_state, transition_kv_state
from ._asset import import_coreai
from ._specs import StateSpec, check_axes, choose, usual_axis

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from .._types import Array, NDArray
    from ..kv._context_ladder import LadderStep, Overflow


def _check_array(name: str, array: Any, spec: StateSpec) -> None:
    """Raise CompatibilityError unless the array of the state `name` has the shape of `spec`."""
    shape = tuple(array.shape)
    if shape != spec.shape:
        text = f"{name}: the array in the state has the shape {shape}, expected {spec.shape}"
        raise incompatible(text, name, spec.shape, shape)


class StateManager(StateManagerBase):
    """Holds the states of a Core AI model with several context sizes, and moves them.

    Parameters
    ----------
    models : model, callable, or mapping of int to them
        One model whose sequence is dynamic, for all `sizes`. Or the models of each context size,
        smallest size first. A model is an InferenceFunction, in any form that `state_specs`
        accepts, or a list or tuple of chunk models. A callable without arguments returns a
        model; it is called when the model is first needed, and, in a mapping, again after
        `release`.
    sizes : sequence of int, optional
        The context sizes of a single model, smallest size first.
    specs : mapping of int, optional
        The states of the models of some sizes, in any form that `state_specs` accepts.
    shared_state : bool
        Whether the chunk models of a size share one set of states, or have one each. With one
        each, `state` is a tuple, with None for a chunk model without states.
    seq_axis : int, optional
        The sequence axis of states with fixed shapes. Default: the last axis if the axis before
        it has length 1, else the axis before the last. A dynamic dimension is the sequence.
    overflow, batch_size, reserve_batches, prompt_tokens
        As for `ContextLadder`.

    Raises
    ------
    ValueError
        The sizes are empty or do not rise, or an argument of `ContextLadder` is wrong.
    CompatibilityError
        The states of two models differ in name, kind of dtype, or in a dimension other than the
        sequence; a dimension other than the sequence is dynamic; chunk models that share states
        declare other states; or no state of a model has the positions of its size. A ValueError.
    TypeError
        `sizes` is missing or superfluous, or a value is neither a model nor a callable.
    ImportError
        coreai-core is not installed; also when the first state is created.

    See Also
    --------
    ContextLadder : decides when the states grow, and what to keep at the largest size.
    plan_transition : computes the effect of a move.

    Notes
    -----
    `state` is a dict of Core AI's NDArrays by name, as a call of the function takes it. The call
    changes the arrays. Between calls you can replace an array in the dict, for example after
    rolling the cache.

    Models are checked when they are passed or loaded, before anything changes. States whose shape
    and dtype are the same in two models, such as those of convolutions or full windows, keep their
    array. The others have the positions of their model, or, as windows, the smaller of the window
    and these. A move of these creates new arrays; the manager keeps the former states until all are
    moved: after an error it is unchanged. At position 0, the others are new and empty; call `reset`
    before a new sequence.

    Memory of a move: the states of both sizes, and, for one state at a time, an array of each
    size: Core AI copies arrays that enter and leave it.

    ``mlstate.save(path, states={"kv": manager, "position": position})`` saves the manager, and
    ``manager.load_state_dict(mlstate.load(path).states["kv"])`` restores it, with its size.

    Not thread-safe: use one manager for each conversation, and do not move its states while a
    call of the model runs.

    Examples
    --------
    A decode loop with one dynamic model; `manager.model` is the function::

        async with AIModelAsset.load("m.aimodel").executable() as model:
            manager = StateManager(model.load_function("main"), sizes=(256, 512, 1024))
            for position, token in enumerate(tokens):
                manager.grow_if_needed(position)
                inputs = {"token": NDArray(np.array([token], np.int32)), ...}
                outputs = await manager.model(inputs, manager.state)

    The declared states are enough to decide, and to move an empty state:

    >>> from mlstate.coreai import StateManager
    >>> manager = StateManager({256: {"k": (2, 1, 4, 256, 64)}, 512: {"k": (2, 1, 4, 512, 64)}})
    >>> manager.grow_if_needed(0, 300).action, manager.size
    ('grow', 512)
    """

    def __init__(
        self,
        models: Any,
        sizes: Sequence[int] | None = None,
        *,
        specs: Mapping[int, Any] | None = None,
        shared_state: bool = True,
        seq_axis: int | None = None,
        overflow: Overflow = "stop",
        batch_size: int | None = None,
        reserve_batches: int = 2,
        prompt_tokens: int = 0,
    ) -> None:
        """Check the arguments; one model with `sizes` becomes a mapping of sizes to models."""
        is_mapping = isinstance(models, Mapping)
        if is_mapping and sizes is not None and not all(isinstance(key, str) for key in models):
            raise TypeError("sizes is for a single model: a mapping of models has its sizes")
        if not is_mapping or sizes is not None:  # a mapping of names to shapes is a model
            models, specs = self._for_sizes(models, sizes, specs, seq_axis)
        self._given_axis = seq_axis
        super().__init__(
            models,
            specs=specs,
            shared_state=shared_state,
            seq_axis=-2 if seq_axis is None else seq_axis,
            overflow=overflow,
            batch_size=batch_size,
            reserve_batches=reserve_batches,
            prompt_tokens=prompt_tokens,
        )

    def _for_sizes(
        self,
        model: Any,
        sizes: Sequence[int] | None,
        specs: Mapping[int, Any] | None,
        seq_axis: int | None,
    ) -> tuple[dict[int, Any], Mapping[int, Any] | None]:
        """Return the single model for each of `sizes`, and its states for each, or `specs`.

        The states are read at once, except if `specs` are passed, for a list of chunk models, and
        for a callable, which is called once for all sizes. Raises TypeError if `sizes` is None.
        """
        if sizes is None:
            raise TypeError(
                "sizes is missing: pass the context sizes of the model, such as sizes=(256, 512), "
                "or a mapping of sizes to models"
            )
        sizes = ContextLadder(sizes).sizes
        if self._is_loader(model):
            model = cache(model)
        elif specs is None and not isinstance(model, list | tuple):
            specs = dict.fromkeys(sizes, choose(model, function=None, seq_axis=seq_axis))
        return dict.fromkeys(sizes, model), specs

    def _is_loader(self, model: Any) -> bool:
        """Return whether `model` is a callable that returns a model; models can be called too."""
        return callable(model) and not hasattr(model, "desc")

    def _read_specs(self, size: int, model: Any, chunk: int) -> Mapping[str, StateSpec]:
        """Return the states of `model` by name, with the shapes for `size` positions.

        They are read from the caller's `specs` of this size instead, if it passed some. These are
        of every chunk; `chunk`, the number of the model among the chunks, has no effect.
        """
        source = self._given_specs.get(size, model)
        specs = choose(source, function=None, seq_axis=self._given_axis)
        return {name: spec.with_size(size) for name, spec in specs.items()}

    def _axis_of(self, spec: StateSpec) -> int:
        """Return the known sequence axis of a state, else the usual one, which may be negative."""
        return usual_axis(spec.shape) if spec.seq_axis is None else spec.seq_axis

    def _check_state(
        self, models: str, name: str, former: tuple[int, Any], new: tuple[int, Any]
    ) -> None:
        """As in the base; also refuses a state whose sequence axis differs between the models."""
        check_axes(former[1], new[1])
        super()._check_state(models, name, former, new)

    def _make_state(self, model: Any, specs: Mapping[str, Any]) -> Any:
        """Return new NDArrays of zeros by name; Core AI's models do not create states."""
        array = import_coreai("runtime").NDArray
        return {name: array(np.zeros(spec.shape, spec.dtype)) for name, spec in specs.items()}

    def _make_target(self, model: Any, specs: Mapping[str, StateSpec]) -> Any:
        """Return an empty dict: the move puts a new array into it for each state."""
        return {}

    def _read_array(self, state: Any, name: str) -> NDArray:
        return np.asarray(state[name].numpy())

    def _write_array(self, target: Any, name: str, array: NDArray) -> None:
        target[name] = import_coreai("runtime").NDArray(np.ascontiguousarray(array))

    def _move_state(
        self,
        source: Any,
        target: Any,
        name: str,
        specs: tuple[Any, Any],
        positions: int | None,
        compact: bool,
    ) -> None:
        """Put the state `name` of `source` into `target`; both are dicts of NDArrays by name.

        `specs`: of the state in source and target. `positions`: number of tokens; None: both shapes
        are equal, and the target gets the same array unless the dtypes differ. `compact`: whether
        the target's context is smaller. Raises CompatibilityError if the array of the source has
        another shape than its spec.
        """
        have, want = specs
        _check_array(name, source[name], have)
        if positions is None and have.dtype == want.dtype:
            target[name] = source[name]
            return
        value = source[name].numpy()
        if positions is None:
            # Only the dtype changes. A state may have any number of dimensions, and a cache has two
            # at least: all elements become the positions of one row.
            row = value.reshape(1, prod(want.shape))
            moved = transition_kv_state(row, row.shape[1], dtype=want.dtype, seq_axis=1)
            moved = moved.reshape(want.shape)
        else:
            move_positions = compact_kv_state if compact else transition_kv_state
            axis = self._axis_of(want)
            moved = move_positions(
                value, want.shape[axis], positions, dtype=want.dtype, seq_axis=axis
            )
        target[name] = import_coreai("runtime").NDArray(moved)

    def refill(
        self,
        tokens: Sequence[int],
        prefill: Callable[[Any, int, Any], object],
        size: int | None = None,
    ) -> LadderStep:
        """Choose the tokens to keep, and prefill them into a new, empty state.

        As `mlstate.coreml.StateManager.refill`. Calls of Core AI's functions are awaited, so
        `refill_async` is the usual form.

        Raises
        ------
        ValueError, CapacityError, CompatibilityError
            As for `mlstate.coreml.StateManager.refill`.
        TypeError
            Also if `prefill` returns an awaitable, as a coroutine function does.
        """
        import inspect

        def prefill_now(tokens: Array, position: int, state: Any) -> None:
            """Call `prefill`; raise TypeError if its result is awaitable, and so never runs."""
            result = prefill(tokens, position, state)
            if inspect.isawaitable(result):
                if inspect.iscoroutine(result):
                    result.close()
                raise TypeError("prefill returned an awaitable: use refill_async, and await it")

        return super().refill(tokens, prefill_now if callable(prefill) else prefill, size)

    async def refill_async(
        self,
        tokens: Sequence[int],
        prefill: Callable[[Any, int, Any], Awaitable[object]],
        size: int | None = None,
    ) -> LadderStep:
        """Choose the tokens to keep, and await their prefill into a new, empty state.

        Parameters
        ----------
        tokens : sequence of int, or one-dimensional array
            All tokens, including those that did not fit.
        prefill : callable
            Awaited as ``prefill(tokens, position, state)`` for each batch: its tokens (an array
            if `tokens` is one, else a list), the position of the first, and the new `state`.
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
        raises or the task is cancelled, the former state is the current one again, unchanged.
        """
        step, batches = self._plan_refill(tokens, prefill, size)
        former = self._size, self._states
        try:
            state = self._empty_state(step.size) if batches else None
            for batch, start in batches:
                await prefill(batch, start, state)
        except BaseException:
            self._set_current(*former)
            raise
        return step
