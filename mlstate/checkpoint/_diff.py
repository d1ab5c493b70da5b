"""`mlstate.diff`: compare two states, or the states at two paths."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .._common.arrays import is_cache
from ..state._diff import StateDiff
from ..state._diff import diff as diff_states

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from ._load import LoadedState

    State: TypeAlias = Mapping[str, Any] | LoadedState | str | os.PathLike[str]


def _loaded(value: object, storage_options: Mapping[str, Any] | None) -> LoadedState | None:
    """Return the loaded state of a path, or a loaded state itself; None for tensors of one state.

    `storage_options`: used if the path is a URL.
    """
    from ._load import LoadedState, load
    from ._store.open_path import is_url

    if isinstance(value, str | os.PathLike):
        return load(value, storage_options=storage_options if is_url(value) else None)
    return value if isinstance(value, LoadedState) else None


def _add_entries(entries: dict[str, Any], name: str, value: Any) -> None:
    """Add the arrays and numbers of a value to `entries`, however nested it is.

    `name`: of the value; keys and indices are added with dots. A value of another kind, such as a
    text, becomes part of a name, with an empty array.
    """
    if is_cache(value):
        from ..kv._stored import cache_values

        _add_entries(entries, name, cache_values(value)[1])
    elif hasattr(value, "keys"):
        for key in value:
            _add_entries(entries, f"{name}.{key}" if name else str(key), value[key])
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            _add_entries(entries, f"{name}.{number}", each)
    elif hasattr(value, "dtype"):
        entries[name] = value
    elif isinstance(value, int | float | complex) and np.asarray(value).dtype != object:
        entries[name] = np.asarray(value)
    else:  # integers beyond 64 bits too
        entries[f"{name} = {value!r}"] = np.zeros(0)


def _entries(loaded: LoadedState, *, only_model: bool) -> dict[str, Any]:
    """Return the tensors and values of a loaded checkpoint by name.

    Names outside the model get the prefix "optimizer" or "states". `only_model`: only the model, or
    the optimizer of a checkpoint without a model, without a prefix.
    """
    entries: dict[str, Any] = {}
    if only_model and loaded.model is None:
        _add_entries(entries, "", loaded.optimizer or {})
        return entries
    _add_entries(entries, "", loaded.model or {})
    if not only_model:
        _add_entries(entries, "optimizer", loaded.optimizer or {})
        _add_entries(entries, "states", loaded.states)
    return entries


def diff(
    a: State,
    b: State,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    storage_options: Mapping[str, Any] | None = None,
) -> StateDiff:
    """Compare two states element by element.

    Parameters
    ----------
    a, b : mapping of str to array, torch.nn.Module, LoadedState, str or os.PathLike
        The states, in main memory, or paths that `load` reads into memory. Of two paths or results
        of `load`, optimizers and named states are compared too, under names such as
        ``optimizer.w.m``; of one, the model, or the optimizer if it has no model. Lists and dicts
        in named states are compared by their items. Items that are neither arrays nor numbers, such
        as texts, are part of the name: ``states.run.note = 'first'``.
    rtol, atol : float, default 0
        As for `mlstate.state.diff`.
    storage_options : mapping, optional
        As for `load`, for those of `a` and `b` that are URLs.

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
    loaded = _loaded(a, storage_options), _loaded(b, storage_options)
    only_model = None in loaded
    first, second = (
        cast("Mapping[str, Any]", each) if state is None else _entries(state, only_model=only_model)
        for each, state in zip((a, b), loaded, strict=True)
    )
    return diff_states(first, second, rtol=rtol, atol=atol)


diff.__module__ = "mlstate"
