"""The users of `_common/changes.py`: a target, the operation that changes it, and its content.

Each case is a function of a folder. It returns three functions: `make` returns a target, `operate`
changes it, and `content` returns its content, or None if it reports no token. The caller lets
states of Core AI have fake arrays.
"""

from functools import partial

import numpy as np
from fake_states import FakeArray, fake_model
from toy_caches import HYBRID, TOKENS, empty_state, prefill, spec_of, store_at

import mlstate
from mlstate import coreai
from mlstate.coreml import FakeMLState, StateManager, transition_coreml_state
from mlstate.follow import Follower, Publisher
from mlstate.kv import KVState, RollingKVState


def content_of(state):
    """Length and elements of a CacheState; None if it has no token."""
    if not state.length:
        return None
    views = [
        state.arrays[e.name] if e.seq_axis is None else state.ordered(e.name) for e in state.spec
    ]
    return state.length, [view.tobytes() for view in views]


def snapshot_case(tmp_path):
    snapshots = {}

    def make():
        state = empty_state(HYBRID)
        prefill(state, TOKENS[:40])
        snapshots[id(state)] = state, state.snapshot()
        prefill(state, TOKENS[:60])
        return state

    return make, lambda state: state.restore(snapshots[id(state)][1]), content_of


def checkpoint_case(tmp_path):
    def filled(count):
        state = empty_state(HYBRID)
        prefill(state, TOKENS[:count])
        return state

    mlstate.save(tmp_path / "saved", {}, states={"cache": filled(50)})
    cache = mlstate.load(tmp_path / "saved").states["cache"]
    from mlstate.kv._stored import overwrite_cache

    return partial(filled, 30), lambda state: overwrite_cache(state, cache), content_of


def kv_case(tmp_path):
    from mlstate.kv._stored import overwrite_cache

    def filled(value, length):
        return KVState.from_array(np.full((1, 2, length, 4), value), 64)

    cache = filled(2.0, 50)
    content = lambda state: state.array.tobytes() or None  # noqa: E731
    return partial(filled, 1.0, 30), lambda state: overwrite_cache(state, cache), content


def prompt_case(tmp_path, spec=HYBRID):
    store = store_at(tmp_path)
    state = empty_state(spec)
    prefill(state, TOKENS[:70])
    store.put(TOKENS[:70], state)

    def make():
        state = empty_state(spec)
        prefill(state, TOKENS[5:30])
        return state

    def operate(state):
        with store.match(TOKENS) as match:
            assert store.restore(match, into=state) == 70

    return make, operate, content_of


def full_prompt_case(tmp_path):
    return prompt_case(tmp_path, spec_of("full", "full"))


def kv_prompt_case(tmp_path):
    store = store_at(tmp_path)
    store.put(TOKENS[:70], KVState.from_array(np.full((1, 2, 70, 4), 2.0)))

    def operate(state):
        with store.match(TOKENS) as match:
            store.restore(match, into=state)

    def make():
        return KVState.from_array(np.full((1, 2, 30, 4), 1.0), 128)

    return make, operate, lambda state: state.array.tobytes() or None


def ring_prompt_case(tmp_path):
    def filled(value, count):
        cache = RollingKVState((1, 2, 16, 4), dtype="f4", sinks=2)
        cache.append(np.full((1, 2, count, 4), value, "f4"))
        return cache

    store = store_at(tmp_path)
    store.put(TOKENS[:70], filled(2.0, 70))

    def operate(cache):
        with store.match(TOKENS) as match:
            store.restore(match, into=cache)

    content = lambda cache: (cache.next_position, cache.ordered().tobytes())  # noqa: E731
    return partial(filled, 1.0, 30), operate, content


SHAPES = [{"k": (2, 1, n, 8), "v": (2, 1, n, 8)} for n in (32, 64)]


def states_of(*states):
    return [array.tobytes() for state in states for array in state._states.values()]


def filled_state(shapes, value):
    state = FakeMLState(shapes)
    for name, shape in shapes.items():
        state.write_state(name, np.full(shape, value, np.float32))
    return state


def chunk_case(tmp_path):
    def make():
        return [filled_state(SHAPES[1], 5) for _ in range(2)]

    def operate(targets):
        sources = [filled_state(SHAPES[0], number) for number in (1, 2)]
        transition_coreml_state(sources, targets, ["k", "v"], 20)

    return make, operate, lambda targets: states_of(*targets)


def manager_case(tmp_path):
    def make():
        manager = StateManager({32: fake_model(SHAPES[0]), 64: fake_model(SHAPES[1])})
        for name, shape in SHAPES[0].items():
            manager.state.write_state(name, np.full(shape, 3, np.float32))
        return manager

    def content(manager):
        length = manager.size
        assert manager.state.read_state("k").shape[2] == length
        return length, states_of(manager.state)

    return make, lambda manager: manager.grow_if_needed(32) and manager.grow_if_needed(32), content


def refill_case(tmp_path):
    models = {32: fake_model(SHAPES[0]), 64: fake_model(SHAPES[1])}

    def prefill(tokens, position, state):
        for name, shape in SHAPES[1].items():
            state.write_state(name, np.full(shape, position + 1, np.float32))

    def operate(manager):
        assert manager.refill(range(70), prefill).action == "refill"

    content = manager_case(tmp_path)[2]
    return lambda: StateManager(models, batch_size=8), operate, content


def restored_manager_case(tmp_path):
    make, _, content = manager_case(tmp_path)
    other = make()
    other.state.write_state("v", np.full(SHAPES[0]["v"], 9, np.float32))
    other.grow_if_needed(32)
    saved = other.state_dict()
    return make, lambda manager: manager.load_state_dict(saved), content


def coreai_case(tmp_path):
    def make():
        manager = coreai.StateManager(coreai.state_specs({"k": (2, 1, 2, None, 4)}), (8, 16, 32))
        for name, array in manager.state.items():
            manager.state[name] = FakeArray(np.full(array.shape, 3, np.float16))
        return manager

    def content(manager):
        arrays = {name: array.numpy() for name, array in manager.state.items()}
        assert arrays["k"].shape[3] == manager.size
        return manager.size, arrays["k"].tobytes()

    return make, lambda manager: manager.grow_if_needed(8) and manager.grow_if_needed(8), content


def array_prompt_case(tmp_path):
    store = store_at(tmp_path)
    store.put(TOKENS[:70], KVState.from_array(np.full((1, 2, 70, 4), 2.0)))

    def operate(array):
        with store.match(TOKENS) as match:
            store.restore(match, into=array)

    content = lambda array: array.tobytes() if array.any() else None  # noqa: E731
    return partial(np.ones, (1, 2, 80, 4)), operate, content


def follower_case(tmp_path, *, double_buffer=False):
    model = {name: np.zeros(20) for name in "abc"}
    publisher = Publisher(tmp_path / "weights")
    publisher.publish(0, model)
    first = {name: array.copy() for name, array in model.items()}
    for array in model.values():
        array[3:9] = 7
    publisher.publish(1, model)

    def make():
        into = {name: np.ones(20) for name in "abc"}
        follower = Follower(publisher.path, into=into, double_buffer=double_buffer)
        follower.advance(0)
        return follower

    def content(follower):
        arrays, expected = follower.state, first if follower.version == 0 else model
        assert all((arrays[name] == expected[name]).all() for name in model)
        return follower.version

    return make, lambda follower: follower.advance(1), content


def two_buffer_case(tmp_path):
    return follower_case(tmp_path, double_buffer=True)


# ---- caches of engines ----


def engine_content(cache, from_cache, bits):
    """Return the number of tokens and the bits of all layers; None for an empty cache."""
    try:
        state = from_cache(cache)
    except ValueError as error:
        assert "no layer of the cache has a token" in str(error)
        return None
    if not state.length:
        return None
    views = [state.arrays[e.name] if e.seq_axis is None else state.view(e.name) for e in state.spec]
    return state.length, [bits(view) for view in views]


MIXED, STATIC = ("dynamic", "dynamic sliding", "linear"), ("static", "static sliding", "static")


def transformers_caches(names):
    """Return a function that makes a cache, and one that returns its content."""
    import torch
    from cache_layers import LAYERS, write
    from transformers.cache_utils import Cache

    from mlstate.integrations.transformers import from_cache

    def filled(count, seed):
        generator = torch.Generator().manual_seed(seed)
        cache = Cache(layers=[LAYERS[name]() for name in names])
        for layer in cache.layers if count else ():
            write(layer, count, generator, 1)
        return cache

    def bits(tensor):
        return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()

    return filled, partial(engine_content, from_cache=from_cache, bits=bits)


def transformers_case(tmp_path, names=MIXED):
    from mlstate.integrations.transformers import from_cache, to_cache

    filled, content = transformers_caches(names)
    source = from_cache(filled(20, 1)).copy()
    return partial(filled, 9, 2), lambda cache: to_cache(source, into=cache), content


def transformers_prompt_case(tmp_path, names=MIXED):
    filled, content = transformers_caches(names)
    store = mlstate.prompts.PromptStore(tmp_path, model="m", block_tokens=4)
    store.put(np.arange(20), filled(20, 1))

    def operate(cache):
        with store.match(np.arange(21)) as match:
            assert store.restore(match, into=cache) == 20

    return partial(filled, 9, 2), operate, content


def static_case(tmp_path):
    return transformers_case(tmp_path, STATIC)


def static_prompt_case(tmp_path):
    return transformers_prompt_case(tmp_path, STATIC)


def mlx_caches():
    """Return a function that makes a cache of mlx-lm, and one that returns its content."""
    import mlx.core as mx
    from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

    from mlstate.integrations.mlx import from_cache

    def filled(count, value):
        cache = [KVCache(), RotatingKVCache(16), ArraysCache(2), KVCache()]
        for layer in cache if count else ():
            if isinstance(layer, ArraysCache):
                layer[0], layer[1] = mx.full((1, 3), value), mx.full((1, 5), value)
            else:
                layer.update_and_fetch(*[mx.full((1, 2, count, 4), value)] * 2)
        return cache

    def content(cache):
        if all(layer.empty() for layer in cache):
            return "empty"
        state = from_cache(cache)
        return state.length, [array.tobytes() for array in state.arrays.values()]

    return filled, content


def mlx_case(tmp_path):
    from mlstate.integrations.mlx import from_cache, to_cache

    filled, content = mlx_caches()
    source = from_cache(filled(12, 1.0))
    return partial(filled, 7, 2.0), lambda cache: to_cache(source, into=cache), content


def mlx_prompt_case(tmp_path):
    filled, content = mlx_caches()
    store = mlstate.prompts.PromptStore(tmp_path, model="m", block_tokens=4)
    store.put(np.arange(12), filled(12, 1.0))

    def operate(cache):
        if content(cache) != "empty":  # mlx-lm cannot remove tokens
            cache[:] = filled(0, 0)
        with store.match(np.arange(13)) as match:
            assert store.restore(match, into=cache) == 12

    return partial(filled, 0, 0), operate, content


CASES = [
    snapshot_case,
    checkpoint_case,
    kv_case,
    full_prompt_case,
    prompt_case,
    kv_prompt_case,
    array_prompt_case,
    ring_prompt_case,
    chunk_case,
    manager_case,
    refill_case,
    restored_manager_case,
    coreai_case,
    follower_case,
    two_buffer_case,
]
TRANSFORMERS = [transformers_case, static_case, transformers_prompt_case, static_prompt_case]
MLX = [mlx_case, mlx_prompt_case]
