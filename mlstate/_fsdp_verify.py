"""Whether scattered gradients are what they should be; public through `mlstate.fsdp`."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import _core
from ._arrays import is_torch
from ._gradients import packed
from ._text import table_html, table_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ._fsdp import FSDP
    from ._fsdp_unit import FSDPShardingUnit

_BLOCK = 1 << 20  # elements that are compared at a time
_SHOWN = 20
# What a sum of that dtype may be off by, relative to its elements.
_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22, "float64": 2.0**-50}


class Mismatch(NamedTuple):
    """A gradient that is not what it should be.

    Attributes
    ----------
    parameter : str
        Whose gradient.
    rank : int
        Whose part.
    element : int or None
        Its place in the part, from 0; None where the part is absent, or only its sum is known.
    expected, actual : float or str
        What should be there, and what is.
    """

    parameter: str
    rank: int
    element: int | None
    expected: float | str
    actual: float | str


class GradientReport:
    """What a verification found: true where all is well.

    Attributes
    ----------
    mismatches : list of Mismatch
        The first differing element of each gradient that is wrong.
    compared : int
        How many gradients were compared.
    atol : float
        How much elements may differ.

    Examples
    --------
    >>> from mlstate.fsdp import GradientReport
    >>> bool(GradientReport([], 2, 1e-5))
    True
    """

    def __init__(self, mismatches: list[Mismatch], compared: int, atol: float) -> None:
        self.mismatches = mismatches
        self.compared = compared
        self.atol = atol

    def __bool__(self) -> bool:
        return not self.mismatches

    def _title(self) -> str:
        wrong = len(self.mismatches)
        if not wrong:
            return f"{self.compared} gradients are well, to {self.atol:g}"
        verb = "differs" if wrong == 1 else "differ"
        return f"{wrong} of {self.compared} gradients {verb} by more than {self.atol:g}"

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        headers = ["parameter", "rank", "element", "expected", "actual"]
        rows = [
            [m.parameter, str(m.rank), f"{m.element:,}" if m.element is not None else ""]
            for m in self.mismatches
        ]
        for row, m in zip(rows, self.mismatches, strict=True):
            row += [str(m.expected), str(m.actual)]
        return headers, rows

    def __repr__(self) -> str:
        headers, rows = self._rows()
        return f"{self._title()}\n{table_text(headers, rows, _SHOWN)}" if rows else self._title()

    def _repr_html_(self) -> str:
        return table_html(self._title(), *self._rows())


def _flat_doubles(array: Any) -> Iterator[Any]:
    """Give the elements as float64, block by block."""
    flat = packed(array).reshape(-1)
    for start in range(0, len(flat), _BLOCK):
        block = flat[start : start + _BLOCK]
        yield block.cpu().double().numpy() if is_torch(block) else block.astype(np.float64)


def _part(unit: FSDPShardingUnit, full: Any) -> Any:
    return unit.layout.take(full.detach() if is_torch(full) else full, unit.shard_index)


def _first_difference(unit: FSDPShardingUnit, full: Any, atol: float) -> Mismatch | None:
    name, rank, local = unit.parameter_name, unit.shard_index, unit.local_gradient
    if local is None:
        return Mismatch(name, rank, None, "a gradient", "none")
    if tuple(full.shape) != unit.shape:
        return Mismatch(name, rank, None, str(unit.shape), f"full gradient of {tuple(full.shape)}")
    part = _part(unit, full)
    if tuple(local.shape) != tuple(part.shape):
        return Mismatch(name, rank, None, str(tuple(part.shape)), str(tuple(local.shape)))
    at = 0
    for expected, actual in zip(_flat_doubles(part), _flat_doubles(local), strict=True):
        # equal infinities differ by NaN; NaN is never well
        wrong = ~((np.abs(expected - actual) <= atol) | (expected == actual))
        if wrong.any():
            i = int(wrong.argmax())
            return Mismatch(name, rank, at + i, float(expected[i]), float(actual[i]))
        at += len(expected)
    return None


def compare(
    units: Mapping[str, FSDPShardingUnit], gradients: Mapping[str, Any], atol: float
) -> GradientReport:
    """Compare local gradients with the parts of reduced full ones."""
    names = [name for name in units if gradients.get(name) is not None]
    found = (_first_difference(units[name], gradients[name], atol) for name in names)
    return GradientReport([m for m in found if m is not None], len(names), atol)


# ---- without any full gradient that is reduced ----


def _sketches(unit: FSDPShardingUnit, full: Any) -> list[tuple[float, float]]:
    """Sketch each rank's part of this rank's own gradient."""
    flat = packed(full).reshape(-1)
    flat = flat.cpu() if is_torch(flat) else flat
    ends = accumulate(unit.counts, initial=0)
    return [_core.sketch(flat[start:end], start, 0) for start, end in pairwise(ends)]


def _told(unit: FSDPShardingUnit, full: Any) -> dict[str, Any]:
    """Say what a rank knows of one parameter."""
    start = sum(unit.counts[: unit.shard_index])
    local = unit.local_gradient
    if local is not None:
        flat = packed(local).reshape(-1)
        local = _core.sketch(flat.cpu() if is_torch(flat) else flat, start, 0)
    parts = None
    if full is not None and tuple(full.shape) == unit.shape:
        parts = _sketches(unit, full)
    return {"local": local, "parts": parts}


def compare_sums(
    fsdp: FSDP, units: Mapping[str, FSDPShardingUnit], gradients: Mapping[str, Any], atol: float
) -> GradientReport:
    """Compare sums of the parts with sums of what all ranks had for them."""
    names = sorted(units)
    text = json.dumps({name: _told(units[name], gradients.get(name)) for name in names})
    told = [json.loads(t) for t in fsdp.process_group.gather_bytes(text.encode())]
    mismatches = []
    for name in names:
        for rank in range(fsdp.world_size):
            found = _wrong_sum(fsdp, units[name], [of.get(name) for of in told], rank, atol)
            if found is not None:
                mismatches.append(found)
                break
    return GradientReport(mismatches, len(names), atol)


def _wrong_sum(
    fsdp: FSDP, unit: FSDPShardingUnit, told: list[Any], rank: int, atol: float
) -> Mismatch | None:
    """Compare one rank's part with what all had for it."""
    name = unit.parameter_name
    for of, known in enumerate(told):
        if known is None or known["parts"] is None:
            return Mismatch(name, of, None, f"a full gradient of {unit.shape}", "none")
    if told[rank]["local"] is None:
        return Mismatch(name, rank, None, "a gradient", "none")
    divisor = fsdp.terms(unit).divisor
    expected = sum(known["parts"][rank][0] for known in told) / divisor
    magnitude = sum(known["parts"][rank][1] for known in told) / abs(divisor)
    actual, size = told[rank]["local"]
    slack = _EPSILON.get(unit.dtype, 0.0) * (magnitude + size) + atol * unit.counts[rank]
    difference = abs(expected - actual)
    if isfinite(difference) and difference <= min(slack, inf):
        return None
    return Mismatch(name, rank, None, f"sum {expected:g}", f"sum {actual:g}")
