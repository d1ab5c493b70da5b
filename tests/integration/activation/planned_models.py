"""Models, schedules and comparisons for the tests of plans on torch."""

import torch
from plan_model import ChainModel, State, refusal, run
from torch import nn

from mlstate.activation import Chain


class TransformerBlock(nn.Module):
    """A small block with attention, a mask if one is given, and dropout."""

    def __init__(self, width=32, heads=2, dropout=0.1):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask=None):
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        x = x + nn.functional.dropout(mixed, self.dropout, self.training)
        more = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + nn.functional.dropout(more, self.dropout, self.training)


class Language(nn.Module):
    """A language model: embedding, a loop over blocks, and a head that shares the embedding."""

    def __init__(self, blocks=4, width=32, tokens=50):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(TransformerBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        time = ids.shape[1]
        mask = torch.ones(time, time, dtype=torch.bool).tril()
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(x)


class Cache:
    """Keys of all previous blocks, in an object that every block changes in place."""

    def __init__(self):
        self.layers = []
        self.tokens = None  # a static cache: one tensor that blocks write to

    def update(self, layer, keys):
        if self.tokens is None:
            self.tokens = torch.zeros_like(keys)
        self.tokens[:] = keys
        while len(self.layers) <= layer:
            self.layers.append([])
        self.layers[layer].append(keys)
        return torch.cat([self.tokens, *self.layers[layer]], 1)


class CachedBlock(nn.Module):
    """Attends to the content of a cache after this block has added to it."""

    def __init__(self, layer, width):
        super().__init__()
        self.layer = layer
        self.keys, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, cache=None):
        keys = self.keys(x)
        if cache is not None:
            keys = cache.update(self.layer, keys)
        return x + self.out(nn.functional.scaled_dot_product_attention(x, keys, keys).tanh())


class Cached(nn.Module):
    """A loop over blocks that share a cache, as in decoders of language models."""

    def __init__(self, blocks=3, width=8):
        super().__init__()
        self.layers = nn.ModuleList(CachedBlock(i, width) for i in range(blocks))

    def forward(self, x, use_cache=True, cache=None):
        cache = (cache or Cache()) if use_cache else None
        for layer in self.layers:
            x = layer(x, cache=cache)
        assert cache is None or [len(keys) for keys in cache.layers] == [1] * len(self.layers)
        return x


def transformer(blocks=6, width=32):
    """Blocks and an input."""
    torch.manual_seed(0)
    model = nn.Sequential(*(TransformerBlock(width) for _ in range(blocks)))
    return model, torch.randn(2, 16, width)


def pyramid(stages=3, each=2, side=12):
    """Convolutions of decreasing size and increasing width, and an input."""
    torch.manual_seed(0)
    layers, before = [], 3
    for stage in range(stages):
        for k in range(each):
            width = 8 << min(stage, 2)
            conv = nn.Conv2d(before, width, 3, padding=1, stride=2 if stage and not k else 1)
            layers.append(nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU()))
            before = width
    return nn.Sequential(*layers), torch.randn(2, 3, side, side)


def perceptron(blocks=5, width=16, batch=8):
    """Linear, BatchNorm, GELU and dropout, and an input."""
    torch.manual_seed(0)

    def block():
        parts = (nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2))
        return nn.Sequential(*parts)

    return nn.Sequential(*(block() for _ in range(blocks))), torch.randn(batch, width)


def chain_of(blocks, *, host=False):
    """A chain of `count` blocks; torch does not use its sizes."""
    rates = {"offload_bytes_per_second": 1e9, "load_bytes_per_second": 1e9} if host else {}
    ones = [1] * blocks
    return Chain(ones, ones, [*ones, 1], [3] * blocks, **rates)


def segments(blocks, size, first=0):
    """Steps that keep a segment of `size` blocks at a time."""
    last = blocks
    if last - first <= size:
        inside = range(first, last)
        saves = [("save", i) for i in inside]
        return saves + [("backward", i) for i in reversed(inside)]
    k = first + size
    steps = [("forward", first)]
    for i in range(first + 1, k):
        steps += [("forward", i), ("drop", i)]
    return [*steps, *segments(last, size, k), ("drop", k), *segments(k, size, first)]


def random_steps(blocks, rng, *, host=False, wander=0.35):
    """Steps of a random valid schedule, which is rarely a persistent one."""
    ones, rate = (1,) * blocks, 1.0 if host else None
    chain = ChainModel(ones, ones, (*ones, 1), ones, offload_rate=rate, load_rate=rate)
    state, steps = State.begin(chain), []
    while state.next_backward >= 0:
        others = [("drop", k) for k in state.alone if k]
        for i in range(state.next_backward + 1):
            others += [(kind, i) for kind in ("forward", "save", "offload", "load")
                       if refusal(chain, state, kind, i) is None]  # fmt: skip
        step = rng.choice(others) if others and rng.random() < wander else _next_step(state)
        state, *_ = run(chain, state, *step)
        steps.append(step)
    return steps


def _next_step(state):
    """The next step on the way to the next backward run."""
    i = state.next_backward
    if i + 1 in state.alone and i not in state.saved:
        return "drop", i + 1
    if i in state.host:
        return "load", i
    if not state.has(i):
        return "forward", max(k for k in range(i) if state.has(k))
    return ("backward" if i in state.saved else "save"), i


def loss_of(out):
    """A loss that depends on all outputs."""
    if isinstance(out, torch.Tensor):
        return out.float().square().mean()
    return sum(loss_of(part) for part in out)


def results(model, inputs, call=None, passes=2):
    """Train for some passes; return outputs, gradients, buffers, and the next random numbers."""
    torch.manual_seed(7)
    outputs_and_gradients = []
    for _ in range(passes):
        fresh = [
            t.detach().clone().requires_grad_(t.is_floating_point()) if torch.is_tensor(t) else t
            for t in inputs
        ]
        out = (call or model)(*fresh)
        loss_of(out).backward()
        tensors = out if isinstance(out, tuple) else (out,)
        outputs_and_gradients += [t.detach() for t in tensors] + [
            t.grad for t in fresh if torch.is_tensor(t)
        ]
    outputs_and_gradients += [parameter.grad for parameter in model.parameters()]
    outputs_and_gradients += [buffer.clone() for buffer in model.buffers()]
    model.zero_grad()
    return [*outputs_and_gradients, torch.rand(2)]


def assert_same_bits(first, second):
    """Compare lists that contain tensors and None."""
    assert len(first) == len(second)
    for k, (left, right) in enumerate(zip(first, second, strict=True)):
        if left is None or right is None:
            assert left is right, k
        else:
            assert left.dtype == right.dtype, k
            raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
            assert torch.equal(*raw), f"tensor {k} differs: {(left != right).sum()} elements"
