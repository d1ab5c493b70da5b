"""Prompt logs under faults: each seed is a random history, with one fault in it.

    LD_PRELOAD=shim.so python prompt_faults.py KIND FIRST COUNT

A child makes random puts, marks, matches and evictions on a log, and reports each that returned.
One call fails in it, or it is killed. Its parent then reads the folder as a new process would. See
`seeded_faults.run_program` for the arguments; KIND is a key of KINDS.
"""

import errno
import os
import random
import signal
import time
from functools import partial

import numpy as np
import prompt_model
from fault_children import run_child, start_child, wait_for
from fault_harness import KILLED
from prompt_model import BLOCK, FINGERPRINT, match, put, wrong_records
from seeded_faults import (
    choose_fault,
    choose_kill,
    judge_end,
    put_state,
    run_program,
    states_without_power,
)

from mlstate._core import PromptLog
from mlstate.errors import FormatError, StoreError

# The calls that a history makes, and the last of each that may fail.
CALLS = dict.fromkeys(
    (
        "open", "open_folder", "create", "close", "close_read", "pread", "write", "pwrite",
        "truncate", "fsync", "fsync_folder", "fdatasync", "sync_file_range", "rename", "unlink",
        "stat", "list", "flock", "unlock",
    ),
    12,
) | {"change": 40}  # fmt: skip


class History:
    """Random operations, the same for each seed, and what a reader must find after them."""

    def __init__(self, seed, budget=False):
        self.random = random.Random(seed)
        self.budget = self.random.choice((6_000, 12_000, 30_000)) if budget else None
        self.steps = [self._step() for _ in range(self.random.randint(2, 12))]

    def _tokens(self):
        # few different tokens, so that prompts share blocks
        return [self.random.randint(0, 1) for _ in range(self.random.randint(1, 4) * BLOCK + 2)]

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
                report("raised", number, type(error).__name__, getattr(error, "errno", 0))
            if log is None:
                return

    def _do(self, log, root, name, tokens, end):
        if name == "open":
            return PromptLog(f"{root}/log", True)
        if name == "put":
            put(log, tokens, tails=[end], max_bytes=self.budget, timeout=5.0)
        elif name == "big":
            record = prompt_model.record(tokens, len(tokens), 2)
            log.put(FINGERPRINT, np.array(tokens), BLOCK, [record], self.budget, 5.0)
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


def judge(history, root, ended, *, damaged=False, goes_on=True):
    """Complaints about the folder, if the steps `ended` returned."""
    complaints = []
    if not (root / "log" / "store").exists():
        return ["the store is lost_before"] if -1 in ended else []
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
    if goes_on:
        complaints += judge_next(log, root, damaged)
    return complaints


def judge_next(log, root, damaged):
    """The next put and repair work, and everything is good then."""
    try:
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


# ---- the kinds ----


def steps_ended(reports):
    """The numbers of the steps that returned."""
    return {values[1] for values in reports if values[0] == "done"}


def random_history(seed):
    """The history of a seed, which often has no budget, and a source of further choices."""
    chance = random.Random(seed + 1)
    return History(seed, budget=chance.random() < 0.3), chance


def disturb(seed, root, choose):
    """A history under one fault."""
    history, chance = random_history(seed)
    fault = choose(chance, CALLS)
    reports, status, _ = run_child(partial(history.carry_out, root), fault, root=root)
    others = {errno.EBUSY, errno.EIO} if fault.endswith("short") else {errno.EBUSY}
    complaints = judge_end(fault, reports, status, others)
    complaints += judge(history, root, steps_ended(reports))
    return 1, [f"{fault}: {text}" for text in complaints]


def fail_power(seed, root):
    """The power fails at some points of a history; each leaves several states of the disk."""
    history, chance = random_history(seed)
    complaints, states = [], 0
    act = partial(history.carry_out, root)
    for label, reports, state in states_without_power(root, act, chance, points=8, samples=5):
        states += 1
        put_state(state, root)
        result = judge(history, root, steps_ended(reports), damaged=None)
        complaints += [f"{label}: {text}" for text in result]
    return states, complaints


def flip(seed, root):
    """Bits or lengths of files change in a complete log."""
    chance = random.Random(seed + 1)
    history = History(seed)
    history.carry_out(root)
    if chance.random() < 0.5:
        PromptLog(root / "log", False).prune(None, 5.0)  # writes the index
    complaints = []
    files = sorted((root / "log").iterdir())
    originals = {path: path.read_bytes() for path in files}
    for turn in range(10):
        path = chance.choice(files)
        data = bytearray(originals[path])
        if chance.random() < 0.8 and data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif chance.random() < 0.5:
            del data[chance.randrange(len(data) + 1) :]
        else:
            data += chance.randbytes(200)
        path.write_bytes(data)
        result = judge(history, root, set(), damaged=True)
        complaints += [f"flip {turn} in {path.name}: {text}" for text in result]
        for other in (root / "log").iterdir():
            other.unlink()
        for other, content in originals.items():
            other.write_bytes(content)
    return 10, complaints


def race(seed, root):
    """Writers, a reader and a pruner of other processes at the same time; some are killed."""
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
        if status not in (0, KILLED):
            complaints.append(f"a process ended with {status}: {ended[-1:]}")
    for tokens in prompts:
        bad, wrong = wrong_records(match(reader, tokens), tokens)
        complaints += wrong + ([f"damaged: {bad}"] if bad else [])
    history = histories[0]
    return 1, complaints + judge(history, root, set())


KINDS = {
    "fail_calls": partial(disturb, choose=choose_fault),
    "kill": partial(disturb, choose=choose_kill),
    "fail_power": fail_power,
    "flip": flip,
    "race": race,
}

if __name__ == "__main__":
    run_program(KINDS, hint="store")
