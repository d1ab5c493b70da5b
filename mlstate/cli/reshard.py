"""``mlstate reshard``: its text of a layout, such as "axis:1=2,rows=4", and its summary."""

from __future__ import annotations

import argparse

from .. import _core
from .._common.text import bytes_text, count_text, names_hint
from .._sharding.layout import LAYOUT_NAMES
from ..checkpoint import Layout, inspect, reshard
from ._common import Commands, add_command, find, print_result, shared, step_of
from ._progress import progress_of

__all__ = ["add"]

_NAMES = tuple(sorted(LAYOUT_NAMES, key="whole".__ne__))  # "whole" first


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate reshard`` to `commands`.

    Parsed arguments have the function of the command as ``run``.
    """
    help_text = "write a checkpoint anew, cut in another way"
    usages = {
        "source": "a checkpoint, or a folder of a run or a Hugging Face model",
        "target": "the folder to write",
        "--layout": {
            "required": True,
            "help": f"{', '.join(_NAMES)} or axis:K; several cuts as axis:1=2,rows=4, with their "
            "parts",
        },
        "--world-size N": {"type": int, "help": "number of ranks"},
        **shared("--step", "--monitor", "--mode", "--overwrite", "--lock-timeout"),
    }
    add_command(commands, "reshard", help_text, run_reshard, usages)


def _layout(text: str, world_size: int | None) -> Layout:
    """Return the layout that the user's text describes, such as "rows" or "axis:1=2,rows=4".

    A single cut without a number of parts has `world_size` parts. Raises ValueError for other
    texts, or if the number is missing.
    """
    words = text.split(",")
    steps: list[tuple[int | str, int]] = []
    for word in words:
        # None: no layout; else the (axis, parts) of its cuts, () for "whole", and whether the word
        # has the number of parts
        parsed = _core.layout_parse(word)
        if parsed is None or (not parsed[0] and len(words) > 1):
            kind = word.partition("=")[0].partition(":")[0]
            raise ValueError(
                f"--layout {text}: {word!r} is not one of {', '.join(_NAMES)} and axis:K, or one "
                "of these with a number of parts, such as rows=4"
                + names_hint(kind, (*_NAMES, "axis"), listed=False)
            )
        cut, has_parts = parsed
        if cut and not has_parts:
            if len(words) > 1 or world_size is None:
                how = f"{word}=N" if len(words) > 1 else "--world-size N"
                raise ValueError(f"--layout {text}: the number of parts is missing: write {how}")
            cut = tuple((axis, world_size) for axis, _ in cut)
        steps += cut
    return Layout(steps)


def run_reshard(arguments: argparse.Namespace) -> int:
    """Write a copy of the checkpoint with the new layout, and print a summary; return 0.

    Raises ValueError for a wrong option, and if the source is a file.
    """
    if arguments.world_size is not None and arguments.world_size < 1:
        raise ValueError(f"--world-size must be 1 or more, got {arguments.world_size}")
    layout = _layout(arguments.layout, arguments.world_size)
    source = find(arguments.source, step_of(arguments, arguments.source))
    with progress_of("reshard", lambda: inspect(source.fresh()).nbytes) as progress:
        resharded = reshard(
            source,
            arguments.target,
            layout=layout,
            world_size=arguments.world_size or layout.parts,
            overwrite=arguments.overwrite,
            progress=progress,
            lock_timeout=arguments.lock_timeout,
        )
    files, ranks = len(resharded.files()), resharded.world_size
    data = {
        "source": source.path,
        "target": resharded.path,
        "step": resharded.step,
        "layout": layout.steps,
        "world_size": ranks,
        "bytes": resharded.nbytes,
        "files": files,
    }
    amount = f"{bytes_text(resharded.nbytes)} in {count_text(files, 'file')}"
    text = f"{arguments.target}: {amount}, for {count_text(ranks, 'rank')}"
    return print_result(arguments, data, [text])
