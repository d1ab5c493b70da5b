"""Deltas of tensors on a device for `follow`: compare, apply, CRC32C, by torch's operations.

All functions also work on the CPU, where tests compare them with the core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .... import _core
from ....errors import CompatibilityError, FormatError
from .state import arrays_of, tensors_of

if TYPE_CHECKING:
    import torch

    from ...._types import NDArray
    from ....follow._delta import ElementLog

_CRC_BYTES = 64 << 20  # copied to main memory at a time


def encode_delta(base: torch.Tensor, new: torch.Tensor) -> tuple[NDArray, NDArray]:
    """Return gaps and values of the changed elements, as `_core.delta_encode` does.

    A gap is the number of unchanged elements before a changed one, in units of `_gaps_of`; values
    are the new elements. Both are arrays in main memory.
    `base`, `new`: on one device, with equal shapes and dtypes; else CompatibilityError is raised.
    """
    _check_pair(base, new)
    bits = _bits_of(new).reshape(-1)
    numbers = (bits != _bits_of(base).reshape(-1)).nonzero().reshape(-1)
    values = bits[numbers].view(new.dtype)
    gaps = min((_gaps_of(numbers, escape) for escape in (255, 65535)), key=_bytes_of)
    arrays = arrays_of({"gaps": gaps.cpu(), "values": values.cpu()})
    return arrays["gaps"], arrays["values"]


def apply_delta(
    target: torch.Tensor, gaps: NDArray, values: NDArray, log: ElementLog | None
) -> None:
    """Write `values` to the elements of `target` that `gaps` selects, as `_core.delta_apply` does.

    `log`: gets a tuple of target, gaps and old values, which are in main memory; None: they are
    lost. Raises CompatibilityError for another dtype, FormatError for a damaged delta; nothing is
    written then.
    """
    import torch

    tensors = tensors_of({"gaps": gaps, "values": values})
    numbers = _numbers_of(tensors["gaps"].to(target.device), target.numel())
    new = tensors["values"].to(target.device)
    if new.dtype != target.dtype:
        raise CompatibilityError(
            f"a delta of {new.dtype} does not belong to a tensor of {target.dtype}"
        )
    if new.shape != numbers.shape:
        raise FormatError(f"a delta has {numbers.numel()} gaps for {new.numel()} values")
    bits = _bits_of(target)
    indices: tuple[torch.Tensor, ...] = (numbers,)
    if target.is_contiguous():
        bits = bits.view(-1)
    else:  # a flat view would be a copy
        indices = torch.unravel_index(numbers, target.shape)
    if log is not None:
        old = bits[indices].view(target.dtype)
        log.append((target, gaps, arrays_of({"old": old.cpu()})["old"]))
    with torch.inference_mode():
        bits[indices] = _bits_of(new)


def tensor_crc32c(tensor: torch.Tensor) -> int:
    """Return the CRC32C of the elements in C order; parts are copied to main memory.

    Raises CompatibilityError for elements of another size than 1, 2, 4 or 8 bytes.
    """
    import torch

    crc = 0
    flat = _bits_of(tensor).reshape(-1)
    for part in torch.split(flat, max(_CRC_BYTES // flat.element_size(), 1)):
        crc = _core.array_crc32c(part.cpu(), crc)
    return crc


def _check_pair(base: torch.Tensor, new: torch.Tensor) -> None:
    """Raise CompatibilityError unless two tensors have the same shape, dtype and device."""
    for label, left, right in (
        ("shapes", tuple(base.shape), tuple(new.shape)),
        ("dtypes", base.dtype, new.dtype),
        ("devices", base.device, new.device),
    ):
        if left != right:
            raise CompatibilityError(f"{label} {left} and {right} cannot be compared")


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view as integers, so that comparisons and copies are of bits.

    Raises CompatibilityError for elements of another size than 1, 2, 4 or 8 bytes.
    """
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    integer = integers.get(tensor.element_size())
    if integer is None:
        raise CompatibilityError(f"deltas of {tensor.dtype} are not supported")
    return tensor.view(integer)


def _gaps_of(numbers: torch.Tensor, escape: int) -> torch.Tensor:
    """Return the units of the gaps before ascending element numbers, as uint8 or uint16.

    A gap is as many units of `escape` (the largest one) as fit, then one smaller unit.
    """
    import torch

    gaps = torch.diff(numbers, prepend=numbers.new_full((1,), -1)) - 1
    ends = torch.cumsum(gaps // escape + 1, 0)  # number of units up to the end of each gap
    units = numbers.new_full((int(ends[-1]) if len(ends) else 0,), escape)
    units[ends - 1] = gaps % escape
    return units.to(torch.uint8 if escape == 255 else torch.uint16)


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _numbers_of(gaps: torch.Tensor, elements: int) -> torch.Tensor:
    """Return the numbers of the changed elements in C order, from units of gaps.

    `elements`: of the array. Raises FormatError for a damaged stream.
    """
    import torch

    units = gaps.to(torch.int64)
    escapes = units == (255 if gaps.element_size() == 1 else 65535)
    # a unit that ends a gap also counts its changed element
    numbers = torch.cumsum(units + ~escapes, 0)[~escapes] - 1
    if len(units) and bool(escapes[-1]):
        raise FormatError("gaps of a delta end within a gap: the delta is cut")
    if len(numbers) and int(numbers[-1]) >= elements:
        raise FormatError(f"gaps of a delta pass the end of an array of {elements} elements")
    return numbers
