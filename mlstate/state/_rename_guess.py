"""Guess of the rename rules that make the names of two states match, for hints in errors.

Rules are guessed and then checked. A few names of the shorter list are compared with all names of
the other list, and each prefix that would make two names equal gets a vote. The guesses with the
most votes are checked against all names. A wrong guess costs time but never gives a wrong rule.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from .. import _core

Rules: TypeAlias = tuple[tuple[str, str], ...]

# Marks that torch.compile, FSDP and activation checkpointing insert before module names.
MARKS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# Usual prefixes of wrappers and training scripts, to remove or to add. They win ties, but need a
# vote too.
USUAL: tuple[Rules, ...] = (
    (("module.", ""),),
    (("model.", ""),),
    (("", "module."),),
    (("", "model."),),
)
SAMPLES = 16  # names of the shorter list that are compared with all others
NEW_GUESSES = 4  # per sample: a name such as "weight" matches the end of most names
TRIES = 4  # guesses that are checked against all names


def guess_rules(unexpected: list[str], missing: list[str]) -> Rules:
    """Return rules for `rename` that turn unexpected names into missing ones.

    Parameters
    ----------
    unexpected, missing : list of str
        Names that only one side has, without duplicates.

    Returns
    -------
    tuple of pairs of str
        First the marks of wrappers, at any position, then one prefix to remove or to add. Empty
        if no rules explain more than half of the shorter list, or if rules would make two
        unexpected names equal. The rules that explain most names are chosen, and among these the
        fewest. They are correct for these two lists only: the caller must check how they affect
        names that both sides have.
    """
    best: Rules = ()
    matched = 0  # names that `best` explains
    present = [
        mark
        for mark in MARKS
        if any(name.startswith(mark) or f".{mark}" in name for name in unexpected)
    ]
    subsets: list[Rules] = [()]
    for mark in present:  # a mark that both sides have must stay
        subsets += [(*subset, (f"*{mark}", "")) for subset in subsets]
    for removals in subsets:
        try:
            names = list(_core.state_rename(dict.fromkeys(unexpected), removals)[0])
        except ValueError:  # two names would become equal, or one empty
            continue
        for guess in ((), *_prefix_guesses(names, missing)):
            rules = removals + guess
            count = _count_matches(names, missing, guess)
            if count > matched or (count == matched > 0 and len(rules) < len(best)):
                best, matched = rules, count
    return best if matched > min(len(unexpected), len(missing)) // 2 else ()


def _prefix_guesses(unexpected: list[str], missing: list[str]) -> list[Rules]:
    """Return the most frequent guesses of a rename that adds or removes one prefix.

    `unexpected`, `missing`: names that only the source, or only the target has. The guess with most
    votes comes first; at most `TRIES` are returned.
    """
    samples_unexpected = len(unexpected) <= len(missing)  # samples are of the shorter list
    names, others = (unexpected, missing) if samples_unexpected else (missing, unexpected)
    positions = {name: i for i, name in enumerate(others)}
    votes = Counter[Rules](dict.fromkeys(USUAL, 0))
    samples = min(len(names), SAMPLES)
    for i in range(samples):
        part = len(names) // samples
        # scattered, by a prime number: names repeat at regular distances
        sample = names[i * part + i * 7919 % part]
        new_left = NEW_GUESSES
        for prefix, is_of_sample in _prefixes(sample, others, positions):
            # remove the prefix of an unexpected name, or add the prefix of a missing one
            is_removed = is_of_sample == samples_unexpected
            guess = ((prefix, ""),) if is_removed else (("", prefix),)
            if guess in votes or new_left:
                new_left -= guess not in votes
                votes[guess] += 1
    return [guess for guess, count in votes.most_common(TRIES) if count]


def _prefixes(sample: str, others: list[str], positions: dict[str, int]) -> list[tuple[str, bool]]:
    """Return the prefixes by which `sample` differs from one of `others`, in their order.

    `positions`: index of each name in `others`. The bool of a pair tells which name has the prefix:
    True for the sample, False for the other name.
    """
    if not sample:
        return []
    dotted = f".{sample}"
    prefixes = [
        (i, other[: -len(sample)], False)
        for i, other in enumerate(others)
        if other.endswith(dotted)
    ]
    for end in range(1, len(sample)):
        if sample[end - 1] == "." and sample[end:] in positions:
            prefixes.append((positions[sample[end:]], sample[:end], True))
    return [(prefix, is_of_sample) for _, prefix, is_of_sample in sorted(prefixes)]


def _count_matches(unexpected: list[str], missing: list[str], rules: Rules) -> int:
    """Return how many unexpected names a rule, or none, turns into missing ones.

    `rules`: empty, or one rule that adds or removes a prefix. Returns 0 if the rule would make two
    names equal or one empty.
    """
    if not rules:
        return len(set(unexpected).intersection(missing))
    [(removed, added)] = rules
    names = set(unexpected)
    if added:
        return sum(name.startswith(added) and name[len(added) :] in names for name in missing)
    renamed = {name.removeprefix(removed) for name in unexpected}
    if len(renamed) < len(unexpected) or removed in names:
        return 0
    return len(renamed.intersection(missing))
