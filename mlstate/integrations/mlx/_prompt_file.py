"""Names and texts in prompt cache files of mlx-lm, of 0.31 and of 0.32: parse and write them.

A file is one safetensors file. Its metadata is a flattened tree of three branches. mlx-lm 0.32 and
later write ``[user metadata, class names, kinds of scalars]`` and store each number as an array;
0.31 and earlier write ``[numbers of each layer, user metadata, class names]``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from ...errors import FormatError
from ...kv._arguments import incompatible
from ._layer_values import CLASSES, LayerClass, LayerValues, find_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

GENERATIONS = ("0.31", "0.32")  # of files: the last or first version of mlx-lm that writes them
MOST_DEPTH = 4  # of lists in lists
_MOST_NAME = 100  # characters of a class
_INTEGER = re.compile(r"-?\d{1,19}\Z", re.ASCII)

# The numbers of a layer that 0.31 and earlier write as texts. Their state has the arrays only.
_OLD_NUMBERS = {
    "KVCache": (),
    "QuantizedKVCache": ("offset", "group_size", "bits"),
    "RotatingKVCache": ("keep", "max_size", "offset", "_idx"),
    "ArraysCache": (),
    "ChunkedKVCache": ("chunk_size", "start_position"),
    "BatchKVCache": (),
    "BatchRotatingKVCache": ("max_size", "_offset", "_idx", "rotated"),
}
# Before 0.30 they had one more, the number of positions of an allocation, at this index.
_STEP_AT = {"QuantizedKVCache": 0, "RotatingKVCache": 2}


class PromptFile(NamedTuple):
    """The content of a prompt cache file."""

    generation: str
    layers: list[LayerValues]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of layers."""
        return sum(layer.nbytes for layer in self.layers)


def parse_prompt(arrays: Mapping[str, Any], texts: Mapping[str, str], path: str) -> PromptFile:
    """Return the layers and the user's metadata of a file.

    `arrays`, `texts`: tensors and metadata of the safetensors file. Raises FormatError, with
    `path`, unless all of them are known.
    """
    if "2.0" not in texts:
        _fail(path, None, "its metadata does not have the class names of a prompt cache of mlx-lm")
    is_new = texts["2.0"] == ""  # old files have the name of a class here
    strange = next((key for key in texts if key[:2] not in ("0.", "1.", "2.")), None)
    if strange is not None:
        _fail(path, strange, f"its metadata has {strange!r}, which is in no branch of the tree")
    parser = _NewParser(arrays, texts, path) if is_new else _OldParser(arrays, texts, path)
    layers = [parser.layer(name, str(i)) for i, name in enumerate(parser.class_names())]
    parser.check_used()
    branch = "0." if is_new else "1."
    metadata = {key[2:]: text for key, text in texts.items() if key.startswith(branch)}
    return PromptFile(GENERATIONS[1 if is_new else 0], layers, metadata)


def _fail(path: str, name: str | None, text: str) -> NoReturn:
    """Raise FormatError for the file at `path`; `name`: of the tensor or layer, or None."""
    raise FormatError(f"{path}: {text}", path=path, name=name)


class _Parser:
    """Collects the values of layers by the names of their arrays."""

    def __init__(self, arrays: Mapping[str, Any], texts: Mapping[str, str], path: str) -> None:
        self.arrays, self.texts, self.path = arrays, texts, path
        self.used: set[str] = set()

    def fail(self, name: str | None, text: str) -> NoReturn:
        """Raise FormatError with a text; `name`: of the tensor or layer, or None."""
        _fail(self.path, name, text)

    def class_names(self) -> list[str]:
        """Return the names of the layers' classes."""
        raise NotImplementedError

    def children(self, where: str) -> list[tuple[str, str]]:
        """Return (class, place) of each layer in the CacheList at the place `where`."""
        raise NotImplementedError

    def values(self, cls: LayerClass, where: str) -> dict[str, Any]:
        """Return the values, by field, of the layer of class `cls` at the place `where`."""
        raise NotImplementedError

    def layer(self, name: str, where: str, depth: int = 0) -> LayerValues:
        """Return the layer at the place `where` of the tree of arrays, such as "3" or "3.1".

        `name`: of its class. `depth`: number of CacheLists that contain it. Raises FormatError.
        """
        # Before 0.30, ArraysCache had a subclass for two arrays.
        cls = CLASSES.get("ArraysCache" if name == "MambaCache" else name)
        if cls is None:
            names = ", ".join(CLASSES)
            self.fail(
                where, f"layer {where} is a {name[:_MOST_NAME]!r}; the known classes are {names}"
            )
        if cls.name != "CacheList":
            layer = LayerValues(cls, self.values(cls, where), [])
            problem = find_problem(layer)
            if problem is not None:
                self.fail(where, f"layer {where}: {name}.{problem[0]} {problem[1]}")
            return layer
        if depth == MOST_DEPTH:
            self.fail(where, f"layer {where} has lists in more than {MOST_DEPTH} lists")
        parts = self.children(where)
        return LayerValues(cls, {}, [self.layer(*part, depth + 1) for part in parts])

    def check_used(self) -> None:
        """Raise FormatError if an array of the file does not belong to a layer."""
        left = [name for name in self.arrays if name not in self.used]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            self.fail(left[0], f"tensor {left[0]!r}{more} does not belong to a layer")

    def take(self, name: str) -> Any:
        """Return an array, and note that a layer has it; raise FormatError if it is missing."""
        if name not in self.arrays:
            self.fail(name, f"tensor {name!r} is missing")
        self.used.add(name)
        return self.arrays[name]

    def take_list(self, where: str) -> list[Any]:
        """Return the arrays ``where.0``, ``where.1`` and so on, up to the first missing number."""
        result: list[Any] = []
        while f"{where}.{len(result)}" in self.arrays:
            result.append(self.take(f"{where}.{len(result)}"))
        return result

    def text_list(self, prefix: str, names: Mapping[str, str]) -> list[str]:
        """Return the texts ``prefix.0``, ``prefix.1`` and so on, up to a missing number.

        `names`: the texts of the file by key.
        """
        result: list[str] = []
        while (text := names.get(f"{prefix}.{len(result)}")) is not None:
            result.append(text)
        return result


class _NewParser(_Parser):
    """Reads files of mlx-lm 0.32 and later."""

    def __init__(self, arrays: Mapping[str, Any], texts: Mapping[str, str], path: str) -> None:
        """Read the list of scalars from the texts; raise FormatError if it is not complete."""
        super().__init__(arrays, texts, path)
        self.kinds: dict[str, str] = {}  # of scalars, by the names of their arrays
        number = 1  # "2.0" is the mark of the new form
        while (name := texts.get(f"2.{number}.0")) is not None:
            self.kinds[name] = texts.get(f"2.{number}.1", "")
            number += 1
        count = sum(key.startswith("2.") for key in texts)
        # a name and a kind for each scalar, and the mark; two scalars must not have one name
        if count != 2 * number - 1 or len(self.kinds) != number - 1:
            self.fail(None, "its list of scalars is not complete")

    def class_names(self) -> list[str]:
        """Return the names of the layers' classes; raise FormatError if a number is missing."""
        names = self.text_list("1", self.texts)
        if len(names) != sum(key.startswith("1.") for key in self.texts):
            self.fail(None, "its list of classes is not complete")
        return names

    def take(self, name: str) -> Any:
        """Return the array `name`, or the number, text or None that mlx-lm has stored as it.

        Raises FormatError for an array that does not fit its kind in the list of scalars.
        """
        array = super().take(name)
        kind = self.kinds.get(name)
        if kind is None:
            return array
        if kind == "none" and array.size == 0:
            return None
        if kind == "scalar" and array.ndim == 0 and array.dtype.kind in "biu":
            return array.item()
        is_text = array.ndim == 1 and array.dtype.kind in "iu" and array.size <= _MOST_NAME
        if kind != "string" or not is_text or not ((array >= 32) & (array < 127)).all():
            self.fail(name, f"tensor {name!r} is not a value of kind {kind[:_MOST_NAME]!r}")
        return "".join(map(chr, array.tolist()))

    def children(self, where: str) -> list[tuple[str, str]]:
        """Return class and place of each layer of a CacheList.

        The name of a class is stored as ``where.<i>.1``, the layer's arrays below ``where.<i>.0``.
        """
        parts: list[tuple[str, str]] = []
        while f"{where}.{len(parts)}.1" in self.arrays:
            place = f"{where}.{len(parts)}"
            name = self.take(f"{place}.1")
            if not isinstance(name, str):
                self.fail(f"{place}.1", f"tensor '{place}.1' is not the name of a class")
            parts.append((name, f"{place}.0"))
        return parts

    def values(self, cls: LayerClass, where: str) -> dict[str, Any]:
        """Return the values of a layer, whose field number `i` is stored as ``where.<i>``.

        States, and the codes, scales and biases of a quantized layer, are lists of arrays
        ``where.<i>.0`` and so on. An empty quantized layer has one array in their place, for None.
        Raises FormatError for a missing array, or a scalar that does not fit its kind.
        """
        values: dict[str, Any] = {}
        for i, (name, kind) in enumerate(cls.fields.items()):
            place = f"{where}.{i}"
            if kind == "states":
                values[name] = self.take_list(place)
            elif kind == "codes" and place not in self.arrays:
                values[name] = tuple(self.take_list(place))
            else:
                values[name] = self.take(place)
        return values


class _OldParser(_Parser):
    """Reads files of mlx-lm 0.31 and earlier."""

    def class_names(self) -> list[str]:
        """Return the names of the layers' classes; raise FormatError if a number is missing."""
        names = self.text_list("2", self.texts)
        if len(names) != sum(key.startswith("2.") for key in self.texts):
            self.fail(None, "its list of classes is not complete")
        return names

    def children(self, where: str) -> list[tuple[str, str]]:
        """Return class and place of each layer of a CacheList, from the names among its texts."""
        at = self._number_place(where)
        names = self.text_list(f"{at}.0", self.texts)
        return [(name, f"{where}.{i}") for i, name in enumerate(names)]

    def _number_place(self, where: str) -> str:
        """Return the place among the texts of the numbers of the layer at `where`.

        The arrays of a child are at ``3.1``, its numbers at ``0.3.1.1``: each CacheList has branch
        0, the names of its classes, and branch 1, the numbers of its children.
        """
        first, *rest = where.split(".")
        return ".".join(["0", first, *(part for each in rest for part in ("1", each))])

    def _numbers(self, cls: LayerClass, where: str) -> dict[str, Any]:
        """Return the numbers and flags of the layer at `where` by field, from the file's texts.

        Raises FormatError unless there are as many as the class stores.
        """
        names = _OLD_NUMBERS[cls.name]
        texts = self.text_list(self._number_place(where), self.texts)
        if cls.name in _STEP_AT and len(texts) == len(names) + 1:
            del texts[_STEP_AT[cls.name]]
        if len(texts) != len(names):
            text = f"layer {where}, a {cls.name}, has {len(texts)} numbers, not {len(names)}"
            self.fail(where, text)
        values: dict[str, Any] = {}
        for name, text in zip(names, texts, strict=True):
            if cls.fields[name] == "flag" and text in ("True", "False", ""):
                values[name] = text == "True"
            elif cls.fields[name] == "count" and _INTEGER.match(text):
                values[name] = int(text)
            else:
                self.fail(where, f"layer {where}: {cls.name}.{name} is {text[:_MOST_NAME]!r}")
        return values

    def values(self, cls: LayerClass, where: str) -> dict[str, Any]:
        """Return the values of the layer at `where`.

        Counters that the file lacks are the number of positions. Raises FormatError for a
        ChunkedKVCache that dropped tokens, since the file lacks their number.
        """
        values = self._numbers(cls, where)
        if cls.name == "ArraysCache":
            return {"cache": self.take_list(where), "left_padding": None, "lengths": None}
        for i, (name, kind) in enumerate(cls.fields.items()):
            if kind == "rows" or kind == "vector":
                values[name] = self.take(f"{where}.{i}")
            elif kind == "codes":
                values[name] = tuple(self.take_list(f"{where}.{i}"))
        keys = values["keys"]
        positions = keys.shape[2] if isinstance(keys, np.ndarray) and keys.ndim == 4 else 0
        if cls.name == "ChunkedKVCache" and values["start_position"]:
            text = "mlx-lm 0.31 does not store the number of tokens of a layer that dropped some"
            self.fail(where, f"layer {where}, a {cls.name}, is not complete: {text}")
        for name in ("offset", "_idx"):  # which these files do not have
            if cls.fields.get(name) == "count" and name not in values:
                values[name] = positions
        return {name: values[name] for name in cls.fields}


def flatten_prompt(
    layers: list[LayerValues], metadata: Mapping[str, str], generation: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arrays and the texts of a file of a `generation` (of `GENERATIONS`).

    Raises TypeError or ValueError for metadata that is not allowed, and CompatibilityError for
    values that 0.31 does not store.
    """
    check_metadata(metadata)
    classes = [layer.cls.name for layer in layers]
    arrays: dict[str, Any] = {}
    if generation == "0.32":
        scalars: list[tuple[str, str]] = []
        for i, layer in enumerate(layers):
            _flatten_new(layer, str(i), arrays, scalars)
        branches: tuple[Any, ...] = (metadata, classes, ["", *scalars])
    else:
        info = [_flatten_old(layer, str(i), arrays) for i, layer in enumerate(layers)]
        branches = (info, metadata, classes)
    texts: dict[str, str] = {}
    for i, branch in enumerate(branches):
        _flatten_texts(branch, str(i), texts)
    return arrays, texts


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise unless metadata has texts by keys that are not reserved.

    TypeError for another type, ValueError for the key ``mlstate`` or one below it.
    """
    for key, text in metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise TypeError(f"metadata must map str to str, got {key!r}: {type(text).__name__}")
        if key.partition(".")[0] == "mlstate":
            raise ValueError(f"metadata key {key!r} is reserved: choose another one")


def _flatten_texts(branch: Any, where: str, texts: dict[str, str]) -> None:
    """Add the texts of a tree of lists and dicts to `texts`, by their places below `where`."""
    if isinstance(branch, str):
        texts[where] = branch
        return
    is_list = isinstance(branch, list | tuple)
    for key, part in enumerate(branch) if is_list else branch.items():
        _flatten_texts(part, f"{where}.{key}", texts)


def _flatten_new(
    layer: LayerValues, where: str, arrays: dict[str, Any], scalars: list[tuple[str, str]]
) -> None:
    """Add the arrays of a layer at the place `where` to `arrays`, and its scalars as arrays.

    `scalars` gets (place, kind) for each scalar. A child is followed by the name of its class.
    """
    for i, child in enumerate(layer.children):
        _flatten_new(child, f"{where}.{i}.0", arrays, scalars)
        _add_value(child.cls.name, f"{where}.{i}.1", arrays, scalars)
    for i, value in enumerate(layer.values.values()):
        place = f"{where}.{i}"
        if isinstance(value, tuple | list):
            for j, part in enumerate(value):
                _add_value(part, f"{place}.{j}", arrays, scalars)
        else:
            _add_value(value, place, arrays, scalars)


def _add_value(
    value: Any, place: str, arrays: dict[str, Any], scalars: list[tuple[str, str]]
) -> None:
    """Add an array at `place`, or the array that mlx-lm stores for a number, a text or None.

    For these, `scalars` gets (place, kind) too.
    """
    if isinstance(value, np.ndarray):
        arrays[place] = value
    elif value is None:
        arrays[place] = np.zeros(0, np.float32)
        scalars.append((place, "none"))
    elif isinstance(value, str):
        arrays[place] = np.array([ord(letter) for letter in value], np.int32)
        scalars.append((place, "string"))
    else:
        is_small = -(2**31) <= value < 2**31
        dtype = np.bool_ if type(value) is bool else np.int32 if is_small else np.int64
        arrays[place] = np.array(value, dtype)
        scalars.append((place, "scalar"))


def _flatten_old(layer: LayerValues, where: str, arrays: dict[str, Any]) -> Any:
    """Add the arrays of a layer for 0.31 to `arrays`, and return its numbers as texts.

    `where`: place of the layer, which begins the arrays' names. Returns a list, or "" for a layer
    without numbers; for a CacheList (class names of its layers, list of their results). Free
    positions are left out: 0.31 takes the length of the arrays as the number of tokens.
    """
    cls, values = layer.cls, layer.values
    if cls.name == "CacheList":
        parts = list(enumerate(layer.children))
        names = [child.cls.name for child in layer.children]
        return names, [_flatten_old(child, f"{where}.{i}", arrays) for i, child in parts]
    _check_old(layer, where)
    batch_tokens = {
        "BatchKVCache": values.get("_idx"),
        "BatchRotatingKVCache": values.get("_offset"),
    }
    length = batch_tokens.get(cls.name, values.get("offset"))
    number = 0  # of the next array, or list of arrays, of the layer
    for name, kind in cls.fields.items():
        value = values[name]
        if kind in ("rows", "codes"):
            for part_name, part in _parts(value, f"{where}.{number}"):
                arrays[part_name] = part[:, :, :length]
            number += 1
        elif kind == "vector":
            arrays[f"{where}.{number}"] = value
            number += 1
        elif kind == "states":
            arrays.update(_parts(value, where))
    numbers = [values[name] for name in _OLD_NUMBERS[cls.name]]
    # mlx-lm 0.31 reads every text but the empty one as true.
    texts = [("True" if n else "") if type(n) is bool else str(n) for n in numbers]
    return texts or ""


def _parts(value: Any, where: str) -> list[tuple[str, Any]]:
    """Return name and array of each array in a value: an array, or a list of arrays.

    `where`: name of the value, with a number after it in a list.
    """
    if isinstance(value, np.ndarray):
        return [(where, value)]
    return [(f"{where}.{i}", part) for i, part in enumerate(value)]


def _check_old(layer: LayerValues, where: str) -> None:
    """Raise CompatibilityError if a file of 0.31 cannot hold the values of the layer at `where`."""
    values, text = layer.values, ""
    if layer.cls.name == "ArraysCache":
        if any(state is None for state in values["cache"]):
            text = "a state that is None"
        elif values["left_padding"] is not None or values["lengths"] is not None:
            text = "left_padding or lengths"
    elif layer.is_empty:
        text = "a layer without tokens"
    elif values.get("start_position"):
        text = "the number of tokens of a layer that dropped some"
    if text:
        raise incompatible(
            f"layer {where}, a {layer.cls.name}: mlx-lm 0.31 does not store {text}",
            where,
            "a file of mlx-lm 0.32",
            "0.31",
        )
