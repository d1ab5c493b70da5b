"""The golden deltas of other programs, and the versions that they lead to."""

import json

import ml_dtypes
import numpy as np
from golden.make_deltas import BASES, FOLDER, new_versions

from mlstate.checkpoint import load_file, load_metadata
from mlstate.follow._delta import apply_delta, compare_arrays

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
