"""`ReduceScatterOperation`: reduce and scatter one gradient, without `FSDP`, hooks or buckets."""

from __future__ import annotations

from typing import Any

from ..collectives import ReduceOp
from ._bucket import Entry
from ._config import FSDP
from ._sharding_unit import FSDPShardingUnit, bind_unit


class ReduceScatterOperation:
    """The reduce-scatter of one gradient.

    Parameters
    ----------
    group : ProcessGroup
        The ranks.
    shape : iterable of int
        Shape of the full gradient.
    dtype : dtype or str
        Dtype of the gradient.
    shard_index : int
        Index of the part that this rank keeps: its rank.
    op : {"sum", "mean", "min", "max"}, default "sum"
        The reduction over ranks.
    layout : {"flat", "rows"}, default "flat"
        See `FSDPShardingUnit`.

    Raises
    ------
    TypeError
        If an argument has a wrong type.
    ValueError
        If `shard_index` is not this rank, or another argument is invalid.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.collectives import SingleGroup
    >>> from mlstate.fsdp import ReduceScatterOperation
    >>> operation = ReduceScatterOperation(SingleGroup(), (2, 2), "float32", 0)
    >>> operation.reduce_scatter(np.ones((2, 2), "float32"))
    array([1., 1., 1., 1.], dtype=float32)
    """

    def __init__(
        self,
        group: object,
        shape: Any,
        dtype: object,
        shard_index: int,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        layout: str = "flat",
    ) -> None:
        """Prepare a reduction of one gradient (see the class); sends nothing to other ranks."""
        self._reducer = FSDP(group, op=op)._reducer
        self._unit = FSDPShardingUnit("gradient", shape, dtype, shard_index, layout=layout)
        bind_unit(self._unit, self._reducer.rank, self._reducer.world_size)
        self._is_closed = False

    def __enter__(self) -> ReduceScatterOperation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the operation's buffers; the group stays open. Later calls do nothing.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.fsdp import ReduceScatterOperation
        >>> with ReduceScatterOperation(SingleGroup(), (2,), "float32", 0) as operation:
        ...     operation.reduce_scatter(np.ones(2, "float32"))
        array([1., 1.], dtype=float32)
        """
        self._is_closed = True
        self._reducer.drop_buffers()

    def reduce_scatter(self, full_gradient: Any) -> Any:
        """Reduce the gradients of all ranks and return this rank's part.

        Parameters
        ----------
        full_gradient : array or torch.Tensor
            The full gradient, with the operation's shape and dtype. A non-contiguous one is
            copied.

        Returns
        -------
        array or torch.Tensor
            A new array or tensor, of the gradient's kind.

        Raises
        ------
        CollectiveError
            On every rank, if the gradient of a rank does not fit, or the result is not finite.
        GradientMismatchError
            On the rank whose gradient does not fit. A subclass of `CollectiveError` and
            `ValueError`.
        ValueError
            If the operation is closed.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.fsdp import ReduceScatterOperation
        >>> operation = ReduceScatterOperation(SingleGroup(), (2,), "int64", 0, "max")
        >>> operation.reduce_scatter(np.array([1, 2]))
        array([1, 2])
        """
        if self._is_closed:
            raise ValueError("this ReduceScatterOperation is closed; make another one")
        self._unit.local_gradient = None  # so that the result is new memory
        self._reducer.reduce_now("reduce_scatter", [Entry(self._unit, full_gradient)])
        part, self._unit.local_gradient = self._unit.local_gradient, None
        return part
