"""One bucket of gradients: the memory of each gradient, and the sums over a group."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from .. import _core
from .._common.arrays import is_torch
from .._common.backend import backend_named, backend_of
from ..collectives._arguments import dtype_name
from ._backend import GradientBackend
from ._gradient_ops import add, memory_of, on_host, packed, place, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._sharding_unit import FSDPShardingUnit

Segment: TypeAlias = tuple[Any, tuple[int, ...], Any]  # gradient, elements by rank, output
# a segment with the dtype and shape that the output must have
CheckedSegment: TypeAlias = tuple[Any, tuple[int, ...], Any, str, tuple[int, ...]]


class Terms(NamedTuple):
    """Reduction terms of gradients; equal on all ranks."""

    op: str = "sum"  # or "min" or "max"
    divisor: float = 1.0  # of the sums
    reduce_dtype: str = ""  # of the local gradients; empty: the dtype of the full ones
    nonfinite: str = "error"  # or "allow"
    accumulate: bool = False  # whether sums are added to the local gradients
    compression: str = ""  # dtype of the sent elements; empty: not compressed


class Entry:
    """A gradient, from its arrival until its shard is stored.

    `problem` is the reason why it cannot be reduced, for the error on all ranks, or empty.
    `on_failure` is called if the shard is not stored. `is_unused`: this rank did not use the
    parameter, and the gradient is zeros.
    """

    __slots__ = (
        "gradient",
        "is_plain",
        "is_unused",
        "nonfinite",
        "on_failure",
        "out",
        "problem",
        "replaces",
        "residual",
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
        is_unused: bool = False,
    ) -> None:
        self.unit = unit
        self.is_unused = is_unused
        self.replaces = True  # whether the sum replaced the local gradient
        self.residual: Any = None  # of compression, before an unused gradient is sent
        self.on_failure = on_failure
        self.out: Any = None
        self.nonfinite = 0  # non-finite elements in this rank's part of the sum
        # Fast path: the core checks a common gradient faster than Python.
        self.is_plain = not problem and _core.bucket_fits(gradient, unit.dtype, unit.shape, False)
        if self.is_plain:
            self.gradient = self.source = gradient
            self.problem = ""
        else:
            self.gradient = plain(gradient)
            self.source = None
            self.problem = problem or _find_problem(unit, self.gradient)

    @property
    def bytes(self) -> int:
        """Size of the full gradient in bytes."""
        return 0 if self.gradient is None else int(self.gradient.nbytes)

    def find_memory(self, terms: Terms) -> None:
        """Pack the gradient if necessary, and choose the memory of the sum."""
        if self.problem:
            return
        try:
            if not self.is_plain:
                self.source = packed(self.gradient)
            self.out = _output_memory(self.unit, self.gradient, terms)
            if terms.accumulate:
                _check_sum(self.unit.local_gradient, self.out)
            if terms.compression and not on_host(self.source):
                self.problem = (
                    f"compression of a gradient on {self.source.device}, not in main memory"
                )
        except Exception as error:  # all ranks raise it together
            self.problem = f"{type(error).__name__}: {error}"

    def segment(self) -> Segment:
        """Return the gradient, its element counts and its output, as the core expects them."""
        if self.is_plain:
            return self.source, self.unit.counts, self.out
        return memory_of(self.source), self.unit.counts, memory_of(self.out)

    def store(self, *, accumulate: bool) -> None:
        """Store or add the sum as the local gradient; free the full gradient."""
        unit = self.unit
        if accumulate and unit.local_gradient is not None:
            self.replaces = False
            add({unit.parameter_name: unit.local_gradient}, {unit.parameter_name: self.out})
        else:
            unit.local_gradient = self.out
        self.gradient = self.source = self.out = self.on_failure = None

    def undo_unused(self) -> None:
        """Leave no sum of a parameter that no rank used: earlier passes' sum, or None."""
        if self.replaces:
            self.unit.local_gradient = None
        if self.residual is not None:
            self.unit.residual()[:] = self.residual

    def fail(self) -> None:
        """Clear the local gradient, even of an earlier step; free the full gradient."""
        self.unit.local_gradient = None
        if self.on_failure is not None:
            self.on_failure()
        self.gradient = self.source = self.out = self.on_failure = None


class FullBucket(NamedTuple):
    """A bucket whose gradients have all arrived."""

    entries: list[Entry]
    terms: Terms
    since: float = 0.0  # when the last one arrived, by `time.perf_counter`; 0 if not recorded


# ---- the memory of one gradient ----


def _is_dense_on_cpu(gradient: Any) -> bool:
    """Return whether this is a dense CPU tensor, and not a subclass instance."""
    torch = sys.modules["torch"]
    return type(gradient) is torch.Tensor and gradient.is_cpu and gradient.layout is torch.strided


def _find_problem(unit: FSDPShardingUnit, gradient: Any) -> str:
    """Return why a gradient does not fit its unit, or an empty string."""
    like = unit.like  # comparing torch shapes and dtypes is faster than comparing names
    is_common = like is not None and type(gradient) is type(like) and _is_dense_on_cpu(gradient)
    if is_common and gradient.shape == like.shape and gradient.dtype is like.dtype:
        return ""
    if gradient is None:
        return "no gradient"
    if not is_torch(gradient) and not isinstance(gradient, np.ndarray):
        return f"the gradient is a {type(gradient).__name__}, not an array or tensor"
    if isinstance(gradient, np.ma.MaskedArray):
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
    """Return memory for the sum: the existing local gradient if it fits, else new memory."""
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
    """Raise ValueError if the sum `out` cannot be added to the local gradient."""
    if local is None:
        return
    for what, got, expected in (
        ("place", place(local), place(out)),
        ("shape", str(tuple(local.shape)), str(tuple(out.shape))),
        ("dtype", dtype_name(local), dtype_name(out)),
    ):
        if got != expected:
            raise ValueError(f"the local gradient to add to has {what} {got}, expected {expected}")
    if not is_torch(local) and not local.flags.writeable:
        raise ValueError("the local gradient to add to is read-only")


# ---- the sums of one bucket ----


class Reducer:
    """Sums buckets over one group, and keeps message buffers for the next bucket.

    The open reduction session holds `lock`. A `timeout` of None means the group's timeout.
    """

    def __init__(self, group: Any, timeout: float | None) -> None:
        self.group = group
        self.timeout = timeout
        self.lock = threading.Lock()
        self._place = int(group.world_size), int(group.rank)
        self._packed: tuple[list[int], int] | None = None  # sizes of the message in `_send`
        self.drop_buffers()

    def drop_buffers(self) -> None:
        """Free the message buffers; the next bucket allocates new ones."""
        self._send = self._receive = self._own = np.empty(0, np.uint8)
        self._packed = None

    def prepare(self, buckets: Sequence[FullBucket]) -> list[Any]:
        """Return core handles of the first bucket and of the following ones that need no copies.

        None replaces a bucket that the core cannot reduce: an entry has a problem, or is not
        in main memory. At most one bucket is copied at a time.
        """
        self._packed = None
        prepared: list[Any] = []
        for bucket in buckets:
            handle = self._prepare_bucket(bucket.entries, bucket.terms)
            if prepared and handle is None:
                break
            prepared.append(handle)
            if handle is None or not all(entry.is_plain for entry in bucket.entries):
                break
        return prepared

    def _prepare_bucket(self, entries: Sequence[Entry], terms: Terms) -> _core.Bucket | None:
        """Find memory for all entries; return the core's handle of the bucket, or None."""
        if not terms.accumulate and not terms.compression:
            handle = self._reuse_outputs(entries, terms)
            if handle is not None:
                return handle
        for entry in entries:
            entry.find_memory(terms)
        near = [e for e in entries if not e.problem and (e.is_plain or on_host(e.source))]
        segments = [entry.segment() for entry in near]
        try:
            handle = self._handle(segments, terms)
            return handle if len(near) == len(entries) else None
        except Exception:  # find the entry at fault: all ranks raise its error
            for entry, segment in zip(near, segments, strict=True):
                try:
                    self._handle([segment], terms)
                except Exception as error:
                    entry.problem = f"{type(error).__name__}: {error}"
            if not any(entry.problem for entry in near):
                raise
        return None

    def _reuse_outputs(self, entries: Sequence[Entry], terms: Terms) -> _core.Bucket | None:
        """Return the handle of a bucket of plain gradients that reuses local gradients as outputs.

        Returns None if a local gradient is absent or does not fit. Only the core checks them,
        which is faster than Python.
        """
        segments: list[CheckedSegment] = []
        for entry in entries:
            unit = entry.unit
            if not entry.is_plain or unit.local_gradient is None:
                return None
            name = terms.reduce_dtype or unit.dtype
            segments.append(
                (entry.source, unit.counts, unit.local_gradient, name, unit.local_shape)
            )
        try:
            handle = self._handle(segments, terms)
        except Exception:  # `_prepare_bucket` finds the entry at fault
            return None
        for entry, segment in zip(entries, segments, strict=True):
            entry.out = segment[2]
        return handle

    def _handle(self, segments: list[Segment] | list[CheckedSegment], terms: Terms) -> _core.Bucket:
        return _core.bucket(segments, *self._place, terms.op, terms.divisor)

    def pack(self, handle: _core.Bucket) -> tuple[list[int], int]:
        """Pack this rank's messages of a prepared bucket, which must be summed next.

        Returns the bytes for each rank, and the bytes that each other rank sends to this one.
        """
        sizes, mine = _core.bucket_sizes(handle, None)
        self._send = _ensure_size(self._send, sum(sizes))
        _core.bucket_pack(handle, None, None, self._send, None)
        self._packed = sizes, mine
        return self._packed

    def sum_bucket(self, bucket: FullBucket, handle: _core.Bucket | None) -> None:
        """Reduce a prepared bucket into its outputs, together with all ranks."""
        entries, terms, _ = bucket
        if handle is None:
            reduce_on_device = backend_named("torch", GradientBackend).reduce_on_device
            partials = [reduce_on_device(self.group, e, terms, self.timeout) for e in entries]
        elif terms.compression:
            partials = self._sum_compressed(handle, entries, terms.compression)
        elif hasattr(self.group, "_reduce_bucket"):
            text = f"{terms.op} of {len(entries)} arrays"
            partials = self.group._reduce_bucket(handle, text, self.timeout)
        else:
            self._exchange_parts(*self._packed or self.pack(handle))
            partials = _core.bucket_reduce(handle, None, None, self._receive)
        self._packed = None
        for entry, (_, nonfinite) in zip(entries, partials, strict=True):
            entry.nonfinite = nonfinite

    def _sum_compressed(
        self, handle: Any, entries: list[Entry], compression: str
    ) -> list[tuple[float, int]]:
        """Reduce gradients that are sent compressed."""
        sizes, mine = _core.bucket_sizes(handle, compression)
        self._send = _ensure_size(self._send, sum(sizes))
        self._own = _ensure_size(self._own, mine)
        residuals = tuple(entry.unit.residual() for entry in entries)
        for entry, residual in zip(entries, residuals, strict=True):
            entry.residual = residual.copy() if entry.is_unused else None
        _core.bucket_pack(handle, compression, residuals, self._send, self._own)
        self._exchange_parts(sizes, mine)
        return _core.bucket_reduce(handle, compression, self._own, self._receive)

    def _exchange_parts(self, sizes: list[int], mine: int) -> None:
        """Send each rank its packed part, and receive this rank's part from each of them."""
        world_size, rank = self._place
        expected = [mine] * world_size
        expected[rank] = 0
        self._receive = _ensure_size(self._receive, sum(expected))
        if world_size > 1:
            self.group.all_to_all(
                self._send[: sum(sizes)],
                out=self._receive[: sum(expected)],
                counts=sizes,
                out_counts=expected,
                timeout=self.timeout,
            )


def _ensure_size(buffer: Any, size: int) -> Any:
    """Return `buffer` if it has at least `size` bytes, else a new buffer."""
    return buffer if len(buffer) >= size else np.empty(size, np.uint8)
