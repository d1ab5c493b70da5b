"""Tests of code that runs on several ranks: `run_ranks`.

Examples
--------
>>> from mlstate.testing import run_ranks
>>> run_ranks(2, lambda group: group.gather_bytes(b"%d" % group.rank))
[[b'0', b'1'], [b'0', b'1']]
"""

from __future__ import annotations

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from ._run_ranks import run_ranks

__all__ = ["run_ranks"]

set_module_of_exports(globals())
show_exports(globals())
