"""Which values of metadata JSON can store: types, depth, NaN; the error for others."""

from __future__ import annotations

import math

DEEPEST = 100  # a manifest may be nested 128 deep, and the value starts a few levels down


def check_json_values(value: object, where: str, *, finite: bool = True) -> None:
    """Raise for a value that JSON cannot represent, or that changes in a round trip.

    TypeError: a type that JSON lacks. ValueError: nested too deeply, invalid UTF-8, or, with
    `finite`, NaN or infinity. `where`: name of the value in errors, which show the path from there.
    """
    try:
        _check(value, where, finite, DEEPEST)
    except _TooDeepError:
        raise ValueError(
            f"{where} is nested more than {DEEPEST} levels deep, or contains itself"
        ) from None


class _TooDeepError(Exception):
    """The value is nested too deeply."""


def _check(value: object, where: str, finite: bool, levels: int) -> None:
    """Raise TypeError or ValueError if a value cannot be stored as JSON.

    `where`: its path in messages. `finite`: refuse NaN and infinity. `levels`: how many levels of
    lists and dicts may still follow.
    """
    if levels == 0 and isinstance(value, dict | list | tuple):
        raise _TooDeepError
    if isinstance(value, dict) and not hasattr(value, "astype"):  # JSON would lose a `StateDict`
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"{where} has the key {key!r}, but JSON keys must be str: store other keys as "
                    "[[key, value], ...]"
                )
            _check(key, where, finite, levels)
            _check(inner, f"{where}[{key!r}]", finite, levels - 1)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            if type(inner) is not int:  # fast path for long lists, such as a generator's state
                _check(inner, f"{where}[{number}]", finite, levels - 1)
    elif isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, float):
        if finite and not math.isfinite(value):
            raise ValueError(
                f"{where} is {value}, but JSON has only finite numbers: use None or a string "
                "instead"
            )
    elif value is not None and not isinstance(value, int):
        cls = type(value)
        name = cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"
        hint = _hint(value)
        raise TypeError(f"{where} is a {name}{hint and f': give {hint}'}")


def check_text(text: str, where: str) -> None:
    """Raise ValueError for a text that cannot be encoded as UTF-8; `where`: its path."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: {error}") from None


def _hint(value: object) -> str:
    """Return an expression that converts a value for JSON, such as ``int(...)``; "" if unknown."""
    if isinstance(value, set | frozenset):
        return "sorted(...)"
    if getattr(value, "is_nested", False):  # a tensor without a shape
        return ""
    kind = getattr(getattr(value, "dtype", None), "kind", "")  # NumPy scalars and arrays
    if getattr(value, "shape", None) != ():
        return "its tolist()" if hasattr(value, "tolist") else ""
    return {"f": "float(...)", "i": "int(...)", "u": "int(...)", "b": "bool(...)"}.get(
        kind, "its item()" if hasattr(value, "item") else ""
    )
