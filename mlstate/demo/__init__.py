"""The ``mlstate demo`` command: a small character model, its Core ML packages, the script."""

from __future__ import annotations

from importlib import resources


def source_text(name: str, vocabulary: str) -> str:
    """Return the text of this package's file `name`, without characters that the model lacks.

    `vocabulary`: all characters that the model knows.
    """
    text = (resources.files(__name__) / name).read_text(encoding="utf-8")
    return "".join(character for character in text if character in vocabulary)


def verdict(good: bool, text: str = "bit-identical") -> str:
    """Return `text` if a check succeeded (`good`), else "DIFFERENT"."""
    return text if good else "DIFFERENT"
