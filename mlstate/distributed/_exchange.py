"""`gather_full_state`, `broadcast_state`: messages of at most `max_bytes`, checks, ties, replicas.

Before the first element is transferred, every rank receives the descriptions of all ranks and
checks them identically. So either all ranks continue, or all raise.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._common.arrays import (
    is_same_memory,
    is_torch,
    new_packed,
    overlaps_itself,
    pairs_sharing_elements,
)
from .._common.budget import parse_budget
from .._sharding.layout import Shard
from ..collectives._arguments import failed
from ..errors import CollectiveError
from ._byte_ranges import (
    Part,
    array_of,
    bytes_of,
    copy_part,
    digest,
    item_bytes,
    memory_of,
    read_range,
    split_range,
    write_range,
)
from ._merge import (
    Entry,
    RankDifference,
    Tensor,
    check_optimizers,
    compare_digests,
    difference,
    differences_error,
    entry_of,
    like,
    match_entries,
    optimizer_values,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from .._types import Array, NDArray
    from ..collectives import ProcessGroup
    from ..state._state_dict import StateDict

MAX_BYTES = 64 << 20
_ALIGNMENT = 16  # bytes; of each range in a message, enough for elements of any size
_LONGEST_ERROR = 2000  # characters of an error that other ranks get


# ---- exchange of values ----


def exchange(
    group: ProcessGroup, operation: str, timeout: float | None, prepare: Callable[[], Any]
) -> list[Any]:
    """Return the result of `prepare` on each rank, in rank order; or raise on every rank.

    All ranks must call this. `operation`: name of the user's call, for errors. Results travel as
    JSON, so tuples become lists. A rank on which `prepare` fails raises that error; the others
    raise a CollectiveError that names it. `timeout`: seconds, None for the group's.
    """
    import json

    own_error: Exception | None = None
    try:
        message = json.dumps({"value": prepare()})
    except Exception as error:
        own_error = error
        text = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        message = json.dumps({"error": text})
    # by rank
    replies = [json.loads(data) for data in group.gather_bytes(message.encode(), timeout=timeout)]
    if own_error is not None:
        try:
            raise own_error
        finally:
            del own_error  # breaks the cycle of the error, its traceback and this frame
    for rank, reply in enumerate(replies):
        if "error" in reply:
            peer_error = failed(operation, group.rank, f"rank {rank} failed: {reply['error']}")
            peer_error.rank = rank
            raise peer_error
    return [reply["value"] for reply in replies]


def _check_same_options(operation: str, rank: int, rank_options: list[Any]) -> None:
    """Raise CollectiveError if a rank passed other options than rank 0.

    `rank`: this rank, for the error. `rank_options`: by rank, the options by name.
    """
    for other, options in enumerate(rank_options):
        for name, value in options.items():
            expected = rank_options[0][name]
            if value != expected:
                error = CollectiveError(
                    f"{operation} on rank {rank}: {name} is {expected} on rank 0 and "
                    f"{value} on rank {other}; pass the same on every rank"
                )
                error.name, error.rank = operation, other
                error.expected, error.got = str(expected), str(value)
                raise error


def check_max_bytes(operation: str, max_bytes: object) -> int:
    """Return the argument `max_bytes`, such as "64MiB", as a number of bytes.

    Raises ValueError if it is not a size, or below 1.
    """
    count = parse_budget(f"{operation}: max_bytes", max_bytes).nbytes
    if count < 1:
        raise ValueError(f"{operation}: max_bytes must be at least 1, got {count}")
    return count


# ---- messages ----


class Job(NamedTuple):
    """The transfer of a tensor's part between this rank and one peer, or all ranks."""

    tensor: Tensor
    part: int  # index of the part in the tensor's layout
    peer: int  # the other rank, from the root's view; the root itself if all ranks receive
    length: int  # of the part, in elements
    item_bytes: int


class Piece(NamedTuple):
    """A range of elements of a job, and its position in a message."""

    job: Job
    begin: int  # in elements of the job
    end: int
    offset: int  # in bytes, in this peer's part of the message

    def view_message(self, data: NDArray, start: int = 0) -> NDArray:
        """Return a view of the range's bytes in the message `data`.

        `start`: byte offset of the peer's part in the message.
        """
        first = start + self.offset
        return data[first : first + (self.end - self.begin) * self.job.item_bytes]

    def locate_in_part(self, parts: Mapping[str, object]) -> tuple[Any, int, int]:
        """Return the array of the job's part, and the range in it, for `read_range`.

        `parts`: by tensor name, a rank's part of each tensor.
        """
        return array_of(parts[self.job.tensor.name]), self.begin, self.end

    def locate_in_whole(self, wholes: Mapping[str, object]) -> tuple[Any, int, int]:
        """Return the box of the part in a whole tensor, and the range in it, as `locate_in_part`.

        `wholes`: whole tensors by name.
        """
        part = self.job.tensor.part(self.job.part)
        box = part.box_of(array_of(wholes[self.job.tensor.name]))
        return box, part.begin + self.begin, part.begin + self.end


def _align_up(count: int) -> int:
    """Return the next multiple of `_ALIGNMENT` from `count` bytes on."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _take_ranges(queue: deque[tuple[Job, int]], room: int) -> tuple[list[Piece], int]:
    """Remove element ranges from a queue for a message of at most `room` bytes.

    `queue`: pairs of a job and its number of elements in earlier messages; not empty. Returns the
    ranges and their bytes, padding between them included. There is at least one element, even if
    that exceeds `room`.
    """
    pieces: list[Piece] = []
    offset = 0  # of the next range
    while queue:
        job, begin = queue[0]
        # Elements that fit: all of them if they have no bytes, and at least one in each message.
        fitting = (room - offset) // job.item_bytes if job.item_bytes else job.length
        fitting = max(fitting, 0 if pieces else 1)
        if not fitting:
            break
        end = min(job.length, begin + fitting)
        pieces.append(Piece(job, begin, end, offset))
        offset = _align_up(offset + (end - begin) * job.item_bytes)
        if end == job.length:
            queue.popleft()
        else:
            queue[0] = job, end
    last = pieces[-1]  # no padding follows it
    return pieces, last.offset + (last.end - last.begin) * last.job.item_bytes


def split_messages(jobs: list[Job], max_bytes: int) -> Iterator[dict[int, tuple[list[Piece], int]]]:
    """Divide jobs, in their order, into messages of at most `max_bytes`.

    Yields, for each message, (ranges, bytes) by peer. Peers share a message equally. Every rank
    computes the same messages, as all have the same jobs.
    """
    queues: dict[int, deque[tuple[Job, int]]] = {}
    for job in jobs:
        queues.setdefault(job.peer, deque()).append((job, 0))
    while queues:
        room = max_bytes // len(queues)
        yield {peer: _take_ranges(queue, room) for peer, queue in queues.items()}
        queues = {peer: queue for peer, queue in queues.items() if queue}


class MessageBuffer:
    """Memory for one message, reused for the next."""

    def __init__(self) -> None:
        self._data = np.empty(0, np.uint8)

    def of(self, count: int) -> NDArray:
        """Return `count` bytes with undefined content."""
        if len(self._data) < count:
            self._data = np.empty(0, np.uint8)  # free first, so that both never exist together
            self._data = np.empty(count, np.uint8)
        return self._data[:count]


def _single_range(pieces: Sequence[Piece], parts: Mapping[str, Any]) -> NDArray | None:
    """Return the array memory of a message that is a single contiguous range; else None.

    Such a message is sent or received without a buffer. `parts`: a rank's arrays by tensor name.
    """
    return memory_of(*pieces[0].locate_in_part(parts)) if len(pieces) == 1 else None


def _pack(pieces: Iterable[Piece], parts: Mapping[str, Any], data: NDArray) -> NDArray:
    """Copy ranges to their offsets in the message `data`, and return it.

    `parts`: a rank's arrays by tensor name. Padding is left as it is.
    """
    for piece in pieces:
        read_range(*piece.locate_in_part(parts), piece.view_message(data))
    return data


def _pieces_of(
    message: Mapping[int, tuple[list[Piece], int]], sizes: Sequence[int]
) -> Iterator[tuple[Piece, int]]:
    """Yield each range of a message, with the byte offset of its peer's part.

    `message`: (ranges, bytes) by peer, as `split_messages` yields. `sizes`: bytes of each rank's
    part, 0 for ranks without one; the parts are in rank order.
    """
    starts = list(accumulate(sizes, initial=0))
    for peer, (pieces, _) in message.items():
        yield from ((piece, starts[peer]) for piece in pieces)


class _Transfer:
    """What gathering and broadcasting have in common."""

    operation: str

    def __init__(
        self, group: ProcessGroup, root: int, max_bytes: int, timeout: float | None
    ) -> None:
        self.group = group
        self.root = root
        self.max_bytes = max_bytes
        self.timeout = timeout


# ---- gathering ----


def _iter_replicas(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, int, list[int]]]:
    """Yield (tensor, part index, ranks) for each part that several ranks have.

    Tied tensors are left out, as they are compared under their first name.
    """
    for tensor in tensors:
        for index, ranks in sorted(tensor.holders.items()):
            if len(ranks) > 1 and tensor.tied is None:
                yield tensor, index, ranks


def _digests(state: Mapping[str, object], tensors: list[Tensor], rank: int) -> list[str]:
    """Return the SHA-256 digests of this rank's replicas, in the order of `_iter_replicas`."""
    return [
        digest(array_of(state[tensor.name]))
        for tensor, _, ranks in _iter_replicas(tensors)
        if rank in ranks
    ]


def _compare_digests(tensors: list[Tensor], all_digests: list[list[str]]) -> list[RankDifference]:
    """Return a difference for each replica that differs from the others.

    `all_digests`: by rank, the result of `_digests`.
    """
    next_digests = [iter(digests) for digests in all_digests]  # by rank
    differences = []
    for tensor, index, ranks in _iter_replicas(tensors):
        rank_digests = {rank: next(next_digests[rank]) for rank in ranks}
        differences += compare_digests(tensor, index, rank_digests)
    return differences


class Gathering(_Transfer):
    """Transfers the state of all ranks to one rank."""

    operation = "gather_full_state"

    def _prepare(self, state: Mapping[str, Any], tensors: list[Tensor], verify: bool) -> Any:
        """Do on this rank, before the transfer, all that may fail.

        `state`: of this rank. `tensors`: of all ranks. Allocates `wholes` on the root. Returns the
        digests of this rank's replicas, and the `optimizer_values` of its state; without `verify`,
        an empty list and None.
        """
        digests = _digests(state, tensors, self.group.rank) if verify else []
        self.wholes: dict[str, Any] = {}  # assembled tensors; on the root only
        if self.group.rank == self.root:
            for tensor in tensors:
                if tensor.steps is not None and tensor.tied is None:
                    local = array_of(state[tensor.name])
                    self.wholes[tensor.name] = new_packed(local, tensor.shape)
        return digests, optimizer_values(state) if verify else None

    def _jobs(self, state: Mapping[str, object], tensors: list[Tensor]) -> list[Job]:
        """Copy the root's own parts into `wholes`; return the other transfers to the root.

        `state`: of this rank. `tensors`: of all ranks. The transfers are in one order on all ranks.
        Of several ranks with a part, the first sends it. Whole arrays need no transfer: the root
        has them.
        """
        jobs = []
        for tensor in tensors:
            if tensor.steps is None or tensor.tied is not None:
                continue
            for index, ranks in sorted(tensor.holders.items()):
                part = tensor.part(index)
                if not part.count:
                    continue
                array = array_of(state[tensor.name])
                if self.root not in ranks:
                    jobs.append(Job(tensor, index, ranks[0], part.count, item_bytes(array)))
                elif self.root == self.group.rank:
                    copy_part(part, array, self.wholes[tensor.name])
        return jobs

    def _move(self, state: Mapping[str, object], jobs: list[Job]) -> None:
        """Send this rank's parts to the root, one message at a time; the root stores all of them.

        `jobs`: the transfers of all ranks, equal on all of them. The root stores into `wholes`.
        """
        own_rank, world = self.group.rank, self.group.world_size
        buffer = MessageBuffer()  # for the bytes that this rank sends, or the root receives
        for message in split_messages(jobs, self.max_bytes):
            pieces, count = message.get(own_rank, ([], 0))  # this rank's share of the message
            data = _single_range(pieces, state)
            if data is None:
                data = _pack(pieces, state, buffer.of(count))
            counts = [count if rank == self.root else 0 for rank in range(world)]
            sizes = [0] * world  # bytes from each rank
            if own_rank == self.root:
                sizes = [message.get(rank, ([], 0))[1] for rank in range(world)]
            received = buffer.of(sum(sizes))
            self.group.all_to_all(
                data, counts=counts, out_counts=sizes, out=received, timeout=self.timeout
            )
            for piece, start in _pieces_of(message, sizes) if own_rank == self.root else ():
                whole_range = piece.locate_in_whole(self.wholes)
                write_range(*whole_range, piece.view_message(received, start))

    def run(
        self, state: Mapping[str, Any], entries: list[list[Entry]], verify: bool
    ) -> StateDict | None:
        """Gather the state: return it on the root, and None on other ranks; all ranks call this.

        `state`: this rank's. `entries`: by rank, descriptions of its tensors. `verify`: compare
        replicas by digests, and values of optimizers. Raises CompatibilityError on every rank if
        states do not match.
        """
        tensors, differences = match_entries(entries)
        if differences:
            raise differences_error(self.operation, differences)
        replies = exchange(
            self.group,
            self.operation,
            self.timeout,
            lambda: self._prepare(state, tensors, verify),
        )
        all_digests = [digests for digests, _ in replies]
        differences = _compare_digests(tensors, all_digests) if verify else []
        if differences:
            raise differences_error(
                self.operation,
                differences,
                f"verify_replicas=False uses the replica of rank {self.root} if it has one; running"
                " statistics of batch normalisation differ between replicas in training",
            )
        check_optimizers(self.operation, [values for _, values in replies])
        self._move(state, self._jobs(state, tensors))
        return self._result(state, tensors) if self.group.rank == self.root else None

    def _result(self, state: Mapping[str, Any], tensors: list[Tensor]) -> StateDict:
        """Return the gathered state on the root.

        Divided tensors are from `wholes`, tied ones sharing an array; others are the root's own
        from `state`, copied only from devices.
        """
        gathered = like(state)
        for tensor in tensors:
            if tensor.steps is not None:
                gathered[tensor.name] = self.wholes[tensor.tied or tensor.name]
                continue
            value = state[tensor.name]
            gathered[tensor.name] = value.cpu() if is_torch(value) else value
        return gathered


# ---- broadcasting ----


def _why_not_filled(target: Any) -> str:
    """Return why the array or tensor `target` of a state cannot be overwritten, or "".

    The text completes the error "broadcast_state: 'name' is ...".
    """
    if is_torch(target):
        array = target.detach()
        if array.is_conj() or array.is_neg():
            return "a view that is conjugated or negated when read; pass a copy"
    elif isinstance(target, np.ndarray):
        array = target
        if not array.flags.writeable:
            return "read-only; pass a copy"
    else:
        return f"a {type(target).__name__}; only NumPy arrays and torch tensors can be filled"
    if overlaps_itself(array):
        return "an array whose elements share memory; pass a copy"
    return ""


def check_writable(state: Mapping[str, object]) -> None:
    """Raise ValueError if an array of the state cannot be overwritten; call it before any is."""
    for name, value in state.items():
        why = _why_not_filled(value.array if isinstance(value, Shard) else value)
        if why:
            raise ValueError(f"broadcast_state: {name!r} is {why}")


def check_apart(state: Mapping[str, object], source: Mapping[str, object]) -> None:
    """Raise ValueError if an array to fill shares elements with one that is sent.

    Exempt is the sent tensor of the same name, or the part of it that is received.
    """
    sent = {name: array_of(value) for name, value in source.items()}
    targets = {
        name: array_of(value)
        for name, value in state.items()
        if not (name in sent and is_same_memory(_sent_part(value, sent[name]), array_of(value)))
    }
    arrays = {("source", name): array for name, array in sent.items()}
    arrays |= {("target", name): array for name, array in targets.items()}
    for (kind, other), (other_kind, name) in pairs_sharing_elements(arrays):
        if kind != other_kind:
            raise ValueError(
                f"broadcast_state: {name!r} shares memory with {other!r} of source=; pass a copy"
            )


def _sent_part(value: object, array: Any) -> Any:
    """Return a view of the part of `array` that the target `value` receives."""
    if not isinstance(value, Shard) or tuple(array.shape) != value.shape:
        return array
    return Part(value.layout._steps, value.shape, value.index).box_of(array)


class Broadcasting(_Transfer):
    """Transfers the state of one rank into the arrays of all ranks."""

    operation = "broadcast_state"

    def _differences(self, sent: list[Entry], entries: list[list[Entry]]) -> list[RankDifference]:
        """Return why ranks cannot receive the root's tensors: missing, or another dtype or shape.

        Also if the root sends a shard that some rank does not have. `sent`: descriptions of the
        tensors that the root sends. `entries`: by rank, descriptions of the tensors to fill.
        """
        source = {entry.name: entry for entry in sent}
        differences: list[RankDifference] = []

        def note(kind: str, name: str, rank: int, text: str) -> None:
            """Add a difference of one rank."""
            differences.append(difference(kind, name, [rank], text))

        for rank, rank_entries in enumerate(entries):
            names = {entry.name for entry in rank_entries}
            for name in source:
                if name not in names:
                    note("missing", name, rank, f"sent by rank {self.root}, not on rank {rank}")
            for entry in rank_entries:
                sent_entry = source.get(entry.name)
                if sent_entry is None:
                    note(
                        "missing", entry.name, rank,
                        f"on rank {rank}, not sent by rank {self.root}",
                    )  # fmt: skip
                    continue
                for kind in ("dtype", "shape"):
                    got, expected = getattr(entry, kind), getattr(sent_entry, kind)
                    if got != expected:
                        note(
                            kind, entry.name, rank,
                            f"{kind} {expected} sent by rank {self.root}, {got} on rank {rank}",
                        )  # fmt: skip
                if entry.overlap is not None and entry.overlap != sent_entry.overlap:
                    note(
                        "memory", entry.name, rank,
                        f"it shares elements with {entry.overlap} on rank {rank}, and "
                        f"differently on rank {self.root}, which sends; pass a copy",
                    )  # fmt: skip
                has_same_part = (entry.steps, entry.part) == (sent_entry.steps, sent_entry.part)
                if sent_entry.steps is not None and not has_same_part:
                    note(
                        "layout", entry.name, rank,
                        f"rank {self.root} has part {sent_entry.part} of it alone, which rank "
                        f"{rank} does not have; pass the full state as source= on rank {self.root}",
                    )  # fmt: skip
        return differences

    def _differing_ties(
        self, source: Mapping[str, object], sent: list[Entry], entries: list[list[Entry]]
    ) -> list[RankDifference]:
        """Return a difference for each array of a rank that would receive two different tensors.

        `source`: the tensors of the root. `sent`, `entries`: as for `run`. All ranks call this.
        """
        first_names = {entry.name: entry.tied or entry.name for entry in sent}
        pairs = [
            (entry.name, entry.tied, rank)
            for rank, rank_entries in enumerate(entries)
            for entry in rank_entries
            if entry.tied is not None and first_names[entry.name] != first_names[entry.tied]
        ]
        if not pairs:  # on every rank
            return []

        def differs() -> list[bool]:
            """Return, on the root, whether the tensors of each pair differ."""
            if self.group.rank != self.root:
                return []
            names = {name for pair in pairs for name in pair[:2]}
            digests = {name: digest(array_of(source[name])) for name in names}
            return [digests[name] != digests[other] for name, other, _ in pairs]

        results = exchange(self.group, self.operation, self.timeout, differs)[self.root]
        return [
            difference(
                "elements", name, [rank],
                f"rank {rank} has one array for it and {other!r}, and rank {self.root} sends "
                "different elements for the two",
            )
            for (name, other, rank), has_difference in zip(pairs, results, strict=True)
            if has_difference
        ]  # fmt: skip

    def run(
        self,
        state: Mapping[str, Any],
        source: Mapping[str, object] | None,
        sent: list[Entry],
        entries: list[list[Entry]],
    ) -> None:
        """Fill the arrays of this rank's `state`; the root sends `source`, or its state if None.

        `source` is ignored on other ranks. `sent`: descriptions of the tensors that the root sends.
        `entries`: by rank, descriptions of the tensors to fill. Raises CompatibilityError on every
        rank, with all states unchanged, if they do not match.
        """
        differences = self._differences(sent, entries)
        differences = differences or self._differing_ties(source or state, sent, entries)
        if differences:
            raise differences_error(self.operation, differences)
        entries_by_name = [
            {entry.name: entry for entry in rank_entries} for rank_entries in entries
        ]
        common_jobs: list[Job] = []  # every rank receives the same part
        separate_jobs: list[Job] = []  # ranks receive different parts
        for entry in sent:
            array = array_of(state[entry.name])
            size = item_bytes(array)
            # the different (layout, part) pairs of the ranks
            parts = {
                (rank_entries[entry.name].steps, rank_entries[entry.name].part)
                for rank_entries in entries_by_name
            }
            tensor = _tensor_of(entry)
            if parts == {(entry.steps, entry.part)}:
                count = tensor.part(entry.part).count
                common_jobs += [Job(tensor, entry.part, self.root, count, size)] if count else []
                continue
            for rank, rank_entries in enumerate(entries_by_name):
                rank_entry = rank_entries[entry.name]
                rank_tensor = _tensor_of(rank_entry)
                count = rank_tensor.part(rank_entry.part).count
                if count:
                    separate_jobs.append(Job(rank_tensor, rank_entry.part, rank, count, size))
        self._to_all(state, source, common_jobs)
        self._to_each(state, source, [job for job in separate_jobs if job.peer != self.root])
        # the root's state, which neither of the two transfers fills
        if self.group.rank == self.root and source is not None:
            for job in common_jobs:
                name = job.tensor.name
                self._copy(job, array_of(source[name]), 0, array_of(state[name]))
            for job in separate_jobs:
                if job.peer == self.root:
                    part = job.tensor.part(job.part)
                    box = part.box_of(array_of(source[job.tensor.name]))
                    self._copy(job, box, part.begin, array_of(state[job.tensor.name]))

    def _copy(self, job: Job, source: Array, first: int, target: Array) -> None:
        """Copy a part between the root's own arrays, in ranges of at most `max_bytes`.

        `first`: index in `source` of the part's first element, in C order. `target` has only the
        part.
        """
        for begin, end in split_range(target, job.length, self.max_bytes):
            memory = memory_of(target, begin, end)
            if memory is not None:
                read_range(source, first + begin, first + end, memory)
            else:
                write_range(target, begin, end, bytes_of(source, first + begin, first + end))

    def _to_all(
        self, state: Mapping[str, object], source: Mapping[str, object] | None, jobs: list[Job]
    ) -> None:
        """Send the parts that all ranks receive alike; contiguous ones from array to array.

        The root sends from `source`, or from `state` if that is None; other ranks receive into
        `state`. `jobs`: the transfers, equal on all ranks, each with the root as its peer.
        """
        if self.group.world_size == 1:
            return
        is_root = self.group.rank == self.root
        own_state = source if is_root and source is not None else state  # to send from, or to fill
        buffer = MessageBuffer()
        for message in split_messages(jobs, self.max_bytes):
            pieces, count = message[self.root]
            data = direct = _single_range(pieces, own_state)
            if data is None:
                data = _pack(pieces if is_root else (), own_state, buffer.of(count))
            self.group.broadcast(data, root=self.root, timeout=self.timeout)
            for piece in pieces if direct is None and not is_root else ():
                write_range(*piece.locate_in_part(own_state), piece.view_message(data))

    def _to_each(
        self, state: Mapping[str, object], source: Mapping[str, object] | None, jobs: list[Job]
    ) -> None:
        """Send every other rank its parts of the root's whole tensors, which it stores in `state`.

        `source` has the whole tensors by name; only the root reads it. `jobs`: the transfers to all
        ranks, equal on all of them.
        """
        own_rank, world = self.group.rank, self.group.world_size
        send_buffer, receive_buffer = MessageBuffer(), MessageBuffer()
        for message in split_messages(jobs, self.max_bytes):
            sizes = [message.get(rank, ([], 0))[1] for rank in range(world)]  # bytes for each rank
            sent = sizes if own_rank == self.root else [0] * world  # by this rank
            data = send_buffer.of(sum(sent))
            # the root packs the parts of all ranks
            for piece, start in _pieces_of(message, sizes) if own_rank == self.root else ():
                assert source is not None
                read_range(*piece.locate_in_whole(source), piece.view_message(data, start))
            own_size = sizes[own_rank]
            expected = [own_size if rank == self.root else 0 for rank in range(world)]
            received = receive_buffer.of(own_size)
            self.group.all_to_all(
                data, counts=sent, out_counts=expected, out=received, timeout=self.timeout
            )
            for piece in message.get(own_rank, ([], 0))[0]:
                write_range(*piece.locate_in_part(state), piece.view_message(received))


def _tensor_of(entry: Entry) -> Tensor:
    """Return the tensor that an entry describes, without the ranks that have it."""
    return Tensor(entry.name, entry.shape, entry.steps, {})


def open_exchange(
    group: ProcessGroup,
    operation: str,
    timeout: float | None,
    options: Callable[[], dict[str, Any]],
    prepare: Callable[[], tuple[Any, list[Entry], list[Entry], bool]],
) -> tuple[Any, list[list[Entry]], list[list[Entry]], bool]:
    """Check that options agree; then prepare, and exchange the descriptions of tensors.

    `operation`, `timeout`: as for `exchange`. `options` returns this rank's options by name.
    `prepare` returns a value of this rank, the entries (descriptions of tensors) of its state, the
    entries that it sends, and whether an object of it can refuse its state.
    Returns the value, both lists of entries by rank, and whether any rank has such an object.
    Options are checked first, because `prepare` may need all ranks. If either function fails on a
    rank, or options differ, every rank raises.
    """
    _check_same_options(operation, group.rank, exchange(group, operation, timeout, options))
    values: list[Any] = []  # the value of this rank, which is not sent

    def describe() -> list[Any]:
        """Prepare, keep the value on this rank, and return the rest for all ranks."""
        value, *rest = prepare()
        values.append(value)
        return rest

    replies = exchange(group, operation, timeout, describe)
    entries = [[entry_of(entry) for entry in rank_entries] for rank_entries, _, _ in replies]
    sent = [[entry_of(entry) for entry in rank_entries] for _, rank_entries, _ in replies]
    return values[0], entries, sent, any(can_refuse for *_, can_refuse in replies)
