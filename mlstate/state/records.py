"""Results of comparisons of states."""

from __future__ import annotations

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from ._compatibility import Difference
from ._diff import StateDiff, TensorChange
from ._digest import DigestDiff, TensorDigest

__all__ = [
    "Difference",
    "DigestDiff",
    "StateDiff",
    "TensorChange",
    "TensorDigest",
]

set_module_of_exports(globals())
show_exports(globals())
