"""Whole models under a memory budget, for `bench_activation.py`: three ways side by side.

Plans promise the peak of a step. Recomputing every layer (``torch.utils.checkpoint``) and torch's
``activation_memory_budget``, which the compiler's partition follows, promise no bytes. Memory and
time of a step, with its head and loss, are measured for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from activation_ways import BACKEND, compared
from harness import Candidate, Report, Row, met, rows_of, settle, shuffled_turns
from torch import nn
from torch.utils.checkpoint import checkpoint

from mlstate.activation import Chain, Plan, plan
from mlstate.integrations.torch import measure_peak

PLAIN = "no checkpointing"
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
        vocab_size=words,
        n_embd=width,
        n_layer=count,
        n_head=4,
        n_positions=tokens,
        use_cache=False,
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


@dataclass
class Way:
    """One way to run the step, and its measurements."""

    name: str
    enter: Callable[[], Any]  # the model runs this way inside this context
    step: Callable[[], None]
    promised: Plan | None = None
    peak_bytes: int = 0
    gradients: str = ""
    seconds: list[float] = field(default_factory=list)


class Comparison:
    """Makes the ways of one shape and measures them."""

    def __init__(self, shape: Shape, log: Callable[[str], None]) -> None:
        self.shape, self.log = shape, log
        self.model = shape.model.train()
        self.chain = Chain.from_torch(self.model, shape.sample, blocks=shape.layers, repeats=9)
        self.ways: list[Way] = []
        self.expected: list[torch.Tensor] = []
        self.add(PLAIN, nullcontext)
        self.add(EVERY, self.every_layer)
        least, most = self.chain.least_budget_bytes, self.chain.plain_peak_bytes
        for share in SHARES:
            made = plan(self.chain, int(least + share * (most - least)))
            self.add(f"mlstate plan, budget at {share:g}", self.applying(made), promised=made)
        self.add_compiled()

    def applying(self, made: Plan) -> Callable[[], Any]:
        return lambda: made.apply(self.model, blocks=self.shape.layers)

    def layers(self) -> list[nn.Module]:
        parent = self.model.get_submodule(self.shape.layers.removesuffix(".*"))
        return list(parent.children())

    @contextmanager
    def every_layer(self) -> Iterator[None]:
        """Recompute each layer with torch."""
        layers = self.layers()
        for layer in layers:
            layer.forward = checkpointed(layer.forward)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def add_compiled(self) -> None:
        """Add torch's memory budgets, if the model can be compiled."""
        import torch._functorch.config as functorch

        for budget in BUDGETS:
            torch.compiler.reset()
            call = torch.compile(self.model, backend=BACKEND)
            try:
                with functorch.patch(activation_memory_budget=budget):
                    self.add(f"torch.compile, memory budget {budget:g}", nullcontext, call)
            except Exception as error:
                reason = str(error).strip().partition("\n")[0]
                self.log(f"torch.compile is left out: {type(error).__name__}: {reason:.200}")
                return

    def add(
        self,
        name: str,
        enter: Callable[[], Any],
        call: Callable[..., Any] | None = None,
        promised: Plan | None = None,
    ) -> None:
        """Make a way, and measure its memory and its gradients."""
        model = self.model if call is None else call  # a compiled model has no truth value

        def step() -> None:
            torch.manual_seed(1)  # for dropout
            model(**self.shape.sample).loss.backward()

        way = Way(name, enter, step, promised)
        with enter():
            self.model.zero_grad(set_to_none=False)
            step()  # allocates gradients, and compiles
            self.model.zero_grad(set_to_none=False)
            way.peak_bytes = measure_peak(step).peak_bytes
        gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.expected = self.expected or gradients
        way.gradients = compared(gradients, self.expected)
        self.ways.append(way)

    def measure(self, repeats: int) -> None:
        """Let the ways take turns; the first round warms up."""
        import time

        for number, way in shuffled_turns(self.ways, 1 + repeats):
            with way.enter():
                settle()
                began = time.perf_counter()
                way.step()
                if number:
                    way.seconds.append(time.perf_counter() - began)

    def rows(self) -> list[Row]:
        """Turn the measurements into rows of a table."""
        candidates = [Candidate(w.name, settle, baseline=w.name == PLAIN) for w in self.ways]
        rows = rows_of(candidates, {w.name: [1e3 * s for s in w.seconds] for w in self.ways})
        for row, way in zip(rows, self.ways, strict=True):
            made = way.promised
            row.extra["promised MB"] = f"{made.predicted_peak_bytes / 1e6:.1f}" if made else ""
            row.extra["peak MB"] = f"{way.peak_bytes / 1e6:.1f}"
            row.extra["of plain"] = f"{100 * way.peak_bytes / self.ways[0].peak_bytes:.1f} %"
            row.extra["recomputed"] = len(made.recomputed) if made else ""
            row.extra["gradients"] = way.gradients
        return rows

    def verdicts(self) -> list[str]:
        """Judge the promises, and whether recomputing every layer beats a plan in both figures."""
        fastest = {way.name: min(way.seconds) for way in self.ways}
        plans = [way for way in self.ways if way.promised is not None]
        every = next(way for way in self.ways if way.name == EVERY)
        block = int(self.chain.saved_bytes.max())
        errors = {w.name: w.promised.predicted_peak_bytes - w.peak_bytes for w in plans}
        worst = max(errors.values(), key=abs)
        kept = all(abs(errors[w.name]) <= max(0.05 * w.peak_bytes, block) for w in plans)
        beaten = [
            way.name
            for way in plans
            if every.peak_bytes < way.peak_bytes
            and fastest[EVERY] < (1 - SAME_TIME) * fastest[way.name]
        ]
        wrong = [way.name for way in plans if way.gradients != "same"]
        name = self.shape.name
        return [
            f"{name}: promises within 5 % or a layer's memory: {worst / 1e6:+.2f} MB, {met(kept)}",
            f"{name}: recomputing every layer beats no plan in memory and time: {met(not beaten)}",
            f"{name}: gradients of plans have the bits of the plain run: {met(not wrong)}",
        ]


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward pass of a layer that torch recomputes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def whole_models(report: Report, quick: bool, repeats: int) -> list[str]:
    """Compare the three ways on each shape."""
    verdicts: list[str] = []
    note = (
        "peak: what torch allocated during a step, beyond parameters and gradients; budget: at 0 "
        "the least that a schedule fits, at 1 the peak without a plan"
    )
    for shape in shapes(quick):
        comparison = Comparison(shape, report.log)
        comparison.measure(repeats)
        report.table(f"{shape.name}, whole steps", comparison.rows(), note=note)
        verdicts += comparison.verdicts()
    return verdicts
