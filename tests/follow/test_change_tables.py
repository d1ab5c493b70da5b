"""Tables of versions by columns: wrong tables are refused, the earlier form is read."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from follow_tables import encode_by_tensor, pack, unpack
from golden import make_follow as golden

from mlstate.errors import FormatError
from mlstate.follow import Follower, Publisher, _publisher
from mlstate.follow._version import encode_changes

GOLDEN = Path(__file__).parents[1] / "golden"
HUGE = (1 << 64) - 1
NAME, PART, UNIT, GAPS, VALUES = 0, 4, 6, 7, 8  # columns


def model_of(step):
    model = {"a": np.arange(12.0).reshape(3, 4), "größe": np.zeros(300, np.int16)}
    model["a"][0, :step] = -1
    model["größe"][1 : step * 3] = step
    return model


def encoder(change):
    """An `encode_changes` that changes the table."""

    def encode_wrong(changes, rank):
        table = unpack(encode_changes(changes, rank))
        change(table)
        return pack(table)

    return encode_wrong


def put(row, column, number):
    def change(table):
        table["columns"][column, row] = number

    return change


def member(name, value):
    def change(table):
        table[name] = value(table[name]) if callable(value) else value

    return change


def swap_streams(table):  # as many bytes in all, but other ranges
    columns = table["columns"]
    columns[VALUES] = columns[VALUES][::-1].copy()


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (put(0, NAME, HUGE), FormatError, "bytes of a name: 18446744073709551615, but at most 8"),
        (put(0, PART, 1), FormatError, "'a': part 1 of 1 does not exist"),
        (member("columns", lambda c: c[:, :0]), FormatError, "0 rows use 0 of 8 bytes of names"),
        (member("names", lambda n: n ^ 128), FormatError, "the name of row 0 is not UTF-8"),
        (
            member("shapes", lambda s: s[:0]),
            FormatError,
            "'a': lengths of a shape: 2, but at most 0",
        ),
        (
            member("gaps", lambda g: np.append(g, np.uint8(0))),
            FormatError,
            "of [14] bytes of gaps and",
        ),
        (member("values", lambda v: np.append(v, np.uint8(0))), FormatError, "of 1?[13] of values"),
        (member("values", None), FormatError, "values is not an array of uint8"),
        (member("dtypes", ["float64", "V8"]), FormatError, "dtype V8 is not supported"),
        (member("dtypes", 5), FormatError, "int"),
        (member("dtypes", [["float64"], "int16"]), FormatError, "unhashable type"),
        (
            member("layouts", [[[0, 10**12], [0, 10**12], ["flat", 2]]]),
            FormatError,
            "more parts than can be counted",
        ),
        (member("layouts", [[[0, 1 << 80]]]), FormatError, "parts"),
        (member("layouts", [[[0, 0]]]), FormatError, "into 1 part or more"),
        (member("layouts", None), FormatError, "NoneType"),
        (member("layouts", [[[0, 3]]]), FormatError, "'a': the parts are not one tensor"),
    ],
)
def test_a_wrong_table_is_refused_and_keeps_the_version(
    tmp_path, monkeypatch, change, error, reason, steps
):
    publisher, into = Publisher(tmp_path / "w"), model_of(0)
    follower = Follower(tmp_path / "w", into=into)
    if steps == 2:
        publisher.publish(0, model_of(0))
        follower.advance()
    monkeypatch.setattr(_publisher, "encode_changes", encoder(change))
    publisher.publish(1, model_of(1))
    with pytest.raises(error, match=reason):
        follower.advance()
    assert follower.version == (0 if steps == 2 else None)
    assert all(np.array_equal(into[name], array) for name, array in model_of(0).items())


@pytest.mark.parametrize(
    "change",
    [
        put(0, UNIT, 0),
        put(0, GAPS, 0),
        put(0, UNIT, 2),
        put(1, VALUES, 3),
        swap_streams,
    ],
)
def test_streams_of_other_rows_are_refused(tmp_path, monkeypatch, change):
    publisher, into = Publisher(tmp_path / "w"), model_of(0)
    follower = Follower(tmp_path / "w", into=into)
    publisher.publish(0, model_of(0))
    follower.advance()
    monkeypatch.setattr(_publisher, "encode_changes", encoder(change))
    publisher.publish(1, model_of(1))
    with pytest.raises(FormatError):
        follower.advance()
    assert all(np.array_equal(into[name], array) for name, array in model_of(0).items())


@pytest.mark.parametrize(
    ("name", "value", "error", "reason"),
    [
        ("table", "x", FormatError, "table are not a vector"),
        (
            "table",
            lambda t: t.astype(np.int64),
            FormatError,
            "columns is not an array of uint64 with rank 2",
        ),
        ("table", lambda t: t[:-1], FormatError, "the table has 21 numbers instead of 22"),
        (
            "table",
            lambda t: np.append(t, t[:1]),
            FormatError,
            "the table has 23 numbers instead of 22",
        ),
        ("table", lambda t: t.reshape(2, -1), FormatError, "table are not a vector"),
        ("table", lambda t: t[::-1].copy(), FormatError, "the table has another CRC32C"),
        ("crc32c", None, FormatError, "the table has another CRC32C"),
        ("rows", -1, FormatError, "numbers instead of"),
        ("rows", 1 << 80, FormatError, "numbers instead of"),
        ("rows", 2.5, FormatError, "numbers instead of"),
        ("rows", None, FormatError, "NoneType"),
        ("lengths", 4, FormatError, "the table has 22 numbers instead of 23"),
        ("name_bytes", 7, FormatError, "bytes of a name: 7, but at most 6"),
        ("name_bytes", -8, FormatError, "numbers instead of"),
        ("name_bytes", "8", FormatError, "str"),
    ],
)
def test_a_wrong_member_is_refused(tmp_path, monkeypatch, name, value, error, reason):
    def encode_wrong(changes, rank):
        table = encode_changes(changes, rank)
        table[name] = value(table[name]) if callable(value) else value
        return table

    publisher = Publisher(tmp_path / "w")
    monkeypatch.setattr(_publisher, "encode_changes", encode_wrong)
    publisher.publish(0, model_of(0))
    with pytest.raises(error, match=reason):
        Follower(tmp_path / "w", into=model_of(0)).advance()


def test_a_version_needs_no_file_of_an_earlier_delta(tmp_path):
    publisher, into = Publisher(tmp_path / "w"), model_of(0)
    publisher.publish(0, model_of(0))
    follower = Follower(tmp_path / "w", into=into)
    follower.advance()
    before = {path.name for path in (tmp_path / "w" / "states").iterdir()}
    publisher.publish(1, model_of(1))
    for name in before:  # of the anchor
        (tmp_path / "w" / "states" / name).unlink()
    assert follower.advance() == 1


def test_two_rows_with_one_name_are_refused(tmp_path, monkeypatch):
    def name_twice(table):
        table["names"] = np.frombuffer(b"aa", np.uint8)

    publisher = Publisher(tmp_path / "w")
    monkeypatch.setattr(_publisher, "encode_changes", encoder(name_twice))
    publisher.publish(0, {"a": np.zeros(3), "b": np.zeros(3)})
    with pytest.raises(FormatError, match="'a': the parts are not one tensor"):
        Follower(tmp_path / "w", into={"a": np.zeros(3)}).advance()


@pytest.mark.parametrize("start", [None, 0, 1])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("form", ["follow", "follow_columns"])
def test_a_golden_folder_of_each_form_is_read(tmp_path, start, step, form):
    folder = shutil.copytree(GOLDEN / form, tmp_path / "w")
    into = {name: np.zeros_like(array) for name, array in golden.model(0).items()}
    follower = Follower(folder, into=into)
    if start is not None:
        follower.advance(start)
    assert follower.advance(step) == step
    for name, array in golden.model(step).items():
        assert into[name].tobytes() == array.tobytes(), name
    follower.verify()


def test_versions_of_both_forms_follow_each_other(tmp_path, monkeypatch):
    publisher, into = Publisher(tmp_path / "w"), model_of(0)
    follower = Follower(tmp_path / "w", into=into)
    for step in range(5):
        encode = encode_by_tensor if step % 2 else encode_changes
        monkeypatch.setattr(_publisher, "encode_changes", encode)
        publisher.publish(step, model_of(step))
        if step != 2:
            assert follower.advance() == step
    assert all(np.array_equal(into[name], array) for name, array in model_of(4).items())


def test_streams_that_are_not_aligned_are_applied(tmp_path):
    model = {f"w{number}": np.zeros(999, dtype) for number, dtype in enumerate("bdhfbF")}
    into = {name: array.copy() for name, array in model.items()}
    publisher, follower = Publisher(tmp_path / "w"), Follower(tmp_path / "w", into=into)
    publisher.publish(0, model)
    follower.advance()
    for number, array in enumerate(model.values()):
        array[number :: 300 + number] = number + 1
    assert publisher.publish(1, model) == "delta"
    assert follower.advance() == 1
    assert all(np.array_equal(into[name], array) for name, array in model.items())
