"""Differences between the states of ranks."""

from __future__ import annotations

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from ._merge import RankDifference

__all__ = [
    "RankDifference",
]

set_module_of_exports(globals())
show_exports(globals())
