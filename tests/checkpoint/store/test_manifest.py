"""Manifests are read as they were written; any other text is refused."""

import json
import random

import pytest
from json_checksums import renew_checksum

from mlstate import _core
from mlstate.checkpoint._store import manifest as _manifest
from mlstate.checkpoint._store.manifest import IndexRecord, Manifest, Pattern
from mlstate.errors import FormatError

GENERATION = "0123456789abcdef"
# keys and brackets that resemble the list of indexes
METADATA = {"indexes": [{"path": "]}"}], "text": '],"indexes":[\\', "über": [[[]], {"a": 1.5}]}


def record(rank):
    path = f"index/{GENERATION}.{rank}.json"
    return IndexRecord(path, 1000 + rank, f"{rank * 7919:08x}", rank % 5, rank << 40)


def manifest(records, patterns=None, **changed):
    return Manifest(
        GENERATION, 3, "2026-01-01T00:00:00Z", "mlstate", 5, len(records), {"kind": "state"}, None,
        METADATA, tuple(records), patterns,
    )._replace(**changed)  # fmt: skip


def with_patterns(count):
    """Ranks of three patterns in turn, of 2, 0 and 32 groups."""
    ranks = [list(range(number, count, 3)) for number in range(3)]
    patterns = tuple(
        Pattern(each, [[rank * 100 + group for rank in each] for group in range(groups)])
        for each, groups in zip(ranks, [2, 0, 32], strict=True)
    )
    return manifest([record(rank) for rank in range(count)], patterns)


@pytest.mark.parametrize("count", [1, 2, 3, 500])
def test_manifest_round_trips(count):
    for written in (manifest([record(rank) for rank in range(count)]), with_patterns(count)):
        assert _manifest.parse(_manifest.build(written)) == written


def test_a_rank_takes_few_bytes():
    sizes = [len(_manifest.build(manifest([record(7)] * count))) for count in (100, 200)]
    assert sizes[1] - sizes[0] < 40 * 100


WRONG = [None, True, -1, 1.0, 1 << 63, "x", [], {}, "0000000", "0000000G", [0], [1 << 63]]
WRONG += [[True, 1, 2], [1.0, 1, 2], ["1", 1, 2], [-1, 1, 2], [1, 2], [1, 2, 3, 4]]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", ["bytes", "crc32c", "shards", "data_bytes"])
def test_bad_columns_are_refused(name, value):
    document = json.loads(_manifest.build(with_patterns(3)))
    document["indexes"][name] = value
    with pytest.raises(FormatError, match=f'"{name}"'):
        _manifest.parse(renew_checksum(json.dumps(document, separators=(",", ":")).encode()))
    del document["indexes"][name]
    with pytest.raises(FormatError, match=f'"{name}" is missing'):
        _manifest.parse(renew_checksum(json.dumps(document, separators=(",", ":")).encode()))


def patterns(*pairs):
    return [{"ranks": ranks, "parts": parts} for ranks, parts in pairs]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "of the wrong type"),
        ([5], "objects only"),
        ([], "each of 3 ranks once"),
        (patterns(([0, 1], [])), "each of 3 ranks once"),
        (patterns(([0, 1, 2, 3], [])), "each of 3 ranks once"),
        (patterns(([0, 1], []), ([1, 2], [])), "each of 3 ranks once"),
        (patterns(([0, 1, -1], [])), '"ranks" must be from 0'),
        (patterns((["0", 1, 2], [])), '"ranks" must have integers'),
        (patterns((3, [])), '"ranks" is of the wrong type'),
        (patterns(([0, 1, 2], [[1, 2]])), '"parts" must be a list of 3'),
        (patterns(([0, 1, 2], [[1, 2, True]])), '"parts" must have integers'),
        (patterns(([0, 1, 2], [[1, 2, 1 << 63]])), '"parts" must be from 0'),
        (patterns(([0, 1, 2], [5])), '"parts" must be a list of 3'),
        (patterns(([0, 1, 2], 5)), '"parts" is of the wrong type'),
        (patterns(([0, 1, 2], [[0] * 3] * 33)), "33 groups, more than 32"),
        ([{"parts": []}], '"ranks" is missing'),
        ([{"ranks": [0, 1, 2]}], '"parts" is missing'),
    ],
)
def test_bad_patterns_are_refused(value, message):
    document = json.loads(_manifest.build(with_patterns(3)))
    document["patterns"] = value
    with pytest.raises(FormatError, match=message):
        _manifest.parse(renew_checksum(json.dumps(document, separators=(",", ":")).encode()))


def nested(depth):
    return '"sequence": 3, "x": ' + "[" * depth + "]" * depth


def test_texts_that_are_not_such_json_are_refused():
    text = _manifest.build(with_patterns(3)).decode()
    for old, new, message in [
        ('"world_size": 3', '"world_size": 4', "digits for 4 ranks"),
        ('"sequence": 3', '"sequence": 3,"sequence": 3', "twice"),
        ('"sequence": 3', '"sequence": NaN', "byte [0-9]+: JSON has 'N'"),
        ('"sequence": 3', '"sequence": "\\ud800"', "surrogate"),
        ('"sequence": 3', '"sequence": ' + "9" * 5000, "not a valid manifest"),
        ('"sequence": 3', nested(128), "byte [0-9]+: .*nested"),
        (
            '"format_version": 2',
            '"format_version": 1',
            "version is 1, but this mlstate reads only 2 and 3",
        ),
        (
            '"format_version": 2',
            '"format_version": 4',
            "version is 4, but this mlstate reads only 2 and 3",
        ),
    ]:
        assert text.count(old) == 1
        with pytest.raises(FormatError, match=message) as caught:
            _manifest.parse(renew_checksum(text.replace(old, new).encode()), "here")
        assert caught.value.path == "here"
    _manifest.parse(renew_checksum(text.replace('"sequence": 3', nested(127)).encode()))
    with pytest.raises(FormatError, match="JSON ends, expected a value"):
        _core.json_check(b"", 1, "here")
    for wrong in (("text", 1, "here"), (b"1", "1", "here"), (b"1", -1, "here")):
        with pytest.raises((TypeError, OverflowError)):
            _core.json_check(*wrong)


def test_any_bytes_are_a_manifest_or_refused():
    good = _manifest.build(with_patterns(3))
    draw = random.Random(1)
    for _ in range(2000):
        at = draw.randrange(22, len(good))
        bad = bytearray(good)
        bad[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        try:
            manifest_read = _manifest.parse(renew_checksum(bytes(bad)), "here")
        except FormatError as error:
            assert error.path == "here"
            assert error.offset is None or error.offset <= len(bad)
        else:
            assert len(manifest_read.indexes) == manifest_read.world_size == 3
