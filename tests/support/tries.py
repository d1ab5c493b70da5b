"""How many examples a property is tried on: few where each takes ten times as long."""

import os

FEW = bool(os.environ.get("MLSTATE_FEW_EXAMPLES"))  # set by the slice of the sanitizers
SHARE = 6


def tries(usual):
    """As many as `usual`, or a sixth of them."""
    return max(usual // SHARE, 5) if FEW else usual
