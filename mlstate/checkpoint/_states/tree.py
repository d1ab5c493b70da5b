"""Which nested values `states=` can store, as JSON and arrays, without pickle; form of each type.

Plain values (None, bool, int, finite float, str), lists, and dicts with str keys are themselves
in the JSON text. Every other value is an object whose member ``"$"`` names its kind:

    array                   an array of the checkpoint: key, form (numpy, scalar, torch); order of
                            its dimensions in memory, from outer to inner (newer)
    bytes, bytearray        a uint8 array: key
    BytesIO                 a uint8 array: key, position
    dict                    key-value pairs, for other keys; class (dict, OrderedDict, Counter,
                            defaultdict), factory of a defaultdict, attributes. A key may be a
                            float, bytes (``hex``) or tuple: these are newer
    record (newer)          a named tuple or an object of a dataclass: form, module, class, fields
    state                   a state dict of mlstate: kind, values
    tuple, set, frozenset   items
    deque                   items, maxlen
    float, int, complex     values that JSON cannot hold
    path                    a path of pathlib: class, value
    enum                    a member of an enum: module, class, and name or value (of flags)
    dtype, size             a dtype of torch: name; a Size of torch: items
    generator               library, state, and seeds of NumPy's SeedSequence
    cache                   class, values: a KVState, RollingKVState or CacheState
    object                  state: the result of ``state_dict()``
    wrapper (newer)         a tensor of a subclass: module, class, size, stride, meta, parts by name
    excluded (newer)        a value that is not stored

A file with a newer form has a newer version. Objects, generators and caches are stored as their
state, because a target of the load receives it. In the result of ``state_dict()``, in records and
in optimizers nothing does: values there are *exact*, restored as the same class or refused.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._common.arrays import dimension_order, is_cache, is_torch, refuse_masked, with_order
from ..._common.backend import TensorBackend, backend_of, torch_backend
from ..._common.dtypes import NAMES, name_of, numpy_dtype
from ..._common.json_values import DEEPEST, check_text
from ..._common.text import shorten
from ..._sharding.layout import Shard
from ...errors import CompatibilityError, FormatError, UnstorableError
from ...state._kind import kind_of, restore_kind
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import ModelStateDict, StateDict
from .containers import (
    CONTAINERS,
    UnknownRecordError,
    children,
    class_named,
    field_names,
    full_name,
    known_classes,
    new_wrapper,
    rank_part,
    record_of,
    wrapper_of,
)
from .exact_values import check_exact, exclude_remedy, refuse_divided
from .excluded import EXCLUDED, NONE_EXCLUDED, Excluded
from .generators import library_of, restored, seeds_of, state_of
from .named_values import enum_node, enum_of, path_node, path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ..._types import NDArray

TEXT = ".tree"  # key of the JSON text, a uint8 array
RANKS = ".ranks"  # key of the packed trees of several ranks: uint8, a row for each rank
_HEADER = 8  # bytes of the length before a packed tree
DICTS: dict[str, type[dict[Any, Any]]] = {
    cls.__name__: cls for cls in (dict, OrderedDict, Counter, defaultdict)
}
_FACTORIES: dict[str, Callable[[], Any]] = {  # of a defaultdict
    cls.__name__: cls
    for cls in (
        *(bool, int, float, complex, str, bytes, list, tuple, dict, set),
        *(OrderedDict, Counter, deque),
    )
}
STATE_DICTS = (StateDict, ModelStateDict, OptimizerStateDict)
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
# errors of lookups in a malformed form
MALFORMED = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
_raw_decode = json.JSONDecoder().raw_decode  # for a short text, json.loads takes thrice the time
_MOST_BITS = 64  # of an int in the JSON text; larger ones are hexadecimal


class Tree(NamedTuple):
    """A nested value: its JSON text, its arrays by key, and whether it has a newer form."""

    text: bytes
    arrays: dict[str, Any]
    is_newer: bool = False


class Leaf(NamedTuple):
    """An array that the JSON form refers to.

    `form`: numpy, scalar, torch, or bytes, bytearray, BytesIO for arrays of bytes. `path`: keys and
    indices from the value to a sharded array; () for others.
    """

    key: str
    form: str
    is_sharded: bool
    path: tuple[Any, ...]


# ---- to JSON ----


def _segment(part: object) -> str:
    """Return a key or an index as a segment of an array's key.

    Different keys of a dict have different segments, and a dot only separates segments. `part` is
    Ellipsis for values that are not items: attributes of a dict, seeds of a generator.
    """
    text = str(part)
    if isinstance(part, float | bytes | tuple):
        return "~v" + text.replace("~", "~~").replace(".", "~.")
    if not isinstance(part, str):
        return text
    if text in ("", "None", "True", "False", "Ellipsis") or text.lstrip("-").isdigit():
        return f"~s{text}"
    return text.replace("~", "~~").replace(".", "~.")


class _Encoder:
    """Converts one value; `where` in errors is the path from the state's name.

    The parameters are those of `encode`.
    """

    def __init__(
        self, exact: bool, records: bool, name: str, excluded: Excluded, sorts: bool, ranks: int
    ) -> None:
        self.sorts = sorts
        self.ranks = ranks
        self.name = name
        self.excluded = excluded
        self.exact = exact
        self.keeps_gradients = not exact  # of tensors: objects may load them as they like
        self.records = records
        self.arrays: dict[str, Any] = {}
        self.is_newer = False

    def store(self, array: Any, path: tuple[Any, ...]) -> str:
        """Keep an array for the checkpoint, and return its key.

        The key depends on `path` only, because it joins the parts of an array of several ranks.
        """
        key = ".".join(map(_segment, path)) or "value"
        self.arrays[key] = array
        return key

    def node(self, value: Any, where: str, path: tuple[Any, ...], levels: int) -> Any:
        """Return the JSON form of any value; arrays are stored apart, and the form has their keys.

        `where`: path of the value, for errors. `path`: the same path as a tuple of keys and
        indices. `levels`: how many levels of containers may still follow.
        """
        if self.excluded.patterns and path and self.excluded.matches(self.name_of(path)):
            self.is_newer = True
            return {"$": "excluded"}
        if value is None or type(value) in (bool, str, int, float):
            return _plain_node(value, where)
        if levels == 0:
            raise ValueError(f"{where}: nested more than {DEEPEST} levels deep, or contains itself")
        node = _named_node(value, where)
        if node is not None:
            return node
        node = self.cache(value, where, path, levels - 1)
        if node is not None:
            return node
        if type(value) in STATE_DICTS:
            values = self.node(dict(value), where, path, levels - 1)
            return {"$": "state", "kind": kind_of(value), "values": values}
        part = wrapper_of(value, where, self.ranks)
        if part is not None:
            return self.wrapper(part, where, path, levels - 1)
        if field_names(value) is not None and method_of(value, "state_dict") is None:
            return self.record(value, where, path, levels - 1)
        if self.exact:
            check_exact(value, where, self.keeps_gradients, self.name_of(path))
        if isinstance(value, CONTAINERS):
            node = self.container(value, where, path, levels - 1)
        else:
            node = self.array(value, where, path)
        if node is None:
            node = self.object(value, where, path, levels - 1)
        return node

    def cache(self, value: Any, where: str, path: tuple[Any, ...], levels: int) -> Any:
        """Return the JSON form of a KV cache; None for other values.

        `node` describes the parameters.
        """
        if not is_cache(value):
            return None
        from ...kv._stored import cache_values, refuse_unstored

        refuse_unstored(value, where)
        name, values = cache_values(value)
        with self.all_included():
            return {"$": "cache", "class": name, "values": self.node(values, where, path, levels)}

    @contextmanager
    def all_included(self) -> Iterator[None]:
        """Store all values in the block: a cache or generator lacks no part of its state."""
        excluded, self.excluded = self.excluded, NONE_EXCLUDED
        try:
            yield
        finally:
            self.excluded = excluded

    def array(self, value: Any, where: str, path: tuple[Any, ...]) -> Any:
        """Return the JSON form of an array, a NumPy scalar or bytes; None for other values.

        `where` and `path` are as for `node`. The array is stored without a copy if possible. Raises
        TypeError for an array of objects, text or dates.
        """
        if type(value) in (bytes, bytearray):
            array = np.frombuffer(bytes(value), np.uint8)
            return {"$": type(value).__name__, "key": self.store(array, path)}
        if type(value) is BytesIO:
            key = self.store(np.frombuffer(value.getvalue(), np.uint8), path)
            return {"$": "BytesIO", "key": key, "position": value.tell()}
        if type(value) is complex:
            parts = [self.node(part, where, path, 1) for part in (value.real, value.imag)]
            return {"$": "complex", "parts": parts}
        form = "numpy"
        refuse_masked(where, value.array if isinstance(value, Shard) else value)
        if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
            cls = type(value)
            raise TypeError(
                f"{where} is a {cls.__module__}.{cls.__qualname__}, which would be restored as a "
                "plain array: pass numpy.asarray() of it"
            )
        if isinstance(value, np.generic):
            form, value = "scalar", np.asarray(value)
        elif is_torch(value):
            form = "torch"
            if hasattr(value, "device_mesh"):
                value = rank_part(value, where, self.ranks)
            else:
                backend_of(value, TensorBackend).refuse_unstorable(where, value, where)
                value = value.detach()
        elif not isinstance(value, np.ndarray | Shard) and not (
            hasattr(value, "__dlpack__") or hasattr(value, "__array_interface__")
        ):
            return None
        is_numpy = isinstance(value.dtype, np.dtype)
        if is_numpy and name_of(value.dtype) not in NAMES:  # such as objects, text, records
            raise TypeError(
                f"{where} is an array of {value.dtype}, which no checkpoint stores: use numbers of "
                "at most 64 bits, or lists of other values"
            )
        node: dict[str, Any] = {"$": "array", "key": self.store(value, path), "form": form}
        if isinstance(value, Shard):
            return {**node, "sharded": [*map(str, path)]}
        return node if form == "scalar" else self.ordered(node, value)

    def ordered(self, node: dict[str, Any], array: Any) -> Any:
        """Return the JSON form of an array with its order of dimensions, unless it is C order."""
        is_known = isinstance(array, np.ndarray) or is_torch(array)
        if is_known and (order := dimension_order(array)) is not None:
            self.is_newer = True
            node["order"] = order
        return node

    def items(
        self, values: Iterable[Any], where: str, path: tuple[Any, ...], levels: int
    ) -> list[Any]:
        """Return the JSON forms of `values` in their order; `node` describes the parameters."""
        return [
            self.node(item, f"{where}[{i}]", (*path, i), levels) for i, item in enumerate(values)
        ]

    def container(self, value: Any, where: str, path: tuple[Any, ...], levels: int) -> Any:
        """Return the JSON form of a dict, list, tuple, set or deque; None for a subclass.

        `node` describes the parameters.
        """
        cls = type(value)
        if cls in DICTS.values():
            return self.mapping(value, where, path, levels)
        if cls in (set, frozenset):
            return self.set(value, where, path, levels)
        if cls is deque:
            items = self.items(value, where, path, levels)
            return {"$": "deque", "items": items, "maxlen": value.maxlen}
        if cls is tuple:
            return {"$": "tuple", "items": self.items(value, where, path, levels)}
        return self.items(value, where, path, levels) if cls is list else None

    def set(self, value: Any, where: str, path: tuple[Any, ...], levels: int) -> Any:
        """Return the JSON form of a set or frozenset, which is the same for equal ones.

        `node` describes the parameters. Raises TypeError for an item that would be restored as a
        value that no set can have.
        """
        items = self.items(value, where, path, levels)
        for item, node in zip(value, items, strict=True):
            if not _is_hashable(node):
                raise TypeError(
                    f"{where} is a {type(value).__name__} with a {type(item).__qualname__}: sets "
                    "may have numbers, str, bytes and tuples of these; use a list"
                )
        if leaves_of(items):  # whose keys depend on the order
            ordered = sorted(value, key=lambda item: _order_of(item, where))
            items = self.items(ordered, where, path, levels)
        return {"$": type(value).__name__, "items": sorted(items, key=json.dumps)}

    def mapping(self, value: dict[Any, Any], where: str, path: tuple[Any, ...], levels: int) -> Any:
        """Return the JSON form of a dict: an object if all keys are str, else a list of pairs.

        A key ``"$"`` would be taken for the mark of a kind, so it needs pairs too. `node` describes
        the parameters. Raises TypeError or ValueError as `key`.
        """
        kind = type(value).__name__
        pairs = []
        for key, inner in value.items():
            key_form = self.key(key, where, path)
            node = self.node(inner, f"{where}[{key!r}]", (*path, key), levels)
            pairs.append([key_form, node])
        is_text = all(isinstance(key, str) and key != "$" for key, _ in pairs)
        if kind == "dict" and is_text and not (self.sorts and pairs != sorted(pairs, key=_first)):
            return dict(pairs)
        form: dict[str, Any] = {"$": "dict", "class": kind, "items": pairs}
        if isinstance(value, defaultdict) and (factory := value.default_factory) is not None:
            form["factory"] = name = getattr(factory, "__name__", "")
            if _FACTORIES.get(name) is not factory:
                raise TypeError(
                    f"{where} is a defaultdict whose default_factory {factory!r} cannot be stored "
                    f"without pickle: use one of {', '.join(_FACTORIES)}, or store a dict"
                )
        if attributes := getattr(value, "__dict__", None):
            # such as the versions of modules in a state_dict() of torch
            where, path = f"{where}.__dict__", (*path, ...)
            form["attributes"] = self.node(attributes, where, path, levels)
        return form

    def name_of(self, path: tuple[Any, ...]) -> str:
        """Return the name by which a save can exclude the value at a path, or ""."""
        return ".".join(map(str, (self.name, *path))) if self.name else ""

    def key(self, key: Any, where: str, path: tuple[Any, ...]) -> Any:
        """Return the JSON form of a dict's key; `where`, `path`: of the dict.

        Raises TypeError for a key that is not None, bool, a number, str, bytes or a tuple of these,
        ValueError for NaN.
        """
        if type(key) is str:
            check_text(key, where)
        if key is None or type(key) in (bool, int, str):
            return key
        self.is_newer = True
        if type(key) is bytes:
            return {"$": "bytes", "hex": key.hex()}
        if type(key) is tuple:
            return {"$": "tuple", "items": [self.key(each, where, path) for each in key]}
        if type(key) is not float:
            raise TypeError(
                f"{where} has the key {shorten(repr(key), 40)} of type {type(key).__name__}: keys "
                "of nested dicts must be str, bytes, int, float, None or tuples of these"
                f"{exclude_remedy(self.name_of(path))}"
            )
        if math.isnan(key):
            raise ValueError(
                f"{where} has the key nan, which equals no key, so no lookup finds it after a "
                "load: use None instead"
            )
        return key if math.isfinite(key) else {"$": "float", "value": str(key)}

    def record(self, value: Any, where: str, path: tuple[Any, ...], levels: int) -> Any:
        """Return the JSON form of a named tuple or dataclass, whose fields must be plain values.

        `node` describes the parameters. Raises TypeError for one with other attributes, or without
        some of its fields: these would be lost.
        """
        cls = type(value)
        names, inner = field_names(value), dict(children(value) or ())
        other = {*inner, *getattr(value, "__dict__", ())} ^ {*(names or ())}
        if other or not self.records:
            problem = (
                f"has other attributes than its fields ({min(other)})"
                if other
                else ("would be loaded as a tuple or dict")
            )
            raise UnstorableError(
                f"{where} is a {full_name(cls)}, which {problem}: store a dict of its values"
            )
        self.is_newer, exact, self.exact = True, self.exact, True
        fields = [
            [name, self.node(each, f"{where}.{name}", (*path, name), levels)]
            for name, each in inner.items()
        ]
        self.exact = exact
        form = "tuple" if isinstance(value, tuple) else "dataclass"
        node = {"$": "record", "form": form, "module": cls.__module__, "class": cls.__qualname__}
        return {**node, "fields": fields}

    def wrapper(self, value: Any, where: str, path: tuple[Any, ...], levels: int) -> Any:
        """Return the JSON form of a tensor that torch's protocol divides into plain tensors.

        `node` describes the parameters.
        """
        cls, meta = type(value), value.__tensor_flatten__()[1]
        self.is_newer, exact, self.exact = True, self.exact, True
        parts = {
            name: self.node(part.detach(), f"{where}.{name}", (*path, name), levels)
            for name, part in children(value) or ()
        }
        form = {"meta": self.node(meta, f"{where}.meta", (*path, ...), levels), "parts": parts}
        self.exact = exact
        names = {"$": "wrapper", "module": cls.__module__, "class": cls.__qualname__}
        return {**names, "size": [*value.size()], "stride": [*value.stride()], **form}

    def object(self, value: Any, where: str, path: tuple[Any, ...], levels: int) -> Any:
        """Return the JSON form of a generator or an object with ``state_dict()``.

        `node` describes the parameters. Raises TypeError for other values, and if ``state_dict()``
        fails.
        """
        library = library_of(value)
        if library is not None:
            own_state = _result(lambda: state_of(value, library), value, "state", where)
            with self.all_included():
                state = self.node(own_state, where, path, levels)
                form = {"$": "generator", "library": library, "state": state}
                seeds = seeds_of(value, library)
                if seeds is not None:
                    form["seeds"] = self.node(seeds, where, (*path, ...), levels)
            return form
        method = method_of(value, "state_dict")
        if method is None:
            cls = type(value)
            if not isinstance(value, CONTAINERS) and is_coreml_state(value):
                raise TypeError(
                    f"{where} is a {cls.__module__}.{cls.__qualname__}, which does not list its "
                    "names: pass its mlstate.coreml.StateManager, or its arrays, such as "
                    "{name: state.read_state(name) for name in state_specs(package)}"
                )
            base = next((each.__name__ for each in CONTAINERS if isinstance(value, each)), "")
            remedy = f"pass {base}() of it, or " if base else ""
            raise TypeError(
                f"{where} is a {cls.__module__}.{cls.__qualname__}, which cannot be stored "
                f"without pickle: {remedy}give numbers, str, bytes, arrays, random generators, "
                "objects with state_dict(), or lists, tuples, sets and dicts of these"
            )
        refuse_divided(value, where)
        state = _result(method, value, "state_dict()", where)
        exact, self.exact = self.exact, True
        node = self.node(state, where, path, levels)
        self.exact = exact
        return {"$": "object", "state": node}


def _plain_node(value: Any, where: str) -> Any:
    """Return the JSON form of None, a bool, number or str; `where`: path of the value."""
    if type(value) is str:
        check_text(value, where)
    if type(value) is int and value.bit_length() > _MOST_BITS:
        return {"$": "int", "value": hex(value)}
    if type(value) is float and not math.isfinite(value):
        return {"$": "float", "value": str(value)}
    return value


def _first(pair: list[Any]) -> Any:
    return pair[0]


def _order_of(item: Any, where: str) -> bytes:
    """Return a key to sort the items of a set, different for different items.

    `where`: name of the set, for errors.
    """
    if type(item) is bytes:
        return b"bytes" + item
    if isinstance(item, np.generic):
        return b"scalar" + name_of(item.dtype).encode() + item.tobytes()
    return b"value" + bytes(packed(encode(item, where), where))


def _result(read: Callable[[], Any], value: object, name: str, where: str) -> Any:
    """Return the result of `read`, which returns the state of `value`.

    `name`, `where`: of the state and the value, for the TypeError if it fails.
    """
    try:
        return read()
    except Exception as error:
        text = f"{type(value).__name__}.{name} raised {type(error).__name__}: {error}"
        raise TypeError(f"{where}: {text}") from error


def method_of(value: object, name: str) -> Any:
    """Return an object's method; None for other values.

    A class is not an object here. Items that a dict shows as attributes are not methods.
    """
    if isinstance(value, type) or (isinstance(value, dict) and not hasattr(type(value), name)):
        return None
    method = getattr(value, name, None)
    return method if callable(method) else None


def is_coreml_state(value: object) -> bool:
    """Return whether a value is a state of Core ML, whose names only its model lists."""
    return all(callable(getattr(value, each, None)) for each in ("read_state", "write_state"))


def _named_node(value: Any, where: str) -> dict[str, Any] | None:
    """Return the JSON form of a dtype or Size of torch, a path or an enum's member, or None."""
    cls = type(value)
    name = str(value) if cls.__name__ == "dtype" else ""
    if name.startswith("torch."):
        return {"$": "dtype", "name": name[len("torch.") :]}
    if (cls.__module__, cls.__name__) == ("torch", "Size"):
        return {"$": "size", "items": list(value)}
    return path_node(value) or enum_node(value, where)


def _is_hashable(node: Any) -> bool:
    """Return whether the value of a JSON form can be in a set."""
    if not isinstance(node, dict):
        return not isinstance(node, list)
    kind = node.get("$")
    if kind in ("tuple", "frozenset"):
        return all(map(_is_hashable, node["items"]))
    hashable = ("bytes", "BytesIO", "float", "int", "complex", "path", "enum", "dtype", "size")
    return kind in hashable or node.get("form") == "scalar"


def encode(
    value: Any,
    where: str,
    *,
    exact: bool = False,
    records: bool = True,
    name: str = "",
    excluded: Excluded = NONE_EXCLUDED,
    sorts: bool = False,
    ranks: int = 0,
) -> Tree:
    """Convert a nested value to JSON and arrays, which are not copied.

    `where`: name of the value, at the start of paths in errors. `exact`: raise UnstorableError for
    values that would be decoded with another type, such as subclasses. `records`: accept records,
    whose classes a load finds in its target. `name`: of the value, by which a save can exclude it,
    or "". `excluded`: what to leave out. `sorts`: the caller sorts the keys of the JSON objects.
    `ranks`: number of those that save, each its own tree; 0: the tree is the same on all.
    """
    encoder = _Encoder(exact, records, name, excluded, sorts, ranks)
    node = encoder.node(value, where, (), DEEPEST)
    text = json.dumps(node, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return Tree(text.encode(), encoder.arrays, encoder.is_newer)


# ---- one array of bytes, for a tree that differs between ranks ----


def whole_arrays(tree: Tree) -> dict[str, NDArray]:
    """Return a tree's arrays by key, in C and native byte order and main memory, without shards.

    Tensors of a device are replaced in the tree by copies in main memory, so that they move once.
    """
    arrays = {}
    for key, value in tree.arrays.items():
        if isinstance(value, Shard):
            continue
        array = value
        if is_torch(value):
            tree.arrays[key] = array = value.cpu()
            array = backend_of(array, TensorBackend).arrays_of({key: array})[key]
        native = np.asarray(array).astype(array.dtype.newbyteorder("="), copy=False)
        arrays[key] = np.ascontiguousarray(native).reshape(np.shape(array))
    return arrays


def pack_header(tree: Tree, arrays: Mapping[str, NDArray]) -> bytes:
    """Return the start of a packed tree: its length in 8 bytes, and JSON.

    The JSON has the tree's text, and key, dtype and shape of each of the `arrays`.
    """
    facts = [[key, name_of(each.dtype), list(each.shape)] for key, each in arrays.items()]
    header = json.dumps({"arrays": facts, "tree": tree.text.decode()}, ensure_ascii=False).encode()
    return len(header).to_bytes(_HEADER, "little") + header


def pack(tree: Tree, nbytes: int) -> NDArray:
    """Return the whole arrays of a tree and its text as `nbytes` bytes, filled up with zeros.

    `nbytes` is at least what they need: ranks pack to the size of the largest, as rows of one
    array. Shards are stored apart.
    """
    arrays = whole_arrays(tree)
    header = pack_header(tree, arrays)
    packed = np.zeros(nbytes, np.uint8)
    at = len(header)
    packed[:at] = np.frombuffer(header, np.uint8)
    for array in arrays.values():
        packed[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        at += array.nbytes
    return packed


def unpack(packed: NDArray, where: str) -> tuple[Any, dict[str, NDArray]]:
    """Return the JSON form and the arrays of a packed tree.

    `packed`: a uint8 array from `pack`. `where`: name of the value in the FormatError for malformed
    bytes.
    """
    try:
        at = _HEADER + int.from_bytes(packed[:_HEADER].tobytes(), "little")
        header = json.loads(packed[_HEADER:at].tobytes())
        arrays = {}
        for key, dtype, shape in header["arrays"]:
            array = np.empty(shape, numpy_dtype(dtype))
            array.reshape(-1).view(np.uint8)[...] = packed[at : at + array.nbytes]
            arrays[key] = array
            at += array.nbytes
        node = parse(header["tree"].encode(), where)
        leaves_of(node)
        return node, arrays
    except (AttributeError, ImportError, LookupError, RecursionError, TypeError, ValueError) as e:
        raise malformed(where, e) from None


def packed(tree: Tree, where: str) -> NDArray:
    """Return a nested value as a uint8 array, for `unpacked`.

    `where`: name of the value in the TypeError for a DTensor in it.
    """
    if any(isinstance(array, Shard) for array in tree.arrays.values()):
        raise TypeError(f"{where} contains a part of a tensor: store only whole tensors in it")
    arrays = whole_arrays(tree)
    nbytes = len(pack_header(tree, arrays)) + sum(array.nbytes for array in arrays.values())
    return pack(tree, nbytes)


# ---- from JSON ----


def leaves_of(node: Any) -> list[Leaf]:
    """Return the arrays that the JSON form `node` refers to, in its order."""
    leaves: list[Leaf] = []
    # a path is None, or a pair of the path before and a key: few are needed as a tuple
    stack: list[tuple[Any, Any]] = [(None, node)]
    while stack:
        path, current = stack.pop()
        if isinstance(current, list):
            pairs: Iterable[Any] = enumerate(current)
        elif not isinstance(current, dict):
            continue
        elif (kind := current.get("$")) in ("array", "bytes", "bytearray", "BytesIO"):
            form = str(current.get("form", kind))
            sharded = current.get("sharded") is not None
            keys = _keys_of(path) if sharded else ()
            leaves.append(Leaf(str(current["key"]), form, sharded, keys))
            continue
        elif kind is None:
            pairs = current.items()
        elif kind == "record":
            pairs = current["fields"]
        elif kind == "dict":
            stack.append(((path, ...), current.get("attributes")))
            pairs = [(key_of(key), each) for key, each in current["items"]]
        else:
            stack += reversed([(path, inner) for inner in current.values()])
            continue
        inner_nodes = [((path, key), each) for key, each in pairs if isinstance(each, dict | list)]
        inner_nodes.reverse()
        stack += inner_nodes
    return leaves


def _keys_of(path: Any) -> tuple[Any, ...]:
    """Return a path of pairs, as in `leaves_of`, as a tuple of keys."""
    keys = []
    while path is not None:
        path, key = path
        keys.append(key)
    return tuple(reversed(keys))


def key_of(form: Any) -> Any:
    """Return the key of a dict from its JSON form; raise KeyError for an unknown one."""
    if not isinstance(form, dict):
        return form
    if form["$"] == "tuple":
        return tuple(map(key_of, form["items"]))
    if form["$"] == "bytes":
        return bytes.fromhex(form["hex"])
    return {"float": float}[form["$"]](form["value"])


class Decoder:
    """Makes values from a JSON form, with arrays by key.

    `tensor_of` converts an array that was saved from a torch tensor; None leaves it a NumPy array.
    `target` returns the value that the result replaces: its records have the classes. None: the
    load has no target, and records become tuples and dicts.
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        tensor_of: Callable[[Any], Any] | None = None,
        target: Callable[[], Any] | None = None,
    ) -> None:
        """Create a decoder; the class describes the parameters."""
        self.arrays = arrays
        self.tensor_of = tensor_of
        self.target = target
        self.classes: dict[str, type] | None = None  # of the target's records, once needed

    def value(self, node: Any) -> Any:
        """Return the value of a JSON form, `node`, built from the arrays.

        Raises KeyError and other errors of lookups for a malformed form.
        """
        if isinstance(node, list):
            return [self.value(item) for item in node]
        if not isinstance(node, dict):
            return node
        kind = node.get("$")
        if kind is None:
            return {key: self.value(inner) for key, inner in node.items()}
        if kind == "array":
            return self.array(node)
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray)(self.arrays[node["key"]].tobytes())
        if kind == "dict":
            return self.mapping(node)
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([self.value(item) for item in node["items"]])
        return self.special(kind, node)

    def array(self, node: dict[str, Any]) -> Any:
        """Return the array of the JSON form `node` in its saved form: scalar, tensor or array."""
        array = self.arrays[node["key"]]
        if node["form"] == "scalar":
            return array[()]
        if node["form"] == "torch" and self.tensor_of is not None:
            array = self.tensor_of(array)
        if "order" not in node:
            return array
        if sorted(node["order"]) != [*range(array.ndim)]:
            raise ValueError(f"{node['order']} does not order {array.ndim} dimensions")
        return with_order(array, node["order"])

    def mapping(self, node: dict[str, Any]) -> Any:
        """Return the dict of the JSON form `node`, which lists its items."""
        pairs = {key_of(key): self.value(inner) for key, inner in node["items"]}
        cls = DICTS[node["class"]]
        if cls is defaultdict:
            factory = node.get("factory")
            return defaultdict(None if factory is None else _FACTORIES[factory], pairs)
        value = cls(pairs)
        if "attributes" in node:
            vars(value).update(self.value(node["attributes"]))
        return value

    def record(self, node: dict[str, Any]) -> Any:
        """Return the record of the JSON form `node`; without a target, a tuple or a dict."""
        fields = {name: self.value(inner) for name, inner in node["fields"]}
        if self.target is None:
            return tuple(fields.values()) if node["form"] == "tuple" else fields
        return record_of(node, fields, self.known_classes())

    def wrapper(self, node: dict[str, Any]) -> Any:
        """Return the tensor of the JSON form `node`; its parts if arrays are NumPy's."""
        parts = {name: self.value(part) for name, part in node["parts"].items()}
        if self.tensor_of is None:
            return parts
        cls = class_named(node, self.known_classes())
        return new_wrapper(cls, parts, self.value(node["meta"]), node["size"], node["stride"])

    def known_classes(self) -> dict[str, type]:
        """Return the classes that the result may have: of the target, and torch's safe ones."""
        if self.classes is None:
            self.classes = known_classes(None if self.target is None else self.target())
        return self.classes

    def special(self, kind: str, node: dict[str, Any]) -> Any:
        """Return the value of the JSON form `node` of the kind `kind`; raise KeyError if unknown.

        These are all kinds that `value` does not handle.
        """
        if kind == "BytesIO":
            file = BytesIO(self.arrays[node["key"]].tobytes())
            file.seek(node["position"])
            return file
        if kind == "deque":
            return deque((self.value(item) for item in node["items"]), node["maxlen"])
        methods = {"record": self.record, "wrapper": self.wrapper}
        if kind in methods:
            return methods[kind](node)
        if kind == "excluded":
            return EXCLUDED
        if kind == "float":
            return float(node["value"])
        if kind == "int":
            return int(node["value"], 16)
        if kind == "complex":
            return complex(*(self.value(part) for part in node["parts"]))
        if kind == "path":
            return path_of(node)
        if kind == "enum":
            return enum_of(node)
        if kind == "state":
            return restore_kind(self.value(node["values"]), node["kind"], None)
        if kind == "size":
            return torch_backend("sizes of torch", TensorBackend).size_of(node["items"])
        if kind == "dtype":
            return torch_backend("a dtype of torch", TensorBackend).dtype_of(node["name"])
        if kind == "cache":
            from ...kv._stored import cache_from_values

            return cache_from_values(node["class"], self.value(node["values"]))
        if kind == "object":
            return self.value(node["state"])
        if kind == "generator":
            return restored(self.value(node["state"]), node["library"])
        raise KeyError(kind)


def decode(
    node: Any,
    arrays: Mapping[str, Any],
    where: str,
    tensor_of: Callable[[Any], Any] | None = None,
    target: Callable[[], Any] | None = None,
) -> Any:
    """Return the value of a JSON form with its arrays; `Decoder` describes the other parameters.

    `where`: name of the value in the FormatError for a malformed form. Raises CompatibilityError if
    the target lacks the class of a record.
    """
    try:
        return Decoder(arrays, tensor_of, target).value(node)
    except UnknownRecordError as error:
        raise CompatibilityError(f"{where}: {error}", name=where) from None
    except MALFORMED as error:
        raise malformed(where, error) from None


def unpacked(array: NDArray, where: str, *convert: Any) -> Any:
    """Return the value of `packed` bytes; `convert`: the last parameters of `decode`."""
    return decode(*unpack(array, where), where, *convert)


def value_of_form(form: Any, where: str, *convert: Any) -> Any:
    """Return the value of a form in an optimizer's group, which has its arrays in base64.

    `where` and `convert`: as for `decode`, which describes the errors.
    """
    import base64

    try:
        arrays = {
            key: np.frombuffer(base64.b64decode(data), numpy_dtype(dtype)).reshape(shape).copy()
            for key, (dtype, shape, data) in form.get("arrays", {}).items()
        }
        node = form["value"]
    except MALFORMED as error:
        raise malformed(where, error) from None
    return decode(node, arrays, where, *convert)


def parse(text: bytes, where: str) -> Any:
    """Return the JSON form in `text`; raise FormatError if it is not JSON or nested too deeply."""
    try:
        node, end = _raw_decode(characters := text.decode().strip(" \n\r\t"))
        return node if end == len(characters) else json.loads(text)
    except (RecursionError, ValueError) as reason:
        raise malformed(where, reason) from None


def malformed(where: str, reason: object) -> FormatError:
    """Return the FormatError for a text that does not describe a nested value.

    `where`: name of the value.
    """
    return FormatError(f"{where}: the stored text does not describe a value: {reason}", name=where)
