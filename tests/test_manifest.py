"""A manifest's list of indexes is read by the core, and everything else of it as before."""

import json
import random

import numpy as np
import pytest

from mlstate import _core, _manifest
from mlstate._manifest import IndexRecord, Manifest, Pattern
from mlstate.errors import FormatError

GENERATION = "0123456789abcdef"
# keys and brackets that are not those of the list
METADATA = {"indexes": [{"path": "]}"}], "text": '],"indexes":[\\', "über": [[[]], {"a": 1.5}]}


def record(rank, *more):
    return IndexRecord(
        f"index/{GENERATION}.{rank}.json", 1000 + rank, f"{rank * 7919:08x}", rank % 5, rank << 40,
        *more,
    )  # fmt: skip


def manifest(records, patterns=None, **changed):
    return Manifest(
        GENERATION, 3, "2026-01-01T00:00:00Z", "mlstate", 5, len(records), {"kind": "state"}, None,
        METADATA, tuple(records), patterns,
    )._replace(**changed)  # fmt: skip


def sealed(text):
    """The same text with a seal that is right."""
    start = b'{"checksum":"'
    return _core.seal(start + b"0" * 8 + text[len(start) + 8 :])


def with_patterns(count):
    """Ranks of three patterns in turn, of 2, 0 and 32 parts."""
    groups = [2, 0, 32]
    patterns = tuple(Pattern(f"{n}" * 64, "0" * 8 * n) for n in range(3))
    made = [
        record(rank, rank % 3, tuple(rank * 100 + i for i in range(groups[rank % 3])))
        for rank in range(count)
    ]
    return manifest(made, patterns)


@pytest.mark.parametrize("count", [1, 2, 3, 500])
def test_what_was_written_is_read(count):
    for written in (manifest([record(rank) for rank in range(count)]), with_patterns(count)):
        read = _manifest.parse(_manifest.build(written))
        assert read._replace(indexes=()) == written._replace(indexes=())
        assert tuple(read.indexes) == written.indexes
        assert len(read.indexes) == count
        assert read.indexes[count - 1] == written.indexes[count - 1]
        with pytest.raises(IndexError):
            read.indexes[count]


def test_ranks_of_a_pattern_and_their_parts():
    written = with_patterns(100)
    read = _manifest.parse(_manifest.build(written))
    for number, groups in enumerate([2, 0, 32]):
        ranks, parts = read.indexes.of_pattern(number)
        assert ranks.tolist() == list(range(number, 100, 3))
        assert parts.shape == (len(ranks), groups)
        for rank, row in zip(ranks.tolist(), parts.tolist(), strict=True):
            assert tuple(row) == written.indexes[rank].parts
        assert (ranks.dtype, parts.dtype) == (np.uint64, np.uint64)
    assert [len(x) for x in read.indexes.of_pattern(3)] == [0, 0]


def changes(document):
    """Values that stand in for those of the list, and members that are missing."""
    wrong = [None, True, -1, 0, 1.0, 1 << 63, "x", [], {}, "00000000", [0], [1 << 63], [True]]
    for rank, listed in enumerate(document["indexes"]):
        for key in listed:
            for value in [*wrong, document["indexes"][rank - 1][key], list(range(33))]:
                yield rank, key, value
            yield rank, key, changes  # none at all


def test_the_core_refuses_what_is_refused_and_nothing_else():
    """Each value of a list is changed; who says what is wrong is the reader in Python."""
    source = with_patterns(4)
    text = _manifest.build(source)
    refused = taken = 0
    for rank, key, value in changes(json.loads(text)):
        document = json.loads(text)
        if value is changes:
            del document["indexes"][rank][key]
        else:
            document["indexes"][rank][key] = value
        changed = json.dumps(document, separators=(",", ":")).encode()
        try:
            read = _manifest.parse(sealed(changed))
        except FormatError as error:
            refused += 1
            assert "is not as it should be" not in str(error), (rank, key, value)
        else:
            taken += 1
            again = read.indexes[rank]._asdict()
            assert list(again[key]) == value if key == "parts" else again[key] == value
    assert refused > 300
    assert taken > 20


def test_a_list_that_was_cut_out_hides_nothing():
    """The rest is still checked: its grammar, its keys, and how many ranks it states."""
    text = _manifest.build(with_patterns(3))
    for old, new, what in [
        (b'"world_size": 3', b'"world_size": 4', "3 indexes for 4 ranks"),
        (b'"sequence": 3', b'"sequence": 3,"sequence": 3', "twice"),
        (b'"sequence": 3', b'"sequence": NaN', "byte [0-9]+: JSON has 'N'"),
        (b'"sequence": 3', b'"sequence": "\\ud800"', "surrogate"),
        (b'"sequence": 3', b'"sequence": ' + b"9" * 5000, "no manifest"),
        (b'"patterns": [', b'"patterns": [5,', "no object"),
        (b'"format_version": 1', b'"format_version": 2', "this mlstate reads 1"),
    ]:
        assert text.count(old) == 1
        with pytest.raises(FormatError, match=what):
            _manifest.parse(sealed(text.replace(old, new)))


def test_any_bytes_are_a_list_or_none():
    good = _manifest.build(with_patterns(3))
    draw = random.Random(1)
    for _ in range(2000):
        at = draw.randrange(len(good))
        bad = bytearray(good)
        bad[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        try:
            found = _core.manifest_indexes(bytes(bad), "here")
        except FormatError as error:
            assert error.path == "here"
            assert error.offset <= len(bad)
        else:
            assert found is None or len(found[2]) == 3
    with pytest.raises(FormatError, match="JSON ends where a value"):
        _core.manifest_indexes(b"", "here")
    assert _core.manifest_indexes(b"{}", "here") is None
    with pytest.raises(TypeError):
        _core.manifest_indexes("text", "here")
