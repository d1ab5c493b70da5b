"""The stored beginning of a prompt; public through `mlstate.prompts`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

from .._common.log import log
from .._common.set_module import set_module
from .._common.text import bytes_text, table_html
from ..errors import FormatError
from ._layout import StoredSpec

if TYPE_CHECKING:
    from .. import _core
    from .._types import NDArray

BLOCK, SNAPSHOT = 0, 1  # kinds of records
_DIGEST_BYTES = 8


class Candidate(NamedTuple):
    """A position that can be restored."""

    position: int
    record: int | None  # of the snapshot; None: only blocks are needed
    listed: list[Any]  # its parts: name, and numbers of tokens or shape


class Meta(NamedTuple):
    """The description of a record."""

    stored: StoredSpec
    listed: list[Any]
    label: str


def pack_meta(stored: StoredSpec, label: str, listed: list[Any]) -> bytes:
    """Return the description of a snapshot, or of the first block of a prompt."""
    document = {"model": label, "entries": stored.to_json(), "parts": listed}
    return stored.digest + json.dumps(document, separators=(",", ":")).encode()


def parse_meta(data: bytes, path: str) -> Meta:
    """Return the description of a record; raise FormatError for a malformed one."""
    try:
        document = json.loads(data[_DIGEST_BYTES:])
        label, entries = str(document["model"]), document["entries"]
        listed = [_checked_part(each) for each in document["parts"]]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        failure = FormatError(f"{path}: the description of a record is malformed: {error}")
        failure.path = path
        raise failure from None
    return Meta(StoredSpec.from_json(entries, path), listed, label)


def _checked_part(part: Any) -> tuple[str, list[int] | None, list[int] | None]:
    name, counts, shape = part
    for numbers in (counts, shape):
        if numbers is not None and not all(type(n) is int and 0 <= n < 1 << 48 for n in numbers):
            raise ValueError(f"{numbers} are not numbers of tokens")
    if not isinstance(name, str) or (counts is None) == (shape is None):
        raise ValueError(f"{part} is not a part")
    return name, counts, shape


@set_module("mlstate.prompts")
class Match:
    """The beginning of a prompt that is stored; `PromptStore.match` returns one.

    Attributes
    ----------
    length : int
        Number of tokens that `PromptStore.restore` can restore.
    limit : str or None
        The entry of the cache that ends the match: nothing is stored of it for a later position.
        None if all tokens are matched that may be.

    Notes
    -----
    A match keeps its files open, so that another process cannot take them away. Use it as a
    context manager, or call `close`. It cannot be copied or pickled.
    """

    __slots__ = (
        "_blocks",
        "_candidates",
        "_log_match",
        "_stored",
        "_tokens",
        "length",
        "limit",
    )

    length: int
    limit: str | None
    _log_match: _core.PromptMatch
    _stored: StoredSpec | None
    _tokens: NDArray
    _candidates: list[Candidate]  # the longest first
    _blocks: list[tuple[int, int, int]]  # (record, start, stop) of the chain

    def __init__(self) -> None:
        raise TypeError("a Match is created by PromptStore.match")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Match cannot be copied or pickled, because it keeps files open")

    def close(self) -> None:
        """Close the files; `PromptStore.restore` of this match then raises ValueError."""
        self._log_match.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        limit = "" if self.limit is None else f", limit={self.limit!r}"
        return f"Match(length={self.length}{limit})"

    def _repr_html_(self) -> str:
        records = self._log_match.records
        used = {record for record, _, stop in self._blocks if stop <= self.length}
        rows = [
            (
                "block" if kind == BLOCK else "snapshot",
                f"{start:,}",
                f"{end:,}",
                bytes_text(size),
                "yes" if index in used or (kind != BLOCK and end == self.length) else "no",
            )
            for index, (kind, start, end, size) in enumerate(records)
        ]
        limit = "" if self.limit is None else f", ended by {self.limit}"
        title = f"Match: {self.length:,} tokens{limit}"
        return table_html(title, ["record", "from token", "to token", "bytes", "restored"], rows)


def make_match(
    log_match: _core.PromptMatch,
    tokens: NDArray,
    path: str,
    most: int,
    expected: StoredSpec | None,
) -> Match:
    """Return the match of at most `most` tokens."""
    for text in log_match.damage:
        log("WARNING", "%s: %s: the record is left out", path, text)
    match = object.__new__(Match)
    match._log_match, match._tokens = log_match, tokens
    match.length, match.limit, match._stored = 0, None, expected
    match._candidates, match._blocks = [], []
    metas = _described(log_match, path)
    if not metas:
        match.limit = _first_name(expected) if most else None
        return match
    stored = next(iter(metas.values())).stored
    if expected is not None and expected.digest != stored.digest:
        log("WARNING", "%s: the stored prompt has other entries than the cache: a miss", path)
        match.limit = _first_name(expected)
        return match
    match._stored = stored
    match._blocks = _chain(log_match, stored)
    match._candidates = _candidates(match, metas, most)
    if match._candidates:
        match.length = match._candidates[0].position
    if match.length < most:
        match.limit = _limit(match, stored)
    return match


def _described(log_match: _core.PromptMatch, path: str) -> dict[int, Meta]:
    """Return the descriptions of the first block and of the snapshots, by record."""
    metas: dict[int, Meta] = {}
    parsed: dict[bytes, Meta] = {}
    for index, (kind, start, _, _) in enumerate(log_match.records):
        if kind != SNAPSHOT and (kind != BLOCK or start != 0):
            continue
        data = log_match.meta(index)
        try:
            metas[index] = parsed[data] if data in parsed else parse_meta(data, path)
        except FormatError as error:
            log("WARNING", "%s: the record is left out", error)
            continue
        parsed[data] = metas[index]
    first = next(iter(metas.values())).stored.digest if metas else b""
    return {index: meta for index, meta in metas.items() if meta.stored.digest == first}


def _chain(log_match: _core.PromptMatch, stored: StoredSpec) -> list[tuple[int, int, int]]:
    """Return the blocks from the first token on, as long as they have the same entries."""
    blocks: list[tuple[int, int, int]] = []
    for index, (kind, start, end, _) in enumerate(log_match.records):
        if kind != BLOCK:
            continue
        at = blocks[-1][2] if blocks else 0
        if start != at or log_match.meta(index)[:_DIGEST_BYTES] != stored.digest:
            break
        blocks.append((index, start, end))
    return blocks


def _candidates(match: Match, metas: dict[int, Meta], most: int) -> list[Candidate]:
    """Return the positions that can be restored, the longest first."""
    stored, reach = match._stored, match._blocks[-1][2] if match._blocks else 0
    assert stored is not None
    candidates = []
    for index, meta in metas.items():
        kind, start, end, _ = match._log_match.records[index]
        position = end if stored.states else min(end, most)  # a state belongs to the end only
        has_tokens = position > start or bool(stored.states)
        if kind == SNAPSHOT and start <= reach and has_tokens and 0 < position <= most:
            candidates.append(Candidate(position, index, meta.listed))
    if not stored.states and min(reach, most):
        candidates.append(Candidate(min(reach, most), None, []))
    return sorted(candidates, key=lambda each: each.position, reverse=True)


def _limit(match: Match, stored: StoredSpec) -> str:
    """Return the entry that nothing is stored of behind the match."""
    reach = match._blocks[-1][2] if match._blocks else 0
    has_more_tokens = reach > match.length or not stored.blocks
    entries = stored.states if has_more_tokens and stored.states else stored.blocks
    return (entries or stored.entries)[0].name


def _first_name(stored: StoredSpec | None) -> str | None:
    return None if stored is None else (stored.blocks or stored.entries)[0].name
