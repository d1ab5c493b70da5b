"""Prompt logs with random histories: each seed is another one.

A process makes random puts, marks, matches and evictions on a log, and notes each that returned.
A reader then finds all that it stored, and no other record.
"""

import errno
import os
import random
import signal
import time
from functools import partial
from typing import ClassVar

import prompt_model
from children import start_child, wait_for
from operation import Operation, describe
from prompt_model import BLOCK, EXTRA, FINGERPRINT, match, put, split_extras, wrong_records

from mlstate._core import PromptLog
from mlstate.errors import FormatError, StoreError


class History:
    """Random operations, the same for each seed, and what a reader must find after them."""

    def __init__(self, seed, budget=False):
        self.random = random.Random(seed)
        self.budget = self.random.choice((6_000, 12_000, 30_000)) if budget else None
        self.steps = [self._step() for _ in range(self.random.randint(2, 12))]

    def _tokens(self):
        # few different tokens, so that prompts share blocks; some have one of two extras
        tokens = [0, 1] * 8 + [EXTRA, 1 + EXTRA, 2 * EXTRA]
        return self.random.choices(tokens, k=self.random.randint(1, 4) * BLOCK + 2)

    def _step(self):
        kinds = ["put"] * 7 + ["match", "pin", "delete", "drop", "reopen", "prune", "big"]
        name = self.random.choice(kinds)
        tokens = [9, *self._tokens()[: BLOCK - 2]] if name == "big" else self._tokens()
        return name, tokens, self.random.randint(0, len(tokens))

    def carry_out(self, root, report=lambda *_: None):
        """Open the log, do all steps, and report how each ended; the opening is step -1."""
        log = None
        for number, step in enumerate([("open", [], 0), *self.steps], -1):
            try:
                log = self._do(log, root, *step)
                report("done", number)
            except (StoreError, OSError, MemoryError, FormatError) as error:
                report("raised", *describe(error))
            if log is None:
                return

    def _do(self, log, root, name, tokens, end):
        if name == "open":
            return PromptLog(f"{root}/log", True)
        if name == "put":
            put(log, tokens, tails=[end], max_bytes=self.budget, timeout=5.0)
        elif name == "big":
            record = prompt_model.record(tokens, len(tokens), 2)
            ids, extras = split_extras(tokens)
            log.put(FINGERPRINT, ids, BLOCK, [record], self.budget, 5.0, extras)
        elif name == "reopen":
            closed, log = log, PromptLog(f"{root}/log", True)
            closed.close()
        elif name == "prune":
            log.prune(self.budget, 5.0)
        else:
            result = match(log, tokens)
            wrong = wrong_records(result, tokens)[1]
            if wrong:
                raise AssertionError(wrong)
            numbers = range(len(result.records))
            if name == "drop":
                numbers = [end % len(numbers)] if numbers else []
            if name != "match":
                log.mark(result, numbers, name, 5.0)
        return log

    def expected(self, ended):
        """Prefixes that must be result, and that must not, if the steps `ended` returned."""
        stored, lost_before = set(), set()
        for number, (name, tokens, end) in enumerate(self.steps):
            if name == "put":
                records = {(tuple(tokens[:e]), 0) for e in range(BLOCK, len(tokens) + 1, BLOCK)}
                records.add((tuple(tokens[:end]), 1))
                if number in ended:
                    stored |= records
                lost_before -= records
            elif name in ("delete", "drop"):
                # here each of them may be lost; tests/prompts has the exact model
                touched = {(tuple(tokens[:e]), k) for e in range(len(tokens) + 1) for k in (0, 1)}
                stored = {
                    (prefix, kind)
                    for prefix, kind in stored
                    if (prefix, kind) not in touched
                    and not (
                        name == "drop" and any(prefix[: len(p)] == p for p, k in touched if len(p))
                    )
                }
        return stored


def prompts_of(history):
    """The prompts to ask for."""
    return [tokens for name, tokens, _ in history.steps if name not in ("prune", "reopen")]


def judge(history, root, ended, *, damaged=False):
    """Complaints about the folder, if the steps `ended` returned; None: the power failed."""
    complaints = []
    if not (root / "log" / "store").exists():
        return ["the store is lost"] if -1 in ended else []
    try:
        log = PromptLog(root / "log", False)
    except (FormatError, StoreError) as error:
        return [] if damaged else [f"cannot open: {error}"]
    listed = set()
    for tokens in prompts_of(history):
        result = match(log, tokens)
        bad, wrong = wrong_records(result, tokens)
        complaints += wrong
        if not damaged and (bad or result.damage):
            # the payload of a put that did not return may be torn by a power failure
            complaints += [f"damage {result.damage} {bad}"] if damaged is False else []
        listed |= {(tuple(tokens[:end]), kind) for kind, _, end, _ in result.records} - {
            (tuple(tokens[:end]), kind) for kind, end in bad
        }
    if history.budget is None and not damaged:
        lost = history.expected(ended) - listed
        complaints += [f"lost {record}" for record in sorted(lost)]
    return complaints


def judge_next(root, damaged):
    """The next put and repair work, and everything is good then."""
    try:
        log = PromptLog(root / "log", True)
        log.repair(5.0)
        tokens = list(range(3 * BLOCK))
        done = put(log, tokens)
        result = match(PromptLog(root / "log", False), tokens)
        bad = wrong_records(result, tokens)
        if result.length != len(tokens) or bad != (set(), []):
            return [
                f"the next put gives {done}, a match of {result.length}, {result.damage}, {bad}"
            ]
        left = log.verify() + [path.name for path in (root / "log").glob(".mlstate-*")]
        return [f"left after a repair: {left}"] if left else []
    except (StoreError, FormatError) as error:
        return [] if damaged else [f"the next put fails: {error}"]


class PromptHistory(Operation):
    """A random history of a log."""

    name = "prompt log"
    hint = "store"
    may_go_on = True
    errors: ClassVar = (errno.EBUSY,)
    seeded: ClassVar = {
        "faults": (40, 3_500, 35_000), "power": (100, 3_000, 30_000), "flip": (50, 3_200, 32_000),
        "race": (5, 300, 3_000),
    }  # fmt: skip
    points_of_seed = 4

    def prepare(self, folder):
        self.history = History(self.seed, budget=random.Random(self.seed + 1).random() < 0.3)

    def call(self, folder):
        self.history.carry_out(folder, self.note)

    def outcome(self, folder):
        ended = {values[1] for values in self.notes if values[0] == "done"}
        damaged = None if self.after_power else False
        complaints = judge(self.history, folder, ended, damaged=damaged)
        assert not complaints, complaints
        return "new"

    def call_again(self, folder):
        complaints = judge_next(folder, None if self.after_power else False)
        assert not complaints, complaints
        return "new"


def records_of(history, root):
    """The records that the prompts match, and the damage; None if the log cannot be opened."""
    try:
        log = PromptLog(root / "log", False)
    except (FormatError, StoreError):
        return None
    return [match(log, tokens).records for tokens in prompts_of(history)], log.verify()


def flip(bench):
    """Bits or lengths of files change in a complete log."""
    root, chance = bench.root, random.Random(bench.seed + 1)
    history = History(bench.seed)
    history.carry_out(root)
    if chance.random() < 0.5:
        PromptLog(root / "log", False).prune(None, 5.0)  # writes the index
    complaints = []
    files = sorted((root / "log").iterdir())
    originals = {path: path.read_bytes() for path in files}
    before = records_of(history, root)
    for turn in range(10):
        path = chance.choice(files)
        data = bytearray(originals[path])
        is_flip = chance.random() < 0.8 and data
        if is_flip:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif chance.random() < 0.5:
            del data[chance.randrange(len(data) + 1) :]
        else:
            data += chance.randbytes(200)
        path.write_bytes(data)
        result = judge(history, root, set(), damaged=True)
        after = records_of(history, root)
        if is_flip and after is None and any(before[0]):
            result.append("one flipped bit, and the log cannot be opened")
        elif is_flip and after is not None and after[0] != before[0] and not after[1]:
            result.append(f"records are lost, and verify finds nothing: {before[0]} {after[0]}")
        result += judge_next(root, True)
        complaints += [f"flip {turn} in {path.name}: {text}" for text in result]
        for other in (root / "log").iterdir():
            other.unlink()
        for other, content in originals.items():
            other.write_bytes(content)
    return 10, complaints


def race(bench):
    """Writers, a reader and a pruner of other processes at the same time; some are killed."""
    seed, root = bench.seed, bench.root
    chance = random.Random(seed + 1)
    histories = [History(seed * 7 + i, budget=i == 2) for i in range(3)]
    PromptLog(root / "log", True)
    children = [start_child(partial(history.carry_out, root)) for history in histories]
    if chance.random() < 0.3:
        time.sleep(chance.random() * 0.004)
        os.kill(children[0][0], signal.SIGKILL)
    complaints = []
    reader = PromptLog(root / "log", False)
    prompts = [tokens for history in histories for tokens in prompts_of(history)]
    for tokens in prompts:
        result = match(reader, tokens)
        bad, wrong = wrong_records(result, tokens)
        complaints += wrong + ([f"damaged: {bad}"] if bad else [])
    for child in children:
        ended, status = wait_for(*child)
        if status not in (0, -signal.SIGKILL):
            complaints.append(f"a process ended with {status}: {ended[-1:]}")
    for tokens in prompts:
        bad, wrong = wrong_records(match(reader, tokens), tokens)
        complaints += wrong + ([f"damaged: {bad}"] if bad else [])
    history = histories[0]
    return 1, complaints + judge(history, root, set()) + judge_next(root, False)


PromptHistory.own_attacks = {"flip": flip, "race": race}
