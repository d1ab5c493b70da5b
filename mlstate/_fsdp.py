"""Who reduces gradients with whom, and how; public through `mlstate.fsdp`."""

from __future__ import annotations

import threading
from math import isfinite
from operator import index
from typing import TYPE_CHECKING, Any

from ._collective_args import check_group, check_timeout, failed
from ._fsdp_reduce import Entry, Event, Reducer, Terms
from ._fsdp_unit import FSDPShardingUnit, dtype_text
from ._turns import Turns
from .collectives import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class FSDP:
    """The ranks that share the gradients of a model, and how they reduce them.

    Parameters
    ----------
    process_group : ProcessGroup
        The ranks; `mlstate.collectives` and `mlstate.integrations` have engines.
    op : {"sum", "mean", "min", "max"}, default "sum"
        How gradients of the ranks become one.
    gradient_divide_factor : float, optional
        What sums are divided by, in float32 or wider and before they are rounded. Default: 1,
        and the number of ranks for ``"mean"``.
    reduce_dtype : {"float32"}, optional
        Keep sums of 16- and 8-bit floats in float32, in which they are made. Default: round
        them once, to the parameter's dtype.
    bucket_bytes : int, default 25 MiB
        Gradients are reduced together until there are so many bytes of them; 0 reduces each by
        itself. Sums have the same bits whatever it is.
    nonfinite : {"error", "allow"}, default "error"
        Whether NaN and infinity in a sum are an error, on every rank. Allow them where a
        gradient scaler looks for them.
    allow_unused : bool, default False
        Take parameters without gradients as if these were zero.
    compression : {"float16", "bfloat16", "int8"}, optional
        Let float32 gradients travel as these, ``"int8"`` with a scale for each 256 elements.
        What is lost of an element is added to it in the next step (error feedback), for
        which each unit keeps a full array of float32 (`FSDPShardingUnit.residual`). For
        connections that are slower than memory; sums of float32 only.
    timeout : float, optional
        Seconds for each operation. Default: the group's own.
    record : bool, default False
        Note when each gradient and each bucket came and went, for
        `FSDPBackwardHook.report`.

    Raises
    ------
    TypeError
        `process_group` is none, or `bucket_bytes` no int.
    ValueError
        An argument makes no sense.

    Notes
    -----
    All ranks must pass the same; before each bucket they compare 64 bytes that stand for what
    they are about to reduce and how, so that another shape, dtype, order or setting on one rank
    is an error on all, which names it.

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
        bucket_bytes: int = 25 << 20,
        nonfinite: str = "error",
        allow_unused: bool = False,
        compression: str | None = None,
        timeout: float | None = None,
        record: bool = False,
    ) -> None:
        check_group(process_group)
        self._group = process_group
        self._op = str(ReduceOp(op))
        try:
            self.bucket_bytes = index(bucket_bytes)
        except TypeError:
            raise TypeError(f"bucket_bytes must be an int, got {bucket_bytes!r}") from None
        if self.bucket_bytes < 0:
            raise ValueError(f"bucket_bytes must be 0 or more, got {bucket_bytes}")
        if nonfinite not in ("error", "allow"):
            raise ValueError(f"nonfinite must be 'error' or 'allow', got {nonfinite!r}")
        if compression not in (None, "float16", "bfloat16", "int8"):
            raise ValueError(
                f"compression must be 'float16', 'bfloat16', 'int8' or None, got {compression!r}"
            )
        if compression and self._op not in ("sum", "mean"):
            raise ValueError(f"compression goes with sums and means, not with op={self._op!r}")
        self.allow_unused = bool(allow_unused)
        self._terms = Terms(
            op="sum" if self._op == "mean" else self._op,
            divisor=self._divisor(gradient_divide_factor),
            reduce_dtype=_reduce_dtype(reduce_dtype),
            nonfinite=nonfinite,
            compression=compression or "",
        )
        self._known_terms: dict[tuple[str, bool], Terms] = {}  # by dtype, and accumulate
        settings = {
            "op": self._op,
            "reduce_dtype": self._terms.reduce_dtype or None,
            "bucket_bytes": self.bucket_bytes,
            "nonfinite": nonfinite,
            "allow_unused": self.allow_unused,
            "compression": compression,
        }
        self._timeout = check_timeout(timeout)
        self._reducer = Reducer(process_group, self._timeout, settings)
        self._turns = Turns("mlstate-fsdp", process_group.rank)
        self._run = threading.Lock()  # held from the first bucket of a run to its end
        if record:
            self._reducer.events = []

    def _divisor(self, factor: float | None) -> float:
        if factor is None:
            return float(self.world_size) if self._op == "mean" else 1.0
        divisor = float(factor)
        if self._op != "sum":
            raise ValueError(f"gradient_divide_factor goes with op='sum', not with {self._op!r}")
        if not isfinite(divisor) or divisor == 0:
            raise ValueError(f"gradient_divide_factor must be finite and not 0, got {factor}")
        return divisor

    @property
    def process_group(self) -> Any:
        """The ranks."""
        return self._group

    @property
    def op(self) -> str:
        """How gradients become one: sum, mean, min or max."""
        return self._op

    @property
    def divisor(self) -> float:
        """What sums are divided by."""
        return self._terms.divisor

    @property
    def timeout(self) -> float | None:
        """Seconds for each operation; None for the group's own."""
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
        return f"FSDP(rank {self.rank} of {self.world_size}, op={self._op!r})"

    # ---- what hooks and operations are made of ----

    def terms(self, unit: FSDPShardingUnit, *, accumulate: bool = False) -> Terms:
        """How the gradient of a unit is reduced."""
        known = self._known_terms.get((unit.dtype, accumulate))
        if known is None:
            known = self._known_terms[unit.dtype, accumulate] = self._terms._replace(
                accumulate=accumulate,
                reduce_dtype=self._terms.reduce_dtype if _is_narrow(unit.dtype) else "",
                compression=self._terms.compression if unit.dtype == "float32" else "",
            )
        return known

    def bind(self, unit: FSDPShardingUnit) -> None:
        """Check that a unit belongs to this rank of this group."""
        if not isinstance(unit, FSDPShardingUnit):
            raise TypeError(f"a unit must be an FSDPShardingUnit, got {type(unit).__name__}")
        unit.bind(self.world_size)
        if unit.shard_index != self.rank:
            raise ValueError(
                f"{unit.parameter_name}: rank {self.rank} keeps shard {self.rank} of this group, "
                f"and the unit says {unit.shard_index}"
            )

    def buckets(self, units: Iterable[FSDPShardingUnit]) -> Iterator[list[FSDPShardingUnit]]:
        """Divide units, in their order, into what is reduced together."""
        bucket: list[FSDPShardingUnit] = []
        size = 0
        for unit in units:
            if bucket and (size >= self.bucket_bytes or self._differ(unit, bucket[0])):
                yield bucket
                bucket, size = [], 0
            bucket.append(unit)
            size += unit.full_bytes
        if bucket:
            yield bucket

    def _differ(self, one: FSDPShardingUnit, other: FSDPShardingUnit) -> bool:
        """Whether two gradients are reduced in other ways."""
        return one.dtype != other.dtype and self.terms(one) != self.terms(other)

    def entry(
        self,
        unit: FSDPShardingUnit,
        gradient: Any,
        why: str = "",
        settled: Callable[[bool], None] | None = None,
    ) -> Entry:
        """Make the entry of a gradient; one that is missing is zero where that is allowed."""
        if gradient is None and self.allow_unused and not why:
            gradient = unit.zeros()
        return Entry(unit, gradient, why, settled)

    def begin(self) -> None:
        """Start a run of buckets; another one must not be under way."""
        if not self._run.acquire(blocking=False):
            raise failed(
                "reduce_scatter",
                self.rank,
                "another reduction of this FSDP is under way; wait for it, or let its backward "
                "pass end",
            )
        if self._reducer.events is not None:
            self._reducer.events = []

    def reduce(self, entries: list[Entry], *, accumulate: bool = False) -> None:
        """Reduce the gradients of a run in buckets, one after the other."""
        rest = entries
        while rest:
            bucket = self._first_bucket(rest)
            after = rest[len(bucket) :]
            agreed = self._bucket(bucket, accumulate, 0.0, after)
            rest = after if agreed is None else agreed

    def reduce_later(self, entries: list[Entry], *, accumulate: bool, ready: float) -> Any:
        """Let the thread of this object reduce one bucket of a run; return its `Work`."""

        def task() -> None:
            rest: list[Entry] | None = entries
            while rest:
                rest = self._bucket(rest, accumulate, ready, [])

        return self._turns.run("reduce_scatter", task, async_op=True)

    def _bucket(
        self, entries: list[Entry], accumulate: bool, ready: float, rest: list[Entry]
    ) -> list[Entry] | None:
        terms = self.terms(entries[0].unit, accumulate=accumulate)
        return self._reducer.reduce(entries, terms, ready, rest)

    def _first_bucket(self, entries: list[Entry]) -> list[Entry]:
        return entries[: len(next(self.buckets(entry.unit for entry in entries)))]

    def finish(self, operation: str) -> dict[str, float]:
        """End the run, and raise what failed in it."""
        squares: dict[str, float] = self._turns.run(
            operation, lambda: self._reducer.finish(operation)
        )
        return squares

    @property
    def events(self) -> list[Event] | None:
        """The buckets of the run that is under way, or was the last; None if not recorded."""
        return self._reducer.events

    def end(self) -> None:
        """Let another run begin; every `begin` wants one, whatever happened."""
        self._reducer.begin()
        self._run.release()


def _reduce_dtype(dtype: Any) -> str:
    name = "" if dtype is None else dtype_text(dtype)
    if name not in ("", "float32"):
        raise ValueError(f"reduce_dtype must be float32 or None, got {name}")
    return name


def _is_narrow(dtype: str) -> bool:
    return dtype in ("float16", "bfloat16") or dtype.startswith("float8")
