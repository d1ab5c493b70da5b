"""Deltas of TRL, vLLM, slime, Miles and SGLang: golden files, round trips, damage."""

import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from golden.make_deltas import BASES, CHANGES, FOLDER, new_versions

from mlstate.checkpoint import load_file, load_metadata
from mlstate.errors import ChecksumError, CompatibilityError, FormatError
from mlstate.follow._delta import Delta, apply_delta, compare_arrays
from mlstate.follow._formats.checkpoint_delta import (
    read_checkpoint_delta,
    write_checkpoint_delta,
)
from mlstate.follow._formats.numbers import delta_from_numbers, numbers_of
from mlstate.follow._formats.weight_patch import (
    SUFFIXES,
    read_triples,
    read_weight_patch,
    write_triples,
    write_weight_patch,
)

zstandard = pytest.importorskip("zstandard", reason="deltas of checkpoints are compressed")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NAME = "model.proj.weight"


def bases():
    return {name: array.view(BFLOAT16) for name, array in BASES.items()}


def news():
    return {name: array.view(BFLOAT16) for name, array in new_versions().items()}


def sizes():
    return {name: array.size for name, array in BASES.items()}


def encoded_deltas():
    return {name: compare_arrays(base, news()[name]) for name, base in bases().items()}


def golden_patch(name):
    path = FOLDER / name
    return load_file(path), load_metadata(path)


def golden_checkpoint(encoding):
    index = json.loads((FOLDER / f"{encoding}.index.json").read_text(encoding="utf-8"))
    [file] = set(index["weight_map"].values())
    return index, {file: golden_patch(file)}


def check_deltas(deltas):
    """Each delta must have the bytes of mlstate's own, and lead to the new version."""
    assert deltas.keys() == BASES.keys()
    for name, delta in deltas.items():
        expected = encoded_deltas()[name]
        assert delta.gaps.dtype == expected.gaps.dtype
        assert delta.gaps.tobytes() == expected.gaps.tobytes()
        assert delta.values.tobytes() == expected.values.tobytes()
        target = bases()[name].copy()
        apply_delta(target, delta, [])
        assert target.tobytes() == news()[name].tobytes()


def unpacked(array):
    return zstandard.ZstdDecompressor().decompress(array.tobytes(), 1 << 20)


# ---- golden files ----


@pytest.mark.parametrize("file", ["trl_gaps.safetensors", "trl_indices.safetensors"])
def test_golden_patches_of_trl_lead_to_the_new_version(file):
    check_deltas(read_weight_patch(*golden_patch(file), sizes()))


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_golden_checkpoint_deltas_lead_to_the_new_version(encoding):
    result = read_checkpoint_delta(*golden_checkpoint(encoding), bases())
    assert (result.version, result.base_version) == (7, 6)
    check_deltas(result.deltas)


@pytest.mark.parametrize(
    ("file", "encoding", "suffixes"),
    [("trl_gaps.safetensors", "gap_delta", 0), ("trl_indices.safetensors", "raw", 1)],
)
def test_patches_for_trl_have_the_bytes_of_the_golden_files(file, encoding, suffixes):
    tensors, metadata = write_weight_patch(
        encoded_deltas(), 7, encoding=encoding, suffixes=SUFFIXES[suffixes]
    )
    golden_tensors, golden_metadata = golden_patch(file)
    assert metadata == golden_metadata
    assert tensors.keys() == golden_tensors.keys()
    for key, array in tensors.items():
        assert array.dtype == golden_tensors[key].dtype
        assert array.tobytes() == golden_tensors[key].tobytes()


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


def test_vllm_patches_round_trip():
    triples = write_triples(encoded_deltas())
    for name, indices, values in triples:
        assert indices.dtype == np.int32
        assert indices.tolist() == list(CHANGES[name])
        assert values.dtype == BFLOAT16
    fields = [dict(zip(("name", "indices", "values"), triple, strict=True)) for triple in triples]
    check_deltas(read_triples([SimpleNamespace(**patch) for patch in fields], sizes()))


def test_numbers_round_trip_in_any_order():
    random = np.random.default_rng(1)
    for count, elements in ((0, 0), (1, 1), (50, 100), (3, 10**6), (2000, 2000)):
        numbers = random.permutation(elements)[:count]
        values = random.random(count)
        delta = delta_from_numbers("w", numbers, values, elements)
        order = np.argsort(numbers)
        assert numbers_of(delta).tolist() == numbers[order].tolist()
        assert delta.values.tolist() == values[order].tolist()


def test_unchanged_tensors_are_left_out():
    pairs = {name: (base, base.copy()) for name, base in bases().items()}
    index, files = write_checkpoint_delta(7, 6, pairs)
    assert index["weight_map"] == {}
    assert read_checkpoint_delta(index, files, bases()).deltas == {}


# ---- damage ----


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ([0, 5], "beyond the last"),
        ([-1, 2], "beyond the last"),
        ([2, 2], "twice"),
        ([1], "values"),
        ([[0, 1]], "values"),
        ([0.0, 1.0], "values"),
    ],
)
def test_impossible_numbers_are_refused(numbers, match):
    with pytest.raises(FormatError, match=match):
        delta_from_numbers("w", np.array(numbers), np.zeros(2), 5)


def test_damaged_patches_are_refused():
    tensors, metadata = golden_patch("trl_gaps.safetensors")
    index = f"{NAME}.idx"
    short = {key: array for key, array in tensors.items() if key != index}
    for wrong, facts, match in (
        (tensors, metadata | {"sparse": "False"}, "not a sparse weight patch"),
        (tensors, metadata | {"format": "pt"}, "not a sparse weight patch"),
        (tensors, metadata | {"encoding": "nvcomp_cascaded"}, "nvcomp_cascaded"),
        (tensors | {index: tensors[index].astype(np.int32)}, metadata, "uint16 or uint32"),
        (tensors | {index: tensors[index][:-1]}, metadata, "values"),
        (tensors | {index: tensors[index] + np.uint32(9)}, metadata, "beyond the last"),
        (short, metadata, "no partner"),
        (tensors | {"bias": np.zeros(2)}, metadata, "no partner"),
    ):
        with pytest.raises(FormatError, match=match):
            read_weight_patch(wrong, facts, sizes())
    with pytest.raises(CompatibilityError, match="lacks"):
        read_weight_patch(tensors, metadata, {NAME: 70_000})


def test_damaged_vllm_patches_are_refused():
    patch = SimpleNamespace(name="w", indices=np.zeros(1, np.int32), values=np.zeros(1))
    with pytest.raises(FormatError, match="two patches"):
        read_triples([patch, patch], {"w": 4})
    with pytest.raises(CompatibilityError, match="lacks"):
        read_triples([patch], {})


def test_parameters_beyond_int32_are_refused():
    delta = Delta(1 << 31, np.zeros(1, np.uint8), np.zeros(1))
    with pytest.raises(CompatibilityError, match="int32"):
        write_triples({"w": delta})


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
        {"checksum_format": None},
        {"checksum_format": "md5"},
    ):
        wrong = index | {"metadata": index["metadata"] | metadata}
        with pytest.raises(FormatError):
            read_checkpoint_delta(wrong, files, before)
    for metadata in ([], None, "x"):
        with pytest.raises(FormatError):
            read_checkpoint_delta(index | {"metadata": metadata}, files, before)
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
