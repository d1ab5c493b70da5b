"""Caches of a toy model: every array depends on all tokens before it, so any mix-up shows."""

import numpy as np

from mlstate.kv import CacheEntry, CacheSpec, CacheState
from mlstate.prompts import PromptStore

MODEL = "toy"
TOKENS = np.random.default_rng(0).integers(0, 1000, 100)


def store_at(folder, **options):
    return PromptStore(folder / "store", model=MODEL, block_tokens=16, **options)


def spec_of(*kinds, positions=256, dtype="float32", window=24, sinks=0, head_dim=4):
    """One layer for each kind: keys and values, or one state."""
    entries = []
    for layer, kind in enumerate(kinds):
        if kind in ("recurrent", "conv", "opaque"):
            entries.append(CacheEntry(f"{layer}.state", kind, (1, 3, 5), dtype, layer=layer))
            continue
        for role in ("keys", "values"):
            size, options = positions, {}
            if kind == "sliding":
                size, options = window, {"window": window, "sinks": sinks}
            name, shape = f"{layer}.{role}", (1, 2, size, head_dim)
            entries.append(CacheEntry(name, kind, shape, dtype, layer=layer, role=role, **options))
    return CacheSpec(entries)


FULL = spec_of("full", "full")
HYBRID = spec_of("full", "recurrent", "sliding", "conv")


def empty_state(spec, make=np.zeros):
    return CacheState(spec, {n: make(s, d) for e in spec for n, (s, d) in e.arrays.items()}, 0)


def extra_before(extra, length):
    """The digests of the first `length` tokens; None without one."""
    return {place: digest for place, digest in (extra or {}).items() if place < length} or None


def _marks(tokens, extra):
    """One number for each position, of all tokens and digests up to it; exact in every dtype."""
    marks, mark = [], 7
    for position, token in enumerate(tokens):
        if position in (extra or {}):
            mark = mark * 7 + sum(map(ord, repr(extra[position])))
        mark = (mark * 31 + int(token) * 17 + 3) % 251
        marks.append(mark)
    return marks


def prefill(state, tokens, extra=None):
    """Write the tokens after those that the state has, as a model does."""
    marks = _marks(tokens, extra)
    for position in range(state.length, len(tokens)):
        for number, entry in enumerate(state.spec):
            array = state.arrays[entry.name]
            if entry.seq_axis is None:
                array[...] = marks[position] + number
                continue
            slot = state.next_slot(entry.name) if entry.kind == "sliding" else position
            array[(*(slice(None),) * entry.seq_axis, slot)] = marks[position] + number
        state.advance(1)
    return state


def prefilled(spec, tokens, extra=None):
    return prefill(empty_state(spec), tokens, extra)


def same(first, second):
    """Whether two states hold the same tokens, in the same or in other slots."""
    assert first.length == second.length
    for entry in first.spec:
        name = entry.name
        if entry.seq_axis is None:
            left, right = first.arrays[name], second.arrays[name]
        else:
            left, right = first.ordered(name), second.ordered(name)
        if not np.array_equal(left, right):
            return False
    return True


def is_zero(state, start=0):
    """Whether all positions from `start` on are zero; from 0 on, everything."""
    for entry in state.spec:
        array = np.asarray(state.arrays[entry.name])
        if entry.seq_axis is not None and start:
            if entry.kind == "sliding":
                continue
            array = array.take(range(start, entry.seq_length), entry.seq_axis)
        elif start:
            continue
        if array.any():
            return False
    return True


def check_every_match(store, prompts, spec, extra=None):
    """Restore each prompt as far as it is stored, and compare with a prefill of as many tokens.

    Each has the digests `extra`. Returns the numbers of tokens.
    """
    lengths = []
    for tokens in prompts:
        state = prefilled(spec, TOKENS[:5])
        with store.match(tokens, extra=extra, full=True) as match:
            lengths.append(store.restore(match, into=state))
        expected = prefilled(spec, tokens[: lengths[-1]], extra)
        assert same(state, expected) and is_zero(state, lengths[-1])
    return lengths


def flip(folder, needle):
    """Flip one bit in the first place of some bytes in the files of a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (at := path.read_bytes().find(needle)) >= 0:
            data = bytearray(path.read_bytes())
            data[at] ^= 1
            path.write_bytes(data)
            return path.name
    raise AssertionError("the bytes are in no file")
