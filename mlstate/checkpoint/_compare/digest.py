"""`mlstate.digest`: of states in memory, on one rank or all, and of every path that `load` takes.

A path is read once, in batches of bounded memory; its bytes are verified as by a load. Tensors
whose digests a save has recorded are not read.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from ..._common.arrays import is_torch, refuse_given_away, refuse_unstorable
from ..._common.backend import backend_of, is_module, is_optimizer
from ..._common.set_module import set_module
from ..._common.text import shorten
from ..._sharding.backend import ShardBackend
from ...collectives._arguments import optional_group
from ...collectives._consensus import gather_values
from ...errors import ChecksumError
from ...state._digest import (
    Digest,
    Part,
    add_lanes,
    join_parts,
    part_of,
    parts_from_json,
)
from .._loaded_state import LoadedState
from .._save.content import states_of
from .._sources.indexed import IndexedSource
from .._sources.open_source import open_source
from .diff import list_entries, name_entries, name_of_keys
from .side import Side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..._common.callback import CountedProgress, Progress
    from ...collectives import ProcessGroup
    from .._records import TensorRecord
    from .._sources.protocol import Source

_PREFIXES = ("", "optimizer.", "states.")  # of the names in a section
PART_BYTES = 64 << 20  # read at a time, of a large tensor or of several


@set_module("mlstate")
def digest(what: Any, *, group: ProcessGroup | None = None) -> Digest:
    """Return a number for each tensor that does not depend on how tensors are divided.

    Equal digests mean equal names, dtypes, shapes and bits: of a model before and after a
    refactoring, of a checkpoint and its export, of a trainer and an inference engine whose ranks
    have other parts.

    Parameters
    ----------
    what : mapping, torch.nn.Module, torch.optim.Optimizer, LoadedState, str or os.PathLike
        A state: arrays, tensors and `Shard` by name, a module or an optimizer; or a mapping of
        names to those, such as ``{"model": model, "optimizer": optimizer}``, whose names get the
        prefixes that they have in a checkpoint. DTensors and parts of FSDP1 count by their place in
        the whole tensor. Or a path or URL that `load` takes: its tensors are read once, in bounded
        memory, and verified. A checkpoint that was saved with ``digest=True`` lists the digests of
        its tensors, and these are not read: `verify` finds damage in their files.
    group : ProcessGroup, optional
        The ranks that have the parts of the tensors; all of them call this. They exchange the
        digests of their parts, not the elements. Default: this process has all.

    Returns
    -------
    Digest
        A mapping of name to `TensorDigest` (dtype, shape, value), the same on every rank. Names of
        a checkpoint's optimizer begin with ``"optimizer."``, names of named states with
        ``"states."``. Values of parameter groups, such as a learning rate, do not count.

    Raises
    ------
    CompatibilityError
        Ranks have different dtypes, shapes or bits of one tensor, or their parts overlap or do not
        cover a tensor. The message names the tensor and the rank.
    TypeError
        A DTensor has partial values, or a value is not a state.
    StoreError, FormatError, ChecksumError
        As for `load`.

    Notes
    -----
    The digest has 128 bits; a change within 8 adjacent bytes of an element always changes it. It
    finds accidents, and is not cryptographic: `StateDict.digest` is a SHA-256, which depends on
    each rank's part. Elements in main memory are read once and not copied, except flat parts that
    are not contiguous, and elements of dtypes that only NumPy knows; those on a device stay there.

    Examples
    --------
    >>> import numpy as np, mlstate
    >>> from mlstate.checkpoint import Layout
    >>> from mlstate.testing import run_ranks
    >>> weights = np.arange(12.0).reshape(4, 3)
    >>> def divided(group):
    ...     shard = Layout.axis(1, 3).shard(weights, group.rank)
    ...     return mlstate.digest({"w": shard}, group=group)
    >>> run_ranks(3, divided)[0] == mlstate.digest({"w": weights})
    True
    """
    return read_digest(what, optional_group(group), recorded=True)


def read_digest(state: Any, group: ProcessGroup | None, *, recorded: bool = False) -> Digest:
    """Return the digest of a state or a path; `recorded`: as for `_stored_parts`."""
    if group is None or group.world_size == 1:
        return join_parts([parts_of(state, None, recorded=recorded)])
    values = gather_values(group, "digest", lambda: parts_of(state, group, recorded=recorded))
    return join_parts([*map(parts_from_json, values)])


def digest_of(source: Source, progress: CountedProgress) -> Digest:
    """Return the digest of the tensors of a source."""

    def read() -> Digest:
        side = Side(source, verify=True)
        with progress(side.total_bytes) as report:
            return join_parts([dict(_stored_parts(side, 0, 1, report, recorded=True))])

    return source.attempt(read)


def has_digests(source: Source) -> bool:
    """Return whether the save of a source has recorded digests."""
    return _with_all_indexes(source) is not None


def _with_all_indexes(source: Source) -> IndexedSource | None:
    """Return a source of its own for the same root, which lists all parts; None without digests.

    A source that was read lists the parts that were needed.
    """
    if not isinstance(source, IndexedSource) or source.format != "mlstate":
        return None
    opened = IndexedSource(source.files, source.root, source.manifest)
    return opened if any(map(opened.merged.digests, range(len(_PREFIXES)))) else None


def require_equal_copy(
    source: Source, path: str | os.PathLike[str], *, is_whole: bool = False
) -> None:
    """Read a copy of a source at `path`, and compare it with the digests that the source lists.

    `is_whole`: the copy must have every tensor that has one. Does nothing without digests. Raises
    ChecksumError if a tensor differs.
    """
    listed = _with_all_indexes(source)
    if listed is None:
        return
    stored = _recorded_parts(Side(listed, verify=True))
    copy = read_digest(path, None)
    for name, entry in join_parts([stored]).items():
        if copy.get(name, None if is_whole else entry) != entry:
            raise ChecksumError(
                f"{os.fspath(path)}: {shorten(name, 80)!r} differs from {source.path}, whose save "
                "recorded its digest: do not use this copy",
                name=name,
            )


def parts_of(what: Any, group: ProcessGroup | None, *, recorded: bool = False) -> dict[str, Part]:
    """Return the digests of this rank's parts by name; of a path, of its share of the tensors.

    `recorded`: as for `_stored_parts`.
    """
    rank, ranks = (0, 1) if group is None else (group.rank, group.world_size)
    if isinstance(what, str | os.PathLike):
        source = open_source(what)

        def read() -> dict[str, Part]:
            side = Side(source, verify=True)
            return dict(_stored_parts(side, rank, ranks, None, recorded=recorded))

        return source.attempt(read)
    return {name: part_of(array) for name, array in _live_entries(what, ranks).items()}


def _live_entries(what: Any, ranks: int) -> dict[str, Any]:
    """Return the arrays and parts of a state in memory by name; `ranks`: that hold it together."""
    if isinstance(what, LoadedState):
        what = {"model": what.model, "optimizer": what.optimizer, **_named(what.states or {})}
    if is_module(what) or is_optimizer(what) or hasattr(what, "get_state_dict"):
        what = {"model": what}
    if not hasattr(what, "keys"):
        raise TypeError(
            "digest: a state must be a mapping of str to arrays, a module, an optimizer or a path, "
            f"got {type(what).__name__}"
        )
    module = what["model"] if "model" in what and is_module(what["model"]) else None
    entries: list[Any] = []
    for name in what:
        if what[name] is not None:
            entries += list_entries((name,), _state_of(what[name], module, ranks))
    arrays = name_entries(entries, name_of_keys)
    for name, array in arrays.items():
        if is_torch(array):  # a DTensor becomes a Shard
            arrays[name] = backend_of(array, ShardBackend).part_of(name, array)
    refuse_given_away(arrays)
    refuse_unstorable(arrays)
    return arrays


def _named(states: Any) -> dict[str, Any]:
    """Return named states with the prefix of their names."""
    return {f"states.{name}": state for name, state in states.items()}


def _state_of(value: Any, module: Any, ranks: int) -> Any:
    """Return a value of a state as arrays or a container of them.

    `module`: has the parameters of an optimizer; None: unknown.
    """
    if is_optimizer(value):
        return states_of(module, value, ranks)[1]
    if is_module(value) or hasattr(value, "get_state_dict"):
        tensors, _, (others, _) = states_of(value, None, ranks)
        return {**tensors, **others}
    return value


def _recorded_parts(side: Side) -> dict[str, Part]:
    """Return the digests that the save of a path has recorded, by name."""
    parts = {}
    for section in range(len(_PREFIXES)):
        for key, lanes in side.digests(section).items():
            record: TensorRecord = side.entries[section][key]
            box = (((0,) * len(record.shape), record.shape),)
            parts[_stored_name(section, key)] = Part(record.dtype, record.shape, box, lanes)
    return parts


def _stored_parts(
    side: Side, rank: int, ranks: int, progress: Progress, *, recorded: bool
) -> Iterator[tuple[str, Part]]:
    """Yield name and digest of each whole tensor of a path that is in a rank's share.

    `recorded`: do not read tensors whose digests the save has recorded.
    """
    known = _recorded_parts(side) if recorded else {}
    yield from [*known.items()][rank::ranks]
    for section in range(len(_PREFIXES)):
        stored = [
            key
            for key in side.entries[section]
            if side.is_stored(section, key) and _stored_name(section, key) not in known
        ]
        for batch in side.batches(section, stored[rank::ranks], PART_BYTES):
            if side.memory(section, batch[0]) > PART_BYTES:
                parts = {batch[0]: _large_part(side, section, batch[0])}
            else:
                parts = {key: part_of(array) for key, array in side.arrays(section, batch).items()}
            for key, part in parts.items():
                yield _stored_name(section, key), part
            if progress is not None:
                progress(sum(side.nbytes(section, key) for key in batch))
    yield from ((name, part_of(array)) for name, array in _nested_arrays(side).items())


def _stored_name(section: int, key: str) -> str:
    """Return the name in a digest of a stored tensor."""
    prefix = _PREFIXES[section]
    return prefix + (key.replace("/", ".", 1) if prefix == _PREFIXES[-1] else key)


def _nested_arrays(side: Side) -> dict[str, Any]:
    """Return the arrays of nested values of a path, which are in memory, by name."""
    nested = [*list_entries(("states",), side.nested)] if side.nested else []
    return name_entries(nested, name_of_keys)


def _large_part(side: Side, section: int, key: str) -> Part:
    """Return the digest of a tensor that is read in several parts."""
    record: TensorRecord = side.entries[section][key]
    count = -(-record.nbytes // PART_BYTES)
    box = (((0,) * len(record.shape), record.shape),)
    lanes = add_lanes(part_of(side.cut(section, key, count, i)).lanes for i in range(count))
    return Part(record.dtype, record.shape, box, lanes)


def readers_of(state: Any, ranks: int) -> dict[str, Callable[[], Any]]:
    """Return for each tensor that `digest` counts, by its name, a function that returns it.

    `ranks`: that hold a state in memory together; each reads its parts.
    """
    if not isinstance(state, str | os.PathLike):
        arrays, readers = _live_entries(state, ranks), {}
    else:
        source = open_source(state)
        side = source.attempt(lambda: Side(source, verify=True))
        arrays = _nested_arrays(side)
        readers = {
            _stored_name(section, key): partial(_read_whole, side, section, key)
            for section in range(len(_PREFIXES))
            for key in side.entries[section]
            if side.is_stored(section, key)
        }
    return readers | {name: partial(arrays.get, name) for name in arrays}


def _read_whole(side: Side, section: int, key: str) -> Any:
    """Return a tensor of a path."""
    return side.arrays(section, [key])[key]
