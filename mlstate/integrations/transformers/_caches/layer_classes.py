"""Classes of transformers' caches and layers that are known, and their attributes, checked.

The attributes are private to transformers. Those of 5.23 and 5.24 are known; an object with other
attributes is refused.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...._common.arrays import is_torch
from ...._common.changes import exchange
from ....kv._arguments import incompatible
from .whole_layers import emptied, new_like

if TYPE_CHECKING:
    from ....errors import CompatibilityError

Attention = Literal["", "dynamic", "static", "fp8"]


class LayerClass(NamedTuple):
    """A class of layers, and the tensors that these have."""

    name: str
    attention: Attention  # how keys and values are stored; "": the layer has none
    is_sliding: bool = False
    has_indexer: bool = False  # the keys of a sparse attention's indexer
    is_linear: bool = False  # states of convolutions and of a linear attention
    is_whole: bool = False  # of an unknown class: stored as one array

    @property
    def has_tokens(self) -> bool:
        """Whether a layer has tokens after a prompt, unless it uses those of another one."""
        return bool(self.attention or self.is_linear or self.is_whole)


_CLASSES = (
    LayerClass("DynamicLayer", "dynamic"),
    LayerClass("DynamicSlidingWindowLayer", "dynamic", is_sliding=True),
    LayerClass("DynamicIndexedLayer", "dynamic", has_indexer=True),
    LayerClass("StaticLayer", "static"),
    LayerClass("StaticSlidingWindowLayer", "static", is_sliding=True),
    LayerClass("StaticIndexedLayer", "static", has_indexer=True),
    LayerClass("Fp8QuantizedLayer", "fp8"),
    LayerClass("LinearAttentionLayer", "", is_linear=True),
    LayerClass("LinearAttentionAndFullAttentionLayer", "dynamic", is_linear=True),
    LayerClass(
        "LinearAttentionAndSlidingWindowAttentionLayer", "dynamic", is_sliding=True, is_linear=True
    ),
    LayerClass("LinearAttentionAndStaticFullAttentionLayer", "static", is_linear=True),
    LayerClass(
        "LinearAttentionAndStaticSlidingWindowAttentionLayer",
        "static",
        is_sliding=True,
        is_linear=True,
    ),
    LayerClass("DummyLayer", ""),
)
WHOLE = LayerClass("", "", is_whole=True)
_CACHES = ("Cache", "DynamicCache", "StaticCache", "QuantizedCache", "EncoderDecoderCache")


class Layout(NamedTuple):
    """The facts that `to_cache` needs to create a layer like one that `from_cache` was given."""

    class_name: str
    options: dict[str, int]  # of the constructor
    prototype: Any = None  # of an unknown class: see `new_like`


@cache
def _layer_classes() -> dict[type, LayerClass]:
    """Return the descriptions of layers by class, for the classes that this transformers has."""
    from transformers import cache_utils

    classes = ((getattr(cache_utils, each.name, None), each) for each in _CLASSES)
    return {cls: each for cls, each in classes if isinstance(cls, type)}


@cache
def _cache_classes() -> tuple[type, ...]:
    """Return the known classes of caches that this transformers has."""
    from transformers import cache_utils

    return tuple(getattr(cache_utils, name) for name in _CACHES if hasattr(cache_utils, name))


def new_layer(layout: Layout, **options: int) -> Any:
    """Create a layer without tensors, of a layout's class.

    `options`: arguments of the constructor, which replace the layout's.
    """
    from transformers import cache_utils

    if layout.prototype is not None:
        return new_like(layout.prototype)
    return getattr(cache_utils, layout.class_name)(**{**layout.options, **options})


def added_class(cache: object) -> str | None:
    """Return the name of the class of layers that a cache adds when it is used; None: it adds none.

    Only a cache without the config of a model adds layers.
    """
    cls = getattr(cache, "layer_class_to_replicate", None)
    return cls.__name__ if cls in _layer_classes() else None


def new_cache(layout: Layout, layers: list[Any], added: str | None) -> Any:
    """Create a cache of `layers`, of a layout's class, without the config of a model.

    The class's own constructor is not called: it would create the layers from the config. `added`:
    see `added_class`.
    """
    from transformers import cache_utils

    if layout.prototype is None:
        new = object.__new__(getattr(cache_utils, layout.class_name))
    else:
        new = new_like(layout.prototype)
    if not isinstance(new, cache_utils.Cache):
        return new
    cache_utils.Cache.__init__(new, layers=layers)
    if added is not None:
        new.layer_class_to_replicate = getattr(cache_utils, added)
    return new


def check_cache(cache: Any, label: str, *, is_known: bool = False) -> None:
    """Raise unless `cache` is a cache of transformers that is not offloaded, or a list of tensors.

    `label`: name of the argument, for errors. `is_known`: the class must be known too. Raises
    TypeError or CompatibilityError.
    """
    from transformers.cache_utils import Cache

    name = type(cache).__name__
    is_of_model = type(cache).__module__.startswith("transformers.models.")
    is_tensors = type(cache) is list and bool(cache) and all(map(is_torch, cache))
    if not (isinstance(cache, Cache) or is_of_model or is_tensors):
        raise TypeError(f"{label} must be a Cache of transformers, got {name}")
    if is_known and not has_known_class(cache):
        text = f"{label} is a {name}, and the additions of this class are unknown"
        raise incompatible(text, None, ", ".join(_CACHES), name)
    if getattr(cache, "offloading", False):
        text = f"{label} offloads its layers: their tensors are being moved between devices"
        raise incompatible(text, None, "offloading=False", "offloading=True")


def has_known_class(cache: object) -> bool:
    """Return whether a cache is of one of transformers' own classes: it is its layers."""
    return type(cache) in _cache_classes()


def layer_class(layer: object, where: str) -> LayerClass:
    """Return the description of a layer's class, also of an unknown one.

    A subclass of a known class is not known. Raises CompatibilityError for objects that may keep
    values elsewhere than in their attributes. `where`: place of the layer in the cache, such as
    "3", for errors.
    """
    description = _layer_classes().get(type(layer))
    if description is not None:
        return description
    name = type(layer).__name__
    if not hasattr(layer, "__dict__") or any(vars(c).get("__slots__") for c in type(layer).__mro__):
        text = f"layer {where} is a {name}, which is an unknown class without attributes"
        raise incompatible(text, where, ", ".join(each.name for each in _CLASSES), name)
    return WHOLE._replace(name=name)


def empty_layers(layers: list[tuple[Any, LayerClass]], *, keep: bool = False) -> None:
    """Remove the tokens of layers, all together.

    A linear layer gets new states at its next token; with `keep` it keeps its tensors, and all
    tensors are zeroed. Counters that are tensors keep their addresses.
    """
    import torch

    whole = [layer for layer, cls in layers if cls.is_whole]
    exchange(partial(vars(layer).update, emptied(layer)) for layer in whole)
    layers = [pair for pair in layers if not pair[1].is_whole]
    before = [dict(vars(layer)) for layer, _ in layers]  # frees no tensor between two layers
    classes = [cls for _, cls in layers]
    empty = [_empty_attributes(*pair) for pair in zip(before, classes, strict=True)]
    counters = [
        values[name]
        for values in before
        for name in ("cumulative_length", "indexer_cumulative_length")
        if isinstance(values.get(name), torch.Tensor)
    ]
    with torch.inference_mode():  # also for counters that were created in it
        exchange(
            [
                *(partial(vars(layer).update, empty[i]) for i, (layer, _) in enumerate(layers)),
                *(partial(counter.fill_, 0) for counter in counters),
            ]
        )
        if not keep:
            return
        for values, cls in zip(before, classes, strict=True):
            states = (values.get(name, {}).values() for name in ("conv_states", "recurrent_states"))
            names = ("keys", "values", "indexer_keys") if cls.attention == "static" else ()
            for tensor in (*(values.get(name) for name in names), *chain(*states)):
                if tensor is not None:
                    tensor.zero_()
    marks = [{name: values[name] for name in _MARKS if name in values} for values in before]
    exchange(partial(vars(layer).update, marks[i]) for i, (layer, _) in enumerate(layers))


_MARKS = ("is_conv_states_initialized", "is_recurrent_states_initialized")


def _empty_attributes(values: dict[str, Any], cls: LayerClass) -> dict[str, Any]:
    """Return the attributes of a layer without tokens that differ from those of one with `values`.

    A static layer keeps its tensors.
    """
    numbers = ("cumulative_length", "cumulative_length_int")
    empty: dict[str, Any] = {name: 0 for name in numbers if type(values.get(name)) is int}
    names = ["indexer_position_ids"] if cls.has_indexer else []
    if cls.attention != "static":
        names += ["keys", "values", "_quantized_keys", "_quantized_values", "indexer_keys"]
        flags = ("is_initialized", "is_indexer_initialized") if cls.attention else ()
        empty |= {name: False for name in flags if name in values}
    empty |= {name: None for name in names if name in values}
    if cls.is_linear:
        empty |= {n: dict.fromkeys(values[n], False) for n in (*_MARKS, "has_previous_state")}
    return empty


def unknown_layout(layer: object, where: str, attribute: str, text: str) -> CompatibilityError:
    """Return the error for a layer's attribute that is not as in known versions.

    `where`: place of the layer, such as "3". `text`: how the attribute differs.
    """
    import transformers

    got = f"transformers {transformers.__version__}"
    return incompatible(
        f"layer {where}: {type(layer).__name__}.{attribute} {text}: the layout of {got} is unknown",
        where,
        "the layout of transformers 5.23 or 5.24",
        got,
    )


def tensor_of(layer: object, where: str, attribute: str, rank: int | None = None) -> Any:
    """Return the tensor in a layer's `attribute`, which must have `rank` axes (None: any number).

    `where`: place of the layer in the cache, for errors. Raises CompatibilityError for another
    object or another rank.
    """
    return checked_tensor(getattr(layer, attribute, None), layer, where, attribute, rank)


def checked_tensor(
    value: Any, layer: object, where: str, attribute: str, rank: int | None = None
) -> Any:
    """Return `value`, a layer's `attribute`, if it is a tensor with `rank` axes (None: any number).

    Else raise CompatibilityError. `where`: place of the layer in the cache, for errors.
    """
    from torch import Tensor

    if not isinstance(value, Tensor):
        raise unknown_layout(layer, where, attribute, f"is {_kind(value)}, not a tensor")
    if rank is not None and value.ndim != rank:
        shape = tuple(value.shape)
        raise unknown_layout(layer, where, attribute, f"has shape {shape}, not {rank} axes")
    return value


def value_of(layer: object, where: str, attribute: str, kind: type) -> Any:
    """Return an attribute of a layer, or raise CompatibilityError unless its type is `kind`."""
    value = getattr(layer, attribute, None)
    if type(value) is not kind:
        raise unknown_layout(layer, where, attribute, f"is {_kind(value)}, not {kind.__name__}")
    return value


def state_of(layer: object, where: str, attribute: str, number: int) -> Any:
    """Return the value for state `number` from `attribute`, a dict of a linear attention layer.

    `where`: place of the layer in the cache, for errors. Raises CompatibilityError if the attribute
    is not a dict, or lacks the number.
    """
    values = value_of(layer, where, attribute, dict)
    if number not in values:
        raise unknown_layout(layer, where, attribute, f"has no state {number}")
    return values[number]


def _kind(value: object) -> str:
    return "absent" if value is None else f"{type(value).__name__}"
