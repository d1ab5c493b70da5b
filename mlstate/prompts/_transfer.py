"""Copies of tokens between a cache's arrays and the parts of records: ranges, rings, zeros."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._common.arrays import is_torch, overwrite
from .._common.backend import TensorBackend, backend_of
from .._common.dtypes import numpy_dtype
from ..kv._cache_spec import CacheEntry, entry_error
from ..kv._ring_slots import Ring, ring_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .. import _core
    from .._types import NDArray
    from ..kv import CacheState
    from ._layout import StoredSpec

_STAGED = 8 << 20  # bytes of other memory that parts are read into first, at a time


def tokens_of(array: Any, axis: int, start: int, stop: int) -> Any:
    """Return a view of positions `start` to `stop`, with the sequence axis second to last.

    `array`: an array or tensor whose sequence axis is `axis`, counted from 0.
    """
    if axis != array.ndim - 2:
        array = array.movedim(axis, -2) if is_torch(array) else np.moveaxis(array, axis, -2)
    return array[..., start:stop, :]


def stored_shape(entry: CacheEntry, name: str, count: int) -> tuple[int, ...]:
    """Return the stored shape of `count` tokens of the array `name` of an entry.

    The sequence axis is second to last. An array without a sequence is stored whole.
    """
    shape, _ = entry.arrays[name]
    if entry.seq_axis is None:
        return shape
    inner = [*shape[: entry.seq_axis], *shape[entry.seq_axis + 1 :]]
    return (*inner[:-1], count, inner[-1])


# ---- to the store ----


class Remote(NamedTuple):
    """A tensor of another device, which the store copies when it writes it."""

    nbytes: int
    fetch: Callable[[], NDArray]  # returns a copy in main memory


def readable(view: Any) -> NDArray | Remote:
    """Return `view` as an array over its memory; a tensor on a device as a `Remote`."""
    if not is_torch(view):
        array: NDArray = view
        return array
    if view.device.type != "cpu":
        return Remote(view.nbytes, partial(_array_of, view))
    return _array_of(view)


def _array_of(tensor: Any) -> NDArray:
    """Return a tensor as an array: over its memory, or a copy of one of a device or a lazy view."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    array: NDArray = backend_of(tensor, TensorBackend).arrays_of({"": tensor})[""]
    return array


def copied(part: NDArray | Remote) -> NDArray:
    """Return a copy of a part, in main memory."""
    return part.fetch() if isinstance(part, Remote) else np.array(part)


def block_parts(
    stored: StoredSpec, state: CacheState, start: int, stop: int
) -> list[NDArray | Remote]:
    """Return views of tokens `start` to `stop` of all arrays that are stored in blocks.

    They are in the order of `stored.blocks`, which is the order of the parts of a block.
    """
    return [
        readable(tokens_of(state.arrays[name], _axis_of(entry), start, stop))
        for entry in _entries_of(state, stored.blocks)
        for name in entry.arrays
    ]


def state_parts(stored: StoredSpec, state: CacheState) -> tuple[list[NDArray | Remote], list[Any]]:
    """Return the parts of a snapshot of `state`, as views, and the list that describes them.

    The parts are of the arrays of `stored.states`. The list has, for each array, its name, the
    numbers of tokens of its parts, and None; for an array without a sequence, its name, None, and
    its shape. A ring that has wrapped has several parts, so that its tokens are by increasing
    position.
    """
    parts: list[NDArray | Remote] = []
    listed: list[Any] = []
    for entry in _entries_of(state, stored.states):
        runs = [] if entry.seq_axis is None else state._cache.ring(entry).runs()
        for name in entry.arrays:
            array = state.arrays[name]
            if entry.seq_axis is None:
                listed.append([name, None, list(array.shape)])
                parts.append(readable(array))
                continue
            listed.append([name, [len(run) for run in runs], None])
            axis = entry.seq_axis
            parts += [readable(tokens_of(array, axis, run.start, run.stop)) for run in runs]
    return parts, listed


def _entries_of(state: CacheState, entries: Iterable[CacheEntry]) -> list[CacheEntry]:
    """Return the entries of `state` that have the names of `entries`, in their order."""
    return [state.spec.entry_of(entry.name) for entry in entries]


def _axis_of(entry: CacheEntry) -> int:
    assert entry.seq_axis is not None
    return entry.seq_axis


# ---- to a cache ----


class TokenRange(NamedTuple):
    """Adjacent tokens of a part, or in the slots of a ring."""

    offset: int  # of the first token in the part; in a ring, its slot
    position: int  # of the first token
    size: int  # in tokens


class Piece(NamedTuple):
    """Tokens of a part that are read into adjacent positions of an array."""

    offset: int  # tokens of the part before the first one
    size: int  # in tokens; 0 for an array without a sequence
    view: Any  # of the target


class Request(NamedTuple):
    """A part of a record, and its target."""

    record: int  # index in the match
    part: int  # index in the record
    shape: tuple[int, ...]  # of the part
    dtype: str
    pieces: list[Piece]

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return prod(self.shape) * int(numpy_dtype(self.dtype).itemsize)

    def target(self) -> NDArray | None:
        """Return the memory that the part can be read into directly; None if it must be copied.

        It is copied if it goes to several places, in part, to a device, or to a tensor that is
        conjugated or negated when it is read.
        """
        if len(self.pieces) != 1 or self.pieces[0].view.shape != self.shape:
            return None
        view = self.pieces[0].view
        if is_torch(view):
            if view.device.type != "cpu" or view.is_conj() or view.is_neg():
                return None
            return _array_of(view)
        array: NDArray = view
        return array


def run_requests(match: _core.PromptMatch, requests: list[Request]) -> dict[int, str]:
    """Read parts of the records of `match`; return a description of each damaged record, by index.

    A part that cannot be read into its target goes through other memory, of at most `_STAGED` bytes
    at a time. The targets of a damaged record may have been written.
    """
    direct: list[tuple[int, int, Any]] = []
    staged: list[Request] = []
    for request in requests:
        target = request.target()
        if target is None:
            staged.append(request)
        else:
            direct.append((request.record, request.part, target))
    damage = dict(match.read(direct)) if direct else {}
    for batch in _batches(staged):
        if batch[0].nbytes > _STAGED:
            damage.update(_read_in_pieces(match, batch[0]))
            continue
        arrays = [np.empty(each.shape, numpy_dtype(each.dtype)) for each in batch]
        listed = [(r.record, r.part, array) for r, array in zip(batch, arrays, strict=True)]
        damage.update(match.read(listed))
        for each, array in zip(batch, arrays, strict=True):
            _copy_pieces(each, array, tuple(slice(0, size) for size in each.shape))
    return damage


def _batches(requests: list[Request]) -> Iterator[list[Request]]:
    """Yield lists of successive requests with at most `_STAGED` bytes, or of one larger request."""
    batch: list[Request] = []
    for request in requests:
        if batch and sum(each.nbytes for each in batch) + request.nbytes > _STAGED:
            yield batch
            batch = []
        batch.append(request)
    if batch:
        yield batch


def _read_in_pieces(match: _core.PromptMatch, request: Request) -> dict[int, str]:
    """Read one part of a record of `match` to its targets, through a buffer of `_STAGED` bytes.

    Returns {}, or a description of the damage by the index of the record; the pieces before the
    damage are written then.
    """
    dtype = numpy_dtype(request.dtype)
    buffer = np.empty(_STAGED // dtype.itemsize, dtype)
    offset = checksum = 0
    for box in _boxes(request.shape, buffer.size):
        shape = [each.stop - each.start for each in box]
        array = buffer[: prod(shape)].reshape(shape)
        result = match.read_piece(request.record, request.part, offset, array, checksum)
        if isinstance(result, str):
            return {request.record: result}
        checksum = result
        offset += array.nbytes
        _copy_pieces(request, array, box)
    return {}


def _boxes(shape: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
    """Yield boxes that divide an array of `shape`, in C order, each of at most `most` elements.

    The elements of a box are adjacent in C order. A box is one slice for each axis, with start and
    stop.
    """
    # The outermost axis along which one step fits.
    axis = next(i for i in range(len(shape)) if prod(shape[i + 1 :]) <= most)
    inner = tuple(slice(0, size) for size in shape[axis + 1 :])
    step = most // prod(shape[axis + 1 :])
    for outer in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            yield (*(slice(i, i + 1) for i in outer), slice(start, stop), *inner)


def has_damage(match: _core.PromptMatch, record: int) -> bool:
    """Return whether the bytes of a record, given by its index, differ from its checksums."""
    buffer = np.empty(1 << 20, "u1")
    for part, nbytes in enumerate(match.parts(record)):
        checksum = 0
        for offset in range(0, nbytes, buffer.size):
            result = match.read_piece(record, part, offset, buffer[: nbytes - offset], checksum)
            if isinstance(result, str):
                return True
            checksum = result
    return False


def _copy_pieces(request: Request, array: NDArray, box: tuple[slice, ...]) -> None:
    """Copy `array`, the elements of a part that `box` selects, to the targets of the part.

    `box`: one slice for each axis of the part. Tokens that no target needs are left out.
    """
    for piece in request.pieces:
        source: Any = array
        view = piece.view
        if view.shape == request.shape:
            view = view[(..., *box)]
        else:
            tokens = box[-2]  # the sequence axis of a stored part is second to last
            start = max(tokens.start, piece.offset)
            stop = min(tokens.stop, piece.offset + piece.size)
            if start >= stop:
                continue
            source = array[..., start - tokens.start : stop - tokens.start, :]
            place = slice(start - piece.offset, stop - piece.offset)
            view = view[(*box[:-2], place, box[-1])]
        if is_torch(view):
            source = backend_of(view, TensorBackend).tensors_of({"": source})[""]
        overwrite(view, source)


def clear(view: Any) -> None:
    """Set all elements of a view to zero."""
    overwrite(view, view.new_zeros(()) if is_torch(view) else np.zeros((), view.dtype))


class Arrays(NamedTuple):
    """The arrays that tokens are restored into, by name, and the shifts of their rings."""

    entries: dict[str, CacheEntry]
    arrays: dict[str, Any]
    shifts: dict[str, int]

    def ring(self, entry: CacheEntry, length: int) -> Ring:
        """Return the slots of an entry after `length` tokens."""
        return ring_of(entry, length, self.shifts.get(entry.name, 0))


def block_requests(
    stored: StoredSpec, into: Arrays, record: int, start: int, stop: int, size: int
) -> list[Request]:
    """Return the requests that read positions `start` to `stop` of a record into the arrays `into`.

    `stored`: its `blocks` are in the order of the parts. `record`: index in the match, of a block,
    or of a snapshot with tokens after the last block. `size`: tokens of each
    part; the first one is token `start`, and the last one may be after `stop`.
    """
    requests: list[Request] = []
    for each in stored.blocks:
        entry = into.entries[each.name]
        for name, (_, dtype) in entry.arrays.items():
            view = tokens_of(into.arrays[name], _axis_of(entry), start, stop)
            shape = stored_shape(entry, name, size)
            piece = Piece(offset=0, size=stop - start, view=view)
            requests.append(Request(record, len(requests), shape, dtype, [piece]))
    return requests


def state_requests(
    into: Arrays, listed: list[Any], record: int, position: int, part: int
) -> list[Request]:
    """Return the requests for the states of a snapshot at `position`.

    `into`: the arrays to write. `listed`: the parts of all arrays, as `state_parts` returned them.
    `record`: index of the snapshot; `part`: index of the first of these parts in it. Tokens that
    the arrays do not hold are left out. Raises CompatibilityError if an array needs more tokens, or
    has another shape.
    """
    requests: list[Request] = []
    for name, counts, shape in listed:
        entry = into.entries[_entry_name(into, name)]
        array, dtype = into.arrays[name], entry.arrays[name][1]
        if counts is None:
            if tuple(shape) != tuple(array.shape):
                text = f"shape {tuple(array.shape)} in the cache, {tuple(shape)} in the prompts"
                raise entry_error(name, text, tuple(shape), tuple(array.shape))
            piece = Piece(offset=0, size=0, view=array)
            requests.append(Request(record, part, tuple(shape), dtype, [piece]))
            part += 1
            continue
        slots = _slots_of(entry, into.ring(entry, position), sum(counts), position)
        for ranges in _token_ranges(counts, entry.sinks, position):
            pieces = [
                Piece(offset, count, tokens_of(array, _axis_of(entry), slot, slot + count))
                for offset, slot, count in _intersections(ranges, slots)
            ]
            if pieces:
                part_shape = stored_shape(entry, name, sum(tokens.size for tokens in ranges))
                requests.append(Request(record, part, part_shape, dtype, pieces))
            part += 1
    return requests


def _entry_name(into: Arrays, name: str) -> str:
    """Return the name of the entry that the array `name` belongs to; quantized ones have three."""
    if name in into.entries:
        return name
    return next(each for each, entry in into.entries.items() if name in entry.arrays)


def _token_ranges(counts: list[int], sinks: int, length: int) -> list[list[TokenRange]]:
    """Return the tokens of each part of a ring, as ranges in the part.

    `counts`: tokens of each part, by increasing position. `length`: all tokens so far; those that
    no part has were evicted after the first `sinks`.
    """
    evicted = length - sum(counts)
    result, before = [], 0  # before: number of tokens in earlier parts
    for count in counts:
        ranges = [TokenRange(0, before, count)]
        if evicted and before < sinks < before + count:
            sink_count = sinks - before  # the part has the last sinks, and others after a gap
            others = TokenRange(sink_count, sinks + evicted, count - sink_count)
            ranges = [TokenRange(0, before, sink_count), others]
        elif evicted and before >= sinks:
            ranges = [TokenRange(0, before + evicted, count)]
        result.append(ranges)
        before += count
    return result


def _slots_of(entry: CacheEntry, ring: Ring, stored: int, length: int) -> list[TokenRange]:
    """Return the slots of a ring after `length` tokens.

    `stored`: tokens that the snapshot has. Raises CompatibilityError, about `entry`, if the ring
    needs more. The oldest token of a full ring is not needed, because the next one is written to
    its slot.
    """
    runs = ring.runs()
    needed = sum(map(len, runs))
    if needed > stored and not (needed - stored == 1 and length >= ring.size):
        text = f"the array needs {needed} tokens at position {length}, and {stored} are stored"
        raise entry_error(entry.name, text, f"{needed} tokens", f"{stored} tokens")
    ranges_of_runs = _token_ranges([len(run) for run in runs], ring.sinks, length)
    return [
        tokens._replace(offset=run.start + tokens.offset)
        for run, ranges in zip(runs, ranges_of_runs, strict=True)
        for tokens in ranges
    ]


def _intersections(ranges: list[TokenRange], slots: list[TokenRange]) -> list[tuple[int, int, int]]:
    """Return the tokens in both `ranges` and `slots` as (offset in the part, first slot, count).

    `ranges`: of a part, from `_token_ranges`. `slots`: of an array, from `_slots_of`.
    """
    common = []
    for offset, first, size in ranges:
        for slot, slot_first, slot_size in slots:
            start, stop = max(first, slot_first), min(first + size, slot_first + slot_size)
            if start < stop:
                common.append((offset + start - first, slot + start - slot_first, stop - start))
    return common


def clear_rest(into: Arrays, length: int) -> None:
    """Set the positions without a token to zero; for a `length` of 0, all arrays."""
    for entry in into.entries.values():
        if entry.seq_axis is None:
            if length == 0:
                clear(into.arrays[entry.name])
            continue
        for free in _free_slots(into.ring(entry, length)):
            for name in entry.arrays:
                clear(tokens_of(into.arrays[name], entry.seq_axis, free.start, free.stop))


def missing_tokens(into: Arrays, listed: list[Any], length: int) -> dict[str, int]:
    """Return how many tokens of rings a snapshot lacks, by name of the entry; 0 is left out.

    It is 1 at most, see `_slots_of`: the oldest token after the sinks of a full ring, whose slot
    is the next one to write. `listed`: the parts of the snapshot. `length`: all tokens so far.
    """
    missing: dict[str, int] = {}
    for name, counts, _ in listed:
        entry = into.entries.get(name)
        if counts is not None and entry is not None and length:
            count = sum(map(len, into.ring(entry, length).runs())) - sum(counts)
            missing |= {name: count} if count > 0 else {}
    return missing


def _free_slots(ring: Ring) -> list[range]:
    """Return the slots without a token, as ranges in increasing order."""
    free, at = [], 0
    for run in sorted(ring.runs(), key=lambda run: run.start):
        free.append(range(at, run.start))
        at = run.stop
    return [each for each in (*free, range(at, ring.size)) if each]
