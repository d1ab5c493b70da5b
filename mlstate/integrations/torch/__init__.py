"""torch tensors: as KV caches.  Each file imports torch inside its functions."""

from ._kv import move
from ._memory import write_into_tensor

__all__ = ["move", "write_into_tensor"]
