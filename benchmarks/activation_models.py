"""Models for `bench_activation.py`: a pyramid of convolutions, a transformer of equal blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

STAGES = ((4, 24), (4, 48), (4, 96), (4, 192), (5, 384))  # convolutions, channels
BLOCKS = 24
HEADS = 4


class Transformer(nn.Module):
    """One block: attention and two linear layers, each after a normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.mixed(self.before(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


@dataclass
class Model:
    """Blocks that run one after the other, and their input."""

    name: str
    blocks: list[nn.Module]
    sample: torch.Tensor


def pyramid(quick: bool) -> Model:
    """Make 21 convolutions, each with BatchNorm and SiLU; every stage halves the image size."""
    torch.manual_seed(20)
    blocks: list[nn.Module] = []
    entering = 3
    for stage, (count, channels) in enumerate(STAGES):
        for i in range(count):
            stride = 2 if stage and not i else 1
            convolution = nn.Conv2d(entering, channels, 3, stride, padding=1, bias=False)
            blocks.append(nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.SiLU()))
            entering = channels
    batch, side = (1, 64) if quick else (4, 128)
    name = f"pyramid of {len(blocks)} convolutions, {batch} images of {side} x {side}"
    return Model(name, blocks, torch.randn(batch, 3, side, side))


def transformer(quick: bool) -> Model:
    """Make 24 equal blocks."""
    torch.manual_seed(20)
    batch, length, width = (1, 64, 64) if quick else (2, 256, 256)
    blocks: list[nn.Module] = [Transformer(width) for _ in range(BLOCKS)]
    name = f"transformer of {BLOCKS} equal blocks, width {width}, {batch} x {length} tokens"
    return Model(name, blocks, torch.randn(batch, length, width))


@dataclass
class Clock:
    """The blocks that a step recomputed, and how long each took."""

    again: list[tuple[int, float]] = field(default_factory=list)  # index of a block, seconds
    seen: set[int] = field(default_factory=set)

    def reset(self) -> None:
        self.again.clear()
        self.seen.clear()


class Timed(nn.Module):
    """A block that reports its run time to a clock, even if its run ends early."""

    def __init__(self, inner: nn.Module, place: int, clock: Clock) -> None:
        super().__init__()
        self.inner = inner
        self._place = place
        self._clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        clock, began = self._clock, time.perf_counter()
        try:
            return self.inner(x)
        finally:
            if self._place in clock.seen:
                clock.again.append((self._place, time.perf_counter() - began))
            clock.seen.add(self._place)


class Seed(torch.autograd.Function):
    """A loss with a fixed gradient, allocated on each backward pass."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, None]:
        return ctx.gradient.clone(), None


def step_of(
    forward: Callable[[torch.Tensor], torch.Tensor], sample: torch.Tensor, gradient: torch.Tensor
) -> Callable[[], None]:
    """Make a training step that owns its input and frees its results."""

    def step() -> None:
        entering = sample.clone()
        loss = Seed.apply(forward(entering), gradient)
        loss.backward()

    return step
