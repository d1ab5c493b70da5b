"""Read the protobuf wire format of untrusted bytes; errors report the offset in the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Collection

VARINT, BYTES = 0, 2  # wire types
HEADER_BYTES = 20  # the longest header of a field: two numbers
_FIXED = {1: 8, 5: 4}  # bytes of a number, by wire type
_VARINT_BYTES = 10
_MOST_FIELDS = 1 << 18  # of all messages of a reader, far above real models


class Message(NamedTuple):
    """The bytes of a message, and their offset in the file."""

    data: bytes | memoryview
    offset: int


class Field(NamedTuple):
    """One field of a message.

    Attributes
    ----------
    number, wire_type : int
        Field number and wire type.
    value : int
        The number; the length if the wire type is `BYTES`.
    payload : Message
        The bytes if the wire type is `BYTES`, else empty.
    offset : int
        Offset of the field in the file.
    """

    number: int
    wire_type: int
    value: int
    payload: Message
    offset: int


def error_at(offset: int, text: str, **fields: Any) -> FormatError:
    """Return the FormatError for the byte `offset` of a file; `fields`: others of the error."""
    return FormatError(f"byte {offset}: {text}", offset=offset, **fields)


def length_error(field: int, offset: int, length: int, left: int, text: str) -> FormatError:
    """Return the error for a field that claims more bytes than its message has left.

    `field`: its number. `offset`: byte of the file at which it begins. `length`, `left`: bytes that
    it claims and that are left. `text`: describes these, and ends the message.
    """
    claim = f"field {field} claims {length} bytes, but {text}"
    return error_at(offset, claim, expected=f"at most {left} bytes", got=f"{length} bytes")


def read_varint(message: Message, at: int) -> tuple[int, int]:
    """Return the number that is stored at byte `at` of a message, and the index of the byte after.

    Raises FormatError if the data ends inside the number, or if it has more than 64 bits.
    """
    if at < len(message.data) and message.data[at] < 0x80:  # nearly all are this short
        return message.data[at], at + 1
    value = 0
    for i in range(_VARINT_BYTES):
        if at + i >= len(message.data):
            raise error_at(message.offset + at, "the data ends inside a number")
        byte = message.data[at + i]
        if i == _VARINT_BYTES - 1 and byte > 1:
            break
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:  # overlong forms are allowed: writers reserve room with them
            return value, at + i + 1
    raise error_at(message.offset + at, "a number of more than 64 bits")


def read_header(message: Message, at: int) -> tuple[int, int, int, int]:
    """Return field number, wire type and value of the field at byte `at`, and the byte after them.

    The value of a field of bytes is their number; the bytes follow. Field number 0 is invalid, so a
    run of zeros (a hole in a file) is refused. Groups are refused because they end at a matching
    tag: skipping one would need a stack. Raises FormatError for these, and if the data ends inside
    the field's numbers.
    """
    start = message.offset + at
    tag, at = read_varint(message, at)
    number, wire_type = tag >> 3, tag & 7
    if tag >> 32 or not number:  # a tag has at most 32 bits
        raise error_at(start, f"no field can have the tag {tag}")
    if wire_type in (VARINT, BYTES):
        value, at = read_varint(message, at)
    elif wire_type in _FIXED:
        end = at + _FIXED[wire_type]
        if end > len(message.data):
            raise error_at(message.offset + at, "the data ends inside a number")
        value, at = int.from_bytes(message.data[at:end], "little"), end
    else:
        kind = f"{wire_type} (a group)" if wire_type in (3, 4) else str(wire_type)
        text = f"field {number} has wire type {kind}, which a Core ML specification does not use"
        raise error_at(start, text)
    return number, wire_type, value, at


class Fields:
    """Fields of a message by number; others are allowed, since the format grows."""

    def __init__(
        self, message: Message, numbers: Collection[int], room: list[int] | None = None
    ) -> None:
        """Read all fields of `message`, and keep those with one of `numbers`.

        `room`: a list of one item, the number of fields that may follow, nested ones too; all
        messages of a file share and lower it. None: a new one. Raises FormatError for a message
        that is not valid, or has too many fields.
        """
        self.offset = message.offset
        self._room = room or [_MOST_FIELDS]
        self._fields: dict[int, list[Field]] = {number: [] for number in numbers}
        at = 0
        while at < len(message.data):
            number, wire_type, value, end = read_header(message, at)
            start, length = end, value if wire_type == BYTES else 0
            left = len(message.data) - start
            offset = message.offset + at
            if length > left:
                raise length_error(number, offset, length, left, f"{left} are left")
            self._room[0] -= 1
            if self._room[0] < 0:
                raise error_at(offset, f"more than {_MOST_FIELDS} fields")
            at = start + length
            if number in self._fields:
                payload = Message(message.data[start:at], message.offset + start)
                self._fields[number].append(Field(number, wire_type, value, payload, offset))

    def of(self, number: int) -> list[Field]:
        """Return the fields with a number, in order."""
        return self._fields[number]

    def messages(self, number: int, label: str) -> list[Message]:
        """Return the payloads of the fields with a number; `label` names them in errors.

        Raises FormatError if one of them is a number.
        """
        for field in self.of(number):
            if field.wire_type != BYTES:
                raise error_at(field.offset, f"{label} is not of its type")
        return [field.payload for field in self.of(number)]

    def only(self, number: int, label: str) -> Message | None:
        """Return the payload of the only field with a number; None if there is none.

        `label` names it in errors. Raises FormatError for a repeated field: protobuf merges the
        messages or uses the last name, no converter writes one, and attackers exploit readers that
        disagree about a file.
        """
        messages = self.messages(number, label)
        if len(messages) > 1:
            raise error_at(self.of(number)[1].offset, f"{label} appears twice")
        return messages[0] if messages else None

    def open(self, message: Message, numbers: Collection[int]) -> Fields:
        """Return the fields of a nested message that have the given numbers."""
        return Fields(message, numbers, self._room)
