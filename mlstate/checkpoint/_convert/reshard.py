"""`reshard`: rewrite a checkpoint for another layout and number of ranks; each rank's parts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ... import _core
from ..._common.arguments import check_callback, check_int
from ..._common.local_path import refuse_same_path
from ..._common.set_module import set_module
from ..._sharding.layout import Layout, Shard, Steps, steps_of
from .._checkpoint.checkpoint import Checkpoint
from .._compare.digest import has_digests, require_equal_copy
from .._folder.names import SECTIONS
from .._options import PACK_BELOW, SaveOptions, complete_save_options
from .._records import tensor_records
from .._save.commit import Commit
from .._save.content import WRITER
from .._save.shards import GatheredShards
from .._save.target import SaveFolder, SaveTarget, check_target
from .._sections import STATES
from .._sources.indexed import IndexedSource
from .._sources.open_source import open_source
from .._store.checkpoint_files import shapes_of_index
from .._store.open_path import RootPath, is_url, open_files, refuse_file_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..._common.overwrite import Shapes
    from .._store.checkpoint_files import CheckpointFiles
    from .._store.manifest import Manifest

_KEPT = (
    "step",
    "model",
    "optimizer",
    "metadata",
    "states",
    "quantization_config",
    "exclude",
)  # of the source's manifest


class _ShardAssigner:
    """Assigns shards to the ranks of the new world; equal parts go to the first rank with one.

    `merged`: index of the source. `steps`: of the new layout.
    """

    def __init__(self, merged: _core.MergedIndex, steps: Steps) -> None:
        """Note the tensors of the source; no part is stored yet."""
        self._tensors = {
            (section, key): (shape, axes, tier)
            for section, key, _, _, _, shape, _, axes, _, _, _, tier, *_ in merged.tensors()
        }
        self._steps = steps
        self._stored: set[tuple[str, str, int]] = set()  # section, key and index of parts

    def shards(self, section: str, arrays: dict[str, Any], rank: int) -> dict[str, Shard]:
        """Return the arrays of the new rank `rank` as shards, by key.

        `section`: name of their section. The first rank with a part stores it; others get a
        replica.
        """
        rank_shards = {}
        for key, array in arrays.items():
            shape, axes, tier = self._tensors[section, key]
            steps, index = _core.layout_project(self._steps, rank, len(shape), axes)
            part = (section, key, index)
            replica = int(part in self._stored)
            self._stored.add(part)
            layout = Layout(steps)
            rank_shards[key] = Shard(array, layout, index, shape=shape, tier=tier, replica=replica)
        return rank_shards


def _write_all_ranks(
    target: SaveTarget,
    world_size: int,
    states: Callable[[int], tuple[Any, Any, Any]],
    shapes: Shapes,
    like: Manifest,
    progress: Callable[[int], object] | None,
) -> RootPath:
    """Save all ranks of the new checkpoint, one after the other, and commit it.

    `states`: returns the dicts (model, optimizer, named states) of a rank. `shapes`:
    of all tensors. `like`: the old manifest, whose description is kept. `progress`: called with the
    bytes written since the last call. After an error up to the commit, the target's old checkpoint
    is unchanged.
    """
    commit = Commit(target, world_size)

    def save() -> None:
        commit.begin(states=like.states is not None, step=None, shapes=lambda: shapes)
        for rank in range(world_size):
            gathered = GatheredShards({})
            gathered.shards, _ = _core.shards_collect(
                (rank, world_size),
                states(rank),
                Shard,
                None,  # all names
                (),  # no layout for arrays
            )
            commit.write(gathered, progress)
        header = {name: getattr(like, name) for name in _KEPT}
        commit.commit(header | {"writer": WRITER, "world_size": world_size})
        commit.delete_replaced()

    return commit.run(save)


def _open_both(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    storage_options: Mapping[str, object] | None,
    step: int | str | None,
) -> tuple[IndexedSource, CheckpointFiles]:
    """Return the source, and the files of the target; `storage_options`: for those that are URLs.

    Raises ValueError if both are one folder, or if the source is read as a whole.
    """
    urls = [is_url(path) for path in (source, target)]
    options = [storage_options if url or not any(urls) else None for url in urls]
    old, new = open_source(source, options[0], step), open_files(target, options[1])
    if not isinstance(old, IndexedSource) or not old.has_index:
        raise ValueError(
            f"{old.path}: the format {old.format} has no index of its tensors: convert it by "
            "mlstate convert first, and reshard the result"
        )
    refuse_same_path(old.files.path, new.path, "folder")
    return old, new


def _read(source: IndexedSource, section: int, keys: list[str], cutting: Any) -> dict[str, Any]:
    """Return parts of tensors that were verified; local ones are views of mapped files."""
    mmap = source.files.folder.is_local
    # objects may be replaced after the verification, so their checksums are compared again
    return source.read(section, keys, cutting, verify=not mmap, mmap=mmap)


@set_module("mlstate.checkpoint")
def reshard(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    layout: Layout | str,
    world_size: int | None = None,
    step: int | str | None = None,
    pack_below_bytes: int = PACK_BELOW,
    overwrite: bool | None = None,
    progress: Callable[[int], object] | None = None,
    lock_timeout: float = 0,
    storage_options: Mapping[str, object] | None = None,
) -> Checkpoint:
    """
    Write a copy of a checkpoint with another layout.

    This is not needed before loading, because `load` cuts tensors to any layout. It helps if
    many processes will load their parts, or if the parts belong on different disks.

    Parameters
    ----------
    source : str or os.PathLike
        Folder of the checkpoint, or of a Hugging Face model, or a URL in an object store.
    target : str or os.PathLike
        Folder or URL of the new checkpoint. It must not be `source`.
    layout : Layout or str
        How to cut tensors. A tensor that lacks an axis of the layout is not cut along it.
    world_size : int, optional
        Number of ranks. Default: the number of parts of `layout`.
    step : int or "latest", optional
        The step of a run, in `source`. Default: the newest.
    pack_below_bytes : int, default 262144
        As for `save`.
    overwrite : bool, optional
        Default: a checkpoint with the same names and shapes is replaced. True: replace any
        checkpoint, the steps of a `CheckpointManager` included. False: replace nothing. See
        docs/files.md.
    progress : callable, optional
        Called with the number of bytes written since the last call.
    lock_timeout : float, default 0
        Seconds to wait for another process that is writing in `target`.
    storage_options : mapping, optional
        As for `save`, for `source` and `target` if they are URLs.

    Returns
    -------
    Checkpoint
        The new checkpoint.

    Raises
    ------
    FormatError, ChecksumError
        `source` is malformed or damaged: all of it is verified before anything is written. Or the
        new checkpoint has other bits than `source` (see Notes): do not use it.
    ValueError
        `layout` does not match `world_size`, or `target` is `source`.
    StoreError
        The operating system refused, the step does not exist, or `target` exists or another
        process changed it meanwhile (EEXIST).

    Notes
    -----
    Tensors are read through memory-mapped files. Parts that span several places are assembled
    in memory, for one rank at a time. From a store, a rank's part is read into memory, after a
    verification that reads everything. If any tensor of the source is sparse, zeros are omitted
    in the target too. The codec of the source also compresses the target. If `source` was saved
    with ``digest=True``, the target records digests too, is read again at the end, and is compared
    with the digests of the source.

    With ``overwrite=True``, the new checkpoint atomically replaces the newest one of `target`; then
    the older steps are deleted. If the process is killed in between, the older steps stay until
    the same call is repeated.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp()
    >>> _ = mlstate.save(path + "/a", {"w": np.arange(6.0)})
    >>> mlstate.checkpoint.reshard(path + "/a", path + "/b", layout="rows", world_size=3)
    Checkpoint: 1 tensor, 6 parameters, 48 B, 3 files, 3 ranks, ...
    >>> mlstate.load(path + "/b").model["w"]
    array([0., 1., 2., 3., 4., 5.])
    """
    check_callback("progress", progress)
    if world_size is None:
        if not isinstance(layout, Layout):
            raise TypeError("world_size= is needed unless layout is a Layout")
        world_size = layout.parts
    steps = steps_of(layout, check_int("world_size", world_size, 1))
    if steps and isinstance(layout, Layout) and layout.parts != world_size:
        raise ValueError(f"{layout!r} has {layout.parts} parts for {world_size} ranks")
    assert steps is not None
    if not steps and world_size != 1:
        raise ValueError(
            f"layout={layout!r} has 1 part for world_size={world_size}: pass world_size=1, or a "
            "layout that cuts, such as 'rows'"
        )
    old, new = _open_both(source, target, storage_options, step)
    content = new.content()
    new.refuse_foreign(overwrite)
    refuse_file_name(new.folder)

    def write() -> RootPath:
        """Verify the old checkpoint, and write it for the new ranks, one rank after the other.

        Raises the error of the first problem that the verification finds; nothing is written then.
        """
        manifest = old.manifest._replace(quantization_config=old.quantization)
        merged = old.merged
        old.require_good()
        assigner = _ShardAssigner(old.merged, steps)
        listed = manifest.states or {}
        trees = tuple(f"{name}/" for name, kind in listed.items() if kind["kind"] == "tree")
        keys_to_cut = [merged.keys(section) for section in range(len(SECTIONS))]
        tree_keys = [key for key in keys_to_cut[STATES] if key.startswith(trees)]
        keys_to_cut[STATES] = [key for key in keys_to_cut[STATES] if not key.startswith(trees)]

        def states(rank: int) -> tuple[Any, Any, Any]:
            """Return the new rank's shards by key: model, optimizer, named states, each or None.

            The layout cuts tensors of models and optimizers, not the arrays of nested values: rank
            0 stores these whole, and the other ranks none of them.
            """
            cutting = (steps, rank, world_size) if steps else (None, 0, 0)

            def shards(section: int, keys: list[str]) -> dict[str, Shard]:
                arrays = _read(old, section, keys, cutting)
                return assigner.shards(SECTIONS[section], arrays, rank)

            # of each section; None if it was not saved
            kinds = (manifest.model, manifest.optimizer, manifest.states)
            section_shards = [
                None if kind is None else shards(section, keys_to_cut[section])
                for section, kind in enumerate(kinds)
            ]
            if tree_keys and rank == 0:
                whole_arrays = _read(old, STATES, tree_keys, (None, 0, 0))
                whole_shards = {key: Shard(array) for key, array in whole_arrays.items()}
                section_shards[STATES] = {**(section_shards[STATES] or {}), **whole_shards}
            return section_shards[0], section_shards[1], section_shards[2]

        records = list(tensor_records(merged.tensors()))
        options: SaveOptions = {
            "pack_below_bytes": pack_below_bytes,
            "sparse": any(record.sparse_shards for record in records),
            "compress": next((record.codec for record in records if record.codec), None),
            "lock_timeout": lock_timeout,
            "digest": has_digests(old),
        }
        saved = check_target(
            SaveFolder(new.path, overwrite=overwrite, content=content),
            complete_save_options(reshard, options),
        )
        shapes = shapes_of_index(merged)
        return _write_all_ranks(saved, world_size, states, shapes, manifest, progress)

    written = Checkpoint(old.attempt(write))
    require_equal_copy(old, new.path, is_whole=True)
    return written
