"""Where and how to save: the checked arguments of a save, and options of internal callers."""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._common.budget import parse_size
from ..._common.caller import Caller, find_caller
from ..._common.overwrite import check_overwrite
from ..._sharding.layout import Layout
from ...collectives._arguments import optional_group
from .._folder.protocol import Claim, require_local
from .._options import PACK_BELOW_MOST, SaveOptions
from .._store.checkpoint_files import CheckpointFiles, FolderContent
from .._store.open_path import open_target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...collectives import ProcessGroup
    from .._checkpoint.save_async import SaveHandle
    from .._store.manifest import Manifest


class SaveFolder(NamedTuple):
    """A folder with internal options; such callers pass it as the path of a save."""

    folder: str | os.PathLike[str]
    # Called after the commit with the new manifest. It deletes old roots and returns the
    # manifests of the remaining roots, by their paths in the folder.
    retain: Callable[[Manifest], Mapping[str, Manifest]] | None = None
    overwrite: bool | None = None  # True: a manager's steps too; see `mlstate._common.overwrite`
    content: FolderContent | None = None  # if given, only this is replaced
    any_suffix: bool = False  # the caller's program chooses the name
    # entries of modules that are not tensors, and torch's metadata, by name of the state or None
    entries: Mapping[str | None, tuple[Any, Any]] = MappingProxyType({})
    started: Callable[[SaveHandle], object] | None = None  # called before `save_async` starts
    quantization_config: dict[str, Any] | None = None  # of the model's codes, for the manifest

    def __fspath__(self) -> str:
        return os.fspath(self.folder)


class WriteOptions(NamedTuple):
    """The options of `save` that `_core.shards_write` takes."""

    pack_below_bytes: int
    sparse: bool
    incremental: bool
    compress: str | None  # name of a codec
    digest: bool  # record the digests of the shards


class SaveTarget(NamedTuple):
    """The checked arguments of `save` that describe where and how to save."""

    files: CheckpointFiles
    claim: Claim  # not yet acquired; only rank 0 acquires it
    group: ProcessGroup | None  # None if this process saves alone
    rank: int
    world_size: int
    layout: Layout | str | None  # for arrays that are not a `Shard`
    write_options: WriteOptions
    request: SaveFolder
    caller: Caller

    @property
    def path(self) -> str:
        """Absolute path of the folder, or its URL."""
        return self.files.path

    @property
    def keep_root(self) -> bool:
        """Whether to keep the root under roots/, as `CheckpointManager` does."""
        return self.request.retain is not None

    def retain(self, newest: Manifest) -> Mapping[str, Manifest]:
        """Delete old roots after `newest` was committed; return the remaining ones by path."""
        if self.request.retain is not None:
            return self.request.retain(newest)
        if self.request.overwrite:
            self.files.delete_roots(self.files.list_roots())
        return {}


def check_target(
    path: str | os.PathLike[str],
    options: SaveOptions,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool | None = None,
) -> SaveTarget:
    """Check the arguments and return where and how to save; the claim is not acquired yet.

    `path` may be a `SaveFolder`, of a manager, with its own `overwrite`. `options` has all
    keywords, as `complete_save_options` returns them. Raises TypeError or ValueError for a wrong
    argument.
    """
    save_folder = path if isinstance(path, SaveFolder) else SaveFolder(path, overwrite=overwrite)
    save_folder = save_folder._replace(overwrite=check_overwrite(save_folder.overwrite))
    folder = open_target(save_folder.folder, storage_options, any_suffix=save_folder.any_suffix)
    claim = folder.claim(options["lock_timeout"])
    if options["incremental"]:
        require_local(folder, "incremental=True", "save whole shards")
    files = CheckpointFiles(folder)
    rank, world_size = 0, 1
    group = optional_group(options["group"])
    pack_below = parse_size("pack_below_bytes", options["pack_below_bytes"], 0, PACK_BELOW_MOST)
    if group is not None:
        rank, world_size = group.rank, group.world_size
    return SaveTarget(
        files=files,
        claim=claim,
        group=None if world_size == 1 else group,
        rank=rank,
        world_size=world_size,
        layout=options["layout"],
        write_options=WriteOptions(
            pack_below,
            bool(options["sparse"]),
            bool(options["incremental"]),
            options["compress"],
            bool(options["digest"]),
        ),
        request=save_folder,
        caller=find_caller(),
    )
