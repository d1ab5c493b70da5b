"""Mutated versions of weights: an error that changes no array, or the published weights."""

import shutil

import numpy as np
import pytest
from follow_tables import pack, unpack

from mlstate.errors import MLStateError
from mlstate.follow import Follower, Publisher, _publisher
from mlstate.follow._version import encode_changes

NUMBERS = [0, 1, 2, 255, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 63, (1 << 64) - 1]


def model_of(step):
    rng = np.random.default_rng(7)
    model = {
        "a": rng.standard_normal((30, 20)).astype(np.float32),
        "größe": rng.integers(0, 99, 300).astype(np.int16),
        "scale": np.array(1.5),
    }
    model["a"][step, : 2 * step] = step
    model["größe"][:step] = -step
    return model


def check_advance(folder, steps):
    """Follow the versions; return whether the last one was reached.

    An error leaves the weights of the step before it.
    """
    into = model_of(0)
    follower = Follower(folder, into=into)
    reached, error = 0, None
    for step in steps:
        try:
            assert follower.advance(step) == step
            reached = step
        except MLStateError as caught:
            error = caught
            break
    assert (follower.version or 0) == reached
    for name, array in model_of(reached).items():
        assert into[name].tobytes() == array.tobytes(), (name, error)
    return error is None


def mutate_table(table, rng):
    """Change some numbers of a table, by a little or to a limit, or bytes of its streams."""
    table = unpack(table)
    for _ in range(rng.integers(1, 4)):
        name = ("columns", "columns", "columns", "shapes", "names", "gaps", "values")[
            rng.integers(0, 7)
        ]
        array = table[name] = table[name].copy()
        if array.size == 0:
            continue
        at = rng.integers(0, array.size)
        old = int(array.flat[at])
        near = [old + 1, abs(old - 1), old ^ (1 << int(rng.integers(0, 8)))]
        new = [*near, *NUMBERS][rng.integers(0, len(near) + len(NUMBERS))]
        array.flat[at] = new % (1 << 8 * array.itemsize)
    return pack(table)


@pytest.mark.parametrize("first", (0, 30))
def test_mutated_tables_are_refused_or_give_right_weights(tmp_path, monkeypatch, first):
    refused = 0
    for seed in range(first, first + 30):
        rng = np.random.default_rng(seed)
        folder = tmp_path / str(seed)
        publisher = Publisher(folder, anchor_every=(1, 5)[seed % 2])
        publisher.publish(0, model_of(0))
        publisher.publish(1, model_of(1))
        with monkeypatch.context() as patch:
            patch.setattr(
                _publisher,
                "encode_changes",
                lambda changes, rank, rng=rng: mutate_table(encode_changes(changes, rank), rng),
            )
            publisher.publish(2, model_of(2))
        refused += not check_advance(folder, [0, 1, 2])
        shutil.rmtree(folder)
    assert refused > 10


@pytest.mark.parametrize("first", (0, 30))
def test_flipped_bytes_of_published_files_are_refused_or_harmless(tmp_path, first):
    publisher = Publisher(tmp_path / "w", anchor_every=5)
    for step in range(3):
        publisher.publish(step, model_of(step))
    for seed in range(first, first + 30):
        rng = np.random.default_rng(seed)
        folder = shutil.copytree(tmp_path / "w", tmp_path / str(seed))
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        path = paths[rng.integers(0, len(paths))]
        data = bytearray(path.read_bytes())
        at = int(rng.integers(0, len(data)))
        if seed % 4 == 0:
            del data[at:]
        else:
            data[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(data)
        check_advance(folder, [0, 1, 2])
        shutil.rmtree(folder)
