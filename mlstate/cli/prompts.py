"""``mlstate prompts``: list, show, verify, repair and prune the prompts of a store."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import TYPE_CHECKING

from .. import _core
from .._common.budget import parse_size
from .._common.local_path import local_folder
from .._common.text import bytes_text, count_text, printable
from ..checkpoint._options import check_timeout
from ..prompts._listing import HEADERS, StoredPrompt, list_prompts
from ._common import Commands, add_actions_of, add_command, print_json, print_table, shared

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["add"]

_TOKENS = 16  # that `show` prints at most


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate prompts`` and its actions to `commands`.

    Parsed arguments have the function of the action as ``run``.
    """
    text = "list, verify and prune the prompts of a store"
    actions = add_actions_of(commands, "prompts", text)
    listed = add_command(actions, "ls", "list the prompts, the last used first", run_ls)
    details = add_command(actions, "show", "show one prompt: its tokens and entries", run_show)
    verified = add_command(
        actions, "verify", "read every byte, and report damage", run_verify, statuses={1: "damaged"}
    )
    lock = shared("--lock-timeout")
    repaired = add_command(actions, "repair", "remove damaged records", run_repair, lock)
    text = "delete the least recently used prompts"
    pruned = add_command(actions, "prune", text, run_prune, lock)
    for action in (listed, details, verified, repaired, pruned):
        action.add_argument("path", help="the folder of a PromptStore")
    details.add_argument("prompt", help="the first digits of its name, as ls prints it")
    pruned.add_argument(
        "--max-bytes", metavar="SIZE", help="such as 10GB (default: only compact the files)"
    )


def _open_log(path: str) -> AbstractContextManager[_core.PromptLog]:
    """Return the log of the store at `path`, which must exist, as a context that closes it."""
    return closing(_core.PromptLog(local_folder(path), False))  # False: do not create it


def run_ls(arguments: argparse.Namespace) -> int:
    """Print a row for each prompt, the last used first; return 0."""
    with _open_log(arguments.path) as log:
        prompts, stats = list_prompts(log, arguments.path), log.stats()
    if arguments.json:
        facts = {"path": arguments.path, "prompts": [each.facts() for each in prompts], **stats}
        return print_json(facts)
    size = bytes_text(stats["disk_bytes"])
    print(f"{printable(arguments.path)}: {count_text(len(prompts), 'prompt')}, {size} on disk")
    print_table(HEADERS, [each.row() for each in prompts])
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Print one prompt: its key, model, first tokens and entries; return 0.

    Raises ValueError unless exactly one prompt has the name. ``--json`` prints all its tokens.
    """
    with _open_log(arguments.path) as log:
        prompt = _choose_prompt(list_prompts(log, arguments.path), arguments.prompt)
    tokens = prompt.tokens()
    entries = [] if prompt.head is None else prompt.head.stored.to_json()
    if arguments.json:
        facts = prompt.facts() | {"token_ids": tokens, "entries": entries}
        return print_json(facts)
    print(f"{prompt.key}: {count_text(len(tokens), 'token')}, {bytes_text(prompt.nbytes)}")
    print(f"model: {printable(prompt.model)}, fingerprint sha256:{prompt.fingerprint}")
    more = "" if len(tokens) <= _TOKENS else " ..."
    print(f"tokens: {' '.join(map(str, tokens[:_TOKENS]))}{more}")
    rows = [(e["name"], e["kind"], str(tuple(e["shape"])), e["dtype"]) for e in entries]
    print_table(("entry", "kind", "shape without positions", "dtype"), rows)
    return 0


def _choose_prompt(prompts: list[StoredPrompt], prefix: str) -> StoredPrompt:
    """Return the prompt whose key begins with `prefix`.

    Raises ValueError if no prompt, or several, begin with it.
    """
    chosen = [each for each in prompts if each.key.startswith(prefix.lower())]
    if len(chosen) != 1:
        count = "no prompt begins" if not chosen else f"{len(chosen)} prompts begin"
        raise ValueError(f"{count} with {prefix!r}: mlstate prompts ls lists them")
    return chosen[0]


def run_verify(arguments: argparse.Namespace) -> int:
    """Read every byte of the store, and print damaged records; return 1 if it has some."""
    with _open_log(arguments.path) as log:
        damage = log.verify()
    _print_damage(arguments, damage, "good" if not damage else "damaged")
    return 1 if damage else 0


def run_repair(arguments: argparse.Namespace) -> int:
    """Remove the damaged records, print them, and return 0.

    Raises ValueError for a negative ``--lock-timeout`` or NaN.
    """
    with _open_log(arguments.path) as log:
        damage = log.repair(check_timeout(arguments.lock_timeout))
    _print_damage(arguments, damage, f"{count_text(len(damage), 'damaged record')} removed")
    return 0


def _print_damage(
    arguments: argparse.Namespace, damage: list[tuple[str, int, str]], summary: str
) -> None:
    """Print the line `summary` and a table of damaged records, or the records as JSON.

    `damage`: (file, offset in bytes, text) of each.
    """
    if arguments.json:
        listed = [dict(zip(("file", "offset", "text"), each, strict=True)) for each in damage]
        print_json({"path": arguments.path, "damage": listed})
        return
    print(f"{printable(arguments.path)}: {summary}")
    rows = [(file, str(offset), text) for file, offset, text in damage]
    print_table(("file", "offset", "damage"), rows)


def run_prune(arguments: argparse.Namespace) -> int:
    """Delete the least recently used prompts until the rest fits ``--max-bytes``.

    Also compacts the files, prints the bytes that were freed, and returns 0. Without a limit, no
    prompt is deleted. Raises ValueError for a negative ``--lock-timeout`` or NaN.
    """
    most = None if arguments.max_bytes is None else parse_size("max_bytes", arguments.max_bytes)
    with _open_log(arguments.path) as log:
        freed, stats = log.prune(most, check_timeout(arguments.lock_timeout)), log.stats()
    if arguments.json:
        facts = {"path": arguments.path, "freed_bytes": freed, **stats}
        return print_json(facts)
    size = bytes_text(stats["disk_bytes"])
    print(f"{printable(arguments.path)}: {bytes_text(freed)} freed, {size} on disk")
    return 0
