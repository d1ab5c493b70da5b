"""`quantize`, `dequantize` of `CacheState`: which entries, on which device; the loss."""

from __future__ import annotations

from math import prod, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _core
from .._common.arrays import is_torch
from .._common.backend import backend_of
from .._common.dtypes import EXTENSIONS, stored_dtype
from .._common.set_module import set_module
from ._arguments import incompatible
from ._axis import along
from ._cache_spec import CacheEntry, CacheSpec, entry_error
from ._move import KVBackend
from ._transition import name_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Why an entry is not quantized.
_NO_QUANTIZE = {
    "sliding": "a sliding entry is not quantized: kind 'quantized' has no window",
    "recurrent": "a recurrent state is not quantized: every token changes it, so errors add up",
    "conv": "a convolution state is not quantized: every token changes it",
    "quantized": "the entry is quantized already",
    "opaque": "an opaque entry is not quantized: its layout is unknown",
}


@set_module("mlstate.kv.records")
class QuantizationLoss(NamedTuple):
    """How an entry differs after `CacheState.quantize`; errors refer to the values of the tokens.

    Attributes
    ----------
    max_error : float
        Largest absolute difference between a value and the value of its code after `dequantize`.
    rms_error : float
        Root mean square of the differences.
    relative_error : float
        `rms_error` divided by the root mean square of the values; 0 if all are 0.
    bytes_before, bytes_after : int
        Bytes of the arrays of the entry, with all positions.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.kv import CacheEntry, CacheSpec, CacheState
    >>> keys = np.random.default_rng(0).standard_normal((1, 8, 512, 64), np.float32)
    >>> spec = CacheSpec([CacheEntry("keys", "full", keys.shape, keys.dtype)])
    >>> for bits in (8, 4):
    ...     loss = CacheState(spec, {"keys": keys}, 512).quantize(bits, report=True)["keys"]
    ...     print(bits, f"{loss.relative_error:.1%}", loss.bytes_before // loss.bytes_after)
    8 0.5% 3
    4 9.1% 6
    """

    max_error: float
    rms_error: float
    relative_error: float
    bytes_before: int
    bytes_after: int


def chosen_entries(spec: CacheSpec, names: Iterable[str] | None, kind: str) -> set[str]:
    """Return the names of the entries to convert.

    `names`: names of their arrays; None: all entries of `kind`, at least one. `kind`: "full" to
    quantize, "quantized" to dequantize. Raises CompatibilityError if an entry has another kind,
    TensorNotFoundError for an unknown name, and TypeError if `names` is a str.
    """
    if isinstance(names, str):
        raise TypeError(f"names must be an iterable of names, got the str {names!r}")
    if names is None:
        chosen = [entry for entry in spec if entry.kind == kind]
        if not chosen:
            kinds = ", ".join(dict.fromkeys(entry.kind for entry in spec))
            text = f"no entry has kind {kind!r}: the kinds are {kinds}"
            raise incompatible(text, None, kind, kinds)
    else:
        chosen = [spec.entry_of(name) for name in names]
    for entry in chosen:
        if entry.kind != kind:
            text = f"the entry has kind {entry.kind!r}, not {kind!r}"
            if kind == "full":
                text = _NO_QUANTIZE[entry.kind]
            raise entry_error(entry.name, text, kind, entry.kind)
    return {entry.name for entry in chosen}


def _is_core_readable(array: Any) -> bool:
    """Return whether an array is in main memory: a NumPy array, or a torch tensor on the CPU."""
    return not is_torch(array) or array.is_cpu


def _operations_for(array: Any) -> Any:
    """Return the object whose functions quantize `array`: the core, or torch's `KVBackend`.

    Torch's is for a tensor on another device than the CPU.
    """
    return _core if _is_core_readable(array) else backend_of(array, KVBackend)


def _check_devices(entry: CacheEntry, arrays: Mapping[str, Any]) -> None:
    """Raise TypeError unless all arrays of an entry are on the device of its first one.

    `arrays`: the arrays of the cache by name.
    """
    devices = {name: str(arrays[name].device) for name in entry.arrays}
    for name, device in devices.items():
        if device != devices[entry.name]:
            raise TypeError(
                f"{name} is on device {device}, but {entry.name} is on {devices[entry.name]}: "
                "move them to one device"
            )


def _new_array(shape: tuple[int, ...], dtype: str, like: Any, *, is_full: bool) -> Any:
    """Return a new array of zeros: of NumPy, or a tensor if `like` is one on another device.

    `dtype`: its name; one of ml_dtypes that is not installed becomes labelled integers. `is_full`:
    whether tokens will fill it. Then a NumPy array is not cleared, to save the time.
    """
    operations = _operations_for(like)
    if operations is not _core:
        return operations.kv_zeros(shape, dtype, like)
    stored = stored_dtype(dtype) if dtype in EXTENSIONS else dtype
    return np.empty(shape, stored) if is_full else np.zeros(shape, stored)


def _run_operation(
    name: str, entry: CacheEntry, full: Any, coded: Mapping[str, Any], length: int
) -> Any:
    """Run the operation `name`, which `KVBackend` declares, on the first `length` tokens.

    `entry`: the quantized entry. `full`: the array of values; `coded`: arrays by name, with the
    codes, scales and biases of `entry`. Returns the result of the operation.
    """
    tokens = along(entry.seq_axis or 0, 0, length)
    codes, scales, biases = (coded[array][tokens] for array in entry.arrays)
    with name_errors(entry.name):
        operation = getattr(_operations_for(full), name)
        return operation(full[tokens], codes, scales, biases, entry.bits or 0, entry.group or 0)


def convert_entry(
    old: CacheEntry, new: CacheEntry, arrays: Mapping[str, Any], length: int
) -> dict[str, Any]:
    """Return new arrays by name for `new`, with the tokens of `old`; other positions are zero.

    One of the two entries is full, the other quantized; their numbers of positions may differ.
    `arrays`: all arrays of the cache by name. `length`: number of tokens, which are read and
    written once.
    """
    like = arrays[old.name]
    _check_devices(old, arrays)
    is_full = length == new.seq_length
    converted = {
        name: _new_array(shape, dtype, like, is_full=is_full)
        for name, (shape, dtype) in new.arrays.items()
    }
    if new.kind == "quantized":
        _run_operation("kv_quantize", new, like, converted, length)
    else:
        _run_operation("kv_dequantize", old, converted[new.name], arrays, length)
    return converted


def measure_loss(
    old: CacheEntry, new: CacheEntry, full: Any, coded: Mapping[str, Any], length: int
) -> QuantizationLoss:
    """Return how far the tokens of the quantized entry `new` are from the tokens of the full `old`.

    `full`: the array of `old`. `coded`: arrays by name, with the codes, scales and biases of `new`.
    `length`: number of tokens; with none, all errors are 0.
    """
    largest, error_squares, value_squares = _run_operation(
        "kv_quantization_loss", new, full, coded, length
    )
    axis = old.seq_axis or 0  # never None for a full entry
    count = prod(old.shape[:axis]) * length * prod(old.shape[axis + 1 :])
    return QuantizationLoss(
        largest,
        sqrt(error_squares / count) if count else 0.0,
        sqrt(error_squares / value_squares) if value_squares else 0.0,
        old.nbytes,
        new.nbytes,
    )
