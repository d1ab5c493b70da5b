"""`plan_load`: files and bytes of a load, without doing it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from ..._common.arguments import check_flags, check_type
from ..._common.set_module import set_module
from ..._common.text import count_text
from ..._sharding.layout import Layout
from .._folder.names import MANIFEST, SECTIONS
from .._sections import STATES
from .._sources.indexed import IndexedSource
from .._sources.open_source import open_source
from .._store.chosen_names import chosen_names
from .._store.name_globs import listed_names
from .arguments import ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@set_module("mlstate.checkpoint.records")
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
    >>> from mlstate.checkpoint.records import FileRead
    >>> FileRead("params/w.0-1.safetensors", 4096, 4128, 32).nbytes
    32
    """

    path: str
    begin: int
    end: int
    nbytes: int


@set_module("mlstate.checkpoint.records")
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


@set_module("mlstate.checkpoint")
def plan_load(
    path: str | os.PathLike[str],
    *,
    step: int | str | None = None,
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
    step, names, rank, world_size, layout
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
    check_type("root", root, str)
    cutting = ranks_of(rank, world_size, layout, None)
    listed = listed_names(names)
    if step is not None and root != MANIFEST:
        raise ValueError("step= and root= both choose the checkpoint: pass only one of them")
    source = open_source(path, storage_options, step)
    if not isinstance(source, IndexedSource) or not source.has_index:
        raise ValueError(f"{source.path}: a load of the format {source.format} reads all of it")
    if root != MANIFEST:
        source = IndexedSource(source.files, root)

    def plan() -> LoadPlan:
        """Return the files and byte ranges that a load reads with this manifest; reads indexes."""
        source.begin(listed, rank)
        manifest = source.manifest
        sections = [source.index.keys(section) for section in range(len(SECTIONS))]
        _, keys = chosen_names(sections[:STATES], listed, source.path, manifest.weights)
        chosen = list(enumerate(keys))  # number and keys of each section
        if listed is None:
            chosen.append((STATES, sections[STATES]))
        # the load reads some indexes to learn the names, and then those that list the parts
        ranks_read = set(source.ranks_read)
        source.need((section, keys, cutting) for section, keys in chosen)
        ranks_read.update(source.ranks_read)
        folder = source.files.folder
        reads = [
            FileRead(*read_range[:4])
            for section, keys in chosen
            for read_range in source.merged.reads(folder.path, section, keys, cutting, verify)
        ]
        records = [manifest.indexes[number] for number in sorted(ranks_read)]
        return LoadPlan(
            len(folder.read(source.root)) if manifest.weights is None else 0,
            {record.path: record.bytes for record in records},
            reads,
        )

    return source.attempt(plan)
