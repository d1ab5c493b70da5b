"""`state_specs` of Core ML: sources, the function, chunks that differ, Neural Engine warning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from .._common.caller import find_caller
from .._common.local_path import local_path
from .._common.text import listed, shorten
from ..errors import FormatError, MLStateWarning
from ..kv._arguments import incompatible
from ..kv._model_states import FunctionStates, choose_function, format_error, quoted
from ..kv._moved_positions import AXES, SEQUENCE
from ._chunks import Chunks, find_chunks
from ._compiled import metadata_path, read_compiled
from ._package import Functions, parse_description, parse_specification, read_package

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .._types import NumpyDType

    Source: TypeAlias = "str | os.PathLike[str] | bytes | StateSpecs | Any"
    ModelFunctions: TypeAlias = "dict[str, dict[str, StateSpec]]"

# On the Neural Engine, Core ML needs multiples of this for the two innermost dimensions of a
# state.
_ENGINE_MULTIPLE = 32


class StateShapeWarning(MLStateWarning):
    """A state has a dimension that is known to fail on the Neural Engine."""


class StateSpec(NamedTuple):
    """A state that a model declares.

    Attributes
    ----------
    name : str
        Name for `MLState.read_state`.
    shape : tuple of int
        For a KV cache (layers, heads, seq, head_dim).
    dtype : numpy.dtype
        In practice float16, the only dtype that coremltools 9 converts.
    """

    name: str
    shape: tuple[int, ...]
    dtype: NumpyDType

    @property
    def nbytes(self) -> int:
        """Bytes of the state inside Core ML."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def seq_length(self) -> int | None:
        """Number of positions of a KV cache, axis 2 of 4; None for other states."""
        return self.shape[SEQUENCE] if len(self.shape) == len(AXES) else None


class StateSpecs(FunctionStates[StateSpec]):
    """The states of one function of a model: name to `StateSpec`, in declared order.

    Attributes
    ----------
    functions : dict
        States by name, for every function of the model. A model without declared functions has
        the function ``main``.
    function : str
        The function of these states.
    default_function : str or None
        The function that Core ML runs by default.
    """


def as_spec(name: str, value: Any) -> StateSpec:
    """Return `value` if it is a spec; if it is a shape, a spec of float16 for the state `name`.

    Raises TypeError for another value, and CompatibilityError for a negative length.
    """
    if isinstance(value, StateSpec):
        spec = value
    else:
        try:
            shape = tuple(map(index, value))
        except TypeError:
            raise TypeError(
                f"state {name!r}: expected a StateSpec or a shape such as (2, 1, 256, 32), got "
                f"{type(value).__name__} {shorten(repr(value), 60)}"
            ) from None
        spec = StateSpec(name, shape, np.dtype(np.float16))
    if any(length is None or length < 0 for length in spec.shape):
        kind = "an unknown" if None in spec.shape else "a negative"
        text = f"state {name!r}: the shape {spec.shape} has {kind} length"
        raise incompatible(text, name, "lengths of 0 or more", spec.shape)
    return spec


# ---- reading ----


def _serialized(source: Any) -> bytes | None:
    """Return the serialized description of a coremltools model or spec, without its program.

    None if `source` is neither.
    """
    spec = getattr(source, "_spec", None)  # get_spec() would copy the whole program
    if spec is None:
        spec = source
    description = getattr(spec, "description", None)
    serialize = getattr(description, "SerializeToString", None)
    if serialize is None:
        return None
    description_bytes: bytes = serialize()
    return description_bytes


def _read(source: Source) -> tuple[Functions, str | None]:
    """Return the states of each function by name, and the default function or None.

    `source`: a path, the bytes of a specification, or a coremltools model or specification.
    Raises TypeError for another type, and the errors of the readers.
    """
    if isinstance(source, (str, os.PathLike)):
        path = local_path(source)
        compiled = metadata_path(path)
        if compiled is not None:
            return read_compiled(compiled)
        return read_package(path)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return parse_specification(source)
    description = _serialized(source)
    if description is None:
        raise TypeError(
            "source must be a path to a .mlpackage, .mlmodel or .mlmodelc, a coremltools MLModel, "
            f"a model specification, or a mapping of names to shapes, got {type(source).__name__}"
        )
    return parse_description(description)


def _read_model(source: Source) -> tuple[ModelFunctions, str | None]:
    """Return the states of every function of a single model, and the default function or None.

    `source`: in any form that `state_specs` accepts, except several chunks. Raises TypeError for
    another type, and the errors of the readers.
    """
    if isinstance(source, StateSpecs):
        return source.functions, source.default_function
    get_spec = getattr(source, "get_spec", None)  # of an MLModel, `_spec` is used, not a copy
    if callable(get_spec) and getattr(source, "_spec", None) is None:
        source = get_spec()
    elif isinstance(path := getattr(source, "path_or_asset", None), str):  # a CompiledMLModel
        source = path
    if isinstance(source, Mapping):
        states = {name: as_spec(name, value) for name, value in source.items()}
        return {"main": states}, "main"
    read, default = _read(source)
    functions = {
        name: {
            state: StateSpec(state, shape, np.dtype(dtype)) for state, dtype, shape in states_read
        }
        for name, states_read in read.items()
    }
    return functions, default


def _states_text(states: Mapping[str, StateSpec]) -> str:
    """Return states as text, such as "kv (2, 1, 256, 32)"."""
    return listed([f"{name} {spec.shape}" for name, spec in states.items()], 200) or "none"


def _disagreement(labels: tuple[str, str], expected: str, got: str, remedy: str) -> Exception:
    """Return the CompatibilityError for two chunks that differ; `labels`: their names.

    `expected`, `got`: texts on the facts that differ, in both. `remedy`: end of the message, or "".
    """
    text = f"{labels[0]} and {labels[1]} do not belong together: {expected} and {got}{remedy}"
    return incompatible(text, None, expected, got)


def _check_functions(
    labels: tuple[str, str],
    first: tuple[ModelFunctions, str | None],
    other: tuple[ModelFunctions, str | None],
    shared_state: bool,
) -> None:
    """Raise CompatibilityError if two chunks cannot belong to one model.

    `labels`: their names in errors. `first`, `other`: states of each function, and default
    function. Both must have the same functions and default. With `shared_state`, they must declare
    the same states. Without it, only a state of the same name must have as many positions.
    """
    (functions, default), (other_functions, other_default) = first, other
    names = [listed([*model], 200) for model in (functions, other_functions)]
    if set(functions) != set(other_functions):
        raise _disagreement(labels, f"functions {names[0]}", names[1], "")
    if default != other_default:
        raise _disagreement(labels, f"default function {default}", str(other_default), "")
    for name, states in functions.items():
        others = other_functions[name]
        for state in set(states) & set(others):
            lengths = states[state].seq_length, others[state].seq_length
            if lengths[0] != lengths[1]:
                text = f"{shorten(state, 40)} of function {shorten(name, 40)} has {lengths[0]}"
                raise _disagreement(labels, f"{text} positions", f"{lengths[1]}", "")
        if shared_state and states != others:
            raise _disagreement(
                labels,
                f"function {shorten(name, 40)} has the states {_states_text(states)}",
                _states_text(others),
                "; chunks that share a state declare the same ones. If each has its own, pass "
                "shared_state=False (--no-shared-state of a plan), or read them one by one",
            )


def _read_chunk(source: Source, label: str) -> tuple[ModelFunctions, str | None]:
    """As `_read_model`; the message of a FormatError or TypeError contains `label`."""
    try:
        return _read_model(source)
    except (FormatError, TypeError) as error:
        if label not in str(error):
            error.args = (f"{label}: {error}",)
        raise


def _read_chunks(
    chunks: Chunks, shared_state: bool
) -> tuple[list[tuple[ModelFunctions, str | None]], int]:
    """Return the functions and default function of each chunk, and the index of one with states.

    A chunk without a default function has None. The index is of the first chunk with states, or 0
    if no chunk has any. Chunks with states are checked against it. `shared_state`: as for
    `plan_transition`. Raises CompatibilityError if the chunks do not fit together, and FormatError
    for a default function that does not exist.
    """
    labels = [_label(source, i) for i, source in enumerate(chunks.sources)]
    models = list(map(_read_chunk, chunks.sources, labels))
    if chunks.default is not None:
        models = [(functions, chunks.default) for functions, _ in models]
    stateful = [i for i, (functions, _) in enumerate(models) if any(functions.values())]  # indices
    first = stateful[0] if stateful else 0
    for i in stateful[1:]:
        _check_functions((labels[first], labels[i]), models[first], models[i], shared_state)
    functions, default = models[first]
    if chunks.default is not None and default not in functions:
        raise format_error(
            str(chunks.origin),
            f"the default function {shorten(str(default), 80)!r} is not in {labels[first]}: "
            f"it has {quoted(functions)}",
        )
    return models, first


def _label(source: Any, number: int) -> str:
    """Return the name of a chunk in errors: its file name, or its number, counted from 1 there."""
    if isinstance(source, str | os.PathLike):
        return shorten(os.path.basename(os.fsdecode(source).rstrip("/")), 80)
    return f"chunk {number + 1}"


def read_functions(source: Source) -> tuple[ModelFunctions, str | None]:
    """Return the states of every function, and the name of the default function or None.

    Several chunks must share one state; the states of the first one that has any are returned.
    Raises CompatibilityError if they declare different states, and the errors of the readers.
    """
    chunks = find_chunks(source)
    if chunks is None:
        return _read_model(source)
    models, first = _read_chunks(chunks, shared_state=True)
    return models[first]


def _choose_of(
    source: Source, functions: ModelFunctions, default: str | None, function: str | None
) -> StateSpecs:
    """Return the states of one of `functions`, the functions of `source` by name.

    It is `function`, or if this is None the function that `source` was loaded for, else `default`.
    Raises CompatibilityError if the function does not exist or none is chosen.
    """
    if isinstance(source, StateSpecs):
        loaded: str | None = source.function
    else:
        loaded = getattr(source, "function_name", None) or default
    name = loaded if function is None else function
    return StateSpecs(functions, choose_function(functions, name), default_function=default)


def choose(source: Source, function: str | None) -> StateSpecs:
    """Return the states of `function`, or of the default one if it is None.

    `source` is read unless it is `StateSpecs`. Several chunks must share one state. Raises
    CompatibilityError if they do not, or if the function does not exist.
    """
    return choose_states(source, function, shared_state=True)[0]


def choose_states(
    source: Source, function: str | None, *, shared_state: bool
) -> tuple[StateSpecs, ...]:
    """Return the states of `function`, or of the default one, for each state object of a model.

    `source`: in any form that `state_specs` accepts. A single model, and chunks with
    `shared_state`, have one state object. Otherwise each chunk has its own; the states of a chunk
    without states are an empty mapping. Raises CompatibilityError if chunks do not belong together.
    """
    chunks = find_chunks(source)
    if chunks is None:
        return (_choose_of(source, *_read_model(source), function),)
    models, first = _read_chunks(chunks, shared_state)
    empty = StateSpecs({"main": {}}, "main")
    parts = tuple(
        _choose_of(chunk, functions, default, function) if any(functions.values()) else empty
        for chunk, (functions, default) in zip(chunks.sources, models, strict=True)
    )
    for i, part in enumerate(parts):
        if part is not empty and part.function != parts[first].function:
            labels = _label(chunks.sources[first], first), _label(chunks.sources[i], i)
            raise _disagreement(labels, f"function {parts[first].function}", part.function, "")
    return parts[first : first + 1] if shared_state else parts


def states_of_contexts(
    source: Source, sizes: Iterable[int], *, shared_state: bool
) -> dict[int, tuple[StateSpecs, ...]] | None:
    """Return the states for each of `sizes`, or None if `source` does not list context sizes.

    Only ANEMLL's meta.yaml lists them. The states of a size are those that `choose_states` returns
    for its function, with the same `shared_state`. Raises CompatibilityError if a size is not in
    the list.
    """
    chunks = find_chunks(source)
    if chunks is None or not chunks.contexts:
        return None
    for size in sizes:
        if size not in chunks.contexts:
            text = (
                f"{chunks.origin}: no context of {size} positions; there are "
                f"{', '.join(map(str, chunks.contexts))}"
            )
            raise incompatible(text, None, size, list(chunks.contexts))
    return {
        size: choose_states(source, chunks.contexts[size], shared_state=shared_state)
        for size in sizes
    }


# Failures were observed for the innermost axis. The rule is also applied to the axis before it,
# the sequence of a KV cache, unless its length is 1.
def _engine_faults(shape: tuple[int, ...]) -> Iterator[int]:
    """Yield the axes of a state whose length should be a multiple of 32 and is not."""
    rank = len(shape)
    for axis in range(max(rank - 2, 0), rank):
        inner = axis == rank - 1
        if shape[axis] % _ENGINE_MULTIPLE and (inner or (rank > 2 and shape[axis] > 1)):
            yield axis


def warn_of_shapes(specs: StateSpecs) -> None:
    """Issue a StateShapeWarning for each axis of a state that may fail on the Neural Engine."""
    for spec in specs.values():
        for axis in _engine_faults(spec.shape):
            label = f" ({AXES[axis]})" if len(spec.shape) == len(AXES) else ""
            length = spec.shape[axis]
            find_caller().warn(
                f"state {spec.name!r} has the shape {spec.shape}: axis {axis}{label} is {length}, "
                f"not a multiple of {_ENGINE_MULTIPLE}, and such a state may fail on the Neural "
                f"Engine; convert the model with {_next_multiple(length)}, or keep it on CPU and "
                "GPU",
                StateShapeWarning,
            )


def _next_multiple(length: int) -> int:
    """Return the smallest multiple of 32 that is at least `length`."""
    return -(-length // _ENGINE_MULTIPLE) * _ENGINE_MULTIPLE


def state_specs(source: Source, *, function: str | None = None) -> StateSpecs:
    """Read the states that a Core ML model declares.

    Parameters
    ----------
    source : str or path-like, MLModel, specification, bytes, mapping, or sequence of them
        A ``.mlpackage`` folder, ``.mlmodel`` file or compiled ``.mlmodelc`` folder. Or a
        coremltools ``MLModel``, its ``get_spec()``, a ``CompiledMLModel``, or the bytes of a
        serialized spec; only creating these needs coremltools. Or a mapping of names to
        `StateSpec` or to shapes (with dtype float16). A model in several chunks that share a
        state is a list of these, a pattern such as ``"model_chunk_*.mlpackage"``, or a folder of
        ANEMLL with its ``meta.yaml``, or that file (needs PyYAML: ``mlstate[anemll]``).
    function : str, optional
        Function of a multi-function model. Default: the function for which an `MLModel` was
        loaded, else the model's default function.

    Returns
    -------
    StateSpecs
        The states of that function by name; ``functions`` has those of all functions.

    Raises
    ------
    FormatError
        The package or specification is damaged, has wrong lengths, or is not a model. The
        message names the file of the package and the byte offset.
    StoreError
        A file cannot be opened or read; also a `FileNotFoundError` if it does not exist.
    CompatibilityError
        The function does not exist, or there are several and no default. Chunks are missing or
        repeated, belong to several models, or declare other functions or states.
    ImportError
        ``meta.yaml`` needs PyYAML.
    TypeError
        `source` has another type.

    Warns
    -----
    StateShapeWarning
        One of the two innermost dimensions of a state is not a multiple of 32.

    Notes
    -----
    Only the model's description is read, so the cost does not depend on the size of the model.
    For a compiled model (``.mlmodelc``), ``metadata.json`` is read. Symbolic links inside a
    package are followed, because download caches use them. Paths in the manifest cannot leave
    the package, and names in ``meta.yaml`` cannot leave its folder.

    The key ``ffn`` of ``meta.yaml`` names the chunks, compiled or not. The default function is
    ``state_transition_infer_default_function``, if the file has this key.

    The rule of 32 is an open defect of Core ML (coremltools issue 2631), observed for the
    innermost dimension. It is also applied to the dimension before it (the sequence of a KV
    cache) unless that is 1, but not to layers and heads.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from mlstate.coreml import state_specs
    >>> specs = state_specs(str(files("mlstate") / "demo/data/model_multi.mlpackage"))
    >>> specs["kv_cache"].shape, specs["kv_cache"].dtype.name
    ((8, 2, 256, 32), 'float16')
    >>> specs.default_function, list(specs.functions)
    ('decode_256', ['decode_256', 'prefill_512'])
    """
    specs = choose(source, function)
    warn_of_shapes(specs)
    return specs
