"""`LoadedState`: what `load` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..state import ModelStateDict, OptimizerStateDict


class LoadedState:
    """The state that `load` returns.

    Attributes
    ----------
    model : ModelStateDict, StateDict or None
        The model's arrays; None if no model was saved. If ``into["model"]`` was given, that
        object.
    optimizer : OptimizerStateDict, StateDict or None
        The same for the optimizer.
    metadata : dict
        The saved metadata after a JSON round trip: tuples become lists, dict keys become str.
    step : int or None
        The saved step.
    states : dict of str to object
        The named states: a `StateDict` or `OptimizerStateDict` for models, optimizers and
        mappings of arrays; otherwise the saved value, for a generator or an object its state. If
        ``into["states"]`` has the name, that object. A value that differed between the ranks that
        saved is a list with one item per rank, unless `load` was given a rank.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> _ = mlstate.save(path, {"w": np.arange(3.0)}, metadata={"run": "a"}, states={"seen": 5})
    >>> loaded = mlstate.load(path)
    >>> loaded.metadata, loaded.states
    ({'run': 'a'}, {'seen': 5})
    """

    __slots__ = ("metadata", "model", "optimizer", "states", "step")

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        metadata: dict[str, Any],
        step: int | None = None,
        states: dict[str, Any] | None = None,
    ) -> None:
        """Keep the loaded states; the class describes them."""
        self.states: dict[str, Any] = {} if states is None else states
        self.model: ModelStateDict | Any = model  # Any: None, or a target of `into`
        self.optimizer: OptimizerStateDict | Any = optimizer
        self.metadata: dict[str, Any] = metadata
        self.step: int | None = step

    def __setstate__(self, state: tuple[None, dict[str, object]]) -> None:
        """Restore a pickled state."""
        self.states = {}  # pickles of older versions lack it
        for name, value in state[1].items():
            setattr(self, name, value)

    def __getitem__(self, name: object) -> Any:
        """Raise TypeError: a caller who indexes the result must choose one of its states."""
        where = f'["{name}"]'
        remedy = f"use .model{where}, .optimizer{where} or .states{where}"
        if name in self.__slots__:
            remedy = f"use .{name}"
        raise TypeError(f"a LoadedState holds several states: {remedy}")

    def __repr__(self) -> str:
        """Return the number of tensors of each state, the metadata and the step."""

        def shown(state: object) -> str:
            """Return a state's short text: None, or its class with its number of tensors.

            The number is left out for a module, whose ``len()`` counts modules.
            """
            if state is None:
                return "None"
            if not hasattr(state, "keys") or not hasattr(state, "__len__"):
                return f"<{type(state).__name__}>"
            count = len(state)
            return f"<{type(state).__name__}: {count} tensor{'s' if count != 1 else ''}>"

        return (
            f"LoadedState(model={shown(self.model)}, optimizer={shown(self.optimizer)}, "
            f"metadata={self.metadata!r}, step={self.step}"
            f"{f', states={sorted(self.states)}' if self.states else ''})"
        )

    def _repr_html_(self) -> str:
        from ._pages.html import loaded_html

        return loaded_html(self)
