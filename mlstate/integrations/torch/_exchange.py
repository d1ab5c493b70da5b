"""How bytes travel over torch.distributed, and how sums are made of them.

Operations are generators: each yields a piece of work of torch's for the caller to wait for,
and returns when nothing is left to wait for. All of them are made of one exchange, in which
each rank sends a part to every other: bytes go from where they lie to where they belong, in
any dtype, and sums are made here, in the order of ranks.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import accumulate, pairwise
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from typing import TypeAlias

    import torch

    Steps: TypeAlias = Generator[Any, None, Any]

# Keeps messages apart from those that a program sends over the same group by itself.
_TAG = 0x6D6C73
# Up to here, reducing everything on every rank saves a second exchange.
_SMALL_BYTES = 64 << 10
# Elements that are summed at a time, so that the sum stays in the cache.
_BLOCK = 1 << 18
# What each rank sends first to gather bytes: a length, and the bytes themselves if they fit.
_SLOT_BYTES = 256
_LENGTH_BYTES = 8


class Link:
    """One operation's way into a group of torch's: who is who, and when time is up.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The group.
    device : torch.device
        Where tensors must be to travel.
    timeout : float or None
        Seconds from now, None for the group's own.
    """

    __slots__ = ("_deadline", "_group", "began", "device", "peer", "rank", "world_size")

    def __init__(self, group: Any, device: torch.device, timeout: float | None) -> None:
        self._group = group
        self._deadline = None if timeout is None else monotonic() + timeout
        self.began = False  # something is under way, or was
        self.peer: int | None = None  # the rank that is waited for, where it is one
        self.device = device
        self.rank: int = group.rank()
        self.world_size: int = group.size()

    def at(self, flat: torch.Tensor) -> Link:
        """Let the operation's own memory lie where a tensor does."""
        self.device = flat.device
        return self

    def take(self, steps: Steps, meanwhile: Callable[[], None] | None = None) -> Any:
        """Take all steps of an operation, and return its result.

        Runs `meanwhile` once, as soon as something is under way, or at the end.
        """
        try:
            while True:
                work = next(steps)
                self.began = True
                if meanwhile is not None:
                    task, meanwhile = meanwhile, None
                    task()
                remaining = self.remaining()
                work.wait() if remaining is None else work.wait(remaining)
        except StopIteration as done:
            if meanwhile is not None:
                meanwhile()
            return done.value

    def remaining(self) -> timedelta | None:
        """Return the time that is left, never 0, which torch takes for forever."""
        if self._deadline is None:
            return None
        return timedelta(seconds=max(0.001, self._deadline - monotonic()))

    def _timed(self, options: Any) -> Any:
        remaining = self.remaining()
        if remaining is not None:
            options.timeout = remaining
        return options

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Steps:
        """Send each other rank its bytes, and fill what is meant for theirs; empty ones stay here.

        Sends may be one tensor many times. What this rank has for itself is left alone.
        """
        if self.device.type == "cpu":
            for peer, work in self._messages(sends, receives):
                self.peer = peer
                yield work
            self.peer = None
            return
        from torch.distributed.distributed_c10d import AllToAllOptions

        nothing = self.memory(0)
        mine = [[*parts] for parts in (receives, sends)]
        for parts in mine:
            parts[self.rank] = nothing
        yield self._group.alltoall(*mine, self._timed(AllToAllOptions()))

    def _messages(
        self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
    ) -> list[tuple[int, Any]]:
        """Start all messages; begin with the next rank, so that not all write to one at first.

        A rank that is gone does not keep the others from getting theirs: they would wait for
        this one, and blame it.
        """
        steps = range(1, self.world_size)
        calls = [
            (self._group.recv, receives, (self.rank - step) % self.world_size) for step in steps
        ]
        calls += [(self._group.send, sends, (self.rank + step) % self.world_size) for step in steps]
        works: list[tuple[int, Any]] = []
        failure: RuntimeError | None = None
        for call, parts, peer in calls:
            if not len(parts[peer]):
                continue
            try:
                works.append((peer, call([parts[peer]], peer, _TAG)))
            except RuntimeError as error:
                self.began = True
                if failure is None:
                    failure, self.peer = error, peer
        if failure is not None:
            raise failure
        return works

    def broadcast(self, tensor: torch.Tensor, root: int) -> Steps:
        """Overwrite the tensor with that of `root`."""
        from torch.distributed.distributed_c10d import BroadcastOptions

        options = self._timed(BroadcastOptions())
        options.rootRank = root
        options.rootTensor = 0
        yield self._group.broadcast([tensor], options)

    def barrier(self) -> Steps:
        """Wait for every rank."""
        from torch.distributed.distributed_c10d import BarrierOptions

        options = self._timed(BarrierOptions())
        if self.device.type != "cpu":
            options.device_ids = [self.device.index or 0]
        yield self._group.barrier(options)

    def memory(self, count: int) -> torch.Tensor:
        """Return new memory that can travel."""
        import torch

        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def tensor(self, data: bytes) -> torch.Tensor:
        """Return a copy of bytes that can travel."""
        import torch

        if not data:
            return self.memory(0)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)


def split(flat: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Return each rank's part, one behind the other."""
    return [flat[start:end] for start, end in pairwise(accumulate(counts, initial=0))]


# ---- moving ----


def spread(link: Link, mine: torch.Tensor, everyone: torch.Tensor, counts: Sequence[int]) -> Steps:
    """Fill `everyone` with the bytes of all ranks, ``counts[r]`` of rank r."""
    parts = split(everyone, counts)
    if parts[link.rank].data_ptr() != mine.data_ptr():
        parts[link.rank].copy_(mine)
    yield from link.exchange([mine] * link.world_size, parts)


def trade(
    link: Link,
    send: torch.Tensor,
    send_counts: Sequence[int],
    receive: torch.Tensor,
    receive_counts: Sequence[int],
) -> Steps:
    """Send each rank its bytes, and put what ranks send one behind the other."""
    sends, receives = split(send, send_counts), split(receive, receive_counts)
    receives[link.rank].copy_(sends[link.rank])
    yield from link.exchange(sends, receives)


def gather_texts(link: Link, data: bytes, root: int | None) -> Steps:
    """Return the bytes of all ranks; None where this rank is not the root.

    Short ones travel with their lengths, in one exchange.
    """
    room = _SLOT_BYTES - _LENGTH_BYTES
    head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room]
    slots = link.memory(_SLOT_BYTES * link.world_size)
    counts = [_SLOT_BYTES] * link.world_size
    yield from spread(link, link.tensor(head.ljust(_SLOT_BYTES, b"\0")), slots, counts)
    heads = _texts(slots, counts)
    lengths = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
    texts = [head[_LENGTH_BYTES:][:n] for head, n in zip(heads, lengths, strict=True)]
    rest = [n if n > room else 0 for n in lengths]
    if any(rest):
        mine = link.tensor(data if rest[link.rank] else b"")
        ends = range(link.world_size) if root is None else [root]
        wanted = rest if link.rank in ends else [0] * link.world_size
        received = link.memory(sum(wanted))
        sends = [mine if rank in ends else mine[:0] for rank in range(link.world_size)]
        yield from link.exchange(sends, split(received, wanted))
        long = _texts(received, wanted)
        if rest[link.rank]:
            long[link.rank] = data
        texts = [b or a for a, b in zip(texts, long, strict=True)]
    return texts if root in (None, link.rank) else None


def _texts(received: torch.Tensor, counts: Sequence[int]) -> list[bytes]:
    return [part.cpu().numpy().tobytes() for part in split(received, counts)]


# ---- reducing ----


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which elements are summed."""
    import torch

    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return torch.complex64 if dtype == torch.complex32 else dtype


def _signed(parts: list[torch.Tensor], op: str) -> tuple[list[torch.Tensor], int]:
    """See unsigned elements, which torch cannot add, as signed ones, and what to add to order them.

    Sums are the same bits. For min and max, adding the smallest number puts signed ones into
    the order of unsigned ones.
    """
    import torch

    name = str(parts[0].dtype).removeprefix("torch.")
    if name not in ("uint16", "uint32", "uint64"):
        return parts, 0
    signed = getattr(torch, name[1:])
    shift = 0 if op == "sum" else torch.iinfo(signed).min
    return [part.view(signed) for part in parts], shift


def reduce_parts(parts: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
    """Reduce flat tensors in their order into `out`, which may be one of them."""
    import torch

    (*views, target), shift = _signed([*parts, out], op)
    wide = _wide(target.dtype)
    for start in range(0, len(target), _BLOCK):
        block = slice(start, start + _BLOCK)
        total = views[0][block].to(wide, copy=True)
        total.add_(shift) if shift else None
        for view in views[1:]:
            other = view[block].to(wide)
            other = other + shift if shift else other
            if op == "min":
                torch.minimum(total, other, out=total)
            elif op == "max":
                torch.maximum(total, other, out=total)
            else:
                total.add_(other)
        if op == "mean":  # of complex numbers each part by itself, as everywhere in mlstate
            real = torch.view_as_real(total) if total.is_complex() else total
            real.div_(len(views))
        total.sub_(shift) if shift else None
        target[block].copy_(total)


def reduce_rows(
    link: Link, flat: torch.Tensor, counts: Sequence[int], op: str, out: torch.Tensor
) -> Steps:
    """Reduce flat tensors; rank r gets its ``counts[r]`` elements of the result."""
    sends = split(flat, counts)
    shares = [counts[link.rank] if r != link.rank else 0 for r in range(link.world_size)]
    parts = split(flat.new_empty(sum(shares)), shares)
    yield from link.exchange([as_bytes(p) for p in sends], [as_bytes(p) for p in parts])
    parts[link.rank] = sends[link.rank]
    reduce_parts(parts, op, out)


def reduce_all(link: Link, flat: torch.Tensor, op: str, out: torch.Tensor) -> Steps:
    """Reduce flat tensors; every rank gets the result."""
    size, length = flat.element_size(), len(flat)
    if length * size * link.world_size <= _SMALL_BYTES:
        received = flat.new_empty(length * link.world_size)
        counts = [length] * link.world_size
        yield from spread(link, as_bytes(flat), as_bytes(received), [n * size for n in counts])
        reduce_parts(split(received, counts), op, out)
        return
    part = -(-length // link.world_size)
    ends = [min(length, part * rank) for rank in range(link.world_size + 1)]
    counts = [end - start for start, end in pairwise(ends)]
    # where `out` is the input, only this rank's part of it is written before all were sent
    mine = split(out, counts)[link.rank]
    yield from reduce_rows(link, flat, counts, op, mine)
    yield from spread(link, as_bytes(mine), as_bytes(out), [n * size for n in counts])


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """See a flat contiguous tensor as bytes."""
    import torch

    return flat.view(torch.uint8)
