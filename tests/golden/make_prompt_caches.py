"""Write the prompt caches of mlx-lm 0.31.3 that are missing here: files of a format of the past.

Usage, in a separate environment, with pip install mlx-lm==0.31.3 'mlx[cpu]':

    python tests/golden/make_prompt_caches.py

`histories` creates the same caches with any mlx-lm, so tests compare the files with new caches.
"""

from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent / "prompt_caches"
METADATA = {"model": "tiny", "note": 'a "quoted" text.ä'}


def feed(layer, counts, batch=1, width=4, dtype="float16", start=0):
    """Run a layer for some calls of several tokens; keys and values tell token and sequence."""
    import mlx.core as mx

    at = start
    for count in counts:
        if count < 0:
            layer.trim(-count)
            at += count
            continue
        tokens = mx.arange(at, at + count).reshape(1, 1, -1, 1)
        row = mx.arange(batch).reshape(-1, 1, 1, 1) * 100
        keys = mx.broadcast_to(tokens + row, (batch, 2, count, width))
        keys = (keys + mx.arange(width) / 8).astype(getattr(mx, dtype))
        if hasattr(layer, "maybe_trim_front"):
            layer.maybe_trim_front()
        layer.update_and_fetch(keys, -keys)
        at += count
    return layer


def histories(models):
    """Caches by name: lists of layers of ``mlx_lm.models.cache``, with a dozen tokens each."""
    import mlx.core as mx

    def states(size):
        layer = models.ArraysCache(size)
        for i in range(size):
            layer[i] = mx.arange(12, dtype=mx.float32).reshape(1, 3, 4) * (i + 1)
        return layer

    def batch(layer, *counts):
        return feed(layer, counts, batch=2)

    return {
        "full": [feed(models.KVCache(), [9, 1, 1]) for _ in range(2)],
        "bfloat16": [feed(models.KVCache(), [9, 1], dtype="bfloat16")],
        "trimmed": [feed(models.KVCache(), [9, -3])],
        "window": [feed(models.RotatingKVCache(8, 2), [5, 1])],
        "wrapped": [feed(models.RotatingKVCache(8, 2), [5] + [1] * 9)],
        "long prefill": [feed(models.RotatingKVCache(8, 2), [12])],
        "window and full": [
            feed(models.RotatingKVCache(8), [12, 1]),
            feed(models.KVCache(), [12, 1]),
        ],
        "quantized": [feed(models.KVCache(), [9, 1], width=32).to_quantized(32, 4)],
        "states": [states(2), feed(models.KVCache(), [9])],
        "chunked": [feed(models.ChunkedKVCache(300), [9, 1])],
        "list": [
            models.CacheList(
                feed(models.KVCache(), [9]), feed(models.RotatingKVCache(8), [9]), states(1)
            )
        ],
        "batch": [batch(models.BatchKVCache([3, 0]), 9, 1)],
        "batch window": [batch(models.BatchRotatingKVCache(8, [3, 0]), 5, 1)],
        "batch wrapped": [batch(models.BatchRotatingKVCache(8, [3, 0]), 5, *[1] * 6)],
    }


def main():
    from mlx_lm.models import cache as models

    label = version("mlx-lm")
    if label != "0.31.3":
        raise SystemExit(f"this is mlx-lm {label}: run it with 0.31.3")
    HERE.mkdir(exist_ok=True)
    for name, cache in histories(models).items():
        path = HERE / f"{name.replace(' ', '_')}-{label}.safetensors"
        if not path.exists():
            models.save_prompt_cache(str(path), cache, METADATA)


if __name__ == "__main__":
    main()
