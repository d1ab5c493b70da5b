"""`CompatibilityResult.is_loadable` answers as `load_into` does, for random pairs."""

import pickle
import random

import numpy as np
import pytest

import mlstate
from mlstate.checkpoint import Layout, Shard
from mlstate.state import check_compatibility, load_into

BASE = np.zeros(64, np.float32)
DTYPES = ["f4", "f8", "f2", "i4", "u1", "?", "c8", ">f4", "M8[s]", "O", "S3"]


def read_only():
    array = np.zeros(2, np.float32)
    array.flags.writeable = False
    return array


ARRAYS = [
    lambda: BASE[:2],
    lambda: BASE[1:3],
    lambda: BASE[::-2][:2],
    lambda: np.broadcast_to(np.float32(1), (2,)),
    lambda: np.lib.stride_tricks.as_strided(BASE, (2,), (2,)),
    lambda: np.float32(3),
    lambda: Shard(np.zeros(2, np.float32)),
    lambda: Layout.rows(2).shard(np.zeros(4, np.float32), 0),
    read_only,
]


def tensor_makers():
    torch = pytest.importorskip("torch")
    base = torch.zeros(64)
    return [
        lambda: torch.zeros(2),
        lambda: torch.zeros(2, requires_grad=True),
        lambda: torch.nn.Parameter(torch.zeros(2)),
        lambda: torch.zeros(2, device="meta"),
        lambda: base[:2],
        lambda: base[1:3],
        lambda: torch.zeros(1).expand(2),
        lambda: torch.zeros((2, 2))[:, 0],
        lambda: torch.zeros(2, dtype=torch.complex64).conj(),
        lambda: torch.zeros(2)._neg_view(),
        lambda: torch.zeros(2, dtype=torch.bfloat16),
        lambda: torch.inference_mode()(torch.zeros)(2),
        lambda: torch.from_numpy(BASE[:2]),
    ]


def outcomes(makers, seed, count):
    """Yield results for random pairs, and whether `load_into` accepted the pair."""
    rng = random.Random(seed)

    def array():
        if rng.random() < 0.5:
            return rng.choice(makers)()
        shape = rng.choice([(2,), (2,), (3,), (2, 3), (0,), ()])
        return np.zeros(shape, rng.choice(DTYPES) if rng.random() < 0.5 else "f4")

    def state():
        return {name: array() for name in "abc" if rng.random() < 0.6}

    for _ in range(count):
        source, target = state(), state()
        if rng.random() < 0.5:
            target = {name: rng.choice([value, array()]) for name, value in source.items()}
        if rng.random() < 0.2 and target:  # one array under two names
            target[rng.choice("abc")] = target[next(iter(target))]
        strict = rng.random() < 0.5
        try:
            result = check_compatibility(source, target)
        except (TypeError, ValueError):
            with pytest.raises((TypeError, ValueError)):
                load_into(target, source, strict=strict)
            continue
        error = None
        try:
            load_into(target, source, strict=strict)
        except (mlstate.MLStateError, TypeError, ValueError, BufferError, RuntimeError) as caught:
            error = caught
        assert result.is_loadable(strict) == (error is None), (source, target, strict, error)
        yield result, error is None


@pytest.mark.parametrize("seed", range(4))
def test_random_arrays(seed):
    answers = [did for _, did in outcomes(ARRAYS, seed, 500)]
    assert 50 < sum(answers) < len(answers) - 50


@pytest.mark.torch
@pytest.mark.parametrize("seed", range(4))
def test_random_tensors(seed):
    answers = [did for _, did in outcomes([*ARRAYS, *tensor_makers()], seed, 500)]
    assert 50 < sum(answers) < len(answers) - 50


def test_the_headline_agrees_with_the_flag():
    for result, _ in outcomes(ARRAYS, 9, 500):
        headline = str(result).splitlines()[0]
        assert headline in repr(result) and headline in result._repr_html_()
        assert headline.startswith("compatible") == result.is_compatible
        assert headline.startswith("not compatible") != result.is_compatible
        if headline == "compatible":
            assert result.is_loadable()


def test_a_refusal_by_load_into_is_in_the_headline():
    result = check_compatibility({"w": np.ones(2)}, {"w": np.ones(2, np.float32)})
    assert result.is_compatible and not result.is_loadable(strict=False)
    assert str(result).startswith("compatible, but load_into refuses it, 1 warning")
    assert not check_compatibility({"w": BASE[:2]}, {"w": read_only()}).is_loadable()


def test_errors_of_callers_and_pickles_count():
    result = check_compatibility({"w": BASE[:2]}, {"w": BASE[4:6]})
    assert result.is_loadable()
    assert pickle.loads(pickle.dumps(result)).is_loadable()
    result.add_error("another tokenizer")
    assert not result.is_loadable()
    refused = check_compatibility({"w": BASE[:2]}, {"w": read_only()})
    assert not pickle.loads(pickle.dumps(refused)).is_loadable(strict=False)
