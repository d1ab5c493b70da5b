"""The demo's character model in torch: the one definition that training and conversion share.

A small transformer decoder: RMSNorm before each block, rotary positions, SwiGLU, one matrix for
the embedding and for the output layer. ``CharTransformer`` sees whole sequences and is what
training uses; ``StatefulTransformer`` holds the same weights, keeps keys and values in a state
named ``kv_cache`` and is what Core ML runs. ``mlstate/demo/model.py`` is the same in plain NumPy.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from demo_text import VOCABULARY
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes of the model; written into the weights file and read back by the NumPy model."""

    vocabulary_size: int = len(VOCABULARY)
    model_dim: int = 64
    layers: int = 4
    heads: int = 2
    head_dim: int = 32
    hidden_dim: int = 192
    max_context: int = 512
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5

    def to_dict(self) -> dict[str, int | float]:
        """Return the sizes as a plain dictionary, for JSON."""
        return asdict(self)


def rotary_tables(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, each (max_context, head_dim), computed in float64.

    Frequencies repeat in the second half of a head, as rotation pairs element i with
    element i + head_dim / 2.
    """
    half = config.head_dim // 2
    frequency = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(config.max_context, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().float(), angle.sin().float()


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + half) of the last axis by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class RMSNorm(nn.Module):
    """Divide by the root mean square of the last axis, then scale by a learned gain."""

    def __init__(self, dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.epsilon)
        return x * scale * self.weight


class Block(nn.Module):
    """One layer: attention and feed-forward, each added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_dim = config.head_dim
        inner = config.heads * config.head_dim
        self.attn_norm = RMSNorm(config.model_dim, config.norm_epsilon)
        self.qkv = nn.Linear(config.model_dim, 3 * inner, bias=False)
        self.out = nn.Linear(inner, config.model_dim, bias=False)
        self.mlp_norm = RMSNorm(config.model_dim, config.norm_epsilon)
        self.gate_up = nn.Linear(config.model_dim, 2 * config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.model_dim, bias=False)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value, each (batch, heads, length, head_dim)."""
        batch, length = int(x.shape[0]), int(x.shape[1])
        query, key, value = self.qkv(self.attn_norm(x)).chunk(3, dim=-1)
        shape = (batch, length, self.heads, self.head_dim)
        return (
            query.reshape(shape).transpose(1, 2),
            key.reshape(shape).transpose(1, 2),
            value.reshape(shape).transpose(1, 2),
        )

    def finish(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Add the attention output (batch, heads, length, head_dim), then the feed-forward."""
        batch, length = int(x.shape[0]), int(x.shape[1])
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, self.heads * self.head_dim))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class CharTransformer(nn.Module):
    """The whole model over complete sequences; no state."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary_size, config.model_dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.model_dim, config.norm_epsilon)
        cosine, sine = rotary_tables(config)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all matrices from a normal distribution, smaller for layers with added output."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                std = 0.08 / math.sqrt(2 * self.config.layers) if deep else 0.08
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, length, vocabulary) for tokens (batch, length)."""
        length = tokens.shape[1]
        cosine, sine = self.cosine[:length], self.sine[:length]
        x = self.embed(tokens)
        for layer in self.layers:
            query, key, value = layer.project(x)
            query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = layer.finish(x, mixed)
        return functional.linear(self.norm(x), self.embed.weight)


class StatefulTransformer(nn.Module):
    """The same weights over a state ``kv_cache`` of (2 * layers, heads, context, head_dim).

    Keys are stored in rows 0 .. layers - 1, values in rows layers .. 2 * layers - 1. Each call
    takes ``length`` tokens that start at ``position``, writes their keys and values into the state
    and returns the logits of each. Entries after a token's own position are masked out.
    """

    def __init__(self, model: CharTransformer, context: int, length: int) -> None:
        super().__init__()
        config = model.config
        if not 1 <= length <= context <= config.max_context:
            raise ValueError(
                f"need 1 <= length <= context <= {config.max_context}, "
                f"got length {length}, context {context}"
            )
        self.model = model
        self.context = context
        self.length = length
        shape = (2 * config.layers, config.heads, context, config.head_dim)
        self.register_buffer("kv_cache", torch.zeros(shape, dtype=torch.float16))

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return logits (1, length, vocabulary); tokens (1, length) and position (1,) are int32."""
        model, config = self.model, self.model.config
        places = position + torch.arange(self.length, dtype=torch.int32)
        cosine = model.cosine[places]
        sine = model.sine[places]
        ahead = torch.arange(self.context, dtype=torch.int32)[None, :] > places[:, None]
        mask = ahead.to(torch.float32) * -3e4
        begin = position[0]
        end = begin + self.length
        x = model.embed(tokens)
        for index, layer in enumerate(model.layers):
            query, key, value = layer.project(x)
            query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
            row = config.layers + index
            self.kv_cache[index : index + 1, :, begin:end, :] = key.to(torch.float16)
            self.kv_cache[row : row + 1, :, begin:end, :] = value.to(torch.float16)
            keys = self.kv_cache[index : index + 1].to(torch.float32)
            values = self.kv_cache[row : row + 1].to(torch.float32)
            scores = torch.matmul(query, keys.transpose(2, 3)) * config.head_dim**-0.5 + mask
            x = layer.finish(x, torch.matmul(torch.softmax(scores, dim=-1), values))
        return functional.linear(model.norm(x), model.embed.weight)
