"""The shards that one rank of a save writes; copies of tensors from devices to main memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ... import _core
from ..._common.arrays import named_refusals
from ..._sharding.layout import Shard, Steps, steps_of
from ...errors import CollectiveError
from .replica_assignment import Assignment, assign_replicas

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...collectives import ProcessGroup
    from .content import Dicts, SaveContent
    from .target import SaveTarget


def _array_of(value: Any) -> Any:
    return value.array if isinstance(value, Shard) else value


def is_on_device(value: Any) -> bool:
    """Return whether a value is a torch tensor, or a Shard of one, outside main memory."""
    return getattr(getattr(_array_of(value), "device", None), "type", "cpu") != "cpu"


def _on_host(name: str, value: Any, copy: Callable[[Any], Any] | None) -> Any:
    """Return a copy of a device tensor in main memory; a `Shard` stays one, of the tier "hot".

    `name`: for errors. `copy`: copies to memory that it provides; None: newly allocated memory.
    Raises BufferError for torch's meta device.
    """
    array = _array_of(value)
    if array.device.type == "meta":
        raise BufferError(f"{name!r} is a tensor on torch's meta device: it has no elements")
    copied = array.detach().cpu() if copy is None else copy(array.detach())
    if not isinstance(value, Shard):
        return copied
    return value._with_array(copied, value.tier or "hot")


class GatheredShards:
    """The shards that one rank writes, before they are written."""

    __slots__ = ("copies", "error", "header", "nbytes", "shards")

    def __init__(self, header: dict[str, Any], copies: bytes = b"") -> None:
        """Create the result without shards; the comments describe each attribute."""
        self.header = header  # description of the state in the manifest
        self.copies = copies  # names of shards that another rank must store, if to be reported
        self.shards: Any = None  # of `_core.shards_collect`; `write_and_commit` consumes them
        self.nbytes = 0
        self.error: BaseException | None = None  # why this rank cannot save with the others

    def fail(self, error: BaseException) -> None:
        """Drop the shards and keep the error; the next exchange reports it to other ranks."""
        self.shards = None
        self.error = error


def gather_shards(
    target: SaveTarget, content: SaveContent, copy: Callable[[Any], Any] | None = None
) -> GatheredShards:
    """Return the shards that this rank stores; every rank calls it, even after a failure.

    `copy` copies tensors on a device to main memory; None: to new memory. `content` loses its
    arrays. Errors are raised if this process saves alone; otherwise the result carries them, except
    a CollectiveError, which is always raised.
    """
    gathered = GatheredShards(content.header)
    try:
        steps: Steps = ()  # for arrays that are not a `Shard`; () if these stay whole
        if target.layout is not None and content.error is None:
            steps = steps_of(target.layout, target.world_size) or ()
        assigned = Assignment()
        if target.group is not None:
            with named_refusals(*content.dicts):
                assigned = _assign_replicas(target.group, steps, content)
        gathered.copies, gathered.error = assigned.copies, assigned.error
        if gathered.error is None:
            dicts, own_names = content.dicts, assigned.own_names
            if content.named.trees:
                content.named.add_trees(target.group, assigned.digests)
            ranks = (target.rank, target.world_size)
            with named_refusals(*dicts):
                _copy_to_host(dicts, own_names or (None, None, None), copy)
                gathered.shards, gathered.nbytes = _core.shards_collect(
                    ranks, dicts, Shard, own_names, steps
                )
    except CollectiveError:
        raise
    except BaseException as error:
        if target.group is None:
            raise
        gathered.fail(error)
    finally:
        # drop references to arrays, including references in the error's traceback
        content.dicts, content.error = (None, None, None), None
        content.named.trees.clear()
    return gathered


def _assign_replicas(group: ProcessGroup, steps: Steps, content: SaveContent) -> Assignment:
    """Agree with all ranks on which rank writes each whole array.

    Every rank calls it, even after a failure. `steps`: of the layout for these arrays. The
    optimizers' groups in `content` become the groups of all ranks, and its step the one of any
    rank. Raises ValueError if callers pass different steps or patterns, or one that matches no name
    on any rank.
    """
    digests: list[bytes] = []
    excluded = content.excluded
    try:
        step = -1 if content.step is None else int(content.step)
        packed_step = step.to_bytes(16, "little", signed=True)
        digests = [*content.named.digests(), excluded.used, packed_step]
    except BaseException as error:  # must not raise here: other ranks wait for a message
        content.error = content.error or error
    names = content.named.summary() + [f"exclude {pattern}" for pattern in excluded.patterns]
    kinds = _optimizer_kinds(content)
    groups = {label: kind["param_groups"] for label, kind in kinds.items()}
    assigned = assign_replicas(group, content.dicts, steps, content.error, names, digests, groups)
    if assigned.error is not None:
        return assigned
    *_, used, packed_steps = assigned.digests
    excluded.refuse_unused(used)
    for label, merged in (assigned.groups or {}).items():
        kinds[label]["param_groups"] = merged
    values = {int.from_bytes(each, "little", signed=True) for each in packed_steps} - {-1}
    # a step that the caller of any rank passes replaces the steps of optimizers
    steps_of_ranks = {each for each in values if each >= 0} or {-2 - each for each in values}
    if len(steps_of_ranks) > 1:
        raise ValueError(
            f"ranks pass different steps, {' and '.join(map(str, sorted(steps_of_ranks)))}: pass "
            "the same step= on every rank that passes one"
        )
    for only_step in steps_of_ranks:
        content.header["step"] = only_step
    return assigned


def _optimizer_kinds(content: SaveContent) -> dict[str, dict[str, Any]]:
    """Return the optimizers' descriptions in the manifest, by the optimizers' names in errors."""
    kinds = {f"states[{name!r}]": kind for name, kind in content.named.kinds.items()}
    kinds["optimizer"] = content.header.get("optimizer") or {}
    return {label: kind for label, kind in kinds.items() if "param_groups" in kind}


def _copy_to_host(
    dicts: Dicts,
    own_names: tuple[frozenset[str] | None, ...],
    copy: Callable[[Any], Any] | None,
) -> None:
    """Replace the device tensors in `dicts` that this rank stores by copies in main memory.

    `own_names`: of replicated tensors that this rank stores, by section; None: all. `copy`: as for
    `gather_shards`.
    """
    if sys.modules.get("torch") is None:
        return
    for state, names in zip(dicts, own_names, strict=True):
        for name, value in () if state is None else state.items():
            is_replicated = not isinstance(value, Shard)
            is_stored_here = (
                (names is None or name in names) if is_replicated else value.replica == 0
            )
            if is_stored_here and is_on_device(value):
                state[name] = _on_host(name, value, copy)  # type: ignore[index]
