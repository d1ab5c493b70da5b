"""`mlstate.diff` of two paths or loaded states: which entries it compares, nested ones too."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ..._common.arrays import is_cache
from ...errors import FormatError
from ...state._diff import StateDiff, join_diffs
from ...state._diff import diff as diff_states
from ...state._group_merge import match_groups
from ...state._optimizer_state import OptimizerStateDict
from .._states.containers import children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from .._loaded_state import LoadedState

    State: TypeAlias = Mapping[str, Any] | LoadedState | str | os.PathLike[str]


def _loaded(value: object, storage_options: Mapping[str, Any] | None) -> LoadedState | None:
    """Return the loaded state of a path, or a loaded state itself; None for tensors of one state.

    `storage_options`: used if the path is a URL.
    """
    from .._load.load import load
    from .._loaded_state import LoadedState
    from .._store.open_path import is_url

    if isinstance(value, str | os.PathLike):
        return load(value, storage_options=storage_options if is_url(value) else None)
    return value if isinstance(value, LoadedState) else None


class _Entry(NamedTuple):
    """An array or number of a state; a value of another kind is an empty array and a text."""

    keys: tuple[Any, ...]  # of the state, and the keys and indices in it
    array: Any
    end: str = ""  # of the entry's name: " = " and the text of a value of another kind


def list_entries(keys: tuple[Any, ...], value: Any) -> Iterator[_Entry]:
    """Yield the arrays and numbers of the value at `keys`, however nested it is.

    A value of another kind, such as a text or an empty list, has an empty array.
    """
    if is_cache(value):
        from ...kv._stored import cache_values

        value = cache_values(value)[1]
    items: Iterable[tuple[Any, Any]] = children(value) or ()
    if hasattr(value, "keys"):
        items = [(key, value[key]) for key in value]
    elif isinstance(value, set | frozenset):
        items = [*enumerate(sorted(value, key=repr))]
    if hasattr(value, "dtype"):
        yield _Entry(keys, value)
    elif isinstance(value, int | float) and np.asarray(value).dtype != object:
        yield _Entry(keys, np.asarray(value))
    elif not items:  # not a container, or empty; ints beyond 64 bits, complex
        yield _Entry(keys, np.zeros(0), f" = {value!r}")
    else:
        for key, each in items:
            yield from list_entries((*keys, key), each)


def name_of_keys(keys: tuple[Any, ...]) -> str:
    """Return the keys of an entry joined by dots, without a first key "model" of a state."""
    return ".".join(map(str, keys[1:] if keys[0] == "model" and len(keys) > 1 else keys))


def name_entries(
    entries: Sequence[_Entry], name_of: Callable[[tuple[Any, ...]], str]
) -> dict[str, Any]:
    """Return the arrays of entries by name, which `name_of` makes of the keys.

    Entries whose names would be equal, such as of the keys ``"a.b"`` and of ``"b"`` in ``"a"``,
    have all keys in brackets.
    """
    counts = Counter(name_of(each.keys) + each.end for each in entries)
    arrays = {}
    for keys, array, end in entries:
        name = name_of(keys) + end
        if counts[name] > 1:
            name = str(keys[0]) + "".join(f"[{key!r}]" for key in keys[1:]) + end
        arrays[name] = array
    return arrays


def _entries(loaded: LoadedState, *, only_model: bool) -> dict[str, Any]:
    """Return the tensors and values of a loaded checkpoint by name.

    Names outside the model get the prefix "optimizer" or "states". `only_model`: only the model, or
    the optimizer of a checkpoint without a model, without a prefix.
    """
    states = {"model": loaded.model, "optimizer": loaded.optimizer, "states": loaded.states}
    if only_model:
        states = {"model": loaded.optimizer if loaded.model is None else loaded.model}
    entries = [
        each for label, state in states.items() if state for each in list_entries((label,), state)
    ]
    return name_entries(entries, name_of_keys)


class Settings(NamedTuple):
    """The values of an optimizer that are not tensors."""

    param_groups: Sequence[Mapping[str, Any]]
    learning_rate: float

    @classmethod
    def of(cls, optimizer: object) -> Settings | None:
        """Return the settings of an `OptimizerStateDict`; None for any other state."""
        if not isinstance(optimizer, OptimizerStateDict):
            return None
        return cls(optimizer.param_groups, optimizer.learning_rate)


def _read_forms(value: Any) -> Any:
    """Return groups with arrays of NumPy instead of the stored forms of tensors."""
    if isinstance(value, list | tuple):
        return [_read_forms(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("$") == "tree" and "arrays" in value:
        from .._states.tree import value_of_form

        with suppress(FormatError):
            return value_of_form(value, "param_groups")
    return {key: _read_forms(each) for key, each in value.items()}


def _match_groups(first: Sequence[Any], second: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the groups of two optimizers, in the order of the first, as a load matches them.

    Of groups that one side has joined, each is compared with the joined one. Entries that depend
    on this order are left out. Groups that do not match stay as they are.
    """
    ordered = match_groups(first, second)
    if ordered is None:
        return [first, second]
    by_position = ("params", "packed_states", "dimension_orders")
    return [
        [{key: value for key, value in group.items() if key not in by_position} for group in groups]
        for groups in (first, ordered)
    ]


def diff_settings(
    first: Mapping[str, Settings | None],
    second: Mapping[str, Settings | None],
    *,
    rtol: float,
    atol: float,
) -> StateDiff:
    """Compare the settings of optimizers by prefix; only differences are listed.

    Their names begin with the prefix, as ``optimizer.param_groups[0]['lr']``. Optimizers without
    settings on one side are skipped, and groups that only one side has.
    """
    sides: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for prefix, left in first.items():
        right = second.get(prefix)
        if left is None or right is None or bool(left.param_groups) != bool(right.param_groups):
            continue
        label = "param_groups" if left.param_groups else "learning_rate"
        pair = [getattr(each, label) for each in (left, right)]
        if label == "param_groups":
            pair = _match_groups(*pair)
        for entries, each in zip(sides, pair, strict=True):
            values = _read_forms(each)
            for keys, array, end in list_entries((), values):
                path = label + "".join(f"[{key!r}]" for key in keys)
                entries[prefix + path + end] = array
    return diff_states(*sides, rtol=rtol, atol=atol)._replace(unchanged=0)


def _settings(loaded: LoadedState) -> dict[str, Settings | None]:
    """Return the settings of a loaded checkpoint's optimizers, by prefix of their names."""
    named = {f"states.{name}.": Settings.of(state) for name, state in (loaded.states or {}).items()}
    pair = {"": Settings.of(loaded.model), "optimizer.": Settings.of(loaded.optimizer)}
    return pair | named


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
        as texts and empty lists, are part of the name: ``states.run.note = 'first'``. The values of
        parameter groups that differ are listed too, such as ``optimizer.param_groups[0]['lr']``.
        Steps and metadata are not compared.
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
    result = diff_states(first, second, rtol=rtol, atol=atol)
    if loaded[0] is not None and loaded[1] is not None:
        settings = _settings(loaded[0]), _settings(loaded[1])
        result = join_diffs(result, diff_settings(*settings, rtol=rtol, atol=atol))
    return result


diff.__module__ = "mlstate"
