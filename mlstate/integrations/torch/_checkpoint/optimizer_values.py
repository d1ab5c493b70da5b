"""JSON form of one value of an optimizer's group, such as a tuple or a tensor.

A JSON list in a group is a tuple. Values that JSON cannot hold are objects with ``"$": "tree"``.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from ...._common.dtypes import name_of
from ...._sharding.layout import Shard
from ....checkpoint._folder.names import NEWER
from ....checkpoint._states.excluded import NONE_EXCLUDED, Excluded
from ....checkpoint._states.tree import Tree, encode, value_of_form, whole_arrays
from ....state._compatibility import join
from .._tensors.state import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from ...._types import Array

# Keys in a group of a checkpoint: names of states that were Python numbers, which files store as
# arrays; and of states that are nested values, with the positions of their parameters; and a mark
# of a capturable group whose numbers were numbers: old checkpoints stored tensors as numbers too;
# and by state, pairs of a position and the order of dimensions in memory, if it is not C order.
NUMBERS = "python_numbers"
PACKED = "packed_states"
EXACT = "exact_numbers"
ORDERS = "dimension_orders"
# Keys of a group that are not hyperparameters.
NOT_VALUES = frozenset({"params", "param_names", NUMBERS, PACKED, EXACT, ORDERS, NEWER})
_MOST_BYTES = 65536  # of arrays in a value of a group: the manifest contains them


def tensor_of(array: Array) -> torch.Tensor:
    """Return a new tensor of an array."""
    tensor: torch.Tensor = tensors_of({"": np.array(array)})[""]
    return tensor


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


def encode_value(
    value: object, where: str, name: str = "", excluded: Excluded = NONE_EXCLUDED
) -> Any:
    """Return the JSON form of a group's value, which `decode_value` reads.

    `where`: name of the value in errors; `name`: for `excluded`, the values to leave out. Raises
    TypeError for values that would not be restored equal, ValueError for arrays that are too large
    for a manifest.
    """
    if excluded.matches(name):
        return {"$": "tree", "value": {"$": "excluded"}, NEWER: True}
    json_value = as_json(value)
    if json_value is not NotImplemented:
        return json_value
    tree = encode(value, where, exact=True, sorts=True, name=name, excluded=excluded)
    if any(isinstance(array, Shard) for array in tree.arrays.values()):
        raise TypeError(f"{where} contains a DTensor: use a plain tensor, its full_tensor()")
    arrays = whole_arrays(tree)
    nbytes = _bytes_of(tree)
    if nbytes > _MOST_BYTES:
        raise ValueError(
            f"{where} has {nbytes:,} bytes of arrays, but values of a group may have only "
            f"{_MOST_BYTES:,}: keep them in optimizer.state, or save them by states="
        )
    form: dict[str, Any] = {"$": "tree", "value": json.loads(tree.text)}
    if tree.is_newer:
        form[NEWER] = True
    if arrays:
        form["arrays"] = {
            key: [name_of(a.dtype), list(a.shape), base64.b64encode(a.tobytes()).decode()]
            for key, a in arrays.items()
        }
    return form


def _bytes_of(tree: Tree) -> int:
    return sum(array.nbytes for array in tree.arrays.values() if not isinstance(array, Shard))


def is_small(value: object) -> bool:
    """Return whether a group's value is small enough for a manifest; True if it cannot be stored.

    `encode_value` then names it.
    """
    if as_json(value) is not NotImplemented:
        return True
    try:
        return _bytes_of(encode(value, "", exact=True)) <= _MOST_BYTES
    except (TypeError, ValueError):
        return True


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def decode_value(form: Any, where: str, target: Callable[[], Any] | None = None) -> Any:
    """Return the value of a form that `encode_value` returned; `target`: as for `Decoder`.

    Of a plain JSON value, lists become tuples. Raises FormatError, with `where`, for a malformed
    form.
    """
    if not (isinstance(form, dict) and form.get("$") == "tree"):
        return _as_tuples(form)
    return value_of_form(form, where, tensor_of, target)


def quoted(names: Iterable[object]) -> str:
    return join([repr(name) for name in names])
