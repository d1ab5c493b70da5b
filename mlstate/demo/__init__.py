"""The ``mlstate demo`` command: a small character model, its Core ML packages, the script."""

from __future__ import annotations

from importlib import resources


def source_text(name: str, vocabulary: str) -> str:
    """Return the text of a file of this package, without characters that the model lacks."""
    text = (resources.files(__name__) / name).read_text(encoding="utf-8")
    return "".join(character for character in text if character in vocabulary)


def verdict(good: bool, text: str = "bit-identical") -> str:
    """Return the text if a check succeeded."""
    return text if good else "DIFFERENT"
