"""Paths and URLs of checkpoints: checked, opened as folder; suffixes of other files refused."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

from ..._common.local_path import local_folder
from .._folder.local import LocalFolder
from .._folder.names import MANIFEST
from .._folder.protocol import Folder, Probe, require_local
from .._folder.weight_names import is_weights_root
from .checkpoint_files import CheckpointFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .manifest import Manifest

    Path: TypeAlias = str | os.PathLike[str]
    Options: TypeAlias = Mapping[str, Any] | None  # storage_options=

# ---- URLs ----

_SCHEMES = ("s3", "gs", "az")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)\Z", re.DOTALL)
_LONGEST_PATH = 1024 - 256  # names of a checkpoint have at most 240 bytes, and keys 1024


def is_url(path: object) -> TypeGuard[str]:
    """Return whether a path that a caller passes is a URL."""
    return isinstance(path, str) and _URL.match(path) is not None


def _check_url(text: str) -> str:
    """Return the URL of a checkpoint without a slash at the end; raise ValueError if invalid.

    Errors repeat no part that may hold credentials.
    """
    match = _URL.match(text)
    assert match is not None
    scheme, rest = match[1].lower(), match[2]
    if scheme not in _SCHEMES:
        schemes = ", ".join(f"{scheme_name}://" for scheme_name in _SCHEMES)
        hint = ""
        if scheme == "hf":
            name = "/".join(rest.split("/")[:2])
            hint = f"; hf download {name} makes it one"
        raise ValueError(
            f"{_redacted(text)}: unknown scheme {scheme!r}; object stores have {schemes}, and all "
            f"other checkpoints are local folders{hint}"
        )
    bucket, _, path = rest.rstrip("/").partition("/")
    where = "the environment or the engine's configuration, or storage_options"
    if "@" in bucket or "?" in rest or "#" in rest:
        raise ValueError(
            f"{_redacted(text)}: a URL of a checkpoint has no user, query or fragment; credentials "
            f"belong in {where}"
        )
    if not bucket or not path:
        raise ValueError(
            f"{text}: the URL must name a bucket and a path in it, such as {scheme}://bucket/run"
        )
    for name in path.split("/"):
        if name in ("", ".", "..") or not name.isprintable() or "\\" in name or "%" in name:
            raise ValueError(
                f"{text}: the name {name!r} in the path is not possible in a store: names are not "
                r"empty, . or .., and have no control characters, % or \ "
            )
    if len(path.encode()) > _LONGEST_PATH:
        raise ValueError(
            f"{text[:80]}...: the path has {len(path.encode())} bytes, and a store accepts "
            f"{_LONGEST_PATH} before the names of a checkpoint"
        )
    return f"{scheme}://{bucket}/{path}"


def _redacted(text: str) -> str:
    """Return a URL for a message, without a part that may hold credentials."""
    start, _, rest = text.partition("://")
    return f"{start}://{re.split('[?#]', rest)[0].rpartition('@')[2]}"


# ---- folders ----

_ONLY_READ = (
    "this URL names one file, which load, plan_load, inspect, verify, diff, reshard and convert "
    "read; a checkpoint in a store needs a URL without that suffix"
)


def open_folder(path: Path, storage_options: Options = None, *, reads: bool = False) -> Folder:
    """Return the folder of a checkpoint, by a local path or a URL; no file is opened.

    With `reads`, a URL may name a safetensors file, or the index of a Hugging Face folder; the
    folder's attribute `file` is then this name. Raises ValueError for an invalid URL, or for
    options of a local path.
    """
    if is_url(path):
        return _open_url(path, storage_options, reads)
    place = local_folder(path)
    if storage_options is not None:
        raise ValueError(
            f"{place}: storage_options are for URLs such as s3://bucket/run, and this is a "
            "local folder"
        )
    return LocalFolder(place)


def _open_url(url: str, storage_options: Options, reads: bool) -> Folder:
    """Return the folder of a URL, as `open_folder`; a local load imports nothing of stores."""
    from .._folder._remote.options import take_options
    from .._folder.object import ObjectFolder, StoreURL

    file = ""
    if isinstance(url, StoreURL):
        folder = url.folder
        url = str(folder.named_path)
        if storage_options is None and (reads or not folder.file):
            return folder
    url = _check_url(url)
    parent, _, name = url.rpartition("/")
    if is_weights_root(name):
        if not reads:
            raise ValueError(f"{url}: {_ONLY_READ}")
        url, file = parent, name
    options = take_options(storage_options)
    if options.cache_folder is None:
        return ObjectFolder(url, options, file)
    from .._folder.cached import CachedFolder

    return CachedFolder(url, options, file)


def open_files(
    path: Path, storage_options: Options = None, *, reads: bool = False
) -> CheckpointFiles:
    """Return the files of the checkpoint at a path or URL; nothing is read.

    `reads`: the caller only reads, so that the path may be of weights of other programs.
    """
    return CheckpointFiles(open_folder(path, storage_options, reads=reads))


def open_target(path: Path, storage_options: Options, *, any_suffix: bool = False) -> Folder:
    """Return the folder of a checkpoint to write; nothing is read or written.

    Without `any_suffix`, raises ValueError for the name of another format's file.
    """
    folder = open_folder(path, storage_options)
    if not any_suffix and os.path.splitext(folder.path)[1].lower() in FILE_SUFFIXES:
        refuse_file_name(folder)
    return folder


class RootPath(NamedTuple):
    """A root in a folder: the path of internal callers of `load` and `verify`; a save's result."""

    files: CheckpointFiles
    root: str = MANIFEST
    manifest: Manifest | None = None  # of the root, if already read
    # targets that an earlier, failed load has written in part: state and name
    written: set[tuple[str, str]] | None = None
    report: dict[str, Any] | None = None  # of a save: what this rank wrote
    choose: Callable[[], str] | None = None  # another root, if this one is deleted

    def __fspath__(self) -> str:
        return self.files.path

    def with_manifest(self) -> RootPath:
        """Return the root with its manifest, which is read now unless it was read before."""
        if self.manifest is not None:
            return self
        return self._replace(manifest=self.files.read_manifest(self.root))


# Suffixes of files that other programs, or `save_file`, read and write.
FILE_SUFFIXES = frozenset((
    ".safetensors", ".npz", ".npy", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".h5",
    ".hdf5", ".msgpack", ".onnx", ".gguf", ".json",
))  # fmt: skip


def refuse_file_name(folder: Probe) -> None:
    """Raise ValueError for a new folder whose name has the suffix of another format's files.

    A folder that has a checkpoint already may have such a name.
    """
    suffix = os.path.splitext(folder.path)[1].lower()
    if suffix not in FILE_SUFFIXES or folder.has_checkpoint():
        return
    remedy = "mlstate convert writes files of other formats"
    if suffix == ".safetensors":
        remedy = "save_file(state, path) (mlstate convert on the command line) writes one file"
    elif suffix in (".npz", ".pt", ".pth", ".bin"):
        remedy = f"save_file writes a .safetensors file, and mlstate convert a {suffix} file of it"
    raise ValueError(
        f"{folder.path}: a checkpoint is a folder, and {suffix} is the suffix of a file: "
        f"{remedy}; for a folder, pass a path without this suffix"
    )


def refuse_format(folder: Folder, name: str) -> None:
    """Raise ValueError for files of the format `name` in a store: these are only local."""
    remedy = "copy it from or to a local path by the store's own tool, and convert there"
    require_local(folder, f"the format {name}", remedy)
