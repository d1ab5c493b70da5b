"""Prompt logs under faults: each seed is a random history, with one fault in it.

    LD_PRELOAD=shim.so python prompt_faults.py KIND FIRST COUNT

A child makes random puts, marks, matches and evictions on a log, and reports each that returned.
One call fails in it, or it is killed. Its parent then reads the folder as a new process would. It
prints one JSON line: the number of states, and complaints. KIND is one of the functions of KINDS.
"""

import ctypes
import errno
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import prompt_model
import replay
from prompt_model import BLOCK, FINGERPRINT, match, put, wrong_records

from mlstate._core import PromptLog
from mlstate.errors import FormatError, StoreError

SHIM = ctypes.CDLL(None)
SECONDS = 20  # until a child hangs

# (call, errors) that a history is disturbed by.
ERRORS = {
    "open": ["EIO", "EMFILE", "EACCES"],
    "open_folder": ["EIO", "EMFILE"],
    "create": ["ENOSPC", "EIO", "EMFILE", "EROFS"],
    "close": ["EIO"],
    "close_read": ["EIO"],
    "pread": ["EIO", "EINTR", "short"],
    "write": ["ENOSPC", "EIO", "short"],
    "pwrite": ["ENOSPC", "EIO", "EDQUOT", "EINTR", "short", "after-EIO"],
    "truncate": ["EIO", "ENOSPC"],
    "fsync": ["EIO", "ENOSPC", "EINTR"],
    "fsync_folder": ["EIO", "ENOSPC"],
    "fdatasync": ["EIO", "ENOSPC", "EINTR"],
    "sync_file_range": ["EIO"],
    "rename": ["EIO", "ENOSPC", "after-EIO"],
    "unlink": ["EIO", "EACCES"],
    "stat": ["EIO", "EACCES"],
    "list": ["EIO", "ENOMEM"],
    "flock": ["EIO", "ENOLCK", "EINTR"],
    "unlock": ["EIO"],
}
KILLS = ["kill-before", "kill-after", "kill-half"]


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

    def carry_out(self, root, report):
        """Do all steps; call `report` with the number of each that ended."""
        log = PromptLog(f"{root}/log", True)
        report(-1, None)
        for number, step in enumerate(self.steps):
            try:
                log = self._do(log, root, *step)
                report(number, None)
            except (StoreError, OSError, MemoryError, FormatError) as error:
                report(number, error)

    def _do(self, log, root, name, tokens, end):
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


# ---- processes ----


def run_child(history, root, **settings):
    """Carry out a history under a fault; return (ended steps, errors, exit status)."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        status = 1
        try:
            for name, value in settings.items():
                os.environ[name] = value

            def report(number, error):
                text = None if error is None else [type(error).__name__, getattr(error, "errno", 0)]
                if error is None:
                    SHIM.mls_shim_note(f"{number}".encode())
                os.write(write_end, json.dumps([number, text]).encode() + b"\n")

            SHIM.mls_shim_arm()
            try:
                history.carry_out(root, report)
            except (StoreError, OSError) as error:
                report(-2, error)
            SHIM.mls_shim_disarm()
            status = 0
        except BaseException as error:
            os.write(write_end, json.dumps([-3, [repr(error), 0]]).encode() + b"\n")
        os._exit(status)
    os.close(write_end)
    text, deadline = b"", time.monotonic() + SECONDS
    os.set_blocking(read_end, False)
    status = None
    while status is None:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = "hang"
        else:
            time.sleep(0.0005)
    with os.fdopen(read_end, "rb") as pipe:
        os.set_blocking(pipe.fileno(), True)
        text = pipe.read()
    reports = [json.loads(line) for line in text.splitlines()]
    ended = {number for number, error in reports if error is None}
    return ended, [report for report in reports if report[1]], status


def shim_settings(root, fault="", log=""):
    return {
        "MLS_FAULT_ROOT": str(root), "MLS_FAULT_SYNC": "no", "MLS_FAULT": fault,
        "MLS_FAULT_HINT": "store", "MLS_FAULT_LOG": str(log),
    }  # fmt: skip


def judge_end(fault, errors, status):
    """Complaints about how the child ended."""
    how = fault.rpartition(":")[2]
    complaints = []
    if status not in (0, -signal.SIGKILL) or (status and not how.startswith("kill")):
        complaints.append(f"ended with {status}: {errors}")
    number = errno.EIO if how == "short" else getattr(errno, how.removeprefix("after-"), None)
    expected = {number, errno.EBUSY}
    for _, (name, raised) in errors:
        good = name.startswith(("Store", "PermissionError")) and raised in expected
        if not good and (name, how) not in (("MemoryError", "ENOMEM"), ("FormatError", "short")):
            complaints.append(f"raised {name} with errno {raised}")
    return complaints


def fail_calls(seed, root):
    """One call fails once, or from then on."""
    chance = random.Random(seed + 1)
    history = History(seed, budget=chance.random() < 0.3)
    call = chance.choice(list(ERRORS))
    how = chance.choice(ERRORS[call])
    onward = "+" if how != "EINTR" and chance.random() < 0.2 else ""  # else it never ends
    fault = f"{call}:{chance.randint(1, 12)}{onward}:{how}"
    ended, errors, status = run_child(history, root, **shim_settings(root, fault))
    complaints = judge_end(fault, errors, status) + judge(history, root, ended)
    return 1, [f"{fault}: {text}" for text in complaints]


def kill(seed, root):
    """The process is killed at a change of a file."""
    chance = random.Random(seed + 1)
    history = History(seed, budget=chance.random() < 0.3)
    fault = f"change:{chance.randint(1, 40)}:{chance.choice(KILLS)}"
    ended, errors, status = run_child(history, root, **shim_settings(root, fault))
    complaints = judge_end(fault, errors, status) + judge(history, root, ended)
    return 1, [f"{fault}: {text}" for text in complaints]


def fail_power(seed, root):
    """The power fails at some points of a history; each leaves several states of the disk."""
    chance = random.Random(seed + 1)
    history = History(seed, budget=chance.random() < 0.3)
    disk = replay.Disk(root)
    log = root.parent / f"{root.name}-recorded"
    run_child(history, root, **shim_settings(root, log=log))
    entries = replay.parse(log.read_bytes())
    log.unlink()
    points = set(chance.sample(range(len(entries)), min(8, len(entries))))
    complaints, states, ended = [], 0, set()
    for number, entry in enumerate(entries):
        disk.apply(entry)
        if entry.kind == "N":
            ended.add(int(entry.name))
        if number not in points:
            continue
        for state in replay.states(disk, chance, 5):
            states += 1
            place = root.parent / f"{root.name}-state"
            place.mkdir()
            replay.materialise(state, place)
            result = judge(history, place, ended, damaged=None)
            complaints += [f"power, entry {number} {entry}: {text}" for text in result]
            shutil.rmtree(place)
    return states, complaints


def flip(seed, root):
    """Bits or lengths of files change in a complete log."""
    chance = random.Random(seed + 1)
    history = History(seed)
    history.carry_out(root, lambda *_: None)
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
    children = []
    for history in histories:
        child = os.fork()
        if child == 0:
            try:
                history.carry_out(root, lambda *_: None)
                os._exit(0)
            except BaseException as error:
                os.write(2, f"{error!r}\n".encode())
                os._exit(1)
        children.append(child)
    if chance.random() < 0.3:
        time.sleep(chance.random() * 0.004)
        os.kill(children[0], signal.SIGKILL)
    complaints = []
    reader = PromptLog(root / "log", False)
    prompts = [tokens for history in histories for tokens in prompts_of(history)]
    for tokens in prompts:
        result = match(reader, tokens)
        bad, wrong = wrong_records(result, tokens)
        complaints += wrong + ([f"damaged: {bad}"] if bad else [])
    for child in children:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in (0, -signal.SIGKILL):
            complaints.append(f"a process ended with {code}")
    for tokens in prompts:
        bad, wrong = wrong_records(match(reader, tokens), tokens)
        complaints += wrong + ([f"damaged: {bad}"] if bad else [])
    history = histories[0]
    return 1, complaints + judge(history, root, set())


KINDS = {function.__name__: function for function in (fail_calls, kill, fail_power, flip, race)}


def main():
    kind, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    states, complaints = 0, []
    with tempfile.TemporaryDirectory() as folder:
        seed = first
        while states < count:
            root = Path(folder) / f"case-{seed}"
            root.mkdir()
            done, result = KINDS[kind](seed, root)
            states += done
            complaints += [f"seed {seed}: {text}" for text in result]
            shutil.rmtree(root)
            seed += 1
            if len(complaints) > 50:
                break
    print(json.dumps({"states": states, "complaints": complaints, "seeds": [first, seed]}))


if __name__ == "__main__":
    main()
