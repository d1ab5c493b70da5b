"""transformers: state of a Trainer, saved and restored by mlstate.

The modules of this package import transformers inside functions.
"""

from ..._exports import show_exports
from ._trainer import MLStateCallback

__all__ = ["MLStateCallback"]

show_exports(globals())
