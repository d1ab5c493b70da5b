"""One rank of the processes of gloo: joins, and calls functions until its pipe is closed."""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..collectives._local_launch import encode_message, end_with_parent
from ._function_call import call_as_rank

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

JOIN_SECONDS = 120.0


def serve(
    rank: int, world_size: int, folder: str, environment: Mapping[str, str], pipe: Connection
) -> None:
    """Join as `rank` in this process, and answer each call of the parent.

    A call is a function and the timeout in seconds; an answer is a message, and then the warnings
    and whether the next call may use this process. `folder`: for the store and the output.
    """
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output_path(folder, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)
    import torch
    import torch.distributed as dist

    from ..integrations.torch import TorchGroup

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]
    limit = timedelta(seconds=JOIN_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    pipe.send("joined")
    torch_group: Any = None
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            function, seconds = pipe.recv()
            if torch_group is not None:
                dist.destroy_process_group(torch_group)  # all ranks have left the last function
            torch_group = dist.new_group(timeout=timedelta(seconds=seconds))
            group = TorchGroup(torch_group)
            message, caught = call_as_rank(function, group)
            is_intact = message[0] == "result" and group._ended in ("", "closed")
            group.close()
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.send_bytes(encode_message(message))
            pipe.send((caught, is_intact))
            if message[0] != "result":
                break  # the others notice that this process ends, and do not wait for it


def output_path(folder: str, rank: int) -> str:
    """Return the path of the file with what a rank prints."""
    return f"{folder}/output-{rank}"
