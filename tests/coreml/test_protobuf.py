"""The reader of the protobuf wire format: values, bounds, and offsets in errors."""

import pytest

from mlstate.coreml import _protobuf as protobuf
from mlstate.coreml._protobuf import BYTES, VARINT, Fields, Message
from mlstate.errors import FormatError


def message(data):
    return Message(data, 100)


def refused(call, *arguments):
    with pytest.raises(FormatError) as caught:
        call(*arguments)
    return caught.value


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x05", 5),
        (b"\xac\x02", 300),
        (b"\xff" * 9 + b"\x01", (1 << 64) - 1),
        (b"\x85\x80\x00", 5),  # overlong
    ],
)
def test_numbers_of_every_length_are_read(data, value):
    assert protobuf.read_varint(message(data), 0) == (value, len(data))


@pytest.mark.parametrize("length", range(10))
def test_a_truncated_number_is_refused(length):
    error = refused(protobuf.read_varint, message(b"\xff" * length), 0)
    assert str(error) == "byte 100: the data ends inside a number" and error.offset == 100


@pytest.mark.parametrize("data", [b"\xff" * 10 + b"\x01", b"\xff" * 9 + b"\x02"])
def test_a_number_over_64_bits_is_refused(data):
    error = refused(protobuf.read_varint, message(data), 0)
    assert str(error) == "byte 100: a number of more than 64 bits"


def test_every_field_type_is_read():
    data = b"\x08\x2a\x11\1\2\3\4\5\6\7\x08\x1a\x03xyz\x25\1\0\0\x80"
    fields = Fields(message(data), range(6))
    (number,), (fixed64,), (text,), (fixed32,) = (fields.of(i) for i in (1, 2, 3, 4))
    assert (number.wire_type, number.value, number.offset) == (VARINT, 42, 100)
    assert (fixed64.value, fixed64.offset) == (0x0807060504030201, 102)
    assert (text.wire_type, text.payload) == (BYTES, Message(b"xyz", 113))
    assert fixed32.value == 0x80000001
    assert fields.of(5) == []


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x0b\x0c", "byte 100: field 1 has wire type 3 (a group), which"),
        (b"\x0e\x00", "byte 100: field 1 has wire type 6, which"),
        (b"\x00\x00", "byte 100: no field can have the tag 0"),
        (b"\xf8\xff\xff\xff\x10\x00", "byte 100: no field can have the tag"),
        (b"\x09\1\2\3\4\5\6\7", "byte 101: the data ends inside a number"),
        (b"\x0d\1\2\3", "byte 101: the data ends inside a number"),
        (b"\x0a\x04xyz", "byte 100: field 1 claims 4 bytes, but 3 are left"),
    ],
)
def test_invalid_fields_are_refused(data, text):
    error = refused(Fields, message(data), [1])
    assert str(error).startswith(text)


def test_an_inner_message_stays_inside_the_outer_one():
    outer = Fields(message(b"\x0a\x02\x0a\x03zzz"[:4]), [1])
    error = refused(outer.open, outer.of(1)[0].payload, [1])
    assert error.offset == 102 and error.expected == "at most 0 bytes"


def test_a_header_is_read_without_its_payload():
    data = b"\xb2\x1f\x80\x80\x80\x80\x04"
    assert protobuf.read_header(message(data), 0) == (502, BYTES, 1 << 30, 7)


def test_a_repeated_or_wrong_field_is_not_the_only_one():
    fields = Fields(message(b"\x08\x01\x12\x02hi"), [1, 2, 5])
    assert fields.only(2, "a name") == Message(b"hi", 104)
    assert fields.only(5, "a name") is None
    assert str(refused(fields.only, 1, "a name")) == "byte 100: a name is not of its type"
    twice = Fields(message(b"\x12\x01h\x12\x01i"), [2])
    assert str(refused(twice.only, 2, "a name")) == "byte 103: a name appears twice"


def test_the_number_of_fields_is_limited(monkeypatch):
    monkeypatch.setattr(protobuf, "_MOST_FIELDS", 3)
    fields = Fields(message(b"\x08\x01\x12\x02\x08\x01"), [2])
    fields.open(fields.of(2)[0].payload, [])  # the third field
    error = refused(fields.open, fields.of(2)[0].payload, [])
    assert "more than 3 fields" in str(error)
