"""The number of examples for a property: few on builds where each takes ten times as long."""

import os

FEW = bool(os.environ.get("MLSTATE_FEW_EXAMPLES"))  # set for the slice of the sanitizers
SHARE = 6


def tries(usual):
    """`usual`, or a sixth of it but at least 5."""
    return max(usual // SHARE, 5) if FEW else usual
