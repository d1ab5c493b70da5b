"""Move a state between Core ML state objects; public through `mlstate.coreml`."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from .._common.dtypes import label_of, name_of
from .._common.text import names_hint, shorten
from ..kv._arguments import capacity_error, incompatible
from ..kv._axis import valid_axis
from ..kv._model_states import quoted
from ..kv._transition import compact_kv_state, transition_kv_state
from ..kv._transition_plan import as_position, check_layout, check_position, check_shapes
from ._specs import StateSpec, as_spec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from .._types import NDArray

    class MLStateLike(Protocol):
        """The methods of coremltools' ``MLState`` that this module uses."""

        def read_state(self, name: str) -> NDArray:
            """Return the state called `name`."""

        def write_state(self, name: str, value: NDArray) -> None:
            """Replace the state called `name`."""


_WRITABLE_DTYPES = ("float32", "float64", "int32")  # accepted by `write_state`


# ---- moving a state ----


def _check_name(name: str, specs: Mapping[str, StateSpec | Sequence[int]] | None) -> None:
    """Raise TypeError if `name` is not one name, such as a list of names, or `specs` is wrong."""
    if specs is not None and not isinstance(specs, Mapping):
        raise TypeError(
            "specs must be the target model's state_specs(...) or a mapping of names to shapes, "
            f"got {type(specs).__name__}"
        )
    if not isinstance(name, str):
        known = "state_specs(model) lists them" if specs is None else f"there are {quoted(specs)}"
        raise TypeError(
            f"state_name must be the name of one state, got {type(name).__name__} "
            f"{shorten(repr(name), 60)}; call once for each state ({known})"
        )


def _target_shape(
    target: MLStateLike, name: str, specs: Mapping[str, StateSpec | Sequence[int]] | None
) -> tuple[int, ...]:
    """Return the shape of the target's state: from its specs, or by reading it."""
    if specs is None:
        return tuple(target.read_state(name=name).shape)
    if name not in specs:
        raise incompatible(
            f"{name}: the target model has no state of this name{names_hint(name, specs)}",
            name,
            quoted(specs),
            name,
        )
    return as_spec(name, specs[name]).shape


def _written_dtype(name: str, found: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype that `write_state` accepts and that holds every value of `found`."""
    native = found.newbyteorder("=")
    if name_of(native) in ("float16", "bfloat16"):
        return np.dtype(np.float32)
    if native.name not in _WRITABLE_DTYPES:
        shown = label_of(found) or found
        raise incompatible(
            f"{name}: read_state gave {shown}, and Core ML takes {', '.join(_WRITABLE_DTYPES)}",
            name,
            ", ".join(_WRITABLE_DTYPES),
            shown,
        )
    return native


def _move_state(
    source: MLStateLike,
    target: MLStateLike,
    name: str,
    position: int,
    pad_value: float,
    specs: Mapping[str, StateSpec | Sequence[int]] | None,
    compact: bool,
    seq_axis: int,
) -> None:
    """Read, check everything, move and write; the write to the target is the last step."""
    _check_name(name, specs)
    number, seq_axis = as_position(position), valid_axis(seq_axis)
    shape = _target_shape(target, name, specs)
    check_layout(name, "target", shape, seq_axis)
    check_position(name, None, shape, number, seq_axis)
    value = np.asarray(source.read_state(name=name))
    check_shapes(name, value.shape, shape, seq_axis)
    have, length = value.shape[seq_axis], shape[seq_axis]
    if length < have and not compact:
        raise capacity_error(
            f"{name}: the target state has {length} positions, fewer than the source's {have}; "
            "use compact_coreml_state to compact",
            f"at least {have}",
            length,
            name,
        )
    check_position(name, value.shape, shape, number, seq_axis)
    dtype = _written_dtype(name, value.dtype)
    if compact:
        moved = compact_kv_state(value, length, number, dtype, seq_axis=seq_axis)
    else:
        moved = transition_kv_state(value, length, number, pad_value, dtype, seq_axis=seq_axis)
    target.write_state(name=name, value=np.require(moved, dtype, ["C", "W"]))


def copy_coreml_state(source: MLStateLike, target: MLStateLike, name: str) -> None:
    """Copy a state, such as that from a convolution, to a target whose state has its shape."""
    value = np.asarray(source.read_state(name=name))
    dtype = _written_dtype(name, value.dtype)
    target.write_state(name=name, value=np.require(value, dtype, ["C", "W"]))


def transition_coreml_state(
    source_mlstate: MLStateLike,
    target_mlstate: MLStateLike,
    state_name: str,
    current_position: int,
    pad_value: float = 0.0,
    *,
    specs: Mapping[str, StateSpec | Sequence[int]] | None = None,
    seq_axis: int = -2,
) -> None:
    """Move a KV state to a model with at least as many positions.

    Parameters
    ----------
    source_mlstate, target_mlstate : MLState
        Results of ``MLModel.make_state()`` in coremltools 9, or other objects with
        ``read_state(name)`` and ``write_state(name, value)``, such as `FakeMLState`.
    state_name : str
        Name of the state in both models.
    current_position : int
        Number of tokens in the cache; later positions are dropped.
    pad_value : float
        Value of positions without a token.
    specs : mapping, optional
        The **target** model's `state_specs`, or a mapping of names to shapes. With it, the
        source is read once and the target written once. Without it, the target is also read,
        for its shape.
    seq_axis : int
        The axis of the sequence; a negative number counts from the last axis.

    Raises
    ------
    CompatibilityError
        `specs` lacks the state, a state does not have 2 to 8 dimensions, has no axis `seq_axis`,
        the shapes differ in another axis (such as layers, heads or head dimension), or
        `read_state` returned a dtype that Core ML does not accept.
    CapacityError
        `current_position` is negative or beyond either state, or the target is shorter
        than the source.
    RuntimeError
        Raised by Core ML if a model lacks the state.
    TypeError
        `state_name` is not one name, `specs` is not a mapping, or `seq_axis` is not an integer.

    Notes
    -----
    Everything is checked before the write: after an error the target is unchanged. On a Mac a
    float16 state is read and written as float32, which preserves all bits. The written array is
    contiguous and writeable, as Core ML requires. It has dtype float32 for float16, bfloat16
    and float32 states; float64 and int32 stay as they are. So no value changes. Other dtypes
    are refused. Memory: the source as read, plus one array of the target's size.

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
    """
    _move_state(
        source_mlstate,
        target_mlstate,
        state_name,
        current_position,
        pad_value,
        specs,
        False,
        seq_axis,
    )


def compact_coreml_state(
    source_mlstate: MLStateLike,
    target_mlstate: MLStateLike,
    state_name: str,
    current_position: int,
    *,
    specs: Mapping[str, StateSpec | Sequence[int]] | None = None,
    seq_axis: int = -2,
) -> None:
    """Move a KV state to a model with fewer positions that can hold its tokens.

    Parameters
    ----------
    source_mlstate, target_mlstate, state_name, current_position, specs, seq_axis
        As for `transition_coreml_state`.

    Raises
    ------
    CompatibilityError, CapacityError, RuntimeError, TypeError
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
    _move_state(
        source_mlstate,
        target_mlstate,
        state_name,
        current_position,
        0.0,
        specs,
        True,
        seq_axis,
    )


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
        self._states: dict[str, NDArray] = {}
        self.reads = 0
        self.writes = 0
        for name, given in states.items():
            spec = as_spec(name, given)
            if spec.dtype.name not in _FAKE_DTYPES:
                raise incompatible(
                    f"state {name!r}: Core ML has no states of {spec.dtype}; it has "
                    f"{', '.join(_FAKE_DTYPES)}",
                    name,
                    ", ".join(_FAKE_DTYPES),
                    spec.dtype,
                )
            self._states[name] = np.zeros(spec.shape, spec.dtype)

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _states=deepcopy(self._states))
        return other

    def _find(self, name: str) -> NDArray:
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
    """Return why Core ML does not accept `value` for `state`, or None."""
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
