"""What holds for all tests."""

import os
import signal

import hypothesis
from tries import tries

# A shell makes what it starts in the background ignore Ctrl-C, and Python then raises nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where it is set, `print` writes a line's end apart, and lines of ranks that share a pipe mix.
os.environ.pop("PYTHONUNBUFFERED", None)

hypothesis.settings.register_profile(
    "mlstate", max_examples=tries(hypothesis.settings.default.max_examples)
)
hypothesis.settings.load_profile("mlstate")
