"""KV caches on disk by the tokens that they hold: a prompt is prefilled once.

`PromptStore` keeps the cache of each prompt, in blocks that prompts share, and checks every byte
that it restores. `fingerprint` identifies the model that a cache belongs to.
"""

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from ._check_split import check_split
from ._fingerprint import fingerprint
from ._match import Match
from ._put_handle import PutHandle
from ._store import PromptStore

__all__ = ["Match", "PromptStore", "PutHandle", "check_split", "fingerprint"]

set_module_of_exports(globals())
show_exports(globals())
