"""Attributes of live layers of mlx-lm, read and set; errors for unknown classes and versions."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ...kv._arguments import incompatible
from ...kv._packed_object import PART, class_name, map_leaves, pack
from .._caches import is_unwritten
from ._arrays import make_array, view_array
from ._layer_values import CLASSES, FieldKind, LayerClass, LayerValues, find_problem
from ._prompt_file import GENERATIONS, MOST_DEPTH

if TYPE_CHECKING:
    from ...errors import CompatibilityError


def _import_classes() -> Any:
    """Return mlx-lm's module of layer classes; raise ImportError with a remedy if it is absent."""
    try:
        from mlx_lm.models import cache as classes
    except ImportError as error:
        text = "prompt caches of mlx-lm need it: pip install 'mlstate[mlx]'"
        raise ImportError(text, name=error.name) from error
    return classes


@cache
def _layer_classes() -> dict[type, LayerClass]:
    """Return the descriptions of layers by class, for the classes that this mlx-lm has."""
    module = _import_classes()
    classes = ((getattr(module, name, None), cls) for name, cls in CLASSES.items())
    return {layer: cls for layer, cls in classes if isinstance(layer, type)}


def installed_generation() -> str:
    """Return the generation of files that the installed mlx-lm reads."""
    # layers of 0.32 have no meta_state: their state contains the numbers
    return GENERATIONS[0 if hasattr(_import_classes().KVCache, "meta_state") else 1]


def check_cache(cache: object, label: str) -> None:
    """Raise TypeError unless `cache` is a list or tuple; `label`: its name in the error."""
    if not isinstance(cache, list | tuple):
        raise TypeError(
            f"{label} must be a list of layers, as make_prompt_cache of mlx-lm returns it, got "
            f"{type(cache).__name__}"
        )


def unknown_layout(layer: object, where: str, attribute: str, text: str) -> CompatibilityError:
    """Return the exception for an attribute that no known version of mlx-lm has like this.

    `where`: place of the layer. `text`: how the attribute differs, such as "is absent".
    """
    from importlib.metadata import version

    got = f"mlx-lm {version('mlx-lm')}"
    text = f"layer {where}: {type(layer).__name__}.{attribute} {text}"
    return incompatible(
        f"{text}: the layout of {got} is unknown", where, "the layout of mlx-lm 0.31 or 0.32", got
    )


def class_of(layer: object, where: str) -> LayerClass:
    """Return the description of a layer's class; raise CompatibilityError if it has no attributes.

    The description of an unknown class has no fields.
    """
    cls = _layer_classes().get(type(layer))
    if cls is None and hasattr(type(layer), "state") and hasattr(layer, "__dict__"):
        return LayerClass(type(layer).__name__, {}, unknown=type(layer))
    if cls is None:
        name = type(layer).__name__
        text = f"layer {where} is a {name}, which is an unknown class"
        raise incompatible(text, where, ", ".join(CLASSES), name)
    return cls


def read_layer(layer: Any, where: str, depth: int = 0) -> LayerValues:
    """Return the values of a layer: arrays as views, vectors as copies.

    `where`: its place, such as "3.1". `depth`: number of CacheLists that contain it. Raises
    CompatibilityError for unknown classes or values, and for a batch before ``finalize``.
    """
    cls = class_of(layer, where)
    if cls.name == "CacheList":
        children = getattr(layer, "caches", None)
        if not isinstance(children, list | tuple):
            raise unknown_layout(layer, where, "caches", "is not a list of layers")
        if depth == MOST_DEPTH:
            text = f"layer {where} has lists in more than {MOST_DEPTH} lists"
            raise incompatible(text, where, f"at most {MOST_DEPTH}", "more")
        parts = enumerate(children)
        return LayerValues(
            cls, {}, [read_layer(each, f"{where}.{i}", depth + 1) for i, each in parts]
        )
    if cls.unknown is not None:
        return LayerValues(cls, _read_packed(layer, where), [])
    if cls.pending is not None and getattr(layer, cls.pending, None) is not None:
        text = f"layer {where} is being filled: call finalize() of the {cls.name} first"
        raise incompatible(text, where, f"{cls.pending} is None", cls.pending)
    values = {}
    for name, kind in cls.fields.items():
        if not hasattr(layer, name):
            raise unknown_layout(layer, where, name, "is absent")
        try:
            values[name] = _read_value(getattr(layer, name), kind)
        except RuntimeError as error:
            text = f"layer {where}: mlx cannot compute {name} in this thread: call "
            text += "mx.eval([layer.state for layer in cache]) in the thread that made the arrays"
            raise RuntimeError(f"{text} ({error})") from error
    result = LayerValues(cls, values, [])
    result = result._replace(is_unwritten=is_unwritten(layer, result.tokens or 0))
    problem = find_problem(result)
    if problem is not None:
        raise unknown_layout(layer, where, *problem)
    return result


def refuse_unstored(layers: list[LayerValues], place: str = "") -> None:
    """Raise CompatibilityError for layers that a prompt file cannot hold.

    These are rings that have a slot without its token, and layers of unknown classes. `place`: of
    the layers, before their indices.
    """
    for i, layer in enumerate(layers):
        refuse_unstored(layer.children, f"{place}{i}.")
        if layer.cls.unknown is not None:
            text = f"layer {place}{i} is a {layer.cls.name}, which is an unknown class: prompt "
            text += "files hold known ones only; use from_cache, and mlstate.save or a PromptStore"
            raise incompatible(text, f"{place}{i}", ", ".join(CLASSES), layer.cls.name)
        if layer.is_unwritten and (layer.tokens or 0) >= layer.positions:
            text = f"layer {place}{i}: the slot of the oldest token is not written, and the file "
            text += "would have it as a token: feed one more token first"
            raise incompatible(text, f"{place}{i}", "tokens in all slots", "a slot without a token")


def _read_packed(layer: Any, where: str) -> dict[str, Any]:
    """Return the attributes of a layer of an unknown class as one array, and its tokens.

    The array is None if the layer has no token. Raises CompatibilityError if an attribute is not of
    arrays, numbers and texts.
    """
    import mlx.core as mx

    views: dict[int, Any] = {}

    def view(_: str, value: Any) -> Any:
        if not isinstance(value, mx.array):
            return value
        if id(value) not in views:
            views[id(value)] = view_array(value)
        return views[id(value)]

    values = map_leaves(vars(layer), view)
    if not any(array.size > 1 for array in views.values()):
        return {PART: None}
    packed = pack(values, class_name(layer), {}, f"layer {where}")
    offset = values.get("offset")
    return {PART: packed, "offset": offset if type(offset) is int else None}


def _read_value(value: Any, kind: FieldKind) -> Any:
    """Return an attribute of the kind `kind` with NumPy arrays in place of mlx arrays.

    Vectors are copied, other arrays are views.
    """
    import mlx.core as mx

    if isinstance(value, mx.array):
        return np.array(value) if kind.startswith("vector") else view_array(value)
    if kind in ("codes", "states") and isinstance(value, tuple | list):
        parts = [view_array(each) if isinstance(each, mx.array) else each for each in value]
        return tuple(parts) if kind == "codes" else parts
    return value


def new_layer(layer: LayerValues, where: str) -> Any:
    """Return a layer of mlx-lm with the values of `layer`.

    Arrays are copied, except views that `view_array` made of mlx's own. `where`: place of the
    layer, for errors. The constructor is not called, except for a CacheList.
    """
    cls: Any = layer.cls.unknown or getattr(_import_classes(), layer.cls.name)
    if layer.cls.name == "CacheList":
        parts = enumerate(layer.children)
        return cls(*(new_layer(each, f"{where}.{i}") for i, each in parts))
    instance = cls.__new__(cls)
    if layer.cls.unknown is not None:
        return instance  # it gets all of its attributes later
    values = {name: _make_value(value, f"{where}.{name}") for name, value in layer.values.items()}
    if layer.cls.pending is not None:
        values[layer.cls.pending] = None
    vars(instance).update(values)
    return instance


def _make_value(value: Any, name: str) -> Any:
    """Return a value of a layer with mlx arrays in place of NumPy's; `name`: for errors."""
    if isinstance(value, np.ndarray):
        return make_array(value, name)
    if isinstance(value, tuple | list):
        return type(value)(_make_value(each, name) for each in value)
    return value
