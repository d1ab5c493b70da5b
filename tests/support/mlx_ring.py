"""`RotatingKVCache` of mlx-lm 0.32.2 in NumPy, and histories recorded from the original."""

import numpy as np

# max_size, keep, steps (tokens per call; negative: trim) -> offset, _idx, token in each slot.
RECORDED = {
    "prefill": (32, 0, [20], 20, 20, range(20)),
    "decode": (8, 0, [5] + [1] * 9, 14, 6, [8, 9, 10, 11, 12, 13, 6, 7]),
    "keep": (8, 3, [5] + [1] * 12, 17, 7, [0, 1, 2, 13, 14, 15, 16, 12]),
    "prefill beyond the window": (32, 4, [40], 40, 40, range(40)),
    "two prefills": (8, 2, [12, 5], 17, 12, [0, 1, *range(7, 17)]),
    "prefill, decode": (8, 2, [12, 1, 1, 1], 15, 5, [0, 1, 12, 13, 14, 9, 10, 11]),
    "trim": (16, 4, [10, -3], 7, 7, range(10)),
    "trim, decode": (16, 4, [12, -3] + [1] * 9, 18, 6, [0, 1, 2, 3, 16, 17, *range(6, 16)]),
    "decode only": (8, 2, [1] * 11, 11, 5, [0, 1, 8, 9, 10, 5, 6, 7]),
    "decode, prefill": (8, 2, [5, 1, 1, 1, 1, 4, 1], 14, 3, [0, 1, 13, 8, 9, 10, 11, 12]),
    "fewer than keep": (8, 4, [2], 2, 2, [0, 1]),
    "wrapped, prefill": (8, 2, [1] * 13 + [3], 16, 10, [0, 1, *range(8, 16)]),
    "trimmed beyond the window": (32, 4, [40, -3], 37, 37, range(40)),
}


class RotatingKVCache:
    """The keys, whose sequence is axis 2; values are treated the same."""

    step = 256

    def __init__(self, max_size, keep=0):
        self.max_size, self.keep = max_size, keep
        self.keys, self.offset, self.idx = None, 0, 0

    def _dropped(self, count, keys):
        return np.concatenate([keys[:, :, : self.keep], keys[:, :, count + self.keep :]], 2)

    def _in_order(self):
        keys, idx = self.keys, self.idx
        if idx == keys.shape[2]:
            return keys
        if idx < self.offset:
            parts = [keys[:, :, : self.keep], keys[:, :, idx:], keys[:, :, self.keep : idx]]
            return np.concatenate(parts, 2)
        return keys[:, :, :idx]

    def update(self, keys):
        """As `update_and_fetch`: one token is written in place, several are appended."""
        if keys.shape[2] == 1:
            self._write(keys)
            return
        if self.keys is None:
            self.keys = keys
        else:
            tokens_kept = self._in_order()
            excess = tokens_kept.shape[2] - self.max_size + 1
            tokens_kept = self._dropped(excess, tokens_kept) if excess > 0 else tokens_kept
            self.keys = np.concatenate([tokens_kept, keys], 2)
        self.offset += keys.shape[2]
        self.idx = self.keys.shape[2]

    def _write(self, keys):
        size = 0 if self.keys is None else self.keys.shape[2]
        if self.keys is None or (self.offset >= size and size < self.max_size):
            shape = list(keys.shape)
            shape[2] = min(self.step, self.max_size - self.offset)
            new = np.zeros(shape, keys.dtype)
            self.keys = new if self.keys is None else np.concatenate([self.keys, new], 2)
            self.idx = self.offset
        excess = self.keys.shape[2] - self.max_size
        if excess > 0:
            self.keys = self._dropped(excess, self.keys)
            self.idx = self.max_size
        if self.idx == self.max_size:
            self.idx = self.keep
        self.keys[:, :, self.idx : self.idx + 1] = keys
        self.offset += 1
        self.idx += 1

    def trim(self, count):
        """Drop the last tokens; `is_trimmable` of the original is whether it has not wrapped."""
        self.offset -= count
        self.idx -= count


def run(max_size, keep, steps):
    """The cache after the steps; the key of the token at position p is p."""
    cache = RotatingKVCache(max_size, keep)
    for count in steps:
        if count < 0:
            cache.trim(-count)
        else:
            first = cache.offset
            cache.update(np.arange(first, first + count, dtype=np.float32).reshape(1, 1, -1, 1))
    return cache
