"""Train the demo's character model and write ``mlstate/demo/data/model.safetensors``.

Run it once, from the root of a checkout: ``python tools/train_demo_model.py``. Needs torch and
safetensors, about ten minutes on one thread. The text is Python's own library, as installed next to
the interpreter that runs this; docstrings and comments are removed, so that the few weights learn
code only. One seed fixes the starting weights and the order of the text, so the same torch, Python
and processor give the same file; the version of both is written into it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path

import torch
from demo_text import VOCABULARY, load_text
from demo_torch_model import CharTransformer, Config
from safetensors.torch import save_file
from torch.nn import functional

SEED = 20
TOKENS_PER_STEP = 4096
# : (share of the steps, length of a sequence): short ones first, because they teach faster.
SCHEDULE = ((0.45, 128), (0.25, 256), (0.30, 512))
MUON_RATE = 0.02
ADAM_RATE = 0.006
WARMUP_STEPS = 60


def rate(step: int, steps: int) -> float:
    """Return the share of the top learning rate: rise, stay, fall in a line."""
    left = (steps - step) / steps
    return min(1.0, (step + 1) / WARMUP_STEPS, max(left / 0.6, 0.02))


def sequence_length(step: int, steps: int) -> int:
    """Return the length of a training sequence at ``step``."""
    done = 0.0
    for share, length in SCHEDULE:
        done += share
        if step < done * steps:
            return length
    return SCHEDULE[-1][1]


def make_optimizers(model: CharTransformer) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, Adam for embedding and gains."""
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(
    model: CharTransformer, data: torch.Tensor, steps: int, *, budget_seconds: float = math.inf
) -> float:
    """Train for ``steps`` steps; return the mean loss, in nats a character, of the last 100."""
    generator = torch.Generator().manual_seed(SEED)
    optimizers = make_optimizers(model)
    top = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(steps):
        length = sequence_length(step, steps)
        rows = TOKENS_PER_STEP // length
        begin = torch.randint(len(data) - length - 1, (rows,), generator=generator)
        batch = data[begin[:, None] + torch.arange(length + 1)]
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, lr in zip(optimizers, top, strict=True):
            optimizer.param_groups[0]["lr"] = lr * rate(step, steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 50 == 49:
            seconds = time.perf_counter() - start
            print(
                f"step {step + 1:5d}/{steps}  length {length}  "
                f"loss {sum(losses[-50:]) / 50:.3f}  {seconds:.0f} s",
                flush=True,
            )
            if seconds > budget_seconds:
                raise SystemExit(f"stopped: {seconds:.0f} s is over --budget-seconds")
    tail = losses[-100:]
    return sum(tail) / len(tail)


def sort_metadata(path: Path) -> None:
    """Sort the metadata by key: the safetensors package orders it randomly."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[begin:])


def save(model: CharTransformer, path: Path, *, loss: float, steps: int, names: list[str]) -> None:
    """Write the weights as float16, with the metadata needed to run them."""
    tensors = {
        name: value.detach().to(torch.float16).contiguous()
        for name, value in model.state_dict().items()
    }
    metadata = {
        "format": "mlstate-demo-1",
        "config": json.dumps(model.config.to_dict()),
        "vocabulary": json.dumps(VOCABULARY),
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "training_text": "code of the Python standard library, PSF License: " + " ".join(names),
        "training_steps": str(steps),
        "training_loss": f"{loss:.4f}",
        "seed": str(SEED),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=metadata)
    sort_metadata(path)


@torch.no_grad()
def sample(model: CharTransformer, prompt: str, count: int) -> str:
    """Return ``count`` characters after ``prompt``, drawn at temperature 0.5."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = [VOCABULARY.index(character) for character in prompt]
    for _ in range(count):
        logits = model(torch.tensor([tokens[-model.config.max_context :]]))[0, -1]
        chances = torch.softmax(logits / 0.5, dim=-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return "".join(VOCABULARY[token] for token in tokens)


def main() -> None:
    """Read the arguments, train, write the file, show a sample."""
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=math.inf,
        help="stop with an error, writing nothing, after this long",
    )
    parser.add_argument("--output", type=Path, default=root / "mlstate/demo/data/model.safetensors")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    text, names = load_text()
    data = torch.tensor([VOCABULARY.index(character) for character in text])
    model = CharTransformer(Config())
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(names)} files, {len(text)} characters, {size} parameters")
    loss = train(model, data, arguments.steps, budget_seconds=arguments.budget_seconds)
    save(model, arguments.output, loss=loss, steps=arguments.steps, names=names)
    print(f"loss {loss:.4f}; wrote {arguments.output.stat().st_size} bytes")
    print(sample(model, "def load_config(path):\n", 400))


if __name__ == "__main__":
    main()
