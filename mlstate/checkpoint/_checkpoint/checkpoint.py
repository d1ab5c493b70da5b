"""`inspect` and `Checkpoint`: tensors, shards, files, metadata of a checkpoint; its table."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ..._common.report import Table
from ..._common.text import bytes_text, count_text, first_by_number, number_order
from ...errors import FormatError, MLStateError, StoreError, StoreNotFoundError
from .._folder.names import SECTIONS
from .._load.load import load
from .._loaded_state import LoadedState
from .._options import LOAD_DEFAULTS, LoadOptions, show_options
from .._quantized.parts import scheme_of
from .._records import LayerRecord, ShardRecord, TensorRecord, tensor_records
from .._report import VerifyReport
from .._sources.open_source import is_source, known_source, open_source
from .._store.manifest import Manifest, build, parse
from .._store.open_path import RootPath
from .._verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Unpack

    from .._sources.protocol import Index, Source

_ROWS = 20
_COLUMNS = ["tensor", "state", "dtype", "shape", "shards", "bytes", "version"]


def stored_text(nbytes: int, stored: int) -> str:
    """Return a size as text, such as "8 KiB, 2 KiB stored" if the bytes in files differ."""
    text = bytes_text(nbytes)
    return text if stored == nbytes else f"{text}, {bytes_text(stored)} stored"


def in_order(tensors: list[TensorRecord]) -> list[TensorRecord]:
    """Return tensors in the order of a table: by section, then by the numbers in their names."""
    return sorted(tensors, key=lambda t: (SECTIONS.index(t.section), number_order(t.key)))


def tensor_table(title: str, tensors: Iterable[TensorRecord], total: int | None = None) -> Table:
    """Return a row for each tensor; `total`: number of all, if `tensors` are not all."""
    rows = [
        (t.parameter, t.state, *t[4:6], t.shards, stored_text(t.nbytes, t.stored_nbytes), t.version)
        for t in tensors
    ]
    return Table(title, _COLUMNS, rows, total=total)


class Checkpoint:
    """An existing checkpoint.

    The constructor reads the manifest. The indexes are read on first use, and this fails if
    another save has replaced the checkpoint since. `inspect` reads both at once.

    Parameters
    ----------
    path : str or os.PathLike
        Anything that `load` reads. Formats without an index, such as ``.npz``, are read as a whole.
    storage_options : mapping, optional
        As for `save`. Copies by pickle do not have them: they may hold credentials.

    Raises
    ------
    StoreError
        The operating system refused. Also a `FileNotFoundError` if there is no checkpoint.
    FormatError, ChecksumError
        The manifest or an index is malformed or damaged, or the format is not read.

    Attributes
    ----------
    path : str
        Absolute path of the folder or file, or its URL.
    generation : str
        Unique identifier of this save.
    sequence : int
        Number of saves in this folder, including this one.
    step : int or None
        The saved training step.
    created : str
        Time of the save in UTC (ISO 8601).
    writer : str
        Program that saved, with its version.
    world_size : int
        Number of ranks that saved.
    metadata : dict
        The saved metadata after a JSON round trip: tuples become lists, dict keys become str.
    model : dict or None
        Kind and attributes of the model's state; None if no model was saved.
    optimizer : dict or None
        Kind and attributes of the optimizer's state; None if no optimizer was saved.
    written : dict or None
        For a checkpoint returned by `save`: what this rank wrote (``new_shards``,
        ``new_bytes``, ``new_files``), and ``shards`` and ``data_bytes``, the totals of this rank.

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
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the checkpoint at `path`: read its root file and manifest, but no index or tensor.

        A `RootPath` or a source is an internal caller's: a folder that is open, with its manifest
        if that was read, and the report of a save.
        """
        self._source: Source = path if is_source(path) else open_source(path, storage_options)
        self._describe(self._source.manifest)
        self.path: str = self._source.path
        self.written: dict[str, Any] | None = path.report if isinstance(path, RootPath) else None

    def _describe(self, manifest: Manifest) -> None:
        """Set the attributes that describe the save."""
        self._manifest = manifest
        self.generation: str = manifest.generation
        self.sequence: int = manifest.sequence
        self.step: int | None = manifest.step
        self.created: str = manifest.created
        self.writer: str = manifest.writer
        self.world_size: int = manifest.world_size
        self.metadata: dict[str, Any] = manifest.metadata
        self.model: dict[str, Any] | None = manifest.model
        self.optimizer: dict[str, Any] | None = manifest.optimizer

    # Copies and pickles carry the manifest's text, so that they describe this save forever.
    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle keeps: path, root, manifest as its text, and counts of the save."""
        is_text = self._manifest.weights is None  # weights of another program have no such text
        return {
            "path": self.path,
            "root": getattr(self._source, "root", ""),
            "manifest": build(self._manifest) if is_text else self._manifest,
            "written": self.written,
            "format": self._source.format,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the folder of a pickle; its manifest is used, also if a newer save replaced it."""
        manifest = state["manifest"]
        if isinstance(manifest, bytes):
            manifest = parse(manifest, state["root"])
        self.written = state["written"]
        self._describe(manifest)
        name = state.get("format", "mlstate" if manifest.weights is None else "huggingface")
        self._source = known_source(state["path"], name, state["root"], manifest)
        self.path = self._source.path  # of a URL, with the options of the environment

    @property
    def _index(self) -> Index:
        """The index of all ranks' shards, read at the first use and kept."""
        return self._source.index

    @property
    def states(self) -> dict[str, dict[str, Any]]:
        """Kind and attributes of each named state; the kind ``tree`` is a nested value."""
        return dict(self._manifest.states or {})

    @property
    def quantization(self) -> str | None:
        """How the model is quantized: method, and dtypes of its codes; None if it is not."""
        return scheme_of(self._source)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        if self._manifest.weights is not None:
            *_, data_bytes, _ = self._index.heads()[0]
            return int(data_bytes)
        return sum(record.data_bytes for record in self._manifest.indexes)

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all shards in files; differs from `nbytes` if some are sparse or compressed."""
        return sum(stored for *_, stored in self._index.heads())

    @property
    def parameters(self) -> int:
        """Number of elements of the model's tensors."""
        return _count_parameters(self._index.tensors())

    def tensors(self) -> list[TensorRecord]:
        """List the tensors, parameters first, by name.

        Returns
        -------
        list of TensorRecord
            One record for each tensor, for any number of shards.

        Raises
        ------
        CompatibilityError
            A file of another program has a tensor or an optimizer that `load` refuses.

        Examples
        --------
        >>> import tempfile, numpy as np, mlstate
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> [t.key for t in mlstate.save(path, {"b": np.ones(1), "a": np.ones(1)}).tensors()]
        ['a', 'b']
        """
        return list(tensor_records(self._tensor_rows()))

    def _tensor_rows(self) -> list[tuple[Any, ...]]:
        """Return the fields of a `TensorRecord` for each tensor, with the steps of its layout."""
        self._source.require_loadable()
        return self._index.tensors()

    def shards(self) -> list[ShardRecord]:
        """List the stored shards, rank by rank.

        Returns
        -------
        list of ShardRecord
            One record for each shard.

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
            for *record, layers in self._index.shards()
        ]

    def files(self) -> dict[str, int]:
        """Return the sizes in bytes of the shard files, by their paths in the folder.

        Examples
        --------
        >>> import tempfile, numpy as np, mlstate
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> len(mlstate.save(path, {"a": np.ones(3), "b": np.ones(3)}).files())
        1
        """
        return dict(self._index.files())

    @show_options(LOAD_DEFAULTS)
    def load(self, **options: Unpack[LoadOptions]) -> LoadedState:
        """Load this checkpoint; takes the keywords of `mlstate.load`.

        Examples
        --------
        >>> import tempfile, numpy as np, mlstate
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> mlstate.save(path, {"w": np.ones(2)}).load().model["w"]
        array([1., 1.])
        """
        return load(self._source, **options)

    def verify(self, **keywords: Any) -> VerifyReport:
        """Read and verify all of it; takes the keywords of `mlstate.verify`.

        Examples
        --------
        >>> import tempfile, numpy as np, mlstate
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> mlstate.save(path, {"w": np.ones(2)}).verify().problems
        []
        """
        return verify(self._source, **keywords)

    def _title(self, rows: list[tuple[Any, ...]]) -> str:
        """Return the first line of `repr` and HTML: kind, counts, sizes, ranks, step, date.

        `rows`: as `_tensor_rows` returns them.
        """
        label = "Checkpoint"
        if self._manifest.weights is not None:
            is_folder = self._source.format == "huggingface"
            label = "Hugging Face folder" if is_folder else os.path.basename(self.path)
        parts = [
            f"{label}: {count_text(len(rows), 'tensor')}",
            count_text(_count_parameters(rows), "parameter"),
            stored_text(self.nbytes, self.stored_nbytes),
            count_text(len(self.files()), "file"),
            f"{self.world_size} rank{'' if self.world_size == 1 else 's'}",
        ]
        parts += [] if self.step is None else [f"step {self.step}"]
        return ", ".join([*parts, self.created])

    def _shown(self) -> tuple[str, list[tuple[Any, ...]]]:
        """Return the title and the rows to show; if the files are gone, the title says so."""
        try:
            rows = self._tensor_rows()
            return self._title(rows), rows
        except StoreNotFoundError:
            problem = "deleted"
        except MLStateError as error:
            problem = f"cannot be read: {error}"
        step = "" if self.step is None else f"step {self.step} "
        return f"Checkpoint: {step}({problem}), {self.path}", []

    def __repr__(self) -> str:
        title, rows = self._shown()
        first: list[tuple[Any, ...]] = []
        for _, section in groupby(rows, itemgetter(0)):  # sections are in order
            first += first_by_number(section, itemgetter(1), _ROWS - len(first))  # by key
        records = map(TensorRecord._make, first)
        return tensor_table(title, records, len(rows)).text(_ROWS)

    def _repr_html_(self) -> str:
        from .._pages.html import checkpoint_html

        title, rows = self._shown()
        return checkpoint_html(title, [*map(TensorRecord._make, rows)])


def _count_parameters(rows: Iterable[tuple[Any, ...]]) -> int:
    """Return the number of elements of the model's tensors; `rows`: as of a merged index."""
    return sum(prod(row[5]) for row in rows if row[0] == SECTIONS[0])


def inspect(
    path: str | os.PathLike[str],
    *,
    step: int | str | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> Checkpoint:
    """
    Read the manifest and all indexes of a checkpoint.

    Parameters
    ----------
    path : str or os.PathLike
        Anything that `load` reads. Of safetensors files, and folders of them, the headers are read;
        of formats without an index, such as ``.npz``, everything.
    step : int or "latest", optional
        The step of a run. Default: the newest.
    storage_options : mapping, optional
        As for `save`.

    Returns
    -------
    Checkpoint
        Its repr is a table of the tensors, also in notebooks. If an index cannot be read, it has
        only the manifest, and the repr and the lists of tensors raise the index's error.

    Raises
    ------
    StoreError, FormatError, ChecksumError
        As for `Checkpoint`.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> _ = mlstate.save(path, {"w": np.zeros((4, 2), np.float32)}, step=3)
    >>> mlstate.checkpoint.inspect(path)
    Checkpoint: 1 tensor, 8 parameters, 32 B, 1 file, 1 rank, step 3, ...
    tensor  state  dtype    shape   shards  bytes  version
    w              float32  (4, 2)  1       32 B   1
    """
    source = open_source(path, storage_options, step)

    def read() -> None:
        _ = source.index  # now: a writer may delete the indexes before their first use

    with suppress(FormatError, StoreError):  # of an index; the manifest may be readable
        source.attempt(read)
    return Checkpoint(source)
