"""``mlstate follow``: keep a Hugging Face folder at the newest published version."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from contextlib import contextmanager, suppress
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING

from .._common.atomic_file import Target
from .._common.local_path import local_path
from .._common.text import printable
from ..checkpoint._huggingface.export import export, take_export
from ..checkpoint._store.open_path import open_files
from ..errors import CompatibilityError, FormatError, StoreError
from ..follow import Follower
from ..follow._version import empty_model
from ._common import Commands, add_command

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate follow`` to `commands`.

    Parsed arguments have the function of the command as ``run``.
    """
    text = "keep a Hugging Face folder at the newest version that a Publisher wrote"
    into = "Hugging Face folder, replaced atomically by each version; created if it is missing"
    every = "time between two looks for a new version (default: 1)"
    usages = {
        "path": "the folder of the versions, or its URL",
        "--into FOLDER": {"required": True, "help": into},
        "--files-from FOLDER": "folder with config.json and the tokenizer (default: the replaced "
        "folder)",
        "--every SECONDS": {"type": float, "default": 1.0, "help": every},
        "--once": "end at the newest version",
    }
    add_command(commands, "follow", text, run_follow, usages)


def run_follow(arguments: argparse.Namespace) -> int:
    """Write each new version to the folder, without an end.

    With ``--once``, write the newest one and return 0; errors are raised, also if nothing is
    published. Otherwise damage and errors of the store are printed once, and it tries again. Raises
    ValueError if ``--every`` is not positive, or longer than a thread can sleep.
    """
    if not 0 < arguments.every <= TIMEOUT_MAX:
        raise ValueError(f"--every must be a positive number of seconds, got {arguments.every}")
    if arguments.once:
        open_files(arguments.path, reads=True).read_manifest()  # raises if nothing is published
    follower: Follower | None = None
    is_written, problem = False, ""  # whether the folder has the follower's version
    while True:
        try:
            with _printed_warnings():
                if follower is None or not is_written or follower.poll() is not None:
                    is_written = False  # also after an error: the next turn writes it
                    follower = _advance_follower(follower, arguments.path)
                    if follower is not None:
                        _write_version(follower, arguments)
                        is_written = True
            problem = ""
        except (FormatError, StoreError) as error:  # until the next anchor, or the store is back
            if arguments.once:
                raise
            if str(error) != problem:
                problem = str(error)
                _print_warning(problem)
        if arguments.once:
            return 0
        time.sleep(arguments.every)


@contextmanager
def _printed_warnings() -> Iterator[None]:
    """Print the warnings of a block when it ends."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for warning in caught:
                _print_warning(str(warning.message))


def _advance_follower(follower: Follower | None, path: str) -> Follower | None:
    """Advance a follower to the newest version, and return it; None if nothing is published.

    `follower` None, or with other tensors than the version: a new one for `path` is returned.
    """
    if follower is not None:
        with suppress(CompatibilityError):
            follower.advance()
            return follower
    files = open_files(path, reads=True)
    if files.find_manifest() is None:
        return None
    follower = Follower(path, into=empty_model(files))
    follower.advance()
    return follower


def _print_warning(text: str) -> None:
    print("mlstate: warning:", printable(text), file=sys.stderr, flush=True)


def _write_version(follower: Follower, arguments: argparse.Namespace) -> None:
    """Replace the user's folder by the follower's version atomically, and print the step.

    After an error the folder is unchanged. Raises StoreError (EEXIST) if it has files that would be
    lost.
    """
    target = Target.of(local_path(arguments.into))
    source = arguments.files_from
    if source is None and target.is_folder:
        source = target.path
    request = take_export(os.fspath(arguments.into), follower.state, overwrite=True)
    export(request, source, start=target)
    if arguments.json:
        print(json.dumps({"step": follower.version, "path": target.path}), flush=True)
    else:
        print(f"{printable(arguments.into)}: step {follower.version}", flush=True)
