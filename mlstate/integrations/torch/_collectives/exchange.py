"""Messages over torch.distributed, their deadline, a rank that is gone; reduction by torch.

With gloo, each rank exchanges messages with every other rank, because gloo's collectives do not
report which rank they wait for.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

from ....collectives._link import ExchangeLink
from .._tensors.memory import as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

# Separates these messages from messages that a program sends over the same group.
_TAG = 0x6D6C73
_PROBE_TAG = _TAG + 1  # of messages that no rank sends
# Number of elements per summation step, so that the sum stays in the cache.
_BLOCK = 1 << 18


class Link(ExchangeLink):
    """Connection of one operation to a torch group, with a deadline."""

    __slots__ = (
        "_deadline",
        "_device",
        "_group",
        "_peers",
        "began",
        "overlapped_task",
        "peer",
        "rank",
        "world_size",
    )

    def __init__(self, group: Any, device: torch.device, timeout: float | None) -> None:
        """Begin one operation on torch's `group`; `timeout`: seconds, None for torch's own.

        `device`: of the bytes that this link creates itself.
        """
        self._group = group
        self._deadline = None if timeout is None else monotonic() + timeout
        self.began = False  # communication was started
        self._peers: set[int] = set()  # that messages were exchanged with
        self.peer: int | None = None  # the rank that this one waits for, if it is a single rank
        self.overlapped_task: Callable[[], None] | None = None  # runs once communication began
        self._device = device
        self.rank: int = group.rank()
        self.world_size: int = group.size()

    def wait(self, work: Any) -> None:
        """Wait for a torch work object until the deadline; first run the overlapped task."""
        self.began = True
        self.run_overlapped_task()
        remaining = self.remaining()
        work.wait() if remaining is None else work.wait(remaining)

    def run_overlapped_task(self) -> None:
        """Run the task that overlaps the exchange, unless it has run."""
        task, self.overlapped_task = self.overlapped_task, None
        if task is not None:
            task()

    def remaining(self) -> timedelta | None:
        """Return the time until the deadline, or None without one.

        At least 1 ms, because torch takes 0 as no limit.
        """
        if self._deadline is None:
            return None
        return timedelta(seconds=max(0.001, self._deadline - monotonic()))

    def _timed(self, options: Any) -> Any:
        """Return torch's `options` of a collective with the time that remains as their timeout."""
        remaining = self.remaining()
        if remaining is not None:
            options.timeout = remaining
        return options

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        """Send and receive bytes on the tensors' device; implements `ExchangeLink.exchange`.

        Item i of `sends` and `receives` belongs to rank i; this rank's own items are ignored.
        """
        if sends[0].device.type == "cpu":
            for peer, work in self._messages(sends, receives):
                self.peer = peer
                self.wait(work)
            self.peer = None
            return
        from torch.distributed.distributed_c10d import AllToAllOptions

        outputs, inputs = [*receives], [*sends]
        for parts in (outputs, inputs):  # alltoall would also send to this rank
            parts[self.rank] = parts[self.rank][:0]
        self.wait(self._group.alltoall(outputs, inputs, self._timed(AllToAllOptions())))

    def _messages(
        self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
    ) -> list[tuple[int, Any]]:
        """Start all messages, with the next rank first, so that ranks start with different peers.

        Return (other rank, torch work) of each. If a message cannot be started because its peer is
        gone, the others are still started: otherwise the other ranks would wait for this one and
        report it as the failed rank.
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
            self._peers.add(peer)
            try:
                works.append((peer, call([parts[peer]], peer, _TAG)))
            except RuntimeError as error:
                self.began = True
                if failure is None:
                    failure, self.peer = error, peer
        if failure is not None:
            raise failure
        return works

    def closed_peers(self) -> list[int]:
        """Return the ranks, in order, whose connection to this one is closed; empty unless on gloo.

        Considers ranks that took part in this operation: to connect to others could take long. A
        connection is closed if its rank has ended or either rank has timed out. On such a
        connection, a receive fails at once. Other receives remain: do not use the group afterwards.
        """
        import torch

        try:
            backend = self._group._get_backend(torch.device("cpu")).name()
        except RuntimeError:  # a group that Python implements has no backend
            return []
        if backend != "gloo":
            return []
        closed = []
        for peer in sorted(self._peers):
            try:
                self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _PROBE_TAG)
            except RuntimeError:
                closed.append(peer)
        return closed

    def broadcast(self, memory: torch.Tensor, root: int) -> None:
        """Overwrite `memory` with the memory of rank `root`; on a device by torch's operation."""
        if memory.device.type == "cpu":
            super().broadcast(memory, root)
            return
        from torch.distributed.distributed_c10d import BroadcastOptions

        options = self._timed(BroadcastOptions())
        options.rootRank = root
        options.rootTensor = 0
        self.wait(self._group.broadcast([as_bytes(memory)], options))

    def barrier(self) -> None:
        """Wait until every rank has called this; on a device with torch's barrier."""
        if self._device.type == "cpu":
            super().barrier()
            return
        from torch.distributed.distributed_c10d import BarrierOptions

        options = self._timed(BarrierOptions())
        options.device_ids = [self._device.index or 0]
        self.wait(self._group.barrier(options))

    def bytes_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a uint8 tensor over the same memory."""
        return as_bytes(flat)

    def from_bytes(self, data: bytes) -> torch.Tensor:
        """Return a copy of `data` that can be sent."""
        import torch

        if not data:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)

    def to_bytes(self, memory: torch.Tensor) -> bytes:
        """Return a copy of received bytes."""
        return memory.cpu().numpy().tobytes()

    def reduce(self, parts: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
        """Reduce parts in list order, with torch."""
        reduce_parts(parts, op, out)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of tensors of `dtype`: float32 or complex64 for narrower ones."""
    import torch

    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return torch.complex64 if dtype == torch.complex32 else dtype


def _view_signed(parts: list[torch.Tensor], op: str) -> tuple[list[torch.Tensor], int]:
    """Return signed views of unsigned `parts`, which torch cannot add, and an ordering offset.

    Sums have the same bits. For min and max, adding the offset (the smallest signed number) orders
    the views as unsigned numbers; it is 0 for other operations and dtypes.
    """
    import torch

    name = str(parts[0].dtype).removeprefix("torch.")
    if name not in ("uint16", "uint32", "uint64"):
        return parts, 0
    signed = getattr(torch, name[1:])
    offset = 0 if op == "sum" else torch.iinfo(signed).min
    return [part.view(signed) for part in parts], offset


def reduce_parts(parts: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
    """Reduce flat tensors in list order into `out`, which may be one of them.

    `op`: "sum", "mean", "min" or "max". Narrow floats are rounded once, at the end.
    """
    import torch

    (*views, target), order_offset = _view_signed([*parts, out], op)
    sum_dtype = _sum_dtype(target.dtype)
    for start in range(0, len(target), _BLOCK):
        block = slice(start, start + _BLOCK)
        total = views[0][block].to(sum_dtype, copy=True)
        if order_offset:
            total.add_(order_offset)
        for view in views[1:]:
            other = view[block].to(sum_dtype)
            if order_offset:
                other = other + order_offset
            if op == "min":
                torch.minimum(total, other, out=total)
            elif op == "max":
                torch.maximum(total, other, out=total)
            else:
                total.add_(other)
        if op == "mean":  # divide real and imaginary parts, as all groups do
            real = torch.view_as_real(total) if total.is_complex() else total
            real.div_(len(views))
        if order_offset:
            total.sub_(order_offset)
        target[block].copy_(total)
