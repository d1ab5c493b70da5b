"""`all_reduce_with`: mean of a DDP model's gradients over a group, in the backward pass."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ...._common.set_module import set_module
from ....collectives._arguments import dtype_name, failed
from ....collectives._engine import OperationQueue
from ....fsdp._backward_hook import FSDPBackwardHook
from ....fsdp._config import FSDP
from ....fsdp._gradient_ops import norm_partials
from ....fsdp._leaf_order import check_order
from ....fsdp._reducer import IDLE, OVERFLOW, REFUSED, ConsistencyCheck
from ....fsdp._sharding_unit import sharding_units
from .backward import PassErrors, check_reduction

if TYPE_CHECKING:
    import torch


@set_module("mlstate.integrations.torch")
def all_reduce_with(
    model: object,
    group: Any,
    *,
    nonfinite: str = "error",
    order: str = "rank",
    timeout: float | None = None,
) -> FSDPBackwardHook | None:
    """Make a group reduce the gradients of a DDP model to their mean, in every backward pass.

    Parameters
    ----------
    model : torch.nn.parallel.DistributedDataParallel
        The model. It can have only one communication hook.
    group : ProcessGroup
        The same ranks as the model's. A `TorchGroup` needs its own torch group from
        ``torch.distributed.new_group``, because DDP uses the model's group concurrently.
    nonfinite : {"error", "allow"}, default "error"
        Whether NaN or infinity in a gradient raises an error on every rank, at the end of the
        backward pass. Use ``"allow"`` if a gradient scaler looks for them.
    order : {"rank", "tree"}, default "rank"
        ``"tree"``: all micro-batches of a step are added in one tree, and their mean has the same
        bits for any number of ranks (see `FSDP`).
    timeout : float, optional
        Timeout of each operation in seconds. Default: the group's timeout.

    Returns
    -------
    FSDPBackwardHook or None
        With ``order="tree"``, the hook of the model's parameters. Each backward pass, inside of
        ``model.no_sync()`` too, is a micro-batch, whose index `FSDPBackwardHook.leaf` can give.
        Call `FSDPBackwardHook.finish_step` before the optimizer's step: it stores the mean over
        the micro-batches in ``parameter.grad``, which has this rank's last gradient until then.
        DDP itself then reduces nothing, and does not broadcast buffers.

    Raises
    ------
    TypeError
        If `model` is not a DDP model, or `group` is not a process group.
    ValueError
        If the ranks of group and model differ, or another argument is invalid.

    Notes
    -----
    Gradients are summed in rank order, in float32 or wider, divided by the number of ranks and
    rounded once. The bits are equal on every engine and for any ``bucket_cap_mb``. For two ranks
    they equal DDP's own; for more they can differ in the last bits, because gloo and NCCL add in
    another order. A separate thread reduces the buckets one after the other, while the backward
    pass continues. ``model.no_sync()`` works as usual.

    Inside ``model.join()``, a rank that has no inputs left contributes zeros, until all ranks have
    ended. The divisor is the number of ranks, or with ``divide_by_initial_world_size=False`` the
    number of ranks that still have inputs. (A communication hook of torch ignores that argument.)
    If a bucket fails, the rank without inputs raises the error at the end of the ``with`` block.

    Before each bucket, the ranks compare 64-byte headers. If the headers disagree, that bucket
    and all later ones are not reduced. A bucket with non-finite elements is skipped alone. Then
    ``backward`` raises `CollectiveError` on every rank, which names ranks and parameters.

    Examples
    --------
    >>> import tempfile, torch, torch.distributed as dist
    >>> from mlstate.integrations.torch import TorchGroup, all_reduce_with
    >>> store = dist.FileStore(tempfile.mkdtemp() + "/store", 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    >>> all_reduce_with(model, TorchGroup(dist.new_group()))
    >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
    >>> model.module.weight.grad
    tensor([[1., 2.]])
    >>> dist.destroy_process_group()
    """
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model must be a torch.nn.parallel.DistributedDataParallel, got {type(model).__name__}"
        )
    group, seconds = check_reduction(group, nonfinite, timeout)
    ranks = model.process_group
    if (ranks.rank(), ranks.size()) != (group.rank, group.world_size):
        raise ValueError(
            f"this is rank {ranks.rank()} of the model's {ranks.size()}, and rank {group.rank} "
            f"of the group's {group.world_size}: both must have the same ranks"
        )
    if check_order(order, "rank") == "tree":
        return _add_in_tree(model, group, nonfinite, seconds)
    buckets = _Buckets(model, group, nonfinite == "error", seconds)
    # a function without annotations: torch refuses those that are text
    model.register_comm_hook(None, lambda state, bucket: buckets.reduce(bucket))
    return None


def _add_in_tree(model: Any, group: Any, nonfinite: str, timeout: float | None) -> FSDPBackwardHook:
    """Return a hook that reduces the model's gradients in a tree, and end DDP's own reductions.

    DDP would add up several passes before its communication hook sees them, and wait for ranks
    that have fewer micro-batches.
    """
    fsdp = FSDP(
        group,
        op="mean",
        nonfinite=nonfinite,
        allow_unused=model.find_unused_parameters,
        timeout=timeout,
        order="tree",
    )
    hook = FSDPBackwardHook(fsdp)
    hook.register_hooks(model.module, sharding_units(model.module, group), gradients="full")

    model.require_backward_grad_sync = False  # as in its no_sync
    return hook


class _Pass(PassErrors):
    """Errors and state of one backward pass."""

    is_lost = False  # ranks are out of step, or the group is broken: reduce no more buckets

    def __init__(self, *, is_idle: bool) -> None:
        self.is_idle = is_idle  # no inputs left: `join` calls the hook outside of a pass
        if is_idle:  # without a pass, nothing calls back: `reduce` raises the errors
            self.errors = []
        else:
            super().__init__()


class _Buckets:
    """Reduces the buckets of one model."""

    def __init__(self, model: Any, group: Any, finite: bool, timeout: float | None) -> None:
        """Prepare to reduce a DDP model's buckets in `group`.

        `finite`: refuse gradients that are NaN or infinite. `timeout`: seconds, or None for the
        group's.
        """
        self._names = {p: name for name, p in model.module.named_parameters()}
        self._model = weakref.ref(model)  # whose reducer refers to this object
        self._group = group
        self._refuses_nonfinite = finite
        self._timeout = timeout
        self._operations = OperationQueue("mlstate-ddp", group.rank)
        self._pass: _Pass | None = None

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Start to reduce a bucket; return the future of its buffer, for DDP.

        Errors are raised at the end of the pass, because torch would keep only their text; in
        ``model.join()`` without inputs, after the last bucket. The future always gets a result, so
        that DDP does not wait.
        """
        import torch

        if bucket.index() == 0 or self._pass is None:
            self._pass = _Pass(is_idle=torch._C._current_graph_task_id() < 0)
        current = self._pass
        buffer, index = bucket.buffer(), bucket.index()
        parts = dict(
            zip((self._names[p] for p in bucket.parameters()), bucket.gradients(), strict=True)
        )
        # with its device, the future records an event that waiting streams wait for
        devices = None if buffer.device.type == "cpu" else [buffer.device]
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)

        def task() -> None:
            """Reduce the bucket in the group's thread; keep an error, and set the future anyway."""
            try:
                if not current.is_lost:
                    self._reduce(current, index, parts, buffer)
            except BaseException as error:
                current.is_lost = True
                current.errors.append(error)
            finally:
                done.set_result(buffer)

        if buffer.device.type == "cpu":
            self._operations.run("all_reduce", task, async_op=True)
        else:  # runs on the current stream
            self._operations.run_at_once("all_reduce", task)
        if current.is_idle and bucket.is_last():
            self._operations.join()
            current.raise_first()
        return done

    def _divides_by_all(self) -> bool:
        """Return whether ranks without inputs count in the mean; an argument of ``join``."""
        return bool(getattr(self._model(), "_divide_by_initial_world_size", True))

    def _average(self, buffer: torch.Tensor, divisor: int) -> None:
        """Replace `buffer` by the sum over the ranks, divided by `divisor` in float32 or wider."""
        import torch

        if divisor == self._group.world_size:
            self._group.all_reduce(buffer, op="mean", out=buffer, timeout=self._timeout)
            return
        wide = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
        buffer.copy_(self._group.all_reduce(wide, op="sum", timeout=self._timeout).div_(divisor))

    def _reduce(
        self, current: _Pass, index: int, parts: dict[str, torch.Tensor], buffer: torch.Tensor
    ) -> None:
        """Replace `buffer` by the mean over the ranks if all ranks agree on the bucket's gradients.

        `index`: of the bucket. `parts`: its gradients by name. Otherwise the error is added to
        `current` on every rank, and `buffer` is unchanged.
        """
        nonfinite_names = (
            [name for name, (_, count) in norm_partials(parts).items() if count]
            if self._refuses_nonfinite
            else []
        )
        facts = [f"{name!r} {dtype_name(g)} {tuple(g.shape)}" for name, g in parts.items()]
        divides_by_all = self._divides_by_all()
        settings = {"op": "mean", "divide_by_initial_world_size": divides_by_all}
        check = ConsistencyCheck(self._group, self._timeout, settings)
        check.sequence = index
        flags = (REFUSED if nonfinite_names else 0) | (IDLE if current.is_idle else 0)
        # all buckets have the settings that `check` has: {}
        headers, agreed_count = check.exchange_buckets(facts, {}, len(nonfinite_names), flags)
        if agreed_count:
            active = [header for header in headers if not header.flags & IDLE]
            self._average(buffer, len(headers) if divides_by_all else len(active))
            return
        # ranks with another bucket number or other parameters cannot agree on later buckets either
        current.is_lost = len({(header.sequence, header.digest) for header in headers}) > 1
        problems = dict.fromkeys(nonfinite_names, f"NaN or infinite elements; {OVERFLOW}")
        entries = [(n, fact, problems.get(n, "")) for n, fact in zip(parts, facts, strict=True)]
        failures = check.find_failures(entries, {}, has_ended=False).failures
        lines = [f"{name!r}: {reason}" for name, (_, reason) in failures.items()]
        more = f"; {len(lines) - 5} more" if len(lines) > 5 else ""
        error = failed(
            "backward pass",
            self._group.rank,
            f"bucket {index} was not reduced: {'; '.join(lines[:5])}{more}",
        )
        if failures:
            error.name, (error.rank, _) = next(iter(failures.items()))
        current.errors.append(error)
