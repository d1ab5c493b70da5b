"""Caches of mlx-lm: all their layers and numbers, comparisons, and more tokens."""

import numpy as np
from golden.make_prompt_caches import feed


def layers_of(cache):
    """All layers, also inside of lists."""
    for layer in cache:
        if type(layer).__name__ == "CacheList":
            yield from layers_of(layer.caches)
        else:
            yield layer


def numbers_of(layer):
    """The attributes of a layer that are not arrays of tokens."""
    import mlx.core as mx

    result = {}
    for name, value in vars(layer).items():
        if isinstance(value, mx.array) and value.ndim == 1:
            result[name] = value.tolist()
        elif isinstance(value, int):
            result[name] = value
    return result


def bits_of(array):
    import mlx.core as mx

    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def attention_bits(layer):
    """All that the attention reads."""
    from mlx.utils import tree_flatten

    if type(layer).__name__ == "ArraysCache":
        return [bits_of(each) for each in layer.cache]
    return [bits_of(each) for _, each in tree_flatten(layer.keys_and_values())]


def assert_equal_caches(got, expected):
    pairs = list(zip(layers_of(got), layers_of(expected), strict=True))
    for left, right in pairs:
        assert type(left) is type(right)
        for first, second in zip(attention_bits(left), attention_bits(right), strict=True):
            assert first.dtype == second.dtype
            np.testing.assert_array_equal(first, second)


def decode(cache, start, counts=(1, 1, 3, 1, 1, 1, 1, 1)):
    """Run all layers for more tokens."""
    import mlx.core as mx

    for layer in layers_of(cache):
        if type(layer).__name__ == "ArraysCache":
            for i, state in enumerate(layer.cache):
                layer[i] = state * 2 + start
        else:
            keys = layer.keys
            is_full = isinstance(keys, mx.array)
            like = keys if is_full else keys[1]
            width = keys.shape[3] if is_full else keys[0].shape[3] * 32 // layer.bits
            feed(layer, counts, like.shape[0], width, str(like.dtype).rpartition(".")[2], start)
    return cache
