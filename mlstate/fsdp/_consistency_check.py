"""The consistency check: ranks compare their next buckets before they reduce them.

Each rank sends a header of 64 bytes: a digest of its next bucket, the number of buckets that it
has ready, and the number of non-finite elements since the last header. All ranks receive all
headers, so all decide alike. If the headers differ, a second, longer exchange finds the rank and
the parameter.
"""

from __future__ import annotations

import json
import struct
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.text import ranks_text
from ..collectives._arguments import failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_MAGIC = b"mlsg"
_HEADER = struct.Struct("<4sHQ16sQdH16s")  # 64 bytes
_MAX_READY = 0xFFFF  # limit of a 16-bit field

REFUSED = 1  # this rank cannot take part with all of its gradients
ENDED = 2  # this rank has nothing more to reduce
CALL_REFUSED = 4  # this rank passed a wrong gradient to a call, so no rank reduces any of them
UNUSED = 8  # with ENDED: this rank reduced zeros for parameters that it did not use
IDLE = 16  # this rank has no inputs left: its gradients are zeros, and do not count in a mean


class Header(NamedTuple):
    """A rank's next bucket, and the result of its last buckets."""

    flags: int  # REFUSED, ENDED, CALL_REFUSED, UNUSED, IDLE
    sequence: int  # number of the bucket
    digest: bytes  # of the parameters' names, shapes and dtypes, and of the settings
    nonfinite: int  # infinite or NaN elements in this rank's sums since its last header
    waited: float  # seconds that this rank waited for the others at its last header
    ready: int = 1  # number of buckets that this rank has ready
    plan: bytes = b""  # digest of all buckets of the session; empty: later ones are unknown

    def pack(self) -> bytes:
        """Return the header as bytes."""
        return _HEADER.pack(_MAGIC, *self[:5], min(self.ready, _MAX_READY), self.plan)

    @classmethod
    def unpack(cls, data: bytes) -> Header | None:
        """Return the header in `data`, or None if `data` is not a header."""
        if len(data) != _HEADER.size or data[:4] != _MAGIC:
            return None
        return cls(*_HEADER.unpack(data)[1:])


def digest_of(facts: Iterable[str], settings: str) -> bytes:
    """Return a 16-byte digest of parameters and reduction settings."""
    from hashlib import blake2b

    return blake2b("\n".join([settings, *facts]).encode(), digest_size=16).digest()


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return settings as text: ``op=sum, bucket_bytes=0``."""
    return ", ".join([f"{name}={value}" for name, value in settings.items()])


class ConsistencyCheck:
    """The headers of one reduction session.

    `settings` must be equal on all ranks. Their keys appear in errors.
    """

    def __init__(self, group: Any, timeout: float | None, settings: Mapping[str, Any]) -> None:
        self._group = group
        self._timeout = timeout
        self._settings = settings
        self._waited = 0.0
        self.sequence = 0  # number of buckets that this rank has reduced

    def exchange_buckets(
        self,
        facts: Iterable[str],
        settings: Mapping[str, Any],
        nonfinite: int,
        *,
        is_refused: bool,
        is_call_refused: bool = False,
        is_idle: bool = False,
        ready: int = 1,
        plan: bytes = b"",
        pack: Callable[[], Any] | None = None,
    ) -> tuple[list[Header], int]:
        """Exchange headers before a bucket; `facts` describe its parameters.

        Returns the headers, and how many buckets all ranks reduce now: 0 if they disagree on
        the first one, more than one if all ranks have these ready and have equal plans. If the
        group can exchange bytes without this thread, `pack` runs meanwhile.
        """
        digest = digest_of(facts, settings_text({**self._settings, **settings}))
        flags = (REFUSED if is_refused else 0) | (CALL_REFUSED if is_call_refused else 0)
        flags |= IDLE if is_idle else 0
        header = Header(flags, self.sequence, digest, nonfinite, self._waited, ready, plan)
        headers = self._exchange(header, pack)
        same = {other[1:3] for other in headers}
        if len(same) > 1 or any(other.flags & ~IDLE for other in headers):
            return headers, 0
        if any(other.plan != headers[0].plan for other in headers):
            return headers, 1
        return headers, min([other.ready for other in headers])

    def exchange_end(self, nonfinite: int, *, has_unused: bool) -> tuple[list[Header], bool]:
        """Exchange headers after the last bucket; return them, and whether all ranks have ended."""
        flags = ENDED | (UNUSED if has_unused else 0)
        header = Header(flags, self.sequence, b"", nonfinite, self._waited)
        headers = self._exchange(header, None)
        return headers, all(other.flags & ENDED for other in headers)

    def find_failures(
        self, entries: Sequence[Sequence[str]], settings: Mapping[str, Any], *, has_ended: bool
    ) -> Result:
        """Exchange descriptions with all ranks and return the parameters that differ.

        `entries` describe this rank's next gradients: (name, fact, problem) of each parameter.
        """
        settings = {} if has_ended else {**self._settings, **settings}
        text = json.dumps([self.sequence, settings, has_ended, entries])
        return _compare_descriptions(self._group.gather_bytes(text.encode(), timeout=self._timeout))

    def _exchange(self, header: Header, pack: Callable[[], Any] | None) -> list[Header]:
        began = perf_counter()
        packing = 0.0
        gather = getattr(self._group, "_gather_meanwhile", None)
        if pack is None or gather is None:
            texts = self._group.gather_bytes(header.pack(), timeout=self._timeout)
        else:

            def pack_timed() -> None:
                nonlocal packing
                start = perf_counter()
                pack()
                packing = perf_counter() - start

            texts = gather(header.pack(), pack_timed, self._timeout)
        self._waited = perf_counter() - began - packing
        headers = []
        for rank, text in enumerate(texts):
            found = Header.unpack(text)
            if found is None:
                error = failed(
                    "reduce_scatter",
                    self._group.rank,
                    f"rank {rank} calls gather_bytes at this point; all ranks must reduce "
                    "the same gradients",
                )
                error.rank = rank
                raise error
            headers.append(found)
        return headers


# ---- if the headers differ ----


class Result(NamedTuple):
    """Result of comparing the descriptions of all ranks; equal on every rank.

    `good` has the parameters with equal descriptions on all ranks, in the order of the first
    rank. `failures` has the rank at fault if known, and the reason. Problems that ranks reported
    themselves are first, as others may follow from them.
    """

    good: list[str]
    failures: dict[str, tuple[int | None, str]]


def _describe_difference(facts: dict[int, str], what: str) -> tuple[int | None, str]:
    """Return the rank at fault, if exactly one rank differs, and a text with each rank's fact."""
    groups: dict[str, list[int]] = {}
    for rank, fact in facts.items():
        groups.setdefault(fact, []).append(rank)
    usual, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    said = "; ".join(f"{ranks_text(ranks, len(ranks))}: {fact}" for fact, ranks in groups.items())
    alone = others[0][0] if len(others) == 1 and len(others[0]) < len(usual) else None
    return alone, f"{what} ({said})"


def _common_failure(described: Sequence[Any]) -> tuple[int | None, str] | None:
    """Return a failure of all gradients, if settings or sequence numbers of ranks differ."""
    places = {rank: f"bucket {of[0]}" for rank, of in enumerate(described)}
    if len(set(places.values())) > 1:
        return _describe_difference(places, "ranks are at different places of a run")
    given = {rank: of[1] for rank, of in enumerate(described) if not of[2]}
    names = {name for settings in given.values() for name in settings}
    equal = {name for name in names if len({str(of.get(name)) for of in given.values()}) == 1}
    if equal == names:
        return None
    texts = {
        rank: settings_text({name: of[name] for name in of if name not in equal})
        for rank, of in given.items()
    }
    return _describe_difference(texts, "the settings of FSDP differ between ranks")


def _compare_descriptions(texts: Sequence[bytes]) -> Result:
    """Compare the descriptions of all ranks; return the good parameters and the failures."""
    described: list[Any] = [json.loads(text) for text in texts]
    ranks = range(len(described))
    in_all = _common_failure(described)
    names: dict[str, None] = {}
    entries: list[dict[str, list[str]]] = []
    for _, _, _, listed in described:
        entries.append({entry[0]: entry for entry in listed})
        names.update(dict.fromkeys(entry[0] for entry in listed))
    reported: dict[str, tuple[int | None, str]] = {}
    failures: dict[str, tuple[int | None, str]] = {}
    for name in names:
        absent = [rank for rank in ranks if name not in entries[rank]]
        wrong = [(rank, e[name][2]) for rank, e in enumerate(entries) if name in e and e[name][2]]
        facts = {rank: e[name][1] for rank, e in enumerate(entries) if name in e}
        if wrong:
            reasons = "; ".join(f"rank {rank}: {what}" for rank, what in wrong)
            reported[name] = wrong[0][0], reasons
        elif in_all is not None:
            failures[name] = in_all
        elif absent:
            doing = "; ".join(_describe_work(rank, described[rank]) for rank in absent)
            failures[name] = (absent[0], f"missing on {ranks_text(absent, len(absent))} ({doing})")
        elif len(set(facts.values())) > 1:
            failures[name] = _describe_difference(facts, "ranks do not reduce the same")
    failures = {**reported, **failures}
    return Result([name for name in names if name not in failures], failures)


def _describe_work(rank: int, described: Any) -> str:
    """Return a text about the current work of a rank that lacks a parameter."""
    sequence, _, has_ended, listed = described
    if has_ended:
        return f"rank {rank} has ended after {sequence} buckets"
    names = ", ".join(repr(entry[0]) for entry in listed[:3])
    return f"rank {rank} reduces {names}{', …' if len(listed) > 3 else ''}"
