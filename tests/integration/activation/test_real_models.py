"""Plans of 24 models of transformers: promises hold, bits stay, recomputing all never beats one."""

from contextlib import nullcontext
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="its models are what is planned here")
hf = pytest.importorskip("transformers", reason="its models are what is planned here")

from torch import nn  # noqa: E402

from mlstate.activation import Chain, Plan, plan  # noqa: E402
from mlstate.integrations.torch import measure_peak  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

LAYERS, WIDTH, HEADS, BATCH, TOKENS = 5, 64, 4, 4, 64
SHARES = (0.0, 0.1, 0.3, 0.6, 0.9)  # of the way from the least budget to the peak without a plan
LLAMA = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS}
LLAMA |= {"num_attention_heads": HEADS}
GROUPED = LLAMA | {"num_key_value_heads": 2, "head_dim": WIDTH // HEADS, "pad_token_id": 0}
GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": TOKENS}
SEQ2SEQ = {"d_model": WIDTH, "decoder_start_token_id": 0}
BART = SEQ2SEQ | {f"{part}_layers": LAYERS for part in ("encoder", "decoder")}
BART |= {f"{part}_attention_heads": HEADS for part in ("encoder", "decoder")}
BART |= {f"{part}_ffn_dim": 2 * WIDTH for part in ("encoder", "decoder")}
T5 = SEQ2SEQ | {"d_kv": WIDTH // HEADS, "d_ff": 3 * WIDTH, "num_layers": LAYERS, "num_heads": HEADS}
IMAGE = LLAMA | {"image_size": 48, "patch_size": 8, "num_labels": 10}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}

# name: class of models and of settings without suffix, vocabulary (0: images), settings, options
CAUSAL, MASKED, IMAGES = "ForCausalLM", "ForMaskedLM", "ForImageClassification"
MODELS = {
    "llama": ("Llama", CAUSAL, 512, GROUPED, {}),
    "llama, large vocabulary": ("Llama", CAUSAL, 32768, GROUPED, {}),
    "llama, autocast": ("Llama", CAUSAL, 2048, GROUPED, {"autocast": True}),
    "llama, padded": ("Llama", CAUSAL, 2048, GROUPED, {"mask": True}),
    "llama, cache": ("Llama", CAUSAL, 2048, GROUPED | {"use_cache": True}, {}),
    "llama, accumulation": ("Llama", CAUSAL, 8192, GROUPED, {"passes": 2}),
    "llama, tied": ("Llama", CAUSAL, 8192, GROUPED | {"tie_word_embeddings": True}, {}),
    "mistral": ("Mistral", CAUSAL, 4096, GROUPED | {"sliding_window": 16}, {"mask": True}),
    "qwen2": ("Qwen2", CAUSAL, 16384, GROUPED, {"autocast": True}),
    "qwen3": ("Qwen3", CAUSAL, 1024, GROUPED, {"passes": 2}),
    "gemma2": ("Gemma2", CAUSAL, 4096, GROUPED | {"sliding_window": 16}, {"mask": True}),
    "phi3": ("Phi3", CAUSAL, 2048, GROUPED, {}),
    "mixtral": ("Mixtral", CAUSAL, 1024, GROUPED | MOE, {}),
    "gpt2": ("GPT2", "LMHeadModel", 512, GPT, {}),
    "gpt2, large vocabulary": ("GPT2", "LMHeadModel", 32768, GPT, {"autocast": True}),
    "gpt-neox": ("GPTNeoX", CAUSAL, 2048, LLAMA, {"mask": True}),
    "opt": ("OPT", CAUSAL, 2048, LLAMA | {"ffn_dim": 128, "word_embed_proj_dim": WIDTH}, {}),
    "bert": ("Bert", MASKED, 8192, LLAMA, {"mask": True}),
    "distilbert": (
        "DistilBert",
        MASKED,
        2048,
        {"dim": WIDTH, "n_layers": LAYERS, "n_heads": 4},
        {},
    ),
    "electra": ("Electra", MASKED, 1024, LLAMA, {"autocast": True}),
    "t5": ("T5", "ForConditionalGeneration", 8192, T5, {}),
    "bart": ("Bart", "ForConditionalGeneration", 2048, BART, {}),
    "vit": ("ViT", IMAGES, 0, IMAGE, {}),
    "dinov2": ("Dinov2", IMAGES, 0, IMAGE, {"autocast": True}),
}


class Step:
    """A model, the pattern of its layers, and one training step."""

    def __init__(self, family, kind, words, settings, options):
        torch.manual_seed(3)
        if words:
            settings = {"use_cache": False, "vocab_size": words, **settings}
            ids = torch.randint(1, words, (BATCH, TOKENS))
            self.sample = {"input_ids": ids, "labels": ids}
        else:
            images = torch.randn(BATCH, 3, settings["image_size"], settings["image_size"])
            self.sample = {"pixel_values": images, "labels": torch.arange(BATCH)}
        if "mask" in options:
            mask = torch.arange(TOKENS) < TOKENS - 9
            self.sample["attention_mask"] = mask.long().expand(ids.shape)
        config = getattr(hf, f"{family}Config")(**settings)
        self.model = getattr(hf, family + kind)(config).train()
        lists = [name for name, m in self.model.named_modules()
                 if isinstance(m, nn.ModuleList) and len(m) == LAYERS]  # fmt: skip
        self.blocks = f"{lists[-1]}.*"
        self.passes = options.get("passes", 1)
        cast = options.get("autocast", False)
        self.context = partial(torch.autocast, "cpu", torch.bfloat16) if cast else nullcontext

    def __call__(self):
        torch.manual_seed(1)  # for dropout
        for _ in range(self.passes):
            with self.context():
                loss = self.model(**self.sample).loss
                loss.backward()
            del loss

    def gradients(self):
        self.model.zero_grad(set_to_none=False)
        self()
        return [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]

    def judge(self, schedule, expected):
        """Return the measured peak of a plan, whose gradients must have the expected bits."""
        with schedule.apply(self.model, blocks=self.blocks):
            gradients = self.gradients()
            assert all(
                a is b is None or torch.equal(a, b)
                for a, b in zip(gradients, expected, strict=True)
            )
            return measure_peak(self).peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_promises_hold_and_no_plan_loses_to_recomputing_all(name):
    step = Step(*MODELS[name])
    with step.context():
        chain = Chain.from_torch(step.model, step.sample, blocks=step.blocks, repeats=3)
    expected = step.gradients()
    every = Plan.from_recomputed(chain, range(chain.blocks))
    every_peak = step.judge(every, expected)
    least, most = chain.least_budget_bytes, chain.plain_peak_bytes
    rows = []
    for share in SHARES:
        schedule = plan(chain, int(least + share * (most - least)))
        peak, promised = step.judge(schedule, expected), schedule.predicted_peak_bytes
        is_slower = schedule.predicted_seconds > every.predicted_seconds
        beaten = [promised > every.predicted_peak_bytes, peak > every_peak]
        close = abs(promised - peak) <= max(0.05 * peak, max(chain.activation_bytes))
        rows.append((promised, peak, close, is_slower and any(beaten)))
    assert all(close and not beaten for *_, close, beaten in rows), rows
