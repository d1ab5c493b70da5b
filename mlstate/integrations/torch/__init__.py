"""torch tensors: as KV caches, as state dicts.  Each file imports torch inside its functions."""

from ._kv import move
from ._memory import note_written, write_into_tensor
from ._state import arrays_of, tensors_of

__all__ = ["arrays_of", "move", "note_written", "tensors_of", "write_into_tensor"]
