"""Text of numbers, bytes, ranks, steps, similar names ("did you mean"); order of names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_Item = TypeVar("_Item")

_COMPARED = 10_000  # names; comparing them takes about 100 ms
_LISTED = 8  # ranks, or candidates for a name, that a message lists
# Splits a name: texts are at even positions of the result, numbers at odd ones.
_NUMBERS = re.compile("([0-9]+)").split
_FIRST_NUMBER = re.compile("([^0-9]*)([0-9]*)").match


def bytes_text(count: int) -> str:
    """Return `count` bytes as short text with a unit, such as ``1.50 KiB``; GiB is the largest."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024 or unit == "GiB":
            break
    return f"{size:.2f} {unit}"


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with a noun; `plural` is needed if it is not regular."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def printable(text: str) -> str:
    """Return a text as one line that a terminal shows as it is.

    Control characters, line breaks, marks that reverse the direction of text, and bytes that are
    not UTF-8 are escaped.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shorten(name: str, limit: int) -> str:
    """Return a name of at most `limit` characters: longer ones lose their middle.

    Unprintable characters are escaped, which may make it longer.
    """
    if len(name) > limit:
        name = f"{name[: limit // 2]}…{name[len(name) - limit // 2 + 1 :]}"
    return printable(name)


def listed(entries: Sequence[str], limit: int, more: int = 0) -> str:
    """Return entries with commas between them in about `limit` characters; the others are counted.

    An entry alone that is longer loses its middle. `more`: entries that are not in `entries`.
    """
    length = count = 0
    for entry in entries:
        length += len(entry) + 2
        if count and length > limit:
            break
        count += 1
    more += len(entries) - count
    texts = [shorten(entry, limit) for entry in entries[:count]]
    return ", ".join(texts + [f"… {more:,} more"] * (more > 0))


def ranks_text(ranks: Sequence[int], most: int = _LISTED) -> str:
    """Return ranks as text, at most `most` of them: ``rank 1``, ``ranks 0, 2 and 5 more``."""
    listed = ", ".join(str(rank) for rank in ranks[:most])
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}{more}"


_CONTAINED = 3  # fewest characters of a name to look for inside others: fewer occur by chance


def names_hint(name: str, candidates: Iterable[str], *, listed: bool = True) -> str:
    """Return a hint for an unknown `name`: a similar one of `candidates`, or one that contains it.

    Without one, the hint lists the first candidates, or is "" if `listed` is false because the
    message lists them already. Only the first 10,000 candidates are compared.
    """
    from difflib import get_close_matches

    names = list(dict.fromkeys(candidates))
    near = get_close_matches(name, names[:_COMPARED], 1)
    if not near and len(name) >= _CONTAINED:
        near = [each for each in names[:_COMPARED] if name in each]
    if near:
        return f"; did you mean {near[0]!r}?"
    if not listed:
        return ""
    listed_names = (
        ", ".join(repr(shorten(candidate, 100)) for candidate in names[:_LISTED]) or "none"
    )
    hidden = len(names) - _LISTED
    return f"; there are {listed_names}" + (f" and {hidden:,} more" if hidden > 0 else "")


def sort_steps(steps: Iterable[int | None]) -> list[int | None]:
    """Sort steps by number; unknown steps (None) come last."""
    return sorted(steps, key=lambda step: (step is None, step or 0))


def steps_text(steps: Sequence[int | None], limit: int | None = None) -> str:
    """Return steps as text in numeric order, ``?`` for None; ``none`` if there are none.

    Steps beyond `limit` are only counted.
    """
    texts = ["?" if step is None else str(step) for step in sort_steps(steps)[:limit]]
    hidden = len(steps) - len(texts)
    return ", ".join(texts + ([f"{hidden:,} more"] if hidden else [])) or "none"


def number_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts names by the numbers in them: layers.2 comes before layers.10.

    For each part of the name: whether it is a number, how many digits that has, and its text.
    Numbers of equal length are in the order of their texts.
    """
    parts: list[tuple[bool, int, str]] = []
    for position, part in enumerate(_NUMBERS(name)):
        is_number = bool(position % 2)
        digits = part.lstrip("0") if is_number else ""  # int() refuses numbers of 5,000 digits
        parts.append((is_number, len(digits), digits or part))
    return parts


def first_by_number(
    items: Iterable[_Item], name_of: Callable[[_Item], str], most: int
) -> list[_Item]:
    """Return the first `most` items in the order of `number_order`.

    Only items that may be among them are sorted: those whose first number is small.
    """
    groups: dict[tuple[str, int, str], list[_Item]] = {}
    for item in items:
        start = _FIRST_NUMBER(name_of(item))
        assert start is not None  # it matches the empty text
        text, digits = start.groups()
        number = digits.lstrip("0")
        groups.setdefault((text, len(number), number or digits), []).append(item)
    found: list[_Item] = []
    for key in sorted(groups):
        if len(found) >= most:
            break
        found += sorted(groups[key], key=lambda item: number_order(name_of(item)))
    return found[:most]
