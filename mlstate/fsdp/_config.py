"""`FSDP`: checks and defaults of op, divisor, `reduce_dtype`, `bucket_bytes`."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from .._common.arguments import check_flags, check_int, check_number
from .._common.budget import parse_size
from ..collectives import ReduceOp
from ..collectives._arguments import check_group, check_timeout
from ._bucket import Terms
from ._leaf_order import MOST_PENDING, check_order
from ._reducer import Reducer
from ._sharding_unit import dtype_text

if TYPE_CHECKING:
    from .._types import DType


class FSDP:
    """The ranks that share the gradients of a model, and their reduction settings.

    Parameters
    ----------
    process_group : ProcessGroup
        The ranks. `mlstate.collectives` and `mlstate.integrations` provide groups.
    op : {"sum", "mean", "min", "max"}, default "sum"
        The reduction over ranks. With ``order="tree"`` a mean is over the micro-batches of the
        step, so that it does not depend on the number of ranks; minima and maxima are refused.
    gradient_divide_factor : float, optional
        Divisor of the sums, applied in float32 or wider before rounding; for ``op="sum"`` only.
        Default: 1. ``op="mean"`` divides by the number of ranks.
    reduce_dtype : {"float32"}, optional
        Keep sums of 16- and 8-bit floats in float32, the dtype of the computation. Default:
        round them once, to the parameter's dtype.
    bucket_bytes : int or str, default 25 MiB
        Gradients are collected until they have this size, then reduced together. 0 reduces each
        gradient separately. The sums have the same bits for any value.
    nonfinite : {"error", "allow"}, default "error"
        Whether NaN or infinity in a sum raises an error on every rank. Use ``"allow"`` if a
        gradient scaler looks for them.
    allow_unused : bool, default False
        Accept missing gradients. If another rank has the gradient, a missing one counts as zeros.
        A parameter that no rank used has no gradient, as in DDP with
        ``find_unused_parameters=True``: with ``gradients="full"``, ``parameter.grad`` does not
        change; otherwise ``unit.local_gradient`` is None, or unchanged with ``accumulate=True``.
        If every rank has missing gradients, the ranks exchange their names at the end of the pass.
    timeout : float, optional
        Timeout of each operation in seconds. Default: the group's timeout.
    order : {"rank", "tree"}, default "rank"
        Order of the additions. ``"rank"``: in rank order, in each backward pass. ``"tree"``: of
        all micro-batches of a step, in one binary tree over their global indices
        (`FSDPBackwardHook.leaf`), until `FSDPBackwardHook.finish_step`. Then the bits of a sum are
        the same for any number of ranks.
    max_pending : int, default 32
        With ``order="tree"``, the most sums that a rank holds at once, because the indices next to
        them have not arrived: each of the size of its parts, or inside ``no_sync`` of the full
        gradients. An index that would need more is an error.
    record : bool, default False
        Record when each gradient arrives and each bucket is reduced, for
        `FSDPBackwardHook.report`.

    Raises
    ------
    TypeError
        If an argument has a wrong type.
    ValueError
        If an argument has an invalid value.

    Notes
    -----
    All ranks must pass the same settings. Before each bucket, or before several buckets that are
    ready on all ranks, the ranks compare 64-byte headers that describe the gradients and the
    settings. If a shape, dtype, order or setting differs on one rank, every rank raises an error
    that names it.

    The promise of ``order="tree"``: the same micro-batches of the same shape give the same bits of
    weights on any number of data-parallel ranks, on the same kind of machine, with the same
    libraries and threads, and an optimizer that updates each element by itself, such as AdamW.
    These break it: another size of micro-batches, fused SGD with momentum, another tensor or
    pipeline parallel degree, batch norm over ranks, dropout whose generator depends on the rank,
    losses over the whole batch, ``OMP_NUM_THREADS``, which torchrun sets for more than one process
    only, and another GPU. Clip with ``clip_grad_norm(order="tree")``.

    Examples
    --------
    >>> from mlstate.collectives import SingleGroup
    >>> from mlstate.fsdp import FSDP
    >>> FSDP(SingleGroup(), op="mean")
    FSDP(rank 0 of 1, op='mean')
    """

    def __init__(
        self,
        process_group: Any,
        *,
        op: ReduceOp | str = ReduceOp.SUM,
        gradient_divide_factor: float | None = None,
        reduce_dtype: Any = None,
        bucket_bytes: int | str = 25 << 20,
        nonfinite: str = "error",
        allow_unused: bool = False,
        timeout: float | None = None,
        order: str = "rank",
        max_pending: int = MOST_PENDING,
        record: bool = False,
    ) -> None:
        """Check the arguments, which the class describes; sends nothing to other ranks."""
        process_group = check_group(process_group)
        self._group = process_group
        self._op = str(ReduceOp(op))
        self.bucket_bytes: int = parse_size("bucket_bytes", bucket_bytes)
        if nonfinite not in ("error", "allow"):
            raise ValueError(f"nonfinite must be 'error' or 'allow', got {nonfinite!r}")
        check_flags(allow_unused=allow_unused, record=record)
        self.allow_unused: bool = bool(allow_unused)
        self._order = check_order(order, "rank")
        if order == "tree" and self._op not in ("sum", "mean"):
            raise ValueError(f"order='tree' needs op='sum' or 'mean', got {self._op!r}")
        self.max_pending: int = check_int("max_pending", max_pending, 1)
        self._terms = Terms(
            # a mean is a sum with a divisor
            op="sum" if self._op == "mean" else self._op,
            divisor=self._divisor(gradient_divide_factor),
            reduce_dtype=_reduce_dtype(reduce_dtype),
            nonfinite=nonfinite,
        )
        settings = {
            "op": self._op,
            "reduce_dtype": self._terms.reduce_dtype or None,
            "bucket_bytes": self.bucket_bytes,
            "nonfinite": nonfinite,
            "allow_unused": self.allow_unused,
            "order": order,
            "max_pending": self.max_pending,
        }
        self._timeout = check_timeout(timeout)
        self._reducer = Reducer(
            process_group, self._terms, settings, timeout=self._timeout, record=record
        )

    def _divisor(self, factor: float | None) -> float:
        """Return the number that sums are divided by.

        It is `factor`; if that is None, the number of ranks for "mean", and otherwise 1, also for
        the mean of leaves, whose number is known at the end of a step. Raises ValueError if
        `factor` is 0 or not finite, or if the reduction is not "sum".
        """
        if factor is None:
            is_mean = self._op == "mean" and self._order == "rank"
            return float(self.world_size) if is_mean else 1.0
        divisor = check_number("gradient_divide_factor", factor)
        if self._op != "sum":
            raise ValueError(f"gradient_divide_factor needs op='sum', got {self._op!r}")
        if not isfinite(divisor) or divisor == 0:
            raise ValueError(f"gradient_divide_factor must be finite and not 0, got {factor}")
        return divisor

    @property
    def process_group(self) -> Any:
        """The ranks."""
        return self._group

    @property
    def op(self) -> str:
        """The reduction over ranks: sum, mean, min or max."""
        return self._op

    @property
    def divisor(self) -> float:
        """Divisor of the sums; 1 for a mean with ``order="tree"``, whose leaves are not known."""
        return self._terms.divisor

    @property
    def order(self) -> str:
        """Order of the additions: rank or tree."""
        return self._order

    @property
    def timeout(self) -> float | None:
        """Timeout of each operation in seconds; None for the group's timeout."""
        return self._timeout

    @property
    def rank(self) -> int:
        """Number of this process in the group."""
        return int(self._group.rank)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self._group.world_size)

    def __repr__(self) -> str:
        order = "" if self._order == "rank" else f", order={self._order!r}"
        return f"FSDP(rank {self.rank} of {self.world_size}, op={self._op!r}{order})"


def _reduce_dtype(dtype: DType) -> str:
    """Return "float32", or "" for None; raise ValueError for any other dtype."""
    name = "" if dtype is None else dtype_text(dtype)
    if name not in ("", "float32"):
        raise ValueError(f"reduce_dtype must be float32 or None, got {name}")
    return name
