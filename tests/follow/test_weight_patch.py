"""Patches of TRL and vLLM: golden files, round trips, damage."""

from types import SimpleNamespace

import numpy as np
import pytest
from foreign_deltas import BFLOAT16, NAME, check_deltas, encoded_deltas, golden_patch, sizes
from golden.make_deltas import CHANGES

from mlstate.errors import CompatibilityError, FormatError
from mlstate.follow._delta import Delta
from mlstate.follow._formats.numbers import delta_from_numbers, numbers_of
from mlstate.follow._formats.weight_patch import (
    SUFFIXES,
    read_patches,
    read_weight_patch,
    write_patches,
    write_weight_patch,
)


@pytest.mark.parametrize("file", ["trl_gaps.safetensors", "trl_indices.safetensors"])
def test_golden_patches_of_trl_lead_to_the_new_version(file):
    check_deltas(read_weight_patch(*golden_patch(file), sizes()))


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


def shapes():
    return {name: (size,) for name, size in sizes().items()}


def test_vllm_patches_round_trip():
    deltas = encoded_deltas()
    deltas[NAME].values[0] = 3  # instead of the NaN
    patches = []
    for name, indices, values, shape in write_patches(deltas, shapes()):
        assert indices.dtype == np.int32
        assert indices.tolist() == list(CHANGES[name])
        assert values.dtype == BFLOAT16
        patches.append(SimpleNamespace(name=name, indices=indices, values=values, full_shape=shape))
    for name, delta in read_patches(patches, sizes()).items():
        assert delta.gaps.tobytes() == deltas[name].gaps.tobytes()
        assert delta.values.tobytes() == deltas[name].values.tobytes()


def test_golden_triples_without_a_shape_lead_to_the_new_version():
    patches = [
        SimpleNamespace(
            name=name,
            indices=np.array(list(changes), np.int64),
            values=np.array(list(changes.values()), np.uint16).view(BFLOAT16),
        )
        for name, changes in CHANGES.items()
    ]
    check_deltas(read_patches(patches, sizes()))


def test_patches_that_vllm_refuses_are_not_written():
    with pytest.raises(CompatibilityError, match="a NaN"):
        write_patches(encoded_deltas(), shapes())
    delta = Delta(4, np.zeros(1, np.uint8), np.ones(1, np.int8))
    with pytest.raises(CompatibilityError, match="dtype int8"):
        write_patches({"w": delta}, {"w": (4,)})


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
        (short, metadata, "w.*is missing"),
        (tensors | {"bias": np.zeros(2)}, metadata, "bias.*is neither"),
    ):
        with pytest.raises(FormatError, match=match):
            read_weight_patch(wrong, facts, sizes())
    with pytest.raises(CompatibilityError, match="lacks"):
        read_weight_patch(tensors, metadata, {NAME: 70_000})


def test_damaged_vllm_patches_are_refused():
    patch = SimpleNamespace(name="w", indices=np.zeros(1, np.int32), values=np.zeros(1))
    with pytest.raises(FormatError, match="two patches"):
        read_patches([patch, patch], {"w": 4})
    with pytest.raises(CompatibilityError, match="lacks"):
        read_patches([patch], {})
    patch.full_shape = (2, 3)
    with pytest.raises(FormatError, match="shape"):
        read_patches([patch], {"w": 4})


def test_parameters_beyond_int32_are_refused():
    delta = Delta(1 << 31, np.zeros(1, np.uint8), np.zeros(1))
    with pytest.raises(CompatibilityError, match="int32"):
        write_patches({"w": delta}, {"w": (1 << 31,)})


def test_an_unknown_encoding_is_not_written():
    with pytest.raises(ValueError, match="encoding must be one of gap_delta, raw, got 'gaps'"):
        write_weight_patch(encoded_deltas(), 7, encoding="gaps")


@pytest.mark.parametrize("suffixes", SUFFIXES)
def test_parameters_with_the_names_of_suffixes_round_trip(suffixes):
    names = ["w", "w.val", "w.val.idx", "idx", "layer.values"]
    deltas = {
        name: delta_from_numbers(name, np.array([number]), np.ones(1, np.float32), 9)
        for number, name in enumerate(names)
    }
    patch = write_weight_patch(deltas, 1, suffixes=suffixes)
    read = read_weight_patch(*patch, dict.fromkeys(names, 9))
    assert {name: numbers_of(delta).tolist() for name, delta in read.items()} == {
        name: [number] for number, name in enumerate(names)
    }
