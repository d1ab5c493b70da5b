"""A checkpoint's bytes by layer and by state, for pages and plots; layer of a parameter."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..._common.text import number_order

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .._records import TensorRecord

WEIGHTS, OTHER = "weights", "other states"
_STATES = 5  # number of states with their own column


def layer_of(parameter: str) -> str:
    """Return the layer's name: up to the first number, else all but the last part.

    Examples
    --------
    >>> layer_of("h.3.attn.weight"), layer_of("norm.weight"), layer_of("w")
    ('h.3', 'norm', '')
    """
    parts = parameter.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdecimal():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1])


@dataclass(slots=True)
class Parameter:
    """A parameter with its states."""

    name: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    shards: int = 0
    version: int = 0
    nbytes: dict[str, int] = field(default_factory=Counter)  # by column

    def add(self, record: TensorRecord, column: str) -> None:
        """Add the shards, version and bytes of one tensor; `column`: name for its bytes."""
        if column == WEIGHTS:
            self.dtype, self.shape = record.dtype, record.shape
        self.shards += record.shards
        self.version = max(self.version, record.version)
        self.nbytes[column] += record.nbytes


@dataclass(slots=True)
class Group:
    """A layer: its tensors by parameter, and bytes by state."""

    name: str
    records: dict[str, list[TensorRecord]] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=Counter)  # by column
    count: int = 0  # of tensors

    @property
    def total(self) -> int:
        """The bytes of all states."""
        return sum(self.nbytes.values())

    def parameter(self, name: str, columns: list[str]) -> Parameter:
        """Return a parameter with its tensors; `columns`: as `columns_of` returns them."""
        parameter = Parameter(name)
        for record in self.records[name]:
            parameter.add(record, column_of(record, columns))
        return parameter


def column_of(record: TensorRecord, columns: Iterable[str]) -> str:
    """Return the name of the column that counts a tensor's bytes, one of `columns`.

    A state without its own column is in the one for the rest.
    """
    name = WEIGHTS if record.section == "params" else record.state or OTHER
    return name if name in columns else OTHER


def columns_of(records: Iterable[TensorRecord]) -> list[str]:
    """Return the column names for the tensors `records`: weights, the largest states, the rest.

    At most `_STATES` states have a column; these are sorted by name. A column without tensors is
    left out.
    """
    sizes: Counter[str] = Counter()
    for record in records:
        sizes[WEIGHTS if record.section == "params" else record.state or OTHER] += record.nbytes
    names = sizes.keys() - {WEIGHTS, OTHER}
    largest = sorted(names, key=lambda name: (-sizes[name], name))[:_STATES]
    weights = [WEIGHTS] if WEIGHTS in sizes else []
    return weights + sorted(largest) + ([OTHER] if OTHER in sizes or len(names) > _STATES else [])


def groups_of(records: Iterable[TensorRecord], columns: list[str]) -> list[Group]:
    """Return the layers with their tensors; layers are in the order of numbers in their names.

    `columns`: as `columns_of` returns them.
    """
    groups: dict[str, Group] = {}
    by_start: dict[str, Group] = {}  # by the names of parameters up to their last dot
    for record in records:
        start = record.parameter.rpartition(".")[0]
        if (group := by_start.get(start)) is None:
            name = layer_of(record.parameter)
            group = by_start[start] = groups.setdefault(name, Group(name))
        group.records.setdefault(record.parameter, []).append(record)
        group.nbytes[column_of(record, columns)] += record.nbytes
        group.count += 1
    return sorted(groups.values(), key=lambda group: number_order(group.name))
