"""A `CacheState` into layers of transformers' caches: which tokens fit; all checks, then writes."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...._common.arrays import (
    is_torch,
    names_sharing_memory,
    overlaps_itself,
    overwrite,
    shares_elements,
)
from ....kv._arguments import incompatible, tokens_error
from ....kv._cache_spec import CacheEntry, entry_error
from ....kv._packed_object import PART
from ....kv._snapshot import check_separate
from ..._caches import EntryPlan
from ...torch._tensors.state import tensors_of
from .layer_classes import (
    WHOLE,
    LayerClass,
    checked_tensor,
    empty_layers,
    has_known_class,
    layer_class,
    state_of,
    tensor_of,
    value_of,
)
from .whole_layers import CACHE, holds_elements, new_like, plan_whole, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ....kv import CacheState


class Filler(EntryPlan):
    """Collects the writes that bring the tokens of a state into layers.

    Call `plan` for each layer, and then `write_all`.
    """

    def __init__(self, state: CacheState, *, is_shared: bool) -> None:
        super().__init__(state)
        self.is_shared = is_shared  # the layers are new: they use the arrays themselves
        # tensors of layers, by the entry they are filled from
        self.overwritten: dict[str, Any] = {}
        self._classes: list[tuple[Any, LayerClass]] = []  # of the layers

    def plan(self, layer: Any, index: int, prefix: str = "") -> None:
        """Check that a layer fits the state, and plan the writes to it; nothing is written.

        `index`: of the layer in its cache. `prefix`: of the entries' names, empty or "cross.".
        Raises CompatibilityError if it does not fit, and CapacityError for too many tokens.
        """
        where = f"{prefix}{index}"
        cls = layer_class(layer, where)
        self.add_layer(layer, where)
        new = _copy_layer(layer)  # gets the new attributes
        self.layers.append((layer, vars(new)))
        self._classes.append((layer, cls))
        at = _Place(self, new, where, cls, is_cross=bool(prefix))
        if cls.is_whole:
            _plan_whole(at)
        if cls.attention:
            _PLANS[cls.attention](at)
        if cls.has_indexer:
            _plan_indexer(at)
        if cls.is_linear:
            _plan_states(at)
        # a cross-attention has no entry before the encoder was run
        # a cache of an unknown class may keep the state of a layer itself
        is_needed = "cross" in self._filled if prefix else CACHE not in self._filled
        if cls.has_tokens and is_needed:
            self.require_layer(where, index)

    def plan_rest(self, cache: Any) -> None:
        """Plan the attributes of a cache of an unknown class beside its layers.

        Raises CompatibilityError if they do not fit.
        """
        if has_known_class(cache):
            return
        new: Any = new_like(cache, is_whole=True)
        at = _Place(self, new, CACHE, WHOLE._replace(name=type(cache).__name__), is_cross=False)
        values = _plan_whole(at)
        if isinstance(cache, list):
            self.changes.append(partial(cache.__setitem__, slice(None), values))
        else:
            self.layers.append((cache, values))
            self._classes.append((cache, at.cls))

    def write_all(self) -> None:
        """Make all planned writes; raise CompatibilityError before if two would meet in memory."""
        check_separate(self.overwritten)
        self._check_sources()
        super().write_all()

    def empty(self) -> None:
        """Remove the tokens of all layers."""
        empty_layers(self._classes)

    def set_later(self, counter: Any, value: int) -> None:
        """Plan to set a counter of the target, a tensor that keeps its address."""
        self.fills.append(partial(_set_all, counter, value))

    def _check_sources(self) -> None:
        """Raise CompatibilityError if a write would change the array of another entry."""
        sources = {f"source {name}": array for name, array in self.arrays.items()}
        near = names_sharing_memory({**sources, **self.overwritten})
        for name in sorted(near & set(self.overwritten)):
            for other, array in self.arrays.items():
                is_near = other != name and f"source {other}" in near
                if is_near and shares_elements(array, self.overwritten[name]):
                    text = f"its tensor in the cache has elements of the array {other!r}"
                    text += ", which a write would change: copy the state"
                    raise entry_error(name, text, "other memory", "shared memory")


class _Place(NamedTuple):
    """A layer of transformers whose writes are being planned."""

    filler: Filler
    layer: Any  # a copy with the same tensors, which gets the new attributes
    where: str  # start of its entries' names, such as "3" or "cross.3"
    cls: LayerClass
    is_cross: bool  # of a cross-attention

    def entry(self, part: str, *kinds: str) -> CacheEntry | None:
        """Return the entry of the layer's array `part`, such as "keys"; None if the state lacks it.

        Raises CompatibilityError if the entry is of none of the `kinds`.
        """
        return self.filler.entry(self.where, self.cls.name, part, *kinds)

    def both(self, *kinds: str, prefix: str = "") -> list[CacheEntry]:
        """Return the entries of the layer's keys and values, or [] if the state has neither.

        `kinds`: that are accepted. `prefix`: of the names "keys" and "values".
        """
        return self.filler.both(self.where, self.cls.name, *kinds, prefix=prefix)

    def tensor(self, entry: CacheEntry) -> Any:
        """Return an array of the state as a tensor over the same memory."""
        array = self.filler.arrays[entry.name]
        return array if is_torch(array) else tensors_of({entry.name: array})[entry.name]

    def tokens(self, entry: CacheEntry, most: int | None = None) -> list[Any]:
        """Return the tokens of an entry's array by increasing position, as views of its pieces.

        `most`: as for `runs` of a ring: the sinks and the newest others, at most so many; None:
        all. An entry without a sequence axis is one piece.
        """
        tensor = self.tensor(entry)
        if entry.seq_axis is None:
            return [tensor]
        runs = self.filler.ring_of(entry).runs(most)
        return [tensor.narrow(entry.seq_axis, run.start, len(run)) for run in runs]

    def require_empty(self, has_tokens: object) -> None:
        """Raise CompatibilityError if the layer has tokens, although the state has none for it.

        `has_tokens`: true or false as `bool` takes it, such as a number of tokens.
        """
        self.filler.require_empty(self.where, has_tokens)

    def check_target(self, target: Any, shape: tuple[int, ...], entry: CacheEntry) -> None:
        """Raise CompatibilityError unless an entry's tokens fit the layer's tensor `target`.

        `shape`: needed shape of `target`. Its dtype must be the array's.
        """
        tensor = self.tensor(entry)
        got = tuple(target.shape)
        if got != shape:
            text = f"the array needs a tensor of {shape}, and layer {self.where} has {got}"
            raise entry_error(entry.name, text, shape, got)
        if target.dtype != tensor.dtype:
            text = f"the array is {tensor.dtype}, and the tensor of layer {self.where} "
            raise entry_error(
                entry.name, f"{text}{target.dtype}", str(tensor.dtype), str(target.dtype)
            )

    def write(self, call: Callable[[], object]) -> None:
        """Add a call that writes to the layer, to run after all layers were checked."""
        self.filler.writes.append(call)


def _copy_layer(layer: Any) -> Any:
    """Return a layer with the same tensors, and with its own dicts of states."""
    copy = object.__new__(type(layer))
    values = vars(layer).items()
    vars(copy).update({k: dict(v) if type(v) is dict else v for k, v in values})
    return copy


def _join_pieces(pieces: list[Any], like: Any, axis: int) -> Any:
    """Return `pieces` of tokens as one tensor along `axis`: a view if there is one piece.

    Without pieces, the result is an empty view of `like`.
    """
    if len(pieces) == 1:
        return pieces[0]
    if not pieces:
        return like.narrow(axis, 0, 0)
    import torch

    return torch.cat(pieces, axis)


def _are_same(first: Any, second: Any) -> bool:
    """Return whether two tensors are views of the same elements in the same order."""
    return bool(
        first.device == second.device
        and first.data_ptr() == second.data_ptr()
        and first.shape == second.shape
        and first.stride() == second.stride()
    )


def _set_all(tensor: Any, value: int) -> None:
    """Set all elements of a tensor, also of one that was created in inference mode."""
    import torch

    with torch.inference_mode() if tensor.is_inference() else nullcontext():
        tensor.fill_(value)


def _length_of(at: _Place, entry: CacheEntry) -> int:
    """Return the number of tokens of an entry: a cross-attention has its own, else the state's."""
    return entry.shape[2] if at.is_cross else at.filler.length


def _check_window(at: _Place, entry: CacheEntry, needed: int) -> None:
    """Raise CompatibilityError unless an entry has the tokens that a layer's window needs.

    Nor may the windows differ if older tokens were evicted. The window of an entry from a static
    layer counts the token being computed, that of one from a dynamic layer does not. `needed`:
    number of earlier tokens that the layer keeps, without that token.
    """
    length = at.filler.length
    if entry.sinks:
        text = f"{entry.sinks} sinks: transformers has none"
        raise entry_error(entry.name, text, 0, entry.sinks)
    stored = min(length, entry.seq_length or 0) - at.filler.ring_of(entry).unwritten
    if stored < min(length, needed):
        text = f"the window of layer {at.where} needs {min(length, needed)} tokens, not {stored}"
        raise entry_error(entry.name, f"{text}: older ones were evicted", needed, stored)
    window = entry.window or 0
    if at.cls.attention == "static":
        if needed + 1 < min(length, window):  # a static layer has a position for the new token
            text = f"layer {at.where} has {needed + 1} positions for a window of {window}"
            raise entry_error(entry.name, f"{text} and {length} tokens", window, needed + 1)
    elif not window - 1 <= needed <= window and length > min(needed, window):
        text = f"layer {at.where} keeps {needed} tokens, and the array has a window of {window}"
        raise entry_error(entry.name, text, window, needed)


def _check_replaced(at: _Place, entry: CacheEntry, target: Any) -> None:
    """Raise CompatibilityError unless an entry fits `target`, the tokens that it will replace.

    The number of sequences and of tokens may differ. A `target` without tokens has only a dtype.
    """
    shape = tuple(target.shape)
    if len(shape) == len(entry.shape):
        variable = (0, 2 if entry.seq_axis is None else entry.seq_axis)
        sizes = zip(shape, entry.shape, strict=True)
        shape = tuple([old if i in variable else new for i, (old, new) in enumerate(sizes)])
    at.check_target(target, shape, entry)


def _token_kind(at: _Place) -> str:
    """Return the kind of entry that a layer's keys and values need."""
    if at.is_cross:
        return "opaque"
    return "sliding" if at.cls.is_sliding else "full"


def _needed_tokens(at: _Place, entries: list[CacheEntry]) -> int | None:
    """Return how many of the newest tokens a growing layer stores; None: all of them.

    A layer with a window stores one token less, because the next one completes the window; one that
    records its past stores all. `entries`: of keys and values. Raises CompatibilityError if they
    lack a token of the window.
    """
    if not at.cls.is_sliding:
        return None
    value_of(at.layer, at.where, "cumulative_length", int)
    tensor_of(at.layer, at.where, "_sliding_window_tensor", 0)
    earlier = value_of(at.layer, at.where, "sliding_window", int) - 1
    for entry in entries:
        _check_window(at, entry, earlier)
    return None if value_of(at.layer, at.where, "record_past", bool) else earlier


def _plan_dynamic(at: _Place) -> None:
    """Check that a growing layer can take the state's keys and values, and plan the write.

    The layer gets views of the arrays in place of its own tensors.
    """
    layer, parts = at.layer, ("keys", "values")
    entries = at.both(_token_kind(at))
    has_tensors = value_of(layer, at.where, "is_initialized", bool)
    if not entries:
        at.require_empty(has_tensors and tensor_of(layer, at.where, "keys").numel())
        return
    if has_tensors:
        for entry, part in zip(entries, parts, strict=True):
            _check_replaced(at, entry, tensor_of(layer, at.where, part))
    count = _needed_tokens(at, entries)
    keys, values = (_join_pieces(at.tokens(e, count), at.tensor(e), 2) for e in entries)

    def write() -> None:
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if at.cls.is_sliding:
            layer.cumulative_length = at.filler.length

    at.write(write)


def _plan_whole(at: _Place) -> Any:
    """Check that an object of an unknown class can take its array; return its new attributes.

    A layer gets them now, as it is a copy.
    """
    entry, label = at.entry(PART, "opaque"), f"layer {at.where}"
    if entry is None:
        at.require_empty(holds_elements(at.layer))
        return at.layer if isinstance(at.layer, list) else values_of(at.layer)
    is_new = at.filler.is_shared
    planned = plan_whole(at.layer, at.tensor(entry), entry.name, label, is_new=is_new)
    at.filler.fills.extend(planned.fills)
    if at.where != CACHE:
        vars(at.layer).update(planned.values)
    return planned.values


def _plan_fp8(at: _Place) -> None:
    """Check that a layer of FP8 codes can take the state's codes and scales, and plan the write.

    ``keys`` and ``values`` of such a state are empty: they have the dtype before quantization.
    """
    layer = at.layer
    is_initialized = value_of(layer, at.where, "is_initialized", bool)
    codes = at.both("full", prefix="quantized_")
    if not codes:
        at.require_empty(is_initialized)
        return
    unquantized = at.both("opaque")
    scales = [at.entry(f"quantized_{part}.scale", "opaque") for part in ("keys", "values")]
    if len(unquantized) != 2 or scales[0] is None or scales[1] is None:
        text = f"layer {at.where} lacks the scale or the dtype of its codes"
        raise incompatible(text, at.where, "keys, values and two scales", "less")
    for code in codes:
        if at.tensor(code).dtype != layer.fp8_dtype:
            text = f"the codes are {code.dtype}, those of layer {at.where} {layer.fp8_dtype}"
            raise entry_error(code.name, text, layer.fp8_dtype, code.dtype)
    keys, values = (at.tensor(entry) for entry in unquantized)
    if is_initialized:
        for code, entry, part in zip(codes, unquantized, ("keys", "values"), strict=True):
            _check_replaced(at, entry, tensor_of(layer, at.where, part))
            attribute = f"_quantized_{part}"
            # of the pair of codes and scale
            old_codes = next(iter(value_of(layer, at.where, attribute, tuple)), None)
            _check_replaced(at, code, checked_tensor(old_codes, layer, at.where, attribute))
    pairs = [
        (_join_pieces(at.tokens(code), at.tensor(code), 2), at.tensor(scale))
        for code, scale in zip(codes, scales, strict=True)
        if scale is not None
    ]

    def write() -> None:
        # Not the method of the layer, which would quantize the tensors.
        from transformers.cache_utils import DynamicLayer

        DynamicLayer.lazy_initialization(layer, keys, values)
        layer._quantized_keys, layer._quantized_values = pairs
        layer.cumulative_length = at.filler.length

    at.write(write)


def _plan_static(at: _Place) -> None:
    """Check that a layer of fixed size can take the keys and values, and plan the write.

    Raises CapacityError if the tokens exceed a layer without a window.
    """
    layer = at.layer
    entries = at.both(_token_kind(at))
    is_new = not value_of(layer, at.where, "is_initialized", bool)
    counter = tensor_of(layer, at.where, "cumulative_length", 0)
    if not entries:
        at.require_empty(not is_new and int(counter))
        return
    positions = value_of(layer, at.where, "max_cache_len", int)
    length = _length_of(at, entries[0])
    if at.cls.is_sliding:
        value_of(layer, at.where, "cumulative_length_int", int)
        for entry in entries:
            _check_window(at, entry, positions - 1)
    elif length > positions:
        raise tokens_error(
            length, positions, f"layer {at.where} needs a larger max_cache_len", entries[0].name
        )
    is_full = at.cls.is_sliding and length >= positions
    fills = [
        _plan_fill(at, entry, name, positions, is_full=is_full, is_new=is_new)
        for entry, name in zip(entries, ("keys", "values"), strict=True)
    ]

    def write() -> None:
        """Write keys, values and counters to the layer."""
        if is_new:
            _initialize_static(at, entries, positions)
        for fill in fills:
            fill()
        _set_counter(at, "cumulative_length", min(length, positions), is_new=is_new)
        if at.cls.is_sliding:
            layer.cumulative_length_int = length
            tokens = sum(map(len, at.filler.ring_of(entries[0]).runs(positions)))
            at.filler.note_unwritten(vars(layer), is_unwritten=is_full and tokens < positions)

    at.write(write)


def _initialize_static(at: _Place, entries: list[CacheEntry], positions: int) -> None:
    """Let a new layer of fixed size allocate its tensors, for `positions` tokens.

    `entries`: of its keys and values. If it will use the arrays of the state, it allocates tensors
    without positions.
    """
    layer = at.layer
    keys, values = (at.tensor(entry) for entry in entries)
    is_adopted = all(_is_adopted(at, entry, positions) for entry in entries)
    with _allocated_positions(layer, 0 if is_adopted else positions):
        layer.lazy_initialization(keys, values)
    if layer.values.dtype != values.dtype:  # 5.23 creates them with the dtype of the keys
        _adopt(at, "values", layer.values.to(values.dtype))


def _set_counter(at: _Place, attribute: str, value: int, *, is_new: bool) -> None:
    """Set the counter of a static layer, a tensor; a layer that has tokens keeps its address."""
    counter = getattr(at.layer, attribute)
    if is_new:
        _adopt(at, attribute, counter.new_full((), value))
    else:
        at.filler.set_later(counter, value)


@contextmanager
def _allocated_positions(layer: Any, positions: int) -> Iterator[None]:
    """Let a layer allocate `positions` positions in the block; then it has its own number again."""
    before, layer.max_cache_len = layer.max_cache_len, positions
    try:
        yield
    finally:
        layer.max_cache_len = before


def _is_adopted(at: _Place, entry: CacheEntry, positions: int) -> bool:
    """Return whether a new layer can use the entry's array itself, without a copy.

    `positions`: length of the layer; the array needs as many. The tokens of a ring must be in
    order, from its first slot on. Layers of a cache that the user passed get copies.
    """
    if not at.filler.is_shared or at.is_cross or entry.seq_length != positions:
        return False
    if entry.kind == "full":
        return True
    runs = at.filler.ring_of(entry).runs()
    return not runs or (len(runs) == 1 and runs[0].start == 0)


def _adopt(at: _Place, attribute: str, tensor: Any) -> None:
    """Make `tensor` the attribute of a static layer, at an address that CUDA graphs may rely on."""
    import torch

    setattr(at.layer, attribute, tensor)
    torch._dynamo.mark_static_address(tensor)


def _plan_fill(
    at: _Place, entry: CacheEntry, attribute: str, positions: int, *, is_full: bool, is_new: bool
) -> Callable[[], None]:
    """Return the call that prepares the layer's tensor `attribute` with the tokens of an entry.

    A tensor that the layer has already is filled later, in place. `positions`: length of the layer.
    `is_full`: the tokens fill its window, so they end at the last position; else they begin at
    position 0. `is_new`: the layer has no tensors yet.
    """
    layer, axis = at.layer, 2 if entry.seq_axis is None else entry.seq_axis
    if is_new and _is_adopted(at, entry, positions):
        return lambda: _adopt(at, attribute, at.tensor(entry))
    pieces = at.tokens(entry, positions if is_full else None)
    count = sum(piece.shape[axis] for piece in pieces)
    start = positions - count if is_full else 0
    if not is_new:
        shape = (*entry.shape[:axis], positions, *entry.shape[axis + 1 :])
        target = tensor_of(layer, at.where, attribute, len(shape))
        at.check_target(target, shape, entry)
        if len(pieces) == 1 and _are_same(pieces[0], target.narrow(axis, start, count)):
            return lambda: None
        _overwrite_later(at, entry, target)

    def fill() -> None:
        """Copy the pieces behind each other from `start`, and zero the other positions."""
        target, position = getattr(layer, attribute), start
        for piece in pieces:
            overwrite(target.narrow(axis, position, piece.shape[axis]), piece)
            position += piece.shape[axis]
        if not is_new:
            _set_all(target.narrow(axis, 0, start), 0)
            _set_all(target.narrow(axis, position, positions - position), 0)

    return fill if is_new else partial(at.filler.fills.append, fill)


def _overwrite_later(at: _Place, entry: CacheEntry, target: Any) -> None:
    """Note that `target` will be overwritten with an entry's array.

    Raises CompatibilityError if they share memory, since the write would destroy its source, or if
    elements of `target` share memory.
    """
    tensor = at.tensor(entry)
    if overlaps_itself(target):
        text = f"elements of the tensor of layer {at.where} share memory"
        raise entry_error(entry.name, text, "separate elements", "shared ones")
    if tensor.device == target.device and shares_elements(tensor, target):
        text = f"the array shares memory with layer {at.where}, at other positions: copy the state"
        raise entry_error(entry.name, text, "other memory", "shared memory")
    at.filler.overwritten[entry.name] = target


def _plan_indexer(at: _Place) -> None:
    """Check that a layer's indexer can take its keys and position ids, and plan the write.

    The indexer of a sparse attention has a cache of its keys, and a static one counts its tokens.
    """
    layer, is_static = at.layer, at.cls.attention == "static"
    entry = at.entry("indexer_keys", "full")
    is_new = not value_of(layer, at.where, "is_indexer_initialized", bool)
    if entry is None:
        has_tokens = not is_new and tensor_of(layer, at.where, "indexer_keys").numel()
        if has_tokens and is_static:
            has_tokens = int(tensor_of(layer, at.where, "indexer_cumulative_length", 0))
        at.require_empty(has_tokens or getattr(layer, "indexer_position_ids", None) is not None)
        return
    ids = at.entry("indexer_position_ids", "full", "opaque")
    positions = value_of(layer, at.where, "max_cache_len", int) if is_static else 0
    length = at.filler.length
    if is_static:
        if not is_new:
            tensor_of(layer, at.where, "indexer_cumulative_length", 0)
        fill = _plan_fill(at, entry, "indexer_keys", positions, is_full=False, is_new=is_new)
    elif not is_new:
        _check_replaced(at, entry, tensor_of(layer, at.where, "indexer_keys"))
    keys = at.tensor(entry)

    def write() -> None:
        """Write the indexer's keys, counter and position ids."""
        if not is_static:
            layer.lazy_initialization_indexer(keys)
            layer.indexer_keys = _join_pieces(at.tokens(entry), keys, 1)
        else:
            if is_new:
                is_adopted = _is_adopted(at, entry, positions)
                # without positions, nothing is allocated that the adopted array would replace
                with _allocated_positions(layer, 0 if is_adopted else positions):
                    layer.lazy_initialization_indexer(keys)
            fill()
            _set_counter(at, "indexer_cumulative_length", length, is_new=is_new)
        layer.indexer_position_ids = (
            None if ids is None else _join_pieces(at.tokens(ids), at.tensor(ids), 2)
        )

    at.write(write)


def _plan_states(at: _Place) -> None:
    """Plan the writes of all convolution and recurrent states of a linear attention layer.

    Raises CompatibilityError if the layer has tokens in states that the `CacheState` lacks.
    """
    for number in range(value_of(at.layer, at.where, "number_of_states", int)):
        conv = at.entry(f"conv_states.{number}", "conv")
        recurrent = at.entry(f"recurrent_states.{number}", "recurrent")
        for name, entry in (("conv_states", conv), ("recurrent_states", recurrent)):
            if entry is None:
                at.require_empty(_has_state(at, name, number))
            else:
                _plan_state(at, name, number, entry)


def _has_state(at: _Place, attribute: str, number: int) -> bool:
    """Return whether a layer has tokens in one state: "conv_states" or "recurrent_states".

    A reset zeroes the states, and a convolution also forgets that it has tokens.
    """
    is_initialized, has_conv, has_tokens = (
        state_of(at.layer, at.where, name, number)
        for name in (
            f"is_{attribute}_initialized",
            "is_conv_states_initialized",
            "has_previous_state",
        )
    )
    return bool(is_initialized and (has_tokens or not has_conv))


def _plan_state(at: _Place, attribute: str, number: int, entry: CacheEntry) -> None:
    """Plan the write of one state: `attribute` is "conv_states" or "recurrent_states".

    `number`: index of the state in the layer's dict. `entry`: of the array to write. The inputs of
    a convolution that records the past may have another length, so this tensor is replaced; others
    are overwritten.
    """
    layer, part = at.layer, attribute.partition("_")[0]
    is_new = not state_of(layer, at.where, f"is_{attribute}_initialized", number)
    for name in ("has_previous_state", "conv_kernel_size"):
        state_of(layer, at.where, name, number)
    tensor, is_conv = at.tensor(entry), part == "conv"
    is_recording = is_conv and value_of(layer, at.where, "record_past", bool)
    is_same = False
    if not is_new:
        target = state_of(layer, at.where, attribute, number)
        target = checked_tensor(target, layer, at.where, attribute)
        is_same = _are_same(tensor, target)
        # a recording layer has any number of inputs, and gets another tensor
        inputs = target.shape[-1] if is_recording else entry.shape[-1]
        at.check_target(target, (*entry.shape[:-1], inputs), entry)
        if not is_same and not is_recording:
            _overwrite_later(at, entry, target)

    def write() -> None:
        """Write one state; a layer without one, or that records, gets the tensor or a copy."""
        states = getattr(layer, attribute)
        if is_new:
            layer.lazy_initialization(**{attribute: tensor[:0], "state_idx": number})
        if is_conv:
            layer.has_previous_state[number] = True
        if is_same:
            return
        if is_new or is_recording:
            import torch

            states[number] = tensor if at.filler.is_shared else tensor.clone()
            torch._dynamo.mark_static_address(states[number])
        else:
            at.filler.fills.append(partial(overwrite, states[number], tensor))

    at.write(write)


_PLANS: dict[str, Callable[[_Place], None]] = {
    "dynamic": _plan_dynamic,
    "static": _plan_static,
    "fp8": _plan_fp8,
}
