"""Merged indexes: reading indexes of any writer, and the arrays made from them."""

import json

import numpy as np
import pytest
from checkpoint_model import same
from index_tables import records_of, tables_of
from json_checksums import START, renew_checksum
from rank_threads import outcomes

import mlstate
from mlstate import _core
from mlstate.checkpoint import Layout, Shard
from mlstate.checkpoint._store.open_path import open_files

WHOLE = (None, 0, 0)


@pytest.fixture
def state():
    rng = np.random.default_rng(3)
    arrays = {f"block.{i}.weight": rng.random(10 + 3 * i, np.float32) for i in range(40)}
    return {**arrays, "scalar": np.float64(2).reshape(()), "empty": np.zeros((0, 3), np.int8)}


@pytest.fixture
def saved(tmp_path, state):
    """A checkpoint's folder and the text of its index."""
    folder = tmp_path / "ckpt"
    mlstate.save(folder, state)
    [record] = open_files(folder).read_manifest().indexes
    return str(folder), (folder / record.path).read_bytes()


def load(merged, folder, keys, *, verify=True, progress=None):
    return merged.load(folder, 0, keys, WHOLE, verify, False, progress)


def merged_of(text):
    return _core.MergedIndex((text,), ("index/x.json",))


def test_an_index_that_another_program_wrote_reads_the_same(saved, state):
    folder, text = saved
    members = json.loads(text)
    del members["checksum"]
    members = records_of(members)
    members["shards"].reverse()
    members = tables_of(members)
    expected = merged_of(text)
    for indent in (None, 1):
        body = json.dumps(members, indent=indent)[1:]
        other = merged_of(renew_checksum(START + b"," + body.encode()))
        assert other.tensors() == expected.tensors()
        assert other.shards() == expected.shards()
        assert other.files() == expected.files()
        assert same(state, load(other, folder, other.keys(0)))


def test_wrong_index_value_is_reported_with_tensor_and_offset(saved):
    _, text = saved
    wrong = renew_checksum(text.replace(b'"shape":"10;13;', b'"shape":"10;14;', 1))
    with pytest.raises(mlstate.FormatError, match="bytes") as caught:
        merged_of(wrong)
    assert caught.value.name == "block.1.weight"
    column = wrong.index(b'"bytes":"40,')
    assert caught.value.offset == column + len('"bytes":"40,')
    assert (caught.value.expected, caught.value.got) == ("56", "52")
    assert wrong[caught.value.offset :].startswith(b"52,")


def test_indexes_that_disagree_name_the_later_one(tmp_path):
    def save(group):
        shard = Shard(np.ones(2, "f4"), Layout.rows(3), group.rank, shape=(6,))
        mlstate.save(tmp_path, {"w": shard}, group=group)

    outcomes(3, save)
    records = open_files(tmp_path).read_manifest().indexes
    texts = [(tmp_path / record.path).read_bytes() for record in records]
    paths = tuple(str(tmp_path / record.path) for record in records)
    assert _core.MergedIndex(tuple(texts), paths).keys(0) == ["w"]
    texts[1] = renew_checksum(texts[1].replace(b'"F32"', b'"I32"'))
    with pytest.raises(mlstate.FormatError, match="shard of rank 0 and one of rank 1") as caught:
        _core.MergedIndex(tuple(texts), paths)
    assert (caught.value.path, caught.value.name) == (paths[1], "w")
    assert str(caught.value).startswith(f"{records[1].path}: ")


@pytest.mark.parametrize("verify", [False, True])
def test_a_key_that_is_asked_for_twice_is_one_array(saved, state, verify):
    folder, text = saved
    keys = ["block.3.weight", "scalar", "block.3.weight"]
    arrays = load(merged_of(text), folder, keys, verify=verify)
    assert list(arrays) == ["block.3.weight", "scalar"]
    assert same({key: state[key] for key in keys}, arrays)


def test_arrays_are_in_the_order_of_the_keys(saved, state):
    folder, text = saved
    keys = sorted(state, reverse=True)
    assert list(load(merged_of(text), folder, keys)) == keys


def test_progress_error_frees_the_arrays(saved):
    folder, text = saved
    merged = merged_of(text)

    def stop(count):
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        load(merged, folder, merged.keys(0), progress=stop)
