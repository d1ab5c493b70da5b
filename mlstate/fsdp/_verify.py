"""`verify_gradients`: compare scattered gradients with full ones or with sums of all ranks."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _core
from .._common.arrays import is_torch, refuse_masked
from .._common.dtypes import as_numbers
from .._common.report import Shown, Table
from .._common.text import names_hint
from ._gradient_ops import packed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .._types import Array
    from ._config import FSDP
    from ._sharding_unit import FSDPShardingUnit

_BLOCK = 1 << 20  # elements that are compared at a time
# Relative rounding error of an element, by dtype; others are float64 or exact.
_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


class Mismatch(NamedTuple):
    """A gradient that differs from its expected value.

    Attributes
    ----------
    parameter : str
        Name of the parameter.
    rank : int
        Rank that keeps the part.
    element : int or None
        Index in the part, from 0; None if the part is absent, or only its sum is compared.
    expected, actual : number or str
        The expected and the actual value, or a description of them.
    """

    parameter: str
    rank: int
    element: int | None
    expected: complex | str
    actual: complex | str


class GradientReport(Shown):
    """Result of a verification; true if all gradients match.

    Attributes
    ----------
    mismatches : list of Mismatch
        The first differing element of each gradient that differs.
    compared : int
        Number of gradients that were compared.
    atol : float
        Largest difference of an element.

    Examples
    --------
    >>> from mlstate.fsdp.records import GradientReport
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

    def _table(self) -> Table:
        columns = ["parameter", "rank", "element [n]", "expected", "actual"]
        return Table(self._title(), columns, self.mismatches)

    def __repr__(self) -> str:
        return str(self)


def _iterate_blocks(array: Array) -> Iterator[Any]:
    """Yield the elements as flat NumPy arrays of at most `_BLOCK` elements.

    Floats become float64; integers, bool and complex numbers are unchanged.
    """
    flat = packed(array).reshape(-1)
    for start in range(0, len(flat), _BLOCK):
        block = flat[start : start + _BLOCK]
        if is_torch(block):
            host_block = block.cpu().resolve_conj().resolve_neg()
            is_float = host_block.dtype.is_floating_point
            yield (host_block.double() if is_float else host_block).numpy()
        elif (block := as_numbers(block)).dtype.kind in "biuc":
            yield block
        else:
            yield block.astype(np.float64)


def _find_differences(expected: Any, actual: Any, atol: float) -> Any:
    """Return a mask of the elements that differ by more than `atol`; NaN always differs.

    `expected` and `actual`: flat arrays of one length. Integers are compared exactly if `atol` is
    below 1.
    """
    # equal elements first: the difference of two equal infinities is NaN
    different = ~(expected == actual)
    wide = np.complex128 if "c" in (expected.dtype.kind, actual.dtype.kind) else np.float64
    positions = different.nonzero()[0]
    with np.errstate(invalid="ignore"):
        distances = np.abs(expected[positions].astype(wide) - actual[positions].astype(wide))
    is_exact = expected.dtype.kind in "biu" and atol < 1  # float64 lacks 2**53 + 1 and others
    different[positions] = True if is_exact else ~(distances <= atol)
    return different


def _find_mismatch(unit: FSDPShardingUnit, full: Any, atol: float) -> Mismatch | None:
    """Return the first element where a unit's gradient differs from its part of `full`, or None.

    `full`: the expected gradient of the whole parameter. `atol`: absolute tolerance. A missing
    gradient or a wrong shape is a mismatch too; other objects than arrays raise TypeError.
    """
    name, rank, local = unit.parameter_name, unit.shard_index, unit.local_gradient
    if local is None:
        return Mismatch(name, rank, None, "a gradient", "none")
    for label, array in (("local", local), ("full", full)):
        if not hasattr(array, "shape"):
            raise TypeError(
                f"{name}: the {label} gradient is a {type(array).__name__}, not an array"
            )
        refuse_masked(name, array)
    if tuple(full.shape) != unit.shape:
        return Mismatch(name, rank, None, str(unit.shape), f"full gradient of {tuple(full.shape)}")
    part = unit.layout.take(full.detach() if is_torch(full) else full, rank)
    if tuple(local.shape) != tuple(part.shape):
        return Mismatch(name, rank, None, str(tuple(part.shape)), str(tuple(local.shape)))
    start = 0  # index in the part of the block's first element
    for expected, actual in zip(_iterate_blocks(part), _iterate_blocks(local), strict=True):
        wrong = _find_differences(expected, actual, atol)
        if wrong.any():
            i = int(wrong.argmax())
            return Mismatch(name, rank, start + i, expected[i].item(), actual[i].item())
        start += len(expected)
    return None


def compare(
    units: Mapping[str, FSDPShardingUnit], gradients: Mapping[str, Array], atol: float
) -> GradientReport:
    """Compare local gradients with the matching parts of reduced full gradients.

    `gradients`: full gradients by parameter; units without one are not compared. `atol`: largest
    difference of an element. Returns the report, with the first differing element of each part.
    Raises ValueError if a gradient has no unit while a unit has none: a name is misspelt.
    """
    _check_names(units, gradients)
    names = [name for name in units if gradients.get(name) is not None]
    mismatches = (_find_mismatch(units[name], gradients[name], atol) for name in names)
    return GradientReport([m for m in mismatches if m is not None], len(names), atol)


def _check_names(units: Mapping[str, object], gradients: Mapping[str, object]) -> None:
    """Raise ValueError if both a gradient has no unit and a unit has no gradient.

    One of them alone is a choice of the parameters to compare.
    """
    unknown = [name for name in gradients if name not in units and gradients[name] is not None]
    missing = [name for name in units if name not in gradients]
    if unknown and missing:
        raise ValueError(
            f"full_gradients[{unknown[0]!r}] has no sharding unit, and the unit {missing[0]!r} no "
            f"gradient{names_hint(str(unknown[0]), missing, listed=False)}"
        )


# ---- without reduced full gradients ----


def _ams_sketch(array: Any, start: int) -> tuple[float, float]:
    """Return the sum of elements with pseudo-random signs (an AMS sketch), and their L2 norm.

    `array`: flat and packed. `start`: index of its first element in the flattened parameter, which
    determines the signs; a part has the same signs on every rank.
    """
    host_array = array.cpu() if is_torch(array) else array
    ((squares, _),) = _core.norm_partials(["gradient"], [host_array])
    signed_sum, _ = _core.sketch(host_array, start, 0)  # seed 0
    return signed_sum, sqrt(squares)


def _describe_gradient(unit: FSDPShardingUnit, full: Any) -> dict[str, Any]:
    """Return this rank's message about a parameter, for `_find_wrong_sum`.

    "local" is the sketch of its local gradient. "parts" has the sketches of each rank's part of
    `full`, the unreduced full gradient of this rank. "wrong" is why both are missing, or "".
    """
    starts = list(accumulate(unit.counts, initial=0))
    wrong = ""
    facts: dict[str, Any] = {"fact": unit.fact, "dtype": unit.dtype, "counts": unit.counts}
    try:
        wrong = _find_obstacle(unit, full)
        if not wrong:
            flat = packed(full).reshape(-1)
            facts["parts"] = [
                _ams_sketch(flat[start:end], start) for start, end in pairwise(starts)
            ]
            local = packed(unit.local_gradient).reshape(-1)
            facts["local"] = _ams_sketch(local, starts[unit.shard_index])
    except Exception as error:  # do not raise: the other ranks wait for this
        wrong = f"{type(error).__name__}: {error}"
    return facts | {"wrong": wrong}


def _find_obstacle(unit: FSDPShardingUnit, full: Array) -> str:
    """Return why a unit's gradients cannot be compared, or "".

    `full`: this rank's unreduced gradient of the whole parameter.
    """
    for label, array, shape in (
        ("local", unit.local_gradient, unit.local_shape),
        ("full", full, unit.shape),
    ):
        if array is None:
            return f"no {label} gradient"
        refuse_masked(unit.parameter_name, array)
        if tuple(array.shape) != shape:
            return f"a {label} gradient of {tuple(array.shape)}"
    return ""


def _rounding_bound(world: int, dtype: str, count: int, norms: float, atol: float) -> float:
    """Return the largest difference of two sketches that rounding and `atol` together explain.

    A sketch is the sum of a part's elements with pseudo-random signs (`_ams_sketch`). `world`:
    number of ranks. `dtype`: of the gradients. `count`: elements of the part. `norms`: sum of the
    L2 norms of all summands. `atol`: tolerance of each element. Rounding errors of elements have
    random signs, so their sum grows with the square root of their number.
    """
    wide = 2.0**-24 if dtype in _ROUNDING else 2.0**-53
    # one rounding of the result to `dtype`, and one for each rank's summand in the wider type
    rounding = _ROUNDING.get(dtype, 0.0) + world * wide
    # the factors 10 and 6 are large, so that rounding alone is very unlikely to exceed the bound
    return 10 * rounding * norms + atol * min(count, 6 * sqrt(count))


def compare_sums(
    fsdp: FSDP, units: Mapping[str, FSDPShardingUnit], gradients: Mapping[str, Any], atol: float
) -> GradientReport:
    """Compare local gradients with all ranks' unreduced ones, by one number for each part.

    The number is an AMS sketch: the sum of the elements, each with a pseudo-random sign that its
    index determines. So ranks exchange no gradients, and errors of several elements rarely cancel.
    All ranks must call this; with one `atol` they get equal reports. `gradients`: this rank's
    unreduced full gradients by parameter. `atol`: absolute tolerance of an element. Raises
    ValueError for minima and maxima.
    """
    if fsdp.op not in ("sum", "mean"):
        raise ValueError(f"unreduced= needs op='sum' or 'mean', got op={fsdp.op!r}")
    text = json.dumps(
        {name: _describe_gradient(units[name], gradients.get(name)) for name in units}
    )
    texts = fsdp.process_group.gather_bytes(text.encode(), timeout=fsdp.timeout)
    messages = [json.loads(data) for data in texts]  # by rank, facts by parameter
    names = sorted({name for message in messages for name in message})
    mismatches = (
        _find_wrong_sum(name, [message.get(name) for message in messages], fsdp.divisor, atol)
        for name in names
    )
    return GradientReport([m for m in mismatches if m is not None], len(names), atol)


def _find_wrong_sum(
    name: str, rank_facts: list[Any], divisor: float, atol: float
) -> Mismatch | None:
    """Return the first rank whose part of one parameter has a wrong sum, or None.

    `rank_facts`: by rank, its message of `_describe_gradient` (None: it has no unit). `divisor`: of
    the sums. `atol`: absolute tolerance of an element. A missing unit, another fact, or a rank
    without gradients is a mismatch too.
    """
    for rank, facts in enumerate(rank_facts):
        if facts is None:
            return Mismatch(name, rank, None, "a sharding unit", "none")
        if facts["fact"] != rank_facts[0]["fact"]:
            return Mismatch(name, rank, None, rank_facts[0]["fact"], facts["fact"])
    for rank, facts in enumerate(rank_facts):
        if facts["wrong"]:
            return Mismatch(name, rank, None, "gradients that can be compared", facts["wrong"])
    for rank, facts in enumerate(rank_facts):
        # sketch and norm of this rank's part, in the gradient of each rank
        parts = [sender_facts["parts"][rank] for sender_facts in rank_facts]
        expected = sum(signed_sum for signed_sum, _ in parts) / divisor
        actual, local_norm = facts["local"]
        norms = local_norm + sum(norm for _, norm in parts) / abs(divisor)
        difference = abs(expected - actual)
        slack = _rounding_bound(len(rank_facts), facts["dtype"], facts["counts"][rank], norms, atol)
        if not (isfinite(difference) and difference <= slack):
            return Mismatch(name, rank, None, f"sum {expected:g}", f"sum {actual:g}")
    return None
