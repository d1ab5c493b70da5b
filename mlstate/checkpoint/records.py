"""Results of saves, loads, checks and tiers."""

from __future__ import annotations

from .._exports import show_exports
from ._checkpoint.save_async import SaveTimes
from ._load.plan_load import FileRead, LoadPlan
from ._records import LayerRecord, PruneReport, ShardRecord, TensorRecord
from ._report import Problem
from ._save.plan_save import SavePlan
from ._tiers.report import TierRecord, TierReport, Traffic
from ._tiers.tiered_state import StateDicts

__all__ = [
    "FileRead",
    "LayerRecord",
    "LoadPlan",
    "Problem",
    "PruneReport",
    "SavePlan",
    "SaveTimes",
    "ShardRecord",
    "StateDicts",
    "TensorRecord",
    "TierRecord",
    "TierReport",
    "Traffic",
]

show_exports(globals())
