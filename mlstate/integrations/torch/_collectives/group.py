"""A group of torch.distributed as a `mlstate.collectives.ProcessGroup`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from ...._common.arrays import is_torch
from ...._common.dtypes import name_of
from ...._common.set_module import set_module
from ....collectives._algorithms import ExchangeEngine
from ....collectives._arguments import check_plain, check_timeout, failed
from ....collectives._group_base import Call
from ....collectives._operation_queue import Turns
from ....errors import CollectiveError, CompatibilityError
from .._tensors.dtypes import torch_has
from .._tensors.state import tensor_over
from .exchange import Link, as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


# ---- arrays as flat tensors ----


def _flat(operation: str, array: Any, *, reduced: bool) -> torch.Tensor:
    """Return the elements as a flat tensor: the array's own memory where it is contiguous.

    `reduced` asks for torch's own dtype; otherwise NumPy's arrays become bytes.
    """
    import torch

    if is_torch(array):
        check_plain(operation, array)
        return array.contiguous().reshape(-1)  # type: ignore[no-any-return]
    if not array.nbytes and not reduced:
        return torch.empty(0, dtype=torch.uint8)
    flat = np.require(array, requirements=["C", "A"]).reshape(-1)
    if not reduced:
        return tensor_over(flat.view(np.uint8))
    if not torch_has(name_of(flat.dtype)):
        error = CompatibilityError(
            f"{operation}: torch has no dtype {flat.dtype} to compute with; convert the array first"
        )
        error.name, error.got = operation, str(flat.dtype)
        raise error
    native = flat.astype(flat.dtype.newbyteorder("="), copy=False)
    # the steps of an empty array may be 0, with which torch sees no bytes
    return tensor_over(native if native.size else np.empty(1, native.dtype)[:0])


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


@set_module("mlstate.integrations.torch")
class TorchGroup(ExchangeEngine):
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

    @property
    def is_default(self) -> bool:
        """Whether this is torch's default group, which DDP and others use too."""
        import torch.distributed as dist

        return dist.is_initialized() and self._group is dist.distributed_c10d._get_default_group()

    # ---- one operation after the other ----

    def _run(self, call: Call, task: Callable[[], Any]) -> Any:
        """Put an operation for a tensor on a device on the current stream."""
        if call.async_op and call.device is not None and call.device.type != "cpu":
            return self._turns.run_at_once(call.name, task)
        return super()._run(call, task)

    def _perform(self, call: Call, perform: Callable[[Any], Any]) -> Any:
        link = Link(self._group, self._device, call.seconds)
        try:
            if self._check:
                self._compare(link, call)
            return perform(link)
        except CollectiveError:  # of the check, on every rank
            raise
        except BaseException as error:
            ended = self._ended
            if link.began or isinstance(error, RuntimeError):  # ranks are not at one place any more
                self._ended = ended or f"broken by {call.name}, which failed"
            if not isinstance(error, RuntimeError):  # which all is that torch raises
                raise
            raise self._explained(call, link.peer, ended, error) from error

    def _compare(self, link: Link, call: Call) -> None:
        """Let ranks tell each other what they call before they do."""
        mine = f"{call.name} {call.text}".strip()
        told = self._gather(link, json.dumps([mine, *call.rows]).encode(), None)
        calls = [json.loads(text) for text in told or ()]
        for rank, (other, *_) in enumerate(calls):
            if other != mine:
                what = f"this rank called {mine!r}, rank {rank} {other!r}; all must call the same"
                raise failed(call.name, link.rank, what)
        for rank, to, sent, expected in _rows_between(calls) if call.rows else ():
            if sent != expected:
                what = f"rank {rank} sends {sent} rows to rank {to}, which expects {expected}"
                raise failed(call.name, link.rank, what)

    def _explained(
        self, call: Call, peer: int | None, ended: str, error: RuntimeError
    ) -> CollectiveError:
        """Make the error of an operation that torch let fail while `peer` was waited for."""
        text = " ".join(str(error).split())
        who = None if peer is None else f"rank {peer}"
        if ended:
            what = f"this group was {ended} meanwhile"
        elif "imed out" in text or "imeout" in text:
            limit = "the group's timeout" if call.seconds is None else f"{call.seconds:g} s"
            what = (
                f"not done after {limit}: {who or 'a rank'} did not call it, is slow, or is gone; "
                f"pass a larger timeout= or look there ({text[:300]})"
            )
        else:
            what = f"{who or 'another rank'} is gone, or called something else ({text[:300]})"
        return failed(call.name, self._rank, f"{what}; the group is of no use any more")

    # ---- memory ----

    def _near(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor where the backend reaches it."""
        return flat if flat.device.type in self._reached else flat.to(self._device)

    def _source(self, operation: str, array: Any, *, reduced: bool) -> torch.Tensor:
        return self._near(_flat(operation, array, reduced=reduced))

    def _target(self, operation: str, place: Any, *, reduced: bool) -> torch.Tensor:
        import torch

        if not _is_flat(place) and is_torch(place):
            place = torch.empty_like(place, memory_format=torch.contiguous_format)
        elif not _is_flat(place):
            place = np.empty_like(place, order="C", subok=False)
        return self._near(_flat(operation, place, reduced=reduced))

    def _put(self, target: torch.Tensor, place: Any) -> None:
        _put(target, place)

    # ---- how bytes travel ----

    def _broadcast(self, link: Any, memory: torch.Tensor, root: int) -> None:
        if memory.device.type == "cpu":
            super()._broadcast(link, memory, root)
        else:
            link.broadcast(as_bytes(memory), root)

    def _barrier(self, link: Any) -> None:
        if self._device.type == "cpu":
            super()._barrier(link)
        else:
            link.barrier()

    def _gather_meanwhile(
        self, data: bytes, task: Callable[[], None], timeout: float | None
    ) -> list[bytes]:
        """Gather bytes as `gather_bytes` does, and run a task while they travel."""

        def perform(link: Link) -> Any:
            link.meanwhile = task
            found = self._gather(link, data, None)
            link.run_meanwhile()
            return found

        texts: list[bytes] = self._submit(
            Call("gather_bytes", check_timeout(timeout), False, "to None"), perform
        )
        return texts

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


def _rows_between(calls: list[Any]) -> Iterator[tuple[int, int, int, int]]:
    """Give each pair of ranks, with what one sends and what the other expects."""
    for rank, (_, sent, _) in enumerate(calls):
        for to, (_, _, expected) in enumerate(calls):
            yield rank, to, sent[to], expected[rank]
