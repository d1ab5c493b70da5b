"""``python -m mlstate``: the same as the ``mlstate`` command."""

from .cli import run_process

run_process()
