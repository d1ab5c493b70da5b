"""``python -m mlstate``: run the ``mlstate`` command."""

from .cli import run_process

run_process()
