#!/usr/bin/env python3
"""Count how often the calls of one save or load change the file inside mlstate.

    call_moves.py             print the moves of a local save, a load and a load into arrays
    call_moves.py --bucket    also the same operations with a bucket (needs moto and obstore)
    call_moves.py --trace     also print file and function of each move

A move is a call of a Python function whose file differs from the file of the call before; a reader
of the operation follows the same moves. Files outside the package and other threads are ignored.
Each operation runs once before it is counted. Compare numbers of one version of Python only: later
ones inline comprehensions.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import mlstate

PACKAGE = f"{Path(mlstate.__file__).parent}/"


def moves_of(call: Callable[[], object]) -> list[str]:
    """Return file and function of each move that a call makes."""
    moves: list[str] = []
    last = ""

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal last
        file = frame.f_code.co_filename
        if event == "call" and file != last and file.startswith(PACKAGE):
            moves.append(f"{file.removeprefix(PACKAGE)}  {frame.f_code.co_qualname}")
            last = file

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return moves


def start_bucket(resources: ExitStack) -> dict[str, Any]:
    """Start an object store with a bucket ``bucket``; return the `storage_options` for it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    resources.callback(server.stop)
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
    options = {"endpoint": endpoint, "region": "us-east-1", "client_options": {"allow_http": True}}
    return options | {"access_key_id": "key", "secret_access_key": "secret"}


def operations(place: str, **options: Any) -> dict[str, Callable[[], object]]:
    """Return calls below a folder or URL by their names; each save writes a new checkpoint."""
    state = {"weight": np.ones((4, 3), np.float32), "bias": np.zeros(4, np.float32)}
    numbers = itertools.count()
    return {
        "save": lambda: mlstate.save(f"{place}/{next(numbers)}", state, **options),
        "load": lambda: mlstate.load(f"{place}/0", **options),
        "load(into=)": lambda: mlstate.load(f"{place}/0", into={"model": state}, **options),
    }


def main() -> None:
    """Print the number of moves of each operation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bucket", action="store_true", help="also save to and load from a bucket")
    parser.add_argument("--trace", action="store_true", help="print file and function of each move")
    arguments = parser.parse_args()
    with ExitStack() as resources:
        calls = operations(resources.enter_context(tempfile.TemporaryDirectory()))
        if arguments.bucket:
            remote = operations("s3://bucket/run", storage_options=start_bucket(resources))
            calls |= {f"bucket {name}": call for name, call in remote.items()}
        for name, call in calls.items():
            call()
            moves = moves_of(call)
            print(f"{name:<20}{len(moves):4}")
            for move in moves if arguments.trace else ():
                print(f"    {move}")


if __name__ == "__main__":
    main()
