"""Whole models under a memory budget, for `bench_activation.py`: three ways side by side.

Plans promise the peak of a step. Recomputing every layer (``torch.utils.checkpoint``) and torch's
``activation_memory_budget``, which the compiler's partition follows, promise no bytes. Memory and
time of a step, with its head and loss, are measured for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import Run
from rows import Lines, Row, Way, Ways, met, settle
from torch import nn
from torch.utils.checkpoint import checkpoint

from mlstate.activation import Chain, Plan, plan
from mlstate.integrations.torch import measure_peak

PLAIN = "no checkpointing"
BACKEND = "aot_eager_decomp_partition"  # the compiler's partition, run by eager kernels
EVERY = "torch.utils.checkpoint, every layer"
SHARES = (0.0, 0.25, 0.5, 0.75)  # between the least budget and the peak without a plan
BUDGETS = (0.75, 0.5, 0.25, 0.0)  # of torch
SAME_TIME = 0.03  # differences below this share of a step are noise


@dataclass
class Shape:
    """A model, the pattern of its layers, and the arguments of a step, whose output has a loss."""

    name: str
    model: Any
    layers: str
    sample: dict[str, torch.Tensor]


def shapes(quick: bool) -> Iterator[Shape]:
    """Make the models of transformers with random weights."""
    import transformers as hf

    torch.manual_seed(20)
    count, width, tokens, words = (3, 64, 64, 512) if quick else (8, 256, 256, 8192)
    batch = 2 if quick else 4
    ids = torch.randint(0, words, (batch, tokens))
    text = {"input_ids": ids, "labels": ids}
    llama = hf.LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=count,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    yield Shape("Llama", hf.LlamaForCausalLM(llama), "model.layers.*", text)
    gpt2 = hf.GPT2Config(
        vocab_size=words, n_embd=width, n_layer=count, n_head=4, n_positions=tokens, use_cache=False
    )
    yield Shape("GPT-2", hf.GPT2LMHeadModel(gpt2), "transformer.h.*", text)
    vit = hf.ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=count,
        num_attention_heads=4,
        image_size=64 if quick else 192,
        patch_size=8 if quick else 16,
        num_labels=100,
    )
    model = hf.ViTForImageClassification(vit)
    images = torch.randn(4 * batch, 3, vit.image_size, vit.image_size)
    labels = torch.randint(0, 100, (len(images),))
    (layers,) = (
        name
        for name, child in model.named_modules()
        if isinstance(child, nn.ModuleList) and len(child) == count
    )
    yield Shape("ViT", model, f"{layers}.*", {"pixel_values": images, "labels": labels})
    t5 = hf.T5Config(
        vocab_size=words,
        d_model=width,
        d_kv=width // 4,
        d_ff=4 * width,
        num_layers=count,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    yield Shape("T5, its decoder", hf.T5ForConditionalGeneration(t5), "decoder.block.*", text)


class Comparison:
    """Makes the ways of one shape, with their peaks and gradients."""

    def __init__(self, shape: Shape, log: Callable[[str], None]) -> None:
        self.shape = shape
        self.model = shape.model.train()
        self.chain = Chain.from_torch(self.model, shape.sample, blocks=shape.layers, repeats=9)
        self.plans: dict[str, Plan] = {}
        self.peaks: dict[str, int] = {}  # bytes
        self.gradients: dict[str, str] = {}
        self.expected: list[torch.Tensor] = []
        self.peers = {PLAIN: self.add(PLAIN, nullcontext), EVERY: self.add(EVERY, self.every_layer)}
        self.ways: Ways = {}
        least, most = self.chain.least_budget_bytes, self.chain.plain_peak_bytes
        for share in SHARES:
            name = f"mlstate plan, budget at {share:g}"
            self.plans[name] = plan(self.chain, int(least + share * (most - least)))
            apply = partial(self.plans[name].apply, self.model, blocks=shape.layers)
            self.ways[name] = self.add(name, apply)
        self.add_compiled(log)

    @contextmanager
    def every_layer(self) -> Iterator[None]:
        """Recompute each layer with torch."""
        parent = self.model.get_submodule(self.shape.layers.removesuffix(".*"))
        layers = list(parent.children())
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def add_compiled(self, log: Callable[[str], None]) -> None:
        """Add torch's memory budgets, if the model can be compiled."""
        import torch._functorch.config as functorch

        for budget in BUDGETS:
            torch.compiler.reset()
            call = torch.compile(self.model, backend=BACKEND)
            name = f"torch.compile, memory budget {budget:g}"
            try:
                with functorch.patch(activation_memory_budget=budget):
                    self.peers[name] = self.add(name, nullcontext, call)
            except Exception as error:
                reason = str(error).strip().partition("\n")[0]
                log(f"torch.compile is left out: {type(error).__name__}: {reason:.200}")
                return

    def add(
        self, name: str, enter: Callable[[], Any], call: Callable[..., Any] | None = None
    ) -> Way:
        """Make a way, and measure its memory and its gradients; the model runs inside `enter`."""
        model = self.model if call is None else call  # a compiled model has no truth value

        def step() -> None:
            torch.manual_seed(1)  # for dropout
            model(**self.shape.sample).loss.backward()

        def timed_step() -> dict[str, float]:
            with enter():
                settle()
                began = time.perf_counter()
                step()
                return {"ms": 1e3 * (time.perf_counter() - began)}

        with enter():
            self.model.zero_grad(set_to_none=False)
            step()  # allocates gradients, and compiles
            self.model.zero_grad(set_to_none=False)
            self.peaks[name] = measure_peak(step).peak_bytes
        gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.expected = self.expected or gradients
        pairs = zip(gradients, self.expected, strict=True)
        is_same = all(torch.equal(bits(a), bits(b)) for a, b in pairs)
        self.gradients[name] = "same" if is_same else "OTHER"
        return Way(timed_step, measures_itself=True)

    def row(self) -> Row:
        """Return the row of this shape."""
        return Row(
            f"{self.shape.name}, whole steps",
            self.ways,
            self.peers,
            note="peak: what torch allocated during a step, beyond parameters and gradients; "
            "budget: at 0 the least that a schedule fits, at 1 the peak without a plan",
            rounds=1.4,
            judge=self.judge,
        )

    def judge(self, lines: Lines) -> list[str]:
        """Judge the promises, and whether recomputing every layer beats a plan in both figures."""
        for name, line in lines.items():
            schedule, peak = self.plans.get(name), self.peaks[name]
            promised = f"{schedule.predicted_peak_bytes / 1e6:.1f}" if schedule else ""
            line.extra["promised MB"] = promised
            line.extra["peak MB"] = f"{peak / 1e6:.1f}"
            line.extra["of plain"] = f"{100 * peak / self.peaks[PLAIN]:.1f} %"
            line.extra["recomputed"] = len(schedule.recomputed) if schedule else ""
            line.extra["gradients"] = self.gradients[name]
        fastest = {name: min(line.values) for name, line in lines.items()}
        block = int(self.chain.saved_bytes.max())
        errors = {n: p.predicted_peak_bytes - self.peaks[n] for n, p in self.plans.items()}
        worst = max(errors.values(), key=abs)
        is_kept = all(abs(e) <= max(0.05 * self.peaks[n], block) for n, e in errors.items())
        beaten = [
            name
            for name in self.plans
            if self.peaks[EVERY] < self.peaks[name]
            and fastest[EVERY] < (1 - SAME_TIME) * fastest[name]
        ]
        wrong = [name for name in self.plans if self.gradients[name] != "same"]
        name = self.shape.name
        return [
            f"{name}: promises within 5 % or a layer's memory: {worst / 1e6:+.2f} MB, "
            f"{met(is_kept)}",
            f"{name}: recomputing every layer beats no plan in memory and time: {met(not beaten)}",
            f"{name}: gradients of plans have the bits of the plain run: {met(not wrong)}",
        ]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def whole_models(run: Run) -> Iterator[Row]:
    """Compare the ways on each shape."""
    for shape in shapes(run.quick):
        yield Comparison(shape, run.log).row()
