"""States in the specification of a ``.mlpackage`` or ``.mlmodel``, and its Manifest.json.

A package is a folder: Manifest.json names the specification, a protobuf file under Data/. A bare
specification file (.mlmodel) can be read too. Only the model's description is fetched, with a few
small reads. The program, which makes up nearly all of the file, is skipped, and the weights are
in another file that is never opened.

These messages are read, by field number (Core ML's Model.proto and related files):

- model: 2 description
- description: 13 state*, 20 function*, 21 name of the default function
- function: 1 name, 6 state*
- state: 1 name, 3 type -> 8 state type -> 1 array type
- array type: 1 shape* (packed or one by one), 2 data type

All other fields are skipped, so newer converters may add fields. Each level has one reader, so
the nesting of calls is fixed and a file cannot increase it. Packages are untrusted: lengths,
counts and shapes are checked before use, a manifest's path cannot leave the package, and only
regular files are read. Links are followed, since download caches build packages from links.
"""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import _core
from .._common.dtypes import DTYPES
from .._common.regular_file import open_regular
from .._common.store_error import format_error, store_error
from .._common.text import shorten
from ..errors import FormatError
from ._protobuf import (
    BYTES,
    HEADER_BYTES,
    VARINT,
    Fields,
    Message,
    error_at,
    length_error,
    read_header,
    read_varint,
)

if TYPE_CHECKING:
    from collections.abc import Callable

State: TypeAlias = tuple[str, str, tuple[int, ...]]  # name, dtype, shape
Functions: TypeAlias = dict[str, list[State]]

# Limits far above real models, and low enough to bound the cost of hostile ones.
_MOST_RANK = 16
_MOST_FUNCTIONS = 1024
_MOST_STATES = 2048  # of a function
_MOST_ALL_STATES = 16384
_MOST_FIELDS = 4096  # top-level fields of a specification
_MOST_NAME_BYTES = 1024
_MOST_DESCRIPTION = 64 << 20
_MOST_MANIFEST = 1 << 20
_MANIFEST_DEPTH = 16

# Values of ArrayFeatureType.ArrayDataType: the kind in the upper half, the bits of an item in the
# lower half. Converters write float16 states only. The format allows the others, but Core ML may
# not run them.
_DATA_TYPES = {
    65552: "float16",
    65568: "float32",
    65600: "float64",
    131104: "int32",
    131080: "int8",
}
_ITEM_BYTES = {info.name: info.item_bytes for info in DTYPES}


def _read_name(fields: Fields, label: str) -> str:
    """Return the name of a function or state, which is field 1 of its message.

    `label`: such as "the name of a state", for errors. Raises FormatError for a name that is
    missing, empty or too long, is not UTF-8, or contains a zero.
    """
    message = fields.only(1, label)
    if message is None:
        raise error_at(fields.offset, f"{label} is missing")
    length = len(message.data)
    if not 0 < length <= _MOST_NAME_BYTES:
        text = f"{label} has {length} bytes, expected 1 to {_MOST_NAME_BYTES}"
        raise error_at(message.offset, text)
    try:
        name = bytes(message.data).decode()
    except UnicodeDecodeError:
        name = "\0"  # refused below
    if "\0" in name:
        raise error_at(message.offset, f"{label} is not UTF-8 text")
    return name


# ---- a state ----


def _read_shape(array: Fields, name: str) -> tuple[int, ...]:
    """Return the shape in `array`, the array type of the state `name`, which is for errors.

    A writer may write one field for each dimension, or pack dimensions into a field of bytes, or
    mix both forms. Raises FormatError if a dimension is not positive.
    """
    shape: list[int] = []

    def add(value: int, offset: int) -> None:
        """Add the dimension `value`, an unsigned number that was read at `offset` of the file."""
        if len(shape) == _MOST_RANK:
            raise error_at(offset, f"state {name} has more than {_MOST_RANK} dimensions")
        if not 0 < value < 1 << 63:
            signed = value - (value >> 63 << 64)  # as int64: -1 means "any" in other places
            text = (
                f"state {name}: dimension {len(shape)} is {signed}; a state's dimensions are fixed "
                "and positive"
            )
            raise error_at(offset, text, expected="a positive dimension", got=str(signed))
        shape.append(value)

    for field in array.of(1):
        if field.wire_type == VARINT:
            add(field.value, field.offset)
        elif field.wire_type != BYTES:
            raise error_at(field.offset, f"state {name}: its shape has wire type {field.wire_type}")
        at = 0
        while at < len(field.payload.data):
            offset = field.payload.offset + at
            value, at = read_varint(field.payload, at)
            add(value, offset)
    return tuple(shape)


def _read_array(array: Fields, name: str) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape in `array`, the array type of the state `name`, which is for errors.

    Of several data types the last counts, as in protobuf. Raises FormatError for an unknown data
    type, and for a shape that is missing or too large.
    """
    shape = _read_shape(array, name)
    number, offset = 0, array.offset
    for field in array.of(2):
        number, offset = field.value if field.wire_type == VARINT else 0, field.offset
    dtype = _DATA_TYPES.get(number)
    if dtype is None:
        choices = ", ".join(f"{dtype} {number}" for number, dtype in _DATA_TYPES.items())
        text = f"state {name} has the data type {number}, which is unknown; known are {choices}"
        raise error_at(offset, text, expected="a known data type", got=f"data type {number}")
    nbytes = _ITEM_BYTES[dtype]
    for length in shape:
        nbytes *= length
    if not shape or nbytes >= 1 << 63:
        text = "a shape whose bytes exceed the address space" if shape else "no shape"
        raise error_at(array.offset, f"state {name} has {text}")
    return dtype, shape


def _read_state(feature: Fields) -> State:
    """Return name, dtype and shape of a state from the fields of its message.

    A FormatError about dtype or shape has the name of the state as its attribute `name`.
    """
    name = _read_name(feature, "the name of a state")
    try:
        kind = feature.only(3, "a type")
        state_type = kind and feature.open(kind, [8]).only(8, "a state type")
        array = state_type and feature.open(state_type, [1]).only(1, "an array type")
        if array is None:
            raise error_at(feature.offset, f"state {shorten(name, 80)} has no array type")
        return name, *_read_array(feature.open(array, [1, 2]), shorten(name, 80))
    except FormatError as error:
        error.name = name
        raise


# ---- the description ----


def _read_states(owner: Fields, number: int, total: int) -> list[State]:
    """Return the states in the fields `number` of `owner`, a function or description.

    `total`: states of earlier functions. Raises FormatError if two states have the same name, or if
    the function or model has too many states.
    """
    states: dict[str, State] = {}
    for message in owner.messages(number, "a state"):
        count = total + len(states)
        if len(states) == _MOST_STATES or count == _MOST_ALL_STATES:
            raise error_at(message.offset, f"more than {count} states")
        state = _read_state(owner.open(message, [1, 3]))
        if state[0] in states:
            text = f"two states are called {shorten(state[0], 80)}"
            raise error_at(message.offset, text, name=state[0])
        states[state[0]] = state
    return list(states.values())


def _read_functions(description: Fields) -> Functions:
    """Return the states of each function by name, from a model description; {} without functions.

    Raises FormatError if two functions have the same name, or if there are too many.
    """
    functions: Functions = {}
    total = 0
    for message in description.messages(20, "a function"):
        function = description.open(message, [1, 6])
        name = _read_name(function, "the name of a function")
        if len(functions) == _MOST_FUNCTIONS:
            raise error_at(message.offset, f"more than {_MOST_FUNCTIONS} functions")
        if name in functions:
            text = f"two functions are called {shorten(name, 80)}"
            raise error_at(message.offset, text)
        functions[name] = _read_states(function, number=6, total=total)
        total += len(functions[name])
    return functions


def parse_description(data: bytes, offset: int = 0) -> tuple[Functions, str | None]:
    """Return the states of each function, and the name of the default function or None.

    `data`: a serialized description; `offset`: bytes before it in its file, for errors. Without
    functions, the states of the description belong to the only function, which Core ML and its
    converters call "main". A single function is the default; of several, none may be. Raises
    FormatError if the description is not valid.
    """
    description = Fields(Message(memoryview(data), offset), [13, 20, 21])
    functions = _read_functions(description)
    if not functions:
        functions = {"main": _read_states(description, number=13, total=0)}
    else:
        for state in description.messages(13, "a state"):
            text = "a state that belongs to no function, in a model with functions"
            raise error_at(state.offset, text)
    default = description.only(21, "the default function's name")
    if default is None or not default.data:
        return functions, next(iter(functions)) if len(functions) == 1 else None
    name = bytes(default.data).decode(errors="replace")
    if name not in functions:
        text = "the default function is not among the model's functions"
        raise error_at(default.offset, text)
    return functions, name


# ---- the specification, in memory or in a file ----


def _find_description(read: Callable[[int, int], bytes], size: int) -> tuple[int, int]:
    """Return start and length, in bytes, of the only description among the top-level fields.

    `read` returns bytes of the specification from an offset and a count; `size`: all its bytes.
    Continues to the end, so that a file truncated in its program fails here and not in Core ML
    later. One small read for each field; their number is limited. Raises FormatError unless there
    is one description.
    """
    description: tuple[int, int] | None = None
    offset = count = 0
    while offset < size:
        if count == _MOST_FIELDS:
            raise error_at(offset, f"more than {count} fields: not a Core ML specification")
        header = Message(read(offset, min(HEADER_BYTES, size - offset)), offset)
        number, wire_type, value, end = read_header(header, 0)
        start, length = offset + end, value if wire_type == BYTES else 0
        left = size - start
        if length > left:
            text = f"the file has {left} more; it is damaged or not a Core ML specification"
            raise length_error(number, offset, length, left, text)
        if number == 2:
            if description is not None or wire_type != BYTES:
                problem = "is not of its type" if description is None else "appears twice"
                raise error_at(offset, f"the model's description {problem}")
            description = start, length
        offset = start + length
        count += 1
    if description is None:
        text = "the file ends without a model's description; it is not a Core ML specification"
        raise error_at(size, text)
    return description


def _parse(read: Callable[[int, int], bytes], size: int) -> tuple[Functions, str | None]:
    """As `parse_specification`; `read` and `size` are as for `_find_description`."""
    start, length = _find_description(read, size)
    if length > _MOST_DESCRIPTION:
        text = f"a description of {length} bytes, expected at most {_MOST_DESCRIPTION}"
        raise error_at(start, text)
    return parse_description(read(start, length), start)


def parse_specification(data: Any) -> tuple[Functions, str | None]:
    """Return the states of each function, and the name of the default function or None.

    `data` is a buffer with a specification. Raises FormatError, with the byte offset, if it is not
    one or is not valid.
    """
    view = memoryview(data).cast("B")
    return _parse(lambda offset, count: bytes(view[offset : offset + count]), len(view))


# ---- files ----


def _read_file(path: str, file: str, source: Any) -> tuple[Functions, str | None]:
    """As `parse_specification`, for the file `path`.

    `file`: its path inside the package, which begins the message of errors. `source`: the caller's
    path of the package or file, which errors have as their `path`. Raises StoreError if the file
    cannot be read, and FormatError also if it is truncated meanwhile.
    """
    try:
        with open_regular(path) as stream:

            def read(offset: int, count: int) -> bytes:
                stream.seek(offset)
                data = stream.read(count)
                if len(data) < count:
                    raise error_at(offset, "the file was truncated while it was read")
                return data

            return _parse(read, os.fstat(stream.fileno()).st_size)
    except FormatError as error:
        raise _name_file(error, path, file, source) from None
    except OSError as error:
        raise store_error(error, f"{file}: cannot open", source) from None


def _name_file(error: FormatError, path: str, file: str, source: Any) -> FormatError:
    """Return `error` with a message that begins with `file`, instead of `path`, if it has that.

    `file`: path inside the package. `source`: the caller's path, which becomes the error's `path`.
    """
    text = str(error).removeprefix(f"{path}: ")
    error.args = (f"{file}: {text}",)
    error.path = source
    return error


def is_inside(path: str) -> bool:
    """Return whether a path from a manifest stays inside its package, on every system.

    A path with a backslash, a zero or more than 1024 bytes is false too.
    """
    is_plain = (
        "\\" not in path
        and "\0" not in path
        and len(path.encode(errors="replace")) <= _MOST_NAME_BYTES
    )
    return is_plain and all(part not in ("", ".", "..") for part in path.split("/"))


def _read_manifest(folder: str, source: Any) -> str:
    """Return the path of the specification below Data/ of a package, from its Manifest.json.

    `folder`: the package. `source`: the caller's path of it, for errors. Raises FormatError if the
    manifest is missing or not valid, or names a path outside of the package, and StoreError if it
    cannot be read.
    """
    file = "Manifest.json"
    name = os.path.join(folder, file)
    try:
        with open_regular(name) as stream:
            data = stream.read(_MOST_MANIFEST + 1)
        if len(data) > _MOST_MANIFEST:
            raise FormatError(f"more than {_MOST_MANIFEST} bytes")
        _core.json_check(data, _MANIFEST_DEPTH, source)
        return _root_path(data)
    except FileNotFoundError:
        raise format_error(
            f"{file}: missing: this folder is not a .mlpackage (a compiled .mlmodelc cannot be "
            "read without its metadata.json; use the package that it was made from)",
            source,
        ) from None
    except FormatError as error:
        raise _name_file(error, name, file, source) from None
    except OSError as error:
        raise store_error(error, f"{file}: cannot open", source) from None


def _root_path(data: bytes) -> str:
    """Return the path of the specification from a manifest; FormatError if it has none."""
    try:
        manifest = json.loads(data)
    except ValueError:  # Python limits the digits of integers
        raise FormatError("an integer has too many digits") from None
    root, items = (
        manifest.get(key) if isinstance(manifest, dict) else None
        for key in ("rootModelIdentifier", "itemInfoEntries")
    )
    if not isinstance(root, str) or not isinstance(items, dict):
        text = "no rootModelIdentifier or no itemInfoEntries: not the manifest of a Core ML package"
        raise FormatError(text)
    item = items.get(root)
    path = item.get("path") if isinstance(item, dict) else None
    if not isinstance(path, str):
        raise FormatError("the root model has no entry with a path")
    if not is_inside(path):
        text = "the root model's path is not inside the package"
        raise FormatError(text, expected="a relative path without . or ..", got=shorten(path, 80))
    return path


def read_package(path: Any) -> tuple[Functions, str | None]:
    """As `parse_specification`, for a .mlpackage folder or a .mlmodel file at `path`.

    Names and extensions are ignored. Raises StoreError if a file cannot be opened or read, and
    FormatError also for a folder without a manifest, a manifest that is invalid or refers outside
    the package, and a file that is not regular or is truncated during the read.
    """
    name = os.fsdecode(path)
    try:
        is_folder = stat.S_ISDIR(os.stat(name).st_mode)
    except OSError as error:
        raise store_error(error, f"{name}: cannot open", path) from None
    if not is_folder:
        return _read_file(name, name, path)
    file = f"Data/{_read_manifest(name, path)}"
    return _read_file(os.path.join(name, file), file, path)
