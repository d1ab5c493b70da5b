"""``mlstate prompts``: list, show, verify, repair and prune the prompts of a store."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import TYPE_CHECKING

from .. import _core
from .._common.budget import parse_size
from .._common.local_path import local_folder
from .._common.report import Table
from .._common.text import bytes_text, count_text
from ..checkpoint._options import check_timeout
from ..prompts._listing import StoredPrompt, list_prompts, prompt_table
from ._common import Commands, add_actions_of, add_command, print_result, shared

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
    path = {"path": "the folder of a PromptStore"}
    prompt = {"prompt": "the first digits of its name, as ls prints it"}
    lock = shared("--lock-timeout")
    most = {"--max-bytes SIZE": "such as 10GB (default: only compact the files)"}
    add_command(actions, "ls", "list the prompts, the last used first", run_ls, path)
    text = "show one prompt: its tokens and entries"
    add_command(actions, "show", text, run_show, {**path, **prompt})
    text = "read every byte, and report damage"
    add_command(actions, "verify", text, run_verify, path, {1: "damaged"})
    add_command(actions, "repair", "remove damaged records", run_repair, {**path, **lock})
    text = "delete the least recently used prompts"
    add_command(actions, "prune", text, run_prune, {**path, **most, **lock})


def _open_log(path: str) -> AbstractContextManager[_core.PromptLog]:
    """Return the log of the store at `path`, which must exist, as a context that closes it."""
    return closing(_core.PromptLog(local_folder(path), False))  # False: do not create it


def run_ls(arguments: argparse.Namespace) -> int:
    """Print a row for each prompt, the last used first; return 0."""
    with _open_log(arguments.path) as log:
        prompts, stats = list_prompts(log, arguments.path), log.stats()
    facts = {"path": arguments.path, "prompts": [each.facts() for each in prompts], **stats}
    size = f"{count_text(len(prompts), 'prompt')}, {bytes_text(stats['disk_bytes'])} on disk"
    return print_result(arguments, facts, [prompt_table(f"{arguments.path}: {size}", prompts)])


def run_show(arguments: argparse.Namespace) -> int:
    """Print one prompt: its key, model, first tokens and entries; return 0.

    Raises ValueError unless exactly one prompt has the name. ``--json`` prints all its tokens.
    """
    with _open_log(arguments.path) as log:
        prompt = _choose_prompt(list_prompts(log, arguments.path), arguments.prompt)
    tokens = prompt.tokens()
    entries = [] if prompt.head is None else prompt.head.stored.to_json()
    facts = prompt.facts() | {"token_ids": tokens, "entries": entries}
    more = "" if len(tokens) <= _TOKENS else " ..."
    lines = [
        f"{prompt.key}: {count_text(len(tokens), 'token')}, {bytes_text(prompt.nbytes)}",
        f"model: {prompt.model}, fingerprint sha256:{prompt.fingerprint}",
        f"tokens: {' '.join(map(str, tokens[:_TOKENS]))}{more}",
        *(f"extra of token {position}: {digest}" for position, digest in prompt.extra.items()),
    ]
    rows = [(e["name"], e["kind"], tuple(e["shape"]), e["dtype"]) for e in entries]
    columns = ["entry", "kind", "shape without positions", "dtype"]
    return print_result(arguments, facts, [Table(lines, columns, rows)])


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
    status = 1 if damage else 0
    return _print_damage(arguments, damage, "damaged" if damage else "good", status)


def run_repair(arguments: argparse.Namespace) -> int:
    """Remove the damaged records, print them, and return 0.

    Raises ValueError for a negative ``--lock-timeout`` or NaN.
    """
    with _open_log(arguments.path) as log:
        damage = log.repair(check_timeout(arguments.lock_timeout))
    text = f"{count_text(len(damage), 'problem')} repaired"
    return _print_damage(arguments, damage, text, 0)


def _print_damage(
    arguments: argparse.Namespace, damage: list[tuple[str, int, str]], summary: str, status: int
) -> int:
    """Print the line `summary` and a table of damaged records, or the records as JSON.

    `damage`: (file, offset in bytes, text) of each. Return the exit status.
    """
    columns = ["file", "offset", "damage"]
    table = Table(f"{arguments.path}: {summary}", columns, damage)
    facts = {"path": arguments.path, "damage": table.data(damage="text")}
    lines: list[str | Table] = [table]
    if status:
        text = "mlstate prompts repair removes what is damaged; then put the prompts again"
        lines.append(f"to recover: {text}")
    return print_result(arguments, facts, lines, status)


def run_prune(arguments: argparse.Namespace) -> int:
    """Delete the least recently used prompts until the rest fits ``--max-bytes``.

    Also compacts the files, prints the bytes that were freed, and returns 0. Without a limit, no
    prompt is deleted. Raises ValueError for a negative ``--lock-timeout`` or NaN.
    """
    most = None if arguments.max_bytes is None else parse_size("max_bytes", arguments.max_bytes)
    with _open_log(arguments.path) as log:
        freed, stats = log.prune(most, check_timeout(arguments.lock_timeout)), log.stats()
    facts = {"path": arguments.path, "freed_bytes": freed, **stats}
    size = f"{bytes_text(freed)} freed, {bytes_text(stats['disk_bytes'])} on disk"
    is_over = most is not None and stats["disk_bytes"] > most
    more = "; the rest is pinned, or a file that it shares is" if is_over else ""
    return print_result(arguments, facts, [f"{arguments.path}: {size}{more}"])
