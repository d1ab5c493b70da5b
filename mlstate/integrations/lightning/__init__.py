"""Lightning: checkpoints of a Trainer, saved and loaded by mlstate.

The modules of this package import lightning inside functions.
"""

from ..._exports import show_exports
from ._checkpoint_io import MLStateCheckpointIO

__all__ = ["MLStateCheckpointIO"]

show_exports(globals())
