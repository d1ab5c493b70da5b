"""`restore(into=)`: caches filled in place or with new arrays; room, device, after a failure."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from .._common.arrays import is_torch
from .._common.backend import TensorBackend, backend_named
from .._common.dtypes import numpy_dtype
from ..kv import KVState, RollingKVState
from ..kv._arguments import incompatible, tokens_error
from ..kv._axis import with_length
from ..kv._cache_spec import CacheEntry, CacheSpec
from ..kv._cache_state import CacheState
from ..kv._ring_slots import shift_of
from ..kv._snapshot import check_separate, check_writable
from ._caches import engine_of, ring_spec, state_of_array
from ._hybrids import check_states, to_mlx
from ._transfer import Arrays, clear, clear_rest, missing_tokens, tokens_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from .._common.changes import UndoLog
    from ._layout import StoredSpec


class StateTarget:
    """A `CacheState`, whose arrays are written in place."""

    def __init__(
        self, state: CacheState, stored: StoredSpec | None, length: int, log: UndoLog
    ) -> None:
        """Check that `length` tokens of the entries `stored` can be written into the arrays.

        `stored`: None if nothing is stored; then the entries are not compared. `log`: gets the
        calls that empty the cache. Raises CompatibilityError or CapacityError.
        """
        if stored is not None:
            stored.check(state.spec, "cache")
        for entry in state.spec:
            _check_room(entry, length)
            for name in entry.arrays:
                check_writable(entry, state.arrays[name])
        check_separate(state.arrays)
        entries = {entry.name: entry for entry in state.spec}
        self.state, self.log = state, log
        self.is_written = False
        self.has_snapshots = stored is not None and bool(stored.states)
        self.into = Arrays(entries, dict(state.arrays), dict(state._cache.shifts))
        self.listed: list[Any] = []  # parts of the snapshot, from the last call of `arrays_at`

    def begin(self) -> None:
        """Set the number of tokens to 0 before they are written; after an exception it is 0."""
        if not self.is_written:
            self.is_written = True
            self.log.note("no token", self._forget)
            self.state._set_length(0)

    def _forget(self) -> None:
        self.state._empty()
        clear_rest(self.into, 0)

    def arrays_at(
        self, position: int, listed: list[Any], windows: Mapping[str, int | None]
    ) -> Arrays:
        """Return the arrays of the state, to read tokens into; the same for any arguments.

        `EngineTarget.arrays_at` describes the arguments. `listed` is kept for `finish`.
        """
        self.listed = listed
        return self.into

    def finish(self, length: int) -> None:
        """Zero the positions without a stored token, and set the number of tokens to `length`."""
        self.begin()
        clear_rest(self.into, length)
        missing = missing_tokens(self.into, self.listed, length)
        for name in missing:
            entry = self.into.entries[name]
            assert entry.seq_axis is not None
            slot = self.into.ring(entry, length).next_slot
            clear(tokens_of(self.into.arrays[name], entry.seq_axis, slot, slot + 1))
        self.state._set_length(length, missing)


class RingTarget(StateTarget):
    """A `RollingKVState`: tokens are read into new slots, and copied into it by `finish`."""

    def __init__(
        self, cache: RollingKVState, stored: StoredSpec | None, length: int, log: UndoLog
    ) -> None:
        spec = ring_spec(cache)
        arrays = {entry.name: np.zeros(cache.shape, cache.dtype) for entry in spec}
        super().__init__(CacheState(spec, arrays, 0), stored, length, log)
        self.cache = cache

    def finish(self, length: int) -> None:
        """Replace slots and counters of the cache, for a sequence of `length` tokens."""
        clear_rest(self.into, length)
        sinks, size = self.cache.sinks, self.cache.capacity
        (slots,) = self.into.arrays.values()
        missing = sum(missing_tokens(self.into, self.listed, length).values())
        evicted = max(0, length - size) + missing
        oldest = sinks + evicted  # position of the oldest token after the sinks
        self.cache._buffer.fill(slots, oldest, length, evicted)


class _StoredState(CacheState):
    """The tokens of a store for the layers of an engine."""

    __slots__ = ("source_layers",)

    def __init__(self, state: CacheState, source_layers: int) -> None:
        """Use the arrays of `state`; `source_layers`: of the cache that was stored, 0: unknown."""
        super().__init__(state.spec, state.arrays, state.length)
        self.source_layers = source_layers


class EngineTarget:
    """A cache of an engine: it takes new arrays after all of them are read."""

    def __init__(
        self,
        cache: Any,
        engine: ModuleType,
        stored: StoredSpec | None,
        length: int,
        device: Any,
        model_type: str | None,
    ) -> None:
        """Check the cache, and create arrays for the first `length` tokens of blocks.

        `engine`: the integration with its `to_cache`. `stored`: the entries of the match; None if
        nothing is stored. `device` of new tensors; None: NumPy arrays. `model_type`: of
        config.json. Raises CompatibilityError for a cache of mlx-lm with tokens, and for states of
        another engine in an unknown layout.
        """
        self.cache, self.engine = cache, engine
        self.device, self.model_type = device, model_type
        self.is_mlx = isinstance(cache, list | tuple)
        _check_can_be_emptied(cache)
        if stored is not None and length:
            check_states(stored.entries, is_mlx=self.is_mlx, model_type=model_type)
        self.layers = (stored and stored.layers) or 0  # of the cache that was stored; 0: unknown
        self.entries = [] if stored is None else [_in_engine(e) for e in stored.entries]
        self.blocks = [] if stored is None else [_in_engine(e) for e in stored.blocks]
        self.has_snapshots = len(self.entries) > len(self.blocks)
        entries = {e.name: _with_positions(e, length) for e in self.blocks}
        self.into = Arrays(entries, _new_arrays(entries), {})

    def begin(self) -> None:
        """Do nothing: the cache is not written before the end."""

    def arrays_at(
        self, position: int, listed: list[Any], windows: Mapping[str, int | None]
    ) -> Arrays:
        """Return the arrays to read the tokens of `position` into; those of a snapshot are new.

        The result is also kept in `self.states`, for `finish`. `listed`: for each array of the
        snapshot its name, the numbers of tokens of its parts, and its shape. The numbers are None
        for an array without a sequence, and the shape is None for others. The list is empty for
        blocks alone. The arrays of a quantized entry are created together, at the first of them.
        `windows`: by name of the entry, the windows of the cache that was stored.
        """
        by_name = {e.name: e for e in self.entries if e not in self.blocks}
        states = {}
        for name, counts, shape in listed:
            entry = by_name.get(name)
            if entry is None:
                continue
            if counts is None:
                states[name] = replace(entry, shape=tuple(shape))
            else:
                count = self._position_count(entry, sum(counts), position)
                snapshot = _snapshot_entry(entry, count, windows.get(name), position)
                states[name] = replace(snapshot, unwritten=count - sum(counts))
        shifts = {name: shift_of(entry, position) for name, entry in states.items()}
        arrays = self.into.arrays | _new_arrays(states)
        self.states = Arrays(self.into.entries | states, arrays, shifts)
        return self.states

    def _position_count(self, entry: CacheEntry, count: int, position: int) -> int:
        """Return the positions of a sliding entry in the engine for `count` tokens of a snapshot.

        A full ring of mlx-lm has one token more than a snapshot of transformers. The next token
        replaces it before it is read, so it is zero.
        """
        is_layer = self.is_mlx and entry.layer is not None and entry.layer < len(self.cache)
        window = getattr(self.cache[entry.layer], "max_size", None) if is_layer else None
        return count + 1 if window == count + 1 <= position else count

    def finish(self, length: int) -> None:
        """Bring the first `length` tokens into the cache; for 0, empty it.

        The states are those of the last call of `arrays_at`. A cache of mlx-lm is empty already.
        """
        if length == 0:
            if not self.is_mlx:
                name = f"{self.engine.__name__}._caches.conversions"
                import_module(name).empty_cache(self.cache)
            return
        into = self.states if self.has_snapshots else self.into
        arrays, entries = {}, []
        for stored in self.entries:
            entry = into.entries[stored.name]
            if stored in self.blocks:
                entry = _with_positions(entry, length)
            entries.append(entry)
            for name, (shape, _) in entry.arrays.items():
                axis = entry.seq_axis
                array = into.arrays[name]
                arrays[name] = array if axis is None else array[_first_positions(axis, shape[axis])]
        arrays = _on_device(arrays, self.device)
        state = CacheState(CacheSpec(entries), arrays, length)
        if self.is_mlx:
            state = to_mlx(state, self.model_type)
        layers = _quantized_layers(self.cache, entries) if self.is_mlx else self.cache
        self.engine.to_cache(_StoredState(state, self.layers), into=layers)
        if layers is not self.cache:
            self.cache[:] = layers


Target = StateTarget | EngineTarget


def open_target(
    cache: Any,
    stored: StoredSpec | None,
    length: int,
    spec: CacheSpec | None,
    device: Any,
    model_type: str | None,
    log: UndoLog,
) -> Target:
    """Return the target for `cache`, the argument ``into=``, after all checks.

    `stored`: the entries of the match; None: nothing is stored. `length`: tokens of the match.
    `spec`: of the store; None: unknown. `device`: as for `PromptStore.restore`. `model_type`: of
    config.json; None: unknown. `log`: gets the calls that empty the cache after an exception. Grows
    a `KVState` within its capacity. Raises TypeError, CompatibilityError or CapacityError.
    """
    engine = engine_of(cache)
    if device is not None and getattr(engine, "__name__", "").rpartition(".")[2] != "transformers":
        raise TypeError("device= is for caches of transformers: other arrays are written in place")
    if isinstance(cache, CacheState):
        return StateTarget(cache, stored, length, log)
    if isinstance(cache, RollingKVState):
        return RingTarget(cache, stored, length, log)
    if isinstance(cache, KVState):
        if stored is not None:
            stored.check(state_of_array(cache, 0, spec).spec, "cache")
        former, target = cache.seq_length, None
        log.note("its length", lambda: cache.resize(0 if target and target.is_written else former))
        if former < length <= cache.capacity:
            cache.resize(length)
        target = StateTarget(state_of_array(cache, 0, spec), stored, length, log)
        return target
    if isinstance(cache, np.ndarray) or is_torch(cache):
        return StateTarget(state_of_array(cache, 0, spec), stored, length, log)
    if engine is None:
        raise TypeError(
            "into must be a CacheState, KVState, RollingKVState, array, or a cache of "
            f"transformers or mlx-lm, got {type(cache).__name__}"
        )
    return EngineTarget(cache, engine, stored, length, device, model_type)


def _on_device(arrays: dict[str, Any], device: Any) -> dict[str, Any]:
    """Return NumPy arrays as tensors on `device`; None: unchanged."""
    if device is None:
        return arrays
    backend = backend_named("torch", TensorBackend)
    tensors = backend.tensors_of(arrays)
    return {name: tensor.to(backend.device_of(device)) for name, tensor in tensors.items()}


def _check_room(entry: CacheEntry, length: int) -> None:
    """Raise CapacityError unless an entry has `length` positions, or as many as its window."""
    size = entry.seq_length
    if size is None or length <= size or (entry.window is not None and entry.window <= size):
        return
    raise tokens_error(length, size, "restore into a cache with more positions", entry.name)


def _check_can_be_emptied(cache: Any) -> None:
    """Raise CompatibilityError for a cache of mlx-lm with tokens, which cannot be removed.

    They would stay if no token can be restored.
    """
    layers = cache if isinstance(cache, list | tuple) else []
    if not all(layer.empty() for layer in layers):
        text = "the cache has tokens, and mlx-lm cannot empty it: pass one of make_prompt_cache"
        raise incompatible(text, None, "an empty cache", "a cache with tokens")


def _quantized_layers(cache: Any, entries: list[CacheEntry]) -> Any:
    """Return the layers of mlx-lm, a KVCache with quantized entries as a QuantizedKVCache.

    mlx-lm replaces layers in its list likewise. Other layers are the same objects; `cache` itself
    is returned if none is replaced.
    """
    layers = list(cache)
    module = import_module("mlx_lm.models.cache")
    for entry in entries if isinstance(cache, list) else []:
        at = -1 if entry.layer is None else entry.layer
        if (
            entry.kind == "quantized"
            and 0 <= at < len(layers)
            and type(cache[at]) is module.KVCache
        ):
            layers[at] = module.QuantizedKVCache(entry.group, entry.bits)
    is_same = all(new is old for new, old in zip(layers, cache, strict=True))
    return cache if is_same else layers


def _first_positions(axis: int, count: int) -> tuple[slice, ...]:
    return (*(slice(None) for _ in range(axis)), slice(count))


def _in_engine(entry: CacheEntry) -> CacheEntry:
    """Return an entry as engines have it: keys and values with the sequence as axis 2 of 4.

    The cache that was stored may have had another order, such as Core AI has on iOS.
    """
    axis = entry.seq_axis
    if axis is None or len(entry.shape) != 4:
        return entry
    inner = [*entry.shape[:axis], *entry.shape[axis + 1 :]]
    return replace(entry, shape=(*inner[:2], entry.shape[axis], inner[2]), seq_axis=2)


def _with_positions(entry: CacheEntry, count: int) -> CacheEntry:
    assert entry.seq_axis is not None
    shape = with_length(entry.shape, entry.seq_axis, count)
    return replace(entry, shape=tuple(shape))


def _snapshot_entry(entry: CacheEntry, count: int, window: int | None, position: int) -> CacheEntry:
    """Return an entry with `count` positions, for a snapshot at `position`.

    `window`: of the cache that it was taken from; None: `count`. The oldest token is in the first
    slot after the sinks.
    """
    entry = _with_positions(entry, count)
    if entry.kind != "sliding":
        return entry
    return replace(entry, window=window or count, next_slot=min(entry.sinks, position))


def _new_arrays(entries: dict[str, CacheEntry]) -> dict[str, Any]:
    """Return NumPy arrays of zeros for entries, by array name."""
    return {
        name: np.zeros(shape, numpy_dtype(dtype))
        for entry in entries.values()
        for name, (shape, dtype) in entry.arrays.items()
    }
