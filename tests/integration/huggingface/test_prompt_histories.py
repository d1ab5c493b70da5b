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

from cache_models import KINDS as CACHES  # noqa: E402
from cache_models import one_thread, shared_model  # noqa: E402, F401
from engines import Mlx, Transformers, new_mlx_model  # noqa: E402

from mlstate.prompts import PromptStore  # noqa: E402

IMAGES, PLACEHOLDER = (80, 81), 9
START = 14  # tokens from which the quantized kind is quantized


class Quantized(Mlx):
    """A model of mlx-lm whose cache is quantized from START tokens on."""

    def run(self, tokens, cache):
        from mlx_lm.generate import maybe_quantize_kv_cache

        logits, cache = super().run(tokens, cache)
        maybe_quantize_kv_cache(cache, START, 32, 8)
        return logits, cache


KINDS = {
    "dynamic": lambda: Transformers(shared_model("llama")),
    "static": lambda: Transformers(shared_model("llama"), CACHES["static"]),
    "sliding": lambda: Transformers(shared_model("gemma3")),
    "static sliding": lambda: Transformers(shared_model("gemma3"), CACHES["static"]),
    "linear": lambda: Transformers(shared_model("qwen3_next")),
    "conv": lambda: Transformers(shared_model("lfm2")),
    "mlx KVCache": lambda: Mlx(new_mlx_model("llama")),
    "mlx RotatingKVCache": lambda: Mlx(new_mlx_model("gemma3_text")),
    "mlx ArraysCache": lambda: Mlx(new_mlx_model("lfm2")),
    "mlx ChunkedKVCache": lambda: Mlx(new_mlx_model("llama4")),
    "mlx CacheList": lambda: Mlx(new_mlx_model("deepseek_v32")),
    "mlx QuantizedKVCache": lambda: Quantized(new_mlx_model("llama", head_dim=32)),
}


class Runs:
    """The cache after each prompt, and the logits of its last token."""

    def __init__(self, name):
        self.engine = KINDS[name]()
        self.known = {(): (self.engine.new_cache(), None)}
        self.options = {"quantized_kv_start": START} if "Quantized" in name else {}
        self.has_rings = name == "mlx RotatingKVCache"

    def __getitem__(self, tokens):
        if tokens not in self.known:
            cache = copy.deepcopy(self[tokens[:-1]][0])
            logits, _ = self.engine.run([tokens[-1]], cache)
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
        logits, expected = self.engine.run([following], cache)[0], self[(*tokens, following)][1]
        if self.has_rings:  # mlx sums the slots in their order
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
    restored = 0
    most = 120_000 if rng.random() < 0.2 else None

    def open_store():
        options = {"block_tokens": 4, "max_bytes": most, **runs.options}
        return stack.enter_context(PromptStore(folder, model="m", **options))

    def put(tokens, **options):
        ids, extra = as_stored(tokens)
        return store.put(ids, copy.deepcopy(runs[tokens][0]), extra=extra, **options)

    def restore(tokens):
        ids, extra = as_stored(tokens)
        cache = runs.engine.new_cache()
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
    runs, restored = Runs(name), 0
    for seed in range(amount(1, 20, 180)):
        restored += carry_out(runs, tmp_path / str(seed), seed)
    assert restored
