"""One rank of the processes of gloo: joins, and calls functions until its pipe is closed."""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..collectives._local_launch import encode_message, end_with_parent, message_of
from ._function_call import Answer, answer_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

    from ._function_call import FunctionReference

JOIN_SECONDS = 120.0


def serve(
    rank: int, world_size: int, folder: str, environment: Mapping[str, str], pipe: Connection
) -> None:
    """Join as `rank` in this process, and answer each call of the parent until an error.

    A call is a function and the timeout in seconds. `folder`: for the store and the output.
    """
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output_path(folder, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)
    message = message_of(lambda: _join(rank, world_size, folder))
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        pipe.send_bytes(encode_message(message))
        # after an error the process ends, so that the other ranks do not wait for it
        while message[0] == "result":
            function, seconds = pipe.recv()
            message = message_of(lambda: _call(function, seconds))  # noqa: B023 - called at once
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.send_bytes(encode_message(message))


def _join(rank: int, world_size: int, folder: str) -> None:
    """Initialise the default group of torch."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]
    limit = timedelta(seconds=JOIN_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


def _call(function: FunctionReference, seconds: float) -> Answer:
    """Call a function with a new group, whose operations end after a number of seconds."""
    import torch.distributed as dist

    from ..integrations.torch import TorchGroup

    while _torch_groups:
        dist.destroy_process_group(_torch_groups.pop())  # all ranks have left the last function
    _torch_groups.append(dist.new_group(timeout=timedelta(seconds=seconds)))
    with TorchGroup(_torch_groups[0]) as group:
        return answer_of(function, group)


_torch_groups: list[Any] = []  # of the last call


def output_path(folder: str, rank: int) -> str:
    """Return the path of the file with what a rank prints."""
    return f"{folder}/output-{rank}"
