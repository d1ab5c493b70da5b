"""GPT-2 small as its 148 parameters: gradients with known bits, and modules that produce them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

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


def gradients_one_by_one(
    rank: int, shapes: Shapes, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Full gradients of one rank, separately allocated; any process can make any rank's."""
    noise = torch.Generator().manual_seed(rank)
    numbers = torch.randn(PERIOD, generator=noise).to(dtype)
    at = 0
    for name, shape in shapes.items():
        flat = torch.empty(prod(shape), dtype=dtype)
        done = 0
        while done < len(flat):
            start = (at + done) % PERIOD
            count = min(len(flat) - done, PERIOD - start)
            flat[done : done + count] = numbers[start : start + count]
            done += count
        at += done
        yield name, flat.view(shape)


def gradients_of(rank: int, shapes: Shapes, dtype: torch.dtype) -> Tensors:
    """Return all of them."""
    return dict(gradients_one_by_one(rank, shapes, dtype))


def sums_in_order(
    shapes: Shapes, dtype: torch.dtype, divisor: float = 1.0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Sums in the order of ranks, in float32, rounded once, one parameter at a time."""
    everyones = [gradients_one_by_one(rank, shapes, dtype) for rank in range(WORLD)]
    for (name, first), *others in zip(*everyones, strict=True):
        total = first.float()
        for _, of in others:
            total = total + of.float()
        yield name, (total / divisor).to(dtype)


def buckets_of(shapes: Shapes, item_bytes: int, most: int) -> list[list[str]]:
    """Names by bucket, in the order of the backward pass; a bucket has at least `most` elements."""
    buckets: list[list[str]] = []
    size = most
    for name, shape in reversed(shapes.items()):
        if size >= most:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += prod(shape) * item_bytes
    return buckets


# ---- modules ----


class _Give(torch.autograd.Function):
    """Gives each parameter its gradient in the backward pass, in separate memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradients: Any, *parameters: Any) -> torch.Tensor:
        ctx.gradients = gradients
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> Any:
        # autograd copies gradients that are referenced elsewhere
        return (outputs[0], None, *ctx.gradients)


class Part(torch.nn.Module):
    """Parameters that are used together."""

    def __init__(self, gradients: Tensors) -> None:
        super().__init__()
        self.gradients = list(gradients.values())
        self.names = list(gradients)
        self.own = torch.nn.ParameterList(torch.zeros_like(g) for g in self.gradients)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Give.apply(x, self.gradients, *self.own)  # type: ignore[no-any-return]


class Model(torch.nn.Module):
    """Embeddings, twelve blocks, and the last norm: a backward pass that only moves gradients."""

    def __init__(self, gradients: Tensors) -> None:
        super().__init__()
        groups: dict[str, Tensors] = {}
        for name, gradient in gradients.items():
            stem = ".".join(name.split(".")[:2]) if name.startswith("h.") else name[:2]
            groups.setdefault(stem, {})[name] = gradient
        self.parts = torch.nn.ModuleList(Part(group) for group in groups.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x

    def gradients(self) -> Tensors:
        """Gradients by the names that the model was made with."""
        return {
            name: parameter.grad
            for part in self.parts
            for name, parameter in zip(part.names, part.own, strict=True)
        }
