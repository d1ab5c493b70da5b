"""Attention sizes: the time of a decoding step, and the effect on a model: docs/attention_size.md.

``python benchmarks/bench_attention.py [--quick] [--json] [--only PART] [--store]``; mlstate must be
installed, torch takes part if it is. Times are CPU times of one thread. The effect is measured with
the demo's model on Python code that it was not trained on.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import Run, main
from optional import optional
from rows import Line, Row, Ways

from mlstate.checkpoint import load_file, load_metadata
from mlstate.demo.model import CharModel
from mlstate.demo.rolling import RollingContext
from mlstate.kv import create_attention_size_mask, create_decode_mask

torch = optional("torch")
ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = ROOT / "mlstate" / "demo" / "data" / "model.safetensors"
HEADS, HEAD_DIM = 8, 128
LENGTHS = (512, 2048, 8192, 32768)
ATTENTION = 128
SIZES = (8, 16, 32, 64, 128, 192, 256, 384)
SINKS = 4
PROMPTS, PROMPT, CONTEXT = 100, 256, 512
ROLLED, CAPACITY, ROLLED_TEXTS = 1024, 256, 40

Array = np.ndarray[Any, Any]


# ---- time ----


def attend(query: Array, keys: Array, values: Array, mask: Array | None = None) -> Array:
    """Attention of one token, (heads, 1, head_dim), with NumPy."""
    scores = query @ keys.transpose(0, 2, 1)
    if mask is not None:
        scores += mask
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers @ values / powers.sum(axis=-1, keepdims=True)


def attend_window(query: Array, keys: Array, values: Array, start: int, sinks: int = 0) -> Array:
    """The same for the positions from `start` on, and the sinks, which are copied next to them."""
    if sinks:
        keys = np.concatenate((keys[:, :sinks], keys[:, start:]), axis=1)
        values = np.concatenate((values[:, :sinks], values[:, start:]), axis=1)
        start = 0
    return attend(query, keys[:, start:], values[:, start:])


def layer_step(length: int) -> Row:
    """Compare one token's attention in one layer over a full cache."""
    generator = np.random.default_rng(1)
    keys, values = generator.standard_normal((2, HEADS, length, HEAD_DIM), np.float32)
    query = generator.standard_normal((HEADS, 1, HEAD_DIM), np.float32)
    mask = create_decode_mask(length, ATTENTION, length - 1, dtype=np.float32)[0]
    start = length - 1 - ATTENTION
    window = partial(attend_window, query, keys, values, start)
    np.testing.assert_allclose(attend(query, keys, values, mask), window(), rtol=1e-4, atol=1e-5)
    ways: Ways = {
        "NumPy: all positions": partial(attend, query, keys, values),
        "NumPy: mask": partial(attend, query, keys, values, mask),
        "NumPy: window only": window,
        f"NumPy: window and {SINKS} sinks": partial(window, sinks=SINKS),
    }
    if torch is not None:
        torch.set_num_threads(1)
        call = torch.nn.functional.scaled_dot_product_attention
        q, k, v = (torch.from_numpy(a)[None] for a in (query, keys, values))
        rows = torch.from_numpy(mask)[None]

        def with_sinks() -> object:
            return call(q, *(torch.cat((a[:, :, :SINKS], a[:, :, start:]), 2) for a in (k, v)))

        assert torch.allclose(
            call(q, k, v, attn_mask=rows), call(q, k[:, :, start:], v[:, :, start:]), atol=1e-5
        )
        ways |= {
            "torch: all positions": partial(call, q, k, v),
            "torch: mask": partial(call, q, k, v, attn_mask=rows),
            "torch: window only": lambda: call(q, k[:, :, start:], v[:, :, start:]),
            f"torch: window and {SINKS} sinks": with_sinks,
        }
    mib = 2 * keys.nbytes / (1 << 20)
    return Row(
        f"attention of 1 token, {length} positions ({mib:.3g} MiB of keys and values), "
        f"attention size {ATTENTION}",
        ways,
        base="NumPy: all positions",
        unit="us",
        clock=time.thread_time_ns,
    )


def layer_steps(run: Run) -> Iterator[Row]:
    """Measure a layer's attention at several lengths."""
    for length in LENGTHS[: 2 if run.quick else None]:
        yield layer_step(length)


def model_step(run: Run) -> Iterator[Row]:
    """Measure a whole step of the demo's model at the end of its context."""
    model = load_model()
    position = CONTEXT - 1
    cache = np.random.default_rng(1).standard_normal(model.new_cache(CONTEXT).shape)
    mask = create_decode_mask(CONTEXT, ATTENTION, position, dtype=np.float32)
    step = partial(model.step, 1, position, cache.astype(np.float16))
    windows = {
        f"window only, attention size {size}": partial(step, attention_size=size)
        for size in (256, ATTENTION, 32)
    }
    yield Row(
        f"a step of the demo's model at position {position}",
        {"all positions": step, "mask": partial(step, mask=mask)} | windows,
        base="all positions",
        unit="us",
        rounds=2,
        clock=time.thread_time_ns,
    )


# ---- effect ----


def load_model() -> CharModel:
    """Load the demo's model."""
    return CharModel(load_file(WEIGHTS), load_metadata(WEIGHTS))


def load_texts(model: CharModel, count: int, length: int) -> list[list[int]]:
    """Load code that the model was not trained on, as tokens."""
    sys.path.insert(0, str(ROOT / "tools"))
    from demo_text import load_unseen

    return [model.encode(text) for text in load_unseen(count, length)]


def reduced_rows(size: int | None, sinks: int) -> Array:
    """The mask of a prompt with full attention, and of generated tokens with reduced attention."""
    full, options = CONTEXT, {"dtype": np.float32}
    before = create_attention_size_mask(CONTEXT, full, 0, rows=(0, PROMPT), **options)
    reach = full if size is None else size
    after = create_attention_size_mask(
        CONTEXT, reach, 0, sinks=sinks, rows=(PROMPT, CONTEXT), **options
    )
    return np.concatenate((before, after), axis=2)


def log_chances(logits: Array) -> Array:
    """The logarithm of the softmax over the last axis, base 2."""
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return (logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))) / np.log(2)


def read_all(model: CharModel, texts: list[list[int]], rows: Array) -> list[Array]:
    """Run texts with a mask; return the logits of the characters after the prompt, by text."""
    logits_read = []
    for tokens in texts:
        cache = model.new_cache(CONTEXT)
        logits_read.append(model.prefill(tokens, cache, mask=rows, every=True)[PROMPT - 1 : -1])
    return logits_read


def write_all(
    model: CharModel, texts: list[list[int]], size: int | None, sinks: int
) -> list[list[int]]:
    """Continue the prompts with the most likely characters, with reduced attention."""
    written = []
    for tokens in texts:
        cache, tokens_written = model.new_cache(CONTEXT), []
        logits = model.prefill(tokens[:PROMPT], cache)
        for position in range(PROMPT, CONTEXT):
            tokens_written.append(int(logits.argmax()))
            logits = model.step(
                tokens_written[-1], position, cache, attention_size=size, sinks=sinks
            )
        written.append(tokens_written)
    return written


def same_start(a: list[int], b: list[int]) -> int:
    """The number of equal tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def effect(run: Run) -> Iterable[Row]:
    """Compare the model's losses and tokens with reduced and with full attention."""
    model = load_model()
    texts = load_texts(model, 10 if run.quick else PROMPTS, CONTEXT)
    right = [np.array(tokens[PROMPT:]) for tokens in texts]
    reference: tuple[list[Array], list[list[int]]] | None = None
    lines = []
    cases = [(None, 0), *((size, sinks) for sinks in (0, SINKS) for size in SIZES)]
    for size, sinks in cases:
        logits = read_all(model, texts, reduced_rows(size, sinks))
        written = write_all(model, texts, size, sinks)
        reference = reference or (logits, written)
        bits = [
            -float(log_chances(reduced_logits)[np.arange(len(after)), after].mean())
            for reduced_logits, after in zip(logits, right, strict=True)
        ]
        agreed = [
            float((reduced_logits.argmax(-1) == full.argmax(-1)).mean())
            for reduced_logits, full in zip(logits, reference[0], strict=True)
        ]
        starts = [same_start(a, b) for a, b in zip(written, reference[1], strict=True)]
        name = "full" if size is None else f"{size}" + (f", {sinks} sinks" if sinks else "")
        extra: dict[str, object] = {
            "mean": f"{statistics.mean(bits):.3f}",
            "next agrees": f"{100 * statistics.mean(agreed):.1f} %",
            "same start": f"{statistics.median(starts):.0f}",
            "all same": f"{100 * statistics.mean(s == CONTEXT - PROMPT for s in starts):.0f} %",
        }
        lines.append(Line(name, bits, extra=extra))
    run.report.table(
        f"attention size, {len(texts)} prompts of {PROMPT} characters, {CONTEXT - PROMPT} more",
        lines,
        unit="bits",
        note="bits for each character of the real text; 'next agrees': the most likely next "
        "character is the one of full attention; 'same start': characters written before the "
        "first difference, median",
    )
    return ()


def rolling_bits(model: CharModel, tokens: list[int], sinks: int, shift: bool) -> float:
    """Bits for each character beyond the model's context, read through a rolling cache."""
    context = RollingContext(model, CAPACITY, sinks, shift_sinks=shift)
    bits = 0.0
    for position, token in enumerate(tokens[:-1]):
        logits = context.step(token)
        if position + 1 >= CONTEXT:
            bits -= float(log_chances(logits)[tokens[position + 1]])
    return bits / (len(tokens) - CONTEXT)


def refilled_bits(model: CharModel, tokens: list[int]) -> float:
    """The same for a cache of the context that is refilled with its newest half when full."""
    cache, start, bits = model.new_cache(CONTEXT), 0, 0.0
    for position, token in enumerate(tokens[:-1]):
        if position - start == CONTEXT:
            start = position - CONTEXT // 2
            cache = model.new_cache(CONTEXT)
            model.prefill(tokens[start:position], cache)
        logits = model.step(token, position - start, cache)
        if position + 1 >= CONTEXT:
            bits -= float(log_chances(logits)[tokens[position + 1]])
    return bits / (len(tokens) - CONTEXT)


def rolling(run: Run) -> Iterable[Row]:
    """Compare ways to read beyond the model's context."""
    model = load_model()
    texts = load_texts(model, 4 if run.quick else ROLLED_TEXTS, ROLLED)
    lines = []
    ways: tuple[tuple[str, Callable[[list[int]], float]], ...] = (
        (f"refill {CONTEXT} with the newest half", partial(refilled_bits, model)),
        ("rolling, no sinks", lambda t: rolling_bits(model, t, 0, False)),
        (f"rolling, {SINKS} sinks", lambda t: rolling_bits(model, t, SINKS, False)),
        (f"rolling, {SINKS} sinks, shifted", lambda t: rolling_bits(model, t, SINKS, True)),
    )
    for name, way in ways:
        bits = [way(tokens) for tokens in texts]
        lines.append(Line(name, bits, extra={"mean": f"{statistics.mean(bits):.3f}"}))
    run.report.table(
        f"characters {CONTEXT} to {ROLLED} of {len(texts)} texts, rolling cache of {CAPACITY}",
        lines,
        unit="bits",
        note=f"bits for each character; the model was trained for {CONTEXT} positions",
    )
    return ()


if __name__ == "__main__":
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":
        # NumPy reads it at import; times are CPU times of one thread
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    main(
        __doc__,
        "attention",
        "mlstate: attention sizes",
        {"layer": layer_steps, "model": model_step, "effect": effect, "rolling": rolling},
        quick="fewer repeats, lengths and texts",
        rounds=(51, 9),
    )
