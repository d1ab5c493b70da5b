"""Checks of plain arguments: flags, numbers, integers, callbacks; other types are refused."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

FLAG = (bool, np.bool_)  # types of True and False


def check_flags(**flags: object) -> None:
    """Raise TypeError for the first keyword that is not a flag."""
    for name, value in flags.items():
        if not isinstance(value, FLAG):
            raise TypeError(f"{name} must be True or False, got {type(value).__name__}")


def check_type(name: str, value: object, types: Any, kind: str = "") -> None:
    """Raise TypeError unless `value` is an instance of `types`, a class or a union of classes.

    For the error, `name` is the parameter's name, and `kind` says what `types` are ("a mapping");
    by default "a" and the name of the class.
    """
    if not isinstance(value, types):
        raise TypeError(
            f"{name} must be {kind or f'a {types.__name__}'}, got {type(value).__name__}"
        )


def check_callback(name: str, value: object) -> None:
    """Raise TypeError unless a callback is callable or None; `name`: the parameter's name."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, got {type(value).__name__}")


# Beginnings of the names of real dtypes, of NumPy, ml_dtypes and torch.
_REAL_DTYPES = ("float", "bfloat", "longdouble", "int", "uint")


def check_number(name: str, value: Any) -> float:
    """Return a real number, of Python, NumPy or a 0-dimensional tensor, as a float.

    `name`: the parameter's name in errors. Raises TypeError for other values, also NumPy's texts
    and complex numbers, and ValueError for an int beyond the range of a float.
    """
    is_number = hasattr(value, "__float__") and not isinstance(value, type)
    if (dtype := getattr(value, "dtype", None)) is not None:  # str and complex have `__float__` too
        dtype_name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]  # torch.*, mlx.core.*
        is_number = is_number and dtype_name.startswith(_REAL_DTYPES)
    if isinstance(value, FLAG) or not is_number or getattr(value, "shape", ()) != ():
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is beyond the range of a float") from None


def check_items(name: str, value: Any, of: str) -> list[Any]:
    """Return the items of an iterable; raise TypeError for others, and for a single str or bytes.

    For the error, `name` is the parameter's name, and `of` says what the items are ("layer ids").
    """
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__") or isinstance(value, type):
        got = repr(value) if isinstance(value, str | bytes) else type(value).__name__
        raise TypeError(f"{name} must be an iterable of {of}, got {got}")
    return list(value)


def check_int(name: str, value: Any, least: int, most: int | None = None, also: str = "") -> int:
    """Return an integer from `least` to `most` (None: no limit); a bool is refused.

    `name`: the parameter's name in errors. `also` names another accepted value there (" or None").
    Raises TypeError for other types, ValueError for a number out of range.
    """
    try:
        if isinstance(value, FLAG) or str(getattr(value, "dtype", "")) == "torch.bool":
            raise TypeError
        number = int(index(value))
    except TypeError:
        raise TypeError(f"{name} must be an int{also}, got {type(value).__name__}") from None
    if number < least or (most is not None and number > most):
        limits = f"{least} or more" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {limits}{also}, got {value}")
    return number
