"""Files that each rank saved with its own parts of tensors: joined to one tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...._sharding.layout import Shard
from ....checkpoint._files.parts import Unreadable
from ....checkpoint._layouts.entries import malformed
from ....checkpoint._states.containers import equal_values
from ....errors import CompatibilityError
from .._tensors.state import explain_unsupported_tensor
from .dtensor_shards import part_of
from .optimizer import is_tensor

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def join_ranks(trees: list[Any], path: Path, *, keeps_differences: bool = False) -> Any:
    """Return one tree with whole tensors, from the `trees` of all ranks in rank order.

    Parts of a DTensor are joined. All other values must be equal on all ranks, or with
    `keeps_differences`, an entry of a dict that differs becomes a list with one item for each rank.
    `path`: the first rank's file, for errors. Raises CompatibilityError if values differ or a part
    is missing, and FormatError for damaged parts.
    """
    if keeps_differences and all(isinstance(tree, Mapping) for tree in trees):
        by_key = {key: [tree.get(key) for tree in trees] for tree in trees for key in tree}
        return {key: _join_all(each, (key,), path, keeps=True) for key, each in by_key.items()}
    return _join_all(trees, (), path)


def _join_all(values: list[Any], keys: tuple[Any, ...], path: Path, *, keeps: bool = False) -> Any:
    """Return the `values` of all ranks as one; with `keeps`, as they are if they differ.

    Raises FormatError for damaged parts.
    """
    try:
        return _join(values, keys, path)
    except CompatibilityError:
        if keeps:
            return values
        raise
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError) as e:
        text = str(e).partition("\n")[0][:300] or type(e).__name__
        raise malformed(path, f"its values cannot be joined: {text}") from None


def _join(values: list[Any], keys: tuple[Any, ...], path: Path) -> Any:
    """Return the `values` of all ranks as one; `keys`: their path in the trees, for errors.

    `path`: the first rank's file, for errors. Raises CompatibilityError as `join_ranks` does.
    """
    first = values[0]
    if isinstance(first, Unreadable) or (is_tensor(first) and _is_special(first)):
        return first  # an error about it has its name
    if any(_form_of(value) != _form_of(first) for value in values[1:]):
        raise _difference(keys, path)
    if _is_dict(first):
        return {key: _join([each[key] for each in values], (*keys, key), path) for key in first}
    if type(first) in (list, tuple):
        rows = zip(*values, strict=True)
        return type(first)(_join([*row], (*keys, n), path) for n, row in enumerate(rows))
    if hasattr(first, "device_mesh"):
        return _join_parts(values, keys, path)
    if not all(equal_values(first, value) for value in values[1:]):
        raise _difference(keys, path)
    return first.clone() if is_tensor(first) and len(values) > 1 else first


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections")


def _form_of(value: Any) -> tuple[Any, ...]:
    """Return the class of a value, and the keys or the length of a container."""
    inner = value.keys() if _is_dict(value) else type(value) in (list, tuple) and len(value)
    return type(value), inner


def _join_parts(values: list[Any], keys: tuple[Any, ...], path: Path) -> torch.Tensor:
    """Return the whole tensor of `values`: DTensors, one for each rank, which may hold equal parts.

    `keys`, `path`: for errors. Raises CompatibilityError if a part is missing or two copies differ.
    """
    name, shape = _name(keys), tuple(values[0].shape)
    parts: dict[int, Any] = {}
    layout = None
    for value in values:
        part = part_of(name, value)
        index = part.index if isinstance(part, Shard) else 0
        if isinstance(part, Shard):
            layout, part = part.layout, part.array
        facts = (tuple(value.shape), value.placements, part.dtype)
        if facts != (shape, values[0].placements, values[0].dtype):
            raise _difference(keys, path)
        if index in parts and not equal_values(parts[index], part):
            raise _difference(keys, path)
        parts[index] = part
    if layout is None:
        if tuple(parts[0].shape) != shape:
            raise ValueError(f"{name!r} of shape {shape} has {tuple(parts[0].shape)} in the file")
        replicated: torch.Tensor = parts[0].clone()
        return replicated
    # one index more than there are files is enough to find a missing part
    missing = [index for index in range(min(layout.parts, len(values) + 1)) if index not in parts]
    if missing:
        raise CompatibilityError(
            f"{path}: {name!r} has {layout.parts} parts, and no file holds part {missing[0]}; pass "
            "the folder with the files of all ranks"
        )
    whole: torch.Tensor = parts[0].new_empty(shape)
    for index, part in parts.items():
        layout.take(whole, index).copy_(part)
    return whole


def _is_special(tensor: Any) -> bool:
    """Return whether a tensor has no bytes to compare: a sparse or quantized one, or on meta."""
    if hasattr(tensor, "device_mesh"):
        return False
    return getattr(tensor, "is_meta", False) or bool(explain_unsupported_tensor(tensor))


def _name(keys: tuple[Any, ...]) -> str:
    """Return the name in errors of the value at the path `keys`: the keys joined by dots."""
    return ".".join(map(str, keys))


def _difference(keys: tuple[Any, ...], path: Path) -> CompatibilityError:
    """Return the error for values at `keys` that differ between ranks."""
    where = f" at {_name(keys)!r}" if keys else ""
    return CompatibilityError(
        f"{path} and the files of the other ranks hold different values{where}: only DTensors tell "
        "how the values of ranks belong together; load one of the files, or leave it out (--skip)"
    )
