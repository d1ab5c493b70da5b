"""Random histories of a store with images, for caches of both engines: every restore is exact.

A model runs token by token, so that a cache depends on its tokens alone. An image is another token
for the model, and a placeholder with a digest for the store. MLSTATE_FAULTS chooses the number of
histories, see `amounts.py`.
"""

import copy
import importlib.util
from contextlib import ExitStack

import numpy as np
import pytest
from amounts import amount
from needs import needs

pytestmark = [pytest.mark.torch, needs("transformers")]
torch = pytest.importorskip("torch", reason="transformers needs it")
pytest.importorskip("transformers", reason="its models run")

import cache_models  # noqa: E402
import mlx_models  # noqa: E402
from cache_models import one_thread  # noqa: E402, F401

from mlstate.integrations import transformers as hf  # noqa: E402
from mlstate.prompts import PromptStore  # noqa: E402

IMAGES, PLACEHOLDER = (80, 81), 9
START = 14  # tokens from which the quantized kind is quantized


class Transformers:
    """A model of transformers, and one kind of its caches."""

    module, options, has_rings = hf, {}, False

    def __init__(self, name, kind):
        self.model, self.kind = cache_models.shared_model(name), kind

    def new(self):
        return cache_models.KINDS[self.kind](config=self.model.config)

    def step(self, cache, token):
        return cache_models.run(self.model, torch.tensor([[token]]), cache).numpy()


class Mlx:
    """A model of mlx-lm, and its caches; `start`: they are quantized from so many tokens on."""

    def __init__(self, name, start=None):
        from mlstate.integrations import mlx

        self.module, self.start, self.has_rings = mlx, start, name == "gemma3_text"
        self.options = {} if start is None else {"quantized_kv_start": start}
        self.model = mlx_models.create_model(name, **({} if start is None else {"head_dim": 32}))

    def new(self):
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model)

    def step(self, cache, token):
        import mlx.core as mx
        from mlx_lm.generate import maybe_quantize_kv_cache

        logits = np.array(self.model(mx.array([[token]]), cache=cache)[0, -1])
        if self.start is not None:
            maybe_quantize_kv_cache(cache, self.start, 32, 8)
        return logits


KINDS = {
    "dynamic": lambda: Transformers("llama", "dynamic"),
    "static": lambda: Transformers("llama", "static"),
    "sliding": lambda: Transformers("gemma3", "dynamic"),
    "static sliding": lambda: Transformers("gemma3", "static"),
    "linear": lambda: Transformers("qwen3_next", "dynamic"),
    "conv": lambda: Transformers("lfm2", "dynamic"),
    "mlx KVCache": lambda: Mlx("llama"),
    "mlx RotatingKVCache": lambda: Mlx("gemma3_text"),
    "mlx ArraysCache": lambda: Mlx("lfm2"),
    "mlx ChunkedKVCache": lambda: Mlx("llama4"),
    "mlx CacheList": lambda: Mlx("deepseek_v32"),
    "mlx QuantizedKVCache": lambda: Mlx("llama", START),
}


class Runs:
    """The cache after each prompt, and the logits of its last token."""

    def __init__(self, engine):
        self.engine = engine
        self.known = {(): (engine.new(), None)}

    def __getitem__(self, tokens):
        if tokens not in self.known:
            cache = copy.deepcopy(self[tokens[:-1]][0])
            logits = self.engine.step(cache, tokens[-1])
            self.known[tokens] = cache, logits
        return self.known[tokens]

    def bits(self, cache):
        state, bits = self.engine.module.from_cache(cache), {}
        for entry in state.spec:
            for name in entry.arrays:
                array = state.arrays[name]
                if entry.kind == "quantized":
                    array = array[:, :, : state.length]
                elif entry.seq_axis is not None:
                    array = state.ordered(name)
                bits[name] = np.ascontiguousarray(array)
        return bits

    def check(self, cache, tokens, following):
        """The cache has the bits of a run of these tokens, and continues with its logits."""
        got, expected = self.bits(cache), self.bits(self[tokens][0])
        for name, array in expected.items():
            assert np.array_equal(got[name], array), (name, len(tokens))
        logits, expected = self.engine.step(cache, following), self[(*tokens, following)][1]
        if self.engine.has_rings:  # mlx sums the slots in their order
            np.testing.assert_allclose(logits, expected, atol=1e-5)
        else:
            assert np.array_equal(logits, expected), len(tokens)


def random_prompt(rng):
    """Tokens of the model: three parts of 10, each with one of two images, or without one."""
    tokens = []
    for part in range(3):
        text = [20 * part + i + 10 for i in range(10)]
        choice = int(rng.integers(0, 3))
        text[5] = text[5] if choice == 2 else IMAGES[choice]
        tokens += text
    return tuple(tokens)


def as_stored(tokens):
    """Tokens of the store, and the digests of the images."""
    ids = [PLACEHOLDER if token in IMAGES else token for token in tokens]
    return ids, {i: f"image {t}" for i, t in enumerate(tokens) if t in IMAGES}


def carry_out(runs, folder, seed):
    """Do random steps; return the number of restores that were compared."""
    rng = np.random.default_rng(seed)
    engine, restored = runs.engine, 0
    most = 120_000 if rng.random() < 0.2 else None

    def open_store():
        options = {"block_tokens": 4, "max_bytes": most, **engine.options}
        return stack.enter_context(PromptStore(folder, model="m", **options))

    def put(tokens, **options):
        ids, extra = as_stored(tokens)
        return store.put(ids, copy.deepcopy(runs[tokens][0]), extra=extra, **options)

    def restore(tokens):
        ids, extra = as_stored(tokens)
        cache = engine.new()
        with store.match(ids, extra=extra) as match:
            length = store.restore(match, into=cache)
            assert length == match.length
        if length:
            runs.check(cache, tokens[:length], tokens[length])
        return length

    with ExitStack() as stack:
        store = open_store()
        for _ in range(12):
            tokens = random_prompt(rng)
            stop = int(rng.integers(1, len(tokens) + 1))
            ids, extra = as_stored(tokens)
            match int(rng.integers(0, 10)):
                case 0 | 1 | 2 | 3:
                    is_asynchronous, has_snapshot = map(bool, rng.random(2) < (0.3, 0.8))
                    put(tokens[:stop], asynchronous=is_asynchronous, snapshot=has_snapshot)
                case 4:
                    store.delete(ids, extra=extra)
                case 5:
                    store.pin(ids, extra=extra)
                    store.unpin(ids, extra=extra)
                case 6:
                    store.close()
                    store = open_store()
                case _:
                    restored += restore(tokens) > 0
        tokens = random_prompt(rng)
        length = put(tokens[:-1])
        assert restore(tokens) == length
        assert length == len(tokens) - 1 or most is not None
        assert store.verify() == []
    return restored + (length > 0)


@pytest.mark.parametrize("name", KINDS)
def test_random_histories_restore_the_cache_of_the_engine(tmp_path, name):
    if name.startswith("mlx") and importlib.util.find_spec("mlx_lm") is None:
        pytest.skip("needs mlx_lm")
    runs, restored = Runs(KINDS[name]()), 0
    for seed in range(amount(1, 20, 180)):
        restored += carry_out(runs, tmp_path / str(seed), seed)
    assert restored
