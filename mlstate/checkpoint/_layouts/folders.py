"""Which foreign layout a folder has, by the names in it, and the module that reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from . import deepspeed, rank_files, sharded_safetensors, torch_checkpointing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from .._files.parts import Parts, Selection
    from .._folder.protocol import Folder


class Layout(NamedTuple):
    """The layout of a folder of another program, and its reader."""

    name: str
    recognizes: Callable[[Collection[str]], object]  # the names in a folder
    # the content, and names of files that are not read; entries that the selection leaves out may
    # be read
    read: Callable[[Folder, Selection], tuple[Parts, list[str]]]


# The first that recognizes a folder reads it.
LAYOUTS = (
    Layout("rank_files", rank_files.is_layout, rank_files.read),
    Layout("deepspeed", deepspeed.is_layout, deepspeed.read),
    Layout("sharded_safetensors", sharded_safetensors.is_layout, sharded_safetensors.read),
    Layout("torch_checkpointing", torch_checkpointing.entry_files, torch_checkpointing.read),
)


def find_layout(names: Collection[str]) -> Layout | None:
    """Return the layout of a folder with these names; None for another folder.

    Folders of mlstate, torch.distributed.checkpoint and Hugging Face come first: the caller has
    excluded them.
    """
    return next((layout for layout in LAYOUTS if layout.recognizes(names)), None)
