"""`CacheSpec`, `CacheEntry`: arrays of a cache, their kinds (full, sliding, quantized), checks."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, overload

from .. import _core
from .._common.arguments import check_type
from .._common.dtypes import DTYPES, dtype_name
from .._common.report import Table
from .._common.set_module import set_module
from .._common.text import bytes_text, count_text, names_hint, shorten
from ..errors import TensorNotFoundError
from ._arguments import as_count, as_counts, capacity_error, incompatible
from ._axis import sequence_axis, with_length
from ._copies import CopiedByValue
from ._transition import name_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .._types import DType
    from ..errors import CompatibilityError

CacheKind: TypeAlias = Literal["full", "sliding", "recurrent", "conv", "quantized", "opaque"]

KINDS: tuple[str, ...] = get_args(CacheKind)
SEQUENCE_KINDS = ("full", "sliding", "quantized")  # the array has an axis of positions
_ITEM_BYTES = {info.name: info.item_bytes for info in DTYPES}


def entry_error(name: str, text: str, expected: object, got: object) -> CompatibilityError:
    """Return a CompatibilityError about the entry `name`; `text` follows the name in its message.

    `expected`, `got`: the facts that do not match, both kept as text.
    """
    return incompatible(f"{name}: {text}", name, expected, got)


@set_module("mlstate.kv")
@dataclass(frozen=True)
class CacheEntry:
    """One array of a cache, such as the keys of a layer: its shape and its kind.

    An entry is validated on creation and immutable; `dataclasses.replace` creates a changed copy.

    Parameters
    ----------
    name : str
        Name of the array in a `CacheState`.
    kind : {"full", "sliding", "recurrent", "conv", "quantized", "opaque"}
        - "full": one position for each token; the first ones hold tokens.
        - "sliding": only the newest tokens, stored in a ring as in `RollingKVState`.
        - "recurrent", "conv": a state of constant size that every token changes.
        - "quantized": as "full", but groups of codes of 2 to 8 bits, with a scale and a bias each.
        - "opaque": an array of unknown layout, such as the bytes of another program.
    shape : sequence of int
        Shape of the array with all its positions; of a quantized entry, of its values. Kinds with
        a sequence have 2 to 8 dimensions.
    dtype : dtype or str
        Dtype of the array, also of torch; of a quantized entry, of its values, scales and biases.
    seq_axis : int
        The sequence axis; a negative number counts from the last axis. Kinds without a sequence
        do not use it.
    layer : int, optional
        Index of the layer.
    role : str, optional
        Purpose of the array, such as "keys" or "values".
    window : int, optional
        Of a sliding entry: the most tokens that it needs, sinks included. Default: its positions.
        The array has fewer positions as long as the cache is smaller than the window. It may
        have more: mlx stores a prefill that is longer than the window until the next token.
    sinks : int
        Of a sliding entry: number of first tokens that are never evicted, below `window`.
    bits : {2, 3, 4, 5, 6, 8}, optional
        Of a quantized entry: bits of a code.
    group : int, optional
        Of a quantized entry: elements of the last axis with the same scale and bias, a multiple of
        32 up to 4096, or of 8 for 4 and 8 bits.
    next_slot : int, optional
        Of a sliding entry: the index of the sequence axis that the next token is written to, when
        a `CacheState` is created; the number of positions means the first index after the sinks.
        For mlx it is ``_idx``, for the sliding layers of transformers 0, or the length as long
        as a static layer is not full. Default: ``sinks + (length - sinks) % (positions - sinks)``,
        as in `RollingKVState`. Two entries that differ only in `next_slot` or `unwritten` are
        equal: `CacheState.next_slot` returns the current slot.
    unwritten : {0, 1}
        Of a sliding entry whose positions are all in use: 1 if the oldest token is not in its slot,
        which is the next slot. A window of transformers keeps one token less than its size, so a
        cache that is moved from it into one with all positions lacks this token. The next token
        replaces it before it is read.

    Attributes
    ----------
    dtype : str
        The name of the dtype, such as "float16".
    seq_axis : int or None
        The sequence axis, counted from 0; None for kinds without a sequence.

    Raises
    ------
    CompatibilityError
        `kind` or `dtype` is unknown, the shape has no axis `seq_axis`, a parameter does not belong
        to the kind or is missing, or the group does not divide the last axis. A ValueError.
    CapacityError
        A number is negative, a sliding entry has no position, or `next_slot` exceeds the
        positions. A ValueError.
    ValueError
        `name` is empty, or `bits` or `group` is not supported.
    TypeError
        A parameter has another type.

    Examples
    --------
    >>> from mlstate.kv import CacheEntry
    >>> entry = CacheEntry("0.keys", "quantized", (1, 8, 512, 64), "float16", bits=8, group=64)
    >>> for name, (shape, dtype) in entry.arrays.items():
    ...     print(name, shape, dtype)
    0.keys (1, 8, 512, 16) uint32
    0.keys.scales (1, 8, 512, 1) float16
    0.keys.biases (1, 8, 512, 1) float16
    """

    name: str
    kind: CacheKind
    shape: tuple[int, ...]
    dtype: Any
    seq_axis: int | None = -2
    _: KW_ONLY
    layer: int | None = None
    role: str | None = None
    window: int | None = None
    sinks: int = 0
    bits: int | None = None
    group: int | None = None
    next_slot: int | None = field(default=None, compare=False)
    unwritten: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        """Check and normalise the fields, such as a negative axis; raises for wrong ones."""
        _check_names(self)
        put = object.__setattr__  # the instance is frozen
        put(self, "shape", as_counts(f"{self.name}: shape", self.shape))
        put(self, "dtype", _checked_dtype(self.name, self.dtype))
        if self.layer is not None:
            put(self, "layer", as_count(f"{self.name}: layer", self.layer))
        put(self, "seq_axis", _checked_axis(self))
        put(self, "window", _checked_window(self))
        put(self, "next_slot", _checked_slot(self))
        put(self, "unwritten", as_count(f"{self.name}: unwritten", self.unwritten))
        if self.unwritten > (self.kind == "sliding"):
            text = f"unwritten {self.unwritten} does not fit a {self.kind} entry"
            raise entry_error(self.name, text, "1 for kind 'sliding', or 0", self.unwritten)
        _check_quantization(self)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        # pickles of earlier versions do not have these
        self.__dict__.setdefault("next_slot", None)
        self.__dict__.setdefault("unwritten", 0)

    @property
    def seq_length(self) -> int | None:
        """Number of positions of the array; None for kinds without a sequence."""
        return None if self.seq_axis is None else self.shape[self.seq_axis]

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array by name: one array, or three of a quantized entry.

        The three are the codes, packed into words of 32 bits, and the scale and bias of each group.
        """
        if self.bits is None or self.group is None:
            return {self.name: (self.shape, self.dtype)}
        words, groups = _core.kv_quantized_lengths(self.shape[-1], self.bits, self.group)
        outer = self.shape[:-1]
        return {
            self.name: ((*outer, words), "uint32"),
            f"{self.name}.scales": ((*outer, groups), self.dtype),
            f"{self.name}.biases": ((*outer, groups), self.dtype),
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(prod(shape) * _ITEM_BYTES[dtype] for shape, dtype in self.arrays.values())

    def _resized(self, capacity: int) -> CacheEntry:
        """Return the entry for a cache of `capacity` positions: it has as many, up to its window.

        An entry whose length changes loses `next_slot`: `CacheState` stores its tokens in order.
        """
        if self.seq_axis is None:
            return self
        length = capacity if self.window is None else min(capacity, self.window)
        if length == self.seq_length:
            return self
        shape = with_length(self.shape, self.seq_axis, length)
        return replace(self, shape=shape, next_slot=None, unwritten=0)

    def _facts(self) -> tuple[str, str]:
        """Return two texts for tables: the kind, and the parameters of the kind, such as a window.

        The second is empty for a kind without parameters.
        """
        facts = []
        if self.window is not None:
            facts.append(f"window {self.window:,}")
        if self.sinks:
            facts.append(f"{self.sinks:,} sinks")
        if self.bits is not None:
            facts.append(f"{self.bits} bits, groups of {self.group:,}")
        return self.kind, ", ".join(facts)


def _check_names(entry: CacheEntry) -> None:
    """Raise unless the entry's name is not empty, its kind is known and its role is text.

    TypeError for another type, ValueError for an empty name, CompatibilityError for the kind.
    """
    check_type("name", entry.name, str)
    if not entry.name:
        raise ValueError("name is empty: pass a name such as '0.keys'")
    check_type(f"{entry.name}: role", entry.role, str | None, "a str")
    if entry.kind not in KINDS:
        text = f"kind {entry.kind!r} is unknown{names_hint(str(entry.kind), KINDS)}"
        raise entry_error(entry.name, text, ", ".join(KINDS), entry.kind)


def _checked_dtype(name: str, dtype: DType) -> str:
    """Return the name of a dtype of NumPy, ml_dtypes or torch; `name`: the entry, for errors.

    Raises CompatibilityError for a dtype that caches do not support.
    """
    dtype_text = dtype_name(dtype)
    if dtype_text not in _ITEM_BYTES:
        text = f"dtype {dtype!r} is not supported"
        raise entry_error(name, text, "a dtype of NumPy, ml_dtypes or torch", dtype)
    return dtype_text


def _checked_axis(entry: CacheEntry) -> int | None:
    """Return the entry's sequence axis, counted from 0; None for kinds without a sequence.

    Raises CompatibilityError if a kind with a sequence has no such axis.
    """
    if entry.kind not in SEQUENCE_KINDS:
        return None
    if entry.seq_axis is None:
        raise entry_error(entry.name, f"kind {entry.kind!r} needs seq_axis", "an axis", None)
    return sequence_axis(entry.shape, entry.seq_axis, entry.name)


def _checked_window(entry: CacheEntry) -> int | None:
    """Return the window of a sliding entry, by default its positions; None for another kind.

    Raises CompatibilityError if another kind has a window or sinks, or the sinks fill the window;
    CapacityError or TypeError for numbers out of range, or of another type.
    """
    name = entry.name
    sinks = as_count(f"{name}: sinks", entry.sinks)
    if entry.kind != "sliding":
        if entry.window is not None or sinks:
            text = f"window and sinks belong to kind 'sliding', not to {entry.kind!r}"
            raise entry_error(name, text, "sliding", entry.kind)
        return None
    positions = as_count(f"{name}: positions", entry.seq_length, 1)
    size = positions if entry.window is None else entry.window
    window = as_count(f"{name}: window", size, 1)
    if sinks >= window:
        text = f"{sinks} sinks leave no position for other tokens in a window of {window}"
        raise entry_error(name, text, f"0..{window - 1}", sinks)
    return window


def _checked_slot(entry: CacheEntry) -> int | None:
    """Return the next slot of a sliding entry as an int, or None if it was not passed.

    Raises CompatibilityError for another kind, and CapacityError for a slot above the number of
    positions. That number itself is allowed: it means the first slot after the sinks.
    """
    if entry.next_slot is None:
        return None
    if entry.kind != "sliding":
        text = f"next_slot belongs to kind 'sliding', not to {entry.kind!r}"
        raise entry_error(entry.name, text, "sliding", entry.kind)
    slot, positions = as_count(f"{entry.name}: next_slot", entry.next_slot), entry.seq_length or 0
    if slot > positions:
        text = f"{entry.name}: next_slot {slot} is beyond the {positions} positions of the array"
        raise capacity_error(text, f"0..{positions}", slot, entry.name)
    return slot


def _check_quantization(entry: CacheEntry) -> None:
    """Raise unless an entry has `bits` and `group` exactly if it is quantized, and they fit it.

    They fit if the core supports them for the length of the last axis, which must not be the
    sequence, and for the dtype. Raises CompatibilityError, or ValueError for unsupported numbers.
    """
    name, bits, group = entry.name, entry.bits, entry.group
    if entry.kind != "quantized":
        if bits is not None or group is not None:
            text = f"bits and group belong to kind 'quantized', not to {entry.kind!r}"
            raise entry_error(name, text, "quantized", entry.kind)
        return
    if bits is None or group is None:
        raise entry_error(name, "a quantized entry needs bits and group", "both", (bits, group))
    if entry.dtype not in ("float16", "bfloat16", "float32"):
        text = f"only float16, bfloat16 and float32 are quantized, not {entry.dtype}"
        raise entry_error(name, text, "float16, bfloat16 or float32", entry.dtype)
    if entry.seq_axis == len(entry.shape) - 1:
        text = (
            "the sequence axis is the last one, and groups are adjacent elements of the last axis"
        )
        raise entry_error(name, text, "another sequence axis", entry.seq_axis)
    with name_errors(name):
        _core.kv_quantized_lengths(entry.shape[-1], bits, group)


@set_module("mlstate.kv")
class CacheSpec(CopiedByValue):
    """All entries of a cache, in order.

    Parameters
    ----------
    entries : iterable of CacheEntry
        At least one. Full and quantized entries have the same number of positions.

    Attributes
    ----------
    entries : tuple of CacheEntry
        The entries that were passed.

    Raises
    ------
    CompatibilityError
        Entries disagree on their positions: full and quantized entries differ, or a sliding entry
        has fewer positions than the cache although its window is not full. A ValueError.
    ValueError
        `entries` is empty, or two arrays have the same name.
    TypeError
        An element of `entries` is not a `CacheEntry`.

    Notes
    -----
    A spec is immutable, and equal to another one with equal entries. ``spec["0.keys"]`` and
    ``spec[0]`` return an entry; ``len(spec)`` and iteration refer to entries.

    Examples
    --------
    >>> from mlstate.kv import CacheEntry, CacheSpec
    >>> spec = CacheSpec(
    ...     CacheEntry(f"{i}.{role}", "full", (1, 8, 512, 64), "float16", layer=i, role=role)
    ...     for i in range(4)
    ...     for role in ("keys", "values")
    ... )
    >>> spec
    CacheSpec(8 entries: 8 full; 4 layers, 512 positions)
    >>> spec["3.values"].shape
    (1, 8, 512, 64)
    """

    __slots__ = ("_by_name", "_capacity", "entries")

    entries: tuple[CacheEntry, ...]

    def __init__(self, entries: Iterable[CacheEntry]) -> None:
        """Check that all arrays have different names, and that the lengths fit one capacity."""
        if isinstance(entries, CacheEntry) or not hasattr(entries, "__iter__"):
            raise TypeError(
                f"entries must be an iterable of CacheEntry, got {type(entries).__name__}"
            )
        self.entries = tuple(entries)
        for i, entry in enumerate(self.entries):
            check_type(f"entries[{i}]", entry, CacheEntry)
        if not self.entries:
            raise ValueError("entries is empty: pass one CacheEntry for each array")
        self._by_name: dict[str, CacheEntry] = {}  # a quantized entry has three names
        for entry in self.entries:
            for name in entry.arrays:
                if name in self._by_name:
                    raise ValueError(f"two arrays have the name {name!r}: names must differ")
                self._by_name[name] = entry
        self._capacity = _common_capacity(self.entries)

    @property
    def capacity(self) -> int | None:
        """Most tokens that the full and quantized entries hold; None if there are none."""
        return self._capacity

    @property
    def layer_count(self) -> int:
        """Number of different layers; entries without a layer do not count."""
        return len({entry.layer for entry in self.entries} - {None})

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(entry.nbytes for entry in self.entries)

    def entry_of(self, name: str) -> CacheEntry:
        """Return the entry of an array; a quantized entry has three arrays.

        Parameters
        ----------
        name : str
            Name of an array, such as ``"0.keys"`` or ``"0.keys.scales"``.

        Returns
        -------
        CacheEntry
            The entry, not a copy.

        Raises
        ------
        TensorNotFoundError
            No array has this name. A KeyError.
        """
        entry = self._by_name.get(name) if isinstance(name, str) else None
        if entry is None:
            hint = names_hint(str(name), self._by_name)
            raise TensorNotFoundError(f"the cache has no array {name!r}{hint}", name=str(name))
        return entry

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[CacheEntry]:
        return iter(self.entries)

    @overload
    def __getitem__(self, key: str | int) -> CacheEntry: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[CacheEntry, ...]: ...
    def __getitem__(self, key: str | int | slice) -> CacheEntry | tuple[CacheEntry, ...]:
        return self.entry_of(key) if isinstance(key, str) else self.entries[key]

    def _content(self) -> tuple[object, ...]:
        return (self.entries,)

    def __eq__(self, other: object) -> bool:
        return self.entries == other.entries if isinstance(other, CacheSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.entries)

    def _title(self) -> str:
        """Return the summary for reprs: counts of entries by kind, layers, and positions if any."""
        counts = [(kind, sum(e.kind == kind for e in self.entries)) for kind in KINDS]
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts if count)
        count = f"{len(self):,} {'entry' if len(self) == 1 else 'entries'}"
        layers = count_text(self.layer_count, "layer")
        room = "" if self.capacity is None else f", {self.capacity:,} positions"
        return f"{count}: {kinds}; {layers}{room}"

    def __repr__(self) -> str:
        return f"CacheSpec({self._title()})"

    def _repr_html_(self) -> str:
        """Return the entries as an HTML table for notebooks."""
        rows = []
        for entry in self.entries:
            axis = "-" if entry.seq_axis is None else entry.seq_axis
            name_and_facts = entry.name, *entry._facts()
            rows.append((*name_and_facts, entry.shape, axis, entry.dtype, entry.nbytes))
        title = f"CacheSpec: {self._title()}, {bytes_text(self.nbytes)}"
        columns = entry_columns("shape", "sequence axis")
        return Table(title, columns, rows, collapse=True).html()


def entry_columns(*headers: str) -> list[str]:
    """Return the columns of a table of entries; `headers`: those before dtype and memory."""
    return ["name", "kind", "parameters", *headers, "dtype", "memory [B]"]


def _common_capacity(entries: tuple[CacheEntry, ...]) -> int | None:
    """Return the positions that full and quantized entries have, or None without such entries.

    Raises CompatibilityError if they differ, or if a sliding entry has fewer positions than this
    capacity although its window is not full. Without a capacity, sliding entries are not checked.
    """
    limited = [entry for entry in entries if entry.kind in ("full", "quantized")]
    if not limited:
        return None
    first = limited[0]
    capacity = first.seq_length or 0
    for entry in limited:
        if entry.seq_length != capacity:
            text = (
                f"{entry.seq_length} positions, but {shorten(first.name, 100)} has {capacity}: "
                "full and quantized entries of one cache have the same number"
            )
            raise entry_error(entry.name, text, capacity, entry.seq_length)
    for entry in entries:
        if entry.window is not None and entry.seq_length is not None:
            least = min(capacity, entry.window)
            if entry.seq_length < least:
                text = (
                    f"{entry.seq_length} positions are too few for a cache of {capacity} and a "
                    f"window of {entry.window}: at least {least}"
                )
                raise entry_error(entry.name, text, f"{least} or more", entry.seq_length)
    return capacity
