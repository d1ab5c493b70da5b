"""The demo's character model in plain NumPy.

A transformer decoder over single characters, with about 220,000 weights, trained on Python code.
It does not access files: the caller reads ``model.safetensors`` and passes its content. Keys and
values are stored in one float16 array ``(2 * layers, heads, context, head_dim)``: keys in the
first ``layers`` rows, values in the others. The Core ML packages of the demo store them in the
same form in their state ``kv_cache``.

Attention reads only entries up to the token's own position. They are first copied to new
contiguous float32 memory, so the length and the strides of the cache do not affect the
arithmetic: logits are bit-identical for every context.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

__all__ = ["CharModel"]

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Reals: TypeAlias = np.ndarray[Any, np.dtype[np.floating[Any]]]
Halves: TypeAlias = np.ndarray[Any, np.dtype[np.float16]]
Tokens: TypeAlias = Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]

_ALIGNMENT_BYTES = 64  # a cache line


def _contiguous(values: np.ndarray[Any, Any]) -> Floats:
    """Return a copy of `values` in new float32 memory with a fixed alignment.

    BLAS may sum in another order for another alignment; this excludes that.
    """
    room = np.empty(values.size + _ALIGNMENT_BYTES // 4, np.float32)
    skip = -room.ctypes.data % _ALIGNMENT_BYTES // 4  # elements before the first aligned one
    copy = room[skip : skip + values.size].reshape(values.shape)
    copy[...] = values
    return copy


def softmax(scores: Reals) -> Reals:
    """Return the softmax over the last axis."""
    # the largest exponent is 0, so that no power overflows
    powers: Reals = np.exp(scores - scores.max(axis=-1, keepdims=True))
    powers /= powers.sum(axis=-1, keepdims=True)
    return powers


def _rotate(x: Floats, cosine: Floats, sine: Floats) -> Floats:
    """Return `x` with each pair (i, i + half) of the last axis rotated by its position's angle.

    `x`: (..., positions, head_dim). `cosine`, `sine`: of the angles, (positions, head_dim).
    """
    half = x.shape[-1] // 2
    turned = np.concatenate((-x[..., half:], x[..., :half]), axis=-1)
    return x * cosine + turned * sine


class CharModel:
    """The demo's transformer, with the tensors and the metadata of ``model.safetensors``.

    A character's token is its index in `vocabulary`. Methods raise before they write to a cache.
    An instance does not change after construction, so threads may share it, each with its own
    cache. A step at position 300 takes less than a millisecond.
    """

    def __init__(
        self, arrays: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str]
    ) -> None:
        """Copy the tensors as float32, and compute the tables of rotations.

        `arrays`: tensors by name. `metadata` has ``config`` and ``vocabulary`` as JSON.
        """
        self.config: dict[str, int | float] = json.loads(metadata["config"])
        self.vocabulary: str = json.loads(metadata["vocabulary"])
        self._token_of = {character: token for token, character in enumerate(self.vocabulary)}
        self.max_context: int = int(self.config["max_context"])
        self._layers = int(self.config["layers"])
        self._heads = int(self.config["heads"])
        self._head_dim = int(self.config["head_dim"])
        self._epsilon = np.float32(self.config["norm_epsilon"])
        self._scale = np.float32(self._head_dim**-0.5)
        self._weights = {name: _contiguous(array) for name, array in arrays.items()}
        self._cosine, self._sine = self._rotary_tables(0, self.max_context)

    def _rotary_tables(self, start: int, stop: int) -> tuple[Floats, Floats]:
        """Return cosines and sines of the angles of positions `start` to `stop`.

        Each is (stop - start, head_dim); both halves of the last axis have the same angles.
        """
        half = self._head_dim // 2
        frequency = float(self.config["rope_base"]) ** (-np.arange(half) / half)
        angle = np.arange(start, stop)[:, None] * frequency
        angle = np.concatenate((angle, angle), axis=-1)
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text: printable ASCII and newlines; ValueError for others."""
        tokens = [self._token_of.get(character, -1) for character in text]
        if -1 in tokens:
            index = tokens.index(-1)
            raise ValueError(
                f"text: character {text[index]!r} at index {index} is not in the vocabulary; "
                "expected printable ASCII or a newline: replace it"
            )
        return tokens

    def decode(self, tokens: Tokens) -> str:
        """Return the text of tokens; raise ValueError if one is out of range."""
        return "".join(self.vocabulary[token] for token in self._check_tokens(tokens).tolist())

    def new_cache(self, context: int) -> Halves:
        """Return an empty cache for `context` tokens, (2 * layers, heads, context, head_dim)."""
        if not 1 <= context <= self.max_context:
            raise ValueError(
                f"context: {context} is out of range; expected 1 to {self.max_context}"
            )
        return np.zeros((2 * self._layers, self._heads, context, self._head_dim), np.float16)

    def prefill(
        self,
        tokens: Tokens,
        cache: Halves,
        *,
        position: int = 0,
        mask: Reals | None = None,
        every: bool = False,
    ) -> Floats:
        """Run tokens from `position` on; return the logits after the last, or after `every` one.

        Their keys and values are written to the cache; earlier positions must be filled. `mask`:
        rows of a mask of `mlstate.kv` for these tokens, (1, 1, tokens, positions), added to the
        scores; None: each token attends to all up to itself. Logits are (vocabulary,), with `every`
        (tokens, vocabulary). They agree with single steps up to rounding, not in every bit.
        """
        ids = self._check_tokens(tokens)
        self._check_cache(cache, position, len(ids))
        end = position + len(ids)
        if mask is None:
            ahead = np.arange(end) > np.arange(position, end)[:, None]
            rows = np.where(ahead, np.float32(-np.inf), np.float32(0.0))
        else:
            rows = self._check_mask(mask, len(ids), end)
        written, attended = slice(position, end), slice(0, end)
        logits = self._forward(ids, position, cache, rows, written, attended, every=every)
        return logits if every else logits[-1]

    def step(
        self,
        token: int,
        position: int,
        cache: Halves,
        *,
        mask: Reals | None = None,
        attention_size: int | None = None,
        sinks: int = 0,
    ) -> Floats:
        """Run the token at `position`, and return the logits for the character after it.

        Later positions of the cache are neither read nor written. A `mask`, (1, 1, 1, positions),
        of `mlstate.kv.create_decode_mask` gives masked positions no weight; with `attention_size`,
        only that many earlier tokens, and the first `sinks` ones, are read. Both agree up to
        rounding. Logits, (vocabulary,), are bit-identical for every context and memory layout of
        the cache. Raises ValueError if both are passed, or if an argument does not fit.
        """
        ids = self._check_tokens([token])
        self._check_cache(cache, position, 1)
        if mask is not None and attention_size is not None:
            raise ValueError("mask and attention_size exclude each other: pass one of them")
        rows = None if mask is None else self._check_mask(mask, 1, position + 1)
        attended: slice | Tokens = slice(0, position + 1)
        # otherwise the window and the sinks are all positions
        if attention_size is not None and position - attention_size > sinks:
            window = range(position - attention_size, position + 1)
            attended = [*range(sinks), *window] if sinks else slice(window.start, window.stop)
        written = slice(position, position + 1)
        logits: Floats = self._forward(ids, position, cache, rows, written, attended)[0]
        return logits

    def step_in_slot(
        self, token: int, position: int, cache: Halves, *, slot: int, slots: int
    ) -> Floats:
        """Run one token of a cache whose slots are in any order, such as a ring.

        The token's key and value are written to `slot`; the first `slots` slots are attended to.
        `position` may exceed the model's context: keys depend on distances only. Returns the
        logits for the next character, (vocabulary,).
        """
        ids = self._check_tokens([token])
        self._check_cache(cache, slot, 1)
        self._check_cache(cache, slots - 1, 1)
        written, attended = slice(slot, slot + 1), slice(0, slots)
        logits: Floats = self._forward(ids, position, cache, None, written, attended)[0]
        return logits

    def sample(
        self, logits: Floats, generator: np.random.Generator, *, temperature: float = 0.5
    ) -> int:
        """Return a token drawn by `generator`, with the chances of `logits` over `temperature`.

        A `temperature` of 0 selects the most likely token, without a random number. Raises
        ValueError if it is negative.
        """
        if temperature < 0:
            raise ValueError(f"temperature: got {temperature}; expected 0 (greedy) or more")
        if temperature == 0:
            return int(logits.argmax())
        chances = np.cumsum(softmax(logits.astype(np.float64) / temperature))
        drawn = int(np.searchsorted(chances, generator.random() * chances[-1], side="right"))
        return min(drawn, len(self.vocabulary) - 1)  # rounding may give the number above the last

    def _angles(self, position: int, end: int) -> tuple[Floats, Floats]:
        """Return cosines and sines of positions `position` to `end`, from tables if possible."""
        if end <= self.max_context:
            return self._cosine[position:end], self._sine[position:end]
        return self._rotary_tables(position, end)

    def _forward(
        self,
        tokens: np.ndarray[Any, Any],
        position: int,
        cache: Halves,
        mask: Floats | None,
        written: slice,
        attended: slice | Tokens,
        *,
        every: bool = False,
    ) -> Floats:
        """Run tokens whose positions count from `position`; the arguments are checked already.

        `written`: slots of the cache for their keys and values. `attended`: slots that they attend
        to. `mask`: added to the scores, (tokens, slots); None: no mask. Returns the logits after
        the last token, (1, vocabulary), or after `every` one, (tokens, vocabulary).
        """
        length, end = len(tokens), position + len(tokens)
        weights, layers = self._weights, self._layers
        cosine, sine = self._angles(position, end)
        x = _contiguous(weights["embed.weight"][tokens])
        for index in range(layers):
            name = f"layers.{index}."
            joint = self._norm(x, name + "attn_norm.weight") @ weights[name + "qkv.weight"].T
            shape = (length, 3, self._heads, self._head_dim)
            # each (heads, tokens, head_dim)
            query, key, value = joint.reshape(shape).transpose(1, 2, 0, 3)
            cache[index, :, written] = _rotate(key, cosine, sine)
            cache[layers + index, :, written] = value
            keys = _contiguous(cache[index][:, attended])
            values = _contiguous(cache[layers + index][:, attended])
            rotated = _contiguous(_rotate(query, cosine, sine))
            scores = _contiguous(rotated @ keys.transpose(0, 2, 1)) * self._scale
            if mask is not None:
                scores += mask
            mixed = _contiguous(softmax(scores)) @ values
            flat = _contiguous(mixed.transpose(1, 0, 2)).reshape(length, -1)
            x = x + flat @ weights[name + "out.weight"].T
            inner = self._norm(x, name + "mlp_norm.weight") @ weights[name + "gate_up.weight"].T
            gate, up = np.split(inner, 2, axis=-1)
            hidden = _contiguous(gate / (1 + np.exp(-gate)) * up)
            x = x + hidden @ weights[name + "down.weight"].T
        logits: Floats = (
            self._norm(x if every else x[-1:], "norm.weight") @ weights["embed.weight"].T
        )
        return logits

    def _norm(self, x: Floats, name: str) -> Floats:
        """Return rows of `x` divided by their root mean square, times the weight `name`."""
        mean = np.square(x).mean(axis=-1, keepdims=True)
        return _contiguous(x / np.sqrt(mean + self._epsilon) * self._weights[name])

    def _check_tokens(self, tokens: Tokens) -> np.ndarray[Any, Any]:
        """Return `tokens` as a flat integer array; an empty one is allowed.

        Raises ValueError if they are not a flat sequence of integers, or one is out of range.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(
                f"tokens: got {ids.dtype} of shape {ids.shape}; expected a flat sequence "
                "of integers"
            )
        ids = ids.astype(np.intp)
        size = len(self.vocabulary)
        wrong = np.flatnonzero((ids < 0) | (ids >= size))
        if wrong.size:
            raise ValueError(
                f"tokens: {ids[wrong[0]]} at index {wrong[0]} is out of range; "
                f"expected 0 to {size - 1}"
            )
        return ids

    def _check_mask(self, mask: Reals, length: int, end: int) -> Floats:
        """Return the rows of a mask for `length` tokens and the first `end` positions, as float32.

        Raises ValueError if the mask has another shape.
        """
        if mask.ndim != 4 or mask.shape[:3] != (1, 1, length) or mask.shape[3] < end:
            raise ValueError(
                f"mask: got shape {mask.shape}; expected (1, 1, {length}, at least {end})"
            )
        return mask[0, 0, :, :end].astype(np.float32)

    def _check_cache(self, cache: Halves, position: int, length: int) -> None:
        """Raise ValueError unless `length` tokens can be written to `cache` at `position`.

        Raises TypeError if `cache` is not a float16 array.
        """
        if not isinstance(cache, np.ndarray) or cache.dtype != np.float16:
            kind = getattr(cache, "dtype", type(cache).__name__)
            raise TypeError(f"cache: got {kind}; expected a float16 ndarray, as new_cache() gives")
        outer = (2 * self._layers, self._heads, self._head_dim)
        if cache.ndim != 4 or (*cache.shape[:2], cache.shape[3]) != outer:
            raise ValueError(
                f"cache: got shape {cache.shape}; expected "
                f"({outer[0]}, {outer[1]}, context, {outer[2]})"
            )
        room = min(cache.shape[2], self.max_context)
        if length < 1 or position < 0 or position + length > room:
            raise ValueError(
                f"cache: {length} token(s) at position {position} do not fit its {room} "
                "positions; expand the cache, or pass fewer tokens (at least one)"
            )
