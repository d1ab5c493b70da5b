"""A small language model, trained to measure Adam's state of its embedding.

It predicts each next word of Python's own library. The vocabulary is all words in the library, most
of which are rare: a row of Adam's moments stays zero until its word occurs. 300 steps with 576
words each see about 26 % of the words.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from checkpoint_states import Arrays

WORD = re.compile(rb"\w+|[^\w\s]")
# not installed everywhere
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
FEWEST = 30_000  # words, as in a realistic vocabulary
WIDTH, LENGTH, BATCH = 128, 48, 12
STEPS, QUICK_STEPS = 300, 20
SEED = 20


class Trained(NamedTuple):
    """Adam's moments of the embedding after the steps."""

    words: int
    steps: int
    moments: Arrays
    losses: list[float]  # of all steps


class Model(torch.nn.Module):
    """Convolutions over the previous words, and an adaptive softmax over the vocabulary."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width)
        self.layers = torch.nn.ModuleList(torch.nn.Conv1d(width, width, 3) for _ in range(2))
        cutoffs = [words // 50, words // 6]
        self.out = torch.nn.AdaptiveLogSoftmaxWithLoss(width, words, cutoffs)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of the next words, of sequences (batch, length + 1)."""
        x = self.embedding(tokens[:, :-1]).transpose(1, 2)
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(torch.nn.functional.pad(x, (2, 0))))
        x = x.transpose(1, 2).reshape(-1, x.shape[1])
        return self.out(x, tokens[:, 1:].reshape(-1)).loss


def text() -> tuple[np.ndarray, int]:
    """The library's words as numbers, the most frequent word as 0, and the number of words."""
    root = Path(sysconfig.get_paths()["stdlib"])
    words_by_bytes: dict[bytes, int] = {}
    files = []
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            words = WORD.findall(path.read_bytes())
            numbers = (words_by_bytes.setdefault(word, len(words_by_bytes)) for word in words)
            files.append(np.fromiter(numbers, np.int64, len(words)))
    tokens = np.concatenate(files)
    places = np.argsort(np.argsort(-np.bincount(tokens), kind="stable"))
    if len(words_by_bytes) < FEWEST:
        raise RuntimeError(f"Python's library in {root} has {len(words_by_bytes):,} words only")
    return places[tokens], len(words_by_bytes)


def train(quick: bool) -> Trained:
    """Train on random positions of the text.

    With one thread, because two threads that wait for each other are slower on a busy machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(quick)
    finally:
        torch.set_num_threads(threads)


def _train(quick: bool) -> Trained:
    tokens, words = text()
    torch.manual_seed(SEED)
    model = Model(words, 16 if quick else WIDTH)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    random = np.random.default_rng(SEED)
    steps = QUICK_STEPS if quick else STEPS
    losses: list[float] = []
    for _ in range(steps):
        places = random.integers(0, tokens.size - LENGTH, BATCH)
        batch = np.stack([tokens[at : at + LENGTH + 1] for at in places])
        optimizer.zero_grad(set_to_none=True)
        loss = model(torch.from_numpy(batch))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    state = optimizer.state[model.embedding.weight]
    moments = {
        f"embedding.weight.{name}": state[key].numpy()
        for name, key in (("m", "exp_avg"), ("v", "exp_avg_sq"))
    }
    return Trained(words, steps, moments, losses)
