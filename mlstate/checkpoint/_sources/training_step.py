"""`StepSource`: a step of a Trainer or accelerate: weights, and training entries.

The weights are read by their headers, and the entries as a whole, but only if they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._files.parts import Parts, Selection
from .._folder.local import LocalFolder
from .._layouts.training_step import read_metadata, step_entries
from .readers import read_training_entries
from .weights import HuggingFaceSource
from .whole import WholeSource

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Unpack

    from ..._common.callback import Progress
    from .._options import LoadOptions
    from .._report import VerifyReport
    from .._store.checkpoint_files import CheckpointFiles
    from .._store.manifest import Manifest
    from .protocol import How, Index


class StepIndex:
    """The tensors of the model's source, and of a source for all others; see `Index`."""

    def __init__(self, model: Index, others: Index) -> None:
        self._indexes = (model, others)

    def keys(self, section: int) -> list[str]:
        """Return the keys of a section."""
        return self._indexes[bool(section)].keys(section)

    def tensors(self) -> list[tuple[Any, ...]]:
        """Return the fields of a `TensorRecord` for each tensor."""
        return [row for index in self._indexes for row in index.tensors()]

    def shards(self) -> list[Any]:
        """Return the shards of the model; shards of other tensors are unknown."""
        return [row for index in self._indexes for row in index.shards()]

    def files(self) -> dict[str, int]:
        """Return the sizes of the files of weights."""
        return dict(self._indexes[0].files())

    def heads(self) -> list[tuple[Any, ...]]:
        """Return one head with the bytes of all tensors."""
        total = sum(index.heads()[0][-2] for index in self._indexes)
        return [(0, 0, 0, 0, total, total)]


class _Entries(WholeSource):
    """The training entries of a folder."""

    def files_to_verify(self) -> dict[str, str]:
        """Return the paths of the entries' files, by name."""
        entries = step_entries(LocalFolder(self.path).names("")).values()
        return {name: f"{self.path}/{name}" for files in entries for name in files.values()}


class StepSource(HuggingFaceSource):
    """The weights of a folder, and its optimizer, named states and metadata; see `Source`."""

    has_index = False
    is_mapped = True  # the training entries are

    def __init__(self, files: CheckpointFiles, root: str, manifest: Manifest | None = None) -> None:
        """Create the source of a local folder; nothing is read."""
        super().__init__(files, root, manifest)
        self._others = _Entries(self.path, self.format, self._read_others)
        self._needs_others = True

    def _read_others(self, checked: bool, selection: Selection | None) -> Parts:
        return read_training_entries(self.path, selection or Selection(), checked=checked)

    def select(self, selection: Selection) -> None:
        """Read only these training entries; call it before anything is read."""
        self._others.select(selection)

    def check(self, options: LoadOptions) -> None:
        """Raise ValueError for options that the training entries do not support."""
        super().check(options)
        into: Any = options["into"]
        self._needs_others = into is None or into.optimizer is not None or bool(into.states)
        if self._needs_others:  # these are read into memory, and compared before, in any case
            is_verified = bool(options["verify"])
            self._others.check(options | {"mmap": False, "verify": is_verified})

    @property
    def saved(self) -> Mapping[str, Any]:
        """The states of the training entries, by label."""
        return self._others.saved if self._needs_others else {}

    @property
    def manifest(self) -> Manifest:
        """The description of the weights and, if the load needs them, of the training entries."""
        manifest = super().manifest
        others: Any = Parts(None, None, {}, {})
        if self._needs_others:
            others = self._others.manifest
        else:
            others.metadata.update(read_metadata(self.files.folder))
        return manifest._replace(
            optimizer=others.optimizer,
            states=others.states,
            step=others.step,
            metadata={**manifest.metadata, **others.metadata},
        )

    @property
    def index(self) -> Index:
        """The table of all tensors that a load needs."""
        return StepIndex(self.merged, self._others.index) if self._needs_others else self.merged

    def begin(self, names: list[str] | None, rank: int | None, into: Any = None) -> None:
        """Read the headers of the weights, and the entries if the load needs them."""
        super().begin(names, rank)
        if self._needs_others:
            self._others.begin(names, rank, into)

    def fits(self, section: int, keys: list[str], cuts: Any, targets: dict[str, Any]) -> None:
        """Raise if `targets`, by key, do not fit; see `Source`."""
        fits = self._others.fits if section else super().fits
        fits(section, keys, cuts, targets)

    def read(self, section: int, keys: list[str], cuts: Any, **how: Unpack[How]) -> dict[str, Any]:
        """Return parts of tensors by key; see `Source`."""
        read = self._others.read if section else super().read
        return read(section, keys, cuts, **how)

    def require_loadable(self) -> None:
        """Raise the error that a load of the optimizer raises."""
        self._others.require_loadable()

    def verify(self, report: VerifyReport, progress: Progress) -> None:
        """Verify the weights, then the files of the training entries."""
        self._needs_others = False
        super().verify(report, progress)
        has_checksums = report.checksums
        self._others.verify(report, progress)
        report.checksums = report.checksums and has_checksums
