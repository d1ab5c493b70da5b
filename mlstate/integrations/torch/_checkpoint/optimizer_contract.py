"""The contract of torch optimizers: values of groups, own load methods.

    encode_value, decode_value    a value of a group <-> its JSON form in a checkpoint
    check_contract                refuses optimizers whose ``state_dict()`` has more than `state`

A JSON list in a group is a tuple. Values that JSON cannot hold are objects with ``"$": "tree"``.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from ...._common.dtypes import name_of, numpy_dtype
from ...._sharding.layout import Shard
from ....checkpoint._states.tree import Decoder, encode, malformed, whole_arrays
from ....state._compatibility import join
from .._tensors.state import tensors_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from ...._types import Array

# Keys in a group of a checkpoint: names of states that were Python numbers, which files store as
# arrays; and of states that are nested values, with the positions of their parameters; and a mark
# of a capturable group whose numbers were numbers: old checkpoints stored tensors as numbers too.
NUMBERS = "python_numbers"
PACKED = "packed_states"
EXACT = "exact_numbers"
# Keys of a group that are not hyperparameters.
NOT_VALUES = frozenset({"params", "param_names", NUMBERS, PACKED, EXACT})
_MOST_BYTES = 65536  # of arrays in a value of a group: the manifest contains them


# ---- values ----


def equal_values(a: Any, b: Any) -> bool:
    """Return whether nested values are equal and have equal types; NaN equals NaN.

    DTensors, sparse tensors and meta tensors are equal only if they are the same object.
    """
    import torch

    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        facts = [(t.dtype, t.shape, t.requires_grad) for t in (a, b)]
        if facts[0] != facts[1] or hasattr(a, "device_mesh"):
            return False
        if any(t.layout != torch.strided or t.is_meta for t in (a, b)):
            return False
        a, b = a.detach().cpu(), b.detach().cpu()
        return bool(torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True))
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_values(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal_values, a, b))
    return bool(a == b or (a != a and b != b))


def tensor_of(array: Array) -> torch.Tensor:
    """Return a new tensor of an array."""
    tensor: torch.Tensor = tensors_of({"": np.array(array)})[""]
    return tensor


def check_restorable(value: object, restored: object, where: str) -> None:
    """Raise TypeError if `restored`, a value after encoding and decoding, differs from `value`.

    `where`: name of the value in the error.
    """
    if not equal_values(value, restored):
        cls = type(value)
        raise TypeError(
            f"{where} is or contains a {cls.__module__}.{cls.__qualname__}, which would be "
            "restored as another value: use plain numbers, str, bytes, tensors, or lists, tuples, "
            "sets and dicts of these"
        )


def as_json(value: Any) -> Any:
    """Return a plain value in its JSON form; NotImplemented if it has none.

    Tuples become lists. NaN, infinity, and numbers from 2**63 on have no form.
    """
    if type(value) is tuple:
        items = [as_json(item) for item in value]
        return NotImplemented if any(item is NotImplemented for item in items) else items
    if type(value) in (int, float) and not abs(value) < 1 << 63:  # also NaN
        return NotImplemented
    return value if value is None or type(value) in (bool, int, float, str) else NotImplemented


def encode_value(value: object, where: str) -> Any:
    """Return the JSON form of a group's value, which `decode_value` reads.

    `where`: name of the value in errors. Raises TypeError for values that would not be restored
    equal, ValueError for arrays that are too large for a manifest.
    """
    json_value = as_json(value)
    if json_value is not NotImplemented:
        return json_value
    tree = encode(value, where)
    if any(isinstance(array, Shard) for array in tree.arrays.values()):
        raise TypeError(f"{where} contains a DTensor: use a plain tensor")
    arrays = whole_arrays(tree)
    nbytes = sum(array.nbytes for array in arrays.values())
    if nbytes > _MOST_BYTES:
        raise ValueError(
            f"{where} has {nbytes:,} bytes of arrays, but values of a group may have only "
            f"{_MOST_BYTES:,}: keep them in optimizer.state, or save them by states="
        )
    form: dict[str, Any] = {"$": "tree", "value": json.loads(tree.text)}
    if arrays:
        form["arrays"] = {
            key: [name_of(a.dtype), list(a.shape), base64.b64encode(a.tobytes()).decode()]
            for key, a in arrays.items()
        }
    check_restorable(value, decode_value(form, where), where)
    return form


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def decode_value(form: Any, where: str) -> Any:
    """Return the value of a form that `encode_value` returned.

    Of a plain JSON value, lists become tuples. Raises FormatError, with `where`, for a malformed
    form.
    """
    if not (isinstance(form, dict) and form.get("$") == "tree"):
        return _as_tuples(form)
    try:
        arrays = {
            key: np.frombuffer(base64.b64decode(data), numpy_dtype(dtype)).reshape(shape).copy()
            for key, (dtype, shape, data) in form.get("arrays", {}).items()
        }
        return Decoder(arrays, tensor_of).value(form["value"])
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise malformed(where, error) from None


# ---- own load methods ----


def quoted(names: Iterable[object]) -> str:
    return join([repr(name) for name in names])


def _is_overridden(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Return whether the optimizer's method `name` is not one of torch's."""
    method = getattr(type(optimizer), name)
    module = str(getattr(method, "__module__", None))
    return name in vars(optimizer) or not module.startswith("torch.optim.")


def _has_hooks(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Return whether an optimizer has hooks before or after `name`, such as "state_dict"."""
    hooks = vars(optimizer)
    return any(bool(hooks.get(f"_optimizer_{name}_{when}_hooks")) for when in ("pre", "post"))


def has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``state_dict()`` may have more than `state` and `param_groups`.

    This is so with a method or hooks that are not torch's, or a `state` that is a property.
    """
    has_property = isinstance(vars(type(optimizer)).get("state"), property)
    return (
        has_property
        or _is_overridden(optimizer, "state_dict")
        or _has_hooks(optimizer, "state_dict")
    )


def has_own_loader(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's ``load_state_dict`` does more than torch's own.

    This is so with methods or hooks that are not torch's, also for saving.
    """
    names = ("load_state_dict", "__setstate__", "_process_value_according_to_param_policy")
    return (
        any(_is_overridden(optimizer, name) for name in names)
        or _has_hooks(optimizer, "load_state_dict")
        or has_own_state_dict(optimizer)
    )


def torch_form(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the dict that torch's own ``state_dict()`` would return, without hooks.

    Values are not copied.
    """
    numbers: dict[int, int] = {}
    groups = []
    for group in optimizer.param_groups:
        members = [numbers.setdefault(id(p), len(numbers)) for p in group["params"]]
        values = {key: value for key, value in group.items() if key != "params"}
        groups.append({**values, "params": members})
    states = {numbers.get(id(key), key): value for key, value in optimizer.state.items()}
    return {"state": states, "param_groups": groups}


def _own_state_dict(optimizer: torch.optim.Optimizer) -> Any:
    """Return the result of ``state_dict()``; raise TypeError with a remedy if it fails."""
    try:
        return optimizer.state_dict()
    except Exception as error:
        raise TypeError(
            f"{type(optimizer).__name__}.state_dict() raised {type(error).__name__}: {error}; "
            "pass states={'optimizer': optimizer.state_dict()} on ranks that can make this call, "
            "and states={'optimizer': None} on the others"
        ) from error


def has_standard_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `state` and `param_groups` are all that ``state_dict()`` has."""
    if not has_own_state_dict(optimizer):
        return True
    return equal_values(_own_state_dict(optimizer), torch_form(optimizer))


def check_contract(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError if ``state_dict()`` has more than `state` and `param_groups`.

    A checkpoint stores only these two, so the rest would be lost.
    """
    if not has_own_state_dict(optimizer):
        return
    own_dict, torch_dict = _own_state_dict(optimizer), torch_form(optimizer)
    if equal_values(own_dict, torch_dict):
        return
    keys = own_dict.keys() - torch_dict.keys() if isinstance(own_dict, dict) else ()
    detail = f"has {quoted(sorted(map(str, keys)))} too" if keys else "has other values"
    raise TypeError(
        f"{type(optimizer).__name__} does not keep all of its state in `state` and `param_groups`, "
        f"because its state_dict() {detail}: pass states={{'optimizer': optimizer}}, which stores "
        "the result of state_dict(), or pass the optimizer that it wraps"
    )
