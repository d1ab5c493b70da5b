"""A bag-of-words model trained on the sources of Python's own library, in NumPy.

Two embeddings, words in and words out (Mikolov et al., 2013, with negative samples), under dense
Adam (Kingma and Ba, 2015). The vocabulary covers more of the library than the training text, as in
practice: rows of words outside of the training text get no gradient, and their states stay zero.
"""

import re
import sysconfig
from pathlib import Path

import numpy as np

WIDTH = 64


def words_of(paths):
    """Names and words, in lower case."""
    for path in paths:
        yield from re.findall(r"[a-z]{2,}", path.read_text("utf-8", "replace").lower())


class WordModel:
    """Parameters and Adam's states, as dicts of arrays."""

    def __init__(self, package="json", seed=0):
        library = Path(sysconfig.get_path("stdlib"))
        self.numbers = {}
        for word in words_of(sorted(library.glob("[a-e]*.py"))):
            self.numbers.setdefault(word, len(self.numbers))
        paths = sorted((library / package).glob("*.py"))
        text = [self.numbers[word] for word in words_of(paths) if word in self.numbers]
        self.text = np.array(text)
        self.rng = np.random.default_rng(seed)
        shape = (len(self.numbers), WIDTH)
        self.model = {
            name: self.rng.normal(0, 0.1, shape).astype(np.float32)
            for name in ("words.weight", "context.weight")
        }
        self.states = {
            f"{name}.{state}": np.zeros(shape, np.float32) for name in self.model for state in "mv"
        }
        self.step = 0

    def train(self, steps, batch=64, window=3, negatives=4, rate=0.01):
        """Take some steps of Adam; return the mean loss of the last one."""
        for _ in range(steps):
            self.step += 1
            at = self.rng.integers(window, len(self.text) - window, batch)
            word = np.repeat(self.text[at], 1 + negatives)
            near = self.text[at + self.rng.choice([-3, -2, -1, 1, 2, 3], batch)]
            others = self.rng.choice(self.text, (batch, negatives))
            context = np.column_stack((near, others)).reshape(-1)
            true = np.tile([1.0] + [0.0] * negatives, batch)
            a, b = self.model["words.weight"][word], self.model["context.weight"][context]
            guess = 1 / (1 + np.exp(-np.einsum("ij,ij->i", a, b)))
            error = ((guess - true) / batch)[:, None].astype(np.float32)
            loss = -np.mean(np.log(np.where(true == 1, guess, 1 - guess) + 1e-12))
            self._adam("words.weight", word, error * b, rate)
            self._adam("context.weight", context, error * a, rate)
        return float(loss)

    def _adam(self, name, rows, gradients, rate):
        """Dense Adam: rows that no batch has used yet keep their values and zero states."""
        gradient = np.zeros_like(self.model[name])
        np.add.at(gradient, rows, gradients)
        m, v = self.states[f"{name}.m"], self.states[f"{name}.v"]
        m += 0.1 * (gradient - m)
        v += 0.001 * (gradient * gradient - v)
        unbiased = m / (1 - 0.9**self.step)
        self.model[name] -= (rate * unbiased / (np.sqrt(v / (1 - 0.999**self.step)) + 1e-8)).astype(
            np.float32
        )
