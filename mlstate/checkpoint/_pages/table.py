"""A checkpoint's bytes by layer and by state, for pages and plots; layer of a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._common.text import number_order

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .._checkpoint.checkpoint import TensorRecord

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


class Parameter:
    """A parameter with its states."""

    __slots__ = ("dtype", "name", "nbytes", "shape", "shards", "version")

    def __init__(self, name: str) -> None:
        """Create a parameter without tensors; `add` counts them."""
        self.name = name
        self.dtype = ""
        self.shape: tuple[int, ...] | None = None
        self.shards = 0
        self.version = 0
        self.nbytes: dict[str, int] = {}  # by column

    def add(self, record: TensorRecord, column: str) -> None:
        """Add the shards, version and bytes of one tensor; `column`: name for its bytes."""
        if column == WEIGHTS:
            self.dtype, self.shape = record.dtype, record.shape
        self.shards += record.shards
        self.version = max(self.version, record.version)
        self.nbytes[column] = self.nbytes.get(column, 0) + record.nbytes


class Group:
    """A layer: its parameters, and bytes by state."""

    __slots__ = ("name", "nbytes", "parameters", "total")

    def __init__(self, name: str) -> None:
        """Create a layer without parameters."""
        self.name = name
        self.parameters: dict[str, Parameter] = {}
        self.nbytes: dict[str, int] = {}  # by column
        self.total = 0  # bytes


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
    sizes: dict[str, int] = {}
    weights = False
    for record in records:
        if record.section == "params":
            weights = True
        else:
            name = record.state or OTHER
            sizes[name] = sizes.get(name, 0) + record.nbytes
    named = sorted((name for name in sizes if name != OTHER), key=lambda n: (-sizes[n], n))
    columns = sorted(named[:_STATES])
    if len(named) > _STATES or OTHER in sizes:
        columns.append(OTHER)
    return [WEIGHTS, *columns] if weights else columns


def groups_of(records: Iterable[TensorRecord], columns: list[str]) -> list[Group]:
    """Return the layers with their parameters; layers are in the order of numbers in their names.

    `columns`: as `columns_of` returns them.
    """
    groups: dict[str, Group] = {}
    for record in records:
        name = layer_of(record.parameter)
        group = groups.get(name)
        if group is None:
            group = groups[name] = Group(name)
        parameter = group.parameters.get(record.parameter)
        if parameter is None:
            parameter = group.parameters[record.parameter] = Parameter(record.parameter)
        column = column_of(record, columns)
        parameter.add(record, column)
        group.nbytes[column] = group.nbytes.get(column, 0) + record.nbytes
        group.total += record.nbytes
    return sorted(groups.values(), key=lambda group: number_order(group.name))
