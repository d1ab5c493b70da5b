"""Layers and caches of unknown classes, stored whole: tensors, numbers and texts of their own.

Nothing is known of such an object but its attributes and three methods of transformers' layers:
`get_seq_length`, `reset`, and `is_compileable`. What `reset` leaves is from the constructor, so two
objects fit if they agree on it.
"""

from __future__ import annotations

import hashlib
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...._common.arrays import is_torch, overwrite
from ....kv._arguments import incompatible
from ....kv._packed_object import (
    PART,
    Kept,
    class_name,
    header_of,
    leaves_of,
    map_leaves,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CACHE = "cache"  # place of a cache's own attributes, beside its layers
NAME = f"{CACHE}.{PART}"  # of their entry


@cache
def _base_attributes() -> frozenset[str]:
    """Return the attributes that every Cache of transformers has, also one that offloads."""
    from transformers.cache_utils import Cache

    return frozenset([*vars(Cache(layers=[])), "only_non_sliding", "prefetch_stream"])


def values_of(holder: Any) -> Any:
    """Return the attributes of an object by name: of a cache, without its layers; a list itself.

    The config of a model is replaced by its digest.
    """
    if isinstance(holder, list):
        return holder
    from transformers import PreTrainedConfig
    from transformers.cache_utils import Cache

    own = _base_attributes() if isinstance(holder, Cache) else ()
    values = {name: value for name, value in vars(holder).items() if name not in own}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            text = value.to_json_string(use_diff=False)
            values[name] = Kept(hashlib.sha256(text.encode()).hexdigest())
    return values


def new_like(holder: Any, *, is_whole: bool = False) -> Any:
    """Return an object of a holder's class without attributes, except the config of a model.

    `is_whole`: with all attributes, in containers of its own; the tensors are the same.
    """
    if isinstance(holder, list):
        return list(holder) if is_whole else []
    values = {k: v for k, v in values_of(holder).items() if is_whole or type(v) is Kept}
    values = {k: vars(holder)[k] if type(v) is Kept else v for k, v in values.items()}
    return _new(holder, map_leaves(values, lambda _, value: value))


def _new(holder: Any, values: dict[str, Any]) -> Any:
    """Return an object of a holder's class with other attributes, and without layers."""
    from transformers.cache_utils import Cache

    new = object.__new__(type(holder))
    if isinstance(holder, Cache):
        Cache.__init__(new, layers=[])
    vars(new).update(values)
    return new


def read_layer(layer: Any, where: str) -> tuple[Any, int | None]:
    """Return a layer as one array of bytes, and its number of tokens; None: it counts none.

    The array is None if the layer has no token. `where`: its place. Raises CompatibilityError if an
    attribute is of a class that cannot be restored.
    """
    label = f"layer {where}"
    count = getattr(layer, "get_seq_length", None)
    try:
        tokens = None if count is None else int(count())
    except Exception as error:
        text = f"{label} is a {type(layer).__name__}, which is an unknown class, and cannot count "
        text += f"its tokens: {error!r}"
        raise incompatible(text, where, "a number of tokens", type(error).__name__) from error
    if tokens == 0 or not holds_elements(layer):
        if tokens:
            text = f"{label} is a {type(layer).__name__}, which counts {tokens} tokens without a"
            raise incompatible(f"{text} tensor that holds them", where, "tensors", "none")
        return None, None
    return read_whole(layer, label), tokens


def read_whole(holder: Any, label: str) -> Any:
    """Return an object as one array of bytes.

    `label`: its place, for errors. Raises CompatibilityError if an attribute is of a class that
    cannot be restored.
    """
    return pack(values_of(holder), class_name(holder), _constants_of(holder, label), label)


def holds_elements(holder: Any) -> bool:
    """Return whether an attribute is a tensor of several elements that are not all zero."""
    return any(map(_has_elements, leaves_of(values_of(holder)).values()))


def _is_cache(holder: Any) -> bool:
    from transformers.cache_utils import Cache

    return isinstance(holder, Cache)


def _has_elements(value: Any) -> bool:
    """Return whether a value is a tensor of several elements, and not all are zero."""
    return is_torch(value) and value.numel() > 1 and bool(value.any())


def _constants_of(holder: Any, label: str) -> dict[str, Any]:
    """Return the numbers and texts that `reset` leaves, by path; flags are left out.

    They are of the constructor. `reset` runs on a copy with tensors without data.
    """
    copy = _reset_copy(holder, label, lambda leaf: leaf.to("meta") if is_torch(leaf) else leaf)
    left = {} if copy is None else leaves_of(values_of(copy))
    digests = {path: leaf.digest for path, leaf in left.items() if type(leaf) is Kept}
    return digests | {p: leaf for p, leaf in left.items() if type(leaf) in (int, float, str)}


def _reset_copy(holder: Any, label: str, convert: Callable[[Any], Any]) -> Any:
    """Return a copy of an object after `reset`; `convert` is called with each of its values.

    None for a list, which has no such method.
    """
    if isinstance(holder, list):
        return None
    import torch

    copy = new_like(holder, is_whole=True)
    values = {name: v for name, v in values_of(holder).items() if type(v) is not Kept}
    tensors = filter(is_torch, map(convert, leaves_of(values).values()))
    is_inference = any(tensor.is_inference() for tensor in tensors)
    try:
        with torch.inference_mode(is_inference):
            vars(copy).update(map_leaves(values, lambda _, leaf: convert(leaf)))
            copy.reset()
    except Exception as error:
        name = type(holder).__name__
        text = f"{label} is a {name}, which is an unknown class, and its reset() fails: {error!r}"
        raise incompatible(text, label, "a known class, or one with reset()", name) from error
    return copy


class Planned(NamedTuple):
    """What an object gets: attributes by name, or items of a list, and calls that fill tensors."""

    values: Any
    fills: list[Callable[[], object]]


def plan_whole(holder: Any, whole: Any, where: str, label: str, *, is_new: bool) -> Planned:
    """Return what brings the content of `whole` into an object; all is checked, nothing changed.

    Tensors of a class that can be compiled keep their addresses. `is_new`: the object is from
    `new_like`. Raises CompatibilityError if the object is of another class, its constructor got
    other numbers, or its tensors have other dtypes or axes.
    """
    header, name = header_of(whole, where), class_name(holder)
    if header.class_name != name:
        text = f"{label} is a {name}, and the array is of a {header.class_name}"
        raise incompatible(text, where, header.class_name, name)
    values = unpack(whole, label)
    current = {} if is_new else values_of(holder)
    before = leaves_of(current)
    _check_tensors(before, leaves_of(values), where, label)
    fills: list[Callable[[], object]] = []
    if isinstance(holder, list):
        return Planned(list(values), fills)
    if not is_new:
        _check_constants(_constants_of(holder, label), header.constants, where, label)
    strange = current.keys() - values.keys()
    if strange:
        text = f"{label} has the attribute {min(strange)}, which the array lacks"
        raise incompatible(text, where, ", ".join(values), min(strange))
    if getattr(holder, "is_compileable", False):
        values = map_leaves(values, partial(_at_fixed_address, before, fills))
        after = leaves_of(values)
        moved = [p for p in before if _is_allocated(before[p]) and after.get(p) is not before[p]]
        if moved:
            text = f"{label}: {moved[0]} has another shape, and its address is fixed"
            raise incompatible(text, where, "the same shapes", moved[0])
    kept = {name for name, value in values_of(holder).items() if type(value) is Kept}
    return Planned({name: value for name, value in values.items() if name not in kept}, fills)


def _check_constants(
    constants: dict[str, Any], stored: dict[str, Any], where: str, label: str
) -> None:
    """Raise CompatibilityError if the constructor got another number than the stored object's."""
    for path in sorted(constants.keys() & stored.keys()):
        if constants[path] != stored[path]:
            text = f"{label} has {path}={constants[path]!r}, and the array is of one with "
            raise incompatible(f"{text}{stored[path]!r}", where, stored[path], constants[path])


def _at_fixed_address(
    before: dict[str, Any], fills: list[Callable[[], object]], path: str, new: Any
) -> Any:
    """Return the tensor that gets the elements of `new`: the one at its path, if it fits.

    A new one is marked for CUDA graphs. `fills` gets the call that writes the elements.
    """
    if not is_torch(new):
        return new
    import torch

    old: Any = before.get(path)
    if is_torch(old) and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device):
        fills.append(partial(overwrite, old, new))
        return old
    torch._dynamo.mark_static_address(new)
    return new


def _is_allocated(value: Any) -> bool:
    return is_torch(value) and value.numel() > 1


def _check_tensors(before: dict[str, Any], after: dict[str, Any], where: str, label: str) -> None:
    """Raise CompatibilityError unless tensors fit the ones that they replace.

    One axis may differ beside the first one, as the number of tokens does, but not the last one.
    """
    for path in before.keys() & after.keys():
        old, new = before[path], after[path]
        if not (_is_allocated(old) and _is_allocated(new)):
            continue
        axes = [i for i, (a, b) in enumerate(zip(old.shape, new.shape, strict=False)) if a != b]
        others = [axis for axis in axes if axis]
        is_alike = old.ndim == new.ndim and old.dtype == new.dtype and len(others) <= 1
        if not is_alike or (axes and axes[-1] == old.ndim - 1):
            got = f"{tuple(new.shape)} of {new.dtype}"
            text = f"{label}: {path} has {tuple(old.shape)} of {old.dtype}, and the array {got}"
            raise incompatible(text, where, f"{tuple(old.shape)} of {old.dtype}", got)


def check_emptied(holder: Any, label: str) -> None:
    """Raise CompatibilityError if `reset` leaves a tensor with elements of the tokens."""
    metas: dict[int, tuple[Any, Any]] = {}

    def convert(leaf: Any) -> Any:
        if not is_torch(leaf):
            return leaf
        new = leaf.to("meta")
        metas[id(new)] = leaf, new
        return new

    copy = _reset_copy(holder, label, convert)
    for path, leaf in leaves_of([] if copy is None else values_of(copy)).items():
        old, new = metas.get(id(leaf), (None, None))
        if new is not None and new._version == 0 and _has_elements(old):
            text = f"{label} is a {type(holder).__name__}, which is an unknown class, and its "
            text += f"reset() leaves {path}: pass a new cache"
            raise incompatible(text, label, "a new cache", "a used one")
    if copy is None and any(_has_elements(leaf) for leaf in holder):
        text = f"{label}: a list of tensors has no reset(): pass a new cache"
        raise incompatible(text, label, "a new cache", "a used one")


def emptied(holder: Any) -> dict[str, Any]:
    """Reset an object's tensors, and return its attributes afterwards, for `vars().update`."""
    copy = _reset_copy(holder, "", lambda leaf: leaf)
    return {} if copy is None else values_of(copy)
