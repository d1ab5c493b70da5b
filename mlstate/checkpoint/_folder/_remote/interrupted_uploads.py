"""Objects of an interrupted save that the next save copies instead of uploading them.

A writer uploads its index before its shards. The index has the size and the CRC32C of each block
of every shard. If a later writer's index differs only in the generation, the store copies the
older objects to the new names. The older objects are only read, so no running writer, no deletion
of orphaned objects and no commit is disturbed, and the new checkpoint needs none of them.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .object_store import ObjectStore

INDEX_FOLDER = "index"
_INDEX_NAME = re.compile(r"([0-9a-f]{16})(\..*)", re.DOTALL)  # generation, rank and extension
_LEAST_BYTES = 1 << 20  # of a copied object: an upload of less is as fast as a copy
_MOST_ATTEMPTS = 3  # interrupted saves that are compared


def _older_indexes(
    store: ObjectStore, root: str, sizes: Mapping[str, int]
) -> Iterator[tuple[str, str, str]]:
    """Yield (path of a new index, its generation, an older generation) since the last commit.

    The older generation is the one in the name of a stored index of the same size and rank as the
    new one. `root`: the manifest's name. `sizes`: bytes of the files to upload, by path. The newest
    ones come first, at most three for each path.
    """
    listed = store.list_folder(INDEX_FOLDER)
    since: float | None = None  # time of the last commit
    for path, nbytes in sizes.items():
        folder, name = os.path.split(path)
        index_match = _INDEX_NAME.fullmatch(name)
        if folder != INDEX_FOLDER or index_match is None:
            continue
        changed_at = {  # time of the last change, by generation
            match[1]: listed[name].changed
            for name in listed
            if listed[name].nbytes == nbytes
            and (match := _INDEX_NAME.fullmatch(name))
            and match[2] == index_match[2]
        }
        # the index of a committed save is older than the manifest
        if changed_at and since is None:
            commit = store.list_folder("").get(root)
            since = float("-inf") if commit is None else commit.changed
        newest_first = sorted(changed_at, key=changed_at.__getitem__, reverse=True)
        for generation in newest_first[:_MOST_ATTEMPTS]:
            if since is not None and changed_at[generation] > since:
                yield path, index_match[1], generation


def _content_of(text: bytes) -> bytes:
    """Return the text of an index without its first line, the checksum."""
    return text.partition(b"\n")[2]


def find_uploaded(
    store: ObjectStore, root: str, local: str, sizes: Mapping[str, int]
) -> dict[str, str]:
    """Return objects of interrupted saves that have the bytes of new files.

    The result has the object's path for the path of a new file. `sizes`: bytes of the new files,
    which are in the folder `local`. `root`: the manifest's name; saves before its last change were
    not interrupted, or are obsolete.
    """
    large = {path: nbytes for path, nbytes in sizes.items() if nbytes >= _LEAST_BYTES}
    uploaded: dict[str, str] = {}
    if not large:
        return uploaded
    for path, generation, older in _older_indexes(store, root, sizes):
        with open(os.path.join(local, path), "rb") as file:
            content = file.read()
        try:
            text, _ = store.get(path.replace(generation, older), len(content))
        except (FileNotFoundError, ValueError):  # deleted meanwhile
            continue
        if _content_of(text).replace(older.encode(), generation.encode()) != _content_of(content):
            continue
        # the object of a new file has the same name, with the older generation
        for folder in sorted({os.path.dirname(path) for path in large}):
            listed = store.list_folder(folder)
            for new, nbytes in large.items():
                name = os.path.basename(new).replace(generation, older)
                is_other = os.path.dirname(new) != folder or name == os.path.basename(new)
                if not is_other and name in listed and listed[name].nbytes == nbytes:
                    uploaded.setdefault(new, f"{folder}/{name}")
    return uploaded
