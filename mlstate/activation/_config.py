"""`CheckpointConfig`, `create_strategy`, `register_strategy`: strategies by name, plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import isnan
from operator import index
from typing import Any, Self, TypeAlias

from .._common.arguments import FLAG, check_number, check_type
from .._common.budget import parse_size
from ._combinators import CheckpointStrategy, check_strategy
from ._strategies import (
    MEBIBYTE,
    IntervalStrategy,
    MemoryAwareStrategy,
    SelectiveStrategy,
    SizeBasedStrategy,
    SmartStrategy,
    check_overlap,
    layer_names,
)

ENTRY_POINTS = "mlstate.strategies"  # group of entry points of packages with strategies


class StrategyKind(StrEnum):
    """The strategies of mlstate; each member equals its name as a str.

    Examples
    --------
    >>> from mlstate.activation import StrategyKind
    >>> StrategyKind("size_based") is StrategyKind.SIZE_BASED, StrategyKind.SMART == "smart"
    (True, True)
    """

    INTERVAL = "interval"
    SELECTIVE = "selective"
    SIZE_BASED = "size_based"
    MEMORY_AWARE = "memory_aware"
    SMART = "smart"


@dataclass(frozen=True)
class CheckpointConfig:
    """The name of a strategy and its settings; `create_strategy` creates the strategy.

    A configuration is validated on creation and immutable; `dataclasses.replace` creates a
    changed copy. Settings of strategies other than the chosen one are validated and kept.

    Parameters
    ----------
    strategy : StrategyKind or str, default "interval"
        A strategy of mlstate, or a registered name.
    interval : int, default 2
        For ``interval``: number of layers from one checkpoint to the next.
    checkpoint_layers : iterable of str
        For ``selective``: layers to checkpoint.
    exclude_layers : iterable of str
        For ``selective``, ``size_based`` and ``smart``: layers never to checkpoint.
    min_activation_size_bytes : int or str, default 1 MiB
        For ``size_based``: smallest size of an activation to checkpoint.
    max_memory_percentage : float, default 0.8
        For ``memory_aware``: fraction of the memory, above 0 and at most 1.
    options : mapping
        Arbitrary settings for registered strategies.

    Raises
    ------
    ValueError
        If a setting is out of range, or a layer is in both lists.
    TypeError
        If a setting has a wrong type.

    Examples
    --------
    >>> from mlstate.activation import CheckpointConfig, create_strategy
    >>> config = CheckpointConfig(strategy="size_based", min_activation_size_bytes=4096)
    >>> create_strategy(config).name
    'SizeBased(4KB)'
    >>> CheckpointConfig.from_dict(config.to_dict()) == config
    True
    >>> CheckpointConfig(interval=0)
    Traceback (most recent call last):
    ValueError: interval must be greater than 0, got 0
    """

    strategy: StrategyKind | str = StrategyKind.INTERVAL
    interval: int = 2
    checkpoint_layers: Iterable[str] = ()
    exclude_layers: Iterable[str] = ()
    min_activation_size_bytes: int = MEBIBYTE
    max_memory_percentage: float = 0.8
    options: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Check and convert the fields, such as "1MiB" to bytes; raises for wrong ones."""
        chosen = layer_names("checkpoint_layers", self.checkpoint_layers)
        excluded = layer_names("exclude_layers", self.exclude_layers)
        check_overlap(chosen, excluded)
        self._set("strategy", _parse_kind(self.strategy))
        self._set("checkpoint_layers", chosen)
        self._set("exclude_layers", excluded)
        self._set("interval", _check_positive("interval", self.interval))
        size = self.min_activation_size_bytes
        if isinstance(size, str):
            size = parse_size("min_activation_size_bytes", size, 1)
        size = _check_positive("min_activation_size_bytes", size)
        self._set("min_activation_size_bytes", size)
        self._set("max_memory_percentage", _check_share(self.max_memory_percentage))
        check_type("options", self.options, Mapping, "a mapping")
        self._set("options", dict(self.options))

    def _set(self, name: str, value: object) -> None:
        """Set a field of this frozen instance while it is created."""
        object.__setattr__(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a dict, serialisable as JSON if `options` is.

        Examples
        --------
        >>> from mlstate.activation import CheckpointConfig
        >>> CheckpointConfig("selective", checkpoint_layers=["a"]).to_dict()["checkpoint_layers"]
        ['a']
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {
            "strategy": str(self.strategy),
            "checkpoint_layers": list(self.checkpoint_layers),
            "exclude_layers": list(self.exclude_layers),
            "options": dict(self.options),
        }

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Create a configuration from a dict such as `to_dict` returns; missing keys have defaults.

        Parameters
        ----------
        settings : mapping of str
            Setting names and values.

        Returns
        -------
        CheckpointConfig
            The validated configuration.

        Raises
        ------
        ValueError
            If a name is not a setting, or the constructor refuses a value.
        TypeError
            If `settings` is not a mapping, or a value has a wrong type.

        Examples
        --------
        >>> from mlstate.activation import CheckpointConfig
        >>> CheckpointConfig.from_dict({"interval": 4}).interval
        4
        >>> CheckpointConfig.from_dict({"intervall": 4})
        Traceback (most recent call last):
        ValueError: no such setting: intervall
        """
        check_type("settings", settings, Mapping, "a mapping")
        members = {f.name for f in fields(cls)}
        unknown = [str(name) for name in settings if name not in members]
        if unknown:
            raise ValueError(f"no such setting: {', '.join(unknown)}")
        return cls(**settings)


def _parse_kind(strategy: object) -> StrategyKind | str:
    """Return the `StrategyKind` of a name, or the name itself if it is not built in."""
    if not isinstance(strategy, str):
        raise TypeError(f"strategy must be a StrategyKind or a str, got {strategy!r}")
    try:
        return StrategyKind(strategy)
    except ValueError:
        return str(strategy)


def _check_positive(name: str, value: Any) -> int:
    """Return `value` as an int from 1 to 2**63 - 1.

    Raises TypeError or ValueError for others; `name`: of the setting, for the error.
    """
    try:
        if isinstance(value, FLAG):
            raise TypeError
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number <= 0:
        raise ValueError(f"{name} must be greater than 0, got {number}")
    if number >= 1 << 63:
        raise ValueError(f"{name} does not fit into 64 bits: {number}")
    return number


def _check_share(value: Any) -> float:
    """Return `max_memory_percentage` as a float; raise unless it is above 0 and at most 1."""
    share = check_number("max_memory_percentage", value)
    if isnan(share) or not 0 < share <= 1:
        raise ValueError(f"max_memory_percentage must be above 0 and at most 1, got {value}")
    return share


# ---- factories ----

Factory: TypeAlias = Callable[[CheckpointConfig], CheckpointStrategy]

_BUILT_IN: dict[str, Factory] = {
    "interval": lambda c: IntervalStrategy(c.interval),
    "selective": lambda c: SelectiveStrategy(c.checkpoint_layers, c.exclude_layers),
    "size_based": lambda c: SizeBasedStrategy(c.min_activation_size_bytes, c.exclude_layers),
    "memory_aware": lambda c: MemoryAwareStrategy(c.max_memory_percentage),
    "smart": lambda c: SmartStrategy(c.exclude_layers),
}
_REGISTERED: dict[str, Factory] = {}  # by `register_strategy`, and entry points once loaded


def register_strategy(name: str, factory: Factory) -> None:
    """Register a factory under a name, for use in configurations.

    Packages need not call this: an entry point in the group ``mlstate.strategies`` is found by
    its name and must load the factory.

    Parameters
    ----------
    name : str
        Name of the strategy; not a built-in name. An earlier registration is replaced.
    factory : callable
        Called with a `CheckpointConfig`; returns a new strategy.

    Raises
    ------
    ValueError
        If the name is empty or built in.
    TypeError
        If the name is not a str, or the factory is not callable.

    Examples
    --------
    >>> from mlstate.activation import CheckpointConfig, IntervalStrategy
    >>> from mlstate.activation import create_strategy, register_strategy
    >>> register_strategy("doctest_twice", lambda config: IntervalStrategy(2 * config.interval))
    >>> create_strategy(CheckpointConfig(strategy="doctest_twice", interval=3)).name
    'Interval(6)'
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {name!r}")
    name = str(name)
    if not name or name in _BUILT_IN:
        raise ValueError(f"name must not be {name!r}: a built-in strategy cannot be replaced")
    if not callable(factory):
        raise TypeError(f"factory of {name!r} must be callable, got {type(factory).__name__}")
    _REGISTERED[name] = factory


def create_strategy(config: CheckpointConfig) -> CheckpointStrategy:
    """Create the strategy that a configuration describes.

    Parameters
    ----------
    config : CheckpointConfig
        Its `strategy` is built in, registered, or an entry point of an installed package.

    Returns
    -------
    CheckpointStrategy
        A new strategy in its initial state.

    Raises
    ------
    ValueError
        If the strategy is unknown (the message lists the known ones), or two packages provide
        it.
    TypeError
        If `config` is not a `CheckpointConfig`, or the factory does not return a strategy.

    Examples
    --------
    >>> from mlstate.activation import CheckpointConfig, create_strategy
    >>> create_strategy(CheckpointConfig(strategy="memory_aware", max_memory_percentage=0.5)).name
    'MemoryAware(50%)'
    >>> create_strategy(CheckpointConfig(strategy="best"))
    Traceback (most recent call last):
    ValueError: unknown strategy 'best'; known are: interval, selective, ...
    """
    check_type("config", config, CheckpointConfig)
    name = str(config.strategy)
    factory = _BUILT_IN.get(name) or _REGISTERED.get(name) or _load_factory(name)
    strategy: CheckpointStrategy = check_strategy(
        factory(config), f"what the factory of {name!r} made"
    )
    return strategy


def _load_factory(name: str) -> Factory:
    """Load, register and return the factory that an installed package provides under `name`.

    Raises ValueError if no package has it, or more than one.
    """
    from importlib.metadata import entry_points  # takes tens of milliseconds to import

    # by value, as a package may be found twice on the path
    points = {point.value: point for point in entry_points(group=ENTRY_POINTS, name=name)}
    if len(points) > 1:
        raise ValueError(f"more than one package has a strategy {name!r}: {', '.join(points)}")
    if not points:
        others = {point.name for point in entry_points(group=ENTRY_POINTS)} | set(_REGISTERED)
        choices = ", ".join([*_BUILT_IN, *sorted(others - set(_BUILT_IN))])
        raise ValueError(f"unknown strategy {name!r}; known are: {choices}")
    register_strategy(name, next(iter(points.values())).load())
    return _REGISTERED[name]


def create_interval(interval: int = 2) -> IntervalStrategy:
    """Create an `IntervalStrategy`.

    Parameters
    ----------
    interval : int, default 2
        See the class.

    Returns
    -------
    IntervalStrategy
        A new strategy.

    Raises
    ------
    CapacityError, TypeError, ValueError
        As for the class.

    Examples
    --------
    >>> from mlstate.activation import create_interval
    >>> create_interval(4).name
    'Interval(4)'
    """
    return IntervalStrategy(interval)


def create_selective(
    checkpoint_layers: Iterable[str] | None = None, exclude_layers: Iterable[str] | None = None
) -> SelectiveStrategy:
    """Create a `SelectiveStrategy`.

    Parameters
    ----------
    checkpoint_layers, exclude_layers : iterable of str, optional
        See the class.

    Returns
    -------
    SelectiveStrategy
        A new strategy.

    Raises
    ------
    TypeError, ValueError
        As for the class.

    Examples
    --------
    >>> from mlstate.activation import create_selective
    >>> create_selective(["layers.3"]).should_checkpoint("layers.3", None, 3)
    True
    """
    return SelectiveStrategy(checkpoint_layers, exclude_layers)


def create_size_based(
    min_activation_size_bytes: int | str = MEBIBYTE, exclude_layers: Iterable[str] | None = None
) -> SizeBasedStrategy:
    """Create a `SizeBasedStrategy`.

    Parameters
    ----------
    min_activation_size_bytes : int or str, default 1 MiB
        The class's `min_size_bytes`.
    exclude_layers : iterable of str, optional
        See the class.

    Returns
    -------
    SizeBasedStrategy
        A new strategy.

    Raises
    ------
    CapacityError, TypeError, ValueError
        As for the class.

    Examples
    --------
    >>> from mlstate.activation import create_size_based
    >>> create_size_based(512).name
    'SizeBased(512B)'
    """
    return SizeBasedStrategy(min_activation_size_bytes, exclude_layers)


def create_memory_aware(
    max_memory_percentage: float = 0.8, memory_tracker: object = None
) -> MemoryAwareStrategy:
    """Create a `MemoryAwareStrategy`.

    Parameters
    ----------
    max_memory_percentage : float, default 0.8
        See the class.
    memory_tracker : MemoryTracker, optional
        The class's `tracker`.

    Returns
    -------
    MemoryAwareStrategy
        A new strategy.

    Raises
    ------
    TypeError, ValueError
        As for the class.

    Examples
    --------
    >>> from mlstate.activation import create_memory_aware
    >>> create_memory_aware(0.9).name
    'MemoryAware(90%)'
    """
    return MemoryAwareStrategy(max_memory_percentage, memory_tracker)


def create_smart(exclude_layers: Iterable[str] | None = None) -> SmartStrategy:
    """Create a `SmartStrategy`.

    Parameters
    ----------
    exclude_layers : iterable of str, optional
        See the class.

    Returns
    -------
    SmartStrategy
        A new strategy.

    Raises
    ------
    TypeError
        As for the class.

    Examples
    --------
    >>> from mlstate.activation import create_smart
    >>> create_smart(["head"]).exclude_layers
    ('head',)
    """
    return SmartStrategy(exclude_layers)
