"""`plan_save` and `plan_load`: files and bytes of a save or load, without doing it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from .._common.arguments import check_flags, check_int
from .._common.budget import parse_size
from .._common.text import count_text
from .._sharding.layout import Layout, Shard, steps_of
from ._folder.names import MANIFEST, SECTIONS
from ._load import chosen_names
from ._load_arguments import ranks_of
from ._options import PACK_BELOW, PACK_BELOW_MOST
from ._save.content import refuse_empty_save, states_of
from ._save.replica_assignment import by_section, whole_names
from ._sections import STATES
from ._steps.step_choice import choose_root
from ._store.checkpoint_files import patterns_of
from ._store.name_globs import listed_names
from ._store.open_path import open_files
from ._store.rank_indexes import Indexes
from ._store.weight_files import without_missing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ._store.manifest import Manifest

_GENERATION = "0" * 16  # as long as a save's


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


class FileRead(NamedTuple):
    """The bytes that a load would read of one shard.

    Attributes
    ----------
    path : str
        The file, relative to the checkpoint's folder.
    begin, end : int
        Range of the file that contains all bytes to read; `end` is exclusive.
    nbytes : int
        Number of bytes to read in this range.

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


class LoadPlan(NamedTuple):
    """The files and bytes that a load would read.

    Attributes
    ----------
    manifest_bytes : int
        Bytes of the root.
    indexes : dict of str to int
        Sizes in bytes of the indexes to read, by their paths in the folder.
    reads : list of FileRead
        One entry for each shard that contains requested data, by tensor.

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
        """Paths of the shard files, without duplicates."""
        return sorted({read.path for read in self.reads})

    @property
    def nbytes(self) -> int:
        """Bytes to read from shard files."""
        return sum(read.nbytes for read in self.reads)

    def __repr__(self) -> str:
        return (
            f"LoadPlan({self.nbytes:,} bytes of {count_text(len(self.files), 'file')}, "
            f"{count_text(len(self.indexes), 'index', 'indexes')} of "
            f"{sum(self.indexes.values()):,} bytes, manifest {self.manifest_bytes:,} bytes)"
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


def plan_load(
    path: str | os.PathLike[str],
    *,
    step: int | str | None = None,
    monitor: str | None = None,
    mode: str | None = None,
    names: str | Iterable[str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    layout: Layout | str | None = None,
    verify: bool = True,
    root: str = MANIFEST,
    storage_options: Mapping[str, object] | None = None,
) -> LoadPlan:
    """
    Return the files and bytes that a load would read, without reading them.

    The manifest is read, and the indexes that the load would read. Shard files are not opened,
    and need not exist.

    Parameters
    ----------
    path : str or os.PathLike
        Folder of the checkpoint, or its URL in an object store.
    step, monitor, mode, names, rank, world_size, layout
        As for `load`.
    verify : bool, default True
        Whether the load verifies checksums: then whole blocks of 1 MiB are read.
    root : str, optional
        Path of another root in the folder. Default: the newest checkpoint, or that of `step`.
    storage_options : mapping, optional
        As for `save`.

    Returns
    -------
    LoadPlan
        Indexes, and byte ranges of shard files.

    Raises
    ------
    TypeError, ValueError, TensorNotFoundError, CompatibilityError
        As for `load`.
    FormatError, ChecksumError, StoreError
        The manifest or an index is malformed or damaged, or cannot be read.

    Notes
    -----
    Time and memory grow with the requested data, and slightly with the manifest, which has
    about 50 bytes for each rank that saved.

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
    check_flags(verify=verify)
    if not isinstance(root, str):
        raise TypeError(f"root must be a str, got {type(root).__name__}")
    files = open_files(path, storage_options, reads=True)
    cutting = ranks_of(rank, world_size, layout, None)
    listed = listed_names(names)
    if step is not None and root != MANIFEST:
        raise ValueError("step= and root= both choose the checkpoint: pass only one of them")
    root = choose_root(files, root, step, monitor, mode)
    root, read_manifest = files.open_root(root)

    def plan(manifest: Manifest) -> LoadPlan:
        """Return the files and byte ranges that a load reads with this manifest; reads indexes."""
        manifest = without_missing(files.folder, manifest, listed)
        indexes = Indexes(files, manifest, rank)
        sections = [indexes.merged_index.keys(section) for section in range(len(SECTIONS))]
        chosen = list(  # number and keys of each section
            enumerate(chosen_names(sections[:2], listed, files.path, manifest.weights)[1])
        )
        if listed is None:
            chosen.append((STATES, sections[STATES]))
        # the load reads some indexes to learn the names, and then those that list the parts
        ranks_read = set(indexes.ranks)
        indexes.need((section, keys, cutting) for section, keys in chosen)
        ranks_read.update(indexes.ranks)
        reads = [
            FileRead(*read_range[:4])
            for section, keys in chosen
            for read_range in indexes.merged_index.reads(files.path, section, keys, cutting, verify)
        ]
        records = [manifest.indexes[number] for number in sorted(ranks_read)]
        return LoadPlan(
            len(files.folder.read(root)) if manifest.weights is None else 0,
            {record.path: record.bytes for record in records},
            reads,
        )

    return files.read_root(root, plan, read_manifest)
