"""Which values a load restores with their class, and the error for others, with a remedy."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from io import BytesIO
from typing import Any

import numpy as np

from ..._common.arrays import is_torch
from ..._sharding.layout import Shard
from ...errors import UnstorableError
from .containers import full_name
from .generators import library_of

ZERO_REMEDY = (
    "store the optimizer by engine.save_checkpoint(folder), and restore it by "
    "engine.load_checkpoint(folder)"
)
_EXACT = (
    *(bool, str, int, float, complex, bytes, bytearray, BytesIO, np.ndarray),
    *(dict, OrderedDict, Counter, defaultdict, list, tuple, set, frozenset, deque),
)


def refuse_divided(value: Any, where: str) -> None:
    """Raise UnstorableError for an optimizer of DeepSpeed's ZeRO, which ranks hold in parts.

    Its ``load_state_dict`` takes the parts of all ranks. `where`: path of the value.
    """
    if hasattr(value, "dp_process_group") and hasattr(value, "param_groups"):
        raise UnstorableError(
            f"{where} is a {full_name(type(value))}, whose state DeepSpeed divides among the "
            f"ranks: {ZERO_REMEDY}"
        )


def check_exact(value: Any, where: str, keeps_gradients: bool, name: str) -> None:
    """Raise UnstorableError if a value would be decoded as another type.

    Such values are objects, instances of subclasses, and, unless `keeps_gradients`, tensors that
    require gradients. `where`: path of the value. `name`: by which a save can exclude it, or
    "".
    """
    is_tensor = is_torch(value)
    if is_tensor and (keeps_gradients or not value.requires_grad):
        return
    if not is_tensor and (type(value) in _EXACT or isinstance(value, np.generic | Shard)):
        return
    cls = type(value)
    problem, remedy = (
        "cannot be restored as such without pickle",
        (
            "use numbers, str, bytes, BytesIO, arrays, detached tensors, or lists, tuples, sets, "
            "dicts and records of these"
        ),
    )
    if is_tensor:
        problem = f"requires gradients, which {problem}"
    elif library_of(value) is not None or callable(getattr(value, "state_dict", None)):
        problem = "is an object inside a value, so a load would return its state instead"
        remedy = (
            "store it as a state of its own, states={'name': object}, and its state_dict() here, "
            "or leave it out"
        )
    raise UnstorableError(
        f"{where} is a {full_name(cls)}: it {problem}: {remedy}{exclude_remedy(name)}"
    )


def exclude_remedy(name: str) -> str:
    """Return how a save leaves out the value with this name; "" without a name."""
    if not name:
        return ""
    start, _, end = name.rpartition(".")
    pattern = f"param_groups.*.{end}" if start.startswith("param_groups.") else f"*.{end}"
    return (
        f"; exclude=['{pattern}'] leaves it out, and a load keeps the target's own value (which "
        "some optimizers make in their first step)"
    )
