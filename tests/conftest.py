"""What holds for all tests."""

import os

import hypothesis
from tries import tries

# Where it is set, `print` writes a line's end apart, and lines of ranks that share a pipe mix.
os.environ.pop("PYTHONUNBUFFERED", None)

hypothesis.settings.register_profile(
    "mlstate", max_examples=tries(hypothesis.settings.default.max_examples)
)
hypothesis.settings.load_profile("mlstate")
