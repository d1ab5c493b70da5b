"""What ranks tell each other before they reduce: one short message for what all have ready.

A message says which bucket its rank is about to reduce, how many it has ready, and what became
of those before. All ranks see all messages and so come to the same conclusion; only where these
differ does a second, longer exchange find out which rank and which parameter it was.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_MAGIC = b"mlsg"
_HEAD = struct.Struct("<4sHQ16sQdH16s")  # 64 bytes
_MOST = 0xFFFF  # buckets that a message can tell of

REFUSED = 1  # this rank cannot take part with all of its gradients
ENDED = 2  # this rank has nothing more to reduce


class Head(NamedTuple):
    """What a rank says of its next buckets, and of those before.

    Attributes
    ----------
    flags : int
        REFUSED, ENDED.
    sequence : int
        Number of the bucket.
    digest : bytes
        Of the parameters with their shapes and dtypes, and of how they are to be reduced.
    nonfinite : int
        Elements of sums on this rank, since its last message, that are infinite or NaN.
    waited : float
        Seconds that this rank waited for the others with its last message.
    ready : int
        How many buckets this rank has ready.
    plan : bytes
        A digest as well, of all buckets; empty where nothing is known of those to come.
    """

    flags: int
    sequence: int
    digest: bytes
    nonfinite: int
    waited: float
    ready: int = 1
    plan: bytes = b""

    def pack(self) -> bytes:
        """Return the message."""
        return _HEAD.pack(_MAGIC, *self[:5], min(self.ready, _MOST), self.plan)

    @classmethod
    def unpack(cls, data: bytes) -> Head | None:
        """Return what a message says; None where another program sent it."""
        if len(data) != _HEAD.size or data[:4] != _MAGIC:
            return None
        return cls(*_HEAD.unpack(data)[1:])


def digest_of(facts: Iterable[str], terms: str) -> bytes:
    """Return 16 bytes that stand for what is reduced, and how."""
    from hashlib import blake2b

    return blake2b("\n".join([terms, *facts]).encode(), digest_size=16).digest()


def settings_text(settings: Mapping[str, Any]) -> str:
    """Write settings as they are passed: ``op=sum, bucket_bytes=0``."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def all_agree(heads: Sequence[Head | None]) -> bool:
    """Whether all ranks are about to reduce the same, and can."""
    first = heads[0]
    return first is not None and all(
        head is not None and head[:3] == first[:3] and not head.flags & REFUSED for head in heads
    )


def ready_on_all(heads: Sequence[Head]) -> int:
    """How many buckets can be reduced by ranks that agree on the first.

    Of the others they know that they are the same where their plans are.
    """
    same = all(head.plan == heads[0].plan for head in heads)
    return min(head.ready for head in heads) if same else 1


# ---- where they do not agree ----


def tell(
    sequence: int, settings: Mapping[str, Any], ended: bool, entries: Iterable[Sequence[str]]
) -> bytes:
    """Say at length what this rank is about to reduce: (name, fact, what is wrong) of each."""
    return json.dumps([sequence, settings, ended, [list(entry) for entry in entries]]).encode()


class Verdict(NamedTuple):
    """What ranks make of what they told each other: the same on each.

    Attributes
    ----------
    good : list of str
        Parameters that every rank has and describes alike, in the order of the first rank.
    failures : dict of str to tuple of (int or None, str)
        The rank that is to blame, and what is wrong, by parameter.
    """

    good: list[str]
    failures: dict[str, tuple[int | None, str]]


def _differing(facts: dict[int, str], what: str) -> tuple[int | None, str]:
    """Say which ranks describe a thing how; the one that stands alone is to blame."""
    groups: dict[str, list[int]] = {}
    for rank, fact in facts.items():
        groups.setdefault(fact, []).append(rank)
    usual, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    said = "; ".join(f"{ranks_text(ranks)}: {fact}" for fact, ranks in groups.items())
    alone = others[0][0] if len(others) == 1 and len(others[0]) < len(usual) else None
    return alone, f"{what} ({said})"


def _out_of_step(told: Sequence[Any]) -> tuple[int | None, str] | None:
    """Say in what ranks differ that makes every gradient fail: settings, or their place."""
    places = {rank: f"bucket {of[0]}" for rank, of in enumerate(told)}
    if len(set(places.values())) > 1:
        return _differing(places, "ranks are at different places of a run")
    given = {rank: of[1] for rank, of in enumerate(told) if not of[2]}
    names = {name for settings in given.values() for name in settings}
    equal = {name for name in names if len({str(of.get(name)) for of in given.values()}) == 1}
    if equal == names:
        return None
    texts = {
        rank: settings_text({name: of[name] for name in of if name not in equal})
        for rank, of in given.items()
    }
    return _differing(texts, "ranks have other settings of FSDP")


def judge(texts: Sequence[bytes]) -> Verdict:
    """Compare what all ranks told, and say which parameters can be reduced."""
    told: list[Any] = [json.loads(text) for text in texts]
    ranks = range(len(told))
    every = _out_of_step(told)
    names: dict[str, None] = {}
    entries: list[dict[str, list[str]]] = []
    for _, _, _, listed in told:
        entries.append({entry[0]: entry for entry in listed})
        names.update(dict.fromkeys(entry[0] for entry in listed))
    failures: dict[str, tuple[int | None, str]] = {}
    for name in names:
        absent = [rank for rank in ranks if name not in entries[rank]]
        wrong = [(rank, e[name][2]) for rank, e in enumerate(entries) if name in e and e[name][2]]
        facts = {rank: e[name][1] for rank, e in enumerate(entries) if name in e}
        if every is not None:
            failures[name] = every
        elif wrong:
            failures[name] = (
                wrong[0][0],
                "; ".join(f"rank {rank}: {what}" for rank, what in wrong),
            )
        elif absent:
            doing = "; ".join(_doing(rank, told[rank]) for rank in absent)
            failures[name] = (absent[0], f"missing on {ranks_text(absent)} ({doing})")
        elif len(set(facts.values())) > 1:
            failures[name] = _differing(facts, "ranks do not reduce the same")
    return Verdict([name for name in names if name not in failures], failures)


def _doing(rank: int, told: Any) -> str:
    """Say what a rank does in the place of what it should do."""
    sequence, _, ended, listed = told
    if ended:
        return f"rank {rank} has ended after {sequence} buckets"
    names = ", ".join(repr(entry[0]) for entry in listed[:3])
    return f"rank {rank} reduces {names}{', …' if len(listed) > 3 else ''}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Write ranks for people: ``rank 1``, ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
