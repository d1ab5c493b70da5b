"""Directories of torch.distributed.checkpoint (DCP): read without running their code, written.

torch reads ``.metadata`` and all plain values with pickle. Here both can only create objects of
the classes that such checkpoints consist of. The tree in a directory is as in `pt_file`.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from .... import _core
from ...._common.regular_file import open_regular
from ....checkpoint._layouts.entries import (
    RECORD,
    choose_keys,
    is_recorded,
    malformed,
    sort_entries,
)
from ....errors import CompatibilityError, FormatError
from .pt_file import first_line, load_value, read_tree, tree_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...._common.atomic_file import Target
    from ....checkpoint._files.parts import Parts, Selection

# Lightning stores the entries other than model and optimizers in this file of the folder.
_LIGHTNING_REST = "meta.pt"
_EMPTY = "empty"  # in the entry `RECORD`: paths of empty dicts, which torch leaves out
_CHECKPOINT = "torch.distributed.checkpoint"
# Classes allowed in `.metadata`, in addition to torch.distributed.checkpoint.metadata.
_ALLOWED = {
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")),
    *(("pathlib._local", name) for name in ("Path", "PosixPath")),
}


def read_dcp(path: Path, selection: Selection) -> Parts:
    """Read a checkpoint of torch.distributed.checkpoint, written by any number of ranks.

    `path`: its directory. Entries that are not in `selection` are not read. No code from the files
    is run. Raises FormatError for damage, and OSError as it is.
    """
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tree: dict[str, Any] = {}
    complete: Callable[[Mapping[Any, Any]], Mapping[Any, Any]] = dict

    def choose(paths: dict[str, tuple[Any, ...]], axes: dict[str, int]) -> set[str]:
        nonlocal complete
        keys, complete = choose_keys(paths, axes, selection)
        return keys

    reader = _Reader(path, choose)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there is only one process
            _load_state_dict(tree, storage_reader=reader, planner=_planner(path), no_dist=True)
    except BaseException as error:
        # torch collects errors in a class that does not derive from Exception: its `failures` have
        # (exception, traceback) by rank
        if not (isinstance(error, Exception) or hasattr(error, "failures")):
            raise
        failure = next(iter(getattr(error, "failures", {}).values()), error)
        cause = failure[0] if isinstance(failure, tuple) else failure
        if isinstance(cause, FormatError):
            cause.path = str(path)
        if isinstance(cause, OSError | FormatError):
            raise cause from None
        raise malformed(path, f"torch cannot read it: {first_line(cause)}") from None
    _restore_empty(tree, path)
    entries = complete(tree)
    rest = path / _LIGHTNING_REST
    if os.path.lexists(rest):
        others = read_tree(rest)
        others = others if isinstance(others, Mapping) else {_LIGHTNING_REST: others}
        entries = {**others, **entries}
    return sort_entries(entries, path)


def write_dcp(target: Target, parts: Parts) -> None:
    """Write a directory that torch.distributed.checkpoint reads, in place of an old one.

    `parts`: those that are None are left out, and `read_dcp` restores those that are empty.
    """
    import torch.distributed.checkpoint as dcp

    tree = tree_of(parts)
    _record_empty(tree)

    def write(temporary: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there is only one process
            dcp.save(tree, checkpoint_id=temporary, no_dist=True)  # type: ignore[attr-defined]
        _core.folder_sync(temporary)

    target.write_path(write)


def _empty_paths(value: Any, path: list[str], *, is_listed: bool = False) -> Iterator[list[str]]:
    """Yield the paths of the empty dicts in a value of a tree, which is at `path`.

    Raises CompatibilityError for one in a list, because torch cannot read a list that lacks an
    item. `is_listed`: the value is in a list.
    """
    if isinstance(value, list):
        for each in value:
            yield from _empty_paths(each, path, is_listed=True)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _empty_paths(each, [*path, str(key)], is_listed=is_listed)
        if not value and is_listed:
            raise CompatibilityError(
                f"{'.'.join(path)} is a list with an empty dict, which torch's distributed "
                "checkpoints cannot hold: convert to a checkpoint of mlstate or a .pt file, or "
                "leave it out (--skip)"
            )
        if not value:
            yield path


def _record_empty(tree: dict[str, Any]) -> None:
    """Record the paths of the empty dicts of a tree in its entry `RECORD`, if it has both.

    torch leaves these dicts out of distributed checkpoints. Raises as `_empty_paths`.
    """
    paths = [*_empty_paths(tree, [])]
    if paths and RECORD in tree:
        tree[RECORD][_EMPTY] = json.dumps(paths)


def _restore_empty(tree: dict[str, Any], path: Path) -> None:
    """Add the empty dicts that `_record_empty` recorded in a tree that torch read.

    `path`: of the file, for the FormatError if the record is malformed.
    """
    text = tree[RECORD].get(_EMPTY, "[]") if is_recorded(tree) else "[]"
    try:
        for keys in json.loads(text):
            level: Any = tree
            for key in keys:
                level = level.setdefault(key, {})
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise malformed(path, f"entry {RECORD!r} does not describe the file") from None


# ---- the restricted reader ----


class _Unpickler(pickle.Unpickler):
    """Unpickler that only finds classes of checkpoint metadata."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a class that a pickle names, if it occurs in metadata; else raise FormatError."""
        import torch
        from torch.distributed.checkpoint import metadata

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        attribute = getattr(metadata, name, None)
        if module == metadata.__name__ and isinstance(attribute, type):
            if attribute.__module__ == module:
                return attribute
        elif (module, name) in _ALLOWED:
            if module.startswith("pathlib"):
                return PurePath  # a path class of another system cannot be created here
            return super().find_class(module, name)
        raise FormatError(
            f".metadata names {module}.{name}, which describes no checkpoint: it was not written "
            "by torch.distributed.checkpoint, or by a custom planner"
        )


def _read_metadata(file: Any) -> Any:
    """Return the metadata in the open file `.metadata`, without running code in it.

    Raises FormatError if it cannot be read or is another object.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        metadata_read = _Unpickler(file).load()
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(f".metadata cannot be read: {error}") from None
    if not isinstance(metadata_read, Metadata):
        raise FormatError(f".metadata holds a {type(metadata_read).__name__}")
    return metadata_read


def _check_metadata(metadata: Any, available: int) -> None:
    """Raise FormatError for metadata with paths outside of the directory, or too large tensors.

    `available`: bytes of all files. Otherwise small metadata could make torch allocate any memory;
    files that are transformed (compressed) are not limited.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    transformed = False
    for info in (metadata.storage_data or {}).values():
        file_path = PurePath(info.relative_path)
        if file_path.is_absolute() or ".." in file_path.parts:
            raise FormatError(f".metadata names the file {info.relative_path!r} outside of it")
        transformed |= bool(getattr(info, "transform_descriptors", None))
    claimed = sum(
        entry.size.numel() * entry.properties.dtype.itemsize
        for entry in metadata.state_dict_metadata.values()
        if isinstance(entry, TensorStorageMetadata)
    )
    if claimed > available and not transformed:
        raise FormatError(
            f".metadata describes {claimed:,} bytes of tensors; the files have {available:,}"
        )


def _paths_of(metadata: Any) -> dict[str, tuple[Any, ...]]:
    """Return for each key its path in the tree of values: a tuple of keys and list indices.

    Raises FormatError for a malformed path.
    """
    keys = metadata.state_dict_metadata
    nested_paths = metadata.planner_data  # torch's paths of keys that it has flattened
    paths = {key: (key,) for key in keys}
    if isinstance(nested_paths, dict):
        paths |= {key: path for key, path in nested_paths.items() if key in keys}
    for key, path in paths.items():
        is_path = isinstance(path, tuple) and path and isinstance(key, str)
        # an index as large as the number of keys would make torch create a huge list
        if not is_path or any(type(step) is int and not 0 <= step < len(keys) for step in path):
            raise FormatError(f".metadata gives {key!r:.80} the place {path!r:.80} in the state")
    return paths


def _Reader(path: str | os.PathLike[str], choose: Callable[[Any, Any], set[str]]) -> Any:  # noqa: N802
    """Return torch's reader of a directory, with restricted pickles.

    `choose`: called with the paths of all keys in the tree, and the numbers of axes of the tensors;
    returns the keys to read.
    """
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    class RegularFiles(FileSystem):
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Any:
            return open_regular(path)

    class RestrictedReader(FileSystemReader):
        def __init__(self) -> None:
            super().__init__(path)
            self.fs = RegularFiles()

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            """Return the metadata of the chosen keys.

            Raises FormatError if the files are too small for the tensors, or a path leaves the
            directory.
            """
            if kwargs.get("rank") is not None:
                raise FormatError("a checkpoint whose metadata are by rank cannot be read whole")
            with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
                metadata = _read_metadata(file)
            files = [entry for entry in Path(path).rglob("*") if entry.is_file()]
            _check_metadata(metadata, sum(entry.stat().st_size for entry in files))
            entries = metadata.state_dict_metadata
            axes = {key: len(each.size) for key, each in entries.items() if hasattr(each, "size")}
            chosen = choose(_paths_of(metadata), axes)
            metadata.state_dict_metadata = {key: entries[key] for key in entries if key in chosen}
            if getattr(metadata, "storage_meta", None) is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return RestrictedReader()


def _planner(path: Path) -> Any:
    """Return a plan for torch's loader: it loads all that the reader lists."""
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

    class RestrictedPlanner(_EmptyStateDictLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            """Put a value that is not a tensor into the state dict.

            `read_item`: torch's, with the name. `value`: stream of the bytes that torch saved. A
            value of another class becomes `Unreadable`.
            """
            name = read_item.dest_index.fqn
            content = load_value(value, f"{path}: {name!r}")
            if self.flatten_state_dict:
                set_element(self.original_state_dict, self.mappings[name], content)
            else:
                self.state_dict[name] = content

    return RestrictedPlanner()  # type: ignore[no-untyped-call]
