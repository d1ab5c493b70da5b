"""What a save would write and a load read, without doing it; through `mlstate.checkpoint`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from .._common.local_path import local_folder
from .._common.set_module import set_module
from .._sharding.layout import Layout, Shard, steps_of
from ._load import chosen_keys, ranks_of
from ._replica_assignment import by_section, whole_names
from ._save import PACK_BELOW, states_of
from ._store import folder as _folder
from ._store.name_selection import listed_names
from ._store.rank_indexes import Indexes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._store.manifest import Manifest

_GENERATION = "0" * 16


@set_module("mlstate.checkpoint")
class SavePlan(NamedTuple):
    """What one rank of a save would write.

    Attributes
    ----------
    rank, world_size : int
        Whose plan it is.
    shards : int
        That the rank stores.
    data_bytes : int
        Bytes of these.
    files : dict of str to int
        The rank's shard files by their paths in the folder, with their sizes in bytes. The
        generation in the paths is all zeros.
    index_bytes : int
        Bytes of the rank's index.
    manifest_bytes : int
        Bytes that the manifest has for this rank: all that it has for each.
    index_text : bytes
        Text of the index, with zeros for checksums.

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


@set_module("mlstate.checkpoint")
class FileRead(NamedTuple):
    """What a load would read of one shard.

    Attributes
    ----------
    path : str
        The file, in the checkpoint's folder.
    begin, end : int
        The first byte that is read, and behind the last one.
    nbytes : int
        How many of these are read.

    Examples
    --------
    >>> from mlstate.checkpoint import FileRead
    >>> FileRead("params/w.0-1.safetensors", 4096, 4128, 32).nbytes
    32
    """

    path: str
    begin: int
    end: int
    nbytes: int


@set_module("mlstate.checkpoint")
class LoadPlan(NamedTuple):
    """What a load would read.

    Attributes
    ----------
    manifest_bytes : int
        Bytes of the root.
    indexes : dict of str to int
        Indexes by their paths in the folder, with their sizes in bytes.
    reads : list of FileRead
        Of each shard that has something that is wanted, by tensor.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> from mlstate.checkpoint import plan_load
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> _ = mlstate.save(path, {"w": np.ones((4, 2))})
    >>> plan_load(path).nbytes
    64
    """

    manifest_bytes: int
    indexes: dict[str, int]
    reads: list[FileRead]

    @property
    def files(self) -> list[str]:
        """Paths of the shard files, each once."""
        return sorted({read.path for read in self.reads})

    @property
    def nbytes(self) -> int:
        """Bytes of shard files."""
        return sum(read.nbytes for read in self.reads)

    def __repr__(self) -> str:
        return (
            f"LoadPlan({self.nbytes:,} bytes of {len(self.files):,} files, "
            f"{len(self.indexes):,} indexes of {sum(self.indexes.values()):,} bytes, manifest "
            f"{self.manifest_bytes:,} bytes)"
        )


def _shape_only(value: Any) -> Any:
    """A tensor on torch's meta device as one of its shape and dtype that takes no memory."""
    torch = sys.modules.get("torch")
    if isinstance(value, Shard):
        array = _shape_only(value.array)
        if array is value.array:
            return value
        return Shard(
            array,
            value.layout,
            value.index,
            shape=value.shape,
            version=value.version,
            tier=value.tier,
            replica=value.replica,
        )
    if torch is None or not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return value
    return torch.zeros((), dtype=value.dtype).expand(value.shape)


def _shapes_only(state: Any) -> dict[str, Any] | None:
    return None if state is None else {name: _shape_only(v) for name, v in dict(state).items()}


@set_module("mlstate.checkpoint")
def plan_save(
    model: Any = None,
    optimizer: Any = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    layout: Layout | str | None = None,
    pack_below_bytes: int = PACK_BELOW,
) -> SavePlan:
    """
    Say what one rank would write, without writing it.

    No element is looked at, so that shapes are enough: tensors on torch's meta device, or
    ``numpy.broadcast_to(numpy.zeros((), dtype), shape)``, which take no memory.

    Parameters
    ----------
    model, optimizer : mapping of str to array or Shard, optional
        As for `save`; what this rank has.
    rank, world_size : int, default 0 and 1
        Which rank is asked for. Arrays that are no `Shard` are those that every rank has whole.
    layout : Layout, "rows", "flat" or "whole", optional
        As for `save`.
    pack_below_bytes : int, default 262144
        As for `save`.

    Returns
    -------
    SavePlan
        Files, bytes and the index.

    Raises
    ------
    TypeError, ValueError, CompatibilityError
        As `save`; there is no such rank.

    Notes
    -----
    It is a first save that is planned: with one in the folder, what did not change would not be
    written again. Time and memory grow with what the rank has, not with `world_size`.

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
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size} does not exist")
    states = states_of(model, optimizer, world_size)
    dicts = (_shapes_only(states[0]), _shapes_only(states[1]))
    steps = steps_of(layout, world_size) or ()
    mine = None
    if world_size > 1 and not steps:
        names = whole_names(*dicts)[rank::world_size]
        mine = by_section(names)
    gathered, nbytes = _core.shards_gather((rank, world_size), dicts, Shard, mine, steps)
    text = _core.shards_plan(_GENERATION, gathered, pack_below_bytes)
    catalog = _core.Catalog((text,), ("index",))
    [summary] = _folder.patterns_of(catalog)
    [(_, _, _, shards, *_)] = catalog.heads()
    numbers = [len(text), shards, nbytes]
    if summary is not None and world_size > 1:
        numbers += [rank, *summary.parts]
    described_bytes = len("0" * 8) + sum(len(f"{number}, ") for number in numbers)
    return SavePlan(
        rank, world_size, shards, nbytes, catalog.files(), len(text), described_bytes, text
    )


@set_module("mlstate.checkpoint")
def plan_load(
    path: str | os.PathLike[str],
    *,
    names: str | Iterable[str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    layout: Layout | str | None = None,
    verify: bool = True,
    root: str = _folder.MANIFEST,
) -> LoadPlan:
    """
    Say which files and bytes a load would read, without reading them.

    The manifest is read, and those indexes that the load would read; no shard file is looked
    at, nor need one be there.

    Parameters
    ----------
    path : str or os.PathLike
        Folder of the checkpoint.
    names, rank, world_size, layout
        As for `load`.
    verify : bool, default True
        Whether checksums are to be compared: then whole blocks of 1 MiB are read.
    root : str, optional
        Another root of the folder, by its path in it. Default: the newest checkpoint.

    Returns
    -------
    LoadPlan
        Indexes, and what is read of which files.

    Raises
    ------
    TypeError, ValueError, TensorNotFoundError, CompatibilityError
        As `load`.
    FormatError, ChecksumError, StoreError
        The manifest or an index is not what was written, or cannot be read.

    Notes
    -----
    Time and memory grow with what is wanted, and by little with the manifest, which has some
    50 bytes for each rank that saved.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> from mlstate.checkpoint import plan_load
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> _ = mlstate.save(path, {"w": np.ones((4, 2))}, pack_below_bytes=0)
    >>> plan = plan_load(path, rank=1, world_size=2, layout="rows", verify=False)
    >>> plan.reads[0].begin, plan.reads[0].end, len(plan.indexes)
    (4128, 4160, 1)
    """
    folder = local_folder(path)
    cutting = ranks_of(rank, world_size, layout, None)
    listed = listed_names(names)

    def plan(manifest: Manifest) -> LoadPlan:
        indexes = Indexes(folder, manifest, rank)
        chosen = list(enumerate(chosen_keys(indexes.catalog, listed, folder)[1]))
        read = set(indexes.ranks)
        indexes.need((section, keys, cutting) for section, keys in chosen)
        read.update(indexes.ranks)
        reads = [
            FileRead(*one)
            for section, keys in chosen
            for one in indexes.catalog.reads(folder, section, keys, cutting, verify)
        ]
        records = [manifest.indexes[number] for number in sorted(read)]
        return LoadPlan(
            os.stat(os.path.join(folder, root)).st_size,
            {record.path: record.bytes for record in records},
            reads,
        )

    return _folder.read_root(folder, root, plan)
