"""`Match`: how many tokens of a prompt can be restored, from blocks and snapshots; its table."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

from .._common.log import log
from .._common.report import Table
from .._common.set_module import set_module
from .._common.store_error import format_error
from ..errors import FormatError
from ._layout import DIGEST_BYTES, StoredSpec

if TYPE_CHECKING:
    from .. import _core
    from ._prompt import Prompt

BLOCK, SNAPSHOT = 0, 1  # kinds of records
_HEAD = DIGEST_BYTES + 4  # offset of the head: it follows the digest and its own length


class Candidate(NamedTuple):
    """A position that can be restored."""

    position: int
    record: int | None  # index of its snapshot in the match; None: only blocks are needed


class BlockRange(NamedTuple):
    """A stored block: the index of its record in the match, and its positions."""

    record: int
    start: int
    stop: int


class Head(NamedTuple):
    """The description of the caches of a model."""

    stored: StoredSpec
    label: str  # name of the model, for listings


# A description is the digest of the entries; of a first block or a snapshot also the length of the
# head, the head and the list of parts, both as JSON.


def pack_meta(stored: StoredSpec, label: str, listed: list[Any]) -> bytes:
    """Return the description of a snapshot, or of the first block of a prompt.

    `stored`: the entries of the caches. `label`: name of the model, for listings. `listed`: the
    parts of a snapshot, as `state_parts` returns them; empty for a block.
    """
    document: dict[str, Any] = {"model": label, "entries": stored.to_json()}
    if stored.layers is not None:
        document["layers"] = stored.layers
    head = _json_bytes(document)
    return b"".join((stored.digest, len(head).to_bytes(4, "little"), head, _json_bytes(listed)))


def _json_bytes(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _split_description(data: bytes) -> tuple[bytes, bytes]:
    """Return the head and the list of parts of a description, both as JSON."""
    stop = _HEAD + int.from_bytes(data[_HEAD - 4 : _HEAD], "little")
    return data[_HEAD:stop], data[stop:]


@lru_cache(maxsize=16)
def _parse_head(head: bytes) -> Head:
    """Return the head from its JSON; raise KeyError, TypeError or ValueError if it is malformed."""
    document = json.loads(head)
    stored = StoredSpec.from_json(document["entries"], document.get("layers"))
    return Head(stored, str(document["model"]))


def head_of(data: bytes, path: str) -> Head:
    """Return the head in `data`, the description of a snapshot or first block.

    `path`: of the store, for errors. Raises FormatError if the description is malformed.
    """
    try:
        head = _parse_head(_split_description(data)[0])
        if head.stored.digest != data[:DIGEST_BYTES]:
            raise ValueError("its digest differs")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        text = f"{path}: the description of a record is malformed: {error}"
        raise format_error(text, path) from None
    return head


def parts_of(match: Match, record: int, path: str) -> list[Any]:
    """Return the list that describes the parts of a snapshot, as `state_parts` made it.

    It has name, numbers of tokens and shape of each array; see `StoredSpec.check_parts`.
    `record`: its index in the match. `path`: of the store, for errors. Raises FormatError unless
    the list and the tokens after the last whole block make up the bytes of the record.
    """
    stored = match._stored
    assert stored is not None
    _, start, end, nbytes = match._log_match.records[record]
    meta = match._log_match.meta(record)
    try:
        listed = json.loads(_split_description(meta)[1])
        size = stored.token_bytes * (end - start) + stored.check_parts(listed, end)
        if size != nbytes:
            raise ValueError(f"it needs {size} bytes, and has {nbytes}")
    except (TypeError, ValueError, RecursionError) as error:
        text = f"{path}: the description of a snapshot is malformed: {error}"
        raise format_error(text, path) from None
    return list(listed)


def windows_of(match: Match, record: int, path: str) -> dict[str, int | None]:
    """Return the windows of the entries in a snapshot, by name, in the cache that was stored.

    A window is None for an entry that is not sliding. `record`: index of the snapshot in the match.
    `path`: of the store, for errors.
    """
    stored = head_of(match._log_match.meta(record), path).stored
    return {entry.name: entry.window for entry in stored.states}


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
        "_candidates",
        "_is_closed",
        "_key",
        "_least",
        "_log_match",
        "_prompt",
        "_reach",
        "_stored",
        "length",
        "limit",
    )

    length: int
    limit: str | None
    _log_match: _core.PromptMatch
    _stored: StoredSpec | None
    _is_closed: bool
    _prompt: Prompt
    _key: bytes  # of the model
    _candidates: list[Candidate]  # the longest first
    _reach: int  # tokens of the adjacent blocks, from the first token on
    _least: int  # tokens that a restore may return, except 0

    def __init__(self) -> None:
        raise TypeError("a Match is created by PromptStore.match")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Match cannot be copied or pickled, because it keeps files open")

    @property
    def _blocks(self) -> list[BlockRange]:
        """The adjacent blocks, from the first token on."""
        return [
            BlockRange(index, start, end)
            for index, (kind, start, end, _) in enumerate(self._log_match.records)
            if kind == BLOCK and end <= self._reach
        ]

    def close(self) -> None:
        """Close the files; `PromptStore.restore` of this match then raises ValueError."""
        self._is_closed = True
        self._log_match.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        limit = "" if self.limit is None else f", limit={self.limit!r}"
        return f"Match(length={self.length}{limit})"

    def _repr_html_(self) -> str:
        """Return the records as an HTML table for notebooks, with those that `restore` reads."""
        records = self._log_match.records
        used = {block.record for block in self._blocks if block.stop <= self.length}
        columns = ["record", "from token [n]", "to token [n]", "bytes [B]", "restored"]
        rows = []
        for index, (kind, start, end, size) in enumerate(records):
            is_read = index in used or (kind != BLOCK and end == self.length)
            name, restored = "block" if kind == BLOCK else "snapshot", "yes" if is_read else "no"
            rows.append((name, start, end, size, restored))
        limit = "" if self.limit is None else f", ended by {self.limit}"
        title = f"Match: {self.length:,} tokens{limit}"
        return Table(title, columns, rows).html()


def make_match(
    log_match: _core.PromptMatch,
    prompt: Prompt,
    path: str,
    limits: tuple[int, int],
    expected: StoredSpec | None,
    key: bytes,
) -> Match:
    """Return the match of a prompt.

    `log_match`: the records of `prompt` that the core found, which the match owns. `path`: of the
    store. `limits`: the least and the most tokens. `expected`: the entries of its caches; None: not
    known yet. `key`: the fingerprint of the model as bytes. Records that are damaged or of other
    entries are logged and left out.
    """
    for text in log_match.damage:
        log("WARNING", "%s: %s: the record is left out", path, text)
    match = object.__new__(Match)
    match._is_closed = False
    match._least, most = limits
    match._log_match, match._prompt, match._key = log_match, prompt, key
    match.length, match.limit, match._stored = 0, None, expected
    match._candidates, match._reach = [], 0
    heads = _heads(log_match, path)
    if not heads:
        match.limit = _first_name(expected) if most else None
        return match
    stored = heads[0][0].stored
    if expected is not None and expected.digest != stored.digest:
        log("WARNING", "%s: the stored prompt has other entries than the cache: a miss", path)
        match.limit = _first_name(expected)
        return match
    match._stored = stored
    match._reach = log_match.reach(stored.digest, stored.token_bytes)
    match._candidates = _candidates(match, heads, most)
    if match._candidates:
        match.length = match._candidates[0].position
    if match.length < most:
        match.limit = _limiting_entry(match, stored)
    return match


def _heads(log_match: _core.PromptMatch, path: str) -> list[tuple[Head, int, int, int, int]]:
    """Return the first block and the snapshots: the head, the number, kind, start and end of each.

    A record whose description is malformed is logged and left out. `path`: of the store.
    """
    heads = []
    for index, kind, start, end in log_match.heads:
        try:
            heads.append((head_of(log_match.meta(index), path), index, kind, start, end))
        except FormatError as error:
            log("WARNING", "%s: the record is left out", error)
    return heads


def _candidates(
    match: Match, heads: list[tuple[Head, int, int, int, int]], most: int
) -> list[Candidate]:
    """Return the positions, up to `most`, that can be restored, the longest first.

    `heads`: of the records. A snapshot can be restored if the blocks reach its first token. A cache
    without snapshots can be restored at each position that blocks reach.
    """
    stored, reach = match._stored, match._reach
    assert stored is not None
    candidates = []
    for head, index, kind, start, end in heads:
        if kind != SNAPSHOT or start > reach or head.stored.digest != stored.digest:
            continue
        position = end if stored.states else min(end, most)  # a state belongs to the end only
        if match._least <= position <= most and (position > start or stored.states):
            candidates.append(Candidate(position, index))
    if not stored.states and min(reach, most) >= match._least:
        candidates.append(Candidate(min(reach, most), None))
    return sorted(candidates, key=lambda each: each.position, reverse=True)


def _limiting_entry(match: Match, stored: StoredSpec) -> str:
    """Return the name of an entry without stored data behind the match.

    It is a state if blocks are stored beyond the match, else an entry that blocks have.
    """
    has_more_tokens = match._reach > match.length or not stored.blocks
    entries = stored.states if has_more_tokens and stored.states else stored.blocks
    return (entries or stored.entries)[0].name


def _first_name(stored: StoredSpec | None) -> str | None:
    return None if stored is None else (stored.blocks or stored.entries)[0].name
