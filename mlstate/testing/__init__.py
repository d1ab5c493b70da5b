"""Tests of states by their bits, and of code that runs on several ranks.

Examples
--------
>>> from mlstate.testing import run_ranks
>>> run_ranks(2, lambda group: group.gather_bytes(b"%d" % group.rank))
[[b'0', b'1'], [b'0', b'1']]
"""

from __future__ import annotations

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from ._golden_file import assert_digest
from ._run_ranks import run_ranks
from ._same_bits import assert_same_bits

__all__ = ["assert_digest", "assert_same_bits", "run_ranks"]

set_module_of_exports(globals())
show_exports(globals())
