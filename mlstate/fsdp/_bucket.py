"""A gradient in a bucket: its checks, zeros for a missing one, memory and storing of its part.

A sharding unit describes a parameter, and has this rank's part of its reduced gradient: the local
gradient. A bucket has the gradients of several units, which are reduced together.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from .. import _core
from .._common.arrays import is_masked, is_torch
from .._common.backend import backend_of
from ..collectives._arguments import dtype_name
from ._backend import GradientBackend
from ._gradient_ops import add, detached, location_of, memory_of, packed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._leaf_order import Node
    from ._sharding_unit import FSDPShardingUnit

# full gradient, number of elements in each rank's part, output for this rank's part
Segment: TypeAlias = tuple[Any, tuple[int, ...], Any]


class Terms(NamedTuple):
    """Reduction terms of gradients; equal on all ranks."""

    op: str = "sum"  # or "min" or "max"
    divisor: float = 1.0  # of the sums
    reduce_dtype: str = ""  # of the local gradients; empty: the dtype of the full ones
    nonfinite: str = "error"  # or "allow"
    accumulate: bool = False  # whether sums are added to the local gradients


class Entry:
    """A gradient, from its arrival until this rank's part of the sum is stored.

    `problem` is the reason why it cannot be reduced, for the error on all ranks, or empty.
    `on_failure` is called if the part is not stored. If the gradient is None, this rank did not
    use the parameter: then it is zeros with `allow_unused`, and otherwise `absence` is the problem.
    """

    __slots__ = (
        "fits",
        "gradient",
        "is_unused",
        "nodes",
        "nonfinite",
        "on_failure",
        "out",
        "problem",
        "replaces",
        "source",
        "unit",
    )

    def __init__(
        self,
        unit: FSDPShardingUnit,
        gradient: Any,
        problem: str = "",
        on_failure: Callable[[], None] | None = None,
        *,
        allow_unused: bool = False,
        absence: str = "",
    ) -> None:
        """Check a gradient of `unit`; the class describes the arguments.

        A fault becomes `problem` instead of an exception: the other ranks wait for this one.
        """
        self.unit = unit
        self.is_unused = gradient is None and not problem and allow_unused
        if self.is_unused:
            gradient = unit.zeros()
        elif gradient is None:
            problem = problem or absence
        self.replaces = True  # False: `store` added the sum to the local gradient
        self.on_failure = on_failure
        # with order="tree": arrays by node of the leaves to send, instead of a gradient to reduce
        self.nodes: dict[Node, Any] | None = None
        self.out: Any = None  # this rank's part of the sum; None before `find_memory`
        self.nonfinite = 0  # non-finite elements in this rank's part of the sum
        # Whether the core can read the gradient as it is. Fast path: the core checks common
        # gradients, which may be read-only, faster than Python.
        self.fits = not problem and _core.bucket_fits(gradient, unit.dtype, unit.shape, False)
        # `gradient`: as it was passed. `source`: the same values, packed for the core.
        if self.fits:
            self.gradient = self.source = gradient
            self.problem = ""
        else:
            self.gradient = detached(gradient)
            self.source = None
            self.problem = problem or _find_problem(unit, self.gradient)

    @property
    def bytes(self) -> int:
        """Size of the full gradient in bytes."""
        return 0 if self.gradient is None else int(self.gradient.nbytes)

    def find_memory(self, terms: Terms) -> None:
        """Set `source`, a packed copy if necessary, and `out`, the memory of this rank's part.

        An error becomes this entry's `problem`, which all ranks raise together. Does nothing if
        the entry has a problem already. `terms`: of the reduction.
        """
        if self.problem:
            return
        if terms.accumulate and self.unit.local_gradient is None and self.unit._is_lost:
            self.problem = (
                "an earlier error dropped the sum of this step: call clear_gradients() on every "
                "rank, and begin the step again"
            )
            return
        try:
            if not self.fits:
                self.source = packed(self.gradient)
            self.out = _output_memory(self.unit, self.gradient, terms)
            if terms.accumulate:
                _check_sum(self.unit.local_gradient, self.out)
        except Exception as error:  # all ranks raise it together
            self.problem = f"{type(error).__name__}: {error}"

    def segment(self) -> Segment:
        """Return the gradient, its element counts and its output, as the core expects them."""
        if self.fits:
            return self.source, self.unit.counts, self.out
        return memory_of(self.source), self.unit.counts, memory_of(self.out)

    def store(self, *, accumulate: bool) -> None:
        """Store this rank's part of the sum as the unit's local gradient; drop the full gradient.

        `accumulate`: add it to an existing local gradient instead.
        """
        unit = self.unit
        if accumulate and unit.local_gradient is not None:
            self.replaces = False
            add({unit.parameter_name: unit.local_gradient}, {unit.parameter_name: self.out})
        elif self.nodes is None:  # otherwise the sum is stored at the end of the step
            unit.local_gradient, unit._is_lost = self.out, False
        self._drop()

    def _drop(self) -> None:
        """Drop the gradient and its memory."""
        self.gradient = self.source = self.out = self.on_failure = None
        if self.nodes:
            self.nodes = {}

    def undo_unused(self) -> None:
        """Undo `store` for a parameter that no rank used, whose stored sum is zeros.

        The local gradient becomes None, or keeps the sum of earlier passes if `store` added to it.
        """
        if self.replaces:
            self.unit.local_gradient = None

    def fail(self) -> None:
        """Set the unit's local gradient to None, even one of an earlier pass, as it is out of date.

        No later pass of the step may begin a sum in its place (`find_memory`). Calls `on_failure`,
        and drops the full gradient. A second call has no further effect.
        """
        self.unit.local_gradient, self.unit._is_lost = None, True
        if self.on_failure is not None:
            self.on_failure()
        self._drop()


class FullBucket(NamedTuple):
    """A bucket whose gradients have all arrived."""

    entries: list[Entry]
    terms: Terms
    since: float = 0.0  # when the last gradient arrived, by `perf_counter`; 0: not recorded


# ---- the memory of one gradient ----


def _is_dense_on_cpu(gradient: Any) -> bool:
    """Return whether `gradient` is a dense CPU tensor of torch's own class, not of a subclass.

    Torch must be imported already.
    """
    torch = sys.modules["torch"]
    return type(gradient) is torch.Tensor and gradient.is_cpu and gradient.layout is torch.strided


def _find_problem(unit: FSDPShardingUnit, gradient: Any) -> str:
    """Return why `gradient` does not fit `unit`, as a text for the error, or "" if it fits."""
    like = unit.like  # comparing torch shapes and dtypes is faster than comparing names
    is_common = like is not None and type(gradient) is type(like) and _is_dense_on_cpu(gradient)
    if is_common and gradient.shape == like.shape and gradient.dtype is like.dtype:
        return ""
    if gradient is None:
        return "no gradient"
    if not is_torch(gradient) and not isinstance(gradient, np.ndarray):
        return f"the gradient is a {type(gradient).__name__}, not an array or tensor"
    if is_masked(gradient):
        return "the gradient is a MaskedArray, whose mask has no sum; pass gradient.filled(0)"
    shape = tuple(gradient.shape)
    if shape != unit.shape:
        return f"the gradient has shape {shape}, expected {unit.shape}"
    if dtype_name(gradient) != unit.dtype:
        return f"the gradient has dtype {dtype_name(gradient)}, expected {unit.dtype}"
    if isinstance(gradient, np.ndarray) or _is_dense_on_cpu(gradient):
        return ""
    reason = backend_of(gradient, GradientBackend).why_not_reduced(gradient)
    return reason and f"the gradient is {reason}"


def _output_memory(unit: FSDPShardingUnit, gradient: Any, terms: Terms) -> Any:
    """Return an array or tensor for this rank's part of the sum of `gradient`.

    It is the unit's local gradient, to be overwritten, if this fits and `terms` do not add to it.
    Otherwise it is new memory on the gradient's device.
    """
    name = terms.reduce_dtype or unit.dtype
    local = unit.local_gradient
    fits = (
        local is not None
        and not terms.accumulate
        and is_torch(local) == is_torch(gradient)
        and tuple(local.shape) == unit.local_shape
        and dtype_name(local) == name
    )
    if is_torch(gradient):
        if fits and local.is_contiguous() and local.device == gradient.device:
            return local.detach() if local.requires_grad else local
        import torch

        return gradient.new_empty(unit.local_shape, dtype=getattr(torch, name))
    if fits and local.flags.carray and local.dtype.isnative:  # packed, aligned, writeable
        return local
    dtype = gradient.dtype.newbyteorder("=") if name == unit.dtype else np.dtype(name)
    return np.empty(unit.local_shape, dtype)


def _check_sum(local: Any, out: Any) -> None:
    """Raise ValueError if the sum `out` cannot be added to the local gradient `local`.

    None as `local` always fits: the sum then becomes the local gradient.
    """
    if local is None:
        return
    for label, got, expected in (
        ("place", location_of(local), location_of(out)),
        ("shape", str(tuple(local.shape)), str(tuple(out.shape))),
        ("dtype", dtype_name(local), dtype_name(out)),
    ):
        if got != expected:
            raise ValueError(f"the local gradient to add to has {label} {got}, expected {expected}")
    if not is_torch(local) and not local.flags.writeable:
        raise ValueError("the local gradient to add to is read-only")
