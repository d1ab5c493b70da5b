"""Strategies: interval, selective, size-based, memory-aware, smart: arguments, names, copies.

The C core makes the decisions. This module adds names, argument checks, and value semantics:
equality, copies, pickles and operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from .. import _core
from .._common.arguments import check_callback, check_items
from .._common.budget import parse_size
from .._common.text import shorten
from ._combinators import Operators
from ._memory_tracker import MemoryTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MEBIBYTE = 1 << 20


def layer_names(label: str, layers: Iterable[str] | None) -> tuple[str, ...]:
    """Return the names of layers as a tuple, without duplicates, in order; None: an empty one.

    `label`: of the argument, for errors. Raises TypeError for a single str, which is probably one
    layer's name, and for names that are not str.
    """
    if layers is None:
        return ()
    names = check_items(label, layers, "layer ids")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{label} must hold layer ids, which are str; got {name!r}")
    return tuple(dict.fromkeys(names))


def check_overlap(chosen: Iterable[str], excluded: Iterable[str]) -> None:
    """Raise ValueError, with all their names, if layers are in both lists."""
    excluded_names = set(excluded)
    both = [name for name in chosen if name in excluded_names]
    if both:
        raise ValueError(f"Layers cannot be both checkpointed and excluded: {', '.join(both)}")


def format_bytes(count: int) -> str:
    """Return a number of bytes in whole units, rounded down, for names of strategies: "4KB"."""
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= size:
            return f"{count // size}{unit}"
    return f"{count}B"


class _Strategy(Operators):
    """Base of the strategies of the core.

    The core's constructor takes a number (interval, bytes or total memory; None without one), the
    layers to checkpoint, the layers to exclude, the share of the memory, and the clock. `_fields`
    are the names of settings: constructor arguments that are also attributes.
    """

    __slots__ = ()
    _fields: ClassVar[tuple[str, ...]]

    def _settings(self) -> dict[str, Any]:
        """Return the constructor arguments by name."""
        return {field: getattr(self, field) for field in self._fields}

    def __repr__(self) -> str:
        """Return the call that creates the strategy, without settings that are None or empty."""
        settings = self._settings().items()
        text = ", ".join(
            f"{k}={shorten(repr(list(v) if isinstance(v, tuple) else v), 80)}"
            for k, v in settings
            if v is not None and v != ()
        )
        return f"{type(self).__name__}({text})"

    # copies and pickles: settings through the constructor, then the counts (`_state` of the core)
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), self._settings()

    def __getstate__(self) -> tuple[object, dict[str, Any]]:
        return self._state(), dict(getattr(self, "__dict__", ()))  # type: ignore[attr-defined]

    def __setstate__(self, state: tuple[object, dict[str, object]]) -> None:
        counts, attributes = state
        self._restore(counts)  # type: ignore[attr-defined]
        for name, value in attributes.items():
            setattr(self, name, value)


class IntervalStrategy(_Strategy, _core.IntervalStrategy):
    """Checkpoint every `interval`-th layer, starting with index 0.

    Needs no activation. Suits models of equal blocks; ignores differences between layers.

    Parameters
    ----------
    interval : int, default 2
        Distance between checkpointed layers; 1 checkpoints every layer.

    Attributes
    ----------
    interval : int
        The constructor argument.
    checkpointed_count : int
        Number of decisions to checkpoint so far.
    name : str
        For example ``"Interval(2)"``.

    Raises
    ------
    ValueError
        If `interval` is not above 0.
    TypeError
        If `interval` is not an int.

    Notes
    -----
    A decision takes constant time, tens of nanoseconds. Threads may share a strategy.
    Strategies with equal settings are equal, regardless of their counts.

    Examples
    --------
    >>> from mlstate.activation import IntervalStrategy
    >>> strategy = IntervalStrategy(3)
    >>> [strategy.should_checkpoint(f"layers.{i}", None, i) for i in range(7)]
    [True, False, False, True, False, False, True]
    >>> strategy.name, strategy.checkpointed_count
    ('Interval(3)', 3)
    """

    __slots__ = ()
    _fields = ("interval",)
    interval: int = _core.Strategy._number
    checkpointed_count: int = _core.Strategy._checkpointed

    def __new__(cls, interval: int = 2) -> Self:
        """Check the arguments, which the class describes."""
        return super().__new__(cls, interval)

    @property
    def name(self) -> str:
        """``Interval(n)``."""
        return f"Interval({self.interval})"


class SelectiveStrategy(_Strategy, _core.SelectiveStrategy):
    """Checkpoint the layers in a list, and no others.

    Needs no activation. Suits models whose expensive layers are known from a profile. The names
    must be kept in step with the model.

    Parameters
    ----------
    checkpoint_layers : iterable of str, optional
        Layers to checkpoint.
    exclude_layers : iterable of str, optional
        Layers never to checkpoint. This has the effect of not listing them, except in
        `FirstMatch`: there, these layers are decided, and layers in neither list are left to
        the next strategy.

    Attributes
    ----------
    checkpoint_layers, exclude_layers : tuple of str
        The layers in the given order, without duplicates.
    name : str
        ``"Selective"``.

    Raises
    ------
    ValueError
        If a layer is in both lists; the message lists all such layers.
    TypeError
        If a list is a single str, or a name is not a str.

    Examples
    --------
    >>> from mlstate.activation import SelectiveStrategy
    >>> strategy = SelectiveStrategy(["encoder.0", "encoder.1"])
    >>> strategy.should_checkpoint("encoder.1", None, 1)
    True
    >>> strategy.should_checkpoint("decoder.1", None, 9)
    False
    >>> SelectiveStrategy(["a", "b", "c"], ["c", "b"])
    Traceback (most recent call last):
    ValueError: Layers cannot be both checkpointed and excluded: b, c
    """

    __slots__ = ()
    _fields = ("checkpoint_layers", "exclude_layers")
    checkpoint_layers: tuple[str, ...] = _core.Strategy._chosen
    exclude_layers: tuple[str, ...] = _core.Strategy._excluded
    opinion: Callable[[Any, str, Any, int], bool | None] = _core.Strategy._decide_or_none

    def __new__(
        cls,
        checkpoint_layers: Iterable[str] | None = None,
        exclude_layers: Iterable[str] | None = None,
    ) -> Self:
        """Check the arguments, which the class describes."""
        chosen = layer_names("checkpoint_layers", checkpoint_layers)
        excluded = layer_names("exclude_layers", exclude_layers)
        check_overlap(chosen, excluded)
        return super().__new__(cls, None, chosen, excluded)

    @property
    def name(self) -> str:
        """``Selective``."""
        return "Selective"


class SizeBasedStrategy(_Strategy, _core.SizeBasedStrategy):
    """Checkpoint layers whose activations have at least `min_size_bytes`.

    Suits models whose layers differ. A large activation may still be expensive to recompute.

    Parameters
    ----------
    min_size_bytes : int or str, default 1 MiB
        Smallest size to checkpoint: number of elements times bytes per element.
    exclude_layers : iterable of str, optional
        Layers never to checkpoint; their activations are not read.

    Attributes
    ----------
    min_size_bytes : int
        The constructor argument.
    exclude_layers : tuple of str
        The layers in the given order, without duplicates.
    checkpointed_count : int
        Number of decisions to checkpoint so far.
    name : str
        For example ``"SizeBased(1MB)"``: whole units, rounded down.

    Raises
    ------
    ValueError
        If `min_size_bytes` is not above 0.
    TypeError
        If an argument has a wrong type.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.activation import SizeBasedStrategy
    >>> strategy = SizeBasedStrategy(4096, exclude_layers=["head"])
    >>> strategy.should_checkpoint("layers.0", np.zeros((32, 32), np.float32), 0)
    True
    >>> strategy.should_checkpoint("layers.1", np.zeros((32, 31), np.float32), 1)
    False
    >>> strategy.name, strategy.checkpointed_count
    ('SizeBased(4KB)', 1)
    """

    __slots__ = ()
    _fields = ("min_size_bytes", "exclude_layers")
    min_size_bytes: int = _core.Strategy._number
    exclude_layers: tuple[str, ...] = _core.Strategy._excluded
    checkpointed_count: int = _core.Strategy._checkpointed

    def __new__(
        cls, min_size_bytes: int | str = MEBIBYTE, exclude_layers: Iterable[str] | None = None
    ) -> Self:
        """Check the arguments, which the class describes."""
        excluded = layer_names("exclude_layers", exclude_layers)
        if isinstance(min_size_bytes, str):
            min_size_bytes = parse_size("min_size_bytes", min_size_bytes, 1)
        return super().__new__(cls, min_size_bytes, (), excluded)

    @property
    def name(self) -> str:
        """``SizeBased(size)``."""
        return f"SizeBased({format_bytes(self.min_size_bytes)})"


class MemoryAwareStrategy(_Strategy, _core.MemoryAwareStrategy):
    """Checkpoint every n-th layer, with n adapted to the memory in use.

    n starts at 2. The memory is read every ten seconds. Above `max_memory_percentage`, n
    decreases by one (at least 1). Below 80 % of `max_memory_percentage`, n increases by one (at
    most 10). After high pressure, n increases only if the memory was between these limits
    since, or thirty seconds have passed since the last adjustment. Needs no activation. Suits
    runs whose memory varies slowly; it does not react to the peak of a single step.

    Parameters
    ----------
    max_memory_percentage : float, default 0.8
        Fraction of the memory, above 0 and at most 1; used as a float32.
    tracker : MemoryTracker, optional
        Any object whose ``get_stats()`` has ``current_memory_used``. Default: a new
        `MemoryTracker`, of the CUDA device if torch uses one, else of this process.
    total_memory : int, optional
        Total memory in bytes. Default: the tracker's ``total_memory`` at each read, or the
        memory of the system if the tracker has no such attribute.
    clock : callable, optional
        Returns seconds. Default: a monotonic clock of the system.

    Attributes
    ----------
    max_memory_percentage, tracker, total_memory, clock
        The constructor arguments.
    current_interval : int
        n, from 1 to 10.
    name : str
        For example ``"MemoryAware(80%)"``: whole percent, halves rounded up.

    Raises
    ------
    ValueError
        If `max_memory_percentage` is not above 0 and at most 1, or `total_memory` is not above
        0. Also raised by decisions, if the clock or tracker returns an impossible value.
    TypeError
        If an argument has a wrong type.

    Notes
    -----
    The memory is read at most every ten seconds; other decisions only read the clock. A copy or
    pickle keeps the time since the last adjustment.

    Examples
    --------
    >>> from mlstate.activation import MemoryAwareStrategy, MemoryTracker
    >>> seconds, used = [0.0], [95]
    >>> strategy = MemoryAwareStrategy(
    ...     tracker=MemoryTracker(lambda: used[0]), total_memory=100, clock=lambda: seconds[0]
    ... )
    >>> strategy.name, strategy.current_interval
    ('MemoryAware(80%)', 2)
    >>> seconds[0] = 10.0
    >>> strategy.should_checkpoint("layers.1", None, 1), strategy.current_interval
    (True, 1)
    """

    __slots__ = ("_tracker",)
    _tracker: Any
    _fields = ("max_memory_percentage", "tracker", "total_memory", "clock")
    max_memory_percentage: float = _core.Strategy._share
    current_interval: int = _core.Strategy._interval
    clock: Callable[[], float] | None = _core.Strategy._clock

    def __new__(
        cls,
        max_memory_percentage: float = 0.8,
        tracker: object = None,
        total_memory: int | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> Self:
        """Check the arguments, which the class describes."""
        if tracker is None:
            tracker = MemoryTracker()
        elif not callable(getattr(tracker, "get_stats", None)):
            raise TypeError(f"tracker needs a method get_stats, got {type(tracker).__name__}")
        check_callback("clock", clock)
        self = super().__new__(cls, total_memory, (), (), max_memory_percentage, clock)
        self._tracker = tracker
        return self

    @property
    def tracker(self) -> Any:
        """The constructor argument."""
        return self._tracker

    @property
    def total_memory(self) -> int | None:
        """The constructor argument."""
        return self._number or None  # the core has 0 for None

    def _measure(self) -> tuple[int, int]:
        """Return used and total bytes; the core calls this when an adjustment is due.

        The total is `total_memory` if it is set, else the tracker's, else the system's.
        """
        stats = self._tracker.get_stats()
        used = stats.current_memory_used
        try:
            return used, self._number or stats.total_memory
        except AttributeError:  # a tracker without total_memory
            _, _, total = _core.memory_footprint()
            return used, total

    @property
    def name(self) -> str:
        """``MemoryAware(percent)``."""
        return f"MemoryAware({int(self._threshold * 100 + 0.5)}%)"


class SmartStrategy(_Strategy, _core.SmartStrategy):
    """Checkpoint by heuristics over layer sizes and counts that the strategy collects.

    It checkpoints nothing up to and including the first layer with an index above 10. After
    that it checkpoints a layer if its first activation is larger than 1.5 times the average of
    all layers seen, if it sees the layer for the first time, or if the layer's index is above
    0.7 times the number of layers seen. Suits unknown models. It never checkpoints models of at
    most 11 layers, and does not consider the time of layers.

    Parameters
    ----------
    exclude_layers : iterable of str, optional
        Layers never to checkpoint; they are still counted.

    Attributes
    ----------
    exclude_layers : tuple of str
        The layers in the given order, without duplicates.
    is_collecting : bool
        Whether the strategy still collects sizes without checkpointing.
    layer_count : int
        Number of layers seen so far.
    name : str
        ``"Smart"``.

    Raises
    ------
    TypeError
        If an argument has a wrong type.

    Notes
    -----
    A decision takes constant time for any number of layers, because the sum of sizes is updated
    incrementally. About 100 bytes and the name are stored per layer.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.activation import SmartStrategy
    >>> strategy = SmartStrategy()
    >>> small, large = np.zeros(100), np.zeros(1000)
    >>> def one_pass():
    ...     return [
    ...         strategy.should_checkpoint(f"layers.{i}", large if i == 3 else small, i)
    ...         for i in range(16)
    ...     ]
    >>> sum(one_pass()), strategy.is_collecting, strategy.layer_count
    (4, False, 16)
    >>> [i for i, chosen in enumerate(one_pass()) if chosen]
    [3, 12, 13, 14, 15]
    """

    __slots__ = ()
    _fields = ("exclude_layers",)
    exclude_layers: tuple[str, ...] = _core.Strategy._excluded
    is_collecting: bool = _core.Strategy._collecting
    layer_count: int = _core.Strategy._layer_count

    def __new__(cls, exclude_layers: Iterable[str] | None = None) -> Self:
        """Check the arguments, which the class describes."""
        excluded = layer_names("exclude_layers", exclude_layers)
        return super().__new__(cls, None, (), excluded)

    @property
    def name(self) -> str:
        """``Smart``."""
        return "Smart"
