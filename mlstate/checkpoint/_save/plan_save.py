"""`plan_save`: files and bytes of a save, without doing it."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from ... import _core
from ..._common.arguments import check_int
from ..._common.budget import parse_size
from ..._common.set_module import set_module
from ..._sharding.layout import Layout, Shard, steps_of
from .._options import PACK_BELOW, PACK_BELOW_MOST
from .._store.checkpoint_files import patterns_of
from .content import refuse_empty_save, states_of
from .replica_assignment import by_section, whole_names

_GENERATION = "0" * 16  # as long as a save's


@set_module("mlstate.checkpoint.records")
class SavePlan(NamedTuple):
    """The shards, files and bytes that one rank of a save would write.

    Attributes
    ----------
    rank, world_size : int
        The rank, and the number of ranks.
    shards : int
        Number of shards that the rank stores.
    data_bytes : int
        Bytes of these shards.
    files : dict of str to int
        Sizes in bytes of the rank's shard files, by their paths in the folder. The generation
        in the paths is all zeros.
    index_bytes : int
        Bytes of the rank's index.
    manifest_bytes : int
        Bytes of the manifest for this rank; the manifest has about this many for each rank.
    index_text : bytes
        Text of the index, with zeros as checksums.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.checkpoint import plan_save
    >>> plan_save({"w": np.ones((4, 2))}, rank=1, world_size=2, layout="rows").data_bytes
    32
    """

    rank: int
    world_size: int
    shards: int
    data_bytes: int
    files: dict[str, int]
    index_bytes: int
    manifest_bytes: int
    index_text: bytes

    def __repr__(self) -> str:
        return (
            f"SavePlan(rank {self.rank} of {self.world_size}: {self.shards:,} shards, "
            f"{self.data_bytes:,} bytes, {len(self.files):,} files, index {self.index_bytes:,} "
            f"bytes, manifest {self.manifest_bytes:,} bytes)"
        )


def _shape_only(value: Any) -> Any:
    """Return a tensor on a device as one on the CPU without memory; other values unchanged.

    All elements of the result share one zero, so its values are meaningless.
    """
    torch = sys.modules.get("torch")
    if isinstance(value, Shard):
        array = _shape_only(value.array)
        return value if array is value.array else value._with_array(array, value.tier)
    if torch is None or not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return value
    return torch.zeros((), dtype=value.dtype).expand(value.shape)


def _shapes_only(state: Any) -> dict[str, Any] | None:
    """Return a state with its tensors as of `_shape_only`, by name; None for None."""
    return None if state is None else {name: _shape_only(v) for name, v in dict(state).items()}


@set_module("mlstate.checkpoint")
def plan_save(
    model: object = None,
    optimizer: object = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    layout: Layout | str | None = None,
    pack_below_bytes: int | str = PACK_BELOW,
) -> SavePlan:
    """
    Return what one rank would write, without writing it.

    Elements are not read, so arrays need only shapes and dtypes: use tensors on torch's meta
    device, or ``numpy.broadcast_to(numpy.zeros((), dtype), shape)``, which take no memory.

    Parameters
    ----------
    model, optimizer : mapping of str to array or Shard, optional
        As for `save`; the state of this rank.
    rank, world_size : int, default 0 and 1
        The rank to plan for. An array that is not a `Shard` is treated as replicated: every
        rank holds all of it.
    layout : Layout or str, optional
        As for `save`.
    pack_below_bytes : int or str, default 262144
        As for `save`.

    Returns
    -------
    SavePlan
        Shards, files, bytes and the index.

    Raises
    ------
    TypeError, ValueError, CompatibilityError
        As for `save`; or the rank does not exist.

    Notes
    -----
    The plan describes a first save; a later save in the same folder does not write unchanged
    shards again. Time and memory grow with the rank's state, not with `world_size`.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.checkpoint import Layout, Shard, plan_save
    >>> shape, layout = (8192, 28672), Layout.rows(4096)  # 0.5 TB as float16 on 4,096 ranks
    >>> part = np.broadcast_to(np.zeros((), np.float16), layout.shape(shape, 7))
    >>> model = {f"layers.{i}.w": Shard(part, layout, 7, shape=shape) for i in range(1000)}
    >>> plan_save(model, rank=7, world_size=4096)
    SavePlan(rank 7 of 4096: 1,000 shards, 114,688,000 bytes, 4 files, index ... bytes, ...)
    """
    pack_below_bytes = parse_size("pack_below_bytes", pack_below_bytes, 0, PACK_BELOW_MOST)
    world_size = check_int("world_size", world_size, 1, (1 << 31) - 1)
    if not 0 <= check_int("rank", rank, -1 << 63) < world_size:
        raise ValueError(f"rank {rank} of {world_size} does not exist")
    refuse_empty_save(model, optimizer)
    states = states_of(model, optimizer, world_size)
    dicts = (_shapes_only(states[0]), _shapes_only(states[1]), None)
    steps = steps_of(layout, world_size) or ()
    own_names = None  # this rank writes all arrays that it has
    if world_size > 1 and not steps:  # round-robin, as `assign_replicas` divides equal states
        names = whole_names(dicts)[rank::world_size]
        own_names = by_section(names)
    gathered, nbytes = _core.shards_collect((rank, world_size), dicts, Shard, own_names, steps)
    text = _core.shards_plan(_GENERATION, gathered, pack_below_bytes)
    merged = _core.MergedIndex((text,), ("index",))
    [summary] = patterns_of(merged)
    [(_, _, _, shards, *_)] = merged.heads()
    numbers = [len(text), shards, nbytes]
    if summary is not None and world_size > 1:
        numbers += [rank, *summary.parts]
    # In the manifest, a rank has 8 digits of its index's CRC32C, and these numbers.
    described_bytes = len("0" * 8) + sum(len(f"{number}, ") for number in numbers)
    return SavePlan(
        rank=rank,
        world_size=world_size,
        shards=shards,
        data_bytes=nbytes,
        files=merged.files(),
        index_bytes=len(text),
        manifest_bytes=described_bytes,
        index_text=text,
    )
