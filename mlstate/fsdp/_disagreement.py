"""Ranks that reduce different gradients: the rank and parameter at fault, and the text of it.

Each rank sends a description of its next gradients; all ranks compare all descriptions alike.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.text import ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def settings_text(settings: Mapping[str, object]) -> str:
    """Return settings as text for an error: ``op=sum, bucket_bytes=0``."""
    return ", ".join([f"{name}={value}" for name, value in settings.items()])


class Result(NamedTuple):
    """Result of comparing the descriptions of all ranks; equal on every rank.

    `good` has the names of the parameters with equal descriptions on all ranks, in the order of
    rank 0. `failures` has by name the rank at fault (None: not known) and the reason. Problems
    that ranks reported themselves come before differences, which may follow from them.
    """

    good: list[str]
    failures: dict[str, tuple[int | None, str]]


def describe_difference(facts: dict[int, str], label: str) -> tuple[int | None, str]:
    """Return the only rank with another fact than a majority, and a text for the error.

    The rank is None if several differ, or no majority agrees. `facts`: by rank, a text that should
    be equal on all ranks. `label`: name of the difference, the start of the error text.
    """
    groups: dict[str, list[int]] = {}
    for rank, fact in facts.items():
        groups.setdefault(fact, []).append(rank)
    # the largest group first; of equal ones, that with the lowest rank
    usual, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    facts_text = "; ".join(
        f"{ranks_text(ranks, len(ranks))}: {fact}" for fact, ranks in groups.items()
    )
    alone = others[0][0] if len(others) == 1 and len(others[0]) < len(usual) else None
    return alone, f"{label} ({facts_text})"


def _common_failure(described: Sequence[Any]) -> tuple[int | None, str] | None:
    """Return (rank at fault or None, reason) if settings or bucket numbers of ranks differ.

    Then all gradients fail alike; None if they are equal. `described`: by rank, the list that
    `ConsistencyCheck.find_failures` sends: bucket number, settings, whether the rank has ended,
    and its entries. Ranks that have ended send no settings.
    """
    positions = {rank: f"bucket {number}" for rank, (number, *_) in enumerate(described)}
    if len(set(positions.values())) > 1:
        return describe_difference(positions, "ranks are at different places of a run")
    settings_of_ranks = {
        rank: settings
        for rank, (_, settings, has_ended, _) in enumerate(described)
        if not has_ended
    }
    names = {name for settings in settings_of_ranks.values() for name in settings}
    equal = {
        name
        for name in names
        if len({str(each.get(name)) for each in settings_of_ranks.values()}) == 1
    }
    if equal == names:
        return None
    texts = {
        rank: settings_text({name: settings[name] for name in settings if name not in equal})
        for rank, settings in settings_of_ranks.items()
    }
    return describe_difference(texts, "the settings of FSDP differ between ranks")


def compare_descriptions(texts: Sequence[bytes]) -> Result:
    """Compare the descriptions of all ranks; return the good parameters and the failures.

    `texts`: by rank, a JSON list of bucket number, settings, whether the rank has ended, and its
    entries, as `ConsistencyCheck.find_failures` sends it. An entry is a list of the parameter's
    name, a fact that must be equal on all ranks, and the rank's own problem with it, or "".
    """
    described: list[Any] = [json.loads(text) for text in texts]
    ranks = range(len(described))
    in_all = _common_failure(described)
    names: dict[str, None] = {}  # of all ranks, in order of first appearance
    # by rank and name: a fact that must be equal on all ranks, and a problem or ""
    entries: list[dict[str, tuple[str, str]]] = []
    for _, _, _, listed in described:
        entries.append({name: (fact, problem) for name, fact, problem in listed})
        names.update(dict.fromkeys(entries[-1]))
    # problems that ranks reported, and differences; both by name: (rank at fault or None, reason)
    reported: dict[str, tuple[int | None, str]] = {}
    failures: dict[str, tuple[int | None, str]] = {}
    for name in names:
        by_rank = {rank: entries[rank][name] for rank in ranks if name in entries[rank]}
        absent = [rank for rank in ranks if rank not in by_rank]
        facts = {rank: fact for rank, (fact, _) in by_rank.items()}
        problems = {rank: problem for rank, (_, problem) in by_rank.items() if problem}
        if problems:
            reasons = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
            reported[name] = min(problems), reasons
        elif in_all is not None:
            failures[name] = in_all
        elif absent:
            work = "; ".join(_describe_work(rank, described[rank]) for rank in absent)
            failures[name] = (absent[0], f"missing on {ranks_text(absent, len(absent))} ({work})")
        elif len(set(facts.values())) > 1:
            failures[name] = describe_difference(facts, "ranks do not reduce the same")
    failures = {**reported, **failures}
    return Result([name for name in names if name not in failures], failures)


def _describe_work(rank: int, described: Any) -> str:
    """Return a text about what `rank`, which lacks a parameter, does instead, for the error.

    `described`: the rank's list, as in `_common_failure`.
    """
    sequence, _, has_ended, listed = described
    if has_ended:
        return f"rank {rank} has ended after {sequence} buckets"
    names = ", ".join(repr(entry[0]) for entry in listed[:3])
    return f"rank {rank} reduces {names}{', …' if len(listed) > 3 else ''}"
