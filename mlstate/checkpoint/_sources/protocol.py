"""`Source`, the protocol of everything that can be loaded; a new format implements it.

    IndexedSource       a checkpoint of mlstate; versions, ranks and repair are its own
    HuggingFaceSource   safetensors files that an index or their names describe
    SafetensorsSource   one safetensors file
    WholeSource         every other format: read as a whole, then cut

`open_source` chooses the class for a path, by the content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeVar, Unpack

    from ..._common.callback import Progress
    from ..._sharding.layout import Cuts
    from .._options import LoadOptions
    from .._report import VerifyReport
    from .._store.manifest import Manifest

    _Result = TypeVar("_Result")


class Index(Protocol):
    """The table of a source's tensors; `_core.MergedIndex` implements it."""

    def keys(self, section: int, /) -> list[str]:
        """Return the keys of a section: 0 the model, 1 the optimizer, 2 named states."""

    def tensors(self) -> list[tuple[Any, ...]]:
        """Return the fields of a `TensorRecord` for each tensor."""

    def shards(self) -> list[Any]:
        """Return the fields of a `ShardRecord` for each stored shard; [] if they are unknown."""

    def files(self) -> dict[str, int]:
        """Return the sizes of the files with tensors, by path."""

    def heads(self) -> list[tuple[Any, ...]]:
        """Return facts about each index; the last two are the bytes of shards, and in files."""


class How(TypedDict, total=False):
    """How a source reads tensors."""

    verify: bool  # compare the bytes with checksums: the default
    mmap: bool  # return views of the files, if possible
    into: dict[str, Any]  # arrays to fill and return, which `fits` has accepted
    progress: Progress  # called with numbers of bytes as they arrive


class Source(Protocol):
    """A path that can be loaded. Nothing is read before `begin`, `manifest` or `index`."""

    path: str  # absolute, or the URL
    format: str  # name of the format
    is_mapped: bool = False  # the arrays in `saved` are views of files that a writer may change

    def __fspath__(self) -> str:
        """Return `path`: functions that open a path also accept a source."""
        return self.path

    def fresh(self) -> Source:
        """Return an unread source of the same path."""

    @property
    def manifest(self) -> Manifest:
        """The description: kinds of model, optimizer and named states, step, metadata."""

    @property
    def index(self) -> Index:
        """The table of tensors; after `begin`, of those that were read or needed so far."""

    @property
    def saved(self) -> Mapping[str, Any]:
        """States that are in memory, by label such as ``states['ema']``; {} if none are."""

    def check(self, options: LoadOptions) -> None:
        """Raise ValueError for options of a load that the format does not support."""

    def begin(self, names: list[str] | None, rank: int | None, into: Any = None) -> None:
        """Prepare a load of `names` (None: all) by a rank: read what lists these tensors.

        `into`: the caller's targets; None: no target is given.
        """

    def need(self, requests: Iterable[tuple[int, list[str], Cuts]]) -> None:
        """Read the indexes that list the requested parts: section, keys, and how they are cut."""
        return

    def fits(self, section: int, keys: list[str], cuts: Any, targets: dict[str, Any]) -> None:
        """Raise if a target has another shape or dtype than its part, or cannot be written."""

    def read(self, section: int, keys: list[str], cuts: Any, **how: Unpack[How]) -> dict[str, Any]:
        """Return parts of tensors by key, in new arrays unless `how` asks for others."""

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The ``quantization_config`` of the model; None without one.

        Raises FormatError for a malformed one.
        """

    def attempt(self, read: Callable[[], _Result]) -> _Result:
        """Return ``read()``; repeat it if a writer replaces the content meanwhile."""
        return read()

    def require_loadable(self) -> None:
        """Raise the error that a load of model and optimizer raises; an index raises none."""
        return

    def verify(self, report: VerifyReport, progress: Progress) -> None:
        """Read all of it, and add all problems to `report`."""
