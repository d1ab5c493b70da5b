"""Records of a checkpoint: `TensorRecord`, `ShardRecord`, `LayerRecord`; `PruneReport`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from .._common.set_module import set_module
from .._common.text import bytes_text, count_text
from .._sharding.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .._sharding.layout import Cutting, Steps


@set_module("mlstate.checkpoint.records")
class TensorRecord(NamedTuple):
    """One tensor of a checkpoint.

    Attributes
    ----------
    section : str
        ``"params"``, ``"optim_state"`` or ``"states"``.
    key : str
        Key of the tensor in a state dict; for a named state ``"<state>/<key>"``.
    parameter : str
        Name of the parameter that this tensor is, or is a state of.
    state : str or None
        Name of the optimizer state, such as ``"m"``; None for a parameter.
    dtype : str
        Name of the dtype in NumPy, ml_dtypes or torch; of a tensor that no array can hold, the
        name in its file.
    shape : tuple of int
        Shape of the whole tensor.
    layout : Layout
        How the tensor was cut into shards.
    axes : tuple of int or None, or None
        For a state whose axes differ from its parameter's: the parameter's axis for each axis
        of the state, or None for an axis that the parameter lacks.
    shards : int
        Number of stored shards.
    nbytes : int
        Bytes of all shards.
    version : int
        Number of changes; the maximum over the shards.
    tier : str or None
        ``"hot"``, ``"warm"`` or ``"cold"``; None if no tier was recorded.
    stored_nbytes : int
        Bytes of the shards in files: fewer than `nbytes` if zeros were omitted or data was
        compressed, more if layers replace earlier rows.
    sparse_shards : int
        Number of shards that consist of layers, or are all zero.
    codec : str or None
        Codec of the compressed shards; None if no shard is compressed.
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


def tensor_records(rows: Iterable[tuple[Any, ...]]) -> Iterator[TensorRecord]:
    """Yield a record for each tensor, from the fields in an index; equal layouts are one object."""
    layouts: dict[Steps, Layout] = {}
    for fields in rows:
        layout = layouts.get(fields[6]) or layouts.setdefault(fields[6], Layout(fields[6]))
        yield TensorRecord._make((*fields[:6], layout, *fields[7:]))


def part_of_record(record: TensorRecord, cutting: Cutting) -> tuple[Steps, int]:
    """Return steps and index of the part of a stored tensor that `cutting` selects.

    A stored layout of one step is divided anew.
    """
    steps, index, world = cutting
    if steps is not None:
        return _core.layout_project(steps, index, len(record.shape), record.axes)
    stored = record.layout.steps
    if world == 0 or len(stored) != 1:
        return (), 0
    return ((stored[0][0], world),), index


@set_module("mlstate.checkpoint.records")
class LayerRecord(NamedTuple):
    """One stored layer of a sparse or compressed shard.

    Attributes
    ----------
    path : str
        File of the layer, relative to the checkpoint's folder.
    offset, nbytes : int
        Byte range of the layer in the file.
    crc32c : str
        Checksum of these bytes.
    held_nbytes : int
        Bytes of the shard that the layer holds, after decompression.
    visible_nbytes : int
        Number of these bytes that are current; later layers replace the others.
    codec : str or None
        Codec of the layer; None if it is not compressed.
    """

    path: str
    offset: int
    nbytes: int
    crc32c: str
    held_nbytes: int
    visible_nbytes: int
    codec: str | None


@set_module("mlstate.checkpoint.records")
class ShardRecord(NamedTuple):
    """One stored shard of a checkpoint.

    Attributes
    ----------
    section, key : str
        As in `TensorRecord`.
    part : int
        Index of the part of the tensor.
    shape : tuple of int
        Shape of the part.
    rank : int
        Rank that stored it.
    path : str or None
        File of the shard, relative to the checkpoint's folder. None if the shard is sparse or
        compressed: then `layers` has the files.
    offset : int or None
        Offset of the shard in the file.
    nbytes : int
        Bytes of the shard.
    crc32c : str or None
        Checksum of these bytes; None too if another program wrote the file without checksums.
    version : int
        Number of changes.
    layers : tuple of LayerRecord, or None
        Layers of a sparse or compressed shard, oldest first. Bytes that no layer holds are
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
        """Number of bytes that the shard takes in files.

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


@set_module("mlstate.checkpoint.records")
class PruneReport(NamedTuple):
    """The steps and files that `prune` deleted, or would delete.

    Attributes
    ----------
    path : str
        The folder.
    dry_run : bool
        Whether this was a dry run, which deletes nothing.
    steps : list of int or None
        Deleted steps, oldest first; None for a step that cannot be read.
    kept : list of int or None
        Steps that stay.
    files : dict of str to int
        Sizes in bytes of deleted files, by their paths in the folder.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> from mlstate.checkpoint import prune
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> _ = mlstate.save(path, {"w": np.ones(3)})
    >>> prune(path).files
    {}
    """

    path: str
    dry_run: bool
    steps: list[int | None]
    kept: list[int | None]
    files: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the deleted files."""
        return sum(self.files.values())

    def _title(self) -> str:
        """Return one line: the files that were or would be deleted, and their bytes."""
        done = "would delete" if self.dry_run else "deleted"
        count = len(self.files)
        amount = f"{count_text(count, 'file')}, {bytes_text(self.nbytes)}"
        return f"{done} {amount if count else 'nothing'}"

    def __str__(self) -> str:
        return f"{self.path}: {self._title()}"
