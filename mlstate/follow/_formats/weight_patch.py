"""TRL's sparse weight patches, and vLLM's ``SparseWeightPatch``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._common.dtypes import as_numbers
from ...errors import CompatibilityError, FormatError
from .numbers import delta_from_numbers, numbers_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..._types import NDArray
    from .._delta import Delta

# The tensors of a parameter: positions and values. The first pair is TRL's present one.
SUFFIXES = ((".idx", ".val"), (".indices", ".values"))
_ENCODINGS = ("gap_delta", "raw")
_FORMAT = "sparse_weight_patch"
_INT32_MAX = 2**31 - 1


def read_weight_patch(
    tensors: Mapping[str, NDArray], metadata: Mapping[str, str], elements: Mapping[str, int]
) -> dict[str, Delta]:
    """Return the deltas of a sparse patch of TRL, by parameter.

    Parameters
    ----------
    tensors, metadata : dict
        Content of the safetensors file.
    elements : dict of int
        Elements of each parameter; the file lacks them.

    Raises
    ------
    FormatError
        The file is an anchor, not a sparse patch; its indices have an unknown encoding; a tensor is
        missing; or a delta is damaged.
    CompatibilityError
        A parameter is not in `elements`.
    """
    if metadata.get("format", _FORMAT) != _FORMAT or metadata.get("sparse", "True") != "True":
        raise FormatError("this file is not a sparse weight patch: load it as a state dict")
    encoding = metadata.get("encoding", "raw")
    if encoding not in _ENCODINGS:
        raise FormatError(f"indices with encoding {encoding!r} are not supported")
    deltas = {}
    for name, (index_key, value_key) in _parameters_of(tensors).items():
        if name not in elements:
            raise CompatibilityError(f"the patch changes {name!r}, which this model lacks")
        indices = np.asarray(tensors[index_key])
        if encoding == "gap_delta":
            if indices.dtype not in (np.uint16, np.uint32):
                raise FormatError(f"{index_key!r} must have gaps of uint16 or uint32")
            indices = np.cumsum(indices.astype(np.int64) + 1) - 1
        deltas[name] = delta_from_numbers(name, indices, tensors[value_key], elements[name])
    return deltas


def write_weight_patch(
    deltas: Mapping[str, Delta],
    version: int,
    *,
    encoding: str = "gap_delta",
    suffixes: tuple[str, str] = SUFFIXES[0],
) -> tuple[dict[str, NDArray], dict[str, str]]:
    """Return tensors and metadata of a sparse patch for TRL.

    Parameters
    ----------
    deltas : dict of Delta
        By parameter.
    version : int
        Version of the model after the patch.
    encoding : {"gap_delta", "raw"}
        Of the indices: gaps of uint16 or uint32, or int32 positions.
    suffixes : (str, str)
        One of `SUFFIXES`.

    Raises
    ------
    CompatibilityError
        A parameter has more elements than int32 can number.
    ValueError
        `encoding` is unknown.
    """
    if encoding not in _ENCODINGS:
        raise ValueError(f"encoding must be one of {', '.join(_ENCODINGS)}, got {encoding!r}")
    tensors: dict[str, NDArray] = {}
    for name, delta in deltas.items():
        numbers = _int32_numbers(name, delta)
        if encoding == "gap_delta":
            gaps = np.diff(numbers, prepend=np.int32(-1)) - 1
            numbers = gaps.astype(np.uint16 if gaps.max(initial=0) <= 65535 else np.uint32)
        tensors[name + suffixes[1]] = delta.values
        tensors[name + suffixes[0]] = numbers
    changed = sum(len(delta.values) for delta in deltas.values())
    total = sum(delta.elements for delta in deltas.values())
    metadata = {
        "format": _FORMAT,
        "version": "1",
        "sparse": "True",
        "model_version": str(version),
        "num_changed_params": str(len(deltas)),
        "total_changed_elements": str(changed),
        "total_elements": str(total),
        "sparsity": str(1.0 - changed / max(total, 1)),
        "encoding": encoding,
    }
    return tensors, metadata


def read_patches(patches: Iterable[Any], elements: Mapping[str, int]) -> dict[str, Delta]:
    """Return the deltas of vLLM's patches: objects with ``name``, ``indices`` and ``values``.

    Raises
    ------
    FormatError
        A patch is damaged, its ``full_shape`` has another size than the parameter, or a parameter
        has two patches.
    CompatibilityError
        A parameter is not in `elements`.
    """
    deltas: dict[str, Delta] = {}
    for patch in patches:
        name = patch.name
        if name not in elements:
            raise CompatibilityError(f"the patch changes {name!r}, which this model lacks")
        if name in deltas:
            raise FormatError(f"{name!r} has two patches")
        shape = getattr(patch, "full_shape", None)  # vLLM before 0.28 has none
        if shape is not None and prod(shape) != elements[name]:
            raise FormatError(f"the patch of {name!r} is for shape {tuple(shape)}")
        deltas[name] = delta_from_numbers(name, patch.indices, patch.values, elements[name])
    return deltas


def write_patches(
    deltas: Mapping[str, Delta], shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, NDArray, NDArray, tuple[int, ...]]]:
    """Return the fields of vLLM's patch of each parameter: name, int32 indices, values, shape.

    Parameters
    ----------
    deltas : dict of Delta
        By parameter.
    shapes : dict of tuple of int
        Shape of each parameter in the checkpoint.

    Raises
    ------
    CompatibilityError
        A parameter has more elements than int32 can number, or vLLM would refuse its values: a NaN
        marks an unchanged element there, so a dtype without NaN cannot be patched.
    """
    patches = []
    for name, delta in deltas.items():
        values = as_numbers(delta.values)
        is_integer = values.dtype.kind in "iub"
        if is_integer or np.isnan(values).any():
            problem = f"dtype {values.dtype}" if is_integer else "a NaN"
            raise CompatibilityError(
                f"vLLM cannot patch {name!r} with {problem}: NaN marks unchanged elements",
                name=name,
            )
        patches.append((name, _int32_numbers(name, delta), delta.values, tuple(shapes[name])))
    return patches


def _parameters_of(tensors: Mapping[str, NDArray]) -> dict[str, tuple[str, str]]:
    """Return the keys of the tensors of indices and values of each parameter, by its name.

    Raises FormatError for a tensor without the other one of the pair.
    """
    parameters: dict[str, tuple[str, str]] = {}
    for indices, values in SUFFIXES:
        for key in tensors:
            name, dot, suffix = key.rpartition(".")
            if dot + suffix in (indices, values):
                parameters[name] = name + indices, name + values
    keys = {key for pair in parameters.values() for key in pair}
    for missing in sorted(keys - tensors.keys()):
        raise FormatError(f"a sparse weight patch has indices and values: {missing!r} is missing")
    for unknown in sorted(tensors.keys() - keys):
        raise FormatError(
            f"a sparse weight patch has indices and values: {unknown!r} is neither, or its "
            "parameter has others too"
        )
    return parameters


def _int32_numbers(name: str, delta: Delta) -> NDArray:
    """Return the numbers of the changed elements as int32.

    Raises CompatibilityError if the parameter `name` has too many elements.
    """
    if delta.elements > _INT32_MAX:
        raise CompatibilityError(
            f"{name!r} has {delta.elements} elements: int32 cannot number them"
        )
    return numbers_of(delta).astype(np.int32)
