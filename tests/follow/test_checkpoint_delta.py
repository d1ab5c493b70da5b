"""Deltas of slime and Miles: golden files, round trips, damage."""

import numpy as np
import pytest
from foreign_deltas import NAME, bases, check_deltas, golden_checkpoint, news
from golden.make_deltas import BASES

from mlstate.errors import ChecksumError, CompatibilityError, FormatError
from mlstate.follow._delta import apply_delta
from mlstate.follow._formats.checkpoint_delta import (
    read_checkpoint_delta,
    write_checkpoint_delta,
)

zstandard = pytest.importorskip("zstandard", reason="deltas of checkpoints are compressed")


def unpacked(array):
    return zstandard.ZstdDecompressor().decompress(array.tobytes(), 1 << 20)


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_golden_checkpoint_deltas_lead_to_the_new_version(encoding):
    result = read_checkpoint_delta(*golden_checkpoint(encoding), bases())
    assert (result.version, result.base_version) == (7, 6)
    check_deltas(result.deltas)


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_written_checkpoint_deltas_unpack_to_the_bytes_of_the_golden_files(encoding):
    pairs = {name: (base, news()[name]) for name, base in bases().items()}
    index, files = write_checkpoint_delta(7, 6, pairs, encoding=encoding)
    golden_index, golden_files = golden_checkpoint(encoding)
    assert index["metadata"] == golden_index["metadata"]
    assert index["weight_map"].keys() == golden_index["weight_map"].keys()
    [(tensors, checksums)] = files.values()
    [(golden_tensors, golden_checksums)] = golden_files.values()
    assert checksums == golden_checksums
    for name, packed in tensors.items():
        assert unpacked(packed) == unpacked(golden_tensors[name])
    check_deltas(read_checkpoint_delta(index, files, bases()).deltas)


def test_unchanged_tensors_are_left_out():
    pairs = {name: (base, base.copy()) for name, base in bases().items()}
    index, files = write_checkpoint_delta(7, 6, pairs)
    assert index["weight_map"] == {}
    assert read_checkpoint_delta(index, files, bases()).deltas == {}


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_damaged_checkpoint_deltas_are_refused_and_bases_stay(encoding):
    index, files = golden_checkpoint(encoding)
    [(file, (tensors, checksums))] = files.items()
    before = bases()
    packed = tensors[NAME]
    for metadata in (
        {"delta_encoding": "rle"},
        {"compression_format": "lz4"},
        {"version": 7},
        {"base_version": "-1"},
        {"version": "9" * 5000},
        {"checksum_format": None},
        {"checksum_format": "md5"},
    ):
        wrong = index | {"metadata": index["metadata"] | metadata}
        with pytest.raises(FormatError):
            read_checkpoint_delta(wrong, files, before)
    for metadata in ([], None, "x"):
        with pytest.raises(FormatError):
            read_checkpoint_delta(index | {"metadata": metadata}, files, before)
    for weight_map in ([NAME], None, 3):
        with pytest.raises(FormatError, match="weight_map"):
            read_checkpoint_delta(index | {"weight_map": weight_map}, files, before)
    for damaged in (packed[:-3], packed[:0], np.zeros(50, np.uint8)):
        with pytest.raises(FormatError):
            read_checkpoint_delta(index, {file: (tensors | {NAME: damaged}, checksums)}, before)
    with pytest.raises(FormatError, match="no file has it"):
        read_checkpoint_delta(index, {}, before)
    with pytest.raises(FormatError, match="two files"):
        read_checkpoint_delta(index, files | {"again": files[file]}, before)
    with pytest.raises(ChecksumError, match="another base"):
        read_checkpoint_delta(index, {file: (tensors, {})}, before)
    with pytest.raises(CompatibilityError, match="lacks"):
        read_checkpoint_delta(index, files, {})
    for name, base in before.items():
        assert base.tobytes() == BASES[name].tobytes()


def test_a_delta_for_another_base_is_found_before_it_is_applied():
    wrong = {name: base.copy() for name, base in bases().items()}
    wrong[NAME].view(np.uint16)[10] ^= 1
    for encoding in ("overwrite", "xor"):
        with pytest.raises(ChecksumError, match="another base"):
            read_checkpoint_delta(*golden_checkpoint(encoding), wrong)


def test_an_xor_can_be_applied_twice():
    """A retry of SkyRL's XOR undid the first application."""
    result = read_checkpoint_delta(*golden_checkpoint("xor"), bases())
    target = bases()[NAME].copy()
    for _ in range(2):
        apply_delta(target, result.deltas[NAME], [])
    assert target.tobytes() == news()[NAME].tobytes()


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_random_damage_of_compressed_bytes_raises(encoding):
    index, files = golden_checkpoint(encoding)
    [(file, (tensors, checksums))] = files.items()
    random = np.random.default_rng(4)
    for _ in range(200):
        packed = tensors[NAME].copy()
        packed[random.integers(len(packed))] ^= np.uint8(1 << random.integers(8))
        try:
            result = read_checkpoint_delta(
                index, {file: (tensors | {NAME: packed}, checksums)}, bases()
            )
        except (FormatError, ChecksumError):
            continue
        check_deltas(result.deltas)


def test_an_unknown_encoding_is_not_written():
    pairs = {name: (base, news()[name]) for name, base in bases().items()}
    with pytest.raises(ValueError, match="encoding must be one of overwrite, xor, got 'sum'"):
        write_checkpoint_delta(7, 6, pairs, encoding="sum")


@pytest.mark.parametrize("base", [np.zeros(1, np.uint8), np.zeros(4, np.int32)])
def test_bases_of_another_shape_or_dtype_are_refused(base):
    pairs = {"w": (base, np.ones(4, np.float32))}
    with pytest.raises(CompatibilityError, match="'w' has a base of another shape or dtype"):
        write_checkpoint_delta(2, 1, pairs)
