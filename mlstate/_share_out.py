"""Which of the arrays that several ranks have each of them stores, and whether they agree.

Ranks tell each other a digest of what they save. Where digests differ, the first rank of each
kind tells all what it has; so what is sent does not grow with ranks that are alike.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ._dtypes import label_of, name_of
from ._layout import Layout, Shard, Steps
from .errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .collectives import ProcessGroup

    _Dict: TypeAlias = "dict[str, Any] | None"

_DIGEST_BYTES = 32
_SECTIONS = ("params", "optim_state")


class Share(NamedTuple):
    """What a rank is to store.

    Attributes
    ----------
    mine : two frozensets of str, or None
        The names of whole arrays that are this rank's, by section; None: all of them.
    copies : bytes
        Names of shards that another rank must store, where it is for this rank to tell them.
    error : BaseException, optional
        Why nothing is to be saved: of this rank, or what another one met.
    """

    mine: tuple[frozenset[str], frozenset[str]] | None = None
    copies: bytes = b""
    error: BaseException | None = None


# ---- names ----


def _entries(model: _Dict, optimizer: _Dict) -> Iterator[tuple[str, Any]]:
    """All arrays by their names, with their section."""
    for section, state in ((0, model), (1, optimizer)):
        for name, value in () if state is None else state.items():
            yield f"{section}/{name}", value


def whole_names(model: _Dict, optimizer: _Dict) -> list[str]:
    """Names of all arrays that are there whole, with their section, sorted."""
    return sorted(name for name, v in _entries(model, optimizer) if not isinstance(v, Shard))


def by_section(names: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Part such names again."""
    names = list(names)
    return (
        frozenset(name[2:] for name in names if name[0] == "0"),
        frozenset(name[2:] for name in names if name[0] == "1"),
    )


def _shown(name: str) -> str:
    """Such a name for an error."""
    return f"{_SECTIONS[int(name[0])]} {name[2:]!r}"


# ---- what ranks must have alike ----


def _facts_of(value: Any, known: dict[Any, str]) -> str:
    """Dtype and shape, whichever library made the array; nothing where it does not say.

    `known` has those that were told before: many arrays of a model are alike.
    """
    try:
        facts = value.dtype, label_of(value.dtype), tuple(value.shape)
    except AttributeError:
        return ""
    text = known.get(facts)
    if text is None:
        text = known[facts] = f"{name_of(value.dtype)} {facts[-1]}"
    return text


def _said(model: _Dict, optimizer: _Dict, steps: Steps) -> dict[str, Any]:
    """What one rank saves, as far as others have to know."""
    known: dict[Any, str] = {}
    entries = sorted(_entries(model, optimizer), key=itemgetter(0))
    whole = {name: _facts_of(v, known) for name, v in entries if not isinstance(v, Shard)}
    return {
        "model": model is not None,
        "optimizer": optimizer is not None,
        "layout": None if not steps else repr(Layout._of(steps)),
        "whole": whole,
    }


def _compare(everyone: dict[int, dict[str, Any]], cut: bool) -> None:
    """Refuse what ranks do not save alike: on each of them with the same words."""
    (rank, first), *others = everyone.items()
    for other, said in others:
        both = f"ranks {rank} and {other} do not save the same:"
        for what in ("model", "optimizer"):
            if said[what] != first[what]:
                has, lacks = (rank, other) if first[what] else (other, rank)
                raise ValueError(f"{both} rank {has} gives {what}=, and rank {lacks} does not")
        if said["layout"] != first["layout"]:
            raise ValueError(
                f"{both} layout= cuts by {first['layout']} on rank {rank}, and by "
                f"{said['layout']} on rank {other}"
            )
        lacking = said["whole"].keys() ^ first["whole"].keys() if cut else ()
        if lacking:
            raise ValueError(
                f"layout= cuts arrays that every rank has whole, but ranks {rank} and {other} "
                f"do not both have {min(lacking)[2:]!r}"
            )
    seen: dict[str, tuple[int, str]] = {}
    for other, said in everyone.items():
        for name, facts in said["whole"].items():
            rank, before = seen.setdefault(name, (other, facts))
            if facts != before and facts and before:
                raise ValueError(
                    f"{_shown(name)} is {before} on rank {rank}, and {facts} on rank {other}: "
                    "an array that is no Shard is taken as whole and the same on every rank; "
                    "give the parts of a tensor as Shard"
                )


def share_out(
    group: ProcessGroup,
    model: _Dict,
    optimizer: _Dict,
    steps: Steps,
    error: BaseException | None,
) -> Share:
    """Agree on who stores what; every rank calls it, with the `error` that it met before.

    Where all ranks have the same whole arrays they take turns. Else the first rank that has an
    array stores it.

    Raises
    ------
    ValueError
        The ranks do not save the same, as all of them find.
    """
    import hashlib
    import json

    said: dict[str, Any] = {}
    names: list[str] = []
    if error is None:
        try:
            said = _said(model, optimizer, steps)
            names = sorted(
                name
                for name, value in _entries(model, optimizer)
                if isinstance(value, Shard) and value.replica > 0
            )
        except Exception as caught:  # others wait to hear of it
            error = caught
    if error is not None:
        said = {"error": f"{type(error).__name__}: {error}"}
    texts = [json.dumps(said).encode(), "\0".join(names).encode("utf-8", "surrogatepass")]
    digests = [hashlib.sha256(text, usedforsecurity=False).digest() for text in texts]
    told = list(group.gather_bytes(digests[0] + (digests[1] if names else b"")) or [])
    kinds = [each[:_DIGEST_BYTES] for each in told]
    copied = [each[_DIGEST_BYTES:] for each in told]
    rank, world = group.rank, group.world_size
    copies = texts[1] if names and copied.index(digests[1]) == rank else b""
    if len(set(kinds)) == 1:
        mine = None if error is not None or steps else by_section([*said["whole"]][rank::world])
        return Share(mine, copies, error)
    # of ranks that have the same, the first tells what it is
    tells = kinds.index(digests[0]) == rank
    gathered = list(group.gather_bytes(texts[0] if tells else b"") or [])
    everyone = {other: json.loads(text) for other, text in enumerate(gathered) if text}
    if error is not None:
        return Share(error=error)
    for other, theirs in everyone.items():
        if "error" in theirs:
            peer = CollectiveError(f"not saved: rank {other}: {theirs['error']}")
            peer.rank = other
            return Share(error=peer)
    _compare(everyone, bool(steps))
    if steps:
        return Share(None, copies)
    earlier = {
        name for other, theirs in everyone.items() if other < rank for name in theirs["whole"]
    }
    return Share(by_section(name for name in said["whole"] if name not in earlier), copies)


def check_copies(catalog: Any, told: Iterable[bytes]) -> None:
    """Refuse copies of what no rank has stored; `told` are the `Share.copies` of all ranks."""
    stored: set[str] | None = None
    for rank, text in enumerate(told):
        if not text:
            continue
        if stored is None:
            stored = {f"{section}/{key}" for section in (0, 1) for key in catalog.keys(section)}
        for name in text.decode("utf-8", "surrogatepass").split("\0"):
            if name not in stored:
                raise ValueError(
                    f"{_shown(name)} on rank {rank} is a Shard with replica= above 0, and no "
                    "rank gives replica 0 of it, which is what would be stored"
                )
