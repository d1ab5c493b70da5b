"""`AllOf`, `AnyOf`, `Not`, `FirstMatch`, and ``&``, ``|``, ``~``: strategies composed of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .._common.arguments import check_flags

if TYPE_CHECKING:
    from collections.abc import Callable


@runtime_checkable
class CheckpointStrategy(Protocol):
    """Interface of a strategy; user-defined classes need not derive from it.

    ``should_checkpoint`` is called once for each layer in each forward pass, from any thread. A
    strategy may also have a method ``opinion`` with the same arguments. It returns None to leave
    the decision to other strategies; `FirstMatch` calls it.

    Attributes
    ----------
    name : str
        Name of the strategy in reports.

    Examples
    --------
    >>> from mlstate.activation import CheckpointStrategy, FirstMatch, IntervalStrategy
    >>> class Attention:
    ...     name = "Attention"
    ...
    ...     def should_checkpoint(self, layer_id, activation, layer_index):
    ...         return "attention" in layer_id
    ...
    ...     def reset(self):
    ...         pass
    >>> isinstance(Attention(), CheckpointStrategy)
    True
    >>> either = IntervalStrategy(2) | Attention()
    >>> either.name, either.should_checkpoint("layers.1.attention", None, 1)
    ('(Interval(2) | Attention)', True)
    """

    @property
    def name(self) -> str:
        """Name of the strategy in reports."""
        ...

    def should_checkpoint(self, layer_id: str, activation: Any, layer_index: int) -> bool:
        """Return whether to drop the activation of a layer and recompute it."""
        ...

    def reset(self) -> None:
        """Reset counts and other state; keep the settings."""
        ...


def is_strategy(candidate: object) -> bool:
    """Return whether this is a strategy object, rather than a class."""
    return callable(getattr(candidate, "should_checkpoint", None)) and not isinstance(
        candidate, type
    )


def check_strategy(candidate: Any, label: str = "a strategy") -> Any:
    """Return `candidate` if it is a strategy; otherwise raise TypeError.

    `label`: the role of the candidate, for the error.
    """
    if is_strategy(candidate):
        return candidate
    if isinstance(candidate, type):
        raise TypeError(f"{label} must be an object, got the class {candidate.__name__}")
    raise TypeError(f"{label} needs a method should_checkpoint, got {type(candidate).__name__}")


def name_of(strategy: Any) -> str:
    """Return the attribute `name` of a strategy, or its class's name if it has none."""
    return str(getattr(strategy, "name", type(strategy).__name__))


class Operators:
    """``a & b``, ``a | b`` and ``~a`` for strategies, and comparison of their settings.

    The operands of ``&`` and ``|`` may be user-defined classes.
    """

    __slots__ = ()

    def __and__(self: Any, other: Any) -> AllOf:
        return AllOf(self, other) if is_strategy(other) else NotImplemented

    def __rand__(self: Any, other: Any) -> AllOf:
        return AllOf(other, self) if is_strategy(other) else NotImplemented

    def __or__(self: Any, other: Any) -> AnyOf:
        return AnyOf(self, other) if is_strategy(other) else NotImplemented

    def __ror__(self: Any, other: Any) -> AnyOf:
        return AnyOf(other, self) if is_strategy(other) else NotImplemented

    def __invert__(self: Any) -> Not:
        return Not(self)

    def __eq__(self: Any, other: Any) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return bool(self._settings() == other._settings())

    def __hash__(self: Any) -> int:
        return hash((type(self).__name__, self.name))


class Composite(Operators):
    """Base of combinators: every member receives every call."""

    def __init__(self, *members: CheckpointStrategy) -> None:
        if not members:
            raise TypeError(f"{type(self).__name__} needs at least one strategy")
        self._members = tuple(check_strategy(member) for member in members)
        # bound methods, looked up once because they are called for each layer
        self._decide: list[Callable[..., Any]] = [m.should_checkpoint for m in self._members]
        self._decide_or_none = [getattr(m, "opinion", m.should_checkpoint) for m in self._members]

    @property
    def members(self) -> tuple[CheckpointStrategy, ...]:
        """The member strategies, in order."""
        return self._members

    @property
    def name(self) -> str:
        """Name composed of the members' names."""
        return f"{type(self).__name__}({', '.join(map(name_of, self._members))})"

    def reset(self) -> None:
        """Reset every member."""
        for member in self._members:
            member.reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._members))})"

    # `_decide` and `_decide_or_none` have bound methods of the members, so a copy rebuilds them
    def __getstate__(self) -> dict[str, Any]:
        return self._settings()

    def __setstate__(self, state: dict[str, Any]) -> None:
        Composite.__init__(self, *state.pop("_members"))
        vars(self).update(state)

    def _settings(self) -> dict[str, Any]:
        """Return the members and the constructor's other arguments, by attribute."""
        methods = ("_decide", "_decide_or_none")
        return {name: value for name, value in vars(self).items() if name not in methods}


class _Vote(Composite):
    """Base of `AllOf` and `AnyOf`: one member with the decisive answer decides."""

    _sign: str  # operator between the names of members
    _decisive: bool  # the answer of a single member that decides

    @property
    def name(self) -> str:
        """The members' names with the operator between them."""
        return f"({f' {self._sign} '.join(map(name_of, self._members))})"

    def opinion(self, layer_id: str, activation: Any, layer_index: int) -> bool | None:
        """Return the decision, or None if an undecided member could change it."""
        opinions = [decide(layer_id, activation, layer_index) for decide in self._decide_or_none]
        if any(answer is not None and bool(answer) is self._decisive for answer in opinions):
            return self._decisive
        return None if None in opinions else not self._decisive


class AllOf(_Vote):
    """Checkpoint a layer if all members do: ``a & b``.

    Every member receives every call, because strategies have state.

    Parameters
    ----------
    *members : CheckpointStrategy
        One or more strategies.

    Raises
    ------
    TypeError
        If the list of members is empty, or a member is not a strategy.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.activation import IntervalStrategy, SizeBasedStrategy
    >>> both = IntervalStrategy(2) & SizeBasedStrategy(1024)
    >>> both.name
    '(Interval(2) & SizeBased(1KB))'
    >>> large = np.zeros((16, 16), np.float32)
    >>> [both.should_checkpoint(f"layers.{i}", large, i) for i in range(4)]
    [True, False, True, False]
    >>> both.members[1].checkpointed_count  # it saw every call
    4
    """

    _sign, _decisive = "&", False

    def should_checkpoint(self, layer_id: str, activation: Any, layer_index: int) -> bool:
        """Return whether all members checkpoint the layer."""
        decision = True
        for decide in self._decide:  # all of them: members count their calls
            if not decide(layer_id, activation, layer_index):
                decision = False
        return decision


class AnyOf(_Vote):
    """Checkpoint a layer if any member does: ``a | b``.

    Every member receives every call, because strategies have state.

    Parameters
    ----------
    *members : CheckpointStrategy
        One or more strategies.

    Raises
    ------
    TypeError
        If the list of members is empty, or a member is not a strategy.

    Examples
    --------
    >>> from mlstate.activation import IntervalStrategy, SelectiveStrategy
    >>> either = IntervalStrategy(4) | SelectiveStrategy(["layers.1"])
    >>> either.name
    '(Interval(4) | Selective)'
    >>> [either.should_checkpoint(f"layers.{i}", None, i) for i in range(5)]
    [True, True, False, False, True]
    """

    _sign, _decisive = "|", True

    def should_checkpoint(self, layer_id: str, activation: Any, layer_index: int) -> bool:
        """Return whether any member checkpoints the layer."""
        decision = False
        for decide in self._decide:  # all of them: members count their calls
            if decide(layer_id, activation, layer_index):
                decision = True
        return decision


class Not(Composite):
    """Checkpoint a layer if the member does not: ``~a``.

    Parameters
    ----------
    member : CheckpointStrategy
        A strategy.

    Raises
    ------
    TypeError
        If the member is not a strategy.

    Examples
    --------
    >>> from mlstate.activation import SelectiveStrategy
    >>> others = ~SelectiveStrategy(["embedding", "head"])
    >>> others.name, others.should_checkpoint("layers.3", None, 4)
    ('~Selective', True)
    """

    def __init__(self, member: CheckpointStrategy) -> None:
        super().__init__(member)

    @property
    def name(self) -> str:
        """The member's name after ``~``."""
        return f"~{name_of(self._members[0])}"

    def should_checkpoint(self, layer_id: str, activation: Any, layer_index: int) -> bool:
        """Return whether the member does not checkpoint the layer."""
        return not self._decide[0](layer_id, activation, layer_index)

    def opinion(self, layer_id: str, activation: Any, layer_index: int) -> bool | None:
        """Return the negated decision of the member, or None if it is undecided."""
        opinion = self._decide_or_none[0](layer_id, activation, layer_index)
        return None if opinion is None else not opinion


class FirstMatch(Composite):
    """Use the decision of the first member that is not undecided.

    `SelectiveStrategy` decides only about the layers in its lists. A user-defined strategy is
    undecided if its ``opinion`` returns None. All other strategies always decide, so place them
    last. Every member receives every call, including those after the deciding one.

    Parameters
    ----------
    *members : CheckpointStrategy
        One or more strategies, the most specific first.
    default : bool, default False
        The decision if all members are undecided.

    Raises
    ------
    TypeError
        If the list of members is empty, a member is not a strategy, or `default` not a bool.

    Examples
    --------
    >>> from mlstate.activation import FirstMatch, IntervalStrategy, SelectiveStrategy
    >>> named = SelectiveStrategy(["layers.1"], exclude_layers=["layers.4"])
    >>> strategy = FirstMatch(named, IntervalStrategy(2))
    >>> strategy.name
    'FirstMatch(Selective, Interval(2))'
    >>> [strategy.should_checkpoint(f"layers.{i}", None, i) for i in range(5)]
    [True, True, True, False, False]
    """

    def __init__(self, *members: CheckpointStrategy, default: bool = False) -> None:
        super().__init__(*members)
        check_flags(default=default)
        self.default: bool = bool(default)

    def should_checkpoint(self, layer_id: str, activation: Any, layer_index: int) -> bool:
        """Return the decision of the first member that has one, or `default`; all are asked."""
        decision = None
        for decide in self._decide_or_none:
            opinion = decide(layer_id, activation, layer_index)
            if decision is None:
                decision = opinion
        return self.default if decision is None else bool(decision)

    def opinion(self, layer_id: str, activation: Any, layer_index: int) -> bool | None:
        """Return the decision of the first member that has one, or None."""
        opinions = [decide(layer_id, activation, layer_index) for decide in self._decide_or_none]
        return next((bool(answer) for answer in opinions if answer is not None), None)

    def __repr__(self) -> str:
        members = ", ".join(map(repr, self._members))
        return f"FirstMatch({members}{', default=True' if self.default else ''})"
