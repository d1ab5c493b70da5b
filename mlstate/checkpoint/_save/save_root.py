"""A whole save, as every caller does it who waits for its end.

    save_root -> check_target       the arguments -> SaveTarget
              -> take_content       the states, checked but not copied -> SaveContent
              -> gather_shards      this rank's shards -> GatheredShards
              -> write_and_commit   see commit.py -> RootPath, of the saved root

Each step takes the result of the step before. If several ranks save together, an error on one rank
is carried to the next exchange of messages, where the other ranks wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._options import SAVE_DEFAULTS, SaveOptions
from .commit import write_and_commit
from .content import take_content
from .shards import gather_shards
from .target import check_target

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from .._store.open_path import RootPath


def save_root(
    path: str | os.PathLike[str],
    model: Any,
    optimizer: Any,
    step: int | None,
    options: SaveOptions,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool | None = None,
) -> RootPath:
    """Save as `save` does, and return the saved root; `options` may lack keywords."""
    options = {**SAVE_DEFAULTS, **options}
    target = check_target(path, options, storage_options, overwrite)
    content = take_content(target, model, optimizer, step, options)
    return write_and_commit(target, gather_shards(target, content), options["progress"])
