"""transformers: its KV caches, and the state of a Trainer, saved and restored by mlstate.

The modules of this package import transformers inside functions.
"""

from ..._exports import show_exports
from ._caches.conversions import from_cache, to_cache
from ._split import check_split as check_split
from ._trainer import MLStateCallback

__all__ = ["MLStateCallback", "from_cache", "to_cache"]

show_exports(globals())
