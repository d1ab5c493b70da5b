"""Results of cache and ladder methods."""

from __future__ import annotations

from .._exports import show_exports
from ._context_ladder import LadderStep
from ._quantization import QuantizationLoss
from ._snapshot import Snapshot

__all__ = [
    "LadderStep",
    "QuantizationLoss",
    "Snapshot",
]

show_exports(globals())
