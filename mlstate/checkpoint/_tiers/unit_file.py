"""Units of a tiered state: a parameter and its optimizer states; their files, names, checksums.

Each unit has its own safetensors file, with a tensor for each part under the name
``params/<key>`` or ``optim_state/<key>``. The metadata entry ``tiers.unit`` is a JSON text: the
unit's name, and for each part the properties that its array does not have.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import _core
from ..._common.arrays import is_torch, memory_range, refuse_masked
from ..._common.backend import TensorBackend, backend_named, backend_of
from ..._common.dtypes import label_of, text_of
from ..._common.store_error import format_error
from ..._sharding.layout import Layout, Shard, Tier
from ...distributed._byte_ranges import array_of, dtype_of
from ...errors import FormatError, MLStateError, StoreError
from ...state._state_dict import StateDict
from .._folder.names import SECTIONS as ALL_SECTIONS
from .backend import TierBackend

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SECTIONS = ALL_SECTIONS[:2]  # units have no named states
KEY = "tiers.unit"
SUFFIX = ".safetensors"
_CUT = "=~"  # marks a shortened file name
_SHARD_FIELDS = ("layout", "index", "shape", "replica")  # of a Shard, without its array


def file_of(name: str) -> str:
    """Return the name of a unit's file: valid on every system, and unique to the unit.

    A long name is cut, and gets a number from its hash instead.
    """
    encoded = _core.file_name(name, 0)
    if _CUT in encoded:
        import hashlib

        digest = hashlib.sha256(name.encode(), usedforsecurity=False).digest()
        encoded = _core.file_name(name, int.from_bytes(digest[:8], "little") >> 1)
    return encoded + SUFFIX


def unit_of(section: int, key: str) -> str:
    """Return the name of the unit that an entry of the model (section 0) or optimizer (1) is in.

    A state's unit is its parameter, the key without its last name.
    """
    return key.rpartition(".")[0] or key if section else key


class Part:
    """One array of a unit: the parameter, or one of its states.

    A torch tensor stays the object that a module or an optimizer refers to, and its memory is
    exchanged. A NumPy array is replaced by a new one after a move; a cold part has none.
    """

    __slots__ = (
        "_addresses",
        "array",
        "dtype",
        "is_counter",
        "is_tensor",
        "key",
        "section",
        "shape",
        "shard_fields",
        "shard_tier",
    )

    def __init__(self, section: int, key: str, value: Any) -> None:
        """Wrap one array or `Shard`, `value`, with the name `key`.

        `section`: 0 for the model, 1 for the optimizer.
        """
        self.section = section
        self.key = key
        self.shard_fields: dict[str, Any] | None = None  # layout, index, shape, replica
        self.shard_tier: Tier | None = None  # the tier that the user chose for a Shard
        if isinstance(value, Shard):
            self.shard_tier = None if value.tier is None else Tier(value.tier)
            self.shard_fields = {name: getattr(value, name) for name in _SHARD_FIELDS}
            value = value.array
        refuse_masked(key, value)
        self.is_tensor = is_torch(value)
        self.array: Any = value if self.is_tensor else array_of(value)
        self.shape = tuple(self.array.shape)
        self.dtype = self.array.dtype
        is_on_device = self.is_tensor and self.array.device.type not in ("cpu", "meta")
        # the address of a tensor, and the range of the elements
        self._addresses: tuple[int | None, tuple[int, int] | None] | None = None
        # it does not move with its unit: optimizers keep counters in main memory, if they are not
        # fused or captured on a device
        self.is_counter = section == 1 and not self.shape and not is_on_device

    @property
    def state(self) -> str:
        """Name of the optimizer state."""
        return self.key.rpartition(".")[2]

    @property
    def stored(self) -> str:
        """Name in the unit's file."""
        return f"{SECTIONS[self.section]}/{self.key}"

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, equal for NumPy and torch and for both byte orders."""
        if self.is_tensor:
            return str(self.dtype).removeprefix("torch.")
        return text_of(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the array, in any tier."""
        return int(math.prod(self.shape) * self.dtype.itemsize)

    @property
    def elements(self) -> Any:
        """The array, detached from autograd; None if the part is cold."""
        return self.array.detach() if self.is_tensor else self.array

    def addresses(self) -> tuple[int, int] | None:
        """Return the range of addresses of the elements, as `memory_range`; kept until a move."""
        address = self.array.data_ptr() if self.is_tensor else None
        cached = self._addresses
        if cached is None or cached[0] != address:
            self._addresses = cached = address, memory_range(self.elements)
        return cached[1]

    def change_to(self, array: Any) -> partial[Any]:
        """Return the change that gives the part the memory of `array`; None: it has no memory."""
        if self.is_tensor:
            return backend_of(self.array, TensorBackend).memory_change(self.array, array)
        self._addresses = None  # of an array, they are found again for the one that it has
        return partial(setattr, self, "array", array)

    def shard(self, array: Any, tier: Tier) -> Shard:
        """Return an array as the `Shard` that a checkpoint stores for this part."""
        return Shard(array, tier=tier, **(self.shard_fields or {}))

    def describe(self) -> dict[str, Any]:
        """Return properties of this part that the header lacks, as JSON: name, torch, `Shard`."""
        about: dict[str, Any] = {"name": self.stored}
        if self.is_tensor:
            about["torch"] = True
        if self.shard_fields is not None:
            about |= {**self.shard_fields, "layout": self.shard_fields["layout"].steps}
        return about


class Move:
    """A move of a unit to another tier."""

    __slots__ = ("changes", "seconds", "thread", "to")

    def __init__(self, to: Tier) -> None:
        """Prepare a move to the tier `to`."""
        self.to: Tier = to
        self.thread: int = get_ident()
        self.changes: list[partial[Any]] | None = None  # that end it; None: they are not ready
        self.seconds: float = 0.0


class Unit:
    """Arrays that move together, and their tier."""

    __slots__ = ("file", "is_durable", "move", "name", "parts", "tier")

    def __init__(self, name: str, tier: Tier) -> None:
        """Create a unit without parts, in `tier`."""
        self.name: str = name
        self.tier: Tier = tier
        self.parts: list[Part] = []
        self.file: str = file_of(name)
        self.move: Move | None = None
        self.is_durable: bool = False  # whether the file is known to be complete and on disk

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


# ---- grouping states into units ----


def units_of(model: Mapping[str, object] | None, optimizer: Mapping[str, Any] | None) -> list[Unit]:
    """Return one unit for each parameter, with its array and its optimizer states.

    All are warm; the caller changes the tier of those on a device.
    """
    units: dict[str, Unit] = {}
    for section, state in enumerate((model, optimizer)):
        for key, value in (state or {}).items():
            name = unit_of(section, key)
            unit = units.get(name)
            if unit is None:
                unit = units[name] = Unit(name, Tier.WARM)
            unit.parts.append(Part(section, key, value))
    return list(units.values())


# ---- files ----


def write_unit(path: str, unit: Unit, arrays: list[Any]) -> None:
    """Write a unit's `arrays`, one for each part, to its file durably.

    Nothing is written if the file has these bytes already. After an error, the file may be
    incomplete, so the next call writes it again.
    """
    text = json.dumps({"unit": unit.name, "parts": [part.describe() for part in unit.parts]})
    stored = tuple((p.stored, a) for p, a in zip(unit.parts, arrays, strict=True))
    if unit.is_durable and _is_stored(path, stored, text):
        return
    unit.is_durable = False
    try:
        _core.file_save(path, stored, ((KEY, text),))
    except MLStateError as error:
        error.name = unit.name
        raise
    unit.is_durable = True


def _bytes_of(array: Any) -> Any:
    """Return a view of an array's bytes, to compare bits; None if it is not contiguous.

    None too if its byte order is not the machine's.
    """
    if is_torch(array):
        array = StateDict.from_torch({"": array})[""]
    if not array.flags.c_contiguous or not array.dtype.isnative:
        return None
    return array.reshape(-1).view(np.uint8)


def _map_file(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arrays of a unit's file as views of it, and its texts; the header is verified."""
    texts = _core.file_metadata(path, True)
    return _core.file_load(path, True, False)[0], texts


def _is_stored(path: str, stored: Iterable[tuple[str, Any]], text: str) -> bool:
    """Return whether the unit's file `path` has the arrays `stored` and the description `text`.

    `stored`: pairs of name and array. Returns False if the file is damaged or cannot be read.
    """
    with suppress(MLStateError, ImportError):
        arrays, texts = _map_file(path)
        expected = {name: _bytes_of(array) for name, array in stored}
        if texts.get(KEY) == text and all(array is not None for array in expected.values()):
            actual = {name: _bytes_of(array) for name, array in arrays.items()}
            return bool(StateDict(expected) == StateDict(actual))
    return False


def name_unit_error(name: str, error: MLStateError) -> MLStateError:
    """Return an error of the same class and attributes that also names the unit."""
    named_error = type(error)(f"unit {name!r}: {error}")
    for field in ("expected", "got", "path", "offset"):
        setattr(named_error, field, getattr(error, field))
    named_error.name = name
    return named_error


def read_unit(path: str, unit: Unit, *, mmap: bool = False) -> list[Any]:
    """Return a unit's arrays from its file, verified, in the order of its parts.

    `mmap`: as read-only views of the file. Raises FormatError or ChecksumError if the file does not
    have the unit's arrays, StoreError if it cannot be read; all have the unit's name.
    """
    try:
        arrays, texts = _core.file_load(path, mmap, True)  # verified
        if _read_description(texts, path)["unit"] != unit.name:
            raise _format_error(path, "is the file of another unit")
    except FormatError as error:
        raise name_unit_error(unit.name, error) from None
    except StoreError as error:
        error.name = unit.name
        raise
    arrays_read = []
    for part in unit.parts:
        array = arrays.get(part.stored)
        if array is None or array.shape != part.shape or dtype_of(array) != part.dtype_name:
            content = "nothing" if array is None else f"{array.dtype} {array.shape}"
            expected = f"{part.dtype_name} {part.shape}"
            raise name_unit_error(
                unit.name,
                _format_error(path, f"holds {content} as {part.stored!r}, not {expected}"),
            )
        arrays_read.append(array)
    return arrays_read


def _format_error(path: str, text: str) -> FormatError:
    return format_error(f"{os.path.basename(path)}: {text}", path)


def _read_description(texts: Mapping[str, str], path: str) -> dict[str, Any]:
    """Return the JSON description of a unit in a file's metadata `texts`.

    Raises FormatError if it is missing or malformed.
    """
    try:
        description = json.loads(texts[KEY])
        if not isinstance(description["unit"], str) or not isinstance(description["parts"], list):
            raise TypeError("no unit")
        return dict(description)
    except (KeyError, TypeError, ValueError, RecursionError):
        raise _format_error(path, "is not the file of a unit") from None


def _value_of(about: Mapping[str, Any], array: object) -> Any:
    """Return a part's value as its description `about` tells: array, tensor, or a Shard of these.

    Without torch, a tensor is returned as an array.
    """
    if about.get("torch") is True:
        with suppress(ImportError):
            array = backend_named("torch", TensorBackend).tensors_of({"": array})[""]
    if "layout" not in about:
        return array
    layout = Layout([(axis, parts) for axis, parts in about["layout"]])
    facts = {name: about[name] for name in _SHARD_FIELDS}
    return Shard(array, **{**facts, "layout": layout})


def is_unit_file(path: str) -> bool:
    """Return whether a file is a unit's file; False if its header cannot be read."""
    with suppress(MLStateError):
        return KEY in _core.file_metadata(path, False)
    return False


def open_unit(path: str) -> Unit:
    """Return the unit of a file, cold; only the header is read.

    Raises FormatError if the file is not the one of its unit.
    """
    arrays, texts = _map_file(path)
    description = _read_description(texts, path)
    try:
        unit = Unit(description["unit"], Tier.COLD)
        for about in description["parts"]:
            section, _, key = about["name"].partition("/")
            value = _value_of(about, arrays.pop(about["name"]))
            unit.parts.append(Part(SECTIONS.index(section), key, value))
            unit.parts[-1].change_to(None)()  # drop the view of the mapped file
    except (AttributeError, KeyError, TypeError, ValueError) as reason:
        raise _format_error(path, f"does not describe its unit: {reason}") from None
    if arrays or unit.file != os.path.basename(path):
        raise _format_error(path, "is not the file of its unit")
    unit.is_durable = True
    return unit


# ---- moves ----


def arrays_in(unit: Unit, to: Tier, path: str, device: Any) -> list[Any] | None:
    """Return a unit's arrays in the form of the tier `to`; the unit is not changed.

    `path`: of its file, which is written if `to` is cold, and then all items are None. `device`: of
    the hot tier; None is main memory, between which and warm nothing is copied. Returns None if the
    arrays stay as they are.
    """
    if device is None and Tier.COLD not in (unit.tier, to):
        return None
    if unit.tier == Tier.COLD:
        arrays = [_of_kind(p, a) for p, a in zip(unit.parts, read_unit(path, unit), strict=True)]
    else:
        arrays = [part.elements for part in unit.parts]
    if device is not None and to == Tier.HOT:
        on_device = backend_named("torch", TierBackend).on_device
        pairs = zip(unit.parts, arrays, strict=True)
        return [array if part.is_counter else on_device(array, device) for part, array in pairs]
    if device is not None and unit.tier == Tier.HOT:
        _copy_from_device(unit.parts, arrays)
    if to == Tier.COLD:
        write_unit(path, unit, arrays)
        return [None] * len(arrays)
    return arrays


def _of_kind(part: Part, array: Any) -> Any:
    """Convert a loaded array to the kind of its part: tensor or array, dtype and byte order."""
    if not part.is_tensor:
        if label_of(part.dtype):  # the file was written without ml_dtypes
            array = array.view(part.dtype.newbyteorder("="))
        return array.astype(part.dtype, copy=False)
    return backend_named("torch", TensorBackend).tensors_of({"": array})[""]


def _copy_from_device(parts: list[Part], arrays: list[Any]) -> None:
    """Replace device tensors in `arrays` by copies in main memory, arrays or tensors as in `parts`.

    `arrays`: of the parts. Parts that stay, and NumPy arrays, are in main memory.
    """
    moving = [k for k, part in enumerate(parts) if is_torch(arrays[k]) and not part.is_counter]
    copies = backend_named("torch", TierBackend).in_memory([arrays[k] for k in moving])
    for k, copy in zip(moving, copies, strict=True):
        arrays[k] = copy
        if not parts[k].is_tensor:
            array = backend_of(copy, TensorBackend).arrays_of({"": copy})[""]
            arrays[k] = array.astype(parts[k].dtype, copy=False)
