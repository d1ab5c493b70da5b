"""One reduce-scatter, all at once, and what is checked before it; public through `mlstate.fsdp`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._arrays import is_torch
from ._collective_args import dtype_name
from ._fsdp import FSDP
from ._fsdp_unit import FSDPShardingUnit
from ._set_module import set_module
from .collectives import ReduceOp
from .errors import CompatibilityError


def is_empty(name: str, gradients: Any) -> bool:
    """Whether there are no gradients; refuse what is no dict."""
    if gradients is None:
        return True
    if not hasattr(gradients, "items"):
        raise TypeError(f"{name} must be a dict of gradients, got {type(gradients).__name__}")
    return not gradients


@set_module("mlstate.fsdp")
class ReduceScatterOperation:
    """The reduce-scatter of one gradient.

    Parameters
    ----------
    group : ProcessGroup
        The ranks.
    shape : iterable of int
        Of the full gradient.
    dtype : dtype or str
        Of the gradient.
    shard_index : int
        Which part this rank keeps: its rank.
    op : {"sum", "mean", "min", "max"}, default "sum"
        How gradients become one.
    layout : {"flat", "rows"}, default "flat"
        As for `FSDPShardingUnit`.

    Raises
    ------
    ValueError
        The shard is not that of this rank, or an argument makes no sense.

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
        group: Any,
        shape: Any,
        dtype: Any,
        shard_index: int,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        layout: str = "flat",
    ) -> None:
        self._runs = FSDP(group, op=op)._runs
        self._unit = FSDPShardingUnit("gradient", shape, dtype, shard_index, layout=layout)
        self._runs.bind(self._unit)
        self._is_closed = False

    def __enter__(self) -> ReduceScatterOperation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the operation's buffers; the group stays open. Closing again does nothing.

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
        self._runs.drop_buffers()

    def reduce_scatter(self, full_gradient: Any) -> Any:
        """Reduce the gradients of all ranks, and return this rank's part.

        Parameters
        ----------
        full_gradient : array or torch.Tensor
            Of the operation's shape and dtype. One that is not contiguous is copied.

        Returns
        -------
        array or torch.Tensor
            New, of the kind of the gradient.

        Raises
        ------
        CollectiveError
            On every rank, where one of them passes what does not fit, or what is not finite.
        ValueError
            The operation is closed.

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
        self._unit.local_gradient = None
        self._runs.reduce_now("reduce_scatter", [self._runs.entry(self._unit, full_gradient)])
        part, self._unit.local_gradient = self._unit.local_gradient, None
        return part


def check_local(unit: FSDPShardingUnit, gradient: Any) -> None:
    """Refuse a part that does not go with the local gradient that is there, or is to be."""
    there = unit.local_gradient
    if not is_torch(gradient) and not isinstance(gradient, np.ndarray | np.generic):
        raise TypeError(
            f"{unit.parameter_name}: the new gradient is a {type(gradient).__name__}, not an "
            "array or tensor"
        )
    shape = unit.local_shape if there is None else tuple(there.shape)
    dtype = dtype_name(gradient) if there is None else dtype_name(there)
    for what, got, expected in (
        ("shape", str(tuple(gradient.shape)), str(shape)),
        ("dtype", dtype_name(gradient), dtype),
    ):
        if got != expected:
            raise _misfit(unit.parameter_name, what, got, expected)


def _misfit(name: str, what: str, got: str, expected: str) -> CompatibilityError:
    error = CompatibilityError(f"{name}: the new gradient has {what} {got}, expected {expected}")
    error.name, error.got, error.expected = name, got, expected
    return error
