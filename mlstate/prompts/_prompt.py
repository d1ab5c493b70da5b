"""`Prompt`: the token ids and extras (`extra=`) that identify records; `quantized_kv_start`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .._common.arguments import FLAG, check_int, check_type
from ._caches import as_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .._types import NDArray

EXTRA_BYTES = 36  # of one extra in the core: its position (4), and a SHA-256
Extra: TypeAlias = "Mapping[int, bytes | str | int] | None"


def _extra_of(position: int, text: bytes) -> bytes:
    return position.to_bytes(4, "little") + hashlib.sha256(text).digest()


_QUANTIZED = _extra_of(0, b"quantized")  # no digest of a caller has this text


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids, and what identifies the content of their placeholders.

    Attributes
    ----------
    ids : ndarray
        Of 32 or 64 bits.
    extras : bytes
        As the core takes them: position and digest of each, by position.
    """

    ids: NDArray
    extras: bytes = b""

    def _rows(self) -> list[bytes]:
        return split_extras(self.extras)

    def key(self) -> tuple[bytes, bytes]:
        """Return token ids and extras as bytes, which are equal for the same prompts only."""
        return self.ids.tobytes(), self.extras

    def first(self, count: int) -> Prompt:
        """Return the first `count` tokens."""
        rows = [row for row in self._rows() if position_of(row) < count]
        return Prompt(self.ids[:count], b"".join(rows))

    def quantized(self) -> Prompt:
        """Return the prompt of a cache that became quantized: its blocks are other ones."""
        return Prompt(self.ids, _QUANTIZED + self.extras) if len(self.ids) else self

    @property
    def is_quantized(self) -> bool:
        """Whether it is of `quantized`."""
        return self.extras.startswith(_QUANTIZED)

    def covers_all(self) -> bool:
        """Return whether an extra counts for every token."""
        return self.extras[:4] == bytes(4)

    def common(self, other: Prompt) -> int:
        """Return how many first tokens two prompts share."""
        count = min(len(self.ids), len(other.ids))
        different = np.flatnonzero(self.ids[:count] != other.ids[:count])
        rows = set(self._rows()) ^ set(other._rows())
        return int(min([count, *different[:1], *map(position_of, rows)]))


def split_extras(extras: bytes) -> list[bytes]:
    """Return the rows of extras, each position and digest."""
    return [extras[i : i + EXTRA_BYTES] for i in range(0, len(extras), EXTRA_BYTES)]


def position_of(row: bytes) -> int:
    """Return the position of a row of extras."""
    return int.from_bytes(row[:4], "little")


def shown_extras(extras: bytes) -> dict[int, str]:
    """Return the digests of the caller by position, for listings."""
    rows = (row for row in split_extras(extras) if row != _QUANTIZED)
    return {position_of(row): f"sha256:{row[4:].hex()}" for row in rows}


def as_prompt(tokens: Any, extra: Any) -> Prompt:
    """Return the prompt of the arguments `tokens` and `extra` of a store.

    Raises TypeError or ValueError for token ids as `as_tokens`, for an `extra` that is not a
    mapping, for a position that is not one of a token, and for other digests than bytes, str and
    int, and empty or negative ones.
    """
    ids = as_tokens(tokens)
    if extra is None:
        return Prompt(ids)
    if not hasattr(extra, "items"):
        check_type("extra", extra, dict, "a mapping from positions to digests")
    digests = {}
    for position, digest in extra.items():
        place = check_int("a position of extra", position, 0)
        if place >= len(ids):
            raise ValueError(f"extra has position {place}, and the prompt {len(ids)} tokens")
        digests[place] = _digest_text(f"extra[{place}]", digest)
    return Prompt(ids, b"".join(_extra_of(place, text) for place, text in sorted(digests.items())))


def _digest_text(name: str, digest: Any) -> bytes:
    """Return the bytes that identify a digest; another type with the same text is another one."""
    if isinstance(digest, str | bytes):
        if not digest:
            raise ValueError(f"{name} is an empty digest")
        return b"s" + digest.encode() if isinstance(digest, str) else b"b" + digest
    if isinstance(digest, FLAG) or not hasattr(digest, "__index__"):
        raise TypeError(f"{name} must be bytes, a str or an int, got {type(digest).__name__}")
    return b"i%d" % check_int(name, digest, 0)
