"""Layers of transformers' caches, one of each class, and tokens for them."""

import torch
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    Fp8QuantizedLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

WINDOW, SIZE = 8, 40
LAYERS = {
    "dynamic": DynamicLayer,
    "dynamic sliding": lambda: DynamicSlidingWindowLayer(WINDOW),
    "dynamic indexed": DynamicIndexedLayer,
    "static": lambda: StaticLayer(SIZE),
    "static sliding": lambda: StaticSlidingWindowLayer(SIZE, WINDOW),
    "static indexed": lambda: StaticIndexedLayer(SIZE),
    "fp8": Fp8QuantizedLayer,
    "linear": LinearAttentionLayer,
    "two states": lambda: LinearAttentionLayer(number_of_states=2),
    "linear and full": LinearAttentionAndFullAttentionLayer,
    "linear and sliding": lambda: LinearAttentionAndSlidingWindowAttentionLayer(WINDOW),
    "linear and static": lambda: LinearAttentionAndStaticFullAttentionLayer(SIZE),
    "linear and static sliding": lambda: LinearAttentionAndStaticSlidingWindowAttentionLayer(
        SIZE, WINDOW
    ),
}


def write(layer, count, generator, batch=2):
    """Run a layer for some tokens; return all that the attention would read."""

    def random(*shape):
        return torch.randn(shape, generator=generator)

    results = []
    if hasattr(layer, "update"):
        results += layer.update(random(batch, 3, count, 4), random(batch, 3, count, 6))
    if hasattr(layer, "update_indexer"):
        results.append(layer.update_indexer(random(batch, count, 5)))
        ids = torch.arange(count).expand(3, batch, count)
        before = layer.indexer_position_ids
        layer.indexer_position_ids = ids if before is None else torch.cat([before, ids], -1)
        results.append(layer.indexer_position_ids)
    for number in range(getattr(layer, "number_of_states", 0)):
        results.append(layer.update_conv_state(random(batch, 6, 4), number))
        results.append(layer.update_recurrent_state(random(batch, 3, 4, 4), number))
    return [each.clone() for each in results]
