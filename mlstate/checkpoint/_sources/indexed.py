"""`IndexedSource`: a checkpoint of mlstate, local or in a store; only the needed parts are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import FormatError
from .._folder.names import MANIFEST
from .._folder.protocol import TensorParts
from .._report import Problem
from .._store.checkpoint_files import TRIES, CheckpointFiles
from .._store.rank_indexes import Indexes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeVar

    from ... import _core
    from ..._sharding.layout import Cuts
    from .._options import LoadOptions
    from .._quantized.pairs import Pairs
    from .._report import VerifyReport
    from .._store.manifest import Manifest
    from .protocol import Index

    _Result = TypeVar("_Result")


class IndexedSource:
    """One root of a folder: the manifest of a checkpoint, or of a step of a run; see `Source`."""

    format = "mlstate"
    is_mapped = False
    has_index = True  # of all its tensors

    def __init__(
        self,
        files: CheckpointFiles,
        root: str = MANIFEST,
        manifest: Manifest | FormatError | None = None,
        choose: Callable[[], str] | None = None,
    ) -> None:
        """Create the source of the file `root` in a folder; nothing is read.

        `manifest`: of the root, if it was read, or the damage found in it. `choose`: returns the
        root again if it was deleted, as for ``step="best"``; None: the root is fixed.
        """
        self.files = files
        self.path = files.path
        self.root = root
        self.checked = True  # compare files of another program with checksums of `checksum`
        self._choose = choose
        self._manifest = manifest
        self._merged: _core.MergedIndex | None = None
        self._indexes: Indexes | None = None  # of a load

    def __fspath__(self) -> str:
        return self.path

    def fresh(self) -> IndexedSource:
        """Return an unread source of the same root."""
        return type(self)(CheckpointFiles(self.files.folder), self.root)

    def uncached(self) -> None:
        """Read everything again, from the files themselves; recorded checksums are compared."""
        self.files = CheckpointFiles(self.files.folder.without_cache())
        self._manifest = self._merged = self._indexes = None

    def check(self, options: LoadOptions) -> None:
        """Compare no checksums of other programs' files without ``verify``; see `Source`."""
        if not options["verify"]:
            self.checked = False

    # ---- description ----

    @property
    def manifest(self) -> Manifest:
        """The manifest, read at the first use."""
        if self._manifest is None:
            self._manifest = self._read_manifest()
        if isinstance(self._manifest, FormatError):
            raise self._manifest
        return self._manifest

    def _read_manifest(self) -> Manifest:
        return self.files.read_manifest(self.root)

    @property
    def saved(self) -> Mapping[str, Any]:
        """The empty dict: nothing is in memory."""
        return {}

    @property
    def index(self) -> Index:
        """The merged index of all ranks; after `begin`, of the ranks read so far."""
        return self.merged

    @property
    def merged(self) -> _core.MergedIndex:
        """The index that reads of tensors use."""
        if self._indexes is not None:
            return self._indexes.merged_index
        if self._merged is None:
            self._merged = self._read_index()
        return self._merged

    def _read_index(self) -> _core.MergedIndex:
        return self.files.load_merged_index(self.manifest)

    def begin(self, names: list[str] | None, rank: int | None, into: Any = None) -> None:
        """Read the indexes that list all tensors; `rank`: preferred among equal ones."""
        self._indexes = Indexes(self.files, self.manifest, rank)

    def need(self, requests: Iterable[tuple[int, list[str], Cuts]]) -> None:
        """Read the indexes that list the requested parts."""
        if self._indexes is not None:
            self._indexes.need(requests)

    @property
    def ranks_read(self) -> list[int]:
        """The ranks whose indexes `index` merges."""
        return [] if self._indexes is None else self._indexes.ranks

    # ---- reading ----

    def read(
        self,
        section: int,
        keys: list[str],
        cuts: Any,
        *,
        verify: bool,
        mmap: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> dict[str, Any]:
        """Return parts of tensors by key; see `Source`."""
        parts = TensorParts(self.merged, section, keys, cuts)
        return self.files.folder.load(parts, verify, mmap, progress)

    def read_into(
        self,
        section: int,
        keys: list[str],
        cuts: Any,
        targets: dict[str, Any],
        *,
        verify: bool,
        progress: Callable[[int], object] | None,
    ) -> None:
        """Read parts of tensors into `targets`; see `Source`."""
        parts = TensorParts(self.merged, section, keys, cuts)
        self.files.folder.load_into(parts, targets, verify, progress)

    def find_pairs(self) -> Pairs | None:
        """Return None: a checkpoint of mlstate has the numbers that were saved."""
        return None

    def attempt(self, read: Callable[[], _Result]) -> _Result:
        """Return ``read()``; repeat it if a file is missing and the root was replaced.

        Writers delete files only after every root that names them.
        """
        for tries_left in reversed(range(TRIES)):
            generation = ""
            try:
                generation = self.manifest.generation
                return read()
            except FileNotFoundError:
                if not tries_left or not self.reopen(generation):
                    raise
        raise AssertionError  # the last attempt returns or raises

    def reopen(self, generation: str) -> bool:
        """Forget manifest and indexes if a writer has replaced `generation`; return whether it has.

        If the root was deleted, and the source can choose, another root is chosen.
        """
        is_there = self._choose is None or self.files.folder.exists(self.root)
        if is_there and (not generation or self._read_manifest().generation == generation):
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Read everything again at the next use, of the root that is chosen then."""
        if self._choose is not None:
            self.root = self._choose()
        self._manifest = self._merged = self._indexes = None

    # ---- verifying ----

    def require_good(self) -> None:
        """Verify all files, and raise the first problem as an error."""
        if self._indexes is not None:
            self._indexes.read_all()
        for problem in self.find_problems(None)[1]:
            raise problem.as_error(self.files.path)

    def find_problems(self, progress: Callable[[int], object] | None) -> tuple[int, list[Problem]]:
        """Verify all files that `merged` lists; return the bytes read, and the problems."""
        count, problems = self.files.folder.verify(self.merged, progress)
        return count, [Problem(*problem) for problem in problems]

    def verify(self, report: VerifyReport, progress: Callable[[int], object] | None) -> None:
        """Verify the root and its files, and mark a damaged step; list files that no root needs."""
        from .verify_root import list_others, verify_root

        merged_indexes: dict[str, _core.MergedIndex] = {}
        verify_root(self.files, self.root, report, progress, merged_indexes)
        list_others(self.files, report, merged_indexes)
