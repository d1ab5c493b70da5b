"""`TorchGroup`: a torch.distributed group as a process group; calls that differ between ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from ...._common.arguments import check_flags
from ...._common.arrays import is_torch
from ...._common.dtypes import name_of
from ...._common.set_module import set_module
from ....collectives._arguments import check_supported_tensor, check_timeout, failed
from ....collectives._engine import Call, Engine, OperationQueue
from ....errors import CollectiveError, CompatibilityError
from .._tensors.dtypes import torch_has
from .._tensors.memory import as_bytes
from .._tensors.state import tensor_over
from .exchange import Link

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


# ---- arrays as flat tensors ----


def _flat(operation: str, array: Any, *, reduced: bool) -> torch.Tensor:
    """Return the elements as a flat tensor: the array's own memory if it is contiguous.

    `operation`: name for errors. With `reduced`, the tensor has the array's dtype, and
    CompatibilityError is raised if torch lacks it; otherwise NumPy arrays become bytes.
    """
    import torch

    if is_torch(array):
        check_supported_tensor(operation, array)
        return array.contiguous().reshape(-1)  # type: ignore[no-any-return]
    if not array.nbytes and not reduced:
        return torch.empty(0, dtype=torch.uint8)
    flat = np.require(array, requirements=["C", "A"]).reshape(-1)
    if not reduced:
        return tensor_over(flat.view(np.uint8))
    if not torch_has(name_of(flat.dtype)):
        text = (
            f"{operation}: torch has no dtype {flat.dtype} to compute with; convert the array first"
        )
        raise CompatibilityError(text, name=operation, got=str(flat.dtype))
    native = flat.astype(flat.dtype.newbyteorder("="), copy=False)
    # an empty array may have strides of 0, which torch cannot view as bytes
    return tensor_over(native if native.size else np.empty(1, native.dtype)[:0])


def _is_flat(array: Any) -> bool:
    """Return whether a flat tensor can share the array's memory: contiguous and native."""
    if is_torch(array):
        return bool(array.is_contiguous())
    return bool(array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative)


def _put(flat: torch.Tensor, place: Any) -> None:
    """Copy a flat result to the caller's array `place`, unless they share memory.

    `flat` has the dtype of `place`, or its bytes.
    """
    if is_torch(place):
        if flat.data_ptr() != place.data_ptr() or not place.is_contiguous():
            place.copy_(flat.view(place.dtype).reshape(place.shape))
        return
    if _is_flat(place) and flat.data_ptr() == place.__array_interface__["data"][0]:
        return
    if not place.nbytes:
        return
    # torch's elements are in native order; bytes are as another rank's array had them
    dtype = place.dtype.newbyteorder("=") if flat.dtype.itemsize > 1 else place.dtype
    place[...] = as_bytes(flat.cpu()).numpy().view(dtype).reshape(place.shape)


@set_module("mlstate.integrations.torch")
class TorchGroup(Engine):
    """A torch.distributed group, on any backend, as a process group of mlstate.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        The group. Default: the group created by ``torch.distributed.init_process_group``. It is
        borrowed: its creator destroys it. Do not use it otherwise while operations of this
        object are running.
    check : bool, default False
        Compare the calls of all ranks before each operation, which takes another 0.1 to 0.5 ms.
        If calls do not match, `CollectiveError` is raised on every rank. Without this check,
        they may wait until the timeout, mix up results, or, with gloo, end the process.

    Raises
    ------
    CollectiveError
        If torch.distributed is not initialised.
    ValueError
        If this process is not a member of the group.

    Notes
    -----
    See `mlstate.collectives.ProcessGroup` for the methods. NumPy arrays and torch tensors are
    sent and received without a copy if they are contiguous, in every dtype. If the backend
    cannot access the memory (a NumPy array with NCCL, a CUDA tensor with a CPU-only group), a
    copy is sent. Shapes, counts and dtypes must match on all ranks.

    For reductions, the ranks exchange parts and sum them in rank order. This is reproducible, and
    on gloo faster than its own reduce_scatter. The cost is memory for the parts of other ranks,
    at most the size of the input. Other operations need no additional memory.

    After a timeout or another failure, the group raises `CollectiveError` for every operation.
    One operation runs at a time. ``async_op=True`` runs an operation on CPU memory in a thread,
    and an operation on a device in the current stream. Close a group before its torch group is
    destroyed. At exit, a process waits for running operations, unless `abort` was called.

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
        """Wrap a group of torch (None: the default group); the class describes the arguments."""
        import torch
        import torch.distributed as dist

        check_flags(check=check)
        if not (dist.is_available() and dist.is_initialized()):
            raise CollectiveError(
                "TorchGroup: torch.distributed is not initialised in this process; call "
                "torch.distributed.init_process_group first"
            )
        if process_group is None:
            process_group = dist.distributed_c10d._get_default_group()
        if dist.get_rank(process_group) < 0:
            raise ValueError("TorchGroup: this process is not a member of the group")
        self._group = process_group
        self._rank: int = process_group.rank()
        self._world_size: int = process_group.size()
        self._device_types = {device.type for device in process_group._device_types}
        kind = "cpu" if "cpu" in self._device_types else min(self._device_types, default="cpu")
        self._device = torch.device(kind)
        if kind != "cpu":
            self._device = torch.device(kind, getattr(torch, kind).current_device())
        self._check = bool(check)
        self._ended = ""
        self._operations = OperationQueue("mlstate-torch-group", self._rank)

    @property
    def is_default(self) -> bool:
        """Whether this is torch's default group, which DDP and other users share."""
        import torch.distributed as dist

        return dist.is_initialized() and self._group is dist.distributed_c10d._get_default_group()

    # ---- call order ----

    def _runs_at_once(self, call: Call) -> bool:
        """Run operations on a device in the current stream."""
        return call.device is not None and call.device.type != "cpu"

    def _perform(self, call: Call, perform: Callable[[Any], Any]) -> Any:
        """Run one operation: call `perform` with a link to the ranks, and return its result.

        An error after communication began, or of torch, makes the group unusable, and becomes a
        CollectiveError if torch raised it.
        """
        link = Link(self._group, self._device, call.seconds)
        try:
            if self._check:
                self._compare_calls(link, call)
            return perform(link)
        except CollectiveError:  # from the check, on every rank
            raise
        except BaseException as error:
            ended = self._ended  # not empty if `abort` or `close` was called meanwhile
            if link.began or isinstance(error, RuntimeError):  # ranks are out of step
                self._ended = ended or f"broken by {call.name}, which failed"
            if not isinstance(error, RuntimeError):  # torch raises only RuntimeError
                raise
            raise self._explain_error(call, link, ended, error) from error

    def _compare_calls(self, link: Link, call: Call) -> None:
        """Compare the calls of all ranks; raise CollectiveError on every rank if they differ.

        For operations with counts, each pair of ranks must also agree on the rows between them:
        `call.rows` has the rows that this rank sends to each rank, and those that it expects.
        """
        own_call = f"{call.name} {call.text}".strip()
        replies = link.gather_bytes(json.dumps([own_call, *call.rows]).encode(), None)
        calls = [json.loads(text) for text in replies or ()]
        for rank, (other, *_) in enumerate(calls):
            if other != own_call:
                reason = f"this rank called {own_call!r}, rank {rank} {other!r}"
                reason += "; all ranks must make the same call"
                raise failed(call.name, link.rank, reason)
        for rank, to, sent, expected in _rows_between(calls) if call.rows else ():
            if sent != expected:
                reason = f"rank {rank} sends {sent} rows to rank {to}, which expects {expected}"
                raise failed(call.name, link.rank, reason)

    def _explain_error(
        self, call: Call, link: Link, ended: str, error: RuntimeError
    ) -> CollectiveError:
        """Return the error of an operation that failed in torch, which names suspected ranks.

        `ended`: why the group had ended before, or "".
        """
        text, peer = " ".join(str(error).split()), link.peer
        who = None if peer is None else f"rank {peer}"
        if ended:
            reason = f"this group was {ended} meanwhile"
        elif "imed out" in text or "imeout" in text:
            limit = "the group's timeout" if call.seconds is None else f"{call.seconds:g} s"
            reason = (
                f"not done after {limit}: {who or 'a rank'} did not call it, is slow, or is gone; "
                f"pass a larger timeout= or look there ({text[:300]})"
            )
        else:
            suspects = [] if peer is None else sorted({peer, *link.closed_peers()})
            if len(suspects) > 1:  # this rank may notice the failure of the first one last
                names = ", ".join(f"rank {suspect}" for suspect in suspects)
                reason = f"one of {names} is gone or has failed, the others perhaps because of it"
            else:
                reason = (
                    f"{who or 'another rank'} is gone, has failed (perhaps because of another "
                    "rank), or called something else"
                )
            reason += f" ({text[:300]})"
        return failed(call.name, self._rank, f"{reason}; the group is unusable: create a new one")

    # ---- memory ----

    def _move_near(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor on a device that the backend can access."""
        return flat if flat.device.type in self._device_types else flat.to(self._device)

    def _source(self, operation: str, array: Any, *, reduced: bool) -> torch.Tensor:
        return self._move_near(_flat(operation, array, reduced=reduced))

    def _target(self, operation: str, place: Any, *, reduced: bool) -> torch.Tensor:
        """Return a flat tensor for a result; it is over `place` if its memory allows that.

        Else it is new memory, and `_put` copies it to `place`. `operation`, `reduced`: as for
        `_flat`.
        """
        import torch

        check_supported_tensor(operation, place)
        if not _is_flat(place) and is_torch(place):
            place = torch.empty_like(place, memory_format=torch.contiguous_format)
        elif not _is_flat(place):
            place = np.empty_like(place, order="C", subok=False)
        return self._move_near(_flat(operation, place, reduced=reduced))

    def _put(self, target: torch.Tensor, place: Any) -> None:
        _put(target, place)

    def _gather_overlapped(
        self, data: bytes, task: Callable[[], None], timeout: float | None
    ) -> list[bytes]:
        """Return the bytes `data` of all ranks in rank order; run `task` during the transfer.

        `timeout`: seconds; None: the torch group's.
        """

        def perform(link: Link) -> Any:
            link.overlapped_task = task
            texts = link.gather_bytes(data, None)
            link.run_overlapped_task()
            return texts

        texts: list[bytes] = self._submit(
            Call("gather_bytes", check_timeout(timeout), async_op=False, text="to None"), perform
        )
        return texts

    # ---- end of the group ----

    def abort(self) -> None:
        """Make running operations fail, on this rank and on ranks that wait for it.

        Also aborts the torch group, if its backend supports that.
        """
        self._ended = self._ended or "aborted"
        abort = getattr(self._group, "abort", None)
        if abort is not None:
            abort()

    def close(self) -> None:
        """Wait for queued operations, and release the torch group without destroying it.

        Later calls do nothing.
        """
        self._operations.join()
        self._ended = self._ended or "closed"


def _rows_between(calls: list[Any]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (rank, other rank, rows that the first sends, rows that the other expects).

    `calls`: name, rows to send and rows to expect by rank, of each rank.
    """
    for rank, (_, sent, _) in enumerate(calls):
        for to, (_, _, expected) in enumerate(calls):
            yield rank, to, sent[to], expected[rank]
