"""Compare two states, or what two paths hold; public as `mlstate.diff`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

from .state._diff import StateDiff
from .state._diff import diff as diff_states

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from .checkpoint import LoadedState

    State: TypeAlias = Mapping[str, Any] | LoadedState | str | os.PathLike[str]


def _loaded(value: object) -> LoadedState | None:
    """Return what a path holds, or a loaded state; None for the tensors of one state."""
    from .checkpoint._load import LoadedState, load

    if isinstance(value, str | os.PathLike):
        return load(value)
    return value if isinstance(value, LoadedState) else None


def _tensors(loaded: LoadedState, *, only_model: bool) -> dict[str, Any]:
    """Return the tensors by name; names outside the model have a prefix."""
    tensors = dict(loaded.model or {})
    if only_model and loaded.model is None:
        return dict(loaded.optimizer or {})
    if not only_model:
        states = {f"states.{name}": state for name, state in loaded.states.items()}
        for prefix, state in {"optimizer": loaded.optimizer, **states}.items():
            if hasattr(state, "keys"):
                tensors.update({f"{prefix}.{name}": state[name] for name in state})
    return {name: value for name, value in tensors.items() if hasattr(value, "dtype")}


def diff(a: State, b: State, *, rtol: float = 0.0, atol: float = 0.0) -> StateDiff:
    """Compare two states element by element.

    Parameters
    ----------
    a, b : mapping of str to array, torch.nn.Module, LoadedState, str or os.PathLike
        The states, in main memory, or paths that `load` reads into memory. Of two paths or results
        of `load`, optimizers and named states are compared too, under names such as
        ``optimizer.w.m``; of one, the model, or the optimizer if it has no model.
    rtol, atol : float, default 0
        As for `mlstate.state.diff`.

    Returns
    -------
    StateDiff
        As for `mlstate.state.diff`.

    Raises
    ------
    CompatibilityError, TypeError, ValueError
        As for `mlstate.state.diff`.
    StoreError, FormatError, ChecksumError
        As for `load`.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/w.safetensors"
    >>> mlstate.save_file({"w": np.ones(2)}, path)
    >>> mlstate.diff(path, {"w": np.array([1.0, 1.01])}, rtol=0.1).identical
    True
    """
    loaded = _loaded(a), _loaded(b)
    only_model = None in loaded
    first, second = (
        cast("Mapping[str, Any]", each) if state is None else _tensors(state, only_model=only_model)
        for each, state in zip((a, b), loaded, strict=True)
    )
    return diff_states(first, second, rtol=rtol, atol=atol)


diff.__module__ = "mlstate"
