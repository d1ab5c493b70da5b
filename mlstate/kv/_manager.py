"""Models with several context sizes, and transitions between them; public through `mlstate.kv`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from .. import _core
from .._common.set_module import set_module
from ..errors import CapacityError, CompatibilityError
from ._transition import transition_kv_state

if TYPE_CHECKING:
    from .._types import ArrayT


class ModelConfig(TypedDict):
    """The arguments of `StateTransitionManager.register_model` for a model."""

    state_seq_length: int
    num_layers: int | None
    num_kv_heads: int | None
    head_dim: int | None


# Dimensions of a state by axis, with their names in register_model.
_DIMENSIONS = (("num_layers", 0), ("num_kv_heads", 1), ("head_dim", 3))


@set_module("mlstate.kv")
class StateTransitionManager:
    """Records the context sizes of a family of models, and moves caches between them.

    Attributes
    ----------
    models : dict
        The arguments of `register_model`, by model name.

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
    """

    def __init__(self) -> None:
        self.models: dict[str, ModelConfig] = {}

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
            The other dimensions of its cache; `transition` checks those that are given.

        Raises
        ------
        CapacityError
            `state_seq_length` is negative. A ValueError.
        """
        _core.kv_check((1, 1, 0, 1), state_seq_length, 0, False)
        self.models[model_name] = {
            "state_seq_length": state_seq_length,
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }

    def _config(self, model_name: str) -> ModelConfig:
        try:
            return self.models[model_name]
        except KeyError:
            known = ", ".join(self.models) or "none yet"
            raise ValueError(
                f"model '{model_name}' is not registered; registered are: {known}"
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
            A cache of `source_model`.
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
            The state's shape is not the one registered for `source_model`, or the registered
            dimensions of the two models differ. A ValueError.
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
        _core.kv_check(shape, target["state_seq_length"], current_position, False)
        if shape[2] != source["state_seq_length"]:
            raise CompatibilityError(
                f"the state has {shape[2]} positions, but '{source_model}' was registered "
                f"with state_seq_length {source['state_seq_length']}"
            )
        for field, axis in _DIMENSIONS:
            for name, config in ((source_model, source), (target_model, target)):
                registered = config[field]  # type: ignore[literal-required]
                if registered is not None and registered != shape[axis]:
                    raise CompatibilityError(
                        f"the state has {field} {shape[axis]}, but '{name}' was registered "
                        f"with {registered}"
                    )
        return transition_kv_state(
            source_state, target["state_seq_length"], current_position, pad_value
        )

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
