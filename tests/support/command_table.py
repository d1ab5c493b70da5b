"""Every command with a call and wrong calls; the tests of all commands read this table.

In a call, `{source}` and `{other}` are checkpoints and `{target}` does not exist.
"""

from typing import NamedTuple


class Command(NamedTuple):
    """One row of the table."""

    call: str  # exit status 0 for two equal checkpoints
    wrong: tuple[str, ...] = ()  # refused with a hint at --help
    reads_checkpoints: bool = True  # else it reads another kind of file, or none


COMMANDS = {
    "inspect": Command("{source}", ("", "a b", "a --step last")),
    "verify": Command("{source}", ("a --step 1 --all-steps", "a --repair --all-steps")),
    "checksum": Command("{target}", ("", "a b"), False),
    "diff": Command("{source} {other}", ("a",)),
    "digest": Command("{source} {other}", ("", "a b c")),
    "reshard": Command("{source} {target} --layout rows=2", ("a b",)),
    "convert": Command("{source} {target}", ("a",)),
    "prune": Command("{source}", ("a --keep",)),
    "publish": Command("ls {target}", ("", "ls", "prune a", "verify a b"), False),
    "follow": Command("{target} --into out --once", ("", "a", "a --into b --every no"), False),
    "cache": Command("show {target}", ("", "show", "convert a", "convert a b --to 0.30"), False),
    "coreml": Command(
        "states {source}", ("", "plan", "plan a b", "plan a b --at many", "states"), False
    ),
    "coreai": Command("verify {source}", ("", "plan a b", "states"), False),
    "prompts": Command("ls {source}", ("", "ls", "show a", "prune a --max-bytes"), False),
    "demo": Command("", ("a",), False),
    "info": Command("", ("a",), False),
}
CHECKPOINT_COMMANDS = [name for name, row in COMMANDS.items() if row.reads_checkpoints]


def call_of(name, **places):
    """Return the words of a command's call."""
    return [name, *(word.format(**places) for word in COMMANDS[name].call.split())]
