"""Dtype and quantization in the ``config.json`` of an export: they describe what is written."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

from ..._common.dtypes import FLOAT8S, PACKED
from .._quantized.config import ENTRIES, ENTRY, has_entries, remove_entries

if TYPE_CHECKING:
    from collections.abc import Iterable

_KEYS = ("dtype", "torch_dtype")  # transformers 5, and before
_DTYPES = {"float16", "bfloat16", "float32", "float64"}
_SMALL_INTEGERS = {"int8", "uint8", "int16", "uint16", "int32", "uint32"}
PARAMS = "params.json"
_MOST_BYTES = 16 << 20  # of a file that is changed; a longer one is copied as it is


def weights_dtype(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> str | None:
    """Return the dtype that most float elements have; None without floats.

    `tensors`: name, dtype and shape of each.
    """
    counts: Counter[str] = Counter()
    for _, dtype, shape in tensors:
        if dtype in _DTYPES:
            counts[dtype] += prod(shape)
    return max(counts, key=lambda dtype: counts[dtype]) if counts else None


def has_codes(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bool:
    """Return whether some tensors may be codes of quantized weights, by dtype and shape.

    `tensors`: name, dtype and shape of each. Small integers with two axes or more are codes too.
    """
    return any(
        dtype in FLOAT8S or dtype in PACKED or (dtype in _SMALL_INTEGERS and len(shape) > 1)
        for _, dtype, shape in tensors
    )


def _is_quantized(config: dict[str, Any]) -> bool:
    return any(config.get(name) is not None for name in ENTRIES)


def _set_dtype(config: dict[str, Any], dtype: str) -> bool:
    """Set the dtype of a configuration and of those nested in it; return whether it changed.

    Configurations of quantized models stay.
    """
    is_changed = False
    for key, value in config.items():
        if key in ENTRIES:
            continue
        if key in _KEYS and isinstance(value, str) and value.removeprefix("torch.") != dtype:
            config[key] = dtype
            is_changed = True
        elif key.endswith("_config") and isinstance(value, dict) and not _is_quantized(value):
            is_changed |= _set_dtype(value, dtype)
    return is_changed


def config_of_dtype(
    data: bytes, dtype: str | None, *, is_plain: bool = False, entry: dict[str, Any] | None = None
) -> bytes:
    """Return the bytes of a ``config.json`` with the dtype of the weights.

    `data`: its bytes now, returned if nothing changes, or if it is not a JSON object. `dtype`:
    None: no floats. The dtype of a quantized model is the one of its computations, and stays. With
    `is_plain`, no weight is quantized, and each ``quantization_config`` is removed. `entry`: the
    one to add if codes are written and the configuration has none.
    """
    try:
        config = json.loads(data) if len(data) <= _MOST_BYTES else None
        if not isinstance(config, dict):
            return data
        is_changed = is_plain and remove_entries(config)
        if entry is not None and not is_plain and not has_entries(config):
            config[ENTRY] = entry
            is_changed = True
        if dtype is not None and not _is_quantized(config):
            is_changed |= _set_dtype(config, dtype)
        if not is_changed:
            return data
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    except (ValueError, RecursionError):
        return data
    # half of a surrogate pair is escaped, as it was in the file
    return text.encode(errors="backslashreplace")


def other_without_entry(name: str, data: bytes) -> bytes | None:
    """Return a file with the quantization of another program without it; None: it has no more.

    `name`: ``hf_quant_config.json``, which has nothing else, or ``params.json``. A file that is not
    a JSON object stays.
    """
    if name != PARAMS:
        return None
    try:
        config = json.loads(data)
        if isinstance(config, dict) and config.pop("quantization", None) is not None:
            return json.dumps(config, indent=2).encode()
    except (ValueError, RecursionError):
        pass
    return data
