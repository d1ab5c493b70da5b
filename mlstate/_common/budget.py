"""Sizes and budgets that users pass: bytes, "6GiB", a fraction of a total; shown in errors."""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .. import _core
from .arguments import FLAG, check_int

if TYPE_CHECKING:
    from collections.abc import Iterator

MemorySize: TypeAlias = int | float | str

_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS[f"{_letter}iB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power
_NAMES = {unit.lower(): unit for unit in _UNITS}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*", re.ASCII)
_BYTES = re.compile(r"\b(budget of|is) ([0-9]+)(?: bytes)?")
_DIGITS = 4  # significant digits of a number in messages


class Budget(NamedTuple):
    """A number of bytes, rounded down, and the unit in which messages show it."""

    nbytes: int
    unit_bytes: int  # 0 for plain bytes; the whole for a fraction of it
    unit_name: str  # "GiB", or "of all memory" for a fraction
    given: str  # the number as the caller wrote it
    base: int = 0  # bytes that a fraction is added to

    def text(self, nbytes: int) -> str:
        """Return a number of bytes as text in the caller's unit, rounded up to four digits."""
        size = self.unit_bytes
        if not size:
            return f"{nbytes} bytes"
        return f"{self._number(nbytes)} {self.unit_name} ({nbytes} bytes)"

    def _number(self, nbytes: int) -> str:
        """Return `nbytes` as a number in the caller's unit, rounded up, with about four digits."""
        size = self.unit_bytes
        if nbytes == self.nbytes:
            return self.given
        nbytes -= self.base
        if nbytes >= size:
            places = max(0, _DIGITS - len(str(nbytes // size)))
        else:
            places = _DIGITS - 1 + len(str(size // max(nbytes, 1)))
        # divide by -size and negate, which rounds up
        integer, fraction = divmod(-(-nbytes * 10**places // size), 10**places)
        decimals = f"{fraction:0{places}d}".rstrip("0") if places else ""
        return f"{integer}.{decimals}" if decimals else str(integer)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Rewrite CapacityErrors of the core to show budgets in the caller's unit."""
        try:
            yield
        except _core.CapacityError as error:
            error.args = (self.in_unit(str(error)),)
            raise

    def in_unit(self, message: str) -> str:
        """Convert the budgets in a message from bytes to the caller's unit."""
        if not self.unit_bytes:
            return message
        return _BYTES.sub(lambda m: f"{m[1]} {self.text(int(m[2]))}", message)


def parse_budget(
    name: str, value: Any, full: int | None = None, of: str = "", base: int = 0
) -> Budget:
    """Return a memory budget, rounded down to whole bytes.

    `value`: bytes as an int; a size such as ``"6GiB"`` or ``"1.5 GB"``; or a fraction of `full`
    bytes, as a float up to 1 or a text such as ``"60%"``, which is added to `base` bytes. Without
    `full`, fractions are refused.
    `name`: the parameter's name, and `of` describes `full`, both for messages. Raises TypeError or
    ValueError. A negative number is returned as it is.
    """
    if isinstance(value, str):
        percent = _PERCENT.fullmatch(value)
        if percent is None:
            return _parse_text(name, value)
        if full is None:
            raise _fraction_error(name, value)
        nbytes = base + _multiply(percent[1], full) // 100
        return Budget(nbytes, full, f"of {of}", f"{value.strip()}", base)
    try:
        if not isinstance(value, FLAG):
            return Budget(index(value), 0, "", "")
    except TypeError:
        pass  # a float, or no number
    if not isinstance(value, Real) or isinstance(value, FLAG):
        raise TypeError(
            f"{name} must be a number of bytes or a size such as '6GiB', got {type(value).__name__}"
        )
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}: give a finite number of bytes")
    if number > 1:
        raise ValueError(
            f"{name} is {number:g}: a float is a fraction up to 1; pass bytes as an int, or a size "
            "such as '6GiB'"
        )
    if number <= 0:
        return Budget(math.floor(number), 0, "", "")
    if full is None:
        raise _fraction_error(name, f"{number:g}")
    # 15 decimals restore the number that the caller typed, such as 0.6.
    return Budget(base + _multiply(f"{number:.15f}", full), full, f"of {of}", f"{number:g}", base)


def parse_size(name: str, value: object, least: int = 0, most: int | None = None) -> int:
    """Return a number of bytes from an int, or from a size such as ``"5GB"``.

    `name`: the parameter's name in errors. Raises ValueError below `least` or above `most`.
    """
    if isinstance(value, str):
        value = _parse_text(name, value).nbytes
    elif isinstance(value, FLAG) or not hasattr(value, "__index__"):
        raise TypeError(
            f"{name} must be an int or a size such as '5GB', got {type(value).__name__}"
        )
    return check_int(name, value, least, most)


def _fraction_error(name: str, value: str) -> ValueError:
    return ValueError(
        f"{name} is {value}: a fraction is not allowed here; pass bytes or a size such as '6GiB'"
    )


def _parse_text(name: str, value: str) -> Budget:
    """Return the budget of a text such as "6GiB"; raises ValueError that names `name`."""
    match = _SIZE.fullmatch(value)
    unit = _NAMES.get((match[2] or "B").lower()) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"{name} is {value!r}: expected a number and a unit, such as '6GiB' or '1.5 GB' "
            f"(units: {', '.join(_UNITS)})"
        )
    size = _UNITS[unit]
    return Budget(_multiply(match[1], size), size if size > 1 else 0, unit, match[1])


def _multiply(decimal: str, size: int) -> int:
    """Return the product of a decimal number, such as "1.5", and `size`, rounded down.

    It is exact for any number of digits.
    """
    integer, _, decimals = decimal.partition(".")
    divisor: int = 10 ** len(decimals)
    return int(integer + decimals) * size // divisor
