"""What holds for all tests."""

import hypothesis
from tries import tries

hypothesis.settings.register_profile(
    "mlstate", max_examples=tries(hypothesis.settings.default.max_examples)
)
hypothesis.settings.load_profile("mlstate")
