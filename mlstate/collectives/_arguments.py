"""Checks of a collective's arguments before it sends: dtypes, `counts`, `op`, `timeout`, `out`.

A wrong argument must fail on the rank that passes it, before the other ranks wait for that rank.
Wrong types and values raise TypeError or ValueError; mismatches raise `CompatibilityError`. The
argument `operation` of a function is the operation's name, such as "all_gather", for its errors.
"""

from __future__ import annotations

from enum import StrEnum
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from .._common.arguments import FLAG
from .._common.arrays import (
    is_same_memory,
    is_torch,
    overlaps_itself,
    refuse_masked,
    shares_elements,
)
from .._common.backend import TensorBackend, backend_of, imported_backends
from .._common.dtypes import PACKED, label_of, name_of
from ..errors import CollectiveError, CompatibilityError
from ._backend import GroupBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._types import Array


class ReduceOp(StrEnum):
    """Reduction of elements over ranks; each member equals its string value.

    ``SUM`` accepts numbers, ``MEAN`` floating-point and complex numbers, ``MIN`` and ``MAX`` real
    numbers and bool (logical *and* and *or*). If a rank has NaN, the result is NaN.

    Examples
    --------
    >>> from mlstate.collectives import ReduceOp
    >>> ReduceOp("mean"), ReduceOp.SUM == "sum"
    (<ReduceOp.MEAN: 'mean'>, True)
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


# Prefixes of the dtype names that each operation can reduce, equal in NumPy and torch.
_FLOATS = ("float", "bfloat")
_INTEGERS = ("int", "uint")
_REDUCIBLE = {
    "sum": (*_FLOATS, *_INTEGERS, "complex"),
    "mean": (*_FLOATS, "complex"),
    "min": (*_FLOATS, *_INTEGERS, "bool"),
    "max": (*_FLOATS, *_INTEGERS, "bool"),
}


# ---- groups ----


def check_group(group: Any) -> Any:
    """Return `group` itself if it has the methods of a process group.

    A group of torch.distributed is wrapped, always by the same object. Raises TypeError for others.
    """
    if hasattr(group, "gather_bytes") and hasattr(group, "world_size"):
        return group
    wrappers = (b.wrapped_group(group) for b in imported_backends(GroupBackend))
    wrapped = next((w for w in wrappers if w is not None), None)
    if wrapped is None:
        raise TypeError(
            "group must have the methods of mlstate.collectives.ProcessGroup, or be a process "
            "group of torch.distributed, which mlstate.integrations.torch.TorchGroup wraps; got "
            f"{type(group).__module__}.{type(group).__qualname__}"
        )
    return wrapped


def optional_group(group: Any) -> Any:
    """Return a process group as `check_group` does, or None."""
    return None if group is None else check_group(group)


# ---- errors ----


def failed(operation: str, rank: int, reason: str) -> CollectiveError:
    """Return the error of an operation that failed on this `rank`.

    `reason`: the cause and the remedy, as text.
    """
    return CollectiveError(f"{operation} on rank {rank}: {reason}", name=operation, rank=rank)


def _mismatch_error(
    operation: str,
    label: str,
    got: object,
    expected: object,
    remedy: str,
    *,
    rank: int | None = None,
) -> CompatibilityError:
    """Return the error for an argument that does not fit; its text has the first five arguments.

    `operation`: its name. `label`: start of the sentence about `got` ("out has shape"). `expected`:
    a value that would fit. `rank`: the rank at fault, if known.
    """
    error = CompatibilityError(f"{operation}: {label} {got}, expected {expected}; {remedy}")
    error.name, error.got, error.expected = operation, str(got), str(expected)
    error.rank = rank
    return error


# ---- plain arguments ----


def check_timeout(timeout: object) -> float | None:
    """Return a caller's timeout in seconds as a float, or None for the group's timeout.

    Raises TypeError if it is not a number, ValueError unless it is above 0 and below 1e9.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | np.integer | np.floating):
        raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
    seconds = float(timeout)
    if not 0 < seconds < 1e9:
        raise ValueError(f"timeout must be above 0 and below 1e9 seconds, got {timeout!r}")
    return seconds


def check_root(operation: str, root: Any, world_size: int) -> int:
    """Return `root` as an int; raise TypeError or ValueError if it is not a rank of the group.

    `operation`: its name, for the error.
    """
    try:
        if isinstance(root, FLAG):
            raise TypeError
        rank = int(index(root))
    except TypeError:
        raise TypeError(f"{operation}: root must be an int, got {type(root).__name__}") from None
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{operation}: root {rank} is not a rank of this group; pass 0 to {world_size - 1}"
        )
    return rank


def check_bytes(operation: str, data: Any) -> bytes:
    """Return `data`, any object with a buffer, as immutable bytes; raise TypeError for others."""
    try:
        return data if type(data) is bytes else memoryview(data).tobytes()
    except TypeError:
        raise TypeError(
            f"{operation} takes bytes, got {type(data).__name__}; encode strings, and pass arrays "
            "to all_gather"
        ) from None


# ---- arrays ----


def dtype_name(array: Any) -> str:
    """Return the name of an array's dtype, equal in NumPy and torch."""
    return name_of(array.dtype)


def rows_text(array: Any) -> str:
    """Return an array's dtype and the shape of its rows as text, which ranks compare.

    The length of the first axis is not part of it, as it may differ between ranks.
    """
    dtype = array.dtype
    if is_torch(array) or dtype.isbuiltin == 1:  # for others, the name omits the byte order
        text = name_of(dtype)
    else:
        text = label_of(dtype) or str(dtype)
    return f"{text} {tuple(array.shape[1:])}"


def check_array(operation: str, array: Any) -> Any:
    """Return a caller's input as an array, or as a tensor detached from autograd.

    Raises TypeError for other objects, for masked arrays, and for arrays of Python objects.
    """
    if is_torch(array):
        return array.detach()
    if not isinstance(array, np.ndarray | np.generic):
        raise TypeError(
            f"{operation} takes a NumPy array or a torch tensor, got {type(array).__name__}"
        )
    refuse_masked(f"{operation}: array", array)
    converted = np.asarray(array)
    if converted.dtype.hasobject:
        raise TypeError(
            f"{operation} moves bytes, and an array of dtype {converted.dtype} holds references to "
            "objects of this process: encode the objects and use gather_bytes"
        )
    return converted


def check_supported_tensor(operation: str, array: Any) -> None:
    """Raise TypeError for a tensor that is not plain memory, such as a sparse one; arrays pass."""
    if is_torch(array):
        reason = backend_of(array, TensorBackend).explain_unsupported_tensor(array)
        if reason:
            raise TypeError(f"{operation}: the tensor is {reason}")


def check_writable(operation: str, array: Array, rank: int) -> None:
    """Raise ValueError if the caller's array cannot be overwritten.

    It is read-only, or some of its elements share memory. `rank`: this rank, for the error.
    """
    if not is_torch(array) and not (isinstance(array, np.ndarray) and array.flags.writeable):
        raise ValueError(f"{operation}: the array of rank {rank} is read-only")
    if overlaps_itself(array):
        raise ValueError(
            f"{operation}: elements of the array of rank {rank} share memory with one another; "
            "pass a copy"
        )


def check_op(operation: str, op: object, array: Array) -> str:
    """Return the name of the reduction `op`, a `ReduceOp` or str, as a str ("sum").

    Raises ValueError if it is unknown, CompatibilityError if it is not defined for the array's
    dtype.
    """
    try:
        name = str(op.value if hasattr(op, "value") else op)
        prefixes = _REDUCIBLE[name]
    except KeyError:
        raise ValueError(f"{operation}: op {op!r} is not one of {', '.join(_REDUCIBLE)}") from None
    dtype = dtype_name(array)
    if dtype in PACKED or not dtype.startswith(prefixes):
        raise _mismatch_error(
            operation,
            f"op {name!r} is not defined for dtype",
            dtype,
            " or ".join(f"{prefix}*" for prefix in prefixes),
            "convert the array first",
        )
    return name


def check_counts(operation: str, name: str, counts: Any, rows: int, world_size: int) -> list[int]:
    """Return each rank's number of rows: `counts`, or equal parts of `rows` if it is None.

    `rows`: length of the array's first axis. `name`: of the argument `counts`, for errors. Raises
    CompatibilityError if the numbers do not add up to `rows`; also as `counts_of`.
    """
    if counts is None:
        if rows % world_size:
            raise _mismatch_error(
                operation,
                "the first dimension is",
                rows,
                f"a multiple of the {world_size} ranks",
                f"pass {name}= with the rows of each rank, or pad the array",
            )
        return [rows // world_size] * world_size
    listed = counts_of(operation, name, counts, world_size)
    if sum(listed) != rows:
        raise _mismatch_error(
            operation,
            "the first dimension is",
            rows,
            f"{sum(listed)}, the sum of {name}",
            "pass the array that they divide",
        )
    return listed


def counts_of(operation: str, name: str, counts: Sequence[Any], world_size: int) -> list[int]:
    """Return `counts`, the number of rows of each rank, as a list of int.

    `name`: of the argument, for errors. Raises TypeError if it is not a sequence of int, ValueError
    if its length is not `world_size` or a number is negative.
    """
    try:
        listed = [int(index(count)) for count in counts]
    except TypeError:
        raise TypeError(
            f"{operation}: {name} must be a sequence of int, one for each rank, got {counts!r}"
        ) from None
    if len(listed) != world_size:
        raise ValueError(
            f"{operation}: {name} has {len(listed)} entries for {world_size} ranks; give one for "
            "each, 0 where a rank has no rows"
        )
    if any(count < 0 for count in listed):
        raise ValueError(f"{operation}: {name} has a negative entry: {listed}")
    return listed


def check_rows(operation: str, array: Any) -> int:
    """Return the length of an array's first axis; raise CompatibilityError if it has no axes."""
    if not array.ndim:
        raise _mismatch_error(
            operation,
            "the array has",
            "no dimensions",
            "a first dimension that can be divided among the ranks",
            "pass array.reshape(1)",
        )
    return int(array.shape[0])


def check_own_rows(operation: str, array: Array, counts: Sequence[int], rank: int) -> None:
    """Raise CompatibilityError unless the length of an array's first axis is ``counts[rank]``.

    `rank`: this rank.
    """
    rows = check_rows(operation, array)
    if rows != counts[rank]:
        raise _mismatch_error(
            operation,
            "the first dimension is",
            rows,
            f"{counts[rank]}, the count of rank {rank}",
            "pass the same counts= on every rank",
            rank=rank,
        )


# ---- results ----


def result_of(operation: str, out: Any, shape: tuple[int, ...], array: Any) -> Any:
    """Return the array for a result of this shape: `out` if it fits, else a new array.

    `out`: the caller's argument, or None. `array`: the operation's input, which determines kind,
    dtype and device. If `out` shares memory with `array`, it must have the same elements in the
    same order. A tensor is returned detached. Raises TypeError if `out` is not of that kind,
    CompatibilityError if its shape, dtype or device differs, and ValueError if it is read-only or
    shares memory in another way.
    """
    if out is None:
        return array.new_empty(shape) if is_torch(array) else np.empty(shape, array.dtype)
    if is_torch(out) != is_torch(array) or not (is_torch(out) or isinstance(out, np.ndarray)):
        kind = "a torch tensor" if is_torch(array) else "a NumPy array"
        raise TypeError(f"{operation}: out must be {kind} as the input is, got {type(out)}")
    detached = out.detach() if is_torch(out) else out
    for label, got, expected in (
        ("shape", tuple(detached.shape), tuple(shape)),
        ("dtype", detached.dtype, array.dtype),
        ("dtype", dtype_name(detached), dtype_name(array)),  # NumPy's comparison ignores metadata
        *([("device", detached.device, array.device)] if is_torch(array) else []),
    ):
        if got != expected:
            raise _mismatch_error(
                operation, f"out has {label}", got, expected, "or leave it out for a new array"
            )
    refuse_masked(f"{operation}: out", detached)
    if not is_torch(detached) and not detached.flags.writeable:
        raise ValueError(f"{operation}: out is read-only")
    if overlaps_itself(detached):
        raise ValueError(f"{operation}: elements of out share memory with one another; pass a copy")
    if shares_elements(detached, array) and not is_same_memory(detached, array):
        raise ValueError(
            f"{operation}: out shares memory with the input; pass the input itself if the shapes "
            "are equal, or a separate array"
        )
    return detached
