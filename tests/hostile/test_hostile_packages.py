"""Core ML packages that are false, truncated, endless, or point elsewhere.

Each must be refused with an exception of mlstate, within little time and memory, or be read as a
package that the format allows.
"""

import json
import os
import resource
import time
import warnings

import pytest
from checkpoint_model import flipped
from mlpackage_writer import KV, field, number, spec_bytes, state, write_package

from mlstate.coreml import StateShapeWarning, StateSpecs, state_specs
from mlstate.errors import FormatError, MLStateError, StoreError

SMALL = spec_bytes(
    functions=[("a", [state("kv", (2, 1, 64, 32))]), ("b", [state("kv", (2, 1, 96, 32))])],
    default="a",
)


def read(source):
    """Read the package, or return the exception, which must be one of mlstate."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StateShapeWarning)
            specs = state_specs(source)
    except MLStateError as error:
        assert str(error)
        return error
    assert isinstance(specs, StateSpecs)
    for spec in specs.values():
        assert all(length > 0 for length in spec.shape)
        assert spec.nbytes < 1 << 63
    return specs


def refused(source, text=""):
    error = read(source)
    assert isinstance(error, FormatError), error
    assert text in str(error)
    return error


def test_truncated_at_every_byte(tmp_path):
    required_length = len(SMALL) - len(field(502, b"the program"))  # the program is optional
    for length in range(len(SMALL)):
        if length == required_length:
            assert isinstance(read(SMALL[:length]), StateSpecs)
        else:
            assert refused(SMALL[:length]).offset <= length
    package = write_package(tmp_path / "m", SMALL[:-1])
    assert refused(package, "model.mlmodel: byte ").path == str(package)


def test_every_byte_of_a_file_cut_off(tmp_path):
    file = tmp_path / "m.mlmodel"
    for length in range(0, len(SMALL), 3):
        file.write_bytes(SMALL[:length])
        from_file, from_bytes = read(file), read(SMALL[:length])
        assert type(from_file) is type(from_bytes)
        if isinstance(from_file, FormatError):
            assert from_file.offset == from_bytes.offset


def test_every_bit_flipped():
    for at in range(len(SMALL)):
        for bit in range(8):
            read(flipped(SMALL, at, 1 << bit))


def test_every_byte_set_to_the_extremes():
    for at in range(len(SMALL)):
        for value in (0x00, 0x7F, 0x80, 0xFF):
            changed = bytearray(SMALL)
            changed[at] = value
            read(changed)


@pytest.mark.parametrize("length", [1 << 7, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("tag", [2, 5, 502])
def test_lying_lengths_at_the_top(length, tag):
    refused(number(tag << 3 | 2) + number(length) + b"short", "claims")


@pytest.mark.parametrize("length", [1 << 7, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_lying_lengths_inside(length):
    lie = number(13 << 3 | 2) + number(length) + b"short"
    refused(field(2, lie), "claims")
    lie = field(1, "kv") + number(3 << 3 | 2) + number(length)
    refused(field(2, field(13, lie)), "claims")
    lie = number(1 << 3 | 2) + number(length)
    refused(field(2, field(13, field(1, "kv") + field(3, field(8, field(1, lie))))), "claims")


def test_a_number_that_never_ends():
    refused(b"\xff" * 10_000, "more than 64 bits")
    endless = field(1, b"\xff" * 10_000)
    feature = field(1, "kv") + field(3, field(8, field(1, endless)))
    refused(field(2, field(13, feature)), "more than 64 bits")


@pytest.mark.parametrize("wire_type", [3, 4, 6, 7])
def test_groups_and_unknown_field_types(wire_type):
    refused(number(9 << 3 | wire_type) + SMALL, "wire type")
    refused(field(2, number(9 << 3 | wire_type)), "wire type")


@pytest.mark.parametrize("wire_type", [2, 3])
def test_deep_nesting_uses_no_stack(wire_type):
    if wire_type == 3:  # groups nest, and have no lengths
        refused(number(13 << 3 | 3) * 1_000_000, "wire type 3")
        return
    deep = b""
    for _ in range(2_000):
        deep = field(13, deep)
    error = refused(field(2, deep), "the name of a state is missing")
    assert error.offset < 40


SHAPES = [
    ((2, 1, 0, 32), "dimension 2 is 0"),
    ((2, 1, -1, 32), "dimension 2 is -1"),
    ((-(1 << 63), 1, 1, 1), "dimension 0 is -9223372036854775808"),
    ((1 << 62, 1, 1, 1), "address space"),
    ((1 << 32, 1 << 31, 1, 1), "address space"),
    ((1 << 32, 1 << 32, 1 << 32, 1), "address space"),
    ((1,) * 17, "more than 16 dimensions"),
    ((1,) * 100_000, "more than 16 dimensions"),
    ((), "no shape"),
]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("shape", "text"), SHAPES)
def test_shapes_that_cannot_be(shape, text, packed):
    assert refused(spec_bytes(state("kv", shape, packed=packed)), text).name == "kv"


@pytest.mark.parametrize("dtype", [0, 1, 65553, 131072, (1 << 64) - 1])
def test_data_types_that_are_none(dtype):
    refused(spec_bytes(state("kv", KV, dtype)), f"data type {dtype}")


def test_duplicate_names_and_fields():
    refused(spec_bytes(state("kv", KV), state("kv", KV)), "two states are called kv")
    twice = [("a", []), ("a", [])]
    refused(spec_bytes(functions=twice), "two functions are called a")
    refused(spec_bytes() + field(2, b""), "description appears twice")
    refused(field(2, field(13, field(1, "a") + state("kv", KV))), "name of a state appears twice")


@pytest.mark.parametrize("name", [b"", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"a\0b", b"x" * 1025])
def test_names_that_are_none(name):
    feature = field(1, name) + state("kv", KV)[4:]
    refused(field(2, field(13, feature)), "name of a state")
    refused(field(2, field(20, field(1, name))), "name of a function")


def test_states_outside_functions():
    mixed = field(13, state("kv", KV)) + field(20, field(1, "a"))
    refused(field(2, mixed), "belongs to no function")
    refused(spec_bytes(functions=[("a", [])], default="b"), "default function is not among")


def within(seconds, megabytes, source, text):
    """Refused within little time and memory, whatever sizes the file claims.

    A sanitizer keeps freed blocks for a while, so memory is measured only without one.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    refused(source, text)
    assert time.process_time() - start < seconds
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < megabytes * 1024 or "MLSTATE_UNDER_SANITIZER" in os.environ


def test_huge_counts_cost_little():
    many = b"".join(field(13, state(f"s{i}", (1, 1, 32, 32))) for i in range(50_000))
    within(5, 100, field(2, many), "more than 2048 states")
    many = b"".join(field(20, field(1, f"f{i}")) for i in range(50_000))
    within(5, 100, field(2, many), "more than 1024 functions")
    within(5, 100, field(1, 9) * 500_000, "more than 4096 fields")
    for unneeded in (field(1, ""), field(1, 9)):
        within(5, 100, field(2, unneeded * 1_000_000), "more than 262144 fields")


def test_a_huge_description_is_not_fetched(tmp_path):
    file = tmp_path / "m.mlmodel"
    with file.open("wb") as out:
        out.write(number(2 << 3 | 2) + number(1 << 36))
        out.truncate(out.tell() + (1 << 36))  # sparse: occupies no disk blocks
    within(5, 100, file, "68719476736 bytes")


def test_a_huge_program_is_stepped_over(tmp_path):
    file = tmp_path / "m.mlmodel"
    description = spec_bytes(state("kv", KV))[: -len(field(502, b"the program"))]
    with file.open("wb") as out:
        out.write(description + number(502 << 3 | 2) + number(1 << 36))
        out.truncate(out.tell() + (1 << 36))
    start = time.process_time()
    assert isinstance(read(file), StateSpecs)
    assert time.process_time() - start < 1


# ---- the folder ----


def with_manifest(folder, manifest):
    package = write_package(folder, SMALL)
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    (package / "Manifest.json").write_bytes(text)
    return package


def manifest_of(path):
    return {"itemInfoEntries": {"R": {"path": path}}, "rootModelIdentifier": "R"}


PATHS = [
    "/etc/passwd",
    "../secret",
    "a/../../secret",
    "com.apple.CoreML/../../../secret",
    "..",
    ".",
    "./model",
    "a//b",
    "a/",
    "",
    "a\\..\\b",
    "..\\secret",
    "a\0b",
    "x" * 5000,
    "a/" * 600 + "b",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_manifest_may_not_lead_out_of_the_package(tmp_path, path):
    (tmp_path / "secret").write_bytes(spec_bytes(state("secret", KV)))
    error = refused(with_manifest(tmp_path / "m", manifest_of(path)), "Manifest.json: ")
    assert "not inside the package" in str(error)
    assert error.expected == "a relative path without . or .."


MANIFESTS = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe{\0}\0",
    b'{"rootModelIdentifier": "R", "rootModelIdentifier": "R", "itemInfoEntries": {}}',
    b"[" * 100_000,
    b'{"a":' * 1000,
    b"0," * 10,
    {},
    {"rootModelIdentifier": "R"},
    {"rootModelIdentifier": 3, "itemInfoEntries": {}},
    {"rootModelIdentifier": "R", "itemInfoEntries": []},
    {"rootModelIdentifier": "R", "itemInfoEntries": {"S": {"path": "m"}}},
    {"rootModelIdentifier": "R", "itemInfoEntries": {"R": "m"}},
    {"rootModelIdentifier": "R", "itemInfoEntries": {"R": {}}},
    {"rootModelIdentifier": "R", "itemInfoEntries": {"R": {"path": ["m"]}}},
]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=range(len(MANIFESTS)))
def test_empty_manifests_are_refused(tmp_path, manifest):
    refused(with_manifest(tmp_path / "m", manifest), "Manifest.json: ")


def test_a_huge_manifest_is_not_read(tmp_path):
    package = write_package(tmp_path / "m", SMALL)
    os.truncate(package / "Manifest.json", 1 << 33)
    within(5, 50, package, "Manifest.json: ")


def test_an_integer_with_too_many_digits_is_refused(tmp_path):
    package = write_package(tmp_path / "m", SMALL)
    (package / "Manifest.json").write_text('{"a": %s}' % ("1" * 5000))
    assert refused(package, "Manifest.json: an integer has too many digits").path == str(package)


def test_every_byte_of_a_manifest_flipped(tmp_path):
    package = write_package(tmp_path / "m", SMALL)
    text = (package / "Manifest.json").read_bytes()
    for at in range(len(text)):
        (package / "Manifest.json").write_bytes(flipped(text, at, 0x81))
        read(package)
        (package / "Manifest.json").write_bytes(text[:at])
        refused(package, "Manifest.json: ")


@pytest.mark.parametrize("which", ["Manifest.json", "Data/com.apple.CoreML/model.mlmodel"])
def test_a_folder_or_a_loop_in_place_of_a_file(tmp_path, which):
    package = write_package(tmp_path / "m", SMALL)
    (package / which).unlink()
    (package / which).mkdir()
    assert isinstance(read(package), StoreError)
    (package / which).rmdir()
    (package / which).symlink_to(package / which)
    assert isinstance(read(package), StoreError)


def test_compiled_folder_without_metadata_is_refused(tmp_path):
    (tmp_path / "m.mlmodelc").mkdir()
    refused(tmp_path / "m.mlmodelc", "compiled .mlmodelc cannot be read without its metadata.json")


@pytest.mark.parametrize(
    "junk",
    [b"", b"\0" * 100, b"PK\x03\x04" + b"\0" * 60, b"{}", b"\x89PNG\r\n\x1a\n", b"\x80\x02}q\0."],
)
def test_files_of_other_kinds(tmp_path, junk):
    (tmp_path / "m.mlmodel").write_bytes(junk)
    refused(tmp_path / "m.mlmodel", "m.mlmodel: byte ")


def test_a_path_with_a_nul_is_a_value_error():
    with pytest.raises(ValueError, match="null"):
        state_specs("a\0b")


@pytest.mark.parametrize("array", [b"\x0d\0\0\0\0", b"\x09" + b"\0" * 8])
def test_a_shape_of_the_wrong_type(array):
    feature = field(1, "kv") + field(3, field(8, field(1, array)))
    assert refused(field(2, field(13, feature)), "its shape has wire type").name == "kv"


def test_a_data_type_of_the_wrong_type():
    array = field(1, 32) + field(2, b"float16")
    feature = field(1, "kv") + field(3, field(8, field(1, array)))
    refused(field(2, field(13, feature)), "data type 0")


@pytest.mark.parametrize("wrong", [13, 20, 21])
def test_a_number_in_place_of_a_message(wrong):
    refused(field(2, field(wrong, 1)), "is not of its type")


def test_a_state_without_an_array_type():
    refused(field(2, field(13, field(1, "kv"))), "state kv has no array type")


def test_a_state_limit_of_all_functions():
    functions = [(f"f{i}", [state(f"s{k}", (1, 32)) for k in range(2048)]) for i in range(9)]
    refused(spec_bytes(functions=functions), "more than 16384 states")
