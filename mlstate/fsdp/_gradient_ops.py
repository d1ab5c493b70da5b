"""Add, scale, clear gradients in place, and their norms: the C core or torch; sums of `no_sync`."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._common.arrays import (
    is_same_memory,
    is_torch,
    packed_array,
    pairs_sharing_elements,
    refuse_masked,
)
from ..collectives._arguments import dtype_name
from ..errors import CompatibilityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .._types import Array


def on_host(gradient: Any) -> bool:
    """Return whether a gradient is in main memory, which the core can access."""
    return bool(gradient.is_cpu) if is_torch(gradient) else True


def location_of(gradient: Any) -> str:
    """Return the kind and device of a gradient, for error messages."""
    return f"torch, {gradient.device}" if is_torch(gradient) else "NumPy"


def detached(gradient: Any) -> Any:
    """Return a gradient without its autograd graph; a NumPy scalar becomes an array.

    Shares the memory of tensors. Other objects are returned unchanged.
    """
    if is_torch(gradient):
        return gradient.detach() if gradient.requires_grad else gradient
    return np.asarray(gradient) if isinstance(gradient, np.generic) else gradient


def packed(gradient: Any) -> Any:
    """Return the gradient itself if it is contiguous, aligned and native, else a packed copy.

    A tensor is returned detached.
    """
    if is_torch(gradient):
        tensor = gradient.detach() if gradient.requires_grad else gradient
        return tensor if tensor.is_contiguous() else tensor.contiguous()
    return packed_array(gradient)


def memory_of(gradient: Any) -> Any:
    """Return the tensor `gradient` as an array of its memory, if NumPy or ml_dtypes has the dtype.

    Otherwise it is returned unchanged, as are arrays. The core reads arrays faster than tensors.
    The tensor must not require gradients.
    """
    if not is_torch(gradient):
        return gradient
    try:
        if dtype_name(gradient) != "bfloat16":
            return gradient.numpy()
        dtype = _bfloat16()
        if dtype is None:
            return gradient
        # torch does not convert bfloat16 to NumPy: reinterpret it by way of int16
        return gradient.view(sys.modules["torch"].int16).numpy().view(dtype)
    except (TypeError, RuntimeError):  # another dtype, or a view that is negated or conjugated
        return gradient


@cache
def _bfloat16() -> Any:
    """Return NumPy's dtype for bfloat16, or None if ml_dtypes is not installed."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(ml_dtypes.bfloat16)


def copy_gradient(gradient: Any) -> Any:
    """Return a copy of a gradient, without autograd graph, that shares no memory with it."""
    return gradient.detach().clone() if is_torch(gradient) else np.array(gradient)


def _split_by_device(gradients: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two dicts by name: the gradients in main memory, and those on other devices."""
    host: dict[str, Any] = {}
    device: dict[str, Any] = {}
    for name, array in gradients.items():
        (host if on_host(array) else device)[name] = detached(array)
    return host, device


def _check_addend(name: str, target: Any, gradient: Any) -> None:
    """Raise CompatibilityError unless a gradient is on the device and of the shape of `target`.

    Torch would broadcast another shape. The core checks gradients in main memory. `name`: of the
    parameter, for the error.
    """
    for label, got, expected in (
        ("kind", location_of(gradient), location_of(target)),
        ("shape", str(tuple(gradient.shape)), str(tuple(target.shape))),
    ):
        if got != expected:
            text = f"'{name}': a gradient of {label} {got} cannot be added to one of {expected}"
            raise CompatibilityError(text, name=name, got=got, expected=expected)


def add(targets: Mapping[str, object], gradients: Mapping[str, Any]) -> None:
    """Add to each of `targets` in place the gradient of the same name, shape and dtype.

    `gradients` may have more names. Raises CompatibilityError if one does not fit; nothing is
    changed then.
    """
    host, device = _split_by_device(targets)
    for name, target in device.items():
        _check_addend(name, target, gradients[name])
    if host:
        sources = [detached(gradients[name]) for name in host]
        # the gradients count once (factor 1), and no norms are computed
        _core.accumulate(list(host), list(host.values()), sources, 1.0, False)
    for name, target in device.items():
        target += gradients[name]


class LocalSums:
    """Gradients that this rank accumulates before they are reduced, by parameter."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def add(self, name: str, gradient: object) -> None:
        """Add a gradient to the sum of parameter `name`; the first is copied, None adds nothing.

        Raises TypeError for a masked array.
        """
        refuse_masked(name, gradient)
        if gradient is not None and name in self._sums:
            add({name: self._sums[name]}, {name: gradient})
        elif gradient is not None:
            self._sums[name] = copy_gradient(gradient)

    def take(self, name: str, gradient: object) -> tuple[object, str]:
        """Remove the sum of parameter `name`, add `gradient` to it, and return it with "".

        `gradient`: of the last pass; None: it has none. Without a sum, the gradient itself is
        returned. If the two cannot be added, returns None and a text for the error.
        """
        total = self._sums.pop(name, None)
        if total is None or gradient is None:
            return gradient if total is None else total, ""
        try:
            refuse_masked(name, gradient)
            add({name: total}, {name: gradient})
        except Exception as error:  # all ranks raise it: they wait for this gradient
            return None, f"{type(error).__name__}: {error}"
        return total, ""

    def clear(self) -> None:
        """Remove all sums."""
        self._sums.clear()


def clear(gradients: Mapping[str, Array]) -> None:
    """Fill gradients with zeros in place."""
    host, device = _split_by_device(gradients)
    if host:
        _core.clear(list(host), list(host.values()))
    for target in device.values():
        target.zero_()


def distinct_memory(gradients: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gradients, each memory once, under its first name.

    Raises ValueError for two that share elements in another way.
    """
    distinct = dict(gradients)
    for first, other in pairs_sharing_elements(gradients):
        pair = gradients[first], gradients[other]
        if not is_same_memory(*pair) or len(set(map(dtype_name, pair))) > 1:
            raise ValueError(
                f"{first!r} and {other!r} share memory, but not as one array of the same shape, "
                "strides and dtype, and it would be scaled twice: pass a copy of one"
            )
        distinct.pop(other, None)
    return distinct


def scale(gradients: Mapping[str, object], factor: float) -> bool:
    """Multiply gradients by a factor in place; 1 only checks whether that is possible.

    Returns whether some of them may share memory, which `distinct_memory` then examines.
    """
    host, device = _split_by_device(gradients)
    may_share = bool(host) and _core.scale(list(host), list(host.values()), factor)
    for target in device.values() if factor != 1 else ():
        target *= factor
    return may_share or len(device) > 1


def norm_partials(gradients: Mapping[str, object]) -> dict[str, tuple[float, int]]:
    """Return the sum of squares and the number of non-finite elements of each gradient.

    By name, in the order of `gradients`. Squares are summed in float64.
    """
    host, device = _split_by_device(gradients)
    partials = _core.norm_partials(list(host), list(host.values())) if host else []
    partials_by_name = dict(zip(host, partials, strict=True))
    for name, tensor in device.items():
        reals = tensor
        if tensor.is_complex():  # real and imaginary parts
            reals = sys.modules["torch"].view_as_real(tensor.resolve_conj())
        squares = float(reals.double().square().sum())
        partials_by_name[name] = squares, int((~tensor.isfinite()).sum())
    return {name: partials_by_name[name] for name in gradients}


def squares_in_order(partials: Iterable[tuple[float, int]]) -> float:
    """Return the sum of the squares in `partials`, added in their order.

    `partials`: (sum of squares, unused count) pairs. The builtin ``sum`` gives other bits in some
    Python versions.
    """
    total = 0.0
    for squares, _ in partials:
        total += squares
    return total
