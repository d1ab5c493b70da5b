"""Strict names of a group: those that the targets of all ranks have together.

Stages of a pipeline and experts store other names on each rank in one checkpoint. A stored name is
unexpected only if no rank's target has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .._rank_messages import gather_bytes
from .._sections import STATES
from .._states.modules import entries_name, stored_entries
from .._store.name_globs import ALL_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...collectives import ProcessGroup
    from .._sections import Section
    from .._store.name_globs import Names
    from .loader import Loader
    from .targets import Prepared

_DIGEST_BYTES = 16


class TargetNames(NamedTuple):
    """Which of the stored names the targets of this rank load."""

    generation: str  # of the checkpoint
    # in an order that all ranks have: a text that is the same on all ranks; label of the section
    # and name of this rank's load; whether the targets load it
    rows: list[tuple[str, str, str, bool]]
    lacks: bool  # a target is strict, and lacks a name to load


def target_names(prepared: Prepared) -> TargetNames:
    """Return the stored names that this rank's targets load; reads no tensor.

    Raises the errors of the targets' modules and optimizers.
    """
    loader, targets = prepared.loader, prepared.names()
    chosen_names, _ = loader.chosen()
    rows, lacks = [], False
    for section in loader.sections:
        is_target, target = section.label in targets, targets.get(section.label)
        choice = chosen_names if section.number < STATES else ALL_NAMES
        for text, name, is_chosen in _stored_names(loader, section, choice):
            is_own = target is None or name in target
            if target is not None and section.is_optimizer:  # of a state, or of its parameter
                is_own |= name.rpartition(".")[0] in target
            rows.append((text, section.label, name, is_target and is_chosen and is_own))
            lacks |= is_target and is_chosen and not is_own
    lacks &= bool(loader.options["strict"])
    return TargetNames(loader.manifest.generation, rows, lacks)


def _stored_names(
    loader: Loader, section: Section, choice: Names
) -> Iterator[tuple[str, str, bool]]:
    """Yield for each name of a section a text, the same on all ranks, and whether it is loaded.

    The second item is the name of this rank's load. These are the section's tensors, the parameters
    in the groups of an optimizer, and the entries of a module that are not tensors, unless these
    differ between ranks. `choice`: the names that the user chose.
    """
    chosen = set(choice.select(section.names, section.number)[0])
    for key, name in sorted(zip(section.keys(section.names), section.names, strict=True)):
        yield f"{section.number}/{key}", name, name in chosen
    groups = getattr(section.restore({}, loader.folder), "param_groups", ())
    for number, group in enumerate(groups):
        for position, name in enumerate(group.get("params", ())):
            yield f"{section.label} group {number}, {position}", str(name), True
    kind = loader.states.get(entries_name(section.state))
    if kind is not None and "ranks" not in kind and not section.is_optimizer:
        entries = list(stored_entries(loader, section).entries)
        chosen = set(choice.select(entries, section.number)[0])
        for position, name in enumerate(entries):
            yield f"{section.label} entry {position}", name, name in chosen


def names_elsewhere(group: ProcessGroup, names: TargetNames | None) -> dict[str, set[str]] | None:
    """Return the names that only targets of other ranks load, by label; every rank calls this.

    `names`: None if this rank failed. Returns None if a rank failed or reads another checkpoint:
    all ranks must then agree on that. Names are exchanged only if a target lacks one. A rank that
    reads another choice of a folder's files is left out.
    """
    status = b"" if names is None else f"{names.generation} {names.lacks:d}".encode()
    replies = gather_bytes(group, status)
    if names is None or len({reply[:-1] for reply in replies}) > 1:
        return None
    if not any(reply.endswith(b"1") for reply in replies):
        return {}
    import hashlib

    texts = "\0".join(row[0] for row in names.rows).encode()
    digest = hashlib.blake2b(texts, digest_size=_DIGEST_BYTES, usedforsecurity=False).digest()
    has = np.array([row[-1] for row in names.rows], bool)
    others = np.zeros_like(has)
    for reply in gather_bytes(group, digest + np.packbits(has).tobytes()):
        if reply[:_DIGEST_BYTES] == digest:
            bits = np.frombuffer(reply, np.uint8, offset=_DIGEST_BYTES)
            others |= np.unpackbits(bits, count=others.size).astype(bool)
    elsewhere: dict[str, set[str]] = {}
    for position in np.flatnonzero(others & ~has):
        _, label, name, _ = names.rows[position]
        elsewhere.setdefault(label, set()).add(name)
    return elsewhere
