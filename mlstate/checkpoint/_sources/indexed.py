"""`IndexedSource`: a checkpoint of mlstate, local or in a store; only the needed parts are read."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...errors import FormatError
from ...state._group_merge import packed_states
from .._folder.names import MANIFEST
from .._folder.protocol import TensorParts
from .._report import Problem, VerifyReport
from .._sections import OPTIMIZER, STATES
from .._store.checkpoint_files import CheckpointFiles, read_current
from .._store.index_patterns import owners_of
from .protocol import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeVar, Unpack

    from ... import _core
    from ..._common.callback import Progress
    from ..._sharding.layout import Cuts
    from .._options import LoadOptions
    from .._store.manifest import Manifest
    from .protocol import How, Index

    _Result = TypeVar("_Result")


class _Indexes:
    """The indexes of `ranks`, which have been read, as one `merged_index`.

    Initially it lists all tensors; after `need`, it lists all shards of the requested parts. One
    index of each pattern lists all tensors with their layouts, and the manifest records which ranks
    store which parts. So a rank reads only the indexes that list its parts, and their number does
    not grow with the number of ranks.
    """

    def __init__(
        self, files: CheckpointFiles, manifest: Manifest, rank: int | None, *, every: bool = False
    ) -> None:
        """Read the first indexes: one for each pattern of ranks, or all if no patterns are known.

        `rank`: prefer this rank's index among equal ones; None: the lowest rank's. `every`: read
        all.
        """
        self._files, self._manifest, self._rank = files, manifest, rank
        self._patterns = [pattern for pattern in manifest.patterns or () if pattern.ranks]
        self._needed: set[int] = set()
        self._owners: dict[bytes, dict[int, list[int]]] = {}  # by `places` of a tensor
        self._texts: dict[int, bytes] = {}  # texts of the indexes that were read first
        if every or manifest.patterns is None:
            self.ranks = list(range(manifest.world_size))
        else:
            self.ranks = [self._choose(pattern.ranks) for pattern in self._patterns]
        self._first_ranks = self.ranks  # by pattern, the rank whose index was read
        self.merged_index = self._first_index = self._read(self.ranks)
        if len(self.ranks) == manifest.world_size:
            self._texts.clear()  # all indexes have been read

    def _choose(self, ranks: list[int]) -> int:
        """Return this rank if it is in `ranks`, else the lowest rank."""
        return self._rank if self._rank is not None and self._rank in ranks else min(ranks)

    def _read(self, ranks: list[int]) -> _core.MergedIndex:
        """Return the indexes of `ranks` as one.

        Layouts cut no state of an optimizer in it that is a nested value, stored as bytes: the
        groups of the optimizers in the manifest list these.
        """
        manifest = self._manifest
        merged = self._files.load_merged_index(manifest, ranks, self._texts)
        kinds = [(OPTIMIZER, "", manifest.optimizer or {})]
        kinds += [(STATES, f"{name}/", kind) for name, kind in (manifest.states or {}).items()]
        nested: dict[int, set[str]] = {}
        for section, prefix, kind in kinds:
            with suppress(AttributeError, LookupError, TypeError):  # of another program
                if groups := kind.get("param_groups"):
                    keys = {prefix + key for key in packed_states(groups)}
                    nested[section] = nested.get(section, set()) | keys
        for section, keys in nested.items():
            merged.keep_whole(section, keys)
        return merged

    def read_all(self) -> None:
        """Read the indexes of all ranks."""
        if len(self.ranks) < self._manifest.world_size:
            self.ranks = list(range(self._manifest.world_size))
            self.merged_index = self._read(self.ranks)

    def _owners_of(self, places: bytes, parts: set[int]) -> set[int]:
        """Return ranks whose indexes list the parts `parts` of a tensor.

        `places`: of the tensor, as for `owners_of`. If no rank stores one of the parts, this is a
        rank that lists the tensor.
        """
        if places not in self._owners:
            self._owners[places] = owners_of(places, self._patterns)
        owners = self._owners[places]
        ranks_found = {self._choose(owners[part]) for part in parts if part in owners}
        # the first number in `places` is of a pattern that lists the tensor
        return ranks_found or {self._first_ranks[int.from_bytes(places[:4], sys.byteorder)]}

    def need(self, requests: Iterable[tuple[int, list[str], Cuts]]) -> None:
        """Read the indexes that list the requested parts; `merged_index` then has these only.

        `requests`: number of the section, keys, and how these are cut. Earlier requests stay in it.
        """
        if len(self.ranks) == self._manifest.world_size:
            return
        # a tensor with more parts than this cannot be complete
        most_parts = sum(len(pattern.ranks) * len(pattern.parts) for pattern in self._patterns) + 1
        for section, keys, cutting in requests:
            parts_by_place = self._first_index.select_parts(
                self._files.path, section, keys, cutting, most_parts
            )
            for places, parts in parts_by_place.items():
                self._needed |= self._owners_of(places, parts)
        if self._needed and not self._needed.issubset(self.ranks):
            self.ranks = sorted(self._needed)
            self.merged_index = self._read(self.ranks)


class IndexedSource(Source):
    """One root of a folder: the manifest of a checkpoint, or of a step of a run; see `Source`."""

    format = "mlstate"
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
        root again if it was deleted, such as the best step; None: the root is fixed.
        """
        self.files = files
        self.path = files.path
        self.root = root
        self.checked = True  # compare files of another program with checksums of `checksum`
        self._choose = choose
        self._manifest = manifest
        self._merged: _core.MergedIndex | None = None
        self._indexes: _Indexes | None = None  # of a load

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
        return _Indexes(self.files, self.manifest, None, every=True).merged_index

    def begin(self, names: list[str] | None, rank: int | None, into: Any = None) -> None:
        """Read the indexes that list all tensors; `rank`: preferred among equal ones."""
        self._indexes = _Indexes(self.files, self.manifest, rank)

    def need(self, requests: Iterable[tuple[int, list[str], Cuts]]) -> None:
        """Read the indexes that list the requested parts."""
        if self._indexes is not None:
            self._indexes.need(requests)

    @property
    def ranks_read(self) -> list[int]:
        """The ranks whose indexes `index` merges."""
        return [0] if self._indexes is None else self._indexes.ranks

    # ---- reading ----

    def fits(self, section: int, keys: list[str], cuts: Any, targets: dict[str, Any]) -> None:
        """Raise if `targets`, by key, do not fit; see `Source`."""
        self.merged.fits(self.path, section, keys, cuts, targets)

    def read(self, section: int, keys: list[str], cuts: Any, **how: Unpack[How]) -> dict[str, Any]:
        """Return parts of tensors by key; see `Source`."""
        parts, folder = TensorParts(self.merged, section, keys, cuts), self.files.folder
        verify, progress = how.get("verify", True), how.get("progress")
        if "into" not in how:
            return folder.load(parts, verify, how.get("mmap", False), progress)
        folder.load_into(parts, how["into"], verify, progress)
        return how["into"]

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The ``quantization_config`` of the model that was saved, from the manifest."""
        return self.manifest.quantization_config

    def attempt(self, read: Callable[[], _Result]) -> _Result:
        """Return ``read()``; repeat it if a file is missing and the root was replaced."""
        return read_current(lambda: self.manifest, lambda _: read(), self.reopen)

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
        report = VerifyReport(self.path)
        self.find_problems(report, None)
        for problem in report.problems:
            raise problem.as_error(self.files.path)

    def find_problems(self, report: VerifyReport, progress: Progress) -> None:
        """Verify all files that `merged` lists; add the bytes read and problems to `report`."""
        count, problems = self.files.folder.verify(self.merged, progress)
        report.bytes += count
        report.problems += [Problem(*problem) for problem in problems]

    def verify(self, report: VerifyReport, progress: Progress) -> None:
        """Verify the root and its files, and mark a damaged step; list files that no root needs."""
        from .verify_root import list_others, verify_root

        merged_indexes = verify_root(self.files, self.root, report, progress)
        list_others(self.files, report, merged_indexes)
