"""Settings for all tests."""

import os
import signal

import hypothesis
from tries import tries

# A shell starts background processes with SIGINT ignored; Python then raises nothing on Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# If it is set, `print` writes the line end separately, and lines of ranks that share a pipe mix.
os.environ.pop("PYTHONUNBUFFERED", None)

hypothesis.settings.register_profile(
    "mlstate", max_examples=tries(hypothesis.settings.default.max_examples)
)
hypothesis.settings.load_profile("mlstate")
