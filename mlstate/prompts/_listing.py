"""``mlstate prompts ls``: which records make one prompt, and its columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.report import Table
from .._common.text import shorten
from ..errors import FormatError
from ._match import SNAPSHOT, Head, head_of
from ._prompt import shown_extras

if TYPE_CHECKING:
    from .. import _core
    from .._types import NDArray

_COLUMNS = ["prompt", "model", "tokens [n]", "ends with", "bytes [B]", "pinned"]
_DIGITS = 12  # of a key, in tables
_LABEL = 40  # characters of a model's name, in tables


class _Record(NamedTuple):
    """A record of the store, as the core lists it."""

    key: bytes
    parent: bytes  # key of the record before
    kind: int
    end: int  # position after its last token
    fingerprint: bytes
    nbytes: int
    pinned: bool
    last_used: int
    token_ids: NDArray
    description: bytes
    extras: bytes


class StoredPrompt(NamedTuple):
    """A prompt: its last record, and all records before it that this one continues."""

    key: str  # hexadecimal
    fingerprint: str
    model: str  # its label
    length: int  # in tokens
    token_ids: list[NDArray]  # of each record
    extra: dict[int, str]  # digests by position
    kind: str  # "snapshot" or "block"
    nbytes: int  # shared blocks included
    pinned: bool
    last_used: int  # on the clock of the store: the larger, the later
    head: Head | None  # of the first record that has one
    is_whole: bool  # else damage or an eviction removed its first tokens: no match finds it

    def tokens(self) -> list[int]:
        """Return all token ids."""
        return [token for ids in self.token_ids for token in ids.tolist()]

    def facts(self) -> dict[str, Any]:
        """Return the members as JSON, without token ids and head."""
        return {
            "prompt": self.key,
            "fingerprint": f"sha256:{self.fingerprint}",
            "model": self.model,
            "whole": self.is_whole,
            "tokens": self.length,
            "extra": self.extra,
            "kind": self.kind,
            "bytes": self.nbytes,
            "pinned": self.pinned,
            "last_used": self.last_used,
        }


def prompt_table(title: str, prompts: list[StoredPrompt]) -> Table:
    """Return a row for each prompt, with the number of its extras if one has some."""
    rows = [
        (
            p.key[:_DIGITS],
            shorten(p.model, _LABEL) if p.is_whole else "its first tokens are lost",
            p.length,
            p.kind,
            p.nbytes,
            "yes" if p.pinned else "no",
        )
        for p in prompts
    ]
    if not any(p.extra for p in prompts):
        return Table(title, _COLUMNS, rows)
    columns = [*_COLUMNS, "extra [n]"]
    return Table(
        title, columns, [(*row, len(p.extra)) for row, p in zip(rows, prompts, strict=True)]
    )


def list_prompts(log: _core.PromptLog, path: str) -> list[StoredPrompt]:
    """Return the stored prompts, the most recently used first.

    Each is a snapshot, or a block that no other record continues. `log`: the records of the store.
    `path`: of the store, for errors.
    """
    records = {record.key: record for record in map(_Record._make, log.records())}
    continued = {record.parent for record in records.values()}
    tips = [r for r in records.values() if r.key not in continued or r.kind == SNAPSHOT]
    prompts = [_prompt_of(tip, records, path) for tip in tips]
    return sorted(prompts, key=lambda each: each.last_used, reverse=True)


def _prompt_of(tip: _Record, records: dict[bytes, _Record], path: str) -> StoredPrompt:
    """Return the prompt that ends with the record `tip`; `records`: all by key.

    It begins at the first record whose predecessor is not stored. A cycle of records, in a damaged
    store, ends it too.
    """
    chain = [tip]
    while chain[-1].parent in records and len(chain) <= len(records):
        chain.append(records[chain[-1].parent])
    heads = (_head_of(record, path) for record in reversed(chain))
    head = next((each for each in heads if each is not None), None)
    return StoredPrompt(
        key=tip.key.hex(),
        fingerprint=tip.fingerprint.hex(),
        model="?" if head is None else head.label,
        length=sum(len(record.token_ids) for record in chain),
        token_ids=[record.token_ids for record in reversed(chain)],
        extra=shown_extras(b"".join(record.extras for record in reversed(chain))),
        kind="snapshot" if tip.kind == SNAPSHOT else "block",
        nbytes=sum(record.nbytes for record in chain),
        pinned=tip.pinned,
        last_used=tip.last_used,
        head=head,
        is_whole=chain[-1].end == len(chain[-1].token_ids),
    )


def _head_of(record: _Record, path: str) -> Head | None:
    """Return the head in the description of a record; None for a block after the first."""
    try:
        return head_of(record.description, path)
    except FormatError:  # of a block that is not the first one
        return None
