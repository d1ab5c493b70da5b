"""How bytes travel over torch.distributed, and how sums are made of them.

Operations are generators: each yields a piece of work of torch's for the caller to wait for,
and returns when nothing is left to wait for. All of them are made of one exchange of bytes,
which every backend has for every dtype, and of sums in the order of ranks: the same bits on
each backend.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import accumulate, pairwise
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from typing import TypeAlias

    import torch

    Steps: TypeAlias = Generator[Any, None, Any]

# Up to here, gathering sends a copy to each rank: half the latency of torch's own (measured).
_REPEATED_BYTES = 64 << 20
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

    __slots__ = ("_deadline", "_group", "device", "rank", "world_size")

    def __init__(self, group: Any, device: torch.device, timeout: float | None) -> None:
        self._group = group
        self._deadline = None if timeout is None else monotonic() + timeout
        self.device = device
        self.rank: int = group.rank()
        self.world_size: int = group.size()

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

    def exchange(
        self,
        send: torch.Tensor,
        send_counts: Sequence[int],
        receive: torch.Tensor,
        receive_counts: Sequence[int],
    ) -> Any:
        """Send each rank its bytes, and receive those of each rank."""
        from torch.distributed.distributed_c10d import AllToAllOptions

        counts = list(receive_counts), list(send_counts)
        return self._group.alltoall_base(receive, send, *counts, self._timed(AllToAllOptions()))

    def gather(self, send: torch.Tensor, receive: torch.Tensor) -> Any:
        """Receive as many bytes of each rank, in the order of ranks."""
        from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
            AllgatherOptions,
        )

        return self._group._allgather_base(receive, send, self._timed(AllgatherOptions()))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        """Overwrite the tensor with that of `root`."""
        from torch.distributed.distributed_c10d import BroadcastOptions

        options = self._timed(BroadcastOptions())
        options.rootRank = root
        options.rootTensor = 0
        return self._group.broadcast([tensor], options)

    def barrier(self) -> Any:
        """Wait for every rank."""
        from torch.distributed.distributed_c10d import BarrierOptions

        options = self._timed(BarrierOptions())
        if self.device.type != "cpu":
            options.device_ids = [self.device.index or 0]
        return self._group.barrier(options)

    def bytes(self, count: int) -> torch.Tensor:
        """Return new memory that can travel."""
        import torch

        return torch.empty(count, dtype=torch.uint8, device=self.device)


def spans(counts: Sequence[int]) -> list[slice]:
    """Return where each rank's part lies, one part behind the other."""
    return [slice(start, end) for start, end in pairwise(accumulate(counts, initial=0))]


# ---- moving ----


def spread(link: Link, mine: torch.Tensor, everyone: torch.Tensor, counts: Sequence[int]) -> Steps:
    """Fill `everyone` with the bytes of all ranks, ``counts[r]`` of rank r."""
    if link.world_size * max(counts) <= _REPEATED_BYTES:
        repeated = mine.repeat(link.world_size)
        yield link.exchange(repeated, [len(mine)] * link.world_size, everyone, counts)
    elif len(set(counts)) == 1:
        yield link.gather(mine, everyone)
    else:
        parts = [everyone[span] for span in spans(counts)]
        parts[link.rank].copy_(mine)
        works = [link.broadcast(part, root) for root, part in enumerate(parts)]
        yield from works


def gather_texts(link: Link, data: bytes, root: int | None) -> Steps:
    """Return the bytes of all ranks; None where this rank is not the root.

    Short ones travel with their lengths, in one exchange.
    """
    import torch

    room = _SLOT_BYTES - _LENGTH_BYTES
    head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room]
    slot = torch.frombuffer(bytearray(head.ljust(_SLOT_BYTES, b"\0")), dtype=torch.uint8)
    slots = link.bytes(_SLOT_BYTES * link.world_size)
    counts = [_SLOT_BYTES] * link.world_size
    yield from spread(link, slot.to(link.device), slots, counts)
    heads = [slots[span].cpu().numpy().tobytes() for span in spans(counts)]
    lengths = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
    texts = [head[_LENGTH_BYTES:][:n] for head, n in zip(heads, lengths, strict=True)]
    rest = [n if n > room else 0 for n in lengths]
    if any(rest):
        mine = torch.empty(0, dtype=torch.uint8)
        if rest[link.rank]:
            mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        long = yield from _gather_long(link, mine.to(link.device), rest, root)
        texts = [b or a for a, b in zip(texts, long, strict=True)]
    return texts if root in (None, link.rank) else None


def _gather_long(link: Link, mine: torch.Tensor, counts: list[int], root: int | None) -> Steps:
    """Return the bytes of all ranks, where this rank wants them."""
    if root is None:
        received = link.bytes(sum(counts))
        yield from spread(link, mine, received, counts)
    else:
        wanted = counts if root == link.rank else [0] * link.world_size
        received = link.bytes(sum(wanted))
        sent = [len(mine) if rank == root else 0 for rank in range(link.world_size)]
        yield link.exchange(mine, sent, received, wanted)
        counts = wanted
    return [received[span].cpu().numpy().tobytes() for span in spans(counts)]


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
        if op == "mean":
            total.div_(len(views))
        total.sub_(shift) if shift else None
        target[block].copy_(total)


def reduce_rows(
    link: Link, flat: torch.Tensor, counts: Sequence[int], op: str, out: torch.Tensor
) -> Steps:
    """Reduce flat tensors; rank r gets its ``counts[r]`` elements of the result."""
    size = flat.element_size()
    mine = counts[link.rank]
    received = link.bytes(mine * size * link.world_size)
    sizes = [count * size for count in counts]
    yield link.exchange(as_bytes(flat), sizes, received, [mine * size] * link.world_size)
    elements = received.view(flat.dtype)
    reduce_parts([elements[s] for s in spans([mine] * link.world_size)], op, out)


def reduce_all(link: Link, flat: torch.Tensor, op: str, out: torch.Tensor) -> Steps:
    """Reduce flat tensors; every rank gets the result."""
    size, length = flat.element_size(), len(flat)
    if length * size * link.world_size <= _SMALL_BYTES:
        received = link.bytes(length * size * link.world_size)
        yield from spread(link, as_bytes(flat), received, [length * size] * link.world_size)
        elements = received.view(flat.dtype)
        reduce_parts([elements[s] for s in spans([length] * link.world_size)], op, out)
        return
    part = -(-length // link.world_size)
    ends = [min(length, part * rank) for rank in range(link.world_size + 1)]
    counts = [end - start for start, end in pairwise(ends)]
    mine = flat.new_empty(counts[link.rank])
    yield from reduce_rows(link, flat, counts, op, mine)
    yield from spread(link, as_bytes(mine), as_bytes(out), [n * size for n in counts])


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """See a flat contiguous tensor as bytes."""
    import torch

    return flat.view(torch.uint8)
