"""Values that JSON can say, and gives back as they were, but for tuples, which become lists."""

from __future__ import annotations

import math
from typing import Any

DEEPEST = 100  # a manifest, which has it a few levels down, is nested 128 deep at most


def check_sayable(value: Any, where: str, *, finite: bool = True) -> None:
    """
    Refuse what JSON cannot say or would give back as something else.

    Parameters
    ----------
    value : object
        What is to be said.
    where : str
        What it is in, such as ``metadata``: errors say the path from there.
    finite : bool, default True
        Refuse NaN and infinities, which are no numbers of JSON.

    Raises
    ------
    TypeError
        A value is no text, number, list or dict, or a dict in it has a key that is no str.
    ValueError
        A number is not finite, a text is no UTF-8, or the value is nested more than
        ``DEEPEST`` deep.
    """
    try:
        _check(value, where, finite, DEEPEST)
    except _TooDeepError:
        raise ValueError(
            f"{where} is nested too deeply, or holds itself: {DEEPEST} deep is the most"
        ) from None


class _TooDeepError(Exception):
    """There are more levels than may be."""


def _check(value: Any, where: str, finite: bool, levels: int) -> None:
    if levels == 0 and isinstance(value, dict | list | tuple):
        raise _TooDeepError
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"{where} has the key {key!r}, and keys must be str: they would be texts "
                    "when they come back; [[key, value], ...] keeps others"
                )
            _check(key, where, finite, levels)
            _check(inner, f"{where}[{key!r}]", finite, levels - 1)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            if type(inner) is not int:  # long lists, such as a generator's state, are of these
                _check(inner, f"{where}[{number}]", finite, levels - 1)
    elif isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{where}: {error}") from None
    elif isinstance(value, float):
        if finite and not math.isfinite(value):
            raise ValueError(
                f"{where} is {value}, and JSON has finite numbers only: give None or a text "
                "in its place"
            )
    elif value is not None and not isinstance(value, int):
        cls = type(value)
        name = cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"
        hint = _hint(value)
        raise TypeError(f"{where} is a {name}{hint and f': give {hint}'}")


def _hint(value: Any) -> str:
    """What a value can be given as instead, where that can be told."""
    if isinstance(value, set | frozenset):
        return "sorted(...)"
    kind = getattr(getattr(value, "dtype", None), "kind", "")  # NumPy's numbers and arrays
    if getattr(value, "shape", None) != ():
        return "its tolist()" if hasattr(value, "tolist") else ""
    return {"f": "float(...)", "i": "int(...)", "u": "int(...)", "b": "bool(...)"}.get(
        kind, "its item()" if hasattr(value, "item") else ""
    )
