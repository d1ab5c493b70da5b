"""`state_specs` of Core AI: states of a model, dynamic shapes, which axis is the sequence."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from .._common.arguments import check_flags
from .._common.dtypes import DTYPES, EXTENSIONS, ml_dtype
from .._common.text import shorten
from ..kv._arguments import as_count, incompatible
from ..kv._axis import valid_axis, with_length
from ..kv._model_states import FunctionStates, choose_function, format_error, shape_text
from ._asset import asset_folder, import_coreai, verify

if TYPE_CHECKING:
    from .._types import NumpyDType
    from ..errors import FormatError

    Source: TypeAlias = "str | os.PathLike[str] | StateSpecs | Mapping[str, Any] | Any"
    Shape: TypeAlias = tuple[int | None, ...]
    _Functions: TypeAlias = dict[str, dict[str, "StateSpec"]]

# A state in a summary: its dtype, and its dimensions with multiplication signs between them, such
# as "NDArray (Float16, 2 x 1 x 2 x ? x 8)".
_STATE = re.compile(
    r"NDArray \((\w+), ((?:\d{1,18}|\?)(?: [\u00d7x] (?:\d{1,18}|\?))*)\)", re.ASCII
)
_DIMENSION = re.compile(r"\d+|\?", re.ASCII)
_MAIN = "main"  # the function that the converters write


class StateSpec(NamedTuple):
    """A state that a model declares.

    Attributes
    ----------
    name : str
        Name of the state in calls of the function.
    shape : tuple of int or None
        For a KV cache such as (layers, batch, heads, seq, head_dim). A dynamic dimension is
        None.
    dtype : numpy.dtype
        float16, float32, int8, or bfloat16 of ml_dtypes, for example.
    seq_axis : int or None
        The sequence axis, counted from 0. None: not known, or a state without a sequence.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: NumpyDType
    seq_axis: int | None = None

    @property
    def nbytes(self) -> int | None:
        """Bytes of the state; None if a dimension is dynamic."""
        lengths = [length for length in self.shape if length is not None]
        return None if None in self.shape else prod(lengths) * self.dtype.itemsize

    @property
    def seq_length(self) -> int | None:
        """Number of positions; None if the axis is not known or is dynamic."""
        return None if self.seq_axis is None else self.shape[self.seq_axis]

    def with_size(self, size: int) -> StateSpec:
        """Return the state for a number of positions; a state with a fixed shape is returned as is.

        Raises
        ------
        CompatibilityError
            A dimension other than the sequence is dynamic. A ValueError.
        CapacityError
            `size` is less than 1. A ValueError.
        TypeError
            `size` is not an integer.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.coreai import StateSpec
        >>> StateSpec("k", (2, 1, 2, None, 8), np.dtype(np.float16), 3).with_size(64).shape
        (2, 1, 2, 64, 8)
        """
        dynamic = [axis for axis, length in enumerate(self.shape) if length is None]
        if not dynamic:
            return self
        if dynamic != [self.seq_axis]:
            raise incompatible(
                f"{self.name}: the dimensions {dynamic} of {shape_text(self.shape)} are dynamic, "
                "and only the sequence can be: convert the model with fixed other dimensions",
                self.name,
                "one dynamic dimension, the sequence",
                shape_text(self.shape),
            )
        length = as_count("size", size, 1)
        return self._replace(shape=with_length(self.shape, dynamic[0], length))


class StateSpecs(FunctionStates[StateSpec]):
    """The states of one function of a model: name to `StateSpec`, in declared order.

    Attributes
    ----------
    functions : dict
        States by name, for every function of the model.
    function : str
        The function of these states.
    default_function : str or None
        The only function of the model, else ``main`` if it exists.
    """


# ---- reading ----


def _as_dtype(name: str, text: str) -> NumpyDType:
    """Return the dtype for Core AI's name of it, `text`, such as Float16 or bfloat16.

    `name`: the state, for errors. Raises CompatibilityError for a dtype that is not supported.
    """
    dtype = "bool" if text.lower() == "boolean" else text.lower()
    if dtype in EXTENSIONS:
        return ml_dtype(dtype)
    if dtype not in {info.name for info in DTYPES}:
        raise incompatible(
            f"{name}: states of dtype {text} are not supported; known: "
            f"{', '.join(info.name for info in DTYPES)}",
            name,
            "a dtype of whole bytes",
            text,
        )
    return np.dtype(dtype)


def _spec_of_shape(name: str, shape: Shape, dtype: NumpyDType) -> StateSpec:
    """Return the spec of the state `name`; its sequence axis is the only dynamic one, or None."""
    dynamic = [axis for axis, length in enumerate(shape) if length is None]
    return StateSpec(name, shape, dtype, dynamic[0] if len(dynamic) == 1 else None)


def _spec_of_text(path: str, name: str, text: str) -> StateSpec:
    """Return the spec of the state `name` from its text in Core AI's summary of a model.

    `path`: the model, for errors. Raises FormatError for a text that is not as `_STATE`, and
    CompatibilityError for a dtype that is not supported.
    """
    match = _STATE.fullmatch(text)
    if match is None:
        error = format_error(
            path,
            f"state {name!r}: expected a text such as 'NDArray (Float16, 2 x ? x 8)', got "
            f"{shorten(repr(text), 100)}",
        )
        error.name = name
        raise error
    lengths = _DIMENSION.findall(match[2])
    shape = tuple(None if length == "?" else int(length) for length in lengths)
    return _spec_of_shape(name, shape, _as_dtype(name, match[1]))


def _read_asset(path: str, asset: Any) -> _Functions:
    """Return the states of each function by name, from the summary of an AIModelAsset.

    `path`: its folder, for errors. Raises FormatError if Core AI cannot read it.
    """
    try:
        summary = asset.summary(include_statistics=False)
    except RuntimeError as error:
        raise _asset_error(path, str(error)) from error
    if summary is None or not summary.function_names:
        raise _asset_error(path, "the model has no functions")
    return {
        function: {
            name: _spec_of_text(path, name, text)
            for name, text in summary.function_states(function)
        }
        for function in summary.function_names
    }


def _asset_error(path: str, text: str) -> FormatError:
    """Return the FormatError for the model at `path`, with the remedy after `text`."""
    return format_error(path, f"{text}; convert the model again, or copy it again")


def _load_asset(path: str) -> Any:
    """Return Core AI's AIModelAsset of a folder; raise FormatError if Core AI refuses it."""
    try:
        return import_coreai("authoring.asset").AIModelAsset.load(path)
    except RuntimeError as error:
        raise _asset_error(path, str(error)) from error


def _read_function(function: Any) -> dict[str, StateSpec]:
    """Return the states by name of an InferenceFunction of Core AI."""
    states = {}
    for name in function.desc.state_names:
        descriptor = function.desc.state_descriptor(name)
        # Core AI marks a dynamic dimension by None or a negative number.
        shape = tuple(None if n is None or n < 0 else int(n) for n in descriptor.shape)
        states[name] = _spec_of_shape(name, shape, _as_dtype(name, descriptor.dtype))
    return states


def _as_spec(name: str, value: Any) -> StateSpec:
    """Return `value` if it is a spec; if it is a shape, a spec of float16 for the state `name`.

    Raises TypeError for another value, and CompatibilityError for a negative length.
    """
    if isinstance(value, StateSpec):
        spec = value
    else:
        try:
            shape = tuple(None if length is None else index(length) for length in value)
        except TypeError:
            raise TypeError(
                f"state {name!r}: expected a StateSpec or a shape such as (2, 1, 2, None, 8), got "
                f"{type(value).__name__} {shorten(repr(value), 60)}"
            ) from None
        spec = _spec_of_shape(name, shape, np.dtype(np.float16))
    if any(length is not None and length < 0 for length in spec.shape):
        text = f"{name}: the shape {spec.shape} has a negative length: a dynamic dimension is None"
        raise incompatible(text, name, "None, or lengths of 0 or more", spec.shape)
    return spec


def read_functions(source: Source, *, verified: bool = True) -> tuple[_Functions, str | None]:
    """Return the states of each function by name, and the name of the default function or None.

    `source`: in any form that `state_specs` accepts. `verified`: whether to check the hash of an
    ``.aimodel`` folder before Core AI reads it. The default is the function of `StateSpecs`, else
    the only function, else ``main``. Raises TypeError for another source, and the errors of
    `verify` and of the readers.
    """
    functions: _Functions
    if isinstance(source, StateSpecs):
        return source.functions, source.function
    if isinstance(source, Mapping):
        functions = {_MAIN: {name: _as_spec(name, value) for name, value in source.items()}}
    elif isinstance(source, (str, os.PathLike)):
        path = asset_folder(source)
        if verified:
            verify(path)
        functions = _read_asset(path, _load_asset(path))
    elif hasattr(source, "desc"):  # InferenceFunction
        functions = {source.desc.name: _read_function(source)}
    elif hasattr(source, "load_function"):  # AIModel
        functions = {
            name: _read_function(source.load_function(name)) for name in source.function_names
        }
    elif hasattr(source, "summary"):  # AIModelAsset
        functions = _read_asset(str(source.path), source)
    else:
        raise TypeError(
            "source must be a path to an .aimodel, an AIModelAsset, AIModel or InferenceFunction "
            f"of Core AI, or a mapping of names to shapes, got {type(source).__name__}"
        )
    return functions, next(iter(functions)) if len(functions) == 1 else (
        _MAIN if _MAIN in functions else None
    )


def choose(
    source: Source,
    function: str | None,
    seq_axis: int | None = None,
    *,
    verified: bool = True,
) -> StateSpecs:
    """Return the states of `function`, or of the default one if it is None.

    `seq_axis`: the sequence axis of states without one dynamic dimension; None: as `source` has it.
    `source`, `verified`: as for `read_functions`. Raises CompatibilityError if the function does
    not exist, or if no state of a function has the axis.
    """
    functions, default = read_functions(source, verified=verified)
    chosen = choose_function(functions, default if function is None else function)
    if seq_axis is not None:
        axis = valid_axis(seq_axis)
        functions = {name: _with_axis(states, axis) for name, states in functions.items()}
    return StateSpecs(functions, chosen, default_function=default)


def _with_axis(states: dict[str, StateSpec], axis: int) -> dict[str, StateSpec]:
    """Return the states of a function with `axis`, which may be negative, as their sequence axis.

    States with one dynamic dimension, and states without this axis, keep theirs. Raises
    CompatibilityError if then no state has a sequence axis.
    """
    changed = {}
    for name, spec in states.items():
        rank = len(spec.shape)
        if -rank <= axis < rank and spec.shape.count(None) != 1:
            spec = spec._replace(seq_axis=axis % rank)
        changed[name] = spec
    if states and all(spec.seq_axis is None for spec in changed.values()):
        listed = ", ".join(f"{name} {shape_text(spec.shape)}" for name, spec in states.items())
        text = f"no state has the axis {axis}: {listed}; pass the axis of the sequence"
        raise incompatible(text, "seq_axis", "an axis of a state", axis)
    return changed


# ---- the sequence axis of two models ----


def usual_axis(shape: Shape) -> int:
    """Return the sequence axis in the layouts of Apple's models, negative: counted from the end.

    It is the last axis if the axis before it has length 1, as in (layers, batch, heads *
    head_dim, 1, seq), else the axis before the last, as in (layers, batch, heads, seq, head_dim).
    """
    return -1 if len(shape) > 1 and shape[-2] == 1 else -2


def check_axes(first: StateSpec, other: StateSpec) -> None:
    """Raise CompatibilityError if a state has different sequence axes in two models.

    `first`, `other`: its specs. An axis that is not known, and shapes of different rank, which
    other checks refuse, are accepted.
    """
    axes = first.seq_axis, other.seq_axis
    if None in axes or axes[0] == axes[1] or len(first.shape) != len(other.shape):
        return
    text = (
        f"{first.name}: the sequence is axis {axes[0]} of {shape_text(first.shape)} and axis "
        f"{axes[1]} of {shape_text(other.shape)}: use models with the same layout"
    )
    raise incompatible(text, first.name, f"axis {axes[0]}", f"axis {axes[1]}")


def find_axis(spec: StateSpec, other: StateSpec) -> int | None:
    """Return the sequence axis of a state, counted from 0, from its specs in two models.

    It is the axis that `spec` or `other` has, else the only axis whose lengths differ. None if the
    shapes are equal and neither has a known axis: the state has no sequence, or the context size is
    the same. For shapes of different rank, which other checks refuse, it is the usual axis.

    Raises
    ------
    CompatibilityError
        The two sequence axes differ, or the shapes differ in another axis than the sequence in one
        of the usual layouts.
    """
    check_axes(spec, other)
    stated_axis = spec.seq_axis if spec.seq_axis is not None else other.seq_axis
    if stated_axis is not None or spec.shape == other.shape:
        return stated_axis
    rank = len(spec.shape)
    axis = usual_axis(spec.shape) + rank
    if rank != len(other.shape):
        return axis
    pairs = zip(spec.shape, other.shape, strict=True)
    differing = [i for i, (length, other_length) in enumerate(pairs) if length != other_length]
    if differing != [axis]:
        text = (
            f"{spec.name}: the sequence axis is unknown: {shape_text(spec.shape)} and "
            f"{shape_text(other.shape)} differ in the axes {differing}, and not in axis {axis} "
            "only; use models that were converted from the same weights, or pass seq_axis="
        )
        raise incompatible(text, spec.name, shape_text(spec.shape), shape_text(other.shape))
    return axis


def state_specs(
    source: Source,
    other: Source | None = None,
    *,
    function: str | None = None,
    seq_axis: int | None = None,
    verify: bool = True,
) -> StateSpecs:
    """Read the states that a Core AI model declares.

    The sequence axis of a state is its dynamic dimension. In a model with fixed shapes it is the
    axis that differs in `other`, else `seq_axis`, else it is not known.

    Parameters
    ----------
    source : str or path-like, AIModelAsset, AIModel, InferenceFunction, or mapping
        An ``.aimodel`` folder, or an object of Core AI. Or a mapping of names to `StateSpec` or
        to shapes (with dtype float16; None is a dynamic dimension).
    other : like `source`, optional
        The same model for another context size, to find the sequence axis.
    function : str, optional
        Function of a model with several. Default: the only one, else ``main``.
    seq_axis : int, optional
        The sequence axis of states with fixed shapes; negative values count from the end.
    verify : bool
        Whether `mlstate.coreai.verify` checks an ``.aimodel`` folder before it is read.

    Returns
    -------
    StateSpecs
        The states of that function by name; ``functions`` has those of all functions.

    Raises
    ------
    ChecksumError, FormatError, StoreError
        As for `mlstate.coreai.verify`. Also FormatError if Core AI cannot read the model.
    CompatibilityError
        The function does not exist, or there are several and none is ``main``; the dtype of a
        state is not supported; no state has `seq_axis`; or the shapes of a state in `other`
        differ in another axis than the sequence. A ValueError.
    ImportError
        `source` is a folder and coreai-core is not installed.
    TypeError
        `source` has another type.

    Notes
    -----
    Verification reads all of ``main.mlirb``; reading the states does not load the weights. Core
    AI's reader can end the process for a file that was crafted to have the right hash.

    The last axis but one is taken for the sequence in `other`, as in (layers, batch, heads, seq,
    head_dim), or the last axis if the one before it has length 1, as in (layers, batch, heads *
    head_dim, 1, seq). Other layouts need `seq_axis`.

    Examples
    --------
    >>> from mlstate.coreai import state_specs
    >>> state_specs({"k_cache": (2, 1, 2, None, 8)})["k_cache"].seq_axis
    3
    >>> small, large = {"k_cache": (2, 1, 16, 1, 64)}, {"k_cache": (2, 1, 16, 1, 128)}
    >>> state_specs(small, large)["k_cache"].seq_axis
    4
    """
    check_flags(verify=verify)
    specs = choose(source, function, seq_axis, verified=verify)
    if other is None:
        return specs
    others = choose(other, function, seq_axis, verified=verify)
    states = {
        name: spec._replace(seq_axis=find_axis(spec, others[name])) if name in others else spec
        for name, spec in specs.items()
    }
    functions = {**specs.functions, specs.function: states}
    return StateSpecs(functions, specs.function, default_function=specs.default_function)
