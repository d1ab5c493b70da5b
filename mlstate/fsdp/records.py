"""Reports of hooks and of gradient checks."""

from __future__ import annotations

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from ._report import BackwardReport, Bucket
from ._verify import GradientReport, Mismatch

__all__ = [
    "BackwardReport",
    "Bucket",
    "GradientReport",
    "Mismatch",
]

set_module_of_exports(globals())
show_exports(globals())
