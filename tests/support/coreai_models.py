"""Small Core AI models for tests: a decoder with a KV cache, and one with many kinds of states.

Importing this module skips the importing test file if Core AI or torch is missing.
"""

import asyncio
import pathlib
import warnings
from contextlib import contextmanager

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # coreai_torch warns of the build of torch
    torch = pytest.importorskip("torch", reason="torch makes the models to convert")
    coreai_torch = pytest.importorskip(
        "coreai_torch", reason="coreai-torch converts the models", exc_type=ImportError
    )
    from coreai.authoring.asset import AIModelAsset
    from coreai.runtime import NDArray

LAYERS, HEADS, HEAD_DIM, VOCABULARY = 2, 2, 8, 32
BASE = 10000.0  # of the rotary embedding


class Decoder(torch.nn.Module):
    """Decodes one token; the caches have the shape (layers, batch, heads, seq, head_dim).

    Keys and values of every layer depend on the token and its position only, so that a cache
    whose tokens were dropped equals the cache of the kept tokens. Queries depend on the layers
    before.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * HEAD_DIM
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.query = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(LAYERS))
        self.cached = torch.nn.ModuleList(torch.nn.Linear(width, 2 * width) for _ in range(LAYERS))
        self.out = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(LAYERS))
        self.head = torch.nn.Linear(width, VOCABULARY)

    def rotate(self, x, position):
        """Rotate pairs (i, i + head_dim / 2), with angles in float32."""
        frequencies = BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angle = position.to(torch.float32) * frequencies
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, token, position, k_cache, v_cache):
        embedded = x = self.embed(token).reshape(1, 1, -1)
        at = torch.arange(k_cache.shape[-2])
        is_here, is_past = (at == position).reshape(1, 1, -1, 1), (at <= position)
        keys, values = [], []
        for layer in range(LAYERS):
            k, v = self.cached[layer](embedded).reshape(1, 2, HEADS, 1, HEAD_DIM).unbind(1)
            q = self.rotate(self.query[layer](x).reshape(1, HEADS, 1, HEAD_DIM), position)
            keys.append(torch.where(is_here, self.rotate(k, position), k_cache[layer]))
            values.append(torch.where(is_here, v, v_cache[layer]))
            scores = q @ keys[-1].transpose(-1, -2) / HEAD_DIM**0.5
            scores = torch.where(is_past, scores, torch.full_like(scores, -1e4))
            x = x + self.out[layer]((scores.softmax(-1) @ values[-1]).reshape(1, 1, -1))
        k_cache.copy_(torch.stack(keys))
        v_cache.copy_(torch.stack(values))
        return self.head(x).reshape(VOCABULARY)


class Mixed(torch.nn.Module):
    """Counts its calls in states of several dtypes and layouts."""

    def forward(self, x, rows, columns, window, steps):
        for state in (rows, columns, window, steps):
            state.copy_(state + 1)
        return x + window.sum()


class LlamaStep(torch.nn.Module):
    """Decodes one token with the weights of a Llama of transformers.

    The caches have the shape (layers, batch, heads, seq, head_dim), or, with `is_rows`, the one
    of iOS: (layers, batch, heads * head_dim, 1, seq).
    """

    def __init__(self, model, *, is_rows):
        super().__init__()
        self.llama, self.head = model.model, model.lm_head
        self.size, self.is_rows = model.config.head_dim, is_rows

    def read(self, cache):
        if not self.is_rows:
            return cache
        return cache.unflatten(1, (-1, self.size)).squeeze(3).transpose(-1, -2)

    def write(self, cache, layers):
        layers = torch.stack(layers)
        if self.is_rows:
            layers = layers.transpose(-1, -2).flatten(2, 3).unsqueeze(3)
        cache.copy_(layers)

    def forward(self, token, position, k_cache, v_cache):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        x = self.llama.embed_tokens(token).reshape(1, 1, -1)
        cos, sin = self.llama.rotary_emb(x, position.reshape(1, 1))
        at = torch.arange(k_cache.shape[-1 if self.is_rows else -2])
        is_here, is_past = (at == position).reshape(1, 1, -1, 1), at <= position
        keys, values = [], []
        for index, layer in enumerate(self.llama.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            q, k, v = (p(normed).reshape(1, 1, -1, self.size).transpose(1, 2) for p in projections)
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            keys.append(torch.where(is_here, k, self.read(k_cache[index])))
            values.append(torch.where(is_here, v, self.read(v_cache[index])))
            q = q.reshape(1, k.shape[1], -1, self.size)
            scores = q @ keys[-1].transpose(-1, -2) * self.size**-0.5
            scores = torch.where(is_past, scores, torch.full_like(scores, -1e4))
            x = x + attention.o_proj((scores.softmax(-1) @ values[-1]).reshape(1, 1, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.write(k_cache, keys)
        self.write(v_cache, values)
        return self.head(self.llama.norm(x)).reshape(-1)


def _program(module, examples, dynamic_shapes, names):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(module.eval(), examples, dynamic_shapes=dynamic_shapes)
        exported = exported.run_decompositions(coreai_torch.get_decomp_table())
        converter = coreai_torch.TorchConverter()
        return converter.add_exported_program(exported, **names).to_coreai()


def _sequence():
    return torch.export.Dim("sequence", min=2, max=4096)


def _decoder_program(module, dtype, shape, axis):
    """Convert a module that decodes a token with two caches; `axis`: the sequence of these."""
    dtype = getattr(torch, dtype)
    number, dynamic = torch.zeros(1, dtype=torch.int32), {axis: _sequence()}
    return _program(
        module.to(dtype),
        (number, number.clone(), *(torch.zeros(shape, dtype=dtype) for _ in range(2))),
        (None, None, dynamic, dynamic),
        {
            "input_names": ["token", "position"],
            "output_names": ["logits"],
            "state_names": ["k_cache", "v_cache"],
        },
    )


def save_llama(path, model, dtype, *, is_rows):
    """Save a dynamic decoder with the weights of a model of transformers."""
    config = model.config
    heads, size = config.num_key_value_heads, config.head_dim
    shape = (1, heads * size, 1, 16) if is_rows else (1, heads, 16, size)
    module = LlamaStep(model, is_rows=is_rows)
    axis = 4 if is_rows else 3
    program = _decoder_program(module, dtype, (config.num_hidden_layers, *shape), axis)
    program.save_asset(pathlib.Path(path))


def save_decoder(path, dtype, static_path=None, sizes=()):
    """Save a dynamic decoder, and one with a function ``main_s<size>`` for each size."""
    shape = (LAYERS, 1, HEADS, 16, HEAD_DIM)
    program = _decoder_program(Decoder(), dtype, shape, 3)
    program.save_asset(pathlib.Path(path))
    if static_path is not None:
        shapes = {f"s{n}": (*shape[:3], n, HEAD_DIM) for n in sizes}
        program.set_static_shape_config(
            "main", {name: {"k_cache": s, "v_cache": s} for name, s in shapes.items()}
        )
        program.save_asset(pathlib.Path(static_path))


def save_mixed(path):
    """Save a model with a bfloat16 state in the layout of iOS, and others."""
    examples = (
        torch.zeros(1),
        torch.zeros(2, 1, 6, 1, 16, dtype=torch.bfloat16),
        torch.zeros(2, 3, 16, 4, dtype=torch.int8),
        torch.zeros(2, 4, 3),
        torch.zeros(1, dtype=torch.int32),
    )
    sequence = _sequence()
    program = _program(
        Mixed(),
        examples,
        (None, {4: sequence}, {2: sequence}, None, None),
        {
            "input_names": ["x"],
            "output_names": ["y"],
            "state_names": ["rows", "columns", "window", "steps"],
        },
    )
    program.save_asset(pathlib.Path(path))


class Session:
    """A loaded model whose calls run to their end."""

    def __init__(self, runner, model):
        self.runner, self.model = runner, model
        self.functions = {name: model.load_function(name) for name in model.function_names}

    def run(self, awaitable):
        async def wait():
            return await awaitable

        return self.runner.run(wait())

    def step(self, manager, token, position):
        """Decode a token in the manager's state; return its logits."""
        return self.run(decode(manager.model, manager.state, token, position))


async def decode(function, state, token, position):
    inputs = {"token": token, "position": position}
    arrays = {name: NDArray(np.array([value], np.int32)) for name, value in inputs.items()}
    return (await function(arrays, state))["logits"].numpy()


@contextmanager
def session(path):
    """Load a model for the calls of a test."""
    with asyncio.Runner() as runner:
        executable = AIModelAsset.load(path).executable()
        yield Session(runner, runner.run(executable.__aenter__()))
        runner.run(executable.__aexit__(None, None, None))
