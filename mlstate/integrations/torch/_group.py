"""A group of torch.distributed as a `mlstate.collectives.ProcessGroup`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._arrays import is_torch
from ..._collective_args import (
    check_array,
    check_bytes,
    check_counts,
    check_op,
    check_root,
    check_rows,
    check_timeout,
    counts_of,
    dtype_name,
    failed,
    result_of,
)
from ..._turns import Turns
from ...collectives import ReduceOp
from ...errors import CollectiveError, CompatibilityError
from ._dtypes import torch_has
from ._exchange import Link, as_bytes, gather_texts, reduce_all, reduce_rows, spread, trade
from ._state import tensor_over, why_not_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    import torch

    from ._exchange import Steps

    Start = Callable[[Link], Steps]


# ---- arrays as flat tensors ----


def _flat(operation: str, array: Any, *, reduced: bool) -> torch.Tensor:
    """Return the elements as a flat tensor: the array's own memory where it is contiguous.

    `reduced` asks for torch's own dtype; otherwise NumPy's arrays become bytes.
    """
    import torch

    if is_torch(array):
        reason = why_not_plain(array)
        if reason:
            raise TypeError(f"{operation}: the tensor is {reason}")
        return array.contiguous().reshape(-1)  # type: ignore[no-any-return]
    if not array.nbytes and not reduced:
        return torch.empty(0, dtype=torch.uint8)
    flat = np.require(array, requirements=["C", "A"]).reshape(-1)
    if not reduced:
        return tensor_over(flat.view(np.uint8))
    if not torch_has(flat.dtype.name):
        error = CompatibilityError(
            f"{operation}: torch has no dtype {flat.dtype} to compute with; convert the array first"
        )
        error.name, error.got = operation, str(flat.dtype)
        raise error
    return tensor_over(flat.astype(flat.dtype.newbyteorder("="), copy=False))


def _is_flat(array: Any) -> bool:
    """Whether elements lie one behind the other, so that a flat tensor is the same memory."""
    if is_torch(array):
        return bool(array.is_contiguous())
    return bool(array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative)


def _put(flat: torch.Tensor, place: Any) -> None:
    """Copy flat elements to where they belong; nothing to do where they are there."""
    if is_torch(place):
        if flat.data_ptr() != place.data_ptr() or not place.is_contiguous():
            place.copy_(flat.view(place.dtype).reshape(place.shape))
        return
    if _is_flat(place) and flat.data_ptr() == place.__array_interface__["data"][0]:
        return
    if not place.nbytes:
        return
    known = place.dtype.newbyteorder("=") if flat.dtype.itemsize > 1 else place.dtype
    place[...] = as_bytes(flat.cpu()).numpy().view(known).reshape(place.shape)


class TorchGroup:
    """A group of torch.distributed, on any backend, as mlstate uses one.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        Default: the one that ``torch.distributed.init_process_group`` made. It is borrowed:
        who made it destroys it. Use it for nothing else while operations of this object are
        under way.
    check : bool, default False
        Let ranks compare what they are about to do before each operation, for another 0.1 to
        0.5 ms: calls that do not go together raise `CollectiveError` on every rank. Without it
        they can wait until the timeout, mix up results, or, with gloo, end the process.

    Raises
    ------
    CollectiveError
        torch.distributed was not initialised.
    ValueError
        This process is no member of the group.

    Notes
    -----
    Methods are those of `mlstate.collectives.ProcessGroup`. NumPy arrays and torch tensors
    travel from and to the memory they lie in, if it is contiguous, in every dtype; what the
    backend cannot reach (a NumPy array with NCCL, a CUDA tensor with a group for the CPU
    alone) goes over a copy. Every rank must pass shapes, counts and dtypes that go together.

    Reductions exchange the parts and sum them here, in the order of ranks: reproducible, and
    on gloo quicker than its own reduce_scatter. The price is memory for the parts of other
    ranks, at most as much as the input takes. Other operations take no memory besides.

    After a timeout or another failure the group is of no use any more, and says so. One
    operation takes place at a time; ``async_op=True`` for arrays in main memory hands it to a
    thread, and for tensors on a device puts it on the current stream. Close a group before torch
    destroys its own; a process that ends waits for operations under way, unless `abort` is called.

    Examples
    --------
    >>> import tempfile, numpy as np, torch.distributed as dist
    >>> from mlstate.integrations.torch import TorchGroup
    >>> store = dist.FileStore(tempfile.mkdtemp() + "/store", 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> with TorchGroup() as group:
    ...     group.all_reduce(np.arange(3.0)), group.gather_bytes(b"ready")
    (array([0., 1., 2.]), [b'ready'])
    >>> dist.destroy_process_group()
    """

    def __init__(self, process_group: Any = None, *, check: bool = False) -> None:
        import torch
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise CollectiveError(
                "TorchGroup: torch.distributed is not initialised in this process; call "
                "torch.distributed.init_process_group first"
            )
        if process_group is None:
            process_group = dist.distributed_c10d._get_default_group()
        if dist.get_rank(process_group) < 0:
            raise ValueError("TorchGroup: this process is no member of the group")
        self._group = process_group
        self._rank: int = process_group.rank()
        self._world_size: int = process_group.size()
        self._reached = {device.type for device in process_group._device_types}
        kind = "cpu" if "cpu" in self._reached else min(self._reached, default="cpu")
        self._device = torch.device(kind)
        if kind != "cpu":
            self._device = torch.device(kind, getattr(torch, kind).current_device())
        self._check = bool(check)
        self._ended = ""
        self._turns = Turns("mlstate-torch-group", self._rank)

    def __enter__(self) -> TorchGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        ended = f", {self._ended}" if self._ended else ""
        return f"TorchGroup(rank {self._rank} of {self._world_size}{ended})"

    @property
    def rank(self) -> int:
        """Number of this process in the group, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of processes in the group."""
        return self._world_size

    # ---- one operation after the other ----

    def _check_open(self, operation: str) -> None:
        if self._ended:
            raise failed(operation, self._rank, f"this group was {self._ended}; make a new one")

    def _perform(self, operation: str, timeout: float | None, start: Start) -> Any:
        """Take all steps of an operation, and return its result; the turn is held."""
        self._check_open(operation)
        link = Link(self._group, self._device, timeout)
        steps = start(link)
        began = False
        try:
            while True:
                work = next(steps)
                began = True
                remaining = link.remaining()
                work.wait() if remaining is None else work.wait(remaining)
        except StopIteration as done:
            return done.value
        except CollectiveError:  # of the check, on every rank
            raise
        except BaseException as error:
            ended = self._ended
            if began or isinstance(error, RuntimeError):  # ranks are not at one place any more
                self._ended = ended or f"broken by {operation}, which failed"
            if not isinstance(error, RuntimeError):  # which all is that torch raises
                raise
            raise self._explained(operation, timeout, ended, error) from error

    def _explained(
        self, operation: str, timeout: float | None, ended: str, error: RuntimeError
    ) -> CollectiveError:
        """Make the error of an operation that torch let fail."""
        text = " ".join(str(error).split())
        if ended:
            what = f"this group was {ended} meanwhile"
        elif "imed out" in text or "imeout" in text:
            limit = "the group's timeout" if timeout is None else f"{timeout:g} s"
            what = (
                f"not done after {limit}: a rank did not call it, is slow, or is gone; pass a "
                f"larger timeout= or look there ({text[:300]})"
            )
        else:
            what = f"another rank is gone, or called something else ({text[:300]})"
        return failed(operation, self._rank, f"{what}; the group is of no use any more")

    def _submit(
        self,
        operation: str,
        timeout: float | None,
        async_op: bool,
        start: Start,
        device: Any = None,
        call: str = "",
        counts: Sequence[list[int]] = (),
    ) -> Any:
        """Run an operation after those that were called before it.

        `call` says what every rank must call alike; `counts`, how many rows it sends to each
        and expects of each.
        """
        self._check_open(operation)
        if self._check:
            start = _checked(operation, call, counts, start)

        def task() -> Any:
            return self._perform(operation, timeout, start)

        if async_op and device is not None and device.type != "cpu":
            return self._turns.run_at_once(operation, task)
        return self._turns.run(operation, task, async_op=async_op)

    def _near(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor where the backend reaches it."""
        return flat if flat.device.type in self._reached else flat.to(self._device)

    def _target(self, operation: str, place: Any, *, reduced: bool) -> torch.Tensor:
        """Return flat memory for a result: that of `place`, or else new memory."""
        import torch

        if not _is_flat(place) and is_torch(place):
            place = torch.empty_like(place, memory_format=torch.contiguous_format)
        elif not _is_flat(place):
            place = np.empty_like(place, order="C", subok=False)
        return self._near(_flat(operation, place, reduced=reduced))

    # ---- operations ----

    def reduce_scatter(
        self,
        array: Any,
        *,
        op: ReduceOp | str = ReduceOp.SUM,
        out: Any = None,
        counts: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce arrays of one shape, and return the rows that belong to this rank.

        See `mlstate.collectives.ProcessGroup` for `op`, `out`, `counts`, `timeout` and
        `async_op`, here and below.
        """
        name = "reduce_scatter"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        kind = check_op(name, op, plain)
        rows = check_rows(name, plain)
        listed = check_counts(name, "counts", counts, rows, self._world_size)
        place = result_of(name, out, (listed[self._rank], *plain.shape[1:]), plain)
        flat = self._near(_flat(name, plain, reduced=True))
        width = len(flat) // rows if rows else 0

        def start(link: Link) -> Steps:
            target = self._target(name, place, reduced=True)
            yield from reduce_rows(_at(link, flat), flat, [n * width for n in listed], kind, target)
            _put(target, place)
            return place if out is None else out

        call = f"{kind} of {_kind_of(plain)} in rows {listed}"
        return self._submit(name, seconds, async_op, start, _device_of(plain), call)

    def all_gather(
        self,
        array: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the rows of all ranks in the order of ranks; this rank's are `array`."""
        name = "all_gather"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        rows = check_rows(name, plain)
        if counts is None:
            listed = [rows] * self._world_size
        else:
            listed = counts_of(name, "counts", counts, self._world_size)
            if listed[self._rank] != rows:
                raise _wrong_rows(name, rows, listed[self._rank], self._rank)
        place = result_of(name, out, (sum(listed), *plain.shape[1:]), plain)
        flat = self._near(as_bytes(_flat(name, plain, reduced=False)))
        width = _row_bytes(plain)

        def start(link: Link) -> Steps:
            target = self._target(name, place, reduced=False)
            sizes = [n * width for n in listed]
            yield from spread(_at(link, flat), flat, as_bytes(target), sizes)
            _put(target, place)
            return place if out is None else out

        call = f"{_kind_of(plain)} in rows {listed}"
        return self._submit(name, seconds, async_op, start, _device_of(plain), call)

    def all_reduce(
        self,
        array: Any,
        *,
        op: ReduceOp | str = ReduceOp.SUM,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce arrays of one shape, and return the same result on every rank."""
        name = "all_reduce"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        kind = check_op(name, op, plain)
        place = result_of(name, out, tuple(plain.shape), plain)
        flat = self._near(_flat(name, plain, reduced=True))

        def start(link: Link) -> Steps:
            target = self._target(name, place, reduced=True)
            yield from reduce_all(_at(link, flat), flat, kind, target)
            _put(target, place)
            return place if out is None else out

        call = f"{kind} of {tuple(plain.shape)} {_kind_of(plain)}"
        return self._submit(name, seconds, async_op, start, _device_of(plain), call)

    def all_to_all(
        self,
        array: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        out_counts: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send each rank its rows, ``counts[rank]`` of them; return those that others sent."""
        name = "all_to_all"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        rows = check_rows(name, plain)
        if (counts is None) != (out_counts is None):
            raise ValueError(f"{name}: give both counts and out_counts, or neither")
        sent = check_counts(name, "counts", counts, rows, self._world_size)
        wanted = sent
        if out_counts is not None:
            wanted = counts_of(name, "out_counts", out_counts, self._world_size)
        place = result_of(name, out, (sum(wanted), *plain.shape[1:]), plain)
        flat = self._near(as_bytes(_flat(name, plain, reduced=False)))
        width = _row_bytes(plain)

        def start(link: Link) -> Steps:
            target = as_bytes(self._target(name, place, reduced=False))
            source = flat.clone() if flat.data_ptr() == target.data_ptr() else flat
            sizes = [n * width for n in sent], [n * width for n in wanted]
            yield from trade(_at(link, flat), source, sizes[0], target, sizes[1])
            _put(target, place)
            return place if out is None else out

        call = _kind_of(plain)
        device = _device_of(plain)
        return self._submit(name, seconds, async_op, start, device, call, (sent, wanted))

    def broadcast(
        self,
        array: Any,
        *,
        root: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Copy the array of rank `root` into that of every other rank, and return it."""
        name = "broadcast"
        seconds = check_timeout(timeout)
        plain = check_array(name, array)
        start_rank = check_root(name, root, self._world_size)
        sends = start_rank == self._rank
        if not sends and not is_torch(array):
            writable = isinstance(array, np.ndarray) and array.flags.writeable
            if not writable:
                raise ValueError(f"{name}: the array of rank {self._rank} is read-only")

        def start(link: Link) -> Steps:
            if sends:
                flat = self._near(_flat(name, plain, reduced=False))
            else:
                flat = self._target(name, plain, reduced=False)
            yield link.broadcast(as_bytes(flat), start_rank)
            if not sends:
                _put(flat, plain)
            return array

        call = f"{tuple(plain.shape)} {_kind_of(plain)} from {start_rank}"
        return self._submit(name, seconds, async_op, start, _device_of(plain), call)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until every rank is here."""

        def start(link: Link) -> Steps:
            yield link.barrier()

        return self._submit("barrier", check_timeout(timeout), async_op, start)

    def gather_bytes(
        self,
        data: bytes,
        *,
        root: int | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the bytes of all ranks, of any lengths, as a list in the order of ranks.

        Up to 248 bytes from each rank take one exchange, more take two.
        """
        name = "gather_bytes"
        seconds = check_timeout(timeout)
        text = check_bytes(name, data)
        end = None if root is None else check_root(name, root, self._world_size)

        def start(link: Link) -> Steps:
            return (yield from gather_texts(link, text, end))

        return self._submit(name, seconds, async_op, start, call=f"to {end}")

    # ---- the end ----

    def abort(self) -> None:
        """Make operations that are under way fail, here and on the ranks that wait for this one.

        The group of torch is aborted too, where its backend can be.
        """
        self._ended = self._ended or "aborted"
        abort = getattr(self._group, "abort", None)
        if abort is not None:
            abort()

    def close(self) -> None:
        """Wait for operations that are under way, and let the group of torch go.

        It is not destroyed. Closing again does nothing.
        """
        self._turns.join()
        self._ended = self._ended or "closed"


def _checked(operation: str, call: str, counts: Sequence[list[int]], start: Start) -> Start:
    """Let ranks tell each other what they call before they do."""

    def checked(link: Link) -> Steps:
        mine = f"{operation} {call}".strip()
        told = yield from gather_texts(link, json.dumps([mine, *counts]).encode(), None)
        calls = [json.loads(text) for text in told]
        for rank, (other, *_) in enumerate(calls):
            if other != mine:
                what = f"this rank called {mine!r}, rank {rank} {other!r}; all must call the same"
                raise failed(operation, link.rank, what)
        for rank, to, sent, expected in _rows_between(calls) if counts else ():
            if sent != expected:
                what = f"rank {rank} sends {sent} rows to rank {to}, which expects {expected}"
                raise failed(operation, link.rank, what)
        return (yield from start(link))

    return checked


def _rows_between(calls: list[Any]) -> Iterator[tuple[int, int, int, int]]:
    """Give each pair of ranks, with what one sends and what the other expects."""
    for rank, (_, sent, _) in enumerate(calls):
        for to, (_, _, expected) in enumerate(calls):
            yield rank, to, sent[to], expected[rank]


def _kind_of(array: Any) -> str:
    """Say what rows are made of."""
    kind = dtype_name(array) if is_torch(array) else str(array.dtype)
    return f"{kind} {tuple(array.shape[1:])}"


def _device_of(array: Any) -> Any:
    return array.device if is_torch(array) else None


def _at(link: Link, flat: torch.Tensor) -> Link:
    """Let an operation's own memory lie where its tensor does."""
    link.device = flat.device
    return link


def _row_bytes(array: Any) -> int:
    """Return the bytes along all dimensions but the first."""
    size = int(array.element_size() if is_torch(array) else array.itemsize)
    for length in array.shape[1:]:
        size *= int(length)
    return size


def _wrong_rows(operation: str, rows: int, expected: int, rank: int) -> CompatibilityError:
    error = CompatibilityError(
        f"{operation}: the first dimension is {rows}, expected {expected}, the count of rank {rank}"
    )
    error.name, error.got, error.expected, error.rank = operation, str(rows), str(expected), rank
    return error
