"""Lightning: checkpoints of a Trainer, saved and loaded by mlstate.

The modules of this package import lightning inside functions.
"""

from ..._exports import show_exports
from ._errors import name_conversion_in_errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._checkpoint_io import MLStateCheckpointIO as MLStateCheckpointIO

__all__ = ["MLStateCheckpointIO"]

name_conversion_in_errors()  # where Lightning's modules are imported already
show_exports(globals(), {"._checkpoint_io": ["MLStateCheckpointIO"]})
