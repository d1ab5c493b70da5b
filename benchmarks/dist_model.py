"""GPT-2 small as its 148 parameters: gradients with known bits, for `bench_dist.py`."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

WORLD = 2
PERIOD = 1_000_003  # length of the repeated numbers: divides no size of the model
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, torch.Tensor]


def shapes_of(quick: bool) -> Shapes:
    """Shapes by name, in the order of the forward pass; a small model for a quick look."""
    width, tokens = (64, 5_003) if quick else (768, 50_257)
    shapes: Shapes = {"wte": (tokens, width), "wpe": (1024, width)}
    for block in range(12):
        for name, shape in (
            ("ln_1", (width,)),
            ("attn.c_attn", (width, 3 * width)),
            ("attn.c_proj", (width, width)),
            ("ln_2", (width,)),
            ("mlp.c_fc", (width, 4 * width)),
            ("mlp.c_proj", (4 * width, width)),
        ):
            shapes[f"h.{block}.{name}.weight"] = shape
            shapes[f"h.{block}.{name}.bias"] = shape[-1:]
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def size_text(quick: bool, dtype: str) -> str:
    """Describe the amount of data to reduce."""
    shapes = shapes_of(quick)
    count = sum(map(prod, shapes.values()))
    size = count * DTYPES[dtype].itemsize
    amount = f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
    return f"{len(shapes)} parameters, {count / 1e6:.3g} M elements, {dtype}, {amount} a rank"


def gradients_one_by_one(
    rank: int, shapes: Shapes, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Full gradients of one rank, separately allocated; any process can make any rank's."""
    noise = torch.Generator().manual_seed(rank)
    numbers = torch.randn(PERIOD, generator=noise).to(dtype)
    at = 0
    for name, shape in shapes.items():
        repeats = -(-(at + prod(shape)) // PERIOD)
        flat = numbers.repeat(repeats)[at : at + prod(shape)].clone()
        at = (at + prod(shape)) % PERIOD
        yield name, flat.view(shape)


def sums_in_order(shapes: Shapes, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Sums in the order of ranks, in float32, rounded once, one parameter at a time."""
    everyones = [gradients_one_by_one(rank, shapes, dtype) for rank in range(WORLD)]
    for (name, first), *others in zip(*everyones, strict=True):
        total = first.float()
        for _, of in others:
            total = total + of.float()
        yield name, total.to(dtype)


def buckets_of(shapes: Shapes, item_bytes: int, most: int) -> list[list[str]]:
    """Names by bucket, in the order of the backward pass; a bucket has at least `most` bytes."""
    buckets: list[list[str]] = []
    size = most
    for name, shape in reversed(shapes.items()):
        if size >= most:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += prod(shape) * item_bytes
    return buckets
