"""The dtype in an exported ``config.json``; quantization that no longer applies is removed."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_KEYS = ("dtype", "torch_dtype")  # transformers 5, and before
_DTYPES = {"float16", "bfloat16", "float32", "float64"}
_QUANTIZATION = "quantization_config"
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


def _is_quantized(config: dict[str, Any]) -> bool:
    return config.get(_QUANTIZATION) is not None


def _set_dtype(config: dict[str, Any], dtype: str) -> bool:
    """Set the dtype of a configuration and of those nested in it; return whether it changed.

    Configurations of quantized models stay.
    """
    is_changed = False
    for key, value in config.items():
        if key == _QUANTIZATION:
            continue
        if key in _KEYS and isinstance(value, str) and value.removeprefix("torch.") != dtype:
            config[key] = dtype
            is_changed = True
        elif key.endswith("_config") and isinstance(value, dict) and not _is_quantized(value):
            is_changed |= _set_dtype(value, dtype)
    return is_changed


def config_of_dtype(data: bytes, dtype: str | None, *, is_plain: bool = False) -> bytes:
    """Return the bytes of a ``config.json`` with the dtype of the weights.

    `data`: its bytes now, returned if it has the `dtype` already (None: no floats). The dtype of a
    quantized model is the one of its computations, and stays. So does a file that is not a JSON
    object. With `is_plain`, the weights are not quantized any more, and the ``quantization_config``
    is removed.
    """
    import json

    try:
        config = json.loads(data) if dtype is not None and len(data) <= _MOST_BYTES else None
        if not isinstance(config, dict) or (_is_quantized(config) and not is_plain):
            return data
        is_changed = is_plain and config.pop(_QUANTIZATION, None) is not None
        if dtype is None or not (_set_dtype(config, dtype) or is_changed):
            return data
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    except (ValueError, RecursionError):
        return data
    # half of a surrogate pair is escaped, as it was in the file
    return text.encode(errors="backslashreplace")
