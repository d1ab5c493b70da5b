"""Windows at their size, moved between transformers, mlx-lm, CacheState and the store.

Every token of a layer is its position, so a slot that no token was written to shows.
"""

import copy
import random

import numpy as np
import pytest
from needs import needs

from mlstate.errors import CapacityError, CompatibilityError
from mlstate.kv import CacheEntry, CacheSpec, CacheState
from mlstate.prompts import PromptStore

pytestmark = [pytest.mark.torch, needs("transformers", "mlx", "mlx_lm"), pytest.mark.timeout(300)]
torch = pytest.importorskip("torch", reason="transformers needs it")
pytest.importorskip("transformers", reason="its caches are the subject")
mx = pytest.importorskip("mlx.core", reason="its caches are a subject")

from mlx_lm.models.cache import RotatingKVCache  # noqa: E402
from transformers.cache_utils import (  # noqa: E402
    Cache,
    DynamicSlidingWindowLayer,
    StaticSlidingWindowLayer,
)

from mlstate.integrations import mlx, transformers  # noqa: E402

WINDOW, LONGEST = 6, 64


def values(start, stop):
    return np.arange(start, stop, dtype="f4").reshape(1, 1, -1, 1)


def feed(cache, start, count):
    """Run the layer; return the tokens that its attention reads."""
    tokens = values(start, start + count)
    if isinstance(cache, Cache):
        return cache.update(torch.tensor(tokens), torch.tensor(tokens), 0)[0].numpy().ravel()
    if isinstance(cache, list):
        return np.array(cache[0].update_and_fetch(mx.array(tokens), mx.array(tokens))[0]).ravel()
    seen = []
    for position in range(start, start + count):
        slot = cache.next_slot("0.keys")
        for array in cache.arrays.values():
            array[:, :, slot] = position
        cache.advance(1)
        seen = cache.ordered("0.keys").ravel()
    return seen


def new_ring():
    entries = [
        CacheEntry(f"0.{role}", "sliding", (1, 1, WINDOW, 1), "float32", 2, layer=0, role=role)
        for role in ("keys", "values")
    ]
    return CacheState(CacheSpec(entries), {e.name: np.zeros(e.shape, "f4") for e in entries}, 0)


KINDS = {
    "dynamic": lambda: Cache(layers=[DynamicSlidingWindowLayer(WINDOW)]),
    "static": lambda: Cache(layers=[StaticSlidingWindowLayer(LONGEST, WINDOW)]),
    "mlx": lambda: [RotatingKVCache(WINDOW)],
    "state": new_ring,
}


def state_of(cache):
    if isinstance(cache, CacheState):
        return cache
    return (mlx if isinstance(cache, list) else transformers).from_cache(cache)


def as_arrays(state):
    arrays = {name: np.array(np.asarray(array)) for name, array in state.arrays.items()}
    return CacheState(state.spec, arrays, state.length)


def check(cache, length):
    """Positions are those of the newest tokens, and a slot without a token has -1."""
    state = state_of(cache)
    assert state.length == length
    positions = state.positions("0.keys")
    tokens = np.asarray(state.arrays["0.keys"]).ravel()
    present = positions[positions >= 0]
    assert tokens[positions >= 0].tolist() == present.tolist()
    assert sorted(present) == list(range(length - len(present), length))
    assert len(present) >= min(length, WINDOW - 1)
    return state


def move(cache, kind, store):
    """Return the tokens in a cache of another kind: directly, or by the store."""
    state, length = state_of(cache), state_of(cache).length
    if store is not None:
        tokens = np.arange(length)
        store.put(tokens, cache)
        target = KINDS[kind]()
        with store.match(tokens, full=True) as match:
            assert store.restore(match, into=target) == length
        return target
    if kind == "state":
        ring = as_arrays(state)
        ring.resize(LONGEST)  # up to the window, which is one less for dynamic layers
        return ring
    target = KINDS[kind]()
    plain = as_arrays(state)
    return (mlx if kind == "mlx" else transformers).to_cache(plain, into=target)


@pytest.mark.parametrize("seed", range(45))
def test_random_moves_at_the_size_of_the_window(tmp_path, seed):
    rng = random.Random(seed)
    for history in range(30):
        store = PromptStore(tmp_path / str(history), model="m", block_tokens=2)
        kind = rng.choice(list(KINDS))
        cache, length = KINDS[kind](), 0
        for _ in range(5):
            count = rng.choice([1, 1, 2, WINDOW - 1, WINDOW, WINDOW + 1])
            if rng.random() < 0.7 or not length:
                if length and kind == "static":
                    count = 1
                seen = feed(cache, length, count)
                length += count
                size = cache.spec[0].window if kind == "state" else WINDOW
                newest = list(range(max(length - size, 0), length))
                assert set(newest) <= set(np.asarray(seen).tolist())
            check(cache, length)
            operation = rng.choice(["move", "store", "trim", "copy"])
            if operation == "copy":
                cache = copy.deepcopy(cache)
            elif operation == "trim":
                state = as_arrays(state_of(cache))
                try:
                    state.trim(1)
                except CompatibilityError:
                    continue
                check(state, length - 1)
                assert length <= state.spec[0].seq_length and not state.spec[0].unwritten
            else:
                target = rng.choice(list(KINDS))
                try:
                    cache = move(cache, target, store if operation == "store" else None)
                    kind = target
                except (CompatibilityError, CapacityError):
                    continue
            check(cache, length)


def test_a_deep_copy_of_a_static_layer_knows_its_slot():
    cache = KINDS["dynamic"]()
    feed(cache, 0, WINDOW)
    moved = copy.deepcopy(move(cache, "static", None))
    state = transformers.from_cache(moved)
    assert state.spec[0].unwritten == 1 and state.positions("0.keys")[0] == -1
    with pytest.raises(CompatibilityError, match="feed one more token first"):
        state.trim(1)
    feed(moved, WINDOW, 1)
    assert transformers.from_cache(moved).spec[0].unwritten == 0


def test_files_of_mlx_refuse_an_unwritten_slot(tmp_path):
    store = PromptStore(tmp_path / "store", model="m", block_tokens=2)
    cache = KINDS["dynamic"]()
    feed(cache, 0, WINDOW)
    ring = move(cache, "mlx", store)
    with pytest.raises(CompatibilityError, match="layer 0: the slot of the oldest token"):
        mlx.save_prompt_cache(tmp_path / "a.safetensors", ring)
    with pytest.raises(CompatibilityError, match="the store would use it"):
        store.put(np.arange(WINDOW), ring)
    feed(ring, WINDOW, 1)
    mlx.save_prompt_cache(tmp_path / "a.safetensors", ring)
