"""Parts of `from_cache`, `to_cache` that transformers and mlx-lm share: entries, token counts.

An integration names an array ``"<layer>.<part>"``, such as ``"0.keys"``. A reader collects entries
and arrays of all layers; a plan checks all of them against the layers of a target, and then writes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .._common.changes import UndoLog, exchange
from ..kv import CacheEntry, CacheState
from ..kv._arguments import as_count, incompatible
from ..kv._cache_spec import entry_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .._types import Array
    from ..errors import CompatibilityError
    from ..kv import CacheSpec


# Attribute of a layer with a ring whose oldest token is not in its slot: the number of tokens at
# that moment. It is an attribute because copies and pickles of the layer have the same slot.
UNWRITTEN = "_mlstate_unwritten"


def is_unwritten(layer: object, tokens: int) -> bool:
    """Return whether the oldest token of a ring is not in its slot; `tokens`: of the layer."""
    return vars(layer).get(UNWRITTEN) == tokens


class LaidOutState(CacheState):
    """A state that knows the classes of the cache that it was made from.

    A checkpoint stores it as a `CacheState`. `unstored` is a text on the values of the layers that
    a checkpoint would lose, although the arrays have another meaning without them: `mlstate.save`
    refuses such a state with this text.
    """

    __slots__ = ("_layouts", "_requested_capacity", "_unstored")

    def __init__(
        self,
        spec: CacheSpec,
        arrays: Mapping[str, Array],
        length: int,
        layouts: Any,
        unstored: str = "",
    ) -> None:
        """Wrap arrays as `CacheState` does, with facts about the layers.

        `layouts`: an integration's description of the layers, which it recognizes by its type.
        `unstored`: see the class; "" if checkpoints store everything.
        """
        super().__init__(spec, arrays, length)
        self._layouts, self._unstored = layouts, unstored
        self._requested_capacity: int | None = None

    @property
    def source_layers(self) -> int:
        """Number of layers of the cache that the state was made from."""
        return len(getattr(self._layouts, "layers", self._layouts))

    def resize(self, capacity: int) -> None:
        """Do as `CacheState.resize`, and note the capacity.

        The entries do not show it if all are sliding: their window may be as long as the cache was.
        """
        super().resize(capacity)
        self._requested_capacity = capacity

    @property
    def requested_capacity(self) -> int | None:
        """Capacity of the last `resize`; None if there was none."""
        return getattr(self, "_requested_capacity", None)  # older pickles do not have it


def unknown_classes() -> CompatibilityError:
    """Return the exception for a new cache of a state without its classes, or with others."""
    text = "from_cache of this library did not make the state, so the classes of its layers are"
    return incompatible(f"{text} unknown: pass into=", None, "into=", None)


class EntryReader:
    """Collects the entries of layers, and the number of tokens that all of them have."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.entries: list[CacheEntry] = []
        self.arrays: dict[str, Any] = {}
        self.length: int | None = None
        self._counted_by = ""

    def add(
        self,
        where: str,
        layer: int,
        part: str,
        array: Any,
        kind: Any,
        seq_axis: int = 2,
        **options: Any,
    ) -> None:
        """Add an array of a layer as an entry with the name ``"<where>.<part>"``.

        `where`: place of the layer, such as "3" or "3.0". `layer`: its index in the cache. `part`:
        name of the array in the layer, such as "keys" or "states.0"; the role is its first piece.
        `kind`, `seq_axis`, `options`: arguments of `CacheEntry`.
        """
        name, role = f"{where}.{part}", part.partition(".")[0]
        shape = tuple(array.shape)
        entry = CacheEntry(
            name, kind, shape, array.dtype, seq_axis, layer=layer, role=role, **options
        )
        self.entries.append(entry)
        self.arrays[name] = array

    def count(self, tokens: int, where: str) -> None:
        """Note the number of tokens of the layer at `where`.

        Raises CompatibilityError if an earlier layer has another number.
        """
        if self.length is None:
            self.length, self._counted_by = tokens, where
        elif self.length != tokens:
            text = f"layer {where} has {tokens} tokens, but layer {self._counted_by} {self.length}"
            raise incompatible(
                f"{text}: the layers of one cache have the same number; split a list of a model "
                "and its draft model, and pass each part by itself",
                where,
                self.length,
                tokens,
            )

    def require_entries(self) -> None:
        """Raise CompatibilityError if no layer has an array."""
        if not self.entries:
            text = "no layer of the cache has a token: there is nothing to move"
            raise incompatible(text, None, "a cache after a prefill", "an empty cache")

    def checked_length(self, passed: int | None) -> int:
        """Return the number of tokens that the layers count, or else the `passed` one.

        Raises CompatibilityError if both exist and differ, or neither exists.
        """
        counted = self.length
        if passed is not None:
            passed = as_count("length", passed)
        if counted is None and passed is None:
            text = "no layer counts the tokens: pass length="
            raise incompatible(text, None, "length=", None)
        if counted is not None and passed not in (None, counted):
            text = f"the layers have {counted} tokens, and length is {passed}"
            raise incompatible(text, None, counted, passed)
        return counted if passed is None else passed  # type: ignore[return-value]


class EntryPlan:
    """The entries of a state for the layers of a target: all checks, then all writes."""

    def __init__(self, state: CacheState) -> None:
        if not isinstance(state, CacheState):
            raise TypeError(f"state must be a CacheState, got {type(state).__name__}")
        self.spec, self.arrays, self.length = state.spec, state.arrays, state.length
        self._cache = state._cache
        self.ring_of = state._cache.ring  # returns the order of an entry's positions
        self.writes: list[Callable[[], object]] = []  # prepare values; the target is unchanged
        # After them, calls that fill arrays of the target in place, and the final changes.
        self.fills: list[Callable[[], object]] = []
        self.changes: list[partial[Any]] = []
        self.layers: list[tuple[Any, dict[str, Any]]] = []  # with their new attributes
        self.used: set[str] = set()  # names of arrays that a layer takes
        self._places: dict[int, str] = {}  # of layers, by identity
        parts = [name.split(".") for name in self.arrays]
        self._filled = {".".join(part[:i]) for part in parts for i in range(len(part))}  # places
        self._source_layers: int = getattr(state, "source_layers", 0)  # 0: unknown

    def add_layer(self, layer: object, where: str) -> None:
        """Note the layer at the place `where`; raise CompatibilityError if it has another place."""
        first = self._places.setdefault(id(layer), where)
        if first != where:
            text = f"layers {first} and {where} are the same object"
            raise incompatible(text, where, "a layer for each place", "one layer")

    def entry(self, where: str, owner: str, part: str, *kinds: str) -> CacheEntry | None:
        """Return the entry of the array ``"<where>.<part>"``, or None if the state lacks it.

        The array counts as used. Raises CompatibilityError if its kind is not in `kinds`. `owner`:
        class of the layer, for errors.
        """
        name = f"{where}.{part}"
        if name not in self.arrays:
            return None
        entry = self.spec.entry_of(name)
        if entry.kind not in kinds:
            text = f"an entry of kind {entry.kind} does not fit layer {where}, a {owner}"
            remedies = {
                "quantized": ": call state.dequantize() first",
                "sliding": ": pass a cache of the model's config, as DynamicCache(config=...)",
                "full": ": call state.quantize(bits, group) first",
            }
            is_quantized = "quantized" in (entry.kind, *kinds)
            if is_quantized or (entry.kind == "sliding" and owner == "DynamicLayer"):
                text += remedies.get(entry.kind, "")
            raise entry_error(name, text, " or ".join(kinds), entry.kind)
        self.used.update(entry.arrays)
        return entry

    def both(self, where: str, owner: str, *kinds: str, prefix: str = "") -> list[CacheEntry]:
        """Return the entries of keys and values of the layer at `where`, or [] if it has neither.

        `owner`: class of the layer, for errors. `kinds`: accepted kinds, as for `entry`. `prefix`:
        of the names "keys" and "values". Raises CompatibilityError as `entry`, if only one exists,
        or if their shapes differ before the last of four axes.
        """
        parts = f"{prefix}keys", f"{prefix}values"
        entries_or_none = [self.entry(where, owner, part, *kinds) for part in parts]
        entries = [each for each in entries_or_none if each is not None]
        if len(entries) == 1:
            text = f"the state has {entries[0].name!r} only"
            raise incompatible(text, where, " and ".join(parts), entries[0].name)
        if entries and entries[0].shape[:3] != entries[1].shape[:3]:
            text = f"the array has shape {entries[1].shape}, and the keys {entries[0].shape}"
            raise entry_error(entries[1].name, text, entries[0].shape[:3], entries[1].shape[:3])
        return entries

    def require_layer(self, where: str, index: int) -> None:
        """Raise CompatibilityError if the state has no array of the layer at `where`.

        It would be empty in a cache with tokens. A layer that the source of the state had too, at
        `index`, was empty there.
        """
        if where not in self._filled and index >= self._source_layers:
            text = f"the state has no array of layer {where}: it comes from a model with fewer "
            text += "layers, so pass a cache with as many layers"
            raise incompatible(text, where, "an array of the layer", "none")

    def require_tokens(self, entries: list[CacheEntry]) -> None:
        """Raise CompatibilityError if the oldest token of an entry is not in its slot."""
        self._cache.require_tokens("the layer", [entry.name for entry in entries])

    def note_unwritten(self, values: dict[str, Any], *, is_unwritten: bool) -> None:
        """Note in the new attributes of a layer whether the oldest token is not in its slot."""
        if is_unwritten or UNWRITTEN in values:
            values[UNWRITTEN] = self.length if is_unwritten else None

    def require_empty(self, where: str, has_tokens: object) -> None:
        """Raise CompatibilityError if a layer has tokens, although the state has none for it.

        `where`: place of the layer. `has_tokens`: whether it has, as a value that is true or false.
        """
        if has_tokens:
            text = f"layer {where} has tokens, but the state has none for it"
            raise incompatible(text, where, "an array of the layer", "none")

    def write_all(self) -> None:
        """Make all planned writes; after an exception the target is unchanged, or has no token.

        Raises CompatibilityError before the first one if no layer used some array of the state.
        """
        left = [name for name in self.arrays if name not in self.used]
        if left:
            text = f"the cache has no place for {left[0]!r}"
            more = f" and {len(left) - 1} more arrays" if len(left) > 1 else ""
            raise incompatible(f"{text}{more}: the layers differ", left[0], "its layer", "none")
        for write in self.writes:
            write()
        self._change(UndoLog("the cache was not filled", "Create a new cache"))

    def _change(self, log: UndoLog) -> None:
        """Fill arrays in place, then give all layers their new attributes in one call."""
        before = [(layer, dict(vars(layer))) for layer, _ in self.layers]

        def change() -> None:
            if self.fills:
                log.note("the tokens of the cache", self.empty)
                self.empty()
            else:
                log.note("the layers of the cache", lambda: exchange(_updates(before)))
            for fill in self.fills:
                fill()
            exchange([*_updates(self.layers), *self.changes])

        log.run(change)

    def empty(self) -> None:
        """Remove the tokens of the target. Only targets with arrays to fill in place need it."""
        raise NotImplementedError


def _updates(layers: list[tuple[Any, dict[str, Any]]]) -> list[partial[Any]]:
    """Return the changes that give layers their attributes."""
    return [partial(vars(layer).update, values) for layer, values in layers]
