"""Messages between the ranks of a save or a load; a process that is alone sends none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..collectives import ProcessGroup

_MESSAGE_BYTES = 1024  # largest fixed-size message between ranks


def gather_bytes(group: ProcessGroup | None, data: bytes, root: int | None = None) -> list[bytes]:
    """Return the data of all ranks, in their order; every rank calls it.

    `root`: only this rank gets them, and others []. None: all ranks do.
    """
    if group is None or group.world_size == 1:
        return [data]
    return list(group.gather_bytes(data, root=root) or [])


def broadcast_text(group: ProcessGroup | None, text: bytes) -> bytes:
    """Return the text of rank 0 on every rank; every rank calls it. Without a group: the text.

    A text of rank 0 has at most `_MESSAGE_BYTES` bytes, and no NUL at its end.
    """
    if group is None:
        return text
    import numpy as np

    array = np.zeros(_MESSAGE_BYTES, np.uint8)
    if group.rank == 0:
        array[: len(text)] = np.frombuffer(text, np.uint8)
    return bytes(group.broadcast(array, root=0)).rstrip(b"\0")


def pack_message(content: dict[str, Any]) -> bytes:
    """Return the JSON text of a message between ranks, of at most `_MESSAGE_BYTES` bytes.

    Only the text of an error in it may be too long; it is cut.
    """
    text = json.dumps(content).encode()
    while len(text) > _MESSAGE_BYTES:
        content["error"] = content["error"][: len(content["error"]) // 2] + "…"
        text = json.dumps(content).encode()
    return text


def unpack_message(text: bytes) -> dict[str, Any]:
    """Return the content of a message."""
    content: dict[str, Any] = json.loads(text)
    return content


def error_text(error: BaseException) -> str:
    """Return class and text of an error, for other ranks."""
    return f"{type(error).__name__}: {error}"
