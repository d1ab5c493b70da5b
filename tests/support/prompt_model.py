"""A dict that behaves as a prompt log, and payloads that differ for each prefix."""

import hashlib

import numpy as np

FINGERPRINT = b"model A"
BLOCK = 4
# A token of the model with an extra: the token id, and this times the number of the extra.
EXTRA = 1 << 40


def split_extras(tokens):
    """The token ids of tokens of the model, and their extras as the core takes them."""
    tokens = np.asarray(tokens, np.int64)
    rows = [
        int(place).to_bytes(4, "little") + bytes([int(tokens[place] // EXTRA)] * 32)
        for place in np.flatnonzero(tokens >= EXTRA)
    ]
    return tokens % EXTRA, b"".join(rows)


def payload(prefix, kind, fingerprint=FINGERPRINT, parts=2):
    """Arrays that no other record has."""
    text = repr((tuple(map(int, prefix)), kind, fingerprint)).encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    random = np.random.default_rng(seed)
    sizes = random.integers(0, 400, parts) * (60 if kind == 2 else 1)
    return [random.integers(0, 256, size, np.uint8) for size in sizes]


def record(tokens, end, kind=0, fingerprint=FINGERPRINT):
    """The record of the first `end` tokens, as `put` takes it."""
    return (kind, end, f"{kind}:{end}".encode(), payload(tokens[:end], kind, fingerprint))


def put(log, tokens, ends=None, *, tails=(), fingerprint=FINGERPRINT, max_bytes=None, timeout=30.0):
    """Store all blocks of a prompt, and records of kind 1 that end at `tails`."""
    tokens = np.asarray(tokens, np.int64)
    if ends is None:
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
    items = [(end, 0) for end in ends] + [(end, 1) for end in tails]
    records = [record(tokens, end, kind, fingerprint) for end, kind in sorted(items)]
    ids, extras = split_extras(tokens)
    return log.put(fingerprint, ids, BLOCK, records, max_bytes, timeout, extras)


def match(log, tokens, fingerprint=FINGERPRINT):
    """The match of a prompt."""
    ids, extras = split_extras(tokens)
    return log.match(fingerprint, ids, BLOCK, extras)


def wrong_records(result, tokens, fingerprint=FINGERPRINT):
    """Read all records of a match; return (damaged ones, complaints about wrong content)."""
    damaged, complaints = set(), []
    for number, (kind, start, end, size) in enumerate(result.records):
        expected = payload(tokens[:end], kind, fingerprint)
        arrays = [np.zeros(length, np.uint8) for length in result.parts(number)]
        requests = [(number, part, array) for part, array in enumerate(arrays)]
        if result.read(requests):
            damaged.add((kind, end))
            continue
        same = len(arrays) == len(expected) and all(map(np.array_equal, arrays, expected))
        same = same and size == sum(array.size for array in expected)
        same = same and start == (end - BLOCK if kind == 0 else end // BLOCK * BLOCK)
        if not same or result.meta(number) != f"{kind}:{end}".encode():
            complaints.append(f"record {kind, end} of {list(map(int, tokens))} is another one")
    return damaged, complaints


class Model:
    """The records that a log must hold: (fingerprint, prefix, kind)."""

    def __init__(self):
        self.stored = set()

    def put(self, tokens, tails=(), fingerprint=FINGERPRINT):
        """Store all blocks, and tails."""
        tokens = tuple(tokens)
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            self.stored.add((fingerprint, tokens[:end], 0))
        for end in tails:
            self.stored.add((fingerprint, tokens[:end], 1))

    def match(self, tokens, fingerprint=FINGERPRINT):
        """The (kind, end) pairs that a match must list."""
        tokens = tuple(tokens)
        pairs, end = [], 0
        while True:
            for tail in range(end, min(end + BLOCK, len(tokens) + 1)):
                if (fingerprint, tokens[:tail], 1) in self.stored:
                    pairs.append((1, tail))
            end += BLOCK
            if end > len(tokens) or (fingerprint, tokens[:end], 0) not in self.stored:
                return sorted(pairs, key=lambda pair: pair[::-1])
            pairs.append((0, end))

    def delete(self, tokens, fingerprint=FINGERPRINT):
        """Remove what a match lists unless another record hangs on it."""
        for kind, end in reversed(self.match(tokens, fingerprint)):
            prefix = tuple(tokens[:end])
            if kind == 0 and any(
                other[0] == fingerprint
                and other[1][:end] == prefix
                and (other[1] != prefix or other[2] != 0)
                for other in self.stored
            ):
                continue
            self.stored.discard((fingerprint, prefix, kind))
