"""A checkpoint that exists: what is in it; public through `mlstate.checkpoint`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.local_path import local_folder
from .._common.set_module import set_module
from .._common.text import bytes_text, table_text
from .._sharding.layout import Layout
from ..errors import FormatError, StoreError
from ._load import LoadedState, load_checkpoint
from ._store import folder as _folder
from ._store.manifest import build, parse
from ._verify import VerifyReport, verify_checkpoint

if TYPE_CHECKING:
    from ._store.manifest import Manifest

_ROWS = 20
_HEADERS = ["tensor", "state", "dtype", "shape", "shards", "bytes", "version"]


def stored_text(nbytes: int, stored: int) -> str:
    """Say how many bytes something has, and where files hold another number, that too."""
    text = bytes_text(nbytes)
    return text if stored == nbytes else f"{text}, {bytes_text(stored)} stored"


@set_module("mlstate.checkpoint")
class TensorRecord(NamedTuple):
    """What a checkpoint says of one tensor.

    Attributes
    ----------
    section : str
        ``"params"`` or ``"optim_state"``.
    key : str
        Under which a state dict has it.
    parameter : str
        The parameter that it is, or is a state of.
    state : str or None
        Name of the optimizer's state, such as ``"m"``.
    dtype : str
        NumPy's or ml_dtypes' name.
    shape : tuple of int
        Of the whole tensor.
    layout : Layout
        How it was cut.
    axes : tuple of int or None, or None
        For a state whose axes are not simply its parameter's: which of the parameter's each
        is.
    shards : int
        Parts that are stored.
    nbytes : int
        Bytes of these.
    version : int
        How often it changed, the most of its shards.
    tier : str or None
        ``"hot"``, ``"warm"`` or ``"cold"``, where that was stated.
    stored_nbytes : int
        Bytes that files hold of the shards: fewer than `nbytes` where zeros were left out, more
        where rows were stored again since.
    sparse_shards : int
        How many of the shards have layers of rows, or are all zero.
    codec : str or None
        What compresses the shards, where any of them is compressed.
    """

    section: str
    key: str
    parameter: str
    state: str | None
    dtype: str
    shape: tuple[int, ...]
    layout: Layout
    axes: tuple[int | None, ...] | None
    shards: int
    nbytes: int
    version: int
    tier: str | None
    stored_nbytes: int
    sparse_shards: int
    codec: str | None


@set_module("mlstate.checkpoint")
class LayerRecord(NamedTuple):
    """One of the places where a sparse or compressed shard is stored.

    Attributes
    ----------
    path : str
        Its file, in the checkpoint's folder.
    offset, nbytes : int
        Where its bytes lie in the file.
    crc32c : str
        Of its bytes.
    held_nbytes : int
        Bytes of the shard that it holds: as many as `nbytes`, or more where it is compressed.
    visible_nbytes : int
        How many of these count; the others were stored again by later layers.
    codec : str or None
        What its bytes are compressed with.
    """

    path: str
    offset: int
    nbytes: int
    crc32c: str
    held_nbytes: int
    visible_nbytes: int
    codec: str | None


@set_module("mlstate.checkpoint")
class ShardRecord(NamedTuple):
    """What a checkpoint says of one stored shard.

    Attributes
    ----------
    section, key : str
        As in `TensorRecord`.
    part : int
        Which part of the tensor.
    shape : tuple of int
        Of the part.
    rank : int
        That stored it.
    path : str or None
        Its file, in the checkpoint's folder. A sparse or compressed shard has none, but layers.
    offset : int or None
        Where in that file its bytes lie.
    nbytes : int
        Of the shard.
    crc32c : str or None
        Of its bytes.
    version : int
        How often it changed.
    layers : tuple of LayerRecord, or None
        Where a sparse or compressed shard is stored, oldest first; what is in none of them is
        zero.
    """

    section: str
    key: str
    part: int
    shape: tuple[int, ...]
    rank: int
    path: str | None
    offset: int | None
    nbytes: int
    crc32c: str | None
    version: int
    layers: tuple[LayerRecord, ...] | None

    @property
    def stored_nbytes(self) -> int:
        """Bytes that files hold of it.

        Examples
        --------
        >>> import tempfile, numpy as np, mlstate
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> [shard] = mlstate.save(path, {"w": np.ones(3)}).shards()
        >>> shard.stored_nbytes
        24
        """
        if self.layers is None:
            return self.nbytes
        return sum(layer.nbytes for layer in self.layers)


@set_module("mlstate.checkpoint")
class Checkpoint:
    """A checkpoint that exists.

    The manifest is read at once, the indexes when something is asked of them: then a
    checkpoint that was replaced in between is not found any more. `inspect` reads both.

    Parameters
    ----------
    path : str or os.PathLike
        Its folder.

    Raises
    ------
    StoreError
        The system refused; `FileNotFoundError` too where there is none.
    FormatError, ChecksumError
        The manifest or an index is not what was written.

    Attributes
    ----------
    path : str
        Absolute.
    written : dict or None
        Of a checkpoint that `save` returns: what this rank wrote (``new_shards``,
        ``new_bytes``, ``new_files``, and ``shards``, ``data_bytes`` of all that it has).

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> checkpoint = mlstate.save(path, {"w": np.zeros((4, 2), np.float32)})
    >>> checkpoint.tensors()[0].shape, checkpoint.nbytes
    ((4, 2), 32)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        _root: str = _folder.MANIFEST,
        _manifest: Manifest | None = None,
    ) -> None:
        # a caller that has the manifest has the absolute path
        self.path = local_folder(path) if _manifest is None else os.fspath(path)
        self._root = _root
        self._manifest = _manifest or _folder.read_manifest(self.path, _root)
        self._read_catalog: Any = None
        self.written: dict[str, Any] | None = None

    # Copies and pickles hold the manifest as its text: they are of this save, whatever follows it.
    def __getstate__(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "root": self._root,
            "manifest": build(self._manifest),
            "written": self.written,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        manifest = parse(state["manifest"], state["root"])
        Checkpoint.__init__(self, state["path"], _root=state["root"], _manifest=manifest)
        self.written = state["written"]

    @property
    def _catalog(self) -> Any:
        if self._read_catalog is None:
            self._read_catalog = _folder.load_catalog(self.path, self._manifest)
        return self._read_catalog

    @classmethod
    def _opened(cls, path: str | os.PathLike[str], root: str = _folder.MANIFEST) -> Checkpoint:
        """Read the indexes too, so that a writer cannot delete them in between."""
        folder = local_folder(path)

        def read(manifest: Manifest) -> Checkpoint:
            found = cls(folder, _root=root, _manifest=manifest)
            _ = found._catalog
            return found

        try:
            return _folder.read_root(folder, root, read)
        except (FormatError, StoreError):  # of an index; the manifest can be read all the same
            return cls(folder, _root=root)

    @property
    def generation(self) -> str:
        """What tells this save from every other."""
        return self._manifest.generation

    @property
    def sequence(self) -> int:
        """How many saves there were in this folder, this one included."""
        return self._manifest.sequence

    @property
    def step(self) -> int | None:
        """As it was saved."""
        return self._manifest.step

    @property
    def created(self) -> str:
        """When, in UTC (ISO 8601)."""
        return self._manifest.created

    @property
    def writer(self) -> str:
        """Program and version."""
        return self._manifest.writer

    @property
    def world_size(self) -> int:
        """Ranks that saved."""
        return self._manifest.world_size

    @property
    def metadata(self) -> dict[str, Any]:
        """What was saved, as JSON has it: tuples are lists there, and keys of dicts texts."""
        return self._manifest.metadata

    @property
    def model(self) -> dict[str, Any] | None:
        """Kind and attributes of the model's state; None where none was saved."""
        return self._manifest.model

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """Kind and attributes of the optimizer's state; None where none was saved."""
        return self._manifest.optimizer

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(record.data_bytes for record in self._manifest.indexes)

    @property
    def stored_nbytes(self) -> int:
        """Bytes that files hold of them; others where some are sparse."""
        return sum(stored for *_, stored in self._catalog.heads())

    def tensors(self) -> list[TensorRecord]:
        """List the tensors, parameters first, by name.

        Returns
        -------
        list of TensorRecord
            One for each tensor, however many shards it has.

        Examples
        --------
        >>> import tempfile, numpy as np, mlstate
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> [t.key for t in mlstate.save(path, {"b": np.ones(1), "a": np.ones(1)}).tensors()]
        ['a', 'b']
        """
        return [
            TensorRecord._make((*record[:6], Layout._of(record[6]), *record[7:]))
            for record in self._catalog.tensors()
        ]

    def shards(self) -> list[ShardRecord]:
        """List the shards as they are stored, rank by rank.

        Returns
        -------
        list of ShardRecord
            One for each shard.

        Examples
        --------
        >>> import tempfile, numpy as np, mlstate
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> [shard] = mlstate.save(path, {"w": np.ones(3)}, pack_below_bytes=0).shards()
        >>> shard.offset, shard.nbytes, shard.path.startswith("params/w.0-1.")
        (4096, 24, True)
        """
        return [
            ShardRecord._make((*record, layers and tuple(map(LayerRecord._make, layers))))
            for *record, layers in self._catalog.shards()
        ]

    def files(self) -> dict[str, int]:
        """Return the shard files, by their paths in the folder, with their sizes in bytes.

        Examples
        --------
        >>> import tempfile, numpy as np, mlstate
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> len(mlstate.save(path, {"a": np.ones(3), "b": np.ones(3)}).files())
        1
        """
        return dict(self._catalog.files())

    def load(self, **keywords: Any) -> LoadedState:
        """Load this checkpoint; the keywords are those of `mlstate.load`.

        Examples
        --------
        >>> import tempfile, numpy as np, mlstate
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> mlstate.save(path, {"w": np.ones(2)}).load().model["w"]
        array([1., 1.])
        """
        return load_checkpoint(self.path, root=self._root, **keywords)

    def verify(self, **keywords: Any) -> VerifyReport:
        """Read all of it and compare; the keywords are those of `mlstate.verify`.

        Examples
        --------
        >>> import tempfile, numpy as np, mlstate
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> mlstate.save(path, {"w": np.ones(2)}).verify().problems
        []
        """
        return verify_checkpoint(self.path, root=self._root, **keywords)

    def _title(self) -> str:
        tensors = len(self._catalog.keys(0)) + len(self._catalog.keys(1))
        parts = [
            f"Checkpoint: {tensors:,} tensor{'' if tensors == 1 else 's'}",
            stored_text(self.nbytes, self.stored_nbytes),
            f"{len(self.files()):,} file{'' if len(self.files()) == 1 else 's'}",
            f"{self.world_size} rank{'' if self.world_size == 1 else 's'}",
        ]
        parts += [] if self.step is None else [f"step {self.step}"]
        return ", ".join([*parts, self.created])

    def _rows(self) -> list[list[str]]:
        return [
            [
                t.parameter,
                t.state or "",
                t.dtype,
                str(t.shape),
                str(t.shards),
                stored_text(t.nbytes, t.stored_nbytes),
                str(t.version),
            ]
            for t in self.tensors()
        ]

    def __repr__(self) -> str:
        return f"{self._title()}\n{table_text(_HEADERS, self._rows(), _ROWS)}"

    def _repr_html_(self) -> str:
        from ._html import checkpoint_html

        return checkpoint_html(self._title(), self.tensors())


@set_module("mlstate.checkpoint")
def inspect(path: str | os.PathLike[str]) -> Checkpoint:
    """
    Say what is in a checkpoint.

    Parameters
    ----------
    path : str or os.PathLike
        Its folder.

    Returns
    -------
    Checkpoint
        Prints as a table, also in notebooks.

    Raises
    ------
    As `Checkpoint`.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> _ = mlstate.save(path, {"w": np.zeros((4, 2), np.float32)}, step=3)
    >>> mlstate.checkpoint.inspect(path)
    Checkpoint: 1 tensor, 32 B, 1 file, 1 rank, step 3, ...
    tensor  state  dtype    shape   shards  bytes  version
    w              float32  (4, 2)  1       32 B   1
    """
    return Checkpoint._opened(path)
