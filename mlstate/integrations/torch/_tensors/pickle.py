"""State dicts in ``torch.save`` files: stored as torch tensors, readable with ``weights_only``."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from .... import _core
from ...._common.arrays import is_masked
from ...._common.dtypes import label_of, name_of, stored_dtype
from ...._common.set_module import set_module
from .dtypes import PICKLED, torch_has
from .state import arrays_of, sharable, share

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...._types import NDArray, NumpyDType


def _own_classes() -> dict[str, type[_core.StateDict]]:
    """Return mlstate's state dict classes by name: files have the names, but not the modules."""
    from ....state._optimizer_state import OptimizerStateDict
    from ....state._state_dict import ModelStateDict, StateDict

    return {c.__name__: c for c in (StateDict, ModelStateDict, OptimizerStateDict)}


# ---- saving ----


def _attributes(state: Any) -> Any:
    """Return the result of ``__getstate__``, with slots under the names of their properties.

    So files contain no private names, and reading them uses the checks of the setters. A member of
    an enum becomes its value.
    """
    attributes = state.__getstate__()
    if not (isinstance(attributes, tuple) and isinstance(attributes[-1], dict)):
        return attributes
    slots = {}
    for name, value in attributes[-1].items():
        public = name.removeprefix("_")
        if isinstance(getattr(type(state), public, None), property):
            slots[public] = value.value if isinstance(value, Enum) else value
        else:
            slots[name] = value
    return (*attributes[:-1], slots)


def _is_portable(dtype: NumpyDType) -> bool:
    """Return whether elements are portable bytes: no references, no external storage.

    The dtypes of NumPy's new interface, such as StringDType, may store elements elsewhere.
    """
    legacy = bool(getattr(type(dtype), "_legacy", True))
    return dtype.itemsize > 0 and not dtype.hasobject and legacy


def _dtype_text(dtype: NumpyDType) -> Any:
    """Return a text (for records a list) that `_dtype_of` reads.

    It also describes dtypes that torch lacks.
    """
    if label_of(dtype) or dtype.type.__module__.startswith("ml_dtypes"):
        return "ml_dtypes." + name_of(dtype)
    return np.lib.format.dtype_to_descr(dtype)


def _encode_array(value: object) -> tuple[Any, NDArray] | None:
    """Return how an array is stored, and an array for torch; None if NumPy must store it.

    The first is a form, which `restore_state` describes. The second shares the memory of `value` if
    torch can share it, else it is a copy.
    """
    if is_masked(value):  # its mask would be lost
        return None
    array = np.asarray(value)
    dtype = array.dtype
    label = name_of(dtype)
    if not torch_has(label) or not dtype.isnative:
        if not _is_portable(dtype):
            return None
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return (_dtype_text(dtype), array.shape), flat
    if not sharable(array):
        array = array.copy()
    if label in PICKLED:
        return (_dtype_text(dtype), None), array.view(PICKLED[label])
    return "array" if isinstance(value, np.ndarray) else "scalar", array


def reduce_state(state: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the result of ``__reduce_ex__`` for ``torch.save`` and for pickle protocol 2.

    Torch tensors share the arrays' memory; arrays that torch cannot share are copied, and so are
    those with gaps that no other array shares, because a file would contain the gaps. Dtypes that
    torch lacks are stored as bytes; these include strings, records and non-native byte order. An
    array that bytes cannot represent, such as a masked one, is pickled by NumPy; reading it
    requires ``weights_only=False``.
    """
    values = dict(state)
    forms: dict[str, Any] = {}
    arrays: dict[str, NDArray] = {}
    encoded: dict[int, tuple[object, NDArray] | None] = {}  # by id: keeps tied arrays tied
    for name, value in values.items():
        if isinstance(value, np.ndarray | np.generic):
            if id(value) not in encoded:
                encoded[id(value)] = _encode_array(value)
            pair = encoded[id(value)]
            if pair is not None:
                forms[name], arrays[name] = pair
    values.update(share(arrays, pack=True))
    cls = type(state)
    own_class = _own_classes().get(cls.__name__)
    return restore_state, (
        cls.__name__ if cls is own_class else cls,
        _attributes(state),
        values,
        forms,
    )


# ---- loading ----


def _dtype_of(text: Any) -> NumpyDType:
    """Return the dtype that a file names by `_dtype_text`.

    Raises ValueError for dtypes of Python objects, which could run code.
    """
    dtype: NumpyDType
    if isinstance(text, str) and text.startswith("ml_dtypes."):
        dtype = stored_dtype(text.removeprefix("ml_dtypes."))
    else:
        dtype = np.lib.format.descr_to_dtype(text)
    if dtype.hasobject:
        raise ValueError(f"the file has a tensor of dtype {text!r}, which no state dict can hold")
    return dtype


def _decode_array(name: str, form: Any, tensor: Any) -> Any:
    """Return the original value of the loaded tensor `name`, by its stored `form`.

    `restore_state` describes the forms. A tensor on a device stays a tensor if torch has its dtype,
    and a meta tensor in any case; others are copied to main memory.
    """
    import torch

    if form in ("array", "scalar"):
        array = arrays_of({name: tensor})[name]
        return array[()] if form == "scalar" and isinstance(array, np.ndarray) else array
    text, shape = form
    dtype = _dtype_of(text)
    if tensor.device.type != "cpu":
        if shape is None and torch_has(name_of(dtype)):
            return tensor.view(getattr(torch, name_of(dtype)))
        if tensor.device.type == "meta":
            return tensor
    array = arrays_of({name: tensor.cpu()})[name].view(dtype)
    return array if shape is None else array.reshape(shape)


@set_module("mlstate.integrations.torch")
def restore_state(
    kind: str | type[object], attributes: Any, values: dict[str, object], forms: dict[str, Any]
) -> Any:
    """Create a state dict from the arguments of `reduce_state`; pickle calls this.

    `kind`: name of one of mlstate's classes, or a subclass. `attributes`: for ``__setstate__``, or
    None. `values`: the entries by name; those in `forms` are tensors now. `forms` has the forms of
    values that were not tensors: ``"array"``, ``"scalar"``, or (dtype, shape) of a value stored as
    bytes; shape is None for one stored as integers of the same size. Raises TypeError for another
    class, and ValueError for a dtype of Python objects.
    """
    state_class = _own_classes().get(kind) if isinstance(kind, str) else kind
    if not (isinstance(state_class, type) and issubclass(state_class, _core.StateDict)):
        raise TypeError(
            f"the file has a state dict of class {kind!r}, which is not an mlstate class"
        )
    restored: dict[str, Any] = {}
    decoded: dict[int, Any] = {}
    for name, value in values.items():
        if name in forms:
            if id(value) not in decoded:
                decoded[id(value)] = _decode_array(name, forms[name], value)
            value = decoded[id(value)]
        restored[name] = value
    state: Any = state_class.__new__(state_class)
    _core.StateDict.update(state, restored)
    if attributes is not None:
        state.__setstate__(attributes)
    return state


def register() -> None:
    """Register state dicts with ``torch.load(weights_only=True)``; imports torch if installed."""
    try:
        from torch.serialization import add_safe_globals
    except ImportError:  # not installed, or currently being imported
        return
    add_safe_globals([restore_state, *_own_classes().values()])
