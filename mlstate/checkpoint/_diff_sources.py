"""`diff_sources`: compares two checkpoints or files by section and batch, for ``mlstate diff``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.batches import batches_of
from ..state._diff import StateDiff, diff_states, join_diffs
from ._compare.diff import diff_settings
from ._compare.side import BATCH_TENSORS, Side
from ._convert.lightning import as_folder
from ._store.chosen_names import chosen_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .._common.callback import CountedProgress, Progress
    from .._common.report import Table
    from ._sources.protocol import Source

_SECTIONS = ("model", "optimizer", "states")
_BATCH_BYTES = 64 << 20  # of tensors that must be assembled in memory


class SourceDiff(NamedTuple):
    """The differences of two sources, by section."""

    sides: tuple[Side, Side]
    sections: dict[str, StateDiff]

    @property
    def identical(self) -> bool:
        """Whether no section differs."""
        return all(difference.identical for difference in self.sections.values())

    def tables(self) -> Iterator[Table]:
        """Yield a table for each section, without those that both sides lack."""
        for number, (name, difference) in enumerate(self.sections.items()):
            if any(side.entries[number] for side in self.sides) or not difference.identical:
                table = difference._table()
                table.lines = [f"{name}: {line}" for line in table.lines]
                yield table

    def data(self) -> dict[str, Any]:
        """Return the differences as JSON values."""
        sides = zip(("first", "second"), self.sides, strict=True)
        return {
            "identical": self.identical,
            **{name: {"path": side.path, "step": side.step} for name, side in sides},
            **{name: _data_of(difference) for name, difference in self.sections.items()},
        }


def _data_of(difference: StateDiff) -> dict[str, Any]:
    """Return the differences of one section as JSON values.

    An infinite or NaN number becomes None, which JSON can express.
    """

    def finite(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    data = {"identical": difference.identical, **difference._asdict()}
    for kind in ("shapes", "dtypes"):
        data[kind] = [{"name": name, "first": a, "second": b} for name, a, b in data[kind]]
    data["changes"] = [
        {name: finite(value) for name, value in change._asdict().items()}
        for change in difference.changes
    ]
    return data


def _batches(section: int, sides: Sequence[Side], keys: list[str]) -> Iterator[list[str]]:
    """Yield names of both sides in a section, in batches whose tensors fit the memory.

    The tensors of a batch take at most `_BATCH_BYTES` of memory; a larger one is alone.
    """

    def memory(key: str) -> int:
        return sum(side.memory(section, key) for side in sides)

    return batches_of(keys, memory, _BATCH_BYTES, BATCH_TENSORS)


def _compare_section(
    section: int, sides: Sequence[Side], keys: list[str], progress: Progress, **tolerance: float
) -> StateDiff:
    """Return the differences of the tensors `keys` of one section, compared batch by batch.

    `progress`: called with bytes of the first side, or None.
    """
    total = StateDiff([], [], [], [], [], unchanged=0)
    codes = {key for side in sides for key in side.codes[section]}
    for batch in _batches(section, sides, keys):
        first, second = (side.arrays(section, batch) for side in sides)
        total = join_diffs(total, diff_states(first, second, codes=codes, **tolerance))
        if progress is not None:
            progress(sum(sides[0].nbytes(section, key) for key in batch))
    return total


def diff_sources(
    first: Source,
    second: Source,
    names: list[str] | None,
    progress: CountedProgress,
    **tolerance: float,
) -> SourceDiff:
    """Compare two sources; a file of Lightning is read with all its states.

    `names`: patterns of tensors; None: all, and settings of optimizers that differ are listed too.
    `tolerance`: `rtol` and `atol`. Raises if a pattern matches no name of any section.
    """
    first, second = (
        as_folder(source, exact=False) if source.format == "lightning" else source
        for source in (first, second)
    )

    def compare() -> SourceDiff:
        sides = Side(first), Side(second)
        listed = [[*left | right] for left, right in zip(*(s.entries for s in sides), strict=True)]
        _, chosen = chosen_names(listed, names, "")
        with progress(sides[0].total_bytes) as report:
            sections = [
                _compare_section(n, sides, keys, report, **tolerance)
                for n, keys in enumerate(chosen)
            ]
        if names is None:
            settings = zip(*(side.settings for side in sides), strict=True)
            changed = [diff_settings(left, right, **tolerance) for left, right in settings]
            sections = [*map(join_diffs, sections, changed)]
        return SourceDiff(sides, dict(zip(_SECTIONS, sections, strict=True)))

    return first.attempt(lambda: second.attempt(compare))
