"""`HuggingFaceSource`, `SafetensorsSource`: safetensors files of any program, read by headers."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ... import _core
from ..._common.caller import find_caller
from ..._common.store_error import store_error
from ...errors import CompatibilityError, FormatError, MLStateError, StoreNotFoundError
from .._files.checksums_verify import compare_files, compare_recorded
from .._files.safetensors_verify import read_header, verify_file
from .._folder.weight_names import is_index, set_of, weights_root
from .._quantized.config import find_entry
from .._report import VerifyReport, problem_of
from .._store.weight_checksums import find_checksums, require_index
from .._store.weight_files import (
    listed,
    read_merged_index,
    read_weights,
    unlisted_files,
    warn_of_total,
    without_missing,
)
from .indexed import IndexedSource

if TYPE_CHECKING:
    from ..._common.callback import Progress
    from .._store.checkpoint_files import CheckpointFiles
    from .._store.manifest import Manifest
    from .._store.weight_files import WeightFiles

_CRC32C = -3  # index of this field in a row of `MergedIndex.shards`


class HuggingFaceSource(IndexedSource):
    """The safetensors files of a folder, which its index or their names describe; see `Source`.

    `root` is the name that describes them: see weight_names.py.
    """

    format = "huggingface"
    takes_both = False  # the caller divides the tensors of a model and an optimizer in one file

    # ---- description ----

    @property
    def _weights(self) -> WeightFiles:
        weights = self.manifest.weights
        assert weights is not None
        return weights

    def _read_manifest(self) -> Manifest:
        """Return a manifest that describes the files; see `read_weights`."""
        folder = self.files.folder
        try:
            # the index in a download cache is a link
            data = folder.read(self.root, follow_links=True) if is_index(self.root) else None
            if data is not None and self.checked:
                require_index(folder, self.root, data)
            return read_weights(folder, self.root, data)
        except OSError as error:
            raise store_error(error, "cannot read the folder", self.path) from None

    def _read_index(self) -> _core.MergedIndex:
        return read_merged_index(self.files.folder, self.manifest, self.checked)

    def begin(self, names: list[str] | None, rank: int | None, into: Any = None) -> None:
        """Leave out missing files that no name needs; raise if one needs a missing file.

        Raises CompatibilityError for a file in a store with an optimizer, unless `takes_both`.
        """
        is_local = self.files.folder.is_local
        if not is_local and not self.takes_both and self._has_optimizer():
            raise CompatibilityError(
                f"{self.path}: holds an optimizer among its tensors: load a local copy, or convert "
                "it to a checkpoint by mlstate convert"
            )
        self._manifest = without_missing(self.files.folder, self.manifest, names)
        self._merged = self._read_index()
        if self.checked:
            warn_of_total(self.files.folder, self._manifest, self._merged)
        if names is None and is_local:
            self._warn_of_modules()

    def _has_optimizer(self) -> bool:
        from .._files.flat_file import PARTS  # local loads need nothing else of it

        manifest = self.manifest
        return PARTS in manifest.metadata or (manifest.model or {}).get("kind") == "optimizer"

    def _warn_of_modules(self) -> None:
        """Warn that the other modules of a model of sentence-transformers are not read."""
        path = self.path
        if not os.path.isfile(os.path.join(path, "modules.json")):
            return
        folders = [entry for entry in os.scandir(path) if entry.is_dir()]
        roots = ((entry.name, weights_root(os.listdir(entry.path))) for entry in folders)
        if unread := sorted(f"{name}/{root}" for name, root in roots if root is not None):
            find_caller().warn(f"{path}: weights in subfolders are not read: {listed(unread)}")

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The ``quantization_config`` in the folder, or in the metadata of its file."""
        return find_entry(self.files.folder, self.manifest.metadata)

    def names_in_set(self) -> list[str]:
        """Return the names of all tensors in the numbered files of the same set; [] without one."""
        folder, number = self.files.folder, set_of(self.root)
        if number is None or not folder.is_local:
            return []
        names = tuple(name for name in os.listdir(folder.path) if set_of(name) == number)
        with folder.header_files(names) as local:
            return _core.MergedIndex.of_files(local, names).keys(0)

    # ---- verifying ----

    def find_problems(self, report: VerifyReport, progress: Progress) -> None:
        """Verify the files, and compare them with their checksums unless `verify` does that.

        Of files without checksums of mlstate, only the structure is checked. A missing file is a
        problem.
        """
        folder = self.files.folder
        self._verify_files(report, progress)
        if self.checked:
            compare_files(folder, self._weights.files, find_checksums(folder), report, progress)
        warn_of_total(folder, self.manifest, self.merged)

    def _verify_files(self, report: VerifyReport, progress: Progress) -> None:
        """Verify the files one by one; add bytes and problems to `report`."""

        def has_checksums(path: str) -> bool:
            with suppress(FormatError):
                return read_header(path).has_checksums
            return False

        for name in self._weights.files:
            try:
                with self.files.folder.file_to_verify(name, has_checksums) as path:
                    of_file = verify_file(path, progress)
            except StoreNotFoundError as error:
                report.problems.append(problem_of("unreadable", name, error))
                continue
            report.bytes += of_file.bytes
            local_folder = os.path.dirname(path)  # of a store's object, a temporary one
            report.problems += [
                problem._replace(text=problem.text.replace(local_folder, self.files.path))
                for problem in of_file.problems
            ]

    def verify(self, report: VerifyReport, progress: Progress) -> None:
        """Verify headers and checksums of all files; compare them with recorded checksums too."""
        self.checked = False  # they are compared at the end, and changes are problems
        report.checksums = False
        try:
            self._verify_weights(report, progress)
        except MLStateError as error:
            if self._is_unreachable(error):
                raise
            report.problems.append(problem_of("manifest", self.root, error))
        compare_recorded(self.files.folder, report, progress)

    def _is_unreachable(self, error: MLStateError) -> bool:
        """Return whether a store failed, or the file that the caller named does not exist."""
        folder = self.files.folder
        is_gone = isinstance(error, StoreNotFoundError) and folder.file and self._manifest is None
        return bool(is_gone) or folder.is_outage(error)

    def _verify_weights(self, report: VerifyReport, progress: Progress) -> None:
        """Add the problems of the files to `report`, and the files that they do not include."""
        report.strange = unlisted_files(self.files.folder, self._weights)
        try:
            shards = self.merged.shards()
        except MLStateError as error:
            if self._is_unreachable(error):
                raise
            self._verify_files(report, None)
            if not report.problems:
                report.problems.append(problem_of("index", self.root, error))
            return
        self.find_problems(report, progress)
        report.bytes += sum(record.bytes for record in self.manifest.indexes)
        report.checksums = all(shard[_CRC32C] is not None for shard in shards)


class SafetensorsSource(HuggingFaceSource):
    """One safetensors file, whose name is `root`."""

    format = "safetensors"

    def __init__(self, files: CheckpointFiles, root: str, manifest: Manifest | None = None) -> None:
        """Create the source of the file `root` in a folder; nothing is read."""
        super().__init__(files, root, manifest)
        self.path = files.folder.named_path


def weights_source(files: CheckpointFiles, name: str) -> HuggingFaceSource:
    """Return the source of the weights that the file `name` of a folder describes, or is."""
    is_folder = weights_root([name]) is not None
    return (HuggingFaceSource if is_folder else SafetensorsSource)(files, name)
