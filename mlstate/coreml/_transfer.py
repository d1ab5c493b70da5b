"""`transition_coreml_state`, `compact_coreml_state`, undone on error; `FakeMLState` for tests."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from .._common.changes import UndoLog
from .._common.dtypes import label_of, name_of
from .._common.text import names_hint, shorten
from ..kv._arguments import capacity_error, incompatible
from ..kv._axis import valid_axis
from ..kv._model_states import quoted
from ..kv._moved_positions import common_contexts, moved_positions
from ..kv._transition import compact_kv_state, transition_kv_state
from ..kv._transition_plan import as_position
from ._specs import StateSpec, as_spec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol, TypeAlias

    from .._types import NDArray

    class MLStateLike(Protocol):
        """The methods of coremltools' ``MLState`` that this module uses."""

        def read_state(self, name: str) -> NDArray:
            """Return the state called `name`."""

        def write_state(self, name: str, value: NDArray) -> None:
            """Replace the state called `name`."""

    TargetSpecs: TypeAlias = Mapping[str, StateSpec | Sequence[int]] | None


_WRITABLE_DTYPES = ("float32", "float64", "int32")  # accepted by `write_state`


# ---- moving states ----


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _check_names(
    names: str | Sequence[str], specs: Mapping[str, StateSpec | Sequence[int]] | None
) -> tuple[str, ...]:
    """Return `names`, one name or several, as a tuple.

    Raises TypeError unless they are names and `specs` is a mapping or None, and ValueError for a
    name that appears twice.
    """
    if specs is not None and not isinstance(specs, Mapping):
        raise TypeError(
            "specs must be the target model's state_specs(...) or a mapping of names to shapes, "
            f"got {type(specs).__name__}"
        )
    if isinstance(names, str):
        return (names,)
    listed = _as_tuple(names)
    if not listed or not all(isinstance(name, str) for name in listed):
        hint = "state_specs(model) lists them" if specs is None else f"there are {quoted(specs)}"
        raise TypeError(
            f"state_name must be the name of a state, or a list of names, got "
            f"{type(names).__name__} {shorten(repr(names), 60)} ({hint})"
        )
    if len(set(listed)) < len(listed):
        raise ValueError(f"state_name has a name more than once: {quoted(listed)}")
    return listed


def _target_state(
    target: MLStateLike, name: str, specs: Mapping[str, StateSpec | Sequence[int]] | None
) -> tuple[tuple[int, ...], np.dtype[Any] | None]:
    """Return shape and dtype of the state `name` of `target`, from `specs`, or by reading it.

    The dtype is None if the specs have only the shape. Raises CompatibilityError if they lack the
    state.
    """
    if specs is None:
        value = np.asarray(target.read_state(name=name))
        return value.shape, value.dtype
    if name not in specs:
        text = f"{name}: the target model has no state of this name{names_hint(name, specs)}"
        raise incompatible(text, name, quoted(specs), name)
    spec = specs[name]
    return as_spec(name, spec).shape, spec.dtype if isinstance(spec, StateSpec) else None


def written_dtype(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype that `write_state` accepts, and that holds every value of `dtype`.

    `name`: the state, for errors. Raises CompatibilityError if no accepted dtype holds them.
    """
    native = dtype.newbyteorder("=")
    if name_of(native) in ("float16", "bfloat16"):
        return np.dtype(np.float32)
    if native.name not in _WRITABLE_DTYPES:
        label = label_of(dtype) or dtype
        text = f"{name}: read_state gave {label}, and Core ML takes {', '.join(_WRITABLE_DTYPES)}"
        raise incompatible(text, name, ", ".join(_WRITABLE_DTYPES), label)
    return native


class Move(NamedTuple):
    """How states move: the arguments that all states have in common."""

    position: int  # number of tokens
    compact: bool  # whether the target may be shorter than the source
    seq_axis: int
    pad_value: float = 0.0  # of positions without a token; not used to compact


def read_moved(
    source: MLStateLike,
    target: MLStateLike,
    name: str,
    specs: Mapping[str, StateSpec | Sequence[int]] | None,
    move: Move,
    declared: tuple[int, ...] | None = None,
) -> tuple[NDArray, tuple[int, ...]]:
    """Read the state `name`, and return the array to write to `target`, and the source's shape.

    Nothing is written, and everything is checked. `specs`: as for `_target_state`. `declared`: the
    shape that the source's state must have; None: any. Raises CompatibilityError if the shapes or
    dtypes do not fit, and CapacityError if the tokens, or without `compact` the positions, do not.
    """
    shape, expected = _target_state(target, name, specs)
    value = np.asarray(source.read_state(name=name))
    if declared is not None and value.shape != declared:
        text = (
            f"{name}: the source state has the shape {value.shape}, and its model declares "
            f"{declared}"
        )
        raise incompatible(text, name, declared, value.shape)
    seq_axis = move.seq_axis
    positions = moved_positions(name, value.shape, shape, move.position, seq_axis)
    dtype = written_dtype(name, value.dtype)
    if expected is not None and (expected.kind == "i") != (dtype.kind == "i"):
        text = (
            f"{name}: read_state gave {value.dtype}, and the target state is {expected}; use "
            "models with the same dtype"
        )
        raise incompatible(text, name, expected, value.dtype)
    moved = value
    if positions is not None:
        have, length = value.shape[seq_axis], shape[seq_axis]
        if length < have and not move.compact:
            text = (
                f"{name}: the target state has {length} positions, fewer than the source's {have}; "
                "use compact_coreml_state to compact"
            )
            raise capacity_error(text, f"at least {have}", length, name)
        if move.compact:
            moved = compact_kv_state(value, length, positions, dtype, seq_axis=seq_axis)
        else:
            _check_padding(name, move.pad_value, dtype, expected if specs else None)
            moved = transition_kv_state(
                value, length, positions, move.pad_value, dtype, seq_axis=seq_axis
            )
    return np.require(moved, dtype, ["C", "W"]), value.shape


def _check_padding(
    name: str, pad_value: float, dtype: np.dtype[Any], declared: np.dtype[Any] | None
) -> None:
    """Raise ValueError if the state `name` cannot hold `pad_value`.

    `dtype`: of the array to write. `declared`: of the state; None: float16 if `dtype` is a float,
    because Core ML reads and writes states of float16 as float32.
    """
    stored = declared or np.dtype(np.float16 if dtype.kind == "f" else dtype)
    try:
        # a cache of one position without a token, which is padded
        transition_kv_state(np.zeros((1, 1), stored), 1, 0, pad_value, seq_axis=1)
    except ValueError as error:
        raise ValueError(f"pad_value of {name!r}: {error}") from None


class _Pair(NamedTuple):
    """The state objects of a chunk."""

    number: int  # of the chunk, from 1
    source: Any
    target: Any
    specs: Any  # of the target's states by name; None: the target is read for them


class _Write(NamedTuple):
    """An array to write into the target of a pair, after it was read and checked."""

    pair: _Pair
    name: str  # of the state
    value: NDArray  # moved, or to undo the move the former value of the target
    shape: tuple[int, ...]  # of the state in the source


def _state_pairs(sources: tuple[Any, ...], targets: tuple[Any, ...], specs: Any) -> list[_Pair]:
    """Return the state objects of each chunk with states, checked against one another.

    `sources`, `targets`: a state object or None for each chunk. `specs`: a list with the target's
    specs for each chunk, or specs for all. Chunks that share a pair of state objects count once.
    Raises CompatibilityError if a state would be read after another one was written over it.
    """
    count = len(sources)
    each = tuple(specs) if isinstance(specs, list | tuple) else (specs,) * count
    if not 0 < count == len(targets) == len(each):
        text = (
            f"{count} source states, {len(targets)} target states and {len(each)} specs; pass one "
            "for each chunk"
        )
        raise incompatible(text, None, count, len(targets))
    pairs: dict[int, _Pair] = {}  # by the id of the target
    for number, (source, target, spec) in enumerate(zip(sources, targets, each, strict=True), 1):
        if source is None and target is None:
            continue
        if source is None or target is None:
            which = "source" if source is None else "target"
            text = f"chunk {number}: the {which} has no state, and the other one has"
            raise incompatible(text, None, "a state", None)
        pair = pairs.setdefault(id(target), _Pair(number, source, target, spec))
        if pair.source is not source:
            text = f"chunk {number}: its target state is also the target of another chunk"
            raise incompatible(text, None, "one target for each source", f"chunk {number}")
    if not pairs:
        raise incompatible("no chunk has a state", None, "a state", None)
    for pair in pairs.values():
        if pairs.get(id(pair.source), pair) is not pair:
            text = f"chunk {pair.number}: its source state is also the target of another chunk"
            raise incompatible(text, None, "other states as targets", f"chunk {pair.number}")
    return list(pairs.values())


def _move_all(
    sources: Any, targets: Any, names: str | Sequence[str], specs: Any, move: Move
) -> None:
    """Move the states `names` of all chunks: read and check all, then write all.

    If a write fails, the former values are written back to the targets, and the error is raised.
    The parameters are as for `transition_coreml_state`.
    """
    pairs = [_Pair(1, sources, targets, specs)]
    if isinstance(sources, list | tuple) or isinstance(targets, list | tuple):
        pairs = _state_pairs(_as_tuple(sources), _as_tuple(targets), specs)
    each_name = [_check_names(names, pair.specs) for pair in pairs]
    writes = [
        _Write(pair, name, *read_moved(pair.source, pair.target, name, pair.specs, move))
        for pair, listed in zip(pairs, each_name, strict=True)
        for name in listed
    ]
    if len(writes) == 1:  # a write that fails changes nothing
        _write(writes[0])
        return
    axis = move.seq_axis
    # only for the errors of windows, whose lengths must follow from the context sizes
    contexts = common_contexts((write.shape, write.value.shape, axis) for write in writes)
    for _, name, value, shape in writes:
        moved_positions(name, shape, value.shape, move.position, axis, contexts=contexts)
    former = [write._replace(value=_read_former(write)) for write in writes]
    log = UndoLog("the states were not moved", "Make new target states")

    def write_states() -> None:
        for write, before in zip(writes, former, strict=True):
            label = f"state {write.name!r} of chunk {write.pair.number}"
            log.note(label, partial(_write, before))
            _write(write)

    log.run(write_states)


def _write(write: _Write) -> None:
    write.pair.target.write_state(name=write.name, value=write.value)


def _read_former(write: _Write) -> NDArray:
    """Return a copy of the state that a write will replace, in a form that can be written back.

    Raises CompatibilityError if it has another shape than the array to write.
    """
    value = np.asarray(write.pair.target.read_state(name=write.name))
    if value.shape != write.value.shape:
        text = (
            f"{write.name}: the target state has the shape {value.shape}, and specs declare "
            f"{write.value.shape}"
        )
        raise incompatible(text, write.name, write.value.shape, value.shape)
    return np.array(value, written_dtype(write.name, value.dtype), order="C")


def transition_coreml_state(
    source_mlstate: MLStateLike | Sequence[MLStateLike | None],
    target_mlstate: MLStateLike | Sequence[MLStateLike | None],
    state_name: str | Sequence[str],
    current_position: int,
    pad_value: float = 0.0,
    *,
    specs: TargetSpecs | Sequence[TargetSpecs] = None,
    seq_axis: int = -2,
) -> None:
    """Move a KV state to a model with at least as many positions.

    Parameters
    ----------
    source_mlstate, target_mlstate : MLState
        Results of ``MLModel.make_state()`` in coremltools 9, or other objects with
        ``read_state(name=)`` and ``write_state(name=, value=)``, such as `FakeMLState`. Or lists of
        them, one for each chunk of a model; None for a chunk without states.
    state_name : str or list of str
        Name of the state in both models, and in all chunks. Or several names.
    current_position : int
        Number of tokens in the cache; later positions are dropped. A state with the same shape in
        both models is copied whole.
    pad_value : float
        Value of positions without a token. If `specs` lacks the dtype, the value must fit float16.
    specs : mapping, optional
        The **target** model's `state_specs`, or a mapping of names to shapes. With it, the
        source is read once and the target written once. Without it, the target is also read,
        for its shape. A list has one for each chunk.
    seq_axis : int
        The axis of the sequence; a negative number counts from the last axis.

    Raises
    ------
    CompatibilityError
        `specs` lacks the state, the shapes differ in another axis than `seq_axis` (such as layers,
        heads or head dimension), states of different shapes do not have 2 to 8 dimensions or have
        no axis `seq_axis`, one state is of integers and the other is not, `read_state` returned
        a dtype that Core ML does not accept, the numbers of chunks differ, no chunk has a state,
        or the target of a chunk belongs to another chunk too.
    CapacityError
        `current_position` is negative, or the shapes differ and it is beyond one of them or the
        target is shorter than the source.
    RuntimeError
        Raised by Core ML if a model lacks the state.
    MLStateError
        A write failed, and so did writing the former values back. An interrupt such as
        KeyboardInterrupt stays what it is and gets a note.
    TypeError, ValueError
        `state_name` is not a name or a list of names, or has one twice, `specs` is not a mapping,
        `seq_axis` is not an integer, or the state cannot hold `pad_value`.

    Notes
    -----
    A state with the same shape in both models can be a recurrent state, a counter, or a window that
    is full, so no position of it is dropped. A window whose length differs can only move until it
    wraps, that is while it holds every token.

    Everything is checked before the write: after an error the target is unchanged. Several states
    or chunks move all or not at all: if a write fails, the targets that were written get their
    former values, which are read for this purpose. On a Mac a
    float16 state is read and written as float32, which preserves all bits. The written array is
    contiguous and writeable, as Core ML requires. It has dtype float32 for float16, bfloat16
    and float32 states; float64 and int32 stay as they are. So no value changes. Other dtypes
    are refused. Memory: the source as read, plus one array of the target's size; for several
    states, two arrays of the target's size for each.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.coreml import FakeMLState, transition_coreml_state
    >>> small = FakeMLState({"kv_cache": (2, 1, 256, 32)})
    >>> large = FakeMLState({"kv_cache": (2, 1, 512, 32)})
    >>> small.write_state("kv_cache", np.ones((2, 1, 256, 32), np.float32))
    >>> transition_coreml_state(small, large, "kv_cache", 200)
    >>> large.read_state("kv_cache").sum(axis=(0, 1, 3))[[0, 199, 200, 511]].tolist()
    [64.0, 64.0, 0.0, 0.0]

    States with the sequence innermost:

    >>> small = FakeMLState({"k_cache": (2, 1, 64, 1, 256)})
    >>> large = FakeMLState({"k_cache": (2, 1, 64, 1, 512)})
    >>> transition_coreml_state(small, large, "k_cache", 200, seq_axis=-1)

    All states of two chunks, or none:

    >>> chunks = [FakeMLState({"k": (2, 1, 256, 32), "v": (2, 1, 256, 32)}) for _ in range(2)]
    >>> larger = [FakeMLState({"k": (2, 1, 512, 32), "v": (2, 1, 512, 32)}) for _ in range(2)]
    >>> transition_coreml_state(chunks, larger, ["k", "v"], 200)
    """
    position, axis = as_position(current_position), valid_axis(seq_axis)
    move = Move(position, compact=False, seq_axis=axis, pad_value=pad_value)
    _move_all(source_mlstate, target_mlstate, state_name, specs, move)


def compact_coreml_state(
    source_mlstate: MLStateLike | Sequence[MLStateLike | None],
    target_mlstate: MLStateLike | Sequence[MLStateLike | None],
    state_name: str | Sequence[str],
    current_position: int,
    *,
    specs: TargetSpecs | Sequence[TargetSpecs] = None,
    seq_axis: int = -2,
) -> None:
    """Move a KV state to a model with fewer positions that can hold its tokens.

    Parameters
    ----------
    source_mlstate, target_mlstate, state_name, current_position, specs, seq_axis
        As for `transition_coreml_state`.

    Raises
    ------
    CompatibilityError, CapacityError, RuntimeError, MLStateError, TypeError, ValueError
        As for `transition_coreml_state`, but a shorter target is only refused if the tokens
        do not fit.

    Notes
    -----
    As for `transition_coreml_state`.

    Examples
    --------
    >>> from mlstate.coreml import FakeMLState, compact_coreml_state
    >>> small = FakeMLState({"kv_cache": (2, 1, 256, 32)})
    >>> large = FakeMLState({"kv_cache": (2, 1, 512, 32)})
    >>> compact_coreml_state(large, small, "kv_cache", 180)
    >>> compact_coreml_state(large, small, "kv_cache", 300)
    Traceback (most recent call last):
        ...
    mlstate.errors.CapacityError: kv_cache: 300 tokens do not fit the target state's 256 \
positions; choose a model with at least 300
    >>> small = FakeMLState({"k_cache": (2, 1, 64, 1, 256)})
    >>> large = FakeMLState({"k_cache": (2, 1, 64, 1, 512)})
    >>> compact_coreml_state(large, small, "k_cache", 180, seq_axis=-1)
    """
    move = Move(as_position(current_position), compact=True, seq_axis=valid_axis(seq_axis))
    _move_all(source_mlstate, target_mlstate, state_name, specs, move)


# ---- replacement for tests ----

_FAKE_DTYPES = ("float16", "float32", "int32")


class FakeMLState:
    """A replacement for coremltools' ``MLState``, for tests on any machine.

    It behaves like Core ML on a Mac: `read_state` returns a new float32 copy of a float16
    state, `write_state` accepts only arrays that Core ML accepts, and written values are
    rounded to the state's dtype.

    Parameters
    ----------
    states : mapping
        `StateSpec` (from `state_specs`) or shape (with dtype float16) by name. The states are
        initially zero.

    Attributes
    ----------
    reads, writes : int
        Number of successful calls of `read_state` and `write_state`.

    Raises
    ------
    CompatibilityError
        A state's dtype is not float16, float32 or int32.

    Notes
    -----
    Not thread-safe, like the original.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.coreml import FakeMLState
    >>> state = FakeMLState({"kv_cache": (2, 1, 4, 8)})
    >>> state.read_state("kv_cache").dtype
    dtype('float32')
    >>> state.write_state("kv_cache", np.zeros((2, 1, 4, 8), np.float16))
    Traceback (most recent call last):
        ...
    RuntimeError: state 'kv_cache': value type not convertible: float16; write float32, \
float64 or int32
    """

    def __init__(self, states: Mapping[str, StateSpec | Sequence[int]]) -> None:
        """Allocate states of zeros; raises CompatibilityError for dtypes that Core ML lacks."""
        self._states: dict[str, NDArray] = {}
        self.reads: int = 0
        self.writes: int = 0
        for name, value in states.items():
            spec = as_spec(name, value)
            if spec.dtype.name not in _FAKE_DTYPES:
                text = (
                    f"state {name!r}: Core ML has no states of {spec.dtype}; it has "
                    f"{', '.join(_FAKE_DTYPES)}"
                )
                raise incompatible(text, name, ", ".join(_FAKE_DTYPES), spec.dtype)
            self._states[name] = np.zeros(spec.shape, spec.dtype)

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _states=deepcopy(self._states))
        return other

    def _find(self, name: str) -> NDArray:
        """Return the array of the state `name`, not a copy; RuntimeError if there is none."""
        state = self._states.get(name) if isinstance(name, str) else None
        if state is None:
            raise RuntimeError(f"no state is called {name!r}; the model has {quoted(self._states)}")
        return state

    def read_state(self, name: str) -> NDArray:
        """Return a new copy of a state: float32 for a float16 state, else its own dtype.

        Parameters
        ----------
        name : str
            The state.

        Returns
        -------
        ndarray
            A new, contiguous and writeable array.

        Raises
        ------
        RuntimeError
            The model has no such state.
        """
        state = self._find(name)
        self.reads += 1
        return state.astype(np.float32 if state.dtype == np.float16 else state.dtype)

    def write_state(self, name: str, value: NDArray) -> None:
        """Replace a whole state.

        Parameters
        ----------
        name : str
            The state.
        value : ndarray of float32, float64 or int32
            The new value: C-contiguous, writeable, with the state's shape.

        Raises
        ------
        RuntimeError
            The model has no such state, or `value` is not accepted. The state is unchanged.
        """
        state = self._find(name)
        reason = _refusal_reason(state, value)
        if reason is not None:
            raise RuntimeError(f"state {name!r}: {reason}")
        with np.errstate(over="ignore", invalid="ignore"):  # large values become infinity
            state[...] = value
        self.writes += 1

    def __repr__(self) -> str:
        states = ", ".join(
            f"{name!r}: {state.dtype}{state.shape}" for name, state in self._states.items()
        )
        return f"FakeMLState({{{states}}})"


def _refusal_reason(state: NDArray, value: object) -> str | None:
    """Return why Core ML does not accept `value` for the array `state`; None if it does."""
    if not isinstance(value, np.ndarray):
        return f"value type not convertible: {type(value).__name__}; write a NumPy array"
    if value.dtype.name not in _WRITABLE_DTYPES or not value.dtype.isnative:
        return f"value type not convertible: {value.dtype}; write float32, float64 or int32"
    if value.shape != state.shape:
        return f"the value has the shape {value.shape}, the state {state.shape}"
    if not value.flags.c_contiguous:
        return "the value is not contiguous; write np.ascontiguousarray(value)"
    if not value.flags.writeable:
        return "the value is read-only; write a copy"
    return None
