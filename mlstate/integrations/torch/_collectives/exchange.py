"""How bytes travel over torch.distributed, and how torch reduces.

With gloo each rank exchanges messages with every other: gloo's own collectives do not report
which rank they wait for.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

# Keeps messages apart from those that a program sends over the same group by itself.
_TAG = 0x6D6C73
# Elements that are summed at a time, so that the sum stays in the cache.
_BLOCK = 1 << 18


class Link:
    """One operation's way into a group of torch's: who is who, and when time is up.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The group.
    device : torch.device
        Where bytes from this process must be to travel.
    timeout : float or None
        Seconds from now, None for the group's own.
    """

    __slots__ = (
        "_deadline",
        "_device",
        "_group",
        "began",
        "meanwhile",
        "peer",
        "rank",
        "world_size",
    )

    def __init__(self, group: Any, device: torch.device, timeout: float | None) -> None:
        self._group = group
        self._deadline = None if timeout is None else monotonic() + timeout
        self.began = False  # something is under way, or was
        self.peer: int | None = None  # the rank that is waited for, where it is one
        self.meanwhile: Callable[[], None] | None = None  # runs once something is under way
        self._device = device
        self.rank: int = group.rank()
        self.world_size: int = group.size()

    def wait(self, work: Any) -> None:
        """Wait for a piece of work of torch's that was started."""
        self.began = True
        self.run_meanwhile()
        remaining = self.remaining()
        work.wait() if remaining is None else work.wait(remaining)

    def run_meanwhile(self) -> None:
        """Run `meanwhile` unless it ran."""
        task, self.meanwhile = self.meanwhile, None
        if task is not None:
            task()

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

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        """Send and receive bytes on the device of the tensors; see the protocol."""
        if sends[0].device.type == "cpu":
            for peer, work in self._messages(sends, receives):
                self.peer = peer
                self.wait(work)
            self.peer = None
            return
        from torch.distributed.distributed_c10d import AllToAllOptions

        mine = [[*parts] for parts in (receives, sends)]
        for parts in mine:
            parts[self.rank] = parts[self.rank][:0]
        self.wait(self._group.alltoall(*mine, self._timed(AllToAllOptions())))

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

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Overwrite a tensor with that of `root`, by torch's own broadcast."""
        from torch.distributed.distributed_c10d import BroadcastOptions

        options = self._timed(BroadcastOptions())
        options.rootRank = root
        options.rootTensor = 0
        self.wait(self._group.broadcast([flat], options))

    def barrier(self) -> None:
        """Wait for every rank, by torch's own barrier."""
        from torch.distributed.distributed_c10d import BarrierOptions

        options = self._timed(BarrierOptions())
        options.device_ids = [self._device.index or 0]
        self.wait(self._group.barrier(options))

    def bytes_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a tensor of uint8 over the same memory."""
        return as_bytes(flat)

    def from_bytes(self, data: bytes) -> torch.Tensor:
        """Return a copy of bytes that can travel."""
        import torch

        if not data:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)

    def to_bytes(self, memory: torch.Tensor) -> bytes:
        """Return a copy of bytes that have come."""
        return memory.cpu().numpy().tobytes()

    def reduce(self, parts: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
        """Reduce by torch, in the order of the parts."""
        reduce_parts(parts, op, out)


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


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """See a flat contiguous tensor as bytes."""
    import torch

    return flat.view(torch.uint8)
