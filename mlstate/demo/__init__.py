"""The ``mlstate demo`` command: a small character model, its Core ML packages, the script."""
