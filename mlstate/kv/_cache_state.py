"""`CacheState`: several arrays of a cache: `advance`, `resize`, `trim`, `crop`, `restore`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, overload

import numpy as np

from .. import _core
from .._common.arguments import check_flags, check_type
from .._common.arrays import overwrite, overwrite_with_zeros
from .._common.changes import UndoLog
from .._common.report import Table
from .._common.set_module import set_module
from .._common.text import bytes_text, count_text
from ._arguments import as_count, as_integer, capacity_error, incompatible
from ._axis import along
from ._cache_checks import check_array, check_length, check_names, refuse_negative
from ._cache_spec import CacheEntry, CacheSpec, entry_columns, entry_error
from ._copies import (
    CopiedByValue,
    attributes_of,
    copied_arrays,
    set_attributes,
    shared_arrays,
)
from ._moved_positions import moved_positions
from ._quantization import QuantizationLoss, chosen_entries, convert_entry, measure_loss
from ._ring_slots import Ring, joined, ring_of, shift_of
from ._snapshot import (
    History,
    Snapshot,
    check_writable,
    is_copied,
    new_snapshot,
)
from ._transition import compact_kv_state, name_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .._types import Array, NDArray

# Why an entry cannot go back to an earlier token.
_NO_TRIM = {
    "recurrent": "a recurrent state cannot be trimmed: every token changed all of it",
    "conv": "a convolution state cannot be trimmed: it keeps the last inputs only",
    "opaque": "an opaque entry cannot be trimmed: its layout is unknown",
}


class _Cache(NamedTuple):
    """Everything that an operation replaces, so that readers see all of it or nothing."""

    spec: CacheSpec
    arrays: dict[str, Any]
    length: int
    shifts: dict[str, int]  # `Ring.shift` of rings, by name of the entry; missing: 0
    identity: object  # of these arrays: snapshots have it
    unwritten: frozenset[str]  # entries whose oldest token is not in its slot

    def ring(self, entry: CacheEntry) -> Ring:
        """Return the slots of the tokens of an entry, which has a sequence."""
        shift = self.shifts.get(entry.name, 0)
        return ring_of(entry, self.length, shift, entry.name in self.unwritten)

    def require_tokens(self, operation: str, names: Iterable[str] | None = None) -> None:
        """Raise CompatibilityError if a slot of one of these entries was not written; None: all."""
        for name in self.unwritten if names is None else self.unwritten.intersection(names):
            text = f"the slot of its oldest token is not written, so {operation} would use it"
            text += " for a token: feed one more token first"
            raise entry_error(name, text, "tokens in all slots", "a slot without its token")


@set_module("mlstate.kv")
class CacheState(CopiedByValue):
    """The arrays of a cache and its number of tokens, which change together.

    Every operation checks all entries first. If one entry refuses, the operation raises and no
    entry changes.

    Parameters
    ----------
    spec : CacheSpec
        The entries.
    arrays : mapping of str to ndarray or torch.Tensor
        The arrays by name, as `CacheEntry.arrays` lists them. Used without copying; they may be
        read-only and have any strides and byte order.
    length : int
        Number of tokens seen so far. Full and quantized entries hold all of them, sliding entries
        the newest.

    Raises
    ------
    CompatibilityError
        An array is missing or not in the spec, for example because the number of layers differs;
        or its rank, shape or dtype differs from its entry. A ValueError.
    CapacityError
        `length` is negative or exceeds the positions of an entry. A ValueError.
    TypeError
        A parameter has another type.

    Notes
    -----
    What each kind supports:

    ==============  ======  ==============  =========  ===============
    operation       full    sliding         quantized  recurrent, conv
    ==============  ======  ==============  =========  ===============
    `resize`        yes     to the window   yes        unchanged
    `trim`, `crop`  yes     until it wraps  yes        no
    `quantize`      yes     no              no         no
    `positions`     yes     yes             yes        no
    `next_slot`     no      yes             no         no
    ==============  ======  ==============  =========  ===============

    Opaque entries support none of them. `snapshot`, `restore`, `copy` and pickle support all kinds.
    A state is not thread-safe: use one lock for the state and the arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.kv import CacheEntry, CacheSpec, CacheState
    >>> spec = CacheSpec(
    ...     [
    ...         CacheEntry("0.keys", "full", (1, 2, 256, 64), "float16"),
    ...         CacheEntry("1.keys", "sliding", (1, 2, 128, 64), "float16", sinks=4),
    ...     ]
    ... )
    >>> arrays = {entry.name: np.zeros(entry.shape, entry.dtype) for entry in spec}
    >>> state = CacheState(spec, arrays, length=100)
    >>> state.resize(1024)
    >>> state
    CacheState(100 of 1,024 positions; 2 entries: 1 full, 1 sliding)
    >>> state.trim(20)
    >>> state.length, state.arrays["0.keys"].shape, state.view("0.keys").shape
    (80, (1, 2, 1024, 64), (1, 2, 80, 64))
    """

    __slots__ = ("_cache", "_history")

    def __init__(self, spec: CacheSpec, arrays: Mapping[str, Array], length: int) -> None:
        """Check that the arrays are those of `spec`; they are used, not copied."""
        check_type("spec", spec, CacheSpec)
        check_type("arrays", arrays, Mapping, "a mapping of names to arrays")
        tokens = as_count("length", length)
        check_names(spec, arrays)
        for entry in spec:
            for name, (shape, dtype) in entry.arrays.items():
                check_array(entry, name, arrays[name], shape, dtype)
        check_length(spec, tokens)
        ordered = {name: arrays[name] for entry in spec for name in entry.arrays}
        shifts = {e.name: shift_of(e, tokens) for e in spec if e.next_slot is not None}
        unwritten = frozenset(entry.name for entry in spec if entry.unwritten)
        for name in unwritten:
            positions = spec[name].seq_length or 0
            if tokens < positions:
                text = (
                    f"unwritten is for a ring without a free slot, and {tokens} tokens leave some"
                )
                raise entry_error(name, text, f"{positions} or more tokens", tokens)
        self._cache = _Cache(spec, ordered, tokens, shifts, object(), unwritten)
        self._history = History()

    @property
    def spec(self) -> CacheSpec:
        """The entries; `resize`, `quantize` and `dequantize` replace the spec.

        An entry that was created with `next_slot` or `unwritten` has the current value, so that a
        state with this spec, these arrays and this length has the same positions.
        """
        spec, shifts, unwritten = self._cache.spec, self._cache.shifts, self._cache.unwritten
        entries = [
            replace(
                entry,
                next_slot=self._slot_in_spec(entry) if entry.name in shifts else entry.next_slot,
                unwritten=int(entry.name in unwritten),
            )
            for entry in spec
        ]
        if all(
            (old.next_slot, old.unwritten) == (new.next_slot, new.unwritten)
            for old, new in zip(spec, entries, strict=True)
        ):
            return spec
        return CacheSpec(entries)

    def _slot_in_spec(self, entry: CacheEntry) -> int:
        """Return the `next_slot` of a new entry that has the same ring as `entry` has now."""
        ring = self._cache.ring(entry)
        if ring.shift and ring.length < ring.sinks:  # a sink as `next_slot` would mean no shift
            return ring.sinks + ring.shift  # the slot of the first token after the sinks
        return ring.next_slot

    @property
    def arrays(self) -> Mapping[str, Any]:
        """The arrays by name, in the order of the spec: a read-only mapping, not a copy."""
        return MappingProxyType(self._cache.arrays)

    @property
    def length(self) -> int:
        """Number of tokens seen so far."""
        return self._cache.length

    @property
    def capacity(self) -> int | None:
        """Most tokens that the full and quantized entries hold; None if there are none."""
        return self._cache.spec.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self._cache.spec.nbytes

    def view(self, name: str) -> Any:
        """Return the positions of an array that hold tokens.

        Parameters
        ----------
        name : str
            Name of an array. Without a sequence, all of it is returned.

        Returns
        -------
        ndarray or torch.Tensor
            A view, not a copy, in storage order: see `ordered` for a sliding entry that has
            wrapped.

        Raises
        ------
        TensorNotFoundError
            No array has this name. A KeyError.
        CompatibilityError
            Empty slots are between the tokens, in a ring that `next_slot` rotated. A ValueError.
        """
        cache = self._cache
        entry, array = cache.spec.entry_of(name), cache.arrays[name]
        if entry.seq_axis is None:
            return array
        slots = joined(sorted(cache.ring(entry).runs(), key=lambda run: run.start))
        if len(slots) > 1:
            text = "the slots of the tokens are not adjacent: use ordered()"
            raise entry_error(name, text, "adjacent slots", slots)
        return array[_slots_along(entry.seq_axis, slots)]

    def positions(self, name: str) -> NDArray:
        """Return the absolute position of the token at each index of the sequence axis.

        Parameters
        ----------
        name : str
            Name of an array with a sequence.

        Returns
        -------
        ndarray of int64
            A new array with -1 for an index without a token, as `RollingKVState.positions`; see
            `unwritten` of `CacheEntry` for a full ring. With
            n positions after the sinks, slot s holds position
            ``length - 1 - (next_slot - 1 - s) % n``.

        Raises
        ------
        TensorNotFoundError
            No array has this name. A KeyError.
        CompatibilityError
            The entry has no sequence. A ValueError.
        """
        cache = self._cache
        entry = cache.spec.entry_of(name)
        _sequence_of(entry)
        return cache.ring(entry).positions()

    def next_slot(self, name: str) -> int:
        """Return the index of the sequence axis that the next token of a ring is written to.

        Parameters
        ----------
        name : str
            Name of a sliding entry.

        Returns
        -------
        int
            A sink as long as there are fewer tokens than sinks, else a slot from `sinks` on. If the
            array is full, this slot holds the oldest token.

        Raises
        ------
        TensorNotFoundError
            No array has this name. A KeyError.
        CompatibilityError
            The entry is not a sliding one. A ValueError.

        Notes
        -----
        `advance`, `trim` and `crop` move the slot by as many tokens. `resize` keeps it, unless the
        array gets another number of positions: then the tokens are stored in order from the first
        slot on. `restore` resets it. `copy`, pickle and `quantize` keep it.
        """
        entry = self._cache.spec.entry_of(name)
        if entry.kind != "sliding":
            text = f"a {entry.kind} entry is not a ring, so it has no next slot"
            raise entry_error(entry.name, text, "sliding", entry.kind)
        return self._cache.ring(entry).next_slot

    def ordered(self, name: str, *, copy: bool = True) -> Any:
        """Return the tokens of an array by increasing position.

        Parameters
        ----------
        name : str
            Name of an array with a sequence.
        copy : bool
            False: return a view of the array if the tokens are stored in order, else a copy.

        Returns
        -------
        ndarray
            A new C-contiguous array, also for a torch tensor on the CPU. A view is of the array's
            own type.

        Raises
        ------
        TensorNotFoundError
            No array has this name. A KeyError.
        CompatibilityError
            The entry has no sequence. A ValueError.
        """
        cache = self._cache
        entry, array = cache.spec.entry_of(name), cache.arrays[name]
        axis, ring = _sequence_of(entry), cache.ring(entry)
        runs = ring.runs()
        if not copy and len(runs) <= 1:
            return array[_slots_along(axis, runs)]
        ordered = _core.kv_ring_ordered(array, axis, ring.sinks, ring.length, ring.shift)
        return np.delete(ordered, ring.sinks, axis) if ring.unwritten else ordered

    def advance(self, n: int) -> None:
        """Count tokens that a model has written to the arrays.

        Parameters
        ----------
        n : int
            Number of tokens, stored at the positions after the last one; in a sliding entry, from
            `next_slot` on. Create another state if the model moved the tokens or replaced the
            arrays instead, as the sliding layers of transformers do.

        Raises
        ------
        CapacityError, TypeError
            `n` is not an integer, is negative, or the tokens exceed the positions of an entry.
            Nothing is changed then.
        """
        length = self._cache.length + as_count("n", n)
        check_length(self._cache.spec, length)
        if not self._cache.length:  # also after an error that has emptied the cache
            self._history.note_length(0)
        unwritten = frozenset() if n else self._cache.unwritten
        self._cache = self._cache._replace(length=length, unwritten=unwritten)

    def resize(self, capacity: int) -> None:
        """Move the tokens to arrays of another number of positions.

        Parameters
        ----------
        capacity : int
            New positions of full and quantized entries. A sliding entry gets as many, up to its
            window; if it has more positions than its window, it keeps the newest tokens. Recurrent
            and convolution states stay as they are.

        Raises
        ------
        CapacityError, TypeError
            The tokens of an entry do not fit, or `capacity` is not an integer; nothing changed.
        CompatibilityError
            An opaque entry cannot be resized, or the slot of the oldest token of one is not
            written: see `unwritten` of `CacheEntry`. Nothing is changed then. A ValueError.
        MemoryError
            The memory cannot be allocated. Nothing is changed then.

        Notes
        -----
        Arrays whose number of positions changes are replaced by new ones, as by
        `compact_kv_state`; positions without a token are zero. The old arrays are not written. The
        peak is the size of the old and the new arrays.
        """
        cache = self._cache
        resized = _resized_spec(cache, capacity)
        if resized == cache.spec:
            return
        arrays, shifts = dict(cache.arrays), dict(cache.shifts)
        for old, new in zip(cache.spec, resized, strict=True):
            _move_entry(cache, old, new, arrays, shifts)
        self._cache = _Cache(resized, arrays, cache.length, shifts, object(), cache.unwritten)

    def trim(self, n: int) -> None:
        """Drop the last `n` tokens, for example rejected tokens of speculative decoding.

        Parameters
        ----------
        n : int
            Number of tokens to drop. `trim` of mlx counts in the same way.

        Raises
        ------
        CapacityError, TypeError
            `n` is not an integer, or not in ``0..length``. Nothing is changed then.
        CompatibilityError
            An entry cannot drop tokens: a recurrent, convolution or opaque entry, or a sliding
            entry that has evicted tokens, which its window would need again, or that has an
            `unwritten` slot. Nothing is changed then. A ValueError.

        Notes
        -----
        Only `length` changes. The arrays are not written, so the positions of dropped tokens keep
        their content; `resize` to another capacity zeroes them.
        """
        dropped, length = as_count("n", n), self._cache.length
        if dropped > length:
            text = f"cannot drop {dropped} tokens: the cache has {length}"
            raise capacity_error(text, f"0..{length}", dropped)
        self._keep_first(length - dropped)

    def crop(self, n: int) -> None:
        """Keep the first `n` tokens and drop the others.

        Parameters
        ----------
        n : int
            Number of tokens to keep. `crop` of transformers takes the number of tokens to remove,
            as a negative number, since August 2026: use `trim` for that.

        Raises
        ------
        CapacityError, CompatibilityError, TypeError
            As for `trim`.
        """
        number, length = as_integer("n", n), self._cache.length
        new_length = as_count("n", n) if number >= 0 else refuse_negative(number)
        if new_length > length:
            text = f"cannot keep {new_length} tokens: the cache has {length}"
            raise capacity_error(text, f"0..{length}", new_length)
        self._keep_first(new_length)

    def _keep_first(self, new_length: int) -> None:
        """Keep the first `new_length` tokens; CompatibilityError if an entry cannot drop others."""
        spec, length = self._cache.spec, self._cache.length
        if new_length < length:
            self._cache.require_tokens("an earlier one")
        for entry in spec if new_length < length else ():
            text = _NO_TRIM.get(entry.kind)
            if entry.window is not None and entry.seq_length is not None:
                evicted = length - entry.seq_length  # the window would need them again
                if evicted > 0:
                    text = f"a sliding entry cannot be trimmed: it has evicted {evicted} tokens"
            if text is not None:
                remedy = (
                    f"restore an earlier copy of it, or prefill the first {new_length} tokens again"
                )
                raise entry_error(
                    entry.name, f"{text}; {remedy}", f"{length} tokens", f"{new_length} tokens"
                )
        self._set_length(new_length)

    def _set_length(self, length: int, unwritten: Iterable[str] = ()) -> None:
        """Set the number of tokens, and record it, because a lower one outdates snapshots.

        `unwritten`: the entries whose oldest token is not in its slot.
        """
        self._history.note_length(length)
        self._cache = self._cache._replace(length=length, unwritten=frozenset(unwritten))

    def _overwrite(self, values: Mapping[str, Any], lowest: int, **counts: Any) -> None:
        """Write `values` into the arrays of these names, and replace fields of the cache.

        After an exception the cache has no token, and these arrays are zero. `lowest`: the number
        of tokens that keep their positions. `counts`: all other fields of the cache.
        """
        log = UndoLog("the cache was not restored", "Create a new cache")
        arrays = self._cache.arrays

        def forget() -> None:
            self._empty()
            for name in values:
                overwrite_with_zeros(arrays[name])

        def write() -> None:
            log.note("no token", forget)
            self._empty()
            for name, value in values.items():
                overwrite(arrays[name], value)
            self._history.note_length(lowest)
            self._cache = self._cache._replace(**counts)

        log.run(write)

    def _empty(self) -> None:
        """Forget all tokens. The same snapshot can be restored, until `advance` counts others."""
        self._cache = self._cache._replace(length=0, unwritten=frozenset())

    def snapshot(self) -> Snapshot:
        """Record the cache, so that `restore` can go back to this moment.

        Returns
        -------
        Snapshot
            Copies of the arrays that later tokens overwrite: recurrent, convolution, sliding and
            opaque entries. Full and quantized entries are not copied, because later tokens are
            written behind the earlier ones.

        Raises
        ------
        CompatibilityError
            The slot of the oldest token of an entry is not written: see `unwritten` of
            `CacheEntry`. A ValueError.
        MemoryError
            The memory cannot be allocated.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.kv import CacheEntry, CacheSpec, CacheState
        >>> spec = CacheSpec(
        ...     [
        ...         CacheEntry("0.keys", "full", (1, 2, 256, 64), "float16"),
        ...         CacheEntry("1.state", "recurrent", (1, 16, 64), "float32"),
        ...     ]
        ... )
        >>> arrays = {entry.name: np.zeros(entry.shape, entry.dtype) for entry in spec}
        >>> state = CacheState(spec, arrays, length=100)
        >>> before = state.snapshot()
        >>> before
        Snapshot(100 tokens, 1 arrays copied: 4.00 KiB)
        >>> arrays["1.state"] += 1  # a draft of 8 tokens, which are rejected
        >>> state.advance(8)
        >>> state.restore(before)
        >>> state.length, float(arrays["1.state"].max())
        (100, 0.0)
        """
        self._cache.require_tokens("the snapshot")
        return new_snapshot(self._cache, self._history)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot: write the copied arrays, and set length and next slots.

        Parameters
        ----------
        snapshot : Snapshot
            From `snapshot` of this state. It can be restored any number of times.

        Raises
        ------
        CompatibilityError
            The snapshot is of another state, an operation such as `resize` or `quantize` replaced
            the arrays since, or an array cannot be written. Or the cache has full or quantized
            entries and had fewer tokens since than at the snapshot, so that other tokens may be in
            their positions. Nothing is changed then. A ValueError.
        TypeError
            `snapshot` is not a `Snapshot`.

        Notes
        -----
        The arrays are written in place, so a model that uses them continues from the snapshot.
        After an exception during the writes, such as an interrupt, the cache has no token: restore
        the snapshot again before a model writes to it, or prefill from the first token. A
        model must not rewrite earlier tokens of full entries. torch does not record the write for
        gradients.
        """
        check_type("snapshot", snapshot, Snapshot)
        self._check_snapshot(snapshot)
        length = snapshot.length
        counts = {"spec": snapshot._spec, "shifts": snapshot._shifts, "unwritten": frozenset()}
        self._overwrite(snapshot._arrays, length, length=length, **counts)

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        """Raise CompatibilityError unless a snapshot is of this state, and not outdated."""
        spec, arrays, identity = self._cache.spec, self._cache.arrays, self._cache.identity
        if snapshot._history is not self._history:
            text = "the snapshot is of another CacheState"
            raise incompatible(text, None, "a snapshot of this state", snapshot)
        if snapshot._identity is not identity:
            text = (
                "the arrays were replaced since the snapshot, by resize, quantize or dequantize: "
                "take a snapshot after it"
            )
            raise incompatible(text, None, "a later snapshot", snapshot)
        low = self._history.lowest_since(snapshot._number)
        for entry in spec:
            if not is_copied(entry):
                if low is not None and low < snapshot.length:
                    text = (
                        f"the cache had only {low} tokens since the snapshot of {snapshot.length}, "
                        "so later positions may hold other tokens: restore an earlier snapshot"
                    )
                    raise entry_error(entry.name, text, f"{snapshot.length} or more", low)
                continue
            for name, (shape, dtype) in entry.arrays.items():
                check_array(entry, name, arrays[name], shape, dtype)
                check_writable(entry, arrays[name])

    def copy(self) -> Self:
        """Return an independent state with copies of the arrays, as `copy.copy` does.

        Returns
        -------
        CacheState
            A state of the same class, length, next slots and attributes. Entries whose arrays are
            the same elements share them in the copy too. torch tensors keep their device. Snapshots
            of this state are not snapshots of the copy.

        Raises
        ------
        MemoryError
            The memory cannot be allocated.
        """
        return copy.copy(self)

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        CacheState.__init__(other, self.spec, copied_arrays(self._cache.arrays), self.length)
        set_attributes(other, attributes_of(self))
        return other

    @overload
    def quantize(
        self,
        bits: int = ...,
        group: int = ...,
        *,
        names: Iterable[str] | None = ...,
        capacity: int | None = ...,
        report: Literal[False] = ...,
    ) -> None: ...
    @overload
    def quantize(
        self,
        bits: int = ...,
        group: int = ...,
        *,
        names: Iterable[str] | None = ...,
        capacity: int | None = ...,
        report: Literal[True],
    ) -> dict[str, QuantizationLoss]: ...
    def quantize(
        self,
        bits: int = 8,
        group: int = 64,
        *,
        names: Iterable[str] | None = None,
        capacity: int | None = None,
        report: bool = False,
    ) -> dict[str, QuantizationLoss] | None:
        """Replace full entries by quantized ones.

        Parameters
        ----------
        bits : {8, 6, 5, 4, 3, 2}
            Bits of a code.
        group : int
            Elements of the last axis with the same scale and bias: a multiple of 32 up to 4096, or
            of 8 for 4 and 8 bits, that divides the axis.
        names : iterable of str, optional
            The entries to quantize. Default: all of kind "full".
        capacity : int, optional
            New positions, as for `resize`. The tokens are quantized on the way to the new arrays,
            without an array of their values in between. Default: the positions stay.
        report : bool
            True: compare the values of the codes with the old arrays and return the losses.

        Returns
        -------
        dict of str to QuantizationLoss, or None
            With ``report=True``, the loss of each entry that was quantized, by name.

        Raises
        ------
        CompatibilityError
            An entry in `names` has another kind, no entry is full, the group does not divide the
            last axis, the sequence axis is the last one, or the dtype is not float16, bfloat16 or
            float32. Nothing is changed then. A ValueError.
        CapacityError
            The tokens of an entry do not fit into `capacity`. Nothing is changed then. A
            ValueError.
        ValueError
            A value is NaN or infinite, or `bits` or `group` is not supported. Nothing is changed
            then.
        TensorNotFoundError
            A name is unknown. A KeyError.
        TypeError
            A tensor has no values (device "meta"), or `names` or another parameter has a wrong
            type.

        Notes
        -----
        The result consists of new NumPy arrays, also for torch tensors on the CPU. Tensors on
        another device become tensors on that device, computed by torch. The bits equal the result
        of ``mlx.core.quantize`` on a CPU: the codes of the last axis are one string of bits in
        words, the first code in the lowest bits of the first word; a value is
        ``scale * code + bias``. Its error is at most one ``scale``, plus the rounding of scale and
        bias to the dtype. Positions without a token become 0. The old arrays are not written. The
        GIL is released for arrays of at least 64 KiB.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.kv import CacheEntry, CacheSpec, CacheState
        >>> spec = CacheSpec([CacheEntry("keys", "full", (1, 8, 512, 64), "float16")])
        >>> state = CacheState(spec, {"keys": np.ones((1, 8, 512, 64), np.float16)}, 200)
        >>> before = state.nbytes
        >>> state.quantize(bits=4)
        >>> list(state.arrays), before / state.nbytes
        (['keys', 'keys.scales', 'keys.biases'], 3.5555555555555554)
        """
        check_flags(report=report)
        before = self._cache
        chosen, converted = self._convert(names, "full", {"bits": bits, "group": group}, capacity)
        losses = None
        if report:
            losses = {
                old.name: measure_loss(
                    old, new, before.arrays[old.name], converted.arrays, before.length
                )
                for old, new in zip(before.spec, converted.spec, strict=True)
                if old.name in chosen
            }
        self._cache = converted
        return losses

    def dequantize(
        self, *, names: Iterable[str] | None = None, capacity: int | None = None
    ) -> None:
        """Replace quantized entries by full ones.

        Parameters
        ----------
        names : iterable of str, optional
            The entries. Default: all of kind "quantized".
        capacity : int, optional
            New positions, as for `resize`. The values are computed in the new arrays. Default: the
            positions stay.

        Raises
        ------
        CompatibilityError
            An entry in `names` has another kind, or no entry is quantized. A ValueError.
        CapacityError
            The tokens of an entry do not fit into `capacity`. Nothing is changed then. A
            ValueError.
        TensorNotFoundError
            A name is unknown. A KeyError.
        TypeError
            The arrays of an entry are on different devices, or a parameter has a wrong type.

        Notes
        -----
        The result consists of new arrays, as for `quantize`. A value is computed in float32 and
        rounded once, so it is the number of its dtype that is nearest to the float32 result.
        ``mlx.core.dequantize`` rounds the product to the dtype and then the sum: for float16 and
        bfloat16 it may be further away, and never closer.
        """
        parameters = {"bits": None, "group": None}
        _, self._cache = self._convert(names, "quantized", parameters, capacity)

    def _convert(
        self,
        names: Iterable[str] | None,  # to convert; None: all of `kind`
        kind: str,  # of these entries now: "full" or "quantized"
        parameters: Mapping[str, Any],  # `bits` and `group` of the new entries
        capacity: int | None,  # None: the positions stay
    ) -> tuple[set[str], _Cache]:
        """Return the names of the converted entries, and a new cache; this state is unchanged."""
        cache = self._cache
        chosen = chosen_entries(cache.spec, names, kind)
        resized = cache.spec if capacity is None else _resized_spec(cache, capacity)
        other: Any = "full" if kind == "quantized" else "quantized"
        spec = CacheSpec(  # checks every entry before the first one is converted
            replace(entry, kind=other, **parameters) if entry.name in chosen else entry
            for entry in resized
        )
        arrays, shifts = dict(cache.arrays), dict(cache.shifts)
        for old, new in zip(cache.spec, spec, strict=True):
            if old.name in chosen:
                arrays |= convert_entry(old, new, cache.arrays, cache.length)
            else:
                _move_entry(cache, old, new, arrays, shifts)
        ordered = {name: arrays[name] for entry in spec for name in entry.arrays}
        return chosen, _Cache(spec, ordered, cache.length, shifts, object(), cache.unwritten)

    def _content(self) -> tuple[Any, ...]:
        return self.spec, shared_arrays(self._cache.arrays), self.length

    def __repr__(self) -> str:
        spec, length = self._cache.spec, self._cache.length
        return f"CacheState({_tokens_text(spec, length)}; {spec._title().split(';')[0]})"

    def _repr_html_(self) -> str:
        """Return the entries as an HTML table for notebooks."""
        spec, length = self._cache.spec, self._cache.length
        rows = []
        for entry in spec:
            tokens = "-" if entry.seq_length is None else min(length, entry.seq_length)
            rows.append(
                (entry.name, *entry._facts(), tokens, entry.shape, entry.dtype, entry.nbytes)
            )
        title = f"CacheState: {_tokens_text(spec, length)}, {bytes_text(spec.nbytes)}"
        columns = entry_columns("tokens held [n]", "shape")
        return Table(title, columns, rows, collapse=True).html()


def _tokens_text(spec: CacheSpec, length: int) -> str:
    if spec.capacity is None:
        return count_text(length, "token")
    return f"{length:,} of {spec.capacity:,} positions"


def _resized_spec(cache: _Cache, capacity: int) -> CacheSpec:
    """Return the spec for `capacity` positions; raise as `CacheState.resize` if that fails."""
    positions = as_count("capacity", capacity, 1)
    resized = CacheSpec(entry._resized(positions) for entry in cache.spec)
    if resized == cache.spec:
        return cache.spec
    length = cache.length
    changed = (new.name for old, new in zip(cache.spec, resized, strict=True) if old != new)
    cache.require_tokens("the resize", changed)
    for old, new in zip(cache.spec, resized, strict=True):
        window = length if old.window is None else old.window  # older tokens may be dropped
        token_count = length if old.seq_length is None else min(length, old.seq_length, window)
        # Called for its errors only.
        moved_positions(old.name, old.shape, new.shape, token_count, old.seq_axis, kind=old.kind)
    return resized


def _move_entry(
    cache: _Cache,
    old: CacheEntry,
    new: CacheEntry,
    arrays: dict[str, Any],
    shifts: dict[str, int],
) -> None:
    """Replace the arrays of an entry in `arrays` and its shift in `shifts` if its length changes.

    `cache`: the former cache, not changed. `old`, `new`: the entry before and after.
    """
    if new is old or new.seq_axis is None:
        return
    for name in old.arrays:
        with name_errors(name):
            arrays[name] = _move_tokens(arrays[name], new, cache.ring(old))
    shifts.pop(old.name, None)
    # The tokens are in order now. If all slots are used, the oldest token after the sinks is next.
    if cache.length > (new.seq_length or 0):
        shifts[old.name] = shift_of(replace(new, next_slot=new.sinks), cache.length)


def _sequence_of(entry: CacheEntry) -> int:
    """Return the sequence axis of an entry, or raise CompatibilityError if it has none."""
    if entry.seq_axis is None:
        text = f"a {entry.kind} entry has no positions"
        raise entry_error(entry.name, text, "full, sliding or quantized", entry.kind)
    return entry.seq_axis


def _slots_along(axis: int, runs: list[range]) -> tuple[slice, ...]:
    """Return the index of the only range in `runs` along `axis`; an empty one without ranges."""
    slots = runs[0] if runs else range(0)
    return along(axis, slots.start, slots.stop)


def _move_tokens(array: Any, entry: CacheEntry, ring: Ring) -> Any:
    """Return a copy of `array` of the length of `entry`: the newest tokens of `ring` in order."""
    axis, length = _sequence_of(entry), entry.seq_length or 0
    runs = ring.runs(length)
    if runs in ([], [range(ring.length)]):  # no token, or the first slots in order
        return compact_kv_state(array, length, ring.length, seq_axis=axis)
    moved, at = compact_kv_state(array, length, 0, seq_axis=axis), 0  # without tokens: all zeros
    for run in runs:
        count = len(run)
        source, target = array[_slots_along(axis, [run])], moved[along(axis, at, at + count)]
        compact_kv_state(source, count, count, out=target, seq_axis=axis)
        at += count
    return moved
