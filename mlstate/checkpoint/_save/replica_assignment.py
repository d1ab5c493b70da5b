"""Which rank writes an array that several have; errors for ranks that save different states.

Ranks exchange digests of their states. If digests differ, the first rank with each digest sends
its summary to all. So the bytes sent do not grow with the number of ranks that have equal states.
"""

from __future__ import annotations

from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..._common.dtypes import label_of, name_of
from ..._sharding.layout import Layout, Shard, Steps
from ...errors import CollectiveError
from ...state._group_merge import merge_groups
from .._folder.names import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ... import _core
    from ...collectives import ProcessGroup

    _Dicts: TypeAlias = "Sequence[dict[str, Any] | None]"
    _Summary: TypeAlias = dict[str, Any]
    _Group: TypeAlias = dict[str, Any]

_DIGEST_BYTES = 32  # of a SHA-256


class Assignment(NamedTuple):
    """The arrays that a rank must write, or the reason why the ranks cannot save."""

    own_names: tuple[frozenset[str], ...] | None = None  # whole arrays by section; None for all
    copies: bytes = b""  # names of shards that another rank must write, if to be reported
    error: BaseException | None = None  # of this rank, or one that names another rank
    digests: tuple[set[bytes], ...] = ()  # of all ranks, for each own digest
    groups: Mapping[str, list[_Group]] | None = None  # of optimizers on all ranks, if they differ


# ---- names ----


def _entries(dicts: _Dicts) -> Iterator[tuple[str, Any]]:
    """Yield all arrays with their qualified names, such as ``0/w``: section and key."""
    for section, state in enumerate(dicts):
        for name, value in () if state is None else state.items():
            yield f"{section}/{name}", value


def whole_names(dicts: _Dicts) -> list[str]:
    """Return the sorted qualified names of all arrays that are not a `Shard`."""
    return sorted(name for name, v in _entries(dicts) if not isinstance(v, Shard))


def by_section(names: Iterable[str]) -> tuple[frozenset[str], ...]:
    """Return the names of each section, from qualified names such as ``0/w``."""
    names = list(names)
    return tuple(
        frozenset(name[2:] for name in names if name[0] == str(section))
        for section in range(len(SECTIONS))
    )


def _quote_name(name: str) -> str:
    """Return a qualified name in the form for error messages."""
    return f"{SECTIONS[int(name[0])]} {name[2:]!r}"


# ---- summaries: the properties that must agree between ranks ----


def _array_facts(value: Any, cache: dict[Any, str]) -> str:
    """Return dtype and shape as text, equal for all array libraries; "" without a dtype.

    `cache`: texts by dtype and shape, because many arrays of a model have the same.
    """
    try:
        # equal dtypes may have different labels, such as uint16 with the label bfloat16
        dtype, label, shape = value.dtype, label_of(value.dtype), tuple(value.shape)
    except AttributeError:
        return ""
    text = cache.get((dtype, label, shape))
    if text is None:
        text = cache[dtype, label, shape] = f"{name_of(dtype)} {shape}"
    return text


def _summarize(
    dicts: _Dicts, steps: Steps, states: Sequence[str], groups: Mapping[str, list[_Group]]
) -> _Summary:
    """Return what this rank saves, as other ranks compare it: names, dtypes, shapes, layout.

    `steps`: of the layout for whole arrays. `states`: kind and name of each named state, and of
    each pattern of ``exclude=``. `groups`: parameter groups by optimizer.
    """
    cache: dict[Any, str] = {}
    entries = sorted(_entries(dicts), key=itemgetter(0))
    replicated = {name: _array_facts(v, cache) for name, v in entries if not isinstance(v, Shard)}
    return {
        "model": dicts[0] is not None,
        "optimizer": dicts[1] is not None,
        "states": list(states),
        "layout": None if not steps else repr(Layout(steps)),
        "whole": replicated,
        "groups": groups,
    }


def _compare_sections(rank: int, first: _Summary, other: int, other_summary: _Summary) -> None:
    """Raise ValueError if two ranks pass different arguments to a save.

    `rank`, `other`: their numbers. `first`, `other_summary`: their summaries.
    """
    both = f"ranks {rank} and {other} do not save the same:"
    for section_name in ("model", "optimizer"):
        if other_summary[section_name] != first[section_name]:
            has, lacks = (rank, other) if first[section_name] else (other, rank)
            raise ValueError(f"{both} rank {has} gives {section_name}=, and rank {lacks} does not")
    lacking = set(other_summary["states"]) ^ set(first["states"])
    if lacking:
        name = min(lacking)
        has, lacks = (rank, other) if name in first["states"] else (other, rank)
        kind, _, name = name.partition(" ")
        text = f"exclude= has {name!r}" if kind == "exclude" else f"states= has {name!r} ({kind})"
        raise ValueError(f"{both} {text} on rank {has}, and not on rank {lacks}")
    if other_summary["layout"] != first["layout"]:
        raise ValueError(
            f"{both} layout= cuts by {first['layout']} on rank {rank}, and by "
            f"{other_summary['layout']} on rank {other}"
        )


def _compare_names(rank: int, first: _Summary, other: int, other_summary: _Summary) -> None:
    """Raise ValueError if one of the ranks `rank` and `other` lacks an array that a layout cuts.

    `first`, `other_summary`: their summaries.
    """
    lacking = other_summary["whole"].keys() ^ first["whole"].keys()
    if lacking:
        raise ValueError(
            f"layout= cuts arrays that every rank has whole, but ranks {rank} and {other} "
            f"do not both have {min(lacking)[2:]!r}"
        )


def _compare_arrays(summaries: dict[int, _Summary]) -> None:
    """Raise ValueError if a whole array has two dtypes or shapes on the ranks.

    `summaries`: each different one, by the first rank that has it.
    """
    seen: dict[str, tuple[int, str]] = {}
    for other, summary in summaries.items():
        for name, facts in summary["whole"].items():
            rank, before = seen.setdefault(name, (other, facts))
            if facts != before and facts and before:
                raise ValueError(
                    f"{_quote_name(name)} is {before} on rank {rank}, and {facts} on rank "
                    f"{other}: an array that is not a Shard must have the same dtype and shape on "
                    "every rank; pass parts of a tensor as Shard"
                )


def _compare(summaries: dict[int, _Summary], *, has_layout: bool) -> None:
    """Raise ValueError if ranks save different states; every rank raises the same error.

    `summaries`: each different one, by its first rank. `has_layout`: the save has a layout, which
    requires the same whole arrays on all ranks.
    """
    (rank, first), *others = summaries.items()
    for other, other_summary in others:
        _compare_sections(rank, first, other, other_summary)
        if has_layout:
            _compare_names(rank, first, other, other_summary)
    _compare_arrays(summaries)


# ---- messages ----


def _pack_local(
    dicts: _Dicts,
    steps: Steps,
    states: Sequence[str],
    groups: Mapping[str, list[_Group]],
    error: BaseException | None,
) -> tuple[_Summary, bytes, BaseException | None]:
    """Return this rank's summary, its replicas' names joined by NUL, and its error or None.

    The other parameters are as for `_summarize`. After an `error`, the summary has only its text.
    Never raises for an array, because other ranks wait for the message.
    """
    replicas: list[str] = []
    summary: _Summary = {}
    if error is None:
        try:
            summary = _summarize(dicts, steps, states, groups)
            entries = _entries(dicts)
            replicas = sorted(name for name, v in entries if isinstance(v, Shard) and v.replica > 0)
        except Exception as caught:  # must not raise here: other ranks wait for a message
            error = caught
    if error is not None:
        summary = {"error": f"{type(error).__name__}: {error}"}
        replicas = []
    return summary, "\0".join(replicas).encode("utf-8", "surrogatepass"), error


def _exchange_digests(
    group: ProcessGroup, summary: bytes, replicas: bytes, own_states: Sequence[bytes]
) -> tuple[list[int], bool, tuple[set[bytes], ...]]:
    """Compare the digests of all ranks' summaries; every rank calls it.

    `summary`: this rank's, as JSON text. `replicas`: names of its replicas, joined by NUL.
    `own_states`: digests of its nested states. Returns three values: for each rank, the first rank
    with an equal summary; whether this rank reports its `replicas`, as the first of several ranks
    with the same ones does; and for each digest in `own_states` the set of all ranks' digests. This
    last one is valid if all ranks save the same states, which the summaries show.
    """
    import hashlib

    own_digest = hashlib.sha256(summary, usedforsecurity=False).digest()
    if replicas:
        own_digest += hashlib.sha256(replicas, usedforsecurity=False).digest()
    tail = sum(map(len, own_states))  # bytes at the end of a message that are not yet divided
    # a message: digest of the summary, digest of the replicas if any, digests of the states
    messages = list(group.gather_bytes(own_digest + b"".join(own_states)) or [])
    summaries = [each[:_DIGEST_BYTES] for each in messages]
    first = {digest: summaries.index(digest) for digest in set(summaries)}
    reports = [each[_DIGEST_BYTES : len(each) - tail] for each in messages]
    is_reporter = bool(replicas) and reports.index(own_digest[_DIGEST_BYTES:]) == group.rank
    state_digests = []
    for state in own_states:
        state_digests.append({each[len(each) - tail :][: len(state)] for each in messages})
        tail -= len(state)
    return [first[digest] for digest in summaries], is_reporter, tuple(state_digests)


def _peer_error(summaries: dict[int, _Summary]) -> CollectiveError | None:
    """Return the error of the first rank that reports one in `summaries`; None if none does."""
    for rank, summary in summaries.items():
        if "error" in summary:
            return CollectiveError(f"not saved: rank {rank}: {summary['error']}", rank=rank)
    return None


# ---- the assignment ----


def _names_of_first_owner(
    rank: int, own_summary: _Summary, summaries: dict[int, _Summary]
) -> list[str]:
    """Return the qualified names of the whole arrays of `rank` that no lower rank has.

    It writes these. `own_summary`: of `rank`. `summaries`: by rank, each different summary once,
    under the first rank that has it.
    """
    earlier = {
        name
        for other, other_summary in summaries.items()
        if other < rank
        for name in other_summary["whole"]
    }
    return [name for name in own_summary["whole"] if name not in earlier]


def assign_replicas(
    group: ProcessGroup,
    dicts: _Dicts,
    steps: Steps,
    error: BaseException | None,
    states: Sequence[str] = (),
    digests: Sequence[bytes] = (),
    groups: Mapping[str, list[_Group]] = MappingProxyType({}),
) -> Assignment:
    """Agree on which rank writes each whole array; every rank calls it, even after an `error`.

    `dicts`: arrays of model, optimizer and named states, by name. `steps`: of the layout for whole
    arrays, () for none. `states` describes the named states, which must agree, and `digests` the
    content of some of them, which may differ. `groups` has the parameter groups of optimizers. If
    all ranks have the same whole arrays, these are divided round-robin. Otherwise the first rank
    that has an array writes it. An `error`, or a CollectiveError about another rank's, is returned
    in the result. If the ranks save different states, or a parameter has different values in their
    groups, every rank raises ValueError.
    """
    import json

    summary, replicas, error = _pack_local(dicts, steps, states, dict(groups), error)
    text = json.dumps(summary).encode()
    first, is_reporter, state_digests = _exchange_digests(group, text, replicas, digests)
    copies = replicas if is_reporter else b""
    rank = group.rank
    if len(set(first)) == 1:  # all ranks have equal summaries
        if error is not None or steps:
            return Assignment(None, copies, error, state_digests)
        own_names = by_section([*summary["whole"]][rank :: group.world_size])
        return Assignment(own_names, copies, None, state_digests)
    gathered = group.gather_bytes(text if first[rank] == rank else b"") or []
    summaries = {
        other: json.loads(other_text) for other, other_text in enumerate(gathered) if other_text
    }
    failed = _peer_error(summaries) if error is None else error
    if failed is not None:
        return Assignment(error=failed)
    _compare(summaries, has_layout=bool(steps))
    merged = {}
    for label in groups:
        groups_by_rank = {
            other: each["groups"][label]
            for other, each in summaries.items()
            if label in each["groups"]
        }
        if groups_by_rank:
            merged[label] = merge_groups(label, groups_by_rank)
    if steps:
        return Assignment(None, copies, None, state_digests, merged)
    own_names = by_section(_names_of_first_owner(rank, summary, summaries))
    return Assignment(own_names, copies, None, state_digests, merged)


def check_copies(merged: _core.MergedIndex, reports: Iterable[bytes]) -> None:
    """Raise ValueError for a replica that no rank wrote.

    `merged`: index of all ranks. `reports`: each rank's `copies`, names joined by NUL.
    """
    stored: set[str] | None = None
    for rank, text in enumerate(reports):
        if not text:
            continue
        if stored is None:
            stored = {
                f"{section}/{key}"
                for section in range(len(SECTIONS))
                for key in merged.keys(section)
            }
        for name in text.decode("utf-8", "surrogatepass").split("\0"):
            if name not in stored:
                raise ValueError(
                    f"{_quote_name(name)} on rank {rank} is a Shard with replica= above 0, but no "
                    "rank passes replica 0, the copy that is stored"
                )
