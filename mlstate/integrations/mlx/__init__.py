"""mlx-lm: its prompt caches as `CacheState` and back, and their files with checksums.

Tested with mlx-lm 0.32.2 on the CPU; on Metal it is untested. The modules of this package import
mlx inside functions.
"""

from ..._exports import show_exports
from ._conversions import from_cache, to_cache
from ._prompt_caches import load_prompt_cache, save_prompt_cache

__all__ = ["from_cache", "load_prompt_cache", "save_prompt_cache", "to_cache"]

show_exports(globals())
