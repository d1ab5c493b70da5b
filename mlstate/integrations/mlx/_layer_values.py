"""Classes of mlx-lm's cache layers: their attributes, types and limits, checked; without mlx.

The attributes of a live layer have the names and the order of its `state` in mlx-lm 0.32, and a
prompt file stores the same values. They are private to mlx-lm, so all are checked before use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

FieldKind = Literal["rows", "codes", "states", "vector", "vector?", "count", "flag"]


class LayerClass(NamedTuple):
    """A class of layers: the kinds of its values by name, in the order of `state`."""

    name: str
    fields: dict[str, FieldKind]
    pending: str | None = None  # an attribute that is not None between `prepare` and `finalize`
    unknown: type | None = None  # a class that mlstate does not know: its layers are packed


_KV: dict[str, FieldKind] = {"keys": "rows", "values": "rows"}
CLASSES = {
    each.name: each
    for each in (
        LayerClass("KVCache", {**_KV, "offset": "count"}),
        LayerClass(
            "QuantizedKVCache",
            {
                "keys": "codes",
                "values": "codes",
                "offset": "count",
                "group_size": "count",
                "bits": "count",
            },
        ),
        LayerClass(
            "RotatingKVCache",
            {**_KV, "offset": "count", "keep": "count", "max_size": "count", "_idx": "count"},
        ),
        LayerClass(
            "ArraysCache", {"cache": "states", "left_padding": "vector?", "lengths": "vector?"}
        ),
        LayerClass(
            "ChunkedKVCache",
            {**_KV, "offset": "count", "chunk_size": "count", "start_position": "count"},
        ),
        LayerClass(
            "BatchKVCache",
            {**_KV, "offset": "vector", "left_padding": "vector", "_idx": "count"},
            pending="_right_padding",
        ),
        LayerClass(
            "BatchRotatingKVCache",
            {
                **_KV,
                "offset": "vector",
                "left_padding": "vector",
                "max_size": "count",
                "_offset": "count",
                "_idx": "count",
                "rotated": "flag",
            },
            pending="_lengths",
        ),
        LayerClass("CacheList", {}),
    )
}


class LayerValues(NamedTuple):
    """The values of one layer. Arrays are of NumPy; keys and values may be None."""

    cls: LayerClass
    values: dict[str, Any]
    children: list[LayerValues]  # of a CacheList
    is_unwritten: bool = False  # the oldest token of a ring is not in its slot

    @property
    def is_empty(self) -> bool:
        """Whether keys and values have not been allocated."""
        return self.values.get("keys") is None

    @property
    def positions(self) -> int:
        """Length of the sequence axis of keys and values."""
        keys = self.values.get("keys")
        keys = keys[0] if isinstance(keys, tuple) else keys
        return 0 if keys is None else int(keys.shape[2])

    @property
    def tokens(self) -> int | None:
        """Number of tokens, padding included; None if the layer does not count them."""
        counter = {"BatchKVCache": "_idx", "BatchRotatingKVCache": "_offset"}
        tokens: int | None = self.values.get(counter.get(self.cls.name, "offset"))
        return tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        total: int = sum(array.nbytes for array in self.arrays().values())
        return total + sum(child.nbytes for child in self.children)

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of the layer itself by field; those in a list are ``keys.0`` and so on.

        Arrays of children are not included.
        """
        arrays = {}
        for name, value in self.values.items():
            parts = enumerate(value) if isinstance(value, tuple | list) else [(None, value)]
            for index, part in parts:
                if isinstance(part, np.ndarray):
                    arrays[name if index is None else f"{name}.{index}"] = part
        return arrays


def find_problem(layer: LayerValues) -> tuple[str, str] | None:
    """Return the first value that no known version of mlx-lm has, as (field, reason).

    None if all values are valid. The reason continues a sentence, as in "is None, not a bool".
    """
    for name, kind in layer.cls.fields.items():
        reason = _find_type_problem(layer.values[name], kind)
        if reason:
            return name, reason
    if "keys" not in layer.cls.fields:
        return None
    return _find_shape_problem(layer) or _find_count_problem(layer)


def _kind_text(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    return "None" if value is None else f"of type {type(value).__name__}"


def _is_rows(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 4


def _is_codes(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and all(map(_is_rows, value))


def _is_states(value: object) -> bool:
    return isinstance(value, list) and all(
        each is None or isinstance(each, np.ndarray) for each in value
    )


def _is_vector(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62  # sums of two fit an int64


# By kind: the check of a value, whether it may be None, and the text of the kind.
_KINDS: dict[FieldKind, tuple[Callable[[object], bool], bool, str]] = {
    "rows": (_is_rows, True, "an array with 4 axes"),
    "codes": (_is_codes, True, "three arrays with 4 axes"),
    "states": (_is_states, False, "a list of arrays"),
    "vector": (_is_vector, False, "a vector of integers"),
    "vector?": (_is_vector, True, "a vector of integers"),
    "count": (_is_count, False, "a number of 0 or more"),
    "flag": (lambda value: type(value) is bool, False, "a bool"),
}


def _find_type_problem(value: Any, kind: FieldKind) -> str:
    """Return why a value is not of its kind, or an empty text if it is."""
    is_of_kind, is_optional, expected = _KINDS[kind]
    if (value is None and is_optional) or is_of_kind(value):
        return ""
    return f"is {value if type(value) is int else _kind_text(value)}, not {expected}"


def _find_shape_problem(layer: LayerValues) -> tuple[str, str] | None:
    """Return a field whose shape does not fit the other keys and values, with the reason.

    None if all of them fit, or the layer is empty.
    """
    keys, values = layer.values["keys"], layer.values["values"]
    if (keys is None) != (values is None):
        return "values", f"is {_kind_text(values)}, and keys {_kind_text(keys)}"
    if keys is None:
        return None
    parts = [*keys, *values] if isinstance(keys, tuple) else [keys, values]
    for part in parts[1:]:
        if part.shape[:3] != parts[0].shape[:3]:
            return "values", f"has shape {part.shape}, and the keys {parts[0].shape}"
    if isinstance(keys, tuple):
        for codes, scales, biases in (keys, values):
            if not _fit_bits(layer, codes, scales, biases):
                return "bits", (
                    f"is {layer.values['bits']}, and the codes have {codes.shape[3]} words for "
                    f"{scales.shape[3]} scales and {biases.shape[3]} biases of groups of "
                    f"{layer.values['group_size']}"
                )
    for name, kind in layer.cls.fields.items():
        vector = layer.values[name]
        if kind == "vector" and len(vector) != parts[0].shape[0]:
            return name, f"has {len(vector)} elements for a batch of {parts[0].shape[0]}"
    return None


def _fit_bits(layer: LayerValues, codes: Any, scales: Any, biases: Any) -> bool:
    """Return whether the codes have as many words of 32 bits as their scales' groups need."""
    bits, group = layer.values["bits"], layer.values["group_size"]
    has_all_words = codes.shape[3] * 32 == scales.shape[3] * group * bits
    return bool(1 <= bits <= 8 and has_all_words and scales.shape == biases.shape)


def _find_count_problem(layer: LayerValues) -> tuple[str, str] | None:
    """Return the name of a number of a layer that is impossible, with the reason, or None.

    That is a counter that is negative or exceeds the positions, or a ``max_size`` of no token.
    """
    values, positions = layer.values, layer.positions
    used, name = (values["_idx"], "_idx") if "_idx" in values else (values["offset"], "offset")
    if "start_position" in values:
        used -= values["start_position"]
    if not 0 <= used <= positions:
        return name, f"counts {used} tokens in {positions} positions"
    if values.get("max_size") == 0:
        return "max_size", "is 0"
    return None
