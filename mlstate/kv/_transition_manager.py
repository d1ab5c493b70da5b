"""`StateTransitionManager`: models registered by name and size, and caches moved between them."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self, TypedDict

from .. import _core
from ..errors import CapacityError, CompatibilityError
from ._arguments import as_count
from ._axis import sequence_axis, valid_axis
from ._move import KVMove
from ._transition import transition_kv_state

if TYPE_CHECKING:
    from .._types import ArrayT


class ModelConfig(TypedDict):
    """The arguments of `StateTransitionManager.register_model` for a model."""

    state_seq_length: int
    num_layers: int | None
    num_kv_heads: int | None
    head_dim: int | None


def _dimension_axes(rank: int, axis: int) -> dict[str, int]:
    """Return the axis of each dimension that `register_model` names, by parameter name.

    A dimension whose axis is unknown is left out. `rank`: number of axes of the cache; `axis`: its
    sequence axis, counted from 0. Layers are the first of four or more axes. Heads and head
    dimension are the axes around the sequence, and known only if the sequence is second to last:
    (layers, heads, sequence, head_dim).
    """
    axes = {}
    if rank >= 4 and axis > 0:
        axes["num_layers"] = 0
    if axis == rank - 2:
        if axis > 0:
            axes["num_kv_heads"] = axis - 1
        axes["head_dim"] = rank - 1
    return axes


def _as_dimension(name: str, value: int | None) -> int | None:
    """Return `value`, the argument `name`, checked by `as_count`, or None for None."""
    return None if value is None else as_count(name, value)


class StateTransitionManager:
    """Records the context sizes of a family of models, and moves caches between them.

    Parameters
    ----------
    seq_axis : int
        The axis of the sequence in the caches; a negative number counts from the last axis.

    Attributes
    ----------
    models : dict
        The arguments of `register_model`, by model name.
    seq_axis : int
        The axis that was passed.

    Raises
    ------
    CompatibilityError
        No cache of 2 to 8 dimensions has the axis `seq_axis`. A ValueError.
    TypeError
        `seq_axis` is not an integer.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.kv import StateTransitionManager
    >>> manager = StateTransitionManager()
    >>> for length in (256, 512, 1024):
    ...     manager.register_model(f"model_{length}", length, num_layers=4)
    >>> cache = np.zeros((4, 2, 256, 32), np.float16)
    >>> manager.transition(cache, "model_256", "model_512", 200).shape
    (4, 2, 512, 32)
    >>> manager.get_transition_path("model_256", "model_1024")
    ['model_256', 'model_512', 'model_1024']

    Caches with the sequence innermost:

    >>> manager = StateTransitionManager(seq_axis=-1)
    >>> for length in (256, 512):
    ...     manager.register_model(f"model_{length}", length, num_layers=4)
    >>> cache = np.zeros((4, 1, 64, 1, 256), np.float16)
    >>> manager.transition(cache, "model_256", "model_512", 200).shape
    (4, 1, 64, 1, 512)
    """

    def __init__(self, *, seq_axis: int = -2) -> None:
        self.models: dict[str, ModelConfig] = {}
        self.seq_axis: int = valid_axis(seq_axis)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.__dict__.setdefault("seq_axis", -2)  # pickles of earlier versions do not have it

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, models=deepcopy(self.models))
        return other

    def register_model(
        self,
        model_name: str,
        state_seq_length: int,
        num_layers: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
    ) -> None:
        """Register a model, or replace the model with this name.

        Parameters
        ----------
        model_name : str
            Name of the model in the other methods.
        state_seq_length : int
            Positions of its cache.
        num_layers, num_kv_heads, head_dim : int, optional
            The other dimensions of its cache; `transition` checks those that are given. Layers
            are the first of at least four axes. Heads and head dimension are the axes around the
            sequence. Leave out a dimension that the layout does not have.

        Raises
        ------
        CapacityError
            A number is negative, or does not fit into 64 bits. A ValueError.
        TypeError
            `model_name` is not a str, or a number is not an integer.
        """
        if not isinstance(model_name, str):
            raise TypeError(f"model_name must be a str, got {type(model_name).__name__}")
        self.models[model_name] = {
            "state_seq_length": as_count("state_seq_length", state_seq_length),
            "num_layers": _as_dimension("num_layers", num_layers),
            "num_kv_heads": _as_dimension("num_kv_heads", num_kv_heads),
            "head_dim": _as_dimension("head_dim", head_dim),
        }

    def _config(self, model_name: str) -> ModelConfig:
        """Return the configuration of a registered model; raises ValueError for others."""
        try:
            return self.models[model_name]
        except (KeyError, TypeError):  # a name may be no hashable value
            registered = ", ".join(self.models) or "none yet"
            raise ValueError(
                f"model {model_name!r} is not registered; registered are: {registered}"
            ) from None

    def transition(
        self,
        source_state: ArrayT,
        source_model: str,
        target_model: str,
        current_position: int,
        pad_value: float = 0.0,
    ) -> ArrayT:
        """Expand a cache of one registered model to the context size of another.

        Parameters
        ----------
        source_state : ndarray or torch.Tensor, shape (layers, heads, seq, head_dim)
            A cache of `source_model`; with `seq_axis`, any other layout of 2 to 8 dimensions.
        source_model, target_model : str
            Registered names; the target's context must be at least as long.
        current_position : int
            Number of tokens in the cache.
        pad_value : float
            Value of positions without a token.

        Returns
        -------
        ndarray or torch.Tensor
            Result of `transition_kv_state`.

        Raises
        ------
        ValueError
            A name is not registered.
        CompatibilityError
            The state's shape is not the one registered for `source_model`, the registered
            dimensions of the two models differ, or the layout has no axis for one of them. A
            ValueError.
        CapacityError, TypeError
            As for `transition_kv_state`.
        """
        source = self._config(source_model)
        target = self._config(target_model)
        if not hasattr(source_state, "shape"):
            raise TypeError(
                "source_state must be a NumPy array or a torch tensor, got "
                f"{type(source_state).__name__}"
            )
        shape = tuple(source_state.shape)
        axis = sequence_axis(shape, self.seq_axis)
        if current_position is None:
            raise TypeError("current_position must be an integer, got NoneType")
        _core.kv_check(shape, KVMove(target["state_seq_length"], current_position, axis))
        if shape[axis] != source["state_seq_length"]:
            raise CompatibilityError(
                f"the state has {shape[axis]} positions, but '{source_model}' was registered "
                f"with state_seq_length {source['state_seq_length']}"
            )
        axes = _dimension_axes(len(shape), axis)
        for field in ("num_layers", "num_kv_heads", "head_dim"):
            for name, config in ((source_model, source), (target_model, target)):
                registered = config[field]
                if registered is None:
                    continue
                if field not in axes:
                    raise CompatibilityError(
                        f"'{name}' was registered with {field} {registered}, but a state of shape "
                        f"{shape} with the sequence at axis {axis} has no axis for it: register "
                        f"the model without {field}"
                    )
                dimension = axes[field]
                if registered != shape[dimension]:
                    raise CompatibilityError(
                        f"the state has {field} {shape[dimension]}, but '{name}' was registered "
                        f"with {registered}"
                    )
        state: Any = source_state  # for the overloads, which tell arrays from tensors
        moved: ArrayT = transition_kv_state(
            state, target["state_seq_length"], current_position, pad_value, seq_axis=axis
        )
        return moved

    def get_transition_path(self, start_model: str, end_model: str) -> list[str]:
        """List the registered models from one context length to a longer one.

        Parameters
        ----------
        start_model, end_model : str
            Registered names.

        Returns
        -------
        list of str
            Names by increasing context length, from `start_model` to `end_model`. Other models
            with the context length of these two are left out.

        Raises
        ------
        ValueError
            A name is not registered.
        CapacityError
            The start's context is longer than the end's. A ValueError.
        """
        low = self._config(start_model)["state_seq_length"]
        high = self._config(end_model)["state_seq_length"]
        if low > high:
            raise CapacityError(
                f"'{start_model}' has {low} positions and '{end_model}' {high}: a path only "
                "leads to longer contexts"
            )
        lengths = {name: config["state_seq_length"] for name, config in self.models.items()}
        between = [name for name, length in lengths.items() if low < length < high]
        path = [start_model, *sorted(between, key=lengths.__getitem__), end_model]
        return path[:1] if start_model == end_model else path
